"""Decisions of retraining: what is asked of which model, what is promoted, what is written down."""

import json
import os
import shutil
import signal
import sys
import threading
import types

import numpy as np
import pytest

from experiments import gpt
from jaxtrain import cli, data, fit
from jaxtrain.host import exit_codes
from jaxtrain.run.folder import PROMOTED, RETRAININGS
from jaxtrain.run.options import RunOptions
from jaxtrain.study import retrain
from tests.commands import refused
from tests.commands import run as command
from tests.waiting import eventually

WORDS = {"a": [b"one", b"two", b"three"], "b": [b"for", b"while", b"lambda"]}


def texts(folder, kind, count=40):
    folder.mkdir()
    for n in range(count):
        chosen = np.random.default_rng([n, kind == "b"]).integers(0, 3, 60)
        (folder / f"{n}.txt").write_bytes(b" ".join(WORDS[kind][i] for i in chosen))
    return str(folder)


@pytest.fixture
def run(tmp_path):
    """A run on text a, of which what is asked here is its record alone."""
    folder = tmp_path / "run"
    folder.mkdir()
    record = {"flags": {"data": texts(tmp_path / "a", "a")}, "provenance": {}}
    (folder / "config.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def asked(monkeypatch):
    """Stands for models and trainings: ``losses`` are those of a run's folder by its name."""
    found = types.SimpleNamespace(losses={}, lines=[], scored=[], code=0)
    rng = np.random.default_rng(0)
    documents = {
        "old": [rng.integers(0, 9, 50) for _ in range(30)],
        "new": [rng.integers(0, 9, 50) for _ in range(30)],
    }
    noise = rng.normal(size=30)

    def alone(folder, texts, size):
        found.scored.append((folder, texts, size))
        losses = found.losses[folder.rsplit("/", 1)[-1]]
        return {name: (documents[name], 50 * losses[name] + noise) for name in texts}

    def train(line):
        found.lines.append(line)
        return found.code

    monkeypatch.setattr(retrain, "_alone", alone)
    monkeypatch.setattr(retrain, "_trained", train)
    found.documents = documents
    return found


def written(run):
    lines = [json.loads(line) for line in (run / RETRAININGS).read_text().splitlines()]
    return lines, json.loads((run / PROMOTED).read_text())


def test_a_request_to_end_is_handed_on_to_the_training(tmp_path):
    """Which saves then, and ends with the code after which the same command continues."""
    ready = tmp_path / "ready"
    program = "import pathlib, signal, sys, time\n"
    program += f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({exit_codes.PREEMPTED}))\n"
    program += f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)"

    def ask():
        eventually(ready.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert retrain._trained([sys.executable, "-c", program]) == exit_codes.PREEMPTED


def test_a_better_run_is_promoted_and_the_next_begins_with_it(run, asked, tmp_path, capsys):
    asked.losses = {"run": {"old": 1.0, "new": 2.0}, "0001": {"old": 1.0, "new": 1.5}}
    asked.losses["0002"] = {"old": 1.2, "new": 0.5}
    call = ("retrain", "experiments.gpt", "--run", str(run), "--steps", "7", "--data")
    status, told, _ = command(capsys, *call, new := texts(tmp_path / "b", "b"))
    assert status == 0
    line = asked.lines[0]
    assert line[line.index("--init-from") + 1] == str(run)
    assert line[-3:] == ["--run-dir", first := str(run / "retrained" / "0001"), "--auto-resume"]
    assert line[line.index("--data") :][:4] == ["--data", new, "--steps", "7"]
    assert asked.scored[0][1] == {"old": [(str(tmp_path / "a"), 0, 1)], "new": [(new, 0, 1)]}
    (line,), pointer = written(run)
    assert pointer["run"] == line["run"] == first
    assert line["promoted"]
    np.testing.assert_allclose(line["changes"]["new"], [-0.5] * 3, atol=1e-9)
    assert "promoted" in told
    assert "changed by -0.5000 nats per token" in pointer["why"]
    # Nothing is new; then text that costs the old text too much.
    (run / PROMOTED).write_text("{}")  # as if killed between log and pointer
    assert "nothing new in" in command(capsys, *call, new)[1]
    assert written(run) == ([line], pointer)
    command(capsys, *call, third := texts(tmp_path / "c", "b"))
    lines, same = written(run)
    assert same == pointer
    assert not lines[1]["promoted"]
    assert "surely worse on old text" in lines[1]["why"]
    assert asked.scored[-1][1]["old"] == [(str(tmp_path / "a"), 0, 1), (new, 0, 1)]
    assert asked.lines[-1][asked.lines[-1].index("--init-from") + 1] == first
    asked.losses["0003"] = asked.losses["0002"]
    command(capsys, *call, third, "--may-forget", "0.3")
    assert written(run)[1]["run"] == str(run / "retrained" / "0003")


def test_without_drift_nothing_is_trained(run, asked, tmp_path, capsys):
    asked.losses = {"run": {"old": 1.0, "new": 1.0}, "0001": {"old": 1.0, "new": 0.5}}
    call = ("retrain", "experiments.gpt", "--run", str(run), "--drift", "0.1", "--data")
    new = texts(tmp_path / "b", "b")
    assert "kept" in command(capsys, *call, new)[1]
    assert not asked.lines
    assert written(run)[1] == {"run": str(run)}
    asked.documents["new"] = [5 + each for each in asked.documents["new"]]
    assert "nothing new" in command(capsys, *call, new)[1]
    command(capsys, *call, texts(tmp_path / "c", "b"))
    assert len(asked.lines) == 1
    assert written(run)[1]["run"].endswith("0001")
    asked.losses["0002"] = asked.losses["0001"]
    command(capsys, *call[:4], "--data", new)  # without a test of drift what was kept is new
    assert len(asked.lines) == 2


def test_a_training_that_fails_decides_nothing(run, asked, tmp_path, capsys):
    asked.losses, asked.code = {"run": {"old": 1.0, "new": 1.0}}, 75
    call = ("retrain", "experiments.gpt", "--run", str(run), "--data", texts(tmp_path / "b", "b"))
    assert command(capsys, *call)[0] == 75
    assert not (run / RETRAININGS).exists()
    begun = run / retrain.RETRAINED / "0001"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text(json.dumps({"flags": {"data": call[-1]}}))
    other = (*call[:-1], texts(tmp_path / "c", "b"))
    command(capsys, *call), command(capsys, *other)  # the first goes on, the other is another run
    assert [line[line.index("--run-dir") + 1][-4:] for line in asked.lines] == [
        "0001",
        "0001",
        "0002",
    ]
    assert "leave it out" in refused(capsys, *call, "--resume")
    assert "--drift is nan" in refused(capsys, *call, "--drift", "nan")
    told = refused(capsys, *call[:2], "--run", str(tmp_path / "b"), "--data", "python")
    assert "is not a run of text" in told
    assert not (tmp_path / "b" / PROMOTED).exists()


def test_what_a_run_has_seen_of_a_store_that_grew(run, tmp_path):
    split = data.text_folder(tmp_path / "a")
    data.write_store(split, data.ByteTokenizer(), store := tmp_path / "store")
    seen = data.open_store(store).corpus().fingerprint
    data.append_store(data.text_folder(texts(tmp_path / "b", "b"), held_out=0.3), store)
    record = {"flags": {"data": str(store)}, "provenance": {"text": seen}}
    (run / "config.json").write_text(json.dumps(record))
    assert retrain.seen_by(run) == {str(store): 0}
    (run / "watermarks.jsonl").write_text('{"step": 0, "parts": 0}\n{"step": 9, "parts": 1}\n')
    assert retrain.seen_by(run) == {str(store): 1}


def test_another_spelling_of_a_path_is_no_new_text(run, asked, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = ("retrain", "experiments.gpt", "--run", str(run), "--data")
    for name in ("a", "./a/", str(tmp_path / "a")):
        assert "nothing new in" in command(capsys, *call, name)[1]
    assert not asked.lines


def test_changes_are_weighted_by_tokens_and_paired():
    rng = np.random.default_rng(3)
    documents = [np.zeros(n, int) for n in rng.integers(5, 400, 50)]
    sizes = np.array([*map(len, documents)])
    before = rng.normal(3, 2, 50) * sizes
    after = before + sizes * rng.normal(-0.1, 0.01, 50)
    (mean, low, high) = retrain.compare({"new": (documents, before)}, {"new": (documents, after)})[
        "new"
    ]
    np.testing.assert_allclose(mean, after.sum() / sizes.sum() - before.sum() / sizes.sum())
    assert -0.11 < low < mean < high < -0.09


@pytest.mark.slow
def test_a_store_that_grew_retrains_a_model(tmp_path, capfd):
    """Losses are those of the training's own evaluation of documents; a second call has no news."""
    store = tmp_path / "store"
    data.write_store(
        data.text_folder(texts(tmp_path / "a", "a"), held_out=0.3), data.ByteTokenizer(), store
    )
    sizes = {"layers": 1, "width": 16, "heads": 2, "seq_len": 64, "global_batch": 16}
    config = gpt.Config(
        data=str(store),
        run=RunOptions(run_dir=str(tmp_path / "run")),
        steps=40,
        sample_tokens=0,
        **sizes,
    )
    fit(gpt.build(config), config.run)
    data.append_store(data.text_folder(texts(tmp_path / "b", "b"), held_out=0.3), store)
    flags = [
        "--data",
        str(store),
        "--drift",
        "0.25",
        "--steps",
        "80",
        "--global-batch",
        "16",
        "--sample-tokens",
        "0",
    ]
    call = ["retrain", "experiments.gpt", "--run", str(tmp_path / "run"), *flags]
    assert cli.main(call) == 0
    (line,), pointer = written(tmp_path / "run")
    assert line["promoted"]
    assert line["parts"] == 1
    assert line["changes"]["new"][2] < -0.5
    assert cli.main(call) == 0
    assert written(tmp_path / "run") == ([line], pointer)
    assert "nothing new in" in capfd.readouterr().out
    shutil.rmtree(tmp_path / "run" / "retrained")
