"""Leaving out updates whose loss or gradient norm stands far outside what came before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.accumulation import hold_state, updates_made
from jaxtrain.optim.numerics import check_integer, check_loss, check_number
from jaxtrain.tree import select

# As in OLMo-core's SkipStepOptimizer: mean and deviation over 128 steps, judged from half of that.
WINDOW = 128


class SkipSpikesState(NamedTuple):
    """State of ``skip_spikes``.

    Attributes:
      inner_state: of the optimizer inside.
      seen: float32 [2, window], the latest losses and gradient norms, oldest overwritten first.
      count: int32 scalar, calls seen so far.
      skipped: int32 scalar, updates left out so far.
    """

    inner_state: Any
    seen: jax.Array
    count: jax.Array
    skipped: jax.Array

    def reports(self) -> dict[str, jax.Array]:
        return {"spike": self.skipped}


def skip_spikes(
    tx: optax.GradientTransformation, deviations: float, *, window: int = WINDOW
) -> optax.GradientTransformationExtraArgs:
    """Leaves out an update whose loss or gradient norm is a spike.

    A value is a spike where it is more than ``deviations`` standard deviations above the mean of
    the last ``window`` values (population deviation; at least the rounding error of the mean). The
    loss is ``value`` as given to ``update``, the norm is the global norm of the gradients as they
    come in. Where either is a spike, or not finite, updates are zero and ``tx`` keeps its state and
    its counts. Nothing is judged before half a window has been seen.

    A spike enters the window as the largest value that would not have been one: so it does not
    hide the next, and yet a loss that stays on a new level is accepted after a few (with 6
    deviations; with 2 it may take more than a window).

    After the ``SkipStepOptimizer`` of OLMo-core, in which spikes enter the window unchanged.

    Args:
      tx: the optimizer to run on the rest; around :func:`jaxtrain.optim.accumulate`, each call is
        judged by itself, and one that is not finite leaves out the update that it is part of.
      deviations: how many, above 0.
      window: steps to look back over, at least 2.

    Returns:
      The transformation; its update takes ``value=``, the loss.

    Raises:
      ValueError: for an argument out of range, and for an update without ``value``.

    >>> tx = skip_spikes(optax.sgd(1.0), 6.0, window=4)
    >>> state = tx.init(jnp.zeros(1))
    >>> for loss in (1.0, 1.1, 0.9, 9.0):
    ...     updates, state = tx.update(jnp.ones(1), state, value=loss)
    >>> updates.tolist(), int(state.skipped)
    ([0.0], 1)
    """
    check_number("skip_spikes", deviations, low=0.0, open_low=True)
    window = check_integer("window", window, low=2)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        zero = jnp.zeros([], jnp.int32)
        return SkipSpikesState(tx.init(params), jnp.zeros((2, window), jnp.float32), zero, zero)

    def update(updates, state, params=None, *, value=None, weight=1.0, **extra):
        check_loss("skip_spikes", value)
        wide = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
        new = jnp.stack([jnp.asarray(value, jnp.float32), optax.tree.norm(wide)])
        limits = _limits(state, deviations)
        judged = state.count >= window // 2
        finite = jnp.isfinite(new).all()
        spike = finite & judged & (new > limits).any()
        broken = ~finite & (weight != 0)

        entering = jnp.where(judged, jnp.minimum(new, limits), new)
        seen = state.seen.at[:, state.count % window].set(entering)
        extra |= {"value": value, "weight": jnp.where(broken, jnp.nan, weight)}
        passed, inner = tx.update(updates, state.inner_state, params, **extra)
        inner = hold_state(~finite, state.inner_state, inner)
        made = updates_made(inner) != updates_made(state.inner_state)
        zero = spike | (~finite & ~made)
        return jax.tree.map(lambda u: jnp.where(zero, 0, u), passed), SkipSpikesState(
            inner_state=select(spike, state.inner_state, inner),
            # What is not finite has no place in a mean.
            seen=jnp.where(finite, seen, state.seen),
            count=jnp.where(finite, optax.safe_increment(state.count), state.count),
            skipped=state.skipped + (spike | broken),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _limits(state: SkipSpikesState, deviations: float) -> jax.Array:
    """The largest loss and norm that are no spikes, [2]."""
    window = state.seen.shape[1]
    known = jnp.arange(window) < state.count
    number = jnp.maximum(jnp.minimum(state.count, window), 1)
    mean = jnp.where(known, state.seen, 0.0).sum(1) / number
    square = jnp.where(known, jnp.square(state.seen - mean[:, None]), 0.0).sum(1) / number
    rounding = jnp.finfo(jnp.float32).eps * jnp.abs(mean)
    return mean + deviations * jnp.maximum(jnp.sqrt(square), rounding)
