"""``jaxtrain compose``: the composition table, run, printed, and written as Markdown and a page."""

import dataclasses
import html
import json
import os
import pathlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import tyro

import jaxtrain
from jaxtrain.compare import compose, parity
from jaxtrain.compare.capabilities import Capability, Together, capabilities, together
from jaxtrain.compare.compose import Cell
from jaxtrain.host.paths import check_on_disk, json_object, read_if_there
from jaxtrain.run.main import simulate_devices
from jaxtrain.run.provenance import commit

RESULTS, PAGE, TABLE = "compose.json", "compose.html", "compose.md"


@dataclasses.dataclass(frozen=True)
class ComposeOptions:
    """Runs every pair of capabilities on 8 simulated devices, and says which pairs are equal to one
    device, which are refused, and which are faults.

    The exit status is 1 where there is a fault.
    """

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A capability, such as lamb: pairs without it are left out. Given twice or more, the pairs of
    these alone."""
    part: str = "0/1"
    """I/N: part I of N of the pairs, from 0; parts are of about equal size."""
    triples: int = 0
    """Number of triples to draw at random and run too."""
    seed: int = 0
    """Seed of the triples."""
    out: pathlib.Path | None = None
    """Folder of the results: compose.json, to which later runs add, compose.md with the table, and
    compose.html with every cell and its command."""
    list: bool = False
    """Print the capabilities, and run nothing."""


def run_compose(options: ComposeOptions, rest: list[str]) -> int:
    """Prints faults as they are found, then the table; 1 where there is a fault."""
    del rest
    if options.out is not None:
        check_on_disk(options.out, "--out")
    all_of = capabilities()
    if options.list:
        for each in all_of:
            how = " ".join((*each.flags, *([f"--layout {each.layout}"] if each.layout else [])))
            print(f"{each.group:12} {each.name:28} {how or each.module or ''}")
        return 0
    cells = _chosen(options, all_of)
    # What is compiled beside the steps (the state that they begin with) takes as long as these.
    quick = parity.COMPILER_OPTIONS | {"xla_cpu_collective_call_terminate_timeout_seconds": 600}
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in quick.items())
    if jax.__version_info__ < (0, 11):  # XLA ends a process for a flag that it does not know
        os.environ.setdefault("XLA_FLAGS", flags)
    simulate_devices(parity.DEVICES)
    found = []
    for cell in _shown(compose.compose(cells), len(cells)):
        found.append(cell)
        if options.out is not None and len(found) % 20 == 0:
            write(options.out, found, all_of)
    kept = added({}, found) if options.out is None else write(options.out, found, all_of)
    print("\n".join(markdown(kept, all_of)))
    return int(any(cell.outcome == "fault" for cell in found))


def _chosen(options: ComposeOptions, all_of: Sequence[Capability]) -> list[Together]:
    names = {each.name for each in all_of}
    for name in options.only:
        if name not in names:
            raise ValueError(f"--only is {name!r}, which is no capability: see --list")
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--part is {options.part!r}: give I/N, with I from 0 and below N")
    cells, only = compose.pairs(all_of), set(options.only)
    if len(only) == 1:
        cells = [cell for cell in cells if only & set(cell.names)]
    elif only:
        cells = [cell for cell in cells if only >= set(cell.names)]
    drawn, rng = [], random.Random(options.seed)
    while len(drawn) < options.triples:
        cell = together(rng.sample(all_of, 3))
        if cell is not None and not any(each.needs for each in cell.chosen):
            drawn.append(cell)
    return compose.part_of([*cells, *drawn], int(part), int(parts))


def _shown(cells: Iterable[Cell], count: int) -> Iterator[Cell]:
    """Passes cells on, with what is not equal on standard error, and how far the table is."""
    start, outcomes = time.monotonic(), []
    for number, cell in enumerate(cells, 1):
        outcomes.append(cell.outcome)
        if cell.outcome == "fault":
            print(f"FAULT {' x '.join(cell.names)}: {cell.text}", file=sys.stderr)
            print(f"  {cell.command}", file=sys.stderr, flush=True)
        if number % 20 == 0 or number == count:
            far = f"{number} of {count} ({time.monotonic() - start:.0f} s)"
            print(f"{far}: {_counted(outcomes)}", file=sys.stderr, flush=True)
        yield cell


def write(
    folder: pathlib.Path, found: Sequence[Cell], all_of: Sequence[Capability]
) -> dict[str, dict[str, Any]]:
    """Adds cells to the results in a folder, and writes its table and page anew.

    Returns:
      All results there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    kept = added(json_object(read_if_there(path)), found)
    path.write_text(json.dumps(kept, indent=0))
    (folder / TABLE).write_text("\n".join(markdown(kept, all_of)) + "\n")
    (folder / PAGE).write_text(page(kept, all_of))
    return kept


def added(kept: Mapping[str, Any], found: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Adds cells to results by name."""
    at = {"when": time.strftime("%Y-%m-%d"), "commit": commit(__file__) or jaxtrain.__version__}
    return dict(kept) | {" x ".join(x.names): dataclasses.asdict(x) | at for x in found}


def markdown(kept: Mapping[str, Any], all_of: Sequence[Capability]) -> list[str]:
    """The table in lines of Markdown: each capability, how many others it works with, and the
    exceptions."""
    pairs = [each for each in kept.values() if len(each["names"]) == 2]
    lines = ["| capability | equal | refused | fault | needs | refused or faulty with |"]
    lines += ["|---|---|---|---|---|---|"]
    for capability in all_of:
        name = capability.name
        own = [each for each in pairs if name in each["names"]]
        if not own:
            continue
        count = Counter(each["outcome"] for each in own)
        apart = [each["names"] for each in own if each["outcome"] in ("refused", "fault")]
        others = sorted(other for names in apart for other in names if other != name)
        counts = " | ".join(str(count[kind]) for kind in ("equal", "refused", "fault"))
        lines.append(f"| {name} | {counts} | {capability.needs or ''} | {', '.join(others)} |")
    said = _counted(each["outcome"] for each in kept.values())
    return [*lines, "", f"{len(kept)} cells: {said}."]


def _counted(outcomes: Iterable[str]) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(Counter(outcomes).items()))


_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; }
th { font-weight: normal; text-align: right; padding: 0 .5em 0 0; white-space: nowrap; }
thead th { height: 11em; vertical-align: bottom; padding: 0; }
thead th span { writing-mode: vertical-rl; transform: rotate(180deg); }
td { width: 12px; height: 12px; border: 1px solid #fff; padding: 0; background: #eee; }
td.equal { background: #7fb58a; } td.refused { background: #e3c878; }
td.fault { background: #c0392b; } td.needs { background: #b8c4d6; } td.none { background: #fff; }
"""


def page(kept: Mapping[str, Any], all_of: Sequence[Capability]) -> str:
    """The table as one picture in HTML; a cell says, under the pointer, what came of it and by
    which command."""
    found = {frozenset(each["names"]): each for each in kept.values()}

    def cell(row: Capability, column: Capability) -> str:
        each = found.get(frozenset((row.name, column.name)))
        if each is None:
            alone = row is column or together((row, column)) is None
            return f'<td class="{"none" if alone else ""}"></td>'
        said = (
            f"{row.name} x {column.name}: {each['outcome']}, {each['text']}\n"
            f"{each['command']}\n{each['when']}, {each['commit']}"
        )
        return f'<td class="{each["outcome"]}" title="{html.escape(said)}"></td>'

    names = [html.escape(each.name) for each in all_of]
    head = "".join(f"<th><span>{name}</span></th>" for name in names)
    rows = "".join(
        f"<tr><th>{name}</th>{''.join(cell(row, column) for column in all_of)}</tr>"
        for name, row in zip(names, all_of, strict=True)
    )
    commits = ", ".join(sorted({each["commit"] for each in kept.values()}))
    return (
        f'<!doctype html><meta charset="utf-8"><title>What works with what</title>'
        f"<style>{_STYLE}</style><h1>What works with what</h1>"
        f"<p>{len(kept)} cells: {_counted(each['outcome'] for each in kept.values())}. Commits: "
        f"{html.escape(commits)}. Green is equal to one device, yellow is refused in a sentence, "
        "red is a fault, blue needs hardware, grey was not run, white are alternatives of which a "
        "run has one. The pointer over a cell shows what came of it.</p>"
        f"<table><thead><tr><th></th>{head}</tr></thead>{rows}</table>"
    )
