"""Where a step's time goes, for the page: the newest trace of a run, as tables and as a flame."""

import functools
from collections.abc import Iterable
from typing import Any

from etils import epath

from jaxtrain.host.paths import as_path
from jaxtrain.run.observe.profile.programs import IDLE, OTHER, Operation
from jaxtrain.run.observe.profile.trace import (
    FILES,
    Profile,
    add_up,
    find_trace,
    in_directions,
    part_of,
    read_trace,
)
from jaxtrain.run.observe.report.records import significant

# What takes less than this part of a step is drawn with others of its kind.
SMALL = 0.002


def traced(run_dir: epath.PathLike) -> dict[str, Any] | None:
    """Returns what is drawn of a run's newest trace, in milliseconds; None where it has none.

    A trace that cannot be read has ``name`` and ``failed`` alone. It is read once, however often
    the page is made.
    """
    folder = None
    try:
        folder = find_trace(as_path(run_dir))
        if folder is None:
            return None
        written = tuple((str(path), path.stat().mtime) for path in folder.glob(FILES))
        return _read(str(folder), written)
    except (ValueError, OSError) as error:
        return {"name": folder.name if folder else "the trace", "failed": str(error)}


@functools.lru_cache(maxsize=16)
def _read(folder: str, written: tuple) -> dict[str, Any]:
    del written  # What is written anew is read anew.
    return drawn(read_trace(as_path(folder)))


def drawn(profile: Profile) -> dict[str, Any]:
    """Returns ``name``, ``steps``, ``devices``, ``ms``; the rows of ``kinds`` (name, time, time in
    flight or None) and of ``parts`` (name, time, and by each of ``directions``); and ``flame``."""
    sums, used = in_directions(profile)
    return {
        "name": profile.name,
        "steps": profile.steps,
        "devices": len(profile.devices),
        "ms": _ms(profile.seconds),
        "kinds": [
            [kind, _ms(s), _ms(profile.in_flight[kind]) if kind in profile.in_flight else None]
            for kind, s in add_up(profile, lambda operation: operation.kind)
        ],
        "directions": used,
        "parts": [
            [part, _ms(s), *(_ms(sums[part, direction]) for direction in used)]
            for part, s in add_up(profile, part_of)
        ],
        "flame": flame(profile),
    }


def flame(profile: Profile) -> list:
    """Returns a step as nodes (name, milliseconds, nodes), the longest first: parts of the model,
    within each the direction, and within that kinds of operations. The nodes within one take its
    time together."""
    return _node("step", profile.shares.items(), 0, SMALL * profile.seconds)


def _node(name: str, shares: Iterable[tuple[Operation, float]], depth: int, least: float) -> list:
    shares = list(shares)
    groups: dict[str | None, list] = {}
    for operation, seconds in shares:
        path = _path(operation)
        groups.setdefault(path[depth] if depth < len(path) else None, []).append(
            (operation, seconds)
        )
    total = sum(seconds for _, seconds in shares)
    if None in groups:
        return [name, _ms(total), []]
    sizes = {each: sum(seconds for _, seconds in inner) for each, inner in groups.items()}
    large = sorted((each for each in groups if sizes[each] >= least), key=lambda x: -sizes[x])
    nodes = [_node(each, groups[each], depth + 1, least) for each in large]
    if len(small := groups.keys() - {*large}) and (rest := sum(sizes[each] for each in small)):
        nodes.append([f"{len(small)} shorter", _ms(rest), []])
    return [name, _ms(total), nodes]


def _path(operation: Operation) -> tuple[str, ...]:
    if operation.kind == IDLE:
        return (IDLE,)
    within = (operation.direction,) if operation.direction else ()
    return (*(operation.scopes or (OTHER,)), *within, operation.kind)


def _ms(seconds: float) -> float:
    return significant(1e3 * seconds)
