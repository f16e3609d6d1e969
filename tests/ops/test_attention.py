"""Attention against its definition: NumPy float64 for values, plain float64 JAX for gradients.

Shapes: B batch, T queries and keys, H query heads, G key heads, K features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.ops import attention as ops
from jaxtrain.ops.attention import attention, cached_attention, choose
from jaxtrain.precision import float32_products


def definition(xp, q_BTHK, k_BTGK, v_BTGK, *, causal, segments_BT):
    """The formula, keys and values repeated; ``xp`` is numpy or jax.numpy."""
    T, H, K = q_BTHK.shape[1:]
    k, v = (xp.repeat(x, H // x.shape[2], axis=2) for x in (k_BTGK, v_BTGK))
    scores = xp.einsum("bthk,bshk->bhts", q_BTHK, k) / K**0.5
    seen = xp.tril(xp.ones((T, T), bool))[None] if causal else xp.ones((1, T, T), bool)
    if segments_BT is not None:
        seen = seen & (segments_BT[:, :, None] == segments_BT[:, None, :])
    weights = xp.where(seen[:, None], xp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    return xp.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v)


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
    causal=st.booleans(),
    documents=st.sampled_from([None, 3]),
    block=st.sampled_from([1, 2, 4, None]),
)
def test_values_are_those_of_the_definition(seed, T, groups, causal, documents, block):
    H, G = groups
    q, k, v, segments = arrays(seed, T=T, H=H, G=G, documents=documents)
    run = jax.jit(functools.partial(attention, causal=causal, block=block))
    out = run(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), segments_BT=segments)
    expected = definition(np, q, k, v, causal=causal, segments_BT=segments)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [None, 3])
def test_gradients_are_those_of_the_definition(causal, documents):
    q, k, v, segments = arrays(3, documents=documents)
    with jax.enable_x64(True):

        def loss(function, *qkv):
            out = function(*qkv, causal=causal, segments_BT=segments)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

        for block in (3, 7):
            tiled = functools.partial(attention, block=block)
            got = jax.jit(jax.grad(functools.partial(loss, tiled), (0, 1, 2)))(q, k, v)
            plain = functools.partial(definition, jnp)
            expected = jax.jit(jax.grad(functools.partial(loss, plain), (0, 1, 2)))(q, k, v)
            for a, b in zip(got, expected, strict=True):
                assert a.dtype == jnp.float64
                np.testing.assert_allclose(a, b, atol=1e-12)


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
    text = str(jax.make_jaxpr(gradient)((q, k, v)))
    # Forward 2; backward the scores again, and four gradients; all accumulate in float32.
    assert text.count("dot_general[") == text.count("preferred_element_type=float32") == 7


def test_extreme_scores_stay_finite():
    q = jnp.full((1, 3, 1, 2), 1e18)
    out, grad = jax.value_and_grad(lambda q: attention(q, -q, q, segments_BT=jnp.eye(3)[:1]).sum())(
        q
    )
    assert jnp.isfinite(out)
    assert jnp.isfinite(grad).all()


def test_it_maps_over_a_further_axis():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays(1)[:3])
    several = jax.vmap(attention, in_axes=(0, None, None))(jnp.stack([q, 2 * q]), k, v)
    np.testing.assert_allclose(several[1], attention(2 * q, k, v), rtol=1e-5, atol=1e-6)


def test_nothing_of_size_t_times_s_is_kept_for_the_backward_pass():
    q, k, v = (jnp.asarray(x, jnp.float32) for x in arrays(1, T=128)[:3])
    kept = jax.tree.leaves(jax.vjp(attention, q, k, v)[1])
    assert max(x.size for x in kept) == q.size < 128 * 128


def test_cached_attention_is_the_last_row_of_the_whole():
    q, k, v, _ = arrays(5, B=3)
    positions = np.array([0, 3, 6])
    whole = definition(np, q, k, v, causal=True, segments_BT=None)
    k, v = (jnp.asarray(x.transpose(0, 2, 1, 3), jnp.float32) for x in (k, v))
    rows = np.arange(3)
    last = jnp.asarray(q[rows, positions], jnp.float32)
    out = cached_attention(last, k, v, positions_B=jnp.asarray(positions))
    np.testing.assert_allclose(out, whole[rows, positions], atol=2e-6)


def test_the_choice_is_by_backend_dtype_and_width():
    assert choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="gpu") == "cudnn"
    assert choose("auto", dtype=jnp.float16, head_dim=128, backend="gpu") == "cudnn"
    assert choose("auto", dtype=jnp.float32, head_dim=64, backend="gpu") == "xla"
    assert choose("auto", dtype=jnp.bfloat16, head_dim=36, backend="gpu") == "xla"
    assert choose("auto", dtype=jnp.bfloat16, head_dim=64, backend="tpu") == "xla"
    assert choose("xla", dtype=jnp.bfloat16, head_dim=64, backend="gpu") == "xla"
    assert choose("cudnn", dtype=jnp.bfloat16, head_dim=64, backend="gpu") == "cudnn"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (dict(implementation="flash", dtype="bfloat16", backend="gpu"), "'flash' is not one of"),
        (dict(implementation="cudnn", dtype="bfloat16", backend="cpu"), "backend is 'cpu'"),
        (dict(implementation="cudnn", dtype="float32", backend="gpu"), "queries are float32"),
        (dict(implementation="cudnn", dtype="float16", backend="gpu", head_dim=12), "it is 12"),
    ],
)
def test_a_choice_that_cannot_run_is_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        choose(**({"head_dim": 64} | settings_))


def test_cudnn_gets_the_same_masks(monkeypatch):
    monkeypatch.setattr(ops, "_choose_here", lambda *_, **__: "cudnn")
    plain = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **options):
        assert implementation == "cudnn"
        return plain(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v, segments = arrays(2, documents=3)
    out = attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), segments_BT=segments)
    expected = definition(np, q, k, v, causal=True, segments_BT=segments)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v, _ = arrays(0)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"as many keys \(6\) as queries \(7\)"):
        attention(q, k[:, :6], v[:, :6])
