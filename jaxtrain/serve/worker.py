"""The thread that owns an engine, which requests reach through a queue."""

import collections
import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxtrain.serve.engine import Engine, Event, Request

log = logging.getLogger(__name__)
Sink = Callable[[list[Event] | None], None]
FAILED = "the engine has failed: start the server again"


class Worker(threading.Thread):
    """The thread that owns an engine. A request's events go to its sink; where the engine has
    failed, None does."""

    def __init__(self, engine: Engine):
        super().__init__(name="jaxtrain-engine", daemon=True)
        self.engine = engine
        self.failed: str | None = None
        self.steps = self.written = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._starting: set[Sink] = set()
        self._calls: set[concurrent.futures.Future] = set()
        self._ready: collections.deque[Callable[[], None]] = collections.deque()
        self._lock, self._ended = threading.Lock(), False

    @property
    def is_well(self) -> bool:
        """Whether it works, and has not failed."""
        return self.failed is None and self.is_alive()

    def run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:  # Whatever it is, those who wait are told.
            log.exception("the engine has failed")
            self.failed = f"{type(error).__name__}: {error}"
        with self._lock:
            self._ended = True
            waiting, calls = [*self._starting, *self._sinks.values()], [*self._calls]
        for sink in waiting:
            sink(None)
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(RuntimeError(FAILED))

    def _work(self) -> bool:
        """Takes all that is asked, runs one call, then a step; waits if there is nothing to do."""
        wait = not (self.engine.is_busy or self._ready)
        with contextlib.suppress(queue.Empty):
            while True:
                if (asked := self._inbox.get(block=wait)) is None:
                    return False
                asked()
                wait = False
        if self._ready:  # One: many clients that embed texts would keep the others waiting.
            self._ready.popleft()()
        events: dict[int, list[Event]] = collections.defaultdict(list)
        if self.engine.is_busy:
            self.steps += 1
            for event in self.engine.step():
                events[event.number].append(event)
        for number, those in events.items():
            self.written += len(those)
            if (sink := self._sinks.get(number)) is not None:
                sink(those)
            if those[-1].reason:
                self._sinks.pop(number, None)
        return True

    def close(self) -> None:
        """Ends the thread after what it is doing."""
        self._inbox.put(None)

    def call(self, asked: Callable[[], Any]) -> concurrent.futures.Future:
        """Has the thread call a function between two steps, unless what this returns has been
        cancelled before."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            self._calls.discard(future)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(asked())
                except Exception as error:
                    future.set_exception(error)

        with self._lock:
            if self._ended:
                future.set_exception(RuntimeError(FAILED))
            else:
                self._calls.add(future)
                self._inbox.put(lambda: self._ready.append(run))
        return future

    def submit(self, request: Request, sink: Sink) -> Callable[[], None]:
        """Submits a request; returns what cancels it."""
        numbers: list[int] = []

        def start() -> None:
            numbers.append(self.engine.submit(request))
            self._sinks[numbers[0]] = sink
            self._starting.discard(sink)

        def end() -> None:
            if numbers and self._sinks.pop(numbers[0], None) is not None:
                self.engine.cancel(numbers[0])

        with self._lock:
            if self._ended:
                sink(None)
            else:
                self._starting.add(sink)
                self._inbox.put(start)
        return lambda: self._inbox.put(end)
