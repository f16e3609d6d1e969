"""A layer's attention as a Flax NNX module, and what it attends to: its own row, or a cache.

Shapes: B batch, T positions, C positions of a chunk, S keys, D width, H query heads, G key and
value heads, K features per head, V of its values, P of those that are rotated and N of the others,
R features of a latent vector.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.config import BlockConfig
from jaxtrain.models.parts import Norm, dense, parts_of, sum_of_parts
from jaxtrain.ops.attention import attention, branch_shares
from jaxtrain.ops.cached import Tiles, chunk_attention
from jaxtrain.ops.linear import merge
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.per_device import split_over
from jaxtrain.ops.rotary import rotary_angles, rotary_frequencies, rotate
from jaxtrain.sharding.placement import constrain

# (q_BTHK, k_BTGK, v_BTGK, ...) -> (out_BTHK, anything): training attends to the row itself,
# generation to a cache that it hands back. Behind the values stands what a cache has in their
# place, and by name, sinks_H, a score of each head that has no key.
Attend = Callable[..., tuple[jax.Array, Any]]
# Of the norms of latent vectors, whatever that of other norms is.
LATENT_EPS = 1e-6


class Absorbed(NamedTuple):
    """What latent attention attends with to a cache of latent vectors: ``attend(q_BCHK, c_BC1R,
    r_BC1P)`` of queries that the product of keys has been taken into, so that R + P is their K and
    R that of the result. No key and no value of a head is ever made."""

    attend: Attend


class Attention(nnx.Module):
    """Multi-head attention with grouped keys and values."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.head_dim = config.heads, config.head_dim
        self.rotated, self.gated = config.rotated, config.out_gate
        width, inner = config.width, config.heads * config.head_dim
        shared = config.kv_heads * config.head_dim
        self.q = dense(width, (1 + self.gated) * inner, rngs, bias=config.qkv_bias)
        self.k = dense(width, shared, rngs, bias=config.qkv_bias)
        self.v = dense(width, shared, rngs, bias=config.qkv_bias)
        self.out = dense(inner, width, rngs, bias=config.bias, std=config.residual_std)
        whole = config.qk_norm == "whole"
        features = (inner, shared) if whole else (config.head_dim, config.head_dim)
        self.norm_q, self.norm_k = (Norm(config, n) if config.qk_norm else None for n in features)
        self.sinks = nnx.Param(jnp.zeros(config.heads)) if config.sinks else None

    @jax.named_scope("attn")
    def __call__(
        self, x_BTD: jax.Array, angles, attend: Attend, memory_BSD: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Attends from ``x_BTD`` to itself, or to another sequence."""
        check_heads(self.heads)
        if memory_BSD is None:
            memory_BSD, parts = x_BTD, parts_of(x_BTD, self.q, self.k, self.v)
        else:
            parts = (*parts_of(x_BTD, self.q), *parts_of(memory_BSD, self.k, self.v))
        (B, T, _), S = x_BTD.shape, memory_BSD.shape[1]
        features = (1 + self.gated) * self.head_dim, self.head_dim, self.head_dim
        q, k, v = (
            constrain(y.reshape(B, length, -1, K), "batch", "sequence", heads, None)
            for y, length, heads, K in zip(
                parts, (T, S, S), ("heads", "kv_heads", "kv_heads"), features, strict=True
            )
        )
        q, gate = q[..., : self.head_dim], q[..., self.head_dim :]
        if self.norm_q is not None:
            q, k = self.norm_q.of_heads(q), self.norm_k.of_heads(k)
        if angles is not None:
            q, k = (self._turned(x, angles) for x in (q, k))
        how = {} if self.sinks is None else {"sinks_H": self.sinks.get_value()}
        out_BTHK, extra = attend(q, k, v, **how)
        if self.gated:
            out_BTHK *= jax.nn.sigmoid(gate)
        out_BTHK = constrain(out_BTHK, "batch", "sequence", "heads", None)
        return sum_of_parts(self.out, out_BTHK.reshape(B, T, -1)), extra

    def _turned(self, x_BTHK: jax.Array, angles: Any) -> jax.Array:
        """Rotated as far as rotary positions go."""
        if self.rotated == self.head_dim:
            return rotate(x_BTHK, angles)
        turned = rotate(x_BTHK[..., : self.rotated], angles)
        return jnp.concatenate([turned, x_BTHK[..., self.rotated :]], -1)


class LatentAttention(nnx.Module):
    """Multi-head latent attention: keys and values of all heads are products of one vector per
    token, but for the last features of keys, which are rotated and shared by all heads.

    What ``attend`` receives behind values is what a cache holds: that vector [B, T, 1, R], and the
    rotated features [B, T, 1, P].
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.head_dim, self.v_dim = config.heads, config.head_dim, config.v_dim
        self.rank, self.rotated = config.kv_rank, config.rope_dim
        self.adjacent = config.rope_pairs == "adjacent"
        width, bias, latent = config.width, config.qkv_bias, config.q_rank or config.width
        inner = config.heads * config.head_dim
        own = dataclasses.replace(config, norm_eps=LATENT_EPS)
        narrow = config.q_rank is not None
        self.q_down = dense(width, latent, rngs, bias=bias) if narrow else None
        self.norm_q = Norm(own, latent) if narrow else None
        self.q = dense(latent, inner, rngs, bias=bias and not narrow)
        self.kv_down = dense(width, self.rank + self.rotated, rngs, bias=bias)
        self.norm_kv = Norm(own, self.rank)
        outputs = config.heads * (self.head_dim - self.rotated + self.v_dim)
        self.kv = dense(self.rank, outputs, rngs, bias=False)
        out = config.heads * self.v_dim
        self.out = dense(out, width, rngs, bias=config.bias, std=config.residual_std)

    @jax.named_scope("attn")
    def __call__(
        self, x_BTD: jax.Array, angles, attend: Attend | Absorbed
    ) -> tuple[jax.Array, Any]:
        """Attends from ``x_BTD`` to itself."""
        check_heads(self.heads)
        B, T, _ = x_BTD.shape
        q, kv = parts_of(x_BTD, self.q if self.q_down is None else self.q_down, self.kv_down)
        if self.q_down is not None:
            q = self.q(self.norm_q(q))
        c, r = kv[..., : self.rank], kv[..., self.rank :]
        c, free = self.norm_kv(c), self.head_dim - self.rotated
        turn = functools.partial(rotate, angles=angles, adjacent=self.adjacent)
        q_BTHK = self._of_heads(q, B)
        q_BTHN, q_BTHP = q_BTHK[..., :free], turn(q_BTHK[..., free:])
        c_BT1R = constrain(c.reshape(B, T, 1, -1), "batch", "sequence", None, None)
        r_BT1P = turn(constrain(r.reshape(B, T, 1, -1), "batch", "sequence", None, None))
        if isinstance(attend, Absorbed):
            up_RHF = merge(self.kv.kernel.get_value()).reshape(self.rank, self.heads, -1)
            q_BTHR = jnp.einsum("bthn,rhn->bthr", q_BTHN, up_RHF[..., :free])
            q_BTHK = jnp.concatenate([q_BTHR, q_BTHP], -1)
            y_BTHR, extra = attend.attend(q_BTHK, c_BT1R, r_BT1P)
            out_BTHV = jnp.einsum("bthr,rhv->bthv", y_BTHR, up_RHF[..., free:])
        else:
            kv_BTHF = self._of_heads(self.kv(c), B)
            r_BTHP = jnp.broadcast_to(r_BT1P, (*kv_BTHF.shape[:3], self.rotated))
            k_BTHK = jnp.concatenate([kv_BTHF[..., :free], r_BTHP], -1)
            q_BTHK = jnp.concatenate([q_BTHN, q_BTHP], -1)
            q_BTHK, k_BTHK = (
                constrain(x, "batch", "sequence", "heads", None) for x in (q_BTHK, k_BTHK)
            )
            out_BTHV, extra = attend(q_BTHK, k_BTHK, kv_BTHF[..., free:], c_BT1R, r_BT1P)
        out_BTHV = constrain(out_BTHV, "batch", "sequence", "heads", None)
        return sum_of_parts(self.out, out_BTHV.reshape(B, T, -1)), extra

    def _of_heads(self, x: jax.Array, B: int) -> jax.Array:
        x_BTHF = x.reshape(B, -1, self.heads, x.shape[-1] // self.heads)
        return constrain(x_BTHF, "batch", "sequence", "heads", None)


def check_heads(heads: int, what: str = "attention heads") -> None:
    """Raises where the mesh is to split heads and cannot: every device would do all of them."""
    axes, parts = split_over("heads")
    if heads % parts:
        raise ValueError(
            f"{heads} {what} are not divisible by mesh axis {' x '.join(axes)} of size "
            f"{parts}: use a divisor of {heads}, or map 'heads' to None in Rules(axes=...)"
        )


def is_local(config: BlockConfig, index: int | jax.Array) -> bool | jax.Array:
    """Whether layer ``index`` has the window: known while tracing where all layers are alike.

    >>> config = BlockConfig(width=8, heads=2, window=4, window_pattern=(True, False))
    >>> is_local(config, jnp.arange(3)).tolist()
    [True, False, True]
    """
    if config.window is None or all(config.window_pattern):
        return config.window is not None
    return jnp.array(config.window_pattern)[index % len(config.window_pattern)]


def row_attention(
    config: BlockConfig,
    index: int | jax.Array,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    rng: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Attention of rows to themselves, as layer ``index`` has it.

    Where some layers have a window, both forms are compiled, each with the mask and the tiles of
    its own, and a branch by the layer's number takes one of them. So a layer with a window costs
    what it would alone, in a scan over layers whose number no program knows beforehand, at any
    place that a pipeline cuts it; a window that is a number in the mask would make every layer
    compute the scores of all keys, and a pattern written out in the scan's body would hold stages
    to whole patterns. Dense layers, and what they exchange, stand outside of the branch: inside is
    what each device does by itself, or with others where a mesh axis ``context`` splits rows.

    Args:
      config, index: the layer.
      q_BTHK, k_BTGK, v_BTGK: queries, keys and values.
      segments_BT: int32 document numbers.
      rng: key for dropout; None means none.
      sinks_H: as of :class:`jaxtrain.ops.mask.Mask`.
    """
    local, pattern = is_local(config, index), config.window_pattern
    known = isinstance(local, bool)
    counts = map(pattern.count, (False, True))
    how = {"windowed": None if known else local, "leading": config.global_tokens or 0}
    mask = Mask(config.causal, config.window, segments_BT, sinks=sinks_H, **how)
    shares = contextlib.nullcontext() if known else branch_shares(*counts)
    with shares:
        return attention(
            q_BTHK,
            k_BTGK,
            v_BTGK,
            mask,
            scale=_scale(config),
            softcap=config.attention_softcap,
            dropout=config.attention_dropout,
            rng=rng,
            implementation=config.attention,
        )


def step_attention(
    config: BlockConfig,
    index: int | jax.Array,
    q_BCHK,
    k_BGCK,
    v_BGCK,
    start_B,
    tiles: Tiles,
    *,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Attention of a chunk of each row to itself and to a cache, as layer ``index`` has it.

    Arguments are those of :func:`jaxtrain.ops.cached.chunk_attention`.
    """
    window = config.window
    if not isinstance(local := is_local(config, index), bool):
        # All of the cache is read in any case, and masked.
        window = jnp.where(local, window, jnp.iinfo(jnp.int32).max)
    form = {"window": window, "leading": config.global_tokens or 0}
    form |= {"scale": _scale(config), "softcap": config.attention_softcap}
    form["sinks_H"] = sinks_H
    if config.kv_rank is not None:
        form["scale"] = form["scale"] or config.head_dim**-0.5

        def both(c_BGSR, r_BGSP):
            return jnp.concatenate([c_BGSR, r_BGSP], -1), c_BGSR

        k_BGCK, v_BGCK = both(k_BGCK, v_BGCK)
        tiles = Tiles(tiles.size, lambda t, read=tiles.read: both(*read(t)))
    return chunk_attention(q_BCHK, k_BGCK, v_BGCK, start_B, tiles, **form)


def row_angles(
    config: BlockConfig, index: int | jax.Array, positions_BT: jax.Array | None, T: int
) -> Any:
    """Rotary angles of layer ``index`` at positions of a row of T, by default 0 .. T - 1; None
    where there are none."""
    if config.rope_theta is None:
        return None
    positions_BT = jnp.arange(T)[None] if positions_BT is None else positions_BT
    frequencies = rotary_frequencies(
        config.rotated, theta=config.rope_theta, scaling=config.rope_scaling, row=T
    )
    magnitude = getattr(config.rope_scaling, "magnitude", 1.0)
    if config.local_rope_theta is not None:
        own = rotary_frequencies(config.rotated, theta=config.local_rope_theta)
        local = is_local(config, index)
        frequencies = jnp.where(local, own, frequencies)
        magnitude = jnp.where(local, 1.0, magnitude).astype(frequencies.dtype)
    angles = rotary_angles(positions_BT, frequencies, magnitude)
    return tuple(constrain(x, "batch", "sequence", None) for x in angles)


def _scale(config: BlockConfig) -> float | None:
    """Returns the scale of attention scores; None where it is the default of attention."""
    scalar, times = config.query_pre_attn_scalar, getattr(config.rope_scaling, "of_scores", 1.0)
    return None if scalar == config.head_dim and times == 1 else times * scalar**-0.5
