"""Kernels that stay are packed as they are read; runs of additions over them are loaded merged."""

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain import hf
from jaxtrain.build import compile_train, make_abstract_state, make_experiment_mesh, make_state
from jaxtrain.cli import main as jaxtrain
from jaxtrain.finetune.low_rank import LoRA
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.models import decoder
from jaxtrain.ops.linear import merge
from jaxtrain.ops.packed import pack
from jaxtrain.optim import frozen
from jaxtrain.run import trained
from jaxtrain.run.main import parse
from jaxtrain.sharding.stack import LayerOrder
from jaxtrain.tree import named_leaves

MODEL = decoder.DecoderConfig(vocab_size=257, seq_len=16, layers=2, width=128, heads=2)
KERNEL = "blocks/mlp/up/kernel/base"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    hf.save(folder, MODEL, jax.jit(lambda key: decoder.init(MODEL, key))(jax.random.key(1)))
    return str(folder)


def outline(base, *more, quantize="nf4"):
    given = ["--tokenizer", "bytes", "--init-from", base, "--lora.rank", "4", "--global-batch", "8"]
    quantized = [] if quantize is None else ["--quantize", quantize]
    return gpt.outline(parse(gpt.Config, [*given, *quantized, *more]))


@pytest.mark.parametrize(
    "axes",
    [("data", "fsdp", "tensor"), pytest.param(("fsdp", "pipe"), marks=pytest.mark.slow)],
)
def test_what_stays_lies_packed_on_a_mesh(base, axes):
    layout = [x for axis in axes for x in (f"--mesh.{axis}", "2")]
    layout += ["--pipeline.microbatches", "4"] if "pipe" in axes else []
    experiment = outline(base, *layout, quantize="nf4-double")
    state = make_state(experiment, make_experiment_mesh(experiment))
    named = named_leaves(state.params)
    given = {f"{name}/base": x for name, x in named_leaves(hf.load(hf.open_weights(base))).items()}
    found = {name.rpartition("/")[0]: x for name, x in named.items() if name.endswith("codes")}
    assert set(found) == {x for x in given if "kernel" in x and "head" not in x}
    for name, codes in found.items():
        packed = pack(np.asarray(given[name]), "nf4-double")
        np.testing.assert_array_equal(codes, packed.codes)
        np.testing.assert_array_equal(named[f"{name}/scale"], packed.scale)
        np.testing.assert_array_equal(named[f"{name}/nested"], packed.nested)
    spec = [x for x in named[f"{KERNEL}/codes"].sharding.spec if x]
    assert spec == [x for x in ("pipe", "fsdp", "tensor") if x in axes]
    moments = {name for name in named_leaves(state.opt_state) if "/base/" in name}
    assert not moments
    assert {f"{KERNEL}/codes", f"{KERNEL}/scale"} <= frozen(state.opt_state)


@pytest.mark.slow
def test_a_step_takes_less_by_what_is_packed(base):
    """By XLA's own account: no gradient, moment or dense copy of a kernel that stays."""
    more, sizes = ["--optimizer.name", "adamw", "--scan-unroll", "1"], {}
    for kind in (None, "nf4"):
        experiment = outline(base, *more, quantize=kind)
        mesh = make_experiment_mesh(experiment, jax.devices()[:1])
        state = make_abstract_state(experiment, mesh)
        sizes[kind] = compile_train(experiment, state, mesh).compiled.memory_analysis()
    shapes = named_leaves(jax.eval_shape(lambda: decoder.init(MODEL, jax.random.key(0))))
    weights = sum(x.size for name, x in shapes.items() if name.startswith("blocks") and x.ndim == 3)
    less = sizes[None].argument_size_in_bytes - sizes["nf4"].argument_size_in_bytes
    assert less >= (4 - 0.57) * weights
    assert sizes["nf4"].temp_size_in_bytes <= 1.1 * sizes[None].temp_size_in_bytes


def test_only_matrices_that_stay_are_packed():
    params = decoder.init(MODEL, jax.random.key(0))
    changed = LoRA(rank=2, targets=("/(q|v)/kernel",)).params(params, jax.random.key(0))
    changed = Quantize("int8", keep=("mlp/down",)).params(changed, jax.random.key(0))
    names = {name.removesuffix("/codes") for name in named_leaves(changed) if "codes" in name}
    kernels = {"attn/q/kernel/base", "attn/k/kernel", "attn/v/kernel/base", "attn/out/kernel"}
    assert names == {f"blocks/{name}" for name in kernels | {"mlp/up/kernel"}}
    for name in names:
        assert named_leaves(Quantize("int8").freeze(changed))[f"{name}/scale"]
    plain = merge(changed)
    assert jax.tree.structure(plain) == jax.tree.structure(params)

    def close(x, y):
        np.testing.assert_allclose(x, y, atol=0.51 * abs(np.asarray(y)).max() / 127)

    jax.tree.map(close, plain, params)


def test_dora_begins_with_the_norms_of_what_is_packed(base):
    later, plain = hf.open_weights(base), hf.load(hf.open_weights(base))
    lora, quantize = LoRA(rank=2, targets=("mlp/up",), dora=True), Quantize("nf4-double")
    for then in (Quantize(), quantize):
        change = lambda params, key=None, then=then: then.params(lora.params(params, key), key)  # noqa: E731
        kernels = jax.jit(change)(plain, jax.random.key(0)), change(later)
        now, unread = (x["blocks"]["mlp"]["up"]["kernel"] for x in kernels)
        lengths = np.linalg.norm(np.asarray(merge(now.low.base), np.float64), axis=-2)
        np.testing.assert_allclose(now.magnitude, lengths, rtol=1e-6)
        part = slice(1, 2), slice(8, 24)
        np.testing.assert_allclose(unread.magnitude[part], lengths[part], rtol=1e-6)
        np.testing.assert_allclose(now.merged(), merge(now.low.base), rtol=1e-5)
        order = LayerOrder((2, 2), rows=(0, 3))
        cut = np.asarray(unread.magnitude.cut(order))
        np.testing.assert_allclose(cut[1, 1], lengths[1], rtol=1e-6)
    assert cut.shape == (2, 2, 512)


@pytest.mark.slow
def test_a_run_is_resumed_without_its_base_and_exported_merged(base, tmp_path):
    for i in range(30):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / f"text/{i}.txt").write_text(f"{i} bottles of beer on the wall. " * 9)
    given = ["--tokenizer", "bytes", "--data", str(tmp_path / "text"), "--init-from", base]
    given += ["--lora.rank", "2", "--quantize", "nf4-double", "--optimizer.name", "adamw"]
    given += ["--sample-tokens", "4", "--held-out-bytes", "500", "--global-batch", "8"]
    given += ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    given += ["--optimizer.schedule", "constant", "--optimizer.learning-rate", "0.01"]
    given += ["--optimizer.warmup-steps", "1"]

    def run(name, *more):
        config = parse(gpt.Config, [*given, "--run-dir", str(tmp_path / name), *more])
        return jt.fit(gpt.build(config), config.run).state

    whole = run("whole", "--steps", "4")
    run("parts", "--steps", "2", "--no-save-frozen")
    more = ["--no-save-frozen", "--resume", "--accept-changes", "steps"]
    state = run("parts", "--steps", "4", *more)
    jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)
    sizes = [
        sum(x.stat().st_size for x in (tmp_path / name / "checkpoints/4").rglob("*") if x.is_file())
        for name in ("whole", "parts")
    ]
    assert sizes[1] < 0.5 * sizes[0]
    export = ["hf", "export", "--run", str(tmp_path / "whole"), "--out", str(tmp_path / "merged")]
    assert jaxtrain(export) == 0
    tokens = np.arange(32).reshape(2, 16)
    merged = hf.load(hf.open_weights(tmp_path / "merged"))
    expected = decoder.logits(MODEL, whole.params, tokens)
    np.testing.assert_allclose(decoder.logits(MODEL, merged, tokens), expected, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, merged, trained.load(str(tmp_path / "whole"))[1])
    out = str(tmp_path / "adapter")
    export = ["hf", "export", "--run", str(tmp_path / "parts"), "--step", "4", "--out", out]
    assert jaxtrain([*export, "--adapter"]) == 0
    given[given.index("--lora.rank")] = "--adapter"
    given[given.index("--adapter") + 1] = out
    experiment = gpt.outline(parse(gpt.Config, given))
    begun = make_state(experiment, make_experiment_mesh(experiment))
    # Additions of q, k and v are one in its file, of the sum of their ranks.
    np.testing.assert_allclose(decoder.logits(MODEL, begun.params, tokens), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--quantize is nf4: packed kernels do not train; give --lora.rank"),
        (["--lora.rank", "2", "--mesh.fsdp", "8"], r"/base/scale' has shape \(2, 2, 128\)"),
    ],
)
def test_what_cannot_be_is_refused(base, given, message):
    flags = ["--tokenizer", "bytes", "--init-from", base, "--quantize", "nf4", *given]

    def make():
        experiment = gpt.outline(parse(gpt.Config, flags))
        make_abstract_state(experiment, make_experiment_mesh(experiment))

    with pytest.raises(ValueError, match=message):
        make()
