"""The writing of a token store: parts that are complete or absent, and the manifest last."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from etils import epath

from jaxtrain.data.blocks import crcs
from jaxtrain.data.chat import encode_marked
from jaxtrain.data.duplicates import OVERLAP, notes_on, repeats
from jaxtrain.data.loader import ORDER_VERSION
from jaxtrain.data.packing import Corpus
from jaxtrain.data.sources import Document, Documents, Files, Split
from jaxtrain.data.store import (
    COUNTS,
    DROPPED,
    FORMAT,
    MANIFEST,
    PARTS,
    SUMS,
    TOKENIZER,
    Noted,
    Store,
    is_store,
    naming_damage,
    open_store,
    part_path,
    read_manifest,
    shard_files,
)
from jaxtrain.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer
from jaxtrain.data.workers import start_worker
from jaxtrain.host import storage
from jaxtrain.host.paths import (
    as_path,
    cache_folder,
    delete_oldest,
    exists,
    file_system,
    is_remote,
    listed,
    make_folder,
    read_if_there,
    read_object,
    sizes,
)
from jaxtrain.host.simulated import cpus

# Text in a shard, about: what one process does at a time, and what a kill can cost each.
SHARD_BYTES = 1 << 26
PROGRESS_SECONDS = 10.0
# Of all stores that are kept under the cache; those used longest ago go first.
CACHE_BYTES = 64 << 30
_ENCODE_BYTES = 1 << 23
_RANKED = "held_out"  # the set whose documents are chosen by rank
_MIXED = "some rows have chosen and rejected and some have not: keep them apart"


def write_store(
    split: Split,
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    source: dict[str, Any] | None = None,
    workers: int = 1,
    share: tuple[int, int] = (1, 1),
    drop: str | None = None,
) -> Store | None:
    """Tokenizes documents into a store, or goes on where an earlier call was interrupted.

    How far it is stands on standard error every few seconds.

    The text is cut into parts, each of which becomes one shard. A part is complete or absent,
    whatever ends the process, and is named by a hash of its source and the tokenizer: a later call
    makes those that are missing. Several processes may call it at once: one of those on a host
    works, the others wait. The tokens do not depend on the parts or the workers.

    Args:
      split: the documents of both sets. Only those of `text_folder` and `python_stdlib` are cut
        into parts and read by other processes.
      tokenizer: what encodes them.
      path: the folder, on a disk or in a bucket; what goes to a bucket lies on a disk part by part.
      source: what the manifest says of where the text comes from.
      workers: processes to use, where there is more text than one shard takes.
      share: (i, n): of the parts of a store in a bucket, or on a disk that n hosts share, this call
        makes the i-th of n shares, as each of them does; the last one to end completes the store.
      drop: what is left out: "repeats", the documents of each set that :mod:`duplicates` counts as
        an earlier one again, or nearly; "all", before them, those to train on that share 13 words
        in a row with held-out ones. The manifest has how many, as ``dropped`` of each set.

    Returns:
      The store; None where other shares of it are missing.

    Raises:
      ValueError: if there is no text to train on, the path holds other files or a store of another
        source or tokenizer, the source is bad or changes meanwhile, or `drop` is not one of these
        or is given for preferences.
      OSError: if the disk is full, or a worker was killed; what is done is kept.
    """
    if drop not in (None, "repeats", "all"):
        raise ValueError(f"`drop` is {drop!r}: give 'repeats', 'all' or None")
    shared = Path(path).absolute() if share[1] > 1 else None
    target = as_path(path) if is_remote(path) else shared
    # What is made for a bucket or a shared disk lies here until it is there.
    building = (cache_folder() or Path(tempfile.gettempdir())) / "building"
    sides = {name: getattr(side, "files", None) or side for name, side in split._asdict().items()}
    stamps = {name: _stamp(side) for name, side in sides.items()}
    about = {
        "format": FORMAT,
        "order_version": ORDER_VERSION,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod": int(tokenizer.eod),
        },
        "dtype": _dtype(tokenizer).name,
        "source": dict(source or {}) | {"stamps": stamps} | ({DROPPED: drop} if drop else {}),
    }
    folder = Path(path) if target is None else building / _hash(target, json.dumps(about), share)
    if not _is_made(target or folder, about):
        with _one_at_a_time(folder) as alone:
            if not _is_made(target or folder, about):
                folder.mkdir(exist_ok=True)
                for partial in listed(folder, "*.partial") if alone else ():  # of those that died
                    partial.unlink(missing_ok=True)
                try:
                    is_whole = _make(folder, sides, tokenizer, about, workers, target, share)
                except BaseException:
                    if not listed(folder, "*.npz"):  # nothing is done that could be kept
                        shutil.rmtree(folder, ignore_errors=True)
                    raise
                if target is not None:
                    shutil.rmtree(folder)
                    if not is_whole:
                        return None
                elif alone:
                    _tidy(folder)
    return open_store(target or folder)


def _upload(path: Path, target: Path | epath.Path) -> None:
    if not is_remote(target):
        make_folder(target)
        with open(path, "rb") as source, _whole(target / path.name) as sink:
            return shutil.copyfileobj(source, sink)
    system, inner = file_system(target / path.name)
    storage.retrying(lambda: system.put_file(str(path), inner), f"'{target / path.name}'")


def append_store(
    split: Split,
    path: str | os.PathLike[str],
    *,
    source: dict[str, Any] | None = None,
    workers: int = 1,
) -> Store:
    """Tokenizes more documents into a new part of a store, by the tokenizer of the store.

    The part is written beside the others and then renamed, so that whoever reads sees all of it or
    nothing: runs that have the store open keep what they see. An interrupted call leaves what it
    has done to the next call with the same text, and text that is a part already (its files have
    the same names, sizes and times) is not added again. One process of a host appends at a time.

    Args:
      split: the documents of both sets.
      source: what the manifest of the part says of where the text comes from.
      workers: as for :func:`write_store`.

    Returns:
      The store with all its parts.

    Raises:
      ValueError: there is no complete store, it is in a bucket, duplicates were left out of it, the
        text is of another kind than that of the store (conversations, preferences), and what
        :func:`write_store` raises.
      OSError: as for :func:`write_store`.
    """
    if is_remote(path):
        raise ValueError(
            f"the token store '{path}' is in a bucket, where a part cannot be added in one piece: "
            "append to a store on a disk"
        )
    store = open_store(path)
    if drop := store.manifest["source"].get(DROPPED):
        raise ValueError(
            f"the token store '{path}' was made without duplicates ({drop}), and text to append is "
            "not compared with it: make one store of all the text, or a second store"
        )
    folder = store.path / PARTS
    stamps = {
        name: _stamp(getattr(side, "files", None) or side) for name, side in split._asdict().items()
    }
    with _one_at_a_time(folder):
        store = open_store(path)
        known = [each.manifest["source"].get("stamps") for each in store.each]
        if stamps not in known:
            make_folder(folder)
            fresh = folder / "next"
            part = write_store(split, store.tokenizer, fresh, source=source, workers=workers)
            kinds = [(s.pairs, "counted" in s.manifest["sets"]["train"]) for s in (store, part)]
            if kinds[0] != kinds[1]:
                shutil.rmtree(fresh)
                raise ValueError(
                    f"the text to append is of another kind (text, conversations, preferences) "
                    f"than that of the token store '{store.path}': make a store of its own"
                )
            os.rename(fresh, part_path(store.path, len(store.parts) + 1))
    return open_store(path)


def cached_store(
    split: Split, tokenizer: Tokenizer, *, source: dict[str, Any] | None = None
) -> Store:
    """Opens the store of a text under ``~/.cache/jaxtrain/tokens``, after making it if need be.

    It is found by names, sizes and times of files, so the text is not read again. Where that folder
    (``$XDG_CACHE_HOME`` is heeded) cannot be written, the store is in a temporary one, for this
    process alone. Above ``CACHE_BYTES`` the stores used longest ago are deleted, but for those that
    a process has open. Arguments and errors are those of `write_store`.
    """
    stamps = [_stamp(side.files or side) for side in split]
    key = _hash(tokenizer.fingerprint, tokenizer.eod, *stamps)
    cache, temporary = cache_folder(), None
    folder = cache / "tokens" if cache else Path()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not cache or (not is_store(folder / key) and not os.access(folder, os.W_OK)):
        temporary = tempfile.TemporaryDirectory(prefix="jaxtrain-tokens-")
        folder = Path(temporary.name)
    store = write_store(split, tokenizer, folder / key, source=source, workers=cpus())
    store.temporary = temporary  # which is removed with the store and its tokens
    with contextlib.suppress(OSError):
        # Shared as long as the store is in use here; whoever makes room wants it alone.
        lock = os.open(store.path / MANIFEST, os.O_RDONLY)
        weakref.finalize(store, os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
    if temporary is None:
        delete_oldest(folder, CACHE_BYTES, in_use=_is_in_use)
    return store


def _is_in_use(path: Path) -> bool:
    if not is_store(path) or exists(path.with_name(f"{path.name}.lock")):
        return True
    try:
        with open(path / MANIFEST, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


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
      cache_dir: if given, a folder where the tokens are kept as a store, under a hash of the texts
        and the tokenizer, and mapped into memory rather than read.

    Raises:
      ValueError: if there are no documents, `cache_dir` is in a bucket, or a kept file is damaged.

    >>> from jaxtrain.data import ByteTokenizer
    >>> corpus = tokenize([Document("a", b"ab"), Document("b", b"c")], ByteTokenizer())
    >>> corpus.tokens.tolist(), corpus.starts.tolist(), corpus.num_bytes
    ([97, 98, 256, 99, 256], [0, 3], 3)
    """
    if cache_dir is not None:
        key = _hash(tokenizer.fingerprint, tokenizer.eod, _stamp(documents))
        split = Split(documents, Documents(lambda: iter(())))
        return write_store(split, tokenizer, f"{cache_dir}/{key}").corpus()
    memory, texts = io.BytesIO(), Noted(documents)
    lengths, counts, pairs = _write_tokens(texts, tokenizer, memory)
    if not lengths:
        raise ValueError("there are no documents to tokenize; check the source and its split")
    tokens = np.frombuffer(memory.getbuffer(), _dtype(tokenizer))
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return Corpus(tokens, starts, sum(texts.sizes), texts.fingerprint(), counts, pairs)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Documents that become one shard of a set; ``name`` names its files, without suffix."""

    set: str
    name: str
    documents: Iterable[Document]
    stamp: str
    num_bytes: int
    kept: np.ndarray | None = None  # which of the documents; None for all


def _make(
    folder: Path,
    sides: dict[str, Iterable[Document]],
    tokenizer: Tokenizer,
    about: dict[str, Any],
    workers: int,
    target: Path | epath.Path | None,
    share: tuple[int, int],
) -> bool:
    """Writes what is missing of a store, its manifest last; before, the manifest has no sets.
    Returns whether all shares are there."""
    with _whole(folder / MANIFEST) as sink:
        sink.write(json.dumps(about).encode())
    if isinstance(tokenizer, SubwordTokenizer):
        with _whole(folder / TOKENIZER) as sink:
            sink.write(tokenizer.to_json().encode())
    if target is not None and not exists(target / MANIFEST):
        for each in listed(folder, "*.json"):
            _upload(each, target)
    parts, dropped = [], {}
    for name, side in sides.items():
        for cut in side.cut(SHARD_BYTES) if isinstance(side, Files) else [side]:
            stamp = cut.stamp() if isinstance(cut, Files) else about["source"]["stamps"][name]
            key = f"{name}-{_hash(tokenizer.fingerprint, tokenizer.eod, stamp)[:16]}"
            size = cut.num_bytes() if isinstance(cut, Files) else 0
            parts.append(_Part(name, key, cut, stamp, size))
    if drop := about["source"].get(DROPPED):
        parts, dropped = _without_repeats(folder, parts, workers, drop)
    if target is None:
        _write_parts(folder, parts, tokenizer, workers)
    elif not _share_parts(folder, parts, tokenizer, workers, target, share):
        return False
    noted = {part.name: _load_npz(folder / f"{part.name}.npz") for part in parts}
    if len(kinds := {bool(note["pairs"]) for note in noted.values() if "pairs" in note}) > 1:
        raise ValueError(_MIXED)
    sums: dict[str, str] = {}
    sets = {name: _join(folder, name, parts, noted, sums) for name in sides}
    for name, counts in dropped.items():
        sets[name][DROPPED] = counts
    about |= {"sets": sets, SUMS: sums} | ({"pairs": True} if True in kinds else {})
    for each in listed(folder, "*.npy") if target is not None else ():
        _upload(each, target)
    with _whole(folder / MANIFEST) as sink:
        sink.write(json.dumps(about, indent=1).encode())
    if target is not None:
        _upload(folder / MANIFEST, target)
        for part in parts if share == (1, 1) else ():  # another host may read its notes yet
            (target / f"{part.name}.npz").unlink(missing_ok=True)
    return True


def _without_repeats(
    folder: Path, parts: list[_Part], workers: int, drop: str
) -> tuple[list[_Part], dict[str, dict[str, int]]]:
    """Returns the parts of a store with the documents of each that are kept, and how many documents
    of each set are left out for which reason. They follow from the text alone: every host and every
    number of workers finds the same ones, and the name of a part is a hash of them too."""
    kept, dropped, stretches = [], {}, np.zeros(0, np.uint64)
    for name in (_RANKED, "train"):  # what is held out decides what may be trained on
        own, path = [part for part in parts if part.set == name], None
        if name == "train" or drop != "all":
            path = folder / f"{hashlib.sha256(stretches).hexdigest()[:32]}.stretches"
            with _whole(path) as sink:
                np.save(sink, stretches)
        keys = [_hash(name, part.stamp, path and path.name) for part in own]
        read = [dataclasses.replace(p, name=f"read-{k}") for p, k in zip(own, keys, strict=True)]
        _write_parts(folder, read, path, workers, make=_read_part)
        notes = [_load_npz(folder / f"{part.name}.npz") for part in read]
        sketches = np.concatenate([note.pop("sketches") for note in notes])
        shares = np.concatenate([note["shares"] for note in notes])
        keep = np.flatnonzero(~shares)  # where the first of a text goes for this, a later one stays
        exact, near = repeats(sketches[keep] if shares.any() else sketches)
        dropped[name] = {"exact": int(exact.sum()), "near": int((near >= 0).sum())}
        if name == "train" and drop == "all":
            dropped[name]["overlap"] = int(shares.sum())
        keep = np.isin(np.arange(len(shares)), keep[~exact & (near < 0)])
        if name == "train" and len(keep) and not keep.any():
            for each in listed(folder, "read-*.npz"):  # so that nothing is left of the store
                each.unlink()
            raise ValueError(
                f"--drop-duplicates {drop} leaves none of {len(keep):,} documents to train on, of "
                f"which {int(shares.sum()):,} share {OVERLAP} words with held-out ones: give "
                "repeats, or other held-out text"
            )
        ends = np.cumsum([len(note["shares"]) for note in notes])[:-1]
        for part, note, mine in zip(own, notes, np.split(keep, ends), strict=True):
            key = _hash(part.name, mine.tobytes().hex())[:16]
            kept.append(dataclasses.replace(part, name=f"{name}-{key}", kept=mine))
            if len(note["counts"]):
                note["stretches"] = note["stretches"][np.repeat(mine, note["counts"])]
        stretches = np.unique(np.concatenate([note.pop("stretches") for note in notes]))
    return kept, dropped


def _read_part(folder: Path, part: _Part, path: Path | None) -> None:
    """Writes the notes on the documents of a part by which it is decided what is kept."""
    notes = notes_on(part.documents, None if path is None else np.load(path, mmap_mode="r"))
    _check_unchanged(part)
    with _whole(folder / f"{part.name}.npz") as sink:
        np.savez(sink, **notes)


def _share_parts(
    folder: Path,
    parts: list[_Part],
    tokenizer: Tokenizer,
    workers: int,
    target: Path | epath.Path,
    share: tuple[int, int],
) -> bool:
    """Writes a share of the parts to a bucket or a shared disk, the notes on each last; fetches the
    notes on others. Returns whether all parts are there."""

    def fetch() -> list[_Part]:
        there = storage.retrying(lambda: sizes(target), f"the listing of '{target}'")
        for part in parts:
            name = f"{part.name}.npz"
            if name in there and not exists(folder / name):
                with _whole(folder / name) as sink:
                    sink.write((read_object if is_remote(target) else read_if_there)(target / name))
        return [part for part in parts if f"{part.name}.npz" not in there]

    def upload(part: _Part) -> None:
        for ending in (".tokens", COUNTS, ".npz"):
            if exists(path := folder / f"{part.name}{ending}"):
                _upload(path, target)
                if ending != ".npz":
                    path.unlink()

    index, count = share
    missing = fetch()
    for part in [part for part in missing if exists(folder / f"{part.name}.npz")]:
        if exists(folder / f"{part.name}.tokens"):
            upload(part)  # written by a call that was interrupted then
        else:
            (folder / f"{part.name}.npz").unlink()  # its tokens were there, and were deleted
    _write_parts(folder, parts[index - 1 :: count], tokenizer, workers, upload)
    return not fetch()


def _write_parts(
    folder: Path,
    parts: list[_Part],
    argument: Any,
    workers: int,
    after: Callable[[_Part], None] = lambda part: None,
    make: Callable[[Path, _Part, Any], None] | None = None,
) -> None:
    """Writes the parts that are missing, by other processes where there is much to do, and calls
    ``after`` for each that has been written; `make` is :func:`_write_part` by a tokenizer."""
    make = make or _write_part
    missing = [part for part in parts if not exists(folder / f"{part.name}.npz")]
    progress = _Progress(parts, missing, "comparing" if make is _read_part else "tokenizing")
    if workers < 2 or progress.left <= SHARD_BYTES:
        for part in missing:
            make(folder, part, argument)
            after(part)
            progress.count(part)
        return
    # Not by fork: this process has threads, of JAX and of others.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=start_worker) as pool:
        futures = {pool.submit(make, folder, part, argument): part for part in missing}
        try:
            for future in as_completed(futures):
                future.result()
                after(futures[future])
                progress.count(futures[future])
        except BrokenProcessPool:
            raise ChildProcessError(
                f"a process that tokenized into '{folder}' was killed, as where memory runs out: "
                "run it again with fewer workers, it goes on where it was"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


class _Progress:
    """Says on standard error how much of the parts is done."""

    def __init__(self, parts: list[_Part], missing: list[_Part], doing: str):
        self._doing = doing
        self.total, self.left = (sum(part.num_bytes for part in some) for some in (parts, missing))
        self._first, self._begun = self.left, time.monotonic()
        self._said = self._begun

    def count(self, part: _Part) -> None:
        self.left -= part.num_bytes
        now = time.monotonic()
        if not self.total or now - self._said < PROGRESS_SECONDS:  # documents may be no files
            return
        rate = (self._first - self.left) / (now - self._begun)
        print(
            f"{self._doing}: {(self.total - self.left) / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, "
            f"{rate / 1e6:,.1f} MB/s, {self.left / max(rate, 1) / 60:,.0f} minutes left",
            file=sys.stderr,
        )
        self._said = now


def _write_part(folder: Path, part: _Part, tokenizer: Tokenizer) -> None:
    """Writes the files of a part; the last, ``.npz``, says that it is done."""
    documents = part.documents if part.num_bytes <= 2 * SHARD_BYTES else _told(part.documents)
    if part.kept is not None:
        documents = itertools.compress(documents, part.kept.tolist())
    texts = Noted(documents)
    with _whole(folder / f"{part.name}.tokens") as sink:
        sink = _Summed(sink)
        lengths, counts, pairs = _write_tokens(texts, tokenizer, sink)
        _check_unchanged(part)
    noted = {"ranks": texts.ranks} if part.set == _RANKED else {}
    sums = [sink.sum.hexdigest()]
    noted |= {"crcs.tokens": np.array(crcs(folder / f"{part.name}.tokens"), np.uint32)}
    noted |= {"sizes": np.array(texts.sizes, np.int64), "lengths": np.array(lengths, np.int64)}
    if counts is not None:
        with _whole(folder / f"{part.name}{COUNTS}") as sink:
            sink.write(counts)
        sums.append(hashlib.sha256(counts).hexdigest())
        noted |= {"crcs.counts": np.array(crcs(folder / f"{part.name}{COUNTS}"), np.uint32)}
        noted |= {"counted": counts.sum(), "pairs": pairs}
    with _whole(folder / f"{part.name}.npz") as sink:
        np.savez(sink, text=texts.fingerprint(), sums=sums, **noted)


def _check_unchanged(part: _Part) -> None:
    if isinstance(part.documents, Files) and part.documents.stamp() != part.stamp:
        raise ValueError(
            f"files in '{part.documents.root}' changed while they were tokenized; run it again "
            "when they are as they should be"
        )


class _Summed:
    """A file to write to, and the SHA-256 of what has been written."""

    def __init__(self, sink: BinaryIO):
        self._sink, self.sum = sink, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._sink.write(data)


def _told(files: Files) -> Iterator[Document]:
    """Yields the documents of a large file that is not cut, and says how far it is."""
    size, said = 0, time.monotonic()
    for document in files:
        yield document
        size += len(document.text)
        if (now := time.monotonic()) - said >= PROGRESS_SECONDS:
            text = f"tokenizing: {size / 1e6:,.0f} MB of text in '{files.names[0]}' so far"
            print(text, file=sys.stderr)
            said = now


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write that appears when all of it is on the disk."""
    partial = path.with_name(f"{path.name}-{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(  # of a write, which names no file
            error.errno,
            f"{os.strerror(error.errno)} while the token store '{path.parent}' was written; run it "
            "again when that is mended, it goes on where it was",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _join(
    folder: Path,
    name: str,
    parts: list[_Part],
    notes: dict[str, dict[str, np.ndarray]],
    sums: dict[str, str],
) -> dict[str, Any]:
    """Joins what the parts of a set noted, writes its arrays, and returns its statistics; adds to
    the checksums of files."""
    mine = [part for part in parts if part.set == name]
    noted = [notes[part.name] for part in mine]
    shards = [
        (f"{part.name}.tokens", int(note["lengths"].sum()))
        for part, note in zip(mine, noted, strict=True)
        if len(note["lengths"])
    ]
    texts = [str(note["text"]) for note in noted if len(note["lengths"])]
    lengths, sizes = (np.concatenate([note[key] for note in noted]) for key in ("lengths", "sizes"))
    if name == "train" and not sizes.any():
        for part in parts:
            (folder / f"{part.name}.npz").unlink()
        what = "documents with text" if texts else "documents"
        raise ValueError(f"there are no {what} to tokenize; check the source and its split")
    arrays = {"starts": np.cumsum(lengths) - lengths}
    if name == _RANKED:
        arrays |= {"sizes": sizes, "ranks": np.concatenate([note["ranks"] for note in noted])}
    counted = [note["counted"] for note in noted if "counted" in note]
    written = [note for note in noted if len(note["lengths"])]
    if all("crcs.tokens" in note for note in written):  # which an earlier version did not take
        kinds = ("crcs.tokens", "crcs.counts")
        each = [note[kind] for kind in kinds for note in written if kind in note]
        arrays["crcs"] = np.concatenate([np.zeros(0, np.uint32), *each])
    for what, array in arrays.items():
        with _whole(folder / f"{name}.{what}.npy") as sink:
            np.save(summed := _Summed(sink), array)
            sums[f"{name}.{what}.npy"] = summed.sum.hexdigest()
    for part, note in zip(mine, noted, strict=True):  # an earlier version noted none
        for ending, each in zip((".tokens", COUNTS), note.get("sums", ()), strict=False):
            sums[f"{part.name}{ending}"] = str(each)
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "bytes": int(sizes.sum()),
        "text": texts[0] if len(texts) == 1 else _hash(*texts),
        "longest": int(lengths.max(initial=0)),
        # How many have from 2^n to 2^(n + 1) - 1 tokens.
        "lengths": np.bincount(np.log2(lengths).astype(np.int64)).tolist(),
        "shards": shards,
    } | ({"counted": int(sum(counted))} if counted else {})


def _tidy(folder: Path) -> None:
    """Removes what the writing of a store has left: notes, partial files, parts of old sources."""
    sets = open_store(folder).manifest["sets"].values()
    kept = {name for about in sets for name in shard_files(about, 1)}
    for path in folder.iterdir():
        made = path.suffix in (".npz", ".partial", ".stretches", ".tokens", COUNTS)
        if made and path.name not in kept:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Lets the processes of this host through one after the other; yields whether it could."""
    lock, alone = folder.with_name(f"{folder.name}.lock"), False
    while True:
        with _open_lock(folder, lock) as file:
            with contextlib.suppress(OSError):  # A file system without locks: each does the work.
                fcntl.flock(file, fcntl.LOCK_EX)
                alone = True
            if alone and not _is_open(lock, file):
                continue  # The one before has removed it, and the next would lock another.
            try:
                yield alone
                return
            finally:
                lock.unlink(missing_ok=True)


def _open_lock(folder: Path, lock: Path) -> TextIO:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return open(lock, "w")
    except OSError as error:  # which names the lock
        text = f"the folder '{folder}' cannot be written ({error.strerror}): choose another"
        raise OSError(error.errno, text) from None


def _is_open(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _is_made(folder: Path, about: dict[str, Any]) -> bool:
    """Whether a store is complete; one of another tokenizer or source is refused."""
    # Listed before the manifest is read: it is the first file that another process writes.
    others = [path.name for path in listed(folder) if path.suffix != ".partial"]
    kept = read_manifest(folder)
    if kept is None:
        if others:
            raise ValueError(f"'{folder}' holds other files ({others[0]}); give another folder")
        return False
    made = "made" if "sets" in kept else "begun"
    then, now = (each["source"].get(DROPPED, "none") for each in (kept, about))
    if then != now:
        raise ValueError(
            f"the token store '{folder}' was {made} with --drop-duplicates {then}, not {now}: give "
            "the same, or another folder, or delete this one"
        )
    for what in ("tokenizer", "source"):
        then, now = kept[what], about[what]
        if what == "source" and made == "begun":  # whose parts that changed are made again
            then, now = ({**each, "stamps": None} for each in (then, now))
        if then != now:
            raise ValueError(
                f"the token store '{folder}' was {made} with another {what}, or the {what} changed "
                "since: give another folder, or delete this one"
            )
    return made == "made"


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    with naming_damage(path), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _stamp(documents: Iterable[Document]) -> str:
    """Returns a hash that changes with the documents; files are not read for it."""
    if isinstance(documents, Files):
        return documents.stamp()
    if iter(documents) is documents:
        raise ValueError("documents can be read only once, a store needs them twice; give a list")
    texts = Noted(documents)
    collections.deque(texts, maxlen=0)
    return texts.fingerprint()


def _hash(*parts: Any) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:32]


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _write_tokens(
    documents: Iterable[Document], tokenizer: Tokenizer, sink: BinaryIO
) -> tuple[list[int], np.ndarray | None, bool]:
    """Writes the tokens of all documents to `sink`; returns their lengths, which of the tokens
    count, and whether they are preferences.

    The end of a conversation counts where the assistant has the last word, so that a model learns
    to stop, unless its template has ended it by the same token. So does the white space before it,
    such as the line break of chatml, without which the model would not get there."""
    lengths, counted, sided, dtype = [], [], 0, _dtype(tokenizer)
    eod = np.array([tokenizer.eod], dtype).tobytes()
    for chunk in _chunks(documents):
        # Bytes are ids already: those of a long text would take four times its size.
        if type(tokenizer) is ByteTokenizer and all(type(each) is Document for each in chunk):
            encoded = ((np.frombuffer(each.text, np.uint8), None) for each in chunk)
        else:
            encoded = encode_marked(chunk, tokenizer)
        for document, (ids, counts) in zip(chunk, encoded, strict=True):
            for start in range(0, len(ids), _ENCODE_BYTES):
                sink.write(ids[start : start + _ENCODE_BYTES].astype(dtype).tobytes())
            sink.write(eod)
            lengths.append(len(ids) + 1)
            if counts is not None:
                _, last = document.counted[-1] if document.counted else (0, 0)
                ends = bool(last) and not document.text[last:].strip()
                said = tokenizer.eod in ids[counts > 0][-1:]
                if stops := ends and not said:
                    counts[np.flatnonzero(counts)[-1] :] = 1
                counted += [counts, np.array([stops], np.uint8)]
                sided += bool(document.side)
    if counted and len(counted) != 2 * len(lengths):
        raise ValueError("some documents are conversations and some are not: keep them apart")
    if sided not in (0, len(lengths)):
        raise ValueError(_MIXED)
    return lengths, np.concatenate(counted) if counted else None, sided > 0


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups texts so that an encoder can use every core, a few megabytes at a time."""
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= _ENCODE_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
