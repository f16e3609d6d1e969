"""The search: what it enumerates, why layouts lose, how the rest is ranked; nothing is compiled."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from rich.console import Console

import jaxtrain as jt
from experiments import gpt
from jaxtrain import cli
from jaxtrain.engines import accumulated
from jaxtrain.engines.pipeline.entering import layers_of_stages
from jaxtrain.engines.pipeline.tables import make_table, makespan, peak_stash
from jaxtrain.layout import Layout, MeshShape, PipelineLayout
from jaxtrain.planning import search as module
from jaxtrain.planning.candidates import (
    SCHEDULES,
    make_candidates,
    make_meshes,
    make_placements,
    name_of,
    open_schedules,
)
from jaxtrain.planning.estimate import estimate, predict
from jaxtrain.planning.fitting import (
    Estimator,
    Reason,
    Rejections,
    make_row,
    refuse_mesh,
    walk_mesh,
    walk_schedules,
)
from jaxtrain.planning.ranking import Family, cost, print_search, rank
from jaxtrain.planning.search import search
from jaxtrain.planning.targets import parse_target
from jaxtrain.sharding.mesh import simulated_hosts, slow_parts
from jaxtrain.state import local_bytes
from tests.planning import steps

CONFIG = steps.gpt_config(layers=2, width=64, heads=2, seq_len=64, global_batch=16)


def laid(text, **changes):
    """A layout of the tests' experiment; ``count`` are its microbatches, of a pipeline or not."""
    layout = Layout.parse(text, CONFIG.layout)
    if count := changes.pop("count", None):
        name = "pipeline.microbatches" if layout.mesh.pipe > 1 else "accumulate"
        changes[name] = count
    return layout.with_(changes)


def shrunk(text, memory_bytes):
    """A target whose chips have another memory."""
    target = parse_target(text)
    return dataclasses.replace(
        target, chip=dataclasses.replace(target.chip, memory_bytes=memory_bytes)
    )


@pytest.fixture(scope="module")
def result():
    # Few meshes, each with its own fate: 3 layers are not cut in two, a host has one GPU.
    config = dataclasses.replace(CONFIG, layers=3)
    return search(gpt.outline, config, parse_target("h100:2x1"), compile_best=0)


def test_every_mesh_is_enumerated_once():
    meshes = list(make_meshes(64, stages=True))
    assert all(mesh.devices == 64 for mesh in meshes)
    # Six factors of two over five axes.
    assert len(meshes) == len({*meshes}) == math.comb(10, 4)


def test_a_model_without_stages_has_no_pipeline_and_no_blocks_that_keep_less():
    meshes = list(make_meshes(2, stages=False))
    assert len(meshes) == 3
    assert {mesh.pipe for mesh in meshes} == {1}
    mesh = MeshShape(data=2, tensor=2)
    found = list(make_candidates(jt.Config(), mesh, stages=False))
    assert {(x.remat, x.sequence_parallel) for x in found} == {(None, True)}
    assert found[0] == Layout.parse("data=2,tensor=2")
    own = jt.Config(layout=Layout(remat="offload", sequence_parallel=False))
    found = list(make_candidates(own, mesh, stages=False))
    assert {(x.remat, x.sequence_parallel) for x in found} == {("offload", False)}
    own = jt.Config(layout=Layout(offload_parameters=True))  # which refuses to keep everything
    assert "none" not in {x.remat for x in make_candidates(own, MeshShape(data=1, tensor=2))}


def test_experts_are_split_where_there_are_some():
    assert {mesh.expert for mesh in make_meshes(8, stages=True)} == {1}
    split = list(make_meshes(8, stages=True, experts=True))
    assert len(split) == len({*split}) == math.comb(8, 5)
    # Expert splits the batch too.
    config = dataclasses.replace(CONFIG, global_batch=8)
    counts = {x.accumulate for x in make_candidates(config, MeshShape(data=2, expert=4))}
    assert counts == {1}
    for model, has in (("tiny", False), ("tiny-moe", True)):
        config = dataclasses.replace(CONFIG, model=model)
        assert Estimator(gpt.outline, config, parse_target("h100:1x8")).has_experts == has


@pytest.mark.slow
def test_a_search_finds_that_experts_may_be_split():
    config = dataclasses.replace(CONFIG, model="tiny-moe")
    result = search(gpt.outline, config, parse_target("h100:1x2"), compile_best=0)
    rows = {name_of(row.layout.mesh) for row in result.rows}
    rejected = {family.example for family in result.families}
    assert "expert=2" in rows | rejected
    assert all(row.prediction.step_seconds > 0 for row in result.rows)


def test_a_stage_that_runs_again_has_no_blocks_that_do():
    found = make_candidates(CONFIG, MeshShape(data=1, pipe=2))
    kinds = {(x.remat, x.pipeline.remat) for x in found}
    assert {("dots", "none"), ("none", "full")} < kinds
    assert not kinds & {("full", "none"), ("dots", "full"), ("full", "full")}


def test_the_flags_of_a_layout_make_its_config():
    for layout in (
        laid("data=2,fsdp=2,tensor=2", count=4, remat="dots"),
        laid("data=2,tensor=2,pipe=2", count=4, remat="none"),
        laid("data=4,fsdp=2,dcn_data=2", remat="none"),
    ):
        # Whatever the flags before them say.
        for before in ([], ["--accumulate=8", "--remat=full", "--mesh.fsdp=8", "--mesh.data=1"]):
            asked = tyro.cli(gpt.Config, args=before)
            config = tyro.cli(gpt.Config, args=[*before, *layout.flags(asked.layout)])
            assert config == dataclasses.replace(gpt.Config(), layout=layout)


def on_slices(**mesh):
    return dataclasses.replace(CONFIG, layout=Layout(mesh=MeshShape(**mesh))), parse_target(
        "v5e:2x2", slices=2
    )


def test_a_mesh_lies_over_hosts_in_every_way_that_there_is():
    for mesh in make_meshes(8, stages=True):
        ways = make_placements(CONFIG.layout.mesh, mesh, parse_target("h100:4x2"))
        with simulated_hosts(2):
            found = [slow_parts(jt.make_mesh(**way.sizes)) for way in ways]
        # Every way to cut the axes into 4 parts, without cutting tensor or context, and none twice.
        inner = [x["tensor"] * x["context"] for x in found]
        crossing = [x for x, n in zip(found, inner, strict=True) if n == 1]
        parts = [x for x in crossing if math.prod(x.values()) == 4]
        sizes = [
            [n for n in (1, 2, 4) if mesh.axes[axis] % n == 0] for axis in ("pipe", "data", "fsdp")
        ]
        expected = [x for x in itertools.product(*sizes) if math.prod(x) == 4]
        assert sorted((x["pipe"], x["data"], x["fsdp"]) for x in parts) == expected
        assert len(found) == len({tuple(x.values()) for x in found})
        # In the devices' own order these may leave a host; such a mesh is refused.
        assert len(found) - len(parts) == (mesh.tensor * mesh.context > 2)


def test_each_link_is_priced_apart():
    config, target = on_slices()
    estimator = Estimator(gpt.outline, config, target)
    once = laid("data=2,fsdp=4", count=2, remat="full", gather="step")
    experiment, estimated = estimator(once)
    whole = sum(x.size for x in jax.tree.leaves(estimator.outline(once)[1].params) if x.size > 64)
    across, link = (
        target.chip.efficiency["links"] * speed
        for speed in (target.chip.dcn_bytes_per_s, 2 * target.chip.link_bytes_per_s)
    )
    # Weights in bfloat16 and gradients in float32 over fsdp; over data the sums of a quarter.
    gathered, summed = 2 * whole, 4 * whole
    expected = {
        "dcn_data": ({"data": 2 * summed / 4 / 2}, {"fsdp": (gathered + summed) * 3 / 4}),
        # Half of what each of the two within a slice has.
        "dcn_fsdp": (
            {"fsdp": (gathered + summed) / 2 / 2},
            {"fsdp": (gathered + summed) * (3 / 4 - 1 / 4), "data": 2 * summed / 4 / 2},
        ),
    }
    rejections = Rejections()
    for name, (slow, fast) in expected.items():
        fixed = Estimator(gpt.outline, *on_slices(**{name: 2}))
        row = make_row(fixed, once, experiment, estimated, rejections)
        assert row.layout.mesh == dataclasses.replace(once.mesh, **{name: 2})
        pairs = (row.prediction.network, slow, across), (row.prediction.interconnect, fast, link)
        for seconds, sent, speed in pairs:
            seconds.pop("data+fsdp", None)  # the loss
            assert seconds == pytest.approx({a: n / speed for a, n in sent.items()}, rel=0.02)
    assert rejections.count == 0
    best = make_row(estimator, once, experiment, estimated, rejections)
    assert best.layout.mesh == dataclasses.replace(once.mesh, dcn_data=2)
    (family,) = rejections.families()
    assert (family.count, family.reason[:30]) == (1, "crosses the slow network along")


def test_the_axes_that_cross_slices_are_searched_or_as_the_flags_say():
    one_chip_each = parse_target("v5e:1x1", slices=2)
    found = search(gpt.outline, CONFIG, one_chip_each, compile_best=0)
    (row,) = found.rows
    built = tyro.cli(gpt.Config, args=row.flags).layout.mesh
    assert (built.fsdp, built.dcn_fsdp) == (2, 2)
    assert "pipe=2 dcn_pipe=2" in {family.example for family in found.families}
    config, target = on_slices(dcn_pipe=2)
    mesh = MeshShape(data=4, pipe=2)
    chosen = [dataclasses.replace(mesh, dcn_pipe=2)]
    assert make_placements(config.layout.mesh, mesh, target) == chosen
    refused = refuse_mesh(Estimator(gpt.outline, config, target), laid("data=4,fsdp=2"))
    assert refused.words == "data, fsdp and pipe do not divide over 2 slices"
    with pytest.raises(ValueError, match="dcn_data x dcn_pipe is 4 and the target has 2 slices"):
        search(gpt.outline, *on_slices(dcn_pipe=2, dcn_data=2), compile_best=0)


def test_every_layout_is_ranked_or_has_its_reason(result):
    fitting = [f for f in result.families if f.reason.startswith("fits")]
    assert len(result.rows) == 1
    assert result.considered == len(result.rows) + sum(f.count for f in result.families)
    assert fitting
    assert result.families == tuple(sorted(result.families, key=lambda f: -f.count))


def test_reasons_are_the_true_ones(result):
    reasons = {family.reason: family for family in result.families}
    crossing = [f for r, f in reasons.items() if "would cross hosts" in r]
    assert all("of 1 devices" in family.reason for family in crossing)
    assert {family.example for family in crossing} == {"tensor=2", "context=2"}
    # Three layers on two stages are placed unevenly, and fit.
    assert reasons["fewer microbatches than the best of its mesh"].example == "pipe=2"
    assert not any("mesh axis 'pipe'" in reason for reason in reasons)


@pytest.mark.slow
def test_memory_decides_between_rematerialisation_and_microbatches():
    config = dataclasses.replace(CONFIG, global_batch=64)
    estimator = Estimator(gpt.outline, config, parse_target("v5e:2x2"))
    whole = estimator(laid("data=4", remat="none"))[1]
    least = estimator(laid("data=4", count=16, remat="full"))[1]
    assert least.peak_bytes < whole.peak_bytes
    between = (least.peak_bytes + whole.peak_bytes) // 2
    estimator.target = shrunk("v5e:2x2", between)
    rejections = Rejections()
    candidates = list(make_candidates(config, MeshShape(data=4)))
    rows = walk_mesh(estimator, candidates, rejections)
    assert rows
    assert all(row.estimated_bytes <= between for row in rows)
    families = rejections.families()
    assert any("x the memory with activations" in f.reason for f in families)
    assert len(rows) + sum(f.count for f in families) == len(candidates)


def test_state_alone_may_be_too_much():
    starved = search(gpt.outline, CONFIG, shrunk("v5e:2x2", 2**16), compile_best=0)
    assert starved.rows == ()
    assert any("state alone are" in f.reason for f in starved.families)


def test_rows_that_do_not_divide_are_told():
    config = dataclasses.replace(CONFIG, global_batch=6)
    estimator = Estimator(gpt.outline, config, parse_target("v5e:2x2"))
    for text, divides in (("data=4", False), ("data=2,tensor=2", True)):
        reason = refuse_mesh(estimator, laid(text))
        assert (reason is None) == divides
    assert "global batch does not divide" in refuse_mesh(estimator, laid("fsdp=4")).words
    refused = refuse_mesh(estimator, laid("tensor=4"))
    assert "does not divide 2 heads" in refused.words


@pytest.mark.slow
def test_one_trace_serves_all_splits_of_the_batch():
    target = parse_target("v5e:2x4")
    estimator = Estimator(gpt.outline, CONFIG, target)
    for text in ("fsdp=8", "data=8", "data=4,tensor=2"):
        experiment, shared = estimator(laid(text, remat="dots"))
        assert shared == estimate(experiment, 8)
    assert len(estimator.traces) == 2


def test_weights_that_are_gathered_once_are_sent_once_and_kept():
    config = dataclasses.replace(CONFIG, global_batch=64)
    estimator = Estimator(gpt.outline, config, parse_target("v5e:2x4"))
    assert estimator.gathers == ("layer", "step")
    once, each = (laid("fsdp=8", count=4, remat="full", gather=x) for x in ("step", "layer"))
    state = estimator.outline(once)[1]
    whole = sum(x.size for x in jax.tree.leaves(state.params) if x.size > 64)
    # In bfloat16, and the gradients in float32 that are whole instead of an eighth.
    kept = estimator.kept_bytes(once) - local_bytes(state)
    assert kept == pytest.approx(2 * whole + 4 * whole * 7 / 8, rel=0.02)
    sent = [estimator(c)[1].cost.wire_bytes["all-gather", ("fsdp",)] for c in (once, each)]
    assert sent[0] == pytest.approx(2 * whole * 7 / 8, rel=0.02)
    assert sent[1] > 4 * sent[0]
    # What does not fit by shapes alone is not walked.
    traces, rejections = len(estimator.traces), Rejections()
    estimator.target = shrunk("v5e:2x4", estimator.kept_bytes(once) - 1)
    assert walk_mesh(estimator, [once], rejections) == []
    assert len(estimator.traces) == traces
    (family,) = rejections.families()
    assert family.reason.startswith("the state and weights gathered once per step are 1.00 x")


def test_an_exact_layout_leaves_no_choice_when_weights_are_gathered():
    config = dataclasses.replace(CONFIG, layout=dataclasses.replace(CONFIG.layout, exact=4))
    gathers = Estimator(gpt.outline, config, parse_target("v5e:2x4")).gathers
    layouts = make_candidates(config, MeshShape(data=1, fsdp=8), gathers=gathers)
    assert {(layout.exact, layout.gather) for layout in layouts} == {(4, None)}


def test_a_whole_residual_stream_is_walked_where_a_split_one_fits():
    estimator = Estimator(gpt.outline, CONFIG, parse_target("v5e:2x4"))
    mesh = MeshShape(data=4, tensor=2)
    candidates = list(make_candidates(CONFIG, mesh))
    rejections = Rejections()
    rows = walk_mesh(estimator, candidates, rejections)
    split, whole = (row.layout for row in rows)
    assert (split.sequence_parallel, whole.sequence_parallel) == (True, False)
    assert dataclasses.replace(whole, sequence_parallel=True) == split
    assert rows[1].flags[-1] == "--no-sequence-parallel"
    assert rows[1].estimated_bytes > rows[0].estimated_bytes
    assert len(rows) + sum(f.count for f in rejections.families()) == len(candidates)
    chosen = dataclasses.replace(CONFIG, layout=Layout(sequence_parallel=False))
    assert {c.sequence_parallel for c in make_candidates(chosen, mesh)} == {False}


def test_a_pipeline_takes_no_less_than_it_is_rejected_for():
    config = dataclasses.replace(CONFIG, layers=4)
    estimator = Estimator(gpt.outline, config, parse_target("v5e:2x4"))
    estimator(laid("data=8", remat="none"))
    for stages, microbatches in ((2, 4), (4, 8)):
        kept = {"remat": "none", "pipeline.remat": "none"}
        candidate = laid(f"data={8 // stages},pipe={stages}", count=microbatches, **kept)
        compute = predict(estimator(candidate)[1], estimator.target).compute
        least = estimator.least_seconds(candidate)
        assert least == estimator.least_compute * (microbatches + stages - 1) / microbatches
        assert compute >= least


def test_the_printed_table_fits_and_the_json_says_the_same(result):
    text = io.StringIO()
    print_search(result, Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert name_of(result.rows[0].layout.mesh) in text.getvalue()
    assert "rejected:" in lines
    data = json.loads(json.dumps(result.to_json()))
    assert data["considered"] == result.considered
    assert data["rows"][0]["step_s"] == result.rows[0].prediction.step_seconds
    assert len(data["rejected"]) == len(result.families)


STOPPED = """
import sys, time
from jaxtrain import cli
from jaxtrain.planning import search

def compile_row(*_):
    print("compiling", flush=True)
    time.sleep(60)

search.compile_row = compile_row
search.Target.devices = lambda target: []
sys.exit(cli.main("plan experiments.gpt --target h100:1x2 --search --layers 1 --width 16 "
                  "--heads 2 --seq-len 16 --optimizer.name sgd --global-batch 2".split()))
"""


@pytest.mark.slow
def test_a_search_that_is_stopped_prints_what_it_has_found():
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"compiling\n"
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"@ " not in err  # no stack trace
    assert b"stopped before the end" in out
    assert b"train the first with: --mesh.data=" in out


def test_what_the_first_costs(result):
    # 16 rows of 64 tokens on 2 devices.
    rate = 16 * 64 / result.rows[0].prediction.step_seconds
    hours = 2 * 1e9 / rate / 3600
    found = cost(result, tokens=5e9, price=2.5)
    assert found["tokens_per_s"] == pytest.approx(rate)
    assert found["chip_hours_per_billion"] == pytest.approx(hours)
    assert found["price_per_billion"] == pytest.approx(2.5 * hours)
    assert found["days"] == pytest.approx(5e9 / rate / 86400)
    assert found["price"] == pytest.approx(5 * 2.5 * hours)
    assert set(cost(result)) == {"tokens_per_s", "chip_hours_per_billion"}
    text = io.StringIO()
    print_search(result, Console(file=text, width=100), tokens=5e9, price=2.5)
    printed = " ".join(text.getvalue().split())
    assert "chip-hours per billion tokens (costs " in printed
    assert "5.0 billion take" in printed
    assert "400 Gb/s between hosts per device (--dcn-gbps)" in printed


def test_a_schedule_that_could_be_read_decides_among_what_was_compiled(monkeypatch, result):
    row = result.rows[0]

    def compiled(waits):
        """The row, compiled to a program that waits so long for communication."""
        roofline = dataclasses.replace(row.prediction, waits=waits)
        plan = types.SimpleNamespace(roofline=roofline, memory=None, fits=True, notes=())
        monkeypatch.setattr(module, "plan_experiment", lambda *_: plan)
        return module.compile_row(types.SimpleNamespace(outline=lambda _: [None], target=None), row)

    late, unread = compiled({"data": row.prediction.step_seconds}), compiled(None)
    assert unread.time == row.prediction
    assert (unread.mfu, unread.tokens_per_s) == (row.mfu, row.tokens_per_s)
    slower = late.time.step_seconds / row.prediction.step_seconds
    assert slower > 1.5
    assert (slower * late.mfu, slower * late.tokens_per_s) == pytest.approx(
        (row.mfu, row.tokens_per_s)
    )
    assert rank([late, unread]) == [unread, late]
    text = io.StringIO()
    found = dataclasses.replace(result, rows=(unread, late))
    print_search(found, Console(file=text, width=100))
    assert f" {1000 * late.time.step_seconds:,.1f}* " in text.getvalue()
    assert f"by the estimate {1000 * row.prediction.step_seconds:,.1f} ms" in text.getvalue()
    assert [x["scheduled"] for x in found.to_json()["rows"]] == [False, True]


def test_a_search_that_runs_out_of_time_says_what_it_has_not_seen():
    config = dataclasses.replace(CONFIG, layers=3)
    lines = []
    found = search(
        *(gpt.outline, config, parse_target("h100:2x1")),
        **{"compile_best": 0, "seconds": 0, "progress": lines.append},
    )
    assert len(found.rows) == 1
    (late,) = (f for f in found.families if f.reason.startswith("not looked at: 0 s were over"))
    assert late.count > 0
    assert lines[0].startswith("mesh 1 of 5: ")
    assert "2 fit, the best takes" in lines[1]


def test_a_compiler_that_takes_too_long_is_not_waited_for(monkeypatch, result):
    asked, answer = [], threading.Event()
    answered = dataclasses.replace(result.rows[0], compile_s=5.0)

    def compile_row(_, row):
        asked.append(row)
        answer.wait(5)
        return answered

    monkeypatch.setattr(module, "compile_row", compile_row)
    rows = [result.rows[0]] * 2
    lines = []
    deadline = time.perf_counter() + 0.05
    in_time = module.compile_rows(None, rows, 2, lines.append, deadline=deadline)
    answer.set()
    assert not in_time
    assert len(asked) == 1
    assert rows[0].compiled_bytes is None
    assert rows[0].note == lines[-1]
    assert "was not compiled: the search's time was over (--search-seconds)" in lines[-1]
    # What a compiler raises in time is raised.
    monkeypatch.setattr(module, "compile_row", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.compile_rows(None, rows, 2, lines.append)


def test_what_cannot_be_searched_is_said():
    with pytest.raises(ValueError, match="no published peaks"):
        search(gpt.outline, CONFIG, parse_target("cpu:8"))
    with pytest.raises(ValueError, match="has no layout"):
        search(gpt.outline, object(), parse_target("v5e:2x2"))


def refused(function, *args, **options):
    with pytest.raises(ValueError, match="divi") as found:
        function(*args, **options)
    return Reason.of(found.value)


def test_a_family_is_all_that_one_line_of_code_refuses():
    rejections = Rejections()
    for layers, devices in ((12, 8), (6, 4), (12, 5)):
        stages = gpt.outline(dataclasses.replace(CONFIG, layers=layers)).task.stages
        stacked = {stages.stacked.key: {"w": jax.ShapeDtypeStruct((layers, 3), "float32")}}
        reason = refused(layers_of_stages, stages, stacked, devices=devices)
        rejections.add(reason, [laid(f"pipe={devices}")])
    mesh = jt.make_mesh(data=4, devices=jax.devices()[:4])
    for rows, microbatches in ((16, 8), (8, 4)):
        with jax.set_mesh(mesh):
            shared = functools.partial(accumulated._check_shared, {"x": jnp.ones(rows)})
            rejections.add(refused(shared, microbatches), [laid("data=4")] * 5)
    several, one = rejections.families()
    assert (several.count, several.example) == (10, "data=4")
    assert "accumulate=8 microbatches of 2 do not divide" in several.reason
    assert (one.count, one.example) == (3, "pipe=8")
    assert "12 layers are not divisible by 8 stages = 8" in one.reason


def test_what_stands_beside_a_number_is_no_sign():
    rejections = Rejections()
    for number in (3.0, 2.0):
        rejections.add(Reason("needs # and", number, "x more"), [laid("data=2")])
    assert rejections.families() == (Family("needs # and 2.00 to 3.00 x more", 2, "data=2"),)


@pytest.mark.slow
def test_the_schedule_is_the_fastest_of_all_that_fit():
    shape = {"width": 512, "heads": 4, "seq_len": 512, "layers": 8, "global_batch": 16}
    config = dataclasses.replace(CONFIG, **shape)
    mesh = MeshShape(data=2, pipe=2)
    target = parse_target("v5e:2x2")
    estimator = Estimator(gpt.outline, config, target)
    candidates = make_candidates(config, mesh, schedules=estimator.schedules)
    candidates = [x for x in candidates if x.remat == "none" and x.microbatches(2) == 8]
    assert {(x.pipeline.schedule, x.pipeline.virtual) for x in candidates} == set(SCHEDULES)
    fewest = min(row.estimated_bytes for row in walk_schedules(estimator, candidates, Rejections()))
    for memory in (target.chip.memory_bytes, fewest):
        rejections = Rejections()
        estimator.target = shrunk("v5e:2x2", memory)
        rows = walk_schedules(estimator, candidates, rejections)
        assert len(rows) + rejections.count == len(candidates)
        found = min(rows, key=lambda row: row.prediction.step_seconds)
        priced = []
        for schedule, virtual in SCHEDULES:
            own = {"pipeline.schedule": schedule, "pipeline.virtual": virtual}
            estimated = estimator(found.layout.with_(own))[1]
            if estimated.peak_bytes <= memory:
                priced.append((predict(estimated, target).step_seconds, schedule, virtual))
        chosen = tyro.cli(gpt.Config, args=found.flags).layout.pipeline
        assert min(priced)[1:] == (chosen.schedule, chosen.virtual)


def test_more_chunks_than_layers_are_refused_by_schedule():
    config = dataclasses.replace(CONFIG, layers=6)
    mesh = MeshShape(data=1, fsdp=2, pipe=2)
    estimator, rejections = Estimator(gpt.outline, config, parse_target("v5e:2x2")), Rejections()
    ways = {"gathers": ("step",), "schedules": [("interleaved", 4)]}
    candidates = list(make_candidates(config, mesh, **ways))
    assert walk_schedules(estimator, candidates, rejections) == []
    (family,) = rejections.families()
    assert family.count == len(candidates)
    assert "6 layers, not divisible by virtual=4" in family.reason


def test_flags_that_were_typed_fix_the_schedule(monkeypatch):
    pipeline = PipelineLayout
    assert open_schedules(pipeline()) == [*SCHEDULES]
    assert open_schedules(pipeline(), {"pipeline.schedule"}) == [("1f1b", 1)]
    assert open_schedules(pipeline(virtual=4)) == [("interleaved", 4)]
    assert open_schedules(pipeline(schedule="interleaved", virtual=3)) == [("interleaved", 3)]
    assert open_schedules(pipeline(schedule="gpipe")) == [("gpipe", 1)]
    asked = {}
    monkeypatch.setattr(module, "run_search", lambda *_, **given: asked.update(given))
    by_flags = {"--pipeline.schedule 1f1b": {"pipeline.schedule"}, "": set()}
    by_flags["--pipeline.virtual=1 --no-sequence-parallel"] = {"pipeline.virtual"}
    for flags, fixed in by_flags.items():
        with contextlib.suppress(AttributeError):  # there is no result
            cli.main(["plan", "experiments.gpt", "--target", "v5e:2x2", "--search", *flags.split()])
        assert asked["typed"] == fixed


def test_gpipe_which_is_not_searched_is_no_faster_than_1f1b_and_holds_no_less():
    rng = np.random.default_rng(0)
    for stages, microbatches in itertools.product((2, 3, 4, 8), (1, 2, 4, 8, 16)):
        forward, backward = rng.uniform(0.5, 2, (2, stages))
        tables = [
            make_table(name, stages=stages, microbatches=microbatches) for name in ("1f1b", "gpipe")
        ]
        ours, gpipe = (makespan(t, forward=forward, backward=backward) for t in tables)
        assert ours <= gpipe + 1e-9
        ours, gpipe = map(peak_stash, tables)
        assert (ours <= gpipe).all()
