"""Optimizer state in the memory of the host: the same bits, on the devices for the update alone."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.planning.ahead_of_time import plan_step
from jaxtrain.planning.targets import parse_target
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.sharding.offload import is_on_host, to_host
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
