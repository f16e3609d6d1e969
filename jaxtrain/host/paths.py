"""Folders on a disk or in a bucket.

What asks whether a file is there asks here. ``exists()`` of a path takes every error for absence,
and a storage that fails for a moment would have a run begin anew, or its log emptied.
"""

import contextlib
import errno
import fnmatch
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jaxtrain.host import distributed, remote, storage

# For so long a listing over the network may not know of a new file.
SHARED_SECONDS = 60.0

P = TypeVar("P", epath.Path, pathlib.Path)


def as_path(path: epath.PathLike) -> epath.Path:
    """Returns a path on a disk or in a bucket: ``gs://...``, and what else fsspec knows. Raises
    ValueError where it is in no storage that is known here, such as ``http://...``.

    >>> str(as_path("runs") / "a")
    'runs/a'
    """
    if is_remote(path):
        with contextlib.suppress(ImportError):  # of which etils says more
            import fsspec

            # A listing is kept for the life of the process, and hides what other processes write.
            kept = fsspec.config.conf.setdefault(scheme_of(path), {})
            kept.setdefault("use_listings_cache", False)
    try:
        return epath.Path(path)
    except KeyError as error:
        if remote.register(scheme_of(path)):
            return epath.Path(path)
        raise ValueError(
            f"'{path}' is in no storage known here ({error.args[0]}): give a folder, gs://... or "
            "s3://..."
        ) from None


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is in a bucket, where every object is whole and none can be appended to."""
    return "://" in str(path)


def scheme_of(path: epath.PathLike) -> str:
    """Returns what stands before ``://`` in a path, nothing for one on a disk."""
    scheme, found, _ = str(path).partition("://")
    return scheme if found else ""


def file_system(path: epath.PathLike) -> tuple[Any, str]:
    """Returns fsspec's file system of a path in a bucket, and what the path is called there."""
    as_path(path)
    # The name by which etils asks for it.
    return remote.open_system(re.sub("^gs://", "gcs://", str(path)))


def read_object(path: epath.PathLike, start: int | None = None, stop: int | None = None) -> bytes:
    """Returns what an object in a bucket holds, or its bytes from ``start`` to ``stop``, by one
    request; it is tried again where storage fails. Raises FileNotFoundError and StorageError."""
    system, name = file_system(path)
    return storage.retrying(lambda: system.cat_file(name, start=start, end=stop), f"'{path}'")


def write_object(path: epath.PathLike, data: bytes, *, seconds: float | None = None) -> None:
    """Writes an object of a bucket whole, as :func:`read_object` reads; tried for so long."""
    system, name = file_system(path)
    storage.retrying(lambda: system.pipe_file(name, data), f"'{path}'", seconds=seconds)


class Entry(NamedTuple):
    """A file or folder at a path: its size in bytes, and when it changed (0: not known)."""

    is_folder: bool
    size: int
    changed: float


def look(path: epath.PathLike) -> Entry | None:
    """Returns what is at a path, or where a link there leads; None where there is nothing for sure.
    Raises OSError where storage did not answer, which says nothing of what is there."""
    try:
        if is_remote(path):
            found = as_path(path).stat()
            return Entry(bool(found.is_directory), found.length or 0, found.mtime)
        # Not etils' own, which fails where the owner of the file has no name here.
        found = os.stat(path)
        return Entry(stat.S_ISDIR(found.st_mode), found.st_size, found.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: epath.PathLike) -> bool:
    """Whether there is anything at a path; raises as :func:`look`."""
    return look(path) is not None


def is_folder(path: epath.PathLike) -> bool:
    """Whether a folder is at a path; raises as :func:`look`."""
    return (found := look(path)) is not None and found.is_folder


def is_file(path: epath.PathLike) -> bool:
    """Whether something other than a folder is at a path; raises as :func:`look`."""
    return (found := look(path)) is not None and not found.is_folder


def is_link(path: epath.PathLike) -> bool:
    """Whether a symbolic link is at a path; raises as :func:`look`."""
    try:
        return not is_remote(path) and stat.S_ISLNK(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def listed(folder: P, pattern: str = "*") -> list[P]:
    """Returns the paths in a folder whose names match, none without one; raises as :func:`look`."""
    try:
        return [path for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]
    except FileNotFoundError:
        return []


def sizes(folder: epath.Path | pathlib.Path) -> dict[str, int]:
    """Returns the bytes of each file in a folder by its name, none without one. Partial files,
    which may be gone the next moment, are left out."""
    if not is_remote(folder):
        with os.scandir(folder) as entries:
            return {e.name: e.stat().st_size for e in entries if not e.name.endswith(".partial")}
    return {name: about["size"] or 0 for name, about in told_of(folder).items()}


def told_of(folder: epath.Path) -> dict[str, dict[str, Any]]:
    """Returns what a bucket tells of each file in a folder by its name, none without one: its
    `size`, and, under names of its own, when it was written or what names that writing."""
    system, path = file_system(folder)
    try:
        return {each["name"].rpartition("/")[2]: each for each in system.ls(path, detail=True)}
    except FileNotFoundError:
        return {}


def read_if_there(path: epath.Path | pathlib.Path) -> bytes:
    """Returns what a file holds, nothing where there is none; raises as :func:`look`."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""


def json_object(text: str | bytes, *, parse_int: Callable[[str], Any] = int) -> dict[str, Any]:
    """Reads a JSON object; empty if the text is cut off or holds none.

    Args:
      text: the JSON.
      parse_int: makes a number of the digits of an integer.

    >>> json_object('{"step": 3}'), json_object('{"st'), json_object("[3]")
    ({'step': 3}, {}, {})
    """
    try:
        content = json.loads(text, parse_int=parse_int)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json(path: epath.Path | pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises ValueError where it is something else."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"'{path}' is not a JSON object")
    return found


def make_folder(path: epath.Path) -> None:
    """Makes a folder and those around it where there are none; raises as :func:`look`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # So it is said too where storage does not tell what is there.
        if not is_folder(path):
            raise


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file whole or not at all; a text in UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        path.write_bytes(data)
        return
    # The name is of this writer alone: another one may write the same file at the same moment.
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        if isinstance(error, OSError) and error.filename2 is None:
            error.filename = str(path)  # The name by which readers of the message know the file.
        raise


def cache_folder() -> pathlib.Path | None:
    """Returns ``~/.cache/jaxtrain`` (``$XDG_CACHE_HOME`` is heeded); None for want of a home."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        return None
    return pathlib.Path(home) / "jaxtrain"


def delete_oldest(
    folder: pathlib.Path, limit: int, *, in_use: Callable[[pathlib.Path], bool] = lambda path: False
) -> None:
    """Deletes what was used longest ago of a folder's files and folders, if there is one, until the
    rest has no more than ``limit`` bytes; what is ``in_use`` stays."""
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


def check_for_checkpoints(path: epath.PathLike) -> None:
    """Raises ValueError for a folder in which no checkpoint can ever be written: in a storage that
    no installed package writes to, or with a name that is not UTF-8."""
    as_path(path)
    if (scheme := scheme_of(path)) not in ("", "gs"):
        import fsspec

        try:
            fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise ValueError(
                f"the folder '{path}' is in {scheme}://, and the package that writes there is "
                f"missing ({error}): for s3://, pip install -e '.[s3]'"
            ) from None
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the folder {str(path)!r} is not named in UTF-8, so no checkpoint can be written "
            "there: choose another"
        ) from None


def check_on_disk(path: epath.PathLike, what: str) -> None:
    """Raises ValueError for a path in a bucket, where ``what`` goes to a disk alone."""
    # pathlib makes one slash of two.
    if re.match(r"[a-z0-9]+:/", str(path)):
        raise ValueError(f"{what} is '{path}', in a bucket: give a folder or file on a disk")


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
    Raises NotADirectoryError or PermissionError where it cannot; buckets say so themselves, later.
    """
    if is_remote(path):
        return
    path = absolute(path)
    there = next(each for each in (path, *path.parents) if exists(each))
    if not is_folder(there):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        why = "is on a read-only file system" if read_only else "may not be written in by this user"
        raise PermissionError(f"the folder '{there}' {why}: choose another, or make it writable")


def wait_until_seen(path: epath.Path, what: str, *, text: str | None = None) -> None:
    """Waits in this process until it sees what the first one does: a listing may be a minute old.

    ``what`` is its name, as the subject of a sentence, and ``text`` what is in it; None where it
    need only be there. Raises StorageError where it does not come to be seen.
    """

    def check() -> None:
        if not exists(path) or (text is not None and path.read_text() != text):
            raise FileNotFoundError(
                "it is not there, where the first process has found it: all processes must share "
                "the directory"
            )

    storage.retrying(
        check,
        f"{what}, looked for by process {jax.process_index()}",
        passing=lambda error: isinstance(error, FileNotFoundError) or storage.passes(error),
        seconds=SHARED_SECONDS,
    )


def check_shared(path: epath.Path) -> None:
    """Makes sure that all processes see a file as the first one, which has written it, does. Raises
    ValueError where one does not, in all processes; it was looked for as long as a listing may be
    old."""
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
            f"{path.parent}: give a `run_dir` that all hosts share, such as one over the network "
            "or gs://..."
        )
