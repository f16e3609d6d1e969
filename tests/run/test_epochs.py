"""Epochs in place of steps: as many as the rows take, in the schedule too, and over a resume."""

import dataclasses
import fractions
import json
import re

import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt, vision
from jaxtrain import data
from jaxtrain.optim import make_schedule
from jaxtrain.run.main import main, parse, run_to_resume
from jaxtrain.run.options import OptimizerOptions, make_optimizer
from jaxtrain.run.provenance import flags_of
from tests import small
from tests.run.test_loop import lines


@pytest.mark.parametrize("rows", [1, 7, 30, 32, 33])
@pytest.mark.parametrize("epochs", [0.1, 1, 1.5, 2, 3])
def test_the_steps_are_the_fewest_that_read_every_row_so_often(rows, epochs):
    source, wanted = [{"x": np.zeros(1)}] * rows, fractions.Fraction(str(epochs)) * rows
    found = jt.Config(epochs=epochs, global_batch=3).of_rows(source).steps
    assert 3 * found >= wanted > 3 * (found - 1)
    assert jt.Config(global_batch=3).of_rows(source).steps == jt.Config.steps


@pytest.mark.slow
def test_a_run_of_epochs_has_their_steps_in_schedule_record_and_logs(tmp_path, capsys):
    """Of 32 rows, by 8."""
    flags = ["--log-every", "1", "--optimizer.schedule", "linear", "--optimizer.warmup-steps", "1"]
    flags += ["--optimizer.learning-rate", "0.01"]
    main(small.Config, small.build, [*flags, "--epochs", "1.5", "--run-dir", str(tmp_path / "a")])
    printed = capsys.readouterr().out
    assert re.search(r"steps +6 \(48 rows\), 1.5 epochs", printed)
    assert re.search(r"step 6/6 +epoch 1.5 +loss", printed)
    log = [x for x in lines(tmp_path / "a") if "train/loss" in x]
    assert [x["data/epoch"] for x in log] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    rate = make_schedule("linear", 0.01, total_steps=6, warmup_steps=1)
    expected = [float(rate(n)) for n in range(6)]
    assert [x["train/learning_rate"] for x in log] == pytest.approx(expected)
    kept = json.loads((tmp_path / "a" / "config.json").read_text())["flags"]
    assert (kept["steps"], kept["epochs"]) == (6, 1.5)
    capsys.readouterr()

    resume = ["--resume", "--run-dir", str(tmp_path / "a")]
    assert run_to_resume(small.Config, resume) == parse(
        small.Config, ["--epochs", "1.5", *flags, "--run-dir", str(tmp_path / "a")]
    )
    for flags in (["--epochs", "2"], ["--steps", "8"]):
        with pytest.raises(SystemExit):
            main(small.Config, small.build, [*resume, *flags])
        assert "had steps 6 (now 8)" in capsys.readouterr().err
    main(small.Config, small.build, [*resume, "--steps", "8", "--accept-changes", "steps"])
    assert lines(tmp_path / "a")[-1]["step"] == 8
    with pytest.raises(SystemExit):
        main(small.Config, small.build, [*resume, "--epochs", "2.25"])
    assert "had steps 8 (now 9)" in capsys.readouterr().err


def test_epochs_that_cannot_be_counted_are_refused():
    rows = [{"x": np.zeros(1)}] * 8
    mixture = data.Mixture(
        {"a": rows, "b": rows}, [(0, dict.fromkeys("ab", fractions.Fraction(1, 2)))]
    )
    config = jt.Config(epochs=2)
    own = make_optimizer(OptimizerOptions(), steps=config.steps)
    given = {"init_fn": dict, "loss_fn": lambda params, batch, rng: 0.0}
    unknown = {"batch": {}, "train_batches": lambda start, sharding: None}
    for refused, words in (
        (lambda: jt.Config(epochs=0), "`epochs` is 0: give a number above 0"),
        (lambda: config.of_rows(mixture), "`epochs` is 2, and how many rows one has is not known"),
        (lambda: config.experiment("x", **given, **unknown), "`epochs` is 2, and how many rows"),
        (
            lambda: config.experiment("x", **given, **config.batches_of(rows), optimizer=own),
            "`epochs` is 2 and experiment 'x' brings optimizer of its own: make them of config.of",
        ),
        (lambda: jt.Config(epochs=2, steps=9).of_rows(rows), "`epochs` is 2 and `steps` 9: give"),
        (lambda: parse(jt.Config, ["--epochs=2", "--steps", "1000"]), "`epochs` and `steps` both"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            refused()


@pytest.mark.slow
def test_the_experiments_count_their_rows(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(20):
        (folder / f"{n}.txt").write_text(f"{n} words. " * 40)
    sizes = {"layers": 1, "width": 16, "heads": 2, "seq_len": 32, "data": str(folder)}
    config = gpt.Config(epochs=0.5, **sizes)
    made = gpt.build(config)
    assert made.steps == -(-made.data.steps_per_epoch // 2)
    counted = dataclasses.replace(config, steps=made.steps)
    assert made.metadata.config["flags"] == flags_of(counted)
    made = vision.build(vision.Config(epochs=2))
    assert made.steps == -(-2 * 1437 // 128)
