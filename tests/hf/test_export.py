"""``jaxtrain export``: what other programs compute of a model is what it computes here."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxtrain import data, hf
from jaxtrain.hf import gguf_file, onnx_file, stablehlo
from jaxtrain.hf.families import FAMILIES
from jaxtrain.hf.weights import QWEN_WORDS
from jaxtrain.models import convnet, decoder, encoder, encoder_decoder, vit
from jaxtrain.ops.rotary import DynamicScaling, Llama3Scaling
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.stages import run_layers
from tests import forms
from tests.commands import refused, run
from tests.hf import models

SIZES = {"vocab_size": 61, "layers": 2, "width": 32, "heads": 4}
LLAMA = decoder.DecoderConfig(**SIZES, seq_len=24, **forms.LLAMA)
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 64)
BERT = encoder.EncoderConfig(**SIZES, seq_len=24)
CONVNET = convnet.ConvNetConfig(image=(8, 12, 3), classes=5, channels=(6, 16, 12))
# By name: the module and the model. The first is in the everyday tests.
FORMS = {
    # As the default GPT, which no family of transformers has.
    "tiny": (decoder, dataclasses.replace(decoder.tiny(), **SIZES | {"heads": 2})),
    # With distances beyond the last bucket's.
    "t5": (
        encoder_decoder,
        dataclasses.replace(encoder_decoder.tiny(), **SIZES, buckets=8, max_distance=6),
    ),
    "bert": (encoder, BERT),
    "vit": (vit, vit.ViTConfig(image=(8, 8, 3), patch=2, layers=1, width=24, heads=3, classes=9)),
    "convnet": (convnet, CONVNET),
    "group": (convnet, dataclasses.replace(CONVNET, norm="group")),
    "gpt2": (decoder, decoder.DecoderConfig(**SIZES, seq_len=24)),
    "windows": (decoder, dataclasses.replace(LLAMA, window=5, window_pattern=(True, False))),
    "delta": (decoder, dataclasses.replace(LLAMA, delta_pattern=(True, False))),
    "dynamic": (decoder, dataclasses.replace(LLAMA, rope_scaling=DynamicScaling(4.0, 10))),
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
DAILY, SLOW = list(FORMS)[:1], list(FORMS)[1:]

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
    params = getattr(module, "variables", module.init)(config, jax.random.key(0))
    return jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )


def batches(config):
    """Batches of two numbers of rows and, where there are any, lengths."""
    rng = np.random.default_rng(0)
    for rows, length in ((1, 24), (3, 7)):
        # None is 1, which is RoBERTa's padding: that has no position.
        tokens = rng.integers(2, 61, (rows, length)).astype(np.int32)
        seen = (np.arange(length) < 1 + rng.integers(0, length, (rows, 1))).astype(np.int32)
        if isinstance(config, vit.ViTConfig | convnet.ConvNetConfig):
            yield {"image": rng.random((rows, *config.image), np.float32)}
        elif isinstance(config, encoder_decoder.T5Config):
            source = {"source": tokens, "source_segments": seen}
            yield source | {"tokens": rng.integers(0, 61, (rows, length + 3)).astype(np.int32)}
        elif isinstance(config, encoder.EncoderConfig):
            types = {"types": tokens % config.token_types} if config.token_types else {}
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
    pytest.importorskip("flatbuffers")
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
    pytest.importorskip("flatbuffers")
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


ROPE = {"positions": "rope", "norm": "rmsnorm", "bias": False, "kv_heads": 1, "vocab_size": 61}
GEMMA = {"norm_offset": True, "norm_position": "sandwich", "embed_scale": True, "mlp": "geglu"}
GEMMA |= {"width": 32, "heads": 2, "head_dim": 256, "window": 5, "norm_eps": 1e-6, "seq_len": 24}
# Such as transformers reads whole: of what a file says it takes the sizes, and has its own
# families' usual values of the rest.
GGUF = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "gpt2": dataclasses.replace(FORMS["gpt2"][1], seq_len=1024, vocab_size=300),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, tied=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=128),
    "gemma2": decoder.DecoderConfig(
        **ROPE | GEMMA,
        layers=3,
        window_pattern=(True, False),
        attention_softcap=50.0,
        logit_softcap=30.0,
    ),
    "gemma3_text": decoder.DecoderConfig(
        **ROPE | GEMMA,
        layers=7,
        window_pattern=(*[True] * 5, False),
        qk_norm=True,
        rope_theta=1e6,
        local_rope_theta=1e4,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", GGUF)
def test_transformers_computes_the_same_of_a_gguf_file(family, tmp_path):
    library, gguf = models.transformers(), pytest.importorskip("gguf")
    import torch

    config = GGUF[family]
    params, files = drawn(decoder, config), {}
    if family == "gpt2":  # of whose tokens transformers takes the number
        files = {"tokenizer.json": byte_level().to_json()}
    folder = tmp_path / "model"
    gguf_file.save(folder, config, params, family=family, files=files)
    opened = library.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    for batch in batches(config):
        with torch.no_grad():
            theirs = opened(torch.tensor(batch["tokens"])).logits.numpy()
        ours = decoder.logits(config, params, batch["tokens"])
        np.testing.assert_allclose(theirs, ours, atol=1e-4 * max(1, np.abs(ours).max()))
    read = gguf.GGUFReader(tmp_path / "model" / "model.gguf")
    assert {str(x.tensor_type.name) for x in read.tensors} == {"F32"}
    assert read.fields["general.architecture"].contents() == gguf_file.ARCHITECTURES[family]


TEXTS = ["the thesis of the theme", "It's 12345 things\n\n and  é中 more", " a", ""]


def byte_level():
    text = " ".join(f"{word} {n}" for n in range(200) for word in TEXTS)
    return data.SubwordTokenizer.train([text.encode()], 290)


def sentencepiece():
    """As of Llama 2: words begin with a mark, and what is unknown is bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    parts = tokenizers.normalizers
    marks = [parts.Prepend("\u2581"), parts.Replace(" ", "\u2581")]
    trained.normalizer = parts.Sequence(marks)
    trained.decoder = tokenizers.decoders.ByteFallback()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, show_progress=False
    )
    words = ["the", "thesis", "of", "the", "theme", "is", "the", "theme", "of", "a", "thesis"]
    trained.train_from_iterator(words * 9, trainer)
    state = json.loads(trained.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are no special tokens
    # All pairs that make a token, in the order of the tokens, as converters write them.
    vocab = state["model"]["vocab"]
    cuts = ((token[:i], token[i:]) for token in vocab for i in range(1, len(token)))
    state["model"]["merges"] = [pair for pair in cuts if vocab.keys() >= {*pair}]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return json.dumps(state)


def with_split(own, pattern):
    state = json.loads(own)
    words = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    state["pre_tokenizer"] |= {"use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [words, state["pre_tokenizer"]]}
    return json.dumps(state)


@pytest.mark.parametrize("kind", ["gpt2", "llama", *gguf_file.SPLITS.values()])
def test_a_gguf_file_has_the_tokenizer(kind, tmp_path):
    library, tokenizers = models.transformers(), pytest.importorskip("tokenizers")
    own = sentencepiece() if kind == "llama" else byte_level().to_json()
    for pattern, name in gguf_file.SPLITS.items():
        own = with_split(own, pattern) if kind == name else own
    config = dataclasses.replace(LLAMA, vocab_size=330)
    fields = {"bos_token_id": 1, "eos_token_id": [2, 0]} if kind == "llama" else {"eos_token_id": 0}
    files = {"tokenizer.json": own, "chat_template.jinja": "{{ messages }}"}
    folder = tmp_path / "model"
    gguf_file.save(folder, config, drawn(decoder, config), fields=fields, files=files)
    opened = library.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    wanted = tokenizers.Tokenizer.from_str(own)
    for text in TEXTS:
        ids = opened(text, add_special_tokens=False)["input_ids"]
        if (kind, text) != ("llama", " a"):  # which transformers reads as "a" from a GGUF file
            assert ids == wanted.encode(text, add_special_tokens=False).ids, text
    assert opened.chat_template == "{{ messages }}"
    assert opened.eos_token == ("</s>" if kind == "llama" else "<|endoftext|>")
    read = pytest.importorskip("gguf").GGUFReader(folder / "model.gguf").fields
    assert len(read["tokenizer.ggml.tokens"].data) == 330
    assert read["tokenizer.ggml.add_bos_token"].contents() == (kind == "llama")


def test_a_tokenizer_that_is_not_qwens_is_said_to_need_its_class(tmp_path, recwarn):
    config = dataclasses.replace(GGUF["qwen2"], vocab_size=300)
    save = lambda name, text: hf.save(  # noqa: E731
        tmp_path / name,
        config,
        drawn(decoder, config),
        family="qwen2",
        files={"tokenizer.json": text},
    )
    state = json.loads(with_split(byte_level().to_json(), QWEN_WORDS))
    save("qwen", json.dumps(state))
    assert not recwarn
    with pytest.warns(UserWarning, match="opens the tokenizer of every qwen2 model as Qwen's"):
        save("bytes", byte_level().to_json())
    library = models.transformers()
    for name, alike in (("qwen", True), ("bytes", False)):
        tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / name)
        plain = library.PreTrainedTokenizerFast.from_pretrained(tmp_path / name)
        assert (tokenizer.encode(TEXTS[1]) == plain.encode(TEXTS[1])) == alike


METASPACE = {
    "type": "Metaspace",
    "replacement": "\u2581",
    "prepend_scheme": "first",
    "split": False,
}
# The cause that the error names, with a part of tokenizer.json and its change.
OTHERS = {
    "ByteLevel(add_prefix_space=False, use_regex=False)": ("pre_tokenizer", {"use_regex": False}),
    "ByteLevel(add_prefix_space=True, use_regex=True)": (
        "pre_tokenizer",
        {"add_prefix_space": True},
    ),
    "it splits texts by WhitespaceSplit": ("pre_tokenizer", None),
    "its normalizer is Lowercase": ("normalizer", {"type": "Lowercase"}),
    "it has ignore_merges=True": ("model", {"ignore_merges": True}),
    "its model has dropout=0.5": ("model", {"dropout": 0.5}),
    "its token '<|endoftext|>' has lstrip": ("added_tokens", {"lstrip": True}),
}


def changed(text, part, change):
    """A tokenizer.json with a change of a part."""
    state = json.loads(text)
    if part == "added_tokens":
        state[part][0] |= change
    elif change is None:
        steps = [{"type": "WhitespaceSplit"}, state[part]]
        state[part] = {"type": "Sequence", "pretokenizers": steps}
    else:
        state[part] = (state[part] or {}) | change
    return json.dumps(state)


@pytest.mark.parametrize(("cause", "change"), OTHERS.items(), ids=list(OTHERS))
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(cause, change):
    state = json.loads(byte_level().to_json())
    state["model"]["vocab"]["zq"] = 290  # no merge makes it
    text = json.dumps(state)
    assert gguf_file._tokenizer({"tokenizer.json": text}, 291)["pre"] == "gpt-2"
    with pytest.raises(ValueError, match=re.escape(cause)):
        gguf_file._tokenizer({"tokenizer.json": changed(text, *change)}, 291)


def test_a_tokenizer_of_marks_is_refused_where_spaces_or_merges_differ():
    state = json.loads(sentencepiece())
    state["model"]["vocab"] |= {"hem": 330, "them": 331}
    *pairs, last = state["model"]["merges"]
    hem, two = [["he", "m"]], [["the", "m"], ["t", "hem"]]
    read = lambda **change: gguf_file._tokenizer(  # noqa: E731
        {"tokenizer.json": json.dumps(state | change)}, 332
    )
    merging = lambda *merges: {"model": state["model"] | {"merges": merges}}  # noqa: E731
    state |= merging(*pairs, *hem, *two, last)
    assert read()["space"]
    for cause, change in {
        "marks spaces by Metaspace": {"normalizer": None, "pre_tokenizer": METASPACE},
        "it has no token for some bytes": {"model": state["model"] | {"byte_fallback": False}},
        "it does not merge 't' and 'hem' to": merging(*pairs, *hem, two[0], last),
        "its merges to 'them' are not": merging(*pairs, *hem, two[0], last, two[1]),
    }.items():
        with pytest.raises(ValueError, match=cause):
            read(**change)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["marks", "whole words", *gguf_file.PRES])
def test_llama_cpp_cuts_texts_the_same(kind, tmp_path):
    cpp, tokenizers = pytest.importorskip("xllamacpp"), pytest.importorskip("tokenizers")
    state = json.loads(sentencepiece() if kind == "marks" else byte_level().to_json())
    if kind != "marks":
        steps = gguf_file.PRES["llama-bpe" if kind == "whole words" else kind]
        steps = [{"trim_offsets": True} | step for step in steps]
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    if kind == "whole words":
        state["model"]["vocab"]["zq"] = 290
        state["model"]["ignore_merges"] = True
    file, content = tmp_path / "model" / "model.gguf", json.dumps(state)
    config = dataclasses.replace(LLAMA, vocab_size=330)
    fields, files = {"bos_token_id": 1, "eos_token_id": 2}, {"tokenizer.json": content}
    gguf_file.save(file.parent, config, drawn(decoder, config), fields=fields, files=files)
    options = cpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = str(file), 64, 1, False
    server, tokenizer = cpp.Server(options), tokenizers.Tokenizer.from_str(content)
    r = np.random.default_rng(0)
    drawn_texts = [
        "".join(r.choice(list("ab \n\t.'s1zq<>thé")) for _ in range(60)) for _ in range(30)
    ]
    for text in (*TEXTS[:3], "zq zq", "a</s>b </s> c", "10 100 1000", *drawn_texts):
        query = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", query)
        tokens = json.loads(urllib.request.urlopen(request).read())["tokens"]
        assert tokens == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    "family",
    [
        x if x in ("llama", "gpt2") else pytest.param(x, marks=pytest.mark.slow)
        for x in [*GGUF, "stretched", "bytes"]
    ],
)
def test_llama_cpp_computes_the_same(family, tmp_path):
    """Of numbers of tokens, and of texts, which it cuts into tokens itself."""
    cpp, tokenizers = pytest.importorskip("xllamacpp"), pytest.importorskip("tokenizers")
    config = GGUF.get(family, dataclasses.replace(LLAMA, rope_scaling=LLAMA3))
    own = sentencepiece() if family in ("llama", "gemma2") else byte_level().to_json()
    wanted = tokenizers.Tokenizer.from_str(own)
    encode, size = (lambda text: wanted.encode(text).ids), wanted.get_vocab_size()
    if family == "bytes":
        config, encode, size = LLAMA, (lambda text: list(text.encode())), 257
    config = dataclasses.replace(config, vocab_size=size, seq_len=max(64, config.seq_len))
    params, file = drawn(decoder, config), tmp_path / "model" / "model.gguf"
    fields = {"bos_token_id": 1, "eos_token_id": 2}
    files = {} if family == "bytes" else {"tokenizer.json": own}
    family = family if family in GGUF else "llama"
    gguf_file.save(file.parent, config, params, family=family, fields=fields, files=files)
    options = cpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(file), 64, 1
    options.warmup, options.cpuparams.n_threads = False, 1
    # Neither keys and values nor scores in float16.
    options.cache_type_k = options.cache_type_v = cpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = cpp.Server(options)
    draw = {"n_predict": 1, "n_probs": size, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    # It has the GELU of 65,536 numbers in float16, in a table.
    close = 2e-5 if config.mlp == "swiglu" else 2e-3
    asked = [np.random.default_rng(0).integers(3, 60, n).tolist() for n in (3, 20)]
    for prompt in (*asked, *TEXTS[:2]):
        given = {"prompt": prompt, "cache_prompt": False, "seed": 1, "ignore_eos": True}
        (found,) = server.handle_completions(given | draw)["choices"][0]["logprobs"]["content"]
        theirs = {each["id"]: each["logprob"] for each in found["top_logprobs"]}
        ids = encode(prompt) if isinstance(prompt, str) else prompt
        ours = jax.nn.log_softmax(decoder.logits(config, params, np.array([ids]))[0, -1])
        ours = ours - jax.nn.logsumexp(ours[np.array(list(theirs))])  # without the end of texts
        assert len(theirs) >= size - 2
        for id, logprob in theirs.items():
            assert logprob == pytest.approx(float(ours[id]), abs=close), (prompt, id)


def test_what_llama_cpp_lacks_is_refused():
    gemma2, gemma3 = GGUF["gemma2"], GGUF["gemma3_text"]
    changes = {
        "in no layer": (LLAMA, {"window": 5}, "mistral"),
        "this one scores": (LLAMA, {"head": "score"}, "llama"),
        "no bert here": (LLAMA, {}, "bert"),
        "in all layers but one of 2": (gemma2, {"window_pattern": (True,)}, "gemma2"),
        "sqrt(256)": (gemma2, {"query_pre_attn_scalar": 9.0}, "gemma2"),
        "no head of its own": (gemma2, {"tied": False}, "gemma2"),
        "a cap on scores": (gemma2, {"attention_softcap": None}, "gemma2"),
        "a cap on logits": (gemma2, {"logit_softcap": None}, "gemma2"),
        "no cap on logits": (gemma3, {"logit_softcap": 3.0}, "gemma3_text"),
        "of base 10000": (gemma3, {"local_rope_theta": 5.0}, "gemma3_text"),
        "no rope_type llama3": (GGUF["qwen2"], {"rope_scaling": LLAMA3}, "qwen2"),
        "dynamic and longrope are not": (LLAMA, {"rope_scaling": DynamicScaling(4.0, 10)}, "llama"),
        "GELU by tanh": (GGUF["gpt2"], {"mlp": "gelu_exact"}, "gpt2"),
    }
    for said, (config, change, family) in changes.items():
        assert said in gguf_file.obstacle(dataclasses.replace(config, **change), family)
    for family, config in GGUF.items():
        assert gguf_file.obstacle(config, family) is None


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_a_gguf_file_has_its_dtype_and_stretched_positions(dtype, tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    config = dataclasses.replace(LLAMA, rope_scaling=LLAMA3)
    hf.save(tmp_path / "model", config, drawn(decoder, config))
    flags = ["--format", "gguf", "--out", str(tmp_path / "out"), "--dtype", dtype]
    status, printed, error = run(capsys, "export", "--model", str(tmp_path / "model"), *flags)
    assert (status, error) == (0, "")
    assert printed.endswith("model.gguf of llama.cpp's architecture llama\n")
    read = {x.name: x for x in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    kinds = {name: x.tensor_type.name for name, x in read.items()}
    assert kinds["blk.1.ffn_norm.weight"] == "F32"
    assert kinds["blk.1.ffn_up.weight"] == {"float16": "F16", "bfloat16": "BF16"}[dtype]
    theirs = read["blk.1.ffn_up.weight"]
    theirs = gguf.dequantize(theirs.data, theirs.tensor_type)
    ours = hf.open_weights(tmp_path / "model")["blocks"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(theirs.T, np.asarray(ours)[1].astype(dtype).astype(np.float32))
    # By how much each pair of features turns less than without the scaling: between 1 and 8.
    stretched = models.transformers().AutoConfig.from_pretrained(tmp_path / "model")
    rotary = models.transformers().models.llama.modeling_llama.LlamaRotaryEmbedding(stretched)
    plain = 1e4 ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(
        read["rope_freqs.weight"].data, plain / rotary.inv_freq.numpy(), rtol=1e-5
    )
    assert set(read["rope_freqs.weight"].data.tolist()) >= {1.0, 8.0}


ONNX = {name: (decoder, config) for name, config in GGUF.items()}
ONNX |= {name: FORMS[name] for name in ("bert", "t5", "vit", "states", "classes")}
ONNX |= {name: FORMS[name] for name in ("convnet", "group")}
ONNX["states"] = (encoder, dataclasses.replace(BERT, head="none"))
ONNX["roberta"] = (encoder, dataclasses.replace(BERT, token_types=1, unused_positions=2))
ONNX["mistral"] = (decoder, dataclasses.replace(LLAMA, window=5))
ONNX["modernbert"] = (
    encoder,
    dataclasses.replace(
        BERT,
        **{"positions": "rope", "local_rope_theta": 1e3, "window": 5, "mlp": "geglu_exact"},
        **{"window_pattern": (False, True), "norm_position": "pre", "norm_eps": 1e-5},
        **{"bias": False, "token_types": None, "pooling": "mean"},
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONNX)
def test_onnxruntime_computes_the_same(name, tmp_path, capfd):
    models.transformers()
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module, config = ONNX[name]
    params, out = drawn(module, config), tmp_path / "out"
    family = name if name in GGUF else None
    takes = onnx_file.save(out, config, params, family=family, files={"tokenizer.json": "{}"})
    assert sorted(path.name for path in out.iterdir()) == ["model.onnx", "tokenizer.json"]
    session = runtime.InferenceSession(out / "model.onnx")
    for batch in batches(config):
        seen = batch.get("segments", np.ones_like(batch.get("tokens", 0)))
        given = {"input_ids": batch.get("tokens"), "attention_mask": seen}
        given["token_type_ids"] = batch.get("types")
        if module is encoder_decoder:
            given = {"input_ids": batch["source"], "attention_mask": batch["source_segments"]}
            given["decoder_input_ids"] = batch["tokens"]
        if module in (vit, convnet):
            given = {"pixel_values": batch["image"].transpose(0, 3, 1, 2)}
        ids = {name: x for name, x in given.items() if name in takes}
        ids = {n: x if x.dtype == np.float32 else x.astype(np.int64) for n, x in ids.items()}
        (theirs,) = session.run(None, ids)
        ours = np.asarray(computed(module, config, params, batch))
        # What padding is told hangs on what padding sees, and is nobody's.
        kept = seen > 0 if module is encoder and ours.ndim == 3 else slice(None)
        np.testing.assert_allclose(theirs[kept], ours[kept], atol=1e-4)


def test_onnx_has_no_dynamic_positions(tmp_path):
    with pytest.raises(ValueError, match="rope_type is dynamic or longrope: a model"):
        onnx_file.save(tmp_path / "out", FORMS["dynamic"][1], {})


def test_the_table_of_formats_is_what_is_tested():
    text = (pathlib.Path(__file__).parents[2] / "jaxtrain/hf/README.md").read_text()
    lines = re.search(r"\| family \| safetensors .*?\n\n", text, re.DOTALL)[0].splitlines()[:-1]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    del rows[1]  # the line below the names
    tested = {
        "safetensors": FAMILIES,
        "stablehlo": {n for n, x in FAMILIES.items() if x.module in {m for m, _ in FORMS.values()}},
        "gguf": GGUF,
        "onnx": ONNX,
    }
    tested["stablehlo"] |= {"of no family"} if "tiny" in FORMS else set()
    tested["stablehlo"] |= FORMS.keys() & {"convnet"}
    wanted = [
        [family, *("yes" if family in tested[name] else "no" for name in tested)]
        for family in [*FAMILIES, "convnet", "of no family"]
    ]
    assert rows == [["family", *tested], *wanted]
    assert set(gguf_file.ARCHITECTURES) == set(GGUF)
