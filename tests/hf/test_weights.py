"""Weights both ways, against transformers: logits, and the bits of every tensor."""

import dataclasses
import functools
import json
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import data, hf
from jaxtrain.hf import safetensors, weights
from jaxtrain.hf.families import FAMILIES, family_for
from jaxtrain.hf.opening import ends_of
from jaxtrain.hf.table import REQUIRED, assemble
from jaxtrain.host.paths import read_json
from jaxtrain.models import decoder
from jaxtrain.tree import named_leaves
from tests.hf import models
from tests.hf.models import MODELS, TOKENS

EVERYDAY = list(MODELS)[:6]
every_model = pytest.mark.parametrize(
    "name",
    [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in MODELS],
)
KEY = jax.random.key(0)
SMALL = decoder.DecoderConfig(vocab_size=61, seq_len=8, layers=1, width=16, heads=4)
# Values are compared, and how fast they are computed does not matter.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    models.transformers()
    return functools.cache(lambda name: models.save(name, tmp_path_factory.mktemp("model")))


@every_model
def test_logits_are_those_of_transformers(name, folder_of):
    config = hf.read_config(folder_of(name))
    params = hf.load(hf.open_weights(folder_of(name)))
    got = quick_jit(functools.partial(decoder.logits, config))(params, jnp.asarray(TOKENS))
    expected = models.logits(folder_of(name))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, atol=1e-4)


@every_model
def test_what_is_loaded_and_saved_has_the_same_bits(name, folder_of, tmp_path):
    family = hf.family_name(folder_of(name))
    differs, files = models.check_bits(folder_of(name), tmp_path, family=family)
    assert differs <= {"max_window_layers", "n_inner", "intermediate_size", "pad_token_id"}
    assert len(files) > 2


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_bfloat16_stays_as_it_is(name, folder_of, tmp_path):
    folder = models.save(name, tmp_path / "bf16", dtype="bfloat16", max_shard_size="10KB")
    assert (folder / safetensors.INDEX).exists()
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(jnp.bfloat16)}
    hf.save(tmp_path / "same", config, params)
    # Through float32, as trained parameters are kept.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    hf.save(tmp_path / "cast", config, wide, dtype=jnp.bfloat16)
    assert (
        models.tensors(tmp_path / "same")
        == models.tensors(tmp_path / "cast")
        == models.tensors(folder)
    )


@pytest.mark.parametrize(
    "name", [n if n == "qwen3" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_a_trained_step_comes_back(name, folder_of, tmp_path):
    config = dataclasses.replace(
        hf.read_config(folder_of(name)), dropout=0.0, attention_dropout=0.0
    )
    optimizer = optax.sgd(0.1)
    state = jt.init_state(
        functools.partial(decoder.init, config),
        optimizer,
        jax.random.key(0),
        params=hf.open_weights(folder_of(name), config),
    )
    rows = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1), "mask": np.ones(TOKENS.shape)}
    batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if x.dtype == float else int), rows)
    state, _ = quick_jit(jt.build_train_step(decoder.loss_fn(config), optimizer))(state, batch)
    hf.save(tmp_path / "out", config, state.params, family=hf.family_name(folder_of(name)))
    ours = quick_jit(functools.partial(decoder.logits, config))(state.params, batch["tokens"])
    theirs = models.logits(tmp_path / "out")
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert np.abs(theirs - models.logits(folder_of(name))).max() > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in MODELS
            if n[:6] in ("gemma3", "deepse", "gpt os") or "next" in n
        ),
    ],
)
def test_the_loss_and_every_gradient_are_those_of_transformers(name, folder_of):
    # Without 0, which is padding: of its embedding's gradient they leave out the look-up.
    # Of linear attention both are as far from the gradients in float64.
    check_gradients(folder_of(name), 1 + TOKENS % 60, bound=5e-4 if "next" in name else 1e-4)


# Of a model whose positions are scaled beyond 16.
@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 16, 24])
def test_dynamic_positions_are_those_of_transformers_of_rows_of_any_length(length, folder_of):
    folder, tokens = folder_of("llama, dynamic"), 1 + TOKENS[:, :length] % 60
    config, params = hf.read_config(folder), hf.load(hf.open_weights(folder))
    got = quick_jit(functools.partial(decoder.logits, config))(params, jnp.asarray(tokens))
    np.testing.assert_allclose(got, models.logits(folder, tokens), atol=1e-4)
    plain = dataclasses.replace(config, rope_scaling=None)
    others = quick_jit(functools.partial(decoder.logits, plain))(params, jnp.asarray(tokens))
    assert (np.abs(got - others).max() > 1e-2) == (length > 16)
    check_gradients(folder, tokens, bound=1e-4)


def check_gradients(folder, tokens, *, bound):
    targets = np.roll(tokens, -1, 1)
    config, weights = hf.read_config(folder), hf.open_weights(folder)
    config = dataclasses.replace(config, balance=0.0, router_z=0.0)
    params, mask = hf.load(weights), jnp.ones(tokens.shape)
    batch = {"tokens": jnp.asarray(tokens), "targets": jnp.asarray(targets), "mask": mask}
    mean = lambda params: decoder.loss_fn(config)(params, batch, None).means()["loss"]  # noqa: E731
    loss, grads = quick_jit(jax.value_and_grad(mean))(params)
    their_loss, their_grads = models.gradients(folder, tokens, targets)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    rows = {weight.row.ours: weight.row for weight in jax.tree.leaves(weights)}
    for path, grad in named_leaves(grads).items():
        row = rows[path]
        lead, inner = grad.shape[: row.lead], grad.shape[row.lead :]
        layers = np.asarray(grad).reshape(-1, *inner)
        for layer, their_name in zip(layers, row.names(*lead), strict=True):
            if path.endswith("router/bias"):
                continue  # a buffer there
            theirs = their_grads[their_name]
            theirs = theirs[..., row.part[0] :: row.part[1]] if row.strided else theirs
            whole = dataclasses.replace(row, strided=False)
            ours = assemble([whole], [layer], config.vocab_size)
            atol = bound * np.abs(theirs).max()
            np.testing.assert_allclose(ours, theirs, atol=atol, err_msg=their_name)


def test_the_gradients_of_experts_are_those_of_transformers(folder_of):
    """Who keeps a layer's experts in one tensor, gates and ups side by side."""
    folder, tokens = folder_of("mixtral"), 1 + TOKENS % 60
    config = dataclasses.replace(hf.read_config(folder), balance=0.0, router_z=0.0)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "mask": np.ones(tokens.shape)}
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    mean = lambda params: decoder.loss_fn(config)(params, batch, None).means()["loss"]  # noqa: E731
    params = hf.load(hf.open_weights(folder))
    loss, grads = quick_jit(jax.value_and_grad(mean))(params)
    their_loss, theirs = models.gradients(folder, tokens, np.roll(tokens, -1, 1))
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    ours = {name: np.asarray(x["kernel"]) for name, x in grads["blocks"]["experts"].items()}
    for l in range(config.layers):
        block = f"model.layers.{l}.mlp"
        gate_up = np.concatenate([ours["gate"][l], ours["up"][l]], -1)
        for name, found in (
            ("experts.gate_up_proj", gate_up.swapaxes(1, 2)),
            ("experts.down_proj", ours["down"][l].swapaxes(1, 2)),
            ("gate.weight", ours["router"][l].T),
        ):
            wanted = theirs[f"{block}.{name}"]
            bound = 1e-4 * np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted, atol=bound, err_msg=name)


@pytest.mark.parametrize(
    ("axes", "stack"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, jt.Stack()),
        ({"pipe": 2, "fsdp": 2, "tensor": 2}, jt.Stack(virtual=2)),
        ({"pipe": 2, "fsdp": 4}, jt.Stack(counts=(1, 3))),
    ],
)
def test_every_device_has_its_part(axes, stack, tmp_path):
    config = decoder.DecoderConfig(vocab_size=61, seq_len=8, layers=4, width=16, heads=4)
    params = decoder.init(config, jax.random.key(1))
    hf.save(tmp_path, config, params)
    state = jt.init_state(
        lambda rng: stack.cut(decoder.init(config, rng)),
        optax.sgd(0.1),
        jax.random.key(0),
        params=stack.cut(hf.open_weights(tmp_path)),
        mesh=jt.make_mesh(**axes),
        rules=jt.Rules(decoder.RULES, stacked=stack),
    )
    got, expected = named_leaves(state.params), named_leaves(stack.cut(params))
    for path, leaf in expected.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)
    split = got["blocks/mlp/up/kernel"]
    assert split.addressable_shards[0].data.size == split.size / 8 * axes.get("data", 1)
    loaded = hf.load(
        stack.cut(hf.open_weights(tmp_path)), jax.tree.map(lambda x: x.sharding, state.params)
    )
    for path, leaf in named_leaves(loaded).items():
        assert leaf.sharding == got[path].sharding
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def test_fewer_learned_positions_are_the_first(tmp_path):
    params = decoder.init(SMALL, jax.random.key(1))
    hf.save(tmp_path, SMALL, params)
    weights = hf.open_weights(tmp_path, dataclasses.replace(SMALL, seq_len=5))
    first = hf.load(weights)["embed"]["positions"]
    np.testing.assert_array_equal(first, params["embed"]["positions"][:5])
    with pytest.raises(ValueError, match=r"transformer.wpe.weight' with the shape \[8, 16\], and"):
        hf.open_weights(tmp_path, dataclasses.replace(SMALL, seq_len=9))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family):
    config = models.transformers().AutoConfig.for_model(family.name)
    defaults = {name: getattr(config, name) for name in family.fields if hasattr(config, name)}
    defaults |= config.to_dict()  # which has one of the names of a field that has two
    for name, field in family.fields.items():
        if field.default is not REQUIRED and field.default is not None:
            assert defaults[name] == field.default, name
    for name, value in family.fixed.items():
        assert defaults.get(name, value) == value, name


def test_a_model_goes_to_the_first_family_that_has_it():
    llama = decoder.PRESETS["llama-1b"]()
    assert family_for(decoder.PRESETS["gpt2-124m"]()).name == "gpt2"
    assert family_for(llama).name == "llama"
    assert family_for(dataclasses.replace(llama, window=8)).name == "mistral"
    # Whose config of transformers does not want the heads to divide the width.
    assert family_for(dataclasses.replace(llama, heads=12, head_dim=64)).name == "mistral"
    assert family_for(dataclasses.replace(llama, qkv_bias=True)).name == "qwen2"
    assert family_for(dataclasses.replace(llama, qk_norm=True)).name == "qwen3"
    for preset in ("gemma2-2b", "gemma3-1b", "gemma3-4b", "mixtral-8x7b", "olmoe-1b-7b"):
        assert family_for(decoder.PRESETS[preset]()).name[:5] == preset[:5]
    assert family_for(decoder.PRESETS["qwen3-30b-a3b"]()).name == "qwen3_moe"
    with pytest.raises(ValueError, match="llama has no mlp='gelu'"):
        family_for(decoder.tiny(), "llama")
    with pytest.raises(
        ValueError, match=r"no Hugging Face family has this model: gpt2 has .*; llama"
    ):
        family_for(decoder.tiny())


def edited(folder, *, fields=None, tensors=None):
    """A model whose config.json or tensors have been changed; None takes away."""
    llama = dict(positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, mlp_width=32)
    hf.save(folder, config := dataclasses.replace(SMALL, **llama), decoder.init(config, KEY))
    path = folder / "config.json"
    theirs = json.loads(path.read_text()) | (fields or {})
    path.write_text(json.dumps({k: v for k, v in theirs.items() if v != "absent"}))
    if tensors:
        found = {n: np.array(x[...]) for n, x in safetensors.tensors_in(folder).items()} | tensors
        found = {name: x for name, x in found.items() if x is not None}
        kinds = {name: (x.shape, x.dtype) for name, x in found.items()}
        safetensors.write(folder, kinds, found.items(), max_shard_bytes=10**9)
    return folder


def with_header(folder, fields, more=b""):
    """Changes entries of a file's header; entries without a place get it behind the others."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, values = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    for name, entry in fields.items():
        place = {"data_offsets": [len(values), len(values) + len(more)]}
        header[name] = header.get(name, place) | entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values + more)


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({}, {NORM: None}, f"lacks the tensor '{NORM}', of which 'blocks/norm_attn/scale' is made"),
        ({}, {"model.x": np.zeros(3, "f")}, "has the tensor 'model.x', for which a LlamaForCausal"),
        ({}, {NORM: np.zeros(3, "f")}, r"with the shape \[3\], and config.json says \[16\]"),
        ({"hidden_size": 32}, {}, r"'lm_head|shape \[\d+.*config.json says"),
        ({}, {"lm_head.weight": np.zeros((61, 16), "f")}, "ties lm_head.weight to model.embed_tok"),
        ({"architectures": ["BertModel"]}, {}, "its architecture is BertModel, and of llama"),
        (
            {"quantization_config": {"bits": 4}},
            {},
            "quantization_config has quant_method=None, which is not read",
        ),
        ({"attention_bias": True}, {}, "only attention_bias=False is known here of LlamaForCausal"),
        ({"hidden_act": "relu"}, {}, "hidden_act='relu' is not known here: only silu"),
        ({"hidden_size": "absent"}, {}, "it has no hidden_size, which LlamaForCausalLM needs"),
        (
            {"rope_scaling": {"type": "yarn"}},
            {},
            "rope_type='yarn' lacks factor",
        ),
        ({"hidden_size": -1}, {}, "width=-1 must be a whole number"),
        (
            {"num_hidden_layers": 10**9},
            {},
            "has 11 tensors for 1000000000 layers in config",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, tensors, message, tmp_path):
    edited(tmp_path, fields=fields, tensors=tensors)
    with pytest.raises(ValueError, match=message):
        hf.open_weights(tmp_path)


def test_what_is_no_effect_or_the_same_is_taken(tmp_path):
    tokens = safetensors.tensors_in(edited(tmp_path / "a"))["model.embed_tokens.weight"][...]
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {"lm_head.weight": tokens, buffer: np.ones(2, "f")}
    folder = edited(tmp_path / "b", fields={"use_cache": False, "unknown": None}, tensors=more)
    assert hf.open_weights(folder)["embed"]["tokens"].shape == (64, 16)


def test_names_without_their_prefix_are_read(tmp_path):
    config = dataclasses.replace(SMALL, tied=False)
    params = decoder.init(config, KEY)
    hf.save(tmp_path, config, params)
    bare = {
        name.removeprefix("transformer."): np.array(x[...])
        for name, x in safetensors.tensors_in(tmp_path).items()
    } | {"h.0.attn.bias": np.zeros((1, 1, 8, 8), "f")}
    kinds = {name: (x.shape, x.dtype) for name, x in bare.items()}
    safetensors.write(tmp_path, kinds, bare.items(), max_shard_bytes=10**9)
    for got, expected in zip(
        *(jax.tree.leaves(x) for x in (hf.load(hf.open_weights(tmp_path)), params)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_files_that_are_not_what_they_seem_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json in"):
        hf.read_config(tmp_path)
    folder = edited(tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    for wrong, message in (
        (whole[:-4], "is cut short or damaged: '[a-z._0]+' does not lie within it"),
        (whole[:100], "is not a safetensors file, or was cut short"),
        (b"\xff" * 50, "is not a safetensors file, or was cut short"),
        (whole.replace(b'"F32"', b'"I32"', 1), "in I32: only F32, F16, BF16 are read here"),
    ):
        (folder / "model.safetensors").write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            hf.open_weights(folder)
    place = [b'{"x": ', b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}']
    for entries, message in (
        (place[0] + place[1] + b', "y": ' + place[1] + b"}", "tensors overlap, leave a hole"),
        (place[0] + place[1].replace(b"0, 4", b"4, 8") + b"}", "tensors overlap, leave a hole"),
        (place[0] + place[1] + b"}", "tensors overlap, leave a hole"),
        (place[0] + place[1] + b", " + place[0][1:] + place[1] + b"}", "is not a safetensors file"),
        (place[0] + place[1].replace(b"[1]", b"[0, %d]" % 2**70) + b"}", "of 'x' say no place"),
        (place[0] + place[1].replace(b"[1]", b"%r" % ([1] * 100)) + b"}", "of 'x' say no place"),
        (b" " * (1 << 24) + b"{}", "is not a safetensors file, or was cut short"),
    ):
        raw = len(entries).to_bytes(8, "little") + entries + bytes(8)
        (folder / "model.safetensors").write_bytes(raw)
        with pytest.raises(ValueError, match=rf"model.safetensors' .*{message}"):
            safetensors.tensors_in(folder)
        if "overlap" in message:
            theirs = pytest.importorskip("safetensors", reason="needs the extra oracle")
            with pytest.raises(theirs.SafetensorError):
                theirs.safe_open(folder / "model.safetensors", "np").keys()
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / safetensors.INDEX).write_text('{"weight_map": {"x": "../model.safetensors"}}')
    with pytest.raises(ValueError, match="has no weight_map of tensors to files beside it"):
        hf.open_weights(folder)
    (folder / safetensors.INDEX).unlink()
    with pytest.raises(ValueError, match=r"pickled weights .* runs whatever code is in them"):
        hf.open_weights(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no model.safetensors and no model"):
        hf.open_weights(folder)
    with pytest.raises(ValueError, match="holds a model already: give another folder"):
        hf.save(folder, decoder.PRESETS["gpt2-124m"](), {})
    with pytest.raises(ValueError, match=r"'a' has shape \[3\], and the config says None"):
        hf.save(tmp_path / "new", decoder.PRESETS["gpt2-124m"](), {"a": np.zeros(3)})


def test_a_pipe_and_a_token_beyond_int32_are_refused(tmp_path):
    folder = edited(tmp_path / "model", fields={"eos_token_id": [1, 2**31]})
    with pytest.raises(ValueError, match=r"config.json' has eos_token_id 2147483648: no token has"):
        hf.read_config(folder)
    folder = edited(tmp_path / "other", fields={"eos_token_id": -1})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2**40}))
    with pytest.raises(ValueError, match=r"generation_config.json' has eos_token_id 1099511627776"):
        ends_of(str(folder), data.ByteTokenizer())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 7]}))
    assert ends_of(str(folder), data.ByteTokenizer()) == (256, 7)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors' is a pipe or a device: give a regul"):
        hf.open_weights(folder)


def test_of_a_single_file_and_an_index_the_file_is_read(tmp_path):
    params = decoder.init(SMALL, KEY)
    hf.save(tmp_path / "one", SMALL, params)
    other = jax.tree.map(lambda x: x + 1, params)
    hf.save(tmp_path / "shards", SMALL, other, max_shard_bytes=8000)
    for file in (tmp_path / "shards").glob("model*"):
        file.rename(tmp_path / "one" / file.name)
    assert (tmp_path / "one" / safetensors.INDEX).exists()
    got = hf.load(hf.open_weights(tmp_path / "one"))["final_norm"]["scale"]
    np.testing.assert_array_equal(got, params["final_norm"]["scale"])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "holds a model already: give another folder"),
        ("model-00001-of-00002.safetensors", "holds an unfinished export: remove it"),
        ("generation_config.json", "is not empty, it has 'generation_config.json': give another"),
        (safetensors.INDEX, f"is not empty, it has '{safetensors.INDEX}': give another folder"),
    ],
)
def test_a_model_is_saved_to_an_empty_folder_alone(file, message, tmp_path):
    (tmp_path / file).write_text("{}")
    with pytest.raises(ValueError, match=message):
        hf.save(tmp_path, SMALL, decoder.init(SMALL, KEY))
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_of_a_buffer_without_use_the_dtype_does_not_matter(tmp_path):
    hf.save(tmp_path, SMALL, decoder.init(SMALL, KEY))
    # Causal masks, as GPT-2's files of some versions have them.
    mask = {"dtype": "BOOL", "shape": [1, 1, 8, 8]}
    with_header(tmp_path, {"transformer.h.0.attn.bias": mask}, b"\1" * 64)
    assert hf.open_weights(tmp_path)["final_norm"]["scale"].shape == (16,)
    with_header(tmp_path, {"transformer.h.0.attn.rows": mask}, b"\1" * 64)
    with pytest.raises(ValueError, match=r"has the tensor 'transformer\.h\.0\.attn\.rows', for"):
        hf.open_weights(tmp_path)


def test_a_head_that_is_tied_is_compared_to_its_last_row():
    table, family = np.zeros((5000, 2), np.float32), types.SimpleNamespace(rows=())
    for row in (0, 4095, 4096, 4999):
        other = table.copy()
        other[row, 1] = 1
        with pytest.raises(ValueError, match="ties head to table, and they differ: leave head out"):
            weights._check_tied("f", family, {"head": other, "table": table}, "head", "table")


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path):
    kinds = {name: ((size,), np.dtype("float32")) for name, size in (("a", 9), ("b", 1), ("c", 9))}
    values = ((name, np.ones(shape, dtype)) for name, (shape, dtype) in kinds.items())
    safetensors.write(tmp_path, kinds, values, max_shard_bytes=8)
    places = read_json(tmp_path / safetensors.INDEX)["weight_map"]
    assert places == {n: f"model-0000{i}-of-00003.safetensors" for i, n in enumerate("abc", 1)}
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_the_table_of_a_tied_model_may_have_the_name_of_the_head(tmp_path):
    table = safetensors.tensors_in(edited(tmp_path / "a"))["model.embed_tokens.weight"][...]
    names = {"model.embed_tokens.weight": None, "lm_head.weight": table}
    folder = edited(tmp_path / "b", tensors=names)
    got = hf.load(hf.open_weights(folder))["embed"]["tokens"]
    np.testing.assert_array_equal(got[:61], table)
    assert all(found.equal for found in hf.check(folder))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data_offsets": [0, 4, 5]}, r"and data_offsets \[0, 4, 5\] of 'transformer.ln_f.weight'"),
        ({"data_offsets": 64}, "and data_offsets 64 of"),
        ({"shape": [16.0]}, r"shape \[16.0\] and"),
        ({"shape": [-4, -4]}, r"shape \[-4, -4\] and"),
        ({"dtype": ["F32"]}, r"is damaged: dtype \['F32'\], shape"),
    ],
)
def test_entries_of_a_header_that_say_no_place_are_refused(entry, message, tmp_path):
    hf.save(tmp_path, SMALL, decoder.init(SMALL, KEY))
    with_header(tmp_path, {"transformer.ln_f.weight": entry})
    with pytest.raises(ValueError, match=message):
        hf.open_weights(tmp_path)


def test_a_header_nested_by_the_thousand_is_refused_in_a_sentence(tmp_path):
    hf.save(tmp_path, SMALL, decoder.init(SMALL, KEY))
    text = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        hf.open_weights(tmp_path)


@pytest.mark.parametrize(
    "file", ["..", ".", "", "/etc/passwd", "a\0.safetensors", "config.json", 1]
)
def test_an_index_names_files_beside_it(file, tmp_path):
    hf.save(tmp_path, SMALL, decoder.init(SMALL, KEY))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    index = {"weight_map": {"transformer.ln_f.weight": file}}
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="has no weight_map of tensors to files beside it"):
        hf.open_weights(tmp_path)
    index["weight_map"]["transformer.ln_f.weight"] = "model-2.safetensors"
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    with pytest.raises(
        FileNotFoundError, match=f"no model-2.safetensors in .*, which {safetensors.INDEX}"
    ):
        hf.open_weights(tmp_path)


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_a_dtype_that_no_file_has_is_refused_before_anything_is_written(dtype, tmp_path):
    params = decoder.init(SMALL, KEY)
    with pytest.raises(
        ValueError, match=f"would be {dtype} in the file: give dtype as one of float"
    ):
        hf.save(tmp_path / "out", SMALL, params, dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_parts_of_one_tensor_of_several_dtypes_have_one_for_all(tmp_path):
    params = decoder.init(SMALL, KEY)
    parts = params["blocks"]["attn"]
    for name, dtype in {"q": jnp.bfloat16, "k": jnp.float16}.items():
        parts[name]["kernel"] = parts[name]["kernel"].astype(dtype)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].astype(jnp.bfloat16)
    hf.save(tmp_path, SMALL, params)
    # Most are float32, and that is what is said of the whole.
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    got = hf.load(hf.open_weights(tmp_path))["blocks"]["attn"]
    for name in "qkv":
        assert got[name]["kernel"].dtype == np.float32
        expected = np.asarray(parts[name]["kernel"], np.float32)
        np.testing.assert_array_equal(got[name]["kernel"], expected)


def test_values_that_the_narrower_dtype_has_not_are_refused(tmp_path):
    params = decoder.init(SMALL, KEY)
    kernel = params["blocks"]["mlp"]["up"]["kernel"].at[0, 0, 0].set(70_000.0)
    params["blocks"]["mlp"]["up"]["kernel"] = kernel
    hf.save(tmp_path / "wide", SMALL, params, dtype=jnp.bfloat16)
    with pytest.raises(
        ValueError, match="'blocks/mlp/up/kernel' has values that are infinite in f"
    ):
        hf.save(tmp_path / "narrow", SMALL, params, dtype="float16")
