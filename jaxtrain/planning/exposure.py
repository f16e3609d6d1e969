"""Computes how long a device waits for communication, by the schedule of a program.

A scheduled program is a list of instructions per computation, and a device runs them in that order.
An asynchronous collective begins with its start and must be over at its done: what lies between
the two hides it, and a device waits for the rest. One without a start hides behind nothing. Fast
links, and the network between slices or hosts, carry one collective at a time each, and one that
takes both takes them one after the other: of two that a program has under way together, one may be
in the fast links and one in the network.

How long an instruction takes is in proportion to what it multiplies or, where it multiplies
nothing, to the memory that it reads and writes; each kind together takes as long as the roofline
says. So an attention kernel that cannot be compiled ahead of time, and is written out in its place,
counts for what it multiplies.
"""

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping

from jaxtrain.planning.hlo import Collective, Program
from jaxtrain.planning.hlo_text import Computation, Instruction, arrays, type_bytes

# What takes no time of its own.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"}


def exposed_seconds(
    program: Program,
    *,
    products: float,
    others: float,
    seconds: Callable[[Collective], tuple[float, float]],
) -> Mapping[str, float] | None:
    """Says for which axes' collectives a device waits, and how long, per call of a program. Returns
    seconds by mesh axes joined with ``+``; None where the program is not scheduled, or has a loop
    of unknown length.

    Args:
      products, others: seconds that instructions with products, and without, take together.
      seconds: how long one execution of a collective takes by itself of the fast links, and of the
        network (:func:`.roofline.wire_seconds`).
    """
    if not program.scheduled or None in program.loops:
        return None

    def run(per_product: float, per_byte: float, seconds: Callable[[Collective], tuple]):
        timeline = _Timeline(program, seconds, per_product, per_byte)
        timeline.run(program.computations[program.entry])
        return timeline

    multiplied, moved = (run(*unit, lambda _: (0.0, 0.0)).now for unit in ((1.0, 0.0), (0.0, 1.0)))
    timeline = run(products / max(1.0, multiplied), others / max(1.0, moved), seconds)
    return dict(timeline.waits)


@dataclasses.dataclass
class _Timeline:
    """One device's clock as it runs a program.

    Args:
      per_product, per_byte: seconds of a product, and of a byte that is read or written by what
        multiplies nothing.
      now: when the device is where it is.
      links: when the fast links, and the network, have carried what was begun.
      waits: how long it has waited, by axes.
    """

    program: Program
    seconds: Callable[[Collective], tuple[float, float]]
    per_product: float
    per_byte: float
    now: float = 0.0
    links: tuple[float, ...] = (0.0, 0.0)
    waits: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    named: Mapping[str, Collective] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.named = {c.name: c for c in self.program.collectives}

    def run(self, computation: Computation, times: int = 1, trips: int = 0) -> None:
        """Runs a computation (the whole program, the body of a loop, or a branch), whose waits
        count ``times`` over; of a loop's body, a stack of ``trips`` layers is read layer by layer.
        """
        under_way: dict[str, tuple[str, float]] = {}
        for instruction in computation.instructions.values():
            op = instruction.op
            if op == "while":
                self._loop(instruction, times)
            elif op == "conditional":
                self._branch(self.program.branches[instruction.name], times)
            elif op == "async-update" and instruction.operands[0] in under_way:
                under_way[instruction.name] = under_way.pop(instruction.operands[0])
            elif collective := self._collective(computation, instruction):
                axes = "+".join(collective.axes)
                end = self._send(self.seconds(collective))
                if channel := self._channel(instruction, "AsyncCollectiveStart"):
                    under_way[channel] = axes, end
                elif op.endswith(("-start", "-update")):
                    under_way[instruction.name] = axes, end
                else:
                    self._wait(axes, end, times)
            elif (channel := self._channel(instruction, "AsyncCollectiveDone")) in under_way:
                self._wait(*under_way.pop(channel), times)
            elif op.endswith("-done") and instruction.operands[0] in under_way:
                self._wait(*under_way.pop(instruction.operands[0]), times)
            elif op == "call":
                self.run(self.program.computations[instruction.attribute("to_apply")], times, trips)
            elif op not in _FREE and not op.endswith(("-start", "-done", "-update")):
                self.now += self._work(computation, instruction, trips)
        for axes, end in under_way.values():
            self._wait(axes, end, times)

    def _send(self, seconds: tuple[float, float]) -> float:
        """Begins a collective; returns when it is over."""
        end, links = self.now, list(self.links)
        for i, taken in enumerate(seconds):
            if taken:
                end = links[i] = max(end, links[i]) + taken
        self.links = tuple(links)
        return end

    def _wait(self, axes: str, end: float, times: int) -> None:
        self.waits[axes] += times * max(0.0, end - self.now)
        self.now = max(self.now, end)

    def _loop(self, instruction: Instruction, times: int) -> None:
        """A first trip, and then as many like the second."""
        trips = self.program.trips[instruction.name]
        body = self.program.computations[instruction.attribute("body")]
        for repeated in (min(1, trips), trips - 1):
            if repeated > 0:
                start = self.now
                self.run(body, times * repeated, trips)
                more = (repeated - 1) * (self.now - start)
                self.now += more
                self.links = tuple(end + more for end in self.links)

    def _branch(self, branches: Mapping[str, float | None], times: int) -> None:
        """The mean of the branches, where the share of each is known, or the one that takes
        longest."""
        begun, ends = (self.now, self.links, self.waits), []
        for name, share in branches.items():
            self.now, self.links, self.waits = begun[0], begun[1], begun[2].copy()
            self.run(self.program.computations[name], times)
            ends.append((self.now, self.links, self.waits, share))
        longest = max(ends, key=lambda end: end[0], default=(*begun, None))
        self.now, self.links, self.waits, share = longest
        if share is not None:
            self.now = sum(now * share for now, _, _, share in ends)
            links = zip(*(links for _, links, _, _ in ends), strict=True)
            shares = [share for *_, share in ends]
            self.links = tuple(sum(map(operator.mul, each, shares)) for each in links)
            self.waits = collections.Counter()
            for _, _, waits, share in ends:
                self.waits.update({axes: share * waited for axes, waited in waits.items()})

    def _collective(self, computation: Computation, instruction: Instruction) -> Collective | None:
        """Returns the collective of an instruction, or of the fusion or computation it calls."""
        if instruction.op == "async-start" and not instruction.operands:
            return None  # a SparseCore is made ready; what it sends comes with the update
        if instruction.op == "async-update":
            instruction = computation.instructions[instruction.operands[0]]
        if found := self.named.get(instruction.name):
            return found
        of = {"custom-call": "called_computations", "fusion": "calls", "async-start": "calls"}
        name = instruction.op in of and instruction.attribute(of[instruction.op])
        called = self.program.computations.get(name or "")
        if called is None:
            return None
        inside = (self._collective(called, i) for i in called.instructions.values())
        return next((found for found in inside if found is not None), None)

    def _channel(self, instruction: Instruction, mark: str) -> str | None:
        """The channel of the collective that a fusion for TPUs starts, or ends."""
        called = self.program.computations.get(instruction.attribute("calls") or "")
        if instruction.op != "fusion" or called is None:
            return None
        inside = called.instructions.values()
        if not any(i.op == "custom-call" and mark in i.attributes for i in inside):
            return None
        return next(filter(None, (i.attribute("channel_id") for i in inside)), None)

    def _work(self, computation: Computation, instruction: Instruction, trips: int) -> float:
        """Seconds of an instruction that is no collective."""
        if products := self._products(computation, instruction):
            return products * self.per_product
        types = [instruction.type]
        for name in instruction.operands:
            if name in computation.instructions:
                types.append(computation.instructions[name].type)
        return self.per_byte * sum(_read(type_text, trips) for type_text in types)

    def _products(self, computation: Computation, instruction: Instruction) -> float:
        called = self.program.computations.get(instruction.attribute("calls") or "")
        if instruction.op == "fusion" and called is not None:
            return sum(self._products(called, inner) for inner in called.instructions.values())
        if instruction.op not in ("dot", "convolution"):
            return 0.0
        left = computation.instructions[instruction.operands[0]]
        elements = math.prod(arrays(instruction.type)[0][1])
        return 2.0 * elements * _contracted(instruction, left)


def _read(type_text: str, trips: int) -> float:
    """Bytes of a type, of which a stack of as many parts as a loop has trips is read in parts."""
    found = arrays(type_text)
    stacked = trips > 1 and len(found) == 1 and found[0][1][:1] == (trips,)
    return type_bytes(type_text) / (trips if stacked else 1)


def _contracted(instruction: Instruction, left: Instruction) -> int:
    """Counts the products that are summed into each element of a result."""
    sizes = arrays(left.type)[0][1]
    if found := re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes):
        return math.prod(sizes[int(d)] for d in found[1].split(",") if d)
    found = re.search(r"dim_labels=(\w+)_", instruction.attributes)
    return sizes[found[1].index("f")] if found else 1
