"""Norms, activations and rotary positions against their definitions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops import activations, norms
from jaxtrain.ops.activations import (
    activate,
    geglu,
    geglu_exact,
    gelu,
    relu,
    swiglu,
    swiglu_clamped,
)
from jaxtrain.ops.norms import layer_norm, rms_norm
from jaxtrain.ops.numerics import drop
from jaxtrain.ops.rotary import DynamicScaling, rotary_angles, rotary_frequencies, rotate
from jaxtrain.sharding.row_keys import draws_otherwise, microbatch_keys

EPS = 1e-5


def plain_layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + EPS) * scale + bias


def plain_rms_norm(x, scale):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale


def plain_gelu(x):
    return x / 2 * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def plain_swiglu(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def plain_clamped(gate, up):
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1)


def biased(form, gate, bias):
    return activate(form, [gate], [bias])


def plain_biased(x, bias):
    return plain_gelu(x + bias)


def exact_geglu(gate, up):
    return jax.nn.gelu(gate, approximate=False) * up


WIDE, ROW = (3, 4, 6), (6,)
CASES = {
    "layer_norm": (functools.partial(layer_norm, eps=EPS), plain_layer_norm, (WIDE, ROW, ROW)),
    "rms_norm": (functools.partial(rms_norm, eps=EPS), plain_rms_norm, (WIDE, ROW)),
    "gelu": (gelu, plain_gelu, (WIDE,)),
    "biased gelu": (functools.partial(biased, "gelu"), plain_biased, (WIDE, ROW)),
    "swiglu": (swiglu, plain_swiglu, (WIDE, WIDE)),
    "swiglu_clamped": (swiglu_clamped, plain_clamped, (WIDE, WIDE)),
    "geglu": (geglu, lambda gate, up: plain_gelu(gate) * up, (WIDE, WIDE)),
    "geglu_exact": (geglu_exact, exact_geglu, (WIDE, WIDE)),
    "relu": (relu, jax.nn.relu, (WIDE,)),
}


def take_the_form_of(platform, monkeypatch):
    for module in (activations, norms):
        monkeypatch.setattr(module, "platform", lambda: platform)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_definition(name, platform, monkeypatch):
    take_the_form_of(platform, monkeypatch)
    function, plain, shapes = CASES[name]
    rng = np.random.default_rng(0)
    args = [3 * rng.standard_normal(shape) for shape in shapes]
    weights = rng.standard_normal(WIDE)
    with jax.enable_x64(True):
        every = tuple(range(len(args)))
        got, expected = (
            jax.value_and_grad(lambda *a, f=f: (f(*a) * weights).sum(), every)(*args)
            for f in (function, plain)
        )
    (value, slopes), (wanted, wanted_slopes) = jax.tree.map(np.asarray, (got, expected))
    assert abs(value - wanted) <= 1e-9 * abs(wanted)
    for slope, want, shape in zip(slopes, wanted_slopes, shapes, strict=True):
        assert (slope.shape, slope.dtype) == (shape, np.float64)
        assert abs(slope - want).max() <= 1e-9 * abs(want).max() > 0


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_in_and_out_with_float32_between(name):
    function, plain, shapes = CASES[name]
    rng = np.random.default_rng(1)
    args = [jnp.asarray(100 + rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    out = function(*args)
    exact = plain(*(a.astype(jnp.float32) for a in args))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=1 / 128)
    weights = rng.standard_normal(WIDE).astype(jnp.bfloat16)
    found, exact = (
        jax.vjp(f, *a)[1](weights.astype(f(*a).dtype))
        for f, a in ((function, args), (plain, [a.astype(jnp.float32) for a in args]))
    )
    assert [g.dtype for g in found] == [jnp.bfloat16] * len(args)
    for g, e in zip(found, exact, strict=True):
        tiny = 1e-4 * float(np.abs(e).max())
        np.testing.assert_allclose(g.astype(jnp.float32), e, rtol=1 / 128, atol=tiny)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("name", "kept"), [("layer_norm", 1), ("rms_norm", 1), ("gelu", 1), ("biased gelu", 1)]
)
def test_one_wide_array_is_kept_for_the_backward_pass(name, kept, platform, monkeypatch):
    take_the_form_of(platform, monkeypatch)
    function, _, shapes = CASES[name]
    args = [jnp.ones(shape) for shape in shapes]
    leaves = jax.tree.leaves(jax.vjp(function, *args)[1])
    assert sum(leaf.shape == WIDE for leaf in leaves) == kept


def test_a_gpus_sums_of_a_row_cancel_nothing_where_its_mean_is_large(monkeypatch):
    rng = np.random.default_rng(2)
    x, d_y = (1e4 + rng.standard_normal(WIDE)), rng.standard_normal(WIDE)
    args = [np.float32(a) for a in (x, rng.standard_normal(ROW), np.zeros(ROW))]
    with jax.enable_x64(True):
        exact = jax.vjp(plain_layer_norm, *map(np.float64, args))[1](d_y)[0]
    take_the_form_of("gpu", monkeypatch)
    found = jax.vjp(functools.partial(layer_norm, eps=EPS), *args)[1](np.float32(d_y))[0]
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3 * abs(exact).max())


def test_layer_norm_without_bias():
    x = jnp.asarray(np.random.default_rng(2).standard_normal(WIDE), jnp.float32)
    zero = jnp.zeros(ROW)
    np.testing.assert_array_equal(
        layer_norm(x, zero + 2, None, eps=EPS), layer_norm(x, zero + 2, zero, eps=EPS)
    )


@pytest.mark.parametrize(("dtype", "error"), [("float32", 2e-4), ("float64", 1e-12)])
def test_rotation_is_multiplication_by_a_unit_complex_number(dtype, error):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 5, 3, 8))
    positions = rng.integers(0, 1000, (2, 5))
    with jax.enable_x64(dtype == "float64"):
        angles = rotary_angles(jnp.asarray(positions), rotary_frequencies(8))
        turned = rotate(jnp.asarray(x, dtype), angles)
    assert turned.dtype == dtype
    frequencies = 10000.0 ** (-np.arange(4) / 4)
    pairs = x[..., :4] + 1j * x[..., 4:]
    pairs = pairs * np.exp(1j * positions[..., None] * frequencies)[:, :, None]
    np.testing.assert_allclose(turned[..., :4], pairs.real, atol=error)
    np.testing.assert_allclose(turned[..., 4:], pairs.imag, atol=error)


def test_rotated_products_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(t, s):
        frequencies = rotary_frequencies(8, theta=100.0)
        angles = [rotary_angles(jnp.array([[p]]), frequencies) for p in (t, s)]
        return (rotate(q, angles[0]) * rotate(k, angles[1])).sum()

    np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
    assert abs(product(7, 3) - product(8, 3)) > 1e-3


@pytest.mark.parametrize("head_dim", [6, pytest.param(2, marks=pytest.mark.slow)])
def test_dynamic_scaling_is_its_definition_and_exact_up_to_its_length(head_dim):
    scaling, steps = DynamicScaling(3.0, 40), np.arange(0, head_dim, 2) / head_dim

    def found(row):
        return rotary_frequencies(head_dim, theta=1e3, scaling=scaling, row=row)

    for row in (0, 39, 40):
        np.testing.assert_array_equal(found(row), rotary_frequencies(head_dim, theta=1e3))
    for row in (41, 1000):
        power = head_dim / max(head_dim - 2, 1)  # of a base that one pair has no use for
        expected = (1e3 * (3.0 * row / 40 - 2.0) ** power) ** -steps
        np.testing.assert_allclose(found(row), expected, rtol=2e-6)
        with jax.enable_x64(True):
            np.testing.assert_allclose(found(row), expected, rtol=1e-13)


def test_a_function_of_a_users_that_is_named_as_ours_does_not_draw_by_row():
    @jax.jit
    def drawn_by_row(key, x):
        return jax.random.bernoulli(key, 0.5, x.shape) * x

    def draws(function):
        traced = jax.make_jaxpr(functools.partial(function, x=jnp.ones((4, 3))))
        return draws_otherwise(traced(jax.random.key(0)).jaxpr, 4)

    assert draws(drawn_by_row)
    assert not draws(lambda key, x: drop(x, 0.5, key))
    # One row at a time, with a key for all or for each, and what are no rows.
    assert draws(lambda key, x: jax.vmap(lambda x: drop(x, 0.5, key))(x))
    assert draws(lambda key, x: jax.vmap(lambda x, k: drop(x, 0.5, k))(x, jax.random.split(key, 4)))
    assert draws(lambda key, x: drop(x.T, 0.5, key))


def test_microbatches_of_a_part_drop_what_the_whole_batch_does():
    """Parts are runs of rows, as grains are, and their microbatches every second row."""
    rng, x = jax.random.key(3), jnp.ones((16, 8))
    dropped = lambda key, rows: drop(jnp.ones((rows, 8)), 0.5, key)  # noqa: E731
    part, _ = microbatch_keys(
        lambda key: dropped(key, 4), rng, 4, rows=4, place=lambda j: (4 * j, 1)
    )
    for i in range(4):
        key, _ = microbatch_keys(lambda key: dropped(key, 2), part(i), 2, rows=2)
        for j in range(2):
            expected = drop(x, 0.5, rng)[4 * i + j : 4 * i + 4 : 2]
            np.testing.assert_array_equal(dropped(key(j), 2), expected)
