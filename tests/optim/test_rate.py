"""The learning rate in the optimizer state, and finding it there."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import jit

from jaxtrain.optim import (
    LearningRateState,
    current_learning_rate,
    make_optimizer,
    schedules,
)
from jaxtrain.optim.rate import reduce_on_plateau

# A parameter with the very name, so that a search by path alone would find its moments.
PARAMS = {"learning_rate": jnp.ones((4, 4)), "head": {"w": jnp.ones((4, 4))}, "b": jnp.ones(4)}


@pytest.mark.parametrize("name", ["sgd", "adafactor", "lars", "muon"])
def test_state_holds_the_rate_of_the_latest_update(name):
    schedule = schedules.linear(1.0, total_steps=4)
    tx = make_optimizer(name, schedule, accumulate=2, freeze=("^b$",))
    state = jit(tx.init)(PARAMS)
    update = jit(tx.update)
    assert float(current_learning_rate(state)) == 1.0
    seen = []
    for _ in range(6):
        _, state = update(PARAMS, state, PARAMS)
        seen.append(float(current_learning_rate(state)))
    assert seen == [1.0, 1.0, 1.0, 0.75, 0.75, 0.5]
    stages = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LearningRateState))
    assert sum(isinstance(x, LearningRateState) for x in stages) == 1


def test_optax_lookup_finds_it():
    state = make_optimizer("muon", 0.25).init({"w": jnp.ones((4, 4))})
    assert float(optax.tree.get(state, "learning_rate")) == 0.25


def test_injected_hyperparameters_and_none():
    injected = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adam)(learning_rate=schedules.linear(1.0, total_steps=4)),
    )
    state = injected.init(PARAMS)
    for _ in range(2):
        _, state = injected.update(PARAMS, state, PARAMS)
    np.testing.assert_allclose(current_learning_rate(state), 0.75)
    assert current_learning_rate(optax.adam(0.1).init(PARAMS)) is None
    assert current_learning_rate(()) is None


def test_ours_wins_over_an_injected_one():
    both = (
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.5).init(PARAMS),
        make_optimizer("sgd", 0.25).init(PARAMS),
    )
    assert float(current_learning_rate(both)) == 0.25


def plateau(losses, rate, factor, patience, window):
    """The definition: the rate of every update, after it has seen the loss of that update."""
    best, bad, rates = np.inf, 0, []
    for i in range(len(losses)):
        if (i + 1) % window == 0:
            mean = np.mean(losses[i + 1 - window : i + 1])
            bad = 0 if np.isinf(best) or best - mean > 1e-4 * abs(best) else bad + 1
            best = min(best, mean) if bad == 0 else best
            if bad == patience:
                rate, bad = rate * factor, 0
        rates.append(rate)
    return rates


@pytest.mark.parametrize("near", [1.0, -1.0])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["adamw", pytest.param("lars", marks=pytest.mark.slow)])
def test_the_rate_falls_where_the_loss_has_stopped_falling(name, every, near):
    """Across calls of unequal weight, of which some are left out, and a stop in between."""
    given = {"plateau_factor": 0.5, "plateau_patience": 2, "plateau_window": 3}
    tx = make_optimizer(name, 0.2, **given, accumulate=every, skip_spikes=50.0, ema=0.9)
    step = jit(lambda w, state, x: tx.update(w, state, w, value=x[0], weight=x[1]))
    rng = np.random.default_rng(0)
    losses = near + 0.1 * rng.random(60 * every).astype(np.float32)
    weights = rng.integers(1, 9, 60 * every).astype(np.float32)
    w, seen = jnp.ones((3, 3)), []
    state = tx.init(w)
    for i, x in enumerate(zip(losses, weights, strict=True)):
        if i % (4 * every) == 0:  # a step that is not finite changes nothing, accumulated or not
            for _ in range(every):
                _, state = step(w, state, (np.float32(np.nan), np.float32(1)))
        _, state = step(w, state, x)
        if (i + 1) % every == 0:
            seen.append(float(current_learning_rate(state)))
        leaves, tree = jax.tree.flatten(state)  # what a checkpoint holds
        state = jax.tree.unflatten(tree, [np.asarray(x) for x in leaves])
    pairs = losses.reshape(-1, every), weights.reshape(-1, every)
    means = (pairs[0] * pairs[1]).sum(1) / pairs[1].sum(1)
    np.testing.assert_allclose(seen, plateau(means, 0.2, 0.5, 2, 3), rtol=1e-6)
    assert seen[-1] < 0.2 / 4


def test_at_positive_losses_a_plateau_is_that_of_optax_to_the_bit():
    """Therefore older checkpoints resume."""
    losses = np.exp(np.random.default_rng(1).normal(size=80)).astype(np.float32)
    losses[20], losses[50] = np.nan, np.inf

    def run(tx):
        def step(state, loss):
            state = tx.update((), state, value=loss)[1]
            return state, state

        return jit(functools.partial(jax.lax.scan, step))(tx.init(jnp.float32(0)), losses)[1]

    states = run(reduce_on_plateau(0.5, patience=3, window=2))
    expected = run(optax.contrib.reduce_on_plateau(0.5, 3, accumulation_size=2))
    chex.assert_trees_all_equal_shapes_and_dtypes(states, expected)
    chex.assert_trees_all_equal(states, expected)
    assert states.scale[-1] < 0.1


def test_a_plateau_keeps_its_dtypes_for_a_loss_in_float64():
    with jax.enable_x64(True):
        tx = reduce_on_plateau(0.5, patience=3, window=2)
        state = tx.init(jnp.float32(0))
        chex.assert_trees_all_equal_dtypes(tx.update((), state, value=jnp.float64(1))[1], state)
