"""The command ``jaxtrain compare``: variants of an experiment, timed in turn.

Variants differ in flags: precision, optimizer, layout. All are compiled before anything is timed.
Then they train in rounds, a few steps each, so that whatever else the machine does falls on all of
them alike. The batches of a block are on the devices before its time begins. On an accelerator the
state of a variant lies on the devices only while it trains: each has their memory to itself.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import operator
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import (
    Experiment,
    compile_eval,
    compile_loop,
    evaluate,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
)
from jaxtrain.host import memory, quiet
from jaxtrain.host.memory import human_bytes, human_count
from jaxtrain.host.paths import as_path, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.parallel.mesh import describe_mesh
from jaxtrain.parallel.offload import is_on_host
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.run.hooks import Hook
from jaxtrain.run.loop import train_loop
from jaxtrain.run.main import load_config, load_experiment, simulate_devices
from jaxtrain.run.observe.throughput import mfu
from jaxtrain.run.refusal import called_back

PyTree = Any


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
    out: str | None = None
    """Also write compare.json, with the time of every round and the loss of every step, into this
    folder, which is made."""
    png: str | None = None
    """Also draw step times and losses in this PNG file."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one variant.

    Args:
      name: its flags.
      mesh: in words.
      step_seconds: mean of each timed round's steps.
      ratio: the median over rounds of that over the first variant's.
      items_per_second: by the median.
      mfu: model FLOPs utilisation; None where the device's peak or the model's FLOPs are not known.
      compiled_bytes: of one device at the step's peak, by the compiler.
      measured_bytes: the same by the device's own count; None where it keeps none, and where an
        earlier variant needed more.
      compile_seconds: of the train step.
      losses: of every step, those of the round that is not timed among them.
      loss: mean over the steps of the last round.
      held_out: loss after the last step; None where it was not evaluated.
    """

    name: str
    mesh: str
    step_seconds: tuple[float, ...]
    ratio: float
    items_per_second: float
    mfu: float | None
    compiled_bytes: int
    measured_bytes: float | None
    compile_seconds: float
    losses: tuple[float, ...]
    loss: float
    held_out: float | None

    @property
    def milliseconds(self) -> tuple[float, float, float]:
        """The quartiles of a step's time, the median in the middle."""
        first, median, third = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return 1e3 * first, 1e3 * median, 1e3 * third


def run_compare(options: CompareOptions, rest: list[str]) -> int:
    """Prints the comparison, and writes what is asked for."""
    if options.png is not None:  # Where that cannot be, nothing is trained.
        new_figure(1, 1)
    sizes = {"rounds": (options.rounds, 2), "block_steps": (options.block_steps, 1)}
    sizes |= {"held_out_batches": (options.held_out_batches, 0)}
    for name, (value, least) in sizes.items():
        if value < least:
            raise ValueError(f"`{name}` is {value}: give at least {least}")
    _, base = load_config(options.experiment, rest, command="compare")
    if count := getattr(base, "simulate_devices", 0):  # before anything asks JAX for devices
        with contextlib.suppress(RuntimeError):  # JAX has started: what it sees decides what fits
            simulate_devices(count)
    quiet.start()
    variants = make_variants(options.experiment, options.vary, rest)
    results = compare(
        variants,
        rounds=options.rounds,
        block_steps=options.block_steps,
        held_out_batches=options.held_out_batches,
    )
    item = next(iter(variants.values())).item
    print_table(results, options, item=item)
    if options.out is not None:
        folder = as_path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "compare.json", to_json(results, options, rest))
        print(folder / "compare.json")
    if options.png is not None:
        save_png(results, options.png)
        print(options.png)
    return 0


def make_variants(
    module_name: str, vary: Sequence[str], flags: Sequence[str]
) -> dict[str, Experiment]:
    """Builds the experiments of all combinations of values, by name.

    Args:
      module_name: the experiment's module.
      vary: a flag and its values each, such as ``"precision=f32,bf16"``.
      flags: those that all variants share.

    Raises:
      ValueError: for a flag that is not the experiment's, a value that it does not take, and what
        building a variant raises, with its name.
    """
    given = [_parse(text) for text in vary]
    if not given:
        raise ValueError(
            "there is nothing to compare: give --vary, as in --vary precision=f32,bf16"
        )
    _, base = load_config(module_name, flags, command="compare")
    variants = {}
    for values in itertools.product(*(values for _, values in given)):
        pairs = list(zip((name for name, _ in given), values, strict=True))
        name = " ".join(map("=".join, pairs))
        words = [*flags, *(_flag(module_name, base, *pair) for pair in pairs)]
        with _naming(name):
            variants[name] = load_experiment(module_name, words, command="compare")
    return variants


def compare(
    variants: Mapping[str, Experiment], *, rounds: int, block_steps: int, held_out_batches: int = 0
) -> list[Result]:
    """Compiles all variants, trains them in turn and compares.

    Args:
      variants: experiments by name.
      rounds: timed ones, at least 2, after one that is not timed.
      block_steps: train steps of a variant in each round.
      held_out_batches: to evaluate in the end; 0 for none.

    Raises:
      ValueError: where one cannot be compiled or does not fit into memory, with its name.
    """
    memory.keep_freed_memory()
    runs = []
    for name, experiment in variants.items():  # What does not fit is refused before it takes long.
        with _naming(name):
            _check_steps(experiment, rounds, block_steps)
            runs.append(_Run(name, experiment))
    for run in runs:
        with _naming(run.name):
            run.compile((rounds + 1) * block_steps)
        text = f"compiled in {run.program.compile_seconds:.1f} s"
        size = human_bytes(run.program.memory_bytes)
        print(f"{run.name}: {text}, {size}", file=sys.stderr, flush=True)
    # The device counts its largest use since the process began: the smallest comes first.
    for run in sorted(runs, key=lambda run: run.program.memory_bytes):
        before = memory.device_memory().get("peak")
        with _naming(run.name):
            run.train_block(block_steps)
        after = memory.device_memory().get("peak")
        run.measured_bytes = None if after == before else after
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    for number in range(1, rounds + 1):
        for run in runs:
            seconds[run.name].append(run.train_block(block_steps))
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    first = seconds[runs[0].name]
    results = []
    for run in runs:
        times, experiment = seconds[run.name], run.experiment
        median = statistics.median(times)
        devices, dtype = run.mesh.devices.flat, experiment.policy.compute_dtype
        with _naming(run.name):
            held_out = run.evaluate(held_out_batches)
        results.append(
            Result(
                name=run.name,
                mesh=describe_mesh(run.mesh),
                step_seconds=tuple(times),
                ratio=statistics.median(map(operator.truediv, times, first)),
                items_per_second=experiment.items_per_step / median,
                mfu=mfu(experiment.flops_per_step, median, devices, dtype=dtype),
                compiled_bytes=run.program.memory_bytes,
                measured_bytes=run.measured_bytes,
                compile_seconds=run.program.compile_seconds,
                losses=tuple(run.losses),
                loss=statistics.fmean(run.losses[-block_steps:]),
                held_out=held_out,
            )
        )
    return results


class _Run(Hook):
    """A variant that is compiled, and trains on from its own state block by block."""

    program: CompiledStep
    measured_bytes: float | None = None

    def __init__(self, name: str, experiment: Experiment):
        self.name, self.experiment = name, experiment
        self.mesh = make_experiment_mesh(experiment)
        self._shapes = make_abstract_state(experiment, self.mesh)
        self._places = jax.tree.map(lambda x: x.sharding, self._shapes)
        self._state: PyTree = None
        self.losses: list[float] = []

    def compile(self, steps: int) -> None:
        """Compiles for so many steps, in blocks of whole calls."""
        self._train, programs = compile_loop(self.experiment, self._shapes, self.mesh, 0, steps)
        (self.program,) = programs.values()

    def on_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.losses.append(metrics["loss"])

    def train_block(self, steps: int) -> float:
        """Trains so many steps on and returns the seconds of one."""
        if self._state is None:
            self._state = make_state(self.experiment, self.mesh)
        state, done = jax.device_put(self._state, self._places), len(self.losses)
        # Opened for every block, and closed before its time begins: no thread reads ahead in it.
        with self.experiment.train_batches(done, batch_sharding(self.mesh)) as stream:
            batches = jax.block_until_ready(list(itertools.islice(stream, steps)))
        self._state, calls = None, {"steps_per_call": self.experiment.steps_per_call}
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = train_loop(self._train, state, batches, steps=done + steps, hooks=[self], **calls)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        self._state = state if self.mesh.devices.flat[0].platform == "cpu" else park(state)
        return seconds / steps

    def evaluate(self, count: int) -> float | None:
        """The held-out loss over so many batches; of several sets, of the one that decides which
        checkpoint is best."""
        sets = self.experiment.eval_sets
        if not count or not sets:
            return None
        opened = next(x for name, x in sets.items() if self.experiment.best_metric.startswith(name))
        batches = list(itertools.islice(opened(batch_sharding(self.mesh)), count))
        state = jax.device_put(self._state, self._places)
        step = compile_eval(self.experiment, state, batches[0], self.mesh)
        return float(evaluate(step, state, batches)["loss"])


def park(state: PyTree) -> PyTree:
    """Copies a state into the host's memory, and leaves on the devices what they need not hold.

    Keys stay, which are a few bytes, and so does what lies in the host's memory already.
    """

    def copy(x: jax.Array) -> Any:
        stays = is_on_host(x) or jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x if stays else np.array(x)

    return jax.tree.map(copy, state)


def print_table(
    results: Sequence[Result],
    options: CompareOptions,
    *,
    item: str,
    console: Console | None = None,
) -> None:
    """Prints a row for each variant; columns of which nothing is known are left out."""
    columns = {
        "step ms": lambda r: f"{r.milliseconds[1]:.4g}",
        "quartiles": lambda r: f"{r.milliseconds[0]:.4g} to {r.milliseconds[2]:.4g}",
        "ratio": lambda r: f"{r.ratio:.3f}",
        f"{item}/s": lambda r: human_count(r.items_per_second),
        "MFU": lambda r: None if r.mfu is None else f"{r.mfu:.1%}",
        "compiled": lambda r: human_bytes(r.compiled_bytes),
        "measured": lambda r: r.measured_bytes and human_bytes(r.measured_bytes),
        "compile s": lambda r: f"{r.compile_seconds:.1f}",
        "loss": lambda r: f"{r.loss:.4f}",
        "held-out": lambda r: None if r.held_out is None else f"{r.held_out:.4f}",
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
        "Times are medians over rounds; the ratio is to the first variant within a round.",
        f"Memory is of one device. The loss is the mean of the last {last} of {steps} steps"
        f"{held_out}.",
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
    return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


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


def _flag(module_name: str, base: Any, name: str, value: str) -> str:
    """Writes a flag of the experiment with a value that it takes.

    Raises:
      ValueError: there is no such flag, or it does not take the value.
    """
    try:
        old = operator.attrgetter(name.replace("-", "_"))(base)
    except AttributeError:
        raise ValueError(f"--vary {name}: {module_name} has no flag --{name}") from None
    word = f"--{name}={value}"
    if isinstance(old, bool) and value.lower() in ("true", "false"):
        group, dot, last = name.rpartition(".")
        word = f"--{group}{dot}{'' if value.lower() == 'true' else 'no-'}{last}"
    try:
        tyro.cli(type(base), args=[word], default=base, console_outputs=False)
    except SystemExit:
        raise ValueError(
            f"--vary {name}={value}: {module_name} does not take {word}; see python -m "
            f"{module_name} --help"
        ) from None
    return word


def _check_steps(experiment: Experiment, rounds: int, block_steps: int) -> None:
    steps = (rounds + 1) * block_steps
    if steps > experiment.steps:
        raise ValueError(
            f"{rounds} rounds and one before them take {steps} steps and the experiment has "
            f"`steps` {experiment.steps}: give more, or fewer `rounds` or block_steps"
        )
    if block_steps % experiment.steps_per_call:
        raise ValueError(
            f"block_steps is {block_steps} and steps_per_call {experiment.steps_per_call}: give a "
            "multiple of it"
        )


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Names the variant in what is refused."""
    try:
        yield
    except ValueError as error:
        if called_back(error):  # a mistake in the user's own code, which keeps its traceback
            raise
        raise ValueError(f"variant {name}: {error}") from None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"variant {name} does not fit into the memory of the devices: leave it out, or make "
            "all of them smaller; jaxtrain plan says what takes it"
        ) from None


def _finite(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: None if isinstance(x, float) and not math.isfinite(x) else x,
        tree,
        is_leaf=lambda x: x is None,
    )
