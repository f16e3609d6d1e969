"""Many low-rank additions to one kernel, of which every row of a batch has its own or none.

Shapes: B rows, C positions of a row, A adapters and none, D inputs, F outputs, R the largest rank;
``...`` leading dimensions, such as layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.linear import Axes, Dora, Kernel, LowRank, Product, merge, norms
from jaxtrain.ops.tiled import wide_einsum
from jaxtrain.tree import PyTree, is_a, map_kind, map_named

Additions = Mapping[str, LowRank | Dora]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RowLowRank:
    """The kernel ``base`` for rows without an adapter, and for others ``base + scale * a @ b`` of
    their own, times a factor of each output where one of the adapters is DoRA's.

    A row's product has the bits that it has in any company; that of a row without an adapter is
    that of ``base`` alone.

    Args:
      base: [..., D, F], an array or another kernel.
      a, b: [..., A, D, R] and [..., A, R, F]; the first adapter is none, and smaller ranks are
        padded with zeros.
      scale: float32 [..., A].
      factor: float32 [..., A, F], DoRA's magnitude by the norm of the sum; None for 1.
      rows: int32 [..., B], the adapter of each row; :func:`choose` puts it there.
    """

    base: Any
    a: jax.Array
    b: jax.Array
    scale: jax.Array
    factor: jax.Array | None
    rows: jax.Array | None = None

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        y = product(x, self.base)
        return jax.lax.cond((self.rows > 0).any(), self._added, lambda x, y: y, x, y)

    def _added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        x_BCD = x.reshape(len(self.rows), -1, x.shape[-1])
        y_BCF = y.reshape(*x_BCD.shape[:2], -1)
        has_B11 = (self.rows > 0)[:, None, None]
        low_BCR = wide_einsum("bcd,bdr->bcr", x_BCD, self.a[self.rows].astype(x.dtype))
        low_BCR = (low_BCR * self.scale[self.rows][:, None, None]).astype(self.b.dtype)
        own_BCF = y_BCF + wide_einsum("bcr,brf->bcf", low_BCR, self.b[self.rows]).astype(y.dtype)
        if self.factor is not None:
            own_BCF = (own_BCF * self.factor[self.rows][:, None]).astype(y.dtype)
        return jnp.where(has_B11, own_BCF, y_BCF).reshape(y.shape)

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        *lead, inputs, outputs = axes
        parts = {"base": axes, "a": (*lead, None, inputs, None), "b": (*lead, None, None, outputs)}
        parts["scale"] = (*lead, None)
        return parts if self.factor is None else parts | {"factor": (*lead, None, outputs)}

    def merged(self) -> jax.Array:
        """Returns the base, which all rows have in common."""
        return merge(self.base)


def with_adapters(params: PyTree, adapters: Mapping[str, Additions]) -> PyTree:
    """Puts :class:`RowLowRank` kernels, whose own parts lie on the host, in the place of those that
    any of the adapters adds to.

    Args:
      adapters: kernels by path and by the adapter's name; their own ``base`` is not read.

    Raises:
      ValueError: an adapter's kernel has no place in the parameters, or is of other sizes.
    """
    left = {name: dict(kernels) for name, kernels in adapters.items()}

    def place(path: str, base: Any) -> Any:
        found = [kernels.pop(path, None) for kernels in left.values()]
        if not any(found):
            return base
        shape = jax.eval_shape(merge, base).shape
        for name, kernel in zip(left, found, strict=True):
            low = getattr(kernel, "low", kernel)
            if low and (low.a.shape[-2], low.b.shape[-1]) != shape[-2:]:
                raise ValueError(
                    f"adapter {name!r} adds {low.a.shape[-2]} x {low.b.shape[-1]} to "
                    f"{path!r}, which is {shape[-2]} x {shape[-1]}: it was trained over "
                    "another model"
                )
        return _stacked(base, shape, found)

    # Kernels such as packed ones are leaves here, as arrays are.
    params = map_named(place, params, is_leaf=is_a(Kernel))
    for name, kernels in left.items():
        if kernels:
            raise ValueError(
                f"adapter {name!r} adds to {next(iter(kernels))!r}, which the model lacks: it was "
                "trained over another model"
            )
    return params


def _stacked(base: Any, shape: Sequence[int], found: Sequence[LowRank | Dora | None]) -> RowLowRank:
    """The kernel of a base [..., D, F] with the additions of all adapters that have some."""
    *lead, D, F = shape
    lows = [getattr(kernel, "low", kernel) for kernel in found]
    R = max(low.a.shape[-1] for low in lows if low)
    lead = (*lead, 1 + len(lows))
    a, b = np.zeros((*lead, D, R), np.float32), np.zeros((*lead, R, F), np.float32)
    scale, factor = np.ones(lead, np.float32), np.ones((*lead, F), np.float32)
    for at, (low, kernel) in enumerate(zip(lows, found, strict=True), start=1):
        if low is None:
            continue
        rank = low.a.shape[-1]
        a[..., at, :, :rank], b[..., at, :rank, :] = low.a, low.b
        scale[..., at] = low.strength
        if isinstance(kernel, Dora):
            whole = dataclasses.replace(low, base=base, a=jnp.asarray(low.a), b=jnp.asarray(low.b))
            factor[..., at, :] = kernel.magnitude / norms(whole.merged())
    dtype = jax.eval_shape(merge, base).dtype
    has_dora = any(isinstance(kernel, Dora) for kernel in found)
    return RowLowRank(base, a.astype(dtype), b.astype(dtype), scale, factor if has_dora else None)


def choose(params: PyTree, rows_B: jax.Array) -> PyTree:
    """Gives every row its adapter, by number from 1; 0 is none."""

    def chosen(kernel: RowLowRank) -> RowLowRank:
        lead = kernel.scale.shape[:-1]
        return dataclasses.replace(kernel, rows=jnp.broadcast_to(rows_B, (*lead, len(rows_B))))

    return map_kind(RowLowRank, chosen, params)
