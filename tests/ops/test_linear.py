"""Kernels against what they stand for, in NumPy float64, and how they are placed by path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.jaxprs import float32_products
from jaxtrain.ops.linear import Dora, LowRank, kernel_rules, low_rank, matmul, matmul_float32, merge
from jaxtrain.sharding.rules import param_shardings
from jaxtrain.tree import named_leaves

N, D, F, R, ALPHA = 5, 6, 7, 2, 3.0


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("product", [matmul, matmul_float32])
def test_a_low_rank_product_and_its_gradients_are_those_of_peft(product):
    # As PEFT stores them: lora_A [r, in] and lora_B [out, r].
    x, w, lora_a, lora_b, d_y = draw((N, D), (D, F), (R, D), (F, R), (N, F))
    kernel = LowRank(*(jnp.float32(part) for part in (w, lora_a.T, lora_b.T)), ALPHA / R)
    run = functools.partial(product, jnp.float32(x))
    y, pullback = jax.vjp(run, kernel)
    np.testing.assert_allclose(y, x @ w + (x @ lora_a.T) @ lora_b.T * (ALPHA / R), rtol=1e-5)
    (grads,) = pullback(jnp.float32(d_y))
    expected = (x.T @ d_y, x.T @ d_y @ lora_b * ALPHA / R, lora_a @ x.T @ d_y * ALPHA / R)
    for got, gradient in zip((grads.base, grads.a, grads.b), expected, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kernel.merged(), w + lora_a.T @ lora_b.T * ALPHA / R, rtol=1e-5)
    np.testing.assert_allclose(
        product(jnp.float32(d_y), kernel.T), d_y @ kernel.merged().T, rtol=1e-4
    )
    # A kernel may stand on a kernel.
    twice = LowRank(kernel, kernel.a, kernel.b, 1.0)
    np.testing.assert_allclose(run(twice), x @ merge(twice), rtol=1e-4)


@pytest.mark.parametrize("product", [matmul, matmul_float32])
def test_a_decomposed_product_is_that_of_directions_and_norms(product):
    x, w, a, b, m, d_y = draw((N, D), (D, F), (D, R), (R, F), (F,), (N, F))
    kernel = Dora(LowRank(*(jnp.float32(part) for part in (w, a, b)), 1.5), jnp.float32(m))
    v = w + 1.5 * a @ b
    scale = m / np.linalg.norm(v, axis=0)
    y, pullback = jax.vjp(lambda x, kernel: product(x, kernel), jnp.float32(x), kernel)
    np.testing.assert_allclose(y, x @ v * scale, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kernel.merged(), v * scale, rtol=1e-5)
    # The norm has no gradient.
    d_x, grads = pullback(jnp.float32(d_y))
    d_v = x.T @ (d_y * scale)
    d_m = (d_y * (x @ v)).sum(0) * scale / m
    expected = (d_y * scale) @ v.T, 1.5 * d_v @ b.T, 1.5 * a.T @ d_v, d_m
    got = d_x, grads.low.a, grads.low.b, grads.magnitude
    for found, gradient in zip(got, expected, strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=1e-4)


def test_products_of_narrow_kernels_are_narrow_and_sums_of_a_head_are_not():
    x, w, a, b = (jnp.bfloat16(part) for part in draw((N, D), (D, F), (D, R), (R, F)))
    kernel = LowRank(w, a, b, 0.5)
    for product, dtype in ((matmul, jnp.bfloat16), (matmul_float32, jnp.float32)):
        assert product(x, kernel).dtype == product(x, w).dtype == dtype
        loss = lambda x, kernel, product=product: product(x, kernel).astype(jnp.float32).sum()  # noqa: E731
        assert float32_products(jax.grad(loss, (0, 1)), x, kernel) == []


def stacked():
    kernel, bias = (np.ones(shape, np.float32) for shape in ((4, D, 8), (4, 8)))
    return {"blocks": {"q": {"kernel": kernel, "bias": bias}}, "head": {"kernel": kernel[0]}}


put_low_rank = functools.partial(low_rank, rank=R, alpha=ALPHA, rng=jax.random.key(0))


def test_kernels_are_put_in_place_by_path_and_change_nothing_at_first():
    params = stacked()
    placed = put_low_rank(params, "/kernel$")
    shapes = {name: leaf.shape for name, leaf in named_leaves(placed).items()}
    assert shapes == {
        "blocks/q/bias": (4, 8),
        "blocks/q/kernel/base": (4, D, 8),
        "blocks/q/kernel/a": (4, D, R),
        "blocks/q/kernel/b": (4, R, 8),
        "head/kernel/base": (D, 8),
        "head/kernel/a": (D, R),
        "head/kernel/b": (R, 8),
    }
    jax.tree.map(np.testing.assert_array_equal, merge(placed), params)
    a = named_leaves(placed)["blocks/q/kernel/a"]
    assert np.abs(a).max() <= D**-0.5
    assert len(np.unique(a)) == a.size
    assert (placed["head"]["kernel"].a != a[0]).any()  # of equal shape, and of another key
    cut = jt.Stack(virtual=2).cut(params)
    again = put_low_rank(cut, "/kernel$", stacked=jt.Stack(virtual=2))
    assert again["blocks"]["q"]["kernel"].a.shape == (2, 2, D, R)


def test_the_parts_of_a_kernel_are_sharded_as_the_rule_of_the_whole_says():
    rules = [("^blocks/q/kernel$", ("layers", "embed", "heads")), ("kernel$", ("embed", None))]
    params = put_low_rank(stacked(), "q/kernel$")
    mesh = jt.make_mesh(fsdp=2, tensor=2, pipe=2)
    specs = named_leaves(param_shardings(params, mesh, kernel_rules(rules, params)))
    assert {name: tuple(sharding.spec) for name, sharding in specs.items()} == {
        "blocks/q/bias": ("pipe", "fsdp"),
        "blocks/q/kernel/base": ("pipe", "fsdp", "tensor"),
        "blocks/q/kernel/a": ("pipe", "fsdp", None),
        "blocks/q/kernel/b": ("pipe", None, "tensor"),
        "head/kernel": ("fsdp", None),
    }
    whole = kernel_rules([("^blocks/q/kernel$", ())], params)
    for name, sharding in named_leaves(param_shardings(params, mesh, whole)).items():
        assert (sharding.spec == P(None, None, None)) == ("q/kernel" in name)
    with pytest.raises(ValueError, match="rule 'typo' matches no parameter"):
        param_shardings(params, mesh, kernel_rules([*rules, ("typo", ())], params))


@pytest.mark.parametrize(
    ("pattern", "rank", "message"),
    [
        ("/keernel$", 1, "pattern '/keernel.' matches no parameter; there are blocks/q/bias"),
        ("/q/", 1, r"'blocks/q/bias' has shape \(4, 8\), of which 1 axes are layers, and is no ma"),
        ("kernel", 0, "`rank` is 0: use 1 or more"),
    ],
)
def test_what_cannot_be_put_in_place_is_refused(pattern, rank, message):
    with pytest.raises(ValueError, match=message):
        put_low_rank(stacked(), pattern, rank=rank)
