"""How values lie on a mesh, and what it costs to move them: the partitioner of the walk.

A spec has the mesh axes of every dimension. Axes of size 1 split nothing and are left out.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]

REDUCTIONS = frozenset(
    [
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        *("argmax", "argmin"),
    ]
)


@dataclasses.dataclass
class Cost:
    """What one device does in one step.

    Args:
      flops: of matrix products and convolutions, by dtype of their operands.
      hbm_bytes: read and written by everything that is not fused away.
      wire_bytes: sent by one device, by (kind of collective, mesh axes).
      wire_count: executions, by the same.
      unknown: primitives whose operations are not known, see :class:`.flops.Flops`.
    """

    flops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    hbm_bytes: float = 0.0
    wire_bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wire_count: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unknown: set[str] = dataclasses.field(default_factory=set)

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Adds another cost, ``times`` over."""
        for name in ("flops", "wire_bytes", "wire_count"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] += value * times
        self.hbm_bytes += other.hbm_bytes * times
        self.unknown |= other.unknown


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the jaxpr.

    Args:
      shape, dtype: the global ones (in a manual region, those of the region).
      spec: mesh axes per dimension.
      roots: the buffers that must live for it to be read.
      fused: it is element-wise work on its roots, not (part of) a buffer as it lies.
      free: it needs nothing to be made again: constants, counters, broadcast scalars.
      stored: it comes from the state alone: a parameter, its cast, a slice of it.
      part: it is a slice of a buffer.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: Spec
    roots: frozenset = frozenset()
    fused: bool = False
    free: bool = False
    stored: bool = False
    part: bool = False


@dataclasses.dataclass
class Operand:
    """One side of a product: dimensions it is contracted over, and those of its own rows."""

    value: Value
    contracted: Sequence[int]
    rows: Sequence[int]
    spec: list[Axes]


class Partitioner:
    """Specs, sizes and traffic on one mesh.

    Args:
      mesh: sizes of mesh axes.
      parameters: spec by shape, of parameters and of their layers: how gradients will lie.

    Attributes:
      cost: what has been sent so far, and what else is counted.
    """

    def __init__(self, mesh: Mapping[str, int], parameters: Mapping[tuple, Spec]):
        self.mesh = {axis: size for axis, size in mesh.items() if size > 1}
        self.parameters = parameters
        self.cost = Cost()

    # Sizes.

    def parts(self, axes: Iterable[str]) -> int:
        """Into how many parts these axes split."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def size(self, shape: Sequence[int], dtype: Any, spec: Spec) -> int:
        """Bytes of one device."""
        local = (-(-n // self.parts(axes)) for n, axes in zip(shape, spec, strict=True))
        return math.prod(local) * _itemsize(dtype)

    def bytes(self, value: Value) -> int:
        """Bytes of one device."""
        return self.size(value.shape, value.dtype, value.spec)

    def traffic(self, value: Value) -> int:
        """Bytes read for a value: of each buffer it is made of, as much as it has elements."""
        if value.free:
            return 0
        if not value.fused or not value.roots:
            return self.bytes(value)
        most = self.size(value.shape, np.dtype(np.float32), value.spec)
        return sum(min(root.size, most) for root in value.roots)

    def argument(self, aval: Any, spec: Spec) -> Value:
        """A value whose memory is counted elsewhere."""
        spec = tuple(tuple(a for a in axes if a in self.mesh) for axes in spec)
        spec += ((),) * (len(aval.shape) - len(spec))
        return Value(tuple(aval.shape), aval.dtype, spec)

    def fit(self, shape: Sequence[int], wanted: Sequence[Axes]) -> Spec:
        """Drops what does not divide, and the second use of an axis."""
        used: set[str] = set()
        spec = []
        for n, axes in zip(shape, wanted, strict=True):
            axes = tuple(a for a in axes if a not in used)
            if n % self.parts(axes):
                axes = ()
            used.update(axes)
            spec.append(axes)
        return tuple(spec)

    # Traffic. Bytes are what one device sends in a ring.

    def send(self, kind: str, axes: Axes, size: float) -> None:
        """Counts a collective over axes; ``size`` is that of the whole (gathered, summed) array."""
        n = self.parts(axes)
        if n == 1:
            return
        factor = {"all-reduce": 2 * (n - 1) / n, "ppermute": 1.0}.get(kind, (n - 1) / n)
        self.cost.wire_bytes[kind, axes] += factor * size
        self.cost.wire_count[kind, axes] += 1

    def reshard(self, value: Value, spec: Spec) -> tuple[Value, int]:
        """Lays a value out anew; returns it and the bytes of a gathered copy (0 for none)."""
        before = {a for axes in value.spec for a in axes}
        after = {a for axes in spec for a in axes}
        gathered = tuple(a for a in self.mesh if a in before - after)
        moved = tuple(
            a for a in self.mesh if a in before & after and _place(value.spec, a) != _place(spec, a)
        )
        size = self.size(value.shape, value.dtype, spec)
        if not value.free:
            self.send("all-gather", gathered, size)
            self.send("all-to-all", moved, self.bytes(value))
        copied = size if (gathered or moved) and not value.free else 0
        return dataclasses.replace(value, spec=spec), copied

    def along(self, name: str, equation: Any, inputs: list[Value], shape: tuple) -> Spec:
        """The spec of a result that lies as its operands do."""
        params = equation.params
        if name == "broadcast_in_dim":
            wanted = [()] * len(shape)
            for at, n, axes in zip(
                params["broadcast_dimensions"], inputs[0].shape, inputs[0].spec, strict=True
            ):
                wanted[at] = axes if n == shape[at] else ()
            return self.fit(shape, wanted)
        if name in REDUCTIONS and inputs:
            gone = set(params["axes"])
            value = inputs[0]
            wanted = [axes for d, axes in enumerate(value.spec) if d not in gone]
            over = tuple(a for d in sorted(gone) for a in value.spec[d])
            spec = self.fit(shape, wanted)
            self.send("all-reduce", over, self.size(shape, value.dtype, spec))
            return spec
        return self.merged(inputs, shape)

    def merged(self, inputs: list[Value], shape: tuple) -> Spec:
        """Per dimension, the axes of the largest operand that is split there."""
        alike = [v for v in inputs if len(v.shape) == len(shape) and not v.free]
        alike.sort(key=lambda v: (not v.roots, -math.prod(v.shape)))
        wanted = []
        for d, n in enumerate(shape):
            wanted.append(next((v.spec[d] for v in alike if v.spec[d] and v.shape[d] > 1), ()))
            if n == 1:
                wanted[-1] = ()
        return self.fit(shape, wanted)

    def reshaped(self, value: Value, shape: tuple) -> Spec:
        """Axes follow the dimensions that are merged or cut; those that no longer divide go."""
        wanted: list[Axes] = [()] * len(shape)
        for old, new in _groups(value.shape, shape):
            axes = [a for d in old for a in value.spec[d]]
            for d in new:
                mine: list[str] = []
                while axes and shape[d] % self.parts([*mine, axes[0]]) == 0:
                    mine.append(axes.pop(0))
                wanted[d] = tuple(mine)
        return self.fit(shape, wanted)

    def scatter(self, shape: tuple, spec: Spec, partial: Axes) -> tuple[Spec, Axes]:
        """How a gradient lies: over the axes of its sum that split its parameter."""
        goal = self.parameters.get(shape)
        if goal is None or not partial:
            return spec, ()
        wanted = [
            tuple(dict.fromkeys((*have, *(a for a in want if a in partial))))
            for have, want in zip(spec, goal, strict=True)
        ]
        final = self.fit(shape, wanted)
        used = {a for axes in final for a in axes}
        return final, tuple(a for a in partial if a in used)

    def sum_up(
        self, shape: tuple[int, ...], dtype: Any, spec: Spec, partial: Axes
    ) -> tuple[Spec, int]:
        """Adds up partial results over mesh axes.

        Returns:
          How the sum lies, and the bytes of the whole where only a part of it stays.
        """
        if not partial:
            return spec, 0
        final, scattered = self.scatter(shape, spec, partial)
        whole = self.size(shape, dtype, spec)
        self.send("reduce-scatter", scattered, whole)
        rest = tuple(a for a in partial if a not in scattered)
        self.send("all-reduce", rest, self.size(shape, dtype, final))
        return final, whole if scattered else 0

    def give_way(self, gives: "Operand", stays: "Operand") -> int:
        """Gathers what cannot be split in one operand of a product, because the other one is.

        An axis splits one thing. ``gives`` loses the axes of the other's own rows, and those of its
        own rows that the other is contracted over.

        Returns:
          The bytes of the gathered copy, 0 for none.
        """
        rows = {a for d in stays.rows for a in stays.spec[d]}
        summed = {a for d in stays.contracted for a in stays.spec[d]}
        gathered = []
        for d, lost in [(d, rows | summed) for d in gives.rows] + [
            (d, rows) for d in gives.contracted
        ]:
            gathered += [a for a in gives.spec[d] if a in lost]
            gives.spec[d] = tuple(a for a in gives.spec[d] if a not in lost)
        if not gathered:
            return 0
        whole = self.size(gives.value.shape, gives.value.dtype, tuple(gives.spec))
        self.send("all-gather", tuple(dict.fromkeys(gathered)), whole)
        return whole


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8
    return dtype.itemsize


def axis_names(entry: Any) -> Axes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _place(spec: Spec, axis: str) -> int:
    return next(d for d, axes in enumerate(spec) if axis in axes)


def _groups(old: tuple, new: tuple) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes with equal products: (old, new) each."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        a, b, left, right = old[i], new[j], [i], [j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                if i == len(old):
                    return groups
                a, i = a * old[i], i + 1
                left.append(i - 1)
            else:
                if j == len(new):
                    return groups
                b, j = b * new[j], j + 1
                right.append(j - 1)
        groups.append((left, right))
    return groups
