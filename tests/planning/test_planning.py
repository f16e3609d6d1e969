"""Plans: what they add up to, what they refuse, and what the command prints."""

import dataclasses
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

import jaxtrain as jt
from experiments import gpt as experiment_gpt
from jaxtrain.experiment import Experiment
from jaxtrain.host import chips
from jaxtrain.layout import Layout, MeshShape
from jaxtrain.planning import ahead_of_time, comparison, estimate, nearest_fit, targets
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.targets import parse_target
from jaxtrain.run.options import OptimizerOptions
from jaxtrain.state import local_bytes
from tests import problems
from tests.commands import run
from tests.planning import steps

FLAGS = "--layers 2 --width 16 --heads 2 --seq-len 16 --optimizer.name sgd --mesh.fsdp 2"


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """Memory and communication are settled before machine code is written."""
    quick = functools.partial(ahead_of_time.compile_step, compiler_options=steps.FAST)
    monkeypatch.setattr(ahead_of_time, "compile_step", quick)


SMALL = experiment_gpt.Config(
    layers=2,
    width=16,
    heads=2,
    seq_len=16,
    global_batch=64,
    optimizer=OptimizerOptions(name="sgd"),
    layout=Layout(mesh=MeshShape(data=8)),
)


def small(**changes) -> Experiment:
    changes = problems.with_layout(changes, SMALL.layout)
    return experiment_gpt.outline(dataclasses.replace(SMALL, **changes))


def load_small(flags) -> Experiment:
    return experiment_gpt.outline(tyro.cli(experiment_gpt.Config, args=flags, default=SMALL))


def test_changes_go_from_the_nearest_to_the_farthest():
    changes = nearest_fit._changes(small(remat="none"), parse_target("v5e:2x4"))
    found = [(change, target.name) for change, target in itertools.islice(changes, 9)]
    here, wide = "v5e:2x4", {"mesh.fsdp": 8, "mesh.data": 1}
    assert found == [
        ({"accumulate": 2}, here),
        ({"accumulate": 4}, here),
        ({"zero": 1}, here),
        ({"remat": "full"}, here),
        (wide, here),
        (wide | {"remat": "full", "accumulate": 8}, here),
        # Rows are split, and a device has twice as many, half as long.
        (wide | {"mesh.context": 2, "mesh.fsdp": 4, "remat": "full", "accumulate": 16}, here),
        (wide | {"mesh.fsdp": 16}, "v5e:4x4"),
        (wide | {"mesh.fsdp": 16, "remat": "full"}, "v5e:4x4"),
    ]


def test_microbatches_are_as_many_as_the_rows_of_a_device_allow():
    experiment = small(remat="none", accumulate=2, global_batch=32)
    changes = nearest_fit._changes(experiment, parse_target("v5e:2x4"))
    assert [change for change, _ in itertools.islice(changes, 2)] == [{"accumulate": 4}] * 2


def test_the_command_prints_json_and_saves_the_program(capsys, tmp_path):
    saved = tmp_path / "step.hlo"
    status, out, _ = run(
        capsys,
        *("plan", "experiments.gpt", "--target", "cpu:8", "--json", "--save-hlo", str(saved)),
        *("--tokens", "1e9"),
        *FLAGS.split(),
    )
    assert status == 0
    plan = json.loads(out)
    memory = plan["memory"]
    parts = ("parameters", "optimizer_state", "other_state", "batch", "activations", "temporaries")
    assert sum(memory[part] for part in parts) == memory["peak"]
    # 16 rows over data 4 x fsdp 2, five arrays of 4 bytes.
    assert memory["batch"] == 2 * 16 * 5 * 4
    assert plan["mesh"] == {"data": 4, "fsdp": 2}
    assert (plan["fits"], plan["roofline"], plan["mfu_ceiling"]) == (True, None, None)
    assert plan["cost"] == {}  # The time of a step on a CPU is not known.
    assert {tuple(row["axes"]) for row in plan["traffic"]} == {
        ("data",),
        ("fsdp",),
        ("data", "fsdp"),
    }
    assert saved.read_text().startswith("HloModule jit_step")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--target v9:2x2", "names no chip that is known: use v4:4x4x4, v5e:4x4"),
        ("--target cpu:8 --mesh.tensor 3", "does not divide 2 heads and 2 key-value heads"),
        ("--target cpu:8 --mesh.fsdp 3", "mesh data -1 x fsdp 3 needs 3 devices and there are 8"),
        ("--target cpu:8 --global-batch 12", "is not divisible by mesh axes data of size 8"),
        ("--target cpu:8 --global-batch 0", "--global-batch is 0: give a number from 1"),
        ("--target h100:1x8 --slices 2", "only TPU targets have slices"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_status_2(capsys, flags, sentence):
    status, out, err = run(capsys, "plan", "experiments.gpt", *flags.split())
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["v5e:2x2", "h100:8"])
def test_a_missing_compiler_is_one_line_that_installs_it(monkeypatch, text):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    targets._devices.cache_clear()
    with pytest.raises(ValueError, match=r"pip install -e '\.\[aot\]'"):
        parse_target(text).devices()


@pytest.mark.parametrize("version", ["12", "13"])
def test_the_compiler_of_either_cuda_will_do(monkeypatch, version):
    only = f"jax_cuda{version}_plugin"
    monkeypatch.setattr(targets.importlib.util, "find_spec", {only: only}.get)
    asked = []
    monkeypatch.setattr(targets, "_describe", lambda target, **how: asked.append(how) or ())
    targets._devices.cache_clear()
    parse_target("h100:8").devices()
    targets._devices.cache_clear()
    assert [how["platform"] for how in asked] == ["cuda"]


def test_simulated_devices_need_no_preparation():
    """In a process of its own, where nothing has set the number of CPU devices."""
    code = (
        "from jaxtrain.planning.targets import parse_target as p\nprint(len(p('cpu:5').devices()))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "5\n", done.stderr


PLAN_THEN_TRAIN = """
import os, sys
import jax, jax.numpy as jnp
from jax.extend import backend
from jaxlib import xla_client

# A chip that JAX prefers to the CPU, of three devices.
make = lambda: xla_client.make_cpu_client(num_devices=3)
backend.register_backend_factory("abacus", make, priority=900)
import jaxtrain as jt
from jaxtrain.planning import targets

targets.has_tpu = lambda: "tpu" in sys.argv
shape = jax.ShapeDtypeStruct((4,), jnp.float32)
step = lambda state, batch: (state, batch + state.sum())
jt.plan(step, shape, shape, target="cpu:2", mesh={"data": 2})
print(len(jax.devices()), jax.config.jax_platforms, "TPU_LOG_DIR" in os.environ)
"""


@pytest.mark.parametrize("here", ["tpu", "none"])
def test_a_process_that_has_planned_trains_on_its_own_chips(here):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "TPU"))}
    done = subprocess.run(
        [sys.executable, "-c", PLAN_THEN_TRAIN, here],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3", "None", str(here == "none")], done.stderr


def test_an_outline_compiles_to_the_step_that_trains(tmp_path):
    """The same program, with the text and without it."""
    (tmp_path / "a.txt").write_text("A text. " * 400)
    config = experiment_gpt.Config(
        layers=1, width=16, heads=2, seq_len=16, data=str(tmp_path), layout=SMALL.layout
    )
    whole, outline = experiment_gpt.build(config), experiment_gpt.outline(config)
    assert whole.data.batch == outline.data.batch
    assert (whole.task.flops_per_step, whole.layout) == (
        outline.task.flops_per_step,
        outline.layout,
    )
    programs = []
    for experiment in (whole, outline):
        step = jt.build_train_step(experiment.laid.loss_fn, experiment.laid.optimizer)
        state = jt.abstract_state(experiment.laid.init_fn, experiment.laid.optimizer)
        programs.append(jax.jit(step).lower(state, experiment.data.batch).as_text())
    assert programs[0] == programs[1]
    with pytest.raises(ValueError, match="built without its data"):
        outline.data.train_batches(0, None)


def test_a_trained_tokenizer_is_planned_by_its_size():
    config = experiment_gpt.Config(tokenizer="32000")
    assert experiment_gpt.outline(config).metadata.config["model"]["vocab_size"] == 32000


def test_a_step_of_ones_own():
    mesh = jt.make_mesh(data=2, fsdp=4)
    optimizer = jt.make_optimizer("adamw", 1e-3)

    def loss_fn(params, batch, rng):
        error = jnp.tanh(batch["x"] @ params["w"]) - batch["y"]
        return jt.WeightedLoss(total=jnp.square(error).sum(), weight=jnp.float32(len(error)))

    state = jt.init_state(
        lambda rng: {"w": jnp.ones((32, 8))}, optimizer, jax.random.key(0), mesh=mesh
    )
    batch = {"x": np.ones((16, 32), np.float32), "y": np.ones((16, 8), np.float32)}
    step = jt.build_train_step(loss_fn, optimizer)
    plan = jt.plan(step, state, batch, target="cpu:8")
    assert plan.memory.parameters == local_bytes(state.params) == 32 * 8 * 4 // 4
    assert plan.memory.batch == 16 * 40 * 4 // 8
    # x @ w, and w's gradient x^T @ d: x needs none.
    assert plan.flops.total == 2 * (2 * 16 * 32 * 8)
    assert plan.mesh == {"data": 2, "fsdp": 4}
    assert max(len(line) for line in plan.report().splitlines()) <= 100
    assert json.dumps(plan.to_json())
    assert str(plan) == plan.report()
    assert repr(plan).startswith("<Plan of step on cpu:8: fits=True, ")
    other = jt.plan(step, state, batch, target="cpu:8", mesh={"data": 8})
    assert other.mesh == {"data": 8}
    with pytest.raises(ValueError, match="lies on no mesh"):
        jt.plan(step, jax.device_get(state), batch, target="cpu:8")


def test_a_plan_names_what_it_cannot_count():
    def step(state, batch):
        return state, jnp.linalg.qr(batch)[1]

    shape = jax.ShapeDtypeStruct((8, 4, 4), jnp.float32)
    plan = jt.plan(step, jnp.ones(()), shape, target="cpu:1", mesh={"data": 1})
    assert plan.flops.total > 0
    assert "FLOPs of qr are not known: counted as one" in plan.report()


MODULE = """
import dataclasses
import jax, jax.numpy as jnp, jaxtrain as jt

@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 8

def build(config):
    shape = jax.ShapeDtypeStruct((8, config.width), jnp.float32)
    return jt.Experiment.of(
        name="own", batch={"x": shape}, steps=1, train_batches=None, layout=jt.Layout.parse(""),
        init_fn=lambda rng: {"w": jnp.ones(config.width)}, optimizer=jt.make_optimizer("sgd", 0.1),
        loss_fn=lambda params, batch, rng: jt.WeightedLoss(
            (batch["x"] @ params["w"]).sum(), jnp.float32(8)),
    )
"""


def test_a_module_without_mesh_flags(capsys, tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    status, _, err = run(capsys, "plan", "own_module", "--target", "cpu:8")
    assert status == 2
    assert "'own' is made for 1 devices and its Config has no layout" in err
    status, out, _ = run(capsys, "plan", "own_module", "--target", "cpu:1")
    assert (status, "own on cpu:1" in out) == (0, True)


def test_the_nearest_layout_is_written_as_flags(monkeypatch):
    # Whatever is planned fits.
    monkeypatch.setattr(nearest_fit, "plan_experiment", lambda *_: types.SimpleNamespace(fits=True))
    box = Box(monkeypatch, 2**40).target
    found = [nearest_fit.nearest_fit(small(global_batch=rows), box)[0] for rows in (64, 8)]
    assert found == ["--accumulate 2", "--zero 1"]


class Box:
    """The simulated devices, with as much memory as a test gives them."""

    def __init__(self, monkeypatch, memory):
        chip = dataclasses.replace(chips.CHIPS["cpu"], memory_bytes=memory)
        self.target = targets.Target("cpu:8", chip, (8,))


@pytest.mark.slow
def test_what_does_not_fit_says_what_is_missing_and_what_would_do(monkeypatch):
    experiment = small()
    whole = plan_experiment(experiment, parse_target("cpu:8"))
    finer = plan_experiment(small(accumulate=2), parse_target("cpu:8"))
    assert finer.memory.needed < whole.memory.needed
    box = Box(monkeypatch, (finer.memory.needed + whole.memory.needed) // 2).target
    plan = plan_experiment(experiment, box)
    assert not plan.fits
    assert plan.shortage == whole.memory.needed - box.chip.memory_bytes
    assert f"{plan.shortage:,} bytes" in plan.report()
    change, found = nearest_fit.nearest_fit(small(), box)
    assert change == "--accumulate 2"
    assert found.fits
    assert nearest_fit.describe((change, found)).startswith("--accumulate 2 (compiled: ")
    nothing = Box(monkeypatch, 1000).target
    monkeypatch.setattr(nearest_fit, "_larger", lambda target: iter(()))
    monkeypatch.setattr(
        nearest_fit, "plan_experiment", None
    )  # the state alone says no: none is compiled
    assert nearest_fit.nearest_fit(small(), nothing) is None


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (16.75G) exceeds available HBM (15.75G).",
            2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.00G of 15.75G hbm. "
            "Exceeded hbm capacity by 1.25G.",
            5 * 2**28,
        ),
        ("RESOURCE_EXHAUSTED: something else", 0),
    ],
)
def test_a_compilers_refusal_becomes_a_shortage(monkeypatch, message, missing):
    def refuse(*args, **options):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(ahead_of_time, "compile_step", refuse)
    plan = plan_experiment(small(), parse_target("cpu:8"))
    assert (plan.fits, plan.shortage, plan.memory) == (False, missing, None)
    assert f"{missing:,} bytes" in plan.report() or missing == 0
    assert json.dumps(plan.to_json(), allow_nan=False)


def test_a_verdict_is_never_lost_to_a_text_or_a_trace_that_is_new(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: "a new way of writing")

    def fail(*_, **__):
        raise KeyError("new_axes")

    monkeypatch.setattr(estimate, "estimate_traced", fail)
    plan = plan_experiment(small(), targets.parse_target("cpu:8"))
    assert (plan.fits, plan.roofline, plan.traffic) == (True, None, None)
    report = " ".join(plan.report().split())
    assert "communication is not known: its text was not understood" in report
    assert "time is not predicted: its trace was not understood (KeyError: 'new_axes')" in report


def test_of_a_program_that_xla_cannot_print_the_traffic_is_not_known(monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
    plan = plan_experiment(small(), targets.parse_target("cpu:8"))
    assert plan.fits
    assert plan.memory.parameters > 0
    assert plan.traffic is None
    report = plan.report()
    assert "communication per step, one device\n  not known\n" in report
    assert plan.hbm_bytes > 0
    assert "cannot print the program (INTERNAL: RET_CHECK failure)" in " ".join(report.split())
    assert json.dumps(plan.to_json(), allow_nan=False)


@pytest.mark.slow
def test_a_call_of_many_steps_is_planned_as_it_runs():
    target = targets.parse_target("cpu:8")
    one, many = (plan_experiment(small(steps_per_call=k), target) for k in (1, 4))
    # The compiled call's memory: all of its batches, beside one state.
    assert many.memory.batch == 4 * one.memory.batch
    for part in ("parameters", "optimizer_state", "other_state"):
        assert getattr(many.memory, part) == getattr(one.memory, part)
    assert one.memory.peak < many.memory.peak < 2 * one.memory.peak
    # Of one step: what it computes and communicates.
    assert many.flops == one.flops
    assert many.hbm_bytes == pytest.approx(one.hbm_bytes, rel=0.1)

    def sent(plan):
        return sum(row.sent for row in plan.traffic)

    assert sent(many) == pytest.approx(sent(one), rel=0.1)
    assert "of a call of 4 steps" in many.report()


def test_after_a_run(monkeypatch):
    mesh = jt.make_mesh(data=8)
    experiment = small()
    state = jt.build.make_abstract_state(experiment, mesh)
    train = jt.build.compile_train(experiment, state, mesh)
    predicted = comparison.predict_run({1: train}, experiment)
    assert comparison.compare_with_run(predicted, mesh, 0.5) == []
    estimated = predicted.estimated
    lines = comparison.compare({1: train}, mesh, estimated, 0.5)
    assert lines[0].endswith("measured: the cpu backend keeps no count")
    assert lines[1] == "predicted step time: none, the peaks of 'cpu' are not known"
    # As on a chip that is in the table, with a count of its memory.
    monkeypatch.setattr(comparison, "chip_of", lambda kind: chips.CHIPS["v5e"])
    memory = train.memory_bytes
    monkeypatch.setattr(
        comparison, "memory", types.SimpleNamespace(device_memory=lambda: {"peak": 2 * memory})
    )
    lines = comparison.compare({1: train}, mesh, estimated, 0.5)
    assert lines[0].endswith("(+100.0%)")
    roofline = comparison.predict(train, mesh, estimated, chips.CHIPS["v5e"])
    assert lines[1].endswith(f"measured 500.0 ms, {0.5 / roofline.step_seconds:.2f} times")
    (_, unknown) = comparison.compare({1: train}, mesh, None, 0.5)
    assert unknown == "predicted step time: none, the step's trace was not understood"
    # Of a program that XLA cannot print, the traffic is that of the trace.
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: "a new way of writing")
    traced = comparison.predict(train, mesh, estimated, chips.CHIPS["v5e"])
    assert traced.interconnect["data"] == pytest.approx(roofline.interconnect["data"], rel=0.3)
    monkeypatch.setattr(estimate, "walk_step", lambda *given, **options: 1 / 0)
    assert comparison.predict_run({1: train}, experiment).estimated is None


@pytest.mark.slow
def test_the_command_searches(capsys):
    target = ("plan", "experiments.gpt", "--target", "h100:1x4", "--search")
    flags = "--layers 2 --width 64 --heads 4 --seq-len 32 --optimizer.name adamw --precision bf16"
    flags += " --search-seconds 1800"  # a search whose time is over ends its process
    # Without compiling, which needs the GPU compiler.
    status, out, _ = run(capsys, *target, "--compile-best", "0", "--json", *flags.split())
    found = json.loads(out)
    assert (status, found["target"]) == (0, "h100:1x4")
    assert all(math.prod(row["mesh"].values()) == 4 for row in found["rows"])
    status, _, err = run(capsys, *target, "--save-hlo", "x.hlo", *flags.split())
    assert status == 2
    assert "--save-hlo saves one program" in err
