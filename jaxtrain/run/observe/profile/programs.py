"""Classifies the instructions of traced programs by their kind and their part of the model.

A trace holds the compiled programs (HLO) that ran, as XLA's own protocol buffers. Their fields are
read by number, from openxla/xla's ``xplane.proto`` and ``hlo.proto``; no other package that is
installed knows them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from jaxtrain.ops.attention import in_fused_kernel
from jaxtrain.planning.hlo import COLLECTIVES
from jaxtrain.planning.scopes import scopes_of

PRODUCTS, ATTENTION, CONVOLUTIONS = "matrix products", "attention", "convolutions"
KERNELS, LOOKUPS = "custom kernels", "look-ups and sorts"
ELEMENTWISE, COPIES = "element-wise and reductions", "copies"
TRANSFERS, CONTROL, OTHER, IDLE = "transfers", "loops and branches", "other", "idle"

# XLA's opcodes: what has others within it; multiplies; goes on meanwhile; only moves.
LOOPS = frozenset(["while", "conditional", "call"])
MULTIPLYING = frozenset(["dot", "ragged-dot", "convolution"])
ASYNCHRONOUS = frozenset(
    ["copy-start", "copy-done", "send", "send-done", "recv", "recv-done", "infeed", "outfeed"]
)
MOVES = frozenset(
    [
        *("copy", "transpose", "reshape", "bitcast", "concatenate", "slice", "pad", "reverse"),
        *("broadcast", "dynamic-slice", "dynamic-update-slice", "tuple", "get-tuple-element"),
        *("parameter", "constant", "fusion"),
    ]
)
# What a GPU does without an instruction, by the beginning of its name.
DEVICE_COPIES = {"MemcpyD2D": COPIES, "Memset": COPIES, "Memcpy": TRANSFERS}


class Operation(NamedTuple):
    """An instruction, as far as a profile tells them apart.

    Args:
      kind: one of the kinds above, or of :data:`jaxtrain.planning.hlo.COLLECTIVES`.
      direction: ``FORWARD``, ``RECOMPUTED``, ``BACKWARD``, or empty outside of a gradient.
      scopes: the part of the model, outermost first (``jax.named_scope``); none where XLA has noted
        none.
      name: the instruction's own.
      program: whose it is; empty where the trace does not say.
    """

    kind: str
    direction: str = ""
    scopes: tuple[str, ...] = ()
    name: str = ""
    program: str = ""


def rank(operation: Operation) -> int:
    """Ranks operations: computation hides communication, which hides transfers and loops."""
    if operation.kind in COLLECTIVES:
        return 1
    return {TRANSFERS: 2, CONTROL: 3}.get(operation.kind, 0)


def read_programs(xspace: bytes) -> dict[str, dict[str, Operation]]:
    """Reads the programs that a trace, a ``.xplane.pb`` file, holds: by the program's name
    (``jit_step(9)``), its operations by the instruction's name."""
    programs = {}
    for plane in _all(_fields(memoryview(xspace)), 1):
        fields = list(_fields(plane))
        if _text(fields, 2) != "/host:metadata":
            continue
        for entry in _all(fields, 4):
            about = list(_fields(next(_all(_fields(entry), 2), b"")))
            for stat in _all(about, 5):
                for hlo in _all(_fields(stat), 6):
                    name = _text(about, 2)
                    programs[name] = _operations(next(_all(_fields(hlo), 1), b""), name)
    return programs


def operation_of(event: str, program: str, programs: Mapping[str, Mapping]) -> Operation:
    """Looks an event up, or tells by its name what it is.

    The event is the instruction's name, or its text (``%fusion.3 = ...``), or a kernel's; the
    program is named with its number or without.
    """
    name = re.match(r"%?([^\s=]*)", event)[1]
    found = programs.get(program)
    if found is None:  # Without its number, or with another one.
        bare = program.partition("(")[0]
        same = [operations for key, operations in programs.items() if key.startswith(f"{bare}(")]
        found = next((operations for operations in same if name in operations), {}) if bare else {}
    if name in found:
        return found[name]
    for prefix, kind in DEVICE_COPIES.items():
        if name.startswith(prefix):
            return Operation(kind, name=name, program=program)
    nccl = re.match(r"nccl\w*?Kernel_(AllGather|AllReduce|ReduceScatter|SendRecv|AllToAll)", name)
    if nccl is not None:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", nccl[1]).lower()
        name = {"send-recv": "collective-permute"}.get(name, name)
    opcode = re.sub(r"[.\d]+$", "", name)
    kind = kind_of(opcode, {opcode})
    known = kind in COLLECTIVES or kind in (TRANSFERS, CONTROL)
    return Operation(kind if known else OTHER, name=name, program=program)


class _Instruction(NamedTuple):
    """An ``HloInstructionProto``: ``path`` says where in the model it comes from, ``target`` what a
    custom call calls, and ``calls`` are the numbers of computations."""

    name: str
    opcode: str
    path: str
    target: str
    calls: tuple[int, ...]


def _operations(module: Iterable[int], program: str) -> dict[str, Operation]:
    """Returns the operations of an ``HloModuleProto``, by the instruction's name."""
    computations = {}
    for computation in _all(_fields(module), 3):
        fields = list(_fields(computation))
        computations[next(_all(fields, 5), 0)] = [_instruction(each) for each in _all(fields, 2)]
    known: dict[int, list[_Instruction]] = {}

    def inside(number: int) -> list[_Instruction]:
        """Returns the instructions of a computation and of those that it calls."""
        if number not in known:
            known[number] = []  # Ends the recursion, should it ever call itself.
            for each in computations.get(number, ()):
                known[number] += [*(x for called in each.calls for x in inside(called)), each]
        return known[number]

    operations = {}
    for each in (each for instructions in computations.values() for each in instructions):
        calls = () if each.opcode in LOOPS else each.calls
        made_of = [*(x for called in calls for x in inside(called)), each]
        contents = {x.opcode for x in made_of}
        # A fusion may have no path: then it has that of its product, or of what it results in.
        products = [x.path for x in made_of if x.opcode in MULTIPLYING]
        paths = [each.path, *products, *(x.path for x in reversed(made_of))]
        path = next(filter(None, paths), "")
        kind = kind_of(each.opcode, contents, path=path, target=each.target, name=each.name)
        operations[each.name] = Operation(kind, *scopes_of(path), each.name, program)
    return operations


def _instruction(data: Iterable[int]) -> _Instruction:
    fields = list(_fields(data))
    path = _text(_fields(next(_all(fields, 7), b"")), 2)
    calls = tuple(n for each in _all(fields, 38) for n in _numbers(each))
    return _Instruction(_text(fields, 1), _text(fields, 2), path, _text(fields, 28), calls)


def kind_of(
    opcode: str, contents: Set[str], *, path: str = "", target: str = "", name: str = ""
) -> str:
    """The kind of an instruction.

    Args:
      contents: that and those of what it calls.
      path: where in the model it comes from, as JAX writes it.
      name: its own; that of what ends an asynchronous operation says which.

    >>> kind_of("fusion", {"fusion", "convolution"}, path="jit(step)/mlp/dot_general")
    'matrix products'
    """
    if opcode in LOOPS:
        return CONTROL
    if not contents & MULTIPLYING:
        for each in (*contents, re.sub(r"[.\d]+$", "", name)):
            if each.startswith("all-reduce-scatter"):
                return "reduce-scatter"
            for kind in COLLECTIVES:
                if re.match(rf"{kind}\b", each):
                    return kind
    called = f"{target} {name}".lower() if "custom-call" in contents else ""
    if in_fused_kernel(path) or re.search("mha|flash|splash|attention", called):
        return ATTENTION
    # The TPU compiler writes a matrix product as a convolution.
    if path.endswith("conv_general_dilated") or "conv" in called:
        return CONVOLUTIONS
    if contents & MULTIPLYING or re.search("gemm|matmul|dot", called):
        return PRODUCTS
    if called:
        return KERNELS
    if contents & {"gather", "scatter", "sort"}:
        return LOOKUPS
    if opcode.startswith("async-") or contents & ASYNCHRONOUS:
        return TRANSFERS
    return COPIES if contents <= MOVES else ELEMENTWISE


# Protocol buffers: pairs of a field's number and its value.


def _fields(data: Iterable[int]) -> Iterator[tuple[int, int | memoryview]]:
    data, at = memoryview(data), 0
    while at < len(data):
        tag, at = _number(data, at)
        if tag & 7 == 0:
            value, at = _number(data, at)
            yield tag >> 3, value
            continue
        size, at = _number(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
        yield tag >> 3, data[at : at + size]
        at += size


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """The number that is written from ``at`` on, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at


def _all(fields: Iterable[tuple[int, int | memoryview]], number: int) -> Iterator:
    return (value for key, value in fields if key == number)


def _text(fields: Iterable[tuple[int, int | memoryview]], number: int) -> str:
    return bytes(next(_all(fields, number), b"")).decode(errors="replace")


def _numbers(packed: int | memoryview) -> list[int]:
    """A repeated number, which may be written one by one or all together."""
    if isinstance(packed, int):
        return [packed]
    values, at = [], 0
    while at < len(packed):
        value, at = _number(packed, at)
        values.append(value)
    return values
