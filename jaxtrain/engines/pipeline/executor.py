"""The pipelined gradient engine: one SPMD program that runs a tick table.

``jax.shard_map`` takes over the mesh axis ``pipe`` alone; all others stay with the partitioner. A
``lax.scan`` goes over the ticks of a table (:mod:`jaxtrain.engines.pipeline.tables`). In a tick
every device runs its forward unit and its backward unit, each where the table has one, and then
hands its results on: one ``ppermute`` each way. Stage inputs, cotangents and residuals wait in
buffers of the table's slot counts, so memory does not grow with the number of microbatches where
those do not (1F1B, interleaved). Gradients are summed in float32 or wider in the scan's carry;
nothing is differentiated through the scan or through a collective.

Shapes: M microbatches of B rows, S devices along ``pipe``, V chunks per device of C layers each.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.accumulated import split_microbatches
from jaxtrain.engines.pipeline.buffers import rows, zeros
from jaxtrain.engines.pipeline.device import Pipeline, device_program, residual_stream
from jaxtrain.engines.pipeline.entering import gather_for_stages, gather_in_stages, layers_of_stages
from jaxtrain.engines.pipeline.tables import Table, make_table
from jaxtrain.engines.pipeline.units import schedule_arrays
from jaxtrain.engines.plain import GradientEngine, GradientSums, seed_and_factor, trainable
from jaxtrain.engines.reduction import find_shards, why_not
from jaxtrain.loss import WeightedLoss, as_weighted, check_metrics
from jaxtrain.precision import Policy, as_policy
from jaxtrain.sharding.collectives import Shards
from jaxtrain.sharding.mesh import automatic
from jaxtrain.sharding.placement import Gather, in_shard_map
from jaxtrain.sharding.row_keys import microbatch_keys, row_count
from jaxtrain.sharding.specs import names_of, restrict, tidy
from jaxtrain.stages import Stages, loss_from_stages
from jaxtrain.tree import PyTree, by_paths, map_named, named_leaves, to_accum_dtype

REMAT = ("full", "none")


def pipeline(
    stages: Stages,
    *,
    mesh: Mesh,
    microbatches: int,
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b",
    virtual: int | None = None,
    remat: Literal["full", "none"] = "full",
    skip_bubbles: bool = True,
    policy: Policy | str | None = None,
    gradient_shardings: PyTree | None = None,
    gather: Gather | None = None,
) -> GradientEngine:
    """Makes the gradient engine of a pipeline, for :func:`jaxtrain.step.build_update`.

    It computes what ``accumulated`` computes with as many microbatches: the same rows and
    the same keys in each, sums over all weights in float32 or wider, and nothing left out.

    Args:
      stages: the model.
      mesh: its axis ``pipe`` has the S devices of the pipeline; other axes work as they do without.
      microbatches: M, into which every batch leaf's leading axis is cut (microbatch j holds rows
        j, j + M, ...); scalars go to each.
      schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``; see :mod:`.tables` for their costs.
        Several stacks of layers are interleaved: a device has a share of each.
      virtual: chunks per device (of each stack of layers, where there are several), above 1 for
        ``"interleaved"`` only; parameters are then to be laid out by :meth:`jaxtrain.Stack.cut`. By
        default that of ``stages.stacked``.
      remat: ``"full"`` keeps the input of a stage and runs the stage again for its backward pass;
        ``"none"`` keeps what the backward pass of its layers needs, as ``jax.vjp`` (and
        ``Stages.remat``) decides.
      skip_bubbles: False runs every unit in every tick and masks the result: the same gradients,
        at more than twice the time, for backends on which collectives within divergent branches
        misbehave.
      policy: dtypes, as for ``build_train_step``.
      gradient_shardings: from :func:`jaxtrain.gradient_shardings`, to pin the running sums.
      gather: as for :func:`jaxtrain.build_train_step`; ``"step"`` makes a stage's weights whole
        over ``data`` and ``fsdp`` before the first tick, and sums gradients of whole weights up to
        the last, where ``stages.row_wise``.

    Returns:
      The engine, to be traced under ``jax.jit``.

    Raises:
      ValueError: for sizes or names that do not fit; when it is traced, for parameters or a batch
        that do not divide, and a loss whose weight depends on the residual stream.
    """
    mesh = automatic(mesh)
    stages, table = _scheduled(stages, mesh, schedule, microbatches, virtual)
    if remat not in REMAT:
        raise ValueError(f"pipeline remat is {remat!r}: use one of {', '.join(REMAT)}")
    policy = as_policy(policy)
    pinned = named_leaves(gradient_shardings) if gradient_shardings is not None else None
    specs = pinned and {name: sharding.spec for name, sharding in pinned.items()}
    plan = Pipeline(stages, table, remat == "full", skip_bubbles, specs)
    whole = loss_from_stages(stages)

    def engine(given, model_state, batch, rng, loss_scale, frozen=frozenset()):
        _refuse_model_state(model_state)
        params, batch = policy.cast_to_compute(given), policy.cast_inputs(batch)
        stages.outer(params)  # a check
        shards = find_shards(
            whole,
            params,
            batch,
            rng,
            microbatches=microbatches,
            gather=gather,
            shardings=gradient_shardings,
            obstacle=why_not(whole),
        )
        drawing, rows = functools.partial(whole, params, batch), row_count(batch)
        key, _ = microbatch_keys(drawing, rng, microbatches, rows=rows)
        keys_M = jax.vmap(key)(jnp.arange(microbatches))
        taken = dataclasses.replace(plan, shards=shards)
        entered, params, batch = _enter(taken, params, batch, gather, gradient_shardings)
        trains = frozenset(named_leaves(trainable(params, frozen)[0]))
        entered = dataclasses.replace(entered, trains=trains)
        weights_M, dtype = _weights(entered.stages, params, batch, rng, microbatches)
        seeds = seed_and_factor(weights_M, loss_scale, dtype)
        loss, d_stacked, d_outer = _on_devices(entered, mesh, params, batch, keys_M, *seeds)
        grads = by_paths(d_stacked | d_outer, given)
        return GradientSums(grads, loss, None, microbatches)

    engine.stack = stages.stacked
    return engine


def pipeline_eval_step(
    stages: Stages,
    *,
    mesh: Mesh,
    microbatches: int,
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b",
    virtual: int | None = None,
    skip_bubbles: bool = True,
    policy: Policy | str | None = None,
    gather: Gather | None = None,
) -> Callable[[PyTree, PyTree], WeightedLoss]:
    """Makes ``evaluate(state, batch) -> WeightedLoss``: the forward pass of a pipeline alone.

    The sums are those that :func:`jaxtrain.build_eval_step` gives for the same model without a
    pipeline, with each microbatch a call of its own. Each device holds its own stage and one stage
    input. The stages are called with ``rng=None``, by which a model knows that nothing is to be
    dropped.

    Args:
      stages, mesh, microbatches, schedule, virtual, skip_bubbles, policy, gather: as for
        :func:`pipeline`. The number of microbatches may be another than in training.

    Returns:
      The evaluation, to be compiled by :func:`jaxtrain.compile_step` with ``donate=False``.

    Raises:
      ValueError: for sizes or names that do not fit; when it is traced, for parameters or a batch
        that do not divide.
    """
    mesh = automatic(mesh)
    stages, table = _scheduled(stages, mesh, schedule, microbatches, virtual, backward=False)
    policy = as_policy(policy)
    plan = Pipeline(stages, table, skip_bubbles=skip_bubbles)

    def evaluate(state: PyTree, batch: PyTree) -> WeightedLoss:
        _refuse_model_state(state.model_state)
        params, batch = policy.cast_to_compute(state.params), policy.cast_inputs(batch)
        entered, params, batch = _enter(plan, params, batch, gather, None)
        loss, _, _ = _on_devices(entered, mesh, params, batch, None, None, None)
        check_metrics(loss)
        return loss

    return evaluate


def _enter(
    plan: Pipeline, params: PyTree, batch: PyTree, gather: Gather | None, shardings: PyTree | None
):
    """Returns the plan, parameters and batch as :func:`_on_devices` takes them."""
    stages, table = plan.stages, plan.table
    stages.outer(params)  # a check
    counts = layers_of_stages(stages, params, devices=table.stages)
    # [M, B, ...] to [B, M, ...]: microbatch j is column j, and nothing is copied.
    batch = split_microbatches(batch, table.microbatches, "microbatches")
    batch = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, batch)
    once = gather == "step" and plan.shards is not None  # gathered within the map
    if gather == "model" or once:
        stages = gather_in_stages(stages, params, rows(batch, 0))
    else:
        params, stages = gather_for_stages(stages, params, shardings)
    return dataclasses.replace(plan, stages=stages, counts=counts), params, batch


def _on_devices(
    plan: Pipeline, mesh: Mesh, params: PyTree, *rest: Any
) -> tuple[WeightedLoss, dict[str, jax.Array], dict[str, jax.Array]]:
    """Runs :func:`device_program` on every device along ``pipe``; see there."""
    shards = plan.shards or Shards()
    batch, *others = rest

    stack = plan.stages.stacked

    def lies(name: str, specs: Mapping[str, P]) -> P:
        entries = [*restrict(specs.get(name, P()), shards.axes)]
        if stack.holds(name):
            entries += [None] * (stack.lead - len(entries))
            entries[stack.lead - 1] = ("pipe", *names_of(entries[stack.lead - 1]))
        return P(*map(tidy, entries))

    stacked = {name for name in plan.trains if stack.holds(name)}
    sums = stacked, plan.trains - stacked
    program = jax.shard_map(
        functools.partial(device_program, plan),
        mesh=jax.sharding.get_abstract_mesh() if in_shard_map() else mesh,
        axis_names={"pipe", *shards.axes},
        in_specs=(
            P(None, "pipe"),
            map_named(lambda name, _: lies(name, shards.params), params),
            # A scalar of the batch has one entry for each microbatch.
            jax.tree.map(lambda x: P(shards.axes) if x.ndim > 1 else P(), batch),
            *[P()] * len(others),
        ),
        out_specs=(P(), *({name: lies(name, shards.grads) for name in names} for names in sums)),
        # Nothing is differentiated through the map, and its one sum over pipe is of float32.
        check_vma=False,
    )
    ticks = schedule_arrays(plan.table, plan.counts, len(stack.parts))
    return program(jax.tree.map(jnp.asarray, ticks), params, *rest)


def _weights(
    stages: Stages, params: PyTree, batch: PyTree, rng: jax.Array, microbatches: int
) -> tuple[jax.Array, Any]:
    """The weight of every microbatch, [M], and the dtype of their losses.

    The weights are needed before the residual stream is there, and so must not depend on it.
    """
    outer = stages.outer(params)
    x = residual_stream(stages, outer, rows(batch, 0), rng)

    def head(x, j):
        return as_weighted(stages.head_loss(outer, x, rows(batch, j)))

    total = jax.eval_shape(lambda: head(zeros(x), 0).total)
    batched = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), x)

    def traces(out_axes: int | None) -> bool:
        weight = jax.vmap(lambda x: head(x, 0).weight, out_axes=out_axes)
        with contextlib.suppress(NotImplementedError, ValueError):
            return jax.eval_shape(weight, batched) is not None
        return False

    # What depends on x is batched where x is; a kernel that cannot be batched is not looked into.
    if not traces(None) and traces(0):
        raise ValueError(
            "the weight that Stages.head_loss returns depends on x: in a pipeline it must be a "
            "function of the batch alone, such as mask.sum()"
        )
    every = jnp.arange(microbatches)
    return jax.lax.map(lambda j: to_accum_dtype(head(zeros(x), j).weight), every), total.dtype


def _refuse_model_state(model_state: PyTree) -> None:
    if model_state is not None:
        raise ValueError(
            "a pipeline keeps no model state and was given some: use a model without running "
            "statistics, or build_train_step(accumulate=...)"
        )


def _scheduled(
    stages: Stages,
    mesh: Mesh,
    schedule: str,
    microbatches: int,
    virtual: int | None,
    *,
    backward: bool = True,
) -> tuple[Stages, Table]:
    """The stages with their layers cut as ``virtual`` says, and the table to run them by."""
    size = mesh.shape.get("pipe", 1)
    if size < 2:
        raise ValueError(
            f"a pipeline needs a mesh axis 'pipe' of size 2 or more and it has size {size}: use "
            "make_mesh(pipe=2, ...), or build_train_step(accumulate=...) for no pipeline"
        )
    stack = stages.stacked
    if virtual is not None:
        stack = dataclasses.replace(stack, virtual=virtual)
    if len(stack.parts) > 1 and schedule != "interleaved":
        raise ValueError(
            f"stages have several stacks of layers ({', '.join(stack.key)}) and schedule is "
            f"{schedule!r}: their layers are chunks of one device, use schedule 'interleaved'"
        )
    table = make_table(
        schedule,
        stages=size,
        microbatches=microbatches,
        virtual=stack.virtual * len(stack.parts),
        backward=backward,
    )
    return dataclasses.replace(stages, stacked=stack), table
