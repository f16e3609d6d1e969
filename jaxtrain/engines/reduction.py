"""Gradients summed on every device, and reduced over the axes of the batch once per step.

Left to XLA's partitioner, the gradients of every microbatch are reduced as they come, and what is
gathered for one microbatch is gathered again for the next. Here ``jax.shard_map`` takes over axes
that split the batch: a device sums what its own rows give, and the sums are reduced in the end.

That cuts a microbatch into the rows of each device, which is right only for a loss that is a sum
over rows (:func:`jaxtrain.row_wise`); any other is left to the partitioner. What a loss draws by
:func:`jaxtrain.ops.numerics.drop` is drawn row by row, and does not depend on the mesh.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.decisions import Kind, Reason, Reduced, Why
from jaxtrain.engines.plain import (
    Engine,
    GradientEngine,
    GradientSums,
    plain,
    run_engine,
    trainable,
)
from jaxtrain.loss import Last, is_row_wise
from jaxtrain.sharding.collectives import Shards
from jaxtrain.sharding.mesh import GATHERED_AXES
from jaxtrain.sharding.placement import (
    Gather,
    batch_is_leading,
    free_axes,
    report_finding,
    sizes_are_final,
    slow_axes,
    specs_of,
)
from jaxtrain.sharding.row_keys import draws, draws_otherwise, row_count
from jaxtrain.sharding.specs import axes_of, restrict
from jaxtrain.tree import PyTree, by_paths, name_of, named_leaves


def find_shards(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *given: Any,
    microbatches: int,
    gather: Gather | None,
    shardings: PyTree | None,
    obstacle: Reason | None,
    may_draw: bool = True,
    by_row: bool = False,
) -> Shards | None:
    """Says which axes of the batch a gradient engine takes over, where it is traced for a mesh.

    With ``gather="step"`` those are all, and weights and gradients are whole along them for the
    whole step. Otherwise they are those that split neither, so that no more is kept than without.

    Args:
      loss_fn: of the engine, ``loss_fn(params, *given)``, which is traced for what it draws.
      params, given: as the engine has them; ``given`` ends in the key.
      microbatches: per step.
      gather, shardings: as for :func:`jaxtrain.build_train_step`.
      obstacle: what is known already to stand against it.
      may_draw: whether the engine draws for a row what it draws for it among all others.
      by_row: whether the engine computes each row alone, whatever the loss.

    Returns:
      None where all is left to the partitioner.
    """
    mesh = jax.sharding.get_abstract_mesh()
    carried = tuple(a for a in GATHERED_AXES if a in free_axes(mesh))
    if not carried or not sizes_are_final() or (microbatches == 1 and gather != "step"):
        return None
    specs = specs_of(params)
    wanted = specs if shardings is None else _specs(shardings)
    if wanted is None:
        obstacle = obstacle or Why.UNPLACED()
    specs = wanted if specs is None else specs
    obstacle = (
        obstacle
        or _rows_apart(given[-2], microbatches, carried)
        or _obstacle(loss_fn, params, *given, may_draw=may_draw, by_row=by_row)
    )
    if obstacle is not None:
        if microbatches > 1:
            report_finding(Kind.REDUCTION, Reduced(microbatches=microbatches, obstacle=obstacle))
        return None
    once = gather == "step"
    kept = (specs,) if once else (specs, wanted)
    splits = {axis for table in kept for spec in table.values() for axis in axes_of(spec)}
    split = tuple(axis for axis in carried if axis in splits)
    axes = carried if once else tuple(a for a in carried if a not in splits)
    whole = {"gathers_once": bool(split)} if once else {"each": split}
    how = Reduced(axes, microbatches=microbatches, in_shares=_in_shares(mesh, axes), **whole)
    report_finding(Kind.REDUCTION, how)
    return Shards(axes, specs, wanted, slow_axes()) if axes else None


def reduced_once(
    built: GradientEngine,
    loss_fn: Callable[..., Any],
    *,
    engine: Engine,
    cast: Callable[[PyTree], PyTree],
    microbatches: int,
    **how: Any,
) -> GradientEngine:
    """Makes an engine that runs another on each device's rows and reduces its sums in the end.

    Args:
      built: computes the gradients of the whole batch: one that adds what rows give.
      engine: what it was made by.
      loss_fn: its loss, ``(params, model_state, batch, rng) -> (WeightedLoss, model_state)``.
      cast: parameters to the dtype in which they are gathered.
      microbatches, how: as for :func:`find_shards`.
    """
    finished = engine.finish or (lambda sums, rng, memory: sums)
    how |= {"microbatches": microbatches, "may_draw": engine.draws_by_row, "by_row": engine.by_row}

    def mapped(params, model_state, batch, rng, loss_scale, frozen=frozenset(), memory=None):
        if (memory is None) != (engine.init is None):
            has, keeps = ("none", "one") if memory is None else ("a memory", "none")
            raise ValueError(
                f"the state holds {has} of a gradient engine and the step's engine keeps {keeps}: "
                "give init_state and the step builder the same engine"
            )
        if engine is not plain:
            report_finding(Kind.ENGINE, Why.BY(name=name_of(engine.make)))
        narrow = cast(params)
        given = (narrow, model_state, batch, rng)
        shards = None if engine.by_parts else find_shards(loss_fn, *given, **how)
        if shards is None:
            given = (params, model_state, batch, rng, loss_scale)
            own = None if engine.finish else memory
            return finished(run_engine(built, *given, frozen=frozen, memory=own), rng, memory)

        def on_device(params, batch, rng, loss_scale):
            whole = shards.gathered(params)
            sums = run_engine(built, whole, None, batch, rng, loss_scale, frozen=frozen)
            return shards.reduced(sums.grads), shards.joined(sums.loss)

        training, _ = trainable(narrow, frozen)
        program = jax.shard_map(
            on_device,
            axis_names=set(shards.axes),
            in_specs=(
                shards.places(shards.params, narrow),
                jax.tree.map(lambda x: P(shards.axes) if jnp.ndim(x) else P(), batch),
                P(),
                P(),
            ),
            out_specs=(shards.places(shards.grads, training), P()),
            # Nothing is differentiated through the map, and a loss need not say what varies.
            check_vma=False,
        )
        grads, loss = program(narrow, batch, rng, loss_scale)
        # Of arrays again: what is cast may be kernels in their place, under the same paths.
        grads = by_paths(named_leaves(grads), params)
        return finished(GradientSums(grads, loss, None, microbatches), rng, memory)

    return mapped


def why_not(
    loss_fn: Callable[..., Any], *, has_model_state: bool = False, engine: Engine = plain
) -> Reason | None:
    """Returns the ``obstacle`` of :func:`find_shards` that is known before the loss is traced."""
    if has_model_state:
        return Why.MODEL_STATE()
    if not is_row_wise(loss_fn) and not engine.by_row:
        return Why.UNDECLARED()
    if not engine.row_wise:
        return Why.NO_PROMISE()
    return None if engine.init is None or engine.finish else Why.MEMORY()


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
        rest = tuple(a for a in sharding.mesh.axis_names if a not in GATHERED_AXES)
        gathered = NamedSharding(sharding.mesh, restrict(sharding.spec, rest))
        whole, split = (math.prod(s.shard_shape(x.shape)) for s in (gathered, sharding))
        return whole * jnp.dtype(dtype).itemsize + 4 * (whole - split) if whole > split else 0

    return sum(jax.tree.leaves(jax.tree.map(more, params, shardings)))


def _obstacle(
    loss_fn: Callable[..., Any], *given: Any, may_draw: bool, by_row: bool
) -> Reason | None:
    """Returns why a loss that is declared a sum over rows is not one; None if it seems to be."""
    jaxpr, result = jax.make_jaxpr(loss_fn, return_shape=True)(*given)
    if not by_row and not may_draw and draws(jaxpr.jaxpr):
        return Why.ENGINE_DRAWS()
    if not by_row and draws_otherwise(jaxpr.jaxpr, row_count(given[-2])):
        return Why.DRAWS()
    loss = result[0] if isinstance(result, tuple) else result
    metrics = getattr(loss, "metrics", {}).items()
    last = [name for name, value in metrics if isinstance(value, Last)]
    return Why.LAST(metric=last[0]) if last else None


def _rows_apart(batch: PyTree, microbatches: int, axes: tuple[str, ...]) -> Reason | None:
    """Returns why a batch cannot be cut into each device's rows of a microbatch, or None."""
    counts = {name: x.shape[0] for name, x in named_leaves(batch).items() if jnp.ndim(x)}
    rows = max(counts.values(), default=0)
    for leaf, own in counts.items():
        if own != rows:
            return Why.OTHER_ROWS(leaf=leaf, own=own, rows=rows)
    if not batch_is_leading():
        return Why.NO_LEADING_ROWS()
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
    divides = rows % (microbatches * parts) == 0
    return None if divides else Why.INDIVISIBLE(rows=rows // microbatches, parts=parts)


def _in_shares(mesh: Any, axes: tuple[str, ...]) -> bool:
    """Whether a sum goes over fast links first and over the slow network in shares."""
    slow = slow_axes()
    return math.prod(mesh.shape[a] for a in axes) > math.prod(slow.get(a, 1) for a in axes) > 1


def _specs(shardings: PyTree) -> dict[str, P]:
    return {name: sharding.spec for name, sharding in named_leaves(shardings).items()}
