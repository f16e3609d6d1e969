"""Row shares by speed: devices that take unequal numbers of a step's microbatches.

A step waits for its slowest device. Where the parts of the mesh axis ``data`` are of unequal speed,
the faster ones take more microbatches of the same global batch: each part sums the gradients of
its own in a loop of its own length, and the sums are reduced once per step. They are those of the
plain step to rounding, since the weights are summed with them, and dropout goes by a row's number
in the global batch.

All parts hold the rows of the whole batch. The shares are numbers that are given: a program cannot
measure how long a device takes, and with a clock in it no run could be repeated. Nor can it go on
without a device that is late, for a collective ends when all have sent; asynchrony's backup workers
(:mod:`jaxtrain.methods.asynchrony`) are rounds that do without the slowest.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.engines.accumulated import accumulated, split_microbatches
from jaxtrain.engines.members import AXIS
from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, plain
from jaxtrain.loss import LossFn
from jaxtrain.ops.grouped import TRIPS
from jaxtrain.sharding.placement import apart_along, free_axes, manual_batch_axes, sizes_are_final
from jaxtrain.sharding.row_keys import microbatch_keys, row_count
from jaxtrain.tree import PyTree


def microbatches_by_share(shares: Sequence[float], total: int) -> list[int]:
    """Deals so many microbatches in proportion to shares, at least one to each, by the largest
    remainders.

    Raises:
      ValueError: there are fewer microbatches than shares.

    >>> microbatches_by_share([3, 1], 8), microbatches_by_share([1, 1, 9], 6)
    ([6, 2], [1, 1, 4])
    """
    if total < len(shares):
        raise ValueError(f"{len(shares)} shares of {total} microbatches: give one to each or more")
    left = total - len(shares)
    wanted = np.maximum(0, np.asarray(shares, float) / sum(shares) * total - 1)
    wanted *= left / wanted.sum() if left else 0
    found = np.floor(wanted + 1e-9).astype(int)
    order = np.argsort(found - wanted, kind="stable")
    found[order[: left - found.sum()]] += 1
    return [int(1 + n) for n in found]


def uneven(shares: Sequence[float]) -> Engine:
    """Returns the engine for ``build_train_step(engine=)`` in which parts of the mesh axis ``data``
    take shares of the microbatches of a step.

    Args:
      shares: a positive number for each part of the axis, or for each of equally many parts (such
        as those of a host), in the order of its devices. Of the ``accumulate`` microbatches that
        each part has the rows of, all parts together take as many as before. Without a mesh, or on
        one device, nothing changes.

    Raises:
      ValueError: shares that are not positive; and where the step is traced, ``data`` has a size
        that they do not divide, the loss has float16's scale, or a device cannot run on rows of
        its own.
    """
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ValueError(f"`row_shares` is {shares}: give numbers above 0")
    told = " ".join(f"{share:g}" for share in shares)

    def by_share(loss_fn: LossFn, microbatches: int) -> GradientEngine:
        alone, even = plain(loss_fn), accumulated(loss_fn, microbatches)

        def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
            given = (params, model_state, batch, rng, loss_scale)
            axes, mesh = manual_batch_axes(), jax.sharding.get_abstract_mesh()
            size = mesh.shape.get(AXIS, 1)
            if AXIS not in axes and (size == 1 or not sizes_are_final()):
                return even(*given, frozen=frozen)
            if microbatches == 1:
                raise ValueError(
                    f"`row_shares` is {told} and `accumulate` 1: shares are of microbatches; give "
                    "2 or more"
                )
            _check(told, len(shares), size, axes, loss_scale)
            parts = np.repeat(shares, jax.lax.axis_size(axes) // len(shares))
            counts = microbatches_by_share(parts, microbatches * len(parts))
            first = np.cumsum([0, *counts])[:-1]
            units = jax.tree.map(lambda x: _units(x, axes, microbatches), batch)
            here = jax.lax.axis_index(axes)

            one = jax.tree.map(lambda x: x[0], units)
            with_key = lambda rng: alone(params, model_state, one, rng, loss_scale, frozen=frozen)  # noqa: E731
            of_a_part = microbatches * row_count(one)
            place = lambda n: (n // microbatches * of_a_part + n % microbatches, microbatches)  # noqa: E731

            def add(i: jax.Array, sums: GradientSums) -> GradientSums:
                number = jnp.asarray(first)[here] + i
                unit = jax.tree.map(lambda x: x[number], units)
                part = alone(params, model_state, unit, key(number), loss_scale, frozen=frozen)
                grads = jax.tree.map(jnp.add, sums.grads, part.grads)
                return dataclasses.replace(sums, grads=grads, loss=sums.loss + part.loss)

            # Rows count from 0 in a part, and ``place`` says where that stands.
            with apart_along(*axes):
                own = {"rows": row_count(one), "place": place}
                key, shapes = microbatch_keys(with_key, rng, microbatches, **own)
                zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes())
                zeros = dataclasses.replace(zeros, model_state=model_state)
                with jax.named_scope(f"{TRIPS}{microbatches}_of_{size}_{size}"):
                    sums = jax.lax.fori_loop(0, jnp.asarray(counts)[here], add, zeros)
            return dataclasses.replace(sums, microbatches=microbatches)

        return engine

    return Engine(by_share, row_wise=True, accumulates=True, draws_by_row=True)


def _units(x: jax.Array, axes: tuple[str, ...], microbatches: int) -> jax.Array:
    """What all parts have of a leaf, as [parts * microbatches, rows, ...]."""
    x = jnp.asarray(x)
    if x.ndim:
        x = jax.lax.all_gather(x, axes)
        split = lambda own: split_microbatches(own, microbatches)  # noqa: E731
        x = jax.vmap(split)(x)
        return x.reshape(-1, *x.shape[2:])
    return jnp.broadcast_to(x, (jax.lax.axis_size(axes) * microbatches,))


def _check(told: str, count: int, size: int, axes: tuple[str, ...], loss_scale: PyTree) -> None:
    if size % count:
        raise ValueError(
            f"`row_shares` is {told} and mesh axis {AXIS!r} has size {size}: give {size} numbers, "
            "or one for each host of as many"
        )
    if loss_scale is not None:
        raise ValueError(
            f"`row_shares` is {told} and precision fp16 has a loss scale, for which devices would "
            "speak in each of unequally many microbatches: use bf16"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if AXIS not in axes and AXIS not in free_axes(mesh):
        raise ValueError(
            f"`row_shares` is {told} and a method has replicas, clients or members of a population "
            f"on mesh axis {AXIS!r}, each with all of its rows: leave one of them out"
        )
    if AXIS not in axes:
        raise ValueError(
            f"`row_shares` is {told} and devices do not run on rows of their own here: the loss "
            "draws otherwise than by jaxtrain.ops.numerics.drop or is not declared a sum over "
            "rows, it has model state, a weight or a gradient is split over data (ZeRO), rows do "
            "not divide, or a method has other parameters than the state's (late ones); mend that, "
            "or leave row_shares out"
        )
