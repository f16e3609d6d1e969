"""Log-probabilities of tokens: rows of any lengths share a few programs.

Shapes: B rows, T tokens.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.hf.opening import Opened, find_model
from jaxtrain.models import decoder, encoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import check_positions, unscaled
from jaxtrain.models.encoder import EncoderConfig
from jaxtrain.models.generate import by_length, padded_length, whole_rows
from jaxtrain.serve.engine import row_length


class Row(NamedTuple):
    """Tokens, of which the last ``counted`` are scored; the first never is.

    ``mask`` says which of these count in the sum, as bool [counted]; None takes all.
    """

    tokens: Sequence[int]
    counted: int
    mask: np.ndarray | None = None


class Scored(NamedTuple):
    """The sum of log-probabilities, and whether each token was the most probable one."""

    logprob: float
    is_greedy: bool


class Scorer:
    """Scores rows by the forward pass of training.

    Args:
      model, params: the decoder; it computes in the dtype of ``params``.
      mesh: where these lie.
      rows: rows of a batch; rounded up to what splits over the mesh.
      longest: most tokens that are read at once; left out, the model's ``seq_len``.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params: Any,
        *,
        mesh: Mesh,
        rows: int = 16,
        longest: int | None = None,
    ):
        check_positions(model, longest or 0)
        self.longest = row_length(model, longest, least=1)
        self._params, self._mesh = params, mesh
        self._rows = whole_rows(rows, mesh)
        self._run = jax.jit(functools.partial(_log_probs, model))

    def __call__(self, rows: Iterable[Row]) -> list[Scored]:
        """Returns the score of each row, in their order."""
        rows = list(rows)
        for row in rows:
            if not 1 <= row.counted < len(row.tokens) <= self.longest + 1:
                raise ValueError(
                    f"a row of {len(row.tokens)} tokens has {row.counted} to score: give 2 to "
                    f"{self.longest + 1}, and score at most all but the first"
                )
        found: dict[int, Scored] = {}
        for part in by_length([len(row.tokens) for row in rows], self._rows):
            found.update(zip(part, self._batch([rows[i] for i in part]), strict=True))
        return [found[i] for i in range(len(rows))]

    def _batch(self, rows: Sequence[Row]) -> Iterator[Scored]:
        size = padded_length(len(rows[0].tokens) - 1)
        shape = self._rows, min(size, self.longest)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets")}
        for b, row in enumerate(rows):
            batch["tokens"][b, : len(row.tokens) - 1] = row.tokens[:-1]
            batch["targets"][b, : len(row.tokens) - 1] = row.tokens[1:]
        with jax.set_mesh(self._mesh):
            logprobs_BT, best_BT = jax.device_get(self._run(self._params, batch))
        for b, row in enumerate(rows):
            span = slice(len(row.tokens) - 1 - row.counted, len(row.tokens) - 1)
            mask = np.s_[:] if row.mask is None else row.mask
            logprobs, best = logprobs_BT[b, span][mask], best_BT[b, span][mask]
            yield Scored(float(logprobs.sum(dtype=np.float64)), bool(best.all()))


class MaskedScorer:
    """Scores the tokens of sentences by a model of masked tokens: each by what the model fills in
    for it where it alone is masked. Their sum is the pseudo-log-likelihood (Salazar et al. 2020,
    https://arxiv.org/abs/1910.14659).

    Args:
      ends: the tokens that a sentence begins and ends with, such as BERT's [CLS] and [SEP].
      mask: the token that masks.
      model, params, mesh, rows: as of :class:`Scorer`.
    """

    def __init__(
        self,
        model: EncoderConfig,
        params: Any,
        *,
        mesh: Mesh,
        ends: tuple[int, int],
        mask: int,
        rows: int = 16,
    ):
        if model.head != "tokens":
            raise ValueError(f"head is {model.head!r}: give a model that fills in masked tokens")
        self.longest = unscaled(model, model.seq_len) - 2
        self._ends, self._mask = ends, mask
        self._params, self._mesh = params, mesh
        self._rows = whole_rows(rows, mesh)
        self._run = jax.jit(functools.partial(encoder.log_probs, model))

    def __call__(self, sentences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Returns the float64 score [T] of each token of each sentence.

        Raises:
          ValueError: a sentence has no token, or more than there is room for.
        """
        for tokens in sentences:
            if not 1 <= len(tokens) <= self.longest:
                raise ValueError(
                    f"a sentence has {len(tokens)} tokens: give 1 to {self.longest}, for which the "
                    "model has positions"
                )
        found = [np.zeros(len(tokens)) for tokens in sentences]
        places = [(i, t) for i, tokens in enumerate(sentences) for t in range(len(tokens))]
        for numbers in by_length([len(sentences[i]) for i, _ in places], self._rows):
            part = [places[number] for number in numbers]
            for (i, t), score in zip(part, self._batch(sentences, part), strict=False):
                found[i][t] = score
        return found

    def _batch(
        self, sentences: Sequence[Sequence[int]], part: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        longest = len(sentences[part[0][0]]) + 2
        length = min(padded_length(longest), self.longest + 2)
        shapes = {name: (self._rows, length) for name in ("tokens", "segments")}
        shapes |= {name: (self._rows, 1) for name in ("places", "targets")}
        batch = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
        for b, (i, t) in enumerate(part):
            row = [self._ends[0], *sentences[i], self._ends[1]]
            batch["segments"][b, : len(row)] = 1
            batch["places"][b], batch["targets"][b] = t + 1, row[t + 1]
            row[t + 1] = self._mask
            batch["tokens"][b, : len(row)] = row
        with jax.set_mesh(self._mesh):
            return np.asarray(self._run(self._params, batch), np.float64)[:, 0]


def with_all_rows(opened: Opened) -> DecoderConfig:
    """Returns an opened decoder with every row that its config counts.

    Generation leaves out rows that the tokenizer has no token for. Log-probabilities count them, as
    training and transformers do.
    """
    return dataclasses.replace(opened.model, vocab_size=find_model(opened.folder)[1].vocab_size)


def _log_probs(
    model: DecoderConfig, params: Any, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each target [B, T], and whether it is the most probable token."""
    return decoder.token_scores(model, params, decoder.run(model, params, batch), batch)


def windows(tokens: Sequence[int], *, longest: int, stride: int) -> Iterator[Row]:
    """Cuts tokens into rows that score each but the first once, with as many before it as fit: at
    least ``longest - stride``, where there are so many.

    >>> [(list(row.tokens), row.counted) for row in windows(range(8), longest=4, stride=2)]
    [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2), ([3, 4, 5, 6, 7], 1)]
    """
    end = min(len(tokens), longest + 1)
    if end > 1:
        yield Row(tokens[:end], end - 1)
    while end < len(tokens):
        done, end = end, min(len(tokens), end + stride)
        yield Row(tokens[max(0, end - longest - 1) : end], end - done)
