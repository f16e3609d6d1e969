"""Predicts the time of a step: work over the rates of a chip, and what overlaps with what.

One rule for a compiled plan and for a row of a search:

- products run at the published peak of their dtype times the chip's stated efficiency for their
  kind (:attr:`jaxtrain.host.chips.Chip.efficiency`), beside the memory traffic of their own
  operands and results: the longer of the two counts;
- all other memory traffic (element-wise work between products, the optimizer's update) is added;
- of collectives, what a scheduled program leaves exposed (:mod:`.exposure`) comes on top. Where
  there is no such program, those over :data:`OVERLAPPED` axes (weights gathered ahead, gradients
  summed) run beside all of that; those over other axes lie between one product and the next, and
  come on top.

All axes share one set of links and one network, which wait for each other. In a pipeline all times
are those of the critical path.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.host.chips import Chip
from jaxtrain.host.links import BETWEEN, WITHIN, Link

OVERLAPPED = frozenset(["data", "fsdp"])


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds per step of one device.

    Args:
      compute: products, at the stated efficiency.
      product_hbm, other_hbm: memory traffic, of products and of all else.
      interconnect: collectives over fast links, by mesh axes joined with ``+``.
      network: the same over the slow network between slices, or hosts.
      heat: products that a device has more for each time the mean of tokens that the hottest expert
        has above it.
      host: state fetched from the memory of the host, and sent back; nothing hides it.
      least: products at the published peak, and nothing else: no step is faster.
      waits: seconds for which a device waits for collectives, by axes as above, as its program is
        scheduled; None where that is not known.
    """

    compute: float
    product_hbm: float
    other_hbm: float
    interconnect: Mapping[str, float]
    least: float
    network: Mapping[str, float] = dataclasses.field(default_factory=dict)
    waits: Mapping[str, float] | None = None
    host: float = 0.0
    heat: float = 0.0

    @property
    def hbm(self) -> float:
        """All memory traffic."""
        return self.product_hbm + self.other_hbm

    @property
    def _wires(self) -> list[tuple[str, float]]:
        return [*self.interconnect.items(), *self.network.items()]

    @property
    def exposed(self) -> float:
        """Collectives that nothing hides."""
        if self.waits is not None:
            return sum(self.waits.values())
        return sum(s for axes, s in self._wires if not hides(axes))

    @property
    def hidden(self) -> float:
        """Collectives that run beside compute."""
        return sum(s for _, s in self._wires) - self.exposed

    @property
    def step_seconds(self) -> float:
        """Seconds per step."""
        busy = max(self.compute, self.product_hbm) + self.other_hbm
        busy = busy if self.waits is not None else max(busy, self.hidden)
        return busy + self.exposed + self.host

    @property
    def step_seconds_apart(self) -> float:
        """Seconds per step if no communication overlaps with anything."""
        wires = self.hidden + self.exposed + self.host
        return max(self.compute, self.product_hbm) + self.other_hbm + wires

    @property
    def bound(self) -> str:
        """Bottleneck of a step: ``"compute"``, ``"HBM"``, or the longest traffic, by its name."""
        waits = self.product_hbm if self.product_hbm > self.compute else 0
        parts = {"compute": self.compute, "HBM": self.other_hbm + waits}
        parts["traffic with the host"] = self.host
        traffic = self.exposed + (self.hidden if self.waits is None else 0)
        if traffic > max(parts.values()):
            links = {f"{axes} traffic": s for axes, s in self.interconnect.items()}
            links |= {f"{axes} traffic on the slow network": s for axes, s in self.network.items()}
            return max(links, key=links.get)
        return max(parts, key=parts.get)

    def to_json(self) -> dict:
        """Returns it as plain data."""
        names = ("hbm", "step_seconds", "step_seconds_apart", "bound")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


def hides(axes: str) -> bool:
    """Whether traffic along these axes (joined by ``+``) overlaps with compute.

    Along ``expert`` alone tokens are exchanged; beside others gradients of dense layers are summed.

    >>> hides("data+fsdp"), hides("fsdp+expert"), hides("expert")
    (True, True, False)
    """
    names = set(axes.split("+"))
    return names <= {*OVERLAPPED, "expert"} and names != {"expert"}


def ring_share(kind: str, group: int) -> float:
    """Returns what share of the whole array a device of a ring sends in a collective.

    The whole array is what an all-gather ends with, what a reduce-scatter begins with, and what is
    reduced, exchanged or sent.

    >>> ring_share("all-gather", 4), ring_share("all-reduce", 4)
    (0.75, 1.5)
    """
    if kind in ("collective-permute", "collective-broadcast") or group < 1:
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (group - 1) / group


def network_share(kind: str, group: int, islands: int) -> float:
    """Returns the part of a ring's traffic (:func:`ring_share`) that crosses a slow network.

    A group over several islands (TPU slices, hosts of GPUs) works in two steps: within each island,
    and then each device exchanges its share with its peers. A permutation crosses it entirely, and
    an all-to-all with all that goes to other islands.

    >>> network_share("all-reduce", 8, 1), network_share("all-gather", 4, 4)
    (0.0, 1.0)
    >>> round(network_share("all-reduce", 8, 2), 3)  # of 7/8, half of a quarter
    0.143
    >>> round(network_share("all-to-all", 8, 2), 3)  # 4 of 7
    0.571
    """
    if islands == 1 or group == 1:
        return 0.0
    if kind in ("collective-permute", "collective-broadcast") or group < 1:
        return 1.0
    if kind == "all-to-all":
        return (group - group / islands) / (group - 1)
    return (islands - 1) / (group - 1)


# Kinds that are not measured, by one that is and sends as a ring does, or to one neighbour.
_MEASURED_AS = {"all-to-all": "all-gather", "collective-broadcast": "collective-permute"}


def wire_seconds(
    kind: str, sent: float, crossing: float, chip: Chip, times: float = 1.0, ring: int = 1
) -> tuple[float, float]:
    """Seconds of collectives over the fast links, and over the network: as measured, where the chip
    says so, or at the bandwidths and the chip's stated efficiency on them, without latency.

    Within an island it is a ring: on TPUs both ways round one axis of the torus, on GPUs through
    all NVLinks. A permutation sends its payload over one link. What an all-to-all sends passes a
    quarter of the devices of a ring on its way, in the mean.

    Args:
      sent: bytes that one device sends in a ring (:func:`ring_share`).
      crossing: those of them that cross the slow network (:func:`network_share`).
      times: the number of collectives that send them.
      ring: devices of a ring that they go around.
    """
    links = 1 if kind == "collective-permute" else chip.links
    if kind == "all-to-all" and chip.links > 1:
        links /= max(1, ring / 4)
    shares = {
        WITHIN: (sent - crossing, links * chip.link_bytes_per_s),
        BETWEEN: (crossing, chip.dcn_bytes_per_s),
    }
    seconds = []
    for where, (bytes_, rate) in shares.items():
        link = chip.measured.get(where, {}).get(_MEASURED_AS.get(kind, kind))
        link = link or Link(0.0, rate * chip.efficiency["links"])
        seconds.append(times * link.seconds + bytes_ / link.bytes_per_s if bytes_ else 0.0)
    return seconds[0], seconds[1]


def crossing_bytes(
    kind: str, axes: tuple[str, ...], sent: float, mesh: Mapping[str, int], slow: Mapping[str, int]
) -> float:
    """Returns the bytes of ``sent`` that cross the slow network; ``slow`` has the islands of each
    axis. If the mesh lacks one of ``axes``, the traffic counts as that of all axes."""
    axes = axes if set(axes) <= set(mesh) else tuple(mesh)
    group, islands = (math.prod(sizes[axis] for axis in axes) for sizes in (mesh, slow))
    return sent * network_share(kind, group, islands)


def slow_of(mesh: Mapping[str, int], island: int) -> dict[str, int]:
    """Over how many islands of consecutive devices each axis of a mesh extends.

    Devices are numbered along the axes in the mesh's order, the last running fastest.

    >>> slow_of({"data": 4, "tensor": 4}, 8)
    {'data': 2, 'tensor': 1}
    """
    slow, stride = {}, 1
    for axis, size in reversed(mesh.items()):
        slow[axis] = -(-size // max(1, min(size, island // stride)))
        stride *= size
    return dict(reversed(slow.items()))
