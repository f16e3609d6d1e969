"""Accumulation of losses over all pairs of a batch: embeddings are kept, and encoders are not.

A contrastive loss of a part of the batch has fewer negatives, so its microbatches do not add up.
Here the microbatches of a step are those of the encoder alone (GradCache, Gao et al. 2021,
https://arxiv.org/abs/2101.06983): one pass encodes all rows and keeps their embeddings, the loss is
that of the whole batch, and a second pass encodes each microbatch again and takes its embeddings'
gradients back to the parameters. Loss and gradients are those of the whole batch, to rounding, with
the activations of one microbatch, for one more forward pass of the encoder.

Shapes: B rows, K microbatches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxtrain.engines.accumulated import split_microbatches
from jaxtrain.engines.plain import Engine, GradientEngine, plain
from jaxtrain.loss import LossFn, WeightedLoss
from jaxtrain.sharding.placement import constrain
from jaxtrain.sharding.row_keys import microbatch_keys, row_count
from jaxtrain.tree import PyTree, combine, is_a, name_of, partition, to_accum_dtype

# Entered with K around the loss of a whole batch.
_MICROBATCHES = jax.make_user_context(1)

Encode = Callable[[PyTree, PyTree, jax.Array | None], PyTree]


def of_embeddings(encode: Encode, loss: Callable[[PyTree, PyTree, PyTree], WeightedLoss]) -> LossFn:
    """Makes a loss of a whole batch from an encoder of rows and a loss of all embeddings.

    Args:
      encode: ``(params, batch, rng) -> embeddings``, a pytree of floating-point arrays [B, ...],
        each row of which depends on that row of the batch alone.
      loss: ``(params, embeddings, batch) -> WeightedLoss``.

    Returns:
      ``(params, batch, rng) -> WeightedLoss`` for :func:`jaxtrain.build_train_step`, which takes
      its batch in several microbatches with the engine :data:`cached` alone.

    >>> encode = lambda params, batch, rng: batch * params
    >>> loss = lambda params, x_B, batch: WeightedLoss(x_B.max() * x_B.sum(), len(x_B))
    >>> float(of_embeddings(encode, loss)(2.0, jnp.array([1.0, 3.0]), None).total)
    48.0
    """

    def loss_fn(params: PyTree, batch: PyTree, rng: jax.Array | None) -> WeightedLoss:
        return loss(params, _encoded(encode, params, batch, rng), batch)

    loss_fn.of_embeddings = True
    return loss_fn


def cached_embeddings(loss_fn: LossFn, microbatches: int) -> GradientEngine:
    alone = plain(loss_fn)

    def engine(*given: Any, **more: Any) -> Any:
        with _MICROBATCHES(microbatches):
            sums = alone(*given, **more)
        return dataclasses.replace(sums, microbatches=microbatches)

    return engine


# Gradients of a loss of embeddings; with one microbatch those of :data:`plain`.
cached = Engine(cached_embeddings, accumulates=True)


def check_embeddings(loss_fn: LossFn, engine: Engine, microbatches: int) -> None:
    """Raises ValueError where an engine would take parts of the batch of a loss of embeddings, or
    :data:`cached` would cut a loss that is none."""
    ours = engine.make is cached_embeddings
    if not getattr(loss_fn, "of_embeddings", False):
        if ours and microbatches > 1:
            raise ValueError(
                f"`accumulate` is {microbatches} and the engine 'cached' encodes in microbatches, "
                "which the loss does not say how to: make it by "
                "jaxtrain.engines.cached.of_embeddings, or leave the engine out"
            )
    elif engine.by_row:
        raise ValueError(
            f"the engine {name_of(engine.make)!r} takes each row by itself, and the loss is one of "
            "all pairs of rows (jaxtrain.engines.cached.of_embeddings): use another engine"
        )
    elif microbatches > 1 and not ours:
        raise ValueError(
            f"`accumulate` is {microbatches} and the loss is one of all pairs of rows "
            "(jaxtrain.engines.cached.of_embeddings), which those of microbatches do not add up "
            "to: use the engine jaxtrain.engines.cached.cached, or one microbatch"
        )


def _encoded(encode: Encode, params: PyTree, batch: PyTree, rng: jax.Array | None) -> PyTree:
    """The embeddings of all rows, in their order."""
    if (count := _MICROBATCHES.value) == 1:
        return encode(params, batch, rng)
    slices = split_microbatches(batch, count)
    first = jax.tree.map(lambda x: x[0], slices)
    # What a row drops is drawn by its number in the whole batch.
    how = {"rows": row_count(first)}
    key, _ = microbatch_keys(lambda rng: encode(params, first, rng), rng, count, **how)
    found = _in_microbatches(encode, params, slices, jax.vmap(key)(jnp.arange(count)))

    def in_order(x_KR: jax.Array) -> jax.Array:  # row j + r K of the batch is row r of microbatch j
        x_B = jnp.moveaxis(x_KR, 0, 1).reshape(-1, *x_KR.shape[2:])
        return constrain(x_B, "batch", *[None] * (x_B.ndim - 1))

    return jax.tree.map(in_order, found)


def _in_microbatches(encode: Encode, params: PyTree, slices: PyTree, keys: jax.Array) -> PyTree:
    """Embeddings [K, B / K, ...], of which the backward pass keeps what they are made of."""
    return jax.lax.scan(lambda _, given: (None, encode(params, *given)), None, (slices, keys))[1]


def _forward(encode: Encode, params: PyTree, slices: PyTree, keys: PyTree) -> tuple[PyTree, Any]:
    # What is not differentiated, as a frozen parameter, costs no gradient.
    given = *partition(lambda _, primal: primal.perturbed, params), slices, keys
    training, rest, slices, keys = jax.tree.map(lambda primal: primal.value, given)
    found = _in_microbatches(encode, combine(training, rest), slices, keys)
    return found, (training, rest, slices, keys)


def _backward(encode: Encode, saved: Any, d_found: PyTree) -> tuple[PyTree, None, None]:
    training, rest, slices, keys = saved
    zero = is_a(SymbolicZero)  # of embeddings that the loss does not read
    dense = lambda d: jnp.zeros(d.shape, d.dtype) if zero(d) else d  # noqa: E731
    d_found = jax.tree.map(dense, d_found, is_leaf=zero)

    def add(sums: PyTree, given: tuple) -> tuple[PyTree, None]:
        rows, key, d_rows = given
        _, vjp = jax.vjp(lambda some: encode(combine(some, rest), rows, key), training)
        return jax.tree.map(jnp.add, sums, to_accum_dtype(vjp(d_rows)[0])), None

    # As gradients are summed everywhere: in float32, rounded once if at all.
    zeros = jax.tree.map(jnp.zeros_like, to_accum_dtype(training))
    sums, _ = jax.lax.scan(add, zeros, (slices, keys, d_found))
    return jax.tree.map(lambda s, p: s.astype(p.dtype), sums, training), None, None


_in_microbatches = jax.custom_vjp(_in_microbatches, nondiff_argnums=(0,))
_in_microbatches.defvjp(_forward, _backward, symbolic_zeros=True)
