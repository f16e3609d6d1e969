"""The learning-rate range test of a population: its losses over the rate, and the rate to take.

Smith 2017 (https://arxiv.org/abs/1506.01186), section 3.3, raises the rate within one training.
Here each rate has a training of its own, from the same start and on the same batches.

Shapes: L lines of a log, S steps among them, M members, R rates.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxtrain.host.pictures import finish_axes
from jaxtrain.methods.population import ALL, Population
from jaxtrain.run.observe.report.health import recent
from jaxtrain.run.observe.report.records import Record

RATE = "optimizer.learning_rate"
# A loss has risen above its start where it is so much of the range of losses above.
MARGIN = 0.1
# The parts of a run after which its losses are drawn.
PARTS = (0.25, 0.5, 1.0)


def suggest(losses_LR: np.ndarray) -> tuple[np.ndarray, int | None, int | None]:
    """Finds the rate whose loss has fallen fastest, and the largest that has not diverged.

    A rate has diverged where a loss is not finite, or is above every loss of the smallest rate by a
    tenth of the range of that rate's losses and the lowest of all. The largest that has not is the
    last before the first that has. All rates begin at one loss, so that the lowest at the end (a
    mean of the last lines) has fallen fastest.

    Args:
      losses_LR: at each line, of each rate, from the smallest rate on.

    Returns:
      Whether each rate has diverged, bool [R], and the numbers of the fastest and the largest, None
      where the smallest has diverged.

    >>> suggest(np.array([[5.0, 5.0, 5.0, 5.0], [4.0, 3.0, 3.5, 9.0]]))[1:]
    (1, 2)
    """
    finite_LR = np.isfinite(losses_LR)
    diverged_R = ~finite_LR.all(0)
    if not diverged_R[0]:
        top, low = losses_LR[:, 0].max(), losses_LR[finite_LR].min()
        diverged_R |= (losses_LR > top + MARGIN * (top - low)).any(0)
    count = int(np.append(diverged_R, True).argmax())
    fastest = int(_mean_until(losses_LR, len(losses_LR))[:count].argmin()) if count else None
    return diverged_R, fastest, count - 1 if count else None


class RangeTest(NamedTuple):
    """A range test: the run's name, its rates, the steps at which losses are drawn, those losses
    [S, R], each a mean of some lines, and what :func:`suggest` finds."""

    name: str
    rates_R: np.ndarray
    steps: list[int]
    losses_SR: np.ndarray
    diverged_R: np.ndarray
    fastest: int | None
    largest: int | None

    @property
    def text(self) -> str:
        """What to take, and why."""
        rates_R, fastest, largest = self.rates_R, self.fastest, self.largest
        if fastest is None:
            return "The smallest learning rate has diverged: begin the range lower."
        text = (
            f"A learning rate of {rates_R[fastest]:.4g} is suggested, whose loss has fallen "
            f"fastest, to {self.losses_SR[-1, fastest]:.4g} in {self.steps[-1]:,} steps: each rate "
            "is a training of its own, so that the lowest loss decides. The largest that has not "
            f"diverged is {rates_R[largest]:.4g}, a bound."
        )
        edge = fastest in (0, rates_R.size - 1)
        return text + (" The suggestion is an end of the range: widen it there." if edge else "")


def found(record: Record) -> list[RangeTest]:
    """Returns the test of a run whose members differ in the learning rate, and in seeds at most,
    over which losses are means; none of any other run."""
    if record.config.get("population.exploit_every"):  # whose rates change
        return []
    try:
        given = {"size": record.config["population.size"], "vary": record.config["population.vary"]}
        members = Population(**given).members()
        rates_R, of_M = np.unique([each[RATE] for each in members], return_inverse=True)
        series = record.vectors[f"train/{ALL}loss"]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return []
    alone = members[0].keys() <= {RATE, "seed"} and series.values.shape[1] == len(members)
    if not alone or rates_R.size < 3:
        return []
    losses_LR = np.stack([series.values[:, of_M == r].mean(1) for r in range(rates_R.size)], 1)
    counts = sorted({max(1, round(part * len(losses_LR))) for part in PARTS})
    losses_SR = np.stack([_mean_until(losses_LR, count) for count in counts])
    steps = [int(series.steps[count - 1]) for count in counts]
    return [RangeTest(record.name, rates_R, steps, losses_SR, *suggest(losses_LR))]


def draw(axes: Any, test: RangeTest) -> None:
    """Draws losses over the rate on matplotlib's axes; a cross marks a rate that has diverged."""
    rates_R, bad_R, values = test.rates_R, test.diverged_R, test.losses_SR
    kept = values[np.isfinite(values) & (~bad_R | bad_R.all())]
    low, high = (kept.min(), kept.max()) if kept.size else (0.0, 1.0)
    top = high + MARGIN * (high - low)
    for step, losses_R in zip(test.steps, values, strict=True):
        shown_R = np.where(np.isfinite(losses_R), np.minimum(losses_R, top), top)
        (line,) = axes.semilogx(rates_R, shown_R, ".-", label=f"step {step:,}")
        axes.plot(rates_R[bad_R], shown_R[bad_R], "x", color=line.get_color(), markersize=9)
    marks = {"suggested": (test.fastest, "-"), "largest": (test.largest, "--")}
    for name, (at, style) in marks.items():
        if at is not None:
            axes.axvline(rates_R[at], color="gray", linewidth=1, linestyle=style, label=name)
    title = f"loss over the learning rate, {test.name} (cross: diverged)"
    finish_axes(axes, title, x="learning rate")
    axes.legend(frameon=False, fontsize=8)


def _mean_until(losses_LR: np.ndarray, count: int) -> np.ndarray:
    """The mean loss of each rate over the last of the first ``count`` lines."""
    return losses_LR[max(0, count - recent(len(losses_LR))) : count].mean(0)
