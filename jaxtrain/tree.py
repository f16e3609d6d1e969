"""Pytrees addressed by path: the names that rules, masks, tables and error messages use.

A path is the keys from the root joined by ``/``: ``{"blocks": {"attn": {"q": w}}}`` has the one
path ``blocks/attn/q``. Attributes of dataclasses and named tuples and indices of sequences are keys
too, so the optimizer state of that parameter ends in the same words: ``0/mu/blocks/attn/q``.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
SEPARATOR = "/"
# Ends the paths of parameters that are 0, whose gradients count what rounding loses.
COUNTS = "rounding_counts"


class LayerGroup(str):
    """The key under which an optimizer keeps the state of so many stacked layers, their counters
    too; ``sizes`` are those of their axes, where the number alone does not say which they are.

    >>> LayerGroup(12), LayerGroup(12, (2, 6)).layers
    ('layersx12', 12)
    """

    layers: int

    def __new__(cls, layers: int, sizes: Sequence[int] = ()) -> "LayerGroup":
        self = super().__new__(cls, "layersx" + "x".join(map(str, sizes or (layers,))))
        self.layers, self._sizes = layers, tuple(sizes)
        return self

    def __getnewargs__(self) -> tuple[int, tuple[int, ...]]:  # for copies
        return self.layers, self._sizes


class LayerRows(NamedTuple):
    """Stacked parameters of which some rows are padding, for optimizers that act per layer.

    Args:
      axes: how many leading axes count rows.
      places: the row of each layer, these axes taken as one.
    """

    axes: int
    places: tuple[int, ...]


class Unnamed:
    """A key of a path that adds no word to it."""


def path_name(path: tuple[Any, ...]) -> str:
    """Writes a JAX key path as words joined by ``/``."""
    path = tuple(key for key in path if not isinstance(key, Unnamed))
    return jax.tree_util.keystr(path, simple=True, separator=SEPARATOR)


def is_count(name: str) -> bool:
    """Whether a parameter of that path stands for counts: its gradient is no part of the loss's."""
    return name.rpartition(SEPARATOR)[2] == COUNTS


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of ``tree`` by path name, in flattening order.

    Raises:
      ValueError: where two have one name.

    >>> named_leaves({"a": {"b": 1}, "c": [2, 3]})
    {'a/b': 1, 'c/0': 2, 'c/1': 3}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    named = {path_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        names = [path_name(path) for path, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two leaves have the path {twice!r}: call one of them differently, where a key like "
            "'a/b' stands beside a key 'a', or a class gives two of its parts one key"
        )
    return named


def named_nodes(kind: Any, tree: Any) -> dict[str, Any]:
    """Returns all that is of a type in ``tree`` by path name, as :func:`nodes_of` does."""
    return {name: x for name, x in named_leaves(tree, is_a(kind)).items() if is_a(kind)(x)}


def by_paths(leaves: Mapping[str, Any], like: Any) -> Any:
    """Returns leaves by path name as a tree like another, with None for those that are left out.

    >>> by_paths({"a/b": 1}, {"a": {"b": 0}, "c": 0})
    {'a': {'b': 1}, 'c': None}
    """
    return map_named(lambda name, _: leaves.get(name), like)


def partition(keep: Callable[[str, Any], bool], tree: Any) -> tuple[Any, Any]:
    """Splits a tree in two: the leaves of which ``keep(name, leaf)`` is true, and the others.

    None stands for what is in the other part; :func:`combine` puts the two together again.

    >>> partition(lambda name, leaf: name == "a", {"a": 1, "b": 2})
    ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    kept = map_named(keep, tree)
    first = jax.tree.map(lambda keep, leaf: leaf if keep else None, kept, tree)
    return first, jax.tree.map(lambda keep, leaf: None if keep else leaf, kept, tree)


def combine(first: Any, second: Any) -> Any:
    """Puts together what :func:`partition` has split.

    >>> combine({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None
    )


def owner_of(name: str, params: Container[str]) -> str | None:
    """Returns the parameter that a leaf of some state belongs to: whose path its name ends in.

    >>> owner_of("opt_state/0/mu/blocks/w", {"w": 1, "blocks/w": 2})
    'blocks/w'
    """
    words = name.split(SEPARATOR)
    suffixes = (SEPARATOR.join(words[start:]) for start in range(len(words)))
    return next((suffix for suffix in suffixes if suffix in params), None)


def map_named(
    function: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Maps ``function(name, leaf, *rest_leaves)`` over ``tree``; ``rest`` share its structure.

    >>> map_named(lambda name, leaf: name.endswith("bias"), {"w": 1, "bias": 2})
    {'bias': True, 'w': False}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_name(path), *leaves), tree, *rest, is_leaf=is_leaf
    )


def is_a(kind: Any) -> Callable[[Any], bool]:
    """Returns the predicate of what is of a type (or one of several), for ``is_leaf``."""
    return lambda x: isinstance(x, kind)


def map_kind(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Maps a function over what is of a type in a tree; other leaves stay.

    >>> map_kind(str, len, {"a": "word", "b": 2.5})
    {'a': 4, 'b': 2.5}
    """
    is_kind = is_a(kind)
    return jax.tree.map(lambda x: function(x) if is_kind(x) else x, tree, is_leaf=is_kind)


def nodes_of(kind: Any, tree: Any) -> list[Any]:
    """Returns all that is of a type in a tree."""
    return list(filter(is_a(kind), jax.tree.leaves(tree, is_leaf=is_a(kind))))


def all_finite(tree: PyTree) -> jax.Array:
    """Returns a bool scalar: no floating-point leaf holds an infinity or a NaN."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()


def select(condition: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Chooses between two like pytrees with a bool scalar, leaf by leaf (typed keys too)."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), on_true, on_false)


def to_accum_dtype(tree: PyTree) -> PyTree:
    """Casts to the dtype in which parts are summed: float32, or the leaf's own where wider."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def key_data(x: jax.Array) -> jax.Array:
    """The data of an array of typed keys; any other array as it is."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def name_of(function: Any) -> str:
    """The name by which reports call a function of the user's."""
    function = getattr(function, "func", function)  # of a functools.partial
    return getattr(function, "__name__", type(function).__name__)
