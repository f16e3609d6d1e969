"""What a model gives to be pipelined: its embedding, one layer, and its loss.

S devices along the mesh axis ``pipe`` hold V chunks of consecutive layers each
(:mod:`jaxtrain.parallel.stack`); global stage g = v S + s is chunk v of device s. The first stage
also embeds, the last also has the loss.

Shapes: B rows of a microbatch, L layers of the model, C = L / (S V) layers of a chunk.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.placement import entered_specs
from jaxtrain.parallel.stack import Stack
from jaxtrain.tree import named_leaves

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model as embedding, layers and loss.

    Put together, in this order, the three are the loss function that the other gradient engines
    take; they must name no mesh axis ``pipe``.

    Args:
      embed: ``(params, batch, rng) -> x``, one array [B, ...] whose shape and dtype every layer
        keeps. ``rng`` is the microbatch's key.
      block: ``(layer_params, x, batch, rng) -> x``, one layer; for layer l its ``rng`` is
        ``jax.random.fold_in(key, l)`` of the microbatch's key. What a block keeps for its backward
        pass is its own affair: wrap it in ``jax.checkpoint`` to keep less.
      head_loss: ``(params, x, batch) -> WeightedLoss`` or scalar (weight 1). The weight is a
        function of ``batch`` alone.
      stacked: the parameters of the layers, as a :class:`jaxtrain.Stack` or its key: every leaf
        there has a leading layer axis, integers (which do not train) too. ``embed`` and
        ``head_loss`` get all parameters but these.
      scan_unroll: layers per iteration of the scan over a chunk's layers.
    """

    embed: Callable[[PyTree, PyTree, jax.Array], jax.Array]
    block: Callable[[PyTree, jax.Array, PyTree, jax.Array], jax.Array]
    head_loss: Callable[[PyTree, jax.Array, PyTree], Any]
    stacked: Stack | str = Stack()  # noqa: RUF009
    scan_unroll: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stacked, str):
            object.__setattr__(self, "stacked", Stack(self.stacked))


def layers_per_chunk(stages: Stages, params: PyTree, *, devices: int) -> int:
    """Returns C, having checked the stacked parameters' shapes.

    Raises:
      ValueError: where there are none, their leading axes differ, or S x V does not divide L.
    """
    key, virtual, lead = stages.stacked.key, stages.stacked.virtual, stages.stacked.lead
    if not isinstance(params, Mapping) or key not in params:
        has = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        raise ValueError(
            f"a pipeline needs the parameters of its layers under the key {key!r} and "
            f"finds {has}: stack them there, or set Stages(stacked=...)"
        )
    leaves = named_leaves(params[key])
    first = tuple(next(iter(leaves.values())).shape[:lead])
    for name, leaf in leaves.items():
        shape = tuple(leaf.shape)
        if len(shape) < lead or shape[:lead] != first or (lead == 2 and shape[0] != virtual):
            form = "[L, ...]" if lead == 1 else f"[{virtual}, L / {virtual}, ...] (Stack.cut)"
            raise ValueError(
                f"stacked parameter '{key}/{name}' has shape {shape}: with "
                f"virtual={virtual} a pipeline needs all of them as {form}, with one and the same L"
            )
    layers = first[0] if lead == 1 else virtual * first[1]
    if layers % (devices * virtual):
        parts = f"{devices} stages" + (f" x {virtual} virtual" if virtual > 1 else "")
        raise ValueError(
            f"{layers} layers are not divisible by {parts} = {devices * virtual}: use a number of "
            f"layers that is a multiple of {devices * virtual}, or another mesh axis 'pipe'"
        )
    return layers // (devices * virtual)


def enter_stages(
    stages: Stages, params: PyTree, shardings: PyTree | None = None
) -> tuple[PyTree, Stages]:
    """:func:`jaxtrain.parallel.placement.entered_specs` for stages: weights are gathered before the
    first tick, and stay so wherever a stage reads them and hands back their gradients.

    Outer parameters are then whole on all axes: of a lookup in a table that is split by rows, XLA's
    partitioner aborts within the map over ``pipe``, or exchanges rows within a branch that only one
    stage takes, where all others wait for it.

    Args:
      stages, params: the model.
      shardings: as for ``enter_loss``.
    """
    specs = entered_specs(params, shardings)
    if specs is None:
        return params, stages
    pin = jax.lax.with_sharding_constraint

    def outer(params: PyTree) -> PyTree:
        return jax.tree.map(lambda x: pin(x, P()), params)

    def layer(x: jax.Array, spec: Any) -> jax.Array:
        entries = getattr(spec, "spec", spec)
        return pin(x, P(*entries[len(entries) - x.ndim :]))

    return pin(params, specs), dataclasses.replace(
        stages,
        embed=lambda params, batch, rng: stages.embed(outer(params), batch, rng),
        block=lambda params, x, batch, rng: stages.block(
            jax.tree.map(layer, params, specs[stages.stacked.key]), x, batch, rng
        ),
        head_loss=lambda params, x, batch: stages.head_loss(outer(params), x, batch),
    )


def run_layers(
    stages: Stages,
    stacked: PyTree,
    x: jax.Array,
    batch: PyTree,
    rng: jax.Array,
    first: int | jax.Array = 0,
) -> jax.Array:
    """Scans consecutive layers.

    Args:
      stacked: parameters with a leading axis C.
      x: [B, ...].
      batch, rng: the microbatch and its key.
      first: the number, in the whole model, of the first of these layers.

    Raises:
      ValueError: where a layer changes the shape or dtype of ``x``.
    """
    count = jax.tree.leaves(stacked)[0].shape[0]

    def layer(x, params_and_index):
        layer_params, index = params_and_index
        layer_rng = None if rng is None else jax.random.fold_in(rng, index)
        y = stages.block(layer_params, x, batch, layer_rng)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"a block turns {x.dtype}{list(x.shape)} into {y.dtype}{list(y.shape)}: every "
                "stage of a pipeline must keep the shape and dtype of the residual stream"
            )
        return y, None

    return jax.lax.scan(layer, x, (stacked, first + jnp.arange(count)), unroll=stages.scan_unroll)[
        0
    ]
