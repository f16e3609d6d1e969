"""Cached gradients: the whole batch's, in any number of microbatches of its encoders."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.compile import compile_step
from jaxtrain.engines.cached import cached, of_embeddings
from jaxtrain.engines.private import private
from jaxtrain.loss import WeightedLoss
from jaxtrain.ops import contrastive
from jaxtrain.ops.numerics import drop
from tests import problems

ROWS, WIDTH = 32, 8
FAST = {"xla_backend_optimization_level": 0}


def init(rng):
    one, two, three = jax.random.split(rng, 3)
    params = {"a": problems.init(one), "b": problems.init(two), "scale": jnp.ones(1)}
    params["steps"] = jnp.arange(3)  # integers do not train
    return params | {"out": 0.3 * jax.random.normal(three, (problems.OUTPUTS, WIDTH))}


def encode(params, batch, rng):
    def tower(own, x):
        x = drop(x.astype(params["out"].dtype), 0.2, rng)
        y = jnp.tanh(x @ own["up"]["kernel"] + own["up"]["bias"]) @ own["down"]["kernel"]
        y = (y @ params["out"]).astype(jnp.float32)
        return y / jnp.linalg.norm(y, axis=1, keepdims=True)

    return {name: tower(params[name], batch[name]) for name in "ab"}


def loss(params, found, batch):
    scale = jnp.exp(params["scale"])
    own = {"numbers_B": batch["number"]}
    total, hits, _ = contrastive.info_nce(found["a"], found["b"], scale, batch["mask"], **own)
    return WeightedLoss(total, batch["mask"].sum(), {"right": hits})


LOSS = of_embeddings(encode, loss)


def make_batch(seed=0):
    r = np.random.default_rng(seed)
    x = {name: r.normal(size=(ROWS, problems.INPUTS)).astype(np.float32) for name in "ab"}
    mask = (r.random(ROWS) < 0.8).astype(np.float32)
    return x | {"mask": mask, "number": r.integers(0, 12, ROWS).astype(np.int32)}


def trained(accumulate, axes=None, *, policy="f32", engine=cached, steps=2, **how):
    axes = axes or {"data": 1}
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    rules = [("up/kernel", ("fsdp", "tensor")), ("down/kernel", ("tensor", "fsdp"))]
    optimizer = jt.make_optimizer("adamw", 0.01, eps=1e-3, **how)
    given = {"mesh": mesh, "rules": rules, "policy": policy}
    state = jt.init_state(init, optimizer, jax.random.key(0), **given)
    how = {"policy": policy, "accumulate": accumulate, "engine": engine}
    step = jt.build_train_step(LOSS, optimizer, **how)
    batches = [make_batch(number) for number in range(steps)]
    how = {"mesh": mesh, "rules": rules, "compiler_options": FAST}
    train = compile_step(step, state, batches[0], **how)
    for batch in batches:
        state, metrics = train(state, batch)
    return jax.device_get(state), jax.device_get(metrics)


def agree(found, wanted, tolerance):
    for part in ("params", "opt_state"):
        problems.assert_agree(
            {part: getattr(found[0], part)}, {part: getattr(wanted[0], part)}, tolerance
        )
    for name in ("loss", "right", "weight", "grad_norm"):
        np.testing.assert_allclose(found[1][name], wanted[1][name], rtol=tolerance, err_msg=name)


def gradients(accumulate, policy="f32"):
    how = {"policy": policy, "accumulate": accumulate, "engine": cached}
    step = jt.step.build_engine(LOSS, has_model_state=False, gather=None, **how)
    params = init(jax.random.key(0))
    return jax.jit(step)(params, None, make_batch(), jax.random.key(1), None)


def test_gradients_are_those_of_the_whole_batch():
    """To 1e-6, dropout too; of plain accumulation they are another loss's."""
    whole, parts = gradients(1), gradients(4)
    assert parts.microbatches == 4
    for (path, found), wanted in zip(
        jax.tree_util.tree_leaves_with_path(parts.grads), jax.tree.leaves(whole.grads), strict=True
    ):
        assert np.abs(wanted).max() > 1e-4, path
        np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max(), err_msg=path)
    np.testing.assert_allclose(parts.loss.total, whole.loss.total, rtol=1e-6)


def test_steps_on_a_mesh_are_those_of_one_device():
    agree(trained(4, {"data": 2, "fsdp": 2, "tensor": 2}), trained(1), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"fsdp": 4, "tensor": 2}, {"data": 4, "fsdp": 2}])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_steps_on_every_mesh_are_those_of_one_device(axes, accumulate):
    agree(trained(accumulate, axes), trained(1), 1e-5)


@pytest.mark.slow
def test_sums_of_microbatches_are_float32():
    """In bfloat16 the gradients are no further from those in float32 than the whole batch's."""
    exact, whole, parts = gradients(1), gradients(1, "bf16"), gradients(16, "bf16")
    far = lambda x: float(jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(square, x, exact.grads)))))  # noqa: E731
    square = lambda x, y: jnp.square(x - y).sum()  # noqa: E731
    assert far(parts.grads) < 1.05 * far(whole.grads)


def test_frozen_parameters_cost_no_gradient():
    def products(**how):
        optimizer = jt.make_optimizer("sgd", 0.01, **how)
        state = jt.init_state(init, optimizer, jax.random.key(0))
        step = jt.build_train_step(LOSS, optimizer, accumulate=4, engine=cached)
        dots = str(jax.make_jaxpr(step)(state, make_batch())).count("dot_general")
        return dots, state.params, jax.jit(step)(state, make_batch())[0].params

    all_dots, *_ = products()
    dots, before, params = products(freeze=["^a/"])
    assert dots < all_dots - 3
    assert np.array_equal(params["a"]["up"]["kernel"], before["a"]["up"]["kernel"])
    assert not np.array_equal(params["b"]["up"]["kernel"], before["b"]["up"]["kernel"])


@pytest.mark.slow
def test_embeddings_alone_are_kept():
    """With more microbatches the temporaries of wide encoders fall."""

    def wide(params, batch, rng):
        return {name: jnp.tanh(batch[name] @ params["w"]) @ params["w"].T for name in "ab"}

    def temporaries(accumulate):
        optimizer = jt.make_optimizer("sgd", 0.01)
        make = lambda rng: {"w": jax.random.normal(rng, (8, 4096)), "scale": jnp.ones(1)}  # noqa: E731
        state = jt.init_state(make, optimizer, jax.random.key(0))
        step = jt.build_train_step(
            of_embeddings(wide, loss), optimizer, accumulate=accumulate, engine=cached
        )
        compiled = jax.jit(step).lower(state, make_batch()).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(8) < 0.5 * temporaries(1)


def test_what_would_be_another_loss_is_refused():
    build = jt.build_train_step
    optimizer = jt.make_optimizer("sgd", 0.01)
    with pytest.raises(ValueError, match="`accumulate` is 2 and the loss is one of all pairs"):
        build(LOSS, optimizer, accumulate=2)
    with pytest.raises(ValueError, match="takes each row by itself, and the loss"):
        build(LOSS, optimizer, engine=private(1.0, 0.0, 8.0))
    with pytest.raises(ValueError, match="which the loss does not say how to"):
        build(problems.loss_fn, optimizer, accumulate=2, engine=cached)
