"""Beam search: which rows go on after each token, and which have ended best.

Shapes: B prompts, N beams, V vocabulary, T new tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.models.sampling import Own, Sampling, adjusted
from jaxtrain.sharding.placement import constrain

# A score below that of any sequence, which a sum of such scores does not overflow.
WORST = -1e9


class Beams(NamedTuple):
    """The state of a search: beams that go on, and the best that ended.

    What is of B * N rows has the beams of a prompt side by side.
    """

    chosen: jax.Array | None  # [B * N], each beam's last token
    parents: jax.Array | None  # [B, N], the beams that they were before it
    tokens: jax.Array  # [B, N, T]
    scores: jax.Array  # [B, N], falling
    ended_tokens: jax.Array  # [B, N, T]
    ended_scores: jax.Array  # [B, N], falling
    ended: jax.Array  # [B, N]
    hopeful: jax.Array  # [B]
    running: jax.Array | None  # []

    @classmethod
    def begin(cls, sampling: Sampling, rows: int, count: int, beams: int) -> "Beams":
        """Returns a search for ``count`` tokens, before the first."""
        B, N = rows, beams
        tokens, worst = jnp.full((B, N, count), sampling.end, jnp.int32), jnp.full((B, N), WORST)
        return cls(
            chosen=None,
            parents=None,
            tokens=tokens,
            # All beams are alike at first: the others would be the first one again.
            scores=worst.at[:, 0].set(0.0),
            ended_tokens=tokens,
            ended_scores=worst,
            ended=jnp.zeros((B, N), bool),
            hopeful=jnp.ones(B, bool),
            running=None,
        )


def search(
    sampling: Sampling,
    length_penalty: float,
    own: Own,
    step: jax.Array,
    logits: jax.Array,
    now: Beams,
) -> Beams:
    """Chooses each beam's token number ``step`` by its logits [B * N, V], of rows that ``own`` has
    as many of. Temperature and truncations of ``sampling`` are not read."""
    (B, N, count), V = now.tokens.shape, logits.shape[1]
    logs = jax.nn.log_softmax(constrain(logits, "batch", None))
    logs = adjusted(sampling, own, now.tokens.reshape(B * N, count), step, logs)
    sums = (logs.reshape(B, N, V) + now.scores[..., None]).reshape(B, N * V)
    # Twice as many as go on: each beam has one continuation that ends.
    sums, places = jax.lax.top_k(sums, 2 * N)
    beam, chosen = places // V, places % V
    tokens, length = _take(now.tokens, beam).at[:, :, step].set(chosen), step + 1
    ends = sampling.is_end(chosen) | (length >= count)
    scores, on = jax.lax.top_k(sums + jnp.where(ends, WORST, 0.0), N)

    # Ends count among the best N alone, and where they can still be better than what there is.
    counts = ends & (jnp.arange(2 * N) < N)
    new = sums / length**length_penalty
    new += jnp.where(counts, 0.0, WORST) + jnp.where(now.hopeful[:, None], 0.0, WORST)
    ended_scores, best = jax.lax.top_k(jnp.concatenate([now.ended_scores, new], 1), N)
    ended = _take(jnp.concatenate([now.ended, counts], 1), best)
    lowest = jnp.where(ended, ended_scores.min(1, keepdims=True), WORST)
    hopeful = (scores[:, :1] / length**length_penalty > lowest).any(1) & now.hopeful

    parents, chosen = _take(beam, on), _take(chosen, on).reshape(-1)
    return Beams(
        chosen=chosen,
        parents=parents,
        tokens=_take(tokens, on),
        scores=scores,
        ended_tokens=_take(jnp.concatenate([now.ended_tokens, tokens], 1), best),
        ended_scores=ended_scores,
        ended=ended,
        hopeful=hopeful,
        running=hopeful.any() & ~ends.all(),
    )


def take_rows(x: jax.Array, parents_BN: jax.Array, *, axis: int) -> jax.Array:
    """Rows B * N along an axis, each prompt's among its own: between devices none is exchanged."""
    B, N = parents_BN.shape
    split = x.reshape(*x.shape[:axis], B, N, *x.shape[axis + 1 :])
    take = jax.vmap(lambda x, rows: jnp.take(x, rows, axis), (axis, 0), axis)
    return take(split, parents_BN).reshape(x.shape)


def _take(x: jax.Array, indices_BN: jax.Array) -> jax.Array:
    """Rows of each prompt's own."""
    return jax.vmap(lambda x, indices: x[indices])(x, indices_BN)
