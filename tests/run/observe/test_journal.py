"""The journal: what happened over all attempts, and where their time went."""

import ast
import json
import pathlib
import threading
import time
import types

import numpy as np
import pytest
from etils import epath

import jaxtrain as jt
from jaxtrain.run import loop
from jaxtrain.run.folder import lock_run_dir
from jaxtrain.run.observe import goodput, journal
from jaxtrain.run.observe.goodput import Attempt
from jaxtrain.run.observe.journal import Journal, read_events
from jaxtrain.run.observe.report import health, records
from jaxtrain.run.observe.report.command import leave_report
from tests.run.survive.processes import last_step
from tests.run.survive.test_kill import start
from tests.run.test_loop import make_experiment


def lines(run, name=journal.EVENTS):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def accounted(run):
    found = goodput.attempts(
        journal.states(
            journal.read_events(epath.Path(run)), journal.read_heartbeat(epath.Path(run))
        )
    )
    return found, goodput.account(found)


def test_time_goes_to_one_activity_at_a_time_and_steps_done_again_are_lost():
    first = Attempt(1, 100.0, 160.0, {"init": 10.0, "step": 50.0}, 0, 100, None)
    second = Attempt(2, 170.0, 200.0, {"restore": 10.0, "step": 20.0}, 80, 120, None)
    # The third found the checkpoints of both after step 60 damaged.
    third = Attempt(3, 200.0, 240.0, {"step": 40.0}, 60, 140, "done")
    assert goodput.lost_steps([first, second, third]) == [40, 40, 0]
    assert goodput.account([first, second, third]) == {
        "init": 10.0,
        "restore": 10.0,
        "step": pytest.approx(30 + 0 + 40),
        "lost steps": pytest.approx(20 + 20),
        "down": 10.0,
    }


def test_energy_is_read_or_bounded_and_lost_steps_have_their_cost():
    seconds = {"init": 600.0, "step": 2400.0, "evaluation": 600.0}
    chips = {"chips": 8, "watts": 700, "price": 2.0}
    read = Attempt(1, 0.0, 3600.0, seconds, 0, 100, None, chips | {"kwh": 3.0, "sent": 1.0})
    bounded = Attempt(2, 3600.0, 7200.0, seconds, 75, 175, "done", chips | {"cpu_kwh": 0.5})
    assert goodput.spent([read, bounded]) == {
        "chip-hours": pytest.approx(16),
        "cost": pytest.approx(32),
        "cost lost": pytest.approx(8 * 2 * 2400 / 3600 / 4),  # a quarter of the first one's steps
        "kWh": 3.0,
        "kWh at most": pytest.approx(8 * 700 / 1000),
        "CPU kWh": 0.5,
    }
    moved = {"disk_read": 5.0, "network_sent": 1.0}
    assert goodput.moved([Attempt(1, 0, 1, {}, 0, 1, None, moved), read]) == {
        "disk read": 5.0,
        "network sent": 1.0,
    }


def test_changes_of_hosts_cost_the_time_until_the_first_step_and_that_of_steps_done_again():
    seconds = {"init": 10.0, "restore": 2.0, "compile": 8.0, "step": 50.0}
    first = Attempt(1, 100.0, 170.0, seconds, 0, 100, None, {"hosts": 4})
    second = Attempt(2, 200.0, 270.0, seconds, 80, 180, None, {"hosts": 2})
    same = Attempt(3, 290.0, 360.0, seconds, 100, 200, None, {"hosts": 2})
    back = Attempt(4, 361.0, 431.0, seconds, 200, 300, "done", {"hosts": 4})
    found, cost = goodput.changes_of_hosts([first, second, same, back])
    assert found == [4, 2, 4]
    assert cost == (30 + 20 + 20 / 100 * 50) + (1 + 20)
    assert goodput.changes_of_hosts([second, same]) == ([], 0.0)


@pytest.mark.slow
def test_every_record_says_when_which_attempt_and_where_and_restarts_are_counted(tmp_path):
    run = tmp_path / "run"
    options = jt.RunOptions(run_dir=str(run), log_every=1, save_every=2)
    jt.fit(make_experiment(4), options)
    jt.fit(make_experiment(6), jt.RunOptions(run_dir=str(run), resume=True, log_every=1))
    events, log = lines(run), lines(run, "log.jsonl")
    for line in [*events, *log]:
        assert line["time"].endswith("+00:00")
        assert (line["process"], bool(line["host"])) == (0, True)
    assert [line["attempt"] for line in log if "train/loss" in line] == [1] * 4 + [2] * 2
    saved = [(e["attempt"], e["step"]) for e in events if e["event"] == "checkpoint"]
    assert saved == [(1, 2), (1, 4), (2, 6)]
    sizes = [e["bytes"] for e in events if e["event"] == "checkpoint"]
    last = sum(p.stat().st_size for p in (run / "checkpoints/6").rglob("*") if p.is_file())
    assert sizes[-1] == last > 0
    assert [x["run/restarts"] for x in log if "train/loss" in x] == [0] * 4 + [1] * 2
    assert log[-2]["run/checkpoint_age_seconds"] > 0
    found, spent = accounted(run)
    assert [(a.first, a.last, a.ended) for a in found] == [(0, 4, "done"), (4, 6, "done")]
    wall = found[-1].until - found[0].began
    assert sum(spent.values()) == pytest.approx(wall, rel=0.01)
    assert json.loads((run / "heartbeat.json").read_text())["ended"] == "done"
    # On a CPU a machine is what is paid for, and it is in the log too.
    assert goodput.spent(found) == {
        "machine-hours": pytest.approx(sum(sum(a.seconds.values()) for a in found) / 3600)
    }
    assert 0 < log[-2]["run/machine_hours"] < goodput.spent(found)["machine-hours"]


def test_chips_of_two_devices_are_counted_once():
    tpu = types.SimpleNamespace(platform="tpu", device_kind="TPU7x")
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    for device, expected in ((tpu, {"chips": 4, "price": 2.0}), (gpu, {"chips": 8, "watts": 700})):
        mesh = types.SimpleNamespace(devices=np.array([device] * 8), size=8)
        assert loop._costs(mesh, None, expected.get("price")) == expected


def test_an_attempt_that_ended_without_a_word_is_told_of_by_the_next(tmp_path):
    now = [1000.0]
    silent = Journal(beat_seconds=3600, wall=lambda: now[0])
    silent.open(lock_run_dir(epath.Path(tmp_path / "run")))
    silent.ready(0, {})
    silent.step = 9
    silent.costs |= {"chips": 8, "price": 2.5, "kwh": 0.25}
    silent.event("save failed", error="no room")
    silent.beat()
    with (tmp_path / "run" / journal.EVENTS).open("a") as file:
        file.write('{"event": "checkpo')
    now[0] = 1500.0
    second = Journal(1480.0, wall=lambda: now[0])
    second.open(lock_run_dir(epath.Path(tmp_path / "run"), resumes=True))
    second.ready(6, {})
    second.step = 8
    second.costs |= {"chips": 4, "kwh": 0.5}
    second.event("alert", rule="stall")
    counts = second.counts()
    spent = {name: counts.pop(f"run/{name}") for name in ("chip_hours", "cost", "kwh")}
    assert counts == {
        "run/restarts": 1,
        "run/lost_steps": 3,
        "run/failed_saves": 0,
        "run/alerts": 1,
    }
    assert spent["kwh"] == 0.75
    assert spent["cost"] < 2.5 * spent["chip_hours"]  # the second start was given no price
    second.__exit__(SystemExit, SystemExit(3), None)
    # The first no longer owns the folder, and so writes nothing more.
    silent.event("late")
    events = journal.read_events(epath.Path(tmp_path / "run"))
    names = ["start", "ready", "save failed", "killed", "start", "ready", "alert", "end"]
    assert [line["event"] for line in events] == names
    found, spent = accounted(tmp_path / "run")
    assert [(a.number, a.first, a.last, a.ended) for a in found] == [
        (1, 0, 9, None),
        (2, 6, 8, "SystemExit"),
    ]
    assert spent["down"] == pytest.approx(480, abs=1)
    hours = [sum(attempt.seconds.values()) / 3600 for attempt in found]
    cost = 8 * 2.5 * hours[0]
    expected = {"chip-hours": 8 * hours[0] + 4 * hours[1], "cost": cost, "kWh": 0.75}
    assert goodput.spent(found) == pytest.approx(expected)
    (tmp_path / "run" / "log.jsonl").write_text("")
    _, line = leave_report(tmp_path / "run")
    assert (
        line == f"spent        chip-hours {expected['chip-hours']:.3g}, cost {cost:.3g}, kWh 0.75"
    )
    assert '{"name":"kWh","value":"0.75","note":""}' in (tmp_path / "run/report.html").read_text()
    told = health._attempts(records.read_run(epath.Path(tmp_path / "run"), "run"))
    assert silent.identity == second.identity != Journal(7.0).identity
    assert [each.text for each in told] == [
        "It was started again 1 time; 3 steps had to be done again.",
        "1 save failed, last: no room.",
    ]


@pytest.mark.slow
def test_the_account_of_a_run_that_is_killed_is_its_time_on_the_wall(texts, tmp_path):
    run, began, ended = tmp_path / "run", [], []
    for kill_after in (30, 70, None):
        process = start(tmp_path, texts, run, 120, "--auto-resume")
        began.append(time.time())
        try:
            if kill_after is None:
                assert process.code() == 0, process.errors
                # What the interpreter does after the run has said that it is over is not the run's.
                ended.append((run / journal.HEARTBEAT).stat().st_mtime)
            else:
                process.until(lambda k=kill_after: last_step(run) >= k)
                process.send(9)
                process.code()
                ended.append(time.time())
        finally:
            process.end()
    found, spent = accounted(run)
    assert sum(spent.values()) == pytest.approx(ended[-1] - began[0], rel=0.01)
    up = sum(b - a for a, b in zip(began, ended, strict=True))
    known = sum(seconds for name, seconds in spent.items() if name != "down")
    # At most the time since the last heartbeat is not known of an attempt that was killed.
    assert up - known == pytest.approx(0, abs=0.01 * up + 2 * journal.BEAT_SECONDS)
    assert [attempt.ended for attempt in found] == [None, None, "done"]
    assert spent["lost steps"] > 0


def test_the_age_of_a_checkpoint_is_no_matter_of_the_wall_clock(tmp_path):
    wall, clock = [1e9], [50.0]
    times = {"wall": lambda: wall[0], "clock": lambda: clock[0]}
    owner = lock_run_dir(epath.Path(tmp_path))
    with Journal(wall[0], beat_seconds=1e9, **times) as written:
        written.open(owner)
        written.event("checkpoint", step=1)
        wall[0], clock[0] = wall[0] - 86400, clock[0] + 30
        assert written.counts()["run/checkpoint_age_seconds"] == 30
    wall[0] += 86400 + 100
    with Journal(wall[0], beat_seconds=1e9, **times) as written:
        written.open(owner)
        clock[0] += 5
        assert written.counts()["run/checkpoint_age_seconds"] == 105


@pytest.mark.parametrize("time", [None, "yesterday", [], "0001-01-01T00:00:00+23:59"])
def test_damaged_records_keep_no_run_from_going_on(time, tmp_path):
    owner = lock_run_dir(epath.Path(tmp_path))
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "checkpoint", "time": time}))
    (tmp_path / "heartbeat.json").write_text('{"attempt": 1, "step": "three"}')
    with Journal() as attempt:
        attempt.open(owner)
    assert read_events(epath.Path(tmp_path))[-1]["ended"] == "done"


def test_events_are_named_by_the_list_where_they_are_written_and_read():
    for path in pathlib.Path(journal.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and getattr(node.func, "attr", "")
            if called in ("event", "happened"):
                assert not isinstance(node.args[0], ast.Constant), (path, node.lineno)


def test_no_beat_that_is_still_being_written_hides_the_last_one(tmp_path, monkeypatch):
    writing, write_whole = threading.Event(), journal.write_whole

    def slow(path, text):
        if threading.current_thread() is not threading.main_thread():
            writing.set()
            time.sleep(0.3)
        write_whole(path, text)

    monkeypatch.setattr(journal, "write_whole", slow)
    with Journal(beat_seconds=0.01) as written:
        written.open(lock_run_dir(epath.Path(tmp_path / "run"), resumes=False, overwrite=False))
        assert writing.wait(5)
    time.sleep(0.4)
    assert journal.read_heartbeat(epath.Path(tmp_path / "run"))["ended"] == "done"
