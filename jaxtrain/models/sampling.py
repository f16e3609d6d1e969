"""Choosing tokens by their logits: penalties, temperature, truncations, and the draw.

Shapes: B rows, T new tokens, V vocabulary.
"""

import dataclasses
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
    repetition_penalty: float | None
    eod: int | None

    @property
    def end(self) -> int:
        """The token that ends a row, or a number that no token has."""
        return -1 if self.eod is None else self.eod


def make_sampling(
    vocab_size: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    eod: int | None = None,
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
    if not 0 < repetition_penalty < np.inf:
        raise ValueError(f"repetition_penalty={repetition_penalty} must be above 0 and finite")
    return Sampling(
        temperature=temperature if temperature > 0 else None,
        top_k=None if top_k is None else np.int32(top_k),
        top_p=top_p,
        repetition_penalty=None if repetition_penalty == 1.0 else repetition_penalty,
        eod=None if eod is None else np.int32(eod),
    )


class Draws(NamedTuple):
    """The state of rows of which each new token is drawn, or the most probable one."""

    chosen: jax.Array | None  # [B], each row's last token
    seen: jax.Array  # [B, V]
    done: jax.Array  # [B]
    tokens: jax.Array  # [B, T]
    parents = None  # Rows stay where they are.

    @classmethod
    def begin(cls, sampling: Sampling, count: int, seen_BV: jax.Array) -> "Draws":
        """Returns rows that are to have ``count`` tokens, before the first."""
        B = len(seen_BV)
        return cls(None, seen_BV, jnp.zeros(B, bool), jnp.full((B, count), sampling.end, jnp.int32))

    @property
    def running(self) -> jax.Array:
        return ~self.done.all()


def draw(
    sampling: Sampling, rng: jax.Array | None, step: jax.Array, logits_BV: jax.Array, now: Draws
) -> Draws:
    """Chooses each row's token number ``step``; ``rng`` is not read at temperature 0."""
    rng = None if rng is None else jax.random.fold_in(rng, step)
    chosen_B = _choose(rng, constrain(logits_BV, "batch", None), now.seen, sampling)
    chosen_B = constrain(jnp.where(now.done, sampling.end, chosen_B), "batch")
    return Draws(
        chosen=chosen_B,
        seen=mark(now.seen, chosen_B[:, None]),
        done=now.done | (chosen_B == sampling.end),
        tokens=now.tokens.at[:, step].set(chosen_B),
    )


class RowSampling(NamedTuple):
    """How each row of a server chooses its tokens: arrays [B]."""

    temperature: jax.Array  # 0 takes the most probable token
    top_k: jax.Array  # int32; the vocabulary's size leaves all
    top_p: jax.Array  # 1 leaves all
    seed: jax.Array  # uint32


def draw_rows(
    sampling: RowSampling, logits_BV: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Chooses a token of each row, by the row's own seed and the token's position: who else has a
    row changes nothing.

    Returns:
      The tokens, int32 [B], and the log-probabilities of all tokens [B, V] as the model has them,
      before temperature and truncation.
    """

    def drawn() -> jax.Array:
        def row(logits_V, position, temperature, top_k, top_p, seed):
            # Of a temperature near 0 nothing overflows.
            logits_V = logits_V / jnp.maximum(temperature, 1e-6)
            logits_V = truncate(logits_V, top_k=top_k, top_p=top_p)
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jax.random.categorical(key, logits_V)

        drawn_B = jax.vmap(row)(logits_BV, positions_B, *sampling)
        return jnp.where(sampling.temperature > 0, drawn_B, best_B).astype(jnp.int32)

    best_B = logits_BV.argmax(axis=-1).astype(jnp.int32)
    tokens_B = jax.lax.cond((sampling.temperature > 0).any(), drawn, lambda: best_B)
    return tokens_B, jax.nn.log_softmax(logits_BV)


def _choose(rng, logits_BV, seen_BV, sampling: Sampling) -> jax.Array:
    if sampling.repetition_penalty is not None:
        logits_BV = penalise(logits_BV, seen_BV, sampling.repetition_penalty)
    if sampling.temperature is None:
        return logits_BV.argmax(axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None or sampling.top_p is not None:
        logits_BV = truncate(logits_BV, top_k=sampling.top_k, top_p=sampling.top_p)
    return jax.random.categorical(rng, logits_BV).astype(jnp.int32)


def mark(seen_BV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Sets what is seen of each row's own tokens; those beyond the vocabulary are none."""
    set_true = jax.vmap(lambda seen, tokens: seen.at[tokens].set(True, mode="drop"))
    return set_true(constrain(seen_BV, "batch", None), tokens_BT)


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
        # The first token stays, also where a tiny `top_p` is 0 in float32.
        falling = jnp.where((above < jnp.maximum(top_p, 1e-6)) | (top_p >= 1.0), falling, -jnp.inf)
    least = jnp.where(falling > -jnp.inf, falling, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits_BV >= least, logits_BV, -jnp.inf)
