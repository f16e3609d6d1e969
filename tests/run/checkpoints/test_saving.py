"""When a run saves, and what a save that fails does to it."""

import math
import pathlib
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import pytest

import jaxtrain as jt
from jaxtrain.host import exit_codes, storage
from jaxtrain.host.storage import StorageError
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, SaveError, digest
from jaxtrain.run.hooks import saving
from jaxtrain.run.hooks.saving import Saving
from jaxtrain.run.observe.journal import Journal
from tests.run.test_loop import losses, make_experiment

ROOT = pathlib.Path(__file__).parents[3]


class Stub:
    """A checkpointer, and a run with its progress line, that only remember."""

    def __init__(self, losses=(), **run):
        self.losses, self.saved, self.notes = dict(losses), [], []
        self.fail, self.fail_later = set(), set()
        self.progress = self.watchdog = self.owner = self
        self.journal, self.alerts = Journal(), types.SimpleNamespace(wanted=set())
        self.options = jt.RunOptions()
        self.of(make_experiment())
        self.peers = types.SimpleNamespace(stop_wanted=False)
        vars(self).update(run)

    def of(self, experiment):
        self.steps, self.stack = experiment.steps, experiment.stack
        self.metadata, self.data = experiment.metadata, experiment.data

    def before_save(self):
        """Replaced by a test."""

    def check(self):
        """Nobody else has the folder."""

    def evaluate(self, saving, step):
        if step in self.losses:
            saving.on_evaluation(step, {"loss": self.losses[step]})

    def save(self, step, state, *, metrics, config, leave_out):
        self.before_save()
        if step in self.fail:
            raise SaveError(f"no room for {step}")
        if step in self.fail_later:
            self.fail.add("wait")
        self.saved.append((step, metrics))

    def add_metrics(self, step, metrics):
        """Nothing is ever there already."""

    def best_steps(self):
        return []

    def is_saving(self):
        return False

    def written(self):
        return (0, 0)

    def size(self, step):
        return 1536 * step

    def wait(self):
        if "wait" in self.fail:
            self.fail.remove("wait")
            raise SaveError("the one before failed")

    def note(self, text):
        self.notes.append(text)


def drive(stub, options, *, steps=12, seconds=10.0, each=1, **changes):
    """Steps, or calls of ``each`` of them, of ten seconds."""
    now = [0.0]
    stub.options = options
    stub.of(make_experiment(steps=steps, **changes))
    saving = Saving(stub, stub, clock=lambda: now[0])
    for step in range(each, steps + 1, each):
        now[0] += seconds
        stub.evaluate(saving, step)
        saving.on_step(step, None)
    return saving


@pytest.mark.parametrize(("each", "looks"), [(1, [1, 11, 21, 31]), (8, [8, 24]), (16, [16, 32])])
def test_several_processes_look_at_one_clock_now_and_then(monkeypatch, each, looks):
    looked = []

    def broadcast(flags):
        looked.append(bool(flags[0]))
        return flags

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.experimental.multihost_utils.broadcast_one_to_all", broadcast)
    stub = Stub()
    drive(stub, jt.RunOptions(save_minutes=0.01), steps=36, each=each)
    assert [step for step, _ in stub.saved] == looks
    assert looked == [True] * len(looks)


def test_a_checkpoint_has_the_evaluation_of_its_own_step_alone():
    stub = Stub({2: 3.0, 6: 2.0, 8: 1.0})
    drive(stub, jt.RunOptions(save_every=4))
    assert stub.saved == [(4, None), (8, {"eval/loss": 1.0})]


def test_by_steps_by_minutes_and_on_the_best():
    def saved(losses=(), **options):
        stub = Stub(losses)
        drive(stub, jt.RunOptions(**options))
        return [step for step, _ in stub.saved]

    assert saved() == []
    assert saved(save_every=5) == [5, 10]
    losses = {2: 3.0, 3: 1.0, 4: 2.0, 5: 2.5, 6: math.nan, 7: 2.0, 8: 1.5}
    assert saved(losses, save_best=True, keep_best=2) == [2, 3, 4, 8]
    assert saved(save_every=4) == [4, 8]  # the last step is for finish
    assert saved(save_minutes=0.5) == [3, 6, 9]
    # A save of any kind starts the minutes anew.
    assert saved(save_every=5, save_minutes=0.5) == [3, 5, 8, 10]
    losses = {2: 3.0, 4: math.nan, 6: 2.0, 8: 2.5, 10: 1.0}
    assert saved(losses, save_best=True) == [2, 6, 10]
    assert saved(losses, save_best=True, save_every=8) == [2, 6, 8, 10]


def test_the_best_may_be_the_most():
    stub = Stub({2: 3.0, 4: 5.0, 6: 4.0})
    drive(stub, jt.RunOptions(save_best=True), best_mode="max")
    assert stub.saved == [(2, {"eval/loss": 3.0}), (4, {"eval/loss": 5.0})]


def test_a_failing_save_is_noted_once_and_made_again_a_minute_later():
    again = "; the run goes on without it, and tries again every minute"
    stub = Stub()
    stub.fail = {6, 12}
    drive(stub, jt.RunOptions(save_every=6), steps=30)
    # Steps take ten seconds: 6 and 12 fail, 18 is on the beat anyway.
    assert [step for step, _ in stub.saved] == [18, 24]
    assert stub.notes == [
        f"warning: no room for 6{again}",
        "step 18: checkpoints are written again",
    ]
    stub = Stub()
    stub.fail = {10}
    drive(stub, jt.RunOptions(save_every=10), steps=25)
    assert [step for step, _ in stub.saved] == [16, 20]
    # One that fails in the background is asked after a minute, and made again at once.
    stub = Stub()
    stub.fail_later = {10}
    drive(stub, jt.RunOptions(save_every=10), steps=25)
    assert [step for step, _ in stub.saved] == [10, 16, 20]
    assert stub.notes == [
        f"warning: the one before failed{again}",
        "step 16: checkpoints are written again",
    ]


def test_a_checkpoint_is_told_when_it_is_there():
    class Writing(Stub):
        def save(self, step, state, *, metrics, config, leave_out):
            super().save(step, state, metrics=metrics, config=config, leave_out=leave_out)
            self.asked = 0
            return True

        def is_saved(self, step):
            self.asked += 1  # the first save takes two steps, and the second fails
            return None if self.asked < 2 else step != 8

    stub = Writing()
    drive(stub, jt.RunOptions(save_every=4), steps=12).finish(12, None, seconds=1.0)
    assert stub.notes == ["checkpoint 4 saved within 20.0 s, 6.0 KiB"]
    stub.is_saved = lambda step: True
    drive(stub, jt.RunOptions(save_every=4), steps=4).finish(4, None, seconds=1.0)
    assert stub.notes[1:] == ["checkpoint 4 saved within 0.0 s, 6.0 KiB"]


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, which take no time."""
    pauses = []
    monkeypatch.setattr(storage, "pause", pauses.append)
    monkeypatch.setattr(storage, "now", lambda: sum(pauses))
    return pauses


def test_the_last_save_is_tried_again_and_must_succeed_in_the_end(pauses):
    stub = Stub()
    stub.fail = {12}
    saving = drive(stub, jt.RunOptions())
    with pytest.raises(StorageError, match=r"no room for 12, after tries for 20 s"):
        saving.finish(12, None, seconds=20.0)
    assert sum(pauses) == pytest.approx(20.0)
    stub.fail = {12, "wait"}
    done = len(pauses) + 3
    stub.before_save = lambda: stub.fail.discard(12) if len(pauses) >= done else None
    saving.finish(12, None, seconds=20.0)
    assert stub.saved == [(12, None)]


def test_a_signal_leaves_the_last_save_twenty_seconds(pauses):
    stub = Stub()
    stub.fail = {12}
    saving = drive(stub, jt.RunOptions())

    def signalled():
        stub.peers.stop_wanted = sum(pauses) >= 100

    stub.before_save = signalled
    with pytest.raises(StorageError, match="no room for 12"):
        saving.finish(12, None, seconds=300.0)
    assert 120 <= sum(pauses) < 125


def test_a_save_that_can_never_be_made_ends_the_run(pauses):
    class Unwritable(Stub):
        def before_save(self):
            raise SaveError("checkpoint 1 could not be saved: Permission denied", lasts=True)

    stub = Unwritable()
    with pytest.raises(ValueError, match="Permission denied: no checkpoint can be written so"):
        drive(stub, jt.RunOptions(save_every=1), steps=12)
    assert stub.progress.notes[0].startswith("warning: checkpoint 1 could not be saved")
    assert saving.LASTING_TRIES == 3
    with pytest.raises(ValueError, match="no checkpoint can be written so"):
        drive(Unwritable(), jt.RunOptions()).finish(12, None, seconds=300.0)
    assert sum(pauses) < 5
    # What passes in between starts the count anew.
    kinds = iter([True, True, False] * 4)
    stub = Stub()
    stub.before_save = lambda: (_ for _ in ()).throw(SaveError("no", lasts=next(kinds)))
    drive(stub, jt.RunOptions(save_every=1), steps=12)
    assert stub.saved == []


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_a_resumed_run_knows_the_best_so_far(tmp_path, mode, sign):
    with Checkpointer(tmp_path, best_mode=mode) as checkpoints:
        checkpoints.save(3, {"w": jnp.ones(1)}, metrics={"eval/loss": sign * 2.0})
        stub = Stub({4: sign * 2.5, 6: sign * 1.5}, options=jt.RunOptions(save_best=True))
        stub.of(make_experiment(best_mode=mode))
        saving = Saving(stub, checkpoints)
        saving.checkpoints = stub
        for step in range(12):
            stub.evaluate(saving, step)
            saving.on_step(step, None)
        assert [step for step, _ in stub.saved] == [6]


def test_a_run_trains_through_failing_saves_and_ends_as_without_them(
    tmp_path, monkeypatch, capsys, pauses
):
    """The disk is full from step 4 to step 8 and at the end; then the folder is resumed from."""
    room = Checkpointer._check_room

    def full(self, step, size):
        if 4 <= step <= 8 or step == 12:
            with self._failing_as_one(f"checkpoint {step}"):
                raise OSError(28, "No space left on device")
        room(self, step, size)

    whole = jt.fit(make_experiment(), jt.RunOptions(run_dir=str(tmp_path / "whole")))
    options = jt.RunOptions(run_dir=str(tmp_path / "run"), save_every=2, log_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_check_room", full)
        with pytest.raises(StorageError, match=r"checkpoint 12 could not be saved in .*No space"):
            jt.fit(make_experiment(), options)
    printed = capsys.readouterr().out
    assert printed.count("warning: ") == 1  # the last one is said where it is tried again
    assert "warning: checkpoint 4 could not be saved" in printed
    assert "step 10: checkpoints are written again" in printed
    checkpoints = Checkpointer(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == [2, 10]
    assert sorted(losses(tmp_path / "run")) == list(range(1, 13))  # training itself went on
    resume = jt.RunOptions(run_dir=str(tmp_path / "run"), resume=True)
    resumed = jt.fit(make_experiment(), resume)
    assert digest(resumed.state) == digest(whole.state)


def test_a_run_resumes_from_the_newest_sound_checkpoint(tmp_path, caplog):
    options = jt.RunOptions(run_dir=str(tmp_path), save_every=4, keep=3)
    whole = jt.fit(make_experiment(), options)
    # The newest lost its manifest, the one before its arrays: the one of step 4 is left.
    (tmp_path / "checkpoints" / "12" / "manifest" / "metadata").write_text("")
    for path in (tmp_path / "checkpoints" / "8" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-10])
    resume = jt.RunOptions(run_dir=str(tmp_path), resume=True, keep=3)
    resumed = jt.fit(make_experiment(), resume)
    assert digest(resumed.state) == digest(whole.state)
    assert "checkpoint 12" in caplog.text
    assert "going on from checkpoint 4" in caplog.text
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["12", "4", "damaged-12", "damaged-8"]


@pytest.mark.slow
def test_a_last_save_that_fails_is_a_sentence_and_a_status_of_failure(tmp_path):
    code = """
import importlib, sys, jaxtrain as jt
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.refusal import refusing
from tests.run.test_loop import losses, make_experiment
def full(self, step, size):
    with self._failing_as_one(f"checkpoint {step}"):
        raise OSError(28, "No space left on device")
Checkpointer._check_room = full
importlib.import_module('jaxtrain.run.loop').LAST_SAVE_SECONDS = 0.1
with refusing():
    jt.fit(make_experiment(steps=2), jt.RunOptions(run_dir=sys.argv[1]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == exit_codes.STORAGE
    assert "Traceback" not in done.stderr
    # Before it, plugins of JAX may say that they found no device.
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: the last checkpoint: checkpoint 2 could not be saved in ")


def test_a_save_that_goes_on_writing_is_no_hang(monkeypatch):
    """Files that grow feed the watchdog; files that stand still do not."""
    stub, sizes, beats = Stub(), [0], []
    monkeypatch.setattr(sys.modules["jaxtrain.run.hooks.saving"], "LOOK_SECONDS", 0.005)
    stub.written = lambda: (1, sizes[0])
    stub.beat = lambda doing: beats.append(doing)
    saving = Saving(stub, stub)

    def upload():
        for size in range(1, 4):
            sizes[0] = size
            deadline = time.monotonic() + 30
            while len(beats) < size and time.monotonic() < deadline:
                time.sleep(0.001)
        fed = len(beats)
        time.sleep(0.1)
        assert len(beats) <= fed + 1

    stub.wait = upload
    saving.finish(12, None, seconds=1.0)
    assert beats[:3] == ["while a checkpoint is being written"] * 3
