"""Routes of tokens to experts: a token's experts and weights are functions of that token alone.

The same token has the same experts on every mesh, in every microbatch and under every policy of
rematerialisation: logits are float32 products of the highest precision over the whole width, ties
go to the expert of the lower number, and what is chosen is kept for the backward pass.

Losses and loads are sums over each row, so that they are exact however a batch is cut.

Shapes: B batch, T positions, D width, E experts, J experts of a token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.ops.linear import apply_kernel
from jaxtrain.ops.numerics import wide
from jaxtrain.sharding.placement import constrain

# Weights of the chosen: probabilities among all experts; these divided by their sum, which is the
# softmax of the chosen logits alone (Mixtral); sigmoids of the logits divided by their sum, where
# the choice is by the sigmoid plus a balancing bias (DeepSeek-V3).
ROUTINGS = ("softmax", "softmax_normalised", "sigmoid")
# The gradient of a balancing bias is the load times this, which no norm of gradients sees.
TINY = 2.0**-30
# The name of what is chosen, which every policy of rematerialisation keeps.
ROUTES = "routes"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """The routes of tokens, and what a row's give.

    Args:
      experts_BTJ: int32, the most probable first; E, which is no expert, for padding.
      weights_BTJ: float32, what each expert's result is multiplied by; 0 for padding.
      balance_B: ``E sum_e f_e P_e`` of the share f of the row's choices, or of those that are
        given, and the row's mean probability P (Fedus et al. 2021,
        https://arxiv.org/abs/2101.03961), 1 where both are even.
      router_z_B: the mean of the squared log of the softmax's normaliser (Zoph et al. 2022,
        https://arxiv.org/abs/2202.08906).
      load_BE: how many choices of the row each expert has.
      balancing_B: 0, with gradients by the balancing bias and by the shares that are given
        (:func:`balancing_loss`).
    """

    experts_BTJ: jax.Array
    weights_BTJ: jax.Array
    balance_B: jax.Array
    router_z_B: jax.Array
    load_BE: jax.Array
    balancing_B: jax.Array | None

    def per_expert(self, experts: int) -> jax.Array:
        """The weights of all E experts, [B, T, E], 0 of those that are not chosen."""
        chosen_BTJE = self.experts_BTJ[..., None] == jnp.arange(experts)
        return jnp.where(chosen_BTJE, self.weights_BTJ[..., None], 0).sum(2)


def route(
    x_BTD: jax.Array,
    kernel_DE: Any,
    *,
    per_token: int,
    shift_E: jax.Array | None = None,
    routing: str = "softmax_normalised",
    groups: int = 1,
    groups_per_token: int = 1,
    scale: float = 1.0,
    bias_E: jax.Array | None = None,
    shares_E: jax.Array | None = None,
    live_BT: jax.Array | None = None,
    routes_BTJ: jax.Array | None = None,
) -> Routes:
    """Chooses ``per_token`` experts for every token.

    Args:
      x_BTD: tokens.
      kernel_DE: of the router, an array or a :class:`jaxtrain.ops.linear.Kernel`.
      per_token: J.
      shift_E: added to the logits.
      routing: one of :data:`ROUTINGS`.
      groups, groups_per_token: experts are chosen within so many of the groups of neighbours: those
        whose two best are best.
      scale: multiplies the weights.
      bias_E: added to the scores by which experts are chosen.
      shares_E: of the choices of a whole batch, such as that of the step before, in place of each
        row's in the loss of balance.
      live_BT: bool, False for padding, which no expert sees and nothing counts, whatever it is;
        None means all.
      routes_BTJ: int32, experts that were chosen before, such as by a sampler of the same weights;
        their weights are of the present probabilities.

    >>> kernel = jnp.array([[3.0, 0, 1], [1, 1, 0], [0, 5, 2]])
    >>> routes = route(jnp.eye(3)[None], kernel, per_token=2)
    >>> routes.experts_BTJ[0].tolist(), routes.load_BE.tolist()
    ([[0, 2], [0, 1], [1, 2]], [[2.0, 2.0, 2.0]])
    """
    B, T, _ = x_BTD.shape
    live_BT = jnp.ones((B, T), bool) if live_BT is None else live_BT
    live_BT1 = live_BT[..., None]
    # A padding token may be anything, and 0 x NaN is NaN: its gradient is cut here too.
    x_BTD = jnp.where(live_BT1, x_BTD, 0)
    dtype = wide(x_BTD.dtype)
    logits_BTE = apply_kernel(_exact, x_BTD.astype(dtype), kernel_DE)
    if shift_E is not None:
        logits_BTE += shift_E.astype(dtype)
    logits_BTE, E = constrain(logits_BTE, "batch", "sequence", None), logits_BTE.shape[-1]
    if routing == "sigmoid":
        by_BTE = scores_BTE = jax.nn.sigmoid(logits_BTE)
        probs_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
    else:
        by_BTE, probs_BTE = logits_BTE, jax.nn.softmax(logits_BTE)
        scores_BTE = probs_BTE
    if routes_BTJ is None:
        by_BTE = by_BTE if bias_E is None else by_BTE + bias_E.astype(dtype)
        by_BTE = jax.lax.stop_gradient(by_BTE)
        if groups > 1:
            by_BTE = _within_groups(by_BTE, groups, groups_per_token)
        routes_BTJ = jax.lax.top_k(by_BTE, per_token)[1]
    chosen_BTJ = checkpoint_name(jnp.where(live_BT1, routes_BTJ, E).astype(jnp.int32), ROUTES)
    is_chosen_BTJE = chosen_BTJ[..., None] == jnp.arange(E)
    weights_BTJ = jnp.where(is_chosen_BTJE, scores_BTE[:, :, None], 0).sum(-1)
    if routing != "softmax":
        weights_BTJ /= jnp.where(live_BT1, weights_BTJ.sum(-1, keepdims=True), 1)
    weights_BTJ *= scale
    load_BE = is_chosen_BTJE.sum((1, 2)).astype(dtype)
    tokens_B = jnp.maximum(live_BT.sum(1), 1).astype(dtype)
    probs_BE = jnp.where(live_BT1, probs_BTE, 0).sum(1) / tokens_B[:, None]
    z_BT = jnp.where(live_BT, jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)), 0)
    shares_BE = load_BE / (tokens_B * chosen_BTJ.shape[-1])[:, None]
    if shares_E is not None:
        shares_BE = jax.lax.stop_gradient(shares_E).astype(dtype)
    balance_B = E * (shares_BE * probs_BE).sum(-1)
    moved = [balancing_loss(load_BE, x_E) for x_E in (bias_E, shares_E) if x_E is not None]
    balancing_B = sum(moved) if moved else None
    of_rows = balance_B, z_BT.sum(1) / tokens_B, load_BE, balancing_B
    return Routes(chosen_BTJ, weights_BTJ, *of_rows)


def _within_groups(by_BTE: jax.Array, groups: int, per_token: int) -> jax.Array:
    """Returns what experts are chosen by, and less than anything outside of the chosen groups."""
    by_BTGE = by_BTE.reshape(*by_BTE.shape[:2], groups, -1)
    best_BTG = jax.lax.top_k(by_BTGE, 2)[0].sum(-1)
    chosen_BTJ = jax.lax.top_k(best_BTG, per_token)[1]
    is_chosen_BTG = (chosen_BTJ[..., None] == jnp.arange(groups)).any(2)
    return jnp.where(is_chosen_BTG[..., None], by_BTGE, -jnp.inf).reshape(by_BTE.shape)


def _exact(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.matmul(x, kernel.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


def balancing_loss(load_BE: jax.Array, bias_E: jax.Array) -> jax.Array:
    """Returns zeros [B], whose gradient by the bias is the load, times :data:`TINY`.

    >>> load = jnp.array([[1.0, 3.0]])
    >>> jax.grad(lambda bias: balancing_loss(load, bias).sum())(jnp.zeros(2)) / TINY
    Array([1., 3.], dtype=float32)
    """
    zero_E = (bias_E - jax.lax.stop_gradient(bias_E)).astype(load_BE.dtype)
    return TINY * (jax.lax.stop_gradient(load_BE) * zero_E).sum(-1)
