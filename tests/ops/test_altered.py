"""Kernels of which a function is multiplied: their gradients, and what a probe sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.loss import WeightedLoss
from jaxtrain.ops.altered import Masked, Rounded, grams
from jaxtrain.ops.linear import matmul
from jaxtrain.ops.packed import pack

L, N, D = 3, 10, 16


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def loss_fn(params, x_ND, rng):
    layer = lambda x, kernel: (jnp.tanh(matmul(x, kernel)), None)  # noqa: E731
    y = jax.lax.scan(layer, x_ND, params["layers"]["kernel"])[0]
    return WeightedLoss(jnp.square(y).sum(), jnp.float32(1))


def test_a_probe_sees_the_inputs_of_every_scanned_layer_of_every_batch():
    params = {"layers": {"kernel": drawn(L, D, D)}}
    batches = [drawn(N, D), drawn(N + 3, D)]
    found = grams(loss_fn, params, ["layers/kernel"], batches)["layers/kernel"]
    expected = np.zeros((L, D, D))
    for x in batches:
        x = x.astype(np.float64)
        for l in range(L):
            expected[l] += x.T @ x
            x = np.tanh(x @ params["layers"]["kernel"][l])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_rounded_kernel_is_the_stored_one_and_its_gradient_goes_straight_through(kind):
    base, x = jnp.asarray(drawn(L, D, D)), drawn(N, D)
    stored = pack(base, kind, 8).merged()
    tree = lambda kernel: {"layers": {"kernel": kernel}}  # noqa: E731
    of = lambda kernel: loss_fn(tree(kernel), x, None).total  # noqa: E731
    rounded = Rounded(base, kind, 8)
    np.testing.assert_array_equal(rounded.merged(), stored)
    value, grads = jax.jit(jax.value_and_grad(of))(rounded)
    expected, at_stored = jax.jit(jax.value_and_grad(of))(stored)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(grads.base, at_stored, rtol=1e-6, atol=1e-6)
    # What it stands for has the same codes and scales again.
    jax.tree.map(np.testing.assert_array_equal, pack(stored, kind, 8), pack(base, kind, 8))


def test_a_masked_kernel_has_no_gradient_where_it_is_0():
    base, kept = jnp.asarray(drawn(D, D)), np.random.default_rng(0).random((D, D)) < 0.5
    x, d_y = drawn(N, D), drawn(N, D)
    of = lambda b: (matmul(x, Masked(b, kept.astype(np.uint8))) * d_y).sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(of)(base), ((x @ (base * kept)) * d_y).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(jax.grad(of))(base), (x.T @ d_y) * kept, rtol=1e-5, atol=1e-5
    )
    # Rounded, too.
    both = Rounded(Masked(base, kept.astype(np.uint8)), "int4", 4)
    np.testing.assert_array_equal(both.merged(), pack(base * kept, "int4", 4).merged())
    of = lambda b: (matmul(x, Rounded(Masked(b, both.base.kept), "int4", 4)) * d_y).sum()  # noqa: E731
    np.testing.assert_allclose(
        jax.jit(jax.grad(of))(base), (x.T @ d_y) * kept, rtol=1e-5, atol=1e-5
    )
