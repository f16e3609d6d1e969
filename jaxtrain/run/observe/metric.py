"""The name of a logged metric, taken apart into the group that it is filed under and the rest.

Only the group says what a metric is of, so that none of the user's own, which are in ``train`` or
``eval``, is taken for one of the machine's, however it is called.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

MACHINE = ("host", "device")


def defined(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the metrics of a line without training means that do not exist.

    A step in which no token counts has weight 0. Its means are NaN, though nothing has diverged. A
    step that was left out has weight 0 too, but its NaN tells of a fault and remains.

    >>> defined({"train/loss": float("nan"), "train/weight": 0.0, "train/skipped": 0})
    {'train/weight': 0.0, 'train/skipped': 0}
    """
    if values.get("train/weight") != 0 or values.get("train/skipped"):
        return values
    return {k: x for k, x in values.items() if not (k.startswith("train/") and _is_nan(x))}


def _is_nan(value: Any) -> bool:
    try:  # In a log that was read, NaN is a text.
        return bool(np.size(value) and np.isnan(np.asarray(value, np.float64)).all())
    except (TypeError, ValueError):
        return False


class Metric(NamedTuple):
    """A metric's group, such as ``train``, and its name in it.

    >>> Metric.of("time/tokens_per_second").item, Metric.of("train/tokens_per_second").item
    ('tokens', None)
    >>> Metric.of("eval/code/loss").is_held_out_loss
    True
    """

    group: str
    name: str

    @classmethod
    def of(cls, logged: str) -> "Metric":
        """Takes a name apart as logs have it."""
        group, _, name = logged.partition("/")
        return cls(group, name)

    @property
    def is_held_out_loss(self) -> bool:
        """Whether it is the loss of an evaluation set."""
        return self.group == "eval" and self.name.split("/")[-1] == "loss"

    @property
    def item(self) -> str | None:
        """The name of what a throughput counts; None for what is no throughput."""
        counts = self.group == "time" and self.name.endswith("_per_second")
        return self.name.removesuffix("_per_second") if counts else None

    @property
    def is_process(self) -> bool:
        """Whether it numbers the process that a measurement is of."""
        return self.group in (*MACHINE, "time") and self.name.endswith("_process")

    @property
    def is_bytes(self) -> bool:
        """Whether it is a size in memory, or what was moved."""
        moved = self.name.startswith(("disk_", "network_")) or self.name.endswith("_memory")
        return self.group == "memory" or (self.group in MACHINE and moved)
