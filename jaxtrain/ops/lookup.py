"""Rows of a table, looked up by every device in the part of the table that it has.

XLA's partitioner is not asked: within a pipeline the one for TPUs aborts on a lookup that is split
by the table's rows and by the batch's, and everywhere gradients of a table that the axes of the
batch split would be summed whole on every device.

Shapes: B batch, T positions, V rows of the table, D width.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.ops.linear import apply_kernel
from jaxtrain.ops.numerics import wide
from jaxtrain.ops.per_device import not_taken_over, split_over
from jaxtrain.sharding.placement import (
    constrain,
    in_shard_map,
    scatter_sequence,
    sizes_are_final,
    splits_residual,
)
from jaxtrain.sharding.specs import tidy


def embed_lookup(indices: jax.Array, table: Any, rows: str | None = None) -> jax.Array:
    """Returns ``table[indices]``, whose gradient is summed in float32 whatever the table's dtype.

    On a mesh, rows [B, T] of indices give [B, T, D] as a residual stream lies
    (:func:`jaxtrain.sharding.placement.pin_residual`). Every device takes from its part of the
    table what is there, and the parts of a row, of which all but one are zero, are added: moved
    are activations, never the table. Its gradient is scattered over the axes that split its width.

    Args:
      indices: int32, of any shape. One below 0 counts as 0, one beyond V - 1 as that.
      table: [V, D], an array or a :class:`jaxtrain.ops.linear.Kernel`.
      rows: logical axis by which V is split; None for a table of whole columns.
    """
    return apply_kernel(functools.partial(_look_up, rows), indices, table)


def _look_up(rows: str | None, indices: jax.Array, table_VD: jax.Array) -> jax.Array:
    indices = jnp.clip(indices, 0, table_VD.shape[0] - 1)
    if (split := _find_split(rows, indices.shape, table_VD.shape)) is not None:
        return _in_parts(split, table_VD, indices)
    # A table split along its width is gathered first: rows are split over the same devices.
    table_VD = constrain(table_VD, None if in_shard_map() else rows, None)
    narrow = table_VD.dtype != wide(table_VD.dtype)
    found = _in_parts(WHOLE, table_VD, indices) if narrow else table_VD[indices]
    return scatter_sequence(found) if rows is not None and found.ndim == 3 else found


class _Split(NamedTuple):
    """Mesh axes that split a lookup.

    ``table`` has the axes of V, ``batch`` those of B, ``before`` and ``after`` those of T of the
    indices and of the result, ``width`` those over which D of the gradient is scattered.
    """

    table: tuple[str, ...]
    batch: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    width: tuple[str, ...]

    @property
    def scatters(self) -> bool:
        """Whether parts of a row are added up on the device that has it next."""
        return self.before != self.after


WHOLE = _Split((), (), (), (), ())


def _find_split(rows: str | None, indices: Sequence[int], table: Sequence[int]) -> _Split | None:
    """Returns the split of a lookup over the ambient mesh; None leaves it to the partitioner."""
    if jax.sharding.get_abstract_mesh().empty or len(indices) != 2 or not sizes_are_final():
        return None
    (B, T), (V, D) = indices, table

    def axes_of(logical: str | None, size: int) -> tuple[str, ...] | None:
        axes, parts = split_over(logical) if logical else ((), 1)
        return axes if size % parts == 0 else None

    of_table, batch, width = axes_of(rows, V), axes_of("batch", B), axes_of("embed", D)
    batch = () if B == 1 else batch
    before, after = axes_of("sequence", T), axes_of("residual", T)
    if None in (of_table, batch, before):
        return None
    if not splits_residual(T):
        after = before
    elif not of_table:
        before = after
    elif after != (*before, *of_table):
        after = before
    width = tuple(a for a in width or () if a in (*batch, *before))
    if not (of_table or before or width):
        return None
    return _Split(of_table, batch, before, after, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(split: _Split, table_VD: jax.Array, indices_BT: jax.Array) -> jax.Array:
    def rows_of_device(table_VD, indices_BT):
        own_BT = _numbers_here(split, table_VD.shape[0], indices_BT)
        rows_BTD = table_VD.at[own_BT].get(mode="fill", fill_value=0)
        if split.scatters:
            return jax.lax.psum_scatter(rows_BTD, split.table, scatter_dimension=1, tiled=True)
        return jax.lax.psum(rows_BTD, split.table) if split.table else rows_BTD

    given = (_spec(split.table, ()), _spec(split.batch, split.before))
    found = _on_devices(split, rows_of_device, given, _spec(split.batch, split.after, ()))
    return found(table_VD, indices_BT)


def _in_parts_forward(split, table_VD, indices_BT):
    like_V = jnp.zeros((table_VD.shape[0], 0), table_VD.dtype)
    return _in_parts(split, table_VD, indices_BT), (indices_BT, like_V)


def _in_parts_backward(split, saved, d_rows_BTD):
    indices_BT, like = saved
    shape = jax.sharding.get_abstract_mesh().shape
    V = like.shape[0] // math.prod(shape[axis] for axis in split.table)

    def sums_of_device(indices_BT, d_rows_BTD):
        if split.scatters:
            d_rows_BTD = jax.lax.all_gather(d_rows_BTD, split.table, axis=1, tiled=True)
        d_table_VD = _sum_rows(V, _numbers_here(split, V, indices_BT), d_rows_BTD)
        if split.width:
            d_table_VD = jax.lax.psum_scatter(
                d_table_VD, split.width, scatter_dimension=1, tiled=True
            )
        rest = tuple(a for a in (*split.batch, *split.before) if a not in split.width)
        return jax.lax.psum(d_table_VD, rest) if rest else d_table_VD

    given = (_spec(split.batch, split.before), _spec(split.batch, split.after, ()))
    sums = _on_devices(split, sums_of_device, given, _spec(split.table, split.width))
    return sums(indices_BT, d_rows_BTD).astype(like.dtype), None


_in_parts.defvjp(_in_parts_forward, _in_parts_backward)


def _numbers_here(split: _Split, V: int, indices_BT: jax.Array) -> jax.Array:
    """Indices into the V rows of a table that this device has; V for what others have."""
    if not split.table:
        return indices_BT
    own_BT = indices_BT - jax.lax.axis_index(split.table) * V
    return jnp.where((own_BT >= 0) & (own_BT < V), own_BT, V)


def _sum_rows(V: int, indices: jax.Array, d_rows: jax.Array) -> jax.Array:
    """The sum of the cotangents of each of V rows; indices from V on are left out."""
    # A frequent token's row is a sum of thousands: in bfloat16 it would stop growing at 256 terms.
    dtype = wide(d_rows.dtype)
    zeros = jnp.zeros((V, d_rows.shape[-1]), dtype)
    return zeros.at[indices].add(d_rows.astype(dtype), mode="drop")


def _on_devices(split, function, in_specs, out_specs):
    if split == WHOLE:
        return function
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=not_taken_over(),
        # Derivatives are written out, and what is summed is said by hand.
        check_vma=False,
    )


def _spec(*axes: tuple[str, ...]) -> P:
    return P(*map(tidy, axes))
