"""The layouts that a search looks at: meshes, microbatches, what is kept, and where it lies."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxtrain.layout import Layout, MeshShape, PipelineLayout
from jaxtrain.ops import remat as rematerialisation
from jaxtrain.planning.roofline import slow_of
from jaxtrain.planning.targets import Target
from jaxtrain.sharding.mesh import AXES as MESH_AXES
from jaxtrain.sharding.mesh import BATCH_AXES, SLOW_AXES

AXES = ("data", "fsdp", "tensor", "pipe", "context", "expert")

# Least work first: the order in which they are tried until one fits. Offloading is left to who asks
# for it: the traffic to the host's memory is not in the estimate.
REMAT = tuple(name for name in rematerialisation.REMAT if name != "offload")

# Schedules of a pipeline, and into how many chunks a device's layers are cut. GPipe is left to who
# asks for it: it takes no less time than 1F1B in any table, and holds as many inputs or more.
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))


def make_meshes(devices: int, *, stages: bool, experts: bool = False) -> Iterator[MeshShape]:
    """All meshes of so many devices; of a model without stages, those without an axis that splits
    layers or positions, and of one without experts, those without theirs."""
    axes = AXES if experts else AXES[:-1]
    for sizes in factorizations(devices, len(axes)):
        mesh = MeshShape(**dict(zip(axes, sizes, strict=True)))
        if stages or mesh.pipe == mesh.context == 1:
            yield mesh


def batch_parts(mesh: MeshShape) -> int:
    """Into how many parts a mesh splits the batch."""
    return math.prod(mesh.axes[axis] for axis in BATCH_AXES)


def make_placements(given: MeshShape, mesh: MeshShape, target: Target) -> list[MeshShape]:
    """The ways to lay a mesh over the slices of a TPU, or the hosts of other chips.

    That is, into how many parts each axis that may cross the slow network is cut by it, so that
    there is a part for each slice or host; or the parts of ``given``, where it has any. On hosts
    devices may also follow each other in the mesh's order, which needs no flag. Returns the mesh
    with its parts; none where no axes divide so.
    """
    names = [f"dcn_{axis}" for axis in SLOW_AXES]
    if own := parts_of(given):
        ways = [own]
    else:
        found = factorizations(target.islands, len(names))
        ways = [dict(zip(names, parts, strict=True)) for parts in found]
    placed = [
        dataclasses.replace(mesh, **parts)
        for parts in ways
        if all(mesh.axes[axis] % parts.get(f"dcn_{axis}", 1) == 0 for axis in SLOW_AXES)
    ]
    if own or target.slices > 1:
        return placed
    in_order = slow_of({axis: mesh.axes[axis] for axis in MESH_AXES}, target.devices_per_island)
    return [mesh, *(way for way in placed if way.slow != in_order)]


def parts_of(mesh: MeshShape) -> dict[str, int]:
    """The parts across the slow network that a mesh has above 1, by the names of their fields."""
    return {name: n for name, n in mesh.sizes.items() if name.startswith("dcn_") and n > 1}


def name_of(mesh: MeshShape) -> str:
    """Axes above 1.

    >>> name_of(MeshShape(data=4, fsdp=2, dcn_data=2))
    'data=4 fsdp=2 dcn_data=2'
    """
    named = " ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1)
    return named or "1 device"


def factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many, in their order.

    >>> list(factorizations(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    ways = itertools.product(divisors, repeat=factors)
    return (way for way in ways if math.prod(way) == number)


def make_candidates(
    config: Any,
    mesh: MeshShape,
    *,
    stages: bool = True,
    gathers: Sequence[str] = (),
    schedules: Sequence[tuple[str, int]] = (),
) -> Iterator[Layout]:
    """The layouts of one mesh: rematerialisation from none to full, microbatches from few to many.

    Microbatches are powers of two times the fewest: 1, or one per stage of a pipeline. The residual
    stream is split over tensor before it is whole, unless the config has it whole.

    Args:
      stages: whether its model is made of stages, whose layers may keep less.
      gathers: when weights that fsdp splits may be gathered; none leaves it to the config.
      schedules: of a pipeline, each with its chunks (:func:`open_schedules`); none leaves it so.
    """
    rows = getattr(config, "global_batch", 1)
    most = max(1, rows // batch_parts(mesh))
    base = dataclasses.replace(config.layout, mesh=mesh, accumulate=1)
    choices = [x for x in REMAT if x != "none" or not base.offload_parameters]
    choices = choices if stages else [base.remat]
    kinds = [{"remat": remat} for remat in choices]
    if mesh.pipe > 1:
        # A stage that is run again has no use for blocks that are, too.
        inner = [{"remat": x, "pipeline.remat": "none"} for x in choices if x != "full"]
        kinds = [*inner, {"remat": choices[0], "pipeline.remat": "full"}]
    counts = [mesh.pipe * 2**n for n in range(30) if mesh.pipe * 2**n <= most] or [mesh.pipe]
    count_of = "pipeline.microbatches" if mesh.pipe > 1 else "accumulate"
    splits = [base.sequence_parallel]
    if mesh.tensor > 1 and stages and base.sequence_parallel:
        splits = [True, False]
    gathers = gathers if mesh.fsdp > 1 and gathers else [base.gather]
    own = [(base.pipeline.schedule, base.pipeline.virtual)]
    schedules = schedules if mesh.pipe > 1 and schedules else own
    for way in itertools.product(splits, gathers, schedules, kinds, counts):
        split, gather, (schedule, virtual), kind, count = way
        changes = {"sequence_parallel": split, "gather": gather, count_of: count}
        changes |= {"pipeline.schedule": schedule, "pipeline.virtual": virtual}
        yield base.with_(changes | kind)


def open_schedules(pipeline: PipelineLayout, typed: Collection[str] = ()) -> list[tuple[str, int]]:
    """The schedules and chunks that the search may vary: all, except what a flag in ``typed`` or a
    field that differs from its default fixes."""
    own, usual = ((x.schedule, x.virtual) for x in (pipeline, PipelineLayout()))
    names = ("pipeline.schedule", "pipeline.virtual")
    said = [x in typed or a != b for x, a, b in zip(names, own, usual, strict=True)]
    fitting = [
        pair
        for pair in SCHEDULES
        if all(a == b for a, b, fixed in zip(pair, own, said, strict=True) if fixed)
    ]
    return fitting or [own]
