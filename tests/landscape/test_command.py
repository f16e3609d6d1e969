"""The command against the run's own log, on any mesh, and what it refuses."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxtrain as jt
from jaxtrain.build import make_experiment_mesh, make_state
from jaxtrain.landscape.command import save_png
from jaxtrain.run.folder import LANDSCAPE
from jaxtrain.run.main import load_experiment
from jaxtrain.run.provenance import CONFIG
from tests import commands, problems

MODULE = "tests.small"
FLAGS = ["--steps", "6", "--optimizer.learning-rate", "0.03", "--optimizer.ema", "0.5"]
FLAGS += ["--centred"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of six steps with model state and an average of its weights, evaluated and saved every
    third."""
    folder = str(tmp_path_factory.mktemp("landscape") / "run")
    experiment = load_experiment(MODULE, [*FLAGS, "--mesh.data", "8"], command="test")
    jt.fit(experiment, jt.RunOptions(run_dir=folder, save_every=3, eval_every=3))
    return folder


def landscape(capsys, run_dir, *flags):
    """What the command prints, and what it writes down."""
    given = ["landscape", run_dir, "--module", MODULE, *flags]
    status, out, error = commands.run(capsys, *given)
    assert (status, error) == (0, "")
    with open(f"{run_dir}/{LANDSCAPE}") as file:
        return out.splitlines(), json.load(file)


def evaluations(run_dir):
    """The held-out losses that the run has logged, by step."""
    with open(f"{run_dir}/log.jsonl") as file:
        lines = map(json.loads, file)
        return {x["step"]: x["eval/loss"] for x in lines if "eval/loss" in x}


def test_the_middle_is_the_run_and_another_mesh_sees_the_same(capsys, run_dir):
    flags = ["--points", "5", "--batches", "9"]
    lines, found = landscape(capsys, run_dir, *flags)
    line = found["line"]
    assert (line["step"], line["batches"]) == (6, 4)
    assert line["coordinates"] == [-1, -0.5, 0, 0.5, 1]
    assert line["losses"][2] == pytest.approx(evaluations(run_dir)[6], rel=1e-6)
    assert lines[3].split()[:2] == ["0.00", f"{line['losses'][2]:.4f}"]
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "4", "--at-once", "2"]
    _, other = landscape(capsys, run_dir, *flags, *mesh)
    np.testing.assert_allclose(other["line"]["losses"], line["losses"], rtol=1e-5)
    assert np.ptp(line["losses"]) > 0.01


def test_a_line_between_checkpoints_ends_at_what_the_run_has_logged(capsys, run_dir):
    known = evaluations(run_dir)
    for flags, ends in (
        (["--between", "3"], [known[6], known[3]]),
        (["--step", "3", "--between", run_dir], [known[3], known[6]]),
    ):
        lines, found = landscape(capsys, run_dir, "--points", "4", *flags)
        losses = found["between"]["losses"]
        assert losses[::3] == pytest.approx(ends, rel=1e-6)
        straight = np.interp(found["between"]["coordinates"], [0, 1], ends)
        assert found["between"]["barrier"] == pytest.approx(max(losses - straight), abs=1e-6)
        assert lines[-2].startswith("barrier: ")


def test_a_plane_crosses_its_lines(capsys, run_dir):
    flags = ["--span", "0.5", "--direction-seed", "3", "--points", "3"]
    _, found = landscape(capsys, run_dir, *flags)
    lines, found = landscape(capsys, run_dir, *flags, "--two-d")
    plane = np.array(found["plane"]["losses"])
    assert plane.shape == (3, 3)
    np.testing.assert_allclose(plane[1], found["line"]["losses"], rtol=1e-6)
    assert not np.allclose(plane[:, 1], plane[1], rtol=1e-3)
    assert [len(line) for line in lines[1:4]] <= [8] * 3


@pytest.mark.slow
def test_two_processes_find_what_one_does_and_write_it_once(capfd, run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    program = [sys.executable, "-m", "jaxtrain"]
    common = ["--module", MODULE, "--points", "3", "--mesh.data", "2"]
    for flags in (["--two-d"], ["--between", "3"], ["--sharpness", "--iterations", "8"]):
        for ways, name in (([], "one"), ([*program, "launch", "--processes", "2", "--"], "two")):
            run = tmp_path / name
            shutil.copytree(run_dir, run, dirs_exist_ok=True)
            more = ["--simulate-devices", "2"] if name == "one" else []
            command = [*ways, *program, "landscape", str(run), *common, *flags, *more]
            assert subprocess.run(command, timeout=300).returncode == 0
    assert capfd.readouterr().out.count("of 4 held-out batches") == 6
    one, two = (json.loads((tmp_path / name / LANDSCAPE).read_text()) for name in ("one", "two"))
    for kind in ("plane", "between"):
        np.testing.assert_allclose(two[kind]["losses"], one[kind]["losses"], rtol=1e-5)
    values = [[x["value"] for x in found["sharpness"]["checkpoints"]] for found in (one, two)]
    np.testing.assert_allclose(*values, rtol=1e-4)
    command = ["launch", "--processes", "2", "--", *program, "compare", MODULE]
    command += ["--vary", "precision=f32,bf16"]
    assert subprocess.run([*program, *command], timeout=300).returncode == 2
    assert "takes turns in one process, and this is one of 2: start one" in capfd.readouterr().err


@pytest.mark.slow
def test_sharpness_is_the_largest_eigenvalue_of_every_checkpoint(capsys, run_dir):
    flags = ["--sharpness", "--tolerance", "1e-5", "--iterations", "60"]
    lines, found = landscape(capsys, run_dir, *flags)
    three, six = found["sharpness"]["checkpoints"]
    assert (three["step"], six["step"]) == (3, 6)
    assert three["value"] > 0
    assert len(lines) == 4
    with jt.Checkpointer(f"{run_dir}/checkpoints") as checkpoints:
        shapes = jax.eval_shape(problems.init, jax.random.key(0))
        params = checkpoints.restore_params(shapes, 6)
        like = jax.ShapeDtypeStruct((problems.INPUTS,), np.float32)
        model_state = checkpoints.restore_part({"model_state": {"mean": like}}, 6)["model_state"]
    flat, unravel = ravel_pytree(params)
    held_out = {name: x[32:] for name, x in problems.make_batch(rows=64).items()}
    held_out["x"] -= model_state["mean"]
    mean = lambda flat: problems.loss_fn(unravel(flat), held_out, None).means()["loss"]  # noqa: E731
    values = np.linalg.eigvalsh(np.float64(jax.jit(jax.hessian(mean))(flat)))
    assert six["value"] == pytest.approx(values[-1], rel=1e-4)


@pytest.mark.parametrize("kind", ["line", "plane", "between", "sharpness"])
def test_what_is_found_is_drawn_even_where_it_is_no_number(tmp_path, kind):
    pytest.importorskip("matplotlib")
    line = np.linspace(-1, 1, 5)
    losses = np.square(line) if kind != "plane" else np.add.outer(line**2, line**2)
    losses.flat[0] = np.inf
    record = {"step": 6, "coordinates": line, "losses": losses, "barrier": 0.0}
    record |= {"to": {"run": "r", "step": 3}}
    record |= {"checkpoints": [{"step": 1, "value": 2.0, "error": 0.1}]}
    save_png(kind, record, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--step", "4"], "no checkpoint of step 4 in RUN: it has 3, 6"),
        (["--between", "4"], "no checkpoint of step 4 in RUN: it has 3, 6"),
        (["--between", "/nowhere"], "no checkpoint in /nowhere: it has none"),
        (["--points", "4"], "--points is 4: give an odd number"),
        (["--points", "1"], "--points is 1: give at least 3"),
        (["--two-d", "--sharpness"], "--two-d, --between and --sharpness are three things"),
        (["--no-held-out"], "experiment 'small' has no held-out batch"),
        (["--mesh.data", "3"], "mesh data 3 needs 3 devices"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_changes_nothing(capsys, run_dir, flags, sentence):
    given = ["landscape", run_dir, "--module", MODULE, *flags]
    status, out, error = commands.run(capsys, *given)
    assert (status, out) == (2, "")
    assert error.startswith(f"error: {sentence.replace('RUN', run_dir)}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_pipeline_sees_the_same_landscape(capsys, texts, tmp_path):
    """Five layers lie in four places there, and padding beside them."""
    flags = "--layers 5 --width 16 --heads 4 --seq-len 8 --global-batch 8 --held-out-bytes 10"
    flags = [*flags.split(), "--data", str(texts)]
    experiment = load_experiment("experiments.gpt", flags, command="test")
    state = make_state(experiment, make_experiment_mesh(experiment))
    with jt.Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(0, state, config=experiment.metadata.config)
    (tmp_path / "run" / CONFIG).write_text(json.dumps(experiment.metadata.config))
    piped = "--mesh.pipe 2 --pipeline.microbatches 2"
    piped += " --pipeline.schedule interleaved --pipeline.virtual 2"
    curves, values = [], []
    for mesh in ([], piped.split()):
        given = ["landscape", str(tmp_path / "run"), "--module", "experiments.gpt", *mesh]
        assert commands.run(capsys, *given, "--points", "3")[0] == 0
        assert commands.run(capsys, *given, "--sharpness")[0] == 0
        found = json.loads((tmp_path / "run" / LANDSCAPE).read_text())
        curves.append(found["line"]["losses"])
        values.append(found["sharpness"]["checkpoints"][0]["value"])
    np.testing.assert_allclose(*curves, rtol=1e-5)
    assert values[1] == pytest.approx(values[0], rel=2e-3)
