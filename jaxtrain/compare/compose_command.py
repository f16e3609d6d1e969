"""``jaxtrain compose``: the composition table, run and printed."""

import dataclasses
import itertools
import pathlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import tyro

from jaxtrain.compare import compose, parity
from jaxtrain.compare.capabilities import Capability, Together, capabilities, together
from jaxtrain.compare.compose import Cell
from jaxtrain.compare.composition import added, markdown, read, said, write
from jaxtrain.host.paths import check_on_disk
from jaxtrain.host.simulated import simulate_devices


@dataclasses.dataclass(frozen=True)
class ComposeOptions:
    """Runs every pair of capabilities on 8 simulated devices, and says which pairs are equal to one
    device, which are refused, and which are faults.

    The exit status is 1 where the table has a fault.
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
    """Folder of the results: composition.tsv, to which later runs add, composition.md with the
    table of jaxtrain/README.md, and composition.html with every cell and its command."""
    missing: bool = False
    """Leave out what --out has results of already."""
    list: bool = False
    """Print the capabilities, and run nothing."""


def run_compose(options: ComposeOptions, rest: list[str]) -> int:
    """Prints faults as they are found, then the table; 1 where there is a fault."""
    del rest
    if options.out is not None:
        check_on_disk(options.out, "--out")
    elif options.missing:
        raise ValueError("--missing is given without --out, whose results it is about: give both")
    all_of = capabilities()
    if options.list:
        for each in all_of:
            how = " ".join((*each.flags, *([f"--layout {each.layout}"] if each.layout else [])))
            print(f"{each.group:12} {each.name:28} {how or each.module or 'in Python'}")
        return 0
    names = {each.name for each in all_of}
    there = {} if options.out is None else read(options.out)
    kept = {key: x for key, x in there.items() if names >= set(key)}
    cells = _chosen(options, all_of)
    cells = [cell for cell in cells if not (options.missing and cell.names in kept)]
    # What is compiled beside the steps (the state that they begin with) takes as long as these.
    parity.set_flags(parity.COMPILER_OPTIONS)
    simulate_devices(parity.DEVICES)
    shown = _shown(compose.compose(cells), len(cells))
    found = [None]
    while found:  # Every 20 cells, so that a run that is ended leaves what it has found.
        found = list(itertools.islice(shown, 20))
        kept = added(kept, found)
        if options.out is not None:
            write(options.out, kept, all_of)
    print(markdown(kept, all_of))
    return int(any(each.outcome == "fault" for each in kept.values()))


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
            print(f"{far}: {said(Counter(outcomes))}", file=sys.stderr, flush=True)
        yield cell
