"""muP against the paper's own table, whose factors stand in the forward pass."""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models import decoder, encoder, mup
from jaxtrain.optim import masks
from jaxtrain.run import options
from jaxtrain.study.coordinates import coordinates, slopes_of
from jaxtrain.tree import map_named, named_leaves
from tests.commands import refused

HIDDEN = r"^blocks/(attn/(q|k|v|out)|mlp/(up|gate|down))/kernel$"
SIZES = {"vocab_size": 19, "seq_len": 12, "layers": 2, "scan_unroll": 2}
FORMS = {
    "gpt2": {},
    "llama": {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied": False}
    | {"kv_heads": 2},
    "gemma": {"positions": "rope", "norm": "rmsnorm", "norm_offset": True, "bias": False}
    | {"norm_position": "sandwich", "qk_norm": True},
}


def model_of(width, form="gpt2", **more):
    return decoder.DecoderConfig(width=width, heads=4, **SIZES | FORMS[form] | more)


def batch_of(seed, rows=4):
    tokens_BT = np.random.default_rng(seed).integers(0, 19, (rows, 13)).astype(np.int32)
    mask_BT = np.ones((rows, 12), np.float32)
    return {"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:], "mask": mask_BT}


def losses_of(config, init, loss, steps=5, rule="adamw", batch=None, **more):
    tx = jt.make_optimizer(
        rule, 0.01, weight_decay=0.3, stacked=("^blocks/",), **{"eps": 1e-16} | more
    )
    state = jt.init_state(init, tx, jax.random.key(0))
    step, found = jax.jit(jt.build_train_step(loss, tx)), []
    for _ in range(steps):
        state, metrics = step(state, batch or batch_of(0))
        found.append(float(metrics["loss"]))
    return state, found


def folded(config, base, **more):
    found = mup.factors(config, base, rule="adamw")
    rates = {"rate_multipliers": found.rate_of, "decay_multipliers": found.decay_of}
    return losses_of(config, mup.init(config, found), decoder.loss_fn(config), **rates, **more)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["llama", "gpt2", "gemma"])
def test_a_model_trains_as_by_the_papers_table(form):
    """Yang et al. 2022, table 8: logits and scores are divided in the forward pass."""
    config, base = model_of(64, form), model_of(16, form)
    shapes, small = (
        named_leaves(jax.eval_shape(functools.partial(decoder.init, x), jax.random.key(0)))
        for x in (config, base)
    )
    fan_in = {
        name: x.shape[-2] / small[name].shape[-2]
        for name, x in shapes.items()
        if re.search(HIDDEN, name)
    }
    assert set(fan_in.values()) <= {4.0, 256 / 64, 192 / 64}
    scaled = dataclasses.replace(config, query_pre_attn_scalar=config.block.head_dim**2 / 4)
    one = 1.0 if config.norm_offset else 0.0

    def forward(name, p):
        if not name.startswith("final_norm/"):
            return p
        return (p + one) / 4 - one if name.endswith("scale") else p / 4

    def init(rng):
        params = decoder.init(config, rng)
        return map_named(lambda name, p: p / fan_in.get(name, 1.0) ** 0.5, params)

    _, wanted = losses_of(
        scaled,
        init,
        lambda params, batch, rng: decoder.loss_fn(scaled)(map_named(forward, params), batch, rng),
        rate_multipliers=lambda name: 1 / fan_in.get(name, 1.0),
        decay_multipliers=lambda name: fan_in.get(name, 1.0),
    )
    _, found = folded(config, base)
    assert wanted[-1] < wanted[0] - 0.01
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [{}, pytest.param({"norm_position": "pre", "positions": "rope"}, marks=pytest.mark.slow)],
)
def test_an_encoder_trains_as_by_the_papers_table(form):
    """The same table, where the kernel of the transform is hidden and its norm scales logits."""
    config, base = (
        encoder.EncoderConfig(vocab_size=19, seq_len=12, layers=2, width=width, heads=4, **form)
        for width in (64, 16)
    )
    hidden = re.compile(r"^(head/transform|blocks/(attn/(q|k|v|out)|mlp/(up|down)))/kernel$")
    batch = batch_of(0)
    places = np.tile(np.arange(0, 12, 3, dtype=np.int32), (4, 1))
    batch = {"tokens": batch["tokens"], "places": places, "targets": batch["targets"][:, ::3]}
    batch["mask"] = np.ones((4, 4), np.float32)

    def forward(name, p):  # logits, and scores
        return p / (4 if name.startswith("head/norm/") else 2 if "/attn/q/" in name else 1)

    def trained(init, loss, **rates):
        return losses_of(config, init, loss, batch=batch, **rates)[1]

    def init(rng):
        smaller = lambda name, p: p / 2 if hidden.search(name) else p  # noqa: E731
        return map_named(smaller, encoder.init(config, rng))

    wanted = trained(
        init,
        lambda params, batch, rng: encoder.loss_fn(config)(map_named(forward, params), batch, rng),
        rate_multipliers=lambda name: 1 / 4 if hidden.search(name) else 1.0,
        decay_multipliers=lambda name: 4.0 if hidden.search(name) else 1.0,
    )
    found = mup.factors(config, base, rule="adamw")
    rates = {"rate_multipliers": found.rate_of, "decay_multipliers": found.decay_of}
    got = trained(mup.init(config, found), encoder.loss_fn(config), **rates)
    assert wanted[-1] < wanted[0] - 0.01
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


def test_at_the_base_width_it_is_the_standard_model_to_the_bit():
    config = model_of(32, "gemma")
    found = mup.factors(config, config, rule="muon")
    assert {*found.init.values(), *found.rate.values()} == {1.0}
    params = decoder.init(config, jax.random.key(0))
    assert all(map(operator.is_, *map(jax.tree.leaves, (found.begun(params), params))))


def slopes(rule, rate, names, widths=(16, 128)):
    found, base = {}, model_of(32, "llama", layers=1)
    for name in names:
        for width in widths:
            config = model_of(width, "llama", layers=1)
            init, rates = functools.partial(decoder.init, config), {}
            if name == "mup":
                factors = mup.factors(config, base, rule=rule)
                init = mup.init(config, factors)
                rates = {"rate_multipliers": factors.rate_of}
            tx = jt.make_optimizer(rule, rate, stacked=("^blocks/",), **rates)
            state = jt.init_state(init, tx, jax.random.key(0))
            step = jax.jit(jt.build_train_step(decoder.loss_fn(config), tx))
            measure = jax.jit(functools.partial(coordinates, config))
            before = measure(state.params, batch_of(9))
            for i in range(4):
                state, _ = step(state, batch_of(i, rows=16))
            after = measure(state.params, batch_of(9))
            found[name, width] = {n: float(jnp.abs(after[n] - before[n]).mean()) for n in after}
    return slopes_of(found, widths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("adamw", ["mup"]),
        *(
            pytest.param(rule, ["standard", "mup"], marks=pytest.mark.slow)
            for rule in ("adamw", "muon", "lion")
        ),
    ],
)
def test_steps_move_activations_as_far_at_every_width(rule, names):
    found = slopes(rule, 2**-7 if rule == "adamw" else 2**-8, names)
    for name in ("embeddings", "scores", "layers", "logits"):
        assert found["mup", name] < 0.25, name
    assert found["mup", "layers"] > -0.6
    if "standard" in names:
        assert found["standard", "layers"] > (0.3 if rule == "muon" else 0.7)


def test_factors_of_the_flags_multiply_those_of_a_model():
    params = {"blocks": {"up": jnp.ones((2, 3, 3))}, "head": jnp.ones((3, 3))}
    both = masks.Times([("^head", 0.5)], lambda name: 4.0 if name == "head" else 0.25)
    assert masks.multipliers("rate_multipliers", both, params) == {
        "blocks": {"up": 0.25},
        "head": 2.0,
    }
    with pytest.raises(ValueError, match="'^haed' matches no parameter".replace("^", r"\^")):
        masks.multipliers("rate_multipliers", both._replace(pairs=[("^haed", 1.0)]), params)
    flags = options.OptimizerOptions(name="sgd", schedule="constant", warmup_steps=0)
    flags = dataclasses.replace(
        flags, learning_rate=1.0, rate_multipliers=("^head=0.5",), clip_norm=None, weight_decay=0.0
    )
    own = {"rate_multipliers": both.factor_of}
    tx = options.make_optimizer(flags, steps=3, multipliers=own, stacked=("^blocks/",))
    updates, _ = tx.update(params, tx.init(params), params)
    assert float(updates["head"][0, 0]) == -2.0
    assert float(updates["blocks"]["up"][0, 0, 0]) == -0.25


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--optimizer.name", "sgd"], "the optimizer is 'sgd': muP is here for rules"),
        (["--model", "gemma3-1b"], "multiplies its embeddings by sqrt(width): muP"),
    ],
)
def test_what_has_no_rates_is_refused(flags, sentence, capsys):
    given = ["plan", "experiments.gpt", "--target", "cpu:1", "--parametrization", "mup"]
    assert sentence in refused(capsys, *given, *flags)
