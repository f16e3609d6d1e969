"""Attention kernels that XLA's partitioner cannot look into, placed on a mesh.

Such a kernel runs inside ``jax.shard_map``: each device takes its own rows of the batch and its own
heads, and nothing is exchanged.

Shapes: B batch, T positions, H query heads, G key and value heads, K features.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import free_axes


def obstacle(length: int | None, sizes: tuple[int, int, int, int]) -> str | None:
    """Says what of the ambient mesh keeps a kernel from running, as the end of "splash needs ...".

    Args:
      length: positions of a row, T.
      sizes: (B, H, G, keys of a row).
    """
    *shape, keys = sizes
    if keys != length:
        return f"as many keys as queries ({length}), and they are {keys}"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("context", 1) > 1:
        return "whole rows on every device, and mesh axis 'context' splits them"
    names = {"batch": "rows", "heads": "query heads", "kv_heads": "key heads"}
    for size, logical in zip(shape, names, strict=True):
        axes = free_axes(mesh, logical)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            return (
                f"{names[logical]} that mesh axes {' x '.join(axes)} of size {parts} divide, and "
                f"they are {size}"
            )
    return None


def on_each_device(
    kernel: Callable[..., jax.Array],
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
) -> jax.Array:
    """Returns what ``kernel`` makes of these, each device's part on that device."""
    mesh = jax.sharding.get_abstract_mesh()
    free = _free(mesh)
    if not free:
        return kernel(q_BTHK, k_BTGK, v_BTGK, segments_BT)
    batch, heads = (free_axes(mesh, logical) or None for logical in ("batch", "heads"))
    split = P(batch, None, heads, None)
    return jax.shard_map(
        kernel,
        in_specs=(split, split, split, None if segments_BT is None else P(batch, None)),
        out_specs=split,
        # All that surrounding code (a pipeline) has not taken: the kernel is compiled only where
        # no axis is left to the partitioner.
        axis_names=set(free),
        # The kernel does not say over which axes its results differ.
        check_vma=False,
    )(q_BTHK, k_BTGK, v_BTGK, segments_BT)


def _free(mesh) -> list[str]:
    """Axes of the ambient mesh that surrounding ``shard_map`` code has not taken over."""
    if mesh.empty:
        return []
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, kind in kinds if kind != AxisType.Manual]
