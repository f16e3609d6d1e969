"""The command ``jaxtrain study``, with real runs of a small experiment."""

import contextlib
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_trials_of_two_processes_are_decided_by_process_0(tmp_path):
    """The study is killed amid a trial, and its processes with it; the same command goes on."""
    more = ["--processes", "2", "--pruner", "halving", "--trials", "3", "--mesh.data", "2"]
    more += ["--steps", "200", "--eval-every", "10", "--save-every", "100"]
    command = [sys.executable, "-m", "jaxtrain", *given(tmp_path, *more)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    study = tmp_path / "study"
    first = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL)
    log = study / "trial-0" / "log.jsonl"
    wait_for(lambda: log.exists() and "eval/loss" in log.read_text())
    assert len(running(study, "--run-dir")) == 3  # the launcher and what it started
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: not running(study), seconds=20)
    again = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert not running(study)
    told = re.findall(r"trial (\d) .*?(?:step (\d+) at|eval/loss) ([\d.]+)", again.stderr)
    assert any(step for _, step, _ in told)  # pruned there
    assert any(not step for _, step, _ in told)
    for number, step, value in told:
        folder = study / f"trial-{number}"
        record = json.loads((folder / "config.json").read_text())
        assert record["provenance"]["mesh"].startswith("data 2")
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert {line["process"] for line in lines} == {0}
        held_out = [line["eval/loss"] for line in lines if "eval/loss" in line]
        at = int(step or 200) // 10 - 1
        assert f"{held_out[at]:.5g}" == value
        steps = [line["step"] for line in lines if "train/loss" in line]
        assert steps == list(range(2, steps[-1] + 1, 2))
    assert sorted(number for number, *_ in told) == ["0", "1", "2"]
    (best,) = re.findall(r"^command +(.*)$", again.stdout, re.MULTILINE)
    assert best.startswith("python -m jaxtrain launch --processes 2 -- python -m tests.small")


def running(*words):
    """The processes on this machine whose command has all of these words."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_text()
            found += [int(process.name)] if all(str(word) in line for word in words) else []
    return found


def wait_for(there, seconds=120):
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until
        time.sleep(0.1)
