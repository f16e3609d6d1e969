"""Workers of a study on this host: each is a process of the experiment's own command.

A run is started again in its folder where it was lost, and reads from there. What a run has logged
is what is reported of it; the run itself knows nothing of the study.
"""

import contextlib
import dataclasses
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
from jaxtrain.run.launch import Guard
from jaxtrain.run.observe.report.records import Series, read_run
from jaxtrain.study.trials import Claim, Trials

POLL_SECONDS = 0.25
# A run that was lost is started again so often without having saved anything.
RESTARTS = 3
# For so long a run may save itself where the study is interrupted.
GRACE_SECONDS = 60.0
# Where the first trials all fail, so would the others.
FIRST_FAILURES = 3
OUTPUT = "output"


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of a study's trials.

    Args:
      folder: of the study.
      command: of a run, without what is the trial's: words of the values are made by ``words``.
      metric: that the experiment chooses its best by, as the log names it.
      takes_best: whether the best evaluation counts, and not the last.
      seeds: of the runs of a trial, one after the other.
    """

    folder: pathlib.Path
    command: Sequence[str]
    words: Callable[[Mapping[str, Any]], list[str]]
    metric: str
    mode: str
    takes_best: bool
    seeds: Sequence[int]

    def run_dir(self, number: int, seed: int) -> pathlib.Path:
        """The folder of a run, ``trial-7`` or ``trial-7-seed-1``."""
        name = f"trial-{number}" + (f"-seed-{seed}" if len(self.seeds) > 1 else "")
        return self.folder / name

    def line(self, values: Mapping[str, Any], seed: int) -> list[str]:
        """The words of the command that trains with these values, but for its folder."""
        seeded = ["--seed", str(seed)] if len(self.seeds) > 1 else []
        return [*self.command, *self.words(values), *seeded]

    def series(self, run_dir: pathlib.Path) -> Series:
        """What a run has logged of the metric so far."""
        with contextlib.suppress(ValueError):  # nothing is there yet
            return read_run(as_path(run_dir), "").series.get(self.metric, _NONE)
        return _NONE

    def value(self, run_dir: pathlib.Path) -> float | None:
        """What a run comes to; None where it has logged none."""
        values = self.series(run_dir).values
        if not values.size:
            return None
        best = np.nanmin if self.mode == "min" else np.nanmax
        whole = self.takes_best and not np.isnan(values).all()
        return float(best(values) if whole else values[-1])


_NONE = Series(np.zeros(0, np.int64), np.zeros(0))


class _Trial:
    """A claimed trial, whose runs follow each other in one slot."""

    def __init__(self, claim: Claim, slot: int):
        self.claim, self.slot = claim, slot
        self.values: list[float] = []
        self.restarts, self.start_at, self.newest = 0, 0.0, -1
        self.process: subprocess.Popen | None = None
        self.seen: object = None


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
    try:
        while not stop():
            for slot, trial in list(there.items()):
                if _look(trials, runs, trial, say):
                    del there[slot]
                elif trial.process is None and time.monotonic() >= trial.start_at:
                    given = {**environ, **_devices(environ, slot, workers), **guard.mark}
                    _start(runs, trial, given, workers)
            for slot in set(range(workers)) - there.keys():
                if (claim := trials.claim()) is None:
                    break
                there[slot] = _Trial(claim, slot)
            if not there and trials.is_over():
                return True
            _check_failures(trials)
            time.sleep(POLL_SECONDS)
        return False
    finally:
        _end([trial.process for trial in there.values() if trial.process is not None])
        guard.dismiss()


def check_devices(workers: int, environ: Mapping[str, str]) -> None:
    """Raises ValueError where the GPUs of this host cannot be dealt to so many workers."""
    gpus = 0 if _on_cpu(environ) else distributed.count_gpus(environ)
    distributed.share_devices(gpus, processes=workers, index=0)
    own_share = {"XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    if gpus == 1 and workers > 1 and not own_share & environ.keys():
        raise ValueError(
            f"`workers` is {workers} and there is one GPU, whose memory the first would take: give "
            f"1, or set XLA_PYTHON_CLIENT_MEM_FRACTION to {0.9 / workers:.2f}"
        )


def _on_cpu(environ: Mapping[str, str]) -> bool:
    return environ.get("JAX_PLATFORMS", "").startswith("cpu")


def _devices(environ: Mapping[str, str], slot: int, workers: int) -> dict[str, str]:
    """The variable that shows a worker its own GPUs, where there are several."""
    gpus = 0 if _on_cpu(environ) else distributed.count_gpus(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    own = distributed.share_devices(gpus, processes=workers, index=slot)
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[i] for i in own)} if own else {}


def _start(runs: Runs, trial: _Trial, environ: Mapping[str, str], workers: int) -> None:
    """Starts the next run of a trial, or goes on with it where it had begun."""
    seed = runs.seeds[len(trial.values)]
    run_dir = runs.run_dir(trial.claim.number, seed)
    command = [*runs.line(trial.claim.values, seed), "--run-dir", str(run_dir), "--auto-resume"]
    all_cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    own = set(sorted(all_cores)[trial.slot :: workers])
    with (
        open(runs.folder / OUTPUT / f"{run_dir.name}.txt", "ab") as output,
        contextlib.ExitStack() as stack,
    ):
        if own:  # A child has the cores of its parent, and XLA as many threads as it has cores.
            os.sched_setaffinity(0, own)
            stack.callback(os.sched_setaffinity, 0, all_cores)
        trial.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _look(trials: Trials, runs: Runs, trial: _Trial, say: Callable[[str], None]) -> bool:
    """Reports what a trial's run has logged since, and tells how it ended. Returns whether the
    trial has ended."""
    if trial.process is None:
        return False
    number, seed = trial.claim.number, runs.seeds[len(trial.values)]
    run_dir = runs.run_dir(number, seed)
    code = trial.process.poll()  # before its last lines are read
    if not trial.values and _changed(trial, run_dir):  # the first seed's alone decides
        series = runs.series(run_dir)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            if trials.report(number, step, value) and code is None:
                _kill(trial.process)
                reason = {"step": step, "reason": "the study has pruned the trial"}
                write_whole(as_path(run_dir / STOPPED), json.dumps(reason) + "\n")
                trials.prune(number)
                say(f"trial {number} pruned after step {step:,} at {value:.5g}")
                return True
    if code is None:
        return False
    trial.process = None
    code = exit_codes.of_run([code])
    if code in (exit_codes.DONE, exit_codes.ALERTED, exit_codes.DIVERGED):
        return _finish(trials, runs, trial, run_dir, code, say)
    if code == exit_codes.SUPERSEDED:  # another process goes on with it
        return True
    steps = [int(p.name) for p in run_dir.glob("checkpoints/*") if p.name.isdecimal()]
    newest = max(steps, default=-1)
    progress, trial.newest = newest > trial.newest, max(newest, trial.newest)
    again = exit_codes.restart(code, progress, trial.restarts, limit=RESTARTS)
    if again is None:
        why = f"status {code}: {_last_line(runs.folder / OUTPUT / f'{run_dir.name}.txt')}"
        trials.fail(number, why)
        say(f"trial {number} failed with {why}")
        return True
    trial.restarts, pause = again
    trial.start_at = time.monotonic() + pause
    say(f"trial {number} is started again in {pause:.0f} s after status {code}")
    return False


def _finish(
    trials: Trials,
    runs: Runs,
    trial: _Trial,
    run_dir: pathlib.Path,
    code: int,
    say: Callable[[str], None],
) -> bool:
    number = trial.claim.number
    value = math.nan if code == exit_codes.DIVERGED else runs.value(run_dir)
    if value is None:
        trials.fail(number, f"its log has no {runs.metric}")
        say(f"trial {number} failed: its log has no {runs.metric}")
        return True
    trial.values.append(value)
    trial.restarts, trial.newest = 0, -1
    if len(trial.values) < len(runs.seeds):
        return False
    mean = trials.tell(number, trial.values)
    if mean is not None:
        told = " ".join(runs.words(trial.claim.values))
        say(f"trial {number} of {trials.count}: {runs.metric} {mean:.5g} with {told}")
    return True


def _changed(trial: _Trial, run_dir: pathlib.Path) -> bool:
    before, trial.seen = trial.seen, look(run_dir / LOG)
    return trial.seen != before


def _last_line(path: pathlib.Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _check_failures(trials: Trials) -> None:
    ended = [trial for trial in trials.all() if trial.state.is_finished()]
    first = ended[:FIRST_FAILURES]
    if len(ended) == len(first) == FIRST_FAILURES and all(t.state.name == "FAIL" for t in first):
        raise ValueError(
            f"the first {FIRST_FAILURES} trials have failed, the last with "
            f"{first[-1].user_attrs['why']}"
        )


def _kill(process: subprocess.Popen) -> None:
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


def python_command(module: str, flags: Sequence[str]) -> list[str]:
    """The ordinary command of an experiment."""
    return [sys.executable, "-m", module, *flags]
