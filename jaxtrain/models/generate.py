"""Generation from any model that has a :class:`jaxtrain.models.decoding.Decoder`.

One program reads the prompts and writes the new tokens; sampling settings are arguments of it, so
changing them compiles nothing. It is a step as training has: ``generate_step`` builds one, a pure
function of a state and a batch, and :func:`jaxtrain.compile_step` places it on a mesh.

    write = generate_step(config, max_new_tokens=64)
    batch = prompts(config, tokens, max_new_tokens=64, temperature=0.0)
    write = jaxtrain.compile_step(write, state, batch, mesh=mesh, rules=gpt.RULES, donate=False)
    new_BN = write(state, batch)

There the cache is split by rows over ``data`` and ``fsdp`` and by heads over ``tensor``, and the
weights of one layer at a time are gathered over ``fsdp``.

A decoder continues its prompts. The prompts of an encoder-decoder are sources, of each of which it
writes a target.

Shapes: B prompts, P prompt positions, N new tokens, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.models.beams import Beams, search, take_rows
from jaxtrain.models.config import before_stack
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import (
    Cache,
    CausalDecoder,
    Decoder,
    check_pages,
    check_positions,
    decoder_of,
    pin_cache,
)
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.models.exact import ExactDecoder, check_form
from jaxtrain.models.llava import LlavaConfig, check_images
from jaxtrain.models.sampling import Draws, Own, Sampling, draw, make_sampling
from jaxtrain.sharding.placement import gather
from jaxtrain.sharding.rules import batch_parts

Config = DecoderConfig | T5Config | LlavaConfig
# The shortest rows that a program is compiled for.
SHORTEST = 16


def padded_length(count: int) -> int:
    """The length that rows of ``count`` tokens are padded to, a power of two: few programs are then
    compiled for rows of any lengths.

    >>> padded_length(3), padded_length(64), padded_length(65)
    (16, 64, 128)
    """
    return max(SHORTEST, 1 << (count - 1).bit_length())


def by_length(sizes: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Yields the numbers of rows of some sizes, the longest first, at most ``rows`` at a time, so
    that a batch is padded to lengths alike.

    >>> list(by_length([3, 9, 4], 2))
    [[1, 2], [0]]
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    yield from (order[start : start + rows] for start in range(0, len(order), rows))


def whole_rows(rows: int, mesh: Mesh) -> int:
    """Returns how many rows a batch of so many has where all devices that split it have some."""
    return -(-rows // batch_parts(mesh)) * batch_parts(mesh)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of a step that generates: prompts, and what each call may have otherwise.

    Args:
      tokens: int32 [B, P], padded on the right.
      lengths: int32 [B], tokens of each.
      rng: a key, or one for each row; None where nothing is drawn.
      sampling: how tokens are chosen.
      max_new_tokens: for how many new ones the prompts were checked; None for any number.
      image: [B, H, W, C], of a model that reads images; None for prompts of text alone.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rng: jax.Array | None = None
    sampling: Sampling | None = None
    max_new_tokens: int | None = dataclasses.field(default=None, metadata={"static": True})
    image: np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """A stand-in for a train state that holds only parameters, for generation without training."""

    params: Any


def generate(
    config: Config, params: Any, prompt_tokens: Any, *, max_new_tokens: int, **given: Any
) -> jax.Array:
    """Continues each prompt, or writes the target of each source, by ``max_new_tokens`` tokens,
    without a mesh.

    The logits are, in this order, divided for tokens that have occurred by the repetition penalty
    (multiplied where negative), divided by the temperature, and cut to the ``top_k`` largest, to
    the smallest set of probability ``top_p``, and to those at least ``min_p`` times as probable as
    the most probable one; ties with the last one kept are kept.

    Args:
      config, params: the model; it computes in the dtype of ``params``.
      prompt_tokens: int [B, P]; shorter prompts are padded on the right with anything.
      max_new_tokens: how many.
      **given: any of what follows.
      rng: key for sampling; not needed at temperature 0.
      prompt_lengths: int [B], tokens of each prompt; left out, P for all.
      temperature: left out, 1; 0 takes the most probable token.
      top_k, top_p, min_p: truncations; left out, none.
      repetition_penalty: 1 means none (Keskar et al. 2019, https://arxiv.org/abs/1909.05858); it is
        for tokens of a prompt or a target, and not of a source.
      repetition_window: of which so many last tokens alone count; left out, all.
      min_tokens: new tokens of a row before one that may end it; left out, 0.
      image: [B, H, W, C], of a model that reads images, whose prompts have its image tokens; left
        out, none.
      eod: after this token, or any of several, a row is filled with it (the first of them); once
        all rows are, generation stops. Left out, 1 for an encoder-decoder and None, which continues
        to the end, for others.

    Returns:
      int32 [B, max_new_tokens]: the new tokens alone.

    Raises:
      ValueError: for settings out of range, a missing key, tokens beyond the vocabulary, or, with
        learned positions, prompt and new tokens that together exceed ``seq_len`` (rotary positions
        have no such limit, except that those of dynamic scaling may not exceed its length).
    """
    batch = prompts(config, prompt_tokens, max_new_tokens=max_new_tokens, **given)
    return _draw(_Form(decoder_of(config), max_new_tokens), Weights(params), batch)


def generate_with_routes(
    config: DecoderConfig, params: Any, prompt_tokens: Any, *, max_new_tokens: int, **given: Any
) -> tuple[jax.Array, jax.Array]:
    """As :func:`generate`, of a model with experts, and the experts that each token that was read
    had: int32 [B, L, P + max_new_tokens - 1, J] of the L layers that have some.

    They are the ``routes`` of a batch whose ``tokens`` are the prompt of each row and, right behind
    it, its new tokens but for the last; beyond these they are any. So a trainer whose numbers are
    rounded otherwise, or whose weights have moved, sends each token where the sampler did.

    Raises:
      ValueError: as :func:`generate`, and for a model without experts.
    """
    if getattr(config, "experts", None) is None:
        raise ValueError("the model has no experts, whose routes could be recorded: use generate")
    check_pages(config)  # routes are recorded beside keys
    batch = prompts(config, prompt_tokens, max_new_tokens=max_new_tokens, **given)
    form = _Form(CausalDecoder(config, record=True), max_new_tokens)
    return _draw_with_routes(form, Weights(params), batch)


def stream(
    config: Config, params: Any, batch: Prompts, *, mesh: Mesh | None = None
) -> Iterator[np.ndarray]:
    """Yields what :func:`generate` writes as soon as it is chosen: a token of each row, int32 [B].

    Args:
      batch: what :func:`prompts` has returned; its rows divide over ``data`` x ``fsdp``.
      mesh: where the parameters lie; None for one device.
    """
    form = _Form(decoder_of(config), batch.max_new_tokens)
    on_mesh = contextlib.nullcontext if mesh is None else functools.partial(jax.set_mesh, mesh)
    with on_mesh():
        params = _gather(form, params)
        now = _begin(form, params, batch)
    for step in range(1, form.count + 1):
        rows = now.rows
        if step < form.count:  # The next is under way while this one is shown.
            with on_mesh():
                now = _go_on(form, params, batch, *now)
        yield np.asarray(rows.chosen)
        if rows.done.all():
            return


def beam_search(
    config: Config,
    params: Any,
    prompt_tokens: Any,
    *,
    max_new_tokens: int,
    beams: int = 4,
    length_penalty: float = 1.0,
    **given: Any,
) -> tuple[jax.Array, jax.Array]:
    """Searches the most probable new tokens of each prompt, following ``beams`` rows at a time.

    The search is that of transformers' ``generate(num_beams=..., early_stopping=False)``: of twice
    as many continuations those that end are kept aside, by their log probability divided by
    ``length ** length_penalty``, and the best of the others go on while they may still be better.

    Args:
      config, params, prompt_tokens, max_new_tokens: as for :func:`generate`.
      beams: at most half of the vocabulary; 1 is the greedy choice.
      length_penalty: above 0 favours longer rows.
      **given: prompt_lengths, eod, min_tokens and, of log probabilities, repetition_penalty and its
        window, as there.

    Returns:
      int32 [B, max_new_tokens], filled with ``eod``, and the scores [B].

    Raises:
      ValueError: as :func:`generate`.
    """
    step = beam_step(
        config, max_new_tokens=max_new_tokens, beams=beams, length_penalty=length_penalty
    )
    batch = prompts(config, prompt_tokens, max_new_tokens=max_new_tokens, temperature=0.0, **given)
    return _search(*step.args, Weights(params), batch)


def generate_step(
    config: Config, *, max_new_tokens: int, beams: int = 1
) -> Callable[[Any, Prompts], jax.Array]:
    """Builds ``step(state, batch) -> tokens``, which computes what :func:`generate` does, or, with
    more than one beam, the tokens of :func:`beam_search`.

    Returns:
      A pure function of a train state (or :class:`Weights`), of which it reads ``params``, and of
      what :func:`prompts` returns. On a mesh their rows divide over ``data`` x ``fsdp``; the tokens
      are those of one device.
    """
    if beams == 1:
        return functools.partial(_drawn, _Form(decoder_of(config), max_new_tokens))
    step = beam_step(config, max_new_tokens=max_new_tokens, beams=beams)
    return lambda state, batch: step(state, batch)[0]


def beam_step(
    config: Config, *, max_new_tokens: int, beams: int = 4, length_penalty: float = 1.0
) -> Callable[[Any, Prompts], tuple[jax.Array, jax.Array]]:
    """Builds ``step(state, batch) -> (tokens, scores)``, which computes what :func:`beam_search`
    does, of a batch with temperature 0; :func:`generate_step` says more.

    Raises:
      ValueError: for settings out of range.
    """
    if not 1 <= beams <= config.vocab_size // 2:
        raise ValueError(f"beams={beams} must be from 1 to half of the vocabulary")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} must be a finite number")
    form = _Form(decoder_of(config), max_new_tokens, beams, float(length_penalty))
    return functools.partial(_found, form)


class Scored(NamedTuple):
    """New tokens [B, N], the log-probability of each, float32 [B, N], 0 behind the end of a row, by
    the logits before temperature and truncation; and, of a model with experts, its ``routes``, as
    :func:`generate_with_routes` returns them."""

    tokens: jax.Array
    log_p: jax.Array
    routes: jax.Array | None = None


def scored_step(
    config: DecoderConfig, *, max_new_tokens: int, exact: bool = False
) -> Callable[[Any, Prompts], Scored]:
    """Builds ``step(state, batch) -> scored``: as :func:`generate_step`, with what a trainer has to
    know of the sampler.

    With ``exact`` every token is read alike, whoever has a row beside it, and its log-probability
    has the bits that :func:`jaxtrain.models.exact.log_probs` gives a trainer. On a mesh that is for
    the rows of one device, within a ``shard_map``.

    Raises:
      ValueError: ``exact`` of a model that has no exact log-probabilities.
    """
    if exact:
        check_form(config)
    # What an exact sampler reads goes to the same experts in training.
    record = not exact and config.experts is not None
    decoder = ExactDecoder(config) if exact else CausalDecoder(config, record=record)
    return functools.partial(_scored, _Form(decoder, max_new_tokens, scored=True))


def prompts(
    config: Config,
    prompt_tokens: Any,
    *,
    max_new_tokens: int,
    prompt_lengths: Any = None,
    rng: jax.Array | None = None,
    image: Any = None,
    **sampling: Any,
) -> Prompts:
    """Checks the arguments of :func:`generate`, with its errors, and makes a batch of them."""
    tokens_BP, lengths_B = _checked_rows(config.vocab_size, prompt_tokens, prompt_lengths)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    chosen = make_sampling(config.vocab_size, **{"eod": decoder_of(config).eod} | sampling)
    if chosen.min_tokens is not None and chosen.min_tokens > max_new_tokens:
        raise ValueError(
            f"min_tokens={chosen.min_tokens} must be at most the max_new_tokens={max_new_tokens}"
        )
    if rng is None and chosen.temperature is not None:
        raise ValueError("sampling needs rng, a jax.random.key; or use temperature=0")
    P, longest = tokens_BP.shape[1], int(lengths_B.max())
    if config.positions == "learned" and max(P, longest + max_new_tokens) > config.seq_len:
        raise ValueError(
            f"a prompt of {P if config.seq_len < P else longest} tokens and {max_new_tokens} new "
            f"ones exceed the {config.seq_len} learned positions; shorten either"
        )
    check_positions(config, longest + max_new_tokens)
    if image is not None:
        if not isinstance(config, LlavaConfig):
            raise ValueError("`image` is given, and the model reads none: leave it out")
        check_images(config, tokens_BP, image)
    rng = None if chosen.temperature is None else rng
    return Prompts(tokens_BP, lengths_B, rng, chosen, max_new_tokens, image)


def _checked_rows(vocab_size: int, tokens: Any, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens [B, P] and their lengths [B], int32."""
    tokens_BP = np.asarray(tokens)
    if not np.issubdtype(tokens_BP.dtype, np.integer):
        raise ValueError(f"prompt_tokens must be whole numbers, not {tokens_BP.dtype}")
    if tokens_BP.ndim != 2 or 0 in tokens_BP.shape:
        raise ValueError(f"prompt_tokens must be [B, P], not of shape {tokens_BP.shape}")
    B, P = tokens_BP.shape
    lengths_B = np.full(B, P) if lengths is None else np.asarray(lengths)
    lengths_B = lengths_B.astype(np.int32)
    if lengths_B.shape != (B,) or lengths_B.min() < 1 or lengths_B.max() > P:
        raise ValueError(f"prompt_lengths must be {B} numbers from 1 to {P}, not {lengths_B}")
    known = tokens_BP[np.arange(P) < lengths_B[:, None]]
    if known.min() < 0 or known.max() >= vocab_size:
        raise ValueError(
            f"prompt tokens from {known.min()} to {known.max()} do not fit a vocabulary of "
            f"{vocab_size}; use the model's own tokenizer"
        )
    return tokens_BP.astype(np.int32), lengths_B


class _Form(NamedTuple):
    """The static arguments of a program that generates; ``beams`` None draws."""

    decoder: Decoder
    count: int
    beams: int | None = None
    length_penalty: float = 1.0
    scored: bool = False


class _Now(NamedTuple):
    """What is between two tokens: the number of the next, rows, and the cache of those before."""

    step: jax.Array
    rows: Draws | Beams
    cache: Cache


def _written(form: _Form, state: Any, batch: Prompts) -> Draws | Beams:
    return _end(form, state, batch).rows


def _end(form: _Form, state: Any, batch: Prompts) -> "_Now":
    """Reads the prompts; then chooses a token of each row and reads it, until all have ended."""
    if batch.max_new_tokens not in (None, form.count):
        raise ValueError(
            f"a step that writes {form.count} new tokens has prompts for {batch.max_new_tokens}: "
            "give both the same max_new_tokens"
        )
    if batch.max_new_tokens is None:
        check_positions(form.decoder.config, batch.tokens.shape[1] + form.count)
    params = _gathered(form, state.params)
    now = _first(form, params, batch)
    more = lambda now: (now.step < form.count) & now.rows.running  # noqa: E731
    return jax.lax.while_loop(more, lambda now: _next(form, params, batch, *now), now)


def _gathered(form: _Form, params: Any) -> Any:
    """The parameters with those whole that are outside of the stacks of layers: every new token
    reads them."""
    stacks = {name: params[name] for name in form.decoder.stacks}
    return gather({name: x for name, x in params.items() if name not in stacks}) | stacks


def _first(form: _Form, params: Any, batch: Prompts) -> _Now:
    """Reads the prompts, and chooses the first token of each row."""
    given = {} if batch.image is None else {"image": batch.image}
    logits_BV, cache = form.decoder.prefill(
        params, batch.tokens, batch.lengths, room=form.count, **given
    )
    if (N := form.beams) is None:
        rows = Draws.begin(batch.sampling, len(logits_BV), form.count, scored=form.scored)
    else:
        rows = Beams.begin(batch.sampling, len(logits_BV), form.count, N)
        logits_BV = jnp.repeat(logits_BV, N, axis=0)
        cache = jax.tree.map(lambda x: pin_cache(jnp.repeat(x, N, axis=1)), cache)
    return _Now(jnp.int32(1), _choice(form, batch)[1](0, logits_BV, rows), cache)


def _next(form: _Form, params: Any, batch: Prompts, step: jax.Array, rows: Any, cache: Cache):
    """Reads the last token of each row, and chooses the next one."""
    own, choose = _choice(form, batch)
    if rows.parents is not None:
        kept = {"k": cache.k, "v": cache.v, "recurrent": cache.recurrent}
        take = lambda x: pin_cache(take_rows(x, rows.parents, axis=1))  # noqa: E731
        cache = dataclasses.replace(cache, **jax.tree.map(take, kept))
    start_B, one_B = own.lengths_B + step - 1, jnp.ones_like(own.lengths_B)
    logits_BV, cache = form.decoder.extend(params, cache, rows.chosen[:, None], start_B, one_B)
    return _Now(step + 1, choose(step, logits_BV, rows), cache)


def _choice(form: _Form, batch: Prompts) -> tuple[Own, Callable]:
    """What each row, or each beam, begins with; and ``choose(step, logits, rows) -> rows``."""
    own = Own(*form.decoder.rows(batch.tokens, batch.lengths))
    if form.beams is None:
        return own, functools.partial(
            draw, batch.sampling, batch.rng, form.decoder.log_softmax, own
        )
    own = Own(*(jnp.repeat(x, form.beams, axis=0) for x in own))
    return own, functools.partial(search, batch.sampling, form.length_penalty, own)


def _drawn(form: _Form, state: Any, batch: Prompts) -> jax.Array:
    return _written(form, state, batch).tokens


def _scored(form: _Form, state: Any, batch: Prompts) -> Scored:
    end = _end(form, state, batch)
    routes = _routes(form, end, batch) if form.decoder.record else None
    return Scored(end.rows.tokens, end.rows.log_p, routes)


def _found(form: _Form, state: Any, batch: Prompts) -> tuple[jax.Array, jax.Array]:
    if batch.sampling.temperature is not None:
        raise ValueError(
            f"prompts have temperature={batch.sampling.temperature}, and a search with "
            f"{form.beams} beams draws nothing: give temperature=0"
        )
    found = _written(form, state, batch)
    return found.ended_tokens[:, 0], found.ended_scores[:, 0]


def _drawn_with_routes(form: _Form, state: Any, batch: Prompts) -> tuple[jax.Array, jax.Array]:
    end = _end(form, state, batch)
    return end.rows.tokens, _routes(form, end, batch)


def _routes(form: _Form, end: _Now, batch: Prompts) -> jax.Array:
    read = batch.tokens.shape[1] + form.count - 1
    routes_LBSJ = end.cache.routes[before_stack(form.decoder.config) :, :, 0, :read]
    return routes_LBSJ.swapaxes(0, 1)


_draw = jax.jit(_drawn, static_argnums=0)
_draw_with_routes = jax.jit(_drawn_with_routes, static_argnums=0)
_search = jax.jit(_found, static_argnums=0)
_gather = jax.jit(_gathered, static_argnums=0)
_begin = jax.jit(_first, static_argnums=0)
_go_on = jax.jit(_next, static_argnums=0, donate_argnames="cache")
