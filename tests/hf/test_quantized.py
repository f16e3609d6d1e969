"""Folders that bitsandbytes has quantized are read as what they stand for, and packed alike."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf import quantized, safetensors
from jaxtrain.models import decoder
from jaxtrain.ops.linear import merge
from jaxtrain.ops.packed import NF4, pack
from jaxtrain.tree import named_leaves
from tests import forms

MODEL = decoder.DecoderConfig(
    vocab_size=61, seq_len=16, layers=2, width=64, heads=2, mlp_width=128, **forms.LLAMA
)
GPT2 = decoder.DecoderConfig(vocab_size=61, seq_len=16, layers=2, width=64, heads=2)


@functools.cache
def drawn(model):
    params = jax.jit(functools.partial(decoder.init, model))(jax.random.key(0))
    return jax.tree.map(np.asarray, params)


def test_parts_of_a_file_are_one_tensor(tmp_path):
    """Of what bitsandbytes made of tests/ops/nf4.npz, which tests/ops/test_packed.py describes."""
    numpy = pytest.importorskip("safetensors.numpy")
    made = np.load(pathlib.Path(__file__).parents[1] / "ops/nf4.npz")
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [4, 320]}
    parts = {
        "": made["codes"].reshape(-1, 1),
        ".absmax": made["absmax"].reshape(-1),
        ".quant_map": NF4,
        ".quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    tensors = {f"a.weight{name}": x for name, x in parts.items()} | {"a.weights": NF4}
    numpy.save_file(tensors, tmp_path / "model.safetensors")
    format = quantized.Format("bitsandbytes")
    found = quantized.dequantized(safetensors.tensors_in(tmp_path), format)
    assert (found.keys(), found["a.weight"].shape) == ({"a.weight", "a.weights"}, (4, 320))
    np.testing.assert_array_equal(found["a.weight"][1:3, 60:200], made["dense"][1:3, 60:200])


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_what_bitsandbytes_wrote_is_read(nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("safetensors.torch")
    hf.save(tmp_path, MODEL, drawn(MODEL), family="llama")
    tensors, expected = torch.load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name]:
        packed, state = functional.quantize_4bit(
            tensors[name], quant_type="nf4", compress_statistics=nested
        )
        expected[name] = functional.dequantize_4bit(packed, state).numpy()
        more = {f"{name}.{key}": x for key, x in state.as_dict(packed=True).items()}
        tensors |= {name: packed} | more
    torch.save_file(tensors, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    found = hf.load(hf.open_weights(tmp_path))
    for l in range(2):
        for ours, theirs in (("attn/out", "self_attn.o_proj"), ("mlp/down", "mlp.down_proj")):
            part, name = ours.split("/")
            np.testing.assert_array_equal(
                found["blocks"][part][name]["kernel"][l].T,
                expected[f"model.layers.{l}.{theirs}.weight"],
            )
    # NF4's numbers have these codes and scales again.
    packed = jax.tree.map(jnp.asarray, Quantize("nf4").params(hf.open_weights(tmp_path)))
    jax.tree.map(np.testing.assert_array_equal, merge(packed), found)


def words(codes, bits, axis, order=None):
    """int32 words by the formats' definition: code i of n at bit ``bits * i``, all in one integer,
    which is cut into words; ``order`` says which column of a word comes where."""
    codes = np.moveaxis(codes, axis, -1)
    if order is not None:
        codes = codes.reshape(*codes.shape[:-1], -1, 8)[..., order].reshape(codes.shape)
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] * bits // 32), np.uint32)
    for place in np.ndindex(*codes.shape[:-1]):
        whole = sum(int(code) << bits * i for i, code in enumerate(codes[place]))
        out[place] = [whole >> 32 * i & 0xFFFFFFFF for i in range(out.shape[-1])]
    return np.ascontiguousarray(np.moveaxis(out, -1, axis)).view(np.int32)


FORMATS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq, 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 32},
    "gptq_v2": {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    "gptq, symmetric": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "pack-quantized": {"bits": 4, "group_size": 32},
    "pack-quantized, 8 bits": {"bits": 8, "group_size": None},
    "pack-quantized, zeros": {"bits": 4, "group_size": 32},
    "int-quantized": {"bits": 8, "group_size": None},
}
EXACT = {"gptq, symmetric", "pack-quantized", "pack-quantized, 8 bits", "int-quantized"}


def encoded(name, bits, shape, rng):
    """The parts of a random weight in a file, its numbers [F, D], codes about 0 and scales."""
    F, D = shape
    g = D if "int" in name or "8 bits" in name else 32
    half, group = 2 ** (bits - 1), np.arange(D) // g
    codes, zeros = rng.integers(0, 2**bits, (F, D)), rng.integers(1, 2**bits, (F, D // g))
    scale = (rng.random((F, D // g)) * 0.02 + 0.01).astype(np.float16)
    if name in EXACT:
        zeros = np.full_like(zeros, half)
    if name == "gptq":
        group = rng.permutation(group)
        zeros[:8] = 16  # stored as 15
    numbers = (codes - zeros[:, group]) * scale[:, group].astype(np.float32)
    about = codes - half, scale.astype(np.float32)
    if name == "int-quantized":
        return {".weight": about[0].astype(np.int8), ".weight_scale": scale}, numbers, *about
    if name.startswith("pack"):
        parts = {".weight_packed": words(codes, bits, 1), ".weight_scale": scale}
        parts[".weight_shape"] = np.array([F, D])
        if "zeros" in name:
            parts[".weight_zero_point"] = words(zeros, bits, 0)
        return parts, numbers, *about
    if name == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {".qweight": words(codes.T, 4, 1, order), ".qzeros": words(zeros.T, 4, 1, order)}
        return parts | {".scales": scale.T.copy()}, numbers, *about
    stored = zeros.T - ("v2" not in name)
    parts = {".qweight": words(codes.T, bits, 0), ".qzeros": words(stored, bits, 1)}
    parts |= {".scales": scale.T.copy(), ".g_idx": group.astype(np.int32)}
    return parts, numbers, *about


def write_quantized(folder, name):
    """A folder in a format, and by the module's name what its parts mean."""
    hf.save(folder, MODEL, drawn(MODEL), family="llama")
    how, rng, meant = dict(FORMATS[name]), np.random.default_rng(0), {}
    tensors = {n: np.array(x[...]) for n, x in safetensors.tensors_in(folder).items()}
    for module in [n.removesuffix(".weight") for n in tensors if "proj" in n]:
        shape = tensors.pop(f"{module}.weight").shape
        parts, *meant[module] = encoded(name, how["bits"], shape, rng)
        tensors |= {module + end: part for end, part in parts.items()}
    kinds = {n: (x.shape, x.dtype) for n, x in tensors.items()}
    safetensors.write(folder, kinds, tensors.items(), max_shard_bytes=10**9)
    if "quant_method" not in how:
        weights = {"num_bits": how["bits"], "type": "int", "group_size": how["group_size"]}
        how = {"format": name.split(",")[0], "quant_method": "compressed-tensors"}
        how |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    return meant


MODULES = {
    "attn/q": "self_attn.q_proj",
    "attn/out": "self_attn.o_proj",
    "mlp/down": "mlp.down_proj",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_it_is_defined(name, tmp_path):
    meant = write_quantized(tmp_path, name)
    opened = hf.open_weights(tmp_path)
    named = named_leaves(opened)
    kind = {4: "int4", 8: "int8"}.get(FORMATS[name]["bits"])
    group = FORMATS[name].get("group_size")
    packed = named_leaves(Quantize(kind, group).params(opened)) if kind else {}
    assert hf.group_of(tmp_path, kind or "nf4") == (group if kind else None)
    for ours, theirs in MODULES.items():
        for l in range(2):
            numbers, codes, scale = meant[f"model.layers.{l}.{theirs}"]
            kernel = f"blocks/{ours}/kernel"
            np.testing.assert_array_equal(np.asarray(named[kernel])[l].T, numbers)
            if kind is None:
                continue
            found = np.asarray(packed[f"{kernel}/scale"])[l].view(np.float32).T
            assert (name in EXACT) == np.array_equal(found, scale)
            if name in EXACT:
                found = np.asarray(packed[f"{kernel}/codes"])[l]
                if kind == "int4":
                    pairs = np.stack([found >> 4, found & 15], 1).reshape(-1, found.shape[1])
                    found = pairs.astype(int) - 8
                np.testing.assert_array_equal(found.T, codes)
                cut = packed[f"{kernel}/codes"][1:2, 16:32, 8:24]
                np.testing.assert_array_equal(
                    cut[0], np.asarray(packed[f"{kernel}/codes"])[1, 16:32, 8:24]
                )


IN_WORDS = {"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.17.1"}
IN_WORDS |= {"config_groups": {"a": {"weights": {"num_bits": 3, "group_size": 32}}}}


def test_codes_across_words_are_those_of_newer_versions():
    assert quantized.read_format(IN_WORDS | {"version": "0.18.0"}).bits == 3


@pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
def test_nf4_keeps_its_groups(kind, tmp_path):
    params = drawn(MODEL)
    packed = Quantize(kind, 32).params(params, jax.random.key(0))
    hf.save(tmp_path / "a", MODEL, packed, family="llama", quantize="nf4")
    read, expected = (
        named_leaves(hf.load(hf.open_weights(tmp_path / "a"))),
        named_leaves(merge(packed)),
    )
    for name in expected:
        np.testing.assert_array_equal(read[name], expected[name])
    assert hf.group_of(tmp_path / "a", "nf4") == 32
    with pytest.raises(ValueError, match=r"nf4 in groups of 16 inputs is not read by bitsandbytes"):
        hf.save(tmp_path / "b", MODEL, params, family="llama", quantize="nf4", group=16)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"quant_method": "eetq"}, "quant_method='eetq', which is not read: only 'bitsandbytes'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size=None, which is"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2', which is not read: only 'e4m3'"),
        ({"quant_method": "gptq", "bits": 5}, "bits=5, which is not read: only 2, 3, 4, 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv', which is not"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format='float-quan"),
        (3, "quantization_config is 3, which is no JSON object"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "32"}, "group_size='32': it must be"),
        (IN_WORDS | {"config_groups": [1]}, r"config_groups is \[1\], which is no JSON object"),
        (IN_WORDS, "version='0.17.1' and 3 bits: before 0.18 compressed-tensors packed them in"),
    ],
)
def test_other_formats_are_refused_by_name(how, message, tmp_path):
    hf.save(tmp_path, MODEL, drawn(MODEL), family="llama")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path)


WRITTEN = [("int4", "llama"), ("nf4", "gpt2"), ("int8", "llama"), ("nf4", "llama")]


@pytest.mark.parametrize(
    ("kind", "family"),
    WRITTEN[:2] + [pytest.param(*each, marks=pytest.mark.slow) for each in WRITTEN[2:]],
)
def test_what_is_written_is_read_bit_for_bit(kind, family, tmp_path):
    model = MODEL if family == "llama" else GPT2
    params = jax.tree.map(lambda x: x, drawn(model))
    hf.save(tmp_path / "a", model, params, family=family, quantize=kind, dtype="bfloat16")
    opened = hf.open_weights(tmp_path / "a")
    packed = Quantize(kind).params(params, jax.random.key(0))
    expected, found = named_leaves(merge(packed)), named_leaves(hf.load(opened))
    for name in expected:
        if "kernel" in name and "blocks" in name:
            np.testing.assert_array_equal(found[name], expected[name])
    again = named_leaves(Quantize(kind).params(opened))
    for name, part in named_leaves(packed).items():
        if name.endswith(("codes", "scale")) and "norm" not in name:
            np.testing.assert_array_equal(np.asarray(again[name]), part)
    # Packed kernels keep their own scales, which no number of a group need reach.
    if kind == "int4":
        w = params["blocks"]["mlp"]["up"]["kernel"]
        own = pack(w, kind, 32, scale=np.full((2, 2, w.shape[-1]), 0.25, np.float32))
        params["blocks"]["mlp"]["up"]["kernel"] = own
        hf.save(tmp_path / "b", model, params, family=family, quantize=kind, group=32)
        up = Quantize(kind, 32).params(hf.open_weights(tmp_path / "b"))["blocks"]["mlp"]["up"]
        np.testing.assert_array_equal(np.asarray(up["kernel"].codes), own.codes)
        np.testing.assert_array_equal(np.asarray(up["kernel"].scale), own.scale)


def test_compressed_tensors_has_no_kernels_of_gpt2(tmp_path):
    params = drawn(GPT2)
    with pytest.raises(ValueError, match="gpt2 keeps its kernels as Conv1D, which compressed"):
        hf.save(tmp_path, GPT2, params, family="gpt2", quantize="int4")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family"), WRITTEN)
def test_transformers_opens_what_is_written(kind, family, tmp_path):
    bits = pytest.importorskip("bitsandbytes" if kind == "nf4" else "compressed_tensors")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = MODEL if family == "llama" else GPT2
    params = drawn(model)
    hf.save(tmp_path, model, params, family=family, quantize=kind)
    params = hf.load(hf.open_weights(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    body = theirs.model.layers if family == "llama" else theirs.transformer.h
    if kind == "nf4":  # before a forward pass, which may pack it anew
        weight = (body[1].mlp.up_proj if family == "llama" else body[1].mlp.c_fc).weight
        weight = bits.functional.dequantize_4bit(weight.data, weight.quant_state)
        kernel = params["blocks"]["mlp"]["up"]["kernel"][1]
        np.testing.assert_array_equal(weight.float().numpy().T, kernel)
    tokens = np.arange(32).reshape(2, 16)
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    # bitsandbytes multiplies in bfloat16 on some CPUs.
    np.testing.assert_allclose(
        decoder.logits(model, params, tokens), logits, atol=4e-3 if kind == "nf4" else 1e-5
    )
