"""The pipelined gradient engine: one SPMD program that runs a tick table.

``jax.shard_map`` takes over the mesh axis ``pipe`` alone; all others stay with the partitioner. A
``lax.scan`` goes over the ticks of a table (:mod:`jaxtrain.parallel.pipeline.tables`). In a tick
every device runs its forward unit and its backward unit, each where the table has one, and then
hands its results on: one ``ppermute`` each way. Stage inputs, cotangents and residuals wait in
buffers of the table's slot counts, so memory does not grow with the number of microbatches where
those do not (1F1B, interleaved). Gradients are summed in float32 or wider in the scan's carry;
nothing is differentiated through the scan or through a collective.

Shapes: M microbatches of B rows, S devices along ``pipe``, V chunks per device of C layers each.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtrain.gradients import (
    GradientEngine,
    GradientSums,
    WeightedLoss,
    as_weighted,
    check_metrics,
    scaled,
    seed_and_factor,
    select,
    split_microbatches,
    trainable,
    widen,
)
from jaxtrain.parallel.mesh import automatic, platform
from jaxtrain.parallel.pipeline import residuals
from jaxtrain.parallel.pipeline.buffers import (
    leaves_read,
    pick_leaves,
    pin_rows,
    read,
    replace_leaves,
    rows,
    write,
)
from jaxtrain.parallel.pipeline.stages import (
    Stages,
    enter_stages,
    layers_per_chunk,
    run_layers,
)
from jaxtrain.parallel.pipeline.tables import NONE, Table, make_table
from jaxtrain.parallel.pipeline.units import Unit, schedule_arrays
from jaxtrain.parallel.placement import Gather
from jaxtrain.precision import Policy, as_policy
from jaxtrain.tree import combine

PyTree = Any

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
    gather: Gather = "step",
) -> GradientEngine:
    """Makes the gradient engine of a pipeline, for :func:`jaxtrain.step.build_update`.

    It computes what ``gradients.accumulated`` computes with as many microbatches: the same rows and
    the same keys in each, sums over all weights in float32 or wider, and nothing left out.

    Args:
      stages: the model.
      mesh: its axis ``pipe`` has the S devices of the pipeline; other axes work as they do without.
      microbatches: M, into which every batch leaf's leading axis is cut (microbatch j holds rows
        j, j + M, ...); scalars go to each.
      schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``; see :mod:`.tables` for their costs.
      virtual: chunks per device, above 1 for ``"interleaved"`` only; parameters are then to be laid
        out by :meth:`jaxtrain.Stack.cut`. By default that of ``stages.stacked``.
      remat: ``"full"`` keeps the input of a stage and runs the stage again for its backward pass;
        ``"none"`` keeps what the backward pass of its layers needs, as ``jax.vjp`` (and
        ``Stages.remat``) decides.
      skip_bubbles: False runs every unit in every tick and masks the result: the same gradients,
        at more than twice the time, for backends on which collectives within divergent branches
        misbehave.
      policy: dtypes, as for ``build_train_step``.
      gradient_shardings: from :func:`jaxtrain.gradient_shardings`, to pin the running sums.
      gather: as for :func:`jaxtrain.build_train_step`; ``"step"`` makes a stage's weights whole
        over ``data`` and ``fsdp`` before the first tick.

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
    plan = _Plan(stages, table, remat == "full", skip_bubbles, _without_pipe(gradient_shardings))

    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        _refuse_model_state(model_state)
        params, batch = policy.cast_to_compute(params), policy.cast_inputs(batch)
        entered, params, batch = _enter(plan, params, batch, gather, gradient_shardings)
        loss, grads = _run(entered, mesh, trainable(params, frozen), batch, rng, loss_scale)
        return GradientSums(grads, loss, None, microbatches)

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
    gather: Gather = "step",
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
    plan = _Plan(stages, table, True, skip_bubbles, None)

    def evaluate(state: PyTree, batch: PyTree) -> WeightedLoss:
        _refuse_model_state(state.model_state)
        params, batch = policy.cast_to_compute(state.params), policy.cast_inputs(batch)
        entered, params, batch = _enter(plan, params, batch, gather, None)
        split = trainable(params)
        loss = _on_devices(entered, mesh, _eval_program, split, (batch, None), P())
        check_metrics(loss)
        return loss

    return evaluate


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known before any array is: fields as in :func:`pipeline`, and C as ``chunk``."""

    stages: Stages
    table: Table
    recompute: bool
    skip_bubbles: bool
    gradient_specs: PyTree | None
    chunk: int = 0

    @property
    def layers(self) -> P:
        """How the stacked parameters lie along ``pipe``."""
        return P(*[None] * (self.stages.stacked.lead - 1), "pipe")

    def choose(self, condition: jax.Array, do: Callable, otherwise: Callable) -> tuple:
        """``do()`` where the (per-device) condition holds, else ``otherwise()``.

        The first part of the result has leaves [B, ...].
        """

        # The partitioner wants the results of both branches to be laid out alike.
        def pinned(branch):
            x, *rest = branch()
            return pin_rows(x, axis=0), *rest

        if self.skip_bubbles:
            return jax.lax.cond(condition, lambda: pinned(do), lambda: pinned(otherwise))
        return select(condition, pinned(do), pinned(otherwise))


@dataclasses.dataclass(frozen=True)
class _Device:
    """What one device has at hand throughout the scan.

    Args:
      plan: see there.
      stacked: parameters [C, ...], or [V, C, ...] with several chunks, in the compute dtype: those
        that train, and the rest.
      outer: all other parameters that train. The stages of ``plan`` are given these alone.
      fixed: and the rest of the others.
      batch: leaves [B, M, ...].
      rng: the step's key; None in an evaluation.
      x: shapes and dtypes of the residual stream.
      seeds_M: the cotangent of each microbatch's loss.
      factors_M: what its gradients are multiplied by to be those of the sum.
      embed_leaves, head_leaves: which leaves of ``outer`` the embedding and the head read.
      layout: of residuals; None where they are computed again.
    """

    plan: _Plan
    stacked: tuple[PyTree, PyTree]
    outer: PyTree
    fixed: PyTree
    batch: PyTree
    rng: jax.Array | None
    x: PyTree
    seeds_M: jax.Array | None = None
    factors_M: jax.Array | None = None
    embed_leaves: tuple[int, ...] = ()
    head_leaves: tuple[int, ...] = ()
    layout: residuals.Layout | None = None

    def microbatch(self, j: jax.Array) -> tuple[PyTree, jax.Array | None]:
        """Microbatch j and its key."""
        return rows(self.batch, j), None if self.rng is None else jax.random.fold_in(self.rng, j)

    def chunk(self, v: jax.Array) -> tuple[PyTree, PyTree]:
        """Parameters [C, ...] of this device's chunk v: those that train, and the rest."""
        return self.stacked if self.plan.table.virtual == 1 else read(self.stacked, v)

    def weights(self, v: jax.Array) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
        """What its layers read, chunk v and the parameters that all of them share: as there."""
        stages = self.plan.stages
        return tuple(
            {stages.stacked.key: chunk} | {name: outer[name] for name in stages.shared or ()}
            for chunk, outer in zip(self.chunk(v), (self.outer, self.fixed), strict=True)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """What goes from tick to tick: three buffers [slots, ...] and the sums.

    An evaluation has inputs and a loss alone.
    """

    inputs: PyTree
    loss: WeightedLoss
    cotangents: PyTree = None
    residuals: tuple[jax.Array, ...] = ()
    d_stacked: PyTree = None
    d_outer: PyTree = None


def _enter(plan: _Plan, params: PyTree, batch: PyTree, gather: Gather, shardings: PyTree | None):
    """Returns the plan, parameters and batch as :func:`_on_devices` takes them."""
    stages, table = plan.stages, plan.table
    stages.outer(params)  # a check
    chunk = layers_per_chunk(stages, params, devices=table.stages)
    # [M, B, ...] to [B, M, ...]: microbatch j is column j, and nothing is copied.
    batch = split_microbatches(batch, table.microbatches, "microbatches")
    batch = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1) if x.ndim > 1 else x, batch)
    if gather == "step":
        params, stages = enter_stages(stages, params, shardings)
    return dataclasses.replace(plan, stages=stages, chunk=chunk), params, batch


def _on_devices(
    plan: _Plan, mesh: Mesh, program: Callable, split: tuple[PyTree, PyTree], rest: tuple, out: Any
):
    """Runs ``program(plan, ticks, stacked, outer, fixed, *rest)`` on every device along ``pipe``.

    ``split`` is the parameters: those that train, and the rest.
    """
    program = jax.shard_map(
        functools.partial(program, plan),
        mesh=mesh,
        axis_names={"pipe"},
        in_specs=(P(None, "pipe"), plan.layers, *[P()] * (2 + len(rest))),
        out_specs=out,
        # Nothing is differentiated through the map, and its one sum over pipe is of float32.
        check_vma=False,
    )
    ticks = jax.tree.map(jnp.asarray, schedule_arrays(plan.table, plan.chunk))
    stacked = tuple(part[plan.stages.stacked.key] for part in split)
    return program(ticks, stacked, *map(plan.stages.outer, split), *rest)


def _run(plan, mesh, split, batch, rng, loss_scale):
    """Returns (WeightedLoss, gradients) of the whole batch, both sums in float32 or wider."""
    outer, fixed = map(plan.stages.outer, split)
    weights_M, dtype = _weights(_holding(plan, fixed), outer, batch, rng)
    rest = (batch, rng, *seed_and_factor(weights_M, loss_scale, dtype))
    out = (P(), plan.layers, P())
    loss, d_stacked, d_outer = _on_devices(plan, mesh, _device_program, split, rest, out)
    return loss, {name: d_outer.get(name, d_stacked) for name in split[0]}


def _holding(plan: _Plan, fixed: PyTree) -> _Plan:
    """The plan whose embedding and head are given, of the outer parameters, what trains alone."""
    stages = plan.stages
    held = dataclasses.replace(
        stages,
        embed=lambda outer, batch, rng: stages.embed(combine(outer, fixed), batch, rng),
        head_loss=lambda outer, x, batch: stages.head_loss(combine(outer, fixed), x, batch),
    )
    return dataclasses.replace(plan, stages=held)


def _device_program(plan, ticks, stacked, outer, fixed, batch, rng, seeds_M, factors_M):
    """What every device along ``pipe`` runs in training; see :func:`_run` for the arguments."""
    device, ticks = _set_up(plan, ticks, stacked, outer, fixed, batch, rng)
    plan, microbatch = device.plan, rows(batch, 0)
    device = dataclasses.replace(
        device,
        seeds_M=seeds_M,
        factors_M=factors_M,
        embed_leaves=leaves_read(plan.stages.embed, outer, microbatch, rng),
        head_leaves=leaves_read(plan.stages.head_loss, outer, device.x, microbatch),
    )
    if not plan.recompute:
        weights, rest = device.weights(0)
        context = (microbatch, rng, jnp.int32(0), rest)
        layout = residuals.residual_layout(
            functools.partial(_layers, plan.stages), weights, device.x, context
        )
        device = dataclasses.replace(device, layout=layout)
    tick = functools.partial(_tick, device)
    end, _ = jax.lax.scan(tick, _start(device), ticks)
    # The loss is the last stage's; outer parameters are read by the first and the last.
    loss, d_outer = jax.lax.psum((end.loss, end.d_outer), "pipe")
    return loss, end.d_stacked, d_outer


def _eval_program(plan, ticks, stacked, outer, fixed, batch, rng):
    """What every device along ``pipe`` runs in an evaluation."""
    device, ticks = _set_up(plan, ticks, stacked, outer, fixed, batch, rng)
    tick = functools.partial(_eval_tick, device)
    end, _ = jax.lax.scan(tick, _start(device), ticks)
    return jax.lax.psum(end.loss, "pipe")


def _set_up(plan, ticks, stacked, outer, fixed, batch, rng) -> tuple[_Device, PyTree]:
    """The device, and its own column of the table."""
    plan = _holding(plan, fixed)
    x = _residual_stream(plan, outer, rows(batch, 0), rng)
    ticks = jax.tree.map(lambda column_T1: column_T1[:, 0], ticks)
    return _Device(plan, stacked, outer, fixed, batch, rng, x), ticks


def _tick(device: _Device, carry: _Carry, tick: Mapping[str, Any]) -> tuple[_Carry, None]:
    y, kept = _forward(device, carry, tick["forward"])
    inputs = carry.inputs
    if not device.plan.recompute:
        # The last stage has nowhere to send its result, and needs it when it runs backward.
        slot = jnp.where(tick["forward"].last, tick["forward"].input_slot, NONE)
        inputs = write(inputs, slot, y)
    carry = dataclasses.replace(carry, inputs=inputs, residuals=kept)
    d_x, d_chunk, d_outer, loss = _backward(device, carry, tick["backward"])
    arrived = jax.lax.ppermute(y, "pipe", _ring(device))
    returned = jax.lax.ppermute(d_x, "pipe", [(after, s) for s, after in _ring(device)])
    carry = _Carry(
        inputs=write(inputs, tick["receive_input"], arrived),
        cotangents=write(carry.cotangents, tick["receive_cotangent"], returned),
        residuals=kept,
        d_stacked=_add_chunk(device, carry.d_stacked, tick["backward"], d_chunk),
        d_outer=d_outer,
        loss=loss,
    )
    return _pin(device, carry), None


def _eval_tick(device: _Device, carry: _Carry, tick: Mapping[str, Any]) -> tuple[_Carry, None]:
    plan, unit = device.plan, tick["forward"]

    def run():
        batch, rng = device.microbatch(unit.microbatch)
        x = _stage_input(device, carry, unit, batch, rng)
        weights, rest = device.weights(unit.chunk)
        y = _layers(plan.stages, weights, x, (batch, rng, unit.layer, rest))

        def head():
            loss = as_weighted(plan.stages.head_loss(device.outer, y, batch))
            return y, carry.loss + widen(loss)

        return plan.choose(unit.last, head, lambda: (y, carry.loss))

    y, loss = plan.choose(unit.present, run, lambda: (_zeros(device.x), carry.loss))
    arrived = jax.lax.ppermute(y, "pipe", _ring(device))
    inputs = write(carry.inputs, tick["receive_input"], arrived)
    return _pin(device, dataclasses.replace(carry, inputs=inputs, loss=loss)), None


def _ring(device: _Device) -> list[tuple[int, int]]:
    """From which device a stage's result goes to which."""
    S, wraps = device.plan.table.stages, device.plan.table.virtual > 1
    return [(s, (s + 1) % S) for s in range(S if wraps else S - 1)]


def _forward(device: _Device, carry: _Carry, unit: Unit) -> tuple[PyTree, tuple]:
    """Runs the forward unit; returns the stage's result and the buffers of residuals."""
    plan = device.plan
    slot = jnp.where(unit.present, unit.residual_slot, NONE)
    # What a branch updates is copied by XLA's GPU and CPU compilers, whole and in every tick. The
    # TPU compiler updates it where it lies, and would hold another slot for what leaves a branch.
    within = plan.skip_bubbles and platform() == "tpu"

    def run():
        batch, rng = device.microbatch(unit.microbatch)
        x = _stage_input(device, carry, unit, batch, rng)
        weights, rest = device.weights(unit.chunk)
        context = (batch, rng, unit.layer, rest)
        if plan.recompute:
            return _layers(plan.stages, weights, x, context), ()
        y, kept = residuals.forward(device.layout, weights, x, context)
        return y, write(carry.residuals, slot, kept) if within else kept

    def rest():
        stored = device.layout.stored if device.layout else ()
        return _zeros(device.x), carry.residuals if within else _zeros(stored)

    # Where the backward unit starts over, there is nothing that the last stage would run this for.
    wanted = unit.present & ~unit.last if plan.recompute else unit.present
    y, kept = plan.choose(wanted, run, rest)
    return y, kept if within else write(carry.residuals, slot, kept)


def _backward(device: _Device, carry: _Carry, unit: Unit) -> tuple:
    """Runs the backward unit.

    Returns:
      The cotangent of its input, the gradients of its chunk (their sums stay out of the branches,
      see :func:`_forward`), and the other sums.
    """
    plan, stages = device.plan, device.plan.stages

    def run():
        batch, rng = device.microbatch(unit.microbatch)
        weights, rest = device.weights(unit.chunk)
        context = (batch, rng, unit.layer, rest)
        if plan.recompute:
            x = _stage_input(device, carry, unit, batch, rng)
            y, pull = jax.vjp(lambda weights, x: _layers(stages, weights, x, context), weights, x)
        else:
            y = read(carry.inputs, unit.input_slot)
            kept = read(carry.residuals, unit.residual_slot)
            pull = residuals.pullback(device.layout, weights, context, kept)
        d_y, d_outer, loss = plan.choose(
            unit.last,
            lambda: _head(device, carry, unit, y, batch),
            lambda: (read(carry.cotangents, unit.cotangent_slot), carry.d_outer, carry.loss),
        )
        d_weights, d_x = pull(d_y)
        d_chunk = d_weights.pop(stages.stacked.key)
        d_shared = scaled(d_weights, device.factors_M[unit.microbatch])
        d_outer |= {name: jax.tree.map(jnp.add, d_outer[name], d) for name, d in d_shared.items()}
        d_x, d_outer = plan.choose(
            unit.first,
            lambda: (d_x, _embed_backward(device, d_outer, unit, d_x, batch, rng)),
            lambda: (d_x, d_outer),
        )
        return d_x, d_chunk, d_outer, loss

    return plan.choose(
        unit.present,
        run,
        lambda: (
            _zeros(device.x),
            jax.tree.map(jnp.zeros_like, device.chunk(unit.chunk)[0]),
            carry.d_outer,
            carry.loss,
        ),
    )


def _layers(stages: Stages, weights: PyTree, x: PyTree, context: tuple) -> PyTree:
    batch, rng, first, rest = context
    return run_layers(stages, combine(weights, rest), x, batch, rng, first, looped=True)


def _stage_input(device: _Device, carry: _Carry, unit: Unit, batch, rng) -> PyTree:
    return device.plan.choose(
        unit.first,
        lambda: (device.plan.stages.embed(device.outer, batch, rng),),
        lambda: (read(carry.inputs, unit.input_slot),),
    )[0]


def _head(device: _Device, carry: _Carry, unit: Unit, y, batch) -> tuple:
    """The loss, forward and backward: cotangent of ``y``, gradients of ``outer``, loss."""

    def head(leaves, y):
        outer = replace_leaves(device.outer, device.head_leaves, leaves)
        loss = as_weighted(device.plan.stages.head_loss(outer, y, batch))
        return loss.total, loss

    leaves = pick_leaves(device.outer, device.head_leaves)
    _, pull, loss = jax.vjp(head, leaves, y, has_aux=True)
    d_leaves, d_y = pull(device.seeds_M[unit.microbatch])
    d_outer = _add_leaves(device, carry.d_outer, unit, device.head_leaves, d_leaves)
    return d_y, d_outer, carry.loss + widen(loss)


def _embed_backward(device: _Device, d_outer: PyTree, unit: Unit, d_x, batch, rng) -> PyTree:
    def embed(leaves):
        outer = replace_leaves(device.outer, device.embed_leaves, leaves)
        return device.plan.stages.embed(outer, batch, rng)

    _, pull = jax.vjp(embed, pick_leaves(device.outer, device.embed_leaves))
    return _add_leaves(device, d_outer, unit, device.embed_leaves, pull(d_x)[0])


def _add_leaves(device: _Device, sums: PyTree, unit: Unit, where, grads: list) -> PyTree:
    grads = scaled(grads, device.factors_M[unit.microbatch])
    new = [s + g for s, g in zip(pick_leaves(sums, where), grads, strict=True)]
    return replace_leaves(sums, where, new)


def _add_chunk(device: _Device, sums: PyTree, unit: Unit, grads: PyTree) -> PyTree:
    grads = scaled(grads, device.factors_M[unit.microbatch])
    if device.plan.table.virtual == 1:
        return jax.tree.map(jnp.add, sums, grads)
    return jax.tree.map(lambda s, g: s.at[unit.chunk].add(g), sums, grads)


def _start(device: _Device) -> _Carry:
    table = device.plan.table

    def sums_like(tree):
        return _zeros(jax.eval_shape(widen, tree))

    def slots(count, shapes):
        return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    loss = jax.eval_shape(
        lambda: as_weighted(
            device.plan.stages.head_loss(device.outer, _zeros(device.x), rows(device.batch, 0))
        )
    )
    carry = _Carry(inputs=slots(table.input_slots, device.x), loss=sums_like(loss))
    if table.backward:
        carry = dataclasses.replace(
            carry,
            cotangents=slots(table.cotangent_slots, device.x),
            residuals=slots(table.residual_slots, device.layout.stored if device.layout else ()),
            d_stacked=sums_like(device.stacked[0]),
            d_outer=sums_like(device.outer),
        )
    return _pin(device, carry)


def _pin(device: _Device, carry: _Carry) -> _Carry:
    """Says how the carry lies on the axes other than ``pipe``, as far as that is known."""
    carry = dataclasses.replace(
        carry,
        inputs=pin_rows(carry.inputs, axis=1),
        cotangents=pin_rows(carry.cotangents, axis=1),
    )
    if (specs := device.plan.gradient_specs) is None:
        return carry
    pin = jax.lax.with_sharding_constraint
    return dataclasses.replace(
        carry,
        d_stacked=pin(carry.d_stacked, specs[device.plan.stages.stacked.key]),
        d_outer=pin(carry.d_outer, {name: specs[name] for name in carry.d_outer}),
    )


def _weights(plan: _Plan, outer: PyTree, batch: PyTree, rng: jax.Array) -> tuple[jax.Array, Any]:
    """The weight of every microbatch, [M], and the dtype of their losses.

    The weights are needed before the residual stream is there, and so must not depend on it.
    """
    x = _residual_stream(plan, outer, rows(batch, 0), rng)

    def head(x, j):
        return as_weighted(plan.stages.head_loss(outer, x, rows(batch, j)))

    total = jax.eval_shape(lambda: head(_zeros(x), 0).total)
    try:
        # What depends on x is batched where x is.
        weight = jax.vmap(lambda x: head(x, 0).weight, out_axes=None)
        jax.eval_shape(
            weight, jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), x)
        )
    except (NotImplementedError, ValueError) as error:
        if "out_axes" in str(error):  # else a kernel that cannot be batched: not looked into
            raise ValueError(
                "the weight that Stages.head_loss returns depends on x: in a pipeline it must be "
                "a function of the batch alone, such as mask.sum()"
            ) from None
    every = jnp.arange(plan.table.microbatches)
    return jax.lax.map(lambda j: widen(head(_zeros(x), j).weight), every), total.dtype


def _residual_stream(plan: _Plan, outer: PyTree, microbatch: PyTree, rng: jax.Array):
    """Shapes and dtypes of what travels from layer to layer."""
    x = jax.eval_shape(plan.stages.embed, outer, microbatch, rng)
    leaves = jax.tree.leaves(x)
    if not leaves or not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError(
            f"Stages.embed returns {x}: a pipeline hands floating-point arrays [B, ...] from stage "
            "to stage; let blocks read others from the batch"
        )
    return x


def _refuse_model_state(model_state: PyTree) -> None:
    if model_state is not None:
        raise ValueError(
            "a pipeline keeps no model state and was given some: use a model without running "
            "statistics, or build_train_step(accumulate=...)"
        )


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


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
    table = make_table(
        schedule,
        stages=size,
        microbatches=microbatches,
        virtual=stack.virtual,
        backward=backward,
    )
    return dataclasses.replace(stages, stacked=stack), table


def _without_pipe(shardings: PyTree | None) -> PyTree | None:
    """Specs of gradients as code within the map may name them."""
    if shardings is None:
        return None

    def free(entry):
        if entry is P.UNCONSTRAINED or entry is None:
            return entry
        names = tuple(n for n in ((entry,) if isinstance(entry, str) else entry) if n != "pipe")
        return names or None

    return jax.tree.map(lambda s: P(*map(free, s.spec)), shardings)
