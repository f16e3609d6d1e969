"""Documents to rows of fixed length: tokenize once into a compact array, cut rows when asked.

Shape legend: T tokens in a row.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import jax
import numpy as np

from jaxtrain.data.sources import Document
from jaxtrain.data.tokenizers import Tokenizer
from jaxtrain.host import storage

_ENCODE_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenized documents, end to end, each followed by its end-of-document token.

    Attributes:
      tokens: [N] uint16 or uint32, in memory or mapped from a file.
      starts: [documents] int64, where each document begins, ascending from 0.
      num_bytes: bytes of text the tokens stand for; end-of-document tokens have none.
      fingerprint: a hash of the texts, whatever the tokenizer.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int
    fingerprint: str = ""


def tokenize(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Encodes documents into one array of uint16 (or uint32, above 65536 ids).

    Args:
      documents: the texts, in order; with `cache_dir` they are read once to know their hash and
        once more if it is new.
      tokenizer: what encodes them.
      cache_dir: if given, a folder where the tokens are kept under a hash of the texts and the
        tokenizer, and mapped into memory rather than read. Several processes may share it: one
        of those on a host encodes, the others wait for it.

    Raises:
      ValueError: if there are no documents, `cache_dir` is in a bucket, or a kept file is damaged.

    >>> from jaxtrain.data.tokenizers import ByteTokenizer
    >>> corpus = tokenize([Document("a", b"ab"), Document("b", b"c")], ByteTokenizer())
    >>> corpus.tokens.tolist(), corpus.starts.tolist(), corpus.num_bytes
    ([97, 98, 256, 99, 256], [0, 3], 3)
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    if cache_dir is None:
        memory = io.BytesIO()
        texts = _Hashed(documents)
        starts, num_bytes = _write_tokens(texts, tokenizer, memory, dtype)
        tokens = np.frombuffer(memory.getbuffer(), dtype)
        return Corpus(tokens, starts, num_bytes, texts.fingerprint())
    if "://" in str(cache_dir):
        raise ValueError(
            f"cache_dir '{cache_dir}' is in a bucket, and tokens are mapped into memory from a "
            "disk: give a local folder"
        )
    if iter(documents) is documents:
        raise ValueError("documents can be read only once, cache_dir needs them twice; give a list")
    texts = _Hashed(documents)
    collections.deque(texts, maxlen=0)
    key = f"{tokenizer.fingerprint} {tokenizer.eod} {texts.fingerprint()}"
    folder = Path(cache_dir) / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not folder.exists():
        with _one_at_a_time(folder):
            if not folder.exists():
                _write_cache(folder, documents, tokenizer, dtype)
    corpus = storage.retrying(lambda: _read_cache(folder, dtype), f"the token cache '{folder}'")
    return dataclasses.replace(corpus, fingerprint=texts.fingerprint())


def packed_shapes(global_batch: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of :class:`PackedTokens`, without any text.

    Raises:
      ValueError: for a size below 1.

    >>> packed_shapes(2, 8)["mask"]
    ShapeDtypeStruct(shape=(2, 8), dtype=float32)
    """
    if global_batch < 1 or seq_len < 1:
        raise ValueError(f"a batch of {global_batch} rows of {seq_len} tokens is empty: give more")
    dtypes = {
        "tokens": np.int32,
        "targets": np.int32,
        "mask": np.float32,
        "segments": np.int32,
        "positions": np.int32,
    }
    return {
        name: jax.ShapeDtypeStruct((global_batch, seq_len), dtype) for name, dtype in dtypes.items()
    }


class PackedTokens:
    """Rows of `seq_len` inputs and targets cut from a corpus: a grain RandomAccessDataSource.

    Row i covers tokens ``i T`` to ``(i + 1) T`` inclusive, so that every token but the first of all
    is a target exactly once. A row is a dict of arrays [T]:

    - ``tokens`` int32: the inputs;
    - ``targets`` int32: for each input, the token after it;
    - ``mask`` float32: 1 where the target counts. It is 0 where the input is an end-of-document
      token: what follows is the first token of another document, which is never predicted. The
      end-of-document token itself is a target that counts. A document of n tokens thus counts n
      targets, so with bytes the mean loss in nats over ln 2 *is* the bits per byte;
    - ``segments`` int32: the number of the document within the row, from 1; 0 on padding;
    - ``positions`` int32: from 0 at the start of the row and at every document's start within it,
      always below T. A document that began in the row before starts again at 0.

    The last row is filled up with zeros in every array.

    Args:
      corpus: from `tokenize`.
      seq_len: T, the inputs in a row.

    Raises:
      ValueError: if `seq_len` is below 1 or the corpus has no target at all.

    >>> from jaxtrain.data.tokenizers import ByteTokenizer
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
            raise ValueError(f"seq_len is {seq_len}; give at least 1")
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
        row = range(len(self))[index]  # Counts from the end and raises as a list does.
        T = self.seq_len
        window = self.corpus.tokens[row * T : (row + 1) * T + 1]
        count = len(window) - 1
        starts = self.corpus.starts
        # Documents that begin after the row's first input, up to its last target.
        low, high = np.searchsorted(starts, (row * T + 1, row * T + count + 1))
        begins = starts[low:high] - row * T

        tokens_T, targets_T, segments_T, positions_T = np.zeros((4, T), np.int32)
        mask_T = np.zeros(T, np.float32)
        tokens_T[:count] = window[:-1]
        targets_T[:count] = window[1:]
        mask_T[:count] = 1
        mask_T[begins - 1] = 0
        begins = begins[: np.searchsorted(begins, count)]
        segments_T[0] = 1
        segments_T[begins] = 1
        np.cumsum(segments_T[:count], out=segments_T[:count])
        positions_T[:count] = 1
        positions_T[0] = 0
        positions_T[begins] -= np.diff(begins, prepend=0).astype(np.int32)
        np.cumsum(positions_T[:count], out=positions_T[:count])
        return {
            "tokens": tokens_T,
            "targets": targets_T,
            "mask": mask_T,
            "segments": segments_T,
            "positions": positions_T,
        }


def _write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, sink: BinaryIO, dtype: np.dtype
) -> tuple[np.ndarray, int]:
    """Writes the tokens of all documents to `sink`; returns where each starts and their bytes."""
    lengths, num_bytes = [0], 0
    eod = np.array([tokenizer.eod], dtype).tobytes()
    for texts in _chunks(documents):
        for ids in tokenizer.encode_batch(texts):
            sink.write(ids.astype(dtype).tobytes())
            sink.write(eod)
            lengths.append(len(ids) + 1)
        num_bytes += sum(map(len, texts))
    if len(lengths) == 1:
        raise ValueError("there are no documents to tokenize; check the source and its split")
    return np.cumsum(lengths[:-1], dtype=np.int64), num_bytes


def _chunks(documents: Iterable[Document]) -> Iterator[list[bytes]]:
    """Groups texts so that an encoder can use every core, a few megabytes at a time."""
    texts, size = [], 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text)
        if size >= _ENCODE_BYTES:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


class _Hashed:
    """Documents that are hashed as they pass."""

    def __init__(self, documents: Iterable[Document]):
        self._documents, self._digest = documents, hashlib.sha256()

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self._digest.update(len(document.text).to_bytes(8, "little"))
            self._digest.update(document.text)
            yield document

    def fingerprint(self) -> str:
        return self._digest.hexdigest()[:32]


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets the processes of this host through one after the other, for as long as it matters."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock")
    with open(lock, "w") as file:
        with contextlib.suppress(OSError):  # A file system without locks: each does the work.
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _write_cache(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype
) -> None:
    """Fills `folder` all at once: a reader sees the whole of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        with open(partial / "tokens.bin", "wb") as sink:
            starts, num_bytes = _write_tokens(documents, tokenizer, sink, dtype)
            size = sink.tell()
        np.savez(partial / "index.npz", starts=starts, num_bytes=num_bytes, size=size)
        # Another process may have been first; its files are the same.
        with contextlib.suppress(OSError):
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_cache(folder: Path, dtype: np.dtype) -> Corpus:
    try:
        # Without pickles, NumPy's default: a cache holds numbers, and nothing to run.
        # NumPy leaves a file open that it opened and cannot read.
        with (folder / "index.npz").open("rb") as f, np.load(f, allow_pickle=False) as index:
            starts, num_bytes, size = index["starts"], int(index["num_bytes"]), int(index["size"])
    except (ValueError, TypeError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        if storage.passes(error):
            raise
        raise ValueError(
            f"'{folder / 'index.npz'}' is damaged ({error}); delete '{folder}'"
        ) from None
    path = folder / "tokens.bin"
    if path.stat().st_size != size:
        raise ValueError(f"'{path}' has {path.stat().st_size} bytes, not {size}; delete '{folder}'")
    return Corpus(np.memmap(path, dtype, mode="r"), starts, num_bytes)
