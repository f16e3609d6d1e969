"""Early stopping: the end of a run whose held-out metric no longer improves."""

import math
from collections.abc import Mapping

from jaxtrain.host import distributed
from jaxtrain.host.exit_codes import DONE
from jaxtrain.run.context import Run
from jaxtrain.run.hook import Ending, Hook, Value
from jaxtrain.run.observe.report.records import read_run


class EarlyStopping(Hook):
    """Ends a run after ``early_stop_patience`` evaluations without an improvement of the
    experiment's ``best_metric`` by more than ``early_stop_min_change``; patience 0 never does.

    What it counts are the evaluations every ``eval_every`` steps. They are in the run's log, from
    which a resumed run takes them, so that it ends with the step that it would have ended with.
    Means are the same in all processes, so that all come to the same end without a word.
    """

    def __init__(self, run: Run):
        self.run = run
        self.patience = run.options.early_stop_patience
        self.latest, self.without = 0, 0
        self.best, self.best_step = math.nan, 0

    def recall(self, start: int) -> None:
        """Counts what the log holds of the steps up to ``start``; all processes call it alike."""
        if not self.patience or not start:
            return
        name = f"eval/{self.run.metadata.best_metric}"

        def read() -> list[list[float]]:
            series = read_run(self.run.owner.path, "").series.get(name)
            return [] if series is None else [series.steps.tolist(), series.values.tolist()]

        for step, value in zip(*distributed.from_first_process(read), strict=True):
            if step <= start:
                self._count(int(step), value)

    def on_evaluation(self, step: int, means: Mapping[str, Value]) -> None:
        """Counts the evaluation."""
        if self.patience:
            self._count(step, float(means[self.run.metadata.best_metric]))

    def ending(self, step: int) -> Ending | None:
        """Returns how the run ends after ``step`` if its evaluation exhausts the patience."""
        if not self.patience or self.latest != step or self.without < self.patience:
            return None
        change = self.run.options.early_stop_min_change
        by = f" by more than {change:g}" if change else ""
        found = f"did not improve on {self.best:#.4g} of step {self.best_step}{by}"
        found = found if self.best_step else "was not finite"
        times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
        reason = f"eval/{self.run.metadata.best_metric} {found} in {times}"
        return Ending(DONE, step, reason)

    def _counts(self, step: int) -> bool:
        return step > 0 and step % self.run.options.eval_every == 0

    def _count(self, step: int, value: float) -> None:
        if not self._counts(step):
            return
        if self.without >= self.patience:  # It was told to go on, and has its patience anew.
            self.without = 0
        sign = 1 if self.run.metadata.best_mode == "min" else -1
        change = self.run.options.early_stop_min_change
        # Written so that anything finite is better than none, which is NaN.
        if math.isfinite(value) and not sign * value >= sign * self.best - change:
            self.best, self.best_step, self.without = value, step, 0
        else:
            self.without += 1
        self.latest = step
