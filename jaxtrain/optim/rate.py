"""The stage that multiplies by the learning rate, and leaves in the state the one it used."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.numerics import check_loss
from jaxtrain.optim.reports import reports

LearningRate = float | jax.Array | Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """State without arrays: groups of parameters with a rate of their own, by name.

    Attributes:
      factors: pairs of a name and what multiplies the rate, or that of each layer.
    """

    factors: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})


class LearningRateState(NamedTuple):
    """State of ``scale_by_learning_rate``.

    Attributes:
      count: int32 scalar, updates made so far.
      learning_rate: float32 scalar, the rate of the latest update; before any, that of count 0.
      groups: those whose rates are reported too.
      plateau: of the transformation that scales the rate by the loss.
    """

    count: jax.Array
    learning_rate: jax.Array
    groups: Groups = Groups(())
    plateau: Any = ()

    def reports(self) -> dict[str, jax.Array]:
        rates = {
            f"learning_rate/{name}": jnp.multiply.outer(self.learning_rate, jnp.float32(factor))
            for name, factor in self.groups.factors
        }
        return {"learning_rate": self.learning_rate} | rates


def scale_by_learning_rate(
    learning_rate: LearningRate,
    *,
    groups: tuple[tuple[str, Any], ...] = (),
    plateau: optax.GradientTransformationExtraArgs | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by minus the learning rate, which it keeps readable in its state.

    optax's own stage keeps a count only when given a schedule, and the rate never.

    Args:
      learning_rate: a number, a traced scalar, or a schedule ``count -> rate``.
      groups: pairs of a name and a factor, or one for each layer, to report the rates of.
      plateau: such as :func:`reduce_on_plateau`, whose ``scale`` multiplies the rate; ``update``
        then takes ``value=``, the loss.

    Returns:
      A transformation whose state is a ``LearningRateState``.

    >>> tx = scale_by_learning_rate(lambda count: 0.5 / (1 + count))
    >>> state = tx.init(jnp.ones(2))
    >>> for _ in range(2):
    ...     updates, state = tx.update(jnp.ones(2), state)
    >>> updates.tolist(), float(state.learning_rate), int(state.count)
    ([-0.25, -0.25], 0.25, 2)
    """

    def rate_at(count: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.asarray(rate, jnp.promote_types(dtype, jnp.float32))

    def init(params):
        del params
        count = jnp.zeros([], jnp.int32)
        watched = () if plateau is None else plateau.init(jnp.float32(0))
        return LearningRateState(count, rate_at(count), Groups(groups), watched)

    def update(updates, state, params=None, *, value=None, **extra):
        del params, extra
        watched, scale = state.plateau, 1
        if plateau is not None:
            check_loss("plateau_factor", value)
            _, watched = plateau.update((), watched, value=value)
            scale = watched.scale
        scaled = lambda u: (-scale * rate_at(state.count, u.dtype) * u).astype(u.dtype)  # noqa: E731
        count, rate = optax.safe_increment(state.count), scale * rate_at(state.count)
        return jax.tree.map(scaled, updates), LearningRateState(count, rate, state.groups, watched)

    return optax.GradientTransformationExtraArgs(init, update)


def reduce_on_plateau(
    factor: float | jax.Array, *, patience: int, window: int
) -> optax.GradientTransformationExtraArgs:
    """Keeps a scale that is multiplied by ``factor`` where the loss no longer falls.

    ``optax.contrib.reduce_on_plateau`` with the same state, for losses of either sign: optax asks
    for less than 0.9999 times the best loss, and every loss near a negative best is less than that.

    Args:
      factor: above 0 and below 1.
      patience: windows in a row whose mean loss is not below the best one by 0.01 % of the best
        one's magnitude.
      window: updates whose losses are averaged.

    Returns:
      A transformation that changes no update; its update takes ``value=``, the loss.

    >>> tx = reduce_on_plateau(0.5, patience=2, window=1)
    >>> state = tx.init(jnp.float32(0))
    >>> for loss in (-5.0, -5.0, -4.0):
    ...     _, state = tx.update((), state, value=loss)
    >>> float(state.scale)
    0.5
    """
    init = optax.contrib.reduce_on_plateau(0.5).init

    def update(updates, state, params=None, *, value, **extra):
        del params, extra
        count = state.count + 1
        value = jnp.asarray(value, state.avg_value.dtype)
        mean = (state.count * state.avg_value + value) / count
        full, best = count == window, state.best_value
        # The best loss is infinite at first, and infinity less infinity would be NaN.
        better = full & (mean < best * (1 - 1e-4 * jnp.sign(best)))
        bad = jnp.where(better, 0, state.plateau_count + full)
        reduces = full & (bad == patience)
        return updates, state._replace(
            scale=jnp.where(reduces, state.scale * factor, state.scale),
            best_value=jnp.where(better, mean, best),
            plateau_count=jnp.where(reduces, 0, bad),
            count=jnp.where(full, 0, count),
            avg_value=jnp.where(full, 0.0, mean),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def current_learning_rate(opt_state: Any) -> jax.Array | None:
    """Returns the learning rate that an optax state :func:`reports`; None where it reports none.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    >>> float(current_learning_rate(tx.init(jnp.ones(2))))
    0.5
    >>> current_learning_rate(optax.sgd(0.5).init(jnp.ones(2))) is None
    True
    """

    return reports(opt_state).get("learning_rate")
