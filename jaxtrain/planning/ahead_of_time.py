"""Compiles the very step that would train, for devices that need not be here, and says what it is.

Everything starts from shapes: nothing is allocated, and no data is read.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.compile import CompiledStep, compile_step
from jaxtrain.experiment import Experiment, build_step, make_abstract_state, make_experiment_mesh
from jaxtrain.ops.attention import AheadOfTimeWarning, ahead_of_time
from jaxtrain.parallel.mesh import make_mesh
from jaxtrain.parallel.placement import tracing_on
from jaxtrain.parallel.sharding import Rule, Rules
from jaxtrain.planning.chips import Chip
from jaxtrain.planning.flops import Flops, count_flops
from jaxtrain.planning.hlo import Collective, Program, read_program
from jaxtrain.planning.report import Explanation, Memory, Plan, Traffic
from jaxtrain.planning.roofline import axis_seconds, make_roofline
from jaxtrain.planning.targets import Target, parse_target
from jaxtrain.planning.unexpected import unexpected_gathers
from jaxtrain.state import TrainState, local_bytes
from jaxtrain.step import scan_steps

PyTree = Any


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
    program = read_program(compiled.as_text(), mesh)
    sizes = compiled.memory_analysis()
    memory = {
        "arguments": sizes.argument_size_in_bytes,
        "outputs": sizes.output_size_in_bytes,
        "outputs in place": sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "kept by loops": program.kept_bytes,
        "program": sizes.generated_code_size_in_bytes,
        "peak": peak_bytes(compiled, _platform(compiled)),
    }
    found = () if params is None or mesh is None else unexpected_gathers(program, params, mesh)
    return Explanation(
        traffic=summarize(program.collectives, None, mesh, 0),
        collectives=program.collectives,
        memory=memory,
        hbm_bytes=program.hbm_bytes,
        loops=program.loops,
        warnings=found,
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
        mesh = _mesh_of(state)
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
    of its batches; traffic, FLOPs and times are of one step.

    Raises:
      ValueError: where the experiment does not fit the target's devices.
    """
    mesh = make_experiment_mesh(experiment, target.devices())
    state = make_abstract_state(experiment, mesh)
    formula = None
    if experiment.flops_per_step is not None:
        formula = (experiment.flops_per_step, experiment.flops_formula)
    return plan_step(
        build_step(experiment, state, mesh),
        state,
        experiment.batch,
        mesh=mesh,
        target=target,
        name=experiment.name,
        flops_formula=formula,
        layers=experiment.stages.stacked.key if experiment.stages else None,
        steps_per_call=experiment.steps_per_call,
        rules=experiment.rules,
    )


def plan_step(
    step: Callable[[PyTree, PyTree], Any],
    state: PyTree,
    batch: PyTree,
    *,
    mesh: Mesh,
    target: Target,
    name: str,
    flops_formula: tuple[float, str] | None = None,
    layers: str | None = None,
    steps_per_call: int = 1,
    rules: Rules | Sequence[Rule] | None = None,
) -> Plan:
    """Like :func:`plan`, for a state that lies on the target's mesh.

    Args:
      step, state, batch, mesh, target, name: what to compile.
      flops_formula: model FLOPs of one step over all devices, and the formula's name.
      layers: the parameters' subtree that is stacked layer by layer.
      steps_per_call: steps that the compiled call runs, each with such a batch.
      rules: as for :func:`jaxtrain.compile_step`.
    """
    called, given = step, batch
    if steps_per_call > 1:
        called, given = scan_steps(step), [batch] * steps_per_call
    with ahead_of_time(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AheadOfTimeWarning)
        shortage, train = 0, None
        try:
            train = compile_step(called, state, given, mesh=mesh, rules=rules)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            shortage = _shortage(str(error), target.chip)
            refusal = str(error).splitlines()[0].strip()
        flops = trace_flops(step, state, batch, mesh, rules)
    notes = list(dict.fromkeys(str(w.message) for w in caught if _is_ours(w)))
    notes += _flops_notes(flops)
    if steps_per_call > 1:
        notes.append(f"memory is of a call of {steps_per_call} steps, with all their batches")
    common = {
        "name": name,
        "target": str(target),
        "device_kind": target.chip.device_kind,
        "devices": mesh.size,
        "hosts": target.hosts,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "flops": flops,
        "flops_formula": flops_formula,
        "peak_flops": _peak(flops, target.chip),
    }
    if train is None:
        return Plan(
            **common,
            fits=False,
            shortage=shortage,
            memory=None,
            traffic=(),
            collectives=(),
            hbm_bytes=None,
            roofline=None,
            compile_seconds=None,
            notes=(*notes, f"the compiler: {refusal}"),
        )
    program, text, unread = _read(train.compiled, mesh)
    program = program.per_step(steps_per_call)
    memory = split_memory(train, state, given, target.chip, program)
    island = target.devices_per_island
    params = getattr(state, "params", None)
    gathers = () if params is None else unexpected_gathers(program, params, mesh, layers=layers)
    return Plan(
        **common,
        fits=memory.fits,
        shortage=0 if memory.fits else memory.needed - memory.limit,
        memory=memory,
        traffic=summarize(program.collectives, target.chip, mesh, island),
        collectives=program.collectives,
        hbm_bytes=None if unread else program.hbm_bytes,
        roofline=None
        if unread
        else make_roofline(
            target.chip,
            mesh,
            flops=flops.by_dtype,
            hbm_bytes=program.hbm_bytes,
            collectives=program.collectives,
            devices_per_island=island,
        ),
        compile_seconds=train.compile_seconds,
        warnings=gathers,
        notes=(*notes, *unread, *_notes(program, memory, target)),
        hlo=text,
    )


def _read(compiled: Any, mesh: Mesh) -> tuple[Program, str, tuple[str, ...]]:
    """The program, its text, and what is to be said where XLA fails to write that down."""
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        note = f"communication and traffic are not known: XLA cannot print the program ({reason})"
        return Program((), 0.0, 0, ()), "", (note,)
    return read_program(text, mesh), text, ()


def split_memory(
    train: CompiledStep,
    state: PyTree,
    batch: PyTree,
    chip: Chip,
    program: Program,
) -> Memory:
    """Divides a compiled step's peak into what it is made of; see :class:`Memory`."""
    shapes = jax.eval_shape(lambda tree: tree, batch)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        train.batch_shardings,
    )
    parts = {"parameters": 0, "optimizer_state": 0, "other_state": local_bytes(state)}
    if isinstance(state, TrainState):
        parts["parameters"] = local_bytes(state.params)
        parts["optimizer_state"] = local_bytes(state.opt_state)
        parts["other_state"] -= parts["parameters"] + parts["optimizer_state"]
    parts["batch"] = local_bytes(placed)
    peak = peak_bytes(train.compiled, chip.kind)
    rest = max(0, peak - sum(parts.values()))
    # Bounded by the rest: what lies in a TPU's fast memory is in the program's text and not here.
    kept = min(rest, program.kept_bytes)
    return Memory(
        **parts,
        activations=kept,
        temporaries=rest - kept,
        program=train.compiled.memory_analysis().generated_code_size_in_bytes,
        peak=peak,
        limit=chip.memory_bytes,
    )


def trace_flops(
    step: Callable[..., Any],
    state: PyTree,
    batch: PyTree,
    mesh: Mesh,
    rules: Rules | Sequence[Rule] | None = None,
) -> Flops:
    """Counts a step's FLOPs as it is traced for a mesh (arguments of ``compile_step``)."""
    with tracing_on(mesh, state, rules):
        return count_flops(step, *jax.eval_shape(lambda *trees: trees, state, batch))


def peak_bytes(compiled: Any, kind: str) -> int:
    """Bytes on one device at the fullest moment of a compiled function."""
    sizes = compiled.memory_analysis()
    if kind != "cpu":
        return sizes.peak_memory_in_bytes
    # The CPU compiler's own figure leaves temporaries out.
    return (
        sizes.argument_size_in_bytes
        + sizes.temp_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
    )


def summarize(
    collectives: tuple[Collective, ...], chip: Chip | None, mesh: Mesh | None, island: int
) -> tuple[Traffic, ...]:
    """Adds up collectives by kind and axes, those that send most first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    rows = []
    for (kind, axes), group in groups.items():
        seconds = None
        if chip is not None and chip.link_bytes_per_s is not None:
            seconds = sum(axis_seconds(c, chip, mesh, devices_per_island=island) for c in group)
        rows.append(
            Traffic(
                kind=kind,
                axes=axes,
                executions=sum(c.executions for c in group),
                smallest=min(c.payload for c in group),
                largest=max(c.payload for c in group),
                payload=sum(c.executions * c.payload for c in group),
                sent=sum(c.executions * c.sent for c in group),
                seconds=seconds,
                conditional=any(c.conditional for c in group),
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


def _mesh_of(state: PyTree) -> Mesh | None:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)


def _platform(compiled: Any) -> str:
    with contextlib.suppress(StopIteration, AttributeError, TypeError):
        sharding = next(iter(jax.tree.leaves(compiled.output_shardings)))
        return next(iter(sharding.device_set)).platform
    return "cpu"


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, AheadOfTimeWarning)


def _peak(flops: Flops, chip: Chip) -> float | None:
    if not flops.by_dtype:
        return None
    return chip.peak_flops(max(flops.by_dtype, key=flops.by_dtype.get))


_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _shortage(message: str, chip: Chip) -> int:
    """Bytes that are missing, as a compiler's message says."""
    size = r"\(?([\d.]+)([BKMGT])\)?"
    if found := re.search(rf"[Ee]xceeded hbm capacity by {size}", message):
        return int(float(found[1]) * _UNITS[found[2]])
    for pattern in (
        rf"{size} exceeds available HBM {size}",
        rf"[Uu]sed {size} of {size} hbm",
    ):
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


def _notes(program: Program, memory: Memory, target: Target) -> list[str]:
    notes = []
    if None in program.loops:
        count = program.loops.count(None)
        notes.append(f"{count} loops of unknown length are counted as one trip")
    if any(c.conditional for c in program.collectives):
        notes.append(
            "collectives in branches (marked ≤) are counted as if every branch were taken on every "
            "trip"
        )
    if target.chip.kind == "gpu" and memory.fits and memory.needed > 0.75 * memory.limit:
        notes.append(
            "JAX takes 75 % of a GPU's memory by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        )
    return notes
