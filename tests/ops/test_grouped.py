"""Experts against a loop over tokens and experts in NumPy's float64, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import make_mesh
from jaxtrain.ops.dispatch import devices_of_a_token, dispatch, dispatched
from jaxtrain.ops.grouped import expert_mlp
from jaxtrain.ops.routing import ROUTINGS, route
from jaxtrain.sharding.placement import tracing_on

B, T, D, F, E, J = 2, 24, 6, 10, 5, 2


def routes_of(case, random):
    if case == "tiles of two sizes":  # 600, 150, 0, 300 and 40 choices; full tiles, and others
        sizes = {0: 600, 1: 150, 3: 300}
        first = np.repeat(list(sizes), list(sizes.values())).reshape(B, -1)
        return np.stack([first, np.where(np.arange(525) < 20, 4, E) + 0 * first], -1)
    if case == "one expert takes every token":
        return np.stack([np.full((B, T), 3), random.choice([0, 1], (B, T))], -1)
    if case == "empty experts":
        return np.stack([np.full((B, T), 4), np.full((B, T), 1)], -1)
    return np.stack([random.permutation(E)[:J] for _ in range(B * T)]).reshape(B, T, J)


def by_hand(form, x, weights, gates, experts, dy):
    """The values and gradients, token by token."""
    out, dx, dgates = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates)
    dweights = {name: np.zeros_like(w) for name, w in weights.items()}
    for place in np.ndindex(*experts.shape):
        b, t, _ = place
        if (e := experts[place]) == E:
            continue
        own, token, gate = {n: w[e] for n, w in weights.items()}, x[b, t], gates[place]
        up = token @ own["up"] + own.get("up_bias", 0)
        if form == "relu":
            hidden, slopes = np.maximum(up, 0), {"up": (up > 0) * 1.0}
        else:
            g = token @ own["gate"] + own.get("gate_bias", 0)
            s = 1 / (1 + np.exp(-g))
            hidden, slopes = g * s * up, {"up": g * s, "gate": (s + g * s * (1 - s)) * up}
        y, dhidden = hidden @ own["down"], gate * (own["down"] @ dy[b, t])
        out[b, t] += gate * y
        dgates[place] = y @ dy[b, t]
        dweights["down"][e] += gate * np.outer(hidden, dy[b, t])
        for name, slope in slopes.items():
            dweights[name][e] += np.outer(token, slope * dhidden)
            if f"{name}_bias" in own:
                dweights[f"{name}_bias"][e] += slope * dhidden
            dx[b, t] += own[name] @ (slope * dhidden)
    return out, dx, dweights, dgates


@pytest.mark.parametrize(
    ("form", "case"),
    [
        ("swiglu", "spread, biased"),
        ("swiglu", "tiles of two sizes"),
        ("swiglu", "one expert takes every token"),
        pytest.param("relu", "empty experts", marks=pytest.mark.slow),
        ("relu", "poisoned padding"),
    ],
)
def test_values_and_gradients(form, case):
    random = np.random.default_rng(0)
    experts = routes_of(case, random)
    T = experts.shape[1]
    x, dy = random.normal(size=(2, B, T, D))
    names = ("up", "gate") if form == "swiglu" else ("up",)
    weights = {name: random.normal(size=(E, D, F)) for name in names}
    if case == "spread, biased":
        weights |= {f"{name}_bias": random.normal(size=(E, F)) for name in names}
    weights["down"] = random.normal(size=(E, F, D))
    gates = random.uniform(size=(B, T, J))
    if case == "poisoned padding":
        experts[:, T // 2 :] = E
        gates[:, T // 2 :] = 0
    wanted = by_hand(form, x, weights, gates, experts, dy)
    if case == "poisoned padding":
        x[:, T // 2 :] = dy[:, T // 2 :] = np.nan
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    run = functools.partial(expert_mlp, form)
    given = f32(x), jax.tree.map(f32, weights), f32(gates)
    y, pull = jax.vjp(lambda *a: run(*a, jnp.asarray(experts, jnp.int32)), *given)
    got = (y, *pull(f32(dy)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1, np.abs(b).max()))


def test_curvature_is_refused():
    weights = {"up": jnp.ones((1, 2, 3)), "down": jnp.ones((1, 3, 2))}
    given = weights, jnp.ones((1, 4, 1)), jnp.zeros((1, 4, 1), int)
    slope = jax.grad(lambda x: expert_mlp("relu", x, *given).sum())
    with pytest.raises(ValueError, match="experts have first derivatives alone"):
        jax.grad(lambda x: slope(x).sum())(jnp.ones((1, 4, 2)))


def test_no_buffer_holds_a_token_for_each_choice_or_expert():
    """Of 16 experts and 8 choices, temporaries stay below four arrays of the tokens."""
    n, d, e, j = 4096, 256, 16, 8
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    weights = {"up": shape(e, d, 32), "down": shape(e, 32, d)}
    experts = jax.ShapeDtypeStruct((1, n, j), jnp.int32)
    loss = lambda x, w, g, i: expert_mlp("relu", x, w, g, i).sum()  # noqa: E731
    given = shape(1, n, d), weights, shape(1, n, j), experts
    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4 * n * d


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes(routing):
    """Choices, weights, losses and loads, by their definitions; padding is anything and counts
    nothing; two equal logits go to the lower number."""
    random = np.random.default_rng(1)
    x, kernel = random.normal(size=(B, T, D)), random.normal(size=(D, E))
    kernel[:, 3] = kernel[:, 1]
    live = np.arange(T) < np.array([[T], [T // 3]])
    logits = x @ kernel
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    scores, bias = probs, None
    if routing == "sigmoid":
        scores, bias = 1 / (1 + np.exp(-logits)), np.array([0.3, 0, -0.2, 0, 0.1])
        probs = scores / scores.sum(-1, keepdims=True)
    by = scores if bias is None else scores + bias
    order = np.argsort(-np.round(by, 12), axis=-1, kind="stable")[..., :J]
    weights = np.take_along_axis(scores, order, -1)
    if routing != "softmax":
        weights /= weights.sum(-1, keepdims=True)
    if routing == "softmax_normalised":
        top = np.take_along_axis(logits, order, -1)
        np.testing.assert_allclose(weights, np.exp(top) / np.exp(top).sum(-1, keepdims=True))
    x[~live] = np.nan

    def run(x, kernel):
        how = {"routing": routing, "bias_E": None if bias is None else jnp.asarray(bias)}
        return route(x, kernel, per_token=J, **how, live_BT=jnp.asarray(live))

    given = jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)
    got = jax.jit(run)(*given)
    np.testing.assert_array_equal(got.experts_BTJ, np.where(live[..., None], order, E))
    np.testing.assert_allclose(got.weights_BTJ, np.where(live[..., None], weights, 0), rtol=1e-5)
    for b in range(B):
        of = live[b]
        load = np.bincount(order[b][of].ravel(), minlength=E)
        balance = E * (load / load.sum() * probs[b][of].mean(0)).sum()
        z = np.square(np.log(np.exp(logits[b][of]).sum(-1))).mean()
        np.testing.assert_array_equal(got.load_BE[b], load)
        np.testing.assert_allclose(got.balance_B[b], balance, rtol=1e-5)
        np.testing.assert_allclose(got.router_z_B[b], z, rtol=1e-5)

    def loss(x, kernel):
        found = run(x, kernel)
        return (found.weights_BTJ[..., 0].sum() + found.balance_B + found.router_z_B).sum()

    dx, dkernel = jax.jit(jax.grad(loss, argnums=(0, 1)))(*given)
    assert np.isfinite(dkernel).all()
    assert (dx[~live] == 0).all()
    assert np.abs(dx[live]).min() > 0


def test_routes_are_replayed():
    x, kernel = jax.random.normal(jax.random.key(0), (B, T, D)), jnp.eye(D, E)
    first = route(x, kernel, per_token=J)
    other = route(x, 2 * kernel[:, ::-1], per_token=J, routes_BTJ=first.experts_BTJ)
    assert (other.experts_BTJ == first.experts_BTJ).all()
    np.testing.assert_allclose(other.weights_BTJ.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_bits_that_it_has_whatever_others_choose(dtype):
    """Others fill large tiles or small ones, and stand before it in its expert's order."""
    random, n, experts = np.random.default_rng(0), 1024, 4
    x_BTD, up, down = (
        jnp.asarray(random.normal(size=shape), dtype)
        for shape in ((1, n, 48), (experts, 48, 64), (experts, 64, 48))
    )
    run = jax.jit(lambda e: expert_mlp("relu", x_BTD, {"up": up, "down": down}, gates, e))
    gates = jnp.asarray(random.uniform(size=(1, n, J)), jnp.float32)
    own = np.stack([random.permutation(experts)[:J] for _ in range(n)])
    mine = np.arange(n) % 3 == 0
    first = np.asarray(run(own[None]))[0, mine]
    for few in (1, 2):
        others = np.where(mine[:, None], own, np.stack([own[:, 0] % few, own[:, 0] % few + 1], -1))
        np.testing.assert_array_equal(np.asarray(run(others[None]))[0, mine], first)


@pytest.mark.parametrize(
    ("axes", "case"),
    [
        ({"expert": 4, "tensor": 2}, "one expert takes every token"),
        ({"data": 8}, "whole"),
        pytest.param({"expert": 8}, "spread", marks=pytest.mark.slow),
    ],
)
def test_tokens_that_are_sent_to_their_experts_have_what_one_device_gives(axes, case):
    """However many waves that takes, of 1 to 4; padding is sent nowhere."""
    random, experts, rows = np.random.default_rng(0), 8, 8
    x, dy = random.normal(size=(2, rows, T, D)).astype("float32")
    weights = {name: random.normal(size=(experts, D, 8)) for name in ("up", "gate")}
    weights["down"] = random.normal(size=(experts, 8, D))
    weights = {name: w.astype("float32") for name, w in weights.items()}
    gates = random.uniform(size=(rows, T, J)).astype("float32")
    chosen = np.stack([random.permutation(experts)[:J] for _ in range(rows * T)])
    chosen = chosen.reshape(gates.shape).astype("int32")
    if case != "spread":
        chosen[..., 0], chosen[..., 1] = 3, np.where(chosen[..., 1] == 3, 4, chosen[..., 1])
    chosen[:, T // 2 :][chosen[:, T // 2 :] > 5] = experts

    def run(x, weights, gates, dy):
        y, pull = jax.vjp(
            lambda *a: expert_mlp("swiglu", *a, jnp.asarray(chosen)), x, weights, gates
        )
        return y, *pull(dy)

    def sent(*given):
        with dispatch("exchange"):
            return run(*given)

    given = x, weights, gates, dy
    wanted = jax.jit(run)(*given)
    with jax.set_mesh(mesh := make_mesh(**axes)), tracing_on(mesh, {}, []):
        program = jax.jit(sent).lower(*given).compile()
    text = program.as_text()
    assert ("all-to-all" in text) == ("expert" in axes)
    assert "all-gather" not in text
    got = program(*given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("places", "here", "each", "how"),
    [(2, 4, 2, "gather"), (8, 1, 2, "exchange"), (8, 32, 8, "gather"), (64, 4, 8, "exchange")],
)
def test_tokens_are_sent_where_that_halves_the_traffic(places, here, each, how):
    random = np.random.default_rng(0)
    chosen = np.stack([random.permutation(places * here)[:each] for _ in range(2000)])
    mean = np.mean([len(set(row // here)) for row in chosen])
    assert devices_of_a_token(places, here, each) == pytest.approx(mean, rel=0.02)
    assert dispatched(places, here, each).how == how
    assert (2 * (np.ceil(mean) + 1) <= places) == (how == "exchange")
