"""Gradient engines: how a batch becomes summed gradients.

An engine is a pure function ``(params, model_state, batch, rng, loss_scale) -> GradientSums``. The
sums run over tokens (or examples: whatever the loss calls its weight), are kept in float32 or
wider, and are divided once, by the global weight, in the train step. So a microbatch with few
tokens counts for few, on any number of microbatches and on any mesh.

:func:`plain` makes the usual one of a loss. ``build_train_step(engine=)`` takes another that makes
one of a loss (gradients clipped for every example, say); accumulation goes around either.

An engine that has an argument ``frozen`` is given the paths of the parameters that do not train,
and splits them off before it differentiates (:func:`trainable`): they cost no gradient.

An engine leaves nothing out: an infinity or a NaN of one microbatch stays in the sums, and the
train step then leaves out the whole batch (:func:`jaxtrain.step.build_update`).
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.parallel.mesh import BATCH_AXES
from jaxtrain.parallel.placement import free_axes, manual_batch_axes
from jaxtrain.parallel.row_keys import microbatch_keys
from jaxtrain.tree import PyTree, combine, named_leaves, partition, widen

# What a train step reports itself; a loss may not call a metric so.
RESERVED = ("loss", "weight", "grad_norm", "skipped", "spike", "learning_rate", "loss_scale")
RESERVED += ("param_norm", "update_norm")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A metric of :class:`WeightedLoss` that is no mean: a ``Max``, ``Sum`` or ``Last``.

    Args:
      value: of one part of the data; an array is reduced entry by entry.
      parts: scalar, of how many parts; 0 is nothing yet, whatever the value. So zeros begin every
        sum, and add nothing to it, as for what a pipeline adds over its stages.
    """

    value: jax.Array
    parts: jax.Array = 1.0

    def __add__(self, other: "Reduction") -> "Reduction":
        both = self.joined(self.value, other.value)
        value = jnp.where(self.parts > 0, jnp.where(other.parts > 0, both, self.value), other.value)
        return type(self)(value, self.parts + other.parts)

    def result(self) -> jax.Array:
        """Returns the value over all parts; NaN where there are none."""
        return jnp.where(self.parts > 0, self.value, jnp.nan)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max(Reduction):
    """The largest value of all parts."""

    joined = staticmethod(jnp.maximum)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum(Reduction):
    """The sum of the values of all parts."""

    joined = staticmethod(jnp.add)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Last(Reduction):
    """The value of the last part."""

    joined = staticmethod(lambda first, last: last)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """A loss as a sum and its weight, so that parts of a batch can be added exactly.

    Args:
      total: scalar, the loss summed over everything that counts (tokens, examples).
      weight: scalar, how much counts; the reported loss is ``total / weight``.
      metrics: name to scalar, or to an array of one shape in all parts (a load per expert). A bare
        value is summed like ``total`` and divided by ``weight``; a pair ``(total, weight)`` brings
        a weight of its own. ``jt.Max(x)``, ``jt.Sum(x)`` and ``jt.Last(x)`` are reduced so over
        microbatches and batches of an evaluation.

    >>> a = WeightedLoss(total=6.0, weight=3.0, metrics={"correct": 1.0})
    >>> (a + WeightedLoss(total=2.0, weight=1.0, metrics={"correct": 1.0})).means()
    {'loss': 2.0, 'correct': 0.5}
    """

    total: jax.Array
    weight: jax.Array
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "WeightedLoss") -> "WeightedLoss":
        others = named_leaves(other.metrics)
        for name, value in named_leaves(self.metrics).items():
            shapes = jnp.shape(value), jnp.shape(others.get(name, value))
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"metric {name!r} has shape {shapes[0]} in one part of the data and "
                    f"{shapes[1]} in another: parts are added, so give it one shape"
                )
        return jax.tree.map(lambda a, b: a + b, self, other, is_leaf=_is_reduction)

    def times(self, share: float) -> "WeightedLoss":
        """Returns the sums of this share of the same data; a ``Max`` or ``Last`` stays."""

        def scaled(x):
            if not _is_reduction(x):
                return x * share
            return Sum(x.value * share, x.parts) if isinstance(x, Sum) else x

        return jax.tree.map(scaled, self, is_leaf=_is_reduction)

    def means(self) -> dict[str, jax.Array]:
        """Returns ``loss`` and every metric, divided by its weight or reduced."""

        def mean(value):
            if _is_reduction(value):
                return value.result()
            total, weight = value if isinstance(value, tuple) else (value, self.weight)
            return total / weight

        return {k: mean(v) for k, v in ({"loss": self.total} | dict(self.metrics)).items()}


def _is_reduction(node: Any) -> bool:
    return isinstance(node, Reduction)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSums:
    """What a gradient engine returns.

    Args:
      grads: like the parameters, float32 or wider: the gradient of ``loss.total``, loss scale
        removed. None stands for parameters that are frozen or no floating-point numbers.
      loss: sums over the whole batch.
      model_state: the model state after the batch (None where the model has none).
      microbatches: in how many parts the batch was taken.
    """

    grads: PyTree
    loss: WeightedLoss
    model_state: PyTree
    microbatches: int = dataclasses.field(metadata={"static": True}, default=1)


LossFn = Callable[..., Any]
GradientEngine = Callable[..., GradientSums]


def row_wise(loss_fn: LossFn) -> LossFn:
    """Declares a loss to be a sum over the rows of its batch.

    The loss of some rows plus that of others, added as ``WeightedLoss`` adds, must be the loss of
    all of them: total, weight (such as the number of rows) and metrics. Cross-entropy of tokens is
    so. A mean over the batch, a contrastive loss, a penalty on parameters or a norm over the batch
    is not. On a mesh the
    gradients of such a loss are summed on each device over the microbatches of a step and reduced
    once (:mod:`jaxtrain.parallel.reduction`); those of any other are reduced in every microbatch.

    Nobody checks the declaration; :func:`jaxtrain.parity` shows where it is false. A loss may draw
    with its key by :func:`jaxtrain.ops.numerics.drop`; one that draws in another way is found out
    and left as it is.

    Args:
      loss_fn: as for :func:`jaxtrain.build_train_step`.

    Returns:
      The same function, marked. It raises ``ValueError`` for a scalar, which weighs 1 however many
      rows it is of.

    >>> is_row_wise(row_wise(lambda params, x, rng: WeightedLoss((params * x).sum(), len(x))))
    True
    """

    @functools.wraps(loss_fn)
    def marked(*args, **kwargs):
        loss = loss_fn(*args, **kwargs)
        if not isinstance(loss, WeightedLoss | tuple):
            raise ValueError(
                "a loss that is declared a sum over rows (jaxtrain.row_wise) returned a scalar, "
                "which weighs 1 however many rows it is of: return jaxtrain.WeightedLoss(total, "
                "weight), with a weight that is a sum over rows too"
            )
        return loss

    marked.is_row_wise = True
    return marked


def is_row_wise(loss_fn: LossFn) -> bool:
    """Whether a loss has been declared :func:`row_wise`."""
    return getattr(loss_fn, "is_row_wise", False)


def trainable(params: PyTree, frozen: Collection[str] = ()) -> tuple[PyTree, PyTree]:
    """Splits parameters into what has a gradient and the rest: the frozen ones and integers.

    Args:
      params: the parameters.
      frozen: paths of those that do not train.

    Returns:
      Two trees, as :func:`jaxtrain.tree.partition` makes them.
    """
    return partition(
        lambda name, p: name not in frozen and jnp.issubdtype(jnp.result_type(p), jnp.inexact),
        params,
    )


def plain(loss_fn: LossFn) -> GradientEngine:
    """Gradients of the whole batch at once.

    Args:
      loss_fn: ``(params, model_state, batch, rng) -> (WeightedLoss, model_state)``.
    """

    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        training, rest = trainable(params, frozen)

        def forward(training):
            loss, new_state = loss_fn(combine(training, rest), model_state, batch, rng)
            return loss.total, (loss, new_state)

        total, vjp, (loss, new_state) = jax.vjp(forward, training, has_aux=True)
        weight = loss.weight
        if loss_scale is not None and (taken_over := manual_batch_axes()):
            # What overflows is not to depend on how many devices share the rows.
            weight = jax.lax.psum(widen(weight), taken_over)
        seed, factor = seed_and_factor(weight, loss_scale, total.dtype)
        (grads,) = vjp(seed)
        return GradientSums(scaled(grads, factor), widen(loss), new_state)

    return engine


def accumulated(
    loss_fn: LossFn,
    microbatches: int,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    *,
    engine: Callable[[LossFn], GradientEngine] = plain,
) -> GradientEngine:
    """Gradients of ``microbatches`` equal slices of the batch, one after the other in a scan.

    Args:
      loss_fn: as in :func:`plain`.
      microbatches: how many; see :func:`split_microbatches`.
      constrain: applied to the running sum of gradients (its sharding, under ZeRO-2).
      engine: makes of the loss the engine of one microbatch.

    Microbatch j holds rows j, j + k, j + 2k, ...: each device then slices the rows it already has,
    where contiguous microbatches would move every row to another device.
    """

    each = engine(loss_fn)

    def accumulating(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        one = functools.partial(run, each, frozen=frozen)
        slices = split_microbatches(batch, microbatches)
        _check_shared(batch, microbatches)

        def add(sums, j_and_slice):
            j, microbatch = j_and_slice
            part = one(params, sums.model_state, microbatch, key(j), loss_scale)
            return GradientSums(
                grads=constrain(jax.tree.map(jnp.add, sums.grads, part.grads)),
                loss=sums.loss + part.loss,
                model_state=part.model_state,
            ), None

        first = jax.tree.map(lambda x: x[0], slices)
        with_key = lambda rng: one(params, model_state, first, rng, loss_scale)  # noqa: E731
        key, shapes = microbatch_keys(with_key, rng, microbatches)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes())
        start = dataclasses.replace(zeros, grads=constrain(zeros.grads), model_state=model_state)
        sums, _ = jax.lax.scan(add, start, (jnp.arange(microbatches), slices))
        return dataclasses.replace(sums, microbatches=microbatches)

    return accumulating


def run(engine: GradientEngine, *given: Any, frozen: Collection[str] = ()) -> GradientSums:
    """Calls an engine; one that has no argument ``frozen`` differentiates everything.

    Raises:
      ValueError: it returns something else than ``GradientSums``.
    """
    sums = engine(*given, **taken(engine, {"frozen": frozen} if frozen else {}))
    if not isinstance(sums, GradientSums):
        raise ValueError(
            f"the gradient engine returned {type(sums).__name__}: return jaxtrain.gradients."
            "GradientSums(grads, loss, model_state)"
        )
    return sums


def taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that ``function`` takes."""
    takes = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in takes}


def seed_and_factor(
    weight: jax.Array, loss_scale: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangent of a loss total, and what turns its gradients into those of the total.

    The gradient of the mean, not of the sum, is what travels backward: a sum over a million tokens
    leaves float16's range, and the loss scale would be spent on undoing it. The factor undoes the
    cotangent as rounded to ``dtype``, so that the rounding does not reach the gradients.

    Args:
      weight: of the loss, of any shape and sign. A part that weighs nothing may have a total, and
        so a gradient, all the same: its cotangent is that of a part which weighs 1.
      loss_scale: scalar, or None for 1.
      dtype: of the loss total.
    """
    weight = weight.astype(jnp.promote_types(dtype, jnp.float32))
    size = jnp.where(weight == 0, 1.0, jnp.abs(weight))
    seed = ((1.0 if loss_scale is None else loss_scale) / size).astype(dtype)
    return seed, 1.0 / widen(seed)


def scaled(grads: PyTree, factor: jax.Array) -> PyTree:
    """Returns ``grads * factor`` in the dtype in which gradients are summed."""
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), widen(grads))


def split_microbatches(batch: PyTree, microbatches: int, argument: str = "accumulate") -> PyTree:
    """Reshapes every leaf ``[B, ...]`` to ``[microbatches, B / microbatches, ...]``, rows strided.

    A scalar goes to every microbatch as it is.

    Args:
      batch: leaves with the same number B of rows, or scalars.
      microbatches: a divisor of B.
      argument: what the caller names ``microbatches``, for the error.

    Raises:
      ValueError: where leaves differ in B, or B is not a multiple of ``microbatches``.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    leaves = named_leaves(batch)
    counts = {name: leaf.shape[0] for name, leaf in leaves.items() if leaf.ndim}
    largest = max(counts, key=counts.get, default=None)
    for name, count in counts.items():
        where = f"batch leaf {name!r} has shape {tuple(leaves[name].shape)}"
        if count != counts[largest]:
            raise ValueError(
                f"{where} and {largest!r} has {counts[largest]} rows: with "
                f"{argument}={microbatches} every leaf must have as many rows, or be a scalar; "
                "repeat it for every row, or let the loss function close over it"
            )
        if count % microbatches:
            raise ValueError(
                f"{where}: its leading axis cannot be cut into {argument}={microbatches} "
                f"microbatches; use a global batch that is a multiple of {microbatches}"
            )

    def split(x):
        if not x.ndim:
            return jnp.broadcast_to(x, (microbatches,))
        rows = x.shape[0] // microbatches
        return jnp.moveaxis(x.reshape(rows, microbatches, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def _check_shared(batch: PyTree, microbatches: int) -> None:
    """Raises where microbatches have rows that the devices of the ambient mesh cannot share."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in free_axes(mesh) if axis in BATCH_AXES)
    for name, leaf in named_leaves(batch).items():
        rows = jnp.shape(leaf)[0] // microbatches if jnp.ndim(leaf) else 0
        if rows % parts:
            raise ValueError(
                f"batch leaf {name!r} has {leaf.shape[0]} rows: accumulate={microbatches} "
                f"microbatches of {rows} do not divide over the {parts} devices that split the "
                "batch, and some would do the others' work again; use a global batch that is a "
                f"multiple of {microbatches * parts}, or fewer microbatches"
            )


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


def check_metrics(loss: WeightedLoss) -> None:
    """Raises where a loss calls a metric as a train step calls one of its own."""
    if taken := sorted(set(loss.metrics) & set(RESERVED)):
        raise ValueError(
            f"the loss calls a metric {taken[0]!r}, as a train step calls one of its own: give it "
            f"a name other than {', '.join(RESERVED)}"
        )
