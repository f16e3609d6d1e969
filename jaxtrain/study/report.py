"""The report of a study: one HTML page of its trials, in the style of a run's report."""

import datetime
import html
import math
import pathlib
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from jaxtrain.host.paths import as_path, write_whole
from jaxtrain.run.observe.report.page import stylesheet
from jaxtrain.run.observe.report.records import downsample
from jaxtrain.study.trials import VALUES, WHY
from jaxtrain.study.workers import Runs

PAGE = "study.html"
WIDE, NARROW, HEIGHT, EDGE = 1160, 540, 260, (46, 12, 14, 30)
# Curves are drawn of so many trials, the best ones, by so many points each.
CURVES, POINTS = 40, 200
# Nothing is said of the importance of flags by fewer trials.
FEWEST = 8
# What is worse than so many of the trials lies at the edge of a picture.
SHOWN = 0.9

OWN_STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 13px; }
.line { fill: none; stroke-width: 1.4; stroke: var(--shade); opacity: .55; }
.line:hover, .line.best { stroke-width: 3; opacity: 1; }
.spot { fill: var(--shade); } .bar-of { fill: var(--c0); }
td, th { font-variant-numeric: tabular-nums; text-align: left; padding: 3px 14px 3px 0; }
"""

Point = tuple[float, float]


def best_of(trials: Sequence[Any], mode: str) -> Any:
    """Returns the trial with the best value; None where none has one."""
    done = [trial for trial in trials if _is_done(trial)]
    if not done:
        return None
    return (min if mode == "min" else max)(done, key=lambda trial: trial.value)


def command_of(runs: Runs, trial: Any) -> list[str]:
    """Returns the command that trains a trial's first run again, in a new folder."""
    program, *words = runs.line(trial.params, runs.seeds[0])
    return ["python", *("python" if word == program else word for word in words)]


def write(folder: pathlib.Path, trials: Sequence[Any], runs: Runs) -> str:
    """Writes the page into the study's folder, and returns its path."""
    path = as_path(folder / PAGE)
    write_whole(path, make_page(folder.name, trials, runs))
    return str(path)


def make_page(name: str, trials: Sequence[Any], runs: Runs) -> str:
    """Draws the trials of a study as one page that needs nothing else."""
    best, done = best_of(trials, runs.mode), [trial for trial in trials if _is_done(trial)]
    counts = {state: 0 for state in ("COMPLETE", "PRUNED", "FAIL", "RUNNING")}
    for trial in trials:
        counts[trial.state.name] = counts.get(trial.state.name, 0) + 1
    tiles = {
        f"best {runs.metric}": "-" if best is None else f"{best.value:.5g}",
        "in trial": "-" if best is None else str(best.number),
        "complete": str(counts["COMPLETE"]),
        "pruned": str(counts["PRUNED"]),
        "failed": str(counts["FAIL"]),
    }
    cards = []
    if best is not None:
        command = html.escape(shlex.join(command_of(runs, best)))
        cards.append(_card("The best again", f"<pre>{command}</pre>", wide=True))
        shades = _shades(done, runs.mode)
        cards += [
            _card("Best so far, over trials", _so_far(done, runs.mode, shades)),
            _card("Importance of each flag", _importance(trials, runs.mode)),
            _card("Flags of each trial, the best in bold", _parallel(trials, best, shades), True),
            _card(f"{runs.metric}, over steps", _curves(trials, best, runs, shades), wide=True),
        ]
    cards.append(_card("Trials", _table(trials, best, runs), wide=True))
    made = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    told = "".join(
        f'<div class="tile"><div class="name">{html.escape(key)}</div>'
        f'<div class="value">{value}</div></div>'
        for key, value in tiles.items()
    )
    title = html.escape(name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - jaxtrain study</title><style>{stylesheet()}{OWN_STYLE}</style></head>"
        f'<body><main><header><h1>Study {title}</h1><span class="made">{made}</span></header>'
        f'<section class="card"><div class="tiles">{told}</div></section>'
        f'<div class="grid" style="margin-top:12px">{"".join(filter(None, cards))}</div>'
        "</main></body></html>"
    )


def importance(trials: Sequence[Any], mode: str) -> dict[str, float]:
    """Returns each flag's share in what tells good trials from others, by PED-ANOVA (Watanabe et
    al. 2023, https://arxiv.org/abs/2304.10255); empty where there are too few trials."""
    import optuna

    done = [trial for trial in trials if _is_done(trial)]
    if len(done) < FEWEST:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction={"min": "minimize", "max": "maximize"}[mode])
    study.add_trials(done)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optuna.importance.get_param_importances(study, evaluator=evaluator())
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def p_value(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns the probability, by Welch's t-test, that the means of two trials' seeds are as far
    apart by chance; None where there are fewer than two of either."""
    if min(len(values), len(others)) < 2 or not np.isfinite([*values, *others]).all():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are all the same
        found = float(stats.ttest_ind(values, others, equal_var=False).pvalue)
    return None if math.isnan(found) else found


def _is_done(trial: Any) -> bool:
    return trial.state.name == "COMPLETE" and math.isfinite(trial.value)


def _shades(done: Sequence[Any], mode: str) -> dict[int, str]:
    """A colour for each trial, dark where it is good."""
    order = sorted(done, key=lambda t: t.value, reverse=mode == "max")
    return {t.number: f"var(--heat{max(1, 3 - 3 * i // len(order))})" for i, t in enumerate(order)}


def _limits(values: Sequence[float], mode: str) -> tuple[float, float]:
    best, worst = (min(values), max(values)) if mode == "min" else (max(values), min(values))
    worst = float(np.quantile(values, SHOWN if mode == "min" else 1 - SHOWN))
    low, high = sorted((best, worst))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda x: start + (min(max(x, low), high) - low) / ((high - low) or 1) * (end - start)


def _frame(
    width: int, xs: tuple[float, float], ys: tuple[float, float]
) -> tuple[str, Callable[[float], float], Callable[[float], float]]:
    """Axes with five marks, and the two scales."""
    left, right, top, bottom = EDGE
    x, y = _scale(*xs, left, width - right), _scale(*ys, HEIGHT - bottom, top)
    parts = []
    for i in range(5):
        at, value = y(v := ys[0] + i / 4 * (ys[1] - ys[0])), v
        parts.append(f'<line class="gridline" x1="{left}" x2="{width - right}" y1="{at:.1f}" ')
        parts.append(f'y2="{at:.1f}"/><text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">')
        parts.append(f"{value:.4g}</text>")
        where = xs[0] + i / 4 * (xs[1] - xs[0])
        parts.append(f'<text x="{x(where):.1f}" y="{HEIGHT - 8}" text-anchor="middle">')
        parts.append(f"{where:,.4g}</text>")
    return "".join(parts), x, y


def _svg(width: int, *parts: str) -> str:
    return f'<svg viewBox="0 0 {width} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _line(points: Sequence[Point], shade: str, title: str, *, best: bool = False) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    kind = "line best" if best else "line"
    return (
        f'<polyline class="{kind}" style="--shade:{shade}" points="{text}">'
        f"<title>{html.escape(title)}</title></polyline>"
    )


def _so_far(done: Sequence[Any], mode: str, shades: Mapping[int, str]) -> str:
    values = [trial.value for trial in done]
    keep = np.minimum.accumulate if mode == "min" else np.maximum.accumulate
    last = 4 * max(1, -(-max(trial.number for trial in done) // 4))  # marks are whole numbers
    axes, x, y = _frame(NARROW, (0, last), _limits(values, mode))
    steps: list[Point] = []
    for trial, best in zip(done, keep(values), strict=True):
        steps += [(x(trial.number), steps[-1][1])] if steps else []
        steps.append((x(trial.number), y(best)))
    spots = "".join(
        f'<circle class="spot" style="--shade:{shades[t.number]}" cx="{x(t.number):.1f}" '
        f'cy="{y(t.value):.1f}" r="4"><title>trial {t.number}: {t.value:.5g}</title></circle>'
        for t in done
    )
    return _svg(NARROW, axes, _line(steps, "var(--c1)", "best so far", best=True), spots)


def _importance(trials: Sequence[Any], mode: str) -> str:
    found = importance(trials, mode)
    if not found:
        return '<span class="made">There are too few trials to tell.</span>'
    rows, step = [], (HEIGHT - 20) / max(4, len(found))
    for i, (flag, share) in enumerate(found.items()):
        at, size = 10 + i * step, share * (NARROW - 260)
        rows.append(f'<text x="200" y="{at + step / 2 + 4:.1f}" text-anchor="end">')
        rows.append(f'{html.escape(flag)}</text><rect class="bar-of" x="208" y="{at + 5:.1f}" ')
        rows.append(f'width="{size:.1f}" height="{step - 10:.1f}" rx="3"/>')
        rows.append(f'<text x="{214 + size:.1f}" y="{at + step / 2 + 4:.1f}">{share:.0%}</text>')
    return _svg(NARROW, *rows)


def _parallel(trials: Sequence[Any], best: Any, shades: Mapping[int, str]) -> str:
    """An axis for each flag, and one for the value, which lines of pruned trials do not reach."""
    done = [trial for trial in trials if _is_done(trial)]
    flags = list(dict.fromkeys(flag for trial in done for flag in trial.params))
    parts, scales, top, bottom = [], [], 34, HEIGHT - 20
    for i, flag in enumerate([*flags, "value"]):
        at = 80 + i * (WIDE - 160) / len(flags)
        there = [t.value if i == len(flags) else t.params[flag] for t in done]
        kind = None if i == len(flags) else best.distributions[flag]
        if hasattr(kind, "choices"):
            names = [str(choice) for choice in kind.choices]
            places = _scale(0, max(1, len(names) - 1), bottom, top)
            scale = lambda v, p=places, n=names: p(n.index(str(v)))  # noqa: E731
            marks = [(name, scale(name)) for name in names]
        else:
            to = np.log10 if getattr(kind, "log", False) else float
            ends = (min(there), max(there)) if kind is None else (kind.low, kind.high)
            places = _scale(float(to(ends[0])), float(to(ends[1])), bottom, top)
            scale = lambda v, p=places, t=to: p(float(t(v)))  # noqa: E731
            marks = [(f"{end:.4g}", scale(end)) for end in ends]
        scales.append((at, scale))
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="14" text-anchor="middle">{html.escape(flag)}</text>')
        for text, y in marks:
            parts.append(f'<text x="{at + 6:.1f}" y="{y + 4:.1f}">{html.escape(text)}</text>')
    for trial in sorted(trials, key=lambda t: (_is_done(t), t is best)):
        if trial.params.keys() < set(flags):
            continue
        values = [trial.params[flag] for flag in flags]
        values += [trial.value] if _is_done(trial) else []
        points = [(at, scale(v)) for (at, scale), v in zip(scales, values, strict=False)]
        shade = "var(--c1)" if trial is best else shades.get(trial.number, "var(--faint)")
        parts.append(_line(points, shade, _titled(trial), best=trial is best))
    return _svg(WIDE, *parts)


def _curves(trials: Sequence[Any], best: Any, runs: Runs, shades: Mapping[int, str]) -> str:
    order = sorted(trials, key=lambda t: (t.number not in shades, t is not best, t.number))
    drawn = []
    for trial in order[:CURVES]:
        series = runs.series(runs.run_dir(trial.number, runs.seeds[0]))
        points = downsample(series, POINTS)
        if len(points["x"]) > 1:
            drawn.append((trial, points))
    if not drawn:
        return ""
    steps = [float(x) for _, points in drawn for x in points["x"]]
    values = [float(y) for _, points in drawn for y in points["y"]]
    axes, x, y = _frame(WIDE, (min(steps), max(steps)), _limits(values, runs.mode))
    lines = []
    for trial, points in reversed(drawn):
        at = [(x(float(a)), y(float(b))) for a, b in zip(points["x"], points["y"], strict=True)]
        shade = "var(--c1)" if trial is best else shades.get(trial.number, "var(--faint)")
        lines.append(_line(at, shade, _titled(trial), best=trial is best))
    return _svg(WIDE, axes, *lines)


def _titled(trial: Any) -> str:
    value = "" if trial.value is None else f" at {trial.value:.5g}"
    return f"trial {trial.number}: {trial.state.name.lower()}{value}"


def _table(trials: Sequence[Any], best: Any, runs: Runs) -> str:
    sign, repeated = (1 if runs.mode == "min" else -1), len(runs.seeds) > 1

    def rank(trial: Any) -> tuple:
        complete = trial.state.name == "COMPLETE"
        return not complete, sign * trial.value if complete else trial.number

    flags = list(dict.fromkeys(flag for trial in trials for flag in trial.params))
    more = ["of seeds", "p against the best"] if repeated else []
    head = ["trial", "state", runs.metric, *more, *flags, "folder, or why it failed"]
    rows = []
    for trial in sorted(trials, key=rank):
        values = trial.user_attrs.get(VALUES, [])
        row = [trial.number, trial.state.name.lower()]
        row.append("" if trial.value is None else f"{trial.value:.5g}")
        if repeated:
            p = None if trial is best or best is None else p_value(best.user_attrs[VALUES], values)
            row += [", ".join(f"{v:.4g}" for v in values), "" if p is None else f"{p:.2g}"]
        row += [trial.params.get(flag, "") for flag in flags]
        row.append(trial.user_attrs.get(WHY) or runs.run_dir(trial.number, runs.seeds[0]).name)
        rows.append("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row))
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def _card(title: str, body: str, wide: bool = False) -> str:
    if not body:
        return ""
    kind = "card wide" if wide else "card"
    return (
        f'<section class="{kind}"><div class="head"><h2>{html.escape(title)}</h2></div>{body}'
        "</section>"
    )
