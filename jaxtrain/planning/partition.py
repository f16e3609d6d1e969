"""The partitioner of the walk: how values lie on a mesh, and what it costs to move them.

A spec has the mesh axes of every dimension. Axes of size 1 split nothing and are left out.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.planning.roofline import ring_share
from jaxtrain.sharding.specs import entries_of, names_of

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]

REDUCTIONS = frozenset(
    [
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        *("argmax", "argmin", "reduce"),
    ]
)


@dataclasses.dataclass
class Cost:
    """Work of one device in one step.

    Args:
      flops: FLOPs of products, by their kind (``"matmul"``, convolutions included, or
        ``"attention"``, any fused kernel) and the dtype of their operands.
      hot_flops: those that a device has more for each time the mean of tokens that the hottest
        expert has above it.
      product_bytes: bytes that products and kernels read and write in the device's memory.
      other_bytes: bytes that everything else reads and writes, unless it is fused away.
      wire_bytes: bytes that one device sends, by (kind of collective, mesh axes).
      wire_times: collectives that it sends them in, by the same.
      unknown: primitives whose operations are not known, see :class:`.flops.Flops`.
    """

    flops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    hot_flops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    wire_bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wire_times: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    unknown: set[str] = dataclasses.field(default_factory=set)

    @property
    def hbm_bytes(self) -> float:
        """All that is read and written."""
        return self.product_bytes + self.other_bytes

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Adds another cost, ``times`` over."""
        for name in ("flops", "hot_flops", "wire_bytes", "wire_times"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] += value * times
        self.product_bytes += other.product_bytes * times
        self.other_bytes += other.other_bytes * times
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
      summed: mesh axes over which it was added up on its way here, and not touched since.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: Spec
    roots: frozenset = frozenset()
    fused: bool = False
    free: bool = False
    stored: bool = False
    part: bool = False
    summed: Axes = ()


class Partitioner:
    """Specs, sizes and traffic on one mesh; ``cost`` is what has been sent so far, and what else is
    counted.

    Args:
      parameters: spec by shape, of parameters and of their layers: how gradients will lie.
    """

    def __init__(self, mesh: Mapping[str, int], parameters: Mapping[tuple, Spec]):
        self.mesh = {axis: size for axis, size in mesh.items() if size > 1}
        self.parameters = parameters
        self.cost = Cost()

    def parts(self, axes: Iterable[str]) -> int:
        """Into how many parts these axes split."""
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def size(self, shape: Sequence[int], dtype: Any, spec: Spec) -> int:
        """Bytes of one device."""
        local = (-(-n // self.parts(axes)) for n, axes in zip(shape, spec, strict=True))
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return math.prod(local) * (8 if is_key else dtype.itemsize)

    def bytes(self, value: Value) -> int:
        """Bytes of one device."""
        return self.size(value.shape, value.dtype, value.spec)

    def fit(self, shape: Sequence[int], wanted: Sequence[Axes]) -> Spec:
        """Drops axes that the mesh lacks, the second use of one, and those that do not divide."""
        used: set[str] = set()
        spec = []
        for n, axes in zip(shape, wanted, strict=True):
            axes = tuple(a for a in axes if a in self.mesh and a not in used)
            if n % self.parts(axes):
                axes = ()
            used.update(axes)
            spec.append(axes)
        return tuple(spec)

    # Traffic. Bytes are what one device sends in a ring.

    def send(self, kind: str, axes: Axes, size: float, *, times: int = 1) -> None:
        """Counts a collective over axes; ``size`` is that of the whole (gathered, summed) array.

        ``times`` is -1 for an all-reduce of a value that turns out to be added up otherwise.
        """
        if (n := self.parts(axes)) > 1:
            self.cost.wire_bytes[kind, axes] += times * ring_share(kind, n) * size
            self.cost.wire_times[kind, axes] += times

    def reshard(self, value: Value, spec: Spec) -> int:
        """Lays a value out anew, and returns the bytes of a gathered copy (0 for none)."""
        before = {a: d for d, axes in enumerate(value.spec) for a in axes}
        after = {a: d for d, axes in enumerate(spec) for a in axes}
        gathered = tuple(a for a in self.mesh if a in before and a not in after)
        moved = tuple(a for a in self.mesh if a in after and before.get(a, after[a]) != after[a])
        size = self.size(value.shape, value.dtype, spec)
        if value.free or not (gathered or moved):
            return 0
        self.send("all-gather", gathered, size)
        self.send("all-to-all", moved, self.bytes(value))
        return size

    def scatter(self, value: Value, spec: Spec) -> bool:
        """Whether a sum that is laid out anew is scattered: each device keeps a part of it."""
        before = {a for axes in value.spec for a in axes}
        cut = {a for axes in spec for a in axes} - before
        if not value.summed or cut != set(value.summed):
            return False
        self.send("all-reduce", value.summed, self.bytes(value), times=-1)
        self.send("reduce-scatter", value.summed, self.bytes(value))
        return True

    def add_up(
        self, shape: tuple[int, ...], dtype: Any, spec: Spec, partial: Axes
    ) -> tuple[Spec, int]:
        """Adds up partial results over mesh axes.

        A gradient is scattered over those of them that split its parameter. Returns how the sum
        lies, and the bytes of the whole where only a part of it stays.
        """
        if not partial:
            return spec, 0
        final, scattered = spec, ()
        if (goal := self.parameters.get(shape)) is not None:
            wanted = [
                tuple(dict.fromkeys((*have, *(a for a in want if a in partial))))
                for have, want in zip(spec, goal, strict=True)
            ]
            final = self.fit(shape, wanted)
            scattered = tuple(a for a in partial if any(a in axes for axes in final))
        whole = self.size(shape, dtype, spec)
        self.send("reduce-scatter", scattered, whole)
        rest = tuple(a for a in partial if a not in scattered)
        self.send("all-reduce", rest, self.size(shape, dtype, final))
        return final, whole if scattered else 0

    def product(
        self, lhs: Value, rhs: Value, dimensions: Any, shape: tuple[int, ...], dtype: Any
    ) -> tuple[Spec, Axes, int]:
        """Partitions a product, with dimensions as :func:`.flops.product_dimensions` returns them.

        An axis splits one thing: the smaller operand (or a weight) is gathered along axes that
        split the other one's own rows, and its own rows are along axes that the other is contracted
        over. Returns how the result lies, the axes that split the work, and bytes needed meanwhile:
        gathered copies, and a sum of which a part stays.
        """
        (left_rows, right_rows), (lc, rc), (lb, rb), groups = dimensions
        left, right = list(lhs.spec), list(rhs.spec)
        copied = 0
        for d in groups:
            # Any row may need any group.
            self.send("all-gather", right[d], self.bytes(rhs) * self.parts(right[d]))
            right[d] = ()
        for a, b in zip(lb, rb, strict=True):
            left[a] = right[b] = left[a] or right[b]
        left_gives = self.bytes(lhs) < self.bytes(rhs)
        if lhs.stored != rhs.stored:
            left_gives = lhs.stored
        sides = [(lhs, left, left_rows, lc), (rhs, right, right_rows, rc)]
        (value, gives, rows, summed), (_, stays, its_rows, its_summed) = (
            sides if left_gives else sides[::-1]
        )
        taken = {a for d in its_rows for a in stays[d]}
        contracted = {a for d in its_summed for a in stays[d]}
        gathered = []
        for d, lost in [(d, taken | contracted) for d in rows] + [(d, taken) for d in summed]:
            gathered += [a for a in gives[d] if a in lost]
            gives[d] = tuple(a for a in gives[d] if a not in lost)
        if gathered:
            copied = self.size(value.shape, value.dtype, tuple(gives))
            self.send("all-gather", tuple(dict.fromkeys(gathered)), copied)
        # Either side of a contracted dimension may be cut as the other one is.
        over = [a for i, j in zip(lc, rc, strict=True) for a in left[i] or right[j]]
        wanted = [left[d] for d in (*lb, *left_rows)] + [right[d] for d in right_rows]
        # Rows that are contracted group by group make a leading dimension of groups.
        spec = self.fit(shape, [()] * (len(shape) - len(wanted)) + wanted)
        used = [a for axes in spec for a in axes]
        partial = tuple(dict.fromkeys(a for a in over if a not in used))
        final, whole = self.add_up(shape, dtype, spec, partial)
        return final, (*used, *partial), copied + whole

    # How results lie.

    def along(self, name: str, params: Mapping, inputs: Sequence[Value], shape: tuple) -> Spec:
        """The spec of a result that lies as its operands do; sends sums over split dimensions."""
        first = inputs[0] if inputs else None
        if name == "broadcast_in_dim":
            wanted = [()] * len(shape)
            places = params["broadcast_dimensions"]
            for at, n, axes in zip(places, first.shape, first.spec, strict=True):
                wanted[at] = axes if n == shape[at] else ()
            return self.fit(shape, wanted)
        if name in ("stack", "unstack") and first is not None:  # an axis more, or one less
            at, wanted = params["axis"], list(first.spec)
            wanted[at : at + (name == "unstack")] = [()] * (name == "stack")
            return self.fit(shape, wanted)
        if name in REDUCTIONS and first is not None:
            gone = set(params["dimensions" if name == "reduce" else "axes"])
            spec = self.fit(shape, [axes for d, axes in enumerate(first.spec) if d not in gone])
            over = tuple(a for d in sorted(gone) for a in first.spec[d])
            self.send("all-reduce", over, self.size(shape, first.dtype, spec))
            return spec
        # Per dimension, the axes of the first operand that is split there.
        alike = [v for v in inputs if len(v.shape) == len(shape) and not v.free]
        wanted = [
            () if n == 1 else next((v.spec[d] for v in alike if v.spec[d] and v.shape[d] > 1), ())
            for d, n in enumerate(shape)
        ]
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


def spec_of(leaf: Any) -> Spec:
    """The mesh axes per dimension of an array, or a shape; none where it has no sharding."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", ())
    return tuple(map(names_of, entries_of(spec, len(leaf.shape))))


def _groups(old: tuple, new: tuple) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes with equal products: (old, new) each."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        a, b, left, right = old[i], new[j], [i], [j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(old):
                a, i = a * old[i], i + 1
                left.append(i - 1)
            elif a > b and j < len(new):
                b, j = b * new[j], j + 1
                right.append(j - 1)
            else:
                return groups
        groups.append((left, right))
    return groups
