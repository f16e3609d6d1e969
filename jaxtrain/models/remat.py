"""What a block keeps for its backward pass, by name: the one list of rematerialisation policies.

==============  ==================================================================================
name            kept per layer; the rest is computed again
==============  ==================================================================================
none            everything
dots            the results of dense layers and of attention
offload         the same, in the host's memory: copied there as they are made, and back as needed
save_attention  the block's input and the result of attention (so that its kernel runs once)
full            the block's input
==============  ==================================================================================

On a CPU, whose memory is the host's, offload is dots. What cuDNN's kernel keeps has no name in JAX:
it is known by its primitive, and runs again under offload.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.ops.tiled import SAVED

REMAT = ("none", "dots", "offload", "save_attention", "full")


def rematerialise(name: str, block: Callable[..., Any], *, prevent_cse: bool) -> Callable[..., Any]:
    """Returns ``block`` with a backward pass that keeps what the policy says.

    Args:
      name: one of :data:`REMAT`.
      block: any function, whose attention is :func:`jaxtrain.ops.attention.attention`.
      prevent_cse: False where forward and backward pass are in different loops, and no common
        subexpression can undo the rematerialisation.
    """
    if name == "none":
        return block
    return jax.checkpoint(block, policy=_policy(name), prevent_cse=prevent_cse)


def _policy(name: str) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    if name == "full":
        return policies.nothing_saveable
    if name == "save_attention":
        return _attention(policies.save_only_these_names(*SAVED))
    # Products with weights have no batch dimensions; those inside attention do.
    if name == "dots":
        names = policies.save_only_these_names(*SAVED)
        return policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, _attention(names)
        )
    names = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(SAVED),
        offload_src="device",
        offload_dst="pinned_host",
    )
    dots = policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def offload(primitive, *args, **params):
        return (names if primitive.name == "name" else dots)(primitive, *args, **params)

    return offload


def _attention(names: Callable[..., Any]) -> Callable[..., Any]:
    """Also keeps the results of cuDNN's kernel."""

    def keep(primitive, *args, **params):
        fused = primitive.name.startswith("dot_product_attention")
        return fused or names(primitive, *args, **params)

    return keep
