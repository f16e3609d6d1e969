"""States of an interleaved pipeline in natural layer order, as checkpoints hold them.

An interleaved pipeline keeps stacked leaves as [V, L / V, ...]; everything else has [L, ...]. A
checkpoint always has the second form, so it restores into any mesh, with any number of virtual
stages or none.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.tree import LAYER_GROUP, map_named

PyTree = Any


def natural_shapes(state: PyTree, virtual: int, *, stacked: str = "blocks") -> PyTree:
    """Returns the shapes and shardings of ``state`` in natural order.

    Args:
      state: shapes with shardings, or arrays, with stacked leaves as [V, L / V, ...].
      virtual: V.
      stacked: the word under which, in every path, stacked leaves stand. What an optimizer keeps
        per layer (:func:`jaxtrain.optim.per_layer`) has its layers in front as well.
    """

    def shape(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = leaf.sharding
        if not _is_stacked(name, leaf, virtual, stacked):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        joined = (leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
        spec = P(*sharding.spec[1:])
        return jax.ShapeDtypeStruct(joined, leaf.dtype, sharding=NamedSharding(sharding.mesh, spec))

    return map_named(shape, state)


def to_natural(state: PyTree, virtual: int, *, stacked: str = "blocks") -> PyTree:
    """Returns a copy of ``state`` in natural order, sharded as :func:`natural_shapes` says."""
    shapes = natural_shapes(state, virtual, stacked=stacked)
    return _reshaped(state, shapes)


def from_natural(state: PyTree, like: PyTree) -> PyTree:
    """Returns a copy of a state in natural order in the shapes and shardings of ``like``."""
    return _reshaped(state, like)


def _reshaped(state: PyTree, like: PyTree) -> PyTree:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    reshape = jax.jit(
        lambda tree: jax.tree.map(lambda x, s: x.reshape(s.shape), tree, like),
        out_shardings=shardings,
    )
    return reshape(state)


def _is_stacked(name: str, leaf: Any, virtual: int, stacked: str) -> bool:
    words = name.split("/")
    layered = stacked in words or any(word.startswith(LAYER_GROUP) for word in words)
    return layered and len(leaf.shape) >= 2 and leaf.shape[0] == virtual
