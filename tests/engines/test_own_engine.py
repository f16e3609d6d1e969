"""An engine that a user would write: gradients clipped for every example."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.build import make_experiment_mesh, make_state
from jaxtrain.engines.plain import Engine, GradientSums, plain
from jaxtrain.run.survive.diagnosis import diagnose
from tests import plugs, problems
from tests.plugs import clipped

Config = plugs.Config


def build(config):
    return plugs.experiment(config, engine=Engine(clipped, row_wise=True))


@pytest.mark.slow
def test_an_engine_that_promises_to_be_row_wise_is_reduced_once_per_step(tmp_path, capsys):
    header = plugs.check(sys.modules[__name__], "by clipped", tmp_path, capsys)
    assert "gradients are reduced once per step over data" in header


def test_an_engine_that_promises_nothing_is_reduced_in_every_microbatch(capsys):
    state = jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0))
    mesh, told = jt.make_mesh(data=8), []
    state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    for engine in (clipped, Engine(clipped, row_wise=True)):
        loss = jt.row_wise(problems.loss_fn)
        step = jt.build_train_step(loss, optax.sgd(0.1), accumulate=2, engine=engine)
        told.append(jt.compile_step(step, state, problems.make_batch(), mesh=mesh).report())
    assert "in every microbatch, for the gradient engine does not promise" in told[0]
    assert "once per step over data" in told[1]


def delayed(loss_fn):
    """Gives the sums of the step before, of which it remembers the mean gradient."""
    now = plain(loss_fn)

    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset(), memory=None):
        sums = now(params, model_state, batch, rng, loss_scale, frozen)
        grads = jax.tree.map(lambda g: g * sums.loss.weight, memory)
        mean = jax.tree.map(lambda g: g / sums.loss.weight, sums.grads)
        return dataclasses.replace(sums, grads=grads, memory=mean)

    return engine


DELAYED = Engine(delayed, init=lambda params: jax.tree.map(jnp.zeros_like, params))


def test_a_memory_comes_back_lies_like_its_parameters_and_outlives_no_bad_step():
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    given = {"mesh": mesh, "rules": jt.Rules(plugs.RULES), "memory": DELAYED.init}
    state = jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0), **given)
    assert state.memory["up"]["kernel"].sharding == state.params["up"]["kernel"].sharding
    step = jt.build_train_step(problems.loss_fn, optax.sgd(0.1), engine=DELAYED)
    batches = [problems.make_batch(seed) for seed in range(3)]
    batches[1]["y"][:] = np.nan
    train = jt.compile_step(step, state, batches[0], mesh=mesh, rules=given["rules"])
    params = jax.device_get(state.params)
    _, gradient, _ = problems.reference(params, batches[0])
    for batch in batches:
        state, metrics = train(state, batch)
    # The first step had nothing to give, the second was left out, the third gave the first's.
    assert (metrics["skipped"], state.skipped) == (0, 1)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), state.params, expected)


def test_what_is_computed_again_has_the_memory_too():
    experiment = plugs.experiment(plugs.Config(global_batch=16), engine=DELAYED)
    mesh = make_experiment_mesh(experiment, jax.devices()[:1])
    state = make_state(experiment, mesh)
    memory = {"up": {"kernel": 3.0, "bias": 0.0}, "down": {"kernel": 0.0}}
    memory = jax.tree.map(lambda m, p: jnp.full_like(p, m), memory, state.params)
    state = dataclasses.replace(state, memory=memory)
    found = diagnose(experiment, mesh, state, problems.make_batch())
    assert found.norms["up/kernel"] == pytest.approx(3 * state.params["up"]["kernel"].size ** 0.5)
    assert found.norms["down/kernel"] == 0 < found.losses[0]


@pytest.mark.parametrize(
    ("engine", "memory", "words"),
    [
        (
            DELAYED,
            None,
            "the state holds none of a gradient engine and the step's engine keeps one",
        ),
        (plain, DELAYED.init, "the state holds a memory of a gradient engine and .* keeps none"),
        (
            Engine(lambda loss: lambda *given, memory: plain(loss)(*given), init=DELAYED.init),
            DELAYED.init,
            "the gradient engine was given memory 'down/kernel' .* and returned nothing",
        ),
    ],
)
def test_a_memory_that_is_not_the_engines_is_refused(engine, memory, words):
    state = jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0), memory=memory)
    step = jt.build_train_step(problems.loss_fn, optax.sgd(0.1), engine=engine)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(step, state, problems.make_batch())


def test_an_engine_that_accumulates_is_called_once_per_step():
    calls = []

    def engine(loss_fn, microbatches):
        calls.append(microbatches)
        one = jnp.ones(())
        return lambda params, *rest: GradientSums(params, jt.WeightedLoss(one, one), None)

    step = jt.build_train_step(
        problems.loss_fn, optax.sgd(0.1), accumulate=4, engine=Engine(engine, accumulates=True)
    )
    state = jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0))
    step(state, problems.make_batch())
    assert calls == [4]
