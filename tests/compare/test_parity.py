"""The mesh never changes the mathematics: every layout against one device, in float32.

Each case trains a small GPT for five steps with ragged masks and packed documents, and compares the
loss, every gradient, every parameter and all optimizer state with the run on one device. Five steps
are scanned in one call, so that a case compiles once. The error is that of jaxtrain.compare.parity.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import worst
from jaxtrain.models import decoder
from jaxtrain.ops.context import exchange
from tests import problems
from tests.problems import record_gradients

TOLERANCE = 1e-5
STEPS, BATCH = 5, 32

GPT2 = decoder.DecoderConfig(vocab_size=61, seq_len=16, layers=2, width=32, heads=4)
LLAMA = dataclasses.replace(
    GPT2, kv_heads=4, positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False
)
FORMS = {"gpt2": GPT2, "llama": LLAMA}
# Weights of attention dropped, and key heads fewer than the tensor axis.
FORMS_APART = {
    "dropped weights": dataclasses.replace(GPT2, attention_dropout=0.3),
    "shared key heads": dataclasses.replace(LLAMA, kv_heads=2),
    "linear": dataclasses.replace(LLAMA, delta_pattern=(True, False), out_gate=True),
    "windows": dataclasses.replace(LLAMA, kv_heads=1, window=5, window_pattern=(True, False)),
}

# name: mesh axes, zero
LAYOUTS = {
    "data 8": ({"data": 8}, 0),
    "fsdp 8": ({"fsdp": 8}, 0),
    "data 2 x tensor 4": ({"data": 2, "tensor": 4}, 0),
    "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, 0),
    "data 8, zero 1": ({"data": 8}, 1),
    "data 8, zero 2": ({"data": 8}, 2),
    "data 8, zero 3": ({"data": 8}, 3),
    # Four heads are exchanged for positions, or keys are gathered where devices are more.
    "context 8": ({"context": 8}, 0),
    "context 4 x fsdp 2": ({"context": 4, "fsdp": 2}, 0),
    "data 2 x tensor 2 x context 2": ({"data": 2, "tensor": 2, "context": 2}, 0),
    **{f"data 2 x context 4, zero {n}": ({"data": 2, "context": 4}, n) for n in (1, 2, 3)},
}
ACCUMULATE = (1, 4)
REMAT = ("none", "full")
OPTIMIZERS = ("adamw", "lamb")


def optimizer_named(name: str) -> optax.GradientTransformation:
    # Adam divides by the gradient's own size: where that is rounding noise, so is the update. An
    # epsilon above the noise keeps it out of the comparison. The trust ratio would scale the noise
    # of a key bias, which softmax does not see, up to the size of the bias: that has none.
    lamb = {"trust_mask": functools.partial(jt.tree.map_named, lambda n, x: "k/bias" not in n)}
    chain = jt.make_optimizer(
        name,
        learning_rate=jt.schedules.cosine(1e-2, warmup_steps=2, total_steps=10),
        weight_decay=0.1,
        clip_norm=0.5,
        eps=1e-4,
        stacked=jt.Stack().axes,
        **(lamb if name == "lamb" else {}),
    )
    return optax.chain(record_gradients(), chain)


@functools.cache
def batches():
    r = np.random.default_rng(0)
    shape = (STEPS, BATCH, GPT2.seq_len)
    boundary = r.random(shape) < 0.15
    boundary[..., 0] = True
    segments = np.cumsum(boundary, -1)
    starts = np.maximum.accumulate(np.where(boundary, np.arange(shape[-1]), 0), -1)
    keep = r.random((STEPS, BATCH, 1)) ** 2
    return {
        "tokens": r.integers(0, GPT2.vocab_size, shape).astype(np.int32),
        "targets": r.integers(0, GPT2.vocab_size, shape).astype(np.int32),
        "mask": (r.random(shape) < keep).astype(np.float32),
        "segments": segments.astype(np.int32),
        "positions": (np.arange(shape[-1]) - starts).astype(np.int32),
    }


@functools.cache
def initial_state(form, optimizer):
    """The state that every layout starts from. (That init is the same on each is another test.)"""

    def init(rng):
        return problems.with_noise(decoder.init((FORMS | FORMS_APART)[form], rng), 0.02)

    return jt.init_state(init, optimizer_named(optimizer), jax.random.key(0))


def train(form, optimizer, accumulate, remat, mesh=None, zero=0, dropout=0.0):
    """Five steps in one compiled call; returns host arrays."""
    config = dataclasses.replace((FORMS | FORMS_APART)[form], remat=remat, dropout=dropout)
    chain = optimizer_named(optimizer)
    # The step donates its state, and this one is shared between cases.
    state = jax.tree.map(jnp.copy, initial_state(form, optimizer))
    if mesh is not None:
        shapes = jt.abstract_state(
            functools.partial(decoder.init, config),
            chain,
            mesh=mesh,
            rules=decoder.RULES,
            zero=zero,
        )
        state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), state, shapes)
    shardings = None if mesh is None else jt.gradient_shardings(state, zero=zero)
    step = jt.build_train_step(
        decoder.loss_fn(config), chain, accumulate=accumulate, gradient_shardings=shardings
    )

    def five(state, batches):
        # compile_step splits the leading axis of a batch; steps come second.
        return jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batches))

    rows_first = {name: np.swapaxes(x, 0, 1) for name, x in batches().items()}
    # Most of the time of these tests is LLVM's; its optimisations are not what is tested.
    options = {"xla_backend_optimization_level": 0}
    rules = jt.Rules(decoder.RULES, batch=decoder.BATCH)
    how = {"rules": rules, "compiler_options": options}
    compiled = jt.compile_step(five, state, rows_first, mesh=mesh, **how)
    state, metrics = compiled(state, rows_first)
    return jax.device_get(
        {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "gradients": state.opt_state[0],
            "parameters": state.params,
            "optimizer state": state.opt_state[1],
        }
    )


reference = functools.cache(functools.partial(train, mesh=None))


EVERYDAY = [
    ("llama", "data 2 x fsdp 2 x tensor 2", 1, "full", "adamw"),
    ("llama", "data 2 x tensor 2 x context 2", 1, "full", "adamw"),
]


def cases():
    """All combinations, of which few run every day, of two references."""
    for case in itertools.product(FORMS, LAYOUTS, ACCUMULATE, REMAT, OPTIMIZERS):
        yield pytest.param(*case, marks=[] if case in EVERYDAY else [pytest.mark.slow])


@pytest.mark.parametrize(("form", "layout", "accumulate", "remat", "optimizer"), list(cases()))
def test_layout_agrees_with_one_device(form, layout, accumulate, remat, optimizer):
    axes, zero = LAYOUTS[layout]
    expected = reference(form, optimizer, accumulate, remat)
    found = train(form, optimizer, accumulate, remat, jt.make_mesh(**axes), zero)
    errors = {part: worst(found[part], expected[part]) for part in expected}
    assert not {part: e for part, e in errors.items() if e[0] > TOLERANCE}, errors


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize(
    "layout",
    ["data 2 x tensor 4", "data 2 x fsdp 2 x tensor 2", "context 4 x fsdp 2", "context 8"],
)
@pytest.mark.parametrize("form", FORMS_APART)
def test_other_attention_agrees_with_one_device(form, layout, remat):
    if form == "dropped weights" and layout == "context 8":
        with pytest.raises(ValueError, match=r"4 query heads .* cannot gather keys instead"):
            test_layout_agrees_with_one_device(form, layout, 4, remat, "adamw")
        return
    test_layout_agrees_with_one_device(form, layout, 4, remat, "adamw")
    if form == "dropped weights":
        apart = reference(form, "adamw", 4, remat), reference("gpt2", "adamw", 4, remat)
        assert worst(*(x["gradients"] for x in apart))[0] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gpt2", "llama", "windows"])
@pytest.mark.parametrize(
    "layout", ["context 8", "context 4 x fsdp 2", "data 2 x tensor 2 x context 2"]
)
def test_rings_agree_with_one_device(form, layout):
    with exchange("ring"):
        test_layout_agrees_with_one_device(form, layout, 4, "none", "adamw")


@pytest.mark.slow
def test_dropout_masks_do_not_depend_on_the_mesh():
    expected = train("gpt2", "lamb", 4, "none", dropout=0.3)
    found = train(
        "gpt2", "lamb", 4, "none", jt.make_mesh(data=2, fsdp=2, tensor=2), zero=2, dropout=0.3
    )
    errors = {part: worst(found[part], expected[part]) for part in expected}
    assert not {part: e for part, e in errors.items() if e[0] > TOLERANCE}, errors
    without = reference("gpt2", "lamb", 4, "none")
    assert worst(expected["gradients"], without["gradients"])[0] > 0.1


@pytest.mark.parametrize("form", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_initial_parameters_are_the_same_on_every_mesh(form):
    """But for the last bits of normal numbers, which XLA rounds by the shape of a shard."""
    init = functools.partial(decoder.init, FORMS[form])
    chain = optimizer_named("adamw")
    alone = jt.init_state(init, chain, jax.random.key(7))
    for axes in ({"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = jt.make_mesh(**axes)
        state = jt.init_state(init, chain, jax.random.key(7), mesh=mesh, rules=decoder.RULES)
        chex.assert_trees_all_close(state.params, alone.params, rtol=5e-7, atol=0)


def test_the_comparison_sees_a_gradient_that_is_off_by_a_little():
    expected = reference("gpt2", "lamb", 4, "none")
    scaled = jax.tree.map(np.copy, expected["gradients"])
    scaled["blocks"]["mlp"]["up"]["bias"] *= 1 + 1e-4
    error, name = worst(scaled, expected["gradients"])
    assert error > TOLERANCE
    assert name == "blocks/mlp/up/bias"
