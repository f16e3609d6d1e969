"""Handles signals: before training one ends the process, later it asks all processes to stop."""

import contextlib
import os
import signal

from jaxtrain.host.exit_codes import PREEMPTED, Ended
from jaxtrain.host.signals import SignalWatch, say
from jaxtrain.run.survive.peer_group import PeerGroup


class Preempted(Ended):
    """Ends the process with ``PREEMPTED`` where nobody catches it: the state of ``step``, the last
    that was done, is saved in ``run_dir``."""

    def __init__(self, step: int, run_dir: str):
        super().__init__(
            PREEMPTED,
            f"stopped after step {step}, which is saved in {run_dir}: go on with "
            f"--resume --run-dir {run_dir} (exit code {PREEMPTED})",
        )
        self.step, self.run_dir = step, run_dir


def ending_at_sigterm(
    *, handle_signals: bool = True, sigint: bool = False
) -> contextlib.AbstractContextManager:
    """While this lasts, SIGTERM ends the process at once with ``PREEMPTED``.

    For what comes before training, which may take minutes inside a compiler. There is nothing to
    save yet, and a run that is preempted then must be started again like any other.

    Args:
      sigint: SIGINT ends it at once too, with 130: as a KeyboardInterrupt it would wait for the
        compiler. A program's business, for a notebook must outlive it.
    """

    def leave(number: int) -> None:
        name, code = signal.Signals(number).name, 130 if number == signal.SIGINT else PREEMPTED
        say(f"{name} outside of training: nothing is to be saved; exiting with code {code}")
        os._exit(code)

    if not handle_signals:
        return contextlib.nullcontext()
    return SignalWatch(leave, signals=(signal.SIGTERM, signal.SIGINT)[: 1 + sigint])


def stopping_at_signals(
    peers: PeerGroup, *, handle_signals: bool = True
) -> contextlib.AbstractContextManager:
    """While this lasts, SIGTERM and SIGINT ask all processes to stop, at a step they agree on.

    Without ``handle_signals`` they are left alone here; another process may still ask for a stop.
    """

    def ask(number: int) -> None:
        if not peers.stop_wanted:
            say(
                f"{signal.Signals(number).name}: finishing the step in flight and saving it, then "
                f"exiting with code {PREEMPTED}; a second signal stops at once"
            )
        peers.want_stop()

    return SignalWatch(ask) if handle_signals else contextlib.nullcontext()
