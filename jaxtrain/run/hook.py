"""The interface of hooks: code that runs around the steps of a run.

:mod:`jaxtrain.run.hooks` and :mod:`jaxtrain.run.survive` hold the hooks that every run has;
:func:`jaxtrain.fit` takes more of them.

>>> class Budget(Hook):
...     def stops(self, step):
...         return "the budget is spent" if step >= 100 else False
>>> Budget().stops(7), Budget().stops(100)
(False, 'the budget is spent')
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.state import TrainState

# A metric on the host.
Value = float | np.ndarray


def as_value(metric: Any) -> Value:
    """Brings a metric to a number, or to an array where it has axes."""
    return np.asarray(metric) if np.ndim(metric) else float(metric)


class Hook:
    """Callbacks around the steps of a run. A subclass overrides the methods that it needs.

    If a call of the train step runs several steps, a state exists after the last of them only.
    """

    _log_of_run: Any = None

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows pictures and texts, for a hook's own methods to call.

        TensorBoard has all of them, and the report has the newest picture of each name. Outside of
        :func:`jaxtrain.fit` nothing happens.

        Args:
          step: the step that they are of.
          values: by name, uint8 pixels [height, width, 3], or a text.
        """
        if self._log_of_run is not None:
            self._log_of_run.show(step, values)

    def on_start(self, step: int, state: TrainState) -> None:
        """Called by :func:`jaxtrain.fit` before its first step, with the number of steps made."""

    def on_step(self, step: int, state: TrainState) -> None:
        """Called when the call that ends with step number ``step`` is dispatched; reading ``state``
        waits for it."""

    def on_metrics(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Called with the metrics of ``step``, of every step in order, when the call after its own
        has been dispatched."""

    def on_evaluation(self, step: int, means: Mapping[str, Value]) -> None:
        """Called by :func:`jaxtrain.fit` with the held-out means of ``step``, before the
        ``on_step`` of that step."""

    def stops(self, step: int) -> bool | str:
        """Returns whether the loop ends with ``step``, or why it does; asked after every hook's
        ``on_step``.

        :func:`jaxtrain.fit` takes the answer for an end on purpose. Where one of several processes
        gives it, all agree on a step to end with; without ``RunOptions.watch_peers``, and in
        :func:`jaxtrain.train_loop`, they must answer alike.
        """
        del step
        return False


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a run before its last step, the same in all processes.

    Args:
      code: exit code: DONE after a stop on purpose, ALERTED if an alert stopped it, PREEMPTED, or
        DIVERGED.
      step: the step after which it ends; for DIVERGED the last one that was skipped.
      reason: why it was stopped on purpose.
    """

    code: int
    step: int
    reason: str | None = None
