"""The gated delta rule against its recurrence, and its gradients, in NumPy's float64.

Shapes: B batch, T positions, H heads, K features of keys, V of values, W taps, F features.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.ops.delta import causal_convolution, gated_delta_rule
from jaxtrain.sharding.placement import tracing_on
from tests.ops.test_context import collectives

H, K, V = 2, 8, 6


def drawn(T, *, decay=1.0, beta=0.0, B=2, seed=0):
    """Inputs of float64: decays of about exp(-decay), shares about the sigmoid of ``beta``."""
    r = np.random.default_rng(seed)
    q, k = (r.normal(size=(B, T, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = 1 / (1 + np.exp(-beta - r.normal(size=(B, T, H))))
    log_decay = -decay * np.exp(2 * r.normal(size=(B, T, H)))
    return (q, k, r.normal(size=(B, T, H, V)), beta, log_decay), r.normal(size=(B, H, K, V))


def numbers(T, B=2, seed=0):
    """Documents of random lengths, and padding behind the last one of a row."""
    found = np.sort(np.random.default_rng(seed).integers(1, 6, (B, T)), axis=1)
    found[0, T - T // 8 :] = 0
    return found


def recurrence(inputs, S, segments, dy, dS):
    """The definition, position by position: result, last state, and all gradients."""
    q, k, v, beta, g = inputs
    T, kept, y = q.shape[1], [], np.zeros_like(v)
    for t in range(T):
        new = segments[:, t] != segments[:, t - 1] if t else np.zeros(len(q), bool)
        a = np.exp(g[:, t]) * ~new[:, None]
        S = a[..., None, None] * S
        miss = v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t])
        kept.append((S, miss, a))
        S = S + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][..., None] * miss)
        y[:, t] = np.einsum("bhkv,bhk->bhv", S, q[:, t])
    last, found = S, [np.zeros_like(x) for x in inputs]
    for t in reversed(range(T)):
        decayed, miss, a = kept[t]
        u = beta[:, t][..., None] * miss
        S = decayed + np.einsum("bhk,bhv->bhkv", k[:, t], u)
        dS = dS + np.einsum("bhk,bhv->bhkv", q[:, t], dy[:, t])
        du = np.einsum("bhkv,bhk->bhv", dS, k[:, t])
        dv = beta[:, t][..., None] * du
        found[0][:, t] = np.einsum("bhkv,bhv->bhk", S, dy[:, t])
        found[1][:, t] = np.einsum("bhkv,bhv->bhk", dS, u)
        found[1][:, t] -= np.einsum("bhkv,bhv->bhk", decayed, dv)
        found[2][:, t], found[3][:, t] = dv, (du * miss).sum(-1)
        dS = dS - np.einsum("bhk,bhv->bhkv", k[:, t], dv)
        found[4][:, t] = (dS * decayed).sum((-1, -2))
        dS = a[..., None, None] * dS
    return y, last, (*found, dS)


def ours(inputs, state, segments, dy, dS, dtype="float32", **how):
    def value(*args):
        *rows, S = args
        how_BT = {"segments_BT": segments} | how
        y, S = gated_delta_rule(*rows, state_BHKV=S, **how_BT)
        return (y * dy.astype(y.dtype)).sum() + (S * dS).sum(), (y, S)

    args = [jnp.asarray(x, dtype) for x in (*inputs, state)]
    (_, (y, S)), found = jax.jit(jax.value_and_grad(value, range(6), has_aux=True))(*args)
    return y, S, found


def cotangents(T, B=2):
    r = np.random.default_rng(9)
    return r.normal(size=(B, T, H, V)), r.normal(size=(B, H, K, V))


# Rows of no multiple of a chunk; weak and strong decays, shares of nearly 0 and 1.
CASES = [(37, 0.02, 0.0, 8), (11, 20.0, 8.0, 8)]
MORE = [(150, 0.02, 0.0, 64), (1, 1.0, 0.0, 64), (100, 1e-5, 8.0, 32), (130, 1.0, -8.0, 64)]


@pytest.mark.parametrize(
    ("T", "decay", "beta", "chunk"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE],
)
def test_values_and_gradients_are_those_of_the_recurrence(T, decay, beta, chunk):
    inputs, state = drawn(T, decay=decay, beta=beta)
    segments, of = numbers(T), cotangents(T)
    y, S, found = ours(inputs, state, segments, *of, chunk=chunk)
    y_64, S_64, found_64 = recurrence(inputs, state, segments, *of)
    for a, b in zip((y, S, *found), (y_64, S_64, *found_64), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=0)


@pytest.mark.slow
def test_bfloat16_is_rounded_once():
    """Inputs of 8 bits are taken as they are, and results are rounded to as many."""
    inputs, state = drawn(150, decay=0.1)
    inputs = [np.array(jnp.asarray(x, "bfloat16"), "f8") for x in inputs]
    state = np.array(jnp.asarray(state, "bfloat16"), "f8")
    of = [np.array(jnp.asarray(x, "bfloat16"), "f8") for x in cotangents(150)]
    y, _, found = ours(inputs, state, numbers(150), *of, dtype="bfloat16")
    y_64, _, found_64 = recurrence(inputs, state, numbers(150), *of)
    assert y.dtype == "bfloat16"
    for a, b in zip((y, *found), (y_64, *found_64), strict=True):
        np.testing.assert_allclose(np.float64(a), b, rtol=2**-8, atol=1e-5 * np.abs(b).max())


def test_chunks_continue_a_state_and_so_does_a_single_position():
    inputs, state = drawn(19, decay=0.1)
    rows = [jnp.float32(x) for x in inputs]
    rule = jax.jit(functools.partial(gated_delta_rule, chunk=4))
    whole, last = rule(*rows, state_BHKV=state)
    S, parts = state, []
    for cut in (slice(0, 11), slice(11, 18), slice(18, 19)):
        y, S = rule(*(x[:, cut] for x in rows), state_BHKV=S)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-6)
    np.testing.assert_allclose(S, last, atol=2e-6)


def test_a_chunk_is_a_power_of_two():
    inputs, _ = drawn(8)
    with pytest.raises(ValueError, match="chunk is 48: its system is halved again and again; use"):
        gated_delta_rule(*inputs, chunk=48)


def test_the_convolution_sees_its_own_document_and_what_is_given_before_it():
    r = np.random.default_rng(0)
    x, kernel, before = (r.normal(size=size) for size in ((2, 23, 5), (4, 5), (2, 3, 5)))
    segments = numbers(23)
    found = causal_convolution(x, kernel, segments_BT=segments, before_BWF=before)
    past, of = np.concatenate([before, x], 1), np.pad(segments, ((0, 0), (3, 0)), "edge")
    for b, t in np.ndindex(2, 23):
        taps = [kernel[i] * past[b, t + i] for i in range(4) if of[b, t + i] == segments[b, t]]
        np.testing.assert_allclose(found[b, t], sum(taps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "context": 2, "tensor": 2},
        pytest.param({"context": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "context": 4}, marks=pytest.mark.slow),
    ],
)
def test_rows_that_are_split_are_those_of_one_device(sizes):
    """Values and gradients; what is sent are states, ends of parts, and numbers of documents."""
    T, C = 64, 4
    inputs, state = drawn(T, decay=1e-3)
    of, segments = cotangents(T), numbers(T)
    segments[1] = 1  # one document, whose end knows of what is before the row
    kernel = jnp.float32(np.random.default_rng(3).normal(size=(4, H)))

    def loss(q, k, v, beta, g, state):
        beta = 0.1 * causal_convolution(beta, kernel, segments_BT=segments)
        how = {"segments_BT": segments, "state_BHKV": state, "chunk": C}
        y, S = gated_delta_rule(q, k, v, beta, g, **how)
        return (y * of[0]).sum() + (S * of[1]).sum(), (y, S)

    args = [jnp.float32(x) for x in (*inputs, state)]
    gradient = jax.value_and_grad(loss, range(6), has_aux=True)
    (_, alone), expected = jax.jit(gradient)(*args)
    with tracing_on(jt.make_mesh(**sizes), None):
        compiled = jax.jit(gradient).lower(*args).compile()
        (_, split), found = compiled(*args)
    for a, b in zip((*split, *found), (*alone, *expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=0)
    mine = 2 * H // sizes.get("data", 1) // sizes.get("tensor", 1)
    sent = collectives(compiled)
    assert sent.keys() == {"all-gather"}
    assert max(sent["all-gather"]) == sizes["context"] * mine * K * (K + V)
