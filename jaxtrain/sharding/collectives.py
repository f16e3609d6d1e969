"""Collectives over axes of which a part crosses a slow network: first inside, then across.

What a device has is reduced over the fast part of the axes first, and each sends no more than its
share across the slow part; what is gathered crosses first, in the smallest pieces. The result, and
who holds which piece of it, is that of ``jax.lax``'s own, but for the order in which is added.

The TPU compiler makes this of any collective between slices. On GPUs one ring through all hosts is
what NCCL may make of it, in which a host sends up to twice as much.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np

Groups = list[list[int]]


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
