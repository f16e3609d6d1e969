"""Several real processes, and what they do when one is asked to stop, dies, hangs or fails."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jaxtrain import data
from jaxtrain.host import exit_codes
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from tests import problems
from tests.run.survive.processes import (
    WORKER,
    Process,
    free_port,
    last_step,
    launched,
    logged,
    pids,
    workers,
)

MANY = ("--steps", "100000")


def wait_for_step(process, run, step):
    process.until(lambda: last_step(run) >= step)
    assert not process.ended(), process.errors


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "survivor"), [(1, 0), (0, 1)])
def test_when_a_process_is_killed_the_other_ends_and_says_which(tmp_path, victim, survivor):
    run = tmp_path / "run"
    with workers(tmp_path, *MANY, "--save-every", "5", count=2, devices=2) as processes:
        wait_for_step(processes[0], run, 12)
        processes[victim].send(signal.SIGKILL)
        killed_at = time.monotonic()
        code = processes[survivor].code(timeout=60)
        assert time.monotonic() - killed_at < 60
        if victim == 0 and code == -signal.SIGABRT:
            # Process 0 holds JAX's coordination service; without it JAX aborts, now and then before
            # our sentence is out, with one of its own.
            assert "another task died" in processes[survivor].errors
        else:
            assert code == exit_codes.PEER_LOST
            assert f"process {victim} of 2 (host " in processes[survivor].errors
            assert ") has died: its connection closed" in processes[survivor].errors
    assert Checkpointer(run / "checkpoints").latest_step() >= 5


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_saved_step_and_the_run_goes_on(tmp_path):
    run = tmp_path / "run"
    with workers(tmp_path, *MANY, "--slow-process", "1", count=2, devices=2) as processes:
        wait_for_step(processes[0], run, 8)
        processes[1].send(signal.SIGTERM)
        assert [p.code() for p in processes] == [exit_codes.PREEMPTED] * 2, processes[0].errors
        assert "SIGTERM: finishing the step in flight and saving it" in processes[1].errors
        assert "Traceback" not in processes[0].errors + processes[1].errors
        stopped = int(re.search(r"stopped after step (\d+)", processes[0].output).group(1))
    assert Checkpointer(run / "checkpoints").latest_step() == stopped
    # Who is slow is in the log: the two wait for each other, and one of them for its data.
    compared = [line for line in logged(run) if "time/slowest_process" in line]
    slowest = [line["time/slowest_process"] for line in compared]
    assert slowest.count(1) > len(slowest) / 2
    assert all(line["time/step_seconds_spread"] >= 0 for line in compared)
    # Step by step it is the run that nobody stopped.
    more = str(stopped + 3)
    with workers(tmp_path, "--steps", more, "--resume", count=2, devices=2) as processes:
        assert [p.code() for p in processes] == [0, 0], processes[0].errors
        digest = processes[0].output.splitlines()[-1]
    other = tmp_path / "whole"
    other.mkdir()
    with workers(other, "--steps", more, count=2, devices=2) as processes:
        assert [p.code() for p in processes] == [0, 0], processes[0].errors
        assert processes[0].output.splitlines()[-1] == digest
        assert digest.startswith("digest ")
    # A metric that is an array is that of the whole batch, whoever has its rows.
    batch = problems.make_batch(0, rows=64)
    order = data.Batches(
        [{k: v[i] for k, v in batch.items()} for i in range(64)], global_batch=8, seed=0
    )
    for line in [x for x in logged(other / "run") if "train/loss" in x]:
        rows = [order.source_index(8 * (line["step"] - 1) + i) for i in range(8)]
        expected = batch["x"][rows].sum(0) / batch["mask"][rows].sum()
        assert line["train/columns"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_hook_of_one_process_ends_all_at_one_step_and_no_restart_trains_on(tmp_path):
    run = tmp_path / "run"
    arguments = (*MANY, "--eval-batches", "2", "--auto-resume")
    for ending in (("--end-at", "3"), ()):
        with workers(tmp_path, *arguments, *ending, count=2, devices=1) as processes:
            assert [p.code() for p in processes] == [0, 0], processes[0].errors
            stopped = int(re.search(r"on purpose after step (\d+)", processes[0].output).group(1))
            assert stopped >= 3
            assert "it is late" in processes[0].output
            digests = {p.output.splitlines()[-1] for p in processes}
        assert Checkpointer(run / "checkpoints").latest_step() == stopped == last_step(run)
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words", "code"),
    [("--raise-at", "KeyError: 'a hole in the hook'", 1), ("--exit-at", "SystemExit: 3", 3)],
)
def test_a_hook_that_ends_one_process_ends_the_others_with_its_words(tmp_path, way, words, code):
    with workers(tmp_path, "--steps", "100", way, "6", count=2, devices=1) as processes:
        codes = [p.code(timeout=60) for p in processes]
        assert codes[0] == 1
        assert codes[1] in (code, -signal.SIGABRT)  # as below
        assert "process 1 of 2 (host " in processes[0].errors
        assert f"has ended with {words}" in processes[0].errors


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_all_and_the_run_can_be_started_again(tmp_path):
    arguments = (*MANY, "--start-seconds", "2")
    with workers(tmp_path, *arguments, count=2, devices=1) as processes:
        for process in processes:
            process.until(lambda process=process: "starting" in process.output)
        processes[1].send(signal.SIGTERM)
        codes = [p.code(timeout=60) for p in processes]
        assert codes[1] == exit_codes.PREEMPTED, processes[1].errors
        assert "SIGTERM outside of training: nothing is to be saved" in processes[1].errors
        assert codes[0] == exit_codes.PEER_LOST, processes[0].errors
    assert exit_codes.restartable(exit_codes.of_run(codes))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loop", "end"])
def test_a_signal_in_an_evaluation_stops_all_processes_in_it(tmp_path, where):
    """In no order that has one wait for a batch that another has left out."""
    run = tmp_path / "run"
    long = ("--eval-batches", "1000000", "--seconds", "0.005", "--slow-process", "0")
    steps = ("--steps", "4", *(("--eval-every", "2") if where == "loop" else ()))
    with workers(tmp_path, *steps, *long, count=2, devices=2) as processes:
        processes[1].until(lambda: "evaluating 7" in processes[1].output)
        processes[1].send(signal.SIGTERM)
        codes = [p.code(timeout=60) for p in processes]
        assert codes == [exit_codes.PREEMPTED] * 2, processes[0].errors
        step = 2 if where == "loop" else 4
        assert f"evaluation after step {step} left out" in processes[0].output
        assert f"stopped after step {step}" in processes[0].output
    assert Checkpointer(run / "checkpoints").latest_step() == step
    short = ("--eval-batches", "3", "--seconds", "0.005")
    with workers(tmp_path, *steps, *short, "--resume", count=2, devices=2) as processes:
        assert [p.code() for p in processes] == [0, 0], processes[0].errors
        assert "step 4: held-out loss" in processes[0].output


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_others_with_its_words(tmp_path):
    arguments = ("--steps", "100", "--fail-at", "6")
    with workers(tmp_path, *arguments, count=2, devices=1) as processes:
        codes = [p.code(timeout=60) for p in processes]
        assert codes[0] == 1  # as the other: a start anew would come to the same error
        # While Python ends, JAX waits for the others to end too, and aborts when they are gone.
        assert codes[1] in (1, -signal.SIGABRT)
        assert "KeyError: 'a hole in the data'" in processes[1].errors
        assert "process 1 of 2 (host " in processes[0].errors
        assert "has ended with KeyError: 'a hole in the data'" in processes[0].errors


@pytest.mark.slow
def test_a_process_that_falls_silent_is_noticed_within_a_minute(tmp_path):
    """Like a host that is gone, it closes no connection; and it answers no signal but SIGKILL."""
    with launched(tmp_path, *MANY, count=2) as launcher:
        wait_for_step(launcher, tmp_path / "run", 5)
        os.kill(pids(launcher)[1], signal.SIGSTOP)
        start = time.monotonic()
        assert launcher.code(timeout=80) == exit_codes.PEER_LOST
        assert time.monotonic() - start < 60
        assert "has died: nothing was heard of it for 40 s" in launcher.errors


@pytest.mark.slow
def test_a_launched_run_of_which_one_process_is_killed_starts_again_and_is_completed(tmp_path):
    run = tmp_path / "run"
    arguments = ("--steps", "40", "--save-every", "5", "--global-batch", "12")
    with launched(tmp_path, *arguments, count=3, restarts=1) as launcher:
        wait_for_step(launcher, run, 12)
        os.kill(pids(launcher)[1], signal.SIGKILL)
        assert launcher.code() == 0, launcher.errors
        said = r"process 1 of 3 \(host .*\) has died: its connection closed; process [02] cannot"
        assert len(re.findall(said, launcher.errors)) == 2
        # The others may have ended by themselves before the launcher looks.
        assert "[launch] process 1 ended with status 137" in launcher.errors
        assert "(1 of 1 restarts without progress)" in launcher.errors
        # One state in all of them.
        digests = set(re.findall(r"^\[\d\] (digest .*)$", launcher.output, re.MULTILINE))
        assert len(digests) == 1
    assert [line["step"] for line in logged(run) if "train/loss" in line] == list(range(1, 41))


@pytest.mark.slow
def test_joining_the_others_does_not_take_sigterm_away(tmp_path):
    code = """
import time
from jaxtrain.host import distributed
from jaxtrain.run.survive.preemption import ending_at_sigterm
with ending_at_sigterm():
    distributed.initialize()
    print("joined", flush=True)
    time.sleep(60)
"""
    flags = ["-m", "jaxtrain", "launch", "--processes", "2", "--simulate-devices-per-process", "1"]
    launcher = Process([*flags, "--", sys.executable, "-c", code], tmp_path, "launcher")
    try:
        launcher.until(lambda: launcher.output.count("joined") == 2)
        launcher.send(signal.SIGTERM)
        assert launcher.code(timeout=20) == exit_codes.PREEMPTED
        assert launcher.errors.count("SIGTERM outside of training") == 2
    finally:
        launcher.end()


def test_a_hang_ends_the_run_with_every_threads_stack_and_the_step(tmp_path):
    arguments = ("--steps", "100", "--hang-at", "5", "--hang-seconds", "2")
    with workers(tmp_path, *arguments) as [process]:
        assert process.code() == exit_codes.HUNG
        # Batch 5 is that of step 6, which is never dispatched.
        said = "process 0 hangs after the dispatch of step 5: nothing has ended for"
        assert said in process.errors
        assert "train_worker.py" in process.errors  # where the thread that reads data stands
        assert "train_loop" in process.errors
    stacks = (tmp_path / "run" / "hang-process-0.txt").read_text()
    assert "thread MainThread" in stacks
    assert "in train_loop" in stacks


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_harms_no_checkpoint(tmp_path):
    run = tmp_path / "run"
    # A batch that never comes: the step in flight does not end, nor does the run for the first.
    arguments = ("--steps", "100", "--save-every", "2", "--hang-at", "7")
    with workers(tmp_path, *arguments) as [process]:
        wait_for_step(process, run, 6)
        process.send(signal.SIGINT)
        process.until(lambda: "SIGINT: finishing the step" in process.errors)
        time.sleep(1.2)  # longer than what counts as one and the same request
        assert not process.ended()
        process.send(signal.SIGINT)
        assert process.code() == 128 + signal.SIGINT
        assert "SIGINT again: stopping at once" in process.errors
    assert Checkpointer(run / "checkpoints").latest_step() in (6, 7)  # 7 where it came before that
    with workers(tmp_path, "--steps", "9", "--resume") as [process]:
        assert process.code() == 0, process.errors


@pytest.mark.slow
def test_a_folder_that_a_host_does_not_share_is_said_before_the_training(tmp_path):
    """The second process has a file system of its own in the place of the run's folder."""
    hidden = 'mount -t tmpfs none $0 && exec "$@"'
    enter = ["unshare", "-m", "sh", "-c", hidden, str(tmp_path / "shared")]
    (tmp_path / "shared").mkdir()
    allowed = shutil.which("unshare") and not subprocess.run([*enter, "true"]).returncode
    if not allowed:
        pytest.skip("a mount of its own for one process needs root")
    port = str(free_port())
    worker = [WORKER, str(tmp_path / "shared" / "run"), "--processes", "2", "--port", port]
    alone = (
        f"import os; os.execvp('unshare', {[*enter, sys.executable, *worker, '--process', '1']})"
    )
    processes = [
        Process([*worker, "--process", "0"], tmp_path, "0"),
        Process(["-c", alone], tmp_path, "1"),
    ]
    try:
        assert [p.code() for p in processes] != [0, 0]
        for process in processes:
            assert "process 1 does not see what process 0 writes in " in process.errors
            assert "give a `run_dir` that all hosts share" in process.errors
        assert last_step(tmp_path / "shared" / "run") == 0
    finally:
        for process in processes:
            process.end()
