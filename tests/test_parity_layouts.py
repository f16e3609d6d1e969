"""The mesh never changes the mathematics: pipelines beside other axes, tiles, dropout.

Each case trains a small GPT through :func:`jaxtrain.agreement.compare`, as ``jaxtrain parity``
does: loss, gradients, parameters, optimizer state and evaluation against one device.
"""

import contextlib
import dataclasses

import jax
import optax
import pytest

import jaxtrain as jt
from jaxtrain.agreement import TOLERANCE, compare, parse_layout
from jaxtrain.models import gpt
from jaxtrain.ops import tiled
from tests import test_parity

GPT2 = dataclasses.replace(test_parity.GPT2, layers=4)
LLAMA = dataclasses.replace(test_parity.LLAMA, layers=4, kv_heads=2)
# Several tiles of logits and, where a tile is of 4 queries, of attention.
FORMS = {
    "shared key heads": LLAMA,
    "dropout in tiles": dataclasses.replace(
        GPT2, dropout=0.1, attention_dropout=0.3, loss_chunk=8, remat="full"
    ),
}

# The form, queries per tile of attention and the layout.
CASES = [
    ("dropout in tiles", 4, "pipe=2,fsdp=2,tensor=2"),
    ("shared key heads", 16, "data=2,tensor=4"),
]


def experiment(model):
    """A GPT with noise on what it starts from, so that no bias is zero."""
    stages = gpt.stages(model)
    batches = test_parity.batches()
    train = [{name: x[step] for name, x in batches.items()} for step in range(3)]

    def init(rng):
        return jt.tree.map_named(
            lambda name, x: x + 0.02 * jax.random.normal(jax.random.key(len(name)), x.shape),
            gpt.init(model, rng),
        )

    return jt.Experiment(
        name="gpt",
        init_fn=init,
        loss_fn=jt.loss_from_stages(stages),
        optimizer=optax.adamw(1e-2, eps=1e-4),
        batch=jax.eval_shape(lambda: train[0]),
        train_batches=lambda start, sharding: contextlib.nullcontext(iter(train)),
        eval_batches=lambda sharding: train[2:],
        steps=2,
        rules=jt.Rules(gpt.RULES),
        stages=stages,
        pipeline={"microbatches": 4},
    )


def errors_on(layout, model):
    """The largest error of each part on a layout, and its leaf."""
    (found,) = compare(experiment(model), layouts=[parse_layout(layout)], steps=2)
    assert found.refusal is None
    parts = {"evaluation", "loss", "gradients", "parameters", "optimizer state"}
    assert found.worst.keys() == parts
    return found.worst


@pytest.mark.parametrize(("form", "block", "layout"), CASES)
def test_layout_agrees_with_one_device(form, block, layout, monkeypatch):
    monkeypatch.setattr(tiled, "_block", lambda T: block)
    errors = errors_on(layout, FORMS[form])
    assert not {part: e for part, e in errors.items() if e[0] > TOLERANCE}, errors
