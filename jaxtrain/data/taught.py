"""A teacher's log-probabilities beside rows of tokens, in files that are mapped into memory.

A folder has ``ids.npy`` and ``log_probs.npy``, a line for each position of each row, and
``teacher.json``, which is written last and says what rows they are of.

Shapes: T positions of a row, K tokens that are stored.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxtrain.host.paths import as_path, exists, write_whole

ABOUT, FORMAT = "teacher.json", "jaxtrain teacher 1"
FILES = {"teacher_ids": "ids.npy", "teacher_log_probs": "log_probs.npy"}


def about_rows(rows: Any, vocabulary: str) -> dict[str, Any]:
    """Says which rows these are: of which text and tokenizer (fingerprints), how cut, how many.

    Raises:
      ValueError: for a mixture, whose rows have no order of their own.
    """
    if not hasattr(rows, "corpus"):
        raise ValueError("`data` is a mixture: a teacher's answers are stored beside one source")
    cut = {"seq_len": rows.seq_len, "packing": type(rows).__name__, "rows": len(rows)}
    return {"text": rows.corpus.fingerprint, "vocabulary": vocabulary} | cut


def write_taught(
    folder: str, about: Mapping[str, Any], parts: Iterable[Mapping[str, np.ndarray]], dtype: str
) -> int:
    """Writes what a teacher says of rows, one part of them after the other; returns the bytes.

    Args:
      about: of :func:`about_rows`, and K as ``top``.
      parts: ``teacher_ids`` [rows, T, K] and ``teacher_log_probs`` [rows, T, K + 1] in order.
      dtype: of the log-probabilities.
    """
    path = as_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / ABOUT).unlink(missing_ok=True)
    count, T, K = (about[name] for name in ("rows", "seq_len", "top"))
    files = {
        name: np.lib.format.open_memmap(path / file, "w+", kind, (count, T, last))
        for (name, file), kind, last in zip(FILES.items(), ("<u4", dtype), (K, K + 1), strict=True)
    }
    at = 0
    for part in parts:
        size = len(part["teacher_ids"])
        for name, file in files.items():
            file[at : at + size] = part[name]
        at += size
    for file in files.values():
        file.flush()
    write_whole(path / ABOUT, json.dumps({"format": FORMAT, "dtype": dtype, **about}))
    return sum(file.nbytes for file in files.values())


def read_about(folder: str) -> dict[str, Any]:
    """Returns what ``teacher.json`` says; raises ValueError where a folder has no whole one."""
    path = as_path(folder) / ABOUT
    about = json.loads(path.read_text()) if exists(path) else {}
    if about.get("format") != FORMAT:
        raise ValueError(f"'{folder}' holds no teacher's answers: make it by experiments.teach")
    return about


class Taught:
    """Rows of tokens with what a teacher has said of them: a RandomAccessDataSource.

    Raises:
      ValueError: the folder is of other rows.
    """

    def __init__(self, rows: Any, folder: str, vocabulary: str):
        own, stored = about_rows(rows, vocabulary), read_about(folder)
        for name, value in own.items():
            if stored[name] != value:
                raise ValueError(
                    f"the teacher's answers in '{folder}' are of other rows ({name} is "
                    f"{stored[name]} there and {value} here): store them again"
                )
        self.rows, self.corpus, self.seq_len = rows, rows.corpus, rows.seq_len
        path = as_path(folder)
        self._files = {n: np.lib.format.open_memmap(path / f, "r") for n, f in FILES.items()}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = range(len(self))[index]
        ids, log_probs = (np.array(file[index]) for file in self._files.values())
        names = dict(zip(FILES, (ids.astype(np.int32), log_probs), strict=True))
        return self.rows[index] | names
