"""Where traced time goes: exact on timelines made by hand, and told of a real trace."""

import collections
import io
import itertools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from rich.console import Console

import jaxtrain as jt
from jaxtrain import cli
from jaxtrain.planning.hlo import COLLECTIVES
from jaxtrain.run.observe.profile import command, hosts, programs, trace
from jaxtrain.run.observe.profile.timeline import Event, covered, divide, innermost
from jaxtrain.run.observe.profile.trace import add_up, part_of
from jaxtrain.run.observe.report import flame, health, records
from tests.commands import refused
from tests.run.survive.processes import workers


def test_time_is_divided_as_by_looking_at_every_moment():
    rng = np.random.default_rng(0)
    for _ in range(50):
        spans = np.sort(rng.integers(0, 40, (9, 2))).tolist()
        line = [Event(0, 30, 0)] + [Event(a, b, i % 4) for i, (a, b) in enumerate(spans[:6])]
        lines = [line, *([Event(a, b, 4 + i)] for i, (a, b) in enumerate(spans[6:]))]
        begin, end = 3, 37
        moments = collections.Counter()
        for t in range(begin, end):
            # Of those around a moment on a line the one that began last, or is the shortest.
            now = [
                max(
                    (e.start, -e.end, i, e.what) for i, e in enumerate(line) if e.start <= t < e.end
                )
                for line in lines
                if any(e.start <= t < e.end for e in line)
            ]
            first = [what for *_, what in now if what % 4 == min(w % 4 for *_, w in now)]
            for what in first or [None]:
                moments[what] += 1 / max(1, len(first))
        shares, idle = divide(map(innermost, lines), begin, end, lambda what: what % 4)
        assert {k: pytest.approx(v) for k, v in moments.items()} == shares
        assert sum(e.end - e.start for e in idle) == shares.get(None, 0)


def message(*fields):
    """A protocol buffer of pairs of a field's number and its value."""

    def number(value):
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)

    out = b""
    for field, value in fields:
        if isinstance(value, int):
            out += number(field << 3) + number(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            out += number(field << 3 | 2) + number(len(value)) + value
    return out


def module(**computations):
    """An HloProto: instructions are (name, opcode, path, called computations)."""
    numbers = {name: i for i, name in enumerate(computations, start=1)}
    parts = [
        (
            3,
            message(
                *(
                    (
                        2,
                        message(
                            (1, name),
                            (2, opcode),
                            (7, message((2, path))),
                            *((38, bytes([numbers[called]])) for called in calls),
                        ),
                    )
                    for name, opcode, path, *calls in instructions
                ),
                (5, numbers[computation]),
            ),
        )
        for computation, instructions in computations.items()
    ]
    return message((1, message((1, "jit_step"), *parts)))


def write_trace(folder, lines, *, plane, hlo, name="jit_step(7)"):
    """A trace of one device: lines of (name, start, end, stats) in nanoseconds."""
    names = {n: i for i, n in enumerate(dict.fromkeys(e[0] for x in lines.values() for e in x), 1)}
    stats = {
        n: i
        for i, n in enumerate(
            dict.fromkeys(
                s for x in lines.values() for e in x for s in (e[3] if len(e) > 3 else {})
            ),
            1,
        )
    }
    made = [
        (
            3,
            message(
                (2, line),
                *(
                    (
                        4,
                        message(
                            (1, names[n]),
                            (2, 1000 * a),
                            (3, 1000 * (b - a)),
                            *(
                                (4, message((1, stats[k]), (5, v)))
                                for k, v in (more[0] if more else {}).items()
                            ),
                        ),
                    )
                    for n, a, b, *more in events
                ),
            ),
        )
        for line, events in lines.items()
    ]
    made += [(4, message((1, i), (2, message((1, i), (2, n))))) for n, i in names.items()]
    made += [(5, message((1, i), (2, message((1, i), (2, n))))) for n, i in stats.items()]
    about = message((1, 7), (2, name), (5, message((1, 1), (6, hlo))))
    metadata = message((2, "/host:metadata"), (4, message((1, 7), (2, about))))
    folder.mkdir(parents=True)
    space = message((1, message((2, plane), *made)), (1, metadata))
    (folder / "host.xplane.pb").write_bytes(space)
    return trace.read_trace(epath.Path(folder))


HLO = module(
    main=[
        ("while.1", "while", "jit(step)/jvp()/while", "body"),
        ("fusion.2", "fusion", "", "products"),
        (
            "all-gather-start.3",
            "all-gather-start",
            "jit(step)/jvp()/while/body/block/mlp/dot_general",
        ),
        ("all-gather-done.3", "all-gather-done", ""),
        ("wrapped", "async-start", "jit(step)/transpose(jvp(head))/reduce_sum", "scattered"),
        ("all-reduce.4", "fusion", "jit(step)/add", "reduced"),
        ("adam", "fusion", "jit(step)/optimizer/mul", "update"),
        (
            "splash_mha.1",
            "custom-call",
            "jit(step)/transpose(jvp())/while/body/rematted_computation/block/attention/pallas_call",
        ),
    ],
    body=[("copy.8", "copy", "jit(step)/jvp()/while/body/block/transpose")],
    products=[
        ("param", "parameter", ""),
        (
            "convolution.1",
            "convolution",
            "jit(step)/transpose(jvp())/while/body/block/mlp/dot_general",
        ),
        ("scaled", "multiply", "jit(step)/jvp()/while/body/block/mul"),
    ],
    scattered=[("inner", "reduce-scatter", "")],
    reduced=[("sum", "all-reduce", ""), ("more", "add", "")],
    update=[("x", "multiply", ""), ("y", "gather", "")],
)


def test_a_core_and_what_goes_on_meanwhile_add_up_exactly(tmp_path):
    """A TPU: operations within a loop, and a gather that the product hides in part."""
    lines = {
        "Steps": [("0", 0, 1000)],
        "XLA Modules": [("jit_step(7)", 0, 1000), ("jit_other(8)", 1000, 1100)],
        "XLA Ops": [
            ("%while.1 = (f32[2]) while(x), body=%body", 100, 700),
            ("%fusion.2 = f32[2] fusion(x)", 150, 450),
            ("%all-gather-done.3 = f32[2] all-gather-done(y)", 450, 500),
            ("%copy.8 = f32[2] copy(y)", 500, 700),
            ("%adam = f32[2] fusion(y)", 800, 1000),
            ("%fusion.2 = f32[2] fusion(x)", 1050, 1100),  # of another program, not in the trace
        ],
        "Async XLA Ops": [("%all-gather-start.3 = f32[2] all-gather-start(y)", 120, 500)],
    }
    folder = tmp_path / "steps-5-6"
    found = write_trace(folder, lines, plane="/device:TPU:0", hlo=HLO)
    assert (found.name, found.steps) == ("steps-5-6", 2)
    assert found.seconds == pytest.approx(500e-9)
    kinds = {kind: round(2e9 * seconds) for kind, seconds in add_up(found, lambda x: x.kind)}
    assert kinds == {
        "matrix products": 300,
        "look-ups and sorts": 200,
        "copies": 200,
        # Before the product, and after it.
        "all-gather": 30 + 50,
        "loops and branches": 20,
        "other": 50,
        "idle": 100 + 50,
    }
    parts = {part: round(2e9 * seconds) for part, seconds in add_up(found, part_of)}
    # What ends the gather has no path: half of the wait is known by what began it.
    assert parts["block/mlp"] == 300 + 30 + 25
    assert (parts["block"], parts["optimizer"], parts["idle"]) == (200, 200, 150)
    assert parts["other"] == 20 + 25 + 50
    assert {k: round(2e9 * s) for k, s in found.in_flight.items()} == {"all-gather": 380}
    (device,) = found.devices
    assert [round(2e9 * x) for x in (device.busy, device.exposed, device.idle)] == [770, 80, 150]
    assert round(1e9 * device.longest) == 100
    drawn = flame.drawn(found)["flame"]
    assert drawn[:2] == ["step", 5e-4]
    sizes = {name: round(2e6 * ms) for name, ms, _ in drawn[2]}
    assert sizes == {"block": 555, "optimizer": 200, "idle": 150, "other": 95}
    (block,) = (inner for name, _, inner in drawn[2] if name == "block")
    assert [name for name, *_ in block] == ["mlp", "forward"]
    ((backward, ms, kinds), (forward, *_)) = block[0][2]
    assert (backward, round(2e6 * ms), forward) == ("backward", 300, "forward")
    assert kinds == [["matrix products", ms, []]]
    (copy,) = (each for each in found.shares if each.name == "copy.8")
    assert copy == ("copies", "forward", ("block",), "copy.8", "jit_step(7)")


def test_the_widest_branches_are_told_in_lines_each_within_its_own(tmp_path, monkeypatch):
    lines = {
        "XLA Modules": [("jit_step(7)", 0, 1000)],
        "XLA Ops": [
            ("%fusion.2 = f32[2]", 0, 500),  # the product of block/mlp, backward
            ("%copy.8 = f32[2]", 500, 600),  # of block, forward
            ("%adam = f32[2]", 700, 1000),
        ],
    }
    found = write_trace(tmp_path / "steps-1-1", lines, plane="/device:TPU:0", hlo=HLO)
    monkeypatch.setattr(command, "BRANCHES", 7)
    command.draw(found, console := Console(width=100, file=io.StringIO()))
    told = console.file.getvalue().partition("widest branches")[2].split("longest operations")[0]
    rows = [re.fullmatch(r"( *\S.*?)  +\S+ \S+ +([\d.]+)% *(█*) *", x) for x in told.split("\n")]
    assert [(row[1], float(row[2]), len(row[3])) for row in rows if row] == [
        ("step", 100.0, 24),
        ("  block", 60.0, 14),
        ("    mlp", 50.0, 12),
        ("      backward", 50.0, 12),
        ("        matrix products", 50.0, 12),
        # The copy in the block is shorter than these.
        ("  optimizer", 30.0, 7),
        ("    look-ups and sorts", 30.0, 7),
    ]


def test_what_differs_between_two_profiles_is_told_the_largest_first(capsys):
    def made(name, steps, *times):
        parts, at = [], 0.0
        kinds = (("copies", "a"), ("dot", "b"), ("dot", "c"))
        for (kind, scope), time in zip(kinds, times, strict=True):
            if time:
                what = programs.Operation(kind, "", (scope,), kind + scope)
                parts.append(Event(at, at + time, what))
            at += time
        return trace.make_profile(name, steps, {"CPU:0": [parts]})

    before = made("steps-1-2", 2, 2e6, 8e6, 0)
    after = made("steps-1-4", 4, 6e6, 4e6, 8e6)
    command.draw_difference(before, after, console := Console(width=100, file=io.StringIO()))
    told = [" ".join(row.split()) for row in console.file.getvalue().splitlines()]
    assert told == [
        "steps-1-2 and steps-1-4 per step, means of 2 and 4",
        "",
        "by kind of operation before after change",
        "dot 4.0 ms 3.0 ms -1.0 ms -25.0%",
        "copies 1.0 ms 1.5 ms +500 µs +50.0%",
        "all 5.0 ms 4.5 ms -500 µs -10.0%",
        "",
        "by part of the model before after change",
        "b 4.0 ms 1.0 ms -3.0 ms -75.0%",
        "c 0 µs 2.0 ms +2.0 ms new",
        "a 1.0 ms 1.5 ms +500 µs +50.0%",
        "all 5.0 ms 4.5 ms -500 µs -10.0%",
    ]
    with pytest.raises(ValueError, match="'other' does not say how many steps it has"):
        command.draw_difference(before, made("other", None, 1, 1, 1), Console())


def test_processes_are_laid_on_one_clock_and_the_slowest_of_each_step_is_named():
    ms, steps, rng = 1e6, 4, np.random.default_rng(0)
    late = {0: "process-1", 1: "process-1", 2: "process-0", 3: "process-2"}
    clock = {"process-0": 0.0, "process-1": 7e9, "process-2": -3e9}
    made = {name: {f"CPU:{i}": [[]] for i in range(2)} for name in clock}

    def note(process, device, start, end, name):
        kind = "all-reduce" if name.startswith("all-reduce") else "dot"
        what = programs.Operation(kind, name=name)
        by = clock[process]
        made[process][device][0].append(Event(start - by, end - by, what))

    at = 0.0
    for step in range(steps):
        arrives = {p: at + ms * (5 + 40 * (late[step] == p)) for p in clock}
        ends = max(arrives.values()) + ms
        for p, comes in arrives.items():
            for i, device in enumerate(made[p]):
                note(p, device, at, comes - i * ms, "dot.1")
                note(p, device, comes - i * ms, ends, "all-reduce.1")
                # One within each process, whose ends no clock can be told by.
                own = ends + ms * rng.uniform(0, 9)
                note(p, device, ends, own, "all-reduce.2")
        at = ends + 10 * ms
    found = hosts.clocks(made)
    assert found.offsets == pytest.approx(clock)
    assert found.apart < 1e-3
    lines, _ = hosts.aligned(made)
    told = hosts.waits(lines, 8, steps)
    assert [(each.step, each.process) for each in told] == [(8 + i, p) for i, p in late.items()]
    assert [each.seconds for each in told] == pytest.approx([0.04] * steps)
    events = json.loads(hosts.to_json(lines))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    shown = [e for e in events if e["ph"] == "X" and e["name"] == "all-reduce.1"]
    for i in range(steps):
        ends = [
            sorted(e["ts"] + e["dur"] for e in shown if names[e["pid"]] == p)[2 * i] for p in clock
        ]
        assert max(ends) - min(ends) < 1  # microseconds
    assert hosts.aligned({"a": made["process-0"]}) == ({"a": made["process-0"]}, None)
    alone = {p: {"CPU:0": [[Event(0, 1, programs.Operation("dot"))]]} for p in clock}
    assert hosts.aligned(alone) == (alone, None)


def test_a_collective_that_runs_once_tells_no_clock():
    # Of "own" each process waits for its own devices alone, so that its ends are 50 ms apart.
    made = {
        process: {
            "CPU:0": [
                [Event(0, own, programs.Operation("all-gather", name="own"))]
                + [Event(t, t + 5, programs.Operation("all-reduce", name="all")) for t in (70, 90)]
            ]
        }
        for process, own in (("a", 10), ("b", 60))
    }
    assert hosts.clocks(made) == hosts.Clocks({"a": 0.0, "b": 0.0}, 0.0)
    once = {p: {"CPU:0": [lines["CPU:0"][0][:1]]} for p, lines in made.items()}
    assert hosts.aligned(once) == (once, None)


def test_a_timeline_has_few_tracks_of_many_transfers_and_none_of_number_0():
    copy = programs.Operation("copies", name="copy")
    core = [Event(10 * i, 10 * i + 9, programs.Operation("dot", name="dot")) for i in range(20)]
    lines = [core, *([Event(10 * i, 10 * i + 15, copy)] for i in range(20)), []]
    events = json.loads(hosts.to_json({"host": {"TPU:0": lines}}))["traceEvents"]
    assert {e["pid"] for e in events} == {1}
    tracks = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert sorted(tracks) == [1, 2, 3]
    assert sum(map(len, tracks.values())) == 40
    for track in tracks.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(track))


@pytest.mark.slow
def test_two_real_processes_share_a_timeline_that_names_the_slow_one(tmp_path, capsys):
    options = ("--steps", "16", "--profile-steps", "8:13", "--slow-process", "1")
    with workers(tmp_path, *options, count=2, devices=2) as processes:
        assert [p.code() for p in processes] == [0, 0], processes[0].errors
    run = epath.Path(tmp_path / "run")
    found = trace.read_trace(trace.find_trace(run))
    assert {device.name.split()[0] for device in found.devices} == {"process-0", "process-1"}
    assert [(each.step, each.process) for each in found.late] == [
        (step, "process-1") for step in range(8, 14)
    ]
    # It waits 0.18 s a step longer for its data, which the other then waits for it.
    assert np.median([each.seconds for each in found.late]) == pytest.approx(0.18, abs=0.06)
    assert found.clocks.apart < 0.02e9
    file = tmp_path / "timeline.json"
    assert cli.main(["profile", str(run), "--timeline", str(file)]) == 0
    assert "process-1" in capsys.readouterr().out.partition("the slowest")[2]
    assert len({e["pid"] for e in json.loads(file.read_text())["traceEvents"]}) == 2
    assert flame.traced(run)["late"][0][:2] == [8, "process-1"]
    assert health.examine(records.read_run(run, "run"))[-1].text == "The run is done, at step 16."
    told = health._slowest(records.read_run(run, "run"))
    assert re.match(r"Process 1 is the slowest in (9\d|100)% of the log's lines", told[0].text)


def test_streams_of_a_gpu_share_their_time_and_hide_each_other(tmp_path):
    of = {"hlo_module": "jit_step", "program_id": "7"}
    lines = {
        "Stream #13(Compute)": [
            ("gemm_kernel", 0, 100, of | {"hlo_op": "while.1::fusion.2"}),
            ("flash", 100, 200, of | {"hlo_op": "splash_mha.1"}),
            ("void cub::sort", 300, 400),
        ],
        "Stream #14(Compute)": [("k", 150, 250, of | {"hlo_op": "adam"})],
        "Stream #15": [
            ("ncclDevKernel_ReduceScatter_Sum_bf16", 50, 260, of | {"hlo_op": "wrapped"}),
            ("MemcpyH2D", 255, 300),
            ("ncclDevKernel_AllReduce_Sum_f32", 300, 310),
        ],
        "XLA Ops": [("fusion.2", 0, 400, of | {"hlo_op": "fusion.2"})],
    }
    found = write_trace(tmp_path / "mine", lines, plane="/device:GPU:3", hlo=HLO)
    assert found.steps is None
    kinds = {kind: round(1e9 * seconds) for kind, seconds in add_up(found, lambda x: x.kind)}
    assert kinds == {
        "matrix products": 100,
        "attention": 50 + 25,
        "look-ups and sorts": 25 + 50,
        "reduce-scatter": 10,
        "transfers": 40,
        "all-reduce": 0,  # hidden
        "other": 100,
        "idle": 0,
    }
    assert {k: round(1e9 * s) for k, s in found.in_flight.items()} == {
        "reduce-scatter": 210,
        "all-reduce": 10,
    }
    by_name = {each.name: each for each in found.shares}
    assert by_name["splash_mha.1"][1:3] == ("recomputed", ("block", "attention"))
    assert by_name["wrapped"][:3] == ("reduce-scatter", "backward", ("head",))
    # A fusion without a path works where its product does.
    assert by_name["fusion.2"][1:3] == ("backward", ("block", "mlp"))


def toy(mesh):
    """A train step of four layers on the batch that it was compiled for."""
    layers = {"w": 0.1 * jnp.ones((4, 32, 32))}
    params = {"enter": jnp.ones((16, 32)), "blocks": layers, "leave": jnp.ones((32, 4))}
    stages = jt.Stages(
        lambda params, batch, rng: batch @ params["enter"],
        lambda layer, x, batch, rng: jnp.tanh(x @ layer["w"]),
        lambda params, x, batch: jnp.square(x @ params["leave"]).mean(),
        remat=lambda layer, prevent_cse: jax.checkpoint(layer, prevent_cse=prevent_cse),
    )
    optimizer, batch = jt.make_optimizer("adamw", 1e-3), jnp.ones((8, 16))
    state = jt.init_state(lambda rng: params, optimizer, jax.random.key(0), mesh=mesh)
    step = jt.build_train_step(jt.loss_from_stages(stages), optimizer)
    return jt.compile_step(step, state, batch, mesh=mesh), state, batch


@pytest.mark.slow
@pytest.mark.usefixtures("traces")
def test_the_trace_of_a_step_names_its_parts_and_adds_up(tmp_path, capsys):
    train, state, batch = toy(jt.make_mesh(data=2, devices=jax.devices()[:2]))
    state, _ = train(state, batch)
    folder = tmp_path / "run" / trace.TRACES
    options = jax.profiler.ProfileOptions()
    for name, steps in (("steps-1-1", 1), ("steps-2-4", 3)):
        options.session_id = name
        jax.block_until_ready(state)
        jax.profiler.start_trace(tmp_path / "run/tensorboard", profiler_options=options)
        for _ in range(steps):
            state, _ = train(state, batch)
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
        (file,) = (folder / name).glob("*.xplane.pb")
        os.utime(file, (steps, steps))
    found = trace.read_trace(trace.find_trace(epath.Path(tmp_path / "run")))
    assert (found.name, len(found.devices)) == ("steps-2-4", 2)
    assert sum(found.shares.values()) == pytest.approx(found.seconds)
    parts, kinds = dict(add_up(found, part_of)), dict(add_up(found, lambda x: x.kind))
    assert {"embed", "blocks", "head", "optimizer"} <= parts.keys()
    assert {"matrix products", "all-reduce"} <= kinds.keys()
    assert all(each.busy > 0 for each in found.devices)
    assert all(x.scopes for x in found.shares if x.kind == "matrix products")
    directions = {x.direction for x in found.shares if x.scopes == ("blocks",)}
    assert directions >= {"forward", "recomputed", "backward"}
    for kind in found.in_flight:
        assert 0 < kinds[kind] <= found.in_flight[kind] * (1 + 1e-9)
        assert kind in COLLECTIVES

    assert cli.main(["profile", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert told.startswith("steps-2-4: ")
    assert "per step, mean of 3, on 2 devices" in told
    assert cli.main(["profile", str(tmp_path / "run"), "--trace", "steps-1-1"]) == 0
    assert capsys.readouterr().out.startswith("steps-1-1: ")
    assert cli.main(["profile", *[str(tmp_path / "run")] * 2]) == 0
    assert "+0.0%" in capsys.readouterr().out
    for flags, words in (
        ([str(tmp_path)], "has no trace: start the run with --profile-steps"),
        ([str(tmp_path / "run"), "--trace", "steps-9-9"], "it has steps-1-1, steps-2-4"),
    ):
        assert words in refused(capsys, "profile", *flags)
    assert flame.traced(tmp_path) is None
    drawn = flame.traced(tmp_path / "run")
    assert (drawn["name"], drawn["devices"]) == ("steps-2-4", 2)
    assert sum(ms for _, ms, _ in drawn["kinds"]) == pytest.approx(drawn["ms"], rel=1e-3)
    for _, ms, *directions in drawn["parts"]:
        assert sum(directions) <= ms * 1.001
    file.write_bytes(b"no trace")
    assert "cannot be read as a trace" in flame.traced(tmp_path / "run")["failed"]


def test_what_a_program_does_not_say_is_told_by_the_name_alone_or_other():
    def kind(name):
        return programs.operation_of(name, "jit_gone(3)", {}).kind

    assert kind("all-gather-done.12") == "all-gather"
    assert kind("%ragged-all-to-all.1 = f32[2] ragged-all-to-all(x)") == "ragged-all-to-all"
    assert kind("copy-done.3") == "transfers"
    assert kind("while.9") == "loops and branches"
    assert kind("fusion.7") == kind("anything") == kind("") == "other"
    assert covered([Event(0, 2, ""), Event(1, 3, ""), Event(5, 6, "")]) == 4
