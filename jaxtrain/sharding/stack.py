"""The stacked layout: which parameters have the layer as their leading axis, and how it is cut.

A model keeps what its layers have in common under one key, as leaves [L, ...] in natural order.
Checkpoints hold that. A pipeline may want another order: split over the mesh axis ``pipe``, global
stage g = v S + s is chunk v on device s. An interleaved one wants [V, S C, ...], where row s C + l
of v is layer l of that chunk. Where stages have different numbers of layers, C is the largest, and
the rows that are left over are padding: zeros, which no stage runs and no gradient reaches. Rules,
optimizers, pipelines, checkpoints and comparisons ask a :class:`Stack` which of these it is.

A model may have several such stacks, one after the other (an encoder and a decoder), each under a
key of its own. Each is then cut by itself; the global stages of the first come first.

Shapes: L layers, V chunks per device, S devices along ``pipe``, C rows of a chunk.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.tree import LayerGroup, LayerRows, PyTree, named_leaves, owner_of, path_name


@dataclasses.dataclass(frozen=True)
class Stack:
    """Which parameters are stacked by layer, and how.

    Args:
      key: the key of the parameters under which every leaf is stacked; or several, in order.
      virtual: V, chunks per device of each key: above 1 the layer axis is cut in as many parts.
      counts: how many layers each of the S V global stages has, in order, those of the first key
        first; 0 is one. None for as many in each, on any number of devices.
        :func:`jaxtrain.engines.pipeline.balance.balanced` weighs them.

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

    key: str | tuple[str, ...] = "blocks"
    virtual: int = 1
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.virtual < 1:
            raise ValueError(f"`virtual` is {self.virtual}: a pipeline needs at least 1")
        if self.counts is None:
            return
        object.__setattr__(self, "counts", tuple(self.counts))
        keys = 1 if isinstance(self.key, str) else len(self.key)
        each = max(1, len(self.counts) // keys)
        shares = [self.counts[i : i + each] for i in range(0, len(self.counts), each)]
        wrong = len(shares) != keys or not all(map(any, shares)) or min(self.counts) < 0
        if wrong or each % self.virtual:
            raise ValueError(
                f"counts is {self.counts}: give the number of layers of every global stage, "
                f"{self.virtual} x the devices along pipe (for each key), at least 0 and not all 0"
            )

    @property
    def parts(self) -> tuple["Stack", ...]:
        """A stack for each key."""
        if isinstance(self.key, str):
            return (self,)
        each = len(self.counts or ()) // len(self.key)
        return tuple(
            Stack(key, self.virtual, self.counts and self.counts[i * each : (i + 1) * each])
            for i, key in enumerate(self.key)
        )

    @property
    def lead(self) -> int:
        """Number of leading axes of a stacked parameter that count layers, 1 or 2."""
        return 1 if self.virtual == 1 else 2

    @property
    def padded(self) -> bool:
        """Whether some rows are padding."""
        return any(len(set(part.counts or ())) > 1 for part in self.parts)

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
    def axes(self) -> dict[str, int | LayerRows]:
        """Argument ``stacked`` of :func:`jaxtrain.make_optimizer`: the axes by pattern of path.

        >>> Stack("layers", virtual=2).axes
        {'^layers(/|$)': 2}
        """
        return {
            f"^{re.escape(part.key)}(/|$)": LayerRows(part.lead, part.places)
            if part.padded
            else part.lead
            for part in self.parts
        }

    def holds(self, path: str | None) -> bool:
        """Whether the parameter at ``path`` is stacked."""
        return path is not None and any(f"{path}/".startswith(f"{p.key}/") for p in self.parts)

    def fits(self, params: Any) -> bool:
        """Whether parameters look as this says: below each key no list, but leaves that share their
        leading axes, a matrix per layer among them.

        >>> Stack().fits({"blocks": {"w": jax.numpy.ones((3, 4, 4)), "b": jax.numpy.ones((3, 4))}})
        True
        >>> Stack().fits({"blocks": [{"w": jax.numpy.ones((4, 4)), "b": jax.numpy.ones(4)}]})
        False
        """
        named = named_leaves(params)

        def one(part: Stack) -> bool:
            under = {name: np.shape(x) for name, x in named.items() if part.holds(name)}
            listed = any(name[len(part.key) + 1 :].split("/")[0].isdecimal() for name in under)
            deep = max(map(len, under.values()), default=0) >= self.lead + 2
            return deep and not listed and len({x[: self.lead] for x in under.values()}) == 1

        return all(map(one, self.parts))

    def cut(self, params: Mapping[str, Any]) -> dict:
        """Cuts the layer axis of parameters in natural order, such as a model's ``init`` returns.

        Raises:
          ValueError: where V does not divide the number of layers, or ``counts`` have another sum.
        """

        def cut(part: Stack, x: jax.Array) -> jax.Array:
            L, V = x.shape[0], part.virtual
            if part.counts is not None and sum(part.counts) != L:
                raise ValueError(
                    f"{part.key!r} has {L} layers and counts {part.counts} place "
                    f"{sum(part.counts)}: give counts with the sum {L}"
                )
            if part.counts is None and L % V:
                raise ValueError(
                    f"{part.key!r} has {L} layers, not divisible by virtual={V}: use a divisor of "
                    f"{L}"
                )
            rows = max(part.counts) * len(part.counts) if part.padded else L
            return LayerOrder((rows,) if V == 1 else (V, rows // V), part.places).split(x)

        return self._mapped(cut, params)

    def natural(self, params: Mapping[str, Any]) -> dict:
        """Joins the layer axis of parameters again: the inverse of :meth:`cut`."""
        return self._mapped(lambda part, x: part._order(x).join(x), params)

    def _mapped(self, function: Callable[["Stack", Any], Any], params: Mapping[str, Any]) -> dict:
        return dict(params) | {
            part.key: jax.tree.map(functools.partial(function, part), params[part.key])
            for part in self.parts
        }

    def _order(self, leaf: Any) -> "LayerOrder":
        return LayerOrder(tuple(leaf.shape[: self.lead]), self.places)

    def in_order(self, state: PyTree) -> PyTree:
        """Returns a train state as checkpoints hold it, in natural order: each leaf that is cut or
        padded as a :class:`StackedLeaf`, and the others themselves. Nothing is copied.

        Args:
          state: arrays, or shapes with shardings; ``params`` in it says which leaves are stacked.
            What an optimizer keeps per layer (:func:`jaxtrain.optim.per_layer`) is, as well.
        """
        if self.virtual == 1 and not self.padded:
            return state
        params = named_leaves(state.params)
        rows = {
            part: tuple(x.shape[: part.lead])
            for part in self.parts
            for name, x in params.items()
            if part.holds(name)
        }

        def one(path: Any, leaf: Any) -> Any:
            owner = owner_of(path_name(path), params)
            keys = (getattr(key, "key", None) for key in path)
            group = next((key for key in keys if isinstance(key, LayerGroup)), None)
            fitting = [
                part
                for part, sizes in rows.items()
                if np.shape(leaf)[: part.lead] == sizes
                and (part.holds(owner) or (owner is None and group is not None))
            ]
            # Of several, a counter without an owner is told by the number of layers in its group.
            own = [p for p in fitting if group is not None and group.layers == sum(p.counts or ())]
            part = next(iter(own + fitting), None)
            return leaf if part is None else StackedLeaf(leaf, part._order(leaf))

        return jax.tree_util.tree_map_with_path(one, state)


@dataclasses.dataclass(frozen=True)
class LayerOrder:
    """The order of L layers in the leading axes of a leaf.

    Args:
      sizes: sizes of these axes.
      rows: the row of each layer, the axes taken as one; the others are padding. None where row l
        is layer l.

    >>> LayerOrder((2, 2), rows=(0, 1, 3)).layers
    array([[ 0,  1],
           [-1,  2]])
    """

    sizes: tuple[int, ...]
    rows: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """L."""
        return math.prod(self.sizes) if self.rows is None else len(self.rows)

    @property
    def layers(self) -> np.ndarray:
        """The layer in each row; -1 in padding."""
        layers = np.full(math.prod(self.sizes), -1)
        layers[slice(None) if self.rows is None else list(self.rows)] = np.arange(self.count)
        return layers.reshape(self.sizes)

    def join(self, x: Any) -> Any:
        """A leaf that lies so, in natural order [L, ...]."""
        x = x if len(self.sizes) == 1 else x.reshape(-1, *x.shape[len(self.sizes) :])
        return x if self.rows is None else x[np.array(self.rows)]

    def split(self, x: Any) -> Any:
        """The inverse of :meth:`join`; padding is zeros. What is read later (a file's weight) has a
        method ``cut`` for it."""
        if hasattr(x, "cut"):
            return x.cut(self)
        if self.rows is not None:
            layers, xp = self.layers.ravel(), np if isinstance(x, np.ndarray) else jnp
            padding = layers.reshape(-1, *[1] * (x.ndim - 1)) < 0
            x = xp.where(padding, xp.zeros((), x.dtype), x[layers])
        return x if len(self.sizes) == 1 else x.reshape(*self.sizes, *x.shape[1:])


@dataclasses.dataclass(frozen=True)
class StackedLeaf:
    """A leaf that stands for the one in natural order, [L, ...].

    Args:
      array: as it lies on the devices, or its shape, dtype and sharding.
      order: how the layers lie in it.
    """

    array: Any
    order: LayerOrder

    @property
    def shape(self) -> tuple[int, ...]:
        """That in natural order."""
        return (self.order.count, *self.array.shape[len(self.order.sizes) :])

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.array.dtype


# Entered around an optimizer with how the model is stacked (None says nothing), and whether that is
# sure or a default that :meth:`Stack.fits` is to confirm.
of_model = jax.make_user_context((None, False))
