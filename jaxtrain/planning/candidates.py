"""The layouts that a search looks at: meshes, microbatches, what is kept, and where it lies."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.layout import flag_of
from jaxtrain.ops import remat as rematerialisation
from jaxtrain.planning.roofline import slow_of
from jaxtrain.planning.targets import Target
from jaxtrain.sharding.mesh import AXES as MESH_AXES
from jaxtrain.sharding.mesh import SLOW_AXES

AXES = ("data", "fsdp", "tensor", "pipe")

# Least work first: the order in which they are tried until one fits. Offloading is left to who asks
# for it: the traffic to the host's memory is not in the estimate.
REMAT = tuple(name for name in rematerialisation.REMAT if name != "offload")

# Schedules of a pipeline, and into how many chunks a device's layers are cut. GPipe is left to who
# asks for it: it takes no less time than 1F1B in any table, and holds as many inputs or more.
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One layout.

    Args:
      mesh: sizes of the axes; where it matters which of them cross the
        slow network, ``dcn_data`` and the like too (:func:`make_placements`).
      microbatches: per step: ``accumulate``, or those of the pipeline.
      remat: of the blocks; None where the model has no such choice.
      stage_remat: of a pipeline's stages; None without a pipeline.
      gather: when weights are gathered, "layer" or "step"; None leaves it to the config.
      sequence_parallel: whether the residual stream is split over tensor; None leaves it likewise.
      schedule, virtual: of a pipeline; None leaves them likewise.
    """

    mesh: Mapping[str, int]
    microbatches: int = 1
    remat: str | None = None
    stage_remat: str | None = None
    gather: str | None = None
    sequence_parallel: bool | None = None
    schedule: str | None = None
    virtual: int | None = None

    @property
    def mesh_name(self) -> str:
        """Axes above 1."""
        named = " ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)
        return named or "1 device"

    @property
    def remat_name(self) -> str:
        """Both choices in words, and whether the stream that a block keeps is whole."""
        name = "stage" if self.stage_remat == "full" else self.remat or "-"
        return f"{name}, whole" if self.sequence_parallel is False else name

    @property
    def microbatches_name(self) -> str:
        """Number of microbatches, followed by " x V" in a pipeline of V > 1 chunks per device."""
        chunks = f" x {self.virtual}" if (self.virtual or 1) > 1 else ""
        return f"{self.microbatches}{chunks}"

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of a :class:`jaxtrain.Layout` that this candidate sets: values by path."""
        changes: dict[str, Any] = {f"mesh.{axis}": size for axis, size in self.mesh.items()}
        changes["accumulate"] = 1 if self.stage_remat else self.microbatches
        if self.stage_remat is not None:
            changes["pipeline.microbatches"] = self.microbatches
            changes["pipeline.remat"] = self.stage_remat
            if self.schedule is not None:
                changes["pipeline.schedule"] = self.schedule
                changes["pipeline.virtual"] = self.virtual
        for name in ("remat", "gather", "sequence_parallel"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        return changes

    @property
    def flags(self) -> list[str]:
        """Flags to type after the experiment's name to train this layout."""
        return [flag_of(path, value) for path, value in self.changes.items()]


def make_meshes(devices: int, *, stages: bool) -> Iterator[dict[str, int]]:
    """All meshes of so many devices; of a model without stages, those without an axis pipe."""
    axes = [axis for axis in AXES if stages or axis != "pipe"]
    for sizes in factorizations(devices, len(axes)):
        yield dict(zip(axes, sizes, strict=True))


def make_placements(config: Any, mesh: Mapping[str, int], target: Target) -> list[dict[str, int]]:
    """The ways to lay a mesh over the slices of a TPU, or the hosts of other chips.

    That is, into how many parts each axis that may cross the slow network is cut by it, so that
    there is a part for each slice or host; or those that the config itself says. On hosts devices
    may also follow each other in the mesh's order, which needs no flag.

    Returns:
      Parts by the names that :func:`jaxtrain.make_mesh` has for them, such as ``{"dcn_data": 2}``;
      none where no axes divide so.
    """
    sizes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    if given := given_parts(config):
        ways = [given]
    else:
        names = [f"dcn_{axis}" for axis in SLOW_AXES]
        ways = [
            {name: n for name, n in zip(names, parts, strict=True) if n > 1}
            for parts in factorizations(target.islands, len(names))
        ]

    def slow(parts: Mapping[str, int]) -> dict[str, int]:
        return {axis: parts.get(f"dcn_{axis}", 1) for axis in sizes}

    ways = [x for x in ways if all(sizes[axis] % n == 0 for axis, n in slow(x).items())]
    if given or target.slices > 1:
        return ways
    in_order = slow_of(sizes, target.devices_per_island)
    return [{}, *(x for x in ways if slow(x) != in_order)]


def within_one_network(config: Any) -> Any:
    """The config without parts across the slow network."""
    alone = {f"mesh.{name}": 1 for name in given_parts(config)}
    return dataclasses.replace(config, layout=config.layout.with_(alone))


def given_parts(config: Any) -> dict[str, int]:
    """The parts across the slow network that a config's mesh has above 1, by their names."""
    sizes = config.layout.mesh.sizes.items()
    return {name: n for name, n in sizes if name.startswith("dcn_") and n > 1}


def factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many, in their order.

    >>> list(factorizations(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if factors == 0 and number == 1:
        yield ()
    if factors == 0:
        return
    for first in range(1, number + 1) if factors > 1 else [number]:
        if number % first == 0:
            yield from ((first, *rest) for rest in factorizations(number // first, factors - 1))


def make_candidates(
    config: Any,
    mesh: Mapping[str, int],
    *,
    stages: bool = True,
    gathers: Sequence[str] = (),
    schedules: Sequence[tuple[str | None, int | None]] = ((None, None),),
) -> Iterator[Candidate]:
    """The layouts of one mesh: rematerialisation from none to full, microbatches from few to many.

    Microbatches are powers of two times the fewest: 1, or one per stage of a pipeline. The residual
    stream is split over tensor before it is whole, unless the config has it whole.

    Args:
      config, mesh: the experiment's, and the sizes of its axes.
      stages: whether its model is made of stages, whose layers may keep less.
      gathers: when weights that fsdp splits may be gathered; none leaves it to the config.
      schedules: of a pipeline, each with its chunks (:func:`open_schedules`).
    """
    rows = getattr(config, "global_batch", 1)
    most = max(1, rows // (mesh.get("data", 1) * mesh.get("fsdp", 1)))
    pipe = mesh.get("pipe", 1)
    choices = REMAT if stages else [None]
    kinds = [(remat, None) for remat in choices]
    if pipe > 1:
        # A stage that is run again has no use for blocks that are, too.
        inner = [(remat, "none") for remat in choices if remat != "full"]
        kinds = [*inner, (choices[0], "full")]
    counts = [pipe * 2**n for n in range(30) if pipe * 2**n <= most] or [pipe]
    splits = [None]
    if mesh.get("tensor", 1) > 1 and stages and config.layout.sequence_parallel:
        splits = [True, False]
    gathers = gathers if mesh.get("fsdp", 1) > 1 and gathers else [None]
    schedules = schedules if pipe > 1 else [(None, None)]
    for way in itertools.product(splits, gathers, schedules, kinds, counts):
        split, gather, (schedule, virtual), (remat, stage_remat), count = way
        own = (mesh, count, remat, stage_remat, gather, split)
        yield Candidate(*own, schedule, virtual)


def open_schedules(
    config: Any, typed: Collection[str] = ()
) -> Sequence[tuple[str | None, int | None]]:
    """The schedules and chunks that the search may vary: all, except what a flag in ``typed`` or a
    field that differs from its default fixes."""
    options = config.layout.pipeline
    own, usual = ((x.schedule, x.virtual) for x in (options, type(options)()))
    names = ("pipeline.schedule", "pipeline.virtual")
    said = [x in typed or a != b for x, a, b in zip(names, own, usual, strict=True)]
    fitting = [
        pair
        for pair in SCHEDULES
        if all(a == b for a, b, fixed in zip(pair, own, said, strict=True) if fixed)
    ]
    return tuple(fitting) or (own,)


def with_candidate(config: Any, candidate: Candidate) -> Any:
    """Returns the config that trains a layout."""
    return dataclasses.replace(config, layout=config.layout.with_(candidate.changes))
