"""Parameters that do not train cost no gradient, in the three engines and on every mesh.

The model is the small one of the pipeline's tests, wide enough for its weights to show in memory.
"""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import worst
from jaxtrain.engines.accumulated import accumulated
from jaxtrain.engines.pipeline import pipeline
from jaxtrain.engines.plain import plain
from jaxtrain.jaxprs import equations
from jaxtrain.planning.walk import scan_operands
from jaxtrain.sharding.placement import constrain_tree
from jaxtrain.step import build_update, normalize_loss, with_policy
from jaxtrain.tree import named_leaves
from tests import problems
from tests.engines import pipelines as small
from tests.problems import record_gradients

# Most of the time of these tests is LLVM's; its optimisations are not what is tested.
FAST = {"xla_backend_optimization_level": 0}

ROWS, MICROBATCHES, STEPS, TOLERANCE = 16, 4, 2, 1e-5
WIDTH, HIDDEN = 192, 320
FREEZE = (r"^blocks/(up|down)$", "^table$")
RULES = [
    ("^blocks/up$", ("layers", "embed", "mlp")),
    ("^blocks/down$", ("layers", "mlp", "embed")),
    ("^blocks/shift$", ("layers", "embed")),
    ("^blocks/number$", ("layers",)),
]
# way, mesh axes, zero
EVERYDAY = [
    ("accumulated", {"data": 2, "fsdp": 2, "tensor": 2}, 2),
    ("1f1b", {"pipe": 2, "data": 2, "tensor": 2}, 1),
]
MESHES = [{"data": 4}, {"fsdp": 4}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
PIPES = [{"pipe": 4, "fsdp": 2}, {"pipe": 2, "data": 2, "tensor": 2}]
EVERY = [*itertools.product(("plain", "accumulated"), MESHES, (0, 1, 2, 3))]
EVERY += itertools.product(("1f1b", "gpipe", "1f1b, kept", "interleaved, kept"), PIPES, (0, 2))


def init(rng):
    r = np.random.default_rng(0)

    def normal(scale, *shape):
        return (scale * r.normal(size=shape)).astype(np.float32)

    return {
        "table": normal(0.3, small.WORDS, WIDTH),
        "blocks": {
            "up": normal(0.1, small.LAYERS, WIDTH, HIDDEN),
            "down": normal(0.1, small.LAYERS, HIDDEN, WIDTH),
            "shift": normal(0.1, small.LAYERS, WIDTH),
            "number": np.arange(small.LAYERS, dtype=np.int32),
        },
        "gain": 1 + normal(0.1, WIDTH),
    }


def block(layer, x, batch, rng):
    return small.block(layer, x + layer["shift"] * (layer["number"] + 1), batch, rng)


STAGES = dataclasses.replace(small.STAGES, block=block)


loss_fn = jt.loss_from_stages(STAGES)


def stack_of(way):
    return jt.Stack(virtual=2 if "interleaved" in way else 1)


def engine_of(way, mesh, shardings):
    loss = with_policy(normalize_loss(loss_fn, False), jt.Policy.f32(), "step", shardings)
    if way == "plain":
        return plain(loss)
    if way == "accumulated":
        constrain = constrain_tree(shardings) if shardings is not None else lambda x: x
        return accumulated(loss, MICROBATCHES, constrain)
    return pipeline(
        STAGES,
        mesh=mesh,
        microbatches=MICROBATCHES,
        schedule=way.split(",")[0],
        virtual=stack_of(way).virtual,
        remat="none" if "kept" in way else "full",
        gradient_shardings=shardings,
    )


def build(way, axes=None, zero=0, *, freeze=FREEZE, differentiate="what trains"):
    """Returns (step, state, mesh); with recorded gradients at the front of the optimizer state."""
    optimizer = optax.chain(
        record_gradients(),
        jt.make_optimizer("adamw", 1e-2, clip_norm=0.5, eps=1e-4, freeze=freeze),
    )
    mesh = axes and jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    rules = jt.Rules(RULES, stacked=stack_of(way)) if axes else None
    params = stack_of(way).cut(init(None))
    options = {"mesh": mesh, "rules": rules, "zero": zero, "params": params}
    state = jt.init_state(lambda rng: params, optimizer, jax.random.key(0), **options)
    shardings = jt.gradient_shardings(state, zero=zero)
    engine = engine_of(way, mesh, shardings)
    if (
        differentiate == "everything"
    ):  # as an engine of a user's own does, which takes no ``frozen``
        taught, engine = engine, lambda *args: taught(*args)
    constrain = constrain_tree(shardings) if axes else lambda x: x
    return build_update(engine, optimizer, constrain=constrain), state, mesh


def train(step, state, mesh, steps=STEPS):
    """A few steps; returns host arrays, and the compiled program."""
    compiled = jt.compile_step(
        step, state, small.make_batch(ROWS), mesh=mesh, compiler_options=FAST
    )
    for seed in range(steps):
        state, metrics = compiled(state, small.make_batch(ROWS, seed))
    names = ("loss", "accuracy", "weight", "grad_norm", "skipped")
    result = {
        "metrics": {name: metrics[name] for name in names},
        "gradients": state.opt_state[0],
        "parameters": state.params,
        "moments": state.opt_state[1],
    }
    return jax.device_get(result), compiled.compiled


@functools.cache
def one_device(way):
    """Training on one device, where all gradients are computed and some thrown away."""
    return train(*build(way, differentiate="everything"))[0]


def assert_same_training(found, way):
    expected = one_device("plain" if way == "plain" else "accumulated")
    problems.assert_agree(found, expected, TOLERANCE)


def weight_gradients(jaxpr):
    """Where a program computes gradients of kernels, or sums them in the carry of a loop."""
    found = []
    for equation in equations(jaxpr):
        kind = equation.primitive.name
        count = {"dot_general": 1}.get(kind, 0)
        if kind == "scan":
            first_carried, first_x = scan_operands(equation)
            count = first_x - first_carried
        shapes = [v.aval.shape for v in equation.outvars[:count]]
        found += [(kind, shape) for shape in shapes if set(shape[-2:]) == {WIDTH, HIDDEN}]
    return found


@pytest.mark.parametrize(
    ("way", "axes"),
    [("plain", None), ("accumulated", None), ("1f1b", {"pipe": 2}), ("1f1b, kept", {"pipe": 2})],
)
def test_what_is_frozen_costs_no_gradient_and_is_handed_through(way, axes):
    step, state, mesh = build(way, axes)
    whole, everything, _ = build(way, axes, freeze=None)
    jaxpr = jax.make_jaxpr(step)(state, small.make_batch(ROWS)).jaxpr
    assert not weight_gradients(jaxpr)
    whole_jaxpr = jax.make_jaxpr(whole)(everything, small.make_batch(ROWS)).jaxpr
    kinds = {kind for kind, _ in weight_gradients(whole_jaxpr)}
    assert kinds == {"dot_general"} | ({"scan"} if way != "plain" else set())
    frozen = {"params/table", "params/blocks/up", "params/blocks/down", "params/blocks/number"}
    for i, name in enumerate(named_leaves(state)):
        assert (jaxpr.outvars[i] is jaxpr.invars[i]) == (name in frozen or name == "rng"), name
    moments = [name for name in named_leaves(state.opt_state[1]) if "mu" in name or "nu" in name]
    assert {name.split("u/")[1] for name in moments} == {"blocks/shift", "gain"}

    found, compiled = train(step, state, mesh)
    assert_same_training(found, way)
    # The clip needs all gradients at once, so that their bytes would show here.
    kernels = 2 * small.LAYERS * WIDTH * HIDDEN * 4 // (axes["pipe"] if axes else 1)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.9 * kernels
    if way == "plain":
        _, compiled = train(whole, everything, mesh)
        assert compiled.memory_analysis().temp_size_in_bytes > kernels


@pytest.mark.parametrize(("way", "axes", "zero"), EVERYDAY)
def test_training_in_part_agrees_with_one_device(way, axes, zero):
    assert_same_training(train(*build(way, axes, zero))[0], way)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "axes", "zero"), [case for case in EVERY if case not in EVERYDAY])
def test_training_in_part_agrees_with_one_device_in_every_way(way, axes, zero):
    assert_same_training(train(*build(way, axes, zero))[0], way)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [("^blocks/",), ("^table$", "^gain$")])
@pytest.mark.parametrize("way", ["1f1b", "1f1b, kept"])
def test_all_layers_of_a_pipeline_may_be_frozen_or_all_else(way, freeze):
    # In a second step Adam would blow up the rounding of the wide kernels that train here.
    found, _ = train(*build(way, {"pipe": 2}, freeze=freeze), steps=1)
    whole = build("accumulated", freeze=freeze, differentiate="everything")
    expected, _ = train(*whole, steps=1)
    errors = {part: worst(found[part], expected[part]) for part in expected}
    assert not {part: error for part, error in errors.items() if error[0] > TOLERANCE}, errors
