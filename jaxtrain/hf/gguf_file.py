"""A decoder as a GGUF file, which llama.cpp opens, and all that is built on it.

Names of tensors are the package gguf's own, found by those of a Hugging Face folder; what
llama.cpp computes of a file is fixed by its architecture, so what a model has besides is refused.

Shapes: V tokens, D width, H heads, K features per head.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.chat import TEMPLATE, TOKENIZER_CONFIG
from jaxtrain.data.tokenizers import EOD, ByteTokenizer, byte_alphabet
from jaxtrain.hf.families import family_for
from jaxtrain.hf.weights import QWEN_WORDS, check_new, written
from jaxtrain.host import extras
from jaxtrain.models.config import windows_of
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.ops.rotary import ByRow, LinearScaling, Llama3Scaling, YarnScaling
from jaxtrain.tree import PyTree, named_leaves

FILE = "model.gguf"
# llama.cpp's names by the family's.
ARCHITECTURES = {name: name for name in ("gpt2", "llama", "qwen2", "qwen3", "gemma2")}
ARCHITECTURES |= {"mistral": "llama", "gemma3_text": "gemma3"}
# Which layers have a window, by architecture: each but one of so many; the others have none.
WINDOWS = {"gemma2": 2, "gemma3": 6}
# Layers of the models whose scores are divided by sqrt(D / H), and not by sqrt(K).
OTHER_SCALE = {("gemma2", 46), ("gemma3", 62)}
# llama.cpp's names of pre-tokenizers by their regexes, and the steps of a tokenizer.json that its
# byte-level tokenizers are equal to, by their names.
SPLITS = {QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe", QWEN_WORDS: "qwen2"}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_BYTE_WORDS = _BYTES | {"use_regex": True}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PRES = {name: [_SPLIT | {"pattern": {"Regex": x}}, _BYTES] for x, name in SPLITS.items()}
PRES |= {"gpt-2": [_BYTE_WORDS]}
PRES |= {"smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_WORDS]}
# The normalizers and pre-tokenizers that its tokenizer of marked spaces is equal to, and whether a
# space comes before each text. Gemma's pre-tokenizer finds no space, because all are marked.
_SPACE = {"pattern": {"String": " "}}
_MARK = {"type": "Replace", "content": "\u2581"} | _SPACE
_FRONT = {"type": "Prepend", "prepend": "\u2581"}
_PARTS = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False}
_GEMMA = _SPLIT | _SPACE | {"behavior": "MergedWithPrevious"}
MARKS = [([_FRONT, _MARK], [], True), ([_MARK], [], False), ([_MARK], [_GEMMA], False)]
MARKS += [([], [_PARTS], False)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def save(
    folder: str | Path,
    config: DecoderConfig,
    params: PyTree,
    *,
    family: str | None = None,
    dtype: Any = None,
    fields: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> str:
    """Writes a folder with a file ``model.gguf``, and returns llama.cpp's name of its architecture.

    Biases and scales of norms are float32, as llama.cpp wants them.

    Args:
      folder: new, or empty.
      config, params, family, fields: as of :func:`jaxtrain.hf.save`.
      dtype: of the tables and kernels; None means that of each.
      files: texts by name, of which tokenizer.json, the chat template and tokenizer_config.json
        go into the file; without the first, the tokenizer is that of bytes where there are as many
        tokens, and else there is none.

    Raises:
      ImportError: the package gguf is not installed.
      ValueError: llama.cpp has no such model, or no such tokenizer.
    """
    gguf = extras.load("a GGUF file needs gguf", "export", "gguf")
    family, folder = family_for(config, family), Path(folder)
    if reason := obstacle(config, family.name):
        raise ValueError(f"llama.cpp has no such model: {reason}; use --format stablehlo")
    name, files = ARCHITECTURES[family.name], files or {}
    check_new(folder)
    tokens = _tokenizer(files, config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / FILE, name, use_temp_file=True)  # one tensor in memory
    writer.add_name(folder.name)
    _add_sizes(writer, config)
    _add_tokens(writer, tokens, fields or {}, files)
    (arch,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.layers)
    leaves, (rows, _) = named_leaves(params), family.rows_of(config)
    dtypes = {path: np.dtype(dtype or x.dtype) for path, x in leaves.items()}
    for theirs, value in written(rows, leaves, config, dtypes):
        value = _as_stored(name, config, theirs, value)
        kind = "F32" if value.ndim == 1 or "wpe" in theirs else _kind(value.dtype)
        kind = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), kind)
        own = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(own, data, raw_dtype=kind)
    if isinstance(scaling := config.rope_scaling, Llama3Scaling):
        steps = np.arange(0, config.block.head_dim, 2) / config.block.head_dim
        frequencies = config.rope_theta**-steps
        factors = frequencies / np.asarray(scaling.scaled(frequencies), np.float64)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return name


def obstacle(config: DecoderConfig, family: str) -> str | None:
    """Returns what of a model llama.cpp's of its family lacks; None where it has all."""
    name = ARCHITECTURES.get(family)
    if name is None:
        return f"it has no {family} here, but {', '.join(ARCHITECTURES)}"
    if config.head != "tokens":
        return "its models predict tokens, and this one scores texts"
    every, windows = WINDOWS.get(name), windows_of(config)
    if windows != [every is not None and (l + 1) % every != 0 for l in range(config.layers)]:
        of_all = "in no layer" if every is None else f"in all layers but one of {every}"
        return f"its {name} has a window {of_all}"
    wide = (name, config.layers) in OTHER_SCALE
    scale = config.width // config.heads if wide else config.block.head_dim
    if config.block.query_pre_attn_scalar != scale:
        return f"its {name} divides scores by sqrt({scale})"
    if every is not None and not config.tied:
        return f"its {name} has no head of its own"
    if (name == "gemma2") != (config.attention_softcap is not None):
        return f"its {name} has {'a' if name == 'gemma2' else 'no'} cap on scores"
    if (name == "gemma2") != (config.logit_softcap is not None):
        return f"its {name} has {'a' if name == 'gemma2' else 'no'} cap on logits"
    if name == "gemma3" and config.local_rope_theta != 1e4:
        return "its gemma3 has rotary positions of base 10000 in layers with a window"
    if isinstance(config.rope_scaling, YarnScaling | ByRow):
        return "rope_type yarn, dynamic and longrope are not written"
    if isinstance(config.rope_scaling, Llama3Scaling) and name != "llama":
        return f"its {name} has no rope_type llama3"
    if config.mlp == "gelu_exact":
        return "its gpt2 has the GELU by tanh"
    return None


def _add_sizes(writer: Any, config: DecoderConfig) -> None:
    block = config.block
    writer.add_context_length(config.seq_len)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    if config.positions == "learned":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_head_count_kv(block.kv_heads)
    writer.add_key_length(block.head_dim)
    writer.add_value_length(block.head_dim)
    writer.add_rope_dimension_count(block.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if isinstance(config.rope_scaling, LinearScaling):
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if config.window is not None:
        writer.add_sliding_window(config.window)
    if config.attention_softcap is not None:
        writer.add_attn_logit_softcapping(config.attention_softcap)
        writer.add_final_logit_softcapping(config.logit_softcap)


def _as_stored(arch: str, config: DecoderConfig, name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of a Hugging Face folder as llama.cpp has it."""
    if arch == "gpt2" and value.ndim == 2 and ".h." in name:
        return value.T  # Conv1D keeps its kernels as [inputs, outputs]
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return value.astype(np.float32) + 1
    if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        # llama.cpp turns neighbours by one angle, and Llama's files the two halves of a head.
        halves = value.reshape(-1, 2, config.block.head_dim // 2, value.shape[1])
        return halves.swapaxes(1, 2).reshape(value.shape)
    return value


def _kind(dtype: np.dtype) -> str:
    return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype.name]


def _tokenizer(files: Mapping[str, str], vocab_size: int) -> dict[str, Any]:
    """What llama.cpp knows of a tokenizer.json, or of bytes; nothing where there is neither.

    Raises:
      ValueError: it has no such tokenizer.
    """
    if "tokenizer.json" not in files:
        if vocab_size != (bytes_ := ByteTokenizer()).vocab_size:
            return {}
        letters = sorted(byte_alphabet().items(), key=lambda pair: pair[1])
        return {
            "tokens": [*(letter for letter, _ in letters), EOD],
            "types": [NORMAL] * bytes_.eod + [CONTROL],
            "bos": None,
            "add_eos": False,
            "model": "gpt2",
            "pre": "gpt-2",
            # llama.cpp wants one at least: of bytes that are in no UTF-8.
            "merges": [" ".join([letters[255][0]] * 2)],
        }
    return _of_json(files["tokenizer.json"], vocab_size)


def _of_json(text: str, vocab_size: int) -> dict[str, Any]:
    """The fields of a tokenizer.json that llama.cpp cuts into the same tokens.

    Raises:
      ValueError: it would cut some text into other tokens.
    """
    library = extras.load("tokenizer.json in a GGUF file needs tokenizers", "text", "tokenizers")
    try:
        tokenizer = library.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises no narrower one
        raise ValueError(f"tokenizer.json is none that tokenizers reads ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    state = json.loads(tokenizer.to_str())
    model, added = state["model"], {x["content"]: x for x in state["added_tokens"]}
    if model["type"] != "BPE":
        raise ValueError(
            f"tokenizer.json is {model['type']}: of llama.cpp's tokenizers BPE alone is written "
            "here; use --format safetensors"
        )
    vocab, pairs = model["vocab"], [tuple(pair) for pair in model["merges"]]
    normal, words = (list(_steps(state[part])) for part in ("normalizer", "pre_tokenizer"))
    for token in added.values():
        flags = ["lstrip", "rstrip", "single_word", *["normalized"] * (_FRONT in normal)]
        if flag := next((flag for flag in flags if token[flag]), None):
            raise _no_equal(f"its token {token['content']!r} has {flag}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model[option]:
            raise _no_equal(f"its model has {option}={model[option]!r}")
    pieces = {id: piece for piece, id in vocab.items()}
    kinds = {id: BYTE if _is_byte(piece) else NORMAL for id, piece in pieces.items()}
    if model.get("unk_token") is not None:
        kinds[vocab[model["unk_token"]]] = UNKNOWN
    for token in added.values():
        pieces[token["id"]] = token["content"]
        if kinds.get(token["id"]) != UNKNOWN:
            kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    example = tokenizer.encode("x")
    first, *middle, last = [*example.special_tokens_mask, 0, 0][: max(2, len(example))]
    if any(middle):
        raise _no_equal("it puts several special tokens beside a text")
    tokens = {
        "tokens": [pieces.get(id, f"[PAD{id}]") for id in range(vocab_size)],
        "types": [kinds.get(id, UNUSED) for id in range(vocab_size)],
        "bos": example.ids[0] if first else None,
        "add_eos": bool(last),
    }
    if "ByteLevel" in {step["type"] for step in words}:
        pre = next((name for name, steps in PRES.items() if steps == words), None)
        if pre is None:
            raise _no_equal(f"it splits texts by {_named(words)}")
        if normal not in ([], [{"type": "NFC"}]):  # nearly all text is composed already
            raise _no_equal(f"its normalizer is {_named(normal)}")
        alphabet, merges = byte_alphabet(), [" ".join(pair) for pair in pairs]
        tokens |= {"model": "gpt2", "pre": pre, "merges": merges}
    else:
        space = next((space for *steps, space in MARKS if steps == [normal, words]), None)
        if space is None:
            raise _no_equal(f"it marks spaces by {_named([*normal, *words])}")
        alphabet = {f"<0x{byte:02X}>" for byte in range(256 if model["byte_fallback"] else 257)}
        rank = _check_scores(vocab, pairs, added)
        scores = [-float(rank.get(piece, -1) + 1) for piece in tokens["tokens"]]
        tokens |= {"model": "llama", "pre": "default", "scores": scores, "space": space}
    if not set(alphabet) <= vocab.keys():
        raise _no_equal("it has no token for some bytes")
    whole_words = bool(model.get("ignore_merges"))
    if whole_words != (tokens["pre"] == "llama-bpe"):
        # No difference where merges make every token.
        model["ignore_merges"] = False
        merged = library.Tokenizer.from_str(json.dumps(state)).model
        if any(len(merged.tokenize(piece)) != 1 for piece in vocab.keys() - added.keys()):
            raise _no_equal(f"it has ignore_merges={whole_words}")
    return tokens


def _check_scores(
    vocab: Mapping[str, int], pairs: Sequence[tuple[str, str]], added: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the rank of each token that pairs are merged to, as of Llama 2 and Gemma.

    llama.cpp merges any two neighbours that make a token, by the score of that token.

    Raises:
      ValueError: the merges lack such a pair, or rank pairs of one token far apart.
    """
    merges, rank, previous = set(pairs), {}, ""
    for place, pair in enumerate(pairs):
        token = "".join(pair)
        if token in rank and token != previous and token not in added:
            raise _no_equal(f"its merges to {token!r} are not beside each other")
        rank.setdefault(token, place)
        previous = token
    for token in vocab.keys() - added.keys():
        for pair in ((token[:i], token[i:]) for i in range(1, len(token))):
            if pair[0] in vocab and pair[1] in vocab and pair not in merges:
                raise _no_equal(f"it does not merge {pair[0]!r} and {pair[1]!r} to a token")
    return rank


def _steps(part: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, without those fields that cut no text."""
    if part is None:
        return
    for inner in part.get("normalizers", part.get("pretokenizers", [])):
        yield from _steps(inner)
    if part["type"] != "Sequence":
        yield {name: value for name, value in part.items() if name != "trim_offsets"}


def _named(steps: Sequence[Mapping[str, Any]]) -> str:
    values = (
        f"{x['type']}({', '.join(f'{k}={v!r}' for k, v in x.items() if k != 'type')})"
        for x in steps
    )
    return ", ".join(values) or "nothing"


def _no_equal(why: str) -> ValueError:
    return ValueError(
        f"tokenizer.json has no equal in llama.cpp, which would read other tokens: {why}; use "
        "--format safetensors"
    )


def _add_tokens(
    writer: Any, tokens: Mapping[str, Any], fields: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    writer.add_tokenizer_model(tokens.get("model", "none"))
    if not tokens:
        return
    writer.add_tokenizer_pre(tokens["pre"])
    writer.add_token_list(tokens["tokens"])
    writer.add_token_types(tokens["types"])
    if tokens["model"] == "gpt2":
        writer.add_token_merges(tokens["merges"])
    else:
        writer.add_token_scores(tokens["scores"])
        writer.add_add_space_prefix(tokens["space"])
    for name in ("bos", "eos", "pad"):
        ids = fields.get(f"{name}_token_id")
        if name == "bos" and tokens["bos"] is not None:
            ids = tokens["bos"]
        ids = ids if isinstance(ids, list) else [ids]
        if ids[:1] != [None] and ids:
            getattr(writer, f"add_{name}_token_id")(ids[0])
        if name == "eos" and len(ids) > 1:  # a second one, which ends turns
            writer.add_eot_token_id(ids[1])
    if tokens["model"] == "llama" and UNKNOWN in tokens["types"]:
        writer.add_unk_token_id(tokens["types"].index(UNKNOWN))
    writer.add_add_bos_token(tokens["bos"] is not None)
    writer.add_add_eos_token(tokens["add_eos"])
    template = files.get(TEMPLATE) or json.loads(files.get(TOKENIZER_CONFIG, "{}")).get(
        "chat_template"
    )
    if isinstance(template, str):
        writer.add_chat_template(template)


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
