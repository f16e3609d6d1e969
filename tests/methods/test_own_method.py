"""A method that a user would write: two replicas, whose weights are averaged every other step."""

import dataclasses
import sys

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain.methods.method import Method
from jaxtrain.run.main import parse
from tests import plugs, problems

Config = plugs.Config


def two(state):
    """Both replicas begin alike, and have the optimizer's state."""
    replicas = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    return dataclasses.replace(state, opt_state=(), method=replicas)


def averaged(step):
    """Each replica trains on half of the rows."""

    def both(state, batch):
        halves = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), batch)
        replicas, metrics = jax.vmap(step, in_axes=(0, 1))(state.method, halves)
        mean = jax.tree.map(lambda x: x.mean(0), replicas.params)
        meets = replicas.step[0] % 2 == 0
        met = jax.tree.map(lambda m, x: jnp.where(meets, m, x), mean, replicas.params)
        replicas = dataclasses.replace(replicas, params=met)
        state = dataclasses.replace(state, step=state.step + 1, params=mean, method=replicas)
        return state, jax.tree.map(lambda x: x.mean(0), metrics)

    return both


def build(config):
    return plugs.experiment(config, method=Method(averaged, start=two))


@pytest.mark.slow
def test_a_method_of_ones_own_trains_resumes_and_is_planned_and_compared(tmp_path, capsys):
    plugs.check(sys.modules[__name__], "method averaged", tmp_path, capsys)


def test_it_is_what_two_plain_steps_and_a_mean_are():
    optimizer = optax.adam(1e-2, eps=1e-4)
    step = jt.build_train_step(problems.loss_fn, optimizer)
    one = jt.init_state(problems.init, optimizer, jax.random.key(0))
    state, train = two(one), jax.jit(averaged(step))
    replicas = [one, one]
    for number in (1, 2, 3):
        batch = problems.make_batch(number)
        state, _ = train(state, batch)
        halves = [{name: x[i::2] for name, x in batch.items()} for i in (0, 1)]
        replicas = [jax.jit(step)(*both)[0] for both in zip(replicas, halves, strict=True)]
        mean = jax.tree.map(lambda *x: sum(x) / 2, *(r.params for r in replicas))
        if number == 2:
            replicas = [dataclasses.replace(r, params=mean) for r in replicas]
        chex.assert_trees_all_close(state.params, mean, rtol=1e-6, atol=1e-8)


def test_layers_in_another_order_than_that_of_the_model_are_refused():
    flags = ["--layers", "4", "--width", "16", "--heads", "2", "--seq-len", "16"]
    flags += ["--data", "jaxtrain/compare", "--held-out-bytes", "2000"]
    built = gpt.build(parse(gpt.Config, flags)).with_(method=Method(averaged, start=two))
    for pipeline in ("pipe=2,pipeline.schedule=interleaved,pipeline.virtual=2", "pipe=3"):
        with pytest.raises(ValueError, match=r"`method` keeps a state of its own, whose layers"):
            built.with_(layout=jt.Layout.parse(pipeline, built.layout))
    built.with_(layout=jt.Layout.parse("pipe=2", built.layout))
