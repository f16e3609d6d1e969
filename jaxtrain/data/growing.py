"""Rows of a token store that grows while a run trains on it, by a log of watermarks.

A watermark says how much of the store is visible from a step on. The first process decides it, and
writes it into the run's folder before it makes the batch; the others, and a resumed run, read it
there. So a batch is a function of the seed, the step and the log.
"""

import bisect
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxtrain.data.loader import RowSource, part_of, shuffled
from jaxtrain.data.packing import Corpus
from jaxtrain.data.store import count_parts, open_store
from jaxtrain.host import distributed, storage
from jaxtrain.host.paths import as_path, read_if_there, write_whole

# Seconds in which the other processes must see a watermark that the first one writes.
WAIT_SECONDS, POLL_SECONDS = 600.0, 0.2
# The index of a row is its number, and so many more for every part that has become visible.
_ROWS = 1 << 40


@dataclasses.dataclass(frozen=True)
class Mark:
    """A watermark: the ``parts`` appended to a store that are visible from ``step`` on, the
    ``tokens`` to train on that they make with the store's own, and a hash of their ``text``."""

    step: int
    parts: int
    tokens: int
    text: str


class Watermarks:
    """The log of a run's watermarks, one for each of the steps 0, E, 2 E and so on.

    Args:
      store: the folder of the store.
      every: E, the steps between watermarks.
      log: the lines of the log of a run to resume.
      begun: the parts that a run begins with where there is no log; None for all that the first
        process sees.

    Raises:
      ValueError: a line of the log is damaged, or the store has lost a part.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        every: int,
        log: Iterable[dict[str, Any]] = (),
        begun: int | None = None,
    ):
        self.store, self._every = store, every
        self._path, self._taken = None, lambda: None
        if not (known := [_mark(line) for line in log]):
            count = functools.partial(count_parts, store)
            parts = distributed.from_first_process(count) if begun is None else begun
            known = [self._seen(0, parts)]
        self._log = known

    @property
    def first(self) -> Mark:
        """The watermark that the run begins with."""
        return self._log[0]

    def keep(self, path: os.PathLike[str], taken: Callable[[], Any] = lambda: None) -> None:
        """Takes over the log in a file where there is one, and keeps it there from now on;
        ``taken`` returns something true where another start writes it."""
        self._path, self._taken = as_path(path), taken
        self._read()
        self._write()

    def at(self, step: int) -> Mark:
        """Returns the first watermark that shows what a step sees, which is decided if need be."""
        if (due := step - step % self._every) > self._log[-1].step:
            self._decide(due)
        at = bisect.bisect_right(self._log, step, key=lambda mark: mark.step) - 1
        return next(mark for mark in self._log if mark.parts == self._log[at].parts)

    def before(self, step: int) -> list[dict[str, Any]]:
        """Returns the lines of the log for the batches before a step."""
        return [dataclasses.asdict(mark) for mark in self._log if mark.step < step]

    def corpus(self, parts: int) -> Corpus:
        """Returns the tokens to train on with so many parts; raises ValueError where they are of
        other text than the log has."""
        store = open_store(self.store, parts=parts)
        if store.text not in [mark.text for mark in self._log if mark.parts == parts]:
            raise ValueError(
                f"the token store '{self.store}' has other text in its first {parts} parts than "
                "the run has read there: copy the store back as it was"
            )
        return store.corpus()

    def _decide(self, due: int) -> None:
        """Adds the watermark of a step in the first process, and awaits it in the others."""
        end, first = time.monotonic() + WAIT_SECONDS, jax.process_index() == 0
        while self._read() < due and not first:
            if time.monotonic() > end:
                raise storage.StorageError(
                    f"process {jax.process_index()} has not seen the watermark of step {due} in "
                    f"'{self._path}' for {WAIT_SECONDS:.0f} s: all processes must share the folder"
                )
            time.sleep(POLL_SECONDS)
        if self._log[-1].step < due:  # no earlier attempt has decided it
            parts = max(count_parts(self.store), self._log[-1].parts)
            self._log = [*self._log, self._seen(due, parts)]
            self._write()

    def _seen(self, step: int, parts: int) -> Mark:
        store = open_store(self.store, parts=parts)
        return Mark(step, parts, store.manifest["sets"]["train"]["tokens"], store.text)

    def _read(self) -> int:
        """Takes the lines of the file over; returns the step of the last one that is known."""
        if self._path is not None:
            text = storage.retrying(lambda: read_if_there(self._path), f"the log {self._path}")
            self._log = [_mark(json.loads(line)) for line in text.splitlines()] or self._log
        return self._log[-1].step

    def _write(self) -> None:
        if self._path is None or jax.process_index() or self._taken():
            return
        text = "".join(json.dumps(dataclasses.asdict(mark)) + "\n" for mark in self._log)
        storage.retrying(lambda: write_whole(self._path, text), f"the log {self._path}")


class GrowingRows:
    """Rows of all that is visible at a step: a RowSource with its own order, as `Mixture`.

    From a watermark on that shows more than the one before, rows are those of a new shuffled pass
    over all that is visible, and of one more behind it, until the next such watermark. So a batch
    has old and new tokens in proportion to their numbers. Without such a watermark rows and order
    are those of the store itself.

    Args:
      make: cuts a corpus into rows, as :func:`jaxtrain.data.pack` does.
    """

    def __init__(self, marks: Watermarks, make: Callable[[Corpus], RowSource]):
        self.marks = marks
        self._rows = functools.lru_cache(maxsize=4)(lambda parts: make(marks.corpus(parts)))

    def __len__(self) -> int:
        return len(self._rows(self.marks.first.parts))

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows, index = self._found(index)
        return rows[index]

    def part(self, index: int, start: int, stop: int) -> dict[str, Any]:
        """Returns the places from ``start`` to ``stop`` of a row."""
        return part_of(*self._found(index), start, stop)

    def _found(self, index: int) -> tuple[RowSource, int]:
        more, index = divmod(index, _ROWS)
        return self._rows(self.marks.first.parts + more), index

    def row_order(self, *, seed: int, global_batch: int) -> Callable[[int], int]:
        """Returns what finds the row at a position of the run, ``step * global_batch + r``."""

        def place(position: int) -> int:
            mark = self.marks.at(position // global_batch)
            keys = (seed, mark.step) if mark != self.marks.first else seed
            own = int(np.random.SeedSequence(keys).generate_state(1)[0])
            rows, since = self._rows(mark.parts), position - mark.step * global_batch
            more = mark.parts - self.marks.first.parts
            return more * _ROWS + shuffled(since, len(rows), own)

        return place


def _mark(line: dict[str, Any]) -> Mark:
    try:
        return Mark(**line)
    except TypeError as error:
        raise ValueError(f"the log of watermarks has the line {line!r} ({error})") from None
