"""When buffers are alive: what each operation reads, writes, writes over and needs meanwhile."""

import collections
import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory of one device, and what it holds, in words."""

    size: int
    what: str = ""


@dataclasses.dataclass(eq=False)
class Work:
    """One operation as memory sees it: what it reads, writes, writes over, and needs meanwhile."""

    reads: set[Buffer] = dataclasses.field(default_factory=set)
    writes: list[Buffer] = dataclasses.field(default_factory=list)
    over: int = 0
    transient: int = 0


class Liveness:
    """What is read and written when, on a clock of operations."""

    def __init__(self):
        self.work = [Work()]
        self.written: set[Buffer] = set()
        self.adopted: set[Buffer] = set()
        # What is read once more when all else is done.
        self.late: set[Buffer] = set()
        # Inputs are kept with the outputs so that an id names one value for as long as this lives.
        self.known: dict[Any, tuple[list, list]] = {}

    def tick(self) -> None:
        """Goes on to the next operation."""
        self.work.append(Work())

    def write(self, buffer: Buffer, *, in_place: bool = False) -> None:
        """A buffer is written now, over operands that die now if ``in_place``."""
        self.written.add(buffer)
        self.work[-1].writes.append(buffer)
        if in_place:
            self.work[-1].over += buffer.size

    def read(self, buffer: Buffer) -> None:
        """A buffer is read now."""
        if buffer in self.written or buffer in self.adopted:
            self.work[-1].reads.add(buffer)

    def transient(self, size: int) -> None:
        """Bytes that only the present operation needs."""
        self.work[-1].transient += max(0, size)

    def adopt(self, buffer: Buffer) -> None:
        """Takes in a loop's carry: counted outside, and to be written over once it is read."""
        self.adopted.add(buffer)

    def peak(self) -> int:
        """The most bytes alive at once, besides what was adopted."""
        last = {b: at for at, w in enumerate(self.work) for b in (*w.writes, *w.reads)}
        ends: dict[int, list[Buffer]] = collections.defaultdict(list)
        for buffer, at in last.items():
            ends[at].append(buffer)
        alive = most = 0
        for at, w in enumerate(self.work):
            new = set(w.writes)
            alive += sum(b.size for b in new)
            # The places of the carry first: they stay taken.
            handed = sum(b.size for b in ends[at] if b in self.adopted)
            alive -= (handed := min(w.over, handed))
            dying = sum(b.size for b in ends[at] if b not in self.adopted and b not in new)
            most = max(most, alive - min(w.over - handed, dying) + w.transient)
            alive -= sum(b.size for b in ends[at] if b not in self.adopted)
        return most
