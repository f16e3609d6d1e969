"""A decoder with low-rank kernels in place of all its arrays: mathematics, meshes and cost."""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import worst
from jaxtrain.engines.pipeline import pipeline
from jaxtrain.jaxprs import equations
from jaxtrain.models import decoder
from jaxtrain.models.decoding import decoder_of
from jaxtrain.ops.linear import LowRank, kernel_rules, low_rank, merge
from jaxtrain.run.checkpoints.checkpointer import Checkpointer
from jaxtrain.sharding.placement import constrain_tree
from jaxtrain.step import build_update
from jaxtrain.tree import map_named, named_leaves
from tests.forms import LLAMA
from tests.problems import record_gradients

FAST = {"xla_backend_optimization_level": 0}
RANK, ALPHA, ROWS, STEPS = 2, 3.0, 8, 2
# A unit in the last place of the weights moves these gradients by up to 5e-6, and Adam's step moves
# the next ones once more.
TOLERANCE = 2e-5
SIZES = dict(vocab_size=13, seq_len=8, layers=2, width=16, heads=4, mlp_width=24, vocab_multiple=40)
FORMS = {
    "gpt2": decoder.DecoderConfig(**SIZES, loss_chunk=4),
    "llama": decoder.DecoderConfig(**SIZES, **LLAMA, remat="dots", z_loss=0.1),
}
# All but the parts of kernels that are added.
FREEZE = (r"^(?!.*/(a|b)$)",)


@functools.cache
def params_of(form):
    """Kernels of which no part is 0, in the places of kernels and of the token table."""

    @functools.partial(jax.jit, compiler_options=FAST)
    def make(key):
        options = {"rank": RANK, "alpha": ALPHA, "rng": key}
        return low_rank(decoder.init(FORMS[form], key), r"/kernel$|^embed/tokens$", **options)

    rng, params = np.random.default_rng(0), make(jax.random.key(0))
    return map_named(lambda _, x: x + np.float32(0.2 * rng.standard_normal(x.shape)), params)


@functools.cache
def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 13, (2, ROWS, 8)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "mask": rng.integers(0, 2, (ROWS, 8)).astype(np.float32),
    }


def is_kernel(x):
    return isinstance(x, LowRank)


@pytest.mark.parametrize("form", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_the_merged_weights(form):
    config, params, batch = FORMS[form], params_of(form), batch_of()

    @functools.partial(jax.jit, compiler_options=FAST)
    def gradient(params):
        return jax.value_and_grad(lambda p: decoder.loss_fn(config)(p, batch, None).total)(params)

    value, grads = gradient(params)
    expected, of_merged = gradient(merge(params))
    np.testing.assert_allclose(value, expected, rtol=1e-5)

    def by_chain_rule(kernel, whole):
        if not is_kernel(kernel):
            return whole
        lead = (*range(kernel.a.ndim - 2), -1, -2)
        a, b, scale = kernel.a.transpose(lead), kernel.b.transpose(lead), kernel.scale
        return LowRank(whole, scale * whole @ b, scale * a @ whole, scale)

    chained = jax.tree.map(by_chain_rule, params, of_merged, is_leaf=is_kernel)
    error, name = worst(grads, chained)
    assert error < 2e-5, name
    assert len(named_leaves(grads)) > 20


def test_generation_is_that_of_the_merged_weights():
    form, tokens, lengths = "gpt2", batch_of()["tokens"][:2, :4], np.array([4, 2])
    model = decoder_of(FORMS[form])

    @functools.partial(jax.jit, compiler_options=FAST)
    def run(params):
        first, cache = model.prefill(params, tokens, lengths, room=1)
        return first, model.extend(params, cache, tokens[:, :1], lengths, np.array([1, 1]))[0]

    for got, expected in zip(run(params_of(form)), run(merge(params_of(form))), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def build(form, axes=None, *, freeze=FREEZE):
    """Returns (step, state, mesh), with recorded gradients at the front of the optimizer state."""
    config, params = FORMS[form], params_of(form)
    optimizer = jt.make_optimizer("adamw", 1e-2, clip_norm=0.5, eps=1e-4, freeze=freeze)
    optimizer = optax.chain(record_gradients(), optimizer)
    mesh = axes and jt.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    rules = kernel_rules(decoder.RULES, params)
    state = jt.init_state(
        lambda rng: params, optimizer, jax.random.key(0), mesh=mesh, rules=rules, params=params
    )
    shardings = jt.gradient_shardings(state)
    options = {"gradient_shardings": shardings, "gather": "model"}
    if not axes or "pipe" not in axes:
        return jt.build_train_step(decoder.loss_fn(config), optimizer, **options), state, mesh
    engine = pipeline(decoder.stages(config), mesh=mesh, microbatches=2, **options)
    return build_update(engine, optimizer, constrain=constrain_tree(shardings)), state, mesh


def train(form, axes=None):
    step, state, mesh = build(form, axes)
    compiled = jt.compile_step(step, state, batch_of(), mesh=mesh, compiler_options=FAST)
    for seed in range(STEPS):
        state, metrics = compiled(state, batch_of(seed))
    result = {"gradients": state.opt_state[0], "moments": state.opt_state[1]}
    result |= {"parameters": state.params, "loss": metrics["loss"]}
    return jax.device_get(result), state


@functools.cache
def one_device(form):
    return train(form)[0]


CASES = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("gpt2", {"data": 2, "tensor": 2}),
        ("llama", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("gpt2", {"pipe": 2, "fsdp": 2, "tensor": 2}),
        ("llama", {"pipe": 2, "data": 2, "tensor": 2}),
    )
]


@pytest.mark.parametrize(("form", "axes"), CASES)
def test_training_what_is_added_agrees_with_one_device_and_restores(form, axes, tmp_path):
    found, state = train(form, axes)
    errors = {part: worst(found[part], expected) for part, expected in one_device(form).items()}
    assert not {part: error for part, error in errors.items() if error[0] > TOLERANCE}, errors
    kernel = state.params["blocks"]["attn"]["q"]["kernel"]
    layers = "pipe" if "pipe" in axes else None
    assert [tuple(x.sharding.spec) for x in (kernel.base, kernel.b)] == [
        (layers, "fsdp" if "fsdp" in axes else None, "tensor"),
        (layers, None, "tensor"),
    ]
    assert "tensor" not in kernel.a.sharding.spec
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(build(form)[1])
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


def test_a_frozen_base_costs_no_gradient():
    found = {}
    for freeze in (FREEZE, None):
        step, state, _ = build("llama", freeze=freeze)
        jaxpr = jax.make_jaxpr(step)(state, batch_of()).jaxpr
        dots = [
            e.outvars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "dot_general"
        ]
        found[freeze] = {tuple(sorted(shape[-2:])) for shape in dots} & {(16, 24), (16, 40)}
        moments = [name for name in named_leaves(state.opt_state[1]) if re.search("/[mn]u/", name)]
        assert all(name.endswith(("/a", "/b")) for name in moments) == (freeze is not None)
        frozen = dict(zip(named_leaves(state), jaxpr.outvars, strict=False))
        given = dict(zip(named_leaves(state), jaxpr.invars, strict=False))
        base = "params/blocks/mlp/up/kernel/base"
        assert (frozen[base] is given[base]) == (freeze is not None)
    assert found[FREEZE] == set()
    assert found[None] == {(16, 24), (16, 40)}
