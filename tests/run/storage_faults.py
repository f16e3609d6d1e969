"""A stand-in for storage that fails at scripted moments: under etils' paths, and under ``open``."""

import builtins
import errno
import os

from etils.epath import backend

OPERATIONS = (
    "open",
    "listdir",
    "exists",
    "isdir",
    "stat",
    "mkdir",
    "makedirs",
    "replace",
    "rename",
)


class HttpError(Exception):
    """What clients of buckets raise."""

    def __init__(self, code: int):
        super().__init__(f"HTTP error {code}")
        self.code = code


class Faults:
    """Fails calls on paths that contain a text, a number of times or until told otherwise.

    Args:
      monkeypatch: pytest's.
    """

    def __init__(self, monkeypatch):
        self._scripts: list[list] = []
        self.failed = 0
        for name in OPERATIONS:
            real = getattr(backend._OsPathBackend, name)
            monkeypatch.setattr(backend._OsPathBackend, name, self._method(name, real))
        real_open = builtins.open

        def opened(path, *args, **kwargs):
            self._check("open", path)
            file = real_open(path, *args, **kwargs)
            return _File(file, path, self) if kwargs.get("buffering") == 0 else file

        monkeypatch.setattr(builtins, "open", opened)

    def fail(self, text: str, error: int | Exception, *, on: str = "open", times: int = 10**9):
        """The next calls ``on`` paths that contain ``text`` raise ``error``, or that errno."""
        if isinstance(error, int):
            error = OSError(error, os.strerror(error))
        self._scripts.append([text, on, error, times])

    def mend(self):
        """Storage works again."""
        self._scripts.clear()

    def _method(self, name, real):
        def method(backend, path, *args, **kwargs):
            self._check(name, path)
            return real(backend, path, *args, **kwargs)

        return method

    def _check(self, name, path):
        for script in self._scripts:
            text, on, error, times = script
            if on == name and text in str(path) and times:
                script[3] -= 1
                self.failed += 1
                raise error


class _File:
    """A file without a buffer, whose writes may fail after some bytes."""

    def __init__(self, file, path, faults: Faults):
        self._file, self._path, self._faults = file, path, faults

    def write(self, data: bytes) -> int:
        try:
            self._faults._check("write", self._path)
        except OSError as error:
            if error.errno == errno.ENOSPC and len(data) > 3:
                return self._file.write(data[:3])  # a disk fills up in the middle of a line
            raise
        return self._file.write(data)

    def close(self):
        self._file.close()
