"""Receipts: what the chain holds, what is found in it, and segments that are made again."""

import copy
import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.run import receipts
from jaxtrain.run.checkpoints import manifest
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest, leaf_digests
from jaxtrain.run.observe.report.health import examine
from jaxtrain.run.observe.report.records import read
from jaxtrain.sharding.stack import LayerOrder, Stack, StackedLeaf
from tests.commands import refused
from tests.commands import run as command

# Rows and a loss in a file, a line of which can be changed.
MODULE = """
import dataclasses
import jaxtrain as jt
from jaxtrain import data
from tests import problems

@dataclasses.dataclass(frozen=True)
class Config(jt.Config):
    pass

FACTOR = 1.0
CHANGED = {}

def rows(step):
    batch = problems.make_batch(step)
    if step in CHANGED:
        batch["y"][0, 2] += CHANGED[step]
    return batch

def loss_fn(params, batch, rng):
    loss = problems.noisy_loss(params, batch, rng)
    return dataclasses.replace(loss, total=FACTOR * loss.total)

def build(config):
    return config.experiment(
        "audited", init_fn=problems.init, loss_fn=loss_fn, batch=problems.make_batch(),
        optimizer=jt.make_optimizer("adamw", 1e-2), items_per_step=problems.ROWS,
        train_batches=lambda start, sharding: data.BatchStream(rows, start),
    )
"""


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """A run of three segments on a mesh of two devices, and its module."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "audited_rows.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("audited_rows")
        options = jt.RunOptions(run_dir=str(folder / "run"), save_every=4, keep=9, receipt=True)
        config = module.Config(run=options, steps=12)
        result = jt.fit(module.build(config), config.run)
        yield folder, module, config, result
    finally:
        sys.path.remove(str(folder))
        del sys.modules["audited_rows"]


def lines_of(folder):
    return [json.loads(line) for line in (folder / "receipts.jsonl").read_text().splitlines()]


def test_a_digest_is_of_the_bytes_in_natural_order():
    """By hand: whatever the dtype, on a mesh, and with layers cut and padded for a pipeline."""
    w = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(ml_dtypes.bfloat16)
    expected = hashlib.sha256(b'{"dtype": "bfloat16", "shape": [3, 4, 2]}' + w.tobytes())
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    spec = jax.sharding.PartitionSpec(None, ("fsdp", "tensor"), None)
    cut = Stack(counts=(2, 1)).cut({"blocks": {"w": w}})["blocks"]["w"]
    assert cut.shape[0] == 4
    stacked = StackedLeaf(cut, LayerOrder((4,), (0, 1, 2)))
    laid = jax.device_put(w, jax.sharding.NamedSharding(mesh, spec))
    for leaf in (w, laid, stacked):
        found = leaf_digests({"blocks": {"w": leaf}, "n": 3})
        assert found["blocks/w"] == expected.hexdigest()
        assert found["n"] == sha('{"python": "int", "value": 3}')


def test_a_chain_binds_each_save_to_the_one_before(audited):
    folder, _, _, result = audited
    lines, previous = lines_of(folder / "run"), "0" * 64
    kinds = [("start", 0), ("after", 1)]
    kinds += [("save", 4), ("after", 5), ("save", 8), ("after", 9), ("save", 12)]
    assert [(line["kind"], line["step"]) for line in lines] == kinds
    for line in lines:
        content = {name: x for name, x in line.items() if name != "sha256"}
        assert line["previous"] == previous
        previous = line["sha256"]
        assert previous == sha(json.dumps(content, sort_keys=True))
    assert lines[-1]["state"] == digest(result.state)
    assert lines[0]["files"]["audited_rows.py"] == sha(MODULE)
    assert "jaxtrain/step.py" in lines[0]["files"]
    assert [len(line["rows"]) for line in lines if line["kind"] == "save"] == [4, 4, 4]
    (found,) = (each.text for each in examine(*read([folder / "run"])) if "receipts" in each.text)
    assert f"segments 3, attempts 1, last hash {previous}" in found


def test_any_segment_is_repeated_and_a_changed_row_or_line_is_found(audited, capsys, monkeypatch):
    folder, module, *_ = audited
    verify = ["verify", str(folder / "run")]
    status, out, _ = command(capsys, *verify)
    assert (status, out.count("can be repeated")) == (0, 3)
    verify += ["--module", "audited_rows", "--segment"]
    before = sorted(str(path) for path in folder.rglob("*"))
    threads = os.environ["NPROC"]
    monkeypatch.delenv("NPROC")  # A segment is repeated with as many threads as the run had.
    for number, steps in ((1, "1 to 4"), (3, "9 to 12")):
        expected = f"segment {number}: steps {steps} repeated: the same bits\n"
        expected += "changed since: nothing that a receipt records\n"
        assert command(capsys, *verify, str(number))[:2] == (0, expected)
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert os.environ["NPROC"] == threads

    monkeypatch.setitem(module.CHANGED, 5, np.float32(0.1))  # the batch of step 6
    (folder / "audited_rows.py").write_text(MODULE.replace("[0, 2] +=", "[0, 2] -="))
    status, out, _ = command(capsys, *verify, "2")
    (folder / "audited_rows.py").write_text(MODULE)
    assert status == 1
    for said in (
        "segment 2: steps 5 to 8 repeated: other bits",
        "the rows of step 6 are others than in the receipt",
        "the state of step 8 has other bits, in ",
        "mu/up/bias: off by ",
        "changed since: the file audited_rows.py is another",
    ):
        assert said in out
    assert out.count("changed since") == 1

    status, out, _ = command(capsys, *verify, "1", "--seed", "1")
    assert status == 1
    assert "step 0 does not begin with its receipt's state, in 3 leaves" in out
    assert "changed since: seed was 0, now 1" in out
    assert "--segment is 4: the run has segments 1 to 3" in refused(capsys, *verify, "4")
    shutil.rmtree(folder / "run" / "checkpoints" / "4")
    error = refused(capsys, *verify, "2")
    assert "checkpoint 4, from which it began, has been deleted" in error
    assert error.endswith("segments that can be repeated: 1, 3\n")


def test_other_threads_are_named_and_older_receipts_have_none(audited):
    start = lines_of(audited[0] / "run")[0]
    other, older = copy.deepcopy(start), copy.deepcopy(start)
    other["record"]["provenance"]["threads"] = 1
    del older["record"]["provenance"]["threads"]
    assert receipts.differences(start, other) == [f"threads was {os.environ['NPROC']}, now 1"]
    assert receipts.differences(older, other) == []


def test_what_is_changed_in_the_middle_is_found(audited, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(audited[0] / "run", run)
    kept = (run / "receipts.jsonl").read_text()
    lines = kept.splitlines()

    def broken(*new):
        (run / "receipts.jsonl").write_text("\n".join(new) + "\n")
        status, out, _ = command(capsys, "verify", str(run))
        assert status == 1
        assert examine(*read([run]))[0].level == "bad"
        return out

    other = json.loads(lines[2]) | {"state": "0" * 64}
    assert "line 3 is not what was written" in broken(*lines[:2], json.dumps(other), *lines[3:])
    resealed = manifest.seal({k: v for k, v in other.items() if k != "sha256"})
    resealed = json.dumps(resealed)
    assert "line 4 does not follow line 3" in broken(*lines[:2], resealed, *lines[3:])
    assert "line 3 does not follow line 2" in broken(*lines[:2], *lines[3:])
    assert "line 2 is not what was written" in broken(lines[0], "{", *lines[2:])

    def forged(changed):
        """The text of a chain whose hashes were computed anew."""
        sealed, previous = [], receipts._NOTHING
        for line in changed:
            content = {name: value for name, value in line.items() if name != "sha256"}
            sealed.append(manifest.seal(content | {"previous": previous}))
            previous = sealed[-1]["sha256"]
        return map(json.dumps, sealed)

    chain = list(map(json.loads, lines))
    assert list(forged(chain)) == lines
    (first, *_), (save, *later) = ([i for i, x in enumerate(chain) if "rows" in x] for _ in "ab")
    cut = {**chain[first], "rows": chain[first]["rows"][1:]}
    steps = len(cut["rows"])
    out = broken(*forged([*chain[:first], cut, *chain[first + 1 :]]))
    assert f"digests of {steps} steps lead from step 0 to {steps + 1}" in out
    swapped = list(chain)
    swapped[save], swapped[later[0]] = chain[later[0]], chain[save]
    assert f"lead from step {chain[later[0]]['step']} to {chain[save]['step']}" in broken(
        *forged(swapped)
    )
    assert "line 1 begins the chain and is no start" in broken(*forged(chain[1:]))
    other = chain[save] | {"leaves": dict.fromkeys(chain[save]["leaves"], "0")}
    assert f"line {save + 1} is not what" in broken(
        *forged([*chain[:save], other, *chain[save + 1 :]])
    )
    for odd in ({"step": None}, {"kind": {}}, {"leaves": {}}):  # and what follows is compared on
        out = broken(*forged([*chain[:save], chain[save] | odd, *chain[save + 1 :]]))
        assert out.count("is not what was written") == 1
    (run / "receipts.jsonl").write_text(kept)

    # A parameter, with a manifest that is made to fit.
    checkpoints = Checkpointer(run / "checkpoints", keep=None)
    state = dict(checkpoints.leaves(12))
    state["params/down/kernel"] = np.nextafter(state["params/down/kernel"], np.float32(9))
    shutil.rmtree(run / "checkpoints" / "12")
    with checkpoints:
        checkpoints.save(12, state)
    status, out, _ = command(capsys, "verify", str(run))
    assert status == 1
    assert "checkpoint 12 is not the state of its receipt: params/down/kernel" in out
    message = refused(capsys, "verify", str(tmp_path))
    assert "has no receipts.jsonl: the run was made without --receipt" in message


def test_a_resumed_run_continues_its_chain_and_says_where_bits_are_others(
    audited, tmp_path, capsys
):
    _, module, config, whole = audited
    run = tmp_path / "run"
    options = dataclasses.replace(config.run, run_dir=str(run))

    def resumed(steps, **more):
        own = dataclasses.replace(config, run=dataclasses.replace(options, **more))
        return jt.fit(module.build(own).with_(steps=steps), own.run)

    resumed(8)
    # Killed in step 9: its after line is written, and the checkpoint of a later save is lost.
    made = lines_of(run)
    shutil.rmtree(run / "checkpoints" / "8")
    capsys.readouterr()
    assert digest(resumed(12, resume=True).state) == digest(whole.state)
    assert "other bits" not in "".join(capsys.readouterr())
    lines = lines_of(run)
    assert receipts.check(lines) == []
    kinds = [(line["kind"], line["step"]) for line in lines]
    assert kinds[4:] == [("start", 4), ("save", 8), ("after", 9), ("save", 12)]
    assert [line["state"] for line in lines if line["kind"] == "save"][1] == made[4]["state"]
    assert len(receipts.segments(lines)) == 3

    # Another first step, as another jaxlib makes it.
    for old in (8, 12):
        shutil.rmtree(run / "checkpoints" / str(old))
    module.CHANGED[4] = np.float32(1e-3)
    try:
        resumed(12, resume=True)
    finally:
        module.CHANGED.clear()
    warning = " ".join("".join(capsys.readouterr()).split())
    assert (
        "warning: step 5 has other bits than an earlier attempt had from the same state" in warning
    )
    assert receipts.check(lines_of(run)) == []
