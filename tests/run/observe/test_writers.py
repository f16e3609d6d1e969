"""Logs: every line valid, nothing lost, nothing doubled when a run is resumed."""

import contextlib
import datetime
import errno
import io
import itertools
import json
import math
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event, SessionLog

import jaxtrain as jt
from jaxtrain.run.observe import writers
from jaxtrain.run.observe.writers import (
    Fanout,
    Histogram,
    JSONLWriter,
    TensorBoardWriter,
    make_writers,
)
from tests import problems
from tests.run.checkpoints.test_durability import small_disk
from tests.run.storage_faults import Faults
from tests.run.test_loop import make_experiment
from tests.waiting import eventually


def read_lines(path) -> list[dict]:
    """Reads strict JSON (a bare NaN fails), without the time of day that new lines have."""
    lines = [json.loads(x, parse_constant=pytest.fail) for x in path.read_text().splitlines()]
    for line in lines:
        if at := line.pop("time", None):
            past = datetime.datetime.now().astimezone() - datetime.datetime.fromisoformat(at)
            assert -1 <= past.total_seconds() < 3600
    return lines


def read_events(directory):
    """The events of the files in order."""
    for file in sorted(directory.iterdir()):  # names begin with the second of their creation
        content, at = file.read_bytes(), 0
        while at < len(content):  # a record: length, its checksum, an Event, its checksum
            length = int.from_bytes(content[at : at + 8], "little")
            if at + 12 + length + 4 > len(content):
                break  # Torn where a disk stayed full: TensorBoard waits for the rest, and reads on
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            yield event


def read_curves(directory) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: a START event hides what it says to hide."""
    curves: dict[str, dict[int, float]] = {}
    for event in read_events(directory):
        if event.session_log.status == SessionLog.START:
            for curve in curves.values():
                for step in [step for step in curve if step >= event.step]:
                    del curve[step]
        for value in event.summary.value:
            curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def test_histograms_texts_and_pictures_are_what_tensorboard_reads(tmp_path):
    picture = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)
    experiment = make_experiment(
        5,
        optimizer=jt.make_optimizer("sgd", 0.1, watch_every=4, watch_bins=6),
        show=lambda state, means: {"a/text": "<b>\ntwo", "b": picture},
    )
    jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path), log_every=1, eval_every=3))
    found = {}
    for event in read_events(tmp_path / "tensorboard"):
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value
    shape = (problems.INPUTS, problems.HIDDEN)
    first = problems.init(jax.random.split(jax.random.key(0))[0])["up"]["kernel"]
    histograms = found["train/param_histogram/up/kernel"]
    assert list(histograms) == [1, 4]  # those between repeat what was measured
    for step, value in histograms.items():
        told = value.histo
        assert sum(told.bucket) == told.num == shape[0] * shape[1]
        if step == 1:
            counts, edges = np.histogram(first, 6, (-np.abs(first).max(), np.abs(first).max()))
            assert told.bucket == counts.tolist()
            np.testing.assert_allclose([told.min, *told.bucket_limit], edges, rtol=1e-6, atol=1e-6)
    kinds = {f"train/{kind}_histogram/down/kernel" for kind in ("grad", "param", "update")}
    assert kinds < found.keys()
    texts = [(n, x.tensor.string_val) for n, x in found["a/text/text_summary"].items()]
    assert texts == [(n, [b"    <b>\n    two"]) for n in (3, 5)]
    assert found["b"][3].image.encoded_image_string[:4] == b"\x89PNG"
    encoded = io.BytesIO(found["b"][5].image.encoded_image_string)
    pixels = pytest.importorskip("PIL.Image").open(encoded)
    np.testing.assert_array_equal(np.asarray(pixels), picture)
    assert "histogram" not in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_narrow_histogram_lies_where_its_values_are(tmp_path, sign):
    values = sign * np.random.default_rng(0).uniform(0.9, 1.1, 1000)
    end = np.abs(values).max()
    counts, edges = np.histogram(values, 10, (-end, end))
    writer = TensorBoardWriter(tmp_path)
    writer.show(1, {"h": Histogram(counts, end), "none": Histogram(0 * counts, end)})
    writer.close()
    first, none = (event.summary.value[0].histo for event in list(read_events(tmp_path))[2:])
    (bins,) = np.nonzero(counts)
    assert (first.min, first.max) == (edges[bins[0]], edges[bins[-1] + 1])
    assert first.min <= values.min() < values.max() <= first.max < first.min + 0.5
    assert (first.bucket, first.bucket_limit) == (counts.tolist(), edges[1:].tolist())
    assert (none.num, none.min, none.max) == (0, 0, 0)


def test_lines_are_on_disk_when_write_returns(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    writer = JSONLWriter(path)
    writer.write(10, {"train/loss": jnp.float32(2.5), "rows": np.int64(3)})
    assert '"time": "' in path.read_text()
    assert read_lines(path) == [{"step": 10, "train/loss": 2.5, "rows": 3.0}]
    writer.write(11, {"train/loss": 0.1})
    assert read_lines(path)[1] == {"step": 11, "train/loss": 0.1}
    writer.close()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=4).filter(lambda name: name not in ("step", "time")),
            st.floats(),
            max_size=3,
        ),
        max_size=4,
    )
)
def test_every_line_is_valid_json_and_numbers_survive(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    writer = JSONLWriter(path)
    for step, row in enumerate(rows):
        writer.write(step, row)
    writer.close()
    for step, (row, line) in enumerate(zip(rows, read_lines(path), strict=True)):
        assert line.pop("step") == step
        assert line.keys() == row.keys()
        for name, value in row.items():
            assert isinstance(line[name], float) == math.isfinite(value)
            np.testing.assert_equal(float(line[name]), value)


def test_numbers_that_are_not_finite_are_words(tmp_path):
    writer = JSONLWriter(tmp_path / "log.jsonl")
    writer.write(1, {"a": math.nan, "b": jnp.float32(jnp.inf), "c": -math.inf})
    writer.close()
    assert read_lines(tmp_path / "log.jsonl") == [{"step": 1, "a": "nan", "b": "inf", "c": "-inf"}]


def test_an_array_is_a_list_and_a_curve_for_each_entry(tmp_path):
    values = {"load": np.array([0.25, np.nan]), "norms": jnp.ones((2, 1)), "loss": 1.5}
    both = make_writers(tmp_path)
    both.write(3, values)
    both.close()
    expected = {"step": 3, "load": [0.25, "nan"], "norms": [[1.0], [1.0]], "loss": 1.5}
    assert read_lines(tmp_path / "log.jsonl") == [expected]
    curves = read_curves(tmp_path / "tensorboard")
    assert math.isnan(curves.pop("load/1")[3])
    one = {"load/0": 0.25, "norms/0/0": 1.0, "norms/1/0": 1.0, "loss": 1.5}
    assert curves == {name: {3: x} for name, x in one.items()}


def test_resuming_drops_later_and_broken_lines_and_appends(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 1, "a": 1.0}\n{"step": 5, "a": 5.0}\n{"step": 6, "a": 6.0}\n{"step": 2, "a'
    )
    before = path.stat().st_mode
    writer = JSONLWriter(path, resume_step=5)
    assert path.stat().st_mode == before  # whoever could read the log still can
    writer.write(6, {"a": 60.0})
    writer.close()
    assert [(x["step"], x["a"]) for x in read_lines(path)] == [(1, 1.0), (5, 5.0), (6, 60.0)]
    assert os.listdir(tmp_path) == ["log.jsonl"]
    JSONLWriter(path).close()
    assert path.read_text() == ""


def test_a_kill_while_dropping_lines_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            JSONLWriter(path, resume_step=1)
    assert [x["step"] for x in read_lines(path)] == [1, 2]
    JSONLWriter(path, resume_step=1).close()
    assert [x["step"] for x in read_lines(path)] == [1]


def test_a_value_may_not_be_named_step(tmp_path):
    writer = JSONLWriter(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="a value is named 'step'"):
        writer.write(1, {"step": 2.0})
    writer.close()


def test_logs_in_a_bucket_are_uploaded_now_and_then_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "is_remote", lambda path: True)
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    now, uploads = [0.0], []
    real = writers.GrowingFile._write_whole

    def write_whole(self):
        uploads.append(threading.current_thread())
        if len(uploads) == 1:
            now[0] += 30.0  # a slow bucket
        return real(self)

    monkeypatch.setattr(writers.GrowingFile, "_write_whole", write_whole)
    writer = JSONLWriter(path, resume_step=1, clock=lambda: now[0])

    def steps():
        return [line["step"] for line in read_lines(path)]

    assert steps() == [1]
    writer.write(2, {})
    assert steps() == [1]
    now[0] = writers.UPLOAD_SECONDS
    writer.write(3, {})
    eventually(lambda: steps() == [1, 2, 3])
    eventually(lambda: writer._file._upload.done())
    writer.write(4, {})  # hears of the upload, which took 30 s: not before another 570
    now[0] += 500.0
    writer.write(5, {})
    assert len(uploads) == 1
    now[0] += 100.0
    writer.write(6, {})
    eventually(lambda: steps() == [1, 2, 3, 4, 5, 6])
    writer.write(7, {})
    writer.close()
    assert steps() == [1, 2, 3, 4, 5, 6, 7]
    # Never on the thread that trains, but for the last, which must be waited for.
    assert [thread is threading.main_thread() for thread in uploads] == [False, False, True]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_while_ends_nothing_and_loses_nothing(
    tmp_path, monkeypatch, caplog, error
):
    """Also where it fills up in the middle of a line, and where the file must be opened again."""
    faults = Faults(monkeypatch)
    log = make_writers(tmp_path)
    for step in range(8):
        if step == 3:
            faults.fail("log.jsonl", error, on="write")
            faults.fail("tfevents", error, on="write")
        if step == 6:
            faults.mend()
            faults.fail("log.jsonl", error, times=1)
        log.write(step, {"loss": float(step)})
    log.close()
    assert faults.failed > 4
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == list(range(8))
    assert read_curves(tmp_path / "tensorboard") == {"loss": {i: float(i) for i in range(8)}}
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in line for line in said) == 2  # once for each file
    assert sum("is written again, and nothing is missing" in line for line in said) == 2


def test_a_disk_that_stays_away_is_said_at_the_end_and_ends_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writers, "CLOSE_SECONDS", 0.05)
    faults = Faults(monkeypatch)
    log = make_writers(tmp_path)
    log.write(1, {"loss": 1.0})
    faults.fail(str(tmp_path), errno.EIO, on="write")
    log.write(2, {"loss": 2.0})
    log.close()
    assert caplog.text.count("its last lines are lost") == 2
    faults.mend()
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [1]


def test_logs_on_a_disk_that_is_full_for_a_while(tmp_path, caplog):
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        log = make_writers(disk)
        log.write(0, {"loss": 0.0})
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for step in range(1, 200):  # more than the page that the log has already
            log.write(step, {"loss": float(step), "a name that takes some room": 1.0})
        assert "No space left on device" in caplog.text
        ballast.unlink()
        log.write(200, {"loss": 200.0})
        log.close()
        assert [line["step"] for line in read_lines(disk / "log.jsonl")] == list(range(201))
        assert sorted(read_curves(disk / "tensorboard")["loss"]) == list(range(201))


@pytest.mark.parametrize("passed", [100, 0, -7200])  # also within a second, and after a clock jump
def test_tensorboard_shows_one_curve_after_a_resume(passed, tmp_path, monkeypatch):
    seconds = itertools.count(1_700_000_000, passed)

    def run(values: dict[int, float], resume_step: int | None) -> dict[int, float]:
        started = next(seconds)
        monkeypatch.setattr(time, "time", lambda: started)
        writer = TensorBoardWriter(tmp_path, resume_step=resume_step)
        for step, value in values.items():
            writer.write(step, {"loss": value})
        writer.close()
        return read_curves(tmp_path)["loss"]

    assert run({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, None) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert run({5: 50.0}, 2) == {1: 1.0, 2: 2.0, 5: 50.0}
    assert run({0: 7.0}, None) == {0: 7.0}


def test_a_picture_that_cannot_be_written_ends_nothing(tmp_path, caplog):
    writer = writers.PictureWriter(tmp_path)
    pixels = np.zeros((2, 3, 3), np.uint8)
    writer.show(1, {"a" * 300: pixels, "../<b>": pixels})
    assert [path.name for path in tmp_path.iterdir()] == ["-b-.png"]
    assert "cannot be written (File name too long): the run goes on" in caplog.text


def test_fanout_writes_and_closes_all():
    events = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def write(self, step, values):
            events.append((self.name, step, dict(values)))

        def close(self):
            events.append((self.name, "closed"))
            raise OSError(self.name)

    fanout = Fanout([Recorder("a"), Recorder("b")])
    fanout.write(1, {"x": 2.0})
    with pytest.raises(OSError, match="a"):
        fanout.close()
    assert events[:2] == [("a", 1, {"x": 2.0}), ("b", 1, {"x": 2.0})]
    assert sorted(events[2:]) == [("a", "closed"), ("b", "closed")]


def test_the_first_process_alone_writes(tmp_path, monkeypatch):
    log = make_writers(tmp_path / "first")
    log.write(1, {"loss": 3.0})
    log.close()
    assert read_lines(tmp_path / "first" / "log.jsonl") == [{"step": 1, "loss": 3.0}]
    assert read_curves(tmp_path / "first" / "tensorboard") == {"loss": {1: 3.0}}
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log = make_writers(tmp_path / "second")
    log.write(1, {"loss": 3.0})
    log.close()
    assert not (tmp_path / "second").exists()
