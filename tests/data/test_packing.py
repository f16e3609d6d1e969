"""Packing against its definition written out token by token."""

import contextlib
import errno
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import BPETokenizer, ByteTokenizer, Document, PackedTokens, packing, tokenize
from jaxtrain.data.tokenizers import EOD
from jaxtrain.host import storage

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
    for row, wanted in zip(packed, expected, strict=True):
        assert list(row) == list(DTYPES)
        for name, dtype in DTYPES.items():
            assert row[name].dtype == dtype
            assert row[name].tolist() == wanted[name], name


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


def test_documents_are_encoded_in_chunks(monkeypatch):
    texts = [b"x" * n for n in range(50)]
    whole = tokenize(documents_of(texts), ByteTokenizer())
    sizes = []

    class Watched(ByteTokenizer):
        def encode_batch(self, texts):
            sizes.append(sum(map(len, texts)))
            return super().encode_batch(texts)

    monkeypatch.setattr(packing, "_ENCODE_BYTES", 100)
    chunked = tokenize(iter(documents_of(texts)), Watched())
    assert len(sizes) > 5
    assert max(sizes) < 100 + 50
    assert chunked.tokens.tolist() == whole.tokens.tolist()
    assert chunked.starts.tolist() == whole.starts.tolist()
    assert chunked.num_bytes == whole.num_bytes == sum(range(50))


def test_bpe_counts_bytes_not_tokens():
    texts = [b"the theme of the thesis", b"the end"]
    tokenizer = BPETokenizer.train(texts, 270)
    corpus = tokenize(documents_of(texts), tokenizer)
    assert len(corpus.tokens) < 20
    assert corpus.num_bytes == 30 == tokenizer.token_bytes(corpus.tokens)
    ends = (corpus.tokens == tokenizer.eod).nonzero()[0]
    assert corpus.starts.tolist() == [0, ends[0] + 1]
    assert tokenizer.decode(corpus.tokens) == "the theme of the thesisthe end"
    assert EOD not in tokenizer.decode(corpus.tokens)


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="no documents to tokenize"):
        tokenize([], ByteTokenizer())
    with pytest.raises(ValueError, match=r"2 document\(s\) hold no text"):
        PackedTokens(tokenize(documents_of([b"", b""]), ByteTokenizer()), 4)
    with pytest.raises(ValueError, match="seq_len is 0"):
        PackedTokens(tokenize(documents_of([b"ab"]), ByteTokenizer()), 0)


class CountingTokenizer(ByteTokenizer):
    def __init__(self, fingerprint="bytes"):
        super().__init__()
        self.fingerprint = fingerprint
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return super().encode_batch(texts)


def test_cache_is_keyed_by_text_and_tokenizer(tmp_path):
    texts = [b"ab", b"", b"cde"]
    plain = tokenize(documents_of(texts), ByteTokenizer())
    tokenizer = CountingTokenizer()
    for calls in (1, 1, 1):
        corpus = tokenize(documents_of(texts), tokenizer, cache_dir=tmp_path / "cache")
        assert tokenizer.calls == calls
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.tokens.tolist() == plain.tokens.tolist()
        assert corpus.starts.tolist() == plain.starts.tolist()
        assert corpus.num_bytes == plain.num_bytes
        assert PackedTokens(corpus, 4)[1]["mask"].tolist() == [1, 1, 1, 0]
    # The same bytes, differently cut into documents, are other documents.
    for other in ([b"abcde"], [b"ab", b"cde"], [b"ab", b"", b"cdX"]):
        tokenize(documents_of(other), tokenizer, cache_dir=tmp_path / "cache")
    assert tokenizer.calls == 4
    tokenize(documents_of(texts), CountingTokenizer("other"), cache_dir=tmp_path / "cache")
    assert len(os.listdir(tmp_path / "cache")) == 5


def test_cache_leaves_nothing_half_written(tmp_path):
    class Failing(ByteTokenizer):
        def encode_batch(self, texts):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        tokenize(documents_of([b"ab"]), Failing(), cache_dir=tmp_path)
    assert os.listdir(tmp_path) == []


def test_cache_written_by_another_process_meanwhile(tmp_path, monkeypatch):
    """On another host, or where the file system knows no locks."""
    monkeypatch.setattr(packing, "_one_at_a_time", contextlib.nullcontext)

    documents = documents_of([b"ab", b"c"])

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            tokenize(documents, ByteTokenizer(), cache_dir=tmp_path)
            return super().encode_batch(texts)

    corpus = tokenize(documents, Slow(), cache_dir=tmp_path)
    assert corpus.tokens.tolist() == [97, 98, 256, 99, 256]
    assert len(os.listdir(tmp_path)) == 1


def test_cache_refusals(tmp_path):
    with pytest.raises(ValueError, match="documents can be read only once"):
        tokenize(iter(documents_of([b"ab"])), ByteTokenizer(), cache_dir=tmp_path)
    tokenize(documents_of([b"ab"]), ByteTokenizer(), cache_dir=tmp_path)
    (path,) = tmp_path.glob("*/tokens.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"tokens.bin' has 4 bytes, not 6; delete"):
        tokenize(documents_of([b"ab"]), ByteTokenizer(), cache_dir=tmp_path)


def test_a_damaged_index_is_named_and_left_closed(tmp_path):
    (tmp_path / "index.npz").write_bytes(b"PK\x03\x04 and no more of a zip file")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(ValueError, match=r"index.npz' is damaged .*; delete"):
            packing._read_cache(tmp_path, np.dtype(np.uint16))
    assert not [w for w in seen if w.category is ResourceWarning]


def test_of_several_that_need_the_same_tokens_one_encodes(tmp_path):
    encoded = []

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            encoded.append(len(texts))
            time.sleep(0.3)
            return super().encode_batch(texts)

    documents = [Document("a", b"ab"), Document("b", b"c")]
    with ThreadPoolExecutor(3) as pool:
        corpora = list(
            pool.map(lambda _: tokenize(documents, Slow(), cache_dir=tmp_path), range(3))
        )
    assert encoded == [2]
    assert [corpus.tokens.tolist() for corpus in corpora] == [[97, 98, 256, 99, 256]] * 3


def test_a_corpus_has_the_fingerprint_of_its_texts(tmp_path):
    def fingerprint(*texts, cache_dir=None, tokenizer=None):
        documents = [Document(str(i), text) for i, text in enumerate(texts)]
        return tokenize(documents, tokenizer or ByteTokenizer(), cache_dir=cache_dir).fingerprint

    one = fingerprint(b"ab", b"c")
    assert one == fingerprint(b"ab", b"c", cache_dir=tmp_path)
    assert len({one, fingerprint(b"a", b"bc"), fingerprint(b"ab", b"d"), fingerprint(b"abc")}) == 4


def test_a_cache_is_read_through_failures_that_pass(tmp_path, monkeypatch):
    """A disk that does not answer at once is not a damaged cache, which one would delete."""
    documents = [Document("a", b"some text"), Document("b", b"more")]
    whole = tokenize(documents, ByteTokenizer(), cache_dir=tmp_path)
    load, failed = np.load, []

    def load_later(*args, **kwargs):
        if len(failed) < 2:
            failed.append(args)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return load(*args, **kwargs)

    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    monkeypatch.setattr(np, "load", load_later)
    again = tokenize(documents, ByteTokenizer(), cache_dir=tmp_path)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert len(failed) == 2
