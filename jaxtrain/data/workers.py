"""Rows that other processes read, for sources whose decoding takes longer than a step."""

import functools
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from jaxtrain.data.loader import RowSource
from jaxtrain.host.storage import StorageError

_source: RowSource  # of a worker


class WorkerRows:
    """A source whose rows several processes read at once: a RowSource for `Batches`.

    The batches are those of the source itself, bit for bit. The processes start with the first
    batch, end with this one, and each has a copy of the source, which must be picklable. Rows of
    tokens need none: the loader's own thread makes them far faster than steps take them.

    Raises:
      ValueError: `workers` is below 1.
      StorageError: on reading, a worker was killed. A run ends by it as by a failing disk, and
        launchers start it again.
      RuntimeError: on reading, a worker ended by itself, as where the source cannot be unpickled;
        or the source raised what cannot be pickled, of which this has the traceback.
    """

    def __init__(self, source: RowSource, workers: int):
        if workers < 1:
            raise ValueError(f"`workers` is {workers}; give at least 1")
        self.source, self.workers = source, workers
        if order := getattr(source, "row_order", None):
            self.row_order = order

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[index]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the rows of some indices, each worker's share read at once."""
        size = -(-len(indices) // self.workers) or 1
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        try:
            return [row for rows in self._pool.map(_read, parts) for row in rows]
        except BrokenProcessPool:
            workers = dict(getattr(self._pool, "_processes", None) or {}).values()
            self._pool.shutdown()  # which waits until all have ended
            if any((worker.exitcode or 0) > 0 for worker in workers):
                raise RuntimeError(
                    "a process that reads rows has ended by itself: above is what it said"
                ) from None
            raise StorageError(
                "a process that reads rows was killed, as where memory runs out: start the run "
                "again, with fewer workers if it happens again"
            ) from None

    @functools.cached_property
    def _pool(self) -> ProcessPoolExecutor:
        # Not by fork: this process has threads, of JAX and of others.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.workers, context, _begin, (self.source,))


def start_worker() -> None:
    """Prepares a worker: it encodes on one thread, and ends where its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _begin(source: RowSource) -> None:
    global _source
    start_worker()
    # A signal to the run's whole group, from a launcher, `timeout` or a terminal, is the run's to
    # hear: it saves, for which it reads on.
    os.setsid()
    _source = source


def _read(indices: Sequence[int]) -> list[dict[str, Any]]:
    try:
        return [_source[index] for index in indices]
    except Exception as error:
        # What cannot be unpickled would break the pool, as if this process had been killed.
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            text = "".join(traceback.format_exception(error))
            raise RuntimeError(f"{type(error).__name__} on reading rows:\n{text}") from None
        raise
