"""Rows for encoders: fragments of documents, and fragments of which some tokens are masked.

Shape legend: T tokens in a row, M predictions of a row.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.loader import RowSource, shuffled
from jaxtrain.data.packing import Corpus

# Of the tokens that are chosen, these shares are masked and replaced; the others stay (Devlin et
# al. 2018, https://arxiv.org/abs/1810.04805, section 3.1).
MASKED, REPLACED = 0.8, 0.1


class Fragments:
    """Documents cut into rows of their own: a grain RandomAccessDataSource.

    A row is ``first``, up to T - 2 tokens of one document, ``last``, and padding, as arrays [T]:
    ``tokens`` int32, and ``segments`` int32, 1 where there is a token and 0 on padding. With labels
    it has ``label`` int32 and ``mask`` 1 too.

    Args:
      corpus: from `tokenize`.
      seq_len: T, at least 3.
      first, last: the tokens that every row begins and ends with, such as BERT's [CLS] and [SEP].
      labels: the class of every document, from 0.

    Raises:
      ValueError: if `seq_len` is below 3 or the corpus has no text.

    >>> from jaxtrain.data import ByteTokenizer, Document, tokenize
    >>> corpus = tokenize([Document("a", b"abc"), Document("b", b"d")], ByteTokenizer())
    >>> rows = Fragments(corpus, 4, first=257, last=256, labels=[5, 6])
    >>> [row["tokens"].tolist() for row in rows], [int(row["label"]) for row in rows]
    ([[257, 97, 98, 256], [257, 99, 256, 0], [257, 100, 256, 0]], [5, 5, 6])
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        *,
        first: int,
        last: int,
        labels: Sequence[int] | None = None,
    ):
        if seq_len < 3:
            raise ValueError(f"seq_len is {seq_len}; give at least 3, for two ends and a token")
        self.corpus, self.seq_len, self.ends = corpus, seq_len, (first, last)
        # Without the end-of-document token of each.
        lengths = np.diff(corpus.starts, append=len(corpus.tokens)) - 1
        pieces = -(-lengths // (seq_len - 2))
        if not pieces.sum():
            raise ValueError(f"{len(pieces)} document(s) hold no text at all; check the source")
        self._document = np.repeat(np.arange(len(pieces)), pieces)
        place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._begin = corpus.starts[self._document] + place * (seq_len - 2)
        stops = (corpus.starts + lengths)[self._document]
        self._stop = np.minimum(self._begin + seq_len - 2, stops)
        self._labels = None if labels is None else np.asarray(labels, np.int32)

    def __len__(self) -> int:
        return len(self._begin)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inside = self.corpus.tokens[int(self._begin[index]) : int(self._stop[index])]
        tokens_T, segments_T = np.zeros((2, self.seq_len), np.int32)
        tokens_T[: len(inside) + 2] = (self.ends[0], *inside, self.ends[1])
        segments_T[: len(inside) + 2] = 1
        row = {"tokens": tokens_T, "segments": segments_T}
        if self._labels is None:
            return row
        return row | {"label": self._labels[self._document[index]], "mask": np.float32(1)}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def predictions(seq_len: int, rate: float) -> int:
    """Returns M, the most that are predicted of a row of T tokens.

    Raises:
      ValueError: for a rate that is no share.

    >>> predictions(128, 0.15)
    19
    """
    if not 0 < rate < 1:
        raise ValueError(f"mask_rate is {rate}; give a share above 0 and below 1")
    return math.ceil(rate * (seq_len - 2))


class MaskedTokens:
    """Rows some of whose tokens are to be predicted, anew in every epoch: a source for `Batches`.

    Of each row a share of the tokens between its ends is chosen, at least one: four in five become
    ``mask``, one in ten becomes a token at random, one in ten stays. A row has ``tokens`` and
    ``segments`` [T], and of the chosen ``places``, ``targets`` int32 and ``mask`` float32 [M],
    filled up with zeros. What is chosen is a function of the seed, the row and the epoch, so a
    batch is one of the seed and the step.

    Args:
      rows: such as `Fragments`.
      mask: the token that stands for one to predict.
      vocab_size: replacements are drawn below it.
      rate: the share that is chosen.
      seed: of the choice; that of the order of rows is the seed of `Batches`.

    Raises:
      ValueError: for a rate that is no share.

    >>> from jaxtrain.data import ByteTokenizer, Document, tokenize
    >>> corpus = tokenize([Document("a", b"abcdefgh")], ByteTokenizer())
    >>> rows = MaskedTokens(
    ...     Fragments(corpus, 10, first=257, last=256), mask=258, vocab_size=256, rate=0.25, seed=0
    ... )
    >>> {name: array.shape for name, array in rows[0].items()}["places"]
    (2,)
    """

    def __init__(
        self, rows: RowSource, *, mask: int, vocab_size: int, rate: float = 0.15, seed: int
    ):
        self.rows, self.mask, self.vocab_size = rows, mask, vocab_size
        self.rate, self.seed = rate, seed
        self.predictions = predictions(len(rows[0]["tokens"]), rate)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        # Indices go on after the last row, so that every epoch masks other tokens.
        row, rng = self.rows[index % len(self)], np.random.default_rng((self.seed, index))
        tokens_T = row["tokens"].copy()
        inside = int(row["segments"].sum()) - 2
        count = min(max(1, round(self.rate * inside)), inside, self.predictions)
        chosen = 1 + np.sort(rng.permutation(inside)[:count])
        places_M, targets_M = np.zeros((2, self.predictions), np.int32)
        places_M[:count], targets_M[:count] = chosen, tokens_T[chosen]
        kind = rng.random(count)
        tokens_T[chosen[kind < MASKED]] = self.mask
        other = chosen[(kind >= MASKED) & (kind < MASKED + REPLACED)]
        tokens_T[other] = rng.integers(0, self.vocab_size, len(other))
        counts_M = (np.arange(self.predictions) < count).astype(np.float32)
        predicted = {"places": places_M, "targets": targets_M, "mask": counts_M}
        return {"tokens": tokens_T, "segments": row["segments"]} | predicted

    def row_order(self, *, seed: int, global_batch: int) -> Callable[[int], int]:
        """Returns what finds the row at a position of the run, as `Batches` asks for it."""
        del global_batch
        shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

        def place(position: int) -> int:
            epoch = position // len(self)
            return epoch * len(self) + shuffled(position, len(self), shuffle_seed)

        return place
