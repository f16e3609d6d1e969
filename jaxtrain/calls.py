"""Several train steps in one compiled call: where calls begin and end, and their programs.

Calls end at multiples of ``steps_per_call``, wherever a run begins, so a resumed run makes the
calls that an uninterrupted one would have made. One that begins or ends between two multiples makes
a shorter call there, which is a program of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.experiment import Experiment, build_step, compile_train
from jaxtrain.state import TrainState
from jaxtrain.step import scan_steps

PyTree = Any


def call_end(done: int, steps: int, steps_per_call: int) -> int:
    """Returns the last step of the call that follows ``done`` steps of ``steps``.

    >>> [call_end(done, 20, 8) for done in (0, 5, 8, 16)]
    [8, 8, 16, 20]
    """
    return min(steps, (done // steps_per_call + 1) * steps_per_call)


def call_lengths(start: int, steps: int, steps_per_call: int) -> list[int]:
    """Returns how many steps the calls of a run have: each length once, the longest first.

    >>> call_lengths(0, 16, 8), call_lengths(5, 20, 8), call_lengths(20, 20, 8)
    ([8], [8, 4, 3], [])
    """
    first = call_end(start, steps, steps_per_call)
    last = steps - steps % steps_per_call
    begins = {start, first, last}
    lengths = {call_end(done, steps, steps_per_call) - done for done in begins if done >= start}
    return sorted((length for length in lengths if length > 0), reverse=True)


def compile_loop(
    experiment: Experiment, state: TrainState, mesh: Mesh, start: int, steps: int
) -> tuple[Callable[..., Any], Mapping[int, CompiledStep]]:
    """Compiles what :func:`jaxtrain.train_loop` calls on the way from ``start`` to ``steps``.

    Returns:
      The function, for one batch where ``steps_per_call`` is 1 and else for a list of them; and its
      programs by the number of their steps, the longest first.
    """
    if experiment.steps_per_call == 1:
        train = compile_train(experiment, state, mesh)
        return train, {1: train}
    lengths = call_lengths(start, steps, experiment.steps_per_call)
    many = scan_steps(build_step(experiment, state, mesh))
    programs = {
        n: compile_step(many, state, [experiment.batch] * n, mesh=mesh, rules=experiment.rules)
        for n in lengths or [experiment.steps_per_call]
    }

    def train(state: TrainState, batches: Sequence[PyTree]) -> Any:
        return programs[len(batches)](state, batches)

    return train, programs
