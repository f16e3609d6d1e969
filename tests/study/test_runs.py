"""``jaxtrain runs``: SQL over folders that runs have written."""

import json

import pytest

from tests.commands import refused, run


@pytest.fixture
def folders(tmp_path):
    for i, rate in enumerate((0.1, 0.2, 0.3)):
        folder = tmp_path / f"small-{i}"
        folder.mkdir()
        flags = {"optimizer": {"learning_rate": rate}, "run": {"keep": 3}, "channels": [1, 2]}
        (folder / "config.json").write_text(json.dumps({"flags": flags}))
        lines = [{"step": s, "eval/loss": rate + 1 / s, "train/loss": "nan"} for s in (1, 2, 4)]
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(tmp_path / f"small-{i}") for i in range(3)]


def table(text):
    return [line.split() for line in text.splitlines()]


def test_runs_are_rows_and_logs_are_rows(folders, capsys):
    query = "select run, optimizer_learning_rate rate, eval_loss from runs order by eval_loss desc"
    status, out, _ = run(capsys, "runs", query, *folders)
    assert status == 0
    wanted = [[f"small-{i}", f"{r}", f"{r + 0.25:.6g}"] for i, r in ((2, 0.3), (1, 0.2), (0, 0.1))]
    assert table(out) == [["run", "rate", "eval_loss"], *wanted]
    query = "select metric, log.step, avg(value), channels, keep from log join runs using (run) "
    out = run(capsys, "runs", query + "where metric = 'eval/loss' group by 2", *folders)[1]
    numbers = [[float(row[2]), row[1], "".join(row[3:])] for row in table(out)[1:]]
    assert numbers == [[1.2, "1", "[1,2]3"], [0.7, "2", "[1,2]3"], [0.45, "4", "[1,2]3"]]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("select eval_los from runs", "no such column: eval_los: did you mean eval_loss?"),
        ("selekt 1", "the query cannot be answered"),
        ("select 1; select 2", "the query cannot be answered"),
        ("drop table runs", "cannot be answered: it is no select statement; give one"),
    ],
)
def test_what_is_no_query_is_one_sentence(query, sentence, folders, capsys):
    assert sentence in refused(capsys, "runs", query, *folders)


def test_without_folders_there_must_be_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "holds no run: name folders" in refused(capsys, "runs", "select 1")
