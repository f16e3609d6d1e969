"""A table of all metrics, a row for each: ``metrics.csv``."""

import csv
import io
from collections.abc import Mapping

from etils import epath

from jaxtrain.host import storage
from jaxtrain.host.paths import read_if_there, write_whole
from jaxtrain.run.hook import Value
from jaxtrain.run.observe.writers import FileWriter, GrowingFile, flat

HEADER = ("step", "name", "value")


class CSVWriter(FileWriter):
    """Rows of step, name and value; an array has a row for each entry (``train/load/0``).

    ``pandas.read_csv(path).pivot_table(index="step", columns="name", values="value")`` has a column
    for each metric. The rows up to ``resume_step`` stay; None starts anew. Raises StorageError
    where the rows there can neither be read nor replaced.
    """

    def __init__(self, path: epath.PathLike, *, resume_step: int | None = None):
        path = epath.Path(path)

        def start() -> bytes:
            rows = [] if resume_step is None else _rows_up_to(path, resume_step)
            text = _text([HEADER, *rows])
            write_whole(path, text)
            return text.encode()

        self._file = GrowingFile(path, storage.retrying(start, f"the table {path}"))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends a row for each number."""
        rows = [(step, name, repr(value)) for name, value in flat(values)]
        self._file.append(_text(rows).encode())


def _text(rows) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _rows_up_to(path: epath.Path, step: int) -> list[list[str]]:
    rows = csv.reader(io.StringIO(read_if_there(path).decode()))
    # What is longer or shorter was cut off when the run was killed.
    whole = [row for row in rows if len(row) == len(HEADER) and row[0].isdecimal()]
    return [row for row in whole if int(row[0]) <= step]
