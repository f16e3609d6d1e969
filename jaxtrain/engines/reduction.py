"""Gradients summed on every device, and reduced over the axes of the batch once per step.

Left to XLA's partitioner, the gradients of every microbatch are reduced as they come, and what is
gathered for one microbatch is gathered again for the next. Here ``jax.shard_map`` takes over axes
that split the batch: a device sums what its own rows give, and the sums are reduced in the end.

That cuts a microbatch into the rows of each device, which is right only for a loss that is a sum
over rows (:func:`jaxtrain.row_wise`); any other is left to the partitioner. What a loss draws by
:func:`jaxtrain.ops.numerics.drop` is drawn row by row, and does not depend on the mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.plain import GradientEngine, GradientSums, run_engine, trainable
from jaxtrain.loss import Last, Reduction, WeightedLoss, is_row_wise
from jaxtrain.sharding import collectives
from jaxtrain.sharding.mesh import BATCH_AXES
from jaxtrain.sharding.placement import (
    Gather,
    for_one_size,
    free_axes,
    rows_lead,
    slow_axes,
    specs_of,
    tell,
)
from jaxtrain.sharding.row_keys import draws_otherwise
from jaxtrain.sharding.specs import axes_of, names_of, within
from jaxtrain.tree import PyTree, map_named, named_leaves

PROMISE = "gradients are reduced"  # what the report of a compiled step calls it
ONCE = ", and weights are gathered once"


@dataclasses.dataclass(frozen=True)
class Shards:
    """The axes and specs of a map over axes of the batch.

    Args:
      axes: axes that the map takes over, outermost first.
      params: spec of each parameter on the mesh, by path.
      grads: spec that the gradient of each parameter is to have, by path.
      slow: number of parts across the slow network of each axis that has more than 1.
    """

    axes: tuple[str, ...] = ()
    params: Mapping[str, P] = dataclasses.field(default_factory=dict)
    grads: Mapping[str, P] = dataclasses.field(default_factory=dict)
    slow: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def gathered(self, params: PyTree) -> PyTree:
        """Within the map: parameters, or layers of them, whole along its axes."""

        def whole(name: str, x: jax.Array) -> jax.Array:
            for d, names in self._split(self.params[name]):
                x = collectives.all_gather(x, names, d, self.slow)
            return x

        return self._on_each_device(whole, self.params, params)

    def reduced(self, grads: PyTree, more: tuple[str, ...] = ()) -> PyTree:
        """Within the map: gradients of whole parameters, summed over its axes and ``more``."""

        def summed(name: str, grad: jax.Array) -> jax.Array:
            for d, names in self._split(self.grads[name]):
                grad = collectives.psum_scatter(grad, names, d, self.slow)
            rest = tuple(a for a in self.axes if a not in axes_of(self.grads[name]))
            return collectives.psum(grad, (*more, *rest), self.slow) if more or rest else grad

        return self._on_each_device(summed, self.grads, grads)

    def _split(self, spec: P) -> list[tuple[int, tuple[str, ...]]]:
        """The dimensions that the axes split, and which of them."""
        kept = enumerate(within(spec, self.axes))
        return [(d, names_of(entry)) for d, entry in kept if entry is not None]

    def _on_each_device(
        self, function: Callable[[str, jax.Array], jax.Array], specs: Mapping[str, P], tree: PyTree
    ) -> PyTree:
        """``function(name, leaf)`` with the axes that the map has left taken over too.

        Of a collective on what the partitioner splits along other axes, it makes one whole first.
        """
        if not (free := free_axes(jax.sharding.get_abstract_mesh())):
            return map_named(function, tree)

        def apart(name: str, _: jax.Array) -> P:
            # A dimension that both split would be put together in another order.
            both = [within(specs[name], self.axes), within(specs[name], free)]
            return P(*(None if a is not None else b for a, b in zip(*both, strict=True)))

        places = map_named(apart, tree)
        program = jax.shard_map(
            lambda tree: map_named(function, tree),
            axis_names=set(free),
            in_specs=(places,),
            out_specs=places,
            check_vma=False,
        )
        return program(tree)

    def joined(self, loss: WeightedLoss, more: tuple[str, ...] = ()) -> WeightedLoss:
        """Within the map: the loss of the rows of all devices; all but sums are reduced in order.

        Args:
          loss: of this device's rows.
          more: further axes to sum over, along which all but one device have zeros.
        """

        def join(part: Any) -> Any:
            if not isinstance(part, Reduction):
                return jax.lax.psum(part, (*more, *self.axes))
            part = jax.lax.psum(part, more) if more else part
            every = jax.lax.all_gather(part, self.axes)
            first = jax.tree.map(lambda x: x[0], every)
            rest = jax.tree.map(lambda x: x[1:], every)
            return jax.lax.scan(lambda a, b: (a + b, None), first, rest)[0]

        return jax.tree.map(join, loss, is_leaf=lambda x: isinstance(x, Reduction))


def find_shards(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *given: Any,
    microbatches: int,
    gather: Gather | None,
    shardings: PyTree | None,
    obstacle: str | None,
) -> Shards | None:
    """Says which axes of the batch a gradient engine takes over, where it is traced for a mesh.

    With ``gather="step"`` those are all, and weights and gradients are whole along them for the
    whole step. Otherwise they are those that split neither, so that no more is kept than without.

    Args:
      loss_fn: of the engine, ``loss_fn(params, *given)``, which is traced for what it draws.
      params, given: as the engine has them; ``given`` ends in the key.
      microbatches: per step.
      gather, shardings: as for :func:`jaxtrain.build_train_step`.
      obstacle: what is known already to stand against it, as the end of "in every microbatch, ...".

    Returns:
      None where all is left to the partitioner.
    """
    mesh = jax.sharding.get_abstract_mesh()
    carried = tuple(a for a in BATCH_AXES if a in free_axes(mesh))
    if not carried or not for_one_size() or (microbatches == 1 and gather != "step"):
        return None
    specs = specs_of(params)
    wanted = specs if shardings is None else _specs(shardings)
    if wanted is None:
        obstacle = obstacle or "for the step does not know how its parameters lie"
    specs = wanted if specs is None else specs
    obstacle = (
        obstacle
        or _rows_apart(given[-2], microbatches, carried)
        or _obstacle(loss_fn, params, *given)
    )
    if obstacle is not None:
        if microbatches > 1:
            tell(PROMISE, f"in every microbatch, {obstacle}")
        return None
    kept = (specs,) if gather == "step" else (specs, wanted)
    splits = {axis for table in kept for spec in table.values() for axis in axes_of(spec)}
    split = [axis for axis in carried if axis in splits]
    axes = carried if gather == "step" else tuple(a for a in carried if a not in splits)
    found = [f"once per step over {' x '.join(axes)}{_inside_first(mesh, axes)}"] if axes else []
    if split and gather == "step":
        found[0] += ONCE
    elif split:
        each = f"in each of {microbatches} microbatches, whose weights or gradients it splits"
        found.append(f"over {' x '.join(split)} {each}")
    tell(PROMISE, "; ".join(found))
    return Shards(axes, specs, wanted, slow_axes()) if axes else None


def reduced_once(
    engine: GradientEngine,
    loss_fn: Callable[..., Any],
    *,
    cast: Callable[[PyTree], PyTree],
    microbatches: int,
    gather: Gather | None,
    shardings: PyTree | None,
    obstacle: str | None,
) -> GradientEngine:
    """Makes an engine that runs another on each device's rows and reduces its sums in the end.

    Args:
      engine: of the whole batch: one that adds what rows give.
      loss_fn: its loss, ``(params, model_state, batch, rng) -> (WeightedLoss, model_state)``.
      cast: parameters to the dtype in which they are gathered.
      microbatches, gather, shardings, obstacle: as for :func:`find_shards`.
    """

    def mapped(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        narrow = cast(params)
        shards = find_shards(
            loss_fn,
            narrow,
            model_state,
            batch,
            rng,
            microbatches=microbatches,
            gather=gather,
            shardings=shardings,
            obstacle=obstacle,
        )
        if shards is None:
            return run_engine(engine, params, model_state, batch, rng, loss_scale, frozen=frozen)

        def on_device(params, batch, rng, loss_scale):
            whole = shards.gathered(params)
            sums = run_engine(engine, whole, None, batch, rng, loss_scale, frozen=frozen)
            return shards.reduced(sums.grads), shards.joined(sums.loss)

        training, _ = trainable(narrow, frozen)
        program = jax.shard_map(
            on_device,
            axis_names=set(shards.axes),
            in_specs=(
                map_named(lambda name, _: within(shards.params[name], shards.axes), narrow),
                jax.tree.map(lambda x: P(shards.axes) if jnp.ndim(x) else P(), batch),
                P(),
                P(),
            ),
            out_specs=(
                map_named(lambda name, _: within(shards.grads[name], shards.axes), training),
                P(),
            ),
            # Nothing is differentiated through the map, and a loss need not say what varies.
            check_vma=False,
        )
        grads, loss = program(narrow, batch, rng, loss_scale)
        return GradientSums(grads, loss, None, microbatches)

    return mapped


def why_not(
    loss_fn: Callable[..., Any], *, has_model_state: bool = False, own_engine: bool = False
) -> str | None:
    """Returns the ``obstacle`` of :func:`find_shards` that is known before the loss is traced."""
    if has_model_state:
        return "for the model has state, which is that of all rows"
    if not is_row_wise(loss_fn):
        return "for the loss is not declared a sum over rows (jaxtrain.row_wise)"
    return "for the gradient engine is not jaxtrain.engines.plain.plain" if own_engine else None


def kept_by_gathering(params: PyTree, shardings: PyTree, dtype: Any) -> int:
    """Bytes that a device keeps for ``gather="step"`` and not without it.

    They are its weights whole along the axes of the batch in ``dtype``, and gradients in float32
    that are whole instead of split.

    Args:
      params: the parameters, or shapes.
      shardings: how their gradients lie.
      dtype: in which is computed.
    """

    def more(x: Any, sharding: NamedSharding) -> int:
        rest = tuple(a for a in sharding.mesh.axis_names if a not in BATCH_AXES)
        gathered = NamedSharding(sharding.mesh, within(sharding.spec, rest))
        whole, split = (math.prod(s.shard_shape(x.shape)) for s in (gathered, sharding))
        return whole * jnp.dtype(dtype).itemsize + 4 * (whole - split) if whole > split else 0

    return sum(jax.tree.leaves(jax.tree.map(more, params, shardings)))


def _obstacle(loss_fn: Callable[..., Any], *given: Any) -> str | None:
    """Returns why a loss that is declared a sum over rows is not one; None if it seems to be."""
    jaxpr, result = jax.make_jaxpr(loss_fn, return_shape=True)(*given)
    if draws_otherwise(jaxpr.jaxpr):
        return (
            "for the loss draws numbers otherwise than by jaxtrain.ops.numerics.drop, which "
            "draws row by row with keys of the kind threefry"
        )
    loss = result[0] if isinstance(result, tuple) else result
    metrics = getattr(loss, "metrics", {}).items()
    last = [name for name, value in metrics if isinstance(value, Last)]
    return f"for metric {last[0]!r} is the last of all parts" if last else None


def _rows_apart(batch: PyTree, microbatches: int, axes: tuple[str, ...]) -> str | None:
    """Returns why a batch cannot be cut into each device's rows of a microbatch, or None."""
    counts = {name: x.shape[0] for name, x in named_leaves(batch).items() if jnp.ndim(x)}
    rows = max(counts.values(), default=0)
    other = [name for name, count in counts.items() if count != rows]
    if other:
        return f"for batch leaf {other[0]!r} has {counts[other[0]]} rows and others have {rows}"
    if not rows_lead():
        return "for not every leaf of the batch begins with its rows"
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
    if rows % (microbatches * parts) == 0:
        return None
    return f"for its {rows // microbatches} rows do not divide over {parts} devices"


def _inside_first(mesh: Any, axes: tuple[str, ...]) -> str:
    """Returns the report's note on a sum that goes over fast links first; empty for others."""
    slow = slow_axes()
    both = math.prod(mesh.shape[a] for a in axes) > math.prod(slow.get(a, 1) for a in axes) > 1
    return ", on fast links first and in shares over the slow network" if both else ""


def _specs(shardings: PyTree) -> dict[str, P]:
    return {name: sharding.spec for name, sharding in named_leaves(shardings).items()}
