"""The loop and the run around it."""

import base64
import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain import data
from jaxtrain.build import make_abstract_state
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.folder import next_free
from tests import problems

ROWS = 64


class Rows:
    """Rows of the shared problem, by index."""

    def __init__(self, seed: int = 0):
        self.batch = problems.make_batch(seed, rows=ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {name: value[index] for name, value in self.batch.items()}


def make_experiment(steps=12, **changes):
    batches = data.Batches(Rows(), global_batch=8, seed=0)
    experiment = jt.Experiment.of(
        name="toy",
        init_fn=problems.init,
        loss_fn=problems.noisy_loss,
        optimizer=jt.make_optimizer(
            "adamw", jt.schedules.cosine(1e-2, warmup_steps=2, total_steps=12), accumulate=3
        ),
        batch=batches.shapes,
        train_batches=lambda start, sharding: batches.stream(start, sharding=sharding),
        eval_batches=lambda sharding: data.eval_batches(Rows(1), 8, sharding=sharding),
        steps=steps,
        items_per_step=8,
        item="rows",
        config={"answer": 42},
        files={"notes.txt": "kept"},
    )
    return experiment.with_(**problems.with_layout(changes))


def lines(run_dir):
    """The lines of a run's log."""
    return [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]


def losses(run_dir):
    """The training losses in a run's log, by step."""
    return {x["step"]: x["train/loss"] for x in lines(run_dir) if "train/loss" in x}


def test_the_loop_dispatches_a_step_before_it_reads_the_metrics_of_the_one_before():
    events = []

    class Value:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            events.append(f"read {self.step}")
            return 0.0

    @dataclasses.dataclass
    class State:
        step: int

    def train(state, batch):
        events.append(f"dispatch {batch}")
        return State(state.step + 1), {"loss": Value(batch)}

    state = jt.train_loop(train, State(0), iter([1, 2, 3]), steps=3)
    assert state.step == 3
    assert events == ["dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3"]


def test_hooks_see_every_step_and_every_metric_once():
    seen = []

    class Record(jt.Hook):
        def on_step(self, step, state):
            seen.append(("step", step, int(state.step)))

        def on_metrics(self, step, metrics):
            seen.append(("metrics", step, type(metrics["loss"])))

    optimizer = optax.sgd(0.1)
    state = jt.init_state(problems.init, optimizer, jax.random.key(0))
    train = jax.jit(jt.build_train_step(problems.loss_fn, optimizer))
    state = jt.train_loop(
        train, state, iter([problems.make_batch()] * 3), steps=3, hooks=[Record()]
    )
    assert [s for s in seen if s[0] == "step"] == [("step", i, i) for i in (1, 2, 3)]
    assert [s for s in seen if s[0] == "metrics"] == [("metrics", i, float) for i in (1, 2, 3)]


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_batches_that_end_too_early_lose_no_metrics(steps_per_call):
    seen = []

    class Record(jt.Hook):
        def on_metrics(self, step, metrics):
            seen.append((step, metrics["loss"]))

    def train(state, given):
        numbers = [given] if steps_per_call == 1 else given
        loss = np.float32(given) if steps_per_call == 1 else np.array(numbers, np.float32)
        return dataclasses.replace(state, step=state.step + len(numbers)), {"loss": loss}

    state = dataclasses.make_dataclass("State", ["step"], frozen=True)(0)
    with pytest.raises(ValueError, match="the batches ended after 3 steps and `steps` is 9: give"):
        jt.train_loop(
            train, state, [1, 2, 3], steps=9, steps_per_call=steps_per_call, hooks=[Record()]
        )
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.0)][: 3 if steps_per_call == 1 else 2]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_metrics_that_are_arrays_reach_hooks_logs_and_evaluations(tmp_path, steps_per_call):
    def loss_fn(params, batch, rng):
        loss = problems.loss_fn(params, batch, rng)
        highest = jt.Max(batch["x"].reshape(-1, 4, 2).max(0))
        return dataclasses.replace(loss, metrics={"columns": batch["x"].sum(0), "highest": highest})

    class Record(jt.Hook):
        def on_metrics(self, step, metrics):
            assert metrics["columns"].shape == (problems.INPUTS,)
            assert isinstance(metrics["loss"], float)

        def on_evaluation(self, step, means):
            self.means = means

    hook = Record()
    experiment = make_experiment(4, loss_fn=loss_fn, steps_per_call=steps_per_call)
    options = jt.RunOptions(run_dir=str(tmp_path), log_every=1)
    result = jt.fit(experiment, options, hooks=[hook])
    with experiment.data.train_batches(0, None) as batches:
        for line in [x for x in lines(tmp_path) if "train/loss" in x]:
            batch = next(batches)
            expected = batch["x"].sum(0) / batch["mask"].sum()
            np.testing.assert_allclose(line["train/columns"], expected, rtol=1e-5)
            assert line["train/highest"] == batch["x"].reshape(-1, 4, 2).max(0).tolist()
    held_out = problems.make_batch(1, ROWS)
    expected = held_out["x"].sum(0) / held_out["mask"].sum()
    for means in (result.evaluation, hook.means):
        np.testing.assert_allclose(means["columns"], expected, rtol=1e-5, atol=1e-6)
    (evaluated,) = [x for x in lines(tmp_path) if "eval/loss" in x]
    assert evaluated["eval/columns"] == hook.means["columns"].tolist()
    assert set(Checkpointer(tmp_path / "checkpoints").metrics()) == {"eval/loss"}
    options = jt.RunOptions(run_dir=str(tmp_path / "b"))
    with pytest.raises(ValueError, match=r"`best_metric` 'columns' has shape \(8,\)"):
        jt.fit(experiment.with_(best_metric="columns"), options)


def test_a_run_leaves_logs_checkpoints_and_its_config(tmp_path, capsys):
    run = tmp_path / "run"
    options = jt.RunOptions(run_dir=str(run), log_every=5, eval_every=4, save_every=4, keep=1)
    experiment = make_experiment()

    @dataclasses.dataclass(frozen=True)
    class Shows(jt.Hook):
        _log: list = dataclasses.field(default_factory=list)  # a name that any hook may have

        def on_evaluation(self, step, means):
            self._log.append(step)
            self.show(step, {"hook/red": np.full((2, 3, 3), [255, 0, 0], np.uint8)})

    hook = Shows()
    result = jt.fit(experiment, options, hooks=[hook])
    hook.on_evaluation(13, {})  # Outside of a run it shows nothing.
    assert hook._log == [4, 8, 12, 13]
    (picture,) = (run / "pictures").iterdir()
    assert picture.name == "hook-red.png"
    assert base64.b64encode(picture.read_bytes()).decode() in (run / "report.html").read_text()
    (board,) = (run / "tensorboard").iterdir()
    assert board.read_bytes().count(b"hook/red") == 3  # once for each evaluation
    assert repr(experiment) == "Experiment('toy', 12 steps of 8 rows, seed 0)"
    assert repr(result.state) == "TrainState(step=12, 416 parameters)"
    assert repr(result).startswith(f"FitResult(run_dir='{run}', TrainState(step=12, 416 ")
    assert len(repr(result)) < 500
    config = json.loads((run / "config.json").read_text())
    provenance = config.pop("provenance")
    assert config == {"answer": 42}
    assert (provenance["seed"], provenance["mesh"]) == (0, "data 8: 8 x cpu")
    assert provenance["versions"]["jax"] == jax.__version__
    assert Checkpointer(run / "checkpoints").config()["provenance"] == provenance
    assert (run / "notes.txt").read_text() == "kept"
    assert any((run / "tensorboard").iterdir())
    logged = lines(run)
    train = {line["step"]: line for line in logged if "train/loss" in line}
    assert sorted(train) == [5, 10, 12]
    for name in ("loss", "learning_rate", "grad_norm", "param_norm", "update_norm", "skipped"):
        assert np.isfinite(train[10][f"train/{name}"]), name
    assert train[10]["time/rows_per_second"] > 0
    assert train[10]["time/step_seconds"] > 0
    assert "time/mfu" not in train[10]
    assert [line["step"] for line in logged if "eval/loss" in line] == [4, 8, 12]
    with Checkpointer(run / "checkpoints", best_metric="eval/loss") as checkpoints:
        assert checkpoints.latest_step() == 12
        best = min((line["eval/loss"], line["step"]) for line in logged if "eval/loss" in line)[1]
        assert checkpoints.best_step() == best
        assert set(checkpoints.steps()) == {best, 12}
    held_out = problems.make_batch(1, ROWS)
    loss, _, _ = problems.reference(jax.device_get(result.state.params), held_out)
    assert result.evaluation["loss"] == pytest.approx(loss, rel=1e-5)
    printed = capsys.readouterr().out
    facts = ("parameters", "8 rows", "data 8", "float32 parameters", "held-out loss", "own, seed 0")
    for words in facts:
        assert words in printed
    assert "part of no update" not in printed


@pytest.mark.parametrize("changes", [{}, {"steps_per_call": 2}], ids=["steps", "calls"])
def test_nothing_is_compiled_after_step_2(tmp_path, changes):
    compiled = []

    def listen(event, seconds, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append((latest_step(), facts.get("fun_name")))

    def latest_step():
        log = tmp_path / "run" / "log.jsonl"
        return max((line["step"] for line in lines(log.parent)), default=0) if log.exists() else 0

    # Evaluations, periodic and best checkpoints and a log line among the first steps as well as
    # after them, so that all that a run does is compiled in the beginning.
    options = jt.RunOptions(
        run_dir=str(tmp_path / "run"), log_every=1, eval_every=2, save_every=2, save_best=True
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jt.fit(make_experiment(**changes), options)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) >= 3  # the initial state, the train step, the evaluation
    assert [(step, name) for step, name in compiled if step > 2] == []


@pytest.mark.parametrize("stop", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, stop):
    whole = jt.fit(make_experiment(), jt.RunOptions(run_dir=str(tmp_path / "whole"), log_every=1))
    parts = jt.RunOptions(run_dir=str(tmp_path / "parts"), log_every=1)
    jt.fit(make_experiment(steps=stop), parts)
    resumed = jt.fit(make_experiment(), dataclasses.replace(parts, resume=True))
    assert digest(resumed.state) == digest(whole.state)
    losses, weights = (
        [
            [(x["step"], x[name]) for x in lines(tmp_path / run) if name in x]
            for run in ("whole", "parts")
        ]
        for name in ("train/loss", "train/weight")
    )
    assert losses[0] == losses[1]
    # Step n takes batch n - 1, whichever run makes it.
    batches = data.Batches(Rows(), global_batch=8, seed=0)
    expected = [(n + 1, batches.batch(n)["mask"].sum()) for n in range(12)]
    assert weights == [expected, expected]


def test_a_library_run_is_resumed_with_its_own_seed_and_batch(tmp_path):
    options = jt.RunOptions(run_dir=str(tmp_path))
    jt.fit(make_experiment(steps=2), options)
    again = dataclasses.replace(options, resume=True)
    for changes, words in (
        ({"seed": 1}, r"had seed 0 \(now 1\)"),
        ({"fingerprints": {"text": "b"}, "seed": 2}, "had seed"),
        (
            {"batch": {k: v for k, v in make_experiment().data.batch.items() if k != "mask"}},
            "had batch",
        ),
        # Each microbatch draws whole, and not row by row.
        ({"accumulate": 2}, r"had microbatches 1 \(now 2\): leave"),
        ({"accumulate": 2, "loss_fn": problems.loss_fn, "seed": 1}, r"had seed 0 \(now 1\): leave"),
    ):
        with pytest.raises(ValueError, match=words):
            jt.fit(make_experiment(**changes), again)
    (tmp_path / "config.json").unlink()  # the checkpoint has one too
    with pytest.raises(ValueError, match="had seed"):
        jt.fit(make_experiment(seed=1), again)


def test_a_run_resumes_on_another_mesh(tmp_path):
    options = jt.RunOptions(run_dir=str(tmp_path))
    jt.fit(make_experiment(steps=6), options)
    whole = jt.fit(make_experiment(), jt.RunOptions(run_dir=str(tmp_path / "whole")))
    elsewhere = make_experiment(mesh={"data": 2, "fsdp": 4}, zero=1)
    resumed = jt.fit(elsewhere, dataclasses.replace(options, resume=True))
    for a, b in zip(
        jax.tree.leaves(resumed.state.params), jax.tree.leaves(whole.state.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_runs_are_numbered_and_the_newest_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = jt.fit(make_experiment(steps=2))
    assert "accumulated  the last 2 steps are part of no update" in capsys.readouterr().out
    second = jt.fit(make_experiment(steps=2))
    assert (first.run_dir, second.run_dir) == ("runs/toy-1", "runs/toy-2")
    (tmp_path / "runs" / "toy-large-7").mkdir()  # of another experiment
    again = jt.fit(make_experiment(steps=3), jt.RunOptions(resume=True))
    assert again.run_dir == "runs/toy-2"
    assert next_free("toy").name == "toy-3"
    assert int(again.state.step) == 3


def test_a_run_dir_in_use_is_refused_and_overwritten_without_what_is_not_the_runs(tmp_path):
    options = jt.RunOptions(run_dir=str(tmp_path), save_every=1)
    jt.fit(make_experiment(steps=3), options)
    ours = ["notes.md", "checkpoints/1.npz", "checkpoints/best/1", "tensorboard/mine"]
    for name in ours:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds a run already: continue it with `resume`"):
        jt.fit(make_experiment(), options)
    assert Checkpointer(tmp_path / "checkpoints").latest_step() == 3
    jt.fit(make_experiment(steps=1), dataclasses.replace(options, overwrite=True))
    assert Checkpointer(tmp_path / "checkpoints").steps() == [1]
    assert [line["step"] for line in lines(tmp_path)] == [1, 1]
    assert len(list(tmp_path.glob("tensorboard/events*"))) == 1
    assert [(tmp_path / name).read_text() for name in ours] == ["mine"] * 4


def test_there_must_be_a_run_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run to resume under runs/"):
        jt.fit(make_experiment(), jt.RunOptions(resume=True))
    with pytest.raises(FileNotFoundError, match="no run to resume in"):
        jt.fit(make_experiment(), jt.RunOptions(resume=True, run_dir="empty"))
    with pytest.raises(ValueError, match="`resume` continues a run and `overwrite` deletes it"):
        jt.fit(make_experiment(), jt.RunOptions(resume=True, overwrite=True))
    with pytest.raises(ValueError, match="`resume` needs a run to continue and `auto_resume`"):
        jt.fit(make_experiment(), jt.RunOptions(run_dir="a", resume=True, auto_resume=True))


def test_a_mesh_that_does_not_fit_is_refused_before_a_folder_is_made(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="mesh data 3 needs 3 devices and there are 8"):
        jt.fit(make_experiment(mesh={"data": 3}), jt.RunOptions(run_dir=str(run)))
    assert not run.exists()


def test_the_abstract_state_of_an_experiment_is_that_of_its_state(tmp_path):
    experiment = make_experiment(mesh={"data": 2, "fsdp": 4})
    mesh = jt.make_mesh(**experiment.layout.mesh.sizes)
    shapes = make_abstract_state(experiment, mesh)
    state = jt.fit(experiment, jt.RunOptions(run_dir=str(tmp_path))).state
    assert jax.tree.map(lambda s: (s.shape, s.dtype, s.sharding), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), state
    )


def test_auto_resume_is_one_command_for_every_attempt(tmp_path):
    options = jt.RunOptions(run_dir=str(tmp_path / "run"), auto_resume=True)
    # The first attempt begins; one that ended before a checkpoint begins again.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "log.jsonl").write_text('{"step": 1}\n')
    first = jt.fit(make_experiment(6), options).state
    assert int(first.step) == 6
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert '{"step": 1}' not in lines
    # Where there is a checkpoint, it goes on.
    assert digest(jt.fit(make_experiment(12), options).state) == digest(
        jt.fit(make_experiment(12), jt.RunOptions(run_dir=str(tmp_path / "whole"))).state
    )


def test_auto_resume_takes_no_folder_that_is_no_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds files and no run"):
        jt.fit(make_experiment(), jt.RunOptions(run_dir=str(tmp_path), auto_resume=True))
    with pytest.raises(ValueError, match="`auto_resume` needs a `run_dir`"):
        jt.fit(make_experiment(), jt.RunOptions(auto_resume=True))
