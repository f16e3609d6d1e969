"""A small convolutional classifier with BatchNorm or GroupNorm and dropout, in Flax NNX.

It is here for what a GPT does not have: state that is updated outside of gradients. Parameters and
running statistics are two plain nested dicts; ``init`` makes both and ``loss_fn`` returns the
second anew, which is what ``has_model_state=True`` asks of the step builders. A model that no
longer trains has both in one dict, its ``variables``.

Shapes: N images, H height, W width, C channels, K classes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.loss import WeightedLoss
from jaxtrain.models import layers, parts
from jaxtrain.ops.numerics import drop
from jaxtrain.sharding.rules import OptionalRules
from jaxtrain.sharding.stack import Stack

Params = Mapping[str, Any]
Batch = Mapping[str, jax.Array]
GROUPS = 8
# What is added to the variance, by norm.
EPSILON = {"batch": 1e-5, "group": 1e-6}
# Parameters are split by the automatic rule, and none is stacked by layer.
RULES, STACK = OptionalRules(), Stack()


@dataclasses.dataclass(frozen=True)
class ConvNetConfig:
    """The shape of the classifier.

    Args:
      image: height, width and channels of an image.
      classes: K.
      channels: output channels of each convolution; between two of them the image is halved.
      hidden: width of the dense layer before the output.
      dropout: rate before the output.
      norm: ``"batch"``, or ``"group"`` (Wu and He 2018, https://arxiv.org/abs/1803.08494), whose
        statistics are of each image, of which the model then keeps no state.
      momentum: of the running statistics, as a fraction of the old value kept per step.

    Raises:
      ValueError: for sizes that do not fit each other, or a rate that is none.
    """

    image: tuple[int, int, int] = (8, 8, 1)
    classes: int = 10
    channels: tuple[int, ...] = (32, 64)
    hidden: int = 128
    dropout: float = 0.3
    norm: str = "batch"
    momentum: float = 0.9

    def __post_init__(self):
        for name in ("image", "channels"):  # lists in a checkpoint's JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"channels={self.channels} must be numbers from 1, at least one")
        if not 0.0 <= self.dropout < 1.0:  # nor NaN
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        shrink = 2 ** (len(self.channels) - 1)
        height, width, _ = self.image
        if height % shrink or width % shrink:
            raise ValueError(
                f"images of {height}x{width} cannot be halved between {len(self.channels)} "
                f"convolutions: use sides that are multiples of {shrink}, or fewer channels"
            )


class ConvNet(nnx.Module):
    """Convolution, norm, ReLU; pooling in between; two dense layers at the end."""

    def __init__(self, config: ConvNetConfig, *, rngs: nnx.Rngs) -> None:
        inputs = (config.image[2], *config.channels)
        self.convolutions, self.norms = nnx.Dict(), nnx.Dict()
        for i, (a, b) in enumerate(itertools.pairwise(inputs)):
            self.convolutions[str(i)] = nnx.Conv(a, b, (3, 3), use_bias=False, rngs=rngs)
        for i, features in enumerate(config.channels):
            # Statistics in float32 whatever the image is computed in.
            own = {"epsilon": EPSILON[config.norm], "rngs": rngs}
            if config.norm == "batch":
                norm = nnx.BatchNorm(features, momentum=config.momentum, **own)
            else:
                norm = nnx.GroupNorm(features, math.gcd(features, GROUPS), **own)
            self.norms[str(i)] = norm
        shrink = 2 ** (len(config.channels) - 1)
        flat = config.channels[-1] * (config.image[0] // shrink) * (config.image[1] // shrink)
        self.dense = parts.Dense(flat, config.hidden, rngs=rngs)
        self.out = parts.Dense(config.hidden, config.classes, rngs=rngs)
        self.rate, self.norm = config.dropout, config.norm

    def __call__(self, x_NHWC: jax.Array, rng: jax.Array | None) -> jax.Array:
        for i in range(len(self.norms)):
            if i > 0:
                x_NHWC = nnx.max_pool(x_NHWC, (2, 2), strides=(2, 2))
            x_NHWC = self.convolutions[str(i)](x_NHWC)
            # The norm promotes to the float32 of its statistics, and so would all that follows.
            running = {"use_running_average": rng is None} if self.norm == "batch" else {}
            norm_NHWC = self.norms[str(i)](x_NHWC, **running)
            x_NHWC = jax.nn.relu(norm_NHWC.astype(x_NHWC.dtype))
        hidden = jax.nn.relu(self.dense(x_NHWC.reshape(x_NHWC.shape[0], -1)))
        return self.out(drop(hidden, self.rate, rng))


def init(config: ConvNetConfig, rng: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws parameters and makes fresh running statistics.

    Returns:
      ``(params, model_state)``, nested dicts of float32 arrays.

    >>> params, statistics = init(ConvNetConfig(), jax.random.key(0))
    >>> sorted(params), sorted(statistics["norms"]["0"])
    (['convolutions', 'dense', 'norms', 'out'], ['mean', 'var'])
    """
    model = ConvNet(config, rngs=nnx.Rngs(rng))
    params, statistics = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)


def variables(config: ConvNetConfig, rng: jax.Array) -> dict[str, Any]:
    """Draws parameters and makes fresh running statistics, in one nested dict.

    >>> sorted(variables(ConvNetConfig(), jax.random.key(0))["norms"]["0"])
    ['bias', 'mean', 'scale', 'var']
    """
    return layers.pure(ConvNet, config, rng)


def logits(
    config: ConvNetConfig, variables: Params, batch: Batch, state: Params | None = None
) -> jax.Array:
    """Returns float32 logits of classes [N, K] of a batch's ``image``, by the running statistics.

    Args:
      config: the model.
      variables: parameters and running statistics, or parameters alone.
      batch: has ``image`` [N, H, W, C] in 0..1.
      state: the running statistics, where ``variables`` lacks them.
    """
    return _run(config, variables, state or {}, batch, None)[0]


def loss_fn(config: ConvNetConfig) -> Callable[..., tuple[WeightedLoss, dict[str, Any]]]:
    """Returns ``loss(params, model_state, batch, rng)``: summed cross-entropy and new statistics.

    A batch has ``image`` [N, H, W, C] in 0..1, ``label`` [N] int32 and ``mask`` [N] float32. With
    ``rng`` None the running statistics are used, and nothing is dropped. The metric is
    ``accuracy``.
    """

    def loss(params: Params, model_state: Params, batch: Batch, rng):
        logits_NK, model = _run(config, params, model_state, batch, rng)
        new = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
        new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, dict(model_state))
        return layers.class_loss(logits_NK, batch), new

    return loss


def _run(
    config: ConvNetConfig, params: Params, state: Params, batch: Batch, rng: jax.Array | None
) -> tuple[jax.Array, ConvNet]:
    """The logits of a batch, and the model with the statistics that it then has."""
    model = layers.apply(ConvNet, config, params, state)
    dtype = params["convolutions"]["0"]["kernel"].dtype
    return model(batch["image"].astype(dtype), rng).astype(jnp.float32), model
