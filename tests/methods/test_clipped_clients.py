"""Rounds that are private to a client: the loop over clients, noise once, refusals by name."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments.federated import Config
from experiments.federated import build as experiment
from jaxtrain import build, data
from jaxtrain.engines.private import DRAWN
from jaxtrain.methods.clipped_clients import ClippedClients
from jaxtrain.methods.federated import Federated, client_round, federated
from jaxtrain.methods.privacy import Private, epsilon_after
from tests import problems
from tests.methods.test_privacy import whole_and_killed

C, N, B = 4, 8, 2
CLIP, E = 3.0, 3.0


def batch(numbers=(3, 0, 9, 4), broken=None):
    """Rows of clients 3, 9 and 4 of a population; the second place holds a client that was not
    drawn."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(C, N, 3))
    given = {"x": x, "y": x @ np.ones((3, 2)) * np.arange(1, C + 1).reshape(C, 1, 1)}
    given["mask"] = (np.arange(N) < np.array([[8], [8], [3], [5]])) * 1.0
    if broken is not None:
        given["y"][broken] = np.nan
    made = {n: v.reshape(C * N, *v.shape[2:]).astype(np.float32) for n, v in given.items()}
    return made | {DRAWN: np.repeat(np.int32(numbers), N)}


def linear(private, how, local_batch=B, frozen=None, **layout):
    made = jt.Experiment.of(
        name="linear",
        init_fn=lambda rng: {"a": jnp.ones((3, 2)) / 2, "b": jnp.zeros(2)},
        loss_fn=problems.least_squares,
        batch=batch(),
        train_batches=None,
        optimizer=jt.make_optimizer("momentum", 0.05, momentum=0.5),
        steps=3,
        freeze=frozen,
    )
    made = made.with_(**problems.with_layout(layout))
    return federated(made, how, local_batch=local_batch, private=private)


def moved(made, given, count=1):
    """What a round moves the server's parameters by, and its metrics."""
    mesh = build.make_experiment_mesh(made, jax.devices()[:count])
    state = build.make_state(made, mesh)
    before = jax.device_get(state.params)
    after, metrics = build.compile_train(made, state, mesh)(state, given)
    diff = jax.tree.map(lambda x, y: np.asarray(x, float) - y, jax.device_get(after.params), before)
    return diff, jax.device_get(metrics), after


def flat(tree):
    return np.concatenate([x.ravel() for x in tree.values()])


def by_loop(made, given):
    """The clipped sum, client by client in float64; training a client is jaxtrain's."""
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    state = build.make_state(made, mesh)
    step = jt.build_train_step(problems.least_squares, made.laid.optimizer)
    client = jax.jit(client_round(step, epochs=2, local_batch=B))
    total, norms = dict.fromkeys(("a", "b"), 0.0), []
    for c in np.flatnonzero(given[DRAWN][::N]):
        rows = {n: x[c * N : c * N + N] for n, x in given.items() if n != DRAWN}
        number = given[DRAWN][c * N]
        key = jax.random.fold_in(jax.random.fold_in(state.rng, 0), number)
        after, _ = client(key, rows, state)
        own = {n: np.asarray(after[n], float) - np.asarray(state.params[n]) for n in total}
        norms.append(math.sqrt(sum((x**2).sum() for x in own.values())))
        if np.isfinite(norms[-1]):
            total = {n: total[n] + min(1, CLIP / norms[-1]) * own[n] for n in total}
    return total, np.array(norms)


HOW = Federated(per_round=C, epochs=2)


@pytest.mark.parametrize(
    ("axes", "count"),
    [({}, 1), pytest.param({"data": 4, "fsdp": 2}, 8, marks=pytest.mark.slow)],
)
def test_it_is_the_loop_over_clients_and_who_is_not_drawn_counts_nothing(axes, count):
    total, norms = by_loop(linear(ClippedClients(CLIP, 0.0, E), HOW), batch())
    assert 0 < (norms > CLIP).sum() < 3
    found, metrics, _ = moved(linear(ClippedClients(CLIP, 0.0, E), HOW, mesh=axes), batch(), count)
    for name, x in total.items():
        np.testing.assert_allclose(found[name] * E, x, rtol=0, atol=1e-6 * abs(x).max())
    assert (metrics["clients"], metrics["not_finite"]) == (3, 0)
    assert metrics["clipped"] == pytest.approx((norms > CLIP).mean())
    # Where a client stands changes nothing, for it draws by its number.
    again = batch()
    order = (np.array([2, 3, 0, 1])[:, None] * N + np.arange(N)).reshape(-1)
    again = {n: x[order] for n, x in again.items()}
    other, _, _ = moved(linear(ClippedClients(CLIP, 0.0, E), HOW, mesh=axes), again, count)
    for name, x in found.items():
        np.testing.assert_allclose(other[name], x, rtol=0, atol=1e-6 * abs(x).max())


def test_without_clip_and_noise_it_is_federated_averaging():
    given = batch((1, 2, 3, 4)) | {"mask": np.ones(C * N, np.float32)}
    private = ClippedClients(math.inf, 0.0, C)
    found, metrics, _ = moved(linear(private, HOW, local_batch=N), given)
    plain = {name: x for name, x in given.items() if name != DRAWN}
    made = linear(None, HOW, local_batch=N).with_(batch=plain)
    wanted, told, _ = moved(made, plain)
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=1e-6 * abs(x).max())
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)


@pytest.mark.slow
def test_noise_is_added_once_and_anew_in_each_round_on_every_mesh():
    quiet, loud = ClippedClients(CLIP, 0.0, E), ClippedClients(CLIP, 2.0, E)
    how = dataclasses.replace(HOW, outer="sgd")
    here, _, _ = moved(linear(loud, how), batch())
    there, _, _ = moved(linear(loud, how, mesh={"data": 4, "fsdp": 2}), batch(), 8)
    np.testing.assert_allclose(flat(there), flat(here), atol=1e-6)
    without, _, _ = moved(linear(quiet, how), batch())
    # A round without any client is noise alone, and is not left out.
    alone, metrics, state = moved(linear(loud, how), batch((0, 0, 0, 0)))
    np.testing.assert_allclose(flat(here) - flat(without), flat(alone), atol=1e-6)
    assert abs(flat(alone)).max() < 5 * 2 * CLIP / E
    assert (metrics["clients"], metrics["skipped"], state.skipped, state.step) == (0, 0, 0, 1)


def test_noise_has_its_deviation_and_frozen_parameters_have_none():
    private = ClippedClients(3.0, 2.0, 4.0)
    zeros = {"a": jnp.zeros((C, 4000)), "b": None}
    draws = [private(zeros, jnp.zeros(C, bool), jax.random.key(n))[0]["a"] for n in range(2)]
    assert np.std(draws) == pytest.approx(3 * 2 / 4, rel=0.03)
    assert abs(np.corrcoef(draws)[0, 1]) < 0.06
    found, _, _ = moved(linear(private, HOW, frozen=("^b",)), batch())
    assert not found["b"].any()
    assert found["a"].all()


def test_a_client_whose_update_is_not_finite_counts_nothing():
    private = ClippedClients(CLIP, 0.0, E)
    u_C = {"a": jnp.array([[3.0, 4.0], [jnp.nan, 1.0], [0.1, 0.0], [1e30, 0.0]])}
    mean, told = private(u_C, jnp.array([True, True, True, True]), jax.random.key(0))
    np.testing.assert_allclose(mean["a"], [1.9 / E, 2.4 / E], rtol=1e-6)
    assert told["not_finite"] == 2  # 1e30 squared is no float32


def test_clients_are_drawn_one_by_one_as_a_function_of_seed_and_round():
    rows = [{"x": np.int32(i)} for i in range(90)]
    clients = np.array_split(np.arange(90), 40)
    made = data.PoissonClients(rows, clients, per_round=8, local_batch=1, leaf=DRAWN, divisor=4)
    batches = data.Batches(made, global_batch=made.room * made.size, seed=3)
    assert made.room % 4 == 0
    counts, times = [], np.zeros(40)
    for step in range(300):
        drawn = made.drawn(3, step)
        counts.append(len(drawn))
        times[drawn] += 1
        if step < 3:
            found_C = batches.batch(step)[DRAWN].reshape(made.room, -1).max(1)
            assert (found_C[found_C > 0] - 1).tolist() == drawn.tolist()
            # Each of four devices has as many, or one more.
            assert np.ptp((found_C.reshape(4, -1) > 0).sum(1)) <= 1
    assert np.mean(counts) == pytest.approx(8, abs=0.5)
    assert np.std(counts) == pytest.approx(math.sqrt(8 * 0.8), rel=0.15)
    assert 30 < times.min() < times.max() < 90
    with pytest.raises(ValueError, match="clients 1 and 2 have a row in common"):
        data.PoissonClients(rows, [clients[0], clients[0]], per_round=1, local_batch=1, leaf=DRAWN)


def digits(**given):
    pytest.importorskip("sklearn")
    private = Private(**{"noise": 1.0, "clip": 0.5} | given.pop("private", {}))
    federated = Federated(clients=40, per_round=4, **given.pop("federated", {}))
    given = {"steps": 4, "seed": 5, "hidden": (8,)} | given
    return experiment(Config(private=private, federated=federated, **given))


@pytest.mark.slow
def test_a_run_says_its_epsilon_and_goes_on_with_the_same_noise(tmp_path, capsys):
    pytest.importorskip("dp_accounting")
    ends, logged = whole_and_killed(digits(), tmp_path, save_every=2, killed_at=3)
    jax.tree.map(np.testing.assert_array_equal, *ends)
    wanted = {n: epsilon_after(n, rate=4 / 40, noise=1.0) for n in range(1, 5)}
    assert logged == pytest.approx(wanted)
    told = (
        f"epsilon {wanted[4]:.3f} at delta 1e-05 after 4 rounds, for a client more or less of 40, 4"
    )
    assert " ".join(capsys.readouterr().out.split()).count(told) == 5
    assert told in (tmp_path / "killed/report.html").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"federated": {"clip": 1.0}}, "`federated.clip` is 1.0 and training is private: rounded"),
        ({"private": {"bands": 2}}, "`private.bands` is 2 and training is private to clients"),
        ({"private": {"delta": 0.1}}, "`private.delta` is 0.1 and there are 40 clients"),
        ({"private": {"clip": math.inf}}, "noise with a finite clip alone"),
        ({"seed": 0}, "`seed` is 0 and training is private"),
        ({"run": jt.RunOptions(alerts=("loss-spike:stop",))}, "`alerts` is"),
    ],
)
def test_what_would_break_the_guarantee_is_refused_by_name(given, words):
    pytest.importorskip("dp_accounting")
    with pytest.raises(ValueError, match=words):
        digits(**given)


def test_epsilon_is_of_clients_and_rounds_beyond_it_are_refused():
    pytest.importorskip("dp_accounting")
    made = digits()
    after = [epsilon_after(n, rate=4 / 40, noise=1.0) for n in (2, 4)]
    assert made.data.counts(2)["privacy/epsilon"] == after[0]
    told = f"epsilon {after[1]:.3f} at delta 1e-05 after 4 rounds, for a client more or less of 40"
    assert made.data.guarantee.startswith(told)
    with pytest.raises(ValueError, match="has 5 rounds, of which 4 are accounted for"):
        made.with_(steps=5)
