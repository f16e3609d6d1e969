"""Text generation from a :mod:`jaxtrain.models.decoder` decoder, with a cache of keys and values.

One program reads the prompts and writes the new tokens; sampling settings are arguments of it, so
changing them compiles nothing. It is a step as training has: ``generate_step`` builds one, a pure
function of a state and a batch, and :func:`jaxtrain.compile_step` places it on a mesh.

    write = generate_step(config, max_new_tokens=64)
    batch = prompts(config, tokens, max_new_tokens=64, temperature=0.0)
    write = jaxtrain.compile_step(write, state, batch, mesh=mesh, rules=gpt.RULES, donate=False)
    new_BN = write(state, batch)

There the cache is split by rows over ``data`` and ``fsdp`` and by heads over ``tensor``, and the
weights of one layer at a time are gathered over ``fsdp``.

Shapes: B prompts, P prompt positions, S cache positions, L layers, H query heads, G key and value
heads, K features per head, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models import layers
from jaxtrain.models.config import DecoderConfig
from jaxtrain.models.decoder import Params, embed, head_logits
from jaxtrain.ops.per_device import split_over
from jaxtrain.sharding.placement import constrain, gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of every layer and position: two arrays [L, B, G, S, K].

    Where a mesh has more parts for heads than there are key and value heads, G counts each as often
    as it takes for every device to have those of its own query heads.
    """

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options for choosing tokens; None leaves an option out of the compiled loop."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    eod: int | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of a step that generates: prompts, or sources, and what each call may have otherwise.

    Args:
      tokens: int32 [B, P], padded on the right.
      lengths: int32 [B], tokens of each.
      rng: a key; None where nothing is drawn.
      sampling: how tokens are chosen.
      max_new_tokens: for how many new ones the prompts were checked; None for any number.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rng: jax.Array | None = None
    sampling: Sampling | None = None
    max_new_tokens: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A stand-in for a train state that holds only parameters, for generation without training."""

    params: Any


def generate(
    config: DecoderConfig, params: Params, prompt_tokens: Any, *, max_new_tokens: int, **given: Any
) -> jax.Array:
    """Continues each prompt by ``max_new_tokens`` tokens, without a mesh.

    The logits are, in this order, divided for tokens that have occurred by the repetition penalty
    (multiplied where negative), divided by the temperature, and cut to the ``top_k`` largest and
    then to the smallest set of probability ``top_p``; ties with the last one kept are kept.

    Args:
      config, params: the model; it computes in the dtype of ``params``.
      prompt_tokens: int [B, P]; shorter prompts are padded on the right with anything.
      max_new_tokens: how many.
      **given: any of what follows.
      rng: key for sampling; not needed at temperature 0.
      prompt_lengths: int [B], tokens of each prompt; left out, P for all.
      temperature: left out, 1; 0 takes the most probable token.
      top_k, top_p: truncations; left out, none.
      repetition_penalty: 1 means none (Keskar et al. 2019, https://arxiv.org/abs/1909.05858).
      eod: after this token a row is filled with it; once all rows are, generation stops.

    Returns:
      int32 [B, max_new_tokens]: the new tokens alone.

    Raises:
      ValueError: for settings out of range, a missing key, or, with learned positions, prompt and
        new tokens that together exceed ``seq_len`` (rotary positions have no such limit).
    """
    batch = prompts(config, prompt_tokens, max_new_tokens=max_new_tokens, **given)
    return _generated(config, max_new_tokens, Weights(params), batch)


def generate_step(
    config: DecoderConfig, *, max_new_tokens: int
) -> Callable[[Any, Prompts], jax.Array]:
    """Builds ``step(state, batch) -> tokens``, which is what :func:`generate` computes.

    Returns:
      A pure function of a train state (or :class:`Weights`), of which it reads ``params``, and of
      what :func:`prompts` returns. On a mesh their rows divide over ``data`` x ``fsdp``; the tokens
      are those of one device.
    """
    return functools.partial(_continued, config, max_new_tokens)


def prompts(
    config: DecoderConfig,
    prompt_tokens: Any,
    *,
    max_new_tokens: int,
    prompt_lengths: Any = None,
    **sampling: Any,
) -> Prompts:
    """Checks the arguments of :func:`generate`, with its errors, and makes a batch of them."""
    tokens_BP, lengths_B = check_rows(
        config.vocab_size, prompt_tokens, prompt_lengths, "prompt_tokens"
    )
    P, total = tokens_BP.shape[1], int(lengths_B.max()) + max_new_tokens
    chosen, rng = choose_sampling(config.vocab_size, max_new_tokens=max_new_tokens, **sampling)
    if config.positions == "learned" and max(P, total) > config.seq_len:
        raise ValueError(
            f"a prompt of {P} tokens and {max_new_tokens} new ones exceed the {config.seq_len} "
            "learned positions; shorten either"
        )
    return Prompts(tokens_BP, lengths_B, rng, chosen, max_new_tokens)


def check_rows(
    vocab_size: int, tokens: Any, lengths: Any, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens [B, P] and their lengths [B], int32, having checked them.

    ``what`` is the name of the argument.

    Raises:
      ValueError: for other shapes, and numbers that are out of range.
    """
    tokens_BP = np.asarray(tokens)
    if not np.issubdtype(tokens_BP.dtype, np.integer):
        raise ValueError(f"{what} must be whole numbers, not {tokens_BP.dtype}")
    if tokens_BP.ndim != 2 or 0 in tokens_BP.shape:
        raise ValueError(f"{what} must be [B, P], not of shape {tokens_BP.shape}")
    (B, P), name = tokens_BP.shape, what.removesuffix("_tokens")
    lengths_B = np.full(B, P) if lengths is None else np.asarray(lengths)
    lengths_B = lengths_B.astype(np.int32)
    if lengths_B.shape != (B,) or lengths_B.min() < 1 or lengths_B.max() > P:
        raise ValueError(f"{name}_lengths must be {B} numbers from 1 to {P}, not {lengths_B}")
    known = tokens_BP[np.arange(P) < lengths_B[:, None]]
    if known.min() < 0 or known.max() >= vocab_size:
        raise ValueError(
            f"{name} tokens from {known.min()} to {known.max()} do not fit a vocabulary of "
            f"{vocab_size}; use the model's own tokenizer"
        )
    return tokens_BP.astype(np.int32), lengths_B


def _continued(config: DecoderConfig, count: int, state: Any, batch: Prompts) -> jax.Array:
    if batch.max_new_tokens not in (None, count):
        raise ValueError(
            f"a step that writes {count} new tokens has prompts for {batch.max_new_tokens}: give "
            "both the same max_new_tokens"
        )
    (B, P), lengths_B = batch.tokens.shape, batch.lengths
    params = gather_around(state.params, "blocks")
    logits_BV, cache = prefill(config, params, batch.tokens, lengths_B, cache_len=P + count)
    # Beyond a prompt's end there is no token, and nothing to be set.
    own_BP = jnp.where(jnp.arange(P) < lengths_B[:, None], batch.tokens, config.vocab_size)
    seen_BV = mark(jnp.zeros((B, config.vocab_size), bool), own_BP)

    def read(cache, tokens_B, step):
        return decode_step(config, params, cache, tokens_B, lengths_B + step - 1)

    return write(read, count, logits_BV, cache, seen_BV, batch.rng, batch.sampling)


_generated = jax.jit(_continued, static_argnums=(0, 1))


def gather_around(params: Params, *stacks: str) -> dict[str, Any]:
    """The parameters, those outside of stacks of layers gathered: each new token reads them."""
    return gather({name: x for name, x in params.items() if name not in stacks}) | {
        name: params[name] for name in stacks
    }


def mark(seen_BV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Sets what is seen of each row's own tokens; those beyond the vocabulary are none."""
    set_true = jax.vmap(lambda seen, tokens: seen.at[tokens].set(True, mode="drop"))
    return set_true(constrain(seen_BV, "batch", None), tokens_BT)


def cached(k_BTGK: jax.Array, heads: int) -> jax.Array:
    """Keys or values as a cache holds them, of those that a layer makes: every device has those of
    its own query heads, of ``heads`` in all."""
    G, (_, parts) = k_BTGK.shape[2], split_over("heads")
    if heads % parts == 0:
        k_BTGK = jnp.repeat(k_BTGK, math.lcm(G, parts) // G, axis=2)
    return constrain(k_BTGK, "batch", None, "heads", None)


def pin_cache(k_LBGSK: jax.Array) -> jax.Array:
    """A cache of all layers, split by rows and heads."""
    return constrain(k_LBGSK, None, "batch", "heads", None, None)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("cache_len",))
def prefill(
    config: DecoderConfig,
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
    P = tokens_BP.shape[1]

    def layer(x_BTD, params_and_index):
        layer_params, l = params_and_index

        def attend(q_BTHK, k_BTGK, v_BTGK):
            # Padding comes after the prompt, where causal attention does not look; its keys in the
            # cache are overwritten before any position may see them.
            out_BTHK = layers.row_attention(config.block, l, q_BTHK, k_BTGK, v_BTGK)
            return out_BTHK, tuple(cached(x, config.heads) for x in (k_BTGK, v_BTGK))

        layer_params = gather(layer_params, "blocks")
        angles = layers.row_angles(config.block, l, None, P)
        return layers.apply(layers.Block, config.block, layer_params)(x_BTD, angles, attend)

    x_BTD = embed(config, params, {"tokens": tokens_BP})
    xs = (params["blocks"], jnp.arange(config.layers))
    x_BTD, kv_LBTGK = jax.lax.scan(layer, x_BTD, xs)
    last_B1D = jax.vmap(lambda x_TD, n: x_TD[n - 1][None])(x_BTD, lengths_B)
    padding = ((0, 0), (0, 0), (0, 0), (0, cache_len - P), (0, 0))
    k, v = (pin_cache(jnp.pad(x.transpose(0, 1, 3, 2, 4), padding)) for x in kv_LBTGK)
    return head_logits(config, params, last_B1D)[:, 0], Cache(k, v)


def decode_step(
    config: DecoderConfig, params: Params, cache: Cache, tokens_B: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, Cache]:
    """Reads one token per row: the logits after it, [B, V] float32, and the cache with it.

    Args:
      cache: filled below ``positions_B``.
      tokens_B, positions_B: int32.
    """
    positions_B1 = positions_B[:, None]
    # Rows in order, which the partitioner sees: along them nothing is exchanged.
    rows = jnp.arange(tokens_B.shape[0])

    def layer(carry, params_and_index):
        x_B1D, cache = carry
        layer_params, l = params_and_index

        def attend(q_B1HK, k_B1GK, v_B1GK):
            k, v = (
                pin_cache(whole.at[l, rows, :, positions_B].set(cached(new, config.heads)[:, 0]))
                for whole, new in ((cache.k, k_B1GK), (cache.v, v_B1GK))
            )
            out_BHK = layers.step_attention(config.block, l, q_B1HK[:, 0], k[l], v[l], positions_B)
            return out_BHK[:, None], Cache(k, v)

        layer_params = gather(layer_params, "blocks")
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


def write(
    read: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    count: int,
    logits_BV: jax.Array,
    cache: Any,
    seen_BV: jax.Array,
    rng: jax.Array | None,
    sampling: Sampling,
) -> jax.Array:
    """The new tokens [B, count]: one is chosen, then read, until all rows have ended.

    Args:
      read: ``(cache, tokens_B, step) -> (logits_BV, cache)``; new token 0 is read at step 1.
      count, logits_BV: how many, and the logits of the first.
      cache: what ``read`` begins with.
      seen_BV: which tokens the repetition penalty is for already.
      rng, sampling: a key, None where nothing is drawn; and how tokens are chosen.
    """
    B = logits_BV.shape[0]
    eod = -1 if sampling.eod is None else sampling.eod

    def choose(step, logits_BV, seen_BV, done_B):
        key = None if rng is None else jax.random.fold_in(rng, step)
        chosen_B = _sample(key, constrain(logits_BV, "batch", None), seen_BV, sampling)
        chosen_B = constrain(jnp.where(done_B, eod, chosen_B), "batch")
        return chosen_B, mark(seen_BV, chosen_B[:, None]), done_B | (chosen_B == eod)

    def more(carry):
        step, _, _, _, done_B, _ = carry
        return (step < count) & ~done_B.all()

    def advance(carry):
        step, chosen_B, cache, seen_BV, done_B, new_BN = carry
        logits_BV, cache = read(cache, chosen_B, step)
        chosen_B, seen_BV, done_B = choose(step, logits_BV, seen_BV, done_B)
        return step + 1, chosen_B, cache, seen_BV, done_B, new_BN.at[:, step].set(chosen_B)

    first_B, seen_BV, done_B = choose(0, logits_BV, seen_BV, jnp.zeros(B, bool))
    new_BN = jnp.full((B, count), eod, jnp.int32).at[:, 0].set(first_B)
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
    rng: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    eod: int | None = None,
) -> tuple[Sampling, jax.Array | None]:
    """Checks arguments of :func:`generate`; returns what of them is in the compiled loop, and its
    key, None where nothing is drawn.

    Raises:
      ValueError: for settings out of range, or a missing key.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    # As the program has them: what is above 0 may not be so in float32.
    temperature, repetition_penalty = np.float32(temperature), np.float32(repetition_penalty)
    top_p = None if top_p is None else np.float32(top_p)
    if not temperature >= 0:  # nor NaN
        raise ValueError(f"temperature={temperature} must be at least 0")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k={top_k} must be from 1 to the vocabulary's {vocab_size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    if not 0 < repetition_penalty < np.inf:
        raise ValueError(f"repetition_penalty={repetition_penalty} must be above 0 and finite")
    if rng is None and temperature > 0:
        raise ValueError("sampling needs rng, a jax.random.key; or use temperature=0")
    top_k, eod = (None if value is None else np.int32(value) for value in (top_k, eod))
    sampling = Sampling(
        temperature=temperature if temperature > 0 else None,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=None if repetition_penalty == 1.0 else repetition_penalty,
        eod=eod,
    )
    return sampling, rng if temperature > 0 else None
