"""Reads a compiled program's text: what it communicates, how often, and what it moves in memory.

XLA's text is not a stable interface, and each backend writes it in its own way. What is not
understood is reported as such (axes ``"?"``, trip count unknown) and never dropped.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from jaxtrain.parallel.mesh import slice_of
from jaxtrain.planning.groups import UNKNOWN, group_axes, parse_groups
from jaxtrain.planning.hlo_text import (
    Computation,
    Instruction,
    arrays,
    bits,
    parse,
    partitions_of,
    split_tuple,
    type_bytes,
)

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Args:
      kind: one of :data:`COLLECTIVES`.
      axes: mesh axes it goes along, outermost first; ``("?",)`` where its groups are not made of
        whole axes, or there is no mesh to tell.
      group: devices that take part together.
      executions: how often one device executes it per call of the program.
      payload: bytes of the whole array per execution: what an all-gather ends with, what a
        reduce-scatter begins with, what is reduced, exchanged or sent.
      conditional: inside a branch; counted as if that branch were always taken.
      source: where in the traced program it comes from, as XLA noted it.
      shapes: dtype and shape of each array of the payload.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    executions: int
    payload: int
    conditional: bool = False
    source: str = ""
    shapes: tuple[str, ...] = ()

    @property
    def sent(self) -> float:
        """Bytes that one device sends per execution when the group is a ring."""
        ring = (self.group - 1) / self.group if self.group else 1.0
        factor = {"all-reduce": 2 * ring, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return self.payload * factor.get(self.kind, ring)


@dataclasses.dataclass(frozen=True)
class Program:
    """What was read from a compiled program.

    Args:
      collectives: all of them, in program order.
      hbm_bytes: bytes that one device reads and writes per call, as if every top-level operation
        read its operands from memory and wrote its results there. Slices of a larger array count as
        the slice, updates in place as the update, arrays placed in a TPU's fast memory as nothing.
      kept_bytes: bytes of arrays that one loop stacks, an entry per iteration, and a later loop
        reads: what a scan over layers keeps for its backward pass.
      loops: trip counts by loop; None where it is not known (and counted as 1).
    """

    collectives: tuple[Collective, ...]
    hbm_bytes: float
    kept_bytes: int
    loops: tuple[int | None, ...]

    def per_step(self, steps: int) -> "Program":
        """The share of one step in a program that runs ``steps`` of them in a loop.

        What is executed once for all of them counts as once per step.
        """
        if steps == 1:
            return self
        collectives = tuple(
            dataclasses.replace(c, executions=-(-c.executions // steps)) for c in self.collectives
        )
        hbm_bytes = self.hbm_bytes / steps
        return dataclasses.replace(self, collectives=collectives, hbm_bytes=hbm_bytes)


def read_program(text: str, mesh: Mesh | None = None) -> Program:
    """Reads ``compiled.as_text()``.

    Args:
      text: of a scheduled module, after partitioning.
      mesh: names the axes of collectives; None leaves them unknown.
    """
    return _Reader(parse(text), partitions_of(text), mesh).read()


# Reads and writes nothing by itself.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "opt-barrier",
    "optimization-barrier",
    "add-dependency",
}
_PASSING = {"get-tuple-element", "bitcast", "copy", "copy-start", "copy-done", "reshape"}


class _Reader:
    def __init__(self, parsed: tuple[dict[str, Computation], str], partitions: int, mesh):
        self.computations, self.entry = parsed
        self.partitions, self.mesh = partitions, mesh
        self.collectives: list[Collective] = []
        self.loops: list[int | None] = []
        self.hbm_bytes = 0.0
        self.kept_bytes = 0
        self.started = {
            (kind, instruction.attribute("channel_id"))
            for computation in self.computations.values()
            if _starts(computation)
            for instruction in computation.instructions.values()
            if (kind := _collective_kind(instruction))
        }

    def read(self) -> Program:
        self._walk(self.computations[self.entry], 1, False)
        return Program(tuple(self.collectives), self.hbm_bytes, self.kept_bytes, tuple(self.loops))

    def _walk(self, computation: Computation, times: int, conditional: bool) -> None:
        # A TPU's asynchronous collective is written into the fusion that starts it, those that run
        # meanwhile (in loops too) and the one that ends it, with the same channel: it is one.
        channels: set[tuple[str, str]] = set()
        self.kept_bytes += self._kept(computation)
        for instruction in computation.instructions.values():
            op = instruction.op
            if op == "while":
                trips = self._trips(computation, instruction)
                self.loops.append(trips)
                body = self.computations[instruction.attribute("body")]
                self._walk(body, times * (1 if trips is None else trips), conditional)
            elif op == "conditional":
                for branch in self._branches(instruction):
                    self._walk(branch, times, True)
            elif op == "call" or (op == "async-start" and self._calls(instruction)):
                for called in self._calls(instruction):
                    self._walk(called, times, conditional)
            elif op == "fusion":
                for called in self._calls(instruction):
                    self._fused(instruction, called, times, conditional, channels)
                self.hbm_bytes += times * self._fusion_traffic(computation, instruction)
            elif kind := _collective_kind(instruction):
                self._add(instruction, kind, times, conditional)
                self.hbm_bytes += times * 2 * instruction.bytes
            elif op == "send" and (kind := _between_slices(instruction)):
                self._add_between_slices(instruction, kind, times, conditional)
            elif op not in _FREE and not op.endswith(("-done", "-update")):
                self.hbm_bytes += times * self._traffic(computation, instruction)

    def _fused(self, fusion, called: Computation, times, conditional, channels) -> None:
        for instruction in called.instructions.values():
            if instruction.op == "fusion":
                for inner in self._calls(instruction):
                    self._fused(fusion, inner, times, conditional, channels)
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

    def _add(self, instruction, kind, times, conditional, *, scattered: bool = False) -> None:
        groups = parse_groups(instruction.attributes, self.partitions)
        pairs = kind == "collective-permute"
        group = 2 if pairs else max((len(g) for g in groups), default=1) if groups else 0
        if groups is not None and group < 2:
            return
        types = _payload_types(instruction, kind)
        payload = sum(type_bytes(t) for t in types)
        if instruction.op == "reduce-scatter" and not scattered:
            payload *= max(group, 1)  # its result is one part of what went in
        found = re.search(r'op_name="([^"]*)"', instruction.attributes)
        self.collectives.append(
            Collective(
                kind=kind,
                axes=group_axes(groups, self.mesh, pairs=pairs),
                group=group,
                executions=times,
                payload=payload,
                conditional=conditional,
                source=found[1] if found else "",
                shapes=tuple(
                    f"{dtype}[{','.join(map(str, dims))}]"
                    for t in types
                    for dtype, dims, _ in arrays(t)
                ),
            )
        )

    def _add_between_slices(self, instruction, kind, times, conditional) -> None:
        """A collective between TPU slices: handed to the host, which has the network."""
        axes, slices = (UNKNOWN,), 0
        if self.mesh is not None:
            numbers = np.vectorize(slice_of)(self.mesh.devices)
            slices = len(set(numbers.flat))
            axes = tuple(
                axis
                for d, axis in enumerate(self.mesh.axis_names)
                if (np.diff(numbers, axis=d) != 0).any()
            )
        sent = split_tuple(instruction.type)[0]
        self.collectives.append(
            Collective(
                kind=kind,
                axes=axes or (UNKNOWN,),
                group=slices,
                executions=times,
                payload=type_bytes(sent),
                conditional=conditional,
                source="between slices",
                shapes=tuple(
                    f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims, _ in arrays(sent)
                ),
            )
        )

    def _calls(self, instruction: Instruction) -> list[Computation]:
        names = [instruction.attribute("calls")]
        if instruction.op == "call":
            names.append(instruction.attribute("to_apply"))
        return [self.computations[n] for n in names if n in self.computations]

    def _branches(self, instruction: Instruction) -> list[Computation]:
        names = [instruction.attribute(f"{b}_computation") for b in ("true", "false")]
        if found := re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes):
            names = re.findall(r"%?([\w.\-]+)", found[1])
        return [self.computations[n] for n in names if n in self.computations]

    # Loops.

    def _trips(self, computation: Computation, loop: Instruction) -> int | None:
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(found[1])
        condition = self.computations[loop.attribute("condition")]
        return self._counted(computation, loop, condition)

    def _counted(self, computation, loop, condition: Computation) -> int | None:
        """Trips of a loop whose condition is ``counter < constant``."""
        test = condition.root
        while test.op in ("bitcast", "copy", "convert") and test.operands:
            test = condition.instructions[test.operands[0]]
        if test.op == "fusion" and (called := self._calls(test)):
            names = dict(zip((p.name for p in called[0].parameters), test.operands, strict=True))
            inner = called[0].root
            operands = [names.get(o, o) for o in inner.operands]
            scope = called[0].instructions | condition.instructions
            test = inner
        else:
            operands, scope = list(test.operands), condition.instructions
        if test.op != "compare" or "direction=LT" not in test.attributes or len(operands) != 2:
            return None
        counter, bound = (scope.get(o) for o in operands)
        if counter is None or bound is None or bound.op != "constant":
            return None
        if counter.op != "get-tuple-element" or not re.fullmatch(r"-?\d+", bound.literal):
            return None
        index = int(counter.attribute("index"))
        start, step = self._start(computation, loop, index), self._step(loop, index)
        if start is None or step is None or step < 1:
            return None
        return max(0, -(-(int(bound.literal) - start) // step))

    def _start(self, computation, loop, index: int) -> int | None:
        carry = computation.instructions.get(loop.operands[0])
        if carry is None or carry.op != "tuple":
            return None
        return _constant(computation, carry.operands[index])

    def _step(self, loop, index: int) -> int | None:
        body = self.computations[loop.attribute("body")]
        if body.root.op != "tuple":
            return None
        new = body.instructions.get(body.root.operands[index])
        while new is not None and new.op in ("copy", "bitcast", "copy-done", "copy-start"):
            new = body.instructions.get(new.operands[0])
        if new is None:
            return None
        if new.op == "add":
            found = [_constant(body, o) for o in new.operands]
            return next((c for c in found if c is not None), None)
        if new.op == "fusion" and (called := self._calls(new)):
            adds = [i for i in called[0].instructions.values() if i.op == "add"]
            if len(adds) == 1:
                names = dict(zip((p.name for p in called[0].parameters), new.operands, strict=True))
                for operand in adds[0].operands:
                    value = _constant(called[0], operand)
                    value = _constant(body, names[operand]) if operand in names else value
                    if value is not None:
                        return value
        return None

    def _kept(self, computation: Computation) -> int:
        """Bytes that one loop of a computation stacks and a later one reads."""
        total = 0
        stacked: dict[tuple[str, int], int] = {}
        loops = [i for i in computation.instructions.values() if i.op == "while"]
        for loop in loops:
            trips = self._trips(computation, loop)
            carry = computation.instructions.get(loop.operands[0])
            if carry is not None and carry.op == "tuple":
                for operand in carry.operands:
                    origin = _origin(computation, operand)
                    if origin in stacked:
                        total += stacked.pop(origin)
            body = self.computations[loop.attribute("body")]
            if body.root.op != "tuple" or not trips:
                continue
            for index, (operand, array) in enumerate(
                zip(body.root.operands, arrays(loop.type), strict=False)
            ):
                dtype, dims, _ = array
                if dims and dims[0] == trips and _origin(body, operand) is None:
                    new = body.instructions[operand]
                    if not _passes(body, new, index):
                        stacked[loop.name, index] = math.prod(dims) * bits(dtype) // 8
        return total

    # Memory traffic.

    def _traffic(self, computation: Computation, instruction: Instruction) -> int:
        written = type_bytes(instruction.type, fast_memory=False)
        if instruction.op in ("dynamic-slice", "slice", "gather"):
            return 2 * written
        if instruction.op in ("dynamic-update-slice", "scatter"):
            update = instruction.operands[1 if instruction.op == "dynamic-update-slice" else -1]
            return 2 * _slow_bytes(computation, update)
        if instruction.op in ("copy-start", "send", "recv"):
            return _slow_bytes(computation, instruction.operands[0]) if instruction.operands else 0
        if instruction.op in ("broadcast", "rng-bit-generator"):
            return written
        return written + sum(_slow_bytes(computation, o) for o in set(instruction.operands))

    def _fusion_traffic(self, computation: Computation, fusion: Instruction) -> int:
        called = self._calls(fusion)
        if not called:
            return self._traffic(computation, fusion)
        inner = called[0]
        read = sum(
            min(_slow_bytes(computation, operand), _used_bytes(inner, parameter))
            for operand, parameter in zip(fusion.operands, inner.parameters, strict=False)
        )
        results = [inner.root]
        if inner.root.op == "tuple":
            results = [inner.instructions[o] for o in inner.root.operands]
        types = split_tuple(fusion.type) if inner.root.op == "tuple" else [fusion.type]
        written = 0
        for result, result_type in zip(results, types, strict=False):
            size = type_bytes(result_type, fast_memory=False)
            while result.op in ("bitcast", "convert", "copy") and result.operands:
                result = inner.instructions[result.operands[0]]
            if result.op == "dynamic-update-slice":
                size = min(size, inner.instructions[result.operands[1]].bytes)
            written += 0 if result.op == "parameter" else size
        return read + written


def _starts(computation: Computation) -> bool:
    """Whether a fusion starts a TPU's asynchronous collective."""
    return any(
        i.op == "custom-call" and "AsyncCollectiveStart" in i.attributes
        for i in computation.instructions.values()
    )


def _collective_kind(instruction: Instruction) -> str | None:
    kind = instruction.op.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _between_slices(instruction: Instruction) -> str | None:
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    return found[1].lower().replace("_", "-") if found else None


def _payload_types(instruction: Instruction, kind: str) -> list[str]:
    """The types of an operation's results; of its operands, for a reduce-scatter-start."""
    parts = split_tuple(instruction.type)
    if instruction.op.endswith("-start") and kind != "all-reduce":
        # A start's type is (operands, results, and what the hardware needs).
        parts = split_tuple(parts[0 if kind == "reduce-scatter" else 1])
    return parts


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.op in ("copy", "bitcast", "convert"):
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None or instruction.op != "constant":
        return None
    return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None


def _origin(computation: Computation, name: str) -> tuple[str, int] | None:
    """Which element of which loop's result this is, unchanged; None if it is not one."""
    while (instruction := computation.instructions.get(name)) is not None:
        if instruction.op == "get-tuple-element":
            index = int(instruction.attribute("index"))
            source = computation.instructions.get(instruction.operands[0])
            if source is not None and source.op == "while":
                return source.name, index
            if source is not None and source.op in ("opt-barrier", "optimization-barrier"):
                source = computation.instructions.get(source.operands[0])
            if source is None or source.op != "tuple":
                return None
            name = source.operands[index]
        elif instruction.op in _PASSING and instruction.operands:
            name = instruction.operands[0]
        else:
            return None
    return None


def _passes(body: Computation, instruction: Instruction, index: int) -> bool:
    """Whether a loop's body returns element ``index`` of its carry as it came."""
    while instruction.op in ("bitcast", "copy", "copy-done", "copy-start") and instruction.operands:
        instruction = body.instructions[instruction.operands[0]]
    if instruction.op != "get-tuple-element":
        return False
    source = body.instructions[instruction.operands[0]]
    return source.op == "parameter" and int(instruction.attribute("index")) == index


def _slow_bytes(computation: Computation, name: str) -> int:
    instruction = computation.instructions.get(name)
    return type_bytes(instruction.type, fast_memory=False) if instruction else 0


def _used_bytes(inner: Computation, parameter: Instruction) -> int:
    """How much of a fusion's parameter is read: slices count as what they take."""
    total = 0
    for user in _through_bitcasts(inner, parameter):
        if user.op in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.op == "dynamic-update-slice" and _reaches(inner, user.operands[0], parameter):
            continue  # updated in place
        else:
            return parameter.bytes
    return total


def _through_bitcasts(inner: Computation, instruction: Instruction) -> Iterator[Instruction]:
    users = inner.users.get(instruction.name, [])
    yield from itertools.chain.from_iterable(
        _through_bitcasts(inner, user) if user.op == "bitcast" else [user] for user in users
    )


def _reaches(inner: Computation, name: str, parameter: Instruction) -> bool:
    instruction = inner.instructions[name]
    while instruction.op == "bitcast":
        instruction = inner.instructions[instruction.operands[0]]
    return instruction is parameter
