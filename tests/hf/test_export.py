"""``jaxtrain export``: what other programs compute of a model is what it computes here."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxtrain import hf
from jaxtrain.hf import stablehlo
from jaxtrain.models import decoder, encoder, encoder_decoder, vit
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.stages import run_layers
from tests import forms
from tests.commands import refused, run

SIZES = {"vocab_size": 61, "layers": 2, "width": 32, "heads": 4}
LLAMA = decoder.DecoderConfig(**SIZES, seq_len=24, **forms.LLAMA)
BERT = encoder.EncoderConfig(**SIZES, seq_len=24)
# By name: the module and the model. The first three are in the everyday tests.
FORMS = {
    # As the default GPT, which no family of transformers has.
    "tiny": (decoder, dataclasses.replace(decoder.tiny(), **SIZES | {"heads": 2})),
    "bert": (encoder, BERT),
    # With distances beyond the last bucket's.
    "t5": (
        encoder_decoder,
        dataclasses.replace(encoder_decoder.tiny(), **SIZES, buckets=8, max_distance=6),
    ),
    "vit": (vit, vit.ViTConfig(image=(8, 8, 3), patch=2, layers=1, width=24, heads=3, classes=9)),
    "gpt2": (decoder, decoder.DecoderConfig(**SIZES, seq_len=24)),
    "windows": (decoder, dataclasses.replace(LLAMA, window=5, window_pattern=(True, False))),
    "score": (decoder, dataclasses.replace(LLAMA, head="score")),
    "classes": (encoder, dataclasses.replace(BERT, head="classes", classes=3)),
    "states": (encoder, dataclasses.replace(BERT, head="none", token_types=None)),
    "gemma": (
        decoder,
        decoder.DecoderConfig(
            **SIZES | {"layers": 3},
            **{"seq_len": 24, "positions": "rope", "norm": "rmsnorm", "norm_position": "sandwich"},
            **{"norm_offset": True, "embed_scale": True, "mlp": "geglu", "bias": False},
            **{"attention_softcap": 5.0, "logit_softcap": 3.0, "window": 5, "kv_heads": 2},
            window_pattern=(True, False),
        ),
    ),
}
DAILY, SLOW = list(FORMS)[:3], list(FORMS)[3:]

# What a program without this package has: JAX and NumPy alone.
LOADER = """
import json, pathlib, sys
import jax.numpy as jnp, numpy as np
from jax import export

for folder in map(pathlib.Path, sys.argv[1:]):
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, data = json.loads(data[8 : 8 + size]), data[8 + size :]
    dtypes = {"F32": np.float32, "BF16": jnp.bfloat16}
    weights = {
        name: np.frombuffer(data[slice(*x["data_offsets"])], dtypes[x["dtype"]]).reshape(x["shape"])
        for name, x in header.items() if name != "__metadata__"
    }
    program = export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    for given in sorted(folder.glob("inputs-*.npz")):
        out = program.call(weights, dict(np.load(given)))
        np.save(folder / given.name.replace("inputs", "out").replace(".npz", ".npy"), out)
assert not [name for name in sys.modules if name.startswith("jaxtrain")]
"""


def drawn(module, config):
    """Parameters of which every one counts."""
    params = module.init(config, jax.random.key(0))
    return jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )


def batches(config):
    """Batches of two numbers of rows and, where there are any, lengths."""
    rng = np.random.default_rng(0)
    for rows, length in ((1, 24), (3, 7)):
        tokens = rng.integers(0, 61, (rows, length)).astype(np.int32)
        seen = (np.arange(length) < 1 + rng.integers(0, length, (rows, 1))).astype(np.int32)
        if isinstance(config, vit.ViTConfig):
            yield {"image": rng.random((rows, *config.image), np.float32)}
        elif isinstance(config, encoder_decoder.T5Config):
            source = {"source": tokens, "source_segments": seen}
            yield source | {"tokens": rng.integers(0, 61, (rows, length + 3)).astype(np.int32)}
        elif isinstance(config, encoder.EncoderConfig):
            types = {"types": tokens % 2} if config.token_types else {}
            yield {"tokens": tokens, "segments": seen} | types
        else:
            yield {"tokens": tokens}


def computed(module, config, params, batch):
    if module is not decoder:
        of = module.encode if getattr(config, "head", "") == "none" else module.logits
        return of(config, params, batch)
    if config.head == "tokens":
        return decoder.logits(config, params, batch["tokens"])
    x = decoder.embed(config, params, batch)
    x = run_layers(decoder.stages(config), params, x, batch, None)
    return decoder.scores(config, params, x, batch)


@pytest.mark.parametrize(
    "names", [DAILY, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["daily", "others"]
)
def test_a_program_computes_the_same_without_this_package(names, tmp_path):
    wanted = {}
    for name in names:
        module, config = FORMS[name]
        params = drawn(module, config)
        stablehlo.save(tmp_path / name, config, params)
        for i, batch in enumerate(batches(config)):
            np.savez(tmp_path / name / f"inputs-{i}.npz", **batch)
            wanted[name, i] = computed(module, config, params, batch)
    command = [sys.executable, "-c", LOADER, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (name, i), ours in wanted.items():
        found = np.load(tmp_path / name / f"out-{i}.npy")
        np.testing.assert_allclose(found, ours, atol=1e-6 * np.abs(ours).max(), err_msg=name)


def save_run(path, config, params):
    about = {"model": dataclasses.asdict(config), "tokenizer": "bytes"}
    with Checkpointer(path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"params": params}, config=about)
    return str(path)


def test_the_default_gpt_is_a_program_and_no_model_of_transformers(tmp_path, capsys):
    _, config = FORMS["tiny"]
    given = "--run", save_run(tmp_path / "run", config, drawn(decoder, config))
    said = refused(capsys, "hf", "export", *given, "--out", str(tmp_path / "no"))
    assert "llama has no mlp='gelu'" in said
    assert said.endswith("; export it with --format stablehlo, which has every model\n")
    out = tmp_path / "out"
    flags = ["--out", str(out), "--format", "stablehlo", "--dtype", "bfloat16"]
    status, printed, error = run(capsys, "export", *given, *flags)
    assert (status, error) == (0, "")
    assert printed == (
        f"{out}: model.stablehlo takes tokens int32[b,t], and gives float32[b,t,61]\n"
    )
    found = export.deserialize(bytearray((out / "model.stablehlo").read_bytes()))
    assert {x.dtype for x in found.in_avals} == {np.dtype(jnp.bfloat16), np.dtype(np.int32)}


def test_a_folder_is_exported_with_what_it_says_of_its_tokens(tmp_path, capsys):
    fields = {"eos_token_id": [7, 0], "bos_token_id": 5}
    files = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}
    hf.save(tmp_path / "model", LLAMA, drawn(decoder, LLAMA), fields=fields, files=files)
    given, out = ["--model", str(tmp_path / "model")], tmp_path / "out"
    assert run(capsys, "export", *given, "--out", str(out), "--dtype", "bfloat16")[0] == 0
    written = json.loads((out / "config.json").read_text())
    assert fields.items() <= written.items()
    assert written["model_type"] == "llama"
    assert {name: (out / name).read_text() for name in files} == files
    assert hf.open_weights(out)["embed"]["tokens"].dtype == jnp.bfloat16
    given += ["--out", str(tmp_path / "none")]
    assert "--step is given with --model: it is for" in refused(
        capsys, "export", *given, "--step=1"
    )
    assert "neither --run nor --model is" in refused(capsys, "export", *given[2:])
    flags = ["--format", "stablehlo", "--quantize", "int4"]
    assert "it is for safetensors; leave it out" in refused(capsys, "export", *given, *flags)
