"""Gradient accumulation across calls, weighted by tokens: ``optax.MultiSteps`` made exact."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.optim.numerics import cast_like, check_integer


def accumulate(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """Runs ``tx`` once every ``every`` calls, on the weighted mean of their gradients.

    ``update(grads, state, params, weight=w)`` takes the mean gradient of one microbatch and the
    weight of that mean, its number of tokens; the default 1 weights microbatches equally. Calls
    return zero updates until the ``every``-th, when ``tx`` sees ``sum(w * g) / sum(w)``: the
    gradient of the big batch, however ragged the microbatches. Counters of ``tx`` advance per
    update, not per call.

    Sums are float32 whatever the dtype of the gradients. A microbatch of weight 0 adds nothing,
    not even a NaN. Any other with a gradient or weight that is not finite is skipped: it leaves no
    trace, does not count among the ``every``, and adds one to ``state.skip_state``. If the weights
    sum to 0 the update is zero and ``tx`` does not see it.

    The state is an ``optax.MultiStepsState``: ``mini_step`` calls so far of the present update,
    ``gradient_step`` updates made, ``inner_opt_state`` of ``tx``, ``acc_grads`` the pair (sum of
    weighted gradients, sum of weights), ``skip_state`` the int32 number of calls skipped so far.

    Args:
      tx: the optimizer to run on the means.
      every: calls per update, at least 1.

    Returns:
      The accumulating transformation.

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
    steps = optax.MultiSteps(
        _mean_of_sums(optax.with_extra_args_support(tx)),
        every,
        use_grad_mean=False,
        should_skip_update_fn=_skip_not_finite,
    )

    def init(params):
        return steps.init((params, jnp.zeros([], jnp.float32)))

    def update(updates, state, params=None, *, weight: Any = 1.0, **extra):
        weight = jnp.asarray(weight, jnp.float32)
        sums = jax.tree.map(lambda g: weight * jnp.where(weight == 0, 0, g), updates)  # float32
        # MultiSteps calls its optimizer on every microbatch and throws the result away; the flag
        # lets the adapter do the work on the last one alone.
        (new_updates, _), new_state = steps.update(
            (sums, weight),
            state,
            None if params is None else (params, weight),
            emit=state.mini_step == every - 1,
            **extra,
        )
        new_state = new_state._replace(skip_state=state.skip_state + new_state.skip_state)
        return cast_like(new_updates, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _mean_of_sums(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Adapts ``tx`` to the pair (sum of weighted gradients, sum of weights)."""

    def init(params_and_weight):
        params, _ = params_and_weight
        return tx.init(params)

    # MultiSteps passes the parameters by this keyword: here the pair (parameters, weight).
    def update(sums_and_total, state, params=None, *, emit, **extra):
        sums, total = sums_and_total
        model_params = None if params is None else params[0]

        def apply(state):
            means = jax.tree.map(lambda s: s / total, sums)
            updates, new_state = tx.update(means, state, model_params, **extra)
            return updates, cast_like(new_state, state)

        shapes, _ = jax.eval_shape(apply, state)

        def hold(state):
            return optax.tree.zeros_like(shapes), state

        updates, state = jax.lax.cond(emit & (total > 0), apply, hold, state)
        return (updates, jnp.zeros_like(total)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _skip_not_finite(updates, gradient_step, params):
    del gradient_step, params
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]
    skip = ~jnp.all(jnp.stack(finite))
    return skip, skip.astype(jnp.int32)
