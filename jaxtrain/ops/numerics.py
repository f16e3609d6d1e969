"""What several operations share: the dtype of sums, the value of masked scores, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np

# Finite, so that its exponential is 0 and no difference of two masked scores is a NaN.
MASKED = float(-0.7 * np.finfo(np.float32).max)


def wide(dtype) -> jnp.dtype:
    """The dtype of sums and statistics: at least float32 (float64 stays)."""
    return jnp.promote_types(dtype, jnp.float32)


def drop(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Inverted dropout; ``rng`` None, or rate 0, leaves ``x`` alone."""
    if rng is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0)
