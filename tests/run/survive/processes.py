"""Real processes for tests: started, watched through their log, signalled, and always ended."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[3]
WORKER = str(ROOT / "tests" / "workers" / "train_worker.py")
# Longer than anything takes on a machine that does other things besides.
PATIENCE = 240.0


class Process:
    """A child with its output in files."""

    def __init__(self, arguments: Sequence[str], folder: pathlib.Path, name: str):
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            # What one test has compiled, the others of the session need not.
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with self._out.open("w") as out, self._err.open("w") as err:
            self._child = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=err
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def send(self, number: int) -> None:
        self._child.send_signal(number)

    def ended(self) -> bool:
        return self._child.poll() is not None

    def code(self, timeout: float = PATIENCE) -> int:
        """Waits for the end; minus the signal's number where one killed it."""
        return self._child.wait(timeout)

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, or the process has ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition() and not self.ended():
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.01)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGKILL)
        self._child.wait()


def together(commands: Sequence[Sequence[str]], **more) -> list[str]:
    """Runs processes at once, all of which succeed; returns what each printed."""
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **piped, **more) for command in commands]
    try:
        ended = [process.communicate(timeout=PATIENCE) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in ended]


@contextlib.contextmanager
def workers(
    folder: pathlib.Path, *arguments: str, count: int = 1, devices: int = 1
) -> Iterator[list[Process]]:
    """Starts the processes of one run of ``train_worker.py`` in ``folder / "run"``."""
    flags = [WORKER, str(folder / "run"), "--devices", str(devices), *arguments]
    if count > 1:
        flags += ["--processes", str(count), "--port", str(free_port())]
    started = [
        Process([*flags, "--process", str(i)], folder, f"{len(list(folder.glob('*.err')))}-{i}")
        for i in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.end()


@contextlib.contextmanager
def launched(
    folder: pathlib.Path, *arguments: str, count: int, restarts: int = 0
) -> Iterator[Process]:
    """Starts the processes of one run of ``train_worker.py`` under the launcher."""
    flags = ["--processes", str(count), "--max-restarts", str(restarts)]
    flags += ["--simulate-devices-per-process", "1"]
    run = ["--run-dir", str(folder / "run")]
    command = ["-m", "jaxtrain", "launch", *flags, "--", sys.executable, WORKER, *run, *arguments]
    process = Process(command, folder, "launcher")
    try:
        yield process
    finally:
        process.end()


def pids(launcher: Process) -> dict[int, int]:
    """The newest process of each number that a launcher's output tells of."""
    found = re.findall(r"^\[(\d+)\] pid (\d+)$", launcher.output, re.MULTILINE)
    return {int(number): int(pid) for number, pid in found}


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections.

    One of the kernel's choice can be another connection's by the time that it is used.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port


def logged(run: pathlib.Path) -> list[dict]:
    """The whole lines of a run's log."""
    log = run / "log.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_step(run: pathlib.Path) -> int:
    """The newest step in a run's log, 0 where there is none."""
    return max((line["step"] for line in logged(run)), default=0)
