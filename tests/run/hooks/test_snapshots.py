"""Snapshots in memory: what a run that was interrupted continues from."""

import json

import pytest

import jaxtrain as jt
from jaxtrain.host import distributed
from jaxtrain.host.keeper import Keeper
from jaxtrain.run.checkpoints import objects
from jaxtrain.run.checkpoints.checkpointer import digest
from tests.run.test_loop import losses, make_experiment


class Killed(Exception):
    pass


class Kill(jt.Hook):
    def __init__(self, step):
        self.step = step

    def on_step(self, step, state):
        if step == self.step:
            raise Killed


@pytest.fixture
def keepers(monkeypatch):
    with Keeper("127.0.0.1") as one, Keeper("127.0.0.1") as two:
        monkeypatch.setenv(distributed.MEMORY, f"{one.address} {two.address}")
        yield one, two


def run(folder, *, kill=None, **options):
    """Trains 12 steps, or as many as it is let, with a snapshot after each third."""
    options = jt.RunOptions(run_dir=str(folder), memory_every=3, log_every=1, **options)
    experiment = make_experiment(mesh={"data": 4, "fsdp": 2})
    return jt.fit(experiment, options, hooks=[] if kill is None else [Kill(kill)])


def interrupted(folder, kill, **options):
    with pytest.raises(Killed):
        run(folder, kill=kill, **options)


def started(folder):
    """The step that each attempt began with, and what it read from memory."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    read = [event["step"] for event in events if event["event"] == "read from memory"]
    return [event["step"] for event in events if event["event"] == "ready"], read


def test_a_run_continues_from_memory_to_the_bits_of_one_that_was_not_interrupted(
    tmp_path, keepers, capfd
):
    folder = tmp_path / "run"
    interrupted(folder, 8)
    assert not (folder / "checkpoints").exists()  # Nothing is on storage.
    keepers[0].objects.clear()  # The launcher of this host was killed too.
    result = run(folder, resume=True)
    assert started(folder) == ([0, 6], [6])
    assert "step 6 was read from the memory of the hosts" in capfd.readouterr().out
    whole = run(tmp_path / "whole")
    assert digest(result.state) == digest(whole.state)
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_damaged_copies_are_passed_over_and_so_are_snapshots_older_than_storage(
    tmp_path, keepers, capfd
):
    folder = tmp_path / "run"
    interrupted(folder, 7, save_every=4)  # Step 4 is on storage, 6 in memory.
    for keeper in keepers:
        damaged = [name for name in keeper.objects if "/6/state/params" in name]
        assert damaged
        keeper.objects |= {name: b"torn" for name in damaged}
    interrupted(folder, 8, resume=True, save_every=4)  # Step 8 is on storage, 6 in memory.
    assert started(folder) == ([0, 4], [])
    said = " ".join(capfd.readouterr().out.split())
    assert "is not what was put there); this copy in memory is not used" in said
    run(folder, resume=True)
    assert started(folder) == ([0, 4, 8], [])


@pytest.mark.slow
def test_a_run_that_falls_back_behind_its_snapshot_takes_new_ones(tmp_path, keepers):
    folder = tmp_path / "run"
    interrupted(folder, 10, save_every=5)  # Steps 5 and 10 are on storage, 9 in memory.
    for file in (folder / "checkpoints" / "10" / "state").glob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    interrupted(folder, 8, resume=True, save_every=5)
    assert started(folder) == ([0, 5], [])
    assert {name.split("/")[2] for name in keepers[0].objects} == {"6"}


@pytest.mark.slow
def test_snapshots_that_fail_are_told_once_and_the_run_goes_on(
    tmp_path, keepers, capfd, monkeypatch
):
    keepers[1].__exit__()
    monkeypatch.setattr(objects, "PUT_SECONDS", 0.1)
    run(tmp_path / "run")
    assert capfd.readouterr().out.count("the run continues without it") == 1


def test_receipts_do_not_go_with_memory_and_a_call_ends_with_a_snapshot():
    with pytest.raises(ValueError, match="`memory_every` is 3 and `receipt` is set"):
        jt.RunOptions(memory_every=3, receipt=True)
    experiment = make_experiment(steps_per_call=2)
    with pytest.raises(ValueError, match="`memory_every` is 3 and `steps_per_call` 2"):
        jt.fit(experiment, jt.RunOptions(memory_every=3))
