"""The loop, and the run around it: state, compiled step, checkpoints, logs, evaluation.

:func:`train_loop` is the bare loop for people with a program of their own. :func:`fit` takes an
:class:`~jaxtrain.experiment.Experiment` and does what a run needs around that loop.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import (
    Experiment,
    call_end,
    compile_eval,
    compile_loop,
    evaluate,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    restore_state,
    to_checkpoint,
)
from jaxtrain.host import distributed, memory, storage
from jaxtrain.host.paths import check_shared
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.planning.comparison import compare_with_run
from jaxtrain.run import provenance
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, SaveError
from jaxtrain.run.folder import Ownership, claim_run_dir, find_run_dir, has_checkpoint, write_text
from jaxtrain.run.observe import terminal, throughput
from jaxtrain.run.observe.summary import header_facts, print_conclusion
from jaxtrain.run.observe.writers import Writer, make_writers
from jaxtrain.run.survive.accidents import ConsecutiveSkips, diagnose
from jaxtrain.run.survive.lifeline import Lifeline, open_lifeline
from jaxtrain.run.survive.pace import Pace
from jaxtrain.run.survive.preemption import Preempted, Preemption, ending_at_sigterm
from jaxtrain.run.survive.watchdog import Watchdog
from jaxtrain.state import TrainState

PyTree = Any


class Hook:
    """What may happen around a step. A subclass overrides what it needs.

    Where a call of the train step runs several steps, there is a state after the last of them only.
    """

    def on_step(self, step: int, state: TrainState) -> None:
        """Called when the call that ends with step number ``step`` is dispatched; reading ``state``
        waits for it."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of ``step``, of every step in order, when the call after its own
        has been dispatched."""

    def stops(self, step: int) -> bool:
        """Whether the loop ends with ``step``; asked after every hook's ``on_step``.

        All processes of a run must answer alike.
        """
        del step
        return False


def train_loop(
    train: Callable[[TrainState, PyTree], tuple[TrainState, Mapping[str, jax.Array]]],
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int,
    steps_per_call: int = 1,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Runs ``train`` until ``steps`` steps are done, counted from the state's own step, or a hook
    stops it.

    Call n is dispatched before the metrics of call n-1 are read, so that the devices never wait for
    the host, and the host is never more than one call ahead.

    Args:
      train: a compiled train step; with ``steps_per_call`` above 1, one that takes a list of
        batches and returns metrics with a leading axis (:func:`jaxtrain.scan_steps`).
      state: the state to start from; donated.
      batches: the batches of the remaining steps, in order.
      steps: the step to stop at.
      steps_per_call: steps in one call of ``train``. Calls end at its multiples and at ``steps``,
        so the first and the last of them may be shorter.
      hooks: called in order, around every step.

    Returns:
      The last state.

    Raises:
      ValueError: where the batches end before ``steps``, when the hooks have had all metrics; and
        for a metric that is no scalar.
    """
    pending: tuple[range, Mapping[str, jax.Array]] | None = None

    def read() -> None:
        if pending is None:
            return
        numbers, metrics = pending
        metrics = jax.device_get(metrics)
        for i, number in enumerate(numbers):
            values = {
                name: _number(name, value if steps_per_call == 1 else value[i])
                for name, value in metrics.items()
            }
            for hook in hooks:
                hook.on_metrics(number, values)

    done, batches = int(state.step), iter(batches)
    while done < steps:
        numbers = range(done + 1, call_end(done, steps, steps_per_call) + 1)
        given = list(itertools.islice(batches, len(numbers)))
        if len(given) < len(numbers):
            read()
            raise ValueError(
                f"the batches ended after {done + len(given)} steps and steps is {steps}: give a "
                "batch for every step, or fewer steps"
            )
        state, metrics = train(state, given[0] if steps_per_call == 1 else given)
        read()
        pending = (numbers, metrics)
        done = numbers[-1]
        for hook in hooks:
            hook.on_step(done, state)
        if any([hook.stops(done) for hook in hooks]):
            break
    read()
    return state


def _number(name: str, value: Any) -> float:
    if np.size(value) != 1:
        raise ValueError(
            f"metric {name!r} has shape {np.shape(value)}: hooks and logs take scalars, so report "
            "each entry under a name of its own"
        )
    return float(np.reshape(value, ()))


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where a run lives and how often it reports.

    Args:
      run_dir: Its folder (local, or a bucket such as gs://...); left out, the next free number
        under runs/.
      resume: Continue the run in run_dir; left out, the newest under runs/.
      auto_resume: Resume where run_dir holds a checkpoint, and begin where it holds none yet: one
        command for a run that is started again and again.
      overwrite: Delete the run in run_dir first; files that no run writes stay.
      accept_changes: Resume although these flags, or what else is named, are not as they were: the
        steps to come are then those of another run. "all" accepts everything.
      log_every: Steps between lines in the logs.
      eval_every: Steps between evaluations; 0 evaluates only at the end.
      save_every: Steps between checkpoints; 0 for none but the one at the end.
      save_minutes: Minutes between checkpoints, besides those; 0 for none.
      save_best: Save after every evaluation that is the best so far.
      keep: Newest checkpoints to keep; the best one is kept as well.
      handle_signals: Save and exit with code 75 on SIGTERM and SIGINT; a second one stops at once.
      watch_peers: Of several processes, end all where one has died, and stop all at the same step.
      hang_minutes: Exit with code 76 and print all stacks where no step (with --steps-per-call, no
        call) ends for so long; 0 never.
      max_consecutive_skips: Stop where so many steps in a row were not finite or spikes; 0 never.
    """

    run_dir: str | None = None
    resume: bool = False
    auto_resume: bool = False
    overwrite: bool = False
    accept_changes: tuple[str, ...] = ()
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    save_minutes: float = 0.0
    save_best: bool = False
    keep: int = 3
    handle_signals: bool = True
    watch_peers: bool = True
    hang_minutes: float = 30.0
    max_consecutive_skips: int = 20

    def __post_init__(self) -> None:
        least = {"log_every": 1, "eval_every": 0, "save_every": 0, "save_minutes": 0, "keep": 1}
        for name, low in least.items():
            # Written so that NaN is refused too.
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {low}")


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What a run leaves: the last state, its evaluation, and the folder with everything else."""

    state: TrainState
    evaluation: dict[str, float]
    run_dir: str


def fit(experiment: Experiment, options: RunOptions | None = None) -> FitResult:
    """Trains an experiment, with a header, a progress line, logs, checkpoints and evaluation.

    Args:
      experiment: what to train.
      options: where, and how often to report.

    Raises:
      ValueError: for a mesh, batch or checkpoint that does not fit, and a run to resume that had
        other flags or data, before anything is compiled.
      FileExistsError: where ``run_dir`` holds another run, or something else.
      Superseded: another start has taken over the run's folder; uncaught, it is the exit code.
      FileNotFoundError: where there is nothing to resume.
      Preempted: after a signal, with the state saved; uncaught, it is the process's exit code.
      Diverged: after too many skipped steps in a row, with the state saved.
      StorageError: a disk or bucket went on failing; the same command may go on later.

    A lost process and a hang end the process from another thread, with the codes of
    :mod:`jaxtrain.host.exit_codes`.
    """
    options = options or RunOptions()
    _check_calls(experiment.steps_per_call, options)
    # A process that stopped without the others would leave them waiting.
    handle_signals = options.handle_signals and (options.watch_peers or jax.process_count() == 1)
    with contextlib.ExitStack() as stack:
        # Before anything that takes long, as what comes before the loop does for a large model.
        stack.enter_context(ending_at_sigterm(handle_signals=handle_signals))
        peers = stack.enter_context(open_lifeline(connect=options.watch_peers))
        mesh = make_experiment_mesh(experiment)
        abstract = make_abstract_state(experiment, mesh)
        record = json.loads(json.dumps(provenance.make_record(experiment, mesh)))
        experiment = dataclasses.replace(experiment, config=record)
        skips = _Skips(options.max_consecutive_skips)
        watchdog = Watchdog(60 * options.hang_minutes, process=jax.process_index())
        run_dir, resume = find_run_dir(
            experiment.name,
            options.run_dir,
            resume=options.resume,
            auto_resume=options.auto_resume,
            overwrite=options.overwrite,
        )
        claim = functools.partial(
            claim_run_dir,
            run_dir,
            name=experiment.name if options.run_dir is None else None,
            resumes=resume,
            overwrite=options.overwrite,
            files=experiment.files,
        )
        checkpoints = _open_checkpoints(experiment, options, run_dir)
        changes = _changes(experiment, checkpoints, run_dir, options) if resume else []
        # Before it is read: an earlier attempt that still runs must not save in between.
        owner = claim() if resume else None
        if resume and has_checkpoint(run_dir / "checkpoints"):
            state = restore_state(experiment, abstract, checkpoints.restore)
        else:
            state = make_state(experiment, mesh)
        start = int(state.step)
        train, programs = compile_loop(experiment, state, mesh, start, experiment.steps)
        # Only now: whatever has been refused so far has left an older run alone.
        owner = owner or claim()
        if owner.path != run_dir:  # Another start has taken the number that was free.
            run_dir = owner.path
            checkpoints = _open_checkpoints(experiment, options, run_dir)
        stack.enter_context(checkpoints)
        terminal.print_header(
            f"jaxtrain: {experiment.name}", header_facts(experiment, mesh, state, programs)
        )
        texts = {provenance.CONFIG: json.dumps(experiment.config, indent=2) + "\n"}
        for name, text in (texts | dict(experiment.files)).items():
            if not (resume and (run_dir / name).exists()):
                write_text(run_dir / name, text)
        check_shared(run_dir / provenance.CONFIG)
        provenance.note_changes(run_dir, changes, experiment.config, from_step=start)

        log = stack.enter_context(
            contextlib.closing(
                _OwnLog(make_writers(run_dir, resume_step=start if resume else None), owner, peers)
            )
        )
        progress = stack.enter_context(
            terminal.Progress(experiment.steps, start=start, item=experiment.item)
        )
        watchdog.run_dir = run_dir
        stack.enter_context(watchdog)
        stack.enter_context(storage.restartable())
        preemption = stack.enter_context(_Preemption(peers, handle_signals=handle_signals))
        rate = throughput.Throughput(experiment.items_per_step)
        pace = Pace(peers)
        logging = _Logging(experiment, mesh, log, progress, rate, pace, options.log_every)
        evaluation = _Evaluation(
            experiment, mesh, log, progress, rate, watchdog, peers, options.eval_every
        )
        saving = _Saving(experiment, checkpoints, evaluation, options, owner=owner)
        if start < experiment.steps:
            batches = stack.enter_context(experiment.train_batches(start, batch_sharding(mesh)))
            hooks = (_Alive(watchdog), logging, evaluation, saving, skips, preemption)
            state = train_loop(
                train,
                state,
                pace.timed(batches),
                steps=experiment.steps,
                steps_per_call=experiment.steps_per_call,
                hooks=hooks,
            )
        last = int(state.step)
        stopped = last < experiment.steps or skips.too_many_at is not None
        means: dict[str, float] = {}
        if not stopped:
            try:
                means = evaluation.at(last, state, after=last)
            except _Interrupted:
                stopped = True
        peers.reached(last + 1)  # and will ask no more
        saving.finish(last, state, seconds=STOPPED_SAVE_SECONDS if stopped else LAST_SAVE_SECONDS)
        if stopped:
            if skips.too_many_at is not None:
                raise diagnose(
                    experiment,
                    mesh,
                    state,
                    step=skips.too_many_at,
                    skips=options.max_consecutive_skips,
                    run_dir=str(run_dir),
                )
            end = Preempted(last, str(run_dir))
            progress.note(str(end))
            raise end
    if lines := compare_with_run(programs, mesh, experiment, rate.seconds_per_step):
        terminal.print_lines(lines)
    print_conclusion(experiment, state, means, str(run_dir))
    return FitResult(state, means, str(run_dir))


def _open_checkpoints(
    experiment: Experiment, options: RunOptions, run_dir: epath.Path
) -> Checkpointer:
    return Checkpointer(
        run_dir / "checkpoints",
        keep=options.keep,
        best_metric=f"eval/{experiment.best_metric}",
        best_mode=experiment.best_mode,
    )


def _changes(
    experiment: Experiment, checkpoints: Checkpointer, run_dir: epath.Path, options: RunOptions
) -> list[provenance.Change]:
    """What a resumed run has otherwise, printed.

    Raises:
      ValueError: it would not go on as the same run, and nobody has accepted that.
    """
    saved = has_checkpoint(run_dir / "checkpoints")

    text = distributed.from_first_process(lambda: json.dumps(provenance.read_record(run_dir)))
    then = json.loads(text) or {}
    if not then and saved:
        then = checkpoints.config()  # of all processes together
    changes = provenance.compare(then, experiment.config, experiment.may_change)
    if saved:
        provenance.check(changes, options.accept_changes, run_dir=str(run_dir))
    else:
        changes = [dataclasses.replace(c, meaning="none was saved before") for c in changes]
    if changes:
        title = f"changed since {run_dir} was started last:"
        terminal.print_lines(provenance.table(changes, title=title))
    return changes


class _OwnLog:
    """The logs, while the folder is this start's own; then it asks for the end instead.

    Args:
      log: the logs.
      owner: of the folder that they lie in.
      peers: stop together, after which the last save finds the same.
    """

    # A bucket takes long enough to answer for the devices to wait.
    LOOK_SECONDS = 10.0

    def __init__(self, log: Writer, owner: Ownership, peers: Lifeline):
        self._log, self._owner, self._peers = log, owner, peers
        self._taken, self._looked_at = False, -math.inf

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._is_taken():
            self._log.write(step, values)

    def close(self) -> None:
        if not self._is_taken():  # In a bucket, closing writes.
            self._log.close()

    def _is_taken(self) -> bool:
        seconds = self.LOOK_SECONDS if "://" in str(self._owner.path) else 0.0
        if jax.process_index() == 0 and time.monotonic() - self._looked_at >= seconds:
            self._looked_at = time.monotonic()
            if not self._taken and self._owner.taken_by() is not None:
                self._taken = True
                self._peers.want_stop()
        return self._taken


def _check_calls(steps_per_call: int, options: RunOptions) -> None:
    for name in ("eval_every", "save_every"):
        every = getattr(options, name)
        if every % steps_per_call:
            raise ValueError(
                f"--{name.replace('_', '-')} is {every} and --steps-per-call {steps_per_call}: a "
                f"state is there between calls only, so give a multiple of {steps_per_call}"
            )


class _Alive(Hook):
    """Tells the watchdog of every call that is dispatched: that waits for the one before it."""

    def __init__(self, watchdog: Watchdog):
        self.watchdog = watchdog

    def on_step(self, step: int, state: TrainState) -> None:
        del state
        self.watchdog.beat(f"after the dispatch of step {step}")


class _Skips(ConsecutiveSkips, Hook):
    """Ends the loop where too many steps in a row were skipped."""

    def stops(self, step: int) -> bool:
        del step
        return self.too_many_at is not None


class _Preemption(Preemption, Hook):
    """Ends the loop where a signal asks for it."""


class _Logging(Hook):
    """Metrics to the logs every so many steps, and to the progress line at every step."""

    def __init__(self, experiment, mesh, log, progress, rate, pace: Pace, every: int):
        self.experiment, self.mesh, self.log, self.progress = experiment, mesh, log, progress
        self.throughput, self.pace, self.every = rate, pace, every
        self.timed_to = 0

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.timed_to:  # the first step of a call, all of whose metrics come at once
            end = call_end(step - 1, self.experiment.steps, self.experiment.steps_per_call)
            self.timed_to = end
            self.throughput.step(end - step + 1)
        self.progress.update(step, metrics["loss"], self.throughput.items_per_second)
        quiet = not metrics["skipped"] and not metrics.get("spike", 0)
        if step % self.every and step != self.experiment.steps and quiet:
            return
        values = {f"train/{name}": value for name, value in metrics.items()}
        seconds = self.throughput.seconds_per_step
        if seconds is not None:
            values["time/step_seconds"] = seconds
            values[f"time/{self.experiment.item}_per_second"] = self.throughput.items_per_second
            values |= self.pace.report(seconds)
            utilisation = self._mfu(seconds)
            if utilisation is not None:
                values["time/mfu"] = utilisation
        for name, value in memory.device_memory().items():
            values[f"memory/{name}"] = value
        self.log.write(step, values)

    def _mfu(self, seconds: float) -> float | None:
        if self.experiment.flops_per_step is None:
            return None
        return throughput.mfu(
            self.experiment.flops_per_step,
            seconds,
            self.mesh.devices.flat,
            dtype=self.experiment.policy.compute_dtype,
        )


class _Interrupted(Exception):
    """An evaluation was left unfinished, because the run is to stop."""


class _Evaluation(Hook):
    """Held-out means, every so many steps and when asked; compiled when first needed.

    Between batches it listens for a request to stop: all processes leave it before the same batch.
    """

    def __init__(
        self, experiment, mesh, log, progress, rate, watchdog: Watchdog, peers: Lifeline, every: int
    ):
        self.experiment, self.mesh, self.log, self.progress = experiment, mesh, log, progress
        self.throughput, self.watchdog, self.peers, self.every = rate, watchdog, peers, every
        self.latest: tuple[int, dict[str, float]] = (-1, {})
        self._step: CompiledStep | None = None

    def on_step(self, step: int, state: TrainState) -> None:
        if self.every and step % self.every == 0:
            with contextlib.suppress(_Interrupted):  # the loop is about to be stopped
                self.at(step, state, after=step - 1)

    def at(self, step: int, state: TrainState, *, after: int) -> dict[str, float]:
        """The means at ``step``, evaluated once.

        Args:
          step: the step.
          state: the state after it.
          after: the step after which this process was last asked where to stop.

        Raises:
          _Interrupted: the run is to stop.
        """
        if self.experiment.eval_batches is None or self.latest[0] == step:
            return self.latest[1]
        batches = self.experiment.eval_batches(batch_sharding(self.mesh))
        batches = self._watched(step, after, batches)
        if self._step is None:
            first, batches = _peek(batches)
            self._step = compile_eval(self.experiment, state, first, self.mesh)
        means = {name: float(x) for name, x in evaluate(self._step, state, batches).items()}
        self.latest = (step, means)
        self.log.write(step, {f"eval/{name}": value for name, value in means.items()})
        self.progress.note(f"step {step}: held-out loss {means['loss']:.4f}")
        self.throughput.pause()
        self.watchdog.beat(f"after the evaluation of step {step}")
        return means

    def _watched(self, step: int, after: int, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        # The last look comes before anybody waits for the result, which needs all processes.
        for number, batch in enumerate(itertools.chain(batches, [None])):
            self.watchdog.beat(f"in batch {number} of the evaluation after step {step}")
            # Batches count as parts of a step, so that this is between two steps for the others.
            position = after + (number + 1) / (number + 2)
            agreed = self.peers.stop_step(position)
            if agreed is not None and position >= agreed:
                self.progress.note(f"the evaluation after step {step} is left out: asked to stop")
                raise _Interrupted
            if batch is not None:
                yield batch


# With several processes, steps at least between two looks at the clock, for the first one tells the
# others.
CLOCK_EVERY = 10
# After so long a save that failed is made again, and one that has begun is asked how it ended.
SETTLE_SECONDS = 60.0
# How long the last save is tried: where the run is complete, and where the host may be taken away
# half a minute after it said so.
LAST_SAVE_SECONDS, STOPPED_SAVE_SECONDS = 300.0, 20.0
# Between two looks at how much of a save has been written.
LOOK_SECONDS = 5.0


class _Saving(Hook):
    """Checkpoints by steps, by minutes and on the best evaluation, with the means of their step.

    One that cannot be written is said, once for a time of failures, and made again a minute later.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpointer,
        evaluation: _Evaluation,
        options: RunOptions,
        clock: Callable[[], float] = time.monotonic,
        *,
        owner: Ownership | None = None,
    ):
        self.experiment, self.checkpoints, self.evaluation = experiment, checkpoints, evaluation
        self.owner = owner
        self.options, self.clock = options, clock
        self.saved_at = clock()
        self.writing: tuple[int, float] | None = None
        self.looks_at = 0
        self.begun = self.failing = False
        self.best = math.nan
        if options.save_best and (step := checkpoints.best_step()) is not None:
            self.best = checkpoints.metrics(step)[f"eval/{experiment.best_metric}"]

    def on_step(self, step: int, state: TrainState) -> None:
        self._tell()
        every = self.options.save_every
        by_step = bool(every) and step % every == 0
        # Both are asked at every step: one remembers the best, the other may speak to processes.
        by_best, by_time = self._is_best(step), self._is_time(step)
        if step != self.experiment.steps and (by_step or by_best or by_time):
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing ``state``; returns when its buffers have been copied."""
        # What the save before could not do is known now, and no reason to leave out this one.
        settled = self._settle()
        self.saved_at = self.clock()
        self.begun = self._succeeds(lambda: self._start(step, state))
        if settled and self.begun and self.failing:
            self.failing = False
            self.evaluation.progress.note(f"step {step}: checkpoints are written again")

    def finish(self, step: int, state: TrainState, *, seconds: float) -> None:
        """Writes the last state and waits for it, trying again for some seconds.

        Raises:
          StorageError: it could not be written.
        """
        self._settle()

        def save() -> None:
            self._start(step, state)  # does nothing where that has been done well
            self.checkpoints.wait()

        with self._making_progress():
            storage.retrying(
                save,
                "the last checkpoint",
                passing=lambda error: isinstance(error, SaveError),
                seconds=seconds,
            )
        self._tell()

    def _settle(self) -> bool:
        """Waits for the save that has begun; whether it, if any, succeeded."""
        self.begun = False
        with self._making_progress():
            return self._succeeds(self.checkpoints.wait)

    def _succeeds(self, attempt: Callable[[], None]) -> bool:
        try:
            attempt()
        except SaveError as error:
            if not self.failing:
                self.evaluation.progress.note(
                    f"warning: {error}; the run goes on without it, and tries again every minute"
                )
            self.failing = True
            return False
        return True

    @contextlib.contextmanager
    def _making_progress(self) -> Iterator[None]:
        """Tells the watchdog that the process is alive as long as a save goes on writing."""
        ended = threading.Event()

        def look() -> None:
            seen = None
            while not ended.wait(LOOK_SECONDS):
                if (written := self.checkpoints.written()) != seen:
                    self.evaluation.watchdog.beat("while a checkpoint is being written")
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
            seconds = self.clock() - since
            self.evaluation.progress.note(f"checkpoint {step} saved within {seconds:.1f} s")
        if saved is not None:
            self.writing = None

    def _start(self, step: int, state: TrainState) -> None:
        if self.owner is not None:
            self.owner.check()
        evaluated, means = self.evaluation.latest
        metrics = {f"eval/{name}": value for name, value in means.items()}
        since = self.clock()
        started = self.checkpoints.save(
            step,
            to_checkpoint(self.experiment, state),
            metrics=metrics if evaluated == step else None,
            config=self.experiment.config,
        )
        if started:
            self.writing = (step, since)

    def _is_best(self, step: int) -> bool:
        evaluated, means = self.evaluation.latest
        value = means.get(self.experiment.best_metric, math.nan)
        if not self.options.save_best or evaluated != step or not math.isfinite(value):
            return False
        sign = 1 if self.experiment.best_mode == "min" else -1
        if sign * value >= sign * self.best:  # False where there is none
            return False
        self.best = value
        return True

    def _is_time(self, step: int) -> bool:
        """Whether the clock asks for a save; now and then sees how the one before has ended."""
        minutes = self.options.save_minutes
        if not (minutes or self.begun or self.failing):
            return False
        seconds = self.clock() - self.saved_at
        late = seconds >= SETTLE_SECONDS
        due = bool(minutes) and seconds >= 60 * minutes
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


def _peek(batches: Iterable[PyTree]) -> tuple[PyTree, Iterator[PyTree]]:
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no held-out batch to evaluate on")
    return first, itertools.chain([first], batches)
