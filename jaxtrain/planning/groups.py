"""Which devices take part in a collective together, and along which mesh axes that is."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxtrain.sharding.mesh import slice_of, slow_parts

UNKNOWN = "?"


@dataclasses.dataclass(frozen=True)
class Grid:
    """A mesh whose axes are cut in two where a part of them crosses a slow network.

    Args:
      names: the mesh axis of each dimension.
      shape: devices along each dimension; the product is the number of the program's partitions.
      slow: whether steps along it cross the network.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    slow: tuple[bool, ...]


def make_grid(mesh: Mesh, partitions: int | None = None) -> Grid:
    """The grid of a mesh, by where its devices are.

    A program of fewer ``partitions`` than there are devices is written for one TPU slice: what
    crosses is then handed to the host, see :mod:`.hlo`.

    >>> import jax
    >>> make_grid(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])).shape
    (1, 1)
    """
    dims, parts = [], slow_parts(mesh)
    for axis, size in mesh.shape.items():
        dims += [(axis, parts[axis], True), (axis, size // parts[axis], False)]
    if partitions is not None and partitions < mesh.size:
        dims = [dim for dim in dims if not dim[2]]
    return Grid(*zip(*dims, strict=True))


def parse_groups(attributes: str, partitions: int) -> list[tuple[int, ...]] | None:
    """Reads which devices take part together; None where it is written in an unknown way.

    That is in the attributes, which follow an instruction's operands; the partitions are the
    devices of the program.

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


def parse_slices(attributes: str, mesh: Mesh | None) -> list[tuple[int, ...]] | None:
    """Reads which devices of a mesh of TPU slices take part in a transfer together.

    That is written as lists of device ids, as ``id->id``, or as ``{slices}x{devices of each}``,
    where slices count from 1. Returns positions in ``mesh.devices.flat``, or None where it is
    written in an unknown way.
    """
    found = re.search(r'_xla_megascale_target="?(\{.*?)"?,_xla_megascale', attributes)
    if not found or mesh is None:
        return None
    devices = {device.id: at for at, device in enumerate(mesh.devices.flat)}
    if product := re.fullmatch(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", found[1]):
        first, last = int(product[2]), int(product[3])
        slices = sorted({slice_of(device) for device in mesh.devices.flat})
        by_slice = [
            [at for at, d in enumerate(mesh.devices.flat) if slice_of(d) == s] for s in slices
        ]
        chosen = [by_slice[int(n) - 1][first : last + 1] for n in product[1].split(",")]
        return list(zip(*chosen, strict=True))
    groups = [re.findall(r"\d+", part) for part in re.findall(r"\{([\d,>-]+)\}", found[1])]
    if not groups or any(int(d) not in devices for group in groups for d in group):
        return None
    return [tuple(devices[int(d)] for d in group) for group in groups]


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
    groups: Sequence[Sequence[int]] | None, grid: Grid | None, *, pairs: bool = False
) -> tuple[tuple[str, ...], int]:
    """Names the mesh axes along which groups of devices, as positions in the grid, extend.

    ``pairs`` are (source, target): axes along which anything moves. Returns axes, outermost first,
    and in how many parts of the slow network a group lies; ``("?",)`` and that of all devices where
    the groups are not whole dimensions.
    """
    if grid is None:
        return (UNKNOWN,), 1
    everywhere = math.prod(n for n, slow in zip(grid.shape, grid.slow, strict=True) if slow)
    unknown = (UNKNOWN,), everywhere
    if groups is None or any(d >= math.prod(grid.shape) for g in groups for d in g):
        return unknown
    varying: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(group, grid.shape))
        here = {int(d) for d in np.flatnonzero((places != places[:, :1]).any(axis=1))}
        if not pairs and math.prod(grid.shape[d] for d in here) != len(set(group)):
            return unknown
        varying |= here
    if not pairs and any(len(g) != math.prod(grid.shape[d] for d in varying) for g in groups):
        return unknown
    across = [grid.shape[d] for d in varying if grid.slow[d]]
    islands = math.prod(across) if not pairs else 2 if across else 1
    return tuple(dict.fromkeys(grid.names[d] for d in sorted(varying))), islands
