"""T5: an encoder and a decoder that attends to it, as pure functions of plain dicts.

Raffel et al. 2020, https://arxiv.org/abs/1910.10683, and the form of v1.1 and Flan-T5. The blocks
are those of all models; what is T5's own is here: RMSNorm before each branch, no biases in dense
layers, scores that are not divided by sqrt(K), and a bias by distance that all layers of a stack
share. The two stacks of layers are two stacks of one pipeline.

A batch is a dict: ``source`` int32 [B, S]; ``tokens`` int32 [B, T], what the decoder reads;
``targets`` int32 and ``mask`` float32 [B, T], what it is to say; and optionally
``source_segments`` [B, S] and ``segments`` [B, T], int32 document numbers from 1, 0 for padding: a
position sees its own document alone, of both sequences. With ``source_segments`` alone the target
is document 1.

Dropout is on the embeddings, the residual branches and the encoder's result, and on attention's
weights by a rate of its own; T5's code has it within the MLP and before the head too.

Shapes: B rows, S source positions, T target positions, D width, H heads, K features per head,
V rows of the token table, R buckets of distances, O = S + T - 1 distances.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import attending, decoder, layers, parts
from jaxtrain.models.config import INIT_STD, Activation, BlockConfig, TokenFields, fill
from jaxtrain.ops.attention import attention
from jaxtrain.ops.lookup import embed_lookup
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.numerics import drop
from jaxtrain.sharding.placement import constrain, pin_residual
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages, loss_from_stages, run_layers, run_stacks
from jaxtrain.tree import map_named

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

STACKS = ("encoder", "decoder")

# Parameter path to logical axes; the first match decides.
RULES = OptionalRules(
    (
        (r"^embed/tokens$", ("vocab", "embed")),
        (r"^distance/(encoder|decoder)/table$", (None, "heads")),
        (r"^(en|de)coder/(attn|cross)/q/kernel$", ("layers", "embed", "heads")),
        (r"^(en|de)coder/(attn|cross)/(k|v)/kernel$", ("layers", "embed", "kv_heads")),
        (r"^(en|de)coder/(attn|cross)/out/kernel$", ("layers", "heads", "embed")),
        (r"^(en|de)coder/mlp/(up|gate)/kernel$", ("layers", "embed", "mlp")),
        (r"^(en|de)coder/mlp/down/kernel$", ("layers", "mlp", "embed")),
        (r"^(en|de)coder/norm_(attn|cross|mlp)/scale$", ("layers", None)),
        (r"^(encoder|final)_norm/scale$", (None,)),
        (r"^head/kernel$", ("embed", "vocab")),
    )
)

BATCH = OptionalRules((*decoder.BATCH, (r"^source(_segments)?$", ("batch", "sequence"))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(TokenFields):
    """The shape of a T5; the defaults are the first T5's.

    Args:
      source_len, target_len: tokens per row of the two sequences in training.
      decoder_layers: depth of the decoder; None means ``layers``, which is that of the encoder.
      tied: the output projection is the transposed token table.
      scaled_head: what the head is given is divided by sqrt(D); None means where it is tied.
      buckets, max_distance: distances between positions fall into so many buckets, the last of
        which begins at the largest distance.

    The other arguments are those of :mod:`jaxtrain.models.config`: :class:`TokenFields`,
    :class:`ModelFields` and, of each layer, :class:`LayerFields`.

    >>> PRESETS["t5-small"]().head_dim, PRESETS["flan-t5-small"]().mlp
    (64, 'geglu')
    """

    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    mlp: Activation = "relu"  # type: ignore[valid-type]
    bias: bool = False
    source_len: int
    target_len: int
    decoder_layers: int | None = None
    tied: bool = True
    scaled_head: bool | None = None
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        for name in _LACKS:
            if getattr(self, name) is not None:
                raise ValueError(f"T5 has no {name}, and it is {getattr(self, name)}: leave it out")
        super().__post_init__()
        fill(self, decoder_layers=self.layers, scaled_head=self.tied)
        if self.buckets % 2 or self.buckets < 4 or self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"buckets={self.buckets} must be even and at least 4, and max_distance="
                f"{self.max_distance} above half of it"
            )
        self.check_chunk("target_len")

    @functools.cached_property
    def block(self) -> BlockConfig:
        """One of the encoder's layers, which see both ways."""
        return self.layer(causal=False)

    @functools.cached_property
    def decoder(self) -> BlockConfig:
        """One of the decoder's layers."""
        return dataclasses.replace(self.block, causal=True)

    # Of every one; no fields. Positions are in the attention, and not in the embedding.
    positions = "relative"
    embed_scale = False


class DecoderBlock(layers.Block):
    """One layer of a decoder that reads an encoder: a branch of attention to its result between
    the two of a block."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.norm_cross = parts.Norm(config)
        self.cross = attending.Attention(config, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        attend: attending.Attend,
        attend_to_memory: attending.Attend,
        *,
        rng: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        def attn(x):
            return self.attn(x, None, attend)

        @jax.named_scope("cross")
        def cross(x):
            return self.cross(x, None, attend_to_memory, memory_BSD)

        x_BTD, own = self.add(x_BTD, self.norm_attn, attn, parts.fold(rng, 0))
        x_BTD, other = self.add(x_BTD, self.norm_cross, cross, parts.fold(rng, 3))
        x_BTD, _ = self.add(x_BTD, self.norm_mlp, lambda x: (self.mlp(x), None), parts.fold(rng, 1))
        return x_BTD, (own, other)


class DistanceBias(nnx.Module):
    """A bias of attention scores by the bucket of the distance: a table [R, H]."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(parts.normal(rngs, config.buckets, config.heads))

    def __call__(self, buckets_O: jax.Array) -> jax.Array:
        return constrain(embed_lookup(buckets_O, self.table.get_value()).T, "heads", None)


def init(config: T5Config, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters with T5's standard deviations; an untied head's is 1 / sqrt(D).

    Returns:
      A nested dict: ``embed``, ``distance``, ``encoder`` and ``decoder`` (each with a leading axis
      of layers), ``encoder_norm``, ``final_norm`` and, untied, ``head``.

    >>> params = jax.eval_shape(lambda: init(PRESETS["t5-small"](), jax.random.key(0)))
    >>> params["decoder"]["cross"]["q"]["kernel"].shape
    (6, 512, 512)
    """
    rng_embed, rng_encoder, rng_decoder, rng_distance, rng_head = jax.random.split(rng, 5)

    def distance(index):
        return layers.pure(DistanceBias, config, jax.random.fold_in(rng_distance, index))

    params = {
        "embed": layers.pure(layers.Embed, config, rng_embed),
        "distance": {name: distance(i) for i, name in enumerate(STACKS)},
        "encoder": layers.stacked(layers.Block, config.block, config.layers, rng_encoder),
        "encoder_norm": layers.pure(parts.Norm, config.block, rng_head),
        "decoder": layers.stacked(DecoderBlock, config.decoder, config.decoder_layers, rng_decoder),
        "final_norm": layers.pure(parts.Norm, config.decoder, rng_head),
    }
    if not config.tied:
        params["head"] = layers.pure(layers.Head, config, rng_head)
    width, inner = config.width, config.heads * config.block.head_dim
    inputs = {"q": width * config.block.head_dim, "out": inner, "down": config.mlp_width}

    def scaled(path: str, x: jax.Array) -> jax.Array:
        *_, layer, kind = path.split("/")
        if kind in ("scale", "bias"):
            return x
        variance = 1.0 if kind == "tokens" else 1 / inputs.get(layer, width)
        return x * (variance**0.5 / INIT_STD)

    return map_named(scaled, params)


def loss_fn(config: T5Config) -> Callable[[Params, Batch, jax.Array | None], WeightedLoss]:
    """Returns ``loss(params, batch, rng)``: masked cross-entropy, summed over target tokens.

    ``rng`` None means no dropout. The loss has ``total`` (nats, float32), ``weight`` (the sum of
    the mask) and the metric ``accuracy``.
    """
    return loss_from_stages(stages(config))


def stages(config: T5Config) -> Stages:
    """Returns the model as a pipeline takes it."""
    return layers.stages(
        config,
        embed=embed,
        head_loss=head_loss,
        block=tuple(functools.partial(block, config) for block in (encode, decode)),
        stacked=Stack(STACKS),
        shared=("distance",),
        between=(functools.partial(between, config),),
    )


def logits(
    config: T5Config, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns float32 logits [B, T, vocab_size] of the next target token of a batch, which needs no
    ``targets`` and ``mask``; ``rng`` None means no dropout."""
    x = run_stacks(stages(config), params, batch, rng)
    return head_logits(config, params, x["target"])


def encoded(
    config: T5Config, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns the encoder's result [B, S, D] for ``source`` and ``source_segments``.

    On a mesh it gathers its layers one at a time.
    """
    batch = dict(batch) | {"tokens": batch["source"][:, :1]}
    model = stages(config)
    x = model.enter(0, params, None, batch, rng)
    x = run_layers(model, params, x, batch, rng, wrap=layers.gathering)
    return model.enter(1, params, x, batch, rng)["source"]


def embed(
    config: T5Config, params: Params, batch: Batch, rng: jax.Array | None = None
) -> dict[str, jax.Array]:
    """First stage: the source's residual stream [B, S, D], and room for the target's [B, T, D]."""
    source_BSD = embedded(config, params, batch["source"], rng, 0)
    B, T = batch["tokens"].shape
    target_BTD = jnp.zeros((B, T, config.width), source_BSD.dtype)
    return {"source": source_BSD, "target": pin_residual(target_BTD)}


def encode(
    config: T5Config,
    layer: Params,
    shared: Params,
    x: dict[str, jax.Array],
    batch: Batch,
    rng: jax.Array | None = None,
    index: Any = None,
) -> dict[str, jax.Array]:
    """One layer of the encoder, whose parameters ``layer`` have no leading axis; ``shared`` is any
    dict with ``distance``, ``rng`` the key of the layer, and ``index`` is not read."""
    del index
    S, segments = x["source"].shape[1], batch.get("source_segments")
    bias_HO = distance_bias(config, shared, "encoder", S)
    mask = Mask(causal=False, segments=segments, bias=bias_HO)
    attend = attend_with(config.block, mask, parts.fold(rng, 2))
    block = layers.apply(layers.Block, config.block, layer)
    return x | {"source": block(x["source"], None, attend, rng=rng)[0]}


def between(
    config: T5Config,
    params: Params,
    x: dict[str, jax.Array],
    batch: Batch,
    rng: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Applies the encoder's last norm and embeds the target, between the two stacks."""
    norm = layers.apply(parts.Norm, config.block, params["encoder_norm"])
    rng_norm = parts.fold(rng, config.layers + config.decoder_layers + 2)
    source_BSD = drop(norm(x["source"]), config.dropout, rng_norm)
    target_BTD = embedded(config, params, batch["tokens"], rng, 1)
    return {"source": pin_residual(source_BSD), "target": target_BTD}


def decode(
    config: T5Config,
    layer: Params,
    shared: Params,
    x: dict[str, jax.Array],
    batch: Batch,
    rng: jax.Array | None = None,
    index: Any = None,
) -> dict[str, jax.Array]:
    """One layer of the decoder; the arguments are those of :func:`encode`."""
    del index
    segments, memory = batch.get("segments"), batch.get("source_segments")
    to_memory = segments
    if memory is not None and segments is None:
        to_memory = jnp.ones(x["target"].shape[:2], jnp.int32)
    if segments is not None and memory is None:
        raise ValueError("a batch with segments needs source_segments, the source's own")
    bias_HO = distance_bias(config, shared, "decoder", x["target"].shape[1])
    own = Mask(segments=segments, bias=bias_HO)
    other = Mask(causal=False, segments=to_memory, key_segments=memory)
    block = layers.apply(DecoderBlock, config.decoder, layer)
    target_BTD, _ = block(
        x["target"],
        x["source"],
        attend_with(config.decoder, own, parts.fold(rng, 2)),
        attend_with(config.decoder, other, parts.fold(rng, 4)),
        rng=rng,
    )
    return x | {"target": target_BTD}


def head_loss(
    config: T5Config, params: Params, x: dict[str, jax.Array], batch: Batch
) -> WeightedLoss:
    """Last stage: final norm, output projection and masked cross-entropy."""
    x_BTD = _before_head(config, params, x["target"])
    return layers.token_loss(config, x_BTD, layers.head_kernel(config, params), batch)


def head_logits(config: T5Config, params: Params, x_BTD: jax.Array) -> jax.Array:
    """Final norm and output projection: float32 [B, T, vocab_size]."""
    x_BTD = _before_head(config, params, x_BTD)
    return layers.token_logits(config, x_BTD, layers.head_kernel(config, params))


def distance_bias(config: T5Config, params: Params, stack: str, length: int) -> jax.Array:
    """Returns [H, 2 length - 1], what rows of that length add to the scores of the encoder or the
    decoder, by distance; ``params`` is any dict with ``distance``."""
    table = layers.apply(DistanceBias, config, params["distance"][stack])
    any_length = export.is_symbolic_dim(length)  # in a program that is exported
    far = config.max_distance if any_length else length - 1
    buckets_O = bucket(
        np.arange(-far, far + 1),
        both_ways=stack == "encoder",
        buckets=config.buckets,
        max_distance=config.max_distance,
    )
    if any_length:  # what is farther is in the bucket of the farthest
        near_O = jnp.clip(jnp.arange(1 - length, length), -far, far)
        return table(jnp.asarray(buckets_O)[near_O + far])
    return table(jnp.asarray(buckets_O))


def bucket(distance: np.ndarray, *, both_ways: bool, buckets: int, max_distance: int) -> np.ndarray:
    """Returns T5's bucket of each distance, key minus query.

    Half of the buckets are one distance each; the others grow with the logarithm of the distance up
    to ``max_distance``. Both ways, half are for keys behind the query; else these are distance 0.

    >>> bucket(np.array([-9, -1, 0, 1]), both_ways=True, buckets=32, max_distance=128)
    array([ 8,  1,  0, 17], dtype=int32)
    """
    if both_ways:
        buckets //= 2
        first, distance = np.where(distance > 0, buckets, 0), np.abs(distance)
    else:
        first, distance = 0, np.maximum(-distance, 0)
    exact = buckets // 2
    # In float32, as everywhere: which bucket a distance is in hangs on the last bit.
    share = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    share = share / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + share.astype(np.int32), buckets - 1)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)


parameter_count = functools.partial(layers.parameter_count, init)


# Of :func:`flops_per_row`.
FLOPS_FORMULA = "6 N of each sequence's own parameters + 12 H K (L S S + M T (T + S))"


def flops_per_row(config: T5Config) -> int:
    """Floating-point operations of a forward and backward pass of one row of full length.

    As :func:`jaxtrain.models.decoder.flops_per_token` counts: the encoder's parameters, and those
    of the decoder that read the source, by S; the decoder's others and the head by T; attention of
    L and M layers.
    """
    S, T, sizes = config.source_len, config.target_len, layers.parameter_sizes(init, config)
    reads_source = re.compile("encoder|decoder/cross/(k|v)/")
    of_source = sum(size for path, size in sizes.items() if reads_source.match(path))
    of_target = sum(size for path, size in sizes.items() if re.match("decoder|final", path))
    of_target += config.vocab_size * config.width
    of_target -= sum(size for path, size in sizes.items() if re.match("decoder/cross/(k|v)", path))
    attend = config.layers * S * S + config.decoder_layers * T * (T + S)
    return 6 * (of_source * S + of_target * T) + 12 * config.heads * config.block.head_dim * attend


def tiny() -> T5Config:
    """Trains on a laptop's CPU; the vocabulary is the tokenizer's."""
    return T5Config(
        vocab_size=2048,
        source_len=64,
        target_len=24,
        layers=2,
        width=192,
        heads=4,
        mlp="geglu",
        mlp_width=384,
    )


# Fields of layers that a T5's have not.
_LACKS = (
    *("rope_scaling", "local_rope_theta", "window", "global_tokens"),
    *("query_pre_attn_scalar", "attention_softcap"),
)
_FLAN = {"mlp": "geglu", "tied": False}


def _t5(**shape: Any) -> T5Config:
    return T5Config(vocab_size=32128, source_len=512, target_len=114, head_dim=64, **shape)


# Names on the command line, each a model's shape, with its number of parameters.
PRESETS: Mapping[str, Callable[[], T5Config]] = {
    "tiny": tiny,
    # T5 (Raffel et al. 2020): 60,506,624 and 222,903,552.
    "t5-small": lambda: _t5(width=512, layers=6, heads=8, mlp_width=2048),
    "t5-base": lambda: _t5(width=768, layers=12, heads=12, mlp_width=3072),
    # Flan-T5 and v1.1 (Chung et al. 2022): 76,961,152, 247,577,856 and 2,849,757,184.
    "flan-t5-small": lambda: _t5(width=512, layers=8, heads=6, mlp_width=1024, **_FLAN),
    "flan-t5-base": lambda: _t5(width=768, layers=12, heads=12, mlp_width=2048, **_FLAN),
    "flan-t5-xl": lambda: _t5(
        width=2048, layers=24, heads=32, mlp_width=5120, **_FLAN, remat="dots"
    ),
}


def attend_with(config: BlockConfig, mask: Mask, rng: jax.Array | None = None) -> attending.Attend:
    """Returns a layer's attention."""

    def attend(q_BTHK, k_BSGK, v_BSGK):
        how = {"rng": rng, "dropout": config.attention_dropout, "implementation": config.attention}
        return attention(q_BTHK, k_BSGK, v_BSGK, mask, scale=1.0, **how), None

    return attend


def embedded(config: T5Config, params: Params, tokens: jax.Array, rng, use: int) -> jax.Array:
    x = layers.apply(layers.Embed, config, params["embed"])(tokens, None)
    # Layers fold in the numbers before these.
    rng = parts.fold(rng, config.layers + config.decoder_layers + use)
    return pin_residual(drop(x, config.dropout, rng))


def _before_head(config: T5Config, params: Params, x_BTD: jax.Array) -> jax.Array:
    x_BTD = layers.apply(parts.Norm, config.decoder, params["final_norm"])(x_BTD)
    return x_BTD * jnp.asarray(config.width**-0.5, x_BTD.dtype) if config.scaled_head else x_BTD
