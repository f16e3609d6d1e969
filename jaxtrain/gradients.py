"""Gradient engines: how a batch becomes summed gradients.

An engine is a pure function ``(params, model_state, batch, rng, loss_scale) -> GradientSums``. The
sums run over tokens (or examples: whatever the loss calls its weight), are kept in float32, and are
divided once, by the global weight, in the train step. So a microbatch with few tokens counts for
few, on any number of microbatches and on any mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.mesh import BATCH_AXES

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """A loss as a sum and its weight, so that parts of a batch can be added exactly.

    Args:
      total: scalar, the loss summed over everything that counts (tokens, examples).
      weight: scalar, how much counts; the reported loss is ``total / weight``.
      metrics: name to scalar. A bare scalar is summed like ``total`` and divided by ``weight``; a
        pair ``(total, weight)`` brings a weight of its own.

    >>> a = WeightedLoss(total=6.0, weight=3.0, metrics={"correct": 1.0})
    >>> (a + WeightedLoss(total=2.0, weight=1.0, metrics={"correct": 1.0})).means()
    {'loss': 2.0, 'correct': 0.5}
    """

    total: jax.Array
    weight: jax.Array
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "WeightedLoss") -> "WeightedLoss":
        return jax.tree.map(lambda a, b: a + b, self, other)

    def means(self) -> dict[str, jax.Array]:
        """Returns ``loss`` and every metric, each divided by its weight."""
        pairs = {"loss": self.total} | dict(self.metrics)
        pairs = {k: v if isinstance(v, tuple) else (v, self.weight) for k, v in pairs.items()}
        return {name: total / weight for name, (total, weight) in pairs.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSums:
    """What a gradient engine returns.

    Args:
      grads: like the parameters, float32: the gradient of ``loss.total``, loss scale removed.
      loss: sums over the microbatches that were finite.
      model_state: the model state after the batch (None where the model has none).
      skipped: int32 scalar, microbatches left out because a gradient or their loss was not finite.
    """

    grads: PyTree
    loss: WeightedLoss
    model_state: PyTree
    skipped: jax.Array


LossFn = Callable[..., Any]
GradientEngine = Callable[[PyTree, PyTree, PyTree, jax.Array, jax.Array | None], GradientSums]


def plain(loss_fn: LossFn) -> GradientEngine:
    """Gradients of the whole batch at once.

    Args:
      loss_fn: ``(params, model_state, batch, rng) -> (WeightedLoss, model_state)``.

    A batch whose loss or gradient is not finite yields zeros, weight 0, and ``skipped`` = 1.
    """

    def engine(params, model_state, batch, rng, loss_scale):
        def forward(params):
            loss, new_state = loss_fn(params, model_state, batch, rng)
            return loss.total, (loss, new_state)

        total, vjp, (loss, new_state) = jax.vjp(forward, params, has_aux=True)
        weight = loss.weight.astype(jnp.float32)
        scale = jnp.float32(1.0) if loss_scale is None else loss_scale
        # The gradient of the mean, not of the sum, is what travels backward: a sum over a million
        # tokens leaves float16's range, and the loss scale would be spent on undoing it.
        per_token = jnp.where(weight > 0, scale / jnp.where(weight > 0, weight, 1.0), 0.0)
        (grads,) = vjp(per_token.astype(total.dtype))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * (weight / scale), grads)
        sums = GradientSums(grads, float32_loss(loss), new_state, jnp.int32(0))
        nothing = jax.tree.map(jnp.zeros_like, sums)
        nothing = dataclasses.replace(nothing, model_state=model_state, skipped=jnp.int32(1))
        return select(all_finite((sums.grads, sums.loss.total)), sums, nothing)

    return engine


def accumulated(
    loss_fn: LossFn, microbatches: int, constrain: Callable[[PyTree], PyTree] = lambda grads: grads
) -> GradientEngine:
    """Gradients of ``microbatches`` equal slices of the batch, one after the other in a scan.

    Args:
      loss_fn: as in :func:`plain`.
      microbatches: how many; the leading axis of every batch leaf must be a multiple of it.
      constrain: applied to the running sum of gradients (its sharding, under ZeRO-2).

    Microbatch j holds rows j, j + k, j + 2k, ...: each device then slices the rows it already has,
    where contiguous microbatches would move every row to another device.
    """
    one = plain(loss_fn)

    def engine(params, model_state, batch, rng, loss_scale):
        slices = split_microbatches(batch, microbatches)

        def add(sums, j_and_slice):
            j, microbatch = j_and_slice
            part = one(params, sums.model_state, microbatch, jax.random.fold_in(rng, j), loss_scale)
            return GradientSums(
                grads=constrain(jax.tree.map(jnp.add, sums.grads, part.grads)),
                loss=sums.loss + part.loss,
                model_state=part.model_state,
                skipped=sums.skipped + part.skipped,
            ), None

        first = jax.tree.map(lambda x: x[0], slices)
        shapes = jax.eval_shape(one, params, model_state, first, rng, loss_scale)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        start = dataclasses.replace(zeros, grads=constrain(zeros.grads), model_state=model_state)
        sums, _ = jax.lax.scan(add, start, (jnp.arange(microbatches), slices))
        return sums

    return engine


def split_microbatches(batch: PyTree, microbatches: int) -> PyTree:
    """Reshapes every leaf ``[B, ...]`` to ``[microbatches, B / microbatches, ...]``, rows strided.

    Raises:
      ValueError: where a leading axis is missing, is not a multiple of ``microbatches``, or leaves
        a microbatch that the devices of the ambient mesh cannot share evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)

    def split(path, x):
        if x.ndim == 0 or x.shape[0] % microbatches:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"batch leaf {name!r} has shape {tuple(x.shape)}: its leading axis cannot be cut "
                f"into accumulate={microbatches} microbatches; use a global batch that is a "
                f"multiple of {microbatches}"
            )
        rows = x.shape[0] // microbatches
        if rows % parts:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"batch leaf {name!r} has {x.shape[0]} rows: accumulate={microbatches} "
                f"microbatches of {rows} do not divide over the {parts} devices that split the "
                "batch, and some would do the others' work again; use a global batch that is a "
                f"multiple of {microbatches * parts}, or fewer microbatches"
            )
        return jnp.moveaxis(x.reshape(rows, microbatches, *x.shape[1:]), 1, 0)

    return jax.tree_util.tree_map_with_path(split, batch)


def all_finite(tree: PyTree) -> jax.Array:
    """Returns a bool scalar: no floating-point leaf holds an infinity or a NaN."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()


def select(condition: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Chooses between two like pytrees with a bool scalar, leaf by leaf (typed keys too)."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), on_true, on_false)


def as_weighted(loss: Any) -> WeightedLoss:
    """Brings what a loss function returned to a ``WeightedLoss`` of arrays; a scalar weighs 1.

    Raises:
      ValueError: where the loss or its weight is no scalar.
    """
    if isinstance(loss, tuple):
        raise ValueError(
            f"the loss returned a tuple of {len(loss)}: return WeightedLoss(total, weight, "
            "metrics={...}) to report more than a loss; only with has_model_state=True is it "
            "(loss, model_state)"
        )
    if not isinstance(loss, WeightedLoss):
        loss = WeightedLoss(loss, jnp.float32(1.0))
    if jnp.shape(loss.total) or jnp.shape(loss.weight):
        raise ValueError(
            f"the loss has shape {jnp.shape(loss.total)} and its weight {jnp.shape(loss.weight)}: "
            "both must be scalars; return WeightedLoss(total=(loss * mask).sum(), "
            "weight=mask.sum())"
        )
    return jax.tree.map(jnp.asarray, loss)


def float32_loss(loss: WeightedLoss) -> WeightedLoss:
    """Casts a loss, its weight and its metrics to float32, in which they are summed."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), loss)
