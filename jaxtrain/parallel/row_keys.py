"""Keys of microbatches: what is drawn row by row is drawn by a row's number in the whole batch.

A key of a microbatch carries two numbers more, which microbatch of how many it is of, through
whatever a model does to it (``fold_in``, ``split``). :func:`jaxtrain.ops.numerics.drop` reads them,
and so drops the same in any number of microbatches, in a pipeline and on any mesh. A loss that
draws in any other way is given ordinary keys, one for each microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl

from jaxtrain.parallel.placement import row_numbers
from jaxtrain.precision import equations

DRAWN_BY_ROW = "drawn_by_row"  # the function of jaxtrain.ops.numerics, in a trace
_DRAWS = ("random_bits", "random_gamma", "rng_bit_generator", "rng_uniform")
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


def microbatch_keys(rng: jax.Array, microbatches: int, trace: Callable[[], Any]) -> Callable:
    """Returns the function from the number of a microbatch to its key; a single one has the step's.

    ``trace`` gives the jaxpr of what is done with one, or with all, which is looked at for draws.
    """
    if microbatches == 1:
        return lambda j: rng
    if not _is_plain(rng) or draws_otherwise(trace()):
        return lambda j: jax.random.fold_in(rng, j)

    def key(j: int | jax.Array) -> jax.Array:
        words = [jax.random.key_data(rng), jnp.stack([jnp.uint32(j), jnp.uint32(microbatches)])]
        return jax.random.wrap_key_data(jnp.concatenate(words), impl=_CARRYING)

    return key


def key_and_rows(rng: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The key by which rows are drawn, and the numbers [count] of a microbatch's in the batch."""
    rows = row_numbers(count)
    if str(rng.dtype) != f"key<{_TAG}>":
        return rng, rows
    words = jax.random.key_data(rng)
    return _plain(words), words[2] + words[3] * rows.astype(jnp.uint32)


def draws_otherwise(jaxpr: Any) -> bool:
    """Whether a traced loss draws numbers, and not row by row from a key of the kind threefry."""
    return any(
        eqn.primitive.name in _DRAWS
        or (eqn.params.get("name") == DRAWN_BY_ROW and not _is_plain(eqn.invars[0].aval))
        for eqn in equations(jaxpr, but=DRAWN_BY_ROW)
    )


def _is_plain(key: Any) -> bool:
    """Whether a key, or the default ones where it is raw data, has draws that vmap leaves alone."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return str(key.dtype if typed else jax.random.key(0).dtype) == "key<fry>"
