"""The loop, and the run around it: state, compiled step, checkpoints, logs, evaluation.

:func:`train_loop` is the bare loop for people with a program of their own. :func:`fit` takes an
:class:`~jaxtrain.experiment.Experiment` and does what a run needs around that loop.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.calls import call_end, compile_loop
from jaxtrain.checkpoint import Checkpointer, SaveError
from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import (
    Experiment,
    compile_eval,
    evaluate,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    restore_state,
    to_checkpoint,
)
from jaxtrain.observe import memory, terminal, throughput
from jaxtrain.observe.summary import header_facts, print_conclusion
from jaxtrain.observe.writers import make_writers
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.plan.comparison import compare_with_run
from jaxtrain.run_dir import find_run_dir, has_checkpoint, prepare_run_dir, write_text
from jaxtrain.state import TrainState
from jaxtrain.survive.accidents import ConsecutiveSkips, diagnose
from jaxtrain.survive.lifeline import open_lifeline
from jaxtrain.survive.pace import Pace
from jaxtrain.survive.preemption import Preempted, Preemption, ending_at_sigterm
from jaxtrain.survive.watchdog import Watchdog

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
    batches: Iterator[PyTree],
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
    """
    pending: tuple[range, Mapping[str, jax.Array]] | None = None

    def read() -> None:
        if pending is None:
            return
        numbers, metrics = pending
        metrics = jax.device_get(metrics)
        for i, number in enumerate(numbers):
            values = {
                name: float(value if steps_per_call == 1 else value[i])
                for name, value in metrics.items()
            }
            for hook in hooks:
                hook.on_metrics(number, values)

    done = int(state.step)
    while done < steps:
        numbers = range(done + 1, call_end(done, steps, steps_per_call) + 1)
        given = [next(batches) for _ in numbers]
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


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where a run lives and how often it reports.

    Args:
      run_dir: Its folder (local, or a bucket such as gs://...); left out, the next free number
        under runs/.
      resume: Continue the run in run_dir; left out, the newest under runs/.
      auto_resume: Resume where run_dir holds a checkpoint, and begin where it holds none yet: one
        command for a run that is started again and again.
      overwrite: Delete what is in run_dir first.
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
      ValueError: for a mesh, batch or checkpoint that does not fit, before anything is compiled.
      FileExistsError: where ``run_dir`` holds another run.
      FileNotFoundError: where there is nothing to resume.
      Preempted: after a signal, with the state saved; uncaught, it is the process's exit code.
      Diverged: after too many skipped steps in a row, with the state saved.

    A lost process and a hang end the process from another thread, with the codes of
    :mod:`jaxtrain.exit_codes`.
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
        skips = _Skips(options.max_consecutive_skips)
        watchdog = Watchdog(60 * options.hang_minutes, process=jax.process_index())
        run_dir, resume = find_run_dir(
            experiment.name,
            options.run_dir,
            resume=options.resume,
            auto_resume=options.auto_resume,
            overwrite=options.overwrite,
        )
        checkpoints = stack.enter_context(
            Checkpointer(
                run_dir / "checkpoints",
                keep=options.keep,
                best_metric=f"eval/{experiment.best_metric}",
                best_mode=experiment.best_mode,
            )
        )
        if resume and has_checkpoint(run_dir / "checkpoints"):
            state = restore_state(experiment, abstract, checkpoints.restore)
        else:
            state = make_state(experiment, mesh)
        start = int(state.step)
        train, programs = compile_loop(experiment, state, mesh, start, experiment.steps)
        # Only now: whatever has been refused so far has left an older run alone.
        prepare_run_dir(run_dir, overwrite=options.overwrite)
        terminal.print_header(
            f"jaxtrain: {experiment.name}", header_facts(experiment, mesh, state, programs)
        )
        write_text(run_dir / "config.json", json.dumps(dict(experiment.config), indent=2) + "\n")
        for name, text in experiment.files.items():
            write_text(run_dir / name, text)

        log = stack.enter_context(
            contextlib.closing(make_writers(run_dir, resume_step=start if resume else None))
        )
        progress = stack.enter_context(
            terminal.Progress(experiment.steps, start=start, item=experiment.item)
        )
        watchdog.run_dir = run_dir
        stack.enter_context(watchdog)
        preemption = stack.enter_context(_Preemption(peers, handle_signals=handle_signals))
        rate = throughput.Throughput(experiment.items_per_step)
        pace = Pace(peers)
        logging = _Logging(experiment, mesh, log, progress, rate, pace, options.log_every)
        evaluation = _Evaluation(
            experiment, mesh, log, progress, rate, watchdog, options.eval_every
        )
        saving = _Saving(experiment, checkpoints, evaluation, options)
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
        peers.reached(last)
        if last < experiment.steps or skips.too_many_at is not None:
            saving.finish(last, state)
            if skips.too_many_at is not None:
                raise diagnose(
                    experiment,
                    mesh,
                    state,
                    step=skips.too_many_at,
                    skips=options.max_consecutive_skips,
                    run_dir=str(run_dir),
                )
            stopped = Preempted(last, str(run_dir))
            progress.note(str(stopped))
            raise stopped
        means = evaluation.at(experiment.steps, state)
        saving.finish(experiment.steps, state)
    if lines := compare_with_run(programs, mesh, experiment, rate.seconds_per_step):
        terminal.print_lines(lines)
    print_conclusion(experiment, state, means, str(run_dir))
    return FitResult(state, means, str(run_dir))


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


class _Evaluation(Hook):
    """Held-out means, every so many steps and when asked; compiled when first needed."""

    def __init__(self, experiment, mesh, log, progress, rate, watchdog: Watchdog, every: int):
        self.experiment, self.mesh, self.log, self.progress = experiment, mesh, log, progress
        self.throughput, self.watchdog, self.every = rate, watchdog, every
        self.latest: tuple[int, dict[str, float]] = (-1, {})
        self._step: CompiledStep | None = None

    def on_step(self, step: int, state: TrainState) -> None:
        if self.every and step % self.every == 0:
            self.at(step, state)

    def at(self, step: int, state: TrainState) -> dict[str, float]:
        """The means at ``step``, evaluated once."""
        if self.experiment.eval_batches is None or self.latest[0] == step:
            return self.latest[1]
        batches = self._watched(step, self.experiment.eval_batches(batch_sharding(self.mesh)))
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

    def _watched(self, step: int, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        for number, batch in enumerate(batches):
            self.watchdog.beat(f"in batch {number} of the evaluation after step {step}")
            yield batch


# With several processes, steps at least between two looks at the clock, for the first one tells the
# others.
CLOCK_EVERY = 10


class _Saving(Hook):
    """Checkpoints by steps, by minutes and on the best evaluation, with the means of their step.

    One that cannot be written is said and passed over, but for the last.
    """

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpointer,
        evaluation: _Evaluation,
        options: RunOptions,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.experiment, self.checkpoints, self.evaluation = experiment, checkpoints, evaluation
        self.options, self.clock = options, clock
        self.saved_at = clock()
        self.looks_at = 0
        self.best = math.nan
        if options.save_best and (step := checkpoints.best_step()) is not None:
            self.best = checkpoints.metrics(step)[f"eval/{experiment.best_metric}"]

    def on_step(self, step: int, state: TrainState) -> None:
        every = self.options.save_every
        by_step = bool(every) and step % every == 0
        # Both are asked at every step: one remembers the best, the other may speak to processes.
        by_best, by_time = self._is_best(step), self._is_time(step)
        if step != self.experiment.steps and (by_step or by_best or by_time):
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing ``state``; returns when its buffers have been copied."""
        self.saved_at = self.clock()
        # What the save before could not do is known now, and no reason to leave out this one.
        for attempt in (self.checkpoints.wait, lambda: self._start(step, state)):
            try:
                attempt()
            except SaveError as error:
                self.evaluation.progress.note(f"warning: {error}; the run goes on without it")

    def finish(self, step: int, state: TrainState) -> None:
        """Writes the last state and waits for it.

        Raises:
          SaveError: it could not be written.
        """
        self.save(step, state)
        # Does nothing where that has begun well.
        self._start(step, state)
        self.checkpoints.wait()

    def _start(self, step: int, state: TrainState) -> None:
        evaluated, means = self.evaluation.latest
        metrics = {f"eval/{name}": value for name, value in means.items()}
        self.checkpoints.save(
            step,
            to_checkpoint(self.experiment, state),
            metrics=metrics if evaluated == step else None,
            config=self.experiment.config,
        )

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
        if not self.options.save_minutes:
            return False
        due = self.clock() - self.saved_at >= 60 * self.options.save_minutes
        if jax.process_count() == 1:
            return due
        if step < self.looks_at:
            return False
        self.looks_at = step + CLOCK_EVERY
        return bool(multihost_utils.broadcast_one_to_all(np.array(due)))


def _peek(batches: Iterable[PyTree]) -> tuple[PyTree, Iterator[PyTree]]:
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no held-out batch to evaluate on")
    return first, itertools.chain([first], batches)
