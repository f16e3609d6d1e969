"""Defines :class:`Method`: code around the train step, with a state of its own."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree

Step = Callable[[TrainState, PyTree], tuple[TrainState, Any]]


@dataclasses.dataclass(frozen=True)
class Method:
    """What happens around train steps: one function around each, and one before the first.

    They are pure, and are traced with the step for its mesh; checkpoints, ``plan`` and ``parity``
    take the state as it comes. Whatever a method does, ``params`` and ``model_state`` of the state
    are what is evaluated, exported and sampled, unless it says more by the last two functions.

    Args:
      step: ``step -> step``, applied to the train step before it is compiled.
      start: ``state -> state``, applied once to the state in which training begins. It may keep
        more in ``TrainState.method``, whose leaves that end in a parameter's path lie on devices as
        that does, and move there what it makes needless elsewhere.
      batches: ``stream -> stream``, of training batches: in another order, say.
      evaluation: ``step -> step``, applied to the evaluation of a batch before it is compiled.
      shown: ``(state, means) -> (state, means, lines)``, what a run is concluded from by its last
        evaluation, and lines to print before.
      regroup: ``(state, shapes) -> (saved, change) | None``, for a run that is resumed with another
        number of replicas than that of a checkpoint, whose arrays have these shapes by path:
        shapes and shardings to read it into, and a pure function ``saved -> state``. None where
        nothing has to change.
      every: steps from one meeting of replicas to the next, where they send nothing but scalars
        between meetings (``plan`` says how long those take); None for other methods.
      updates: updates of the parameters in one step. Where it is 1 ``parity`` replays gradients.
      of_members: each member of a population may have the method, with a state of its own.
      check: raises ValueError for a :class:`jaxtrain.Experiment` that it cannot be the method of.
      facts, fingerprints: what it adds to those of :class:`jaxtrain.experiment.Metadata`.

    >>> import jax, optax
    >>> def averaging(step):
    ...     def average(state, batch):
    ...         state, metrics = step(state, batch)
    ...         mean = jax.tree.map(lambda m, p: (m + p) / 2, state.method, state.params)
    ...         return dataclasses.replace(state, method=mean), metrics
    ...     return average
    >>> method = Method(averaging, start=lambda s: dataclasses.replace(s, method=s.params))
    """

    step: Callable[[Step], Step] = lambda step: step
    start: Callable[[TrainState], TrainState] | None = None
    batches: Callable[[Any], Any] = lambda stream: stream
    evaluation: Callable[[Callable], Callable] = lambda step: step
    shown: Callable[..., tuple[TrainState, Any, list[str]]] = lambda *found: (*found, [])
    regroup: Callable[..., tuple[TrainState, Callable[[TrainState], TrainState]] | None] = (
        lambda state, shapes: None
    )
    every: int | None = None
    check: Callable[[Any], None] | None = None
    updates: int = 1
    of_members: bool = False
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def within(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Sets a variable for what is traced within."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
