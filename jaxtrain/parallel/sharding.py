"""Sharding by path: ordered rules for parameters; everything else follows its parameter.

A rule is a pair ``(path regex, axes)``; the first whose regex is found in a parameter's path
decides. ``axes`` names each dimension by what it *is* (``"embed"``, ``"heads"``, ``"layers"``), and
one table, :data:`LOGICAL_AXES`, says which mesh axes carry it. A parameter that no rule matches
gets its largest divisible dimension over ``fsdp``.

Optimizer state is found by path: the moment of ``blocks/mlp/up/kernel`` has a path ending in those
words, and takes that parameter's spec.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.mesh import BATCH_AXES
from jaxtrain.tree import map_named, named_leaves

PyTree = Any
Rule = tuple[str, Sequence[str | None]]

# What each logical axis is carried by. Names of mesh axes stand for themselves.
LOGICAL_AXES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": BATCH_AXES,
    "tokens": (*BATCH_AXES, "context"),  # batch and sequence, flattened
    "sequence": "context",
    "layers": "pipe",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
}

# A leaf of at least this many elements must not end up whole on every device by accident.
LARGE = 2**20


@dataclasses.dataclass(frozen=True)
class Rules:
    """Ordered sharding rules.

    Args:
      params: pairs ``(path regex, axis name per dimension)``, first match wins.
      axes: logical axis to mesh axis, mesh axes or None; entries here override
        :data:`LOGICAL_AXES`.
    """

    params: Sequence[Rule] = ()
    axes: Mapping[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)

    def mesh_axes(self, logical: str | None, mesh: Mesh) -> tuple[str, ...]:
        """Returns the mesh axes, of size above 1, that carry a logical axis.

        Raises:
          ValueError: for a name that is neither a logical nor a mesh axis.
        """
        table = LOGICAL_AXES | dict(self.axes)
        if logical is not None and logical not in table and logical not in mesh.shape:
            raise ValueError(
                f"sharding axis {logical!r} is neither a logical axis {sorted(table)} nor a mesh "
                f"axis {list(mesh.shape)}: correct the rule or map it in Rules(axes=...)"
            )
        carried = table.get(logical, logical) if logical is not None else None
        carried = (carried,) if isinstance(carried, str) else tuple(carried or ())
        return tuple(axis for axis in carried if mesh.shape.get(axis, 1) > 1)


def as_rules(rules: Rules | Sequence[Rule] | None) -> Rules:
    """Accepts :class:`Rules`, a plain sequence of pairs, or None for no rules."""
    return rules if isinstance(rules, Rules) else Rules(tuple(rules or ()))


def param_shardings(
    params: PyTree, mesh: Mesh, rules: Rules | Sequence[Rule] | None = None, *, zero: int = 0
) -> PyTree:
    """Returns a ``NamedSharding`` per parameter.

    Args:
      params: pytree of arrays or ``ShapeDtypeStruct``.
      mesh: from :func:`make_mesh`.
      rules: ordered rules; None leaves everything to the automatic FSDP rule.
      zero: 3 also spreads parameters over ``data`` (see :func:`jaxtrain.init_state`).

    Raises:
      ValueError: where a rule has another rank than its parameter, a dimension does not divide, or
        a large parameter would stay whole although the mesh is to split parameters.
    """
    rules = as_rules(rules)

    def sharding(name: str, leaf: Any) -> NamedSharding:
        spec = _rule_spec(name, tuple(leaf.shape), mesh, rules)
        if zero >= 3:
            spec = spread(spec, leaf.shape, mesh, ("data",))
        return NamedSharding(mesh, spec)

    shardings = map_named(sharding, params)
    _refuse_whole(params, shardings, mesh, ("fsdp", *(("data",) if zero >= 3 else ())))
    return shardings


def state_shardings(
    state: PyTree, params: PyTree, shardings: PyTree, mesh: Mesh, *, zero: int = 0
) -> PyTree:
    """Returns shardings for a pytree (optimizer state) whose leaves follow parameters by path.

    Args:
      state: the pytree to shard. A leaf whose path ends in a parameter's path takes its spec; one
        that lacks some of the parameter's dimensions (factored moments) takes those that remain;
        all else (counters) is copied to every device.
      params, shardings: the parameters and what :func:`param_shardings` made of them.
      zero: from 1 on, leaves are also spread over ``data``.
    """
    by_path = {
        name: (tuple(leaf.shape), sharding.spec)
        for (name, leaf), sharding in zip(
            named_leaves(params).items(), jax.tree.leaves(shardings), strict=True
        )
    }

    def sharding(name: str, leaf: Any) -> NamedSharding:
        spec = P()
        words = name.split("/")
        for start in range(len(words)):
            if (owner := "/".join(words[start:])) in by_path:
                spec = _inherit(tuple(leaf.shape), *by_path[owner])
                break
        if zero >= 1:
            spec = spread(spec, leaf.shape, mesh, ("data",))
        return NamedSharding(mesh, spec)

    return map_named(sharding, state)


def batch_shardings(batch: PyTree, mesh: Mesh) -> PyTree:
    """Shards the leading axis of every batch leaf over ``data`` and ``fsdp``; scalars are copied.

    Raises:
      ValueError: where a leading axis does not divide.
    """
    rows = batch_sharding(mesh)
    axes = _names(rows.spec[0]) if rows.spec else ()
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def sharding(name: str, leaf: Any) -> NamedSharding:
        shape = tuple(leaf.shape)
        if not shape:
            return NamedSharding(mesh, P())
        if shape[0] % parts:
            raise ValueError(
                f"batch leaf {name!r} has shape {shape}: its leading axis ({shape[0]}) is not "
                f"divisible by mesh axes {' x '.join(axes)} of size {parts}; use a global batch "
                f"that is a multiple of {parts}"
            )
        return rows

    return map_named(sharding, batch)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array whose leading axis is the batch."""
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    return NamedSharding(mesh, P(axes) if axes else P())


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation's sharding, one logical axis name per dimension; None is not split.

    Reads the ambient mesh (``jax.set_mesh``, which ``compile_step`` enters while it traces) and
    leaves ``x`` alone where there is none. A dimension that its mesh axes do not divide is left to
    the compiler, and so are axes that surrounding ``shard_map`` code has taken over.

    >>> constrain(jax.numpy.ones((4, 2)), "batch", None).shape
    (4, 2)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: {len(axes)} axis names {axes} for an array of rank {x.ndim}")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {axis for axis, kind in kinds.items() if kind == AxisType.Auto and mesh.shape[axis] > 1}
    if not free:
        return x
    entries = []
    for size, logical in zip(x.shape, axes, strict=True):
        carried = tuple(axis for axis in Rules().mesh_axes(logical, mesh) if axis in free)
        fits = size % math.prod(mesh.shape[axis] for axis in carried) == 0
        entries.append((carried or None) if fits else P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, P(*entries))


def in_shard_map() -> bool:
    """Whether the code being traced is inside a ``shard_map`` over some axis of the mesh."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Manual in kinds


def spread(spec: P, shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> P:
    """Adds unused mesh axes to the largest dimension that they divide (ZeRO over ``data``).

    Leaves the spec alone where the axes are in use, of size 1, or divide nothing.
    """
    used = {axis for entry in spec for axis in _names(entry)}
    axes = tuple(a for a in axes if mesh.shape[a] > 1 and a not in used)
    parts = math.prod(mesh.shape[a] for a in axes)
    if not axes:
        return spec
    entries = list(spec) + [None] * (len(shape) - len(spec))
    local = [
        size // math.prod(mesh.shape[a] for a in _names(entry))
        for size, entry in zip(shape, entries, strict=True)
    ]
    fitting = [d for d, size in enumerate(local) if size % parts == 0 and size >= parts]
    if not fitting:
        return spec
    best = max(fitting, key=lambda d: local[d])
    entries[best] = (*_names(entries[best]), *axes)
    return P(*(_tidy(entry) for entry in entries))


def _rule_spec(name: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> P:
    matching = (rule for rule in rules.params if re.search(rule[0], name))
    pattern, axes = next(matching, (None, None))
    if pattern is None:
        return spread(P(), shape, mesh, ("fsdp",))
    if len(axes) != len(shape):
        raise ValueError(
            f"parameter {name!r} has shape {shape} and sharding rule {pattern!r} names "
            f"{len(axes)} axes {tuple(axes)}: name one axis, or None, per dimension"
        )
    entries, used = [], set()
    for dimension, (size, logical) in enumerate(zip(shape, axes, strict=True)):
        carried = tuple(a for a in rules.mesh_axes(logical, mesh) if a not in used)
        for axis in carried:
            if size % math.prod(mesh.shape[a] for a in carried):
                mend = f"use a divisor of {size} or map {logical!r} to None"
                if axis == "pipe":  # which has nothing to do where layers are not split
                    mend = f"use {_nearest_divisors(size, mesh.shape[axis])}"
                raise ValueError(
                    f"parameter {name!r} has shape {shape}: dimension {dimension} ({size}) is not "
                    f"divisible by mesh axis {axis!r} of size {mesh.shape[axis]}; {mend}"
                )
        used.update(carried)
        entries.append(_tidy(carried))
    return P(*entries)


def _nearest_divisors(number: int, near: int) -> str:
    """The divisors on either side of ``near``, as ``"pipe 2 or 11"``."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below, above = [d for d in divisors if d < near][-1:], [d for d in divisors if d > near][:1]
    return f"pipe {' or '.join(map(str, below + above))}"


def _inherit(shape: tuple[int, ...], owner: tuple[int, ...], spec: P) -> P:
    """The owner's spec for a leaf that has some of the owner's dimensions, in order."""
    entries, position = [], 0
    owner_entries = list(spec) + [None] * (len(owner) - len(spec))
    for size in shape:
        while position < len(owner) and owner[position] != size:
            position += 1
        if position == len(owner):
            return P()
        entries.append(owner_entries[position])
        position += 1
    return P(*entries) if any(entries) else P()


def _refuse_whole(params: PyTree, shardings: PyTree, mesh: Mesh, axes: Sequence[str]) -> None:
    """Raises where a large parameter stays whole on a mesh that is to split parameters."""
    splitting = [a for a in (*axes, "tensor") if mesh.shape[a] > 1]
    if not splitting:
        return
    for (name, leaf), sharding in zip(
        named_leaves(params).items(), jax.tree.leaves(shardings), strict=True
    ):
        whole = all(not _names(entry) for entry in sharding.spec)
        if whole and math.prod(leaf.shape) >= LARGE:
            axis = splitting[0]
            raise ValueError(
                f"parameter {name!r} has shape {tuple(leaf.shape)} and would be copied whole to "
                f"all {mesh.size} devices: no dimension takes mesh axis {axis!r} of size "
                f"{mesh.shape[axis]}; add a sharding rule for it, or use a size that divides one "
                "of its dimensions"
            )


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _tidy(entry: Any) -> Any:
    names = _names(entry)
    return None if not names else names[0] if len(names) == 1 else names


def constrain_tree(shardings: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function that pins a pytree to ``shardings`` inside a jitted computation."""
    return lambda tree: jax.lax.with_sharding_constraint(tree, shardings)
