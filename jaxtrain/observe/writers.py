"""Where metrics go: a JSON-lines file and TensorBoard, written by the first process alone."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import tensorboardX
from etils import epath


class Writer(Protocol):
    """Takes the values of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes named numbers under a step."""
        ...

    def close(self) -> None:
        """Writes what is pending and lets go."""
        ...


class JSONLWriter:
    """One JSON object per line: ``{"step": 10, "train/loss": 2.5}``.

    Every line is valid JSON: numbers that are not finite are written as the strings ``"nan"``,
    ``"inf"`` and ``"-inf"``.

    Args:
      path: the file, on a disk or in a bucket.
      resume_step: keep the lines up to this step, drop later ones, and append; None starts anew.
    """

    def __init__(self, path: epath.PathLike, *, resume_step: int | None = None):
        self._path = epath.Path(path)
        kept = [] if resume_step is None else _lines_up_to(self._path, resume_step)
        # A file in a bucket cannot be appended to: there the lines are kept and written whole.
        self._remote = "://" in str(path)
        self._kept = kept
        _replace(self._path, kept, remote=self._remote)
        self._file = None if self._remote else self._path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line."""
        line = json.dumps({"step": step} | {name: _plain(x) for name, x in values.items()}) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        else:
            self._kept.append(line)
            self._path.write_text("".join(self._kept))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class TensorBoardWriter:
    """Scalars for TensorBoard, through tensorboardX.

    Args:
      directory: where its event files go.
      resume_step: hide what an earlier run wrote after this step.
    """

    def __init__(self, directory: epath.PathLike, *, resume_step: int | None = None):
        purge = None if resume_step is None else resume_step + 1
        self._writer = tensorboardX.SummaryWriter(str(directory), purge_step=purge, flush_secs=30)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is pending."""
        self._writer.close()


class Fanout:
    """Writes to several writers; to none, it does nothing."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to each."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()


def make_writers(run_dir: epath.PathLike, *, resume_step: int | None = None) -> Fanout:
    """Opens ``log.jsonl`` and ``tensorboard/`` in a run's folder; in the first process only.

    Args:
      run_dir: the folder.
      resume_step: the step that a resumed run goes on from; what was logged after it is dropped.
    """
    if jax.process_index() != 0:
        return Fanout(())
    run_dir = epath.Path(run_dir)
    return Fanout(
        (
            JSONLWriter(run_dir / "log.jsonl", resume_step=resume_step),
            TensorBoardWriter(run_dir / "tensorboard", resume_step=resume_step),
        )
    )


def _plain(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _lines_up_to(path: epath.Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            keep = json.loads(line)["step"] <= step and line.endswith("\n")
        except (ValueError, KeyError, TypeError):
            keep = False  # A line that was cut off when the run was killed.
        if keep:
            kept.append(line)
    return kept


def _replace(path: epath.Path, lines: list[str], *, remote: bool) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if remote:
        path.write_text("".join(lines))
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.writelines(lines)
    epath.Path(file.name).replace(path)
