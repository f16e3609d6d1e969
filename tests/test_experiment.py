"""What plugs into an experiment: a gradient engine, and a transform of its step."""

import contextlib
import dataclasses
import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.build import (
    compile_train,
    depends_on_microbatches,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    on_hosts,
)
from jaxtrain.compare.parity import compare, compile_on, run_one_device
from jaxtrain.engines.plain import GradientSums, plain
from jaxtrain.methods.method import Method
from jaxtrain.ops.numerics import drop
from jaxtrain.planning.estimate import trace
from jaxtrain.run.checkpoints.checkpointer import digest
from jaxtrain.run.replay import replay
from tests import problems, small
from tests.plugs import clipped
from tests.run.test_loop import lines, make_experiment
from tests.workers import poisoned

BOUND, BOX = 3.0, 0.4
SUMS = GradientSums({}, jt.WeightedLoss(jnp.float32(1), jnp.float32(1)), None)


def projected(step):
    """Keeps every parameter in a box, and says how far out one was."""

    def transformed(state, batch):
        state, metrics = step(state, batch)
        out = {"out": optax.tree.max(jax.tree.map(jnp.abs, state.params)) - BOX}
        params = jax.tree.map(lambda p: jnp.clip(p, -BOX, BOX), state.params)
        return dataclasses.replace(state, params=params), metrics | out

    return transformed


def losses():
    """Losses, and whether another number of microbatches changes more than their rounding."""

    def dropped(params, batch, rng):
        return problems.loss_fn(params, batch | {"x": drop(batch["x"], 0.5, rng)}, rng)

    def in_vmap(params, batch, rng):
        x = jax.vmap(lambda row: drop(row[None], 0.5, rng)[0])(batch["x"])
        return problems.loss_fn(params, batch | {"x": x}, rng)

    def scalar(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        return loss.total / loss.weight

    def bits(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        data = jnp.tile(jax.random.key_data(rng), 2)
        drawn = jax.lax.rng_bit_generator(data, (3,), dtype=jnp.uint32)[1].sum()
        return dataclasses.replace(loss, total=loss.total + 1e-12 * drawn)

    def uniform(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        drawn = jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (2,)).sum()
        return dataclasses.replace(loss, total=loss.total + drawn)

    yield problems.loss_fn, False
    yield jax.checkpoint(dropped), False
    others = (scalar, bits, uniform, problems.noisy_loss, in_vmap)
    yield from ((loss_fn, True) for loss_fn in others)


@pytest.mark.parametrize(("loss_fn", "depends"), losses(), ids=lambda x: getattr(x, "__name__", ""))
def test_what_another_number_of_microbatches_changes_is_read_from_the_loss(loss_fn, depends):
    experiment = make_experiment(loss_fn=loss_fn)
    state = make_abstract_state(experiment, make_experiment_mesh(experiment))
    assert depends_on_microbatches(experiment, state) == depends


def test_a_loss_with_model_state_depends_on_its_microbatches():
    experiment = small.build(small.Config(centred=True))
    assert depends_on_microbatches(experiment, None)


def test_on_fewer_hosts_a_device_holds_as_many_rows_at_once_and_the_batch_stays():
    """Two of four hosts and one of them, of two devices each."""
    rows = {"batch": problems.make_batch(0, 48), "accumulate": 2, "loss_fn": problems.loss_fn}
    for hosts, accumulate in ((4, 2), (2, 4), (1, 8)):
        experiment = make_experiment(mesh={"data": -1}, **rows)
        mesh = make_experiment_mesh(experiment, jax.devices()[: 2 * hosts])
        state = make_abstract_state(experiment, mesh)
        found = on_hosts(experiment, state, mesh, hosts, 4)
        assert found.layout.accumulate == accumulate
        assert found.with_(layout=experiment.layout) == experiment
    # On three, 24 rows each of two devices would take 8/3 microbatches: the next that divides.
    mesh = make_experiment_mesh(experiment, jax.devices()[:6])
    assert on_hosts(experiment, state, mesh, 3, 4).layout.accumulate == 4
    scalar = make_experiment(mesh={"data": -1}, **rows | {"loss_fn": problems.noisy_loss})
    assert on_hosts(scalar, state, mesh, 3, 4) is scalar
    for fixed in ({"data": 4}, {"data": -1, "dcn_data": 2}):
        with pytest.raises(ValueError, match=r"and hosts come and go: let one axis take"):
            on_hosts(make_experiment(mesh=fixed, **rows), state, mesh, 3, 4)


def test_neutral_plugs_leave_every_bit_as_it_is():
    def trained(**plugs):
        experiment = make_experiment(mesh={"data": 4, "tensor": 2}, accumulate=2, zero=2, **plugs)
        mesh = make_experiment_mesh(experiment)
        state = make_state(experiment, mesh)
        return digest(compile_train(experiment, state, mesh)(state, problems.make_batch(0, 8))[0])

    plugs = {"engine": lambda loss_fn: plain(loss_fn), "method": Method(lambda step: step)}
    assert trained(**plugs) == trained()


def first_step(experiment):
    """What :func:`jaxtrain.compare.parity.compare` has of one device."""
    return run_one_device(
        compile_on(experiment, jt.Layout.parse(""), experiment.layout.accumulate), 1
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_engine_of_ones_own_is_the_definition_and_the_same_on_every_mesh(accumulate):
    batch = problems.make_batch()
    experiment = make_experiment(
        loss_fn=problems.loss_fn,
        batch=batch,
        optimizer=optax.adam(1e-2, eps=1e-6),
        train_batches=lambda start, sharding: contextlib.nullcontext(itertools.repeat(batch)),
        accumulate=accumulate,
        engine=functools.partial(clipped, bound=BOUND),
    )
    (step,) = first_step(experiment)
    params = step.before.params
    expected = jax.tree.map(np.zeros_like, jax.device_get(params))
    cut = 0
    for i in np.flatnonzero(batch["mask"]):
        _, grads, _ = problems.reference(params, {k: v[i : i + 1] for k, v in batch.items()})
        norm = math.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
        cut += norm > BOUND
        grads = optax.tree.scale(min(1, BOUND / norm), grads)
        expected = jax.tree.map(np.add, expected, grads)
    assert 0 < cut < batch["mask"].sum()
    expected = jax.tree.map(lambda e: e / batch["mask"].sum(), expected)
    chex.assert_trees_all_close(step.gradients, [expected], rtol=2e-5, atol=1e-7)
    layouts = ["data=4", "data=2,fsdp=2,tensor=2,zero=2"]
    for found in compare(experiment, layouts=layouts, steps=2):
        assert found.refusal is None
        assert found.agrees(1e-5), found


@pytest.mark.slow
def test_fit_replay_parity_and_plans_have_the_plugs(tmp_path, monkeypatch):
    def build(config):
        engine = functools.partial(clipped, bound=0.1)
        return poisoned_build(config).with_(engine=engine, method=Method(projected))

    poisoned_build = poisoned.build
    monkeypatch.setattr(poisoned, "build", build)
    config = poisoned.Config(steps=3)
    experiment = build(config)
    state = jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path), log_every=1)).state
    assert max(abs(x).max() for x in jax.tree.leaves(state.params)) == np.float32(BOX)
    logged = {line["step"]: line for line in lines(tmp_path) if "train/loss" in line}
    assert logged[1]["train/out"] > 0
    assert 0 < logged[3]["train/grad_norm"] <= 0.1
    # Step 3 comes after two that are transformed; its own gradients are those of the engine.
    norms = replay(tmp_path, 3, module="tests.workers.poisoned").norms.values()
    norm = math.sqrt(sum(x**2 for x in norms))
    assert norm == pytest.approx(logged[3]["train/grad_norm"], rel=1e-6)
    (step,) = first_step(experiment)
    largest = max(abs(x).max() for x in jax.tree.leaves(step.parts["parameters"]))
    assert largest == np.float32(BOX)
    planned, plain = (len(trace(e, 8).jaxpr.outvars) for e in (experiment, poisoned_build(config)))
    assert planned == plain + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": {"pipe": 2, "data": 4}, "engine": clipped}, "has an engine of its own, which"),
        ({"engine": 3}, "engine is 3: give a function of a loss that returns a gradient engine"),
        ({"engine": lambda loss: lambda *args: None}, "the gradient engine returned NoneType"),
        ({"engine": lambda loss: lambda *args: SUMS}, r"gives none for parameter 'down/kernel'"),
        ({"method": Method(lambda step: None)}, "the method's step returned None: return a step"),
    ],
)
def test_a_plug_that_does_not_fit_is_named(changes, words):
    experiment = make_experiment(**changes)
    mesh = make_experiment_mesh(experiment)
    with pytest.raises(ValueError, match=words):
        compile_train(experiment, make_abstract_state(experiment, mesh), mesh)


def test_a_field_is_given_and_replaced_by_name_wherever_it_lives():
    kinds = (jt.Experiment, jt.Task, jt.Data, jt.Metadata)
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    assert len(set(names)) == len(names)
    experiment, held_out = make_experiment(3), lambda sharding: ()
    config, rules = {"model": 1}, jt.Rules([("up", ("embed", None))])
    other = experiment.with_(steps=5, rules=rules, eval_batches=held_out, config=config)
    assert (other.steps, other.task.rules, other.metadata.config) == (5, rules, config)
    assert other.data == dataclasses.replace(experiment.data, eval_batches={"": held_out})
    assert other.with_(task=experiment.task, rules=rules) == other
    again = {name: getattr(part, name) for part in (other.task, other.data) for name in vars(part)}
    again |= {name: getattr(other, name) for name in ("name", "optimizer", "steps", "layout")}
    assert jt.Experiment.of(**again, method=other.method, config=config) == dataclasses.replace(
        other, metadata=jt.Metadata(config=config), seed=0, policy=jt.Policy()
    )
    sets = other.with_(eval_batches={"a": held_out}, best_metric="a/loss").data.eval_sets
    within = other.with_(eval_batches={"a": held_out, "a/b": held_out}, best_metric="a/b/loss")
    assert within.deciding_set == "a/b/"
    assert sets == {"a/": held_out}
    built, given = jt.Config().experiment, dict.fromkeys(("init_fn", "batch", "train_batches"))
    assert built("own", **given, loss_fn=len, gather="model").task.gathers_layers
    for unknown, message in (
        (given, "the experiment has neither `loss_fn` nor `stages`: give one of them"),
        ({"train_batch": None}, "an experiment has no field 'train_batch': try 'train_batches'"),
        ({"gather": "step"}, "gather is 'step': give 'model', or that of the layout"),
    ):
        with pytest.raises(ValueError, match=message):
            built("own", **unknown)
    with pytest.raises(ValueError, match="no field 'best_metrics': try 'best_metric'"):
        experiment.with_(best_metrics="loss")
