"""Bugs planted in small steps, and how many of them are named to the line.

``python -m experiments.planted`` prints a row for each bug of :mod:`.bugs`: the line that
:func:`jaxtrain.first_difference` names and why, and whether that is the line where the bug is. Then
it runs every step in its right form, of which nothing may be said. A laptop takes a minute.
"""

import dataclasses
import functools
import inspect
import math

import jax
from jax.sharding import AxisType

from experiments.planted.bugs import BUGS
from jaxtrain.compare.difference import Difference, first_difference


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of a bug: where the wrong step begins to differ, whether that is a line where
    the bug is, and what was said of the right step, if that was looked at."""

    mesh: str
    difference: Difference | None
    named: bool
    alarm: Difference | None = None


def look(name: str, *, right: bool = False) -> Row:
    """Looks for a bug; with ``right``, the step without it is looked at too."""
    bug = BUGS[name]
    sizes = tuple(bug.axes.values())
    auto, devices = (AxisType.Auto,) * len(sizes), jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, tuple(bug.axes), axis_types=auto, devices=devices)
    args = [x() if callable(x) else x for x in bug.args]
    difference, alarm = (
        first_difference(functools.partial(bug.step, wrong), *args, mesh=mesh)
        if wrong or right
        else None
        for wrong in (True, False)
    )
    source, first = inspect.getsourcelines(bug.function)
    lines = [first + i for i, line in enumerate(source) if line.endswith("# planted\n")]
    named = difference is not None and difference.line in lines
    shape = ",".join(f"{axis}={size}" for axis, size in bug.axes.items())
    return Row(shape, difference, named, alarm)
