"""Counts the steps in a row that changed nothing, and ends a run that has too many."""

from collections.abc import Mapping

from jaxtrain.host.exit_codes import DIVERGED
from jaxtrain.run.hook import Ending, Hook, Value


class ConsecutiveSkips(Hook):
    """Counts skipped steps in a row; at ``limit`` of them (0: never), ``ending`` is that of the
    run."""

    def __init__(self, limit: int):
        self._limit = limit
        self.count = 0
        self.ending: Ending | None = None

    def on_metrics(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Counts the step."""
        nothing = metrics.get("skipped", 0) > 0 or metrics.get("spike", 0) > 0
        self.count = self.count + 1 if nothing else 0
        if self._limit and self.count >= self._limit and self.ending is None:
            self.ending = Ending(DIVERGED, step)
