"""Slots, rows and leaves: what the program of a pipeline does to arrays between its units."""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.pipeline.tables import NONE
from jaxtrain.sharding.mesh import BATCH_AXES
from jaxtrain.sharding.placement import free_axes
from jaxtrain.tree import PyTree, map_named, named_leaves


def leaves_read(function: Callable, params: PyTree, *args: Any) -> frozenset[str]:
    """The paths of the leaves of ``params`` that ``function(params, *args)`` reads.

    Gradients of the others are zero, and are not to be added up over a vocabulary in every tick.
    """
    jaxpr = jax.make_jaxpr(function)(params, *args).jaxpr
    positions = _inputs_read(jaxpr)
    return frozenset(name for i, name in enumerate(named_leaves(params)) if i in positions)


def _inputs_read(jaxpr: Any) -> set[int]:
    """The positions of the inputs that the outputs depend on; a jitted function is looked into."""
    read = {id(v) for v in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(id(v) in read for v in eqn.outvars):
            continue
        positions = range(len(eqn.invars))
        if eqn.primitive.name in ("jit", "pjit"):
            positions = _inputs_read(eqn.params["jaxpr"].jaxpr)
        read |= {id(eqn.invars[i]) for i in positions}
    return {i for i, v in enumerate(jaxpr.invars) if id(v) in read}


def picked(tree: PyTree, names: Container[str]) -> dict[str, Any]:
    """The leaves whose paths are among ``names``, by path."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if name in names}


def replaced(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    """The tree with ``leaves`` at their paths."""
    return map_named(lambda name, leaf: leaves.get(name, leaf), tree)


def zeros(shapes: PyTree) -> PyTree:
    """Arrays of these shapes and dtypes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def read(buffers: PyTree, slot: jax.Array | int) -> PyTree:
    """Entry ``slot`` of buffers [slots, ...]; of slot -1 the first one, which nobody then uses."""
    at = jnp.maximum(slot, 0)
    return jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, at, 0, keepdims=False), buffers)


def write(buffers: PyTree, slot: jax.Array, values: PyTree) -> PyTree:
    """Puts ``values`` into a slot of buffers [slots, ...]; slot -1 changes nothing.

    >>> write(jnp.zeros(3), jnp.int32(1), jnp.float32(7)).tolist()
    [0.0, 7.0, 0.0]
    """
    at = jnp.maximum(slot, 0)

    def put(buffer, value):
        # A choice between two whole buffers would copy them; between two entries nothing moves.
        value = jnp.where(slot == NONE, read(buffer, at), value)
        return jax.lax.dynamic_update_index_in_dim(buffer, value, at, 0)

    return jax.tree.map(put, buffers, values)


def rows(batch: PyTree, j: jax.Array | int) -> PyTree:
    """Microbatch j of leaves [B, M, ...], or [M] for scalars."""

    def row(x):
        return jax.lax.dynamic_index_in_dim(x, j, min(1, x.ndim - 1), keepdims=False)

    return jax.tree.map(row, batch)


def pin_rows(tree: PyTree, *, axis: int) -> PyTree:
    """Splits an axis of each leaf as rows of batches are; the others are the partitioner's."""
    mesh = jax.sharding.get_abstract_mesh()
    free = free_axes(mesh)
    if not free:
        return tree
    carried = tuple(a for a in BATCH_AXES if a in free)
    parts = math.prod(mesh.shape[a] for a in carried)

    def pin(x: jax.Array) -> jax.Array:
        if jnp.ndim(x) <= axis:
            return x
        entries = [P.UNCONSTRAINED] * x.ndim
        if carried and x.shape[axis] % parts == 0:
            entries[axis] = carried
        return jax.lax.with_sharding_constraint(x, P(*entries))

    return jax.tree.map(pin, tree)
