"""A connection from every process of a run to the first, on which they notice and agree.

JAX notices a lost process by a heartbeat of 100 seconds, and then aborts with a C++ stack trace; a
collective that waits for it may hang until then. A TCP connection closes the moment a process dies,
whoever killed it, and costs nothing between steps. Over it the processes

* learn that one is gone, and which: each then says so and exits with ``PEER_LOST``, or, where an
  error has ended it that would come again, with status 1;
* agree on the step to stop at, once one of them has been asked to (:meth:`PeerGroup.stops`):
  by a signal, which interrupts the run, or for a reason, which ends it on purpose;
* tell the first how fast they are (:meth:`PeerGroup.share`).

Messages are lines of JSON. The first process listens on a port that the system chooses; whoever
connects must know a random token, which only the processes of the run are told. The port is open
while they connect, on the interface where they have met, and to strangers it is silent.
"""

import contextlib
import hmac
import itertools
import json
import os
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.host.distributed import addresses, broadcast_text, coordinator_host
from jaxtrain.host.exit_codes import PEER_LOST, Ended
from jaxtrain.host.signals import say

# A host that lost its power or its network closes no connection: silence tells. Together with the
# time that a launcher gives to a process that is only stopped it stays below a minute.
SILENCE_SECONDS = 40.0
BEAT_SECONDS = 5.0
# All processes have just taken part in a collective, so they are up.
JOIN_SECONDS = 30.0
# When a process ends with an error of its own, the others may be about to raise the same one: they
# get this long to do so, before they are ended with a sentence about it.
ERROR_SECONDS = 10.0
# A message is a line; one of an error carries its words.
MESSAGE_BYTES = 1 << 20
# A greeting is short, and comes at once.
GREETING_BYTES = 1000
GREETING_SECONDS = 5.0
MOST_STRANGERS = 100
# What to do where hosts do not reach each other.
ADVICE = "let the hosts reach each other by TCP, or turn this off with `watch_peers=False`"


class PeerGroup:
    """One process's end of the connections; use :func:`open_peer_group`.

    Args:
      peers: connections by process: all others in process 0, process 0 in the others.
      exit: ends the process at once, given an exit code.

    Attributes:
      stop_wanted: whether some process has been asked to stop.
      shared: what the processes have shared last, by number; in process 0.
      hosts: the names of the hosts of the others that it is connected to, by process.
    """

    def __init__(
        self,
        process: int,
        processes: int,
        peers: dict[int, socket.socket],
        hosts: dict[int, str],
        *,
        exit: Callable[[int], None] = os._exit,
    ):
        self.process, self.processes = process, processes
        self.shared: dict[int, dict[str, Any]] = {}
        self._peers, self.hosts, self._exit = peers, hosts, exit
        self._changed = threading.Condition(threading.RLock())
        self.stop_wanted = False
        self._reason: str | None = None
        # The last step that this process has gone on from, and in an agreement that of each.
        self._passed = -1.0
        self._at: dict[int, float] = {}
        self._stop_at: float | None = None
        self._ended: tuple[float, str] | None = None
        self._leave_at: tuple[float, str, int] | None = None
        self._closing = self._left = False
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._pending = dict.fromkeys(peers, b"")
        self._thread: threading.Thread | None = None
        if peers:
            for peer in peers.values():
                peer.settimeout(BEAT_SECONDS)
            self._thread = threading.Thread(
                target=self._watch, name="jaxtrain-peer_group", daemon=True
            )
            self._thread.start()

    @property
    def reason(self) -> str | None:
        """Why all processes have agreed to end the run on purpose; None where they have not."""
        return None if self._ended is None else self._ended[1]

    def want_stop(self, reason: str | None = None) -> None:
        """Asks all processes, from any thread, to stop at a step that they will agree on: for a
        reason, which ends the run on purpose, or for none, which interrupts it before that."""
        self._handle(self.process, {"stop": reason})

    def stops(self, step: float) -> bool:
        """Whether all processes stop after ``step``.

        Called by each after every step that it has dispatched. Once a stop is wanted, all stop at
        the first step that none of them has gone on from.
        """
        self._agree(step)
        agreed = [self._stop_at, self._ended and self._ended[0]]
        return any(at is not None and step > at for at in agreed)

    def interrupts(self, step: float) -> bool:
        """Whether what would follow ``step`` is to be left out: where an interruption was agreed
        on, but not for an end on purpose, which the last evaluation belongs to."""
        self._agree(step)
        return self._stop_at is not None and step > self._stop_at

    def _agree(self, step: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stop_at is not None or not self.stop_wanted)
            self._passed = step

    def share(self, **values: Any) -> None:
        """Tells process 0 values by name (JSON); it finds the newest in ``shared``, by process."""
        self._handle(self.process, {"share": values})

    def explain(self) -> None:
        """Called when a collective has failed: gives the news of a lost process time to arrive.

        It does not return where there is such news.
        """
        if self._peers:
            time.sleep(ERROR_SECONDS / 2)

    def close(self, error: BaseException | None = None) -> None:
        """Takes leave of the others, with the error that ends this process, if any."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        reason = None if error is None else f"{type(error).__name__}: {error}"
        self._send_all({"bye": reason, "code": _code_for_others(error)})
        if self._thread is not None:
            self._thread.join()
        for peer in self._peers.values():
            peer.close()

    # The same message means the same thing wherever it arises; process 0 passes on what concerns
    # all, and the others pass on to process 0 what arose in them.

    def _handle(self, sender: int, message: dict[str, Any]) -> None:
        with self._changed:
            first = self.process == 0
            if "stop" in message:
                self._want(message["stop"])
            elif "at" in message:
                if first:
                    self._at[sender] = message["at"]
                elif sender == self.process:
                    self._send_all(message)
            elif "stop_at" in message:
                self._decide(message["stop_at"], message["reason"])
            elif "share" in message:
                if first:
                    # A new one each time: others may be reading the one before.
                    self.shared[sender] = self.shared.get(sender, {}) | message["share"]
                else:
                    self._send_all(message)
            elif "lost" in message:
                self._leave_in(message["seconds"], message["lost"], message["code"])
            elif "bye" in message:
                self._bye(sender, message["bye"], message["code"])
            all_there = len(self._at) == self.processes
            if first and self.stop_wanted and self._stop_at is None and all_there:
                decided = {"stop_at": max(self._at.values()), "reason": self._reason}
                self._send_all(decided)
                self._decide(**decided)
            self._changed.notify_all()

    def _want(self, reason: str | None) -> None:
        """Begins an agreement; an interruption takes precedence over an end on purpose."""
        again = self.stop_wanted and (self._reason is None or reason is not None)
        if again or (reason is not None and self._ended is not None):
            return
        answered, self.stop_wanted, self._reason = self.stop_wanted, True, reason
        self._send_all({"stop": reason})
        # Answered here and not by the loop, which may be in a collective with a process that waits
        # for the answer. It stays true: the loop goes on from no other step before the decision.
        if not answered:
            self._handle(self.process, {"at": self._passed})

    def _decide(self, stop_at: float, reason: str | None) -> None:
        if reason is None:
            self._stop_at = stop_at
            return
        # The run goes on to its last evaluation, which may be interrupted: that is agreed on anew.
        self._ended = (stop_at, reason)
        self.stop_wanted = False
        self._at.clear()

    def _bye(self, sender: int, reason: str | None, code: int) -> None:
        self._peers.pop(sender).close()
        if reason is not None:
            self._leave_in(ERROR_SECONDS, f"{self._name(sender)} has ended with {reason}", code)

    def _lose(self, process: int, how: str) -> None:
        self._leave_in(0, f"{self._name(process)} has died: {how}", PEER_LOST)

    def _leave_in(self, seconds: float, sentence: str, code: int) -> None:
        """Has all processes end after some seconds, if nothing ends them before."""
        with self._changed:
            if self._closing or self._leave_at is not None:
                return
            self._leave_at = (time.monotonic() + seconds, sentence, code)
            self._send_all({"lost": sentence, "seconds": seconds, "code": code})
            if seconds == 0:
                self._leave()

    def _leave(self) -> None:
        _, sentence, code = self._leave_at
        more = "; --resume goes on from the last checkpoint" if code == PEER_LOST else ""
        say(
            f"{sentence}; process {self.process} cannot go on without it and exits with "
            f"code {code}{more}"
        )
        self._left = True
        self._exit(code)

    def _name(self, process: int) -> str:
        return f"process {process} of {self.processes} (host {self.hosts.get(process, '?')})"

    def _send_all(self, message: dict[str, Any]) -> None:
        data = (json.dumps(message) + "\n").encode()
        with self._changed:
            for peer in list(self._peers.values()):
                # Whether a peer is gone is for the reading side to find out.
                with contextlib.suppress(OSError):
                    peer.sendall(data)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, process)
            beat_at = time.monotonic()
            # Where the last peer has gone with an error, there is still its time to wait for.
            while (self._peers or self._leave_at) and not (self._closing or self._left):
                for key, _ in selector.select(timeout=0.2):
                    self._read(key.data, key.fileobj, selector)
                now = time.monotonic()
                if now >= beat_at:
                    beat_at = now + BEAT_SECONDS
                    self._send_all({"beat": True})
                for process in self._peers:
                    if now - self._heard[process] > SILENCE_SECONDS:
                        self._lose(process, f"nothing was heard of it for {SILENCE_SECONDS:.0f} s")
                if self._leave_at is not None and now >= self._leave_at[0]:
                    self._leave()

    def _read(self, process: int, peer: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            data = peer.recv(65536)
        except OSError:
            data = b""
        self._heard[process] = time.monotonic()
        *lines, self._pending[process] = (self._pending[process] + data).split(b"\n")
        broken = "its connection closed" if not data else ""
        try:
            if len(self._pending[process]) > MESSAGE_BYTES:
                raise ValueError
            for line in lines:
                self._handle(process, _message(line))
        except (ValueError, KeyError, TypeError):
            broken = "what it sends is no message"
        if broken and process in self._peers:
            self._peers.pop(process).close()
            self._lose(process, broken)
        if process not in self._peers:
            selector.unregister(peer)


@contextlib.contextmanager
def open_peer_group(*, connect: bool = True) -> Iterator[PeerGroup]:
    """Connects the processes of the run; with one process there is nothing to connect.

    Without ``connect`` they cannot agree on a step to stop at, and the others hear of no stop. All
    processes call it alike. Leaving it with an error tells the others, who then end too; where the
    error is of a collective, a lost process explains it. Raises OSError where a process cannot
    reach the first.
    """
    group = _connect() if connect else PeerGroup(0, 1, {}, {})
    error: BaseException | None = None
    try:
        yield group
    except BaseException as raised:
        error = None if isinstance(raised, Ended) else raised
        if isinstance(error, jax.errors.JaxRuntimeError):
            group.explain()
        raise
    finally:
        group.close(error)


def _connect() -> PeerGroup:
    process, processes = jax.process_index(), jax.process_count()
    if processes == 1:
        return PeerGroup(0, 1, {}, {})
    if process == 0:
        peers, hosts, failure = _accept(processes)
    else:
        peers, hosts, failure = _call(process, json.loads(broadcast_text("")))
    failures = multihost_utils.process_allgather(np.bool_(failure is not None))
    if failures.any():
        for peer in peers.values():
            peer.close()
        missing = ", ".join(str(i) for i in np.flatnonzero(failures))
        raise OSError(
            failure
            or f"process {missing} could not connect to process 0 to keep watch over each other: "
            + ADVICE
        )
    return PeerGroup(process, processes, peers, hosts)


def _accept(processes: int) -> tuple[dict[int, socket.socket], dict[int, str], str | None]:
    """Process 0: says where it listens, and waits for the others."""
    token = secrets.token_hex(16)
    peers: dict[int, socket.socket] = {}
    hosts: dict[int, str] = {}
    server, addresses = _listen(processes)
    with server, selectors.DefaultSelector() as selector:
        call = {"token": token, "port": server.getsockname()[1]}
        call |= {"addresses": addresses, "host": socket.gethostname()}
        broadcast_text(json.dumps(call))
        selector.register(server, selectors.EVENT_READ)
        deadline = time.monotonic() + JOIN_SECONDS
        # Anybody may connect, and say anything or nothing: nobody is waited for.
        while len(peers) < processes - 1 and time.monotonic() < deadline:
            ready = [key for key, _ in selector.select(timeout=0.2)]
            # Last whoever knocks, for one who has spoken may have to leave for that.
            for key in sorted(ready, key=lambda key: key.fileobj is server):
                if key.fileobj is server:
                    with contextlib.suppress(OSError):
                        peer, _ = server.accept()
                        peer.setblocking(False)
                        selector.register(peer, selectors.EVENT_READ, _Greeting())
                    strangers = [key for key in selector.get_map().values() if key.data]
                    if len(strangers) > processes + MOST_STRANGERS:
                        leaving = random.choice(strangers).fileobj  # a flood evicts itself
                        selector.unregister(leaving)
                        leaving.close()
                    continue
                hello = key.data.read(key.fileobj)
                if hello is None:
                    continue
                selector.unregister(key.fileobj)
                process = _process_of(hello, token, processes)
                if process is None or process in peers:
                    key.fileobj.close()
                    continue
                key.fileobj.settimeout(BEAT_SECONDS)
                with contextlib.suppress(OSError):
                    key.fileobj.sendall(b'{"welcome": true}\n')
                    peers[process], hosts[process] = key.fileobj, str(hello.get("host"))
            for key in list(selector.get_map().values()):
                if key.data is not None and key.data.too_late():
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()
    missing = sorted(set(range(1, processes)) - peers.keys())
    failure = None
    if missing:
        failure = (
            f"process {', '.join(map(str, missing))} did not connect to process 0 on "
            f"{' or '.join(call['addresses'])}, port {call['port']}, within {JOIN_SECONDS:.0f} s: "
            + ADVICE
        )
    return peers, hosts, failure


class _Greeting:
    """The part of a greeting that a new connection has sent so far."""

    def __init__(self):
        self._said, self._until = b"", time.monotonic() + GREETING_SECONDS

    def too_late(self) -> bool:
        return time.monotonic() > self._until

    def read(self, peer: socket.socket) -> dict[str, Any] | None:
        """The greeting, once it is whole; an empty one where it will never be."""
        try:
            data = peer.recv(GREETING_BYTES)
            self._said += data
            if not data or len(self._said) > GREETING_BYTES:
                return {}
            return _message(self._said) if self._said.endswith(b"\n") else None
        except (OSError, ValueError):
            return {}


def _process_of(hello: dict[str, Any], token: str, processes: int) -> int | None:
    """Which process greets so; None for a stranger."""
    process = hello.get("process")
    said = str(hello.get("token")).encode(errors="replace")
    known = hmac.compare_digest(said, token.encode())
    if not known or type(process) is not int or not 0 < process < processes:
        return None
    return process


def _listen(processes: int) -> tuple[socket.socket, list[str]]:
    """Opens the port where the others have met process 0, and says under which addresses it is."""
    host = coordinator_host()
    # An OSError where the address is another machine's, which passes connections on.
    with contextlib.suppress(OSError):
        if host is not None:
            server = socket.create_server((host, 0), backlog=max(processes, MOST_STRANGERS))
            address = server.getsockname()[0]
            # Some hosts resolve their own name to a loopback address, where nobody else is.
            if host in ("localhost", "127.0.0.1") or not address.startswith("127."):
                return server, [address]
            server.close()
    return socket.create_server(("", 0), backlog=max(processes, MOST_STRANGERS)), addresses()


def _call(
    process: int, call: dict[str, Any]
) -> tuple[dict[int, socket.socket], dict[int, str], str | None]:
    """Another process: connects to process 0 at the first address where that answers; again and
    again, for a crowd of strangers may be before it."""
    hello = {"token": call["token"], "process": process, "host": socket.gethostname()}
    deadline = time.monotonic() + JOIN_SECONDS
    for address in itertools.cycle(call["addresses"]):
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(OSError, ValueError, KeyError):
            peer = socket.create_connection((address, call["port"]), timeout=5.0)
            try:
                peer.sendall((json.dumps(hello) + "\n").encode())
                with peer.makefile("rb", buffering=0) as file:  # reads no byte behind the line
                    if _message(file.readline(GREETING_BYTES))["welcome"]:
                        return {0: peer}, {0: call["host"]}, None
            except (OSError, ValueError, KeyError):
                peer.close()
        time.sleep(random.uniform(0.05, 0.2))
    failure = (
        f"process {process} cannot connect to process 0 on {' or '.join(call['addresses'])}, "
        f"port {call['port']}: {ADVICE}"
    )
    return {}, {}, failure


def _message(line: bytes) -> dict[str, Any]:
    """A message from its line; raises ValueError where it is none."""
    try:
        message = json.loads(line)
    except RecursionError:
        message = None
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message


def _code_for_others(error: BaseException | None) -> int:
    """The exit code of the others: an error in the program would come again, others may not.

    Those are of storage, and of the runtime, which breaks where a process is lost.
    """
    comes_again = not isinstance(error, (OSError, jax.errors.JaxRuntimeError))
    return 1 if comes_again else PEER_LOST
