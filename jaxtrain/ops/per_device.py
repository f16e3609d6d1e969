"""Attention kernels that XLA's partitioner cannot look into, placed on a mesh.

Such a kernel runs inside ``jax.shard_map``: each device takes its own rows of the batch and its own
heads, and nothing is exchanged.

Shapes: B batch, T queries, S keys, H query heads, G key and value heads, K features.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain.decisions import Reason, Why
from jaxtrain.ops.mask import Mask
from jaxtrain.sharding.placement import free_axes


def split_over(logical: str | None = None) -> tuple[tuple[str, ...], int]:
    """Axes of the ambient mesh, free of surrounding ``shard_map`` code, and the product of their
    sizes: those that carry a logical axis, or all."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = free_axes(mesh, logical)
    return axes, math.prod(mesh.shape[axis] for axis in axes)


def not_taken_over() -> set[str]:
    """All axes of the ambient mesh, of size 1 too, that no surrounding ``shard_map`` has taken."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {axis for axis, kind in kinds if kind != AxisType.Manual}


def obstacle(rows: int, heads: int) -> Reason | None:
    """Returns what a kernel on so many rows of a batch and query heads needs of the ambient mesh
    and lacks, if anything."""
    for size, logical, name in ((rows, "batch", "rows"), (heads, "attend_heads", "query heads")):
        axes, parts = split_over(logical)
        if size % parts:
            return Why.DIVISIBLE(what=name, axes=" x ".join(axes), parts=parts, size=size)
    return None


def repeated(x_BSGK: jax.Array, parts: int) -> jax.Array:
    """Returns keys or values each of whose heads stands as often as it takes for each of ``parts``
    devices to have those of its own query heads; gradients of the copies are summed."""
    G = x_BSGK.shape[2]
    return jnp.repeat(x_BSGK, math.lcm(G, parts) // G, axis=2) if G % parts else x_BSGK


def on_each_device(
    kernel: Callable[..., jax.Array],
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    mask: Mask,
) -> jax.Array:
    """Returns what ``kernel`` makes of these, each device's part on that device.

    The mask has document numbers of the queries at most, and no bias.
    """
    free = not_taken_over()
    if not free:
        return kernel(q_BTHK, k_BSGK, v_BSGK, mask)
    (batch, _), (heads, parts) = split_over("batch"), split_over("attend_heads")
    batch, heads = batch or None, heads or None
    split = P(batch, None, heads, None)
    k_BSGK, v_BSGK = (repeated(x, parts) for x in (k_BSGK, v_BSGK))
    return jax.shard_map(
        kernel,
        in_specs=(split, split, split, P(batch)),
        out_specs=split,
        # All that surrounding code (a pipeline) has not taken: the kernel is compiled only where
        # no axis is left to the partitioner.
        axis_names=free,
        # The kernel does not say over which axes its results differ.
        check_vma=False,
    )(q_BTHK, k_BSGK, v_BSGK, mask)
