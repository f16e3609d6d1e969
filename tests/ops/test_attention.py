"""Attention against its definition: NumPy float64 for values, plain float64 JAX for gradients.

Shapes: B batch, T queries and keys, H query heads, G key heads, K features.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.jaxprs import float32_products
from jaxtrain.ops import attention as ops
from jaxtrain.ops import tiled
from jaxtrain.ops.attention import attention, choose
from jaxtrain.ops.mask import Mask
from jaxtrain.ops.per_device import obstacle, on_each_device
from jaxtrain.ops.splash import splash_attention
from jaxtrain.sharding.mesh import make_mesh


def definition(
    xp,
    q_BTHK,
    k_BTGK,
    v_BTGK,
    sinks_H=None,
    *,
    causal,
    segments_BT,
    window=None,
    leading=0,
    softcap=None,
    factors_BHTT=1.0,
):
    """The formula, keys and values repeated; ``xp`` is numpy or jax.numpy."""
    T, H, K = q_BTHK.shape[1:]
    k, v = (xp.repeat(x, H // x.shape[2], axis=2) for x in (k_BTGK, v_BTGK))
    scores = xp.einsum("bthk,bshk->bhts", q_BTHK, k) / K**0.5
    scores = scores if softcap is None else softcap * xp.tanh(scores / softcap)
    seen = xp.tril(xp.ones((T, T), bool))[None] if causal else xp.ones((1, T, T), bool)
    if window is not None:
        near = abs(xp.arange(T)[:, None] - xp.arange(T)) < window
        first = xp.arange(T) < leading
        seen = seen & (near | first | (first[:, None] & (not causal)))
    if segments_BT is not None:
        seen = seen & (segments_BT[:, :, None] == segments_BT[:, None, :])
    top = scores.max(-1, keepdims=True)
    weights = xp.where(seen[:, None], xp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks_H is not None:
        total = total + xp.exp(sinks_H[:, None, None] - top)
    return xp.einsum("bhts,bshk->bthk", factors_BHTT * weights / total, v)


def arrays(seed, *, B=2, T=7, H=4, G=2, K=4, documents=None):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, T, H, K))
    k, v = rng.standard_normal((2, B, T, G, K))
    segments = np.sort(rng.integers(0, documents, (B, T)), axis=1) if documents else None
    return q, k, v, segments


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 99),
    T=st.integers(1, 9),
    groups=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1)]),
    # A window, and how many are seen beyond it, see seen_by.
    causal=st.sampled_from([False, True, 1, 3, -2, -3, (2, 3), (-2, 1), (-3, 4)]),
    documents=st.sampled_from([None, 3]),
    softcap=st.sampled_from([None, 0.7]),
    block=st.sampled_from([1, 2, 4, None]),
)
def test_values_are_those_of_the_definition(seed, T, groups, causal, documents, softcap, block):
    H, G = groups
    q, k, v, segments = arrays(seed, T=T, H=H, G=G, documents=documents)
    seen = seen_by(causal) | {"softcap": softcap}
    run = jax.jit(functools.partial(masked, **seen, block=block))
    out = run(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), segments_BT=segments)
    expected = definition(np, q, k, v, **seen, segments_BT=segments)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def masked(
    q,
    k,
    v,
    sinks=None,
    *,
    block=None,
    softcap=None,
    segments_BT=None,
    dropout=0.0,
    rng=None,
    **seen,
):
    """Attention by the arguments of the definition, in tiles of ``block`` rows."""
    mask = Mask(segments=segments_BT, sinks=sinks, **seen)
    with tiled.tile_rows(block):
        return attention(q, k, v, mask, softcap=softcap, dropout=dropout, rng=rng)


def seen_by(causal):
    """The arguments of a case: a number is the window of causal attention, or below 0 of other."""
    causal, leading = causal if isinstance(causal, tuple) else (causal, 0)
    window = None if isinstance(causal, bool) else abs(causal)
    return {"causal": causal > 0, "window": window, "leading": leading}


@pytest.mark.parametrize(
    ("T", "S", "causal", "block"), [(7, 7, True, None), (9, 13, False, 3), (13, 10, False, 2)]
)
def test_a_bias_by_distance_and_other_keys_are_those_of_the_definition(T, S, causal, block):
    """Tiles that are written out, and a loop over them; values and all gradients."""
    r, H = np.random.default_rng(T), 4
    shapes = [(2, T, H, 4), (2, S, 2, 4), (2, S, 2, 4), (H, S + T - 1), (2, T, H, 4)]
    *args, w = (r.standard_normal(shape) for shape in shapes)
    segments, keys = np.ones((2, T), int), (np.arange(S) < np.array([[S], [S - 3]])).astype(int)
    keys = segments if causal else keys

    def ours(q, k, v, bias):
        mask = Mask(causal=causal, segments=segments, key_segments=keys, bias=bias)
        with tiled.tile_rows(block):
            return attention(q, k, v, mask, scale=1.0)

    def defined(q, k, v, bias):
        scores = jnp.einsum("bthk,bshk->bhts", q, jnp.repeat(k, 2, axis=2))
        scores += bias[:, np.arange(S) - np.arange(T)[:, None] + T - 1]
        seen = segments[:, :, None] == keys[:, None]
        seen = jnp.tril(seen) if causal else seen
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
        return jnp.einsum("bhts,bshk->bthk", weights, jnp.repeat(v, 2, axis=2))

    with jax.enable_x64(True):
        found, expected = (
            jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) * w).sum(), (0, 1, 2, 3)))(*args)
            for f in (ours, defined)
        )
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


def test_no_fused_kernel_takes_a_bias():
    shape = {"dtype": jnp.bfloat16, "head_dim": 64, "length": 128}
    mask = Mask(bias=jnp.ones((2, 255)))
    choice = ops._choose("auto", **shape, backend="tpu", mask=mask)
    assert str(choice) == "xla (splash needs attention without a bias)"
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"bias has shape \(2, 4\): give \(2, 7\)"):
        attention(q, q, q, Mask(bias=jnp.ones((2, 4))))
    with pytest.raises(ValueError, match=r"sinks have shape \(3,\): give \(2,\)"):
        attention(q, q, q, Mask(sinks=jnp.ones(3)))
    with pytest.raises(ValueError, match="key_segments needs segments"):
        attention(q, q, q, Mask(key_segments=jnp.ones((1, 4), int)))


@pytest.mark.parametrize(
    ("causal", "documents", "softcap", "sinks"),
    [
        (True, None, None, None),
        (True, 3, None, True),
        (False, None, 0.7, None),
        (-3, 2, None, None),
        ((2, 3), 2, 0.7, True),
        ((-2, 2), None, None, None),
    ],
)
def test_gradients_are_those_of_the_definition(causal, documents, softcap, sinks):
    q, k, v, segments = arrays(3, documents=documents)
    given = (q, k, v, *([np.array([0.5, -1.0, 2.0, 0.0])] if sinks else []))
    every = tuple(range(len(given)))
    with jax.enable_x64(True):

        def loss(function, *given):
            out = function(*given, **seen_by(causal), segments_BT=segments, softcap=softcap)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

        for block in (1, 3, 7):  # seven tiles make a loop, three are written out
            ours = functools.partial(masked, block=block)
            got = jax.jit(jax.grad(functools.partial(loss, ours), every))(*given)
            plain = functools.partial(definition, jnp)
            expected = jax.jit(jax.grad(functools.partial(loss, plain), every))(*given)
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == jnp.float64
                np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("block", [4, 2], ids=["written out", "in a loop"])
def test_dropout_drops_weights_and_the_backward_pass_draws_the_same(block):
    T, rate = 10, 0.3
    q, k, _, segments = arrays(4, T=T, K=T, documents=2)
    run = functools.partial(
        masked, segments_BT=segments, dropout=rate, rng=jax.random.key(1), block=block
    )
    with jax.enable_x64(True):
        # Values that are the identity show the weights themselves.
        identity = np.broadcast_to(np.eye(T)[:, None], k.shape)
        dropped = np.asarray(jax.jit(run)(q, k, identity)).transpose(0, 2, 1, 3)
        weights = definition(np, q, k, identity, causal=True, segments_BT=segments)
        seen = weights.transpose(0, 2, 1, 3) > 0
        factors = (dropped > 0) / (1 - rate)
        assert abs((dropped > 0).sum() / seen.sum() - (1 - rate)) < 0.1

        def loss(function, *qkv):
            out = function(*qkv)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

        plain = functools.partial(
            definition, jnp, causal=True, segments_BT=segments, factors_BHTT=factors
        )
        v = arrays(5, T=T, K=T)[2]
        got, expected = (
            jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(q, k, v)
            for f in (run, plain)
        )
        for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def two_layers(x_BTHK, segments_BT, *, block):
    """Nothing but attention, in a loop."""

    def layer(x_BTHK, _):
        k_BTHK = x_BTHK[:, :, :1]
        return masked(x_BTHK, k_BTHK, k_BTHK, segments_BT=segments_BT, block=block), None

    return jax.lax.scan(layer, x_BTHK, length=2)[0].sum()


@pytest.mark.parametrize("packed", [False, True])
def test_temporaries_of_long_rows_grow_linearly(packed):
    # In a loop over layers, ahead of which JAX computes whatever does not change in it: masks.
    def temp_bytes(T):
        x = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, T), jnp.int32) if packed else None
        gradient = jax.grad(functools.partial(two_layers, block=64))
        compiled = jax.jit(gradient).lower(x, segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    once, twice = temp_bytes(1024), temp_bytes(2048)
    assert twice < 2.1 * once
    # Tiles of scores, and beside them a dozen arrays of the queries' size and what two layers save.
    assert twice < 20 * 2048 * 2 * 8 * 4 + 12 * 2 * 64 * 64 * 4


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_short_rows_are_not_held_through_a_loop_over_layers(packed):
    q, _, _, segments = arrays(0, T=64, documents=3 if packed else None)
    gradient = jax.grad(functools.partial(two_layers, block=16))
    equations = jax.make_jaxpr(gradient)(q.astype(np.float32), segments).eqns
    loops = [equation for equation in equations if equation.primitive.name == "scan"]
    assert len(loops) == 2
    # The queries of both layers, and no rows of scores.
    assert max(x.aval.size for loop in loops for x in loop.invars) == 2 * q.size < 2 * 4 * 16 * 64


@pytest.mark.parametrize(
    ("causal", "documents", "groups", "mesh"),
    [
        (True, 3, (4, 2), {"data": 2, "tensor": 2}),
        (True, None, (2, 2), None),
        (False, 3, (2, 1), {"fsdp": 2}),
        (70, None, (4, 2), {"tensor": 4}),
        (-70, 3, (2, 1), None),
        (True, 3, (4, 2), {"pipe": 2, "fsdp": 1, "tensor": 4}),
    ],
)
def test_splash_is_the_definition(causal, documents, groups, mesh):
    (H, G), T = groups, 256
    q, k, v, segments = arrays(6, T=T, H=H, G=G, K=8, documents=documents)
    seen = seen_by(causal) | {"softcap": 0.7 if causal == 70 else None}

    def run(*qkvs):
        *qkv, segments_BT = qkvs
        on_one = functools.partial(splash_attention, softcap=seen["softcap"], interpret=True)
        return on_each_device(on_one, *qkv, Mask(segments=segments_BT, **seen_by(causal)))

    if mesh and "pipe" in mesh:
        # Rows go to the stages, as microbatches do.
        rows = jax.P("pipe")
        stages = {"in_specs": rows, "out_specs": rows, "axis_names": {"pipe"}}
        run = jax.shard_map(run, check_vma=False, **stages)
    plain = functools.partial(definition, jnp, **seen, segments_BT=segments)

    def loss(function, *qkv):
        out = function(*qkv)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    def gradient(function):
        loss_of = functools.partial(loss, function)
        return jax.jit(jax.value_and_grad(loss_of, (0, 1, 2), has_aux=True))

    with jax.enable_x64(True):
        expected = gradient(plain)(q, k, v)
    size = math.prod((mesh or {}).values())
    placed = make_mesh(**mesh, devices=jax.devices()[:size]) if mesh else None
    with jax.set_mesh(placed) if mesh else contextlib.nullcontext():
        got = gradient(lambda *qkv: run(*qkv, segments))(
            *(jnp.asarray(x, jnp.float32) for x in (q, k, v))
        )
    for a, b in zip(*(jax.tree.leaves((x[0][1], x[1])) for x in (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * T**0.5)


def test_kernels_take_what_the_mesh_splits_evenly():
    with jax.set_mesh(make_mesh(data=2, tensor=2, context=2)):
        assert obstacle(2, 4) is None
        assert "query heads that mesh axes tensor x context of size 4" in str(obstacle(2, 6))
    with jax.set_mesh(make_mesh(data=2, tensor=4)):
        assert obstacle(2, 4) is None
        assert "rows that mesh axes data of size 2" in str(obstacle(3, 4))
        assert "query heads that mesh axes tensor of size 4" in str(obstacle(2, 6))


def test_low_precision_multiplies_in_its_own_dtype_and_accumulates_in_float32():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays(0, T=64, K=64)[:3])
    exact = definition(
        np, *(np.asarray(x, np.float64) for x in (q, k, v)), causal=True, segments_BT=None
    )
    out = attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=0.02)
    gradient = jax.grad(lambda qkv: attention(*qkv).astype(jnp.float32).sum())
    assert float32_products(gradient, (q, k, v)) == []
    looped = functools.partial(masked, block=8)
    np.testing.assert_allclose(np.asarray(looped(q, k, v), np.float64), exact, atol=0.02)
    in_loop = jax.grad(lambda qkv: looped(*qkv).astype(jnp.float32).sum())
    assert float32_products(in_loop, (q, k, v)) == []
    text = str(jax.make_jaxpr(gradient)((q, k, v)))
    # Forward 2; backward the scores again, and four gradients; all accumulate in float32.
    assert text.count("dot_general[") == text.count("preferred_element_type=float32") == 7


def test_extreme_scores_stay_finite():
    q = jnp.full((1, 3, 1, 2), 1e18)
    out, grad = jax.value_and_grad(lambda q: masked(q, -q, q, segments_BT=jnp.eye(3)[:1]).sum())(q)
    assert jnp.isfinite(out)
    assert jnp.isfinite(grad).all()


def test_it_maps_over_a_further_axis():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays(1)[:3])
    several = jax.vmap(attention, in_axes=(0, None, None))(jnp.stack([q, 2 * q]), k, v)
    np.testing.assert_allclose(several[1], attention(2 * q, k, v), rtol=1e-5, atol=1e-6)


def kept_for_backward(*, T=16, K=4, dtype=jnp.float32):
    """Elements that the backward pass keeps, in multiples of the queries'."""
    q, k, v = (jnp.asarray(x, dtype) for x in arrays(1, T=T, K=K)[:3])
    return sum(x.size for x in jax.tree.leaves(jax.vjp(attention, q, k, v)[1])) / q.size


def test_weights_are_kept_on_a_cpu_up_to_a_bound_in_the_queries(monkeypatch):
    # Queries, and half as many keys and values; then the weights, T / K times the queries.
    assert kept_for_backward(T=16) == 2 + 4
    # Above the bound the result and the log-sum-exp instead, which has one number per K.
    assert kept_for_backward(T=17) == 2 + 1 + 1 / 4
    assert kept_for_backward(T=16, dtype=jnp.bfloat16) == 2 + 1 + 1 / 4
    # Of four causal tiles, the fourth part of the keys, then two, three and four.
    assert kept_for_backward(T=256, K=64) == 2 + (1 + 2 + 3 + 4) / 16 * 4
    for accelerator in ("gpu", "tpu"):
        monkeypatch.setattr(tiled, "platform", lambda accelerator=accelerator: accelerator)
        assert kept_for_backward(T=16) == 2 + 1 + 1 / 4


def test_a_rematerialised_block_makes_the_weights_from_the_saved_log_sum_exp():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays(1, T=16)[:3])
    saved = jax.checkpoint_policies.save_only_these_names(*tiled.SAVED)

    def loss(q):
        return jax.checkpoint(attention, policy=saved)(q, k, v).sum()

    backward = str(jax.make_jaxpr(jax.vjp(loss, q)[1])(jnp.float32(1)))
    # The scores again, and the gradients of weights, queries, keys and values.
    assert (backward.count("dot_general["), backward.count(" exp ")) == (5, 1)
    assert "reduce_max" not in backward


def test_nothing_of_size_t_times_s_is_kept_for_the_backward_pass_of_long_rows():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays(1, T=128)[:3])
    kept = jax.tree.leaves(jax.vjp(attention, q, k, v)[1])
    assert max(x.size for x in kept) == q.size < 128 * 128


def test_the_choice_is_by_backend_dtype_and_width():
    assert choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="gpu") == "cudnn"
    assert choose("auto", dtype=jnp.float16, head_dim=128, backend="gpu") == "cudnn"
    assert choose("auto", dtype=jnp.float32, head_dim=64, backend="gpu") == "xla"
    assert choose("auto", dtype=jnp.bfloat16, head_dim=36, backend="gpu") == "xla"
    assert choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="tpu", length=384) == "splash"
    assert choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="tpu", length=200) == "xla"
    assert choose("auto", dtype=jnp.float32, head_dim=20, backend="tpu") == "splash"
    for backend in ("gpu", "tpu"):
        assert choose("auto", dtype="bfloat16", head_dim=64, backend=backend, dropout=0.1) == "xla"
    assert choose("xla", dtype=jnp.bfloat16, head_dim=64, backend="gpu") == "xla"
    assert choose("cudnn", dtype=jnp.bfloat16, head_dim=64, backend="gpu") == "cudnn"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (dict(implementation="flash", dtype="bfloat16", backend="gpu"), "'flash' is not one of"),
        (dict(implementation="cudnn", dtype="bfloat16", backend="cpu"), "backend is 'cpu'"),
        (dict(implementation="cudnn", dtype="float16", backend="tpu"), "NVIDIA GPU, and the back"),
        (dict(implementation="cudnn", dtype="float32", backend="gpu"), "queries are float32"),
        (dict(implementation="cudnn", dtype="float16", backend="gpu", head_dim=12), "it is 12"),
        (dict(implementation="cudnn", dtype="float16", backend="gpu", dropout=0.1), "rate is 0.1"),
        (dict(implementation="splash", dtype="float32", backend="gpu"), "a TPU, and the backend"),
        (dict(implementation="cudnn", dtype="float16", backend="gpu", softcap=5.0), "it is 5.0"),
        (
            dict(implementation="cudnn", dtype="float16", backend="gpu", mask=Mask(False, 9)),
            "it sees 8 to both sides",
        ),
        (dict(implementation="splash", dtype="float32", backend="tpu", length=64), "it is 64"),
        (dict(implementation="splash", dtype="float32", backend="tpu", dropout=0.1), "rate is 0.1"),
    ],
)
def test_a_choice_that_cannot_run_is_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        choose(**({"head_dim": 64} | settings_))


def test_a_fall_from_the_fused_kernel_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(ops, "platform", lambda: "tpu")
    ops._say_once.cache_clear()
    q, k, v, _ = arrays(0)
    for _ in range(2):
        jax.eval_shape(attention, q, k, v)
    q = arrays(0, T=128)[0]
    jax.eval_shape(functools.partial(attention, mask=Mask(causal=False)), q, k, v)
    assert [record.message for record in caplog.records] == [
        "attention: xla, because splash needs rows whose length is a multiple of 128, and it is 7",
        "attention: xla, because splash needs as many keys as queries (128), and they are 7",
    ]


def test_cudnn_gets_the_same_masks(monkeypatch):
    monkeypatch.setattr(ops, "_choose_here", lambda *_: "cudnn")
    plain = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **options):
        assert implementation == "cudnn"
        return plain(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v, segments = arrays(2, documents=3)
    for window in (None, 2):
        seen = {"window": window, "segments_BT": segments}
        out = masked(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), **seen)
        expected = definition(np, q, k, v, causal=True, **seen)
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, _ = arrays(0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"as many keys \(6\) as queries \(7\)"):
        attention(q, k[:, :6], v[:, :6])
    with pytest.raises(ValueError, match="window=2 must be at least 1, and needs as many k"):
        attention(q, k[:, :6], v[:, :6], Mask(causal=False, window=2))
