"""Generation from a :mod:`jaxtrain.models.encoder_decoder`: sampling as from a decoder, and beams.

The source is read once: its keys and values, of every layer of the decoder, stay as they are.
``generate_step`` and ``beam_step`` build steps as :mod:`jaxtrain.models.generate` does, of a batch
that ``sources`` makes, for a mesh.

Shapes: B sources, S source positions, T target positions, M layers of the decoder, G key and value
heads, K features per head, N beams, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.models import layers
from jaxtrain.models.encoder_decoder import (
    DecoderBlock,
    Params,
    T5Config,
    attend_with,
    distance_bias,
    embedded,
    encoded,
    head_logits,
)
from jaxtrain.models.generate import (
    Prompts,
    Weights,
    cached,
    check_rows,
    choose_sampling,
    gather_around,
    mark,
    penalise,
    pin_cache,
    write,
)
from jaxtrain.ops.attention import cached_attention
from jaxtrain.sharding.placement import constrain, gather

# What a target begins with: T5's token of padding.
START = 0

# A score below that of any sequence, which a sum of such scores does not overflow.
WORST = -1e9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the target, [M, B, G, T, K], and of the source, [M, B, G, S, K]; which
    source positions are seen, [B, S]."""

    k: jax.Array
    v: jax.Array
    source_k: jax.Array
    source_v: jax.Array
    seen: jax.Array


def generate(
    config: T5Config, params: Params, source: Any, *, max_new_tokens: int, **given: Any
) -> jax.Array:
    """Writes a target for each source.

    Args:
      config, params: the model; it computes in the dtype of ``params``.
      source: int [B, S]; shorter ones are padded on the right with anything.
      max_new_tokens: how many.
      **given: any of what follows.
      rng: key for sampling; not needed at temperature 0.
      source_lengths: int [B]; left out, S for all.
      temperature, top_k, top_p: as for :func:`jaxtrain.models.generate.generate`.
      repetition_penalty: of tokens of the target, and not of the source.
      eod: after this token, 1 where left out, a row is filled with it; None goes on to the end.

    Returns:
      int32 [B, max_new_tokens].

    Raises:
      ValueError: for settings out of range, a missing key, or tokens beyond the vocabulary.
    """
    batch = sources(config, source, max_new_tokens=max_new_tokens, **given)
    return _generated(config, max_new_tokens, Weights(params), batch)


def generate_step(config: T5Config, *, max_new_tokens: int) -> Callable[[Any, Prompts], jax.Array]:
    """Builds ``step(state, batch) -> tokens``, which is what :func:`generate` computes.

    As :func:`jaxtrain.models.generate.generate_step`, of a batch by :func:`sources`.
    """
    return functools.partial(_written, config, max_new_tokens)


def sources(
    config: T5Config,
    source: Any,
    *,
    max_new_tokens: int,
    source_lengths: Any = None,
    **sampling: Any,
) -> Prompts:
    """Checks the arguments of :func:`generate`, with its errors, and makes a batch of them."""
    source_BS, lengths_B = check_rows(config.vocab_size, source, source_lengths, "source")
    sampling, rng = choose_sampling(
        config.vocab_size, max_new_tokens=max_new_tokens, **{"eod": 1} | sampling
    )
    return Prompts(source_BS, lengths_B, rng, sampling)


def beam_search(
    config: T5Config,
    params: Params,
    source: Any,
    *,
    max_new_tokens: int,
    beams: int = 4,
    length_penalty: float = 1.0,
    **given: Any,
) -> tuple[jax.Array, jax.Array]:
    """Searches the most probable target of each source among ``beams`` at a time.

    The search is that of transformers' ``generate(num_beams=..., early_stopping=False)``: of twice
    as many continuations those that end are kept aside, by their log probability divided by
    ``length ** length_penalty``, and the best of the others go on while they may still be better.

    Args:
      config, params, source, max_new_tokens: as for :func:`generate`.
      beams: N; 1 is the greedy choice.
      length_penalty: above 0 favours longer targets.
      **given: source_lengths, eod and, of log probabilities, repetition_penalty, as there.

    Returns:
      int32 [B, max_new_tokens], filled with ``eod``, and the scores [B].

    Raises:
      ValueError: as :func:`generate`.
    """
    form = _form(config, max_new_tokens, beams, length_penalty)
    batch = sources(config, source, max_new_tokens=max_new_tokens, temperature=0.0, **given)
    return _searched(config, form, Weights(params), batch)


def beam_step(
    config: T5Config, *, max_new_tokens: int, beams: int = 4, length_penalty: float = 1.0
) -> Callable[[Any, Prompts], tuple[jax.Array, jax.Array]]:
    """Builds ``step(state, batch) -> (tokens, scores)``: what :func:`beam_search` computes.

    Args:
      config, max_new_tokens, beams, length_penalty: as there.

    Returns:
      As of :func:`generate_step`; of a batch with temperature 0.

    Raises:
      ValueError: for settings out of range.
    """
    form = _form(config, max_new_tokens, beams, length_penalty)
    return functools.partial(_search, config, form)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("cache_len",))
def prefill(
    config: T5Config, params: Params, source_BS: jax.Array, lengths_B: jax.Array, *, cache_len: int
) -> tuple[jax.Array, Cache]:
    """Reads sources and the start of a target: the logits of its first token, and the cache.

    Args:
      source_BS: int32, padded on the right.
      lengths_B: int32, tokens of each source.
      cache_len: T, the most tokens to be read, with the start.
    """
    B, S = source_BS.shape
    seen_BS = jnp.arange(S) < lengths_B[:, None]
    segments = seen_BS.astype(jnp.int32)
    memory_BSD = encoded(config, params, {"source": source_BS, "source_segments": segments})
    bias_HO = distance_bias(config, params, "decoder", 1)
    to_memory = dataclasses.replace(config.decoder, causal=False)

    def layer(x_B1D, layer_params):
        block = layers.apply(DecoderBlock, config.decoder, gather(layer_params, "decoder"))
        x_B1D, kv = block(
            x_B1D,
            memory_BSD,
            attend_with(config.decoder, bias_HO, None, None),
            attend_with(to_memory, None, jnp.ones((B, 1), jnp.int32), segments),
        )
        return x_B1D, jax.tree.map(lambda x: cached(x, config.heads), kv)

    x_B1D = embedded(config, params, jnp.full((B, 1), START, jnp.int32), None, 1)
    x_B1D, (own, source) = jax.lax.scan(layer, x_B1D, params["decoder"])
    own, source = jax.tree.map(lambda x: pin_cache(x.transpose(0, 1, 3, 2, 4)), (own, source))
    room = ((0, 0), (0, 0), (0, 0), (0, cache_len - 1), (0, 0))
    cache = Cache(*(pin_cache(jnp.pad(x, room)) for x in own), *source, seen_BS)
    return head_logits(config, params, x_B1D)[:, 0], cache


def decode_step(
    config: T5Config, params: Params, cache: Cache, tokens_B: jax.Array, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """Reads one token per row: the logits after it, [B, V] float32, and the cache with it.

    Args:
      cache: filled below ``position``.
      tokens_B: int32.
      position: int32, the same for all rows; the start of the target has 0.
    """
    T = cache.k.shape[3]
    bias_HO = distance_bias(config, params, "decoder", T)
    # Key s is s - position away.
    bias_HT = jax.lax.dynamic_slice_in_dim(bias_HO, T - 1 - position, T, axis=1)
    seen_1T = (jnp.arange(T) <= position)[None]

    def layer(carry, params_and_index):
        x_B1D, cache = carry
        layer_params, l = params_and_index

        def attend(q_B1HK, k_B1GK, v_B1GK):
            k, v = (
                pin_cache(whole.at[l, :, :, position].set(cached(new, config.heads)[:, 0]))
                for whole, new in ((cache.k, k_B1GK), (cache.v, v_B1GK))
            )
            form = {"seen_BS": seen_1T, "bias_HS": bias_HT, "scale": 1.0}
            out_BHK = cached_attention(q_B1HK[:, 0], k[l], v[l], **form)
            return out_BHK[:, None], dataclasses.replace(cache, k=k, v=v)

        def attend_to_source(q_B1HK, k_B1GK, v_B1GK):
            del k_B1GK, v_B1GK  # Of the token: XLA computes nothing that is not read.
            source = cache.source_k[l], cache.source_v[l]
            out_BHK = cached_attention(q_B1HK[:, 0], *source, seen_BS=cache.seen, scale=1.0)
            return out_BHK[:, None], None

        block = layers.apply(DecoderBlock, config.decoder, gather(layer_params, "decoder"))
        x_B1D, (cache, _) = block(x_B1D, x_B1D, attend, attend_to_source)
        return (x_B1D, cache), None

    x_B1D = embedded(config, params, tokens_B[:, None], None, 1)
    # The cache is carried, not scanned over: updated in place, where a scan would copy it.
    xs = (params["decoder"], jnp.arange(config.decoder_layers))
    (x_B1D, cache), _ = jax.lax.scan(layer, (x_B1D, cache), xs)
    return head_logits(config, params, x_B1D)[:, 0], cache


def _read(config: T5Config, count: int, state: Any, batch: Prompts) -> tuple[Any, ...]:
    """The parameters, and what is known when the sources are read: the logits of a first token, the
    cache, and which tokens of a target are seen."""
    params = gather_around(state.params, "encoder", "decoder")
    logits_BV, cache = prefill(config, params, batch.tokens, batch.lengths, cache_len=count)
    start_B1 = jnp.full((len(logits_BV), 1), START)
    return params, logits_BV, cache, mark(jnp.zeros(logits_BV.shape, bool), start_B1)


def _written(config: T5Config, count: int, state: Any, batch: Prompts) -> jax.Array:
    params, logits_BV, cache, seen_BV = _read(config, count, state, batch)

    def read(cache, tokens_B, step):
        return decode_step(config, params, cache, tokens_B, step)

    return write(read, count, logits_BV, cache, seen_BV, batch.rng, batch.sampling)


_generated = jax.jit(_written, static_argnums=(0, 1))


class _Form(NamedTuple):
    """The static arguments of a search."""

    count: int
    beams: int
    length_penalty: float


def _form(config: T5Config, count: int, beams: int, length_penalty: float) -> _Form:
    if not 1 <= beams <= config.vocab_size // 2:
        raise ValueError(f"beams={beams} must be from 1 to half of the vocabulary")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} must be a finite number")
    return _Form(count, beams, float(length_penalty))


class _Search(NamedTuple):
    """The state of a search after ``step`` tokens: beams that go on, and the best that ended.

    Logits, caches and tokens seen are of B * N rows, the beams of a source side by side.
    """

    step: jax.Array
    logits: jax.Array
    cache: Cache
    seen: jax.Array  # [B * N, V]
    tokens: jax.Array  # [B, N, T]
    scores: jax.Array  # [B, N], falling
    ended_tokens: jax.Array  # [B, N, T]
    ended_scores: jax.Array  # [B, N], falling
    ended: jax.Array  # [B, N]
    hopeful: jax.Array  # [B]
    running: jax.Array  # []


def _search(
    config: T5Config, form: _Form, state: Any, batch: Prompts
) -> tuple[jax.Array, jax.Array]:
    params, logits_BV, cache, seen_BV = _read(config, form.count, state, batch)
    (B, V), N, sampling = logits_BV.shape, form.beams, batch.sampling
    penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
    eod = -1 if sampling.eod is None else sampling.eod
    repeat = functools.partial(jnp.repeat, repeats=N)
    cache = Cache(
        *(pin_cache(repeat(x, axis=1)) for x in (cache.k, cache.v, cache.source_k, cache.source_v)),
        repeat(cache.seen, axis=0),
    )
    tokens = jnp.full((B, N, form.count), eod, jnp.int32)
    worst = jnp.full((B, N), WORST)
    start = _Search(
        step=jnp.int32(0),
        logits=repeat(logits_BV, axis=0),
        cache=cache,
        seen=repeat(seen_BV, axis=0),
        tokens=tokens,
        # All beams are alike at first: the others would be the first one again.
        scores=worst.at[:, 0].set(0.0),
        ended_tokens=tokens,
        ended_scores=worst,
        ended=jnp.zeros((B, N), bool),
        hopeful=jnp.ones(B, bool),
        running=jnp.array(True),
    )

    def advance(now: _Search) -> _Search:
        logs = jax.nn.log_softmax(constrain(now.logits, "batch", None))
        logs = penalise(logs, now.seen, penalty)
        sums = (logs.reshape(B, N, V) + now.scores[..., None]).reshape(B, N * V)
        # Twice as many as go on: each beam has one continuation that ends.
        sums, places = jax.lax.top_k(sums, 2 * N)
        beam, chosen = places // V, places % V
        tokens = _take(now.tokens, beam).at[:, :, now.step].set(chosen)
        length = now.step + 1
        ends = (chosen == eod) | (length >= form.count)
        scores, on = jax.lax.top_k(sums + jnp.where(ends, WORST, 0.0), N)

        # Ends count among the best N alone, and where they can still be better than what there is.
        counts = ends & (jnp.arange(2 * N) < N)
        new = sums / length**form.length_penalty
        new += jnp.where(counts, 0.0, WORST) + jnp.where(now.hopeful[:, None], 0.0, WORST)
        ended_scores, best = jax.lax.top_k(jnp.concatenate([now.ended_scores, new], 1), N)
        ended = _take(jnp.concatenate([now.ended, counts], 1), best)
        lowest = jnp.where(ended, ended_scores.min(1, keepdims=True), WORST)
        hopeful = (scores[:, :1] / length**form.length_penalty > lowest).any(1) & now.hopeful

        parents, chosen = _take(beam, on), _take(chosen, on).reshape(-1)
        k, v = (pin_cache(_take_rows(x, parents, axis=1)) for x in (now.cache.k, now.cache.v))
        cache = dataclasses.replace(now.cache, k=k, v=v)
        logits, cache = decode_step(config, params, cache, chosen, length)
        return _Search(
            step=length,
            logits=logits,
            cache=cache,
            seen=mark(_take_rows(now.seen, parents, axis=0), chosen[:, None]),
            tokens=_take(tokens, on),
            scores=scores,
            ended_tokens=_take(jnp.concatenate([now.ended_tokens, tokens], 1), best),
            ended_scores=ended_scores,
            ended=ended,
            hopeful=hopeful,
            running=hopeful.any() & ~ends.all(),
        )

    found = jax.lax.while_loop(lambda now: now.running, advance, start)
    return found.ended_tokens[:, 0], found.ended_scores[:, 0]


_searched = jax.jit(_search, static_argnums=(0, 1))


def _take(x: jax.Array, indices_BN: jax.Array) -> jax.Array:
    """Rows of each source's own."""
    return jax.vmap(lambda x, indices: x[indices])(x, indices_BN)


def _take_rows(x: jax.Array, parents_BN: jax.Array, *, axis: int) -> jax.Array:
    """Rows B * N along an axis, each source's among its own: between devices none is exchanged."""
    B, N = parents_BN.shape
    split = x.reshape(*x.shape[:axis], B, N, *x.shape[axis + 1 :])
    take = jax.vmap(lambda x, rows: jnp.take(x, rows, axis), (axis, 0), axis)
    return take(split, parents_BN).reshape(x.shape)
