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
from jaxtrain.host.pictures import finish_axes, new_figure, save_figure
from jaxtrain.run.folder import RETRAININGS, WATERMARKS
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
    """Plays the days, and prints a line for each."""
    options = tyro.cli(Options, args=arguments, prog="python -m experiments.studies stream")
    with refusing(Options):
        root = pathlib.Path(options.study_dir)
        write_texts(root / "texts")
        run, store, days = root / "run", str(root / "store"), []
        for kind in KINDS:  # of files of their own, to measure every day on the same
            split = data.text_folder(root / "texts" / kind, held_out=0.9)
            data.write_store(split, data.ByteTokenizer(), root / kind)
        texts = {kind: [(str(root / kind), 0, 1)] for kind in KINDS}
        for day in range(len(PROSE)):
            add = ("--data", str(root / "texts" / str(day)), "--out", store, "--held-out", HELD_OUT)
            call("jaxtrain", "tokenize", *add, *["--append"] * bool(day))
            if day:
                line = ["jaxtrain", "retrain", MODULE, "--run", str(run), "--drift", str(THRESHOLD)]
                call(*line, "--data", store, *f"{NEXT} {FLAGS}".split())
            else:
                line = [MODULE, "--run-dir", str(run), "--auto-resume"]
                call(*line, "--data", store, *f"{FIRST} {FLAGS}".split())
            days.append(looked(run, day, texts))
            print(json.dumps(days[-1]), flush=True)
        if options.png is not None:
            draw(days, options.png)


def call(*line: str) -> None:
    """Runs a module as a command; raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", *line], check=True, stdout=subprocess.DEVNULL)


def looked(run: pathlib.Path, day: int, texts: dict) -> dict:
    """Returns what is known at the end of a day: losses of the best run and of the first one in
    nats per byte, the drift, and the tokens that the best run has seen."""
    decided = (run / RETRAININGS).read_text().splitlines()[:day] if day else []
    lines = [json.loads(line) for line in decided]
    best = next((each["run"] for each in reversed(lines) if each["promoted"]), str(run))
    row = {"day": day, "trained": not lines or "run" in lines[-1]}
    row |= {"promoted": not lines or lines[-1]["promoted"], "drift": lines and lines[-1]["drift"]}
    marks = (pathlib.Path(best) / WATERMARKS).read_text().splitlines()
    row["seen"] = json.loads(marks[-1])["tokens"]
    row["there"] = len(data.open_store(run.parent / "store", parts=day).corpus().tokens)
    for name, path in (("best", best), ("first", str(run))):
        found = measure(path, texts, 10**6).items()
        row[name] = {kind: nats.sum() / sum(map(len, tokens)) for kind, (tokens, nats) in found}
    return row


def write_texts(root: pathlib.Path) -> None:
    """Writes the files of every day, and those that all days are measured on; once."""
    if root.exists():
        return
    pools: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number, document in enumerate(data.python_stdlib().train):
        text, kind = document.text.decode(errors="replace"), KINDS[number % 2]
        if kind == "prose":
            text = docstrings(text)
        if len(text) > CHARACTERS // 4:
            pools[kind].append(text[:CHARACTERS])
    rng = np.random.default_rng(0)
    draws = {kind: iter(rng.permutation(pool).tolist()) for kind, pool in pools.items()}
    counts = {kind: {kind: FILES // 2} for kind in KINDS}
    for day, share in enumerate(PROSE):
        files = FILES if day else 4 * FILES
        prose = round(files * share)
        counts[str(day)] = {"prose": prose, "code": files - prose}
    partial = root.with_name("partial")
    for name, kinds in counts.items():
        (partial / name).mkdir(parents=True, exist_ok=True)
        for kind, count in kinds.items():
            for number in range(count):
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
    losses, drift, tokens = figure.subplots(3, 1, sharex=True)
    for kind, color in zip(KINDS, ("C0", "C1"), strict=True):
        for name, style in (("best", "o-"), ("first", ":")):
            label = f"{kind}, {'the best run' if name == 'best' else 'the first run'}"
            losses.plot(at, [row[name][kind] for row in days], style, color=color, label=label)
    for name, color in (("tokens", "C2"), ("losses", "C4")):
        found = [row["drift"][name] for row in days[1:]]
        drift.plot(at[1:], [x["psi"] for x in found], "o-", color=color, label=f"PSI of {name}")
        told = f"chance, of {name}"
        drift.plot(at[1:], [x["chance"] for x in found], ":", color=color, label=told)
    drift.axhline(THRESHOLD, color="0.5", lw=1, label="threshold")
    drift.set_yscale("log")
    tokens.bar(at, [row["there"] / 1e3 for row in days], color="0.85", label="in the store")
    seen = [row["seen"] / 1e3 for row in days]
    tokens.step(at, seen, where="mid", color="C3", label="watermark of the best run")
    for axes in (losses, drift, tokens):
        for row in days[1:]:
            if row["trained"]:
                style = "-" if row["promoted"] else "--"
                axes.axvline(row["day"], color="C3", lw=0.8, ls=style, alpha=0.6)
        axes.legend(fontsize=7, frameon=False)
    finish_axes(
        losses,
        "held-out loss (red: a retraining; broken: not promoted)",
        x="",
        y="nats per byte",
    )
    finish_axes(drift, "drift of the day's text from all text seen", x="", y="index")
    shares = ", ".join(f"{share:.0%}" for share in PROSE)
    finish_axes(tokens, f"tokens; prose by the day: {shares}", x="day", y="thousands")
    save_figure(figure, path)


if __name__ == "__main__":
    main(sys.argv[1:])
