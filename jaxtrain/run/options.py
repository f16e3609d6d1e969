"""Options that runs and experiments share: plain data, which the command line turns into flags."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import tyro

from jaxtrain import optim
from jaxtrain.host.least import check_least
from jaxtrain.layout import Effect, Layout
from jaxtrain.optim.accumulation import updates_in
from jaxtrain.optim.masks import Times
from jaxtrain.optim.numerics import check_integer, check_number
from jaxtrain.optim.options import keywords
from jaxtrain.run.observe import alert_rules, trackers

# The type of a field of a layout whose flags stand at the top level: --zero and not --layout.zero.
LayoutFlags = Annotated[Layout, tyro.conf.arg(name="")]

# Settings beside the layout that may change when a run is resumed, with the effect on later steps.
# Any other setting changes what is computed, so changing it is refused: the seed, the rate, the
# batch, the model, the precision, and the number of steps, which schedules follow. Another number
# of microbatches is refused too where the loss is another with it
# (`jaxtrain.build.depends_on_microbatches`).
MAY_CHANGE = {
    "simulate_devices": Effect.ROUNDED,
    "row_shares": Effect.ROUNDED,
    # Settings of a start, and not of the run; `steps` says what `epochs` comes to.
    **dict.fromkeys(("distributed.*", "epochs", "devices"), Effect.NONE),
}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Settings of a run: where it lives and how often it reports.

    Args:
      run_dir: Its folder (local, or a bucket such as gs://...); left out, the next free number
        under runs/.
      resume: Continue the run in run_dir; left out, the newest under runs/.
      auto_resume: Resume where run_dir holds a checkpoint, and begin where it holds none yet: one
        command for a run that is started again and again.
      overwrite: Delete the run in run_dir first; files that no run writes stay.
      accept_changes: Resume even though these settings have changed. The run then continues as a
        different run. "stopped" continues a run that a hook has stopped on purpose; "all" accepts
        everything.
      log_every: Steps between lines in the logs.
      eval_every: Steps between evaluations; 0 evaluates only at the end.
      eval_epochs: Passes over the training rows between evaluations, fractions too; 0 counts steps,
        by eval_every.
      eval_first: Evaluate before the first step too, as step 0; what is concluded then has the
        held-out losses of before and after.
      save_every: Steps between checkpoints; 0 for none but the one at the end.
      save_minutes: Minutes between checkpoints, besides those; 0 for none.
      memory_every: Steps between snapshots of the state in the memory of each host and its
        neighbour, held by `jaxtrain launch`: a restart continues from the newest; 0 for none.
      early_stop_patience: Stop after so many evaluations of eval_every in a row without a better
        best metric; the best checkpoint is kept, as with save_best, and concluded from. 0 never
        stops.
      early_stop_min_change: Change of the best metric that counts as better for early stopping; it
        must be larger than this.
      save_best: Save after every evaluation that is among the keep_best best so far, and conclude
        the run from the best.
      best_metric: Metric of an evaluation, such as accuracy, that chooses the best checkpoint, in
        place of the experiment's own; best_mode must be given too.
      best_mode: Direction of best_metric: whether its smallest or its largest value is the best.
      save_frozen: Write frozen parameters into checkpoints too. Otherwise these have the checksums
        alone, and a resumed run takes the parameters from where it began.
      receipt: Add a receipt to receipts.jsonl with every save, each bound to the one before by a
        hash; `jaxtrain verify RUN` checks them, and repeats any segment whose checkpoints are kept.
      keep: Newest checkpoints to keep; the best ones are kept as well.
      keep_best: Best checkpoints to keep.
      handle_signals: Save and exit with code 75 on SIGTERM and SIGINT; a second one stops at once.
      watch_peers: Of several processes, end all where one has died, and stop all at the same step.
      hang_minutes: Exit with code 76 and print all stacks where no step (with --steps-per-call, no
        call) ends for so long; 0 never.
      max_consecutive_skips: Stop where so many steps in a row were not finite or spikes; 0 never.
      alerts: Alert rules, as RULE=LEVEL:ACTION, such as divergence:stop, plateau=2000 or
        throughput:off. An action is warn, save, trace, stop or off; "all" names every rule.
      trackers: Where metrics go too: wandb, mlflow, trackio (each set up by its own environment
        variables), csv, prometheus or prometheus=PORT.
      sample_seconds: Seconds between two readings of the sensors: utilisation, temperature and
        power of devices, memory and CPU of the host; 0 disables them.
      price: Price of one GPU or TPU chip, on CPUs of one machine, for an hour, in any currency; the
        log, the report and the last lines say what the run has cost.
      profile_steps: FIRST:LAST, the steps to trace for TensorBoard's profile plugin, or the
        longest stretch of them without an evaluation; SIGUSR1 and alerts trace some too.
    """

    run_dir: str | None = None
    resume: bool = False
    auto_resume: bool = False
    overwrite: bool = False
    accept_changes: tuple[str, ...] = ()
    log_every: int = 10
    eval_every: int = 0
    eval_epochs: float = 0.0
    eval_first: bool = False
    early_stop_patience: int = 0
    early_stop_min_change: float = 0.0
    save_every: int = 0
    save_minutes: float = 0.0
    memory_every: int = 0
    save_best: bool = False
    best_metric: str | None = None
    best_mode: Literal["min", "max"] | None = None
    save_frozen: bool = True
    receipt: bool = False
    keep: int = 3
    keep_best: int = 1
    handle_signals: bool = True
    watch_peers: bool = True
    hang_minutes: float = 30.0
    max_consecutive_skips: int = 20
    alerts: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    sample_seconds: float = 10.0
    price: float | None = None
    profile_steps: str | None = None

    def __post_init__(self) -> None:
        least = dict.fromkeys(("eval_every", "save_every", "save_minutes", "hang_minutes"), 0)
        least |= {"max_consecutive_skips": 0, "log_every": 1, "keep": 1, "keep_best": 1}
        least |= dict.fromkeys(("eval_epochs", "sample_seconds", "early_stop_patience"), 0)
        least |= {"early_stop_min_change": 0, "memory_every": 0}
        check_least(self, **least, price=0)
        if (self.best_metric is None) != (self.best_mode is None):
            raise ValueError(
                f"`best_metric` is {self.best_metric!r} and `best_mode` {self.best_mode!r}: give "
                "both, or neither"
            )
        if self.receipt and self.memory_every:
            raise ValueError(
                f"`memory_every` is {self.memory_every} and `receipt` is set: no receipt binds the "
                "steps between a checkpoint and what is in memory; give one of them"
            )
        if self.eval_every and self.eval_epochs:
            raise ValueError(
                f"`eval_every` is {self.eval_every} and `eval_epochs` {self.eval_epochs}: give one "
                "of them"
            )
        if self.early_stop_patience and not (self.eval_every or self.eval_epochs):
            raise ValueError(
                f"`early_stop_patience` is {self.early_stop_patience} and nothing is evaluated "
                "before the end: give `eval_every` or `eval_epochs` too"
            )
        if self.early_stop_min_change and not self.early_stop_patience:
            raise ValueError(
                f"`early_stop_min_change` is {self.early_stop_min_change}, which needs "
                "`early_stop_patience`: give the number of evaluations to wait too"
            )
        alert_rules.parse(self.alerts)
        trackers.parse(self.trackers)
        _ = self.profiled  # refuses what cannot be read

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step to trace, if any."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ValueError(f"`profile_steps` is {self.profile_steps!r}: give FIRST:LAST (20:25)")
        return int(first), int(last)

    @property
    def alert_rules(self) -> dict[str, alert_rules.Setting]:
        """The rules of alerts that are on."""
        return alert_rules.parse(self.alerts)

    @property
    def saves_best(self) -> bool:
        """Whether the best evaluation is saved: where it is asked for, or may end up behind."""
        return self.save_best or self.early_stop_patience > 0


@dataclasses.dataclass(frozen=True)
class StartOptions:
    """The run options that say whether to resume: they are read first, because the run that they
    name has the defaults of all others."""

    run_dir: str | None = None
    resume: bool = False
    auto_resume: bool = False


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Several processes without a launcher; left out, they are found from the environment."""

    coordinator: str | None = None
    """HOST:PORT of process 0."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Which one this is, from 0."""


@dataclasses.dataclass(frozen=True)
class _ChainOptions:
    name: Literal[tuple(optim.OPTIMIZERS)] = "muon"  # type: ignore[valid-type]
    """Which update rule."""
    learning_rate: float | None = None
    """Peak learning rate; left out, one that suits the optimizer here."""
    schedule: Literal[tuple(sorted(optim.schedules.SCHEDULES))] = "cosine"  # type: ignore[valid-type]
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; left out, 2 % of all steps and at least 10."""
    weight_decay: float = 0.1
    """Not applied to norms and biases."""
    base_batch: int | None = None
    """Rows per update that the learning rate is for: the rate is multiplied by the ratio of the
    rows that an update has (--global-batch x --optimizer.accumulate) to these."""
    batch_scaling: Literal["linear", "sqrt"] = "linear"
    """Whether the learning rate follows the ratio of rows to base_batch, or its square root."""
    plateau_factor: float | None = None
    """Factor that multiplies the learning rate each time the training loss has stopped falling;
    left out, a plateau changes nothing."""
    plateau_patience: int = 10
    """Number of plateau windows in a row without a better mean training loss, after which
    plateau_factor multiplies the learning rate."""
    plateau_window: int = 100
    """Number of updates in a plateau window, over which the training loss is averaged."""
    rate_multipliers: tuple[str, ...] = ()
    """Factors of the learning rate by the path of a parameter, as REGEX=FACTOR; the first match
    decides. Stacked layers may have a factor each: REGEX=0.5,0.7,1."""
    decay_multipliers: tuple[str, ...] = ()
    """Factors of the weight decay by the path of a parameter, as REGEX=FACTOR; the first match
    decides."""
    freeze: tuple[str, ...] = ()
    """Regexes of the paths of parameters that do not train."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None for no clipping."""
    clip_order: Literal["max"] | float = 2.0
    """Order of the gradient norm that clip_norm limits; max is the largest absolute value."""
    clip_value: float | None = None
    """Largest absolute value of a gradient's element, clipped before the norm; None clips none."""
    accumulate: int = 1
    """Train steps per update of the parameters; their gradients are summed by weight."""
    accumulate_ramp: tuple[str, ...] = ()
    """Calls per update of the first updates, as CALLS:UPDATES in order, such as 1:500 2:250: the
    batch of an update then grows up to that of --optimizer.accumulate."""
    skip_spikes: float | None = None
    """Leave out an update whose loss or gradient norm is so many standard deviations above the mean
    of the last 128 steps (6 is usual); None leaves out none."""
    ema: float | None = None
    """Decay of a moving average of the parameters, such as 0.999, which is then evaluated and
    generates in their place; None keeps none."""
    watch_every: int = 0
    """Updates between two measurements of the norms of each layer's gradient, parameters and
    update, which the log and the report show; 0 measures none."""
    watch_bins: int = 0
    """Bins of the histograms of each layer's gradient, parameters and update, which are made every
    watch_every updates. TensorBoard shows them, and at every evaluation samples (text that a GPT
    writes, a picture of confused classes); 0 makes none."""

    def __getattribute__(self, name: str) -> Any:
        """Marks a flag as used when it is read: see :func:`refuse_unused`."""
        value = object.__getattribute__(self, name)
        if not name.startswith("_"):
            vars(self).setdefault("_read", set()).add(name)
        return value

    def __repr__(self) -> str:  # Printing a config uses no flag.
        return f"OptimizerOptions({', '.join(f'{k}={v!r}' for k, v in _values(self).items())})"


def _values(options: Any) -> dict[str, Any]:
    """Returns the flags by name, and marks none as used."""
    return {field.name: vars(options)[field.name] for field in dataclasses.fields(options)}


def unmarked(options: Any) -> Any:
    """Returns a copy of the flags of an optimizer, whose reads do not mark the original."""
    copied = copy.copy(options)
    vars(copied).pop("_read", None)
    return copied


def mark_recorded(options: Any, recorded: Any) -> None:
    """Marks flags that a run's record has too as used: older versions let unused ones pass."""
    for name, value in _values(recorded).items():
        if vars(options)[name] == value:
            getattr(options, name)


def refuse_unused(options: Any, default: Any, experiment: str) -> None:
    """Raises ValueError for flags that differ from their default and that nothing has read, of an
    experiment whose module brings an optimizer of its own."""
    read, values = vars(options).get("_read", ()), _values(default)
    unused = [n for n, value in _values(options).items() if value != values[n] and n not in read]
    if unused and isinstance(options, _ChainOptions):  # Other types mark nothing.
        names = ", ".join(f"--optimizer.{name.replace('_', '-')}" for name in unused)
        raise ValueError(
            f"experiment {experiment!r} has an optimizer of its own, which {names} cannot change: "
            "leave that out"
        )


# A flag for each option of a rule or a schedule that a command line can take.
SHAPE_OPTIONS, RULE_OPTIONS = optim.schedules.OPTIONS, optim.rules.OPTIONS
OPTIONS = {name: (o.kind, o.help) for name, o in (SHAPE_OPTIONS | RULE_OPTIONS).items()}
# The one that both have goes to the schedule where that takes it.
OPTIONS["decay_rate"] = (
    float,
    f"{SHAPE_OPTIONS['decay_rate'].help} Under other schedules: {RULE_OPTIONS['decay_rate'].help}",
)
OptimizerOptions = dataclasses.make_dataclass(
    "OptimizerOptions",
    [(name, kind | None, None) for name, (kind, _) in OPTIONS.items()],
    bases=(_ChainOptions,),
    namespace={
        "__doc__": "The optimizer chain. An option left out takes the default of the rule or of "
        "the schedule.\n\nArgs:\n"
        + "".join(f"  {name}: {text}\n" for name, (_, text) in OPTIONS.items()),
        "__module__": __name__,
    },
    frozen=True,
    repr=False,
)


def make_optimizer(
    options: OptimizerOptions,
    *,
    steps: int,
    global_batch: int | None = None,
    default_rates: Mapping[str, float] = {},
    multipliers: Mapping[str, Callable[[str], float]] = {},
    **more,
):
    """Makes the optax chain that the flags describe, for so many calls of the train step.

    ``global_batch`` is the rows of a step, where the rate is to follow them; ``default_rates`` are
    peak learning rates by optimizer name that are not the rule's own. ``multipliers`` are factors
    by path that a model brings itself, and those of the flags multiply, for ``rate_multipliers``
    and ``decay_multipliers``. The rest is passed on to :func:`jaxtrain.make_optimizer`.
    """
    for name, value in (("steps", steps), ("optimizer.accumulate", options.accumulate)):
        if not 1 <= value < 2**31:
            raise ValueError(f"--{name} is {value}: give a number from 1 to 2^31 - 1")
    ramp = _ramp(options)
    if not (updates := updates_in(steps, options.accumulate, ramp)[0]):
        first = ramp[0][0] if ramp else options.accumulate
        raise ValueError(
            f"--steps is {steps}: the first update takes {first} steps (`accumulate`), so nothing "
            "would be trained; give as many"
        )
    peak = _peak(options, global_batch, default_rates)
    if options.base_batch is None and options.batch_scaling != "linear":
        raise ValueError(f"`batch_scaling` is {options.batch_scaling!r}: give `base_batch` too")
    if options.base_batch is not None and (options.base_batch < 1 or global_batch is None):
        why = "give at least 1" if global_batch else "the rows of a step are not known here"
        raise ValueError(f"`base_batch` is {options.base_batch}: {why}")
    done = {"name", "learning_rate", "schedule", "warmup_steps", "base_batch", "batch_scaling"}
    names = [f.name for f in dataclasses.fields(options) if f.name not in done]
    passed_on = {name: getattr(options, name) for name in names}
    taken = keywords(optim.schedules.SCHEDULES[options.schedule])
    of_shape = {n for n in SHAPE_OPTIONS if n in taken or n not in RULE_OPTIONS}
    rate = optim.make_schedule(
        options.schedule,
        check_number("learning_rate", peak, low=0.0),
        total_steps=updates,
        warmup_steps=_warmup(options, updates),
        **{name: passed_on.pop(name) for name in of_shape},
    )
    for name in ("rate_multipliers", "decay_multipliers"):
        texts = passed_on[name]
        pairs = [_pair(name, text, "=", _factor, "^head/=0.1") for text in texts]
        passed_on[name] = Times(pairs, multipliers[name]) if name in multipliers else pairs
    freeze = (*passed_on.pop("freeze"), *more.pop("freeze", ()))
    passed_on |= {"accumulate_ramp": ramp, "freeze": freeze or None}
    return optim.make_optimizer(options.name, rate, **passed_on, **more)


def describe_optimizer(
    options: OptimizerOptions, *, steps: int, global_batch: int, default_rates: Mapping[str, float]
) -> str:
    """Describes in one line the chain that :func:`make_optimizer` makes of such arguments."""
    updates, steps_over = updates_in(steps, options.accumulate, _ramp(options))
    warmup, clip = _warmup(options, updates), options.clip_norm
    parts = [
        options.name,
        f"rate {_peak(options, global_batch, default_rates):.4g}",
        f"{options.schedule} schedule"
        + (f" after {warmup:,} updates of warm-up" if warmup else ""),
        f"weight decay {options.weight_decay:g}",
        "no clipping" if clip is None else f"gradient clipped to norm {clip:g}",
        "no average" if options.ema is None else f"average (EMA) {options.ema:g}",
    ]
    if updates < steps:
        parts.append(f"{updates:,} updates in {steps:,} steps")
    if steps_over:
        parts.append(f"the last {steps_over:,} of which are part of no update")
    return ", ".join(parts)


def _ramp(options: OptimizerOptions) -> list[tuple[int, int]]:
    ramp = [_pair("accumulate_ramp", text, ":", int, "1:500") for text in options.accumulate_ramp]
    for number in itertools.chain(*ramp):
        check_integer("accumulate_ramp", number, low=1)
    return ramp


def _peak(
    options: OptimizerOptions, global_batch: int | None, default_rates: Mapping[str, float]
) -> float:
    peak = {**optim.rules.LEARNING_RATES, **default_rates}[options.name]
    peak = peak if options.learning_rate is None else options.learning_rate
    if not options.base_batch or global_batch is None:
        return peak
    ratio = global_batch * options.accumulate / options.base_batch
    return peak * (ratio if options.batch_scaling == "linear" else ratio**0.5)


def _warmup(options: OptimizerOptions, updates: int) -> int:
    left_out = min(max(10, updates // 50), updates // 2)
    return left_out if options.warmup_steps is None else options.warmup_steps


def _pair(name: str, text: str, sign: str, second: Callable, example: str) -> tuple[Any, Any]:
    first, _, last = text.rpartition(sign)
    try:
        return (int(first) if second is int else first), second(last)
    except ValueError:
        raise ValueError(f"`{name}` is {text!r}: write it as {example}") from None


def _factor(text: str) -> float | list[float]:
    factors = [float(word) for word in text.split(",")]
    return factors if len(factors) > 1 else factors[0]
