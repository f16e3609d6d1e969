"""``python -m experiments.studies``: what is trained by which flags, and what is said of it."""

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy import stats

from experiments import gpt
from experiments.studies import __main__ as studies
from experiments.studies import stream, sweep
from jaxtrain.run.main import load_config
from jaxtrain.run.observe.report.records import Series
from jaxtrain.study import command

LOSSES = {"plain": [2.0, 2.2, 2.1], "heavy": [1.0, 1.1, 1.05], "twin": [1.02, 1.12, 1.0]}
SMALL = sweep.Study(
    module="tests.small",
    flags="--steps 12 --sample-seconds 0",
    settings={
        "plain": "--optimizer.name sgd",
        "heavy": "--optimizer.name momentum",
        "twin": "--optimizer.name momentum --optimizer.clip-norm None",
    },
    shown={"held-out loss": "eval/loss"},
)
TURNS = {"held-out loss": "held_out", "apart": "apart", "memory": "temporary_bytes"}


def run(capsys, study, *arguments):
    """Returns the exit status, what was printed, and what was said on standard error."""
    try:
        status = sweep.main(study, "small", arguments)
    except SystemExit as stop:
        status = stop.code
    written = capsys.readouterr()
    return status, written.out, written.err


def logs(lines):
    """Stands for the workers: of every trial and seed a log is written, and its command noted."""

    def work(trials, runs, **_):
        while (claim := trials.claim()) is not None:
            values = LOSSES[claim.values["setting"]]
            for seed, value in zip(runs.seeds, values, strict=True):
                lines.append(runs.line(claim.values, seed)[2:])
                folder = runs.run_dir(claim.number, seed)
                folder.mkdir()
                text = [json.dumps({"step": s, "eval/loss": value + 1 / s}) for s in (1, 10**9)]
                (folder / "log.jsonl").write_text("\n".join(text) + "\n")
            trials.tell(claim.number, values)
        return True

    return work


def test_every_setting_is_trained_from_every_seed_and_told_with_its_spread(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("optuna")
    monkeypatch.setattr(command, "work", logs(lines := []))
    given = ["--study-dir", str(tmp_path / "study"), "--seed", "4", "--global-batch", "16"]
    status, out, err = run(capsys, SMALL, *given, "--png", str(tmp_path / "picture.png"))
    assert status == 0, err
    common = ["tests.small", "--steps", "12", "--sample-seconds", "0", *given[2:]]
    flags = [text.split() for text in SMALL.settings.values()]
    assert lines == [[*common, *own, "--seed", f"{4 + i}"] for own in flags for i in range(3)]
    for name, losses in LOSSES.items():
        spread = f"{np.mean(losses):.4f} ± {np.std(losses, ddof=1):.4f}"
        p = stats.ttest_ind(losses, LOSSES["plain"], equal_var=False).pvalue
        told = "-" if name == "plain" else f"{p:.2g}"
        assert re.search(rf"^{name} .* {re.escape(spread)} +{re.escape(told)}$", out, re.M), out
    assert (
        "The lowest held-out loss is 1.0467, of twin. Not told from it at p < 0.05: heavy." in out
    )
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    # What is there is not trained again, and another study has no place there.
    assert run(capsys, SMALL, *given)[1] in out
    assert len(lines) == 9
    assert "has flags" in run(capsys, SMALL, *given, "--steps", "9")[2]


def test_a_column_may_be_the_first_step_that_reaches_a_value():
    logged = {"eval/accuracy": Series(np.array([2, 4, 6]), np.array([0.5, 0.9, 0.8]))}
    for field, wanted in ((" >= 0.9", 4), (" >= 0.5", 2), (" >= 0.95", np.inf), ("", 0.8)):
        assert sweep._number(logged, f"eval/accuracy{field}") == wanted


@pytest.mark.slow
def test_settings_in_turn_are_measured_as_compare_does(tmp_path, capsys):
    pairs = {"one": "--accumulate 1", "two": "--accumulate 2"}
    shared = {"flags": "--steps 12 --mesh.data 1 --mesh.fsdp 8 --optimizer.name sgd"}
    study = sweep.Study(pairs, **shared, shown=TURNS, module="tests.small", seeds=2, in_turns=True)
    status, out, err = run(capsys, study, "--study-dir", str(tmp_path), "--global-batch", "32")
    assert status == 0, err
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["one"]["apart"] == [0, 0]
    assert 0 < max(found["two"]["apart"]) < 1e-5
    np.testing.assert_allclose(*(x["held-out loss"] for x in found.values()), rtol=1e-5)
    assert len(set(found["one"]["held-out loss"])) == 2
    assert len({x["memory"][0] for x in found.values()}) == 2
    assert f"{np.median(found['two']['apart']):.0e}" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--optimizer.clip_norm", "2"], "--optimizer.clip-norm is typed and is what small varies"),
        (["--seeds", "0"], "--seeds is 0: give at least 1"),
        (["--run-dir", "x"], "--run-dir is of one run, and a study starts many"),
        (["--widht", "3"], "--widht"),
    ],
)
def test_what_is_no_study_is_refused_before_anything_is_made(tmp_path, capsys, flags, sentence):
    folder = tmp_path / "study"
    status, _, err = run(capsys, SMALL, "--study-dir", str(folder), *flags)
    assert status == 2
    assert sentence in err
    assert not folder.exists()


def test_studies_are_listed_and_their_flags_are_the_experiments(capsys):
    assert studies.main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(line.split()[0] for line in listed)
    assert studies.main(["no-such"]) == 2
    assert "error: there is no study 'no-such'" in capsys.readouterr().err
    names = [line.split()[0] for line in listed]
    assert {"dropout", "finetuning", "heads", "layers", "memory", "precision"} <= set(names)


def test_what_a_model_has_and_trains_is_counted():
    def counts(*flags):
        _, config = load_config("experiments.gpt", flags, command="studies")
        return sweep._counts(config, gpt.outline(config))

    width, layers, tokens = 64, 2, 320  # 257 padded to 64
    fixed = tokens * width + layers * (2 * width + 8 * width**2) + width
    size = ("--layers", "2", "--width", "64", "--heads", "8")
    whole = counts(*size)
    assert whole["parameters"] == whole["trained"] == [fixed + layers * 4 * width**2]
    shared = counts(*size, "--kv-heads", "2")
    assert shared["parameters"] == [fixed + layers * (2 * width**2 + 2 * width * 16)]
    half = counts(*size, "--optimizer.rate-multipliers", "^embed/=0", "^blocks/=0,1")
    assert half["trained"] == [(whole["parameters"][0] - tokens * width - width) / 2 + width]
    frozen = counts(*size, "--optimizer.name", "adamw", "--optimizer.freeze", "^blocks/")
    assert frozen["trained"] == [tokens * width + width]
    assert whole["FLOPs/token"] > shared["FLOPs/token"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dropout", "finetuning", "heads", "layers", "memory", "precision"]
)
def test_a_study_at_toy_size(tmp_path, capsys, monkeypatch, name):
    pytest.importorskip("optuna")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = ["--study-dir", str(tmp_path / "study"), "--png", str(tmp_path / "picture.png")]
    given += ["--seeds", "1", "--steps", "6", "--seq-len", "32", "--global-batch", "32"]
    assert studies.main([name, *given, "--held-out-bytes", "3000"]) == 0
    out = capsys.readouterr().out
    module = studies.importlib.import_module(f"experiments.studies.{name}")
    for setting in module.STUDY.settings:
        assert re.search(rf"^{re.escape(setting)} +[\d,]+ ", out, re.M), out
    assert "nan" not in out
    assert (tmp_path / "picture.png").exists()


def test_a_study_over_axes_keeps_and_draws_the_loss_as_it_falls(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "work", logs([]))
    axes = {"steps": lambda name, logged, size, steps: steps * size}
    study = dataclasses.replace(SMALL, over=axes)
    given = ["--study-dir", str(tmp_path / "study"), "--png", str(tmp_path / "curves.png")]
    assert run(capsys, study, *given)[0] == 0
    rows = json.loads((tmp_path / "study" / sweep.RESULTS).read_text())
    size = rows["plain"]["parameters"][0]
    losses, steps = rows["plain"][sweep.CURVES][1]
    assert losses == [3.2, 2.2 + 1e-9]
    assert steps == [size, size * 10**9]
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_a_study_draws_what_it_traces_over_the_steps_below_its_columns(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("optuna")
    monkeypatch.setattr(command, "work", logs([]))
    sizes = []
    monkeypatch.setattr(sweep, "save_figure", lambda figure, path: sizes.append(figure))
    study = dataclasses.replace(SMALL, traces={"gap": "eval/loss"})
    given = ["--study-dir", str(tmp_path / "study"), "--png", str(tmp_path / "traces.png")]
    assert run(capsys, study, *given)[0] == 0
    rows = json.loads((tmp_path / "study" / sweep.RESULTS).read_text())
    assert rows["heavy"][sweep.TRACES]["gap"][1] == [[1, 10**9], [2.1, 1.1 + 1e-9]]
    below = sizes[0].subfigs[1].axes[0]
    lines = {line.get_label(): line.get_ydata().tolist() for line in below.lines}
    assert lines["heavy"] == pytest.approx([1 + np.mean(LOSSES["heavy"]), np.mean(LOSSES["heavy"])])


def test_a_stream_takes_prose_from_docstrings():
    source = 'x = """text"""\n\ndef f():\n    """About f."""\n\nclass C:\n    """About C."""\n'
    assert stream.docstrings(source) == "About f.\n\nAbout C."
    assert stream.docstrings("no python") == ""


@pytest.mark.slow
def test_a_stream_is_played_and_continued(tmp_path, monkeypatch, capsys):
    """Two days of few files: the second is prose, which the store's run is trained on."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(stream, "PROSE", (0.0, 1.0))
    monkeypatch.setattr(stream, "FILES", 20)
    for name in ("FIRST", "NEXT"):
        monkeypatch.setattr(stream, name, getattr(stream, name).replace("00", "0"))
    given = ["--study-dir", str(tmp_path / "s"), "--png", str(tmp_path / "s.png")]
    stream.main(given)
    first, second = map(json.loads, capsys.readouterr().out.splitlines()[-2:])
    assert second["promoted"]
    assert second["seen"] == second["there"] > first["seen"]
    assert second["best"]["prose"] < second["first"]["prose"] == first["best"]["prose"]
    monkeypatch.setattr(stream, "play", None)  # a day that is done is not played again
    stream.main(given)
    assert (tmp_path / "s.png").stat().st_size > 10_000
