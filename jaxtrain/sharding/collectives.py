"""Collectives over axes of which a part crosses a slow network: first inside, then across.

What a device has is reduced over the fast part of the axes first, and each sends no more than its
share across the slow part; what is gathered crosses first, in the smallest pieces. The result, and
who holds which piece of it, is that of ``jax.lax``'s own, but for the order in which is added.

The TPU compiler makes this of any collective between slices. On GPUs one ring through all hosts is
what NCCL may make of it, in which a host sends up to twice as much.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxtrain.loss import Reduction, WeightedLoss
from jaxtrain.sharding.placement import free_axes
from jaxtrain.sharding.specs import names_of, restrict
from jaxtrain.tree import PyTree, map_named

Groups = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The axes and specs of a map over axes of the batch.

    Args:
      axes: axes that the map takes over, outermost first.
      params: spec of each parameter on the mesh, by path.
      grads: spec that the gradient of each parameter is to have, by path.
      slow: number of parts across the slow network of each axis that has more than 1.
    """

    axes: tuple[str, ...] = ()
    params: Mapping[str, P] = dataclasses.field(default_factory=dict)
    grads: Mapping[str, P] = dataclasses.field(default_factory=dict)
    slow: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def places(self, specs: Mapping[str, P], tree: PyTree) -> PyTree:
        """How leaves that lie by ``specs`` come into the map, or leave it."""
        return map_named(lambda name, _: restrict(specs[name], self.axes), tree)

    def gathered(self, params: PyTree) -> PyTree:
        """Within the map: parameters, or layers of them, whole along its axes."""

        def whole(name: str, x: jax.Array) -> jax.Array:
            for d, names in self._split(self.params[name]):
                x = all_gather(x, names, d, self.slow)
            return x

        return self._on_each_device(whole, self.params, params)

    def reduced(self, grads: PyTree, more: tuple[str, ...] = ()) -> PyTree:
        """Within the map: gradients of whole parameters, summed over its axes and ``more``."""

        def summed(name: str, grad: jax.Array) -> jax.Array:
            rest = self.axes
            for d, names in self._split(self.grads[name]):
                grad = psum_scatter(grad, names, d, self.slow)
                rest = tuple(axis for axis in rest if axis not in names)
            return psum(grad, (*more, *rest), self.slow) if more or rest else grad

        return self._on_each_device(summed, self.grads, grads)

    def _split(self, spec: P) -> list[tuple[int, tuple[str, ...]]]:
        """The dimensions that the axes split, and which of them."""
        kept = enumerate(restrict(spec, self.axes))
        return [(d, names_of(entry)) for d, entry in kept if entry is not None]

    def summed_in_order(self, grads: PyTree) -> PyTree:
        """Within the map: gradients of whole parameters, summed over its axes along the tree of
        :func:`tree_sum`, of which each device keeps its part."""
        stages = exchange_stages(self.axes, self.slow)

        def summed(name: str, grad: jax.Array) -> jax.Array:
            split = self._split(self.grads[name])
            if any(stage.part is None for stage in stages):  # and all stages are this one
                return piece_of(_all_summed(grad, stages), split)
            shape, dims = [], {}
            for d, size in enumerate(grad.shape):
                axes = dict(split).get(d, ())
                keys = [(axis, part) for axis in axes for part in (0, 1)]
                dims |= {key: len(shape) + i for i, key in enumerate(keys)}
                pieces = _sizes(axes, self.slow)
                shape += [*pieces, size // math.prod(pieces)]
            whole, grad = grad.shape, grad.reshape(shape)
            scatters = lambda stage: (stage.axes[0], stage.part) in dims  # noqa: E731
            for scattered, some in itertools.groupby(stages, scatters):
                if not scattered:
                    grad = _all_summed(grad, list(some))
                    continue
                for stage in some:
                    d = dims[stage.axes[0], stage.part]
                    pieces = stage.turned(jnp.moveaxis(grad, d, 0))
                    grad = jnp.expand_dims(tree_sum(pieces), d)
            sizes = [jax.lax.axis_size(dict(split).get(d, ())) for d in range(len(whole))]
            return grad.reshape([n // size for n, size in zip(whole, sizes, strict=True)])

        return self._on_each_device(summed, self.grads, grads)

    def _on_each_device(
        self, function: Callable[[str, jax.Array], jax.Array], specs: Mapping[str, P], tree: PyTree
    ) -> PyTree:
        """``function(name, leaf)`` with the axes that the map has left taken over too.

        Of a collective on what the partitioner splits along other axes, it makes one whole first.
        """
        if not (free := free_axes(jax.sharding.get_abstract_mesh())):
            return map_named(function, tree)

        def apart(name: str, _: jax.Array) -> P:
            # A dimension that both split would be put together in another order.
            both = [restrict(specs[name], self.axes), restrict(specs[name], free)]
            return P(*(None if a is not None else b for a, b in zip(*both, strict=True)))

        places = map_named(apart, tree)
        program = jax.shard_map(
            lambda tree: map_named(function, tree),
            axis_names=set(free),
            in_specs=(places,),
            out_specs=places,
            check_vma=False,
        )
        return program(tree)

    def joined(self, loss: WeightedLoss, more: tuple[str, ...] = ()) -> WeightedLoss:
        """Within the map: the loss of the rows of all devices; all but sums are reduced in order.

        Args:
          loss: of this device's rows.
          more: further axes to sum over, along which all but one device have zeros.
        """

        def join(part: Any) -> Any:
            if not isinstance(part, Reduction):
                return jax.lax.psum(part, (*more, *self.axes))
            part = jax.lax.psum(part, more) if more else part
            every = jax.lax.all_gather(part, self.axes)
            first = jax.tree.map(lambda x: x[0], every)
            rest = jax.tree.map(lambda x: x[1:], every)
            return jax.lax.scan(lambda a, b: (a + b, None), first, rest)[0]

        return jax.tree.map(join, loss, is_leaf=lambda x: isinstance(x, Reduction))


class Stage(NamedTuple):
    """An exchange between the devices of each of some groups along mesh axes.

    Args:
      axes: names.
      groups: numbers of devices along them.
      part: 0 for the slow part of an axis, 1 for the fast one, None for whole axes.
    """

    axes: tuple[str, ...]
    groups: Groups
    part: int | None = None

    def turned(self, x: jax.Array) -> jax.Array:
        """All pieces of its own [n, c] -> its own piece of all devices of its group [n, c]."""
        return jax.lax.all_to_all(x, self.axes, 0, 0, tiled=True, **self._within)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Its own piece [c] -> all pieces of its group [n c]."""
        return jax.lax.all_gather(x, self.axes, tiled=True, **self._within)

    @property
    def _within(self) -> dict[str, Groups]:
        return {"axis_index_groups": self.groups} if len(self.groups) > 1 else {}


def exchange_stages(axes: tuple[str, ...], slow: Mapping[str, int]) -> list[Stage]:
    """Returns the exchanges by which devices sum along the tree of :func:`tree_sum`, those between
    neighbours first. A stage sums nodes of the tree if all before it are of powers of two."""
    found = [
        Stage((axis,), groups, part)
        for axis in reversed(axes)
        for part, groups in zip((1, 0), _groups((axis,), slow), strict=True)
    ]
    found = [stage for stage in found if len(stage.groups[0]) > 1]
    sizes = [len(stage.groups[0]) for stage in found]
    if any(size & (size - 1) for size in sizes[:-1]):
        return [Stage(axes, [list(range(math.prod(sizes)))])]
    return found


def tree_sum(nodes: PyTree, add: Callable[[PyTree, PyTree], PyTree] = jnp.add) -> PyTree:
    """Adds nodes, by their leading axis, along a binary tree: those that fill a power of two are
    one side of it, and the rest is the other.

    >>> float(tree_sum(jnp.array([2.0**24, 1.0, 1.0, 1.0])))
    16777218.0
    """
    count = jax.tree.leaves(nodes)[0].shape[0]
    at = lambda which: jax.tree.map(lambda x: x[which], nodes)  # noqa: E731
    if count == 1:
        return at(0)
    full = 1 << (count - 1).bit_length() - 1
    if 2 * full > count:
        return add(tree_sum(at(slice(full)), add), tree_sum(at(slice(full, None)), add))
    return tree_sum(add(at(slice(0, None, 2)), at(slice(1, None, 2))), add)


def piece_of(x: jax.Array, split: Sequence[tuple[int, tuple[str, ...]]]) -> jax.Array:
    """Within a map: a device's part of an array whose dimensions some axes split."""
    for d, names in split:
        size = x.shape[d] // jax.lax.axis_size(names)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(names) * size, size, d)
    return x


def _all_summed(x: jax.Array, stages: Sequence[Stage]) -> jax.Array:
    """The sum along the tree over the devices of some exchanges, on each of them."""
    parts = math.prod(len(stage.groups[0]) for stage in stages)
    piece = jnp.pad(x.reshape(-1), (0, -x.size % parts))
    for stage in stages:
        piece = tree_sum(stage.turned(piece.reshape(len(stage.groups[0]), -1)))
    for stage in reversed(stages):
        piece = stage.gathered(piece)
    return piece[: x.size].reshape(x.shape)


def psum(x: jax.Array, axes: tuple[str, ...], slow: Mapping[str, int]) -> jax.Array:
    """Sums over mesh axes, within ``shard_map``.

    Args:
      x: of one device. Where the fast part divides no dimension of it, it is summed in one step.
      axes: names.
      slow: over how many parts across the slow network an axis extends, where that is above 1.
    """
    inside, across = _groups(axes, slow)
    fits = [d for d, size in enumerate(x.shape) if size and size % len(across) == 0]
    if len(inside) == 1 or len(across) == 1 or not fits:
        return jax.lax.psum(x, axes)
    d = fits[0]
    x = jax.lax.psum_scatter(x, axes, scatter_dimension=d, tiled=True, axis_index_groups=inside)
    x = jax.lax.psum(x, axes, axis_index_groups=across)
    return jax.lax.all_gather(x, axes, axis=d, tiled=True, axis_index_groups=inside)


def psum_scatter(x: jax.Array, axes: tuple[str, ...], d: int, slow: Mapping[str, int]) -> jax.Array:
    """Sums over mesh axes, of which each device keeps a piece along dimension ``d``.

    Args:
      x, axes, slow: as for :func:`psum`.
      d: a dimension that the product of the axes' sizes divides.
    """
    inside, across = _groups(axes, slow)
    if len(inside) == 1 or len(across) == 1:
        return jax.lax.psum_scatter(x, axes, scatter_dimension=d, tiled=True)
    sizes, order = _slow_first(axes, slow, d)
    x = x.reshape(*x.shape[:d], *sizes, -1, *x.shape[d + 1 :])
    x = x.transpose(*range(d), *order, *range(d + len(sizes), x.ndim))
    x = x.reshape(*x.shape[:d], len(inside), len(across), *x.shape[d + len(sizes) :])
    x = jax.lax.psum_scatter(x, axes, scatter_dimension=d + 1, axis_index_groups=inside)
    return jax.lax.psum_scatter(x, axes, scatter_dimension=d, axis_index_groups=across)


def all_gather(x: jax.Array, axes: tuple[str, ...], d: int, slow: Mapping[str, int]) -> jax.Array:
    """Brings the pieces of an array together along dimension ``d``.

    Args:
      x, axes, d, slow: as for :func:`psum_scatter`, whose transpose this is.
    """
    inside, across = _groups(axes, slow)
    if len(inside) == 1 or len(across) == 1:
        return jax.lax.all_gather(x, axes, axis=d, tiled=True)
    sizes, order = _slow_first(axes, slow, d)
    x = jax.lax.all_gather(x, axes, axis=d, axis_index_groups=across)
    x = jax.lax.all_gather(x, axes, axis=d + 1, axis_index_groups=inside)
    x = x.reshape(*x.shape[:d], *(sizes[i - d] for i in order), *x.shape[d + 2 :])
    back = [d + order.index(d + i) for i in range(len(sizes))]
    x = x.transpose(*range(d), *back, *range(d + len(sizes), x.ndim))
    return x.reshape(*x.shape[:d], -1, *x.shape[d + len(sizes) + 1 :])


def _sizes(axes: tuple[str, ...], slow: Mapping[str, int]) -> list[int]:
    """The slow and the fast part of each axis, in the order in which devices are numbered."""
    parts = ((slow.get(axis, 1), jax.lax.axis_size(axis)) for axis in axes)
    return [part for n, size in parts for part in (n, size // n)]


def _slow_first(
    axes: tuple[str, ...], slow: Mapping[str, int], d: int
) -> tuple[list[int], list[int]]:
    """The parts of a dimension ``d`` that axes split, and those dimensions with slow ones first."""
    sizes = _sizes(axes, slow)
    return sizes, [d + i for first in (0, 1) for i in range(first, len(sizes), 2)]


def _groups(axes: tuple[str, ...], slow: Mapping[str, int]) -> tuple[Groups, Groups]:
    """Numbers of devices along the axes that fast links join, and those that do the same there."""
    sizes = _sizes(axes, slow)
    _, order = _slow_first(axes, slow, 0)
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
    grid = numbers.reshape(math.prod(sizes[::2]), -1)
    return grid.tolist(), grid.T.tolist()
