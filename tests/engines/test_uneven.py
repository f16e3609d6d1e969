"""Microbatches that are dealt by shares: the gradients of the plain step, on any mesh."""

import math

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.compile import compile_step
from jaxtrain.engines.uneven import microbatches_by_share, uneven
from jaxtrain.ops.numerics import drop
from tests import problems

FAST = {"xla_backend_optimization_level": 0}
RULES = [("up/kernel", (None, "tensor")), ("down/kernel", ("tensor", None))]


def trained(engine, mesh, *, accumulate=4, steps=2, policy="f32", loss=problems.loss_fn, **how):
    optimizer = jt.make_optimizer("adamw", 0.01, eps=1e-3)
    init = lambda rng: problems.with_noise(problems.init(rng))  # noqa: E731
    given = {"mesh": mesh, "rules": how.get("rules", ()), "policy": policy}
    state = jt.init_state(init, optimizer, jax.random.key(0), **given)
    step = jt.build_train_step(
        jt.row_wise(loss), optimizer, accumulate=accumulate, engine=engine, policy=policy
    )
    batches = [problems.make_batch(number, rows=64) for number in range(steps)]
    train = compile_step(
        step, state, batches[0], mesh=mesh, rules=how.get("rules", ()), compiler_options=FAST
    )
    for batch in batches:
        state, metrics = train(state, batch)
    return jax.device_get(state), jax.device_get(metrics), train


def agree(found, wanted):
    for part in ("params", "opt_state"):
        problems.assert_agree(
            {part: getattr(found[0], part)}, {part: getattr(wanted[0], part)}, 1e-5
        )
    for name in ("loss", "largest", "weight", "grad_norm"):
        np.testing.assert_allclose(found[1][name], wanted[1][name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("shares", "axes"),
    [
        ((3, 1), {"data": 2, "tensor": 4}),
        pytest.param((1, 2, 4, 1), {"data": 4, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param((3, 1), {"data": 4}, marks=pytest.mark.slow),
        pytest.param((5, 1, 1, 1, 1, 1, 1, 1), {"data": 8}, marks=pytest.mark.slow),
    ],
)
def test_unequal_shares_are_the_plain_step_of_one_device(shares, axes):
    wanted = trained(jt.engines.plain.plain, jt.make_mesh(data=1, devices=jax.devices()[:1]))
    found = trained(
        uneven(shares),
        jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())]),
        rules=RULES,
    )
    agree(found, wanted)
    # Each part has a loop of its own length, by a number that differs among devices.
    assert "partition-id" in found[2].compiled.as_text()


def test_dropout_under_shares_is_that_of_the_plain_step_of_one_device():
    def loss(params, batch, rng):
        return problems.loss_fn(params, batch | {"x": drop(batch["x"], 0.3, rng)}, rng)

    one = jt.make_mesh(data=1, devices=jax.devices()[:1])
    wanted = trained(jt.engines.plain.plain, one, loss=loss)
    mesh = jt.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    agree(trained(uneven((3, 1)), mesh, rules=RULES, loss=loss), wanted)
    dropped = trained(jt.engines.plain.plain, one)[1]["loss"]
    assert abs(dropped / wanted[1]["loss"] - 1) > 1e-3


def test_a_single_device_takes_all_microbatches():
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    plain, _, _ = trained(jt.engines.plain.plain, mesh)
    found, _, _ = trained(uneven((3, 1)), mesh)
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, plain.params))


@pytest.mark.parametrize("total", [5, 8, 64])
def test_shares_are_dealt_whole_and_to_all(total):
    rng = np.random.default_rng(total)
    for _ in range(50):
        shares = rng.exponential(size=rng.integers(1, 6))
        found = microbatches_by_share(shares, total)
        assert sum(found) == total
        assert min(found) >= 1
        ideal = shares / shares.sum() * total
        if ideal.min() >= 1:
            assert abs(found - ideal).max() < max(2, 0.5 * len(shares))


def test_what_cannot_be_is_said():
    mesh = jt.make_mesh(data=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="`row_shares` is 1 2 3 and mesh axis 'data' has size 2"):
        trained(uneven((1, 2, 3)), mesh)
    with pytest.raises(ValueError, match="use bf16"):
        trained(uneven((1, 2)), mesh, policy="fp16")
    with pytest.raises(ValueError, match="the loss draws"):
        trained(uneven((1, 2)), mesh, loss=problems.noisy_loss)
    with pytest.raises(ValueError, match="give numbers above 0"):
        uneven((1, 0))
    with pytest.raises(ValueError, match="give 2 or more"):
        trained(uneven((1, 2)), mesh, accumulate=1)
    config = jt.Config(row_shares=(3, 1), gradients="int8")
    with pytest.raises(ValueError, match="has another engine"):
        config.experiment("x", init_fn=None, loss_fn=None, batch=None, train_batches=None)
