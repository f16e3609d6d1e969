"""The gradients of a whole batch at once, and what every gradient engine shares.

An engine is a pure function ``(params, model_state, batch, rng, loss_scale) -> GradientSums``. The
sums run over tokens (or examples: whatever the loss calls its weight), are kept in float32 or
wider, and are divided once, by the global weight, in the train step. So a microbatch with few
tokens counts for few, on any number of microbatches and on any mesh.

:func:`plain` makes the usual one of a loss. ``build_train_step(engine=)`` takes another that makes
one of a loss (gradients clipped for every example, say); accumulation goes around either.

An engine that has an argument ``frozen`` is given the paths of the parameters that do not train,
and splits them off before it differentiates (:func:`trainable`): they cost no gradient.

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
from jaxtrain.sharding.placement import manual_batch_axes
from jaxtrain.tree import PyTree, combine, partition, widen


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
    """

    grads: PyTree
    loss: WeightedLoss
    model_state: PyTree
    microbatches: int = dataclasses.field(metadata={"static": True}, default=1)


GradientEngine = Callable[..., GradientSums]


def trainable(params: PyTree, frozen: Collection[str] = ()) -> tuple[PyTree, PyTree]:
    """Splits parameters into what has a gradient and the rest: the frozen ones and integers.

    Args:
      params: the parameters.
      frozen: paths of those that do not train.

    Returns:
      Two trees, as :func:`jaxtrain.tree.partition` makes them.
    """
    return partition(
        lambda name, p: name not in frozen and jnp.issubdtype(jnp.result_type(p), jnp.inexact),
        params,
    )


def plain(loss_fn: LossFn) -> GradientEngine:
    """Gradients of the whole batch at once.

    Args:
      loss_fn: ``(params, model_state, batch, rng) -> (WeightedLoss, model_state)``.
    """

    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        training, rest = trainable(params, frozen)

        def forward(training):
            loss, new_state = loss_fn(combine(training, rest), model_state, batch, rng)
            return loss.total, (loss, new_state)

        total, vjp, (loss, new_state) = jax.vjp(forward, training, has_aux=True)
        weight = loss.weight
        if loss_scale is not None and (taken_over := manual_batch_axes()):
            # What overflows is not to depend on how many devices share the rows.
            weight = jax.lax.psum(widen(weight), taken_over)
        seed, factor = seed_and_factor(weight, loss_scale, total.dtype)
        (grads,) = vjp(seed)
        return GradientSums(scaled(grads, factor), widen(loss), new_state)

    return engine


def run_engine(engine: GradientEngine, *given: Any, frozen: Collection[str] = ()) -> GradientSums:
    """Calls an engine; one that has no argument ``frozen`` differentiates everything.

    Raises:
      ValueError: it returns something else than ``GradientSums``.
    """
    sums = engine(*given, **taken(engine, {"frozen": frozen} if frozen else {}))
    if not isinstance(sums, GradientSums):
        raise ValueError(
            f"the gradient engine returned {type(sums).__name__}: return jaxtrain.engines.plain."
            "GradientSums(grads, loss, model_state)"
        )
    return sums


def taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
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
    return seed, 1.0 / widen(seed)


def scaled(grads: PyTree, factor: jax.Array) -> PyTree:
    """Returns ``grads * factor`` in the dtype in which gradients are summed."""
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), widen(grads))
