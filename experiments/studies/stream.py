"""A store that grows by the day while its text turns from code to prose, and its retrainings.

    python -m experiments.studies.stream --study-dir STREAM --png stream.png

Every day adds a part of files to a token store and calls ``jaxtrain retrain --drift 0.1``. Code is
that of half of the standard library, and prose the docstrings of the other half.
"""

import ast
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import tyro

from jaxtrain import data
from jaxtrain.host.paths import as_path, exists, read_if_there, write_whole
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.run.folder import PROMOTED, RETRAININGS, WATERMARKS
from jaxtrain.run.refusal import refusing
from jaxtrain.study.retrain import measure

# The share of prose on each day; files of a day (of the first four times as many), characters of
# each, and the share held out.
PROSE = (0.0, 0.0, 0.0, 0.3, 0.6, 1.0, 1.0, 1.0)
FILES, CHARACTERS, HELD_OUT = 40, 3000, "0.5"
KINDS, THRESHOLD, MODULE = ("code", "prose"), 0.1, "experiments.gpt"
FIRST = "--steps 1500 --layers 2 --width 64 --heads 2 --seq-len 64"
NEXT = "--steps 300"
FLAGS = "--optimizer.name adamw --sample-tokens 0 --held-out-bytes 1000000 --grow-every 50"


@dataclasses.dataclass(frozen=True)
class Options:
    """Plays a stream of text that shifts, with a decision on retraining every day.

    The same command continues an interrupted study.
    """

    study_dir: str
    """Folder of the study, which is made: texts, store and runs."""
    png: str | None = None
    """PNG file for a picture of losses, drift and watermarks by the day."""


def main(arguments: Sequence[str]) -> None:
    """Plays the days that are left, each of which is a line of days.jsonl, and draws all."""
    options = tyro.cli(Options, args=arguments, prog="python -m experiments.studies stream")
    with refusing(Options):
        root = pathlib.Path(options.study_dir)
        if not exists(root / "texts"):
            write_texts(root / "texts")
        done = read_if_there(root / "days.jsonl").decode().splitlines()
        for day in range(len(done), len(PROSE)):
            done.append(json.dumps(play(root, day)))
            print(done[-1], flush=True)
            write_whole(as_path(root / "days.jsonl"), "\n".join(done))
        if options.png is not None:
            draw([json.loads(line) for line in done], options.png)


def play(root: pathlib.Path, day: int) -> dict:
    """Adds a day's text to the store, trains or decides, and returns what is known then: the drift,
    and losses of the first and the best run, in nats per byte."""
    run, store = str(root / "run"), str(root / "store")
    add = ["--data", str(root / "texts" / str(day)), "--out", store, "--held-out", HELD_OUT]
    line = [MODULE, "--run-dir", run, "--auto-resume", *FIRST.split()]
    if day:
        add.append("--append")
        line = ["jaxtrain", "retrain", MODULE, "--run", run, "--drift", str(THRESHOLD)]
        line += NEXT.split()
    for command in (["jaxtrain", "tokenize", *add], [*line, "--data", store, *FLAGS.split()]):
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    row, best = {"day": day, "there": len(data.open_store(store).corpus().tokens)}, run
    if day:
        best = json.loads((root / "run" / PROMOTED).read_text())["run"]
        told = json.loads((root / "run" / RETRAININGS).read_text().splitlines()[-1])
        row |= {"drift": told["drift"], "trained": "run" in told, "promoted": told["promoted"]}
    marks = (pathlib.Path(best) / WATERMARKS).read_text().splitlines()
    row["seen"] = json.loads(marks[-1])["tokens"]
    texts = {kind: [(str(root / kind), 0, 1)] for kind in KINDS}
    for kind in KINDS:  # of files of their own, to measure every day on the same
        split = data.text_folder(root / "texts" / kind, held_out=0.9)
        data.write_store(split, data.ByteTokenizer(), root / kind)
    for name, path in (("best", best), ("first", run)):
        found = measure(path, texts, 10**6).items()
        row[name] = {kind: nats.sum() / sum(map(len, tokens)) for kind, (tokens, nats) in found}
    return row


def write_texts(root: pathlib.Path) -> None:
    """Writes the files of every day, and those that all days are measured on."""
    pools: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number, document in enumerate(data.python_stdlib().train):
        text, kind = document.text.decode(errors="replace"), KINDS[number % 2]
        text = docstrings(text) if kind == "prose" else text
        if len(text) > CHARACTERS // 4:
            pools[kind].append(text[:CHARACTERS])
    rng, partial = np.random.default_rng(0), root.with_name("partial")
    draws = {kind: iter(rng.permutation(pool).tolist()) for kind, pool in pools.items()}
    counts = {kind: {kind: FILES // 2} for kind in KINDS}
    for day, share in enumerate(PROSE):
        prose = round((files := FILES if day else 4 * FILES) * share)
        counts[str(day)] = {"prose": prose, "code": files - prose}
    for name, kinds in counts.items():
        (partial / name).mkdir(parents=True, exist_ok=True)
        for kind, number in ((kind, n) for kind, count in kinds.items() for n in range(count)):
            (partial / name / f"{kind}-{name}-{number}.txt").write_text(next(draws[kind]))
    partial.rename(root)


def docstrings(text: str) -> str:
    """Returns the docstrings of a module's source; nothing of what is not Python."""
    try:
        nodes = [x for x in ast.walk(ast.parse(text)) if hasattr(x, "body")]
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n\n".join(filter(None, (ast.get_docstring(x) for x in nodes if isinstance(x, kinds))))


def draw(days: Sequence[dict], path: str) -> None:
    """Draws losses, drift and watermarks by the day."""
    figure, at = new_figure(8, 8), [row["day"] for row in days]
    losses, drift, tokens = panels = figure.subplots(3, 1, sharex=True)
    for kind, color in zip(KINDS, ("C0", "C1"), strict=True):
        for name, style in (("best", "o-"), ("first", ":")):
            told = {"color": color, "label": f"{kind}, the {name} run"}
            losses.plot(at, [row[name][kind] for row in days], style, **told)
    for name, color in (("tokens", "C2"), ("losses", "C4")):
        for what, style in (("psi", "o-"), ("chance", ":")):
            told = {"color": color, "label": f"{what} of {name}"}
            drift.plot(at[1:], [row["drift"][name][what] for row in days[1:]], style, **told)
    drift.axhline(THRESHOLD, color="0.5", lw=1, label="threshold")
    drift.set_yscale("log")
    tokens.bar(at, [row["there"] / 1e3 for row in days], color="0.85", label="in the store")
    told = {"where": "mid", "color": "C3", "label": "watermark of the best run"}
    tokens.step(at, [row["seen"] / 1e3 for row in days], **told)
    for axes, row in ((axes, row) for axes in panels for row in days[1:] if row["trained"]):
        axes.axvline(row["day"], color="C3", lw=0.8, ls="-" if row["promoted"] else "--")
    shares = ", ".join(f"{share:.0%}" for share in PROSE)
    for axes, title, x, y in (
        (losses, "held-out loss (red: a retraining; broken: not promoted)", "", "nats per byte"),
        (drift, "drift of the day's text from all text seen", "", "index"),
        (tokens, f"tokens; prose by the day: {shares}", "day", "thousands"),
    ):
        axes.legend(fontsize=7, frameon=False)
        finish_axes(axes, title, x=x, y=y)
    save_figure(figure, path)


if __name__ == "__main__":
    main(sys.argv[1:])
