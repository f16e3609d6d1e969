"""Runs side by side, and whether their losses differ by more than noise."""

import json

import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.run.observe.report import figures, page, records
from tests.run.observe.test_report import data_of, line, write_run


def test_a_difference_of_losses_is_told_from_noise_that_is_correlated():
    rng = np.random.default_rng(0)
    steps, found, shifted = 400, 0, 0
    for _ in range(300):
        trend = 3 - np.log(np.arange(1, steps + 1))
        noise = np.zeros((2, steps))
        for i in range(1, steps):  # as a moving state gives: AR(1)
            noise[:, i] = 0.6 * noise[:, i - 1] + rng.normal(size=2)
        mean, half = figures.difference(trend + noise[0], trend + noise[1])
        found += abs(mean) > half
        mean, half = figures.difference(trend + noise[0], trend + noise[1] + 2)
        shifted += abs(mean) > half
    assert 0.02 < found / 300 < 0.09  # 5 %; 32 % where steps were taken for independent
    assert shifted > 290
    assert figures.difference(np.ones(39), np.zeros(39)) is None
    mean, _ = figures.difference(np.r_[np.full(60, np.nan), np.ones(60)], np.zeros(120))
    assert mean == -1
    assert figures.difference(np.r_[np.ones(60), np.full(60, np.nan)], np.ones(120)) is None


def test_a_run_that_has_diverged_is_not_called_alike(tmp_path):
    whole = write_run(tmp_path / "a", [line(i, 2.0) for i in range(1, 81)])
    spoilt = write_run(tmp_path / "b", [line(i, 2.0 if i < 50 else "nan") for i in range(1, 81)])
    (told, _) = figures.verdicts(records.read([whole, spoilt]))
    assert "cannot be told: it is not finite in 31 of the last 40 steps." in told
    partly = write_run(tmp_path / "c", [line(i, 2.0 if i != 50 else "inf") for i in range(1, 81)])
    (told, _) = figures.verdicts(records.read([whole, partly]))
    assert "over the last 40 steps that both have logged: no more than noise; 1 of them" in told


def test_time_between_attempts_is_no_time_of_theirs(tmp_path):
    ended = [
        {"attempt": 1 + i, "began": began, "first_step": 4 * i, "step": 4 * i + 4, "chips": 1}
        | {"event": "end", "seconds": {"init": 900.0, "step": 900.0}}
        for i, began in enumerate((0.0, 90_000.0))
    ]
    run = write_run(tmp_path / "a", [line(8)])
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ended))
    rows = figures.figures(records.read([run]))
    assert ["time of all attempts", "1 h"] in rows
    assert ["share of it in steps", "50.0%"] in rows
    assert ["chip-hours", "1"] in rows


def test_two_runs_stand_side_by_side_with_their_cost_at_any_price(tmp_path, capsys):
    for name, seconds, loss, chips in (("a", 0.2, 2.0, 4), ("b", 0.1, 1.5, 8)):
        more = {"time__step_seconds": seconds, "time__rows_per_second": 1 / seconds}
        more |= {"memory__peak": 2**30, "device__utilisation": 4 * seconds}
        run = write_run(tmp_path / name, [line(i, loss, **more) for i in range(1, 81)])
        forecast = {"event": "forecast", "lines": ["predicted 1 ms"]}
        ended = {"event": "end", "attempt": 1, "began": 0.0, "first_step": 0, "step": 80}
        ended |= {"seconds": {"compile": 1800.0, "step": 1800.0}, "chips": chips, "price": 9.0}
        ended |= {"sent": 1, "disk_read": 2**20, "ended": "done"}
        text = "".join(json.dumps(each) + "\n" for each in (ended, forecast))
        (run / "events.jsonl").write_text(text)
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(["report", *runs, "--price", "2", "--out", str(tmp_path / "x.html")]) == 0
    told = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
    for row in (
        "time of all attempts 1 h 1 h (+0.0%)",
        "share of it in steps 50.0% 50.0% (+0.0 points)",
        "time of a step 200.0 ms 100.0 ms (-50.0%)",
        "memory, measured 1.0 GiB 1.0 GiB (+0.0%)",
        "device utilisation 80.0% 40.0% (-40.0 points)",
        "training loss 2.0000 1.5000 (-0.5000)",
        "rows/s 5 10 (+100.0%)",
        "chip-hours 4 8 (+100.0%)",
        "cost 8 16 (+100.0%)",
        "disk read 1.0 MiB 1.0 MiB (+0.0%)",
        "The training loss of b less that of a is -0.5000 +- 0.0000 over the last 40 steps that "
        "both have logged: more than noise.",
    ):
        assert row in told
    data = data_of((tmp_path / "x.html").read_text())
    assert data["table"][0]["title"] == "Side by side"
    assert ["cost", "8", "16 (+100.0%)"] in data["table"][0]["rows"]
    assert any("more than noise" in text for text in data["told"])
    assert cli.main(["report", runs[0]]) == 0
    told = capsys.readouterr().out
    assert "spent        chip-hours 4, cost 36\n" in told
    assert "forecast     predicted 1 ms\n" in told
    with pytest.raises(SystemExit):
        cli.main(["report", runs[0], "--price", "-1"])
    # One that has logged nothing in common has no verdict of noise.
    other = write_run(tmp_path / "c", [line(200)])
    (told, _) = figures.verdicts(records.read([runs[0], other]))
    assert "0 logged steps in common are too few" in told
    assert "-0.5000" not in page.make_page(records.read([runs[0], other]))
