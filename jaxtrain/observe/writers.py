"""Where metrics go: a JSON-lines file and TensorBoard, written by the first process alone."""

import contextlib
import datetime
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
from etils import epath

# Seconds between uploads of a log that lives in a bucket.
UPLOAD_SECONDS = 10.0


class Writer(Protocol):
    """Takes the values of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes named numbers under a step."""
        ...

    def close(self) -> None:
        """Writes what is pending and lets go."""
        ...


class JSONLWriter:
    """One JSON object per line: ``{"step": 10, "time": "2026-01-31T12:00:00+00:00", "train/loss":
    2.5}``.

    Every line is valid JSON: numbers that are not finite are written as the strings ``"nan"``,
    ``"inf"`` and ``"-inf"``. On a disk each line is there when ``write`` returns. A file in a
    bucket cannot be appended to: there the whole log is written anew, at most every
    ``UPLOAD_SECONDS`` and once more by ``close``.

    Args:
      path: the file, on a disk or in a bucket.
      resume_step: keep the lines up to this step, drop later ones, and append; None starts anew.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: epath.PathLike,
        *,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._path, self._clock = epath.Path(path), clock
        lines = [] if resume_step is None else _lines_up_to(self._path, resume_step)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if _is_remote(path):
            self._file, self._lines = None, lines
            self._upload()
        else:
            _replace(self._path, lines)
            self._file, self._lines = self._path.open("a"), []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line.

        Raises:
          ValueError: a value is named ``step``, which is the line's own.
        """
        if "step" in values:
            raise ValueError("a value is named 'step', like the step itself; give it another name")
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        named = {name: _plain(x) for name, x in values.items()}
        line = json.dumps({"step": step, "time": now} | named) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
            return
        self._lines.append(line)
        if self._clock() - self._uploaded >= UPLOAD_SECONDS:
            self._upload()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        else:
            self._upload()

    def _upload(self) -> None:
        self._path.write_text("".join(self._lines))
        self._uploaded = self._clock()


class TensorBoardWriter:
    """Scalars for TensorBoard, through tensorboardX.

    In a bucket the event file is written anew, at most every ``UPLOAD_SECONDS`` and once more by
    ``close``, from a copy on the local disk.

    Args:
      directory: where its event files go, on a disk or in a bucket.
      resume_step: hide what an earlier run wrote after this step; None hides all of it.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        import tensorboardX  # It imports PyTorch where there is one: seconds.

        # TensorBoard drops what earlier files hold from the purge step on.
        purge = 0 if resume_step is None else resume_step + 1
        self._bucket = epath.Path(directory) if _is_remote(directory) else None
        self._local = tempfile.TemporaryDirectory() if self._bucket is not None else None
        self._clock, self._uploaded = clock, clock()
        self._writer = tensorboardX.SummaryWriter(
            str(directory) if self._local is None else self._local.name,
            purge_step=purge,
            flush_secs=30,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if self._bucket is not None and self._clock() - self._uploaded >= UPLOAD_SECONDS:
            self._writer.flush()
            self._upload()

    def close(self) -> None:
        """Writes what is pending."""
        self._writer.close()
        if self._bucket is not None:
            self._upload()
            self._local.cleanup()

    def _upload(self) -> None:
        self._bucket.mkdir(parents=True, exist_ok=True)
        for file in epath.Path(self._local.name).iterdir():
            (self._bucket / file.name).write_bytes(file.read_bytes())
        self._uploaded = self._clock()


class Fanout:
    """Writes to several writers; to none, it does nothing."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to each."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Closes each, even where closing another fails."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


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
    for line in path.read_text().splitlines():
        try:
            keep = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            keep = False  # A line that was cut off when the run was killed.
        if keep:
            kept.append(line + "\n")
    return kept


def _is_remote(path: epath.PathLike) -> bool:
    return "://" in str(path)


def _replace(path: epath.Path, lines: list[str]) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines))
    partial.replace(path)
