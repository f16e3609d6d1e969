"""The launcher: who its processes are, what it prints, how it ends, when it starts again."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxtrain import cli, launch
from jaxtrain.launch import LaunchOptions, process_settings, run_launch

ROOT = pathlib.Path(__file__).parents[1]
# Says who it is, and does what its arguments tell it: INDEX STATUS SECONDS ...
WHO = (
    "import os; print('I am', *(os.environ['JAXTRAIN_' + n] for n in ('PROCESS_ID', 'PROCESSES')))"
)


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def settings(environ=None, **options):
    return process_settings(LaunchOptions(**options), environ or {})


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def test_processes_are_told_who_they_are_and_their_lines_are_prefixed(capfd):
    assert run_launch(LaunchOptions(processes=3), python(WHO)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{i}] I am {i} 3" for i in range(3)]


def test_hosts_count_on_and_meet_at_the_coordinator():
    second = settings(processes=2, hosts=3, host_index=1, coordinator="host0:1234")
    assert [s["JAXTRAIN_PROCESS_ID"] for s in second] == ["2", "3"]
    assert {s["JAXTRAIN_PROCESSES"] for s in second} == {"6"}
    assert {s["JAXTRAIN_COORDINATOR"] for s in second} == {"host0:1234"}
    alone = settings(processes=2)
    assert alone[0]["JAXTRAIN_COORDINATOR"] == alone[1]["JAXTRAIN_COORDINATOR"]
    assert alone[0]["JAXTRAIN_COORDINATOR"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("options", "visible", "wanted"),
    [
        ({"processes": 4}, "0,1,2,3,4,5,6,7", ["0,1", "2,3", "4,5", "6,7"]),
        ({"processes": 2}, "3,5", ["0", "1"]),  # counted among those that are seen
        ({"processes": 2, "gpus_per_process": 1}, "0,1,2,3", ["0", "1"]),
        ({"processes": 2, "gpus_per_process": 0}, "0,1", [None, None]),
        ({"processes": 1}, "0,1", [None]),
        ({"processes": 2, "simulate_devices_per_process": 4}, "0,1", [None, None]),
        ({"processes": 2}, "", [None, None]),
    ],
)
def test_each_process_has_its_own_gpus(options, visible, wanted):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    got = [s.get("JAXTRAIN_LOCAL_DEVICE_IDS") for s in settings(environ, **options)]
    assert got == wanted


def test_simulated_devices_are_those_of_the_cpu():
    (only,) = settings(processes=1, simulate_devices_per_process=4)
    assert (only["JAX_PLATFORMS"], only["JAX_NUM_CPU_DEVICES"]) == ("cpu", "4")


def test_when_one_fails_all_are_ended_and_its_status_is_passed_on(capfd, tmp_path):
    code = """
import os, sys, time
if os.environ["JAXTRAIN_PROCESS_ID"] == "1":
    time.sleep(0.3)
    sys.exit(7)
time.sleep(60)
"""
    start = time.monotonic()
    assert run_launch(LaunchOptions(processes=3), python(code)) == 7
    assert time.monotonic() - start < 20
    assert "[launch] process 1 ended with status 7; the others are ended" in capfd.readouterr().err


def test_whoever_ignores_sigterm_is_killed_after_the_grace_time(capfd):
    code = """
import os, signal, sys, time
if os.environ["JAXTRAIN_PROCESS_ID"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: print("not me"))
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.1)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    start = time.monotonic()
    status = run_launch(LaunchOptions(processes=2, grace_seconds=0.5), python(code))
    assert status == 128 + signal.SIGSEGV
    assert 1 < time.monotonic() - start < 20
    assert "[0] not me" in capfd.readouterr().out


COUNTING = """
import os, pathlib, sys
tries = pathlib.Path(sys.argv[1]) / os.environ["JAXTRAIN_PROCESS_ID"]
done = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (done + 1))
print(done, *sys.argv[2:])
sys.exit(0 if done == int(sys.argv[2]) else int(sys.argv[3]))
"""


@pytest.mark.parametrize("status", [75, 76, 77])
def test_a_preempted_run_is_started_again_to_go_on_where_it_was(status, tmp_path, capfd):
    command = python(COUNTING, tmp_path, 2, status, "--run-dir", "r", "--overwrite")
    assert run_launch(LaunchOptions(processes=2, max_restarts=3), command) == 0
    printed = sorted(capfd.readouterr().out.splitlines())
    same = f"2 {status} --run-dir r"
    for process in range(2):
        assert f"[{process}] 0 {same} --overwrite" in printed
        for attempt in (1, 2):
            assert f"[{process}] {attempt} {same} --auto-resume" in printed
    assert len(printed) == 6


def test_restarts_are_limited_and_only_for_what_may_be_resumed(tmp_path, capfd):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    command = python(COUNTING, tmp_path / "a", 9, 75, "--run-dir", "r")
    assert run_launch(LaunchOptions(processes=1, max_restarts=2), command) == 75
    assert len((tmp_path / "a" / "0").read_text()) == 3
    command = python(COUNTING, tmp_path / "b", 9, 1, "--run-dir", "r")
    assert run_launch(LaunchOptions(processes=1, max_restarts=2), command) == 1
    assert len((tmp_path / "b" / "0").read_text()) == 1
    capfd.readouterr()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once_and_no_restart_follows(number, tmp_path):
    code = f"""
import signal, sys, time
times = 0
def save(number, frame):
    global times
    times += 1
signal.signal({int(number)}, save)
print("ready", flush=True)
while not times:
    time.sleep(0.05)
time.sleep(0.3)
print("saved", times, flush=True)
sys.exit(75)
"""
    line = [sys.executable, "-m", "jaxtrain", "launch", "--processes", "2", "--max-restarts", "3"]
    line += ["--", *python(code, "--run-dir", "r")]
    launcher = subprocess.Popen(
        line,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        seen = [launcher.stdout.readline() for _ in range(2)]
        assert all(line.endswith("ready\n") for line in seen), launcher.stderr.read()
        launcher.send_signal(number)
        out, _ = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert sorted(out.splitlines()) == ["[0] saved 1", "[1] saved 1"]
    assert launcher.returncode == 75


def test_nothing_that_a_process_started_is_left(tmp_path):
    """A shell ends at SIGTERM and leaves its child, which does not, to the launcher."""
    code = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""
    child = " ".join([sys.executable, "-c", f"'{code}'", str(tmp_path / "pid")])
    shell = f"{child} & while [ ! -s {tmp_path}/pid ]; do sleep 0.1; done; exit 3"
    assert run_launch(LaunchOptions(processes=1), ["bash", "-c", shell]) == 3
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        if pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes", "2"], "there is no command to launch: write it after --"),
        (["--processes", "0", "--", "true"], "--processes is 0: give at least 1"),
        (["--processes", "1", "--hosts", "2", "--", "true"], "give --coordinator HOST:PORT"),
        (
            ["--processes", "1", "--host-index", "1", "--", "true"],
            "--host-index 1 is not one of 1 hosts",
        ),
        (
            ["--processes", "1", "--coordinator", "host", "--", "true"],
            "coordinator 'host' is not of the form HOST:PORT",
        ),
        (
            ["--processes", "1", "--max-restarts", "1", "--", "true"],
            "needs a command with --run-dir",
        ),
        (["--processes", "1", "--", "/no/such/program"], "/no/such/program"),
        (
            ["--processes", "1", "--gpus-per-process", "2", "--", "true"],
            "--gpus-per-process 2 for 1 processes does not fit the 0 GPUs of this host",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(flags, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["launch", *flags])
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_gpus_that_cannot_be_dealt_evenly_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["launch", "--processes", "2", "--", "true"])
    assert "3 GPUs cannot be dealt evenly to 2 processes" in capsys.readouterr().err


def test_flags_after_the_dashes_belong_to_the_command():
    options, command = cli.parse(["launch", "--processes", "2", "--", "a", "--processes", "3"])
    assert options == LaunchOptions(processes=2)
    assert command == ["a", "--processes", "3"]
    assert launch.resumed(["a", "--resume"]) == ["a", "--auto-resume"]
