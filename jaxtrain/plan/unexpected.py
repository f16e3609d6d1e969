"""Finds collectives that bring together a whole parameter which was split to keep it apart."""

import collections
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh, NamedSharding

from jaxtrain.observe.memory import human_bytes
from jaxtrain.plan.hlo import Collective, Program
from jaxtrain.tree import named_leaves

# Splitting over these is made to be undone, a layer at a time (ZeRO-3).
GATHERED = frozenset(["fsdp", "data"])


def unexpected_gathers(
    program: Program, params: Any, mesh: Mesh, *, layers: str | None = None
) -> tuple[str, ...]:
    """Describes all-gathers whose result is a whole parameter, where that defeats its sharding.

    An axis that splits work (``tensor``, ``pipe``, ``expert``, ``context``) is split so that no
    device sees the whole parameter; ``fsdp`` (and ``data`` under ZeRO-3) gathers parameters by
    design, but those of a stack of layers one layer at a time.

    Args:
      program: what was compiled.
      params: parameters, or shapes, with shardings.
      mesh: the mesh they lie on.
      layers: the path of the subtree whose leading axis is the layer.

    Returns:
      A sentence per parameter and axes.
    """
    found: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for collective in program.collectives:
        if collective.kind != "all-gather":
            continue
        for shape in collective.shapes:
            for name in _whole(shape, collective.axes, params, mesh, layers):
                found.setdefault((name, collective.axes), collective)
    return tuple(
        f"parameter {name!r} is gathered whole along {' + '.join(axes)}: {c.executions} times a "
        f"step, {human_bytes(c.payload)} with what goes with it; from {c.source or 'unknown'}"
        for (name, axes), c in found.items()
    )


def _whole(
    shape: str, axes: tuple[str, ...], params: Any, mesh: Mesh, layers: str | None
) -> Iterator[str]:
    gathered = _dims(int(d) for d in shape[shape.index("[") + 1 : -1].split(",") if d)
    for name, leaf in named_leaves(params).items():
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            continue
        spec = [_names(entry) for entry in sharding.spec]
        spec += [()] * (len(leaf.shape) - len(spec))
        if not any(axis in entry for entry in spec for axis in axes):
            continue
        # What one device has once the gathered axes are undone and the others are not.
        whole = [
            size // _size((a for a in entry if a not in axes), mesh)
            for size, entry in zip(leaf.shape, spec, strict=True)
        ]
        stacked = layers is not None and name.startswith(f"{layers}/")
        if set(axes) <= GATHERED:
            # Layer by layer is what these axes are for; so is a parameter without layers.
            if stacked and leaf.shape[0] > 1 and gathered == _dims(whole):
                yield name
        elif gathered in (_dims(whole), _dims(whole[1:]) if stacked else None):
            yield name


def _dims(sizes) -> collections.Counter:
    # Compilers transpose, merge leading ones and drop them.
    return collections.Counter(size for size in sizes if size != 1)


def _size(axes, mesh: Mesh) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
