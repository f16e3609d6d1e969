"""Late gradients are their definition, on any mesh; without delays they are the plain step."""

import contextlib
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import build
from jaxtrain.methods.asynchrony import Workers, asynchronous, in_order, simulate
from jaxtrain.methods.method import Method
from jaxtrain.tree import named_leaves
from tests import problems
from tests.methods.test_local_updates import FAST, experiment, trained

UNEVEN = Workers(seconds=(1.0, 1.1, 0.9, 4.0), late=32)


def same_bits(a, b):
    ours, theirs = named_leaves(a), named_leaves(b)
    return ours.keys() == theirs.keys() and all(
        np.array_equal(x, theirs[name]) for name, x in ours.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
def test_a_single_worker_has_the_bits_of_the_plain_step(late):
    state, told, _ = trained(experiment())
    made = asynchronous(experiment(), Workers(seconds=(2.0,), late=late, temper=1.0))
    found, metrics, _ = trained(made)
    assert same_bits(state.params, found.params)
    assert same_bits(state.opt_state, found.opt_state)
    assert {name: metrics[name] for name in told} == told
    assert metrics.keys() - told.keys() <= {"seconds", "delay"}


def test_a_table_is_that_of_its_workers():
    even = simulate(dataclasses.replace(UNEVEN, seconds=(1.0,) * 4, jitter=0.0), 12)
    assert even.worker_U.tolist() == [0, 1, 2, 3] * 3
    assert even.delay_U.tolist() == [0, 1, 2, 3] + [3] * 8
    events = simulate(UNEVEN, 400)
    # The last update that each worker read before its gradient is as many updates ago.
    for worker in range(4):
        (at,) = np.nonzero(events.worker_U == worker)
        assert np.array_equal(events.delay_U[at[1:]], np.diff(at) - 1)
    counts = np.bincount(events.worker_U)
    rates = 1 / np.array(UNEVEN.seconds)
    np.testing.assert_allclose(counts / 400, rates / rates.sum(), atol=0.02)
    assert (np.diff(events.seconds_U) >= 0).all()
    for ours, more in zip(events, simulate(UNEVEN, 500), strict=True):
        assert np.array_equal(ours, more[:400])
    # A batch is given to the worker that has just sent its gradient, and they are all taken.
    assert sorted(events.batch_U)[:390] == list(range(390))
    other = simulate(UNEVEN, 400, seed=1)
    assert not np.array_equal(events.worker_U, other.worker_U)


def test_batches_come_in_the_order_of_the_updates():
    events = simulate(dataclasses.replace(UNEVEN, late=3), 60)
    assert len(set(events.batch_U)) == 60 > (np.diff(events.batch_U) == 1).sum()

    @contextlib.contextmanager
    def stream(start, shardings):
        yield itertools.count(start)

    for start in (0, 1, 31):
        with in_order(stream, events.batch_U)(start, None) as batches:
            assert list(batches) == events.batch_U[start:].tolist()


def test_bounds_and_thresholds_hold():
    bound = 2
    events = simulate(dataclasses.replace(UNEVEN, bound=bound), 400)
    sent = np.cumsum(events.worker_U[:, None] == np.arange(4), axis=0)
    # One that is at the bound may have one more under way.
    assert (sent.max(1) - sent.min(1)).max() == bound + 1
    free = simulate(UNEVEN, 400)
    assert events.seconds_U[-1] > 1.5 * free.seconds_U[-1]
    late = simulate(dataclasses.replace(UNEVEN, late=3), 400)
    assert late.delay_U.max() == 3 < free.delay_U.max()
    assert np.bincount(late.worker_U, minlength=4)[3] < 10
    rounds = {
        backup: simulate(Workers(seconds=UNEVEN.seconds, backup=backup, jitter=0.0), 10)
        for backup in (0, 1, 3)
    }
    # A round waits for the slowest that counts, and those that count share the rows.
    for backup, seconds in {0: 4.0 / 4, 1: 1.1 / 3, 3: 0.9}.items():
        assert rounds[backup].delay_U.max() == 0
        np.testing.assert_allclose(rounds[backup].seconds_U, seconds * np.arange(1, 11))


def regression(steps, layout=None):
    start, rows = problems.weighted_rows(4)
    made = jt.Experiment.of(
        name="linear",
        init_fn=lambda rng: jax.tree.map(jnp.asarray, start),
        loss_fn=problems.least_squares,
        batch=rows(0),
        train_batches=None,
        optimizer=jt.make_optimizer("momentum", 0.02, momentum=0.5, weight_decay=0.1),
        rules=[("a", ("fsdp", None))],
        steps=steps,
        layout=jt.Layout.parse(layout) if layout else jt.Layout(),
    )
    return start, rows, made


def defined(start, rows, events, temper):
    """The parameter server in NumPy and float64, written down anew."""
    now = {name: x.astype(float) for name, x in start.items()}
    versions, momentum = [], {name: 0.0 * x for name, x in now.items()}
    for update, delay in enumerate(events.delay_U):
        versions.append(now)
        read = versions[update - delay]
        batch = {n: x.astype(float) for n, x in rows(int(events.batch_U[update])).items()}
        error = batch["x"] @ read["a"] + read["b"] - batch["y"]
        error *= 2 * batch["mask"][:, None] / batch["mask"].sum()
        grads = {"a": batch["x"].T @ error, "b": error.sum(0)}
        # The decay is of the server's parameters, and of no bias.
        grads["a"] = grads["a"] + 0.1 * now["a"]
        momentum = {n: 0.5 * momentum[n] + grads[n] for n in now}
        now = {n: now[n] - 0.02 * (1.0 + delay) ** -temper * momentum[n] for n in now}
    return now, momentum


@pytest.mark.parametrize(
    ("temper", "layout", "devices"),
    [
        (0.0, None, 1),
        (1.0, "data=2,fsdp=2,accumulate=2", 4),
        pytest.param(0.5, "data=2,fsdp=2,zero=1", 4, marks=pytest.mark.slow),
        pytest.param(0.0, "data=8,zero=3", 8, marks=pytest.mark.slow),
    ],
)
def test_updates_are_their_definition(temper, layout, devices):
    start, rows, made = regression(24, layout)
    workers = dataclasses.replace(UNEVEN, temper=temper, late=20)
    events = simulate(workers, 24)
    given = lambda update: rows(int(events.batch_U[update]))  # noqa: E731
    state, *_ = trained(asynchronous(made, workers), devices, given, FAST)
    assert events.delay_U.max() > 8
    wanted, momentum = defined(start, rows, events, temper)
    for name, x in wanted.items():
        np.testing.assert_allclose(state.params[name], x, rtol=2e-5, atol=1e-6, err_msg=name)
    ours = named_leaves(state.opt_state)
    for name, x in momentum.items():
        (found,) = (v for path, v in ours.items() if path.endswith(f"trace/{name}"))
        np.testing.assert_allclose(found, x, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("tau", [1, 2, 5])
def test_delayed_descent_is_stable_up_to_its_bound(tau, tmp_path):
    steps, log = 3000, tmp_path / "events.jsonl"
    rows = [{"worker": 0, "batch": i, "delay": min(i, tau), "seconds": i} for i in range(steps)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bound = 2 * np.sin(np.pi / (4 * tau + 2))

    def grows(factor):
        def loss_fn(params, batch, rng):
            return params["x"] ** 2 / 2 + 0 * batch.sum()

        made = jt.Experiment.of(
            name="quadratic",
            init_fn=lambda rng: {"x": jnp.float32(1)},
            loss_fn=loss_fn,
            batch=np.zeros(1, np.float32),
            train_batches=None,
            optimizer=jt.make_optimizer("sgd", factor * bound, weight_decay=0.0),
            steps=steps,
        )
        made = asynchronous(made, Workers(events=str(log)))
        task = made.task
        step = jt.build_train_step(task.loss_fn, made.optimizer, engine=task.engine)
        step = made.method.step(step)
        state = made.method.start(jt.init_state(task.init_fn, made.optimizer, jax.random.key(0)))
        go = lambda state, _: (lambda s: (s, abs(s.params["x"])))(  # noqa: E731
            step(state, jnp.zeros(1))[0]
        )
        sizes = np.asarray(jax.jit(lambda s: jax.lax.scan(go, s, length=steps))(state)[1])
        return sizes[-300:].max() / sizes[100:400].max()

    assert grows(0.98) < 1 / 3
    assert grows(1.02) > 3


def test_what_cannot_be_is_refused(tmp_path):
    for given, message in (
        ({"late": 3}, "there are no workers"),
        ({"seconds": (1.0, 0.0)}, "above 0"),
        ({"seconds": (1.0,), "backup": 1}, "one is left"),
        ({"seconds": (1.0, 1.0), "backup": 1, "bound": 2}, "no worker is ahead"),
        ({"seconds": (1.0,), "events": "log"}, "real workers or"),
        ({"events": "log", "bound": 2}, "what real workers did"),
        ({"seconds": (1.0, 1.0), "backup": 0, "temper": 1.0}, "no gradient late"),
    ):
        with pytest.raises(ValueError, match=message):
            Workers(**given)
    log, made = tmp_path / "events.jsonl", experiment()
    for line, message in (
        (
            '{"worker": 0, "batch": 0, "delay": 0, "seconds": 1}',
            "has 1 updates and the run 5 steps",
        ),
        ('{"worker": 0, "batch": 0, "delay": 1, "seconds": 1}', "at most the 0 updates before"),
        ('{"worker": 0, "seconds": 1}', "an update has the numbers"),
        ("[]", "an update has the numbers"),
    ):
        log.write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            asynchronous(made, Workers(events=str(log)))
    rows = [{"worker": 0, "batch": i, "delay": i, "seconds": i} for i in range(5)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"late by 4 updates and .* is 2: give 4"):
        asynchronous(made, Workers(events=str(log), late=2))
    tempered = dataclasses.replace(UNEVEN, temper=1.0)
    multi = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    for optimizer, message in (
        (jt.make_optimizer("sgd", 0.1, ema=0.9), "averages of"),
        (jt.make_optimizer("sgd", 0.1, accumulate=2), "accumulates"),
        (multi, "accumulates"),
    ):
        own = asynchronous(made.with_(optimizer=optimizer), tempered)
        with pytest.raises(ValueError, match=message):
            build.make_abstract_state(own, build.make_experiment_mesh(own))
    with pytest.raises(ValueError, match="a method of its own"):
        asynchronous(made.with_(method=Method(lambda step: step)), UNEVEN)
    with pytest.raises(ValueError, match="'pipe' has size 2"):
        asynchronous(experiment(mesh={"pipe": 2}), UNEVEN)
