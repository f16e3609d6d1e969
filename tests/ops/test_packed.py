"""Packed kernels against bitsandbytes' own bits, and what they and their products keep."""

import pathlib
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.linear import LowRank, matmul, matmul_float32, merge
from jaxtrain.ops.packed import NF4, Kind, pack, pack_later

D, F, L, N, R = 128, 96, 4, 64, 8


def floats(bits):
    return np.asarray(bits).view(np.float32)


def drawn(*shape, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 0.1).astype(np.float32)


@pytest.mark.parametrize("how", [pack, jax.jit(pack, static_argnums=1), pack_later])
def test_nf4_has_the_bits_of_bitsandbytes(how):
    """tests/ops/nf4.npz is what bitsandbytes 0.50.2 makes of `weight` [F, D] on a CPU, with a block
    of zeros, one thirty times as large as others, and numbers at both ends."""
    theirs = np.load(pathlib.Path(__file__).parent / "nf4.npz")
    w_DF = theirs["weight"].T if how is pack_later else theirs["weight"].T.copy()
    kernel = jax.tree.map(np.asarray, how(w_DF, "nf4"))
    np.testing.assert_array_equal(kernel.codes.T, theirs["codes"])
    np.testing.assert_array_equal(floats(kernel.scale).T, theirs["absmax"])
    np.testing.assert_array_equal(jax.tree.map(jnp.asarray, kernel).merged().T, theirs["dense"])
    double = jax.tree.map(np.asarray, how(w_DF, "nf4-double"))
    np.testing.assert_array_equal(double.codes, kernel.codes)
    # A sum of theirs may have another order, and their kernel takes a neighbour near a midpoint.
    nested = floats(double.nested)
    np.testing.assert_allclose(nested, [theirs["mean"], *theirs["outer"]], rtol=1e-6)
    assert (theirs["inner"] == double.scale.T).mean() >= 0.9
    found = theirs["table"][double.scale.T] * nested[1] + nested[0]
    np.testing.assert_array_less(abs(found - theirs["absmax"]), 0.012 * nested[1])
    merged = jax.tree.map(jnp.asarray, double).merged().T
    dense = NF4[np.stack([kernel.codes.T >> 4, kernel.codes.T & 15], -1)].reshape(merged.shape)
    np.testing.assert_allclose(merged, dense * np.repeat(found, 64, axis=1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "wide"), [((300, 640), True), ((96, 256), False)])
def test_nf4_has_the_bits_of_bitsandbytes_itself(shape, wide):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    w_FD = torch.tensor(drawn(*shape)).to(torch.float32 if wide else torch.bfloat16)
    codes, state = functional.quantize_4bit(w_FD, quant_type="nf4")
    kernel = pack(w_FD.float().numpy().T, "nf4")
    np.testing.assert_array_equal(kernel.codes.T, codes.numpy().reshape(kernel.codes.T.shape))
    np.testing.assert_array_equal(floats(kernel.scale).T.ravel(), state.absmax.numpy().ravel())
    dense = jax.tree.map(jnp.asarray, kernel).dense(jnp.float32 if wide else jnp.bfloat16)
    theirs = functional.dequantize_4bit(codes, state).float().numpy()
    np.testing.assert_array_equal(np.asarray(dense, np.float32).T, theirs)


@pytest.mark.parametrize(
    ("kind", "group", "levels"), [("int8", None, 127), ("int8", 32, 127), ("int4", None, 7)]
)
def test_rounded_kernels_are_the_nearest_multiple_of_their_scale(kind, group, levels):
    w = drawn(D, F)
    kernel = pack(w, kind, group)
    size = group or (D if kind == "int8" else 64)
    blocks = w.astype(np.float64).reshape(-1, size, F)
    scale = abs(blocks).max(1, keepdims=True) / levels
    scale = scale.astype(jnp.bfloat16).astype(np.float64)
    dense = jax.tree.map(jnp.asarray, kernel).merged()
    np.testing.assert_allclose(dense, (np.rint(blocks / scale) * scale).reshape(D, F), rtol=1e-5)
    again = pack(np.asarray(dense), kind, group)
    jax.tree.map(np.testing.assert_array_equal, again, kernel)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(pack, static_argnums=(1, 2))(w, kind, group), kernel
    )


@pytest.mark.parametrize(
    ("kind", "most"), [("nf4", 0.57), ("nf4-double", 0.52), ("int8", 1.01), ("int4", 0.57)]
)
def test_bytes_of_a_weight(kind, most):
    kernel = jax.eval_shape(lambda: pack(jnp.zeros((2, 1024, 512)), kind))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kernel))
    assert 0.5 < size / (2 * 1024 * 512) <= most
    assert kernel.shape == (2, 1024, 512)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_parts_of_a_weight_are_read_as_they_are_cut(kind):
    w = drawn(3, D, F)
    whole, later = pack(w, kind), pack_later(w, kind)
    for name in ("codes", "scale", "nested"):
        part, unread = getattr(whole, name), getattr(later, name)
        if part is None:
            continue
        np.testing.assert_array_equal(np.asarray(unread), part)
        assert (unread.shape, unread.dtype) == (part.shape, part.dtype)
        rows = part.shape[1]
        # Cuts through a group too.
        index = (slice(1, 3), slice(rows // 4, rows // 2 + 1), slice(8, 32))[: part.ndim]
        np.testing.assert_array_equal(unread[index], part[index])


@pytest.mark.parametrize("product", [matmul, matmul_float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_and_its_gradient_are_those_of_the_dense_kernel(product, dtype):
    x, d_y = (jnp.asarray(drawn(*shape), dtype) for shape in ((N, D), (N, F)))
    kernel = jax.tree.map(jnp.asarray, pack(drawn(D, F), "nf4-double"))
    vjp = lambda k: jax.vjp(lambda x: product(x, k), x)  # noqa: E731
    (y, pull), (y_dense, pull_dense) = vjp(kernel), vjp(kernel.dense(dtype))
    np.testing.assert_array_equal(y, y_dense)
    assert y.dtype == y_dense.dtype
    d_y = d_y.astype(y.dtype)
    np.testing.assert_array_equal(pull(d_y)[0], pull_dense(d_y)[0])
    jvp = lambda k: jax.jvp(lambda x: product(x, k), (x,), (x,))[1]  # noqa: E731
    np.testing.assert_array_equal(jvp(kernel), jvp(kernel.dense(dtype)))


def temporaries(base, *, microbatches=1, unroll=1):
    """Bytes of a scanned stack's gradient of additions, besides arguments and results."""
    low = {"a": drawn(L, D, R), "b": drawn(L, R, D)}
    x = drawn(microbatches, N, D)

    def loss(low, base, x):
        def layer(x, parts):
            low, base = parts
            return x + jnp.tanh(matmul(x, LowRank(base, low["a"], low["b"], 2.0))), None

        return (jax.lax.scan(layer, x, (low, base), unroll=unroll)[0] ** 2).sum()

    def accumulated(low, base, x):
        def add(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(low, base, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, low), x)[0]

    compiled = jax.jit(accumulated).lower(low, base, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"microbatches": 3, "unroll": L}])
def test_nothing_dense_is_kept(options):
    """Neither for the backward pass nor, where layers are unrolled, from microbatch to microbatch,
    which would be L D D floats."""
    dense = jnp.asarray(drawn(L, D, D))
    kept = temporaries(dense, **options)
    assert temporaries(jax.tree.map(jnp.asarray, pack(dense, "nf4")), **options) <= 1.1 * kept


def test_low_rank_additions_over_a_packed_kernel_are_merged():
    w, a, b = drawn(L, D, F), drawn(L, D, R), drawn(L, R, F)
    base = pack(jnp.asarray(w), "nf4")
    merged = merge({"q": LowRank(base, jnp.asarray(a), jnp.asarray(b), 2.0)})["q"]
    np.testing.assert_allclose(merged, base.merged() + 2 * a @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "group"), [("nf4", None), ("int4", 3), ("int8", 64)])
def test_groups_that_do_not_fit_are_refused(kind, group):
    with pytest.raises(ValueError, match=f"has 96 inputs, of which {kind} shares a scale among"):
        pack(drawn(96, F), kind, group)
    assert pack(drawn(96, F), kind, 32).shape == (96, F)
