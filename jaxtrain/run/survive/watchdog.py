"""Ends a run in which nothing moves any more, and says where every thread stands."""

import faulthandler
import os
import sys
import threading
import time
import traceback

from etils import epath

from jaxtrain.host.exit_codes import HUNG
from jaxtrain.host.signals import say
from jaxtrain.run.folder import HANG
from jaxtrain.run.hook import Hook
from jaxtrain.state import TrainState


class Watchdog(Hook):
    """Watches, while it is open, that :meth:`beat` is called often enough, as after every step.

    The process ends after so many seconds without a beat; 0 never ends it. The watch is a Python
    thread: code that never lets go of the interpreter's lock stops it too. The stacks go to
    standard error and into ``run_dir``, where there is one.
    """

    def __init__(self, seconds: float, *, run_dir: epath.Path | None = None, process: int = 0):
        self._limit, self._run_dir, self._process = seconds, run_dir, process
        self._beat_at, self._doing = time.monotonic(), "before its first step"
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._limit:
            self._beat_at = time.monotonic()
            self._thread = threading.Thread(
                target=self._watch, name="jaxtrain-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def on_step(self, step: int, state: TrainState) -> None:
        """A call that is dispatched has waited for the one before it."""
        del state
        self.beat(f"after the dispatch of step {step}")

    def beat(self, doing: str) -> None:
        """Notes that something has ended, and where we are (``"after the dispatch of step 7"``)."""
        self._beat_at, self._doing = time.monotonic(), doing

    def idle(self) -> tuple[float, str]:
        """Seconds since the last beat, and what that was of."""
        return time.monotonic() - self._beat_at, self._doing

    def _watch(self) -> None:
        while not self._closed.wait(min(self._limit / 4, 10.0)):
            idle, _ = self.idle()
            if idle > self._limit:
                self._end(idle)
                return

    def _end(self, idle: float) -> None:
        sentence = (
            f"process {self._process} hangs {self._doing}: nothing has ended for {idle:.0f} s, and "
            f"the limit (--hang-minutes) is {self._limit:.0f} s; every thread's stack follows, "
            f"then the exit with code {HUNG}"
        )
        say(sentence)
        # The descriptor itself: sys.stderr may be replaced by something that has none, or be
        # locked by the very thread that hangs.
        faulthandler.dump_traceback(2, all_threads=True)
        # The exit must not wait for a file system that may be what hangs.
        writer = threading.Thread(target=self._write_stacks, args=(sentence,), daemon=True)
        writer.start()
        writer.join(timeout=10.0)
        os._exit(HUNG)

    def _write_stacks(self, sentence: str) -> None:
        if self._run_dir is None:
            return
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [sentence]
        for ident, frame in sys._current_frames().items():
            lines += ["", f"thread {names.get(ident, ident)}, innermost last:"]
            lines += (line.rstrip() for line in traceback.format_stack(frame))
        path = self._run_dir / HANG.format(self._process)
        path.write_text("\n".join(lines) + "\n")
