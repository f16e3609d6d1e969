"""Steps that came to nothing: counted, the end of a run of them, and what was not finite.

A step is skipped where something in it was not finite, and where ``skip_spikes`` left its update
out. One now and then is the ordinary course of things; many in a row mean that the run learns
nothing any more.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.plain import Engine, run_engine
from jaxtrain.experiment import Experiment
from jaxtrain.optim import frozen_of
from jaxtrain.sharding.offload import on_devices
from jaxtrain.sharding.placement import tracing_on
from jaxtrain.sharding.rules import batch_sharding
from jaxtrain.state import TrainState
from jaxtrain.step import build_engine
from jaxtrain.tree import PyTree, named_leaves


class Diverged(RuntimeError):
    """Too many steps in a row were skipped, the last of them ``step``; the state is saved, and the
    message names the cause."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Results of one step, leaf by leaf.

    Attributes:
      losses: mean loss of each microbatch.
      params: parameter path to (values that are not finite, values in all).
      grads: the same for the gradient of the step, of parameters that train.
      model_state: the same for the model state after the step.
      norms: norm of each leaf of that gradient.
    """

    losses: list[float]
    params: dict[str, tuple[int, int]]
    grads: dict[str, tuple[int, int]]
    model_state: dict[str, tuple[int, int]]
    norms: dict[str, float]

    def first_not_finite(self) -> str | None:
        """Says which leaf is not finite: of parameters, else of gradients, else of model state."""

        def first(what: str, counts: Mapping[str, tuple[int, int]], has: str = "has") -> list[str]:
            return [
                f"{what} {name!r} {has} {number:,} of {size:,} values that are not finite"
                for name, (number, size) in counts.items()
                if number
            ][:1]

        losses = [(j, loss) for j, loss in enumerate(self.losses) if not math.isfinite(loss)]
        of_step = [f"the loss of microbatch {j} is {loss}" for j, loss in losses[:1]]
        of_step += first("the gradient of", self.grads)
        after = first("model state", self.model_state, has="would get")
        for found in (first("parameter", self.params), of_step, after):
            if found:
                return ", and ".join(found)
        return None


def diagnose(experiment: Experiment, mesh: Mesh, state: TrainState, batch: PyTree) -> Diagnosis:
    """Computes the loss and gradients of a step without leaving out what is not finite; ``state``
    is that before the step, and is left alone.

    Under a pipeline the batch is taken in one piece and the randomness of a step (dropout) is
    another than in training; otherwise both are as in training.
    """
    piped = mesh.shape.get("pipe", 1) > 1
    microbatches = 1 if piped else experiment.layout.accumulate

    kind = experiment.task.engine

    def recording(*made_of):
        each = kind(*made_of)

        def engine(*given, frozen=frozenset(), memory=None):
            """Losses wait in a memory that goes from microbatch to microbatch."""
            memory, losses = memory
            sums = run_engine(each, *given, frozen=frozen, memory=memory)
            losses = jnp.roll(losses, -1).at[-1].set(sums.loss.total / sums.loss.weight)
            return dataclasses.replace(sums, memory=(sums.memory, losses))

        return engine

    engine = build_engine(
        experiment.laid.loss_fn,
        policy=experiment.policy,
        accumulate=microbatches,
        has_model_state=experiment.task.has_model_state,
        gather=experiment.task.gather,
        engine=Engine(recording, accumulates=kind.accumulates, init=lambda params: ()),
    )

    def whole(state, batch):
        rng = jax.random.fold_in(state.rng, state.step)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        given = (state.params, state.model_state, batch, rng, scale)
        memory = (state.memory, jnp.zeros(1 if kind.accumulates else microbatches))
        sums = run_engine(engine, *given, frozen=frozen_of(state), memory=memory)
        params = on_devices(state.params)
        model_state, (_, losses) = sums.model_state, sums.memory
        grads = named_leaves(jax.tree.map(lambda g: g / sums.loss.weight, sums.grads))
        norms = jax.tree.map(optax.tree.norm, grads)
        return losses, *map(_not_finite, (params, grads, model_state)), norms

    with tracing_on(mesh, state, experiment.laid.rules):
        # The same on all devices, so that every process can read it.
        found = jax.jit(whole, out_shardings=NamedSharding(mesh, P()))(state, batch)
    losses, params, grads, model_state, norms = jax.device_get(found)
    return Diagnosis(
        losses=[float(loss) for loss in losses],
        params=_counts(params, state.params),
        grads=_counts(grads, state.params),
        model_state=_counts(model_state, state.model_state),
        norms={name: float(norm) for name, norm in norms.items()},
    )


def _not_finite(tree: PyTree) -> dict[str, jax.Array]:
    leaves = {n: x for n, x in named_leaves(tree).items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    return {name: (~jnp.isfinite(x)).sum() for name, x in leaves.items()}


def _counts(found: Mapping[str, Any], tree: PyTree) -> dict[str, tuple[int, int]]:
    leaves = named_leaves(tree)
    return {name: (int(number), leaves[name].size) for name, number in found.items()}


def make_diverged(
    experiment: Experiment, mesh: Mesh, state: TrainState, *, step: int, skips: int, run_dir: str
) -> Diverged:
    """Returns the error that ends a run of so many skipped steps, up to ``step``, whose batch is
    computed once more.

    The skipped steps have not changed the parameters of ``state``; with several steps per call it
    may be some finite steps further on, so that what is found is of those parameters (``jaxtrain
    replay`` has the very ones).
    """
    with experiment.train_batches(step - 1, batch_sharding(mesh)) as batches:
        batch = next(batches)
    before = dataclasses.replace(state, step=jnp.full_like(state.step, step - 1))
    cause = diagnose(experiment, mesh, before, batch).first_not_finite()
    cause = cause or (
        "all gradients of the last one are finite: the loss or gradient norm stood too far outside "
        "what came before (`skip_spikes`)"
    )
    module = experiment.metadata.config.get("module", "MODULE")
    return Diverged(
        step,
        f"{skips} steps in a row were skipped, up to step {step}: {cause}; run that very step "
        f"again with: jaxtrain replay {run_dir} --module {module} --step {step}",
    )
