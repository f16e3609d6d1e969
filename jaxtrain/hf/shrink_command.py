"""The command ``jaxtrain shrink``: a smaller model of a trained decoder, and what it has lost."""

import dataclasses
import functools
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain import data
from jaxtrain.finetune import shrink
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.hf import hub, weights
from jaxtrain.host import quiet
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, check_on_disk
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.models import decoder
from jaxtrain.ops.altered import grams
from jaxtrain.ops.linear import merge
from jaxtrain.ops.packed import pack
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.folder import CHECKPOINTS
from jaxtrain.tree import PyTree, map_named, named_leaves

# Of a text: rows that are taken at once, and tokens of a row at most.
_ROWS_AT_ONCE = 8
_LONGEST = 1024
_loss_fn = functools.cache(decoder.loss_fn)  # the same one again, of which programs are kept
# What a run's checkpoint says of the folder that it began from.
_TOLD = {"family": "family_name", "special_tokens": "special_tokens"}


@dataclasses.dataclass(frozen=True)
class ShrinkOptions:
    """Makes a trained decoder smaller: removes heads and channels, prunes weights and quantizes
    them, in this order, each calibrated on text; reports what that has cost.

    What comes out is the folder of a run. It generates (jaxtrain generate --run), is tuned
    (--init-from, with --keep-zeros after pruning) and exported (jaxtrain hf export).
    """

    model: tyro.conf.Positional[str]
    """A run of experiments.gpt, a Hugging Face folder, or a name on its hub."""
    out: Path
    """Folder to write."""
    data: str = "python"
    """Text to calibrate on, and held-out text to measure on, as for experiments.gpt."""
    heads: float = 1.0
    """Share of the attention heads of each layer that stays."""
    channels: float = 1.0
    """Share of the channels of each layer's MLP that stays."""
    prune: str | None = None
    """Weights of attention and MLP that become 0: a share of each output's inputs, such as 0.5, or
    2:4, of every four adjoining inputs two."""
    by: Literal["wanda", "magnitude"] = "wanda"
    """Weights that are pruned: the smallest times their inputs' norm, or the smallest."""
    quantize: Literal["int4", "int8", "nf4"] | None = None
    """Codes of the kernels of attention and MLP."""
    method: Literal["gptq", "awq", "round"] = "gptq"
    """Codes of int4 and int8: those with which errors cancel on the calibration text, the nearest
    of kernels with scaled inputs (AWQ), or the nearest; nf4 has the nearest."""
    group: int | None = None
    """Inputs that share a scale; left out, 64, and all of them for int8."""
    rows: int = 64
    """Rows of text to calibrate on."""
    held_out_rows: int = 64
    """Rows of held-out text to measure on."""
    png: Path | None = None
    """Also draw the error of every layer in this PNG file."""


def run_shrink(options: ShrinkOptions, rest: list[str]) -> int:
    """Writes the smaller model and prints the report."""
    del rest
    check_least(options, rows=1, held_out_rows=1, group=1)
    for name in ("heads", "channels"):
        if not 0 < (share := getattr(options, name)) <= 1:
            raise ValueError(f"--{name} is {share}: give a share above 0 and up to 1")
    if options.heads == options.channels == 1 and not (options.prune or options.quantize):
        raise ValueError("nothing is asked for: give --heads, --channels, --prune or --quantize")
    calibrated = options.method if options.quantize in ("int4", "int8") else None
    if options.method == "awq" and calibrated is None:
        raise ValueError(
            f"--method is awq and --quantize is {options.quantize}: AWQ scales inputs for codes of "
            "int4 and int8; give one of these, or another --method"
        )
    keep = _parse(options.prune)
    if options.png is not None:
        check_on_disk(options.png, "--png")
        new_figure(1, 1)
    check_on_disk(options.out, "--out")
    weights.check_new(options.out)
    quiet.start()
    model, params, tokenizer, stored, files = _open(options.model)
    params = jax.tree.map(np.asarray, params)
    small = shrink.sizes(model, heads=options.heads, channels=options.channels)
    change = Quantize(options.quantize, options.group)
    _check_sizes(options, small, keep[1], change)
    rows, held_out = _rows(options, tokenizer, min(model.seq_len, _LONGEST))
    before, old = _told(model, params, held_out, tokenizer), (model, params)
    if small != model:
        found = _grams(model, params, rows, "/(out|down)/kernel$")
        params = shrink.narrow(model, small, params, found)
    found = _grams(small, params, rows, change.targets[0])

    whole, scales = named_leaves(params), {}
    if options.prune is not None:
        params = _made(small, params, found, functools.partial(_pruned, options, keep))
    if calibrated == "awq":
        scales = shrink.input_scales(small, params, found, options.quantize, options.group)
        params = shrink.fold(small, params, scales)
    if options.quantize is not None:
        again = rows if calibrated == "gptq" else None
        params = _made(small, params, found, functools.partial(_quantized, options), rows=again)
    back = {part: 1 / scale_LD for part, scale_LD in scales.items()}
    dense = named_leaves(shrink.fold(small, merge(params), back))
    errors = {name: [*map(shrink.error, whole[name], dense[name], found[name])] for name in found}
    after = _told(small, params, held_out, tokenizer)
    for told, ms in zip((before, after), _times([old, (small, params)], held_out), strict=True):
        told["forward pass, ms per token"] = ms
    stored |= {"model": dataclasses.asdict(small)} | (change.record if change.kind else {})
    with Checkpointer(options.out / CHECKPOINTS) as checkpoints:
        checkpoints.save(0, {"params": params}, config=stored)
    for name, text in files.items():
        (options.out / name).write_text(text, encoding="utf-8")
    _report(options, errors, before, after)
    if scales and "mlp/up" not in scales:
        print(f"blocks/mlp/down: rounded without scales; nothing before {small.mlp} can undo them")
    return 0


def _parse(prune: str | None) -> tuple[float, int | None]:
    """How many of how many inputs stay; without the second, which share of all."""
    n, _, m = (prune or "0").partition(":")
    if m and n.isdecimal() and m.isdecimal() and 0 < int(n) < int(m):
        return int(n), int(m)
    if m or not re.fullmatch(r"0?(\.\d+)?", n):
        raise ValueError(f"--prune is {prune!r}: give a share below 1, or N:M, such as 2:4")
    return 1 - float(n), None


def _check_sizes(options: ShrinkOptions, small: Any, m: int | None, change: Quantize) -> None:
    """Raises ValueError where a kernel cannot be quantized or pruned so."""
    shapes = jax.eval_shape(functools.partial(decoder.init, small), jax.random.key(0))
    jax.eval_shape(lambda params: change.params(params, jax.random.key(0)), shapes)
    for name, x in named_leaves(shapes).items():
        if m and re.search(change.targets[0], name) and x.shape[-2] % m:
            raise ValueError(
                f"--prune is {options.prune}: {name} has {x.shape[-2]} inputs, which {m} does not "
                "divide; give a share"
            )


def _open(source: str) -> tuple[Any, PyTree, Any, dict[str, Any], dict[str, str]]:
    """The model, its parameters, tokenizer, what its checkpoint says, and the files beside."""
    folder = hub.local_folder(source)
    if trained.is_trained(folder):
        model, params, tokenizer = trained.load(folder)
        stored = trained.stored(folder)
        stored = {name: x for name, x in stored.items() if name not in trained.CHANGES}
    else:
        model, params = weights.read_config(folder), weights.load(weights.open_weights(folder))
        tokenizer = data.SubwordTokenizer.load(as_path(folder) / trained.TOKENIZER_FILE)
        stored = {"form": "decoder", "tokenizer": trained.TOKENIZER_FILE}
        stored |= {name: getattr(weights, of)(folder) for name, of in _TOLD.items()}
    if not isinstance(model, decoder.DecoderConfig):
        raise ValueError(f"the model in '{source}' is no decoder: give one")
    if any(model.delta_pattern):
        raise ValueError(
            f"the model in '{source}' has delta_pattern={model.delta_pattern}, whose layers are "
            "stacked by groups, which are not made smaller here: give a model without"
        )
    if model.experts is not None:
        raise ValueError(
            f"the model in '{source}' has {model.experts} experts in each layer, which are not "
            "made smaller here: give a model without"
        )
    files = trained.beside(folder)
    if isinstance(tokenizer, data.SubwordTokenizer):
        files[trained.TOKENIZER_FILE] = tokenizer.to_json()
    return model, params, tokenizer, stored, files


def _rows(options: ShrinkOptions, tokenizer: Any, T: int) -> list[np.ndarray]:
    """Rows of T + 1 tokens, [N, T + 1], to calibrate and to measure on."""
    found, counts = [], (options.rows, options.held_out_rows)
    for documents, count in zip(data.open_text(options.data), counts, strict=True):
        tokens: list[int] = []
        for document in documents:
            if len(tokens) >= count * (T + 1):
                break
            tokens += [*tokenizer.encode(document.text).tolist(), tokenizer.eod]
        if (count := min(count, len(tokens) // (T + 1))) == 0:
            raise ValueError(
                f"--data is {options.data}, one of whose two parts has {len(tokens)} tokens: give "
                f"more than {T} to calibrate on, and as many to hold out"
            )
        found.append(np.int32(tokens[: count * (T + 1)]).reshape(count, T + 1))
    return found


def _batches(rows: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    for i in range(0, len(rows), _ROWS_AT_ONCE):
        tokens, targets = rows[i : i + _ROWS_AT_ONCE, :-1], rows[i : i + _ROWS_AT_ONCE, 1:]
        yield {"tokens": tokens, "targets": targets, "mask": np.ones(targets.shape, np.float32)}


def _grams(model: Any, params: PyTree, rows: np.ndarray, pattern: str) -> dict[str, np.ndarray]:
    paths = [name for name in named_leaves(params) if re.search(pattern, name)]
    return grams(_loss_fn(model), params, paths, _batches(rows))


def _made(
    model: Any, params: PyTree, found: Mapping[str, np.ndarray], function: Any, *, rows: Any = None
) -> PyTree:
    """The parameters with kernels that a function has made, layer by layer, of a kernel and its
    gram; if there are rows, the grams are taken on them behind the layers that are made already."""
    kernels = {name: x for name, x in named_leaves(params).items() if name in found}
    layers = {name: [] for name in kernels}
    dense = {name: np.array(x) for name, x in kernels.items()}
    for l in range(model.layers):
        if l and rows is not None:
            so_far = map_named(lambda name, x: dense.get(name, x), params)
            found = grams(_loss_fn(model), so_far, [*kernels], _batches(rows))
        for name, x in kernels.items():
            layers[name].append(function(x[l], found[name][l]))
            dense[name][l] = merge(layers[name][l])
    stacked = {n: jax.tree.map(lambda *x: np.stack(x), *each) for n, each in layers.items()}
    return map_named(lambda name, x: stacked.get(name, x), params)


def _pruned(
    options: ShrinkOptions, keep: tuple[float, int | None], w_DF: np.ndarray, gram_DD: np.ndarray
) -> np.ndarray:
    norms_D = np.sqrt(np.diag(gram_DD)) if options.by == "wanda" else np.ones(len(w_DF))
    n, m = keep if keep[1] else (round(keep[0] * len(w_DF)), len(w_DF))
    return w_DF * shrink.kept(w_DF, norms_D, n, m)


def _quantized(options: ShrinkOptions, w_DF: np.ndarray, gram_DD: np.ndarray) -> Any:
    if options.method == "gptq" and options.quantize != "nf4":
        return shrink.gptq(w_DF, gram_DD, options.quantize, options.group)
    return pack(w_DF, options.quantize, options.group)


@functools.cache
def _loss(model: Any) -> Any:
    return jax.jit(lambda params, batch: _loss_fn(model)(params, batch, None).total)


def _times(models: list[tuple[Any, PyTree]], rows: np.ndarray) -> np.ndarray:
    """Milliseconds per token of a forward pass of a batch, for each of the models in turn: medians,
    without what places the parameters."""
    batch, seconds = next(_batches(rows)), np.empty((10, len(models)))
    for i, j in np.ndindex(seconds.shape):
        model, params = models[j]
        held = jax.block_until_ready(jax.device_put((params, batch)))
        start = time.perf_counter()
        _loss(model)(*held).block_until_ready()
        seconds[i, j] = time.perf_counter() - start
    # The first pass may compile.
    return 1000 * np.median(seconds[1:], axis=0) / batch["tokens"].size


def _told(model: Any, params: PyTree, rows: np.ndarray, tokenizer: Any) -> dict[str, float]:
    """What is reported of a model: its size, and its loss on rows."""
    nats = sum(float(_loss(model)(params, batch)) for batch in _batches(rows))
    targets = rows[:, 1:].reshape(-1)
    return {
        "bytes": sum(np.asarray(x).nbytes for x in jax.tree.leaves(params)),
        "numbers that are not 0": sum(np.count_nonzero(x) for x in jax.tree.leaves(merge(params))),
        "held-out nats per token": nats / targets.size,
        "held-out bits per byte": nats / np.log(2) / len(tokenizer.decode_bytes(targets)),
    }


def _report(
    options: ShrinkOptions,
    errors: Mapping[str, list[float]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> None:
    console, title = Console(highlight=False), "relative error of a product"
    table = Table("", "before", "after", "change", box=None)
    for name, old in before.items():
        new, form = after[name], ",.0f" if old >= 1000 else ".4f"
        table.add_row(name, f"{old:{form}}", f"{new:{form}}", f"{new / old - 1:+.2%}")
    console.print(table)
    errors = {name.removesuffix("/kernel"): layers for name, layers in errors.items()}
    table = Table(title, *map(str, range(len(next(iter(errors.values()))))))
    for name, layers in errors.items():
        table.add_row(name, *(f"{x:.4f}" for x in layers))
    console.print(table)
    if options.png is not None:
        figure = new_figure(10, 4)
        size, loss, axes = figure.subplots(1, 3, width_ratios=[1, 1, 3])
        for own, name in ((size, "bytes"), (loss, "held-out bits per byte")):
            bars = own.bar(["before", "after"], [before[name], after[name]])
            own.bar_label(bars, fmt="{:,.0f}" if own is size else "{:.4f}", fontsize=8)
            own.set_yticks([])
            finish_axes(own, name, x="")
        for name, layers in errors.items():
            axes.plot(layers, marker="o", label=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        finish_axes(axes, title, x="layer")
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        figure.suptitle(options.model, fontsize=10)
        save_figure(figure, options.png)
    console.print(f"{options.out}: a run, for jaxtrain generate and jaxtrain hf export")
