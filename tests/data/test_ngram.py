"""The n-gram measure against dictionaries, a closed form, and compressible text."""

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import ngram, ngram_bits_per_byte


def slow_bits_per_byte(train, held_out, order):
    """The definition: counts in dictionaries, one symbol at a time."""
    counts = collections.defaultdict(collections.Counter)

    def predictions(documents):
        for document in documents:
            symbols = [256, *document, 256]
            for place in range(2, len(symbols)):
                if len(document):
                    yield symbols[place - 2 : place], symbols[place]

    def probability(context, symbol):
        lower = probability(context[1:], symbol) if context else 1 / 257
        followers = counts[tuple(context)]
        total, distinct = sum(followers.values()), len(followers)
        if not total:
            return lower
        return (followers[symbol] + distinct * lower) / (total + distinct)

    for context, symbol in predictions(train):
        for length in range(3):
            counts[tuple(context[2 - length :])][symbol] += 1
    bits = -sum(math.log2(probability(c[2 - order :], s)) for c, s in predictions(held_out))
    return bits / sum(map(len, held_out))


letters = st.lists(st.binary(max_size=30) | st.text("ab", max_size=30).map(str.encode), max_size=5)


@settings(max_examples=6, deadline=None)
@given(train=letters.filter(any), held_out=letters.filter(any))
def test_agrees_with_the_definition(train, held_out):
    for order in (0, 1, 2):
        fast = ngram_bits_per_byte(iter(train), iter(held_out), order)
        np.testing.assert_allclose(fast, slow_bits_per_byte(train, held_out, order), rtol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_chunks_do_not_change_it(monkeypatch, chunk):
    train = [b"", b"x", b"the theme of the thesis", b"", b"the end" * 5]
    held_out = [b"this theme", b"", b"e", b"then the end"]
    whole = ngram_bits_per_byte(train, held_out)
    monkeypatch.setattr(ngram, "_CHUNK_SYMBOLS", chunk)
    np.testing.assert_allclose(ngram_bits_per_byte(train, held_out), whole, rtol=1e-12)


def test_order_zero_by_hand():
    # Predicted in training: b, a boundary. In both held-out documents: the boundary.
    p = (1 + 2 / 257) / 4
    np.testing.assert_allclose(ngram_bits_per_byte([b"ab"], [b"a", b"b"], 0), -math.log2(p))


def test_memory_beats_chance_and_order_helps():
    text = [b"the quick brown fox jumps over the lazy dog. " * 20]
    bits = [ngram_bits_per_byte(text, text, order) for order in (0, 1, 2)]
    assert 8 > bits[0] > bits[1] > bits[2]
    noise = np.random.default_rng(0).integers(0, 256, 1000, np.uint8).tobytes()
    assert ngram_bits_per_byte(text, [noise]) > 8


def test_refusals():
    with pytest.raises(ValueError, match="order is 3; give 0, 1 or 2"):
        ngram_bits_per_byte([b"ab"], [b"ab"], 3)
    with pytest.raises(ValueError, match="documents to count hold no bytes"):
        ngram_bits_per_byte([b""], [b"ab"])
    with pytest.raises(ValueError, match="documents to predict hold no bytes"):
        ngram_bits_per_byte([b"ab"], [b"", b""])
