"""The one list of rematerialisation policies: the values that a block keeps for its backward pass.

==============  ==================================================================================
name            kept per layer, besides the experts of its tokens; the rest is computed again
==============  ==================================================================================
none            everything
dots            the results of dense layers and of attention
offload         the same, in the host's memory: copied there as they are made, and back as needed
save_attention  the block's input and the result of attention (so that its kernel runs once)
full            the block's input
==============  ==================================================================================

Experts that are chosen again may be others, where two are almost equally probable.

On a CPU, whose memory is the host's, offload is dots. JAX has no name for the residuals of
cuDNN's kernel: it is recognised by its primitive, and runs again under offload.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.ops.routing import ROUTES
from jaxtrain.ops.tiled import SAVED

# Whether what is traced is inside :func:`rematerialise`; part of the key of JAX's caches.
rematerialised = jax.make_user_context(False)

# Entered with the policy of a layout, for layers that are part of an embedding.
layout_keeps = jax.make_user_context(None)

# The name of what :class:`jaxtrain.models.parts.Dense` computes.
PRODUCT = "product"

REMAT = ("none", "dots", "offload", "save_attention", "full")


def rematerialise(name: str, block: Callable[..., Any], *, prevent_cse: bool) -> Callable[..., Any]:
    """Returns ``block`` with a backward pass that keeps what the policy says.

    Args:
      name: one of :data:`REMAT`, but for none.
      block: any function, whose attention is :func:`jaxtrain.ops.attention.attention` and whose
        dense layers are :class:`jaxtrain.models.parts.Dense`.
      prevent_cse: False where forward and backward pass are in different loops, and no common
        subexpression can undo the rematerialisation.
    """

    def known(*args: Any) -> Any:
        with rematerialised(True):
            return block(*args)

    return jax.checkpoint(known, policy=_policy(name), prevent_cse=prevent_cse)


def keeping(name: str) -> Callable[..., Callable] | None:
    """Returns what :class:`jaxtrain.Stages` takes as ``remat``, by the name of a policy."""
    return None if name == "none" else functools.partial(rematerialise, name)


def _policy(name: str) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    if name == "full":
        return policies.save_only_these_names(ROUTES)
    if name == "save_attention":
        return _attention(policies.save_only_these_names(ROUTES, *SAVED))
    if name == "dots":
        return _attention(policies.save_only_these_names(PRODUCT, ROUTES, *SAVED))
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[ROUTES],
        names_which_can_be_offloaded=[PRODUCT, *SAVED],
        offload_src="device",
        offload_dst="pinned_host",
    )


def _attention(names: Callable[..., Any]) -> Callable[..., Any]:
    """Also keeps the results of cuDNN's kernel."""

    def keep(primitive, *args, **params):
        fused = primitive.name.startswith("dot_product_attention")
        return fused or names(primitive, *args, **params)

    return keep
