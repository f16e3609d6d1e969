"""Keys of microbatches: what is drawn row by row is drawn by a row's number in the whole batch.

A key of a microbatch carries two numbers more, its first row and how far its rows are apart,
through whatever a model does to it (``fold_in``, ``split``). :func:`jaxtrain.ops.numerics.drop`
reads them, and so drops the same in any number of microbatches, in a pipeline and on any mesh. A
loss that draws in any other way, reads the data of its key or mixes it with other keys is given
ordinary keys, one for each microbatch.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

from jaxtrain.jaxprs import equations
from jaxtrain.tree import PyTree

# What a trace calls the function of jaxtrain.ops.numerics; no function of a user's has a dot in it.
DRAWN_BY_ROW = "jaxtrain.drawn_by_row"
_DRAWS = ("random_bits", "random_gamma", "random_unwrap", "rng_bit_generator", "rng_uniform")
_PLAIN, _TAG = "threefry2x32", "row"


def _plain(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words[:2], impl=_PLAIN)


def _derived(words: jax.Array, keys: jax.Array) -> jax.Array:
    more = jnp.broadcast_to(words[2:], (*keys.shape, 2))
    return jnp.concatenate([jax.random.key_data(keys), more], -1)


_CARRYING = define_prng_impl(
    key_shape=(4,),
    seed=lambda seed: _derived(jnp.uint32([0, 0, 0, 1]), jax.random.key(seed, impl=_PLAIN)),
    split=lambda words, shape: _derived(words, jax.random.split(_plain(words), shape)),
    random_bits=lambda words, width, shape: jax.random.bits(
        jax.random.fold_in(_plain(words), words[2]), shape, f"uint{width}"
    ),
    fold_in=lambda words, data: _derived(words, jax.random.fold_in(_plain(words), data)),
    name="microbatch",
    tag=_TAG,
)


def microbatch_keys(
    function: Callable[[jax.Array], Any],
    rng: jax.Array,
    microbatches: int,
    *,
    rows: int,
    place: Callable[[Any], tuple[Any, Any]] | None = None,
) -> tuple[Callable, Callable]:
    """Returns a function from the number of a microbatch to its key, and one to a result's shapes.

    ``function`` is what is done with the key of one microbatch, or with that of all, which is
    looked at for draws, and ``rows`` are the rows of its batch. A single microbatch has the step's
    key, ``rng``. Microbatch j of k has rows j, j + k, ...; ``place`` is another function from j to
    the first row and how far rows are apart.
    """

    def ordinary(j: int | jax.Array) -> jax.Array:
        return rng if microbatches == 1 else jax.random.fold_in(rng, j)

    def carrying(j: int | jax.Array) -> jax.Array:
        first, apart = (j, microbatches) if place is None else place(j)
        words = jax.random.key_data(rng)
        if _carries(rng):  # a part of a part
            first, apart = words[2] + words[3] * jnp.uint32(first), words[3] * jnp.uint32(apart)
        words = [words[:2], jnp.stack([jnp.uint32(first), jnp.uint32(apart)])]
        return jax.random.wrap_key_data(jnp.concatenate(words), impl=_CARRYING)

    if microbatches > 1 and (_is_plain(rng) or _carries(rng)):
        # What takes no key but an ordinary one raises here; an error of its own comes again below.
        with contextlib.suppress(Exception):
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(carrying(0))
            if not (draws_otherwise(traced.jaxpr, rows) or any(map(_carries, traced.out_avals))):
                return carrying, lambda: shapes
    return ordinary, lambda: jax.eval_shape(function, ordinary(0))


def key_and_rows(rng: jax.Array, rows_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key by which rows [B] are drawn, and their numbers in the whole batch."""
    if not _carries(rng):
        return rng, rows_B
    words = jax.random.key_data(rng)
    return _plain(words), words[2] + words[3] * rows_B.astype(jnp.uint32)


def row_count(batch: PyTree) -> int:
    """The rows of a batch; 0 where it has none."""
    return max((jnp.shape(x)[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), default=0)


def draws_otherwise(jaxpr: Any, rows: int) -> bool:
    """Whether a traced loss of so many rows draws numbers, and not row by row from a key of the
    kind threefry; to read the data of a key is to draw."""
    # Of keys that are raw data, every operation is between a wrap and an unwrap.
    typed = any(jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key) for v in jaxpr.invars)
    draws = {name for name in _DRAWS if typed or name != "random_unwrap"}

    def by_row(eqn: Any) -> bool:
        # In a vmap there are many keys, or what is counted are no rows. A derivative's trace has
        # the draw in two parts, the first of which has no key.
        given = [v.aval for v in eqn.invars]
        keys = [a for a in given if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)]
        many = any(a.ndim for a in keys) or any(a.ndim > 1 and a.dtype == "uint32" for a in given)
        counts = [v.aval.shape[0] for v in eqn.outvars if v.aval.dtype == bool]
        takes = all(_is_plain(key) or _carries(key) for key in keys or given[:1])
        return takes and not many and all(count == rows for count in counts)

    return any(
        eqn.primitive.name in draws or (eqn.params.get("name") == DRAWN_BY_ROW and not by_row(eqn))
        for eqn in equations(jaxpr, but=DRAWN_BY_ROW)
    )


def draws(jaxpr: Any) -> bool:
    """Whether a traced loss draws numbers at all."""
    by_row = (eqn.params.get("name") == DRAWN_BY_ROW for eqn in equations(jaxpr, but=DRAWN_BY_ROW))
    return draws_otherwise(jaxpr, 0) or any(by_row)


def _carries(key: Any) -> bool:
    return str(key.dtype) == f"key<{_TAG}>"


def _is_plain(key: Any) -> bool:
    """Whether a key, or the default ones where it is raw data, has draws that vmap leaves alone."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return str(key.dtype if typed else jax.random.key(0).dtype) == "key<fry>"
