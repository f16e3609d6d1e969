"""`jaxtrain shrink` writes runs that load, generate, are tuned and exported."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from jaxtrain import data, hf
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.finetune.shrink import gptq
from jaxtrain.models import decoder
from jaxtrain.ops.altered import grams
from jaxtrain.ops.packed import Packed
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.tree import named_leaves
from tests import forms
from tests.commands import run

MODEL = decoder.DecoderConfig(
    vocab_size=257, seq_len=32, layers=2, width=64, heads=4, mlp_width=128, **forms.LLAMA
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run of a model with uneven weights, and a folder of texts."""
    folder = tmp_path_factory.mktemp("model")
    params = jax.jit(functools.partial(decoder.init, MODEL))(jax.random.key(0))
    params = jax.tree.map(lambda x: 2 * np.array(x), params)
    config = {"model": dataclasses.asdict(MODEL), "form": "decoder", "tokenizer": "bytes"}
    with Checkpointer(folder / "run/checkpoints") as checkpoints:
        checkpoints.save(1, {"params": params}, config=config | {"family": "llama"})
    (folder / "text").mkdir()
    for i in range(12):
        (folder / f"text/{i}.txt").write_text(f"{i} green bottles, hanging on the wall. " * 20)
    return folder


def shrink(model, out, capsys, *flags):
    text = ["--data", str(model / "text"), "--rows", "8", "--held-out-rows", "4"]
    return run(capsys, "shrink", str(model / "run"), "--out", str(out), *text, *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "channels"), [("awq", 1.0), pytest.param("gptq", 0.5, marks=pytest.mark.slow)]
)
def test_what_is_pruned_and_quantized_is_exported_code_for_code(
    method, channels, model, tmp_path, capsys
):
    out, width = tmp_path / "out", int(128 * channels)
    flags = ["--prune", "2:4", "--quantize", "int4", "--group", "32", "--channels", str(channels)]
    flags += ["--method", method]
    status, printed, error = shrink(model, out, capsys, *flags)
    assert status == 0, error
    small, params = trained.unmerged(str(out))
    assert (small.mlp_width, small.heads) == (width, 4)
    up = params["blocks"]["mlp"]["up"]["kernel"]
    assert isinstance(up, Packed)
    assert up.shape == (2, 64, width)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    found = float(re.search(r"bytes +\S+ +(\S+)", printed)[1].replace(",", ""))
    assert found == pytest.approx(size, rel=1e-4)
    _, dense, _ = trained.load(str(out))
    kernel = np.asarray(dense["blocks"]["attn"]["out"]["kernel"]).reshape(2, -1, 4, 64)
    assert np.all((kernel != 0).sum(2) <= 2)
    times = re.search(r"forward pass, ms per token +([\d.]+) +([\d.]+)", printed)
    assert all(float(x) > 0 for x in times.groups())
    table = re.search(r"blocks/mlp/down\W+([\d.]+)", printed)
    assert all(0.05 < float(x) < 1 for x in table.groups())
    export = ["hf", "export", "--run", str(out), "--out", str(tmp_path / "hf")]
    status, _, error = run(capsys, *export, "--quantize", "int4")
    assert status == 0, error
    assert hf.group_of(tmp_path / "hf", "int4") == 32
    again = named_leaves(Quantize("int4", 32).params(hf.open_weights(tmp_path / "hf")))
    for name, part in named_leaves(params).items():
        np.testing.assert_array_equal(np.asarray(again[name]), part, err_msg=name)


@pytest.mark.slow
def test_gptq_takes_a_layers_inputs_behind_the_quantized_layers(model, tmp_path, capsys):
    flags = ["--quantize", "int4", "--group", "8"]
    status, _, error = shrink(model, tmp_path / "out", capsys, *flags)
    assert status == 0, error
    _, params, tokenizer = trained.load(str(model / "run"))
    _, packed = trained.unmerged(str(tmp_path / "out"))
    _, dense, _ = trained.load(str(tmp_path / "out"))
    text, _ = data.open_text(str(model / "text"))
    tokens = [np.r_[tokenizer.encode(each.text), tokenizer.eod] for each in text]
    tokens = np.concatenate(tokens)[: 8 * 33].reshape(8, 33)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((8, 32))}
    path, equal = "blocks/mlp/down/kernel", []
    for before in (dense, params):  # of the first layer
        cut = jax.tree.map(lambda x, y: np.stack([x[0], y[1]]), before["blocks"], params["blocks"])
        found = grams(decoder.loss_fn(MODEL), params | {"blocks": cut}, [path], [batch])[path][1]
        expected = gptq(np.asarray(params["blocks"]["mlp"]["down"]["kernel"][1]), found, "int4", 8)
        codes = packed["blocks"]["mlp"]["down"]["kernel"].codes[1]
        equal.append(np.mean(expected.codes == codes))
    assert equal[0] > 0.995 > 0.98 > equal[1], equal


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing is asked for: give --heads, --channels, --prune or --quantize"),
        (
            ["--quantize", "nf4", "--method", "awq"],
            "--method is awq and --quantize is nf4: AWQ scales inputs for codes of int4 and int8; "
            "give one of these, or another --method",
        ),
        (["--heads", "0"], "--heads is 0.0: give a share above 0 and up to 1"),
        (["--prune", "4:2"], "--prune is '4:2': give a share below 1, or N:M, such as 2:4"),
        (["--quantize", "int4", "--group", "24"], "give a --group that divides 64"),
    ],
)
def test_what_does_not_fit_is_refused(flags, message, model, tmp_path, capsys):
    status, _, error = shrink(model, tmp_path / "out", capsys, *flags)
    assert (status, message in error) == (2, True), error


def test_layers_of_linear_attention_are_refused(tmp_path, capsys):
    config = dataclasses.replace(MODEL, delta_pattern=(True, False))
    params = jax.jit(functools.partial(decoder.init, config))(jax.random.key(0))
    about = {"model": dataclasses.asdict(config), "form": "decoder", "tokenizer": "bytes"}
    with Checkpointer(tmp_path / "run/checkpoints") as checkpoints:
        checkpoints.save(1, {"params": params}, config=about)
    status, _, error = shrink(tmp_path, tmp_path / "out", capsys, "--heads", "0.5")
    assert (status, "whose layers are stacked by groups" in error) == (2, True), error
