"""What is kept for a later start under ``~/.cache/jaxtrain``, and how much of it."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path


def delete_oldest(
    folder: Path, limit: int, *, in_use: Callable[[Path], bool] = lambda path: False
) -> None:
    """Deletes what was used longest ago of a folder's files and folders, until the rest fits.

    Args:
      folder: need not exist.
      limit: bytes that may stay.
      in_use: says of an entry that it must stay.
    """
    entries = []
    with contextlib.suppress(OSError):  # another process may delete the same
        for path in folder.iterdir():
            found = [each.stat() for each in (path.iterdir() if path.is_dir() else [path])]
            used = max((max(each.st_atime, each.st_mtime) for each in found), default=0.0)
            entries.append((used, sum(each.st_size for each in found), path))
    for _, size, path in sorted(entries, reverse=True):
        limit -= size
        if limit < 0 and not in_use(path):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
