"""The vision transformer (Dosovitskiy et al. 2020) as pure functions of plain dicts.

The layers are a decoder's, seeing both ways; before them an image is cut into patches, which one
product embeds, and a token of the model's own is put first, of whose last state the classes are.
``init``, ``loss_fn`` and ``stages`` are as in :mod:`jaxtrain.models.decoder`.

A batch is a dict: ``image`` [B, H, W, C], ``label`` int32 [B] and ``mask`` float32 [B].

Shapes: B batch, H height, W width, C channels, P side of a patch, N = H W / P^2 patches,
T = N + 1 positions, D width of the stream, L layers, K classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import decoder, distilling, layers, parts
from jaxtrain.models.config import Activation, BlockConfig, ModelFields
from jaxtrain.ops.losses import outcome_divergence
from jaxtrain.ops.numerics import drop
from jaxtrain.sharding.placement import gather_sequence, scatter_sequence
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.stages import Stages, loss_from_stages, run_layers

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]

RULES = OptionalRules(
    (
        # Whole on purpose: they are small, and only one stage of a pipeline has them.
        (r"^embed/patch/kernel$", (None, None, None, None)),
        (r"^embed/(first|positions)$", (None, None, None)),
        (r"^head/out/kernel$", (None, None)),
        (r"^(embed/patch|embed/norm|head/out)/(scale|bias)$", (None,)),
        *decoder.RULES,
    )
)

BATCH = OptionalRules()  # images have no positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelFields):
    """A vision transformer.

    Args:
      image: height, width and channels of an image.
      patch: P, which divides height and width.
      classes: K; None for a model without a head, whose result are hidden states.
      first: a token of the model's own stands before the patches.
      patch_bias: the product that embeds patches has a bias.
      embed_norm: what is embedded is normed, positions included.

    The other arguments are those of :mod:`jaxtrain.models.config`: :class:`ModelFields` and, of
    each layer, :class:`LayerFields`.

    >>> ViTConfig(image=(8, 8, 1), patch=2, layers=1, width=24, heads=3, classes=10).length
    17
    """

    mlp: Activation = "gelu_exact"  # type: ignore[valid-type]
    norm_eps: float = 1e-12
    image: tuple[int, int, int]
    patch: int
    classes: int | None = None
    first: bool = True
    patch_bias: bool = True
    embed_norm: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", tuple(self.image))  # a list in a checkpoint's JSON
        super().__post_init__()
        height, width, _ = self.image
        if height % self.patch or width % self.patch:
            raise ValueError(
                f"images of {height}x{width} cannot be cut into patches of {self.patch}: use a "
                "divisor of both sides"
            )
        if self.classes is not None and not self.first:
            raise ValueError(
                f"classes={self.classes} are predicted from the model's own token, and first=False "
                "leaves that out: give classes=None, or first=True"
            )

    @functools.cached_property
    def block(self) -> BlockConfig:
        """One of its layers."""
        return self.layer(causal=False)

    @property
    def length(self) -> int:
        """T, the positions of an image."""
        height, width, _ = self.image
        return self.first + (height // self.patch) * (width // self.patch)

    @property
    def head(self) -> str:
        """The kind of head, named as in an encoder: classes, or none."""
        return "none" if self.classes is None else "classes"

    # Of every one; no fields, for there is no other.
    positions = "learned"
    tied = False
    vocab_size = None


def vit_base(classes: int | None = 1000) -> ViTConfig:
    """The shape of ViT-B/16 (Dosovitskiy et al. 2020): 86,567,656 parameters."""
    shape = {"image": (224, 224, 3), "patch": 16, "layers": 12, "width": 768, "heads": 12}
    return ViTConfig(**shape, classes=classes)


class Embed(nnx.Module):
    """Patches, as one product, behind the model's own token; and positions."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        side, width = config.patch, config.width
        kernel = nnx.Param(parts.normal(rngs, side, side, config.image[2], width))
        bias = {"bias": nnx.Param(jnp.zeros(width, jnp.float32))} if config.patch_bias else {}
        self.patch = nnx.Dict(kernel=kernel, **bias)
        self.first = nnx.Param(parts.normal(rngs, 1, 1, width)) if config.first else None
        self.positions = nnx.Param(parts.normal(rngs, 1, config.length, width))
        self.norm = parts.Norm(config.block, rngs=rngs) if config.embed_norm else None

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        kernel_PPCD = self.patch["kernel"][...]
        side, D = kernel_PPCD.shape[0], kernel_PPCD.shape[-1]
        B, H, W, C = image_BHWC.shape
        image = image_BHWC.astype(kernel_PPCD.dtype)
        image = image.reshape(B, H // side, side, W // side, side, C).swapaxes(2, 3)
        patches_ND = image.reshape(-1, side * side * C) @ kernel_PPCD.reshape(-1, D)
        if "bias" in self.patch:
            patches_ND += self.patch["bias"][...].reshape(1, D)
        x_BTD = patches_ND.reshape(B, -1, D)
        if self.first is not None:
            first_B1D = jnp.broadcast_to(self.first[...], (B, 1, D))
            x_BTD = jnp.concatenate([first_B1D, x_BTD], axis=1)
        x_BTD += self.positions[...]
        return x_BTD if self.norm is None else self.norm(x_BTD)


class Head(nnx.Module):
    """Maps the first token's hidden state to float32 logits of classes."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.out = parts.dense(config.width, config.classes, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return layers.class_logits(self.out, gather_sequence(x_BTD)[:, 0])


def init(config: ViTConfig, rng: jax.Array) -> dict[str, Any]:
    """Draws float32 parameters: kernels and tables N(0, 0.02), biases zero.

    Returns:
      A nested dict: ``embed``, ``blocks`` (leading axis L), ``final_norm`` and, with classes,
      ``head``.
    """
    return layers.draw(config, rng, embed=Embed, head=None if config.classes is None else Head)


def loss_fn(config: ViTConfig) -> Callable[[Params, Batch, jax.Array | None], WeightedLoss]:
    """Returns ``loss(params, batch, rng)``: the cross-entropy of classes, and their accuracy."""
    return loss_from_stages(stages(config))


def stages(config: ViTConfig) -> Stages:
    """Returns the model as a pipeline takes it."""
    return layers.stages(config, embed=embed, head_loss=head_loss)


def encode(
    config: ViTConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns normed hidden states [B, T, D], in the dtype of the parameters, of a batch's
    ``image``; ``rng`` None means no dropout."""
    x_BTD = run_layers(stages(config), params, embed(config, params, batch, rng), {}, rng)
    return layers.apply(parts.Norm, config.block, params["final_norm"])(x_BTD)


def logits(
    config: ViTConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Returns float32 logits of classes [B, K]; arguments are those of :func:`encode`."""
    return layers.apply(Head, config, params["head"])(encode(config, params, batch, rng))


def embed(
    config: ViTConfig, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """First stage: images to the residual stream [B, T, D].

    Raises:
      ValueError: for images of another shape than the model's.
    """
    if (shape := tuple(batch["image"].shape[1:])) != config.image:
        raise ValueError(f"images have the shape {shape}, and the model's are {config.image}")
    x_BTD = layers.apply(Embed, config, params["embed"])(batch["image"])
    # Layers fold in 0 .. L - 1.
    return scatter_sequence(drop(x_BTD, config.dropout, parts.fold(rng, config.layers)))


def head_loss(config: ViTConfig, params: Params, x_BTD: jax.Array, batch: Batch) -> WeightedLoss:
    """Last stage: final norm, head and the cross-entropy of classes.

    Raises:
      ValueError: the model has no classes.
    """
    return layers.class_loss(head_logits(config, params, x_BTD), batch)


def head_logits(config: ViTConfig, params: Params, x_BTD: jax.Array) -> jax.Array:
    """Returns the float32 logits of classes [B, K] of the residual stream; arguments and errors
    are those of :func:`head_loss`."""
    if config.classes is None:
        raise ValueError("a model with classes=None predicts nothing: give it classes")
    x_BTD = layers.apply(parts.Norm, config.block, params["final_norm"])(x_BTD)
    return layers.apply(Head, config, params["head"])(x_BTD)


def distillation_loss(
    config: ViTConfig,
    answers: Callable[[Params, jax.Array, Batch], jax.Array],
    *,
    temperature: float,
    mix: float,
) -> Callable[[Params, jax.Array, Params, jax.Array, Batch], WeightedLoss]:
    """Returns ``loss(params, x, teacher_params, teacher_x, batch)``, the last stage of a model that
    learns from a teacher of the same classes (soft distillation in DeiT, Touvron et al. 2020,
    https://arxiv.org/abs/2012.12877), as :mod:`jaxtrain.models.distilling` has it.

    ``answers(teacher_params, teacher_x, batch)`` are the teacher's logits, such as
    :func:`head_logits` of another vision transformer.
    """

    def loss(params, x_BTD, teacher_params, teacher_x, batch):
        logits_BK = head_logits(config, params, x_BTD)
        known_BK = answers(teacher_params, teacher_x, batch)
        apart_B = outcome_divergence(logits_BK, known_BK, temperature) * batch["mask"]
        plain = layers.class_loss(logits_BK, batch)
        return distilling.joined(plain, apart_B.sum(), temperature=temperature, mix=mix)

    return loss


parameter_count = functools.partial(layers.parameter_count, init)
