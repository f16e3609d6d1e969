"""Counts the work of the stages of a pipeline, and chooses how many layers each has.

A tick of a pipeline lasts as long as its slowest device. The first stage also embeds, the last also
has the loss; where that weighs as much as several layers (a large vocabulary and few layers), the
last stage should have fewer of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.flops import count_flops
from jaxtrain.stages import Stages
from jaxtrain.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Weights:
    """Floating-point operations of the parts of a model for one microbatch.

    Each is a pair: of the forward pass, and of the forward and the backward pass together, as
    :mod:`jaxtrain.flops` counts them. What ``Stages.remat`` computes again is left out.
    """

    embed: tuple[float, float]
    layer: tuple[float, float]
    head: tuple[float, float]

    def of_stages(
        self, counts: Sequence[int], *, recompute: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the operations of each global stage's forward unit and of its backward unit.

        Args:
          counts: how many layers each has.
          recompute: whether a backward unit runs its stage again, and the last one, which then has
            nothing to run forward, only so (``remat="full"``).
        """
        counts_G, first, last = (
            np.array(counts, float),
            np.zeros(len(counts)),
            np.zeros(len(counts)),
        )
        first[0] = last[-1] = 1.0
        forward_G = counts_G * self.layer[0] + first * self.embed[0]
        both_G = counts_G * self.layer[1] + first * self.embed[1]
        backward_G = (both_G if recompute else both_G - forward_G) + last * self.head[1]
        return forward_G * (1 - last) if recompute else forward_G, backward_G


def weigh(stages: Stages, init_fn: Callable[[jax.Array], PyTree], batch: PyTree) -> Weights:
    """Counts the operations of a model's parts.

    Args:
      stages: the model.
      init_fn: ``rng -> params``, in natural order.
      batch: one microbatch, or its shapes.

    Raises:
      ValueError: for several stacks of layers.
    """
    if len(stages.blocks) > 1:
        raise ValueError(f"the model has {len(stages.blocks)} stacks of layers: one is weighed")
    rng = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(init_fn, rng)
    outer = stages.outer(params)
    x = jax.eval_shape(stages.embed, outer, batch, rng)
    stacked = params[stages.stacked.key]
    layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), stacked)

    def block(layer, outer, x, batch, rng):
        index = jnp.int32(0)  # traced, as where it trains: it stands for every layer
        return stages.layer(0, outer | {stages.stacked.key: layer}, x, batch, rng, index)

    def both(function: Callable, trained: tuple, *rest: Any) -> tuple[float, float]:
        def run(trained, cotangent, *rest):
            return jax.vjp(lambda *trained: function(*trained, *rest), *trained)[1](cotangent)

        y = jax.eval_shape(function, *trained, *rest)
        forward = count_flops(function, *trained, *rest).total
        return forward, count_flops(run, trained, y, *rest).total

    return Weights(
        embed=both(stages.embed, (outer,), batch, rng),
        layer=both(block, (layer, outer, x), batch, rng),
        head=both(
            lambda outer, x, batch: _total(stages.head_loss(outer, x, batch)), (outer, x), batch
        ),
    )


def balanced(weights: Weights, *, layers: int, stages: int, recompute: bool = True) -> tuple:
    """Returns how many layers each global stage should have, so that the busiest has least to do.

    Args:
      weights: from :func:`weigh`.
      layers: of the model.
      stages: global stages: devices along ``pipe`` x chunks per device.
      recompute: as for :meth:`Weights.of_stages`.

    >>> balanced(Weights((0, 0), (1, 3), (0, 18)), layers=12, stages=4)
    (4, 4, 4, 0)
    >>> balanced(Weights((0, 0), (1, 3), (0, 3)), layers=7, stages=3, recompute=False)
    (3, 3, 1)
    """
    counts = np.zeros(stages, int)
    for _ in range(layers):
        more = sum(weights.of_stages(counts + 1, recompute=recompute))
        counts[np.argmin(more)] += 1
    return tuple(counts.tolist())


def _total(loss: Any) -> jax.Array:
    return getattr(loss, "total", loss)
