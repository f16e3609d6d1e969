"""Writers of metrics: a JSON-lines file and TensorBoard, written by the first process alone."""

import contextlib
import datetime
import json
import logging
import math
import re
import socket
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from etils import epath

from jaxtrain.host import storage
from jaxtrain.host.paths import (
    is_remote,
    json_object,
    listed,
    make_folder,
    read_if_there,
    write_whole,
)
from jaxtrain.host.pictures import save_pixels
from jaxtrain.run.folder import LOG, PICTURES, TENSORBOARD
from jaxtrain.run.hook import Value

logger = logging.getLogger(__name__)

# Seconds between uploads of a log that lives in a bucket.
UPLOAD_SECONDS = 10.0
# How long the end of a run waits for a log that cannot be written; a host that is taken away may
# leave no more than half a minute.
CLOSE_SECONDS = 10.0
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.")


class Histogram(NamedTuple):
    """Counts of values in bins of equal width from ``-largest`` to ``largest``."""

    counts: np.ndarray
    largest: float


# What a writer may show besides numbers: a text, a picture (uint8 [height, width, 3]), a histogram.
Shown = str | np.ndarray | Histogram


@runtime_checkable
class Writer(Protocol):
    """Takes the values of a step: the logs of a run, and what ``jaxtrain.fit(writers=)`` adds.

    One that has ``show(step, values)`` too is given texts, pictures and histograms by it.
    """

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Writes named numbers under a step.

        Args:
          step: from 1; it may come several times, with other names each time.
          values: by name, such as ``train/loss``, ``eval/loss`` and ``time/step_seconds``; a metric
            that has axes is an array.
        """
        ...

    def close(self) -> None:
        """Writes what is pending and lets go."""
        ...


class FileWriter:
    """A writer of one file."""

    _file: "GrowingFile"

    def close(self) -> None:
        """Writes what is pending and lets go."""
        self._file.close()


class JSONLWriter(FileWriter):
    """One JSON object per line: ``{"step": 10, "time": "2026-01-31T12:00:00.000+00:00",
    "train/loss": 2.5}``; times are in UTC.

    Every line is valid JSON: arrays are lists, and numbers that are not finite are written as the
    strings ``"nan"``, ``"inf"`` and ``"-inf"``. When a line is there :class:`GrowingFile` says.
    Raises StorageError where the lines there can neither be read nor replaced.

    Args:
      resume_step: keep the lines up to this step, drop later ones, and append; None starts anew.
      stamp: more entries of every line, such as the attempt that writes it.
    """

    def __init__(
        self,
        path: epath.PathLike,
        *,
        resume_step: int | None = None,
        stamp: Mapping[str, Any] = {},
        clock: Callable[[], float] = time.monotonic,
    ):
        path = epath.Path(path)
        self._stamp = dict(stamp)

        def start() -> bytes:
            lines = [] if resume_step is None else _lines_up_to(path, resume_step)
            make_folder(path.parent)
            write_whole(path, "".join(lines))
            return "".join(lines).encode()

        self._file = GrowingFile(path, storage.retrying(start, f"the log {path}"), clock)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Appends a line. Raises ValueError where a value is named ``step``, or as another of the
        line's own entries."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        named = {name: _plain(np.asarray(x, float).tolist()) for name, x in values.items()}
        own = {"step": step, "time": now} | self._stamp
        if taken := own.keys() & named.keys():
            name = min(taken)
            raise ValueError(f"a value is named {name!r}, like the {name} itself; rename it")
        self._file.append((json.dumps(own | named) + "\n").encode())


class TensorBoardWriter(FileWriter):
    """Scalars for TensorBoard, in an event file of its own; an array is one for each of its entries
    (``train/load/0``).

    When a step is there :class:`GrowingFile` says.

    Args:
      resume_step: hide what an earlier run wrote after this step; None hides all of it.
        TensorBoard's data server, its default, hides the points of a name only when that name is
        written again. Rare names such as ``eval/loss`` show old points until then.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        # The package imports PyTorch where there is one, for seconds and nothing that is used here.
        with _passing_for_absent("torch"):
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        # TensorBoard drops what earlier files hold from the purge step on.
        purge = 0 if resume_step is None else resume_step + 1
        directory = epath.Path(directory)

        def names() -> list[str]:
            make_folder(directory)
            return [path.name for path in listed(directory)]

        # TensorBoard reads files in the order of their names. A new file must come behind the
        # earlier ones, also if the clock has been set back since.
        matches = map(_EVENT_FILE.match, storage.retrying(names, f"the folder {directory}"))
        seconds = max([int(time.time()), *(int(match[1]) + 1 for match in matches if match)])
        name = f"events.out.tfevents.{seconds:010}.{socket.gethostname()}"
        self._file = GrowingFile(directory / name, b"", clock)
        self._append(Event(file_version="brain.Event:2"))
        self._append(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds a point to each curve."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in flat(values)]
        self._append(Event(step=step, summary=Summary(value=points)))

    def show(self, step: int, values: Mapping[str, Shown]) -> None:
        """Adds texts, as they are, pictures and histograms."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        for name, value in values.items():
            if isinstance(value, str):  # Markdown, in which what is indented is code
                drawing = summary.text(name, textwrap.indent(value, "    "))
            elif isinstance(value, Histogram):
                counts, end = value
                edges, bins = np.linspace(-end, end, len(counts) + 1), np.flatnonzero(counts)
                # TensorBoard stretches the outer bins that are not empty to min and max.
                low, high = edges[[bins[0], bins[-1] + 1]] if bins.size else (0.0, 0.0)
                size, ends = counts.sum(), edges[1:]
                drawing = summary.histogram_raw(name, low, high, size, 0, 0, ends, counts)
            else:
                drawing = summary.image(name, value, dataformats="HWC")
            self._append(Event(step=step, summary=drawing))

    def _append(self, event: Any) -> None:
        """Appends a record: the length, its checksum, the event, its checksum."""
        event.wall_time = time.time()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        parts = (length, _checksum(length), data, _checksum(data))
        self._file.append(b"".join(parts))


class GrowingFile:
    """A file that grows from the content that it has already; whatever happens to storage,
    ``append`` neither raises nor loses anything.

    On a disk the bytes are there when ``append`` returns. An object in a bucket cannot be appended
    to: there a thread writes the whole anew, at most every ``UPLOAD_SECONDS`` and for at most a
    twentieth of the time, and ``close`` once more. What cannot be written is kept, said once, and
    written with what comes later.
    """

    def __init__(
        self, path: epath.Path, content: bytes, clock: Callable[[], float] = time.monotonic
    ):
        self._path, self._clock = path, clock
        self._failing = False
        self._file: BinaryIO | None = None
        self._pending = b""
        self._thread: ThreadPoolExecutor | None = None
        self._upload: Future[float] | None = None
        self._next_upload = clock() + UPLOAD_SECONDS
        if is_remote(path):
            self._chunks = [content]
            self._thread = ThreadPoolExecutor(1, "jaxtrain-log")

    def append(self, data: bytes) -> None:
        """Adds bytes to the end."""
        if self._thread is None:
            self._pending += data
            self._try(self._write_pending)
            return
        self._chunks.append(data)
        if self._upload is not None and self._upload.done():
            self._try(self._finish_upload)
        if self._upload is None and self._clock() >= self._next_upload:
            self._upload = self._thread.submit(self._write_whole)

    def close(self) -> None:
        """Writes what is pending, trying for ``CLOSE_SECONDS``, and lets go."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        write = self._write_pending if self._thread is None else self._write_whole
        try:
            storage.retrying(write, f"the log {self._path}", seconds=CLOSE_SECONDS)
            self._worked()
        except Exception as error:
            logger.warning("%s: its last lines are lost", error)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # a bucket's client has errors of its own
            if not self._failing:
                logger.warning(
                    "the log %s cannot be written (%s): the run goes on, and what is logged is "
                    "kept to be written later",
                    self._path,
                    storage.why(error),
                )
            self._failing = True
        else:
            self._worked()

    def _worked(self) -> None:
        if self._failing:
            logger.warning("the log %s is written again, and nothing is missing", self._path)
        self._failing = False

    def _write_pending(self) -> None:
        # Without a buffer of Python's, which would not tell how much of it has been written.
        try:
            while self._pending:
                if self._file is None:
                    self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError:
            file, self._file = self._file, None  # the handle may be stale
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
            raise

    def _write_whole(self) -> float:
        began = self._clock()
        make_folder(self._path.parent)
        self._path.write_bytes(b"".join(self._chunks))
        return self._clock() - began

    def _finish_upload(self) -> None:
        upload, self._upload = self._upload, None
        seconds = 0.0 if upload.exception() else upload.result()
        self._next_upload = self._clock() + max(UPLOAD_SECONDS, 19 * seconds)
        upload.result()  # raises what went wrong


class Fanout:
    """Writes to several writers; to none, it does nothing."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Writes to each."""
        for writer in self._writers:
            writer.write(step, values)

    def show(self, step: int, values: Mapping[str, Shown]) -> None:
        """Has those show it that can."""
        for writer in self._writers:
            if hasattr(writer, "show"):
                writer.show(step, values)

    def close(self) -> None:
        """Closes each, even where closing another fails."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def make_writers(
    run_dir: epath.PathLike, *, resume_step: int | None = None, stamp: Mapping[str, Any] = {}
) -> Fanout:
    """Opens ``log.jsonl`` and ``tensorboard/`` in a run's folder; in the first process only.

    What was logged after ``resume_step``, which a resumed run goes on from, is dropped; every line
    of ``log.jsonl`` has the entries of ``stamp`` too.
    """
    if jax.process_index() != 0:
        return Fanout(())
    run_dir = epath.Path(run_dir)
    log = JSONLWriter(run_dir / LOG, resume_step=resume_step, stamp=stamp)
    board = TensorBoardWriter(run_dir / TENSORBOARD, resume_step=resume_step)
    return Fanout((log, board, PictureWriter(run_dir / PICTURES)))


class PictureWriter:
    """Keeps the newest picture of each name as a PNG file, for the report."""

    def __init__(self, folder: epath.Path):
        self._folder = folder

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Passes numbers over."""

    def show(self, step: int, values: Mapping[str, Shown]) -> None:
        """Writes pictures, named as files may be."""
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                path = self._folder / (re.sub(r"[^\w-]+", "-", name, flags=re.ASCII) + ".png")
                try:
                    make_folder(self._folder)
                    save_pixels(value, path)
                except Exception as error:  # A bucket's client has errors of its own.
                    why = storage.why(error)
                    logger.warning("%s cannot be written (%s): the run goes on", path, why)

    def close(self) -> None:
        """Has nothing open."""


def flat(values: Mapping[str, Value]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a line, each entry of an array under a name of its own.

    >>> list(flat({"loss": 2.5, "load": np.array([0.25, 0.75])}))
    [('loss', 2.5), ('load/0', 0.25), ('load/1', 0.75)]
    """
    for name, value in values.items():
        if not np.ndim(value):
            yield name, float(value)
            continue
        for index, x in np.ndenumerate(value):
            yield "/".join([name, *map(str, index)]), float(x)


def _plain(value: float | list) -> float | str | list:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if math.isfinite(value) else str(value)


def _lines_up_to(path: epath.Path, step: int) -> list[str]:
    lines = read_if_there(path).decode().splitlines()
    # A line without a step was cut off when the run was killed.
    return [line + "\n" for line in lines if json_object(line).get("step", math.inf) <= step]


@contextlib.contextmanager
def _passing_for_absent(module: str) -> Iterator[None]:
    """Hides a module from what is imported meanwhile, unless it is imported already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None
    try:
        yield
    finally:
        del sys.modules[module]


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C that TensorFlow's record files hold."""
    from tensorboardX.crc32c import crc32c

    x = crc32c(data)
    return struct.pack("<I", ((x >> 15 | x << 17) + 0xA282EAD8) & 0xFFFFFFFF)
