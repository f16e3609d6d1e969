"""Checkpoints of a run with frozen weights hold their checksums in place of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.build import make_abstract_state, make_experiment_mesh, restore_state
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.survive.preemption import Preempted
from tests.problems import INPUTS, OUTPUTS
from tests.run.survive.test_preemption import signalled
from tests.run.test_loop import losses

HIDDEN = 4096
BASE_BYTES = INPUTS * HIDDEN * 4


def init(rng):
    return {
        "up": {"kernel": jnp.zeros((INPUTS, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": 0.02 * jax.random.normal(rng, (HIDDEN, OUTPUTS))},
    }


def base(seed=0):
    kernel = np.random.default_rng(seed).normal(size=(INPUTS, HIDDEN))
    return {"up": {"kernel": kernel.astype(np.float32)}}


def tuning(at=0, seed=0, **changes):
    """Fine-tuning of all but the first kernel, which comes from a file; a signal after ``at``."""
    changes = {
        "init_fn": init,
        "params": lambda: base(seed),
        "optimizer": jt.make_optimizer("adamw", 1e-2, freeze=("^up/",)),
        "eval_batches": None,
        "steps": 6,
        **changes,
    }
    return signalled(at, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was stopped after four steps, whose checkpoint is without the base."""
    folder = tmp_path_factory.mktemp("tuning") / "run"
    with pytest.raises(Preempted):
        jt.fit(tuning(at=4), jt.RunOptions(run_dir=str(folder), save_frozen=False, log_every=1))
    return folder


def test_a_stopped_run_goes_on_bit_for_bit_and_its_base_is_not_written(run, tmp_path):
    with Checkpointer(run / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4]
        _, without = checkpoints.written()
    options = jt.RunOptions(run_dir=str(tmp_path / "whole"), log_every=1)
    whole = jt.fit(tuning(), options)
    np.testing.assert_array_equal(whole.state.params["up"]["kernel"], base()["up"]["kernel"])
    _, everything = Checkpointer(tmp_path / "whole" / "checkpoints").written()
    # Random numbers of float32 are compressed by a tenth.
    assert everything - without > 0.85 * BASE_BYTES
    options = jt.RunOptions(run_dir=str(run), save_frozen=False, log_every=1, resume=True)
    resumed = jt.fit(tuning(), options)
    assert digest(resumed.state) == digest(whole.state)
    assert losses(run) == losses(tmp_path / "whole")
    with Checkpointer(run / "checkpoints") as checkpoints:
        assert checkpoints.latest_step() == 6


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"fsdp": 8}])
def test_it_comes_back_on_any_mesh(run, axes):
    states = []
    for mesh in (axes, {"data": -1}):
        experiment = tuning(mesh=mesh)
        abstract = make_abstract_state(experiment, make_experiment_mesh(experiment))
        with Checkpointer(run / "checkpoints") as checkpoints:
            restore = lambda like, base: checkpoints.restore(like, 4, base=base)  # noqa: E731
            states.append(restore_state(experiment, abstract, restore))
        kernel = states[-1].params["up"]["kernel"]
        assert kernel.sharding == abstract.params["up"]["kernel"].sharding
        np.testing.assert_array_equal(kernel, base()["up"]["kernel"])
    assert digest(states[0]) == digest(states[1])


@pytest.mark.parametrize("changes", [{"seed": 1}, {"params": None}], ids=str)
def test_another_base_is_refused_by_name(run, changes):
    words = "leaves out 'params/up/kernel', and what was given in its place is not what"
    with pytest.raises(ValueError, match=words):
        jt.fit(tuning(**changes), jt.RunOptions(run_dir=str(run), resume=True))


def test_parameters_alone_need_the_base_as_well(run):
    shapes = jax.eval_shape(init, jax.random.key(0))
    with Checkpointer(run / "checkpoints") as checkpoints:
        with pytest.raises(ValueError, match=r"leaves out 'params/up/bias' .*give as `base`"):
            checkpoints.restore_params(shapes, 4)
        with pytest.raises(ValueError, match=r"leaves out 'params/up/bias' float32\(4096,\) \(2 "):
            checkpoints.restore_params(shapes, 4, base=base)
        whole = {"up": base()["up"] | {"bias": np.zeros(HIDDEN, np.float32)}}
        params = checkpoints.restore_params(shapes, 4, base=lambda: whole)
        np.testing.assert_array_equal(params["up"]["kernel"], base()["up"]["kernel"])
        assert float(jnp.abs(params["down"]["kernel"]).max()) > 0


@pytest.mark.parametrize("stack", [jt.Stack(virtual=2), jt.Stack(counts=(5, 3))], ids=str)
def test_a_frozen_leaf_that_is_cut_by_layer_may_be_left_out(tmp_path, stack):
    mesh = jt.make_mesh(pipe=2, data=4)
    layers = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    place = jax.NamedSharding(mesh, jax.P(*[None] * (stack.lead - 1), "pipe"))
    params = {"blocks": layers, "head": jnp.ones(3)}
    params["blocks"] = jax.device_put(stack.cut(params)["blocks"], place)
    state = jt.TrainState(0, params, None, None, None, None, 0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, stack.in_order(state), leave_out=["params/blocks"])
        back = checkpoints.restore(stack.in_order(state), base=lambda: state)
        np.testing.assert_array_equal(back.params["blocks"], params["blocks"])
        natural = {"params": {"blocks": layers}}
        found = checkpoints.restore_part(natural, base=lambda: natural)
        np.testing.assert_array_equal(found["params"]["blocks"], layers)
        swapped = {"params": {"blocks": layers[::-1].copy()}}
        with pytest.raises(ValueError, match="'params/blocks', and what was given"):
            checkpoints.restore_part(natural, base=lambda: swapped)
        with pytest.raises(ValueError, match="leave_out names 'params/block', which is no path"):
            checkpoints.save(1, stack.in_order(state), leave_out=["params/block"])
