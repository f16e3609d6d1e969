"""A token store: text tokenized once, in files that every process maps into memory.

A store is a folder. Its sets, `train` and `held_out`, have

- ``SET-KEY.tokens``, the shards: documents end to end, each followed by its end-of-document token,
  as uint16 or uint32 and nothing else;
- ``SET-KEY.counts`` beside each, of conversations: one byte per token, 1 where it counts as a
  target;
- ``SET.starts.npy``: where each document begins; ``held_out`` has ``sizes`` and ``ranks`` too.
  Of preferences, documents 2 i and 2 i + 1 are the chosen and the rejected one of pair i;
- a place in ``manifest.json``, which is written last: without it there is no store. Beside it,
  ``tokenizer.json`` holds a tokenizer that is not that of bytes;
- ``parts/000001`` and so on, which :func:`jaxtrain.data.append_store` adds: whole stores of more
  text, whose documents follow those of the store and of the parts before.

Plain arrays, because a row is a window of tokens over the borders of documents: mapped, it costs
the pages it lies on. Formats of records (ArrayRecord, TFRecord) read and unpack whole records.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import mmap
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from jaxtrain.data import blocks
from jaxtrain.data.chat import ChatTemplate, Conversation
from jaxtrain.data.packing import Corpus
from jaxtrain.data.sources import BUILT_IN, HELD_OUT, Document, hash_fraction, open_text
from jaxtrain.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer
from jaxtrain.host import storage
from jaxtrain.host.paths import as_path, is_remote, listed, look, read_if_there, sizes

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PARTS = "parts"
FORMAT = "jaxtrain token store 1"
COUNTS = ".counts"  # the ending of files that say which tokens count
DROPPED = "dropped"  # of a source which duplicates are left out, and of a set how many those are
SUMS = "sha256"  # of every shard and array, by name, in the manifest
# What a manifest holds, and each of its sets.
_TOKENIZER_KINDS = {"fingerprint": str, "vocab_size": int, "eod": int}
_KINDS = {"tokenizer": _TOKENIZER_KINDS, "source": {}, "dtype": str}
_SET_KINDS = dict.fromkeys(("bytes", "documents", "tokens", "longest"), int)
_SET_KINDS |= {"text": str, "lengths": list, "shards": list}
# Of all stores together: each stays open, of which systems allow a process 256 or 1024.
_MAPPED_FILES = 128


class Store:
    """A store that is complete; made by `open_store` and `write_store`.

    ``path`` is its folder, and ``manifest`` what ``manifest.json`` holds, joined with the manifests
    of the ``parts`` that are visible: their folders within it, in order.
    """

    def __init__(
        self, path: Path | epath.Path, manifest: dict[str, Any], parts: Sequence["Store"] = ()
    ):
        self.path, self.manifest, self.parts = path, _joined(manifest, parts), tuple(parts)
        self._own, self._cache = manifest, None
        if is_remote(path):
            told = f"{path} {json.dumps(manifest, sort_keys=True)}"
            self._cache = blocks.BlockCache(path, hashlib.sha256(told.encode()).hexdigest()[:16])

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made it."""
        about = self.manifest["tokenizer"]
        if about["fingerprint"] == ByteTokenizer.fingerprint:
            return ByteTokenizer()
        path = self.path / TOKENIZER
        with naming_damage(path):
            tokenizer = SubwordTokenizer.from_json(path.read_text(), about["eod"], f"'{path}'")
            if tokenizer.fingerprint != about["fingerprint"]:
                raise ValueError("it is not that of the store")
        return tokenizer

    @property
    def pairs(self) -> bool:
        """Whether it holds preferences."""
        return self.manifest.get("pairs", False)

    def corpus(self, name: str = "train") -> Corpus:
        """Returns a set, ``train`` or ``held_out``; nothing of it is read before it is used."""
        about = self.manifest["sets"][name]
        files, counts = zip(*about["shards"], strict=True) if about["shards"] else ((), ())
        paths = [self.path / file for file in files]
        dtype, below = np.dtype(self.manifest["dtype"]), self.manifest["tokenizer"]["vocab_size"]
        read = self._read_of(name)
        corpus = Corpus(
            MappedTokens(paths, counts, dtype, owner=self, below=below, read=read),
            self._starts(name, sum(counts)),
            about["bytes"],
            about["text"],
            pairs=self.pairs,
        )
        if "counted" not in about:
            return corpus
        paths = [path.with_suffix(COUNTS) for path in paths]
        marked = MappedTokens(paths, counts, np.dtype(np.uint8), below=2, read=read)
        return dataclasses.replace(corpus, counts=marked)

    def held_out(self, num_bytes: int) -> Corpus:
        """Returns whole held-out documents of up to so many bytes together, in memory.

        They are chosen by a hash of their names; where none is that small, the first by hash alone.
        Both sides of a preference go together.
        """
        corpus, each = self.corpus("held_out"), 2 if self.pairs else 1
        ranks = self._array("held_out", "ranks")[::each]
        sizes = self._array("held_out", "sizes").reshape(-1, each).sum(axis=1)
        left, chosen = num_bytes, []
        # Of the documents of lowest ranks there are more than fit, and of all others few still do:
        # to sort 10^7 takes half a minute.
        low = ranks < 4 * num_bytes / max(int(sizes.sum()), 1)
        for some in (low, ~low):
            order = np.flatnonzero(some & (sizes <= left))
            order = order[np.lexsort((sizes[order], ranks[order]))]
            while len(order := order[sizes[order] <= left]):
                sums = np.cumsum(sizes[order])
                fitting = int(np.searchsorted(sums, left, "right"))
                chosen.append(order[:fitting])
                left -= int(sums[fitting - 1])
                order = order[fitting:]
        if not chosen and len(ranks):
            chosen.append(np.array([np.argmin(ranks)]))
        picked = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
        num_bytes = int(sizes[picked].sum())
        picked = (picked[:, None] * each + np.arange(each)).ravel()
        parts = [corpus.document(index) for index in picked.tolist()]
        if not parts:
            text = self.manifest["source"].get("data", self.path)
            raise ValueError(
                f"'{text}' holds out no document to measure on: give more documents, or make a "
                "token store of it by jaxtrain tokenize with a larger --held-out"
            )
        lengths = [len(part) for part in parts]
        counts = None
        if corpus.counts is not None:
            starts = corpus.starts[picked].tolist()
            counts = [
                corpus.counts[at : at + length] for at, length in zip(starts, lengths, strict=True)
            ]
        part = Corpus(
            np.concatenate(parts),
            np.cumsum([0, *lengths[:-1]]),
            num_bytes,
            counts=counts and np.concatenate(counts),
            pairs=self.pairs,
        )
        texts = Noted(part.documents(self.tokenizer))
        collections.deque(texts, maxlen=0)
        return dataclasses.replace(part, fingerprint=texts.fingerprint())

    def source_state(self) -> str:
        """Says whether the text that the store was made of is still as it was."""
        source = self.manifest["source"]
        if "data" not in source:
            return ""
        try:
            split = open_text(
                source["data"],
                field=source["field"],
                held_out=source["held_out"],
                chat=ChatTemplate(**source["chat"]) if "chat" in source else None,
            )
            stamps = {name: side.files.stamp() for name, side in split._asdict().items()}
        except (OSError, ValueError, ImportError, LookupError, TypeError, AttributeError):
            return " (not here any more)"
        return " (unchanged)" if stamps == source.get("stamps") else " (changed since)"

    def verify(self) -> int:
        """Compares every file with the SHA-256 that was taken as it was written.

        Returns:
          The bytes that were compared.

        Raises:
          ValueError: files differ, or an earlier version wrote them without a checksum.
        """
        sums, names = self._own.get(SUMS, {}), ["held_out.sizes.npy", "held_out.ranks.npy"]
        for name, about in self._own["sets"].items():
            names += [*shard_files(about, 1), f"{name}.starts.npy"]
            names += [f"{name}.crcs.npy"] if f"{name}.crcs.npy" in sums else []
        if missing := [name for name in names if name not in sums]:
            raise ValueError(
                f"'{self.path}' has no checksum of '{missing[0]}': an earlier version wrote it; "
                "make the store again to have them"
            )
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = pool.map(_digest, [self.path / name for name in names])
        differ = [name for name, now in zip(names, found, strict=True) if now != sums[name]]
        if differ:
            which = f"{', '.join(differ)} ({len(differ)} of {len(names)} files)"
            raise ValueError(f"'{self.path}' is damaged: {which}; copy it or make it again")
        own = sum(look(self.path / name).size for name in names)
        return own + sum(part.verify() for part in self.parts)

    def _on_disk(self, name: str) -> Path:
        """A file of the store, as it lies on a disk of this host."""
        if self._cache is None:
            return self.path / name
        return self._cache.whole(name, self.manifest[SUMS][name])

    def _read_of(self, name: str) -> Callable[[str, int, int], bytes] | None:
        """What reads bytes of the shards of a set; None where they can be mapped."""
        if self._cache is None:
            return None
        about, sums, at = self.manifest["sets"][name], {}, 0
        with naming_damage(self.path / f"{name}.crcs.npy"):
            kept = np.load(self._on_disk(f"{name}.crcs.npy"))
        size = np.dtype(self.manifest["dtype"]).itemsize
        for file, length in shard_files(about, size).items():
            count = -(-length // blocks.BLOCK_BYTES)
            sums[file], at = kept[at : at + count], at + count
        cache = self._cache
        return lambda file, start, stop: cache.read(file, start, stop, sums[file])

    def parts_with(self, text: str | None) -> int | None:
        """Returns how many of its parts make a ``text``; None where none do."""
        numbers = range(len(self.parts) + 1)
        same = (n for n in numbers if Store(self.path, self._own, self.parts[:n]).text == text)
        return next(same, None)

    @property
    def text(self) -> str:
        """The fingerprint of the text to train on."""
        return self.manifest["sets"]["train"]["text"]

    def _starts(self, name: str, tokens: int) -> np.ndarray:
        """Returns the starts of documents; checks the first and last, and `verify` all."""
        if self.parts:  # of each part behind all tokens before it
            sides = [each.manifest["sets"][name] for each in self.each]
            before = np.cumsum([0, *(side["tokens"] for side in sides)]).tolist()
            each = zip(self.each, sides, before, strict=False)
            return np.concatenate([s._starts(name, n["tokens"]) + at for s, n, at in each])
        starts = self._array(name, "starts")
        if len(starts) and not (starts[0] == 0 <= starts[-1] < tokens):
            raise ValueError(
                f"'{self.path / name}.starts.npy' is damaged (documents begin from {starts[0]} to "
                f"{starts[-1]} of {tokens} tokens); {make_again(self.path)}"
            )
        return starts

    @functools.cached_property
    def each(self) -> "list[Store]":
        """The store without its parts, and the parts."""
        return [Store(self.path, self._own), *self.parts]

    def _array(self, name: str, what: str) -> np.ndarray:
        if self.parts:
            return np.concatenate([each._array(name, what) for each in self.each])
        path = self.path / f"{name}.{what}.npy"
        with naming_damage(path):
            # Not np.load, which leaves a damaged file open.
            load = functools.partial(np.lib.format.open_memmap, self._on_disk(path.name), "r")
            array = storage.retrying(load, f"'{path}'")
            if array.shape != (count := self.manifest["sets"][name]["documents"],):
                raise ValueError(f"its shape is {array.shape}, of {count} documents")
            if array.dtype.kind != ("f" if what == "ranks" else "i"):
                raise ValueError(f"its dtype is {array.dtype}")
        return np.asarray(array)  # still mapped, without the overhead of np.memmap


class MappedTokens:
    """The tokens of many files as one array, to be read by slices of step 1.

    A file is mapped when a slice needs it, and the last ones stay so. A slice reads the pages that
    it lies on: the system is told to read nothing ahead of them, and those of one slice together.

    Args:
      counts: the tokens in each.
      owner: is kept as long as this, such as a store whose files go with it.
      below: what every token must be less than; a slice of others is a ValueError.
      read: reads bytes of a file by its name, where it cannot be mapped.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        dtype: np.dtype,
        *,
        owner: Any = None,
        below: int | None = None,
        read: Callable[[str, int, int], bytes] | None = None,
    ):
        self.dtype, self.owner, self._bytes = dtype, owner, read
        self._most = np.iinfo(dtype).max if below is None else below - 1
        self._paths = paths
        self._offsets = np.cumsum([0, *counts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        start, stop, step = window.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read by slices of step 1, not {step}")
        shard = int(np.searchsorted(self._offsets, start, "right")) - 1
        if start < stop <= self._offsets[shard + 1]:
            offset = int(self._offsets[shard])
            return self._read(shard, start - offset, stop - offset)
        tokens = np.empty(max(stop - start, 0), self.dtype)
        at = start
        while at < stop:  # part by part, as a view keeps its file open
            offset, end = self._offsets[shard : shard + 2].tolist()
            end = min(stop, end)
            tokens[at - start : end - start] = self._read(shard, at - offset, end - offset)
            at, shard = end, shard + 1
        return tokens

    def _read(self, shard: int, start: int, stop: int) -> np.ndarray:
        size = self.dtype.itemsize
        if self._bytes is not None:
            data = self._bytes(self._paths[shard].name, start * size, stop * size)
            found = np.frombuffer(data, self.dtype)
        else:
            mapped, tokens = _mapped(self._paths[shard], self.dtype)
            first = start * size // mmap.PAGESIZE * mmap.PAGESIZE
            if stop * size - first > mmap.PAGESIZE and hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_WILLNEED, first, stop * size - first)
            found = tokens[start:stop]
        if self._most < np.iinfo(self.dtype).max and (most := found.max(initial=0)) > self._most:
            raise ValueError(
                f"'{self._paths[shard]}' is damaged ({most} is among tokens {start} to {stop}, and "
                f"{self._most} the highest there is); {make_again(self._paths[shard].parent)}"
            )
        return found


@functools.lru_cache(_MAPPED_FILES)
def _mapped(path: Path, dtype: np.dtype) -> tuple[mmap.mmap, np.ndarray]:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped, np.frombuffer(mapped, dtype)


def source_of(
    data: str, field: str, held_out: float = HELD_OUT, chat: ChatTemplate | None = None
) -> dict[str, Any]:
    """Returns the manifest's entry for the origin of a store's text."""
    local = data not in BUILT_IN and "://" not in data
    return {
        "data": os.path.abspath(data) if local else data,
        "field": field,
        "held_out": held_out,
    } | ({} if chat is None else {"chat": dataclasses.asdict(chat)})


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a token store, complete or not."""
    if is_remote(path):
        manifest = as_path(path) / MANIFEST
        read = functools.partial(read_if_there, manifest)
        return FORMAT.encode()[:-1] in storage.retrying(read, f"'{manifest}'")
    try:
        return FORMAT.encode()[:-1] in (Path(path) / MANIFEST).read_bytes()
    except OSError:
        return False


def open_store(path: str | os.PathLike[str], *, parts: int | None = None) -> Store:
    """Opens a store; its size hardly matters, as nothing but its manifest is read.

    Args:
      path: the folder.
      parts: how many of the parts that were appended to it are visible; None for all.

    Raises:
      ValueError: if it is none, is not complete, or its files are cut short or missing, or it has
        fewer parts, or is in a bucket and has any.
    """
    store, there = _open_one(_folder(path)), count_parts(path)
    if there and is_remote(path):
        raise ValueError(
            f"the token store '{path}' is in a bucket and has {there} parts that were appended to "
            "it: read it from a disk, or make one store of all the text"
        )
    if parts is not None and parts > there:
        raise ValueError(
            f"the token store '{path}' has {there} parts and {parts} are asked for: parts that a "
            "run has read must stay; copy them back"
        )
    numbers = range(1, 1 + (there if parts is None else parts))
    opened = [_open_one(part_path(path, number)) for number in numbers]
    return Store(store.path, store.manifest, opened)


def count_parts(path: str | os.PathLike[str]) -> int:
    """Returns the number of parts that were appended to a store; raises ValueError where one
    between them is missing."""
    names = {each.name for each in listed(_folder(path) / PARTS) if each.name.isdigit()}
    for number in range(1, len(names) + 1):
        if (wanted := part_path(path, number)).name not in names:
            raise ValueError(f"'{wanted}' is missing, and parts after it are there: copy it back")
    return len(names)


def part_path(path: str | os.PathLike[str], number: int) -> Path | epath.Path:
    """Returns the folder of a part of a store, which are numbered from 1."""
    return _folder(path) / PARTS / f"{number:06d}"


def _folder(path: str | os.PathLike[str]) -> Path | epath.Path:
    return as_path(path) if is_remote(path) else Path(path)


def _open_one(folder: Path | epath.Path) -> Store:
    manifest = read_manifest(folder)
    if manifest is None:
        raise ValueError(f"'{folder}' is no token store: it has no {MANIFEST}")
    if "sets" not in manifest:
        raise ValueError(
            f"the token store '{folder}' is not complete: run the same jaxtrain tokenize again, it "
            "goes on where it was interrupted"
        )
    if is_remote(folder) and "train.crcs.npy" not in manifest.get(SUMS, {}):
        raise ValueError(
            f"the token store '{folder}' has no checksums of its blocks, for an earlier version "
            "wrote it: copy it to a disk, or make it again"
        )
    size = np.dtype(manifest["dtype"]).itemsize
    found = storage.retrying(lambda: sizes(folder), f"the listing of '{folder}'")
    for about in manifest["sets"].values():
        for name, wanted in shard_files(about, size).items():
            if found.get(name) != wanted:
                has = f"{found[name]} bytes, not {wanted}" if name in found else "gone"
                raise ValueError(f"'{folder / name}' is damaged ({has}); {make_again(folder)}")
    return Store(folder, manifest)


def _joined(manifest: dict[str, Any], parts: Sequence[Store]) -> dict[str, Any]:
    """Returns the manifest of a store with those of its parts: one of all that is visible."""
    if not parts:
        return manifest
    sets = {}
    for name, own in manifest["sets"].items():
        each = [own, *(part.manifest["sets"][name] for part in parts)]
        sums = {key: sum(one[key] for one in each) for key in ("documents", "tokens", "bytes")}
        lengths = itertools.zip_longest(*(one["lengths"] for one in each), fillvalue=0)
        shards = [tuple(shard) for shard in own["shards"]]
        for part, one in zip(parts, each[1:], strict=True):
            shards += [(f"{PARTS}/{part.path.name}/{file}", count) for file, count in one["shards"]]
        text = hashlib.sha256(" ".join(one["text"] for one in each).encode()).hexdigest()[:32]
        sets[name] = own | sums | {"text": text, "shards": shards}
        sets[name] |= {"longest": max(one["longest"] for one in each)}
        sets[name] |= {"lengths": [sum(counts) for counts in lengths]}
        if counted := [one["counted"] for one in each if "counted" in one]:
            sets[name]["counted"] = sum(counted)
    return manifest | {"sets": sets}


def shard_files(about: dict[str, Any], size: int) -> dict[str, int]:
    """Returns the shards of a set by name, and their bytes where a token has `size`."""
    files = {name: count * size for name, count in about["shards"]}
    if "counted" in about:
        files |= {str(Path(name).with_suffix(COUNTS)): count for name, count in about["shards"]}
    return files


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Returns the manifest of a store, complete or begun; None where there is none."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(storage.retrying(path.read_text, f"'{path}'"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, not {FORMAT!r}")
        _check(manifest, _KINDS)
        if manifest["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"its dtype is {manifest['dtype']!r}")
        if "sets" in manifest:
            sets = {"sets": {"train": _SET_KINDS, "held_out": _SET_KINDS}}
            _check({SUMS: {}} | manifest, sets | {SUMS: {}})
        for about in manifest.get("sets", {}).values():
            numbers = [*about["lengths"], about.get("counted", 0), *(n for _, n in about["shards"])]
            names = [name for name, _ in about["shards"]]
            if {*map(type, numbers)} - {int} or {*map(type, names)} - {str}:
                raise ValueError("it has a shard or a length that is none")
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"'{path}' is damaged ({error}); {make_again(folder)}") from None


def _check(found: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Sees that a JSON object has fields of these kinds; objects are again a dict of such."""
    for name, kind in kinds.items():
        if name not in found:
            raise ValueError(f"it has no {name}")
        if not isinstance(found[name], dict if isinstance(kind, dict) else kind):
            raise ValueError(f"its {name} is {found[name]!r}")
        if isinstance(kind, dict):
            _check(found[name], kind)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Says of what cannot be read that the file is damaged."""
    try:
        yield
    except (ValueError, TypeError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        if storage.passes(error):
            raise
        raise ValueError(f"'{path}' is damaged ({error}); {make_again(path.parent)}") from None


def make_again(folder: Path) -> str:
    """Returns the advice for a damaged store."""
    return f"delete '{folder}' and make it again"


class Noted:
    """Documents that are hashed, measured and ranked as they pass."""

    def __init__(self, documents: Iterable[Document]):
        self._documents, self._digest = documents, hashlib.sha256()
        self.sizes: list[int] = []
        self.ranks: list[float] = []

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self._digest.update(len(document.text).to_bytes(8, "little"))
            self._digest.update(document.text)
            if isinstance(document, Conversation):
                told = f"{(document.counted, document.special)!r}{document.side}"
                self._digest.update(told.encode())
            self.sizes.append(len(document.text))
            self.ranks.append(hash_fraction(f"evaluate/{document.name}"))
            yield document

    def fingerprint(self) -> str:
        return self._digest.hexdigest()[:32]
