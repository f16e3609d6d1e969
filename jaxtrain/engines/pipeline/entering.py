"""Weights enter a pipeline's stages: how they are laid out, gathered and held there."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxtrain.jaxprs import equations
from jaxtrain.sharding.placement import gather, replicated_params, specs_for_loss, specs_of
from jaxtrain.sharding.stack import Stack
from jaxtrain.stages import Stages
from jaxtrain.tree import PyTree, named_leaves


def layers_of_stages(stages: Stages, params: PyTree, *, devices: int) -> tuple[int, ...]:
    """Returns how many layers each global stage has, having checked the stacked parameters' shapes.

    Raises:
      ValueError: where their leading axes differ, S x V does not divide L, or they are not cut as
        ``Stack.counts`` says.
    """
    parts = stages.stacked.parts
    return tuple(
        count for part in parts for count in _layers_of_stack(part, params[part.key], devices)
    )


def _layers_of_stack(stack: Stack, params: PyTree, devices: int) -> tuple[int, ...]:
    lead, virtual, parts = stack.lead, stack.virtual, devices * stack.virtual
    if stack.counts is not None and len(stack.counts) != parts:
        raise ValueError(
            f"Stack.counts of {stack.key!r} is {stack.counts}, for {len(stack.counts)} stages, and "
            f"the pipeline has {devices} devices x {virtual} virtual = {parts}: give {parts} counts"
        )
    padded = max(stack.counts) * parts if stack.padded else None
    leaves = named_leaves(params)
    first = tuple(next(iter(leaves.values())).shape[:lead])
    for name, leaf in leaves.items():
        shape = tuple(leaf.shape)
        wrong = len(shape) < lead or shape[:lead] != first or (lead == 2 and shape[0] != virtual)
        if wrong or padded not in (None, math.prod(first)):
            L = "L" if padded is None else padded
            form = f"[{L}, ...]" if lead == 1 else f"[{virtual}, {L} / {virtual}, ...]"
            raise ValueError(
                f"stacked parameter '{stack.key}/{name}' has shape {shape}: with virtual={virtual} "
                f"a pipeline needs all of them as {form} (Stack.cut), with one and the same L"
            )
    layers = math.prod(first)
    if layers % parts:
        times = f"{devices} stages" + (f" x {virtual} virtual" if virtual > 1 else "")
        raise ValueError(
            f"{layers} layers are not divisible by {times} = {parts}: place them with "
            f"Stack(counts=...), use a number of layers that is a multiple of {parts}, or another "
            "mesh axis 'pipe'"
        )
    return stack.counts or (layers // parts,) * parts


def gather_for_stages(
    stages: Stages, params: PyTree, shardings: PyTree | None = None
) -> tuple[PyTree, Stages]:
    """:func:`jaxtrain.sharding.placement.specs_for_loss` for stages: weights are gathered before
    the first tick, and stay so wherever a stage reads them and hands back their gradients.

    Outer parameters, shared ones too, are then whole on all axes: of a lookup in a table that is
    split by rows, XLA's partitioner aborts within the map over ``pipe``, or exchanges rows within a
    branch that only one stage takes, where all others wait for it.

    Args:
      stages, params: the model.
      shardings: as for ``gather_for_loss``.
    """
    specs = specs_for_loss(params, shardings)
    if specs is None:
        return params, stages
    pin = jax.lax.with_sharding_constraint

    def outer(params: PyTree) -> PyTree:
        return jax.tree.map(lambda x: pin(x, P()), params)

    def layer(x: jax.Array, spec: Any) -> jax.Array:
        entries = getattr(spec, "spec", spec)
        return pin(x, P(*entries[len(entries) - x.ndim :]))

    def pinned_block(block: Callable, key: str) -> Callable:
        def pinned(params: PyTree, *rest: Any) -> PyTree:
            if stages.shared is not None:
                rest = (outer(rest[0]), *rest[1:])
            return block(jax.tree.map(layer, params, specs[key]), *rest)

        return pinned

    def pinned(function: Callable) -> Callable:
        return lambda params, *rest: function(outer(params), *rest)

    keys = (part.key for part in stages.stacked.parts)
    return pin(params, specs), dataclasses.replace(
        stages,
        embed=pinned(stages.embed),
        block=tuple(map(pinned_block, stages.blocks, keys)),
        head_loss=pinned(stages.head_loss),
        between=tuple(map(pinned, stages.between)),
    )


def gather_in_stages(stages: Stages, params: PyTree, microbatch: PyTree) -> Stages:
    """Gathers what a stage reads besides layers as it reads it, where the model gathers layers.

    A model that pins activations alone leaves to XLA's partitioner how weights meet them. It may
    exchange parts of a weight with a permutation, of which all devices of the mesh are part, within
    a branch that only one stage takes: that one then waits for all others. Where anything is looked
    up, by a token or of a target, parameters are whole on all axes, as those of
    :func:`gather_for_stages`, unless every device looks up what it has itself
    (:func:`jaxtrain.ops.lookup.embed_lookup`).

    Args:
      stages, params: the model.
      microbatch: what its functions are traced with.
    """
    if specs_of(params) is None:
        return stages
    outer = stages.outer(params)
    x = jax.eval_shape(stages.embed, outer, microbatch, None)

    def gathered(function: Callable, *rest: Any) -> Callable:
        traced = jax.make_jaxpr(function)(outer, *rest).jaxpr
        if all(eqn.primitive.name != "gather" for eqn in equations(traced, but="shard_map")):
            return lambda params, *rest: function(gather(params), *rest)

        def whole(params: PyTree, *rest: Any) -> PyTree:
            with replicated_params():
                return function(gather(params), *rest)

        return whole

    return dataclasses.replace(
        stages,
        embed=gathered(stages.embed, microbatch, None),
        head_loss=gathered(stages.head_loss, x, microbatch),
        between=tuple(gathered(function, x, microbatch, None) for function in stages.between),
    )
