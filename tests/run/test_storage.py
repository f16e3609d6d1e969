"""Storage that fails for a while: what passes, how long it is tried, and what must not suffer."""

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxtrain as jt
from jaxtrain.host import exit_codes, storage
from jaxtrain.host.storage import StorageError
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.observe import writers
from jaxtrain.run.refusal import refusing
from tests.run.checkpoints.test_durability import small_disk
from tests.run.observe.test_writers import read_curves
from tests.run.storage_faults import Faults, HttpError
from tests.run.streams import during
from tests.run.survive.processes import PATIENCE, ROOT, Process, free_port
from tests.run.test_loop import Rows, lines, make_experiment
from tests.waiting import eventually

# What TensorStore says of a disk and of a bucket.
DISK = "Error reading local file: os_error_code='5' [tensorstore_spec='...']"
BUCKET = 'UNAVAILABLE: Error reading "gs://b/x": HTTP response code: 503'


@pytest.fixture
def faults(monkeypatch):
    """Scripted failures, with pauses that take no time."""
    elapsed = []
    monkeypatch.setattr(storage, "pause", elapsed.append)
    monkeypatch.setattr(storage, "now", lambda: sum(elapsed))
    return Faults(monkeypatch)


def numbered(code):
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (numbered(errno.EIO), True),
        (numbered(errno.ENOSPC), True),
        (numbered(errno.ESTALE), True),
        (TimeoutError("slow"), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (HttpError(503), True),
        (HttpError(429), True),
        (ValueError(DISK), True),
        (ValueError(BUCKET), True),
        (HttpError(403), False),
        (numbered(errno.EACCES), False),
        (numbered(errno.ENOENT), False),
        (numbered(errno.EROFS), False),
        (BrokenPipeError(errno.EPIPE, "pipe"), False),
        (ValueError("OUT_OF_RANGE: Requested byte range is not valid for value of size 5"), False),
        (KeyError("code"), False),
    ],
    ids=str,
)
def test_what_passes_by_itself(error, expected):
    assert storage.passes(error) is expected
    wrapped = RuntimeError("while reading")
    wrapped.__cause__ = error
    assert storage.passes(wrapped) is expected


def test_pauses_grow_up_to_the_limit_and_the_end_is_said(caplog):
    now, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    def call():
        raise numbered(errno.EIO)

    with pytest.raises(
        StorageError, match=r"^the file: Input/output error, after tries for 300 s$"
    ):
        storage.retrying(call, "the file", clock=lambda: now[0], sleep=sleep)
    assert now[0] == pytest.approx(300)
    assert 20 < len(pauses) < 80
    assert max(pauses) <= storage.LONGEST_DELAY_SECONDS
    assert pauses[0] <= storage.FIRST_DELAY_SECONDS
    assert len(caplog.records) == 1  # said once, however often it fails


def test_pauses_begin_anew_when_it_has_worked_again():
    pauses, tries = [], itertools.count(1)

    def make():
        number = next(tries)
        for i in range(2):
            if number < 6 or (number == 6 and i == 1):
                raise numbered(errno.EIO)
            yield i

    assert list(storage.iterating(make, "the rows", sleep=pauses.append)) == [0, 1]
    assert pauses[4] > storage.FIRST_DELAY_SECONDS >= pauses[5]


def test_an_iteration_goes_on_behind_the_item_that_it_has_given(caplog):
    tries = []

    def make():
        tries.append(len(tries))
        for i in range(6):
            if i == 3 and len(tries) == 1:
                raise numbered(errno.ETIMEDOUT)
            if i == 5 and len(tries) == 2:
                raise HttpError(503)
            yield i

    assert list(storage.iterating(make, "the rows", sleep=lambda seconds: None)) == list(range(6))
    assert [r.getMessage().split(";")[0].split(" after")[0] for r in caplog.records] == [
        "the rows: Connection timed out",
        "the rows: works again",
        "the rows: HTTP error 503",
        "the rows: works again",
    ]


def make_state(seed):
    return {"w": jnp.arange(8.0) + seed, "n": np.int64(seed)}


@pytest.fixture
def saved(tmp_path):
    with Checkpointer(tmp_path / "c", keep=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step))
    return tmp_path / "c"


@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT, HttpError(503)], ids=str)
@pytest.mark.parametrize("on", ["open", "listdir", "exists"])
def test_a_checkpoint_is_read_through_failures_that_pass(saved, faults, on, error, caplog):
    faults.fail(str(saved), error, on=on, times=2)
    restored = Checkpointer(saved).restore(make_state(0))
    assert digest(restored) == digest(make_state(2))
    assert faults.failed == 2
    assert sum("works again" in r.getMessage() for r in caplog.records) == 1
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("text", [DISK, BUCKET])
def test_a_timeout_while_restoring_is_no_damage(saved, faults, monkeypatch, text):
    """For a while, the newest state is restored; for ever, it is the storage that is to blame."""
    real, fails = ocp.PyTreeCheckpointHandler.restore, [2]

    def restore(self, *args, **kwargs):
        if fails[0]:
            fails[0] -= 1
            raise ValueError(text)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    assert int(Checkpointer(saved).restore(make_state(0))["n"]) == 2
    fails[0] = 10**9
    checkpoints = Checkpointer(saved)
    with pytest.raises(StorageError, match="the arrays of checkpoint 2 in "):
        checkpoints.restore(make_state(0))
    checkpoints.save(3, make_state(3))
    checkpoints.close()
    assert sorted(path.name for path in saved.iterdir()) == ["1", "2", "3"]


def test_what_may_pass_ends_with_the_status_that_launchers_restart_on(capsys):
    for error, status in (
        (numbered(errno.EIO), exit_codes.STORAGE),
        (StorageError("the loader: gone"), exit_codes.STORAGE),
        (numbered(errno.EACCES), exit_codes.REFUSED),
        (ValueError(DISK), exit_codes.REFUSED),
    ):
        with pytest.raises(SystemExit) as end, refusing():
            raise error
        assert end.value.code == status
        assert capsys.readouterr().err.count("\n") == 1
    assert exit_codes.STORAGE in exit_codes.RESTARTABLE
    with pytest.raises(StorageError, match="No such file"), storage.restartable():
        raise numbered(errno.ENOENT)


def test_a_save_reads_no_manifest_again(saved, faults):
    checkpoints = Checkpointer(saved, keep=None)
    checkpoints.save(3, make_state(3))
    for step in (1, 2):
        faults.fail(f"{saved}/{step}/manifest/metadata", errno.EIO)
    assert checkpoints.save(4, make_state(4))
    assert checkpoints.save(5, make_state(5))
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    checkpoints.close()
    assert faults.failed == 0


def test_a_save_that_storage_fails_is_a_save_error_at_once_and_the_next_one_works(saved, faults):
    checkpoints = Checkpointer(saved, keep=None)
    faults.fail(str(saved), errno.EIO, on="listdir")
    with pytest.raises(StorageError, match=r"checkpoint 3 could not be saved in .*output error"):
        checkpoints.save(3, make_state(3))
    assert storage.now() < 30  # seconds of pauses
    faults.mend()
    assert checkpoints.save(3, make_state(3))
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.close()


def test_a_checkpoint_that_is_emptied_is_named_at_the_next_save_and_its_folder_goes(
    tmp_path, caplog
):
    checkpoints = Checkpointer(tmp_path, keep=2, keep_best=0)
    for step in (1, 2):
        checkpoints.save(step, make_state(step))
    checkpoints.wait()
    for path in [p for p in (tmp_path / "2").rglob("*") if p.is_file()]:
        path.unlink()
    checkpoints.save(3, make_state(3))
    assert checkpoints.steps() == [1, 3]  # the emptied one does not count among the two kept
    assert "checkpoint 2 in " in caplog.text
    assert "was whole and is no longer" in caplog.text
    (tmp_path / "3" / "manifest" / "metadata").unlink()
    checkpoints.save(4, make_state(4))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4", "damaged-3"]


def test_a_full_disk_gives_up_the_oldest_checkpoint_that_the_save_would_delete(tmp_path):
    state = {"w": jnp.arange(32.0 * 1024)}  # 128 kB
    with small_disk(tmp_path / "disk", "size=500k") as disk:
        with Checkpointer(disk / "c", keep=2, keep_best=0) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state)
            checkpoints.wait()
            (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 60_000))
            assert checkpoints.save(3, state)
            assert checkpoints.steps() == [2, 3]
        # The only one that there is stays: the disk is said to be full.
        with Checkpointer(disk / "c", keep=1, keep_best=0) as checkpoints:
            shutil.rmtree(disk / "c" / "2")
            (disk / "more").write_bytes(bytes(shutil.disk_usage(disk).free - 60_000))
            with pytest.raises(StorageError, match=r"bytes and .* are free"):
                checkpoints.save(4, state)
            assert checkpoints.steps() == [3]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_restore_one_and_the_same_or_fail_together(tmp_path, processes):
    with Checkpointer(tmp_path / "c", keep=None) as checkpoints:
        for step in (1, 2, 3):
            whole = jnp.arange(8.0) * step
            checkpoints.save(step, {"whole": whole, "cut": whole, "n": np.int64(step)})
    hosts, port = str(ROOT / "tests" / "workers" / "hosts.py"), str(free_port())
    started = [
        Process([hosts, str(tmp_path / "c"), str(i), str(processes), port], tmp_path, str(i))
        for i in range(processes)
    ]
    try:
        for process in started:
            assert process.code(timeout=PATIENCE) == 0, process.errors
        lines = [process.output.splitlines() for process in started]
        errors = [process.errors for process in started]
    finally:
        for process in started:
            process.end()
    answers = [[line for line in each if not line.startswith("[Gloo]")] for each in lines]
    assert all(answer == answers[0] for answer in answers), answers
    said = dict(line.split(" ", 1) for line in answers[0])
    last = processes - 1
    assert said["sound"].startswith("step 3 ")
    assert said["stale"] == said["again"] == said["sound"]
    assert said["other-bits"].startswith("step 2 ")
    assert said["timeout"] == "StorageError"
    assert said["shared"] == "seen"
    blind = ", ".join(map(str, range(1, processes)))
    assert said["unshared"] == f"process {blind} does not see what process 0 writes"
    assert f"process {last} cannot read what was saved; going on from checkpoint 2" in errors[0]
    assert f"cannot be read by process {last}" in errors[0]
    assert "'whole' is not what was saved (checksum)" in errors[last]
    assert sorted(path.name for path in (tmp_path / "c").iterdir() if path.name.isdigit()) == list(
        "123"
    )


def unevaluated():
    return make_experiment(eval_batches=None)


def check_logs(run, steps):
    logged = [line["step"] for line in lines(run) if "train/loss" in line]
    assert logged == list(range(1, steps + 1))
    assert sorted(read_curves(run / "tensorboard")["train/loss"]) == list(range(1, steps + 1))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the run that nothing happens to."""
    run = jt.RunOptions(run_dir=str(tmp_path_factory.mktemp("whole")))
    return digest(jt.fit(unevaluated(), run).state)


def test_a_run_goes_on_through_failures_under_checkpoints_logs_and_the_loader(
    tmp_path, faults, monkeypatch, undisturbed, capsys, caplog
):
    run, rows, fails = tmp_path / "run", Rows.__getitem__, [0]

    def row(self, index):
        if fails[0]:
            fails[0] -= 1
            raise HttpError(503)
        return rows(self, index)

    monkeypatch.setattr(Rows, "__getitem__", row)
    actions = {
        2: lambda: faults.fail("log.jsonl", errno.ENOSPC, on="write"),
        3: lambda: (
            eventually((run / "checkpoints" / "2").exists),
            faults.fail(f"{run}/checkpoints", errno.EIO, on="listdir"),
        ),
        4: lambda: faults.fail("tfevents", errno.ESTALE, on="write"),
        5: lambda: fails.__setitem__(0, 3),
        9: faults.mend,
    }
    options = jt.RunOptions(run_dir=str(run), save_every=2, log_every=1, keep=9)
    result = jt.fit(during(unevaluated(), actions), options)
    assert digest(result.state) == undisturbed
    assert fails == [0]
    assert faults.failed > 10
    check_logs(run, 12)
    assert Checkpointer(run / "checkpoints").steps() == [2, 10, 12]
    printed = capsys.readouterr().out
    assert (
        printed.count("warning: checkpoint 4 could not be saved") == printed.count("warning") == 1
    )
    assert printed.count("step 10: checkpoints are written again") == 1
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in line for line in said) == 2
    assert sum("the rows of batch" in line and "trying again" in line for line in said) == 1


@contextlib.contextmanager
def full_disk_in_a_run(folder):
    """A small disk for a run's whole folder, and how to fill it once a step has been saved."""
    with small_disk(folder / "disk", "size=1m") as disk:

        def fill(step):
            eventually((disk / "run" / "checkpoints" / str(step)).exists)
            with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        run = jt.RunOptions(run_dir=str(disk / "run"), save_every=2, log_every=1, keep=9)
        yield disk, fill, run


def test_a_run_on_a_disk_that_is_full_for_a_while(tmp_path, undisturbed, capsys):
    with full_disk_in_a_run(tmp_path) as (disk, fill, options):
        actions = {4: lambda: fill(2), 9: (disk / "ballast").unlink}
        result = jt.fit(during(unevaluated(), actions), options)
        assert digest(result.state) == undisturbed
        check_logs(disk / "run", 12)
        assert Checkpointer(disk / "run" / "checkpoints").steps() == [2, 10, 12]
        assert capsys.readouterr().out.count("warning") == 1


@pytest.mark.slow
def test_a_run_on_a_disk_that_stays_full(tmp_path, monkeypatch, undisturbed, capsys):
    monkeypatch.setattr(sys.modules["jaxtrain.run.loop"], "LAST_SAVE_SECONDS", 0.2)
    monkeypatch.setattr(writers, "CLOSE_SECONDS", 0.2)
    with full_disk_in_a_run(tmp_path) as (disk, fill, options):
        with pytest.raises(SystemExit) as end, refusing():
            jt.fit(during(unevaluated(), {8: lambda: fill(6)}), options)
        assert end.value.code == exit_codes.STORAGE
        assert "the last checkpoint: checkpoint 12 could not be saved" in capsys.readouterr().err
        (disk / "ballast").unlink()
        resumed = jt.fit(unevaluated(), dataclasses.replace(options, resume=True))
        assert digest(resumed.state) == undisturbed
        check_logs(disk / "run", 12)


@pytest.mark.slow
def test_a_file_lost_under_a_run_ends_it_with_a_status_to_restart_on(tmp_path, monkeypatch, capsys):
    """The next start refuses it where it is still missing; the status of a wrong flag would end
    what a launcher could have gone on with."""
    rows, lost = Rows.__getitem__, []

    def row(self, index):
        if lost:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "rows.bin")
        return rows(self, index)

    monkeypatch.setattr(Rows, "__getitem__", row)
    experiment = during(unevaluated(), {6: lambda: lost.append(True)})
    with pytest.raises(SystemExit) as end, refusing():
        jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path), save_every=2))
    assert end.value.code == exit_codes.STORAGE
    assert capsys.readouterr().err.endswith("error: No such file or directory: 'rows.bin'\n")
    assert Checkpointer(tmp_path / "checkpoints").latest_step() >= 2
