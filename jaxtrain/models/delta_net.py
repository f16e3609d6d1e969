"""A layer of linear attention, which keeps a state of fixed size of a row, and no keys: Gated
DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464) in Qwen3-Next's form.

Shapes: B batch, T positions, D width, G heads of queries and keys, H of values, R values' heads of
each, K features of keys and V of values, W taps of the convolution, F = G (2 K + R V) its features.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.attending import check_heads
from jaxtrain.models.config import BlockConfig
from jaxtrain.models.parts import Norm, dense, parts_of, sum_of_parts
from jaxtrain.ops.delta import causal_convolution, gated_delta_rule
from jaxtrain.ops.numerics import wide
from jaxtrain.sharding.placement import constrain

# Added to squared lengths of queries and keys.
LENGTH_EPS = 1e-6
# Of the first decays, exp(-exp(log_rate) softplus(shift)), the least and the most that softplus is;
# as in Mamba 2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).
LEAST, MOST = 1e-3, 0.1


class Past(NamedTuple):
    """What stands before the positions of a row, and which of these count.

    Args:
      segments_BT: int32 document numbers; None means one.
      ends_BWF: inputs of the convolution at the W - 1 positions before; None means zeros.
      state_BHKV: the rule's state; None means an empty one.
      count_B: int32, positions that count, behind which is padding; None means all.
    """

    segments_BT: jax.Array | None = None
    ends_BWF: jax.Array | None = None
    state_BHKV: jax.Array | None = None
    count_B: jax.Array | None = None


class DeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, behind a causal convolution and before a gated
    norm.

    Products are laid out by head of keys, so that a mesh splits them by heads: ``qkvz`` has of each
    the query, the key, and the values and gates of its R heads; ``ba`` their shares and decays.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs) -> None:
        self.heads, self.groups = config.delta_heads, config.delta_key_heads
        self.key_dim, self.value_dim = config.delta_key_dim, config.delta_value_dim
        width, self.taps = config.width, config.delta_taps
        keys, values = self.groups * self.key_dim, self.heads * self.value_dim
        self.qkvz = dense(width, 2 * keys + 2 * values, rngs, bias=False)
        self.ba = dense(width, 2 * self.heads, rngs, bias=False)

        def uniform(least: float, most: float, *shape: int) -> jax.Array:
            return jax.random.uniform(rngs.params(), shape, minval=least, maxval=most)

        bound = self.taps**-0.5
        self.conv = nnx.Param(uniform(-bound, bound, self.taps, 1, 2 * keys + values))
        self.log_rate = nnx.Param(jnp.log(uniform(1.0, 16.0, self.heads)))
        first = jnp.exp(uniform(math.log(LEAST), math.log(MOST), self.heads))
        self.shift = nnx.Param(jnp.log(jnp.expm1(first)))  # of which it is the softplus
        own = dataclasses.replace(config, norm="rmsnorm", norm_offset=False)
        self.norm_out = Norm(own, self.value_dim)
        self.out = dense(values, width, rngs, bias=config.bias, std=config.residual_std)

    @jax.named_scope("attn")
    def __call__(self, x_BTD: jax.Array, angles: Any, attend: Past) -> tuple[jax.Array, Any]:
        """Returns what the layer adds, and of rows whose positions are counted what follows these:
        the last inputs of the convolution [B, W - 1, F], and the state. There are no angles."""
        del angles
        check_heads(self.groups, "key heads of the delta rule")
        (B, T, _), past, R = x_BTD.shape, attend, self.heads // self.groups
        K, V = self.key_dim, self.value_dim
        qkvz, ba = (self._by_group(y, B, T) for y in parts_of(x_BTD, self.qkvz, self.ba))
        inputs_BTF = qkvz[..., : 2 * K + R * V].reshape(B, T, -1)
        ends_BWF = past.ends_BWF
        if ends_BWF is None:
            ends_BWF = jnp.zeros((B, self.taps - 1, inputs_BTF.shape[-1]), inputs_BTF.dtype)
        how = {"segments_BT": past.segments_BT}
        qkv = causal_convolution(inputs_BTF, self._taps(), before_BWF=ends_BWF, **how)
        qkv = self._by_group(jax.nn.silu(qkv), B, T)
        q, k = (_unit(x, R) for x in (qkv[..., :K], qkv[..., K : 2 * K]))
        v = self._by_head(qkv[..., 2 * K :], V)
        ba = ba.astype(wide(ba.dtype))
        beta, decay = (self._by_head(x) for x in (jax.nn.sigmoid(ba[..., :R]), ba[..., R:]))
        rate_H = jnp.exp(self.log_rate[...].astype(ba.dtype))
        decay = -rate_H * jax.nn.softplus(decay + self.shift[...].astype(ba.dtype))
        if past.count_B is not None:
            live_BT1 = (jnp.arange(T) < past.count_B[:, None])[..., None]
            beta, decay = (jnp.where(live_BT1, x, 0) for x in (beta, decay))
        rows = q * K**-0.5, k, v, beta, decay
        y_BTHV, state_BHKV = gated_delta_rule(*rows, state_BHKV=past.state_BHKV, **how)
        z = self._by_head(qkvz[..., 2 * K + R * V :], V)
        y_BTHV = self.norm_out(y_BTHV) * jax.nn.silu(z.astype(wide(z.dtype))).astype(y_BTHV.dtype)
        y_BTHV = constrain(y_BTHV, "batch", "sequence", "heads", None)
        y_BTD, extra = sum_of_parts(self.out, y_BTHV.reshape(B, T, -1)), None
        if past.count_B is not None:
            at_BW1 = (past.count_B[:, None] + jnp.arange(self.taps - 1))[..., None]
            inputs_BTF = jnp.concatenate([ends_BWF.astype(inputs_BTF.dtype), inputs_BTF], 1)
            extra = jnp.take_along_axis(inputs_BTF, at_BW1, axis=1), state_BHKV
        return y_BTD, extra

    def _taps(self) -> jax.Array:
        """The convolution's kernel [W, F], whose features are all queries, all keys and all values,
        in the order of ``qkvz``."""
        conv, keys = self.conv[...], self.groups * self.key_dim
        parts = conv[..., :keys], conv[..., keys : 2 * keys], conv[..., 2 * keys :]
        parts = (x.reshape(len(conv), self.groups, -1) for x in parts)
        taps_WF = jnp.concatenate([*parts], -1).reshape(len(conv), -1)
        return constrain(taps_WF, None, None)  # and so is its gradient, whose features move

    def _by_group(self, x: jax.Array, B: int, T: int) -> jax.Array:
        return constrain(x.reshape(B, T, self.groups, -1), "batch", "sequence", "heads", None)

    def _by_head(self, x_BTG: jax.Array, *features: int) -> jax.Array:
        x = x_BTG.reshape(*x_BTG.shape[:2], self.heads, *features)
        return constrain(x, "batch", "sequence", "heads", *[None] * len(features))


def _unit(x_BTGK: jax.Array, repeats: int) -> jax.Array:
    """Vectors of length 1, float32, as often as there are heads of values."""
    x = x_BTGK.astype(wide(x_BTGK.dtype))
    x *= jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + LENGTH_EPS)
    return constrain(jnp.repeat(x, repeats, axis=2), "batch", "sequence", "heads", None)
