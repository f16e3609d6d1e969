"""Rows with something to fill in: for encoders, fragments of documents of which some tokens are
masked; for encoder-decoders, stretches of text without some spans, and the spans.

Shape legend: T tokens in a row, M predictions of a row; S tokens of a source, T of its target.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.data.loader import RowSource, shuffled
from jaxtrain.data.packing import Corpus, packed_shapes
from jaxtrain.data.tokenizers import Tokenizer

# Of the tokens that are chosen, these shares are masked and replaced; the others stay (Devlin et
# al. 2018, https://arxiv.org/abs/1810.04805, section 3.1).
MASKED, REPLACED = 0.8, 0.1
# Of a text, T5 cuts out this share, in spans of so many tokens (Raffel et al. 2020, section 3.3).
NOISE, SPAN = 0.15, 3
# Every stretch of text is a row so many times, each with other spans.
VERSIONS = 4

# What a tokenizer calls the token that begins a row and the one that masks: BERT's, RoBERTa's.
FIRST, MASK = ("[CLS]", "<s>"), ("[MASK]", "<mask>")


def special_id(tokenizer: Tokenizer, names: Sequence[str]) -> int:
    """The first of some special tokens that a tokenizer has."""
    for name in names:
        if (id := tokenizer.special_id(name.encode())) is not None:
            return id
    raise ValueError(
        f"the tokenizer has no token {' or '.join(names)}: give an encoder's, as of "
        "BERT or RoBERTa, or a number"
    )


def texts_row(
    ends: tuple[int, int],
    text: Sequence[int],
    pair: Sequence[int],
    length: int,
    *,
    typed: bool = True,
) -> dict[str, np.ndarray]:
    """A row [T] of tokens between those that begin and end one, and perhaps a second text of
    another type, which ends too. What is too long is cut, the longer text first.

    >>> row = texts_row((8, 9), [1, 2, 3, 4], [5, 6], 8)
    >>> row["tokens"].tolist(), row["types"].tolist()
    ([8, 1, 2, 3, 9, 5, 6, 9], [0, 0, 0, 0, 0, 1, 1, 1])
    """
    (first, last), text, pair = ends, list(text), list(pair)
    while len(text) + len(pair) > length - 2 - bool(pair):
        (text if len(text) >= len(pair) else pair).pop()
    both = [first, *text, last], [*pair, last] if pair else []
    tokens_T, segments_T, types_T = np.zeros((3, length), np.int32)
    stop = len(both[0]) + len(both[1])
    tokens_T[:stop], segments_T[:stop] = both[0] + both[1], 1
    types_T[len(both[0]) : stop] = typed
    return {"tokens": tokens_T, "segments": segments_T, "types": types_T}


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
            raise ValueError(f"`seq_len` is {seq_len}; give at least 3, for two ends and a token")
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


def predictions(seq_len: int, rate: float) -> int:
    """Returns M, the most that are predicted of a row of T tokens.

    Raises:
      ValueError: for a rate that is no share.

    >>> predictions(128, 0.15)
    19
    """
    if not 0 < rate < 1:
        raise ValueError(f"`mask_rate` is {rate}; give a share above 0 and below 1")
    return math.ceil(rate * (seq_len - 2))


class MaskedTokens:
    """Rows some of whose tokens are to be predicted, anew in every epoch: a source for `Batches`.

    Of each row a share of the tokens between its ends is chosen, at least one: four in five become
    ``mask``, one in ten becomes a token at random, one in ten stays. A row has ``tokens`` and
    ``segments`` [T], and of the chosen ``places``, ``targets`` int32 and ``mask`` float32 [M],
    filled up with zeros. What is chosen is a function of the seed, the row and the epoch, so a
    batch is one of the seed and the step.

    Args:
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


class CorruptedSpans:
    """Stretches of a corpus with spans cut out, for encoder-decoders: rows for `Batches`.

    A span becomes one token that stands for it, a sentinel; the target is every sentinel, followed
    by what it stands for, and the end (Raffel et al. 2020, https://arxiv.org/abs/1910.10683,
    section 3.3). Every stretch is a row `VERSIONS` times, each with other spans; which ones depends
    on the number of the row alone. Rows are those of `pair_row`.

    Args:
      corpus: the text.
      source_len, target_len: tokens of the two sequences.
      sentinels: the tokens that stand for spans.
      eod: the token that ends both sequences.

    Attributes:
      length: tokens of a stretch: as many as a source, with its end, can stand for.
      cut, spans: how many of them are cut out, and in how many spans.

    Raises:
      ValueError: there are too few sentinels for a source, the target is too short for its spans,
        or the text for one row.

    >>> from jaxtrain.data import ByteTokenizer, Document, tokenize
    >>> corpus = tokenize([Document("a", b"abcdefghijklmnop")], ByteTokenizer())
    >>> rows = CorruptedSpans(corpus, 12, 6, sentinels=[300, 301], eod=256)
    >>> rows[0]["source"].tolist()[-3:], rows[0]["targets"].tolist()
    ([106, 300, 256], [300, 107, 108, 256, 0, 0])
    """

    def __init__(
        self,
        corpus: Corpus,
        source_len: int,
        target_len: int,
        *,
        sentinels: Sequence[int],
        eod: int,
    ):
        self.corpus, self.lengths, self.eod = corpus, (source_len, target_len), eod
        self.sentinels = np.asarray(sentinels)
        self.fingerprint = f"{corpus.fingerprint}, {VERSIONS} times"
        self.length, self.cut, self.spans = next(
            (length, *spans_of(length))
            for length in range(2 * source_len, 0, -1)
            if length - spans_of(length)[0] + spans_of(length)[1] < source_len
        )
        if self.spans > len(sentinels):
            raise ValueError(
                f"`source_len` is {source_len}, which has {self.spans} spans, and there are "
                f"{len(sentinels)} tokens to stand for them: use a shorter source"
            )
        if self.cut + self.spans >= target_len:
            raise ValueError(
                f"`target_len` is {target_len}, too short for the spans of `source_len` "
                f"{source_len}: give at least {self.cut + self.spans + 1}"
            )
        if len(corpus.tokens) < self.length:
            raise ValueError(
                f"the text has {len(corpus.tokens)} tokens, and a row of `source_len` {source_len} "
                f"needs {self.length}: give more text or a shorter source"
            )

    def __len__(self) -> int:
        return VERSIONS * (len(self.corpus.tokens) // self.length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        version, place = divmod(int(index), len(self) // VERSIONS)
        tokens = np.asarray(self.corpus.tokens[place * self.length : (place + 1) * self.length])
        rng = np.random.default_rng((place, version))
        cut, kept = (
            np.diff([0, *np.sort(rng.choice(np.arange(1, n), self.spans - 1, False)), n])
            for n in (self.cut, self.length - self.cut)
        )
        source, target, at = [], [], 0
        for number, (before, span) in enumerate(zip(kept, cut, strict=True)):
            source += [*tokens[at : at + before], self.sentinels[number]]
            target += [self.sentinels[number], *tokens[at + before : at + before + span]]
            at += before + span
        return pair_row([*source, self.eod], [*target, self.eod], *self.lengths)


def spans_of(length: int) -> tuple[int, int]:
    """Returns how many of so many tokens are cut out, and in how many spans.

    >>> spans_of(141)
    (21, 7)
    """
    cut = max(1, round(NOISE * length))
    return cut, max(1, round(cut / SPAN))


def pair_row(
    source: Sequence[int], target: Sequence[int], source_len: int, target_len: int
) -> dict[str, np.ndarray]:
    """Returns a row for an encoder-decoder, padded with zeros.

    Args:
      source, target: tokens; of what is too long, the last one is kept in place of what does not
        fit.
      source_len, target_len: S and T.

    Returns:
      ``source`` and ``source_segments`` (1 where there is a token) int32 [S]; ``tokens``, which are
      0 and the targets, one place on, ``targets`` int32 and ``mask`` float32 [T].

    >>> row = pair_row([5, 6, 7, 1], [8, 1], 3, 3)
    >>> row["source"].tolist(), row["tokens"].tolist(), row["mask"].tolist()
    ([5, 6, 1], [0, 8, 1], [1.0, 1.0, 0.0])
    """

    def padded(tokens: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
        kept = [*tokens[: length - 1], tokens[-1]] if len(tokens) > length else tokens
        row = np.zeros(length, np.int32)
        row[: len(kept)] = kept
        return row, np.arange(length) < len(kept)

    source_S, seen_S = padded(source, source_len)
    targets_T, counts_T = padded(target, target_len)
    return {
        "source": source_S,
        "source_segments": seen_S.astype(np.int32),
        "tokens": np.concatenate([[0], targets_T[:-1]]).astype(np.int32),
        "targets": targets_T,
        "mask": counts_T.astype(np.float32),
    }


def pair_shapes(
    global_batch: int, source_len: int, target_len: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of rows of `pair_row`, without any text.

    Raises:
      ValueError: for a size that is none.

    >>> pair_shapes(2, 8, 4)["targets"]
    ShapeDtypeStruct(shape=(2, 4), dtype=int32)
    """
    source, target = (packed_shapes(global_batch, length) for length in (source_len, target_len))
    read = {"source": source["tokens"], "source_segments": source["segments"]}
    return read | {name: target[name] for name in ("tokens", "targets", "mask")}
