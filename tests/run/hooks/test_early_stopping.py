"""Early stopping: where the definition says so, and at the same step after a kill."""

import dataclasses
import json
import math
import os
import signal
import time
import types

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.hooks.early_stopping import EarlyStopping
from tests import problems
from tests.run.test_loop import ROWS, lines, make_experiment


def stops_at(values, *, patience, min_change=0.0, sign=1):
    """The first evaluation, from 1, that ends so many without an improvement; by the definition."""
    best, since = math.inf, 0
    for i, value in enumerate(values, 1):
        if np.isfinite(value) and sign * value < best - min_change:
            best, since = sign * value, i
        if i - since >= patience:
            return i
    return None


def make_stopping(folder, mode="min", **options):
    run = types.SimpleNamespace(
        options=jt.RunOptions(eval_every=5, **options),
        metadata=make_experiment(best_mode=mode).metadata,
        owner=types.SimpleNamespace(path=folder),
    )
    return EarlyStopping(run)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "min_change"), [(1, 0.0), (2, 0.0), (3, 0.2), (9, 9.0)])
def test_it_ends_where_the_definition_says_whenever_it_was_killed(
    tmp_path, mode, patience, min_change
):
    rng, sign = np.random.default_rng(patience), 1 if mode == "min" else -1
    values = np.round(sign * (np.exp(-np.arange(30) / 4) + rng.normal(0, 0.1, 30)), 2)
    values[rng.integers(30, size=4)] = math.nan
    expected = stops_at(values, patience=patience, min_change=min_change, sign=sign)
    assert expected
    options = {"early_stop_patience": patience, "early_stop_min_change": min_change}
    for killed in range(expected):  # after so many evaluations, with one of an end between them
        logged = [(5 * i, float(v)) for i, v in enumerate(values[:killed], 1)]
        logged = [
            {"step": step, "eval/loss": v if math.isfinite(v) else "nan"}
            for step, v in [*logged, (5 * killed + 2, -9.0 * sign)]
        ]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in logged))
        stopping = make_stopping(tmp_path, mode, **options)
        stopping.recall(5 * killed + 3)
        assert stopping.ending(5 * killed + 3) is None
        ends = []
        for i, value in enumerate(values[killed:], killed + 1):
            stopping.on_evaluation(5 * i, {"loss": value})
            ends.append(stopping.ending(5 * i))
            if ends[-1]:
                break
        assert (i, ends[:-1]) == (expected, [None] * (expected - killed - 1))
        for more in range(1, patience + 1):  # told to go on, it has its patience anew
            stopping.on_evaluation(5 * (i + more), {"loss": math.nan})
            assert (stopping.ending(5 * (i + more)) is not None) == (more == patience)


class Killed(Exception):
    pass


class Kill(jt.Hook):
    def __init__(self, at):
        self.at = at

    def on_step(self, step, state):
        if step == self.at:
            raise Killed


def falling(folder):
    """A run whose best loss, to be as high as can be, is its first."""
    options = jt.RunOptions(
        run_dir=str(folder),
        auto_resume=True,
        eval_every=3,
        save_every=3,
        keep=1,
        early_stop_patience=2,
        early_stop_min_change=1e-3,
    )
    return make_experiment(40, best_mode="max"), options


@pytest.mark.slow
def test_a_run_killed_and_resumed_stops_early_and_names_its_best_checkpoint(tmp_path, capsys):
    experiment, options = falling(tmp_path)
    with pytest.raises(Killed):
        jt.fit(experiment, options, hooks=[Kill(7)])
    capsys.readouterr()
    concluded = []
    experiment = experiment.with_(conclude=lambda *told: concluded.append(told) or [])
    resumed = jt.fit(experiment, options)
    losses = {x["step"]: x["eval/loss"] for x in lines(tmp_path) if "eval/loss" in x}
    end = 3 * stops_at(list(losses.values()), patience=2, sign=-1)
    assert end == int(resumed.state.step) == 9
    *_, why, best = capsys.readouterr().out.splitlines()
    found = f"eval/loss did not improve on {losses[3]:#.4g} of step 3 by more than 0.001 in 2 eval"
    assert why == f"stopped      after step 9: {found}uations"
    assert best.endswith(f"/checkpoints/3, eval/loss {losses[3]:.4f}")
    assert Checkpointer(tmp_path / "checkpoints").steps() == [3, 9]
    # What is concluded, restored and generated from is the best; another start concludes alike.
    jt.fit(experiment, dataclasses.replace(options, auto_resume=False, resume=True))
    assert resumed.evaluation["loss"] == pytest.approx(losses[9])
    assert trained.open_checkpoints(str(tmp_path)).best_step() == resumed.best.step == 3
    for state, means in (*concluded, (resumed.best.restore(), resumed.best.evaluation)):
        loss, _, _ = problems.reference(jax.device_get(state.params), problems.make_batch(1, ROWS))
        assert (int(state.step), means["loss"]) == (3, pytest.approx(loss, rel=1e-5))
        assert loss == pytest.approx(losses[3], rel=1e-5)
    assert len(concluded) == 2


@pytest.mark.slow
def test_a_run_ends_alike_killed_as_it_ends_and_asked_to_stop_in_an_evaluation(tmp_path):
    experiment, options = falling(tmp_path / "whole")
    whole, end = jt.fit(experiment, options), 9
    assert int(whole.state.step) == end
    asked = []

    def interrupted(sharding):
        asked.append(1)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        yield from experiment.data.eval_batches[""](sharding)

    for name, changes, hooks, error in (
        ("killed", {}, [Kill(end)], Killed),
        ("asked", {"eval_batches": interrupted}, [], jt.Preempted),
    ):
        parts = dataclasses.replace(options, run_dir=str(tmp_path / name))
        with pytest.raises(error):
            jt.fit(experiment.with_(**changes), parts, hooks=hooks)
        logged = [x["step"] for x in lines(tmp_path / name) if "eval/loss" in x]
        assert logged[-1] == (end if name == "killed" else 3)
        resumed = jt.fit(experiment, parts)
        assert (resumed.stopped, digest(resumed.state)) == (whole.stopped, digest(whole.state))
        assert json.loads((tmp_path / name / "stopped.json").read_text())["step"] == end
    # Told to go on, it has its patience anew.
    on = jt.fit(experiment, dataclasses.replace(parts, accept_changes=("stopped",)))
    assert int(on.state.step) == end + 6


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (
            {"early_stop_patience": 2},
            {},
            "`early_stop_patience` is 2 and nothing is evaluated before the end: give",
        ),
        (
            {"early_stop_min_change": 0.1},
            {},
            "`early_stop_min_change` is 0.1, which needs",
        ),
        ({"early_stop_patience": -1}, {}, "`early_stop_patience` is -1: give at least 0"),
        (
            {"early_stop_patience": 2, "eval_every": 2},
            {"eval_batches": None},
            "`early_stop_patience` is 2 and experiment 'toy' has no eval_batches",
        ),
        (
            {"best_metric": "loss", "best_mode": "max"},
            {"eval_batches": None},
            "`best_metric` is loss and experiment 'toy' has no eval_batches",
        ),
        ({"best_metric": "loss"}, {}, "`best_metric` is 'loss' and `best_mode` None: give both"),
        ({"best_mode": "min"}, {}, "`best_metric` is None and `best_mode` 'min': give both"),
        (
            {"best_metric": "lagrest", "best_mode": "max"},
            {},
            "`best_metric` is 'lagrest', and an evaluation reports loss, half, largest: name one",
        ),
    ],
)
def test_what_cannot_stop_a_run_is_refused(tmp_path, options, changes, words):
    with pytest.raises(ValueError, match=words):
        jt.fit(make_experiment(**changes), jt.RunOptions(run_dir=str(tmp_path / "run"), **options))
    assert not (tmp_path / "run").exists()
