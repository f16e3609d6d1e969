"""Metrics of a classifier by groups of rows, the gaps between groups, and intervals of both.

Shapes: N rows, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.evaluate.intervals import interval

GAP = "gap"


def class_measures(
    labels_N: np.ndarray, guesses_N: np.ndarray, classes: int
) -> dict[str, np.ndarray]:
    """The precision, recall and F1 of each class [K], 0 where nothing is counted, and whether rows
    have it or are taken for it.

    >>> measures = class_measures(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1]), 2)
    >>> measures["recall"].tolist(), measures["precision"].tolist()
    ([0.75, 0.0], [1.0, 0.0])
    """
    sides = labels_N[labels_N == guesses_N], labels_N, guesses_N
    hits, right, said = (np.bincount(side, minlength=classes) for side in sides)
    return {
        "precision": hits / np.maximum(said, 1),
        "recall": hits / np.maximum(right, 1),
        "f1": 2 * hits / np.maximum(said + right, 1),
        "occurs": said + right > 0,
    }


def accuracy(labels_N: np.ndarray, guesses_N: np.ndarray) -> float:
    """The share of rows that are right; NaN of none."""
    return float((labels_N == guesses_N).mean()) if len(labels_N) else float("nan")


def macro_f1(labels_N: np.ndarray, guesses_N: np.ndarray) -> float:
    """The mean over classes of F1, of the classes that rows have or are taken for; NaN of no rows.

    >>> macro_f1(np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])).__round__(4)
    0.7333
    """
    if not len(labels_N):
        return float("nan")
    found = class_measures(labels_N, guesses_N, 1 + max(labels_N.max(), guesses_N.max()))
    return float(found["f1"][found["occurs"]].mean())


METRICS = {"accuracy": accuracy, "f1": macro_f1}


def by_group(
    labels_N: np.ndarray, guesses_N: np.ndarray, groups_N: np.ndarray, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns, by the name of a group, its ``rows``, and of ``accuracy`` and ``f1`` (the mean over
    classes) the value and the 95 % bootstrap interval, as (value, low, high); and under ``gap`` by
    how much the best group is better than the worst. A gap has rows drawn again within all groups
    at once, so that a group may be small by chance.

    Args:
      labels_N, guesses_N: the classes of rows, and what they are taken for.
      groups_N: the number of the group of each.
      names: of the groups.
    """
    present = [g for g in range(len(names)) if (groups_N == g).any()]
    found: dict[str, dict[str, Any]] = {}
    for g in present:
        mine = groups_N == g
        columns = labels_N[mine], guesses_N[mine]
        found[names[g]] = {"rows": int(mine.sum())} | {
            name: (metric(*columns), *interval(metric, *columns))
            for name, metric in METRICS.items()
        }

    def gap(metric: Any) -> Any:
        def of(labels_N: np.ndarray, guesses_N: np.ndarray, groups_N: np.ndarray) -> float:
            masks = [groups_N == g for g in present]
            scores = [metric(labels_N[mine], guesses_N[mine]) for mine in masks]
            return float(np.nanmax(scores) - np.nanmin(scores))

        return of

    columns = labels_N, guesses_N, groups_N
    found[GAP] = {"rows": len(labels_N)} | {
        name: (gap(metric)(*columns), *interval(gap(metric), *columns))
        for name, metric in METRICS.items()
    }
    return found


def table_lines(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the metrics as lines of text."""
    lines = [f"  {'group':20} {'rows':>7}  {'accuracy (95 %)':24}  {'F1 (95 %)':24}".rstrip()]
    for name, each in found.items():
        cells = ("{:6.1%} ({:.1%} to {:.1%})".format(*each[metric]).ljust(24) for metric in METRICS)
        lines.append(f"  {name[:20]:20} {each['rows']:7,}  {'  '.join(cells)}".rstrip())
    return lines
