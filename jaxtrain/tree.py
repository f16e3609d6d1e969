"""Pytrees addressed by path: the names that rules, masks, tables and error messages use.

A path is the keys from the root joined by ``/``: ``{"blocks": {"attn": {"q": w}}}`` has the one
path ``blocks/attn/q``. Attributes of dataclasses and named tuples and indices of sequences are keys
too, so the optimizer state of that parameter ends in the same words: ``0/mu/blocks/attn/q``.
"""

from collections.abc import Callable, Container
from typing import Any

import jax

SEPARATOR = "/"
# Begins the word under which an optimizer keeps the state of stacked layers, their counters too.
LAYER_GROUP = "layersx"


def path_name(path: tuple[Any, ...]) -> str:
    """Writes a JAX key path as words joined by ``/``."""
    return jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of ``tree`` by path name, in flattening order.

    >>> named_leaves({"a": {"b": 1}, "c": [2, 3]})
    {'a/b': 1, 'c/0': 2, 'c/1': 3}
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def owner_of(name: str, params: Container[str]) -> str | None:
    """Returns the parameter that a leaf of some state belongs to: whose path its name ends in.

    >>> owner_of("opt_state/0/mu/blocks/w", {"w": 1, "blocks/w": 2})
    'blocks/w'
    """
    words = name.split(SEPARATOR)
    suffixes = (SEPARATOR.join(words[start:]) for start in range(len(words)))
    return next((suffix for suffix in suffixes if suffix in params), None)


def map_named(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps ``function(name, leaf, *rest_leaves)`` over ``tree``; ``rest`` share its structure.

    >>> map_named(lambda name, leaf: name.endswith("bias"), {"w": 1, "bias": 2})
    {'bias': True, 'w': False}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_name(path), *leaves), tree, *rest
    )
