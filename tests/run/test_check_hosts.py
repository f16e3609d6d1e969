"""`jaxtrain check-hosts` in processes of its own, which compute together over gloo."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxtrain.host.links import KINDS, read_links
from jaxtrain.planning.hlo import read_program
from jaxtrain.run import check_hosts
from tests.commands import refused, run
from tests.run.survive.processes import Process, free_port

# A host of its own, as its name says, and what else is not as it should be.
PROGRAM = """
import os, socket, sys
name, lag, *arguments = sys.argv[1:]
socket.gethostname = lambda: name
from jaxtrain import cli
from jaxtrain.host import roll_call
now = roll_call.time.time
roll_call.answer.__kwdefaults__["clock"] = lambda: now() + float(lag)
sys.exit(cli.main(["check-hosts", *arguments]))
"""


def check(folder, hosts, processes, *flags, lag="0"):
    """Runs a process on each of these hosts; returns the exit statuses, and what all have said."""
    address = f"127.0.0.1:{free_port()}"
    started = []
    for index, host in enumerate(hosts):
        given = ["--coordinator", address, "--processes", str(processes)]
        given += ["--process-id", str(index), *flags]
        arguments = ["-c", PROGRAM, host, lag if index else "0", *given]
        started.append(Process(arguments, folder, f"process-{index}"))
    try:
        codes = [process.code() for process in started]
    finally:
        for process in started:
            process.end()
    return codes, started


@pytest.mark.slow
def test_where_jax_alone_knows_process_0_it_connects_first(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", str(free_port()))  # JAX makes its port of it
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    started = []
    for task in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", task)
        monkeypatch.setenv("SLURM_LOCALID", task)
        arguments = ["-c", PROGRAM, f"host{task}", "0", "--sizes", "1024", "65536"]
        started.append(Process(arguments, tmp_path, f"task-{task}"))
    try:
        codes = [process.code() for process in started]
    finally:
        for process in started:
            process.end()
    assert codes == [0, 0], started[0].errors + started[1].errors
    assert "process 1 on host1, clock" in started[0].output
    assert "between hosts" in started[0].output


@pytest.mark.slow
def test_two_hosts_are_measured_and_a_clock_is_wrong(tmp_path):
    out = tmp_path / "links.json"
    flags = ["--sizes", "1024", "65536", "4194304", "--out", str(out)]
    codes, (first, other) = check(tmp_path, ["a", "b"], 2, *flags, lag="9")
    assert codes == [1, 1], first.errors + other.errors
    assert "WRONG: the clock of process 1 on b is +9.0" in first.output
    assert first.output.count("WRONG") == 1
    assert "WRONG" not in other.output
    found = read_links(out)
    (between,) = found.links  # one device on each host: nothing lies within
    assert between == "between"
    assert set(found.links[between]) == set(KINDS)
    for link in found.links[between].values():
        assert link.seconds < 1
        assert 1e5 < link.bytes_per_s < 1e11
    rows = [line.split() for line in first.output.splitlines() if "between hosts" in line]
    assert [row[2] for row in rows] == list(KINDS)


@contextlib.contextmanager
def slowed(pid):
    """Stops a process five sixths of the time."""
    done = threading.Event()

    def slow():
        with contextlib.suppress(ProcessLookupError):
            while not done.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.05)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_a_slow_process_is_measured_and_a_training_by_its_share_has_the_plain_ones_loss(tmp_path):
    def two(name, *arguments):
        """Two processes, of which the second is slow; returns what the first has printed."""
        address = f"127.0.0.1:{free_port()}"
        at = [["--coordinator", address, "--processes", "2", "--process-id", n] for n in "01"]
        started = [
            Process([*arguments, *of_one], tmp_path, f"{name}-{n}") for n, of_one in enumerate(at)
        ]
        try:
            with slowed(started[1].pid):
                codes = [process.code() for process in started]
        finally:
            for process in started:
                process.end()
        assert codes == [0, 0], started[0].errors + started[1].errors
        return started[0].output

    told = two("hosts", "-m", "jaxtrain", "check-hosts", "--sizes", "1024", "65536")
    (shares,) = re.findall(r"process 1 is slowest: --row-shares (\S+) 1 has", told)
    assert 1.2 < float(shares) < 20
    small = "--layers 1 --width 16 --heads 2 --seq-len 16 --steps 4 --accumulate 4 --dropout 0"
    small += " --held-out-bytes 3000 --sample-tokens 0 --global-batch 16"
    losses = []
    for name, more in (("plain", []), ("shares", ["--row-shares", shares, "1"])):
        folder = ["--run-dir", str(tmp_path / name)]
        two(name, "-m", "experiments.gpt", *small.split(), *more, *folder)
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append([each["eval/loss"] for each in map(json.loads, lines) if "eval/loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_process_that_never_comes_is_named(capsys):
    address = f"127.0.0.1:{free_port()}"
    flags = ["--coordinator", address, "--processes", "2", "--process-id", "0", "--seconds", "1"]
    status, out, err = run(capsys, "check-hosts", *flags)
    assert (status, err) == (1, "")
    assert f"WRONG: process 1 did not come to {address} within 1 s" in out
    assert "nothing was measured" in out
    flags[5] = "1"
    status, out, err = run(capsys, "check-hosts", *flags)
    assert (status, out) == (1, "")
    assert f"cannot talk to process 0 at {address}" in err


def test_one_device_has_no_links(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "devices", lambda: [jax.local_devices()[0]])
    monkeypatch.setattr(check_hosts, "_SECONDS", 0.01)
    status, out, _ = run(capsys, "check-hosts", "--out", str(tmp_path / "links.json"))
    assert (status, out.splitlines()[-2]) == (0, "one device: it has no links to measure")
    assert re.fullmatch(r"products, each device: ([\d.]+) to \1 GFLOP/s", out.splitlines()[-1])
    assert read_links(tmp_path / "links.json").links == {}


def test_sizes_that_tell_no_slope_are_refused(capsys):
    assert "--sizes is (8,): give at least two" in refused(capsys, "check-hosts", "--sizes", "8")


def test_processes_with_other_devices_are_named():
    devices = [SimpleNamespace(process_index=p, device_kind="H") for p in (0, 0, 1, 1, 2)]
    assert check_hosts._uneven(devices[:4]) is None
    assert check_hosts._uneven(devices) == (
        "process 2 has 1 H and the others have 2 H: give all hosts the same devices"
    )


@pytest.mark.parametrize(("axis", "group"), [("data", 2), ("fsdp", 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_program_has_its_collective_alone(kind, axis, group):
    """As compiled: XLA has neither left it out nor made another of it."""
    mesh = check_hosts.make_links_mesh(2)
    assert (mesh.shape["data"], mesh.shape["fsdp"]) == (2, 4)
    program, x, sent = check_hosts.make_program(mesh, axis, kind, 4096)
    share = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1.0}
    assert sent == 4096 * share.get(kind, (group - 1) / group)
    text = program.lower(x, np.int32(1)).compile().as_text()
    (found,) = read_program(text, mesh).collectives
    assert (found.kind, found.axes, found.sent) == (kind, (axis,), sent)
