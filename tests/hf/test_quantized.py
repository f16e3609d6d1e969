"""Folders that bitsandbytes has quantized are read as what they stand for, and packed alike."""

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
from jaxtrain.ops.packed import NF4
from tests import forms

MODEL = decoder.DecoderConfig(
    vocab_size=61, seq_len=16, layers=2, width=64, heads=2, mlp_width=128, **forms.LLAMA
)


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
    found = quantized.dequantized(safetensors.tensors_in(tmp_path))
    assert (found.keys(), found["a.weight"].shape) == ({"a.weight", "a.weights"}, (4, 320))
    np.testing.assert_array_equal(found["a.weight"][1:3, 60:200], made["dense"][1:3, 60:200])


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_what_bitsandbytes_wrote_is_read(nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("safetensors.torch")
    hf.save(tmp_path, MODEL, decoder.init(MODEL, jax.random.key(0)), family="llama")
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
