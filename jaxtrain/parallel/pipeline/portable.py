"""States of an interleaved pipeline in natural layer order, as checkpoints hold them.

An interleaved pipeline keeps stacked leaves as [V, L / V, ...]; everything else has [L, ...]. A
checkpoint always has the second form, so it restores into any mesh, with any number of virtual
stages or none.
"""

import functools
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
    """Returns ``state`` in natural order, sharded as :func:`natural_shapes` says.

    Stacked leaves are copied, one after another; the others are those of ``state`` themselves.
    """
    shapes = natural_shapes(state, virtual, stacked=stacked)
    return jax.tree.map(_reshaped, state, shapes)


def from_natural(state: PyTree, like: PyTree) -> PyTree:
    """Returns a state in natural order in the shapes and shardings of ``like``.

    Stacked leaves are copied, one after another; the others are those of ``state`` themselves.
    """
    return jax.tree.map(_reshaped, state, like)


def _reshaped(leaf: jax.Array, like: Any) -> jax.Array:
    if leaf.shape == like.shape and leaf.sharding == like.sharding:
        return leaf
    return _reshape_to(like.shape, like.sharding)(leaf)


@functools.cache
def _reshape_to(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> Any:
    # Leaf by leaf: in one program XLA holds the temporary copies of all of them at once.
    return jax.jit(lambda x: x.reshape(shape), out_shardings=sharding)


def _is_stacked(name: str, leaf: Any, virtual: int, stacked: str) -> bool:
    words = name.split("/")
    layered = stacked in words or any(word.startswith(LAYER_GROUP) for word in words)
    return layered and len(leaf.shape) >= 2 and leaf.shape[0] == virtual
