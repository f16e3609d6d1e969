"""Skipped steps: counted, too many in a row, and the step replayed."""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt, vision
from jaxtrain import cli
from jaxtrain.host import exit_codes
from jaxtrain.run import options, replay
from jaxtrain.run.checkpoints.checkpointer import Checkpointer, digest
from jaxtrain.run.hook import Ending
from jaxtrain.run.hooks.skips import ConsecutiveSkips
from jaxtrain.run.main import main, run_to_resume
from jaxtrain.run.survive.diagnosis import Diagnosis, Diverged, diagnose
from tests import problems
from tests.commands import refused
from tests.run.survive.processes import logged
from tests.workers import poisoned

MODULE = "tests.workers.poisoned"


def config(tmp_path, **flags):
    run = {"run_dir": str(tmp_path / "run"), "log_every": 1, "save_every": 4, "keep": 100}
    run |= flags.pop("run", {})
    return poisoned.Config(run=jt.RunOptions(**run), **flags)


def run(config):
    return jt.fit(poisoned.build(config), config.run)


def test_skips_in_a_row_are_counted_from_the_metrics():
    skips = ConsecutiveSkips(3)
    good = {"loss": 1.0, "skipped": 0.0, "weight": 8.0}
    bad = {"loss": math.nan, "skipped": 2.0, "weight": 0.0}
    spike = good | {"spike": 1.0}
    for step, metrics in enumerate([bad, bad, good, bad, spike, good, spike, bad, bad, good]):
        skips.on_metrics(step, metrics)
    assert skips.ending == Ending(exit_codes.DIVERGED, 8)
    never = ConsecutiveSkips(0)
    for step in range(100):
        never.on_metrics(step, bad)
    assert never.ending is None
    for name in ("max_consecutive_skips", "hang_minutes"):
        with pytest.raises(ValueError, match=f"`{name}` is -1: give at least 0"):
            jt.RunOptions(**{name: -1})


@pytest.mark.slow
def test_fewer_skips_than_the_limit_are_survived_and_logged(tmp_path):
    flags = {"poison": (6, 7, 8, 10, 11, 12), "steps": 14}
    result = run(config(tmp_path, run={"max_consecutive_skips": 4}, **flags))
    assert int(result.state.skipped) == 12  # two microbatches each
    lines = logged(tmp_path / "run")
    assert {x["step"] for x in lines if x["train/skipped"]} == {6, 7, 8, 10, 11, 12}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.params))


@pytest.mark.slow
def test_too_many_end_the_run_with_the_leaf_and_the_command_that_replays_it(tmp_path, capsys):
    folder = tmp_path / "run"
    flags = ["--steps", "20", "--poison", *map(str, range(7, 20)), "--run-dir", str(folder)]
    flags += ["--save-every", "6", "--max-consecutive-skips", "3"]
    with pytest.raises(SystemExit) as stop:
        main(poisoned.Config, poisoned.build, flags)
    assert stop.value.code == exit_codes.DIVERGED
    assert isinstance(stop.value.__context__, Diverged)
    assert stop.value.__context__.step == 9
    error = capsys.readouterr().err
    assert error.startswith(
        "error: 3 steps in a row were skipped, up to step 9: the loss of microbatch 0 is nan, and "
        "the gradient of 'down/kernel' has 128 of 128 values that are not finite"
    )
    command = f"jaxtrain replay {folder} --module tests.workers.poisoned --step 9"
    assert error.endswith(f"run that very step again with: {command}\n")
    assert len(error.splitlines()) == 1
    # It is saved, with parameters as they were before the first of them.
    checkpoints = Checkpointer(folder / "checkpoints")
    assert checkpoints.steps() == [6, 10]
    shapes = {"params": jax.eval_shape(lambda: problems.init(jax.random.key(0)))}
    assert digest(checkpoints.restore_part(shapes, 10)) == digest(
        checkpoints.restore_part(shapes, 6)
    )

    before = sorted(str(p) for p in folder.rglob("*"))
    assert cli.main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert f"replaying steps 7 to 9 of {folder} from checkpoint 6" in printed
    for line in ("step 9, microbatch 0: loss nan", "step 9, microbatch 1: loss nan"):
        assert line in printed
    assert "parameters: 3 of 3 leaves are finite" in printed
    assert "gradients: 0 of 3 leaves are finite" in printed
    assert "  up/bias: 32 of 32 not finite" in printed
    assert sorted(str(p) for p in folder.rglob("*")) == before
    assert "--step is 21: the run has steps 1 to 20" in refused(
        capsys, *command.split()[1:-1], "21"
    )


def test_a_replayed_step_is_the_step_of_the_run(tmp_path):
    """Its loss and gradient norm are those in the log; one microbatch of step 11 is at fault."""
    run(config(tmp_path, poison_half=(11,), steps=13, run={"keep": 100}))
    lines = {line["step"]: line for line in logged(tmp_path / "run")}
    for step in (2, 13):  # from the seed, and from a checkpoint
        found = replay.replay(tmp_path / "run", step, module=MODULE)
        norm = math.sqrt(sum(x**2 for x in found.norms.values()))
        assert norm == pytest.approx(lines[step]["train/grad_norm"], rel=1e-6)
        assert found.first_not_finite() is None
    found = replay.replay(tmp_path / "run", 11, module=MODULE)
    assert np.isfinite(found.losses[0])
    assert math.isnan(found.losses[1])
    assert found.first_not_finite().startswith("the loss of microbatch 1 is nan, and the gradient")
    report = "\n".join(replay.report(found, 11))
    assert "gradients: 0 of 3 leaves are finite" in report


def test_parameters_that_are_not_finite_are_named_first():
    experiment = poisoned.build(poisoned.Config(layout=jt.Layout(accumulate=1)))
    mesh = jt.make_mesh(data=8)
    state = jt.init_state(
        experiment.task.init_fn, experiment.optimizer, jax.random.key(0), mesh=mesh
    )
    state.params["up"]["kernel"] = state.params["up"]["kernel"].at[0, 0].set(np.inf)
    found = diagnose(experiment, mesh, state, problems.make_batch())
    assert found.first_not_finite() == (
        "parameter 'up/kernel' has 1 of 256 values that are not finite"
    )


def test_model_state_is_named_where_all_else_is_finite():
    fine = {"w": (0, 4)}
    found = Diagnosis([1.0], fine, fine, {"norm/var": (2, 8)}, {"w": 1.0})
    assert found.first_not_finite() == (
        "model state 'norm/var' would get 2 of 8 values that are not finite"
    )


def test_a_folder_that_is_no_run_or_of_a_module_unknown_here_is_refused(tmp_path, capsys):
    def refuses(words, module=MODULE):
        error = refused(capsys, "replay", str(tmp_path), "--step", "1", "--module", module)
        assert words in error
        assert len(error.strip().splitlines()) == 1

    refuses("holds no run: there is no config.json in it")
    for content, words, module in (
        ("{", "config.json or changes.jsonl in", MODULE),
        ("[]", "it holds a list", MODULE),
        ('{"flags": 3}', "does not tell how to build its experiment", MODULE),
        ('{"flags": {}}', "there is no module 'no.such' here", "no.such"),
        ('{"flags": {}}', "module 'os' has no Config", "os"),
        ('{"flags": {"stops": 3}}', "Config has no field 'stops'", MODULE),
        ('{"flags": {"steps": [3]}}', "Config takes no steps [3]", MODULE),
    ):
        (tmp_path / "config.json").write_text(content)
        refuses(words, module)


def test_no_module_is_imported_because_a_runs_folder_names_it(tmp_path, capsys, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    (tmp_path / "config.json").write_text('{"module": "evil", "flags": {"run": {}}}')
    monkeypatch.chdir(tmp_path)
    wanted = "says it is of module 'evil'; name the one you trust with --module"
    assert wanted in refused(capsys, "replay", ".", "--step", "1")
    assert run_to_resume(poisoned.Config, ["--resume", "--run-dir", "."]).steps == 20
    assert "evil" not in sys.modules


def test_configs_come_back_from_their_json():
    optimizer = options.OptimizerOptions(skip_spikes=6.0, b1=0.9)
    for config in (
        poisoned.Config(poison=(3, 4), layout=jt.Layout.parse("data=2,tensor=4")),
        gpt.Config(optimizer=optimizer, layers=3, run=jt.RunOptions(run_dir="here", keep=7)),
        vision.Config(),
    ):
        plain = json.loads(json.dumps(dataclasses.asdict(config)))
        assert replay.from_plain(type(config), plain) == config
