"""Token stores against the same text tokenized in memory, whatever happens while they are made."""

import contextlib
import errno
import gzip
import hashlib
import json
import mmap
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxtrain import data
from jaxtrain.data import ByteTokenizer, Document, SubwordTokenizer, store, tokenize, writing
from jaxtrain.data.sources import Documents, Split
from jaxtrain.data.tokenizers import EOD
from jaxtrain.host import storage
from jaxtrain.host.memory import human_bytes
from tests.commands import run as command

BYTES = ByteTokenizer()


def documents_of(texts):
    return [Document(str(n), text) for n, text in enumerate(texts)]


def words(number, count=40):
    chosen = np.random.default_rng(number).integers(0, 1000, count)
    return " ".join(f"wörd{n}" for n in chosen)


@pytest.fixture
def texts(tmp_path):
    """A folder of every kind of file that is read."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(20):
        (folder / f"{n:02d}.txt").write_text(words(n))
    lines = [json.dumps({"text": words(n, 20), "id": n}) for n in range(200)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:50]).encode()))
    with pyarrow.CompressedOutputStream(str(folder / "packed.jsonl.zst"), "zstd") as sink:
        sink.write("\n".join(lines[50:90]).encode())
    table = pyarrow.table({"id": list(range(90)), "text": [words(n, 20) for n in range(90)]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    # What Hugging Face's save_to_disk leaves, and what its map adds.
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=11)
    (folder / "cache-1234.arrow").write_bytes(b"made of the one above")
    return folder


def same(corpus, expected):
    assert corpus.tokens.dtype == expected.tokens.dtype
    np.testing.assert_array_equal(corpus.tokens[:], expected.tokens[:])
    np.testing.assert_array_equal(corpus.starts, expected.starts)
    assert corpus.num_bytes == expected.num_bytes


def test_a_store_is_the_text_whatever_its_parts(texts, tmp_path, monkeypatch):
    split = data.text_folder(texts)
    expected = [tokenize(side, BYTES) for side in split]
    names = {document.name.split(":")[0] for side in split for document in side}
    assert names == {path.name for path in texts.iterdir()} - {"cache-1234.arrow"}
    shards = []
    for size in (500, 2_000, 10_000, 1 << 26):
        monkeypatch.setattr(writing, "SHARD_BYTES", size)
        found = data.write_store(split, BYTES, tmp_path / str(size))
        for name, corpus in zip(("train", "held_out"), expected, strict=True):
            same(found.corpus(name), corpus)
        assert not list(found.path.glob("*.partial")) + list(found.path.glob("*.npz"))
        shards.append(len(found.manifest["sets"]["train"]["shards"]))
    assert shards[0] > shards[1] > shards[2] > shards[3] == 1
    assert found.corpus().fingerprint == expected[0].fingerprint
    assert found.manifest["order_version"] == data.ORDER_VERSION
    for name, corpus in zip(("train", "held_out"), expected, strict=True):
        about = found.manifest["sets"][name]
        lengths = np.diff([*corpus.starts, len(corpus.tokens)])
        assert (about["documents"], about["tokens"]) == (len(lengths), sum(lengths))
        assert (about["bytes"], about["longest"]) == (corpus.num_bytes, max(lengths))
        for power, count in enumerate(about["lengths"]):
            assert count == sum(2**power <= n < 2 ** (power + 1) for n in lengths)


@pytest.mark.parametrize("name", ["lines.jsonl", "rows.parquet", "packed.jsonl.gz", "00.txt"])
def test_a_single_file_is_split_as_in_memory(texts, tmp_path, monkeypatch, name):
    monkeypatch.setattr(writing, "SHARD_BYTES", 1000)
    split = data.text_folder(texts / name, held_out=0.2)
    found = data.write_store(split, BYTES, tmp_path / "store")
    for side, documents in split._asdict().items():
        same(found.corpus(side), tokenize(documents, BYTES))
    many = name in ("lines.jsonl", "rows.parquet")
    assert (len(found.manifest["sets"]["train"]["shards"]) > 3) == many


@pytest.mark.parametrize("name", ["", "lines.jsonl", "00.txt"])
def test_nothing_may_be_held_out(texts, tmp_path, name):
    split = data.text_folder(texts / name, held_out=0)
    found = data.write_store(split, BYTES, tmp_path / "store")
    same(found.corpus(), tokenize(split.train, BYTES))
    about = found.manifest["sets"]["held_out"]
    assert (about["documents"], about["tokens"], about["shards"]) == (0, 0, [])
    assert len(found.corpus("held_out").tokens[:]) == len(found.corpus("held_out").starts) == 0


def test_rows_and_batches_of_a_store_are_those_of_memory(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 2000)
    split = data.text_folder(texts)
    found = data.write_store(split, BYTES, tmp_path / "store")
    assert len(found.manifest["sets"]["train"]["shards"]) > 5
    rows = [
        data.PackedTokens(corpus, 700) for corpus in (found.corpus(), tokenize(split.train, BYTES))
    ]
    assert len(rows[0]) == len(rows[1]) > 20
    mapped, memory = (data.Batches(each, global_batch=8, seed=3) for each in rows)
    for step in (0, 7, 10**6):
        for name, values in memory.batch(step).items():
            np.testing.assert_array_equal(mapped.batch(step)[name], values)


def test_how_far_a_large_file_of_one_piece_is_is_said(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writing, "PROGRESS_SECONDS", 0.0)
    for size, said in ((1000, True), (1 << 26, False)):
        monkeypatch.setattr(writing, "SHARD_BYTES", size)
        split = data.text_folder(texts / "packed.jsonl.gz")
        found = data.write_store(split, BYTES, tmp_path / str(size))
        same(found.corpus(), tokenize(split.train, BYTES))
        line = "tokenizing: 0 MB of text in 'packed.jsonl.gz' so far\n"
        assert (line in capsys.readouterr().err) == said


def test_tokens_are_read_by_slices_of_any_shards(tmp_path):
    counts, whole = (3, 1, 5), np.arange(9, dtype=np.uint16)
    paths = [tmp_path / str(n) for n in range(3)]
    for path, part in zip(paths, np.split(whole, np.cumsum(counts)[:-1]), strict=True):
        path.write_bytes(part.tobytes())
    tokens = data.MappedTokens(paths, counts, np.dtype(np.uint16))
    assert len(tokens) == 9
    for start in range(-2, 11):
        for stop in range(-2, 11):
            np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])
    with pytest.raises(ValueError, match="slices of step 1"):
        tokens[::2]


def test_a_store_of_more_files_than_may_be_open_is_read(tmp_path):
    """A terabyte has 16,000 of them."""
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = [tmp_path / str(n) for n in range(400)]
    for n, path in enumerate(paths):
        path.write_bytes(np.full(3, n, np.uint16).tobytes())
    tokens = data.MappedTokens(paths, [3] * 400, np.dtype(np.uint16))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        for _ in range(2):
            assert tokens[:].tolist() == np.repeat(np.arange(400), 3).tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_slice_reads_only_its_own_pages(tmp_path, monkeypatch):
    """What a page holds is asked of the system for the range of the slice alone."""
    advised = []

    class Map(mmap.mmap):
        def madvise(self, option, *span):
            advised.append((option, *span))
            return super().madvise(option, *span)

    monkeypatch.setattr(store.mmap, "mmap", Map)
    page = mmap.PAGESIZE
    (tmp_path / "a").write_bytes(bytes(100 * page))
    tokens = data.MappedTokens([tmp_path / "a"], [50 * page], np.dtype(np.uint16))
    assert advised == []
    tokens[10 * page + 7 : 12 * page + 7]
    tokens[3:9]
    # 20 pages and 14 bytes, of 4 pages and 14 bytes; within one page there is nothing to ask for.
    assert advised == [
        (mmap.MADV_RANDOM,),
        (mmap.MADV_WILLNEED, 20 * page, 4 * page + 14),
    ]


def by_definition(documents, limit):
    """Whole documents of up to ``limit`` bytes, in the order of a hash of their names."""
    ranked = sorted(
        (data.hash_fraction(f"evaluate/{d.name}"), len(d.text), d.name) for d in documents
    )
    chosen = set()
    for _, size, name in ranked:
        if size <= limit:
            chosen.add(name)
            limit -= size
    chosen = chosen or {name for _, _, name in ranked[:1]}
    return [document for document in documents if document.name in chosen]


def test_held_out_documents_are_chosen_by_their_names(tmp_path):
    sizes = np.random.default_rng(0).integers(0, 200, 300)
    documents = [Document(str(n), b"x" * size) for n, size in enumerate(sizes)]
    found = data.write_store(Split(documents[:1], documents), BYTES, tmp_path / "store")
    fullest = 0
    for limit in (0, 1, 5, 60, 500, 2_000, 30_000, 10**9):
        chosen, expected = found.held_out(limit), tokenize(by_definition(documents, limit), BYTES)
        same(chosen, expected)
        assert chosen.fingerprint == expected.fingerprint
        fullest += chosen.num_bytes == limit
    assert fullest >= 3
    big = data.write_store(Split(documents, documents_of([b"x" * 9])), BYTES, tmp_path / "big")
    assert big.held_out(3).num_bytes == 9


def test_killed_at_any_moment_it_goes_on_without_a_lost_or_doubled_document(tmp_path, monkeypatch):
    """A copy of the folder before and after all that changes it is what a SIGKILL would leave."""
    (tmp_path / "texts").mkdir()
    for n in range(5):
        (tmp_path / "texts" / f"{n}.txt").write_text(words(n))
    monkeypatch.setattr(writing, "SHARD_BYTES", 700)
    split, moments = data.text_folder(tmp_path / "texts"), []
    tokenizer = SubwordTokenizer.train([d.text for d in split.train], 300)
    expected = [tokenize(side, tokenizer) for side in split]

    def copied(call):
        def wrapped(*args, **kwargs):
            moments.append(tmp_path / f"moment-{len(moments)}")
            if (tmp_path / "store").exists():
                shutil.copytree(tmp_path / "store", moments[-1])
            return call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "fsync", lambda number: None)
    with monkeypatch.context() as patch:
        for module, name in ((os, "replace"), (os, "fsync"), (type(tmp_path), "unlink")):
            patch.setattr(module, name, copied(getattr(module, name)))
        data.write_store(split, tokenizer, tmp_path / "store")
    assert len(moments) > 40
    states = set()
    for moment in moments:
        before = store.is_store(moment) and "sets" in store.read_manifest(moment)
        states.add((len(list(moment.glob("*.npz"))), before))
        found = data.write_store(split, tokenizer, moment)
        for name, corpus in zip(("train", "held_out"), expected, strict=True):
            same(found.corpus(name), corpus)
        assert found.tokenizer.fingerprint == tokenizer.fingerprint
        if not before:
            assert not list(found.path.glob("*.partial")) + list(found.path.glob("*.npz"))
    assert states >= {(n, False) for n in range(6)} | {(0, True)}


WORKERS = """
import sys
from jaxtrain import data
from jaxtrain.data import writing
from jaxtrain.data.sources import text_folder

if __name__ == "__main__":
    writing.SHARD_BYTES = 30_000
    tokenizer = data.SubwordTokenizer.load(sys.argv[1])
    writing.PROGRESS_SECONDS = 0.0
    data.write_store(text_folder(sys.argv[2]), tokenizer, sys.argv[3], workers=2)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_parent_and_the_next_call_finishes(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(60):
        (folder / f"{n:02d}.txt").write_text(words(n, 1200) + EOD)
    split, path = data.text_folder(folder), tmp_path / "store"
    tokenizer = SubwordTokenizer.train([d.text for d in split.train], 400)
    tokenizer.save(tmp_path / "tokenizer.json")
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    begin = [sys.executable, str(script), str(tmp_path / "tokenizer.json"), str(folder), str(path)]
    kept = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(begin, **kept) as process:
        said = next(line for line in process.stderr if line.startswith("tokenizing: "))
        assert re.search(r"tokenizing: 0 of 1 MB, \d+\.\d MB/s, \d+ minutes left", said)
        process.send_signal(signal.SIGKILL)
        process.wait()
        group, deadline = process.pid, time.monotonic() + 60
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, 0)
                assert time.monotonic() < deadline, "a worker is still there"
                time.sleep(0.1)
                continue
            break
    done = {file.name: file.stat().st_mtime_ns for file in path.glob("*.tokens")}
    assert done
    with pytest.raises(ValueError, match="is not complete: run the same jaxtrain tokenize again"):
        data.open_store(path)
    subprocess.run(begin, check=True, stderr=subprocess.DEVNULL, timeout=300)
    found = data.open_store(path)
    assert len(found.manifest["sets"]["train"]["shards"]) > len(done) > 0
    for name, time_ns in done.items():
        if (path / f"{name.removesuffix('.tokens')}.npz").exists():
            assert (path / name).stat().st_mtime_ns == time_ns
    for name, side in split._asdict().items():
        same(found.corpus(name), tokenize(side, tokenizer))


def test_a_tokenizer_goes_to_other_processes_as_it_is():
    tokenizer = SubwordTokenizer.train([b"the theme of the thesis"], 270)
    text = f"the {EOD} of é\udcff".encode("utf-8", "surrogateescape")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert tokenizer.eod not in again.encode(text)
    assert again.fingerprint == tokenizer.fingerprint


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says what is resident")
def test_opening_reads_neither_tokens_nor_documents(tmp_path, monkeypatch):
    """A store of 10^9 tokens, most of it a hole in a file."""
    found = data.write_store(Split(documents_of([b"ab"] * 5), []), BYTES, tmp_path / "store")
    about = found.manifest["sets"]["train"]
    path = found.path / about["shards"][0][0]
    os.truncate(path, 2 * 10**9)
    about["shards"], about["tokens"] = [[path.name, 10**9]], 10**9
    about["documents"] = 10**6
    np.save(found.path / "train.starts.npy", np.arange(10**6) * 1000)
    (found.path / "manifest.json").write_text(json.dumps(found.manifest))
    read = []
    monkeypatch.setattr(data.MappedTokens, "__getitem__", lambda self, span: read.append(span))
    resident = resident_bytes()
    begun = time.perf_counter()
    rows = data.PackedTokens(data.open_store(found.path).corpus(), 1024)
    assert time.perf_counter() - begun < 0.5
    assert len(rows) == -(-(10**9 - 1) // 1024)
    assert read == []
    assert resident_bytes() - resident < 10e6


def test_bad_stores_are_named(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 4000)
    split, path = data.text_folder(texts), tmp_path / "store"
    found = data.write_store(split, BYTES, path)
    shard = path / found.manifest["sets"]["train"]["shards"][1][0]
    whole, manifest = shard.read_bytes(), (path / "manifest.json").read_text()
    again = "; delete '.*store' and make it again"
    shard.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=rf"tokens' is damaged \(\d+ bytes, not \d+\){again}"):
        data.open_store(path)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"tokens' is damaged \(gone\){again}"):
        data.open_store(path)
    shard.write_bytes(whole)
    for content, words in (
        (b"{", "Expecting"),
        (b"[]", "indices"),
        (b'{"format": "other"}', "its format is 'other', not 'jaxtrain token store 1'"),
        (b'{"format": "jaxtrain token store 1"}', "it has no tokenizer"),
    ):
        (path / "manifest.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"manifest.json' is damaged \(.*{words}.*\){again}"):
            data.open_store(path)
    (path / "manifest.json").write_text(manifest)
    starts = (path / "train.starts.npy").read_bytes()
    for content in (starts[:50], b"", pickle.dumps("x"), starts[:-8]):
        (path / "train.starts.npy").write_bytes(content)
        with pytest.raises(ValueError, match=rf"starts.npy' is damaged .*{again}"):
            data.open_store(path).corpus()
    (path / "train.starts.npy").write_bytes(starts)
    other = SubwordTokenizer.train([b"the theme"], 260)
    with pytest.raises(ValueError, match=r"store' was made with another tokenizer, or the token"):
        data.write_store(split, other, path)
    (texts / "00.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"store' was made with another source, or the source ch"):
        data.write_store(data.text_folder(texts), BYTES, path)
    assert data.open_store(path).manifest == json.loads(manifest)
    with pytest.raises(ValueError, match=r"texts' holds other files \(.*\); give another folder"):
        data.write_store(split, BYTES, texts)
    with pytest.raises(ValueError, match=r"texts' is no token store: it has no manifest.json"):
        data.open_store(texts)
    with pytest.raises(ValueError, match=r"store' holds out no document to measure on"):
        data.write_store(Split(split.train, []), BYTES, tmp_path / "b" / "store").held_out(9)


def test_a_damaged_store_is_named_where_it_is_read_or_verified(texts, tmp_path, capsys):
    path = tmp_path / "store"
    about = data.write_store(data.text_folder(texts), BYTES, path).manifest
    status, said, _ = command(capsys, "data", str(path), "--verify")
    assert (status, said.count("\n")) == (0, 1)
    size = sum(p.stat().st_size for p in path.iterdir() if p.suffix in (".tokens", ".npy"))
    assert f"{human_bytes(size)}, all as it was written" in said
    shard = path / about["sets"]["train"]["shards"][0][0]
    sha = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert about["sha256"][shard.name] == sha  # what sha256sum says of it

    for file in (shard, path / "held_out.ranks.npy"):  # one flipped bit
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        status, _, error = command(capsys, "data", str(path), "--verify")
        assert (status, error.count("\n")) == (2, 1)
        assert f"is damaged: {file.name} (1 of " in error
        file.write_bytes(whole)

    whole = shard.read_bytes()
    shard.write_bytes(whole[:2000] + np.uint16(60000).tobytes() + whole[2002:])
    store._mapped.cache_clear()
    rows = data.PackedTokens(data.open_store(path).corpus(), 64)
    rows[0]
    with pytest.raises(ValueError, match=rf"{shard.name}' is damaged \(60000 is among tokens"):
        rows[1000 // 64]
    shard.write_bytes(whole)

    for what, value, dtype in (
        ("starts", 10**12, np.int64),
        ("starts", -5, np.int64),
        ("starts", 0, np.float64),
        ("sizes", 0, bool),
        ("ranks", 0, np.int64),
    ):
        file = path / f"held_out.{what}.npy"
        kept = file.read_bytes()
        np.save(file, np.full(len(np.load(file)), value, dtype))
        with pytest.raises(ValueError, match=rf"{what}.npy' is damaged .*; delete"):
            data.open_store(path).held_out(10**6)
        file.write_bytes(kept)
    file = path / "train.starts.npy"
    kept, tokens = file.read_bytes(), about["sets"]["train"]["tokens"]
    np.save(file, np.append(np.load(file)[:-1], tokens))  # one that begins where the text ends
    with pytest.raises(ValueError, match=rf"documents begin from 0 to {tokens} of {tokens} tok"):
        data.open_store(path).corpus()
    file.write_bytes(kept)

    del about["sha256"]  # as an earlier version wrote it
    (path / "manifest.json").write_text(json.dumps(about))
    data.PackedTokens(data.open_store(path).corpus(), 64)[0]
    status, _, error = command(capsys, "data", str(path), "--verify")
    assert (status, error.count("\n")) == (2, 1)
    assert "has no checksum of" in error


def test_a_manifest_with_anything_in_any_place_is_read_or_refused(texts, tmp_path):
    path = tmp_path / "store"
    manifest = data.write_store(data.text_folder(texts), BYTES, path).manifest

    def changed(found):
        """Yields an object with something else in the place of each of its parts."""
        for other in (None, -1, 1.5, "x", [1], {}):
            yield other
        for key in found if isinstance(found, dict) else range(min(len(found), 1)):
            for other in () if isinstance(found, str) else changed_part(found[key]):
                copy = dict(found) if isinstance(found, dict) else list(found)
                copy[key] = other
                yield copy

    def changed_part(part):
        return changed(part if isinstance(part, (dict, list, tuple)) else "")

    refused = 0
    for content in changed(manifest):
        (path / "manifest.json").write_text(json.dumps(content))
        try:
            found = data.open_store(path)
            found.corpus(), found.held_out(100), found.source_state(), found.tokenizer
        except ValueError as error:
            refused += "manifest.json' is damaged" in str(error)
    assert refused > 60


def test_a_source_that_is_bad_or_empty_leaves_nothing(texts, tmp_path):
    path = tmp_path / "store"
    with pytest.raises(ValueError, match="there are no documents to tokenize; check the source"):
        data.write_store(Split([], []), BYTES, path)
    (texts / "lines.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="there are no documents to tokenize; check the source"):
        data.write_store(data.text_folder(texts / "lines.jsonl"), BYTES, path)
    (texts / "empty.jsonl").write_text('{"text": ""}\n' * 40)
    with pytest.raises(ValueError, match="there are no documents with text to tokenize; check"):
        data.write_store(data.text_folder(texts / "empty.jsonl"), BYTES, path)
    (texts / "00.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"00.txt' is not UTF-8"):
        data.write_store(data.text_folder(texts), BYTES, path)
    assert not path.exists()
    assert not (tmp_path / "store.lock").exists()


def test_what_is_done_is_kept_when_the_source_is_mended(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 300)
    path, encoded = tmp_path / "store", []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts):
            encoded.extend(texts)
            return super().encode_batch(texts)

    good = (texts / "lines.jsonl").read_bytes()
    (texts / "lines.jsonl").write_bytes(good[:2000] + b"\xff\n" + good[2000:])
    with pytest.raises(ValueError, match="is not UTF-8"):
        data.write_store(data.text_folder(texts), Counting(), path)
    assert len(encoded) > 30
    (texts / "lines.jsonl").write_bytes(good)
    before, split = len(encoded), data.text_folder(texts)
    found = data.write_store(split, Counting(), path)
    same(found.corpus(), tokenize(split.train, BYTES))
    whole = sum(len(list(side)) for side in split)
    # Parts of other files are not made again; those of the mended file are.
    assert len(encoded) - before < whole - 15
    assert not list(path.glob("*.partial")) + list(path.glob("*.npz"))
    shards = [n for about in found.manifest["sets"].values() for n, _ in about["shards"]]
    assert sorted(shards) == sorted(file.name for file in path.glob("*.tokens"))


def test_text_that_changes_meanwhile_is_refused(texts, tmp_path):
    class Changing(ByteTokenizer):
        def encode_batch(self, batch):
            (texts / "01.txt").write_text("longer than before" * 99)
            return super().encode_batch(batch)

    with pytest.raises(ValueError, match="changed while they were tokenized; run it again"):
        data.write_store(data.text_folder(texts), Changing(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_full_disk_is_one_sentence_and_what_is_done_is_kept(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 4000)
    split, path, calls = data.text_folder(texts), tmp_path / "store", []
    path.mkdir()
    (path / "train-0.tokens-0.partial").write_bytes(b"of a process that was killed")
    fsync = os.fsync

    def full(number):
        calls.append(number)
        if len(calls) == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"No space left on device while the token store '.*store'"
    ) as e:
        data.write_store(split, BYTES, path)
    assert storage.passes(e.value)
    assert len(list(path.glob("*.npz"))) == 2
    assert not list(path.glob("*.partial"))
    same(data.write_store(split, BYTES, path).corpus(), tokenize(split.train, BYTES))


def test_a_killed_worker_is_said(texts, tmp_path, monkeypatch):
    class Killed(ThreadPoolExecutor):
        def __init__(self, workers, context, *, initializer):
            super().__init__(workers)

        def submit(self, *args):
            future = Future()
            future.set_exception(BrokenProcessPool("a process was terminated abruptly"))
            return future

    monkeypatch.setattr(writing, "SHARD_BYTES", 4000)
    monkeypatch.setattr(writing, "ProcessPoolExecutor", Killed)
    with pytest.raises(OSError, match=r"tokenized into '.*store' was killed, as where memory runs"):
        data.write_store(data.text_folder(texts), BYTES, tmp_path / "store", workers=2)


def test_a_long_text_of_bytes_takes_no_memory_for_its_ids():
    class Nowhere:
        def write(self, data):
            return len(data)

    documents = [Document("long", bytes(1 << 26))]
    tracemalloc.start()
    writing._write_tokens(documents, BYTES, Nowhere())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 26


def test_documents_are_encoded_in_chunks(monkeypatch):
    texts = [b"x" * n for n in range(50)]
    whole = tokenize(documents_of(texts), ByteTokenizer())
    sizes = []

    class Watched(ByteTokenizer):
        def encode_batch(self, texts):
            sizes.append(sum(map(len, texts)))
            return super().encode_batch(texts)

    monkeypatch.setattr(writing, "_ENCODE_BYTES", 100)
    chunked = tokenize(iter(documents_of(texts)), Watched())
    assert len(sizes) > 5
    assert max(sizes) < 100 + 50
    same(chunked, whole)
    assert chunked.num_bytes == sum(range(50))


class CountingTokenizer(ByteTokenizer):
    def __init__(self, fingerprint="bytes"):
        super().__init__()
        self.fingerprint = fingerprint
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return super().encode_batch(texts)


def test_cache_is_keyed_by_text_and_tokenizer(tmp_path):
    texts = [b"ab", b"", b"cde"]
    plain = tokenize(documents_of(texts), ByteTokenizer())
    tokenizer = CountingTokenizer()
    for calls in (1, 1, 1):
        corpus = tokenize(documents_of(texts), tokenizer, cache_dir=tmp_path / "cache")
        assert tokenizer.calls == calls
        assert isinstance(corpus.tokens, data.MappedTokens)
        same(corpus, plain)
        assert corpus.fingerprint == plain.fingerprint
        assert data.PackedTokens(corpus, 4)[1]["mask"].tolist() == [1, 1, 1, 0]
    # The same bytes, differently cut into documents, are other documents.
    for other in ([b"abcde"], [b"ab", b"cde"], [b"ab", b"", b"cdX"]):
        tokenize(documents_of(other), tokenizer, cache_dir=tmp_path / "cache")
    assert tokenizer.calls == 4
    tokenize(documents_of(texts), CountingTokenizer("other"), cache_dir=tmp_path / "cache")
    assert len(os.listdir(tmp_path / "cache")) == 5


def test_of_the_cache_the_oldest_stores_that_nobody_has_open_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "jaxtrain" / "tokens"

    def cached(n):
        documents = documents_of([b"%d" % n * 1000])
        split = Split(Documents(lambda: iter(documents)), Documents(lambda: iter(())))
        store = writing.cached_store(split, BYTES)
        os.utime(store.path, (n, n))
        for path in store.path.iterdir():
            os.utime(path, (n, n))
        return store.path.name, store

    (first, opened), _, (third, _) = map(cached, range(3))
    del _
    (folder / "of_another_kind").mkdir()
    size = sum(path.stat().st_size for path in (folder / third).iterdir())
    monkeypatch.setattr(writing, "CACHE_BYTES", int(1.5 * size))
    fourth, _ = cached(3)
    # Two are too many: the third goes, the second too, and the first is in use.
    assert {path.name for path in folder.iterdir()} == {first, fourth, "of_another_kind"}
    assert opened.corpus().tokens[:5].tolist() == [48] * 5


def test_cache_leaves_nothing_half_written(tmp_path):
    class Failing(ByteTokenizer):
        def encode_batch(self, texts):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        tokenize(documents_of([b"ab"]), Failing(), cache_dir=tmp_path)
    assert os.listdir(tmp_path) == []


def test_cache_written_by_another_process_meanwhile(tmp_path, monkeypatch):
    """On another host, or where the file system knows no locks."""
    monkeypatch.setattr(writing, "_one_at_a_time", lambda folder: contextlib.nullcontext(False))
    documents = documents_of([b"ab", b"c"])

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            tokenize(documents, ByteTokenizer(), cache_dir=tmp_path)
            return super().encode_batch(texts)

    corpus = tokenize(documents, Slow(), cache_dir=tmp_path)
    assert corpus.tokens[:].tolist() == [97, 98, 256, 99, 256]
    assert len(os.listdir(tmp_path)) == 1


def test_of_several_that_need_the_same_tokens_one_encodes(tmp_path):
    encoded = []

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            encoded.append(len(texts))
            time.sleep(0.3)
            return super().encode_batch(texts)

    documents = [Document("a", b"ab"), Document("b", b"c")]
    with ThreadPoolExecutor(3) as pool:
        corpora = list(
            pool.map(lambda _: tokenize(documents, Slow(), cache_dir=tmp_path), range(3))
        )
    assert encoded == [2]
    assert [corpus.tokens[:].tolist() for corpus in corpora] == [[97, 98, 256, 99, 256]] * 3


def test_those_that_wait_are_let_through_one_after_the_other(tmp_path):
    """Also where one comes when the lock's file has just been removed."""
    inside, most = [], []

    def enter(number):
        for _ in range(20):
            with writing._one_at_a_time(tmp_path / "store") as alone:
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.remove(number)
                assert alone

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(8)))
    assert (len(most), max(most)) == (160, 1)
    assert not list(tmp_path.iterdir())


def test_a_corpus_has_the_fingerprint_of_its_texts(tmp_path):
    def fingerprint(*texts, cache_dir=None):
        return tokenize(documents_of(texts), BYTES, cache_dir=cache_dir).fingerprint

    one = fingerprint(b"ab", b"c")
    assert one == fingerprint(b"ab", b"c", cache_dir=tmp_path)
    assert len({one, fingerprint(b"a", b"bc"), fingerprint(b"ab", b"d"), fingerprint(b"abc")}) == 4
    with pytest.raises(ValueError, match="documents can be read only once"):
        tokenize(iter(documents_of([b"ab"])), BYTES, cache_dir=tmp_path)


def test_a_cache_is_read_through_failures_that_pass(tmp_path, monkeypatch):
    """A disk that does not answer at once is not a damaged store, which one would delete."""
    documents = [Document("a", b"some text"), Document("b", b"more")]
    whole = tokenize(documents, ByteTokenizer())
    tokenize(documents, ByteTokenizer(), cache_dir=tmp_path)
    load, read, failed = np.lib.format.open_memmap, type(tmp_path).read_text, []

    def later(call):
        def wrapped(*args, **kwargs):
            if failed.count(call) < 2:
                failed.append(call)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    monkeypatch.setattr(np.lib.format, "open_memmap", later(load))
    monkeypatch.setattr(type(tmp_path), "read_text", later(read))
    again = tokenize(documents, ByteTokenizer(), cache_dir=tmp_path)
    same(again, whole)
    assert len(failed) == 4


def test_text_is_encoded_once_until_a_file_changes(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = CountingTokenizer()
    first = data.cached_store(data.text_folder(texts), tokenizer)
    calls = tokenizer.calls
    monkeypatch.setattr(data.sources.Files, "_read", None)  # the text is not read again either
    same(data.cached_store(data.text_folder(texts), tokenizer).corpus(), first.corpus())
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tokenizer.calls == calls > 0
    (texts / "19.txt").write_text("new")
    assert data.cached_store(data.text_folder(texts), tokenizer).path != first.path
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts / "00.txt"))  # no folder can be made there
    found = data.cached_store(data.text_folder(texts), tokenizer)
    folder, corpus = found.path, found.corpus()
    del found
    same(corpus, tokenize(data.text_folder(texts).train, BYTES))
    del corpus
    assert not folder.exists()


def test_the_commands_make_and_show_a_store(texts, tmp_path, capsys):
    path = str(tmp_path / "store")
    make = ("tokenize", "--data", str(texts), "--tokenizer", "300", "--out", path, "--workers", "1")
    status, made, _ = command(capsys, *make)
    assert status == 0
    found = data.open_store(path)
    corpus, tokenizer = found.corpus(), found.tokenizer
    expected = tokenize(data.text_folder(texts).train, tokenizer)
    same(corpus, expected)
    counts = f"train      {len(corpus.starts):,} documents, {len(corpus.tokens):,} tokens, "
    assert counts + f"{corpus.num_bytes:,} bytes" in made
    assert command(capsys, *make)[:2] == (0, made)  # nothing to do
    status, shown, _ = command(capsys, "data", path, "--steps", "50", "--seq-len", "64")
    assert status == 0
    assert made.rstrip() in shown
    assert f"{texts} (unchanged)" in shown
    for name, rows in (
        ("cut", data.PackedTokens(corpus, 64)),
        ("fit", data.FittedTokens(corpus, 64)),
    ):
        (line,) = [line for line in shown.splitlines() if line.startswith(f"packing {name}: ")]
        assert f" {len(rows):,} rows of 64 tokens" in line
        assert f"read {50 * 16 / len(rows):.2f} times" in line
        idle = 1 - sum(row["mask"].sum() for row in rows) / (64 * len(rows))
        assert f"{idle:.2%} of the inputs predict nothing" in line
    most = int(np.bincount(corpus.tokens[:]).argmax())
    share = (corpus.tokens[:] == most).mean()
    assert f"{most:>7}  {share:>6.2%}  {tokenizer.decode([most])!r}" in shown
    for power, count in enumerate(found.manifest["sets"]["train"]["lengths"]):
        assert f"{2**power:,} to" in shown
        assert f"  {count:,}" in shown
    first = tokenizer.decode(corpus.document(0)[:80])
    assert f"document 0: {first!r}" in shown
    (texts / "05.txt").unlink()
    assert f"{texts} (changed since)" in command(capsys, "data", path)[1]
    for flags, words in (
        (make, "was made with another source, or the source changed since"),
        ((*make[:4], "999", *make[5:]), "was made with another"),
        (("data", str(texts)), "is no token store"),
        (("data", path, "--seq-len", "0"), "--seq-len is 0"),
        (("data", path, "--steps", "-1"), "--steps is -1"),
        ((*make[:-1], "0"), "--workers is 0"),
        ((*make, "--part", "3/2"), "--part is '3/2': give I/N"),
        ((*make, "--part", "1/2", "--append"), "--part is for a store that is made anew"),
        ((*make[:2], "http://texts", *make[3:]), "'http://texts' is in no storage known here"),
    ):
        status, _, error = command(capsys, *flags)
        assert (status, error.count("\n")) == (2, 1)
        assert words in error


def test_documents_without_files_need_no_cutting(tmp_path):
    documents = documents_of([b"ab", b"c"])
    split = Split(Documents(lambda: iter(documents)), documents)
    same(data.write_store(split, BYTES, tmp_path / "s").corpus(), tokenize(documents, BYTES))


def test_a_folder_that_cannot_be_written_is_named_and_not_its_lock():
    split = Split([Document("a", b"x")], [])
    with pytest.raises(OSError, match=r"folder '/proc/a' cannot be written .*: choose another"):
        data.write_store(split, ByteTokenizer(), "/proc/a")
