"""Reports of documents that repeat others, and of held-out text that is in the text to train on.

Shapes: W words of a document, S of its shingles, K hash functions.
"""

import hashlib
import re
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxtrain.data.sources import Document

# Words in a row that two documents share where one contaminates the other (GPT-3, Brown et al.
# 2020, https://arxiv.org/abs/2005.14165, appendix C), and words of a shingle.
OVERLAP, SHINGLE = 13, 5
# Documents with so much of their shingles in common, by the estimate, are near duplicates. Those
# whose hashes agree in any of the bands are compared: 99.98 % of the pairs at 0.8.
SIMILAR, BANDS, ROWS = 0.8, 16, 4
_WORD = re.compile(rb"\w+|[\x80-\xff]+")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.random.default_rng(0).integers(0, 2**64, (BANDS * ROWS, 2), np.uint64)


def repeated(documents: Iterable[Document]) -> dict[str, Any]:
    """Counts the ``documents``, those that are an earlier one again (``exact``), and of the others
    those that are nearly one (``near``: MinHash, Broder 1997, of shingles of 5 words), with the
    names of the first ``pairs`` of these. Empty documents are left out.

    >>> texts = [b"a b c d e f g", b"a b c d e f g", b"another text", b"A B c d e, f g"]
    >>> found = repeated(Document(str(n), text) for n, text in enumerate(texts))
    >>> found["documents"], found["exact"], found["near"], found["pairs"]
    (4, 1, 1, [('0', '3')])
    """
    seen: set[bytes] = set()
    buckets: dict[tuple[int, bytes], list[int]] = {}
    kept: list[tuple[str, np.ndarray]] = []
    count, exact, pairs = 0, 0, []
    for document in documents:
        if not document.text:
            continue
        count += 1
        if (digest := hashlib.sha256(document.text).digest()) in seen:
            exact += 1
            continue
        seen.add(digest)
        hashes_S = grams(document.text, SHINGLE)
        if not len(hashes_S):
            continue
        signature_K = np.array([(hashes_S * (a | np.uint64(1)) + b).min() for a, b in _FACTORS])
        keys = [(n, band.tobytes()) for n, band in enumerate(signature_K.reshape(BANDS, ROWS))]
        for other in sorted({other for key in keys for other in buckets.get(key, ())}):
            if (kept[other][1] == signature_K).mean() >= SIMILAR:
                pairs.append((kept[other][0], document.name))
                break
        for key in keys:
            buckets.setdefault(key, []).append(len(kept))
        kept.append((document.name, signature_K))
    return {"documents": count, "exact": exact, "near": len(pairs), "pairs": pairs[:10]}


def overlapping(train: Iterable[Document], held_out: Iterable[Document]) -> dict[str, float]:
    """Returns, by the name of a held-out document, the share of its stretches of 13 words that are
    in the documents to train on too; documents of fewer words have none."""
    hashes = {each.name: grams(each.text, OVERLAP, whole=False) for each in held_out}
    wanted = set().union(*(hashes_S.tolist() for hashes_S in hashes.values()))
    common: set[int] = set()
    for each in train:
        common |= wanted.intersection(grams(each.text, OVERLAP, whole=False).tolist())
    shares = {name: [each in common for each in own.tolist()] for name, own in hashes.items()}
    return {name: sum(found) / len(found) for name, found in shares.items() if found}


def grams(text: bytes, count: int, *, whole: bool = True) -> np.ndarray:
    """Returns a hash [S] of every stretch of ``count`` words, whatever their case and what stands
    between them; of fewer words one of all of them where ``whole``, and none otherwise."""
    words_W = np.array([zlib.crc32(word) for word in _WORD.findall(text.lower())], np.uint64)
    count = min(count, len(words_W)) if whole else count
    if not 0 < count <= len(words_W):
        return np.zeros(0, np.uint64)
    hashes_S = np.zeros(len(words_W) - count + 1, np.uint64)
    for offset in range(count):
        hashes_S = (hashes_S ^ words_W[offset : offset + len(hashes_S)]) * _MIX
        hashes_S ^= hashes_S >> np.uint64(29)
    return hashes_S
