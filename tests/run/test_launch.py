"""The launcher: who its processes are, what it prints, how it ends, when it starts again."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxtrain import cli
from jaxtrain.run import launch
from jaxtrain.run.launch import Group, LaunchOptions, host_counts, process_settings, run_launch
from jaxtrain.run.membership import Lease, Round
from tests.commands import refused

ROOT = pathlib.Path(__file__).parents[2]
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


def test_a_launcher_keeps_memory_for_a_command_that_asks_for_it(capfd):
    show = "import os; print(os.environ['JAXTRAIN_MEMORY'])"
    for flags, wanted in (
        ((), r"\[0\] "),
        (("--memory-every=5",), r"\[0\] 127\.0\.0\.1:\d+/\S{20,}"),
    ):
        assert run_launch(LaunchOptions(processes=1), python(show, *flags)) == 0
        assert re.fullmatch(wanted, capfd.readouterr().out.rstrip("\n"))


def test_hosts_count_on_and_meet_at_the_coordinator():
    second = settings(processes=2, hosts=3, host_index=1, coordinator="host0:1234")
    assert [s["JAXTRAIN_PROCESS_ID"] for s in second] == ["2", "3"]
    assert {s["JAXTRAIN_PROCESSES"] for s in second} == {"6"}
    assert {s["JAXTRAIN_COORDINATOR"] for s in second} == {"host0:1234"}
    alone = settings(processes=2)
    assert alone[0]["JAXTRAIN_COORDINATOR"] == alone[1]["JAXTRAIN_COORDINATOR"]
    assert alone[0]["JAXTRAIN_COORDINATOR"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("hosts", "counts"),
    [(4, (4,)), ("4", (4,)), ("1:4", (1, 2, 4)), ("3:12", (3, 4, 6, 12)), ("4,2,3", (2, 3, 4))],
)
def test_as_many_hosts_train_as_divide_the_most_or_are_named(hosts, counts):
    assert host_counts(LaunchOptions(processes=1, hosts=hosts, elastic=True)) == counts


def test_members_of_a_round_are_told_where_they_stand_in_it():
    round = Round(3, (("a", 2), ("b", 4), ("c", 1)), "10.0.0.1:77", "token")
    options = LaunchOptions(processes=4, hosts="1,2,3", elastic=True)
    second = process_settings(options, {}, round, "b")
    assert [s["JAXTRAIN_PROCESS_ID"] for s in second] == ["2", "3", "4", "5"]
    assert {s["JAXTRAIN_PROCESSES"] for s in second} == {"7"}
    assert {s["JAXTRAIN_COORDINATOR"] for s in second} == {"10.0.0.1:77"}


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
    assert int(only["NPROC"]) >= 16  # threads: a device holds one for each collective it waits in


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
import os, pathlib, signal, sys, time
tries = pathlib.Path(sys.argv[1]) / os.environ["JAXTRAIN_PROCESS_ID"]
done = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (done + 1))
codes = sys.argv[2].split(",")
# Nobody is ended before its try is written down: a file that was only opened counts as none.
while sum(len(each.read_text()) > done for each in tries.parent.iterdir()) < len(codes):
    time.sleep(0.01)
print(done, *sys.argv[2:])
code = int(codes[int(os.environ["JAXTRAIN_PROCESS_ID"])]) if done < int(sys.argv[3]) else 0
if code < 0:
    os.kill(os.getpid(), -code)
# The others notice a little later.
time.sleep(0.2 if code in (77, 134) else 0)
sys.exit(code)
"""


def attempts(folder, codes, *, times, max_restarts, **injected):
    """Runs processes that end with these codes so many times and then with 0."""
    folder.mkdir(exist_ok=True)
    text = ",".join(map(str, codes))
    command = python(COUNTING, folder, text, times, "--run-dir", "r", "--resume")
    options = LaunchOptions(processes=len(codes), max_restarts=max_restarts)
    status = run_launch(options, command, **{"sleep": lambda seconds: None} | injected)
    return status, len((folder / "0").read_text())


@pytest.mark.parametrize(
    ("codes", "status", "restarts"),
    [
        ([-signal.SIGKILL, 77, 77], 137, True),  # a process is killed, the others notice
        ([77, 77, -signal.SIGSEGV], 139, True),
        ([77, 75, 77], 75, True),
        ([76, 77, 134], 76, True),
        ([77, 1, 77], 1, False),  # an error that would come again
        ([-signal.SIGKILL, 2, 77], 2, False),
        ([77, 78, 75], 78, False),
        ([143, 75, 75], 143, False),  # somebody insisted
        ([-signal.SIGTERM, 77, 77], 143, True),  # as it imported, before it could hear
        ([81, 75, 75], 81, False),
    ],
)
def test_all_processes_decide_whether_there_is_a_restart(codes, status, restarts, tmp_path):
    done = attempts(tmp_path / "ends", codes, times=1, max_restarts=2)
    assert done == ((0, 2) if restarts else (status, 1))
    if restarts:
        assert attempts(tmp_path / "stays", codes, times=9, max_restarts=1) == (status, 2)


def test_a_restart_goes_on_where_the_run_was(tmp_path, capfd):
    assert attempts(tmp_path, [75, 75], times=2, max_restarts=3) == (0, 3)
    printed = sorted(capfd.readouterr().out.splitlines())
    for process in range(2):
        assert f"[{process}] 0 75,75 2 --run-dir r --resume" in printed
        for attempt in (1, 2):
            assert f"[{process}] {attempt} 75,75 2 --run-dir r --auto-resume" in printed
    assert len(printed) == 6


def test_pauses_grow_and_restarts_count_anew_after_a_newer_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slept, steps = [], tmp_path / "r" / "checkpoints"
    (steps / "8.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "tries").mkdir()

    def sleep(seconds):
        slept.append(seconds)
        tries, away = len((tmp_path / "tries" / "0").read_text()), steps.with_name("away")
        if tries == 4:  # what the fifth attempt leaves
            (steps / "16").mkdir(exist_ok=True)
        if tries == 6 and steps.exists():  # and what is not seen after the seventh
            steps.rename(away)
        if tries == 7 and away.exists():
            away.rename(steps)

    status = attempts(tmp_path / "tries", [-9], times=99, max_restarts=4, sleep=sleep)
    # Four without progress, one after it, and three more.
    assert status == (137, 9)
    # Between half of 1 + 2 + 4 + 8 seconds twice, and all of it.
    assert 15 <= sum(slept) < 30.1


@pytest.mark.slow
def test_restarts_count_anew_after_a_newer_snapshot_too(tmp_path):
    code = """
import os, pathlib, sys
from jaxtrain.host.keeper import ask
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
step = min(len(tries.read_text()), 4)
ask(os.environ["JAXTRAIN_MEMORY"], "PUT", f"run/snapshots/{step}/state/w", b"")
sys.exit(75)
"""
    command = python(code, tmp_path / "tries", "--run-dir", tmp_path / "r", "--memory-every", 5)
    options = LaunchOptions(processes=1, max_restarts=1)
    assert run_launch(options, command, sleep=lambda seconds: None) == 75
    # Four that each left a newer one, and one that did not.
    assert len((tmp_path / "tries").read_text()) == 5


class Rounds:
    """Hosts that have agreed on rounds beforehand: numbers, and the names of who is in each."""

    def __init__(self, *rounds):
        self.own, self.order, self.broken, self.complete = Lease("a", 1), None, False, False
        self.memories = ("",)
        self.rounds = [
            Round(n, tuple((name, 1) for name in names), "a:1", "token", resumes=n > 1)
            for n, names in rounds
        ]
        self.ended = []

    def agreed(self):
        return self.rounds[len(self.ended)]

    def end(self, pause):
        self.ended.append(pause)

    def done(self):
        self.complete = True


@pytest.mark.parametrize(
    ("code", "rounds", "attempts"),
    [
        (77, [(1, "ab"), (2, "ab")], 1),  # the same hosts, which were to start once
        (77, [(1, "ab"), (2, "a"), (3, "ac"), (4, "ac")], 3),
        (77, [(1, "ab"), (3, "ab"), (4, "ab")], 2),  # it had stood still in round 2
        (75, [(1, "ab"), (2, "ab"), (3, "ab"), (4, "ab")], 4),
        (1, [(1, "ab"), (2, "a")], 1),
        (80, [(1, "ab"), (2, "a")], 1),
    ],
)
def test_restarts_count_with_the_same_hosts_alone(code, rounds, attempts, tmp_path, capfd):
    hosts = Rounds(*rounds)
    options = LaunchOptions(processes=1, hosts="1:2", elastic=True)
    run = launch._Attempts(options, lambda: None, launch._Signals(), lambda seconds: None)
    words = "import os, sys; print(sys.argv[2:], *(os.environ['JAXTRAIN_' + n] for n in ('HOSTS',"
    words += f" 'START'))); sys.exit({code})"
    line = python(words, "x", "--resume")
    with contextlib.suppress(IndexError):  # No further round is agreed on.
        assert launch._run_elastic(run, line, {}, hosts) == code
    printed = capfd.readouterr().out.splitlines()
    assert len(printed) == attempts
    there = len(rounds[0][1])
    assert printed[0] == f"[0] ['--resume'] {there}/2 token"
    assert all("['--auto-resume']" in each for each in printed[1:])


def test_a_storage_that_the_launcher_cannot_look_into_changes_no_status():
    command = python("", "--run-dir", "nowhere://bucket/run")
    assert run_launch(LaunchOptions(processes=1), command) == 0


def test_a_signal_during_the_pause_ends_the_launcher(tmp_path):
    def interrupted(seconds):
        signal.raise_signal(signal.SIGTERM)

    assert attempts(tmp_path, [77], times=9, max_restarts=3, sleep=interrupted) == (77, 1)


def launcher(*flags, code, arguments=(), **more):
    """A launcher in a process of its own."""
    line = [sys.executable, "-m", "jaxtrain", "launch", *flags, "--", *python(code, *arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, cwd=ROOT, env=environment, **piped, text=True, **more)


def alive(pid):
    """Whether there is such a process and it is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
    """Children, and grandchildren: one has left their session, is stopped, has no environment."""
    code = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(wait, start_new_session=True), subprocess.Popen(wait, env={})]
if os.environ["JAXTRAIN_PROCESS_ID"] == "1":
    os.kill(children[0].pid, signal.SIGSTOP)
print("pids", os.getpid(), *(child.pid for child in children), flush=True)
time.sleep(60)
"""
    process = launcher("--processes", "2", code=code)
    pids = []
    try:
        for _ in range(2):
            pids += map(int, process.stdout.readline().split("pids")[1].split())
        assert all(map(alive, pids))
        process.kill()
        process.wait(timeout=10)
        until = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < until:
            time.sleep(0.05)
        assert [pid for pid in pids if alive(pid)] == []
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
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
    flags = ["--processes", "2", "--max-restarts", "3"]
    process = launcher(*flags, code=code, arguments=["--run-dir", "r"])
    try:
        seen = [process.stdout.readline() for _ in range(2)]
        assert all(line.endswith("ready\n") for line in seen), process.stderr.read()
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert sorted(out.splitlines()) == ["[0] saved 1", "[1] saved 1"]
    assert process.returncode == 75


def test_the_others_have_the_longer_time_after_a_preemption_and_not_after_a_loss():
    group = Group([], [])
    for status, term, kill in ((75, 30.0, 60.0), (137, 7.5, 15.0), (1, 0.0, 30.0)):
        assert group._deadlines(status, 0.0, 30.0) == {signal.SIGTERM: term, signal.SIGKILL: kill}
    assert group._deadlines(137, 0.0, 2.0) == {signal.SIGTERM: 1.0, signal.SIGKILL: 2.0}


def test_a_second_signal_kills(monkeypatch):
    group, sent = Group([], []), []
    monkeypatch.setattr(group, "_signal", sent.append)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        group.ask(number)
    assert sent == [signal.SIGINT, signal.SIGKILL, signal.SIGKILL]


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
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


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
            ["--processes", "1", "--hosts", "1:4", "--", "true"],
            "--hosts is 1:4: hosts that may be fewer need --elastic; give it",
        ),
        *(
            (
                ["--processes", "1", "--elastic", "--hosts", hosts, "--", "true"],
                f"--hosts is {hosts}: give a number, LEAST:MOST or numbers with commas",
            )
            for hosts in ("4:1", "0:2", "1:2:3", "1,x", "few", "0")
        ),
        (
            ["--processes", "1", "--elastic", "--hosts", "1:2", "--", "true"],
            "--elastic needs a command with --run-dir",
        ),
        (
            ["--processes", "1", "--elastic", "--host-index", "1", "--", "true"],
            "--host-index is 1 with --elastic: such hosts number themselves; leave it out",
        ),
        (
            ["--processes", "1", "--gpus-per-process", "2", "--", "true"],
            "--gpus-per-process 2 for 1 processes does not fit the 0 GPUs of this host",
        ),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(flags, message, capsys):
    error = refused(capsys, "launch", *flags)
    assert message in error
    assert "Traceback" not in error


def test_gpus_that_cannot_be_dealt_evenly_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert "3 GPUs cannot be dealt evenly to 2 processes" in refused(
        capsys, "launch", "--processes", "2", "--", "true"
    )


def test_flags_after_the_dashes_belong_to_the_command():
    options, command = cli.parse(["launch", "--processes", "2", "--", "a", "--processes", "3"])
    assert options == LaunchOptions(processes=2)
    assert command == ["a", "--processes", "3"]
    assert launch.resumed(["a", "--resume"]) == ["a", "--auto-resume"]


def test_all_attempts_of_a_launch_know_that_they_are_its_own(tmp_path, capfd):
    code = "import os, sys; print(os.environ['JAXTRAIN_START'], *sys.argv[2:]);"
    code += "p = sys.argv[1]; done = os.path.exists(p); open(p, 'w'); sys.exit(0 if done else 75)"
    command = python(code, tmp_path / "file", "--run-dir", "r", "--overwrite")
    for _ in range(2):
        options = LaunchOptions(processes=1, max_restarts=1)
        assert run_launch(options, command, sleep=lambda seconds: None) == 0
        (tmp_path / "file").unlink()
    first, again, *others = capfd.readouterr().out.splitlines()
    assert first == again
    assert first.endswith("--run-dir r --overwrite")
    assert len({first, *others}) == 2
