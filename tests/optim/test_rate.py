"""The learning rate in the optimizer state, and finding it there."""

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
