"""The stacked layout: which parameters have the layer as their leading axis, and how it is cut.

A model keeps what its layers have in common under one key, as leaves [L, ...] in natural order.
Checkpoints hold that. An interleaved pipeline wants [V, L / V, ...]: split over the mesh axis
``pipe`` along the second axis, layer v L / V + s C + l is layer l of chunk v on device s. Rules,
optimizers, pipelines, checkpoints and comparisons ask a :class:`Stack` which of the two it is.

Shapes: L layers, V chunks per device, S devices along ``pipe``, C = L / (S V) layers of a chunk.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.tree import LAYER_GROUP, map_named, named_leaves, owner_of

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Stack:
    """Which parameters are stacked by layer, and how.

    Args:
      key: the key of the parameters under which every leaf is stacked.
      virtual: V, chunks per device: above 1 the layer axis is cut in as many parts.

    Raises:
      ValueError: for ``virtual`` below 1.

    >>> stack = Stack(virtual=2)
    >>> params = {"blocks": {"w": jax.numpy.zeros((8, 3))}, "head": jax.numpy.ones(3)}
    >>> cut = stack.cut(params)
    >>> cut["blocks"]["w"].shape, stack.natural(cut)["blocks"]["w"].shape
    ((2, 4, 3), (8, 3))
    """

    key: str = "blocks"
    virtual: int = 1

    def __post_init__(self) -> None:
        if self.virtual < 1:
            raise ValueError(f"virtual is {self.virtual}: a pipeline needs at least 1")

    @property
    def lead(self) -> int:
        """How many leading axes of a stacked parameter count layers, 1 or 2."""
        return 1 if self.virtual == 1 else 2

    @property
    def axes(self) -> dict[str, int]:
        """What :func:`jaxtrain.make_optimizer` takes as ``stacked``: the axes by pattern of path.

        >>> Stack("layers", virtual=2).axes
        {'^layers(/|$)': 2}
        """
        return {f"^{re.escape(self.key)}(/|$)": self.lead}

    def holds(self, path: str | None) -> bool:
        """Whether the parameter at ``path`` is stacked."""
        return path is not None and f"{path}/".startswith(f"{self.key}/")

    def cut(self, params: Mapping[str, Any]) -> dict:
        """Cuts the layer axis of parameters in natural order, such as a model's ``init`` returns.

        Raises:
          ValueError: where V does not divide the number of layers.
        """
        V = self.virtual

        def cut(x: jax.Array) -> jax.Array:
            if x.shape[0] % V:
                raise ValueError(
                    f"{self.key!r} has {x.shape[0]} layers, not divisible by virtual={V}: use a "
                    f"divisor of {x.shape[0]}"
                )
            return x.reshape(V, x.shape[0] // V, *x.shape[1:])

        return dict(params) if V == 1 else self._mapped(cut, params)

    def natural(self, params: Mapping[str, Any]) -> dict:
        """Joins the layer axis of parameters again: the inverse of :meth:`cut`."""
        if self.virtual == 1:
            return dict(params)
        return self._mapped(lambda x: x.reshape(-1, *x.shape[2:]), params)

    def in_order(self, state: PyTree) -> PyTree:
        """Returns a train state as checkpoints hold it, in natural order: each leaf that is cut as
        a :class:`Cut`, and the others themselves. Nothing is copied.

        Args:
          state: arrays, or shapes with shardings; ``params`` in it says which leaves are stacked.
            What an optimizer keeps per layer (:func:`jaxtrain.optim.per_layer`) is, as well.
        """
        if self.virtual == 1:
            return state
        params = named_leaves(state.params)
        layers = next((tuple(x.shape[:2]) for name, x in params.items() if self.holds(name)), ())

        def joined(name: str, leaf: Any) -> Any:
            grouped = any(word.startswith(LAYER_GROUP) for word in name.split("/"))
            if (grouped or self.holds(owner_of(name, params))) and leaf.shape[:2] == layers:
                return Cut(leaf, (layers[0] * layers[1], *leaf.shape[2:]))
            return leaf

        return map_named(joined, state)

    def _mapped(self, function: Any, params: Mapping[str, Any]) -> dict:
        return dict(params) | {self.key: jax.tree.map(function, params[self.key])}


@dataclasses.dataclass(frozen=True)
class Cut:
    """A leaf [V, L / V, ...] that stands for the one [L, ...], whose bytes in order are the same.

    Args:
      array: as it lies on the devices, or its shape, dtype and sharding.
      shape: in natural order.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.array.dtype
