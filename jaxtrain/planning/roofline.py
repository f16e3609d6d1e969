"""How long a step takes: work over what a chip does in a second, and what overlaps with what.

One rule for a compiled plan and for a row of a search:

- products run at the published peak of their dtype times the chip's stated efficiency for their
  kind (:attr:`jaxtrain.planning.chips.Chip.efficiency`), beside the memory traffic of their own
  operands and results: the longer of the two counts;
- all other memory traffic (element-wise work between products, the optimizer's update) is added;
- of collectives, what a scheduled program leaves exposed (:mod:`.exposure`) comes on top. Where
  there is no such program, those over :data:`OVERLAPPED` axes (weights gathered ahead, gradients
  summed) run beside all of that; those over other axes lie between one product and the next, and
  come on top.

All axes share one set of links. In a pipeline all times are those of the critical path.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.planning.chips import Chip

OVERLAPPED = frozenset(["data", "fsdp"])


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds per step of one device.

    Args:
      compute: products, at the stated efficiency.
      product_hbm, other_hbm: memory traffic, of products and of all else.
      interconnect: collectives, by mesh axes joined with ``+``.
      least: products at the published peak, and nothing else: no step is faster.
      waits: seconds for which a device waits for collectives, by axes as above, as its program is
        scheduled; None where that is not known.
    """

    compute: float
    product_hbm: float
    other_hbm: float
    interconnect: Mapping[str, float]
    least: float
    waits: Mapping[str, float] | None = None

    @property
    def hbm(self) -> float:
        """All memory traffic."""
        return self.product_hbm + self.other_hbm

    @property
    def exposed(self) -> float:
        """Collectives that nothing hides."""
        if self.waits is not None:
            return sum(self.waits.values())
        return sum(s for axes, s in self.interconnect.items() if not hides(axes))

    @property
    def hidden(self) -> float:
        """Collectives that run beside compute."""
        return sum(self.interconnect.values()) - self.exposed

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        busy = max(self.compute, self.product_hbm) + self.other_hbm
        return (busy if self.waits is not None else max(busy, self.hidden)) + self.exposed

    @property
    def step_seconds_apart(self) -> float:
        """The same where no communication overlaps with anything."""
        return max(self.compute, self.product_hbm) + self.other_hbm + self.hidden + self.exposed

    @property
    def bound(self) -> str:
        """What takes longest: ``"compute"``, ``"HBM"``, or the axes of the longest traffic."""
        waits = self.product_hbm if self.product_hbm > self.compute else 0
        parts = {"compute": self.compute, "HBM": self.other_hbm + waits}
        traffic = self.exposed + (self.hidden if self.waits is None else 0)
        if traffic > max(parts.values()):
            return f"{max(self.interconnect, key=self.interconnect.get)} traffic"
        return max(parts, key=parts.get)

    def to_json(self) -> dict:
        """Returns it as plain data."""
        names = ("hbm", "step_seconds", "step_seconds_apart", "bound")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


def hides(axes: str) -> bool:
    """Whether traffic along these axes (joined by ``+``) overlaps with compute."""
    return set(axes.split("+")) <= OVERLAPPED


def ring_share(kind: str, group: int) -> float:
    """What a device of a ring sends in a collective, as a part of the whole array.

    The whole array is what an all-gather ends with, what a reduce-scatter begins with, and what is
    reduced, exchanged or sent.

    >>> ring_share("all-gather", 4), ring_share("all-reduce", 4)
    (0.75, 1.5)
    """
    if kind in ("collective-permute", "collective-broadcast") or group < 1:
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (group - 1) / group


def wire_seconds(
    kind: str,
    axes: tuple[str, ...],
    sent: float,
    chip: Chip,
    mesh: Mapping[str, int],
    devices_per_island: int,
) -> float:
    """Seconds of a collective at the links' bandwidth and the chip's stated efficiency on them.

    A group within an island (a TPU slice, a host of GPUs) is a ring: on TPUs both ways round one
    axis of the torus, on GPUs through all NVLinks. A group over several islands works in two steps:
    within each island, and then each device exchanges its part with its peers over the network
    between hosts. A permutation sends its payload over one link. Latency is not counted.

    Args:
      kind, axes: what goes along which mesh axes; axes that the mesh lacks are taken as all of it.
      sent: bytes that one device sends in a ring (:func:`ring_share`).
      chip: the peaks, which must be known.
      mesh: sizes of mesh axes, outermost first.
      devices_per_island: devices that reach each other by links, consecutive in the mesh.
    """
    axes = axes if set(axes) <= set(mesh) else tuple(mesh)
    group = math.prod(mesh[axis] for axis in axes)
    inside = within_island(axes, mesh, devices_per_island)
    islands = group // inside
    link = chip.link_bytes_per_s * chip.efficiency["links"]
    network = chip.dcn_bytes_per_s * chip.efficiency["links"]
    if kind == "collective-permute":
        return sent / (network if islands > 1 else link)
    if islands == 1:
        return sent / (chip.links * link)
    whole = sent * group / (group - 1)
    within = (inside - 1) / inside / (chip.links * link)
    return whole * (within + (islands - 1) / islands / inside / network)


def within_island(axes: tuple[str, ...], mesh: Mapping[str, int], island: int) -> int:
    """How many devices of a group along mesh axes are in one island of consecutive devices.

    Devices are numbered along the axes in the mesh's order, the last running fastest.

    >>> within_island(("tensor",), {"data": 4, "tensor": 4}, 8)
    4
    >>> within_island(("data",), {"data": 4, "tensor": 4}, 8)
    2
    """
    inside, stride = 1, 1
    for axis, size in reversed(mesh.items()):
        if axis in axes:
            inside *= max(1, min(size, island // stride))
        stride *= size
    return inside
