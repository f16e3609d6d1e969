"""Kernels of 4 and 8 bits, which become floating-point numbers wherever they are multiplied.

NF4 is that of Dettmers et al. 2023 (QLoRA, https://arxiv.org/abs/2305.14314), with the codes and
scales of bitsandbytes; int8 and int4 are rounded, symmetric about 0.

Shapes: D inputs, F outputs, g inputs that share a scale, G = D / g; ``...`` leading dimensions,
such as layers.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.linear import Axes, Product
from jaxtrain.sharding.rules import PartAxes
from jaxtrain.sharding.stack import LayerOrder

Kind = Literal["nf4", "nf4-double", "int8", "int4"]
# Scales that share one of the second quantization.
NESTED = 256
# The least number that XLA does not take for 0.
TINY = np.finfo(np.float32).tiny
# The quantiles of a normal distribution that bitsandbytes has, float32 to the last bit.
# fmt: off
NF4 = np.float32([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])
# fmt: on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A kernel [..., D, F] of codes and scales; no part of it is a floating-point number, so none
    has a gradient, and no policy rounds one.

    A product makes the kernel dense, in the dtype of what is multiplied, and again for the
    gradient: nothing dense is kept in between.

    Args:
      codes: uint8 [..., D / 2, F], of two inputs the first in the high bits; of int8 [..., D, F].
      scale: the bits of float32 [..., G, F], as uint32; of nf4-double uint8, which ``nested`` maps.
      nested: of nf4-double, the bits of float32 [..., 1 + F G / 256]: the mean of all scales, and
        the largest distance from it of every 256, counted along G first.
      kind: a :data:`Kind`.

    >>> kernel = pack(jnp.linspace(-1, 1, 128).reshape(64, 2), "int8")
    >>> kernel.shape, kernel.codes.dtype, bool(abs(kernel.merged()[0, 0] + 1) < 0.01)
    ((64, 2), dtype('int8'), True)
    """

    codes: Any
    scale: Any
    nested: Any = None
    kind: Kind = dataclasses.field(default="nf4", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel, [..., D, F]."""
        *lead, rows, F = self.codes.shape
        return (*lead, rows * _per_byte(self.kind), F)

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32

        # Kept apart by the barrier: what prevents it by default takes copies of its own.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def multiplied(x: jax.Array, kernel: Packed) -> jax.Array:
            # Tied to x: XLA takes what is the same in every pass of a loop (over microbatches) out
            # of it, and would keep the dense kernels of all layers.
            x, kernel = jax.lax.optimization_barrier((x, kernel))
            return product(x, kernel.dense(dtype))

        return multiplied(x, self)

    def axes(self, axes: Axes) -> Mapping[str, Axes]:
        *lead, _, outputs = axes
        # Groups of inputs lie where their codes do; one for all inputs has no such place.
        one = self.scale.shape[-2] == 1
        parts = {"codes": axes, "scale": PartAxes((*lead, None, outputs)) if one else axes}
        return parts if self.nested is None else parts | {"nested": (*lead, None)}

    def merged(self) -> jax.Array:
        return self.dense(jnp.float32)

    def dense(self, dtype: Any) -> jax.Array:
        """Returns the array [..., D, F], multiplied in float32 and then rounded."""
        codes, scale = self.codes, self._scale()
        if _per_byte(self.kind) == 2:
            codes = jnp.stack([codes >> 4, codes & 15], axis=-2).reshape(self.shape)
        if self.kind.startswith("int"):
            values = codes.astype(jnp.float32) - (8 if self.kind == "int4" else 0)
        else:
            values = jnp.asarray(NF4)[codes]
        *lead, G, F = scale.shape
        blocks = values.reshape(*lead, G, -1, F) * scale[..., None, :]
        return blocks.reshape(self.shape).astype(dtype)

    def _scale(self) -> jax.Array:
        if self.nested is None:
            return _floats(self.scale)
        nested, (*lead, G, F) = _floats(self.nested), self.scale.shape
        inner = jnp.asarray(_dynamic_map())[self.scale]
        outer = jnp.repeat(nested[..., 1:], NESTED, axis=-1)[..., : F * G]
        outer = outer.reshape(*lead, F, G).swapaxes(-1, -2)
        return inner * outer + nested[..., :1, None]


def pack(kernel: Any, kind: Kind, group: int | None = None, *, scale: Any = None) -> Packed:
    """Quantizes a kernel; of the same float32 numbers NumPy and JAX make the same codes.

    Scales of int4 and int8 are the nearest in bfloat16: files of 16 bits hold them, and what a
    packed kernel stands for has the same codes and scales again.

    Args:
      kernel: [..., D, F]: a JAX array or one of NumPy, of which the parts then are too.
      kind: a :data:`Kind`.
      group: g, inputs that share a scale; None means 64, and all of them for int8.
      scale: [..., G, F] of int4 or int8; None means those of the largest numbers.

    Raises:
      ValueError: g does not divide D, or is odd where two inputs share a byte.
    """
    group = _group(kernel.shape, kind, group)
    part = functools.partial(_part, kernel=kernel, kind=kind, group=group, scale=scale)
    return Packed(**{name: part(name) for name in _names(kind)}, kind=kind)


def pack_later(weight: Any, kind: Kind, group: int | None = None) -> Packed:
    """Quantizes a weight that is yet to be read: the parts are read and made slice by slice, one
    layer at a time. Where the file has codes and scales of this kind and group, it has those.

    Args:
      weight: [..., D, F], with a shape and slices, such as a :class:`jaxtrain.hf.table.Weight`.
      kind, group: as for :func:`pack`.

    Returns:
      A kernel for ``init_state(params=)``.
    """
    group = _group(weight.shape, kind, group)
    scales = weight.scales(kind) if hasattr(weight, "scales") else None
    if scales is not None and scales.shape[-2] * group != weight.shape[-2]:
        scales = None
    return Packed(**{n: Unread(n, weight, kind, group, scales) for n in _names(kind)}, kind=kind)


@dataclasses.dataclass(frozen=True, eq=False)
class Unread:
    """A part of a packed kernel whose weight is read when the part is asked for."""

    name: str
    weight: Any
    kind: Kind
    group: int
    scales: Any = None

    @property
    def _like(self) -> jax.ShapeDtypeStruct:
        like = jax.ShapeDtypeStruct(self.weight.shape, np.float32)
        return jax.eval_shape(lambda w: _part(self.name, w, self.kind, self.group), like)

    shape = property(lambda self: self._like.shape)
    dtype = property(lambda self: self._like.dtype)

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        lead, like = len(self.weight.shape) - 2, self._like
        index = [slice(*i.indices(n)) for i, n in zip(index, like.shape, strict=True)]
        out = np.empty([i.stop - i.start for i in index], like.dtype)
        inner, read = tuple(index[lead:]), (slice(None), slice(None))
        if self.name == "codes" or self.kind != "nf4-double":
            # Whole groups of the rows that are asked for.
            (rows, columns), unit = inner, self.weight.shape[-2] // like.shape[-2]
            first = rows.start * unit // self.group * self.group
            last = -(-rows.stop * unit // self.group) * self.group
            read = slice(first, last), columns
            inner = slice(rows.start - first // unit, rows.stop - first // unit), slice(None)
        for place in np.ndindex(*out.shape[:lead]):
            at = [slice(i.start + p, i.start + p + 1) for i, p in zip(index, place, strict=False)]
            layer, scale = np.asarray(self.weight[(*at, *read)]), None
            layer = layer.reshape(layer.shape[lead:])
            if self.scales is not None:
                groups = slice(read[0].start // self.group, read[0].stop // self.group)
                scale = self.scales[(*at, groups, read[1])].reshape(-1, layer.shape[-1])
            out[place] = _part(self.name, layer, self.kind, self.group, scale)[inner]
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)

    def cut(self, order: LayerOrder) -> "Unread":
        """Returns the part as a :class:`jaxtrain.Stack` cuts it, of which nothing is read yet."""
        scales = self.scales if self.scales is None else order.split(self.scales)
        return dataclasses.replace(self, weight=order.split(self.weight), scales=scales)


def _per_byte(kind: Kind) -> int:
    return 1 if kind == "int8" else 2


def _names(kind: Kind) -> tuple[str, ...]:
    return ("codes", "scale", "nested") if kind == "nf4-double" else ("codes", "scale")


def _group(shape: Sequence[int], kind: Kind, group: int | None) -> int:
    D, unit = shape[-2], _per_byte(kind)
    group = group or (D if kind == "int8" else 64)
    if D % group or group % unit:
        even = " and is even, or int8" if unit == 2 else ""
        raise ValueError(
            f"a kernel of shape {tuple(shape)} has {D} inputs, of which {kind} shares a scale "
            f"among {group}: give a `group` that divides {D}{even}"
        )
    return group


def _part(name: str, kernel: Any, kind: Kind, group: int, scale: Any = None) -> Any:
    xp: ModuleType = np if isinstance(kernel, np.ndarray) else jnp
    kernel = kernel.astype(np.float32)
    *lead, D, F = kernel.shape
    blocks = kernel.reshape(*lead, D // group, group, F)
    if scale is None:
        scale = xp.abs(blocks).max(-2)
        if kind.startswith("int"):
            scale = scale / np.float32(127 if kind == "int8" else 7)
            # XLA leaves out a conversion to bfloat16 and back.
            narrow = lambda x: x.astype(jnp.bfloat16).astype(np.float32)  # noqa: E731
            scale = narrow(scale) if xp is np else jax.lax.reduce_precision(scale, 8, 7)
    if name == "scale":
        return _bits(scale, xp) if kind != "nf4-double" else _nested(scale, xp)[0]
    if name == "nested":
        return _bits(_nested(scale, xp)[1], xp)
    # The reciprocal, as bitsandbytes takes it: a quotient has other last bits.
    shares = blocks * (np.float32(1) / xp.maximum(scale, TINY))[..., None, :]
    shares = shares.reshape(kernel.shape)
    if kind == "int8":
        return xp.rint(shares).astype(np.int8)
    if kind == "int4":
        codes = (xp.rint(shares) + 8).astype(np.uint8)
    else:  # a number at a midpoint has the lower code
        codes = xp.zeros(kernel.shape, np.uint8)
        for middle in (NF4[:-1] + NF4[1:]) / np.float32(2):
            codes = codes + (shares > middle).astype(np.uint8)
    pairs = codes.reshape(*lead, D // 2, 2, F)
    return (pairs[..., 0, :] << 4) | pairs[..., 1, :]


def _nested(scale: Any, xp: ModuleType) -> tuple[Any, Any]:
    """Codes of scales, uint8 [..., G, F], and the numbers of :attr:`Packed.nested`."""
    *lead, G, F = scale.shape
    flat = scale.swapaxes(-1, -2).reshape(*lead, F * G)
    mean = flat.mean(-1, dtype=np.float32, keepdims=True)
    count = math.ceil(F * G / NESTED)
    padding = [*[(0, 0)] * len(lead), (0, count * NESTED - F * G)]
    blocks = xp.pad(flat - mean, padding).reshape(*lead, count, NESTED)
    outer = xp.abs(blocks).max(-1)
    shares = blocks * (np.float32(1) / xp.maximum(outer, TINY))[..., None]
    table = _dynamic_map()
    codes = xp.searchsorted((table[:-1] + table[1:]) / np.float32(2), shares.reshape(-1))
    codes = codes.astype(np.uint8).reshape(*lead, -1)[..., : F * G].reshape(*lead, F, G)
    return codes.swapaxes(-1, -2), xp.concatenate([mean, outer], axis=-1)


def _dynamic_map() -> np.ndarray:
    """The 256 numbers of which bitsandbytes takes scales, once a mean is subtracted and they are
    divided: as many of every decade as of all below it (Dettmers 2016,
    https://arxiv.org/abs/1511.04561)."""
    numbers = [0.0, 1.0]
    for i in range(7):
        # torch.linspace in float32: from both ends, in one rounding. NumPy's differs from 9 on.
        first, last, count = np.float32(0.1), np.float32(1), 2**i + 1
        step, at = np.float64((last - first) / np.float32(count - 1)), np.arange(count)
        low, high = first + step * at, last - step * (count - 1 - at)
        edges = np.where(at < count // 2, low, high).astype(np.float32)
        means = np.float32(10.0 ** (i - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        numbers += [*means, *-means]
    return np.sort(np.float32(numbers))


def _bits(x: Any, xp: ModuleType) -> Any:
    return x.view(np.uint32) if xp is np else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _floats(bits: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)
