"""One call of the file system that fails once, whichever it is: under ``os`` and ``open``."""

import builtins
import collections
import errno
import io
import os
import re
import threading

OPERATIONS = (
    *("stat", "lstat", "open", "listdir", "scandir", "mkdir", "rmdir", "rename", "replace"),
    *("unlink", "remove", "statvfs", "fsync"),
)
# All errors that may be gone at the next try.
PASSING = tuple(
    getattr(errno, name)
    for name in (
        *("EIO", "ETIMEDOUT", "ESTALE", "EAGAIN", "EBUSY", "EINTR", "ENOSPC", "EDQUOT"),
        *("EREMOTEIO", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOBUFS"),
    )
)
# What is drawn anew at every start.
_DRAWN = re.compile(r"partial-[0-9a-f]+|tmp[-\w.]*|tfevents\.[^/]*|\.jsonl\.\w+")


class Injected:
    """Counts the calls on paths in a folder by operation and path, and fails one of them.

    Args:
      monkeypatch: pytest's.
      folder: in which calls count.
      chosen: those that fail: the operation, the path below the folder, and which of the calls of
        that kind, from 1.
      number: the error's.
    """

    def __init__(self, monkeypatch, folder, chosen=(), number=errno.EIO):
        self.seen, self.failed = collections.Counter(), []
        self._folder, self._chosen, self._number = str(folder), set(chosen), number
        self._lock = threading.Lock()
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        opened = self._opened(builtins.open)
        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(io, "open", opened)

    def calls(self):
        """The calls that were seen, each as ``call`` takes it."""
        return [(*kind, i + 1) for kind, count in sorted(self.seen.items()) for i in range(count)]

    def check(self, name, path, dir_fd=None):
        if isinstance(path, int) or dir_fd is not None:
            inner = "" if isinstance(path, int) else os.fspath(path)
            descriptor = path if isinstance(path, int) else dir_fd
            path = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), inner).rstrip("/")
        path = os.path.abspath(os.fsdecode(path))
        if not f"{path}/".startswith(f"{self._folder}/"):
            return
        kind = (name, _DRAWN.sub("*", path[len(self._folder) :]))
        with self._lock:
            self.seen[kind] += 1
            if (*kind, self.seen[kind]) not in self._chosen:
                return
            self.failed.append(kind)
        raise OSError(self._number, os.strerror(self._number), path)

    def _wrapped(self, name, real):
        def function(path, *args, **kwargs):
            self.check(name, path, kwargs.get("dir_fd"))
            return real(path, *args, **kwargs)

        return function

    def _opened(self, real):
        def function(path, mode="r", *args, **kwargs):
            if isinstance(path, int):
                return real(path, mode, *args, **kwargs)
            self.check("open", path)
            file = real(path, mode, *args, **kwargs)
            inside = os.path.abspath(os.fsdecode(path)).startswith(self._folder)
            return file if mode[0] == "r" or not inside else _File(file, path, self)

        return function


class _File:
    """A file that is written, whose writes may fail."""

    def __init__(self, file, path, injected):
        self._file, self._path, self._injected = file, path, injected

    def write(self, data):
        self._injected.check("write", self._path)
        return self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)
