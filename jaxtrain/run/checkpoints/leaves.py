"""The leaves of a state between a checkpoint and the devices: by path, raw, and put back."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.sharding.offload import on_devices
from jaxtrain.sharding.specs import names_of, spread
from jaxtrain.sharding.stack import LayerOrder, StackedLeaf
from jaxtrain.tree import path_name

with epy.lazy_imports():  # a fifth of ``import jaxtrain``
    import orbax.checkpoint as ocp


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by the names of their paths; raises ValueError where a leaf has
    no path, or two have the same."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if not name:
            raise ValueError("the state is a bare leaf without a path; put it in a dict")
        if name in named:
            raise ValueError(f"two leaves of the state share the path {name!r}; rename one of them")
        named[name] = leaf
    return named


def bare(leaf: Any) -> Any:
    """Returns the array, concrete or abstract, that a leaf is or a ``StackedLeaf`` holds."""
    return leaf.array if isinstance(leaf, StackedLeaf) else leaf


def raw_array(leaf: Any) -> Any:
    """Returns the array whose bytes stand for the leaf: a PRNG key's words, else the leaf."""
    leaf = bare(leaf)
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if manifests.is_key(leaf) else leaf
    return np.asarray(leaf)


def shape_in_file(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of a manifest entry's array as it was written."""
    return tuple(entry.get("cut", entry["shape"]))


def portions(
    saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> list[dict[str, "ocp.RestoreArgs"]]:
    """Returns what Orbax is to read at a time, and where to: all leaves at once, and each by itself
    whose order in the file needs more room on a device than its own does."""
    together: dict[str, Any] = {}
    alone = []
    for name, leaf in wanted.items():
        args, whole = _restore_args(saved[name], bare(leaf))
        if whole:
            alone.append({name: args})
        else:
            together[name] = args
    return [together, *alone] if together else alone


def laid_out(entry: Mapping[str, Any], array: Any, leaf: Any) -> Any:
    """Returns an array as read in the order and place of ``leaf``: itself, or a copy."""
    there, here = (
        LayerOrder(tuple(entry["shape"][:1])) if order is None else order
        for order in (manifests.order_in_file(entry), getattr(leaf, "order", None))
    )
    if there == here and there.rows is None:
        return array
    if isinstance(array, np.ndarray):
        return here.split(there.join(array))
    return _moved(there, here, bare(leaf).sharding)(array)


@functools.cache
def _moved(there: LayerOrder, here: LayerOrder, sharding: jax.sharding.Sharding) -> Any:
    # Leaf by leaf: in one program XLA holds the temporary copies of all of them at once.
    def move(x: jax.Array) -> jax.Array:
        return here.split(there.join(on_devices(x)))

    return jax.jit(move, out_shardings=sharding)


def placed_as(given: Any, leaf: Any) -> Any:
    """Returns a given array where ``leaf`` is to live; on the host where that says nothing."""
    sharding = _sharding(bare(leaf))
    return np.asarray(given) if sharding is None else jax.device_put(given, sharding)


def finish_leaf(entry: Mapping[str, Any], restored: Any, leaf: Any) -> Any:
    """Turns what was read into a leaf of the kind that ``leaf`` is."""
    leaf = bare(leaf)
    if manifests.is_number(leaf):
        return manifests.decode(entry)
    if restored is None:  # not in the array file: a number, or an array without elements
        restored = _from_manifest(entry, leaf)
    if isinstance(leaf, np.generic):
        return np.asarray(restored)[()]
    if isinstance(leaf, np.ndarray):
        return restored
    sharding, is_key = _sharding(leaf), manifests.is_key(leaf)
    if isinstance(restored, np.ndarray):
        if is_key or sharding is None:
            restored = jax.numpy.array(restored)
        else:
            restored = jax.make_array_from_callback(leaf.shape, sharding, restored.__getitem__)
    if not is_key:
        return restored
    keys = jax.random.wrap_key_data(restored, impl=entry["impl"])
    return keys if sharding is None else jax.device_put(keys, sharding)


def _from_manifest(entry: Mapping[str, Any], leaf: Any) -> np.ndarray:
    if "value" in entry:
        return np.full((), manifests.decode(entry), leaf.dtype)
    if "impl" in entry:
        words = jax.random.key_data(jax.random.key(0, impl=entry["impl"]))
        return np.zeros((*leaf.shape, *words.shape), words.dtype)
    return np.zeros(leaf.shape, leaf.dtype)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Returns a leaf's target sharding; None for the host and for arrays bound to no device."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _restore_args(entry: Mapping[str, Any], leaf: Any) -> tuple["ocp.RestoreArgs", bool]:
    sharding, shape = _sharding(leaf), shape_in_file(entry)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray), False
    if manifests.is_key(leaf):
        # A key's words are one more dimension, unsharded, which the leaf's sharding leaves out.
        return ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.dtype("uint32")), False
    whole = False
    if shape != leaf.shape and isinstance(sharding, NamedSharding):
        # Split by layers there too, where they divide, or else along another axis.
        axis, axis_there = (len(x) - len(entry["shape"]) for x in (leaf.shape, shape))
        spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))
        layers, mesh = names_of(spec[axis]), sharding.mesh
        whole = shape[axis_there] % math.prod(mesh.shape[name] for name in layers) != 0
        spec = P(*[None] * axis_there, None if whole else spec[axis], *spec[axis + 1 :])
        if whole:
            spec, before = spread(spec, shape, mesh, layers), spec
            whole = spec == before
        sharding = NamedSharding(mesh, spec)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=leaf.dtype), whole
