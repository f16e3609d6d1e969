"""Documents to train on: the standard library's own source code, and folders of text files.

A source is anything that can be iterated over more than once and yields `Document`. The two made
here come as a `Split`: what to train on, and about one document in twenty to measure on, chosen by
a hash of its name so that the choice survives new files, other machines and other orders.
"""

import dataclasses
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from jaxtrain.host import storage

HELD_OUT = 0.05
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".css", ".toml", ".yaml", ".yml"),
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".hs", ".java", ".jl", ".js", ".kt"),
    *(".lua", ".ml", ".php", ".pl", ".py", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift"),
    ".ts",
)
ROW_SUFFIXES = (".jsonl", ".parquet")
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_PARQUET_BATCH_ROWS = 1024


class Document(NamedTuple):
    """One text: its name within the source, and its bytes (UTF-8 unless the source says else)."""

    name: str
    text: bytes


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents read anew, one at a time, at every iteration.

    Args:
      read: returns a fresh iterator over the documents, always the same ones in the same order.

    >>> [document.name for document in Documents(lambda: iter([Document("a", b"x")]))]
    ['a']
    """

    read: Callable[[], Iterator[Document]]

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


def python_stdlib() -> Split:
    """Returns the source code of the running Python's standard library: about 30 MB on most builds.

    Every ``.py`` file below ``sysconfig.get_paths()["stdlib"]``, without installed packages, in the
    order of their relative paths; a file is held out when `hash_fraction` of its relative path is
    below 0.05. Files are read as bytes: a few test files are, on purpose, not UTF-8. Distributions
    that ship the library without its tests have about a third of the text.

    >>> train, held_out = python_stdlib()
    >>> 'abc.py' in {document.name for document in train}
    True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return _split_files(root, _find(root, (".py",), skip=_NOT_STDLIB), HELD_OUT, _read_bytes)


def text_folder(
    path: str | os.PathLike[str],
    *,
    field: str = "text",
    held_out: float = HELD_OUT,
    suffixes: Iterable[str] = TEXT_SUFFIXES,
) -> Split:
    """Returns the documents below a folder, or of one file: text, JSON lines and Parquet.

    A text file is one document; a line of a ``.jsonl`` file and a row of a ``.parquet`` file is one
    document each, read as it is asked for (Parquet by row group, only the one column). Hidden files
    and folders are passed over. Order: by relative path, then by line or row.

    With several files, a file is held out when `hash_fraction` of its relative path is below
    `held_out`; should that leave one side empty, the file with the lowest (or highest) hash goes
    there, so that neither is. With a single ``.jsonl`` or ``.parquet`` file the hash is of the path
    and the row. A single text file is cut in two at a line end: its last part is held out.

    Args:
      path: a folder, searched to any depth, or one file; local, or in a bucket (``gs://...``).
      field: the field of JSON lines and the column of Parquet files that holds the text.
      held_out: the share to hold out, at least 0 and below 1.
      suffixes: the endings of text files, with their dot.

    Raises:
      FileNotFoundError: if the folder is missing or holds no file that could be read.
      ValueError: on reading text that is not UTF-8 (names file and byte), a line or row without
        the field, or a damaged file.
      ImportError: if there are Parquet files and pyarrow is not installed.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a.txt", "b.txt", "c.md"):
    ...     _ = (folder / name).write_text(name)
    >>> train, held_out = text_folder(folder)
    >>> len(list(train)), len(list(held_out))
    (2, 1)
    """
    root = epath.Path(path)
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is {held_out}; give a share of at least 0 and below 1")
    if not root.exists():
        raise FileNotFoundError(f"text folder '{root}' does not exist; give a folder or a file")
    wanted = (*suffixes, *ROW_SUFFIXES)
    if not all(suffix.startswith(".") and len(suffix) > 1 for suffix in wanted):
        raise ValueError(f"suffixes is {suffixes!r}; give several endings with dots, as ('.txt',)")
    if root.is_file():
        root, names = root.parent, [root.name]
        if not names[0].lower().endswith(wanted):
            names = []
    else:
        names = _find(root, wanted, skip=set())
    if not names:
        raise FileNotFoundError(
            f"'{path}' holds no file ending in {', '.join(wanted)}; pass suffixes=... for others"
        )
    if any(name.lower().endswith(".parquet") for name in names):
        _import_parquet()

    def read(root: Path, name: str) -> Iterator[Document]:
        return _read_any(root, name, field)

    if len(names) > 1:
        return _split_files(root, names, held_out, read)
    if names[0].lower().endswith(ROW_SUFFIXES):
        return _split_rows(root, names[0], held_out, read)
    return _split_text(root, names[0], held_out)


def _find(root: Path, suffixes: tuple[str, ...], *, skip: set[str]) -> list[str]:
    """Lists the files below `root` with these endings: relative POSIX paths, sorted."""
    what = f"the listing of '{root}'"
    if "://" in str(root):
        return storage.retrying(lambda: sorted(_find_in_bucket(root, root, suffixes)), what)
    return storage.retrying(lambda: sorted(_find_on_disk(root, suffixes, skip)), what)


def _find_on_disk(root: Path, suffixes: tuple[str, ...], skip: set[str]) -> Iterator[str]:
    for folder, folders, files in os.walk(root, onerror=_unless_forbidden):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in files:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                yield Path(folder, name).relative_to(root).as_posix()


def _unless_forbidden(error: OSError) -> None:
    """A folder that cannot be listed is passed over for good, or fails: never only now and then."""
    if storage.passes(error):
        raise error


def _find_in_bucket(
    root: epath.Path, folder: epath.Path, suffixes: tuple[str, ...]
) -> Iterator[str]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.name.lower().endswith(suffixes) and path.is_file():
            yield path.relative_to(root).as_posix()
        elif path.is_dir():
            yield from _find_in_bucket(root, path, suffixes)


Reader = Callable[[Path, str], Iterator[Document]]


def _reading(read: Reader, root: Path, name: str) -> Iterator[Document]:
    """The documents of a file, through failures of storage that pass."""
    return storage.iterating(lambda: read(root, name), f"'{root / name}'")


def _split_files(root: Path, names: list[str], held_out: float, read: Reader) -> Split:
    held = {name for name in names if hash_fraction(name) < held_out}
    if held_out and not held:
        held = {min(names, key=hash_fraction)}
    if len(held) == len(names) > 1:
        held -= {max(names, key=hash_fraction)}

    def documents(chosen: list[str]) -> Documents:
        return Documents(lambda: (each for name in chosen for each in _reading(read, root, name)))

    return Split(
        documents([name for name in names if name not in held]),
        documents([name for name in names if name in held]),
    )


def _split_rows(root: Path, name: str, held_out: float, read: Reader) -> Split:
    def documents(held: bool) -> Documents:
        return Documents(
            lambda: (
                document
                for document in _reading(read, root, name)
                if (hash_fraction(document.name) < held_out) == held
            )
        )

    return Split(documents(False), documents(True))


def _split_text(root: Path, name: str, held_out: float) -> Split:
    def part(held: bool) -> Iterator[Document]:
        for whole in _reading(_read_text, root, name):
            cut = _cut(whole.text, held_out)
            text = whole.text[cut:] if held else whole.text[:cut]
            if text:
                yield Document(name, text)

    return Split(Documents(lambda: part(False)), Documents(lambda: part(True)))


def _cut(text: bytes, held_out: float) -> int:
    """Returns where the held-out end of a text begins: after a line, failing that a character."""
    cut = len(text) - int(len(text) * held_out)
    line_end = text.find(b"\n", max(cut - 1, 0)) + 1
    if 0 < line_end < len(text):
        return line_end
    while cut < len(text) and text[cut] & 0xC0 == 0x80:
        cut += 1
    return cut


def _read_any(root: Path, name: str, field: str) -> Iterator[Document]:
    if name.lower().endswith(".jsonl"):
        return _read_jsonl(root, name, field)
    if name.lower().endswith(".parquet"):
        return _read_parquet(root, name, field)
    return _read_text(root, name)


def _read_bytes(root: Path, name: str) -> Iterator[Document]:
    yield Document(name, (root / name).read_bytes())


def _read_text(root: Path, name: str) -> Iterator[Document]:
    text = (root / name).read_bytes()
    _decode(text, root / name, first_byte=0)
    yield Document(name, text)


def _decode(data: bytes, path: Path, *, first_byte: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = first_byte + error.start
        raise ValueError(
            f"'{path}' is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset} "
            f"({error.reason}); convert the file to UTF-8"
        ) from None


def _read_jsonl(root: Path, name: str, field: str) -> Iterator[Document]:
    path, first_byte = root / name, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = _decode(line, path, first_byte=first_byte)
            first_byte += len(line)
            if text.strip():
                yield Document(
                    f"{name}:{number}", _json_field(text, f"'{path}' line {number}", field)
                )


def _json_field(line: str, where: str, field: str) -> bytes:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be read as JSON") from None
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields at all"
        raise ValueError(f"{where} has no field '{field}'; it has {has}: pass field=...")
    if not isinstance(record[field], str):
        kind = type(record[field]).__name__
        raise ValueError(f"{where} has a field '{field}' of type {kind}; it must be a string")
    try:
        return record[field].encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{where} has a field '{field}' with half of a surrogate pair; remove it"
        ) from None


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError("reading Parquet files needs pyarrow: pip install -e '.[text]'") from None
    return pyarrow.parquet


def _read_parquet(root: Path, name: str, field: str) -> Iterator[Document]:
    row = 0
    for texts in _parquet_batches(root / name, field):
        for text in texts:
            if text is None:
                raise ValueError(f"'{root / name}' row {row} has no '{field}'; drop such rows")
            yield Document(f"{name}:{row}", text.encode("utf-8"))
            row += 1


def _parquet_batches(path: Path, column: str) -> Iterator[list[str | None]]:
    parquet = _import_parquet()
    import pyarrow

    try:
        with path.open("rb") as bytes_of, parquet.ParquetFile(bytes_of) as file:
            _check_column(file.schema_arrow, path, column)
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[column]):
                yield batch.column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        # What pyarrow finds wrong with the content has no errno, and does not name the file.
        if getattr(error, "errno", None) or storage.passes(error):
            raise
        reason = str(error).split("\n")[0].rstrip(". ")
        raise ValueError(
            f"'{path}' is cut short or damaged ({reason}); fetch or write it again"
        ) from error


def _check_column(schema: Any, path: Path, column: str) -> None:
    import pyarrow

    texts = [each.name for each in schema if _is_text(pyarrow.types, each.type)]
    if column not in texts:
        kind = f"is of type {schema.field(column).type}" if column in schema.names else "is missing"
        raise ValueError(
            f"'{path}': column '{column}' {kind}; pass field=... one of its text columns {texts}"
        )


def _is_text(types: Any, kind: Any) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
