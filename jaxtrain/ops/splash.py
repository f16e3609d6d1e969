"""Splash attention, JAX's fused kernel for TPUs, placed on a mesh.

A Pallas kernel is opaque to XLA's partitioner, so it runs inside ``jax.shard_map``: each device
takes its own rows of the batch and its own heads, and nothing is exchanged.

Shapes: B batch, T positions, H query heads, G key and value heads, K features.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.sharding import Rules

# A tile's rows and columns fill the 128 lanes of a vector register.
LANES = 128

# Queries and keys per tile at most: what MaxText's configurations take (sa_block_q, sa_block_kv).
BLOCK = 512


def obstacle(*, length: int | None, sizes: tuple[int, int, int, int] | None = None) -> str | None:
    """Says what keeps the kernel from running, as the end of a sentence "splash needs ...".

    Args:
      length: positions of a row, T; None leaves them unchecked.
      sizes: (B, H, G, keys of a row), checked against the ambient mesh; None leaves them unchecked.
    """
    if length is not None and length % LANES:
        return f"rows whose length is a multiple of {LANES}, and it is {length}"
    if sizes is None:
        return None
    *shape, keys = sizes
    if keys != length:
        return f"as many keys as queries ({length}), and they are {keys}"
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("context", 1) > 1:
        return "whole rows on every device, and mesh axis 'context' splits them"
    names = {"batch": "rows", "heads": "query heads", "kv_heads": "key heads"}
    for size, logical in zip(shape, names, strict=True):
        axes = _axes(mesh, logical)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            return (
                f"{names[logical]} that mesh axes {' x '.join(axes)} of size {parts} divide, and "
                f"they are {size}"
            )
    return None


def splash_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    causal: bool,
    segments_BT: jax.Array | None,
    saved_name: str,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention as :func:`jaxtrain.ops.attention.attention` defines it.

    Args:
      q_BTHK, k_BTGK, v_BTGK: G divides H, and T is a multiple of 128.
      causal: position t sees positions up to t.
      segments_BT: int32 document numbers, or None.
      saved_name: name of what the backward pass needs, for rematerialisation policies.
      interpret: True runs the kernel's arithmetic without a TPU, slowly.

    Returns:
      [B, T, H, K] in the dtype of ``q_BTHK``.
    """

    def on_one_device(q_BTHK, k_BTGK, v_BTGK, segments_BT):
        (_, T, H, K), dtype = q_BTHK.shape, q_BTHK.dtype
        # The scale itself, in bfloat16, would be off by the same part of a thousand everywhere.
        q_BTHK = (q_BTHK.astype(jnp.float32) * K**-0.5).astype(dtype)
        rows = tuple(x.transpose(0, 2, 1, 3) for x in (q_BTHK, k_BTGK, v_BTGK))
        if segments_BT is not None:
            rows += (_kernels().SegmentIds(segments_BT, segments_BT),)
        kernel = _kernel(T, H, causal=causal, saved_name=saved_name, interpret=interpret)
        return jax.vmap(kernel)(*rows).transpose(0, 2, 1, 3)

    mesh = jax.sharding.get_abstract_mesh()
    free = _free(mesh)
    if not free:
        return on_one_device(q_BTHK, k_BTGK, v_BTGK, segments_BT)
    batch, heads = (_axes(mesh, logical) or None for logical in ("batch", "heads"))
    split = P(batch, None, heads, None)
    return jax.shard_map(
        on_one_device,
        in_specs=(split, split, split, None if segments_BT is None else P(batch, None)),
        out_specs=split,
        # All that surrounding code (a pipeline) has not taken: the kernel is compiled only where
        # no axis is left to the partitioner.
        axis_names=set(free),
        # The kernel does not say over which axes its results differ.
        check_vma=False,
    )(q_BTHK, k_BTGK, v_BTGK, segments_BT)


def _kernels():
    """JAX's module of the kernel, imported where it is used: it takes 0.4 s."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention


def _kernel(T: int, H: int, *, causal: bool, saved_name: str, interpret: bool):
    """Maps q [H, T, K], k and v [G, T, K] and segments to [H, T, K]; the scale is the caller's."""
    library = _kernels()
    mask = (library.CausalMask if causal else library.FullMask)((T, T))
    block = max(size for size in range(LANES, BLOCK + 1, LANES) if T % size == 0)
    return library.make_splash_mha(
        library.MultiHeadMask([mask] * H),
        block_sizes=library.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=saved_name,
        interpret=interpret,
    )


def _free(mesh) -> list[str]:
    """Axes of the ambient mesh that surrounding ``shard_map`` code has not taken over."""
    if mesh.empty:
        return []
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, kind in kinds if kind != AxisType.Manual]


def _axes(mesh, logical: str) -> tuple[str, ...]:
    """Free mesh axes, of size above 1, that carry a logical axis."""
    free = _free(mesh)
    return tuple(axis for axis in Rules().mesh_axes(logical, mesh) if axis in free) if free else ()
