"""Rows of a table that is split over all devices, exchanged for the ids that ask.

Each device asks the owner of every distinct id that it has for one row, and receives the rows in
buffers of a fixed size, by an all-to-all. Where so many ids of a device fall on one owner that its
buffer does not hold them, the exchange is repeated until all are served: no id is ever dropped.
Gradients go back the same way, after each device has summed those of its equal ids. A
reduce-scatter of the rows of all ids would move nearly R times as many bytes on R devices.

Shapes: V rows of the table, D width, B rows of the batch, N ids of a device, R devices, K rows that
a device may ask of another at a time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.ops.numerics import wide
from jaxtrain.ops.per_device import not_taken_over, split_over
from jaxtrain.sharding.placement import sizes_are_final


def take_rows(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns ``table[ids]``, and zeros without a gradient for ids outside 0 .. V - 1.

    On a mesh the table is split by its rows over the logical axis ``rows``: the axes that split the
    batch, and ``tensor``, each of whose devices asks for a part of the ids. Gradients are summed in
    float32, over the equal ids of a device in their order, then over devices in theirs.

    Args:
      table_VD: V a multiple of the number of these devices.
      ids: int32 [B, ...].

    Returns:
      [B, ..., D], split over ``rows``; :func:`jaxtrain.constrain` splits it as the batch is.

    >>> take_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, -1, 1])).tolist()
    [[2.0], [0.0], [2.0]]
    """
    axes, parts = axes_of_rows(len(table_VD))
    return _take(axes, table_VD, divided(ids, parts))[: len(ids)]


def axes_of_rows(V: int) -> tuple[tuple[str, ...], int]:
    """The axes of the ambient mesh that split V rows, and the number of parts; an estimate, which
    is for no size, has none."""
    axes, parts = split_over("rows")
    return (axes, parts) if V % parts == 0 and sizes_are_final() else ((), 1)


def divided(ids: jax.Array, parts: int) -> jax.Array:
    """Ids [B, ...] and as many of -1 behind them as make the parts even."""
    return jnp.pad(ids, [(0, -len(ids) % parts)] + [(0, 0)] * (ids.ndim - 1), constant_values=-1)


def on_devices(axes: tuple[str, ...], function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over the leading axis of its arguments and results, each part on a device."""
    specs = {"in_specs": P(axes), "out_specs": P(axes), "axis_names": not_taken_over()}
    # Derivatives are written out, and what is summed is said by hand.
    return jax.shard_map(function, **specs, check_vma=False) if axes else function


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(axes: tuple[str, ...], table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    def of_device(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
        if not axes:
            return table_VD.at[known(ids, len(table_VD))].get(mode="fill", fill_value=0)
        place_N, waves, buffers = _routes(axes, len(table_VD), ids.reshape(-1))

        def receive(wave: jax.Array, rows_ND: jax.Array) -> jax.Array:
            place_RK, here_RK = buffers(wave)
            answers_RKD = table_VD.at[here_RK].get(mode="fill", fill_value=0)
            return rows_ND.at[place_RK].set(_exchange(axes, answers_RKD), mode="drop")

        rows_ND = jnp.zeros((ids.size, table_VD.shape[1]), table_VD.dtype)
        rows_ND = jax.lax.fori_loop(0, waves, receive, rows_ND)
        return rows_ND[place_N].reshape(*ids.shape, -1)

    return on_devices(axes, of_device)(table_VD, ids)


def _forward(axes: tuple[str, ...], table_VD: jax.Array, ids: jax.Array) -> Any:
    return _take(axes, table_VD, ids), (ids, jnp.zeros_like(table_VD, shape=(len(table_VD), 0)))


def _backward(axes: tuple[str, ...], saved: Any, d_rows: jax.Array) -> tuple[jax.Array, None]:
    def of_device(ids: jax.Array, like: jax.Array, d_rows: jax.Array) -> jax.Array:
        V, D, dtype = len(like), d_rows.shape[-1], wide(d_rows.dtype)
        d_rows, sums_VD = d_rows.astype(dtype), jnp.zeros((V, D), dtype)
        if not axes:
            return sums_VD.at[known(ids, V)].add(d_rows, mode="drop")
        place_N, waves, buffers = _routes(axes, V, ids.reshape(-1))
        own_ND = jnp.zeros((ids.size, D), dtype).at[place_N].add(d_rows.reshape(-1, D))

        def receive(wave: jax.Array, sums_VD: jax.Array) -> jax.Array:
            place_RK, here_RK = buffers(wave)
            sent_RKD = own_ND.at[place_RK].get(mode="fill", fill_value=0)
            return sums_VD.at[here_RK].add(_exchange(axes, sent_RKD), mode="drop")

        return jax.lax.fori_loop(0, waves, receive, sums_VD)

    return on_devices(axes, of_device)(*saved, d_rows).astype(saved[1].dtype), None


_take.defvjp(_forward, _backward)


def _routes(axes: tuple[str, ...], V: int, ids_N: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the place of each id among the distinct ones, the number of waves, and a function of
    a wave to the places that it asks for [R, K], N for none, and the rows here that others do."""
    R, N = jax.lax.axis_size(axes), len(ids_N)
    K = buffer_rows(N, R)
    found_N, place_N = distinct(known(ids_N, R * V), R * V)
    first_R1 = jnp.searchsorted(found_N, V * jnp.arange(R + 1)).astype(jnp.int32)
    most = jax.lax.pmax((first_R1[1:] - first_R1[:-1]).max(), axes)

    def buffers(wave: jax.Array) -> tuple[jax.Array, jax.Array]:
        place_RK = first_R1[:-1, None] + wave * K + jnp.arange(K)
        place_RK = jnp.where(place_RK < first_R1[1:, None], place_RK, N)
        asked_RK = _exchange(axes, found_N.at[place_RK].get(mode="fill", fill_value=-1))
        here_RK = asked_RK - jax.lax.axis_index(axes) * V
        return place_RK, jnp.where(asked_RK < 0, V, here_RK)

    return place_N, -(-most // K), buffers


def _exchange(axes: tuple[str, ...], x_RK: jax.Array) -> jax.Array:
    """Part r goes to device r, whose part for this device comes in its place."""
    return jax.lax.all_to_all(x_RK, axes, 0, 0, tiled=True)


def buffer_rows(ids: int, parts: int) -> int:
    """Returns K: the mean of distinct ids that fall on owners at random, and four deviations.

    >>> buffer_rows(4096, 8)
    603
    """
    return min(ids, math.ceil(ids / parts + 4 * math.sqrt(ids / parts)))


def known(ids: jax.Array, rows: int) -> jax.Array:
    """Returns the ids, with ``rows`` for those that a table of so many rows lacks."""
    return jnp.where((ids >= 0) & (ids < rows), ids, rows)


def distinct(ids_N: jax.Array, none: int) -> tuple[jax.Array, jax.Array]:
    """Returns the distinct ids in order, filled up to N with ``none``, which none is above, and the
    place of each of the N ids among them.

    >>> [x.tolist() for x in distinct(jnp.array([7, 3, 9, 3]), 9)]
    [[3, 7, 9, 9], [1, 0, 2, 0]]
    """
    order_N = jnp.argsort(ids_N)
    sorted_N = ids_N[order_N]
    is_new_N = jnp.concatenate([jnp.ones(1, bool), sorted_N[1:] != sorted_N[:-1]])
    place_N = jnp.cumsum(is_new_N, dtype=jnp.int32) - 1
    found_N = jnp.full_like(ids_N, none).at[place_N].set(sorted_N)
    return found_N, jnp.zeros_like(place_N).at[order_N].set(place_N)
