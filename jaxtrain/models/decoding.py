"""Decoding with a cache: the :class:`Decoder` that generation asks for, and the two families' own.

Shapes: B rows, C tokens of a chunk, P prompt (or source) positions, T target positions, S cache
positions, L layers, H query heads, G key and value heads, K features per head, D width, V
vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.models import decoder, encoder_decoder, layers
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.encoder_decoder import DecoderBlock, T5Config, distance_bias, embedded, encoded
from jaxtrain.ops.attention import cached_attention
from jaxtrain.ops.per_device import split_over
from jaxtrain.sharding.placement import constrain, gather

# The token that begins a T5's target: its token of padding.
START = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of every layer and position, [L, B, G, S, K]; rows are axis 1 of every leaf.

    Where a mesh has more parts for heads than there are key and value heads, G counts each as often
    as it takes for every device to have those of its own query heads.

    Args:
      k, v: the rows' own, written token by token.
      source: a pytree that stays as prefill made it, such as the keys and values of a source.
    """

    k: jax.Array
    v: jax.Array
    source: Any = None


class Decoder(Protocol):
    """A model that reads tokens into a cache; hashable, since it is static in compiled programs.

    Args:
      stacks: names of the parameters that are stacks of layers, gathered a layer at a time.
      eod: the token that ends a row where the caller names none; None continues every row.
    """

    stacks: Sequence[str]
    eod: int | None

    def rows(self, tokens_BP: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rows [B, T] that new tokens continue, with their lengths [B], which prefill
        reads: the prompts themselves, or the start of a target."""

    def prefill(
        self, params: Any, tokens_BP: jax.Array, lengths_B: jax.Array, *, room: int
    ) -> tuple[jax.Array, Cache]:
        """Reads prompts, padded on the right: the logits after each one's last token, [B, V]
        float32, and a cache with room for so many new tokens."""

    def extend(
        self,
        params: Any,
        cache: Cache,
        tokens_BC: jax.Array,
        start_B: jax.Array,
        count_B: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Reads a chunk of each row, such as one new token, into a cache filled below ``start_B``.

        Args:
          tokens_BC: int32, of which ``count_B`` are read, and padding follows.
          start_B: int32, the position of each row's first.
          count_B: int32, at least 1.

        Returns:
          The logits after each row's last token, [B, V] float32, and the cache.
        """


def decoder_of(config: DecoderConfig | T5Config) -> Decoder:
    """Returns the decoder of a model; raises ValueError for one that writes no tokens."""
    kinds = {DecoderConfig: CausalDecoder, T5Config: SourceDecoder}
    if (kind := kinds.get(type(config))) is None:
        form = type(config).__name__.removesuffix("Config").lower()
        raise ValueError(
            f"a model of the form {form} cannot generate: it writes no tokens; give a decoder or "
            "an encoder-decoder"
        )
    return kind(config)


@dataclasses.dataclass(frozen=True)
class CausalDecoder:
    """The :class:`Decoder` of a :mod:`jaxtrain.models.decoder`: rows continue their prompts."""

    config: DecoderConfig
    stacks, eod = ("blocks",), None

    def rows(self, tokens_BP, lengths_B):
        return tokens_BP, lengths_B

    def prefill(self, params, tokens_BP, lengths_B, *, room):
        def layer(x_BPD, params_and_index):
            layer_params, l = params_and_index

            def attend(q_BPHK, k_BPGK, v_BPGK):
                # Padding comes after the prompt, where causal attention does not look; its keys in
                # the cache are overwritten before any position may see them.
                out_BPHK = layers.row_attention(self.config.block, l, q_BPHK, k_BPGK, v_BPGK)
                return out_BPHK, tuple(_cached(x, self.config.heads) for x in (k_BPGK, v_BPGK))

            return self._layer(layer_params, l, x_BPD, None, attend)

        x_BPD = decoder.embed(self.config, params, {"tokens": tokens_BP})
        xs = (params["blocks"], jnp.arange(self.config.layers))
        x_BPD, kv_LBPGK = jax.lax.scan(layer, x_BPD, xs)
        padding = ((0, 0), (0, 0), (0, 0), (0, room), (0, 0))
        k, v = (pin_cache(jnp.pad(x.transpose(0, 1, 3, 2, 4), padding)) for x in kv_LBPGK)
        return self._logits(params, x_BPD, lengths_B), Cache(k, v)

    def extend(self, params, cache, tokens_BC, start_B, count_B):
        positions_BC = start_B[:, None] + jnp.arange(tokens_BC.shape[1])

        def layer(layer_params, l, x_BCD, attend):
            return self._layer(layer_params, l, x_BCD, positions_BC, attend)

        batch = {"tokens": tokens_BC, "positions": positions_BC}
        x_BCD = decoder.embed(self.config, params, batch)
        attend = functools.partial(layers.step_attention, self.config.block)
        x_BCD, cache = _read(params["blocks"], cache, x_BCD, positions_BC, layer, attend)
        return self._logits(params, x_BCD, count_B), cache

    def _layer(self, layer_params, l, x_BCD, positions_BC, attend):
        block = layers.apply(layers.Block, self.config.block, gather(layer_params, "blocks"))
        angles = layers.row_angles(self.config.block, l, positions_BC, x_BCD.shape[1])
        return block(x_BCD, angles, attend)

    def _logits(self, params, x_BCD, count_B):
        return decoder.head_logits(self.config, params, _last(x_BCD, count_B))[:, 0]


@dataclasses.dataclass(frozen=True)
class SourceDecoder:
    """The :class:`Decoder` of a :mod:`jaxtrain.models.encoder_decoder`: its prompts are sources,
    read once, and its rows are targets."""

    config: T5Config
    stacks, eod = ("encoder", "decoder"), 1

    def rows(self, tokens_BP, lengths_B):
        return jnp.full((len(tokens_BP), 1), START, jnp.int32), jnp.ones_like(lengths_B)

    def prefill(self, params, tokens_BP, lengths_B, *, room):
        segments = (jnp.arange(tokens_BP.shape[1]) < lengths_B[:, None]).astype(jnp.int32)
        batch = {"source": tokens_BP, "source_segments": segments}
        memory_BPD = encoded(self.config, params, batch)

        def layer(_, cross):
            def keep(q_B1HK, k_BPGK, v_BPGK):
                return q_B1HK, tuple(_cached(x, self.config.heads) for x in (k_BPGK, v_BPGK))

            cross = gather(cross, "decoder/cross")
            attention = layers.apply(layers.Attention, self.config.decoder, cross)
            # Of its result only keys and values are read: XLA computes nothing else.
            return None, attention(memory_BPD[:, :1], None, keep, memory_BPD)[1]

        _, kv_LBPGK = jax.lax.scan(layer, None, params["decoder"]["cross"])
        k, v = (pin_cache(x.transpose(0, 1, 3, 2, 4)) for x in kv_LBPGK)
        empty = pin_cache(jnp.zeros((*k.shape[:3], room, k.shape[4]), k.dtype))
        start_B1, one_B = self.rows(tokens_BP, lengths_B)
        cache = Cache(empty, empty, (k, v, lengths_B[None]))
        return self.extend(params, cache, start_B1, jnp.zeros_like(one_B), one_B)

    def extend(self, params, cache, tokens_BC, start_B, count_B):
        positions_BC = start_B[:, None] + jnp.arange(tokens_BC.shape[1])
        S, (source_k, source_v, lengths_1B) = cache.k.shape[3], cache.source
        seen_BP = jnp.arange(source_k.shape[3]) < lengths_1B[0][:, None]
        bias_HO = distance_bias(self.config, params, "decoder", S)

        def bias_from(position):  # Key s is s - position away.
            return jax.lax.dynamic_slice_in_dim(bias_HO, S - 1 - position, S, axis=1)

        bias_BCHS = jax.vmap(jax.vmap(bias_from))(positions_BC)

        def attend(l, q_BCHK, k_BGSK, v_BGSK, positions_BC):
            form = {"positions_BC": positions_BC, "bias_BCHS": bias_BCHS, "scale": 1.0}
            return cached_attention(q_BCHK, k_BGSK, v_BGSK, **form)

        def layer(layer_params, l, x_BCD, attend):
            def attend_to_source(q_BCHK, k_BCGK, v_BCGK):
                del k_BCGK, v_BCGK  # Of the tokens: XLA computes nothing that is not read.
                source = source_k[l], source_v[l]
                return cached_attention(q_BCHK, *source, seen_BS=seen_BP, scale=1.0), None

            block = layers.apply(DecoderBlock, self.config.decoder, gather(layer_params, "decoder"))
            x_BCD, (cache, _) = block(x_BCD, x_BCD, attend, attend_to_source)
            return x_BCD, cache

        x_BCD = embedded(self.config, params, tokens_BC, None, 1)
        x_BCD, cache = _read(params["decoder"], cache, x_BCD, positions_BC, layer, attend)
        last_B1D = _last(x_BCD, count_B)
        return encoder_decoder.head_logits(self.config, params, last_B1D)[:, 0], cache


def pin_cache(x: jax.Array) -> jax.Array:
    """A leaf of a cache, split by rows and heads."""
    return constrain(x, *(None, "batch", "heads", None, None)[: x.ndim])


def _read(
    stack: Any,
    cache: Cache,
    x_BCD: jax.Array,
    positions_BC: jax.Array,
    layer: Callable,
    attend: Any,
) -> tuple[jax.Array, Cache]:
    """Applies a stack's layers, each of which writes its keys and values and attends to them all.

    Args:
      layer: ``(layer_params, l, x_BCD, attend) -> (x_BCD, cache)``.
      attend: ``(l, q_BCHK, k_BGSK, v_BGSK, positions_BC) -> out_BCHK``.
    """
    # Rows in order, which the partitioner sees: along them nothing is exchanged.
    rows_B1 = jnp.arange(len(x_BCD))[:, None]

    def step(carry, params_and_index):
        (x_BCD, cache), (layer_params, l) = carry, params_and_index

        def write(q_BCHK, *new):
            k, v = (
                pin_cache(whole.at[l, rows_B1, :, positions_BC].set(_cached(x, q_BCHK.shape[2])))
                for whole, x in zip((cache.k, cache.v), new, strict=True)
            )
            out_BCHK = attend(l, q_BCHK, k[l], v[l], positions_BC)
            return out_BCHK, dataclasses.replace(cache, k=k, v=v)

        return layer(layer_params, l, x_BCD, write), None

    # The cache is carried, not scanned over: updated in place, where a scan would copy it.
    return jax.lax.scan(step, (x_BCD, cache), (stack, jnp.arange(len(cache.k))))[0]


def _cached(k_BCGK: jax.Array, heads: int) -> jax.Array:
    """Keys or values as a cache holds them, of those that a layer makes: every device has those of
    its own query heads, of ``heads`` in all."""
    G, (_, parts) = k_BCGK.shape[2], split_over("heads")
    if heads % parts == 0:
        k_BCGK = jnp.repeat(k_BCGK, math.lcm(G, parts) // G, axis=2)
    return constrain(k_BCGK, "batch", None, "heads", None)


def _last(x_BCD: jax.Array, count_B: jax.Array) -> jax.Array:
    """The last position [B, 1, D] that counts in each row."""
    return jax.vmap(lambda x_CD, n: x_CD[n - 1][None])(x_BCD, count_B)
