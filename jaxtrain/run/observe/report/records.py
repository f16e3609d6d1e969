"""Reads the folder of a run as it is: cut off, half written, still growing, or edited by hand.

One rule holds for all of its files, so that code that draws a record need not look again: an entry
that no run writes (of another kind, or null) is left out here, and an integer that NumPy cannot
hold becomes a float.
"""

import array
import collections
import contextlib
import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxtrain.host import storage
from jaxtrain.host.paths import as_path, exists, is_folder, json_object, read_if_there
from jaxtrain.run import receipts
from jaxtrain.run.folder import CHANGES, CONFIG, EVENTS, HEARTBEAT, LOG, OWNER, RECEIPTS, STOPPED
from jaxtrain.run.observe import goodput, journal
from jaxtrain.run.observe.metric import Metric, defined
from jaxtrain.run.observe.throughput import PARTS
from jaxtrain.run.provenance import flatten

# Of the counts of steps by their time, the key of 2^32 seconds.
SLOWEST = 32 * PARTS
# The kinds of an event's entries.
_KINDS: dict[str, type] = {"time": str, "error": str, "lines": list, "facts": dict, "memory": dict}
_KINDS |= dict.fromkeys(("step", "newest_checkpoint", "bytes", "dropped", "attempt"), int)
# The entries of a line that are no metrics.
_OWN = frozenset({"step", "time", "attempt", "host", "process"})


@dataclasses.dataclass(frozen=True)
class Series:
    """A metric over the steps that have logged it.

    Args:
      steps: int64 [n], rising.
      values: float64 [n], or float32 [n, entries]; what was not finite is as it was.
    """

    steps: np.ndarray
    values: np.ndarray

    def finite(self) -> "Series":
        """The points whose value is finite."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


@dataclasses.dataclass(frozen=True)
class Record:
    """Metrics, settings and events of one run.

    Args:
      series: metrics of one number, by name.
      vectors: metrics with one axis, by name; of lines of several lengths, those of the last.
      config: the flags and what else it was configured with, by dotted name.
      environment: versions, mesh and data, by name.
      changes: of later starts, (step, name, then, now).
      events: the lines of its journal.
      heartbeat: its last sign of life; empty where there is none.
      step_times: how many steps took how long, over all attempts (``Throughput.times``).
      receipts: the lines of its chain of receipts; none where it has none.
      unreadable: lines of the log, before the last, that are no record.
    """

    path: str
    name: str
    series: dict[str, Series]
    times: Series
    config: dict[str, Any]
    environment: dict[str, Any]
    changes: list[tuple[int, str, Any, Any]]
    unreadable: int
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    heartbeat: dict[str, Any] = dataclasses.field(default_factory=dict)
    attempts: list[goodput.Attempt] = dataclasses.field(default_factory=list)
    step_times: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    stopped: str | None = None
    vectors: dict[str, Series] = dataclasses.field(default_factory=dict)
    receipts: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def at_price(self, price: float | None) -> "Record":
        """The run with another price of an hour in all attempts; None for its own."""
        if price is None:
            return self
        told = [dataclasses.replace(a, costs={**a.costs, "price": price}) for a in self.attempts]
        return dataclasses.replace(self, attempts=told)

    @property
    def step(self) -> int:
        """The last step that has been logged; 0 before any."""
        return int(self.times.steps[-1]) if self.times.steps.size else 0

    @property
    def total(self) -> int | None:
        """The steps that it is to have; None where its config does not say."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    @property
    def held_out_losses(self) -> list[str]:
        """The names of the held-out losses that it has logged."""
        return [n for n in self.series if Metric.of(n).is_held_out_loss]

    @property
    def rates(self) -> list[str]:
        """The names of its throughput, such as ``time/tokens_per_second``."""
        return [n for n in self.series if Metric.of(n).item]

    def happened(self, event: str) -> list[dict[str, Any]]:
        """The lines of the journal that tell of an event."""
        return [line for line in self.events if line.get("event") == event]

    def above_zero(self, name: str) -> list[int]:
        """The steps in which a metric is above 0, such as ``train/skipped``."""
        series = self.series.get(name)
        return [] if series is None else series.steps[series.values > 0].tolist()

    def values(self, name: str) -> np.ndarray:
        """The finite values of a metric; none where it is not logged."""
        return self.series[name].finite().values if name in self.series else np.zeros(0)


def read(runs: Sequence[epath.PathLike]) -> list[Record]:
    """Reads the folders of runs, and names them by as much of their paths as tells them apart.
    Raises ValueError where one is no run's folder, or is named twice, and StorageError where one
    cannot be read."""
    paths = [as_path(run) for run in runs]
    parts = [path.parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(path for path, each in zip(paths, parts, strict=True) if parts.count(each) > 1)
        raise ValueError(f"{twice} is named twice: name each run once")
    long = max(map(len, parts))
    size = next(n for n in range(1, long + 1) if len({each[-n:] for each in parts}) == len(parts))
    names = ["/".join(each[-size:]) for each in parts]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def holds_run(path: epath.Path) -> bool:
    """Whether a run has begun to write into a folder."""
    return is_folder(path) and any(exists(path / name) for name in (LOG, OWNER))


def read_run(path: epath.Path, name: str) -> Record:
    """Reads one folder; see :func:`read`."""
    texts = storage.retrying(lambda: _texts(path), f"the run {path}")
    points: dict[str, _Points] = collections.defaultdict(_Points)
    vectors: dict[str, dict[int, np.ndarray]] = {}
    times, unreadable = _Points(), 0
    for line in _lines(texts.pop(LOG)):
        if line is None:
            unreadable += 1
            continue
        step = line["step"]
        if (when := _time(line.get("time"))) is not None:
            times.add(step, when)
        for key, value in defined(line).items():
            if key not in _OWN and (number := _number(value)) is not None:
                points[key].add(step, number)
            elif (vector := _vector(value)) is not None:
                vectors.setdefault(key, {})[step] = vector
    config = _object(texts[CONFIG])
    changes = []
    for line in filter(None, texts[CHANGES].split("\n")):
        change = _object(line)
        config = change.get("record") if isinstance(change.get("record"), dict) else config
        told = change.get("changes") if isinstance(change.get("changes"), dict) else {}
        for what, pair in told.items():
            if isinstance(pair, list) and len(pair) == 2:
                start = change.get("from_step")
                changes.append((start if isinstance(start, int) else 0, what, *pair))
    flags = flatten(config.get("flags", config))
    events = list(filter(None, map(_object, texts[EVENTS].split("\n"))))
    heartbeat = _object(texts[HEARTBEAT])
    states = journal.states(events, heartbeat)
    return Record(
        path=str(path),
        name=name or str(path),
        series={key: each.series() for key, each in sorted(points.items())},
        vectors={key: _vectors(each) for key, each in sorted(vectors.items())},
        times=times.series(),
        config={k: v for k, v in flags.items() if not k.startswith("provenance.")},
        environment=flatten(config.get("provenance", {})),
        changes=changes,
        unreadable=unreadable,
        events=[
            {k: v for k, v in event.items() if isinstance(v, _KINDS.get(k, object))}
            for event in events
        ],
        heartbeat=heartbeat,
        attempts=goodput.attempts(states),
        step_times=_step_times(states),
        stopped=json_object(texts[STOPPED]).get("reason"),
        receipts=receipts.parse(texts[RECEIPTS]),
    )


def _object(text: str) -> dict[str, Any]:
    """Reads a JSON object whose integers NumPy can hold; others become the float next to them."""
    return json_object(text, parse_int=lambda x: int(x) if len(x) < 19 else float(x))


def _texts(path: epath.Path) -> dict[str, str]:
    """The files of a run; those that are not there yet are empty."""
    if not holds_run(path):
        raise ValueError(f"{path} holds no run: name the folder that a run wrote, with its {LOG}")
    # A line that is being written may end within a character.
    return {
        name: read_if_there(path / name).decode(errors="replace")
        for name in (LOG, CONFIG, CHANGES, STOPPED, EVENTS, HEARTBEAT, RECEIPTS)
    }


def _step_times(states: Sequence[Mapping[str, Any]]) -> collections.Counter:
    times: collections.Counter = collections.Counter()
    for state in states:
        with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):
            told = {int(key): int(n) for key, n in state.get("step_times", {}).items()}
            # What no step can have taken is damage; there would be no end to its histogram.
            times.update({key: n for key, n in told.items() if abs(key) < SLOWEST and n > 0})
    return times


def _lines(text: str) -> Iterator[dict[str, Any] | None]:
    """The records in a log one by one, and None for each line before the last that is none."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        record = _object(line)
        step = record.get("step")
        if isinstance(step, int) and 0 <= step < 2**63:
            yield record
        elif line.strip() and i < len(lines) - 1:
            yield None


class _Points:
    """A metric as it is read; a log of a hundred thousand lines has millions of numbers."""

    def __init__(self):
        self.steps, self.values = array.array("q"), array.array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def series(self) -> Series:
        """Returns the points in the order of steps. The last value of a step counts: it is of a
        later attempt."""
        steps, values = (np.array(each)[::-1] for each in (self.steps, self.values))
        steps, last = np.unique(steps, return_index=True)
        return Series(steps, values[last])


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return float(value) if not isinstance(value, str) or value in ("nan", "inf", "-inf") else None


def _vector(value: Any) -> np.ndarray | None:
    if not isinstance(value, list) or any(_number(each) is None for each in value):
        return None
    return np.array([_number(each) for each in value], np.float32) if value else None


def _time(text: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def _vectors(points: dict[int, np.ndarray]) -> Series:
    size = points[max(points)].size
    kept = {step: point for step, point in sorted(points.items()) if point.size == size}
    return Series(np.array(list(kept), np.int64), np.stack(list(kept.values())))


def downsample(series: Series, buckets: int) -> dict[str, np.ndarray]:
    """Takes the finite points of a series together in equal ranges of steps, so that no spike is
    lost. Returns ``x`` the last step of each bucket that holds a point, ``y`` its mean, and where a
    bucket holds several points ``lo`` and ``hi``, its smallest and largest value.

    >>> points = Series(np.arange(6), np.array([1.0, 9.0, 2.0, 4.0, math.nan, 6.0]))
    >>> {name: each.tolist() for name, each in downsample(points, 3).items()}
    {'x': [1, 3, 5], 'y': [5.0, 3.0, 6.0], 'lo': [1.0, 2.0, 6.0], 'hi': [9.0, 4.0, 6.0]}
    """
    series = series.finite()
    steps, values = series.steps, series.values
    if steps.size <= buckets:
        return {"x": steps, "y": values}
    width = (steps[-1] - steps[0] + 1) / buckets
    bucket = ((steps - steps[0]) / width).astype(int)
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    number = np.diff(first, append=steps.size)
    return {
        "x": steps[first + number - 1],
        "y": np.add.reduceat(values, first) / number,
        "lo": np.minimum.reduceat(values, first),
        "hi": np.maximum.reduceat(values, first),
    }


def significant(value: float, digits: int = 5) -> float | int:
    """Rounds a number to significant digits, as the shortest text that JSON has for it.

    >>> significant(2.3456789), significant(123456.7), significant(8.0)
    (2.3457, 123460, 8)
    """
    rounded = float(f"{value:.{digits}g}")
    whole = math.isfinite(rounded) and rounded == int(rounded) and abs(rounded) < 1e15
    return int(rounded) if whole else rounded
