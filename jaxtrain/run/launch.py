"""``jaxtrain launch``: starts a command as several processes of one program and looks after them.

Each process is told who it is by the variables that :mod:`jaxtrain.host.distributed` reads; it
may be any program that calls :func:`jaxtrain.host.distributed.initialize`.
"""

import contextlib
import dataclasses
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, TextIO

from jaxtrain.host import distributed, exit_codes, output
from jaxtrain.host.exit_codes import PEER_LOST, PREEMPTED
from jaxtrain.host.keeper import Keeper
from jaxtrain.host.least import check_least
from jaxtrain.host.paths import as_path
from jaxtrain.host.simulated import thread_setting
from jaxtrain.run.folder import HOSTS
from jaxtrain.run.membership import STOP, Membership, Round

_POLL_SECONDS = 0.05
# How long the last output of a process that has ended is waited for.
_DRAIN_SECONDS = 5.0
# Where a process is lost, the others notice within seconds and end by themselves, or never will.
_LOST_SECONDS = 15.0
# Stands in the environment of everything that a launcher has started, however deep.
_MARK = "JAXTRAIN_LAUNCH"
# Program of the guard process. Its standard input closes when the launcher dies, however it dies;
# the guard then kills every marked process and its session until two scans in a row find none.
_GUARD = """
import os, pathlib, sys, time
sys.stdin.buffer.read()
sessions, quiet = set(), 0
while quiet < 2:
    quiet += 1
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if sys.argv[1].encode() in (process / "environ").read_bytes().split(b"\\0"):
                sessions.add(session)
            if session in sessions and state != "Z":
                os.kill(int(process.name), 9)
                quiet = 0
        except OSError:
            pass
    time.sleep(0.2)
"""


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Starts a command as several processes: jaxtrain launch --processes 8 -- python -m
    experiments.gpt.

    Each line of output is prefixed with its process's number. When one process fails, all are
    ended, and the exit status is that of the failure. A host with TPU chips needs no launcher: it
    runs one process.
    """

    processes: int
    """Processes on this host."""
    hosts: int | str = 1
    """Hosts that run this same line, each with its own --host-index; with --elastic LEAST:MOST, or
    numbers such as 2,3,4."""
    elastic: bool = False
    """Continue on the hosts that are left when one leaves, and take it in again after the next
    checkpoint. Hosts find each other in the folder hosts of --run-dir. Of LEAST:MOST as many train
    as divide MOST, so that the batch divides as on all, and the others stand by."""
    host_index: int = 0
    """Which host this is, from 0; with --elastic hosts number themselves."""
    coordinator: str | None = None
    """HOST:PORT on host 0, reachable by all; with one host, a free port is found. With --elastic
    that of this host, and left out, found."""
    gpus_per_process: int | None = None
    """GPUs of each process; left out, this host's GPUs are dealt evenly; 0 shows all to each."""
    simulate_devices_per_process: int = 0
    """Run on the CPU, with this many simulated devices in each process."""
    max_restarts: int = 0
    """Most restarts, with --auto-resume, after the run was preempted, hung, or lost a process or
    its storage; counted anew after an attempt that left a newer checkpoint or snapshot in memory.
    The pause before a restart doubles, from a second to five minutes. Other hosts than before do
    not count."""
    grace_seconds: float = 30.0
    """Time for the other processes to end by themselves before they are killed."""


def run_launch(
    options: LaunchOptions, command: list[str], *, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Runs the command until it is over; returns the exit status, by
    :func:`jaxtrain.host.exit_codes.of_run`. Raises ValueError for options that do not fit each
    other or this host."""
    check(options, command)
    run_dir, keeps = (_value_of(name, command) for name in ("run-dir", "memory-every"))
    environ = {distributed.START: secrets.token_hex(8)} | os.environ
    memory = Keeper(_own_host(options)) if keeps else contextlib.nullcontext()
    with output.lasting(), _Signals() as signals, memory as keeper:
        address = keeper.address if keeper else ""
        newest = functools.partial(_newest, run_dir, keeper)
        attempts = _Attempts(options, newest, signals, sleep)
        if not options.elastic:
            return _run_fixed(attempts, command, environ | {distributed.MEMORY: address})
        with Membership(
            as_path(run_dir) / HOSTS,
            host_counts(options),
            name=f"{socket.gethostname()}-{secrets.token_hex(4)}",
            processes=options.processes,
            meet=lambda: options.coordinator or f"{_own_host(options)}:{free_port()}",
            newest=lambda: newest_step(run_dir),
            grace=options.grace_seconds,
            memory=address,
        ) as hosts:
            return _run_elastic(attempts, command, environ, hosts)


class _Attempts:
    """Attempts of one launcher: starts them, waits, and decides what follows; ``count`` are those
    in a row that have left no newer checkpoint or snapshot, of which ``newest`` tells the step."""

    def __init__(
        self,
        options: LaunchOptions,
        newest: Callable[[], int | None],
        signals: "_Signals",
        sleep: Callable[[float], None],
    ):
        self.options, self.signals, self.sleep, self._find_newest = options, signals, sleep, newest
        self.count, self._found = 0, {None}

    def run(self, group: "Group", hosts: Membership | None = None) -> tuple[int, float | None]:
        """Runs a group to its end; returns its status, and the pause before the next attempt, None
        where there is to be none."""
        self.signals.group = group
        group.start()
        watch = (lambda: None) if hosts is None else _obeying(hosts, group)
        status = group.wait(grace_seconds=self.options.grace_seconds, watch=watch)
        # By the signal itself, so before it had a handler, and nobody asked the launcher: lost.
        lost = status == 143 and 143 not in group.codes.values()
        # Other hosts have gone on without this one.
        lost |= status == exit_codes.SUPERSEDED and hosts is not None and hosts.broken
        code, found = PEER_LOST if lost else status, self._find_newest()
        progress = found not in self._found
        self._found.add(found)
        # Whether there are other hosts next time, which do not count, is not known yet.
        limit = self.options.max_restarts if hosts is None else sys.maxsize
        again = exit_codes.restart(code, progress, self.count, limit=limit)
        if again is None or self.signals.came:
            return status, None
        self.count, pause = again
        if code == PREEMPTED and hosts is not None:
            self.count, pause = 0, 0.0
        return status, pause


def _run_fixed(attempts: _Attempts, command: list[str], environ: Mapping[str, str]) -> int:
    options = attempts.options
    while True:
        environments = [environ | own for own in process_settings(options, environ)]
        first = options.host_index * options.processes
        status, pause = attempts.run(Group(command, environments, first_index=first))
        if pause is None:
            return status
        _say(
            f"starting again in {pause:.1f} s after status {status} "
            f"({attempts.count} of {options.max_restarts} restarts without progress)"
        )
        while pause > 0 and not attempts.signals.came:
            attempts.sleep(min(pause, _POLL_SECONDS))
            pause -= _POLL_SECONDS
        if attempts.signals.came:
            return status
        command = resumed(command)


def _run_elastic(
    attempts: _Attempts, command: list[str], environ: Mapping[str, str], hosts: Membership
) -> int:
    """Trains in one round after the other, each with the hosts that have agreed on it."""
    options, name, status, last = attempts.options, hosts.own.name, PREEMPTED, None
    _say(f"this host is {name}")
    while True:
        while (now := hosts.agreed()) is None:
            if attempts.signals.came or hosts.complete:
                return status if attempts.signals.came else exit_codes.DONE
            attempts.sleep(_POLL_SECONDS)
        # In a round between, other hosts may have trained without this one.
        if last is None or (last.members, last.number + 1) != (now.members, now.number):
            attempts.count = 0
        if attempts.count > options.max_restarts:
            return status
        last, there = now, f"{len(now.members)}/{max(host_counts(options))}"
        _say(f"round {now.number} on {there} hosts: {', '.join(now.names)}")
        own = {distributed.START: now.start, distributed.HOSTS: there}
        own[distributed.MEMORY] = " ".join(hosts.memories)
        settings = process_settings(options, environ, now, name)
        line = resumed(command) if now.resumes else command
        first = now.first_process(name)
        group = Group(line, [environ | own | each for each in settings], first_index=first)
        status, pause = attempts.run(group, hosts)
        if status == exit_codes.DONE:
            hosts.done()
        if pause is None:
            return status
        hosts.end(pause)


def _fixed(options: LaunchOptions) -> Round:
    """The hosts of a launch whose number stays, named by their index."""
    members = tuple((str(host), options.processes) for host in range(max(host_counts(options))))
    return Round(1, members, options.coordinator or f"127.0.0.1:{free_port()}", "")


def _obeying(hosts: Membership, group: "Group") -> Callable[[], None]:
    """Returns what passes the orders of the membership on to a group, each once."""
    obeyed: set[str] = set()

    def watch() -> None:
        if (order := hosts.order) is not None and order not in obeyed:
            obeyed.add(order)
            what = "asked to save and end" if order == STOP else "killed"
            _say(f"other hosts are to train: the processes of this one are {what}")
            group.pass_on(signal.SIGTERM if order == STOP else signal.SIGKILL)

    return watch


def own_address() -> str:
    """An address of this host that others reach, if it has any, and a free port."""
    return f"{_outside()}:{free_port()}"


def _own_host(options: LaunchOptions) -> str:
    """An address of this host that the others reach, if there are others and it has any."""
    return _outside() if max(host_counts(options)) > 1 else "127.0.0.1"


def _outside() -> str:
    outside = (each for each in distributed.addresses() if not each.startswith("127."))
    return next(outside, "127.0.0.1")


def host_counts(options: LaunchOptions) -> tuple[int, ...]:
    """Returns the numbers of hosts that may train together, rising. Raises ValueError where they
    are none.

    >>> host_counts(LaunchOptions(processes=8, hosts="2:8", elastic=True))
    (2, 4, 8)
    """
    text = str(options.hosts)
    least, colon, most = text.partition(":")
    try:
        counts = [int(word) for word in ([least, most] if colon else text.split(","))]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or (colon and counts[0] > counts[1]):
        raise ValueError(
            f"--hosts is {text}: give a number, LEAST:MOST or numbers with commas, all at least 1"
        )
    if not options.elastic and len(counts) > 1:
        raise ValueError(f"--hosts is {text}: hosts that may be fewer need --elastic; give it")
    if colon:
        counts = [each for each in range(counts[0], counts[1] + 1) if counts[1] % each == 0]
    return tuple(sorted(set(counts)))


def check(options: LaunchOptions, command: Sequence[str]) -> None:
    """Raises ValueError for what cannot be run."""
    if not command:
        raise ValueError(
            "there is no command to launch: write it after --, as in "
            "jaxtrain launch --processes 8 -- python -m experiments.gpt"
        )
    least = {"processes": 1, "max_restarts": 0, "grace_seconds": 0}
    check_least(options, **least, simulate_devices_per_process=0)
    hosts = max(host_counts(options))
    if options.elastic and options.host_index:
        raise ValueError(
            f"--host-index is {options.host_index} with --elastic: such hosts number themselves; "
            "leave it out"
        )
    if not 0 <= options.host_index < hosts:
        raise ValueError(
            f"--host-index {options.host_index} is not one of {hosts} hosts: count them from 0"
        )
    if hosts > 1 and options.coordinator is None and not options.elastic:
        raise ValueError(f"{hosts} hosts must meet: give --coordinator HOST:PORT of host 0")
    if options.coordinator is not None:
        distributed.check_address(options.coordinator)
    if options.max_restarts and _value_of("run-dir", command) is None:
        raise ValueError(
            "--max-restarts needs a command with --run-dir, so that the restart finds the run that "
            "it is to resume"
        )
    if options.elastic and _value_of("run-dir", command) is None:
        raise ValueError(
            "--elastic needs a command with --run-dir, a folder that all hosts share: they meet in "
            "it"
        )


def process_settings(
    options: LaunchOptions,
    environ: Mapping[str, str],
    hosts: Round | None = None,
    name: str | None = None,
) -> list[dict[str, str]]:
    """Returns the variables that each process of this host gets besides the launcher's own; with
    ``hosts`` as the host ``name`` of them. Raises ValueError where this host's GPUs are too few or
    cannot be dealt evenly."""
    hosts, name = hosts or _fixed(options), name or str(options.host_index)
    common = {
        distributed.COORDINATOR: hosts.coordinator,
        distributed.PROCESSES: str(sum(count for _, count in hosts.members)),
        # Lines appear as they are printed, though the output is no terminal.
        "PYTHONUNBUFFERED": "1",
    }
    if devices := options.simulate_devices_per_process:
        common |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        common |= dict([thread_setting(devices)])
    settings = []
    for local in range(options.processes):
        own = {distributed.PROCESS_ID: str(hosts.first_process(name) + local)}
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
    there = len(distributed.visible_gpus(environ))
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

    >>> resumed(["python", "-m", "experiments.gpt", "--run-dir", "r", "--resume"])
    ['python', '-m', 'experiments.gpt', '--run-dir', 'r', '--auto-resume']
    """
    if "--overwrite" in command:  # The run's folder tells whether an attempt came as far as that.
        return list(command)
    first_time = ("--resume", "--auto-resume")
    return [*(word for word in command if word not in first_time), "--auto-resume"]


def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Signals:
    """Passes SIGTERM, SIGINT and SIGHUP on to a group while it is open, and keeps in ``came`` which
    have come."""

    def __init__(self):
        self.came: list[int] = []
        self.group: Group | None = None

    def __enter__(self) -> "_Signals":
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._pass_on) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: object) -> None:
        del frame
        self.came.append(number)
        if self.group is not None:
            self.group.ask(signal.SIGTERM if number == signal.SIGHUP else number)


class Guard:
    """A process that outlives this one and then kills what this one has started, however deep.

    Attributes:
      mark: the variable by which it knows a process, to be set in the environment of that.
    """

    def __init__(self):
        self.mark = {_MARK: secrets.token_hex(16)}
        self._process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _GUARD, f"{_MARK}={self.mark[_MARK]}"],
            # Not marked by a launcher around this one, whose guard would kill it first.
            env={name: value for name, value in os.environ.items() if name != _MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Ends it, where all that it looks after has ended."""
        self._process.kill()
        self._process.communicate()


class Group:
    """Processes of one command that live and end together, and end with this one, however that
    ends.

    Attributes:
      codes: what those have ended with that did so by themselves; -n by signal n.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        first_index: int = 0,
    ):
        self._command, self._environments, self._first = command, environments, first_index
        self._asked: int | None = None
        self.codes: dict[int, int] = {}
        self._printing = threading.Lock()
        self._processes: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        """Starts all, or none; raises OSError where one cannot be started."""
        self._guard = Guard()
        try:
            for index, environment in enumerate(self._environments, self._first):
                self._start({**environment, **self._guard.mark}, index)
        except OSError:
            self._signal(signal.SIGKILL)
            self._guard.dismiss()
            raise
        if self._asked is not None:  # It came while they were being started.
            self._signal(self._asked)

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
            # In parts: what has no line breaks is not kept in memory for one.
            for line in iter(lambda: source.readline(65536), b""):
                text = prefix + line.rstrip(b"\r\n") + b"\n"
                # Where nobody reads any more the processes go on all the same.
                with self._printing, contextlib.suppress(ValueError, OSError):
                    sink.write(text.decode("utf-8", "replace"))
                    sink.flush()

    def ask(self, number: int) -> None:
        """Passes a signal on to all; whatever comes after it kills them."""
        first, self._asked = self._asked is None, number
        self._signal(number if first else signal.SIGKILL)

    def pass_on(self, number: int) -> None:
        """Sends a signal of the launcher's own to all."""
        self._signal(number)

    def wait(self, *, grace_seconds: float, watch: Callable[[], None] = lambda: None) -> int:
        """Waits for all, and calls ``watch`` meanwhile; once one has failed, ends the others.

        Those that were preempted, or asked to end, are saving: they have ``grace_seconds`` to
        follow, and as long again after SIGTERM. A failure that may be restarted, of a process that
        is lost, is noticed by the others, or never will be: one that is stopped, or waits in a
        collective, answers no signal. After an error the others are told at once. Returns the code
        of the run, from the processes that ended by themselves.
        """
        codes = self.codes
        sent: list[int] = []
        due: dict[int, float] = {}
        said = 0
        while True:
            for index, process in enumerate(self._processes, self._first):
                if index not in codes and (code := process.poll()) is not None:
                    # What was ended from here has not failed.
                    codes[index] = 0 if -code in sent else code
            running = len(codes) < len(self._processes)
            status = exit_codes.of_run(list(codes.values()))
            if status != said:
                said = status
                index = next(i for i, code in codes.items() if exit_codes.of_run([code]) == status)
                others = "; the others are ended" if running else ""
                _say(f"process {index} ended with status {status}{others}")
            if not running:
                break
            now = time.monotonic()
            if status and not due and not sent:
                due = self._deadlines(status, now, grace_seconds)
            for number in [number for number, when in due.items() if now >= when]:
                del due[number]
                sent.append(number)
                self._signal(number)
            watch()
            time.sleep(_POLL_SECONDS)
        if status:  # And what they have started.
            self._signal(signal.SIGKILL, whole_groups=True)
        # A process may have left children that hold on to its output: not for ever.
        until = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        self._guard.dismiss()
        return status

    def _deadlines(self, status: int, now: float, grace_seconds: float) -> dict[int, float]:
        """When those that still run are sent which signal."""
        if status == exit_codes.PREEMPTED or self._asked is not None:
            return {signal.SIGTERM: now + grace_seconds, signal.SIGKILL: now + 2 * grace_seconds}
        if exit_codes.restartable(status):
            patience = min(grace_seconds, _LOST_SECONDS)
            return {signal.SIGTERM: now + patience / 2, signal.SIGKILL: now + patience}
        return {signal.SIGTERM: now, signal.SIGKILL: now + grace_seconds}

    def _signal(self, number: int, *, whole_groups: bool = False) -> None:
        for process in self._processes:
            if whole_groups or process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)


def _value_of(name: str, command: Sequence[str]) -> str | None:
    """The value of a flag in a command, None without it."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") == f"--{name}":
            return value or following
    return None


def newest_step(run_dir: str | os.PathLike | None) -> int | None:
    """The step of the newest checkpoint in a run's folder, if there is any."""
    with contextlib.suppress(Exception):  # a bucket's client has errors of its own
        there = (as_path(run_dir) / "checkpoints").iterdir()
        return max((int(path.name) for path in there if path.name.isdecimal()), default=None)
    return None


def _newest(run_dir: str | None, memory: Keeper | None) -> int | None:
    """The step of the newest checkpoint, or snapshot of which this host holds something."""
    paths = [name.split("/") for name in list(memory.objects if memory else ())]
    held = [int(path[2]) for path in paths if len(path) > 2 and path[2].isdecimal()]
    return max([*held, *filter(None, [newest_step(run_dir)])], default=None)


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)
