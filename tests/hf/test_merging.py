"""Additions over packed kernels are merged into either base, and the change is measured."""

import re

import jax
import numpy as np
import pytest

from experiments.gpt import Config, outline
from jaxtrain import hf
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf import merging
from jaxtrain.models import decoder
from jaxtrain.ops.linear import merge
from jaxtrain.run.main import parse
from jaxtrain.tree import named_leaves
from tests.commands import run
from tests.finetune.test_low_rank import moved
from tests.hf.test_command import save_run

MODEL = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=1, width=64, heads=2)
LORA = LoRA(rank=2, targets=("attn",))


def changed(plain):
    change = lambda plain, key: Quantize("nf4").params(LORA.params(plain, key), key)  # noqa: E731
    return moved(jax.jit(change)(plain, jax.random.key(1)))


def test_either_base_has_the_additions_and_the_divergence_is_its_definition():
    plain = jax.jit(lambda key: decoder.init(MODEL, key))(jax.random.key(0))
    params = changed(plain)
    onto = merging.onto_original(params, named_leaves(plain))
    name = "blocks", "attn", "q", "kernel"
    low, whole, original = (x[name[0]][name[1]][name[2]][name[3]] for x in (params, onto, plain))
    np.testing.assert_allclose(
        whole, original + low.scale * np.einsum("ldr,lrf->ldf", low.a, low.b), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(onto["blocks"]["mlp"]["up"]["kernel"], plain["blocks"]["mlp"]["up"]["kernel"])  # fmt: skip # noqa: E501
    tokens = np.random.default_rng(0).integers(0, 257, 90).astype(np.int32)
    nats, count = merging.divergence(MODEL, params, onto, tokens)
    rows = tokens[:80].reshape(5, 16)
    logits = jax.jit(lambda params: decoder.logits(MODEL, params, rows))
    p, q = (np.float64(logits(x)) for x in (params, onto))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    assert count == 80
    assert nats == pytest.approx((np.exp(p) * (p - q)).sum() / 80, rel=1e-2)
    assert nats > 10 * abs(merging.divergence(MODEL, params, merge(params), tokens)[0])


@pytest.mark.slow
def test_export_says_how_much_was_changed_by_merging(tmp_path, capsys):
    hf.save(tmp_path / "base", MODEL, decoder.init(MODEL, jax.random.key(0)))
    flags = ["--tokenizer", "bytes", "--init-from", str(tmp_path / "base"), "--quantize", "nf4"]
    experiment = outline(parse(Config, [*flags, "--lora.rank", "2", "--lora.targets", "attn"]))
    params = changed(hf.load(hf.open_weights(tmp_path / "base")))
    experiment = experiment.with_(config=dict(experiment.metadata.config) | {
        "tokenizer": "bytes", "flags": {"init_from": str(tmp_path / "base")}
    })  # fmt: skip
    save_run(tmp_path / "run", experiment, params)
    (tmp_path / "text.txt").write_text("what was not trained on. " * 9)
    export = ["hf", "export", "--run", str(tmp_path / "run"), "--out"]
    found = []
    for i, more in enumerate(([], ["--dtype", "bfloat16"], ["--onto", "original"])):
        out = [*export, str(tmp_path / f"out{i}"), "--compare-on", str(tmp_path / "text.txt")]
        status, printed, error = run(capsys, *out, *more)
        assert status == 0, error
        found.append(float(re.search(r"trained model: (\S+) nats per token, over 224", printed)[1]))
    assert abs(found[0]) < 1e-6 < found[1] < found[2]
    status, _, error = run(capsys, *export, str(tmp_path / "x"), "--compare-on", "/nowhere")
    assert (status, "--compare-on is /nowhere, which is no file: give a text" in error) == (2, True)
