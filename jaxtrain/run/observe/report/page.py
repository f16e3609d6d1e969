"""The page: what is drawn of one or several runs, as data for the hand-kept script of page.html."""

import base64
import dataclasses
import datetime
import html
import importlib.resources
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.host.memory import human_bytes, human_count
from jaxtrain.host.paths import as_path, listed
from jaxtrain.run.folder import PICTURES
from jaxtrain.run.observe import journal
from jaxtrain.run.observe.goodput import account, spent
from jaxtrain.run.observe.metric import MACHINE, Metric
from jaxtrain.run.observe.report import heat, landscapes, lineage, rates
from jaxtrain.run.observe.report.figures import figures, verdicts
from jaxtrain.run.observe.report.flame import traced
from jaxtrain.run.observe.report.health import Finding, duration, examine, recent
from jaxtrain.run.observe.report.records import Record, Series, downsample, significant
from jaxtrain.run.observe.throughput import PARTS

# Numbers on a page in all, of some 8 bytes each: it is to stay below 2 MB.
NUMBERS = 150_000
BUCKETS = (100, 1000)
# Marks (skipped steps, spikes) of one kind at most; the number of all is told in words.
MARKS = 500
HISTOGRAM_BINS = 60
# Letters that encode all pictures of a page together.
PICTURE_BYTES = 400_000
# Of the journal, the last so many lines.
EVENTS = 200
# Parts of a model whose memory is drawn, and what of each is read.
MEMORY_PARTS = 16
PART_KINDS = ("layers", "parameters", "optimizer_state", "gradients", "kept")


def make_page(
    records: Sequence[Record], *, now: float | None = None, every: float | None = None
) -> str:
    """Draws runs, overlaid in this order, as one HTML page that needs nothing else.

    The page is below 2 MB whatever the runs have logged. After ``every`` so many seconds it asks
    where it came from for a newer one; None never does.
    """
    each = sum(not heat.of_one_layer(n) for record in records for n in record.series) * 4 or 1
    buckets = int(np.clip(NUMBERS // each, *BUCKETS))
    shared: dict[tuple, int] = {}
    made = datetime.datetime.fromtimestamp(time.time() if now is None else now, datetime.UTC)
    data = {
        "every": every,
        "made": f"{made:%Y-%m-%d %H:%M} UTC",
        "runs": [
            _run(record, buckets, shared, now) | {"maps": heat.maps(record, runs=len(records))}
            for record in records
        ],
        "charts": _charts(records),
        "table": _table(records),
        "told": verdicts(records),
        "steps": list(map(list, shared)),
    }
    # No text of a run can end the script that holds it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    title = ", ".join(record.name for record in records)
    page = _template().replace("{{TITLE}}", html.escape(title))
    return page.replace("{{PICTURES}}", _pictures(records)).replace("{{DATA}}", text)


def _pictures(records: Sequence[Record]) -> str:
    """The newest pictures of the runs as HTML: by name, those that fit in ``PICTURE_BYTES``."""
    parts, room = [], PICTURE_BYTES
    for record in records:
        for path in sorted(listed(as_path(record.path) / PICTURES, "*.png")):
            content = base64.b64encode(path.read_bytes()).decode()
            if len(content) <= room:
                room -= len(content)
                name = html.escape(f"{record.name}: {path.stem}")
                image = f'<img alt="{name}" src="data:image/png;base64,{content}">'
                parts.append(f"<figure>{image}<figcaption>{name}</figcaption></figure>")
    return "".join(parts)


def stylesheet() -> str:
    """Returns the style sheet of the page, for others that are to look like it."""
    return _template().partition("<style>")[2].partition("</style>")[0]


def _template() -> str:
    return importlib.resources.files(__package__).joinpath("page.html").read_text()


def _run(record: Record, buckets: int, shared: dict, now: float | None) -> dict[str, Any]:
    findings = examine(record, now=now)
    findings += [Finding("good", test.text) for test in rates.found(record)]
    findings += [Finding("good", text) for text in lineage.found(record)]
    series = {
        name: _packed(each, buckets, shared)
        for name, each in record.series.items()
        if not heat.of_one_layer(name)
    }
    times = record.times
    if times.steps.size:
        # A clock that is set back must not draw a curve backwards.
        passed = np.maximum.accumulate(times.values) - times.values[0]
        hours = Series(times.steps, passed / 3600)
        series["hours"] = _packed(hours, buckets, shared)
    return {
        "name": record.name,
        "path": record.path,
        "verdict": findings[0].level,
        "findings": [dataclasses.asdict(each) for each in findings],
        "tiles": _tiles(record),
        "series": {name: each for name, each in series.items() if each["n"]},
        "marks": {
            "not finite": _thinned(record.above_zero("train/skipped")),
            "spike": _thinned(record.above_zero("train/spike")),
            "alert": _thinned(_steps_of(record, journal.ALERT)),
        },
        "histogram": _histogram(record),
        "goodput": [
            [name, significant(x)] for name, x in account(record.attempts).items() if x > 0
        ],
        "profile": traced(record.path),
        "landscape": landscapes.found(record.path),
        "memory": _memory(record),
        "checkpoints": _steps_of(record, journal.CHECKPOINT)[-MARKS:],
        "events": list(filter(None, map(_event, record.events[-EVENTS:]))),
        "conclusion": "\n".join(map(str, _last(record, journal.CONCLUSION, "lines", list))),
        "changes": [
            {"step": step, "name": name, "then": _word(then), "now": _word(new)}
            for step, name, then, new in record.changes
        ],
    }


def _event(line: Mapping[str, Any]) -> list[str] | None:
    """The time, the attempt and what happened, in words."""
    name, step = line.get("event"), line.get("step")
    size = line.get("bytes") if isinstance(line.get("bytes"), int) else 0
    told = {
        journal.START: "started",
        journal.READY: f"goes on from step {step}" if step else "begins",
        journal.CHECKPOINT: f"checkpoint {step} in {line.get('seconds')} s, {human_bytes(size)}",
        journal.ALERT: f"alert {line.get('rule')} in step {step}: {line.get('text')}",
        journal.ALERT_NOT_POSTED: f"alert {line.get('rule')} was not posted: {line.get('why')}",
        journal.TRACE: f"steps {line.get('first')} to {line.get('last')} are traced",
        journal.SAVE_FAILED: f"a save failed: {line.get('error')}",
        journal.KILLED: f"attempt {line.get('of_attempt')} ended without a word after step {step}",
        journal.FORECAST: "; ".join(map(str, line.get("lines", ()))),
        journal.END: f"ended after step {step}: {line.get('ended')}",
    }
    if not isinstance(name, str) or name not in told:
        return None
    at = str(line.get("time", ""))[:19].replace("T", " ")
    return [at, f"{line.get('attempt', '')}", f"{line.get('host', '')}", told[name]]


def _last(record: Record, event: str, key: str, kind: type) -> Any:
    """Returns ``key`` of the last ``event``; an empty ``kind`` if it is missing or damaged."""
    told = record.happened(event)
    found = told[-1].get(key) if told else None
    return found if isinstance(found, kind) else kind()


def _packed(series: Series, buckets: int, shared: dict[tuple, int]) -> dict[str, Any]:
    """A series as numbers of five digits; the steps, which many share, by their place in a list."""
    points = downsample(series, buckets)
    steps = tuple(points.pop("x").tolist())
    packed = {name: [significant(v) for v in values] for name, values in points.items()}
    return {"n": len(steps), "x": shared.setdefault(steps, len(shared)), **packed}


def _thinned(steps: list[int]) -> list[int]:
    return steps[:: max(1, -(-len(steps) // MARKS))]


def _steps_of(record: Record, event: str) -> list[int]:
    return [line["step"] for line in record.happened(event) if isinstance(line.get("step"), int)]


def _tiles(record: Record) -> list[dict[str, str]]:
    """The few numbers that are read first."""
    of = f" of {record.total:,}" if record.total else ""
    tiles = [{"name": "step", "value": f"{record.step:,}", "note": of.strip()}]
    if (losses := record.values("train/loss")).size:
        n = recent(losses.size)
        note = f"mean of {n:,} lines" if n > 1 else ""
        tiles.append({"name": "loss", "value": f"{losses[-n:].mean():#.4g}", "note": note})
    for name in record.held_out_losses:
        if (values := record.values(name)).size:
            best = f"best {values.min():#.4g}"
            value = f"{values[-1]:#.4g}"
            tiles.append({"name": f"held-out {Metric.of(name).name}", "value": value, "note": best})
    for name in record.rates:
        rates = record.values(name)
        note = f"median {human_count(float(np.median(rates)))}" if rates.size else ""
        value = human_count(float(rates[-1])) if rates.size else "-"
        tiles.append({"name": f"{Metric.of(name).item}/s", "value": value, "note": note})
    if total := sum((times := account(record.attempts)).values()):
        part, note = times.get("step", 0.0) / total, f"of {duration(total)}"
        tiles.append({"name": "goodput", "value": f"{part:.1%}", "note": note})
    for name, value in spent(record.attempts).items():
        tiles.append({"name": name, "value": f"{significant(value, 3):,}", "note": ""})
    if (mfu := record.values("time/mfu")).size:
        tiles.append({"name": "MFU", "value": f"{mfu[-1]:.1%}", "note": f"best {mfu.max():.1%}"})
    if (peak := record.values("memory/peak")).size:
        compiled = _memory(record)
        note = f"compiled for {human_bytes(compiled['peak'])}" if compiled else ""
        tiles.append({"name": "memory peak", "value": human_bytes(peak.max()), "note": note})
    return tiles


def _histogram(record: Record) -> dict[str, list] | None:
    """Step times without the rarest thousandth at either end."""
    counts = sorted(record.step_times.items())
    if not counts:
        return None
    numbers = np.array([n for _, n in counts])
    places = (np.cumsum(numbers) - numbers / 2) / numbers.sum()
    kept = [key for (key, _), place in zip(counts, places, strict=True) if 5e-4 < place < 1 - 5e-4]
    keys = range(min(kept), max(kept) + 1) if kept else range(counts[0][0], counts[-1][0] + 1)
    by = -(-len(keys) // HISTOGRAM_BINS)
    edges = [*keys[::by], keys[-1] + 1]
    return {
        "counts": [
            sum(record.step_times[k] for k in keys[i : i + by]) for i in range(0, len(keys), by)
        ],
        "edges": [significant(2 ** (edge / PARTS)) for edge in edges],
    }


def _memory(record: Record) -> dict[str, Any] | None:
    """Returns the compiled and the measured memory of the last attempt; None if it recorded none.
    Of each part its name, its layers, and bytes of parameters, optimizer state,
    gradients and what it keeps for the backward pass; ``rest`` is what else is in the peak."""
    told = [line["memory"] for line in record.happened(journal.READY) if line.get("memory")]
    measured = record.values("memory/peak")
    try:
        parts = [
            [str(part["name"]), *(int(part[kind]) for kind in PART_KINDS)]
            for part in told[-1]["parts"]
        ]
        peak = int(told[-1]["peak"])
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None
    if len(parts) > MEMORY_PARTS:
        more = parts[MEMORY_PARTS - 1 :]
        sums = [sum(numbers) for numbers in zip(*(part[2:] for part in more), strict=True)]
        parts = [*parts[: MEMORY_PARTS - 1], [f"{len(more)} more", 0, *sums]]
    return {
        "parts": parts,
        "rest": peak - sum(sum(part[2:]) for part in parts),
        "peak": peak,
        "measured": float(measured.max()) if measured.size else None,
    }


def _charts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the charts in order; a chart without a series in any run is left out."""
    names = sorted({n for record in records for n in record.series if not heat.of_one_layer(n)})
    held_out = sorted({name for record in records for name in record.held_out_losses})
    rates = sorted({name for record in records for name in record.rates})
    charts = [
        _chart("Loss", ["train/loss", *held_out], wide=True, smooth=True, marks=True),
        _chart("Gradient norm", ["train/grad_norm"], log=True, smooth=True, marks=True),
        _chart("Learning rate", ["train/learning_rate"], zero=True),
        *(_chart(f"{Metric.of(n).item.capitalize()} per second", [n], zero=True) for n in rates),
        _chart("Seconds per step", ["time/step_seconds", "time/data_seconds"], zero=True),
        _chart("Model FLOPs utilisation", ["time/mfu"], zero=True),
        _chart("Device memory", ["memory/in_use", "memory/peak"], zero=True, unit="bytes"),
        _chart("Parameter norm", ["train/param_norm"]),
        _chart("Update norm", ["train/update_norm"], log=True, smooth=True),
        _chart("Loss scale", ["train/loss_scale"], log=True),
    ]
    known = {name for chart in charts for name in chart["series"]}
    known |= {"train/skipped", "train/spike", "train/weight", "data/epoch"}
    for name in names:
        metric = Metric.of(name)
        # Those of the run are told in words, and an evaluation goes with the same metric of
        # training, where there is one.
        drawn = metric.group == "eval" and f"train/{metric.name}" in names
        if name in known or drawn or metric.group == "run" or metric.is_process:
            continue
        trained = metric.group == "train"
        pair = [name, f"eval/{metric.name}"] if trained else [name]
        title = (metric.name if trained else " ".join(metric)).replace("_", " ").strip()
        options = {"zero": True} if metric.group in MACHINE else {}
        options |= {"unit": "bytes"} if metric.is_bytes else {}
        charts.append(_chart(title[:1].upper() + title[1:], pair, smooth=trained, **options))
    there = set(names)
    for chart in charts:
        chart["series"] = [name for name in chart["series"] if name in there]
    return [chart for chart in charts if chart["series"]]


def _chart(title: str, series: list[str], **options: Any) -> dict[str, Any]:
    return {"title": title, "series": series, **options}


def _table(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The configurations and environments side by side: what differs first."""
    sections = []
    if len(records) > 1:
        rows = figures(records)
        sections.append({"title": "Side by side", "rows": rows, "differ": len(rows)})
    for title, flat in (
        ("Configuration", [record.config for record in records]),
        # With what the header of the last attempt said, such as the memory that was compiled for.
        ("Environment", [_last(r, "ready", "facts", dict) | r.environment for r in records]),
    ):
        names = dict.fromkeys(name for each in flat for name in each)
        rows = [[name, *(_word(each.get(name, "-")) for each in flat)] for name in names]
        differs = [len(set(row[1:])) > 1 for row in rows]
        order = sorted(range(len(rows)), key=lambda i: not differs[i])
        sections.append({"title": title, "rows": [rows[i] for i in order], "differ": sum(differs)})
    return [section for section in sections if section["rows"]]


def _word(value: Any) -> str:
    if value is None:
        return "left out"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
