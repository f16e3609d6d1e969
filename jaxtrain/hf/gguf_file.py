"""A decoder as a GGUF file, which llama.cpp opens, and all that is built on it.

Names of tensors are the package gguf's own, found by those of a Hugging Face folder; what
llama.cpp computes of a file is fixed by its architecture, so what a model has besides is refused.

Shapes: V tokens, D width, H heads, K features per head.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.chat import TEMPLATE, TOKENIZER_CONFIG
from jaxtrain.data.tokenizers import EOD, ByteTokenizer, byte_alphabet
from jaxtrain.hf.families import family_for
from jaxtrain.hf.weights import check_new, written
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
# What tokenizers split texts by, and llama.cpp's name of it; alone, ByteLevel is GPT-2's.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}| ?[^\s\p{{L}}\p{{N}}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {_WORDS.format("{1,3}"): "llama-bpe", _WORDS.format(""): "qwen2"}
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
            "add_bos": False,
            "model": "gpt2",
            "pre": "gpt-2",
            # llama.cpp wants one at least: of bytes that are in no UTF-8.
            "merges": [" ".join([letters[255][0]] * 2)],
        }
    own = json.loads(files["tokenizer.json"])
    model, text = own["model"], json.dumps([own["pre_tokenizer"], own["decoder"]])
    if model["type"] != "BPE":
        raise ValueError(
            f"tokenizer.json is {model['type']}: of llama.cpp's tokenizers BPE alone is written "
            "here; use --format safetensors"
        )
    pieces = {id: piece for piece, id in model["vocab"].items()}
    kinds = {id: BYTE if _is_byte(piece) else NORMAL for id, piece in pieces.items()}
    if model.get("unk_token") is not None:
        kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
    for each in own["added_tokens"]:
        pieces[each["id"]] = each["content"]
        if kinds.get(each["id"]) != UNKNOWN:
            kinds[each["id"]] = CONTROL if each["special"] else USER_DEFINED
    found = {
        "tokens": [pieces.get(id, f"[PAD{id}]") for id in range(vocab_size)],
        "types": [kinds.get(id, UNUSED) for id in range(vocab_size)],
        "add_bos": _first_special(own.get("post_processor")),
    }
    pairs = [x.split(" ") if isinstance(x, str) else x for x in model["merges"]]
    if "ByteLevel" in text:
        splits = [x["Regex"] for x in _dicts(own["pre_tokenizer"]) if "Regex" in x]
        pre = "gpt-2" if not splits else SPLITS.get(splits[0])
        if pre is None:
            raise ValueError(
                f"tokenizer.json splits texts by {splits[0]!r}, of which no name in llama.cpp is "
                "known here: those of GPT-2, Llama 3 and Qwen are"
            )
        return found | {"model": "gpt2", "pre": pre, "merges": [" ".join(x) for x in pairs]}
    # As of Llama 2 and Gemma: pairs are merged by the score of what comes of them.
    rank: dict[str, int] = {}
    for place, (a, b) in enumerate(pairs):
        rank.setdefault(a + b, place)
    scores = [-float(rank.get(piece, -1) + 1) for piece in found["tokens"]]
    spaced = any(x.get("prepend_scheme") in ("always", "first") for x in _dicts(own))
    spaced |= any(x.get("type") == "Prepend" for x in _dicts(own["normalizer"]))
    return found | {"model": "llama", "pre": "default", "scores": scores, "space": spaced}


def _add_tokens(
    writer: Any, found: Mapping[str, Any], fields: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    writer.add_tokenizer_model(found.get("model", "none"))
    if not found:
        return
    writer.add_tokenizer_pre(found["pre"])
    writer.add_token_list(found["tokens"])
    writer.add_token_types(found["types"])
    if found["model"] == "gpt2":
        writer.add_token_merges(found["merges"])
    else:
        writer.add_token_scores(found["scores"])
        writer.add_add_space_prefix(found["space"])
    for name in ("bos", "eos", "pad"):
        ids = fields.get(f"{name}_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if ids[:1] != [None] and ids:
            getattr(writer, f"add_{name}_token_id")(ids[0])
        if name == "eos" and len(ids) > 1:  # a second one, which ends turns
            writer.add_eot_token_id(ids[1])
    if found["model"] == "llama" and UNKNOWN in found["types"]:
        writer.add_unk_token_id(found["types"].index(UNKNOWN))
    writer.add_add_bos_token(found["add_bos"])
    template = files.get(TEMPLATE) or json.loads(files.get(TOKENIZER_CONFIG, "{}")).get(
        "chat_template"
    )
    if isinstance(template, str):
        writer.add_chat_template(template)


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _first_special(processor: Any) -> bool:
    """Whether a post-processor puts a token before every text."""
    templates = (x["single"] for x in _dicts(processor) if "single" in x)
    return any("SpecialToken" in template[0] for template in templates if template)


def _dicts(tree: Any) -> Sequence[Mapping[str, Any]]:
    """All objects within JSON."""
    if isinstance(tree, list):
        return [x for each in tree for x in _dicts(each)]
    return [tree, *_dicts(list(tree.values()))] if isinstance(tree, dict) else []
