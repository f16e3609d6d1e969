"""Traces of several processes on one clock, and which process the others wait for.

A collective ends in all processes when the last one has come to it and all have what they need. So
its ends tell how clocks differ, and its starts, by one clock, for whom it waits.
"""

import collections
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.planning.hlo import COLLECTIVES
from jaxtrain.run.observe.profile.timeline import Event

# By process, and in it by device, lines of events in nanoseconds.
Timelines = Mapping[str, Mapping[str, Sequence[Sequence[Event]]]]


class Clocks(NamedTuple):
    """How clocks differ: nanoseconds to add to the times of each process, and the most by which the
    ends of the collective that tells it are apart after that."""

    offsets: dict[str, float]
    apart: float


class Wait(NamedTuple):
    """A step, the process that others wait for longest in its collectives, and how long."""

    step: int
    process: str
    seconds: float


def meetings(timelines: Timelines) -> dict[str, list[dict[str, Event]]]:
    """Finds the collectives that all processes have: by name, each time that it runs, from the
    arrival of a process's last device to the end, by process."""
    found: dict[str, dict[str, list[Event]]] = collections.defaultdict(dict)
    for process, devices in timelines.items():
        runs: dict[tuple[str, int], list[Event]] = collections.defaultdict(list)
        for lines in devices.values():
            count: collections.Counter[str] = collections.Counter()
            events = (e for line in lines for e in line if e.what.kind in COLLECTIVES)
            for event in sorted(events, key=lambda event: event.start):
                name = event.what.name
                runs[name, count[name]].append(event)
                count[name] += 1
        for (name, _), each in runs.items():
            last = Event(max(e.start for e in each), max(e.end for e in each), name)
            found[name].setdefault(process, []).append(last)
    several = {n: of for n, of in found.items() if len(of) == len(timelines)}
    return {
        name: [dict(zip(of, each, strict=True)) for each in zip(*of.values(), strict=True)]
        for name, of in several.items()
        if len({len(events) for events in of.values()}) == 1
    }


def clocks(timelines: Timelines) -> Clocks | None:
    """Returns how the clocks of processes differ from the first one's, by the collective whose ends
    then agree best; None where all of them have none that runs twice: the ends of a single run
    agree after some shift, also where each process is alone in it."""
    first, *others = timelines
    best = None
    for runs in (runs for runs in meetings(timelines).values() if len(runs) > 1):
        offsets, apart = {first: 0.0}, 0.0
        for process in others:
            each = [run[first].end - run[process].end for run in runs]
            offsets[process] = statistics.median(each)
            apart = max(apart, *(abs(x - offsets[process]) for x in each))
        if best is None or apart < best.apart:
            best = Clocks(offsets, apart)
    return best


def aligned(timelines: Timelines) -> tuple[Timelines, Clocks | None]:
    """Returns the events by the clock of the first process, and how clocks differ; as they are, and
    None, where nothing tells."""
    found = clocks(timelines) if len(timelines) > 1 else None
    if found is None:
        return timelines, None
    return {
        process: {
            device: [[Event(s + by, e + by, what) for s, e, what in line] for line in lines]
            for device, lines in devices.items()
        }
        for process, devices in timelines.items()
        for by in (found.offsets[process],)
    }, found


def waits(timelines: Timelines, first_step: int, steps: int) -> list[Wait]:
    """Names the process that each step waits for: the one that others wait for longest in all its
    collectives, by one clock. Those whose ends are no nearer to each other than their starts are
    within processes, and nobody waits there."""
    late: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for runs in meetings(timelines).values():
        for i, run in enumerate(runs):
            starts, ends = (sorted(e[k] for e in run.values()) for k in (0, 1))
            if len(runs) % steps == 0 and ends[-1] - ends[0] < starts[-1] - starts[0]:
                last = max(run, key=lambda process: run[process].start)
                late[first_step + i // (len(runs) // steps)][last] += starts[-1] - starts[0]
    most = {step: of.most_common(1)[0] for step, of in sorted(late.items())}
    return [Wait(step, process, 1e-9 * time) for step, (process, time) in most.items()]


def to_json(timelines: Timelines) -> str:
    """Writes events in Chrome's trace format, which https://ui.perfetto.dev opens: a process each,
    with the lines of its devices. Numbers begin at 1: to Perfetto, 0 is the kernel's idle task."""
    told: list[dict[str, Any]] = []
    begin = min(e.start for of in timelines.values() for x in of.values() for y in x for e in y)
    for pid, (process, devices) in enumerate(timelines.items(), 1):
        told.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        lines = [(device, line) for device, each in devices.items() for line in _tracks(each)]
        for tid, (device, line) in enumerate(lines, 1):
            name = {"name": device}
            told.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": name})
            for start, end, what in line:
                at = {"ts": (start - begin) / 1e3, "dur": (end - start) / 1e3}
                kind = {"cat": what.kind, "args": {"part": "/".join(what.scopes)}}
                told.append({"ph": "X", "name": what.name, "pid": pid, "tid": tid} | at | kind)
    return json.dumps({"traceEvents": told, "displayTimeUnit": "ms"})


def _tracks(lines: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Puts lines that do not overlap one after another; each transfer of a TPU has its own."""
    tracks: list[list[Event]] = []
    for line in sorted(filter(None, lines), key=lambda line: line[0].start):
        free = next((track for track in tracks if track[-1].end <= line[0].start), None)
        if free is None:
            tracks.append(free := [])
        free.extend(line)
    return tracks
