"""Packing against its definition written out token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import (
    ByteTokenizer,
    Document,
    FittedTokens,
    PackedTokens,
    SubwordTokenizer,
    tokenize,
    waste,
)
from jaxtrain.data.tokenizers import EOD

DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "mask": np.float32,
    "segments": np.int32,
    "positions": np.int32,
}


def documents_of(texts):
    return [Document(str(n), text) for n, text in enumerate(texts)]


def expected_rows(texts, T):
    """The same rows, one token at a time."""
    stream = [(byte, n) for n, text in enumerate(texts) for byte in (*text, 256)]
    rows = []
    for start in range(0, len(stream) - 1, T):
        row = {name: [] for name in DTYPES}
        for place in range(start, start + T):
            if place + 1 >= len(stream):
                for values in row.values():
                    values.append(0)
                continue
            (token, document), (target, next_document) = stream[place], stream[place + 1]
            fresh = place == start or stream[place - 1][1] != document
            row["tokens"].append(token)
            row["targets"].append(target)
            row["mask"].append(float(document == next_document))
            previous = row["segments"][-1] if row["segments"] else 0
            row["segments"].append(previous + 1 if fresh else previous)
            row["positions"].append(0 if fresh else row["positions"][-1] + 1)
        rows.append(row)
    return rows


texts_strategy = st.lists(st.binary(max_size=12), min_size=1, max_size=12).filter(any)


@settings(max_examples=150, deadline=None)
@given(texts=texts_strategy, T=st.integers(1, 20))
def test_rows_are_the_definition(texts, T):
    packed = PackedTokens(tokenize(documents_of(texts), ByteTokenizer()), T)
    expected = expected_rows(texts, T)
    assert len(packed) == len(expected)
    for index, (row, wanted) in enumerate(zip(packed, expected, strict=True)):
        assert list(row) == list(DTYPES)
        parts = [packed.part(index, t, min(t + 3, T)) for t in range(0, T, 3)]
        for name, dtype in DTYPES.items():
            assert row[name].dtype == dtype
            assert row[name].tolist() == wanted[name], name
            assert np.concatenate([part[name] for part in parts]).tolist() == wanted[name], name


@settings(max_examples=50, deadline=None)
@given(texts=texts_strategy, T=st.integers(1, 20))
def test_every_token_but_the_first_is_a_target_once(texts, T):
    corpus = tokenize(documents_of(texts), ByteTokenizer())
    packed = PackedTokens(corpus, T)
    real = [row["segments"] > 0 for row in packed]
    inputs = np.concatenate([row["tokens"][where] for row, where in zip(packed, real, strict=True)])
    targets = np.concatenate(
        [row["targets"][where] for row, where in zip(packed, real, strict=True)]
    )
    assert inputs.tolist() == corpus.tokens[:-1].tolist()
    assert targets.tolist() == corpus.tokens[1:].tolist()
    # A document of n bytes counts n targets: its bytes but the first, and its end.
    assert sum(row["mask"].sum() for row in packed) == corpus.num_bytes == sum(map(len, texts))


def test_indexing_is_a_sequence():
    packed = PackedTokens(tokenize(documents_of([b"abcdefgh"]), ByteTokenizer()), 3)
    assert len(packed) == 3
    assert packed[-1]["tokens"].tolist() == packed[2]["tokens"].tolist() == [103, 104, 0]
    assert packed[np.int64(1)]["tokens"].tolist() == [100, 101, 102]
    for index in (3, -4):
        with pytest.raises(IndexError):
            packed[index]
    assert repr(packed) == "PackedTokens(rows=3, seq_len=3, tokens=9, documents=1)"


def test_rows_can_be_written_to():
    packed = PackedTokens(tokenize(documents_of([b"abcdefgh"]), ByteTokenizer()), 3)
    packed[0]["tokens"][:] = 0
    assert packed[0]["tokens"].tolist() == [97, 98, 99]


class WideTokenizer(ByteTokenizer):
    """Bytes at ids that 16 bits cannot hold."""

    fingerprint = "wide"
    vocab_size = 70_257

    def encode(self, text):
        return super().encode(text) + 70_000


def test_storage_is_compact():
    documents = documents_of([b"ab", b"c"])
    corpus = tokenize(documents, ByteTokenizer())
    assert corpus.tokens.dtype == np.uint16
    assert corpus.tokens.tolist() == [97, 98, 256, 99, 256]
    wide = tokenize(documents, WideTokenizer())
    assert wide.tokens.dtype == np.uint32
    assert wide.tokens.tolist() == [70_097, 70_098, 256, 70_099, 256]
    assert PackedTokens(wide, 2)[0]["tokens"].tolist() == [70_097, 70_098]


def test_bpe_counts_bytes_not_tokens():
    texts = [b"the theme of the thesis", b"the end"]
    tokenizer = SubwordTokenizer.train(texts, 270)
    corpus = tokenize(documents_of(texts), tokenizer)
    assert len(corpus.tokens) < 20
    assert corpus.num_bytes == 30 == sum(map(len, tokenizer.token_pieces(corpus.tokens)))
    ends = (corpus.tokens == tokenizer.eod).nonzero()[0]
    assert corpus.starts.tolist() == [0, ends[0] + 1]
    assert tokenizer.decode(corpus.tokens) == "the theme of the thesisthe end"
    assert EOD not in tokenizer.decode(corpus.tokens)


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="no documents to tokenize"):
        tokenize([], ByteTokenizer())
    with pytest.raises(ValueError, match=r"2 document\(s\) hold no text"):
        PackedTokens(tokenize(documents_of([b"", b""]), ByteTokenizer()), 4)
    with pytest.raises(ValueError, match="`seq_len` is 0"):
        PackedTokens(tokenize(documents_of([b"ab"]), ByteTokenizer()), 0)


@settings(max_examples=100, deadline=None)
@given(texts=texts_strategy, T=st.integers(1, 20))
def test_fitted_rows_hold_every_document_once(texts, T):
    corpus = tokenize(documents_of(texts), ByteTokenizer())
    found, cut = [], []
    fitted = FittedTokens(corpus, T)
    for index, row in enumerate(fitted):
        assert {name: values.dtype for name, values in row.items()} == DTYPES
        parts = [fitted.part(index, t, min(t + 3, T)) for t in range(0, T, 3)]
        for name, values in row.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
        assert (np.diff(row["segments"][row["segments"] > 0]) >= 0).all()
        for segment in range(1, row["segments"].max() + 1):
            where = row["segments"] == segment
            assert row["mask"][where].all()
            assert row["positions"][where].tolist() == list(range(where.sum()))
            targets = row["targets"][where].tolist()
            assert row["tokens"][where][1:].tolist() == targets[:-1]
            piece = (row["tokens"][where][0], *targets)
            (found if piece[-1] == 256 and where.sum() < T else cut).append(piece)
        assert not row["mask"][row["segments"] == 0].any()
    expected = []
    for text in filter(None, texts):
        tokens = (*text, 256)
        for start in range(0, len(text), T):
            expected.append(tokens[start : start + T + 1])
    assert sorted(found + cut) == sorted(expected)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_documents_are_fitted_longest_first_into_the_fullest_row(lengths):
    """By its definition: each into a row with the least space left, of those that hold it."""
    texts = [bytes([n]) * length for n, length in enumerate(lengths)]
    left = []
    for length in sorted(lengths, reverse=True):
        holding = [space for space in left if space >= length]
        if holding:
            left[left.index(min(holding))] -= length
        else:
            left.append(12 - length)
    rows = FittedTokens(tokenize(documents_of(texts), ByteTokenizer()), 12)
    assert sorted(int((row["segments"] == 0).sum()) for row in rows) == sorted(left)


@settings(max_examples=60, deadline=None)
@given(texts=texts_strategy, T=st.integers(1, 20))
def test_the_waste_of_a_packing_is_counted(texts, T):
    corpus = tokenize(documents_of(texts), ByteTokenizer())
    for rows in (PackedTokens(corpus, T), FittedTokens(corpus, T)):
        used = sum(float(row["mask"].sum()) for row in rows)
        assert waste(rows)["idle"] == pytest.approx(1 - used / (len(rows) * T))
    ends = np.cumsum([len(text) + 1 for text in texts])
    pairs = zip(texts, ends - [len(text) + 1 for text in texts], strict=True)
    cut = [
        begin // T != (begin + len(text) - 1) // T for text, begin in pairs if 0 < len(text) <= T
    ]
    assert waste(PackedTokens(corpus, T))["cut"] == pytest.approx(np.mean(cut) if cut else 0)
