"""The leaves of a state between a checkpoint and the devices: by path, raw, and put back."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.tree import path_name

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
else:

    class _Orbax:
        """``orbax.checkpoint``, imported where it is first used: a fifth of ``import jaxtrain``."""

        def __getattr__(self, name: str) -> Any:
            import orbax.checkpoint

            return getattr(orbax.checkpoint, name)

    ocp = _Orbax()


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by the names of their paths.

    Raises:
      ValueError: a leaf has no path, or two have the same.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if not name:
            raise ValueError("the state is a bare leaf without a path; put it in a dict")
        if name in named:
            raise ValueError(f"two leaves of the state share the path {name!r}; rename one of them")
        named[name] = leaf
    return named


def raw_array(leaf: Any) -> Any:
    """Returns the array whose bytes stand for the leaf: a PRNG key's words, else the leaf."""
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if manifests.is_key(leaf) else leaf
    return np.asarray(leaf)


def gather_array(array: Any) -> np.ndarray:
    """Returns a whole array on the host; all processes call it alike."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where the leaf is to live; None for the host and for arrays bound to no device."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def restore_args(entry: Mapping[str, Any], leaf: Any) -> "ocp.RestoreArgs":
    """Tells Orbax where the array of a manifest's entry is to live: where ``leaf`` does."""
    sharding = _sharding(leaf)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    if manifests.is_key(leaf):
        # A key's words are one more dimension, unsharded, which the leaf's sharding leaves out.
        return ocp.ArrayRestoreArgs(sharding=sharding, dtype=np.dtype("uint32"))
    return ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=tuple(entry["shape"]), dtype=leaf.dtype
    )


def finish_leaf(entry: Mapping[str, Any], restored: Any, leaf: Any) -> Any:
    """Turns what was read into a leaf of the kind that ``leaf`` is."""
    if manifests.is_number(leaf):
        return manifests.decode(entry)
    if restored is None:  # not in the array file: a number, or an array without elements
        restored = _from_manifest(entry, leaf)
    if isinstance(leaf, np.generic):
        return np.asarray(restored)[()]
    if isinstance(leaf, np.ndarray):
        return restored
    sharding = _sharding(leaf)
    if isinstance(restored, np.ndarray):
        restored = _place(restored, sharding if not manifests.is_key(leaf) else None)
    if not manifests.is_key(leaf):
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


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.numpy.array(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
