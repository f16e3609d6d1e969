"""The programs that an engine compiles: they read chunks of prompts, write tokens, try the tokens
that a draft proposes, and read whole rows.

Shapes: B rows, C tokens of a chunk, T tokens of a whole row, P pages of a row, D width, V
vocabulary, N = B C.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.models import decoder as decoders
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import CausalDecoder, Decoder, Pages
from jaxtrain.models.sampling import History, RowSampling, draw_rows
from jaxtrain.ops.row_adapters import choose

# Most alternatives that are named beside a token.
TOP = 20
# Most tokens that may end a request which is to have a least length.
ENDS = 16
# Most tokens that a request may bias.
BIASES = 300
# The keys and values of each model's pages.
Caches = Sequence[tuple[jax.Array, jax.Array]]


class Rows(NamedTuple):
    """What a program receives of the rows: arrays with rows first.

    Args:
      table: int32 [B, P], each row's pages.
      tokens: int32 [B, C], of which ``count`` [B] are read from position ``start`` [B] on.
      want: bool, whether any row is to have alternatives.
      adapter: int32 [B].
      history: the tokens of the rows, where any row is to have penalties, biases or a least
        length.
    """

    table: Any
    tokens: Any
    start: Any
    count: Any
    sampling: RowSampling
    want: Any
    adapter: Any
    history: History


class Drawn(NamedTuple):
    """Tokens that rows receive: of each row the first ``count``."""

    count: jax.Array  # [B]
    tokens: jax.Array  # [B, C]
    logprobs: jax.Array
    top_tokens: jax.Array  # [B, C, TOP]
    top_logprobs: jax.Array


def advance(
    models: Sequence[CausalDecoder], params: Sequence[Any], caches: Caches, rows: Rows
) -> tuple[Caches, Drawn]:
    """Reads a chunk of each row into the pages of every model, and draws the token that follows it
    by the first."""
    params = choose(params[0], rows.adapter), *params[1:]
    given = rows.tokens, rows.start, rows.count
    read = [
        model.extend(own, Pages(*cache, rows.table), *given)
        for model, own, cache in zip(models, params, caches, strict=True)
    ]
    logits_BCV, at_BC = read[0][0][:, None], (rows.start + rows.count)[:, None]
    drawn = drawn_of(models[0], rows, logits_BCV, at_BC, jnp.ones_like(rows.count))
    return [(pages.k, pages.v) for _, pages in read], drawn


def speculate(
    models: Sequence[CausalDecoder],
    drafts: int,
    params: Sequence[Any],
    caches: Caches,
    rows: Rows,
) -> tuple[Caches, Drawn]:
    """Writes up to ``drafts + 1`` tokens of each row, and at most ``rows.count``.

    The second model proposes tokens one by one; the first reads all in one pass and draws its own
    token at each place, which counts as far as those before it were proposed. Both draw with the
    noise of the row's seed and the token's position, so the tokens are those of the first model
    alone, whatever is proposed, and proposals are often right (Daliri, Musco and Suresh 2024,
    https://arxiv.org/abs/2408.07978, where Leviathan et al. 2023, https://arxiv.org/abs/2211.17192,
    keep the distribution alone).

    Args:
      rows: of which ``tokens`` [B, 1] are the last written.
    """
    (model, draft), (own, other) = models, params
    last_B = rows.tokens[:, 0]

    def propose(carry: Any, i: jax.Array) -> Any:
        pages, tokens_B, history_BT = carry
        reads_B = (i < rows.count).astype(jnp.int32)
        given = tokens_B[:, None], rows.start + i, reads_B
        logits_BV, pages = draft.extend(other, pages, *given)
        at_B, history = rows.start + i + 1, rows.history._replace(tokens=history_BT)
        tokens_B = draw_rows(rows.sampling, history, logits_BV, at_B)
        history_BT = history_BT.at[jnp.arange(len(at_B)), at_B].set(tokens_B, mode="drop")
        return (pages, tokens_B, history_BT), tokens_B

    # The last proposal is not tried: it is made so that the draft has read the one before it.
    begun = Pages(*caches[1], rows.table), last_B, rows.history.tokens
    ended, proposed_CB = jax.lax.scan(propose, begun, jnp.arange(drafts + 1))
    draft_pages, _, history_BT = ended
    rows = rows._replace(history=rows.history._replace(tokens=history_BT))
    tokens_BC = jnp.concatenate([last_B[:, None], proposed_CB[:-1].T], axis=1)
    pages = Pages(*caches[0], rows.table)
    given = tokens_BC, rows.start, rows.count
    logits_BCV, pages = model.extend_every(choose(own, rows.adapter), pages, *given)
    at_BC = rows.start[:, None] + 1 + jnp.arange(drafts + 1)
    drawn = drawn_of(model, rows, logits_BCV, at_BC, rows.count)
    agreed_BC = jnp.cumprod(drawn.tokens[:, :-1] == tokens_BC[:, 1:], axis=1)
    count_B = jnp.minimum(1 + agreed_BC.sum(1), rows.count)
    caches = [(pages.k, pages.v), (draft_pages.k, draft_pages.v)]
    return caches, drawn._replace(count=count_B)


def drawn_of(
    model: Decoder, rows: Rows, logits_BCV: jax.Array, at_BC: jax.Array, count_B: jax.Array
) -> Drawn:
    """Draws a token for each position ``at_BC`` by its logits; log-probabilities are the model's,
    before penalties, temperature and truncation."""
    B, C, V = logits_BCV.shape
    sampling = RowSampling(*(jnp.repeat(x, C, axis=0) for x in rows.sampling))
    logits_NV = logits_BCV.reshape(-1, V)
    tokens_N = draw_rows(sampling, rows.history, logits_NV, at_BC.reshape(-1))
    logprobs_NV = model.log_softmax(logits_NV)
    top = min(TOP, V)
    nothing = jnp.zeros((B * C, top), logprobs_NV.dtype), jnp.zeros((B * C, top), jnp.int32)
    values, ids = jax.lax.cond(
        rows.want, lambda: tuple(jax.lax.top_k(logprobs_NV, top)), lambda: nothing
    )
    own_N = jnp.take_along_axis(logprobs_NV, tokens_N[:, None], axis=1)[:, 0]
    return Drawn(count_B, *(x.reshape(B, C, *x.shape[1:]) for x in (tokens_N, own_N, ids, values)))


def scored(
    model: CausalDecoder, params: Mapping[str, Any], tokens_BT: jax.Array, adapter_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [T - 1] of the first row's tokens, and the most probable ones."""
    logits_TV = model.logits(choose(params, adapter_B), tokens_BT)[0, :-1]
    logprobs_TV = model.log_softmax(logits_TV)
    own_T = jnp.take_along_axis(logprobs_TV, tokens_BT[0, 1:, None], axis=1)[:, 0]
    values, ids = jax.lax.top_k(logprobs_TV, min(TOP, logprobs_TV.shape[1]))
    return own_T, ids, values


def embedded(
    model: DecoderConfig,
    params: Mapping[str, Any],
    tokens_BT: jax.Array,
    count_B: jax.Array,
    adapter_B: jax.Array,
    last: jax.Array,
) -> jax.Array:
    """Hidden states of each row's tokens, pooled, [B, D] float32 of unit length."""
    x_BTD = decoders.hidden(model, choose(params, adapter_B), tokens_BT).astype(jnp.float32)
    at_T, ends_B1 = jnp.arange(tokens_BT.shape[1]), count_B[:, None]
    pooled_BT = jnp.where(last, at_T == ends_B1 - 1, at_T < ends_B1)
    # Of what is not finite in padding, which is read by nobody, 0 times would be NaN.
    x_BD = jnp.where(pooled_BT[..., None], x_BTD, 0).sum(1)
    return x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12)
