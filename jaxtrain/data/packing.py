"""Tokenized documents to rows of fixed length, cut when asked.

Shape legend: T tokens in a row.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.data.sources import Document
from jaxtrain.data.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenized documents, end to end, each followed by its end-of-document token.

    Attributes:
      tokens: [N] uint16 or uint32, in memory or mapped from files; read by slices.
      starts: [documents] int64, where each document begins, ascending from 0.
      num_bytes: bytes of text the tokens stand for; end-of-document tokens have none.
      fingerprint: a hash of the texts, whatever the tokenizer.
      counts: [N] uint8, 1 for a token that counts as a target; None where all do.
      pairs: whether it holds preferences: documents 2 i and 2 i + 1 are the chosen and the rejected
        one of pair i; of an answer with a label, one of the two is empty.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int
    fingerprint: str = ""
    counts: np.ndarray | None = None
    pairs: bool = False

    def targets_count(self, start: int, stop: int) -> np.ndarray | int:
        """Returns which of the tokens from `start` to `stop` count as targets."""
        return 1 if self.counts is None else self.counts[start:stop]

    @property
    def unpaired(self) -> bool:
        """Whether it holds answers with labels, by its first two documents."""
        stop = self.starts[2] if len(self.starts) > 2 else len(self.tokens)
        ends = [*self.starts[:2].tolist(), int(stop)]
        return self.pairs and 1 in np.diff(ends)

    def document(self, index: int) -> np.ndarray:
        """Returns the tokens of a document, its end-of-document token last."""
        stop = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.tokens)
        return self.tokens[int(self.starts[index]) : int(stop)]

    def documents(self, tokenizer: Tokenizer) -> Iterator[Document]:
        """Yields the documents as texts again, by the tokenizer that encoded them."""
        for index in range(len(self.starts)):
            yield Document(str(index), tokenizer.decode_bytes(self.document(index)))


def packed_shapes(
    global_batch: int, seq_len: int, *, pairs: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of :class:`PackedTokens`, without any text; of
    :class:`PairedTokens` with `pairs`.

    Raises:
      ValueError: for a size that is none.

    >>> packed_shapes(2, 8)["mask"]
    ShapeDtypeStruct(shape=(2, 8), dtype=float32)
    """
    for name, size in (("global_batch", global_batch), ("seq_len", seq_len)):
        if not 1 <= size < 2**31:
            raise ValueError(f"`{name}` is {size}: give a number from 1 to 2^31 - 1")
    dtypes = {
        "tokens": np.int32,
        "targets": np.int32,
        "mask": np.float32,
        "segments": np.int32,
        "positions": np.int32,
    }
    shape = (global_batch, 2, seq_len) if pairs else (global_batch, seq_len)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


class PackedTokens:
    """Rows of `seq_len` inputs and targets cut from a corpus: a grain RandomAccessDataSource.

    Row i covers tokens ``i T`` to ``(i + 1) T`` inclusive, so that every token but the first of all
    is a target exactly once. A row is a dict of arrays [T]:

    - ``tokens`` int32: the inputs;
    - ``targets`` int32: for each input, the token after it;
    - ``mask`` float32: 1 where the target counts. It is 0 where the input is an end-of-document
      token: what follows is the first token of another document, which is never predicted. The
      end-of-document token itself is a target that counts: a text of n tokens counts n targets, so
      with bytes the mean loss in nats over ln 2 *is* the bits per byte. Of conversations only what
      the assistant says counts, and the end where it has the last word;
    - ``segments`` int32: the number of the document within the row, from 1; 0 on padding;
    - ``positions`` int32: from 0 at the start of the row and at every document's start within it,
      always below T. A document that began in the row before starts again at 0.

    The last row is filled up with zeros in every array.

    Args:
      corpus: from `tokenize`.
      seq_len: T, the inputs in a row.

    Raises:
      ValueError: if `seq_len` is below 1 or the corpus has no target at all.

    >>> from jaxtrain.data import ByteTokenizer, tokenize
    >>> corpus = tokenize([Document("a", b"ab"), Document("b", b"cd")], ByteTokenizer())
    >>> for name, values_T in PackedTokens(corpus, 6)[0].items():
    ...     print(name, values_T.tolist())
    tokens [97, 98, 256, 99, 100, 0]
    targets [98, 256, 99, 100, 256, 0]
    mask [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    segments [1, 1, 1, 2, 2, 0]
    positions [0, 1, 2, 0, 1, 0]
    """

    def __init__(self, corpus: Corpus, seq_len: int):
        if seq_len < 1:
            raise ValueError(f"`seq_len` is {seq_len}; give at least 1")
        if corpus.pairs:
            raise ValueError("the corpus holds preferences: make rows of it by PairedTokens")
        if corpus.num_bytes < 1:
            raise ValueError(
                f"{len(corpus.starts)} document(s) hold no text at all, so there is nothing to "
                "predict; check the source"
            )
        self.corpus = corpus
        self.seq_len = seq_len

    def __len__(self) -> int:
        return -(-(len(self.corpus.tokens) - 1) // self.seq_len)

    def __repr__(self) -> str:
        return (
            f"PackedTokens(rows={len(self)}, seq_len={self.seq_len}, "
            f"tokens={len(self.corpus.tokens)}, documents={len(self.corpus.starts)})"
        )

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.part(index, 0, self.seq_len)

    def part(self, index: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the places from ``start`` to ``stop`` of a row; no other tokens are read."""
        row = range(len(self))[index]  # Counts from the end and raises as a list does.
        first, T = row * self.seq_len + start, stop - start
        window = self.corpus.tokens[first : first + T + 1]
        count = max(len(window) - 1, 0)
        # Documents that begin after the row's first input, up to the part's last target.
        low, here, high = np.searchsorted(
            self.corpus.starts, (first - start + 1, first + 1, first + count + 1)
        )
        begins = self.corpus.starts[here:high] - first

        tokens_T, targets_T, segments_T, positions_T = np.zeros((4, T), np.int32)
        mask_T = np.zeros(T, np.float32)
        tokens_T[:count] = window[:count]
        targets_T[:count] = window[1:]
        mask_T[:count] = self.corpus.targets_count(first + 1, first + 1 + count)
        mask_T[begins - 1] = 0
        begins = begins[: np.searchsorted(begins, count)]
        if count:
            # What stands before the part: documents of the row, and positions of the last of them.
            segments_T[0] = 1 + here - low
            positions_T[0] = start if here == low else first - self.corpus.starts[here - 1]
            positions_T[1:count] = 1
        segments_T[begins] = 1
        np.cumsum(segments_T[:count], out=segments_T[:count])
        before = np.diff(begins, prepend=-positions_T[0]).astype(np.int32)
        positions_T[begins] -= before
        np.cumsum(positions_T[:count], out=positions_T[:count])
        return {
            "tokens": tokens_T,
            "targets": targets_T,
            "mask": mask_T,
            "segments": segments_T,
            "positions": positions_T,
        }


class FittedTokens:
    """Rows of whole documents, as many as fit, filled up with zeros: a RandomAccessDataSource.

    A document is cut only where it has more than T inputs, into pieces of T and a rest. Pieces are
    placed longest first, each into the row with the least space left that holds it (best fit
    decreasing), or a new one. Every token but a document's first is a target exactly once, and an
    end-of-document token is never an input. Arrays are those of `PackedTokens`; the tokens of a
    piece that is no document's first see nothing of the pieces before.

    The places of all pieces are found when it is made: seconds and 20 MB for 10^6 documents.

    Args:
      corpus: from `tokenize` or a store.
      seq_len: T, the inputs in a row.

    Raises:
      ValueError: as of `PackedTokens`.

    >>> from jaxtrain.data import ByteTokenizer, tokenize
    >>> documents = [Document(str(n), b"x" * n) for n in (3, 5, 2)]
    >>> rows = FittedTokens(tokenize(documents, ByteTokenizer()), 5)
    >>> [row["segments"].tolist() for row in rows]
    [[1, 1, 1, 1, 1], [1, 1, 1, 2, 2]]
    """

    def __init__(self, corpus: Corpus, seq_len: int):
        PackedTokens(corpus, seq_len)  # refuses what it refuses
        self.corpus, self.seq_len = corpus, seq_len
        inputs = np.diff(corpus.starts, append=len(corpus.tokens)) - 1
        pieces = -(-inputs // seq_len)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        offset = (np.arange(len(first)) - first) * seq_len
        begin = np.repeat(corpus.starts, pieces) + offset
        length = np.minimum(np.repeat(inputs, pieces) - offset, seq_len)
        order, self._first = _rows_of(length, seq_len)
        self._begin, self._length = begin[order], length[order]

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.part(index, 0, self.seq_len)

    def part(self, index: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the places from ``start`` to ``stop`` of a row; no other tokens are read."""
        row = range(len(self))[index]
        pieces = slice(*self._first[row : row + 2])
        length = self._length[pieces]
        at = np.cumsum(length) - length - start  # of each piece's first token in the part
        skipped = np.clip(-at, 0, length)
        held = np.clip(length + at, 0, stop - start) - np.clip(at, 0, stop - start)
        both = (self._begin[pieces] + skipped).tolist(), held.tolist()
        windows = [_window(self.corpus, *x) for x in zip(*both, strict=True)]
        return _placed(stop - start, windows, skipped.tolist())


class PairedTokens:
    """Rows of whole preferences, as many as fit: a RandomAccessDataSource.

    Arrays are those of `FittedTokens`, [2, T]: the chosen conversations first, the rejected ones
    second. In both, segment s is of the same pair. The longer side of a pair is what has to fit; a
    pair of which it has more than T inputs is left out, for a part of a conversation says nothing
    of the whole.

    Of an answer with a label, the other side is its prompt with the answer of the label before, by
    which a loss may measure how far a policy is from its reference; ``mask`` is -1 there.

    Args:
      corpus: of preferences, from `tokenize` or a store.
      seq_len: T, the inputs of a side in a row.

    Attributes:
      left_out: how many pairs are too long.

    Raises:
      ValueError: if `seq_len` is below 1, or the corpus holds no preferences, or none that fits.

    >>> from jaxtrain.data import ByteTokenizer, ChatTemplate, tokenize
    >>> from jaxtrain.data.chat import TEMPLATES
    >>> record = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
    >>> pair = ChatTemplate(TEMPLATES["plain"]).conversations("a", record)
    >>> row = PairedTokens(tokenize(pair, ByteTokenizer()), 8)[0]
    >>> row["segments"].tolist()
    [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]]
    >>> row["mask"].sum(axis=1).tolist()  # what was answered, and its end
    [2.0, 3.0]
    """

    def __init__(self, corpus: Corpus, seq_len: int):
        if not corpus.pairs:
            raise ValueError("the corpus holds no preferences: make rows of it by PackedTokens")
        if seq_len < 1:
            raise ValueError(f"`seq_len` is {seq_len}; give at least 1")
        self.corpus, self.seq_len = corpus, seq_len
        inputs = (np.diff(corpus.starts, append=len(corpus.tokens)) - 1).reshape(-1, 2)
        self._begin = np.asarray(corpus.starts).reshape(-1, 2)
        self._prompts = _prompts(corpus, self._begin, inputs) if corpus.unpaired else None
        if self._prompts is not None:  # what a side without an answer is made of
            answers = inputs.max(axis=1) - self._prompts
            inputs = np.where(inputs > 0, inputs, (self._prompts + np.roll(answers, 1))[:, None])
        longest = inputs.max(axis=1)
        fits = longest <= seq_len
        self.left_out = int((~fits).sum())
        if not fits.any():
            raise ValueError(
                f"none of {len(fits)} preferences fits into rows of {seq_len} tokens: the shortest "
                f"needs {longest.min(initial=1 << 31)}"
            )
        order, self._first = _rows_of(longest[fits], seq_len)
        self._pair = np.flatnonzero(fits)[order]
        self._begin, self._length = self._begin[self._pair], inputs[self._pair]

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = range(len(self))[index]
        pairs = range(*self._first[row : row + 2])
        sides = [
            _placed(self.seq_len, [self._side(pair, side) for pair in pairs]) for side in (0, 1)
        ]
        return {name: np.stack([side[name] for side in sides]) for name in sides[0]}

    def _side(self, pair: int, side: int) -> tuple[np.ndarray, Any]:
        """The tokens of a side, and which of their targets count."""
        begin, length = int(self._begin[pair, side]), int(self._length[pair, side])
        index = int(self._pair[pair])
        if self._prompts is None or len(self.corpus.document(2 * index + side)) > 1:
            return _window(self.corpus, begin, length)
        before = (index - 1) % len(self._prompts)
        (own, _), (tokens, counts) = map(self._answered, (index, before))
        prompt, size = own[: self._prompts[index]], self._prompts[before]
        counted = np.append(np.zeros(max(len(prompt) - 1, 0)), -1.0 * counts[size - 1 :])
        return np.append(prompt, tokens[size:]), counted

    def _answered(self, index: int) -> tuple[np.ndarray, Any]:
        document = 2 * index + int(len(self.corpus.document(2 * index)) == 1)
        length = len(self.corpus.document(document)) - 1
        return _window(self.corpus, int(self.corpus.starts[document]), length)


def pack(
    corpus: Corpus, seq_len: int, packing: str = "cut"
) -> PackedTokens | FittedTokens | PairedTokens:
    """Returns the rows of a corpus: "cut" or "fit"; those of preferences, which are not cut."""
    if corpus.pairs:
        return PairedTokens(corpus, seq_len)
    return {"cut": PackedTokens, "fit": FittedTokens}[packing](corpus, seq_len)


def _window(corpus: Corpus, begin: int, count: int) -> tuple[np.ndarray, Any]:
    """So many inputs and the target of the last, and which of the targets count."""
    stop = begin + count + 1
    return corpus.tokens[begin:stop], corpus.targets_count(begin + 1, stop)


def _placed(
    seq_len: int, windows: Sequence[tuple[np.ndarray, Any]], skipped: Sequence[int] = ()
) -> dict[str, np.ndarray]:
    """Returns the row of some pieces, one after the other, filled up with zeros; of each, so many
    first tokens stand before the row."""
    arrays = {
        name: np.zeros(seq_len, array.dtype) for name, array in packed_shapes(1, seq_len).items()
    }
    at = 0
    before = skipped or [0] * len(windows)
    for number, ((window, counts), first) in enumerate(zip(windows, before, strict=True), 1):
        count = len(window) - 1
        place = slice(at, at + count)
        arrays["tokens"][place], arrays["targets"][place] = window[:-1], window[1:]
        arrays["mask"][place] = counts
        arrays["segments"][place] = number
        arrays["positions"][place] = np.arange(first, first + count)
        at += count
    return arrays


def _prompts(corpus: Corpus, begin_N2: np.ndarray, inputs_N2: np.ndarray) -> np.ndarray:
    """The tokens before the answer of each pair that has one."""
    begins = begin_N2[np.arange(len(begin_N2)), inputs_N2.argmax(axis=1)].tolist()
    stops = inputs_N2.max(axis=1).tolist()
    counts = (corpus.counts[at : at + n + 1] for at, n in zip(begins, stops, strict=True))
    return np.array([int(np.argmax(each)) for each in counts])


def _rows_of(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pieces in the order of their rows, and at which of these each row begins."""
    longest_first = np.argsort(-lengths, kind="stable")
    row = _best_fit(lengths[longest_first].tolist(), capacity)
    by_row = np.argsort(row, kind="stable")
    return longest_first[by_row], np.searchsorted(row[by_row], np.arange(row.max() + 2))


def _best_fit(lengths: list[int], capacity: int) -> np.ndarray:
    """Returns the row of each piece; lengths descend."""
    rows = np.zeros(len(lengths), np.int64)
    open_rows: dict[int, list[int]] = {}  # by the space left
    spaces: list[int] = []  # that rows have left, ascending
    count = 0
    for piece, length in enumerate(lengths):
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            row, left, count = count, capacity - length, count + 1
        else:
            space = spaces[place]
            row, left = open_rows[space].pop(), space - length
            if not open_rows[space]:
                del spaces[place]
        rows[piece] = row
        if left:
            if not open_rows.setdefault(left, []):
                bisect.insort(spaces, left)
            open_rows[left].append(row)
    return rows


def waste(rows: PackedTokens | FittedTokens | PairedTokens) -> dict[str, float]:
    """Returns what of a packing is lost: the share of inputs that predict nothing (``idle``), and
    of the documents that would fit into a row, those that were cut (``cut``).

    >>> from jaxtrain.data import ByteTokenizer, tokenize
    >>> corpus = tokenize([Document("a", b"ab"), Document("b", b"cdef")], ByteTokenizer())
    >>> waste(PackedTokens(corpus, 4)), waste(FittedTokens(corpus, 4))
    ({'idle': 0.25, 'cut': 0.5}, {'idle': 0.25, 'cut': 0.0})
    """
    corpus, T = rows.corpus, rows.seq_len
    if isinstance(rows, PairedTokens):
        return {"idle": 1 - int(rows._length.sum()) / (len(rows) * 2 * T), "cut": 0.0}
    inputs = np.diff(corpus.starts, append=len(corpus.tokens)) - 1
    cut = 0.0
    if isinstance(rows, PackedTokens):
        last = corpus.starts + inputs - 1
        fitting = (inputs > 0) & (inputs <= T)
        cut = (
            float(np.mean(corpus.starts[fitting] // T != last[fitting] // T))
            if fitting.any()
            else 0.0
        )
    return {"idle": 1 - int(inputs.sum()) / (len(rows) * T), "cut": cut}
