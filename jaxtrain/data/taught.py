"""A teacher's log-probabilities beside rows of tokens, in a file that is mapped into memory.

A folder has ``answers.npy``, a record for each position of each row, and ``teacher.json``, which is
written last and says what rows they are of.

Shapes: T positions of a row, K tokens that are stored.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxtrain.host.paths import as_path, exists, write_whole

FORMAT, ABOUT, ANSWERS = "jaxtrain teacher 1", "teacher.json", "answers.npy"
# Which the rows have beside their tokens: [T, K] and [T, K + 1].
IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"


def about_rows(rows: Any, vocabulary: str) -> dict[str, Any]:
    """Says which rows these are: how cut, how many, of which text and tokenizer (fingerprints).

    Raises:
      ValueError: for a mixture, whose rows have no order of their own, and preferences.
    """
    if not hasattr(rows, "corpus") or rows.corpus.pairs:
        what = "holds preferences" if hasattr(rows, "corpus") else "is a mixture, or grows"
        raise ValueError(f"`data` {what}: a teacher's answers are beside text of one source")
    cut = {"seq_len": rows.seq_len, "packing": type(rows).__name__, "rows": len(rows)}
    return {"text": rows.corpus.fingerprint, "vocabulary": vocabulary} | cut


def write_answers(
    folder: str, about: dict[str, Any], parts: Iterable[tuple[np.ndarray, np.ndarray]], dtype: str
) -> int:
    """Writes what a teacher says of rows and returns the bytes; ``about`` them has K as ``top``,
    ``parts`` are of some rows each, in order, and ``dtype`` is of the log-probabilities."""
    (path := as_path(folder)).mkdir(parents=True, exist_ok=True)
    (path / ABOUT).unlink(missing_ok=True)
    K, at = about["top"], 0
    kind = np.dtype([(IDS, "<i4", (K,)), (LOG_PROBS, dtype, (K + 1,))])
    shape = about["rows"], about["seq_len"]
    file = np.lib.format.open_memmap(path / ANSWERS, "w+", kind, shape)
    for ids, log_probs in parts:
        file[IDS][at : at + len(ids)], file[LOG_PROBS][at : at + len(ids)] = ids, log_probs
        at += len(ids)
    file.flush()
    write_whole(path / ABOUT, json.dumps({"format": FORMAT, "dtype": dtype, **about}))
    return file.nbytes


def read_about(folder: str) -> dict[str, Any]:
    """Returns what ``teacher.json`` says; raises ValueError where a folder has no whole one."""
    path = as_path(folder) / ABOUT
    about = json.loads(path.read_text()) if exists(path) else {}
    if about.get("format") != FORMAT:
        raise ValueError(f"'{folder}' holds no teacher's answers: make it by experiments.teach")
    return about


class Taught:
    """Rows of tokens with what a teacher has said of them: a RandomAccessDataSource. Raises
    ValueError where the folder is of other rows."""

    def __init__(self, rows: Any, folder: str, vocabulary: str):
        stored = read_about(folder)
        for name, value in about_rows(rows, vocabulary).items():
            if stored[name] != value:
                raise ValueError(
                    f"the teacher's answers in '{folder}' are of other rows ({name} is "
                    f"{stored[name]} there and {value} here): store them again"
                )
        self.rows, self.corpus, self.seq_len = rows, rows.corpus, rows.seq_len
        self._answers = np.lib.format.open_memmap(as_path(folder) / ANSWERS, "r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        answers = self._answers[range(len(self))[index]]
        return self.rows[index] | {name: np.array(answers[name]) for name in (IDS, LOG_PROBS)}
