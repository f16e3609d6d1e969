"""The command ``jaxtrain compare``: variants of an experiment, by flags, timed in turn."""

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain.compare.turns import Result, compare, naming
from jaxtrain.experiment import Experiment
from jaxtrain.host import distributed, quiet
from jaxtrain.host.least import check_least
from jaxtrain.host.memory import human_bytes, human_count
from jaxtrain.host.paths import as_path, json_text, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.run.main import flag_word, load_config, load_experiment


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Trains variants of an experiment in turn, a few steps each, and compares the time of a step,
    memory and loss.

    Every variant begins from the same seed. All other flags go to the experiment: see `python -m
    EXPERIMENT --help`. Where a variant cannot be built, nothing is started.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    vary: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A flag of the experiment and its values, such as precision=f32,bf16 or mesh.tensor=1,2; given
    several times, all combinations. The first is what the others are compared with."""
    rounds: int = 8
    """Timed rounds; one that does not count comes before them."""
    block_steps: int = 5
    """Train steps of each variant in a round."""
    held_out_batches: int = 4
    """Held-out batches to evaluate in the end, in the variant's own precision; 0 for none."""
    seeds: int = 1
    """Runs of each variant, which begin from --seed and the numbers after it; losses are means."""
    rounding: int = 0
    """Train batches whose gradients are compared, in the end, with those of float32 for the same
    weights: decibels by layer, and the shares of values that operands of fp8 to nvfp4 lose."""
    out: str | None = None
    """Also write compare.json, with the time of every round and the loss of every step, into this
    folder, which is made."""
    png: str | None = None
    """Also draw step times and losses in this PNG file."""


def run_compare(options: CompareOptions, rest: list[str]) -> int:
    """Prints the comparison, and writes what is asked for."""
    if options.png is not None:  # Where that cannot be, nothing is trained.
        new_figure(1, 1)
    check_least(options, rounds=2, block_steps=1, held_out_batches=0, seeds=1, rounding=0)
    _, base = load_config(options.experiment, rest, command="compare", own=type(options))
    start_alone(base, command="compare")
    variants = make_variants(options.experiment, options.vary, rest, seeds=options.seeds)
    results = compare(
        variants,
        rounds=options.rounds,
        block_steps=options.block_steps,
        held_out_batches=options.held_out_batches,
        rounding=options.rounding,
    )
    item = next(iter(variants.values())).data.item
    print_table(results, options, item=item)
    if options.rounding:
        print_rounding(pooled(results, options.seeds))
    if options.out is not None:
        folder = as_path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "compare.json", to_json(results, options, rest))
        print(folder / "compare.json")
    if options.png is not None:
        save_png(results, options.png)
        print(options.png)
    return 0


def start_alone(config: Any, *, command: str) -> None:
    """Starts JAX, with devices that a config simulates; ValueError in one of several processes."""
    if count := getattr(config, "simulate_devices", 0):  # before anything asks JAX for devices
        with contextlib.suppress(RuntimeError):  # JAX has started: what it sees decides what fits
            simulate_devices(count)
    distributed.initialize()
    if (processes := jax.process_count()) > 1:
        raise ValueError(
            f"jaxtrain {command} takes turns in one process, and this is one of {processes}: "
            "start one alone, or train each variant as a run of its own and overlay their reports"
        )
    quiet.start()


def make_variants(
    module_name: str, vary: Sequence[str], flags: Sequence[str], *, seeds: int = 1
) -> dict[str, Experiment]:
    """Builds the experiments of all combinations of values, by name.

    Each of ``vary`` is a flag and its values, such as ``"precision=f32,bf16"``; all variants share
    ``flags``. With ``seeds`` above 1 each is there so many times, one after the other. What
    building a variant refuses is refused with its name.
    """
    given = [_parse(text) for text in vary]
    if seeds > 1 and "seed" in dict(given):
        raise ValueError(f"`seeds` is {seeds} and --vary has a seed too: give one of them")
    if not given:
        raise ValueError("there is nothing to compare: give --vary, as --vary precision=f32,bf16")
    _, base = load_config(module_name, flags, command="compare")
    if seeds > 1:
        given.append(("seed", [str(base.seed + i) for i in range(seeds)]))
    variants = {}
    for values in itertools.product(*(values for _, values in given)):
        pairs = list(zip((name for name, _ in given), values, strict=True))
        name = " ".join(map("=".join, pairs))
        words = [*flags, *(_word(module_name, base, *pair) for pair in pairs)]
        with naming(name):
            variants[name] = load_experiment(module_name, words, command="compare")
    return variants


def pooled(results: Sequence[Result], seeds: int) -> list[Result]:
    """Returns one result for so many after each other that differ by their seed: times of all, and
    means of the rest."""

    def means(values: Sequence[Any]) -> Any:
        return None if None in values else statistics.fmean(values)

    found = []
    for i in range(0, len(results), seeds):
        first, each = results[i], results[i : i + seeds]
        layers = {n: zip(*(r.rounding[n] for r in each), strict=True) for n in first.rounding}
        found.append(
            dataclasses.replace(
                first,
                name=first.name if seeds == 1 else first.name.rpartition(" ")[0],
                step_seconds=tuple(t for r in each for t in r.step_seconds),
                ratio=statistics.median(r.ratio for r in each),
                cpu_ratio=statistics.median(r.cpu_ratio for r in each),
                loss=means([r.loss for r in each]),
                held_out=means([r.held_out for r in each]),
                rounding={n: tuple(map(statistics.fmean, x)) for n, x in layers.items()},
            )
        )
    return found


def print_rounding(results: Sequence[Result]) -> None:
    """Prints a row for each layer, and a column for each variant: of shares that are all 0 none."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer")
    for result in results:
        table.add_column(result.name, justify="right", overflow="fold")
    for name in dict.fromkeys(name for result in results for name in result.rounding):
        rows = [result.rounding.get(name, ()) for result in results]
        if "decibels" not in name and not any(map(any, rows)):
            continue
        text = "{:.1f} dB" if "decibels" in name else "{:.3%}"
        for i in range(max(map(len, rows))):
            table.add_row(f"{name} {i}", *(text.format(row[i]) if row else "-" for row in rows))
    console = Console(width=None if Console().is_terminal else 130)
    console.print()
    console.print(table, highlight=False)


def print_table(
    results: Sequence[Result], options: CompareOptions, *, item: str, console: Console | None = None
) -> None:
    """Prints a row for each variant; columns of which nothing is known are left out."""
    every, results = results, pooled(results, options.seeds)
    ends = {}
    for i, result in enumerate(results):
        each = every[i * options.seeds : (i + 1) * options.seeds]
        last = [r.loss if r.held_out is None else r.held_out for r in each]
        ends[result.name] = f"{min(last):.4f} to {max(last):.4f}" if options.seeds > 1 else None
    columns = {
        "step ms": lambda r: f"{r.milliseconds[1]:.4g}",
        "quartiles": lambda r: f"{r.milliseconds[0]:.4g} to {r.milliseconds[2]:.4g}",
        "ratio": lambda r: f"{r.ratio:.3f}",
        "of CPU time": lambda r: f"{r.cpu_ratio:.3f}",
        f"{item}/s": lambda r: r.items_per_second and human_count(r.items_per_second),
        "MFU": lambda r: None if r.mfu is None else f"{r.mfu:.1%}",
        "compiled": lambda r: human_bytes(r.compiled_bytes),
        "measured": lambda r: r.measured_bytes and human_bytes(r.measured_bytes),
        "compile s": lambda r: f"{r.compile_seconds:.1f}",
        "loss": lambda r: f"{r.loss:.4f}",
        "held-out": lambda r: None if r.held_out is None else f"{r.held_out:.4f}",
        "of seeds": lambda r: ends[r.name],
    }
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("variant", overflow="fold")
    cells = {name: [text(r) for r in results] for name, text in columns.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for result, *row in zip(results, *cells.values(), strict=True):
        table.add_row(result.name, *(text or "-" for text in row))
    console = console or Console(width=None if Console().is_terminal else 130)
    console.print(table, highlight=False)
    steps, last = len(results[0].losses), options.block_steps
    held_out = f", held-out of {options.held_out_batches} batches" if "held-out" in cells else ""
    lines = [
        "",
        f"{options.rounds} rounds of {last} steps each, in turn, after one that is not timed.",
        "Times are medians over rounds; ratios are to the first variant within a round.",
        f"Memory is of one device. The loss is the mean of the last {last} of {steps} steps"
        f"{held_out}{'' if options.seeds == 1 else f', of {options.seeds} seeds'}.",
    ]
    console.print("\n".join(lines), highlight=False)


def to_json(results: Sequence[Result], options: CompareOptions, flags: Sequence[str]) -> str:
    """Writes down all that was measured, and by what; what is no number is null."""
    device = jax.devices()[0]
    record = {
        "options": dataclasses.asdict(options),
        "flags": list(flags),
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "jax": jax.__version__,
        "variants": [dataclasses.asdict(result) for result in results],
    }
    return json_text(record)


def save_png(results: Sequence[Result], path: str) -> None:
    """Draws the time of a step in every round, and the loss of every step."""
    figure = new_figure(11, 2.5 + 0.3 * len(results))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for i, result in enumerate(results):
        times = [1e3 * t for t in result.step_seconds]
        left.plot(times, [i] * len(times), "o", color=f"C{i}", alpha=0.4, markersize=4)
        left.plot([result.milliseconds[1]], [i], "|", color=f"C{i}", markersize=16)
        steps = range(1, len(result.losses) + 1)
        style = {"linewidth": 1.2, "linestyle": ("-", "--")[i % 2]}  # equal ones lie on each other
        right.plot(steps, result.losses, color=f"C{i}", label=result.name, **style)
    left.set_yticks(range(len(results)), [result.name for result in results], fontsize=8)
    left.invert_yaxis()
    left.set_xlim(left=0)
    finish_axes(left, "time of a step, each round", x="ms")
    finish_axes(right, "loss", x="step")
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _parse(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    name, values = name.strip().removeprefix("--").replace("_", "-"), values.split(",")
    if not name or not all(map(str.strip, values)):
        raise ValueError(
            f"--vary {text!r} is not known: write a flag and its values, as in precision=f32,bf16"
        )
    if name == "simulate-devices":
        raise ValueError(
            "--vary simulate-devices: one process has one number of devices; vary the mesh, and "
            "give --simulate-devices by itself"
        )
    return name, [value.strip() for value in values]


def _word(module_name: str, base: Any, name: str, value: str) -> str:
    try:
        return flag_word(module_name, base, name, value)
    except ValueError as error:
        raise ValueError(f"--vary {name}={value}: {error}") from None
