"""Decoders with experts: what they compute, what is kept of routes, and any cut of a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.jaxprs import equations
from jaxtrain.models import decoder
from jaxtrain.models.config import BlockConfig
from jaxtrain.ops.remat import REMAT
from jaxtrain.ops.routing import TINY
from tests import problems

MOE = decoder.DecoderConfig(
    vocab_size=61,
    seq_len=16,
    layers=2,
    width=32,
    heads=4,
    norm="rmsnorm",
    bias=False,
    mlp="swiglu",
    mlp_width=24,
    experts=4,
    balance=0.5,
    router_z=0.05,
)


def batch_of(rows=4):
    """Packed documents, padding behind them."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 61, (rows, 17))
    lengths = random.integers(6, 17, (rows, 1))
    segments = np.where(np.arange(16) < lengths, 1 + (np.arange(16) > 4), 0)
    mask = (segments > 0) * random.integers(0, 2, segments.shape)
    return {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "mask": jnp.asarray(mask, jnp.float32),
        "segments": jnp.asarray(segments),
    }


def params_of(config):
    return problems.with_noise(decoder.init(config, jax.random.key(0)), 0.1)


def loss_of(config):
    return jax.jit(functools.partial(decoder.loss_fn(config), rng=None))


def test_equal_experts_are_one_mlp():
    """Weights that sum to 1, of experts that are all alike, as in a model that was made of a dense
    one; a shared expert is added to them, and a layer without experts stands before them."""
    shared = dict(experts_per_token=3, shared_experts=1, balance=0, router_z=0)
    shared |= dict(layers=3, dense_layers=1, positions="rope", window=4)
    shared = dataclasses.replace(MOE, **shared, window_pattern=(True, False))
    params, batch = params_of(shared), batch_of()
    blocks = params["blocks"]
    mlp = {name: {"kernel": blocks["mlp"][name]["kernel"]} for name in ("gate", "up", "down")}
    for name, kernel in mlp.items():
        alike = jnp.repeat(kernel["kernel"][:, None], 4, 1)
        blocks["experts"][name]["kernel"] = alike / 2 if name == "down" else alike
    none = dict.fromkeys(("experts", "shared_experts", "dense_layers", "dense_width"))
    dense = dataclasses.replace(shared, **none)
    rest = {name: x for name, x in blocks.items() if name != "experts"}
    mlp["down"] = {"kernel": 1.5 * mlp["down"]["kernel"]}
    first, rest = params["dense"]["0"], rest | {"mlp": mlp}
    whole = jax.tree.map(lambda x, stack: jnp.concatenate([x[None], stack]), first, rest)
    one = loss_of(dense)(params | {"blocks": whole}, batch)
    np.testing.assert_allclose(loss_of(shared)(params, batch).total, one.total, rtol=1e-5)


@pytest.mark.parametrize(
    "routing", ["softmax_normalised", pytest.param("sigmoid", marks=pytest.mark.slow)]
)
def test_any_cut_of_a_batch_has_the_loss_the_gradients_and_the_loads_of_the_whole(routing):
    config = dataclasses.replace(MOE, routing=routing)
    params, batch = params_of(config), batch_of()

    @jax.jit
    def run(params, batch):
        def total(params):
            loss = decoder.loss_fn(config)(params, batch, None)
            return loss.total, loss

        grads, loss = jax.grad(total, has_aux=True)(params)
        return loss, grads

    loss, grads = run(params, batch)
    parts = [run(params, jax.tree.map(lambda x, i=i: x[i::2], batch)) for i in range(2)]
    added = parts[0][0] + parts[1][0], jax.tree.map(jnp.add, parts[0][1], parts[1][1])
    wanted, got = ((x.means(), g) for x, g in ((loss, grads), added))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, wanted)
    means = loss.means()
    assert float(means["expert_load"].mean()) == pytest.approx(1)  # nothing is dropped
    assert 1 < float(means["hottest_expert"]) <= 2
    assert float(means["loss"]) > float(means["balance_loss"]) > 0.5 * MOE.layers * 0.99
    if (
        routing == "sigmoid"
    ):  # the gradient is the load: it moves towards those that are chosen less
        load_LE = loss.metrics["hottest_expert"].value
        bias_LE = grads["blocks"]["experts"]["router"]["bias"]
        np.testing.assert_allclose(bias_LE / TINY, load_LE)
        plain = jt.make_optimizer("adamw", 0.1, clip_norm=1e-9, weight_decay=1.0, stacked=("^b",))
        updates, _ = plain.update(grads, plain.init(params), params)
        wanted = 1e-3 * np.sign(load_LE.mean(-1, keepdims=True) - load_LE)
        got = updates["blocks"]["experts"]["router"]["bias"]
        np.testing.assert_allclose(got, wanted)
        assert optax.tree.norm(grads) == optax.tree.norm(
            jax.tree.map(lambda x: jnp.where(jnp.abs(x).max() < 1e-4, 0, x), grads)
        )


def test_one_expert_may_take_every_token():
    config = dataclasses.replace(MOE, experts_per_token=1)
    params = params_of(config)
    x = params["blocks"]["experts"]["router"]
    x["kernel"] = jnp.zeros_like(x["kernel"])  # of equal ones the first

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(params):
        means = decoder.loss_fn(config)(params, batch_of(), None).means()
        return means["loss"], means

    grads, means = run(params)
    assert means["expert_load"].tolist() == [4, 0, 0, 0]
    assert float(means["hottest_expert"]) == 4
    up = grads["blocks"]["experts"]["up"]["kernel"]
    assert np.abs(up[:, 0]).max() > 0
    assert not np.abs(up[:, 1:]).max()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize(
    "remat",
    [x if x in ("full", "dots") else pytest.param(x, marks=pytest.mark.slow) for x in REMAT],
)
def test_no_backward_pass_chooses_again(remat):
    config = dataclasses.replace(MOE, remat=remat, scan_unroll=1)
    loss = lambda p: decoder.loss_fn(config)(p, batch_of(), None).total  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params_of(config))
    assert sum(eqn.primitive.name == "top_k" for eqn in equations(jaxpr)) == 1


def test_routes_that_are_replayed_are_those_of_other_weights():
    params, batch = params_of(MOE), batch_of()
    routes = decoder.routes(MOE, params, batch)
    live = np.asarray(batch["segments"] > 0)
    assert routes.shape == (4, 2, 16, 2)
    assert set(np.unique(routes.transpose(0, 2, 1, 3)[live])) == set(range(4))
    assert (routes.transpose(0, 2, 1, 3)[~live] == 4).all()
    other = jax.tree.map(lambda x: 1.5 * x, params)
    assert (decoder.routes(MOE, other, batch | {"routes": routes}) == routes).all()
    again, first = (loss_of(MOE)(params, x).total for x in (batch | {"routes": routes}, batch))
    np.testing.assert_allclose(again, first, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token=5 is more than experts=4"),
        ({"shared_experts": 1}, "shared_experts=1 stand beside experts that are chosen"),
        ({"experts": 4, "bias": True}, "bias=True gives dense layers biases"),
        ({"experts": 4, "balance": -1.0}, "balance=-1.0 must be at least 0"),
        (
            {"experts": 4, "groups": 3},
            "groups=3 of experts=4, and groups_per_token=1",
        ),
        ({"experts": 8, "groups": 4, "experts_per_token": 3}, "more than the 2 experts of"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BlockConfig(**{"width": 8, "heads": 2, "bias": False} | fields)
    for own, message in (({"dense_layers": 2}, "use fewer"), ({"dense_width": 8}, "set both")):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(MOE, **own)


def test_a_recipe_for_experts_is_refused():
    policy = dataclasses.replace(jt.Policy.named("fp8"), recipe_in="experts/(up|down)")
    loss_fn, params = decoder.loss_fn(MOE), policy.cast_to_compute(params_of(MOE))
    with pytest.raises(ValueError, match="'experts/up/kernel' is a Scaled kernel, and experts"):
        jax.eval_shape(lambda params: loss_fn(params, batch_of(), None), params)
