"""Several trainings in one state: each by itself, and on a mesh each on its own devices.

The states of the members have a leading axis, the logical axis ``members`` of the rules. Where
their number is a multiple of the mesh axis ``data``, each part of that axis has its own members,
and nothing is sent between the parts. Elsewhere all devices compute one member after another. What
a member computes is the same either way, to rounding.

Shapes: M members, B rows of a batch.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.plain import trainable
from jaxtrain.sharding.placement import apart_along, free_axes, sizes_are_final
from jaxtrain.tree import PyTree, named_leaves, partition

# The mesh axis whose parts have members of their own.
AXIS = "data"
Together = Literal["map", "vmap"]


def check_engine(experiment: Any) -> None:
    """Raises ValueError where gradients are of parts of a batch, whose axis members stand on."""
    if experiment.task.engine.by_parts:
        raise ValueError(
            "gradients are compressed (`compress.name`) over the mesh axis on which replicas, or "
            "members of a population, train by themselves: leave one out"
        )


def own_part(params: PyTree, still: Any) -> PyTree:
    """Returns what a member has of parameters: those that train, and strengths of additions.

    ``still`` are the paths of frozen parameters (:func:`jaxtrain.optim.frozen`).
    """
    trains = named_leaves(trainable(params, still)[0])
    return partition(lambda name, _: name in trains or name.endswith("/factor"), params)[0]


def split_like(part: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Splits parameters into those at the paths of ``part``, and the rest."""
    names = named_leaves(part).keys()
    return partition(lambda name, _: name in names, params)


def at(tree: PyTree, index: Any) -> PyTree:
    """Returns the member of this number."""
    return jax.tree.map(lambda x: x[index], tree)


def parts_of(count: int) -> int:
    """Returns over how many parts of the mesh that is traced for so many members are spread."""
    mesh = jax.sharding.get_abstract_mesh()
    if AXIS not in free_axes(mesh) or not sizes_are_final():
        return 1
    return mesh.shape[AXIS] if count % mesh.shape[AXIS] == 0 else 1


def each(
    one: Callable[[PyTree, PyTree, PyTree], PyTree],
    members: PyTree,
    batch: PyTree,
    shared: PyTree,
    *,
    split: bool,
    together: Together = "map",
) -> PyTree:
    """Computes ``one(member, batch, shared)`` of every member.

    Args:
      one: a pure function, of a member without its leading axis.
      members: leaves [M, ...].
      batch: leaves [B, ...], and scalars.
      shared: what all members have alike.
      split: whether each member has its own B / M rows, in order, or all have the whole batch.
      together: whether members on the same devices are computed one after another or all at once.

    Returns:
      What ``one`` returns, with a leading axis [M, ...].
    """
    count = jax.tree.leaves(members)[0].shape[0]
    parts = parts_of(count)
    here = count // parts

    def on_part(members: PyTree, batch: PyTree, shared: PyTree) -> PyTree:
        if not split:
            return _all(lambda member: one(member, batch, shared), members, together)
        rows = lambda x: x.reshape(here, -1, *x.shape[1:])  # noqa: E731
        cut = jax.tree.map(
            lambda x: rows(x) if jnp.ndim(x) else jnp.broadcast_to(x, (here,)), batch
        )
        return _all(lambda pair: one(*pair, shared), (members, cut), together)

    if parts == 1:
        return on_part(members, batch, shared)

    def on_devices(*given: PyTree) -> PyTree:
        with apart_along(AXIS):
            return on_part(*given)

    along = jax.tree.map(lambda x: P(AXIS) if split and jnp.ndim(x) else P(), batch)
    mapped = jax.shard_map(
        on_devices,
        axis_names={AXIS},
        in_specs=(P(AXIS), along, P()),
        out_specs=P(AXIS),
        check_vma=False,
    )
    return mapped(members, batch, shared)


def _all(one: Callable[[PyTree], PyTree], xs: PyTree, together: Together) -> PyTree:
    if jax.tree.leaves(xs)[0].shape[0] == 1:  # without a loop, which is another program
        return jax.tree.map(lambda x: x[None], one(at(xs, 0)))
    return jax.lax.map(one, xs) if together == "map" else jax.vmap(one)(xs)
