"""The decoder's layers as Flax NNX modules.

Nothing else in the package touches NNX: :func:`pure` splits a module once into a static definition
and a plain nested dict of arrays, and :func:`apply` calls the definition with such a dict.

Modules compute in the dtype of their parameters; norms, softmax and rotary angles are float32.

Shapes: B batch, T positions, N = B * T tokens, D width, F hidden width, H query heads, G key and
value heads, K features per head, V rows of the token table.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.config import GPTConfig
from jaxtrain.ops.activations import gelu, swiglu
from jaxtrain.ops.norms import layer_norm, rms_norm
from jaxtrain.ops.rotary import rotate
from jaxtrain.parallel.placement import constrain, free_axes, in_shard_map

INIT_STD = 0.02

# (q_BTHK, k_BTGK, v_BTGK) -> (out_BTHK, anything): training attends to the row itself, generation
# to a cache that it hands back.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def pure(module: type[nnx.Module], config: GPTConfig, rng: jax.Array) -> dict[str, Any]:
    """Returns a new module's parameters as a plain nested dict of float32 arrays."""
    return nnx.to_pure_dict(nnx.state(module(config, rngs=nnx.Rngs(rng))))


def apply(module: type[nnx.Module], config: GPTConfig, params: dict[str, Any]) -> nnx.Module:
    """Returns ``module`` with ``params`` in place of its own, ready to be called."""
    return nnx.merge(_definition(module, config), params)


@functools.cache
def _definition(module: type[nnx.Module], config: GPTConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))[0]


class Embed(nnx.Module):
    """Token table [V, D] and, in the GPT-2 form, position table [T, D]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        table_VD = INIT_STD * jax.random.normal(
            rngs.params(), (config.padded_vocab, config.width), jnp.float32
        )
        # Rows of padding are never looked up: zero keeps them out of every norm of the parameters.
        is_token = jnp.arange(config.padded_vocab)[:, None] < config.vocab_size
        self.tokens = nnx.Param(jnp.where(is_token, table_VD, 0.0))
        if config.positions == "learned":
            shape = (config.seq_len, config.width)
            self.positions = nnx.Param(
                INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)
            )
        self.learned = config.positions == "learned"

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        # A table split along its width is gathered first: rows are split over the same devices.
        # Inside a pipeline it is gathered whole: there XLA's partitioner for TPU aborts on a lookup
        # that is split by vocabulary and by rows.
        rows = None if in_shard_map() else "vocab"
        x_BTD = _lookup(constrain(self.tokens[...], rows, None), tokens_BT)
        if not self.learned:
            return x_BTD
        return x_BTD + _lookup(constrain(self.positions[...], None, None), positions_BT)


class Attention(nnx.Module):
    """Multi-head attention with grouped keys and values."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        width, inner = config.width, config.kv_heads * config.head_dim
        self.q = _dense(config, width, width, rngs)
        self.k = _dense(config, width, inner, rngs)
        self.v = _dense(config, width, inner, rngs)
        self.out = _dense(config, width, width, rngs, std=_residual_std(config))

    def __call__(self, x_BTD: jax.Array, angles, attend: Attend) -> tuple[jax.Array, Any]:
        B, T, D = x_BTD.shape
        # Every dense layer sees [N, D]: with [B, T, D] the weight's gradient transposes and copies
        # on CPU, at twice the time.
        x_ND = x_BTD.reshape(B * T, D)
        _check_heads(D // self.head_dim)
        q, k, v = (
            constrain(
                dense(x_ND).reshape(B, T, -1, self.head_dim), "batch", "sequence", heads, None
            )
            for dense, heads in ((self.q, "heads"), (self.k, "kv_heads"), (self.v, "kv_heads"))
        )
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        out_BTHK, extra = attend(q, k, v)
        return self.out(out_BTHK.reshape(B * T, -1)).reshape(B, T, D), extra


def _check_heads(heads: int) -> None:
    """Raises where the mesh is to split heads and cannot: every device would do all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = free_axes(mesh, "heads")
    if heads % (parts := math.prod(mesh.shape[axis] for axis in axes)):
        raise ValueError(
            f"{heads} attention heads are not divisible by mesh axis {' x '.join(axes)} of size "
            f"{parts}: use a divisor of {heads}, or map 'heads' to None in Rules(axes=...)"
        )


class Norm(nnx.Module):
    """LayerNorm or RMSNorm; statistics are float32."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs | None = None) -> None:
        self.form, self.eps = config.norm, config.norm_eps
        self.scale = nnx.Param(jnp.ones(config.width, jnp.float32))
        biased = config.bias and config.norm == "layernorm"
        self.bias = nnx.Param(jnp.zeros(config.width, jnp.float32)) if biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.form == "rmsnorm":
            return rms_norm(x, self.scale[...], eps=self.eps)
        bias_D = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias_D, eps=self.eps)


class MLP(nnx.Module):
    """GELU (GPT-2, tanh approximation) or SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate = _dense(config, config.width, config.mlp_width, rngs)
        self.up = _dense(config, config.width, config.mlp_width, rngs)
        self.down = _dense(config, config.mlp_width, config.width, rngs, std=_residual_std(config))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        up_NF = constrain(self.up(x_ND), "tokens", "mlp")
        if self.gated:
            hidden_NF = swiglu(constrain(self.gate(x_ND), "tokens", "mlp"), up_NF)
        else:
            hidden_NF = gelu(up_NF)
        return self.down(hidden_NF).reshape(x_BTD.shape)


class Block(nnx.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.norm_attn = Norm(config)
        self.attn = Attention(config, rngs=rngs)
        self.norm_mlp = Norm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, angles, attend: Attend, *, rng: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        branch_BTD, extra = self.attn(self.norm_attn(x_BTD), angles, attend)
        x_BTD += drop(branch_BTD, self.dropout, _fold(rng, 0))
        x_BTD += drop(self.mlp(self.norm_mlp(x_BTD)), self.dropout, _fold(rng, 1))
        return constrain(x_BTD, "batch", "sequence", None), extra


class Head(nnx.Module):
    """Untied output projection [D, V]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.width, config.padded_vocab)
        kernel_DV = INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)
        is_token = jnp.arange(config.padded_vocab) < config.vocab_size
        self.kernel = nnx.Param(jnp.where(is_token, kernel_DV, 0.0))


def drop(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Inverted dropout; ``rng`` None, or rate 0, leaves ``x`` alone."""
    if rng is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def _fold(rng: jax.Array | None, index: int) -> jax.Array | None:
    return None if rng is None else jax.random.fold_in(rng, index)


def _dense(config: GPTConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, std: float = INIT_STD):
    init = nnx.initializers.normal(std)
    return nnx.Linear(inputs, outputs, use_bias=config.bias, kernel_init=init, rngs=rngs)


def _residual_std(config: GPTConfig) -> float:
    # 2 L branches are added to the residual stream: this keeps its variance from growing with L.
    return INIT_STD / (2 * config.layers) ** 0.5


def _lookup(table_VD: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a table, whose gradient is summed in float32 whatever the table's dtype."""
    wide = jnp.promote_types(table_VD.dtype, jnp.float32)
    return table_VD[indices] if table_VD.dtype == wide else _lookup_narrow(table_VD, indices)


@jax.custom_vjp
def _lookup_narrow(table_VD: jax.Array, indices: jax.Array) -> jax.Array:
    # A frequent token's row is a sum of thousands: in bfloat16 it would stop growing at 256 terms.
    return table_VD[indices]


def _lookup_forward(table_VD, indices):
    return table_VD[indices], (indices, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _lookup_backward(saved, d_rows):
    indices, like = saved
    zeros = jnp.zeros((like.shape[0], d_rows.shape[-1]), jnp.float32)
    return zeros.at[indices].add(d_rows.astype(jnp.float32)).astype(like.dtype), None


_lookup_narrow.defvjp(_lookup_forward, _lookup_backward)
