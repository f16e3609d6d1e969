"""Sources: what is read, in which order, how it is split, and what is said of bad files."""

import codecs
import errno
import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain import data
from jaxtrain.data import Document, hash_fraction, python_stdlib, sources, text_folder
from jaxtrain.data.sources import read_rows, rows_in
from jaxtrain.host import storage


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def everything(split):
    return sorted([*split.train, *split.held_out])


@pytest.fixture(scope="module")
def stdlib():
    return [list(part) for part in python_stdlib()]


def test_stdlib_is_every_source_file_once(stdlib):
    root = Path(sysconfig.get_paths()["stdlib"])
    expected = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
    }
    names = [document.name for part in stdlib for document in part]
    assert len(names) == len(set(names))
    assert set(names) == expected
    assert {"abc.py", "json/decoder.py", "asyncio/events.py"} <= set(names)


def test_stdlib_order_and_bytes(stdlib):
    root = Path(sysconfig.get_paths()["stdlib"])
    for part in stdlib:
        assert [document.name for document in part] == sorted(document.name for document in part)
        for document in part[::40]:
            assert document.text == (root / document.name).read_bytes()
    assert [list(part) for part in python_stdlib()] == stdlib


def test_stdlib_split_is_the_hash_of_the_relative_path(stdlib):
    train, held_out = stdlib
    for held, part in ((False, train), (True, held_out)):
        for document in part:
            digest = hashlib.sha256(document.name.encode()).hexdigest()
            assert (int(digest[:16], 16) / 2**64 < 0.05) == held
    assert 0.03 < len(held_out) / (len(train) + len(held_out)) < 0.07


def test_stdlib_without_tests_and_with_installed_packages(tmp_path, monkeypatch):
    write(
        tmp_path,
        {
            "a.py": b"a",
            "b/c.py": b"\xff\xfe not UTF-8",
            "b/data.txt": b"-",
            "site-packages/x.py": b"-",
            "b/dist-packages/x.py": b"-",
            "__pycache__/a.py": b"-",
        },
    )
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert everything(python_stdlib()) == [("a.py", b"a"), ("b/c.py", b"\xff\xfe not UTF-8")]


@given(st.text())
def test_hash_fraction_is_in_range(name):
    assert 0 <= hash_fraction(name) < 1
    exact = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    assert abs(hash_fraction(name) - exact) < 1e-15


def test_folder_reads_text_and_passes_over_the_rest(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": b"B\r\n",
            "a/x.MD": "é".encode(),
            "c.png": b"C",
            ".git/d.txt": b"-",
            ".e.txt": b"-",
        },
    )
    assert everything(text_folder(tmp_path)) == [("a/x.MD", "é".encode()), ("b.txt", b"B\r\n")]
    chosen = everything(text_folder(tmp_path, suffixes=[".png", ".txt"]))
    assert chosen == [("b.txt", b"B\r\n"), ("c.png", b"C")]


def test_folder_split_is_by_path_and_stays_when_files_are_added(tmp_path):
    write(tmp_path, {f"{n}.txt": b"%d" % n for n in range(100)})
    first = text_folder(tmp_path, held_out=0.2)
    held = {document.name for document in first.held_out}
    assert held == {f"{n}.txt" for n in range(100) if hash_fraction(f"{n}.txt") < 0.2}
    assert {document.name for document in first.train} == {f"{n}.txt" for n in range(100)} - held
    write(tmp_path, {f"{n}.txt": b"%d" % n for n in range(100, 150)})
    again = text_folder(tmp_path, held_out=0.2)
    assert held <= {document.name for document in again.held_out}


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 5), held_out=st.floats(0.01, 0.99), salt=st.integers(0, 10**6))
def test_small_folders_have_both_sides(tmp_path_factory, count, held_out, salt):
    folder = tmp_path_factory.mktemp("few")
    write(folder, {f"{salt}-{n}.txt": b"text" for n in range(count)})
    split = text_folder(folder, held_out=held_out)
    assert list(split.train)
    assert list(split.held_out)
    assert len(everything(split)) == count


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_the_only_file_of_a_side_is_not_empty(tmp_path, held_out):
    """As an __init__.py may be."""
    write(tmp_path, {f"{n}.py": b"x" * (n == 7) for n in range(12)})
    write(tmp_path, {f"{n}.md": b"y" * (n == 7) for n in range(12)})
    sides = text_folder(tmp_path, held_out=held_out)
    alone = [d for d in (sides.held_out if held_out < 0.5 else sides.train)]
    assert [len(d.text) for d in alone] == [1]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 30), held_out=st.floats(0.001, 0.999), name=st.sampled_from("abcd"))
def test_small_files_of_rows_have_both_sides(tmp_path_factory, count, held_out, name):
    path = tmp_path_factory.mktemp("rows") / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"text": str(i), "label": i}) for i in range(count)))
    ranks = {f"{path.name}:{i + 1}": hash_fraction(f"{path.name}:{i + 1}") for i in range(count)}
    below = {row for row in ranks if ranks[row] < held_out}
    expected = below or {min(ranks, key=ranks.get)}
    expected -= set() if len(expected) < count else {max(ranks, key=ranks.get)}
    split = text_folder(path, held_out=held_out)
    assert {document.name for document in split.held_out} == expected
    assert {document.name for document in split.train} == ranks.keys() - expected
    assert {d.name for part in split.held_out.files.cut(40) for d in part} == expected
    train, rows = read_rows(path, ["text"], held_out=held_out)
    assert {f"{path.name}:{row['label'] + 1}" for row in rows} == expected
    assert len(train) == count - len(expected)


def test_files_that_are_not_read_are_said_once(tmp_path, caplog):
    unread = {"a.pdf": b"", "b/c.PDF": b"", "d.pdf": b"", "e.docx": b"", "LICENSE": b"", ".f": b""}
    write(tmp_path, {"a.txt": b"a\n", "b/b.txt": b"b\n", "state.json": b"{}"} | unread)
    split = text_folder(tmp_path)
    assert [document.name for document in everything(split)] == ["a.txt", "b/b.txt"]
    text_folder(tmp_path)
    write(tmp_path, {f"a.{i}": b"" for i in "xyz"} | {"c.jsonl": b"{}"})
    text_folder(tmp_path, chat=data.load_template("plain"))
    assert [record.getMessage().partition("left out ")[2] for record in caplog.records] == [
        "(3 .pdf, 1 LICENSE, 1 .docx): make text of such files",
        "(3 .pdf, 2 .txt, 1 LICENSE, 1 .x, 1 .y, ...): make text of such files",
    ]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_line_without_end_is_one_sentence(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_LINE_BYTES", 100)
    row = json.dumps({"text": "a" * 88})  # 100 bytes
    pack = {
        "jsonl.gz": gzip.compress,
        "jsonl.zst": lambda x: pyarrow.compress(x, "zstd", asbytes=True),
    }
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(pack.get(ending, bytes)(f"{row}\n".encode()))
    with pytest.raises(
        ValueError, match=rf"rows.{ending}' has a line of more than 100 B: a line is"
    ):
        list(text_folder(path, held_out=0).train)
    path.write_bytes(pack.get(ending, bytes)(f"{row}".encode()))
    assert len(list(text_folder(path, held_out=0).train)) == 1


def test_a_store_without_its_manifest_is_named(tmp_path):
    split = text_folder(write(tmp_path / "texts", {"a.txt": b"a\nb\n"}))
    data.write_store(split, data.ByteTokenizer(), tmp_path / "s")
    (tmp_path / "s" / "manifest.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"s' is an unfinished token store, without its man"
    ):
        text_folder(tmp_path / "s")


def test_nothing_held_out_on_request(tmp_path):
    write(tmp_path, {"a.txt": b"a\n", "b.txt": b"b\n"})
    split = text_folder(tmp_path, held_out=0)
    assert (len(list(split.train)), list(split.held_out)) == (2, [])
    assert list(text_folder(tmp_path / "a.txt", held_out=0)) != []
    assert list(text_folder(tmp_path / "a.txt", held_out=0).train) == [("a.txt", b"a\n")]


@settings(max_examples=30, deadline=None)
@given(text=st.text(min_size=1, max_size=200), held_out=st.floats(0, 0.99))
def test_single_text_is_cut_in_two_between_characters(tmp_path_factory, text, held_out):
    path = tmp_path_factory.mktemp("one") / "input.txt"
    path.write_bytes(text.encode())
    train, held = (b"".join(d.text for d in part) for part in text_folder(path, held_out=held_out))
    assert train + held == text.encode()
    assert train.decode() + held.decode() == text
    assert train
    assert len(held) <= held_out * len(text.encode())


def test_single_text_is_cut_at_a_line_end(tmp_path):
    lines = b"".join(b"line %d\n" % n for n in range(1000))
    write(tmp_path, {"input.txt": lines})
    train, held = (b"".join(d.text for d in part) for part in text_folder(tmp_path))
    assert train.endswith(b"\n")
    assert held.startswith(b"line")
    assert abs(len(held) - 0.05 * len(lines)) < 10


def rows_of(texts, field="text"):
    return b"".join(json.dumps({"id": 0, field: text}).encode() + b"\n" for text in texts)


def test_jsonl_rows_split_by_path_and_row(tmp_path):
    texts = [f"row {n} ümlaut" for n in range(300)]
    write(tmp_path, {"data.jsonl": rows_of(texts, "body")})
    split = text_folder(tmp_path, field="body")
    expected = {f"data.jsonl:{n + 1}": text.encode() for n, text in enumerate(texts)}
    assert dict(everything(split)) == expected
    held = [document.name for document in split.held_out]
    assert held == [name for name in expected if hash_fraction(name) < 0.05]
    assert 3 < len(held) < 35


def test_few_files_of_rows_are_split_by_row(tmp_path):
    """By file, a third of three files would be held out."""
    write(tmp_path, {f"{n}.jsonl": rows_of(map(str, range(200))) for n in range(3)})
    split = text_folder(tmp_path)
    expected = [f"{n}.jsonl:{row + 1}" for n in range(3) for row in range(200)]
    held = [document.name for document in split.held_out]
    assert held == [name for name in expected if hash_fraction(name) < 0.05]
    assert {name[0] for name in held} == {"0", "1", "2"}
    assert sorted(held + [document.name for document in split.train]) == sorted(expected)
    for parts in (side.files.cut(1000) for side in split):  # as a store's processes read them
        assert len(parts) > 10
    assert [d for part in split.held_out.files.cut(1000) for d in part] == list(split.held_out)
    by_file = text_folder(tmp_path, held_out=0.4)  # a third is less than that
    assert not {d.name[0] for d in by_file.train} & {d.name[0] for d in by_file.held_out}


def test_splits_of_a_saved_dataset_are_not_mixed(tmp_path):
    write(tmp_path, {"dataset_dict.json": b"{}", "train/a.jsonl": rows_of(["x"])})
    with pytest.raises(ValueError, match=r"holds the splits of a dataset, .* '.*train'$"):
        text_folder(tmp_path)
    assert everything(text_folder(tmp_path / "train")) == [("a.jsonl:1", b"x")]


def test_jsonl_blank_lines_and_two_files(tmp_path):
    write(tmp_path, {"a.jsonl": rows_of(["x"]) + b"\n  \n" + rows_of(["y"]), "b.txt": b"z"})
    assert everything(text_folder(tmp_path)) == [
        ("a.jsonl:1", b"x"),
        ("a.jsonl:4", b"y"),
        ("b.txt", b"z"),
    ]


def write_parquet(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), "dictionary"])
def test_parquet_rows(tmp_path, kind):
    texts = [f"row {n} ß" for n in range(2500)]
    column = pyarrow.array(texts)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    write_parquet(tmp_path / "d.parquet", {"n": range(2500), "body": column}, row_group_size=700)
    split = text_folder(tmp_path, field="body")
    expected = {f"d.parquet:{n}": text.encode() for n, text in enumerate(texts)}
    assert dict(everything(split)) == expected
    assert [d.name for d in split.train] == [n for n in expected if hash_fraction(n) >= 0.05]


def test_both_forms_of_arrow_are_read(tmp_path):
    table = pyarrow.table({"text": [f"row {n} ß" for n in range(50)]})
    for name, writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with writer(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(table, 7)
        rows = text_folder(tmp_path / f"{name}.arrow", held_out=0.0).train
        assert [row.text.decode() for row in rows] == table["text"].to_pylist()


def test_parquet_is_not_loaded_whole(tmp_path):
    texts = [f"{n:05d}" * 2000 for n in range(2000)]
    write_parquet(tmp_path / "d.parquet", {"text": texts}, row_group_size=100, use_dictionary=False)
    before = pyarrow.total_allocated_bytes()
    most = 0
    for _ in text_folder(tmp_path).train:
        most = max(most, pyarrow.total_allocated_bytes() - before)
    # The column is 20 MB; a batch of 1024 rows is half of it.
    assert 0 < most < 15e6


def test_reading_is_lazy(tmp_path):
    write(tmp_path, {"a.txt": b"a", "b.txt": b"b", "c.txt": b"\xff"})
    documents = iter(text_folder(tmp_path, held_out=0).train)
    assert [next(documents), next(documents)] == [("a.txt", b"a"), ("b.txt", b"b")]
    with pytest.raises(ValueError, match="UTF-8"):
        next(documents)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b"abc\xffd"}, r"a.txt' is not UTF-8: byte 0xff at offset 3 "),
        ({"a.jsonl": rows_of(["x"]) + b'{"text": "\xff"}\n'}, r"0xff at offset 33 "),
        ({"a.jsonl": rows_of(["x"]) + b'{"body": "x"}'}, r"a.jsonl' line 2 has no field 'text'"),
        ({"a.jsonl": b"[1]"}, r"line 1 has no field 'text'; it has no fields"),
        ({"a.jsonl": b"\n{x"}, r"a.jsonl' line 2 is not JSON"),
        ({"a.jsonl": b'{"a": "b'}, r"not JSON \(Unterminated string starting at column 7\)"),
        ({"a.jsonl": b'{"text": 3}'}, r"line 1 has a field 'text' of type int; it must be"),
        ({"a.jsonl": b'{"text": "\\ud800"}'}, r"line 1 .* half of a surrogate pair"),
        ({"a.parquet": b"not parquet at all"}, r"a.parquet' is cut short or damaged"),
        ({"a.parquet": b""}, r"a.parquet' is cut short or damaged"),
    ],
)
def test_bad_content_is_named(tmp_path, files, message):
    with pytest.raises(ValueError, match=message) as caught:
        everything(text_folder(write(tmp_path, files)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_mark_of_the_encoding_before_the_first_row_is_dropped(tmp_path, name):
    content = codecs.BOM_UTF8 + rows_of(["x", "y"])
    files = {name: gzip.compress(content) if name.endswith("gz") else content}
    (train, _), root = text_folder(write(tmp_path, files), held_out=0), tmp_path
    assert [document.text for document in train] == [b"x", b"y"]
    assert [row["text"] for row in rows_in(root / name, ["text"])] == ["x", "y"]
    if name == "a.jsonl":
        parts = train.files.cut(4)
        assert [document.text for part in parts for document in part] == [b"x", b"y"]
        assert len(parts) == 2


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999, None])
def test_parquet_that_is_cut_short_or_damaged_inside_names_the_file(tmp_path, keep):
    path = tmp_path / "d.parquet"
    write_parquet(path, {"text": [str(n) * 50 for n in range(3000)]}, row_group_size=500)
    data = bytearray(path.read_bytes())
    middle = len(data) // 3
    if keep is None:
        data[middle : middle + 2000] = b"\xff" * 2000
    path.write_bytes(data[: int(len(data) * (keep or 1))])
    with pytest.raises(ValueError, match=r"d.parquet' is cut short or damaged"):
        everything(text_folder(tmp_path))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["x"]}, r"column 'text' is missing; .* \['body'\]"),
        ({"text": [1], "body": ["x"]}, r"column 'text' is of type int64; .* \['body'\]"),
        ({"text": ["x", None]}, r"d.parquet' row 1 has no 'text'"),
    ],
)
def test_parquet_columns(tmp_path, columns, message):
    columns = {name: pyarrow.array(values) for name, values in columns.items()}
    write_parquet(tmp_path / "d.parquet", columns)
    with pytest.raises(ValueError, match=message):
        everything(text_folder(tmp_path))


def test_missing_things(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere' does not exist"):
        text_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no file ending in \.txt"):
        text_folder(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"a.png' holds no file ending in \.txt"):
        text_folder(tmp_path / "a.png")
    with pytest.raises(ValueError, match="`held_out` is 1; give"):
        text_folder(tmp_path, held_out=1)
    with pytest.raises(ValueError, match=r"suffixes is '\.txt'; give several"):
        text_folder(tmp_path, suffixes=".txt")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    write(tmp_path, {"a.parquet": b"", "b.txt": b"b"})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[text\]'"):
        text_folder(tmp_path)


def test_documents_can_be_read_again():
    documents = sources.Documents(lambda: iter([Document("a", b"x")]))
    assert list(documents) == list(documents) == [("a", b"x")]


def test_text_is_read_through_failures_that_pass(tmp_path, monkeypatch):
    """Files, lines and folders: what a disk does not give at once is neither lost nor doubled."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("deep text")
    (tmp_path / "b.txt").write_text("text")
    lines = "".join(f'{{"text": "{i}"}}\n' for i in range(20_000))
    (tmp_path / "c.jsonl").write_text(lines)

    def names():
        split = text_folder(tmp_path, held_out=0)
        return [document.name for document in split.train]

    whole = names()
    assert len(whole) == 20_002
    monkeypatch.setattr(storage, "pause", lambda seconds: None)
    monkeypatch.setattr(sources, "_BUFFER_BYTES", 1 << 16)
    kind = type(epath.Path(tmp_path))
    scandir, opened, failed = os.scandir, kind.open, []

    def scandir_once(path):
        if str(path).endswith("deep") and "deep" not in failed:
            failed.append("deep")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    class Lines(io.RawIOBase):
        """Fails in the middle of the file. As files in a bucket, it has no ``readline(size)``."""

        def __init__(self, file):
            self.file = file

        def readable(self):
            return True

        def close(self):
            self.file.close()
            super().close()

        def readinto(self, buffer):
            if self.file.tell() and "block" not in failed:
                failed.append("block")
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            return self.file.readinto(buffer)

        def readline(self):
            return super().readline()

    def open_lines(self, *args, **kwargs):
        file = opened(self, *args, **kwargs)
        return Lines(file) if self.name == "c.jsonl" else file

    monkeypatch.setattr(os, "scandir", scandir_once)
    monkeypatch.setattr(kind, "open", open_lines)
    assert names() == whole
    assert sorted(failed) == ["block", "deep"]


@pytest.mark.parametrize(
    "held_out",
    [
        "validation.jsonl",
        "valid.jsonl",
        "val.jsonl",
        "test-00000-of-00001.jsonl",
        "test-00000-of-00001-a09b74b3ef9c3b56.jsonl",
    ],
)
def test_rows_of_a_held_out_file_are_never_trained_on(held_out, tmp_path):
    """Whatever it is called: a hash would have put all but a few of its rows into training."""
    train = held_out.replace(held_out.split(".")[0].split("-")[0], "train")
    for name, text in ((train, "seen"), (held_out, "new"), ("test_of_it.jsonl", "seen")):
        (tmp_path / name).write_text(f'{{"text": "{text}"}}\n' * 200)
    sides = read_rows(tmp_path, ["text"])
    assert [{row["text"] for row in side} for side in sides] == [{"seen"}, {"new"}]
    alone = read_rows(tmp_path / held_out, ["text"])
    assert all(alone)
    assert sum(map(len, alone)) == 200
