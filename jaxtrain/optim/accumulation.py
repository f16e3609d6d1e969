"""Gradient accumulation across calls, weighted by tokens: ``optax.MultiSteps`` made exact."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.gradients import all_finite, select
from jaxtrain.optim.numerics import cast_like, check_integer
from jaxtrain.optim.reports import nodes


class AccumulationState(optax.MultiStepsState):
    """State of ``accumulate``.

    Attributes:
      mini_step: int32 scalar, calls so far of the present update.
      gradient_step: int32 scalar, updates made so far.
      inner_opt_state: of the optimizer inside.
      acc_grads: the pair (sum of weighted gradients, sum of weights), float32 or wider.
      skip_state: int32 scalar, calls so far whose update was left out.
    """

    __slots__ = ()


def accumulate(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Runs ``tx`` once every ``every`` calls, on the weighted mean of their gradients.

    ``update(grads, state, params, weight=w)`` takes the mean gradient of one microbatch and the
    weight of that mean, its number of tokens; the default 1 weights microbatches equally. Calls
    return zero updates until the ``every``-th, when ``tx`` sees ``sum(w * g) / sum(w)``: the
    gradient of the big batch, however ragged the microbatches. Counters of ``tx`` advance per
    update, not per call. Other arguments of ``update`` reach ``tx`` as the last call has them.

    A microbatch of weight 0 adds nothing, not even a NaN. Where any other has a gradient or weight
    that is not finite, the update is left out whole, as a big batch is: the ``every``-th call
    returns zeros too, ``tx`` sees nothing of it, and the next update starts afresh. So it is with
    an update whose weights sum to 0, which is not counted as left out.

    Args:
      tx: the optimizer to run on the means.
      every: calls per update, at least 1.

    Returns:
      The accumulating transformation; its state is an ``AccumulationState``.

    Raises:
      ValueError: if ``every`` is not an integer of at least 1.

    >>> tx = accumulate(optax.sgd(1.0), every=2)
    >>> state = tx.init(jnp.zeros(1))
    >>> for gradient, tokens in ((1.0, 3), (5.0, 1)):
    ...     updates, state = tx.update(jnp.full(1, gradient), state, weight=tokens)
    >>> updates.tolist()
    [-2.0]
    """
    every = check_integer("every", every, low=1)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        def zeros(p):
            return jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))

        return AccumulationState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=tx.init(params),
            acc_grads=(jax.tree.map(zeros, params), jnp.zeros([], jnp.float32)),
            skip_state=jnp.zeros([], jnp.int32),
        )

    def update(updates, state, params=None, *, weight: Any = 1.0, **extra):
        weight = jnp.asarray(weight, jnp.float32)
        parts = jax.tree.map(lambda g: weight * jnp.where(weight == 0, 0, g), updates)
        sums, total = sums_and_total = jax.tree.map(jnp.add, state.acc_grads, (parts, weight))
        last, finite = state.mini_step == every - 1, all_finite(sums_and_total)
        made = last & finite & (total != 0)

        def apply(inner):
            # Under vmap this runs where nothing is made too: no NaN may reach its derivatives.
            divisor = jnp.where(made, total, 1.0)
            means = jax.tree.map(lambda s: jnp.where(made, s, 0.0) / divisor, sums)
            new_updates, new_inner = tx.update(means, inner, params, **extra)
            return cast_like(new_updates, updates), cast_like(new_inner, inner)

        def hold(inner):
            return optax.tree.zeros_like(updates), inner

        new_updates, inner = jax.lax.cond(made, apply, hold, state.inner_opt_state)
        nothing = optax.tree.zeros_like(sums_and_total)
        return new_updates, AccumulationState(
            mini_step=(state.mini_step + 1) % every,
            gradient_step=state.gradient_step + made,
            inner_opt_state=inner,
            acc_grads=cast_like(select(last, nothing, sums_and_total), state.acc_grads),
            skip_state=state.skip_state + jnp.where(last & ~finite, every, 0),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def hold_state(condition: jax.Array, old: Any, new: Any) -> Any:
    """Returns ``old`` optimizer state where the condition holds, else ``new``.

    What :func:`accumulate` keeps is ``new`` in either case: it has been told by ``weight`` what to
    make of the call, and has counted it.
    """
    return jax.tree.map(
        lambda new, old: new if _accumulates(new) else jnp.where(condition, old, new),
        new,
        old,
        is_leaf=_accumulates,
    )


def updates_made(opt_state: Any) -> jax.Array:
    """Returns how many updates :func:`accumulate` has made so far; 0 where it is not in use."""
    return sum((n.gradient_step for n in nodes(opt_state, _accumulates)), start=jnp.int32(0))


def _accumulates(node: Any) -> bool:
    return isinstance(node, AccumulationState)
