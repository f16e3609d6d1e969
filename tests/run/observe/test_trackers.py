"""Trackers: what they are given, and that none of them slows or ends a run, however it behaves."""

import collections
import csv
import importlib
import itertools
import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import urllib.request

import numpy as np
import PIL.Image
import pytest
from etils import epath

import jaxtrain as jt
from jaxtrain.host import answering, memory, readings
from jaxtrain.host.exit_codes import Ended
from jaxtrain.run.observe import trackers
from jaxtrain.run.observe.journal import read_events
from jaxtrain.run.observe.report import command, health, records
from jaxtrain.run.observe.trackers import prometheus, queued
from jaxtrain.run.observe.trackers.prometheus import PrometheusWriter
from jaxtrain.run.observe.trackers.queued import Queued
from tests.run.test_loop import lines, make_experiment
from tests.waiting import eventually


class Kept:
    """A tracker that remembers, slowly or not at all."""

    def __init__(self, before_write=lambda step: None):
        self.before_write, self.steps, self.error, self.closed = before_write, [], None, 0

    def write(self, step, values):
        self.before_write(step)
        self.steps.append(step)

    def close(self):
        self.closed += 1


def test_a_tracker_that_hangs_costs_the_step_nothing_and_what_it_missed_is_counted(
    caplog, monkeypatch
):
    hang = threading.Event()
    kept = Kept(lambda step: step == 3 and hang.wait(60))
    tracker = Queued("slow", lambda: kept, lines=10)
    values = {"train/loss": 1.0}
    for step in range(1, 4):
        tracker.write(step, values)
    eventually(lambda: len(kept.steps) >= 2 and not tracker._waiting.qsize())
    began = time.thread_time()  # of this thread, whatever else the machine does
    for step in range(4, 1004):
        tracker.write(step, values)
    assert time.thread_time() - began < 0.05  # of a thousand steps
    assert "has ended no line" not in caplog.text
    monkeypatch.setattr(queued, "SILENT_SECONDS", 0.0)
    for step in range(1004, 1006):
        tracker.write(step, values)
    assert caplog.text.count("tracker slow has ended no line for 0 s, and 10 wait; the run") == 1
    facts = tracker.close(until=time.monotonic() + 0.1)
    # 3 is being written, 10 wait, and the others found no room.
    assert facts == {
        "tracker": "slow",
        "written": 2,
        "dropped": 1003,
        "why": "10 lines were waiting; it did not end in time",
    }
    assert caplog.text.count("tracker slow drops lines (10 lines were waiting); the run") == 1
    assert "tracker slow: 1003 of 1005 lines dropped: 10 lines were waiting; it" in caplog.text
    hang.set()


def test_a_tracker_that_fails_is_tried_again_and_never_heard_of(caplog):
    fails = collections.Counter({1: 1, 2: 3, 4: 2})

    def failing(step):
        if fails[step]:
            fails[step] -= 1
            raise (SystemExit(1) if step == 1 else ConnectionError("refused"))

    kept, opens = Kept(failing), iter([OSError("no route"), OSError("no route"), None])

    def open():
        if error := next(opens):
            raise error
        return kept

    tracker = Queued("sick", open, pauses=(0.0, 0.0, 0.0))
    for step in range(1, 6):
        tracker.write(step, {})
    tracker.finish(ended := Ended(75, "asked to stop"))
    facts = tracker.close()
    # The first open is one too many for no line; 2 fails thrice and is dropped.
    assert kept.steps == [1, 3, 4, 5]
    assert (facts["written"], facts["dropped"]) == (4, 1)
    assert facts["why"] == "ConnectionError: refused"
    assert (kept.error, kept.closed) == (ended, 1)


def parsed(text):
    """Gauges by name and labels, read by the format's definition (version 0.0.4)."""
    found, typed = {}, set()
    for line in text.splitlines():
        if match := re.fullmatch(r"# TYPE ([a-zA-Z_:][\w:]*) gauge", line):
            assert match[1] not in typed
            typed.add(match[1])
            continue
        name, labels, value = re.fullmatch(r'(\w+)\{((?:\w+="[^"]*",?)*)\} (\S+)', line).groups()
        assert name in typed
        found[name, labels] = float(value)
    return found


def test_a_run_is_tracked_beside_its_log_by_what_works_and_goes_on_without_the_rest(
    tmp_path, monkeypatch, capsys, caplog
):
    hang = threading.Event()
    monkeypatch.setitem(trackers.OPENINGS, "wandb", lambda about: Kept(lambda step: hang.wait(60)))
    monkeypatch.setattr(trackers, "check_installed", lambda names: None)
    monkeypatch.setattr(queued, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(
        memory, "device_memory", lambda: {"in_use": 2.0, "peak": 3.0, "peak_fraction": 0.5}
    )
    sensors = ("device/utilisation", "device/temperature", "device/power")
    sensors += ("host/memory_fraction", "host/cpu")
    monkeypatch.setattr(
        readings, "sources", lambda devices, **options: [lambda: dict.fromkeys(sensors, 0.5)]
    )
    run = tmp_path / "gpt-1"
    options = jt.RunOptions(
        str(run), auto_resume=True, log_every=2, eval_every=3, save_every=2, keep=9
    )
    asked = ("csv", "prometheus", "wandb")
    jt.fit(make_experiment(7), jt.RunOptions(**vars(options) | {"trackers": asked}))
    (run / "checkpoints" / "7").rename(tmp_path / "gone")  # it was killed before that was saved
    jt.fit(make_experiment(9), jt.RunOptions(**vars(options) | {"trackers": ("csv", "prometheus")}))
    log = {(line["step"], name): x for line in lines(run) for name, x in line.items()}
    with (run / "metrics.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "name", "value"]
    own = {"step", "time", "attempt", "host", "process"}
    expected = {key: x for key, x in log.items() if key[1] not in own}
    assert {(int(step), name): float(x) for step, name, x in rows} == expected
    assert len(rows) == len(expected) > 50
    gauges = parsed((run / "metrics.prom").read_text())
    assert {labels for _, labels in gauges} == {'run="gpt-1"'}
    told = {name: value for (name, _), value in gauges.items()}
    assert told["jaxtrain_train_loss"] == log[9, "train/loss"]
    assert told["jaxtrain_eval_loss"] == log[9, "eval/loss"]
    assert told["jaxtrain_step"] == 9
    assert abs(told["jaxtrain_written_timestamp_seconds"] - time.time()) < 3600
    facts = [x for x in read_events(epath.Path(run)) if x["event"] == "tracker"]
    assert [(x["tracker"], x["dropped"] > 0) for x in facts[:3]] == [
        ("csv", False),
        ("prometheus", False),
        ("wandb", True),
    ]
    text = f"Tracker wandb: {facts[2]['dropped']} lines dropped, last because it did not end in"
    assert any(x.text.startswith(text) for x in health.examine(records.read_run(run, "")))
    hang.set()
    # The dashboard shows what such a run has, and nothing else.
    board = json.loads(pathlib.Path(trackers.__file__).with_name("grafana.json").read_text())
    expressions = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    named = {n for x in expressions for n in re.findall(r"(?<![\"~])\bjaxtrain_\w+", x)}
    assert len(named) > 12
    assert named <= told.keys(), named - told.keys()
    patterns = [p for x in expressions for p in re.findall(r'__name__=~"([^"]+)"', x)]
    assert all(any(re.fullmatch(p, name) for name in told) for p in patterns)
    cells = [
        {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        for g in (panel["gridPos"] for panel in board["panels"])
    ]
    assert all(x < 24 for cell in cells for x, _ in cell)
    assert not any(a & b for a, b in itertools.combinations(cells, 2))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_a_scrape_gives_the_newest_values_of_arrays_and_of_what_is_not_finite(tmp_path):
    writer = PrometheusWriter(tmp_path / "m", run='a "b"', address=("127.0.0.1", 0))
    values = {"train/load": np.array([[0.25, np.nan]]), "train/loss": np.inf, "a-b.c": 1e-30}
    writer.write(1, {"train/loss": 3.0})
    writer.write(2, values)
    with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    writer.close()
    assert (tmp_path / "m").read_text() == text
    lines = [x for x in text.splitlines() if not x.startswith("#")]
    run = r'run="a \"b\""'
    assert f"jaxtrain_train_loss{{{run}}} +Inf" in lines
    assert f'jaxtrain_train_load{{{run},index="0/0"}} 0.25' in lines
    assert f'jaxtrain_train_load{{{run},index="0/1"}} NaN' in lines
    assert f"jaxtrain_a_b_c{{{run}}} 1e-30" in lines


def test_who_connects_and_says_nothing_takes_few_places_and_not_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.3)
    writer = PrometheusWriter(tmp_path / "m", run="a", address=("127.0.0.1", 0))
    writer.write(1, {"train/loss": 2.0})
    address, others = ("127.0.0.1", writer.port), {*threading.enumerate()}
    idle = [socket.create_connection(address, timeout=10) for _ in range(12)]
    served = [x for x in {*threading.enumerate()} - others if "process_request" in x.name]
    assert len(served) <= answering.CONNECTIONS
    for each in idle:  # all are sent away
        with each:
            assert each.recv(1) == b""
    with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=10) as answer:
        assert b"jaxtrain_train_loss" in answer.read()
    writer.close()


def test_without_a_host_the_port_is_of_this_machine_alone():
    for place, host in (("9400", "127.0.0.1"), ("0.0.0.0:9400", "0.0.0.0")):
        assert trackers._address("prometheus", place) == (host, 9400)


def test_a_service_that_does_not_answer_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch
):
    def closed():
        raise OSError("the store of https://me:s3cret@mlflow.example.com is closed")

    service = types.SimpleNamespace(connect=closed)
    monkeypatch.setitem(trackers.OPENINGS, "mlflow", service)
    monkeypatch.setattr(trackers, "check_installed", lambda names: None)
    monkeypatch.setattr(jt.build, "compile_loop", None)
    options = jt.RunOptions(str(tmp_path / "run"), trackers=("mlflow",))
    words = "'mlflow' cannot be reached .*//mlflow.example.com is closed.* report RUN --push mlflow"
    with pytest.raises(ValueError, match=words):
        jt.fit(make_experiment(), options)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(queued, "CONNECT_SECONDS", 0.1)
    service.connect = threading.Event().wait
    with pytest.raises(ValueError, match=r"'mlflow' cannot be reached \(no answer for 0 s\)"):
        jt.fit(make_experiment(), options)


@pytest.mark.parametrize("error", [None, Ended(75, "asked to stop")])
def test_the_end_of_a_run_waits_for_a_first_connection_unless_the_host_is_taken_away(error):
    connected, writer = threading.Event(), Kept()

    def open():
        connected.wait(10)
        return writer

    tracker = Queued("slow", open)
    tracker.write(1, {})
    tracker.finish(error)
    timer = threading.Timer(0.2, connected.set)
    timer.start()
    facts = tracker.close(until=time.monotonic())
    assert facts["written"] == (1 if error is None else 0)
    timer.join()


def test_a_run_that_has_ended_is_sent_to_a_tracker_whole_and_once(tmp_path, monkeypatch, capsys):
    options = jt.RunOptions(str(tmp_path / "toy-1"), log_every=1, eval_every=2, trackers=("csv",))
    jt.fit(make_experiment(4), options)
    rows = sorted((tmp_path / "toy-1" / "metrics.csv").read_text().splitlines())
    (tmp_path / "toy-1" / "metrics.csv").unlink()
    capsys.readouterr()
    command.run_report(command.ReportOptions((str(tmp_path / "toy-1"),), push=("csv",)), [])
    assert f"4 steps of {tmp_path / 'toy-1'} to csv" in capsys.readouterr().out
    assert sorted((tmp_path / "toy-1" / "metrics.csv").read_text().splitlines()) == rows

    def closed(about):
        raise OSError(f"{about.experiment} {about.name} {about.config['answer']}")

    monkeypatch.setitem(trackers.OPENINGS, "mlflow", closed)
    monkeypatch.setattr(trackers, "check_installed", lambda names: None)
    with pytest.raises(
        ValueError, match=r"'mlflow' has not taken the log .*: OSError: toy toy-1 42"
    ):
        command.run_report(command.ReportOptions((str(tmp_path / "toy-1"),), push=("mlflow",)), [])


def test_the_password_of_a_service_is_not_said(caplog):
    def fail():
        raise OSError("API request to https://me:s3cret@mlflow.example.com/api failed")

    tracker = Queued("mlflow", fail, pauses=(0.0,))
    tracker.write(1, {})
    assert tracker.close()["why"] == "OSError: API request to https://mlflow.example.com/api failed"
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("neptune", "there is no tracker 'neptune': give of wandb, mlflow, trackio, csv, prom"),
        ("csv=x", "tracker 'csv=x': csv takes no 'x'"),
        ("prometheus=http", "tracker 'prometheus=http': give a port from 0 to 65535, or HOST"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        jt.RunOptions(trackers=(asked,))


def test_a_tracker_whose_package_is_missing_is_refused_with_the_line_that_installs_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"tracker 'mlflow' needs .*: pip install -e '.\[mlflow\]'"
    ):
        jt.fit(make_experiment(), jt.RunOptions(str(tmp_path / "run"), trackers=("mlflow",)))
    assert not (tmp_path / "run").exists()


PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)


class Shows(jt.Hook):
    def on_step(self, step, state):
        if step == 4:
            self.show(step, {"hook/noise": PIXELS, "hook/text": "not for trackers"})


def is_shown(folder):
    """Returns true if a PNG file in a folder has PIXELS."""
    files = pathlib.Path(folder).rglob("*.png")
    return any(np.array_equal(PIL.Image.open(file).convert("RGB"), PIXELS) for file in files)


def tracked(folder, name, **changes):
    """A run that is resumed, for a real tracker; returns its metrics by name and step."""
    options = jt.RunOptions(str(folder), auto_resume=True, log_every=1, trackers=(name,))
    for steps in (4, 6):
        jt.fit(make_experiment(steps, **changes), options, hooks=[Shows()])
    facts = [x for x in read_events(epath.Path(folder)) if x["event"] == "tracker"]
    assert [x["dropped"] for x in facts] == [0, 0], facts
    kept: dict = {}
    for line in records._lines((folder / "log.jsonl").read_text()):
        for key, x in line.items():
            if key not in records._OWN:
                kept.setdefault(key, {})[line["step"]] = float(x)
    return kept


def leveldb_records(content, block=32_768, header=7):
    """The records of a log in LevelDB's format, whose header wandb replaces by one of its own."""
    at, record = 0, b""
    while at + header <= len(content):
        if (left := block - (at + header) % block) < header:  # the end of a block is padding
            at += left
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + header : at + header + size]
        at += header + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_offline_has_the_run_whole(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    kept = tracked(tmp_path / "toy-1", "wandb")
    pb = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found, ids = collections.defaultdict(dict), set()
    for path in (tmp_path / "toy-1" / "wandb").glob("offline-run-*/run-*.wandb"):
        for data in leveldb_records(path.read_bytes()[7:]):
            record = pb.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.display_name, record.run.project))
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name in items.keys() & kept.keys():
                found[name][items["step"]] = float(items[name])
    ((_, name, project),) = ids  # both attempts are one run
    assert (name, project) == ("toy-1", "toy")
    assert is_shown(tmp_path / "toy-1" / "wandb")
    for key, series in kept.items():
        assert found[key] == pytest.approx(series, nan_ok=True), key


@pytest.mark.slow
def test_trackio_has_the_run_whole(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    code = (
        "import pathlib, json, sys\n"
        "from tests.run.observe.test_trackers import tracked\n"
        "kept = tracked(pathlib.Path(sys.argv[1]), 'trackio')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "(run,) = SQLiteStorage.get_runs('toy')\n"
        "logs = SQLiteStorage.get_logs('toy', run)\n"
        "found = {x['step']: x['train/loss'] for x in logs if 'train/loss' in x}\n"
        "print('FOUND ' + json.dumps([kept['train/loss'], found]))\n"
    )
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "toy-1")],
        cwd=pathlib.Path(__file__).parents[3],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if x.startswith("FOUND "))
    kept, found = json.loads(line.removeprefix("FOUND "))
    assert len(kept) == 6
    assert found == pytest.approx(kept)
    assert is_shown(tmp_path / "trackio")


@pytest.fixture
def mlflow_server(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("flask")  # the server is in the whole package alone
    pytest.importorskip("sqlalchemy")
    port = 20_000 + os.getpid() % 20_000
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    server = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 180
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.5)
    yield f"http://127.0.0.1:{port}", server
    end_group(server)


def end_group(process):
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.slow
def test_a_new_mlflow_database_takes_a_run_as_it_trains_or_behind_its_end(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    for name, names in (("tracked", ("mlflow",)), ("sent", ())):
        options = jt.RunOptions(str(tmp_path / name), log_every=1, trackers=names)
        jt.fit(make_experiment(4), options, hooks=[Shows()])
        for _ in range(0 if names else 2):  # the second time nothing is doubled
            options = command.ReportOptions((str(tmp_path / name),), push=("mlflow",))
            command.run_report(options, [])
        client = MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
        (run,) = [run for run in runs if run.info.run_name == name]
        points = client.get_metric_history(run.info.run_id, "train/loss")
        logged = [(x["step"], x["train/loss"]) for x in lines(tmp_path / name) if "train/loss" in x]
        assert sorted((point.step, point.value) for point in points) == logged
        assert run.info.status == "FINISHED"
    assert is_shown(tmp_path / "mlruns")


@pytest.mark.slow
def test_an_mlflow_server_has_the_run_whole_and_may_be_killed(tmp_path, monkeypatch, mlflow_server):
    uri, server = mlflow_server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name, value in (("TIMEOUT", "2"), ("MAX_RETRIES", "1"), ("BACKOFF_FACTOR", "1")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    from mlflow.tracking import MlflowClient

    kept, client = tracked(tmp_path / "toy-1", "mlflow"), MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert (run.info.run_name, run.info.status) == ("toy-1", "FINISHED")
    assert run.data.params["answer"] == "42"
    for name, series in kept.items():
        found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        assert found == pytest.approx(series, nan_ok=True), name

    class KillServer(jt.Hook):
        def on_metrics(self, step, metrics):
            if step == 3:
                end_group(server)

    options = jt.RunOptions(str(tmp_path / "toy-2"), log_every=1, trackers=("mlflow",))
    result = jt.fit(make_experiment(6), options, hooks=[KillServer()])
    assert int(result.state.step) == 6
    (facts,) = [x for x in read_events(epath.Path(tmp_path / "toy-2")) if x["event"] == "tracker"]
    assert facts["written"] + facts["dropped"] == len(lines(tmp_path / "toy-2"))
    assert facts["dropped"] >= 3
