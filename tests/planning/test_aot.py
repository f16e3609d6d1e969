"""The train step through the real TPU and GPU compilers, on a machine that has neither chip."""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxtrain as jt
from jaxtrain.compile import EIGHT_BITS, peak_bytes
from jaxtrain.engines.pipeline.tables import make_table
from jaxtrain.models import decoder, encoder
from jaxtrain.models.generate import Weights, generate_step, prompts
from jaxtrain.ops.attention import attention
from jaxtrain.ops.context import exchange
from jaxtrain.ops.scaled import scaled_product
from jaxtrain.planning.hlo import read_program
from jaxtrain.planning.targets import parse_target
from jaxtrain.sharding.placement import constrain_tree
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.step import build_update
from tests import forms
from tests.engines import test_two_stacks as two_stacks
from tests.planning import steps

# Attention says that it cannot be cuDNN here.
pytestmark = pytest.mark.filterwarnings("ignore::jaxtrain.ops.attention.AheadOfTimeWarning")

GPT2 = decoder.DecoderConfig(vocab_size=257, seq_len=128, layers=2, width=256, heads=4)
LLAMA = dataclasses.replace(GPT2, **forms.LLAMA)
DELTA = {"delta_pattern": (True,), "delta_heads": 4, "delta_key_heads": 4}
DELTA |= {"delta_key_dim": 32, "delta_value_dim": 64}


def devices_of(target, **given):
    compiler = {"v5e": "libtpu", "h100": "jax_cuda12_plugin"}[target.split(":")[0]]
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs the compiler {compiler}: pip install 'jaxtrain[aot]'")
    return parse_target(target, **given).devices()


def tpu():
    return devices_of("v5e:2x4")


def two_slices():
    return devices_of("v5e:2x2", slices=2)


def two_hosts():
    return devices_of("h100:2x4")


def gpu():
    return devices_of("h100:1x8")


@pytest.mark.parametrize(
    ("target", "config"),
    [
        pytest.param(tpu, LLAMA, id="tpu-llama"),
        pytest.param(gpu, GPT2, id="gpu-gpt2"),
        pytest.param(tpu, GPT2, id="tpu-gpt2", marks=pytest.mark.slow),
        pytest.param(gpu, LLAMA, id="gpu-llama", marks=pytest.mark.slow),
    ],
)
def test_a_bf16_step_on_data_fsdp_and_tensor_compiles_and_keeps_its_promises(target, config):
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2, devices=target())
    optimizer = jt.make_optimizer("lamb", 1e-3, clip_norm=1.0, stacked=jt.Stack().axes)
    policy = jt.Policy.bf16()
    state = steps.state_of(config, optimizer, mesh, policy=policy)
    batch = steps.batch_shapes(16, config.seq_len, "segments", "positions")
    step = jt.build_train_step(
        decoder.loss_fn(config),
        optimizer,
        policy=policy,
        accumulate=2,
        gradient_shardings=jt.gradient_shardings(state),
        gather="model",
    )
    train = jt.compile_step(step, state, batch, mesh=mesh)
    assert all(check.holds for check in train.checks), train.report()
    # The TPU takes its fused kernel, on every device's own rows and heads: nothing is gathered.
    kernels = re.findall(r"= .*custom_call_target=\"tpu_custom_call\"", train.compiled.as_text())
    assert len(kernels) == (3 if target is tpu else 0)
    # What plan reads of the program is whole, kernels or not.
    assert None not in read_program(train.compiled.as_text(), mesh).loops
    # Moments and master parameters are float32; nothing that is multiplied is.
    products = [line for line in train.compiled.as_text().splitlines() if " dot(" in line]
    assert not [line for line in products if " f32[" in line.split(" dot(")[1]]
    assert jt.float32_products(step, state, batch) == []


# Layers of two kinds: as of Gemma 2, Qwen 2 and ModernBERT. What a differentiated branch keeps is
# gathered with remat alone.
KINDS = dataclasses.replace(
    LLAMA, layers=4, kv_heads=4, window=32, window_pattern=(True, False), remat="dots"
)
GEMMA = dataclasses.replace(
    KINDS, mlp="geglu", norm_offset=True, norm_position="sandwich", attention_softcap=50.0
)
QWEN = dataclasses.replace(KINDS, kv_heads=2, qkv_bias=True, window_pattern=(False, False, True))
MODERNBERT = dataclasses.replace(
    encoder.PRESETS["modernbert-base"](),
    **{"vocab_size": 257, "seq_len": 1024, "layers": 4, "width": 256, "heads": 4},
    **{"kv_heads": None, "head_dim": None, "mlp_width": None, "window": 33, "remat": "dots"},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "config"),
    [
        pytest.param(gpu, GEMMA, id="gpu-gemma"),
        pytest.param(gpu, dataclasses.replace(QWEN, seq_len=1024), id="gpu-qwen-long"),
        pytest.param(gpu, MODERNBERT, id="gpu-modernbert-long"),
        pytest.param(tpu, GEMMA, id="tpu-gemma"),
    ],
)
def test_layers_of_two_kinds_communicate_as_those_of_one(target, config):
    """The branch between the kinds stays, and nothing that either side keeps is gathered."""
    devices, module = target(), encoder if config is MODERNBERT else decoder
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2, devices=devices)
    optimizer, policy = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0), jt.Policy.bf16()
    tokens = jax.ShapeDtypeStruct((16, config.seq_len), jnp.int32)
    batch = dict.fromkeys(("tokens", "segments", "targets"), tokens)
    if module is encoder:
        batch["places"] = batch["targets"] = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    batch["mask"] = jax.ShapeDtypeStruct(batch["targets"].shape, jnp.float32)

    def compiled(config):
        """What is moved, and how many branches there are."""
        state = jt.abstract_state(
            lambda rng: module.init(config, rng),
            optimizer,
            mesh=mesh,
            rules=module.RULES,
            policy=policy,
        )
        step = jt.build_train_step(
            module.loss_fn(config),
            optimizer,
            policy=policy,
            gradient_shardings=jt.gradient_shardings(state),
            gather="model",
        )
        text = jt.compile_step(step, state, batch, mesh=mesh).compiled.as_text()
        moved = collections.Counter()
        for c in read_program(text, mesh).collectives:
            moved[c.kind, c.axes] += c.executions * c.payload
        return moved, len(re.findall(r" conditional\(", text))

    moved, branches = compiled(config)
    assert (moved, 0) == compiled(
        dataclasses.replace(config, window_pattern=(True,), local_rope_theta=None)
    )
    assert branches >= 2  # forward and backward


@pytest.mark.parametrize("target", [tpu, gpu])
def test_branches_gather_rows_and_scatter_their_sums_over_tensor(target):
    config = dataclasses.replace(LLAMA, kv_heads=4, remat="full")
    train, _, mesh = steps.compile_gpt(
        devices=target(), policy=jt.Policy.bf16(), config=config, fsdp=2, tensor=4
    )
    B, T, D, layers = steps.ROWS // 2, config.seq_len, config.width, config.layers
    program = read_program(train.compiled.as_text(), mesh)
    over_tensor = [c for c in program.collectives if "tensor" in c.axes]
    executions = collections.Counter()
    for c in over_tensor:
        if c.payload >= 2 * B * T * D:
            # Several of these may travel as one.
            executions[c.kind] += c.executions * len(c.shapes)
    # Each layer gathers two inputs, forward and again backward, and two cotangents; it scatters two
    # sums forward, one more when it is computed again, and two backward. The rest are the head and
    # the table.
    assert executions == {"all-gather": 6 * layers + 2, "reduce-scatter": 5 * layers + 2}
    kept = f"bf16[{layers},{B},{T // 4},{D}]"
    assert kept in train.compiled.as_text()
    assert f"bf16[{layers},{B},{T},{D}]" not in train.compiled.as_text()


@pytest.mark.parametrize("axes", [{"data": 2}, {"pipe": 2}], ids=["accumulated", "pipelined"])
@pytest.mark.parametrize("target", [tpu, gpu])
def test_weights_are_gathered_and_gradients_reduced_once_per_step(target, axes):
    mesh = jt.make_mesh(**axes, fsdp=2, tensor=2, devices=target())
    given, optimizer = {"policy": "bf16", "gather": "step"}, optax.sgd(1e-3)
    state = steps.state_of(GPT2, optimizer, mesh, policy="bf16")
    given["gradient_shardings"] = jt.gradient_shardings(state)
    batch = steps.batch_shapes(32, GPT2.seq_len)
    if "pipe" in axes:
        engine = jt.pipeline(decoder.stages(GPT2), mesh=mesh, microbatches=4, **given)
        step = build_update(engine, optimizer, policy="bf16")
    else:
        step = jt.build_train_step(decoder.loss_fn(GPT2), optimizer, accumulate=4, **given)
    train = jt.compile_step(step, state, batch, mesh=mesh)
    split = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * mesh.shape["fsdp"]
        for x in jax.tree.leaves(state.params)
        if "fsdp" in str(x.sharding.spec)
    )
    moved = {"all-gather": 0, "reduce-scatter": 0}
    for c in read_program(train.compiled.as_text(), mesh).collectives:
        # Nothing as long as the vocabulary leaves its part of the tensor axis.
        assert "tensor" not in c.axes or str(GPT2.padded_vocab) not in str(c.shapes), c
        if {"data", "fsdp"} & set(c.axes) and c.payload > 64:
            assert (c.executions, c.conditional) == (1, False), c
            moved[c.kind] = moved.get(c.kind, 0) + c.payload * (c.axes == ("fsdp",))
    assert moved["all-gather"] == 2 * split  # bytes of bfloat16
    assert moved["reduce-scatter"] == 4 * split  # of float32
    if "pipe" in axes:
        assert " conditional(" in train.compiled.as_text()


def test_tiles_of_attention_are_not_in_memory_at_once_on_gpus():
    mesh = jt.make_mesh(data=8, devices=gpu())
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    heads, T = 8, 1024
    x_BTHK = jax.ShapeDtypeStruct((8, T, heads, 16), jnp.float32, sharding=rows)
    weights = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)

    def layers(x_BTHK, weights):
        @jax.checkpoint
        def layer(x_BTHK, weight):
            return x_BTHK + attention(x_BTHK @ weight, x_BTHK, x_BTHK), None

        return jax.lax.scan(layer, x_BTHK, weights)[0].sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(layers, (0, 1))).lower(x_BTHK, weights).compile()
    # Scores of the largest of four tiles, their gradient, and what is of the size of x; all tiles
    # would be two and a half times the largest, and twice that with gradients.
    largest = heads * (T // 4) * T * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * largest


def test_a_step_on_two_slices_gathers_weights_inside_each():
    """Whatever fsdp gathers or scatters stays on the fast links; what crosses is summed."""
    devices = two_slices()
    mesh = jt.make_mesh(data=2, fsdp=4, dcn_data=2, devices=devices)
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0)
    state = steps.state_of(LLAMA, optimizer, mesh)
    batch = steps.batch_shapes(16, LLAMA.seq_len, "segments", "positions")
    step = jt.build_train_step(
        decoder.loss_fn(LLAMA), optimizer, gradient_shardings=jt.gradient_shardings(state)
    )
    train = jt.compile_step(step, state, batch, mesh=mesh)
    assert all(check.holds for check in train.checks), train.report()
    collectives = read_program(train.compiled.as_text(), mesh).collectives
    assert {c.axes for c in collectives if c.kind == "all-gather"} == {("fsdp",)}
    # Sums travel shard by shard: scattered on the fast links, reduced across the slow ones.
    assert {c.kind for c in collectives if "data" in c.axes} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [two_slices, two_hosts])
@pytest.mark.parametrize("slow", ["data", "fsdp", "pipe"])
def test_what_crosses_slices_or_hosts_is_a_share_of_the_gradients(slow, devices):
    """Reduced inside first: on TPUs the compiler's own way, on GPUs as the program says."""
    sizes = {"data": {"data": 4, "fsdp": 2}, "fsdp": {"fsdp": 4, "tensor": 2}}
    sizes = sizes.get(slow, {"pipe": 2, "fsdp": 4})
    mesh = jt.make_mesh(**sizes, **{f"dcn_{slow}": 2}, devices=devices())
    config, optimizer = dataclasses.replace(LLAMA, layers=4), jt.make_optimizer("adamw", 1e-3)
    state = steps.state_of(config, optimizer, mesh)
    batch = steps.batch_shapes(64, config.seq_len)
    how = {"gradient_shardings": jt.gradient_shardings(state), "gather": "step"}
    if slow == "pipe":
        engine = jt.pipeline(decoder.stages(config), mesh=mesh, microbatches=8, **how)
        step = build_update(engine, optimizer)
    else:
        step = jt.build_train_step(decoder.loss_fn(config), optimizer, accumulate=2, **how)
    train = jt.compile_step(step, state, batch, mesh=mesh, rules=decoder.RULES)
    crossing = collections.Counter()
    for c in read_program(train.compiled.as_text(), mesh).collectives:
        if c.islands > 1 and c.payload > 64:
            assert slow in c.axes, c
            crossing[c.kind] += c.executions * c.payload
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(state.params)
    )
    if slow == "data":
        # Of the part that fsdp leaves to a device, the half that the fast part of data leaves.
        wanted = {"all-reduce": held / 2}
    elif slow == "fsdp":
        # A device's piece crosses once each way: of two pieces, one is its own.
        wanted = {"all-gather": 2 * held, "reduce-scatter": 2 * held}
        assert crossing.pop("all-reduce") < 0.01 * held  # what lies whole
    else:
        # Two rows a tick in float32, both ways; and sums of embedding and head.
        ticks = make_table("1f1b", stages=2, microbatches=8).ticks
        wanted = {"collective-permute": 2 * ticks * 2 * config.seq_len * config.width * 4}
        assert crossing.pop("all-reduce") < 0.2 * held
    assert set(crossing) == set(wanted)
    for kind, size in wanted.items():
        assert size == pytest.approx(crossing[kind], rel=0.1), (kind, crossing)


@pytest.mark.slow
def test_rows_are_exchanged_in_a_host_while_weights_come_from_others():
    config = dataclasses.replace(LLAMA, layers=4, remat="dots")
    given = {"policy": jt.Policy.bf16(), "config": config}
    train, _, mesh = steps.compile_gpt(devices=two_hosts(), **given, fsdp=4, tensor=2)
    text = train.compiled.as_text()
    axes = {c.name: c.axes for c in read_program(text, mesh).collectives}
    both, under_way = 0, set()
    for name, what in re.findall(r"%(\S+) = .*(?:-start|-done)\(%?([\w.-]*)", text):
        under_way.discard(what)
        if axes.get(name) == ("tensor",):
            both += any(axes[other] == ("fsdp",) for other in under_way)
        if name in axes:
            under_way.add(name)
    # In the loops of both passes. With one collective at a time there are none.
    assert both >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:1x1", "h100:1x1"])
def test_the_peak_of_a_device_has_nothing_that_is_on_its_host(name):
    (device,) = devices_of(name)
    layers, width, rows = 16, 2048, 8192
    save = jax.checkpoint_policies.save_and_offload_only_these_names
    where = {"offload_src": "device", "offload_dst": "pinned_host"}

    def peak(**names):
        given = {f"names_which_can_be_{n}": names.get(n, []) for n in ("saved", "offloaded")}
        policy = save(**given, **where)

        def loss(params, x):
            def body(x, w):
                return jnp.tanh(checkpoint_name(x, "x") @ w), None

            return jnp.square(jax.lax.scan(jax.checkpoint(body, policy=policy), x, params)[0]).sum()

        sharding = jax.sharding.SingleDeviceSharding(device)
        shapes = (layers, width, width), (rows, width)
        given = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in shapes]
        return peak_bytes(jax.jit(jax.grad(loss)).lower(*given).compile())

    kept = layers * rows * width * 4
    # The TPU compiler keeps them in bfloat16, as only products read them.
    share = 0.35 if name[0] == "v" else 0.9
    assert peak(offloaded=["x"]) < peak(saved=["x"]) - share * kept


@pytest.mark.slow
def test_offload_moves_what_is_kept_to_the_host():
    devices = tpu()

    def memory(remat, **axes):
        config = dataclasses.replace(GPT2, layers=4, seq_len=512, remat=remat)
        mesh = jt.make_mesh(**axes, devices=devices)
        optimizer, policy = jt.make_optimizer("adamw", 1e-3), jt.Policy.bf16()
        state = steps.state_of(config, optimizer, mesh, policy=policy)
        batch = steps.batch_shapes(16, config.seq_len)
        step = jt.build_train_step(decoder.loss_fn(config), optimizer, policy=policy)
        return jt.compile_step(step, state, batch, mesh=mesh).compiled.memory_analysis()

    dots, offload = (memory(remat, data=2, fsdp=2, tensor=2) for remat in ("dots", "offload"))
    # Attention's result and four dense layers' (q, k, v, out, up): widths 6 x 256 and 1,024, split
    # in two, of every layer and of four rows per device.
    kept = 4 * (4 * 512) * (5 * 256 + 1024) // 2 * 2
    assert dots.host_temp_size_in_bytes == 0
    assert offload.host_temp_size_in_bytes >= 0.9 * kept
    assert offload.peak_memory_in_bytes < dots.peak_memory_in_bytes - 0.5 * kept


@functools.cache
def working_bytes(target, schedule, microbatches, remat="full", counts=None):
    """Compiles a bf16 step on pipe x data x tensor, eight rows per microbatch and device.

    Args:
      counts: of the layers of each stage; as many in each by default.

    Returns:
      The bytes of one device at its peak, without the arguments (state and batch), the program and
      its mesh.
      (Temporaries alone would miss what the TPU compiler keeps in the chip's fast memory.)
    """
    mesh = jt.make_mesh(pipe=2, data=2, tensor=2, devices=target())
    # Wide enough that what is compared is not what lies in the fast memory of a TPU.
    config = dataclasses.replace(LLAMA, layers=4, width=512, seq_len=512)
    virtual = 2 if schedule == "interleaved" else 1
    stack = jt.Stack(virtual=virtual, counts=counts)
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=stack.axes)
    policy = jt.Policy.bf16()
    state = jt.abstract_state(
        lambda rng: stack.cut(decoder.init(config, rng)),
        optimizer,
        mesh=mesh,
        rules=jt.Rules(decoder.RULES, stacked=stack),
        policy=policy,
    )
    batch = steps.batch_shapes(16 * microbatches, config.seq_len, "segments", "positions")
    shardings = jt.gradient_shardings(state)
    engine = jt.pipeline(
        dataclasses.replace(decoder.stages(config), stacked=stack),
        mesh=mesh,
        schedule=schedule,
        virtual=virtual,
        microbatches=microbatches,
        remat=remat,
        policy=policy,
        gradient_shardings=shardings,
        gather="model",
    )
    step = build_update(engine, optimizer, policy=policy, constrain=constrain_tree(shardings))
    compiled = jt.compile_step(step, state, batch, mesh=mesh).compiled
    memory = compiled.memory_analysis()
    return memory.peak_memory_in_bytes - memory.argument_size_in_bytes, compiled.as_text(), mesh


# A pipeline takes a compiler 15 to 35 s: each has one every day.
DAILY = [(tpu, "1f1b"), (gpu, "interleaved")]
ALL = [
    pytest.param(*case, marks=[] if case in DAILY else [pytest.mark.slow])
    for case in itertools.product((tpu, gpu), ("1f1b", "interleaved"))
]


@pytest.mark.parametrize(
    ("target", "schedule", "counts"),
    [(*case, (8, 128)) for case in DAILY]
    + [pytest.param(*case.values, (8, 16, 32, 128), marks=pytest.mark.slow) for case in ALL],
)
def test_a_pipeline_keeps_its_branches_and_its_memory_does_not_grow(target, schedule, counts):
    compiled = [working_bytes(target, schedule, count) for count in counts]
    *sizes, largest = [size for size, _, _ in compiled]
    assert max(sizes) <= 1.02 * min(sizes), sizes
    # A copy of the tokens grows with their number, and nothing else does.
    assert largest <= 1.02 * min(sizes) + 2 * 4 * 8 * 512 * 128, (sizes, largest)
    assert " conditional(" in compiled[0][1]


def assert_exchanges(text, mesh, ticks, each=2):
    """So many per tick, and all else that crosses the stages is reduced in the end."""
    crossing = [c for c in read_program(text, mesh).collectives if {"pipe", "?"} & set(c.axes)]
    exchanges = [c for c in crossing if c.kind == "collective-permute"]
    assert [(c.axes, c.executions) for c in exchanges] == each * [(("pipe",), ticks)]
    assert all(c.source.endswith("ppermute") for c in exchanges)
    rest = [c for c in crossing if c.kind != "collective-permute"]
    assert rest
    assert {(c.kind, c.executions) for c in rest} == {("all-reduce", 1)}, rest


@pytest.mark.parametrize(("target", "schedule"), ALL)
def test_stages_exchange_twice_per_tick_and_reduce_in_the_end(target, schedule):
    _, text, mesh = working_bytes(target, schedule, 8)
    virtual = 2 if schedule == "interleaved" else 1
    ticks = make_table(schedule, stages=2, microbatches=8, virtual=virtual).ticks
    assert_exchanges(text, mesh, ticks)


@pytest.mark.slow
@pytest.mark.parametrize("target", [tpu, gpu])
def test_stages_of_unequal_depth_differ_in_memory_alone(target):
    even = working_bytes(target, "1f1b", 8)
    uneven = working_bytes(target, "1f1b", 8, counts=(3, 1))
    ticks = make_table("1f1b", stages=2, microbatches=8).ticks
    assert_exchanges(*uneven[1:], ticks)
    assert " conditional(" in uneven[1]
    # Every device runs the same program: all have what the deepest stage needs, of three layers in
    # place of two. (1.65 times as much on GPUs, where buffers of zeros are copied before use.)
    assert even[0] < uneven[0] < 1.75 * even[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", [tpu, gpu])
@pytest.mark.parametrize("stack", [two_stacks.TWO, two_stacks.UNEVEN], ids=["even", "uneven"])
def test_an_encoder_and_a_decoder_exchange_as_one_stack_does(target, stack):
    mesh = jt.make_mesh(pipe=2, data=2, tensor=2, devices=target())
    rules = jt.Rules(two_stacks.RULES, stacked=stack)
    optimizer = jt.make_optimizer("adamw", 1e-3, clip_norm=1.0, stacked=stack.axes)
    state = jt.abstract_state(
        lambda rng: stack.cut(two_stacks.init(rng)), optimizer, mesh=mesh, rules=rules
    )
    shardings = jt.gradient_shardings(state)
    engine = jt.pipeline(
        two_stacks.stages_of(stack),
        mesh=mesh,
        schedule="interleaved",
        microbatches=8,
        gradient_shardings=shardings,
    )
    step = build_update(engine, optimizer, constrain=constrain_tree(shardings))
    train = jt.compile_step(step, state, two_stacks.make_batch(), mesh=mesh)
    assert all(check.holds for check in train.checks), train.report()
    text = train.compiled.as_text()
    assert " conditional(" in text
    virtual = 2 * stack.virtual
    ticks = make_table("interleaved", stages=2, microbatches=8, virtual=virtual).ticks
    # The stream is a pair, whose parts the GPU compiler sends together.
    assert_exchanges(text, mesh, ticks, each=4 if target is tpu else 2)


@pytest.mark.parametrize("target", [tpu, gpu])
def test_an_evaluation_sends_activations_forward_and_sums_in_the_end(target):
    mesh = jt.make_mesh(pipe=2, data=2, tensor=2, devices=target())
    config = dataclasses.replace(LLAMA, layers=4)
    state = steps.state_of(config, optax.sgd(1.0), mesh)
    batch = steps.batch_shapes(64, config.seq_len, "segments", "positions")
    step = jt.pipeline_eval_step(
        decoder.stages(config), mesh=mesh, microbatches=8, policy="bf16", gather="model"
    )
    text = jt.compile_step(step, state, batch, mesh=mesh, donate=False).compiled.as_text()
    assert " conditional(" in text
    crossing = [c for c in read_program(text, mesh).collectives if {"pipe", "?"} & set(c.axes)]
    found = {(c.kind, c.axes, c.executions) for c in crossing}
    assert found == {("collective-permute", ("pipe",), 9), ("all-reduce", ("pipe",), 1)}


@pytest.mark.slow
@pytest.mark.parametrize("target", [tpu, gpu])
def test_memory_of_gpipe_grows(target):
    # Up to 128 MiB of stash lie in the fast memory of a v5e, which is not counted.
    few, many = (working_bytes(target, "gpipe", count)[0] for count in (8, 128))
    assert many > 1.5 * few


def test_no_buffer_of_a_pipeline_is_copied_in_every_tick_on_gpus():
    # XLA's GPU compiler copies, whole, an array that a branch of a conditional updates.
    _, text, _ = working_bytes(gpu, "1f1b", 8, "none")
    # The buffers of residuals have three slots of two layers each.
    names = re.findall(r"%(\S+) = \w+\[3,2,[\d,]+\]\S* (?:copy|fusion)", outside_fusions(text))
    assert names  # fusions that write one slot
    assert not [name for name in names if "copy" in name]


def outside_fusions(text):
    computations = re.split(r"\n(?=(?:ENTRY )?%)", text)
    return "\n".join(c for c in computations if not c.startswith("%fused_"))


@pytest.mark.slow
@pytest.mark.parametrize("target", [tpu, gpu])
def test_generation_splits_its_cache_and_gathers_a_layer_at_a_time(target):
    config = dataclasses.replace(LLAMA, layers=5, kv_heads=2)
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2, devices=target())
    shapes = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(0))
    shardings = param_shardings(shapes, mesh, decoder.RULES)
    weights = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=s), shapes, shardings
    )
    batch = prompts(config, [[1] * 64] * 8, max_new_tokens=32, temperature=0.0)
    step, state = generate_step(config, max_new_tokens=32), Weights(weights)
    compiled = jt.compile_step(step, state, batch, mesh=mesh, rules=decoder.RULES, donate=False)
    text = compiled.compiled.as_text()
    assert set(re.findall(r"bf16\[5,(\d+),(\d+),96,64\]", text)) == {("2", "1")}
    moved = [s for each in read_program(text, mesh).collectives for s in each.shapes]
    assert not [s for s in moved if re.search(r"\[5,\d+,\d+", s)]


def test_a_deterministic_program_adds_in_a_fixed_order_on_gpus():
    """Without the switch, rows that a scatter adds to one place are added as they come."""
    state = jt.abstract_state(
        lambda rng: {"table": jnp.zeros((64, 8))},
        optimizer := optax.sgd(0.1),
        mesh=(mesh := jt.make_mesh(data=1, devices=gpu()[:1])),
    )
    loss_fn = lambda params, ids, rng: jnp.sin(params["table"])[ids].mean()  # noqa: E731
    step = jt.build_train_step(loss_fn, optimizer)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    fixed, free = (
        jt.compile_step(step, state, ids, mesh=mesh, deterministic=on) for on in (True, False)
    )
    scatters = lambda train: re.findall(r" scatter\(.*", train.compiled.as_text())  # noqa: E731
    assert scatters(free)
    assert all("unique_indices=true" in line for line in scatters(fixed))
    assert not all("unique_indices=true" in line for line in scatters(free))
    assert "xla_gpu_deterministic_ops" in fixed.report()
    assert "xla_gpu_deterministic_ops" not in free.report()


def test_products_of_eight_bits_are_such_in_the_gpu_compilers_program():
    place = jax.sharding.SingleDeviceSharding(gpu()[0])
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        for shape in ((1024, 512), (512, 2048), (1024, 2048))
    )

    def products(x, w, dy):
        y, pullback = jax.vjp(functools.partial(scaled_product, "fp8_tensor"), x, w)
        return y, pullback(dy)

    text = jax.jit(products).lower(x, w, dy).compile().as_text()
    operands = re.findall(r"\(parameter_0\S*: (f8\w+)\S* parameter_1\S*: (f8\w+)", text)
    assert len(re.findall(r" dot\(", text)) == 3
    assert sorted(map(sorted, operands)) == [
        ["f8e4m3fn", "f8e4m3fn"],
        ["f8e4m3fn", "f8e5m2"],
        ["f8e4m3fn", "f8e5m2"],
    ]


def test_cublas_writes_products_of_eight_bits_in_sixteen():
    mesh = jt.make_mesh(devices=gpu()[:1])
    x, w, dy = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P()))
        for shape in ((1024, 512), (512, 2048), (1024, 2048))
    )

    def products(x, w, dy):
        y, pullback = jax.vjp(functools.partial(scaled_product, "fp8_tensor"), x, w)
        return y, pullback(dy)

    with jax.set_mesh(mesh):
        compiled = jax.jit(products).lower(x, w, dy).compile(compiler_options=EIGHT_BITS)
    calls = re.findall(r"= \((\w+)\[.*__cublas\$lt\$matmul\$f8", compiled.as_text())
    assert calls == ["bf16"] * 3


def rows_split(model, target, parts):
    """The compiled step of one row over so many devices, its temporaries and its text."""
    mesh = jt.make_mesh(context=parts, devices=devices_of(target))
    rules, policy = jt.Rules(decoder.RULES, batch=decoder.BATCH), jt.Policy.bf16()
    optimizer = jt.make_optimizer("adamw", 1e-3)
    init = functools.partial(decoder.init, model)
    state = jt.abstract_state(init, optimizer, mesh=mesh, rules=rules, policy=policy)
    step = jt.build_train_step(decoder.loss_fn(model), optimizer, policy=policy)
    batch = steps.batch_shapes(1, model.seq_len)
    compiled = jt.compile_step(step, state, batch, mesh=mesh, rules=rules).compiled
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()


def gathered(text):
    """How many numbers each all-gather of a program makes."""
    found = re.findall(
        r"= \(?(?:\w+\[[\d,]*\]\S* )*\w+\[([\d,]+)\][^=]* all-gather(?:-start)?\(", text
    )
    return [math.prod(map(int, x.split(","))) for x in found]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["heads", "ring"])
def test_rows_that_are_split_need_memory_by_their_part_and_gather_nothing_on_a_tpu(by):
    """Temporaries of a step fall as the devices grow, and stay where the row grows with them."""
    model, used = dataclasses.replace(LLAMA, heads=8, kv_heads=None, remat="full"), []
    for target, parts, length in (("v5e:2x2", 4, 1), ("v5e:2x4", 8, 1), ("v5e:2x4", 8, 2)):
        row = dataclasses.replace(model, seq_len=16384 * length)
        with exchange(by):
            size, text = rows_split(row, target, parts)
        used.append(size)
        found = {kind for kind in ("all-to-all", "collective-permute") if f" {kind}" in text}
        assert found == {"heads": {"all-to-all"}, "ring": {"collective-permute"}}[by]
        # A row of queries, or of keys, would be 16,384 x 256.
        assert all(numbers <= row.seq_len for numbers in gathered(text))
    # Tiles of scores and weights' gradients stay as large.
    assert used[1] < {"heads": 0.6, "ring": 0.8}[by] * used[0]
    assert used[2] < 1.05 * used[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets", [("v5e:2x2", "v5e:2x4"), ("h100:1x4", "h100:1x8")], ids=["v5e", "h100"]
)
def test_linear_attention_needs_memory_by_its_part_of_a_row_and_gathers_maps_alone(targets):
    """Maps of H heads are K x (K + V) a part, and ends of parts, for the convolution, are less."""
    model, used = dataclasses.replace(LLAMA, remat="full", **DELTA), []
    for target, parts, length in zip((*targets, targets[1]), (4, 8, 8), (1, 1, 2), strict=True):
        row = dataclasses.replace(model, seq_len=16384 * length)
        size, text = rows_split(row, target, parts)
        used.append(size)
        # A row of the residual stream would be 16,384 x 256.
        assert 0 < max(gathered(text)) <= max(parts * 4 * 32 * (32 + 64), row.seq_len)
    assert used[1] < 0.75 * used[0]  # gradients of weights stay as large
    assert used[2] < 1.05 * used[0]
