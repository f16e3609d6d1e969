"""Placement inside a traced computation: activations pinned by name, weights gathered where needed.

What ``compile_step`` is told stands here while it traces: the mesh, the rules whose table says what
carries a logical axis, and how each parameter lies. Without a mesh nothing here does anything.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.decisions import Kind
from jaxtrain.sharding.mesh import BATCH_AXES, GATHERED_AXES, describe_mesh, slow_parts
from jaxtrain.sharding.rules import Rule, Rules, as_rules
from jaxtrain.sharding.specs import axes_of, entries_of, names_of, restrict, tidy
from jaxtrain.tree import PyTree, map_named, named_leaves, owner_of

Gather = Literal["step", "model"]


@dataclasses.dataclass(eq=False)
class _Placement:
    """Context of code traced for a mesh: rules, and shape and spec of each parameter by path."""

    rules: Rules = dataclasses.field(default_factory=Rules)
    params: Mapping[str, tuple[tuple[int, ...], P]] | None = None
    pins: int = 0  # calls of constrain and gather
    findings: dict[Kind, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    final: bool = True  # False where the trace stands for meshes of other sizes too
    apart: tuple[str, ...] = ()  # axes along which the devices do not share one batch
    slow: Mapping[str, int] = dataclasses.field(default_factory=dict)  # see slow_parts
    state: Mapping[str, tuple[tuple[int, ...], P]] | None = None  # like params, of all leaves


# Part of the key of JAX's caches: another table is another trace.
_PLACEMENT = jax.make_user_context(_Placement())


@contextlib.contextmanager
def tracing_on(
    mesh: Any,
    state: PyTree,
    rules: Rules | Sequence[Rule] | None = None,
    *,
    final: bool | None = None,
) -> Iterator[dict[Kind, tuple[Any, ...]]]:
    """Makes a mesh, sharding rules and the places of parameters known to the code traced within.

    The decisions of that code (:func:`report_finding`) are in the dict that this gives.

    Args:
      mesh: concrete or abstract.
      state: its ``params`` (of arrays, or shapes with shardings) are what :func:`gather` knows, and
        all its leaves what :func:`specs_of_state` knows.
      rules: whose ``axes`` :func:`constrain` and the kernels follow.
      final: whether what is traced is for these sizes alone; None says so of a concrete mesh.
    """
    final = isinstance(mesh, Mesh) if final is None else final
    params = getattr(state, "params", None)
    params, leaves = (None if params is None else _places(tree) for tree in (params, state))
    concrete = isinstance(mesh, Mesh)
    enter = jax.set_mesh if concrete else jax.sharding.use_abstract_mesh
    slow = slow_parts(mesh) if concrete else {}
    own = {"final": final, "slow": slow, "state": leaves}
    placement = _Placement(as_rules(rules), params, **own)
    with _PLACEMENT(placement), enter(mesh):
        yield placement.findings


def report_finding(kind: Kind, found: Any) -> None:
    """Adds a decision to the findings of the step that is being traced for a mesh."""
    known = (findings := _PLACEMENT.value.findings).get(kind, ())
    findings[kind] = known if found in known else (*known, found)


def sizes_are_final() -> bool:
    """Whether what is traced may depend on the sizes of the mesh; an estimate's may not."""
    return _PLACEMENT.value.final


def slow_axes() -> dict[str, int]:
    """Axes of the mesh traced for that cross the slow network, and over how many parts of it."""
    return {axis: n for axis, n in _PLACEMENT.value.slow.items() if n > 1}


def batch_is_leading() -> bool:
    """Whether, by the ambient rules, the leading axis of every batch leaf is that of its rows."""
    return all(axes[:1] == ("batch",) for _, axes in _PLACEMENT.value.rules.batch)


def specs_of(params: PyTree) -> dict[str, P] | None:
    """Returns the specs of parameters by path; None if these are not the ones compiled for."""
    return _known(_PLACEMENT.value.params, params)


def specs_of_state(state: PyTree) -> dict[str, P] | None:
    """Returns the specs of a state's leaves by path; None if it is not the one compiled for."""
    return _known(_PLACEMENT.value.state, state)


def specs_of_update(params: PyTree) -> dict[str, P] | None:
    """Returns the specs in which parameters are updated, by path: those of the optimizer's state
    for them where ZeRO splits it further, else their own; None as :func:`specs_of`."""
    if (found := specs_of(params)) is None:
        return None
    parts = lambda spec: len(list(axes_of(spec)))  # noqa: E731
    for leaf, (shape, spec) in (_PLACEMENT.value.state or {}).items():
        name = owner_of(leaf, found) if leaf.startswith("opt_state") else None
        same = name is not None and shape == _PLACEMENT.value.params[name][0]
        if same and parts(spec) > parts(found[name]):
            found[name] = spec
    return found


def _places(tree: PyTree) -> dict[str, tuple[tuple[int, ...], P]]:
    """The shape and the spec of each leaf by path."""
    named = named_leaves(tree).items()
    return {
        name: (tuple(x.shape), getattr(getattr(x, "sharding", None), "spec", P()))
        for name, x in named
    }


def _known(known: Mapping[str, tuple[tuple[int, ...], P]] | None, tree: PyTree) -> Any:
    known, leaves = known or {}, named_leaves(tree)
    shapes = {name: shape for name, (shape, _) in known.items()}
    if shapes != {name: tuple(jnp.shape(x)) for name, x in leaves.items()}:
        return None
    return {name: spec for name, (_, spec) in known.items()}


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
    if not free:
        return ()
    rules = _PLACEMENT.value.rules
    carried = mesh.axis_names if logical is None else rules.mesh_axes(logical, mesh)
    return tuple(axis for axis in carried if axis in free)


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
    _PLACEMENT.value.pins += 1
    if not free_axes(mesh):
        return x
    entries = []
    for size, logical in zip(x.shape, axes, strict=True):
        carried = free_axes(mesh, logical) if logical is not None else ()
        fits = size % math.prod(mesh.shape[axis] for axis in carried) == 0
        entries.append((carried or None) if fits else P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, P(*entries))


def pin_residual(x_BTD: jax.Array) -> jax.Array:
    """Pins a residual stream [B, T, ...] as it lies between the branches of blocks.

    Its sequence is split over what carries the logical axis ``residual``: over ``context``, and
    over ``tensor``, whose devices would otherwise all hold and norm the same (Korthikanti et al.
    2022, sequence parallelism, https://arxiv.org/abs/2205.05198). Rows that these do not divide are
    split over ``sequence`` alone; ``Rules(axes={"residual": "context"})`` asks for that.
    """
    axis = "residual" if splits_residual(x_BTD.shape[1]) else "sequence"
    return constrain(x_BTD, "batch", axis, *[None] * (x_BTD.ndim - 2))


def gather_sequence(x_BTD: jax.Array) -> jax.Array:
    """Gathers a residual stream for a branch: whole over the axes that split heads or features.

    The transpose of :func:`scatter_sequence`: an all-gather, whose gradient is a reduce-scatter.
    """
    return _pin_rows(pin_residual(x_BTD))


def whole_rows(x_BTD: jax.Array) -> jax.Array:
    """Gathers a residual stream for what reads a row at once, such as its first position.

    What takes a place of a row that is split is an exchange between some of its devices, which
    within the branch of a pipeline waits for ever on a CPU.
    """
    return constrain(gather_sequence(x_BTD), "batch", *[None] * (x_BTD.ndim - 1))


def scatter_sequence(x_BTD: jax.Array) -> jax.Array:
    """Splits a branch's sum like the residual stream: each device takes its own positions.

    After a product of which every device has a partial sum this is a reduce-scatter, if the
    product's result is [B, T, D] itself: XLA's GPU compiler does not look through a reshape.
    """
    return pin_residual(_pin_rows(x_BTD))


def splits_residual(length: int) -> bool:
    """Whether rows of ``length`` positions are split further between branches than within them."""
    axes, parts = _residual_axes()
    return bool(axes) and length % parts == 0


def splits_rows(length: int) -> bool:
    """Whether rows of ``length`` positions are split between branches, be it within them or not."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = math.prod(mesh.shape[axis] for axis in free_axes(mesh, "sequence"))
    return splits_residual(length) or (parts > 1 and length % parts == 0)


def check_length(length: int) -> None:
    """Checks that rows of ``length`` positions can be split as the mesh and the rules say.

    Raises:
      ValueError: the axes of ``sequence`` do not divide them.

    Warns:
      UnevenWarning: those of ``residual`` do not.
    """
    mesh = jax.sharding.get_abstract_mesh()
    within = free_axes(mesh, "sequence")
    if length % (parts := math.prod(mesh.shape[axis] for axis in within)):
        raise ValueError(
            f"the model's rows have {length} positions, which mesh axis {' x '.join(within)} of "
            f"size {parts} does not divide: use rows of a multiple of {parts}, or another size"
        )
    axes, parts = _residual_axes()
    if axes and length % parts:
        warnings.warn(
            f"rows of {length} positions are no multiple of {parts}: the residual stream is whole "
            f"on all devices along mesh axis {' x '.join(axes)}, which could hold a part each",
            UnevenWarning,
            stacklevel=2,
        )


def _residual_axes() -> tuple[tuple[str, ...], int]:
    """The axes that split rows between branches alone, and into how many parts they are split."""
    mesh = jax.sharding.get_abstract_mesh()
    axes, within = free_axes(mesh, "residual"), free_axes(mesh, "sequence")
    parts = math.prod(mesh.shape[axis] for axis in axes)
    return tuple(axis for axis in axes if axis not in within), parts


class UnevenWarning(UserWarning):
    """Something that a mesh is to split is copied, as it does not divide."""


def _pin_rows(x_BTD: jax.Array) -> jax.Array:
    return constrain(x_BTD, "batch", "sequence", *[None] * (x_BTD.ndim - 2))


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
    placement, mesh = _PLACEMENT.value, jax.sharding.get_abstract_mesh()
    if placement.params is None or mesh.empty:
        return params
    placement.pins += 1
    free, under = free_axes(mesh), f"{path}/" if path else ""
    specs = map_named(
        lambda name, x: _gathered_spec((under + name).removesuffix("/"), x, free), params
    )
    return jax.lax.with_sharding_constraint(params, specs)


@contextlib.contextmanager
def replicated_params() -> Iterator[None]:
    """Makes :func:`gather`, in what is traced within, copy parameters whole over all axes."""
    placement = _PLACEMENT.value
    params = {name: (shape, P()) for name, (shape, _) in (placement.params or {}).items()}
    with _PLACEMENT(dataclasses.replace(placement, params=params)):
        yield


def _gathered_spec(name: str, leaf: Any, free: Sequence[str]) -> P:
    """The spec of a parameter, or of a layer of it, without the batch's axes."""
    shape, spec = _PLACEMENT.value.params.get(name, ((), P()))
    rank = len(leaf.shape)
    if rank > len(shape) or shape[len(shape) - rank :] != tuple(leaf.shape):
        raise ValueError(
            f"gather: the state has no parameter {name!r} that ends in shape "
            f"{tuple(leaf.shape)}; give the path at which the subtree stands in state.params"
        )
    whole = _without_batch_axes(spec, len(shape), free)
    return P(*whole[len(shape) - rank :])


def gather_for_loss(params: PyTree, shardings: PyTree | None = None) -> PyTree:
    """Parameters as a loss is given them on a mesh: where :func:`specs_for_loss` says so, gathered.

    Args:
      params, shardings: see there.
    """
    specs = specs_for_loss(params, shardings)
    return params if specs is None else jax.lax.with_sharding_constraint(params, specs)


def specs_for_loss(params: PyTree, shardings: PyTree | None = None) -> PyTree | None:
    """Returns the specs in which a loss that pins nothing reads parameters; None changes nothing.

    If three or more axes are left to XLA's partitioner and the batch's split weights too, it may
    reshard wrongly: unconstrained models then have wrong gradients, and some a wrong loss (jax
    0.10.2). This has not been seen with weights that lose the batch's axes first.

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
        ambient, by_name = not jax.sharding.get_abstract_mesh().empty, named_leaves(shardings)

        def entered(name: str, x: jax.Array) -> P | NamedSharding:
            sharding = by_name[name]
            spec = _without_batch_axes(sharding.spec, x.ndim, free)
            return spec if ambient else NamedSharding(sharding.mesh, spec)

        return map_named(entered, params)
    if _PLACEMENT.value.params is None:
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
    """Checks that a loss traced within pins something, where :func:`gather_for_loss` would gather.

    Raises:
      ValueError: where it calls neither :func:`constrain` nor :func:`gather`.
    """
    placement, (mesh, free) = _PLACEMENT.value, _mesh_that_needs_it(None)
    before = placement.pins
    yield
    if free and placement.pins == before:
        raise ValueError(
            f"the step is built with gather='model' and its loss calls neither jaxtrain.gather nor "
            f"jaxtrain.constrain, on a mesh {describe_mesh(mesh)}: call them, or leave gather out"
        )


def _without_batch_axes(spec: P, rank: int, free: Sequence[str]) -> P:
    """A spec with an entry per dimension, of free axes that split no batch."""
    entries = map(names_of, entries_of(spec, rank))
    kept = [tuple(a for a in axes if a in free and a not in GATHERED_AXES) for axes in entries]
    return P(*map(tidy, kept))


def in_shard_map() -> bool:
    """Whether the code being traced is inside a ``shard_map`` over some axis of the mesh."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Manual in kinds


def row_numbers(count: int) -> jax.Array:
    """The numbers [count], among all rows of a microbatch, of those that code is traced for.

    They differ from 0 .. count - 1 where surrounding ``shard_map`` code has taken over the axes
    that split the batch, and a device sees its own rows alone.
    """
    taken = manual_batch_axes()
    return (jax.lax.axis_index(taken) * count if taken else 0) + jnp.arange(count)


def manual_batch_axes() -> tuple[str, ...]:
    """The axes that split the batch and that surrounding ``shard_map`` code has taken over."""
    mesh, apart = jax.sharding.get_abstract_mesh(), _PLACEMENT.value.apart
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(a for a in BATCH_AXES if kinds.get(a) == AxisType.Manual and a not in apart)


def stands_apart() -> bool:
    """Whether what is traced is one of several parts that :func:`apart_along` sets apart."""
    return bool(_PLACEMENT.value.apart)


@contextlib.contextmanager
def apart_along(*axes: str) -> Iterator[None]:
    """Makes the code traced within, inside ``shard_map`` over these axes, one training of several:
    the devices along them have batches of their own, in which rows are counted from 0."""
    with _PLACEMENT(dataclasses.replace(_PLACEMENT.value, apart=axes)):
        yield


def constrain_tree(shardings: PyTree | None) -> Callable[[PyTree], PyTree]:
    """Returns a function that pins a pytree to ``shardings``, if any, in a jitted computation.

    Of axes that surrounding ``shard_map`` code has taken over nothing is said.
    """

    def pin(tree: PyTree) -> PyTree:
        if shardings is None or not in_shard_map():
            return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)
        free = free_axes(jax.sharding.get_abstract_mesh())
        specs = jax.tree.map(lambda sharding: restrict(sharding.spec, free), shardings)
        return jax.lax.with_sharding_constraint(tree, specs)

    return pin
