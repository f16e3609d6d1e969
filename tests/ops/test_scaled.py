"""Products of scaled operands against their formats' definitions, in NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.models import decoder
from jaxtrain.ops import scaled
from jaxtrain.ops.linear import matmul
from jaxtrain.ops.scaled import RECIPES, Scaled, scaled_product
from jaxtrain.tree import named_leaves

N, D, F = 64, 96, 48
E4M3 = ml_dtypes.float8_e4m3fn
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of e2m1


def draw(shape, seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)


def operands():
    return draw((N, D), 0), draw((D, F), 1), draw((N, F), 2)


def by_row(x_MK, dtype=E4M3):
    scale = np.abs(x_MK).max(1, keepdims=True) / np.float32(ml_dtypes.finfo(dtype).max)
    return (x_MK / scale).astype(dtype).astype(np.float64) * scale


def by_tensor(x_MK, dtype=E4M3):
    return by_row(x_MK.reshape(1, -1), dtype).reshape(x_MK.shape)


def by_32(x_MK):
    out = np.zeros(x_MK.shape)
    for m, k in np.ndindex(len(x_MK), -(-x_MK.shape[1] // 32)):
        block = x_MK[m, 32 * k : 32 * k + 32].astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.abs(block).max() / 448))
        out[m, 32 * k : 32 * k + 32] = (block / scale).astype(E4M3).astype(np.float64) * scale
    return out


def by_16(x_MK, rows=1):
    out, tensor = np.zeros(x_MK.shape), np.abs(x_MK).max() / np.float32(6 * 448)
    for m, k in np.ndindex(len(x_MK) // rows, x_MK.shape[1] // 16):
        place = slice(rows * m, rows * (m + 1)), slice(16 * k, 16 * k + 16)
        scale = np.float32(np.abs(x_MK[place]).max() / np.float32(6) / tensor).astype(E4M3)
        unit = np.abs(x_MK[place]) / (np.float32(scale) * tensor)
        nearest = GRID[np.abs(GRID - np.minimum(unit, 6)[..., None]).argmin(-1)]
        out[place] = np.sign(x_MK[place]) * nearest * np.float32(scale) * tensor
    return out


@pytest.mark.parametrize(
    ("recipe", "of_x", "of_w", "of_dy"),
    [
        ("fp8", by_row, by_row, by_row),
        (
            "fp8_tensor",
            by_tensor,
            by_tensor,
            functools.partial(by_tensor, dtype=ml_dtypes.float8_e5m2),
        ),
        ("mxfp8", by_32, by_32, by_32),
        pytest.param(
            "nvfp4", by_16, functools.partial(by_16, rows=16), None, marks=pytest.mark.slow
        ),
    ],
)
def test_each_product_is_that_of_operands_rounded_by_the_formats_definition(
    recipe, of_x, of_w, of_dy
):
    x, w, dy = operands()
    y, pullback = jax.vjp(functools.partial(matmul), jnp.asarray(x), Scaled(jnp.asarray(w), recipe))
    dx, dw = pullback(jnp.asarray(dy))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4)
    close(y, of_x(x) @ of_w(w.T).T)
    if recipe == "fp8":
        close(dw.base, x.T.astype(np.float64) @ dy)
    if of_dy is not None:
        close(dx, of_dy(dy) @ of_w(w).T)
    if recipe in ("fp8_tensor", "mxfp8"):
        close(dw.base, of_x(x.T) @ of_dy(dy.T).T)


@pytest.mark.slow
def test_four_bits_are_rounded_up_as_often_as_a_value_is_near_and_the_transform_cancels_out():
    x = jnp.asarray(np.tile(np.linspace(-6, 6, 97), (512, 1)), jnp.float32)
    scale = jnp.asarray(draw((512, 1), 3))
    found = np.asarray(scaled._e2m1(x, scaled._uniform(x.shape, scale)))
    grid = np.concatenate([-GRID[:0:-1], GRID])
    assert set(np.unique(found)) <= set(grid)
    above = np.searchsorted(grid, x[0], side="left").clip(1)
    assert (np.abs(found - x) < np.diff(grid)[above - 1]).all()  # a neighbour, never another
    np.testing.assert_allclose(found.mean(0), x[0], atol=0.2)  # 4.5 deviations of 512 of them
    assert abs((found - x).mean()) < 0.01
    turn = scaled._hadamard(16)
    np.testing.assert_allclose(turn @ turn.T, np.eye(16), atol=1e-12)
    x, w, dy = operands()
    _, pullback = jax.vjp(
        functools.partial(scaled_product, "nvfp4"), jnp.asarray(x), jnp.asarray(w)
    )
    for found, exact in zip(pullback(jnp.asarray(dy)), (dy @ w.T, x.T @ dy), strict=True):
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.25  # 12 dB


@pytest.mark.parametrize("recipe", RECIPES)
def test_sums_before_their_scales_overflow_no_float16_on_a_gpu(recipe, monkeypatch):
    monkeypatch.setattr(scaled, "platform", lambda: "gpu")
    x, w, dy = operands()
    given = (jnp.asarray(a, jnp.float16) for a in (x, w))
    y, pullback = jax.vjp(functools.partial(scaled_product, recipe), *given)
    all_found = (y, *pullback(jnp.asarray(dy, jnp.float16)))
    for found, exact in zip(all_found, (x @ w, dy @ w.T, x.T @ dy), strict=True):
        assert found.dtype == jnp.float16
        found = np.float32(found)
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.25


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_what_is_not_finite_stay_so(recipe):
    x, w, _ = operands()
    x[3] = 0
    assert not np.asarray(scaled_product(recipe, jnp.zeros((N, D)), jnp.asarray(w))).any()
    y = np.asarray(scaled_product(recipe, jnp.asarray(x), jnp.asarray(w)))
    assert np.isfinite(y).all()
    assert not y[3].any()
    x[5, 7] = np.inf
    y = np.asarray(scaled_product(recipe, jnp.asarray(x), jnp.asarray(w)))
    assert not np.isfinite(y[5]).any()  # so that a spoilt step is seen


@pytest.mark.parametrize(
    "recipe",
    ["fp8", "mxfp8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp8_tensor", "nvfp4"))],
)
def test_rows_near_the_least_normal_number_are_rounded_and_neither_nan_nor_0(recipe):
    x, w, dy = (np.abs(a).clip(0.5, 1) for a in operands())
    x[3, :8], w = 0, np.float32(1e3) * w

    @jax.jit
    def run(x, w, dy):
        y, pullback = jax.vjp(functools.partial(scaled_product, recipe), x, w)
        return y, *pullback(dy)

    def close(result, exact):
        assert np.linalg.norm(np.float64(result) - exact) / np.linalg.norm(exact) < 0.15

    tiny, small = np.float32(1e-36), np.float32(1e-18)
    y, dx, _ = run(tiny * x, w, tiny * dy)
    # A scale of 1e-21 is a number, and the product of two is none.
    *_, dw = run(small * x, w, small * dy)
    x, w, dy = map(np.float64, (x, w, dy))
    close(y, 1e-36 * x @ w)
    close(dx, 1e-36 * dy @ w.T)
    close(dw, 1e-36 * x.T @ dy)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scale_of_a_split_tensor_is_that_of_the_whole(recipe):
    mesh = jt.make_mesh(data=2, fsdp=2, tensor=2)
    x, w, dy = map(jnp.asarray, operands())

    def run(x, w, dy):
        y, pullback = jax.vjp(functools.partial(scaled_product, recipe), x, w)
        return (y, *pullback(dy))

    specs = P(("data", "fsdp")), P("fsdp", "tensor"), P(("data", "fsdp"), "tensor")
    split = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w, dy), specs, strict=True)
    ]
    for found, alone in zip(jax.jit(run)(*split), jax.jit(run)(x, w, dy), strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-4)


def test_a_policy_rounds_kernels_of_layers_under_their_old_paths():
    config = decoder.DecoderConfig(vocab_size=64, seq_len=8, layers=2, width=32, heads=2)
    params = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(0))
    policy = jt.Policy.named("fp8")
    cast = jax.eval_shape(policy.cast_to_compute, params)
    assert named_leaves(cast).keys() == named_leaves(params).keys()
    is_scaled = lambda x: isinstance(x, Scaled)  # noqa: E731
    kernels = [x for x in jax.tree.leaves(cast, is_leaf=is_scaled) if is_scaled(x)]
    assert len(kernels) == 6  # q, k, v, out, up, down; neither tokens nor norms
    assert {x.base.dtype for x in kernels} == {jnp.dtype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="`recipe` is 'fp7': use one of fp8, "):
        jt.Policy(recipe="fp7")
    with pytest.raises(ValueError, match="'conv', which finds no kernel for fp8 among blocks/attn"):
        jax.eval_shape(jt.Policy(recipe="fp8", recipe_in="conv").cast_to_compute, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 4, "fsdp": 2},
        {"pipe": 2, "data": 2, "tensor": 2},
    ],
)
def test_rows_of_eight_bits_train_alike_on_every_mesh(layout):
    """In float32, in which rounding seldom falls to the other side."""
    config = decoder.DecoderConfig(vocab_size=64, seq_len=16, layers=2, width=32, heads=2)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((16, 16), "f")}
    batch |= {"segments": np.ones((16, 16), int), "positions": np.tile(np.arange(16), (16, 1))}
    optimizer = jt.make_optimizer("sgd", learning_rate=1.0, clip_norm=None, weight_decay=0.0)
    policy, found = jt.Policy(recipe="fp8"), []
    for sizes, devices in (({}, jax.devices()[:1]), (layout, jax.devices())):
        mesh = jt.make_mesh(**sizes, devices=devices)
        init = functools.partial(decoder.init, config)
        given = {"mesh": mesh, "rules": decoder.RULES}
        state = jt.init_state(init, optimizer, jax.random.key(0), **given)
        before = jax.device_get(state.params)
        if mesh.shape["pipe"] > 1:
            given_to = {"mesh": mesh, "microbatches": 4, "policy": policy}
            step = jt.build_update(jt.pipeline(decoder.stages(config), **given_to), optimizer)
        else:
            loss = jt.loss_from_stages(decoder.stages(config))
            own = {} if "tensor" in sizes else {"gather": "step"}
            if own and sizes:
                own["gradient_shardings"] = jax.tree.map(lambda x: x.sharding, state.params)
            step = jt.build_train_step(loss, optimizer, policy=policy, accumulate=2, **own)
        state, metrics = jt.compile_step(step, state, batch, **given)(state, batch)
        moved = jax.tree.map(np.subtract, before, jax.device_get(state.params))
        found.append((float(metrics["loss"]), named_leaves(moved)))
    (alone, expected), (split, gradients) = found
    assert abs(split - alone) < 1e-4
    largest = max(map(np.linalg.norm, expected.values()))
    for name, gradient in gradients.items():  # that of k's bias is 0 but for rounding
        size = max(np.linalg.norm(expected[name]), 1e-3 * largest)
        assert np.linalg.norm(gradient - expected[name]) / size < 3e-3, name
