"""Forms of Mistral, Qwen, Llama 3 and Gemma on meshes: gradients and state of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxtrain.flops import count_flops
from jaxtrain.models import decoder
from jaxtrain.ops import tiled
from jaxtrain.ops.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling
from tests import problems
from tests.compare import noisy

MODEL = decoder.DecoderConfig(
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
# Gemma 2 and 3 at once; stages begin at other places than the pattern.
GEMMA = dataclasses.replace(
    MODEL,
    kv_heads=1,
    qkv_bias=False,
    norm_offset=True,
    norm_position="sandwich",
    embed_scale=True,
    mlp="geglu",
    tied=True,
    window_pattern=(True, True, False),
    local_rope_theta=10.0,
    rope_scaling=LinearScaling(8.0),
    query_pre_attn_scalar=10.0,
    attention_softcap=2.0,
    logit_softcap=3.0,
)
# Rows have twice the length beyond which their positions are scaled: a device's part has it.
DYNAMIC = dataclasses.replace(MODEL, window=None, rope_scaling=DynamicScaling(4.0, 8))
LONG = dataclasses.replace(DYNAMIC, rope_scaling=LongScaling((1.0,) * 6, (2.0,) * 6, 8, 1.2))


def init(model, rng):
    return problems.with_noise(decoder.init(model, rng))


def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 61, (2, 16, 16)).astype(np.int32)
    starts = rng.random((16, 16)) < 0.1
    segments = 1 + np.cumsum(starts, axis=1, dtype=np.int32)
    mask = (rng.random((16, 16)) < 0.8).astype(np.float32)
    return {"tokens": tokens, "targets": targets, "mask": mask, "segments": segments}


# Eight tiles of queries make a loop, two are written out.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "block", "layout"),
    [
        ("gemma", 8, "pipe=2,fsdp=2,tensor=2"),
        ("qwen", 2, "data=2,fsdp=2,tensor=2"),
        ("qwen", 2, "pipe=2,fsdp=2,tensor=2"),
        ("qwen", 8, "data=2,fsdp=2,tensor=2"),
        ("gemma", 2, "data=2,fsdp=2,tensor=2"),
        ("gemma", 2, "pipe=4,data=2"),
        ("gemma", 8, "data=2,tensor=4"),
        ("gemma", 8, "context=2,fsdp=2,tensor=2"),
        ("dynamic", 16, "context=2,fsdp=2,tensor=2"),
        ("dynamic", 16, "pipe=2,context=2,data=2"),
        ("longrope", 16, "context=2,fsdp=2,tensor=2"),
    ],
)
def test_every_mesh_agrees_with_one_device(model, block, layout, monkeypatch):
    monkeypatch.setattr(tiled, "_block", lambda T: block)
    models = {"gemma": GEMMA, "qwen": MODEL, "dynamic": DYNAMIC, "longrope": LONG}
    noisy.parity(decoder, models[model], batch(), layout)


def test_layers_with_a_window_cost_what_they_do_alone():
    """Of a model whose every other layer has one, in a traced step as a plan counts it."""

    def flops(**form):
        model = dataclasses.replace(GEMMA, seq_len=256, **form)
        rows = jax.ShapeDtypeStruct((2, 256), "int32")
        given = {"tokens": rows, "targets": rows, "mask": jax.ShapeDtypeStruct((2, 256), "float32")}
        params = jax.eval_shape(functools.partial(decoder.init, model), jax.random.key(0))
        gradient = jax.grad(lambda *args: decoder.loss_fn(model)(*args, None).total)
        return count_flops(gradient, params, given).total

    near = flops(window=8, window_pattern=(True,))
    whole = flops(window=None, window_pattern=(True,), local_rope_theta=None)
    assert flops(window=8, window_pattern=(True, False)) == (near + whole) / 2
    assert near < 0.8 * whole
