"""Whose each moment of a device is, where several things happen at once. Nothing but tuples."""

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """Something that went on from ``start`` to ``end``, in any unit."""

    start: float
    end: float
    what: Hashable


def innermost(events: Iterable[Event]) -> list[Event]:
    """Takes the events of one line, which may contain others (a loop its body), apart. Returns
    events that do not overlap, in order of time: each moment is the innermost one's.

    Args:
      events: in any order. Where one reaches beyond the end of the one in which it starts, it goes
        on all the same.

    >>> [tuple(part) for part in innermost([Event(0, 9, "loop"), Event(1, 3, "body")])]
    [(0, 1, 'loop'), (1, 3, 'body'), (3, 9, 'loop')]
    """
    parts: list[Event] = []
    around: list[Event] = []
    at = float("-inf")

    def go_on(time: float) -> None:
        """Gives the time up to then to the innermost event."""
        nonlocal at
        if around and time > at:
            parts.append(Event(at, time, around[-1].what))
        at = max(at, time)

    def leave(time: float) -> None:
        """Ends the events that end by then."""
        while around and around[-1].end <= time:
            go_on(around[-1].end)
            around.pop()

    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        leave(event.start)
        go_on(event.start)
        around.append(event)
    leave(float("inf"))
    return parts


def divide(
    lines: Iterable[Iterable[Event]], begin: float, end: float, rank: Callable[[Hashable], int]
) -> tuple[dict[Hashable, float], list[Event]]:
    """Divides the time from ``begin`` to ``end`` among what happens, so that the parts add up.

    Of what happens at once, on one line or several, the lowest rank hides the others; what has the
    same rank shares equally. Events are cut off at the ends. Returns the time of each thing that
    happens, None for nothing; and when nothing does.
    """
    changes: list[tuple[float, int, Hashable]] = []
    for line in lines:
        for start, stop, what in line:
            start, stop = max(start, begin), min(stop, end)
            if stop > start:
                changes += [(start, 1, what), (stop, -1, what)]
    changes.sort(key=lambda change: change[:2])
    shares: dict[Hashable, float] = collections.defaultdict(float)
    going_on: dict[int, dict[Hashable, int]] = collections.defaultdict(dict)
    idle: list[Event] = []
    at = begin
    for time, by, what in [*changes, (end, 0, None)]:
        if time > at:
            first = min((r for r, things in going_on.items() if things), default=None)
            if first is None:
                shares[None] += time - at
                idle.append(Event(at, time, None))
            else:
                total = sum(going_on[first].values())
                for thing, count in going_on[first].items():
                    shares[thing] += (time - at) * count / total
            at = time
        if by:
            things = going_on[rank(what)]
            things[what] = things.get(what, 0) + by
            if not things[what]:
                del things[what]
    return dict(shares), idle


def covered(events: Sequence[Event]) -> float:
    """The time in which at least one of these events goes on.

    >>> covered([Event(0, 2, "a"), Event(1, 3, "b"), Event(5, 6, "c")])
    4
    """
    total, until = 0, float("-inf")
    for start, end, _ in sorted(events, key=lambda event: event[:2]):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
