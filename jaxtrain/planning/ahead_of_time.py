"""Compiles the very step that would train, for devices that need not be here, and says what it is.

Everything starts from shapes: nothing is allocated, and no data is read.
"""

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.build import build_step, make_abstract_state, make_experiment_mesh
from jaxtrain.compile import CompiledStep, compile_step, peak_bytes
from jaxtrain.decisions import Kind, describe
from jaxtrain.experiment import Experiment
from jaxtrain.flops import Flops, count_jaxpr
from jaxtrain.host.chips import Chip
from jaxtrain.host.memory import is_out_of_memory
from jaxtrain.host.paths import listed
from jaxtrain.ops.attention import ahead_of_time
from jaxtrain.planning import estimate
from jaxtrain.planning.by_layer import parts_of
from jaxtrain.planning.exposure import exposed_seconds
from jaxtrain.planning.hlo import Collective, Program, read_program
from jaxtrain.planning.meetings import between_replicas, meetings_of
from jaxtrain.planning.report import Explanation, Memory, Plan, Traffic
from jaxtrain.planning.roofline import Prediction, wire_seconds
from jaxtrain.planning.targets import Target, parse_target
from jaxtrain.planning.unexpected import unexpected_gathers
from jaxtrain.sharding.mesh import make_mesh, slow_parts
from jaxtrain.state import TrainState, host_bytes, local_bytes, shapes_on
from jaxtrain.step import scan_steps
from jaxtrain.tree import PyTree

# Without a device XLA takes 95 % of 80 % of its memory for the limit up to which it may schedule
# collectives ahead. Of a device whose memory JAX has 95 % of, it takes 95 % of that.
GPU_MEMORY = {"xla_gpu_memory_limit_slop_factor": round(95 * 0.95 / 0.8)}
# Let the TPU compiler dump its program. `compiled.as_text()` fails on programs whose token lookup
# runs on a SparseCore with several operands.
TPU_TEXT = {"xla_dump_hlo_as_text": True}


def explain(compiled: Any, mesh: Mesh | None = None, *, params: PyTree = None) -> Explanation:
    """Says what a compiled function communicates and how much memory it takes.

    Args:
      compiled: ``jax.jit(f).lower(...).compile()``, or what :func:`jaxtrain.compile_step` returns.
      mesh: names the axes of collectives; without it they are ``"?"``.
      params: the parameters, or their shapes with shardings, to find collectives that bring a whole
        one together without need.

    >>> import jax.numpy as jnp
    >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile()
    >>> explain(compiled).collectives, explain(compiled).memory["arguments"]
    ((), 16)
    """
    compiled = compiled.compiled if isinstance(compiled, CompiledStep) else compiled
    program, _, unread = read_compiled(compiled, mesh)
    sizes = compiled.memory_analysis()
    memory = {
        "arguments": sizes.argument_size_in_bytes,
        "outputs": sizes.output_size_in_bytes,
        "outputs in place": sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
        "peak": peak_bytes(compiled),
    }
    found = () if params is None or mesh is None else unexpected_gathers(program, params, mesh)
    return Explanation(
        traffic=summarize(program.collectives),
        collectives=program.collectives,
        memory=memory,
        loops=program.loops,
        warnings=(*found, *unread),
    )


def plan(
    step: Callable[[PyTree, PyTree], Any],
    state: PyTree,
    batch: PyTree,
    *,
    target: str | Target,
    mesh: Mesh | Mapping[str, int] | None = None,
    slices: int = 1,
    name: str = "step",
) -> Plan:
    """Compiles a train step for a target and says what it needs.

    Args:
      step: pure, ``(state, batch) -> (state, metrics)``.
      state: the state, or its shapes with shardings (:func:`jaxtrain.abstract_state`). Shardings on
        another mesh are taken over by their specs.
      batch: an example, or its shapes.
      target: such as ``"v5e:4x4"``; see :func:`jaxtrain.planning.targets.parse_target`.
      mesh: sizes of mesh axes as :func:`jaxtrain.make_mesh` takes them, or a mesh to take them
        from; left out, the mesh that the state lies on.
      slices: TPU slices.
      name: for the report.

    Raises:
      ValueError: for a target, mesh or state that cannot be.
    """
    target = parse_target(target, slices=slices) if isinstance(target, str) else target
    devices = target.devices()
    if mesh is None:
        places = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
        mesh = next((place.mesh for place in places if isinstance(place, NamedSharding)), None)
    if mesh is None:
        raise ValueError("the state lies on no mesh: give mesh=, such as mesh={'data': -1}")
    if not isinstance(mesh, Mesh) or list(mesh.devices.flat) != devices:
        on_target = isinstance(mesh, Mesh) and set(mesh.devices.flat) == set(devices)
        mesh = (
            mesh if on_target else make_mesh(**dict(getattr(mesh, "shape", mesh)), devices=devices)
        )
    return plan_step(step, on_mesh(state, mesh), batch, mesh=mesh, target=target, name=name)


def plan_experiment(experiment: Experiment, target: Target) -> Plan:
    """Compiles an experiment's train step for a target, exactly as training would.

    With ``steps_per_call`` above 1 that is a call of so many steps: memory is that call's, with all
    of its batches; traffic, FLOPs and times are of one step. Raises ValueError where the experiment
    does not fit the target's devices.
    """
    mesh = make_experiment_mesh(experiment, target.devices())
    state = make_abstract_state(experiment, mesh)
    return plan_step(
        build_step(experiment, state, mesh),
        state,
        experiment.data.batch,
        mesh=mesh,
        target=target,
        name=experiment.name,
        experiment=experiment,
    )


def plan_step(
    step: Callable[[PyTree, PyTree], Any],
    state: PyTree,
    batch: PyTree,
    *,
    mesh: Mesh,
    target: Target,
    name: str,
    experiment: Experiment | None = None,
) -> Plan:
    """Compiles a step as :func:`plan` does, for a state that lies on the target's mesh.

    The ``experiment`` whose step it is brings its rules and options, the formula of its FLOPs, its
    layers, its pipeline, and how many steps the compiled call runs, each with such a batch.
    """
    how, formula, layers, steps_per_call = {}, None, None, 1
    if experiment is not None:
        how, steps_per_call = experiment.compiled_with, experiment.layout.steps_per_call
        layers = experiment.task.stages.stacked.key if experiment.task.stages else None
        if experiment.task.flops_per_step is not None:
            formula = experiment.task.flops_per_step, experiment.task.flops_formula
    called, given = step, batch
    if steps_per_call > 1:
        called, given = scan_steps(step), [batch] * steps_per_call
    with (
        ahead_of_time("compiled"),
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught,
    ):
        for category in estimate.TRACE_WARNINGS:
            warnings.simplefilter("always", category)
        shortage, train = 0, None
        options = {"gpu": GPU_MEMORY, "tpu": TPU_TEXT | {"xla_dump_to": folder}}
        try:
            train = compile_step(
                *(called, state, given),
                **{"mesh": mesh} | how,
                compiler_options=options.get(target.chip.kind),
            )
        except RuntimeError as error:
            if "Unknown backend" in str(error):  # a callback is made for devices that are here
                raise ValueError(
                    "the step calls Python (jax.debug.print, a callback), which nothing compiles "
                    f"for the GPUs of {target} from here: leave that out of the step to plan"
                ) from None
            if not is_out_of_memory(error):
                raise
            shortage = _shortage(str(error))
            refusal = str(error).splitlines()[0].strip()
        traced = estimate.trace_step(step, state, batch, mesh, how.get("rules"))
        dumped = [path.read_text() for path in listed(Path(folder), "*.after_optimizations.txt")]
    flops = count_jaxpr(traced)
    estimated, unread = _walk(traced, state, batch, mesh, how.get("rules"), kind=target.chip.kind)
    ours = (w for w in caught if issubclass(w.category, estimate.TRACE_WARNINGS))
    notes = list(dict.fromkeys(str(w.message) for w in ours))
    notes += [*_flops_notes(flops), *unread]
    if steps_per_call > 1:
        notes.append(f"memory is of a call of {steps_per_call} steps, with all their batches")
    planned = Plan(
        name=name,
        target=str(target),
        device_kind=target.chip.device_kind,
        devices=mesh.size,
        hosts=target.hosts,
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        flops=flops,
        flops_formula=formula,
        layout=experiment.layout.choices if experiment else "",
        peak_flops=_peak(flops, target.chip),
        assumed="" if target.chip.hbm_bytes_per_s is None else target.chip.assumed,
        fits=False,
        shortage=shortage,
    )
    if train is None:
        return dataclasses.replace(planned, notes=(*notes, f"the compiler: {refusal}"))
    notes += map(" ".join, describe(train.findings).items())
    program, text, unread = read_compiled(train.compiled, mesh, max(dumped, key=len, default=""))
    program = program.per_step(steps_per_call)
    kept = estimated.kept if estimated else {}
    memory = split_memory(train, state, given, target.chip, sum(kept.values()))
    roofline = meetings = None
    if estimated is not None:
        if experiment is not None:
            estimated = estimate.on_critical_path(estimated, experiment, state.params)
        estimated = dataclasses.replace(estimated, slow=slow_parts(mesh))

        def predicted(program: Program) -> Prediction | None:
            sent = None if unread else wires(program.collectives)
            found = estimate.predict(estimated, target, sent)
            if found is None or unread or mesh.shape.get("pipe", 1) > 1:
                return found
            return as_scheduled(found, program, target, steps_per_call)

        roofline = predicted(program)
    if experiment is not None and (every := experiment.method.every) and not unread:
        meetings = meetings_of(program, target, every)
        if roofline is not None:
            alone = [c for c in program.collectives if not between_replicas(c)]
            rest = predicted(dataclasses.replace(program, collectives=tuple(alone)))
            meetings = dataclasses.replace(meetings, step_seconds=rest.step_seconds)
    if roofline is not None and target.chip.host_bytes_per_s is not None:
        # Fetched, and sent back; layers also for both passes of each microbatch.
        layers = host_bytes(getattr(state, "params", ()))
        passes = 2 * (1 if experiment is None else experiment.layout.accumulate)
        seconds = (2 * host_bytes(state) + passes * layers) / target.chip.host_bytes_per_s
        roofline = dataclasses.replace(roofline, host=seconds)
    params = getattr(state, "params", None)
    gathers = ()
    if params is not None:
        once = any(x.gathers_once for x in train.findings.get(Kind.REDUCTION, ()))
        gathers = unexpected_gathers(program, params, mesh, layers=layers, once=once)
    return dataclasses.replace(
        planned,
        fits=memory.fits,
        shortage=0 if memory.fits else memory.needed - memory.limit,
        memory=memory,
        parts=parts_of(state, kept, experiment),
        traffic=None if unread else summarize(program.collectives, target),
        collectives=program.collectives,
        meetings=meetings,
        hbm_bytes=estimated and estimated.cost.hbm_bytes,
        roofline=roofline,
        compile_seconds=train.compile_seconds,
        warnings=gathers,
        notes=(*notes, *unread, *_notes(program, memory, target, experiment)),
        hlo=text,
    )


def _walk(traced: Any, *step: Any, kind: str) -> tuple[estimate.Estimate | None, tuple[str, ...]]:
    """Returns the estimate of a traced step, and a note if the trace could not be read."""
    try:
        return estimate.estimate_traced(traced, *step, kind=kind), ()
    except Exception as error:  # a jaxpr is no stable interface, and memory is known without it
        reason = f"{type(error).__name__}: {error}"
        return None, (f"the step's time is not predicted: its trace was not understood ({reason})",)


def read_compiled(
    compiled: Any, mesh: Mesh | None, text: str = ""
) -> tuple[Program, str, tuple[str, ...]]:
    """The program, its text, and what is to be said where XLA's text says nothing.

    ``text`` is the program as its compiler wrote it; without it JAX is asked.
    """
    try:
        text = text or compiled.as_text()
        return read_program(text, mesh), text, ()
    except Exception as error:  # XLA fails to print some, and its text is no stable interface
        what = "its text was not understood" if text else "XLA cannot print the program"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Program(), text, (f"communication is not known: {what} ({reason})",)


def as_scheduled(roofline: Prediction, program: Program, target: Target, steps: int) -> Prediction:
    """The prediction with what the schedule of a program of so many steps leaves exposed."""

    def seconds(collective: Collective) -> tuple[float, float]:
        # Of one execution: the timeline weighs its branch itself.
        alone = dataclasses.replace(collective, share=1.0)
        ring = target.ring(alone.group)
        return wire_seconds(alone.kind, alone.sent, alone.crossing, target.chip, ring=ring)

    products, others = max(roofline.compute, roofline.product_hbm), roofline.other_hbm
    times = {"products": steps * products, "others": steps * others}
    waits = exposed_seconds(program, **times, seconds=seconds)
    if waits is None:
        return roofline
    return dataclasses.replace(roofline, waits={axes: s / steps for axes, s in waits.items()})


def wires(
    collectives: tuple[Collective, ...],
) -> Mapping[tuple[str, tuple[str, ...]], tuple[float, ...]]:
    """Bytes that one device sends, those that cross the slow network, and in how many collectives,
    by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}
    for row in summarize(collectives):
        sent, crossing, times = found.get((row.kind, row.axes), (0.0, 0.0, 0.0))
        more = sent + row.sent, crossing + row.crossing, times + row.executions
        found[row.kind, row.axes] = more
    return found


def split_memory(
    train: CompiledStep, state: PyTree, batch: PyTree, chip: Chip, kept_bytes: int
) -> Memory:
    """Divides a compiled step's peak into what it is made of; see :class:`Memory`.

    ``kept_bytes`` is what loops keep for the backward pass, by the traced step.
    """
    shapes = jax.eval_shape(lambda tree: tree, batch)
    parts = {"parameters": 0, "optimizer_state": 0, "other_state": local_bytes(state)}
    if isinstance(state, TrainState):
        parts["parameters"] = local_bytes(state.params)
        parts["optimizer_state"] = local_bytes(state.opt_state)
        parts["other_state"] -= parts["parameters"] + parts["optimizer_state"]
    parts["batch"] = local_bytes(shapes_on(shapes, train.batch_shardings))
    peak, sizes = train.memory_bytes, train.compiled.memory_analysis()
    rest = max(0, peak - sum(parts.values()))
    kept = min(rest, kept_bytes)
    return Memory(
        **parts,
        activations=kept,
        temporaries=rest - kept,
        program=sizes.generated_code_size_in_bytes,
        peak=peak,
        limit=chip.memory_bytes,
        host=host_bytes(state),
        host_parameters=host_bytes(getattr(state, "params", ())),
        host_temporaries=sizes.host_temp_size_in_bytes,
    )


def summarize(
    collectives: tuple[Collective, ...], target: Target | None = None
) -> tuple[Traffic, ...]:
    """Adds up collectives by kind, axes and whether they cross the slow network.

    Those that send most come first; times are there where a target is given.
    """
    groups: dict[tuple[str, tuple[str, ...], bool], list[Collective]] = {}
    for collective in collectives:
        key = collective.kind, collective.axes, collective.islands > 1
        groups.setdefault(key, []).append(collective)
    rows = []
    for (kind, axes, _), group in groups.items():
        bytes_sent = sum(c.executions * c.sent for c in group)
        crossing, seconds = sum(c.executions * c.crossing for c in group), None
        executions = sum(c.executions * c.share for c in group)
        if target is not None and target.chip.link_bytes_per_s is not None:
            ring = target.ring(max(c.group for c in group))  # along the same axes
            sent = bytes_sent, crossing
            seconds = sum(wire_seconds(kind, *sent, target.chip, executions, ring))
        rows.append(
            Traffic(
                kind=kind,
                axes=axes,
                executions=executions,
                smallest=min(c.payload for c in group),
                largest=max(c.payload for c in group),
                payload=sum(c.executions * c.share * c.payload for c in group),
                sent=bytes_sent,
                seconds=seconds,
                conditional=any(c.conditional for c in group),
                crossing=crossing,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.sent))


def on_mesh(state: PyTree, mesh: Mesh) -> PyTree:
    """Returns a state's shapes with the specs they have, on another mesh."""

    def move(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
        shape = jax.eval_shape(lambda x: x, leaf)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(move, state)


def _peak(flops: Flops, chip: Chip) -> float | None:
    if not flops.by_dtype:
        return None
    return chip.peak_flops(max(flops.by_dtype, key=flops.by_dtype.get))


_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _shortage(message: str) -> int:
    """Bytes that are missing, as a compiler's message says."""
    size = r"\(?([\d.]+)([BKMGT])\)?"
    if found := re.search(rf"[Ee]xceeded hbm capacity by {size}", message):
        return int(float(found[1]) * _UNITS[found[2]])
    for pattern in (rf"{size} exceeds available HBM {size}", rf"[Uu]sed {size} of {size} hbm"):
        if found := re.search(pattern, message):
            return int(float(found[1]) * _UNITS[found[2]] - float(found[3]) * _UNITS[found[4]])
    return 0


def _flops_notes(flops: Flops) -> list[str]:
    notes = []
    if flops.unknown_loops:
        notes.append(f"FLOPs of {flops.unknown_loops} while loops are counted once")
    if flops.kernels:
        notes.append("FLOPs of fused kernels are those of all their tiles, masked ones too")
    if flops.unknown:
        notes.append(unknown_note(flops.unknown))
    return notes


def unknown_note(names: Iterable[str]) -> str:
    """Says how primitives of unknown cost are counted."""
    return (
        f"FLOPs of {', '.join(sorted(names))} are not known: counted as one per element that they "
        "read and write"
    )


def _notes(
    program: Program, memory: Memory, target: Target, experiment: Experiment | None
) -> list[str]:
    notes = []
    if None in program.loops:
        count = program.loops.count(None)
        notes.append(f"{count} loops of unknown length are counted as one trip")
    if any(c.conditional for c in program.collectives):
        notes.append(
            "collectives in branches (marked ≤) are counted as if every branch were taken on every "
            "trip"
        )
    offloads = () if experiment is None else experiment.layout.offloads
    if offloads and target.chip.kind == "gpu":
        notes.append(
            "without a GPU its compiler knows no memory of the host: what lies there "
            f"({', '.join(offloads)}) is counted as on the device"
        )
    if memory.host and target.chip.host_bytes_per_s is None:
        notes.append("how fast the host's memory is reached is not published, and not counted")
    if target.chip.kind == "gpu" and memory.fits and memory.needed > 0.75 * memory.limit:
        notes.append(
            "JAX takes 75 % of a GPU's memory by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        )
    return notes
