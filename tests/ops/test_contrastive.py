"""Contrastive losses against their definition over whole matrices of logits, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops import contrastive

B, F = 24, 8


def given(seed=0):
    rng = np.random.default_rng(seed)
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.normal(size=(2, B, F)))
    return a, b, rng.integers(0, 10, B), (rng.random(B) < 0.8).astype(float)


def info_nce(a, b, scale, bias, numbers, mask):
    """[B, B] held whole."""
    logits = scale * a @ b.T
    negative = (numbers[:, None] != numbers) & (mask > 0)
    total = 0.0
    for side in (logits, logits.T):
        weights = np.exp(side) * (negative | np.eye(B, dtype=bool))
        total += (mask * (np.log(weights.sum(1)) - np.diagonal(side))).sum() / 2
    return total


def sigmoid(a, b, scale, bias, numbers, mask):
    logits, own = scale * a @ b.T + bias, np.eye(B, dtype=bool)
    terms = np.log1p(np.exp(np.where(own, -logits, logits)))
    seen = own | ((numbers[:, None] != numbers) & (mask > 0))
    return (mask[:, None] * np.where(seen, terms, 0.0)).sum()


def ours(name, a, b, scale, bias, numbers, mask, chunk=None):
    own = (bias,) if name == "sigmoid" else ()
    function = getattr(contrastive, name)
    return function(a, b, scale, *own, mask, numbers_B=numbers, chunk=chunk)[0]


@pytest.mark.parametrize(("name", "definition"), [("info_nce", info_nce), ("sigmoid", sigmoid)])
def test_values_and_gradients_are_those_of_the_definition(name, definition):
    """Of both sides, the scale and the bias; gradients are central differences in float64."""
    a, b, numbers, mask = given()
    point = a, b, 5.0, -1.5
    assert len(set(numbers)) < B  # or nothing is left out
    assert 0 < mask.sum() < B
    as32 = jax.tree.map(jnp.float32, point)
    rest = jnp.int32(numbers), jnp.float32(mask)
    found = jax.jit(
        lambda *x: jax.value_and_grad(lambda *x: ours(name, *x, *rest, chunk=8), (0, 1, 2, 3))(*x)
    )(*as32)
    np.testing.assert_allclose(found[0], definition(*point, numbers, mask), rtol=1e-6)
    rng = np.random.default_rng(1)
    for i, grad in enumerate(found[1]):
        way, h = rng.normal(size=np.shape(point[i])), 1e-6
        ends = []
        for step in (h * way, -h * way):
            moved = (x + step if j == i else x for j, x in enumerate(point))
            ends.append(definition(*moved, numbers, mask))
        slope = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose((np.float64(grad) * way).sum(), slope, rtol=3e-5, atol=1e-4)


def test_own_pairs_that_are_nearest_are_counted():
    a, mask = jnp.eye(B), jnp.ones(B)
    assert [float(x) for x in contrastive.info_nce(a, a, 5.0, mask)[1:]] == [B, B]
    swapped = a[jnp.arange(B).at[:2].set(jnp.array([1, 0]))]
    assert float(contrastive.info_nce(a, swapped, 5.0, mask)[1]) == B - 2
    same = jnp.arange(B).at[1].set(0)  # rows 0 and 1 are no negatives of each other; ties count
    assert float(contrastive.info_nce(a, swapped, 5.0, mask, numbers_B=same)[1]) == B


def test_no_matrix_of_all_pairs_is_held():
    """Neither in the loss nor for its gradients."""
    rows = 2048
    x = jax.ShapeDtypeStruct((rows, F), jnp.float32)

    def temporaries(name, chunk):
        def loss(a, b):
            return ours(name, a, b, 5.0, -1.0, jnp.arange(rows) % 99, jnp.ones(rows), chunk)

        memory = jax.jit(jax.grad(loss, (0, 1))).lower(x, x).compile().memory_analysis()
        return memory.temp_size_in_bytes

    for name in ("info_nce", "sigmoid"):
        assert temporaries(name, None) > 4 * rows**2  # one tile
        assert temporaries(name, 128) < 4 * rows**2 / 4
