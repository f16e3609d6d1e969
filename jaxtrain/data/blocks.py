"""Files of a folder in a bucket, read by ranges, of which blocks are kept on a disk."""

import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils import epath

from jaxtrain.host.paths import cache_folder, delete_oldest, read_object

# What is asked for at a time: a row lies on one or two, and a bucket answers in that time anyhow.
BLOCK_BYTES = 1 << 18
# Of all that is kept, by all processes of a host; it is never more than half of what was free.
KEPT_BYTES = 64 << 30
# Blocks in one request, and requests at a time where more are missing.
_RUN_BLOCKS, _RUNS = 64, 16

_asked = 0


def asked() -> int:
    """Returns how often this process has asked a bucket: whoever reads much may see that it waits,
    and ask for several things at a time."""
    return _asked


def crcs(path: pathlib.Path) -> list[int]:
    """Returns the CRC-32 of each block of a file."""
    with open(path, "rb") as file:
        return [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]


def _crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def key_of(place: str | os.PathLike[str], told: Iterable[Mapping[str, Any]]) -> str:
    """Returns the `key` of a `BlockCache` of files whose writers have left none: another where a
    bucket tells anything else of one, such as the time or the name of its writing.

    Args:
      place: the folder, or the one file.
      told: what the bucket tells of each file.
    """
    told = repr([str(place), *(sorted(about.items()) for about in told)])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


class BlockCache:
    """Reads files of a folder in a bucket; what was read lies on the disk, within a bound.

    Blocks are kept under ``~/.cache/jaxtrain/blocks`` for all processes of a host and later runs,
    those used longest ago go first. Each is compared with its checksum whenever it is read. Threads
    may read at the same time.

    Args:
      folder: the folder in the bucket.
      key: names what is kept; another where the files are others.
    """

    def __init__(self, folder: epath.Path, key: str):
        self._folder, self._key, self._lock = folder, key, threading.Lock()
        self._kept = (cache_folder() or pathlib.Path(os.devnull)) / "blocks"
        with contextlib.suppress(OSError):
            self._kept.mkdir(parents=True, exist_ok=True)
        if not os.access(self._kept, os.W_OK):
            self._temporary = tempfile.TemporaryDirectory(prefix="jaxtrain-blocks-")
            self._kept = pathlib.Path(self._temporary.name)
        self.limit = min(KEPT_BYTES, shutil.disk_usage(self._kept).free // 2)
        self._written = self.limit  # so that the first block makes room

    def read(self, name: str, start: int, stop: int, sums: Sequence[int] | int) -> bytes:
        """Returns the bytes of a file from ``start`` to ``stop``.

        Args:
          sums: the CRC-32 of each block of the file; or the size of a file whose writer has left
            none.

        Raises:
          ValueError: a block is not what was written, twice in a row.
          StorageError: the bucket went on failing.
        """
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        found = {n: self._known(name, n) for n in range(first, last)}
        missing, runs = [n for n, data in found.items() if data is None], []
        while missing:  # together, what lies together
            runs.append([n for at, n in enumerate(missing[:_RUN_BLOCKS]) if n == missing[0] + at])
            missing = missing[len(runs[-1]) :]
        with ThreadPoolExecutor(_RUNS) if len(runs) > 1 else contextlib.nullcontext() as pool:
            for each in (pool.map if pool else map)(lambda run: self._fetch(name, run, sums), runs):
                found |= each
        data = b"".join(found[n] for n in range(first, last))
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def whole(self, name: str, sha256: str) -> pathlib.Path:
        """Returns a copy of a file on the disk. Raises ValueError where its checksum differs."""
        path = self._path(name)
        for kept in (True, False, False):
            if not kept:
                self._keep(path, read_object(self._folder / name))
            with contextlib.suppress(FileNotFoundError):
                if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                    return path
        raise ValueError("it is not what was written (checksum)")

    def _path(self, name: str) -> pathlib.Path:
        if "/" in name or len(name) > 100:
            name = hashlib.sha256(name.encode()).hexdigest()
        return self._kept / f"{self._key}-{name}"

    def _known(self, name: str, number: int) -> bytes | None:
        try:
            data = self._path(f"{name}-{number}").read_bytes()
        except OSError:
            return None
        return data[:-4] if _crc(data[:-4]) == data[-4:] else None

    def _fetch(self, name: str, run: list[int], sums: Sequence[int] | int) -> dict[int, bytes]:
        global _asked
        _asked += 1
        start, stop = run[0] * BLOCK_BYTES, (run[-1] + 1) * BLOCK_BYTES
        wrong, mend = "checksum", "make the store again"
        if sized := isinstance(sums, int):
            wrong, mend = "size", "copy it there again"
        for _ in range(2):  # a read that was torn once says nothing of the file
            data = read_object(self._folder / name, start, stop)
            found = {n: data[at * BLOCK_BYTES :][:BLOCK_BYTES] for at, n in enumerate(run)}
            if sized and len(data) == min(stop, sums) - start:
                break
            if not sized and all(zlib.crc32(block) == sums[n] for n, block in found.items()):
                break
        else:
            raise ValueError(
                f"'{self._folder / name}' is damaged (its {wrong} differs within bytes {start} to "
                f"{stop}); {mend}"
            )
        for number, block in found.items():
            with contextlib.suppress(OSError):  # a disk that is full keeps less
                self._keep(self._path(f"{name}-{number}"), block + _crc(block))
        return found

    def _keep(self, path: pathlib.Path, data: bytes) -> None:
        with self._lock:
            self._written += len(data)
            if self._written >= self.limit // 16:
                self._written = len(data)
                delete_oldest(self._kept, self.limit - self.limit // 16)
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
