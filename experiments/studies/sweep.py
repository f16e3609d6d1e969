"""A study as a value, and the one way in which all studies are trained, tabled and drawn.

The runs of a study are trials of `jaxtrain study`, so that the same command continues it. A study
in turns has the variants of `jaxtrain compare`, which are measured within one process.
"""

import dataclasses
import math
import pathlib
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain.compare.command import start_alone
from jaxtrain.compare.turns import compare
from jaxtrain.experiment import Experiment
from jaxtrain.host import exit_codes
from jaxtrain.host.least import check_least
from jaxtrain.host.memory import human_bytes
from jaxtrain.host.paths import as_path, check_on_disk, json_text, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.optim import frozen
from jaxtrain.planning.targets import stay_on_cpu
from jaxtrain.run.main import Config, build_experiment, load_config
from jaxtrain.run.observe.report.records import read_run
from jaxtrain.run.refusal import refusing
from jaxtrain.study import command
from jaxtrain.study.report import p_value
from jaxtrain.tree import named_leaves

RESULTS, SETTING, BEGUN, APART, CURVES = "results.json", "setting", "begun", "apart", "curves"
TRACES, REACHES = "traces", " >= "
# Timed rounds of a study in turns, and the number of held-out batches that it evaluates.
ROUNDS, HELD_OUT = 5, 32
LEVEL = 0.05
# Flags of small runs on 2 CPU cores.
SMALL = "--seq-len 64 --global-batch 16 --sample-tokens 0 --held-out-bytes 100000"
# By setting and column, a number for each seed. The first column that is shown is a loss.
Rows = Mapping[str, Mapping[str, Sequence[float]]]
# An axis of curves: of a setting, its log's series and its parameters, the numbers at some steps.
Axis = Callable[[str, Mapping[str, Any], int, np.ndarray], np.ndarray]


def lowest(rows: Rows) -> str:
    """Says which setting has the lowest loss, and which settings cannot be told from it."""
    loss = next(iter(next(iter(rows.values()))))
    best = min(rows, key=lambda name: mean(rows, name, loss))
    p = {name: p_value(rows[best][loss], rows[name][loss]) for name in rows if name != best}
    near = "; ".join(name for name in p if p[name] is None or p[name] >= LEVEL)
    told = f"The lowest {loss} is {mean(rows, best, loss):.4f}, of {best}. "
    return told + f"Not told from it at p < {LEVEL}: {near or 'none of the others'}."


def apart(rows: Rows, name: str, other: str, column: str) -> str:
    """Says how far a setting is from another, with Welch's p-value."""
    by = mean(rows, name, column) - mean(rows, other, column)
    p = p_value(rows[name][column], rows[other][column])
    return f"{by:+.4f}" + ("" if p is None else f" (p = {p:.2g})")


def mean(rows: Rows, name: str, column: str) -> float:
    """Returns the mean of a column over the seeds of a setting."""
    return statistics.fmean(rows[name][column])


@dataclasses.dataclass(frozen=True)
class Study:
    """What is trained, and what is said of it. In flags ``{study}`` is the study's folder.

    Args:
      settings: flags by the name of a setting; the others are compared with the first.
      flags: flags of all runs, which those of the command line replace.
      shown: columns of the table; of runs the metric in the log, or ``METRIC >= VALUE`` for the
        first step that reaches it; in turns a field of :class:`jaxtrain.compare.turns.Result`, or
        ``apart``: the largest relative difference of a step's loss from that of the first setting.
      conclude: makes a sentence of the rows.
      seeds: default number of seeds.
      in_turns: whether the settings take turns within one process.
      begins: flags of a GPT that is trained first, into ``{study}/begun/trial-0``.
      module: the experiment of the runs.
      over: axes over which the picture has the loss as it falls, by name, in place of a panel for
        each column.
      traces: metrics in the log, by name, that the picture has over the steps, in panels below.
    """

    settings: Mapping[str, str]
    flags: str
    shown: Mapping[str, str]
    conclude: Callable[[Rows], str] = lowest
    seeds: int = 3
    in_turns: bool = False
    begins: str | None = None
    over: Mapping[str, Axis] = dataclasses.field(default_factory=dict)
    module: str = "experiments.gpt"
    traces: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains each setting of a study from several seeds, and prints a table and what it shows.

    All other flags go to the experiment. The same command continues a study of runs.
    """

    study_dir: str
    """Folder of the study's runs and results, which is made."""
    seeds: int | None = None
    """Runs of each setting, with --seed and the numbers after it; default: the study's own."""
    workers: int = 1
    """Number of runs at a time, which share the host's cores and GPUs evenly."""
    png: str | None = None
    """PNG file for a picture of every seed's numbers."""


def main(study: Study, name: str, arguments: Sequence[str]) -> int:
    """Trains what is missing of a study, by its command line, and returns the exit status."""
    program = f"python -m experiments.studies {name}"
    options, rest = tyro.cli(Options, args=arguments, prog=program, return_unknown_args=True)
    with refusing(Config, Options):
        check_least(options, workers=1, seeds=1)
        check_on_disk(options.study_dir, "--study-dir")
        if options.png is not None:  # Where that cannot be, nothing is trained.
            new_figure(1, 1)
        if study.in_turns and options.workers > 1:
            raise ValueError(f"`workers` is {options.workers}: {name} takes turns; leave it out")
        varied = {flag for text in study.settings.values() for flag in _flags_in(text.split())}
        if twice := sorted(varied & _flags_in(rest)):
            raise ValueError(f"{twice[0]} is typed and is what {name} varies: leave it out")
        study = dataclasses.replace(study, seeds=options.seeds or study.seeds)
        if (rows := measure(study, options, rest)) is None:
            return exit_codes.PREEMPTED
        (folder := as_path(options.study_dir)).mkdir(parents=True, exist_ok=True)
        write_whole(folder / RESULTS, json_text(rows))
        _print(study, rows)
        if options.png is not None:
            (draw_curves if study.over else draw)(study, rows, options.png)
            print(options.png)
    return 0


def measure(study: Study, options: Options, rest: Sequence[str]) -> Rows | None:
    """Trains what is missing, and returns the numbers; None where a signal has asked for an end."""
    folder, typed = pathlib.Path(options.study_dir), shlex.join(rest)
    fill = lambda text: text.replace("{study}", shlex.quote(str(folder)))  # noqa: E731
    settings = {name: fill(text) for name, text in study.settings.items()}
    filled = dataclasses.replace(study, settings=settings, flags=f"{fill(study.flags)} {typed}")
    if study.in_turns:
        start_alone(_config(filled)[1], command="studies")
    else:
        stay_on_cpu()
    if study.begins is not None:
        own = {"settings": {BEGUN: ""}, "shown": {}, "traces": {}, "seeds": 1}
        own["module"] = Study.module
        own["flags"] = f"{fill(study.begins)} {typed}"
        if _of_runs(dataclasses.replace(study, **own), folder / BEGUN, options.workers) is None:
            return None
    counts = {name: _counts(*_built(filled, text)) for name, text in settings.items()}
    found = _in_turns(filled) if study.in_turns else _of_runs(filled, folder, options.workers)
    return found and {name: found[name] | counts[name] for name in settings}


def draw_curves(study: Study, rows: Rows, path: str) -> None:
    """Draws the loss over each axis of a study, a line for each setting: the mean of its seeds."""
    figure = new_figure(4.2 * len(study.over), 3.8)
    loss = next(iter(study.shown))
    panels = figure.subplots(1, len(study.over), sharey=True, squeeze=False)[0]
    for place, (axes, name) in enumerate(zip(panels, study.over, strict=True)):
        for setting, row in rows.items():
            mean_curve = np.mean(row[CURVES], axis=0)
            axes.plot(mean_curve[1 + place], mean_curve[0], label=setting, linewidth=1.2)
        finish_axes(axes, loss if place == 0 else "", x=name)
    panels[-1].legend(fontsize=7, frameon=False)
    save_figure(figure, path)


def draw(study: Study, rows: Rows, path: str) -> None:
    """Draws a panel for each column: a dot for each seed, and a mark at their mean."""
    columns = {c: field for c, field in study.shown.items() if field != APART}
    heights = [1.2 + 0.32 * len(rows), *[3.2] * bool(study.traces)]
    figure = new_figure(3 + 3.5 * max(len(columns), len(study.traces)), sum(heights))
    top, *below = np.atleast_1d(figure.subfigures(len(heights), 1, height_ratios=heights))
    panels = top.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (column, field) in zip(panels, columns.items(), strict=True):
        unit = 2**20 if field.endswith("_bytes") else 1
        for place, row in enumerate(rows.values()):
            numbers = np.divide(row[column], unit)
            axes.plot(numbers, [place] * len(numbers), "o", color="C0", alpha=0.5, markersize=5)
            axes.plot([numbers.mean()], [place], "|", color="C0", markersize=18)
        at = mean(rows, next(iter(rows)), column) / unit
        axes.axvline(at, color="0.7", linestyle=":")
        begin = 0 if unit > 1 or field == "cpu_ratio" else 0.999 * at
        axes.plot([begin, 1.001 * at], [0, 0], alpha=0)  # Rounding fills no panel.
        finish_axes(axes, column, x="MiB" if unit > 1 else "")
    panels[0].set_yticks(range(len(rows)), list(rows), fontsize=9)
    panels[0].invert_yaxis()
    for part in below:
        draw_traces(study, rows, part)
    save_figure(figure, path)


def draw_traces(study: Study, rows: Rows, figure: Any) -> None:
    """Draws a panel for each traced metric over the steps: the mean of the seeds of each setting,
    and all that they span."""
    panels = figure.subplots(1, len(study.traces), squeeze=False)[0]
    for axes, name in zip(panels, study.traces, strict=True):
        for place, (setting, row) in enumerate(rows.items()):
            steps, values = np.array(row[TRACES][name]).swapaxes(0, 1)
            if len(steps[0]) > 1:
                how = {"color": f"C{place}", "label": setting}
                axes.plot(steps[0], values.mean(0), linewidth=1.2, **how)
                axes.fill_between(
                    steps[0], values.min(0), values.max(0), alpha=0.2, **how | {"label": None}
                )
        finish_axes(axes, name, x="steps")
    panels[-1].legend(fontsize=7, frameon=False)


def _flags_in(words: Sequence[str]) -> set[str]:
    return {w.partition("=")[0].replace("_", "-") for w in words if w.startswith("--")}


def _config(study: Study, *texts: str) -> tuple[Any, Any]:
    flags = shlex.split(" ".join((study.flags, *texts)))
    module, config = load_config(study.module, flags, command="studies", own=Options)
    command.refuse_start(config)
    return module, config


def _built(study: Study, *texts: str, outline: bool = True) -> tuple[Any, Experiment]:
    module, config = _config(study, *texts)
    return config, build_experiment(module, config, outline=outline)


def _of_runs(study: Study, folder: pathlib.Path, workers: int) -> Rows | None:
    """The last numbers in the logs of runs; None where a signal has asked for an end."""
    config, experiment = _built(study, next(iter(study.settings.values())))
    given = {"study_dir": str(folder), "workers": workers, "repeats": study.seeds}
    options = command.StudyOptions(study.module, space="", **given)
    runs = command.runs_of(options, shlex.split(study.flags), config, experiment)
    words = {name: shlex.split(text) for name, text in study.settings.items()}
    metric = next(iter(study.shown.values()), runs.metric).split(REACHES)[0]
    runs = dataclasses.replace(runs, words=lambda of: words[of[SETTING]], metric=metric)
    given = {"workers": workers, "environ": command.environ_of(options, config)}
    trials, found = command.conduct_points(runs, [{SETTING: x} for x in words], **given), {}
    for trial in [] if trials is None else trials.all():
        name = trial.params[SETTING]
        if trial.state.name == "FAIL":
            raise ValueError(
                f"the setting {name!r} has failed: {trial.user_attrs['why']}; see {folder}/output, "
                "and begin again in another --study-dir"
            )
        logs = [read_run(as_path(runs.run_dir(trial.number, s)), "").series for s in runs.seeds]
        found[name] = {c: [_number(x, m) for x in logs] for c, m in study.shown.items()}
        if study.traces:
            points = {c: [[x[m].steps, x[m].values] for x in logs] for c, m in study.traces.items()}
            found[name][TRACES] = {c: np.array(x, float).tolist() for c, x in points.items()}
        if study.over:
            (size,) = _counts(*_built(study, study.settings[name]))["parameters"]
            found[name][CURVES] = [_curve(study, metric, name, x, size) for x in logs]
    return found or None


def _curve(
    study: Study, metric: str, name: str, logged: Mapping[str, Any], size: int
) -> list[list[float]]:
    """The loss where a run was evaluated, and each axis there."""
    steps, values = np.asarray(logged[metric].steps), np.asarray(logged[metric].values)
    axes = [axis(name, logged, size, steps) for axis in study.over.values()]
    return [values.tolist(), *(np.asarray(x).tolist() for x in axes)]


def _number(logged: Mapping[str, Any], field: str) -> float:
    """The last value of a metric, or the first step at which it is large enough, if any."""
    metric, least = field.split(REACHES) if REACHES in field else (field, None)
    steps, values = logged[metric].steps, logged[metric].values
    if least is None:
        return float(values[-1])
    reached = (step for step, value in zip(steps, values, strict=True) if value >= float(least))
    return float(next(reached, math.inf))


def _in_turns(study: Study) -> Rows:
    """The numbers of variants that take turns."""
    variants, found = {}, {name: {column: [] for column in study.shown} for name in study.settings}
    config = _config(study)[1]
    for name, text in study.settings.items():
        for seed in range(config.seed, config.seed + study.seeds):
            _, each = _built(study, text, f"--seed={seed}", outline=False)
            variants[f"{name}, seed {seed}"] = each
    block = config.steps // (ROUNDS + 1)
    results = compare(variants, rounds=ROUNDS, block_steps=block, held_out_batches=HELD_OUT)
    for i, result in enumerate(results):
        own, first = list(found.values())[i // study.seeds], results[i % study.seeds].losses
        numbers = vars(result) | {APART: max(np.abs(np.divide(result.losses, first) - 1))}
        for column, field in study.shown.items():
            own[column].append(float(numbers[field]))
    return found


def _counts(config: Any, experiment: Experiment) -> dict[str, list[float]]:
    """The size of a model; of a stack, layers whose rate is 0 do not train."""
    params = jax.eval_shape(experiment.task.init_fn, jax.random.key(0))
    still = frozen(jax.eval_shape(experiment.laid.optimizer.init, params))

    def share(path: str) -> float:
        for pattern, _, factors in (x.rpartition("=") for x in config.optimizer.rate_multipliers):
            if re.search(pattern, path):
                return float(np.mean([float(factor) != 0 for factor in factors.split(",")]))
        return path not in still

    sizes = {path: x.size for path, x in named_leaves(params).items()}
    flops = (experiment.task.flops_per_step or math.nan) / experiment.data.items_per_step
    trained = sum(share(path) * size for path, size in sizes.items())
    return {"parameters": [sum(sizes.values())], "trained": [trained], "FLOPs/token": [flops]}


def _print(study: Study, rows: Rows) -> None:
    """Prints the table, what its numbers are, and the conclusion."""
    first, loss = next(iter(rows)), next(iter(study.shown))
    fields = dict.fromkeys(("parameters", "trained", "FLOPs/token"), "count") | study.shown
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(SETTING)
    for column in (*fields, "p"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        cells = [_text(row[column], field) for column, field in fields.items()]
        p = None if name == first else p_value(row[loss], rows[first][loss])
        table.add_row(name, *cells, "-" if p is None else f"{p:.2g}")
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    console.print(table)
    if study.seeds > 1:
        told = f"Means and standard deviations of {study.seeds} seeds; p is Welch's, of the {loss}"
        console.print(f"\n{told} against {first}, for one comparison alone.", soft_wrap=True)
    console.print(f"\n{study.conclude(rows)}", soft_wrap=True)


def _text(values: Sequence[float], field: str) -> str:
    middle = statistics.median(values)
    if field == "count":
        return f"{middle:,.0f}"
    if field.endswith("_bytes"):
        return human_bytes(round(middle))
    if field in (APART, "cpu_ratio"):
        return f"{middle:.0e}" if field == APART else f"{middle:.2f}"
    digits = 1 if REACHES in field else 4
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"
