"""A round is its definition on any mesh, and whole numbers sum to the same bits on all of them."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import build
from jaxtrain.methods.federated import Federated, federated
from jaxtrain.methods.local_updates import Local, local_updates
from jaxtrain.methods.secure import to_float, to_integers
from jaxtrain.tree import named_leaves
from tests import problems

C, N, B, ROUNDS, RATE = 4, 8, 2, 3, 0.05
START = {"a": np.ones((3, 2), np.float32) / 2, "b": np.zeros(2, np.float32)}


def rows(number):
    """Clients with 1 to 8 rows of other weights, and zeros behind them."""
    rng = np.random.default_rng(100 + number)
    x = rng.normal(size=(C * N, 3))
    made = {"x": x, "y": x @ np.ones((3, 2)) + rng.normal(size=(C * N, 2))}
    here = np.arange(N) < rng.integers(1, N + 1, (C, 1))
    made["mask"] = (rng.integers(1, 4, (C, N)) * here).reshape(-1)
    zeros = made["mask"] == 0
    return {n: np.where(zeros.reshape(-1, *[1] * (v.ndim - 1)), 0, v) for n, v in made.items()}


def batch(number):
    return {name: value.astype(np.float32) for name, value in rows(number).items()}


def experiment(how, local_batch=B, **layout):
    made = jt.Experiment.of(
        name="linear",
        init_fn=lambda rng: jax.tree.map(jax.numpy.asarray, START),
        loss_fn=problems.least_squares,
        batch=batch(0),
        train_batches=None,
        optimizer=jt.make_optimizer("momentum", RATE, momentum=0.5),
        steps=ROUNDS,
    )
    return federated(made.with_(**problems.with_layout(layout)), how, local_batch=local_batch)


def trained(made, count=1, rounds=ROUNDS, batches=batch):
    mesh = build.make_experiment_mesh(made, jax.devices()[:count])
    state = build.make_state(made, mesh)
    train = build.compile_train(made, state, mesh)
    for number in range(rounds):
        state, metrics = train(state, batches(number))
    return jax.device_get(state), jax.device_get(metrics)


def defined(how, key):
    """Federated averaging in NumPy and float64; of jaxtrain are the orders of rows alone."""
    anchor, begin = {n: x.astype(float) for n, x in START.items()}, 1e-6 * (how.outer == "yogi")
    first, second = dict.fromkeys(START, begin), dict.fromkeys(START, begin)
    for number in range(ROUNDS):
        given = {n: x.reshape(C, N, *x.shape[1:]) for n, x in rows(number).items()}
        ends, weights, told = [], [], []
        for c in range(C):
            order, _ = jax.random.split(
                jax.random.fold_in(jax.random.fold_in(key, number), jax.numpy.uint32(c))
            )
            x, y, mask = (given[n][c] for n in ("x", "y", "mask"))
            own, inner, seen = {n: v.copy() for n, v in anchor.items()}, {n: 0.0 for n in START}, 0
            for epoch in jax.random.split(order, how.epochs):
                draws = np.where(mask != 0, np.asarray(jax.random.uniform(epoch, (N,))), 2.0)
                places = np.argsort(draws, stable=True)[: (mask != 0).sum()]
                for i in range(0, len(places), B):
                    some = places[i : i + B]
                    m = mask[some]
                    error = x[some] @ own["a"] + own["b"] - y[some]
                    told.append(((m[:, None] * error**2).sum() / m.sum(), m.sum()))
                    error = 2 * m[:, None] * error / m.sum()
                    grads = {"a": x[some].T @ error, "b": error.sum(0)}
                    for n in own:
                        g = grads[n] + how.proximal * (own[n] - anchor[n])
                        inner[n] = g + 0.5 * inner[n]
                        own[n] = own[n] - RATE * inner[n]
                    seen += m.sum()
            ends.append(own)
            weights.append(seen)
        share = np.divide(weights, sum(weights))
        for n in anchor:
            mean = sum(s * end[n] for s, end in zip(share, ends, strict=True))
            moved = anchor[n] - mean
            if how.outer == "average":
                anchor[n] = mean
                continue
            first[n] = 0.9 * first[n] + 0.1 * moved
            yogi = second[n] - 0.01 * np.sign(second[n] - moved**2) * moved**2
            second[n] = yogi if how.outer == "yogi" else 0.99 * second[n] + 0.01 * moved**2
            t, root = number + 1, np.sqrt(second[n] / (1 - 0.99 ** (number + 1)))
            anchor[n] = anchor[n] - how.rate * first[n] / (1 - 0.9**t) / (root + 1e-3)
    total, weight = np.transpose(told)
    return anchor, (total * weight).sum() / weight.sum()


@pytest.mark.parametrize(
    "how",
    [
        Federated(per_round=C, epochs=2, outer="adam", rate=0.1, proximal=0.3),
        pytest.param(Federated(per_round=C, epochs=3), marks=pytest.mark.slow),
        pytest.param(Federated(per_round=C, epochs=2, clip=4.0), marks=pytest.mark.slow),
        pytest.param(Federated(per_round=C, outer="yogi", rate=0.1), marks=pytest.mark.slow),
    ],
)
def test_a_round_is_its_definition(how):
    made = experiment(how)
    key = build.make_state(made, build.make_experiment_mesh(made, jax.devices()[:1])).rng
    wanted, loss = defined(how, key)
    for count, axes in ((1, {}), (4, {"data": 2, "fsdp": 2})):
        state, metrics = trained(experiment(how, mesh=axes), count)
        for name, x in wanted.items():
            np.testing.assert_allclose(state.params[name], x, rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
        assert metrics["weight"] == how.epochs * batch(ROUNDS - 1)["mask"].sum()
        assert state.step == ROUNDS


def test_one_pass_in_one_batch_is_a_step_on_the_rows_of_all():
    """FedSGD of every client is gradient descent on all rows, since clients count by their rows."""
    made = experiment(Federated(per_round=C), local_batch=N)
    state, metrics = trained(made, rounds=1)
    step = jt.build_train_step(problems.least_squares, made.laid.optimizer)
    begun = jt.init_state(made.task.init_fn, made.laid.optimizer, jax.random.key(0))
    after, told = jax.jit(step)(begun, batch(0))
    for name, x in after.params.items():
        np.testing.assert_allclose(state.params[name], x, rtol=2e-6, err_msg=name)
    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-6)


def test_whole_numbers_have_the_same_bits_on_another_mesh():
    how = Federated(per_round=C, epochs=2, clip=2.0, outer="nesterov")
    first, _ = trained(experiment(how))
    state, _ = trained(experiment(how, mesh={"data": 2}), 2)
    for name, x in named_leaves((first.params, first.method)).items():
        other = named_leaves((state.params, state.method))[name]
        assert np.array_equal(x, other), name
    assert not np.array_equal(first.params["b"], START["b"])


def test_integers_are_near_their_numbers_and_do_not_wrap():
    x = np.random.default_rng(0).normal(size=(5, 1000)).astype(np.float32)
    x[:, 0], x[:, 1] = 9, -9  # clipped
    whole = np.asarray(to_integers(x, clip=3.0, clients=5))
    assert whole.dtype == np.uint32
    signed = whole.astype(np.int32).astype(np.int64)
    total = signed.sum(0)
    assert abs(total).max() < 2**31
    assert np.array_equal(total.astype(np.uint32), whole.sum(0, dtype=np.uint32))
    found = to_float(whole.sum(0, dtype=np.uint32), clip=3.0, clients=5)
    wanted = np.clip(x.astype(float), -3, 3).sum(0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=5 * 3 / 2**24)


@pytest.mark.parametrize(
    ("how", "given", "why"),
    [
        ({"per_round": 3}, {}, "`federated.per_round` is 3 and a batch has 32 rows"),
        ({"per_round": C}, {"local_batch": 3}, "a client has 8 places"),
        ({"per_round": C}, {"zero": 1}, "`zero` is 1"),
        ({"per_round": C, "clip": 0.0}, {}, "`clip` is 0.0"),
        ({"per_round": C, "outer": "sgd", "momentum": 0.5}, {}, "`federated.momentum` is 0.5"),
    ],
)
def test_what_cannot_be_is_said(how, given, why):
    with pytest.raises(ValueError, match=why):
        experiment(Federated(**how), **given)


def test_what_a_model_and_a_mesh_cannot_is_said():
    made = experiment(Federated(per_round=C), mesh={"data": 8})
    mesh = build.make_experiment_mesh(made, jax.devices()[:8])
    with pytest.raises(ValueError, match="mesh axis 'data' has size 8"):
        build.compile_train(made, build.make_abstract_state(made, mesh), mesh)
    with pytest.raises(ValueError, match="a method of its own"):
        local_updates(made, Local(replicas=2))
    stateful = made.with_(method=jt.Method(), has_model_state=True)
    with pytest.raises(ValueError, match="has model state"):
        federated(stateful, Federated(per_round=C), local_batch=B)
