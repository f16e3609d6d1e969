"""The parts of a model that a pipeline runs: its embedding, one layer, and its loss.

S devices along the mesh axis ``pipe`` hold V chunks of consecutive layers each
(:mod:`jaxtrain.sharding.stack`); global stage g = v S + s is chunk v of device s. The first stage
also embeds, the last also has the loss.

Shapes: B rows of a microbatch, L layers of the model, C layers of a chunk: L / (S V), or the most
that any chunk has.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.loss import row_wise
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.offload import fetched_layer
from jaxtrain.sharding.placement import stands_apart
from jaxtrain.sharding.stack import Stack
from jaxtrain.tree import PyTree

# A loop over layers copies what it keeps to and from stacked arrays. On one device of these kinds
# that is slower than up to so many layers written out (by a fifth for the 12 of GPT-2 on an H100),
# and compiling these takes little longer.
UNROLLED = {"cpu": 8, "gpu": 24}


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
        """Returns the first input of stack k; stack 0 embeds the batch and ignores ``x``.

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
    def head(self, params: PyTree, x: PyTree, batch: PyTree) -> Any:
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
        return stages.head(outer, run_stacks(stages, params, batch, rng), batch)

    loss_fn.stack = stages.stacked
    return row_wise(loss_fn) if stages.row_wise else loss_fn


def run_stacks(
    stages: Stages, params: Mapping[str, PyTree], batch: PyTree, rng: jax.Array | None
) -> PyTree:
    """Returns the residual stream behind all layers of a model, of parameters in natural order."""
    outer, x, first = stages.outer(params), None, 0
    for k, part in enumerate(stages.stacked.parts):
        x = stages.enter(k, outer, x, batch, rng)
        x = run_layers(stages, params, x, batch, rng, first, k=k)
        first += jax.tree.leaves(params[part.key])[0].shape[0]
    return x


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
        weights = fetched_layer(weights)
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
    alone = mesh.empty or mesh.size == 1 or stands_apart()
    most = UNROLLED.get(platform(), 1) if alone and stages.remat is None else 1
    return count if count <= most else 1


def _same_kind(y: PyTree, x: PyTree, what: str) -> PyTree:
    def kinds(x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", x)

    if kinds(y) != kinds(x):
        raise ValueError(
            f"{what} turns {kinds(x)} into {kinds(y)}: every layer, and what is between, must keep "
            "the shape and dtype of the residual stream"
        )
    return y
