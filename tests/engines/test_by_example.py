"""Gradients of single examples are those of JAX, whatever the convolution and its use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.engines.by_example import Outer, gradients, is_outer, squared_norm, weighted_sum


def loss(params, row, convolve):
    hidden = jnp.tanh(convolve(row, params["conv"].astype(row.dtype)))
    y = jnp.tanh(hidden.reshape(1, -1) @ params["dense"] + params["bias"])
    return jnp.square(y @ params["twice"] @ params["twice"]).sum() / 7, {"y": y}


@pytest.mark.parametrize(
    ("numbers", "shape", "kernel", "how"),
    [
        (("NHWC", "HWIO", "NHWC"), (1, 7, 6, 3), (3, 2, 3, 4), {"strides": (2, 1)}),
        (("NCHW", "OIHW", "NHWC"), (1, 3, 7, 6), (4, 3, 3, 2), {"dilation": (1, 2)}),
        (("NWC", "IWO", "NCW"), (1, 9, 2), (2, 4, 5), {"padding": [(3, -1)]}),
        (("NHWC", "HWIO", "NHWC"), (1, 4, 4, 4), (3, 3, 2, 4), {"groups": 2}),  # left to JAX
        (("NHWC", "HWIO", "NHWC"), (3, 4, 4, 2), (3, 3, 2, 4), {}),  # three frames: left too
    ],
)
def test_gradients_and_norms_of_rows_are_those_of_each_row_alone(numbers, shape, kernel, how):
    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            how.get("strides", (1,) * (x.ndim - 2)),
            how.get("padding", "SAME"),
            rhs_dilation=how.get("dilation"),
            dimension_numbers=numbers,
            feature_group_count=how.get("groups", 1),
        )

    r = np.random.default_rng(0)
    rows = r.normal(size=(5, *shape)).astype(np.float32)
    width = convolve(rows[0], np.ones(kernel, np.float32)).size
    shapes = {"conv": kernel, "dense": (width, 6), "bias": (6,), "twice": (6, 6)}
    params = {n: (r.normal(size=s) / 3).astype(np.float32) for n, s in shapes.items()}
    plain = jax.grad(lambda p, row: loss(p, row, convolve)[0])
    alone = [plain(params, row) for row in rows]

    found, aux = jax.vmap(lambda row: gradients(lambda p, x: loss(p, x, convolve), params, row))(
        rows
    )
    assert [n for n, g in found.items() if is_outer(g)] == ["dense"]
    np.testing.assert_allclose(aux["y"][2], loss(params, rows[2], convolve)[1]["y"], rtol=1e-5)
    factors = r.random(5).astype(np.float32)
    for name, g in found.items():
        each = np.stack([np.asarray(a[name], np.float64) for a in alone])
        norms = jax.vmap(squared_norm)(g)
        np.testing.assert_allclose(norms, np.square(each).sum((*range(1, each.ndim),)), rtol=1e-5)
        expected = np.tensordot(factors, each, 1)
        total = weighted_sum(g, factors)
        np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_a_norm_does_not_vanish_with_the_squares_of_one_vector():
    tiny, large = np.full(4, 1e-24, np.float32), np.full(4, 1e18, np.float32)
    assert squared_norm(Outer(tiny, large)) == pytest.approx(16e-12, rel=1e-5)
    assert squared_norm(Outer(0 * tiny, large)) == 0


def test_no_product_of_examples_is_made_where_two_vectors_will_do():
    """Neither a kernel for each example nor a grouped convolution is in the program."""
    convolve = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    params = {"conv": jnp.ones((3, 3, 1, 2)), "dense": jnp.ones((32, 6)), "bias": jnp.ones(6)}
    params["twice"] = jnp.ones((6, 6))

    def total(rows):
        one = lambda row: gradients(lambda p, x: loss(p, x, convolve), params, row)[0]  # noqa: E731
        found = jax.vmap(one)(rows)
        add = lambda g: weighted_sum(g, jnp.ones(5))  # noqa: E731
        return jax.tree.map(add, found, is_leaf=is_outer)

    text = jax.jit(total).lower(jnp.ones((5, 1, 4, 4, 1))).as_text()
    assert "5x32x6xf32" not in text
    assert "batch_group_count = 5" not in text
    assert "feature_group_count = 5" not in text
