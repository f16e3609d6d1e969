"""Group DRO against its formula in NumPy float64, and on meshes, microbatches and resumed runs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.methods.group_dro import group_dro
from jaxtrain.models import layers
from tests import plugs

G, K, D, SHARES = 3, 4, 8, (0.6, 0.3, 0.1)
Config = plugs.Config


def make_rows(count, seed=0):
    """Rows of three groups of different sizes, the smallest of which has labels of its own."""
    r = np.random.default_rng(seed)
    for _ in range(count):
        group, x = r.choice(G, p=SHARES), r.normal(size=D).astype(np.float32)
        label = int(np.argmax(x[:K])) if group < 2 else int(r.integers(K))
        row = {"x": x, "label": np.int32(label), "mask": np.float32(1)}
        yield row | {"group": np.eye(G, dtype=np.float32)[group]}


def init_fn(rng):
    return {"w": 0.1 * jax.random.normal(rng, (D, K))}


def loss_fn(params, batch, rng):
    return layers.class_loss(batch["x"] @ params["w"].astype(jnp.float32), batch)


def build(config):
    rows = list(make_rows(64))
    return config.experiment(
        "dro",
        init_fn=init_fn,
        loss_fn=jt.row_wise(loss_fn),
        optimizer=jt.make_optimizer("adamw", 1e-2, eps=1e-4),
        rules=jt.Rules([("w$", ("embed", None))]),
        method=group_dro(SHARES, rate=2.0),
        **config.batches_of(rows[:48], rows[48:]),
    )


@pytest.mark.slow
def test_it_trains_resumes_and_is_planned_and_compared_on_a_mesh(tmp_path, capsys):
    plugs.check(sys.modules[__name__], "method group_dro_step", tmp_path, capsys)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_are_those_of_the_formula(accumulate):
    rate, learning_rate = 2.0, 0.5
    method = group_dro(SHARES, rate=rate)
    optimizer = jt.make_optimizer("sgd", learning_rate)
    step = jt.build_train_step(loss_fn, optimizer, accumulate=accumulate)
    train = jax.jit(method.step(step))
    state = method.start(jt.init_state(init_fn, optimizer, jax.random.key(0)))
    w, q = np.float64(state.params["w"]), np.full(G, 1 / G)
    counts = set()
    for number in range(4):
        # One batch has no row of a group.
        rows = [row for row in make_rows(16, number) if number != 2 or row["group"][2] == 0][:12]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        state, metrics = train(state, batch)
        x, label, group = np.float64(batch["x"]), batch["label"], batch["group"].argmax(1)
        logits = x @ w
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        nll = -np.log(p[np.arange(len(x)), label])
        weights = q[group] / np.array(SHARES)[group]
        loss = (weights * nll).sum() / weights.sum()
        slope = (p - np.eye(K)[label]) * weights[:, None] / weights.sum()
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics["group_weight"], q, rtol=1e-5)
        seen = [g for g in range(G) if (group == g).any()]
        counts.add(len(seen))
        grown = {g: q[g] * np.exp(rate * nll[group == g].mean()) for g in seen}
        scale = sum(q[g] for g in seen) / sum(grown.values())
        w = w - learning_rate * x.T @ slope
        q = np.array([grown[g] * scale if g in grown else q[g] for g in range(G)])
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state.method["group_weights"], q, rtol=1e-5)
    assert np.ptp(q) > 0.1
    assert counts == {2, 3}


def test_a_step_that_is_left_out_leaves_the_weights():
    method, optimizer = group_dro(SHARES, rate=2.0), jt.make_optimizer("sgd", 0.5)
    state = method.start(jt.init_state(init_fn, optimizer, jax.random.key(0)))
    batch = {"group": jnp.eye(G), "mask": jnp.ones(G)}
    for skipped in (0, 1):  # as where gradients overflow, and losses do not
        found = {"group_loss": jnp.float32([1, 2, 3]), "skipped": jnp.int32(skipped)}
        after, _ = method.step(lambda state, batch, found=found: (state, found))(state, batch)
        moved = after.method["group_weights"] - state.method["group_weights"]
        assert (jnp.abs(moved).max() > 0.1) == (not skipped)
