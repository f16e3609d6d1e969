"""How long a step takes at least, by what the chip can do: compute, memory, interconnect per axis.

Every part is the work over the chip's published peak; nothing reaches its peak, so each is a bound.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from jaxtrain.parallel.mesh import slice_of
from jaxtrain.planning.chips import Chip
from jaxtrain.planning.groups import UNKNOWN
from jaxtrain.planning.hlo import Collective


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds per step of one device, None where a peak is not known.

    Args:
      compute: products, at the peak of their operands' dtype.
      hbm: memory traffic, at the memory's bandwidth.
      interconnect: collectives, by mesh axes, at the links' bandwidth (see :func:`axis_seconds`).
    """

    compute: float | None
    hbm: float | None
    interconnect: Mapping[str, float | None]

    @property
    def parts(self) -> dict[str, float]:
        """What is known, by name."""
        named = {"compute": self.compute, "HBM": self.hbm}
        named |= {f"interconnect {axes}": s for axes, s in self.interconnect.items()}
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    @property
    def known(self) -> bool:
        """Whether every part is."""
        return None not in (self.compute, self.hbm, *self.interconnect.values())

    @property
    def communication(self) -> float | None:
        """Interconnect time, one axis after the other."""
        return sum(self.interconnect.values()) if self.known else None

    @property
    def step_seconds(self) -> float | None:
        """If compute, memory and communication overlap in full: the longest of the three."""
        return max(self.compute, self.hbm, self.communication) if self.known else None

    @property
    def step_seconds_apart(self) -> float | None:
        """If no communication overlaps with anything."""
        return max(self.compute, self.hbm) + self.communication if self.known else None

    @property
    def bound(self) -> str | None:
        """Which part bounds: the longest of compute, HBM, and all communication together."""
        if not self.known:
            return None
        sums = {"compute": self.compute, "HBM": self.hbm, "interconnect": self.communication}
        return max(sums, key=sums.get)


def make_roofline(
    chip: Chip,
    mesh: Mesh,
    *,
    flops: Mapping[str, float],
    hbm_bytes: float,
    collectives: Sequence[Collective],
    devices_per_island: int,
) -> Roofline:
    """Divides work by peaks.

    Args:
      chip: the peaks.
      mesh: what the collectives go along.
      flops: of the whole step over all devices, by dtype; taken to be divided evenly.
      hbm_bytes: of one device.
      collectives: of one device.
      devices_per_island: devices that reach each other by links, consecutive in the mesh's own
        numbering of hosts or slices.
    """
    peaks = {dtype: chip.peak_flops(dtype) for dtype in flops}
    compute = None
    if None not in peaks.values():
        compute = sum(flops[d] / mesh.size / peaks[d] for d in flops)
    axes: dict[str, float | None] = {}
    for collective in collectives:
        name = " + ".join(collective.axes)
        seconds = axis_seconds(collective, chip, mesh, devices_per_island=devices_per_island)
        before = axes.get(name, 0.0)
        axes[name] = None if None in (seconds, before) else before + seconds
    hbm = None if chip.hbm_bytes_per_s is None else hbm_bytes / chip.hbm_bytes_per_s
    return Roofline(compute=compute, hbm=hbm, interconnect=axes)


def axis_seconds(
    collective: Collective, chip: Chip, mesh: Mesh, *, devices_per_island: int
) -> float | None:
    """Seconds of all executions of a collective in one step, at the links' published bandwidth.

    See :func:`wire_seconds`. Latency is not counted.
    """
    if chip.link_bytes_per_s is None:
        return None
    islands = _islands(collective.axes, mesh, devices_per_island)
    permutes = collective.kind == "collective-permute"
    once = wire_seconds(
        collective.payload if permutes else collective.sent,
        chip,
        group=collective.group,
        islands=islands,
        permutes=permutes,
    )
    return collective.executions * once


def wire_seconds(
    sent: float, chip: Chip, *, group: int, islands: int, permutes: bool = False
) -> float:
    """Seconds of a collective at the links' published bandwidth.

    A group within an island (a TPU slice, a host of GPUs) is a ring: a device sends
    ``(n - 1) / n`` of the payload (an all-reduce twice that), on TPUs both ways round one axis of
    the torus, on GPUs through all NVLinks. A group over several islands works in two steps: within
    each island, and then each device exchanges its part with its peers over the network between
    hosts. A permutation sends its payload over one link.

    Args:
      sent: bytes that one device would send in a ring.
      chip: the peaks, which must be known.
      group: devices that take part.
      islands: over how many of these they are spread, evenly.
      permutes: whether it is a permutation.
    """
    if permutes:
        return sent / (chip.dcn_bytes_per_s if islands > 1 else chip.link_bytes_per_s)
    if islands == 1:
        return sent / chip.ring_bytes_per_s
    inside = max(1, group // islands)
    whole = sent * group / (group - 1) if group > 1 else sent
    within = (inside - 1) / inside / chip.ring_bytes_per_s
    between = (islands - 1) / islands / inside / chip.dcn_bytes_per_s
    return whole * (within + between)


def _islands(axes: Sequence[str], mesh: Mesh, devices_per_island: int) -> int:
    """Over how many islands a group along these axes extends."""
    if UNKNOWN in axes or mesh.size <= devices_per_island:
        # A group of unknown make is taken to stay within its island where there is only one.
        return max(1, math.ceil(mesh.size / devices_per_island))
    names = tuple(mesh.shape)
    island = np.vectorize(lambda d: island_of(d, devices_per_island))(mesh.devices)
    moved = [names.index(axis) for axis in axes]
    rest = [d for d in range(len(names)) if d not in moved]
    groups = island.transpose([*rest, *moved]).reshape(math.prod(island.shape[d] for d in rest), -1)
    return max(len(set(group)) for group in groups.tolist())


def island_of(device, devices_per_island: int) -> int:
    """The slice of a TPU, the host of another device."""
    if device.platform == "tpu":
        return slice_of(device)
    return device.id // devices_per_island
