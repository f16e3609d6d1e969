"""The same bits on two devices and any more: gradients of grains, added along one binary tree.

A batch is K grains of M rows, in order, whatever the mesh. One program computes the gradient of a
grain. The grains are the leaves of one binary tree: a device adds its own as a binary counter
carries, with log2(grains of a device) + 1 partial sums in memory, and devices add theirs behind an
exchange with the traffic of a reduce-scatter. Addition of two floating-point numbers commutes, and
the tree is the same on every mesh, so its sum has the same bits. Each device keeps its part of the
sum and updates its part of the state (:mod:`jaxtrain.engines.pieces`). Fences
(``optimization_barrier``) and loops keep the compiler from fusing a grain's gradient with what
surrounds it, which the mesh decides.

A tree of K leaves on n devices needs K / n to be a power of two, or n to be 1. The first leaves
that fill a power of two are one side of it, and the rest is the other.

Shapes: K grains, M rows of a grain.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.decisions import Kind, Why
from jaxtrain.engines.pieces import in_pieces
from jaxtrain.engines.plain import Engine, GradientEngine, GradientSums, plain, trainable
from jaxtrain.loss import LossFn, WeightedLoss
from jaxtrain.ops.grouped import TRIPS
from jaxtrain.sharding.collectives import Shards, tree_sum
from jaxtrain.sharding.mesh import GATHERED_AXES
from jaxtrain.sharding.placement import (
    apart_along,
    batch_is_leading,
    report_finding,
    sizes_are_final,
    slow_axes,
    specs_of,
    specs_of_state,
    specs_of_update,
)
from jaxtrain.sharding.row_keys import microbatch_keys, row_count
from jaxtrain.state import TrainState
from jaxtrain.tree import PyTree, by_paths, named_leaves

fence = jax.lax.optimization_barrier


def exact(grains: int, cast: Callable[[PyTree], PyTree] = lambda params: params) -> Engine:
    """Returns the engine whose gradients of so many grains have the same bits on every mesh.

    Args:
      grains: K, at least 1.
      cast: parameters to the dtype in which they are gathered.
    """
    if grains < 1:
        raise ValueError(f"`exact` is {grains} grains: give at least 1")

    def exact_sums(loss_fn: LossFn, microbatches: int) -> GradientEngine:
        return by_grains(plain(loss_fn), grains, microbatches=microbatches, cast=cast)

    return Engine(exact_sums, accumulates=True, by_parts=True, joins_state=True)


def by_grains(
    one: GradientEngine,
    grains: int,
    *,
    microbatches: int = 1,
    cast: Callable[[PyTree], PyTree] = lambda params: params,
    draws: Callable[[PyTree, PyTree, Any], Any] | None = None,
) -> GradientEngine:
    """Makes the engine that takes a batch grain by grain with another, such as a pipeline.

    Args:
      one: the engine of a grain; its loss is a sum over rows. Each grain begins with the model
        state of the step, which moves by the mean of what they add; whole numbers by the largest.
      grains: K.
      microbatches: the fewest grains of a device.
      cast: parameters to the dtype in which they are gathered.
      draws: ``(params, batch, rng)``, what draws the random numbers of some rows; ``one`` itself if
        left out.
    """

    def engine(params, model_state, batch, rng, loss_scale, frozen=frozenset()):
        report_finding(Kind.EXACT, Why.GRAINS(grains=grains))
        for name, leaf in named_leaves(model_state).items():
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise ValueError(
                    f"model state {name!r} is a random key and `exact` {grains} grains, of which "
                    "each would replace it by its own: draw by the key that the loss is given"
                )
        shards, narrow = _shards(params), cast(params)

        def on_device(params, model_state, batch, rng, loss_scale):
            whole = shards.gathered(params)
            here = grains_of_a_device(grains, _parts(shards), microbatches)
            cut, rows = _cut(batch, grains, here)
            start = jax.lax.axis_index(shards.axes) * here if shards.axes else 0
            at = functools.partial(_at, cut)

            def gradient(own, j, params, state, scale):
                sums = one(params, state, own, key(start + j), scale, frozen=frozen)
                return sums.grads, sums.loss, jax.tree.map(_moved, state, sums.model_state)

            with apart_along(*GATHERED_AXES):
                given = whole, model_state, at(0)
                with_key = lambda rng: one(*given, rng, loss_scale, frozen=frozen)  # noqa: E731
                with_key = functools.partial(draws, whole, at(0)) if draws else with_key
                how = {"rows": rows, "place": lambda j: (j * rows, 1)}
                key, _ = microbatch_keys(with_key, rng, grains, **how)
                zero = _zero(jax.random.key_data(rng).ravel()[0])
                sums = _counted(gradient, at, (whole, model_state, loss_scale), here, zero)
            grads, loss, state = _over_devices(sums, shards)
            by_mean = functools.partial(_by_mean, count=grains + zero)
            return grads, loss, jax.tree.map(by_mean, model_state, state)

        training, _ = trainable(narrow, frozen)
        program = _mapped(
            on_device,
            shards,
            (shards.places(shards.params, narrow), P(), _rows(batch, shards), P(), P()),
            (shards.places(shards.grads, training), P(), P()),
        )
        grads, loss, state = program(narrow, model_state, batch, rng, loss_scale)
        # Of arrays again: what is cast may be kernels in their place, under the same paths.
        return GradientSums(by_paths(named_leaves(grads), params), loss, state, grains)

    return engine


def on_pieces(
    update: Callable[[TrainState, GradientSums], Any],
) -> Callable[[TrainState, GradientSums], Any]:
    """Makes ``(state, sums) -> (state, metrics)`` one of the pieces of the state that devices hold,
    whose gradients lie as the engine of :func:`exact` gives them."""

    def updated(state: TrainState, sums: GradientSums) -> Any:
        shards, specs = _shards(state.params), specs_of_state(state)
        if not shards.axes:
            return update(state, sums)
        places = shards.places(specs, state)
        grads = shards.places(shards.grads, sums.grads)
        cut = {"grads": grads, "model_state": places.model_state}
        given = places, dataclasses.replace(jax.tree.map(lambda _: P(), sums), **cut)
        leaves = [jax.tree.leaves(tree) for tree in (given, places)]
        zero = lambda state, sums: state.step >> 31  # noqa: E731
        own = in_pieces(update, *leaves, shards.slow, zero)
        return _mapped(own, shards, given, (places, P()))(state, sums)

    return updated


def grains_of_a_device(grains: int, parts: int, microbatches: int = 1) -> int:
    """Returns how many grains each of ``parts`` devices that split a batch has.

    Raises:
      ValueError: a tree of so many grains cannot be cut so, or grains are larger than the
        microbatches that are asked for.

    >>> grains_of_a_device(8, 4), grains_of_a_device(24, 3), grains_of_a_device(6, 1)
    (2, 8, 6)
    """
    here, left = divmod(grains, parts)
    if left or (parts > 1 and here & (here - 1)):
        fit = [n for n in range(1, grains + 1) if n == 1 or _halves(grains, n)]
        near = min(fit, key=lambda n: (abs(n - parts), n))
        raise ValueError(
            f"`exact` is {grains} grains and {parts} devices split the batch: each must have the "
            f"same power of two of them; use {near} devices, or 2^k x {parts} grains"
        )
    if here < microbatches:
        raise ValueError(
            f"`exact` is {grains} grains, of which a device has {here}, and `accumulate` "
            f"{microbatches}: grains are computed one by one, so give more of them, or "
            f"`accumulate` of at most {here}"
        )
    return here


def evaluated_in_grains(
    evaluate: Callable[[PyTree, PyTree], WeightedLoss], grains: int
) -> Callable[[PyTree, PyTree], WeightedLoss]:
    """Makes ``(state, batch) -> WeightedLoss`` the sum along the tree of those of grains, of which
    there are as many as divide both K and the rows.

    Args:
      evaluate: of some rows.
      grains: K.
    """

    def loss(rows: PyTree, j: Any, state: PyTree) -> tuple[None, WeightedLoss, None]:
        del j
        return None, evaluate(state, rows), None

    def whole(state: PyTree, batch: PyTree) -> WeightedLoss:
        report_finding(Kind.EXACT, Why.GRAINS(grains=grains))
        shards = _shards(state.params)

        def on_device(params: PyTree, batch: PyTree) -> WeightedLoss:
            count = math.gcd(row_count(batch) * _parts(shards), grains)
            here = grains_of_a_device(count, _parts(shards))
            cut, _ = _cut(batch, count, here)
            own = dataclasses.replace(state, params=shards.gathered(params))
            with apart_along(*GATHERED_AXES):
                zero = _zero(jax.random.key_data(state.rng).ravel()[0])
                sums = _counted(loss, functools.partial(_at, cut), (own,), here, zero)
            return _over_devices(sums, shards)[1]

        places = shards.places(shards.params, state.params), _rows(batch, shards)
        return _mapped(on_device, shards, places, P())(state.params, batch)

    return functools.wraps(evaluate)(whole)


def _shards(params: PyTree) -> Shards:
    """The axes of the batch, and how parameters and their gradients lie there; none in an
    estimate."""
    mesh = jax.sharding.get_abstract_mesh()
    if not sizes_are_final():  # an estimate's
        return Shards()
    specs = None if mesh.empty else specs_of(params)
    if specs is None:
        raise ValueError(
            "the step is exact and does not know its mesh, or how its state lies there: compile it "
            "with jaxtrain.compile_step(mesh=)"
        )
    # It lays out transposes otherwise, so that sums of them are in another order (jax 0.10.2).
    if mesh.size == 1:
        raise ValueError(
            "`exact` is given and the mesh has one device, for which XLA compiles another program "
            "than for several, with other bits: use 2 devices or more; on a CPU, "
            "`--simulate-devices 2`"
        )
    if not batch_is_leading():
        raise ValueError(
            "`exact` takes grains of rows, and not every leaf of the batch begins with its rows "
            "(Rules(batch=)): leave it out"
        )
    axes = tuple(a for a in GATHERED_AXES if a in mesh.shape)
    return Shards(axes, specs, specs_of_update(params), slow_axes())


def _mapped(function: Callable[..., Any], shards: Shards, places: Any, returned: Any) -> Any:
    """Maps a function over the axes, if there are any; others are left to the partitioner."""
    if not shards.axes:
        return function
    own = {"in_specs": places, "out_specs": returned, "check_vma": False}
    return jax.shard_map(function, axis_names=set(shards.axes), **own)


def _rows(batch: PyTree, shards: Shards) -> PyTree:
    return jax.tree.map(lambda x: P(shards.axes) if jnp.ndim(x) else P(), batch)


def _parts(shards: Shards) -> int:
    return math.prod(map(jax.lax.axis_size, shards.axes))


def _halves(grains: int, parts: int) -> bool:
    here, left = divmod(grains, parts)
    return not left and not here & (here - 1)


def _cut(batch: PyTree, grains: int, here: int) -> tuple[PyTree, int]:
    """Cuts this device's rows into grains [here, M, ...]; also returns M."""
    batch = jax.tree.map(jnp.asarray, batch)
    counts = {name: x.shape[0] for name, x in named_leaves(batch).items() if x.ndim}
    rows = max(counts.values(), default=0)
    for name, own in counts.items():
        if own != rows or rows % here:
            whole = own * grains // here
            raise ValueError(
                f"batch leaf {name!r} has {whole} rows and `exact` is {grains} grains: give every "
                f"leaf the same multiple of {grains} rows, or make it a scalar"
            )
    cut = lambda x: x.reshape(here, rows // here, *x.shape[1:]) if x.ndim else x  # noqa: E731
    return jax.tree.map(cut, batch), rows // here


def _add(first: tuple[PyTree, WeightedLoss, PyTree], second: tuple) -> tuple:
    grads = jax.tree.map(jnp.add, first[0], second[0])
    return grads, first[1] + second[1], jax.tree.map(_join, first[2], second[2])


def _moved(old: jax.Array, new: jax.Array) -> jax.Array:
    """By how much a grain moves model state; whole numbers as it leaves them."""
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return new
    before, after = map(_at_least_float32, (old, new))
    # What stands still does so to the bit, an infinity too.
    return jnp.where(after == before, 0, after - before)


def _join(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.maximum(a, b)


def _by_mean(old: jax.Array, moved: jax.Array, *, count: jax.Array) -> jax.Array:
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return moved
    # The count is one that the compiler does not know: it would multiply by the inverse, or divide.
    new = _at_least_float32(old) + moved / count.astype(moved.dtype)
    return jnp.where(moved == 0, old, new.astype(old.dtype))


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _counted(
    node: Callable[..., PyTree],
    rows: Callable[[Any], PyTree],
    shared: PyTree,
    count: int,
    zero: jax.Array,
) -> PyTree:
    """Adds nodes 0 .. count - 1 along the tree, as a binary counter carries.

    Args:
      node: ``(rows, j, *shared) -> node``.
      rows: those of node j. They come around with the loop, so that they are not fused with it.
      shared: what all nodes have alike.
      count: how many.
      zero: of :func:`_zero`.
    """
    levels = count.bit_length()
    shapes = jax.eval_shape(node, rows(0), zero, *shared)
    start = jax.tree.map(lambda s: jnp.zeros((levels, *s.shape), s.dtype), shapes)
    at = lambda sums, level: jax.tree.map(lambda x: x[level], sums)  # noqa: E731

    def add(j: jax.Array, carried: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        own, sums = carried
        j, own, given = fence((j, own, shared))
        level = jax.lax.population_count(j ^ (j + 1)) - 1  # ones at the end of j
        x = node(own, j, *given)
        if count > 1:
            carry = lambda level, x: _add(at(sums, level), x)  # noqa: E731
            with jax.named_scope(f"{TRIPS}1"):
                x = jax.lax.fori_loop(0, level, carry, x)
        put = lambda every, one: every.at[level].set(one) if count > 1 else one[None]  # noqa: E731
        sums = jax.tree.map(put, sums, x)
        return rows(jnp.minimum(j + 1, count - 1)), sums

    with jax.named_scope(f"{TRIPS}{count}"):
        _, sums = jax.lax.fori_loop(0, count + zero, add, (rows(0), start))
    kept = [level for level in range(levels) if count >> level & 1]
    total = at(sums, kept[0])
    for level in kept[1:]:
        total = _add(at(sums, level), total)
    return total


def _at(cut: PyTree, j: Any) -> PyTree:
    """The rows of grain j; what has no rows is the same for all."""
    return jax.tree.map(lambda x: x[j] if jnp.ndim(x) else x, cut)


def _zero(bits: jax.Array) -> jax.Array:
    """0, of a 32-bit number that the compiler does not know: a loop of one pass stays a loop."""
    return jnp.minimum((bits >> 1).astype(jnp.int32), 0)


def _over_devices(sums: tuple[PyTree, WeightedLoss, PyTree], shards: Shards) -> tuple:
    """Adds what devices have, in their order, along the tree."""
    grads, *rest = sums
    if not shards.axes:
        return sums
    _, *rest = tree_sum(jax.lax.all_gather((None, *rest), shards.axes), _add)
    return shards.summed_in_order(grads), *rest
