"""The command ``jaxtrain export``: writes a trained model in the formats of other programs."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxtrain.data import ByteTokenizer, SubwordTokenizer, Tokenizer
from jaxtrain.data.chat import TEMPLATE, TOKENIZER_CONFIG
from jaxtrain.hf import adapters, gguf_file, hub, merging, onnx_file, stablehlo, weights
from jaxtrain.host import least, quiet
from jaxtrain.host.paths import as_path, check_on_disk, exists, is_file, json_text, read_json
from jaxtrain.models.clip import ClipConfig
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.llava import LlavaConfig
from jaxtrain.run import trained
from jaxtrain.tree import named_leaves

# Of a tokenizer_config.json, what is exported as the run found it.
KEPT = ("pad_token", "padding_side", "model_max_length", "chat_template")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Writes a trained model as a folder for other programs: transformers (safetensors), JAX
    without this package (stablehlo), llama.cpp (gguf), or onnxruntime (onnx)."""

    run: str | None = None
    """Folder of a run of experiments.gpt, bert, t5, vision, clip or caption."""
    model: str | None = None
    """In place of a run, a Hugging Face folder, or a name on its hub, ORG/NAME[@REVISION]."""
    out: str
    """Folder to write; of safetensors it may be in a bucket."""
    format: Literal["safetensors", "stablehlo", "gguf", "onnx"] = "safetensors"
    """safetensors: what from_pretrained of transformers opens. stablehlo: the forward pass as a
    program that jax.export opens, for any number and length of rows, and the weights. gguf: one
    file of a GPT-2, Llama, Mistral, Qwen or Gemma, with its tokenizer. onnx: the forward pass as
    PyTorch exports that of transformers, or a ConvNet's."""
    step: int | None = None
    """Which checkpoint; by default the best one."""
    family: str | None = None
    """Such as mistral; by default the one that the run began from, or the first that fits."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Dtype of the exported weights; default: the dtype in which the run keeps its parameters."""
    quantize: Literal["int4", "int8", "nf4"] | None = None
    """Codes of the kernels of attention and MLP: int4 and int8 in the format of compressed-tensors
    (pack-quantized), nf4 in that of bitsandbytes. `jaxtrain shrink` calibrates them."""
    adapter: bool = False
    """Write what a run with --lora.rank has added alone, as files that PEFT opens over the model
    that the run began from."""
    member: int | None = None
    """Number of a member, of a run of several (--population.size); default: the best in the
    evaluation of the checkpoint."""
    onto: Literal["dequantized", "original"] = "dequantized"
    """Weights that additions to packed kernels (--quantize) are merged into: those that the run has
    computed with, or those of the model that it began from."""
    compare_on: str | None = None
    """A text that was not trained on: print how far the exported decoder's predictions are from the
    trained one's, before it was merged and rounded, as a KL divergence per token."""
    max_shard_gb: float = weights.SHARD_BYTES / 1e9
    """Size of one file at most, in 10^9 bytes."""


# Flags of one kind of source, and of formats.
OF_RUNS = ("step", "member", "onto", "adapter", "compare_on")
OF_FORMATS = {
    **dict.fromkeys(("quantize", "adapter", "compare_on"), ("safetensors",)),
    "family": ("safetensors", "gguf", "onnx"),
    "max_shard_gb": ("safetensors", "stablehlo"),
}


class _Source(NamedTuple):
    """A model and its parameters, what is known of it, fields of its config.json, and more files
    of its folder."""

    model: trained.Model
    params: Any
    stored: Mapping[str, Any]
    fields: Mapping[str, Any]
    files: Mapping[str, str]
    tokenizer: Tokenizer | None


def run_export(options: ExportOptions, rest: list[str]) -> int:
    """Writes the folder."""
    del rest
    try:
        return _export(options)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        why = f"{os.strerror(error.errno)} while '{options.out}' was written"  # a disk that is full
        mend = "delete that folder, make room and export again"
        raise OSError(error.errno, f"{why}: {mend}") from error


def _export(options: ExportOptions) -> int:
    quiet.start()
    _check_flags(options)
    if options.adapter:
        return _export_adapter(options)
    source = _of_run(options) if options.run is not None else _of_model(options.model)
    text = options.compare_on and _tokens(options.compare_on, source.model, source.tokenizer)
    given = {"dtype": options.dtype, "files": source.files}
    shards = {"max_shard_bytes": int(options.max_shard_gb * 1e9)}
    if isinstance(source.model, ClipConfig | LlavaConfig) and options.format != "safetensors":
        raise ValueError(
            f"--format is {options.format} and the model reads images beside a text, which is "
            "written as safetensors alone: leave it out"
        )
    if options.format == "stablehlo":
        found = stablehlo.save(options.out, source.model, source.params, **given, **shards)
        inputs = found.in_tree.unflatten(found.in_avals)[0][1]
        takes = ", ".join(f"{name} {each.str_short()}" for name, each in inputs.items())
        gives = found.out_avals[0].str_short()
        print(f"{options.out}: {stablehlo.PROGRAM} takes {takes}, and gives {gives}")
        return 0
    family = options.family or source.stored.get("family")
    given |= {"family": family, "fields": source.fields}
    if options.format == "gguf":
        name = gguf_file.save(options.out, source.model, source.params, **given)
        print(f"{options.out}: {gguf_file.FILE} of llama.cpp's architecture {name}")
        return 0
    if options.format == "onnx":
        takes = ", ".join(onnx_file.save(options.out, source.model, source.params, **given))
        print(f"{options.out}: {onnx_file.FILE} takes {takes}")
        return 0
    weights.save(
        options.out, source.model, source.params, quantize=options.quantize, **given, **shards
    )
    print(f"{options.out}: {weights.family_name(options.out)}, opened by transformers as it is")
    if text is not None:
        own, before = trained.unmerged(options.run, options.step, member=options.member)
        written = weights.load(weights.open_weights(options.out, own))
        nats, count = merging.divergence(own, before, written, text)
        print(
            f"KL divergence from the trained model: {nats:.3g} nats per token, over {count:,} "
            f"tokens of {options.compare_on}"
        )
    return 0


def _check_flags(options: ExportOptions) -> None:
    if (options.run is None) == (options.model is None):
        which = "neither --run nor --model is" if options.run is None else "--run and --model are"
        raise ValueError(f"{which} given: name a run, or a Hugging Face folder")
    for name in least.given(options):
        flag = "--" + name.replace("_", "-")
        if options.model is not None and name in OF_RUNS:
            raise ValueError(f"{flag} is given with --model: it is for runs; leave it out")
        if options.format not in (formats := OF_FORMATS.get(name, (options.format,))):
            raise ValueError(
                f"{flag} is given with --format {options.format}: it is for "
                f"{' and '.join(formats)}; leave it out"
            )
    if not 0 < options.max_shard_gb < float("inf"):  # nor NaN
        raise ValueError(f"--max-shard-gb is {options.max_shard_gb}: give a number above 0")
    if options.format != "safetensors":
        check_on_disk(options.out, f"--out with --format {options.format}")


def _of_run(options: ExportOptions) -> _Source:
    model, params, tokenizer = trained.load(options.run, options.step, member=options.member)
    stored = trained.stored(options.run)
    if options.onto == "original":
        if "quantized" not in stored:
            raise ValueError("--onto is original: the run has no packed kernels; leave it out")
        begun = _begun(stored["flags"]["init_from"])
        params = merging.onto_original(
            trained.unmerged(options.run, options.step, member=options.member)[1], begun
        )
    elif "quantized" in stored and "low_rank" not in stored and options.format == "safetensors":
        _, params = trained.unmerged(options.run, options.step)  # the codes that it has
    if context := stored.get("context"):
        model = dataclasses.replace(model, seq_len=max(model.seq_len, context))
    fields, files = {}, {}
    if isinstance(tokenizer, SubwordTokenizer):
        fields = stored.get("special_tokens")
        if fields is None:  # null, for without the field transformers takes the family's own bos
            fields = {"bos_token_id": None, "eos_token_id": tokenizer.eod}
        files = trained.beside(options.run) | {trained.TOKENIZER_FILE: tokenizer.to_json()}
        kept = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
        told = _tokenizer_config(tokenizer, fields, kept)
        if isinstance(model, DecoderConfig):
            told = {"pad_token": tokenizer.eod_token, "model_max_length": model.seq_len} | told
            files.setdefault(trained.GENERATION, json_text(fields))
        if TEMPLATE in files:
            told.pop("chat_template", None)
        files[TOKENIZER_CONFIG] = json_text(told)
    if isinstance(tokenizer, ByteTokenizer):
        fields = {"eos_token_id": tokenizer.eod} if options.format == "gguf" else {}
    if isinstance(model, LlavaConfig) and not files:
        files = {trained.GENERATION: json_text({"eos_token_id": tokenizer.eod})}
    if tokenizer is None:
        fields = stored.get("special_tokens") or {}
        if exists(own := as_path(options.run) / trained.TOKENIZER_FILE):  # of captions
            files[trained.TOKENIZER_FILE] = own.read_text()
    if tokenizer is None or isinstance(model, LlavaConfig):
        tower = model.image if isinstance(model, ClipConfig | LlavaConfig) else model
        files[weights.PREPROCESSOR] = weights.preprocessor(tower, stored.get("pixels"))
    return _Source(model, params, stored, fields, files, tokenizer)


def _of_model(name: str) -> _Source:
    folder = hub.local_folder(name)
    if trained.is_trained(folder):
        raise ValueError(f"--model is {folder}, which is a run: give it as --run")
    family, model = weights.read_model(folder)
    theirs, files = read_json(as_path(folder) / "config.json"), trained.beside(folder)
    kept = (*weights.SPECIAL_TOKENS, "id2label", "label2id")
    fields = {name: theirs[name] for name in kept if name in theirs}
    for each in (trained.TOKENIZER_FILE, weights.PREPROCESSOR):
        if exists(as_path(folder) / each):
            files[each] = (as_path(folder) / each).read_text()
    params = weights.open_weights(folder)
    return _Source(model, params, {"family": family.name}, fields, files, None)


def _tokens(name: str, model: trained.Model, tokenizer: Any) -> np.ndarray:
    if not isinstance(model, DecoderConfig):
        raise ValueError(f"--compare-on is {name}: it is for decoders, and the run has none")
    if not is_file(path := as_path(name)):
        raise ValueError(f"--compare-on is {name}, which is no file: give a text")
    if not len(tokens := tokenizer.encode(path.read_text())):
        raise ValueError(f"--compare-on is {name}, which is empty: give a text")
    return tokens


def _begun(source: str) -> Mapping[str, Any]:
    """The weights by path of what a run began from."""
    path = hub.local_folder(source)
    is_run = trained.is_trained(path)
    return named_leaves(trained.load(path)[1] if is_run else weights.open_weights(path))


def _export_adapter(options: ExportOptions) -> int:
    model, kernels = trained.additions(options.run, options.step, member=options.member)
    stored = trained.stored(options.run)
    names = {"family": options.family or stored.get("family"), "form": stored.get("form")}
    base = stored.get("flags", {}).get("init_from")
    adapters.save(options.out, model, kernels, base=base, **names)
    print(f"{options.out}: {len(kernels)} kernels, opened by peft over {base}")
    return 0


def _tokenizer_config(
    tokenizer: SubwordTokenizer, fields: Mapping[str, Any], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """The special tokens by name, for transformers' AutoTokenizer, and what was said before of
    padding, length and conversations."""
    names = {
        each["id"]: each["content"] for each in json.loads(tokenizer.to_json())["added_tokens"]
    }
    names[tokenizer.eod] = tokenizer.eod_token
    config = {name: kept[name] for name in KEPT if name in kept}
    if isinstance(pad := config.get("pad_token"), dict):  # as older files write tokens
        config["pad_token"] = pad["content"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for field, ids in {"eos_token_id": tokenizer.eod, **fields}.items():
        ids = ids if isinstance(ids, list) else [ids]
        # Of several that end a text, the one that ended documents in training.
        id = tokenizer.eod if tokenizer.eod in ids else next(iter(ids), None)
        if isinstance(id, int) and id in names:
            config[field.removesuffix("_id")] = names[id]
    return config
