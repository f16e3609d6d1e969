"""Dtypes, loss scaling, and what no bf16 step may hold."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.precision import LossScale
from tests import problems

POLICIES = {
    "f32": jt.Policy.f32(),
    "bf16": jt.Policy.bf16(),
    "pure_bf16": jt.Policy.pure_bf16(),
    "fp16": jt.Policy.fp16(),
}


def make(policy, optimizer=None, **options):
    optimizer = optimizer or jt.make_optimizer("adamw", learning_rate=1e-2)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), policy=policy)
    return state, jt.build_train_step(problems.loss_fn, optimizer, policy=policy, **options)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_every_policy_keeps_its_dtypes_and_learns_what_float32_learns(name, optimizer):
    chain = jt.make_optimizer(optimizer, learning_rate=1e-2, clip_norm=1.0, weight_decay=0.01)
    policy = POLICIES[name]
    state, step = make(policy, chain, accumulate=2)
    kinds = jax.tree.map(lambda x: x.dtype, state)
    step = jax.jit(step)
    start = state
    for seed in range(20):
        state, metrics = step(state, problems.make_batch(seed % 4))
    assert jax.tree.map(lambda x: x.dtype, state) == kinds
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {policy.param_dtype}
    exact, exact_step = make(jt.Policy.f32(), chain, accumulate=2)
    exact_step = jax.jit(exact_step)
    for seed in range(20):
        exact, exact_metrics = exact_step(exact, problems.make_batch(seed % 4))
    drop = float(exact_step(start_as(exact, start), problems.make_batch(0))[1]["loss"])
    assert float(exact_metrics["loss"]) < 0.9 * drop
    assert float(metrics["loss"]) == pytest.approx(float(exact_metrics["loss"]), rel=0.05)


def start_as(like, state):
    """``like`` with the parameters of ``state``, in float32."""
    import dataclasses

    return dataclasses.replace(
        like, params=jax.tree.map(lambda x: x.astype(jnp.float32), state.params)
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_float32_product_hides_in_a_bf16_step(accumulate):
    state, step = make(jt.Policy.bf16(), accumulate=accumulate)
    assert jt.float32_products(step, state, problems.make_batch()) == []


def test_a_float32_product_is_found_and_named():
    def careless(params, batch, rng):
        kernel = params["up"]["kernel"].astype(jnp.float32)
        return jnp.tanh(batch["x"] @ kernel).sum()

    state, _ = make(jt.Policy.bf16())
    step = jt.build_train_step(careless, optax.adam(1e-2), policy=jt.Policy.bf16(), accumulate=2)
    state = jt.init_state(problems.init, optax.adam(1e-2), jax.random.key(0))
    lines = jt.float32_products(step, state, problems.make_batch())
    assert len(lines) == 2  # forward, and the gradient of the kernel
    assert "dot_general float32[8,8] x float32[8,32]" in lines[0]
    assert "test_precision.py" in lines[0]


def test_loss_scale_grows_backs_off_and_stays_within_bounds():
    scale = LossScale(jnp.float32(8.0), jnp.int32(0), growth_interval=3, largest=32.0)
    seen = []
    for overflow in [False, False, False, True, False, False, False, False, False, False, False]:
        scale = scale.updated(jnp.bool_(overflow))
        seen.append((float(scale.scale), int(scale.good_steps)))
    assert seen == [
        *[(8, 1), (8, 2), (16, 0)],
        (8, 0),
        *[(8, 1), (8, 2), (16, 0), (16, 1), (16, 2), (32, 0), (32, 1)],
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_fp16_overflow_skips_backs_off_and_recovers(accumulate, optimizer):
    policy = jt.Policy.fp16(loss_scale=2.0**30, growth_interval=4)
    chain = jt.make_optimizer(optimizer, learning_rate=1e-2, clip_norm=1.0)
    state, step = make(policy, chain, accumulate=accumulate)
    step = jax.jit(step)
    scales, skipped = [], []
    first = state.params
    for count in range(40):
        state, metrics = step(state, problems.make_batch(count % 4))
        scales.append(float(metrics["loss_scale"]))
        skipped.append(int(metrics["skipped"]))
        if not any(s < accumulate for s in skipped):
            jax.tree.map(np.testing.assert_array_equal, state.params, first)
    assert skipped[0] == accumulate
    assert skipped.count(0) > 20
    for before, after, lost in zip(scales, scales[1:], skipped, strict=False):
        if lost:
            assert after == min(before, 2.0**24 * 2) / 2
        else:
            assert after in (before, 2 * before)
    assert any(b == 2 * a for a, b in itertools.pairwise(scales))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_the_gradient_does_not_overflow_with_the_number_of_tokens():
    """A sum over many tokens leaves float16's range where their mean does not."""
    optimizer = optax.sgd(1e-2)
    policy = jt.Policy.fp16(loss_scale=1.0)

    def loss(params, batch, rng):
        y = params["w"] * batch.astype(jnp.float16)
        return jt.WeightedLoss(y.astype(jnp.float32).sum() * 60000, jnp.float32(60000.0 * 64))

    state = jt.init_state(
        lambda rng: {"w": jnp.ones(())}, optimizer, jax.random.key(0), policy=policy
    )
    _, metrics = jt.build_train_step(loss, optimizer, policy=policy)(state, jnp.ones(64))
    assert int(metrics["skipped"]) == 0
    assert float(metrics["grad_norm"]) == pytest.approx(1.0, rel=1e-2)


def test_a_state_without_the_loss_scale_is_refused():
    state, _ = make(jt.Policy.f32())
    _, step = make(jt.Policy.fp16())
    with pytest.raises(ValueError, match="the state has no loss scale and the step's policy wants"):
        step(state, problems.make_batch())


def test_masks_and_statistics_are_not_cast():
    seen = {}

    def loss(params, model_state, batch, rng):
        seen.update(mask=batch["mask"].dtype, state=model_state.dtype, w=params["w"].dtype)
        return params["w"].astype(jnp.float32), model_state

    policy = jt.Policy.bf16()
    state = jt.init_state(
        lambda rng: ({"w": jnp.ones(())}, jnp.ones(())),
        optax.sgd(0.1),
        jax.random.key(0),
        policy=policy,
        has_model_state=True,
    )
    step = jt.build_train_step(loss, optax.sgd(0.1), policy=policy, has_model_state=True)
    step(state, problems.make_batch())
    assert seen == {"mask": jnp.float32, "state": jnp.float32, "w": jnp.bfloat16}
