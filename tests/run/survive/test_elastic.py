"""Real launchers on hosts that come and go: killed, asked to leave, stopped, and started late."""

import contextlib
import os
import signal
import sys

import numpy as np
import pytest

from jaxtrain.host import exit_codes
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.observe.goodput import changes_of_hosts
from jaxtrain.run.observe.report.health import examine
from jaxtrain.run.observe.report.records import read_run
from tests import problems
from tests.run.survive.processes import PATIENCE, WORKER, Process, last_step, logged
from tests.run.test_loop import losses

STEPS = 600
FLAGS = ("--elastic", "--hosts", "1:2", "--processes", "1", "--simulate-devices-per-process", "2")


@contextlib.contextmanager
def hosts(folder, *names, **more):
    """Launchers of one run by name; ``add(name)`` starts one more."""
    started = {}
    run = ["--run-dir", str(folder / "run"), "--steps", str(more.pop("steps", STEPS))]
    run += ["--save-every", "20", "--seconds", "0.1", "--devices", "2"]
    run += ["--exact", str(more.pop("exact", 0)), *more.pop("flags", [])]

    def add(name):
        line = ["-m", "jaxtrain", "launch", *FLAGS, "--", sys.executable, WORKER, *run]
        started[name] = Process(line, folder, name)

    for name in names:
        add(name)
    try:
        yield started, add
    finally:
        for process in started.values():
            process.end()


def params_of(run):
    """The parameters at the end of a run, by path."""
    checkpoints = Checkpointer(run / "checkpoints")
    shapes = problems.jax.eval_shape(problems.init, problems.jax.random.key(0))
    return checkpoints.latest_step(), checkpoints.restore_params(shapes)


def undisturbed(folder, exact):
    """The run that has one host from its beginning to its end."""
    folder.mkdir()
    with hosts(folder, "only", exact=exact) as (started, _):
        assert started["only"].code() == 0, started["only"].errors
    return folder / "run"


def until_on(process, run, number, step=0):
    """Waits until a run has logged steps after ``step`` on so many hosts; returns its last step."""

    def there():
        if last_step(run) <= step + 25:  # and a checkpoint
            return False
        return read_run(run, "run").attempts[-1].costs.get("hosts") == number

    process.until(there)
    assert not process.ended(), process.errors
    return last_step(run)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "exact"), [("first", 0), ("second", 4)])
def test_a_run_of_two_hosts_goes_on_with_one_and_takes_the_other_in_again(tmp_path, lost, exact):
    run = tmp_path / "run"
    with hosts(tmp_path, "one", "two", exact=exact) as (started, add):
        until_on(started["one"], run, 2)
        first = "one" if "[0]" in started["one"].output else "two"
        second = "two" if first == "one" else "one"
        gone, stays = (first, second) if lost == "first" else (second, first)
        started[gone].send(signal.SIGKILL)
        step = until_on(started[stays], run, 1, last_step(run))
        add("again")
        until_on(started[stays], run, 2, step)
        for name in (stays, "again"):
            assert started[name].code() == 0, started[name].errors
    check(run, undisturbed(tmp_path / "whole", exact), [2, 1, 2], exact)


def check(run, other, numbers, exact):
    """A run that hosts have left and come to is one that nobody disturbed: to rounding, and where
    it is exact to the bit."""
    record = read_run(run, "run")
    found, seconds = changes_of_hosts(record.attempts)
    assert found == numbers
    assert 1 < seconds < PATIENCE
    told = f"It ran on {', then '.join(map(str, numbers))} hosts; these changes cost "
    assert any(told in finding.text for finding in examine(record))
    lines = [line for line in logged(run) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert losses(run) == pytest.approx(losses(other), rel=0 if exact else 1e-4, abs=0)
    step, params = params_of(run)
    assert step == STEPS
    for a, b in zip(
        problems.jax.tree.leaves(params), problems.jax.tree.leaves(params_of(other)[1]), strict=True
    ):
        np.testing.assert_allclose(a, b, **({"rtol": 0} if exact else {"rtol": 1e-3, "atol": 1e-4}))


@pytest.mark.slow
def test_a_host_that_is_asked_to_leave_saves_first_and_no_step_is_done_again(tmp_path):
    run = tmp_path / "run"
    with hosts(tmp_path, "one", "two", exact=4) as (started, _):
        until_on(started["one"], run, 2)
        started["two"].send(signal.SIGTERM)
        assert started["two"].code() == exit_codes.PREEMPTED, started["two"].errors
        assert started["one"].code() == 0, started["one"].errors
    assert logged(run)[-1]["run/lost_steps"] == 0
    check(run, undisturbed(tmp_path / "whole", 4), [2, 1], 4)


@pytest.mark.slow
def test_a_host_that_is_stopped_is_gone_and_comes_back_when_it_continues(tmp_path):
    """Launcher and process stand still, as on a machine that is paused."""
    run = tmp_path / "run"
    with hosts(tmp_path, "one", "two") as (started, _):
        until_on(started["one"], run, 2)
        last = max(started, key=lambda name: "[1]" in started[name].output)
        stays = "two" if last == "one" else "one"
        process = int(started[last].output.partition("pid ")[2].split()[0])
        for pid in (started[last].pid, process):
            os.kill(pid, signal.SIGSTOP)
        step = until_on(started[stays], run, 1, last_step(run))
        for pid in (started[last].pid, process):
            os.kill(pid, signal.SIGCONT)
        until_on(started[stays], run, 2, step)
        for process in started.values():
            assert process.code() == 0, process.errors
    check(run, undisturbed(tmp_path / "whole", 0), [2, 1, 2], 0)
