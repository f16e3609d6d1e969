"""A transformer's layers as Flax NNX modules, and one layer applied to whole rows.

:func:`pure` splits a module once into a static definition and a plain nested dict of arrays, and
:func:`apply` calls the definition with such a dict. A block depends on its
:class:`~jaxtrain.models.config.BlockConfig` alone, so that every model is made of the same ones.

Modules compute in the dtype of their parameters; norms, softmax and rotary angles are float32.
Wherever a kernel or a table stands, any :class:`jaxtrain.ops.linear.Kernel` may stand.

Shapes: B batch, T positions, N = B * T tokens, D width, H query heads, G key and value heads, K
features per head, V rows of the token table, L layers, J experts of a token.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.loss import WeightedLoss
from jaxtrain.models.attending import Attend, Attention, LatentAttention, row_angles, row_attention
from jaxtrain.models.config import BlockConfig, TokenFields, before_stack, group_of, stacked_layers
from jaxtrain.models.delta_net import DeltaNet, Past
from jaxtrain.models.experts import Experts, hidden_states, opened, with_routes
from jaxtrain.models.parts import MLP, Dense, Norm, dense, fold, normal
from jaxtrain.ops.linear import matmul, matmul_float32
from jaxtrain.ops.lookup import embed_lookup
from jaxtrain.ops.losses import cross_entropy
from jaxtrain.ops.numerics import drop
from jaxtrain.ops.remat import keeping, layout_keeps
from jaxtrain.ops.rotary import sinusoidal_positions
from jaxtrain.ops.routing import Routes, route
from jaxtrain.sharding.placement import check_length, constrain, gather, pin_residual
from jaxtrain.stages import Stages
from jaxtrain.tree import named_leaves


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
    (first, *others), count = group_of(config), stacked_layers(config)
    blocks = stacked(Block, first, count, rng_blocks)
    if others:
        rngs = (fold(rng_blocks, i) for i in range(len(others)))
        drawn = map(functools.partial(stacked, Block), others, [count] * len(others), rngs)
        blocks = {str(i): layer for i, layer in enumerate((blocks, *drawn))}
    params = {"embed": pure(embed, config, rng_embed), "blocks": blocks}
    if before := before_stack(config):
        rngs = (fold(rng_blocks, config.layers + l) for l in range(before))
        drawn = enumerate(pure(Block, config.dense_block, rng) for rng in rngs)
        params["dense"] = {str(l): layer for l, layer in drawn}
    if final_norm:
        params["final_norm"] = pure(Norm, config.block, rng_head)
    return params if head is None else params | {"head": pure(head, config, rng_head)}


def apply(module: type[nnx.Module], config: Any, *params: Mapping[str, Any]) -> nnx.Module:
    """Returns ``module`` with what is in ``params`` in place of its own, ready to be called."""
    return nnx.merge(_definition(module, config), *params)


@functools.cache
def parameter_sizes(init: Callable[[Any, jax.Array], Any], config: Any) -> Mapping[str, int]:
    """Counts the values of each parameter of a model by its path; nothing is computed."""
    # A key that is traced, for flags are read before JAX may be asked for devices.
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
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

    before, group = before_stack(config), group_of(config)

    def packing(batch):
        return {f"{name}_BT": batch.get(name) for name in ("segments", "positions")}

    def layer(layer_params, shared, x, batch, rng, index):
        routes = batch.get("routes")
        for i, form in enumerate(group):
            own, key, l = layer_params, rng, index
            if len(group) > 1:  # Behind the three keys that a layer folds in.
                own, key, l = layer_params[str(i)], fold(rng, 3 + i), index * len(group) + i
            routes_BTJ = None if routes is None else routes[:, l]
            how = {"routes_BTJ": routes_BTJ, "before": before, "rng": key, "index": l}
            x = block(form, own, x, **packing(batch), **how)
        return x

    def enter(params, batch, rng):
        x_BTD = embed(config, params, batch, rng)
        for l in range(before):

            def dense(layer_params, x_BTD, batch, l=l):
                # Behind the keys that the stack's layers fold in.
                how = {"rng": fold(rng, config.layers - before + l), "index": l}
                return block(config.dense_block, layer_params, x_BTD, **packing(batch), **how)

            keep = keeping(layout_keeps.value or config.remat)
            dense = dense if keep is None else keep(dense, prevent_cse=True)
            x_BTD = dense(params["dense"][str(l)], x_BTD, batch)
        return opened(config, x_BTD)

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
    routes_BTJ: jax.Array | None = None,
    rng: jax.Array | None = None,
    index: int | jax.Array = 0,
    before: int = 0,
) -> Any:
    """One layer in which rows attend to themselves, [B, T, D] to [B, T, D].

    Args:
      config: the layer.
      params: its parameters, as :func:`pure` makes them for :class:`Block`.
      x_BTD: the residual stream, as :func:`opened` returns it.
      segments_BT: int32 document numbers, as for :func:`jaxtrain.ops.attention.attention`: without
        causality too, they keep padding, number 0, out of what is seen. No expert sees padding.
      positions_BT: int32, of rotary positions; None means 0 .. T - 1.
      routes_BTJ: int32, experts that were chosen before, in place of the router's choice.
      rng: key of the layer; None means no dropout.
      index: number of the layer in its stack.
      before: number of layers before the stack; both say whether the layer has the window.
    """

    def attend(q_BTHK, k_BTGK, v_BTGK, *_, **sinks):
        # The two residual branches fold in 0 and 1.
        how = {"segments_BT": segments_BT, "rng": fold(rng, 2)} | sinks
        return row_attention(config, number, q_BTHK, k_BTGK, v_BTGK, **how), None

    x, x_BTD, number = x_BTD, hidden_states(x_BTD), before + index
    check_length(x_BTD.shape[1])
    angles = None
    if config.delta:
        attend = Past(segments_BT)
    else:
        angles = row_angles(config, number, positions_BT, x_BTD.shape[1])
    choose = functools.partial(
        route,
        live_BT=None if segments_BT is None else segments_BT > 0,
        routes_BTJ=routes_BTJ,
    )
    layer = apply(Block, config, params)
    x_BTD, _, routes = layer(x_BTD, angles, attend, rng=rng, index=number, choose=choose)
    return x_BTD if routes is None else with_routes(x, x_BTD, routes, index)


def gathering(layer: Callable) -> Callable:
    """Wraps a layer for :func:`jaxtrain.stages.run_layers` so that it gathers its weights first."""
    return lambda weights, *rest: layer(gather(weights), *rest)


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

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        put: Callable[[jax.Array], jax.Array] = lambda x_BTD: x_BTD,
    ) -> jax.Array:
        x_BTD = embed_lookup(tokens_BT, self.tokens.get_value(), "vocab")
        if self.factor is not None:
            x_BTD *= jnp.asarray(self.factor, x_BTD.dtype)
        x_BTD = put(x_BTD)
        if self.theta is not None:
            of_BTD = sinusoidal_positions(positions_BT, x_BTD.shape[-1], theta=self.theta)
            return x_BTD + constrain(of_BTD, "batch", "sequence", None).astype(x_BTD.dtype)
        return (
            x_BTD + embed_lookup(positions_BT, self.positions.get_value())
            if self.learned
            else x_BTD
        )


class Block(nnx.Module):
    """One layer: attention (or linear attention), then MLP or experts, each added to the residual
    stream."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.dropout, self.norm_position = config.dropout, config.norm_position
        self.first_norm = config.first_norm
        self.norm_attn = Norm(config)
        attention = Attention if config.kv_rank is None else LatentAttention
        attention = DeltaNet if config.delta else attention
        self.attn = attention(config, rngs=rngs)
        self.norm_mlp = Norm(config)
        self.experts = None if config.experts is None else Experts(config, rngs=rngs)
        if shared := 1 if config.experts is None else config.shared_experts:
            wide_mlp = dataclasses.replace(config, mlp_width=shared * config.mlp_width)
            self.mlp = MLP(wide_mlp, rngs=rngs)
        else:
            self.mlp = None
        gated = config.shared_gate
        self.shared_gate = dense(config.width, 1, rngs, bias=False) if gated else None
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
            if self.mlp is None:
                return y_BTD, routes
            shared_BTD = self.mlp(x_BTD)
            if self.shared_gate is not None:
                gate_BT1 = matmul(x_BTD, self.shared_gate.kernel.get_value())
                shared_BTD *= jax.nn.sigmoid(gate_BT1)
            return y_BTD + shared_BTD, routes

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


def score_loss(scores_B1: jax.Array, batch: Mapping[str, jax.Array]) -> WeightedLoss:
    """The squared error of float32 scores of rows against ``label`` float32 [B], weighted by
    ``mask`` [B]."""
    mask_B = batch["mask"].astype(scores_B1.dtype)
    errors_B = jnp.square(scores_B1[:, 0] - batch["label"].astype(scores_B1.dtype))
    return WeightedLoss((errors_B * mask_B).sum(), mask_B.sum())


def labels_loss(logits_BC: jax.Array, batch: Mapping[str, jax.Array]) -> WeightedLoss:
    """The mean over labels of the sigmoid cross-entropy of float32 logits against ``label`` float32
    [B, C], 1 where a row has the label, weighted by ``mask`` [B]; the share of rows with all labels
    right, and of each label [C] the rows that have it (``_told``), that are said to (``_said``),
    and both (``_right``)."""
    mask_B1 = batch["mask"].astype(logits_BC.dtype)[:, None]
    label_BC, said_BC = batch["label"].astype(logits_BC.dtype), logits_BC > 0
    nll_BC = -label_BC * jax.nn.log_sigmoid(logits_BC)
    nll_BC -= (1 - label_BC) * jax.nn.log_sigmoid(-logits_BC)
    hits_B1 = (said_BC == (label_BC > 0)).all(1, keepdims=True)
    counts = {"_told": label_BC, "_said": said_BC, "_right": said_BC * label_BC}
    metrics = {name: (x_BC * mask_B1).sum(0) for name, x_BC in counts.items()}
    metrics["accuracy"] = (hits_B1 * mask_B1).sum()
    return WeightedLoss((nll_BC.mean(1, keepdims=True) * mask_B1).sum(), mask_B1.sum(), metrics)
