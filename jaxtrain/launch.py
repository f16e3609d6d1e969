"""``jaxtrain launch``: starts a command as several processes of one program and looks after them.

Each process is told who it is by the variables that :mod:`jaxtrain.parallel.distributed` reads; it
may be any program that calls :func:`jaxtrain.parallel.distributed.initialize`.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, TextIO

from jaxtrain.exit_codes import PREEMPTED, RESTARTABLE
from jaxtrain.parallel import distributed

_POLL_SECONDS = 0.05
# How long the last output of a process that has ended is waited for.
_DRAIN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Starts a command as several processes: jaxtrain launch --processes 8 -- python -m
    experiments.gpt.

    Each line of output is prefixed with its process's number. When one process fails, all are ended
    and its exit status is the launcher's. A host with TPU chips needs no launcher: it runs one
    process.
    """

    processes: int
    """Processes on this host."""
    hosts: int = 1
    """Hosts that run this same line, each with its own --host-index."""
    host_index: int = 0
    """Which host this is, from 0."""
    coordinator: str | None = None
    """HOST:PORT on host 0, reachable by all; with one host, a free port is found."""
    gpus_per_process: int | None = None
    """GPUs of each process; left out, this host's GPUs are dealt evenly; 0 shows all to each."""
    simulate_devices_per_process: int = 0
    """Run on the CPU, with this many simulated devices in each process."""
    max_restarts: int = 0
    """How often to start again, with --auto-resume, after the run was preempted (exit status 75),
    hung (76) or lost a process (77)."""
    grace_seconds: float = 30.0
    """Time for the other processes to end by themselves before they are killed."""


def run_launch(options: LaunchOptions, command: list[str]) -> int:
    """Runs the command until it is over and returns its exit status.

    Raises:
      ValueError: for options that do not fit each other or this host.
    """
    check(options, command)
    for attempt in range(options.max_restarts + 1):
        environments = [os.environ | settings for settings in process_settings(options, os.environ)]
        first = options.host_index * options.processes
        again = command if attempt == 0 else resumed(command)
        group = Group(again, environments, first_index=first)
        with group.forwarding_signals():
            group.start()
            status = group.wait(grace_seconds=options.grace_seconds)
        if status not in RESTARTABLE or group.signals or attempt == options.max_restarts:
            return status
        _say(f"starting again ({attempt + 1} of {options.max_restarts} restarts)")
    raise AssertionError("a loop over at least one attempt returns")


def check(options: LaunchOptions, command: Sequence[str]) -> None:
    """Raises ValueError for what cannot be run."""
    if not command:
        raise ValueError(
            "there is no command to launch: write it after --, as in "
            "jaxtrain launch --processes 8 -- python -m experiments.gpt"
        )
    for name in ("processes", "hosts"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(options, name)}: give at least 1")
    for name in ("max_restarts", "simulate_devices_per_process", "grace_seconds"):
        if getattr(options, name) < 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(options, name)}: give at least 0")
    if not 0 <= options.host_index < options.hosts:
        raise ValueError(
            f"--host-index {options.host_index} is not one of {options.hosts} hosts: count them "
            "from 0"
        )
    if options.hosts > 1 and options.coordinator is None:
        raise ValueError(
            f"{options.hosts} hosts must meet somewhere: give --coordinator HOST:PORT of host 0"
        )
    if options.coordinator is not None:
        distributed.check_address(options.coordinator)
    if options.max_restarts and not _names_run_dir(command):
        raise ValueError(
            "--max-restarts needs a command with --run-dir, so that the restart finds the run that "
            "it is to resume"
        )


def process_settings(options: LaunchOptions, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables that each process of this host gets besides the launcher's own.

    Raises:
      ValueError: where this host's GPUs are too few or cannot be dealt evenly.
    """
    coordinator = options.coordinator or f"127.0.0.1:{free_port()}"
    common = {
        distributed.COORDINATOR: coordinator,
        distributed.PROCESSES: str(options.processes * options.hosts),
        # Lines appear as they are printed, though the output is no terminal.
        "PYTHONUNBUFFERED": "1",
    }
    if options.simulate_devices_per_process:
        common |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(options.simulate_devices_per_process),
        }
    settings = []
    for local in range(options.processes):
        index = options.host_index * options.processes + local
        own = {distributed.PROCESS_ID: str(index)}
        gpus = _gpus(options, environ, local)
        if gpus:
            own[distributed.LOCAL_DEVICE_IDS] = ",".join(map(str, gpus))
        settings.append(common | own)
    return settings


def _gpus(options: LaunchOptions, environ: Mapping[str, str], local: int) -> tuple[int, ...]:
    if options.simulate_devices_per_process or options.gpus_per_process == 0:
        return ()
    if environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return ()
    there = distributed.count_gpus(environ)
    each = options.gpus_per_process
    if each is None:
        return distributed.share_devices(there, processes=options.processes, index=local)
    if each < 0 or each * options.processes > there:
        raise ValueError(
            f"--gpus-per-process {each} for {options.processes} processes does not fit the {there} "
            "GPUs of this host"
        )
    return tuple(range(local * each, (local + 1) * each))


def resumed(command: Sequence[str]) -> list[str]:
    """The command that goes on with what ``command`` began.

    >>> resumed(["python", "-m", "experiments.gpt", "--run-dir", "r", "--overwrite"])
    ['python', '-m', 'experiments.gpt', '--run-dir', 'r', '--auto-resume']
    """
    first_time = ("--overwrite", "--resume", "--auto-resume")
    return [*(word for word in command if word not in first_time), "--auto-resume"]


def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Group:
    """Processes that live and end together.

    Args:
      command: what each runs.
      environments: the whole environment of each.
      first_index: the number of the first, for the prefix of its output.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        first_index: int = 0,
    ):
        self.signals: list[int] = []
        self._command, self._environments, self._first = command, environments, first_index
        self._printing = threading.Lock()
        self._processes: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        """Starts all, or none where one cannot be started.

        Raises:
          OSError: for a command that is not there.
        """
        try:
            for index, environment in enumerate(self._environments, self._first):
                self._start(environment, index)
        except OSError:
            self._signal(signal.SIGKILL)
            raise
        if self.signals:  # It came while they were being started.
            self._signal(self.signals[-1])

    def _start(self, environment: Mapping[str, str], index: int) -> None:
        process = subprocess.Popen(
            list(self._command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A group of its own: Ctrl-C reaches it once, through the launcher, and what it starts
            # is ended with it.
            start_new_session=True,
        )
        self._processes.append(process)
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            prefix = f"[{index}] ".encode()
            reader = threading.Thread(target=self._copy, args=(source, sink, prefix), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _copy(self, source: BinaryIO, sink: TextIO, prefix: bytes) -> None:
        with source:
            for line in source:
                text = prefix + line.rstrip(b"\r\n") + b"\n"
                with self._printing, contextlib.suppress(ValueError, BrokenPipeError):
                    sink.write(text.decode("utf-8", "replace"))
                    sink.flush()

    @contextlib.contextmanager
    def forwarding_signals(self):
        """While this lasts, SIGTERM and SIGINT go to the processes; a second one kills them."""

        def forward(number, frame):
            del frame
            self.signals.append(number)
            self._signal(number if len(self.signals) == 1 else signal.SIGKILL)

        before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wait(self, *, grace_seconds: float) -> int:
        """Waits for all; once one has failed, ends the others.

        Those that fail with a status to restart on, or after a signal was passed on, fail together:
        the others have ``grace_seconds`` to follow before they are told to. Whoever has been told
        has as long again before it is killed.

        Returns:
          0, or the status of the first process that failed; 128 and the signal's number where a
          signal ended it.
        """
        status, ends = 0, {}
        while any(process.poll() is None for process in self._processes):
            if status == 0 and (status := self._first_failure()):
                alike = status in RESTARTABLE or bool(self.signals)
                told = time.monotonic() + (grace_seconds if alike else 0.0)
                ends = {signal.SIGTERM: told, signal.SIGKILL: told + grace_seconds}
            for number, when in list(ends.items()):
                if time.monotonic() >= when:
                    del ends[number]
                    self._signal(number)
            time.sleep(_POLL_SECONDS)
        status = status or self._first_failure()
        if status:  # And what they have started.
            self._signal(signal.SIGKILL, whole_groups=True)
        # A process may have left children that hold on to its output: not for ever.
        until = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        return status

    def _first_failure(self) -> int:
        """The status of a process that has failed, 0 for none; of several, preemption counts."""
        failed = {
            index: code
            for index, process in enumerate(self._processes, self._first)
            if (code := process.poll())
        }
        if not failed:
            return 0
        index = next((i for i, code in failed.items() if code == PREEMPTED), min(failed))
        code = failed[index] if failed[index] > 0 else 128 - failed[index]
        if any(process.poll() is None for process in self._processes):
            _say(f"process {index} ended with status {code}; the others are ended")
        else:
            _say(f"process {index} ended with status {code}")
        return code

    def _signal(self, number: int, *, whole_groups: bool = False) -> None:
        for process in self._processes:
            if whole_groups or process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)


def _names_run_dir(command: Sequence[str]) -> bool:
    flags = ("--run-dir", "--run_dir")
    return any(word.split("=")[0] in flags for word in command)


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)
