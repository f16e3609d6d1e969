"""Which process is slow: its steps, and how long it waits for its data."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxtrain.run.survive.peer_group import PeerGroup


class Stragglers:
    """Compares the processes of a run, without a collective.

    Processes that compute one step together take equally long over it, whoever holds them up; a
    process that waits long for its own data is the one that does.
    """

    def __init__(self, peers: PeerGroup, *, clock: Callable[[], float] = time.perf_counter):
        self._peers, self._clock = peers, clock
        self._waited, self._batches = 0.0, 0

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Passes batches on, and measures how long each was waited for."""
        start = self._clock()
        for batch in batches:
            self._waited += self._clock() - start
            self._batches += 1
            yield batch
            start = self._clock()

    def report(self, step_seconds: float) -> dict[str, float]:
        """Tells the others how fast this process is of late, and returns what is known of all.

        That is ``time/data_seconds``: waited for a batch, the mean since the last report. In
        process 0 of several also the largest minus the smallest of both over the processes, in the
        newest reports that have arrived, ``time/step_seconds_spread`` and
        ``time/data_seconds_spread``, and ``time/slowest_process``, the one that waits longest for
        data.
        """
        data_seconds = self._waited / max(self._batches, 1)
        self._waited, self._batches = 0.0, 0
        values = {"time/data_seconds": data_seconds}
        if self._peers.processes == 1:
            return values
        self._peers.share(step=step_seconds, data=data_seconds)
        shared = dict(self._peers.shared)
        if len(shared) < self._peers.processes:
            return values
        for name in ("step", "data"):
            each = [of[name] for of in shared.values()]
            values[f"time/{name}_seconds_spread"] = max(each) - min(each)
        slowest = max(shared, key=lambda process: (shared[process]["data"], -process))
        return values | {"time/slowest_process": slowest}
