"""The command ``jaxtrain hf``: checks a Hugging Face folder, or writes one from a run."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jaxtrain.data import SubwordTokenizer
from jaxtrain.data.chat import TEMPLATE, TOKENIZER_CONFIG
from jaxtrain.hf import adapters, hub, merging, weights
from jaxtrain.hf.family import INERT, OFF
from jaxtrain.host import quiet
from jaxtrain.host.paths import as_path, check_on_disk, exists, is_file, json_text, read_json
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.run import trained
from jaxtrain.tree import named_leaves

# Of a tokenizer_config.json, what is exported as the run found it.
KEPT = ("pad_token", "padding_side", "model_max_length", "chat_template")


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """Reads every tensor of a folder as a parameter, writes it again in memory, and compares the
    bits in both directions; prints what maps to what. The exit status is 1 where they differ."""

    folder: tyro.conf.Positional[str]
    """Folder with config.json and model.safetensors, or shards and their index; or a name on the
    hub, ORG/NAME or ORG/NAME@REVISION, which is downloaded into the hub's cache."""


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Writes a run's model as a folder that transformers' from_pretrained opens."""

    run: str
    """Folder of a run of experiments.gpt, bert or t5, or of experiments.vision --model vit."""
    out: Path
    """Folder to write."""
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
    compare_on: Path | None = None
    """A text that was not trained on: print how far the exported decoder's predictions are from the
    trained one's, before it was merged and rounded, as a KL divergence per token."""
    max_shard_gb: float = weights.SHARD_BYTES / 1e9
    """Size of one file at most, in 10^9 bytes."""


@dataclasses.dataclass(frozen=True)
class HFOptions:
    """Hugging Face weights: checks a folder, or writes one from a run."""

    action: tyro.conf.OmitArgPrefixes[
        Annotated[CheckOptions, tyro.conf.subcommand("check", prefix_name=False)]
        | Annotated[ExportOptions, tyro.conf.subcommand("export", prefix_name=False)]
    ]


def run_hf(options: HFOptions, rest: list[str]) -> int:
    """Checks or exports."""
    del rest
    quiet.start()
    if isinstance(options.action, CheckOptions):
        return _check(Path(hub.local_folder(options.action.folder)))
    return _export(options.action)


def _check(folder: Path) -> int:
    family, config = weights.read_model(folder)
    print(f"{folder}: {family.name}, {family.module.parameter_count(config):,} parameters")
    inert = sorted(read_json(folder / "config.json").keys() & (INERT | OFF.keys()))
    print(f"fields without effect here: {', '.join(inert) or 'none'}")
    tensors, wrong = 0, []
    for found in weights.check(folder):
        tensors += len(found.names)
        layers = f" to {found.names[-1]}" if len(found.names) > 1 else ""
        turned = ", transposed" if found.axes else ""
        size = "x".join(map(str, found.shape))
        print(f"{found.names[0]}{layers} ({found.dtype} {size}{turned})")
        for i, (path, shape) in enumerate(zip(found.paths, found.shapes, strict=True)):
            part = f", part {i + 1} of {len(found.paths)}" if len(found.paths) > 1 else ""
            print(f"    {path} ({'x'.join(map(str, shape))}{part})")
        wrong += [] if found.equal else [found.names[0]]
    if wrong:
        print(f"NOT the same bits: {', '.join(wrong)}")
        return 1
    if unread := weights.not_read(folder):
        print(f"not read, for the model has no such part, or has it twice: {', '.join(unread)}")
    print(f"all {tensors} tensors come back bit for bit, in both directions")
    return 0


def _export(options: ExportOptions) -> int:
    if not 0 < options.max_shard_gb < float("inf"):  # nor NaN
        raise ValueError(f"--max-shard-gb is {options.max_shard_gb}: give a number above 0")
    check_on_disk(options.out, "--out")
    if options.adapter:
        return _export_adapter(options)
    model, params, tokenizer = trained.load(options.run, options.step, member=options.member)
    stored = trained.stored(options.run)
    text = options.compare_on and _tokens(options.compare_on, model, tokenizer)
    if options.onto == "original":
        if "quantized" not in stored:
            raise ValueError("--onto is original: the run has no packed kernels; leave it out")
        begun = _begun(stored["flags"]["init_from"])
        params = merging.onto_original(
            trained.unmerged(options.run, options.step, member=options.member)[1], begun
        )
    elif "quantized" in stored and "low_rank" not in stored:  # the codes that it has
        _, params = trained.unmerged(options.run, options.step)
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
    if tokenizer is None:
        fields = stored.get("special_tokens") or {}
        files = {weights.PREPROCESSOR: weights.preprocessor(model, stored.get("pixels"))}
    weights.save(
        options.out,
        model,
        params,
        family=options.family or stored.get("family"),
        dtype=options.dtype,
        quantize=options.quantize,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
        fields=fields,
        files=files,
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


def _tokens(path: Path, model: trained.Model, tokenizer: Any) -> np.ndarray:
    if not isinstance(model, DecoderConfig):
        raise ValueError(f"--compare-on is {path}: it is for decoders, and the run has none")
    if not is_file(path):
        raise ValueError(f"--compare-on is {path}, which is no file: give a text")
    if not len(tokens := tokenizer.encode(path.read_text())):
        raise ValueError(f"--compare-on is {path}, which is empty: give a text")
    return tokens


def _begun(source: str) -> Mapping[str, Any]:
    """The weights by path of what a run began from."""
    path = hub.local_folder(source)
    is_run = exists(as_path(path) / "checkpoints")
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
