"""Pipelines never change the mathematics: every schedule against one device.

Gradients, parameters and optimizer state are compared, never losses alone; ``worst`` of
``test_parity`` says how.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.compare.parity import worst
from jaxtrain.engines.accumulated import accumulated, split_microbatches
from jaxtrain.engines.pipeline import device, pipeline, residuals
from jaxtrain.engines.pipeline.buffers import leaves_read, picked
from jaxtrain.models import decoder
from jaxtrain.sharding.placement import constrain_tree
from jaxtrain.stages import Stages, run_layers
from jaxtrain.step import build_update, normalize_loss, with_policy
from jaxtrain.tree import named_leaves
from tests import forms, problems
from tests.compare.test_parity import TOLERANCE
from tests.engines import pipelines as small
from tests.problems import record_gradients

STEPS, MICROBATCHES, ROWS = 3, 8, 16

# Most of the time of these tests is LLVM's; its optimisations are not what is tested.
FAST = {"xla_backend_optimization_level": 0}

GPT2 = decoder.DecoderConfig(vocab_size=61, seq_len=8, layers=8, width=16, heads=4, dropout=0.1)
LLAMA = dataclasses.replace(GPT2, **forms.LLAMA)
FORMS = {"gpt2": GPT2, "llama": LLAMA}
LAYOUTS = {
    "pipe 2": {"pipe": 2},
    "pipe 4": {"pipe": 4},
    "pipe 8": {"pipe": 8},
    "pipe 2 x data 2 x tensor 2": {"pipe": 2, "data": 2, "tensor": 2},
    "pipe 4 x fsdp 2": {"pipe": 4, "fsdp": 2},
}
# With the one of test_zero_1_spreads_the_moments_and_changes_nothing: every schedule.
EVERYDAY = [
    ("llama", "pipe 2 x data 2 x tensor 2", "interleaved", 2, "full"),
    ("llama", "pipe 4 x fsdp 2", "gpipe", 1, "none"),
]
EVERY = [
    (form, layout, schedule, virtual, remat)
    for form, layout, (schedule, virtual), remat in itertools.product(
        FORMS, LAYOUTS, [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)], ("full", "none")
    )
    if not (layout == "pipe 8" and virtual == 2)
]
# Three axes beside each other, rows split over context, key heads fewer than the tensor axis.
LAYOUTS |= {
    "pipe 2 x fsdp 2 x tensor 2": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "pipe 2 x data 2 x context 2": {"pipe": 2, "data": 2, "context": 2},
    "pipe 2 x tensor 4": {"pipe": 2, "tensor": 4},
}
EVERY += [
    ("gpt2", "pipe 2 x fsdp 2 x tensor 2", "1f1b", 1, "full"),
    ("llama", "pipe 2 x fsdp 2 x tensor 2", "interleaved", 2, "none"),
    ("gpt2", "pipe 2 x data 2 x context 2", "interleaved", 2, "full"),
    ("llama", "pipe 2 x data 2 x context 2", "1f1b", 1, "none"),
    ("llama", "pipe 2 x tensor 4", "1f1b", 1, "full"),
    ("llama", "pipe 2 x tensor 4", "gpipe", 1, "none"),
]
SLOW = pytest.mark.slow
CASES = EVERYDAY + [
    pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in EVERYDAY
]


def make_mesh(axes):
    return jt.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])


# ---- GPT, three train steps


def gpt_layer(config):
    layer = decoder.stages(config).block

    def block(layer_params, x_BTD, batch, rng=None, *, index=0):
        return layer(layer_params, {}, x_BTD, batch, rng, index)

    return block


def gpt_stages(config):
    return Stages(
        embed=functools.partial(decoder.embed, config),
        block=gpt_layer(config),
        head_loss=functools.partial(decoder.head_loss, config),
    )


def lamb(stack=jt.Stack()):  # noqa: B008
    chain = jt.make_optimizer(
        "lamb",
        learning_rate=jt.schedules.cosine(1e-2, warmup_steps=2, total_steps=10),
        weight_decay=0.1,
        clip_norm=0.5,
        eps=1e-4,  # above rounding noise, which Adam would blow up
        # Softmax does not see a key bias: its gradient is noise, which the ratio would blow up.
        trust_mask=functools.partial(jt.tree.map_named, lambda name, x: "k/bias" not in name),
        stacked=stack.axes,
    )
    return optax.chain(record_gradients(), chain)


@functools.cache
def gpt_batches():
    r = np.random.default_rng(0)
    shape = (ROWS, STEPS, GPT2.seq_len)
    boundary = r.random(shape) < 0.15
    boundary[..., 0] = True
    return {
        "tokens": r.integers(0, GPT2.vocab_size, shape).astype(np.int32),
        "targets": r.integers(0, GPT2.vocab_size, shape).astype(np.int32),
        "mask": (r.random(shape) < r.random((ROWS, STEPS, 1)) ** 2).astype(np.float32),
        "segments": np.cumsum(boundary, -1).astype(np.int32),
    }


@functools.cache
def gpt_params(form):
    """Initial parameters on the host, in natural order."""
    init = jax.jit(lambda rng: problems.with_noise(decoder.init(FORMS[form], rng), 0.02))
    return jax.device_get(init(jax.random.key(0)))


def three_steps(step, state, mesh=None):
    def scan(state, batches):
        return jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batches))

    compiled = jt.compile_step(scan, state, gpt_batches(), mesh=mesh, compiler_options=FAST)
    state, metrics = compiled(state, gpt_batches())
    metrics = {name: metrics[name] for name in ("loss", "accuracy", "weight", "grad_norm")}
    return jax.device_get(
        metrics
        | {
            "gradients": state.opt_state[0],
            "parameters": state.params,
            "optimizer state": state.opt_state[1],
        }
    )


@functools.cache
def one_device(form):
    """Three steps on whole batches: what is dropped does not depend on microbatches."""
    params = gpt_params(form)
    state = jt.init_state(lambda rng: params, lamb(), jax.random.key(1))
    return three_steps(jt.build_train_step(decoder.loss_fn(FORMS[form]), lamb()), state)


def pipelined(form, layout, schedule="1f1b", virtual=1, remat="full", zero=0, counts=None):
    """Three steps on a mesh; returns the state that they start from and what comes of them."""
    mesh = make_mesh(LAYOUTS[layout])
    stack = jt.Stack(virtual=virtual, counts=counts)
    params = stack.cut(gpt_params(form))
    state = jt.init_state(
        lambda rng: params,
        lamb(stack),
        jax.random.key(1),
        mesh=mesh,
        rules=jt.Rules(decoder.RULES, stacked=stack),
        zero=zero,
    )
    shardings = jt.gradient_shardings(state, zero=zero)
    engine = pipeline(
        dataclasses.replace(gpt_stages(FORMS[form]), stacked=stack),
        mesh=mesh,
        microbatches=MICROBATCHES,
        schedule=schedule,
        remat=remat,
        gradient_shardings=shardings,
    )
    step = build_update(engine, lamb(stack), constrain=constrain_tree(shardings))
    specs = {name: str(x.sharding.spec) for name, x in named_leaves(state).items()}
    return specs, three_steps(step, state, mesh)


assert_same_training = functools.partial(problems.assert_agree, tolerance=TOLERANCE)


@pytest.mark.parametrize(("form", "layout", "schedule", "virtual", "remat"), CASES)
def test_training_agrees_with_one_device(form, layout, schedule, virtual, remat):
    _, found = pipelined(form, layout, schedule, virtual, remat)
    assert_same_training(found, one_device(form))


@pytest.mark.slow
def test_zero_1_spreads_the_moments_and_changes_nothing():
    specs, found = pipelined("llama", "pipe 2 x data 2 x tensor 2", remat="none", zero=1)
    kernels = {name: spec for name, spec in specs.items() if name.endswith("mlp/up/kernel")}
    moments = {name: kernels.pop(name) for name in list(kernels) if "opt_state" in name}
    assert moments
    assert all("data" in spec and "pipe" in spec for spec in moments.values()), moments
    assert "data" not in kernels["params/blocks/mlp/up/kernel"]
    assert_same_training(found, one_device("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("form", "virtual"), [("gpt2", 1), ("llama", 2)])
def test_zero_2_and_3_change_nothing(form, virtual, zero):
    schedule = "interleaved" if virtual > 1 else "1f1b"
    specs, found = pipelined(form, "pipe 2 x data 2 x tensor 2", schedule, virtual, zero=zero)
    assert ("data" in specs["params/blocks/mlp/up/kernel"]) == (zero == 3)
    assert_same_training(found, one_device(form))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "layout", "zero", "counts"),
    [
        ("gpt2", "pipe 2 x data 2 x tensor 2", 2, (5, 3)),
        ("llama", "pipe 2 x fsdp 2 x tensor 2", 0, (3, 5)),
        ("gpt2", "pipe 4 x fsdp 2", 3, (3, 3, 2, 0)),
    ],
)
def test_uneven_stages_train_as_on_one_device(form, layout, zero, counts):
    _, found = pipelined(form, layout, remat="none", zero=zero, counts=counts)
    places, rows = np.array(jt.Stack(counts=counts).places), len(counts) * max(counts)
    assert rows not in (GPT2.seq_len, GPT2.width, GPT2.vocab_size)
    natural = jax.tree.map(lambda x: x[places] if np.shape(x)[:1] == (rows,) else x, found)
    assert_same_training(natural, one_device(form))


# ---- a model that is no GPT, one engine call


def run_engine(engine, params, batch, mesh=None, loss_scale=None):
    """Returns GradientSums on the host, and the compiled program."""
    scale = None if loss_scale is None else jnp.float32(loss_scale)
    key = jax.random.key(7)
    jitted = jax.jit(lambda params, batch: engine(params, None, batch, key, scale))
    if mesh is None:
        compiled = jitted.lower(params, batch).compile(FAST)
    else:
        with jax.set_mesh(mesh):
            compiled = jitted.lower(params, batch).compile(FAST)
        params = jax.device_put(params, compiled.input_shardings[0][0])
        batch = jax.device_put(batch, compiled.input_shardings[0][1])
    return jax.device_get(compiled(params, batch)), compiled


def small_pipeline(batch, *, axes=(("pipe", 2),), loss_scale=None, params=None, **options):
    mesh = make_mesh(dict(axes))
    options = {"microbatches": MICROBATCHES, "stages": small.STAGES} | options
    stages = options.pop("stages")
    if counts := options.pop("counts", None):
        stacked = jt.Stack(virtual=options.get("virtual", 1), counts=counts)
        stages = dataclasses.replace(stages, stacked=stacked)
    engine = pipeline(stages, mesh=mesh, **options)
    stack = dataclasses.replace(stages.stacked, virtual=options.get("virtual", 1))
    params = stack.cut(small_params() if params is None else params)
    sums, compiled = run_engine(engine, params, batch, mesh, loss_scale)
    if stack.padded:
        for rows in jax.tree.leaves(sums.grads[stack.key]):
            rows = rows.reshape(-1, *rows.shape[stack.lead :])
            assert not np.delete(rows, stack.places, axis=0).any()
    return dataclasses.replace(sums, grads=stack.natural(sums.grads)), compiled


@functools.cache
def accumulating(microbatches, policy):
    """The accumulating engine on one device, compiled once: ``(params, batch) -> GradientSums``."""
    loss_fn = with_policy(normalize_loss(small.loss_fn, False), policy)
    engine = accumulated(loss_fn, microbatches)
    jitted = jax.jit(lambda params, batch: engine(params, None, batch, jax.random.key(7), None))
    return jitted.lower(small_params(), small.make_batch(ROWS)).compile(FAST)


def small_accumulated(batch, *, policy=None, microbatches=MICROBATCHES):
    run = accumulating(microbatches, policy or jt.Policy.f32())
    return jax.device_get(run(small_params(), batch))


@functools.cache
def small_params():
    return small.init(jax.random.key(0))


def assert_same_sums(found, expected, tolerance=TOLERANCE):
    assert worst(found.grads, expected.grads)[0] < tolerance
    assert worst(found.loss, expected.loss)[0] < tolerance
    assert found.microbatches == expected.microbatches
    assert {x.dtype for x in jax.tree.leaves(found.grads)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("remat", ["full", "none"])
@pytest.mark.parametrize(
    ("axes", "schedule", "virtual", "microbatches"),
    [
        ((("pipe", 2),), "1f1b", 1, 8),
        ((("pipe", 4),), "interleaved", 2, 2),  # fewer microbatches than devices
        ((("pipe", 2), ("data", 2)), "interleaved", 4, 8),
        ((("pipe", 8),), "gpipe", 1, 1),
    ],
)
def test_a_users_model(axes, schedule, virtual, microbatches, remat):
    batch = small.make_batch(ROWS)
    found, _ = small_pipeline(
        batch,
        axes=axes,
        schedule=schedule,
        virtual=virtual,
        microbatches=microbatches,
        remat=remat,
    )
    assert_same_sums(found, small_accumulated(batch, microbatches=microbatches))
    assert not found.grads["unused"].any()


def test_microbatches_without_any_token_and_of_negative_weight():
    batch = small.make_batch(ROWS)
    for empty in (0, 3, 7):
        batch["mask"][empty::MICROBATCHES] = 0.0
    batch["mask"][2::MICROBATCHES] *= -1.0
    found, _ = small_pipeline(batch)
    assert_same_sums(found, small_accumulated(batch))
    assert found.loss.weight == batch["mask"].sum()

    def total(params):
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(7)))
        split = split_microbatches(batch, MICROBATCHES), keys(jnp.arange(MICROBATCHES))
        return jax.vmap(lambda rows, key: small.loss_fn(params, rows, key).total)(*split).sum()

    assert worst(found.grads, jax.jit(jax.grad(total))(small_params()))[0] < TOLERANCE


def test_a_scalar_loss_weighs_every_microbatch_as_one():
    def mean_loss(params, x, batch):
        loss = small.head_loss(params, x, batch)
        return loss.total / (1.0 + loss.weight)

    batch = small.make_batch(ROWS)
    stages = dataclasses.replace(small.STAGES, head_loss=mean_loss)
    found, _ = small_pipeline(batch, stages=stages)
    assert found.loss.weight == MICROBATCHES

    def loss_fn(params, batch, rng):
        loss = small.loss_fn(params, batch, rng)
        return loss.total / (1.0 + loss.weight)

    engine = accumulated(normalize_loss(loss_fn, False), MICROBATCHES)
    assert_same_sums(found, run_engine(engine, small_params(), batch)[0])


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_masked_bubbles_give_the_same_gradients_without_a_branch(remat):
    batch, axes = small.make_batch(ROWS), (("pipe", 2), ("data", 2))
    skipping, branches = small_pipeline(batch, axes=axes, remat=remat)
    masking, straight = small_pipeline(batch, axes=axes, remat=remat, skip_bubbles=False)
    assert_same_sums(masking, skipping, 1e-6)
    assert " conditional(" in branches.as_text()
    assert " conditional(" not in straight.as_text()


@pytest.mark.parametrize("remat", ["full", "none"])
def test_program_branches_and_talks_twice_per_tick(remat):
    _, compiled = small_pipeline(
        small.make_batch(ROWS), axes=(("pipe", 4),), schedule="interleaved", virtual=2, remat=remat
    )
    text = compiled.as_text()
    # Forward, backward, loss, embedding's gradient; recomputing also embeds twice.
    assert len(re.findall(r" conditional\(", text)) == (6 if remat == "full" else 5)
    exchanges = re.findall(r' collective-permute(?:-start)?\(.*op_name="([^"]*)"', text)
    assert len(exchanges) == 2
    assert all("while/body" in name for name in exchanges)


def test_the_head_runs_for_no_weight_alone():
    _, compiled = small_pipeline(small.make_batch(ROWS))
    products = re.findall(r' dot\(.*op_name="([^"]*)"', compiled.as_text())
    assert products
    assert all("shard_map" in name for name in products)


def test_zero_2_pins_the_running_sums():
    mesh = make_mesh({"pipe": 2, "data": 2})
    rules = [("^blocks/", ("layers", None, None))]
    state = jt.init_state(small.init, optax.sgd(1.0), jax.random.key(0), mesh=mesh, rules=rules)
    shardings = jt.gradient_shardings(state, zero=2)
    assert "data" in str(shardings["blocks"]["up"].spec)
    batch = small.make_batch(ROWS)
    found, compiled = small_pipeline(
        batch, axes=(("pipe", 2), ("data", 2)), gradient_shardings=shardings
    )
    assert_same_sums(found, small_accumulated(batch))
    assert compiled.output_shardings.grads["blocks"]["up"].is_equivalent_to(
        shardings["blocks"]["up"], 3
    )


# ---- precision


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_bf16_agrees_with_the_accumulating_engine(remat):
    policy, batch = jt.Policy.bf16(), small.make_batch(ROWS)
    found, _ = small_pipeline(batch, policy=policy, remat=remat)
    assert_same_sums(found, small_accumulated(batch, policy=policy), 1e-6)
    assert worst(found.grads, small_accumulated(batch).grads)[0] > 1e-3


def test_fp16_sends_gradients_of_means_and_takes_the_scale_out():
    policy, batch = jt.Policy.fp16(), small.make_batch(ROWS)
    # Sums over so much weight, times the scale, are far beyond float16.
    batch["mask"] *= 4096.0
    found, _ = small_pipeline(batch, policy=policy, loss_scale=2.0**10)
    assert worst(found.grads, small_accumulated(batch).grads)[0] < 1e-2


def test_the_rounding_of_a_narrow_loss_does_not_reach_its_gradients():
    def narrow(params, x, batch):
        loss = small.head_loss(params, x, batch)
        return dataclasses.replace(loss, total=loss.total.astype(jnp.bfloat16))

    batch = small.make_batch(ROWS)
    stages = dataclasses.replace(small.STAGES, head_loss=narrow)
    found, _ = small_pipeline(batch, stages=stages)
    assert worst(found.grads, small_accumulated(batch).grads)[0] < TOLERANCE


@pytest.mark.parametrize(("remat", "virtual"), [("full", 1), ("none", 2)])
def test_layers_may_have_integers_and_batches_scalars(remat, virtual):
    def block(layer, x, batch, rng):
        return small.block(layer, x, batch, rng) + layer["number"] * batch["shift"]

    stages = dataclasses.replace(small.STAGES, block=block)
    loss_fn = jt.loss_from_stages(stages)
    numbers = {"number": jnp.arange(small.LAYERS)}
    params = small_params() | {"blocks": small_params()["blocks"] | numbers}
    batch = small.make_batch(ROWS) | {"shift": np.float32(0.1)}
    engine = accumulated(normalize_loss(loss_fn, False), MICROBATCHES)
    expected, _ = run_engine(engine, params, batch)
    schedule = "1f1b" if virtual == 1 else "interleaved"
    found, _ = small_pipeline(
        batch, stages=stages, params=params, remat=remat, virtual=virtual, schedule=schedule
    )
    assert_same_sums(found, expected)


# ---- stages of different numbers of layers

UNEVEN = [
    ({"pipe": 2, "data": 2}, "interleaved", 2, "none", (3, 3, 2, 0)),
    ({"pipe": 4}, "1f1b", 1, "full", (3, 3, 2, 0)),
    pytest.param({"pipe": 2, "fsdp": 2}, "1f1b", 1, "none", (5, 3), marks=SLOW),
    pytest.param({"pipe": 4, "data": 2}, "gpipe", 1, "full", (0, 4, 4, 0), marks=SLOW),
    pytest.param({"pipe": 2, "tensor": 4}, "interleaved", 2, "full", (1, 3, 1, 3), marks=SLOW),
    pytest.param({"pipe": 8}, "gpipe", 1, "none", (2, 2, 0, 1, 1, 1, 1, 0), marks=SLOW),
]


@pytest.mark.parametrize(("axes", "schedule", "virtual", "remat", "counts"), UNEVEN)
def test_uneven_stages(axes, schedule, virtual, remat, counts):
    """Of blocks that would do something with weights of zeros too, if they were called."""
    assert_shared_sums(axes, schedule, virtual, remat, counts=counts)


@pytest.mark.slow
@pytest.mark.parametrize("skip_bubbles", [True, False])
def test_uneven_stages_of_layers_that_are_checkpointed(skip_bubbles):
    stages = dataclasses.replace(shared_stages(), remat=jax.checkpoint)
    options = {"counts": (5, 3), "remat": "none", "skip_bubbles": skip_bubbles}
    found, compiled = small_pipeline(small.make_batch(ROWS), stages=stages, **options)
    assert_same_sums(found, shared_sums())
    assert (" conditional(" in compiled.as_text()) == skip_bubbles


def test_layers_that_may_be_skipped_keep_what_others_keep():
    """No parameter among the residuals, and a flag and a number for each row."""
    names = frozenset(f"blocks/{name}" for name in small_params()["blocks"])
    weights, x = {"blocks": small_params()["blocks"]}, jnp.ones((3, small.LENGTH, small.WIDTH))
    context = (weights, small.make_batch(3), jax.random.key(1), jnp.int32(0), jnp.int32(5))

    def kept(counts):
        stages = dataclasses.replace(small.STAGES, stacked=jt.Stack(counts=counts))
        layers = functools.partial(device._layers, device.Pipeline(stages, None, trains=names), 0)
        layout = residuals.residual_layout(layers, picked(weights, names), x, context)
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in layout.stored)

    gate = 4 * 3 * (small.LAYERS - 1)  # kept once, where every layer runs
    assert kept((8, 5)) == kept((8, 8)) + gate + 5 * small.LAYERS


# ---- a residual stream of two parts, and parameters that all layers share


def shared_stages():
    """A gain that blocks and the head read, a penalty that is added up, and an offset by layer."""

    def embed(params, batch, rng):
        return {"x": small.embed(params, batch, rng), "penalty": 0.0}

    def block(layer, shared, stream, batch, rng, index):
        x = small.block(layer, stream["x"] * shared["gain"], batch, rng) + 0.1 * index
        return {"x": x, "penalty": stream["penalty"] + jnp.square(x).mean()}

    def head_loss(params, stream, batch):
        loss = small.head_loss(params, stream["x"], batch)
        return dataclasses.replace(loss, total=loss.total + stream["penalty"])

    return Stages(embed, block, head_loss, shared=("gain", "unused"))


def shared_loss(params, batch, rng):
    """The same model, written out."""
    x, penalty = small.embed(params, batch, rng), 0.0
    for index in range(small.LAYERS):
        layer = jax.tree.map(lambda p, i=index: p[i], params["blocks"])
        layer_rng = None if rng is None else jax.random.fold_in(rng, index)
        x = small.block(layer, x * params["gain"], batch, layer_rng) + 0.1 * index
        penalty += jnp.square(x).mean()
    loss = small.head_loss(params, x, batch)
    return dataclasses.replace(loss, total=loss.total + penalty)


@functools.cache
def shared_sums():
    engine = accumulated(normalize_loss(shared_loss, False), MICROBATCHES)
    return run_engine(engine, small_params(), small.make_batch(ROWS))[0]


def assert_shared_sums(axes, schedule, virtual, remat, **options):
    options |= {"schedule": schedule, "virtual": virtual, "remat": remat, "axes": axes.items()}
    found, _ = small_pipeline(small.make_batch(ROWS), stages=shared_stages(), **options)
    assert_same_sums(found, shared_sums())


SHARED = [
    ({"pipe": 2, "data": 2}, "interleaved", 2, "none"),
    ({"pipe": 4}, "1f1b", 1, "full"),
    pytest.param({"pipe": 2, "fsdp": 2}, "1f1b", 1, "none", marks=pytest.mark.slow),
    pytest.param({"pipe": 4, "tensor": 2}, "interleaved", 2, "full", marks=pytest.mark.slow),
    pytest.param({"pipe": 8}, "gpipe", 1, "none", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axes", "schedule", "virtual", "remat"), SHARED)
def test_a_stream_of_several_arrays_and_shared_parameters(axes, schedule, virtual, remat):
    assert_shared_sums(axes, schedule, virtual, remat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "virtual"), [("pipe=2,data=2,tensor=2", 1), ("pipe=2,fsdp=2,tensor=2", 2)]
)
def test_shared_parameters_train_with_lamb_as_on_one_device(layout, virtual):
    model = jt.Stack(virtual=virtual), shared_loss, shared_stages()
    small.assert_lamb_agrees(layout, *model, schedule="interleaved")


def test_the_loss_of_stages_is_the_model_written_out():
    params, batch = small_params(), small.make_batch(ROWS)
    stack = jt.Stack(virtual=2)
    stages = dataclasses.replace(shared_stages(), stacked=stack, remat=jax.checkpoint)
    loss_fn = jt.loss_from_stages(stages)

    @jax.jit
    def gradients_of(params, cut):
        expected = jax.grad(lambda p: shared_loss(p, batch, jax.random.key(2)).total)(params)
        found = jax.grad(lambda p: loss_fn(p, batch, jax.random.key(2)).total)(cut)
        return stack.natural(found), expected, loss_fn(cut, batch, None)

    found, expected, evaluated = gradients_of(params, stack.cut(params))
    assert worst(found, expected)[0] < TOLERANCE
    assert worst(evaluated, shared_loss(params, batch, None))[0] < TOLERANCE


# ---- as part of a train step


def small_step(mesh, optimizer):
    if mesh is None:
        return jt.build_train_step(small.loss_fn, optimizer, accumulate=MICROBATCHES)
    engine = pipeline(small.STAGES, mesh=mesh, microbatches=MICROBATCHES)
    return build_update(engine, optimizer)


def small_training(mesh, optimizer, batches):
    rules = [("^blocks/", ("layers", None, None))]
    state = jt.init_state(small.init, optimizer, jax.random.key(0), mesh=mesh, rules=rules)
    step = small_step(mesh, optimizer)
    train = jt.compile_step(step, state, batches[0], mesh=mesh, compiler_options=FAST)
    for batch in batches:
        state, metrics = train(state, batch)
    return jax.device_get((state.params, state.opt_state, metrics))


@pytest.mark.slow
def test_accumulation_over_calls_composes():
    optimizer = jt.make_optimizer(
        "adamw", learning_rate=1e-2, clip_norm=0.1, eps=1e-4, accumulate=2
    )
    batches = [small.make_batch(ROWS, seed) for seed in range(4)]
    found = small_training(make_mesh({"pipe": 2, "data": 2}), optimizer, batches)
    expected = small_training(None, optimizer, batches)
    for a, b in zip(found, expected, strict=True):
        assert worst(a, b)[0] < TOLERANCE


@pytest.mark.slow
def test_a_poisoned_microbatch_changes_no_parameter():
    optimizer = optax.adam(1e-2)
    good, bad = small.make_batch(ROWS), small.make_batch(ROWS)
    bad["gate"][5] = np.nan
    mesh = make_mesh({"pipe": 2})
    once = small_training(mesh, optimizer, [good])
    params, opt_state, metrics = small_training(mesh, optimizer, [good, bad])
    assert metrics["skipped"] == MICROBATCHES
    assert metrics["weight"] == 0
    assert worst((params, opt_state), once[:2])[0] == 0.0


# ---- memory


def temp_bytes(schedule, virtual, remat, microbatches):
    mesh = make_mesh({"pipe": 2})
    engine = pipeline(
        small.STAGES,
        mesh=mesh,
        schedule=schedule,
        virtual=virtual,
        remat=remat,
        microbatches=microbatches,
    )
    params = jt.Stack(virtual=virtual).cut(small_params())
    # Microbatches of a fixed size, whose buffers outweigh the parameters and the table.
    batch = small.make_batch(64 * microbatches)
    key = jax.random.key(0)
    jitted = jax.jit(lambda params, batch: engine(params, None, batch, key, None))
    compiled = jitted.lower(params, batch).compile(FAST)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("schedule", "virtual", "remat"),
    [
        ("1f1b", 1, "full"),
        pytest.param("1f1b", 1, "none", marks=SLOW),
        pytest.param("interleaved", 2, "full", marks=SLOW),
        pytest.param("interleaved", 2, "none", marks=SLOW),
    ],
)
def test_memory_does_not_grow_with_microbatches(schedule, virtual, remat):
    sizes = [temp_bytes(schedule, virtual, remat, count) for count in (8, 16, 32)]
    assert max(sizes) < 1.02 * min(sizes), sizes


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "none"])
def test_memory_of_gpipe_grows(remat):
    few, many = (temp_bytes("gpipe", 1, remat, count) for count in (8, 32))
    assert many > 1.3 * few


@pytest.mark.slow
def test_recomputing_keeps_less():
    assert temp_bytes("1f1b", 1, "full", 8) < 0.7 * temp_bytes("1f1b", 1, "none", 8)


# ---- residuals


def stored_layout(config):
    """How a stage of all layers is stored, and what it is called with."""
    params = gpt_params("gpt2" if config.tied else "llama")
    # 24 tokens: no activation has the shape of a weight.
    batch = jax.tree.map(lambda x: x[:3, 0], gpt_batches())
    x = jax.random.normal(jax.random.key(2), (3, config.seq_len, config.width))
    layer = gpt_layer(config)
    if config.remat == "full":
        layer = jax.checkpoint(layer)
    stages = dataclasses.replace(gpt_stages(config), block=layer)

    def function(chunk, x, context):
        return run_layers(stages, chunk, x, *context)

    chunk = {"blocks": params["blocks"]}
    context = (batch, jax.random.key(1), jnp.int32(0))
    layout = residuals.residual_layout(function, chunk, x, context)
    return layout, chunk, x, context


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_stored_residuals_hold_no_parameter_and_lose_nothing(form, remat):
    config = dataclasses.replace(FORMS[form], remat=remat)
    layout, chunk, x, context = stored_layout(config)
    weights = {p.shape for p in jax.tree.leaves(chunk) if p.ndim == 3}
    assert not weights & {s.shape for s in layout.stored}

    @jax.jit
    def gradients(chunk, x, context):
        y, kept = residuals.forward(layout, chunk, x, context)
        found = residuals.pullback(layout, chunk, context, kept)(jnp.ones_like(y))
        _, pull = jax.vjp(lambda chunk, x: layout.function(chunk, x, context), chunk, x)
        return found, pull(jnp.ones_like(y))

    found, expected = gradients(chunk, x, context)
    assert worst(found, expected)[0] < 1e-6


def test_a_checkpointed_block_stores_its_input_alone():
    layout, _, x, _ = stored_layout(dataclasses.replace(LLAMA, remat="full"))
    floats = [s for s in layout.stored if jnp.issubdtype(s.dtype, jnp.floating)]
    assert [s.shape for s in floats] == [(LLAMA.layers, *x.shape)]
    assert any(layout.keys)  # dropout's


# ---- layout of parameters, and mistakes


def test_keys_of_shared_parameters_are_no_string():
    with pytest.raises(ValueError, match=r"shared is the string 'gain'; write \('gain',\)"):
        dataclasses.replace(small.STAGES, shared="gain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, "schedule is 'zigzag': use one of gpipe, 1f1b, interleaved"),
        ({"virtual": 2}, "'1f1b' has one stage per device, and virtual is 2"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"remat": "dots"}, "pipeline remat is 'dots': use one of full, none"),
        ({"axes": {"data": 2}}, "mesh axis 'pipe' of size 2 or more and it has size 1"),
    ],
)
def test_mistakes_in_what_is_asked_for(options, message):
    mesh = make_mesh(options.pop("axes", {"pipe": 2}))
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline(small.STAGES, mesh=mesh, **({"microbatches": 8} | options))


def traced(batch, params=None, *, stages=small.STAGES, state=None, **options):
    mesh = make_mesh({"pipe": 2})
    engine = pipeline(stages, mesh=mesh, **({"microbatches": 8} | options))
    params = small_params() if params is None else params
    jax.eval_shape(lambda p, b: engine(p, state, b, jax.random.key(0), None), params, batch)


def weighs_by_x(params, x, batch):
    """The dependence has no derivative, and is hidden in a function of its own."""
    loss = small.head_loss(params, x, batch)
    return dataclasses.replace(loss, weight=jax.jit(lambda x: (x > 0).sum())(x))


def weighs_by_gain(params, x, batch):
    loss = small.head_loss(params, x, batch)
    return dataclasses.replace(loss, weight=loss.weight * (1 + params["gain"].mean()))


def fewer_layers(count):
    cut = jax.tree.map(lambda p: p[:count], small_params()["blocks"])
    return small_params() | {"blocks": cut}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": fewer_layers(7)}, "7 layers are not divisible by 2 stages = 2"),
        (
            {"stages": dataclasses.replace(small.STAGES, stacked=jt.Stack(counts=(4, 3, 1)))},
            "Stack.counts of 'blocks' is (4, 3, 1), for 3 stages, and the pipeline has 2",
        ),
        (
            {"stages": dataclasses.replace(small.STAGES, stacked=jt.Stack(counts=(5, 3)))},
            "'blocks/down' has shape (8, 12, 8): with virtual=1 a pipeline needs all",
        ),
        (
            {
                "params": jt.Stack(virtual=2).cut(fewer_layers(6)),
                "schedule": "interleaved",
                "virtual": 2,
            },
            "6 layers are not divisible by 2 stages x 2 virtual = 4",
        ),
        (
            {"schedule": "interleaved", "virtual": 2},
            "'blocks/down' has shape (8, 12, 8): with virtual=2",
        ),
        ({"microbatches": 5}, "'gate' has shape (16,): its leading axis cannot be cut"),
        ({"state": {"mean": jnp.zeros(2)}}, "keeps no model state"),
        (
            {"stages": dataclasses.replace(small.STAGES, stacked="layers")},
            "under the key 'layers'",
        ),
        (
            {"stages": dataclasses.replace(small.STAGES, block=lambda p, x, b, r: x[:1])},
            "must keep the shape and dtype",
        ),
        (
            {"stages": dataclasses.replace(small.STAGES, embed=lambda p, b, r: (1, 2))},
            "hands floating-point arrays [B, ...] from stage to stage",
        ),
        (
            {"stages": dataclasses.replace(small.STAGES, shared=("gain", "bias"))},
            "names 'bias' and the parameters that are not stacked are ['gain', 'table', 'unused']",
        ),
        (
            {"stages": dataclasses.replace(small.STAGES, head_loss=lambda p, x, b: x)},
            "both must be scalars",
        ),
        (
            {"stages": dataclasses.replace(small.STAGES, head_loss=weighs_by_x)},
            "the weight that Stages.head_loss returns depends on x",
        ),
    ],
)
def test_mistakes_found_when_traced(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        traced(small.make_batch(ROWS), **options)


def test_a_weight_that_is_a_function_of_parameters_is_warned_of():
    stages = dataclasses.replace(small.STAGES, head_loss=weighs_by_gain)
    with pytest.warns(UserWarning, match="the weight that the loss returns has a derivative"):
        traced(small.make_batch(ROWS), stages=stages)


def test_a_jitted_embedding_reads_what_it_reads():
    def embed(params, batch):
        return jax.jit(lambda p: p["table"][batch] * 2)(params)

    params = {"head": jnp.ones(3), "number": jnp.int32(1), "table": jnp.ones((4, 2))}

    def after_all(params, batch):
        return embed(jax.tree.map(lambda x: x + 1, params), batch)

    for function in (embed, jax.jit(embed), after_all):
        assert leaves_read(function, params, jnp.zeros(5, int)) == {"table"}
