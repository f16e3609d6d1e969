"""Text generation from a :mod:`jaxtrain.models.gpt` decoder, with a cache of keys and values.

One jitted prefill reads the prompts, one jitted loop writes the new tokens; sampling settings are
arguments of the compiled loop, so changing them compiles nothing.

Shapes: B prompts, P prompt positions, S cache positions, L layers, H query heads, G key and value
heads, K features per head, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models import layers
from jaxtrain.models.config import GPTConfig
from jaxtrain.models.gpt import Params, embed, head_logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of every layer and position: two arrays [L, B, G, S, K]."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """What :func:`generate` was asked for; None leaves a part out of the compiled loop."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    eod: int | None


def generate(
    config: GPTConfig,
    params: Params,
    prompt_tokens: Any,
    *,
    max_new_tokens: int,
    rng: jax.Array | None = None,
    prompt_lengths: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    eod: int | None = None,
) -> jax.Array:
    """Continues each prompt by ``max_new_tokens`` tokens.

    The logits are, in this order, divided for tokens that have occurred by the repetition penalty
    (multiplied where negative), divided by the temperature, and cut to the ``top_k`` largest and
    then to the smallest set of probability ``top_p``; ties with the last one kept are kept.

    Args:
      config, params: the model; it computes in the dtype of ``params``.
      prompt_tokens: int [B, P]; shorter prompts are padded on the right with anything.
      max_new_tokens: how many.
      rng: key for sampling; not needed at temperature 0.
      prompt_lengths: int [B], tokens of each prompt; None means P for all.
      temperature: 0 takes the most probable token.
      top_k, top_p: truncations; None means none.
      repetition_penalty: 1 means none (Keskar et al. 2019, https://arxiv.org/abs/1909.05858).
      eod: after this token a row is filled with it; once all rows are, generation stops.

    Returns:
      int32 [B, max_new_tokens]: the new tokens alone.

    Raises:
      ValueError: for settings out of range, a missing key, or, with learned positions, prompt and
        new tokens that together exceed ``seq_len`` (rotary positions have no such limit).
    """
    prompts_BP = np.asarray(prompt_tokens, np.int32)
    if prompts_BP.ndim != 2 or 0 in prompts_BP.shape:
        raise ValueError(f"prompt_tokens must be [B, P], not of shape {prompts_BP.shape}")
    B, P = prompts_BP.shape
    lengths_B = np.full(B, P) if prompt_lengths is None else np.asarray(prompt_lengths)
    lengths_B = lengths_B.astype(np.int32)
    if lengths_B.shape != (B,) or lengths_B.min() < 1 or lengths_B.max() > P:
        raise ValueError(f"prompt_lengths must be {B} numbers from 1 to {P}, not {lengths_B}")
    sampling = choose_sampling(
        config.vocab_size,
        max_new_tokens=max_new_tokens,
        rng=rng,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        eod=eod,
    )
    total = int(lengths_B.max()) + max_new_tokens
    if config.positions == "learned" and max(P, total) > config.seq_len:
        raise ValueError(
            f"a prompt of {P} tokens and {max_new_tokens} new ones exceed the {config.seq_len} "
            "learned positions; shorten either"
        )
    is_prompt = np.arange(P) < lengths_B[:, None]
    known = prompts_BP[is_prompt]
    if known.min() < 0 or known.max() >= config.vocab_size:
        raise ValueError(
            f"prompt_tokens from {known.min()} to {known.max()} do not fit a vocabulary of "
            f"{config.vocab_size}; use the model's own tokenizer"
        )
    logits_BV, cache = prefill(config, params, prompts_BP, lengths_B, cache_len=max(P, total))
    seen_BV = np.zeros((B, config.vocab_size), bool)
    seen_BV[np.nonzero(is_prompt)[0], known] = True
    rng = jax.random.key(0) if rng is None else rng
    return _decode(
        config, max_new_tokens, params, logits_BV, cache, lengths_B, seen_BV, rng, sampling
    )


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("cache_len",))
def prefill(
    config: GPTConfig,
    params: Params,
    tokens_BP: jax.Array,
    lengths_B: jax.Array,
    *,
    cache_len: int,
) -> tuple[jax.Array, Cache]:
    """Reads prompts: the logits after each one's last token, [B, V] float32, and the cache.

    Args:
      tokens_BP: int32, padded on the right.
      lengths_B: int32, tokens of each prompt.
      cache_len: S, at least P.
    """
    B, P = tokens_BP.shape

    def layer(x_BTD, params_and_index):
        layer_params, l = params_and_index

        def attend(*qkv):
            # Padding comes after the prompt, where causal attention does not look; its keys in the
            # cache are overwritten before any position may see them.
            return layers.row_attention(config.block, l, *qkv), qkv[1:]

        angles = layers.row_angles(config.block, l, None, P)
        return layers.apply(layers.Block, config.block, layer_params)(x_BTD, angles, attend)

    x_BTD = embed(config, params, {"tokens": tokens_BP})
    xs = (params["blocks"], jnp.arange(config.layers))
    x_BTD, kv_LBTGK = jax.lax.scan(layer, x_BTD, xs)
    last_B1D = x_BTD[jnp.arange(B), lengths_B - 1][:, None]
    padding = ((0, 0), (0, 0), (0, 0), (0, cache_len - P), (0, 0))
    k, v = (jnp.pad(x.transpose(0, 1, 3, 2, 4), padding) for x in kv_LBTGK)
    return head_logits(config, params, last_B1D)[:, 0], Cache(k, v)


def decode_step(
    config: GPTConfig, params: Params, cache: Cache, tokens_B: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, Cache]:
    """Reads one token per row: the logits after it, [B, V] float32, and the cache with it.

    Args:
      cache: filled below ``positions_B``.
      tokens_B, positions_B: int32.
    """
    positions_B1 = positions_B[:, None]
    rows = jnp.arange(tokens_B.shape[0])

    def layer(carry, params_and_index):
        x_B1D, cache = carry
        layer_params, l = params_and_index

        def attend(q_B1HK, k_B1GK, v_B1GK):
            k = cache.k.at[l, rows, :, positions_B].set(k_B1GK[:, 0])
            v = cache.v.at[l, rows, :, positions_B].set(v_B1GK[:, 0])
            out_BHK = layers.step_attention(config.block, l, q_B1HK[:, 0], k[l], v[l], positions_B)
            return out_BHK[:, None], Cache(k, v)

        angles = layers.row_angles(config.block, l, positions_B1, 1)
        return layers.apply(layers.Block, config.block, layer_params)(x_B1D, angles, attend), None

    x_B1D = embed(config, params, {"tokens": tokens_B[:, None], "positions": positions_B1})
    # The cache is carried, not scanned over: updated in place, where a scan would copy it.
    xs = (params["blocks"], jnp.arange(config.layers))
    (x_B1D, cache), _ = jax.lax.scan(layer, (x_B1D, cache), xs)
    return head_logits(config, params, x_B1D)[:, 0], cache


def penalise(logits_BV: jax.Array, seen_BV: jax.Array, penalty: float) -> jax.Array:
    """Divides positive logits of tokens seen by ``penalty``, multiplies negative ones.

    >>> penalise(jnp.array([2.0, -2.0, 2.0]), jnp.array([True, True, False]), 2.0)
    Array([ 1., -4.,  2.], dtype=float32)
    """
    penalised = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, penalised, logits_BV)


def truncate(logits_BV: jax.Array, *, top_k: int | None, top_p: float | None) -> jax.Array:
    """Sets to -inf all but the ``top_k`` largest, then all but the nucleus of mass ``top_p``.

    Nucleus sampling is Holtzman et al. 2019, https://arxiv.org/abs/1904.09751: tokens in falling
    order of probability until they sum to ``top_p``.

    >>> truncate(jnp.log(jnp.array([0.5, 0.3, 0.2])), top_k=None, top_p=0.6) > -jnp.inf
    Array([ True,  True, False], dtype=bool)
    """
    falling = -jnp.sort(-logits_BV, axis=-1)
    if top_k is not None:
        rank = jnp.arange(falling.shape[-1])
        falling = jnp.where(rank < top_k, falling, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(falling, axis=-1)
        above = jnp.cumsum(probabilities, axis=-1) - probabilities
        falling = jnp.where((above < top_p) | (top_p >= 1.0), falling, -jnp.inf)
    least = jnp.where(falling > -jnp.inf, falling, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits_BV >= least, logits_BV, -jnp.inf)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(config, count, params, logits_BV, cache, lengths_B, seen_BV, rng, sampling):
    def read(cache, tokens_B, step):
        return decode_step(config, params, cache, tokens_B, lengths_B + step - 1)

    return write(read, count, logits_BV, cache, seen_BV, rng, sampling)


def write(
    read: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    count: int,
    logits_BV: jax.Array,
    cache: Any,
    seen_BV: jax.Array,
    rng: jax.Array,
    sampling: Sampling,
) -> jax.Array:
    """The new tokens [B, count]: one is chosen, then read, until all rows have ended.

    Args:
      read: ``(cache, tokens_B, step) -> (logits_BV, cache)``; new token 0 is read at step 1.
      count: how many.
      logits_BV: of the first.
      cache: what ``read`` begins with.
      seen_BV: which tokens the repetition penalty is for already.
      rng: a key.
      sampling: how tokens are chosen.
    """
    rows = jnp.arange(logits_BV.shape[0])
    eod = -1 if sampling.eod is None else sampling.eod

    def choose(step, logits_BV, seen_BV, done_B):
        chosen_B = _sample(jax.random.fold_in(rng, step), logits_BV, seen_BV, sampling)
        chosen_B = jnp.where(done_B, eod, chosen_B)
        return chosen_B, seen_BV.at[rows, chosen_B].set(True), done_B | (chosen_B == eod)

    def more(carry):
        step, _, _, _, done_B, _ = carry
        return (step < count) & ~done_B.all()

    def advance(carry):
        step, chosen_B, cache, seen_BV, done_B, new_BN = carry
        logits_BV, cache = read(cache, chosen_B, step)
        chosen_B, seen_BV, done_B = choose(step, logits_BV, seen_BV, done_B)
        return step + 1, chosen_B, cache, seen_BV, done_B, new_BN.at[:, step].set(chosen_B)

    first_B, seen_BV, done_B = choose(0, logits_BV, seen_BV, jnp.zeros(rows.shape, bool))
    new_BN = jnp.full((rows.size, count), eod, jnp.int32).at[:, 0].set(first_B)
    carry = (jnp.int32(1), first_B, cache, seen_BV, done_B, new_BN)
    return jax.lax.while_loop(more, advance, carry)[-1]


def _sample(rng, logits_BV, seen_BV, sampling: Sampling) -> jax.Array:
    if sampling.repetition_penalty is not None:
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.temperature is None:
        return logits_BV.argmax(axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        logits_BV = truncate(logits_BV, top_k=sampling.top_k, top_p=sampling.top_p)
    return jax.random.categorical(rng, logits_BV).astype(jnp.int32)


def choose_sampling(
    vocab_size: int,
    *,
    max_new_tokens: int,
    rng: jax.Array | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    repetition_penalty: float,
    eod: int | None,
) -> Sampling:
    """Checks the arguments of :func:`generate`, and says what of them is in the compiled loop.

    Raises:
      ValueError: for settings out of range, or a missing key.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k={top_k} must be from 1 to the vocabulary's {vocab_size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    if repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty={repetition_penalty} must be above 0")
    if rng is None and temperature > 0:
        raise ValueError("sampling needs rng, a jax.random.key; or use temperature=0")
    return Sampling(
        temperature=temperature if temperature > 0 else None,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=None if repetition_penalty == 1.0 else repetition_penalty,
        eod=eod,
    )
