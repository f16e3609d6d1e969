"""The results of the composition table: kept in a file, as a table in Markdown, and as a page."""

import html
import pathlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jaxtrain
from jaxtrain.compare import compose
from jaxtrain.compare.capabilities import Capability, Together, together
from jaxtrain.compare.compose import Cell
from jaxtrain.host.paths import read_if_there
from jaxtrain.run.provenance import commit

RESULTS, PAGE, TABLE = "composition.tsv", "composition.html", "composition.md"
OUTCOMES = {"equal": "equal", "refused": "refused", "fault": "FAULT", "needs": "need hardware"}


class Result(NamedTuple):
    """What came of capabilities that were tried together, when, and at which commit."""

    outcome: str
    text: str
    when: str
    commit: str


Results = Mapping[tuple[str, ...], Result]


def write(folder: pathlib.Path, kept: Results, all_of: Sequence[Capability]) -> None:
    """Writes results into a folder, with their table and page."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ("\t".join((" x ".join(key), *result)) for key, result in sorted(kept.items()))
    (folder / RESULTS).write_text("".join(f"{line}\n" for line in lines))
    (folder / TABLE).write_text(markdown(kept, all_of) + "\n")
    (folder / PAGE).write_text(page(kept, all_of))


def read(folder: pathlib.Path) -> dict[tuple[str, ...], Result]:
    """Reads the results that :func:`write` has written; none where there are none."""
    lines = read_if_there(folder / RESULTS).decode().splitlines()
    rows = (line.split("\t") for line in lines)
    return {tuple(names.split(" x ")): Result(*rest) for names, *rest in rows}


def added(kept: Results, found: Sequence[Cell]) -> dict[tuple[str, ...], Result]:
    """Adds cells to results."""
    at = (time.strftime("%Y-%m-%d"), commit(__file__) or jaxtrain.__version__)
    return dict(kept) | {x.names: Result(x.outcome, " ".join(x.text.split()), *at) for x in found}


def markdown(kept: Results, all_of: Sequence[Capability]) -> str:
    """The table in Markdown: how many pairs of each two groups are equal, and the exceptions."""
    group = {each.name: each.group for each in all_of if each.needs is None}
    groups = list(dict.fromkeys(group.values()))
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for cell in compose.pairs(all_of):
        if group.keys() >= set(cell.names):
            outcome = kept[cell.names].outcome if cell.names in kept else "not tried"
            counts[tuple(sorted((group[x] for x in cell.names), key=groups.index))][outcome] += 1
    lines = ["| pairs | " + " | ".join(groups) + " |", "|---" * (len(groups) + 1) + "|"]
    for number, row in enumerate(groups):
        cells = ["" if n < number else said(counts[row, of]) for n, of in enumerate(groups)]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    lines.append("")
    for outcome, title in (("fault", "Faults"), ("refused", "Refused")):
        of_pairs = (key for key, x in sorted(kept.items()) if x.outcome == outcome)
        apart = [set(key) for key in of_pairs if len(key) == 2]
        if those := [f"- {each}" for each in _by_capability(apart)]:
            lines += [f"{title}:", "", *those, ""]
    absent = (f"{each.name} ({each.needs})" for each in all_of if each.needs)
    lines += [f"Not tried without hardware: {', '.join(absent)}.", ""]
    days = sorted({x.when for x in kept.values()})
    lines.append(
        f"Run {' to '.join(days[:: len(days) - 1 or 1])} at {_commits(kept)}: {_counted(kept)}."
    )
    return "\n".join(lines)


def _by_capability(apart: list[set[str]]) -> Iterator[str]:
    """Says pairs as lists of partners, beginning with the capability that has most."""
    while apart:
        (name, _), *_ = Counter(x for pair in apart for x in sorted(pair)).most_common(1)
        partners = sorted(x for pair in apart if name in pair for x in pair - {name})
        yield f"**{name}** with {'; '.join(partners)}"
        apart = [pair for pair in apart if name not in pair]


def _commits(kept: Results) -> str:
    """The commits at which pairs were tried, or how many of them."""
    found = sorted({x.commit for x in kept.values()})
    return ", ".join(found) if len(found) < 5 else f"{len(found)} commits (each pair has its own)"


def _counted(kept: Results) -> str:
    """Says how many pairs, and how many triples, came to what."""
    parts = []
    for size, word in ((2, "pairs"), (3, "triples")):
        outcomes = Counter(x.outcome for key, x in kept.items() if len(key) == size)
        if outcomes:
            parts.append(f"{outcomes.total():,} {word}, {said(outcomes)}")
    return "; ".join(parts)


def said(outcomes: Counter[str]) -> str:
    if not outcomes.keys() - {"equal"}:
        return f"{outcomes['equal']:,}" if outcomes else ""
    order = (*OUTCOMES, "not tried")
    return ", ".join(f"{outcomes[x]:,} {OUTCOMES.get(x, x)}" for x in order if outcomes[x])


_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; }
th { font-weight: normal; text-align: right; padding: 0 .5em 0 0; white-space: nowrap; }
thead th { height: 13em; vertical-align: bottom; padding: 0; position: sticky; top: 0; }
thead th { background: #fff; font-size: 12px; line-height: 1; }
thead th span { writing-mode: vertical-rl; transform: rotate(180deg); }
td { width: 12px; min-width: 12px; height: 12px; border: 1px solid #fff; padding: 0; }
td.untried { background: #eee; } td.equal { background: #7fb58a; }
td.refused { background: #e3c878; }
td.fault { background: #c0392b; } td.needs { background: #b8c4d6; }
td[title] { cursor: pointer; } td.chosen { outline: 2px solid #222; }
pre { position: sticky; bottom: 0; margin: 0; padding: .8em; min-height: 4.2em; background: #f6f6f4;
  border-top: 1px solid #bbb; white-space: pre-wrap; }
pre:empty { display: none; }
"""
_SCRIPT = """
const said = document.querySelector("pre");
document.querySelector("table").onclick = ({target}) => {
  if (!target.title) return;
  document.querySelector(".chosen")?.classList.remove("chosen");
  target.classList.add("chosen");
  said.textContent = target.title;
};
"""


def page(kept: Results, all_of: Sequence[Capability]) -> str:
    """The table as one picture in HTML; a click on a cell shows what came of it and the command."""

    def told(cell: Together) -> str:
        x = kept[cell.names]
        return (
            f"{' x '.join(cell.names)}: {OUTCOMES[x.outcome]}, {x.text}\n{cell.command}\n"
            f"{x.when}, {x.commit}"
        )

    def cell(row: Capability, column: Capability) -> str:
        pair = sorted((row, column), key=all_of.index)
        if row is column or (both := together(pair)) is None:
            return "<td></td>"
        if both.names not in kept:
            return '<td class="untried"></td>'
        title = html.escape(told(both))
        return f'<td class="{kept[both.names].outcome}" title="{title}"></td>'

    names = [html.escape(each.name) for each in all_of]
    head = "".join(f"<th><span>{name}</span></th>" for name in names)
    rows = "".join(
        f"<tr><th>{name}</th>{''.join(cell(row, column) for column in all_of)}</tr>"
        for name, row in zip(names, all_of, strict=True)
    )
    known = {each.name: each for each in all_of}
    drawn = [together([known[name] for name in key]) for key in kept if len(key) == 3]
    triples = "".join(f"<li>{html.escape(told(each))}" for each in drawn if each is not None)
    return (
        f'<!doctype html><meta charset="utf-8"><title>What works with what</title>'
        f"<style>{_STYLE}</style><h1>What works with what</h1>"
        f"<p>{_counted(kept)}. Commits: {html.escape(_commits(kept))}.<br>Green is equal to one "
        "device, yellow is refused in a sentence, red is a fault, blue needs hardware, grey was "
        "not run, white are alternatives of which a run has one. A click on a cell shows what came "
        "of it, and its command.</p>"
        f"<table><thead><tr><th></th>{head}</tr></thead>{rows}</table>"
        f"<details><summary>Triples</summary><ol>{triples}</ol></details><pre></pre>"
        f"<script>{_SCRIPT}</script>"
    )
