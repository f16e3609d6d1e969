"""Kernels of which a function is multiplied: masked ones, rounded ones, and ones that are probed.

Shapes: N tokens, D inputs, F outputs; ``...`` leading dimensions, such as layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.linear import Axes, Product, merge
from jaxtrain.ops.packed import Kind, pack
from jaxtrain.ops.scaled import Scaled
from jaxtrain.sharding.stack import LayerOrder
from jaxtrain.tree import PyTree, map_named, named_leaves, nodes_of


class _Altered:
    """What both kernels share: a product makes what it multiplies, and again for the gradient."""

    shape = property(lambda self: self.base.shape)
    dtype = property(lambda self: self.base.dtype)

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        if nodes_of(Scaled, self.base):
            raise ValueError(
                "a masked or rounded kernel has a recipe's products too, and what it multiplies is "
                "made anew each time: choose a precision without a recipe, such as bf16"
            )

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def multiplied(x: jax.Array, kernel: Any) -> jax.Array:
            return product(x, kernel.merged().astype(x.dtype))

        return multiplied(x, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Masked(_Altered):
    """The kernel ``base * kept``: what is not kept is 0, and has no gradient.

    Args:
      base: [..., D, F], an array.
      kept: uint8 [..., D, F], of 0 and 1.
    """

    base: Any
    kept: Any

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        return {"base": axes, "kept": axes}

    def merged(self) -> jax.Array:
        return self.base * self.kept.astype(self.base.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rounded(_Altered):
    """The kernel that :func:`jaxtrain.ops.packed.pack` would store, whose gradient is the base's
    (straight through: Bengio et al. 2013, https://arxiv.org/abs/1308.3432).

    Args:
      base: [..., D, F], an array that trains, or another kernel.
      kind, group: as for ``pack``.

    >>> kernel = Rounded(jnp.array([[0.9], [-7.0]]), "int4", 2)
    >>> kernel.merged().tolist(), jax.grad(lambda k: k.merged().sum())(kernel).base.tolist()
    ([[1.0], [-7.0]], [[1.0], [1.0]])
    """

    base: Any
    kind: Kind = dataclasses.field(default="int8", metadata={"static": True})
    group: int | None = dataclasses.field(default=None, metadata={"static": True})

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        return {"base": axes}

    def merged(self) -> jax.Array:
        base = merge(self.base)
        fixed = jax.lax.stop_gradient(base)
        # The difference is 0 to the bit, so that the product is with the stored kernel itself.
        return pack(fixed, self.kind, self.group).dense(base.dtype) + (base - fixed)


@dataclasses.dataclass(frozen=True, eq=False)
class NotZero:
    """Which numbers of a weight that is yet to be read are not 0, uint8."""

    weight: Any
    dtype = np.dtype(np.uint8)
    shape = property(lambda self: self.weight.shape)

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        return (np.asarray(self.weight[index]) != 0).astype(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)

    def cut(self, order: LayerOrder) -> "NotZero":
        """Returns them as a :class:`jaxtrain.Stack` cuts them."""
        return NotZero(order.split(self.weight))


@jax.custom_vjp
def _tapped(x: jax.Array, gram_DD: jax.Array) -> jax.Array:
    return x


def _gram(x: jax.Array, dx: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return dx, jnp.matmul(x_ND.T, x_ND, precision="highest")


_tapped.defvjp(lambda x, gram_DD: (x, x), _gram)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Probed:
    """The kernel ``base``, with a part whose gradient is x^T x of its inputs, whatever the loss.

    Args:
      base: [..., D, F].
      gram: float32 [..., D, D] of zeros.
    """

    base: Any
    gram: Any

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        return product(_tapped(x, self.gram), self.base)

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        *lead, inputs, _ = axes
        return {"base": axes, "gram": (*lead, inputs, None)}

    def merged(self) -> jax.Array:
        return merge(self.base)


def grams(
    loss_fn: Callable[..., Any], params: PyTree, paths: Sequence[str], batches: Iterable[PyTree]
) -> dict[str, np.ndarray]:
    """Returns x^T x of the inputs of kernels by path, float64 [..., D, D], summed over batches.

    Args:
      loss_fn: ``(params, batch, rng)`` to a :class:`jaxtrain.WeightedLoss`; its numbers are not
        used, and tokens that its mask leaves out count too. Compiled once for each function.
      params: parameters in natural order.
      paths: of the kernels.
      batches: of the loss.
    """

    shapes = {name: x.shape for name, x in named_leaves(params).items() if name in paths}
    zeros = {name: jnp.zeros((*shape[:-1], shape[-2])) for name, shape in shapes.items()}
    sums = dict.fromkeys(paths, 0.0)
    for batch in batches:
        found = _gradient(loss_fn, zeros, params, batch)
        sums = {name: sums[name] + np.asarray(found[name], np.float64) for name in paths}
    return sums


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def _gradient(loss_fn: Any, stats: dict[str, jax.Array], params: PyTree, batch: PyTree) -> Any:
    probe = lambda name, x: Probed(x, stats[name]) if name in stats else x  # noqa: E731
    return loss_fn(map_named(probe, params), batch, None).total
