"""The gradients of a whole batch at once, and what every gradient engine shares.

An :class:`Engine` makes, of a loss, a pure function
``(params, model_state, batch, rng, loss_scale) -> GradientSums``. The sums run over tokens (or
examples: whatever the loss calls its weight), are kept in float32 or wider, and are divided once,
by the global weight, in the train step. So a microbatch with few tokens counts for few, on any
number of microbatches and on any mesh.

:data:`plain` is the usual engine. ``build_train_step(engine=)`` takes another one (that clips the
gradient of every example, say), or a bare function of a loss; accumulation goes around either.

A function with an argument ``frozen`` receives the paths of the parameters that do not train, and
splits them off before it differentiates (:func:`trainable`): they cost no gradient. One of an
engine with a memory receives that as the argument ``memory``.

An engine leaves nothing out: an infinity or a NaN of one microbatch stays in the sums, and the
train step then leaves out the whole batch (:func:`jaxtrain.step.build_update`).
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.loss import LossFn, WeightedLoss
from jaxtrain.sharding.offload import on_devices
from jaxtrain.sharding.placement import manual_batch_axes
from jaxtrain.tree import PyTree, combine, is_count, map_named, partition, to_accum_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The result of a gradient engine: summed gradients, the loss and the model state.

    Args:
      grads: like the parameters, float32 or wider: the gradient of ``loss.total``, loss scale
        removed. None stands for parameters that are frozen or no floating-point numbers.
      loss: sums over the whole batch.
      model_state: the model state after the batch (None where the model has none).
      microbatches: number of parts in which the batch was taken.
      memory: the engine's memory after the batch (None where it has none).
      private: whether the gradients are all that an optimizer may know of the batch: it is then
        given no loss.
    """

    grads: PyTree
    loss: WeightedLoss
    model_state: PyTree
    microbatches: int = dataclasses.field(metadata={"static": True}, default=1)
    memory: PyTree = None
    private: bool = dataclasses.field(metadata={"static": True}, default=False)


GradientEngine = Callable[..., GradientSums]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A way to compute the gradients of a loss, with what it promises and what it remembers.

    Args:
      make: makes a :data:`GradientEngine` of a loss ``(params, model_state, batch, rng) ->
        (WeightedLoss, model_state)``; with ``accumulates``, of a loss and a number of microbatches.
      row_wise: the promise that the sums of a batch are those of its rows, added up, wherever they
        are computed. If the loss is row-wise too and draws nothing, each device runs the engine on
        its own rows, and the sums are reduced once per step.
      accumulates: whether it takes the microbatches of a step itself, and is called once per step.
      init: ``params -> memory``, of what it remembers from one step to the next
        (``TrainState.memory``); a leaf that ends in a parameter's path lies on devices as that
        does, and one under ``members`` is split by its leading axis over ``data``. A step that is
        left out leaves it as it was. None for an engine without a memory.
      by_parts: whether it takes parts of the rows each by itself, and not for the sum alone, which
        no loss may have that is not row-wise, or has model state.
      joins_state: whether it takes model state all the same, of a loss that is declared row-wise,
        and joins those that parts leave.
      by_row: whether it computes the loss of each row alone, so that any loss is row-wise to it and
        draws for a row by its own key. It always runs per device, with weights that are whole.
      draws_by_row: the promise that what a loss draws by :func:`jaxtrain.ops.numerics.drop` for a
        row is by the row's number in the whole batch, wherever the engine computes it.
      finish: ``(sums, rng, memory) -> sums``, what is done once per step with the sums of the whole
        batch, wherever they were computed; the memory is then its own.
      check: raises ValueError for a :class:`jaxtrain.Experiment` that it cannot be the engine of.
    """

    make: Callable[..., GradientEngine]
    row_wise: bool = False
    accumulates: bool = False
    init: Callable[[PyTree], PyTree] | None = None
    by_parts: bool = False
    joins_state: bool = False
    by_row: bool = False
    draws_by_row: bool = False
    finish: Callable[..., GradientSums] | None = None
    check: Callable[[Any], None] | None = None

    def __call__(self, *given: Any) -> GradientEngine:
        return self.make(*given)


def as_engine(engine: Engine | Callable[[LossFn], GradientEngine]) -> Engine:
    """Accepts an engine, or a bare function of a loss, which promises and remembers nothing."""
    return engine if isinstance(engine, Engine) else Engine(engine)


def trainable(params: PyTree, frozen: Collection[str] = ()) -> tuple[PyTree, PyTree]:
    """Splits parameters into what has a gradient and the rest: the frozen ones and integers.

    Args:
      frozen: paths of those that do not train.

    Returns:
      Two trees, as :func:`jaxtrain.tree.partition` makes them.
    """
    return partition(
        lambda name, p: name not in frozen and jnp.issubdtype(jnp.result_type(p), jnp.inexact),
        params,
    )


def _plain(loss_fn: LossFn) -> GradientEngine:
    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        training, rest = trainable(params, frozen)

        def forward(training):
            loss, new_state = loss_fn(combine(training, rest), model_state, batch, rng)
            return loss.total, (loss, new_state)

        total, vjp, (loss, new_state) = jax.vjp(forward, training, has_aux=True)
        weight = loss.weight
        if loss_scale is not None and (taken_over := manual_batch_axes()):
            # What overflows is not to depend on how many devices share the rows.
            weight = jax.lax.psum(to_accum_dtype(weight), taken_over)
        seed, factor = seed_and_factor(weight, loss_scale, total.dtype)
        # The gradient of what lies on the host would lie there too.
        grads = on_devices(vjp(seed)[0])
        return GradientSums(scaled(grads, factor), to_accum_dtype(loss), new_state)

    return engine


# Gradients of the whole batch at once.
plain = Engine(_plain, row_wise=True, draws_by_row=True)


def run_engine(
    engine: GradientEngine, *given: Any, frozen: Collection[str] = (), memory: PyTree = None
) -> GradientSums:
    """Calls what an engine has made; without an argument ``frozen`` it differentiates everything.

    Raises:
      ValueError: it returns something else than ``GradientSums``.
    """
    still = accepted_kwargs(engine, {"frozen": frozen} if frozen else {})
    sums = engine(*given, **still, **({} if memory is None else {"memory": memory}))
    if not isinstance(sums, GradientSums):
        raise ValueError(
            f"the gradient engine returned {type(sums).__name__}: return jaxtrain.engines.plain."
            "GradientSums(grads, loss, model_state)"
        )
    return sums


def accepted_kwargs(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``arguments`` that ``function`` accepts."""
    takes = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in takes}


def seed_and_factor(
    weight: jax.Array, loss_scale: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangent of a loss total, and what turns its gradients into those of the total.

    The gradient of the mean, not of the sum, is what travels backward: a sum over a million tokens
    leaves float16's range, and the loss scale would be spent on undoing it. The factor undoes the
    cotangent as rounded to ``dtype``, so that the rounding does not reach the gradients.

    Args:
      weight: of the loss, of any shape and sign. A part that weighs nothing may have a total, and
        so a gradient, all the same: its cotangent is that of a part which weighs 1.
      loss_scale: scalar, or None for 1.
      dtype: of the loss total.
    """
    weight = weight.astype(jnp.promote_types(dtype, jnp.float32))
    size = jnp.where(weight == 0, 1.0, jnp.abs(weight))
    seed = ((1.0 if loss_scale is None else loss_scale) / size).astype(dtype)
    return seed, 1.0 / to_accum_dtype(seed)


def scaled(grads: PyTree, factor: jax.Array) -> PyTree:
    """Returns ``grads * factor`` in the dtype in which gradients are summed; counts stay."""
    times = lambda name, g: g if is_count(name) else g * factor.astype(g.dtype)  # noqa: E731
    return map_named(times, to_accum_dtype(grads))
