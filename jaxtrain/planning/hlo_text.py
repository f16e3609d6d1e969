"""The text of a compiled program as instructions: XLA's HLO, as every backend writes it."""

import dataclasses
import functools
import math
import re


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line ``name = type op(operands), attributes``; ``literal`` is what is in the brackets."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    literal: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """The word after ``name=`` (the first of several), or None."""
        found = re.search(rf"\b{name}=\{{?%?([\w.\-]+)", self.attributes)
        return found and found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's result."""
        *_, last = self.instructions.values()
        return next((i for i in self.instructions.values() if i.root), last)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Parameters in the order of their numbers."""
        found = [i for i in self.instructions.values() if i.op == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+\d+[a-z0-9]*|token|opaque)\[([\d,<=]*)\]")


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns a program's computations by name, and the name of the one that it starts with. Raises
    ValueError where there is none."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: dict[str, Instruction] | None = None
    name = ""
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule") and " -> " in line:
                name, current = header[2], {}
                entry = name if header[1] else entry
        # A Pallas kernel's attributes go over several lines, of which one starts with two braces.
        elif line.startswith("}") and not line.startswith("}}"):
            computations[name] = Computation(name, current)
            current = None
        elif instruction := _parse_line(line):
            current[instruction.name] = instruction
    if entry not in computations:
        raise ValueError("this is no compiled program's text: it has no ENTRY computation")
    return computations, entry


def _parse_line(line: str) -> Instruction | None:
    found = _NAME.match(line)
    if not found:
        return None
    rest = line[found.end() :]
    end = _balanced(rest) if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.find("(")
    if start < 0:
        return None
    inside = _balanced(rest[start:])
    literal = rest[start + 1 : start + inside - 1]
    return Instruction(
        name=found[2],
        type=kind,
        op=rest[:start],
        # With their types or without, with % or without.
        operands=tuple(o.split()[-1].lstrip("%") for o in split_tuple(f"({literal})")),
        attributes=rest[start + inside :],
        literal=literal,
        root=found[1] is not None,
    )


def _balanced(text: str) -> int:
    """The end of the bracket that ``text`` starts with."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return position + 1
    return len(text)


def arrays(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays in a type: (dtype, sizes)."""
    return [
        (dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(type_text)
    ]


def type_bytes(type_text: str) -> int:
    """Bytes of an HLO type: ``f32[2,3]{1,0}``, or a tuple of such.

    >>> type_bytes("(bf16[4,8]{1,0:T(8,128)}, f32[])")
    68
    """
    return sum(math.prod(dims) * _bits(dtype) // 8 for dtype, dims in arrays(type_text))


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else int(digits[0]) if digits else 0


def partitions_of(text: str) -> int:
    """Devices that a program runs on."""
    found = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
    return int(found[1]) if found else 1


def split_tuple(type_text: str) -> list[str]:
    """The members of a tuple type; any other type alone."""
    if not type_text.startswith("("):
        return [type_text]
    members, depth, start = [], 0, 1
    for position, letter in enumerate(type_text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            members.append(re.sub(r"/\*.*?\*/", "", type_text[start:position]).strip())
            start = position + 1
        if depth == 0:
            break
    return [m for m in members if m]
