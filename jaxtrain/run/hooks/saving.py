"""When a run saves, and what a save that fails does to it."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain import optim
from jaxtrain.host import storage
from jaxtrain.host.memory import human_bytes
from jaxtrain.host.storage import StorageError
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, SaveError
from jaxtrain.run.context import Run
from jaxtrain.run.folder import WATERMARKS
from jaxtrain.run.hook import Hook
from jaxtrain.run.observe.journal import CHECKPOINT, SAVE_FAILED
from jaxtrain.run.receipts import Receipts
from jaxtrain.state import TrainState

# With several processes, steps at least between two looks at the clock, for the first one tells the
# others.
CLOCK_EVERY = 10
# After so long a save that failed is made again, and one that has begun is asked how it ended.
SETTLE_SECONDS = 60.0
# How long the last save is tried: where the run is complete, and where the host may be taken away
# half a minute after it said so.
LAST_SAVE_SECONDS, STOPPED_SAVE_SECONDS, LAST_PAUSE_SECONDS = 300.0, 20.0, 2.0
# After so many failures in a row of a kind that does not pass, a run ends.
LASTING_TRIES = 3
# Between two looks at how much of a save has been written.
LOOK_SECONDS = 5.0


def save(run: Run, checkpoints: Checkpointer, step: int, state: TrainState, **given: Any) -> bool:
    """Starts saving a run's state as a checkpoint; see :meth:`Checkpointer.save`."""
    frozen = () if run.options.save_frozen else optim.frozen_of(state)
    config, marks = run.metadata.config, run.data.watermarks
    if marks is not None:
        config = {**config, WATERMARKS: marks.before(step)}
    left_out = [f"params/{name}" for name in frozen]
    state = run.stack.in_order(state)
    return checkpoints.save(step, state, config=config, leave_out=left_out, **given)


class Saving(Hook):
    """Saves by steps, by minutes, on the best evaluation and on alerts, with the means of the step.

    A checkpoint that cannot be written is said, once for a time of failures, and made again a
    minute later. Where the cause is none that passes (rights, a path), the third failure in a row
    ends the run. Each save that begins has a receipt, where there are any.
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpointer,
        receipts: Receipts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run, self.checkpoints, self.clock = run, checkpoints, clock
        self.receipts = receipts
        self.evaluated: tuple[int, Mapping[str, float]] = (-1, {})
        self.saved_at = clock()
        self.writing: tuple[int, float] | None = None
        self.looks_at = 0
        self.begun = self.failing = False
        self.lasting = 0  # failures in a row that do not pass
        rules = run.options.alert_rules.values()
        self.may_be_wanted = any("save" in rule.actions for rule in rules)
        # As many of the best values as are kept, the best first; smaller is better.
        self.best, self.best_at = [], -1
        self.sign = 1 if run.metadata.best_mode == "min" else -1
        name = f"eval/{run.metadata.best_metric}"
        if run.options.saves_best:
            steps = checkpoints.best_steps()[: run.options.keep_best]
            self.best = [self.sign * checkpoints.metrics(step)[name] for step in steps]

    def on_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        self.evaluated = (step, means)
        value = self.sign * means[self.run.metadata.best_metric]
        best = sorted([*self.best, value])[: self.run.options.keep_best]
        # Step 0 is not saved.
        if step and math.isfinite(value) and best != self.best:
            self.best, self.best_at = best, step

    def on_step(self, step: int, state: TrainState) -> None:
        self._tell()
        every = self.run.options.save_every
        by_step = bool(every) and step % every == 0
        by_best = self.run.options.saves_best and self.best_at == step
        by_time = self._is_time(step)  # asked at every step: it may speak to other processes
        if step != self.run.steps and (by_step or by_best or by_time):
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing ``state``; returns when its buffers have been copied."""
        with self.run.journal.ledger.phase("save"):
            # What the save before could not do is known now, and no reason to leave out this one.
            settled = self._settle()
            self.saved_at = self.clock()
            self.run.alerts.wanted.discard("save")
            self.begun = self._succeeds(lambda: self._start(step, state))
        if settled and self.begun and self.failing:
            self.failing = False
            self.run.progress.note(f"step {step}: checkpoints are written again")

    def finish(self, step: int, state: TrainState, *, seconds: float) -> None:
        """Writes the last state and waits for it, trying again for some seconds; for as long as a
        host that is taken away has, once a signal has come. Raises StorageError where it could not
        be written, and ValueError where it never could be."""
        self._settle()
        until = math.inf

        def save() -> None:
            self._start(step, state)  # does nothing where that has been done well
            self.checkpoints.wait()

        def passing(error: BaseException) -> bool:
            nonlocal until
            if self.run.peers.stop_wanted:
                until = min(until, storage.now() + STOPPED_SAVE_SECONDS)
            wanted = isinstance(error, StorageError) and self._counted(error)
            return wanted and storage.now() < until

        with self._making_progress():
            storage.retrying(
                save,
                "the last checkpoint",
                passing=passing,
                seconds=seconds,
                # Short pauses: a signal is noticed between them.
                sleep=lambda pause: storage.pause(min(pause, LAST_PAUSE_SECONDS)),
            )
        self._tell()

    def _settle(self) -> bool:
        """Waits for the save that has begun; whether it, if any, succeeded."""
        self.begun = False
        with self._making_progress():
            settled = self._succeeds(self.checkpoints.wait)
        self._tell()
        return settled

    def _succeeds(self, attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except StorageError as error:
            self._counted(error)
            self.run.journal.event(SAVE_FAILED, error=str(error))
            if not self.failing:
                self.run.progress.note(
                    f"warning: {error}; the run goes on without it, and tries again every minute"
                )
            self.failing = True
            return False
        return True

    def _counted(self, error: StorageError) -> bool:
        """Counts a failed save; true, for there will be another try, or else a ValueError."""
        self.lasting = self.lasting + 1 if isinstance(error, SaveError) and error.lasts else 0
        if self.lasting >= LASTING_TRIES:
            raise ValueError(
                f"{error}: no checkpoint can be written so, and a run without any is lost where it "
                "is interrupted; make the folder writable, or give another `run_dir`"
            ) from error
        return True

    @contextlib.contextmanager
    def _making_progress(self) -> Iterator[None]:
        """Tells the watchdog that the process is alive as long as a save goes on writing."""
        ended = threading.Event()

        def look() -> None:
            seen = None
            while not ended.wait(LOOK_SECONDS):
                if (written := self.checkpoints.written()) != seen:
                    self.run.watchdog.beat("while a checkpoint is being written")
                seen = written

        threading.Thread(target=look, name="jaxtrain-save-progress", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _tell(self) -> None:
        """Says that a checkpoint is there, once; one that failed is told by the next save."""
        if self.writing is None:
            return
        step, since = self.writing
        saved = self.checkpoints.is_saved(step)
        if saved:
            self.lasting = 0
            seconds, size = self.clock() - since, self.checkpoints.size(step)
            told = {"step": step, "seconds": round(seconds, 3), "bytes": size}
            self.run.journal.event(CHECKPOINT, **told)
            self.run.progress.note(
                f"checkpoint {step} saved within {seconds:.1f} s, {human_bytes(size)}"
            )
        if saved is not None:
            self.writing = None

    def _start(self, step: int, state: TrainState) -> None:
        self.run.owner.check()
        evaluated, means = self.evaluated
        metrics = {f"eval/{name}": x for name, x in means.items() if not np.ndim(x)}
        since, metrics = self.clock(), metrics if evaluated == step else None
        if save(self.run, self.checkpoints, step, state, metrics=metrics):
            self.writing = (step, since)
            if self.receipts is not None:
                self.receipts.saved(step, state)
        elif metrics:  # A signal may have interrupted the evaluation of this checkpoint.
            self.checkpoints.add_metrics(step, metrics)

    def _is_time(self, step: int) -> bool:
        """Whether the clock asks for a save; now and then sees how the one before has ended."""
        minutes = self.run.options.save_minutes
        if not (minutes or self.begun or self.failing or self.may_be_wanted):
            return False
        seconds = self.clock() - self.saved_at
        late = seconds >= SETTLE_SECONDS
        # Alerts are of the first process, which tells the others.
        wanted = self.may_be_wanted and "save" in self.run.alerts.wanted
        due = wanted or (bool(minutes) and seconds >= 60 * minutes)
        ended = self.begun and late and not self.checkpoints.is_saving()
        if jax.process_count() > 1:
            if step < self.looks_at:
                return False
            self.looks_at = step + CLOCK_EVERY
            flags = multihost_utils.broadcast_one_to_all(np.array([due, late, ended]))
            due, late, ended = (bool(flag) for flag in flags)
        if ended:
            self._settle()
        return due or (late and self.failing)
