"""A run's folder: nobody else's files are harmed, and two starts never write into one."""

import json
import os
import signal
import types

import pytest
from etils import epath

from jaxtrain.host import exit_codes
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.folder import Superseded, claim_run_dir, find_run_dir
from tests.run.survive.processes import WORKER, Process, last_step, logged


def tree(folder):
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "names",
    [
        ["thesis.tex"],
        ["config.json", "tokenizer.json", "model.safetensors"],  # of a model from elsewhere
        ["gpt-1/config.json", "gpt-1/log.jsonl", "gpt-2/config.json", "gpt-2/log.jsonl"],
        ["checkpoints/100/weights.pt"],
    ],
)
def test_overwrite_refuses_a_folder_that_is_no_run(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds .*: .*choose another run_dir"):
        find_run_dir("gpt", str(tmp_path), overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("flag", "words"),
    [(os.ST_RDONLY, "is on a read-only file system"), (0, "may not be written in by this user")],
)
def test_a_folder_that_cannot_be_written_to_is_called_that(tmp_path, monkeypatch, flag, words):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_flag=flag))
    with pytest.raises(PermissionError, match=f"the folder '{tmp_path}' {words}: choose another"):
        find_run_dir("gpt", str(tmp_path / "run"))


def test_two_that_found_the_same_folder_do_not_both_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [find_run_dir("gpt", None)[0] for _ in range(2)]
    assert found[0] == found[1]
    first, second = (claim_run_dir(path, name="gpt") for path in found)
    assert (str(first.path), str(second.path)) == ("runs/gpt-1", "runs/gpt-2")
    named = [find_run_dir("gpt", "mine")[0] for _ in range(2)]
    claim_run_dir(named[0])
    with pytest.raises(FileExistsError, match="another run has just begun in mine: choose another"):
        claim_run_dir(named[1])


def test_who_resumes_or_overwrites_takes_the_folder_and_the_one_before_is_told(tmp_path, capsys):
    path = epath.Path(tmp_path / "run")
    first = claim_run_dir(path)
    first.check()
    second = claim_run_dir(path, resumes=True)
    second.check()
    with pytest.raises(Superseded) as stop:
        first.check()
    assert stop.value.code == exit_codes.SUPERSEDED
    assert f"error: {path} belongs to another start of the run now (process " in (
        capsys.readouterr().err
    )
    claim_run_dir(path, overwrite=True)
    assert second.taken_by() is not None
    # A token that cannot be read is storage's trouble, and nobody's claim.
    for content in ("", "[]", "{}", '{"token": 1}'):
        (path / "owner.json").write_text(content)
        assert second.taken_by() is None or content == '{"token": 1}'
    (path / "owner.json").unlink()
    assert second.taken_by() is None


def test_simultaneous_starts_get_two_folders_and_an_earlier_attempt_writes_no_more(tmp_path):
    """Two processes that start at once; a third takes over from one of them, which still runs."""
    flags = [WORKER, "new", "--chdir", str(tmp_path), "--save-every", "5", "--seconds", "0.05"]
    started = [Process([*flags, "--steps", "100000"], tmp_path, str(i)) for i in range(2)]
    try:
        runs = [tmp_path / "runs" / f"worker-{i}" for i in (1, 2)]
        for process, run in zip(started, runs, strict=True):
            process.until(lambda run=run: last_step(run) >= 6)
        assert not any(process.ended() for process in started), started[0].errors
        pids = [json.loads((run / "owner.json").read_text())["pid"] for run in runs]
        assert sorted(pids) == sorted(process.pid for process in started)
        zombie = next(process for process in started if process.pid == pids[1])
        # It is stopped, like a machine taken for dead, and wakes when the next attempt has begun.
        zombie.send(signal.SIGSTOP)
        at = last_step(runs[1])
        attempt = Process([*flags, "--resume", "--steps", str(at + 20)], tmp_path, "attempt")
        started.append(attempt)
        attempt.until(lambda: json.loads((runs[1] / "owner.json").read_text())["pid"] != pids[1])
        zombie.send(signal.SIGCONT)
        assert zombie.code() == exit_codes.SUPERSEDED, zombie.errors
        assert f"belongs to another start of the run now (process {attempt.pid} on" in zombie.errors
        assert "Traceback" not in zombie.errors
        assert attempt.code() == 0, attempt.errors
    finally:
        for process in started:
            process.end()
    assert Checkpointer(runs[1] / "checkpoints").latest_step() == at + 20
    steps = [line["step"] for line in logged(runs[1]) if "train/loss" in line]
    assert steps == list(range(1, at + 21))
    # The other start had a folder of its own, and went on undisturbed.
    steps = [line["step"] for line in logged(runs[0])]
    assert steps == list(range(1, len(steps) + 1))
