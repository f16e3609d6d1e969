"""Sharding by path: ordered rules for parameters; everything else follows its parameter.

A rule is a pair ``(path regex, axes)``; the first whose regex is found in a parameter's path
decides. ``axes`` names each dimension by what it *is* (``"embed"``, ``"heads"``, ``"layers"``), and
one table, :data:`LOGICAL_AXES`, says which mesh axes carry it. A parameter that no rule matches
gets its largest divisible dimension over ``fsdp``; where it is stacked by layer, that is besides
``pipe`` on the layers.

Optimizer state is found by path: the moment of ``blocks/mlp/up/kernel`` has a path ending in those
words, and takes that parameter's spec.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.mesh import BATCH_AXES, automatic, describe_mesh
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
      params: pairs ``(path regex, axis name per dimension)``, first match wins. Each must match a
        parameter, unless they are :class:`OptionalRules`.
      axes: logical axis to mesh axis, mesh axes or None; entries here override
        :data:`LOGICAL_AXES`.
      stacked: as in :class:`jaxtrain.Stages`: the leading axis of parameters under this key is the
        layer, and takes the logical axis ``layers`` where no rule matches them.
    """

    params: Sequence[Rule] = ()
    axes: Mapping[str, str | tuple[str, ...] | None] = dataclasses.field(default_factory=dict)
    stacked: str = "blocks"

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
    """A table of rules for several configurations of a model: some may match no parameter."""


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
    rules = as_rules(rules)
    _refuse_idle(rules, named_leaves(params))

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
                spec = _inherit(words[:start], tuple(leaf.shape), *by_path[owner])
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
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    return NamedSharding(mesh, P(axes) if axes else P())


@dataclasses.dataclass
class _Placement:
    """What code that is traced for a mesh may ask: rules, and how each parameter lies (by path)."""

    rules: Rules = dataclasses.field(default_factory=Rules)
    params: Mapping[str, tuple[tuple[int, ...], P]] | None = None
    pins: int = 0  # calls of constrain and gather


_PLACEMENT = contextvars.ContextVar("placement", default=_Placement())  # noqa: B039


@contextlib.contextmanager
def tracing_on(
    mesh: Any, state: PyTree, rules: Rules | Sequence[Rule] | None = None
) -> Iterator[None]:
    """Makes a mesh, sharding rules and the places of parameters known to the code traced within.

    Args:
      mesh: concrete or abstract.
      state: its ``params`` (of arrays, or shapes with shardings) are what :func:`gather` knows.
      rules: whose ``axes`` :func:`constrain` and the kernels follow.
    """
    params = None
    if (tree := getattr(state, "params", None)) is not None:
        named = named_leaves(tree).items()
        params = {name: (tuple(x.shape), getattr(x.sharding, "spec", P())) for name, x in named}
    token = _PLACEMENT.set(_Placement(as_rules(rules), params))
    try:
        with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
            yield
    finally:
        _PLACEMENT.reset(token)


def free_axes(mesh: Any, logical: str | None = None) -> tuple[str, ...]:
    """Axes of a mesh, of size above 1, that no surrounding ``shard_map`` has taken over.

    Args:
      mesh: the ambient one, or of an array that is traced.
      logical: those that carry this logical axis, by the ambient rules; None for all.
    """
    if mesh.empty:
        return ()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    free = {axis for axis, kind in kinds if kind == AxisType.Auto and mesh.shape[axis] > 1}
    carried = mesh.axis_names if logical is None else _mesh_axes(logical, mesh) if free else ()
    return tuple(axis for axis in carried if axis in free)


def _mesh_axes(logical: str | None, mesh: Any) -> tuple[str, ...]:
    return _PLACEMENT.get().rules.mesh_axes(logical, mesh)


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

    >>> from jaxtrain.parallel.mesh import make_mesh
    >>> from_local_rows({"x": jax.numpy.ones((4, 2))}, make_mesh(data=-1))["x"].shape
    (4, 2)
    """
    mesh = automatic(mesh)
    rows = batch_sharding(mesh)
    parts = math.prod(mesh.shape[axis] for axis in _names(rows.spec[0] if rows.spec else None))
    here = len({str(i) for i in rows.addressable_devices_indices_map((parts,)).values()})

    def place(name: str, x: Any) -> jax.Array:
        x = np.asarray(x)
        if x.ndim == 0:
            return jax.make_array_from_process_local_data(NamedSharding(mesh, P()), x)
        if x.shape[0] % here:
            raise ValueError(
                f"batch leaf {name!r} has {x.shape[0]} rows in this process, whose devices cut the "
                f"batch into {here} parts: give a multiple of {here} rows per process"
            )
        return jax.make_array_from_process_local_data(rows, x)

    return map_named(place, batch)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation's sharding, one logical axis name per dimension; None is not split.

    Reads the ambient mesh (``jax.set_mesh``, which ``compile_step`` enters while it traces) and
    leaves ``x`` alone where there is none. What carries a logical axis is said by
    :data:`LOGICAL_AXES` and by ``compile_step(rules=...)``. A dimension that its mesh axes do not
    divide is left to the compiler, and so are axes that surrounding ``shard_map`` code has taken
    over.

    >>> constrain(jax.numpy.ones((4, 2)), "batch", None).shape
    (4, 2)
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"constrain: {len(axes)} axis names {axes} for an array of rank {x.ndim}")
    _PLACEMENT.get().pins += 1
    if not free_axes(mesh):
        return x
    entries = []
    for size, logical in zip(x.shape, axes, strict=True):
        carried = free_axes(mesh, logical) if logical is not None else ()
        fits = size % math.prod(mesh.shape[axis] for axis in carried) == 0
        entries.append((carried or None) if fits else P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, P(*entries))


def gather(params: PyTree, path: str = "") -> PyTree:
    """Copies parameters whole over the mesh axes that split the batch; other axes stay.

    For models that gather their weights layer by layer, so that no more than one layer's are whole
    at a time; the step that has such a loss is built with ``gather="model"``. Without a mesh
    nothing happens.

    Args:
      params: all parameters, or the subtree at ``path``. A leaf may lack leading dimensions of its
        parameter: one layer of a stack.
      path: where in ``state.params`` the subtree stands, such as ``"blocks"``.

    Raises:
      ValueError: for a leaf that is no parameter of the state being compiled for.
    """
    placement, mesh = _PLACEMENT.get(), jax.sharding.get_abstract_mesh()
    if placement.params is None or mesh.empty:
        return params
    placement.pins += 1
    free, under = free_axes(mesh), f"{path}/" if path else ""
    specs = map_named(lambda name, x: _gathered_spec(under + name, x, free), params)
    return jax.lax.with_sharding_constraint(params, specs)


def _gathered_spec(name: str, leaf: Any, free: Sequence[str]) -> P:
    """The spec of a parameter, or of a layer of it, without the batch's axes."""
    shape, spec = _PLACEMENT.get().params.get(name, ((), P()))
    rank = len(leaf.shape)
    if rank > len(shape) or shape[len(shape) - rank :] != tuple(leaf.shape):
        raise ValueError(
            f"gather: the state has no parameter {name!r} that ends in shape "
            f"{tuple(leaf.shape)}; give the path at which the subtree stands in state.params"
        )
    whole = _without_batch_axes(spec, len(shape), free)
    return P(*whole[len(shape) - rank :])


Gather = Literal["step", "model"]


def enter_loss(params: PyTree, shardings: PyTree | None = None) -> PyTree:
    """Parameters as a loss is given them on a mesh: where :func:`entered_specs` says so, gathered.

    Args:
      params, shardings: see there.
    """
    specs = entered_specs(params, shardings)
    return params if specs is None else jax.lax.with_sharding_constraint(params, specs)


def entered_specs(params: PyTree, shardings: PyTree | None = None) -> PyTree | None:
    """How parameters are to lie where a loss that pins nothing reads them; None for as they are.

    Where three or more axes are left to XLA's partitioner and the batch's split weights too, it may
    reshard wrongly: unconstrained models then have wrong gradients, and some a wrong loss (jax
    0.10.2). With weights that lose the batch's axes first, that has not been seen.

    Args:
      params: the parameters, being traced.
      shardings: theirs, or those of their gradients; None for what ``compile_step`` knows.

    Returns:
      Like ``params``, with an entry for every dimension.

    Raises:
      ValueError: where the mesh needs it and nobody says how the parameters lie.
    """
    mesh, free = _mesh_that_needs_it(params)
    if not free:
        return None
    if shardings is not None:
        return jax.tree.map(
            lambda x, s: NamedSharding(s.mesh, _without_batch_axes(s.spec, x.ndim, free)),
            params,
            shardings,
        )
    if _PLACEMENT.get().params is None:
        raise ValueError(
            f"the step is traced for a mesh {describe_mesh(mesh)} and does not know how its "
            "parameters lie on it, by which XLA may compute wrong gradients: compile it with "
            "jaxtrain.compile_step, or build it with gradient_shardings"
        )
    return map_named(lambda name, x: _gathered_spec(name, x, free), params)


def _mesh_that_needs_it(params: PyTree) -> tuple[Any, tuple[str, ...]]:
    """The mesh that is traced for and, where weights are to be gathered on it, its free axes."""
    mesh, leaves = jax.sharding.get_abstract_mesh(), jax.tree.leaves(params)
    if mesh.empty and leaves:
        # Without an ambient mesh the arrays themselves may lie on one.
        mesh = getattr(getattr(jax.typeof(leaves[0]), "sharding", None), "mesh", mesh)
    free = free_axes(mesh)
    return mesh, free if len(free) >= 3 and set(BATCH_AXES) & set(free) else ()


@contextlib.contextmanager
def model_gathers() -> Iterator[None]:
    """Checks that a loss traced within pins something, where :func:`enter_loss` would gather.

    Raises:
      ValueError: where it calls neither :func:`constrain` nor :func:`gather`.
    """
    placement, (mesh, free) = _PLACEMENT.get(), _mesh_that_needs_it(None)
    before = placement.pins
    yield
    if free and placement.pins == before:
        raise ValueError(
            f"the step is built with gather='model' and its loss calls neither jaxtrain.gather nor "
            f"jaxtrain.constrain, on a mesh {describe_mesh(mesh)}: call them, or leave gather out"
        )


def _without_batch_axes(spec: P, rank: int, free: Sequence[str]) -> P:
    """A spec with an entry per dimension, of free axes that split no batch."""
    entries = [*spec, *[None] * (rank - len(spec))]
    kept = [tuple(a for a in _names(e) if a in free and a not in BATCH_AXES) for e in entries]
    return P(*map(_tidy, kept))


def in_shard_map() -> bool:
    """Whether the code being traced is inside a ``shard_map`` over some axis of the mesh."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Manual in kinds


def spread(spec: P, shape: Sequence[int], mesh: Mesh, axes: Sequence[str]) -> P:
    """Adds unused mesh axes to the largest dimension that they divide (ZeRO over ``data``).

    Leaves the spec alone where the axes are in use, of size 1, or divide nothing.
    """
    used = {axis for entry in spec for axis in _names(entry)}
    axes = tuple(a for a in axes if mesh.shape.get(a, 1) > 1 and a not in used)
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
        layers = rules.mesh_axes("layers", mesh) if name.startswith(f"{rules.stacked}/") else ()
        divides = shape[:1] and shape[0] % math.prod(mesh.shape[a] for a in layers) == 0
        return spread(P(_tidy(layers)) if layers and divides else P(), shape, mesh, ("fsdp",))
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
    table = LOGICAL_AXES | dict(rules.axes)
    # P(None, None) is whole on purpose, P() by accident: the axes it names are not in this mesh.
    on_purpose = not any(logical is not None and table.get(logical, logical) for logical in axes)
    return P(*entries) if any(entries) or on_purpose else P()


def _nearest_divisors(number: int, near: int) -> str:
    """The divisors on either side of ``near``, as ``"pipe 2 or 11"``."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below, above = [d for d in divisors if d < near][-1:], [d for d in divisors if d > near][:1]
    return f"pipe {' or '.join(map(str, below + above))}"


def _refuse_idle(rules: Rules, names: Iterable[str]) -> None:
    for pattern, _ in () if isinstance(rules.params, OptionalRules) else rules.params:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"sharding rule {pattern!r} matches no parameter; there are {', '.join(names)}: "
                "correct its regex, or give a table for several models as OptionalRules"
            )


def _inherit(words: Sequence[str], shape: tuple[int, ...], owner: tuple[int, ...], spec: P) -> P:
    """The owner's spec for a leaf that has some of the owner's dimensions, in order.

    Where sizes alone do not say which (a square kernel), Adafactor's factors are told by their name
    (``words``), and any other leaf is split along what all possibilities have in common.
    """
    if not spec or len(shape) > len(owner):
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


def _refuse_whole(params: PyTree, shardings: PyTree, mesh: Mesh, axes: Sequence[str]) -> None:
    """Raises where a large parameter stays whole on a mesh that is to split parameters."""
    splitting = [a for a in (*axes, "tensor") if mesh.shape.get(a, 1) > 1]
    if not splitting:
        return
    for (name, leaf), sharding in zip(
        named_leaves(params).items(), jax.tree.leaves(shardings), strict=True
    ):
        whole = not sharding.spec
        if whole and math.prod(leaf.shape) >= LARGE:
            axis = splitting[0]
            raise ValueError(
                f"parameter {name!r} has shape {tuple(leaf.shape)} and would be copied whole to "
                f"all {mesh.size} devices: no dimension takes mesh axis {axis!r} of size "
                f"{mesh.shape[axis]}; add a sharding rule for it ({(None,) * leaf.ndim} where "
                "it is to be whole), or use a size that divides one of its dimensions"
            )


def axes_of(spec: P) -> Iterator[str]:
    """The mesh axes that a spec names."""
    return (axis for entry in spec if entry is not P.UNCONSTRAINED for axis in _names(entry))


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
