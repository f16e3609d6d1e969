"""Options that were given, and those that are below what they must be at least."""

import dataclasses
from typing import Any


def check_least(options: Any, **least: float) -> None:
    """Raises where a field is below its least value; None, which is left out, passes.

    >>> import types
    >>> check_least(types.SimpleNamespace(rows=0, steps=None), rows=1, steps=1)
    Traceback (most recent call last):
    ValueError: `rows` is 0: give at least 1
    """
    for name, low in least.items():
        # Written so that NaN is refused too.
        if (value := getattr(options, name)) is not None and not value >= low:
            raise ValueError(f"`{name}` is {value}: give at least {low}")


def given(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults, in order.

    >>> Options = dataclasses.make_dataclass("Options", [("rows", int, 1), ("steps", int, 2)])
    >>> given(Options(steps=3))
    {'steps': 3}
    """
    fields = dataclasses.fields(options)
    return {f.name: x for f in fields if (x := getattr(options, f.name)) != f.default}
