"""What stands for cuDNN's attention in a program that is compiled for a GPU that is not here.

It has arrays of the sizes of the kernel's, which live as long, and none of its work: memory is that
of the program which will run (an H100's to 7 %, planning's README), and time is not asked of it.

Shapes: B batch, T queries, S keys, H query heads, G key and value heads, K features.
"""

import jax
import jax.numpy as jnp

from jaxtrain.ops.mask import Mask


def stand_in(q_BTHK, k_BSGK, v_BSGK, mask: Mask, *, softcap: None) -> jax.Array:
    """Takes what cuDNN's kernel takes, and returns an array like ``q_BTHK``, whose numbers mean
    nothing."""
    del softcap  # the kernel has none
    bias_BTT = None
    if (segments_BT := mask.segments) is not None:
        same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
        bias_BTT = jax.lax.optimization_barrier(jnp.where(same_BTT, 0, -1).astype(q_BTHK.dtype))
    return _kernel(q_BTHK, k_BSGK, v_BSGK, bias_BTT)


@jax.custom_vjp
def _kernel(q_BTHK, k_BSGK, v_BSGK, bias_BTT):
    return _forward(q_BTHK, k_BSGK, v_BSGK, bias_BTT)[0]


def _forward(q_BTHK, *others):
    # Held apart from what is around, as a kernel is.
    log_sums_BHT = q_BTHK.astype(jnp.float32).sum(-1).swapaxes(1, 2)
    kept = jax.lax.optimization_barrier((q_BTHK + _of(*others, like=q_BTHK), log_sums_BHT))
    return kept[0], (q_BTHK, *others, *kept)


def _backward(saved, d_out_BTHK):
    *given, out_BTHK, log_sums_BHT = saved
    # Gradients of queries are summed in float32.
    sums_BTHK = (given[0] * d_out_BTHK).astype(jnp.float32)
    sums_BTHK = jax.lax.optimization_barrier(sums_BTHK)
    of_all = _of(sums_BTHK, out_BTHK, log_sums_BHT, like=sums_BTHK)
    return tuple(None if x is None else x * of_all.astype(x.dtype) for x in given)


_kernel.defvjp(_forward, _backward)


def _of(*arrays, like):
    """A number that depends on all elements of some arrays."""
    return sum(x.astype(like.dtype).mean() for x in arrays if x is not None)
