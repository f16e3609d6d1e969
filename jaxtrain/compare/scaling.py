"""The command ``jaxtrain scaling``: the speed-up of a step over devices, timed or predicted.

Strong scaling keeps the global batch, weak scaling the rows of a device. The speed-up of both is in
items per second over the first count; the efficiency is the speed-up over the ratio of the counts.
"""

import dataclasses
import operator
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import tyro
from rich.console import Console

from jaxtrain.compare.command import start_alone
from jaxtrain.compare.turns import compare, naming
from jaxtrain.experiment import Experiment
from jaxtrain.host.memory import human_bytes, human_count
from jaxtrain.host.paths import as_path, json_text, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.estimate import abstract_mesh
from jaxtrain.planning.report import new_table, verdict
from jaxtrain.planning.targets import Target, target_of
from jaxtrain.run.main import build_experiment, load_config
from jaxtrain.sharding.mesh import describe_mesh
from jaxtrain.sharding.rules import batch_shardings

ROUNDS, BLOCK_STEPS = 8, 4
SIMULATED = "simulated CPU"


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """Times an experiment's train step on several numbers of devices, or predicts it for a chip,
    and reports the speed-up and the efficiency of strong and weak scaling.

    Strong scaling keeps --global-batch; weak scaling keeps the rows of a device, so --global-batch
    is that of the first number. All other flags go to the experiment. The mesh axis of size -1
    takes the devices that others leave: data, or fsdp with --mesh.data 1 --mesh.fsdp -1.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    devices: str
    """Numbers of devices, such as 1,2,4,8."""
    target: str | None = None
    """A chip, such as h100 or v5e, for which the step is planned on each number of devices. Those
    that are here are timed too where they are accelerators, or --simulate-devices is given."""
    out: str | None = None
    """Also write scaling.json and the picture scaling.png into this folder, which is made."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on a number of devices.

    Args:
      on: the kind of device, :data:`SIMULATED`, or the target of a prediction.
      step_seconds: mean of each round's steps, or the one prediction.
      sent_bytes, memory_bytes: of one device, in a step and at its peak; None where not known.
      scaling, speed_up, efficiency: what :func:`over_first` finds.
    """

    name: str
    devices: int
    global_batch: int
    items: int  # such as tokens, of a step over all devices
    mesh: str
    on: str = ""
    predicted: bool = False
    step_seconds: Sequence[float] = ()
    sent_bytes: float | None = None
    memory_bytes: int = 0
    scaling: str = ""
    speed_up: float = 1.0
    efficiency: float = 1.0


def run_scaling(options: ScalingOptions, rest: list[str]) -> int:
    """Prints the table, and writes what is asked for."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)+", options.devices):
        raise ValueError(f"`devices` is {options.devices!r}: give numbers, such as 1,2,4,8")
    counts = sorted({*map(int, options.devices.split(","))})
    if options.out is not None:  # Where that cannot be, nothing is timed.
        new_figure(1, 1)
    targets = {n: target_of(options.target, n) for n in counts if options.target is not None}
    module, config = load_config(options.experiment, rest, command="scaling", own=type(options))
    batch, first = config.global_batch, counts[0]
    if any(batch * n % first for n in counts):
        raise ValueError(
            f"`global_batch` is {batch}, which weak scaling splits in {first}: use a multiple of it"
        )
    start_alone(config, command="scaling")
    there = jax.device_count()
    if not targets and counts[-1] > there:
        raise ValueError(
            f"`devices` has {counts[-1]} and JAX sees {there} here: give --simulate-devices "
            f"{counts[-1]} to try it on a CPU, or --target to predict it"
        )
    if targets and jax.default_backend() == "cpu" and not config.simulate_devices:
        there = 0
    weak = {(n, batch * n // first) for n in counts}
    points, experiments = [], {}
    for n, rows in sorted(weak | {(n, batch) for n in counts}):
        with naming(name := f"devices={n} global-batch={rows}"):  # What cannot be is not compiled.
            if rows not in experiments:
                own = dataclasses.replace(config, global_batch=rows)
                experiments[rows] = build_experiment(module, own, outline=n > there)
            experiment = experiments[rows]
            mesh = abstract_mesh(experiment.layout.mesh.sizes, n)
            batch_shardings(experiment.data.batch, mesh, experiment.laid.rules)
        points.append(Point(name, n, rows, experiment.data.items_per_step, describe_mesh(mesh)))
    timed = [point for point in points if point.devices <= there]
    found = [measure(timed, experiments)] if timed else []
    if targets:
        found.append([predict(x, experiments[x.global_batch], targets[x.devices]) for x in points])
    series = []
    for each in found:
        series.append(over_first("strong", [x for x in each if x.global_batch == batch]))
        series.append(over_first("weak", [x for x in each if (x.devices, x.global_batch) in weak]))
    print_table(series, item=experiments[batch].data.item)
    if options.out is not None:
        folder = as_path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"options": dataclasses.asdict(options), "flags": rest, "jax": jax.__version__}
        record["points"] = [dataclasses.asdict(x) for each in series for x in each]
        write_whole(folder / "scaling.json", json_text(record))
        draw(series, folder / "scaling.png")
        print(folder / "scaling.json", folder / "scaling.png", sep="\n")
    return 0


def measure(points: Sequence[Point], experiments: Mapping[int, Experiment]) -> list[Point]:
    """Times experiments, by global batch, in turn. Raises ValueError where one does not fit."""
    block = BLOCK_STEPS * experiments[points[0].global_batch].layout.steps_per_call
    own = {}
    for n, each in experiments.items():  # What is timed is not accounted for.
        engine = each.task.engine
        engine = engine if engine.check is None else dataclasses.replace(engine, check=None)
        own[n] = each.with_(steps=(ROUNDS + 1) * block, engine=engine)
    variants = {point.name: own[point.global_batch] for point in points}
    devices = {point.name: jax.devices()[: point.devices] for point in points}
    results = compare(variants, rounds=ROUNDS, block_steps=block, devices=devices)
    one, found = jax.devices()[0], []
    for point, result in zip(points, results, strict=True):
        numbers = {"step_seconds": result.step_seconds, "sent_bytes": result.sent_bytes}
        numbers |= {"on": SIMULATED if one.platform == "cpu" else one.device_kind}
        found.append(dataclasses.replace(point, memory_bytes=result.compiled_bytes, **numbers))
    return found


def predict(point: Point, experiment: Experiment, target: Target) -> Point:
    """Plans an experiment for a target. Raises ValueError where it does not fit."""
    with naming(point.name):
        plan = plan_experiment(experiment, target)
        if not plan.fits or plan.roofline is None:
            why = "; ".join(plan.notes) if plan.fits else verdict(plan)
            raise ValueError(f"on {target} the step {why}; begin with more devices, or use fsdp")
    print(f"{point.name}: planned for {target}", file=sys.stderr, flush=True)
    return dataclasses.replace(
        point,
        on=str(target),
        predicted=True,
        step_seconds=[plan.roofline.step_seconds],
        sent_bytes=None if plan.traffic is None else sum(row.sent for row in plan.traffic),
        memory_bytes=plan.memory.peak,
    )


def over_first(scaling: str, points: Sequence[Point]) -> list[Point]:
    """Returns points with the speed-up over the first, by the median over rounds of the ratio of
    times within a round, and with the efficiency."""
    first, found = points[0], []
    for point in points:
        times = map(operator.truediv, first.step_seconds, point.step_seconds)
        speed_up = statistics.median(times) * point.items / first.items
        own = {"speed_up": speed_up, "efficiency": speed_up * first.devices / point.devices}
        found.append(dataclasses.replace(point, scaling=scaling, **own))
    return found


def print_table(series: Sequence[Sequence[Point]], *, item: str) -> None:
    """Prints a row for each point, and how they came about."""
    numbers = "batch", "step ms", f"{item}/s", "speed-up", "efficiency", "sent", "memory"
    table = new_table("scaling", "devices", "mesh", *numbers)
    table.columns[1].justify = table.columns[2].justify = "left"
    points = [point for points in series for point in points]
    for point in points:
        seconds = statistics.median(point.step_seconds)
        table.add_row(
            point.scaling,
            f"{point.on}, predicted" if point.predicted else f"{point.devices} {point.on}",
            *(point.mesh, f"{point.global_batch:,}", f"{1e3 * seconds:.4g}"),
            human_count(point.items / seconds),
            *(f"{point.speed_up:.2f}", f"{point.efficiency:.0%}"),
            "-" if point.sent_bytes is None else human_bytes(point.sent_bytes),
            human_bytes(point.memory_bytes),
        )
    lines = ["", "Memory of a device, and what it sends in a step, are by the compiled program."]
    if not all(point.predicted for point in points):
        lines.append(f"Times are medians of {ROUNDS} rounds; speed-ups are those within a round.")
    if any(point.on == SIMULATED for point in points):
        lines.append("Simulated devices share cores: their times say nothing of real speeds.")
    if any(point.predicted for point in points):
        lines.append("Predicted steps have not run; jaxtrain plan says what bounds their time.")
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    console.print(table)
    console.print("\n".join(lines), soft_wrap=True)


def draw(series: Sequence[Sequence[Point]], path: Any) -> None:
    """Draws times and efficiencies over devices: measured ones solid, with squares where devices
    are simulated, and predicted ones dashed and hollow."""
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for number, points in enumerate(series):
        one, devices = points[0], [point.devices for point in points]
        source = f"{one.on.partition(':')[0]}, predicted" if one.predicted else one.on
        style = {"color": f"C{number % 2}", "label": f"{one.scaling}, {source}"}
        style |= {"marker": "s" if one.on == SIMULATED else "o"}
        style |= {"linestyle": "--", "markerfacecolor": "none"} if one.predicted else {}
        left.plot(devices, [1e3 * statistics.median(p.step_seconds) for p in points], **style)
        right.plot(devices, [100 * point.efficiency for point in points], **style)
    ticks = sorted({point.devices for points in series for point in points})
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    for axes, title, unit in ((left, "time of a step", "ms"), (right, "efficiency", "%")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, map(str, ticks))
        finish_axes(axes, title, x="devices", y=unit)
    right.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
