"""The space of a study: which flags of an experiment vary, and between what.

It is a TOML file. A list holds values, a range its ends, and both are checked against the
experiment's own flags::

    "optimizer.learning-rate" = {low = 1e-4, high = 1e-1, log = true}
    "optimizer.name" = ["adamw", "muon"]
    layers = {low = 2, high = 8, step = 2}
"""

import dataclasses
import difflib
import itertools
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.host.paths import as_path
from jaxtrain.run.main import flag_word
from jaxtrain.run.provenance import OF_START
from jaxtrain.run.refusal import all_flags

Value = bool | int | float | str
RANGE = ("low", "high", "log", "step")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A flag that varies: over ``values``, or where there are none from ``low`` to ``high``."""

    flag: str
    values: tuple[Value, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None

    @property
    def is_integer(self) -> bool:
        """Whether it is a range of whole numbers."""
        return not self.values and isinstance(self.low, int)

    @property
    def grid(self) -> tuple[Value, ...]:
        """All its values. Raises ValueError where they cannot be counted."""
        if self.values:
            return self.values
        step = self.step or (1 if self.is_integer and not self.log else None)
        if step is None:
            raise ValueError(
                f"the space's {self.flag} is a range without steps, which a grid cannot go "
                "through: give a list of values, or a step"
            )
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        return tuple(self.low + i * step for i in range(count))

    def suggest(self, trial: Any) -> Value:
        """Returns the value of an Optuna trial, the one that it has or a new one."""
        if self.values:
            return trial.suggest_categorical(self.flag, self.values)
        pick = trial.suggest_int if self.is_integer else trial.suggest_float
        step = {} if self.step is None else {"step": self.step}
        return pick(self.flag, self.low, self.high, log=self.log, **step)


def read_space(path: str, module_name: str, config: Any, flags: Sequence[str]) -> list[Dimension]:
    """Reads the file of a space.

    Args:
      config: of the module; its type says which flags there are, and what they take.
      flags: what is typed beside it, which cannot vary too.

    Raises:
      ValueError: it is no TOML, varies nothing, or a flag that there is not; a value is not of the
        flag's type; ends of a range are in the wrong order.
    """
    try:
        table = tomllib.loads(as_path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the space {path} is no TOML: {error}") from None
    kinds = {flag: (name, kind) for _, name, kind, flag in all_flags(type(config))}
    typed = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in flags}
    space = []
    for name, told in _dimensions(table):
        flag = name.replace("_", "-")
        try:
            if flag in kinds and kinds[flag][0] in OF_START:
                raise ValueError(f"--{flag} is of a start of a run, and each trial is one run")
            if flag in typed:
                raise ValueError(f"--{flag} is typed too: give it once")
            _, kind = kinds.get(flag, (flag, str))
            dimension = _listed(flag, told) if isinstance(told, list) else _range(flag, told, kind)
            for value in dimension.values or (dimension.low, dimension.high):
                flag_word(module_name, config, flag, text_of(value))
        except ValueError as error:
            raise ValueError(f"the space {path}: {error}") from None
        space.append(dimension)
    if not space:
        raise ValueError(f"the space {path} varies nothing: write a flag and its values in it")
    return space


def text_of(value: Value) -> str:
    """Returns a value as a command line has it.

    >>> text_of(True), text_of(0.001), text_of("adamw")
    ('true', '0.001', 'adamw')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def grid(space: Sequence[Dimension]) -> list[dict[str, Value]]:
    """Returns all combinations of values, the last flag fastest."""
    names = [each.flag for each in space]
    combined = itertools.product(*(each.grid for each in space))
    return [dict(zip(names, values, strict=True)) for values in combined]


def _dimensions(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every flag and what is told of it; a table that holds no range is a group of flags."""
    for name, told in table.items():
        is_group = isinstance(told, dict) and not told.keys() & {"low", "high"}
        if is_group and told:
            yield from _dimensions(told, f"{prefix}{name}.")
        else:
            yield prefix + name, told


def _listed(flag: str, told: list) -> Dimension:
    if not told or len(set(map(text_of, told))) < len(told):
        raise ValueError(f"{flag} is {told}: give different values")
    if not all(isinstance(value, Value) for value in told):
        raise ValueError(f"{flag} is {told}: a value is a number, a text, true or false")
    return Dimension(flag, tuple(told))


def _range(flag: str, told: Any, kind: Any) -> Dimension:
    if not isinstance(told, dict):
        raise ValueError(f"{flag} is {told!r}: give a list, or a range {{low = 1, high = 8}}")
    if wrong := told.keys() - set(RANGE):
        near = difflib.get_close_matches(min(wrong), RANGE, n=1)
        meant = f": did you mean {near[0]}?" if near else f"; it may have {', '.join(RANGE)}"
        raise ValueError(f"the range of {flag} has {min(wrong)!r}{meant}")
    if missing := {"low", "high"} - told.keys():
        raise ValueError(f"the range of {flag} lacks {min(missing)}: give both ends")
    arms = typing.get_args(kind) or (kind,)
    number = float if float in arms else int if int in arms else None
    if number is None:
        raise ValueError(f"{flag} takes no numbers: give a list of its values")
    ends = [told[name] for name in ("low", "high", "step") if name in told]
    whole = (int,) if number is int else (int, float)
    if any(isinstance(end, bool) or not isinstance(end, whole) for end in ends):
        what = "a whole number" if number is int else "a number"
        raise ValueError(f"the range of {flag} is {told}: every end and step is {what}")
    found = Dimension(
        flag,
        low=number(told["low"]),
        high=number(told["high"]),
        log=bool(told.get("log", False)),
        step=None if told.get("step") is None else number(told["step"]),
    )
    if not found.low < found.high:
        raise ValueError(f"the range of {flag} is {found.low} to {found.high}: low is below high")
    if found.log and found.low <= 0:
        raise ValueError(f"the range of {flag} begins at {found.low}: with log it is above 0")
    if found.step is not None and (found.log or found.step <= 0):
        raise ValueError(f"the range of {flag} has step {found.step}: give one above 0, or log")
    return dataclasses.replace(found, high=found.grid[-1]) if found.step else found
