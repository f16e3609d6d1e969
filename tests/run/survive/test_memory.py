"""Hosts that are killed between two saves: the others continue from what is left in memory.

Each launcher keeps its own memory, which ends with it, so what a lost host held comes from the copy
of its neighbour.
"""

import contextlib
import json
import signal
import sys

import numpy as np
import pytest

from jaxtrain.run.observe.goodput import lost_steps
from jaxtrain.run.observe.report.health import examine
from jaxtrain.run.observe.report.records import read_run
from tests import problems
from tests.run.survive.processes import WORKER, Process, free_port, last_step
from tests.run.survive.test_elastic import hosts, params_of, until_on
from tests.run.test_loop import losses

pytestmark = pytest.mark.slow

EVERY, STEPS = 5, 200
FLAGS = ["--fsdp", "--memory-every", str(EVERY), "--steps", str(STEPS)]


def events(run, name):
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def has_the_bits_of(run, other):
    assert losses(run) == losses(other)
    (step, params), (_, others) = params_of(run), params_of(other)
    assert step == STEPS
    for a, b in zip(*map(problems.jax.tree.leaves, (params, others)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_host_is_lost_and_the_other_continues_from_memory_to_the_same_bits(tmp_path):
    run = tmp_path / "run"
    with hosts(tmp_path, "one", "two", exact=4, flags=[*FLAGS, "--save-every", "0"]) as (both, _):
        until_on(both["one"], run, 2)
        both["two"].send(signal.SIGKILL)
        assert both["one"].code() == 0, both["one"].errors
    (read,) = events(run, "read from memory")
    record = read_run(run, "run")
    assert [each.costs["hosts"] for each in record.attempts] == [2, 1]
    assert read["newest_checkpoint"] is None
    assert lost_steps(record.attempts)[0] < 2 * EVERY  # those of a snapshot that was being written
    assert record.attempts[1].first == read["step"] > 15
    told = f"1 time from the memory of its hosts, not storage: {read['step']} steps ("
    assert any(told in finding.text for finding in examine(record))
    (tmp_path / "whole").mkdir()
    with hosts(tmp_path / "whole", "only", exact=4, flags=FLAGS) as (alone, _):
        assert alone["only"].code() == 0, alone["only"].errors
    has_the_bits_of(run, tmp_path / "whole" / "run")


@contextlib.contextmanager
def fixed(folder):
    """Two launchers that restart their process; ``start(host)`` starts one by its number."""
    started, port = {}, free_port()

    def start(host):
        flags = ["--processes", "1", "--simulate-devices-per-process", "2", "--max-restarts", "3"]
        flags += ["--hosts", "2", "--host-index", str(host), "--coordinator", f"127.0.0.1:{port}"]
        command = [sys.executable, WORKER, "--run-dir", str(folder / "run"), "--devices", "2"]
        command += [*FLAGS, "--save-every", "20", "--seconds", "0.1", "--auto-resume"]
        line = ["-m", "jaxtrain", "launch", *flags, "--", *command]
        started[host] = Process(line, folder, f"host-{host}-{len(list(folder.glob('*.err')))}")

    try:
        for host in (0, 1):
            start(host)
        yield started, start
    finally:
        for process in started.values():
            process.end()


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
def test_launchers_that_are_killed_and_started_again(tmp_path, lost):
    """One finds the state in the memory of the other; of both nothing is left but storage."""
    run = tmp_path / "run"
    with fixed(tmp_path) as (started, start):
        started[0].until(lambda: last_step(run) >= 33)
        for host in lost:
            started[host].send(signal.SIGKILL)
        for host in lost:
            started[host].end()
            start(host)
        for process in started.values():
            assert process.code() == 0, process.errors
    attempts, read = read_run(run, "run").attempts, events(run, "read from memory")
    again = attempts[-1].first
    if len(lost) == 2:
        assert (again % 20, read) == (0, [])
    else:
        assert again == read[-1]["step"] > read[-1]["newest_checkpoint"]
        assert lost_steps(attempts)[0] < 2 * EVERY
