"""Generation on a mesh: one device's tokens, and a cache and weights that are never whole."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models import decoder
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.models.generate import Weights, beam_step, generate_step, prompts
from jaxtrain.planning.hlo import read_program
from jaxtrain.sharding.rules import batch_parts, param_shardings
from tests.models.test_generate import FORMS, LENGTHS, PROMPTS
from tests.models.test_generate_target import CONFIG, SOURCE
from tests.models.test_generate_target import LENGTHS as SOURCE_LENGTHS

# As many layers as there is nothing else.
GPT = dataclasses.replace(FORMS["llama"], layers=5, head_dim=8)
T5 = dataclasses.replace(CONFIG, layers=5, decoder_layers=5)
ONE_KV_HEAD = dataclasses.replace(GPT, kv_heads=1, window=3)
# Layers of two kinds, as of Gemma 2 and 3.
TWO_KINDS = dataclasses.replace(
    GPT, window_pattern=(True, False), local_rope_theta=1e3, attention_softcap=5.0
)
EXPERTS = dataclasses.replace(GPT, experts=4, mlp_width=32)
GPTS = {
    "gpt": GPT,
    "deepseek": dataclasses.replace(FORMS["deepseek"], layers=5),
    "gpt oss": dataclasses.replace(FORMS["gpt oss"], layers=5),
    "experts": EXPERTS,
    "gpt, one key head": ONE_KV_HEAD,
    "gpt, layers of two kinds": TWO_KINDS,
}
NEW = 7
SETTINGS = {"rng": 3, "temperature": 2.0, "top_k": 5, "repetition_penalty": 1.5}

MESHES = {
    "data2-fsdp2-tensor2": dict(data=2, fsdp=2, tensor=2),
    "fsdp4-tensor2": dict(fsdp=4, tensor=2),
    "data2-tensor4": dict(data=2, tensor=4),
    "expert4-tensor2": dict(expert=4, tensor=2),
}
slow = pytest.mark.slow
COMBINATIONS = [
    ("gpt", "data2-fsdp2-tensor2"),
    pytest.param("experts", "expert4-tensor2", marks=slow),
    pytest.param("experts", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("deepseek", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("deepseek", "expert4-tensor2", marks=slow),
    pytest.param("gpt oss", "expert4-tensor2", marks=slow),
    pytest.param("gpt, one key head", "data2-tensor4", marks=slow),
    pytest.param("gpt", "fsdp4-tensor2", marks=slow),
    pytest.param("gpt", "data2-tensor4", marks=slow),
    pytest.param("gpt, one key head", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("gpt, layers of two kinds", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("t5", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("gpt, beams", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("t5, beams", "data2-fsdp2-tensor2", marks=slow),
    pytest.param("t5, beams", "data2-tensor4", marks=slow),
    pytest.param("t5", "fsdp4-tensor2", marks=slow),
]


def both_ways(x):
    return np.concatenate([x, x[::-1]])


def program(name):
    """A step that generates, its batch, the model's module and config."""
    model, *_ = name.split(", beams")
    module, config = (t5, T5) if model == "t5" else (decoder, GPTS[model])
    step, drawn = generate_step(config, max_new_tokens=NEW), {"temperature": 0.0}
    if name.endswith("beams"):
        step = beam_step(config, max_new_tokens=NEW, beams=3)
    elif module is decoder:
        drawn = SETTINGS | {"rng": jax.random.key(SETTINGS["rng"])}
    rows, lengths = (SOURCE, SOURCE_LENGTHS) if module is t5 else (PROMPTS, LENGTHS)
    form = {"prompt_lengths": both_ways(lengths), "max_new_tokens": NEW, "repetition_penalty": 1.3}
    return step, prompts(config, both_ways(rows), **form | drawn), module, config


def on_mesh(step, batch, module, params, mesh):
    shardings = param_shardings(params, mesh, module.RULES)
    weights = Weights(jax.device_put(params, shardings))
    compiled = jt.compile_step(step, weights, batch, mesh=mesh, rules=module.RULES, donate=False)
    return compiled, weights


@pytest.mark.parametrize(("name", "sizes"), COMBINATIONS)
def test_tokens_are_those_of_one_device_and_nothing_is_whole(name, sizes):
    step, batch, module, config = program(name)
    init = jax.jit(lambda: module.init(config, jax.random.key(1)))
    params = jax.tree.map(lambda x: np.asarray(8 * x), init())
    expected = jax.jit(step)(Weights(params), batch)
    mesh = jt.make_mesh(**MESHES[sizes])
    compiled, weights = on_mesh(step, batch, module, params, mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        compiled(weights, batch),
        expected,
    )
    assert len(np.unique(jax.tree.leaves(expected)[0])) > 2  # else any tokens would do

    text, heads = compiled.compiled.as_text(), mesh.shape["tensor"]
    beams = 3 if name.endswith("beams") else 1
    rows = len(batch.tokens) // batch_parts(mesh)
    length = NEW if module is t5 else batch.tokens.shape[1] + NEW
    kept = config.kv_heads, config.block.head_dim
    kept, _ = (kept, kept) if module is t5 else config.block.cached
    found = set(re.findall(rf"f32\[5,(\d+),(\d+),{length},{kept[1]}\]", text))
    # A device has its rows and its heads; a lone key head is every device's.
    part = str(max(kept[0], heads) // heads)
    assert (str(beams * rows), part) in found
    assert found <= {(str(rows), part), (str(beams * rows), part)}
    moved = [s for each in read_program(text, mesh).collectives for s in each.shapes]
    # No more than one layer's weights.
    assert not [s for s in moved if re.search(r"\[5,\d+,\d+", s)]
    if mesh.shape["fsdp"] > 1:
        assert f"f32[1,{config.width},{config.mlp_width // heads}]" in moved
