"""Differentially private gradients: of every example clipped, summed, and noise added once.

The gradient of a step is (sum_i min(1, C / |g_i|) g_i + C w) / E over the examples i that it has
drawn, where g_i is the gradient of the mean loss of row i alone, C the clip, and E the number of
examples that a step draws on average, which depends on no data (DP-SGD, Abadi et al. 2016,
https://arxiv.org/abs/1607.00133). The noise w is normal and independent in every step, or
correlated over ``bands`` steps (DP-FTRL): it solves M w = z, where M is the banded Toeplitz matrix
of the first coefficients of the square root of the prefix sum, with columns of norm 1 (Kalinin and
Lampert 2024, https://arxiv.org/abs/2405.13763).

A loss is computed row by row under ``jax.vmap``, whatever it is: a device keeps the gradients of
all its rows of a microbatch, except those that :mod:`jaxtrain.engines.by_example` has as vectors.
Noise is added behind the sum over devices, by a key of the step.

Shapes: N rows of a batch.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.engines.accumulated import split_microbatches
from jaxtrain.engines.by_example import gradients, is_outer, squared_norm, weighted_sum
from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, trainable
from jaxtrain.loss import LossFn, Reduction, Sum, WeightedLoss
from jaxtrain.sharding.placement import apart_along, free_axes, manual_batch_axes
from jaxtrain.tree import PyTree, all_finite, combine, map_named, to_accum_dtype

# The leaf [N] of a batch that numbers its examples from 1; 0 is a row that pads it.
DRAWN = "drawn"
MEND = "use a norm of each example, such as GroupNorm, and bf16 in place of fp16"


def private(clip: float, noise: float, examples: float, *, bands: int = 1) -> Engine:
    """Returns the engine for ``build_train_step(engine=)``.

    A batch that is a mapping may have ``drawn``, int32 [N]: the number of the example that a row
    holds, from 1, by which its loss draws, and 0 for padding, which counts nothing whatever it
    holds. An example whose gradient or loss is not finite counts nothing too, and no step is left
    out, whatever the loss of all is. Metrics are of the examples that a step has drawn, and are not
    private.

    Args:
      clip: C, the largest norm of an example's gradient; ``math.inf`` clips none.
      noise: standard deviation of the noise in units of ``clip``.
      examples: E, the number of examples that a step draws on average.
      bands: number of steps over which noise is correlated, and within which no example may be
        drawn twice. Above 1, ``init_state(memory=engine.init)`` keeps the last noise.

    Raises:
      ValueError: a number is out of range; when the step is traced, the model has state, or the
        loss a scale.
    """
    check_numbers(clip, noise, examples=examples, bands=bands)
    first, *rest = square_root(bands)

    def add_noise(sums: GradientSums, rng: jax.Array, memory: PyTree) -> GradientSums:
        def solved(*given: jax.Array) -> jax.Array:
            *earlier, z = given
            past = sum(c * w for c, w in zip(rest, earlier, strict=True))
            return past if z is None else (z - past) / first  # None of what does not train

        grads = sums.grads
        if noise:
            now = white_noise(rng, grads, noise)
            if memory is not None:
                memory = [jax.tree.map(solved, *memory, now), *memory[:-1]]
                now = memory[0]
            grads = jax.tree.map(lambda w, g: g if g is None else g + clip * w, now, grads)
        loss = _of_weight(sums.loss, examples)
        return dataclasses.replace(sums, grads=grads, loss=loss, memory=memory, private=True)

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable(params)[0])
        return [zeros] * (bands - 1)

    def private_gradients(loss_fn: LossFn, microbatches: int) -> GradientEngine:
        return _clipped(loss_fn, microbatches, clip)

    how = {"init": init if bands > 1 else None, "finish": add_noise}
    return Engine(private_gradients, row_wise=True, accumulates=True, by_row=True, **how)


def check_numbers(clip: float, noise: float, **counts: float) -> None:
    """Raises ValueError for a clip, a noise in units of it, or counts that give no guarantee."""
    finite = clip < math.inf or noise == 0
    if not (clip > 0 and 0 <= noise < math.inf and finite and min(counts.values()) > 0):
        told = "".join(f", `{name}` {count}" for name, count in counts.items())
        raise ValueError(
            f"`clip` is {clip}, `noise` {noise}{told}: give numbers above 0, and noise with a "
            "finite clip alone"
        )


def white_noise(rng: jax.Array, like: PyTree, deviation: float) -> PyTree:
    """Returns normal noise in the shapes of a tree: a leaf's is a function of the key, which is
    that of one step, and of its path, on every mesh."""

    def white(name: str, x: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(rng, 0), zlib.crc32(name.encode()))
        return deviation * jax.random.normal(own, x.shape, x.dtype)

    return map_named(white, like)


def square_root(bands: int) -> np.ndarray:
    """Returns the coefficients of the matrix of ``bands`` bands, of norm 1.

    >>> square_root(3).round(4).tolist()
    [0.848, 0.424, 0.318]
    """
    k = np.arange(1, bands)
    r = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    return r / np.linalg.norm(r)


def _clipped(loss_fn: LossFn, microbatches: int, clip: float) -> GradientEngine:
    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        if model_state is not None or loss_scale is not None:
            what = "the model has state (BatchNorm)" if loss_scale is None else "the loss is scaled"
            raise ValueError(f"{what}, which is of several examples, and no noise hides it; {MEND}")
        training, rest = trainable(params, frozen)
        numbers_N, rows = numbered(batch)
        axes = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, rows)

        def mean(training: PyTree, row: PyTree, number: jax.Array) -> tuple[jax.Array, Any]:
            # A row counts its own from 0, wherever its device stands.
            with apart_along(*manual_batch_axes()):
                key = jax.random.fold_in(rng, number)
                loss, _ = loss_fn(combine(training, rest), None, row, key)
            weight = jax.lax.stop_gradient(loss.weight)
            return loss.total / jnp.where(weight == 0, 1, weight), to_accum_dtype(loss)

        def one(row: PyTree, number: jax.Array) -> tuple[PyTree, jax.Array, WeightedLoss]:
            row = jax.tree.map(lambda x, axis: x if axis is None else x[None], row, axes)
            grads, loss = gradients(mean, training, row, number)
            grads = to_accum_dtype(grads)
            leaves = jax.tree.leaves(grads, is_leaf=is_outer)
            norm = jnp.sqrt(sum(map(squared_norm, leaves)))
            usable = (number > 0) & all_finite((norm, loss.total, loss.weight))
            factor = jnp.minimum(1.0, clip / jnp.where(norm > 0, norm, 1.0))
            # A padded row may hold anything, and 0 times NaN is NaN.
            grads = jax.tree.map(lambda g: jnp.where(usable, g, 0), grads)
            told = {"clipped": (usable & (norm > clip), usable), "examples": Sum(usable)}
            told["not_finite"] = Sum((number > 0) & ~usable)
            told = jax.tree.map(jnp.float32, told)
            loss = jax.tree.map(lambda x: jnp.where(usable, x, 0), loss)
            factor = jnp.where(usable, factor, 0)
            return grads, factor, dataclasses.replace(loss, metrics=dict(loss.metrics) | told)

        def part(numbers_N: jax.Array, rows: PyTree) -> GradientSums:
            grads, factor_N, losses_N = jax.vmap(one, (axes, 0))(rows, numbers_N)
            zero = jax.tree.map(lambda x: jnp.zeros_like(x[0]), losses_N)
            loss, _ = jax.lax.scan(lambda total, x: (total + x, None), zero, losses_N)
            weighted = functools.partial(weighted_sum, factor_N=factor_N)
            grads = jax.tree.map(weighted, grads, is_leaf=is_outer)
            return GradientSums(grads, loss, None, microbatches)

        if microbatches == 1:
            return part(numbers_N, rows)
        cut = split_microbatches((numbers_N, rows), microbatches)
        # Where no device waits for others, padding fills microbatches of its own, and they are not
        # computed.
        alone = not free_axes(jax.sharding.get_abstract_mesh())
        if alone:
            in_order = lambda x, y: y.reshape(x.shape) if jnp.ndim(y) else x  # noqa: E731
            cut = jax.tree.map(in_order, cut, (numbers_N, rows))
        shapes = jax.eval_shape(part, *jax.tree.map(lambda x: x[0], cut))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(sums: GradientSums, given: tuple) -> tuple[GradientSums, None]:
            one_of = functools.partial(jax.lax.cond, (given[0] > 0).any())
            found = one_of(part, lambda *_: zeros, *given) if alone else part(*given)
            grads = jax.tree.map(jnp.add, sums.grads, found.grads)
            return dataclasses.replace(sums, grads=grads, loss=sums.loss + found.loss), None

        return jax.lax.scan(add, zeros, cut)[0]

    return engine


def numbered(batch: PyTree) -> tuple[jax.Array, PyTree]:
    """Returns the numbers of the examples of a batch, and what a loss is given of it."""
    batch = jax.tree.map(jnp.asarray, batch)
    if isinstance(batch, dict) and DRAWN in batch:
        return batch[DRAWN], {name: x for name, x in batch.items() if name != DRAWN}
    rows = max(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
    return jnp.arange(1, rows + 1), batch


def _of_weight(loss: WeightedLoss, examples: float) -> WeightedLoss:
    """Returns the same means with a weight that is constant, by which the step divides."""
    share = jnp.where(loss.weight == 0, 0.0, examples / jnp.where(loss.weight == 0, 1, loss.weight))
    own = {n: x for n, x in loss.metrics.items() if isinstance(x, tuple | Reduction)}
    metrics = {n: x * share for n, x in loss.metrics.items() if n not in own} | own
    return WeightedLoss(loss.total * share, jnp.asarray(examples, loss.total.dtype), metrics)
