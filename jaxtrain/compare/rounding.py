"""What rounding does to gradients: their signal over its noise, and what operands lose by it.

Shapes: L layers of a stack, in natural order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.engines.plain import plain, run_engine
from jaxtrain.experiment import Experiment
from jaxtrain.ops.scaled import shares_lost, uncounted
from jaxtrain.optim import frozen_of
from jaxtrain.precision import Policy
from jaxtrain.sharding.stack import LayerOrder, Stack
from jaxtrain.step import normalize_loss, with_policy
from jaxtrain.tree import PyTree, is_count, named_leaves


def gradients(experiment: Experiment, state: Any) -> Callable[[Policy, PyTree], dict[str, Any]]:
    """Returns ``(policy, batch) -> gradients by path``, float32, of a state's parameters, as a step
    of that policy has them before they are divided by the batch's weight."""
    laid, still = experiment.laid, frozen_of(state)
    loss_fn = normalize_loss(laid.loss_fn, laid.has_model_state)

    def of(policy: Policy, params: PyTree, *rest: PyTree) -> dict[str, Any]:
        engine = plain(with_policy(loss_fn, policy))
        params = policy.cast_to_param(uncounted(params))
        grads = run_engine(engine, params, *rest, None, None, frozen=still).grads
        return {name: g.astype(jnp.float32) for name, g in named_leaves(grads).items()}

    compiled = jax.jit(of, static_argnums=0)
    return lambda policy, batch: compiled(policy, state.params, state.model_state, batch)


def signal_and_noise(
    exact: Mapping[str, jax.Array], given: Mapping[str, jax.Array], stack: Stack
) -> dict[str, np.ndarray]:
    """Returns |g|^2 and |g - g'|^2 of every parameter, [2, L], outside of stacks [2]."""

    def squares(name: str, x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        part = next((part for part in stack.parts if part.holds(name)), None)
        if part is None:
            return np.square(x).sum()
        x = LayerOrder(x.shape[: part.lead], part.places).join(x)
        return np.square(x.reshape(len(x), -1)).sum(1)

    pairs = {name: (g, g - given[name]) for name, g in exact.items() if name in given}
    return {n: np.stack([squares(n, x) for x in both]) for n, both in pairs.items()}


def decibels(squares: np.ndarray) -> np.ndarray:
    """20 log10 of |g| / |g - g'|, of :func:`signal_and_noise`; infinite where nothing differs."""
    with np.errstate(divide="ignore"):
        return 10 * np.log10(squares[0] / squares[1])


def measure(
    experiment: Experiment, state: Any, batches: Sequence[PyTree]
) -> dict[str, tuple[float, ...]]:
    """Compares the gradients of some batches with those of float32, for one state on one device.

    Returns:
      ``decibels/blocks``, of all parameters of each layer, and what :func:`shares_lost` says where
      the experiment rounds operands: a number for each layer, over all batches.
    """
    policy, stack = experiment.policy, experiment.stack
    of = gradients(experiment, state)
    own = policy if policy.recipe is None else dataclasses.replace(policy, count_rounding=True)
    squares: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for batch in batches:
        exact, given = of(Policy(cast_batch=policy.cast_batch), batch), of(own, batch)
        for name, x in given.items():
            if is_count(name):
                counts[name] = counts.get(name, 0) + np.asarray(x, np.float64)
        for name, both in signal_and_noise(exact, given, stack).items():
            part = next((part.key for part in stack.parts if part.holds(name)), None)
            if part is not None:
                squares[part] = squares.get(part, 0) + both
    found = {f"decibels/{part}": decibels(both) for part, both in squares.items()}
    found |= shares_lost(counts, stack)
    return {name: tuple(np.ravel(x).tolist()) for name, x in found.items()}
