"""The sources that ``--data`` names: text, a token store, or a mixture in stated shares.

A mixture's shares are exact over every window of a stated number of rows, and a batch remains a
function of (seed, step): row n of a run is found from n by two divisions and two tables.
"""

import bisect
import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from jaxtrain.data import sources
from jaxtrain.data.chat import ChatTemplate, forms_of, load_template
from jaxtrain.data.loader import RowSource, part_of, shuffled
from jaxtrain.data.packing import Corpus, FittedTokens, PackedTokens, PairedTokens, pack
from jaxtrain.data.store import Store, count_parts, is_store, open_store, source_of
from jaxtrain.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer, trained_kind
from jaxtrain.data.writing import cached_store
from jaxtrain.host import distributed

# Merges are learned from the first texts of so many bytes: more would hardly change them.
TRAIN_BYTES = 10_000_000_000
_WINDOW_LIMIT = 1_000_000
_MIXTURE = re.compile(r"^[\w.-]+=")
_SOURCE = re.compile(r"([A-Za-z_][\w.-]*)=([0-9.]+(?:/[0-9]+)?)(?::(.+))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """The value of ``--data``, read.

    Attributes:
      paths: of the sources by name; of the only one, whose name is empty.
      phases: from which step on each source has which share of the rows; the first is 0.
    """

    paths: Mapping[str, str]
    phases: tuple[tuple[int, Mapping[str, Fraction]], ...] = ((0, {"": Fraction(1)}),)

    def described(self) -> dict[int, str]:
        """The shares by the step from which they hold."""
        return {
            step: ", ".join(f"{name} {share}" for name, share in shares.items())
            for step, shares in self.phases
        }


def parse_data(text: str) -> DataSpec:
    """Reads the value of ``--data``.

    Raises:
      ValueError: shares that do not sum to 1, a source without a place, steps out of order.

    >>> spec = parse_data("code=0.7:a,docs=0.3:b;1000:code=0.5,docs=0.25,math=0.25:c")
    >>> spec.paths
    {'code': 'a', 'docs': 'b', 'math': 'c'}
    >>> spec.described()
    {0: 'code 7/10, docs 3/10', 1000: 'code 1/2, docs 1/4, math 1/4'}
    >>> parse_data("texts/").paths
    {'': 'texts/'}
    """
    if not _MIXTURE.match(text):
        return DataSpec({"": text})
    paths, phases = {}, []
    for number, phase in enumerate(text.split(";")):
        begin, found, rest = phase.strip().partition(":") if number else ("0", ":", phase)
        if not begin.isdigit() or not found or (phases and int(begin) <= phases[-1][0]):
            raise ValueError(
                f"`data` has the phase {phase.strip()!r}: after a semicolon comes the step from "
                "which on it holds, more than the one before, as in ';1000:code=0.5,docs=0.5'"
            )
        shares = {}
        for each in rest.split(","):
            match = _SOURCE.fullmatch(each.strip())
            if match is None or (name := match[1]) in shares:
                raise ValueError(
                    f"`data` has the source {each.strip()!r}: write each once as NAME=SHARE:STORE, "
                    "and in later phases NAME=SHARE"
                )
            try:
                shares[name] = Fraction(match[2])
            except (ValueError, ZeroDivisionError):
                raise ValueError(f"`data`: the share {match[2]!r} is not a number") from None
            if paths.setdefault(name, match[3]) is None or match[3] not in (None, paths[name]):
                raise ValueError(
                    f"`data` gives source {name!r} no place or two: say once where it lies, as in "
                    f"{name}={match[2]}:STORE"
                )
        if sum(shares.values()) != 1:
            total = float(sum(shares.values()))
            raise ValueError(f"the shares in `data` sum to {total:g} from step {begin}, not to 1")
        phases.append((int(begin), shares))
    return DataSpec(paths, tuple(phases))


class Mixture:
    """Rows of several sources in stated shares, for `Batches`: a RowSource with its own order.

    From the step on at which a phase begins, the sources follow each other in a fixed pattern of W
    rows, evenly spread, over and over: any W rows in succession have exactly the shares. W is the
    least common denominator. Each source is read in epochs of its own, in an order by the seed and
    its name. So what comes before a new phase stays as it was, whatever sources it adds.

    Attributes:
      windows: W of each phase.

    >>> rows = {"a": [{"x": 1}] * 5, "b": [{"x": 2}] * 5}
    >>> mixture = Mixture(rows, [(0, {"a": Fraction(3, 4), "b": Fraction(1, 4)})])
    >>> place = mixture.row_order(seed=0, global_batch=4)
    >>> [mixture[place(n)]["x"] for n in range(8)]
    [1, 1, 2, 1, 1, 1, 2, 1]
    """

    def __init__(
        self, rows: Mapping[str, RowSource], phases: Iterable[tuple[int, Mapping[str, Fraction]]]
    ):
        self.rows = dict(rows)
        self._sources = list(self.rows.values())
        self._offsets = np.cumsum([0, *map(len, self._sources)]).tolist()
        self._steps, shares = zip(*phases, strict=True)
        self._patterns = [_Pattern(list(self.rows), each) for each in shares]
        self.windows = [len(pattern.source) for pattern in self._patterns]

    def __len__(self) -> int:
        return self._offsets[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows, index = self._found(index)
        return rows[index]

    def part(self, index: int, start: int, stop: int) -> dict[str, Any]:
        """Returns the places from ``start`` to ``stop`` of a row; sources with a ``part`` read no
        others."""
        return part_of(*self._found(index), start, stop)

    def _found(self, index: int) -> tuple[RowSource, int]:
        source = bisect.bisect_right(self._offsets, index) - 1
        return self._sources[source], index - self._offsets[source]

    def row_order(self, *, seed: int, global_batch: int) -> Callable[[int], int]:
        """Returns what finds the row at a position of the run, ``step * global_batch + r``."""
        lengths = [len(rows) for rows in self._sources]
        seeds = [
            int(np.random.SeedSequence((seed, *name.encode())).generate_state(1)[0])
            for name in self.rows
        ]
        firsts, befores = self._phases(global_batch)

        def place(position: int) -> int:
            phase = bisect.bisect_right(firsts, position) - 1
            source, rank = self._patterns[phase].locate(position - firsts[phase])
            rank += befores[phase][source]
            return self._offsets[source] + shuffled(rank, lengths[source], seeds[source])

        return place

    def epochs(self, step: int, global_batch: int) -> dict[str, float]:
        """Returns how often each source was read before a step."""
        firsts, befores = self._phases(global_batch)
        phase = bisect.bisect_right(firsts, step * global_batch) - 1
        taken = self._patterns[phase].count(step * global_batch - firsts[phase])
        return {
            name: (before + more) / len(rows)
            for (name, rows), before, more in zip(
                self.rows.items(), befores[phase], taken, strict=True
            )
        }

    def _phases(self, global_batch: int) -> tuple[list[int], list[list[int]]]:
        """Returns where each phase begins, and the rows of each source before it."""
        firsts = [step * global_batch for step in self._steps]
        befores = [[0] * len(self._sources)]
        for phase, length in enumerate(np.diff(firsts).tolist()):
            more = self._patterns[phase].count(length)
            befores.append([sum(both) for both in zip(befores[-1], more, strict=True)])
        return firsts, befores


class _Pattern:
    """Which source each of W rows is of: of n rows the k-th stands near (k + 1/2) / n of them."""

    def __init__(self, names: list[str], shares: Mapping[str, Fraction]):
        window = math.lcm(*(share.denominator for share in shares.values()))
        if window > _WINDOW_LIMIT:
            raise ValueError(
                f"the shares in `data` are exact only over {window:,} rows: give fewer decimals"
            )
        self._counts = [int(shares.get(name, 0) * window) for name in names]
        source = np.repeat(np.arange(len(names)), self._counts)
        rank = np.concatenate([np.arange(count) for count in self._counts])
        order = np.lexsort((source, (rank + 0.5) / np.array(self._counts)[source]))
        self.source, self._rank = source[order], rank[order]

    def locate(self, position: int) -> tuple[int, int]:
        """Returns the source at a position, and how many rows of it come before."""
        windows, place = divmod(position, len(self.source))
        source = int(self.source[place])
        return source, windows * self._counts[source] + int(self._rank[place])

    def count(self, rows: int) -> list[int]:
        """Returns how many of the first rows are of each source."""
        windows, place = divmod(rows, len(self.source))
        rest = np.bincount(self.source[:place], minlength=len(self._counts)).tolist()
        return [windows * n + more for n, more in zip(self._counts, rest, strict=True)]


@dataclasses.dataclass(frozen=True)
class TextData:
    """The opened sources that ``--data`` names, with their tokenizer.

    Attributes:
      spec: the parsed ``--data``.
      tokenizer: the tokenizer of all sources.
      found: the stores and the texts by name; a single source has an empty name.
      field: name of the field of a row that holds its text.
    """

    spec: DataSpec
    tokenizer: Tokenizer
    found: Mapping[str, Store | sources.Split]
    field: str

    @functools.cached_property
    def stores(self) -> dict[str, Store]:
        """The stores by name; those of texts are made when this is first asked for."""
        stores = {}
        for name, found in self.found.items():
            if not isinstance(found, Store):
                chat = found.train.files and found.train.files.chat
                source = source_of(self.spec.paths[name], self.field, chat=chat)
                found = cached_store(found, self.tokenizer, source=source)
            stores[name] = found
        return stores

    @property
    def has_conversations(self) -> bool:
        """Whether any of the sources are rows of conversations, which a template is to render."""
        texts = (found for found in self.found.values() if not isinstance(found, Store))
        return any(each.train.files and each.train.files.chat for each in texts)

    @property
    def chat_template(self) -> str | None:
        """The chat template that made the conversations among the stores; None without any."""
        sources = [each.manifest["source"] for each in self.stores.values()]
        return next((each["chat"]["text"] for each in sources if "chat" in each), None)

    def rows(
        self, seq_len: int, packing: str = "cut"
    ) -> PackedTokens | FittedTokens | PairedTokens | Mixture:
        """Returns the rows to train on, for `Batches`; `packing` is as for `pack`."""
        rows = {name: pack(store.corpus(), seq_len, packing) for name, store in self.stores.items()}
        return rows[""] if "" in rows else Mixture(rows, self.spec.phases)

    def held_out(self, num_bytes: int) -> dict[str, Corpus]:
        """Returns held-out documents of so many bytes, of each store."""
        return {name: store.held_out(num_bytes) for name, store in self.stores.items()}


def open_data(
    text: str,
    *,
    field: str = "text",
    tokenizer: str = "bytes",
    kept: os.PathLike[str] | None = None,
    chat: str | None = None,
    parts: int | None = None,
) -> TextData:
    """Opens what ``--data`` names; text that is no store becomes one under the cache when used.

    Args:
      text: "python", "sums", a folder or file of text, a token store, or a mixture of those: see
        `parse_data`.
      field: of rows, that holds the text.
      tokenizer: "bytes", a ``tokenizer.json``, or a number: a BPE tokenizer of that many tokens is
        trained on the text of all sources ("unigram:N" and "wordpiece:N": one of those). Stores
        have their own.
      kept: a tokenizer that was trained before, to take instead where there is that file.
      chat: the template of rows that are conversations, as for `load_template`; None for none.
      parts: the number of appended parts of each store that are visible; None for all that the
        first process sees.

    Raises:
      ValueError: stores of different tokenizers, preferences beside something else, and what the
        stores and the text raise.
    """
    spec = parse_data(text)
    holds_pairs(spec, field)
    encoder = tokenizer_of_stores(spec, tokenizer)
    templates = {
        path: load_template(chat) if chat and conversations_in(path, field) else None
        for path in spec.paths.values()
        if not is_store(path)
    }
    if encoder is None and len(templates) > 1 and trained_kind(tokenizer):
        splits = [sources.open_text(path, field=field, chat=x) for path, x in templates.items()]

        def in_turn() -> Iterator[sources.Document]:
            rounds = itertools.zip_longest(*(split.train for split in splits))
            return filter(None, itertools.chain.from_iterable(rounds))

        texts = sources.Documents(in_turn)
        encoder = open_tokenizer(tokenizer, sources.Split(texts, texts), kept=kept)
    found: dict[str, Store | sources.Split] = {}
    for name, path in spec.paths.items():
        if is_store(path):
            count = functools.partial(count_parts, path)
            visible = distributed.from_first_process(count) if parts is None else parts
            found[name] = open_store(path, parts=visible)
        else:
            make = functools.partial(open_tokenizer, tokenizer, kept=kept)
            if encoder is not None:
                make = lambda split, found=encoder: found  # noqa: E731
            found[name], encoder, _ = open_documents(path, make, field=field, chat=templates[path])
    return TextData(spec, encoder, found, field)


def open_documents(
    path: str,
    make_tokenizer: Callable[[sources.Split], Tokenizer],
    *,
    chat: ChatTemplate | None = None,
    **options: Any,
) -> tuple[sources.Split, Tokenizer, ChatTemplate | None]:
    """Opens text or conversations, and the tokenizer of them; returns the template, too, with the
    special tokens that it may use. Options are those of `jaxtrain.data.open_text`."""
    split = sources.open_text(path, chat=chat, **options)
    tokenizer = make_tokenizer(split)
    if chat is not None:
        chat = dataclasses.replace(chat, special=tokenizer.special_pattern)
        split = sources.open_text(path, chat=chat, **options)
    return split, tokenizer, chat


def conversations_in(path: str, field: str = "text") -> str | None:
    """Returns the form of conversation that the rows of a file or folder have, a name of
    `jaxtrain.data.chat.FORMS`; None where they have the field of a text, or are none."""
    names = sources.fields_of(path)
    forms = [form for form in forms_of(names) if field == form or field not in names]
    return field if field in forms else next(iter(forms), None)


def tokenizer_of_stores(spec: DataSpec, given: str = "bytes") -> Tokenizer | None:
    """Returns the tokenizer of the stores among the sources; None where there are none.

    Raises:
      ValueError: they have different ones, or another is given.
    """
    found: Tokenizer | None = None
    for path in filter(is_store, spec.paths.values()):
        own = open_store(path).tokenizer
        if found is not None and own.fingerprint != found.fingerprint:
            raise ValueError(
                f"the token store '{path}' was made with another tokenizer than "
                f"'{next(filter(is_store, spec.paths.values()))}': make both with one"
            )
        found = own
    if found is None or given == "bytes":  # which is what is said where nothing is
        return found
    if trained_kind(given) or _load_ending(given, found).fingerprint != found.fingerprint:
        raise ValueError(
            f"the token stores were made with another tokenizer than '{given}': leave `tokenizer` "
            "out, or give theirs where a run begins with a model"
        )
    return found


def holds_pairs(spec: DataSpec, field: str = "text") -> bool:
    """Whether the sources hold preferences, in a store or in rows of conversations.

    Raises:
      ValueError: some do and some do not.
    """
    pairs = {
        path: open_store(path).pairs
        if is_store(path)
        else conversations_in(path, field) in ("chosen", "label")
        for path in spec.paths.values()
    }
    if len(set(pairs.values())) > 1:
        has, has_not = (
            next(path for path in pairs if pairs[path] is each) for each in (True, False)
        )
        raise ValueError(f"'{has}' holds preferences and '{has_not}' does not: give one kind")
    return any(pairs.values())


def holds_labels(spec: DataSpec, field: str = "text") -> bool:
    """Whether the sources hold answers with labels, without pairs."""
    return any(
        open_store(path).corpus().unpaired
        if is_store(path)
        else conversations_in(path, field) == "label"
        for path in spec.paths.values()
    )


def open_tokenizer(
    name: str, split: sources.Split | None = None, *, kept: os.PathLike[str] | None = None
) -> Tokenizer:
    """Makes, loads or trains (on the split) a tokenizer; arguments as for `open_data`."""
    if name == "bytes":
        return ByteTokenizer()
    begun = None if kept is None else SubwordTokenizer.load(kept)
    if (trained := trained_kind(name)) is None:
        return _load_ending(name, begun)
    if begun is not None:
        return begun
    kind, size = trained
    return SubwordTokenizer.train(first_texts(split.train, TRAIN_BYTES), size, kind=kind)


def _load_ending(name: str, begun: Tokenizer | None) -> SubwordTokenizer:
    """Loads a tokenizer with the end of documents that a run or a store began with, because its
    files may since name another, or name one at all."""
    tokenizer = SubwordTokenizer.load(name)
    end = getattr(begun, "eod_token", None)
    if end in tokenizer.vocabulary and end != tokenizer.eod_token:
        return SubwordTokenizer.load(name, eod=end)
    return tokenizer


def first_texts(documents: Iterable[sources.Document], limit: int) -> Iterator[bytes]:
    """The texts of the first documents, until they have ``limit`` bytes together."""
    for document in documents:
        if limit <= 0:
            return
        limit -= len(document.text)
        yield document.text
