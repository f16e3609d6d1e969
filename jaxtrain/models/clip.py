"""CLIP and SigLIP (Radford et al. 2021, Zhai et al. 2023): an image tower and a text tower.

The image tower is a :mod:`jaxtrain.models.vit`, the text tower a :mod:`jaxtrain.models.decoder`
without a head, which sees both ways in SigLIP. What is new is behind them: how a tower's hidden
states become one vector, and a loss over all pairs of the global batch
(:mod:`jaxtrain.ops.contrastive`). :func:`jaxtrain.engines.cached.of_embeddings` makes a train
step's loss of :func:`encode` and :func:`loss`.

A batch is a dict: ``image`` [B, H, W, C], ``tokens`` int32 [B, T], ``mask`` float32 [B], and
optionally ``caption`` int32 [B]: rows of one number are no negatives of each other.

Shapes: B batch, T positions, D width of a tower, F features of an embedding.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import attending, decoder, layers, parts, vit
from jaxtrain.models.config import BlockConfig
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.vit import ViTConfig
from jaxtrain.ops import contrastive
from jaxtrain.ops.attention import attention
from jaxtrain.ops.linear import matmul_float32
from jaxtrain.ops.mask import Mask
from jaxtrain.sharding.placement import constrain, whole_rows
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import run_layers

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

# The layers of the towers are stacked under these.
STACK = Stack(("image/blocks", "text/blocks"))
# The largest factor of a cosine in the softmax of CLIP, and the factor at the start.
MOST_SCALE, FIRST_SCALE = 100.0, {"softmax": 1 / 0.07, "sigmoid": 10.0}
# SigLIP's bias at the start, about -log(32,768), the pairs of its batches.
FIRST_BIAS = -10.0


def _of_tower(tower: str, rules: OptionalRules) -> list[tuple[str, tuple[str | None, ...]]]:
    return [(pattern.replace("^", f"^{tower}/", 1), axes) for pattern, axes in rules]


RULES = OptionalRules(
    (
        *_of_tower("image", vit.RULES),
        *_of_tower("text", decoder.RULES),
        # Whole on purpose: they are small beside the towers.
        (r"^image/pool/query$", (None, None, None)),
        (r"^image/pool/.*kernel$", (None, None)),
        (r"^(image/pool/.*|project/text)/(bias|scale)$", (None,)),
        (r"^project/(image|text)/kernel$", (None, None)),
        (r"^(scale|bias)$", (None,)),
    )
)

BATCH = OptionalRules(((r"^tokens$", ("batch", "sequence")),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(DecoderConfig):
    """A text tower.

    Args:
      causal: a position sees no later ones, and a text is read at its end; otherwise at the last
        position of its row.
      end: the token at whose first place a text ends; None means the token of the largest number.

    The other arguments are those of :class:`jaxtrain.models.decoder.DecoderConfig`.
    """

    causal: bool = True
    end: int | None = None

    @functools.cached_property
    def block(self) -> BlockConfig:
        """One of its layers."""
        return dataclasses.replace(DecoderConfig.block.func(self), causal=self.causal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Two towers and their loss.

    Args:
      image: the image tower. With a token of its own (``first``) an image is read there and
        projected; without one it is read by attention from a query that is learned.
      text: the text tower.
      features: F of an embedding.
      loss: ``softmax`` over the rows of the batch (CLIP), or a ``sigmoid`` of each pair (SigLIP),
        with which the projection of texts has a bias.

    Raises:
      ValueError: the image tower has classes, or no projection and another width than F.
    """

    image: ViTConfig
    text: TextConfig
    features: int
    loss: Literal["softmax", "sigmoid"] = "softmax"

    def __post_init__(self) -> None:
        for name, kind in (("image", ViTConfig), ("text", TextConfig)):
            if isinstance(given := getattr(self, name), Mapping):  # in a checkpoint's JSON
                object.__setattr__(self, name, kind(**given))
        if self.image.classes is not None:
            raise ValueError(f"classes={self.image.classes} are no part of a tower: give None")
        if not self.image.first and self.image.width != self.features:
            raise ValueError(
                f"features={self.features} and the image tower is {self.image.width} wide without "
                "a projection (first=False): give as many features"
            )
        if self.loss not in FIRST_SCALE:
            raise ValueError(f"loss={self.loss!r} is not one of {', '.join(FIRST_SCALE)}")

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the text tower."""
        return self.text.vocab_size


class Pool(nnx.Module):
    """One learned query attends to all patches, and an MLP is added (SigLIP's head of images)."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.kernel = config.attention
        self.query = nnx.Param(parts.normal(rngs, 1, 1, config.width))
        self.attn = attending.Attention(config.block, rngs=rngs)
        self.norm = parts.Norm(config.block)
        self.mlp = parts.MLP(config.block, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        def attend(*qkv: jax.Array) -> tuple[jax.Array, None]:
            return attention(*qkv, Mask(causal=False), implementation=self.kernel), None

        query_B1D = jnp.broadcast_to(self.query[...], (len(x_BTD), 1, x_BTD.shape[2]))
        y_B1D, _ = self.attn(query_B1D, None, attend, x_BTD)
        return (y_B1D + self.mlp(self.norm(y_B1D)))[:, 0]


def init(config: ClipConfig, rng: jax.Array, *, pairs: int | None = None) -> dict[str, Any]:
    """Draws float32 parameters: those of both towers by their own laws, projections N(0, 1 / D).

    Args:
      pairs: rows of the global batch. The sigmoid's bias begins at -log(pairs), by which two rows
        match with about the chance that they are a pair; None begins at SigLIP's own -10.

    Returns:
      A nested dict: ``image`` and ``text`` (each with ``embed``, ``blocks`` with a leading axis of
      layers, and ``final_norm``; ``image/pool`` of a tower without a token of its own),
      ``project``, ``scale`` (the log of the factor, [1]) and, with the sigmoid, ``bias`` [1].
    """
    rng_image, rng_text, rng_pool, *rngs = jax.random.split(rng, 5)
    params = {
        "image": vit.init(config.image, rng_image),
        "text": decoder.init(config.text, rng_text),
    }
    sigmoid = config.loss == "sigmoid"

    def project(tower: Any, rng: jax.Array, bias: bool) -> dict[str, jax.Array]:
        shape = tower.width, config.features
        kernel = {"kernel": tower.width**-0.5 * jax.random.normal(rng, shape)}
        return kernel | ({"bias": jnp.zeros(config.features)} if bias else {})

    params["project"] = {"text": project(config.text, rngs[1], sigmoid)}
    if config.image.first:
        params["project"]["image"] = project(config.image, rngs[0], False)
    else:
        params["image"]["pool"] = layers.pure(Pool, config.image, rng_pool)
    params["scale"] = jnp.full(1, math.log(FIRST_SCALE[config.loss]))
    first_bias = FIRST_BIAS if pairs is None else -math.log(pairs)
    return params | ({"bias": jnp.full(1, first_bias)} if sigmoid else {})


def encode_images(
    config: ClipConfig, params: Params, image_BHWC: jax.Array, rng: jax.Array | None = None
) -> jax.Array:
    """Returns embeddings of length 1, float32 [B, F]; ``rng`` None means no dropout."""
    own = params["image"]
    x_BTD = vit.encode(config.image, own, {"image": image_BHWC}, rng)
    if not config.image.first:
        return _unit(layers.apply(Pool, config.image, own["pool"])(x_BTD))
    return _unit(matmul_float32(whole_rows(x_BTD)[:, 0], params["project"]["image"]["kernel"]))


def encode_texts(
    config: ClipConfig, params: Params, tokens_BT: jax.Array, rng: jax.Array | None = None
) -> jax.Array:
    """Returns embeddings of length 1, float32 [B, F]; ``rng`` None means no dropout.

    Raises:
      ValueError: for rows longer than the table of positions.
    """
    text, own, batch = config.text, params["text"], {"tokens": tokens_BT}
    model = decoder.stages(text)
    x_BTD = run_layers(model, own, model.embed(own, batch, rng), batch, rng)
    x_BTD = whole_rows(layers.apply(parts.Norm, text.block, own["final_norm"])(x_BTD))
    is_end_BT = tokens_BT == (tokens_BT.max(1, keepdims=True) if text.end is None else text.end)
    place_B = is_end_BT.argmax(1) if text.causal else jnp.full(len(x_BTD), x_BTD.shape[1] - 1)
    # A product, which every partitioner can split, and not a gather.
    chosen_BT = jax.nn.one_hot(place_B, x_BTD.shape[1], dtype=x_BTD.dtype)
    project = params["project"]["text"]
    y_BF = matmul_float32(jnp.einsum("bt,btd->bd", chosen_BT, x_BTD), project["kernel"])
    return _unit(y_BF + project["bias"].astype(y_BF.dtype) if "bias" in project else y_BF)


def encode(
    config: ClipConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Returns the embeddings of a batch's ``image`` and ``tokens`` under these names."""
    return {
        "image": encode_images(config, params, batch["image"], parts.fold(rng, 0)),
        "tokens": encode_texts(config, params, batch["tokens"], parts.fold(rng, 1)),
    }


def loss(
    config: ClipConfig, params: Params, found: Mapping[str, jax.Array], batch: Batch
) -> WeightedLoss:
    """The contrastive loss of embeddings, summed over rows, of which each has all others of the
    batch as negatives; ``found`` is what :func:`encode` returns.

    Metrics are shares of rows: ``text_of_image``, whose own text is the nearest to their image, and
    of the softmax ``image_of_text``. The factor of the softmax is at most 100, above which it has
    no gradient.
    """
    embeddings, mask_B = (found["image"], found["tokens"]), batch["mask"].astype(jnp.float32)
    scale, numbers = params["scale"].astype(jnp.float32), {"numbers_B": batch.get("caption")}
    if config.loss == "sigmoid":
        bias = params["bias"].astype(jnp.float32)
        total, *hits = contrastive.sigmoid(*embeddings, jnp.exp(scale), bias, mask_B, **numbers)
    else:
        scale = jnp.exp(jnp.minimum(scale, math.log(MOST_SCALE)))
        total, *hits = contrastive.info_nce(*embeddings, scale, mask_B, **numbers)
    metrics = dict(zip(("text_of_image", "image_of_text"), hits, strict=False))
    return WeightedLoss(total, mask_B.sum(), metrics)


def logits(config: ClipConfig, params: Params, batch: Batch) -> jax.Array:
    """Returns the float32 logits [B, B'] of all images with all texts, for evaluation."""
    found = encode(config, params, batch)
    logits = jnp.exp(params["scale"]) * found["image"] @ found["tokens"].T
    return logits + params["bias"] if config.loss == "sigmoid" else logits


def parameter_count(config: ClipConfig) -> int:
    """Counts a model's parameters, without padding of the vocabulary."""
    padding = (config.text.padded_vocab - config.vocab_size) * config.text.width
    return sum(layers.parameter_sizes(init, config).values()) - padding


def _unit(x_BF: jax.Array) -> jax.Array:
    """Embeddings of length 1: in float32, since a factor multiplies their rounding."""
    x_BF = constrain(x_BF.astype(jnp.float32), "batch", None)
    return x_BF * jax.lax.rsqrt(jnp.square(x_BF).sum(1, keepdims=True) + 1e-24)
