"""Documents to train on: the standard library's own source code, sums, and folders of text files.

A source is anything that can be iterated over more than once and yields `Document`. Those made
here come as a `Split`: what to train on, and about one document in twenty to measure on, chosen by
a hash of its name so that the choice survives new files, other machines and other orders.
"""

import collections
import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import io
import itertools
import json
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from etils import epath

from jaxtrain.data.chat import FIELDS, ChatTemplate, forms_of
from jaxtrain.host import extras, storage
from jaxtrain.host.memory import human_bytes
from jaxtrain.host.paths import as_path, exists, file_system, is_file, is_folder, look

logger = logging.getLogger(__name__)
HELD_OUT = 0.05
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".css", ".toml", ".yaml", ".yml"),
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".hs", ".java", ".jl", ".js", ".kt"),
    *(".lua", ".ml", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift"),
    ".ts",
)
# What packs JSON lines is undone as they are read; .arrow is what Hugging Face datasets save.
_JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_COLUMN_SUFFIXES = (".parquet", ".arrow")
ROW_SUFFIXES = (*_JSON_SUFFIXES, *_COLUMN_SUFFIXES)
TABLE_SUFFIXES = (*_JSON_SUFFIXES, ".csv", ".tsv", ".parquet")
# Names of files of rows that are held out, whole or in shards as those of Hugging Face.
HELD_OUT_FILE = re.compile(r"(validation|valid|val|dev|test)(-\d+-of-\d+(-[0-9a-f]+)?)?\.")
_SPLITS = "dataset_dict.json"  # of a saved dataset that has several
_OF_DATASET = ("dataset_info.json", "state.json")
# Beside a saved dataset lie files that some process has made of it.
_NOT_DATASET = ("cache-", "indices-", "tmp")
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_PARQUET_BATCH_ROWS = 1024
_LINE_BYTES, _BUFFER_BYTES = 1 << 30, 1 << 20
_ARROW_FILE = b"ARROW1"
_NEEDS = "reading Parquet, Arrow and zst files needs pyarrow"
_pyarrow = functools.partial(extras.load, _NEEDS, "text", "pyarrow.parquet")


class Document(NamedTuple):
    """One text: its name within the source, and its bytes (UTF-8 unless the source says else)."""

    name: str
    text: bytes


class Span(NamedTuple):
    """A part of a file: bytes of JSON lines or row groups of Parquet, and the rows before it."""

    start: int
    stop: int
    rows_before: int


@dataclasses.dataclass(frozen=True)
class Files:
    """Documents of files, which can be stamped, cut into parts, and sent to another process.

    Args:
      names: relative paths of the files, in order.
      field: of a row, or column, that holds the text; None takes any file for one document.
      side: which side of the split of a single text, or by rows, "train" or "held_out"; None for
        all of the files.
      held_out: the share that is held out of the text or of the rows.
      moved: the row that is on the other side than its hash says; see `row_to_move`.
      span: the part of a single file; None for the whole.
      chat: renders rows that are conversations; None takes the text of `field`.
    """

    root: str
    names: tuple[str, ...]
    field: str | None
    side: str | None = None
    held_out: float = 0.0
    span: Span | None = None
    chat: ChatTemplate | None = None
    moved: str | None = None

    def __iter__(self) -> Iterator[Document]:
        root = as_path(self.root)
        for name in self.names:
            read = functools.partial(self._read, root, name)
            for document in storage.iterating(read, f"'{root / name}'"):
                yield from self._sides(document)

    def stamp(self) -> str:
        """Returns a hash of everything that the documents depend on: names, sizes, times."""
        root = os.path.abspath(self.root) if "://" not in self.root else self.root
        found = [(name, *_size_and_time(f"{self.root}/{name}")) for name in self.names]
        options = [option for option in (self.chat, self.moved) if option is not None]
        text = repr((root, self.field, self.side, self.held_out, self.span, found, *options))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]

    def num_bytes(self) -> int:
        """Returns the size of the files, or of the span."""
        if self.span is not None and not self.names[0].lower().endswith(_COLUMN_SUFFIXES):
            return self.span.stop - self.span.start
        return sum(_size_and_time(f"{self.root}/{name}")[0] for name in self.names)

    def cut(self, num_bytes: int) -> "list[Files]":
        """Cuts the documents, in order, into parts of about so many bytes.

        Small files go together. Large files of JSON lines are cut at lines (which reads them once,
        to know the numbers of the lines), Parquet at row groups; other files stay whole.
        """
        parts: list[Files] = []
        small, size = [], 0
        for name in self.names:
            spans = []
            if (own := _size_and_time(f"{self.root}/{name}")[0]) > num_bytes and self.field:
                path = as_path(self.root) / name
                spans = storage.retrying(functools.partial(_spans, path, num_bytes), f"'{path}'")
            if small and (spans or size + own > num_bytes):
                parts.append(dataclasses.replace(self, names=tuple(small)))
                small, size = [], 0
            if spans:
                parts += [dataclasses.replace(self, names=(name,), span=span) for span in spans]
            else:
                small, size = [*small, name], size + own
        if small or not parts:
            parts.append(dataclasses.replace(self, names=tuple(small)))
        return parts

    def _read(self, root: Path, name: str) -> Iterator[Document]:
        path = root / name
        if self.field is None or not name.lower().endswith(ROW_SUFFIXES):
            text = path.read_bytes()
            if self.field is not None:
                _decode(text, path, first_byte=0)
            yield Document(name, text)
            return
        choose = functools.partial(_columns, path, None if self.chat else self.field)
        for number, where, record in _records(path, choose, self.span):
            if self.chat is None:
                yield Document(f"{name}:{number}", _text_of(record, where, self.field))
            else:
                row = f"{name}:{number}"
                yield from self.chat.conversations(row, record, where, field=self.field)

    def _sides(self, document: Document) -> Iterator[Document]:
        """Yields what is on this side of a split by row, or of the only text."""
        if self.side is None:
            yield document
        elif self.names[0].lower().endswith(ROW_SUFFIXES):
            is_held_out = (hash_fraction(document.name) < self.held_out) != (
                document.name == self.moved
            )
            if is_held_out == (self.side == "held_out"):
                yield document
        else:
            cut = _cut(document.text, self.held_out)
            text = document.text[cut:] if self.side == "held_out" else document.text[:cut]
            if text:
                yield Document(document.name, text)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents read anew, one at a time, at every iteration.

    Args:
      read: returns a fresh iterator over the documents, always the same ones in the same order.
      files: the same documents as files, where they come from files.

    >>> [document.name for document in Documents(lambda: iter([Document("a", b"x")]))]
    ['a']
    """

    read: Callable[[], Iterator[Document]]
    files: Files | None = None

    def __iter__(self) -> Iterator[Document]:
        return self.read()


class Split(NamedTuple):
    """Documents to train on and documents to measure on; no document is in both."""

    train: Documents
    held_out: Documents


def hash_fraction(name: str) -> float:
    """Maps a name to [0, 1), evenly and for ever: the first 8 bytes of its SHA-256 over 2^64.

    >>> round(hash_fraction("abc.py"), 6)
    0.769195
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    # 53 bits are all a float holds; taking 64 could round up to exactly 1.
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def row_to_move(names: Iterable[str], held_out: float) -> str | None:
    """Returns the row that must change sides so that neither is empty; None if both have rows.

    It is the row of the lowest hash if none is below ``held_out``, and that of the highest if all
    are. Reading stops as soon as both sides have a row.

    >>> row_to_move(["a.jsonl:1", "a.jsonl:2"], 0.05)
    'a.jsonl:2'
    """
    ranks, sides = {}, set()
    for name in names if held_out else ():
        ranks[name] = rank = hash_fraction(name)
        sides.add(rank < held_out)
        if len(sides) == 2:
            return None
    if len(ranks) < 2:
        return None
    return max(ranks, key=ranks.get) if True in sides else min(ranks, key=ranks.get)


def python_stdlib(*, held_out: float = HELD_OUT) -> Split:
    """Returns the source code of the running Python's standard library: about 30 MB on most builds.

    Every ``.py`` file below ``sysconfig.get_paths()["stdlib"]``, without installed packages, in the
    order of their relative paths; a file is held out when `hash_fraction` of its relative path is
    below `held_out`. Files are read as bytes: a few test files are, on purpose, not UTF-8.
    Distributions that ship the library without its tests have about a third of the text.

    >>> train, held_out = python_stdlib()
    >>> 'abc.py' in {document.name for document in train}
    True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return _split(root, find_files(root, (".py",), skip=_NOT_STDLIB), held_out, field=None)


def two_digit_sums(*, held_out: float = HELD_OUT, passes: int = 20) -> Split:
    """Returns all 8,100 sums of two numbers of two digits, each a line such as ``47+38=85``.

    A sum is held out when `hash_fraction` of its ``47+38`` is below `held_out`. A document to train
    on is one of so many `passes` over all others, each in an order of its own.

    >>> train, held_out = two_digit_sums(passes=2)
    >>> [len(document.text.splitlines()) for document in (*train, *held_out)]
    [7700, 7700, 400]
    """
    asked = [f"{a}+{b}" for a in range(10, 100) for b in range(10, 100)]
    sides = [], []
    for each in asked:
        sides[hash_fraction(each) < held_out].append(each)

    def text(number: int, side: list[str]) -> Document:
        ordered = sorted(side, key=lambda each: hash_fraction(f"{number} {each}"))
        lines = (f"{each}={sum(map(int, each.split('+')))}\n" for each in ordered)
        return Document(f"sums {number}", "".join(lines).encode())

    train = Documents(lambda: (text(number, sides[0]) for number in range(passes)))
    return Split(train, Documents(lambda: iter([text(passes, sides[1])])))


def text_folder(
    path: str | os.PathLike[str],
    *,
    field: str = "text",
    held_out: float = HELD_OUT,
    suffixes: Iterable[str] = TEXT_SUFFIXES,
    chat: ChatTemplate | None = None,
) -> Split:
    """Returns the documents below a folder, or of one file: text, JSON lines, Parquet and Arrow.

    A text file is one document; a line of a ``.jsonl`` file (also ``.jsonl.gz``, ``.jsonl.zst``)
    and a row of a ``.parquet`` file or of an ``.arrow`` file (a dataset that Hugging Face's
    ``save_to_disk`` wrote) is one document each, read as it is asked for (columns by row group,
    only the one). Hidden files and folders are passed over. Order: by relative path, then by line
    or row.

    With several files, a file is held out when `hash_fraction` of its relative path is below
    `held_out`; should that leave one side without any, the file with the lowest (or highest) hash
    of those that are not empty goes there. Where all are files of rows, and so few that one file
    would be more than the share, the hash is of the path and the row; should that leave one side
    without any row, the one with the lowest (or highest) hash goes there. A single text file is cut
    in two at a line end: its last part is held out.

    Args:
      path: a folder, searched to any depth, or one file; local, or in a bucket (``gs://...``).
      field: the field of JSON lines and the column of Parquet and Arrow files that holds the text.
      held_out: the share to hold out, at least 0 and below 1.
      suffixes: the endings of text files, with their dot.
      chat: renders conversations, which all rows are then; text files are passed over.

    Raises:
      FileNotFoundError: if the folder is missing or holds no file that could be read.
      ValueError: if the folder is a saved dataset of several splits, and on reading text that is
        not UTF-8 (names file and byte), a line or row without the field, or a damaged file.
      ImportError: if there are Parquet, Arrow or zst files and pyarrow is not installed.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a.txt", "b.txt", "c.md"):
    ...     _ = (folder / name).write_text(name)
    >>> train, held_out = text_folder(folder)
    >>> len(list(train)), len(list(held_out))
    (2, 1)
    """
    root = as_path(path)
    if not 0 <= held_out < 1:
        raise ValueError(f"`held_out` is {held_out}; give a share of at least 0 and below 1")
    if not exists(root):
        raise FileNotFoundError(f"text folder '{root}' does not exist; give a folder or a file")
    wanted = (*(() if chat else suffixes), *ROW_SUFFIXES)
    if not all(suffix.startswith(".") and len(suffix) > 1 for suffix in wanted):
        raise ValueError(f"suffixes is {suffixes!r}; give several endings with dots, as ('.txt',)")
    files = []
    if is_file(root):
        root, names = root.parent, [root.name]
        if not names[0].lower().endswith(wanted):
            names = []
    elif exists(root / _SPLITS):
        raise ValueError(
            f"'{root}' holds the splits of a dataset, one to train on and others to measure on: "
            f"give the folder of one, as '{root / 'train'}'"
        )
    else:
        files = find_files(root, ("",))
        names = [name for name in files if name.lower().endswith(wanted)]
        _say_left_out(root, {*files} - {*names})
    if not names:
        if any(name.endswith(".tokens") for name in files):
            raise FileNotFoundError(
                f"'{path}' is an unfinished token store, without its manifest.json: copy the whole "
                "store, or run its jaxtrain tokenize again"
            )
        raise FileNotFoundError(
            f"'{path}' holds no file ending in {', '.join(wanted)}: convert others to JSON lines"
        )
    if any(name.lower().endswith((*_COLUMN_SUFFIXES, ".zst")) for name in names):
        _pyarrow()
    return _split(root, names, held_out, field=field, chat=chat)


def _say_left_out(root: Path, names: Collection[str]) -> None:
    """Logs which files of a folder are not read; those of a saved dataset are no text."""
    counts = collections.Counter(
        os.path.splitext(name)[1].lower() or name for name in sorted({*names} - {*_OF_DATASET})
    )
    if counts:
        common = ", ".join(f"{count} {ending}" for ending, count in counts.most_common(5))
        dots = ", ..." * (len(counts) > 5)
        _warn_once(
            f"'{root}' has files that are left out ({common}{dots}): make text of such files"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def read_rows(
    path: str | os.PathLike[str], fields: Iterable[str], *, held_out: float = HELD_OUT
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """Returns rows of several fields, to train on and held out, of JSON lines, CSV, TSV or Parquet.

    In a folder, files that are called validation, valid, val, dev or test are held out, and shards
    of these, such as test-00000-of-00002.parquet; without one, rows are, by a hash of their file
    and number, and one where that chooses none. None where `path` has files of another kind.

    Raises:
      ValueError: a row lacks one of `fields`, a side is empty, or a file is damaged.
    """
    root = as_path(path)
    files = sorted(root.iterdir()) if is_folder(root) else [root] * exists(root)
    files = [file for file in files if not file.name.startswith(".")]
    if not files or not all(file.name.lower().endswith(TABLE_SUFFIXES) for file in files):
        return None
    kept = [file for file in files if len(files) > 1 and HELD_OUT_FILE.match(file.name)]
    sides, rows = ([], []), {}
    for file in files:
        for number, row in enumerate(rows_in(file, fields), 1):
            rows[f"{file.name}:{number}"] = file in kept, row
    moved = row_to_move(rows, held_out)
    for name, (is_kept, row) in rows.items():
        draw = (hash_fraction(name) < held_out) != (name == moved)
        sides[is_kept if kept else draw].append(row)
    if not all(sides):
        raise ValueError(
            f"'{path}' has {len(sides[0])} rows to train on and {len(sides[1])} held out: give "
            "more rows, or a folder with train.* and validation.*"
        )
    return sides


def rows_in(path: str | os.PathLike[str], fields: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file of JSON lines, CSV, TSV or Parquet; raises ValueError for one that
    lacks one of `fields`, and where the file is of another kind."""
    file, fields = as_path(path), list(fields)
    if not is_file(file) or not file.name.lower().endswith(TABLE_SUFFIXES):
        raise ValueError(f"'{path}' is no JSONL, CSV, TSV or Parquet: give a file of such rows")
    for number, row in enumerate(_rows_of(file), 1):
        if lacking := [name for name in fields if row.get(name) in (None, "")]:
            has = ", ".join(repr(name) for name in row) or "no fields at all"
            wrong = f"has no '{lacking[0]}'; it has {has}: rename the field"
            if lacking[0] in row:
                wrong = f"has an empty '{lacking[0]}': fill it in"
            raise ValueError(f"'{file}' row {number} {wrong}, or drop such rows")
        yield row


def fields_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Returns the names of the fields of the first row of a file, or of a folder's first file of
    rows; none where there is no row, as in texts and images."""
    root, suffixes = as_path(path), (*ROW_SUFFIXES, *TABLE_SUFFIXES)
    files = [root] if is_file(root) else []
    if not files and is_folder(root):
        files = [root / name for name in find_files(root, suffixes)[:1]]
    rows = (_rows_of(file) for file in files if file.name.lower().endswith(suffixes))
    return tuple(next(itertools.chain.from_iterable(rows), ()))


def texts_of_rows(sides: Iterable[list[dict[str, Any]]], fields: Iterable[str]) -> Split:
    """Returns the texts of rows as documents, such as a tokenizer learns from."""

    def text_of(value: Any) -> str:
        if isinstance(value, (list, dict)):
            kind = type(value).__name__
            raise ValueError(
                f"the row with {str(value)[:80]} has a {kind} as its text: give a string"
            )
        return str(value or "")

    def texts(rows: list[dict[str, Any]]) -> Documents:
        parts = [[text_of(row.get(name)) for name in fields] for row in rows]
        return Documents(lambda: (Document("", "\n".join(each).encode()) for each in parts))

    return Split(*map(texts, sides))


def _rows_of(path: epath.Path) -> Iterator[dict[str, Any]]:
    name = path.name.lower()
    if name.endswith(ROW_SUFFIXES):
        yield from (row for *_, row in _records(path, lambda schema: schema.names, None))
    else:
        text = _decode(path.read_bytes(), path, first_byte=0).removeprefix("\ufeff")
        delimiter = "\t" if name.endswith(".tsv") else ","
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        try:
            for row in rows:
                if None in row:  # fields beyond the names of the first line
                    raise csv.Error(f"it has more fields than the {len(row) - 1} of the first line")
                yield row
        except csv.Error as error:
            raise ValueError(
                f"'{path}' cannot be read near line {rows.line_num}: {error}; put fields that hold "
                "a separator or a quote between quotes, and double those, or write JSON lines"
            ) from None


def open_text(
    name: str, *, field: str = "text", held_out: float = HELD_OUT, chat: ChatTemplate | None = None
) -> Split:
    """Opens text: "python" is the standard library's source, "sums" are sums of two numbers, and
    anything else is opened as by `text_folder`."""
    if name not in BUILT_IN:
        return text_folder(name, field=field, held_out=held_out, chat=chat)
    if chat is not None:
        raise ValueError(f"'{name}' is text without conversations: give no chat template")
    return BUILT_IN[name](held_out=held_out)


# Texts that are known by their names, and are no files.
BUILT_IN = {"python": python_stdlib, "sums": two_digit_sums}


def find_files(root: Path, suffixes: tuple[str, ...], *, skip: Collection[str] = ()) -> list[str]:
    """Lists the files below `root` with these endings: relative POSIX paths, sorted.

    What is hidden is left out, and links to folders below `root` are, for they may lead back.
    """
    what = f"the listing of '{root}'"
    if "://" in str(root):
        return storage.retrying(lambda: sorted(_find_in_bucket(root, "", suffixes)), what)
    return storage.retrying(lambda: sorted(_find_on_disk(root, suffixes, skip)), what)


def _find_on_disk(root: Path, suffixes: tuple[str, ...], skip: Collection[str]) -> Iterator[str]:
    for folder, folders, files in os.walk(root, onerror=_unless_forbidden):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in files:
            if _is_wanted(name, suffixes):
                yield Path(folder, name).relative_to(root).as_posix()


def _is_wanted(name: str, suffixes: tuple[str, ...]) -> bool:
    made = name.endswith(".arrow") and name.startswith(_NOT_DATASET)
    return name.lower().endswith(suffixes) and not made and not name.startswith(".")


def _unless_forbidden(error: OSError) -> None:
    """A folder that cannot be listed is passed over for good, or fails: never only now and then."""
    if storage.passes(error):
        raise error


def _find_in_bucket(root: epath.Path, below: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """By one listing of each folder, and no look at each file."""
    system, folder = file_system(root / below)
    for about in system.ls(folder, detail=True):
        name = about["name"].rstrip("/").removeprefix(folder.rstrip("/")).lstrip("/")
        if not name or name.startswith("."):  # "" is what some programs write for a folder
            continue
        if about["type"] == "directory":
            yield from _find_in_bucket(root, f"{below}{name}/", suffixes)
        elif _is_wanted(name, suffixes):
            yield below + name


def _split(
    root: Path,
    names: list[str],
    held_out: float,
    *,
    field: str | None,
    chat: ChatTemplate | None = None,
) -> Split:
    def documents(files: Files) -> Documents:
        return Documents(lambda: iter(files), files)

    rows = all(name.lower().endswith(ROW_SUFFIXES) for name in names)
    if field is not None and (len(names) == 1 or (rows and 0 < len(names) * held_out < 1)):
        moved = row_to_move(_row_names(root, names), held_out) if rows else None
        one = Files(str(root), tuple(names), field, "train", held_out, chat=chat, moved=moved)
        return Split(documents(one), documents(dataclasses.replace(one, side="held_out")))
    held = {name for name in names if hash_fraction(name) < held_out}
    if held_out and not held:
        held = {min(_not_empty(root, names), key=hash_fraction)}
    if len(held) == len(names) > 1:
        held -= {max(_not_empty(root, names), key=hash_fraction)}
    train = tuple(name for name in names if name not in held)
    kept = tuple(name for name in names if name in held)
    sides = (documents(Files(str(root), side, field, chat=chat)) for side in (train, kept))
    return Split(*sides)


def _row_names(root: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        path = root / name
        read = functools.partial(_records, path, lambda schema: schema.names[:1], None)
        yield from (f"{name}:{number}" for number, *_ in storage.iterating(read, f"'{path}'"))


def _not_empty(root: Path, names: list[str]) -> list[str]:
    """Names of files that hold anything; all, where none does."""
    return [name for name in names if _size_and_time(f"{root}/{name}")[0]] or names


def _size_and_time(path: str) -> tuple[int, float]:
    found = storage.retrying(lambda: look(path), f"'{path}'")
    if found is None:
        raise FileNotFoundError(f"'{path}' is gone: it was there when its folder was listed")
    return found.size, found.changed


def _spans(path: Path, num_bytes: int) -> list[Span]:
    """Cuts a large file into spans; returns none if its format cannot be cut."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _spans_of_row_groups(path, num_bytes)
    spans, start, lines = [], 0, 0
    if name.endswith(".jsonl"):
        with _open_lines(path, 0) as file:
            while block := file.read(num_bytes):
                block += next(_lines(file, path), b"")
                spans.append(Span(start, start + len(block), lines))
                start, lines = start + len(block), lines + block.count(b"\n")
    return spans


def _cut(text: bytes, held_out: float) -> int:
    """Returns where the held-out end of a text begins: after a line, failing that a character."""
    cut = len(text) - int(len(text) * held_out)
    line_end = text.find(b"\n", max(cut - 1, 0)) + 1
    if 0 < line_end < len(text):
        return line_end
    while cut < len(text) and text[cut] & 0xC0 == 0x80:
        cut += 1
    return cut


def _decode(data: bytes, path: Path, *, first_byte: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = first_byte + error.start
        raise ValueError(
            f"'{path}' is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset} "
            f"({error.reason}); convert the file to UTF-8"
        ) from None


def _records(
    path: Path, choose: Callable[[Any], list[str]], span: Span | None
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the rows of a file, each with its number and place; of a file of columns, those that
    `choose` names of its schema."""
    before = span.rows_before if span else 0
    if path.name.lower().endswith(_COLUMN_SUFFIXES):
        batches = _column_batches(path, choose, span)
        for row, record in enumerate(itertools.chain.from_iterable(batches), before):
            yield row, f"'{path}' row {row}", record
        return
    first_byte = span.start if span else 0
    with _open_lines(path, first_byte) as file:
        for number, line in enumerate(_lines(file, path), before + 1):
            text = _decode(line, path, first_byte=first_byte)
            first_byte += len(line)
            text = text.removeprefix("\ufeff") if number == 1 else text  # a mark of its encoding
            if text.strip():
                where = f"'{path}' line {number}"
                yield number, where, _json_record(text, where)
            if span and first_byte >= span.stop:
                return


@contextlib.contextmanager
def _open_lines(path: Path, start: int) -> Iterator[BinaryIO]:
    """Opens a file of lines at a byte, unpacking it; what is damaged is named."""
    with path.open("rb") as file:
        try:
            if path.name.lower().endswith(".gz"):
                file = gzip.GzipFile(fileobj=file)
            elif path.name.lower().endswith(".zst"):
                file = io.BufferedReader(_pyarrow().CompressedInputStream(file, "zstd"))
            else:  # Files in a bucket have no `readline` of a size.
                file = io.BufferedReader(file, _BUFFER_BYTES)
            if start:
                file.seek(start)
            yield file
        except (EOFError, zlib.error, OSError) as error:
            _check_damage(path, error)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yields the lines of a file. A compressed one may hold any number of bytes."""
    while line := file.readline(_LINE_BYTES + 1):
        if len(line) > _LINE_BYTES:
            raise ValueError(
                f"'{path}' has a line of more than {human_bytes(_LINE_BYTES)}: a line is one "
                "record; write each on a line of its own"
            )
        yield line


def _json_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        wrong = error.msg.removesuffix(" at")
        raise ValueError(f"{where} is not JSON ({wrong} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read as JSON") from None
    return record if isinstance(record, dict) else {}


def _text_of(record: dict[str, Any], where: str, field: str) -> bytes:
    if field not in record:
        has = ", ".join(map(repr, record)) or "no fields at all"
        mend = _of_conversations(record) or "name one by `field`"
        raise ValueError(f"{where} has no field '{field}'; it has {has}: {mend}")
    if record[field] is None:
        raise ValueError(
            f"{where} has no '{field}'; {_of_conversations(record) or 'drop such rows'}"
        )
    if not isinstance(record[field], str):
        kind = type(record[field]).__name__
        mend = _of_conversations(record) or "it must be a string"
        raise ValueError(f"{where} has a field '{field}' of type {kind}; {mend}")
    try:
        return record[field].encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where} has half of a surrogate pair in '{field}'; remove it") from None


def _of_conversations(names: Iterable[str]) -> str:
    """Returns advice for rows that are conversations instead of text; empty for other rows."""
    if not forms_of(names):
        return ""
    return (
        "conversations need a template: give --chat-template chatml, as experiments.gpt, "
        "experiments.finetune and jaxtrain tokenize take it"
    )


def _reader_of(kind: Any) -> Callable[[Any], Any] | None:
    """Returns a function that reads a value of an Arrow type as JSON lines would have it; None if
    every value stays as it is.

    JSON is read, and an object loses the None of fields that only other rows of its table have. A
    message of calls alone says nothing, so its `content` is None in truth.
    """
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads
    kind = getattr(kind, "storage_type", kind)
    if _pyarrow().types.is_struct(kind):
        readers = {field.name: _reader_of(field.type) for field in kind}
        return lambda fields: {
            name: _read_by(readers[name], value)
            for name, value in fields.items()
            if value is not None or (name == "content" and "role" in fields)
        }
    if hasattr(kind, "value_field") and (reader := _reader_of(kind.value_type)):
        return lambda items: [_read_by(reader, item) for item in items]
    if hasattr(kind, "item_field") and (reader := _reader_of(kind.item_type)):  # a map
        return lambda entries: [(name, _read_by(reader, item)) for name, item in entries]
    return None


def _read_by(reader: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if value is None or reader is None else reader(value)


def _rows_in(batch: Any) -> list[dict[str, Any]]:
    """Returns the rows of a batch of columns."""
    readers = {field.name: _reader_of(field.type) for field in batch.schema}
    rows = batch.to_pylist()
    for name in filter(readers.get, readers):
        for row in rows:
            row[name] = _read_by(readers[name], row[name])
    return rows


def _column_batches(
    path: Path, choose: Callable[[Any], list[str]], span: Span | None
) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of the columns that `choose` names of a schema."""
    pyarrow = _pyarrow()
    damage = pyarrow.ArrowException, json.JSONDecodeError, RecursionError, OSError
    try:
        with path.open("rb") as data:
            if path.name.lower().endswith(".arrow"):
                with _open_arrow(data) as file:
                    columns = choose(file.schema)
                    count = getattr(file, "num_record_batches", None)  # a stream has no count
                    for batch in file if count is None else map(file.get_batch, range(count)):
                        yield _rows_in(batch.select(columns))
                return
            with pyarrow.parquet.ParquetFile(data) as file:
                columns = choose(file.schema_arrow)
                groups = range(*span[:2]) if span else range(file.num_row_groups)
                for batch in file.iter_batches(
                    batch_size=_PARQUET_BATCH_ROWS, row_groups=groups, columns=columns
                ):
                    yield _rows_in(batch)
    except damage as error:
        _check_damage(path, error)


def _open_arrow(data: BinaryIO) -> Any:
    """Opens either form of Arrow: a stream, as `save_to_disk` writes, or a file (Feather)."""
    ipc, is_file = _pyarrow().ipc, data.read(len(_ARROW_FILE)) == _ARROW_FILE
    data.seek(0)
    return ipc.open_file(data) if is_file else ipc.open_stream(data)


def _spans_of_row_groups(path: Path, num_bytes: int) -> list[Span]:
    pyarrow = _pyarrow()
    try:
        with path.open("rb") as data, pyarrow.parquet.ParquetFile(data) as file:
            groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        _check_damage(path, error)
    spans, start, size, rows, rows_before = [], 0, 0, 0, 0
    for index, group in enumerate(groups, 1):
        size, rows = size + group.total_byte_size, rows + group.num_rows
        if size >= num_bytes or index == len(groups):
            spans.append(Span(start, index, rows_before))
            start, size, rows_before = index, 0, rows
    return spans


def _check_damage(path: Path, error: Exception) -> NoReturn:
    """Raises an error of reading as it is if it is the system's, else as what is wrong with the
    content: that has no errno, and does not name the file."""
    if getattr(error, "errno", None) or storage.passes(error):
        raise error
    reason = str(error).split("\n")[0].rstrip(". ")
    raise ValueError(
        f"'{path}' is cut short or damaged ({reason}); fetch or write it again"
    ) from error


def _columns(path: Path, column: str | None, schema: Any) -> list[str]:
    """Returns the columns to read: one of texts, or with None all that conversations may have."""
    if column is None:
        return [name for name in schema.names if name in FIELDS]
    texts = [each.name for each in schema if _is_text(_pyarrow().types, each.type)]
    if column not in texts:
        kind = f"is of type {schema.field(column).type}" if column in schema.names else "is missing"
        mend = _of_conversations(schema.names) or f"name by `field` one of its text columns {texts}"
        raise ValueError(f"'{path}': column '{column}' {kind}; {mend}")
    return [column]


def _is_text(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
