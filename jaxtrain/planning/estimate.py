"""What a step needs, without a compiler: memory of one device, and a prediction of its time.

Memory at the peak is a sum of

- the **state** (parameters, optimizer state, counters) and the **batch**, exact: the shapes and
  shardings of :func:`jaxtrain.abstract_state`, which are what is trained. The state is donated, so
  its new value takes no memory of its own;
- the **working memory**: all else that is alive at once, from a walk over the traced step
  (:mod:`jaxtrain.planning.walk`): casts of parameters, what the forward pass keeps for the backward
  pass (stacked over layers), gathered weights, logits, the working set of a layer, gradients,
  running sums of accumulation, buffers of a pipeline.

The step that is walked is the step that would be compiled, traced over an abstract mesh, so this
holds for any experiment, any optimizer and any loss, and no term is fitted: where compilers differ
is in :data:`QUIRKS`. Against the compilers (jax 0.10.2) it was within 5 % on 15 steps for h100:1x8
and within 14 % on 16 for v5e:2x4: decoders 768 to 4096 wide, over data, fsdp, tensor, pipe, all
rematerialisation but offload, and accumulation. tests/planning/test_aot_search.py holds 15 % on
these.

Time is a roofline: see :class:`Prediction`.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxtrain.experiment import Experiment, build_step, make_abstract_state
from jaxtrain.ops.attention import AheadOfTimeWarning, ahead_of_time
from jaxtrain.parallel.mesh import AXES, check_dcn_data, fill_sizes
from jaxtrain.parallel.pipeline.tables import bubble, make_table, makespan
from jaxtrain.parallel.placement import tracing_on
from jaxtrain.parallel.sharding import Rule, Rules, batch_shardings
from jaxtrain.planning.chips import Chip
from jaxtrain.planning.partition import Cost, Spec
from jaxtrain.planning.roofline import wire_seconds
from jaxtrain.planning.targets import Target
from jaxtrain.planning.walk import CompilerQuirks, walk_step
from jaxtrain.state import TrainState, local_bytes
from jaxtrain.tree import named_leaves

PyTree = Any

# Seen in the programs that the compilers make (jax 0.10.2): for GPUs, loops keep what JAX has moved
# out of them, even where it is one number broadcast, buffers that one branch of a conditional
# updates are copied, gradients of weights come last in a layer's backward pass, and a tanh that
# several read is kept in float32. The TPU compiler does none of this; it rounds in advance what its
# products would round, and pads what kernels read to tiles (jaxtrain.planning.uses).
QUIRKS: Mapping[str, CompilerQuirks] = {
    "tpu": CompilerQuirks(rounds_residuals=True, tiles_kernels=True),
    "gpu": CompilerQuirks(
        keeps_constants=True, copies_branches=True, delays_gradients=True, keeps_costly=True
    ),
    "cpu": CompilerQuirks(keeps_constants=True, copies_branches=True),
}

# Traffic that hides behind compute, where it can: gathering the next weights, summing gradients.
# What goes along the other axes lies between one product and the next.
OVERLAPPED = frozenset(["data", "fsdp"])


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one device needs in one step.

    Args:
      mesh: sizes of mesh axes by name, all of them.
      parameter_bytes, optimizer_bytes, state_bytes: of the state; the last is all of it.
      batch_bytes: of the batch.
      working_bytes: of all else, at its peak.
      cost: products, memory traffic and collectives, on the critical path.
      bubble: the part of a pipeline's time in which a device waits, 0 to 1.
    """

    mesh: Mapping[str, int]
    parameter_bytes: int
    optimizer_bytes: int
    state_bytes: int
    batch_bytes: int
    working_bytes: int
    cost: Cost
    bubble: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Bytes of one device at the step's peak."""
        return self.state_bytes + self.batch_bytes + self.working_bytes


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A prediction of a step's time, from published peaks.

    Products run at the chip's peak, memory traffic at its bandwidth, collectives at that of their
    links. Traffic of :data:`OVERLAPPED` axes hides behind compute and memory; that of the others
    (tensor, pipe) is added to them. All axes share one set of links. In a pipeline all times are
    those of the critical path, bubble and all.

    Args:
      compute_s, hbm_s: seconds of products and of memory traffic.
      wire_s: seconds of collectives by mesh axes.
    """

    compute_s: float
    hbm_s: float
    wire_s: Mapping[str, float]

    @property
    def exposed_s(self) -> float:
        """Collectives that nothing hides."""
        return sum(s for axes, s in self.wire_s.items() if not hides(axes))

    @property
    def hidden_s(self) -> float:
        """Collectives that run beside compute."""
        return sum(s for axes, s in self.wire_s.items() if hides(axes))

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        busy = max(self.compute_s, self.hbm_s) + self.exposed_s
        return max(busy, self.exposed_s + self.hidden_s)

    @property
    def bound(self) -> str:
        """What takes longest: ``"compute"``, ``"HBM"``, or the axes of the longest traffic."""
        parts = {"compute": self.compute_s, "HBM": self.hbm_s}
        if self.hidden_s + self.exposed_s > max(parts.values()):
            return f"{max(self.wire_s, key=self.wire_s.get)} traffic"
        return max(parts, key=parts.get)


def hides(axes: str) -> bool:
    """Whether traffic along these axes (joined by ``+``) overlaps with compute."""
    return set(axes.split("+")) <= OVERLAPPED


def estimate(
    experiment: Experiment, devices: int, *, kind: str = "tpu", traced: Any = None
) -> Estimate:
    """Estimates an experiment's train step on its mesh.

    Args:
      experiment: what would be trained; its data are not touched.
      devices: how many there are.
      kind: whose compiler: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
      traced: what :func:`trace` returned for a like step, see there; None traces this one.

    Returns:
      Bytes of a call, with all its batches, where that is of several steps; all else of one step.

    Raises:
      ValueError: for what does not divide or does not fit together, as the training run would.
    """
    mesh = abstract_mesh(experiment.mesh, devices, kind=kind)
    state = make_abstract_state(experiment, mesh)
    if traced is None:
        traced = trace_step(
            build_step(experiment, state, mesh), state, experiment.batch, mesh, experiment.rules
        )
    estimated = estimate_traced(traced, state, experiment.batch, mesh, experiment.rules, kind=kind)
    if (calls := experiment.steps_per_call) > 1:
        # All batches of a call, and beside them as one stacked array.
        batches = calls * estimated.batch_bytes
        estimated = dataclasses.replace(
            estimated, batch_bytes=batches, working_bytes=estimated.working_bytes + batches
        )
    return estimated if mesh.shape.get("pipe", 1) == 1 else _pipelined(experiment, estimated)


def trace(experiment: Experiment, devices: int, *, kind: str = "tpu") -> Any:
    """Traces an experiment's train step over an abstract mesh of its sizes, for a kind of chip.

    The trace has the same operations on all meshes with the same product of data and fsdp, and the
    same of everything else, and names both in its constraints where both are above 1: then it can
    stand for the others in :func:`estimate`, which reads the sizes from its own mesh. (Not with
    ``zero``, whose layouts depend on the sizes.)

    Raises:
      ValueError: as :func:`estimate`.
    """
    mesh = abstract_mesh(experiment.mesh, devices, kind=kind)
    state = make_abstract_state(experiment, mesh)
    return trace_step(
        build_step(experiment, state, mesh), state, experiment.batch, mesh, experiment.rules
    )


def estimate_step(
    step: Callable[[PyTree, PyTree], Any],
    state: PyTree,
    batch: PyTree,
    mesh: AbstractMesh,
    *,
    kind: str = "tpu",
) -> Estimate:
    """Estimates any step: the arguments of :func:`jaxtrain.compile_step`, as shapes.

    Args:
      step: ``(state, batch) -> (state, anything)``.
      state: shapes with shardings on ``mesh``.
      batch: shapes.
      mesh: from :func:`abstract_mesh` (a mesh of devices has one as ``.abstract_mesh``).
      kind: as in :func:`estimate`.
    """
    return estimate_traced(trace_step(step, state, batch, mesh), state, batch, mesh, kind=kind)


def trace_step(
    step: Callable,
    state: PyTree,
    batch: PyTree,
    mesh: AbstractMesh,
    rules: Rules | Sequence[Rule] | None = None,
) -> Any:
    """The step's jaxpr, with the mesh as its ambient one (as ``compile_step`` traces it)."""
    quiet = warnings.catch_warnings()
    with tracing_on(mesh, state, rules), ahead_of_time(True), quiet:
        # Whoever compiles says it.
        warnings.simplefilter("ignore", AheadOfTimeWarning)
        return jax.make_jaxpr(step)(state, batch)


def estimate_traced(
    traced: Any,
    state: PyTree,
    batch: PyTree,
    mesh: AbstractMesh,
    rules: Rules | Sequence[Rule] | None = None,
    *,
    kind: str,
) -> Estimate:
    """Estimates a traced step; arguments as in :func:`estimate_step` and :func:`trace_step`."""
    split = batch_shardings(batch, mesh, rules)
    batch = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), batch, split
    )
    leaves = jax.tree.leaves(state)
    specs = [_spec(leaf) for leaf in (*leaves, *jax.tree.leaves(batch))]
    train = isinstance(state, TrainState)
    params = state.params if train else state
    cost, working = walk_step(
        traced,
        specs,
        dict(mesh.shape),
        gradient_layouts(params),
        stored=len(leaves),
        quirks=QUIRKS[kind],
    )
    return Estimate(
        mesh=dict(mesh.shape),
        parameter_bytes=local_bytes(params),
        optimizer_bytes=local_bytes(state.opt_state) if train else 0,
        state_bytes=local_bytes(state),
        batch_bytes=local_bytes(batch),
        working_bytes=working,
        cost=cost,
    )


def abstract_mesh(
    sizes: Mapping[str, int], devices: int, *, kind: str | None = None
) -> AbstractMesh:
    """Makes the mesh that :func:`jaxtrain.make_mesh` would, without devices.

    Args:
      sizes: of mesh axes, by name.
      devices: how many there are.
      kind: ``"tpu"``, ``"gpu"`` or ``"cpu"``: what is traced on the mesh takes the forms that it
        takes there; None takes those of JAX's default backend.

    Raises:
      ValueError: where the sizes do not multiply to the number of devices, or ``dcn_data`` does not
        divide the data axis.

    >>> abstract_mesh({"data": -1, "tensor": 2}, 8).shape["data"]
    4
    """
    sizes = dict(sizes)
    dcn_data = sizes.pop("dcn_data", 1)
    filled = fill_sizes(dict.fromkeys(AXES, 1) | sizes, devices)
    check_dcn_data(filled["data"], dcn_data)
    shape = tuple(filled[axis] for axis in AXES)
    device = AbstractDevice(kind, num_cores=None, platform=kind) if kind else None
    return AbstractMesh(
        shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device
    )


def state_bytes(experiment: Experiment, devices: int) -> int:
    """Bytes of the state alone on one device, exact; at the cost of shapes."""
    return local_bytes(make_abstract_state(experiment, abstract_mesh(experiment.mesh, devices)))


def predict(estimated: Estimate, target: Target, *, peak_of: Chip | None = None) -> Prediction:
    """Predicts the time of a step.

    Args:
      estimated: of the same number of devices.
      target: what it would run on.
      peak_of: whose peaks count; the target's own by default.

    Raises:
      ValueError: for a chip whose peaks are not known (simulated devices).
    """
    chip = peak_of or target.chip
    if chip.hbm_bytes_per_s is None or chip.link_bytes_per_s is None:
        raise ValueError(
            f"there is no time to predict for {chip.name!r}: its peaks are not known; give a TPU "
            "or GPU target"
        )
    cost = estimated.cost
    compute = 0.0
    for dtype, flops in cost.flops.items():
        # A dtype without a figure of its own (float64 on TPU) is taken at float32's.
        compute += flops / (chip.peak_flops(dtype) or chip.flops["float32"])
    wire: dict[str, float] = {}
    for (kind, axes), size in cost.wire_bytes.items():
        name = "+".join(axes)
        group = math.prod(estimated.mesh[axis] for axis in axes)
        inside = within_island(axes, estimated.mesh, target.devices_per_island)
        seconds = wire_seconds(
            size, chip, group=group, islands=group // inside, permutes=kind == "ppermute"
        )
        wire[name] = wire.get(name, 0.0) + seconds
    return Prediction(compute, cost.hbm_bytes / chip.hbm_bytes_per_s, wire)


def within_island(axes: tuple[str, ...], mesh: Mapping[str, int], island: int) -> int:
    """How many devices of a group along mesh axes are in one island.

    Devices are numbered along the axes in the order of :data:`jaxtrain.parallel.mesh.AXES`, the
    last running fastest, and an island holds consecutive ones.

    >>> within_island(("tensor",), {"data": 4, "tensor": 4}, 8)
    4
    >>> within_island(("data",), {"data": 4, "tensor": 4}, 8)
    2
    """
    inside, stride = 1, 1
    for axis in reversed([a for a in AXES if a in mesh]):
        if axis in axes:
            inside *= max(1, min(mesh[axis], island // stride))
        stride *= mesh[axis]
    return inside


def gradient_layouts(params: PyTree) -> dict[tuple[int, ...], Spec]:
    """How a gradient lies by its shape: as its parameter, or as one layer of it, or transposed."""
    layouts: dict[tuple[int, ...], Spec] = {}
    for leaf in named_leaves(params).values():
        shape, spec = tuple(leaf.shape), _spec(leaf)
        for n, axes in ((shape, spec), (shape[1:], spec[1:])):
            if len(n) > 1:
                layouts.setdefault(n, axes)
                layouts.setdefault(n[::-1], axes[::-1])
    return layouts


def _pipelined(experiment: Experiment, estimated: Estimate) -> Estimate:
    """Takes ticks that hold half a unit, or none, as long as they last.

    The walk counts a forward and a backward unit in every tick; a tick of the warm-up has one.
    """
    options = experiment.pipeline
    table = make_table(
        options.get("schedule", "1f1b"),
        stages=estimated.mesh["pipe"],
        microbatches=options["microbatches"],
        virtual=options.get("virtual", 1),
    )
    times = {"forward": 1.0, "backward": 3.0 if options.get("remat", "full") == "full" else 2.0}
    full = table.ticks * sum(times.values()) / table.virtual
    scaled = Cost()
    scaled.add(estimated.cost, makespan(table, **times) / full)
    return dataclasses.replace(estimated, cost=scaled, bubble=bubble(table, **times))


def _spec(leaf: Any) -> Spec:
    entries = list(leaf.sharding.spec) + [None] * (leaf.ndim - len(leaf.sharding.spec))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
