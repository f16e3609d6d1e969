"""Variants of an experiment in turn: each trains as it would alone, and is told apart by name."""

import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.build import compile_eval, evaluate, make_experiment_mesh, make_state
from jaxtrain.compare import command, rounding, turns
from jaxtrain.run.checkpoints.checkpointer import digest
from jaxtrain.run.main import load_experiment
from jaxtrain.sharding.rules import batch_sharding
from tests import commands

MODULE = "tests.small"


def alone(experiment, steps):
    """The losses of so many steps without anything beside, and the held-out loss after them."""
    mesh = make_experiment_mesh(experiment)
    state, losses = make_state(experiment, mesh), []
    train = jt.compile_step(
        jt.build_train_step(
            experiment.laid.loss_fn, experiment.laid.optimizer, policy=experiment.policy
        ),
        state,
        experiment.data.batch,
        mesh=mesh,
    )
    with experiment.data.train_batches(0, batch_sharding(mesh)) as stream:
        for batch in itertools.islice(stream, steps):
            state, metrics = train(state, batch)
            losses.append(float(metrics["loss"]))
    held_out = list(experiment.data.eval_batches[""](batch_sharding(mesh)))
    step = compile_eval(experiment, state, held_out[0], mesh)
    return losses, float(evaluate(step, state, held_out)["loss"])


def test_every_variant_trains_as_it_would_alone(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "140")
    vary = ["--vary", "optimizer.name=sgd,adamw", "--vary", "precision=bf16"]
    shared = ["--optimizer.learning-rate", "0.1"]
    sizes = ["--rounds", "2", "--block-steps", "2", "--out", str(tmp_path / "new")]
    status, out, _ = commands.run(capsys, "compare", MODULE, *vary, *sizes, *shared)
    assert status == 0
    found = json.loads((tmp_path / "new" / "compare.json").read_text())["variants"]
    names = [f"optimizer.name={name} precision=bf16" for name in ("sgd", "adamw")]
    assert [variant["name"] for variant in found] == names
    assert [line.split("  ")[0] for line in out.splitlines()[1:3]] == names
    assert "MFU" not in out  # the peak of a CPU is not known
    for variant in found:
        flags = [f"--{word}" for word in variant["name"].split()]
        losses, held_out = alone(load_experiment(MODULE, [*shared, *flags], command="compare"), 6)
        np.testing.assert_allclose(variant["losses"], losses, rtol=1e-5)
        assert variant["loss"] == np.mean(variant["losses"][-2:])
        assert variant["held_out"] == pytest.approx(held_out, rel=1e-5)
        ratios = np.divide(variant["step_seconds"], found[0]["step_seconds"])
        assert variant["ratio"] == pytest.approx(np.median(ratios))
        assert 0 < variant["temporary_bytes"] < variant["compiled_bytes"]
    assert found[0]["ratio"] == found[0]["cpu_ratio"] == 1


def test_variants_are_all_combinations_in_order():
    vary = ["seed=1,0", "offload_optimizer=false,true", "--mesh.data=4"]
    variants = command.make_variants(MODULE, vary, ["--seed", "7"])
    made = [(x.seed, x.layout.offload_optimizer, x.layout.mesh.data) for x in variants.values()]
    assert made == [(1, False, 4), (1, True, 4), (0, False, 4), (0, True, 4)]
    assert next(iter(variants)) == "seed=1 offload-optimizer=false mesh.data=4"


def test_variants_take_turns_and_layouts_and_calls_vary(monkeypatch):
    order, block = [], turns._Run.train_block
    monkeypatch.setattr(
        turns._Run,
        "train_block",
        lambda run, steps: order.append((run.name, len(run.losses))) or block(run, steps),
    )
    peaks = iter([5, 5, 5, 9])  # before and after each first block, the smaller program's first
    monkeypatch.setattr(turns.memory, "device_memory", lambda: {"peak": next(peaks)})
    vary = ["mesh.data=2,1", "steps-per-call=2"]
    flags = ["--optimizer.name", "sgd", "--mesh.fsdp", "1"]
    variants = command.make_variants(MODULE, vary, flags)
    experiments = dict(zip("ab", variants.values(), strict=True))
    assert [x.layout.mesh.data for x in experiments.values()] == [2, 1]
    with pytest.raises(ValueError, match=r"variant a: .*data"):  # eight devices are not two
        turns.compare(experiments, rounds=2, block_steps=2)
    first = jax.devices()[:2]
    monkeypatch.setattr(
        turns,
        "make_experiment_mesh",
        lambda e, _: make_experiment_mesh(e, first[: e.layout.mesh.data]),
    )
    a, b = turns.compare(experiments, rounds=3, block_steps=2)
    assert order[2:] == [(name, steps) for steps in (2, 4, 6) for name in "ab"]
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-6)
    assert (a.mesh, b.mesh) == ("data 2", "1 device")
    measured = [r.measured_bytes for r in sorted((a, b), key=lambda r: r.compiled_bytes)]
    assert measured == [None, 9]


def test_quartiles_and_what_is_not_known_of_a_table(capsys):
    seconds = (0.001, 0.002, 0.003, 0.004, 0.1)
    values = {f.name: 1.0 for f in dataclasses.fields(turns.Result)}
    values |= {"step_seconds": seconds, "losses": (1.0,), "name": "x=1", "rounding": {}}
    result = turns.Result(**values)
    assert result.milliseconds == pytest.approx((2, 3, 4))
    result = dataclasses.replace(result, held_out=None, measured_bytes=None, mfu=0.25)
    command.print_table([result], command.CompareOptions("mine"), item="rows")
    out = capsys.readouterr().out
    assert "25.0%" in out
    assert "rows/s" in out
    assert not {"held-out", "measured"} & set(out.split())


def test_a_parked_state_is_on_the_host_and_comes_back_as_it_was():
    experiment = load_experiment(MODULE, ["--optimizer.name", "adamw"], command="compare")
    state = make_state(experiment, make_experiment_mesh(experiment))
    parked = turns.park(state)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves((parked.params, parked.step)))
    back = jax.device_put(parked, jax.tree.map(lambda x: x.sharding, state))
    assert digest(back) == digest(state)


@pytest.mark.parametrize(("limit", "fit"), [(None, False), (160, False), (200, True)])
def test_states_stay_on_devices_that_hold_them_all_beside_the_largest_step(monkeypatch, limit, fit):
    monkeypatch.setattr(turns.memory, "device_limit", lambda: limit)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {"x": jax.ShapeDtypeStruct((10,), "float32", sharding=place)}
    runs = [
        types.SimpleNamespace(shapes=state, program=types.SimpleNamespace(memory_bytes=peak))
        for peak in (60, 100, 50)  # 40 of each are its state
    ]
    assert turns._fit_together(runs) == fit


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "there is nothing to compare: give --vary"),
        (["--vary", "precision"], "--vary 'precision' is not known: write a flag and its values"),
        (
            ["--vary", "presicion=f32"],
            "--vary presicion=f32: tests.small has no flag --presicion: did you mean --precision?",
        ),
        (["--vary", "precision=f32,f8"], "--vary precision=f8: tests.small does not take"),
        (["--vary", "simulate-devices=1,2"], "--vary simulate-devices: one process has one"),
        (["--vary", "fault=false,true"], "variant fault=true: --global-batch is too odd"),
        (["--vary", "seed=0", "--steps", "20"], "variant seed=0: 8 rounds and one before them"),
        (["--vary", "steps-per-call=1,2"], "variant steps-per-call=2: --block-steps is 5"),
        (["--vary", "mesh.tensor=1,3"], "variant mesh.tensor=3: mesh data 8 x tensor 3 needs 24"),
        (["--vary", "seed=0", "--rounds", "1"], "--rounds is 1: give at least 2"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_nothing_is_trained(
    capsys, monkeypatch, flags, sentence
):
    monkeypatch.delattr(turns._Run, "compile")
    status, out, error = commands.run(capsys, "compare", MODULE, "--mesh.data", "8", *flags)
    assert (status, out) == (2, "")
    *_, line = error.splitlines()
    assert line.startswith(f"error: {sentence}")


def test_a_variant_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"variant x=1 does not fit"), turns.naming("x=1"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError), turns.naming("x=1"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_seeds_are_pooled_and_a_mesh_has_no_rounding_to_compare(capsys):
    vary = ["precision=f32,bf16"]
    names = [f"precision={name} seed={seed}" for name in ("f32", "bf16") for seed in (3, 4)]
    assert list(command.make_variants(MODULE, vary, ["--seed", "3"], seeds=2)) == names
    shared = {
        "mesh": "",
        "mfu": None,
        "compiled_bytes": 1,
        "temporary_bytes": 1,
        "cpu_ratio": 1.0,
        "measured_bytes": None,
        "sent_bytes": None,
        "losses": (1.0,),
    }
    shared |= {"items_per_second": 1.0, "compile_seconds": 1.0, "step_seconds": (1.0, 3.0)}
    shared |= {"losses": (1.0,)}
    results = [
        turns.Result(name, ratio=i, loss=i, held_out=2.0 * i, rounding={"x": (i, 1)}, **shared)
        for i, name in enumerate(names)
    ]
    for i, found in enumerate(command.pooled(results, 2)):
        assert found.name == names[2 * i].removesuffix(" seed=3")
        assert found.step_seconds == (1.0, 3.0, 1.0, 3.0)
        each = found.ratio, found.loss, found.held_out, found.rounding
        assert each == (2 * i + 0.5, 2 * i + 0.5, 4 * i + 1, {"x": (2 * i + 0.5, 1)})
    assert command.pooled(results, 1) == results
    options = command.CompareOptions(MODULE, seeds=2)
    command.print_table(results, options, item="rows")
    command.print_rounding(command.pooled(results, 2))
    out = capsys.readouterr().out
    assert "5.0000  4.0000 to 6.0000" in out
    assert out.split("layer")[-1].split()[2:5] == ["x", "0", "50.000%"]
    flags = ["--vary", *vary, "--rounds", "2", "--block-steps", "2"]
    for more, words in (
        (["--vary", "seed=1,2", "--seeds", "2"], "--seeds is 2 and --vary has a seed too"),
        (["--rounding", "1"], "--rounding is 1 on 8 devices: gradients are compared with"),
    ):
        status, _, error = commands.run(capsys, "compare", MODULE, *flags, *more)
        assert status
        assert words in error


def test_signal_and_noise_are_by_layer_in_natural_order_however_layers_are_cut():
    stack = jt.Stack(virtual=2)
    rng = np.random.default_rng(0)
    exact, error = ({"blocks": {"w": rng.normal(size=(4, 3, 2))}} for _ in range(2))
    given = {"blocks": {"w": exact["blocks"]["w"] - 1e-2 * error["blocks"]["w"]}}
    cut = ({"blocks/w": stack.cut(x)["blocks"]["w"], "head": np.ones(2)} for x in (exact, given))
    found = rounding.signal_and_noise(*cut, stack)
    sizes = [np.linalg.norm(x["blocks"]["w"], axis=(1, 2)) for x in (exact, error)]
    expected = 20 * np.log10(sizes[0] / sizes[1]) + 40
    np.testing.assert_allclose(rounding.decibels(found["blocks/w"]), expected, rtol=1e-6)
    assert rounding.decibels(found["head"]) == np.inf


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_decibels_and_shares_are_those_of_a_models_gradients(recipe):
    from experiments import gpt

    sizes = {"layers": 2, "width": 32, "heads": 2, "seq_len": 16, "global_batch": 2, "steps": 1}
    experiment = gpt.outline(gpt.Config(precision=recipe, **sizes))
    mesh = make_experiment_mesh(experiment, jax.devices()[:1])
    state, loss = make_state(experiment, mesh), jt.loss_from_stages(experiment.laid.stages)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 17))
    shared = {"mask": np.ones((2, 16), "f"), "segments": np.ones((2, 16), int)}
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **shared}
    batch["positions"] = np.tile(np.arange(16), (2, 1))
    found = rounding.measure(experiment, state, [batch])
    exact, given = (
        jax.jit(jax.grad(lambda p, own=own: loss(own.cast_to_compute(p), batch, None).total))(
            state.params
        )
        for own in (jt.Policy(), experiment.policy)
    )
    signal, noise = np.zeros(2), np.zeros(2)
    for g, own in zip(*map(jax.tree.leaves, (exact["blocks"], given["blocks"])), strict=True):
        signal += np.square(np.asarray(g, float)).reshape(2, -1).sum(1)
        noise += np.square(np.asarray(g, float) - np.asarray(own, float)).reshape(2, -1).sum(1)
    expected = 20 * np.log10(np.sqrt(signal) / np.sqrt(noise))
    np.testing.assert_allclose(found["decibels/blocks"], expected, atol=0.5)  # rounding of bf16
    kinds = [name for name in found if name.startswith("flushed")]
    assert len(kinds) == (3 if recipe == "nvfp4" else 0)
    assert all(0 < share < 0.5 for name in kinds for share in found[name])
