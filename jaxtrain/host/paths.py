"""Folders on a disk or in a bucket."""

import errno
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.host import distributed, storage

# For so long a listing over the network may not know of a new file.
SHARED_SECONDS = 60.0


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


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is in a bucket, where every object is whole and none can be appended to."""
    return "://" in str(path)


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path if is_remote(path) else path.with_name(path.name + ".partial")
    partial.write_text(text)
    if partial != path:
        partial.replace(path)


def json_text(tree: Any) -> str:
    """Writes numbers, texts, arrays, and lists and mappings of such as JSON that any program reads:
    what is not finite is null.

    >>> json_text({"loss": np.array([2.5, np.nan])}).split()
    ['{', '"loss":', '[', '2.5,', 'null', ']', '}']
    """

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: plain(each) for name, each in x.items()}
        if isinstance(x, np.ndarray | np.generic):
            return plain(x.tolist())
        if isinstance(x, list | tuple):
            return [plain(each) for each in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(tree), indent=2, allow_nan=False) + "\n"


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns a path that changing the working directory does not change."""
    # A remote path must not be resolved: that would turn gs://bucket into a local directory.
    path = as_path(path)
    return path if is_remote(path) else path.expanduser().resolve()


def check_writable(path: epath.Path) -> None:
    """Makes sure that a folder can be made, or written in where it exists, as far as that shows.

    Raises:
      NotADirectoryError, PermissionError: it cannot; buckets say so themselves, later.
    """
    if is_remote(path):
        return
    path = absolute(path)
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        why = "is on a read-only file system" if read_only else "may not be written in by this user"
        raise PermissionError(f"the folder '{there}' {why}: choose another, or make it writable")


def wait_until_seen(path: epath.Path, what: str, *, text: str | None = None) -> None:
    """Waits in this process until it sees what the first one does: a listing may be a minute old.

    Args:
      path: what the first process sees.
      what: its name, as the subject of a sentence.
      text: what is in it; None where it need only be there.

    Raises:
      StorageError: it does not come to be seen.
    """

    def look() -> None:
        if not path.exists() or (text is not None and path.read_text() != text):
            raise FileNotFoundError(
                "it is not there, where the first process has found it: all processes must share "
                "the directory"
            )

    storage.retrying(
        look,
        f"{what}, looked for by process {jax.process_index()}",
        passing=lambda error: isinstance(error, FileNotFoundError) or storage.passes(error),
        seconds=SHARED_SECONDS,
    )


def check_shared(path: epath.Path) -> None:
    """Makes sure that all processes see a file as the first one, which has written it, does.

    Raises:
      ValueError: one does not, in all processes; it was looked for as long as a listing may be old.
    """
    if jax.process_count() == 1:
        return
    text, seen = distributed.from_first_process(path.read_text), True
    try:
        wait_until_seen(path, str(path), text=text)
    except storage.StorageError:
        seen = False
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.array(seen)))
    if blind.size:
        raise ValueError(
            f"process {', '.join(map(str, blind))} does not see what process 0 writes in "
            f"{path.parent}: give a run_dir that all hosts share, such as one over the network "
            "or gs://..."
        )
