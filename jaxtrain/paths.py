"""Folders on a disk or in a bucket."""

import errno
import os

from etils import epath


def as_path(path: epath.PathLike) -> epath.Path:
    """Returns a path on a disk or in a bucket (``gs://...``).

    Raises:
      ValueError: it is in no storage that is known here, such as ``http://...``.

    >>> str(as_path("runs") / "a")
    'runs/a'
    """
    try:
        return epath.Path(path)
    except KeyError as error:
        raise ValueError(
            f"'{path}' is in no storage known here ({error.args[0]}): give a folder or gs://..."
        ) from None


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns a path that changing the working directory does not change."""
    # A remote path must not be resolved: that would turn gs://bucket into a local directory.
    path = as_path(path)
    return path if "://" in str(path) else path.expanduser().resolve()


def check_writable(path: epath.Path) -> None:
    """Makes sure that a folder can be made, or written in where it exists, as far as that shows.

    Raises:
      NotADirectoryError, PermissionError: it cannot; buckets say so themselves, later.
    """
    if "://" in str(path):
        return
    path = absolute(path)
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        why = "is on a read-only file system" if read_only else "may not be written in by this user"
        raise PermissionError(f"the folder '{there}' {why}: choose another, or make it writable")
