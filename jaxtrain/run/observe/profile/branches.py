"""A step as a tree: parts of the model, within each the direction, within that kinds of work."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtrain.run.observe.profile.programs import IDLE, OTHER, Operation
from jaxtrain.run.observe.profile.trace import Profile

# What takes less than this part of a step is told with others of its kind.
SMALL = 0.002


class Branch(NamedTuple):
    """A part of a step, in seconds, and what it is made of, the longest first; the branches within
    one take its time together."""

    name: str
    seconds: float
    inner: tuple["Branch", ...]


def branches(profile: Profile) -> Branch:
    """Returns a step as a tree."""
    return _branch("step", profile.shares.items(), 0, SMALL * profile.seconds)


def _branch(
    name: str, shares: Iterable[tuple[Operation, float]], depth: int, least: float
) -> Branch:
    shares = list(shares)
    groups: dict[str | None, list] = {}
    for operation, seconds in shares:
        path = _path(operation)
        groups.setdefault(path[depth] if depth < len(path) else None, []).append(
            (operation, seconds)
        )
    total = sum(seconds for _, seconds in shares)
    if None in groups:
        return Branch(name, total, ())
    sizes = {each: sum(seconds for _, seconds in inner) for each, inner in groups.items()}
    large = sorted((each for each in groups if sizes[each] >= least), key=lambda x: -sizes[x])
    inner = [_branch(each, groups[each], depth + 1, least) for each in large]
    if len(small := groups.keys() - {*large}) and (rest := sum(sizes[each] for each in small)):
        inner.append(Branch(f"{len(small)} shorter", rest, ()))
    return Branch(name, total, tuple(inner))


def _path(operation: Operation) -> tuple[str, ...]:
    if operation.kind == IDLE:
        return (IDLE,)
    within = (operation.direction,) if operation.direction else ()
    return (*(operation.scopes or (OTHER,)), *within, operation.kind)
