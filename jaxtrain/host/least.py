"""Refuses options that are below what they must be at least."""

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
