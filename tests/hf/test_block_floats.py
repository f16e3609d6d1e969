"""Folders in fp8 and MXFP4 are read as the numbers that their bits stand for."""

import functools
import json
import re

import jax
import numpy as np
import pytest

from jaxtrain import hf
from jaxtrain.hf import safetensors
from jaxtrain.models import decoder
from jaxtrain.tree import named_leaves
from tests import forms

SIZES = {"vocab_size": 61, "seq_len": 16, "layers": 2, "width": 64, "heads": 2}
BLOCK = (24, 40)  # which divides few weights
ROUTED = {"experts": 3, "experts_per_token": 2, "mlp_width": 96}
GPT_OSS = forms.LLAMA | {"bias": True, "mlp": "swiglu_clamped", "routing": "softmax_normalised"}
DEEPSEEK = forms.LLAMA | {"kv_heads": None, "routing": "sigmoid", "shared_experts": 1, "groups": 1}
DEEPSEEK |= {"groups_per_token": 1, "head_dim": 48, "rope_dim": 16, "kv_rank": 32, "q_rank": 56}
FORMS = {
    "fp8": ("deepseek_v3", decoder.DecoderConfig(**SIZES | ROUTED | DEEPSEEK)),
    "mxfp4": ("gpt_oss", decoder.DecoderConfig(**SIZES | ROUTED | GPT_OSS, sinks=True)),
}


def minifloat(codes, exponent, mantissa, bias):
    """Numbers of a sign, an exponent and a mantissa, in float64, by their definition."""
    codes = codes.astype(np.int64)
    power = codes >> mantissa & 2**exponent - 1
    part = (codes & 2**mantissa - 1) / 2**mantissa
    size = np.where(power == 0, part * 2.0 ** (1 - bias), (1 + part) * 2.0 ** (power - bias))
    return np.where(codes >> exponent + mantissa & 1, -size, size)


def fp8(F, D, rng):
    """The parts of a random weight and its numbers, [F, D]."""
    codes = rng.integers(0, 256, (F, D)).astype(np.uint8)
    codes[codes & 127 == 127] = 0  # no NaN
    blocks = np.arange(F) // BLOCK[0], np.arange(D) // BLOCK[1]
    scales = rng.random([x[-1] + 1 for x in blocks]).astype(np.float32) * 1e-3
    parts = {"": codes.view(safetensors.PARTS["F8_E4M3"]), "_scale_inv": scales}
    return parts, minifloat(codes, 4, 3, 7) * scales[np.ix_(*blocks)]


def mxfp4(E, D, F, rng):
    """The parts of a random weight and its numbers, [E, D, F]."""
    pairs = rng.integers(0, 256, (E, F, D // 32, 16)).astype(np.uint8)
    scales = rng.integers(115, 125, (E, F, D // 32)).astype(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(E, F, D // 32, 32)
    numbers = minifloat(codes, 2, 1, 1) * 2.0 ** (scales.astype(np.int64) - 127)[..., None]
    return {"_blocks": pairs, "_scales": scales}, numbers.reshape(E, F, D).swapaxes(1, 2)


def write(folder, method):
    """Saves a model in a format, and beside it as what it stands for; returns its weights' bits."""
    family, config = FORMS[method]
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(0))
    params = jax.tree.map(lambda x: rng.standard_normal(x.shape, x.dtype), shapes)
    hf.save(folder / "plain", config, params, family=family)
    plain = {n: np.array(x[...]) for n, x in safetensors.tensors_in(folder / "plain").items()}
    pattern = r"proj(_with_mqa)?\.weight$" if method == "fp8" else r"experts\.\w+_proj$"
    coded, found = dict(plain), {}
    for name in [name for name in plain if re.search(pattern, name)]:
        shape = coded.pop(name).shape
        found[name], numbers = (fp8 if method == "fp8" else mxfp4)(*shape, rng)
        coded |= {name + end: part for end, part in found[name].items()}
        plain[name] = numbers.astype(np.float32)
    (folder / "coded").mkdir()
    for name, tensors in (("plain", plain), ("coded", coded)):
        kinds = {n: (x.shape, x.dtype) for n, x in tensors.items()}
        safetensors.write(folder / name, kinds, tensors.items(), max_shard_bytes=10**9)
    fields = json.loads((folder / "plain/config.json").read_text())
    how = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    how |= {"weight_block_size": list(BLOCK), "fmt": "e4m3"} if method == "fp8" else {}
    (folder / "coded/config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    return found


@pytest.mark.parametrize("method", FORMS)
def test_a_folder_is_read_as_what_its_bits_stand_for(method, tmp_path):
    assert len(write(tmp_path, method)) >= 4
    coded, plain = (hf.open_weights(tmp_path / name) for name in ("coded", "plain"))
    jax.tree.map(np.testing.assert_array_equal, hf.load(coded), hf.load(plain))
    # A part of each matrix, which begins and ends within blocks.
    for name, weight in named_leaves(coded).items():
        part = (slice(1, 2),) * (len(weight.shape) - 2) + (slice(5, 37), slice(3, 30))
        if len(weight.shape) > 2:
            whole = np.asarray(named_leaves(plain)[name])
            np.testing.assert_array_equal(weight[part], whole[part])
    assert [each.equal for each in hf.check(tmp_path / "coded") if not each.equal] == []


def test_what_lacks_its_other_half_is_refused(tmp_path):
    write(tmp_path, "fp8")
    tensors = {n: x.stored for n, x in safetensors.tensors_in(tmp_path / "coded").items()}
    name = "model.layers.0.self_attn.o_proj.weight"
    for broken, message in (
        (tensors | {f"{name}_scale_inv": np.ones((1, 1), np.float32)}, r"\[1, 1\], and blocks of"),
        ({n: x for n, x in tensors.items() if n != name}, f"no '{name}' beside"),
    ):
        kinds = {n: (x.shape, x.dtype) for n, x in broken.items()}
        (tmp_path / "again").mkdir(exist_ok=True)
        (tmp_path / "again/config.json").write_text((tmp_path / "coded/config.json").read_text())
        safetensors.write(tmp_path / "again", kinds, broken.items(), max_shard_bytes=10**9)
        with pytest.raises(ValueError, match=message):
            hf.open_weights(tmp_path / "again")


@pytest.mark.slow
def test_the_numbers_are_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from transformers.integrations import finegrained_fp8
    from transformers.integrations import mxfp4 as theirs

    rng = np.random.default_rng(1)
    parts, numbers = mxfp4(3, 64, 96, rng)
    found = theirs.convert_moe_packed_tensors(
        *(torch.tensor(parts[end]) for end in ("_blocks", "_scales")), dtype=torch.float32
    )
    np.testing.assert_array_equal(found.numpy(), numbers)
    parts, numbers = fp8(48, 80, rng)
    values = torch.tensor(parts[""].view(np.uint8)).view(torch.float8_e4m3fn)
    dequantize = finegrained_fp8.Fp8Dequantize(None)._dequantize_one
    found = dequantize(values, torch.tensor(parts["_scale_inv"]), torch.float32)
    np.testing.assert_array_equal(found.numpy(), numbers.astype(np.float32))
