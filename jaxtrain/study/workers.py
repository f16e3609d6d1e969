"""Workers of a study on this host: each is a process of the experiment's own command.

A run is started again in its folder where it was lost, and resumes there. What it has logged is
what is reported of it; the run itself knows nothing of the study.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.host import distributed, exit_codes
from jaxtrain.host.paths import as_path, look, write_whole
from jaxtrain.run.folder import LOG, STOPPED
from jaxtrain.run.launch import Guard, newest_step
from jaxtrain.run.observe import goodput
from jaxtrain.run.observe.report.records import Series, read_run
from jaxtrain.study.trials import Claim, Trials

POLL_SECONDS = 0.25
# A run that was lost is started again so often without having saved anything.
RESTARTS = 3
# For so long a run may save itself where the study is interrupted.
GRACE_SECONDS = 60.0
# A launcher that has been asked to kill its processes is killed itself after this time.
LAUNCHER_SECONDS = 10.0
# Where the first trials all fail, so would the others.
FIRST_FAILURES = 3
OUTPUT = "output"
_NOTHING = Series(np.zeros(0, np.int64), np.zeros(0))


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of a study's trials.

    Args:
      folder: of the study.
      command: of a run, without what is the trial's: words of the values are made by ``words``.
      metric: that the experiment chooses its best by, as the log names it; ``mode`` is min or max.
      takes_best: whether the best evaluation counts, and not the last.
      seeds: of the runs of a trial, one after the other.
      processes: of each run. Process 0 alone logs, so that what is reported, pruned and told is
        what process 0 says.
    """

    folder: pathlib.Path
    command: Sequence[str]
    words: Callable[[Mapping[str, Any]], list[str]]
    metric: str
    mode: str
    takes_best: bool
    seeds: Sequence[int]
    processes: int = 1

    def run_dir(self, number: int, seed: int) -> pathlib.Path:
        """The folder of a run, ``trial-7`` or ``trial-7-seed-1``."""
        name = f"trial-{number}" + (f"-seed-{seed}" if len(self.seeds) > 1 else "")
        return self.folder / name

    def line(self, values: Mapping[str, Any], seed: int) -> list[str]:
        """The words of the command that trains with these values, but for its folder."""
        seeded = ["--seed", str(seed)] if len(self.seeds) > 1 else []
        launch = [sys.executable, "-m", "jaxtrain", "launch", "--processes", str(self.processes)]
        launched = [*launch, "--"] if self.processes > 1 else []
        return [*launched, *self.command, *self.words(values), *seeded]

    def series(self, run_dir: pathlib.Path) -> Series:
        """What a run has logged of the metric so far."""
        with contextlib.suppress(ValueError):  # nothing is there yet
            return read_run(as_path(run_dir), "").series.get(self.metric, _NOTHING)
        return _NOTHING

    def seconds(self, numbers: Sequence[int]) -> collections.Counter[str]:
        """Where the time of these trials' runs went, by activity."""
        total: collections.Counter[str] = collections.Counter()
        for number, seed in itertools.product(numbers, self.seeds):
            with contextlib.suppress(ValueError):  # nothing is there
                run = read_run(as_path(self.run_dir(number, seed)), "")
                total.update(goodput.account(run.attempts))
        return total

    def value(self, run_dir: pathlib.Path) -> float | None:
        """What a run comes to; None where it has logged none."""
        values = self.series(run_dir).values
        if not values.size:
            return None
        best = np.nanmin if self.mode == "min" else np.nanmax
        whole = self.takes_best and not np.isnan(values).all()
        return float(best(values) if whole else values[-1])


def work(
    trials: Trials,
    runs: Runs,
    *,
    workers: int,
    environ: Mapping[str, str],
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> bool:
    """Does trials, ``workers`` at a time, until all of the study have ended.

    Other processes may do the same, on any host that sees the folder; their trials are waited for,
    and taken over where they die. Returns False where ``stop`` has asked for an end.

    Raises:
      ValueError: the first trials have all failed.
    """
    (runs.folder / OUTPUT).mkdir(exist_ok=True)
    guard, there = Guard(), {}
    shares = [environ | guard.mark | _own_gpus(environ, i, workers) for i in range(workers)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    try:
        while not stop():
            for slot in set(range(workers)) - there.keys():
                if (claim := trials.claim()) is None:
                    break
                own = set(cores[slot::workers])
                there[slot] = _Worker(trials, runs, claim, say, shares[slot], own)
            there = {slot: worker for slot, worker in there.items() if not worker.has_ended()}
            if not there and trials.is_over():
                return True
            _check_failures(trials)
            time.sleep(POLL_SECONDS)
        return False
    finally:
        _end([worker.process for worker in there.values() if worker.process is not None])
        guard.dismiss()


def check_devices(workers: int, processes: int, environ: Mapping[str, str]) -> None:
    """Raises ValueError where the GPUs of this host cannot be dealt to so many workers, each with
    so many processes."""
    several = f"`processes` is {processes}" if processes > 1 else f"`workers` is {workers}"
    count = workers * processes
    _own_gpus(environ, 0, count)
    own_share = {"XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    if len(_gpus(environ)) == 1 and count > 1 and not own_share & environ.keys():
        raise ValueError(
            f"{several} and there is one GPU, whose memory the first would take: give 1, or set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION to {0.9 / count:.2f}"
        )


def _gpus(environ: Mapping[str, str]) -> list[str]:
    on_cpu = environ.get("JAX_PLATFORMS", "").startswith("cpu")
    return [] if on_cpu else distributed.visible_gpus(environ)


def _own_gpus(environ: Mapping[str, str], slot: int, workers: int) -> dict[str, str]:
    """The variable that shows a worker its own GPUs, where there are several."""
    gpus = _gpus(environ)
    own = distributed.share_devices(len(gpus), processes=workers, index=slot)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i] for i in own)} if own else {}


class _Worker:
    """Does one trial, whose runs follow each other; ``process`` is the present one's."""

    def __init__(
        self,
        trials: Trials,
        runs: Runs,
        claim: Claim,
        say: Callable[[str], None],
        environ: Mapping[str, str],
        cores: set[int],
    ):
        self.trials, self.runs, self.number, self.given = trials, runs, claim.number, claim.values
        self.say, self.environ, self.cores = say, environ, cores
        self.values: list[float] = []
        self.restarts, self.start_at, self.newest = 0, 0.0, -1
        self.process: subprocess.Popen | None = None
        self.seen: object = None

    @property
    def run_dir(self) -> pathlib.Path:
        return self.runs.run_dir(self.number, self.runs.seeds[len(self.values)])

    @property
    def output(self) -> pathlib.Path:
        return self.runs.folder / OUTPUT / f"{self.run_dir.name}.txt"

    def start(self) -> None:
        """Starts the next run, or resumes it where it had begun."""
        line = self.runs.line(self.given, self.runs.seeds[len(self.values)])
        all_cores = os.sched_getaffinity(0) if self.cores else set()
        with open(self.output, "ab") as output, contextlib.ExitStack() as stack:
            if self.cores:  # A child has the cores of its parent, and XLA as many threads.
                os.sched_setaffinity(0, self.cores)
                stack.callback(os.sched_setaffinity, 0, all_cores)
            self.process = subprocess.Popen(
                [*line, "--run-dir", str(self.run_dir), "--auto-resume"],
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Reports what the run has logged since, and tells how it ended; starts what is to be
        started. Returns whether the trial has ended."""
        if self.process is None:
            if time.monotonic() >= self.start_at:
                self.start()
            return False
        code = self.process.poll()  # before its last lines are read
        if not self.values and self._is_pruned(running=code is None):
            return True
        if code is None:
            return False
        self.process, code = None, exit_codes.of_run([code])
        if code in (exit_codes.DONE, exit_codes.ALERTED, exit_codes.DIVERGED):
            return self._is_whole(code)
        if code == exit_codes.SUPERSEDED:  # another process does the trial now
            return True
        found = newest_step(self.run_dir)
        newest = self.newest if found is None else max(found, self.newest)
        progress, self.newest = newest > self.newest, newest
        again = exit_codes.restart(code, progress, self.restarts, limit=RESTARTS)
        if again is None:
            lines = self.output.read_text(errors="replace").split("\n")
            said = [line for line in lines if line and not line.startswith("[launch]")]
            return self._fail(f"status {code}: {said[-1] if said else ''}")
        self.restarts, pause = again
        self.start_at = time.monotonic() + pause
        self.say(f"trial {self.number} is started again in {pause:.0f} s after status {code}")
        return False

    def _is_pruned(self, *, running: bool) -> bool:
        before, self.seen = self.seen, look(self.run_dir / LOG)
        series = self.runs.series(self.run_dir) if self.seen != before else _NOTHING
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            if self.trials.report(self.number, step, value) and running:
                _kill(self.process, launched=self.runs.processes > 1)
                told = {"step": step, "reason": "the study has pruned the trial"}
                write_whole(as_path(self.run_dir / STOPPED), json.dumps(told) + "\n")
                self.trials.prune(self.number)
                self.say(f"trial {self.number} pruned after step {step:,} at {value:.5g}")
                return True
        return False

    def _is_whole(self, code: int) -> bool:
        diverged = code == exit_codes.DIVERGED
        value = math.nan if diverged else self.runs.value(self.run_dir)
        if value is None:
            return self._fail(f"its log has no {self.runs.metric}")
        self.values.append(value)
        self.restarts, self.newest = 0, -1
        if len(self.values) < len(self.runs.seeds):
            return False
        if (mean := self.trials.tell(self.number, self.values)) is not None:
            told = " ".join(self.runs.words(self.given))
            of = f"trial {self.number} of {self.trials.count}"
            self.say(f"{of}: {self.runs.metric} {mean:.5g} with {told}")
        return True

    def _fail(self, why: str) -> bool:
        self.trials.fail(self.number, why)
        self.say(f"trial {self.number} failed: {why}")
        return True


def _check_failures(trials: Trials) -> None:
    ended = [trial for trial in trials.all() if trial.state.is_finished()]
    if len(ended) >= FIRST_FAILURES and all(trial.state.name == "FAIL" for trial in ended):
        raise ValueError(
            f"the first {len(ended)} trials have all failed, the last with "
            f"{ended[-1].user_attrs['why']}"
        )


def _kill(process: subprocess.Popen, *, launched: bool = False) -> None:
    if launched:  # It kills its processes after a second signal, and ends when they are gone.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAUNCHER_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Lets runs save themselves, and ends them."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        _kill(process)
