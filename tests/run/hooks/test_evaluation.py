"""Evaluation sets by name, and the evaluation before the first step."""

import math
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.build import compile_eval, evaluate, make_experiment_mesh, make_state
from jaxtrain.layout import Effect
from jaxtrain.run import trained
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.hooks import evaluation
from jaxtrain.sharding.rules import batch_sharding
from tests import problems
from tests.run.test_loop import ROWS, Rows, lines, make_experiment


class Means(jt.Hook):
    def __init__(self):
        self.of = {}

    def on_evaluation(self, step, means):
        self.of[step] = means


def held_out(seed, global_batch=8):
    return lambda sharding: data.eval_batches(Rows(seed), global_batch, sharding=sharding)


def test_sets_have_means_of_their_own_and_share_programs(tmp_path, monkeypatch, capsys):
    compiled = []

    def counting(experiment, state, batch, mesh):
        compiled.append(len(batch["x"]))
        return compile_eval(experiment, state, batch, mesh)

    compile_eval = evaluation.compile_eval
    monkeypatch.setattr(evaluation, "compile_eval", counting)
    sets = {"near": held_out(1), "far": held_out(2), "wide": held_out(1, 16)}
    concluded, told = [], Means()
    experiment = make_experiment(
        4,
        optimizer=jt.make_optimizer("sgd", 0.1),
        eval_batches=sets,
        best_metric="far/loss",
        best_mode="max",  # of which step 0 has more than any that is saved
        conclude=lambda state, means: concluded.append(means) or [],
    )
    options = jt.RunOptions(run_dir=str(tmp_path), eval_first=True, eval_every=2, save_best=True)
    result = jt.fit(experiment, options, hooks=[told])

    assert compiled == [8, 16]
    final = jax.device_get(result.state.params)
    for name, seed in (("near", 1), ("far", 2), ("wide", 1)):
        loss = problems.reference(final, problems.make_batch(seed, ROWS))[0]
        assert result.evaluation[f"{name}/loss"] == pytest.approx(loss, rel=1e-5)
    assert {"near/largest", "far/half"} < result.evaluation.keys()
    assert "loss" not in result.evaluation
    assert concluded == [told.of[2]] != [result.evaluation]  # the best, and not the last
    logged = {x["step"]: x for x in lines(tmp_path) if "eval/near/loss" in x}
    assert list(logged) == list(told.of) == [0, 2, 4]
    assert all(logged[n][f"eval/{k}"] == v for n in told.of for k, v in told.of[n].items())
    far = [told.of[n]["far/loss"] for n in (0, 2, 4)]
    assert far[0] > far[1] > far[2]
    best = {"best_metric": "eval/far/loss", "best_mode": "max"}
    with Checkpointer(tmp_path / "checkpoints", **best) as checkpoints:
        assert checkpoints.best_step() == 2
    assert "step 2: held-out near/loss " in capsys.readouterr().out


def test_the_first_evaluation_is_of_the_state_before_the_first_step_and_of_no_resumed_one(tmp_path):
    class Killed(jt.Hook):
        def on_step(self, step, state):
            raise KeyboardInterrupt

    def run(*hooks):
        options = jt.RunOptions(run_dir=str(tmp_path), eval_first=True, auto_resume=True)
        return jt.fit(make_experiment(2), options, hooks=hooks)

    def evaluated():
        return [(x["step"], x["eval/loss"]) for x in lines(tmp_path) if "eval/loss" in x]

    first = make_experiment()
    params = jt.init_state(first.task.init_fn, first.optimizer, jax.random.key(0)).params
    loss = problems.reference(jax.device_get(params), problems.make_batch(1, ROWS))[0]
    with pytest.raises(KeyboardInterrupt):
        run(Killed())
    assert evaluated() == [(0, pytest.approx(loss, rel=1e-5))]
    # Nothing had been saved: it begins anew, and says so once.
    told = Means()
    result = run(told)
    assert evaluated() == [(0, pytest.approx(loss, rel=1e-5)), (2, result.evaluation["loss"])]
    assert list(told.of) == [0, 2]
    again = Means()
    experiment = make_experiment(3).with_(may_change={"*": Effect.NONE})
    options = jt.RunOptions(run_dir=str(tmp_path), eval_first=True, resume=True)
    jt.fit(experiment, options, hooks=[again])
    assert list(again.of) == [3]


def test_flags_take_held_out_rows_by_name():
    config = jt.Config(global_batch=4)
    found = config.batches_of(Rows(), {"a": Rows(1), "b": Rows(2)})["eval_batches"]
    for name, seed in (("a", 1), ("b", 2)):
        assert np.array_equal(next(iter(found[name](None)))["x"], Rows(seed).batch["x"][:4])


def mean_loss(params, batch, rng):
    return jnp.square(batch["x"] * params["blocks"]["w"].sum() - 1).mean()


def every_row_counts(params, batch, rng):
    """Each row has a weight, whatever the mask says, and so has one of zeros."""
    error = jnp.square(batch["x"] * params["blocks"]["w"].sum() - 1)
    weight = batch["x"] + 1
    metrics = {"largest": jt.Max((-batch["x"]).max()), "rows": jt.Sum(jnp.ones_like(error).sum())}
    return jt.WeightedLoss((error * weight).sum(), weight.sum(), metrics)


STAGES = jt.Stages(
    embed=lambda params, batch, rng: batch["x"],
    block=lambda layer, x, batch, rng: x + layer["w"],
    head_loss=lambda params, x, batch: jnp.square(x).mean(),
)
HELD_OUT_CASES = {
    "scalar": (mean_loss, {"data": 4}),
    "scalar, 8 devices": (mean_loss, {"data": 2, "fsdp": 4}),
    "weight of its own": (every_row_counts, {"data": 8}),
    "pipeline": (jt.loss_from_stages(STAGES), {"pipe": 2, "data": 2}),
}


@pytest.mark.parametrize("case", HELD_OUT_CASES)
def test_held_out_means_are_of_the_rows_that_there_are(case):
    loss_fn, axes = HELD_OUT_CASES[case]
    piped = {"stages": STAGES} if "pipe" in axes else {}
    layout = problems.with_layout({"mesh": axes, "pipeline": {"microbatches": 2}})
    config = jt.Config(global_batch=8, steps=1, **layout)
    rows = [{"x": np.float32(n + 1), "mask": np.float32(n % 2)} for n in range(24)]
    weights = np.array([0.01, 0.02], np.float32)

    def experiment(count):
        return config.experiment(
            "held_out",
            init_fn=lambda rng: {"blocks": {"w": jnp.asarray(weights)}},
            loss_fn=loss_fn,
            optimizer=optax.sgd(1.0),
            **config.batches_of(rows, rows[:count]),
            **piped,
        )

    mesh = make_experiment_mesh(experiment(24), jax.devices()[: math.prod(axes.values())])
    state = make_state(experiment(24), mesh)
    step = compile_eval(experiment(24), state, experiment(24).data.batch, mesh)
    for count in range(1, 25):
        batches = experiment(count).data.eval_batches[""](batch_sharding(mesh))
        means = evaluate(step, state, batches)
        x = np.arange(1.0, count + 1)
        moved = x + np.float64(weights).sum() if piped else x * np.float64(weights).sum() - 1
        each = x + 1 if loss_fn is every_row_counts else np.ones(count)
        expected = (np.square(moved) * each).sum() / each.sum()
        assert means["loss"] == pytest.approx(expected, rel=2e-6), count
        if loss_fn is every_row_counts:
            assert (means["largest"], means["rows"]) == (-1, count), count


def test_as_many_of_the_best_by_a_metric_that_is_named_are_kept(tmp_path):
    options = jt.RunOptions(
        run_dir=str(tmp_path),
        eval_every=1,
        save_best=True,
        keep=1,
        keep_best=3,
        best_metric="far/largest",
        best_mode="max",
    )
    sets = {"near": held_out(1), "far": held_out(2)}
    jt.fit(make_experiment(9, eval_batches=sets, best_metric="near/loss"), options)
    largest = {x["step"]: x["eval/far/largest"] for x in lines(tmp_path) if "eval/far/loss" in x}
    best = sorted(largest, key=lambda step: (-largest[step], step))[:3]
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == sorted({*best, 9})
    assert trained.open_checkpoints(str(tmp_path)).best_step() == best[0]


def test_what_cannot_be_evaluated_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`best_metric` is 'loss' and eval_batches has .* a/loss"):
        make_experiment(eval_batches={"a": held_out(1)})
    empty = make_experiment(
        1, eval_batches={"a": held_out(1), "b": lambda _: []}, best_metric="a/loss"
    )
    with pytest.raises(ValueError, match="there is no held-out batch to evaluate b/loss on"):
        jt.fit(empty, jt.RunOptions(run_dir=str(tmp_path), eval_first=True))
    typo = make_experiment(2, best_metric="acuracy")
    with pytest.raises(ValueError, match="is 'acuracy', and an evaluation reports loss, "):
        jt.fit(typo, jt.RunOptions(run_dir=str(tmp_path / "typo"), eval_every=1))


@pytest.mark.parametrize(
    ("asked_at", "mode"),
    [(2, "max")]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((6, "max"), (0, "min"))],
)
def test_an_evaluation_that_a_signal_interrupts_is_made_good_and_none_is_logged_twice(
    tmp_path, asked_at, mode
):
    """--save-best comes to the checkpoints and the log of the run that nobody disturbed."""
    calls = []

    def interrupted(sharding):
        calls.append(1)
        if len(calls) == max(1, asked_at // 2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        yield from held_out(1)(sharding)

    def outcome(folder):
        logged = [(x["step"], x["eval/loss"]) for x in lines(folder) if "eval/loss" in x]
        with Checkpointer(folder / "checkpoints") as checkpoints:
            steps = checkpoints.steps()
            return logged, steps, [checkpoints.metrics(step) for step in steps]

    options = {"eval_every": 2, "save_best": True, "keep": 1, "auto_resume": True}
    options["eval_first"] = asked_at == 0
    disturbed = jt.RunOptions(run_dir=str(tmp_path / "disturbed"), **options)
    experiment = make_experiment(6, best_mode=mode)
    with pytest.raises(jt.Preempted):
        jt.fit(experiment.with_(eval_batches=interrupted), disturbed)
    results = [jt.fit(experiment, disturbed) for _ in range(2)]
    calm = jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path / "calm"), **options))
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "calm")
    best = 2 if mode == "max" else 6  # the first of them, because the loss falls
    assert {result.best.step for result in (*results, calm)} == {best}
    assert {result.evaluation["loss"] for result in results} == {calm.evaluation["loss"]}
