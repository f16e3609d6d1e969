"""Entries of a ``PartitionSpec``: the mesh axes that they name, and more of them."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def spread(spec: P, shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> P:
    """Adds unused mesh axes to the largest dimension that they divide (ZeRO over ``data``).

    Leaves the spec alone where the axes are in use, of size 1, or divide nothing.
    """
    used = {axis for entry in spec for axis in names_of(entry)}
    axes = tuple(a for a in axes if mesh.shape.get(a, 1) > 1 and a not in used)
    parts = math.prod(mesh.shape[a] for a in axes)
    if not axes:
        return spec
    entries = entries_of(spec, len(shape))
    local = [
        size // math.prod(mesh.shape[a] for a in names_of(entry))
        for size, entry in zip(shape, entries, strict=True)
    ]
    fitting = [d for d, size in enumerate(local) if size % parts == 0 and size >= parts]
    if not fitting:
        return spec
    best = max(fitting, key=lambda d: local[d])
    entries[best] = (*names_of(entries[best]), *axes)
    return P(*(tidy(entry) for entry in entries))


def axes_of(spec: P) -> Iterator[str]:
    """The mesh axes that a spec names."""
    return (axis for entry in spec if entry is not P.UNCONSTRAINED for axis in names_of(entry))


def restrict(spec: P, axes: Container[str]) -> P:
    """The spec without mesh axes other than these.

    >>> restrict(P(("data", "fsdp"), "tensor"), ("fsdp", "pipe"))
    P('fsdp', None)
    """

    def keep(entry: Any) -> Any:
        if entry is P.UNCONSTRAINED:
            return entry
        return tidy(tuple(axis for axis in names_of(entry) if axis in axes))

    return P(*map(keep, spec))


def entries_of(spec: P, rank: int) -> list[Any]:
    """The entries of a spec, one for each dimension.

    >>> entries_of(P("data"), 3)
    ['data', None, None]
    """
    return [*spec, *[None] * (rank - len(spec))]


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def tidy(entry: Any) -> Any:
    names = names_of(entry)
    return None if not names else names[0] if len(names) == 1 else names
