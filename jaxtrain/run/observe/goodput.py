"""Accounts for the time of a run: measured in every attempt, added up over all of them."""

import contextlib
import dataclasses
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Bytes from and to disk and network.
MOVED = ("disk_read", "disk_written", "network_received", "network_sent")
# Of an attempt: its chips (on a CPU its machines), the price of one for an hour, the watts of a
# chip's board, the energy that chips and CPUs have taken, what was moved; and the hosts, where
# their number changes.
COSTS = ("chips", "machines", "price", "watts", "kwh", "cpu_kwh", *MOVED, "hosts")

# What an attempt does, one thing at a time. "data" is the loop's wait for a batch, in which the
# devices may still be busy with the step before; "save" and "evaluation" are what holds the loop.
ACTIVITIES = ("init", "restore", "compile", "data", "step", "evaluation", "save", "finish")
# What only all attempts together tell: steps that were done again, and time between attempts.
LOST, DOWN = "lost steps", "down"


class TimeLedger:
    """The seconds of one attempt, each of them in one activity.

    Args:
      began: when the attempt began, in seconds since 1970; None for now.

    >>> ticks = iter([10.0, 12.0, 15.0, 16.0])
    >>> ledger = TimeLedger(clock=lambda: next(ticks), wall=lambda: 0.0)
    >>> with ledger.phase("compile"):
    ...     pass
    >>> ledger.seconds()
    {'init': 3.0, 'compile': 3.0}
    """

    def __init__(
        self,
        began: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ):
        now = wall()
        self.began = now if began is None else began
        self._clock, self._lock = clock, threading.Lock()
        self._doing, self._since = "init", clock()
        self._seconds = {"init": now - self.began}

    @contextlib.contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """Charges the time of the ``with`` body, minus what that charges to other activities."""
        before = self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, activity: str) -> str:
        """Books the time from here on; returns what it was booked as."""
        with self._lock:
            before, now = self._doing, self._clock()
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
            self._doing, self._since = activity, now
        return before

    def timed(self, activity: str, items: Iterable[T]) -> Iterator[T]:
        """Passes items on, and books the waits for them."""
        items, nothing = iter(items), object()
        while True:
            with self.phase(activity):
                item = next(items, nothing)
            if item is nothing:
                return
            yield item

    @property
    def doing(self) -> str:
        """The activity of now."""
        return self._doing

    def seconds(self) -> dict[str, float]:
        """Seconds by activity until now; their sum is the time since the attempt began."""
        self.begin(self._doing)
        with self._lock:
            return dict(self._seconds)


def process_began() -> float | None:
    """When this process was started, in seconds since 1970; None where the system does not say."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - max(0.0, age)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of a run: its times, steps, end and costs.

    Args:
      began, until: seconds since 1970; ``until`` is its last sign of life.
      first, last: the step that it began from, and the last one that it has done.
      ended: how it ended; None where it was killed, or still runs.
    """

    number: int
    began: float
    until: float
    seconds: Mapping[str, float]
    first: int
    last: int
    ended: str | None
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)


def attempts(states: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Returns the attempts of a run, from the last state that each has written (``Journal``), in
    order; a damaged one is passed over."""
    found = []
    for state in states:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            seconds = {str(k): float(v) for k, v in state["seconds"].items()}
            began = float(state["began"])
            costs = {name: float(state[name]) for name in COSTS if name in state}
            if not all(map(math.isfinite, (began, *seconds.values(), *costs.values()))):
                continue
            # One that has not come to its first step has neither kept nor lost any.
            before = found[-1].last if found else 0
            first = before if state["first_step"] is None else int(state["first_step"])
            found.append(
                Attempt(
                    number=int(state["attempt"]),
                    began=began,
                    until=began + sum(seconds.values()),
                    seconds=seconds,
                    first=first,
                    last=max(first, int(state["step"])),
                    ended=state.get("ended"),
                    costs=costs,
                )
            )
    return found


def lost_steps(found: Sequence[Attempt]) -> list[int]:
    """Returns how many steps of each attempt a later one has done again.

    >>> one = Attempt(1, 0.0, 9.0, {"init": 1.0, "step": 8.0}, 0, 8, None)
    >>> lost_steps([one, dataclasses.replace(one, number=2, first=6, last=7)])
    [2, 0]
    """
    lost = []
    for i, attempt in enumerate(found):
        kept = min((later.first for later in found[i + 1 :]), default=attempt.last)
        lost.append(max(0, attempt.last - max(kept, attempt.first)))
    return lost


def spent(found: Sequence[Attempt]) -> dict[str, float]:
    """Adds up what all attempts took, from the beginning of each to its end.

    Energy that was read and energy by a model are told apart. The model is for attempts whose chips
    have no reading: an upper bound, for which a chip takes the power of its board all the time.

    Returns:
      ``chip-hours`` (on a CPU ``machine-hours``), ``cost``, ``cost lost`` (the part of it for
      steps that were done again), ``kWh`` of chips and ``CPU kWh`` as read, and ``kWh at most``;
      without those that no attempt knows.

    >>> run = Attempt(1, 0.0, 1800.0, {"step": 1800.0}, 0, 8, None, {"chips": 8, "price": 2.5})
    >>> spent([run, dataclasses.replace(run, first=8, last=9, costs={"chips": 4, "kwh": 0.25})])
    {'chip-hours': 6.0, 'cost': 10.0, 'kWh': 0.25}
    """
    total: dict[str, float] = {}
    for attempt, lost in zip(found, _lost_seconds(found), strict=True):
        costs, known = attempt.costs, {}
        hours = sum(attempt.seconds.values()) / 3600
        for unit in ("chip", "machine"):
            if (number := costs.get(f"{unit}s")) is not None:
                known[f"{unit}-hours"] = number * hours
                if "price" in costs:
                    each = costs["price"] * number
                    known["cost"] = each * hours
                    known |= {"cost lost": each * lost / 3600} if lost else {}
        if "kwh" in costs:
            known["kWh"] = costs["kwh"]
        elif {"watts", "chips"} <= costs.keys():
            known["kWh at most"] = costs["chips"] * costs["watts"] * hours / 1000
        known |= {"CPU kWh": costs["cpu_kwh"]} if "cpu_kwh" in costs else {}
        total |= {name: total.get(name, 0.0) + value for name, value in known.items()}
    return total


def moved(found: Sequence[Attempt]) -> dict[str, float]:
    """Adds up the bytes that all attempts have moved, by the names in ``MOVED``; without those that
    no attempt knows."""
    known = {name: [a.costs[name] for a in found if name in a.costs] for name in MOVED}
    return {name.replace("_", " "): sum(bytes_) for name, bytes_ in known.items() if bytes_}


def _lost_seconds(found: Sequence[Attempt]) -> list[float]:
    """The seconds of each attempt in steps that a later one has done again, at its mean time."""
    return [
        lost / (attempt.last - attempt.first) * attempt.seconds.get("step", 0.0) if lost else 0.0
        for attempt, lost in zip(found, lost_steps(found), strict=True)
    ]


def changes_of_hosts(found: Sequence[Attempt]) -> tuple[list[int], float]:
    """Returns the number of hosts of the first attempt and after each change, and the seconds that
    the changes have cost: between the attempts, until the first step of the later one, and for
    steps that it did again. Empty where the number does not change.

    >>> two = Attempt(1, 0.0, 9.0, {"init": 1.0, "step": 8.0}, 0, 8, None, {"hosts": 2})
    >>> one = Attempt(2, 30.0, 34.0, {"init": 3.0, "step": 1.0}, 7, 8, None, {"hosts": 1})
    >>> changes_of_hosts([two, one])
    ([2, 1], 25.0)
    """
    numbers, total, known = [], 0.0, [a for a in found if "hosts" in a.costs]
    for a, b in itertools.pairwise(known):
        if a.costs["hosts"] != b.costs["hosts"]:
            numbers += [] if numbers else [int(a.costs["hosts"])]
            numbers.append(int(b.costs["hosts"]))
            again, steps = max(0, a.last - b.first), a.last - a.first
            total += max(0.0, b.began - a.until)
            total += sum(b.seconds.get(name, 0.0) for name in ("init", "restore", "compile"))
            total += a.seconds.get("step", 0.0) * min(again, steps) / max(steps, 1)
    return numbers, total


def account(found: Sequence[Attempt]) -> dict[str, float]:
    """Adds up where the time of all attempts went, from the first one's beginning to the last news.

    The steps that a later attempt did again are taken out of "step", at the mean time of a step of
    their attempt. Time between what was last heard of an attempt and the next one's beginning is
    "down": it holds the moments between the last heartbeat and a kill. Returns seconds by activity,
    the largest part of which should be "step"; they add up to the time of the run on the wall.
    Empty where nothing is known.
    """
    total: dict[str, float] = {}
    for attempt, lost in zip(found, _lost_seconds(found), strict=True):
        for activity, seconds in attempt.seconds.items():
            total[activity] = total.get(activity, 0.0) + seconds
        if lost:
            total["step"] -= lost
            total[LOST] = total.get(LOST, 0.0) + lost
    gaps = (max(0.0, b.began - a.until) for a, b in itertools.pairwise(found))
    if down := sum(gaps):
        total[DOWN] = down
    order = {name: i for i, name in enumerate((*ACTIVITIES, LOST, DOWN))}
    return {name: total[name] for name in sorted(total, key=lambda n: order.get(n, len(order)))}
