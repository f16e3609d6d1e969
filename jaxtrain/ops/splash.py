"""Splash attention, JAX's fused kernel for TPUs.

Shapes: B batch, T positions, H query heads, G key and value heads, K features.
"""

import jax
import jax.numpy as jnp

from jaxtrain.decisions import Reason, Why
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.tiled import SAVED

# A tile's rows and columns fill the 128 lanes of a vector register.
LANES = 128

# Queries and keys per tile at most: what MaxText's configurations take (sa_block_q, sa_block_kv).
BLOCK = 512


def obstacle(mask: Mask, *, length: int | None, **_) -> Reason | None:
    """Returns the kernel's unmet need, if any; rows of ``length`` None stay unchecked."""
    del mask  # it has every mask without a bias
    tiled = length is None or length % LANES == 0
    return None if tiled else Why.WHOLE_TILES(lanes=LANES, length=length)


def splash_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    mask: Mask,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention as :func:`jaxtrain.ops.attention.attention` defines it, on one device.

    Args:
      q_BTHK, k_BTGK, v_BTGK: G divides H, and T is a multiple of 128.
      mask, softcap: as there.
      interpret: True runs the kernel's arithmetic without a TPU, slowly.
    """
    (_, T, H, K), dtype = q_BTHK.shape, q_BTHK.dtype
    # The scale itself, in bfloat16, would be off by the same part of a thousand everywhere.
    q_BTHK = (q_BTHK.astype(jnp.float32) * K**-0.5).astype(dtype)
    rows = tuple(x.transpose(0, 2, 1, 3) for x in (q_BTHK, k_BTGK, v_BTGK))
    if mask.segments is not None:
        rows += (_kernels().SegmentIds(mask.segments, mask.segments),)
    kernel = _kernel(T, H, mask, softcap=softcap, interpret=interpret)
    return jax.vmap(kernel)(*rows).transpose(0, 2, 1, 3)


def _kernels():
    """JAX's module of the kernel, imported where it is used: it takes 0.4 s."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention


def _kernel(T: int, H: int, mask: Mask, *, softcap: float | None, interpret: bool):
    """Maps q [H, T, K], k and v [G, T, K] and segments to [H, T, K]; the scale is the caller's."""
    library = _kernels()
    seen = (library.CausalMask if mask.causal else library.FullMask)((T, T))
    if (window := mask.window) is not None:
        sides = (window - 1, 0 if mask.causal else window - 1)
        seen = library.LocalMask((T, T), window_size=sides, offset=0)
    block = max(size for size in range(LANES, BLOCK + 1, LANES) if T % size == 0)
    blocks = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return library.make_splash_mha(
        library.MultiHeadMask([seen] * H),
        block_sizes=library.BlockSizes(**dict.fromkeys(blocks, block)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=SAVED[0],
        interpret=interpret,
    )
