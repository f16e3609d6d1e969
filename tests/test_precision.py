"""Dtypes, loss scaling, and what no bf16 step may hold."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare import parity as agreement
from jaxtrain.jaxprs import WIDE
from jaxtrain.models import convnet
from jaxtrain.precision import LossScale, PrecisionWarning
from tests import problems, small

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


@functools.cache
def twenty_steps(name, optimizer):
    """The states before and after twenty steps, and their losses."""
    chain = jt.make_optimizer(optimizer, learning_rate=1e-2, clip_norm=1.0, weight_decay=0.01)
    start, step = make(POLICIES[name], chain, accumulate=2)
    batches = [problems.make_batch(seed % 4) for seed in range(20)]
    state, metrics = jax.jit(jt.scan_steps(step))(start, batches)
    return start, state, metrics["loss"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_every_policy_keeps_its_dtypes_and_learns_what_float32_learns(name, optimizer):
    start, state, losses = twenty_steps(name, optimizer)
    kinds, after = (jax.tree.map(lambda x: x.dtype, s) for s in (start, state))
    assert kinds == after
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {POLICIES[name].param_dtype}
    *_, exact = twenty_steps("f32", optimizer)
    assert float(exact[-1]) < 0.9 * float(exact[0])
    assert float(losses[-1]) == pytest.approx(float(exact[-1]), rel=0.05)


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


def plain_loss(params, batch, rng):
    """A loss that casts nothing, as a user writes it."""
    hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
    error = jnp.square(hidden @ params["down"]["kernel"] - batch["y"]).mean(-1)
    return jt.WeightedLoss((error * batch["mask"]).sum(), batch["mask"].sum())


def weighted_batch():
    # No bfloat16 is 257, and none is 0.30000001.
    batch = problems.make_batch()
    return batch | {"mask": np.full(problems.ROWS, 257, np.float32), "y": 0 * batch["y"] + 0.3}


@pytest.mark.parametrize("name", ["bf16", "pure_bf16", "fp16"])
def test_a_policy_casts_the_inputs_it_names_and_no_weight_and_no_target(name):
    policy = getattr(jt.Policy, name)(cast_batch="^x$")
    state = jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0), policy=policy)
    step = jt.build_train_step(plain_loss, optax.sgd(0.1), policy=policy)
    train = jt.compile_step(step, state, weighted_batch())
    assert "ok   0 of 5 products in float32" in train.report()
    exact = jt.build_eval_step(plain_loss)(state, weighted_batch()).means()["loss"]
    loss = jt.build_eval_step(plain_loss, policy=policy)(state, weighted_batch())
    assert float(loss.weight) == 257 * problems.ROWS
    assert float(loss.means()["loss"]) == pytest.approx(float(exact), rel=0.03)
    _, metrics = train(state, weighted_batch())
    assert float(metrics["weight"]) == 257 * problems.ROWS


def test_a_bf16_step_of_float32_products_warns_names_them_and_is_not_ok():
    # Muon's own products are float32 on purpose, and are not counted.
    optimizer = jt.make_optimizer("muon", 1e-2)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), policy="bf16")
    step = jt.build_train_step(plain_loss, optimizer, policy="bf16", accumulate=2)
    wanted = r"5 of 5 products in float32 .* \('mask', 'x', 'y'\) by a regex.* --cast-batch '\^x\$'"
    with pytest.warns(PrecisionWarning, match=wanted):
        compiled = jt.compile_step(step, state, problems.make_batch())
    report = compiled.report()
    assert "no recompilation" in repr(compiled)
    assert "products" not in repr(compiled)  # It names the checks that hold.
    assert "BAD  5 of 5 products in float32" in report
    assert "dot_general float32[8,8] x bfloat16[8,32] at" in report
    assert "test_precision.py" in report
    state, step = make("f32")
    assert "in float32" not in jt.compile_step(step, state, problems.make_batch()).report()
    scoped = jax.named_scope(WIDE)(plain_loss)  # gradients are in it too
    step = jt.build_train_step(scoped, optax.sgd(1e-2), policy="bf16", accumulate=2)
    state = jt.init_state(problems.init, optax.sgd(1e-2), jax.random.key(0), policy="bf16")
    assert "0 of 0 products" in jt.compile_step(step, state, problems.make_batch()).report()
    read = problems.make_batch() | {"y": problems.make_batch()["y"].astype(jnp.float16)}
    state, step = make("f32", accumulate=2)
    assert "in float32" not in jt.compile_step(step, state, read).report()  # it computes in none


def test_the_flag_casts_the_inputs_of_a_run_and_of_both_sides_of_a_comparison():
    config = small.Config(precision="bf16", cast_batch="^x$")
    experiment = small.build(config)
    assert experiment.policy == jt.Policy.bf16(cast_batch="^x$")
    experiment = experiment.with_(loss_fn=plain_loss)
    layouts = ["data=2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        (comparison,) = agreement.compare(experiment, layouts=layouts, steps=1, policy="bf16")
    assert comparison.agrees(2e-2)


def test_a_regex_that_matches_in_other_letters_is_told_so():
    with pytest.raises(
        ValueError, match=r"keep is 'UP': it matches no .* case-sensitive, and \(\?i\)"
    ):
        jt.Policy.bf16(keep="UP").cast_to_compute({"up": jnp.ones(2)})


def test_the_convnet_multiplies_in_bfloat16_behind_its_norms_too():
    config = convnet.ConvNetConfig(channels=(2, 4), hidden=8)
    common = {"policy": "bf16", "has_model_state": True}
    init_fn = functools.partial(convnet.init, config)
    state = jt.init_state(init_fn, optax.sgd(0.1), jax.random.key(0), **common)
    batch = {"image": np.ones((2, 8, 8, 1), np.float32), "label": np.ones(2, int)}
    step = jt.build_train_step(convnet.loss_fn(config), optax.sgd(0.1), **common)
    assert jt.float32_products(step, state, batch | {"mask": np.ones(2, np.float32)}) == []


def test_a_pipeline_casts_the_same_inputs():
    def embed(params, batch, rng):
        return batch["x"] @ params["into"]

    def head_loss(params, x, batch):
        return jt.WeightedLoss((x.mean(-1) * batch["mask"]).sum(), batch["mask"].sum())

    stages = jt.Stages(embed, lambda layer, x, batch, rng: x @ layer["w"], head_loss)
    policy, mesh = jt.Policy.bf16(cast_batch="x"), jt.make_mesh(pipe=2, data=4)
    params = {"into": jnp.ones((problems.INPUTS, 4)), "blocks": {"w": jnp.ones((2, 4, 4))}}
    state = jt.init_state(lambda rng: params, optax.sgd(0.1), jax.random.key(0))
    engine = jt.pipeline(stages, mesh=mesh, microbatches=2, policy=policy)
    step = jt.build_update(engine, optax.sgd(0.1), policy=policy)
    assert jt.float32_products(step, state, problems.make_batch()) == []


@pytest.mark.parametrize("name", ["bf16", "pure_bf16", "fp16"])
def test_parameters_that_are_kept_are_rounded_nowhere(name):
    exact = np.float32(1.0001)  # 1 in bfloat16 and in float16

    def init(rng):
        return {"norm": jnp.full(2, exact), "blocks": {"norm": jnp.full((2, 2), exact)}} | {
            "w": jnp.full(2, exact)
        }

    def head_loss(params, x, batch):
        seen = {"norm": params["norm"].mean(), "w": params["w"].mean(), "x": x.mean()}
        seen = {name: (value.astype(jnp.float32), jnp.float32(1)) for name, value in seen.items()}
        total = x.sum() + (params["norm"] + params["w"]).sum().astype(jnp.float32)
        return jt.WeightedLoss(total, jnp.float32(1), seen)

    stages = jt.Stages(
        embed=lambda params, batch, rng: batch,
        block=lambda layer, x, batch, rng: x * layer["norm"],
        head_loss=head_loss,
    )

    def loss_fn(params, batch, rng):
        x = batch * params["blocks"]["norm"][0] * params["blocks"]["norm"][1]
        return head_loss(params, x, batch)

    policy, batch = getattr(jt.Policy, name)(keep="norm$"), jnp.ones((2, 2))
    state = jt.init_state(init, optax.sgd(0.1), jax.random.key(0), policy=policy)
    assert state.params["blocks"]["norm"].dtype == jnp.float32
    assert state.params["w"].dtype == policy.param_dtype
    engine = jt.pipeline(stages, mesh=jt.make_mesh(pipe=2, data=4), microbatches=1, policy=policy)
    steps = {
        "plain": jt.build_train_step(loss_fn, optax.sgd(0.1), policy=policy),
        "pipelined": jt.build_update(engine, optax.sgd(0.1), policy=policy),
    }
    for way, step in steps.items():
        after, metrics = jax.jit(step)(state, batch)
        assert float(metrics["norm"]) == exact, way
        assert float(metrics["x"]) == pytest.approx(exact**2, rel=1e-7), way
        assert float(metrics["w"]) == 1, way
        assert after.params["norm"].dtype == jnp.float32
    means = jt.build_eval_step(loss_fn, policy=policy)(state, batch).means()
    assert float(means["norm"]) == exact
    assert "'norm$' as it is" in str(policy)


def test_a_parameter_to_keep_that_is_not_there_is_refused():
    policy = jt.Policy.bf16(keep="nrom")
    with pytest.raises(
        ValueError, match=r"keep is 'nrom': it matches no .*\['down/kernel', 'up/bias'"
    ):
        jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0), policy=policy)


def test_a_batch_leaf_that_is_not_there_is_not_cast_in_silence():
    state, _ = make("bf16")
    policy = jt.Policy.bf16(cast_batch="^image$")
    step = jt.build_train_step(plain_loss, optax.sgd(0.1), policy=policy)
    with pytest.raises(
        ValueError, match=r"cast_batch is '\^image\$': it matches no .*'mask', 'x', 'y'"
    ):
        step(state, problems.make_batch())
    with pytest.raises(ValueError, match="precision 'bf17' is not known: use one of f32, bf16"):
        jt.build_eval_step(plain_loss, policy="bf17")


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


@pytest.mark.parametrize(
    ("optimizer", "accumulate"),
    [("adamw", 2), *[pytest.param(*x, marks=pytest.mark.slow) for x in (("lamb", 2), ("lamb", 1))]],
)
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
