"""A bounded queue before what may be slow, unreachable or killed."""

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.host import storage
from jaxtrain.run.hook import Value
from jaxtrain.run.observe.writers import Shown, Writer

logger = logging.getLogger(__name__)

# Lines that wait in memory for a tracker, before later ones are dropped.
WAITING_LINES = 1_000
# Seconds before each try of a line, and how long the end of a run waits for what is still waiting;
# a host that is taken away may leave no more than half a minute.
PAUSES, CLOSE_SECONDS = (0.0, 1.0, 5.0), 10.0
# A first connection may make a database.
CONNECT_SECONDS = 60.0
# After so long without a line's end it is said, once: a client may look for its server for minutes
# before it says that there is none.
SILENT_SECONDS = 60.0


class Queued:
    """A writer that hands lines to another one in a thread, which may take as long as it likes.

    Opening, writing and closing all happen in the thread. What fails is tried again a few times; a
    line that fails then, that finds the queue full or that still waits at the end is dropped and
    counted; ``why`` says the last reason. Nothing that the other writer does ends the run.

    Args:
      open: makes the writer; called in the thread, and again with each line where it fails. A
        writer that has an attribute ``error`` is told there what has ended the run, and one that
        has a method ``show`` gets pictures.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], Writer],
        *,
        lines: int = WAITING_LINES,
        pauses: Sequence[float] = PAUSES,
    ):
        self.name, self.written, self.why = name, 0, ""
        self._given = 0  # counted here, and what is written in the thread, so that neither waits
        self._open, self._pauses = open, pauses
        self._error: BaseException | None = None
        self._writer: Writer | None = None
        self._closing = self._left = self._silent = False
        self._ended_at = time.monotonic()
        self._lines, self._waiting = lines, queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"jaxtrain-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Hands a line on; returns at once."""
        self._hand_on("write", step, values)

    def show(self, step: int, values: Mapping[str, Shown]) -> None:
        """Hands pictures on, and no texts; returns at once. The pictures of a call are a line."""
        if pictures := {name: x for name, x in values.items() if isinstance(x, np.ndarray)}:
            self._hand_on("show", step, pictures)

    def _hand_on(self, method: str, step: int, values: Mapping[str, Any]) -> None:
        self._given += 1
        waiting = self._waiting.qsize()
        if not waiting:
            self._ended_at = time.monotonic()
        elif not self._silent and (seconds := time.monotonic() - self._ended_at) > SILENT_SECONDS:
            self._silent = True
            logger.warning(
                "tracker %s has ended no line for %.0f s, and %d wait; the run goes on",
                *(self.name, seconds, waiting),
            )
        if waiting >= self._lines:
            self._lose(f"{self._lines:,} lines were waiting")
        else:
            self._waiting.put((method, step, values))

    def finish(self, error: BaseException | None = None) -> None:
        """Has the thread write what waits, close the writer and end; returns at once. ``error`` is
        what has ended the run, if it is not complete."""
        if not self._closing:
            self._closing, self._error = True, error
            self._waiting.put(None)

    def close(self, *, until: float | None = None) -> dict[str, Any]:
        """Finishes, waits for that until a time of ``time.monotonic()`` (None: ``CLOSE_SECONDS``
        from now), and returns ``tracker``, ``written``, ``dropped`` and, where lines were, ``why``.
        """
        self.finish()
        until = time.monotonic() + CLOSE_SECONDS if until is None else until
        if self._writer is None and self._error is None:  # nobody takes the host away
            until = max(until, time.monotonic() + CONNECT_SECONDS)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._left = True  # What it writes from here on counts as dropped.
            self.why = f"{self.why + '; ' if self.why else ''}it did not end in time"
        written = self.written
        facts = {"tracker": self.name, "written": written, "dropped": self._given - written}
        if facts["dropped"]:
            logger.warning(
                "tracker %s: %d of %d lines dropped: %s",
                *(self.name, facts["dropped"], self._given, self.why),
            )
            facts["why"] = self.why
        return facts

    def _work(self) -> None:
        with contextlib.suppress(Exception, SystemExit):  # said where a line comes to nothing
            self._opened()
        while True:
            line = self._waiting.get()
            if line is None:
                break
            if failed := self._tried(lambda line=line: self._pass_on(*line)):
                self._lose(failed)
            elif not self._left:
                self.written += 1
            self._ended_at = time.monotonic()
        if self._writer is not None:
            if hasattr(self._writer, "error"):
                self._writer.error = self._error
            if failed := self._tried(self._writer.close):
                logger.warning("tracker %s cannot be closed: %s", self.name, failed)

    def _pass_on(self, method: str, *line: Any) -> None:
        if act := getattr(self._opened(), method, None):  # not every writer shows pictures
            act(*line)

    def _opened(self) -> Writer:
        if self._writer is None:
            self._writer = self._open()
        return self._writer

    def _tried(self, act: Callable[[], None]) -> str | None:
        """Does something, several times where it fails; returns why it failed."""
        for pause in self._pauses:
            if pause and not self._left:
                time.sleep(pause)
            if (why := failure(act)) is None:
                return None
        return why

    def _lose(self, why: str) -> None:
        if not self.why:
            logger.warning("tracker %s drops lines (%s); the run goes on", self.name, why)
        self.why = why


def failure(act: Callable[[], Any]) -> str | None:
    """Calls a client and returns why it failed, without the password of an address, or None."""
    try:
        act()
    # Clients of services raise all kinds, and some try to end the process.
    except (Exception, SystemExit) as error:
        why = re.sub(r"//[^/\s]*@", "//", storage.why(error))
        return f"{type(error).__name__}: {why}"
    return None
