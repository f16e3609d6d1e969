"""Accumulation: a batch in microbatches, whose gradients are summed."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, plain, run_engine
from jaxtrain.loss import LossFn
from jaxtrain.sharding.mesh import BATCH_AXES
from jaxtrain.sharding.placement import free_axes
from jaxtrain.sharding.row_keys import microbatch_keys, row_count
from jaxtrain.tree import PyTree, named_leaves


def accumulated(
    loss_fn: LossFn,
    microbatches: int,
    constrain: Callable[[PyTree], PyTree] = lambda grads: grads,
    *,
    engine: Engine | Callable[[LossFn], GradientEngine] = plain,
) -> GradientEngine:
    """Gradients of ``microbatches`` equal slices of the batch, one after the other in a scan.

    Args:
      loss_fn: as in :func:`plain`.
      microbatches: how many; see :func:`split_microbatches`.
      constrain: applied to the running sum of gradients (its sharding, under ZeRO-2).
      engine: makes of the loss the engine of one microbatch.

    Microbatch j holds rows j, j + k, j + 2k, ...: each device then slices the rows it already has,
    where contiguous microbatches would move every row to another device.
    """

    each = engine(loss_fn)

    def accumulating(params, model_state, batch, rng, loss_scale, frozen=frozenset(), memory=None):
        one = functools.partial(run_engine, each, frozen=frozen)
        slices = split_microbatches(batch, microbatches)
        _check_shared(batch, microbatches)

        def add(sums, j_and_slice):
            j, microbatch = j_and_slice
            given = (params, sums.model_state, microbatch, key(j), loss_scale)
            part = one(*given, memory=sums.memory)
            return GradientSums(
                grads=constrain(jax.tree.map(jnp.add, sums.grads, part.grads)),
                loss=sums.loss + part.loss,
                model_state=part.model_state,
                memory=part.memory,
            ), None

        first = jax.tree.map(lambda x: x[0], slices)
        given = (params, model_state, first)
        with_key = lambda rng: one(*given, rng, loss_scale, memory=memory)  # noqa: E731
        key, shapes = microbatch_keys(with_key, rng, microbatches, rows=row_count(first))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes())
        carried = {"model_state": model_state, "memory": memory}
        start = dataclasses.replace(zeros, grads=constrain(zeros.grads), **carried)
        sums, _ = jax.lax.scan(add, start, (jnp.arange(microbatches), slices))
        return dataclasses.replace(sums, microbatches=microbatches)

    return accumulating


def split_microbatches(batch: PyTree, microbatches: int, argument: str = "accumulate") -> PyTree:
    """Reshapes every leaf ``[B, ...]`` to ``[microbatches, B / microbatches, ...]``, rows strided.

    A scalar goes to every microbatch as it is.

    Args:
      batch: leaves with the same number B of rows, or scalars.
      microbatches: a divisor of B.
      argument: what the caller names ``microbatches``, for the error.

    Raises:
      ValueError: where leaves differ in B, or B is not a multiple of ``microbatches``.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    leaves = named_leaves(batch)
    counts = {name: leaf.shape[0] for name, leaf in leaves.items() if leaf.ndim}
    largest = max(counts, key=counts.get, default=None)
    for name, count in counts.items():
        where = f"batch leaf {name!r} has shape {tuple(leaves[name].shape)}"
        if count != counts[largest]:
            raise ValueError(
                f"{where} and {largest!r} has {counts[largest]} rows: with "
                f"{argument}={microbatches} every leaf must have as many rows, or be a scalar; "
                "repeat it for every row, or let the loss function close over it"
            )
        if count % microbatches:
            raise ValueError(
                f"{where}: its leading axis cannot be cut into {argument}={microbatches} "
                f"microbatches; use a global batch that is a multiple of {microbatches}"
            )

    def split(x):
        if not x.ndim:
            return jnp.broadcast_to(x, (microbatches,))
        rows = x.shape[0] // microbatches
        return jnp.moveaxis(x.reshape(rows, microbatches, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def _check_shared(batch: PyTree, microbatches: int) -> None:
    """Raises where microbatches have rows that the devices of the ambient mesh cannot share."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in free_axes(mesh) if axis in BATCH_AXES)
    for name, leaf in named_leaves(batch).items():
        rows = jnp.shape(leaf)[0] // microbatches if jnp.ndim(leaf) else 0
        if rows % parts:
            raise ValueError(
                f"batch leaf {name!r} has {leaf.shape[0]} rows: accumulate={microbatches} "
                f"microbatches of {rows} do not divide over the {parts} devices that split the "
                "batch, and some would do the others' work again; use a global batch that is a "
                f"multiple of {microbatches * parts}, or fewer microbatches"
            )
