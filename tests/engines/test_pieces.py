"""A function of whole arrays has on pieces of them the bits that it has on the whole."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.engines.pieces import _Runner, in_pieces, integer_sum
from jaxtrain.optim import OPTIMIZERS
from jaxtrain.tree import named_leaves

SHAPES = {"blocks": {"w": (3, 8, 24)}, "embed": (48, 7), "s": ()}
# Of each leaf, the dimension that is split.
SPLIT = {"blocks/w": 2, "blocks/b": 1, "embed": 0, "v": 0}
OTHER = SPLIT | {"blocks/w": 1}


def shapes_of(r):
    """Of random sizes, whose dimensions above divide by 8."""
    some = lambda: int(r.integers(1, 60))  # noqa: E731
    blocks = {"w": (3, 8 * some(), 8 * some()), "b": (3, 8 * some())}
    return {"blocks": blocks, "embed": (8 * some(), some()), "v": (8 * some() * some(),), "s": ()}


def random_like(r, shapes):
    scale = lambda shape: np.exp(2 * r.normal(size=shape))  # noqa: E731
    draw = lambda shape: (r.normal(size=shape) * scale(shape)).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def specs(tree, params, split, axes):
    """A spec for each leaf, of moments too, which have the shape of their parameter."""
    by_shape = {x.shape: split.get(name) for name, x in named_leaves(params).items()}

    def spec(x):
        d = by_shape.get(jnp.shape(x))
        return P() if d is None else P(*[None] * d, axes)

    return jax.tree.map(spec, tree)


def updated(name, params, grads, split, axes, **options):
    """Bytes of the results of an update on a mesh."""
    count = math.prod(axes.values())
    mesh = jt.make_mesh(**axes, devices=jax.devices()[:count])
    multipliers = [("^blocks/", np.array([0.3, 0.7, 1.0]))]
    own = {"clip_norm": 0.5, "weight_decay": 0.1, "ema": 0.9, "rate_multipliers": multipliers}
    chain = jt.make_optimizer(name, 1e-2, stacked=("^blocks/",), **own, **options)

    def update(grads, state, params, zero):
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    given = (grads, chain.init(params), params, jnp.int32(0))
    places = specs(given, params, split, tuple(axes))
    returned = (places[2], places[1])
    zero = lambda *given: given[-1] >> 31  # noqa: E731
    run = in_pieces(update, *map(jax.tree.leaves, (places, returned)), {}, zero)
    how = {"in_specs": places, "out_specs": returned, "check_vma": False}
    with jax.set_mesh(mesh):
        run = jax.jit(jax.shard_map(run, axis_names=set(axes), **how))
        for _ in range(2):
            params, state = run(*given)
            given = (grads, state, params, given[-1])
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((params, state))]


def on_meshes(name, seed, shapes=None, meshes=((2, 4), (8,)), **options):
    r = np.random.default_rng(seed)
    shapes = shapes_of(r) if shapes is None else shapes
    params, grads = random_like(r, shapes), random_like(r, shapes)
    found = [updated(name, params, grads, {}, {"data": 2}, **options)]
    for sizes, split in zip(meshes, (SPLIT, OTHER), strict=False):
        axes = dict(zip(("data", "fsdp"), sizes, strict=False))
        found.append(updated(name, params, grads, split, axes, **options))
    return found


def test_an_update_of_pieces_has_the_bits_of_the_whole():
    """LAMB, whose norms read a whole layer, and clipping, whose norm reads all."""
    whole, pieces = on_meshes("lamb", 0, SHAPES, ((2, 4),))
    assert whole == pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_updates_of_random_shapes_have_the_bits_of_the_whole(name, seed):
    first, *others = on_meshes(name, seed)
    assert all(found == first for found in others)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"watch_every": 2}, {"accumulate": 2}])
def test_branches_have_the_bits_of_the_whole(options):
    first, *others = on_meshes("adamw", 0, SHAPES, **options)
    assert all(found == first for found in others)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_sum_of_integers_is_that_of_the_numbers(scale):
    """Against float64, of long and short dimensions, in any order to the bit."""
    r = np.random.default_rng(0)
    x = (r.normal(size=(5, 140_000)) * scale).astype(np.float32)
    total = jax.jit(functools.partial(integer_sum, axes=(0, 1)))
    want = x.astype(np.float64).sum()
    assert abs(float(total(x)) - want) < 1e-6 * abs(want) + 1e-9 * np.abs(x).max()
    shuffled = r.permutation(x.ravel()).reshape(140_000, 5)
    assert float(total(shuffled)) == float(total(x))
    rows = integer_sum(jnp.asarray(x), (1,))
    np.testing.assert_allclose(rows, x.astype(np.float64).sum(1), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_sum_with_an_infinity_is_nan(bad):
    assert np.isnan(integer_sum(jnp.array([1.0, bad, 2.0]), (0,)))
    assert float(integer_sum(jnp.zeros(3), (0,))) == 0.0


@pytest.mark.parametrize("shape", [(8, 999), (8,)])  # and pieces of one number each
def test_every_operation_is_rounded_by_itself(shape):
    """As NumPy rounds them in float32, where a compiler that optimizes would fuse a product and a
    sum, or divide by the same number for all as one multiplication."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(2, *shape)).astype(np.float32)
    a, b, c = np.float32(0.9), np.float32(0.1), np.float32(2.9)
    mesh = jt.make_mesh(fsdp=8)
    places = (P("fsdp"), P("fsdp"), P(), P())
    # A product by one goes away, and leaves the fences on both sides of it next to each other.
    blend = lambda x, y, c, zero: (a * x * 1.0 + b * y) / c / 56  # noqa: E731
    run = in_pieces(blend, places, places[:1], {}, lambda *given: given[-1] >> 31)
    how = {"axis_names": {"fsdp"}, "in_specs": places, "out_specs": places[0], "check_vma": False}
    compiler = {"compiler_options": {"xla_backend_optimization_level": 3}}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(run, **how), **compiler)(x, y, c, jnp.int32(0))
    np.testing.assert_array_equal(found, (a * x + b * y) / c / np.float32(56))


def test_the_fence_of_a_divisor_depends_on_the_dividend():
    """With a zero of 1 it shows, as it would to a compiler that knows no better."""
    sealed = _Runner({}, jnp.int32(1)).sealed
    ones = np.array([0x3F800000, 0x3F800002], np.uint32).view(np.float32)
    divisors = sealed(sealed(jnp.full(2, 4.0)), like=sealed(jnp.asarray(ones)))
    assert divisors[0] != divisors[1]


def test_approximations_have_the_bits_of_the_whole():
    """XLA takes others for elements that fill no vector, for example in pieces of 7."""
    options = {"xla_backend_optimization_level": 3}
    if jax.__version_info__ < (0, 11):  # XLA's own choices, and not those of tests/conftest.py
        options |= {"xla_cpu_use_fusion_emitters": True, "xla_llvm_disable_expensive_passes": False}
    x = np.abs(np.random.default_rng(0).normal(size=8 * 7)).astype(np.float32)
    several = lambda x, zero: (jnp.exp(x), jnp.log(x), jnp.arctan(x))  # noqa: E731
    results = []
    for place in (P("fsdp"), P()):
        specs = {"in_specs": (place, P()), "out_specs": (place,) * 3}
        run = in_pieces(several, *specs.values(), {}, lambda x, zero: zero >> 31)
        with jax.set_mesh(jt.make_mesh(fsdp=8)):
            run = jax.shard_map(run, **specs, check_vma=False)
            results.append(jax.jit(run, compiler_options=options)(x, jnp.int32(0)))
    for in_parts, as_one_array in zip(*results, strict=True):
        np.testing.assert_array_equal(in_parts, as_one_array)
