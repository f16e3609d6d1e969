"""Steps that came to nothing: counting them, ending a run of them, and saying what was not finite.

A step is skipped where nothing in its batch was finite, and where ``skip_spikes`` left its update
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

from jaxtrain.experiment import Experiment
from jaxtrain.gradients import split_microbatches
from jaxtrain.parallel.sharding import batch_sharding
from jaxtrain.state import TrainState
from jaxtrain.step import normalize_loss, with_policy
from jaxtrain.tree import named_leaves

PyTree = Any


class Diverged(RuntimeError):
    """Too many steps in a row were skipped; the state is saved, and the message names the cause.

    Attributes:
      step: the last of the skipped steps.
    """

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class ConsecutiveSkips:
    """Counts skipped steps in a row, from the metrics of a train step.

    Args:
      limit: how many are too many; 0 for no limit.
    """

    def __init__(self, limit: int):
        if limit < 0:
            raise ValueError(f"--max-consecutive-skips is {limit}: give 0 (no limit) or more")
        self._limit = limit
        self.count = 0
        self.too_many_at: int | None = None

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Counts the step."""
        nothing = metrics.get("skipped", 0) > 0 and metrics.get("weight", 1.0) == 0
        self.count = self.count + 1 if nothing or metrics.get("spike", 0) > 0 else 0
        if self._limit and self.count >= self._limit and self.too_many_at is None:
            self.too_many_at = step


@dataclasses.dataclass(frozen=True)
class Examination:
    """What one step computes, leaf by leaf.

    Attributes:
      losses: mean loss of each microbatch.
      params: parameter path to (values that are not finite, values in all).
      grads: the same for the gradient of the step.
      norms: norm of each leaf of that gradient.
    """

    losses: list[float]
    params: dict[str, tuple[int, int]]
    grads: dict[str, tuple[int, int]]
    norms: dict[str, float]

    def first_not_finite(self) -> str | None:
        """Says which leaf is not finite, the first one: of parameters, else of their gradients."""
        for name, (number, size) in self.params.items():
            if number:
                return f"parameter {name!r} has {number:,} of {size:,} values that are not finite"
        losses = [
            f"the loss of microbatch {j} is {loss}"
            for j, loss in enumerate(self.losses)
            if not math.isfinite(loss)
        ]
        grads = [
            f"the gradient of {name!r} has {number:,} of {size:,} values that are not finite"
            for name, (number, size) in self.grads.items()
            if number
        ]
        return ", and ".join(losses[:1] + grads[:1]) or None


def examine(experiment: Experiment, mesh: Mesh, state: TrainState, batch: PyTree) -> Examination:
    """Computes the loss and gradients of a step without leaving out what is not finite.

    Args:
      experiment: whose step it is.
      mesh: the mesh that ``state`` lies on.
      state: from before the step; it is left alone.
      batch: of the step.

    Under a pipeline the batch is taken in one piece and the randomness of a step (dropout) is
    another than in training; otherwise both are as in training.
    """
    piped = mesh.shape["pipe"] > 1
    loss_fn = with_policy(
        normalize_loss(experiment.loss_fn, experiment.has_model_state), experiment.policy
    )
    microbatches = 1 if piped else experiment.accumulate

    def one(state, model_state, batch, rng):
        scale = jnp.float32(1.0) if state.loss_scale is None else state.loss_scale.scale

        def scaled(params):
            loss, new_state = loss_fn(params, model_state, batch, rng)
            weight = loss.weight.astype(jnp.float32)
            # As in training: the cotangent has the dtype of the loss, and is of its mean.
            factor = jnp.where(weight > 0, scale / jnp.where(weight > 0, weight, 1.0), 0.0)
            return loss.total * factor.astype(loss.total.dtype), (loss.total, weight, new_state)

        grads, (total, weight, new_state) = jax.grad(scaled, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * (weight / scale), grads)
        return new_state, (grads, weight), total / weight

    def whole(state, batch):
        rng = jax.random.fold_in(state.rng, state.step)
        if microbatches == 1:
            _, sums, loss = one(state, state.model_state, batch, rng)
            losses = loss[None]
        else:

            def add(carry, j_and_slice):
                model_state, sums = carry
                j, part = j_and_slice
                rng_j = jax.random.fold_in(rng, j)
                model_state, new, loss = one(state, model_state, part, rng_j)
                return (model_state, jax.tree.map(jnp.add, sums, new)), loss

            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
            slices = (jnp.arange(microbatches), split_microbatches(batch, microbatches))
            start = (state.model_state, (zeros, jnp.float32(0.0)))
            (_, sums), losses = jax.lax.scan(add, start, slices)
        sums, weight = sums
        grads = jax.tree.map(lambda g: g / weight, sums)
        norms = jax.tree.map(optax.tree.norm, grads)
        return losses, _not_finite(state.params), _not_finite(grads), norms

    with jax.set_mesh(mesh):
        # The same on all devices, so that every process can read it.
        found = jax.jit(whole, out_shardings=NamedSharding(mesh, P()))(state, batch)
    losses, bad_params, bad_grads, norms = jax.device_get(found)
    sizes = {name: leaf.size for name, leaf in named_leaves(state.params).items()}

    def counts(tree: PyTree) -> dict[str, tuple[int, int]]:
        return {name: (int(n), sizes[name]) for name, n in named_leaves(tree).items()}

    return Examination(
        losses=[float(loss) for loss in losses],
        params=counts(bad_params),
        grads=counts(bad_grads),
        norms={name: float(norm) for name, norm in named_leaves(norms).items()},
    )


def _not_finite(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (~jnp.isfinite(x)).sum(), tree)


def diagnose(
    experiment: Experiment, mesh: Mesh, state: TrainState, *, step: int, skips: int, run_dir: str
) -> Diverged:
    """Returns the error that ends a run of skipped steps.

    Args:
      experiment: what was trained.
      mesh: the mesh that ``state`` lies on.
      state: after the skipped steps, which have not changed its parameters; with several steps per
        call it may be some finite steps further on, so that what is found is of those parameters
        (``jaxtrain replay`` has the very ones).
      step: the last of them; its batch is computed once more.
      skips: how many there were in a row.
      run_dir: the run's folder.
    """
    with experiment.train_batches(step - 1, batch_sharding(mesh)) as batches:
        batch = next(batches)
    before = dataclasses.replace(state, step=jnp.full_like(state.step, step - 1))
    cause = examine(experiment, mesh, before, batch).first_not_finite()
    cause = cause or (
        "all gradients of the last one are finite: the loss or gradient norm stood too far outside "
        "what came before (--optimizer.skip-spikes)"
    )
    module = experiment.config.get("module", "MODULE")
    return Diverged(
        step,
        f"{skips} steps in a row were skipped, up to step {step}: {cause}; run that very step "
        f"again with: jaxtrain replay {run_dir} --module {module} --step {step}",
    )
