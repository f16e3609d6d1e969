"""Evaluation: held-out means every so many steps, at the end and, asked for, before the first."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.build import (
    build_evaluation,
    compile_eval,
    evaluate,
    natural,
    rows_of,
    stream_shardings,
)
from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import Experiment
from jaxtrain.host import distributed, storage
from jaxtrain.host.paths import json_object, read_if_there
from jaxtrain.optim import averaged, reports
from jaxtrain.planning.estimate import trace_step
from jaxtrain.run.context import Run
from jaxtrain.run.folder import LOG
from jaxtrain.run.hook import Hook, Value, as_value
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree


class Interrupted(Exception):
    """An evaluation was left unfinished, because the run is to stop."""


class Evaluation(Hook):
    """Evaluates every so many steps and when asked; compiled when first needed.

    Between batches it listens for a request to stop: all processes leave it before the same batch.
    ``hooks`` receive the means.
    """

    def __init__(self, run: Run, experiment: Experiment, hooks: Sequence[Hook]):
        self.run, self.experiment, self.hooks = run, experiment, hooks
        self.latest: tuple[int, dict[str, Value]] = (-1, {})
        self._logged = self._ranked = -1  # steps
        self._steps: dict[Any, CompiledStep] = {}

    def recall(self, step: int, *, ranked: bool) -> None:
        """Looks for the evaluation of the step that a run goes on from; all processes call it.

        The log keeps its line, and gets no second one.

        Args:
          step: the step.
          ranked: whether the checkpoint of that step has the numbers of its evaluation.
        """
        path = self.run.owner.path / LOG

        def read() -> bool:
            lines = read_if_there(path).decode(errors="replace").splitlines()
            records = (json_object(line) for line in lines if '"eval/' in line)
            return any(record.get("step") == step for record in records)

        if distributed.from_first_process(lambda: storage.retrying(read, f"the log {path}")):
            self._logged, self._ranked = step, step if ranked else -1

    def awaits(self, step: int) -> bool:
        """Returns true if a signal left out the evaluation of the step that a run begins with."""
        every, first = self.run.options.eval_every, self.run.options.eval_first
        is_due = (bool(every) and step % every == 0) if step else first
        if not self.run.data.eval_sets or step in (self.latest[0], self._ranked):
            return False
        return is_due

    def on_step(self, step: int, state: TrainState) -> None:
        every = self.run.options.eval_every
        if step == 0 or (every and step % every == 0):
            with contextlib.suppress(Interrupted):  # the loop is about to be stopped
                self.at(step, state, after=max(step - 1, 0))

    def at(self, step: int, state: TrainState, *, after: int) -> dict[str, Value]:
        """Returns the means of the state after ``step``, evaluated once; ``after`` is the step
        after which this process was last asked where to stop. Raises Interrupted where the run is
        to stop."""
        run, sets, metadata = self.run, self.run.data.eval_sets, self.run.metadata
        if not sets or self.latest[0] == step:
            return self.latest[1]
        means, numbers = {}, itertools.count()
        with run.journal.ledger.phase("evaluation"):
            for prefix, opened in sets.items():
                batches = opened(stream_shardings(self.experiment, run.mesh))
                first, batches = _peek(prefix, self._watched(step, after, batches, numbers))
                found = evaluate(self._step_for(state, rows_of(first)), state, batches)
                found = {name: as_value(x) for name, x in found.items()}
                found |= metadata.derived(found)
                shown = {name: x for name, x in found.items() if not name.startswith("_")}
                means |= {f"{prefix}{name}": x for name, x in shown.items()}
        _check_best_metric(metadata.best_metric, {name: np.shape(x) for name, x in means.items()})
        self.latest = (step, means)
        if step != self._logged:
            run.log.write(step, {f"eval/{name}": value for name, value in means.items()})
        told = ", ".join(f"{name} {x:.4f}" for name, x in means.items() if not np.ndim(x))
        run.progress.note(f"step {step}: held-out {told}")
        told = jax.eval_shape(reports, state.opt_state)
        shows = [each for each in (metadata.show, metadata.pictures) if each is not None]
        if shows and step != self._logged and any("_histogram/" in name for name in told):
            with run.journal.ledger.phase("evaluation"):
                shown = natural(self.experiment, averaged(state))
                for show in shows:
                    run.log.show(step, show(shown, means))
        run.rate.pause()
        run.watchdog.beat(f"after the evaluation of step {step}")
        for hook in self.hooks:
            hook.on_evaluation(step, means)
        return means

    def _step_for(self, state: TrainState, batch: PyTree) -> CompiledStep:
        """The evaluation of batches like this one; sets of equal shapes share it."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = (structure, *map(jax.typeof, leaves))
        if shapes not in self._steps:
            with self.run.journal.ledger.phase("compile"):
                made = compile_eval(self.experiment, state, batch, self.run.mesh)
            self._steps[shapes] = made
        return self._steps[shapes]

    def _watched(
        self, step: int, after: int, batches: Iterable[PyTree], numbers: Iterator[int]
    ) -> Iterator[PyTree]:
        # The last look comes before anybody waits for the result, which needs all processes.
        for batch, number in zip(itertools.chain(batches, [None]), numbers, strict=False):
            self.run.watchdog.beat(f"in batch {number} of the evaluation after step {step}")
            # Batches count as parts of a step, so that this is between two steps for the others.
            if self.run.peers.interrupts(after + (number + 1) / (number + 2)):
                self.run.progress.note(f"evaluation after step {step} left out: asked to stop")
                raise Interrupted
            if batch is not None:
                yield batch


def check_best_metric(experiment: Experiment, state: TrainState, mesh: Mesh) -> None:
    """Refuses a ``best_metric`` that the evaluation of the first held-out batch will not report; of
    the state, shapes with shardings suffice."""
    metadata, prefix = experiment.metadata, experiment.deciding_set
    opened = experiment.data.eval_sets[prefix]
    batch = rows_of(_peek(prefix, iter(opened(stream_shardings(experiment, mesh))))[0])
    step, shapes = build_evaluation(experiment, batch, mesh), {}

    def means(state: TrainState, batch: PyTree) -> None:
        found = step(averaged(state), batch).means()
        numbers = metadata.derived(dict.fromkeys(found, 1.0))
        shapes.update({f"{prefix}{n}": np.shape(x) for n, x in (found | numbers).items()})

    trace_step(means, state, batch, mesh, experiment.laid.rules)
    _check_best_metric(metadata.best_metric, shapes)


def _check_best_metric(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise ValueError(
            f"`best_metric` is {name!r}, and an evaluation reports {', '.join(shapes)}: name one "
            "of those"
        )
    if shapes[name]:
        raise ValueError(f"`best_metric` {name!r} has shape {shapes[name]}: name a scalar one")


def _peek(prefix: str, batches: Iterator[PyTree]) -> tuple[PyTree, Iterator[PyTree]]:
    first = next(batches, None)
    if first is None:
        raise ValueError(f"there is no held-out batch to evaluate {prefix}loss on")
    return first, itertools.chain([first], batches)
