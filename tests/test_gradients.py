"""Gradient engines against the definition, in NumPy float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import gradients
from jaxtrain.step import normalize_loss
from tests import problems

LOSS = normalize_loss(problems.loss_fn, has_model_state=False)
PARAMS = problems.init(jax.random.key(0))
KEY = jax.random.key(1)


def mean_of(sums: gradients.GradientSums):
    return jax.tree.map(lambda g: g / sums.loss.weight, sums.grads)


def engine_for(microbatches: int):
    if microbatches == 1:
        return jax.jit(gradients.plain(LOSS))
    return jax.jit(gradients.accumulated(LOSS, microbatches))


ENGINES = {k: engine_for(k) for k in (1, 2, 4, 8)}


@settings(max_examples=25, deadline=None)
@given(
    microbatches=st.sampled_from(sorted(ENGINES)),
    seed=st.integers(0, 10_000),
    keep=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
)
def test_any_number_of_microbatches_gives_the_gradient_of_the_definition(microbatches, seed, keep):
    batch = problems.make_batch(seed, keep=keep)
    loss, grads, weight = problems.reference(PARAMS, batch)
    sums = ENGINES[microbatches](PARAMS, None, batch, KEY, None)
    assert float(sums.loss.weight) == weight
    assert float(sums.loss.means()["loss"]) == pytest.approx(loss, rel=2e-6)
    chex.assert_trees_all_close(mean_of(sums), grads, rtol=1e-5, atol=1e-6)
    assert int(sums.skipped) == 0


@settings(max_examples=15, deadline=None)
@given(
    microbatches=st.sampled_from([1, 2, 4, 8]),
    bad=st.integers(0, problems.ROWS - 1),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    where=st.sampled_from(["x", "y"]),
)
def test_a_microbatch_that_is_not_finite_is_counted_and_leaves_no_trace(
    microbatches, bad, value, where
):
    batch = problems.make_batch(bad, keep=1.0)
    batch[where][bad] = value
    rest = {k: v.copy() for k, v in problems.make_batch(bad, keep=1.0).items()}
    rest["mask"][bad % microbatches :: microbatches] = 0.0
    sums = ENGINES[microbatches](PARAMS, None, batch, KEY, None)
    # tanh(inf) is finite, and so is its gradient times zero only where nothing multiplies infinity.
    assert int(sums.skipped) == 1
    assert float(sums.loss.weight) == rest["mask"].sum()
    chex.assert_tree_all_finite(sums.grads)
    if rest["mask"].sum():
        _, grads, _ = problems.reference(PARAMS, rest)
        chex.assert_trees_all_close(mean_of(sums), grads, rtol=1e-5, atol=1e-6)
    else:
        chex.assert_trees_all_equal(sums.grads, jax.tree.map(jnp.zeros_like, sums.grads))


def test_a_batch_with_nothing_that_counts_has_zero_gradients_and_weight():
    batch = problems.make_batch()
    batch["mask"][:] = 0.0
    sums = ENGINES[4](PARAMS, None, batch, KEY, None)
    assert float(sums.loss.weight) == 0.0
    chex.assert_trees_all_equal(sums.grads, jax.tree.map(jnp.zeros_like, sums.grads))


@pytest.mark.parametrize("scale", [2.0**-3, 2.0**15])
def test_loss_scale_cancels(scale):
    batch = problems.make_batch()
    plain = ENGINES[4](PARAMS, None, batch, KEY, None)
    scaled = ENGINES[4](PARAMS, None, batch, KEY, jnp.float32(scale))
    chex.assert_trees_all_close(plain, scaled, rtol=1e-6)


def test_metrics_are_weighted_by_the_loss_or_by_their_own_weight():
    batch = problems.make_batch()
    means = ENGINES[4](PARAMS, None, batch, KEY, None).loss.means()
    whole = problems.loss_fn(PARAMS, batch, None)
    assert float(means["largest"]) == pytest.approx(
        float(whole.metrics["largest"] / whole.weight), rel=1e-6
    )
    assert float(means["half"]) == pytest.approx(float(whole.weight) / 2 / 4)


def test_model_state_goes_from_microbatch_to_microbatch_and_skips_the_bad_one():
    def counting(params, seen, batch, rng):
        return problems.loss_fn(params, batch, rng), seen + batch["mask"].sum()

    engine = jax.jit(gradients.accumulated(normalize_loss(counting, True), 4))
    batch = problems.make_batch(keep=1.0)
    good = engine(PARAMS, jnp.float32(1.0), batch, KEY, None)
    assert float(good.model_state) == 1.0 + problems.ROWS
    batch["y"][2] = np.nan
    bad = engine(PARAMS, jnp.float32(1.0), batch, KEY, None)
    assert float(bad.model_state) == 1.0 + problems.ROWS * 3 / 4


def test_each_microbatch_has_randomness_of_its_own():
    def noise(params, batch, rng):
        return params["w"] * jax.random.normal(rng, ()) + 0 * batch.sum()

    engine = gradients.accumulated(normalize_loss(noise, False), 4)
    sums = engine({"w": jnp.float32(1.0)}, None, jnp.zeros(8), KEY, None)
    draws = [jax.random.normal(jax.random.fold_in(KEY, j), ()) for j in range(4)]
    assert float(sums.grads["w"]) == pytest.approx(float(sum(draws)), rel=1e-6)


def test_a_batch_that_cannot_be_cut_is_refused_by_name():
    engine = gradients.accumulated(LOSS, 3)
    with pytest.raises(ValueError, match=r"batch leaf 'mask' has shape \(16,\).*multiple of 3"):
        engine(PARAMS, None, problems.make_batch(), KEY, None)
