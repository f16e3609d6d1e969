"""Receipts of a run: lines of ``receipts.jsonl``, each bound to the one before by a hash.

An attempt begins with a ``start``: digests of its state, its record (flags, fingerprints of the
data, versions, mesh) and its files of code. Every save adds a ``save``: digests of the state, and
one of the rows of each step since. The first call behind either adds an ``after``: a checksum of
the state, by which the next attempt sees at once whether it computes the same bits.

A hash finds what was changed in the middle of a chain. A chain that was written anew is found by
repeating a segment (:mod:`jaxtrain.run.verify`), or by its last hash, kept in another place.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxtrain.compile import processor
from jaxtrain.host import distributed, storage
from jaxtrain.host.paths import as_path, json_object, read_if_there
from jaxtrain.run.checkpoints import manifest as manifests
from jaxtrain.run.checkpoints.checkpointer import leaf_digests
from jaxtrain.run.checkpoints.leaves import leaves_by_path, raw_array
from jaxtrain.run.folder import RECEIPTS, write_text
from jaxtrain.run.hook import Hook
from jaxtrain.run.provenance import flatten
from jaxtrain.sharding.stack import Stack, StackedLeaf
from jaxtrain.tree import PyTree

Line = dict[str, Any]
START, SAVE, AFTER = "start", "save", "after"
_STATE = {"step": int, "previous": str, "state": str, "leaves": dict}
_ENTRIES = {
    START: _STATE | {"record": dict, "files": dict},
    SAVE: _STATE | {"rows": list},
    AFTER: {"step": int, "previous": str, "behind": int, "checksum": str},
}
# What the first line follows.
_NOTHING = "0" * 64


class Receipts(Hook):
    """Writes the chain of a run while it trains. All processes call every method alike.

    Args:
      run_dir: the run's folder.
      stack: puts the layers of a state in natural order.
      record: what the run goes on with (:func:`jaxtrain.run.provenance.make_record`).
      note: says a line to the user.
    """

    def __init__(
        self, run_dir: epath.Path, stack: Stack, record: Line, note: Callable[[str], None]
    ):
        self._run_dir, self._stack, self._record, self._note = run_dir, stack, record, note
        self._lines: list[Line] = []
        self._rows: list[dict[str, Any]] = []  # checksums of batches, still on their devices
        self._behind: int | None = None  # the step whose ``after`` is to come
        self._expected: Line | None = None

    def begin(self, step: int, state: PyTree) -> None:
        """Begins an attempt with a state; what was promised behind its step goes, as in the log."""
        stored = functools.partial(read, self._run_dir)
        stored = functools.partial(storage.retrying, stored, f"{self._run_dir / RECEIPTS}")
        holds = lambda line: not _is_sound(line) or line.get("behind", line["step"]) <= step  # noqa: E731
        self._lines = list(itertools.takewhile(holds, distributed.from_first_process(stored)))
        self._add(START, step, self._digests(state) | surroundings(self._record))
        for fault in check(self._lines):
            self._note(f"warning: {RECEIPTS}: {fault}")
        earlier = (line for line in self._lines if line.get("behind") == step)
        self._behind, self._expected = step, next(earlier, None)

    def watched(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Passes batches on, and starts a checksum of each where it lies."""
        for batch in batches:
            self._rows.append(_started(batch))
            yield batch

    def on_step(self, step: int, state: PyTree) -> None:
        if (behind := self._behind) is None:
            return
        self._behind, expected = None, self._expected
        leaves = leaves_by_path(self._stack.in_order(state)).items()
        leaves = {name: x for name, x in leaves if manifests.is_stored(x)}
        raw = {n: x if isinstance(x, StackedLeaf) else raw_array(x) for n, x in leaves.items()}
        checksum = _short(manifests.checksums(raw))
        if expected is None or expected["step"] != step:
            self._add(AFTER, step, {"behind": behind, "checksum": checksum})
        elif expected["checksum"] != checksum:
            starts = [line for line in self._lines if line["kind"] == START]
            changed = "; ".join(differences(*starts[-2:])) or "nothing that a receipt records"
            self._note(
                f"warning: step {step} has other bits than an earlier attempt had from the same "
                f"state of step {behind}, so the run goes on as another; changed since: {changed}"
            )

    def saved(self, step: int, state: PyTree) -> None:
        """Adds the receipt of a save that has begun, unless it has one."""
        if step > max(line["step"] for line in self._lines if line["kind"] != AFTER):
            rows, self._rows = jax.device_get(self._rows), []
            self._add(SAVE, step, self._digests(state) | {"rows": [*map(_row_digest, rows)]})
            self._behind, self._expected = step, None

    def _digests(self, state: PyTree) -> Line:
        leaves = leaf_digests(self._stack.in_order(state))
        return {"state": manifests.digest_of(leaves), "leaves": leaves}

    def _add(self, kind: str, step: int, content: Line) -> None:
        previous = self._lines[-1].get("sha256") if self._lines else _NOTHING
        line = {"kind": kind, "step": step, "previous": previous, **content}
        self._lines.append(manifests.seal(json.loads(json.dumps(line))))
        path, text = self._run_dir / RECEIPTS, "\n".join(map(json.dumps, self._lines)) + "\n"
        storage.retrying(functools.partial(write_text, path, text), f"the receipts in {path}")


@dataclasses.dataclass(frozen=True)
class Segment:
    """The steps between two lines with a state: its number from 1, the lines, and the start of the
    attempt that made it."""

    number: int
    first: Line
    last: Line
    start: Line


def read(run_dir: epath.PathLike) -> list[Line]:
    """Reads the lines of a run's chain; none where there is none."""
    return parse(read_if_there(as_path(run_dir) / RECEIPTS).decode(errors="replace"))


def parse(text: str) -> list[Line]:
    """Returns the lines of a chain's text; one that is not a JSON object is empty."""
    return [json_object(line) for line in text.splitlines()]


def check(lines: Sequence[Line]) -> list[str]:
    """Returns what is wrong with a chain, in sentences; nothing where it is whole."""
    faults, previous, state = [], _NOTHING, None
    for number, line in enumerate(lines, 1):
        content = {name: value for name, value in line.items() if name != "sha256"}
        if manifests.seal(content) != line or not _is_sound(line):
            faults.append(f"line {number} is not what was written")
        elif line["previous"] != previous:
            faults.append(f"line {number} does not follow line {number - 1}: one was left out")
        elif number == 1 and line["kind"] != START:
            faults.append(f"line {number} begins the chain and is no start of an attempt")
        elif state is None or line["kind"] == AFTER:
            pass  # The line before is damaged, or this one has no state.
        elif line["kind"] == SAVE and not 0 < len(line["rows"]) == line["step"] - state["step"]:
            steps, ends = len(line["rows"]), f"{state['step']} to {line['step']}"
            faults.append(f"line {number}: digests of {steps} steps lead from step {ends}")
        elif line["kind"] == START and state["step"] != line["step"]:
            steps = f"{state['step'] + 1} to {line['step']}"
            faults.append(f"line {number}: steps {steps} were made without receipts")
        elif line["kind"] == START and (other := unequal(state, line)):
            told = listed(f"did not begin with the state of step {line['step']}", other)
            faults.append(f"line {number}: the attempt {told}")
        previous = line.get("sha256")
        if "leaves" in line:
            state = line if _is_sound(line) else None
    return faults


def segments(lines: Sequence[Line]) -> list[Segment]:
    """Returns the segments of a sound chain, in order."""
    found, start = [], {}
    for first, last in itertools.pairwise(line for line in lines if "state" in line):
        start = first if first["kind"] == START else start
        if last["kind"] == SAVE:
            found.append(Segment(len(found) + 1, first, last, start))
    return found


def describe(lines: Sequence[Line]) -> str:
    """Says in a sentence what a sound chain holds."""
    return (
        f"The chain of receipts is whole: segments {len(segments(lines))}, attempts "
        f"{sum(line['kind'] == START for line in lines)}, last hash {lines[-1]['sha256']}."
    )


def unequal(one: Line, other: Line) -> list[str]:
    """Returns the paths of the leaves in which two lines with a state differ."""
    a, b = one["leaves"], other["leaves"]
    return [name for name in a | b if a.get(name) != b.get(name)]


def listed(what: str, names: Sequence[str]) -> str:
    """Says of which leaves something holds, naming the first of them."""
    return f"{what}, in {len(names)} leaves: {', '.join(names[:5])}{', ...' * (len(names) > 5)}"


def surroundings(record: Mapping[str, Any]) -> Line:
    """Returns what, beside a state and rows, decides on the bits of a run with a record, as a
    ``start`` has it: the record, the processor, XLA's flags, and files of code.

    Files are the sources of jaxtrain and those in the folder that the experiment's module was
    imported from, as far as they have been imported, by their paths.
    """
    main = sys.modules.get(record.get("module"), sys.modules["__main__"])
    depth = main.__name__.count(".") + hasattr(main, "__path__")
    own = pathlib.Path(getattr(main, "__file__", None) or __file__).absolute()
    roots = [f"{path}{os.sep}" for path in (pathlib.Path(__file__).parents[2], own.parents[depth])]
    files = {}
    for name in {getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]}:
        root = next((root for root in roots if name.startswith(root)), None)
        if root is not None and "site-packages" not in name.removeprefix(root):
            digest = hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest()
            files[name.removeprefix(root)] = digest
    xla_flags = os.environ.get("XLA_FLAGS", "")
    made = {"record": record, "processor": processor(), "xla_flags": xla_flags, "files": files}
    return json.loads(json.dumps(made))


def differences(then: Line, now: Line) -> list[str]:
    """Says what differs between two :func:`surroundings` and may make other bits."""

    def facts(line: Line) -> dict[str, Any]:
        own = {name: line.get(name) for name in ("processor", "xla_flags")}
        own |= flatten(line["record"].get("provenance", {}))
        return own | flatten(line["record"].get("flags", {}))

    (a, b), ignored = map(facts, (then, now)), ("run.", "code.", "best")
    ignored += () if "threads" in a else ("threads",)  # an older receipt does not say
    names = [name for name in a | b if a.get(name) != b.get(name) and not name.startswith(ignored)]
    names = [name for name in names if name in a or name != "optimizer"]  # Older receipts lack it.
    told = [f"{name} was {a.get(name)}, now {b.get(name)}" for name in names]
    files = [n for n, digest in then["files"].items() if now["files"].get(n, digest) != digest]
    return told + [f"the file {name} is another" for name in files]


def with_digests(batches: Iterable[PyTree]) -> Iterator[tuple[PyTree, str]]:
    """Yields batches, each with the digest of its rows that a ``save`` has."""
    for batch in batches:
        yield batch, _row_digest(jax.device_get(_started(batch)))


def _is_sound(line: Line) -> bool:
    types = _ENTRIES.get(str(line.get("kind")))
    if types is None or not all(isinstance(line.get(n), kind) for n, kind in types.items()):
        return False
    return "leaves" not in types or line["state"] == manifests.digest_of(line["leaves"])


def _started(batch: PyTree) -> dict[str, Any]:
    """Checksums of a batch's arrays, which are not waited for where they are on devices."""
    found = {}
    for name, leaf in leaves_by_path(batch).items():
        if isinstance(leaf, jax.Array) and leaf.size:
            found[name] = manifests.on_devices([raw_array(leaf)], None)[0]
        elif not manifests.is_number(leaf) and leaf.size:
            found |= manifests.checksums({name: leaf})
    return found


def _row_digest(checksums: Mapping[str, Any]) -> str:
    return _short({name: int(x) for name, x in checksums.items()})


def _short(content: Mapping[str, Any]) -> str:
    return manifests.digest_of(content)[:16]
