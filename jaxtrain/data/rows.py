"""Rows of your own: data that can be a source of batches, and streams by their position."""

import contextlib
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.host.memory import check_fits
from jaxtrain.host.paths import as_path

_GIVE = (
    "batches need rows by their number, so that a resumed run has the same ones; give a list of "
    "dicts of arrays, a dataset with len(rows) and rows[i], a dict of arrays, an .npz, or "
    "jaxtrain.data.RowStream(open), whose open(position) begins at any row"
)


def as_rows(rows: Any) -> Any:
    """Returns data as a source of rows for `Batches`.

    Args:
      rows: random access to rows, a :class:`RowStream`, or arrays [N, ...] by name, of which row i
        is the i-th part of each: a dict, or an .npz file or its path.

    Raises:
      ValueError: it is something else, such as an iterator, or its arrays differ in length.
    """
    if isinstance(rows, str | os.PathLike) and str(rows).endswith(".npz"):
        failed = f"'{rows}' cannot be read"
        with as_path(rows).open("rb") as file, opened_npz(file, failed) as arrays:
            return _ArrayRows(arrays)
    if isinstance(rows, Mapping) and isinstance(next(iter(rows), ""), str):
        return _ArrayRows(rows)
    has_numbers = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
    is_text = isinstance(rows, str | bytes | os.PathLike)
    if is_text or not (has_numbers or isinstance(rows, RowStream)):
        raise ValueError(f"the rows are a {_kind(rows)}: {_GIVE}")
    return rows


@contextlib.contextmanager
def opened_npz(content: Any, failed: str) -> Iterator[Mapping[str, np.ndarray]]:
    """Opens an .npz, a path or a file, that fits into memory; raises ValueError that begins with
    ``failed``."""
    try:
        with zipfile.ZipFile(content) as packed:
            check_fits(sum(member.file_size for member in packed.infolist()), "it")
        with np.load(content, allow_pickle=False) as arrays:
            yield arrays
    except (ValueError, KeyError, OSError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"{failed} ({error})") from None


def fields_of_row(source: Any, index: int) -> Mapping[str, Any]:
    """Returns the arrays of a row by name; raises ValueError where it has no names."""
    try:
        row = source[index]
    except KeyError as error:
        if error.args == (index,):  # a table, which has its columns by name
            raise ValueError(f"the rows are a {_kind(source)}: {_GIVE}") from None
        raise
    row = row._asdict() if hasattr(row, "_asdict") else row
    if not hasattr(row, "items"):
        raise ValueError(
            f"row {index} is a {_kind(row)}: give a dict or a named tuple, with a name for each "
            'array, such as {"x": x, "y": y}'
        )
    return row


def array_of(value: Any, name: str) -> np.ndarray:
    """Returns a value of a row as an array; raises ValueError if NumPy cannot read it."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, which has types of its own
        why = f"which NumPy cannot read ({error}): give x.detach().cpu().float().numpy()"
        raise ValueError(f"a row has '{name}', a {_kind(value)}, {why}") from None


class RowStream:
    """Rows of a stream by their position: a source for `Batches` that has no end.

    Row p of the stream is row ``p % B`` of batch ``p // B``, so the position is a function of the
    step, and a resumed run opens the stream at its next row. Every process reads all rows and drops
    those of the others.

    Args:
      open: ``position -> iterable of rows`` from this position on, the same ones at every call:
        ``lambda position: dataset.skip(position)``, or of a generator function
        ``lambda position: itertools.islice(make(), position, None)``.

    >>> from jaxtrain.data import Batches
    >>> stream = RowStream(lambda position: ({"x": number} for number in range(position, 100)))
    >>> Batches(stream, global_batch=2, seed=0).batch(3)["x"].tolist()
    [6, 7]
    """

    def __init__(self, open: Callable[[int], Any]):
        self._open, self._lock = open, threading.Lock()
        self._rows: Iterator[Any] | None = None
        self._next = self._dropped = 0

    def row_order(self, *, seed: int, global_batch: int) -> Callable[[int], int]:
        """Returns the order of the stream, whatever the seed."""
        del seed
        self._dropped = global_batch
        return lambda position: position

    def __getitem__(self, position: int) -> Any:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Returns the rows at some positions."""
        with self._lock:
            try:
                return [self._read(position) for position in positions]
            except BaseException:
                self._rows = None  # a generator that has failed does not go on
                raise

    def _read(self, position: int) -> Any:
        # Rows of a batch that other processes take are dropped; further on, the stream is reopened.
        if self._rows is None or not 0 <= position - self._next <= self._dropped:
            self._rows, self._next = iter(self._open(position)), position
        for row in self._rows:
            self._next += 1
            if self._next > position:
                return row
        raise ValueError(
            f"the stream ended before row {position}: let open(position) begin it again, such as "
            "at position % rows, or give fewer steps"
        )


class _ArrayRows:
    """Rows of arrays that lie one behind the other; those on a disk stay there, as of h5py."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = {
            name: np.asarray(x) if isinstance(x, jax.Array) or hasattr(x, "to_numpy") else x
            for name, x in arrays.items()
        }
        shapes = {n: hasattr(x, "dtype") and x.shape for n, x in self._arrays.items()}
        if not shapes or not all(shapes.values()):
            raise ValueError(f"the rows are a {_kind(arrays)} of other things than arrays: {_GIVE}")
        if len({shape[0] for shape in shapes.values()}) != 1:
            raise ValueError(f"the arrays have the shapes {shapes}: give as many rows of each")
        self._length = next(iter(shapes.values()))[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: x[index] for name, x in self._arrays.items()}


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
