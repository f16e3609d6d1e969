"""What a model gives to be pipelined: its embedding, one layer, and its loss.

S devices along the mesh axis ``pipe`` hold V chunks of consecutive layers each
(:mod:`jaxtrain.parallel.stack`); global stage g = v S + s is chunk v of device s. The first stage
also embeds, the last also has the loss.

Shapes: B rows of a microbatch, L layers of the model, C layers of a chunk: L / (S V), or the most
that any chunk has.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.gradients import row_wise
from jaxtrain.parallel.mesh import platform
from jaxtrain.parallel.placement import entered_specs, gather, gathers_whole, specs_of
from jaxtrain.parallel.stack import Stack
from jaxtrain.precision import equations
from jaxtrain.tree import PyTree, named_leaves

# A loop over layers copies what it keeps to and from stacked arrays. On one CPU device that is
# slower than up to so many layers written out, and compiling these takes little longer.
UNROLLED = 8


@dataclasses.dataclass(frozen=True)
class Stages:
    """A model as embedding, layers and loss.

    :func:`jaxtrain.loss_from_stages` makes the loss function of them that the other gradient
    engines take. They must name no mesh axis ``pipe``.

    Args:
      embed: ``(params, batch, rng) -> x``, the residual stream: an array [B, ...], or a pytree of
        floating-point arrays (hidden states, sums to be added to), whose shapes and dtypes every
        layer keeps. ``rng`` is the microbatch's key; None means an evaluation.
      block: ``(layer_params, x, batch, rng) -> x``, one layer, or a sequence of such functions, one
        for each stack of layers; for layer l its ``rng`` is ``jax.random.fold_in(key, l)`` of the
        microbatch's key. With ``shared``,
        ``(layer_params, shared, x, batch, rng, index) -> x``.
      head_loss: ``(params, x, batch) -> WeightedLoss`` or scalar (weight 1). The weight is a
        function of ``batch`` alone.
      stacked: the parameters of the layers, as a :class:`jaxtrain.Stack` or its key: every leaf
        there has a leading layer axis, integers (which do not train) too. ``embed`` and
        ``head_loss`` get all parameters but these. With several blocks, several keys in their
        order.
      scan_unroll: layers per iteration of the scan over a chunk's layers; None for what suits the
        machine.
      shared: keys of other parameters that every block reads, perhaps none: their gradients are
        summed over all layers. Given, blocks are also told the number l of their layer.
      remat: ``(layer, *, prevent_cse) -> layer``, such as ``jax.checkpoint``: what a layer keeps
        for its backward pass. None keeps everything (a block may be wrapped itself).
      row_wise: whether the loss is a sum over rows, as :func:`jaxtrain.row_wise` declares it: no
        layer lets rows see each other, and ``head_loss`` adds what each gives.
      between: for several blocks, such as an encoder's and a decoder's, what comes between the
        layers of one and of the next: ``(params, x, batch, rng) -> x``, one fewer than blocks, with
        ``params`` and ``rng`` as for ``embed``. Layers are numbered through.
    """

    embed: Callable[[PyTree, PyTree, jax.Array | None], PyTree]
    block: Callable[..., PyTree] | Sequence[Callable[..., PyTree]]
    head_loss: Callable[[PyTree, PyTree, PyTree], Any]
    stacked: Stack | str | Sequence[str] = Stack()  # noqa: RUF009
    scan_unroll: int | None = 1
    shared: Sequence[str] | None = None
    remat: Callable[..., Callable] | None = None
    row_wise: bool = False
    between: Sequence[Callable[[PyTree, PyTree, PyTree, jax.Array | None], PyTree]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.stacked, Stack):
            key = self.stacked if isinstance(self.stacked, str) else tuple(self.stacked)
            object.__setattr__(self, "stacked", Stack(key))
        keys, blocks = len(self.stacked.parts), len(self.blocks)
        if not keys == blocks == len(self.between) + 1:
            raise ValueError(
                f"Stages has {blocks} blocks, {keys} keys of stacked parameters and "
                f"{len(self.between)} functions between: give a key for every block, and a "
                "function between each block and the next"
            )
        if isinstance(self.shared, str):
            # A string is a sequence of one-letter keys.
            raise ValueError(f"shared is the string {self.shared!r}; write ({self.shared!r},)")

    @property
    def blocks(self) -> tuple[Callable[..., PyTree], ...]:
        """The function of one layer, for each stack."""
        return (self.block,) if callable(self.block) else tuple(self.block)

    @jax.named_scope("embed")
    def enter(
        self, k: int, params: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None
    ) -> PyTree:
        """What the first layer of stack k is given: of stack 0 embedded, ``x`` not being read.

        Raises:
          ValueError: where the shape or dtype of ``x`` changes on the way.
        """
        if k == 0:
            return self.embed(params, batch, rng)
        return _same_kind(self.between[k - 1](params, x, batch, rng), x, "Stages.between")

    def layer(
        self,
        k: int,
        params: Mapping[str, PyTree],
        x: PyTree,
        batch: PyTree,
        rng: jax.Array | None,
        index: int | jax.Array,
    ) -> PyTree:
        """One layer of stack k.

        Args:
          params: the layer's own under the stack's key, and the shared ones.
          x, batch: what it reads.
          rng: its own key, or None.
          index: its number in the model.
        """
        key = self.stacked.parts[k].key
        with jax.named_scope(key):
            if self.shared is None:
                return self.blocks[k](params[key], x, batch, rng)
            shared = {name: params[name] for name in self.shared}
            return self.blocks[k](params[key], shared, x, batch, rng, index)

    @jax.named_scope("head")
    def leave(self, params: PyTree, x: PyTree, batch: PyTree) -> Any:
        """The loss of what the last layer returns."""
        return self.head_loss(params, x, batch)

    def outer(self, params: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """All parameters but the stacked ones.

        Raises:
          ValueError: where the stacked ones or those of ``shared`` are missing.
        """
        has = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        keys = [part.key for part in self.stacked.parts]
        if missing := [key for key in keys if key not in has]:
            raise ValueError(
                f"stages need the parameters of their layers under the key {missing[0]!r} "
                f"and find {has}: stack them there, or set Stages(stacked=...)"
            )
        outer = {name: value for name, value in params.items() if name not in keys}
        if missing := [name for name in self.shared or () if name not in outer]:
            raise ValueError(
                f"Stages(shared=...) names {missing[0]!r} and the parameters that are not stacked "
                f"are {sorted(outer)}: use some of these"
            )
        return outer


def loss_from_stages(stages: Stages) -> Callable[[PyTree, PyTree, jax.Array | None], Any]:
    """Makes the loss function of a model given as stages, for everything that is no pipeline.

    Args:
      stages: the model.

    Returns:
      ``(params, batch, rng) -> WeightedLoss``, as :func:`jaxtrain.build_train_step` and
      :func:`jaxtrain.build_eval_step` take it. Parameters are laid out as ``stages.stacked`` says.

    >>> stages = Stages(
    ...     embed=lambda params, batch, rng: batch,
    ...     block=lambda layer, x, batch, rng: x * layer["w"],
    ...     head_loss=lambda params, x, batch: (x * params["out"]).sum(),
    ... )
    >>> params = {"blocks": {"w": jnp.array([2.0, 3.0])}, "out": jnp.ones(4)}
    >>> float(loss_from_stages(stages)(params, jnp.ones(4), None))
    24.0
    """

    def loss_fn(params: PyTree, batch: PyTree, rng: jax.Array | None) -> Any:
        outer, params = stages.outer(params), stages.stacked.natural(params)
        x, first = None, 0
        for k, part in enumerate(stages.stacked.parts):
            x = stages.enter(k, outer, x, batch, rng)
            x = run_layers(stages, params, x, batch, rng, first, k=k)
            first += jax.tree.leaves(params[part.key])[0].shape[0]
        return stages.leave(outer, x, batch)

    loss_fn.stack = stages.stacked
    return row_wise(loss_fn) if stages.row_wise else loss_fn


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


def enter_stages(
    stages: Stages, params: PyTree, shardings: PyTree | None = None
) -> tuple[PyTree, Stages]:
    """:func:`jaxtrain.parallel.placement.entered_specs` for stages: weights are gathered before the
    first tick, and stay so wherever a stage reads them and hands back their gradients.

    Outer parameters, shared ones too, are then whole on all axes: of a lookup in a table that is
    split by rows, XLA's partitioner aborts within the map over ``pipe``, or exchanges rows within a
    branch that only one stage takes, where all others wait for it.

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
    up, by a token or of a target, parameters are whole on all axes, as of :func:`enter_stages`,
    unless every device looks up what it has itself (:func:`jaxtrain.ops.lookup.look_up`).

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
            with gathers_whole():
                return function(gather(params), *rest)

        return whole

    return dataclasses.replace(
        stages,
        embed=gathered(stages.embed, microbatch, None),
        head_loss=gathered(stages.head_loss, x, microbatch),
        between=tuple(gathered(function, x, microbatch, None) for function in stages.between),
    )


def run_layers(
    stages: Stages,
    params: Mapping[str, PyTree],
    x: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    first: int | jax.Array = 0,
    *,
    k: int = 0,
    looped: bool = False,
    wrap: Callable[[Callable], Callable] = lambda layer: layer,
) -> PyTree:
    """Scans consecutive layers.

    Args:
      params: stacked parameters with a leading axis C, under their key, and the shared ones.
      x: the residual stream.
      batch, rng: the microbatch and its key; None means an evaluation.
      first: the number, in the whole model, of the first of these layers.
      k: of which stack.
      looped: whether this is within a loop that keeps forward and backward pass apart.
      wrap: what becomes of ``layer(weights, x, (batch, rng, number)) -> x``, after
        ``Stages.remat``; the weights are like ``params``, with one layer of the stacked ones.

    Raises:
      ValueError: where a layer changes the shape or dtype of ``x``.
    """
    key = stages.stacked.parts[k].key
    shared = {name: params[name] for name in stages.shared or ()}
    count = jax.tree.leaves(params[key])[0].shape[0]

    def layer(weights, x, context):
        batch, rng, index = context
        rng = None if rng is None else jax.random.fold_in(rng, index)
        return _same_kind(stages.layer(k, weights, x, batch, rng, index), x, "a block")

    unroll = _unroll(stages, count)
    if stages.remat is not None:
        # In a loop the forward and the backward pass are apart, and no common subexpression can
        # undo the rematerialisation; a loop of one iteration is no loop.
        layer = stages.remat(layer, prevent_cse=not looped and count <= unroll)
    layer = wrap(layer)

    def body(x, row):
        weights, index = row
        return layer({key: weights} | shared, x, (batch, rng, index)), None

    return jax.lax.scan(body, x, (params[key], first + jnp.arange(count)), unroll=unroll)[0]


def _unroll(stages: Stages, count: int) -> int:
    if stages.scan_unroll is not None:
        return stages.scan_unroll
    # Without an ambient mesh nothing says that there are more devices.
    mesh = jax.sharding.get_abstract_mesh()
    alone = platform() == "cpu" and (mesh.empty or mesh.size == 1)
    return count if alone and stages.remat is None and count <= UNROLLED else 1


def _same_kind(y: PyTree, x: PyTree, what: str) -> PyTree:
    def kinds(x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", x)

    if kinds(y) != kinds(x):
        raise ValueError(
            f"{what} turns {kinds(x)} into {kinds(y)}: every layer, and what is between, must keep "
            "the shape and dtype of the residual stream"
        )
    return y
