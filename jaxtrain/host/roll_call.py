"""A roll call of processes over TCP, before JAX connects them: who came, who differs, whose clock.

JAX ends every process with a C++ stack trace where one of them does not come, and names none. Here
process 0 listens at the address at which they would meet, and the others say hello. Messages are
lines of JSON; a connection that says no hello is dropped.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

PACKAGES = ("jaxtrain", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
PACKAGES += ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
# A process that compiles another program waits for a collective that no other comes to.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Leases of elastic runs, and the order of log lines, compare clocks of hosts.
CLOCK_SECONDS = 1.0
PINGS = 8
_GREETING_SECONDS = _PROBE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class RollCall:
    """What all processes know after a roll call; the lists are by process.

    Args:
      hosts: names of the hosts, empty for a process that did not come.
      offsets: seconds that each clock is ahead of that of process 0.
      errors: bounds of the errors of ``offsets``: half of the round trips that told them.
      fatal: one sentence for each thing with which a collective could hang.
      wrong: one sentence for each other thing that is wrong.
    """

    hosts: Sequence[str]
    offsets: Sequence[float]
    errors: Sequence[float]
    fatal: Sequence[str]
    wrong: Sequence[str]


def facts() -> dict[str, str]:
    """Returns what all processes must agree on: versions, the code's digest, XLA's flags."""
    folder, code = pathlib.Path(__file__).parents[1], hashlib.sha256()
    files = [pathlib.Path(at, name) for at, _, names in os.walk(folder) for name in names]
    for path in sorted(file for file in files if file.suffix == ".py"):
        code.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    found = {"python": platform.python_version(), "code": code.hexdigest()[:12]}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError, IndexError):
        driver = pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()
        found["NVIDIA driver"] = driver[0]
    return found | {name: os.environ.get(name, "") for name in VARIABLES}


def call(address: str, processes: int, own: Mapping[str, str], *, seconds: float) -> RollCall:
    """Process 0: waits for the others, lets each try to reach each, and compares them.

    Args:
      address: HOST:PORT at which it listens.
      processes: how many there are.
      own: its own :func:`facts`.
      seconds: how long it waits for all to come, and for each answer.
    """
    with contextlib.ExitStack() as files, _listening() as reached:
        ip, port = _split(address)[0], reached.getsockname()[1]
        hellos = {0: {"host": socket.gethostname(), "ip": ip, "port": port, "facts": own}}
        peers: dict[int, TextIO] = {}
        for process, hello, file, dropped in _hellos(address, seconds):
            if 0 < process < processes and process not in hellos:
                hellos[process], peers[process] = hello, file
                files.push(dropped.pop_all())
            if len(hellos) == processes:
                break
        fatal = [
            f"process {p} did not come to {address} within {seconds:.0f} s: start it, and let its "
            "host reach that address"
            for p in range(processes)
            if p not in hellos
        ]
        named = {p: f"process {p} on {hello['host']}" for p, hello in sorted(hellos.items())}
        roll = [[hellos[p][key] for key in ("host", "ip", "port")] for p in sorted(hellos)]
        clocks = dict.fromkeys(range(processes), (0.0, 0.0))
        whole = sorted(peers.items()) if len(hellos) == processes else ()
        for _, file in whole:
            with contextlib.suppress(OSError):
                _send(file, {"roll": roll})
        fatal += _unreached(0, roll) if whole else []
        for p, file in whole:
            try:
                fatal += _read(file)["failed"]
                clocks[p] = _clock_of(file)
            except (OSError, ValueError, KeyError) as lost:
                fatal.append(f"{named[p]} was lost in the roll call: {lost}")
        fatal += differences({named[p]: hellos[p]["facts"] for p in named})
        wrong = [
            f"the clock of {named[p]} is {offset:+.3f} s from that of process 0 "
            f"(+- {error:.3f} s): synchronise both hosts by NTP"
            for p, (offset, error) in clocks.items()
            if abs(offset) - error > CLOCK_SECONDS
        ]
        hosts = [hellos.get(p, {"host": ""})["host"] for p in range(processes)]
        result = RollCall(hosts, *zip(*clocks.values(), strict=True), fatal, wrong)
        for file in peers.values():
            with contextlib.suppress(OSError):
                _send(file, {"result": dataclasses.asdict(result)})
    return result


def _hellos(
    address: str, seconds: float
) -> Iterator[tuple[int, dict[str, Any], TextIO, contextlib.ExitStack]]:
    """Yields who says hello within the time, and a stack that closes what is left on it."""
    host, port = _split(address)
    bound = "127.0.0.1" if host in ("127.0.0.1", "localhost") else ""
    until = time.monotonic() + seconds
    with socket.create_server((bound, port), backlog=socket.SOMAXCONN) as server:
        while (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.ExitStack() as dropped:
                try:
                    connection, (ip, *_) = server.accept()
                    connection.settimeout(_GREETING_SECONDS)
                    file = dropped.enter_context(_lines(connection))
                    # A byte now and then is no silence, and would hold everybody up for ever.
                    end = functools.partial(connection.shutdown, socket.SHUT_RDWR)
                    limit = threading.Timer(_GREETING_SECONDS, end)
                    dropped.callback(limit.cancel)
                    limit.start()
                    said = _read(file)
                    limit.cancel()
                    hello = {"host": str(said["host"]), "ip": ip, "port": int(said["port"])}
                    process = int(said["process"])
                    hello["facts"] = {name: str(fact) for name, fact in said["facts"].items()}
                    connection.settimeout(seconds + _PROBE_SECONDS)
                except Exception:
                    continue  # anybody may connect, and say anything or nothing
                yield process, hello, file, dropped


def answer(
    address: str,
    process: int,
    own: Mapping[str, str],
    *,
    seconds: float,
    clock: Callable[[], float] = time.time,
) -> RollCall:
    """Every other process: says hello to process 0, answers it, and returns what that has found.

    Args:
      seconds: how long it tries to reach process 0, which then has twice that for each answer.

    Raises:
      ConnectionError: where it cannot reach process 0, or that ends before the roll call does.
    """
    host = socket.gethostname()
    try:
        with _listening() as reached, _lines(_connect(address, seconds)) as file:
            port = reached.getsockname()[1]
            _send(file, {"process": process, "host": host, "port": port, "facts": dict(own)})
            while "result" not in (message := _read(file)):
                unreached = _unreached(process, message["roll"]) if "roll" in message else []
                _send(file, {"failed": unreached, "time": clock()})
            return RollCall(**message["result"])
    except (OSError, ValueError, KeyError) as error:
        raise ConnectionError(
            f"process {process} on {host} cannot talk to process 0 at {address} within "
            f"{seconds:.0f} s ({error}): start process 0, and open that port to this host"
        ) from None


def differences(processes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns one sentence for each fact that is not the same in all processes.

    Args:
      processes: facts by the name of the process.

    >>> differences({"process 0": {"jax": "1"}, "b": {"jax": "1"}, "c": {"jax": "2"}})
    ['jax is 2 in c and 1 in the others: make it the same everywhere']
    """
    found = []
    for name in sorted({name for facts in processes.values() for name in facts}):
        groups: dict[str, list[str]] = collections.defaultdict(list)
        for process, facts in processes.items():
            groups[facts.get(name) or "(nothing)"].append(process)
        *few, (most, _) = sorted(groups.items(), key=lambda group: len(group[1]))
        if those := ", ".join(f"{value} in {', '.join(of)}" for value, of in few):
            found.append(f"{name} is {those} and {most} in the others: make it the same everywhere")
    return found


def _clock_of(file: TextIO) -> tuple[float, float]:
    """How far the other's clock is ahead, and the bound of that error, by the fastest ping."""
    pings = []
    for _ in range(PINGS):
        sent = time.time()
        _send(file, {"ping": True})
        there, back = float(_read(file)["time"]), time.time()
        pings.append(((back - sent) / 2, there - (sent + back) / 2))
    error, offset = min(pings)
    return offset, error


def _unreached(process: int, roll: Sequence[Sequence[Any]]) -> list[str]:
    """One sentence for each other process to which no TCP connection can be made."""

    def probe(other: int) -> str | None:
        host, *address = roll[other]
        try:
            return socket.create_connection(tuple(address), timeout=_PROBE_SECONDS).close()
        except (OSError, OverflowError) as error:  # the latter for what is no port
            return (
                f"process {process} on {roll[process][0]} cannot reach process {other} on {host} "
                f"at {address[0]}:{address[1]} ({error}): let hosts reach each other on all ports"
            )

    with ThreadPoolExecutor(32) as pool:
        others = [other for other in range(len(roll)) if other != process]
        return [text for text in pool.map(probe, others) if text]


def _connect(address: str, seconds: float) -> socket.socket:
    until = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(_split(address), timeout=_GREETING_SECONDS)
            connection.settimeout(2 * seconds + _PROBE_SECONDS)
            return connection
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _listening() -> socket.socket:
    """A port that the others try to reach; the kernel answers for it."""
    return socket.create_server(("", 0), backlog=socket.SOMAXCONN)


@contextlib.contextmanager
def _lines(connection: socket.socket) -> Iterator[TextIO]:
    with connection:
        file = connection.makefile("rw", encoding="utf-8")
        try:
            yield file
        finally:
            # It may hold what could not be sent to one that is lost.
            with contextlib.suppress(OSError):
                file.close()


def _send(file: TextIO, message: Mapping[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _read(file: TextIO) -> dict[str, Any]:
    if not (text := file.readline(1 << 24)):
        raise ConnectionError("the connection was closed")
    if not isinstance(message := json.loads(text), dict):
        raise ValueError("a message is a JSON object")
    return message
