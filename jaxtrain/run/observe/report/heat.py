"""Heat maps of the norms that an optimizer watches: layers down, steps across."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.optim.watching import NORMS, RATIO
from jaxtrain.run.observe.report.records import Record, Series

# What is drawn, by the metric's name.
MAPS = {"train/grad_norm": "Gradient norm", f"train/{RATIO}": "Update / weight"}
# Cells on a page in all, of some 5 bytes each; and rows and columns of a map.
CELLS, ROWS, COLUMNS = 60_000, 256, 160
# Stand for values without a logarithm.
ZERO, NOT_FINITE = -9999, 9999


def of_one_layer(name: str) -> bool:
    """Whether a metric is a norm of one parameter or stack, as :func:`maps` draws them."""
    return name.startswith(tuple(f"train/{kind}/" for kind in (*NORMS, RATIO)))


def maps(record: Record, *, runs: int) -> list[dict[str, Any]]:
    """Returns the maps of a run, one of so many on a page; none where it has watched nothing.

    A map has ``title``; ``rows``, pairs of a name and the number of its layers (0 for a parameter
    outside of stacks); ``left_out``, how many rows more there are; ``x``, the last step of each
    column; and ``cells``, row by row, the largest value in each as ``100 log10`` in whole numbers,
    so that no spike is lost: ``ZERO`` where all were 0, ``NOT_FINITE`` where one was not, None
    where none was logged.
    """
    drawn = []
    for kind, title in MAPS.items():
        named = record.vectors | record.series
        series = {
            n.removeprefix(f"{kind}/"): s for n, s in named.items() if n.startswith(f"{kind}/")
        }
        if not series:
            continue
        rows = [
            (name, s.values.shape[1] if s.values.ndim == 2 else 0) for name, s in series.items()
        ]
        total = sum(layers or 1 for _, layers in rows)
        columns = CELLS // (len(MAPS) * runs * min(total, ROWS))
        x, cells = _cells(list(series.values()), min(COLUMNS, max(1, columns)))
        drawn.append(
            {
                "title": title,
                "rows": rows,
                "left_out": max(0, total - ROWS),
                "x": x.tolist(),
                "cells": [_levels(row) for row in cells[:ROWS]],
            }
        )
    return drawn


def _cells(series: Sequence[Series], columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The last step of each column, and the largest values [rows, columns]; -1 for none."""
    steps = np.unique(np.concatenate([each.steps for each in series]))
    if steps.size > columns:
        width = (steps[-1] - steps[0] + 1) / columns
        column = ((steps - steps[0]) / width).astype(int)
        steps = steps[np.flatnonzero(np.diff(column, append=-1))]
    rows = []
    for each in series:
        values = each.values.reshape(len(each.steps), -1)
        column = np.searchsorted(steps, each.steps)
        first = np.flatnonzero(np.diff(column, prepend=-1))
        row = np.full((steps.size, values.shape[1]), -1.0)
        row[column[first]] = np.maximum.reduceat(values, first)
        rows.append(row.T)
    return steps, np.concatenate(rows)


def _levels(row: np.ndarray) -> list[int | None]:
    def level(value: float) -> int | None:
        if not np.isfinite(value):
            return NOT_FINITE
        if value <= 0:
            return ZERO if value == 0 else None
        return round(100 * float(np.log10(value)))

    return [level(value) for value in row.tolist()]
