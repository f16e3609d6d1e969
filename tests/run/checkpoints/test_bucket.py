"""A bucket for text, tokenizer, logs and the run's folder: gs:// paths onto an in-memory stand-in.

Array files alone do not pass here: TensorStore writes those with a client of its own.
"""

import json
from concurrent import futures

import fsspec
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from jaxtrain import data
from jaxtrain.host import storage
from jaxtrain.host.paths import as_path
from jaxtrain.run.folder import find_run_dir, lock_run_dir
from jaxtrain.run.observe import writers
from tests.run.storage_faults import HttpError
from tests.run.test_loop import lines
from tests.waiting import eventually


class Bucket(MemoryFileSystem):
    """What gcsfs would be, in memory; writes whole objects only, as a bucket does."""

    protocol = ("gcs", "gs")
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012

    def __init__(self, **options):
        options.pop("finalize_on_close", None)
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("gs://").removeprefix("gcs://")
        return "/" + path.strip("/") if path.strip("/") else ""

    def _open(self, path, mode="rb", **options):
        assert "a" not in mode, "an object cannot be appended to"
        return super()._open(path, mode, **options)


@pytest.fixture
def bucket():
    known = dict(fsspec.registry)
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    Bucket.clear_instance_cache()
    Bucket.store.clear()
    Bucket.pseudo_dirs[:] = [""]
    yield epath.Path("gs://bucket")
    if "gcs" in known:
        fsspec.register_implementation("gcs", known["gcs"], clobber=True)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def documents(split):
    return [(d.name, d.text) for d in (*split.train, *split.held_out)]


def test_text_in_a_bucket_is_the_same_text(bucket, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    written = pytest.importorskip("pyarrow.parquet")
    parquet = tmp_path / "rows.parquet"
    written.write_table(pyarrow.table({"text": ["one", "two"]}), parquet)
    files = {
        "a.txt": b"plain text",
        "deep/er/b.md": b"deeper",
        "c.jsonl": b'{"text": "first"}\n{"text": "second"}\n',
        "rows.parquet": parquet.read_bytes(),
        ".hidden.txt": b"no",
        ".git/d.txt": b"no",
        "e.bin": b"no",
    }
    local = epath.Path(tmp_path / "texts")
    for folder in (local, bucket / "texts"):
        for name, content in files.items():
            write(folder / name, content)
    found = documents(data.text_folder("gs://bucket/texts"))
    assert found == documents(data.text_folder(local))
    assert len(found) == 6
    one = documents(data.text_folder("gs://bucket/texts/a.txt", held_out=0.3))
    assert b"".join(text for _, text in one) == b"plain text"
    with pytest.raises(FileNotFoundError, match="gs://bucket/nothing"):
        data.text_folder("gs://bucket/nothing")


def test_a_tokenizer_in_a_bucket(bucket):
    pytest.importorskip("tokenizers")
    bucket.mkdir(parents=True, exist_ok=True)
    trained = data.SubwordTokenizer.train(["some text, some more text"], 260)
    trained.save("gs://bucket/tokenizer.json")
    assert (
        data.SubwordTokenizer.load("gs://bucket/tokenizer.json").fingerprint == trained.fingerprint
    )


def test_logs_are_written_anew_and_resumed_in_a_bucket(bucket, tmp_path):
    run = bucket / "run"
    for start, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        log = writers.make_writers(run, resume_step=start)
        for step in steps:
            log.write(step, {"loss": float(step)})
        log.close()
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
    events = list((run / "tensorboard").iterdir())
    assert events
    assert all(b"loss" in event.read_bytes() for event in events)


def test_event_files_reach_the_bucket_while_the_run_goes_on(bucket):
    now = [0.0]
    log = writers.TensorBoardWriter("gs://bucket/tb", clock=lambda: now[0])
    log.write(1, {"loss": 1.0})
    assert not list(epath.Path("gs://bucket/tb").iterdir())
    now[0] += writers.UPLOAD_SECONDS
    log.write(2, {"late": 1.0})
    eventually(lambda: list(epath.Path("gs://bucket/tb").iterdir()))
    log.close()
    (event,) = epath.Path("gs://bucket/tb").iterdir()
    assert b"late" in event.read_bytes()


def test_a_bucket_that_answers_503_for_a_while_loses_no_line(bucket, monkeypatch, caplog):
    now, real, failed = [0.0], Bucket._open, []
    log = writers.JSONLWriter("gs://bucket/log.jsonl", clock=lambda: now[0])

    def unavailable(self, path, mode="rb", **options):
        if "w" in mode and len(failed) < 3:
            failed.append(path)
            raise HttpError(503)
        return real(self, path, mode, **options)

    monkeypatch.setattr(Bucket, "_open", unavailable)
    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    for step in range(1, 6):
        now[0] += 2 * writers.UPLOAD_SECONDS
        log.write(step, {"loss": 1.0})
        futures.wait([log._file._upload] if log._file._upload else [], timeout=30)
    log.close()
    lines = epath.Path("gs://bucket/log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert len(failed) == 3
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written (HTTP error 503)" in line for line in said) == 1
    assert sum("is written again, and nothing is missing" in line for line in said) == 1


def test_the_folder_of_a_run(bucket):
    folder = "gs://bucket/runs/a"
    found, resumes = find_run_dir("gpt", folder)
    assert (str(found), resumes) == (folder, False)
    first = lock_run_dir(found)
    for name in ("config.json", "tensorboard/events.out.tfevents.1", "thesis.tex"):
        write(found / name, b"{}")
    with pytest.raises(FileExistsError, match="gs://bucket/runs/a holds a run already"):
        find_run_dir("gpt", folder)
    assert find_run_dir("gpt", folder, auto_resume=True)[1]
    found, resumes = find_run_dir("gpt", folder, overwrite=True)
    assert not resumes
    assert first.taken_by() is None
    second = lock_run_dir(found, overwrite=True)
    assert first.taken_by().startswith("process ")
    assert second.taken_by() is None
    assert sorted(path.name for path in found.iterdir()) == ["owner.json", "thesis.tex"]


def test_no_listing_is_kept(bucket):
    """A listing that is kept hides what other processes write, such as who owns the folder."""
    as_path("gs://bucket/run")
    system = fsspec.filesystem("gcs", finalize_on_close=True)  # as etils makes it
    assert not system.dircache.use_listings_cache


def test_tokens_are_cached_there(bucket):
    one = [data.Document("a", b"text")]
    for _ in range(2):
        found = data.tokenize(one, data.ByteTokenizer(), cache_dir="gs://bucket/cache")
        assert found.tokens[:].tolist() == [*b"text", 256]
