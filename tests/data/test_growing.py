"""Stores that grow while a run reads them: what a step sees follows from the seed and the log."""

import dataclasses
import json
import os
import threading

import jax
import numpy as np
import pytest

from experiments import gpt
from jaxtrain import data, fit
from jaxtrain.data import Batches, ByteTokenizer, Document, growing, tokenize, writing
from jaxtrain.data.loader import shuffled
from jaxtrain.data.sources import Documents, Split
from jaxtrain.host import storage
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.folder import WATERMARKS
from jaxtrain.run.options import RunOptions
from jaxtrain.run.replay import load_run
from tests.commands import refused
from tests.commands import run as command

BYTES, T, B = ByteTokenizer(), 8, 4


def some(number, count=12):
    """Texts that only this number has, to train on and held out."""
    texts = [f"text {number}.{n} ".encode() * (3 + n) for n in range(count)]
    documents = [Document(f"{number}/{n}", text) for n, text in enumerate(texts)]
    return Split(
        *(Documents(lambda side=side: iter(side)) for side in (documents[1:], documents[:1]))
    )


@pytest.fixture
def store(tmp_path):
    data.write_store(some(0), BYTES, tmp_path / "store")
    return tmp_path / "store"


def test_a_grown_store_is_all_of_its_texts(store):
    before = data.open_store(store)
    for number in (1, 2):
        grown = data.append_store(some(number), store)
    for side in ("train", "held_out"):
        texts = [document for n in range(3) for document in getattr(some(n), side)]
        expected, found = tokenize(texts, BYTES), grown.corpus(side)
        np.testing.assert_array_equal(found.tokens[:], expected.tokens)
        np.testing.assert_array_equal(found.starts, expected.starts)
        assert found.num_bytes == expected.num_bytes
    assert len(grown.held_out(10_000).starts) == 3
    assert len(before.corpus().tokens) == len(data.open_store(store, parts=0).corpus().tokens)
    assert before.corpus().fingerprint == data.open_store(store, parts=0).corpus().fingerprint
    assert grown.verify() > before.verify()
    shard = next(grown.parts[1].path.glob("train*.tokens"))
    shard.write_bytes(shard.read_bytes()[::-1])
    with pytest.raises(ValueError, match="damaged: train"):
        grown.verify()


def test_an_append_is_whole_or_absent_and_never_twice(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_join", lambda *args: 1 / 0)  # as if killed before the manifest
        with pytest.raises(ZeroDivisionError):
            data.append_store(some(1), store)
    assert (store / "parts" / "next").exists()
    assert data.open_store(store).parts == ()
    assert len(data.append_store(some(1), store).parts) == 1
    assert len(data.append_store(some(1), store).parts) == 1
    assert len(data.append_store(some(0), store).parts) == 1
    (store / "parts" / "000001").rename(store / "parts" / "000002")
    with pytest.raises(ValueError, match="000001' is missing"):
        data.open_store(store)


def test_batches_are_a_function_of_seed_step_and_log(store, tmp_path):
    """Against the definition, row by row; and again when the store has grown further."""
    marks = data.Watermarks(store, every=5)
    marks.keep(tmp_path / "log")
    batches = Batches(data.GrowingRows(marks, lambda c: data.pack(c, T)), global_batch=B, seed=3)
    found = {}
    for step in range(23):
        if step in (7, 12):
            data.append_store(some(step), store)
        found[step] = batches.batch(step)["tokens"]
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["step"], line["parts"]) for line in log] == [
        (0, 0),
        (5, 0),
        (10, 1),
        (15, 2),
        (20, 2),
    ]
    plain = Batches(data.pack(data.open_store(store, parts=0).corpus(), T), global_batch=B, seed=3)
    for step in range(23):
        if step < 10:  # as of a store that does not grow
            expected = plain.batch(step)["tokens"]
        else:
            parts, begun = (1, 10) if step < 15 else (2, 15)
            texts = [document for n in (0, 7, 12)[: parts + 1] for document in some(n).train]
            rows = data.PackedTokens(tokenize(texts, BYTES), T)
            own = int(np.random.SeedSequence((3, begun)).generate_state(1)[0])
            places = range((step - begun) * B, (step - begun + 1) * B)
            expected = np.stack([rows[shuffled(n, len(rows), own)]["tokens"] for n in places])
        np.testing.assert_array_equal(found[step], expected)
    data.append_store(some(99), store)
    again = data.Watermarks(store, every=5, log=log)
    again.keep(tmp_path / "log")
    batches = Batches(data.GrowingRows(again, lambda c: data.pack(c, T)), global_batch=B, seed=3)
    for step in (0, 11, 14, 22):
        np.testing.assert_array_equal(batches.batch(step)["tokens"], found[step])
    assert again.at(24).tokens == log[-1]["tokens"] < again.at(25).tokens
    assert again.before(11) == log[:3]


def test_the_other_processes_read_what_the_first_decides(store, tmp_path, monkeypatch):
    first = data.Watermarks(store, every=5)
    first.keep(tmp_path / "log")
    other = data.Watermarks(store, every=5)
    other.keep(tmp_path / "log")
    data.append_store(some(1), store)
    threading.Timer(0.3, first.at, [5]).start()
    monkeypatch.setattr(
        growing.jax, "process_index", lambda: int(threading.current_thread() is main)
    )
    main, found = threading.current_thread(), None
    found = other.at(7)
    assert (found.step, found.parts) == (5, 1)
    assert first.at(7) == found
    monkeypatch.setattr(growing, "WAIT_SECONDS", 0.3)
    with pytest.raises(storage.StorageError, match="watermark of step 10"):
        other.at(10)


def test_a_log_belongs_to_the_start_that_claimed_it_last(store, tmp_path):
    old, new = (data.Watermarks(store, every=5) for _ in range(2))
    for marks in (old, new):
        marks.keep(tmp_path / "log", lambda marks=marks: marks is old)
    new.at(5)
    data.append_store(some(1), store)
    kept = (tmp_path / "log").read_text()
    assert old.at(5).parts == 0  # what the other has decided
    old.at(10)
    assert (tmp_path / "log").read_text() == kept


def test_other_text_in_the_place_of_a_part_is_refused(store, tmp_path):
    data.append_store(some(1), store)
    log = [dict(step=0, parts=1, tokens=9, text="another")]
    with pytest.raises(ValueError, match="other text in its first 1 parts"):
        len(data.GrowingRows(data.Watermarks(store, every=1, log=log), lambda c: data.pack(c, T)))
    log[0]["parts"] = 2
    with pytest.raises(ValueError, match="has 1 parts and 2 are asked for"):
        len(data.GrowingRows(data.Watermarks(store, every=1, log=log), lambda c: data.pack(c, T)))


def test_the_command_appends(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for n in range(3):
            (tmp_path / name / f"{n}.txt").write_text(f"{name} {n}" * 20)
    rows = tmp_path / "chat.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    out, made = str(tmp_path / "out"), ("--workers", "1")
    command(capsys, "tokenize", "--data", str(tmp_path / "a"), "--out", out, *made)
    add = ("tokenize", "--out", out, "--append", *made, "--data")
    assert "appended   1 parts" in command(capsys, *add, str(tmp_path / "b"))[1]
    assert "nothing is added" in command(capsys, *add, str(tmp_path / "b"))[1]
    told = refused(capsys, *add, str(rows), "--chat-template", "plain")
    assert "of another kind" in told
    assert not os.path.exists(f"{out}/parts/next")
    assert "--append takes the tokenizer" in refused(capsys, *add, "b", "--tokenizer", "300")


def flags(store, folder, **more):
    run = RunOptions(run_dir=str(folder), save_every=10, keep=9, **more)
    sizes = {"layers": 1, "width": 16, "heads": 2, "seq_len": 16, "global_batch": 8}
    rest = {"sample_tokens": 0, "held_out_bytes": 400, "grow_every": 5, "steps": 30}
    return gpt.Config(data=str(store), run=run, **sizes, **rest)


def test_what_cannot_grow_is_refused(store, tmp_path):
    for given, told in (
        ({"data": "python"}, "is not a token store"),
        ({"data": f"a=1:{store}"}, "is not a token store"),
        ({"epochs": 2.0, "steps": 250}, "how many rows one has is not known"),
    ):
        config = flags(store, tmp_path / "run")
        with pytest.raises(ValueError, match=told):
            gpt.build(type(config)(**{**vars(config), **given}))


def test_a_run_to_resume_reads_a_store_as_it_was_at_the_start(store, tmp_path):
    """Whether it grows from now on or not: by the fingerprint in the run's folder."""
    data.append_store(some(1), store)
    text = data.open_store(store).corpus().fingerprint
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"provenance": {"text": text}}))
    data.append_store(some(2), store)
    for every in (0, 5):
        config = flags(store, tmp_path / "run", resume=True)
        experiment = gpt.build(dataclasses.replace(config, grow_every=every))
        assert experiment.metadata.fingerprints["text"] == text
    assert experiment.data.watermarks.first.parts == 1
    assert experiment.data.watermarks.at(5).parts == 2


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_rows_though_the_store_has_grown(store, tmp_path):
    """Parameters and optimizer state of an interrupted run to the bit, with and without its log."""

    def run(folder, **more):
        config = flags(store, folder, **more)
        return fit(gpt.build(config), config.run)

    config = flags(store, tmp_path / "whole")
    experiment, place = gpt.build(config), data.Watermarks.at

    def at(marks, step):
        if step == 12 and marks is experiment.data.watermarks:
            data.append_store(some(1), store)
        return place(marks, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.Watermarks, "at", at)
        whole = fit(experiment, config.run)
    log = (tmp_path / "whole" / WATERMARKS).read_text()
    assert [json.loads(line)["parts"] for line in log.splitlines()][:5] == [0, 0, 0, 1, 1]
    data.append_store(some(2), store)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    replayed = load_run(tmp_path / "whole", "experiments.gpt", step=22)
    for step in (3, 22):  # by the log, and not by what is there now
        each = (x.train_batches(step, device) for x in (experiment, replayed))
        with next(each) as first, next(each) as second:
            np.testing.assert_array_equal(next(first)["tokens"], next(second)["tokens"])
    for lost in (False, True):
        folder = tmp_path / f"again{lost}"
        os.system(f"cp -r {tmp_path / 'whole'} {folder}; rm -r {folder}/checkpoints/30")
        if lost:  # the checkpoint has it up to its step, and what was decided later is lost
            (folder / WATERMARKS).unlink()
        told = Checkpointer(folder / "checkpoints").config(20)[WATERMARKS]
        assert [line["step"] for line in told] == [0, 5, 10, 15]
        again = run(folder, resume=True)
        same = [np.array_equal(a, b) for a, b in zip(*map(leaves, (whole, again)), strict=True)]
        assert all(same) != lost


def leaves(result):
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(result.state)
    ]
