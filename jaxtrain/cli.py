"""The command line: ``jaxtrain COMMAND ...``, the same as ``python -m jaxtrain COMMAND ...``.

A command is a frozen dataclass of its flags and a function that runs it; :data:`COMMANDS` lists
them. A command that cannot run prints one sentence on standard error and exits with status 2.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console

import jaxtrain
from jaxtrain.compare import command as compare
from jaxtrain.compare import compose_command as compose
from jaxtrain.compare import parity, scaling
from jaxtrain.data import command as data
from jaxtrain.engines.pipeline import balance, draw
from jaxtrain.engines.pipeline.tables import SCHEDULES, make_table
from jaxtrain.evaluate import command as evaluate
from jaxtrain.hf import command as hf
from jaxtrain.hf import export_command as export
from jaxtrain.hf import shrink_command as shrink
from jaxtrain.host import output, quiet
from jaxtrain.host.links import BETWEEN
from jaxtrain.host.paths import check_on_disk
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.landscape import command as landscape
from jaxtrain.layout import Layout
from jaxtrain.planning import by_layer, nearest_fit, ranking, search
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.targets import Target, parse_target, stay_on_cpu, with_links
from jaxtrain.predict import command as predict
from jaxtrain.run import check_hosts, launch, parameter_server, replay, verify
from jaxtrain.run.main import Config, build_experiment, load_config, typed_fields
from jaxtrain.run.observe import terminal
from jaxtrain.run.observe.profile import command as profile
from jaxtrain.run.observe.report import command as report
from jaxtrain.run.observe.report import live
from jaxtrain.run.refusal import refuse_aliases, refuse_two_names, refusing
from jaxtrain.serve import command as serve
from jaxtrain.serve import generate_command as generate
from jaxtrain.serve.planning import plan_serving
from jaxtrain.study import command as study
from jaxtrain.study import coordinates, ladder, noise, retrain
from jaxtrain.study import runs_command as runs

DESCRIPTION = (
    "Plans, checks, starts and reports training runs. `jaxtrain --version` prints the version."
)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Args:
      options: a frozen dataclass: its fields are the flags, its docstring the help.
      run: ``(options, rest) -> exit status``; ``rest`` are the flags that it passes on.
      passes_on: whether flags that ``options`` does not have go to ``rest``, or all that stands
        after ``--``; otherwise they are an error, and ``rest`` is empty.
    """

    options: type
    run: Callable[[Any, list[str]], int]
    passes_on: bool = False


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """Draws pipeline schedules tick by tick and compares their makespan, bubble and stash."""

    stages: int
    """Devices along the pipe axis."""
    microbatches: int
    """Microbatches per step."""
    virtual: int | None = None
    """Chunks per device of the interleaved schedule; 2 when left out."""
    schedule: Literal[SCHEDULES] | None = None  # type: ignore[valid-type]
    """Only this one; all when left out."""
    forward: float = 1.0
    """Time of a whole stage forward."""
    backward: float = 2.0
    """Time of a whole stage backward; 3 when it recomputes the forward."""
    png: Path | None = None
    """Also save the picture, true to time, in this file."""
    model: str | None = None
    """A preset of the GPT, such as gpt2-124m: also print what its embedding, layers and head weigh
    on each stage, and the makespan in operations, of even and of balanced stages."""


def run_schedule(options: ScheduleOptions, rest: list[str]) -> int:
    """Prints, and where asked for saves, the pictures and the summary."""
    del rest
    for name in ("forward", "backward"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name} is {getattr(options, name)}: a time is more than 0")
    tables = []
    for name in SCHEDULES if options.schedule is None else [options.schedule]:
        virtual = options.virtual
        if virtual is None or (options.schedule is None and name != "interleaved"):
            virtual = 2 if name == "interleaved" else 1
        tables.append(
            make_table(
                name, stages=options.stages, microbatches=options.microbatches, virtual=virtual
            )
        )
    times = {"forward": options.forward, "backward": options.backward}
    if options.png is not None:
        check_on_disk(options.png, "--png")
        draw.save_png(tables, options.png, **times)
    rows = [] if options.model is None else _balance(options.model, tables)
    draw.print_tables(tables)
    print()
    draw.print_summary(tables, **times)
    if rows:
        print()
        draw.print_balance(rows)
    return 0


def _balance(name: str, tables: Sequence[Any]) -> list[tuple]:
    """The rows of :func:`draw.print_balance`: one microbatch of a GPT, with rematerialisation."""
    from jaxtrain.data import packed_shapes
    from jaxtrain.models import decoder
    from jaxtrain.models.config import stacked_layers

    if name not in decoder.PRESETS:
        raise ValueError(f"--model is {name!r}: use one of {', '.join(decoder.PRESETS)}")
    model = decoder.PRESETS[name]()
    init_fn, batch = functools.partial(decoder.init, model), packed_shapes(1, model.seq_len)
    weights = balance.weigh(decoder.stages(model), init_fn, batch)
    rows, layers = [], stacked_layers(model)
    for table in tables:
        parts = table.stages * table.virtual
        placed = {"balanced": balance.balanced(weights, layers=layers, stages=parts)}
        if layers % parts == 0:
            placed = {"even": (layers // parts,) * parts} | placed
        for kind, counts in placed.items():
            forward_G, backward_G = weights.of_stages(counts)
            rows.append((table, kind, counts, forward_G / 1e9, backward_G / 1e9))
    return rows


@dataclasses.dataclass(frozen=True)
class ParityOptions:
    """Trains an experiment a few steps on one device and on meshes of 8 simulated devices, and
    compares loss, gradients, parameters, optimizer state and evaluation.

    All other flags go to the experiment: see `python -m EXPERIMENT --help`. The exit status is 1
    where a mesh disagrees.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    precision: Literal[tuple(parity.TOLERANCES)] = "f32"  # type: ignore[valid-type]
    """Dtypes of both sides. In bf16 a mesh rounds each device's part of a sum."""
    tolerance: float | None = None
    """The largest relative error of a leaf that counts as agreement; left out, 1e-5 in f32 and 2e-2
    in bf16."""
    compare_steps: int = parity.STEPS
    """Number of steps to compare."""
    layout: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A mesh to compare, such as data=2,tensor=4 or data=8,zero=1 or, with a slow network between
    halves of the data axis, data=8,dcn_data=2; can be given several times. Left out, the usual ones
    and the experiment's own."""
    explain: bool = False
    """Name the line at which a mesh that disagrees begins to differ from one device, and why. All
    intermediate values are kept: use a small model."""


def run_parity(options: ParityOptions, rest: list[str]) -> int:
    """Prints the comparison; 1 where a mesh disagrees."""
    with contextlib.suppress(RuntimeError):  # JAX has started: what it sees decides what fits
        simulate_devices(parity.DEVICES)
    module, config = load_config(options.experiment, rest, command="parity", own=type(options))
    for text in options.layout:  # what cannot be read is refused before anything is built
        type(getattr(config, "layout", Layout())).parse(text)
    experiment = build_experiment(module, config)
    layouts = options.layout or parity.usual_layouts(experiment)
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = parity.TOLERANCES[options.precision]
    comparisons = parity.compare(
        experiment,
        layouts=layouts,
        steps=options.compare_steps,
        policy=options.precision,
        explain=tolerance if options.explain else None,
    )
    return 0 if parity.report(show_progress(comparisons, tolerance), tolerance=tolerance) else 1


def show_progress(
    comparisons: Iterable[parity.Comparison], tolerance: float
) -> Iterator[parity.Comparison]:
    """Passes comparisons on, with a line on standard error for each."""
    start = time.monotonic()
    for comparison in comparisons:
        verdict = "agrees" if comparison.agrees(tolerance) else "does NOT agree"
        if comparison.refusal is not None:
            verdict = "does not fit"
        seconds = time.monotonic() - start
        print(f"{comparison.layout}: {verdict} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        yield comparison


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Runs one step of a run again, from the newest checkpoint before it, and says of every leaf
    whether its gradient is finite. Nothing in the run's folder changes."""

    run_dir: tyro.conf.Positional[str]
    """The run's folder."""
    step: int
    """Which step, as the logs count."""
    module: str | None = None
    """The run's experiment, such as experiments.gpt. The run's folder names it too, but no code is
    run because a file says so."""


def run_replay(options: ReplayOptions, rest: list[str]) -> int:
    """Prints what the step computes."""
    del rest
    examination = replay.replay(options.run_dir, options.step, module=options.module)
    terminal.print_lines(replay.report(examination, options.step))
    return 0


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Checks the receipts of a run made with --receipt: the chain and the checkpoints that are
    kept, or with --segment the chain and that these steps give the same bits when repeated here.

    All other flags go to the experiment, in the place of the run's: another mesh, say. Nothing in
    the run's folder changes. The exit status is 1 where something is not as its receipt has it.
    """

    run_dir: tyro.conf.Positional[str]
    """The run's folder."""
    segment: int | None = None
    """Segment to repeat, as numbered in the output without this flag."""
    module: str | None = None
    """The run's experiment, such as experiments.gpt. The run's folder names it too, but no code is
    run because a file says so."""


def run_verify(options: VerifyOptions, rest: list[str]) -> int:
    """Prints what holds and, on lines of its own, what does not; 1 where anything does not."""
    if options.segment is None and rest:
        raise ValueError(f"{rest[0]} is a flag of the experiment: give --segment too")
    if options.segment is None:
        lines, faults = verify.check_run(options.run_dir)
    else:
        given = {"module": options.module, "flags": rest}
        lines, faults = verify.repeat(options.run_dir, options.segment, **given)
    terminal.print_lines([*lines, *(f"NOT as its receipt: {fault}" for fault in faults)])
    return 1 if faults else 0


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Compiles an experiment's train step for a TPU, GPU or CPU target, none of which need be here,
    and says whether it fits, what it communicates along which axis, and what bounds its speed.

    All other flags go to the experiment: see `python -m EXPERIMENT --help`. The exit status is 1
    where it does not fit.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    target: str
    """Devices to plan for: v5e:4x4 (also v4, v5p, v6e, tpu7x) or v5litepod-16, h100:4x8 (hosts x
    GPUs; also a100, h200, b200, gb200), or cpu:8."""
    slices: int = 1
    """TPU slices of that topology."""
    json: bool = False
    """Print one JSON object instead of tables."""
    save_hlo: Path | None = None
    """Also save the compiled program's text in this file."""
    by_layer: bool = False
    """Also print which part of the model has which memory: parameters, optimizer state, gradients,
    and what its layers keep for the backward pass."""
    serve: str | None = None
    """Plan a server of the model instead, of SLOTSxLENGTH such as 16x8192: memory of weights and
    cache, slots that fit, and the least time of a token and of a prompt."""
    search: bool = False
    """Rank meshes, microbatches and rematerialisation instead, and say why the others lost."""
    compile_best: int | None = None
    """Number of the best layouts to compile; left out, as many as fit in 45 s, at least one."""
    search_seconds: float = 105.0
    """Time limit of the search in seconds. Once a mesh fits, a third of the time is spent on more
    meshes and the rest on compiling; layouts that are not compiled in time are ranked by their
    estimate."""
    dcn_gbps: float | None = None
    """Gb/s of one device's share of the network between hosts (of TPUs: between slices); left out,
    the published figure, which the report prints."""
    links: Path | None = None
    """File of `jaxtrain check-hosts --out`: collectives take as long as it has measured, and not as
    published figures say. Without it in a class of links (within a host, between hosts), that class
    keeps the published figure."""
    tokens: float | None = None
    """Tokens to train on: the plan says how many days they take, a search those of the best."""
    price: float | None = None
    """Price of one chip for an hour, in any currency: the plan says what training costs."""


def run_plan(options: PlanOptions, rest: list[str]) -> int:
    """Prints the plan, with a change where it does not fit, or the search; 1 where nothing fits."""
    target = parse_target(options.target, slices=options.slices, dcn_gbps=options.dcn_gbps)
    if options.links is not None:
        target = with_links(target, options.links)
        if options.dcn_gbps is not None and target.chip.measured.get(BETWEEN):
            raise ValueError("--links has measured the network and --dcn-gbps states it: give one")
    if options.search and options.save_hlo is not None:
        raise ValueError("--save-hlo saves one program and --search compiles several: give one")
    of_training = "search", "by_layer", "save_hlo", "tokens", "price"
    for name in of_training if options.serve is not None else ():
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is of a train step and --serve of a server: give one")
    if options.search and options.by_layer:
        raise ValueError("--by-layer is of one layout and --search of several: give one")
    if options.save_hlo is not None:
        check_on_disk(options.save_hlo, "--save-hlo")
    stay_on_cpu()
    # The devices of a plan, which may be simulated, come before any that JAX finds.
    quiet.start() if options.search else target.devices()
    module, config = load_config(options.experiment, rest, command="plan", own=type(options))
    if options.search:
        return _search(options, rest, target, module, config)
    experiment = build_experiment(module, config, outline=True)
    has_layout = isinstance(getattr(config, "layout", None), Layout)
    devices = experiment.layout.mesh.devices
    if devices not in (target.size, -1) and devices > 0 and not has_layout:
        raise ValueError(
            f"experiment {experiment.name!r} is made for {devices} devices and its Config has no "
            f"layout to change that: give a target of {devices}, not {target}"
        )
    if options.serve is not None:
        served = plan_serving(experiment, target, options.serve)
        print(json.dumps(served.to_json()) if options.json else served.report(), end="")
        return 0 if served.fits else 1
    plan = plan_experiment(experiment, target)
    if options.save_hlo is not None and plan.hlo:
        options.save_hlo.write_text(plan.hlo)
    if not plan.fits:
        found = nearest_fit.nearest_fit(experiment, target) if has_layout else None
        plan = dataclasses.replace(plan, mend=nearest_fit.describe(found))
    terms = {"tokens": options.tokens, "price": options.price}
    costs = None
    if any(value is not None for value in terms.values()):
        seconds = plan.roofline.step_seconds if plan.roofline else math.inf
        costs = ranking.cost_at(experiment.data.items_per_step / seconds, target.size, **terms)
    if options.json:
        costs_known = {} if costs is None else {"cost": costs}
        print(json.dumps(plan.to_json() | costs_known, allow_nan=False, default=str))
    else:
        # Wide enough for the tables where the output is no terminal.
        console = Console(highlight=False, width=None if Console().is_terminal else 100)
        plan.draw(console)
        if costs is not None:
            unknown = f"--tokens and --price: the time of a step on {target} is not known"
            console.print(ranking.cost_line(costs, options.tokens) if costs else unknown)
        if options.by_layer and plan.memory is not None:
            console.print("\nmemory per device, by part", style="bold")
            console.print(by_layer.table(plan.parts, plan.memory))
    return 0 if plan.fits else 1


def _search(options: PlanOptions, rest: list[str], target: Target, module: Any, config: Any) -> int:
    typed: set[str] = set()
    if isinstance(getattr(config, "layout", None), Layout):  # otherwise the search is refused
        own = config.layout.pipeline
        schedule = "gpipe" if own.schedule != "gpipe" else "1f1b"
        others = {"pipeline.schedule": schedule, "pipeline.virtual": own.virtual + 1}
        typed = typed_fields(config, rest, others)
    result = search.run_search(
        getattr(module, "outline", module.build),
        config,
        target,
        compile_best=options.compile_best,
        seconds=options.search_seconds,
        typed=typed,
        tokens=options.tokens,
        price=options.price,
        as_json=options.json,
    )
    return 0 if result.rows else 1


COMMANDS = {
    "schedule": Command(ScheduleOptions, run_schedule),
    "parity": Command(ParityOptions, run_parity, passes_on=True),
    "plan": Command(PlanOptions, run_plan, passes_on=True),
    "compare": Command(compare.CompareOptions, compare.run_compare, passes_on=True),
    "scaling": Command(scaling.ScalingOptions, scaling.run_scaling, passes_on=True),
    "compose": Command(compose.ComposeOptions, compose.run_compose),
    "study": Command(study.StudyOptions, study.run_study, passes_on=True),
    "retrain": Command(retrain.RetrainOptions, retrain.run_retrain, passes_on=True),
    "ladder": Command(ladder.LadderOptions, ladder.run_ladder, passes_on=True),
    "coordinates": Command(
        coordinates.CoordinatesOptions, coordinates.run_coordinates, passes_on=True
    ),
    "noise": Command(noise.NoiseOptions, noise.run_noise, passes_on=True),
    "runs": Command(runs.RunsOptions, runs.run_runs),
    "replay": Command(ReplayOptions, run_replay),
    "verify": Command(VerifyOptions, run_verify, passes_on=True),
    "landscape": Command(landscape.LandscapeOptions, landscape.run_landscape, passes_on=True),
    "tokenize": Command(data.TokenizeOptions, data.run_tokenize),
    "data": Command(data.DataOptions, data.run_data),
    "export": Command(export.ExportOptions, export.run_export),
    "hf": Command(hf.HFOptions, hf.run_hf),
    "shrink": Command(shrink.ShrinkOptions, shrink.run_shrink),
    "evaluate": Command(evaluate.EvaluateOptions, evaluate.run_evaluate),
    "predict": Command(predict.PredictOptions, predict.run_predict),
    "generate": Command(generate.GenerateOptions, generate.run_generate),
    "serve": Command(serve.ServeOptions, serve.run_serve),
    "watch": Command(live.WatchOptions, live.run_watch),
    "profile": Command(profile.ProfileOptions, profile.run_profile),
    "report": Command(report.ReportOptions, report.run_report),
    "asynchronous": Command(
        parameter_server.AsynchronousOptions, parameter_server.run_asynchronous, passes_on=True
    ),
    "check-hosts": Command(check_hosts.CheckHostsOptions, check_hosts.run_check_hosts),
    "launch": Command(launch.LaunchOptions, launch.run_launch, passes_on=True),
}


@output.ending_unread()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; a refusal raises ``SystemExit``.

    Args:
      arguments: the command's name and its flags; by default, those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # As with `python -m`: experiments are modules under the current folder.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    if arguments == ["--version"]:
        print(f"jaxtrain {jaxtrain.__version__}")
        return 0
    options, rest = parse(arguments)
    (command,) = (c for c in COMMANDS.values() if isinstance(options, c.options))
    shared = [Config] if hasattr(options, "experiment") else []  # of the experiment's flags
    with refusing(*shared, type(options)):
        return command.run(options, rest)


def parse(arguments: list[str]) -> tuple[Any, list[str]]:
    """Reads the command line as (options of a command, flags to pass on)."""
    arms = tuple(
        Annotated[command.options, tyro.conf.subcommand(name=name)]
        for name, command in COMMANDS.items()
    )
    flags_type = Union[arms]  # noqa: UP007
    given = COMMANDS.get(arguments[0]) if arguments else None
    read = {"args": arguments, "prog": "jaxtrain", "description": DESCRIPTION}
    if given is not None:
        refuse_two_names(given.options, arguments)
    if given is not None and given.passes_on and "--" in arguments:
        at = arguments.index("--")
        return tyro.cli(flags_type, **read | {"args": arguments[:at]}), arguments[at + 1 :]
    if given is not None and not given.passes_on:
        refuse_aliases(given.options, arguments)
    if given is not None and given.passes_on:
        return tyro.cli(flags_type, return_unknown_args=True, **read)
    return tyro.cli(flags_type, **read), []
