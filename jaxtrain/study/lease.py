"""Signs of life of those who work on a study, and the locks that they share.

A lock is the kernel's, which lets go of it when a process dies, however that dies.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable

from jaxtrain.host.paths import as_path, exists, json_object, read_if_there, write_whole

BEAT_SECONDS = 5.0
# Where nothing is known of a process on another host, it is dead after so long without a beat.
DEAD_SECONDS = 60.0


class FileLock:
    """A lock that one process of all that share a folder has; for ``with``."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def acquire(self) -> bool:
        """Waits for the lock."""
        self._file = open(self.path, "ab")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Lets go of it."""
        self._file.close()

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class JournalLock(FileLock):
    """The lock of an Optuna journal. Whoever has it finds whole lines: what a process that died was
    still writing is cut off, for the next line would be appended to it and nobody could read on."""

    def __init__(self, journal: pathlib.Path):
        super().__init__(journal.with_name(f"{journal.name}.lock"))
        self._journal = journal

    def acquire(self) -> bool:
        super().acquire()
        if not exists(self._journal):
            return True
        with open(self._journal, "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if size and file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True


class Lease:
    """The sign of life of this process: a file, ``token.json``, that a thread rewrites."""

    def __init__(self, folder: pathlib.Path):
        self.token = secrets.token_hex(6)
        self._path, self._closed, self._beat = as_path(folder / f"{self.token}.json"), None, 0

    def __enter__(self) -> "Lease":
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep, name="jaxtrain-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # Others notice by the process, or by the silence.
            self._write(ended=True)

    def _keep(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a disk that fails for a moment
                self._write()

    def _write(self, **more: bool) -> None:
        self._beat += 1
        fields = {"host": _where(), "pid": os.getpid(), "beat": self._beat}
        write_whole(self._path, json.dumps(fields | more) + "\n")


class Leases:
    """Tells which processes have died; ages are by this process's own clock."""

    def __init__(self, folder: pathlib.Path, *, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder, clock
        self._seen: dict[str, tuple[object, float]] = {}

    def is_dead(self, token: str) -> bool:
        """Whether a process has ended, or is not heard of any more."""
        told = json_object(read_if_there(self._folder / f"{token}.json"))
        if told.get("ended"):
            return True
        if told.get("host") == _where() and not _is_there(told["pid"]):
            return True
        beat, since = self._seen.get(token, (None, self._clock()))
        if token not in self._seen or told.get("beat") != beat:
            self._seen[token] = (told.get("beat"), self._clock())
            return False
        return self._clock() - since > DEAD_SECONDS


def _where() -> str:
    """Names the machine and its container, because process numbers count within one. A host name
    may be shared, for example by containers on the network of their host."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):
        names.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(names)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
