"""Estimates a step without a compiler: memory of one device, and the work that takes its time.

Memory at the peak is a sum of

- the **state** (parameters, optimizer state, counters) and the **batch**, exact: the shapes and
  shardings of :func:`jaxtrain.abstract_state`, which are what is trained. The state is donated, so
  its new value takes no memory of its own;
- the **working memory**: all else that is alive at once, from a walk over the traced step
  (:mod:`jaxtrain.planning.walk`): casts of parameters, what the forward pass keeps for the backward
  pass (stacked over layers), gathered weights, logits, the working set of a layer, gradients,
  running sums of accumulation, buffers of a pipeline.

The step that is walked is the step that would be compiled, traced over an abstract mesh, so this
holds for any experiment, any optimizer and any loss, and no term is fitted to a compiler.
tests/planning/test_aot_search.py holds it to 15 % of the TPU and the GPU compiler's figure on 31
steps (jax 0.10.2): decoders 768 to 4096 wide, over data, fsdp, tensor, pipe, all rematerialisation
but offload, and accumulation.
"""

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxtrain.build import build_step, make_abstract_state
from jaxtrain.compile import CompiledStep
from jaxtrain.engines.pipeline.balance import Weights, weigh
from jaxtrain.engines.pipeline.entering import layers_of_stages
from jaxtrain.engines.pipeline.tables import bubble, make_table, makespan
from jaxtrain.experiment import Experiment
from jaxtrain.layout import MeshShape
from jaxtrain.ops.attention import AheadOfTimeWarning, ahead_of_time
from jaxtrain.optim.rows import tables_by_rows
from jaxtrain.planning.by_layer import kept_by_part
from jaxtrain.planning.partition import Cost, Spec, spec_of
from jaxtrain.planning.roofline import Prediction, crossing_bytes, slow_of, wire_seconds
from jaxtrain.planning.targets import Target
from jaxtrain.planning.walk import walk_step
from jaxtrain.precision import PrecisionWarning
from jaxtrain.sharding.mesh import AXES, SLOW_AXES, check_slow, fill_sizes, slow_parts
from jaxtrain.sharding.placement import UnevenWarning, tracing_on
from jaxtrain.sharding.rules import Rule, Rules, batch_shardings
from jaxtrain.state import TrainState, local_bytes, shapes_on
from jaxtrain.tree import PyTree, named_leaves, owner_of, partition

# Warnings of a trace, which a plan prints as notes.
TRACE_WARNINGS = (AheadOfTimeWarning, UnevenWarning, PrecisionWarning)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and work of one device in one step.

    Args:
      mesh: sizes of mesh axes by name, all of them.
      state_bytes: bytes of parameters, optimizer state and the rest of the state.
      working_bytes: bytes of all else, at its peak.
      kept: bytes of it that loops over layers stack for the backward pass, by part of the model.
      cost: products, memory traffic and collectives, on the critical path.
      bubble: the part of a pipeline's time in which a device waits, 0 to 1.
      slow: number of slices (or hosts) that each axis spans; None for devices that are numbered
        along the mesh, the last axis running fastest.
    """

    mesh: Mapping[str, int]
    state_bytes: int
    batch_bytes: int
    working_bytes: int
    kept: Mapping[str, int]
    cost: Cost
    bubble: float = 0.0
    slow: Mapping[str, int] | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of ``kept``, of all parts."""
        return sum(self.kept.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of one device at the step's peak."""
        return self.state_bytes + self.batch_bytes + self.working_bytes


def estimate(
    experiment: Experiment,
    devices: int,
    *,
    kind: str = "tpu",
    state: TrainState | None = None,
    traced: Any = None,
) -> Estimate:
    """Estimates an experiment's train step on its mesh, without touching its data.

    It runs on so many devices of a kind: ``"tpu"``, ``"gpu"`` or ``"cpu"``. Returns bytes of a
    call, with all its batches, where that is of several steps; all else of one step. Raises
    ValueError for what does not divide or does not fit together, as the training run would.

    Args:
      state: its shapes on the abstract mesh; None makes them.
      traced: what :func:`trace` returned for a like step, see there; None traces this one.
    """
    state = abstract_state(experiment, devices, kind=kind) if state is None else state
    if traced is None:
        traced = trace(experiment, devices, kind=kind, state=state)
    mesh = state.step.sharding.mesh
    estimated = estimate_traced(
        traced, state, experiment.data.batch, mesh, experiment.laid.rules, kind=kind
    )
    estimated = placed(estimated, experiment.layout.mesh)
    if (calls := experiment.layout.steps_per_call) > 1:
        # All batches of a call, and beside them as one stacked array.
        batches = calls * estimated.batch_bytes
        estimated = dataclasses.replace(
            estimated, batch_bytes=batches, working_bytes=estimated.working_bytes + batches
        )
    return on_critical_path(estimated, experiment, state.params)


def placed(estimated: Estimate, mesh: MeshShape) -> Estimate:
    """An estimate where the mesh lies over slices or hosts as ``dcn_data`` and the like say."""
    return dataclasses.replace(estimated, slow=mesh.slow if mesh.islands > 1 else None)


def trace(
    experiment: Experiment,
    devices: int,
    *,
    kind: str = "tpu",
    state: TrainState | None = None,
    final: bool = False,
) -> Any:
    """Traces an experiment's train step over an abstract mesh of its sizes, for a kind of chip.

    The trace has the same operations on all meshes with the same product of data and fsdp, and the
    same of everything else, and names both in its constraints where both are above 1: then it can
    stand for the others in :func:`estimate`, which reads the sizes from its own mesh. (Not with
    ``zero``, whose layouts depend on the sizes.) Raises ValueError as :func:`estimate`.

    Args:
      final: traces what is compiled for this mesh, and may be right for no other: gradients
        are reduced, and weights gathered, once per step.
    """
    state = abstract_state(experiment, devices, kind=kind) if state is None else state
    mesh = state.step.sharding.mesh
    step = build_step(experiment, state, mesh)
    return trace_step(step, state, experiment.data.batch, mesh, experiment.laid.rules, final=final)


def abstract_state(experiment: Experiment, devices: int, *, kind: str = "tpu") -> TrainState:
    """The shapes of an experiment's state, with shardings on an abstract mesh."""
    return make_abstract_state(
        experiment, abstract_mesh(experiment.layout.mesh.sizes, devices, kind=kind)
    )


def trace_step(
    step: Callable,
    state: PyTree,
    batch: PyTree,
    mesh: AbstractMesh | jax.sharding.Mesh,
    rules: Rules | Sequence[Rule] | None = None,
    *,
    final: bool = False,
) -> Any:
    """The step's jaxpr, with the mesh as its ambient one (as ``compile_step`` traces it)."""
    final = True if final else None
    with (
        tracing_on(mesh, state, rules, final=final),
        ahead_of_time("traced"),
        warnings.catch_warnings(),
    ):
        # Whoever compiles says it.
        for category in TRACE_WARNINGS:
            warnings.simplefilter("ignore", category)
        return jax.make_jaxpr(step)(*jax.eval_shape(lambda *trees: trees, state, batch))


def estimate_traced(
    traced: Any,
    state: PyTree,
    batch: PyTree,
    mesh: AbstractMesh | jax.sharding.Mesh,
    rules: Rules | Sequence[Rule] | None = None,
    *,
    kind: str = "tpu",
) -> Estimate:
    """Estimates a step that :func:`trace_step` has traced, by the arguments of
    :func:`jaxtrain.compile_step`, as shapes; the mesh is one of devices, or :func:`abstract_mesh`.
    """
    batch = shapes_on(batch, batch_shardings(batch, mesh, rules))
    return _estimate(traced, state, batch, mesh, kind)


def estimate_compiled(train: CompiledStep, *, steps: int = 1) -> Estimate:
    """Estimates one step of a compiled program of so many steps, which was compiled on a mesh."""
    state, batch = train.arguments
    mesh = jax.tree.leaves(train.batch_shardings)[0].mesh
    found = _estimate(train.jaxpr, state, batch, mesh, mesh.devices.flat[0].platform)
    cost = Cost()
    cost.add(found.cost, 1 / steps)
    return dataclasses.replace(found, cost=cost, slow=slow_parts(mesh))


def _estimate(traced: Any, state: PyTree, batch: PyTree, mesh: Any, kind: str) -> Estimate:
    leaves = jax.tree.leaves(state)
    specs = [spec_of(leaf) for leaf in (*leaves, *jax.tree.leaves(batch))]
    params = state.params if isinstance(state, TrainState) else state
    sizes = dict(mesh.shape)
    cost, working, kept = walk_step(
        traced,
        specs,
        sizes,
        gradient_layouts(params),
        stored=len(leaves),
        rounds=kind == "tpu",
    )
    # The update reads and writes the state, and reads the gradients; of tables, rows alone.
    tables = tables_by_rows(getattr(state, "opt_state", ())) or ()
    whole = lambda tree: partition(lambda name, _: owner_of(name, tables) is None, tree)[0]  # noqa: E731
    cost.other_bytes += 2 * local_bytes(whole(state)) + local_bytes(whole(params))
    return Estimate(
        mesh=sizes,
        state_bytes=local_bytes(state),
        batch_bytes=local_bytes(batch),
        working_bytes=working,
        kept=kept_by_part(kept),
        cost=cost,
    )


def abstract_mesh(
    sizes: Mapping[str, int], devices: int, *, kind: str | None = None
) -> AbstractMesh:
    """Makes the mesh that :func:`jaxtrain.make_mesh` would, without devices.

    What is traced on it takes the forms that it takes on chips of that kind, ``"tpu"``, ``"gpu"``
    or ``"cpu"``; None takes those of JAX's default backend. Raises ValueError where the sizes do
    not multiply to the number of devices, or ``dcn_data`` (or that of another axis) does not divide
    its axis.

    >>> abstract_mesh({"data": -1, "tensor": 2}, 8).shape["data"]
    4
    """
    sizes = dict(sizes)
    slow = {axis: sizes.pop(f"dcn_{axis}", 1) for axis in SLOW_AXES}
    filled = fill_sizes(dict.fromkeys(AXES, 1) | sizes, devices)
    check_slow(filled, slow)
    shape = tuple(filled[axis] for axis in AXES)
    device = AbstractDevice(kind, num_cores=None, platform=kind) if kind else None
    return AbstractMesh(
        shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device
    )


def predict(
    estimated: Estimate, target: Target, wires: Mapping[tuple, tuple[float, ...]] | None = None
) -> Prediction | None:
    """Predicts the time of a step (:mod:`.roofline`); None where the chip's peaks are not known.

    ``wires`` are the bytes that one device sends by a compiled program, those of them that cross
    the slow network, and the number of collectives, by kind and axes, in place of what the estimate
    says.
    """
    chip, cost = target.chip, estimated.cost
    if chip.hbm_bytes_per_s is None:
        return None
    compute = least = heat = 0.0
    for (kind, dtype), count in cost.flops.items():
        # A dtype without a figure of its own (float64 on TPU) is taken at float32's.
        rate = chip.peak_flops(dtype) or chip.flops["float32"]
        seconds = count / rate
        compute += seconds / chip.efficiency[kind]
        heat += cost.hot_flops[kind, dtype] / rate / chip.efficiency[kind]
        # A kernel skips the tiles that a mask leaves out, which are counted: almost half of them.
        least += seconds / (2 if kind == "attention" else 1)
    memory = chip.hbm_bytes_per_s * chip.efficiency["memory"]
    if wires is None:
        slow = estimated.slow or slow_of(estimated.mesh, target.devices_per_island)
        wires = {
            key: (sent, crossing_bytes(*key, sent, estimated.mesh, slow), cost.wire_times[key])
            for key, sent in cost.wire_bytes.items()
        }
    interconnect, network = collections.Counter(), collections.Counter()
    for (kind, axes), (sent, crossing, times) in wires.items():
        ring = target.ring(math.prod(estimated.mesh.get(axis, 1) for axis in axes))
        fast, slow_seconds = wire_seconds(kind, sent, crossing, chip, times, ring)
        interconnect["+".join(axes)] += fast
        network["+".join(axes)] += slow_seconds
    products, rest = cost.product_bytes / memory, cost.other_bytes / memory
    interconnect, network = ({a: s for a, s in x.items() if s} for x in (interconnect, network))
    return Prediction(compute, products, rest, interconnect, least, network, heat=heat)


def gradient_layouts(params: PyTree) -> dict[tuple[int, ...], Spec]:
    """Maps gradient shapes to specs: of a parameter, of a layer of it, or of either transposed."""
    layouts: dict[tuple[int, ...], Spec] = {}
    for leaf in named_leaves(params).values():
        shape, spec = tuple(leaf.shape), spec_of(leaf)
        for n, axes in ((shape, spec), (shape[1:], spec[1:])):
            if len(n) > 1:
                layouts.setdefault(n, axes)
                layouts.setdefault(n[::-1], axes[::-1])
    return layouts


def on_critical_path(estimated: Estimate, experiment: Experiment, params: PyTree) -> Estimate:
    """Takes ticks of a pipeline for as long as their slowest device has work.

    The walk counts a forward and a backward unit in every tick, of the most layers that a stage has
    and with the loss; a tick of the warm-up has one of them, and the last stage alone the loss.
    """
    pipeline, devices = experiment.layout.pipeline, estimated.mesh.get("pipe", 1)
    if devices == 1:
        return estimated
    stages = experiment.laid.stages
    table = make_table(
        pipeline.schedule,
        stages=devices,
        microbatches=pipeline.microbatches,
        virtual=stages.stacked.virtual * len(stages.blocks),
    )
    recompute = pipeline.remat == "full"
    if len(stages.blocks) == 1:
        weights = weigh(experiment.task.stages, experiment.task.init_fn, experiment.data.batch)
    else:  # all layers alike, and nothing around them
        weights = Weights(embed=(0.0, 0.0), layer=(1.0, 3.0), head=(0.0, 0.0))
    counts = layers_of_stages(stages, params, devices=devices)
    forward, backward = weights.of_stages(counts, recompute=recompute)
    most = weights.of_stages([max(counts)] * len(counts), recompute=recompute)
    walked = table.ticks * float(sum(unit.max() for unit in most))
    scaled = Cost()
    scaled.add(estimated.cost, makespan(table, forward=forward, backward=backward) / walked)
    bubbles = bubble(table, forward=forward, backward=backward)
    return dataclasses.replace(estimated, cost=scaled, bubble=bubbles)
