"""Skipping spikes, against the definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import jit

import jaxtrain as jt
from jaxtrain.optim import reports, skip_spikes
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from tests import problems


def definition(losses, norms, deviations, window):
    """Which updates are left out, in float64."""
    seen = {"loss": [], "norm": []}
    skipped = []
    for new in zip(losses, norms, strict=True):
        new = dict(zip(("loss", "norm"), new, strict=True))
        if not all(np.isfinite(list(new.values()))):
            skipped.append(True)
            continue
        skip = False
        for name, value in new.items():
            past = np.array(seen[name][-window:])
            if len(seen["loss"]) >= window // 2:
                limit = past.mean() + deviations * past.std()
                skip |= value > limit
                new[name] = min(value, limit)
        for name in seen:
            seen[name].append(new[name])
        skipped.append(bool(skip))
    return skipped


def series(seed, steps):
    r = np.random.default_rng(seed)
    losses = 3 + 0.1 * r.normal(size=steps) - 0.01 * np.arange(steps)
    norms = 1 + 0.05 * np.abs(r.normal(size=steps))
    losses[r.choice(steps, 6, replace=False)] += 2.0
    norms[r.choice(steps, 6, replace=False)] *= 5.0
    losses[steps // 2] = np.nan
    norms[steps // 3] = np.inf
    losses[-steps // 4 :] += 4.0  # a new level, that is accepted in the end
    return losses.astype(np.float32), norms.astype(np.float32)


@pytest.mark.parametrize(("deviations", "window"), [(3.0, 8), (6.0, 16), (1.5, 33)])
def test_the_updates_left_out_are_those_of_the_definition(deviations, window):
    losses, norms = series(window, steps=100)
    tx = skip_spikes(optax.trace(0.9), deviations, window=window)
    update = jit(lambda g, s, loss: tx.update({"w": g}, s, value=loss))
    state = tx.init({"w": jnp.zeros(2)})
    expected = definition(losses.astype(np.float64), norms.astype(np.float64), deviations, window)
    momentum = np.zeros(2)
    for step, (loss, norm, skip) in enumerate(zip(losses, norms, expected, strict=True)):
        gradient = norm * np.array([0.6, -0.8])
        updates, state = update(jnp.asarray(gradient, jnp.float32), state, loss)
        if not skip:
            momentum = 0.9 * momentum + gradient
        wanted = np.zeros(2) if skip else momentum
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-5, err_msg=str(step))
    assert int(state.skipped) == sum(expected)
    assert 8 <= sum(expected) < 60
    # The loss stays on a new level from step 75 on: that is accepted, where spikes are rare.
    if deviations == 6:
        assert expected[75]
        assert not any(expected[-15:])


def test_the_rounding_of_equal_losses_is_no_spike():
    tx = skip_spikes(optax.sgd(1.0), 3.0, window=4)
    update = jit(lambda state, loss: tx.update(jnp.ones(1), state, value=loss)[1])
    state, loss = tx.init(jnp.zeros(1)), np.float32(0.1)
    for value in (*[loss] * 4, np.nextafter(loss, np.float32(1)), np.float32(0.1001)):
        state = update(state, value)
    assert int(state.skipped) == 1  # the last, which is no rounding


def spiky_problem(**options):
    """A step, its state, and batches of which number 70 has targets from another world."""
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, skip_spikes=6.0, **options)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0))

    def batch(step):
        batch = problems.make_batch(step)
        return batch | {"y": batch["y"] * (30 if step == 70 else 1)}

    return optimizer, state, batch


@pytest.mark.parametrize(
    ("accumulate", "microbatches", "policy"),
    [
        (3, 1, jt.Policy.f32()),
        # With a scale so small that the spike itself does not overflow.
        (1, 4, jt.Policy.fp16(loss_scale=16.0)),
    ],
)
def test_a_spike_leaves_no_trace_in_state_or_counters(accumulate, microbatches, policy):
    optimizer, _, batch = spiky_problem(accumulate=accumulate)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0), policy=policy)
    step = jit(
        jt.build_train_step(
            problems.loss_fn, optimizer, policy=policy, accumulate=microbatches, norms=True
        )
    )
    for number in range(72):
        before = state
        state, metrics = step(state, batch(number))
        spike = number == 70
        assert int(metrics["spike"]) == spike, number
        if number < 68:
            continue
        parts = [(s.params, s.opt_state.inner_state) for s in (before, state)]
        leaves = zip(*map(jax.tree.leaves, parts), strict=True)
        assert all((a == b).all() for a, b in leaves) == spike, number
        if spike:
            # The norm before clipping is what is judged, and reported.
            assert float(metrics["grad_norm"]) > 10
            assert float(metrics["update_norm"]) == 0
    assert int(reports(state.opt_state)["spike"]) == 1


def test_the_window_is_in_the_checkpoint(tmp_path):
    optimizer, state, batch = spiky_problem()
    step = jit(jt.build_train_step(problems.loss_fn, optimizer))
    for number in range(70):
        state, _ = step(state, batch(number))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(70, state)
        restored = checkpoints.restore(jax.eval_shape(lambda: state))
    assert digest(restored) == digest(state)
    _, metrics = step(restored, batch(70))
    assert int(metrics["spike"]) == 1


def test_frozen_parameters_count_in_no_norm():
    tx = jt.make_optimizer("sgd", 1.0, skip_spikes=3.0, freeze=(r"^b$",))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state, update = tx.init(params), jit(tx.update)
    for number in range(80):
        grads = {"a": jnp.full(2, 1 + 0.01 * (number % 5)), "b": jnp.full(2, 10.0**number % 7e30)}
        updates, state = update(grads, state, params, value=1.0 + 0.01 * (number % 3))
        assert float(updates["a"][0]) != 0, number


def test_a_loss_is_needed_and_the_number_is_checked():
    tx = jt.make_optimizer("sgd", 1.0, skip_spikes=3.0)
    params = {"w": jnp.ones(1)}
    with pytest.raises(ValueError, match="`skip_spikes` needs a loss"):
        tx.update(params, tx.init(params), params)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="`skip_spikes` is"):
            jt.make_optimizer("sgd", 1.0, skip_spikes=bad)
