"""Private gradients are the loop over examples, whatever the mesh, and noise is added once."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import build
from jaxtrain.engines.private import DRAWN, private, square_root
from jaxtrain.models import decoder
from jaxtrain.sharding.rules import Rules
from jaxtrain.tree import named_leaves
from tests import plugs, problems
from tests.problems import record_gradients

CLIP, EXAMPLES = 9.0, 11.0
FAST = {"xla_backend_optimization_level": 0}


def batch_with_padding():
    """Rows 12 to 15 are padding, which holds NaN."""
    batch = problems.make_batch(keep=1.0)
    numbers = np.where(np.arange(16) < 12, np.arange(16) + 5, 0).astype(np.int32)
    for name in ("x", "y"):
        batch[name][12:] = np.nan
    return batch | {DRAWN: numbers}


def init(rng):
    del rng
    return problems.init(jax.random.key(0))


def stepped(engine, batch, accumulate=1):
    """The mean gradient, the metrics and the state of one step."""
    optimizer = optax.chain(record_gradients(), optax.sgd(0.1))
    state = jt.init_state(init, optimizer, jax.random.key(0), memory=engine and engine.init)
    how = {} if engine is None else {"engine": engine}
    step = jt.build_train_step(problems.loss_fn, optimizer, accumulate=accumulate, **how)
    after, metrics = jax.jit(step)(state, batch)
    return named_leaves(after.opt_state[0]), metrics, after


def by_loop(params, batch):
    """Clipped gradients in float64, example by example, and how many norms are beyond the clip."""
    total, clipped = {}, 0
    for i in np.flatnonzero(batch[DRAWN]):
        row = {n: x[i : i + 1] for n, x in batch.items()}
        grads = named_leaves(problems.reference(params, row)[1])
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        clipped += norm > CLIP
        for name, g in grads.items():
            total[name] = total.get(name, 0) + min(1, CLIP / norm) * g
    return total, clipped


@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_is_the_loop_over_examples_and_padding_counts_nothing(accumulate):
    batch = batch_with_padding()
    params = init(None)
    expected, clipped = by_loop(params, batch)
    found, metrics, _ = stepped(private(CLIP, 0.0, EXAMPLES), batch, accumulate)
    assert 0 < clipped < 12
    for name, g in expected.items():
        np.testing.assert_allclose(found[name] * EXAMPLES, g, rtol=0, atol=1e-6 * abs(g).max())
    assert (metrics["examples"], metrics["not_finite"], metrics["skipped"]) == (12, 0, 0)
    assert metrics["clipped"] == pytest.approx(clipped / 12)
    real = {n: x[:12] for n, x in batch.items()}
    assert metrics["loss"] == pytest.approx(problems.reference(params, real)[0], rel=1e-5)
    assert metrics["weight"] == EXAMPLES


def test_without_clip_and_noise_it_is_the_plain_step():
    batch = problems.make_batch()
    neutral = private(math.inf, 0.0, float(batch["mask"].sum()))
    plain, told, _ = stepped(None, batch)
    found, metrics, _ = stepped(neutral, batch)
    for name, g in plain.items():
        np.testing.assert_allclose(found[name], g, rtol=0, atol=1e-6 * abs(g).max())
    for name in ("loss", "largest", "weight"):
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-6)


def test_a_step_makes_no_product_of_examples_where_two_vectors_will_do():
    """Taking the weight of a loss as a constant is no use of its kernels."""

    def loss_fn(params, batch, rng):
        return jt.WeightedLoss(jnp.square(batch @ params["w"] + params["b"]).sum(), len(batch))

    optimizer = optax.sgd(0.1)
    init = lambda rng: {"w": jnp.ones((13, 6)), "b": jnp.ones(6)}  # noqa: E731
    state = jt.init_state(init, optimizer, jax.random.key(0))
    step = jt.build_train_step(loss_fn, optimizer, engine=private(1.0, 0.0, 5))
    assert "5x13x6xf32" not in jax.jit(step).lower(state, jnp.ones((5, 13))).as_text()


def test_a_rule_of_ones_own_that_returns_its_first_input_is_a_use_of_the_others():
    @jax.custom_jvp
    def regularized(total, w):
        return total

    regularized.defjvp(lambda xs, dxs: (xs[0], dxs[0] + jnp.vdot(xs[1], dxs[1])))
    rows, w = np.float32([[1, 2], [3, 4]]), np.float32([[1], [2]])

    def loss_fn(params, batch, rng):
        total = jnp.square(batch @ params["w"]).sum()
        return jt.WeightedLoss(regularized(total, params["w"]), len(batch))

    optimizer = optax.sgd(1.0)
    state = jt.init_state(lambda rng: {"w": w}, optimizer, jax.random.key(0))
    step = jt.build_train_step(loss_fn, optimizer, engine=private(1e9, 0.0, 2))
    moved = w - np.asarray(step(state, rows)[0].params["w"])
    np.testing.assert_allclose(moved, rows.T @ (rows @ w) + w, rtol=1e-5)


def test_an_example_that_is_not_finite_counts_nothing_and_leaves_no_step_out():
    batch = problems.make_batch(keep=1.0)
    batch["y"][3] = np.nan
    found, metrics, state = stepped(private(CLIP, 0.0, 16), batch)
    without = {n: x.copy() for n, x in batch.items()} | {DRAWN: np.arange(16) + 1}
    without[DRAWN][3] = 0
    expected, _, _ = stepped(private(CLIP, 0.0, 16), without)
    for name, g in expected.items():
        np.testing.assert_array_equal(found[name], g)
    assert (metrics["not_finite"], metrics["skipped"], state.skipped) == (1, 0, 0)
    # Nor does a batch without any example: noise alone.
    _, metrics, after = stepped(private(CLIP, 1.0, 16), batch | {DRAWN: np.zeros(16, np.int32)})
    assert (metrics["examples"], metrics["skipped"]) == (0, 0)
    moved = jax.tree.map(lambda a, b: (a != b).all(), after.params, init(None))
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(("y", "weight"), [(3e37, 1.0), (1.0, 1e-37), (1.0, np.inf)])
def test_no_loss_however_large_leaves_out_a_step_and_its_noise(y, weight):
    def loss(params, batch, rng):
        error_N = jnp.abs(params - batch["y"])
        return jt.WeightedLoss((error_N * batch["w"]).sum(), batch["w"].sum())

    def moved(**batch):
        state = jt.init_state(lambda rng: jnp.float32(0), optax.sgd(1.0), jax.random.key(0))
        step = jt.build_train_step(loss, optax.sgd(1.0), engine=private(1.0, 2.0, 16.0))
        after, metrics = jax.jit(step)(state, batch)
        assert (metrics["skipped"], after.skipped) == (0, 0)
        return float(after.params)

    rows = np.ones(16, np.float32)
    found = moved(y=rows * y, w=rows * np.float32(weight))
    usual = moved(y=rows, w=rows) if np.isfinite(weight) else moved(y=rows, w=0 * rows)
    assert found != 0
    assert found == pytest.approx(usual, abs=1e-6)


def test_noise_has_its_deviation_and_differs_by_step_and_leaf():
    nothing = {"x": np.zeros((16, 512), "f"), DRAWN: np.zeros(16, np.int32)}
    optimizer = optax.chain(record_gradients(), optax.sgd(1.0))

    def gradients(bands):
        engine = private(CLIP, 2.0, EXAMPLES, bands=bands)
        init = lambda rng: {"a": jnp.zeros(512), "b": jnp.zeros(512)}  # noqa: E731
        loss = lambda p, batch, rng: (batch["x"] @ (p["a"] + p["b"])).sum()  # noqa: E731
        state = jt.init_state(init, optimizer, jax.random.key(0), memory=engine.init)
        step = jax.jit(jt.build_train_step(loss, optimizer, engine=engine))
        for _ in range(8):
            state, _ = step(state, nothing)
            yield np.concatenate(list(state.opt_state[0].values())) * EXAMPLES / CLIP

    white = np.stack(list(gradients(1)))
    assert white.std() == pytest.approx(2.0, rel=0.03)
    assert abs(np.corrcoef(white)[~np.eye(8, dtype=bool)]).max() < 0.15
    assert abs(np.corrcoef(white[:, :512].ravel(), white[:, 512:].ravel())[0, 1]) < 0.05
    # What is correlated is the same noise, solved for by the banded matrix.
    matrix = sum(np.diag([c] * (8 - k), -k) for k, c in enumerate(square_root(3)))
    expected = np.linalg.solve(matrix, white)
    np.testing.assert_allclose(np.stack(list(gradients(3))), expected, atol=1e-5)


def test_the_optimizer_is_given_no_loss():
    spikes = jt.make_optimizer("sgd", 0.1, skip_spikes=6)
    state = jt.init_state(problems.init, spikes, jax.random.key(0))
    step = jt.build_train_step(problems.loss_fn, spikes, engine=private(1.0, 1.0, 16))
    with pytest.raises(ValueError, match="`skip_spikes` needs a loss"):
        jax.eval_shape(step, state, problems.make_batch())


def test_what_is_not_of_one_example_is_refused():
    optimizer = optax.sgd(0.1)
    init = lambda rng: (problems.init(rng), {"mean": jnp.zeros(3)})  # noqa: E731
    state = jt.init_state(init, optimizer, jax.random.key(0), has_model_state=True)
    loss = lambda p, s, batch, rng: (problems.loss_fn(p, batch, rng), s)  # noqa: E731
    how = {"engine": private(1.0, 1.0, 16)}
    step = jt.build_train_step(loss, optimizer, has_model_state=True, **how)
    with pytest.raises(ValueError, match=r"the model has state \(BatchNorm\)"):
        jax.eval_shape(step, state, problems.make_batch())
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), policy="fp16")
    step = jt.build_train_step(problems.loss_fn, optimizer, policy="fp16", **how)
    with pytest.raises(ValueError, match="the loss is scaled"):
        jax.eval_shape(step, state, problems.make_batch())
    for wrong in ({"clip": 0}, {"noise": -1}, {"clip": math.inf}, {"examples": 0}, {"bands": 0}):
        with pytest.raises(ValueError, match="give numbers above 0, and noise with a finite"):
            private(**{"clip": 1.0, "noise": 1.0, "examples": 1.0} | wrong)


def test_it_is_jax_privacys_clipped_sum():
    clipping = pytest.importorskip("jax_privacy.clipping")
    batch, params = problems.make_batch(keep=1.0), init(None)
    one = lambda p, row: problems.loss_fn(p, row, None).total  # noqa: E731
    theirs = clipping.clipped_grad(one, batch_argnums=1, l2_clip_norm=CLIP)(params, batch)
    found, _, _ = stepped(private(CLIP, 0.0, 16.0), batch)
    for name, g in named_leaves(theirs).items():
        np.testing.assert_allclose(found[name] * 16, g, rtol=0, atol=1e-6 * abs(g).max())


MODEL = decoder.DecoderConfig(
    vocab_size=67, seq_len=8, layers=2, width=16, heads=2, dropout=0.1, bias=False
)


def text(number):
    rng = np.random.default_rng(number)
    rows = {name: rng.integers(0, 67, (16, 8)).astype(np.int32) for name in ("tokens", "targets")}
    mask = (np.arange(8) < rng.integers(1, 9, (16, 1))).astype(np.float32)
    return rows | {"mask": mask, DRAWN: numbers(rng)}


def numbers(rng):
    return np.where(np.arange(16) < 13, rng.permutation(16) + 1, 0).astype(np.int32)


def regression(number):
    return problems.make_batch(number) | {DRAWN: numbers(np.random.default_rng(number))}


def trained(batches, count=1, bands=1, **layout):
    own = {"init_fn": functools.partial(decoder.init, MODEL), "stages": decoder.stages(MODEL)}
    own |= {"rules": Rules(decoder.RULES), "gathers_layers": True}
    if batches is regression:  # which draws by its key, of all rows at once
        own = {
            "init_fn": problems.init,
            "loss_fn": problems.noisy_loss,
            "rules": Rules(plugs.RULES),
        }
    own |= {"batch": batches(0), "train_batches": None}
    own["optimizer"] = optax.chain(record_gradients(), optax.adam(0.01, eps=1e-3))
    own["engine"] = private(CLIP, 0.1, EXAMPLES, bands=bands)
    made = jt.Experiment.of(name="tiny", steps=2, **own)
    made = made.with_(**problems.with_layout(layout))
    mesh = build.make_experiment_mesh(made, jax.devices()[:count])
    state = build.make_state(made, mesh)
    train = build.compile_train(made, state, mesh, compiler_options=FAST)
    for step in range(made.steps):
        state, metrics = train(state, batches(step))
    return jax.device_get(state), jax.device_get(metrics)


once = functools.cache(trained)
SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    ("batches", "bands", "layout"),
    [
        (regression, 2, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "accumulate": 2}),
        pytest.param(text, 2, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}, **SLOW),
        pytest.param(text, 1, {"mesh": {"data": 8}}, **SLOW),
        pytest.param(text, 2, {"mesh": {"data": 2, "fsdp": 4}, "accumulate": 2}, **SLOW),
        pytest.param(text, 1, {"mesh": {"fsdp": 2, "context": 2}}, **SLOW),
        pytest.param(text, 1, {"mesh": {"data": 4}, "zero": 3}, **SLOW),
    ],
)
def test_gradients_noise_and_optimizer_state_are_those_of_one_device(batches, bands, layout):
    expected, told = once(batches, bands=bands)
    found, metrics = trained(batches, math.prod(layout["mesh"].values()), bands, **layout)
    for part in ("params", "opt_state", "memory"):
        wanted = named_leaves(getattr(expected, part))
        for name, x in named_leaves(getattr(found, part)).items():
            scale = max(abs(wanted[name]).max(), 1e-8)
            np.testing.assert_allclose(x, wanted[name], rtol=0, atol=1e-5 * scale, err_msg=name)
    for name in ("loss", "clipped", "examples"):
        np.testing.assert_allclose(metrics[name], told[name], rtol=1e-5)
