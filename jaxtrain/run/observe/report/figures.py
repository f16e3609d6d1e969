"""Runs side by side, as before and after: time, memory, utilisation, loss and cost."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxtrain.host.memory import human_bytes, human_count, human_seconds
from jaxtrain.run.observe import journal
from jaxtrain.run.observe.goodput import DOWN, account, moved, spent
from jaxtrain.run.observe.metric import Metric
from jaxtrain.run.observe.report.health import duration, recent
from jaxtrain.run.observe.report.records import Record, significant

# The last part of the steps that two runs have in common, whose losses are compared; in so many
# batches, for losses of steps close together are alike.
COMPARED, BATCHES = 0.5, 10
# The two-sided 95 % quantile of Student's t with BATCHES - 1 degrees of freedom.
T_95 = 2.262

# How numbers are written; shares and losses change by a difference, all else by a ratio.
SHARE, LOSS = "{:.1%}".format, "{:.4f}".format
# What is read of the log: the row's name, the metric, what is taken of its values.
LOGGED: Sequence[tuple[str, str, Callable[[np.ndarray], float], Callable[[float], str]]] = (
    ("time of a step", "time/step_seconds", np.median, human_seconds),
    ("wait for data in a step", "time/data_seconds", np.mean, human_seconds),
    ("memory, measured", "memory/peak", np.max, human_bytes),
    ("MFU", "time/mfu", np.median, SHARE),
    ("device utilisation", "device/utilisation", np.mean, SHARE),
    ("host CPU", "host/cpu", np.mean, SHARE),
    ("training loss", "train/loss", lambda x: x[-recent(x.size) :].mean(), LOSS),
)


def figures(records: Sequence[Record]) -> list[list[str]]:
    """Returns the rows of the table: a name, and each run's number, from the second on with its
    change."""
    told = [{name: rest for name, *rest in _told(record)} for record in records]
    rows = []
    for name in dict.fromkeys(name for of in told for name in of):
        first, _ = told[0].get(name, (None, None))
        row = [name]
        for i, of in enumerate(told):
            value, write = of.get(name, (None, None))
            text = "-" if value is None else write(value)
            if i and first and value is not None:
                change = f"{value / first - 1:+.1%}"
                change = f"{100 * (value - first):+.1f} points" if write is SHARE else change
                text += f" ({value - first:+.4f})" if write is LOSS else f" ({change})"
            row.append(text)
        rows.append(row)
    return rows


def _told(record: Record):
    """What a run knows of itself: names, numbers and how they are written."""
    times = account(record.attempts)
    times.pop(DOWN, None)
    if total := sum(times.values()):
        yield "time of all attempts", total, duration
        yield "share of it in steps", times.get("step", 0.0) / total, SHARE
        if "compile" in times:
            yield "time of all compilations", times["compile"], human_seconds
    for line in record.happened(journal.READY)[-1:]:
        if isinstance(peak := line.get("memory", {}).get("peak"), int):
            yield "memory, compiled for", peak, human_bytes
    for name, metric, take, write in LOGGED:
        if (values := record.values(metric)).size:
            yield name, float(take(values)), write
    for name in record.held_out_losses:
        if (values := record.values(name)).size:
            yield f"held-out {Metric.of(name).name}", float(values[-1]), LOSS
    for name in record.rates:
        if (values := record.values(name)).size:
            yield f"{Metric.of(name).item}/s", float(np.median(values)), human_count
    for name, value in spent(record.attempts).items():
        yield name, value, lambda x: f"{significant(x, 4):,}"
    for name, value in moved(record.attempts).items():
        yield name, value, human_bytes


def side_by_side(records: Sequence[Record]) -> list[str]:
    """Writes the table of several runs, and what is to be said of their losses."""
    rows = [["", *(record.name for record in records)], *figures(records)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *texts in rows:
        cells = [text.rjust(width) for text, width in zip(texts, wide[1:], strict=True)]
        lines.append("  ".join([name.ljust(wide[0]), *cells]))
    return [*lines, "", *verdicts(records)]


def verdicts(records: Sequence[Record]) -> list[str]:
    """Says of each run after the first whether its training loss differs from the first one's by
    more than noise, at the steps that both have logged (:func:`difference`)."""
    told, (first, *others) = [], records
    for other in others:
        both = [record.series.get("train/loss") for record in (first, other)]
        if None in both:
            continue
        steps, *at = np.intersect1d(*(each.steps for each in both), return_indices=True)
        values = [each.values[i] for each, i in zip(both, at, strict=True)]
        last = int(COMPARED * steps.size)
        wrong = np.count_nonzero(~np.isfinite(values).all(0)[steps.size - last :])
        found = difference(*values)
        if found is not None:
            noise = "no more than noise" if abs(found[0]) <= found[1] else "more than noise"
            text = f"is {found[0]:+.4f} +- {found[1]:.4f} over the last {last} steps that both "
            text += f"have logged: {noise}"
            text += f"; {wrong} of them, not finite, are left out" if wrong else ""
        elif wrong:
            text = f"cannot be told: it is not finite in {wrong} of the last {last} steps"
        else:
            text = f"cannot be told from noise: {steps.size} logged steps in common are too few"
        told.append(f"The training loss of {other.name} less that of {first.name} {text}.")
    if told:
        told.append("The noise is that of steps; another seed may differ by more.")
    return told


def difference(before: np.ndarray, after: np.ndarray) -> tuple[float, float] | None:
    """Compares the losses of two runs at the same steps, over the last half of them.

    What both have in common (the trend and, with one seed, the batches) is no noise, so differences
    are taken step by step. Batches of neighbouring steps have means that are nearly independent
    (batch means, Law and Carson 1979, https://doi.org/10.1287/opre.27.5.1011).

    Args:
      before, after: of the same steps [n].

    Returns:
      The mean difference and half the width of its 95 % interval; None with fewer than 20 steps in
      that half whose losses are finite.

    >>> flat = np.ones(200)
    >>> difference(flat, flat + 0.5)
    (0.5, 0.0)
    """
    apart = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    apart = apart[apart.size - int(COMPARED * apart.size) :]
    apart = apart[np.isfinite(apart)]
    if apart.size < 2 * BATCHES:
        return None
    means = np.array([batch.mean() for batch in np.array_split(apart, BATCHES)])
    return float(apart.mean()), float(T_95 * means.std(ddof=1) / np.sqrt(BATCHES))
