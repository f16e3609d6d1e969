"""Evaluation: held-out means every so many steps, and at the end."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxtrain.compile import CompiledStep
from jaxtrain.experiment import compile_eval, evaluate
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.run.context import Run
from jaxtrain.run.hooks import Hook
from jaxtrain.state import TrainState

PyTree = Any


class Interrupted(Exception):
    """An evaluation was left unfinished, because the run is to stop."""


class Evaluation(Hook):
    """Evaluates every so many steps and when asked; compiled when first needed.

    Between batches it listens for a request to stop: all processes leave it before the same batch.

    Args:
      run: the run.
      hooks: told of the means.
    """

    def __init__(self, run: Run, hooks: Sequence[Hook]):
        self.run, self.hooks = run, hooks
        self.latest: tuple[int, dict[str, float]] = (-1, {})
        self._step: CompiledStep | None = None

    def on_step(self, step: int, state: TrainState) -> None:
        every = self.run.options.eval_every
        if every and step % every == 0:
            with contextlib.suppress(Interrupted):  # the loop is about to be stopped
                self.at(step, state, after=step - 1)

    def at(self, step: int, state: TrainState, *, after: int) -> dict[str, float]:
        """Returns the means at ``step``, evaluated once.

        Args:
          step: the step.
          state: the state after it.
          after: the step after which this process was last asked where to stop.

        Raises:
          Interrupted: the run is to stop.
        """
        run, experiment = self.run, self.run.experiment
        if experiment.eval_batches is None or self.latest[0] == step:
            return self.latest[1]
        batches = experiment.eval_batches(batch_sharding(run.mesh))
        batches = self._watched(step, after, batches)
        if self._step is None:
            first, batches = _peek(batches)
            self._step = compile_eval(experiment, state, first, run.mesh)
        means = {name: float(x) for name, x in evaluate(self._step, state, batches).items()}
        self.latest = (step, means)
        run.log.write(step, {f"eval/{name}": value for name, value in means.items()})
        run.progress.note(f"step {step}: held-out loss {means['loss']:.4f}")
        run.rate.pause()
        run.watchdog.beat(f"after the evaluation of step {step}")
        for hook in self.hooks:
            hook.on_evaluation(step, means)
        return means

    def _watched(self, step: int, after: int, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        # The last look comes before anybody waits for the result, which needs all processes.
        for number, batch in enumerate(itertools.chain(batches, [None])):
            self.run.watchdog.beat(f"in batch {number} of the evaluation after step {step}")
            # Batches count as parts of a step, so that this is between two steps for the others.
            if self.run.peers.interrupts(after + (number + 1) / (number + 2)):
                self.run.progress.note(
                    f"the evaluation after step {step} is left out: asked to stop"
                )
                raise Interrupted
            if batch is not None:
                yield batch


def _peek(batches: Iterable[PyTree]) -> tuple[PyTree, Iterator[PyTree]]:
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no held-out batch to evaluate on")
    return first, itertools.chain([first], batches)
