"""BERT, RoBERTa and ModernBERT (Devlin et al. 2018, Liu et al. 2019, Warner et al. 2024) as pure
functions of plain dicts.

The layers are those of :mod:`jaxtrain.models.decoder`, seeing both ways, and in BERT and RoBERTa
normed behind their branches; what is different is before and after them: the embedding, and a head
for masked tokens, for classes of whole rows, or none. ``init``, ``loss_fn`` and ``stages`` are as
there.

A batch is a dict: ``tokens`` int32 [B, T], and optionally ``segments``, ``positions`` (as for a
decoder: attention stays within a document, and 0 is padding) and ``types`` (int32 [B, T], by
default 0). With a head for tokens there are ``targets`` int32 and ``mask`` float32, [B, T], or
[B, M] with ``places`` int32 [B, M]: the positions of a row that are predicted, so that the head
works on these alone. With a head for classes there are ``label`` int32 and ``mask`` float32, [B];
with one for a score ``label`` is float32 [B], and with one for labels float32 [B, C] of 0 and 1;
with one for tags there are ``targets`` and ``mask``, [B, T]; with one for spans ``span`` int32
[B, 2], the positions of the first and the last token, and ``mask`` [B].

Shapes: B batch, T positions, M predictions of a row, N = B * T tokens, D width, L layers, V rows of
the token table, C classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import decoder, distilling, layers, parts
from jaxtrain.models.config import Activation, BlockConfig, TokenFields, head_of, keys_seen
from jaxtrain.ops.activations import GATED, activate
from jaxtrain.ops.linear import apply_kernel
from jaxtrain.ops.losses import outcome_divergence
from jaxtrain.ops.numerics import drop, wide
from jaxtrain.sharding.placement import constrain, pin_residual, whole_rows
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.stages import Stages, loss_from_stages, run_layers

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

HEADS = ("tokens", "classes", "score", "labels", "tags", "spans", "none")
# Heads of a whole row, which have the same parameters.
OF_ROWS = ("classes", "score", "labels")
POOLINGS = ("first", "first_normed", "mean")

RULES = OptionalRules(
    (
        *decoder.RULES,
        (r"^embed/types$", (None, "embed")),
        (r"^embed/norm/(scale|bias)$", (None,)),
        # Whole on purpose: they are small, and only the last stage of a pipeline has them.
        (r"^head/(transform|pool|out|tags|spans)/kernel$", (None, None)),
        (r"^head/(transform|pool|norm|out|tags|spans)/(bias|scale)$", (None,)),
        (r"^head/bias$", ("vocab",)),
    )
)

# Targets and masks may be of places, or of rows.
BATCH = OptionalRules(((r"^(tokens|segments|positions|types)$", ("batch", "sequence")),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(TokenFields):
    """An encoder; the defaults are BERT's.

    Args:
      seq_len: positions of a row, at most.
      positions: learned table, or rotary (of base ``rope_theta``).
      norm_position: ``post`` norms the sum behind a branch; ``pre`` what a branch reads (but for
        the first, since embeddings are normed) and the last sum.
      token_types: rows of the table of types (which sentence of a pair a token is of); None means
        no table.
      unused_positions: rows of the table of positions before that of a row's first token: RoBERTa
        has 2, which nothing reads. None means none.
      head: what the model predicts: masked ``tokens``, by the transposed token table; ``classes``
        of a row, from its first token; a ``score`` of a row, one number; ``labels``, any number of
        which a row has; ``tags``, a class of every token; ``spans``, the tokens that an answer
        begins and ends with; ``none``, whose result are hidden states.
      classes: C, with a head for classes, labels or tags.
      pooling: what a head for classes, a score or labels reads: the ``first`` token, under a dense
        layer and tanh; or the ``first_normed`` or the ``mean`` of the row, under what a head for
        tokens has, a dense layer, an activation and a norm, which heads for tags and spans then
        have too.

    The other arguments are those of :mod:`jaxtrain.models.config`: :class:`TokenFields`,
    :class:`ModelFields` and, of each layer, :class:`LayerFields`.

    >>> config = EncoderConfig(vocab_size=99, seq_len=8, layers=1, width=24, heads=3)
    >>> config.block.norm_position, config.block.causal, config.mlp_width, config.padded_vocab
    ('post', False, 96, 128)
    """

    mlp: Activation = "gelu_exact"  # type: ignore[valid-type]
    norm_eps: float = 1e-12
    seq_len: int
    positions: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    norm_position: Literal["post", "pre"] = "post"
    token_types: int | None = 2
    unused_positions: int | None = None
    head: Literal[HEADS] = "tokens"  # type: ignore[valid-type]
    classes: int | None = None
    pooling: Literal[POOLINGS] = "first"  # type: ignore[valid-type]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.classes is None) == (self.head in ("classes", "labels", "tags")):
            raise ValueError(
                f"classes={self.classes} and head={self.head!r}: give a number of classes with "
                "head='classes', head='labels' or head='tags', and with no other"
            )

    @functools.cached_property
    def block(self) -> BlockConfig:
        """One of its layers."""
        return self.layer(
            causal=False,
            norm_position=self.norm_position,
            first_norm=self.norm_position == "post",
            rope_theta=self.rope_theta if self.positions == "rope" else None,
        )

    # Of every one; no fields, for there is no other.
    tied = True
    embed_scale = False


def tiny() -> EncoderConfig:
    """0.9 M parameters with 4,096 tokens: trains on a laptop's CPU."""
    return EncoderConfig(
        vocab_size=4096, seq_len=64, layers=2, width=128, heads=2, token_types=1, norm_eps=1e-6
    )


def _bert(**shape: int) -> EncoderConfig:
    return EncoderConfig(vocab_size=30522, seq_len=512, **shape, dropout=0.1, attention_dropout=0.1)


def _roberta(**shape: int) -> EncoderConfig:
    own = {"vocab_size": 50265, "token_types": 1, "unused_positions": 2, "norm_eps": 1e-5}
    return dataclasses.replace(_bert(**shape), **own)


def _modernbert(**shape: int) -> EncoderConfig:
    return EncoderConfig(
        **shape,
        vocab_size=50368,
        seq_len=8192,
        positions="rope",
        rope_theta=160000.0,
        local_rope_theta=10000.0,
        window=65,
        window_pattern=(False, True, True),
        norm_position="pre",
        norm_eps=1e-5,
        mlp="geglu_exact",
        bias=False,
        token_types=None,
        pooling="mean",
    )


# Names on the command line, each a model's shape, with its number of parameters.
PRESETS: Mapping[str, Callable[[], EncoderConfig]] = {
    "tiny": tiny,
    # BERT, uncased (Devlin et al. 2018): 109,514,298 and 335,174,458.
    "bert-base": lambda: _bert(layers=12, width=768, heads=12),
    "bert-large": lambda: _bert(layers=24, width=1024, heads=16),
    # RoBERTa (Liu et al. 2019): 124,697,433.
    "roberta-base": lambda: _roberta(layers=12, width=768, heads=12),
    # ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663): 149,655,232, 395,881,664.
    "modernbert-base": lambda: _modernbert(layers=22, width=768, heads=12, mlp_width=1152),
    "modernbert-large": lambda: _modernbert(layers=28, width=1024, heads=16, mlp_width=2624),
}


class Embed(layers.Embed):
    """Tables of tokens, positions and types, summed and normed."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.unused = config.unused_positions or 0
        rows = config.seq_len + self.unused
        super().__init__(dataclasses.replace(config, seq_len=rows), rngs=rngs)
        self.typed = config.token_types is not None
        if self.typed:
            self.types = nnx.Param(parts.normal(rngs, config.token_types, config.width))
        self.norm = parts.Norm(config.block, rngs=rngs)

    def __call__(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, types_BT: jax.Array
    ) -> jax.Array:
        x_BTD = super().__call__(tokens_BT, positions_BT + self.unused)
        if not self.typed:
            return self.norm(x_BTD)
        # A product: of few rows it costs nothing, and sums its gradient in float32.
        one_hot_BTS = jax.nn.one_hot(types_BT, self.types.shape[0], dtype=x_BTD.dtype)
        # Whole, as the other tables' width is: in a pipeline only one stage could exchange parts.
        types_ND = apply_kernel(_whole_product, parts.rows(one_hot_BTS), self.types.get_value())
        return self.norm(x_BTD + types_ND.reshape(*types_BT.shape, -1))


class Transform(nnx.Module):
    """A dense layer, an activation and a norm."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.form = "gelu_exact" if config.mlp in GATED else config.mlp
        self.transform = parts.dense(config.width, config.width, rngs, bias=config.bias)
        self.norm = parts.Norm(config.block, rngs=rngs)

    def hidden(self, x: jax.Array) -> jax.Array:
        y_ND = self.transform.product(parts.rows(x) if x.ndim == 3 else x)
        x_ND = activate(self.form, [y_ND], [self.transform.its_bias])
        return self.norm(x_ND).reshape(x.shape)


class TokenHead(Transform):
    """The transform between the last layer and the token table, and the bias of the logits."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.padded_vocab, jnp.float32))


class NormedClassHead(Transform):
    """Maps the first or the mean hidden state of a row to float32 logits of classes or labels, or
    to its score [B, 1]."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.mean = config.pooling == "mean"
        self.out = parts.dense(config.width, config.classes or 1, rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        x_BTD = whole_rows(x_BTD)
        if not self.mean:
            return layers.class_logits(self.out, self.hidden(x_BTD[:, 0]))
        seen_BT = jnp.ones(x_BTD.shape[:2]) if segments_BT is None else segments_BT > 0
        large_BTD = x_BTD.astype(wide(x_BTD.dtype))
        seen_BT = seen_BT.astype(large_BTD.dtype)
        mean_BD = (large_BTD * seen_BT[..., None]).sum(1) / seen_BT.sum(1, keepdims=True)
        return layers.class_logits(self.out, self.hidden(mean_BD.astype(x_BTD.dtype)))


class ClassHead(nnx.Module):
    """Maps the first token's hidden state, pooled, to float32 logits of classes or labels, or to a
    score [B, 1]."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.pool = parts.dense(config.width, config.width, rngs)
        self.out = parts.dense(config.width, config.classes or 1, rngs)

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        return layers.class_logits(self.out, jnp.tanh(self.pool(whole_rows(x_BTD)[:, 0])))


class PlaceHead(Transform):
    """Maps the hidden state of every token to float32 logits: of its tag, or of a span that begins
    and of one that ends there."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.name, self.normed = config.head, config.pooling != "first"
        if self.normed:
            super().__init__(config, rngs=rngs)
        setattr(self, self.name, parts.dense(config.width, config.classes or 2, rngs))

    def __call__(self, x_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
        del segments_BT
        x_BTD, out = whole_rows(x_BTD), getattr(self, self.name)
        x_BTD = self.hidden(x_BTD) if self.normed else x_BTD
        if self.name == "spans":
            # A softmax over places is the same for every bias: its gradient would be rounding
            # alone, of which an optimizer like Adam makes whole steps.
            out.bias.set_value(jax.lax.stop_gradient(out.bias[...]))
        logits_NC = layers.class_logits(out, x_BTD.reshape(-1, x_BTD.shape[-1]))
        return logits_NC.reshape(*x_BTD.shape[:2], -1)


def init(config: EncoderConfig, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters: kernels and tables N(0, 0.02), biases zero.

    Returns:
      A nested dict: ``embed``, ``blocks`` (leading axis L), pre-norm ``final_norm`` and, unless
      there is none, ``head``.

    >>> config = EncoderConfig(vocab_size=9, seq_len=4, layers=3, width=8, heads=2)
    >>> init(config, jax.random.key(0))["blocks"]["attn"]["q"]["kernel"].shape
    (3, 8, 8)
    """
    pre, head = config.norm_position == "pre", _head_of(config)
    return layers.draw(config, rng, embed=Embed, head=head, final_norm=pre)


def loss_fn(config: EncoderConfig) -> Callable[[Params, Batch, jax.Array | None], WeightedLoss]:
    """Returns ``loss(params, batch, rng)``: the cross-entropy of masked tokens, of classes or tags,
    the squared error of a score, the mean over labels of the sigmoid cross-entropy of each, or the
    mean cross-entropy of the two ends of spans.

    ``rng`` None means no dropout. The loss has ``total`` (nats, float32), ``weight`` (the sum of
    the mask) and, except of a score, the metric ``accuracy``.

    >>> config = EncoderConfig(vocab_size=9, seq_len=4, layers=1, width=8, heads=2)
    >>> batch = {"tokens": jnp.ones((2, 4), int), "places": jnp.array([[1], [3]])}
    >>> batch |= {"targets": jnp.array([[5], [6]]), "mask": jnp.ones((2, 1))}
    >>> loss = loss_fn(config)(init(config, jax.random.key(0)), batch, None)
    >>> float(loss.weight), bool(abs(loss.means()["loss"] - jnp.log(9)) < 0.2)
    (2.0, True)
    """
    return loss_from_stages(stages(config))


def stages(config: EncoderConfig) -> Stages:
    """Returns the model as a pipeline takes it."""
    return layers.stages(config, embed=embed, head_loss=head_loss)


def encode(
    config: EncoderConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns hidden states [B, T, D], in the dtype of the parameters, of a batch's ``tokens`` and
    what else of it the layers read; ``rng`` None means no dropout."""
    x_BTD = embed(config, params, batch, rng)
    return _final_norm(config, params, run_layers(stages(config), params, x_BTD, batch, rng))


def logits(
    config: EncoderConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns float32 logits: of tokens [B, T, vocab_size], of classes or labels [B, C], of tags
    [B, T, C], the score itself [B, 1], or of the first and the last token of spans [B, T, 2].

    Arguments are those of :func:`encode`.

    Raises:
      ValueError: the model has no head.
    """
    module, x_BTD = _head(config, params), encode(config, params, batch, rng)
    if config.head != "tokens":
        return module(x_BTD, batch.get("segments"))
    kernel_DV, bias_V = layers.head_kernel(config, params), module.bias[...]
    return layers.token_logits(config, module.hidden(x_BTD), kernel_DV, bias_V)


def embed(
    config: EncoderConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """First stage: tokens, positions and types to the residual stream [B, T, D].

    Raises:
      ValueError: for rows longer than the table of positions.
    """
    tokens_BT = batch["tokens"]
    types_BT = batch["types"] if "types" in batch else jnp.zeros_like(tokens_BT)
    module = layers.apply(Embed, config, params["embed"])
    x_BTD = module(tokens_BT, layers.positions(config, batch), types_BT)
    # Layers fold in 0 .. L - 1.
    return pin_residual(drop(x_BTD, config.dropout, parts.fold(rng, config.layers)))


def head_loss(
    config: EncoderConfig, params: Params, x_BTD: jax.Array, batch: Batch
) -> WeightedLoss:
    """Last stage: the head, and the cross-entropy of what it predicts.

    ``params`` is the whole model's, or any dict with ``head``, ``embed`` and, pre-norm,
    ``final_norm``.
    """
    if config.head != "tokens":
        return logits_loss(config, _head_logits(config, params, x_BTD, batch), batch)
    _, x_BMD, kernel_DV, bias_V, _ = _head_output(config, params, x_BTD, batch)
    return layers.token_loss(config, x_BMD, kernel_DV, batch, bias_V=bias_V)


def distillation_loss(
    config: EncoderConfig, teacher: EncoderConfig, *, hidden: float = 0.0, **share: float
) -> Callable[[Params, jax.Array, Params, jax.Array, Batch], WeightedLoss]:
    """Returns ``loss(params, x, teacher_params, teacher_x, batch)``, the last stage of two models,
    of which the first learns from the second, as :mod:`jaxtrain.models.distilling` has it, with
    ``temperature`` and ``mix`` as ``share``.

    Of masked tokens it is that of a decoder's. Of classes and tags the divergence is that of their
    distributions, of labels the mean of each one's, of spans that of both ends, and of scores the
    squared difference, without a temperature.

    Raises:
      ValueError: for models of different heads or tokens, or ``hidden`` of another head than that
        for tokens.
    """
    if head_of(config) != head_of(teacher):
        theirs, ours = (f"{x} ({n})" if n else x for x, n in map(head_of, (teacher, config)))
        raise ValueError(
            f"the teacher predicts {theirs}, and the student {ours}: give a teacher of the same"
        )
    if config.head == "tokens":
        distilling.check_tokens(config, teacher)

        def loss_of_tokens(params, x_BTD, teacher_params, teacher_x_BTD, batch):
            ours = _head_output(config, params, x_BTD, batch)
            theirs = _head_output(teacher, teacher_params, teacher_x_BTD, batch)
            if "segments" in batch:
                at_BT1 = batch["segments"][..., None].astype(jnp.float32)
                batch = {**batch, "segments": _at_places(at_BT1, batch)[..., 0]}
            return distilling.token_loss(config, ours, theirs, batch, hidden=hidden, **share)

        return loss_of_tokens
    if hidden:
        raise ValueError(
            f"`hidden` is {hidden}, and the head predicts {config.head}: it is of tokens that are "
            "masked; leave it out"
        )
    temperature = share["temperature"]
    if config.head == "score":
        share = {**share, "temperature": 1.0, "name": "squared_error"}

    def loss(params, x_BTD, teacher_params, teacher_x_BTD, batch):
        logits = _head_logits(config, params, x_BTD, batch)
        known = _head_logits(teacher, teacher_params, teacher_x_BTD, batch)
        plain, mask = logits_loss(config, logits, batch), batch["mask"].astype(logits.dtype)
        if config.head == "score":
            apart = jnp.square(logits - jax.lax.stop_gradient(known))[:, 0]
        else:
            ours, theirs = (_outcomes(config, x / temperature, batch) for x in (logits, known))
            apart = outcome_divergence(ours, theirs)
            apart = apart if apart.ndim == mask.ndim else apart.mean(-1)
        return distilling.joined(plain, (apart * mask).sum(), **share)

    return loss


def _outcomes(config: EncoderConfig, logits: jax.Array, batch: Batch) -> jax.Array:
    """Logits whose softmax over the last axis are probabilities: of classes or tags, of having
    each label and not, or of each place that a span's ends may have."""
    if config.head == "labels":
        return jnp.stack([logits, jnp.zeros_like(logits)], axis=-1)
    return _seen(logits, batch).swapaxes(1, 2) if config.head == "spans" else logits


def _seen(logits_BT2: jax.Array, batch: Batch) -> jax.Array:
    """The logits of spans' ends, of which none is in padding."""
    if "segments" not in batch:
        return logits_BT2
    return jnp.where(batch["segments"][..., None] > 0, logits_BT2, jnp.finfo(logits_BT2).min / 2)


def log_probs(config: EncoderConfig, params: Params, batch: Batch) -> jax.Array:
    """Returns the float32 log-probability of each of the batch's ``targets`` [B, M] at its
    ``places``, by a model of masked tokens; the other arguments are those of :func:`encode`."""
    model = stages(config)
    x_BTD = run_layers(model, params, model.embed(params, batch, None), batch, None)
    _, x_BMD, kernel_DV, bias_V, _ = _head_output(config, params, x_BTD, batch)
    logits_BMV = layers.token_logits(config, x_BMD, kernel_DV, bias_V)
    log_p_BMV = jax.nn.log_softmax(logits_BMV)
    return jnp.take_along_axis(log_p_BMV, batch["targets"][..., None], axis=-1)[..., 0]


def _at_places(x_BTD: jax.Array, batch: Batch) -> jax.Array:
    """The hidden states of what is predicted, [B, M, D]; of all tokens where no places are said."""
    if "places" not in batch:
        return x_BTD
    # A product, which every partitioner can split, and not a gather.
    chosen_BMT = jax.nn.one_hot(batch["places"], x_BTD.shape[1], dtype=x_BTD.dtype)
    return constrain(jnp.einsum("bmt,btd->bmd", chosen_BMT, x_BTD), "batch", None, None)


def logits_loss(config: EncoderConfig, logits: jax.Array, batch: Batch) -> WeightedLoss:
    """The loss of :func:`logits` of classes, scores, labels, tags or spans, and their accuracy; a
    span is right where both of its ends are, and none ends in padding."""
    if config.head in OF_ROWS:
        of = {"score": layers.score_loss, "labels": layers.labels_loss}
        return of.get(config.head, layers.class_loss)(logits, batch)
    if config.head == "tags":
        flat = {"label": batch["targets"].reshape(-1), "mask": batch["mask"].reshape(-1)}
        return layers.class_loss(logits.reshape(-1, logits.shape[-1]), flat)
    log_p_BT2, span_B2 = jax.nn.log_softmax(_seen(logits, batch), axis=1), batch["span"]
    mask_B = batch["mask"].astype(log_p_BT2.dtype)
    nll_B = -jnp.take_along_axis(log_p_BT2, span_B2[:, None], axis=1).mean((1, 2))
    hits_B = (log_p_BT2.argmax(axis=1) == span_B2).all(axis=1)
    return WeightedLoss(
        total=(nll_B * mask_B).sum(),
        weight=mask_B.sum(),
        metrics={"accuracy": (hits_B * mask_B).sum()},
    )


parameter_count = functools.partial(layers.parameter_count, init)


# Of :func:`flops_per_row`.
FLOPS_FORMULA = "6 N + 12 L H K T (PaLM, appendix B), the head at predicted tokens alone"


def flops_per_row(config: EncoderConfig, *, length: int, predictions: int) -> int:
    """Floating-point operations of a forward and backward pass over a row of ``length`` tokens.

    The model FLOPs of :func:`jaxtrain.models.decoder.flops_per_token`, where a head's parameters
    count for what they are multiplied by: ``predictions`` tokens, or the one that is classified.

    >>> flops_per_row(PRESETS["bert-base"](), length=128, predictions=20)
    70021393920
    """
    sizes = layers.parameter_sizes(init, config)
    layer = sum(size for name, size in sizes.items() if name.startswith("blocks/"))
    head = sum(size for name, size in sizes.items() if name.startswith("head/"))
    head += config.vocab_size * config.width if config.head == "tokens" else 0
    attend = 12 * config.heads * config.block.head_dim * keys_seen(config, length)
    return length * (6 * layer + attend) + 6 * predictions * head


def _head_output(
    config: EncoderConfig, params: Params, x_BTD: jax.Array, batch: Batch
) -> distilling.Output:
    """What a head for tokens makes of the residual stream, at the batch's places."""
    module, hidden_BTD = _head(config, params), _final_norm(config, params, x_BTD)
    hidden_BMD, kernel_DV = _at_places(hidden_BTD, batch), layers.head_kernel(config, params)
    return distilling.Output(hidden_BMD, module.hidden(hidden_BMD), kernel_DV, module.bias[...])


def _head_logits(
    config: EncoderConfig, params: Params, x_BTD: jax.Array, batch: Batch
) -> jax.Array:
    """The logits of the other heads, of the residual stream."""
    return _head(config, params)(_final_norm(config, params, x_BTD), batch.get("segments"))


def _head(config: EncoderConfig, params: Params) -> nnx.Module:
    if config.head == "none":
        raise ValueError("head='none' predicts nothing: give head='tokens', or another")
    return layers.apply(_head_of(config), config, params["head"])


def _head_of(config: EncoderConfig) -> type[nnx.Module] | None:
    classes = ClassHead if config.pooling == "first" else NormedClassHead
    places = {"tags": PlaceHead, "spans": PlaceHead}
    return ({"tokens": TokenHead, "none": None} | places).get(config.head, classes)


def _final_norm(config: EncoderConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    if config.norm_position == "post":
        return x_BTD
    return pin_residual(layers.apply(parts.Norm, config.block, params["final_norm"])(x_BTD))


def _whole_product(x_NS: jax.Array, kernel_SD: jax.Array) -> jax.Array:
    return x_NS @ constrain(kernel_SD, None, None)
