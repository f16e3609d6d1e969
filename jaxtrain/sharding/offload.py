"""State that lies in the memory of the host, and on the devices only while it is read.

A sharding says so by its memory kind ``pinned_host``, and so do the types of what is traced: a step
finds out by itself what it has to fetch, and what to send back.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxtrain.tree import PyTree, map_named

HOST = "pinned_host"

# Entered around a loss with what casts a layer's weights once they are fetched (a hashable
# function, part of the key of JAX's caches); None leaves them as they are.
casts_fetched = jax.make_user_context(None)


def to_host(
    shardings: PyTree,
    shapes: PyTree,
    mesh: Mesh,
    *,
    asked: str = "offload_optimizer",
    held: Callable[[str], bool] = lambda name: True,
) -> PyTree:
    """Places all leaves but numbers and keys in the memory of their devices' hosts.

    Args:
      shardings: of each leaf.
      shapes: the leaves, or their shapes.
      mesh: whose devices these are.
      asked: the name of the option that asks for it.
      held: says of the path of a leaf whether it goes there.

    Raises:
      ValueError: where the devices cannot read that memory.
    """
    # An abstract mesh has none, and those that are not here may not say what memory they have.
    device = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()] if device else []
    kinds = kinds or [HOST]
    if HOST not in kinds:
        raise ValueError(
            f"`{asked}`: {device.device_kind!r} has memory of the kinds "
            f"{', '.join(kinds)} and none of the kind {HOST}: leave it out"
        )

    def place(name: str, leaf: Any, sharding: Any) -> Any:
        key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        stays = key or not leaf.ndim or not held(name)
        return sharding if stays else sharding.with_memory_kind(HOST)

    return map_named(place, shapes, shardings)


def is_on_host(leaf: Any) -> bool:
    """Whether an array, traced or not, or a shape with a sharding lies in the host's memory."""
    if isinstance(leaf, jax.core.Tracer):
        return jax.typeof(leaf).memory_space == jax.memory.Space.Host
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def on_devices(tree: PyTree, *, after: jax.Array | None = None) -> PyTree:
    """The tree with what lies on the host copied to the devices.

    Args:
      tree: arrays.
      after: a number that is not negative, and is computed before anything is copied. Without it a
        compiler begins to copy at once, and holds the copies for the whole program.
    """
    if not (held := [x for x in jax.tree.leaves(tree) if is_on_host(x)]):
        return tree

    def fetch(held: list[jax.Array]) -> list[jax.Array]:
        return jax.device_put(held, jax.memory.Space.Device)

    if after is None:
        copies = iter(fetch(held))
    else:
        # A barrier does not keep XLA's TPU compiler from copying early; a branch does.
        zeros = lambda held: [jax.numpy.zeros(x.shape, x.dtype) for x in held]  # noqa: E731
        copies = iter(jax.lax.cond(after >= 0, fetch, zeros, held))
    return jax.tree.map(lambda x: next(copies) if is_on_host(x) else x, tree)


def fetched_layer(weights: PyTree) -> PyTree:
    """One layer's weights on the devices, cast as the step's policy says where they were not.

    It belongs inside of what is rematerialised: the backward pass then fetches them again, and
    keeps none.
    """
    if not any(map(is_on_host, jax.tree.leaves(weights))):
        return weights
    cast = casts_fetched.value or (lambda weights: weights)
    return cast(on_devices(weights))


def back_to_host(tree: PyTree, before: PyTree) -> PyTree:
    """The tree with the leaves copied to the host that lay there ``before``."""
    space = jax.memory.Space.Host
    return jax.tree.map(
        lambda x, old: jax.device_put(x, space) if is_on_host(old) else x, tree, before
    )
