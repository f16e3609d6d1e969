"""Results of ``jaxtrain landscape`` around a run's checkpoints, as a page draws them."""

import json
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxtrain.host.paths import as_path
from jaxtrain.run.folder import LANDSCAPE
from jaxtrain.run.observe.report.records import significant

# Numbers of one chart; what has more is left to the file.
NUMBERS = 10_000


def found(run_dir: epath.PathLike) -> list[dict[str, Any]]:
    """Returns the charts of a run's landscapes; what is damaged or too large is left out.

    Each has a ``title``, the name ``by`` of its axis, the places ``x``, and the values ``y`` or, of
    a plane, rows of them as ``cells``. None stands for what is no number.
    """
    try:
        kept = json.loads((as_path(run_dir) / LANDSCAPE).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    charts = []
    for kind, draw in _KINDS.items():
        try:
            charts.append(draw(kept[kind]))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return charts


def _line(record: Mapping[str, Any]) -> dict[str, Any]:
    title = f"Held-out loss around checkpoint {int(record['step'])}"
    return _chart(title, "random direction", record["coordinates"], record["losses"])


def _plane(record: Mapping[str, Any]) -> dict[str, Any]:
    title = f"Held-out loss around checkpoint {int(record['step'])}, on a plane"
    x = _numbers(record["coordinates"])
    cells = [_numbers(row) for row in record["losses"]]
    if len(cells) != len(x) or any(len(row) != len(x) for row in cells) or len(x) ** 2 > NUMBERS:
        raise ValueError("it is no square, or a large one")
    return {"title": title, "by": "two random directions", "x": x, "cells": cells}


def _between(record: Mapping[str, Any]) -> dict[str, Any]:
    start, end = int(record["step"]), int(record["to"]["step"])
    title = f"Held-out loss from checkpoint {start} to {end}"
    barrier = record["barrier"]
    by = str(record["to"]["run"]) if barrier is None else f"barrier {float(barrier):.3g}"
    return _chart(title, by, record["coordinates"], record["losses"])


def _sharpness(record: Mapping[str, Any]) -> dict[str, Any]:
    steps, values = ([x[name] for x in record["checkpoints"]] for name in ("step", "value"))
    return _chart("Largest eigenvalue of the Hessian", "step", steps, values)


_KINDS = {"line": _line, "plane": _plane, "between": _between, "sharpness": _sharpness}


def _chart(title: str, by: str, x: list, y: list) -> dict[str, Any]:
    x, y = _numbers(x), _numbers(y)
    if len(x) != len(y) or len(x) > NUMBERS or None in x:
        raise ValueError("each place has a value")
    return {"title": title, "by": by, "x": x, "y": y}


def _numbers(values: list) -> list[float | int | None]:
    numbers = [None if x is None else float(x) for x in values]
    return [None if x is None or not math.isfinite(x) else significant(x) for x in numbers]
