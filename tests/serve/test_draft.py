"""A draft's proposals against the engine without them, and the model's own probabilities."""

import itertools

import jax
import numpy as np
import pytest
import scipy.stats

import jaxtrain as jt
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.sharding.rules import as_rules, param_shardings
from tests.serve.test_engine import (
    FORMS,
    SIZES,
    answers,
    check_company,
    engine_of,
    model_of,
    own_requests,
    prompts,
)


def draft_of(seed=1, **given):
    config = DecoderConfig(vocab_size=31, seq_len=64, layers=1, width=8, heads=2, **given)
    return config, jax.tree.map(lambda x: 3 * x, decoder.init(config, jax.random.key(seed)))


def near(form="llama", noise=0.05):
    """A draft that is often right: the model itself with noise."""
    config, params = model_of(form)
    r = np.random.default_rng(0)
    add = lambda x: x + noise * r.normal(0, np.std(x) + 0.01, x.shape).astype("f")  # noqa: E731
    return config, jax.tree.map(add, params)


def counted(engine, requests):
    """The answers, and how many tokens a row was written in a step."""
    writes, counts = engine._writes, []

    def write(*given):
        caches, drawn = writes(*given)
        counts.extend(np.asarray(drawn.count)[given[2].count > 0].tolist())
        return caches, drawn

    engine._writes = write
    right = engine.right
    found = answers(engine, requests)
    engine._writes = writes
    assert engine.right - right == sum(counts) - len(counts) <= engine.guessed
    return found, np.mean(counts)


def check_same(engine, plain, requests):
    found, each = counted(engine, requests)
    expected = answers(plain, requests)
    for (tokens, bits), (own, own_bits) in zip(found, expected, strict=True):
        assert tokens == own
        logprobs = (np.frombuffer(x, np.float32) for x in (bits, own_bits))
        np.testing.assert_allclose(*logprobs, atol=1e-5)
    assert engine.programs == 2
    assert engine.pool.free == engine.pool.count - 1
    return each


@pytest.mark.parametrize(
    ("draft", "least", "most"),
    [(near, 2, 4), pytest.param(draft_of, 1, 1.5, marks=pytest.mark.slow)],
)
def test_tokens_are_those_without_a_draft(draft, least, most):
    """Greedy and drawn ones, of a draft that is often right and of one that hardly is."""
    config, params = model_of("llama")
    plain = engine_of("llama")
    engine = Engine(config, params, **SIZES, draft=draft(), drafts=3)
    assert least <= check_same(engine, plain, own_requests()) <= most
    # Beginnings that both have read, and an end in the middle of what was proposed.
    alone = [answers(engine, [each])[0] for each in own_requests()]
    assert answers(engine, own_requests()) == alone
    end = alone[4][0][3]
    ended = Request(own_requests()[4].prompt, 9, temperature=0.0, ends=frozenset([end]))
    assert answers(engine, [ended])[0][0] == alone[4][0][: alone[4][0].index(end) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drafts", [1, 5])
def test_no_form_or_number_of_proposals_changes_a_token(form, drafts):
    config, params = model_of(form)
    plain = engine_of(form)
    engine = Engine(config, params, **SIZES, draft=near(form), drafts=drafts)
    for seed in range(12):
        requests = [
            Request(prompt, 1 + (7 * i) % 12, temperature=0.8 * (i % 2), seed=seed, top_p=0.95)
            for i, prompt in enumerate(prompts(seed, 1, 3, 8, 17, 28, 12))
        ]
        check_same(engine, plain, requests)


@pytest.mark.slow
def test_company_changes_no_bit_where_a_draft_proposes():
    config, params = model_of("llama")
    check_company(30, Engine(config, params, **SIZES, draft=near(noise=0.1), drafts=3))


@pytest.mark.slow
def test_tokens_that_a_draft_has_proposed_have_the_model_s_distribution():
    """Three tokens after a prompt, by 3,000 seeds, against the product of the model's own
    probabilities: chi-square."""
    config = DecoderConfig(vocab_size=4, seq_len=8, layers=1, width=8, heads=2)
    params = jax.tree.map(lambda x: 4 * x, decoder.init(config, jax.random.key(0)))
    draft = jax.tree.map(lambda x: 0.7 * x, params)
    sizes = {"slots": 64, "readers": 64, "chunk": 4, "page": 4}
    engine = Engine(config, params, **sizes, draft=(config, draft), drafts=2)
    rows = np.array([[1, 2, *rest] for rest in itertools.product(range(4), repeat=3)])
    logits = np.float64(decoder.logits(config, params, rows))
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.prod([probs[range(64), 1 + i, rows[:, 2 + i]] for i in range(3)], axis=0)
    count = 3000
    found, each = counted(engine, [Request([1, 2], 3, seed=seed) for seed in range(count)])
    at = [16 * a + 4 * b + c for (a, b, c), _ in found]
    observed, expected = np.bincount(at, minlength=64), count * expected
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    square = ((observed - expected) ** 2 / expected).sum()
    assert 30 < len(expected) < 60
    assert square < scipy.stats.chi2.ppf(0.999, len(expected) - 1)
    assert 1.2 < each < 1.9  # of 2, since the first is read: some proposals were right


@pytest.mark.slow
def test_a_mesh_writes_the_same_tokens_with_a_draft():
    config, params = model_of("llama")
    mesh = jt.make_mesh(tensor=4, devices=jax.devices()[:4])
    place = lambda x: jax.device_put(x, param_shardings(x, mesh, as_rules(decoder.RULES)))  # noqa: E731
    draft_config, draft = near()
    split = Engine(config, place(params), **SIZES, mesh=mesh, draft=(draft_config, place(draft)))
    plain = engine_of("llama")
    requests = [Request(prompt, 8, temperature=0) for prompt in prompts(6, 3, 19, 8)]
    ours, theirs = (answers(each, requests) for each in (split, plain))
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]


def test_a_draft_that_does_not_fit_is_refused():
    config, params = model_of("llama")
    for draft, more, said in (
        (draft_of(), {"drafts": 0}, "`drafts` is 0"),
        ((DecoderConfig(vocab_size=30, seq_len=64, layers=1, width=8, heads=2), {}), {}, "30 tok"),
        ((DecoderConfig(vocab_size=31, seq_len=32, layers=1, width=8, heads=2), {}), {}, "32 lear"),
    ):
        with pytest.raises(ValueError, match=said):
            Engine(config, params, **SIZES, draft=draft, **more)
