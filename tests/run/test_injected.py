"""Every call of the file system fails once, with every error that passes: nothing is lost.

What a disturbed run comes to, after a restart where it asked for one, is what the undisturbed one
comes to: the same bits, the same lines, the same record of changes, and no remains.
"""

import dataclasses
import errno
import json
import shutil
import zlib

import pytest

import jaxtrain as jt
from jaxtrain.host import distributed, exit_codes, storage
from jaxtrain.run.refusal import refusing
from tests.run.injected import PASSING, Injected
from tests.run.test_loop import make_experiment

OPTIONS = jt.RunOptions(save_every=2, log_every=1, keep=2)
# What is started, and how a launcher starts it again: steps, seed, and options.
SCENARIOS = {
    "start": (4, 0, {}, {"auto_resume": True}),
    "resume": (8, 2, {"resume": True, "accept_changes": ("seed",)}, {"auto_resume": True}),
    "overwrite": (4, 3, {"overwrite": True}, {"overwrite": True}),
}


def fit(run, steps, seed, **options):
    experiment = make_experiment(steps=steps, seed=seed, eval_batches=None)
    jt.fit(experiment, dataclasses.replace(OPTIONS, run_dir=str(run), **options))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A run of six steps in two attempts, the second of which has changed the seed."""
    run = tmp_path_factory.mktemp("earlier") / "run"
    fit(run, 4, 0)
    fit(run, 6, 1, resume=True, accept_changes=("seed",))
    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcome(run):
    """What must come of a run, however it was disturbed."""
    saved = sorted(int(path.name) for path in (run / "checkpoints").iterdir())  # nothing else
    assert len(saved) <= OPTIONS.keep + 1  # the last save may have failed to delete one
    manifest = json.loads((run / "checkpoints" / str(saved[-1]) / "manifest/metadata").read_text())
    return {
        "last": saved[-1],
        "state": {name: leaf.get("checksum") for name, leaf in manifest["leaves"].items()},
        "log": [
            (x["step"], x["train/loss"]) for x in lines(run / "log.jsonl") if "train/loss" in x
        ],
        "changes": [line["changes"] for line in lines(run / "changes.jsonl")],
        "config": json.loads((run / "config.json").read_text()),
        "files": sorted(path.name for path in run.iterdir() if not path.name.startswith("hang-")),
        "notes": (run / "notes.txt").read_text(),
    }


class Disturbed:
    """Runs a scenario in which one call fails."""

    def __init__(self, scenario, earlier, folder, monkeypatch):
        self.steps, self.seed, self.first, self.again = SCENARIOS[scenario]
        self.folder, self.run, self.count = folder, folder / "0" / "run", 0
        self.monkeypatch = monkeypatch
        self.earlier = None if scenario == "start" else earlier
        elapsed = []
        monkeypatch.setattr(storage, "pause", elapsed.append)
        monkeypatch.setattr(storage, "now", lambda: sum(elapsed))
        monkeypatch.setenv(distributed.START, "a launcher")

    def __call__(self, chosen=(), number=errno.EIO):
        """Returns what came of it, the exit codes, and what was seen."""
        # A folder of its own: a thread of the run before may still write into that one's.
        shutil.rmtree(self.run, ignore_errors=True)
        self.count += 1
        self.run = self.folder / str(self.count) / "run"
        if self.earlier is not None:
            shutil.copytree(self.earlier, self.run)
        before = lines(self.run / "events.jsonl")
        codes = []
        with self.monkeypatch.context() as patch:
            injected = Injected(patch, self.run, chosen, number)
            codes.append(self._attempt(self.first))
        if codes[0]:
            assert codes[0] in exit_codes.RESTARTABLE
            codes.append(self._attempt(self.again))
        assert codes[-1] == 0
        if "overwrite" not in self.first:
            assert lines(self.run / "events.jsonl")[: len(before)] == before
        return outcome(self.run), codes, injected

    def _attempt(self, options):
        try:
            with refusing():
                fit(self.run, self.steps, self.seed, **options)
        except SystemExit as end:
            return end.code
        return 0


def test_every_first_look_of_a_start_that_resumes_may_fail(earlier, tmp_path, monkeypatch):
    """What a decision or a deletion follows from, each failing twice in one start."""
    names = ("", "/checkpoints", "/log.jsonl", "/events.jsonl", "/heartbeat.json", "/config.json")
    names += ("/owner.json", "/changes.jsonl", "/stopped.json", "/notes.txt")
    operations = ("stat", "open", "listdir", "scandir")
    chosen = [(each, name, i) for each in operations for name in names for i in (1, 2)]
    found, codes, injected = Disturbed("resume", earlier, tmp_path, monkeypatch)(chosen)
    assert codes == [0]
    assert len(injected.failed) > 12
    assert [step for step, _ in found["log"]] == list(range(1, 9))
    assert found["last"] == 8
    assert [line["seed"] for line in found["changes"]] == [[0, 1], [1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_any_call_may_fail_once(scenario, part, earlier, tmp_path, monkeypatch, capsys):
    disturbed = Disturbed(scenario, earlier, tmp_path, monkeypatch)
    expected, codes, injected = disturbed()
    assert codes == [0]
    wrong, missed = [], 0
    chosen = injected.calls()[part::8]
    for call in chosen:
        number = PASSING[zlib.crc32(repr(call).encode()) % len(PASSING)]
        try:
            found, codes, injected = disturbed([call], number)
        except Exception as error:
            wrong.append((call, number, repr(error)))
            continue
        missed += not injected.failed
        if differ := [name for name in expected if found[name] != expected[name]]:
            wrong.append((call, number, codes, {n: (expected[n], found[n]) for n in differ}))
    with capsys.disabled():
        print(f"{scenario} {part}: {len(chosen)} calls, {missed} of them not met again", *wrong)
    assert not wrong, "\n".join(map(str, wrong))
