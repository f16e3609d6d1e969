"""What several operations share: the dtype of sums, the value of masked scores, and dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel.placement import row_numbers

# Finite, so that its exponential is 0 and no difference of two masked scores is a NaN.
MASKED = float(-0.7 * np.finfo(np.float32).max)


def wide(dtype) -> jnp.dtype:
    """The dtype of sums and statistics: at least float32 (float64 stays)."""
    return jnp.promote_types(dtype, jnp.float32)


def drop(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Inverted dropout; ``rng`` None, or rate 0, leaves ``x`` alone.

    Every row [B, ...] draws with a key of its own, by its number in the microbatch, so that a
    device which has some of the rows drops what one that has all of them does.
    """
    if rng is None or rate == 0.0:
        return x

    keep = drawn_by_row(rng, row_numbers(x.shape[0]), 1.0 - rate, x.shape[1:])
    return jnp.where(keep, x / (1.0 - rate), 0)


# Its name is how a trace tells what it draws from numbers that are drawn in another way.
@functools.partial(jax.jit, static_argnums=(2, 3))
def drawn_by_row(rng: jax.Array, rows_B: jax.Array, p: float, shape: tuple[int, ...]) -> jax.Array:
    """Bernoulli draws [B, *shape], those of a row with a key of its own."""

    def draw(row: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(rng, row), p, shape)

    return jax.vmap(draw)(rows_B)
