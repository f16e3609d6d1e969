"""Gradients rounded to integers of 8 bits, at random, before they are summed.

What a device sums over its rows in one microbatch is rounded up as often as it is near, so that the
mean over draws is the gradient itself (QSGD, Alistarh et al. 2017, https://arxiv.org/abs/1610.02132).
A row of a weight has a scale. The rounded numbers are summed in float32: this says what 8 bits cost
in quality, and saves no traffic. What is drawn depends on the layout.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, plain
from jaxtrain.loss import LossFn
from jaxtrain.sharding.placement import manual_batch_axes
from jaxtrain.tree import map_named


def rounded(levels: int | None = 127) -> Engine:
    """Returns the engine for ``build_train_step(engine=)``.

    A gradient g of a row whose largest magnitude is m has, after rounding, an error below
    m / levels, of mean 0 and of a variance of at most (m / levels)^2 / 4.

    Args:
      levels: magnitudes besides 0, such as 127 for 8 bits; None rounds nothing and gives the bits
        of :data:`jaxtrain.engines.plain.plain`.

    Raises:
      ValueError: for ``levels`` that 8 bits do not hold.
    """
    if levels is not None and not 1 <= levels <= 127:
        raise ValueError(f"`levels` is {levels}: give 1 to 127, which 8 bits hold, or None")

    def int8(loss_fn: LossFn) -> GradientEngine:
        alone = plain(loss_fn)

        def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
            sums: GradientSums = alone(params, model_state, batch, rng, loss_scale, frozen=frozen)
            if levels is None:
                return sums
            # Devices that share a key would all err alike.
            taken = manual_batch_axes()
            key = jax.random.fold_in(rng, jax.lax.axis_index(taken)) if taken else rng

            def one(name: str, grad: jax.Array) -> jax.Array:
                own = jax.random.fold_in(key, zlib.crc32(name.encode()))
                return stochastic(grad, own, levels)

            return dataclasses.replace(sums, grads=map_named(one, sums.grads))

        return engine

    return Engine(int8, row_wise=True)


def stochastic(x: jax.Array, key: Any, levels: int) -> jax.Array:
    """Rounds to multiples of a row's largest magnitude over ``levels``, whose mean is ``x``; a row
    that is not finite stays so. Rows are along the last axis, of vectors the whole."""
    scale = jnp.abs(x).max(axis=-1 if x.ndim else None, keepdims=True) / levels
    unit = x / jnp.where(scale == 0, 1, scale)
    up = jnp.floor(unit + jax.random.uniform(key, x.shape, x.dtype))
    return jnp.clip(up, -levels, levels).astype(jnp.int8).astype(x.dtype) * scale
