"""Gradient engines against the definition, in NumPy float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxtrain import WeightedLoss
from jaxtrain.engines.accumulated import accumulated
from jaxtrain.engines.plain import GradientSums, plain, seed_and_factor
from jaxtrain.ops.numerics import drop
from jaxtrain.optim import make_optimizer
from jaxtrain.precision import Policy
from jaxtrain.state import init_state
from jaxtrain.step import build_train_step, normalize_loss
from tests import problems

LOSS = normalize_loss(problems.loss_fn, has_model_state=False)
PARAMS = problems.init(jax.random.key(0))
KEY = jax.random.key(1)


def mean_of(sums: GradientSums):
    return jax.tree.map(lambda g: g / sums.loss.weight, sums.grads)


def engine_for(microbatches: int):
    loss_fn = normalize_loss(problems.with_extra, has_model_state=False)
    if microbatches == 1:
        return jax.jit(plain(loss_fn))
    return jax.jit(accumulated(loss_fn, microbatches))


ENGINES = {k: engine_for(k) for k in (1, 2, 4, 8)}


@settings(max_examples=25, deadline=None)
@given(
    microbatches=st.sampled_from(sorted(ENGINES)),
    seed=st.integers(0, 10_000),
    keep=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
    negative=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_any_number_of_microbatches_gives_the_gradient_of_the_definition(
    microbatches, seed, keep, negative
):
    batch = problems.make_batch(seed, keep=keep)
    batch["mask"] *= np.where(np.random.default_rng(seed).random(problems.ROWS) < negative, -1, 1)
    assume(batch["mask"].sum() != 0)
    loss, grads, weight = problems.reference(PARAMS, batch, problems.EXTRA)
    sums = ENGINES[microbatches](PARAMS, None, batch, KEY, None)
    assert float(sums.loss.weight) == weight
    # Terms of both signs cancel, and their roundings do not.
    sizes = batch | {"mask": np.abs(batch["mask"])}
    size = problems.reference(PARAMS, sizes, problems.EXTRA)[0]
    size *= sizes["mask"].sum() / abs(weight)
    assert float(sums.loss.means()["loss"]) == pytest.approx(loss, abs=2e-6 * size)
    chex.assert_trees_all_close(mean_of(sums), grads, rtol=1e-5, atol=1e-6 * max(1.0, size))
    assert sums.microbatches == microbatches


def test_a_batch_with_nothing_that_counts_has_the_gradient_of_its_total():
    batch = problems.make_batch()
    batch["mask"][:] = 0.0
    sums = ENGINES[4](PARAMS, None, batch, KEY, None)
    assert float(sums.loss.weight) == 0.0
    grads = problems.reference(PARAMS, batch, problems.EXTRA)[1]
    chex.assert_trees_all_close(sums.grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [2.0**-3, 2.0**15])
def test_loss_scale_goes_with_the_mean_and_cancels(scale):
    batch = problems.make_batch()
    plain = ENGINES[4](PARAMS, None, batch, KEY, None)
    scaled = ENGINES[4](PARAMS, None, batch, KEY, jnp.float32(scale))
    chex.assert_trees_all_close(plain, scaled, rtol=1e-6)
    for weight, size in ((4.0, 4.0), (-4.0, 4.0), (0.0, 1.0)):
        seed, factor = seed_and_factor(jnp.float32(weight), scale, jnp.bfloat16)
        assert (float(seed), float(factor), seed.dtype) == (scale / size, size / scale, "bfloat16")


def test_metrics_are_weighted_by_the_loss_or_by_their_own_weight():
    batch = problems.make_batch()
    means = ENGINES[4](PARAMS, None, batch, KEY, None).loss.means()
    whole = problems.loss_fn(PARAMS, batch, None)
    assert float(means["largest"]) == pytest.approx(
        float(whole.metrics["largest"] / whole.weight), rel=1e-6
    )
    assert float(means["half"]) == pytest.approx(float(whole.weight) / 2 / 4)


def test_model_state_goes_from_microbatch_to_microbatch():
    def counting(params, seen, batch, rng):
        return problems.loss_fn(params, batch, rng), seen + batch["mask"].sum()

    engine = jax.jit(accumulated(normalize_loss(counting, True), 4))
    sums = engine(PARAMS, jnp.float32(1.0), problems.make_batch(keep=1.0), KEY, None)
    assert float(sums.model_state) == 1.0 + problems.ROWS


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_rounding_of_a_narrow_loss_does_not_reach_its_gradients(microbatches):
    def narrow(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        return WeightedLoss(loss.total.astype(jnp.bfloat16), loss.weight)

    loss_fn, batch = normalize_loss(narrow, False), problems.make_batch(keep=1.0)
    batch["mask"][12:] = 0.0  # three rows each: a third is no bfloat16
    engine = plain(loss_fn)
    if microbatches > 1:
        engine = accumulated(loss_fn, microbatches)
    sums = jax.jit(engine)(PARAMS, None, batch, KEY, None)
    expected = problems.reference(PARAMS, batch)[1]
    chex.assert_trees_all_close(mean_of(sums), expected, rtol=1e-5, atol=1e-6)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype(jnp.float64), PARAMS)
        batch = {k: v.astype(np.float64) for k, v in problems.make_batch().items()}

        def loss_fn(params, batch, rng):
            hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
            error = jnp.square(hidden @ params["down"]["kernel"] - batch["y"]).mean(-1)
            return WeightedLoss((error * batch["mask"]).sum(), batch["mask"].sum())

        policy, optimizer = Policy(jnp.float64, jnp.float64), make_optimizer("sgd", 0.1)
        step = build_train_step(loss_fn, optimizer, accumulate=4, policy=policy)
        state = init_state(lambda rng: params, optimizer, KEY, policy=policy)
        after, metrics = jax.jit(step)(state, batch)
        loss, grads, _ = problems.reference(params, batch)
        applied = jax.tree.map(lambda a, b: (a - b) / 0.1, params, after.params)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-14)
    chex.assert_trees_all_close(applied, grads, rtol=1e-11, atol=1e-14)


def test_each_microbatch_has_randomness_of_its_own():
    def noise(params, batch, rng):
        return params["w"] * jax.random.normal(rng, ()) + 0 * batch.sum()

    engine = accumulated(normalize_loss(noise, False), 4)
    sums = engine({"w": jnp.float32(1.0)}, None, jnp.zeros(8), KEY, None)
    draws = [jax.random.normal(jax.random.fold_in(KEY, j), ()) for j in range(4)]
    assert float(sums.grads["w"]) == pytest.approx(float(sum(draws)), rel=1e-6)


def of_data(x, rng):
    return x * jax.random.key_data(rng)[-1].astype(jnp.float32) * 2.0**-32


USES = {
    "data": of_data,
    "data-drop": lambda x, rng: of_data(drop(x, 0.5, rng), rng),
    "wrap": lambda x, rng: drop(x, 0.5, jax.random.wrap_key_data(jax.random.key_data(rng))),
    "other": lambda x, rng: drop(x, 0.5, jnp.stack([rng, jax.random.key(3)])[0]),
}


@pytest.mark.parametrize("use", USES)
def test_a_loss_that_reads_or_mixes_its_key_has_an_ordinary_one_in_each_microbatch(use):
    def loss_fn(params, batch, rng):
        return WeightedLoss(USES[use](batch * params["w"], rng).sum(), jnp.float32(len(batch)))

    params, batch = {"w": jnp.float32(1.0)}, jnp.arange(1.0, 17.0).reshape(8, 2)
    engine = accumulated(normalize_loss(loss_fn, False), 4)
    sums = jax.jit(engine)(params, None, batch, KEY, None)
    parts = [USES[use](batch[j::4], jax.random.fold_in(KEY, j)).sum() for j in range(4)]
    assert float(sums.grads["w"]) == pytest.approx(float(sum(parts)), rel=1e-5)


def test_scalars_of_a_batch_go_to_every_microbatch():
    def scaled(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        return WeightedLoss(loss.total * batch["factor"], loss.weight)

    batch = problems.make_batch() | {"factor": np.float32(2.0)}
    engine = jax.jit(accumulated(normalize_loss(scaled, False), 4))
    sums = engine(PARAMS, None, batch, KEY, None)
    loss, grads, _ = problems.reference(PARAMS, batch)
    assert float(sums.loss.means()["loss"]) == pytest.approx(2 * loss, rel=2e-6)
    expected = jax.tree.map(lambda g: 2 * g, grads)
    chex.assert_trees_all_close(mean_of(sums), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("accumulate", "extra", "message"),
    [
        (3, {}, r"batch leaf 'mask' has shape \(16,\).*multiple of 3"),
        (
            4,
            {"centers": np.ones((4, 8))},
            r"'centers' has shape \(4, 8\) and 'mask' has 16 rows: with accumulate=4 every leaf",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_by_name(accumulate, extra, message):
    engine = accumulated(LOSS, accumulate)
    with pytest.raises(ValueError, match=message):
        engine(PARAMS, None, problems.make_batch() | extra, KEY, None)
