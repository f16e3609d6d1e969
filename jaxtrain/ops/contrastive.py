"""Contrastive losses over all pairs of a batch, of which one tile of logits exists at a time.

Row i of both sides is a pair, and every other row of the global batch is a negative, except rows of
the same number: two pictures with one caption are no negatives of each other.

Shapes: B rows of the global batch, F features of an embedding, N rows of a tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.ops.losses import of_logits
from jaxtrain.ops.numerics import MASKED
from jaxtrain.ops.per_device import split_over


def info_nce(
    a_BF: jax.Array,
    b_BF: jax.Array,
    scale: jax.Array | float,
    mask_B: jax.Array,
    *,
    numbers_B: jax.Array | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums the symmetric InfoNCE over rows: the mean of the cross-entropies of a row's own ``b``
    among all ``b`` and of its own ``a`` among all ``a`` (CLIP, Radford et al. 2021,
    https://arxiv.org/abs/2103.00020).

    Args:
      a_BF, b_BF: float32 embeddings; the logit of two is ``scale * a @ b``.
      scale: a scalar, or an array of one number.
      mask_B: weight of each row; a row with 0 is no negative either.
      numbers_B: int32; rows of the same number are no negatives of each other. None means that all
        rows have different ones.
      chunk: rows of a device in a tile of logits, a divisor of the rows that it has; None takes
        tiles as large as those of :func:`jaxtrain.ops.losses.cross_entropy`.

    Returns:
      The total, and the sums of the mask over rows whose own ``b``, and whose own ``a``, has the
      largest logit; float32 scalars, of which the last two have no gradient.

    Raises:
      ValueError: if ``chunk`` does not divide the rows of a device.

    >>> total, *_ = info_nce(jnp.eye(2), jnp.eye(2), 1.0, jnp.ones(2))
    >>> print(f"{total / 2:.4f}")  # log(1 + exp(-1))
    0.3133
    """

    def losses(logits_NB: jax.Array, own_NB: jax.Array, seen_NB: jax.Array) -> jax.Array:
        all_N = jax.nn.logsumexp(jnp.where(seen_NB, logits_NB, MASKED), axis=1)
        return all_N - jnp.where(own_NB, logits_NB, 0.0).sum(1)

    given = {"mask_B": mask_B, "numbers_B": numbers_B, "chunk": chunk}
    (total_a, hits_a), (total_b, hits_b) = (
        _over_pairs(losses, scale * x, y, **given) for x, y in ((a_BF, b_BF), (b_BF, a_BF))
    )
    return (total_a + total_b) / 2, hits_a, hits_b


def sigmoid(
    a_BF: jax.Array,
    b_BF: jax.Array,
    scale: jax.Array | float,
    bias: jax.Array | float,
    mask_B: jax.Array,
    *,
    numbers_B: jax.Array | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums ``-log sigmoid(z (scale * a @ b + bias))`` over pairs of rows, where z is 1 for a row
    with itself and -1 for a row with a negative (SigLIP, Zhai et al. 2023,
    https://arxiv.org/abs/2303.15343).

    Args and errors are those of :func:`info_nce`; ``bias`` is a number as ``scale`` is.

    Returns:
      The total, and the sum of the mask over rows whose own ``b`` has the largest logit.

    >>> total, _ = sigmoid(jnp.eye(2), jnp.eye(2), 1.0, 0.0, jnp.ones(2))
    >>> print(f"{total / 2:.4f}")  # log(1 + exp(-1)) + log(2)
    1.0064
    """

    def losses(logits_NB: jax.Array, own_NB: jax.Array, seen_NB: jax.Array) -> jax.Array:
        signed_NB = jnp.where(own_NB, -1.0, 1.0) * (logits_NB + bias)
        return jnp.where(seen_NB, jax.nn.softplus(signed_NB), 0.0).sum(1)

    given = {"mask_B": mask_B, "numbers_B": numbers_B, "chunk": chunk}
    return _over_pairs(losses, scale * a_BF, b_BF, **given)


def _over_pairs(
    losses: Callable[..., jax.Array],
    a_BF: jax.Array,
    b_BF: jax.Array,
    *,
    mask_B: jax.Array,
    numbers_B: jax.Array | None,
    chunk: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Sums ``losses(logits_NB, own_NB, seen_NB) -> [N]``, and the rows whose own logit is the
    largest. Rows stay on their devices, and the other side is gathered."""
    B, places_B = len(a_BF), jnp.arange(len(a_BF))
    numbers_B = places_B if numbers_B is None else numbers_B
    mask_B = mask_B.astype(a_BF.dtype)

    def tile(logits_NB: jax.Array, place_N: jax.Array, number_N: jax.Array):
        own_NB = place_N[:, None] == places_B
        seen_NB = own_NB | ((number_N[:, None] != numbers_B) & (mask_B > 0))
        peak_N = jnp.where(seen_NB, logits_NB, MASKED).max(1)
        hit_N = (own_NB & (logits_NB >= peak_N[:, None])).any(1)
        return losses(logits_NB, own_NB, seen_NB), hit_N.astype(logits_NB.dtype)

    parts = split_over("batch")[1]
    parts = parts if B % parts == 0 else 1  # as a batch of so many rows, each of a device
    a_RTF, place_RT, number_RT, mask_RT = (
        x.reshape(parts, B // parts, *x.shape[1:]) for x in (a_BF, places_B, numbers_B, mask_B)
    )
    loss_RT, hit_RT = of_logits(tile, a_RTF, b_BF.T, place_RT, number_RT, chunk=chunk)
    return (loss_RT * mask_RT).sum(), (hit_RT * mask_RT).sum()
