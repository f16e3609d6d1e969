"""Results of losses: sums over tokens and their weight, and metrics beside them."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxtrain.tree import named_leaves

# Entered with True where the metrics of several steps are joined: a step adds, by this name, the
# sums that its metrics are made of.
keeps_sums = jax.make_user_context(False)
SUMS = "_sums"

# What a train step reports itself; a loss may not call a metric so.
RESERVED = ("loss", "weight", "grad_norm", "skipped", "spike", "learning_rate", "loss_scale")
RESERVED += ("param_norm", "update_norm", SUMS)


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
        has, others = (_beside(x.parts > 0, both) for x in (self, other))
        value = jnp.where(has, jnp.where(others, both, self.value), other.value)
        return type(self)(value, self.parts + other.parts)

    def result(self) -> jax.Array:
        """Returns the value over all parts; NaN where there are none."""
        return jnp.where(_beside(self.parts > 0, self.value), self.value, jnp.nan)


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
class Hottest(Sum):
    """The largest entry of each row of the sum [L, E] over the mean of that row, at its worst.

    >>> float((Hottest(jnp.array([[3.0, 1.0]])) + Hottest(jnp.array([[0.0, 4.0]]))).result())
    1.25
    """

    def result(self) -> jax.Array:
        worst = (self.value.max(-1) / self.value.mean(-1)).max(-1)
        return jnp.where(self.parts > 0, worst, jnp.nan)


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
      weight: scalar, how much counts; the reported loss is ``total / weight``. It is a function of
        the batch: a step takes one that depends on the parameters as a constant, and warns.
      metrics: name to scalar, or to an array of one shape in all parts (a load per expert). A bare
        value is summed like ``total`` and divided by ``weight``; a pair ``(total, weight)`` brings
        a weight of its own. ``jt.Max(x)``, ``jt.Sum(x)`` and ``jt.Last(x)`` are reduced so over
        microbatches and batches of an evaluation, in float32: whole numbers are exact to 2**24.

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
            return type(x)(x.value * share, x.parts) if isinstance(x, Sum) else x

        return jax.tree.map(scaled, self, is_leaf=_is_reduction)

    def means(self) -> dict[str, jax.Array]:
        """Returns ``loss`` and every metric, divided by its weight or reduced."""

        def mean(value):
            if _is_reduction(value):
                return value.result()
            total, weight = value if isinstance(value, tuple) else (value, self.weight)
            return total / _beside(weight, total)

        return {k: mean(v) for k, v in ({"loss": self.total} | dict(self.metrics)).items()}


def _is_reduction(node: Any) -> bool:
    return isinstance(node, Reduction)


def _beside(number: jax.Array, value: jax.Array) -> jax.Array:
    """A number, or those of a population's members, with the axes that the value has besides."""
    more = jnp.ndim(value) - jnp.ndim(number)
    return number.reshape(*number.shape, *[1] * more) if more and jnp.ndim(number) else number


LossFn = Callable[..., Any]


def row_wise(loss_fn: LossFn) -> LossFn:
    """Declares a loss to be a sum over the rows of its batch.

    The loss of some rows plus that of others, added as ``WeightedLoss`` adds, must be the loss of
    all of them: total, weight (such as the number of rows) and metrics. Cross-entropy of tokens is
    so. A mean over the batch, a contrastive loss, a penalty on parameters or a norm over the batch
    is not. On a mesh the gradients of such a loss are summed on each device over the microbatches
    of a step and reduced once (:mod:`jaxtrain.engines.reduction`); those of any other are reduced
    in every microbatch. Model state that it returns is to move by a mean over rows, which all weigh
    the same, and whole numbers in it are to count steps.

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


def as_weighted(loss: Any) -> WeightedLoss:
    """Brings what a loss function returned to a ``WeightedLoss`` of arrays; a scalar weighs 1.

    Raises:
      ValueError: where the loss or its weight is no scalar, or a metric holds several.
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
    for name, value in loss.metrics.items():
        if isinstance(value, Mapping | list):
            raise ValueError(
                f"the metric {name!r} is a {type(value).__name__}: give each of its entries a name "
                "of its own"
            )
    return jax.tree.map(jnp.asarray, loss)


# What the program of :func:`of_constant_weight` calls the weight, by which it is known.
CONSTANT_WEIGHT = "constant_weight"


@jax.custom_jvp
def _constant(weight: jax.Array, params: Any) -> jax.Array:
    return checkpoint_name(weight, CONSTANT_WEIGHT)


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _constant_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, Any]:
    moves = lambda tree: any(not isinstance(x, SymbolicZero) for x in jax.tree.leaves(tree))  # noqa: E731
    if all(map(moves, tangents)):
        warnings.warn(
            "the weight that the loss returns has a derivative by the parameters, and a step takes "
            "it as a constant: put jax.lax.stop_gradient around it where that is meant, or return "
            "the scalar total / weight",
            stacklevel=2,
        )
    return primals[0], tangents[0]


def of_constant_weight(loss: WeightedLoss, params: Any) -> WeightedLoss:
    """Returns the loss, which warns where it is differentiated by ``params`` and its weight is a
    function of them, or is computed as one: only ``total`` has a gradient in a step."""
    return dataclasses.replace(loss, weight=_constant(loss.weight, params))


def check_metrics(loss: WeightedLoss) -> None:
    """Raises where a loss calls a metric as a train step calls one of its own."""
    if taken := sorted(set(loss.metrics) & set(RESERVED)):
        raise ValueError(
            f"the loss calls a metric {taken[0]!r}, as a train step calls one of its own: give it "
            f"a name other than {', '.join(RESERVED)}"
        )
