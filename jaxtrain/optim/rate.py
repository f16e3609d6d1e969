"""The stage that multiplies by the learning rate, and leaves in the state the one it used."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.reports import reports

LearningRate = float | jax.Array | Callable[[jax.Array], jax.Array]


class LearningRateState(NamedTuple):
    """State of ``scale_by_learning_rate``.

    Attributes:
      count: int32 scalar, updates made so far.
      learning_rate: float32 scalar, the rate of the latest update; before any, that of count 0.
    """

    count: jax.Array
    learning_rate: jax.Array

    def reports(self) -> dict[str, jax.Array]:
        return {"learning_rate": self.learning_rate}


def scale_by_learning_rate(learning_rate: LearningRate) -> optax.GradientTransformation:
    """Multiplies updates by minus the learning rate, which it keeps readable in its state.

    optax's own stage keeps a count only when given a schedule, and the rate never.

    Args:
      learning_rate: a number, a traced scalar, or a schedule ``count -> rate``.

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
        return LearningRateState(count, rate_at(count))

    def update(updates, state, params=None):
        del params
        scaled = lambda u: (-rate_at(state.count, u.dtype) * u).astype(u.dtype)  # noqa: E731
        count = optax.safe_increment(state.count)
        return jax.tree.map(scaled, updates), LearningRateState(count, rate_at(state.count))

    return optax.GradientTransformation(init, update)


def current_learning_rate(opt_state: Any) -> jax.Array | None:
    """Returns the learning rate that an optax state :func:`reports`; None where it reports none.

    >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    >>> float(current_learning_rate(tx.init(jnp.ones(2))))
    0.5
    >>> current_learning_rate(optax.sgd(0.5).init(jnp.ones(2))) is None
    True
    """

    return reports(opt_state).get("learning_rate")
