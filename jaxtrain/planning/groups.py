"""Which devices take part in a collective together, and along which mesh axes that is."""

import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

UNKNOWN = "?"


def parse_groups(attributes: str, partitions: int) -> list[tuple[int, ...]] | None:
    """Reads which devices take part together; None where it is written in an unknown way.

    Args:
      attributes: what follows an instruction's operands.
      partitions: devices of the program.

    >>> parse_groups("replica_groups=[2,2]<=[2,2]T(1,0), x=1", 4)
    [(0, 2), (1, 3)]
    >>> parse_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
    [(0, 1), (2, 3)]
    """
    if found := re.search(r"source_target_pairs=\{(.*?\})\}", attributes):
        return _lists(found[1])
    if found := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return _lists(found[1]) or [tuple(range(partitions))]
    if found := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        ids = _iota(found[2], found[3])
        return [tuple(row) for row in ids.reshape(_numbers(found[1])).tolist()]
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", attributes):
        return _mesh_groups(*found.groups())
    return None


def _lists(text: str) -> list[tuple[int, ...]]:
    return [tuple(_numbers(part)) for part in re.findall(r"\{([\d,]*)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _iota(reshape: str, transpose: str | None) -> np.ndarray:
    sizes = _numbers(reshape)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(transpose)) if transpose else ids


def _mesh_groups(axes: str, order: str, used: str) -> list[tuple[int, ...]] | None:
    names, sizes = [], []
    for name, size in re.findall(r"'([^']*)'=(\d+)", axes):
        names.append(name)
        sizes.append(int(size))
    ids = np.arange(math.prod(sizes))
    if "device_ids" in order:
        if iota := re.search(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order):
            ids = _iota(iota[1], iota[2]).reshape(-1)
        elif listed := re.search(r"\(([\d,]+)\)", order):
            ids = np.array(_numbers(listed[1]))
        if ("(" in order and not (iota or listed)) or ids.size != math.prod(sizes):
            return None
    # An axis may take part with a factor of its size: 'a':(m)k is the k after the first m.
    shape, dims_used = [], []
    parts = {
        name: (int(pre or 0), int(size or 0))
        for name, pre, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", used)
    }
    for name, size in zip(names, sizes, strict=True):
        pre, inner = parts.get(name, (0, 0))
        split = (pre, inner, size // (pre * inner)) if inner else (size,)
        if name in parts:
            dims_used.append(len(shape) + (1 if inner else 0))
        shape.extend(split)
    if set(parts) - set(names):
        return None
    rest = [d for d in range(len(shape)) if d not in dims_used]
    grid = ids.reshape(shape).transpose([*rest, *dims_used])
    return [tuple(row) for row in grid.reshape(-1, math.prod(shape[d] for d in dims_used)).tolist()]


def group_axes(
    groups: Sequence[Sequence[int]] | None, mesh: Mesh | None, *, pairs: bool = False
) -> tuple[str, ...]:
    """Names the mesh axes along which groups of devices extend.

    Args:
      groups: positions in ``mesh.devices.flat`` that take part together.
      mesh: the mesh.
      pairs: the groups are (source, target): axes along which anything moves.

    Returns:
      Axes of size above 1, outermost first; ``("?",)`` where the groups are not whole axes.
    """
    if groups is None or mesh is None or any(d >= mesh.size for g in groups for d in g):
        return (UNKNOWN,)
    shape = tuple(mesh.shape.values())
    varying: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        here = {int(d) for d in np.flatnonzero((places != places[:, :1]).any(axis=1))}
        if not pairs and math.prod(shape[d] for d in here) != len(set(group)):
            return (UNKNOWN,)
        varying |= here
    if not pairs and any(len(g) != math.prod(shape[d] for d in varying) for g in groups):
        return (UNKNOWN,)
    names = tuple(mesh.shape)
    return tuple(names[d] for d in sorted(varying))
