"""The estimate against definitions: bytes and FLOPs by hand, real arrays, another counter."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from experiments import gpt as experiment_gpt
from jaxtrain.build import build_step, make_abstract_state, make_experiment_mesh, make_state
from jaxtrain.engines.pipeline.balance import weigh
from jaxtrain.engines.pipeline.tables import bubble, make_table, makespan
from jaxtrain.experiment import Experiment, no_batches
from jaxtrain.flops import count_flops
from jaxtrain.host.links import KINDS, WITHIN, Link
from jaxtrain.layout import Layout, PipelineLayout
from jaxtrain.ops.attention import attention
from jaxtrain.planning.estimate import (
    abstract_mesh,
    abstract_state,
    estimate,
    estimate_traced,
    predict,
    trace,
    trace_step,
)
from jaxtrain.planning.hlo import read_program
from jaxtrain.planning.roofline import crossing_bytes, slow_of, wire_seconds
from jaxtrain.planning.targets import parse_target
from jaxtrain.planning.walk import walk_step
from jaxtrain.state import local_bytes
from tests import problems
from tests.planning import steps

MATMUL = ("matmul", "float32")

TINY = steps.gpt_config(layers=4, width=64, heads=4, seq_len=64, global_batch=32)


def tiny(mesh=None, **changes):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "pipe": 1} | (mesh or {"data": 8})
    config = dataclasses.replace(TINY, **problems.with_layout(changes | {"mesh": sizes}))
    return experiment_gpt.outline(config)


def walk(function, specs, *shapes, mesh, stored=0, parameters=None):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return walk_step(jaxpr, specs, mesh, parameters or {}, stored=stored)[:2]


def test_an_update_reads_and_writes_the_state_and_reads_the_gradients():
    optimizer = optax.sgd(0.1, momentum=0.9)
    mesh = jt.make_mesh(data=-1)
    state = jt.abstract_state(lambda rng: {"w": jnp.zeros((100, 10))}, optimizer, mesh=mesh)
    batch = {"x": jax.ShapeDtypeStruct((8, 10), jnp.float32)}

    def idle(state, batch):
        return state, {}

    traced = trace_step(idle, state, batch, mesh, None)
    found = estimate_traced(traced, state, batch, mesh, None, kind="cpu")
    assert found.cost.other_bytes == 2 * local_bytes(state) + local_bytes(state.params)


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        ({"data": 8}, 1),
        ({"data": 2, "fsdp": 4}, 3),
        ({"fsdp": 2, "tensor": 4}, 0),
        ({"pipe": 2, "fsdp": 4}, 0),
    ],
)
def test_the_state_is_exact(mesh, zero):
    experiment = tiny(mesh, zero=zero)
    state = make_state(experiment, make_experiment_mesh(experiment))
    arrays = [jax.random.key_data(x) if x is state.rng else x for x in jax.tree.leaves(state)]
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    estimated = estimate(experiment, 8)
    assert estimated.state_bytes == held
    # Five [B, T] arrays of 4 bytes.
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1)
    assert estimated.batch_bytes == 5 * 4 * 32 * 64 / shards


def test_a_batch_lies_as_its_rules_say():
    experiment = tiny({"data": 2, "tensor": 2}).with_(
        batch={"x": jax.ShapeDtypeStruct((8, 4), "float32")}
    )
    rules = jt.Rules(batch=[("^x$", ("batch", "tensor"))])
    mesh = abstract_mesh(experiment.layout.mesh.sizes, 4)
    state = jax.ShapeDtypeStruct((2,), "float32", sharding=jax.NamedSharding(mesh, jax.P()))
    traced = jax.make_jaxpr(lambda state, batch: batch["x"])(state, experiment.data.batch)
    found = estimate_traced(traced, state, experiment.data.batch, mesh, rules)
    assert found.batch_bytes == 8 * 4 * 4 / 4


def test_a_product_of_two_split_weights_is_counted_by_hand():
    B, D, F, n = 32, 16, 64, 4

    def mlp(x, up, down):
        return jnp.tanh(x @ up) @ down

    specs = [((), ()), ((), ("tensor",)), (("tensor",), ())]
    cost, peak = walk(mlp, specs, (B, D), (D, F), (F, D), mesh={"tensor": n})
    assert cost.flops == {MATMUL: 2 * 2 * B * D * F / n}
    # Row-parallel: one all-reduce of the result, in a ring.
    assert cost.wire_bytes == {("all-reduce", ("tensor",)): 2 * (n - 1) / n * 4 * B * D}
    # The product, its tanh (a product reads it from memory), and the result.
    assert peak == 4 * (2 * B * F / n + B * D)


def test_weights_under_fsdp_are_gathered_and_their_gradients_scattered():
    B, D, F, n = 32, 16, 64, 4

    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    weight = ((), ("fsdp",))
    jaxpr = jax.make_jaxpr(lambda w, x: gradient(x, w))(
        jax.ShapeDtypeStruct((D, F), jnp.float32), jax.ShapeDtypeStruct((B, D), jnp.float32)
    )
    cost, _, _ = walk_step(
        jaxpr,
        [weight, (("fsdp",), ())],
        {"fsdp": n},
        {(D, F): weight, (F, D): weight[::-1]},
        stored=1,
    )
    share = (n - 1) / n * 4 * D * F
    assert cost.wire_bytes["all-gather", ("fsdp",)] == share
    scattered = sum(v for (kind, _), v in cost.wire_bytes.items() if kind == "reduce-scatter")
    assert scattered == share
    assert cost.flops[MATMUL] == 2 * 2 * B * D * F / n


def test_a_ragged_product_costs_its_rows_and_reads_all_matrices():
    M, K, N, groups, n = 32, 16, 64, 4, 4

    def experts(x, w):
        return jax.lax.ragged_dot(x, w, jnp.full(groups, M // groups))

    specs = [(("data",), ()), ((), (), ())]
    cost, peak = walk(experts, specs, (M, K), (groups, K, N), mesh={"data": n})
    assert cost.flops == {MATMUL: 2 * M * K * N / n}
    assert cost.hbm_bytes == 4 * (M * K / n + groups * K * N + M * N / n)
    assert peak == 4 * M * N / n
    # As many products of equal groups.
    backward = jax.grad(lambda x, w: experts(x, w).sum(), (0, 1))
    same = jax.grad(lambda x, w: jnp.matmul(x.reshape(groups, -1, K), w).sum(), (0, 1))
    costs = [walk(f, specs, (M, K), (groups, K, N), mesh={})[0] for f in (backward, same)]
    assert costs[0].flops == costs[1].flops


def test_what_is_not_known_is_named_and_takes_memory():
    def step(x):
        return jnp.linalg.cholesky(x, symmetrize_input=False)

    cost, peak = walk(step, [((), ())], (8, 8), mesh={})
    assert cost.unknown == {"cholesky"}
    assert cost.hbm_bytes >= 2 * 4 * 8 * 8
    assert cost.flops[MATMUL] >= 2 * 8 * 8
    assert peak >= 4 * 8 * 8


@pytest.mark.parametrize(
    ("send", "kind", "sent"),
    [
        (lambda x: jax.lax.psum(x, "tensor"), "all-reduce", 2 * 3 / 4),
        (lambda x: jax.lax.pmax(x, "tensor"), "all-reduce", 2 * 3 / 4),
        (lambda x: jax.lax.all_gather(x, "tensor"), "all-gather", 3),
        (lambda x: jax.lax.all_gather(x, "tensor", tiled=True), "all-gather", 3),
        (lambda x: jax.lax.psum_scatter(x, "tensor"), "reduce-scatter", 3 / 4),
        (lambda x: jax.lax.all_to_all(x, "tensor", 0, 1), "all-to-all", 3 / 4),
        (lambda x: jax.lax.ppermute(x, "tensor", [(0, 1)]), "collective-permute", 1),
    ],
)
def test_what_a_manual_region_sends_is_counted_by_its_kind(send, kind, sent):
    mesh = jt.make_mesh(data=2, tensor=4)
    mapped = jax.shard_map(send, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    cost, _ = walk(mapped, [((), ())], (4, 8), mesh=dict(mesh.shape))
    assert cost.wire_bytes == {(kind, ("tensor",)): sent * 4 * 4 * 8}


def test_what_is_computed_and_sent_is_the_compilers_own_figure():
    B, D, F = 64, 256, 1024
    mesh = jt.make_mesh(data=2, tensor=4)

    def gradient(up, down, x):
        return jax.grad(lambda w: jnp.sum((jnp.tanh(x @ w[0]) @ w[1]) ** 2))((up, down))

    specs = [((), ("tensor",)), (("tensor",), ()), (("data",), ())]
    cost, peak = walk(gradient, specs, (D, F), (F, D), (B, D), mesh=dict(mesh.shape))
    placed = [
        jax.sharding.NamedSharding(mesh, jax.P(*(axes[0] if axes else None for axes in spec)))
        for spec in specs
    ]
    jitted = jax.jit(gradient, in_shardings=placed, out_shardings=tuple(placed[:2]))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((D, F), (F, D), (B, D))]
    compiled = jitted.lower(*shapes).compile()
    # Besides products, the compiler counts an operation or two per element.
    assert cost.flops[MATMUL] == pytest.approx(compiled.cost_analysis()["flops"], rel=0.02)
    sent = collections.Counter()
    for found in read_program(compiled.as_text(), mesh).collectives:
        sent[found.axes] += found.executions * found.sent
    walked = collections.Counter()
    for (_, axes), size in cost.wire_bytes.items():
        walked[axes] += size
    assert walked == pytest.approx(sent, rel=0.02)
    sizes = compiled.memory_analysis()
    held = sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    # An all-reduce has an operand beside its result on a CPU, and nowhere else.
    assert 0.5 * held < peak < held


def test_what_a_loop_keeps_for_its_backward_pass_is_counted_by_hand():
    B, D = 16, 32

    def peak(layers):
        def loss(stack, x):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, stack)[0])

        specs = [((), (), ()), ((), ())]
        return walk(jax.grad(loss), specs, (layers, D, D), (B, D), mesh={}, stored=1)[1]

    # Per layer: its input, the cosine of its product, and the gradient of its weight.
    assert peak(9) - peak(5) == 4 * 4 * (2 * B * D + D * D)


def test_a_buffer_is_free_after_its_last_reader():
    B, D = 16, 32

    def chain(x, w):
        for _ in range(5):
            x = x @ w
        return x

    # What is read and what is written, and nothing from before.
    assert walk(chain, [((), ()), ((), ())], (B, D), (D, D), mesh={})[1] == 2 * 4 * B * D


def test_a_running_sum_is_updated_in_place():
    B, D = 16, 32

    def total(xs):
        start = jnp.zeros((D, D))
        return jax.lax.scan(lambda a, x: (a + x.T @ x, None), start, xs)[0]

    # The sum, and one term of it.
    assert walk(total, [((), (), ())], (7, B, D), mesh={})[1] == 2 * 4 * D * D


def test_what_a_branch_updates_is_written_over_its_operand():
    D = 32

    def updated(flag, buffer, x):
        def write(buffer):
            return jax.lax.dynamic_update_slice(buffer, x, (0, 0))

        return jax.lax.fori_loop(
            0, 3, lambda _, b: jax.lax.cond(flag[0] > 0, write, lambda b: b, b), buffer
        )

    specs = [((),), ((), ()), ((), ())]
    shapes = ((1,), (D, D), (1, D))
    # The loop's own copy of the buffer and its counters, and none in the branch.
    assert 0 <= walk(updated, specs, *shapes, mesh={})[1] - 4 * D * D < 64


def test_flops_are_those_of_another_counter():
    one = tiny({"data": 1})
    alone = abstract_mesh(one.layout.mesh.sizes, 1)
    state = make_abstract_state(one, alone)
    whole = count_flops(build_step(one, state, alone), state, one.data.batch)
    for mesh in ({"data": 8}, {"fsdp": 4, "tensor": 2}):
        share = estimate(tiny(mesh), 8).cost.flops
        # Every product is split over all devices.
        assert 8 * sum(share.values()) == pytest.approx(sum(whole.by_dtype.values()), rel=0.01)


def test_a_loop_takes_a_copy_of_a_part():
    L, D = 5, 16

    def part(xs):
        half = jax.lax.slice_in_dim(xs, 0, L)
        return jax.lax.scan(lambda c, x: (c + jnp.cumsum(x), None), jnp.zeros(D), half)[0]

    def whole(xs):
        return jax.lax.scan(lambda c, x: (c + jnp.cumsum(x), None), jnp.zeros(D), xs)[0]

    sliced = walk(part, [((), ())], (2 * L, D), mesh={})[1]
    assert sliced - walk(whole, [((), ())], (L, D), mesh={})[1] == 4 * L * D


def test_residuals_for_products_alone_are_rounded_where_a_compiler_does():
    L, B, D = 5, 8, 64

    def gradient(ws, x, **how):
        def layer(x, w):
            # The product keeps its operand for the backward pass, tanh its result.
            return jnp.tanh(jnp.dot(x * jax.nn.sigmoid(x), w, **how)), None

        return jax.grad(lambda ws: jax.lax.scan(layer, x, ws)[0].sum())(ws)

    def peak(function, rounds):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((L, D, D), (B, D))]
        jaxpr = jax.make_jaxpr(function)(*shapes)
        return walk_step(jaxpr, [((), (), ()), ((), ())], {}, {}, rounds=rounds)[1]

    assert peak(gradient, rounds=False) - peak(gradient, rounds=True) == 2 * L * B * D
    exact = functools.partial(gradient, precision="highest")
    assert peak(exact, rounds=True) == peak(exact, rounds=False)


def test_less_is_kept_the_more_is_computed_again():
    none, dots, full = (tiny(remat=remat) for remat in ("none", "dots", "full"))
    kept = [estimate(e, 8) for e in (none, dots, full)]
    assert kept[0].working_bytes > kept[1].working_bytes > kept[2].working_bytes
    work = [sum(e.cost.flops.values()) for e in kept]
    assert work[0] <= work[1] < work[2]


@pytest.mark.slow
def test_more_rows_need_more_and_more_microbatches_less():
    sizes = [estimate(tiny(global_batch=rows), 8).working_bytes for rows in (16, 32, 64)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3
    sizes = [estimate(tiny(global_batch=128, accumulate=k), 8).working_bytes for k in (2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_call_of_several_steps_holds_all_batches_twice():
    one = estimate(tiny(), 8)
    four = estimate(tiny(steps_per_call=4), 8)
    # As they are given, and as one stacked array.
    assert four.peak_bytes - one.peak_bytes == (4 + 4 - 1) * one.batch_bytes
    assert four.cost == one.cost


def test_a_step_takes_the_form_of_the_chip_that_is_asked_about():
    # On a CPU attention keeps its weights in float32 for short rows: layers, rows, heads, T, T.
    for kind in ("cpu", "gpu", "tpu"):
        traced = str(trace(tiny(precision="f32", seq_len=32), 8, kind=kind))
        assert ("f32[4,32,4,32,32]" in traced) == (kind == "cpu"), kind


def test_more_axes_leave_less_state_and_talk_more():
    whole, parts = estimate(tiny({"data": 8}), 8), estimate(tiny({"fsdp": 8}), 8)
    assert parts.state_bytes < whole.state_bytes / 6
    kinds = {kind for kind, _ in parts.cost.wire_bytes}
    assert "all-gather" in kinds
    assert not [k for k, _ in whole.cost.wire_bytes if k == "all-gather"]
    parameters = local_bytes(abstract_state(tiny({"data": 8}), 8).params)
    reduced = whole.cost.wire_bytes["all-reduce", ("data",)]
    # Gradients, in bfloat16 or float32, and little else.
    assert 0.5 <= reduced / (2 * 7 / 8 * parameters) <= 1.1


@pytest.mark.slow
def test_a_pipeline_of_1f1b_does_not_grow_with_its_microbatches():
    def sized(schedule, microbatches):
        pipeline = PipelineLayout(schedule=schedule, microbatches=microbatches)
        mesh = {"pipe": 2, "data": 4}
        rows = 16 * microbatches
        return estimate(tiny(mesh, pipeline=pipeline, global_batch=rows, layers=2), 8)

    few, many = sized("1f1b", 4), sized("1f1b", 32)
    per_slot = 4 * 64 * 64 * 2  # rows x positions x width in bfloat16
    assert many.working_bytes <= 1.02 * few.working_bytes
    # GPipe keeps the input of every microbatch.
    grown = sized("gpipe", 32).working_bytes - sized("gpipe", 4).working_bytes
    assert grown >= 28 * per_slot
    assert ("collective-permute", ("pipe",)) in few.cost.wire_bytes


def test_stages_that_are_balanced_take_less_time_than_even_ones():
    def estimated(balance):
        pipeline = PipelineLayout(microbatches=8, balance=balance)
        mesh = {"pipe": 2, "data": 4}
        experiment = tiny(mesh, pipeline=pipeline, layers=6, tokenizer="4096")
        return experiment, estimate(experiment, 8)

    (_, even), (experiment, balanced) = estimated(False), estimated(True)
    assert experiment.stack.counts == (4, 2)
    weights = weigh(experiment.task.stages, experiment.task.init_fn, experiment.data.batch)
    table = make_table("1f1b", stages=2, microbatches=8)
    spans = []
    for counts, found in (((3, 3), even), ((4, 2), balanced)):
        forward, backward = weights.of_stages(counts)
        assert found.bubble == bubble(table, forward=forward, backward=backward)
        spans.append(makespan(table, forward=forward, backward=backward))
    # The walk's products are in proportion to the weights.
    work = [sum(found.cost.flops.values()) for found in (even, balanced)]
    assert work[1] / work[0] == pytest.approx(spans[1] / spans[0], rel=0.02)
    assert work[1] < 0.95 * work[0]


def test_an_interleaved_pipeline_waits_as_its_table_says():
    pipeline = PipelineLayout(schedule="interleaved", microbatches=8, virtual=2)
    found = estimate(tiny({"pipe": 2, "data": 4}, pipeline=pipeline, layers=4), 8)
    natural = tiny({"data": 8}, layers=4)
    weights = weigh(natural.task.stages, natural.task.init_fn, natural.data.batch)
    forward, backward = weights.of_stages([1] * 4)
    table = make_table("interleaved", stages=2, microbatches=8, virtual=2)
    assert found.bubble == bubble(table, forward=forward, backward=backward)


@pytest.mark.slow
def test_the_order_of_sizes_is_the_compilers():
    estimated, compiled = [], []
    for changes in ({"remat": "none"}, {"remat": "full", "accumulate": 4}):
        experiment = tiny({"data": 4, "tensor": 2}, precision="f32", **changes)
        estimated.append(estimate(experiment, 8, kind="cpu").working_bytes)
        mesh = make_experiment_mesh(experiment)
        state = make_abstract_state(experiment, mesh)
        train = jt.compile_step(
            build_step(experiment, state, mesh),
            state,
            experiment.data.batch,
            mesh=mesh,
            compiler_options={"xla_backend_optimization_level": 0},
        )
        compiled.append(train.compiled.memory_analysis().temp_size_in_bytes)
    assert estimated[0] > 1.5 * estimated[1]
    assert compiled[0] > 1.5 * compiled[1]
    assert estimated[0] == pytest.approx(compiled[0], rel=0.4)


def test_time_is_work_over_the_published_peaks_and_the_stated_efficiency():
    target = parse_target("v5e:2x4")
    estimated = estimate(tiny({"fsdp": 4, "tensor": 2}), 8)
    predicted = predict(estimated, target)
    chip, cost, share = target.chip, estimated.cost, target.chip.efficiency
    peak = chip.flops["bfloat16"]
    seconds = {kind: count / peak / share[kind] for (kind, _), count in cost.flops.items()}
    assert set(seconds) == {"matmul", "attention"}
    assert predicted.compute == pytest.approx(sum(seconds.values()))
    # Of a kernel's tiles a mask may leave half.
    least = cost.flops["matmul", "bfloat16"] + cost.flops["attention", "bfloat16"] / 2
    assert predicted.least == pytest.approx(least / peak)
    memory = chip.hbm_bytes_per_s * share["memory"]
    assert predicted.hbm == pytest.approx(cost.hbm_bytes / memory)
    tensor = sum(v for (_, axes), v in cost.wire_bytes.items() if axes == ("tensor",))
    links = chip.links * chip.link_bytes_per_s * share["links"]
    assert predicted.interconnect["tensor"] == pytest.approx(tensor / links)
    # fsdp overlaps, tensor does not, and element-wise work runs by itself.
    busy = max(predicted.compute, predicted.product_hbm) + predicted.other_hbm
    hidden = sum(s for axes, s in predicted.interconnect.items() if axes == "fsdp")
    assert predicted.step_seconds == pytest.approx(max(busy, hidden) + predicted.exposed)
    assert predicted.exposed >= predicted.interconnect["tensor"]
    assert predict(estimated, parse_target("cpu:8")) is None
    # As measured, each collective has a latency besides.
    measured = dataclasses.replace(chip, measured={WITHIN: dict.fromkeys(KINDS, Link(1e-5, 1e9))})
    slower = predict(estimated, dataclasses.replace(target, chip=measured))
    times = sum(n for (_, axes), n in cost.wire_times.items() if axes == ("tensor",))
    assert times >= 2 * 2 * 2  # two exchanges of the residual stream in a layer, each way
    assert slower.interconnect["tensor"] == pytest.approx(times * 1e-5 + tensor / 1e9)


def test_a_kernel_keeps_its_scores_out_of_memory():
    # On a GPU the tiled form stands for cuDNN's kernel, which is not here.
    B, T, H, K = 8, 512, 4, 64

    def gradient(q, k, v):
        return jax.grad(lambda q: attention(q, k, v).astype(jnp.float32).sum())(q)

    shape = jax.ShapeDtypeStruct((B, T, H, K), jnp.bfloat16)
    cost, peak, _ = walk_step(jax.make_jaxpr(gradient)(*[shape] * 3), [((),) * 4] * 3, {}, {})
    assert set(cost.flops) == {("attention", "bfloat16")}
    scores = B * H * T * T * 2
    assert cost.hbm_bytes < scores / 4
    # In memory there are some all the same, as compiled.
    assert peak > scores / 4


def test_what_leaves_a_host_goes_by_its_network():
    chip = parse_target("h100:4x8").chip
    mesh = {"data": 4, "fsdp": 2, "tensor": 4}
    assert slow_of(mesh, 8) == {"data": 4, "fsdp": 1, "tensor": 1}
    payload, (link, network) = 4e9, (x * chip.efficiency["links"] for x in (450e9, 50e9))

    def seconds(kind, axes, sent, mesh, slow, chip=chip):
        return wire_seconds(kind, sent, crossing_bytes(kind, axes, sent, mesh, slow), chip)

    # An all-reduce of 4 GB over 2 hosts, 4 devices each: within them, then a quarter between them.
    both = seconds("all-reduce", ("data",), 2 * payload * 7 / 8, {"data": 8}, {"data": 2})
    assert both == pytest.approx((2 * payload * 3 / 4 / link, 2 * (payload / 4) * 1 / 2 / network))
    # Nothing but the network, where each device is alone on its host.
    slow = slow_of(mesh, 8)
    alone = seconds("all-gather", ("data",), 1e9, mesh, slow)
    assert alone == pytest.approx((0, 1e9 / network))
    inside = seconds("all-gather", ("tensor",), 1e9, mesh, slow)
    assert inside == pytest.approx((1e9 / link, 0))
    # Half of what 8 devices send each other goes to the other host.
    sent = 1e9 * 7 / 8
    exchanged = seconds("all-to-all", ("data",), sent, {"data": 8}, {"data": 2})
    assert exchanged == pytest.approx((1e9 * 3 / 8 / link, 1e9 * 4 / 8 / network))
    # On a torus it passes 2 of the 8 devices of a ring on its way: twice what a ring of 4 takes.
    torus = parse_target("v5p:4x4x8")
    assert [torus.ring(n) for n in (2, 8, 32)] == [2, 8, 8]
    both = [sum(wire_seconds("all-to-all", 1e9, 0.0, torus.chip, ring=n)) for n in (4, 8)]
    assert both[1] == pytest.approx(2 * both[0])
    # A permutation has one link, on a TPU half of a ring.
    v5e = parse_target("v5e:2x4").chip
    sends = [
        sum(seconds(kind, ("data",), 1e9, {"data": 8}, {"data": 1}, v5e))
        for kind in ("collective-permute", "all-gather")
    ]
    assert sends[0] == pytest.approx(2 * sends[1])
    # Axes that are not known are taken as all of the mesh.
    unknown = seconds("all-gather", ("?",), 1e9, mesh, slow)
    assert unknown == seconds("all-gather", ("data", "fsdp", "tensor"), 1e9, mesh, slow)


def test_any_experiment_is_estimated():
    def init(rng):
        return {"w": jnp.zeros((1024, 1024)), "v": jnp.zeros((1024, 8))}, {"mean": jnp.zeros(8)}

    def loss(params, model_state, batch, rng):
        y = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return jt.WeightedLoss(jnp.sum(y**2), jnp.float32(y.shape[0])), {"mean": y.mean(0)}

    experiment = Experiment.of(
        name="own",
        init_fn=init,
        loss_fn=loss,
        optimizer=optax.sgd(0.1),
        batch={"x": jax.ShapeDtypeStruct((64, 1024), jnp.float32)},
        train_batches=no_batches,
        steps=1,
        layout=Layout.parse("fsdp=8"),
        has_model_state=True,
    )
    estimated = estimate(experiment, 8)
    # The parameters, the model state, the key and two counters.
    assert estimated.state_bytes == 4 * (1024 * 1024 + 1024 * 8) // 8 + 32 + 8 + 8
    # Gathered for the product, at least.
    assert estimated.working_bytes > 4 * 1024 * 1024


def test_what_does_not_divide_is_the_librarys_own_error():
    with pytest.raises(ValueError, match="there are 6"):
        estimate(tiny({"data": 4}), 6)
    with pytest.raises(ValueError, match="not divisible by mesh axis 'pipe'"):
        estimate(tiny({"pipe": 8}), 8)


@pytest.mark.parametrize(
    ("parts", "hotter"), [(2, 4 / 4 / 7), pytest.param(8, 1.0, marks=pytest.mark.slow)]
)
def test_the_hottest_expert_is_priced_by_the_products_of_its_device(parts, hotter):
    """Of 8 experts on so many devices: one has h times the mean, the others share the rest."""
    config = steps.gpt_config(model="tiny-moe", layers=2, width=64, heads=2, seq_len=64)
    layout = Layout.parse(f"data={8 // parts},expert={parts}")
    config = dataclasses.replace(config, global_batch=16, layout=layout)
    found = predict(estimate(experiment_gpt.outline(config), 8), parse_target("v5e:2x4"))
    # Of 2 layers: up and down for 2 experts of 256, forward, and 5 such products backward.
    flops = 2 * 16 * 64 * 2 * (2 * 64 * 256) * 7 / 8
    chip = parse_target("v5e:2x4").chip
    seconds = flops / chip.peak_flops("float32") / chip.efficiency["matmul"]
    assert found.heat == pytest.approx(hotter * seconds, rel=0.02)
