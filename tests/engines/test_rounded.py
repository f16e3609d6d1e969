"""Gradients rounded at random: their mean is the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.engines.plain import plain
from jaxtrain.engines.rounded import rounded, stochastic
from jaxtrain.tree import named_leaves
from tests import problems, small
from tests.problems import record_gradients

DRAWS = 1024


def test_the_mean_over_keys_is_the_number_and_each_draw_is_a_neighbour_of_it():
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("f") * [[1], [1e-6], [1e4]]
    x = x.astype("f")
    x[0, 2] = 0
    step = np.abs(x).max(1, keepdims=True) / 7
    keys = jax.random.split(jax.random.key(0), DRAWS)
    found = np.asarray(jax.vmap(lambda key: stochastic(x, key, 7))(keys), np.float64)
    assert (np.abs(found - x) < step * (1 + 1e-6)).all()
    np.testing.assert_allclose(found / step, np.round(found / step), atol=1e-5)
    deviation = step / 2 / np.sqrt(DRAWS)
    assert (np.abs(found.mean(0) - x) < 5 * deviation + 1e-6 * step).all()
    assert (found.var(0) <= step**2 / 4 * 1.1).all()
    zeros = stochastic(jnp.zeros((2, 3)), keys[0], 127)
    assert not zeros.any()
    x[1, 3] = np.inf
    spoilt = np.asarray(stochastic(x, keys[0], 127))
    assert np.isfinite(spoilt).all(1).tolist() == [True, False, True]


@functools.cache
def gradients(levels, sizes=(), seed=0):
    """The sums of a step over four equal quarters of a batch, and the batch's weight."""
    mesh = jt.make_mesh(**dict(sizes), devices=jax.devices()[: 4 if sizes else 1])
    optimizer = optax.chain(record_gradients(), optax.sgd(0.1))
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), mesh=mesh)
    rng = jax.device_put(jax.random.key(seed), state.rng.sharding)
    state = dataclasses.replace(state, rng=rng)
    quarter = jax.tree.map(lambda x: x[:4], problems.make_batch())
    batch = jax.tree.map(lambda x: np.concatenate([x] * 4), quarter)
    how = {} if levels == "plain" else {"engine": rounded(levels)}
    how |= {"gather": "step"} if sizes else {}
    step = jt.build_train_step(jt.row_wise(problems.loss_fn), optimizer, **how)
    state, metrics = jt.compile_step(step, state, batch, mesh=mesh, donate=False)(state, batch)
    names = named_leaves(state.params)
    sums = {
        n: x * metrics["weight"]
        for n, x in zip(names, jax.tree.leaves(state.opt_state[0]), strict=True)
    }
    return jax.device_get(sums)


def test_without_levels_the_bits_are_those_of_the_plain_engine():
    for name, expected in gradients("plain").items():
        np.testing.assert_array_equal(gradients(None)[name], expected, name)


def test_devices_of_the_same_rows_err_each_in_its_own_way_and_alike_in_each_run():
    exact, found = gradients("plain"), gradients(127, (("data", 4),))
    other = gradients(127, (("data", 4),), seed=1)
    for name, grad in exact.items():
        scale = np.abs(grad / 4).max(-1, keepdims=True) / 127
        error = found[name] - grad
        assert (np.abs(error) < 4 * scale * (1 + 1e-4)).all()
        units = found[name] / scale
        np.testing.assert_allclose(units, np.round(units), atol=2e-2)
        assert (np.round(units) % 4 != 0).any()  # with one key for all, four times the same
        assert (other[name] != found[name]).any()


def test_a_flag_gives_the_engine_and_levels_that_are_none_are_refused():
    engines = [small.build(small.Config(gradients=g)).task.engine for g in ("float32", "int8")]
    assert engines[0] is plain
    assert engines[1].make.__name__ == "int8"
    with pytest.raises(ValueError, match="`levels` is 128: give 1 to 127"):
        rounded(128)
