"""Decoding with a cache: the :class:`Decoder` that generation and serving ask for, and the two
families' own.

A cache is only read within the scan over layers, tile by tile as far as the longest row goes, and
is written once behind it. So nothing copies it, and a token costs what its row holds.

Shapes: B rows, C tokens of a chunk, P prompt (or source) positions, T target positions, S cache
positions, L layers, H query heads, G key and value heads, K features per head, D width, V
vocabulary, N pages of
M positions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxtrain.models import attending, decoder, encoder_decoder, layers, llava
from jaxtrain.models.config import before_stack, deltas_of, group_of
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.delta_net import Past
from jaxtrain.models.encoder_decoder import DecoderBlock, T5Config, distance_bias, embedded, encoded
from jaxtrain.models.llava import LlavaConfig
from jaxtrain.ops.cached import Rounded, Tiles, chunk_attention, whole_attention
from jaxtrain.ops.per_device import split_over
from jaxtrain.ops.rotary import ByRow
from jaxtrain.sharding.placement import constrain, gather

# The token that begins a T5's target: its token of padding.
START = 0


# Positions that one step of attention reads; fewer where a cache has fewer.
TILE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of every layer and position, [L, B, G, S, K]; rows are axis 1 of every leaf.
    Of latent attention, the latent vectors and the rotated parts of keys (G is 1).

    Where a mesh has more parts for heads than there are key and value heads, G counts each as often
    as it takes for every device to have those of its own query heads.

    Args:
      k, v: the rows' own; S is at most ``TILE``, or a multiple of it.
      source: a pytree that stays as prefill made it, such as the keys and values of a source.
      routes: the experts of every layer and position, int32 [L, B, 1, S, J], where they are
        recorded.
      recurrent: of layers of the gated delta rule, which have no keys, what follows the positions
        of each row: inputs of the convolution [L, B, W - 1, F], and states [L, B, H, K, V].
    """

    k: jax.Array
    v: jax.Array
    source: Any = None
    routes: jax.Array | None = None
    recurrent: tuple[jax.Array, jax.Array] | None = None

    def tiles(self, l: jax.Array) -> Tiles:
        """The keys and values of a layer."""
        size = min(self.k.shape[3], TILE)

        def read(t):
            def tile(x):
                _, B, G, _, K = x.shape
                return jax.lax.dynamic_slice(x, (l, 0, 0, t * size, 0), (1, B, G, size, K))[0]

            return tile(self.k), tile(self.v)

        return Tiles(size, read)

    def written(self, new: Sequence[jax.Array], start_B: jax.Array, count_B: jax.Array) -> "Cache":
        """Puts new keys and values [L, B, G, C, K] behind ``start_B`` positions of each row; of
        those beyond ``count_B``, which later ones replace, none is ever seen."""
        del count_B
        # Rows in order, which the partitioner sees: along them nothing is exchanged.
        rows_B1 = jnp.arange(len(start_B))[:, None]
        at_BC = start_B[:, None] + jnp.arange(new[0].shape[3])
        arrays = (self.k, self.v) if self.routes is None else (self.k, self.v, self.routes)
        k, v, *routes = (
            pin_cache(x.at[:, rows_B1, :, at_BC].set(y.transpose(1, 3, 0, 2, 4)))
            for x, y in zip(arrays, new, strict=True)
        )
        return dataclasses.replace(self, k=k, v=v, routes=next(iter(routes), None))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """A :class:`Cache` whose rows lie in pages, which rows may share: [L, N, G, M, K].

    Args:
      k, v: the pages, arrays or :class:`Rounded`; nobody reads the first, which takes what stands
        in padding.
      table: int32 [B, P], the pages of each row in order.
    """

    k: jax.Array | Rounded
    v: jax.Array | Rounded
    table: jax.Array

    def tiles(self, l: jax.Array) -> Tiles:
        """The keys and values of a layer, a page at a time."""

        def read(t):
            pages_B = jax.lax.dynamic_index_in_dim(self.table, t, axis=1, keepdims=False)
            return self.k[l, pages_B], self.v[l, pages_B]

        return Tiles(self.k.shape[3], read)

    def written(self, new: Sequence[jax.Array], start_B: jax.Array, count_B: jax.Array) -> "Pages":
        """As :meth:`Cache.written`."""
        C, M = new[0].shape[3], self.k.shape[3]
        at_BC = start_B[:, None] + jnp.arange(C)
        pages_BC = jnp.take_along_axis(self.table, at_BC // M, axis=1, mode="clip")
        pages_BC = jnp.where(jnp.arange(C) < count_B[:, None], pages_BC, 0)

        def put(x: jax.Array, y: jax.Array) -> jax.Array:
            y = y.transpose(1, 3, 0, 2, *range(4, y.ndim))
            return pin_pages(x.at[:, pages_BC, :, at_BC % M].set(y))

        k, v = jax.tree.map(put, (self.k, self.v), tuple(new))
        return dataclasses.replace(self, k=k, v=v)


class Decoder(Protocol):
    """A model that reads tokens into a cache; hashable, since it is static in compiled programs.

    Args:
      stacks: names of the parameters that are stacks of layers, gathered a layer at a time.
      eod: the token that ends a row where the caller names none; None continues every row.
      log_softmax: makes log-probabilities of logits.
    """

    stacks: Sequence[str]
    eod: int | None
    log_softmax: Callable[[jax.Array], jax.Array]

    def rows(self, tokens_BP: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rows [B, T] that new tokens continue, with their lengths [B], which prefill
        reads: the prompts themselves, or the start of a target."""

    def prefill(
        self, params: Any, tokens_BP: jax.Array, lengths_B: jax.Array, *, room: int, **given: Any
    ) -> tuple[jax.Array, Cache]:
        """Reads prompts, padded on the right: the logits after each one's last token, [B, V]
        float32, and a cache with room for so many new tokens. ``given`` is what prompts have beside
        tokens, such as ``image``."""

    def extend(
        self,
        params: Any,
        cache: Cache | Pages,
        tokens_BC: jax.Array,
        start_B: jax.Array,
        count_B: jax.Array,
    ) -> tuple[jax.Array, Cache | Pages]:
        """Reads a chunk of each row, such as one new token, into a cache filled below ``start_B``.

        Args:
          tokens_BC: int32, of which ``count_B`` are read, and padding follows.
          start_B: int32, the position of each row's first.
          count_B: int32, at least 1.

        Returns:
          The logits after each row's last token, [B, V] float32, and the cache.
        """


def decoder_of(config: DecoderConfig | T5Config | LlavaConfig) -> Decoder:
    """Returns the decoder of a model; raises ValueError for one that writes no tokens."""
    kinds = {DecoderConfig: CausalDecoder, T5Config: SourceDecoder}
    kinds[LlavaConfig] = lambda config: ImageDecoder(config.text, model=config)
    if (kind := kinds.get(type(config))) is None:
        form = type(config).__name__.removesuffix("Config").lower()
        raise ValueError(
            f"a model of the form {form} cannot generate: it writes no tokens; give a decoder or "
            "an encoder-decoder"
        )
    return kind(config)


@dataclasses.dataclass(frozen=True)
class CausalDecoder:
    """The :class:`Decoder` of a :mod:`jaxtrain.models.decoder`: rows continue their prompts.

    With ``record`` its cache has the experts of every position.
    """

    config: DecoderConfig
    record: bool = False
    stacks, eod, log_softmax = ("blocks",), None, staticmethod(jax.nn.log_softmax)

    def rows(self, tokens_BP, lengths_B):
        return tokens_BP, lengths_B

    def prefill(self, params, tokens_BP, lengths_B, *, room, **given):
        def layer(form, layer_params, l, at, x_BPD):
            del at

            def attend(q_BPHK, k_BPGK, v_BPGK, *latent, **sinks):
                # Padding comes after the prompt, where causal attention does not look; its keys in
                # the cache are overwritten before any position may see them.
                qkv = q_BPHK, k_BPGK, v_BPGK
                out_BPHK = attending.row_attention(self.config.block, l, *qkv, **sinks)
                kept = latent or (k_BPGK, v_BPGK)
                return out_BPHK, tuple(_cached(x, self.config.heads) for x in kept)

            attend = Past(count_B=lengths_B) if form.delta else attend
            return self._layer(form, layer_params, l, x_BPD, None, attend)

        x_BPD = self._embedded(params, tokens_BP, **given)
        x_BPD, (kept_LBPGK, recurrent) = self._scan(layer, params, x_BPD)
        room = cache_length(tokens_BP.shape[1] + room) - tokens_BP.shape[1]
        padding = ((0, 0), (0, 0), (0, 0), (0, room), (0, 0))
        kept = (pin_cache(jnp.pad(x.transpose(0, 1, 3, 2, 4), padding)) for x in kept_LBPGK)
        k, v, *routes = kept
        cache = Cache(k, v, None, *routes, recurrent=_pin_recurrent(recurrent))
        return self._logits(params, x_BPD, lengths_B), cache

    def _embedded(self, params, tokens_BP):
        return decoder.embed(self.config, params, {"tokens": tokens_BP})

    def extend(self, params, cache, tokens_BC, start_B, count_B):
        x_BCD, cache = self._extended(params, cache, tokens_BC, start_B, count_B)
        return self._logits(params, x_BCD, count_B), cache

    def extend_every(self, params, cache, tokens_BC, start_B, count_B):
        """As :meth:`extend`, with the logits after every token, [B, C, V]."""
        x_BCD, cache = self._extended(params, cache, tokens_BC, start_B, count_B)
        return decoder.head_logits(self.config, params, x_BCD), cache

    def logits(self, params: Any, tokens_BT: jax.Array) -> jax.Array:
        """The logits [B, T, V] float32 after every token of whole rows."""
        return decoder.logits(self.config, params, tokens_BT)

    def _extended(self, params, cache, tokens_BC, start_B, count_B):
        positions_BC = start_B[:, None] + jnp.arange(tokens_BC.shape[1])

        def layer(form, layer_params, l, at, x_BCD):
            if form.delta:
                ends_LBWF, states_LBHKV = cache.recurrent
                past = Past(None, ends_LBWF[at], states_LBHKV[at], count_B)
                return self._layer(form, layer_params, l, x_BCD, positions_BC, past)
            attend = functools.partial(attending.step_attention, self.config.block, l)
            attend = self._attends(_attend_and_keep(attend, cache, at, start_B))
            return self._layer(form, layer_params, l, x_BCD, positions_BC, attend)

        batch = {"tokens": tokens_BC, "positions": positions_BC}
        x_BCD = decoder.embed(self.config, params, batch)
        x_BCD, (new_LBGCK, recurrent) = self._scan(layer, params, x_BCD)
        cache = cache.written(new_LBGCK, start_B, count_B)
        if recurrent is not None:
            cache = dataclasses.replace(cache, recurrent=_pin_recurrent(recurrent))
        return x_BCD, cache

    def _scan(self, layer: Callable, params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        """Applies ``layer(form, layer_params, l, at, x) -> (x, kept)`` to all layers, where ``at``
        counts those of one kind; returns what they keep: those of attention, and the others."""
        group = group_of(self.config)
        if not any(form.delta for form in group):

            def step(x, params_and_index):
                return layer(group[0], *params_and_index, params_and_index[1], x)

            x, kept = scan_layers(step, x, params["blocks"], self._before(params))
            return x, (kept, None)

        def step(x, params_and_index):
            unit, g = params_and_index
            kept = [], []
            for i, form in enumerate(group):
                own = unit[str(i)] if len(group) > 1 else unit
                at = g * sum(each.delta == form.delta for each in group) + len(kept[form.delta])
                x, new = layer(form, own, g * len(group) + i, at, x)
                kept[form.delta].append(new)
            return x, kept

        x, kept = scan_layers(step, x, params["blocks"], ())
        # What layers of one place in the group keep, [groups, ...], in the order of all layers.
        attended, recurrent = (
            jax.tree.map(lambda *y: jax.lax.collapse(jnp.stack(y, 1), 0, 2), *each)
            for each in (kept[0] or [self._none(x)], kept[1])
        )
        return x, (attended, tuple(recurrent))

    def _none(self, x_BCD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of no layer."""
        B, C, _ = x_BCD.shape
        return tuple(jnp.zeros((0, B, C, G, K), x_BCD.dtype) for G, K in self.config.block.cached)

    def _attends(self, attend: attending.Attend) -> attending.Attend | attending.Absorbed:
        """What its layers attend to a cache with."""
        return attend if self.config.kv_rank is None else attending.Absorbed(attend)

    def _before(self, params):
        """The parameters of the layers before the stack."""
        return [params["dense"][str(l)] for l in range(before_stack(self.config))]

    def _layer(self, form, layer_params, l, x_BCD, positions_BC, attend):
        path, group = "blocks", group_of(self.config)
        if isinstance(l, int):  # before the stack
            form, path = self.config.dense_block, f"dense/{l}"
        elif len(group) > 1:
            path = f"blocks/{next(i for i, each in enumerate(group) if each is form)}"
        block = layers.apply(layers.Block, form, gather(layer_params, path))
        angles = None
        if not form.delta:
            at_BC = jnp.arange(x_BCD.shape[1])[None] if positions_BC is None else positions_BC
            # Rows in a cache, whatever their padding, are too short for dynamic scaling.
            angles = attending.row_angles(self.config.block, l, at_BC, 0)
        x_BCD, kept, routes = block(x_BCD, angles, attend)
        if not self.record:
            return x_BCD, kept
        # Layers before the stack have no experts, and some numbers in their place.
        shape = *x_BCD.shape[:2], self.config.experts_per_token
        chosen = jnp.zeros(shape, jnp.int32) if routes is None else routes.experts_BTJ
        heads = 2 if positions_BC is None else 1  # where a chunk's arrays have them
        return x_BCD, (*kept, jnp.expand_dims(chosen, heads))

    def _logits(self, params, x_BCD, count_B):
        return decoder.head_logits(self.config, params, _last(x_BCD, count_B))[:, 0]


@dataclasses.dataclass(frozen=True)
class ImageDecoder(CausalDecoder):
    """The :class:`Decoder` of a :mod:`jaxtrain.models.llava`: its prompts may have an image."""

    model: LlavaConfig | None = None
    stacks = llava.STACKS

    def _embedded(self, params, tokens_BP, image=None):
        if image is None:
            return super()._embedded(params, tokens_BP)
        return llava.embed_with_images(self.model, params, tokens_BP, image)


@dataclasses.dataclass(frozen=True)
class SourceDecoder:
    """The :class:`Decoder` of a :mod:`jaxtrain.models.encoder_decoder`: its prompts are sources,
    read once, and its rows are targets."""

    config: T5Config
    stacks, eod, log_softmax = ("encoder", "decoder"), 1, staticmethod(jax.nn.log_softmax)

    def rows(self, tokens_BP, lengths_B):
        return jnp.full((len(tokens_BP), 1), START, jnp.int32), jnp.ones_like(lengths_B)

    def prefill(self, params, tokens_BP, lengths_B, *, room):
        k, v = self.read(params, tokens_BP, lengths_B)
        empty = pin_cache(jnp.zeros((*k.shape[:3], cache_length(room), k.shape[4]), k.dtype))
        start_B1, one_B = self.rows(tokens_BP, lengths_B)
        cache = Cache(empty, empty, (k, v, lengths_B[None]))
        return self.extend(params, cache, start_B1, jnp.zeros_like(one_B), one_B)

    def read(
        self, params: Any, tokens_BP: jax.Array, lengths_B: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The keys and the values of sources, [L, B, G, P, K], which every token of a target
        sees."""
        segments = (jnp.arange(tokens_BP.shape[1]) < lengths_B[:, None]).astype(jnp.int32)
        batch = {"source": tokens_BP, "source_segments": segments}
        memory_BPD = encoded(self.config, params, batch)

        def layer(_, cross):
            def keep(q_B1HK, k_BPGK, v_BPGK):
                return q_B1HK, tuple(_cached(x, self.config.heads) for x in (k_BPGK, v_BPGK))

            cross = gather(cross, "decoder/cross")
            attention = layers.apply(attending.Attention, self.config.decoder, cross)
            # Of its result only keys and values are read: XLA computes nothing else.
            return None, attention(memory_BPD[:, :1], None, keep, memory_BPD)[1]

        _, kv_LBPGK = jax.lax.scan(layer, None, params["decoder"]["cross"])
        return tuple(pin_cache(x.transpose(0, 1, 3, 2, 4)) for x in kv_LBPGK)

    def empty(self, rows: int, sources: int, targets: int, dtype: Any) -> Cache:
        """A cache of rows for sources and targets of at most so many tokens."""
        block, L = self.config.decoder, self.config.decoder_layers
        G = math.lcm(block.kv_heads, split_over("heads")[1])
        k, source = (
            jnp.zeros((L, rows, G, length, block.head_dim), dtype)
            for length in (cache_length(targets), sources)
        )
        lengths_1B = jnp.ones((1, rows), jnp.int32)
        return self.pinned(Cache(k, k, (source, source, lengths_1B)))

    def pinned(self, cache: Cache) -> Cache:
        """A cache whose keys and values lie where :func:`pin_cache` has them."""
        *source, lengths_1B = cache.source
        k, v, *source = map(pin_cache, (cache.k, cache.v, *source))
        return Cache(k, v, (*source, lengths_1B))

    def extend(self, params, cache, tokens_BC, start_B, count_B):
        S, (source_k, source_v, lengths_1B) = cache.k.shape[3], cache.source
        seen_BP = jnp.arange(source_k.shape[3]) < lengths_1B[0][:, None]
        bias_HO = distance_bias(self.config, params, "decoder", S)

        def bias(distance_BCS):
            return bias_HO[:, jnp.clip(S - 1 + distance_BCS, 0, 2 * S - 2)].swapaxes(0, 1)

        def attend(l, q_BCHK, k_BGCK, v_BGCK, start_B, tiles):
            return chunk_attention(q_BCHK, k_BGCK, v_BGCK, start_B, tiles, bias=bias, scale=1.0)

        def layer(layer_params, l, x_BCD, attend):
            def attend_to_source(q_BCHK, k_BCGK, v_BCGK):
                del k_BCGK, v_BCGK  # Of the tokens: XLA computes nothing that is not read.
                source = source_k[l], source_v[l]
                return whole_attention(q_BCHK, *source, seen_BP, scale=1.0), None

            block = layers.apply(DecoderBlock, self.config.decoder, gather(layer_params, "decoder"))
            x_BCD, (new, _) = block(x_BCD, x_BCD, attend, attend_to_source)
            return x_BCD, new

        x_BCD = embedded(self.config, params, tokens_BC, None, 1)
        x_BCD, cache = _read(params["decoder"], cache, x_BCD, start_B, count_B, layer, attend)
        last_B1D = _last(x_BCD, count_B)
        return encoder_decoder.head_logits(self.config, params, last_B1D)[:, 0], cache


def check_pages(config: DecoderConfig) -> None:
    """Raises ValueError for a model that keeps more of a row than keys and values in pages."""
    if any(deltas_of(config)):
        raise ValueError(
            f"delta_pattern={config.delta_pattern} gives layers the gated delta rule, whose state "
            "of a row no page of keys holds: generate with it, or serve a model without"
        )


def longest_row(config: Any) -> int | None:
    """Returns how many positions a row may have that is read into a cache; None for any number."""
    return config.seq_len if config.positions == "learned" else _scaled_alike(config)


def unscaled(config: Any, length: int) -> int:
    """Returns the fewer of so many positions and those up to which all rows are scaled alike."""
    most = _scaled_alike(config)
    return length if most is None else min(length, most)


def _scaled_alike(config: Any) -> int | None:
    """The positions of a row up to which all rows are scaled alike; None for any number."""
    scaling = getattr(config, "rope_scaling", None)
    return scaling.length if isinstance(scaling, ByRow) else None


def check_positions(config: Any, length: int) -> None:
    """Raises ValueError for rows of so many positions, read into a cache or padded to the longest
    beside them, which would change their angles."""
    if (most := unscaled(config, length)) < length:
        raise ValueError(
            f"the length of a row is {length}: rope_type dynamic and longrope have other "
            f"frequencies in a row beyond {most}, which padding would change and keys in a cache "
            f"do not follow; ask for at most {most} positions, or use a model of rope_type yarn"
        )


def pin_cache(x: jax.Array) -> jax.Array:
    """A leaf of a cache, split by rows and heads."""
    heads = "heads" if x.ndim > 2 and x.shape[2] > 1 else None  # routes have one for all
    return constrain(x, *(None, "batch", heads, None, None)[: x.ndim])


def pin_pages(x: jax.Array) -> jax.Array:
    """A leaf of pages, split by heads."""
    return constrain(x, *(None, None, "heads", None, None)[: x.ndim])


def cache_length(positions: int) -> int:
    """Returns how many positions a cache for so many has: whole tiles where it has several."""
    return positions if positions <= TILE else -(-positions // TILE) * TILE


def _read(
    stack: Any,
    cache: Cache | Pages,
    x_BCD: jax.Array,
    start_B: jax.Array,
    count_B: jax.Array,
    layer: Callable,
    attend: Callable,
) -> tuple[jax.Array, Cache | Pages]:
    """Applies a stack's layers, each of which attends to its own positions and to the cache.

    Args:
      layer: ``(layer_params, l, x_BCD, attend) -> (x_BCD, new keys and values)``.
      attend: ``(l, q_BCHK, k_BGCK, v_BGCK, start_B, tiles) -> out_BCHK``; sinks by name.
    """

    def step(x_BCD, params_and_index):
        layer_params, l = params_and_index
        of_layer = _attend_and_keep(functools.partial(attend, l), cache, l, start_B)
        return layer(layer_params, l, x_BCD, of_layer)

    x_BCD, new_LBGCK = scan_layers(step, x_BCD, stack, ())
    return x_BCD, cache.written(new_LBGCK, start_B, count_B)


def _attend_and_keep(
    attend: Callable, cache: Cache | Pages, at: jax.Array, start_B: jax.Array
) -> attending.Attend:
    """``attend(q_BCHK, k_BGCK, v_BGCK, start_B, tiles)`` of a chunk to itself and to row ``at`` of
    a cache; hands back what is to be kept of the chunk."""

    def attend_and_keep(q_BCHK, *new, **sinks):
        heads, dtype = q_BCHK.shape[2], cache.k.dtype
        new = [_cached(x, heads).swapaxes(1, 2).astype(dtype) for x in new]
        kept, seen = new, new
        if isinstance(cache.k, Rounded):  # A position reads of its own chunk what later ones do.
            kept = [Rounded.of(x) for x in new]
            seen = [x[:] for x in kept]
        return attend(q_BCHK, *seen, start_B, cache.tiles(at), **sinks), kept

    return attend_and_keep


def _pin_recurrent(recurrent: tuple[jax.Array, jax.Array] | None) -> Any:
    """States split by rows and heads, and inputs of a convolution by rows and features."""
    if recurrent is None:
        return None
    return constrain(recurrent[0], None, "batch", None, "heads"), pin_cache(recurrent[1])


def scan_layers(
    step: Callable, x: jax.Array, stack: Any, before: Sequence[Any]
) -> tuple[jax.Array, Any]:
    """``jax.lax.scan(step, x, (stack, numbers))`` of layers, of which some come ``before`` the
    stack: their numbers are integers."""
    outs = []
    for each in enumerate(before):
        x, out = step(x, each[::-1])
        outs.append(out)
    count = jax.tree.leaves(stack)[0].shape[0]
    x, out = jax.lax.scan(step, x, (stack, len(before) + jnp.arange(count)))
    return x, jax.tree.map(
        lambda *each: jnp.concatenate([*(y[None] for y in each[:-1]), each[-1]]), *outs, out
    )


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
