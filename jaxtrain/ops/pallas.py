"""JAX's Pallas attention for GPUs, for what cuDNN does not take and for packed rows.

cuDNN is given the mask of packed documents as an array [B, 1, T, T]; this kernel takes document
numbers and makes its mask tile by tile. JAX 0.12 deprecates it (for tokamax); where it is gone,
asking for it by name is refused, and nothing else chooses it.

Shapes: B batch, T positions, H query heads, G key and value heads, K features.
"""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.ops.tiled import SAVED

# Queries and keys per tile, forward and backward; the kernel's own 128 does not fit the shared
# memory of every GPU in float32.
BLOCK, BLOCK_BACKWARD = 64, 32
WIDEST = 128


def obstacle(
    *,
    head_dim: int,
    length: int | None,
    window: int | None = None,
    softcap: float | None = None,
    **_,
) -> str | None:
    """Says what keeps the kernel from running, as the end of a sentence "pallas needs ...".

    Args:
      head_dim: features of a head, K.
      length: positions of a row, T; None leaves them unchecked.
      window: how far a position sees, which the kernel cannot limit.
      softcap: of scores, which it has not.
    """
    if window is not None:
        return f"attention without a window, and it is {window}"
    if softcap is not None:
        return f"scores without a soft cap, and it is {softcap}"
    if not _is_there():
        return f"a kernel that jax {jax.__version__} lacks"
    if head_dim > WIDEST:
        return f"heads up to {WIDEST} wide, and they are {head_dim}"
    if length is not None and length % BLOCK:
        return f"rows whose length is a multiple of {BLOCK}, and it is {length}"
    return None


def pallas_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
    *,
    causal: bool,
    window: None = None,
    softcap: None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention as :func:`jaxtrain.ops.attention.attention` defines it, on one device.

    Keys and values of shared heads are repeated for the kernel, which has one per query head.

    Args:
      q_BTHK, k_BTGK, v_BTGK: G divides H, and T is a multiple of 64.
      segments_BT, causal: as there.
      window, softcap: None, for it has neither.
      interpret: True runs the kernel's arithmetic without a GPU, slowly.
    """
    del window, softcap
    with warnings.catch_warnings():  # of its end, in jax 0.12
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as library

    blocks = library.BlockSizes(
        block_q=BLOCK,
        block_k=BLOCK,
        block_q_dkv=BLOCK_BACKWARD,
        block_kv_dkv=BLOCK_BACKWARD,
        block_q_dq=BLOCK_BACKWARD,
        block_kv_dq=BLOCK_BACKWARD,
    )
    H, K = q_BTHK.shape[2:]
    k_BTHK, v_BTHK = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k_BTGK, v_BTGK))
    out_BTHK = library.mha(
        q_BTHK,
        k_BTHK,
        v_BTHK,
        segments_BT,
        sm_scale=K**-0.5,
        causal=causal,
        block_sizes=blocks,
        interpret=interpret,
    )
    return checkpoint_name(out_BTHK, SAVED[0])


def _is_there() -> bool:
    """Whether this JAX has the kernel, which is part of its experimental modules."""
    try:
        return importlib.util.find_spec("jax.experimental.pallas.ops.gpu.attention") is not None
    except ModuleNotFoundError:  # a package above it
        return False
