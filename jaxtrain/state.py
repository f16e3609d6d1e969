"""The train state: everything that a step reads and writes, as one pytree, born sharded."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.precision import LossScale, Policy, as_policy
from jaxtrain.sharding.mesh import automatic
from jaxtrain.sharding.offload import is_on_host, to_host
from jaxtrain.sharding.rules import (
    Rule,
    Rules,
    as_rules,
    param_shardings,
    ruled_shardings,
    state_shardings,
)
from jaxtrain.sharding.specs import entries_of, names_of, tidy
from jaxtrain.sharding.stack import of_model
from jaxtrain.tree import PyTree, by_paths, combine, map_named, named_leaves, partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a train step carries from one call to the next.

    Args:
      step: int32 scalar, calls of the step so far; the batch and the randomness of a step depend on
        it and on nothing else.
      params: nested dict of arrays.
      opt_state: the optimizer's state.
      model_state: what the model updates outside of gradients (BatchNorm statistics), or None.
      rng: typed PRNG key; the randomness of a step is ``fold_in(rng, step)``.
      loss_scale: dynamic loss scale, or None.
      skipped: int32 scalar, microbatches left out so far because they were not finite.
      memory: what a :class:`jaxtrain.engines.plain.Engine` remembers, or None.
      method: what a :class:`jaxtrain.methods.method.Method` keeps, or None.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    loss_scale: LossScale | None
    skipped: jax.Array
    memory: PyTree = None
    method: PyTree = None

    def __repr__(self) -> str:  # A notebook shows the last value of a cell: no arrays.
        try:
            step = str(self.step)
        except RuntimeError:  # It was donated.
            step = "gone"
        parameters = sum(getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self.params))
        return f"TrainState(step={step}, {parameters:,} parameters)"


def init_state(
    init_fn: Callable[[jax.Array], PyTree],
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    *,
    params: PyTree | None = None,
    mesh: Mesh | None = None,
    rules: Rules | Sequence[Rule] | None = None,
    zero: int = 0,
    policy: Policy | str | None = None,
    has_model_state: bool = False,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    memory: Callable[[PyTree], PyTree] | None = None,
    whole: bool = False,
) -> TrainState:
    """Creates a train state, each leaf directly in its place on the mesh.

    Args:
      init_fn: ``rng -> params``, or ``rng -> (params, model_state)`` with ``has_model_state``.
      optimizer: any optax transformation.
      rng: typed key, such as ``jax.random.key(0)``. It is split in two: ``init_fn`` is given one
        half (so ``state.params`` is not ``init_fn(rng)``), and the steps have the other.
      params: weights to start from, on the host or on devices, under the paths that ``init_fn``
        gives them. Leaf by leaf they are copied to their places, and stay as they are. Of a leaf
        that has a shape and a dtype and is no JAX array, such as one of
        :func:`jaxtrain.hf.open_weights`, the slices of this process's devices alone are read.
        Parameters that are not among them (a new head) are those of ``init_fn``.
      mesh: from :func:`jaxtrain.make_mesh`; None for one device (and under ``vmap``).
      rules: sharding rules by parameter path; without one, a parameter is split over ``fsdp`` along
        its largest dimension that divides. ``Rules(state=)`` are for optimizer and model state.
      zero: what is split over the ``data`` axis too (Rajbhandari et al. 2020): 0 nothing, 1 the
        optimizer state, 2 also gradients (see :func:`gradient_shardings`), 3 also parameters. The
        ``fsdp`` axis splits all three at any value.
      policy: the dtype of parameters, and the loss scale; float32 and none by default.
      has_model_state: whether ``init_fn`` returns model state too.
      offload_optimizer: whether the optimizer state lies in the memory of the host, and comes to
        the devices for the update alone; with a mesh.
      offload_parameters: whether the parameters that ``rules.stacked`` holds lie there too, of
        which the scan over layers fetches one layer at a time, and the update all; with a mesh.
      memory: ``init`` of the step's :class:`jaxtrain.engines.plain.Engine`, if it has one.
      whole: whether each device makes all of it and then keeps its part, so that no bit depends on
        the mesh, as steps with ``exact`` want.

    Returns:
      The state. On every mesh the same ``rng`` gives the same numbers (the last bit of normal ones
      is rounded by the shape of a shard, as of jax 0.12).

    Raises:
      ValueError: for a parameter that its rule does not fit, or that would stay whole by accident;
        for a leaf of ``params`` that is no parameter, or has another shape or kind of dtype; for
        ``offload_optimizer`` and ``offload_parameters`` where the devices cannot read the host's
        memory, or without a mesh.

    >>> import optax
    >>> init_state(lambda rng: {"w": jax.numpy.ones(3)}, optax.sgd(0.1), jax.random.key(0)).step
    Array(0, dtype=int32)
    """
    create = _creator(init_fn, optimizer, as_policy(policy), has_model_state, rules, memory)
    placing = _placing(zero, offload_optimizer, offload_parameters)
    like = _abstract(create, rng, mesh, rules, **placing)
    shardings = None if mesh is None else jax.tree.map(lambda x: x.sharding, like)
    given = _placed(params, like.params)

    def remainder(rng: jax.Array, given: dict[str, jax.Array]) -> TrainState:
        state = create(rng, given)
        return dataclasses.replace(state, params=_rest(state.params, given))

    whole = whole and mesh is not None
    copied = NamedSharding(automatic(mesh), P()) if whole else shardings
    state = jax.jit(remainder, out_shardings=copied)(rng, given)
    if whole:  # But for given ones, which are in their places.
        places = dataclasses.replace(shardings, params=_rest(shardings.params, given))
        state = jax.device_put(state, places)
    there = by_paths(given, like.params)
    return dataclasses.replace(state, params=combine(there, state.params))


def abstract_state(
    init_fn: Callable[[jax.Array], PyTree],
    optimizer: optax.GradientTransformation,
    *,
    rng: jax.Array | None = None,
    mesh: Mesh | None = None,
    rules: Rules | Sequence[Rule] | None = None,
    zero: int = 0,
    policy: Policy | str | None = None,
    has_model_state: bool = False,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    memory: Callable[[PyTree], PyTree] | None = None,
) -> TrainState:
    """Like :func:`init_state`, in shapes, dtypes and shardings alone: nothing is allocated.

    Args:
      init_fn, optimizer, mesh, rules, zero, policy, has_model_state, offload_optimizer,
        offload_parameters, memory: as there.
      rng: the key there, or its shape: the state holds one of its kind (``impl``); None stands for
        ``jax.random.key(0)``.

    Returns:
      A ``TrainState`` of ``jax.ShapeDtypeStruct``, to restore a checkpoint into or compile for.
    """
    create = _creator(init_fn, optimizer, as_policy(policy), has_model_state, rules, memory)
    rng = jax.eval_shape(lambda: jax.random.key(0)) if rng is None else rng
    placing = _placing(zero, offload_optimizer, offload_parameters)
    return _abstract(create, rng, mesh, rules, **placing)


def train_state_shardings(
    state: TrainState,
    mesh: Mesh,
    rules: Rules | Sequence[Rule] | None = None,
    *,
    zero: int = 0,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> TrainState:
    """Returns a ``TrainState`` of ``NamedSharding`` for a state (shapes suffice)."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"`zero` is {zero!r}: use 0, 1, 2 or 3")
    mesh, rules = automatic(mesh), as_rules(rules)
    params = param_shardings(state.params, mesh, rules, zero=zero)
    rest, copied = dataclasses.replace(state, params=None), NamedSharding(mesh, P())
    follow = lambda tree: state_shardings(tree, state.params, params, mesh, zero=zero)  # noqa: E731
    shardings = dataclasses.replace(
        jax.tree.map(lambda _: copied, rest),
        opt_state=follow(state.opt_state),
        memory=follow(state.memory),
        method=follow(state.method),
    )
    if lead := rules.mesh_axes("members", mesh):
        for part in ("method", "memory"):
            own = getattr(state, part)
            apart = state_shardings(own, state.params, params, mesh)
            lies = map_named(partial(_along, lead), own, apart, getattr(shardings, part))
            shardings = dataclasses.replace(shardings, **{part: lies})
    ruled = ruled_shardings(rest, shardings, mesh, rules)
    if offload_optimizer:
        ruled = dataclasses.replace(
            ruled, opt_state=to_host(ruled.opt_state, state.opt_state, mesh)
        )
    if offload_parameters:
        how = {"asked": "offload_parameters", "held": rules.stacked.holds}
        params = to_host(params, state.params, mesh, **how)
    return dataclasses.replace(ruled, params=params)


def gradient_shardings(state: TrainState, *, zero: int = 0) -> PyTree | None:
    """Returns how gradients are to lie: like parameters, and with ``zero >= 2`` also over ``data``.

    Args:
      state: a state on a mesh (shapes with shardings suffice).
      zero: as in :func:`init_state`.

    Returns:
      A ``NamedSharding`` per parameter, on the devices; None, which pins nothing, for a state
      without a mesh.
    """
    shardings = jax.tree.map(
        lambda p: NamedSharding(p.sharding.mesh, p.sharding.spec) if is_on_host(p) else p.sharding,
        state.params,
    )
    mesh = getattr(jax.tree.leaves(shardings)[0], "mesh", None)
    if mesh is None:
        return None
    if zero < 2:
        return shardings
    return state_shardings(state.params, state.params, shardings, mesh, zero=zero)


def describe_sharding(state: PyTree) -> str:
    """Draws a table of what lies where: name, shape, dtype, spec, and bytes per device.

    Args:
      state: any pytree of arrays, or of shapes with shardings; of a ``TrainState`` parameters and
        model state are listed, with totals for these and for optimizer state.

    >>> print(describe_sharding({"w": jax.numpy.ones((2, 3))}))
    parameter  shape  dtype    spec   bytes/device
    w          2x3    float32  whole            24
    total                                       24
    """
    listed, totals = named_leaves(state), {}
    if isinstance(state, TrainState):
        listed = named_leaves(state.params) | named_leaves({"model_state": state.model_state})
        totals["parameters"] = local_bytes(state.params)
        if hosted := host_bytes(state.params):
            totals["parameters on the host"] = hosted
        totals["optimizer state"] = local_bytes(state.opt_state)
        if hosted := host_bytes(state.opt_state):
            totals["optimizer state on the host"] = hosted
        if state.model_state is not None:
            totals["model state"] = local_bytes(state.model_state)
    totals["total"] = local_bytes(state)
    rows = [("parameter", "shape", "dtype", "spec", "bytes/device")]
    for name, leaf in listed.items():
        spec = getattr(getattr(leaf, "sharding", None), "spec", P())
        text = ", ".join("+".join(names_of(entry)) or "-" for entry in spec)
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        split = text if any(spec) else "whole"
        rows.append((name, shape, str(leaf.dtype), split, f"{local_bytes(leaf):,}"))
    rows += [(name, "", "", "", f"{size:,}") for name, size in totals.items()]
    *widths, last = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1].rjust(last)]) for row in rows)


def shapes_on(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns the shapes of a pytree (of arrays, or of shapes) with these shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def local_bytes(tree: PyTree) -> int:
    """Returns the bytes that a pytree (arrays, or shapes with shardings) takes on one device.

    What lies in the memory of the host is left out; that is :func:`host_bytes`.
    """
    return _bytes_of([leaf for leaf in jax.tree.leaves(tree) if not is_on_host(leaf)])


def host_bytes(tree: PyTree) -> int:
    """Returns the bytes in the memory of the host that a pytree takes for one device."""
    return _bytes_of([leaf for leaf in jax.tree.leaves(tree) if is_on_host(leaf)])


def _rest(tree: PyTree, given: Mapping[str, Any]) -> PyTree:
    return partition(lambda name, _: name in given, tree)[1]


def _along(
    axes: Sequence[str], name: str, leaf: Any, apart: NamedSharding, other: NamedSharding
) -> NamedSharding:
    """The sharding of a leaf of a method or a memory: of ``members``, each on its part of axes."""
    parts = math.prod(apart.mesh.shape[axis] for axis in axes)
    if not name.startswith("members/") or leaf.shape[0] % parts:
        return other
    own = [
        tidy(tuple(a for a in names_of(entry) if a not in axes))
        for entry in entries_of(apart.spec, leaf.ndim)[1:]
    ]
    return NamedSharding(apart.mesh, P(tidy(tuple(axes)), *own))


def _bytes_of(leaves: Sequence[Any]) -> int:
    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), leaf.dtype))
            return math.prod(shape) * math.prod(data.shape) * data.dtype.itemsize
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, leaves))


def _placing(zero: int, offload_optimizer: bool, offload_parameters: bool) -> dict[str, Any]:
    offloaded = {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
    return {"zero": zero} | offloaded


def _abstract(create, rng, mesh: Mesh | None, rules, **placing: Any):
    """The state that ``create`` makes of a key, in shapes with the shardings that it is to have."""
    shapes = jax.eval_shape(create, rng)
    if mesh is not None:
        return shapes_on(shapes, train_state_shardings(shapes, mesh, rules, **placing))
    for name in ("offload_optimizer", "offload_parameters"):
        if placing[name]:
            raise ValueError(
                f"`{name}` places state on a mesh and there is none: pass mesh=make_mesh(), which "
                "one device may make"
            )
    return shapes


def _placed(params: PyTree, like: PyTree) -> dict[str, jax.Array]:
    """Copies of given weights by path, each in its place and in the dtype of its parameter."""
    wanted, given = named_leaves(like), named_leaves(params)
    for name, leaf in given.items():
        if name not in wanted:
            raise ValueError(
                f"params has a leaf {name!r} and init_fn makes none of that path, but "
                f"{', '.join(wanted)}: rename it or leave it out"
            )
        leaf = given[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        like, shape, dtype = wanted[name], leaf.shape, jnp.result_type(leaf.dtype)
        both_floating = all(jnp.issubdtype(d, jnp.floating) for d in (dtype, like.dtype))
        if shape != like.shape or not (dtype == like.dtype or both_floating):
            raise ValueError(
                f"params has {name!r} as {dtype}{list(shape)} and init_fn makes it as "
                f"{like.dtype}{list(like.shape)}: reshape or cast it, or correct init_fn"
            )
    # The largest first: while a leaf is copied, it is in memory twice.
    order = sorted(given, key=lambda name: -wanted[name].size)
    return {name: _copied(given[name], wanted[name]) for name in order}


def _copied(leaf: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    dtype, sharding = like.dtype, like.sharding
    if not isinstance(leaf, jax.Array):
        if sharding is None:
            return jnp.array(np.asarray(leaf), dtype)
        shard = lambda index: np.array(leaf[index], dtype)  # noqa: E731
        return jax.make_array_from_callback(leaf.shape, sharding, shard)
    leaf = leaf if sharding is None else jax.device_put(leaf, sharding)
    # What device_put returns may share the buffer of what it was given, which a step would donate.
    return jax.jit(_cast, static_argnums=1, out_shardings=sharding)(leaf, dtype)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return jnp.copy(x).astype(dtype)


def _creator(init_fn, optimizer, policy, has_model_state, rules, memory):
    def create(rng: jax.Array, given: Mapping[str, jax.Array] | None = None) -> TrainState:
        init_rng, step_rng = jax.random.split(rng)
        params, model_state = init_fn(init_rng), None
        if getattr(init_fn, "has_model_state", False) and not has_model_state:
            raise ValueError(
                "init_fn returns model state too: pass has_model_state=True to init_state and to "
                "the step builders"
            )
        if has_model_state:
            if not isinstance(params, tuple) or len(params) != 2:
                raise ValueError(
                    "with has_model_state=True init_fn returns (params, model_state), and it "
                    f"returned {type(params).__name__}"
                )
            params, model_state = params
        params = policy.cast_to_param(params)
        if given:
            params = map_named(lambda name, made: given.get(name, made), params)
        with of_model((as_rules(rules).stacked, False)):
            opt_state = optimizer.init(params)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            rng=step_rng,
            loss_scale=policy.initial_loss_scale(),
            skipped=jnp.int32(0),
            memory=memory and memory(params),
        )

    return create
