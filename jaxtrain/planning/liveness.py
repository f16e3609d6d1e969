"""When buffers are alive: what each operation reads, writes, writes over and needs meanwhile."""

import collections
import dataclasses


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory of one device."""

    size: int


@dataclasses.dataclass(eq=False)
class Work:
    """One operation as memory sees it."""

    reads: set[Buffer] = dataclasses.field(default_factory=set)
    writes: set[Buffer] = dataclasses.field(default_factory=set)
    over: int = 0
    transient: int = 0


class Liveness:
    """Buffers that are read and written at each tick of a clock of operations."""

    def __init__(self):
        self.work = [Work()]
        self.known: set[Buffer] = set()

    def tick(self) -> None:
        """Goes on to the next operation."""
        self.work.append(Work())

    def write(self, size: int, *, in_place: bool = False) -> frozenset[Buffer]:
        """Writes a new buffer now, over operands that die now if ``in_place``."""
        buffer = Buffer(size)
        self.known.add(buffer)
        self.work[-1].writes.add(buffer)
        self.work[-1].over += size if in_place else 0
        return frozenset([buffer])

    def read(self, buffers: frozenset[Buffer]) -> None:
        """Buffers are read now; those of other levels are alive anyway."""
        self.work[-1].reads |= buffers & self.known

    def transient(self, size: float) -> None:
        """Bytes that only the present operation needs."""
        self.work[-1].transient += max(0, int(size))

    def peak(self) -> int:
        """The most bytes alive at once."""
        last = {b: at for at, w in enumerate(self.work) for b in (*w.writes, *w.reads)}
        ends: dict[int, list[Buffer]] = collections.defaultdict(list)
        for buffer, at in last.items():
            ends[at].append(buffer)
        alive = most = 0
        for at, w in enumerate(self.work):
            alive += sum(b.size for b in w.writes)
            dying = sum(b.size for b in ends[at] if b not in w.writes)
            most = max(most, alive - min(w.over, dying) + w.transient)
            alive -= sum(b.size for b in ends[at])
        return most
