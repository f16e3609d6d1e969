"""The forms of Mistral, Qwen and Llama 3 on meshes: gradients and optimizer state of one device."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models import gpt
from jaxtrain.ops import tiled
from jaxtrain.ops.rotary import Llama3Scaling

MODEL = gpt.GPTConfig(
    vocab_size=61,
    seq_len=16,
    layers=4,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=12,
    qkv_bias=True,
    qk_norm=True,
    window=5,
    rope_theta=100.0,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32),
    positions="rope",
    norm="rmsnorm",
    mlp="swiglu",
    bias=False,
    tied=False,
)


def init(rng):
    """Noise on what it starts from, so that no bias is zero."""
    return jt.tree.map_named(
        lambda name, x: x + 0.1 * jax.random.normal(jax.random.key(len(name)), x.shape),
        gpt.init(MODEL, rng),
    )


def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 61, (2, 16, 16)).astype(np.int32)
    starts = rng.random((16, 16)) < 0.1
    segments = 1 + np.cumsum(starts, axis=1, dtype=np.int32)
    mask = (rng.random((16, 16)) < 0.8).astype(np.float32)
    return {"tokens": tokens, "targets": targets, "mask": mask, "segments": segments}


@pytest.mark.slow
# Eight tiles of queries make a loop, two are written out.
@pytest.mark.parametrize(
    ("block", "layout"),
    [(2, "data=2,fsdp=2,tensor=2"), (2, "pipe=2,fsdp=2,tensor=2"), (8, "data=2,fsdp=2,tensor=2")],
)
def test_every_mesh_agrees_with_one_device(block, layout, monkeypatch):
    monkeypatch.setattr(tiled, "_block", lambda T: block)
    jt.parity(
        init,
        gpt.loss_fn(MODEL),
        batch(),
        rules=gpt.RULES,
        stages=gpt.stages(MODEL),
        gather="model",
        layouts=[layout],
    )
