"""Choosing tokens by their logits: penalties, temperature, truncations, and the draw.

Shapes: B rows, P positions of what a row begins with, T new tokens, V vocabulary, E tokens that
end a row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.sharding.placement import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options for choosing tokens; None leaves an option out of the compiled loop."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    repetition_window: int | None
    min_tokens: int | None
    ends: tuple[int, ...]  # Scalars: on a mesh, an array of a batch has its rows.

    @property
    def end(self) -> int:
        """The token that a row is filled with behind its end, or a number that no token has."""
        return self.ends[0] if self.ends else -1

    def is_end(self, tokens: jax.Array) -> jax.Array:
        """Whether each token ends its row."""
        return is_any(tokens, jnp.array(self.ends, jnp.int32))


def make_sampling(
    vocab_size: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    repetition_window: int | None = None,
    min_tokens: int = 0,
    eod: int | Sequence[int] | None = None,
) -> Sampling:
    """Makes options of the arguments of :func:`jaxtrain.models.generate.generate`.

    Raises:
      ValueError: for settings out of range.
    """
    # As the program has them: what is above 0 may not be so in float32.
    temperature, repetition_penalty = np.float32(temperature), np.float32(repetition_penalty)
    top_p = None if top_p is None else np.float32(top_p)
    if not temperature >= 0:  # nor NaN
        raise ValueError(f"temperature={temperature} must be at least 0")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k={top_k} must be from 1 to the vocabulary's {vocab_size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p={min_p} must be from 0 to 1")
    if not 0 < repetition_penalty < np.inf:
        raise ValueError(f"repetition_penalty={repetition_penalty} must be above 0 and finite")
    if repetition_window is not None and repetition_window < 1:
        raise ValueError(f"repetition_window={repetition_window} must be at least 1")
    if min_tokens < 0:
        raise ValueError(f"min_tokens={min_tokens} must be at least 0")
    ends = () if eod is None else tuple(np.atleast_1d(np.asarray(eod, np.int32)))
    penalised = repetition_penalty != 1.0
    return Sampling(
        temperature=temperature if temperature > 0 else None,
        top_k=None if top_k is None else np.int32(top_k),
        top_p=top_p,
        min_p=np.float32(min_p) if min_p else None,
        repetition_penalty=repetition_penalty if penalised else None,
        repetition_window=np.int32(repetition_window) if penalised and repetition_window else None,
        min_tokens=np.int32(min_tokens) if min_tokens and ends else None,
        ends=ends,
    )


class Own(NamedTuple):
    """What each row begins with: a prompt, or the start of a target."""

    tokens_BP: jax.Array
    lengths_B: jax.Array


class Draws(NamedTuple):
    """The state of rows of which each new token is drawn, or the most probable one."""

    chosen: jax.Array | None  # [B], each row's last token
    done: jax.Array  # [B]
    tokens: jax.Array  # [B, T]
    log_p: jax.Array | None = None  # [B, T], of each token by the logits as they are, if recorded
    parents = None  # Rows stay where they are.

    @classmethod
    def begin(cls, sampling: Sampling, rows: int, count: int, *, scored: bool = False) -> "Draws":
        """Returns rows that are to have ``count`` tokens, before the first."""
        tokens = jnp.full((rows, count), sampling.end, jnp.int32)
        log_p = jnp.zeros((rows, count), jnp.float32) if scored else None
        return cls(None, jnp.zeros(rows, bool), tokens, log_p)

    @property
    def running(self) -> jax.Array:
        return ~self.done.all()


def draw(
    sampling: Sampling,
    rng: jax.Array | None,
    log_softmax: Callable[[jax.Array], jax.Array],
    own: Own,
    step: jax.Array,
    logits_BV: jax.Array,
    now: Draws,
) -> Draws:
    """Chooses each row's token number ``step``; ``rng`` is not read at temperature 0. It is one key
    or, so that a row is drawn alike whoever is beside it, one for each row."""
    if rng is not None:
        fold_in = jax.vmap(jax.random.fold_in, (0, None)) if rng.ndim else jax.random.fold_in
        rng = fold_in(rng, step)
    told_BV = constrain(logits_BV, "batch", None)
    logits_BV = adjusted(sampling, own, now.tokens, step, told_BV)
    chosen_B = _choose(rng, logits_BV, sampling)
    chosen_B = constrain(jnp.where(now.done, sampling.end, chosen_B), "batch")
    log_p = now.log_p
    if log_p is not None:
        of_B = jnp.take_along_axis(log_softmax(told_BV), chosen_B[:, None], axis=1)[:, 0]
        log_p = log_p.at[:, step].set(jnp.where(now.done, 0.0, of_B))
    return Draws(
        chosen=chosen_B,
        done=now.done | sampling.is_end(chosen_B),
        tokens=now.tokens.at[:, step].set(chosen_B),
        log_p=log_p,
    )


class RowSampling(NamedTuple):
    """How each row of a server chooses its tokens: arrays [B]."""

    temperature: jax.Array  # 0 takes the most probable token
    top_k: jax.Array  # int32; the vocabulary's size leaves all
    top_p: jax.Array  # 1 leaves all
    min_p: jax.Array  # 0 leaves all
    seed: jax.Array  # uint32
    repetition: jax.Array  # 1 penalises nothing; so does 0 of the next two
    frequency: jax.Array  # for each time that a token was written
    presence: jax.Array  # for a token that was written
    least: jax.Array  # int32, tokens that are written before one that ends the row
    ends: jax.Array  # int32 [B, E], filled up with -1
    begin: jax.Array  # int32, tokens of the prompt
    biased: jax.Array  # int32 [B, M], tokens whose logits are raised; filled up beyond any
    bias: jax.Array  # [B, M], by how much


class History(NamedTuple):
    """What rows have read and written: ``tokens`` [R, S] by position, where each row is drawn for
    as often as there are more logits than R; read, as penalties and biases are, only where
    ``asked``, for any row."""

    tokens: jax.Array
    asked: jax.Array


def draw_rows(
    sampling: RowSampling, history: History, logits_BV: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """Chooses a token of each row, int32 [B], by the row's own seed and the token's position, and
    with penalties by what the row has before that: who else has a row changes nothing."""

    def drawn() -> jax.Array:
        def row(logits_V, position, temperature, top_k, top_p, min_p, seed):
            # Of a temperature near 0 nothing overflows.
            logits_V = logits_V / jnp.maximum(temperature, 1e-6)
            logits_V = truncate(logits_V, top_k=top_k, top_p=top_p, min_p=min_p)
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.categorical(key, logits_V)

        drawn_B = jax.vmap(row)(adjusted_BV, positions_B, *sampling[:5])
        return jnp.where(sampling.temperature > 0, drawn_B, best_B).astype(jnp.int32)

    adjusted_BV = jax.lax.cond(
        history.asked,
        lambda: adjusted_rows(sampling, history.tokens, logits_BV, positions_B),
        lambda: logits_BV.astype(jnp.float32),
    )
    best_B = adjusted_BV.argmax(axis=-1).astype(jnp.int32)
    return jax.lax.cond((sampling.temperature > 0).any(), drawn, lambda: best_B)


def adjusted_rows(
    sampling: RowSampling, tokens_RS: jax.Array, logits_BV: jax.Array, positions_B: jax.Array
) -> jax.Array:
    """Adds a row's biases, penalises what it has before a position, as transformers and vLLM do
    (repetition, also of the prompt) and OpenAI (what was written, by its count and by its
    presence), and leaves out ends where the row is to be longer. A row that asks for nothing keeps
    its bits."""
    (B, V), S = logits_BV.shape, tokens_RS.shape[1]
    tokens_BS = jnp.repeat(tokens_RS, B // tokens_RS.shape[0], axis=0)
    nothing_BT, at_B1 = jnp.zeros((B, 0), jnp.int32), positions_B[:, None]
    whole = Own(tokens_BS, positions_B)
    seen_BV = occurred(whole, nothing_BT, 0, window=None, vocab_size=V)
    add = jax.vmap(lambda values, tokens, more: values.at[tokens].add(more, mode="drop"))
    logits_BV = add(logits_BV.astype(jnp.float32), sampling.biased, sampling.bias)
    # Of a penalty near 0 nothing overflows.
    repetition_B1 = jnp.maximum(sampling.repetition, 1e-6)[:, None]
    logits_BV = penalise(logits_BV, seen_BV, repetition_B1)
    is_new_BS = (jnp.arange(S) >= sampling.begin[:, None]) & (jnp.arange(S) < at_B1)
    new_BS = jnp.where(is_new_BS, tokens_BS, V)
    counts_BV = add(jnp.zeros((B, V), jnp.float32), new_BS, jnp.ones((B, S), jnp.float32))
    logits_BV -= sampling.frequency[:, None] * counts_BV
    logits_BV -= sampling.presence[:, None] * (counts_BV > 0)
    early_B1 = at_B1 - sampling.begin[:, None] < sampling.least[:, None]
    return withhold(logits_BV, sampling.ends[:, None], early_B1)


def _choose(rng, logits_BV, sampling: Sampling) -> jax.Array:
    if sampling.temperature is None:
        return logits_BV.argmax(axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    cuts = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
    if any(cut is not None for cut in cuts.values()):
        logits_BV = truncate(logits_BV, **cuts)
    categorical = jax.vmap(jax.random.categorical) if rng.ndim else jax.random.categorical
    return categorical(rng, logits_BV).astype(jnp.int32)


def adjusted(
    sampling: Sampling, own: Own, new_BT: jax.Array, step: jax.Array, scores_BV: jax.Array
) -> jax.Array:
    """Penalises scores of tokens that have occurred in a row or in its window, of which ``step``
    new tokens are written; and leaves out ends where the row is to be longer."""
    if sampling.repetition_penalty is not None:
        window = sampling.repetition_window
        seen_BV = occurred(own, new_BT, step, window=window, vocab_size=scores_BV.shape[1])
        scores_BV = penalise(scores_BV, seen_BV, sampling.repetition_penalty)
    if sampling.min_tokens is not None:
        scores_BV = withhold(scores_BV, jnp.array(sampling.ends), step < sampling.min_tokens)
    return scores_BV


def occurred(
    own: Own, new_BT: jax.Array, step: jax.Array, *, window: jax.Array | None, vocab_size: int
) -> jax.Array:
    """Which tokens [B, V] a row has, or of its last ``window`` tokens, one number or [B, 1].

    >>> own = Own(jnp.array([[0, 3, 9]]), jnp.array([2]))
    >>> occurred(own, jnp.array([[1, 9]]), 1, window=2, vocab_size=4)
    Array([[False,  True, False,  True]], dtype=bool)
    """
    (tokens_BP, lengths_B), (B, T) = own, new_BT.shape
    P, lengths_B1 = tokens_BP.shape[1], lengths_B[:, None]
    at_BP = jnp.broadcast_to(jnp.arange(P), (B, P))
    at = jnp.concatenate([at_BP, lengths_B1 + jnp.arange(T)], axis=1)
    # What is padding, or not written yet, counts nowhere.
    end = jnp.concatenate([at_BP < lengths_B1, jnp.arange(T) + jnp.zeros((B, 1), int) < step], 1)
    counts = end if window is None else end & (at >= lengths_B1 + step - window)
    tokens = jnp.where(counts, jnp.concatenate([tokens_BP, new_BT], axis=1), vocab_size)
    set_true = jax.vmap(lambda seen, tokens: seen.at[tokens].set(True, mode="drop"))
    return set_true(constrain(jnp.zeros((B, vocab_size), bool), "batch", None), tokens)


def withhold(logits_BV: jax.Array, ends_E: jax.Array, early: jax.Array) -> jax.Array:
    """Sets the logits of tokens that end a row to -inf where it is ``early``, of all or [B, 1];
    rows may have ends of their own, [B, 1, E].

    >>> withhold(jnp.zeros((1, 3)), jnp.array([2, -1]), True)
    Array([[  0.,   0., -inf]], dtype=float32)
    """
    is_end_V = is_any(jnp.arange(logits_BV.shape[-1]), ends_E)
    return jnp.where(is_end_V & early, -jnp.inf, logits_BV)


def is_any(tokens: jax.Array, ends_E: jax.Array) -> jax.Array:
    """Whether each of some tokens is one of others."""
    return (tokens[..., None] == ends_E).any(-1)


def penalise(logits_BV: jax.Array, seen_BV: jax.Array, penalty: float) -> jax.Array:
    """Divides positive logits of tokens seen by ``penalty``, multiplies negative ones.

    >>> penalise(jnp.array([2.0, -2.0, 2.0]), jnp.array([True, True, False]), 2.0)
    Array([ 1., -4.,  2.], dtype=float32)
    """
    penalised = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, penalised, logits_BV)


def truncate(
    logits_BV: jax.Array, *, top_k: int | None, top_p: float | None, min_p: float | None = None
) -> jax.Array:
    """Sets to -inf all but the ``top_k`` largest, then all but the nucleus of mass ``top_p``, then
    all that are less probable than ``min_p`` times the most probable.

    Nucleus sampling is Holtzman et al. 2019, https://arxiv.org/abs/1904.09751: tokens in falling
    order of probability until they sum to ``top_p``. Min-p is Nguyen et al. 2024,
    https://arxiv.org/abs/2407.01082.

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
        # The first token stays, also where a tiny `top_p` is 0 in float32.
        falling = jnp.where((above < jnp.maximum(top_p, 1e-6)) | (top_p >= 1.0), falling, -jnp.inf)
    least = jnp.where(falling > -jnp.inf, falling, jnp.inf).min(axis=-1, keepdims=True)
    if min_p is not None:
        least = jnp.maximum(least, falling[..., :1] + jnp.log(min_p))
    return jnp.where(logits_BV >= least, logits_BV, -jnp.inf)
