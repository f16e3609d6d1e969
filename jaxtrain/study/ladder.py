"""The command ``jaxtrain ladder``: small trainings that foretell the loss of a large one.

Every model of a ladder is trained with every budget of FLOPs, counted exactly, to the end of its
own schedule. A law is fitted to what they come to (:mod:`jaxtrain.study.laws`), and what it says of
a larger model, which is not trained, is printed with the interval of nine such runs of ten.

Shapes: R runs, S sizes.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxtrain.experiment import Experiment
from jaxtrain.host import exit_codes
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path, check_on_disk, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.planning import estimate, targets
from jaxtrain.run.main import build_experiment, flag_word, load_config
from jaxtrain.study import command as study
from jaxtrain.study import laws
from jaxtrain.study.laws import Best, Law
from jaxtrain.study.space import Value, text_of
from jaxtrain.study.trials import VALUES, Trials, check_installed
from jaxtrain.study.workers import Runs

RESULTS = "ladder.json"
# A budget that gives a size fewer steps tells nothing of it.
FEWEST_STEPS = 20
UNITS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}


@dataclasses.dataclass(frozen=True)
class LadderOptions:
    """Trains small models with budgets of FLOPs, fits a scaling law to their losses, and forecasts
    the loss of a larger model, which is not trained, with an interval.

    All other flags go to the experiment, after -- those that have a name of one here. The same
    command goes on with a ladder that was interrupted, and joins it from another host that sees its
    folder.
    """

    experiment: tyro.conf.Positional[str]
    """A module with Config and build(config), such as experiments.gpt."""
    sizes: tuple[str, ...]
    """Flags that make a model larger, with a value for each size, as in width=32,48,64,96
    heads=2,3,4,6."""
    budgets: tuple[float, ...]
    """FLOPs of a training; each size is trained with each of them."""
    study_dir: str
    """Folder of the ladder, which is made: its runs, its journal and its results."""
    target: tuple[str, ...] = ()
    """Flags of the model to forecast, as in width=192 heads=12; left out, only the best use of its
    budget is said."""
    target_budget: float | None = None
    """FLOPs of the training to forecast; left out, ten times the largest budget."""
    target_device: str | None = None
    """Devices that the forecast model would be trained on, such as v5p:4x4x4: the predicted time is
    said too, and with --price what it costs."""
    workers: int = 1
    """Number of runs at a time on this host, which share its cores and GPUs evenly."""
    processes: int = 1
    """Number of processes of each run, which jaxtrain launch starts on this host."""
    repeats: int = 1
    """Runs of each size and budget, with --seed and the numbers after it."""
    png: str | None = None
    """Also draw the losses over the size, a curve for each budget, in this PNG file."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What a law needs to know of a model.

    Args:
      values: its flags.
      N: parameters of its layers; of all, where none are stacked. Tables are left out, since they
        are a part of small models that large ones do not have. Of a mixture, all experts count.
      tokens: of a step.
      flops: of a step.
    """

    values: Mapping[str, Value]
    N: int
    tokens: int
    flops: float

    def steps(self, budget: float) -> int:
        """Returns the steps that a budget is worth."""
        return round(budget / self.flops)

    def __str__(self) -> str:
        return " ".join(f"{flag}={text_of(value)}" for flag, value in self.values.items())


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is expected of a size with a budget: the loss, its middle 90 %, and the steps."""

    size: Size
    steps: int
    loss: float
    interval: tuple[float, float]


def run_ladder(options: LadderOptions, rest: list[str]) -> int:
    """Trains what is missing, and prints the law and its forecast."""
    check_least(options, workers=1, processes=1, repeats=1)
    check_on_disk(options.study_dir, "--study-dir")
    targets.stay_on_cpu()
    if options.png is not None:  # Where that cannot be, nothing is trained.
        new_figure(1, 1)
    device = options.target_device and targets.parse_target(options.target_device)
    module, config = load_config(options.experiment, rest, command="ladder", own=type(options))
    study.refuse_start(config)
    environ = study.environ_of(options, config)
    models = read_sizes(options.sizes, name="sizes")
    goals = read_sizes(options.target, name="target") if options.target else []
    if len(goals) > 1 or (goals and goals[0].keys() != models[0].keys()):
        raise ValueError(
            f"`target` is {' '.join(options.target)}: give one value for each flag of `sizes`, "
            f"{', '.join(models[0])}"
        )
    sizes = [measure(options, rest, config, values)[0] for values in models]
    goal = measure(options, rest, config, goals[0]) if goals else None
    budgets = sorted(options.budgets)
    points = points_of(sizes, budgets)
    N, D = zip(*((s.N, s.tokens * p["steps"]) for s, p in points), strict=True)
    laws.fit(N, D, np.ones(len(N)))  # refuses what would not tell its constants
    check_installed("grid")
    experiment = build_experiment(module, config)
    runs = study.runs_of(options, rest, config, experiment)
    given = {"workers": options.workers, "environ": environ}
    trials = study.conduct_points(runs, [point for _, point in points], **given)
    if trials is None:
        return exit_codes.PREEMPTED
    rows = losses_of(trials, [size for size, _ in points])
    budget = options.target_budget or 10 * budgets[-1]
    return conclude(options, runs, rows, sizes, goal, budget, device)


def read_sizes(texts: Sequence[str], *, name: str) -> list[dict[str, Value]]:
    """Reads flags with a value for each size, and returns the flags of each.

    Raises:
      ValueError: one has no values, or another number of them than the first.

    >>> read_sizes(["width=32,48", "heads=2,3"], name="sizes")
    [{'width': 32, 'heads': 2}, {'width': 48, 'heads': 3}]
    """
    flags: dict[str, list[Value]] = {}
    for text in texts:
        flag, mark, words = text.partition("=")
        if not mark or not words or flag in flags:
            raise ValueError(
                f"`{name}` has {text!r}: write each flag once, with its values, as in width=32,48"
            )
        flags[flag.replace("_", "-")] = [_value(word) for word in words.split(",")]
    counts = {flag: len(values) for flag, values in flags.items()}
    if len(set(counts.values())) != 1:
        told = ", ".join(f"{count} of {flag}" for flag, count in counts.items())
        raise ValueError(f"`{name}` has {told or 'no flags'}: give a value of each for every size")
    return [dict(zip(flags, row, strict=True)) for row in zip(*flags.values(), strict=True)]


def measure(
    options: LadderOptions, rest: Sequence[str], config: Any, values: Mapping[str, Value]
) -> tuple[Size, Experiment, Any]:
    """Counts a model's parameters, and the tokens and FLOPs of a step, without its data. ``config``
    is that of the flags ``rest`` alone.

    Raises:
      ValueError: the experiment has no such flag or does not take the value, or says no FLOPs.
    """
    own = [flag_word(options.experiment, config, flag, text_of(v)) for flag, v in values.items()]
    typed = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in rest}
    if twice := typed & {*values, "steps", "epochs"}:
        why = "what a budget gives" if twice & {"steps", "epochs"} else "one of the sizes"
        raise ValueError(f"--{min(twice)} is typed and is {why}: leave it out")
    module, config = load_config(
        options.experiment, [*rest, *own], command="ladder", own=type(options)
    )
    experiment = build_experiment(module, config, outline=True)
    if experiment.task.flops_per_step is None:
        raise ValueError(
            f"experiment {experiment.name!r} does not say its FLOPs, which budgets are of: give "
            "Task(flops_per_step=...)"
        )
    params = jax.eval_shape(experiment.task.init_fn, jax.random.key(0))
    keys = [part.key for part in experiment.stack.parts if part.key in params]
    layers = {key: params[key] for key in keys} or params
    N = sum(leaf.size for leaf in jax.tree.leaves(layers))
    size = Size(values, N, experiment.data.items_per_step, experiment.task.flops_per_step)
    return size, experiment, config


def points_of(sizes: Sequence[Size], budgets: Sequence[float]) -> list[tuple[Size, dict]]:
    """Returns every run with its size, the cheap ones first. Raises ValueError where a budget is
    too small for a size."""
    points = []
    for budget in budgets:
        for size in sizes:
            if (steps := size.steps(budget)) < FEWEST_STEPS:
                raise ValueError(
                    f"`budgets` has {budget:g} FLOPs, which are {steps} steps of {size}: give "
                    f"{FEWEST_STEPS * size.flops:.2g} or more, or smaller sizes"
                )
            points.append((size, {**size.values, "steps": steps}))
    return points


def losses_of(trials: Trials, sizes: Sequence[Size]) -> list[tuple[Size, int, float]]:
    """Returns the size, the steps and the loss of each run that has come to one."""
    rows = []
    for trial, size in zip(trials.all(), sizes, strict=False):
        values = trial.user_attrs.get(VALUES, [])
        rows += [(size, trial.params["steps"], v) for v in values if np.isfinite(v)]
    return rows


def conclude(
    options: LadderOptions,
    runs: Runs,
    rows: Sequence[tuple[Size, int, float]],
    sizes: Sequence[Size],
    goal: tuple[Size, Experiment, Any] | None,
    budget: float,
    device: Any,
) -> int:
    """Fits the law, prints and stores what follows from it."""
    N, D, L = zip(*((size.N, size.tokens * steps, loss) for size, steps, loss in rows), strict=True)
    law, left = laws.fit(N, D, L)
    drawn, noise = laws.draws(N, D, L)
    known = [*sizes, *([goal[0]] if goal else [])]
    best = laws.best_use(law, budget, [s.N for s in known], [s.flops / s.tokens for s in known])
    forecast = goal and foresee(law, drawn, noise, goal[0], budget)
    write_whole(as_path(runs.folder / RESULTS), json.dumps(_stored(rows, law, forecast, best)))
    console = Console(highlight=False)
    console.print(_table(rows, sizes, runs.metric))
    console.print(_said(law, drawn, left, len(rows)), soft_wrap=True)
    if forecast:
        low, high = forecast.interval
        tokens = forecast.size.tokens * forecast.steps
        console.print(
            f"forecast     {runs.metric} {forecast.loss:.4g} of {forecast.size} with {budget:.3g} "
            f"FLOPs, 90 % of such runs {low:.4g} to {high:.4g}\n"
            f"             {forecast.size.N:,} parameters in layers, {forecast.steps:,} steps, "
            f"{tokens:,} tokens",
            soft_wrap=True,
        )
        if device:
            console.print(_time(goal[1], goal[2], forecast.steps, device), soft_wrap=True)
        words = runs.words({**forecast.size.values, "steps": forecast.steps})
        command = shlex.join(["python", *runs.command[1:], *words])
        console.print(f"command      {command}", soft_wrap=True)
    beyond = "" if best.is_inside else ", beyond the sizes that were trained"
    console.print(
        f"best use     of {budget:.3g} FLOPs: {best.N:.3g} parameters in layers, {best.D:.3g} "
        f"tokens, loss {best.loss:.4g}{beyond}",
        soft_wrap=True,
    )
    if options.png is not None:
        draw(options.png, rows, law, forecast, sizes, sorted(options.budgets), runs.metric)
    return 0


def foresee(
    law: Law, drawn: Sequence[Law], noise: np.ndarray, size: Size, budget: float
) -> Forecast:
    """Returns what a law says of a size with a budget."""
    steps = max(1, size.steps(budget))
    at = (size.N, size.tokens * steps)
    interval = laws.interval(drawn, lambda each: each.loss(*at), noise=noise)
    return Forecast(size, steps, float(law.loss(*at)), interval)


def draw(
    path: str,
    rows: Sequence[tuple[Size, int, float]],
    law: Law,
    forecast: Forecast | None,
    sizes: Sequence[Size],
    budgets: Sequence[float],
    metric: str,
) -> None:
    """Draws the losses over the size, with the law's curve for each budget and the forecast."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    N_S = [size.N for size in sizes]
    N = np.geomspace(min(N_S), max(N_S), 200)
    flops = laws.flops_per_token(N, N_S, [size.flops / size.tokens for size in sizes])
    for i, budget in enumerate(budgets):
        shade = f"C{i}"
        near = [(s.N, loss) for s, steps, loss in rows if steps == s.steps(budget)]
        axes.plot(*zip(*near, strict=True), "o", color=shade)
        axes.plot(N, law.loss(N, budget / flops), color=shade, label=f"{budget:.2g} FLOPs")
    if forecast is not None:
        low, high = forecast.interval
        whiskers = [[max(0.0, forecast.loss - low)], [max(0.0, high - forecast.loss)]]
        place = ([forecast.size.N], [forecast.loss])
        axes.errorbar(*place, yerr=whiskers, fmt="D", color="black", capsize=4, label="forecast")
    axes.set_xscale("log")
    axes.legend(fontsize=8, frameon=False)
    finish_axes(axes, f"{metric} by budget", x="parameters in layers")
    save_figure(figure, path)


def _said(law: Law, drawn: Sequence[Law], left_R: np.ndarray, count: int) -> str:
    """The law in words, with the intervals of its exponents and of the loss that it goes to."""
    ends = {n: laws.interval(drawn, lambda each, n=n: getattr(each, n)) for n in ("E", "a", "b")}
    spans = ", ".join(f"{name} {low:.2g} to {high:.2g}" for name, (low, high) in ends.items())
    spread = float(np.sqrt(np.square(left_R).mean()))
    zero = law.absent
    told = f"; {' and '.join(zero)} {'is' if len(zero) == 1 else 'are'} 0, not told by these runs"
    return (
        f"law          L = {law.E:.3g} + {law.A:.3g} / N^{law.a:.3g} + {law.B:.3g} / D^{law.b:.3g}"
        f", {spread:.1%} from {count} runs{told if zero else ''}\n"
        f"             90 %: {spans}"
    )


def _time(experiment: Experiment, config: Any, steps: int, device: Any) -> str:
    """The predicted time of a training on devices, and its price."""
    found = estimate.estimate(experiment, device.size, kind=device.chip.kind)
    predicted = estimate.predict(found, device)
    if predicted is None:
        return f"time         not predicted: the peaks of {device.chip.name} are not known"
    seconds = predicted.step_seconds * steps
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "seconds")
    long = f"{seconds / UNITS.get(unit, 1.0):.1f} {unit}"
    hours = seconds / UNITS["hours"] * device.size / device.chip.cores_per_chip
    price = config.run.price and f", {config.run.price * hours:,.2f} at {config.run.price:g} each"
    return f"time         {long} on {device} (predicted), {hours:,.3g} chip-hours{price or ''}"


def _table(rows: Sequence[tuple[Size, int, float]], sizes: Sequence[Size], metric: str) -> Table:
    """Losses by size and steps, the mean over seeds."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("size", "parameters", "steps", "tokens", metric):
        table.add_column(name, justify="left" if name == "size" else "right", no_wrap=True)
    for size in sizes:
        own = [(steps, loss) for each, steps, loss in rows if each is size]
        for steps in dict(own):
            mean = np.mean([loss for n, loss in own if n == steps])
            counts = (size.N, steps, size.tokens * steps)
            table.add_row(str(size), *(f"{n:,}" for n in counts), f"{mean:.4f}")
    return table


def _stored(
    rows: Sequence[tuple[Size, int, float]], law: Law, forecast: Forecast | None, best: Best
) -> dict[str, Any]:
    runs = [
        {**size.values, "parameters": size.N, "tokens": size.tokens * steps, "loss": loss}
        for size, steps, loss in rows
    ]
    found = {"runs": runs, "law": law._asdict(), "best": best._asdict()}
    return found | ({"forecast": dataclasses.asdict(forecast)} if forecast else {})


def _value(word: str) -> Value:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
