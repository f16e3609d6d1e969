"""The stacked layout: which parameters have the layer as their leading axis, and how it is cut.

A model keeps what its layers have in common under one key, as leaves [L, ...] in natural order.
Checkpoints hold that. A pipeline may want another order: split over the mesh axis ``pipe``, global
stage g = v S + s is chunk v on device s. An interleaved one wants [V, S C, ...], where row s C + l
of v is layer l of that chunk. Where stages have different numbers of layers, C is the largest, and
the rows that are left over are padding: zeros, which no stage runs and no gradient reaches. Rules,
optimizers, pipelines, checkpoints and comparisons ask a :class:`Stack` which of these it is.

Shapes: L layers, V chunks per device, S devices along ``pipe``, C rows of a chunk.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.parallel.specs import spread
from jaxtrain.tree import LAYER_GROUP, Rows, map_named, named_leaves, owner_of

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Stack:
    """Which parameters are stacked by layer, and how.

    Args:
      key: the key of the parameters under which every leaf is stacked.
      virtual: V, chunks per device: above 1 the layer axis is cut in as many parts.
      counts: how many layers each of the S V global stages has, in order; 0 is one. None for as
        many in each, on any number of devices. :func:`jaxtrain.planning.balance.balanced` weighs
        them.

    Raises:
      ValueError: for ``virtual`` below 1, and counts that V does not divide or are no counts.

    >>> stack = Stack(virtual=2)
    >>> params = {"blocks": {"w": jax.numpy.zeros((8, 3))}, "head": jax.numpy.ones(3)}
    >>> cut = stack.cut(params)
    >>> cut["blocks"]["w"].shape, stack.natural(cut)["blocks"]["w"].shape
    ((2, 4, 3), (8, 3))
    >>> Stack(counts=(3, 3, 2)).cut(params)["blocks"]["w"].shape
    (9, 3)
    """

    key: str = "blocks"
    virtual: int = 1
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.virtual < 1:
            raise ValueError(f"virtual is {self.virtual}: a pipeline needs at least 1")
        if self.counts is None:
            return
        object.__setattr__(self, "counts", tuple(self.counts))
        if (
            len(self.counts) % self.virtual
            or min(self.counts, default=-1) < 0
            or not any(self.counts)
        ):
            raise ValueError(
                f"counts is {self.counts}: give the number of layers of every global stage, "
                f"{self.virtual} x the devices along pipe, at least 0 each and not all 0"
            )

    @property
    def lead(self) -> int:
        """How many leading axes of a stacked parameter count layers, 1 or 2."""
        return 1 if self.virtual == 1 else 2

    @property
    def padded(self) -> bool:
        """Whether some rows are padding."""
        return self.counts is not None and len(set(self.counts)) > 1

    @property
    def places(self) -> tuple[int, ...] | None:
        """The row of each layer, the leading axes taken as one; None where nothing is padded.

        >>> Stack(counts=(2, 1, 2)).places
        (0, 1, 2, 4, 5)
        """
        if not self.padded:
            return None
        C = max(self.counts)
        return tuple(g * C + l for g, count in enumerate(self.counts) for l in range(count))

    @property
    def axes(self) -> dict[str, int | Rows]:
        """What :func:`jaxtrain.make_optimizer` takes as ``stacked``: the axes by pattern of path.

        >>> Stack("layers", virtual=2).axes
        {'^layers(/|$)': 2}
        """
        axes = Rows(self.lead, self.places) if self.padded else self.lead
        return {f"^{re.escape(self.key)}(/|$)": axes}

    def holds(self, path: str | None) -> bool:
        """Whether the parameter at ``path`` is stacked."""
        return path is not None and f"{path}/".startswith(f"{self.key}/")

    def cut(self, params: Mapping[str, Any]) -> dict:
        """Cuts the layer axis of parameters in natural order, such as a model's ``init`` returns.

        Raises:
          ValueError: where V does not divide the number of layers, or ``counts`` have another sum.
        """
        V = self.virtual

        def cut(x: jax.Array) -> jax.Array:
            L = x.shape[0]
            if self.counts is not None and sum(self.counts) != L:
                raise ValueError(
                    f"{self.key!r} has {L} layers and counts {self.counts} place "
                    f"{sum(self.counts)}: give counts with the sum {L}"
                )
            if self.counts is None and L % V:
                raise ValueError(
                    f"{self.key!r} has {L} layers, not divisible by virtual={V}: use a divisor of "
                    f"{L}"
                )
            return _cut(x, self)

        return dict(params) | {self.key: jax.tree.map(cut, params[self.key])}

    def natural(self, params: Mapping[str, Any]) -> dict:
        """Joins the layer axis of parameters again: the inverse of :meth:`cut`."""
        join = functools.partial(_join, stack=self)
        return dict(params) | {self.key: jax.tree.map(join, params[self.key])}

    def shapes(self, state: PyTree) -> PyTree:
        """Returns the shapes and shardings of a train state in natural order.

        Args:
          state: arrays, or shapes with shardings; ``params`` in it says which leaves are stacked.
            What an optimizer keeps per layer (:func:`jaxtrain.optim.per_layer`) is, as well.
        """

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = jax.eval_shape(functools.partial(_join, stack=self), leaf).shape
            mesh, spec = leaf.sharding.mesh, P(*leaf.sharding.spec[self.lead - 1 :])
            if self.padded:  # so that pipe may not divide the layers
                spec = spread(P(None, *spec[1:]), shape, mesh, ("pipe",))
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return self._stacked(shape, state)

    def state_in_natural_order(self, state: PyTree) -> PyTree:
        """Returns a train state as :meth:`shapes` says.

        Leaves that lie otherwise there are copied, one after another; the others are those of
        ``state`` themselves.
        """
        return self._stacked(
            lambda leaf, like: _moved(_join, self, like.sharding)(leaf), state, self.shapes(state)
        )

    def state_cut(self, state: PyTree, like: PyTree) -> PyTree:
        """Returns a train state in natural order as it was before :meth:`state_in_natural_order`.

        Args:
          state: arrays.
          like: shapes and shardings of the result.
        """

        return self._stacked(
            lambda like, leaf: _moved(_cut, self, like.sharding)(leaf), like, state
        )

    def _stacked(self, function: Callable, state: PyTree, *rest: PyTree) -> PyTree:
        """Maps over the leaves of a state that are stacked and, in natural order, lie otherwise.

        Of the others the last tree's are returned.
        """
        if self.virtual == 1 and not self.padded:
            return (state, *rest)[-1]
        params = named_leaves(state.params)
        sizes = (tuple(x.shape[: self.lead]) for name, x in params.items() if self.holds(name))
        rows = next(sizes, None)

        def one(name: str, leaf: Any, *others: Any) -> Any:
            grouped = any(word.startswith(LAYER_GROUP) for word in name.split("/"))
            stacked = grouped or self.holds(owner_of(name, params))
            if stacked and tuple(leaf.shape[: self.lead]) == rows:
                return function(leaf, *others)
            return (leaf, *others)[-1]

        return map_named(one, state, *rest)


def _join(x: jax.Array, stack: Stack) -> jax.Array:
    """Leaves in natural order, of one that is cut."""
    x = x.reshape(-1, *x.shape[2:]) if stack.lead == 2 else x
    return x[np.array(stack.places)] if stack.padded else x


def _cut(x: jax.Array, stack: Stack) -> jax.Array:
    """The inverse of :func:`_join`."""
    if stack.padded:
        rows = len(stack.counts) * max(stack.counts)
        x = jnp.asarray(x)
        x = jnp.zeros((rows, *x.shape[1:]), x.dtype).at[np.array(stack.places)].set(x)
    return x if stack.virtual == 1 else x.reshape(stack.virtual, -1, *x.shape[1:])


@functools.cache
def _moved(function: Callable, stack: Stack, sharding: jax.sharding.Sharding) -> Callable:
    # Leaf by leaf: in one program XLA holds the temporary copies of all of them at once.
    return jax.jit(functools.partial(function, stack=stack), out_shardings=sharding)
