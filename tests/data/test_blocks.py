"""Token stores in a bucket, on an in-memory stand-in for S3, against the same store on a disk."""

import numpy as np
import pytest
from etils import epath

from jaxtrain import data
from jaxtrain.data import ByteTokenizer, blocks, writing
from jaxtrain.host import storage
from tests import memory_s3
from tests.commands import refused
from tests.commands import run as command

BYTES = ByteTokenizer()
STORE = "s3://bucket/store"


@pytest.fixture
def s3(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    monkeypatch.setattr(writing, "SHARD_BYTES", 2000)
    with memory_s3.installed() as bucket:
        yield bucket


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(30):
        drawn = np.random.default_rng(n).integers(97, 123, 300 + 7 * n, dtype=np.uint8)
        (folder / f"{n:02d}.txt").write_bytes(drawn.tobytes())
    return folder


def asked(monkeypatch, s3):
    """Notes what is asked of the bucket: a path, and from where to where."""
    found, real = [], s3.cat_file

    def cat_file(self, path, start=None, end=None, **options):
        found.append((path, start, end))
        return real(self, path, start=start, end=end, **options)

    monkeypatch.setattr(s3, "cat_file", cat_file)
    return found


def kept(tmp_path):
    return [path for path in (tmp_path / "cache/jaxtrain/blocks").iterdir()]


def test_batches_are_those_of_a_disk_and_only_blocks_are_asked_for(
    s3, texts, tmp_path, monkeypatch
):
    split = data.text_folder(texts)
    local = data.write_store(split, BYTES, tmp_path / "store")
    remote = data.write_store(split, BYTES, STORE)
    assert remote.manifest == local.manifest
    assert sorted(path.rpartition("/")[2] for path in s3.store) == sorted(
        path.name for path in local.path.iterdir()
    )
    assert not [*(tmp_path / "cache/jaxtrain/building").iterdir()]
    calls = asked(monkeypatch, s3)
    one, other = (
        data.Batches(data.PackedTokens(each.corpus(), 32), global_batch=4, seed=1)
        for each in (local, data.open_store(STORE))
    )
    for step in (7, 0, 100):
        for name, array in one.batch(step).items():
            np.testing.assert_array_equal(other.batch(step)[name], array, strict=True)
    shards = [call for call in calls if call[0].endswith(".tokens")]
    assert all(end - start <= 300 for _, start, end in shards)  # of 66 bytes, three blocks at most
    assert len(shards) <= 13 * 3
    calls.clear()
    again = data.Batches(
        data.PackedTokens(data.open_store(STORE).corpus(), 32), global_batch=4, seed=1
    )
    again.batch(7)
    assert calls == []
    same = [each.held_out(2000).fingerprint for each in (local, data.open_store(STORE))]
    assert same[0] == same[1]
    assert data.open_store(STORE).verify() == local.verify()


def test_what_is_kept_is_bounded(s3, texts, tmp_path, monkeypatch):
    store = data.write_store(data.text_folder(texts), BYTES, STORE)
    monkeypatch.setattr(blocks, "KEPT_BYTES", 3200)
    tokens = data.open_store(STORE).corpus().tokens
    found = []
    for at in range(0, len(tokens), 50):
        found.append(tokens[at : at + 50])
        assert sum(path.stat().st_size for path in kept(tmp_path)) <= 3200
    assert len(kept(tmp_path)) > 20
    assert len(tokens) * 2 > 5 * 3200
    documents = [document.text for document in data.text_folder(texts).train]
    np.testing.assert_array_equal(
        np.concatenate(found), data.tokenize(data.text_folder(texts).train, BYTES).tokens
    )
    assert sum(map(len, documents)) == store.manifest["sets"]["train"]["bytes"]


def test_a_block_that_is_not_what_was_written_is_asked_for_again_or_an_error(
    s3, texts, tmp_path, monkeypatch
):
    split = data.text_folder(texts)
    data.write_store(split, BYTES, STORE)
    tokens = data.open_store(STORE).corpus().tokens
    sound = tokens[:50].copy()
    for path in kept(tmp_path):
        if path.name.endswith("-0"):
            path.write_bytes(b"x" * 100)  # the disk has lost it
    np.testing.assert_array_equal(data.open_store(STORE).corpus().tokens[:50], sound)
    whole = tokens[:400].copy()
    for path in kept(tmp_path):
        if not path.name.endswith(".tokens-3"):  # what is asked for stands on both sides of it
            path.unlink()
    np.testing.assert_array_equal(data.open_store(STORE).corpus().tokens[:400], whole)
    np.testing.assert_array_equal(whole, data.tokenize(split.train, BYTES).tokens[:400])
    for path in kept(tmp_path):
        path.unlink()
    real, torn = s3.cat_file, []

    def once(self, path, start=None, end=None, **options):
        found = real(self, path, start=start, end=end, **options)
        if ".tokens" in path and not torn:
            torn.append(path)
            return found[:30]
        return found

    monkeypatch.setattr(s3, "cat_file", once)
    np.testing.assert_array_equal(data.open_store(STORE).corpus().tokens[:50], sound)
    assert torn
    shard = s3.store[torn[0]]
    shard.seek(110)
    shard.write(b"x")
    with pytest.raises(
        ValueError, match=r"tokens' is damaged \(its checksum differs within bytes 100"
    ):
        tokens[50:100]
    with pytest.raises(ValueError, match="is damaged"):
        data.open_store(STORE).verify()


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_several_hosts_make_one_store(place, s3, texts, tmp_path, monkeypatch):
    path = STORE if place == "bucket" else tmp_path / "shared" / "store"
    split = data.text_folder(texts)
    local = data.write_store(split, BYTES, tmp_path / "store")
    written, real = [], writing._write_part

    def write(folder, part, tokenizer):
        if len(written) == 1:
            written.append("")
            raise OSError(28, "No space left on device")
        written.append(part.name)
        real(folder, part, tokenizer)

    monkeypatch.setattr(writing, "_write_part", write)
    with pytest.raises(OSError, match="No space"):
        data.write_store(split, BYTES, path, share=(1, 2))
    with pytest.raises(ValueError, match="store' is not complete"):
        data.open_store(path)
    assert data.write_store(split, BYTES, path, share=(1, 2)) is None
    remote = data.write_store(split, BYTES, path, share=(2, 2))
    assert len(written) - 1 == len(set(written)) - 1 > 4  # none twice, one refused
    assert remote.manifest == local.manifest
    np.testing.assert_array_equal(remote.corpus().tokens[:], local.corpus().tokens[:])
    assert data.write_store(split, BYTES, path, share=(1, 2)).manifest == local.manifest


def test_the_commands_make_and_show_one(s3, texts, capsys):
    make = ("tokenize", "--data", str(texts), "--workers", "1", "--out", STORE)
    assert "part 1/2 is there, and others are missing" in command(capsys, *make, "--part", "1/2")[1]
    status, out, _ = command(capsys, *make, "--part", "2/2")
    assert (status, "s3://bucket/store: jaxtrain token store 1" in out) == (0, True)
    assert "tokens per document" in command(capsys, "data", STORE)[1]
    assert "all as it was written" in command(capsys, "data", STORE, "--verify")[1]
    assert "no token store" in refused(capsys, "data", "s3://bucket/nothing")


def test_throttling_is_waited_for(s3, texts, monkeypatch):
    calls, real = [], s3.cat_file

    def slow_down(self, path, **options):
        calls.append(path)
        if len(calls) % 3:
            raise OSError(16, "Please reduce your request rate.")  # what s3fs makes of SlowDown
        return real(self, path, **options)

    split = data.text_folder(texts)
    data.write_store(split, BYTES, STORE)
    monkeypatch.setattr(s3, "cat_file", slow_down)
    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    found = data.open_store(STORE).corpus().tokens[:500]
    np.testing.assert_array_equal(found, data.tokenize(split.train, BYTES).tokens[:500])
    assert len(calls) == 9  # three for each file


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_a_share_is_made_again_where_it_was_deleted(place, s3, texts, tmp_path, monkeypatch):
    path = STORE if place == "bucket" else tmp_path / "store"
    split = data.text_folder(texts)
    local = data.write_store(split, BYTES, tmp_path / "local")
    with monkeypatch.context() as patch:
        real, written = writing._write_part, []

        def write(folder, part, tokenizer):
            if written:
                raise OSError(28, "No space left on device")
            written.append(real(folder, part, tokenizer))

        patch.setattr(writing, "_write_part", write)
        with pytest.raises(OSError, match="No space"):
            data.write_store(split, BYTES, path, share=(1, 2))
    epath.Path(path).rmtree()
    assert data.write_store(split, BYTES, path, share=(1, 2)) is None
    found = data.write_store(split, BYTES, path, share=(2, 2))
    np.testing.assert_array_equal(found.corpus().tokens[:], local.corpus().tokens[:])


def test_several_hosts_leave_out_the_same_duplicates(s3, texts, tmp_path):
    for n in range(0, 30, 2):
        (texts / f"again {n}.txt").write_bytes((texts / f"{n:02d}.txt").read_bytes())
    split = data.text_folder(texts)
    local = data.write_store(split, BYTES, tmp_path / "store", drop="repeats")
    assert data.write_store(split, BYTES, STORE, share=(2, 2), drop="repeats") is None
    remote = data.write_store(split, BYTES, STORE, share=(1, 2), drop="repeats")
    assert remote.manifest == local.manifest
    assert remote.manifest["sets"]["train"]["dropped"]["exact"] > 9
    np.testing.assert_array_equal(remote.corpus().tokens[:], local.corpus().tokens[:])
    assert not [name for name in s3.store if name.endswith(".stretches")]
