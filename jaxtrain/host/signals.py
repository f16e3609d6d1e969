"""SIGTERM and SIGINT as a request: the first asks for an orderly end, the second ends at once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

# A launcher that forwards Ctrl-C, and the terminal itself, both send it: one key, two signals.
SAME_REQUEST_SECONDS = 1.0


class SignalWatch:
    """Listens for signals while it is open; what handled them before does so again afterwards.

    Python runs signal handlers on the main thread between two bytecodes, which is never while that
    thread waits for a device that does not answer. So a thread of its own reads them here, from the
    file descriptor that the interpreter writes a signal's number to at once.

    Opened on another thread than the main one it does nothing, as only that may set handlers.

    Args:
      on_first: called with the number of the first signal, on the listening thread.
    """

    def __init__(
        self,
        on_first: Callable[[int], None],
        *,
        exit: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
        signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT),
    ):
        self._on_first, self._exit, self._clock, self._signals = on_first, exit, clock, signals
        self._first_at: float | None = None
        self._open = False

    def __enter__(self) -> "SignalWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # set_wakeup_fd insists
        self._thread = threading.Thread(target=self._listen, name="jaxtrain-signals", daemon=True)
        self._before_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread.start()
        # The number is written to the descriptor only for signals that Python handles.
        self._before = {s: signal.signal(s, lambda *_: None) for s in self._signals}
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        if not self._open:
            return
        self._open = False
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._write_fd)  # which ends the thread
        self._thread.join()
        os.close(self._read_fd)

    def _listen(self) -> None:
        while numbers := os.read(self._read_fd, 64):
            for number in numbers:
                if number in self._signals:
                    self._heard(number)
                elif self._before_fd >= 0:  # of whoever watches for others
                    with contextlib.suppress(OSError):
                        os.write(self._before_fd, bytes([number]))

    def _heard(self, number: int) -> None:
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
            self._on_first(number)
        elif now - self._first_at >= SAME_REQUEST_SECONDS:
            say(f"{signal.Signals(number).name} again: stopping at once; checkpoints are whole")
            self._exit(128 + number)


def say(line: str) -> None:
    """Writes a line to standard error past every buffer and lock, from any thread."""
    data = (line + "\n").encode()
    with contextlib.suppress(OSError):  # nobody reads it, and what follows must happen
        while data:
            data = data[os.write(2, data) :]
