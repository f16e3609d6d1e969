"""Numerics that operations share: the dtype of sums, the value of masked scores, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.sharding.placement import row_numbers
from jaxtrain.sharding.row_keys import DRAWN_BY_ROW, key_and_rows

# Finite, so that its exponential is 0 and no difference of two masked scores is a NaN.
MASKED = float(-0.7 * np.finfo(np.float32).max)


def wide(dtype) -> jnp.dtype:
    """The dtype of sums and statistics: at least float32 (float64 stays)."""
    return jnp.promote_types(dtype, jnp.float32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns ``cap * tanh(x / cap)``, which stays below ``cap``; None leaves ``x`` alone.

    >>> soft_cap(jax.numpy.array([0.1, 1e9]), 2.0).round(3)
    Array([0.1, 2. ], dtype=float32)
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: jax.Array, cap: float) -> jax.Array:
    """The derivative of :func:`soft_cap` by its argument, from its result; 0 where that is masked.

    >>> soft_cap_slope(jax.numpy.array([0.0, 1.0, MASKED]), 2.0)
    Array([1.  , 0.75, 0.  ], dtype=float32)
    """
    return 1 - jnp.square(jnp.clip(capped / cap, -1, 1))


def drop(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Inverted dropout; ``rng`` None, or rate 0, leaves ``x`` alone.

    Every row [B, ...] draws with a key of its own, by its number in the whole batch, so that a
    device or a microbatch which has some of the rows drops what one that has all of them does.
    """
    if rng is None or rate == 0.0:
        return x

    keep = drawn_by_row(rng, row_numbers(x.shape[0]), 1.0 - rate, x.shape[1:])
    return jnp.where(keep, x / (1.0 - rate), 0)


def _drawn_by_row(rng: jax.Array, rows_B: jax.Array, p: float, shape: tuple[int, ...]) -> jax.Array:
    """Bernoulli draws [B, *shape], those of a row with a key of its own."""

    key, rows_B = key_and_rows(rng, rows_B)

    def draw(row: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, row), p, shape)

    return jax.vmap(draw)(rows_B)


# Its name is how a trace tells what it draws from numbers that are drawn in another way.
_drawn_by_row.__name__ = DRAWN_BY_ROW
drawn_by_row = jax.jit(_drawn_by_row, static_argnums=(2, 3))
