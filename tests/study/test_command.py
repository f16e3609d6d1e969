"""The command ``jaxtrain study``, with real runs of a small experiment."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import refused, run

pytest.importorskip("optuna")

ROOT = pathlib.Path(__file__).parents[2]
QUICK = ["--steps", "4", "--eval-every", "2", "--sample-seconds", "0", "--log-every", "2"]


def given(folder, *more):
    space = folder / "space.toml"
    space.write_text('"optimizer.learning-rate" = [0.01, 0.1, 0.02, 0.2]\n')
    own = ["--space", str(space), "--study-dir", str(folder / "study"), "--sampler", "grid"]
    return ["study", "tests.small", *own, *QUICK, *more]


def values(folder):
    logs = sorted((folder / "study").glob("trial-*/log.jsonl"))
    lines = [map(json.loads, log.read_text().splitlines()) for log in logs]
    return [[x["eval/loss"] for x in each if "eval/loss" in x][-1] for each in lines]


def test_a_study_of_two_trials(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, out, err = run(capsys, *given(tmp_path, "--trials", "2"))
    assert status == 0, err
    losses = values(tmp_path)
    assert len(losses) == 2
    (best,) = re.findall(r"eval/loss ([\d.]+)$", out, re.MULTILINE)
    assert float(best) == pytest.approx(min(losses), rel=1e-4)
    rate = [0.01, 0.1][losses.index(min(losses))]
    assert f"python -m tests.small {' '.join(QUICK)} --optimizer.learning-rate={rate}\n" in out
    assert f"{min(losses):.5g}" in (tmp_path / "study" / "study.html").read_text()
    # There is nothing more to do, and another study has no place here.
    assert run(capsys, *given(tmp_path, "--trials", "2"))[0] == 0
    said = refused(capsys, *given(tmp_path, "--seed", "3"))
    assert "has flags '--steps 4" in said


@pytest.mark.slow
def test_processes_that_are_killed_leave_a_whole_study(tmp_path):
    """One of two that work on a study is killed with all that it knows, and then a run."""
    command = [sys.executable, "-m", "jaxtrain", *given(tmp_path, "--steps", "300")]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, cwd=ROOT, env=environ, **quiet)
    study = tmp_path / "study"
    wait_for(lambda: (study / "trial-0" / "log.jsonl").exists())
    second = subprocess.Popen([*command, "--workers", "2"], cwd=ROOT, env=environ, **quiet)
    wait_for(lambda: (study / "trial-2" / "owner.json").exists())
    first.send_signal(signal.SIGKILL)
    os.kill(json.loads((study / "trial-2" / "owner.json").read_text())["pid"], signal.SIGKILL)
    _, said = second.communicate(timeout=300)
    first.communicate()
    assert second.returncode == 0, said
    assert sorted(path.name for path in study.glob("trial-*")) == [f"trial-{i}" for i in range(4)]
    told = [int(n) for n in re.findall(r"^trial (\d) of 4", said, re.MULTILINE)]
    assert len(set(told)) == len(told) >= 3
    assert len(values(tmp_path)) == 4
    for log in study.glob("trial-*/log.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        steps = [line["step"] for line in lines if "train/loss" in line]
        assert steps == list(range(2, 302, 2))


def wait_for(there):
    until = time.monotonic() + 120
    while not there():
        assert time.monotonic() < until
        time.sleep(0.1)
