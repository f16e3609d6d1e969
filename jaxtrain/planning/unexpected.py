"""Finds collectives that bring together a whole parameter which was split to keep it apart."""

import collections
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from jaxtrain.host.memory import human_bytes
from jaxtrain.planning.hlo import Collective, Program
from jaxtrain.planning.partition import spec_of
from jaxtrain.tree import named_leaves

# Splitting over these is made to be undone, a layer at a time (ZeRO-3).
GATHERED = frozenset(["fsdp", "data"])


def unexpected_gathers(
    program: Program, params: Any, mesh: Mesh, *, layers: str | None = None, once: bool = False
) -> tuple[str, ...]:
    """Describes all-gathers whose result is a whole parameter, where that defeats its sharding, a
    sentence per parameter and axes.

    An axis that splits work (``tensor``, ``pipe``, ``expert``, ``context``) is split so that no
    device sees the whole parameter; ``fsdp`` (and ``data`` under ZeRO-3) gathers parameters by
    design, but those of a stack of layers one layer at a time.

    Args:
      layers: the path of the subtree whose leading axis is the layer.
      once: whether all layers are gathered together on purpose, once per step.
    """
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], Collective] = {}
    for collective in program.collectives:
        meant = once and collective.executions == 1 and set(collective.axes) <= GATHERED
        if collective.kind != "all-gather" or meant:
            continue
        for shape in collective.shapes:
            sizes = [int(d) for d in shape[shape.index("[") + 1 : -1].split(",") if d]
            names = tuple(_whole(sizes, collective.axes, params, mesh, layers))
            if names:
                found.setdefault((names, collective.axes), collective)
    return tuple(
        f"parameter {' or '.join(map(repr, names))} is gathered whole along {' + '.join(axes)}: "
        f"{c.executions} times a step, {human_bytes(c.payload)} with what goes with it"
        + (f"; from {c.source}" if c.source else "")
        for (names, axes), c in found.items()
    )


def _whole(
    gathered: list[int], axes: tuple[str, ...], params: Any, mesh: Mesh, layers: str | None
) -> list[str]:
    """Names the parameters of that shape which should not be whole; several may look alike."""
    exact, alike = [], []
    for name, leaf in named_leaves(params).items():
        spec = spec_of(leaf)
        if not any(axis in entry for entry in spec for axis in axes):
            continue
        # What one device has once the gathered axes are undone and the others are not.
        whole = [
            size // math.prod(mesh.shape[a] for a in entry if a not in axes)
            for size, entry in zip(leaf.shape, spec, strict=True)
        ]
        stacked = layers is not None and name.startswith(f"{layers}/")
        if set(axes) <= GATHERED:
            # Layer by layer is what these axes are for; so is a parameter without layers.
            shapes = [whole] if stacked and leaf.shape[0] > 1 else []
        else:
            shapes = [whole, whole[1:]] if stacked else [whole]
        if gathered in shapes:
            exact.append(name)
        elif _dims(gathered) in [_dims(shape) for shape in shapes]:
            alike.append(name)
    return exact or alike


def _dims(sizes: Sequence[int]) -> collections.Counter:
    # Compilers transpose, merge leading ones and drop them.
    return collections.Counter(size for size in sizes if size != 1)
