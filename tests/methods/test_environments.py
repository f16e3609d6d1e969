"""Environments are Gymnasium's: its transitions, stored, and the library itself.

gymnasium.json has eight transitions of each environment by Gymnasium 1.4.0 (``env.state`` set to
the state, in float32, one ``env.step``), and the slow test makes them again.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.methods.environments import ENVIRONMENTS

STORED = json.loads((pathlib.Path(__file__).parent / "gymnasium.json").read_text())
NAMES = sorted(ENVIRONMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_transitions_are_those_that_gymnasium_made(name):
    environment, rows = ENVIRONMENTS[name], STORED[name]
    given = {n: np.stack([row[n] for row in rows]) for n in rows[0]}
    step = jax.jit(jax.vmap(environment.step))
    states, reward, terminated = step(np.float32(given["state"]), jnp.asarray(given["action"]))
    np.testing.assert_allclose(states, given["next"], rtol=1e-5, atol=2e-6)
    seen = jax.vmap(environment.observe)(states)
    np.testing.assert_allclose(seen, given["seen"], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(reward, given["reward"], rtol=1e-5, atol=2e-6)
    assert terminated.tolist() == given["terminated"].tolist()
    assert terminated.any() == (name != "pendulum")
    assert not terminated.all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_steps_are_gymnasiums(name):
    gymnasium = pytest.importorskip("gymnasium")
    environment = ENVIRONMENTS[name]
    made = gymnasium.make(environment.name)
    assert made.spec.max_episode_steps == environment.limit
    theirs, rng = made.unwrapped, np.random.default_rng(0)
    assert theirs.observation_space.shape == (environment.observations,)
    discrete = hasattr(theirs.action_space, "n")
    assert (theirs.action_space.n if discrete else 0) == environment.actions
    starts = np.stack([np.asarray((theirs.reset(seed=i), theirs.state)[1]) for i in range(2000)])
    ours = jax.vmap(environment.reset)(jax.random.split(jax.random.key(0), 2000))
    for end in (np.min, np.max):
        np.testing.assert_allclose(end(ours, 0), end(starts, 0), rtol=0.02)
    np.testing.assert_allclose(np.std(ours, 0), np.std(starts, 0), rtol=0.1)
    step = jax.jit(environment.step)

    def check(action):
        state = np.asarray(theirs.state, np.float32)
        theirs.state = np.float64(state)
        seen, reward, terminated, *_ = theirs.step(action if discrete else np.array([action]))
        found, got, over = step(state, jnp.asarray(action))
        np.testing.assert_allclose(found, np.asarray(theirs.state), rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(environment.observe(found), seen, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(got, reward, rtol=1e-5, atol=2e-5)
        assert bool(over) == bool(terminated)
        return terminated

    theirs.reset(seed=0)
    for number in range(1000):
        action = int(rng.integers(environment.actions)) if discrete else float(rng.uniform(-3, 3))
        if check(action) or number % 200 == 199:
            theirs.reset(seed=number)
    for row in STORED[name]:
        theirs.reset(seed=0)
        theirs.state = np.float64(row["state"])
        check(row["action"])
        np.testing.assert_allclose(np.asarray(theirs.state), row["next"], rtol=1e-6)
