"""The loss along directions is the loss at the points that they lead to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.landscape.lines import (
    Subspace,
    build_losses,
    direction_to,
    moved,
    random_direction,
)
from jaxtrain.loss import WeightedLoss
from jaxtrain.state import TrainState
from jaxtrain.step import build_eval_step


def state_of(params, model_state=None):
    return TrainState(None, params, (), model_state, None, None, None)


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_a_quadratic_is_a_paraboloid_on_any_line_and_plane(at_once):
    r = np.random.default_rng(0)
    a_NN, b_N, x_N = r.normal(size=(6, 6)), r.normal(size=6), r.normal(size=6)
    d_KN, points_PK = r.normal(size=(2, 6)), r.normal(size=(9, 2))

    def loss_fn(params, batch, rng):
        x = jnp.concatenate([params["x"], params["y"]])
        loss = x @ np.float32(a_NN) @ x + np.float32(b_N) @ x
        return WeightedLoss(total=batch["weight"] * (loss + batch["shift"]), weight=batch["weight"])

    def direction(d_N):
        return {"params": {"x": jnp.float32(d_N[:4]), "y": jnp.float32(d_N[4:])}} | bare

    bare = {"model_state": None}
    state = state_of(direction(x_N)["params"])
    around = Subspace(state, tuple(map(direction, d_KN)))
    losses = jax.jit(build_losses(build_eval_step(loss_fn), points_PK, at_once=at_once))
    batches = [{"weight": 3.0, "shift": 0.0}, {"weight": 1.0, "shift": 8.0}]
    found = sum((losses(around, batch) for batch in batches[1:]), losses(around, batches[0]))
    at_PN = x_N + points_PK @ d_KN
    expected_P = np.einsum("pi,ij,pj->p", at_PN, a_NN, at_PN) + at_PN @ b_N + 2.0
    scale = np.abs(expected_P).max()
    np.testing.assert_allclose(found.means()["loss"], expected_P, atol=2e-6 * scale)


def test_every_filter_is_as_long_as_the_one_it_is_added_to():
    r = np.random.default_rng(0)
    shapes = {
        "blocks": {"q": (3, 4, 5), "bias": (3, 5), "norm": {"scale": (3, 4)}},
        "conv": (3, 3, 2, 4),
        "embed": {"tokens": (7, 4)},
        "still": (4, 4),
    }
    params = jax.tree.map(
        lambda s: jnp.float32(r.normal(size=s)), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    params["blocks"]["q"] = params["blocks"]["q"].at[1, :, 2].set(0.0)
    params["index"] = jnp.ones((3, 3), jnp.int32)
    draw = lambda seed: random_direction(  # noqa: E731
        state_of(params, {"mean": jnp.ones(2)}),
        jax.random.key(seed),
        stacked=("^blocks/",),
        frozen={"still"},
    )
    found, other = draw(0)["params"], draw(1)["params"]
    for path, axis in (("q", 1), ("conv", (0, 1, 2)), ("embed", -1)):
        p, d, e = (
            {"q": tree["blocks"]["q"], "conv": tree["conv"], "embed": tree["embed"]["tokens"]}[path]
            for tree in (params, found, other)
        )
        norm = lambda x, axis=axis: np.sqrt(np.square(np.float64(x)).sum(axis))  # noqa: E731
        np.testing.assert_allclose(norm(d), norm(p), rtol=1e-6)
        assert np.abs(np.sum(d * e)) < 0.7 * np.sum(p * p)  # two directions, and not one
    assert found["blocks"]["bias"] is found["blocks"]["norm"]["scale"] is found["still"] is None
    assert found["index"] is None
    assert draw(0)["model_state"] == {"mean": None}


def test_a_network_rescaled_has_the_same_landscape():
    """What filters are for: a ReLU does not see a factor that the next layer takes back."""
    r = np.random.default_rng(0)
    x_ND, y_N = r.normal(size=(16, 8)).astype("f"), r.normal(size=16).astype("f")

    def loss_fn(params, batch, rng):
        return jnp.square(jax.nn.relu(batch @ params["up"]) @ params["down"] - y_N[:, None]).mean()

    params = {
        "up": jnp.float32(r.normal(size=(8, 12))),
        "down": jnp.float32(r.normal(size=(12, 1))),
    }
    scaled = {"up": 64.0 * params["up"], "down": params["down"] / 64.0}
    points = np.linspace(-1, 1, 5)[:, None]
    curves = []
    for each in (params, scaled):
        state = state_of(each)
        around = Subspace(state, (random_direction(state, jax.random.key(0)),))
        losses = jax.jit(build_losses(build_eval_step(loss_fn), points))(around, x_ND)
        curves.append(losses.means()["loss"])
    np.testing.assert_allclose(*curves, rtol=1e-5)
    assert np.ptp(curves[0]) > 0.1


def test_a_line_to_another_state_ends_there():
    r = np.random.default_rng(0)

    def one():
        params = {"w": jnp.float32(r.normal(size=4)), "n": jnp.arange(2), "b": jnp.bfloat16(2.0)}
        return state_of(params, {"mean": jnp.float32(r.normal(size=3))})

    start, end = one(), one()
    line = (direction_to(start, end),)
    half, whole = (moved(start, line, [t]) for t in (0.5, 1.0))
    np.testing.assert_allclose(whole.params["w"], end.params["w"], rtol=1e-6)
    np.testing.assert_allclose(whole.model_state["mean"], end.model_state["mean"], rtol=1e-6)
    np.testing.assert_allclose(half.params["w"], (start.params["w"] + end.params["w"]) / 2, 1e-6)
    assert [x.dtype for x in jax.tree.leaves(whole)] == [x.dtype for x in jax.tree.leaves(start)]
