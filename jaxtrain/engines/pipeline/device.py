"""The program of one device along ``pipe``: its units in a tick, and what goes from tick to tick.

Shapes: M microbatches of B rows, S devices along ``pipe``, V chunks per device of C layers each.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.engines.pipeline import residuals
from jaxtrain.engines.pipeline.buffers import (
    leaves_read,
    picked,
    pin_rows,
    read,
    replaced,
    rows,
    write,
    zeros,
)
from jaxtrain.engines.pipeline.tables import NONE, Table
from jaxtrain.engines.pipeline.units import Unit
from jaxtrain.engines.plain import scaled
from jaxtrain.loss import WeightedLoss, as_weighted, of_constant_weight
from jaxtrain.sharding.collectives import Shards
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import free_axes
from jaxtrain.sharding.specs import restrict
from jaxtrain.stages import Stages, run_layers
from jaxtrain.tree import PyTree, select, to_accum_dtype

Sums = dict[str, jax.Array]  # of gradients, by the path of their parameter


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The static part of a pipeline, known before any array exists.

    Args:
      stages: the model.
      table: what runs when.
      recompute: whether a backward unit runs its stage again (``remat="full"``).
      skip_bubbles: as for :func:`jaxtrain.pipeline`.
      gradient_specs: how running sums lie on the axes that the map leaves to the partitioner, by
        path; None if not given.
      counts: how many layers each global stage has.
      trains: the paths of the parameters that have a gradient; none in an evaluation.
      shards: the axes of the batch that the map takes over besides ``pipe``; None for none.
    """

    stages: Stages
    table: Table
    recompute: bool = True
    skip_bubbles: bool = True
    gradient_specs: Mapping[str, P] | None = None
    counts: tuple[int, ...] = ()
    trains: frozenset[str] = frozenset()
    shards: Shards | None = None

    @property
    def stacks(self) -> range:
        """The numbers of the stacks of layers."""
        return range(len(self.stages.blocks))

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

    def of_stack(self, k: jax.Array, run: Callable[[int], tuple], first: int = 0) -> tuple:
        """``run(k)`` for one stack of layers, where only the device knows which."""
        if first == self.stacks[-1]:
            return run(first)
        return self.choose(k == first, lambda: run(first), lambda: self.of_stack(k, run, first + 1))


@dataclasses.dataclass(frozen=True)
class _Device:
    """The constants of one device throughout the scan.

    Args:
      plan: the static part.
      params: in the compute dtype: the stacked ones [C, ...], or [V, C, ...] with several chunks,
        and all others whole.
      batch: leaves [B, M, ...].
      keys_M: keys of the microbatches; None in an evaluation.
      x: shapes and dtypes of the residual stream.
      seeds_M: the cotangent of each microbatch's loss.
      factors_M: what its gradients are multiplied by to be those of the sum.
      enter_reads, head_reads: the paths of what trains and is read as a stack is entered (first by
        the embedding), and by the head.
      layouts: of the residuals of each stack; none where they are computed again.
    """

    plan: Pipeline
    params: PyTree
    batch: PyTree
    keys_M: jax.Array | None
    x: PyTree
    seeds_M: jax.Array | None = None
    factors_M: jax.Array | None = None
    enter_reads: tuple[frozenset[str], ...] = ()
    head_reads: frozenset[str] = frozenset()
    layouts: tuple[residuals.Buffers, ...] = ()

    @property
    def outer(self) -> dict[str, PyTree]:
        """All parameters but the stacked ones."""
        return self.plan.stages.outer(self.params)

    def microbatch(self, j: jax.Array) -> tuple[PyTree, jax.Array | None]:
        """Microbatch j and its key."""
        return rows(self.batch, j), None if self.keys_M is None else read(self.keys_M, j)

    def weights(self, k: int, v: jax.Array | int) -> dict[str, PyTree]:
        """Returns the parameters that stack k reads: chunk v, [C, ...], and all shared ones."""
        stages = self.plan.stages
        key = stages.stacked.parts[k].key
        chunk = self.params[key] if stages.stacked.virtual == 1 else read(self.params[key], v)
        return {key: chunk} | {name: self.params[name] for name in stages.shared or ()}

    @functools.cached_property
    def residual_buffers(self) -> tuple:
        """The residual buffers of all stacks, as from :func:`residuals.common_buffers`."""
        return residuals.common_buffers(self.layouts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """The state carried from tick to tick: three buffers [slots, ...] and the sums.

    An evaluation has only inputs and a loss.
    """

    inputs: PyTree
    loss: WeightedLoss
    cotangents: PyTree = None
    residuals: tuple[jax.Array, ...] = ()
    d_stacked: Sums = dataclasses.field(default_factory=dict)
    d_outer: Sums = dataclasses.field(default_factory=dict)


def device_program(
    plan: Pipeline,
    ticks: Mapping[str, Any],
    params: PyTree,
    batch: PyTree,
    keys_M: jax.Array | None,
    seeds_M: jax.Array | None,
    factors_M: jax.Array | None,
) -> tuple[WeightedLoss, Sums, Sums]:
    """Runs all ticks of one device.

    Args:
      plan: what to run; a table without backward units is an evaluation.
      ticks: from :func:`~jaxtrain.engines.pipeline.units.schedule_arrays`, this device's column
        [T, 1].
      params: as for ``_Device``, but for what the axes of ``plan.shards`` split.
      batch, keys_M, seeds_M, factors_M: as for ``_Device``.

    Returns:
      The loss, the gradients of this device's layers, and those of all other parameters; the first
      and the last are sums over all devices.
    """
    ticks = jax.tree.map(lambda column_T1: column_T1[:, 0], ticks)
    params = params if plan.shards is None else plan.shards.gathered(params)
    microbatch, outer = rows(batch, 0), plan.stages.outer(params)
    rng = None if keys_M is None else read(keys_M, 0)
    x = residual_stream(plan.stages, outer, microbatch, rng)
    device = _Device(plan, params, batch, keys_M, x, seeds_M, factors_M)
    if plan.table.backward:
        arguments = outer, x, microbatch, rng
        entries = [functools.partial(plan.stages.enter, k) for k in plan.stacks]
        device = dataclasses.replace(
            device,
            enter_reads=tuple(plan.trains & leaves_read(enter, *arguments) for enter in entries),
            head_reads=plan.trains & leaves_read(plan.stages.head_loss, outer, x, microbatch),
        )
    if not plan.recompute:
        number = jnp.int32(0)
        unit = Unit(*[number] * len(dataclasses.fields(Unit)))
        given = [_unit_arguments(device, k, unit, microbatch, rng, x) for k in plan.stacks]
        layers = [functools.partial(_layers, plan, k) for k in plan.stacks]
        layouts = (residuals.residual_layout(f, *g) for f, g in zip(layers, given, strict=True))
        device = dataclasses.replace(device, layouts=tuple(layouts))
    tick = functools.partial(_tick if plan.table.backward else _eval_tick, device)
    end, _ = jax.lax.scan(tick, _start(device), ticks)
    # The loss is the last stage's; outer parameters are read by the first and the last.
    if plan.shards is None:
        loss, d_outer = jax.lax.psum((end.loss, end.d_outer), "pipe")
        return loss, end.d_stacked, d_outer
    loss = plan.shards.joined(end.loss, ("pipe",))
    return loss, plan.shards.reduced(end.d_stacked), plan.shards.reduced(end.d_outer, ("pipe",))


def residual_stream(stages: Stages, outer: PyTree, microbatch: PyTree, rng: jax.Array | None):
    """Returns the shapes and dtypes of what travels from layer to layer.

    Raises:
      ValueError: where they are no floating-point arrays.
    """
    x = jax.eval_shape(stages.embed, outer, microbatch, rng)
    leaves = jax.tree.leaves(x)
    if not leaves or not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError(
            f"Stages.embed returns {x}: a pipeline hands floating-point arrays [B, ...] from stage "
            "to stage; let blocks read others from the batch"
        )
    return x


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
    y, _ = _forward(device, carry, unit)

    def head():
        batch, _ = device.microbatch(unit.microbatch)
        return y, carry.loss + to_accum_dtype(as_weighted(plan.stages.head(device.outer, y, batch)))

    y, loss = plan.choose(unit.last, head, lambda: (y, carry.loss))
    arrived = jax.lax.ppermute(y, "pipe", _ring(device))
    inputs = write(carry.inputs, tick["receive_input"], arrived)
    return _pin(device, dataclasses.replace(carry, inputs=inputs, loss=loss)), None


def _ring(device: _Device) -> list[tuple[int, int]]:
    """Returns the pairs of devices (from, to) along which stages pass their results."""
    S, wraps = device.plan.table.stages, device.plan.table.virtual > 1
    return [(s, (s + 1) % S) for s in range(S if wraps else S - 1)]


def _forward(device: _Device, carry: _Carry, unit: Unit) -> tuple[PyTree, tuple]:
    """Runs the forward unit; returns the stage's result and the buffers of residuals."""
    plan = device.plan
    slot = jnp.where(unit.present, unit.residual_slot, NONE)
    # What a branch updates is copied by XLA's GPU and CPU compilers, whole and in every tick. The
    # TPU compiler updates it where it lies, and would hold another slot for what leaves a branch.
    within = plan.skip_bubbles and platform() == "tpu"
    stored, places = device.residual_buffers

    def run():
        batch, rng = device.microbatch(unit.microbatch)
        x = _stage_input(device, carry, unit, batch, rng)

        def layers(k):
            arguments = _unit_arguments(device, k, unit, batch, rng, x)
            if plan.recompute:
                return _layers(plan, k, *arguments), ()
            y, found = residuals.forward(device.layouts[k], *arguments)
            kept = dict(enumerate(zeros(stored))) | dict(zip(places[k], found, strict=True))
            return y, tuple(kept.values())

        y, kept = plan.of_stack(unit.stack, layers)
        return y, write(carry.residuals, slot, kept) if within else kept

    def rest():
        return zeros(device.x), carry.residuals if within else zeros(stored)

    # Where a backward unit starts over, there is nothing that the last stage would run this for.
    idle = plan.recompute and plan.table.backward
    wanted = unit.present & ~unit.last if idle else unit.present
    y, kept = plan.choose(wanted, run, rest)
    return y, kept if within else write(carry.residuals, slot, kept)


def _backward(device: _Device, carry: _Carry, unit: Unit) -> tuple:
    """Runs the backward unit.

    Returns:
      The cotangent of its input, the gradients of its chunk (their sums stay out of the branches,
      see :func:`_forward`), and the other sums.
    """
    plan = device.plan

    def run():
        batch, rng = device.microbatch(unit.microbatch)
        x = _stage_input(device, carry, unit, batch, rng) if plan.recompute else None

        def layers(k):
            training, _, context = _unit_arguments(device, k, unit, batch, rng, x)
            if plan.recompute:
                y, pull = jax.vjp(lambda w, x: _layers(plan, k, w, x, context), training, x)
            else:
                y = read(carry.inputs, unit.input_slot)
                kept = [read(carry.residuals[i], unit.residual_slot) for i in places[k]]
                pull = residuals.pullback(device.layouts[k], training, context, tuple(kept))

            def arrived():
                return read(carry.cotangents, unit.cotangent_slot), carry.d_outer, carry.loss

            if k == plan.stacks[-1]:
                head = functools.partial(_head, device, carry, unit, y, batch)
                d_y, d_outer, loss = plan.choose(unit.last, head, arrived)
            else:
                d_y, d_outer, loss = arrived()
            d_weights, d_x = pull(d_y)
            d_chunk = {name: d_weights.pop(name, zero) for name, zero in no_chunk().items()}
            return d_x, d_chunk, _added(device, d_outer, unit, d_weights), loss

        d_x, d_chunk, d_outer, loss = plan.of_stack(unit.stack, layers)

        def enter(k):
            return _enter_backward(device, k, carry, d_outer, unit, d_x, batch, rng)

        d_x, d_outer = plan.choose(
            unit.first, lambda: plan.of_stack(unit.stack, enter), lambda: (d_x, d_outer)
        )
        return d_x, d_chunk, d_outer, loss

    def no_chunk():
        chunks = (picked(device.weights(k, 0), carry.d_stacked) for k in plan.stacks)
        return {name: jnp.zeros_like(p) for chunk in chunks for name, p in chunk.items()}

    places = device.residual_buffers[1]
    return plan.choose(
        unit.present, run, lambda: (zeros(device.x), no_chunk(), carry.d_outer, carry.loss)
    )


def _unit_arguments(
    device: _Device, k: int, unit: Unit, batch, rng, x
) -> tuple[Sums, PyTree, tuple]:
    """Returns arguments of :func:`_layers`: weights that train by path, ``x``, and the context."""
    weights = device.weights(k, unit.chunk)
    context = (weights, batch, rng, unit.layer, unit.layers)
    return picked(weights, device.plan.trains), x, context


def _layers(plan: Pipeline, k: int, training: Sums, x: PyTree, context: tuple) -> PyTree:
    weights, batch, rng, first, count = context

    def up_to_count(layer):
        def function(training, x, context):
            weights, context = context
            return layer(replaced(weights, training), x, context)

        def call(weights, x, context):
            present, training = context[-1] < first + count, picked(weights, plan.trains)
            return run(present, training, x, (weights, context))

        run = residuals.skippable(function, plan.choose)
        return call

    wrap = {"wrap": up_to_count} if plan.stages.stacked.parts[k].padded else {}
    weights = replaced(weights, training)
    return run_layers(plan.stages, weights, x, batch, rng, first, k=k, looped=True, **wrap)


def _stage_input(device: _Device, carry: _Carry, unit: Unit, batch, rng) -> PyTree:
    plan, arrived = device.plan, functools.partial(read, carry.inputs, unit.input_slot)

    def enter(k):
        return (plan.stages.enter(k, device.outer, arrived() if k else None, batch, rng),)

    (x,) = plan.choose(unit.first, lambda: plan.of_stack(unit.stack, enter), lambda: (arrived(),))
    return x


def _head(device: _Device, carry: _Carry, unit: Unit, y, batch) -> tuple:
    """The loss, forward and backward: cotangent of ``y``, gradients of ``outer``, loss."""

    def head(training, y):
        outer = replaced(device.outer, training)
        loss = as_weighted(device.plan.stages.head(outer, y, batch))
        return loss.total, of_constant_weight(loss, (training, y))

    _, pull, loss = jax.vjp(head, picked(device.outer, device.head_reads), y, has_aux=True)
    grads, d_y = pull(device.seeds_M[unit.microbatch])
    return d_y, _added(device, carry.d_outer, unit, grads), carry.loss + to_accum_dtype(loss)


def _enter_backward(
    device: _Device, k: int, carry: _Carry, d_outer: Sums, unit: Unit, d_x, batch, rng
) -> tuple[PyTree, Sums]:
    """Runs the backward pass of :meth:`Stages.enter`; returns ``x``'s cotangent and the sums."""

    def enter(training, x):
        return device.plan.stages.enter(k, replaced(device.outer, training), x, batch, rng)

    x = read(carry.inputs, unit.input_slot) if k else None
    _, pull = jax.vjp(enter, picked(device.outer, device.enter_reads[k]), x)
    grads, d_arrived = pull(d_x)
    return d_arrived if k else d_x, _added(device, d_outer, unit, grads)


def _added(device: _Device, sums: Sums, unit: Unit, grads: Sums) -> Sums:
    grads = scaled(grads, device.factors_M[unit.microbatch])
    return sums | {name: sums[name] + grad for name, grad in grads.items()}


def _add_chunk(device: _Device, sums: Sums, unit: Unit, grads: Sums) -> Sums:
    if device.plan.stages.stacked.virtual == 1:
        return _added(device, sums, unit, grads)
    grads = scaled(grads, device.factors_M[unit.microbatch])
    return jax.tree.map(lambda s, g: s.at[unit.chunk].add(g), sums, grads)


def _start(device: _Device) -> _Carry:
    plan, table = device.plan, device.plan.table

    def sums_like(tree):
        return zeros(jax.eval_shape(to_accum_dtype, tree))

    def slots(count, shapes):
        return jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    loss = jax.eval_shape(
        lambda: as_weighted(
            plan.stages.head_loss(device.outer, zeros(device.x), rows(device.batch, 0))
        )
    )
    carry = _Carry(inputs=slots(table.input_slots, device.x), loss=sums_like(loss))
    if table.backward:
        stacked = {name for name in plan.trains if plan.stages.stacked.holds(name)}
        carry = dataclasses.replace(
            carry,
            cotangents=slots(table.cotangent_slots, device.x),
            residuals=slots(table.residual_slots, device.residual_buffers[0]),
            d_stacked=sums_like(picked(device.params, stacked)),
            d_outer=sums_like(picked(device.params, plan.trains - stacked)),
        )
    return _pin(device, carry)


def _pin(device: _Device, carry: _Carry) -> _Carry:
    """Says how the carry lies on the axes other than ``pipe``, as far as that is known."""

    free = free_axes(jax.sharding.get_abstract_mesh())

    def sums(tree: Sums) -> Sums:
        if (specs := device.plan.gradient_specs) is None or not free:
            return tree
        specs = {name: restrict(specs[name], free) for name in tree}
        return jax.lax.with_sharding_constraint(tree, specs)

    return dataclasses.replace(
        carry,
        inputs=pin_rows(carry.inputs, axis=1),
        cotangents=pin_rows(carry.cotangents, axis=1),
        d_stacked=sums(carry.d_stacked),
        d_outer=sums(carry.d_outer),
    )
