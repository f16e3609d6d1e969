"""Dense layers, norms and MLPs, of which blocks are made, as Flax NNX modules.

Modules compute in the dtype of their parameters; norms are float32. Wherever a kernel stands, any
:class:`jaxtrain.ops.linear.Kernel` may stand.

Shapes: B batch, T positions, N = B * T tokens, D width, F hidden width.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.models.config import INIT_STD, BlockConfig
from jaxtrain.ops.activations import GATED, activate
from jaxtrain.ops.linear import add_bias, matmul
from jaxtrain.ops.norms import layer_norm, rms_norm
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.remat import PRODUCT, rematerialised
from jaxtrain.sharding.placement import (
    constrain,
    gather_sequence,
    scatter_sequence,
    splits_residual,
    splits_rows,
)


class Dense(nnx.Linear):
    """NNX's dense layer, of tokens [N, D] or rows [B, T, D]; its kernel is any that :func:`matmul`
    takes.

    What rematerialisation policies keep of it is ``place`` of the product.
    """

    def __call__(self, x_ND: jax.Array, place: Callable = lambda y_NF: y_NF) -> jax.Array:
        return add_bias(self.product(x_ND, place), self.its_bias)

    def product(self, x_ND: jax.Array, place: Callable = lambda y_NF: y_NF) -> jax.Array:
        """The product without the bias."""
        return checkpoint_name(place(matmul(x_ND, self.kernel.get_value())), PRODUCT)

    @property
    def its_bias(self) -> jax.Array | None:
        """The bias [F], if there is one."""
        return None if self.bias is None else self.bias[...]


class Norm(nnx.Module):
    """LayerNorm or RMSNorm of the last axis, of ``config.width`` features unless told otherwise;
    statistics are float32."""

    def __init__(
        self, config: BlockConfig, features: int | None = None, *, rngs: nnx.Rngs | None = None
    ) -> None:
        self.form, self.eps, features = config.norm, config.norm_eps, features or config.width
        self.offset = 1.0 if config.norm_offset else 0.0
        self.scale = nnx.Param(jnp.full(features, 1.0 - self.offset, jnp.float32))
        biased = config.bias and config.norm == "layernorm"
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32)) if biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scale_D = self.scale[...]
        if self.offset:
            scale_D = self.offset + scale_D.astype(wide(scale_D.dtype))
        if self.form == "rmsnorm":
            return rms_norm(x, scale_D, eps=self.eps)
        bias_D = None if self.bias is None else self.bias[...]
        return layer_norm(x, scale_D, bias_D, eps=self.eps)

    def of_heads(self, q_BTHK: jax.Array) -> jax.Array:
        """Norms each head, or all together where there are as many features."""
        whole = self.scale.shape != q_BTHK.shape[3:]
        q = q_BTHK.reshape(*q_BTHK.shape[:2], -1) if whole else q_BTHK
        return self(q).reshape(q_BTHK.shape)


class MLP(nnx.Module):
    """Two dense layers around an activation, or three where it has a gate."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.form, width, hidden = config.mlp, config.width, config.mlp_width
        if config.mlp in GATED:
            self.gate = dense(width, hidden, rngs, bias=config.bias)
        self.up = dense(width, hidden, rngs, bias=config.bias)
        self.down = dense(hidden, width, rngs, bias=config.bias, std=config.residual_std)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        layers = (self.gate, self.up) if self.form in GATED else (self.up,)
        products = parts_of(x_BTD, *(layer.product for layer in layers))
        biases = [layer.its_bias for layer in layers]
        hidden = _hidden(activate(self.form, [*map(_hidden, products)], biases))
        return sum_of_parts(self.down, hidden.reshape(*x_BTD.shape[:2], -1))


def normal(rngs: nnx.Rngs, *shape: int) -> jax.Array:
    """Draws float32 values from N(0, 0.02)."""
    return INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)


def fold(rng: jax.Array | None, index: int) -> jax.Array | None:
    """Returns the key of one of several uses; None, which drops nothing, stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def dense(
    inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = True, std: float = INIT_STD
) -> Dense:
    """A dense layer whose kernel is drawn from N(0, std)."""
    init = nnx.initializers.normal(std)
    return Dense(inputs, outputs, use_bias=bias, kernel_init=init, rngs=rngs)


def parts_of(x_BTD: jax.Array, *layers: Callable) -> Sequence[jax.Array]:
    """Dense layers of the residual stream, or their products: each device's heads or features of
    all positions.

    Where the stream is split, what is gathered is not kept: the backward pass gathers it again.
    """

    def products(x_BTD: jax.Array) -> list[jax.Array]:
        x = rows(gather_sequence(x_BTD))
        return [layer(x) for layer in layers]

    if splits_residual(x_BTD.shape[1]) and not rematerialised.value:
        keep = jax.checkpoint_policies.save_only_these_names(PRODUCT)
        products = jax.checkpoint(products, policy=keep, prevent_cse=False)
    return products(x_BTD)


def sum_of_parts(layer: Dense, x_BTF: jax.Array) -> jax.Array:
    """A dense layer of each device's heads or features, summed into the residual stream."""
    B, T, _ = x_BTF.shape
    return layer(rows(x_BTF), lambda y: scatter_sequence(y.reshape(B, T, -1)))


def rows(x_BTD: jax.Array) -> jax.Array:
    """[N, D]: with [B, T, D] the weight's gradient transposes and copies on CPU, at twice the time.

    But [B, T, D] where a product's result is scattered over the sequence, or rows are split: tokens
    of several rows that are split are no contiguous part of them all, and would be gathered.
    """
    split = splits_rows(x_BTD.shape[1])
    return x_BTD if split else x_BTD.reshape(-1, x_BTD.shape[-1])


def _hidden(x: jax.Array) -> jax.Array:
    tokens = ("tokens",) if x.ndim == 2 else ("batch", "sequence")
    return constrain(x, *tokens, "mlp")
