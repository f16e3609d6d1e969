"""Paths of every storage that fsspec knows and etils does not: ``hdfs://host/a``, ``memory://a``."""

import contextlib
import fnmatch
import functools
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from etils import epath

# Storage that has no folders to list or is the disk itself.
_NOT_REMOTE = frozenset({"http", "https", "file", "local", "data", "reference"})


def register(scheme: str) -> bool:
    """Has ``epath.Path`` make paths of a scheme; returns whether fsspec knows it as a storage."""
    import fsspec

    known = scheme in fsspec.available_protocols() and scheme not in _NOT_REMOTE
    if known:
        epath.register_path_cls(f"{scheme}://")(RemotePath)
    return known


def open_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a path, and the name of the path there; raises ImportError
    where a library is missing."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except OSError as error:
        if "Unable to load lib" not in str(error):
            raise
        # The error of pyarrow lists every place that it has looked in.
        raise ImportError(
            f"'{url}' needs Java and Hadoop's native library, and libjvm or libhdfs is not here: "
            "install both, and set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        ) from None


def _parts(parts: tuple[epath.PathLike, ...]) -> tuple[str]:
    """The text of a path with its scheme as its first part: ``/hdfs/host/a``."""
    text = "/".join(map(str, parts))
    scheme, remote, rest = text.partition("://")
    if remote and rest[:1] in ("", "/"):
        raise ValueError(f"'{text}' names no host or bucket: give {scheme}://NAME/...")
    return (f"/{scheme}/{rest}" if remote else text,)


class RemotePath(epath.Path):
    """A path in a storage of fsspec, which does what is asked of paths of etils.

    >>> register("memory")
    True
    >>> path = epath.Path("memory://run") / "log.jsonl"
    >>> path.write_text("{}"), path.read_text(), str(path.parent), path.exists()
    (2, '{}', 'memory://run', True)
    """

    if sys.version_info < (3, 12):

        def __new__(cls, *parts: epath.PathLike) -> "RemotePath":
            return pathlib.PurePosixPath.__new__(cls, *_parts(parts))

    else:

        def __init__(self, *parts: epath.PathLike) -> None:
            super().__init__(*_parts(parts))

    def __str__(self) -> str:
        if self.parts[:1] != ("/",):  # relative to another
            return "/".join(self.parts) or "."
        return f"{self.parts[1]}://{'/'.join(self.parts[2:])}"

    def __fspath__(self) -> str:
        return str(self)

    def _system(self) -> tuple[Any, str]:
        return open_system(str(self))

    def _ask(self, call: str, *args: Any, **options: Any) -> Any:
        system, path = self._system()
        return getattr(system, call)(path, *args, **options)

    exists = functools.partialmethod(_ask, "exists")
    is_dir = functools.partialmethod(_ask, "isdir")
    is_file = functools.partialmethod(_ask, "isfile")
    rmdir = functools.partialmethod(_ask, "rmdir")

    def iterdir(self) -> Iterator["RemotePath"]:
        names = {path.rstrip("/").rpartition("/")[2] for path in self._ask("ls", detail=False)}
        return (self / name for name in sorted(names - {self.name}))

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def open(self, mode: str = "r", **options: Any) -> Any:
        return self._ask("open", mode, **options)

    def stat(self) -> Any:
        found = self._ask("info")
        changed = found.get("mtime", 0)
        return types.SimpleNamespace(
            is_directory=found["type"] == "directory",
            length=found.get("size") or 0,
            mtime=changed if isinstance(changed, int | float) else changed.timestamp(),
        )

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        del mode, parents  # folders of such storage are made with those around them
        self._ask("makedirs", exist_ok=exist_ok)

    def rmtree(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self._ask("rm", recursive=True)

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self._ask("rm_file")

    def rename(self, target: epath.PathLike) -> "RemotePath":
        self._ask("mv", RemotePath(target)._system()[1], recursive=True)
        return RemotePath(target)

    def expanduser(self) -> "RemotePath":
        return self

    absolute = resolve = expanduser
