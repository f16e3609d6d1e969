"""Conditions of alerts: they read the lines of a log, which alone decide their state.

A condition receives a metric line by line and says what is wrong, if anything. A resumed run
replays the lines of its log, and so restores that state. Centre and spread are the median and the
median absolute deviation, times 1.4826 to estimate a standard deviation (Rousseeuw and Croux 1993,
"Alternatives to the Median Absolute Deviation"): one spike moves neither.
"""

import collections
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.host.memory import human_count

# Lines that a median is taken over: what is usual, and what is of late.
WINDOW, RECENT = 50, 10
# Lines before which nothing is usual yet.
LEAST = 12
# A rule that has fired does so again after so many lines in a row that gave no reason.
REARM = 20
# The standard deviation of normal numbers whose median absolute deviation is 1.
CONSISTENT = 1.4826
# A loss is not called a spike below this part above its median, a gradient norm below this factor.
LOSS_FLOOR, NORM_FLOOR = 0.1, math.log(5.0)
# Improvement of a loss by less than this part is none.
IMPROVEMENT = 0.01
# Throughput must be low for so many lines, a held-out loss high for so many evaluations.
SLOW_LINES, RISING_EVALUATIONS = 5, 3

ACTIONS = ("warn", "save", "trace", "stop")

Condition = Callable[[int, float], str | None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of alert.

    Args:
      metric: the names that it looks at, as a regex; each is looked at by itself. None where it is
        no line of the log that tells.
      level: where it fires, unless another is asked for; None where one must be given.
      means: what the level is.
      make: makes the condition on one metric, of its name and the level.
      on: whether it is on without being asked for.
      least: the level may not be below.
    """

    metric: str | None
    level: float | None
    means: str
    make: Callable[[str, float], Condition] | None
    on: bool = True
    least: float = 0.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """A rule as it is asked for: the level where it fires, and what is done then; "warn", which
    says it, is always among the actions."""

    level: float
    actions: tuple[str, ...] = ("warn",)


class Spike:
    """A value above ``limit``, which is far above the median of the lines before it."""

    def __init__(self, name: str, level: float, *, logarithmic: bool = False):
        self._name, self._level, self._log = name, level, logarithmic
        self._window: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._usual, self.limit = math.nan, math.inf

    def __call__(self, step: int, value: float) -> str | None:
        found = None
        if value > self.limit and math.isfinite(value):
            found = (
                f"{self._name} is {value:#.4g}, and its median over the last {len(self._window)} "
                f"lines {self._usual:#.4g}: above {self.limit:#.4g} it is a spike"
            )
        self._keep(value)
        return found

    def _keep(self, value: float) -> None:
        if not math.isfinite(value) or (self._log and value <= 0):
            return
        self._window.append(math.log(value) if self._log else value)
        if len(self._window) < LEAST:
            return
        centre, spread = median_and_spread(self._window)
        floor = NORM_FLOOR if self._log else LOSS_FLOOR * abs(centre)
        limit = centre + max(self._level * spread, floor)
        # Beyond what a number holds nothing is a spike.
        self.limit = (math.exp(limit) if limit < 700 else math.inf) if self._log else limit
        self._usual = math.exp(centre) if self._log else centre


class Divergence:
    """The median of late far above its best, or no finite value of late."""

    def __init__(self, name: str, level: float):
        self._name, self._level = name, level
        self._window: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._broken, self._best, self._limit = 0, math.inf, math.inf

    def __call__(self, step: int, value: float) -> str | None:
        self._broken = 0 if math.isfinite(value) else self._broken + 1
        if self._broken:
            times = f"in {RECENT} lines in a row"
            return f"{self._name} was not finite {times}" if self._broken >= RECENT else None
        self._window.append(value)
        if len(self._window) < RECENT:
            return None
        late = statistics.median(list(self._window)[-RECENT:])
        if late < self._best:
            spread = median_and_spread(self._window)[1]
            self._best = late
            self._limit = late + max(self._level * abs(late), 6 * spread)
        if late <= self._limit:
            return None
        return (
            f"{self._name} is {late:#.4g} (median of {RECENT} lines), far above its best, "
            f"{self._best:#.4g}"
        )


class Plateau:
    """No improvement of the median of late for so many steps."""

    def __init__(self, name: str, level: float):
        self._name, self._level = name, level
        self._window: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._best, self._at = math.inf, 0

    def __call__(self, step: int, value: float) -> str | None:
        if not math.isfinite(value):
            return None
        self._window.append(value)
        late = statistics.median(self._window)
        # Written so that the first is better than none.
        if not late >= self._best - IMPROVEMENT * abs(self._best) or math.isinf(self._best):
            self._best, self._at = late, step
        if step - self._at < self._level:
            return None
        return (
            f"{self._name} has not fallen by {IMPROVEMENT:.0%} from {self._best:#.4g} in "
            f"{step - self._at:,} steps"
        )


def above(name: str, level: float) -> Condition:
    """A value above the level."""
    return lambda step, value: f"{name} is {value:.4g}" if value > level else None


class Slow:
    """Values below a part of the median of the lines before, several in a row."""

    def __init__(self, name: str, level: float):
        self._name, self._level, self._below = name, level, 0
        self._window: collections.deque[float] = collections.deque(maxlen=2 * WINDOW)

    def __call__(self, step: int, value: float) -> str | None:
        usual = statistics.median(self._window) if len(self._window) >= LEAST else 0.0
        self._below = self._below + 1 if value < self._level * usual else 0
        if math.isfinite(value):
            self._window.append(value)
        if self._below < SLOW_LINES:
            return None
        part = f"{1 - value / usual:.0%} below its median"
        return f"{self._name} is {human_count(value)}, {part}"


class Rising:
    """Evaluations above the best one, several in a row."""

    def __init__(self, name: str, level: float):
        self._name, self._level = name, level
        self._best, self._at, self._above = math.inf, 0, 0

    def __call__(self, step: int, value: float) -> str | None:
        if -math.inf < value < self._best:
            self._best, self._at = value, step
        # Written so that what is not finite counts too.
        fine = value <= self._best + self._level * abs(self._best)
        self._above = 0 if fine else self._above + 1
        if self._above < RISING_EVALUATIONS:
            return None
        return (
            f"{self._name} rises: {value:#.4g} now, {self._best:#.4g} at its best in step "
            f"{self._at:,}"
        )


RULES = {
    "loss_spike": Rule("train/loss", 10.0, "robust standard deviations above the median", Spike),
    "divergence": Rule("train/loss", 0.2, "part above the best median", Divergence),
    "plateau": Rule("train/loss", None, "steps without an improvement", Plateau, on=False, least=1),
    "grad_norm": Rule(
        "train/grad_norm",
        10.0,
        "robust standard deviations of its logarithm",
        functools.partial(Spike, logarithmic=True),
    ),
    "memory": Rule("memory/peak_fraction", 0.95, "part of a device's memory", above),
    "host_memory": Rule("host/memory_fraction", 0.95, "part of a host's memory", above),
    "temperature": Rule("device/temperature", 90.0, "degrees Celsius", above),
    "throughput": Rule("time/.*_per_second", 0.6, "part of its median", Slow),
    "held_out": Rule("eval/(.*/)?loss", 0.01, "part above the best evaluation", Rising),
    "stall": Rule(None, 600.0, "seconds in which nothing has ended", None, least=1.0),
}


def conditions(rules: Mapping[str, Setting], name: str) -> list[tuple[str, Condition]]:
    """New conditions on a metric, with the names of their rules."""
    return [
        (rule, RULES[rule].make(name, setting.level))
        for rule, setting in rules.items()
        if RULES[rule].metric and re.fullmatch(RULES[rule].metric, name)
    ]


def standing(
    rules: Mapping[str, Setting], name: str, points: Sequence[tuple[int, float]]
) -> list[tuple[str, str]]:
    """Returns the rules that a metric breaks at the end of its ``(step, value)`` points, each with
    its sentence. Spikes do not last and are left out."""
    found = []
    for rule, condition in conditions(rules, name):
        if not isinstance(condition, Spike):
            text = [condition(step, value) for step, value in points][-1]
            found += [(rule, text)] if text else []
    return found


def parse(texts: Iterable[str]) -> dict[str, Setting]:
    """Reads what is asked for: RULE, RULE=LEVEL, RULE:ACTION+ACTION or RULE=LEVEL:ACTION.

    Each text changes one rule, or with the name ``all`` those that are on; action ``off`` turns it
    off. Returns the rules that are on, by name. Raises ValueError where there is no such rule,
    level or action.

    >>> found = parse(["all:off", "loss-spike=8:save", "plateau=2000:stop"])
    >>> [(name, each.level, each.actions) for name, each in found.items()]
    [('loss_spike', 8.0, ('warn', 'save')), ('plateau', 2000.0, ('warn', 'stop'))]
    """
    found = {name: Setting(rule.level) for name, rule in RULES.items() if rule.on}
    for text in texts:
        name, level, actions = _parts(text)
        for each in list(found) if name == "all" else [name]:
            if actions == ("off",):
                found.pop(each, None)
                continue
            rule = RULES[each]
            before = found.get(each, Setting(rule.level))
            now = Setting(before.level if level is None else level, actions or before.actions)
            if now.level is None:
                raise ValueError(f"alert {text!r} has no level: give {each}=N, in {rule.means}")
            if not (math.isfinite(now.level) and now.level > 0 and now.level >= rule.least):
                least = f"at least {rule.least:g}" if rule.least else "above 0"
                raise ValueError(f"alert {text!r}: the level is {rule.means}; give one {least}")
            found[each] = now
    return found


def _parts(text: str) -> tuple[str, float | None, tuple[str, ...]]:
    """The name, level and actions that a text has."""
    match = re.fullmatch(r"([^=:]+)(?:=([^:]*))?(?::(.*))?", text)
    name, level, actions = match.groups() if match else (text, None, None)
    name = name.replace("-", "_")
    if name != "all" and name not in RULES:
        raise ValueError(f"there is no alert {name!r}: give one of all, {', '.join(RULES)}")
    try:
        number = None if level is None else float(level)
    except ValueError:
        raise ValueError(f"alert {text!r}: the level {level!r} is no number") from None
    if number is not None and name == "all":
        raise ValueError(f"alert {text!r}: a level is of one rule; name that")
    if actions is None:
        return name, number, ()
    asked = actions.split("+")
    if asked == ["off"]:
        return name, number, ("off",)
    if unknown := [each for each in asked if each not in ACTIONS]:
        choice = f"off, or of {', '.join(ACTIONS)} one or several joined by '+'"
        raise ValueError(f"alert {text!r} has no action {unknown[0]!r}: give {choice}")
    return name, number, tuple(dict.fromkeys(("warn", *asked)))


def median_and_spread(values: Sequence[float] | Any) -> tuple[float, float]:
    """Returns the median, and the standard deviation that the deviations from it speak for.

    >>> median_and_spread([1.0, 2.0, 3.0, 4.0, 1000.0])
    (3.0, 1.4826)
    """
    centre = statistics.median(values)
    return centre, CONSISTENT * statistics.median(abs(x - centre) for x in values)
