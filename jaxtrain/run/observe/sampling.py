"""Readings of devices and host, taken in a thread while the steps go on."""

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from jaxtrain.host.readings import Source, of_all
from jaxtrain.run.survive.peer_group import PeerGroup


class Sampling:
    """Keeps the newest readings of this process, and in the first one those of all.

    A thread calls ``sources`` to make what is read, and reads it every so many seconds; 0 for none.
    """

    def __init__(
        self, sources: Callable[[], Sequence[Source]], *, seconds: float, peers: PeerGroup
    ):
        self._sources, self._seconds, self._peers = sources, seconds, peers
        self._newest: dict[str, float] = {}
        self._closed = threading.Event()

    def __enter__(self) -> "Sampling":
        if self._seconds:
            threading.Thread(target=self._sample, name="jaxtrain-readings", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # A sensor that hangs holds nothing up: the thread is not waited for.
        self._closed.set()

    def report(self) -> dict[str, float]:
        """Tells the first process, and returns what is known there of all; elsewhere of this one.

        Called when :meth:`Stragglers.report` has been, so without a collective.
        """
        newest = self._newest
        found = {0: newest}
        if newest and self._peers.processes > 1:
            self._peers.share(readings=newest)
            if self._peers.process == 0:
                shared = dict(self._peers.shared)
                found = {n: of["readings"] for n, of in shared.items() if "readings" in of}
        return of_all(found, {0: socket.gethostname()} | self._peers.hosts)

    def _sample(self) -> None:
        sources = self._sources()
        while True:
            found: dict[str, float] = {}
            for source in sources:
                with contextlib.suppress(Exception):  # a sensor that fails says nothing this time
                    found |= source()
            self._newest = found
            if self._closed.wait(self._seconds):
                return
