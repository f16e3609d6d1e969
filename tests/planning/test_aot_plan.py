"""Plans through the real TPU and GPU compilers, on a machine that has neither chip."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from experiments import gpt
from jaxtrain.planning.ahead_of_time import plan_experiment
from jaxtrain.planning.groups import UNKNOWN
from jaxtrain.planning.hlo import read_program
from jaxtrain.planning.targets import parse_target
from jaxtrain.planning.unexpected import unexpected_gathers
from jaxtrain.sharding import overlap
from tests.commands import run
from tests.planning import steps

# Attention says that it cannot be cuDNN here.
pytestmark = pytest.mark.filterwarnings("ignore::jaxtrain.ops.attention.AheadOfTimeWarning")

TARGETS = {"v5e:2x4": "libtpu", "h100:1x8": "jax_cuda12_plugin"}


def need(text):
    module = TARGETS.get(text, "libtpu")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs the compiler of {text}: pip install 'jaxtrain[aot]'")
    return parse_target(text).devices()


@pytest.mark.parametrize(
    ("axis", "target"),
    [
        ("data", "h100:1x8"),
        ("fsdp", "v5e:2x4"),
        pytest.param("data", "v5e:2x4", marks=pytest.mark.slow),
        pytest.param("fsdp", "h100:1x8", marks=pytest.mark.slow),
        *[pytest.param("tensor", target, marks=pytest.mark.slow) for target in TARGETS],
    ],
)
def test_each_axis_communicates_along_itself_alone(target, axis):
    devices = need(target)
    train, _, mesh = steps.compile_gpt(devices=devices, policy=jt.Policy.bf16(), **{axis: 8})
    found = steps.collectives(train, mesh)
    assert {c.axes for c in found} == {(axis,)}
    kinds = {c.kind for c in found}
    if axis == "data":
        assert kinds == {"all-reduce"}
    if axis == "fsdp":
        assert "all-gather" in kinds


@pytest.mark.parametrize("target", TARGETS)
def test_a_mixed_mesh_is_read_without_a_question_left(target):
    devices = need(target)
    policy = jt.Policy.bf16()
    train, state, mesh = steps.compile_gpt(devices=devices, policy=policy, data=2, fsdp=2, tensor=2)
    program = read_program(train.compiled.as_text(), mesh)
    assert None not in program.loops
    # The GPU's compiler permutes what a layer keeps of the split stream, between devices that no
    # axis tells apart; all else is along axes.
    part = (steps.ROWS // 4) * (steps.CONFIG.seq_len // 2) * steps.CONFIG.width * 2
    for c in program.collectives:
        if UNKNOWN in c.axes:
            assert (target, c.kind, c.executions) == (
                "h100:1x8",
                "collective-permute",
                steps.LAYERS,
            )
            assert c.payload == len(c.shapes) * part
    assert unexpected_gathers(program, state.params, mesh, layers="blocks") == ()


@pytest.mark.parametrize("target", [pytest.param("v5e:2x4", marks=pytest.mark.slow), "h100:1x8"])
def test_a_hidden_gather_is_reported(target):
    devices = need(target)
    change = steps.needing_whole("blocks", "mlp", "down", "kernel")
    train, state, mesh = steps.compile_gpt(loss=change, devices=devices, tensor=8)
    found = jt.explain(train, mesh, params=state.params).warnings
    assert any("'blocks/mlp/down/kernel'" in w and "along tensor" in w for w in found), found


@pytest.mark.parametrize("target", TARGETS)
def test_the_command(capsys, monkeypatch, target):
    need(target)

    def fail(self):
        raise jax.errors.JaxRuntimeError("async-update should have 1 operands but sees 3")

    if target == "v5e:2x4":  # JAX cannot print all programs for TPUs, and need not
        monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
    flags = "--layers 2 --width 128 --heads 2 --seq-len 128 --precision bf16 --mesh.fsdp 4 --json"
    flags += " --tokens 1e9 --price 2.5 --global-batch 16"
    status, out, _ = run(capsys, "plan", "experiments.gpt", "--target", target, *flags.split())
    plan = json.loads(out)
    assert (status, plan["fits"], plan["devices"]) == (0, True, 8)
    assert plan["memory"]["peak"] > plan["memory"]["parameters"] > 0
    assert 0 < plan["roofline"]["step_seconds"] <= plan["roofline"]["step_seconds_apart"]
    assert 0 < plan["mfu_ceiling"] < 1
    assert any("cudnn" in note for note in plan["notes"]) == target.startswith("h100")
    assert plan["traffic"]
    assert plan["roofline"]["waits"]["fsdp"] > 0
    hours = 1e9 / (16 * 128) * plan["roofline"]["step_seconds"] / 3600
    assert plan["cost"]["days"] == pytest.approx(hours / 24)
    assert plan["cost"]["price"] == pytest.approx(8 * hours * 2.5)


@pytest.mark.parametrize(
    ("text", "slices", "size", "kind"),
    [
        ("v4:2x2x1", 1, 4, "TPU v4"),
        ("v5e:1x1", 1, 1, "TPU v5 lite"),
        ("v5e:4x4", 2, 32, "TPU v5 lite"),
        ("v5p:2x2x2", 1, 8, "TPU v5"),
        ("v6e:4x4", 1, 16, "TPU v6 lite"),
        ("tpu7x:2x2x1", 1, 8, "TPU7x"),
    ],
)
def test_topologies_are_what_the_table_says(text, slices, size, kind):
    need("v5e:2x4")
    target = parse_target(text, slices=slices)
    devices = target.devices()
    assert (len(devices), target.size) == (size, size)
    assert {device.device_kind for device in devices} == {kind} == {target.chip.device_kind}
    hosts = {(getattr(d, "slice_index", None), d.process_index) for d in devices}
    assert len(hosts) == target.hosts
    mesh = jt.make_mesh(data=-1, dcn_data=slices, devices=devices)
    assert mesh.size == size


def test_a_topology_that_cannot_be_is_one_sentence(capsys):
    need("v5e:2x4")
    status, _, err = run(capsys, "plan", "experiments.gpt", "--target", "v5e:3x5")
    assert status == 2
    assert "target 'v5e:3x5' is no slice that Google has: 1x1, or both sides are" in err
    assert err.count("\n") == 1


def test_a_step_that_calls_python_is_refused_for_gpus_that_are_not_here():
    need("h100:1x8")

    def step(state, batch):
        jax.debug.print("{}", batch.sum())
        return state, {}

    with pytest.raises(ValueError, match=r"the step calls Python .* GPUs of h100:1x8 from here"):
        jt.plan(step, jnp.ones(3), jnp.ones((8, 2)), target="h100:1x8", mesh={"data": 8})


def test_memory_limits_are_those_the_compiler_states():
    """The table's figures against the compiler's own, for every TPU."""
    need("v5e:2x4")
    for text in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"):
        target = parse_target(text)
        place = jax.sharding.SingleDeviceSharding(target.devices()[0])
        huge = jax.ShapeDtypeStruct((2**16, 2**20), jax.numpy.float32, sharding=place)
        with pytest.raises(jax.errors.JaxRuntimeError) as refused:
            jax.jit(lambda x: x + 1).lower(huge).compile()
        stated = str(refused.value).split("exceeds available HBM (")[1].split("G)")[0]
        assert target.chip.memory_bytes == pytest.approx(float(stated) * 2**30, rel=1e-3)


@pytest.mark.slow
def test_too_big_a_model_says_what_is_missing_and_what_fits(capsys):
    need("v5e:2x4")
    flags = "--model gpt2-124m --layers 4 --global-batch 1024 --precision bf16"
    flags += " --optimizer.name adamw"
    status, out, err = run(capsys, "plan", "experiments.gpt", "--target", "v5e:2x2", *flags.split())
    assert status == 1
    assert "bytes (" in out
    assert "of memory are missing" in out
    assert "nearest change that fits: --accumulate 4 (compiled: " in out
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_seven_billion_parameters_on_256_chips(capsys):
    need("v5e:2x4")
    flags = "--model llama-7b --global-batch 256 --mesh.fsdp 256 --precision bf16 --json"
    flags += " --optimizer.name adamw --remat full --tokenizer 32000"
    status, out, _ = run(capsys, "plan", "experiments.gpt", "--target", "v5e:16x16", *flags.split())
    plan = json.loads(out)
    assert (status, plan["fits"]) == (0, True)
    # float32 masters and two moments of 6.7 G parameters, in 256 parts but for the norms' scales.
    norms = (2 * 32 + 1) * 4096
    parameters = 4 * ((6_738_415_616 - norms) // 256 + norms)
    assert plan["memory"]["parameters"] == parameters
    assert plan["memory"]["optimizer_state"] == pytest.approx(2 * parameters, rel=1e-6)
    tokens = 256 * 4096
    assert plan["flops_formula"][0] == pytest.approx(6 * 6.6e9 * tokens, rel=0.25)
    assert plan["flops_formula"][0] < plan["flops"]["by_dtype"]["bfloat16"]


def plan_hiding_or_not(flags, target):
    """The plan of flags of ``experiments.gpt``, and that without our options of the compiler."""
    config = tyro.cli(gpt.Config, args=flags.split())
    alone = dataclasses.replace(config, layout=config.layout.with_({"hide_communication": False}))
    return [plan_experiment(gpt.outline(each), target) for each in (config, alone)]


@pytest.mark.slow
def test_options_for_gpu_hosts_hide_more_than_those_of_xla():
    need("h100:1x8")
    target = parse_target("h100:4x8")
    flags = "--model llama-7b --layers 8 --global-batch 32 --mesh.fsdp 32 --mesh.data 1"
    flags += " --remat dots --precision bf16 --tokenizer 32000 --optimizer.name adamw"
    ours, alone = plan_hiding_or_not(flags, target)
    links = [(plan.roofline.interconnect, plan.roofline.network) for plan in (ours, alone)]
    sent = [inside["fsdp"] + across["fsdp"] for inside, across in links]
    waits = [plan.roofline.waits["fsdp"] for plan in (ours, alone)]
    assert sent[0] == pytest.approx(sent[1], rel=0.05)
    assert waits[0] < 0.8 * waits[1] <= 0.8 * sent[1]
    told = [
        any(note.startswith("communication is hidden by") for note in p.notes)
        for p in (ours, alone)
    ]
    assert told == [True, False]
    assert ours.roofline.step_seconds < alone.roofline.step_seconds


def test_options_for_v5p_are_known_to_its_compiler_and_for_it_alone():
    x = jnp.ones((256, 256))
    for text, hidden in (("v5p:2x2x1", True), ("v5p:1x1x1", False), ("v5e:2x2", False)):
        mesh = jt.make_mesh(fsdp=-1, devices=need(text))
        split = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("fsdp")))
        lowered = jax.jit(lambda x: x @ x).lower(split)
        assert overlap.compile_hiding(lowered, mesh, None)[1] == list(overlap.V5P) * hidden


@pytest.mark.slow
def test_options_for_v5p_hide_more_than_those_of_its_compiler():
    need("v5p:4x4x4")
    target = parse_target("v5p:4x4x4")
    flags = "--model llama-7b --layers 4 --global-batch 32 --mesh.fsdp 32 --mesh.tensor 2"
    flags += " --mesh.data 1 --remat dots --precision bf16 --tokenizer 32000"
    plans = plan_hiding_or_not(f"{flags} --optimizer.name adamw", target)
    exposed = [plan.roofline.exposed for plan in plans]
    assert exposed[0] < 0.8 * exposed[1]
