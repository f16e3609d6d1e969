"""A run's folder: nobody else's files are harmed, and two starts never write into one."""

import ast
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import types

import pytest
from etils import epath

from jaxtrain.host import distributed, exit_codes, storage
from jaxtrain.host.storage import StorageError
from jaxtrain.run import folder
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.folder import Superseded, find_run_dir, lock_run_dir
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
    with pytest.raises(FileExistsError, match=r"holds .*: .*choose another `run_dir`"):
        find_run_dir("gpt", str(tmp_path), overwrite=True)
    assert tree(tmp_path) == before


def test_a_folder_in_which_launchers_have_met_is_free(tmp_path):
    (tmp_path / folder.HOSTS).mkdir()
    (tmp_path / folder.HOSTS / "a.json").write_text("{}")
    for how in ({}, {"auto_resume": True}, {"overwrite": True}):
        assert find_run_dir("gpt", str(tmp_path), **how) == (epath.Path(tmp_path), False)


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
    first, second = (lock_run_dir(path, name="gpt") for path in found)
    assert (str(first.path), str(second.path)) == ("runs/gpt-1", "runs/gpt-2")
    named = [find_run_dir("gpt", "mine")[0] for _ in range(2)]
    lock_run_dir(named[0])
    with pytest.raises(FileExistsError, match="another run has just begun in mine: choose another"):
        lock_run_dir(named[1])


def test_who_resumes_or_overwrites_takes_the_folder_and_the_one_before_is_told(tmp_path, capsys):
    path = epath.Path(tmp_path / "run")
    first = lock_run_dir(path)
    first.check()
    second = lock_run_dir(path, resumes=True)
    second.check()
    with pytest.raises(Superseded) as stop:
        first.check()
    assert stop.value.code == exit_codes.SUPERSEDED
    assert f"error: {path} belongs to another start of the run now (process " in (
        capsys.readouterr().err
    )
    lock_run_dir(path, overwrite=True)
    assert second.taken_by() is not None
    # A token that cannot be read is storage's trouble, and nobody's claim.
    for content in ("", "[]", "{}", '{"token": 1}'):
        (path / "owner.json").write_text(content)
        assert second.taken_by() is None or content == '{"token": 1}'
    (path / "owner.json").unlink()
    assert second.taken_by() is None


def fail_once(monkeypatch, name, end, number=errno.EIO):
    """The first call of a function of ``os`` on a path with this end fails."""
    real, failed = getattr(os, name), []

    def fails(path, *args, **kwargs):
        if str(path).endswith(end) and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, name, fails)
    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    return failed


@pytest.mark.parametrize("name", ["stat", "listdir", "replace", "mkdir"])
def test_a_start_looks_again_where_storage_fails_for_a_moment(tmp_path, monkeypatch, name):
    path = epath.Path(tmp_path / "run")
    if name == "listdir":
        lock_run_dir(path)
    failed = fail_once(monkeypatch, name, "" if name == "replace" else "run")
    found, resumes = find_run_dir("gpt", str(path), auto_resume=True)
    owner = lock_run_dir(found, resumes=resumes)
    assert failed
    assert resumes == (name == "listdir")
    assert owner.taken_by() is None
    assert os.listdir(path) == ["owner.json"]


def make_run(folder):
    for name in ("checkpoints/10/state", "checkpoints/20/state", "config.json", "log.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    lock_run_dir(epath.Path(folder), resumes=True)


def test_a_deletion_that_was_interrupted_is_finished_and_never_resumed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    make_run(run)

    def killed(path, *_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            lock_run_dir(epath.Path(run), overwrite=True)
    assert len(os.listdir(run / "checkpoints")) == 2
    for options in ({"resume": True}, {}):
        with pytest.raises(FileExistsError, match="the rest of a run whose deletion was interrup"):
            find_run_dir("gpt", str(run), **options)
    found, resumes = find_run_dir("gpt", str(run), auto_resume=True)
    assert not resumes
    lock_run_dir(found)
    assert os.listdir(run) == ["owner.json"]
    assert find_run_dir("gpt", str(run), auto_resume=True)[1]


def test_what_a_launcher_overwrites_is_resumed_by_its_own_attempts_alone(tmp_path, monkeypatch):
    run = tmp_path / "run"
    make_run(run)
    monkeypatch.setenv(distributed.START, "one")
    for _ in range(2):  # The first attempt is lost before it claims the folder.
        found, resumes = find_run_dir("gpt", str(run), overwrite=True)
        assert not resumes
    lock_run_dir(found, resumes=resumes, overwrite=True)
    (run / "checkpoints" / "30").mkdir(parents=True)
    found, resumes = find_run_dir("gpt", str(run), overwrite=True)
    assert resumes
    lock_run_dir(found, resumes=resumes, overwrite=True)
    assert os.listdir(run / "checkpoints") == ["30"]
    monkeypatch.setenv(distributed.START, "another")
    assert not find_run_dir("gpt", str(run), overwrite=True)[1]
    monkeypatch.delenv(distributed.START)
    assert not find_run_dir("gpt", str(run), overwrite=True)[1]


def test_overwriting_removes_links_and_nothing_behind_them(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    make_run(run)
    (outside / "tb").mkdir(parents=True)
    (outside / "tb" / "events.out.tfevents.1").write_text("of another run")
    (outside / "50").mkdir()
    (outside / "50" / "state").write_text("kept")
    before = tree(outside)
    (run / "tensorboard").symlink_to(outside / "tb")
    (run / "checkpoints" / "50").symlink_to(outside / "50")
    (run / "events.jsonl").symlink_to(outside / "50" / "state")
    lock_run_dir(epath.Path(run), overwrite=True)
    assert os.listdir(run) == ["owner.json"]
    assert tree(outside) == before


def test_a_folder_that_is_moved_while_its_run_goes_on_is_not_made_again(
    tmp_path, monkeypatch, caplog
):
    elapsed = []
    monkeypatch.setattr(storage, "pause", elapsed.append)
    monkeypatch.setattr(storage, "now", lambda: sum(elapsed))
    owner = lock_run_dir(epath.Path(tmp_path / "run"))
    owner.check()
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="has been moved or deleted while the run goes on"):
        owner.check()
    assert "nothing more is saved until it is back" in caplog.text
    assert os.listdir(tmp_path) == ["moved"]
    (tmp_path / "moved").rename(tmp_path / "run")
    owner.check()


@pytest.mark.slow
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


def test_overwriting_deletes_every_file_that_a_run_writes_and_no_other(tmp_path):
    run = epath.Path(tmp_path)
    written = {*folder.FILES, folder.HANG.format(3), f"{folder.CONFIG}.partial-0a"}
    for name in (*written, "mine.json", f"{folder.CONFIG}.old"):
        (run / name).write_text("{}")
    lock_run_dir(run, overwrite=True)
    assert {path.name for path in run.iterdir()} == {
        folder.OWNER,
        "mine.json",
        f"{folder.CONFIG}.old",
    }


def test_no_module_of_a_run_names_a_file_that_the_list_lacks():
    """Else --overwrite would keep it; what an experiment brings is given to it by name."""
    of_others = {"tokenizer.json", "generation_config.json", "page.html", "manifest.json"}
    for path in pathlib.Path(folder.__file__).parent.rglob("*.py"):
        found = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
            and re.fullmatch(r"[a-z_-]+\.(jsonl?|csv|prom|html|png|txt)", str(node.value))
        }
        if path.name != "folder.py":
            assert found <= of_others, path


def test_a_start_that_came_to_no_checkpoint_is_told_apart(tmp_path):
    lock_run_dir(find_run_dir("a", str(tmp_path))[0])
    with pytest.raises(FileExistsError, match="no checkpoint, so unless it is running, begin anew"):
        find_run_dir("a", str(tmp_path))
    assert find_run_dir("a", str(tmp_path), overwrite=True)[0] == tmp_path  # as it advises
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="holds a run already: continue it with `resume`"):
        find_run_dir("a", str(tmp_path))
