"""Frozen weights held in the dtype of the compute take half the memory and change no step."""

import functools

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain import build
from jaxtrain.finetune.change import apply
from jaxtrain.finetune.held import hold_in_compute
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.models import decoder
from jaxtrain.sharding.rules import Rules
from jaxtrain.tree import named_leaves

FAST = {"xla_backend_optimization_level": 0}
MODEL = decoder.DecoderConfig(
    vocab_size=67, seq_len=8, layers=2, width=16, heads=2, mlp_width=56, scan_unroll=1
)
BATCH = {name: np.arange(64, dtype=np.int32).reshape(8, 8) for name in ("tokens", "targets")}
BATCH |= {"mask": np.ones((8, 8), np.float32)}


def tuned(hold):
    own = {"init_fn": functools.partial(decoder.init, MODEL), "stages": decoder.stages(MODEL)}
    own |= {"params": lambda: decoder.init(MODEL, jax.random.key(9)), "rules": Rules(decoder.RULES)}
    own |= {"optimizer": lambda stack: jt.make_optimizer("adamw", 0.1, stacked=stack.axes)}
    made = jt.Experiment.of(
        name="tiny", steps=3, loss_fn=None, batch=BATCH, train_batches=None, policy="bf16", **own
    )
    made = hold(apply(made, LoRA(rank=2)))
    mesh = build.make_experiment_mesh(made, jax.devices()[:1])
    state = build.make_state(made, mesh)
    train = build.compile_train(made, state, mesh, compiler_options=FAST)
    memory = train.compiled.memory_analysis()
    for _ in range(3):
        state, metrics = train(state, BATCH)
    return named_leaves(jax.device_get(state.params)), jax.device_get(metrics), memory


@pytest.mark.slow
def test_a_step_has_the_same_bits_and_no_float32_of_what_is_frozen():
    held, metrics, memory = tuned(hold_in_compute)
    plain, told, before = tuned(lambda experiment: experiment)
    for name, x in plain.items():
        found = held[name]
        np.testing.assert_array_equal(found, x.astype(found.dtype), err_msg=name)
        assert (found.dtype == np.float32) == name.endswith(("/a", "/b"))
    assert {n: metrics[n] for n in ("loss", "grad_norm")} == {
        n: told[n] for n in ("loss", "grad_norm")
    }
    saved = sum(x.nbytes // 2 for name, x in plain.items() if not name.endswith(("/a", "/b")))
    sizes = [each.argument_size_in_bytes for each in (before, memory)]
    assert sizes[0] - sizes[1] == saved
    assert memory.temp_size_in_bytes <= before.temp_size_in_bytes


def test_what_trains_whole_is_refused():
    made = jt.Experiment.of(
        name="tiny",
        init_fn=functools.partial(decoder.init, MODEL),
        loss_fn=decoder.loss_fn(MODEL),
        optimizer=jt.make_optimizer("adamw", 0.1, stacked=("^blocks/",)),
        batch=BATCH,
        train_batches=None,
        steps=1,
    )
    with pytest.raises(ValueError, match="experiment 'tiny' has no frozen parameters to hold"):
        hold_in_compute(made)
