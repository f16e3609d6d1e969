"""State in the memory of the host: the same bits, on the devices only while it is read."""

import dataclasses
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from experiments import gpt
from jaxtrain.build import all_on_devices, choose_gather, make_abstract_state
from jaxtrain.decisions import Why
from jaxtrain.jaxprs import equations
from jaxtrain.methods.method import Method
from jaxtrain.models import decoder
from jaxtrain.ops.remat import keeping
from jaxtrain.planning.ahead_of_time import plan_experiment, plan_step
from jaxtrain.planning.targets import parse_target
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.run.main import parse
from jaxtrain.sharding.offload import HOST, is_on_host, to_host
from jaxtrain.state import host_bytes, local_bytes
from tests.engines import test_reduction as reduction


def arrays_on_host(state):
    """Which leaves of the optimizer state lie there, of those that have dimensions."""
    return {is_on_host(x) for x in jax.tree.leaves(state.opt_state) if x.ndim}


def start(optimizer, mesh, offload, stack=jt.Stack()):  # noqa: B008
    rules = jt.Rules(reduction.RULES, stacked=stack)
    how = {"mesh": mesh, "rules": rules, "offload_optimizer": offload}
    make = lambda rng: stack.cut(reduction.init(rng))  # noqa: E731
    state = jt.init_state(make, optimizer, jax.random.key(0), **how)
    return state, jt.abstract_state(make, optimizer, **how), rules


def train(name, options, axes, offload, steps=3):
    optimizer, mesh = jt.make_optimizer(name, 1e-2, **options), jt.make_mesh(**axes)
    state, abstract, rules = start(optimizer, mesh, offload)
    assert arrays_on_host(state) == arrays_on_host(abstract) == {offload}
    if axes.get("pipe", 1) > 1:
        engine = jt.pipeline(reduction.STAGES, mesh=mesh, microbatches=4)
        step = jt.build_update(engine, optimizer)
    else:
        step = jt.build_train_step(reduction.masked, optimizer, accumulate=2)
    how = {"mesh": mesh, "rules": rules, "compiler_options": reduction.QUICK}
    step = jt.compile_step(step, state, reduction.rows(), **how)
    broken = reduction.rows() | {"x": np.full_like(reduction.rows()["x"], np.nan)}
    for i in range(steps):  # In the second one the state is to stay as it is.
        state, metrics = step(state, broken if i == 1 else reduction.rows())
    assert int(state.skipped) > 0
    assert arrays_on_host(state) == {offload}
    return state, metrics, abstract


SLOW = pytest.mark.slow
LAMB = {"skip_spikes": 6.0, "stacked": jt.Stack().axes}
MUON = {"accumulate": 2, "stacked": jt.Stack().axes}


@pytest.mark.parametrize(
    ("name", "options", "axes"),
    [
        ("adamw", {"ema": 0.9}, {"data": 2, "fsdp": 4}),
        pytest.param("muon", MUON, {"fsdp": 4, "tensor": 2}, marks=SLOW),
        pytest.param("lamb", LAMB, {"pipe": 2, "fsdp": 4}, marks=SLOW),
    ],
)
def test_offloaded_optimizer_state_has_the_same_bits(name, options, axes, tmp_path):
    wanted, metrics, plain = train(name, options, axes, False)
    found, told, abstract = train(name, options, axes, True)
    same(wanted, found)
    jax.tree.map(np.testing.assert_array_equal, metrics, told)
    assert local_bytes(plain) == local_bytes(abstract) + host_bytes(abstract)
    # From a checkpoint it comes back to where it is to lie, whoever has saved it.
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, found)
        checkpoints.wait()
        for shapes, offload in ((abstract, True), (plain, False)):
            restored = checkpoints.restore(shapes)
            assert arrays_on_host(restored) == {offload}
            same(restored, wanted)
    if "ema" in options:
        averaged = jt.averaged(found)
        assert not any(map(is_on_host, jax.tree.leaves(averaged.params)))
        jax.tree.map(np.testing.assert_array_equal, averaged.params, jt.averaged(wanted).params)


def same(a, b):
    for part in ("params", "opt_state", "step", "skipped"):
        parts = jax.device_get((getattr(a, part), getattr(b, part)))
        jax.tree.map(np.testing.assert_array_equal, *parts)


def test_what_cannot_be_offloaded_is_one_sentence():
    with pytest.raises(ValueError, match=r"`offload_optimizer` places state on a mesh.*make_mesh"):
        jt.abstract_state(reduction.init, reduction.chain(), offload_optimizer=True)
    memory = types.SimpleNamespace(kind="device")
    device = types.SimpleNamespace(device_kind="abacus", addressable_memories=lambda: [memory])
    mesh = types.SimpleNamespace(devices=np.array([device]))
    with pytest.raises(ValueError, match="'abacus' has memory of the kinds device and none of"):
        to_host({}, {}, mesh)


SMALL = {"vocab_size": 32, "seq_len": 8, "layers": 3, "width": 16, "heads": 2}
CONFIG = decoder.DecoderConfig(**SMALL, remat="full")


def train_decoder(axes, offload, *, policy="f32", name="adamw", zero=0, **options):
    """Three steps, the second of which is left out; returns all that the tests read."""
    devices = jax.devices()[: max(1, np.prod([*axes.values()], dtype=int))]
    mesh, rules = jt.make_mesh(**axes, devices=devices), jt.Rules(decoder.RULES)
    optimizer = jt.make_optimizer(name, 1e-2, clip_norm=0.5, stacked=jt.Stack().axes)
    init = lambda rng: decoder.init(CONFIG, rng)  # noqa: E731
    how = {"mesh": mesh, "rules": rules, "zero": zero, "policy": policy}
    how["offload_parameters"] = offload
    state = jt.init_state(init, optimizer, jax.random.key(0), **how)
    abstract = jt.abstract_state(init, optimizer, **how)
    pins = jt.gradient_shardings(state, zero=zero)
    assert HOST not in {sharding.memory_kind for sharding in jax.tree.leaves(pins)}
    options |= {"gradient_shardings": pins, "norms": True}
    loss_fn, how = decoder.loss_fn(CONFIG), {"policy": policy, "gather": "model"}
    step = jt.build_train_step(loss_fn, optimizer, **how, **options)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 16, 8))
    batch = {"tokens": tokens[0], "targets": tokens[1], "mask": np.ones((16, 8), np.float32)}
    train = jt.compile_step(
        step, state, batch, mesh=mesh, rules=rules, compiler_options=reduction.QUICK
    )
    told = []
    for i in range(3):
        state, metrics = train(state, batch | {"mask": batch["mask"] * [1, np.nan, 1][i]})
        told.append(metrics)
    assert int(state.skipped) > 0
    if not axes:
        how = {"mesh": mesh, "rules": rules, "donate": False}
        evaluation = jt.build_eval_step(loss_fn, policy=policy, gather="model")
        told.append(jt.compile_step(evaluation, state, batch, **how)(state, batch).means())
    return state, jax.device_get(told), abstract, train.jaxpr.jaxpr


def layers_on_host(state):
    return {is_on_host(x) for x in jax.tree.leaves(state.params["blocks"])}


MIXED = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2, "fsdp": 2}, {"policy": "bf16", "name": "sgd", "accumulate": 2}),
        pytest.param(MIXED, {"policy": "bf16", "name": "lamb", "accumulate": 2}, marks=SLOW),
        pytest.param({}, {}, marks=SLOW),
        pytest.param({"data": 2, "fsdp": 4}, {"accumulate": 2, "zero": 2}, marks=SLOW),
        pytest.param({"data": 4, "fsdp": 2}, {"zero": 3, "name": "muon"}, marks=SLOW),
        pytest.param(MIXED, {"policy": "fp16"}, marks=SLOW),
    ],
)
def test_offloaded_parameters_have_the_same_bits(axes, options, tmp_path):
    wanted, metrics, plain, _ = train_decoder(axes, False, **options)
    found, told, abstract, jaxpr = train_decoder(axes, True, **options)
    assert layers_on_host(found) == layers_on_host(abstract) == {True}
    same(wanted, found)
    jax.tree.map(np.testing.assert_array_equal, metrics, told)
    assert host_bytes(abstract) == local_bytes(plain.params["blocks"])
    # Either pass fetches a layer, float32; behind them are whole gradients and the update.
    puts = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "device_put"]
    fetches = [var.aval for eqn in puts for var in eqn.invars if on_host(var.aval)]
    kernel = found.params["blocks"]["mlp"]["up"]["kernel"]
    assert [x.shape for x in fetches].count(kernel.shape[1:]) >= 2
    assert [x.shape for x in fetches].count(kernel.shape) == 2
    assert {x.dtype for x in fetches} == {kernel.dtype}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, found)
        checkpoints.wait()
        for shapes, offload in ((abstract, True), (plain, False)):
            restored = checkpoints.restore(shapes)
            assert layers_on_host(restored) == {offload}
            same(restored, wanted)


def on_host(aval):
    return aval.memory_space == jax.memory.Space.Host


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--remat none", "`remat` 'none', with which the backward pass keeps all layers"),
        ("--mesh.pipe 2", "mesh axis 'pipe' has size 2, whose stages keep their layers"),
        ("--gather step", "`gather` is 'step', which makes all weights whole at once"),
        ("--private.noise 1", "has an engine of its own"),
        ("--precision fp8", "the precision is 'fp8', whose kernels are scaled before"),
        ("--exact 8", "`offload_parameters` is True and `exact` 8"),
        ("--steps-per-call 2", "`steps_per_call` is 2 with `offload_parameters`"),
    ],
)
def test_what_fetches_no_layers_is_refused_by_name(flags, message):
    with pytest.raises(ValueError, match=message):
        gpt.outline(parse(gpt.Config, ["--offload-parameters", "--remat=full", *flags.split()]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_fn": reduction.masked}, "the loss of experiment 'toy' is not made of stages"),
        ({"stages": reduction.STAGES}, r"'toy' does not gather its weights layer by layer"),
        ({"method": Method(updates=2)}, "'toy' has a method around its steps, "),
    ],
)
def test_an_experiment_that_fetches_no_layers_is_refused(given, message):
    if "method" in given:
        given = given | {"stages": reduction.STAGES, "gather": "model"}
    with pytest.raises(ValueError, match=message):
        toy(**given)


@pytest.mark.slow
def test_a_plan_for_absent_gpus_says_that_it_counts_all_as_theirs():
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("needs the compiler of GPUs: pip install 'jaxtrain[aot]'")
    layout = jt.Layout.parse("fsdp=8,offload_parameters=true,offload_optimizer=true")
    stages = dataclasses.replace(reduction.STAGES, remat=keeping("full"))
    planned = plan_experiment(
        toy(stages=stages, gather="model", layout=layout), parse_target("h100:1x8")
    )
    assert planned.memory.host == 0
    assert any("(offload_optimizer, offload_parameters) is counted" in x for x in planned.notes)


def toy(**given):
    own = {"init_fn": reduction.init, "optimizer": reduction.chain(), "batch": reduction.rows()}
    own |= {"layout": jt.Layout(offload_parameters=True, accumulate=2)} | given
    return jt.Experiment.of(name="toy", train_batches=None, steps=1, **own)


def test_layers_that_are_fetched_are_gathered_one_by_one_and_may_be_left_on_devices():
    stages, mesh = (
        dataclasses.replace(reduction.STAGES, remat=keeping("full")),
        jt.make_mesh(fsdp=8),
    )
    fetched = toy(stages=stages, gather="model")
    state = make_abstract_state(fetched, mesh)
    assert layers_on_host(state) == {True}
    assert layers_on_host(make_abstract_state(fetched, mesh.abstract_mesh)) == {True}
    pins = jt.gradient_shardings(state)
    assert choose_gather(fetched, state, mesh, pins) == ("model", Why.OFFLOADED())
    assert layers_on_host(make_abstract_state(all_on_devices(fetched), mesh)) == {False}


@pytest.mark.slow
def test_moments_are_not_on_a_tpu_while_gradients_are_computed():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install 'jaxtrain[aot]'")
    target = parse_target("v5e:2x2")
    width, layers, rows = 1024, 8, 8192

    def loss(params, batch, rng):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.square(jax.lax.scan(layer, batch["x"], params["w"])[0]).mean()

    def planned(offload):
        mesh = jt.make_mesh(fsdp=4, devices=target.devices())
        optimizer = jt.make_optimizer("adamw", 1e-3)
        init = lambda rng: {"w": jnp.zeros((layers, width, width))}  # noqa: E731
        state = jt.abstract_state(init, optimizer, mesh=mesh, offload_optimizer=offload)
        batch = {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)}
        step = jt.build_train_step(loss, optimizer)
        return plan_step(step, state, batch, mesh=mesh, target=target, name="mlp")

    kept, offloaded = planned(False), planned(True)
    moments = 2 * layers * width * width * 4 // 4
    assert (offloaded.memory.host, kept.memory.host) == (moments, 0)
    # Activations are then at their fullest, and nearly all of the moments is saved.
    assert offloaded.memory.peak < kept.memory.peak - 0.9 * moments
    # Both ways over the link to the host, as published.
    assert offloaded.roofline.host == pytest.approx(2 * moments / 15e9)
    assert "optimizer state on the host" in offloaded.report()


@pytest.mark.slow
def test_layers_are_not_on_a_tpu_but_one_by_one():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler: pip install 'jaxtrain[aot]'")
    target = parse_target("v5e:2x2")
    width, layers, rows = 1024, 16, 8192
    stages = jt.Stages(
        embed=lambda params, batch, rng: batch["x"],
        block=lambda layer, x, batch, rng: jnp.tanh(x @ jt.gather(layer, "blocks")["w"]),
        head_loss=lambda params, x, batch: jnp.square(x).mean(),
        remat=keeping("full"),
    )

    def planned(offload):
        mesh = jt.make_mesh(fsdp=4, devices=target.devices())
        optimizer = jt.make_optimizer("sgd", 1e-3)
        init = lambda rng: {"blocks": {"w": jnp.zeros((layers, width, width))}}  # noqa: E731
        how = {"mesh": mesh, "policy": "bf16", "offload_parameters": offload}
        state = jt.abstract_state(init, optimizer, **how)
        batch = {"x": jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)}
        loss = jt.loss_from_stages(stages)
        step = jt.build_train_step(loss, optimizer, policy="bf16", gather="model")
        return plan_step(step, state, batch, mesh=mesh, target=target, name="mlp")

    kept, offloaded = planned(False), planned(True)
    weights = layers * width * width * 4 // 4
    assert offloaded.memory.host == offloaded.memory.host_parameters == weights
    assert offloaded.memory.peak < kept.memory.peak - 0.9 * weights
    # Twice for the passes, once for the update, and back.
    assert offloaded.roofline.host == pytest.approx(4 * weights / 15e9)
    assert "parameters on the host" in offloaded.report()
