"""LAMB and LARS against their papers in NumPy float64; Muon's geometry; per_layer by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import jit

from jaxtrain.optim import make_optimizer, per_layer, schedules
from jaxtrain.tree import named_leaves

STEPS = 10
RATES = np.linspace(0.2, 0.02, STEPS)
SCHEDULE = schedules.linear(0.2, total_steps=STEPS - 1, final=0.02)
DECAY = 0.1


def problem():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 5)), "v": 3 * rng.normal(size=(5, 2)), "bias": np.zeros(5)}
    grads = [{k: rng.normal(size=p.shape) for k, p in params.items()} for _ in range(STEPS)]
    # A layer without gradient: nothing to divide by in LARS without decay.
    grads[3]["bias"] = np.zeros(5)
    return params, grads


def ratio_or_one(top, bottom):
    return top / bottom if top > 0 and bottom > 0 else 1.0


def lamb(params, grads, trusted, b1=0.9, b2=0.999, eps=1e-6):
    """You et al. 2019, algorithm 2, phi the identity."""
    x = {k: p.copy() for k, p in params.items()}
    m = {k: np.zeros_like(p) for k, p in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    for t, gradient in enumerate(grads, 1):
        for k, g in gradient.items():
            m[k] = b1 * m[k] + (1 - b1) * g
            v[k] = b2 * v[k] + (1 - b2) * g**2
            r = (m[k] / (1 - b1**t)) / (np.sqrt(v[k] / (1 - b2**t)) + eps)
            u = r + (0.0 if k == "bias" else DECAY) * x[k]
            ratio = ratio_or_one(np.linalg.norm(x[k]), np.linalg.norm(u)) if k in trusted else 1
            x[k] = x[k] - RATES[t - 1] * ratio * u
    return x


def lars(params, grads, trusted, momentum=0.9, eta=0.02):
    """You et al. 2017, algorithm 1, with eta of equation 6."""
    w = {k: p.copy() for k, p in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    for t, gradient in enumerate(grads):
        for k, g in gradient.items():
            beta = 0.0 if k == "bias" else DECAY
            w_norm = np.linalg.norm(w[k])
            local = ratio_or_one(eta * w_norm, np.linalg.norm(g) + beta * w_norm)
            local = local if k in trusted else 1.0
            v[k] = momentum * v[k] + RATES[t] * local * (g + beta * w[k])
            w[k] = w[k] - v[k]
    return w


@pytest.mark.parametrize("trusted", [("w", "v"), ("w", "v", "bias"), ("w",)])
@pytest.mark.parametrize(
    ("name", "paper", "options"), [("lamb", lamb, {}), ("lars", lars, {"trust_coefficient": 0.02})]
)
def test_rule_is_the_papers(name, paper, options, trusted):
    params, grads = problem()
    if trusted != ("w", "v"):  # those that decay
        options = options | {"trust_mask": [f"^{k}$" for k in trusted]}
    tx = make_optimizer(name, SCHEDULE, weight_decay=DECAY, **options)
    ours = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    state, update = tx.init(ours), jit(tx.update)
    for g in grads:
        updates, state = update(jax.tree.map(np.float32, g), state, ours)
        ours = optax.apply_updates(ours, updates)
    expected = paper(params, grads, trusted)
    for k in expected:
        np.testing.assert_allclose(ours[k], expected[k], rtol=1e-4, atol=1e-5, err_msg=k)


@pytest.mark.parametrize(
    ("scale", "factor"), [("rms", 0.2 * np.sqrt(24)), ("width", np.sqrt(24 / 4))]
)
def test_muon_update_is_nearly_orthogonal_with_the_shapes_factor(scale, factor):
    # One matrix of 4 inputs and 24 outputs, the inputs spread over two axes as in a convolution.
    g = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 2, 24)), jnp.float32)
    params = {"conv": jnp.zeros_like(g)}
    tx = make_optimizer("muon", 1.0, stacked=("conv",), muon_mask=("conv",), muon_scale=scale)
    update = -jit(lambda g: tx.update({"conv": g}, tx.init(params), params)[0]["conv"])(g)
    for layer, gradient in zip(update, g, strict=True):
        u, _, vt = np.linalg.svd(np.float64(gradient).reshape(4, 24), full_matrices=False)
        inner = u.T @ np.asarray(layer, np.float64).reshape(4, 24) @ vt.T / factor
        # Newton-Schulz leaves singular values between about 0.7 and 1.2, in the same directions.
        assert np.all((np.diag(inner) > 0.65) & (np.diag(inner) < 1.25))
        np.testing.assert_allclose(inner - np.diag(np.diag(inner)), 0, atol=1e-4)


def test_muon_leaves_tables_and_vectors_to_adamw():
    rng = np.random.default_rng(1)
    params = {"wte": rng.normal(size=(6, 4)), "fc": {"w": rng.normal(size=(4, 4))}, "b": np.ones(4)}
    params = jax.tree.map(np.float32, params)
    muon = make_optimizer("muon", 0.1, weight_decay=0.1)
    adamw = make_optimizer("adamw", 0.1, weight_decay=0.1, b2=0.95, eps=1e-10)
    ours, theirs = (
        named_leaves(jit(lambda p, tx=tx: tx.update(p, tx.init(p), p)[0])(params))
        for tx in (muon, adamw)
    )
    for path in ("wte", "b"):
        np.testing.assert_allclose(ours[path], theirs[path], rtol=1e-6)
    assert np.abs(ours["fc/w"] - theirs["fc/w"]).max() > 1e-2
    # Each parameter has the moments of its own rule only.
    moments = named_leaves(muon.init(params))
    assert sum(path.endswith("/nu/fc/w") for path in moments) == 0
    assert sum(path.endswith("/mu/wte") for path in moments) == 1


@pytest.mark.parametrize("name", ["muon", "lamb", "lars"])
def test_the_kernel_of_each_expert_is_a_parameter_of_its_own(name):
    rng = np.random.default_rng(2)
    g_LEDF = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    whole = make_optimizer(name, 0.1, weight_decay=0.1, stacked=(r"^blocks/",))
    alone = make_optimizer(name, 0.1, weight_decay=0.1)

    def update(tx, tree):
        return jit(lambda p: tx.update(p, tx.init(p), p)[0])(tree)

    together = update(whole, {"blocks": {"experts": {"up": g_LEDF}}})["blocks"]["experts"]["up"]
    for at in np.ndindex(2, 3):
        expected = update(alone, {"up": g_LEDF[at]})["up"]
        np.testing.assert_allclose(together[at], expected, rtol=1e-5, atol=1e-6)


def test_per_layer_groups_by_size_and_counts_rightly():
    stacked = {"^a/": 1, "^b/": 1, "^c/": 2}
    shapes = {"a": {"x": (2, 3)}, "b": {"x": (4, 3)}, "c": {"x": (2, 2, 3)}, "d": (3,)}
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: rng.normal(size=s).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    inner = optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio())
    tx = per_layer(inner, stacked)

    def thrice(tx, x):
        state = tx.init(x)
        for _ in range(3):
            updates, state = tx.update(x, state, x)
        return updates, state

    updates, state = jit(lambda p: thrice(tx, p))(params)
    alone = jit(lambda x: thrice(inner, x)[0])
    for key, layers in (("a", (2,)), ("b", (4,)), ("c", (2, 2))):
        for index in np.ndindex(layers):
            expected = alone(params[key]["x"][index])
            np.testing.assert_allclose(updates[key]["x"][index], expected, rtol=1e-6)
    np.testing.assert_allclose(updates["d"], alone(params["d"]), rtol=1e-6)
    leaves = named_leaves(state)
    counts = {path: leaf for path, leaf in leaves.items() if path.endswith("count")}
    assert sorted(leaf.shape for leaf in counts.values()) == [(), (2,), (2, 2), (4,)]
    assert all(np.all(leaf == 3) for leaf in counts.values())
    for path in ("a/x", "b/x", "c/x", "d"):
        (mu,) = [leaf for key, leaf in leaves.items() if key.endswith(f"/mu/{path}")]
        assert mu.shape == named_leaves(params)[path].shape


def test_per_layer_passes_extra_arguments():
    def use_value(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u * value.sum(), updates), state

    tx = per_layer(optax.GradientTransformationExtraArgs(optax.init_empty_state, use_value), ("w",))
    params = {"w": jnp.ones((2, 3)), "d": jnp.ones(3)}
    # The value has an axis of another size than the layers: it must not be mapped over.
    updates, _ = tx.update(params, tx.init(params), params, value=jnp.ones(5))
    assert np.all(updates["w"] == 5)
    assert np.all(updates["d"] == 5)
