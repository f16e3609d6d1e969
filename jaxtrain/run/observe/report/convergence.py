"""Causes of slow convergence: what a run's log says of them, and one thing to try against each.

A cause is found by numbers of the run itself. Each threshold lies between those of runs that were
given the cause on purpose and those of healthy runs; ``jaxtrain/run/README.md`` has both.

Shapes: N lines of a log that have a training loss.
"""

import dataclasses
import enum
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.host.paths import as_path
from jaxtrain.optim.rules import LEARNING_RATES
from jaxtrain.run.folder import LANDSCAPE
from jaxtrain.run.observe.metric import Metric
from jaxtrain.run.observe.report.records import Record

# Nothing is said of a shorter log, or before this part of the steps.
LINES, PART = 20, 0.5
# A rate is too low where the second half of its sum has such a share of the loss's fall (more has a
# loss that leaves a plateau), and all updates together are shorter than so many norms of the
# weights; or where they are minute.
LATE, PATH, MINUTE = (0.25, 0.65), 0.7, 0.03
# A fall of the loss counts where it is above so many of its standard errors.
SURE = 4.0
# A rate is too high where updates are this part of the largest norm of the weights, or the second
# part while so many losses are above the first by a tenth.
LARGE, MEDIUM, ABOVE, OFTEN = 0.15, 0.04, 0.1, 0.03
# The parts of a run beyond which a warm-up is long, and a rate of 1 % of its peak has ended early.
WARMUP, ENDED, NOTHING = 0.85, 0.2, 0.01
# Clipping decides the steps where it is in force in this part of them, and so far below the norms.
CLIPPED, FAR = 0.95, 5.0
# Weight decay is strong where it takes this part of a weight in a step, and has taken it all.
DECAY = 0.01
# A held-out loss has risen by this part of what it had fallen from the first training loss; the
# training loss has fallen meanwhile by this part.
RISEN = 0.05
# fp16 leaves out some steps while it looks for a scale, but not this part of all.
LEFT_OUT = 0.1
# A gradient has vanished where the first layer's is this part of the last one's.
VANISHED = 1e-2
# The correlation of losses that are an epoch apart.
ALIKE = 0.5
# A batch is far from the interval of the noise scale by this factor.
AWAY = 4.0
# Rules whose steps are as long as the gradient, and those whose weight decay shrinks the weights.
GRADIENT_RULES = frozenset({"sgd", "momentum"})
SHRINKING_RULES = GRADIENT_RULES | {"adamw", "adan", "lion", "muon"}


class Cause(enum.Enum):
    """A cause of slow convergence; its value is what is said of it and what to try."""

    RATE_LOW = (
        "The learning rate is too low: all updates together are {path:.2g} times as long as the "
        "weights, and the second half of the summed rate still lowers the loss by {late:.2g}, of "
        "{fall:.2g} in all."
    )
    RATE_HIGH = (
        "The learning rate is too high: single updates are {part:.0%} as long as the weights at "
        "their largest, and {above:.0%} of the losses are a tenth above the first."
    )
    WARMUP_LONG = "The warm-up takes {warmup:,} of {steps:,} steps."
    RATE_ENDED = (
        "The learning rate has been below 1 % of its peak since step {since:,} of {steps:,}."
    )
    CLIPPED = (
        "The gradient is clipped to {limit:.3g} in {part:.0%} of the steps, and its median norm is "
        "{norm:.3g}: the clip shortens nearly every step."
    )
    DECAY_STRONG = (
        "The weight decay is too strong: it takes {part:.1%} of a weight in a step, so that half "
        "of what a step has brought is gone after {half:,.0f} steps."
    )
    OVERFIT = (
        "The model overfits: held-out {name} was {best:#.4g} in step {at:,} and is {last:#.4g}, "
        "while the training loss fell from {then:#.4g} to {now:#.4g}."
    )
    SCALE = "{part:.0%} of the steps were left out: the range of fp16 is too narrow for this model."
    NO_GRADIENT = "No gradient comes to {names}."
    VANISHING = (
        "The gradient vanishes on its way back: its norm in the first of {layers} layers of {name} "
        "is {part:.1e} times that in the last, and steps of {rule} are as long as the gradient."
    )
    EPOCHS = (
        "The loss repeats itself in every epoch: its correlation with the loss {lag:,.0f} steps "
        "before is {correlation:.2f}."
    )
    BATCH_SMALL = "The batch of {batch:,} rows is far below the noise scale of {scale:,.3g} rows."
    BATCH_LARGE = "The batch of {batch:,} rows is far above the noise scale of {scale:,.3g} rows."

    def __call__(self, *flags: str, remedy: str = "", **facts: Any) -> "Diagnosis":
        return Diagnosis(self, facts, flags, remedy or f"Try {' '.join(flags)}.")


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A cause of slow convergence, the numbers that show it, and what to try.

    Args:
      cause: what it is.
      facts: numbers of the run, by name.
      flags: the words to add to the run's command; none where no flag helps.
      remedy: the same as a sentence.

    >>> print(Cause.WARMUP_LONG("--optimizer.warmup-steps", "10", warmup=135, steps=150))
    The warm-up takes 135 of 150 steps. Try --optimizer.warmup-steps 10.
    """

    cause: Cause
    facts: Mapping[str, Any]
    flags: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause.value.format(**self.facts)} {self.remedy}"


def diagnose(record: Record) -> list[Diagnosis]:
    """Finds why a run's loss falls slower than it could, if its log says so.

    Args:
      record: the run; before half of its steps are done, only steps that fp16 leaves out count.

    Returns:
      What was found, steps that are too short or too long first; empty where nothing was found.
    """
    if record.config.get("population.vary"):  # whose losses are means of several trainings
        return []
    changed = {name for _, name, *_ in record.changes}
    if found := list(_scale(record)):
        return found
    if record.step < PART * (record.total or 0):
        return []
    with np.errstate(all="ignore"):  # no comparison with what is no number finds anything
        lines = Lines.of(record)
        # A rate that a later start has changed is two schedules in one log.
        same = not any(name == "steps" or name.startswith("optimizer") for name in changed)
        rates = [] if lines is None or not same else [*_rate(record, lines)]
        rates += [] if lines is None else [*_epochs(record, lines)]
        return [*rates, *_overfit(record), *_layers(record), *_noise(record)]


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of a log that have all of these numbers, finite: steps int64 [N], others [N]."""

    steps: np.ndarray
    loss: np.ndarray
    learning_rate: np.ndarray
    grad_norm: np.ndarray
    param_norm: np.ndarray
    update_norm: np.ndarray

    @classmethod
    def of(cls, record: Record) -> "Lines | None":
        """Reads them; None where they are too few."""
        names = [f"train/{field.name}" for field in dataclasses.fields(cls)[1:]]
        if not record.series.keys() >= set(names):
            return None
        each = [record.series[name].finite() for name in names]
        steps = functools.reduce(np.intersect1d, [series.steps for series in each])
        values = [series.values[np.isin(series.steps, steps)] for series in each]
        return cls(steps, *values) if steps.size >= LINES else None


def _rate(record: Record, lines: Lines) -> Iterator[Diagnosis]:
    """Finds what is wrong with the length of steps: the first cause, which explains the others."""
    rate, size, loss = lines.learning_rate, lines.param_norm, lines.loss
    peak, gaps, rule = rate.max(), np.diff(lines.steps, prepend=0), _word(record, "optimizer.name")
    total, last, tuned = record.total or record.step, record.step, record.config.get("init_from")
    if not (peak > 0 and size.min() > 0):
        return
    clip, usual = _number(record, "optimizer.clip_norm"), np.median(lines.grad_norm)
    clipped = (lines.grad_norm > (clip or np.inf)).mean()
    if rule in GRADIENT_RULES and clipped >= CLIPPED and usual > FAR * clip:
        flags = ("--optimizer.clip-norm", f"{2 * usual:.2g}")
        yield Cause.CLIPPED(*flags, limit=clip, part=clipped, norm=usual)
        return
    decay = _number(record, "optimizer.weight_decay")
    per_step, shrunk = peak * decay, (rate * gaps).sum() * decay
    # The third largest, so that neither a spike nor a first update from zeros decides.
    largest = np.sort(lines.update_norm)[-3] / size.max()
    window = max(3, loss.size // 10)
    # The standard deviation of one loss, from the differences of those that follow each other.
    noise = np.median(np.abs(np.diff(loss))) / 0.6745 / 2**0.5
    first = loss[:window].mean() + SURE * noise if tuned else loss[0]
    above = (loss > first + ABOVE * abs(first)).mean()
    # Weight decay makes long updates too, but no loss that rises.
    alone = largest >= LARGE and per_step < largest / 2
    if alone or (largest >= MEDIUM and above > OFTEN):
        yield Cause.RATE_HIGH(*_rate_flags(record, peak, 0.1), part=largest, above=above)
        return
    decays = per_step >= DECAY and per_step > largest / 2 and shrunk > 1
    if rule in SHRINKING_RULES and decays:
        flags = ("--optimizer.weight-decay", f"{decay / 10:.2g}")
        yield Cause.DECAY_STRONG(*flags, part=per_step, half=np.log(2) / per_step)
        return
    warmup = int(lines.steps[np.argmax(rate >= 0.99 * peak)])
    if warmup > WARMUP * total:
        flags = ("--optimizer.warmup-steps", f"{max(10, total // 50)}")
        yield Cause.WARMUP_LONG(*flags, warmup=warmup, steps=total)
        return
    since = int(lines.steps[np.flatnonzero(rate >= NOTHING * peak)[-1]])
    if last - since > ENDED * last and _word(record, "optimizer.schedule") != "cosine":
        flags, schedule = ("--optimizer.schedule", "cosine"), _word(record, "optimizer.schedule")
        remedy = f"Try {' '.join(flags)}, without the options of {schedule}."
        yield Cause.RATE_ENDED(*flags, remedy=remedy, since=since, steps=last)
        return
    path, summed = (lines.update_norm / size * gaps).sum(), np.cumsum(rate * gaps)
    middle = max(0, int(np.searchsorted(summed, summed[-1] / 2)) - window // 2)
    start, half, end = (loss[i : i + window].mean() for i in (0, middle, loss.size - window))
    falls = start - end > SURE * noise * (2 / window) ** 0.5
    steadily = falls and LATE[0] <= (half - end) / (start - end) <= LATE[1]
    if not tuned and ((path < PATH and steadily) or path < MINUTE):
        flags = _rate_flags(record, peak, 10 if path < PATH / 5 else 3)
        yield Cause.RATE_LOW(*flags, path=path, late=half - end, fall=start - end)


def _rate_flags(record: Record, peak: float, factor: float) -> tuple[str, str]:
    """The flag of a learning rate that is so many times as large."""
    rate = _number(record, "optimizer.learning_rate") or peak
    return "--optimizer.learning-rate", f"{rate * factor:.2g}"


def _epochs(record: Record, lines: Lines) -> Iterator[Diagnosis]:
    """Finds a loss that goes up and down as it did an epoch before, whatever its trend."""
    epochs, gap = record.values("data/epoch"), int(np.median(np.diff(lines.steps)))
    length = record.step / epochs[-1] if epochs.size else np.inf
    if not np.isfinite(length) or lines.loss.min() <= 0:
        return
    loss, lag = np.log(lines.loss), round(length / gap)
    if lag < 4 or loss.size < 3 * lag:
        return
    width = lag | 1
    trend = np.convolve(loss, np.ones(width) / width, "valid")
    left = loss[width // 2 : loss.size - width // 2] - trend
    correlation = np.corrcoef(left[:-lag], left[lag:])[0, 1]
    if correlation > ALIKE:
        remedy = "Draw the rows in a new order in every epoch, as config.batches_of does."
        yield Cause.EPOCHS(remedy=remedy, lag=length, correlation=correlation)


def _scale(record: Record) -> Iterator[Diagnosis]:
    # The first steps look for a scale.
    left_out = [step for step in record.above_zero("train/skipped") if step > LINES]
    part = len(left_out) / max(1, record.step - LINES)
    if _word(record, "precision") == "fp16" and record.step > 2 * LINES and part > LEFT_OUT:
        yield Cause.SCALE("--precision", "bf16", part=part)


def _overfit(record: Record) -> Iterator[Diagnosis]:
    """Finds the first held-out loss that has risen for good while the training loss fell."""
    losses = record.values("train/loss")
    for name in record.held_out_losses if losses.size >= LINES else ():
        series = record.series[name].finite()
        best = int(series.values.argmin()) if series.values.size else 0
        lowest, later = series.values[best : best + 1], series.values[best + 1 :]
        if later.size < 2 or later[-2:].min() < lowest + RISEN * (losses[0] - lowest):
            continue
        window, at = max(3, losses.size // 10), int(series.steps[best])
        seen = losses[: np.searchsorted(record.series["train/loss"].finite().steps, at) + 1]
        then, now = seen[-window:].mean(), losses[-window:].mean()
        if now < (1 - RISEN) * then:
            facts = {"name": Metric.of(name).name, "at": at, "then": then, "now": now}
            facts |= {"best": series.values[best], "last": series.values[-1]}
            yield Cause.OVERFIT("--save-best", "--early-stop-patience", "3", **facts)
            return


def _layers(record: Record) -> Iterator[Diagnosis]:
    """Finds parameters without a gradient, and layers behind which it vanishes, where the norms of
    layers were watched."""
    prefix, rule, still = "train/grad_norm/", _word(record, "optimizer.name"), []
    for logged, series in (record.series | record.vectors).items():
        if not logged.startswith(prefix):
            continue
        name, late = logged.removeprefix(prefix), series.values[series.steps.size // 2 :]
        norms = np.median(late, 0)  # of layers a vector, of another parameter a number
        still += [name] if norms.ndim == 0 and norms == 0 else []
        if norms.ndim:
            still += [f"layer {i} of {name}" for i in np.flatnonzero(norms == 0)]
            part = norms[0] / norms[-1]
            if 0 < part < VANISHED and rule in GRADIENT_RULES:
                facts = {"layers": norms.size, "name": name, "part": part, "rule": rule}
                rate = ("--optimizer.learning-rate", f"{LEARNING_RATES['adamw']}")
                yield Cause.VANISHING("--optimizer.name", "adamw", *rate, **facts)
    if still:
        remedy = "Check that the loss depends on it, and that no activation is dead."
        yield Cause.NO_GRADIENT(remedy=remedy, names=", ".join(sorted(still)))


def _noise(record: Record) -> Iterator[Diagnosis]:
    """Compares the batch with the noise scale at the last checkpoint, of ``jaxtrain noise``."""
    try:
        found = json.loads((as_path(record.path) / LANDSCAPE).read_text())["noise"]
        batch, last = int(found["batch"]), found["checkpoints"][-1]
        ends = [np.inf if last[name] is None else float(last[name]) for name in ("low", "high")]
        small, large = batch * AWAY < ends[0], batch > AWAY * ends[1]
        scale = float(last["scale"]) if small or large else 0.0
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return
    if small:
        yield Cause.BATCH_SMALL("--global-batch", f"{2 * batch}", batch=batch, scale=scale)
    if large:
        flags = ("--global-batch", f"{batch // 2}", "--steps", f"{2 * record.step}")
        yield Cause.BATCH_LARGE(*flags, batch=batch, scale=scale)


def _word(record: Record, name: str) -> str:
    return str(record.config.get(name))


def _number(record: Record, name: str) -> float:
    """A flag that is a number; 0 where it is none."""
    value = record.config.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
