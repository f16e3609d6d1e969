"""The memory of the hosts of a run as a storage of fsspec: paths ``hosts://...``.

An object goes to the keeper of the host that writes it and to that of the next host, and is read
from the first one that has it whole. So it outlives every host but two neighbours.
"""

import contextlib
import io
import json
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.host import distributed, keeper

SCHEME = "hosts"
_ADDRESS_BYTES = 128


def connect() -> None:
    """Has paths ``hosts://...`` lead to the keepers of the launchers of all processes, which all
    call it alike. Raises ValueError where a process has no such launcher."""
    text = os.environ.get(distributed.MEMORY, "")
    own = "".join(text.split()[:1])
    row = np.frombuffer(own.encode().ljust(_ADDRESS_BYTES), np.uint8)
    rows = multihost_utils.process_allgather(row).reshape(-1, _ADDRESS_BYTES)
    training = [bytes(each).decode().strip() for each in rows]
    if "" in training:
        raise ValueError(
            f"process {training.index('')} has no launcher that keeps memory: start it by "
            "`jaxtrain launch` with --memory-every in the command, or leave out `memory_every`"
        )
    at = training.index(own)
    order = dict.fromkeys((*training[at:], *training[:at], *text.split()))
    fsspec.register_implementation(SCHEME, f"{__name__}.{HostsMemory.__name__}", clobber=True)
    fsspec.config.conf[SCHEME] = {"keepers": tuple(order)}


class HostsMemory(fsspec.AbstractFileSystem):
    """The storage as fsspec asks for it; a folder exists while an object is below it.

    Args:
      keepers: addresses, that of this host first and that of the next host second; objects are
        written to these two.
    """

    protocol = SCHEME

    def __init__(self, keepers: Sequence[str], **options: Any):
        super().__init__(**options)
        self._keepers = list(keepers)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Writes an object and its copy; raises OSError where either fails."""
        for address in self._keepers[:2]:
            keeper.ask(address, "PUT", self._strip_protocol(path), _sum(value) + value)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Reads an object from the first keeper that has it whole. Raises FileNotFoundError where
        none has it, and ValueError where all that have it have damaged it."""
        name = self._strip_protocol(path)
        damage: Exception = FileNotFoundError(f"no host that is left holds '{name}' in its memory")
        for address in self._keepers:
            with contextlib.suppress(OSError):  # of a host that is lost, or does not have it
                found = keeper.ask(address, "GET", name)
                if found[:4] == _sum(found[4:]):
                    return found[4:][start:end]
                damage = ValueError(f"'{name}' in a host's memory is not what was put there")
        raise damage

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        name, found = self._strip_protocol(path), {}
        for answer in self._of_all("GET", "", below=name):
            for each, size in json.loads(answer).items():
                child, deeper, _ = each.removeprefix(name).strip("/").partition("/")
                place, kind = f"{name}/{child}".strip("/"), "directory" if deeper else "file"
                found[place] = {"name": place, "size": 0 if deeper else size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return [found[each] if detail else each for each in sorted(found)]

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._of_all("DELETE", self._strip_protocol(path))

    rm_file = rm

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        return _Written(self, path, mode)

    def _of_all(self, *request: Any, **more: Any) -> list[bytes]:
        """Returns the answers of all keepers, ``{}`` of one that gives none; asks them at once."""

        def answer(address: str) -> bytes:
            with contextlib.suppress(OSError):
                return keeper.ask(address, *request, **more)
            return b"{}"

        with ThreadPoolExecutor(len(self._keepers), "jaxtrain-hosts") as pool:
            return list(pool.map(answer, self._keepers))


class _Written(fsspec.spec.AbstractBufferedFile):
    """A file that is put where it belongs when it is closed."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue())
        return final


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
