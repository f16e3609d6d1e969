"""Accumulation across calls equals the one weighted big batch, and survives what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import jit

from jaxtrain.optim import accumulate, make_optimizer
from jaxtrain.optim.accumulation import updates_in
from jaxtrain.tree import named_leaves

PARAMS = {"a": {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]])}, "b": jnp.array([0.3, -0.7])}


def gradients(seed, calls, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), dtype), PARAMS)
        for _ in range(calls)
    ]


def weighted_mean(grads, weights):
    """The definition, in float64."""
    total = sum(weights)
    return jax.tree.map(
        lambda *gs: np.float32(
            sum(w * np.asarray(g, np.float64) for w, g in zip(weights, gs, strict=True)) / total
        ),
        *grads,
    )


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


CHAINS = {
    every: (
        make_optimizer("adamw", 0.1, weight_decay=0.1, clip_norm=0.5, accumulate=every),
        make_optimizer("adamw", 0.1, weight_decay=0.1, clip_norm=0.5),
    )
    for every in (1, 2, 3, 4)
}
UPDATES = {every: (jit(a.update), jit(b.update)) for every, (a, b) in CHAINS.items()}


@given(
    every=st.integers(1, 4),
    seed=st.integers(0, 1000),
    weights=st.lists(st.integers(-20, 50), min_size=8, max_size=8),
)
@settings(max_examples=15, deadline=None)
def test_ragged_calls_equal_the_big_batch(every, seed, weights):
    accumulating, plain = (tx.init(PARAMS) for tx in CHAINS[every])
    update, plain_update = UPDATES[every]
    params = expected = PARAMS
    for start in (0, every):  # two updates: the sums must start afresh
        grads, ws = gradients(seed + start, every), weights[start : start + every]
        if not sum(ws):
            ws[0] += 1
        for i, (g, w) in enumerate(zip(grads, ws, strict=True)):
            updates, accumulating = update(g, accumulating, params, weight=w)
            if i < every - 1:
                assert all(not u.any() for u in jax.tree.leaves(updates))
        wanted, plain = plain_update(weighted_mean(grads, ws), plain, expected)
        assert_close(updates, wanted, rtol=2e-4, atol=1e-5)
        params, expected = (
            optax.apply_updates(p, u) for p, u in ((params, updates), (expected, wanted))
        )
        assert_close(params, expected, rtol=1e-4, atol=1e-5)
        inner = accumulating if every == 1 else accumulating.inner_opt_state
        assert_close(inner, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bad", ["gradient", "weight"])
def test_a_microbatch_that_is_not_finite_leaves_its_update_out_and_no_trace(bad):
    tx = accumulate(optax.adam(0.1), every=2)
    update = jit(tx.update)
    first, second = gradients(0, 2)
    poison, weight = first, jnp.float32(jnp.nan)
    if bad == "gradient":
        poison, weight = jax.tree.map(lambda g: g.at[0].set(jnp.inf), first), jnp.float32(2)
    clean = dirty = tx.init(PARAMS)
    for call in [(first, jnp.float32(3)), (poison, weight)], [(poison, weight), (second, 3.0)]:
        for g, w in call:
            updates, dirty = update(g, dirty, PARAMS, weight=w)
            assert all(not u.any() for u in jax.tree.leaves(updates))
    assert int(dirty.skip_state) == 4
    for g in (first, second):
        wanted, clean = update(g, clean, PARAMS, weight=jnp.float32(3))
        updates, dirty = update(g, dirty, PARAMS, weight=jnp.float32(3))
        assert_close(updates, wanted, rtol=0)
    assert all(u.all() for u in jax.tree.leaves(updates))
    assert_close(dirty._replace(skip_state=0), clean._replace(skip_state=0), rtol=0)
    assert int(dirty.gradient_step) == 1


def test_weight_zero_adds_nothing_even_when_its_mean_is_nan():
    tx = accumulate(optax.sgd(1.0), every=2)
    (g,) = gradients(0, 1)
    nan = jax.tree.map(lambda x: x * jnp.nan, g)
    state = tx.init(PARAMS)
    _, state = tx.update(nan, state, PARAMS, weight=0)
    updates, state = tx.update(g, state, PARAMS, weight=7)
    assert_close(updates, jax.tree.map(lambda x: -x, g), rtol=1e-6)
    assert int(state.skip_state) == 0


def test_weights_that_sum_to_zero_make_no_update():
    tx = accumulate(optax.adam(1.0), every=2)
    start = state = tx.init(PARAMS)
    for g in gradients(0, 2):
        updates, state = tx.update(g, state, PARAMS, weight=0.0)
        assert all(not u.any() for u in jax.tree.leaves(updates))
    assert_close(state.inner_opt_state, start.inner_opt_state, rtol=0)
    assert int(state.mini_step) == 0


def test_bfloat16_gradients_are_summed_in_float32():
    params = jnp.zeros(1, jnp.bfloat16)
    tx = accumulate(optax.identity(), every=4)
    state = tx.init(params)
    # In bfloat16, 256 + 1 is 256: the three small gradients would vanish.
    for value in (256.0, 1.0, 1.0, 2.0):
        updates, state = tx.update(jnp.full(1, value, jnp.bfloat16), state, params)
    assert state.acc_grads[0].dtype == jnp.float32
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(updates), [65.0])


def test_the_rule_is_run_once_per_update_only():
    calls = []

    def count(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    tx = accumulate(optax.GradientTransformation(optax.init_empty_state, count), every=3)
    state, update = tx.init(PARAMS), jit(tx.update)
    for g in gradients(0, 6):
        _, state = update(g, state, PARAMS)
    jax.effects_barrier()
    assert len(calls) == 2


def test_state_paths_end_in_the_parameter_path():
    state = CHAINS[2][0].init(PARAMS)
    arrays = {path for path, leaf in named_leaves(state).items() if leaf.ndim}
    assert arrays
    assert all(path.endswith(("/a/w", "/b")) for path in arrays)


def test_every_is_a_number_of_calls():
    with pytest.raises(ValueError, match="`every` is 0; it must be at least 1"):
        accumulate(optax.sgd(0.1), every=0)


def test_extra_arguments_reach_the_rule():
    def use_value(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u * value, updates), state

    tx = accumulate(
        optax.GradientTransformationExtraArgs(optax.init_empty_state, use_value), every=2
    )
    (g,) = gradients(0, 1)
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(g, state, PARAMS, value=jnp.float32(3))
    assert_close(updates, jax.tree.map(lambda x: 3 * x, g), rtol=1e-6)


def test_vmap_skips_in_one_lane_alone():
    tx = accumulate(optax.adam(0.1), every=2)
    first, second = gradients(0, 2)
    poisoned = jax.tree.map(lambda g: g * jnp.nan, first)
    lanes = jax.tree.map(lambda *gs: jnp.stack(gs), first, poisoned)

    def two_calls(g):
        state = tx.init(PARAMS)
        _, state = tx.update(g, state, PARAMS, weight=3)
        return tx.update(second, state, PARAMS, weight=1)

    both = jit(jax.vmap(two_calls))(lanes)
    for lane, g in enumerate((first, poisoned)):
        alone = jit(two_calls)(g)
        assert_close(jax.tree.map(lambda x, lane=lane: x[lane], both), alone, rtol=1e-6)
    assert both[1].skip_state.tolist() == [0, 2]
    assert both[1].gradient_step.tolist() == [1, 0]


def test_scan_vmap_and_grad_go_through():
    def final_loss(rate, grads, weights):
        tx = make_optimizer("adam", rate, clip_norm=1.0, accumulate=2)

        def step(carry, batch):
            params, state = carry
            grad, weight = batch
            # Gradients that depend on the parameters, and so on the rate.
            grad = jax.tree.map(lambda g, p: g + 0.1 * p, grad, params)
            updates, state = tx.update(grad, state, params, weight=weight)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), (grads, weights))
        return sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

    stacked = jax.tree.map(lambda *gs: jnp.stack(gs), *gradients(3, 6))
    # The third call has no sum of weights yet. Under vmap both branches of a cond run: the division
    # by 0 in the one not taken must not reach the slopes.
    weights = jnp.array([2.0, 5.0, 0.0, 1.0, 3.0, 1.0])
    rates, h = np.array([0.05, 0.1]), 1e-2
    lanes = jnp.asarray(np.concatenate([rates, rates - h, rates + h]), jnp.float32)

    def mapped(lanes):
        losses = jax.vmap(final_loss, in_axes=(0, None, 0))(
            lanes, stacked, jnp.tile(weights, (6, 1))
        )
        return losses.sum(), losses

    slopes, losses = jit(jax.grad(mapped, has_aux=True))(lanes)
    np.testing.assert_allclose(slopes[:2], (losses[4:] - losses[2:4]) / (2 * h), rtol=1e-2)
    np.testing.assert_allclose(jit(final_loss)(0.1, stacked, weights), losses[1], rtol=1e-6)


def test_a_ramp_makes_updates_of_growing_batches():
    """Of 1, 1, 2, 2, then 3 calls; one of the calls is not finite, and its update is made again."""
    ramp = [(1, 2), (2, 2)]
    tx = make_optimizer("adamw", 0.1, clip_norm=0.5, accumulate=3, accumulate_ramp=ramp)
    plain = make_optimizer("adamw", 0.1, clip_norm=0.5)
    grads, weights = gradients(0, 14), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    grads[4] = jax.tree.map(lambda g: g * np.nan, grads[4])
    state, plain_state = tx.init(PARAMS), plain.init(PARAMS)
    update, plain_update = jit(tx.update), jit(plain.update)
    ends = {0: [0], 1: [1], 3: [2, 3], 7: [6, 7], 10: [8, 9, 10], 13: [11, 12, 13]}
    for i, (g, weight) in enumerate(zip(grads, weights, strict=True)):
        updates, state = update(g, state, PARAMS, weight=weight)
        calls = ends.get(i)
        if calls is None:
            assert not any(u.any() for u in jax.tree.leaves(updates))
            continue
        mean = weighted_mean([grads[j] for j in calls], [weights[j] for j in calls])
        wanted, plain_state = plain_update(mean, plain_state, PARAMS)
        assert_close(updates, wanted, rtol=1e-4, atol=1e-6)
    assert (int(state.gradient_step), int(state.skip_state)) == (len(ends), 2)
    assert updates_in(12, 3, ramp) == (6, 0)
    assert [updates_in(calls, 3, ramp)[0] for calls in (1, 3, 5, 6, 8)] == [1, 2, 3, 4, 4]


def test_multi_steps_of_optax_equals_ours_for_equal_weights_alone():
    inside = make_optimizer("momentum", 0.1, weight_decay=0.1, clip_norm=0.5, ema=0.9)
    theirs = optax.MultiSteps(inside, every_k_schedule=3).gradient_transformation()
    ours = make_optimizer("momentum", 0.1, weight_decay=0.1, clip_norm=0.5, ema=0.9, accumulate=3)

    @jit
    def last(grads, weights):
        found, states = [], [tx.init(PARAMS) for tx in (ours, theirs)]
        for i in range(3):
            g = jax.tree.map(lambda x, i=i: x[i], grads)
            a, states[0] = ours.update(g, states[0], PARAMS, weight=weights[i])
            b, states[1] = theirs.update(g, states[1], PARAMS)
            found = [a, b]
        return found

    grads = jax.tree.map(lambda *x: jnp.stack(x), *gradients(0, 3))
    assert_close(*last(grads, jnp.ones(3)), rtol=1e-5, atol=1e-7)
    exact, equal = last(grads, jnp.array([5.0, 1.0, 1.0]))
    assert jnp.abs(exact["b"] - equal["b"]).max() > 1e-2
    grads["b"] = grads["b"].at[1].set(jnp.nan)
    held, poisoned = last(grads, jnp.ones(3))
    assert not any(x.any() for x in jax.tree.leaves(held))
    assert jnp.isnan(poisoned["b"]).all()
