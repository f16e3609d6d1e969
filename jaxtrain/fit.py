"""The loop, and the run around it: state, compiled step, checkpoints, logs, evaluation.

:func:`train_loop` is the bare loop for people with a program of their own. :func:`fit` takes an
:class:`~jaxtrain.experiment.Experiment` and does what a run needs around that loop.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import (
    Experiment,
    compile_eval,
    compile_train,
    evaluate,
    make_abstract_state,
    make_experiment_mesh,
    make_state,
    restore_state,
    to_checkpoint,
)
from jaxtrain.observe import memory, terminal, throughput
from jaxtrain.observe.writers import make_writers
from jaxtrain.parallel.mesh import describe_mesh
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.plan.comparison import compare_with_run
from jaxtrain.state import TrainState, local_bytes

PyTree = Any

RUNS = "runs"


class Hook:
    """What may happen around a step. A subclass overrides what it needs."""

    def on_step(self, step: int, state: TrainState) -> None:
        """Called when step number ``step`` is dispatched; reading ``state`` waits for it."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of ``step``, when the step after it has been dispatched."""


def train_loop(
    train: Callable[[TrainState, PyTree], tuple[TrainState, Mapping[str, jax.Array]]],
    state: TrainState,
    batches: Iterator[PyTree],
    *,
    steps: int,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Runs ``train`` until ``steps`` steps are done, counted from the state's own step.

    Step n is dispatched before the metrics of step n-1 are read, so that the devices never wait for
    the host, and the host is never more than one step ahead.

    Args:
      train: a compiled train step.
      state: the state to start from; donated.
      batches: the batches of the remaining steps, in order.
      steps: the step to stop at.
      hooks: called in order, around every step.

    Returns:
      The last state.
    """
    pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def read() -> None:
        if pending is not None:
            number, metrics = pending
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            for hook in hooks:
                hook.on_metrics(number, values)

    for number in range(int(state.step) + 1, steps + 1):
        state, metrics = train(state, next(batches))
        read()
        pending = (number, metrics)
        for hook in hooks:
            hook.on_step(number, state)
    read()
    return state


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where a run lives and how often it reports.

    Args:
      run_dir: Its folder (local, or a bucket such as gs://...); left out, the next free number
        under runs/.
      resume: Continue the run in run_dir; left out, the newest under runs/.
      overwrite: Delete what is in run_dir first.
      log_every: Steps between lines in the logs.
      eval_every: Steps between evaluations; 0 evaluates only at the end.
      save_every: Steps between checkpoints; 0 saves only at the end.
      keep: Newest checkpoints to keep; the best one is kept as well.
    """

    run_dir: str | None = None
    resume: bool = False
    overwrite: bool = False
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    keep: int = 3


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
    """
    options = options or RunOptions()
    mesh = make_experiment_mesh(experiment)
    abstract = make_abstract_state(experiment, mesh)
    run_dir = open_run_dir(experiment.name, options)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpointer(
                run_dir / "checkpoints",
                keep=options.keep,
                best_metric=f"eval/{experiment.best_metric}",
                best_mode=experiment.best_mode,
            )
        )
        if options.resume:
            state = restore_state(experiment, abstract, checkpoints.restore)
        else:
            state = make_state(experiment, mesh)
        start = int(state.step)
        train = compile_train(experiment, state, mesh)
        terminal.print_header(
            f"jaxtrain: {experiment.name}", _facts(experiment, mesh, state, train)
        )
        write_text(run_dir / "config.json", json.dumps(dict(experiment.config), indent=2) + "\n")
        for name, text in experiment.files.items():
            write_text(run_dir / name, text)

        log = stack.enter_context(
            contextlib.closing(make_writers(run_dir, resume_step=start if options.resume else None))
        )
        progress = stack.enter_context(
            terminal.Progress(experiment.steps, start=start, item=experiment.item)
        )
        rate = throughput.Throughput(experiment.items_per_step)
        logging = _Logging(experiment, mesh, log, progress, rate, options.log_every)
        evaluation = _Evaluation(experiment, mesh, log, progress, rate, options.eval_every)
        saving = _Saving(experiment, checkpoints, evaluation, options.save_every)
        if start < experiment.steps:
            batches = stack.enter_context(experiment.train_batches(start, batch_sharding(mesh)))
            hooks = (logging, evaluation, saving)
            state = train_loop(train, state, batches, steps=experiment.steps, hooks=hooks)
        means = evaluation.at(experiment.steps, state)
        saving.save(experiment.steps, state)
    terminal.print_lines(compare_with_run(train, mesh, experiment, rate.seconds_per_step))
    result = FitResult(state, means, str(run_dir))
    _conclude(experiment, result)
    return result


def open_run_dir(name: str, options: RunOptions) -> epath.Path:
    """Finds or makes the folder of a run.

    Raises:
      FileExistsError: where it holds a run, and neither ``resume`` nor ``overwrite`` is set.
      FileNotFoundError: where there is nothing to resume.
      ValueError: where both are set.
    """
    if options.resume and options.overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it: give one of them")
    if options.run_dir is None:
        number = _last_number(name) + (0 if options.resume else 1)
        if number == 0:
            raise FileNotFoundError(
                f"there is no run to resume under {RUNS}/: name its folder with --run-dir"
            )
        run_dir = epath.Path(RUNS) / f"{name}-{number}"
    else:
        run_dir = epath.Path(options.run_dir)
    taken = run_dir.exists() and any(run_dir.iterdir())
    if options.resume and not taken:
        raise FileNotFoundError(f"there is no run to resume in {run_dir}")
    if taken and options.overwrite and jax.process_index() == 0:
        run_dir.rmtree()
    elif taken and not options.resume:
        raise FileExistsError(
            f"{run_dir} holds a run already: continue it with --resume, delete it with "
            "--overwrite, or choose another --run-dir"
        )
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _last_number(name: str) -> int:
    runs = epath.Path(RUNS)
    ends = (
        [p.name.removeprefix(f"{name}-") for p in runs.glob(f"{name}-*")] if runs.exists() else []
    )
    return max((int(end) for end in ends if end.isdigit()), default=0)


def write_text(path: epath.Path, text: str) -> None:
    """Writes a file of the run, once: the first process does."""
    if jax.process_index() == 0:
        path.write_text(text)


class _Logging(Hook):
    """Metrics to the logs every so many steps, and to the progress line at every step."""

    def __init__(self, experiment, mesh, log, progress, rate, every: int):
        self.experiment, self.mesh, self.log, self.progress = experiment, mesh, log, progress
        self.throughput, self.every = rate, every

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.throughput.step()
        self.progress.update(step, metrics["loss"], self.throughput.items_per_second)
        if step % self.every and step != self.experiment.steps and not metrics["skipped"]:
            return
        values = {f"train/{name}": value for name, value in metrics.items()}
        seconds = self.throughput.seconds_per_step
        if seconds is not None:
            values["time/step_seconds"] = seconds
            values[f"time/{self.experiment.item}_per_second"] = self.throughput.items_per_second
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

    def __init__(self, experiment, mesh, log, progress, rate, every: int):
        self.experiment, self.mesh, self.log, self.progress = experiment, mesh, log, progress
        self.throughput, self.every = rate, every
        self.latest: tuple[int, dict[str, float]] = (-1, {})
        self._step: CompiledStep | None = None

    def on_step(self, step: int, state: TrainState) -> None:
        if self.every and step % self.every == 0:
            self.at(step, state)

    def at(self, step: int, state: TrainState) -> dict[str, float]:
        """The means at ``step``, evaluated once."""
        if self.experiment.eval_batches is None or self.latest[0] == step:
            return self.latest[1]
        batches = self.experiment.eval_batches()
        if self._step is None:
            first, batches = _peek(batches)
            self._step = compile_eval(self.experiment, state, first, self.mesh)
        means = {name: float(x) for name, x in evaluate(self._step, state, batches).items()}
        self.latest = (step, means)
        self.log.write(step, {f"eval/{name}": value for name, value in means.items()})
        self.progress.note(f"step {step}: held-out loss {means['loss']:.4f}")
        self.throughput.pause()
        return means


class _Saving(Hook):
    """Checkpoints every so many steps, with the held-out means of their step."""

    def __init__(self, experiment, checkpoints: Checkpointer, evaluation: _Evaluation, every: int):
        self.experiment, self.checkpoints, self.evaluation = experiment, checkpoints, evaluation
        self.every = every

    def on_step(self, step: int, state: TrainState) -> None:
        if self.every and step % self.every == 0:
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Starts writing ``state``; returns when its buffers have been copied."""
        evaluated, means = self.evaluation.latest
        metrics = {f"eval/{name}": value for name, value in means.items()}
        self.checkpoints.save(
            step,
            to_checkpoint(self.experiment, state),
            metrics=metrics if evaluated == step else None,
            config=self.experiment.config,
        )


def _peek(batches: Iterable[PyTree]) -> tuple[PyTree, Iterator[PyTree]]:
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no held-out batch to evaluate on")
    return first, itertools.chain([first], batches)


def _facts(experiment, mesh, state, train) -> dict[str, str]:
    """What the header says will run."""
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    left = experiment.steps - int(state.step)
    resumed = f", resumed at step {int(state.step):,}" if int(state.step) else ""
    devices = mesh.devices.flat
    split = describe_mesh(mesh) + (f", zero {experiment.zero}" if experiment.zero else "")
    accumulate = f" in {experiment.accumulate} microbatches" if experiment.accumulate > 1 else ""
    return {
        **experiment.facts,
        "parameters": f"{parameters:,}",
        "step": f"{experiment.items_per_step:,} {experiment.item}{accumulate}",
        "steps": f"{left:,} ({left * experiment.items_per_step:,} {experiment.item}){resumed}",
        "devices": f"{mesh.size} x {devices[0].device_kind} ({devices[0].platform})",
        "mesh": split,
        "dtypes": str(experiment.policy),
        **_flops(experiment, devices),
        "memory": f"{memory.human_bytes(train.memory_bytes)} per device (compiled: state "
        f"{memory.human_bytes(local_bytes(state))}, the rest for the step)",
        "compiled": f"in {train.compile_seconds:.1f} s; "
        + "; ".join(c.promise for c in train.checks),
    }


def _flops(experiment, devices) -> dict[str, str]:
    if experiment.flops_per_step is None:
        return {}
    known = throughput.mfu(
        experiment.flops_per_step, 1.0, devices, dtype=experiment.policy.compute_dtype
    )
    kind = f"{experiment.policy.compute_dtype} on {devices[0].device_kind!r}"
    mfu = "" if known is not None else f"; no MFU: the peak of {kind} is not known"
    text = f"{experiment.flops_per_step:.3g} per step, by {experiment.flops_formula}{mfu}"
    return {"FLOPs": text}


def _conclude(experiment: Experiment, result: FitResult) -> None:
    if jax.process_index() != 0:
        return
    lines = []
    if experiment.conclude is not None:
        lines += [*experiment.conclude(result.state, result.evaluation), ""]
    terminal.print_lines(
        [
            *lines,
            f"checkpoints  {result.run_dir}/checkpoints",
            f"TensorBoard  {result.run_dir}/tensorboard",
            f"JSONL log    {result.run_dir}/log.jsonl",
        ]
    )
