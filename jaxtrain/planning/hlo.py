"""Reads a compiled program's text for what it communicates, along which axes and how often.

XLA's text is not a stable interface, and each backend writes it in its own way. What is not
understood is reported as such (axes ``"?"``, trip count unknown, a collective by XLA's own name)
and never dropped; nothing else depends on the text.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from jaxtrain.ops.attention import shares_of
from jaxtrain.ops.grouped import trips_of
from jaxtrain.planning.groups import group_axes, make_grid, parse_groups, parse_slices
from jaxtrain.planning.hlo_text import (
    Computation,
    Instruction,
    arrays,
    parse,
    partitions_of,
    split_tuple,
    type_bytes,
)
from jaxtrain.planning.roofline import network_share, ring_share

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Args:
      kind: one of :data:`COLLECTIVES`; another name of XLA's for what has groups of devices too.
      axes: mesh axes it goes along, outermost first; ``("?",)`` where its groups are not made of
        whole axes, or there is no mesh to tell.
      group: devices that take part together.
      executions: how often one device executes it per call of the program.
      payload: bytes of the whole array per execution: what an all-gather ends with, what a
        reduce-scatter begins with, what is reduced, exchanged or sent.
      conditional: inside a branch that the program does not say the share of; counted as if that
        branch were always taken.
      source: where in the traced program it comes from, as XLA noted it.
      shapes: dtype and shape of each array of the payload.
      islands: parts of the slow network (slices, or hosts) in which a group lies.
      name: of the instruction that sends it, or begins to.
      share: of executions in which its branch is taken.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    executions: int
    payload: int
    conditional: bool = False
    source: str = ""
    shapes: tuple[str, ...] = ()
    islands: int = 1
    name: str = ""
    share: float = 1.0

    @property
    def sent(self) -> float:
        """Bytes that one device sends per execution when the group is a ring, in the mean."""
        return self.share * self.payload * ring_share(self.kind, self.group)

    @property
    def crossing(self) -> float:
        """Bytes of ``sent`` that cross the slow network."""
        return self.sent * network_share(self.kind, self.group, self.islands)


@dataclasses.dataclass(frozen=True)
class Program:
    """Collectives, loops and conditionals of a compiled program.

    Args:
      collectives: all of them, in program order.
      trips: trip counts by the loop's instruction; None where it is not known (and counted as 1).
      branches: the computations of a conditional, and the share of each where the program says it,
        by its instruction.
      computations: its text, computation by computation.
      scheduled: whether instructions run in the order of the text.
    """

    collectives: tuple[Collective, ...] = ()
    trips: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    branches: Mapping[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    computations: Mapping[str, Computation] = dataclasses.field(default_factory=dict, repr=False)
    entry: str = ""
    scheduled: bool = False

    @property
    def loops(self) -> tuple[int | None, ...]:
        """Trip counts in program order."""
        return tuple(self.trips.values())

    def per_step(self, steps: int) -> "Program":
        """The share of one step in a program that runs ``steps`` of them in a loop.

        What is executed once for all of them counts as once per step.
        """
        collectives = tuple(
            dataclasses.replace(c, executions=-(-c.executions // steps)) for c in self.collectives
        )
        return dataclasses.replace(self, collectives=collectives)


def read_program(text: str, mesh: Mesh | None = None) -> Program:
    """Reads ``compiled.as_text()`` of a scheduled module; the axes of collectives are the mesh's.
    Raises ValueError for a text that is no program."""
    parsed, scheduled = parse(text), "is_scheduled=true" in text[: text.find("\n")]
    reader = _Reader(parsed, partitions_of(text), mesh)
    return Program(tuple(reader.collectives), reader.trips, reader.branches, *parsed, scheduled)


class _Reader:
    def __init__(self, parsed: tuple[dict[str, Computation], str], partitions: int, mesh):
        self.computations, entry = parsed
        self.partitions = partitions
        self.grid = None if mesh is None else make_grid(mesh, partitions)
        self.mesh = mesh
        self.collectives: list[Collective] = []
        self.trips: dict[str, int | None] = {}
        self.branches: dict[str, dict[str, float | None]] = {}
        self.started = {
            (kind, instruction.attribute("channel_id"))
            for computation in self.computations.values()
            if _starts(computation)
            for instruction in computation.instructions.values()
            if (kind := _collective_kind(instruction))
        }
        self.share = 1.0
        self._walk(self.computations[entry], 1, False)

    def _walk(self, computation: Computation, times: int, conditional: bool) -> None:
        # A TPU's asynchronous collective is written into the fusion that starts it, those that run
        # meanwhile (in loops too) and the one that ends it, with the same channel: it is one.
        channels: set[tuple[str, str]] = set()
        for instruction in computation.instructions.values():
            op = instruction.op
            if op == "while":
                trips = self._trips(computation, instruction)
                self.trips[instruction.name] = trips
                for body in self._called(instruction, "body"):
                    self._walk(body, times * (1 if trips is None else trips), conditional)
            elif op == "conditional":
                branches, whole = self._branches(instruction), self.share
                self.branches[instruction.name] = {b.name: share for b, share in branches}
                for branch, share in branches:
                    self.share = whole * (1.0 if share is None else share)
                    self._walk(branch, times, conditional or share is None)
                self.share = whole
            elif op == "fusion":
                for called in self._called(instruction, "calls"):
                    self._fused(called, times, conditional, channels)
            elif kind := _collective_kind(instruction):
                self._add(instruction, kind, times, conditional)
            elif op == "send" and (kind := _between_slices(instruction)):
                self._add(instruction, kind, times, conditional, between_slices=True)
            elif op in ("call", "async-start", "custom-call"):
                for called in self._called(instruction, "calls", "to_apply", "called_computations"):
                    self._walk(called, times, conditional)

    def _fused(self, called: Computation, times, conditional, channels) -> None:
        for instruction in called.instructions.values():
            if instruction.op == "fusion":
                for inner in self._called(instruction, "calls"):
                    self._fused(inner, times, conditional, channels)
            kind = _collective_kind(instruction)
            if not kind:
                continue
            channel = (kind, instruction.attribute("channel_id") or instruction.name)
            elsewhere = channel in self.started and not _starts(called)
            if channel in channels or elsewhere:
                continue
            channels.add(channel)
            if called.name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            self._add(instruction, kind, times, conditional, scattered=kind == "reduce-scatter")

    def _add(
        self, instruction, kind, times, conditional, *, scattered=False, between_slices=False
    ) -> None:
        """Adds a collective; one between TPU slices goes by way of the host, with the network."""
        if between_slices:
            groups, grid = parse_slices(instruction.attributes, self.mesh), self.mesh
            grid, source = grid and make_grid(grid), "between slices"
            # What is gathered is written as what goes in.
            types, is_part = split_tuple(instruction.type)[:1], kind == "all-gather"
        else:
            groups, grid = parse_groups(instruction.attributes, self.partitions), self.grid
            found = re.search(r'op_name="([^"]*)"', instruction.attributes)
            source, types = found[1] if found else "", _payload_types(instruction, kind)
            # The result of a reduce-scatter is one part of what went in.
            is_part = instruction.op == "reduce-scatter" and not scattered
        pairs = kind == "collective-permute"
        group = 2 if pairs else max(map(len, groups or [()]))
        if groups is not None and group < 2 and not between_slices:
            return
        axes, islands = group_axes(groups, grid, pairs=pairs)
        payload = sum(map(type_bytes, types)) * (max(1, group) if is_part else 1)
        shapes = [
            f"{dtype}[{','.join(map(str, dims))}]" for t in types for dtype, dims in arrays(t)
        ]
        self.collectives.append(
            Collective(
                *(kind, axes, group, times, payload, conditional, source, tuple(shapes)),
                islands=islands,
                name=instruction.name,
                share=self.share,
            )
        )

    def _called(self, instruction: Instruction, *attributes: str) -> list[Computation]:
        names = [instruction.attribute(name) for name in attributes]
        return [self.computations[n] for n in names if n in self.computations]

    def _branches(self, instruction: Instruction) -> list[tuple[Computation, float | None]]:
        """The branches, (false, true) where there are two, and the share of each if it is known."""
        if found := re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes):
            names = re.findall(r"%?([\w.\-]+)", found[1])
            branches = [self.computations[n] for n in names if n in self.computations]
        else:
            branches = self._called(instruction, "false_computation", "true_computation")
        shares = shares_of(instruction.attributes) or []
        known = len(shares) == len(branches)
        return list(zip(branches, shares if known else [None] * len(branches), strict=True))

    # Trip counts: as XLA notes them, or of a loop whose condition is ``counter < constant``.

    def _trips(self, computation: Computation, loop: Instruction) -> int | None:
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(found[1])
        try:
            return self._counted(computation, loop)
        except (KeyError, IndexError, TypeError, ValueError):
            return trips_of(loop.attributes)  # where its mean is known

    def _counted(self, computation: Computation, loop: Instruction) -> int:
        condition = self.computations[loop.attribute("condition")]
        body = self.computations[loop.attribute("body")]
        test, scope = self._inlined(condition, condition.root)
        if "direction=LT" not in test.attributes:
            raise ValueError(test.op)
        counter = scope(test.operands[0])
        index = int(counter.attribute("index"))
        bound = _number(scope(test.operands[1]))
        carry = computation.instructions[loop.operands[0]]
        start = _number(_behind(computation, carry.operands[index]))
        add, scope = self._inlined(body, _behind(body, body.root.operands[index]), "add")
        (step,) = (
            int(found.literal) for found in map(scope, add.operands) if found.op == "constant"
        )
        return max(0, -(-(bound - start) // step))

    def _inlined(
        self, computation: Computation, instruction: Instruction, op: str | None = None
    ) -> tuple[Instruction, Callable[[str], Instruction]]:
        """Returns the instruction that computes a value, and a function that looks its operands up.

        In a fusion it is the root, or the only ``op``.
        """
        instruction = _behind(computation, instruction.name)
        if instruction.op != "fusion":
            return instruction, lambda name: _behind(computation, name)
        inner = self.computations[instruction.attribute("calls")]
        outside = dict(zip((p.name for p in inner.parameters), instruction.operands, strict=True))

        def look_up(name: str) -> Instruction:
            found = _behind(inner, name)
            return _behind(computation, outside[found.name]) if found.name in outside else found

        if op is None:
            return inner.root, look_up
        (only,) = (i for i in inner.instructions.values() if i.op == op)
        return only, look_up


def _behind(computation: Computation, name: str) -> Instruction:
    """Returns the instruction that a name stands for behind copies and changes of type."""
    instruction = computation.instructions[name]
    while instruction.op in ("bitcast", "copy", "convert", "copy-done", "copy-start"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _number(instruction: Instruction) -> int:
    if instruction.op != "constant":
        raise ValueError(instruction.op)
    return int(instruction.literal)


def _starts(computation: Computation) -> bool:
    """Whether a fusion starts a TPU's asynchronous collective."""
    return any(
        i.op == "custom-call" and "AsyncCollectiveStart" in i.attributes
        for i in computation.instructions.values()
    )


def _collective_kind(instruction: Instruction) -> str | None:
    kind = instruction.op.removesuffix("-start")
    if kind in COLLECTIVES:
        return kind
    ends = instruction.op.endswith(("-done", "-update"))
    return kind if "replica_groups=" in instruction.attributes and not ends else None


def _between_slices(instruction: Instruction) -> str | None:
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    kind = found[1].lower().replace("_", "-") if found else None
    return "collective-permute" if kind == "one-to-one" else kind


def _payload_types(instruction: Instruction, kind: str) -> list[str]:
    """The types of an operation's results; of its operands, for a reduce-scatter-start."""
    parts = split_tuple(instruction.type)
    if instruction.op.endswith("-start") and kind != "all-reduce" and len(parts) > 1:
        # A start's type is (operands, results, and what the hardware needs).
        parts = split_tuple(parts[0 if kind == "reduce-scatter" else 1])
    return parts
