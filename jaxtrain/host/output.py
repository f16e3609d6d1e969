"""Output that cannot be written: a run continues without it, and a command that nobody reads ends
without a word."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

# The reader of a pipe has gone, or a terminal has hung up.
_GONE = (errno.EPIPE, errno.EIO)
# Each stream of this process that could not be written, and why; the descriptors are the whole
# process's.
lost: dict[str, str] = {}


class _Lasting:
    """A stream that raises no error of its descriptor, which becomes /dev/null when nobody reads it
    any more."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def end(self) -> None:
        """Drops what cannot be written, for the interpreter's own flush would fail."""
        if not self._try(self._stream.flush):
            _discard(self._stream)

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except OSError as error:  # also of a disk that is full, which may have room again
            lost.setdefault(self._name, os.strerror(error.errno))
            if error.errno in _GONE:
                _discard(self._stream)
            return False
        return True


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """While this lasts, no closed pipe, terminal that has hung up or full disk ends what prints."""
    before = sys.stdout, sys.stderr
    names = "standard output", "standard error"
    both = [s and _Lasting(s, name) for s, name in zip(before, names, strict=True)]
    sys.stdout, sys.stderr = both
    try:
        yield
    finally:
        for stream in filter(None, both):
            stream.end()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def ending_unread() -> Iterator[None]:
    """Ends the program without a word, as SIGPIPE would, once nobody reads its output."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        raise SystemExit(141) from None


def _discard(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # not every stream has a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
