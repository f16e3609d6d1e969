"""Pruned kernels stay pruned, and rounded ones are exported as what was trained."""

import functools

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain import build, hf
from jaxtrain.build import make_experiment_mesh, make_state
from jaxtrain.finetune.constrain import Constrain
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.models import decoder
from jaxtrain.ops.altered import Masked
from jaxtrain.ops.linear import merge
from jaxtrain.ops.packed import pack
from jaxtrain.optim import frozen
from jaxtrain.run import trained
from jaxtrain.run.main import parse
from jaxtrain.tree import map_named, named_leaves
from tests.commands import run
from tests.finetune.test_low_rank import moved
from tests.hf.test_command import save_run

MODEL = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=1, width=64, heads=2)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A folder of a model of which half the kernels' weights are 0."""
    folder, rng = tmp_path_factory.mktemp("pruned"), np.random.default_rng(0)
    params = jax.jit(functools.partial(decoder.init, MODEL))(jax.random.key(1))

    def cut(name, x):
        return x * (rng.random(x.shape) < 0.5) if "kernel" in name else x

    hf.save(folder, MODEL, map_named(cut, params))
    return str(folder)


def flags(pruned, *more):
    return ["--tokenizer", "bytes", "--init-from", pruned, "--global-batch", "8", *more]


def outline(pruned, *more):
    return gpt.outline(parse(gpt.Config, flags(pruned, *more)))


@pytest.mark.slow
def test_what_is_trained_is_what_is_loaded(pruned, tmp_path):
    experiment = outline(pruned, "--keep-zeros", "--quantize-aware", "int4", "--mesh.fsdp", "2")
    state = make_state(experiment, make_experiment_mesh(experiment))
    named, given = named_leaves(state.params), named_leaves(hf.load(hf.open_weights(pruned)))
    kernel = "blocks/mlp/up/kernel"
    np.testing.assert_array_equal(named[f"{kernel}/base/base"], given[kernel])
    np.testing.assert_array_equal(named[f"{kernel}/base/kept"], given[kernel] != 0)
    assert named[f"{kernel}/base/kept"].sharding == named[f"{kernel}/base/base"].sharding
    assert {name for name in frozen(state.opt_state)} == {n for n in named if n.endswith("/kept")}
    later = Constrain(keep_zeros=True).params(hf.open_weights(pruned))
    kept = np.asarray(later["blocks"]["mlp"]["up"]["kernel"].kept)
    np.testing.assert_array_equal(kept, given[kernel] != 0)
    policy = outline(pruned, "--quantize-aware", "int8", "--precision", "pure_bf16").policy
    cast = policy.cast_to_compute(policy.cast_to_param(state.params))
    rounded = outline(pruned, "--quantize-aware", "int8")  # without zeros to keep
    build.make_abstract_state(rounded, build.make_experiment_mesh(rounded, jax.devices()[:1]))
    assert cast["blocks"]["mlp"]["up"]["kernel"].base.base.dtype == np.float32
    assert cast["embed"]["tokens"].dtype == jax.numpy.bfloat16
    params = moved(jax.device_get(state.params))
    save_run(
        tmp_path,
        experiment.with_(config={**experiment.metadata.config, "tokenizer": "bytes"}),
        params,
    )
    model, loaded, _ = trained.load(str(tmp_path))
    tokens = np.arange(32).reshape(2, 16)
    logits = jax.jit(functools.partial(decoder.logits, model))
    np.testing.assert_allclose(logits(params, tokens), logits(loaded, tokens), atol=1e-5)
    base = np.asarray(params["blocks"]["mlp"]["up"]["kernel"].base.base)
    whole = np.asarray(loaded["blocks"]["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(whole, pack(base * (given[kernel] != 0), "int4").merged())
    assert 0.4 < (whole == 0).mean() < 0.7


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--keep-zeros", "--lora.rank", "2"], "are for whole kernels, and low-rank additions are"),
        (
            ["--quantize-aware", "int4", "--width", "72"],
            "parameter 'blocks/attn/k/kernel': a kernel",
        ),
    ],
)
def test_what_does_not_fit_is_refused(more, message, pruned):
    given = flags(pruned, *more)
    given = given[:2] + given[4:] if "--width" in more else given
    with pytest.raises(ValueError, match=message):
        gpt.outline(parse(gpt.Config, given))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_keeps_zeros_and_is_exported_as_it_was_trained(optimizer, pruned, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / f"text/{i}.txt").write_text(f"{i} bottles of beer on the wall. " * 9)
    more = ["--keep-zeros", "--quantize-aware", "int4", "--optimizer.name", optimizer]
    more += ["--data", str(tmp_path / "text"), "--held-out-bytes", "500", "--sample-tokens", "4"]
    more += ["--steps", "4", "--run-dir", str(tmp_path / "run"), "--optimizer.warmup-steps", "1"]
    config = parse(gpt.Config, flags(pruned, *more))
    state = jt.fit(gpt.build(config), config.run).state
    before, after = hf.load(hf.open_weights(pruned)), merge(state.params)
    for name, x in named_leaves(after).items():
        if "blocks" in name and "kernel" in name:
            assert not np.any(np.asarray(x)[np.asarray(named_leaves(before)[name]) == 0])
    assert np.abs(np.asarray(after["embed"]["tokens"] - before["embed"]["tokens"])).max() > 1e-5
    up = state.params["blocks"]["mlp"]["up"]["kernel"]
    assert isinstance(up.base, Masked)
    export = ["hf", "export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    status, _, error = run(capsys, *export)
    assert status == 0, error
    exported = hf.open_weights(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, hf.load(exported), after)
    # Stored in codes it is the same model.
    packed = merge(jax.tree.map(jax.numpy.asarray, Quantize("int4").params(exported)))
    jax.tree.map(np.testing.assert_array_equal, packed, after)
