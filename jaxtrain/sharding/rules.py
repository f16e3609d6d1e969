"""Sharding by path: ordered rules for parameters; everything else follows its parameter.

A rule is a pair ``(path regex, axes)``; the first whose regex is found in a parameter's path
decides. ``axes`` names each dimension by what it *is* (``"embed"``, ``"heads"``, ``"layers"``), and
one table, :data:`LOGICAL_AXES`, says which mesh axes carry it. A parameter that no rule matches
gets its largest divisible dimension over ``fsdp``; where it is stacked by layer, that is besides
``pipe`` on the layers.

Optimizer state is found by path: the moment of ``blocks/mlp/up/kernel`` has a path ending in those
words, and takes that parameter's spec.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding.mesh import BATCH_AXES, automatic
from jaxtrain.sharding.specs import names_of, spread, tidy
from jaxtrain.sharding.stack import Stack
from jaxtrain.tree import PyTree, is_count, map_named, named_leaves, owner_of

Rule = tuple[str, Sequence[str | None]]

# What each logical axis is carried by. Names of mesh axes stand for themselves.
LOGICAL_AXES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": BATCH_AXES,
    "tokens": (*BATCH_AXES, "context"),  # batch and sequence, flattened
    "sequence": "context",
    "residual": ("context", "tensor"),  # the sequence of the residual stream, between branches
    "layers": "pipe",
    "embed": "fsdp",
    "heads": "tensor",
    "attend_heads": ("tensor", "context"),  # of whole rows, within attention
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
    "rows": (*BATCH_AXES, "tensor"),  # of tables that are exchanged (jaxtrain.ops.row_exchange)
    "members": "data",  # of several trainings, or errors of several parts, in a state
}

# A leaf of at least this many elements must not end up whole on every device by accident.
LARGE = 2**20


@dataclasses.dataclass(frozen=True)
class Rules:
    """Ordered sharding rules.

    Args:
      params: pairs ``(path regex, axis name per dimension)``, first match wins; ``()`` for the axes
        copies to every device. Each must match a parameter, unless they are :class:`OptionalRules`.
      axes: logical axis to mesh axis, mesh axes or None; entries here override
        :data:`LOGICAL_AXES`.
      stacked: which parameters are stacked by layer, as a :class:`jaxtrain.Stack` or its key. Their
        layer axis takes the logical axis ``layers`` where no rule matches them. Rules are written
        for natural order, ``("layers", ...)``, and fitted to one that is cut.
      state: like ``params``, for leaves of the state that are to lie otherwise than by following a
        parameter, by their path in it: ``("^opt_state/.*/factor/", ("layers", "embed", None))``.
      batch: like ``params``, for leaves of a batch of which more than the leading axis is split:
        ``("^tokens$", ("batch", "sequence"))``.
    """

    params: Sequence[Rule] = ()
    axes: Mapping[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)
    stacked: Stack | str = Stack()  # noqa: RUF009
    state: Sequence[Rule] = ()
    batch: Sequence[Rule] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stacked, str):
            object.__setattr__(self, "stacked", Stack(self.stacked))
        for table in ("params", "state", "batch"):
            for rule in getattr(self, table):
                if not isinstance(rule, tuple | list) or len(rule) != 2:
                    raise ValueError(
                        f"Rules({table}=...) has the entry {rule!r}: write a sequence of pairs "
                        "(path regex, axes), such as [('^w$', ('embed', None))]"
                    )

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


class OptionalRules(tuple):
    """A table of rules for several configurations of a model: some may match no parameter; those
    for batches are for leaves of as many dimensions as they name."""


class PartAxes(tuple):
    """The axes of a part that a kernel has beside its base, such as a low-rank factor: an axis that
    does not divide is left out, and ``embed`` splits the part where none of the axes does."""


def as_rules(rules: Rules | Sequence[Rule] | None) -> Rules:
    """Accepts :class:`Rules`, a plain sequence of pairs, or None for no rules."""
    if isinstance(rules, Rules):
        return rules
    return Rules(rules if isinstance(rules, OptionalRules) else tuple(rules or ()))


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
      ValueError: where a rule has another rank than its parameter or matches none (but for
        :class:`OptionalRules`), a dimension does not divide, or a large parameter would stay whole
        although the mesh is to split parameters. One that is to stay whole says so by a rule with
        None for every dimension.
    """
    rules, data = as_rules(rules), ("data",) if zero >= 3 else ()
    splitting = [a for a in ("fsdp", *data, "tensor") if mesh.shape.get(a, 1) > 1]
    ruled = _ruled("parameter", params, rules.params, mesh, rules)

    def sharding(name: str, leaf: Any) -> NamedSharding:
        shape = tuple(leaf.shape)
        if (spec := ruled(name, shape)) is None:
            spec = _default_spec(shape, mesh, rules, stacked=rules.stacked.holds(name))
        spec = spread(spec, shape, mesh, data)
        if splitting and not spec and math.prod(shape) >= LARGE:
            axis = splitting[0]
            raise ValueError(
                f"parameter {name!r} has shape {shape} and would be copied whole to "
                f"all {mesh.size} devices: no dimension takes mesh axis {axis!r} of size "
                f"{mesh.shape[axis]}; add a sharding rule for it ({(None,) * len(shape)} where "
                "it is to be whole), or use a size that divides one of its dimensions"
            )
        return NamedSharding(mesh, spec)

    return map_named(sharding, params)


def state_shardings(
    state: PyTree, params: PyTree, shardings: PyTree, mesh: Mesh, *, zero: int = 0
) -> PyTree:
    """Returns shardings for a pytree (optimizer state) whose leaves follow parameters by path.

    Args:
      state: the pytree to shard. A leaf whose path ends in a parameter's path takes its spec; one
        that lacks some of the parameter's dimensions (factored moments) takes those that remain,
        and one that has more before them (replicas) leaves these whole; all else (counters) is
        copied to every device.
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
        if (owner := owner_of(name, by_path)) is not None:
            words = name.removesuffix(owner).split("/")
            spec = _inherit(words, tuple(leaf.shape), *by_path[owner])
        if zero >= 1:
            spec = spread(spec, leaf.shape, mesh, ("data",))
        return NamedSharding(mesh, spec)

    return map_named(sharding, state)


def ruled_shardings(state: PyTree, shardings: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
    """Returns ``shardings`` of a state, changed where ``rules.state`` has a rule for a leaf.

    Raises:
      ValueError: where a rule does not fit, as for :func:`param_shardings`.
    """
    ruled = _ruled("state leaf", state, rules.state, mesh, rules)

    def sharding(name: str, leaf: Any, default: NamedSharding) -> NamedSharding:
        spec = ruled(name, tuple(leaf.shape))
        return default if spec is None else NamedSharding(mesh, spec)

    return map_named(sharding, state, shardings)


def batch_shardings(
    batch: PyTree, mesh: Mesh, rules: Rules | Sequence[Rule] | None = None
) -> PyTree:
    """Shards batch leaves by ``rules.batch``, and the others' leading axis over ``data`` and
    ``fsdp``; scalars are copied.

    Raises:
      ValueError: where an axis does not divide, or a rule has another rank than its leaf or matches
        none.
    """
    rules = as_rules(rules)
    ruled = _ruled("batch leaf", batch, rules.batch, mesh, rules)
    rows = batch_sharding(mesh)
    axes = names_of(rows.spec[0]) if rows.spec else ()
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def sharding(name: str, leaf: Any) -> NamedSharding:
        shape = tuple(leaf.shape)
        # Tables for several models have the rows in front; another's may have none.
        uneven = shape and shape[0] % parts
        has_rows = uneven and isinstance(rules.batch, OptionalRules)
        if not has_rows and ((spec := ruled(name, shape)) is not None or not shape):
            return NamedSharding(mesh, spec or P())
        if uneven:
            raise ValueError(
                f"batch leaf {name!r} has shape {shape}: its leading axis ({shape[0]}) is not "
                f"divisible by mesh axes {' x '.join(axes)} of size {parts}; use a global batch "
                f"that is a multiple of {parts}"
            )
        return rows

    return map_named(sharding, batch)


def batch_parts(mesh: Mesh) -> int:
    """Returns into how many parts a mesh splits the rows of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array whose leading axis is the batch."""
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    return NamedSharding(mesh, P(axes) if axes else P())


def copied(batch: PyTree) -> PyTree:
    """Returns a batch whose NumPy arrays are copies, so that the caller may fill them anew at once.

    JAX on a CPU computes with the memory of an aligned NumPy array, and a step that was called may
    still have to read it.

    Args:
      batch: arrays; those of JAX are passed on.
    """
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)


def from_local_rows(batch: PyTree, mesh: Mesh) -> PyTree:
    """Makes one global batch of the rows that each process has read for itself.

    A compiled step takes host arrays for the global batch, the same in every process. Where each
    process reads rows of its own, this puts them together without moving any.

    Args:
      batch: host arrays [b, ...], as many rows in every process; scalars are the same in all.
        Processes between which the mesh does not split the batch (``tensor`` or ``pipe`` lies
        across them) give the same rows.
      mesh: the mesh of the step.

    Returns:
      Arrays [b x (parts of the batch that lie in different processes), ...] on the mesh.

    Raises:
      ValueError: where the devices of this process cannot share its rows evenly.

    >>> from jaxtrain.sharding.mesh import make_mesh
    >>> from_local_rows({"x": jax.numpy.ones((4, 2))}, make_mesh(data=-1))["x"].shape
    (4, 2)
    """
    mesh = automatic(mesh)
    rows = batch_sharding(mesh)
    parts = math.prod(mesh.shape[axis] for axis in names_of(rows.spec[0] if rows.spec else None))
    here = len({str(i) for i in rows.addressable_devices_indices_map((parts,)).values()})

    def place(name: str, x: Any) -> jax.Array:
        x = np.array(x)  # a copy, as `copied` explains
        if x.ndim == 0:
            return jax.make_array_from_process_local_data(NamedSharding(mesh, P()), x)
        if x.shape[0] % here:
            raise ValueError(
                f"batch leaf {name!r} has {x.shape[0]} rows in this process, whose devices cut the "
                f"batch into {here} parts: give a multiple of {here} rows per process"
            )
        return jax.make_array_from_process_local_data(rows, x)

    return map_named(place, batch)


def _ruled(
    what: str, tree: PyTree, table: Sequence[Rule], mesh: Mesh, rules: Rules
) -> Callable[[str, tuple[int, ...]], P | None]:
    """Returns the function of a path and a shape that gives the spec by the first rule of a table,
    or None. Raises ValueError for a rule that no leaf of the tree has (``what`` names one)."""
    names = named_leaves(tree)
    for pattern, _ in () if isinstance(table, OptionalRules) else table:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"sharding rule {pattern!r} matches no {what}; there are {', '.join(names)}: "
                "correct its regex, or give a table for several models as OptionalRules"
            )

    def spec(name: str, shape: tuple[int, ...]) -> P | None:
        # What a kernel counts is no matrix, and lies by itself.
        found = [] if is_count(name) else [rule for rule in table if re.search(rule[0], name)]
        if table is rules.batch and isinstance(table, OptionalRules):
            found = [rule for rule in found if len(rule[1]) == len(shape)]
        rule = next(iter(found), None)
        return rule and _named_spec(f"{what} {name!r}", shape, *rule, mesh, rules)

    return spec


def _default_spec(shape: tuple[int, ...], mesh: Mesh, rules: Rules, *, stacked: bool) -> P:
    """The spec of a parameter without a rule: its layers over ``pipe``, and its largest dimension
    over ``fsdp``."""
    chunks = (1,) * (rules.stacked.lead - 1) if stacked else ()  # which are not split
    layers = rules.mesh_axes("layers", mesh) if stacked else ()
    shape = (*chunks, *shape[len(chunks) :])
    at = shape[len(chunks) :][:1]
    divides = at and at[0] % math.prod(mesh.shape[a] for a in layers) == 0
    spec = P(*[None] * len(chunks), tidy(layers)) if layers and divides else P()
    return spread(spec, shape, mesh, ("fsdp",))


def _named_spec(
    what: str,
    shape: tuple[int, ...],
    pattern: str,
    axes: Sequence[str | None],
    mesh: Mesh,
    rules: Rules,
) -> P:
    """The spec of the leaf ``what`` by the rule ``(pattern, axes)``."""
    fitted = isinstance(axes, PartAxes)
    axes = tuple(axes) or (None,) * len(shape)
    if axes[:1] == ("layers",):
        axes = (None,) * (rules.stacked.lead - 1) + axes
    if len(axes) != len(shape):
        raise ValueError(
            f"{what} has shape {shape} and sharding rule {pattern!r} names "
            f"{len(axes)} axes {tuple(axes)}: name one axis, or None, per dimension"
        )
    entries, used = [], set()
    for dimension, (size, logical) in enumerate(zip(shape, axes, strict=True)):
        carried = tuple(a for a in rules.mesh_axes(logical, mesh) if a not in used)
        if fitted and logical != "layers" and size % math.prod(mesh.shape[a] for a in carried):
            carried = ()
        for axis in carried:
            if size % math.prod(mesh.shape[a] for a in carried):
                mend = f"use a divisor of {size} or map {logical!r} to None"
                if logical == "sequence":
                    mend = f"use rows of a multiple of {mesh.shape[axis]}"
                if axis == "pipe":  # which has nothing to do where layers are not split
                    mend = f"use {_nearest_divisors(size, mesh.shape[axis])}"
                raise ValueError(
                    f"{what} has shape {shape}: dimension {dimension} ({size}) is not "
                    f"divisible by mesh axis {axis!r} of size {mesh.shape[axis]}; {mend}"
                )
        used.update(carried)
        entries.append(tidy(carried))
    if fitted:
        splits = any(entry for entry, axis in zip(entries, axes, strict=True) if axis != "layers")
        return spread(P(*entries), shape, mesh, () if splits else rules.mesh_axes("embed", mesh))
    table = LOGICAL_AXES | dict(rules.axes)
    # P(None, None) is whole on purpose, P() by accident: the axes it names are not in this mesh.
    # "layers" does not count, which a pipeline alone splits.
    named = set(axes) - {None, "layers"}
    on_purpose = not any(table.get(logical, logical) for logical in named)
    return P(*entries) if any(entries) or on_purpose else P()


def _nearest_divisors(number: int, near: int) -> str:
    """The divisors on either side of ``near``, as ``"pipe 2 or 11"``."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below, above = [d for d in divisors if d < near][-1:], [d for d in divisors if d > near][:1]
    return f"pipe {' or '.join(map(str, below + above))}"


def _inherit(words: Sequence[str], shape: tuple[int, ...], owner: tuple[int, ...], spec: P) -> P:
    """The owner's spec for a leaf that has some of the owner's dimensions, in order, or all behind
    leading ones of its own, which stay whole, as the first does where the leaf is of some layers.

    Where sizes alone do not say which (a square kernel), Adafactor's factors are told by their name
    (``words``), and any other leaf is split along what all possibilities have in common.
    """
    own = len(shape) - len(owner)
    if own > 0 and spec and shape[own:] == owner:
        return P(*[None] * own, *spec)
    if spec and own == 0 and len(shape) > 1 and shape[0] < owner[0] and shape[1:] == owner[1:]:
        return P(None, *spec[1:])
    if not spec or own > 0:
        return P()
    kept = [
        dims
        for dims in itertools.combinations(range(len(owner)), len(shape))
        if tuple(owner[d] for d in dims) == shape
    ]
    if len(kept) > 1 and (factor := {"v_row", "v_col"} & set(words)):
        # v_row is the mean over the largest dimension, v_col over the second largest; of equal ones
        # the later counts as larger (optax, scale_by_factored_rms).
        *_, second, largest = sorted(range(len(owner)), key=lambda d: owner[d])
        gone = largest if factor == {"v_row"} else second
        kept = [dims for dims in kept if gone not in dims] or kept
    entries = list(spec) + [None] * (len(owner) - len(spec))
    options = [{entries[dims[i]] for dims in kept} for i in range(len(shape))] if kept else []
    found = [option.pop() if len(option) == 1 else None for option in options]
    return P(*found) if len(shape) == len(owner) or any(found) else P()
