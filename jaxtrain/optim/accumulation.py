"""Gradient accumulation across calls, weighted by tokens: ``optax.MultiSteps`` made exact."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.numerics import cast_like, check_integer
from jaxtrain.optim.reports import nodes
from jaxtrain.tree import all_finite, named_leaves, owner_of, select


class AccumulationState(optax.MultiStepsState):
    """State of ``accumulate``.

    Attributes:
      mini_step: int32 scalar, calls so far of the present update.
      gradient_step: int32 scalar, updates made so far.
      inner_opt_state: of the optimizer inside.
      acc_grads: sum of weighted gradients, sum of weights and, where asked for, sum of weighted
        losses; float32 or wider.
      skip_state: int32 scalar, calls so far whose update was left out.
    """

    __slots__ = ()


def accumulate(
    tx: optax.GradientTransformation,
    every: int,
    *,
    ramp: Sequence[tuple[int, int]] = (),
    mean_value: bool = False,
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
      ramp: other calls per update for the first ones, as pairs (calls, updates): ``[(1, 100), (2,
        50)]`` makes 100 updates of one call each, then 50 of two.
      mean_value: whether ``tx`` gets the weighted mean of the ``value`` of all calls.

    Returns:
      The accumulating transformation; its state is an ``AccumulationState``.

    Raises:
      ValueError: if ``every``, or a number of the ramp, is not an integer of at least 1.

    >>> tx = accumulate(optax.sgd(1.0), every=2)
    >>> state = tx.init(jnp.zeros(1))
    >>> for gradient, tokens in ((1.0, 3), (5.0, 1)):
    ...     updates, state = tx.update(jnp.full(1, gradient), state, weight=tokens)
    >>> updates.tolist()
    [-2.0]
    """
    every = check_integer("every", every, low=1)
    if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in ramp):
        raise ValueError(f"`accumulate_ramp` is {ramp!r}: write pairs: ((calls, updates), ...)")
    ramp = [[check_integer("accumulate_ramp", n, low=1) for n in pair] for pair in ramp]
    edges = np.cumsum([updates for _, updates in ramp], dtype=np.int32)
    sizes = np.array([*(calls for calls, _ in ramp), every], np.int32)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        def zeros(p):
            return jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))

        scalars = tuple(jnp.zeros([], jnp.float32) for _ in range(1 + mean_value))
        return AccumulationState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=tx.init(params),
            acc_grads=(jax.tree.map(zeros, params), *scalars),
            skip_state=jnp.zeros([], jnp.int32),
        )

    def update(updates, state, params=None, *, weight: Any = 1.0, **extra):
        weight = jnp.asarray(weight, jnp.float32)
        every = jnp.asarray(sizes)[jnp.searchsorted(edges, state.gradient_step, side="right")]
        given = (updates, jnp.float32(extra["value"])) if mean_value else (updates,)
        parts = jax.tree.map(lambda g: weight * jnp.where(weight == 0, 0, g), given)
        added = (parts[0], weight, *parts[1:])
        sums, total, *values = sums_and_total = jax.tree.map(jnp.add, state.acc_grads, added)
        last, finite = state.mini_step == every - 1, all_finite(sums_and_total)
        made = last & finite & (total != 0)

        def apply(inner):
            # Under vmap this runs where nothing is made too: no NaN may reach its derivatives.
            divisor = jnp.where(made, total, 1.0)
            mean_of = lambda s: jnp.where(made, s, 0.0) / divisor  # noqa: E731
            means, mean_values = jax.tree.map(mean_of, (sums, values))
            more = extra | ({"value": mean_values[0]} if mean_value else {})
            new_updates, new_inner = tx.update(means, inner, params, **more)
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


def updates_in(calls: int, every: int, ramp: Sequence[tuple[int, int]] = ()) -> tuple[int, int]:
    """Returns how many updates :func:`accumulate` makes in so many calls, none of them left out,
    and how many calls at the end are part of no update.

    >>> updates_in(11, 4, [(1, 2)])
    (4, 1)
    """
    made = 0
    for size, updates in ramp:
        done = min(updates, calls // size)
        made, calls = made + done, calls - done * size
        if done < updates:
            return made, calls
    return made + calls // every, calls % every


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


def calls_waiting(opt_state: Any) -> int:
    """Returns how many calls of :func:`accumulate` the next update has so far."""
    sums = nodes(opt_state, _accumulates)
    return max((int(np.max(node.mini_step)) for node in sums), default=0)


def made_of_calls(
    opt_state: Any, before: Any, params: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns, by parameter that :func:`accumulate` sums, whether an update was made since.

    Args:
      opt_state, before: optimizer state now and then.
      params: all by name. Sums that belong to none by their name, as where ``optax.flatten``
        stands around them, must be those of all.

    Raises:
      ValueError: they are those of some.
    """
    everything = sum(x.size for x in params.values() if jnp.issubdtype(x.dtype, jnp.inexact))
    made: dict[str, jax.Array] = {}
    both = zip(*(nodes(state, _accumulates) for state in (opt_state, before)), strict=True)
    for new, old in both:
        sums = named_leaves(new.acc_grads[0])
        owners = {owner_of(name, params) for name in sums}
        if None in owners and sum(x.size for x in sums.values()) < everything:
            raise ValueError(
                "the optimizer accumulates gradients of some parameters over calls, and keeps them "
                "under other names than these have: leave out optax.flatten, or accumulate all"
            )
        for name in params if None in owners else owners:
            made[name] = made.get(name, False) | (new.gradient_step != old.gradient_step)
    return made


def accumulates(opt_state: Any) -> bool:
    """Returns whether :func:`accumulate` is in use."""
    return bool(nodes(opt_state, _accumulates))


def _accumulates(node: Any) -> bool:
    return isinstance(node, AccumulationState)
