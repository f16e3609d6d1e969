"""Attention to a cache of keys and values, which generation reads.

Shapes: B rows, C positions of a chunk, S keys of a tile or a source, H query heads, G key and value
heads, N = C * H / G queries of a key head, K features per head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.ops.numerics import MASKED, soft_cap, wide
from jaxtrain.ops.tiled import wide_einsum


def whole_attention(
    q_BCHK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, seen_BS: jax.Array, *, scale: float
) -> jax.Array:
    """Attends from C positions of each row to those of S keys that the row sees.

    Returns:
      [B, C, H, K] in the dtype of ``q_BCHK``.
    """
    q_BGNK = _by_key_head(q_BCHK, k_BGSK.shape[1])
    scores = wide_einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK) * scale
    scores = jnp.where(seen_BS[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BGSK.dtype)
    return _by_position(jnp.einsum("bgns,bgsk->bgnk", weights, v_BGSK), q_BCHK.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """Keys or values as whole numbers, with a scale for each position and head: indexed as an array
    is, it gives numbers of ``dtype``.

    Args:
      codes: int8 [..., K].
      scale: float32 [...].

    >>> kept = Rounded.of(jnp.array([[1.0, -2.0], [0.0, 0.0]]))
    >>> kept.codes.tolist(), kept[0].round(2).tolist()
    ([[64, -127], [0, 0]], [1.0099999904632568, -2.0])
    """

    codes: jax.Array
    scale: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: jax.Array) -> "Rounded":
        """Rounds to the nearest of 255 multiples of a 127th of the largest magnitude."""
        wide_x = x.astype(jnp.float32)
        scale = jnp.abs(wide_x).max(-1) / 127
        codes = jnp.round(wide_x / jnp.where(scale == 0, 1, scale)[..., None])
        return cls(codes.astype(jnp.int8), scale, x.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers, [..., K]."""
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> jax.Array:
        codes, scale = self.codes[index], self.scale[index]
        return (codes.astype(jnp.float32) * scale[..., None]).astype(self.dtype)


class Tiles(NamedTuple):
    """Keys and values of earlier positions: ``read(t)`` gives those from ``t * size`` on, two
    arrays [B, G, size, K]."""

    size: int
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def chunk_attention(
    q_BCHK: jax.Array,
    k_BGCK: jax.Array,
    v_BGCK: jax.Array,
    start_B: jax.Array,
    tiles: Tiles,
    *,
    window: int | jax.Array | None = None,
    leading: int = 0,
    bias: Callable[[jax.Array], jax.Array] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Attends causally from C positions of each row to themselves and to all before them.

    The softmax is summed tile by tile (Milakov and Gimelshein 2018,
    https://arxiv.org/abs/1805.02867): the chunk first, then earlier positions in their order. Work
    follows the longest row, and a tile of which a row sees nothing changes no bit of that row.

    Args:
      q_BCHK: queries.
      k_BGCK, v_BGCK: keys and values of the chunk; values may have another number of features.
      start_B: int32, the position of each row's first query; what tiles have from there on is not
        seen.
      tiles: earlier positions.
      window, leading, scale, softcap: as for :func:`attention`; the window may be traced.
      sinks_H: as of :class:`jaxtrain.ops.mask.Mask`.
      bias: of distances [B, C, S], key minus query, what is added to the scores: [B, H, C, S].

    Returns:
      [B, C, H, K] in the dtype of ``q_BCHK``, of as many features as the values have.
    """
    (B, C, H, K), G = q_BCHK.shape, k_BGCK.shape[1]
    q_BGNK = _by_key_head(q_BCHK, G)
    at_BC = start_B[:, None] + jnp.arange(C)

    def see(kept, k_BGSK, v_BGSK, keys_BS, seen_BCS):
        top_BGN, total_BGN, out_BGNK = kept
        distance_BCS = keys_BS[:, None] - at_BC[..., None]
        if window is not None:
            seen_BCS &= (distance_BCS > -window) | (keys_BS < leading)[:, None]
        scores = wide_einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK) * (scale or K**-0.5)
        scores = scores.reshape(B, G, C, H // G, -1)
        if bias is not None:
            scores += bias(distance_BCS).reshape(B, G, H // G, C, -1).swapaxes(2, 3)
        scores = jnp.where(seen_BCS[:, None, :, None], soft_cap(scores, softcap), MASKED)
        scores = scores.reshape(B, G, C * H // G, -1)
        new_top = jnp.maximum(top_BGN, scores.max(-1))
        weights = jnp.where(scores > MASKED, jnp.exp(scores - new_top[..., None]), 0.0)
        # What nobody sees may be another row's, and not finite: 0 times that would be NaN.
        v_BGSK = jnp.where(seen_BCS.any(1)[:, None, :, None], v_BGSK, 0)
        old = jnp.exp(top_BGN - new_top)
        added = wide_einsum("bgns,bgsk->bgnk", weights.astype(v_BGSK.dtype), v_BGSK)
        return new_top, total_BGN * old + weights.sum(-1), out_BGNK * old[..., None] + added

    def read(t, kept):
        keys_S = t * tiles.size + jnp.arange(tiles.size)
        keys_BS = jnp.broadcast_to(keys_S, (B, tiles.size))
        return see(kept, *tiles.read(t), keys_BS, (keys_BS < start_B[:, None])[:, None])

    nothing = jnp.zeros((*q_BGNK.shape[:3], v_BGCK.shape[3]), wide(q_BGNK.dtype))
    kept = nothing[..., 0] + MASKED, nothing[..., 0], nothing
    if sinks_H is not None:
        sinks_GCR = jnp.repeat(sinks_H.astype(nothing.dtype).reshape(G, 1, -1), C, axis=1)
        top_BGN = jnp.broadcast_to(sinks_GCR.reshape(G, -1), nothing.shape[:3])
        kept = top_BGN, jnp.ones_like(top_BGN), nothing
    own_CC = jnp.arange(C) <= jnp.arange(C)[:, None]
    kept = see(kept, k_BGCK, v_BGCK, at_BC, jnp.broadcast_to(own_CC, (B, C, C)))
    count = (start_B.max() + tiles.size - 1) // tiles.size
    _, total_BGN, out_BGNK = jax.lax.fori_loop(0, count, read, kept)
    return _by_position((out_BGNK / total_BGN[..., None]).astype(q_BCHK.dtype), q_BCHK.shape)


def _by_key_head(q_BCHK: jax.Array, G: int) -> jax.Array:
    """Queries [B, G, N, K] of which one product takes those of a key head and all positions."""
    B, C, H, K = q_BCHK.shape
    return q_BCHK.reshape(B, C, G, H // G, K).swapaxes(1, 2).reshape(B, G, -1, K)


def _by_position(out_BGNK: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    (B, C, H, _), (_, G, _, K) = shape, out_BGNK.shape
    return out_BGNK.reshape(B, G, C, -1, K).swapaxes(1, 2).reshape(B, C, H, K)
