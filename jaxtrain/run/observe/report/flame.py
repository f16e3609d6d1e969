"""The newest trace of a run, for the page: a step's time as tables and as a flame."""

import functools
from typing import Any

from etils import epath

from jaxtrain.host.paths import as_path, listed, look
from jaxtrain.run.observe.profile import trace
from jaxtrain.run.observe.report.records import significant


def traced(run_dir: epath.PathLike) -> dict[str, Any] | None:
    """Returns what is drawn of a run's newest trace, in milliseconds; None where it has none.

    A trace that cannot be read has ``name`` and ``failed`` alone. It is read once, however often
    the page is made.
    """
    folder = None
    try:
        folder = trace.find_trace(as_path(run_dir))
        if folder is None:
            return None
        written = tuple((str(path), look(path)) for path in listed(folder, trace.FILES))
        return _read(str(folder), written)
    except (ValueError, OSError) as error:
        return {"name": folder.name if folder else "the trace", "failed": str(error)}


@functools.lru_cache(maxsize=16)
def _read(folder: str, written: tuple) -> dict[str, Any]:
    del written  # What is written anew is read anew.
    return drawn(trace.read_trace(as_path(folder)))


def drawn(profile: trace.Profile) -> dict[str, Any]:
    """Returns ``name``, ``steps``, ``devices``, ``ms``; the rows of ``kinds`` (name, time, time in
    flight or None) and of ``parts`` (name, time, and by each of ``directions``); ``late``, the
    slowest process of each step (step, name, time that another waits); and ``flame``, the step as
    nodes (name, time, nodes)."""
    sums, used = trace.in_directions(profile)
    return {
        "name": profile.name,
        "steps": profile.steps,
        "devices": len(profile.devices),
        "ms": _ms(profile.seconds),
        "kinds": [
            [kind, _ms(s), _ms(profile.in_flight[kind]) if kind in profile.in_flight else None]
            for kind, s in trace.add_up(profile, lambda operation: operation.kind)
        ],
        "directions": used,
        "parts": [
            [part, _ms(s), *(_ms(sums[part, direction]) for direction in used)]
            for part, s in trace.add_up(profile, trace.part_of)
        ],
        "late": [[step, process, _ms(seconds)] for step, process, seconds in profile.late],
        "flame": _node(trace.branches(profile)),
    }


def _node(branch: trace.Branch) -> list:
    return [branch.name, _ms(branch.seconds), [_node(each) for each in branch.inner]]


def _ms(seconds: float) -> float:
    return significant(1e3 * seconds)
