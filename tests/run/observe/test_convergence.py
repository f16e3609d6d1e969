"""Causes of slow convergence: each is found in a run that has it, and what is advised helps."""

import dataclasses
import importlib

import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.run.main import main
from jaxtrain.run.observe.report import command, health, records
from jaxtrain.run.observe.report.convergence import Cause, diagnose
from jaxtrain.run.observe.report.records import Series
from tests import learner

QUICK = ["--log-every", "1", "--eval-every", "25", "--sample-seconds", "0"]
SGD = ["--optimizer.name", "sgd", "--optimizer.learning-rate", "0.3", "--optimizer.weight-decay"]
SGD += ["0", "--optimizer.clip-norm", "1"]
STEP = ["--optimizer.schedule", "step", "--optimizer.boundaries", "20", "--optimizer.factor"]
WATCH = ["--optimizer.watch-every", "5"]
ILL = [
    (Cause.RATE_LOW, ["--optimizer.learning-rate", "1e-3"]),
    (Cause.RATE_HIGH, ["--optimizer.learning-rate", "0.1"]),
    (Cause.RATE_HIGH, ["--optimizer.learning-rate", "1"]),
    (Cause.WARMUP_LONG, ["--optimizer.warmup-steps", "135"]),
    (Cause.RATE_ENDED, [*STEP, "1e-3"]),
    (Cause.CLIPPED, [*SGD, "--optimizer.clip-norm", "0.01"]),
    (Cause.DECAY_STRONG, ["--optimizer.weight-decay", "10"]),
    (Cause.DECAY_STRONG, [*SGD, "--optimizer.weight-decay", "0.1"]),
    (Cause.VANISHING, ["--no-residual", "--layers", "6", "--steps", "300", *SGD, *WATCH]),
    (Cause.SCALE, ["--scale", "1e5", "--precision", "fp16"]),
    (Cause.EPOCHS, ["--order", "sorted", "--rows", "960", "--steps", "120"]),
]


def train(folder, *flags, config=learner.Config, build=learner.build):
    try:
        main(config, build, [*QUICK, *flags, "--run-dir", str(folder)])
    except SystemExit as end:
        assert end.code == 78  # noqa: PT017
    return records.read([folder])[0]


def held_out(record):
    return record.values("eval/loss")[-1] if "eval/loss" in record.series else np.inf


def cut(record, step):
    """The record as it was after a step."""

    def until(each):
        kept = {name: s.steps <= step for name, s in each.items()}
        return {n: Series(s.steps[kept[n]], s.values[kept[n]]) for n, s in each.items()}

    times = until({"": record.times})[""]
    return dataclasses.replace(record, series=until(record.series), times=times)


@pytest.fixture(scope="module")
def ill(tmp_path_factory):
    flags = ["--optimizer.learning-rate", "1e-4", "--steps", "60"]
    return train(tmp_path_factory.mktemp("slow") / "ill", *flags)


@pytest.mark.slow
def test_a_rate_that_is_too_low_is_said_and_ten_times_of_it_is_better(ill, tmp_path, capsys):
    (found,) = diagnose(ill)
    assert found.cause == Cause.RATE_LOW
    assert found.flags == ("--optimizer.learning-rate", "0.001")
    updates, weights = ill.values("train/update_norm"), ill.values("train/param_norm")
    assert found.facts["path"] == pytest.approx((updates / weights).sum(), rel=1e-6)
    assert str(found) in [each.text for each in health.examine(ill)]
    assert f"diagnosis    {found}" in command.leave_report(ill.path)
    assert cli.main(["report", ill.path]) == 0
    assert f"report.html\n{found}\nspent " in capsys.readouterr().out
    well = train(tmp_path / "well", "--steps", "60", *found.flags)
    assert held_out(well) < held_out(ill)


def test_a_rate_is_not_judged_by_half_a_run_or_a_short_log_or_one_without_norms(ill):
    def causes(record, **flags):
        changed = dataclasses.replace(record, config=record.config | flags)
        return [each.cause for each in diagnose(changed)]

    assert causes(cut(ill, 30)) == [Cause.RATE_LOW]
    assert causes(cut(ill, 29)) == []
    assert causes(cut(ill, 20), steps=20) == [Cause.RATE_LOW]
    assert causes(cut(ill, 19), steps=19) == []
    less = {name: each for name, each in ill.series.items() if name != "train/update_norm"}
    assert causes(dataclasses.replace(ill, series=less)) == []
    # A model that another run has trained moves little, and may have nothing to learn.
    short = cut(ill, 20)
    assert causes(short, steps=20, init_from="runs/other") == []
    assert causes(ill, **{"population.vary": ["optimizer.learning_rate=0.1,0.2"]}) == []
    damaged = {"optimizer.name": ["?"], "optimizer.weight_decay": "?", "steps": None}
    assert causes(ill, **damaged) == [Cause.RATE_LOW]


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "flags"), ILL)
def test_an_ill_run_has_one_cause_and_its_advice_gives_a_lower_loss(tmp_path, cause, flags):
    ill = train(tmp_path / "ill", *flags)
    (found,) = diagnose(ill)
    assert found.cause == cause
    kept = [] if cause == Cause.RATE_ENDED else flags  # cosine has none of step's options
    well = train(tmp_path / "well", *kept, *(found.flags or ("--order", "drawn")))
    print(f"ILL {cause.name} {held_out(ill):.3f} {held_out(well):.3f} {found}")
    assert held_out(well) < held_out(ill)
    assert well.step >= ill.step


@pytest.mark.slow
def test_an_overfitted_model_is_stopped_at_its_best(tmp_path):
    flags = ["--rows", "256", "--steps", "300"]
    ill = train(tmp_path / "ill", *flags)
    (found,) = diagnose(ill)
    assert found.cause == Cause.OVERFIT
    well = train(tmp_path / "well", *flags, *found.flags)
    best = well.series["eval/loss"].steps[well.values("eval/loss").argmin()]
    assert best == found.facts["at"]
    assert (tmp_path / "well" / "checkpoints" / f"{best}").exists()
    assert well.values("eval/loss").min() < held_out(ill)
    assert well.stopped is not None


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_named(tmp_path):
    (found,) = diagnose(train(tmp_path / "ill", "--unused", *WATCH))
    assert (found.cause, found.facts["names"]) == (Cause.NO_GRADIENT, "unused/kernel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "flags"),
    [
        (Cause.BATCH_SMALL, ["--global-batch", "8"]),
        (Cause.BATCH_LARGE, ["--global-batch", "4096", "--steps", "5"]),
    ],
)
def test_a_batch_far_from_the_noise_scale_is_said(tmp_path, cause, flags):
    ill = train(tmp_path / "ill", *flags)
    assert diagnose(ill) == []
    told = ["noise", str(tmp_path / "ill"), "--module", "tests.learner", "--global-batch", "64"]
    assert cli.main([*told, "--microbatches", "32"]) == 0
    (found,) = diagnose(ill)
    assert found.cause == cause
    well = train(tmp_path / "well", *flags, *found.flags)
    print(f"ILL {cause.name} {held_out(ill):.3f} {held_out(well):.3f} {found}")
    assert held_out(well) < held_out(ill)


GPT = ["--layers", "2", "--width", "32", "--heads", "2", "--seq-len", "32", "--global-batch", "8"]
GPT += ["--held-out-bytes", "8000", "--sample-tokens", "0", "--steps", "200"]
BERT = [word for word in GPT if word not in ("--held-out-bytes", "8000", "--sample-tokens", "0")]
HEALTHY = [
    ("experiments.gpt", GPT),
    ("experiments.gpt", [*GPT, "--optimizer.name", "adamw"]),
    ("experiments.gpt", [*GPT, "--optimizer.learning-rate", "0.1"]),
    ("experiments.bert", BERT),
    ("experiments.vision", ["--steps", "200"]),
    ("experiments.vision", ["--steps", "100", "--model", "vit", "--optimizer.name", "adamw"]),
    ("tests.learner", WATCH),
    ("tests.learner", ["--optimizer.name", "muon"]),
    ("tests.learner", SGD),
    ("tests.learner", ["--precision", "fp16"]),
    ("tests.learner", ["--rows", "640"]),
    ("tests.learner", ["--no-residual", "--layers", "8", *WATCH]),
    ("tests.learner", ["--optimizer.weight-decay", "1"]),
    ("tests.learner", ["--optimizer.warmup-steps", "75"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "flags"), HEALTHY)
def test_nothing_is_said_of_a_healthy_run(tmp_path, module, flags):
    found = importlib.import_module(module)
    record = train(tmp_path / "run", *flags, config=found.Config, build=found.build)
    assert list(map(str, diagnose(record))) == []
    half = cut(record, record.total // 2)
    assert list(map(str, diagnose(half))) == []
