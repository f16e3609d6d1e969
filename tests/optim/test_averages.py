"""The moving average of parameters: by definition, on a mesh, in a run and from its checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.build import compile_eval, compile_train, make_experiment_mesh, make_state
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.tree import named_leaves
from tests import problems
from tests.run.test_loop import ROWS, make_experiment

DECAY = 0.8


def definition(seen):
    """The average of the parameters after each update, in float64."""
    weights = [DECAY**n for n in reversed(range(len(seen)))]
    return {
        name: sum(w * np.float64(p[name]) for w, p in zip(weights, seen, strict=True))
        / sum(weights)
        for name in seen[0]
    }


@pytest.mark.parametrize("calls", [1, 2])
def test_an_update_counts_once_and_one_left_out_does_not(calls):
    tx = jt.make_optimizer("momentum", 0.1, accumulate=calls, ema=DECAY, freeze=("up/bias",))
    tx = optim.skip_spikes(tx, 6.0, window=4)
    state = jt.init_state(problems.init, tx, jax.random.key(0))
    step = jax.jit(jt.build_train_step(problems.loss_fn, tx))
    initial, seen = state.params, []
    for update in range(8):
        for call in range(calls):
            batch = problems.make_batch(update * calls + call)
            last = call == calls - 1
            if update == 1 and last:
                batch["x"][0] = np.nan
            if update == 2 and last:  # adds nothing: with one call that is no update
                batch["mask"][:] = 0
            if update == 6:
                batch["y"] *= 1e4  # a spike
            state, _ = step(state, batch)
        if update not in (1, 6) and (update, calls) != (2, 1):
            seen.append(named_leaves(state.params))
        expected = definition(seen)
        for name, found in named_leaves(jt.averaged(state).params).items():
            np.testing.assert_allclose(found, expected[name], rtol=2e-6, atol=1e-7, err_msg=name)
    assert np.abs(np.subtract(found, named_leaves(state.params)[name])).max() > 1e-3
    np.testing.assert_array_equal(jt.averaged(state).params["up"]["bias"], initial["up"]["bias"])
    assert "up/bias" not in {n.split("ema/")[1] for n in named_leaves(state) if "ema/" in n}


def test_parameters_of_half_precision_have_an_average_of_single():
    tx, w = optim.ema(optax.sgd(1.0), 0.999), jnp.bfloat16(1)
    state = tx.init(w)
    assert state.ema.dtype == jnp.float32
    for gradient in (0.0, -0.0078125):
        updates, state = tx.update(jnp.bfloat16(gradient), state, w)
        w = w + updates
    assert (w.dtype, state.ema.dtype) == (jnp.bfloat16, jnp.float32)
    assert float(state.ema) == pytest.approx(1 + 0.0078125 / 1.999, rel=1e-6)


def test_what_cannot_be_averaged_is_named():
    for decay in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=f"`ema` is {decay:g}; it must be above 0 and below 1"):
            jt.make_optimizer("sgd", 0.1, ema=decay)
    tx = optim.ema(optax.sgd(1.0), DECAY)
    with pytest.raises(ValueError, match="ema averages the parameters: update"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    state = jt.init_state(problems.init, optax.sgd(0.1), jax.random.key(0))
    assert jt.averaged(state).params["up"]["bias"] is state.params["up"]["bias"]


def averaging(**changes):
    tx = jt.make_optimizer("adamw", 0.05, accumulate=2, ema=DECAY)
    return make_experiment(6, optimizer=tx, loss_fn=problems.loss_fn, **changes)


def test_a_mesh_averages_and_evaluates_as_one_device_does():
    rules = [("up/kernel", (None, "tensor")), ("up/bias", ("tensor",)), ("down", ("tensor", None))]
    spread = averaging(mesh={"data": 2, "fsdp": 2, "tensor": 2}, rules=jt.Rules(rules), zero=1)
    held_out, found = problems.make_batch(9), {}
    for name, experiment in (("mesh", spread), ("one", averaging(mesh={"data": 1}))):
        devices = jax.devices() if name == "mesh" else jax.devices()[:1]
        mesh = make_experiment_mesh(experiment, devices)
        state = make_state(experiment, mesh)
        evaluate = compile_eval(experiment, state, held_out, mesh)
        train = compile_train(experiment, state, mesh)
        for number in range(6):
            state, _ = train(state, problems.make_batch(number, 8))
        loss = float(evaluate(state, held_out).means()["loss"])
        params = jax.device_get(jt.averaged(state).params)
        assert loss == pytest.approx(problems.reference(params, held_out)[0], rel=1e-5)
        found[name] = jax.device_get((state.params, state.opt_state))
        if name == "mesh":
            leaves = named_leaves(state).items()
            ema, mu = (
                next(x for n, x in leaves if n.endswith(f"{kind}/up/kernel"))
                for kind in ("ema", "mu")
            )
            # Over tensor by its rule and over data by zero.
            assert ema.sharding == mu.sharding
            assert ema.addressable_shards[0].data.size == ema.size // 4
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        *found.values(),
    )


@pytest.mark.slow
def test_a_run_evaluates_concludes_and_saves_its_average(tmp_path):
    class Killed(jt.Hook):
        def on_step(self, step, state):
            if step == 4:
                raise KeyboardInterrupt

    concluded = []
    experiment = averaging(conclude=lambda state, means: concluded.append(state.params) or [])
    options = jt.RunOptions(run_dir=str(tmp_path / "run"), auto_resume=True, save_every=3)
    whole = jt.fit(experiment, dataclasses.replace(options, run_dir=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        jt.fit(experiment, options, hooks=[Killed()])
    result = jt.fit(experiment, options)
    assert digest(result.state) == digest(whole.state)

    average = jax.device_get(jt.averaged(result.state).params)
    held_out = problems.make_batch(1, ROWS)
    loss = problems.reference(average, held_out)[0]
    assert result.evaluation["loss"] == pytest.approx(loss, rel=1e-5)
    raw = problems.reference(jax.device_get(result.state.params), held_out)[0]
    assert abs(raw - loss) > 1e-3
    assert digest(concluded[-1]) == digest(average)
    shapes = jax.eval_shape(lambda: average)
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        assert digest(checkpoints.restore_params(shapes)) == digest(average)
        raw = checkpoints.restore_part({"params": shapes})["params"]
        assert digest(raw) == digest(result.state.params)
