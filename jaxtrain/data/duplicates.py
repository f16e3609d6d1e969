"""Documents that repeat others, and held-out text that is in the text to train on. A report counts
them and a store leaves them out by the same definition.

Shapes: W words of a document, S of its shingles, K hash functions.
"""

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxtrain.data.sources import Document

# Words in a row that two documents share where one contaminates the other (GPT-3, Brown et al.
# 2020, https://arxiv.org/abs/2005.14165, appendix C), and words of a shingle.
OVERLAP, SHINGLE = 13, 5
# Documents with so much of their shingles in common, by the estimate, are near duplicates. Those
# whose hashes agree in any of the bands are compared: 99.98 % of the pairs at 0.8.
SIMILAR, BANDS, ROWS = 0.8, 16, 4
# What is kept of a document: 273 bytes. Where it has no words, `words` is false.
SKETCH = np.dtype([("digest", "S16"), ("words", "?"), ("signature", np.uint32, BANDS * ROWS)])
_WORD = re.compile(rb"\w+|[\x80-\xff]+")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.random.default_rng(0).integers(0, 2**64, (BANDS * ROWS, 2), np.uint64)
_EMPTY = hashlib.sha256(b"").digest()[:16]
_BLOCK = 1 << 8


def repeated(documents: Iterable[Document]) -> dict[str, Any]:
    """Counts the ``documents``, those that are an earlier one again (``exact``), and of the others
    those that are nearly one (``near``: MinHash, Broder 1997, of shingles of 5 words), with the
    names of the first ``pairs`` of these. Empty documents are left out.

    >>> texts = [b"a b c d e f g", b"a b c d e f g", b"another text", b"A B c d e, f g"]
    >>> found = repeated(Document(str(n), text) for n, text in enumerate(texts))
    >>> found["documents"], found["exact"], found["near"], found["pairs"]
    (4, 1, 1, [('0', '3')])
    """
    names: list[str] = []
    named = (names.append(each.name) or each for each in documents if each.text)
    sketched = (sketch(each.text, word_hashes(each.text)) for each in named)
    exact_N, near_N = repeats(np.fromiter(sketched, SKETCH))
    pairs = [(names[near_N[n]], names[n]) for n in np.flatnonzero(near_N >= 0).tolist()]
    found = {"documents": len(names), "exact": int(exact_N.sum())}
    return found | {"near": len(pairs), "pairs": pairs[:10]}


def sketch(text: bytes, words_W: np.ndarray) -> tuple[bytes, bool, np.ndarray]:
    """Returns a :data:`SKETCH`: a hash of a text, whether it has words, its MinHash signature."""
    hashes_S, signature_K = grams(words_W, SHINGLE), np.full(BANDS * ROWS, 2**64 - 1, np.uint64)
    for start in range(0, len(hashes_S), _BLOCK):
        own_S1 = hashes_S[start : start + _BLOCK, None]
        mixed_SK = own_S1 * (_FACTORS[:, 0] | np.uint64(1)) + _FACTORS[:, 1]
        signature_K = np.minimum(signature_K, mixed_SK.min(axis=0))
    low_K = signature_K.astype(np.uint32)  # the high half of a minimum of many is nearly constant
    return hashlib.sha256(text).digest()[:16], len(hashes_S) > 0, low_K


def repeats(sketches_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, of documents in order, whether each is an earlier one again [N], as no empty one is,
    and of the others the number of the first earlier one that each is nearly, or -1 [N]."""
    exact_N = sketches_N["digest"] != _EMPTY
    exact_N[np.unique(sketches_N["digest"], return_index=True)[1]] = False
    own_M, none = np.flatnonzero(~exact_N & sketches_N["words"]), len(sketches_N)
    signatures, near_N = sketches_N["signature"], np.full(none, none)
    for band in range(0, BANDS * ROWS, ROWS):
        keys_M = np.ascontiguousarray(signatures[own_M, band : band + ROWS]).view("S16").ravel()
        order_M = np.argsort(keys_M, kind="stable")
        keys_M = keys_M[order_M]
        edges = np.flatnonzero(np.r_[True, keys_M[1:] != keys_M[:-1], True][: len(keys_M) + 1])
        for at in np.flatnonzero(np.diff(edges) > 1).tolist():
            group = own_M[order_M[edges[at] : edges[at + 1]]]  # ascending: the sort is stable
            for place, number in enumerate(group.tolist()):
                for start in range(0, place, _BLOCK):
                    if group[start] >= near_N[number]:
                        break  # another band has found an earlier one
                    others = group[start : min(start + _BLOCK, place)]
                    same = (signatures[others] == signatures[number]).mean(axis=1) >= SIMILAR
                    if same.any():
                        near_N[number] = min(near_N[number], others[same.argmax()])
                        break
    return exact_N, np.where(near_N < none, near_N, -1)


def notes_on(documents: Iterable[Document], held_out: np.ndarray | None) -> dict[str, np.ndarray]:
    """Returns what must be known of documents to leave some out: their ``sketches`` [N], and
    whether each ``shares`` [N] one of the stretches of 13 words whose hashes, ascending, are
    ``held_out``; where that is None, how many of its own it ``counts`` [N], and ``stretches``."""
    shares_N, counts_N, stretches = [], [], [np.zeros(0, np.uint64)]

    def read() -> Iterator[tuple[bytes, bool, np.ndarray]]:
        for document in documents:
            if getattr(document, "side", ""):
                raise ValueError(
                    "--drop-duplicates is for single texts, and these are preferences: leave it out"
                )
            words_W = word_hashes(document.text)
            if held_out is None:
                stretches.append(grams(words_W, OVERLAP, whole=False))
                counts_N.append(len(stretches[-1]))
            elif len(held_out):
                own_S = grams(words_W, OVERLAP, whole=False)
                places_S = np.searchsorted(held_out, own_S) % len(held_out)
                shares_N.append(bool((held_out[places_S] == own_S).any()))
            yield sketch(document.text, words_W)

    sketches_N = np.fromiter(read(), SKETCH)
    shares_N = np.array(shares_N or [False] * len(sketches_N), np.bool_)
    noted = {"sketches": sketches_N, "shares": shares_N, "counts": np.array(counts_N, np.int64)}
    return noted | {"stretches": np.concatenate(stretches)}


def overlapping(train: Iterable[Document], held_out: Iterable[Document]) -> dict[str, float]:
    """Returns, by the name of a held-out document, the share of its stretches of 13 words that are
    in the documents to train on too; documents of fewer words have none."""
    hashes = {each.name: grams(word_hashes(each.text), OVERLAP, whole=False) for each in held_out}
    wanted = set().union(*(hashes_S.tolist() for hashes_S in hashes.values()))
    common: set[int] = set()
    for each in train:
        common |= wanted.intersection(grams(word_hashes(each.text), OVERLAP, whole=False).tolist())
    shares = {name: [each in common for each in own.tolist()] for name, own in hashes.items()}
    return {name: sum(found) / len(found) for name, found in shares.items() if found}


def word_hashes(text: bytes) -> np.ndarray:
    """Returns a hash [W] of every word, whatever its case."""
    return np.array([zlib.crc32(word) for word in _WORD.findall(text.lower())], np.uint64)


def grams(words_W: np.ndarray, count: int, *, whole: bool = True) -> np.ndarray:
    """Returns a hash [S] of every stretch of ``count`` words; of fewer words one of all of them
    where ``whole``, and none otherwise."""
    count = min(count, len(words_W)) if whole else count
    if not 0 < count <= len(words_W):
        return np.zeros(0, np.uint64)
    hashes_S = np.zeros(len(words_W) - count + 1, np.uint64)
    for offset in range(count):
        hashes_S = (hashes_S ^ words_W[offset : offset + len(hashes_S)]) * _MIX
        hashes_S ^= hashes_S >> np.uint64(29)
    return hashes_S
