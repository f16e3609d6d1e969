"""LayerNorm and RMSNorm in float32, keeping only their input for the backward pass.

What JAX derives by itself keeps three float32 arrays of the size of the input per norm, which in a
bfloat16 step is most of what a block stores.

Shapes: ``...`` any leading dimensions, D features.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.ops.numerics import wide
from jaxtrain.sharding.mesh import platform


def layer_norm(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None, *, eps: float
) -> jax.Array:
    """Returns ``(x - mean) / sqrt(variance + eps) * scale + bias`` over the last axis.

    Ba et al. 2016, https://arxiv.org/abs/1607.06450. Computed in float32, returned in the dtype of
    ``x``. The variance is that of the centred values: E[x^2] - E[x]^2 cancels where the mean is
    large.

    >>> layer_norm(jnp.array([1.0, 3.0]), jnp.ones(2), jnp.ones(2), eps=0.0)
    Array([0., 2.], dtype=float32)
    """
    bias_D = jnp.zeros_like(scale_D) if bias_D is None else bias_D
    return _norm(True, eps, x, scale_D, bias_D)


def rms_norm(x: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
    """Returns ``x / sqrt(mean(x^2) + eps) * scale`` over the last axis.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. Computed in float32, returned in the
    dtype of ``x``.

    >>> rms_norm(jnp.array([3.0, -3.0]), jnp.array([1.0, 2.0]), eps=0.0)
    Array([ 1., -2.], dtype=float32)
    """
    return _norm(False, eps, x, scale_D, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(centred, eps, x, scale_D, bias_D):
    unit, _ = _standardise(centred, eps, x)
    y = unit * scale_D
    return (y if bias_D is None else y + bias_D).astype(x.dtype)


def _standardise(centred, eps, x):
    """The input with mean 0 (if centred) and mean square 1, and what it was multiplied by."""
    x = x.astype(wide(x.dtype))
    x = x - x.mean(axis=-1, keepdims=True) if centred else x
    rate = jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * rate, rate


def _forward(centred, eps, x, scale_D, bias_D):
    return _norm(centred, eps, x, scale_D, bias_D), (x, scale_D, bias_D)


def _backward(centred, eps, saved, d_y):
    x, scale_D, bias_D = saved
    d_y = d_y.astype(wide(x.dtype))
    d_unit = d_y * scale_D
    means = _means_in_one_pass if platform() == "gpu" else _means
    unit, rate, along, level = means(centred, eps, x, d_unit)
    d_x = d_unit - unit * along
    d_x = d_x - level if centred else d_x
    rows = tuple(range(x.ndim - 1))
    d_scale = (d_y * unit).sum(axis=rows).astype(scale_D.dtype)
    d_bias = None if bias_D is None else d_y.sum(axis=rows).astype(bias_D.dtype)
    return (rate * d_x).astype(x.dtype), d_scale, d_bias


def _means(centred, eps, x, d_unit):
    """The standardised input, its factor, and the means of ``d_unit * unit`` and ``d_unit``."""
    unit, rate = _standardise(centred, eps, x)
    return unit, rate, *(each.mean(axis=-1, keepdims=True) for each in (d_unit * unit, d_unit))


def _means_in_one_pass(centred, eps, x, d_unit):
    """Does as :func:`_means` where reading an array costs more than computing with it.

    All means are of sums that are taken together, and held apart: XLA would compute them anew in
    every kernel that needs one, and write float32 arrays of the size of the input so that these can
    be added up by columns. Of a row's own values one is near enough to their mean that no digits
    cancel.
    """
    x = x.astype(d_unit.dtype)
    moved = x - x[..., :1] if centred else x
    each = moved, moved * moved, d_unit * moved, d_unit
    means = (a.mean(axis=-1, keepdims=True) for a in each)
    mean, square, product, level = jax.lax.optimization_barrier(tuple(means))
    mean = mean if centred else jnp.zeros_like(mean)
    rate = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + eps)
    return (moved - mean) * rate, rate, rate * (product - mean * level), level


_norm.defvjp(_forward, _backward)
