"""A layer's mixture of experts, and what its router adds to a residual stream and to the loss.

Shapes: B batch, T positions, D width, F hidden width, L layers, E experts, J experts of a token.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.loss import Hottest, WeightedLoss
from jaxtrain.models.config import INIT_STD, BlockConfig, before_stack
from jaxtrain.models.parts import dense, normal
from jaxtrain.ops.activations import GATED
from jaxtrain.ops.grouped import expert_mlp
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.remat import PRODUCT
from jaxtrain.ops.routing import Routes, route
from jaxtrain.sharding.placement import gather_sequence, scatter_sequence


class Experts(nnx.Module):
    """A router and the MLPs that it chooses of, whose kernels are stacked: ``up`` and ``gate``
    [E, D, F], ``down`` [E, F, D]. ``shares`` [E] are those of the last step's choices, where these
    are balanced."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.form = config.mlp
        self.how = {"per_token": config.experts_per_token, "routing": config.routing}
        self.how |= {"groups": config.groups, "groups_per_token": config.groups_per_token}
        self.how["scale"] = config.routed_scale
        width, hidden, E = config.width, config.mlp_width, config.experts
        # The bias is no part of the logits: it takes part in the choice alone. The shift is.
        self.router = dense(width, E, rngs, bias=config.routing == "sigmoid")
        self.router.shift = nnx.Param(jnp.zeros(E)) if config.bias else None
        by_step = config.balance_over == "step"
        self.shares = nnx.Param(jnp.full(E, 1 / E)) if by_step else None
        if config.mlp in GATED:
            self.gate = Kernels(normal(rngs, E, width, hidden), bias=config.bias)
        self.up = Kernels(normal(rngs, E, width, hidden), bias=config.bias)
        scale = config.residual_std / INIT_STD
        self.down = Kernels(scale * normal(rngs, E, hidden, width), bias=config.bias)

    @jax.named_scope("experts")
    def __call__(
        self, x_BTD: jax.Array, choose: Callable[..., Routes] = route
    ) -> tuple[jax.Array, Routes]:
        x_BTD = gather_sequence(x_BTD)
        kept = {
            "bias_E": self.router.bias,
            "shift_E": self.router.shift,
            "shares_E": self.shares,
        }
        kept = {name: x if x is None else x.get_value() for name, x in kept.items()}
        routes = choose(x_BTD, self.router.kernel.get_value(), **kept, **self.how)
        names = ("gate", "up", "down") if self.form in GATED else ("up", "down")
        weights = {name: getattr(self, name).kernel.get_value() for name in names}
        for name, kernel in weights.items():
            if not hasattr(kernel, "dtype"):
                raise ValueError(
                    f"parameter 'experts/{name}/kernel' is a {type(kernel).__name__} kernel, and "
                    "experts multiply arrays alone: narrow the pattern that chose it"
                )
        if self.up.bias is not None:
            entering = {name: getattr(self, name).bias for name in names if name != "down"}
            weights |= {f"{name}_bias": bias.get_value() for name, bias in entering.items()}
        y_BTD = expert_mlp(self.form, x_BTD, weights, routes.weights_BTJ, routes.experts_BTJ)
        if self.down.bias is not None:  # a product over all experts, most of whose gates are 0
            y_BTD += (
                routes.per_expert(weights["down"].shape[0]).astype(y_BTD.dtype)
                @ self.down.bias[...]
            )
        return checkpoint_name(scatter_sequence(y_BTD), PRODUCT), routes


class Kernels(nnx.Module):
    """Kernels of experts, stacked, and their biases."""

    def __init__(self, kernel: jax.Array, *, bias: bool) -> None:
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros((len(kernel), kernel.shape[-1]))) if bias else None


def upcycled(params: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns what the parameters of a model with so many experts begin as, all of them as the MLP
    of a dense one (Komatsuzaki et al. 2022, https://arxiv.org/abs/2212.05055), without routers.

    Args:
      params: of the dense model, arrays or what is read later (:class:`jaxtrain.hf.table.Weight`,
        which has a method ``repeated`` for it).
      count: E.

    >>> params = {"blocks": {"mlp": {"up": {"kernel": jnp.ones((2, 3, 4))}}}}
    >>> upcycled(params, 8)["blocks"]["experts"]["up"]["kernel"].shape
    (2, 8, 3, 4)
    """

    def repeated(x: Any) -> Any:
        if hasattr(x, "repeated"):
            return x.repeated(count)
        x = np.asarray(x)[:, None]  # of which each expert is a view
        return np.broadcast_to(x, (len(x), count, *x.shape[2:]))

    def grown(layer: Mapping[str, Any]) -> dict[str, Any]:
        if "mlp" not in layer:  # layers of several kinds, by their numbers
            return {number: grown(each) for number, each in layer.items()}
        layer = dict(layer)
        layer["experts"] = jax.tree.map(repeated, layer.pop("mlp"))
        return layer

    return dict(params) | {"blocks": grown(params["blocks"])}


def opened(config: Any, x_BTD: jax.Array, *, record: bool = False) -> Any:
    """The residual stream that the first layer reads: of a model with experts the hidden states,
    and room for what its routers give each row; with ``record`` for their choices too."""
    if (experts := config.block.experts) is None:
        return x_BTD
    B, T, _ = x_BTD.shape
    row_B = jnp.zeros(B, wide(x_BTD.dtype))
    layers = config.layers - before_stack(config)
    load_BLE = jnp.zeros((B, layers, experts), row_B.dtype)
    x = {"hidden": x_BTD, "balance": row_B, "router_z": row_B, "load": load_BLE}
    if config.block.routing == "sigmoid" or config.block.balance_over == "step":
        x["balancing"] = row_B
    shape = B, layers, T, config.block.experts_per_token
    return x | ({"routes": jnp.zeros(shape, row_B.dtype)} if record else {})


def hidden_states(x: Any) -> jax.Array:
    """The hidden states [B, T, D] of a residual stream."""
    return x["hidden"] if isinstance(x, Mapping) else x


def with_routes(x: Any, x_BTD: jax.Array, routes: Routes, index: int | jax.Array) -> Any:
    """The stream behind a layer: losses are summed over layers, loads and choices are by layer."""
    x = x | {
        "hidden": x_BTD,
        "balance": x["balance"] + routes.balance_B,
        "router_z": x["router_z"] + routes.router_z_B,
        "load": x["load"].at[:, index].set(routes.load_BE),
    }
    if "balancing" in x:
        x["balancing"] += routes.balancing_B
    if "routes" in x:
        x["routes"] = x["routes"].at[:, index].set(routes.experts_BTJ.astype(x["routes"].dtype))
    return x


def add_routers(config: Any, loss: WeightedLoss, x: Any, batch: Mapping[str, Any]) -> WeightedLoss:
    """Adds what the routers' losses are to a loss of tokens; without experts it is as it was.

    A row's count as often as its tokens. Their parts of the loss are metrics, as are the load of
    each expert (1 where all are chosen equally often) and, of the layer in which it is largest, the
    load of the hottest expert.
    """
    if not isinstance(x, Mapping):
        return loss
    tokens_B = batch["mask"].astype(x["balance"].dtype).sum(1)
    parts = {
        "balance_loss": config.balance * (x["balance"] * tokens_B).sum(),
        "router_z_loss": config.router_z * (x["router_z"] * tokens_B).sum(),
    }
    load_LE = jax.lax.stop_gradient(x["load"].sum(0))
    *_, T, _ = x["hidden"].shape
    live = (batch["segments"] > 0).sum() if "segments" in batch else tokens_B.size * T
    even = jnp.asarray(live, load_LE.dtype) * config.experts_per_token / config.experts
    metrics = {
        **jax.lax.stop_gradient(parts),
        "expert_load": (load_LE.mean(0), even),
        "hottest_expert": Hottest(load_LE),
    }
    total = loss.total + sum(parts.values())
    if "balancing" in x:
        total += x["balancing"].sum()
    return dataclasses.replace(loss, total=total, metrics={**loss.metrics, **metrics})
