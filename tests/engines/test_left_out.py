"""One rule for what is not finite: an update is made of its whole batch or not at all.

The four ways to make one update of a batch (at once, accumulated, pipelined, and over several
calls) against the definition in NumPy float64, with ragged masks and injected overflows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain.engines.pipeline import pipeline
from jaxtrain.stages import Stages
from jaxtrain.step import build_update

# Most of the time of these tests is LLVM's; its optimisations are not what is tested.
FAST = {"xla_backend_optimization_level": 0}

ROWS, D, LAYERS, RATE, MOMENTUM, SCALE = 8, 3, 2, 0.1, 0.9, 2.0**5
POLICIES = {
    "f32": (jt.Policy.f32(), 1e-5),
    "bf16": (jt.Policy.bf16(), 0.2),
    "fp16": (jt.Policy.fp16(loss_scale=SCALE), 1e-2),
}
EVERYDAY = [("f32", "plain", 1), ("fp16", "accumulated", 4), ("f32", "accumulated", 4)]
EVERYDAY += [("fp16", "pipelined", 4), ("f32", "calls", 4), ("fp16", "judged calls", 4)]
EVERY = [
    (policy, *way)
    for policy in POLICIES
    for way in [("plain", 1), ("pipelined", 1)]
    + [(way, k) for way in ("accumulated", "pipelined", "calls", "judged calls") for k in (2, 4, 8)]
]


def init(rng):
    keys = jax.random.split(rng, 3)
    return {
        "gain": 1 + 0.1 * jax.random.normal(keys[0], (D,)),
        "blocks": {"w": 0.4 * jax.random.normal(keys[1], (LAYERS, D, D))},
        "out": jax.random.normal(keys[2], (D,)),
    }


def embed(params, batch, rng):
    return batch["x"].astype(params["gain"].dtype) * params["gain"]


def block(layer, x, batch, rng):
    return x + jnp.tanh(x @ layer["w"])


def head_loss(params, x, batch):
    error = (x @ params["out"]).astype(jnp.float32) - batch["y"]
    return jt.WeightedLoss((jnp.square(error) * batch["mask"]).sum(), batch["mask"].sum())


def loss_fn(params, batch, rng):
    x = embed(params, batch, rng)
    for layer in range(LAYERS):
        x = block({"w": params["blocks"]["w"][layer]}, x, batch, rng)
    return head_loss(params, x, batch)


def definition(params, batch):
    """Loss and gradients of its mean, in float64, by hand."""
    gain, w, out = (np.float64(p) for p in (params["gain"], params["blocks"]["w"], params["out"]))
    x = np.float64(batch["x"])
    inputs, slopes = [x * gain], []
    for layer in w:
        value = np.tanh(inputs[-1] @ layer)
        slopes.append(1 - value**2)
        inputs.append(inputs[-1] + value)
    error = inputs[-1] @ out - batch["y"]
    weights = batch["mask"] / batch["mask"].sum()
    d_y = 2 * error * weights
    d_x, d_w = d_y[:, None] * out, np.zeros_like(w)
    for layer in reversed(range(LAYERS)):
        d_z = d_x * slopes[layer]
        d_w[layer] = inputs[layer].T @ d_z
        d_x = d_x + d_z @ w[layer].T
    grads = {"gain": (d_x * x).sum(0), "blocks": {"w": d_w}, "out": inputs[-1].T @ d_y}
    return (error**2 * weights).sum(), grads


@functools.cache
def compiled(policy, way, parts):
    """A jitted step, its first state, and how many calls of it make an update."""
    policy, calls = POLICIES[policy][0], parts if "calls" in way else 1
    judge = {"skip_spikes": 6.0} if way == "judged calls" else {}
    optimizer = jt.make_optimizer("momentum", RATE, momentum=MOMENTUM, accumulate=calls, **judge)
    state = jt.init_state(init, optimizer, jax.random.key(0), policy=policy)
    if way == "pipelined":
        mesh = jt.make_mesh(pipe=2, devices=jax.devices()[:2])
        stages = Stages(embed=embed, block=block, head_loss=head_loss)
        engine = pipeline(stages, mesh=mesh, microbatches=parts, policy=policy)
        step = build_update(engine, optimizer, policy=policy)
    else:
        accumulate = parts if way == "accumulated" else 1
        step = jt.build_train_step(loss_fn, optimizer, policy=policy, accumulate=accumulate)
    return jax.jit(step, compiler_options=FAST), state, calls


def make_batch(seed, counting):
    r = np.random.default_rng(seed)
    batch = {"x": r.normal(size=(ROWS, D)), "y": r.normal(size=ROWS), "mask": np.array(counting)}
    return {name: leaf.astype(np.float32) for name, leaf in batch.items()}


def momentum_of(opt_state):
    """The one tree of moments, by path."""
    leaves = jt.tree.named_leaves(opt_state).items()
    return {name.split("trace/")[1]: x for name, x in leaves if "trace/" in name}


def check(case, seed, masks, bad, value, where):
    policy, way, parts = case
    tolerance = POLICIES[policy][1]
    step, state, calls = compiled(*case)
    params, trace, scale = state.params, None, SCALE
    batches = [make_batch(seed + i, mask) for i, mask in enumerate(masks)]
    for row in bad:  # in the first batch
        batches[0][where][row] = value
    for batch, broken in zip(batches, [bool(bad), False], strict=True):
        for call in range(calls):
            before = state
            rows = jax.tree.map(lambda x, call=call: x[call::calls], batch)
            state, metrics = step(state, rows)
            if call < calls - 1:
                jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
            poisoned = any(not np.isfinite(rows[name]).all() for name in ("x", "y"))
            assert int(metrics["skipped"]) == poisoned * (1 if "calls" in way else parts)
            assert int(metrics.get("spike", 0)) == 0
            assert float(metrics["weight"]) == (0 if poisoned else rows["mask"].sum())
            if policy == "fp16":
                assert float(metrics["loss_scale"]) == scale
                scale *= 0.5 if poisoned else 1
        if broken or not batch["mask"].any():
            jax.tree.map(np.testing.assert_array_equal, state.params, params)
        else:
            loss, grads = definition(params, batch)
            if calls == 1:
                assert float(metrics["loss"]) == pytest.approx(loss, rel=tolerance, abs=tolerance)
            grads = jt.tree.named_leaves(grads)
            trace = grads if trace is None else {n: MOMENTUM * trace[n] + grads[n] for n in grads}
            leaves = jt.tree.named_leaves(params).items()
            moved = [np.asarray(p) - RATE * trace[name] for name, p in leaves]
            params = jax.tree.unflatten(jax.tree.structure(params), moved)
        found = momentum_of(state.opt_state)
        for name, leaf in jt.tree.named_leaves(params).items():
            expected = np.zeros_like(leaf) if trace is None else trace[name]
            close = {"rtol": tolerance, "atol": tolerance * max(1.0, np.abs(expected).max())}
            np.testing.assert_allclose(found[name], expected, **close, err_msg=name)
            after = jt.tree.named_leaves(state.params)[name]
            np.testing.assert_allclose(after, leaf, **close, err_msg=name)
        params = state.params


masks = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), min_size=ROWS, max_size=ROWS)
examples = {
    "seed": st.integers(0, 99),
    "masks": st.tuples(masks, masks),
    "bad": st.lists(st.integers(0, ROWS - 1), max_size=2),
    "value": st.sampled_from([np.inf, -np.inf, np.nan]),
    "where": st.sampled_from(["x", "y"]),
}


@settings(max_examples=20, deadline=None)
@given(case=st.sampled_from(EVERYDAY), **examples)
def test_an_update_is_made_of_its_whole_batch_or_not_at_all(case, **example):
    check(case, **example)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(**examples)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_an_update_is_made_of_its_whole_batch_or_not_at_all_in_every_way(case, **example):
    check(case, **example)


@pytest.mark.parametrize("way", ["plain", "accumulated", "pipelined", "calls"])
def test_an_overflow_does_not_bias_the_update(way):
    """The row with the large gradient overflows at first: nothing is applied without it."""
    policy, parts = jt.Policy.fp16(), 1 if way == "plain" else 4
    optimizer = jt.make_optimizer("sgd", 1.0, accumulate=parts if way == "calls" else 1)
    slopes = np.array([0.1, 0.1, 0.1, 10.0], np.float32)

    def params(rng):
        return {"w": jnp.ones(()), "blocks": {"unused": jnp.ones(2)}}

    def head(params, x, batch):
        return jt.WeightedLoss((x * params["w"]).astype(jnp.float32).sum(), jnp.float32(x.size))

    stages = Stages(
        embed=lambda params, batch, rng: batch.astype(jnp.float16),
        block=lambda layer, x, batch, rng: x,
        head_loss=head,
    )
    if way == "pipelined":
        mesh = jt.make_mesh(pipe=2, devices=jax.devices()[:2])
        engine = pipeline(stages, mesh=mesh, microbatches=parts, policy=policy)
        step = build_update(engine, optimizer, policy=policy)
    else:

        def loss(params, batch, rng):
            return head(params, batch.astype(jnp.float16), batch)

        accumulate = parts if way == "accumulated" else 1
        step = jt.build_train_step(loss, optimizer, policy=policy, accumulate=accumulate)
    step = jax.jit(step, compiler_options=FAST)
    state = jt.init_state(params, optimizer, jax.random.key(0), policy=policy)
    batches = [slopes[i : i + 1] for i in range(4)] if way == "calls" else [slopes]
    skips = 0
    for _ in range(10):
        for batch in batches:
            state, metrics = step(state, batch)
            skips += int(metrics["skipped"]) > 0
        if float(state.params["w"]) != 1:
            break
    assert skips >= (1 if way == "plain" else 3)
    assert float(state.loss_scale.scale) == 2.0 ** (15 - skips)
    assert 1 - float(state.params["w"]) == pytest.approx(slopes.mean(), rel=2e-3)
