"""A GPT that learns from rewards of its answers: its model, and what is said when it is over."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import grpo
from jaxtrain.build import make_experiment_mesh, make_state
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.methods.rollouts import Rollouts
from jaxtrain.models import decoder
from tests.methods.test_rollouts import MODEL, experiment, prompts


def test_what_learns_has_no_dropout_whatever_it_was_trained_with(monkeypatch):
    tiny = dataclasses.replace(decoder.PRESETS["tiny"](), dropout=0.1, attention_dropout=0.1)
    monkeypatch.setitem(decoder.PRESETS, "tiny", lambda: tiny)
    made = grpo.outline(grpo.Config())
    assert made.metadata.config["model"]["dropout"] == 0
    assert made.metadata.config["model"]["attention_dropout"] == 0


def test_a_few_answers_are_shown_whatever_number_of_devices_splits_rows():
    made = experiment("data=4", sampler="exact")
    state = make_state(made, make_experiment_mesh(made, jax.devices()[:4]))
    how = Rollouts(MODEL, None, end=grpo.NEWLINE, longest=4, sampler="exact")
    batch = prompts(count=6)
    rows = [{name: x[i] for name, x in batch.items()} for i in range(6)]
    told = grpo.conclude(grpo.Config(), how, rows, state, {"reward": np.float32(0.5)})
    assert told[0] == "held-out answers that are right: 50.0%"
    assert len(told) == 4 + 6


def test_an_exact_sampler_of_packed_kernels_is_refused():
    with pytest.raises(ValueError, match="--quantize is nf4 and --sampler exact"):
        grpo.outline(grpo.Config(sampler="exact", quantize="nf4", lora=LoRA(rank=2)))
