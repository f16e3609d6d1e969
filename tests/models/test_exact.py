"""The trainer's log-probability of what a server has sampled, against the server's, to the bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.models import decoder, exact
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.ops.rotary import DynamicScaling
from jaxtrain.serve.engine import Engine, Request

VOCAB, T = 257, 150
LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
FORMS = {
    "gpt2": {},
    "llama": {**LLAMA, "kv_heads": 2},
    "windows": {"positions": "rope", "window": 37, "window_pattern": (True, False)},
    "gemma": {
        **LLAMA,
        "norm_position": "sandwich",
        "embed_scale": True,
        "logit_softcap": 30.0,
        "attention_softcap": 50.0,
    },
    "experts": {**LLAMA, "experts": 4, "experts_per_token": 2},
    "sinks": {**LLAMA, "sinks": True, "window": 37, "window_pattern": (True, False)},
    "latent": {
        **LLAMA,
        **{"experts": 4, "experts_per_token": 2, "dense_layers": 1, "dense_width": 64},
        **{"kv_rank": 12, "q_rank": 20, "head_dim": 16, "rope_dim": 4, "v_dim": 8},
    },
}


@functools.cache
def model_of(form, dtype="float32"):
    config = DecoderConfig(vocab_size=VOCAB, seq_len=T, layers=2, width=48, heads=4, **FORMS[form])
    params = decoder.init(config, jax.random.key(0))
    return config, jax.tree.map(lambda x: (3 * x).astype(dtype), params)


def sampled(engine, requests, cancel=()):
    """The tokens of each request that is not cancelled, and their log-probabilities."""
    numbers = [engine.submit(request) for request in requests]
    found, steps = {number: [] for number in numbers}, 0
    while engine.is_busy:
        for event in engine.step():
            found[event.number].append((event.token, event.logprob))
        if (steps := steps + 1) == 3:
            for index in cancel:
                engine.cancel(numbers[index])
    kept = [n for i, n in enumerate(numbers) if i not in cancel]
    return [list(zip(*found[n], strict=True)) for n in kept]


@functools.cache
def trainer(config):
    return jax.jit(functools.partial(exact.log_probs, config))


def trained(config, params, texts, rng):
    """The trainer's log-probabilities of the answers of some prompts, in batches of three."""
    found = {}
    order = rng.permutation(len(texts))
    for part in (order[i : i + 3] for i in range(0, len(order), 3)):
        tokens, mask = rng.integers(0, VOCAB, (3, T + 1)), np.zeros((3, T), np.float32)
        for row, index in enumerate(part):
            prompt, answer = texts[index]
            tokens[row, : len(prompt) + len(answer)] = [*prompt, *answer]
            mask[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = 1
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
        log_p = np.asarray(trainer(config)(params, batch))
        for row, index in enumerate(part):
            found[index] = log_p[row][mask[row] > 0]
    return [found[index] for index in range(len(texts))]


def check(form, dtype="float32", *, trials, sizes, quantize=None, draft=None):
    config, params = model_of(form, dtype)
    params = Quantize(quantize, group=4).params(params, jax.random.key(0))
    rng, told = np.random.default_rng(0), 0
    for trial, each in enumerate(sizes):
        engine = Engine(config, params, exact=True, draft=draft, **each)
        beginning = rng.integers(0, VOCAB, 64).tolist()
        for seed in range(trials):
            requests = [
                Request(
                    [*beginning[: rng.choice([0, 64])], *rng.integers(0, VOCAB, n).tolist()],
                    int(rng.integers(1, 30)),
                    temperature=float(rng.choice([0, 1])),
                    top_k=int(rng.choice([9, VOCAB])),
                    seed=seed,
                )
                for n in rng.integers(1, 57, 9)
            ]
            gone = {i for i in range(len(requests)) if rng.random() < 0.2}
            answers = sampled(engine, requests, gone)
            prompts = [x.prompt for i, x in enumerate(requests) if i not in gone]
            texts = [(p, tokens) for p, (tokens, _) in zip(prompts, answers, strict=True)]
            theirs = trained(config, params, texts, rng)
            for (_, logprobs), own in zip(answers, theirs, strict=True):
                np.testing.assert_array_equal(np.float32(logprobs), own, f"{trial} {seed}")
                told += len(own)
        assert engine.programs == 2
    return told


SIZES = (
    {"slots": 3, "readers": 2, "longest": 140},
    {"slots": 20, "readers": 3, "chunk": 128, "pages": 31},
    {"slots": 2, "readers": 5},
)


def test_a_trainer_has_the_bits_of_a_server():
    assert check("llama", "bfloat16", trials=1, sizes=SIZES[:1]) > 80


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_has_the_bits_of_servers_of_any_size(form, dtype):
    assert check(form, dtype, trials=8, sizes=SIZES) > 2000


@pytest.mark.slow
def test_packed_kernels_have_a_server_s_bits():
    check("llama", trials=4, sizes=SIZES[:2], quantize="nf4")


def batch_of(rows, seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (rows, 41))
    mask = np.ones((rows, 40), np.float32)
    mask[:, 30:] = 0
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def usual_log_probs(config, params, batch):
    x = decoder.run(config, params, {"tokens": batch["tokens"]})
    return decoder.log_probs(config, params, x, batch)


@pytest.mark.parametrize(
    "axes",
    [
        *(pytest.param(axes, marks=pytest.mark.slow) for axes in ({}, {"data": 2})),
        {"data": 2, "fsdp": 2},
    ],
)
def test_a_step_has_these_bits_and_the_gradient_of_the_usual_pass(axes):
    config, params = model_of("llama")
    batch, rules = batch_of(4), decoder.RULES
    own = np.asarray(trainer(config)(params, batch))
    sampled_BT = own - np.float32(0.25)

    def loss(of):
        def ratios(params, batch, rng):
            log_p_BT = of(config, params, batch)
            ratio_BT = jnp.exp(log_p_BT - batch["sampled"]) * batch["mask"]
            seen = {"same": ((log_p_BT == batch["own"]) * batch["mask"]).sum()}
            return jt.WeightedLoss(ratio_BT.sum(), batch["mask"].sum(), seen)

        return ratios

    given = batch | {"sampled": sampled_BT, "own": own}
    expected = jax.jit(jax.grad(lambda p: loss(usual_log_probs)(p, given, None).total / 120))(
        params
    )
    mesh = jt.make_mesh(**axes, devices=jax.devices()[: 2 ** len(axes)])
    optimizer = jt.make_optimizer("sgd", learning_rate=1.0)
    state = jt.init_state(lambda _: params, optimizer, jax.random.key(0), mesh=mesh, rules=rules)
    step = jt.build_train_step(loss(exact.log_probs), optimizer)
    train = jt.compile_step(step, state, given, mesh=mesh, rules=rules)
    after, metrics = train(state, given)
    assert metrics["same"] == 1  # of every token that counts
    assert metrics["loss"] == pytest.approx(np.exp(0.25), rel=1e-6)
    for x, y, g in zip(*map(jax.tree.leaves, (params, after.params, expected)), strict=True):
        np.testing.assert_allclose(x - y, g, atol=2e-5 * max(1, np.abs(g).max()))


@pytest.mark.slow
def test_rows_end_where_nothing_counts_and_agree_with_the_usual_pass():
    config, params = model_of("llama")
    batch = batch_of(3)
    found, expected = trainer(config)(params, batch), usual_log_probs(config, params, batch)
    np.testing.assert_allclose(found[:, :30], expected[:, :30], atol=1e-4)
    assert not found[:, 30:].any()
    every = jax.jit(jax.grad(lambda params: exact.log_probs(config, params, batch).sum()))(params)
    cut = {name: x[:, :30] for name, x in batch.items()}
    first = jax.jit(jax.grad(lambda params: exact.log_probs(config, params, cut).sum()))(params)
    for x, y in zip(jax.tree.leaves(every), jax.tree.leaves(first), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


@pytest.mark.slow
def test_a_draft_changes_no_bit():
    config, params = model_of("llama")
    draft = dataclasses.replace(config, layers=1)
    given = {"exact": True, "slots": 3, "longest": 100}
    asked = [Request([5, 6, i], 20, seed=i, temperature=i % 2) for i in range(4)]
    guesses = jax.tree.map(lambda x: x[:1], params["blocks"])
    engine = Engine(config, params, **given, draft=(draft, params | {"blocks": guesses}), drafts=3)
    assert sampled(engine, asked) == sampled(Engine(config, params, **given), asked)
    assert engine.guessed > engine.right > 0
    (one,) = sampled(engine, asked[:1])
    scores = engine.score([*asked[0].prompt, *one[0]])
    assert tuple(x for x, _ in scores[2:]) == one[1]


def test_what_cannot_be_exact_is_refused():
    config, params = model_of("llama")
    batch = batch_of(4)
    for given, said in (
        ({"page": 32}, "`page` is 32 and `exact` is set"),
        ({"cache": "int8"}, "`cache` is 'int8' and `exact` is set"),
        ({"adapters": {"x": {}}}, "`adapters` are given and `exact` is set"),
        ({"mesh": jt.make_mesh(tensor=2, devices=jax.devices()[:2])}, "the mesh has tensor=2"),
    ):
        with pytest.raises(ValueError, match=said):
            Engine(config, params, exact=True, **given)
    with pytest.raises(ValueError, match="the batch has segments"):
        exact.log_probs(config, params, batch | {"segments": batch["mask"]})
    scaled = dataclasses.replace(config, rope_scaling=DynamicScaling(4.0, 8))
    with pytest.raises(ValueError, match="length of a row is 40: rope_type dynamic"):
        exact.log_probs(scaled, params, batch)
    for axes, rows, said in (
        ({"tensor": 2}, 4, "the mesh has tensor=2, over which sums"),
        ({"data": 2}, 3, "a batch of 3 rows does not divide over the 2 devices"),
    ):
        mesh = jt.make_mesh(**axes, devices=jax.devices()[:2])
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=said):
            exact.log_probs(config, params, batch_of(rows))
