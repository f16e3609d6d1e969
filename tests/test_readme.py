"""The README's examples run as they stand, and its Flax models in float32 and in bf16."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.decisions import Kind
from jaxtrain.run.checkpoints.checkpointer import digest
from jaxtrain.tree import named_leaves
from tests.commands import run as command
from tests.compare.test_parity import worst

ROOT = pathlib.Path(__file__).parents[1]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


LIBRARY, PARITY, PIPELINE, MODULE = blocks("README.md")
LINEN, NNX, STATEFUL, LOOP = blocks("jaxtrain/README.md")
F32 = '"f32"'
BF16 = 'jt.Policy.bf16(cast_batch="^x$")'


def run(code, **names):
    names |= {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return names


def with_model(*blocks: str, options: str = "") -> str:
    """The library example with its model replaced by other blocks of the README."""
    imports, rest = LIBRARY.split("def init_fn", 1)
    data, train = rest.split("x = jax.random", 1)[1].split("mesh =", 1)
    assert "optimizer" not in data
    train = train.replace("mesh=mesh)\nstep", f"mesh=mesh{options})\nstep", 1)
    # Two devices: eight take longer, and show the same.
    train = train.replace("data=-1", "data=2, devices=jax.devices()[:2]", 1)
    train = train.replace("accumulate=4)", f"accumulate=4{options})", 1)
    return "\n".join([f"{imports}x = jax.random{data}", *blocks, f"mesh ={train}"])


def test_the_library_example_learns(capsys):
    run(LIBRARY)
    assert float(re.search(r"loss ([\d.]+)", capsys.readouterr().out).group(1)) < 0.1


def test_a_model_of_ones_own_is_pipelined_in_25_lines_and_trains_as_on_one_device():
    assert len(PIPELINE.splitlines()) <= 25
    names = run(PIPELINE, **run(LIBRARY.split("step =")[0]))
    loss_fn, batch, state = jt.loss_from_stages(names["stages"]), names["batch"], names["state"]
    before = jax.device_get(state)
    parts = [jax.tree.map(lambda x, i=i: x[i], batch) for i in (slice(16), slice(16, 64))]
    sums = sum((loss_fn(before.params, part, None) for part in parts), jt.WeightedLoss(0.0, 0.0))
    assert worst(sums, loss_fn(before.params, batch, None))[0] < 1e-5  # row_wise, as is declared
    (reduced,) = names["train"].findings[Kind.REDUCTION]
    assert reduced.once == ("data",)
    evaluated = names["evaluate"](state, batch)
    assert worst(evaluated, jax.jit(jt.build_eval_step(loss_fn))(before, batch))[0] < 1e-5
    step = jax.jit(jt.build_train_step(loss_fn, names["optimizer"], accumulate=8))
    expected, metrics = step(before, batch)
    found, _ = names["train"](state, batch)
    for part in ("params", "opt_state"):
        assert worst(getattr(found, part), getattr(expected, part))[0] < 1e-5, part
    assert metrics["loss"] < 0.05


def test_the_model_of_the_example_is_checked_in_three_lines(capsys):
    *settings, check = PARITY.splitlines()
    assert all(line.startswith("jax.config.update(") for line in settings)  # as conftest has them
    few = check.replace("batch)", 'batch, layouts=["data=2,fsdp=2,tensor=2"])', 1)
    run(LIBRARY.split("mesh =")[0] + few)
    assert "1 of 1 meshes agree with one device to 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        pytest.param("linen", BF16, id="linen-bf16"),
        pytest.param("nnx", F32, id="nnx-f32"),
        pytest.param("stateful", BF16, id="stateful-bf16"),
        pytest.param("linen", F32, id="linen-f32", marks=pytest.mark.slow),
        pytest.param("nnx", BF16, id="nnx-bf16", marks=pytest.mark.slow),
        pytest.param("stateful", F32, id="stateful-f32", marks=pytest.mark.slow),
    ],
)
def test_a_flax_module_learns_through_the_same_builder(form, policy, capsys):
    blocks = {"linen": [LINEN], "nnx": [LINEN, NNX], "stateful": [LINEN, NNX, STATEFUL]}[form]
    options = f", policy={policy}" + (", has_model_state=True" if form == "stateful" else "")
    names = run(with_model(*blocks, options=options))
    assert float(re.search(r"loss ([\d.]+)", capsys.readouterr().out).group(1)) < 0.1
    if policy == BF16:
        assert re.search(r"ok   0 of [56] products in float32", names["train"].report())
    state, batch = names["state"], names["batch"]
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    if form == "stateful":
        check_statistics_and_dropout(names, state, batch)


def check_statistics_and_dropout(names, state, batch):
    """The example's BatchNorm has seen what its layer made, and its dropout follows the key."""
    assert set(named_leaves(state.params)) == {
        *("up/kernel", "up/bias", "norm/scale", "norm/bias", "down/kernel", "down/bias")
    }
    assert set(named_leaves(state.model_state)) == {"norm/mean", "norm/var"}
    hidden = batch["x"] @ state.params["up"]["kernel"] + state.params["up"]["bias"]
    found = np.asarray(state.model_state["norm"]["mean"])
    np.testing.assert_allclose(found, hidden.mean(0), atol=0.2)  # the weights moved meanwhile
    assert np.abs(found).max() > 0.5

    @jax.jit
    def call(rng, kept=state.model_state):
        return names["apply"](state.params, kept, batch["x"], rng=rng)

    steps = [jax.random.fold_in(state.rng, number) for number in (1, 2)]
    one, two, off = call(steps[0])[0], call(steps[1])[0], call(None)[0]
    assert (one != two).mean() > 0.9
    assert (one != off).mean() > 0.9
    np.testing.assert_array_equal(off, call(None)[0])
    jax.tree.map(np.testing.assert_array_equal, call(None)[1], state.model_state)
    kept = state.model_state
    for _ in range(100):
        _, kept = call(steps[0], kept)
    np.testing.assert_allclose(kept["norm"]["mean"], hidden.mean(0), atol=1e-4)


def test_the_loop_of_your_own_learns_and_goes_on_where_it_was_interrupted(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = run(LIBRARY)
    whole = run(LOOP, **names)
    assert "0 of 2 products in float32" in whole["train"].report()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [25, 50, 75, 100]
    assert rows[-1]["held out"] < 0.1 * rows[0]["held out"]
    assert jt.Checkpointer(tmp_path / "checkpoints").steps() == [75, 100]
    jt.Checkpointer(tmp_path / "checkpoints").drop_after(75)
    again = run(LOOP, **names)
    assert digest(again["state"]) == digest(whole["state"])


@pytest.mark.slow
def test_a_module_of_ones_own_agrees_on_every_mesh_that_fits(tmp_path, monkeypatch, capsys):
    (tmp_path / "sine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert "\njaxtrain parity sine;" in (ROOT / "README.md").read_text()
    status, out, _ = command(capsys, "parity", "sine")
    assert status == 0
    assert "9 of 9 meshes agree" in out


def test_a_module_of_ones_own_is_trained_resumed_planned_checked_and_replayed(
    tmp_path, monkeypatch, capsys
):
    assert len(MODULE.splitlines()) <= 31
    (tmp_path / "sine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    begin = [sys.executable, "-m", "sine", "--steps", "40", "--width", "16", "--global-batch", "64"]
    begin += ["--simulate-devices", "2", "--optimizer.schedule", "constant"]
    begin += ["--optimizer.warmup-steps", "1"]
    done = subprocess.run(begin, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs/sine-1/config.json").read_text())["module"] == "sine"
    monkeypatch.syspath_prepend(tmp_path)
    import sine

    # Flags that are left out are the run's own, but for the devices, which are here already.
    more = ["--resume", "--steps", "60", "--mesh.data", "8", "--simulate-devices", "0"]
    jt.main(sine.Config, sine.build, more)
    assert "20 (1,280 rows), resumed at step 40" in capsys.readouterr().out
    lines = map(json.loads, (tmp_path / "runs/sine-1/log.jsonl").read_text().splitlines())
    losses = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert losses[60] < losses[40] < 0.3
    fast = ("--width", "32", "--optimizer.name", "sgd")
    status, out, _ = command(capsys, "plan", "sine", "--target", "cpu:2", *fast)
    assert (status, out.splitlines()[0]) == (0, "sine on cpu:2")
    monkeypatch.setenv("COLUMNS", "300")
    pipeline = "data=2,tensor=2,pipe=2,dcn_pipe=2"  # one of those that `jaxtrain parity` tries
    layouts = ("--layout", "data=2,fsdp=2", "--layout", pipeline)
    status, out, _ = command(capsys, "parity", "sine", *layouts, *fast)
    assert status == 0
    assert "does not fit: mesh axis 'pipe' has size 2" in out
    assert "1 of 1 meshes agree" in out
    step = ("--module", "sine", "--step", "41")
    assert (
        "gradients: 2 of 2 leaves are finite" in command(capsys, "replay", "runs/sine-1", *step)[1]
    )
