"""The residuals of a forward pass, as arrays that wait in a buffer for the backward pass.

``jax.vjp`` returns a pytree: its leaves are the residuals of the forward pass. A pipeline writes
those of one unit to a slot and reads them many ticks later. Residuals that are the function's own
parameters, batch or key, which will be at hand again, take no slot.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.engines.pipeline.buffers import zeros
from jaxtrain.tree import PyTree, key_data


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The storage layout of the residuals of ``function(weights, x, context) -> y``.

    Args:
      function: is differentiated with respect to ``weights`` and ``x``.
      treedef: of the pytree that ``jax.vjp`` returns.
      sources: per leaf of it, which leaf of ``(weights, context)`` it is; None for a stored one.
      stored: shapes and dtypes of the stored leaves, keys as raw data.
      keys: per stored leaf, its PRNG implementation; None for what is not a key.
    """

    function: Callable[[PyTree, jax.Array, PyTree], jax.Array]
    treedef: Any
    sources: tuple[int | None, ...]
    stored: tuple[jax.ShapeDtypeStruct, ...]
    keys: tuple[Any, ...]


def residual_layout(
    function: Callable[[PyTree, jax.Array, PyTree], jax.Array],
    weights: PyTree,
    x: Any,
    context: PyTree,
) -> Buffers:
    """Finds out, from shapes alone, what :func:`forward` is going to store.

    Args:
      function: ``(weights, x, context) -> y``.
      weights, x, context: arrays or shapes.

    >>> product = lambda w, x, context: jnp.tanh(x @ w)
    >>> layout = residual_layout(product, jnp.ones((3, 3)), jnp.ones((2, 3)), None)
    >>> sum(source is not None for source in layout.sources)  # w is left out
    1
    """
    found: dict[str, Any] = {}

    def trace(weights, x, context):
        _, pull = jax.vjp(lambda weights, x: function(weights, x, context), weights, x)
        leaves, found["treedef"] = jax.tree.flatten(pull)
        at_hand = [id(leaf) for leaf in jax.tree.leaves((weights, context))]
        found["sources"] = tuple(
            at_hand.index(id(leaf)) if id(leaf) in at_hand else None for leaf in leaves
        )
        stored = _stored(leaves, found["sources"])
        found["keys"] = tuple(_key_implementation(leaf) for leaf in stored)
        return tuple(key_data(jnp.asarray(leaf)) for leaf in stored)

    shapes = jax.eval_shape(trace, weights, x, context)
    return Buffers(function=function, stored=shapes, **found)


def common_buffers(
    layouts: Sequence[Buffers],
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[tuple[int, ...], ...]]:
    """Finds buffers that the residuals of any one of several functions fit into.

    Returns:
      Their shapes and dtypes, and for each layout the buffer of every stored leaf.
    """
    buffers, places = [], []
    for layout in layouts:
        free, mine = list(enumerate(buffers)), []
        for leaf in layout.stored:
            same = (
                item for item in free if (item[1].shape, item[1].dtype) == (leaf.shape, leaf.dtype)
            )
            if (found := next(same, None)) is None:
                found = (len(buffers), leaf)
                buffers.append(leaf)
            else:
                free.remove(found)
            mine.append(found[0])
        places.append(tuple(mine))
    return tuple(buffers), tuple(places)


def forward(
    layout: Buffers, weights: PyTree, x: jax.Array, context: PyTree
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns ``function(weights, x, context)`` and the residuals to be stored."""
    y, pull = jax.vjp(lambda weights, x: layout.function(weights, x, context), weights, x)
    leaves = jax.tree.leaves(pull)
    return y, tuple(key_data(jnp.asarray(leaf)) for leaf in _stored(leaves, layout.sources))


def pullback(
    layout: Buffers, weights: PyTree, context: PyTree, stored: tuple[jax.Array, ...]
) -> Callable[[jax.Array], tuple[PyTree, jax.Array]]:
    """Returns ``d_y -> (d_weights, d_x)`` from what :func:`forward` returned.

    Args:
      weights, context: as they were for :func:`forward`.
    """
    at_hand = jax.tree.leaves((weights, context))
    waiting = iter(
        leaf if key is None else jax.random.wrap_key_data(leaf, impl=key)
        for leaf, key in zip(stored, layout.keys, strict=True)
    )
    leaves = [next(waiting) if s is None else at_hand[s] for s in layout.sources]
    return jax.tree.unflatten(layout.treedef, leaves)


def skippable(
    function: Callable[[PyTree, PyTree, PyTree], PyTree],
    choose: Callable[[jax.Array, Callable, Callable], tuple],
) -> Callable[[jax.Array, PyTree, PyTree, PyTree], PyTree]:
    """Makes ``(present, weights, x, context) -> y``, which is ``x`` where ``present`` is false.

    Only ``weights`` and ``x`` have cotangents. Where ``jax.cond`` itself is differentiated, weights
    that its branches read become residuals, copied for each layer of a loop; here they stay at
    hand.

    Args:
      function: ``(weights, x, context) -> y``, with ``y`` like ``x``.
      choose: ``(condition, do, otherwise)``, which runs one of the two.
    """

    @jax.custom_vjp
    def call(present, weights, x, context):
        return choose(present, lambda: (function(weights, x, context),), lambda: (x,))[0]

    def fwd(present, weights, x, context):
        layout = residual_layout(function, weights, x, context)
        run = functools.partial(forward, layout, weights, x, context)
        y, kept = choose(present, run, lambda: (x, zeros(layout.stored)))
        return y, (present, weights, context, kept)

    def bwd(residuals, d_y):
        present, weights, context, kept = residuals
        layout = residual_layout(function, weights, d_y, context)
        run = lambda: pullback(layout, weights, context, kept)(d_y)[::-1]  # noqa: E731
        d_x, d_weights = choose(present, run, lambda: (d_y, zeros(weights)))
        return None, d_weights, d_x, None

    call.defvjp(fwd, bwd)
    return call


def _stored(leaves: list, sources: tuple[int | None, ...]) -> list:
    return [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]


def _key_implementation(leaf: Any) -> Any:
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None
