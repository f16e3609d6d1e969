"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864).

Shapes: B batch, T positions, H heads, K features per head.
"""

import jax
import jax.numpy as jnp


def rotary_angles(
    positions_BT: jax.Array, head_dim: int, *, theta: float = 10000.0
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines, float32 [B, T, K/2], of ``position * theta ** (-2 i / K)``.

    Args:
      positions_BT: int32 positions; leading dimensions may be any.
      head_dim: K, even.
      theta: base of the frequencies.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHK: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns each pair of features (i, i + K/2) by its position's angle.

    The pairs are those of the published Llama checkpoints in Hugging Face form; Meta's own files
    pair (2i, 2i + 1), which is the same model with the columns of q and k permuted. The angles and
    the products are float32, the result has the dtype of ``x_BTHK``.

    >>> x_BTHK = jnp.ones((1, 2, 1, 2))
    >>> turned_BTHK = rotate(x_BTHK, rotary_angles(jnp.array([[0, 1]]), 2))
    >>> [round(float(x), 3) for x in turned_BTHK[0, 1, 0]]
    [-0.301, 1.382]
    """
    cos, sin = (a[..., None, :] for a in angles)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)
