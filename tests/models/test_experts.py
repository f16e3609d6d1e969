"""Decoders with experts: what they compute, what is kept of routes, and any cut of a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from experiments.language import Source
from jaxtrain import hf
from jaxtrain.hf import weights
from jaxtrain.jaxprs import equations
from jaxtrain.models import decoder
from jaxtrain.models.config import BlockConfig
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import Cache, decoder_of
from jaxtrain.models.experts import upcycled
from jaxtrain.models.generate import generate_with_routes
from jaxtrain.ops.remat import REMAT
from jaxtrain.ops.routing import TINY, route
from jaxtrain.tree import named_leaves
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


@pytest.mark.parametrize("of_files", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_mixture_begins_as_the_dense_model_that_it_is_made_of(of_files, tmp_path):
    """GPT-2's form, biases and all, from a folder, on a mesh that splits its experts; Llama's from
    arrays."""
    small = {"experts": None, "vocab_size": 61, "seq_len": 16, "layers": 2, "width": 32, "heads": 4}
    form = DecoderConfig(**small) if of_files else dataclasses.replace(MOE, experts=None)
    dense = problems.with_noise(decoder.init(form, jax.random.key(0)), 0.1)
    config = dataclasses.replace(form, experts=4)
    params = upcycled(dense, 4)
    if of_files:
        hf.save(tmp_path, form, dense)
        params = Source(str(tmp_path), form, is_run=False).weights(config)
    state = jt.init_state(
        functools.partial(decoder.init, config),
        optax.sgd(0.1),
        jax.random.key(1),
        params=params,
        mesh=jt.make_mesh(fsdp=2, expert=4),
        rules=decoder.RULES,
    )
    blocks = state.params["blocks"]["experts"]
    assert float(jnp.abs(blocks["router"]["kernel"]).min()) > 0
    assert blocks["up"]["kernel"].shape == (2, 4, 32, config.mlp_width)
    tokens = batch_of()["tokens"]
    alone = jax.tree.map(np.asarray, state.params)
    found, wanted = (
        jax.jit(functools.partial(decoder.logits, c))(p, tokens)
        for c, p in ((config, alone), (form, dense))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(wanted).max() > 0.5


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


@pytest.mark.slow
def test_a_step_is_balanced_by_the_shares_of_the_one_before():
    """Whole and accumulated: the shares are those of all choices, and so is the loss by them."""
    config = dataclasses.replace(MOE, balance_over="step", layers=1)
    batch, optimizer = batch_of(), jt.make_optimizer("sgd", 0.5, clip_norm=0.5)
    found = {}
    for accumulate in (1, 2):
        init_fn = functools.partial(decoder.init, config)
        state = jt.init_state(init_fn, optimizer, jax.random.key(0))
        step = jax.jit(
            jt.build_train_step(decoder.loss_fn(config), optimizer, accumulate=accumulate)
        )
        for _ in range(2):
            before, (state, metrics) = state.params, step(state, batch)
        found[accumulate] = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
        found[accumulate] |= {"params": state.params, "balance": metrics["balance_loss"]}
    choices = np.asarray(decoder.routes(config, before, batch)).swapaxes(0, 1).reshape(1, -1)
    load_LE = np.stack([np.bincount(x, minlength=5)[:4] for x in choices])
    shares_LE = state.params["blocks"]["experts"]["shares"]
    np.testing.assert_allclose(shares_LE, load_LE / load_LE.sum(-1, keepdims=True), rtol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, found[1], found[2])
    x_BTD, shares_E = jax.random.normal(jax.random.key(1), (2, 8, 4)), jnp.array([0.7, 0.2, 0.1])
    given = route(x_BTD, jnp.eye(4, 3), per_token=1, shares_E=shares_E)
    probs_BE = jax.nn.softmax(x_BTD[..., :3]).mean(1)
    np.testing.assert_allclose(given.balance_B, 3 * probs_BE @ shares_E, rtol=1e-6)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_trainer_follows_the_routes_that_a_sampler_recorded():
    """Whose weights are rounded to bfloat16, so that some tokens have other experts: by its routes
    the log-probabilities of what it has drawn are off by rounding, and not by another expert."""
    config = dict(layers=3, dense_layers=1, experts=8, experts_per_token=1, positions="rope")
    config = dataclasses.replace(MOE, **config)
    params = problems.with_noise(decoder.init(config, jax.random.key(0)), 0.1)
    router = params["blocks"]["experts"]["router"]
    kernel = router["kernel"][..., ::2]  # pairs of experts that are almost equally probable
    router["kernel"] = jnp.stack([kernel, kernel * (1 + 2**-10)], -1).reshape(2, 32, 8)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    given = np.random.default_rng(0).integers(0, 61, (4, 6))
    lengths, rows = np.array([6, 3, 6, 1]), np.arange(4)[:, None]
    drawn = {"prompt_lengths": lengths, "rng": jax.random.key(1), "max_new_tokens": 10}
    new, routes = generate_with_routes(config, rounded, given, **drawn)
    assert routes.shape == (4, 2, 15, 1)
    at = lengths[:, None] + np.arange(10)
    text = np.pad(given, ((0, 0), (0, 10)))
    text[rows, at] = new
    batch = {"tokens": jnp.asarray(text[:, :-1]), "targets": jnp.asarray(text[:, 1:])}

    def sampled(params):
        empty = (jnp.zeros((3, 4, heads, 15, k), jnp.bfloat16) for heads, k in config.block.cached)
        start_B, count_B = jnp.zeros(4, int), jnp.full(4, 15)
        read = Cache(*empty), batch["tokens"], start_B, count_B
        logits_BTV, _ = decoder_of(config).extend_every(params, *read)
        return jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch["targets"][..., None], 2)

    @jax.jit
    def trained(params, batch):
        return decoder.log_probs(config, params, decoder.run(config, params, batch), batch)

    wanted = jax.jit(sampled)(rounded)[..., 0][rows, at - 1]
    own = decoder.routes(config, params, batch)
    other = (np.sort(own) != np.sort(routes)).any((1, 3))[rows, at - 1]
    assert 0.1 < other.mean() < 0.9
    apart = [
        np.abs(trained(params, x)[rows, at - 1] - wanted).max()
        for x in (batch, batch | {"routes": routes})
    ]
    assert apart[1] < 0.02, apart
    assert apart[0] > 4 * apart[1], apart


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token=5 is more than experts=4"),
        ({"shared_experts": 1}, "shared_experts=1 stand beside experts that are chosen"),
        ({"experts": 4, "bias": True, "routing": "sigmoid"}, "bias=True gives a router a bias"),
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


@pytest.mark.slow
def test_files_have_no_shares_of_the_last_step(tmp_path):
    config = dataclasses.replace(MOE, balance_over="step", positions="rope", tied=False)
    params = params_of(config)
    weights.save(tmp_path / "model", config, params)
    read = named_leaves(weights.load(weights.open_weights(tmp_path / "model", config)))
    rest = {name: x for name, x in named_leaves(params).items() if not name.endswith("/shares")}
    assert read.keys() == rest.keys() != named_leaves(params).keys()
    assert all((read[name] == x).all() for name, x in rest.items() if name.startswith("blocks/"))
