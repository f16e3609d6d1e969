"""Products of scaled 8-bit and 4-bit operands: the recipes of low-precision training.

A dense layer multiplies three times: y = x w, dx = dy w^T and dw = x^T dy. A :class:`Recipe` says
how the operands of each are rounded; sums are float32. Rounded operands of 8 bits with a scale per
tensor or per row go into one product of that dtype, which GPUs of the H100's generation and TPUs of
v6e's and later compute as such. Scales of blocks are multiplied in first: what a chip with such
products computes, emulated to the bit of its operands.

| recipe | operands | scale | dw |
|---|---|---|---|
| fp8 | e4m3 | a row: a token, an output, an input | in the compute dtype |
| fp8_tensor | e4m3, dy e5m2 | the whole tensor | as the others |
| mxfp8 | e4m3 | a power of 2 for every 32 along the sum | as the others |
| nvfp4 | e2m1 | e4m3 for every 16 (of weights 16 x 16) | of operands that are transformed |

fp8 is that of torchao's ``rowwise_with_gw_hp``: every row is rounded by itself, so that no layout
and no accumulation changes it. fp8_tensor has the formats of Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433, with the scales of the present step; mxfp8 those of Mishra et al.
2025, https://arxiv.org/abs/2506.08027; nvfp4 is that of https://arxiv.org/abs/2509.25149, which
rounds dy stochastically. A scale of a tensor is that of the whole on every mesh; with accumulation
and pipelines it is that of a microbatch.

A kernel may count what rounding loses. Its counts are the gradient of a parameter that is 0, so
they are summed like any gradient, over microbatches, devices and stages, and cost no other pass.

Shapes: N tokens, D inputs, F outputs; of an operand M rows and K terms of the sum; of counts the 3
operands x, w and dy, and C of each: saturated, flushed and all.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.linear import Product
from jaxtrain.sharding.mesh import platform
from jaxtrain.sharding.placement import manual_batch_axes
from jaxtrain.sharding.stack import LayerOrder, Stack
from jaxtrain.tree import COUNTS, SEPARATOR, PyTree, Unnamed

E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
# The least number that XLA does not take for 0.
LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)
# What is counted, of which operands.
LOST, OPERANDS = ("saturated", "flushed"), ("activations", "weights", "gradients")


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How one operand [M, K] of a product is rounded.

    Args:
      dtype: of the values.
      scale: what shares a scale: "tensor", "row" [1, K], or "block", of ``block`` terms.
      block: terms along K; 1 for another scale.
      square: a block has as many rows as terms.
      stochastic: round up as often as the value is near; by the place and the scale of the block,
        and no key, so that a step repeats its bits.
      transformed: multiply blocks by a Hadamard matrix first. Both operands of a product are, which
        cancels out.
    """

    dtype: Any
    scale: Literal["tensor", "row", "block"]
    block: int = 1
    square: bool = False
    stochastic: bool = False
    transformed: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The roundings of both operands of each product; None leaves one in its own dtype.

    Args:
      y: those of x and w.
      dx: those of dy and w.
      dw: those of x and dy.
    """

    y: tuple[Rounding, Rounding]
    dx: tuple[Rounding, Rounding]
    dw: tuple[Rounding, Rounding] | None


def _recipes() -> dict[str, Recipe]:
    row, tensor, grads = (
        Rounding(*of) for of in ((E4M3, "row"), (E4M3, "tensor"), (E5M2, "tensor"))
    )
    mx = Rounding(E4M3, "block", 32)
    nv = functools.partial(Rounding, E2M1, "block", 16)
    x, w, dy = nv(), nv(square=True), nv(stochastic=True)
    turned = nv(transformed=True), nv(transformed=True, stochastic=True)
    return {
        "fp8": Recipe((row, row), (row, row), None),
        "fp8_tensor": Recipe((tensor, tensor), (grads, tensor), (tensor, grads)),
        "mxfp8": Recipe((mx, mx), (mx, mx), (mx, mx)),
        "nvfp4": Recipe((x, w), (dy, w), turned),
    }


RECIPES: Mapping[str, Recipe] = _recipes()


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Scaled:
    """The kernel ``base``, an array [..., D, F] or another kernel, multiplied by a recipe.

    The base has the path of the whole: to whatever goes by paths a parameter is what it was.

    Args:
      rounding_counts: zeros [..., 3, C], whose gradient counts what rounding loses
        (:func:`lost`); None counts nothing.
    """

    base: Any
    recipe: str
    rounding_counts: Any = None

    def tree_flatten_with_keys(self):
        counts = jax.tree_util.GetAttrKey(COUNTS), self.rounding_counts
        return ((Unnamed(), self.base), counts), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe, children):
        return cls(children[0], recipe, children[1])

    def multiply(self, x: jax.Array, product: Product) -> jax.Array:
        """Returns ``x @ base`` in the dtype of x, in place of the ``product`` of dense layers."""
        if self.rounding_counts is None:
            return scaled_product(self.recipe, x, self.base)
        return _counted_product(self.recipe, x, self.base, self.rounding_counts)

    def axes(self, axes: Any) -> Mapping[str, Any]:
        return {"base": axes}

    def merged(self) -> jax.Array:
        return self.base


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_product(recipe: str, x_ND: jax.Array, w_DF: jax.Array) -> jax.Array:
    """Returns x @ w by a recipe of :data:`RECIPES`, in the dtype of x, and so its derivatives; N
    may be several dimensions, such as rows and positions."""
    return _product(x_ND, w_DF.T, *RECIPES[recipe].y, x_ND.dtype)


def _forward(recipe: str, x_ND: jax.Array, w_DF: jax.Array):
    return scaled_product(recipe, x_ND, w_DF), (x_ND, w_DF)


def _backward(recipe: str, kept: tuple[jax.Array, jax.Array], dy_NF: jax.Array):
    (x_ND, w_DF), of = kept, RECIPES[recipe]
    dx_ND = _product(dy_NF, w_DF, *of.dx, x_ND.dtype)
    if of.dw is not None and of.dw[0].scale != "tensor":
        x_DN, dy_FN = (a.reshape(-1, a.shape[-1]).T for a in (x_ND, dy_NF))
        return dx_ND, _product(x_DN, dy_FN, *of.dw, w_DF.dtype)
    scale = 1.0, 1.0
    if of.dw is not None:
        (x_ND, x_scale), (dy_NF, dy_scale) = map(rounded, (x_ND, dy_NF), of.dw)
        scale = x_scale.reshape(()), dy_scale.reshape(())
    rows = tuple(range(x_ND.ndim - 1))
    dw_DF = _dot(x_ND, dy_NF, (rows, rows), w_DF.dtype)
    # One after the other, because XLA takes a product of two scales below 2^-126 for 0.
    return dx_ND, (dw_DF * scale[0] * scale[1]).astype(w_DF.dtype)


scaled_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _counted_product(recipe: str, x_ND: jax.Array, w_DF: jax.Array, _: jax.Array) -> jax.Array:
    return scaled_product(recipe, x_ND, w_DF)


def _counted_backward(recipe: str, kept: tuple[jax.Array, jax.Array], dy_NF: jax.Array):
    (x_ND, w_DF), of = kept, RECIPES[recipe]
    operands = (x_ND, of.y[0]), (w_DF.T, of.y[1]), (dy_NF, of.dx[0])
    return *_backward(recipe, kept, dy_NF), jnp.stack([lost(*each) for each in operands])


_counted_product.defvjp(lambda recipe, x, w, _: _forward(recipe, x, w), _counted_backward)


def lost(x_MK: jax.Array, how: Rounding) -> jax.Array:
    """Counts what rounding an operand loses, float32 [3], exact below 2^24.

    Returns:
      How many values saturate (they lie half a step or more beyond the largest number), how many
      are flushed to 0 and were not, and how many there are.
    """
    values, _, units, given = _rounded(x_MK, how)
    top, info = _most(how.dtype), jnp.finfo(how.dtype)
    beyond = top + 2.0 ** (math.floor(math.log2(top)) - info.nmant - 1)
    zero, lead = values == 0, range(values.ndim - 1)
    over, was = (a.reshape(zero.shape) for a in (jnp.abs(units) >= beyond, given != 0))
    # A sum of float32 ones, one after the other, stays at 2^24; int32 does not hold all of a batch.
    each = (a.sum(tuple(lead), jnp.int32) for a in (over & ~zero, was & zero))
    return jnp.stack([*(n_K.astype(jnp.float32).sum() for n_K in each), jnp.float32(x_MK.size)])


def shares_lost(counts: Mapping[str, jax.Array], stack: Stack | None) -> dict[str, jax.Array]:
    """Returns metrics made of counts by path: ``saturated/activations/blocks`` [layers] and so on.

    Each is the share of the values of a layer's kernels that one kind of operand loses so, the
    layers in natural order; of a kernel outside of stacks it is a number under its own path.
    """
    sums: dict[str, jax.Array] = {}
    for name, found in counts.items():
        own = name.removesuffix(f"{SEPARATOR}{COUNTS}")
        part = next((p for p in stack.parts if p.holds(name)), None) if stack else None
        if part is not None:
            own = part.key
            found = LayerOrder(tuple(found.shape[: part.lead]), part.places).join(found)
            found = found.reshape(len(found), -1, *found.shape[-2:]).sum(1)  # one may hold several
        sums[own] = sums.get(own, 0) + found
    return {
        f"{kind}/{operand}/{name}": found[..., k, c] / jnp.maximum(found[..., k, 2], 1)
        for c, kind in enumerate(LOST)
        for k, operand in enumerate(OPERANDS)
        for name, found in sums.items()
    }


def uncounted(params: PyTree) -> PyTree:
    """Returns parameters with their kernels in the place of those that count."""
    is_counted = lambda x: isinstance(x, Scaled) and x.rounding_counts is not None  # noqa: E731
    return jax.tree.map(lambda x: x.base if is_counted(x) else x, params, is_leaf=is_counted)


def _product(
    a_MK: jax.Array, b_LK: jax.Array, of_a: Rounding, of_b: Rounding, dtype: Any
) -> jax.Array:
    """Returns a @ b^T [M, L] of rounded operands."""
    (a_MK, a_M1), (b_LK, b_L1) = rounded(a_MK, of_a), rounded(b_LK, of_b)
    y_ML = _dot(a_MK, b_LK, ((a_MK.ndim - 1,), (1,)), dtype)
    return (y_ML * a_M1 * b_L1.T).astype(dtype)


def _dot(a: jax.Array, b: jax.Array, over: tuple[Sequence[int], Sequence[int]], dtype: Any):
    """The product before it is scaled, summed in float32: on a GPU in the dtype that it is for, as
    a float32 array would be written and read once more; not in float16, where it overflows."""
    wide = dtype if platform() == "gpu" and dtype != jnp.float16 else jnp.float32
    return jax.lax.dot_general(a, b, (over, ((), ())), preferred_element_type=wide)


def rounded(x_MK: jax.Array, how: Rounding) -> tuple[jax.Array, jax.Array]:
    """Rounds an operand of a product.

    Returns:
      Values [M, K], of which K is filled up with zeros to whole blocks, and float32 scales [M, 1]
      or [1, 1] by which they are to be multiplied. Values are of the rounding's dtype, or, of
      blocks, of one that holds them times the scale of their block.
    """
    return _rounded(x_MK, how)[:2]


def _rounded(x_MK: jax.Array, how: Rounding) -> tuple[jax.Array, ...]:
    """As :func:`rounded`, and the values before: in units of their scale, and as they came."""
    if how.scale == "block":
        return _rounded_blocks(x_MK, how)
    x_MK = x_MK.astype(jnp.float32)
    scale = _scale(_largest(x_MK, -1 if how.scale == "row" else None), how.dtype)
    return _cast(units := x_MK / scale, how.dtype), scale, units, x_MK


def _rounded_blocks(x_MK: jax.Array, how: Rounding) -> tuple[jax.Array, ...]:
    (*lead, K), size = x_MK.shape, how.block
    x_MK = jnp.pad(x_MK, (*((0, 0) for _ in lead), (0, -K % size)))
    x_MJj = x_MK.reshape(*lead, -1, size)
    if how.transformed:  # by signs over 4, which are exact in any dtype
        turn = jnp.asarray(_hadamard(size), x_MK.dtype)
        x_MJj = jnp.matmul(x_MJj, turn, preferred_element_type=jnp.float32)
    x_MJj = x_MJj.astype(jnp.float32)
    largest_MJ = jnp.abs(x_MJj).max(-1, keepdims=True)
    if how.square:
        (M,), J = lead, largest_MJ.shape[1]
        of_rows = jnp.pad(largest_MJ, ((0, -M % size), (0, 0), (0, 0))).reshape(-1, size, J, 1)
        largest_MJ = jnp.repeat(of_rows.max(1), size, 0)[:M]
    if how.dtype == E4M3:
        outer = jnp.ones((1,) * len(x_MK.shape))
        scale_MJ = _power_of_2(largest_MJ, how.dtype)
    else:  # scales of blocks are e4m3 times that of the tensor, which uses all of its range
        # Even the least e4m3 number times this is a scale that XLA does not take for 0.
        least = LEAST_SCALE / float(jnp.finfo(E4M3).smallest_subnormal)
        outer = _scale(_largest(x_MJj.reshape(x_MK.shape)), how.dtype, _most(E4M3), least)
        scale_MJ = _cast(largest_MJ / _most(how.dtype) / outer[..., None], E4M3)
        scale_MJ = scale_MJ.astype(jnp.float32)
    given = x_MJj / jnp.where(scale_MJ == 0, 1, scale_MJ * outer[..., None])
    if how.dtype == E2M1:
        units = _e2m1(given, _uniform(given.shape, scale_MJ) if how.stochastic else None)
    else:
        units = _cast(given, how.dtype).astype(jnp.float32)
    # Four significant bits at most times four of a scale: bfloat16 holds them.
    values_MK = (units * scale_MJ).reshape(x_MK.shape).astype(jnp.bfloat16)
    return values_MK, outer, given, x_MJj


def _largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude [M, 1] or [1, 1]; of the whole where rows are split by hand."""
    found = jnp.abs(x).max(axis, keepdims=True)
    axes = manual_batch_axes() if axis is None else ()
    return jax.lax.pmax(found, axes) if axes else found


def _most(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)


def _scale(
    largest: jax.Array, dtype: Any, times: float = 1.0, least: float = LEAST_SCALE
) -> jax.Array:
    """The scale by which the largest magnitude becomes the largest number, and not below ``least``,
    because XLA takes a scale below 2^-126 for 0, and 0 / 0 is NaN."""
    return jnp.maximum(largest / (_most(dtype) * times), least)


def _power_of_2(largest: jax.Array, dtype: Any) -> jax.Array:
    """The least power of 2, within e8m0's range, by which nothing exceeds the largest number."""
    # Without a quotient, because XLA takes one below 2^-126 for 0.
    top_mantissa, top_exponent = math.frexp(_most(dtype))
    mantissa, exponent = jnp.frexp(largest)
    exponent = jnp.clip(exponent - top_exponent + (mantissa > top_mantissa), -126, 127)
    power = jnp.where(largest == 0, 1, jnp.ldexp(jnp.ones_like(largest), exponent))
    return jnp.where(jnp.isfinite(largest), power, jnp.nan)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds to the nearest, to the largest number where that is less."""
    return jnp.clip(x, -_most(dtype), _most(dtype)).astype(dtype)


def _e2m1(x: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
    """Rounds to the nearest of 0, 1/2, 1, 3/2, 2, 3, 4 and 6, or with numbers that are uniform in
    [0, 1) up as often as it is near; float32, for XLA's CPU compiler may round to float4 twice."""
    x = jnp.clip(x, -6, 6)
    step = jnp.select([jnp.abs(x) < 2, jnp.abs(x) < 4], [0.5, 1.0], 2.0)
    return (jnp.round(x / step) if uniform is None else jnp.floor(x / step + uniform)) * step


def _uniform(shape: tuple[int, ...], scale: jax.Array) -> jax.Array:
    """Numbers uniform in [0, 1), by their place and a scale: float32 of that shape."""
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    scale = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)
    bits += scale * jnp.uint32(0x9E3779B9)
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (1, 16)):  # MurmurHash3's end
        bits = (bits ^ (bits >> shift)) * jnp.uint32(multiplier)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


@functools.lru_cache
def _hadamard(size: int) -> np.ndarray:
    """A Hadamard matrix [size, size], orthogonal, of rows with signs drawn once and for all."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size)
    return signs[:, None] * matrix / np.sqrt(size)
