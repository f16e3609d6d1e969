"""Storage that fails for a while: which errors pass by themselves, and trying again until they do.

A disk over the network, a bucket or a full disk often works again a minute later. Reads and writes
of a run go through :func:`retrying` and :func:`iterating`; what stays away ends the process with
:data:`jaxtrain.host.exit_codes.STORAGE`, after which launchers start it again.
"""

import contextlib
import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

logger = logging.getLogger(__name__)

# How long a read or write is tried before the process ends.
PATIENCE_SECONDS = 300.0
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.2, 15.0

_PASSING_NUMBERS = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ETIMEDOUT", "ESTALE", "EAGAIN", "EBUSY", "EINTR", "ENOSPC", "EDQUOT"),
        *("EMFILE", "ENFILE"),  # descriptors, which others give back
        *("EREMOTEIO", "ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "ENOTCONN"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOBUFS"),
    )
    if hasattr(errno, name)
)
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# What clients written in C++ say instead of raising an error with a number.
_PASSING_TEXT = re.compile(
    r"\b(?:UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED)\b"
    r"|HTTP (?:response code|status)\D{0,3}(?:408|429|5\d\d)\b|[Tt]imed out|[Tt]oo many requests"
)
_NUMBER_IN_TEXT = re.compile(r"os_error_code='(\d+)'")  # TensorStore's way to say errno

# Clients of buckets, which raise errors of their own kinds, such as for want of credentials.
_CLIENTS = frozenset({"aiohttp", "azure", "botocore", "gcsfs", "google"})

# What is so until somebody changes it: rights, names, kinds of files.
_LASTING_NUMBERS = frozenset(
    getattr(errno, name)
    for name in ("EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ENOTDIR", "EISDIR", "EINVAL", "ELOOP")
)

# Time, as all patience here measures it.
now, pause = time.monotonic, time.sleep

T = TypeVar("T")


class StorageError(OSError):
    """Storage failed, and went on failing; the same command may succeed later."""


def error_number(error: BaseException) -> int | None:
    """The system's number of an error, read from its text where that alone has it."""
    named = _NUMBER_IN_TEXT.search(str(error))
    return getattr(error, "errno", None) or (int(named[1]) if named else None)


def passes(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is storage's and may be gone by itself.

    >>> passes(OSError(errno.EIO, "Input/output error"))
    True
    >>> passes(ValueError("UNAVAILABLE: HTTP response code: 503"))
    True
    >>> passes(PermissionError(errno.EACCES, "Permission denied"))
    False
    """
    while error is not None:
        status = getattr(error, "code", None) or getattr(error, "status", None)
        if isinstance(error, BrokenPipeError):  # nobody reads our output: not storage's
            return False
        if isinstance(error, StorageError | TimeoutError | ConnectionError):
            return True
        if error_number(error) in _PASSING_NUMBERS or _PASSING_TEXT.search(str(error)):
            return True
        with contextlib.suppress(TypeError, ValueError):
            if int(status) in _PASSING_STATUS:
                return True
        error = error.__cause__
    return False


def lasts(error: BaseException | None) -> bool:
    """Whether an error that writing has met will be met again however often it is tried.

    >>> lasts(PermissionError(errno.EACCES, "Permission denied")), lasts(ValueError("a bad path"))
    (True, True)
    >>> lasts(ValueError("UNAVAILABLE: it is busy")), lasts(FileNotFoundError(2, "gone"))
    (False, False)
    """
    if error is None or passes(error):
        return False
    number = error_number(error)
    lasting = (ValueError, TypeError, PermissionError)  # which clients of buckets do not number
    return number in _LASTING_NUMBERS if number else isinstance(error, lasting)


def why(error: BaseException) -> str:
    """The cause of an error in a few words: the system's own where it has an error number."""
    while error is not None:
        text = str(error)
        if number := error_number(error):
            own = getattr(error, "strerror", None) if getattr(error, "errno", None) else None
            return own or os.strerror(number).lower()
        if text.strip():
            first = text.strip().splitlines()[0].split(" [tensorstore_spec=")[0]
            return first if len(first) <= 300 else first[:297] + "..."
        error, last = error.__cause__, error
    return type(last).__name__


def retrying(call: Callable[[], T], what: str, **patience) -> T:
    """Returns ``call()``, tried again as long as it raises what passes by itself; :func:`iterating`
    says what is raised, and explains the other arguments.

    >>> answers = iter([OSError(errno.EIO, "Input/output error"), "read"])
    >>> def read():
    ...     answer = next(answers)
    ...     if isinstance(answer, OSError):
    ...         raise answer
    ...     return answer
    >>> retrying(read, "the file", sleep=lambda seconds: None)
    'read'
    """
    return next(iterating(lambda: [call()], what, **patience))


def iterating(
    make: Callable[[], Iterable[T]],
    what: str,
    *,
    passing: Callable[[BaseException], bool] | None = None,
    seconds: float | None = None,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] | None = None,
) -> Iterator[T]:
    """Yields what ``make()`` yields, going on behind the last item after a failure that passes.

    A failure is said once; the pauses grow longer, at random so that hosts spread out. Raises
    StorageError where it went on failing. Any other error is raised as it is.

    Args:
      what: what is tried, as the subject of a sentence (``"the manifest of checkpoint 3"``).
      passing: which errors to try again after; None for those that pass by themselves, but for
        a ``StorageError``, which has been tried for long enough further down.
      seconds: without success after which to give up; None for ``PATIENCE_SECONDS``.
    """
    passing = passing or (lambda error: passes(error) and not isinstance(error, StorageError))
    clock, sleep = clock or now, sleep or pause
    seconds = PATIENCE_SECONDS if seconds is None else seconds
    done, since, delay = 0, None, FIRST_DELAY_SECONDS
    while True:
        try:
            for item in islice(make(), done, None):
                if since is not None:
                    logger.warning("%s: works again after %.0f s", what, clock() - since)
                since, delay = None, FIRST_DELAY_SECONDS
                yield item
                done += 1
            return
        except Exception as error:
            if not passing(error):
                if type(error).__module__.partition(".")[0] in _CLIENTS:
                    raise OSError(f"{what}: {why(error)}") from error
                raise
            at = clock()
            if since is None:
                since = at
                logger.warning("%s: %s; trying again for up to %.0f s", what, why(error), seconds)
            # In this order: what is left of a pause that long is 0, and no rounding error.
            left = since + seconds - at
            if left <= 0:
                raise StorageError(
                    f"{what}: {why(error)}, after tries for {at - since:.0f} s"
                ) from error
            sleep(min(delay * random.uniform(0.5, 1.0), left))
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)


@contextlib.contextmanager
def restartable() -> Iterator[None]:
    """Turns an error of files into a :class:`StorageError`, for the part of a run that has begun.

    What was readable when the run began may be so again; where it is not, the next start says so.
    """
    try:
        yield
    except (StorageError, BrokenPipeError):
        raise
    except OSError as error:
        numbered = (error.errno, error.strerror, error.filename) if error.errno else (str(error),)
        raise StorageError(*numbered) from error
