"""The bits per byte of counting: what a language model of bytes has to beat.

Symbol legend: a, b, c are successive symbols; 0 to 255 are bytes, 256 is a document's boundary.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

_SYMBOLS = 257
_BOUNDARY = 256
_CHUNK_SYMBOLS = 1 << 22


def ngram_bits_per_byte(train: Iterable[bytes], held_out: Iterable[bytes], order: int = 2) -> float:
    """Measures an n-gram model of bytes, as a floor to compare a byte-level language model with.

    Each document is ``boundary, bytes..., boundary``. Predicted are all symbols of it but its first
    byte, which a language model trained on packed rows (`PackedTokens`) never predicts either; the
    boundary at the end is predicted, as a model's end-of-document token is. That is as many
    predictions as bytes. Counts are of the predicted symbols of `train`. Smoothing is Witten-Bell:
    with N(h) the count of symbols after the context h, N(hc) of them c, and D(h) the number of
    different ones,

        P(c | h) = (N(hc) + D(h) P(c | h')) / (N(h) + D(h))

    where h' is h without its earliest symbol, and below the empty context P = 1/257. A context
    never seen has P(c | h) = P(c | h'). There is nothing to tune.

    Args:
      train: documents to count.
      held_out: documents to predict.
      order: how many earlier symbols to look at: 0, 1 or 2.

    Returns:
      ``-sum(log2 P) / bytes of held_out``.

    Raises:
      ValueError: if `order` is another number, or one of the two has no bytes.

    Source: Bell, Cleary and Witten, Text Compression (1990), method C; as interpolation in Chen and
    Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (1998), section 2.4.

    >>> round(ngram_bits_per_byte([b"abab" * 9], [b"abab" * 9]), 2)
    0.16
    """
    if order not in (0, 1, 2):
        raise ValueError(f"order is {order}; give 0, 1 or 2")
    counts_abc = np.zeros(_SYMBOLS**3, np.int64)
    for a, b, c in _predictions(train):
        counts_abc += np.bincount((a * _SYMBOLS + b) * _SYMBOLS + c, minlength=_SYMBOLS**3)
    counts_abc = counts_abc.reshape(_SYMBOLS, _SYMBOLS, _SYMBOLS)
    counts_bc = counts_abc.sum(0)
    counts_c = counts_bc.sum(0)
    if not counts_c.any():
        raise ValueError("the documents to count hold no bytes")

    p_c = _interpolate(counts_c, np.full(_SYMBOLS, 1 / _SYMBOLS))
    p_bc = _interpolate(counts_bc, p_c)
    total_ab = counts_abc.sum(2)
    distinct_ab = np.count_nonzero(counts_abc, axis=2)

    bits, num_bytes = 0.0, 0
    for a, b, c in _predictions(held_out):
        if order == 0:
            p = p_c[c]
        elif order == 1:
            p = p_bc[b, c]
        else:
            # Only where it is needed: a table of all P(c | a, b) would be another 136 MB.
            total, distinct = total_ab[a, b], distinct_ab[a, b]
            weight = np.maximum(total + distinct, 1)
            p = np.where(
                total > 0, (counts_abc[a, b, c] + distinct * p_bc[b, c]) / weight, p_bc[b, c]
            )
        bits -= np.log2(p).sum()
        num_bytes += len(c)
    if not num_bytes:
        raise ValueError("the documents to predict hold no bytes")
    return float(bits / num_bytes)


def _interpolate(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Returns P(c | h) for counts [..., c] and P(c | h') [c]; P(c | h') where h was never seen."""
    total = counts.sum(-1, keepdims=True)
    distinct = np.count_nonzero(counts, axis=-1, keepdims=True)
    p = (counts + distinct * lower) / np.maximum(total + distinct, 1)
    return np.where(total > 0, p, lower)


def _predictions(documents: Iterable[bytes]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields (a, b, c) int64 [events] of the predicted symbols, a few million at a time."""
    for symbols in _symbol_chunks(documents):
        a, b, c = symbols[:-2], symbols[1:-1], symbols[2:]
        # After a boundary comes a first byte, or the boundary of an empty document.
        predicted = b != _BOUNDARY
        yield a[predicted], b[predicted], c[predicted]


def _symbol_chunks(documents: Iterable[bytes]) -> Iterator[np.ndarray]:
    """Yields the documents, a boundary before, between and after them, as int64 symbols.

    A chunk begins with the last two symbols of the one before, which are context and no more.
    """
    boundary = np.array([_BOUNDARY], np.int64)
    parts, size = [boundary], 0
    for document in documents:
        data = np.frombuffer(document, np.uint8)
        pieces = (data[i : i + _CHUNK_SYMBOLS] for i in range(0, len(data), _CHUNK_SYMBOLS))
        for piece in itertools.chain(pieces, (boundary,)):
            parts.append(piece)
            size += len(piece)
            if size >= _CHUNK_SYMBOLS:
                chunk = np.concatenate(parts)
                yield chunk
                parts, size = [chunk[-2:]], 0
    if size:
        yield np.concatenate(parts)
