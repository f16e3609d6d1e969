"""The commands ``jaxtrain tokenize``, which makes a token store, and ``jaxtrain data``, which shows
one."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Literal

import numpy as np
import tyro

from jaxtrain.data.chat import ChatTemplate, load_template
from jaxtrain.data.duplicates import OVERLAP, SIMILAR, overlapping, repeated
from jaxtrain.data.loader import spread
from jaxtrain.data.mixtures import open_documents, open_tokenizer
from jaxtrain.data.packing import PairedTokens, pack, waste
from jaxtrain.data.sources import HELD_OUT
from jaxtrain.data.store import DROPPED, TOKENIZER, Store, open_store, source_of
from jaxtrain.data.writing import append_store, write_store
from jaxtrain.host.least import check_least
from jaxtrain.host.memory import human_bytes
from jaxtrain.host.paths import as_path, exists
from jaxtrain.host.simulated import cpus

# Of a set, what is counted to find its most common tokens: about a second's work.
COUNTED_TOKENS = 1 << 24
# Up to how many documents the best fit is found too.
FITTED_DOCUMENTS = 5_000_000
_BLOCK = 1 << 16
_BAR = 40


@dataclasses.dataclass(frozen=True)
class TokenizeOptions:
    """Tokenizes text into a store, which runs then open at once: --data STORE. The same command
    goes on where it was interrupted."""

    data: str
    """Text: "python" (the standard library's source), or a folder or file of text, JSONL (.gz,
    .zst), Parquet, or a saved Hugging Face dataset; local, or in a bucket."""
    out: str
    """The store's folder, on a disk or in a bucket."""
    tokenizer: str = "bytes"
    """"bytes", a tokenizer.json, or the folder of one; a number trains a BPE tokenizer of that many
    tokens first, and unigram:N or wordpiece:N one of those."""
    field: str = "text"
    """Field of a JSONL record, or column, that holds the text; of conversations that may be read in
    several ways, messages, completion or chosen."""
    held_out: float = HELD_OUT
    """Share of the files, or of what is in few files, to hold out."""
    chat_template: str | None = None
    """Chat template for conversations (rows of messages, of prompt and completion, or of chosen and
    rejected): chatml, plain, a Jinja file, a tokenizer_config.json, or the folder of a model. Only
    the assistant's turns are trained on."""
    drop_duplicates: Literal["none", "repeats", "all"] = "none"
    """Leave out what "jaxtrain data --duplicates" counts: repeats, documents that are an earlier
    one again or nearly; all, also those to train on that share 13 words in a row with held-out
    ones."""
    append: bool = False
    """Add the text to the store in --out as a new part, by the store's tokenizer. Runs with
    --grow-every read it from their next watermark on."""
    workers: int | None = None
    """Processes; left out, one per processor."""
    part: str = "1/1"
    """Share of a store, in a bucket or on a disk that all hosts share, that this host makes: 2/4 is
    the second of four, whose commands differ in nothing else; the last one to end completes it."""


def run_tokenize(options: TokenizeOptions, rest: list[str]) -> int:
    """Makes the store, and prints what it holds."""
    del rest
    check_least(options, workers=1)
    share = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", options.part)
    if share is None or (index := int(share[1])) > (count := int(share[2])):
        raise ValueError(f"--part is '{options.part}': give I/N, such as 2/4")
    name = options.chat_template
    chat = None if name is None else load_template(name)
    if options.append:
        if count > 1:
            raise ValueError("--part is for a store that is made anew: leave out --append")
        return _append(options, chat)
    kept = as_path(options.out) / TOKENIZER
    make = functools.partial(open_tokenizer, options.tokenizer, kept=kept if exists(kept) else None)
    text = {"field": options.field, "held_out": options.held_out}
    split, tokenizer, chat = open_documents(options.data, make, chat=chat, **text)
    source = source_of(options.data, options.field, options.held_out, chat)
    store = write_store(
        split,
        tokenizer,
        options.out,
        source=source | {"tokenizer": options.tokenizer},
        workers=options.workers or cpus(),
        share=(index, count),
        drop=None if options.drop_duplicates == "none" else options.drop_duplicates,
    )
    if store is None:
        print(f"{options.out}: part {options.part} is there, and others are missing")
    else:
        print("\n".join(_counts(store)))
    return 0


def _append(options: TokenizeOptions, chat: ChatTemplate | None) -> int:
    if options.tokenizer != "bytes":
        raise ValueError(
            f"--tokenizer is {options.tokenizer}, and --append takes the tokenizer of the store "
            f"in '{options.out}': leave one of them out"
        )
    if options.drop_duplicates != "none":
        raise ValueError(
            f"--drop-duplicates is {options.drop_duplicates}, and text to append is not compared "
            f"with that of '{options.out}': make one store of all the text, or leave it out"
        )
    before = open_store(options.out)
    text = {"field": options.field, "held_out": options.held_out}
    split, _, chat = open_documents(options.data, lambda _: before.tokenizer, chat=chat, **text)
    source = source_of(options.data, options.field, options.held_out, chat)
    workers = options.workers or cpus()
    store = append_store(split, options.out, source=source, workers=workers)
    if len(store.parts) == len(before.parts):
        print(f"'{options.data}' is in '{options.out}' already, unchanged since: nothing is added")
    print("\n".join(_counts(store)))
    return 0


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Shows what a token store holds: counts, lengths, common tokens, samples, and what a run would
    read of it."""

    store: tyro.conf.Positional[str]
    """The store's folder."""
    steps: int | None = None
    """Steps of a run, to say how often it would read the store."""
    global_batch: int = 16
    """Its rows per step."""
    seq_len: int = 1024
    """Its tokens per row."""
    samples: int = 3
    """Number of documents whose beginning is shown."""
    duplicates: bool = False
    """Read all of it for documents that repeat others, and held-out ones that share 13 words in a
    row with those to train on; show nothing else."""
    verify: bool = False
    """Read the whole store and compare every file with its checksum, such as after a copy; show
    nothing else."""


def run_data(options: DataOptions, rest: list[str]) -> int:
    """Prints it."""
    del rest
    check_least(options, global_batch=1, seq_len=1, samples=0, steps=0)
    store = open_store(options.store)
    if options.verify:
        print(f"{store.path}: {human_bytes(store.verify())}, all as it was written")
        return 0
    if options.duplicates:
        print("\n".join(_repeated(store)))
        return 0
    lines = [*_counts(store), "", *_lengths(store), "", *_common(store)]
    print("\n".join([*lines, "", *_samples(store, options.samples), ""]))
    print("\n".join(_epochs(store, options)))  # which may refuse what the lengths above explain
    return 0


def _counts(store: Store) -> list[str]:
    source, about = store.manifest["source"], store.manifest["tokenizer"]
    lines = [
        f"{store.path}: {store.manifest['format']}, order {store.manifest['order_version']}",
        f"  source     {source.get('data', 'documents')}{store.source_state()}",
        f"  tokenizer  {about['vocab_size']:,} tokens ({about['fingerprint'][:16]})",
    ]
    if store.parts:
        lines.append(f"  appended   {len(store.parts)} parts")
    for name, found in store.manifest["sets"].items():
        size = found["bytes"] / max(found["tokens"] - found["documents"], 1)
        pairs = f"{found['documents'] // 2:,} preferences in " if store.pairs else ""
        lines.append(
            f"  {name:<9}  {pairs}{found['documents']:,} documents, {found['tokens']:,} tokens, "
            f"{found['bytes']:,} bytes ({size:.2f} per token), {len(found['shards'])} shards"
        )
        if "counted" in found:
            lines[-1] += f"; {found['counted'] / max(found['tokens'], 1):.1%} of the tokens count"
        if left := found.get(DROPPED):
            lines.append(f"    left out {left['exact']:,} that are an earlier one again")
            lines[-1] += f", {left['near']:,} that nearly are"
            if "overlap" in left:
                lines[-1] += f", {left['overlap']:,} that share {OVERLAP} words with held-out ones"
    return lines


def _repeated(store: Store) -> list[str]:
    lines, sides = [], {name: store.corpus(name) for name in ("train", "held_out")}
    for name, side in sides.items():
        found = repeated(side.documents(store.tokenizer))
        lines.append(
            f"{name}: of {found['documents']:,} documents {found['exact']:,} are an earlier one "
            f"again, and {found['near']:,} more are nearly one (by {SIMILAR:.0%} of their shingles)"
        )
        lines += [f"  document {b} is nearly document {a}" for a, b in found["pairs"]]
    shares = overlapping(*(side.documents(store.tokenizer) for side in sides.values()))
    common = sorted(((share, name) for name, share in shares.items() if share), reverse=True)
    lines.append(
        f"overlap: {len(common):,} of {len(shares):,} held-out documents of {OVERLAP} words or "
        f"more have {OVERLAP} words in a row in common with train"
    )
    told = "  document {1}: {0:.1%} of its stretches"
    return lines + [told.format(*each) for each in common[:10]]


def _lengths(store: Store) -> list[str]:
    found = store.manifest["sets"]["train"]
    lines = [
        f"tokens per document (mean {found['tokens'] / found['documents']:,.1f}, longest "
        f"{found['longest']:,})"
    ]
    most = max(found["lengths"])
    for power, count in enumerate(found["lengths"]):
        bar = "#" * round(_BAR * count / most)
        lines.append(
            f"  {2**power:>12,} to {2 ** (power + 1) - 1:>12,}  {count:>13,}  {bar}".rstrip()
        )
    return lines


def _common(store: Store) -> list[str]:
    """The most common tokens, of blocks spread over the set where that is large."""
    tokens = store.corpus().tokens
    counts = np.zeros(store.tokenizer.vocab_size, np.int64)
    for start in _block_starts(len(tokens)):
        counts += np.bincount(tokens[start : start + _BLOCK], minlength=len(counts))
    of = f"of {counts.sum():,} tokens spread over it" if counts.sum() < len(tokens) else "of all"
    lines = [f"the most common tokens ({of}); {np.count_nonzero(counts):,} different ones occur"]
    for token in np.argsort(-counts, kind="stable")[:10].tolist():
        if counts[token]:
            text = repr(store.tokenizer.decode([token]))
            text = "end of document" if token == store.tokenizer.eod else text
            lines.append(f"  {token:>7}  {counts[token] / counts.sum():>6.2%}  {text}")
    return lines


def _block_starts(length: int) -> Iterator[int]:
    blocks = min(-(-length // _BLOCK), COUNTED_TOKENS // _BLOCK)
    if blocks * _BLOCK >= length:
        yield from range(0, length, _BLOCK)
    else:
        yield from (block * (length - _BLOCK) // (blocks - 1) for block in range(blocks))


def _samples(store: Store, count: int) -> list[str]:
    corpus, lines = store.corpus(), []
    sides = ("chosen", "rejected") if store.pairs else ("document",)
    total = len(corpus.starts) // len(sides)
    for index in spread(range(total), count):
        for side, name in enumerate(sides):
            text = store.tokenizer.decode(corpus.document(index * len(sides) + side)[:80])
            lines.append(f"{name} {index:,}: {text!r}")
    return lines


def _epochs(store: Store, options: DataOptions) -> list[str]:
    corpus, T = store.corpus(), options.seq_len
    few = len(corpus.starts) <= FITTED_DOCUMENTS
    names = ["pairs"] if store.pairs else ["cut", "fit"] if few else ["cut"]
    lines = []
    for name in names:
        rows = pack(corpus, T, name)
        steps, lost = len(rows) / options.global_batch, waste(rows)
        read = "" if options.steps is None else f", read {options.steps / steps:,.2f} times"
        lines.append(
            f"packing {name}: {len(rows):,} rows of {T:,} tokens, {steps:,.1f} steps an epoch{read}"
            f"; {lost['idle']:.2%} of the inputs predict nothing, "
            + (
                f"{rows.left_out:,} preferences are too long and left out"
                if isinstance(rows, PairedTokens)
                else f"{lost['cut']:.2%} of the documents that would fit are cut"
            )
        )
    return lines
