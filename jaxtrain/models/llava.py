"""LLaVA (Liu et al. 2023, https://arxiv.org/abs/2304.08485): a decoder that reads an image.

The image tower is a :mod:`jaxtrain.models.vit`; two dense layers project its hidden states, and the
results stand in a :mod:`jaxtrain.models.decoder` where its tokens are ``image_token``, one for each
patch. The layers of both are two stacks of one model, as those of an encoder-decoder are.

A batch is a decoder's, with ``image`` [B, H, W, C]. Rows without image tokens are of text alone,
and their image has no effect. The parameters are those of the decoder and some more, so that
:mod:`jaxtrain.models.decoder` takes them as they are for batches without images.

Shapes: B rows, T tokens, P positions of an image in the tower, N of them in the decoder, E width of
the tower, D width of the decoder.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import decoder, layers, parts, vit
from jaxtrain.models.config import before_stack
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.vit import ViTConfig
from jaxtrain.sharding.placement import constrain, pin_residual, whole_rows
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages, loss_from_stages, run_layers, run_stacks

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

# The layers of the tower and of the decoder are stacked under these.
STACKS = ("image_blocks", "blocks")
# Parameters of a file that no output depends on: they are kept to be written again.
UNREAD = r"^unread/"


def _renamed(old: str, new: str, *lead: str | None) -> list[tuple[str, tuple[str | None, ...]]]:
    """Rules of a tower for parameters elsewhere, whose first axis, if given, is another."""
    return [
        (pattern.replace(old, new, 1), (*lead, *axes[len(lead) :]))
        for pattern, axes in vit.RULES
        if pattern.startswith(old)
    ]


RULES = OptionalRules(
    (
        *_renamed("^embed/", "^image/embed/"),
        (r"^image/embed/(patch|norm)/(scale|bias)$", (None,)),
        *_renamed("^blocks/", "^image_blocks/"),
        *_renamed("^blocks/", "^unread/blocks/", None),
        (r"^unread/final_norm/(scale|bias)$", (None,)),
        (r"^project/up/kernel$", ("embed", "mlp")),
        (r"^project/up/bias$", ("mlp",)),
        (r"^project/down/kernel$", ("mlp", "embed")),
        (r"^project/down/bias$", (None,)),
        *decoder.RULES,
    )
)

BATCH = decoder.BATCH


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaConfig:
    """A decoder that reads images.

    Args:
      image: the image tower; its last layer is the one whose result is projected, without a norm.
      text: the decoder.
      image_token: the token that stands for each of the N positions of an image.
      keep_first: the tower's own first token is one of these positions too.
      unread_layers: how many layers a file has behind the tower's last one: they are kept to be
        written again, and nothing reads them.

    Raises:
      ValueError: the tower has classes, the decoder experts, or ``image_token`` is none of its
        tokens.
    """

    image: ViTConfig
    text: DecoderConfig
    image_token: int
    keep_first: bool = False
    unread_layers: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("image", ViTConfig), ("text", DecoderConfig)):
            if isinstance(given := getattr(self, name), Mapping):  # in a checkpoint's JSON
                object.__setattr__(self, name, kind(**given))
        if self.image.classes is not None:
            raise ValueError(f"classes={self.image.classes} are no part of a tower: give None")
        if self.text.experts is not None or before_stack(self.text) or self.text.head != "tokens":
            raise ValueError(
                "`text` has experts, or a head of scores, and the layers of an image tower stand "
                "before its own: give a decoder without"
            )
        if not 0 <= self.image_token < self.vocab_size:
            raise ValueError(
                f"image_token={self.image_token} is none of the {self.vocab_size} tokens of the "
                "decoder: raise vocab_size, or give one of them"
            )

    @property
    def dropped(self) -> int:
        """Number of positions of the tower that the decoder does not read, the first ones."""
        return int(self.image.first and not self.keep_first)

    @property
    def positions_of_image(self) -> int:
        """N, the tokens that an image takes."""
        return self.image.length - self.dropped

    # What generation asks of a model that writes tokens.
    vocab_size = property(lambda self: self.text.vocab_size)
    positions = property(lambda self: self.text.positions)
    seq_len = property(lambda self: self.text.seq_len)
    rope_scaling = property(lambda self: self.text.rope_scaling)


class Projector(nnx.Module):
    """Two dense layers with a GELU between them, from the tower's width to the decoder's."""

    def __init__(self, config: LlavaConfig, *, rngs: nnx.Rngs) -> None:
        self.up = parts.dense(config.image.width, config.text.width, rngs)
        self.down = parts.dense(config.text.width, config.text.width, rngs)

    @jax.named_scope("project")
    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        hidden_BND = constrain(self.up(x_BNE), "batch", None, "mlp")
        y_BND = self.down(jax.nn.gelu(hidden_BND, approximate=False))
        return constrain(y_BND, "batch", None, None)


def init(config: LlavaConfig, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters: tower and decoder by their own laws, the projection N(0, 0.02).

    Returns:
      A nested dict: what :func:`jaxtrain.models.decoder.init` returns, and ``image`` (with
      ``embed``), ``image_blocks`` (leading axis of the tower's layers), ``project``, and
      ``unread``, which no output depends on.
    """
    rng_image, rng_text, rng_project, rng_unread = jax.random.split(rng, 4)
    tower = vit.init(config.image, rng_image)
    unread = {"final_norm": tower["final_norm"]}
    if count := config.unread_layers:
        unread["blocks"] = layers.stacked(layers.Block, config.image.block, count, rng_unread)
    return decoder.init(config.text, rng_text) | {
        "image": {"embed": tower["embed"]},
        "image_blocks": tower["blocks"],
        "project": layers.pure(Projector, config, rng_project),
        "unread": unread,
    }


def loss_fn(config: LlavaConfig) -> Callable[[Params, Batch, jax.Array | None], WeightedLoss]:
    """Returns ``loss(params, batch, rng)``: masked cross-entropy, summed over tokens, as that of
    :func:`jaxtrain.models.decoder.loss_fn`. The mask says which tokens are of a caption."""
    return loss_from_stages(stages(config))


def stages(config: LlavaConfig) -> Stages:
    """Returns the model as a pipeline takes it."""
    return layers.stages(
        config.text,
        embed=lambda _, *given: embed(config, *given),
        head_loss=lambda _, params, x, batch: decoder.head_loss(
            config.text, params, x["text"], batch
        ),
        block=(functools.partial(_see, config), functools.partial(_read, config)),
        stacked=Stack(STACKS),
        between=(functools.partial(between, config),),
    )


def logits(
    config: LlavaConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns float32 logits [B, T, vocab_size] of the next token of a batch, which needs no
    ``targets`` and ``mask``; ``rng`` None means no dropout."""
    x = run_stacks(stages(config), params, batch, rng)
    return decoder.head_logits(config.text, params, x["text"])


def embed(
    config: LlavaConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> dict[str, jax.Array]:
    """First stage: the tower's residual stream [B, P, E], and room for the decoder's [B, T, D]."""
    image_BPE = vit.embed(config.image, params["image"], batch, parts.fold(rng, _keys(config)))
    text_BTD = jnp.zeros((*batch["tokens"].shape, config.text.width), image_BPE.dtype)
    return {"image": image_BPE, "text": pin_residual(text_BTD)}


def between(
    config: LlavaConfig,
    params: Params,
    x: dict[str, jax.Array],
    batch: Batch,
    rng: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Embeds the tokens, with what the tower has seen in the place of image tokens, between the two
    stacks."""
    rng = parts.fold(rng, _keys(config) + 1)
    put = functools.partial(_put, config, batch["tokens"], projected(config, params, x["image"]))
    return x | {"text": decoder.embed(config.text, params, batch, rng, put)}


def projected(config: LlavaConfig, params: Params, image_BPE: jax.Array) -> jax.Array:
    """Returns what the decoder reads of images, [B, N, D], of the tower's last hidden states."""
    project = layers.apply(Projector, config, params["project"])
    return project(whole_rows(image_BPE)[:, config.dropped :])


def embed_with_images(
    config: LlavaConfig, params: Params, tokens_BT: jax.Array, image_BHWC: jax.Array
) -> jax.Array:
    """Returns the decoder's residual stream [B, T, D] of prompts with images, for generation.

    On a mesh it gathers the tower's layers one at a time.
    """
    batch = {"tokens": tokens_BT, "image": image_BHWC}
    x = embed(config, params, batch)
    x = run_layers(stages(config), params, x, batch, None, wrap=layers.gathering)
    return between(config, params, x, batch)["text"]


def check_images(config: LlavaConfig, tokens_BT: Any, image_BHWC: Any) -> None:
    """Checks, outside of a trace, that rows have N image tokens each, or none.

    Raises:
      ValueError: a row has another number of them, or images have another shape than the tower's.
    """
    shape, wanted = tuple(np.shape(image_BHWC)), (len(tokens_BT), *config.image.image)
    if shape != wanted:
        raise ValueError(f"`image` has the shape {shape}: the model and its prompts need {wanted}")
    counts_B = (np.asarray(tokens_BT) == config.image_token).sum(1)
    if wrong := sorted({*counts_B.tolist()} - {0, config.positions_of_image}):
        raise ValueError(
            f"a row has {wrong[0]} image tokens ({config.image_token}): an image takes "
            f"{config.positions_of_image}; give as many, or none"
        )


def parameter_count(config: LlavaConfig) -> int:
    """Counts a model's parameters, without padding of the vocabulary."""
    sizes = layers.parameter_sizes(init, config)
    text = layers.parameter_sizes(decoder.init, config.text)
    own = decoder.parameter_count(config.text)
    return sum(sizes.values()) - sum(text.values()) + own


def _see(config: LlavaConfig, layer, shared, x, batch, rng=None, index=0):
    """One layer of the tower."""
    del shared, batch
    how = {"rng": rng, "index": index}
    return x | {"image": layers.block(config.image.block, layer, x["image"], **how)}


def _read(config: LlavaConfig, layer, shared, x, batch, rng=None, index=0):
    """One layer of the decoder, whose numbers follow those of the tower's."""
    block = decoder.stages(config.text).block
    index = index - config.image.layers
    return x | {"text": block(layer, shared, x["text"], batch, rng, index)}


def _put(
    config: LlavaConfig, tokens_BT: jax.Array, image_BND: jax.Array, x_BTD: jax.Array
) -> jax.Array:
    """Puts an image's positions, in order, where a row's tokens are image tokens."""
    is_image_BT = constrain(tokens_BT, "batch", None) == config.image_token
    place_BT = jnp.where(is_image_BT, jnp.cumsum(is_image_BT, axis=1) - 1, -1)
    # A product, which every partitioner can split, and not a gather; no place is -1.
    chosen_BTN = jax.nn.one_hot(place_BT, image_BND.shape[1], dtype=image_BND.dtype)
    exact = jax.lax.Precision.HIGHEST
    own_BTD = jnp.einsum("btn,bnd->btd", chosen_BTN, image_BND, precision=exact)
    return jnp.where(is_image_BT[..., None], own_BTD.astype(x_BTD.dtype), x_BTD)


def _keys(config: LlavaConfig) -> int:
    """The first number behind those that layers fold into a key."""
    return config.image.layers + config.text.layers
