"""Attention to a cache against the definition in NumPy, whole rows at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.cached import Tiles, chunk_attention
from tests.ops.test_attention import arrays, definition

SIZE = 4


def tiles_of(k_BTGK, v_BTGK, *, end):
    """A cache whose positions from each row's ``end`` on hold what was there before."""
    stale = np.arange(k_BTGK.shape[1]) >= np.asarray(end)[:, None]
    k, v = (
        jnp.asarray(np.where(stale[..., None, None], 1e4, x).swapaxes(1, 2), jnp.float32)
        for x in (k_BTGK, v_BTGK)
    )

    def read(t):
        return tuple(jax.lax.dynamic_slice_in_dim(x, t * SIZE, SIZE, axis=2) for x in (k, v))

    return Tiles(SIZE, read)


def chunk(starts, C, **form):
    """Returns the attention of C positions from each row's start on, and that of whole rows."""
    q, k, v, _ = arrays(5, B=len(starts), T=16)
    at = np.array(starts)[:, None] + np.arange(C)
    rows = np.arange(len(starts))[:, None]
    own = [jnp.asarray(x[rows, at], jnp.float32) for x in (q, k, v)]
    own[1:] = [x.swapaxes(1, 2) for x in own[1:]]
    tiles = tiles_of(k, v, end=starts)
    found = jax.jit(lambda *x: chunk_attention(*x, jnp.array(starts), tiles, **form))(*own)
    whole = definition(np, q, k, v, causal=True, segments_BT=None, **form)
    return np.asarray(found), whole[rows, at]


@pytest.mark.parametrize("form", [{}, {"window": 3, "softcap": 0.7}])
def test_a_chunk_sees_itself_and_what_is_before_it(form):
    for starts, C in (((0, 1, 4, 9), 5), ((15, 0, 8, 7), 1)):
        found, expected = chunk(starts, C, **form)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_longer_neighbour_changes_no_bit():
    alone, _ = chunk((2, 3), 2)
    beside, _ = chunk((2, 14), 2)
    np.testing.assert_array_equal(alone[0], beside[0])


def test_a_bias_is_by_distance():
    bias = lambda distance: 0.3 * distance[:, None] * jnp.arange(1.0, 5)[:, None, None]  # noqa: E731
    q, k, v, _ = arrays(6, B=1, T=7)
    far = np.arange(7) - np.arange(7)[:, None]
    scores = np.einsum("bthk,bshk->bhts", q, k.repeat(2, axis=2)) / 2
    scores = scores + 0.3 * far * np.arange(1.0, 5)[:, None, None]
    weights = np.where(far <= 0, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bhts,bshk->bthk", weights, v.repeat(2, axis=2))[:, 5:]
    own = [jnp.asarray(x[:, 5:], jnp.float32) for x in (q, k, v)]
    own[1:] = [x.swapaxes(1, 2) for x in own[1:]]
    padded = [np.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v)]
    tiles = tiles_of(*padded, end=[5])
    found = chunk_attention(*own, jnp.array([5]), tiles, bias=bias)
    np.testing.assert_allclose(found, expected, atol=2e-6)
