"""A transformer's layers as Flax NNX modules, and one layer applied to whole rows.

:func:`pure` splits a module once into a static definition and a plain nested dict of arrays, and
:func:`apply` calls the definition with such a dict. A block depends on its
:class:`~jaxtrain.models.config.BlockConfig` alone, so that every model is made of the same ones.

Modules compute in the dtype of their parameters; norms, softmax and rotary angles are float32.
Wherever a kernel or a table stands, any :class:`jaxtrain.ops.linear.Kernel` may stand.

Shapes: B batch, T positions, N = B * T tokens, D width, F hidden width, H query heads, G key and
value heads, K features per head, V rows of the token table, L layers, E experts, J experts of a
token.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.loss import Hottest, WeightedLoss
from jaxtrain.models.config import INIT_STD, BlockConfig, TokenFields
from jaxtrain.ops.activations import ACTIVATIONS, GATED
from jaxtrain.ops.attention import attention, branch_shares
from jaxtrain.ops.cached import Tiles, chunk_attention
from jaxtrain.ops.grouped import expert_mlp
from jaxtrain.ops.linear import matmul, matmul_float32
from jaxtrain.ops.lookup import embed_lookup
from jaxtrain.ops.losses import cross_entropy
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.norms import layer_norm, rms_norm
from jaxtrain.ops.numerics import drop, wide
from jaxtrain.ops.per_device import split_over
from jaxtrain.ops.remat import PRODUCT, keeping, rematerialised
from jaxtrain.ops.rotary import rotary_angles, rotary_frequencies, rotate, sinusoidal_positions
from jaxtrain.ops.routing import Routes, route
from jaxtrain.sharding.placement import (
    check_length,
    constrain,
    gather_sequence,
    pin_residual,
    scatter_sequence,
    splits_residual,
    splits_rows,
)
from jaxtrain.stages import Stages
from jaxtrain.tree import named_leaves

# (q_BTHK, k_BTGK, v_BTGK) -> (out_BTHK, anything): training attends to the row itself, generation
# to a cache that it hands back.
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def pure(module: type[nnx.Module], config: Any, rng: jax.Array) -> dict[str, Any]:
    """Returns a new module's parameters as a plain nested dict of float32 arrays."""
    return nnx.to_pure_dict(nnx.state(module(config, rngs=nnx.Rngs(rng))))


def stacked(module: type[nnx.Module], config: Any, count: int, rng: jax.Array) -> dict[str, Any]:
    """Returns the parameters of ``count`` new modules, each leaf with a leading axis of them."""
    return jax.vmap(functools.partial(pure, module, config))(jax.random.split(rng, count))


def draw(
    config: Any, rng: jax.Array, *, embed: Any, head: Any = None, final_norm: bool = True
) -> dict[str, Any]:
    """Returns the parameters of a model of one stack: ``embed``, ``blocks`` and, where it has them,
    ``final_norm`` and ``head``, of the modules that are given."""
    rng_embed, rng_blocks, rng_head = jax.random.split(rng, 3)
    params = {
        "embed": pure(embed, config, rng_embed),
        "blocks": stacked(Block, config.block, config.layers, rng_blocks),
    }
    if final_norm:
        params["final_norm"] = pure(Norm, config.block, rng_head)
    return params if head is None else params | {"head": pure(head, config, rng_head)}


def normal(rngs: nnx.Rngs, *shape: int) -> jax.Array:
    """Draws float32 values from N(0, 0.02)."""
    return INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32)


def apply(module: type[nnx.Module], config: Any, *params: Mapping[str, Any]) -> nnx.Module:
    """Returns ``module`` with what is in ``params`` in place of its own, ready to be called."""
    return nnx.merge(_definition(module, config), *params)


@functools.cache
def parameter_sizes(init: Callable[[Any, jax.Array], Any], config: Any) -> Mapping[str, int]:
    """Counts the values of each parameter of a model by its path; nothing is computed."""
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    return {name: leaf.size for name, leaf in named_leaves(shapes).items()}


@functools.cache
def _definition(module: type[nnx.Module], config: Any) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))[0]


@functools.lru_cache
def parameter_count(init: Callable[[Any, jax.Array], Any], config: Any) -> int:
    """Counts a model's parameters, without padding of the vocabulary and a first norm not read.

    >>> from jaxtrain.models import decoder, encoder, encoder_decoder, vit
    >>> def count(module, *names):
    ...     return [module.parameter_count(module.PRESETS[name]()) for name in names]
    >>> count(decoder, "gpt2-124m", "llama-7b"), count(encoder, "bert-base", "modernbert-base")
    ([124439808, 6738415616], [109514298, 149655232])
    >>> count(encoder_decoder, "flan-t5-small")
    [76961152]
    >>> vit.parameter_count(vit.vit_base())
    86567656
    """
    sizes = parameter_sizes(init, config)
    count = sum(sizes.values()) - (0 if config.block.first_norm else config.width)
    if config.vocab_size is None:
        return count
    padded = sum(sizes.get(name, 0) for name in ("embed/tokens", "head/kernel", "head/bias"))
    return count - padded // config.padded_vocab * (config.padded_vocab - config.vocab_size)


def stages(config: Any, *, embed: Callable, head_loss: Callable, **parts: Any) -> Stages:
    """Returns a model as a pipeline takes it.

    Args:
      config: the model.
      embed, head_loss: :class:`Stages` takes them without their first argument, the config.
      parts: other fields; left out, one stack of layers in which rows attend to themselves.
    """

    def layer(layer_params, shared, x, batch, rng, index):
        packing = {f"{name}_BT": batch.get(name) for name in ("segments", "positions")}
        packing["routes_BLTJ"] = batch.get("routes")
        return block(config.block, layer_params, x, **packing, rng=rng, index=index)

    def enter(params, batch, rng):
        return opened(config, embed(config, params, batch, rng))

    return Stages(
        **{"block": layer, "shared": ()} | parts,
        embed=enter,
        head_loss=functools.partial(head_loss, config),
        row_wise=True,
        scan_unroll=config.scan_unroll,
        remat=keeping(config.remat),
    )


def block(
    config: BlockConfig,
    params: Mapping[str, Any],
    x_BTD: Any,
    *,
    segments_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    routes_BLTJ: jax.Array | None = None,
    rng: jax.Array | None = None,
    index: int | jax.Array = 0,
) -> Any:
    """One layer in which rows attend to themselves, [B, T, D] to [B, T, D].

    Args:
      config: the layer.
      params: its parameters, as :func:`pure` makes them for :class:`Block`.
      x_BTD: the residual stream, as :func:`opened` returns it.
      segments_BT: int32 document numbers, as for :func:`jaxtrain.ops.attention.attention`: without
        causality too, they keep padding, number 0, out of what is seen. No expert sees padding.
      positions_BT: int32, of rotary positions; None means 0 .. T - 1.
      routes_BLTJ: int32, experts that were chosen before, in place of the router's choice.
      rng: key of the layer; None means no dropout.
      index: number of the layer in the model, which says whether it has the window.
    """

    def attend(q_BTHK, k_BTGK, v_BTGK):
        # The two residual branches fold in 0 and 1.
        how = {"segments_BT": segments_BT, "rng": fold(rng, 2)}
        return row_attention(config, index, q_BTHK, k_BTGK, v_BTGK, **how), None

    x, x_BTD = x_BTD, hidden_states(x_BTD)
    check_length(x_BTD.shape[1])
    angles = row_angles(config, index, positions_BT, x_BTD.shape[1])
    choose = functools.partial(
        route,
        live_BT=None if segments_BT is None else segments_BT > 0,
        routes_BTJ=None if routes_BLTJ is None else routes_BLTJ[:, index],
    )
    layer = apply(Block, config, params)
    x_BTD, _, routes = layer(x_BTD, angles, attend, rng=rng, index=index, choose=choose)
    return x_BTD if routes is None else _with_routes(x, x_BTD, routes, index)


def opened(config: Any, x_BTD: jax.Array, *, record: bool = False) -> Any:
    """The residual stream that the first layer reads: of a model with experts the hidden states,
    and room for what its routers give each row; with ``record`` for their choices too."""
    if (experts := config.block.experts) is None:
        return x_BTD
    B, T, _ = x_BTD.shape
    row_B = jnp.zeros(B, wide(x_BTD.dtype))
    load_BLE = jnp.zeros((B, config.layers, experts), row_B.dtype)
    x = {"hidden": x_BTD, "balance": row_B, "router_z": row_B, "load": load_BLE}
    x |= {"balancing": row_B} if config.block.routing == "sigmoid" else {}
    shape = B, config.layers, T, config.block.experts_per_token
    return x | ({"routes": jnp.zeros(shape, row_B.dtype)} if record else {})


def hidden_states(x: Any) -> jax.Array:
    """The hidden states [B, T, D] of a residual stream."""
    return x["hidden"] if isinstance(x, Mapping) else x


def _with_routes(x: Any, x_BTD: jax.Array, routes: Routes, index: int | jax.Array) -> Any:
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


def is_local(config: BlockConfig, index: int | jax.Array) -> bool | jax.Array:
    """Whether layer ``index`` has the window: known while tracing where all layers are alike.

    >>> config = BlockConfig(width=8, heads=2, window=4, window_pattern=(True, False))
    >>> is_local(config, jnp.arange(3)).tolist()
    [True, False, True]
    """
    if config.window is None or all(config.window_pattern):
        return config.window is not None
    return jnp.array(config.window_pattern)[index % len(config.window_pattern)]


def row_attention(
    config: BlockConfig,
    index: int | jax.Array,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    rng: jax.Array | None = None,
) -> jax.Array:
    """Attention of rows to themselves, as layer ``index`` has it.

    Where some layers have a window, both forms are compiled, each with the mask and the tiles of
    its own, and a branch by the layer's number takes one of them. So a layer with a window costs
    what it would alone, in a scan over layers whose number no program knows beforehand, at any
    place that a pipeline cuts it; a window that is a number in the mask would make every layer
    compute the scores of all keys, and a pattern written out in the scan's body would hold stages
    to whole patterns. Dense layers, and what they exchange, stand outside of the branch: inside is
    what each device does by itself, or with others where a mesh axis ``context`` splits rows.

    Args:
      config, index: the layer.
      q_BTHK, k_BTGK, v_BTGK: queries, keys and values.
      segments_BT: int32 document numbers.
      rng: key for dropout; None means none.
    """
    local, pattern = is_local(config, index), config.window_pattern
    known = isinstance(local, bool)
    counts = map(pattern.count, (False, True))
    how = {"windowed": None if known else local, "leading": config.global_tokens or 0}
    mask = Mask(config.causal, config.window, segments_BT, **how)
    shares = contextlib.nullcontext() if known else branch_shares(*counts)
    with shares:
        return attention(
            q_BTHK,
            k_BTGK,
            v_BTGK,
            mask,
            scale=_scale(config),
            softcap=config.attention_softcap,
            dropout=config.attention_dropout,
            rng=rng,
            implementation=config.attention,
        )


def step_attention(
    config: BlockConfig, index: int | jax.Array, q_BCHK, k_BGCK, v_BGCK, start_B, tiles: Tiles
) -> jax.Array:
    """Attention of a chunk of each row to itself and to a cache, as layer ``index`` has it.

    Arguments are those of :func:`jaxtrain.ops.cached.chunk_attention`.
    """
    window = config.window
    if not isinstance(local := is_local(config, index), bool):
        # All of the cache is read in any case, and masked.
        window = jnp.where(local, window, jnp.iinfo(jnp.int32).max)
    form = {"window": window, "leading": config.global_tokens or 0}
    form |= {"scale": _scale(config), "softcap": config.attention_softcap}
    return chunk_attention(q_BCHK, k_BGCK, v_BGCK, start_B, tiles, **form)


def row_angles(
    config: BlockConfig, index: int | jax.Array, positions_BT: jax.Array | None, T: int
) -> Any:
    """Rotary angles of layer ``index`` at positions, by default 0 .. T - 1; None where there are
    none."""
    if config.rope_theta is None:
        return None
    positions_BT = jnp.arange(T)[None] if positions_BT is None else positions_BT
    frequencies = rotary_frequencies(
        config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling
    )
    magnitude = getattr(config.rope_scaling, "magnitude", 1.0)
    if config.local_rope_theta is not None:
        own = rotary_frequencies(config.head_dim, theta=config.local_rope_theta)
        local = is_local(config, index)
        frequencies = jnp.where(local, own, frequencies)
        magnitude = jnp.where(local, 1.0, magnitude).astype(frequencies.dtype)
    angles = rotary_angles(positions_BT, frequencies, magnitude)
    return tuple(constrain(x, "batch", "sequence", None) for x in angles)


def _scale(config: BlockConfig) -> float | None:
    """Returns the scale of attention scores; None where it is the default of attention."""
    scalar = config.query_pre_attn_scalar
    return None if scalar == config.head_dim else scalar**-0.5


def positions(config: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the batch's positions, [B, T] or [1, T]: by default 0 .. T - 1.

    Raises:
      ValueError: for rows longer than a table of learned positions.
    """
    length = batch["tokens"].shape[1]
    if config.positions == "learned" and length > config.seq_len:
        raise ValueError(
            f"rows of {length} tokens are longer than the {config.seq_len} learned positions; "
            "raise `seq_len` or shorten the rows"
        )
    return batch["positions"] if "positions" in batch else jnp.arange(length)[None]


class Embed(nnx.Module):
    """Token table [V, D] and, in the GPT-2 form, position table [T, D], or sinusoidal positions."""

    def __init__(self, config: TokenFields, *, rngs: nnx.Rngs) -> None:
        table_VD = normal(rngs, config.padded_vocab, config.width)
        # Rows of padding are never looked up: zero keeps them out of every norm of the parameters.
        is_token = jnp.arange(config.padded_vocab)[:, None] < config.vocab_size
        self.tokens = nnx.Param(jnp.where(is_token, table_VD, 0.0))
        self.learned = config.positions == "learned"
        if self.learned:
            self.positions = nnx.Param(normal(rngs, config.seq_len, config.width))
        self.theta = config.rope_theta if config.positions == "sinusoidal" else None
        self.factor = config.width**0.5 if config.embed_scale else None

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        x_BTD = embed_lookup(tokens_BT, self.tokens.get_value(), "vocab")
        if self.factor is not None:
            x_BTD *= jnp.asarray(self.factor, x_BTD.dtype)
        if self.theta is not None:
            of_BTD = sinusoidal_positions(positions_BT, x_BTD.shape[-1], theta=self.theta)
            return x_BTD + constrain(of_BTD, "batch", "sequence", None).astype(x_BTD.dtype)
        return (
            x_BTD + embed_lookup(positions_BT, self.positions.get_value())
            if self.learned
            else x_BTD
        )


class Dense(nnx.Linear):
    """NNX's dense layer, of tokens [N, D] or rows [B, T, D]; its kernel is any that :func:`matmul`
    takes.

    What rematerialisation policies keep of it is ``place`` of the product.
    """

    def __call__(self, x_ND: jax.Array, place: Callable = lambda y_NF: y_NF) -> jax.Array:
        y_NF = checkpoint_name(place(matmul(x_ND, self.kernel.get_value())), PRODUCT)
        if self.bias is None:
            return y_NF
        # In bfloat16 the bias's gradient would be rounded after every row that is added to it.
        bias_F, dtype = self.bias[...], jnp.result_type(y_NF, self.bias[...])
        return (y_NF.astype(wide(dtype)) + bias_F.astype(wide(dtype)).reshape(1, -1)).astype(dtype)


class Attention(nnx.Module):
    """Multi-head attention with grouped keys and values."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.head_dim = config.heads, config.head_dim
        width, inner = config.width, config.heads * config.head_dim
        shared = config.kv_heads * config.head_dim
        self.q = dense(width, inner, rngs, bias=config.qkv_bias)
        self.k = dense(width, shared, rngs, bias=config.qkv_bias)
        self.v = dense(width, shared, rngs, bias=config.qkv_bias)
        self.out = dense(inner, width, rngs, bias=config.bias, std=config.residual_std)
        whole = config.qk_norm == "whole"
        features = (inner, shared) if whole else (config.head_dim, config.head_dim)
        self.norm_q, self.norm_k = (Norm(config, n) if config.qk_norm else None for n in features)

    @jax.named_scope("attn")
    def __call__(
        self, x_BTD: jax.Array, angles, attend: Attend, memory_BSD: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Attends from ``x_BTD`` to itself, or to another sequence."""
        _check_heads(self.heads)
        if memory_BSD is None:
            memory_BSD, parts = x_BTD, _parts(x_BTD, self.q, self.k, self.v)
        else:
            parts = (*_parts(x_BTD, self.q), *_parts(memory_BSD, self.k, self.v))
        (B, T, _), S = x_BTD.shape, memory_BSD.shape[1]
        q, k, v = (
            constrain(y.reshape(B, length, -1, self.head_dim), "batch", "sequence", heads, None)
            for y, length, heads in zip(
                parts, (T, S, S), ("heads", "kv_heads", "kv_heads"), strict=True
            )
        )
        if self.norm_q is not None:
            q, k = self.norm_q.of_heads(q), self.norm_k.of_heads(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        out_BTHK, extra = attend(q, k, v)
        out_BTHK = constrain(out_BTHK, "batch", "sequence", "heads", None)
        return _sum_of_parts(self.out, out_BTHK.reshape(B, T, -1)), extra


def _check_heads(heads: int) -> None:
    """Raises where the mesh is to split heads and cannot: every device would do all of them."""
    axes, parts = split_over("heads")
    if heads % parts:
        raise ValueError(
            f"{heads} attention heads are not divisible by mesh axis {' x '.join(axes)} of size "
            f"{parts}: use a divisor of {heads}, or map 'heads' to None in Rules(axes=...)"
        )


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
        hidden = _hidden(ACTIVATIONS[self.form](*map(_hidden, _parts(x_BTD, *layers))))
        return _sum_of_parts(self.down, hidden.reshape(*x_BTD.shape[:2], -1))


class Experts(nnx.Module):
    """A router and the MLPs that it chooses of, whose kernels are stacked: ``up`` and ``gate``
    [E, D, F], ``down`` [E, F, D]."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.form, self.per_token = config.mlp, config.experts_per_token
        self.routing = config.routing
        width, hidden, E = config.width, config.mlp_width, config.experts
        # The bias is no part of the logits: it takes part in the choice alone.
        self.router = dense(width, E, rngs, bias=config.routing == "sigmoid")
        if config.mlp in GATED:
            self.gate = Kernels(normal(rngs, E, width, hidden))
        self.up = Kernels(normal(rngs, E, width, hidden))
        scale = config.residual_std / INIT_STD
        self.down = Kernels(scale * normal(rngs, E, hidden, width))

    @jax.named_scope("experts")
    def __call__(
        self, x_BTD: jax.Array, choose: Callable[..., Routes] = route
    ) -> tuple[jax.Array, Routes]:
        x_BTD = gather_sequence(x_BTD)
        how = {"per_token": self.per_token, "routing": self.routing}
        how["bias_E"] = None if self.router.bias is None else self.router.bias.get_value()
        routes = choose(x_BTD, self.router.kernel.get_value(), **how)
        names = ("gate", "up", "down") if self.form in GATED else ("up", "down")
        weights = {name: getattr(self, name).kernel.get_value() for name in names}
        y_BTD = expert_mlp(self.form, x_BTD, weights, routes.weights_BTJ, routes.experts_BTJ)
        return checkpoint_name(scatter_sequence(y_BTD), PRODUCT), routes


class Kernels(nnx.Module):
    """Kernels of several layers, stacked."""

    def __init__(self, kernel: jax.Array) -> None:
        self.kernel = nnx.Param(kernel)


class Block(nnx.Module):
    """One layer: attention, then MLP or experts, each added to the residual stream."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.dropout, self.norm_position = config.dropout, config.norm_position
        self.first_norm = config.first_norm
        self.norm_attn = Norm(config)
        self.attn = Attention(config, rngs=rngs)
        self.norm_mlp = Norm(config)
        self.experts = None if config.experts is None else Experts(config, rngs=rngs)
        if shared := 1 if config.experts is None else config.shared_experts:
            wide_mlp = dataclasses.replace(config, mlp_width=shared * config.mlp_width)
            self.mlp = MLP(wide_mlp, rngs=rngs)
        else:
            self.mlp = None
        sandwich = config.norm_position == "sandwich"
        self.norm_attn_out = Norm(config) if sandwich else None
        self.norm_mlp_out = Norm(config) if sandwich else None

    def __call__(
        self,
        x_BTD: jax.Array,
        angles,
        attend: Attend,
        *,
        rng: jax.Array | None = None,
        index: int | jax.Array = 0,
        choose: Callable[..., Routes] = route,
    ) -> tuple[jax.Array, Any, Routes | None]:
        def mlp(x_BTD: jax.Array) -> tuple[jax.Array, Routes | None]:
            if self.experts is None:
                return self.mlp(x_BTD), None
            y_BTD, routes = self.experts(x_BTD, choose)
            return y_BTD if self.mlp is None else y_BTD + self.mlp(x_BTD), routes

        attn = functools.partial(self.attn, angles=angles, attend=attend)
        norm = self.norm_attn
        if not self.first_norm:
            norm = lambda x: jnp.where(index == 0, x, self.norm_attn(x))  # noqa: E731
        x_BTD, extra = self.add(x_BTD, norm, attn, fold(rng, 0), self.norm_attn_out)
        x_BTD, routes = self.add(x_BTD, self.norm_mlp, mlp, fold(rng, 1), self.norm_mlp_out)
        return x_BTD, extra, routes

    def add(
        self,
        x_BTD: jax.Array,
        norm: Callable[[jax.Array], jax.Array],
        branch: Callable[..., Any],
        rng: jax.Array | None,
        norm_out: Norm | None = None,
    ) -> tuple[jax.Array, Any]:
        """Adds a branch ``x -> (y, extra)``, normed if asked, to the residual stream, and hands on
        the extra."""
        post = self.norm_position == "post"
        branch_BTD, extra = branch(x_BTD if post else norm(x_BTD))
        branch_BTD = branch_BTD if norm_out is None else norm_out(branch_BTD)
        x_BTD += drop(branch_BTD, self.dropout, rng)
        return pin_residual(norm(x_BTD) if post else x_BTD), extra


class Head(nnx.Module):
    """Untied output projection [D, V]."""

    def __init__(self, config: TokenFields, *, rngs: nnx.Rngs) -> None:
        kernel_DV = normal(rngs, config.width, config.padded_vocab)
        is_token = jnp.arange(config.padded_vocab) < config.vocab_size
        self.kernel = nnx.Param(jnp.where(is_token, kernel_DV, 0.0))


class ScoreHead(nnx.Module):
    """A reward model's projection [D, 1]."""

    def __init__(self, config: TokenFields, *, rngs: nnx.Rngs) -> None:
        self.score = dense(config.width, 1, rngs, bias=False)


def token_loss(
    config: TokenFields,
    x_BTD: jax.Array,
    kernel_DV: Any,
    batch: Mapping[str, jax.Array],
    **options: Any,
) -> WeightedLoss:
    """The masked cross-entropy of a batch's ``targets``, summed over tokens, and their accuracy.

    Other arguments are those of :func:`jaxtrain.ops.losses.cross_entropy`. With ``config.z_loss``
    its part of the loss is a metric of its own.
    """
    form = {"vocab_size": config.vocab_size, "chunk": config.loss_chunk, "z_loss": config.z_loss}
    total, correct, z_total = cross_entropy(
        x_BTD, kernel_DV, batch["targets"], batch["mask"], **form, **options
    )
    weight = batch["mask"].astype(total.dtype).sum()
    metrics = {"accuracy": correct} | ({"z_loss": z_total} if config.z_loss else {})
    return WeightedLoss(total=total, weight=weight, metrics=metrics)


def token_logits(
    config: TokenFields, x_BTD: jax.Array, kernel_DV: Any, bias_V: jax.Array | None = None
) -> jax.Array:
    """The float32 logits [B, T, vocab_size] of normed hidden states."""
    logits_NV = matmul_float32(x_BTD.reshape(-1, config.width), kernel_DV)
    if bias_V is not None:
        logits_NV += bias_V.astype(logits_NV.dtype)
    return logits_NV.reshape(*x_BTD.shape[:-1], -1)[..., : config.vocab_size]


def head_kernel(config: Any, params: Mapping[str, Any]) -> Any:
    """The output projection [D, V]: the transposed token table, or a model's own. Raises ValueError
    for a reward model, which predicts no tokens."""
    if getattr(config, "head", None) == "score":
        raise ValueError(
            "head is 'score': a reward model predicts no tokens; take its scores, or a model with "
            "head='tokens'"
        )
    return params["embed"]["tokens"].T if config.tied else params["head"]["kernel"]


def class_logits(out: Dense, pooled_BD: jax.Array) -> jax.Array:
    """Returns the float32 logits of classes [B, C] of a last dense layer."""
    logits_BC = matmul_float32(pooled_BD, out.kernel.get_value())
    return logits_BC + out.bias[...].astype(logits_BC.dtype)


def class_loss(logits_BC: jax.Array, batch: Mapping[str, jax.Array]) -> WeightedLoss:
    """The cross-entropy of float32 logits of the classes of rows against ``label`` int32 [B],
    weighted by ``mask`` [B], and their accuracy; where the batch has ``group`` [B, G], 1 in the
    column of a row's group, also the mean loss and accuracy of each group, [G]."""
    log_p_BC = jax.nn.log_softmax(logits_BC)
    mask_B = batch["mask"].astype(log_p_BC.dtype)
    nll_B = -jnp.take_along_axis(log_p_BC, batch["label"][:, None], axis=1)[:, 0]
    hits_B = log_p_BC.argmax(axis=1) == batch["label"]
    metrics: dict[str, Any] = {"accuracy": (hits_B * mask_B).sum()}
    if "group" in batch:
        of_BG = batch["group"].astype(mask_B.dtype) * mask_B[:, None]
        for name, value_B in (("loss", nll_B), ("accuracy", hits_B)):
            metrics[f"group_{name}"] = (value_B[:, None] * of_BG).sum(0), of_BG.sum(0)
    return WeightedLoss((nll_B * mask_B).sum(), mask_B.sum(), metrics)


def fold(rng: jax.Array | None, index: int) -> jax.Array | None:
    """Returns the key of one of several uses; None, which drops nothing, stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def dense(
    inputs: int, outputs: int, rngs: nnx.Rngs, *, bias: bool = True, std: float = INIT_STD
) -> Dense:
    """A dense layer whose kernel is drawn from N(0, std)."""
    init = nnx.initializers.normal(std)
    return Dense(inputs, outputs, use_bias=bias, kernel_init=init, rngs=rngs)


def _parts(x_BTD: jax.Array, *layers: Dense) -> Sequence[jax.Array]:
    """Dense layers of the residual stream, each device's heads or features of all positions.

    Where the stream is split, what is gathered is not kept: the backward pass gathers it again.
    """

    def products(x_BTD: jax.Array) -> list[jax.Array]:
        x = rows(gather_sequence(x_BTD))
        return [layer(x) for layer in layers]

    if splits_residual(x_BTD.shape[1]) and not rematerialised.value:
        keep = jax.checkpoint_policies.save_only_these_names(PRODUCT)
        products = jax.checkpoint(products, policy=keep, prevent_cse=False)
    return products(x_BTD)


def _sum_of_parts(layer: Dense, x_BTF: jax.Array) -> jax.Array:
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
