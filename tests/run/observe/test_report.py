"""The report: what it reads, what it says of a run, and that a browser draws and renews it."""

import contextlib
import dataclasses
import errno
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import jaxtrain as jt
from jaxtrain import cli
from jaxtrain.run.folder import lock_run_dir
from jaxtrain.run.observe import journal
from jaxtrain.run.observe.report import (
    command,
    health,
    heat,
    landscapes,
    live,
    page,
    records,
)
from jaxtrain.run.observe.report.records import Series
from tests.commands import refused
from tests.run.observe.test_profile import HLO, write_trace
from tests.run.test_loop import make_experiment

START = 1_700_000_000.0


def write_run(folder, lines, *, config=None, end=""):
    folder.mkdir(parents=True)
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text + end)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def line(step, loss=None, **values):
    time = f"2026-01-01T00:{step // 60 % 60:02d}:{step % 60:02d}+00:00"
    return {"step": step, "time": time, "train/loss": 3 - step / 100 if loss is None else loss} | {
        name.replace("__", "/"): value for name, value in values.items()
    }


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def record_of(steps, series):
    steps = np.arange(1, steps + 1)
    return records.Record(
        path="runs/x",
        name="x",
        series={name: Series(steps, values) for name, values in series.items()},
        times=Series(steps, START + steps),
        config={"steps": int(steps[-1])},
        environment={},
        changes=[],
        unreadable=0,
    )


def test_a_hundred_thousand_steps_of_many_metrics_fit_into_two_megabytes_with_their_extremes():
    rng, n = np.random.default_rng(0), 100_000
    series = {f"train/metric{i}": rng.normal(size=n) for i in range(24)}
    series["train/loss"] = rng.normal(3, 0.1, n)
    series["train/loss"][[31_415, 80_000]] = 17.25, np.nan
    series["train/skipped"] = np.zeros(n)
    series["train/skipped"][80_000] = 1
    runs = [dataclasses.replace(record_of(n, series), name=name) for name in "abcd"]
    text = page.make_page(runs, now=START + n)
    assert len(text.encode()) < 2_000_000
    drawn = data_of(text)["runs"][2]
    loss = drawn["series"]["train/loss"]
    finite = series["train/loss"][np.isfinite(series["train/loss"])]
    assert (max(loss["hi"]), drawn["marks"]["not finite"]) == (17.25, [80_001])
    assert min(loss["lo"]) == pytest.approx(finite.min(), rel=1e-4)
    assert min(loss["lo"]) <= min(loss["y"]) <= max(loss["y"]) <= max(loss["hi"])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({}, "good"),
        ({"train/skipped": lambda x: np.where(np.arange(400) == 7, 1, 0)}, "1 update left out"),
        ({"train/spike": lambda x: (np.arange(400) % 9 == 8) * 1.0}, "44 updates left out"),
        ({"train/loss": lambda x: np.where(np.arange(400) == 7, np.nan, x)}, "not finite in 1 "),
        (
            {"train/loss": lambda x: np.where(np.arange(400) > 350, x + 0.5, x)},
            "far above its best",
        ),
        ({"train/loss": lambda x: np.linspace(3, 3.2, 400)}, "learned nothing"),
        (
            {"eval/loss": lambda x: np.where(np.arange(400) > 300, x + 0.4, x)},
            "eval/loss rises: ",
        ),
        (
            {"time/tokens_per_second": lambda x: np.where(np.arange(400) > 360, 500, 1000)},
            "50% below its median",
        ),
        ({"time/data_seconds": lambda x: x * 50}, "Waiting for data takes 50%"),
        ({"now": 400 + 600}, "Nothing has been logged for 10 min"),
    ],
)
def test_each_fault_is_named_and_a_run_without_one_is_well(what, text):
    rng, what = np.random.default_rng(1), dict(what)
    falling = 2 + 3 * np.exp(-np.arange(400) / 80) + rng.normal(0, 0.05, 400)
    series = {
        "train/loss": falling,
        "eval/loss": 2 + 3 * np.exp(-np.arange(400) / 80),
        "time/tokens_per_second": rng.normal(1000, 10, 400),
        "time/step_seconds": np.full(400, 1.0),
        "time/data_seconds": np.full(400, 0.01),
    }
    now = START + what.pop("now", 401)
    for name, change in what.items():
        series[name] = change(series.get(name))
    record = dataclasses.replace(record_of(400, series), config={"steps": 500})
    found = health.examine(record, now=now)
    if text == "good":
        assert {each.level for each in found} == {"good"}
    else:
        (fault,) = [each for each in found if each.level != "good"]
        assert text in fault.text
        assert found[0] is fault


def test_a_report_judges_by_the_levels_that_the_run_asked_its_alerts_for():
    falling = [np.linspace(8, 4.1, 50), np.linspace(4.1, 4, 150)]
    losses = np.concatenate([*falling, np.full(50, 5.5)])
    record = record_of(250, {"train/loss": losses})
    for asked, bad in ([], True), (["divergence=0.5"], False), (["divergence:off"], False):
        config = {"steps": 300, "run.alerts": asked}
        found = health.examine(dataclasses.replace(record, config=config), now=START + 250)
        assert any("far above its best" in each.text for each in found) == bad
        assert (found[0].level == "bad") == bad


def test_what_is_cut_off_not_finite_or_hostile_is_read_as_it_is(tmp_path, capsys):
    config = {"flags": {"steps": 9, "data": "</script><script>alert(1)</script>"}}
    lines = [line(1), line(2, "nan", train__load=[1.0, 2.0]), "no json\n", line(3, 2.5)]
    run = write_run(tmp_path / "a", lines, config=config, end='{"step": 4, "train/lo')
    assert cli.main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    path, causes = capsys.readouterr().out.splitlines()
    assert path == str(run / "report.html")
    assert causes == "Nothing in the log says why training would be slower than it could be."
    assert text.count("</script>") == 2
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg", "", text)
    data = data_of(text)
    loss = data["runs"][0]["series"]["train/loss"]
    assert (loss["y"], data["steps"][loss["x"]]) == ([2.99, 2.5], [1, 3])
    told = " ".join(each["text"] for each in data["runs"][0]["findings"])
    assert "1 line of the log is damaged" in told
    assert "not finite in 1 logged step, first in step 2" in told


def test_what_is_no_run_is_refused_and_an_empty_log_is_said(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for folder in ("texts", "nowhere"):
        assert "holds no run" in refused(capsys, "report", str(tmp_path / folder))
    assert "name the folder of a run" in refused(capsys, "report")
    empty = write_run(tmp_path / "empty", [])
    (record,) = records.read([empty])
    assert [each.text for each in health.examine(record)] == ["Nothing has been logged yet."]
    with pytest.raises(ValueError, match="named twice"):
        records.read([empty, empty])


def test_a_run_leaves_its_report_and_its_curves_where_it_has_any(tmp_path, monkeypatch):
    short = write_run(tmp_path / "short", [line(i) for i in range(1, command.CURVE)])
    long = write_run(tmp_path / "long", [line(i) for i in range(1, command.CURVE + 1)])
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        for run in (short, long):
            assert command.leave_report(run) == [f"report       {run}/report.html"]
    pytest.importorskip("matplotlib")
    assert len(command.leave_report(short)) == 1
    assert command.leave_report(long)[1:] == [f"curves       {long}/report.png"]
    assert (long / "report.png").read_bytes().startswith(b"\x89PNG")
    assert lock_run_dir(long, overwrite=True).path
    assert not (long / "report.png").exists()


def test_runs_side_by_side_show_what_differs_first(tmp_path):
    runs = [
        write_run(tmp_path / name / "r", [line(1)], config={"flags": {"steps": 5, "rate": rate}})
        for name, rate in (("a", 0.1), ("b", 0.2))
    ]
    data = data_of(page.make_page(records.read(runs)))
    assert [run["name"] for run in data["runs"]] == ["a/r", "b/r"]
    _, table = data["table"]
    assert (table["differ"], table["rows"]) == (1, [["rate", "0.1", "0.2"], ["steps", "5", "5"]])


def test_a_clock_that_is_set_back_and_damaged_records_leave_a_page(tmp_path):
    times = [f"2026-01-01T0{hour}:00:00+00:00" for hour in (1, 3, 2, 5)]
    lines = [line(i, 2.0) | {"time": t} for i, t in enumerate(times, 1)]
    run = write_run(tmp_path / "a", [*lines, lines[1] | {"train/loss": 7.0}])
    part = dict.fromkeys(("layers", "parameters", "optimizer_state", "kept"), 1)
    part |= {"name": "w", "gradients": math.inf}
    told = [{"event": {}}, {"event": "ready", "memory": {"peak": 9, "parts": [part]}}]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    state = {"attempt": 1, "began": START, "first_step": 0, "step": 4, "time": START}
    state |= {"seconds": {"step": math.inf}, "step_times": {"3": 1, "9" * 12: 1}}
    (run / "heartbeat.json").write_text(json.dumps(state))
    (drawn,) = data_of(page.make_page(records.read([run])))["runs"]
    assert drawn["series"]["hours"]["y"] == [0, 2, 2, 4]
    assert drawn["series"]["train/loss"]["y"] == [2, 7, 2, 2]  # a later line of a step counts
    assert (drawn["memory"], drawn["goodput"], drawn["histogram"]["counts"]) == (None, [], [1])


def test_a_page_has_the_pictures_that_fit(tmp_path):
    run = write_run(tmp_path / "<a>", [line(1)])
    (run / "pictures").mkdir()
    for name, size in (("a.png", page.PICTURE_BYTES), ("b.png", 3), ("c.txt", 3)):
        (run / "pictures" / name).write_bytes(b"x" * size)
    text = page.make_page(records.read([run]))
    assert re.findall('<img alt="(.*?)" src="(.*?)">', text) == [
        ("&lt;a&gt;: b", "data:image/png;base64,eHh4")
    ]


def test_a_heartbeat_of_the_future_is_no_sign_of_life(tmp_path):
    run = write_run(tmp_path / "a", [line(1)])
    (run / "heartbeat.json").write_text(json.dumps({"time": START + 7200, "step": 1}))
    findings = health.examine(*records.read([run]), now=START)
    (text,) = [x.text for x in findings if x.level == "look" and "heartbeat" in x.text]
    assert "is 2 h ahead of this clock: set the clocks" in text


def test_a_folder_that_takes_no_report_is_named_with_the_way_out_and_keeps_no_part(
    tmp_path, capsys, monkeypatch
):
    run = write_run(tmp_path / "run", [line(1), line(2)])

    def fails(path, data):
        with open(path, "wb") as file:
            file.write(data[:10])
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    files = sorted(run.iterdir())
    monkeypatch.setattr(type(epath.Path(run)), "write_bytes", fails)
    message = refused(capsys, "report", str(run))
    assert f"'{run}/report.html' cannot be written (Read-only file system)" in message
    assert "name another file with --out" in message
    pytest.importorskip("matplotlib")
    message = refused(capsys, "report", str(run), "--png", str(run / "r.png"))
    assert message.strip() == f"error: Read-only file system: '{run}/r.png'"
    assert sorted(run.iterdir()) == files


# An event of each kind that a page or a report speaks of.
EVENTS = [
    {"event": journal.READY, "step": 0, "facts": {"model": "m"}, "memory": {"peak": 9}},
    {"event": journal.CHECKPOINT, "step": 2, "seconds": 1.0, "bytes": 3},
    {"event": journal.ALERT, "rule": "stall", "step": 2, "text": "x"},
    {"event": journal.TRACE, "first": 1, "last": 2},
    {"event": journal.SAVE_FAILED, "error": "e"},
    {"event": journal.CHECKPOINT, "step": 3, "seconds": 1.0, "bytes": 3},
    {"event": journal.FROM_MEMORY, "step": 3, "newest_checkpoint": 2},
    {"event": journal.FORECAST, "lines": ["a"]},
    {"event": journal.TRACKER, "tracker": "t", "written": 1, "dropped": 2, "why": "w"},
    {"event": journal.CONCLUSION, "lines": ["a"]},
    {
        "event": journal.END,
        "ended": "done",
        "of_attempt": 1,
        "began": 1.0,
        "first_step": 0,
        "step": 3,
    }
    | {"seconds": {"step": 1.0}, "step_times": {"3": 1}, "chips": 2, "watts": 3, "price": 2.0},
]


@pytest.mark.parametrize("wrong", [None, [], {}, [None], "x", 10**400, -1, True, "left out"])
def test_what_a_hand_has_edited_leaves_a_page(tmp_path, wrong):
    def spoiled(entries, *names):
        if wrong == "left out":
            return {k: x for k, x in entries.items() if k not in names}
        return entries | dict.fromkeys(names, wrong)

    flags = {"steps": 3, "run": {"alerts": ["stall"]}, "population": {"exploit_every": 2}}
    values = {"train/members/parent": [0, 1], "train/members/loss": [1.0, 2.0]}
    logs = [line(step) | values for step in (1, 2, 3)]
    logs[1:1] = [spoiled(logs[1], name) for name in logs[1]]
    for name, config, change in (
        ("flags", spoiled({"flags": flags}, "flags"), {}),
        ("entries", {"flags": spoiled(flags, *flags)}, {}),
        ("change", {"flags": flags}, {"from_step": 1, "changes": {"steps": [1, 2]}}),
        ("record", {"flags": flags}, {"record": {"flags": spoiled(flags, "steps")}}),
    ):
        run = write_run(tmp_path / name, logs, config=config)
        events = [spoiled(event, *(event.keys() - {"event"})) for event in EVENTS]
        events += [spoiled(event, key) for event in EVENTS for key in event]
        (run / "events.jsonl").write_text("".join(json.dumps(x) + "\n" for x in events))
        (run / "changes.jsonl").write_text(json.dumps(spoiled(change, *list(change)[:1])) + "\n")
        (run / "heartbeat.json").write_text(json.dumps(spoiled({"time": START}, "time", "ended")))
        (record,) = records.read([run])
        command._causes(record), command._spent(record), live.table([record])
        (drawn,) = data_of(page.make_page([record]))["runs"]
        assert drawn["series"]["train/loss"]["y"][-1] == 2.97, name


def test_alerts_are_marked_and_told_and_charts_are_of_what_is_measured(tmp_path):
    more = {"run__alerts": 1, "host__cpu": 0.5, "host__cpu_process": 3, "host__process_memory": 2e9}
    more |= {"train__of_process": 4.0, "train__of_memory": 5.0}  # a model's own, and so no other
    run = write_run(tmp_path / "a", [line(1, **more), line(2, **more)])
    told = [
        {
            "event": "alert",
            "rule": "stall",
            "step": 2,
            "text": "<b>",
            "time": "2026-01-01T00:00:02+00:00",
        }
    ]
    told += [{"event": "alert", "step": "x"}, {"event": "checkpoint", "step": None}]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    drawn = data_of(page.make_page(records.read([run])))
    (of,) = drawn["runs"]
    assert (of["marks"]["alert"], of["checkpoints"]) == ([2], [])
    assert of["events"][0] == ["2026-01-01 00:00:02", "", "", "alert stall in step 2: <b>"]
    charts = {chart["title"]: chart for chart in drawn["charts"]}
    own = {"Of process", "Of memory"}
    assert charts.keys() == {"Loss", "Host cpu", "Host process memory"} | own
    assert all("unit" not in charts[title] for title in own)
    assert charts["Host process memory"]["unit"] == "bytes"


def test_memory_is_told_by_part_against_what_was_measured(tmp_path):
    kinds = ("parameters", "optimizer_state", "gradients", "layers", "kept")
    parts = [
        {"name": f"p{i}", **dict(zip(kinds, (30 - i, 2, 1, 0, 3), strict=True))} for i in range(20)
    ]
    run = write_run(tmp_path / "a", [line(1, memory__peak=3000.0), line(2, memory__peak=2000.0)])
    for told in ({"peak": 2500, "parts": "none"}, {"peak": 2500, "parts": parts}):
        (run / "events.jsonl").write_text(json.dumps({"event": "ready", "memory": told}) + "\n")
        drawn = data_of(page.make_page(records.read([run])))["runs"][0]
        tile = next(tile for tile in drawn["tiles"] if tile["name"] == "memory peak")
        if told["parts"] == "none":
            assert (drawn["memory"], tile["note"]) == (None, "")
    memory = drawn["memory"]
    assert tile["note"] == "compiled for 2.4 KiB"
    assert memory["parts"][0] == ["p0", 0, 30, 2, 1, 3]
    assert memory["parts"][-1] == ["5 more", 0, sum(range(11, 16)), 10, 5, 15]
    assert len(memory["parts"]) == page.MEMORY_PARTS
    assert memory["rest"] == 2500 - sum(range(11, 31)) - 6 * 20
    assert (memory["peak"], memory["measured"]) == (2500, 3000.0)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_run_tells_what_its_layers_keep_for_the_backward_pass(tmp_path, steps_per_call):
    layers, rows, width = 6, 8, 128

    def loss_fn(params, batch, rng):
        def block(x, w):
            with jax.named_scope("blocks"):
                return x @ w, None

        x = jnp.tile(batch["x"], (1, width))[:, :width]
        return jnp.square(jax.lax.scan(block, x, params["blocks"]["w"])[0]).mean()

    init_fn = lambda rng: {"blocks": {"w": jax.random.normal(rng, (layers, width, width))}}  # noqa: E731
    given = {"init_fn": init_fn, "loss_fn": loss_fn, "mesh": {"data": 2, "fsdp": -1}}
    given |= {"optimizer": jt.make_optimizer("adamw", 1e-3), "steps_per_call": steps_per_call}
    jt.fit(make_experiment(2, **given), jt.RunOptions(str(tmp_path)))
    drawn = page._memory(records.read([tmp_path])[0])
    (blocks,) = [part for part in drawn["parts"] if part[0] == "blocks"]
    # Of every layer what goes into its product, for the gradient of its kernel.
    assert blocks[-1] == layers * rows // 8 * width * 4


def test_of_a_landscape_what_is_sound_is_drawn(tmp_path):
    path = tmp_path / "landscape.json"
    assert landscapes.found(tmp_path) == []
    path.write_text("{")
    assert landscapes.found(tmp_path) == []
    line = {"step": 4, "coordinates": [-1, 0, 1], "losses": [3.1234567, 2, None]}
    sharpness = {"checkpoints": [{"step": 2, "value": 5.5}, {"step": 4, "value": None}]}
    between = line | {"to": {"run": "r", "step": 2}, "barrier": 0.25}
    kept = {"line": line, "plane": line, "between": between, "sharpness": sharpness}
    path.write_text(json.dumps(kept))
    a, b, c = landscapes.found(tmp_path)
    assert (a["title"], a["y"]) == ("Held-out loss around checkpoint 4", [3.1235, 2, None])
    assert (b["by"], b["x"]) == ("barrier 0.25", [-1, 0, 1])
    assert (c["x"], c["y"]) == ([2, 4], [5.5, None])
    for damage in ({"losses": [1]}, {"losses": ["x", 1, 2]}, {"step": None}, {"losses": 3}):
        path.write_text(json.dumps({"line": line | damage}))
        assert landscapes.found(tmp_path) == []


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def test_a_heat_map_has_the_largest_norm_of_each_cell_and_marks_what_has_no_logarithm(tmp_path):
    rng, n, layers = np.random.default_rng(0), 1000, 100
    norms = 10.0 ** rng.uniform(-4, 2, (n, layers))
    norms[500:, 7] = 0.0
    norms[123, 3] = np.inf
    lines = [
        line(
            step, **{"train/grad_norm/blocks": row, "train/grad_norm/head": step, "train/w": [1, 2]}
        )
        for step, row in enumerate(norms.tolist(), start=1)
    ]
    lines[123]["train/grad_norm/blocks"][3] = "inf"
    lines[200] |= {"train/grad_norm/blocks": ["what"], "train/update_ratio/blocks": [[1.0]]}
    norms[200] = 0.0
    run = records.read([write_run(tmp_path / "a", lines)])[0]
    (drawn,) = heat.maps(run, runs=1)
    assert (drawn["title"], drawn["rows"]) == ("Gradient norm", [("blocks", layers), ("head", 0)])
    ends = np.array(drawn["x"])
    assert 100 < len(ends) <= heat.COLUMNS
    assert ends[-1] == n
    for layer in range(layers):
        parts = np.split(norms[:, layer], ends[:-1])
        for cell, part in zip(drawn["cells"][layer], parts, strict=True):
            largest = part.max()
            if largest == 0:
                assert cell == heat.ZERO
            elif np.isfinite(largest):
                assert cell == pytest.approx(100 * np.log10(largest), abs=0.51)
            else:
                assert (cell, layer) == (heat.NOT_FINITE, 3)
    assert drawn["cells"][layers][-1] == 300
    text = page.make_page([dataclasses.replace(run, name=name) for name in "abcd"])
    assert len(text.encode()) < 500_000
    data = data_of(text)
    assert not any("norm" in name for name in data["runs"][0]["series"])


class _Drawn(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.paths, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        if tag == "path":
            self.paths.append(dict(attributes)["d"])

    def handle_data(self, data):
        self.text += data


def browse(url, *flags):
    """What a page is after its script has run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *flags, "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to draw the page")
def test_a_browser_draws_every_chart(tmp_path):
    runs = [
        write_run(
            tmp_path / name,
            [
                # The last is constant, but for the rounding of what smoothes it.
                line(i, train__grad_norm=1 / i, time__step_seconds=0.1, train__part=0.98)
                | {"train/grad_norm/blocks": [1 / i, 0, "nan"], "train/grad_norm/head": 2.0}
                for i in range(1, 40)
            ]
            + [line(40, eval__loss=2.5)],
        )
        for name in "ab"
    ]
    part = {"name": "w", "layers": 2, "parameters": 512, "optimizer_state": 0, "gradients": 512}
    part["kept"] = 1024
    lines = {"XLA Ops": [("%fusion.2 = f32[2]", 0, 3000), ("%adam = f32[2]", 4000, 5000)]}
    lines["XLA Modules"] = [("jit_step(7)", 0, 5000)]
    folder = runs[0] / "tensorboard/plugins/profile/steps-3-3"
    write_trace(folder, lines, plane="/device:TPU:0", hlo=HLO)
    for run in runs:
        state = {"attempt": 1, "began": START, "first_step": 0, "step": 40, "time": START}
        memory = {"peak": 4096, "parts": [part]}
        (run / "events.jsonl").write_text(json.dumps({"event": "ready", "memory": memory}) + "\n")
        state |= {"seconds": {"step": 30.0, "compile": 10.0}, "step_times": {"-54": 30, "-50": 9}}
        (run / "heartbeat.json").write_text(json.dumps(state))
    around = {"step": 40, "coordinates": [-1, 0, 1], "losses": [3, 2, None]}
    plane = around | {"losses": [[2, 3, 4]] * 3}
    text = json.dumps({"line": around, "plane": plane, "between": 3, "sharpness": {}})
    (runs[0] / "landscape.json").write_text(text)
    out = tmp_path / "page.html"
    out.write_text(page.make_page(records.read(runs)))
    done = browse(f"file://{out}")
    drawn = _Drawn()
    drawn.feed(done)
    assert "NaN" not in "".join(drawn.paths)
    lines = [d for d in drawn.paths if d.count("L") >= 38]
    # Loss, norm and part as they are and smoothed; step time.
    assert len(lines) == 2 * (2 + 2 + 2 + 1)
    for title in (
        "Loss",
        "Gradient norm",
        "Seconds per step",
        "Step time",
        "2 runs",
        "75%",
        "blocks 0",
        "not finite",
        "A step, in steps-3-3 of a",
        "block/mlp3 µs60.0%",
        "mlp 3 µs",
        "Held-out loss around checkpoint 40 · arandom direction",
        "two random directions, 2 to 4",
        "w (2 layers)2 KiBwhat comes and goes2 KiBpeak, by the compiler4 KiB",
    ):
        assert title in drawn.text


@contextlib.contextmanager
def served(look, every=5.0):
    with live.serve(look, 0, every) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_runs_that_go_on_are_shown_in_the_terminal(tmp_path, capsys):
    for name, loss in (("good", None), ("bad", "nan")):
        write_run(tmp_path / name, [line(1), line(2, loss)], config={"flags": {"steps": 2}})
    (tmp_path / "texts").mkdir()
    assert cli.main(["watch", str(tmp_path), "--terminal", "--once"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^bad +2/2 ", out, re.MULTILINE)
    assert re.search(r"^good +2/2 +2\.980 .*█▁ *$", out, re.MULTILINE)  # the mean of both lines
    verdicts = out.split("\n\n")[1]
    assert verdicts.startswith("bad: The loss is not finite in 1 logged step, first in step 2.")
    assert cli.main(["watch", str(tmp_path / "good"), "--terminal", "--once"]) == 0
    assert "steps 1 to 2, loss 2.980 to 2.990" in capsys.readouterr().out
    for flags, words in (
        ([str(tmp_path / "texts")], "holds none"),
        ([str(tmp_path / "good"), "--every", "0"], "--every is 0"),
        ([str(tmp_path / "good"), "--port", "70000"], "--port is 70000"),
    ):
        assert words in refused(capsys, "watch", *flags)


def test_the_page_of_a_run_that_goes_on_is_served_anew_and_nothing_else_is(tmp_path):
    run = write_run(tmp_path / "run", [line(1), line(2)])

    def steps():
        data = data_of(urllib.request.urlopen(url).read().decode())
        return data["every"], data["steps"][-1]

    with served(lambda: records.read(live.runs_in([str(run)])), every=2.5) as url:
        assert url.startswith("http://127.0.0.1:")
        assert steps() == (2.5, [1, 2])
        with (run / "log.jsonl").open("a") as log:
            log.write(json.dumps(line(3)) + "\n")
        assert steps() == (2.5, [1, 2, 3])
        foreign = urllib.request.Request(url, headers={"Host": "example.org:80"})
        for other in (f"{url}log.jsonl", f"{url}../run/log.jsonl", f"{url}/etc/passwd", foreign):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(other)
        run.rename(tmp_path / "moved")
        with pytest.raises(urllib.error.HTTPError, match="503") as failed:
            urllib.request.urlopen(url)
        assert "is no run's folder" in failed.value.read().decode()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to draw the page")
def test_an_open_page_shows_what_is_logged_meanwhile(tmp_path):
    run = write_run(tmp_path / "run", [line(i) for i in range(1, 30)])
    looks = []

    def look():
        if looks:  # The page is open: the run goes on between two looks.
            with (run / "log.jsonl").open("a") as log:
                log.write(json.dumps(line(29 + len(looks))) + "\n")
        looks.append(1)
        return records.read([run])

    with served(look, every=5.0) as url:
        done = browse(url, "--virtual-time-budget=22000")
    drawn = _Drawn()
    drawn.feed(done)
    assert len(looks) >= 4
    curve = next(d for d in drawn.paths if d.count("L") == 27 + len(looks))
    assert "NaN" not in curve
    assert f"step{28 + len(looks)}" in drawn.text
    assert "not renewed: jaxtrain" not in drawn.text
