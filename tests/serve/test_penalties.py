"""Penalties and least lengths of the server against transformers and counts in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.models import decoder
from jaxtrain.models.sampling import RowSampling, adjusted_rows
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.serve.programs import ENDS
from jaxtrain.sharding.rules import as_rules, param_shardings
from tests.serve.test_draft import near
from tests.serve.test_engine import SIZES, answers, engine_of, model_of, own_requests, prompts

torch = pytest.importorskip("torch")
logits_process = pytest.importorskip("transformers.generation.logits_process")


def expected(logits_V, tokens, begin, repetition, frequency, presence, least, ends, bias=None):
    """One row's logits: transformers' processors, and OpenAI's formula by a count."""
    ids, scores = torch.tensor([tokens]), torch.tensor(np.float32(logits_V)[None])
    if bias:
        by_token = {(token,): float(value) for token, value in bias.items()}
        scores = logits_process.SequenceBiasLogitsProcessor(by_token)(ids, scores)
    scores = logits_process.RepetitionPenaltyLogitsProcessor(repetition)(ids, scores)
    counts = np.bincount(tokens[begin:], minlength=len(logits_V))
    scores = scores - torch.tensor(frequency * counts + presence * (counts > 0))
    if ends:
        hold = logits_process.MinNewTokensLengthLogitsProcessor(begin, least, sorted(ends))
        scores = hold(ids, scores)
    return scores[0].numpy()


def test_rows_of_one_batch_have_the_logits_of_transformers_and_of_a_count():
    r = np.random.default_rng(0)
    tokens_RS, logits_RCV = r.integers(0, 9, (5, 20)), r.normal(size=(5, 2, 9)).astype("f")
    at_RC = np.array([[3, 4], [9, 10], [19, 20], [12, 13], [12, 13]])
    begin = [3, 2, 5, 4, 4]
    repetition, frequency = [1.7, 0.6, 1.3, 1.0, 1.0], [0.5, -1.5, 0.0, 2.0, 0.0]
    presence, least = [1.5, 0.25, -2.0, 0.0, 0.0], [1, 9, 15, 9, 0]
    ends = [{2}, {1, 8}, {0}, {3, 4, 5}, {7}]
    ends_RE = [[*sorted(each), *[-1] * (ENDS - len(each))] for each in ends]
    bias = [{3: 1.5, 1: -2}, {}, {0: 100}, {8: -100}, {}]
    biases = [[*each.items(), *[(9, 0.0)] * 2][:2] for each in bias]
    columns = repetition, frequency, presence, least, ends_RE, begin
    columns += (
        np.array([[token for token, _ in each] for each in biases]),
        np.float32([[value for _, value in each] for each in biases]),
    )
    sampling = RowSampling(*[None] * 5, *(np.repeat(x, 2, axis=0) for x in columns))
    logits_BV, at_B = jnp.array(logits_RCV.reshape(10, 9)), jnp.array(at_RC.reshape(10))
    found = np.array(adjusted_rows(sampling, jnp.array(tokens_RS), logits_BV, at_B))
    for row, (i, c) in enumerate(np.ndindex(5, 2)):
        own = repetition[i], frequency[i], presence[i], least[i], ends[i], bias[i]
        tokens = tokens_RS[i, : at_RC[i, c]].tolist()
        want = expected(logits_RCV[i, c], tokens, begin[i], *own)
        np.testing.assert_allclose(found[row], want, rtol=1e-6, atol=1e-6)
    assert found[8:].tobytes() == logits_RCV[4].tobytes()


SHAPES = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.1, "presence_penalty": -0.7},
    {"frequency_penalty": -0.4, "repetition_penalty": 0.8, "min_tokens": 9},
    {"min_tokens": 7, "presence_penalty": 2.0, "logit_bias": {7: 4.0, 30: -100.0}},
]


def shaped():
    """Requests with penalties, greedy and drawn, that an end of theirs would end early."""
    ends = frozenset(range(0, 31, 3))
    return [
        Request(prompt, 12, temperature=0.9 * (i // 4), seed=i, ends=ends, **SHAPES[i % 4])
        for i, prompt in enumerate(prompts(5, 3, 17, 8, 12, 1, 9, 16, 7))
    ]


@pytest.fixture(scope="module")
def plain():
    return engine_of("llama")


def test_answers_are_those_of_the_formula_whoever_shares_the_batch(plain):
    config, params = model_of("llama")
    neutral = [answers(plain, [each])[0] for each in own_requests()]
    alone = [answers(plain, [each])[0] for each in shaped()]
    assert answers(
        plain, [x for pair in zip(own_requests(), shaped(), strict=False) for x in pair]
    ) == [x for pair in zip(neutral, alone, strict=False) for x in pair]
    assert plain.programs == 2
    changed = 0
    logits = jax.jit(lambda tokens: decoder.logits(config, params, tokens)[0])
    for request, (tokens, _) in zip(shaped()[:4], alone, strict=False):
        row, begin = [*request.prompt, *tokens], len(request.prompt)
        scores = np.array(logits(np.array([row + [0] * (32 - len(row))])))
        given = request.repetition_penalty, request.frequency_penalty, request.presence_penalty
        for i, token in enumerate(tokens):
            own = begin, *given, request.min_tokens, request.ends, request.logit_bias
            assert token == expected(scores[begin + i - 1], row[: begin + i], *own).argmax()
            changed += token != scores[begin + i - 1].argmax()
        assert len(tokens) > request.min_tokens - 1
        assert len(tokens) == 12 or tokens[-1] in request.ends
    assert changed > 9


@pytest.mark.slow
def test_a_draft_changes_no_token_of_requests_with_penalties(plain):
    engine = Engine(*model_of("llama"), **SIZES, draft=near(), drafts=3)
    expected = answers(plain, [*shaped(), *own_requests()])
    found = answers(engine, [*shaped(), *own_requests()])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert engine.right > 0.4 * engine.guessed
    assert engine.programs == 2


@pytest.mark.slow
def test_a_mesh_writes_the_same_tokens_with_penalties(plain):
    config, params = model_of("llama")
    mesh = jt.make_mesh(tensor=4, devices=jax.devices()[:4])
    placed = jax.device_put(params, param_shardings(params, mesh, as_rules(decoder.RULES)))
    found = answers(Engine(config, placed, **SIZES, mesh=mesh), shaped())
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in answers(plain, shaped())]


def test_min_p_leaves_what_is_probable_enough(plain):
    (prompt,) = prompts(3, 9)
    given = {"prompt": prompt, "max_tokens": 12, "top_logprobs": 2}
    asked = [Request(**given, temperature=9.0, min_p=1.0, seed=i) for i in range(3)]
    best, _ = answers(plain, [Request(**given, temperature=0)])[0]
    assert all(found == best for found, _ in answers(plain, asked))
    wild, _ = answers(plain, [Request(**given, temperature=9.0)])[0]
    assert wild != best


def test_a_least_length_that_cannot_be_held_is_refused(plain):
    given = Request([1, 2], 3, min_tokens=4)
    with pytest.raises(ValueError, match="min_tokens is 4"):
        plain.submit(given)
    with pytest.raises(ValueError, match="with 17 tokens that end"):
        plain.submit(dataclasses.replace(given, min_tokens=1, ends=frozenset(range(17))))
