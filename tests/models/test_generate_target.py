"""Generation from an encoder-decoder: the caches against the uncached forward, and beams of all."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models import encoder_decoder as t5
from jaxtrain.models.decoding import Cache, decoder_of
from jaxtrain.models.generate import (
    Prompts,
    Weights,
    _Form,
    _found,
    beam_search,
    beam_step,
    generate,
    prompts,
)
from jaxtrain.models.sampling import make_sampling

CONFIG = t5.T5Config(
    vocab_size=7,
    source_len=8,
    target_len=8,
    layers=2,
    width=16,
    heads=4,
    buckets=4,
    max_distance=6,
    mlp="geglu",
    tied=False,
)
SOURCE = np.array([[3, 1, 4, 1, 5], [5, 2, 0, 0, 0]], np.int32)
LENGTHS = np.array([5, 2], np.int32)


@functools.cache
def params():
    return jax.jit(lambda: jax.tree.map(lambda x: 2.0 * x, t5.init(CONFIG, jax.random.key(0))))()


@jax.jit
def logits(params, source, lengths, tokens):
    segments = (jnp.arange(source.shape[1]) < lengths[:, None]).astype(jnp.int32)
    batch = {"source": source, "source_segments": segments, "tokens": tokens}
    return t5.logits(CONFIG, params, batch)


def uncached(*batch):
    return np.asarray(logits(params(), *batch))


def test_cached_logits_are_the_uncached_ones():
    tokens = np.random.default_rng(0).integers(0, 7, (2, 6)).astype(np.int32)
    tokens[:, 0] = 0
    expected = uncached(SOURCE, LENGTHS, tokens)
    decoder, rows = decoder_of(CONFIG), np.arange(2)
    z, cache = jax.jit(functools.partial(decoder.prefill, room=6))(params(), SOURCE, LENGTHS)
    np.testing.assert_allclose(z, expected[:, 0], atol=1e-5)
    extend, start = jax.jit(decoder.extend), np.array([1, 1], np.int32)
    for count in np.array([[2, 1], [1, 2], [2, 2]], np.int32):
        chunk = np.pad(tokens, ((0, 0), (0, 1)))[rows[:, None], start[:, None] + np.arange(2)]
        z, cache = extend(params(), cache, chunk, start, count)
        start = start + count  # another array: what was given may still be read
        np.testing.assert_allclose(z, expected[rows, start - 1], atol=1e-5)


@pytest.mark.slow
def test_sampled_tokens_have_the_model_s_probabilities():
    rows = [np.repeat(x, 4000, axis=0) for x in (SOURCE[1:], LENGTHS[1:])]
    found = generate(
        CONFIG, params(), rows[0], prompt_lengths=rows[1], max_new_tokens=1, rng=jax.random.key(0),
        temperature=2.0, top_k=4,
    )  # fmt: skip
    z = uncached(SOURCE[1:], LENGTHS[1:], np.zeros((1, 1), np.int32))[0, 0] / 2
    kept = np.argsort(z)[-4:]
    expected = np.zeros(7)
    expected[kept] = np.exp(z[kept]) / np.exp(z[kept]).sum()
    np.testing.assert_allclose(np.bincount(found[:, 0], minlength=7) / 4000, expected, atol=0.03)


@pytest.mark.slow
def test_many_beams_find_the_best_of_all_targets():
    count, eod = 3, 6
    found, scores = beam_search(
        CONFIG, params(), SOURCE, prompt_lengths=LENGTHS, max_new_tokens=count, beams=3, eod=eod
    )
    targets = np.array(list(itertools.product(range(7), repeat=count)), np.int32)
    read = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    for row in range(2):
        alike = [np.repeat(x[row : row + 1], len(targets), axis=0) for x in (SOURCE, LENGTHS)]
        logs = np.asarray(jax.nn.log_softmax(uncached(*alike, read)))
        logs = np.take_along_axis(logs, targets[..., None], 2)[..., 0]
        lengths = np.where((targets == eod).any(1), (targets == eod).argmax(1) + 1, count)
        sums = np.where(np.arange(count) < lengths[:, None], logs, 0).sum(1) / lengths
        best = targets[sums.argmax()]
        ended = np.cumsum(best == eod) > 0
        np.testing.assert_allclose(scores[row], sums.max(), atol=1e-5)
        np.testing.assert_array_equal(found[row], np.where(ended, eod, best))


@pytest.mark.slow
def test_the_score_of_a_beam_is_that_of_its_own_tokens():
    """Of a model whose cache is a number that each token changes, and that has a row of logits."""
    B, V, count, eod, states, penalty = 8, 6, 5, 0, 97, 1.5
    table = 2 * np.random.default_rng(0).normal(size=(states, V)).astype(np.float32)

    class Counter:
        stacks = ()

        def rows(self, tokens, lengths):
            return tokens, lengths

        def prefill(self, params, tokens, lengths, *, room):
            k = jnp.arange(B).reshape(1, B, 1, 1, 1)
            return jnp.asarray(table)[:B], Cache(k, k)

        def extend(self, params, cache, tokens, start, count):
            k = (3 * cache.k[0, :, 0, 0, 0] + tokens[:, 0] + 1) % states
            return jnp.asarray(table)[k], Cache(k.reshape(1, -1, 1, 1, 1), cache.v)

    chosen = make_sampling(table.shape[1], temperature=0, repetition_penalty=penalty, eod=eod)
    batch = Prompts(np.zeros((B, 1), int), np.zeros(B, int), sampling=chosen)
    found, scores = _found(_Form(Counter(), count, 3, 2.0), Weights({}), batch)
    for row, (tokens, score) in enumerate(zip(np.asarray(found), scores, strict=True)):
        total, k, seen = 0.0, row, set()
        for length, token in enumerate(tokens.tolist(), 1):
            log = table[k, token] - np.log(np.exp(table[k]).sum())
            total += log * (penalty if token in seen else 1)
            expected = total / length**2.0
            seen, k = seen | {token}, (3 * k + token + 1) % states
            if token == eod:
                break
        assert score == pytest.approx(expected, rel=1e-4), row


def test_mistakes_are_refused():
    write = functools.partial(generate, CONFIG, params(), max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt tokens from 1 to 9 do not fit a vocabulary of 7"):
        write(SOURCE + 4 * (SOURCE == 5), temperature=0.0, prompt_lengths=LENGTHS)
    with pytest.raises(ValueError, match="sampling needs rng"):
        write(SOURCE)
    with pytest.raises(ValueError, match="beams=4 must be from 1 to half of the vocabulary"):
        beam_search(CONFIG, params(), SOURCE, max_new_tokens=2)
    with pytest.raises(ValueError, match="length_penalty=nan must be a finite number"):
        beam_search(CONFIG, params(), SOURCE, max_new_tokens=2, beams=2, length_penalty=np.nan)
    batch = prompts(CONFIG, SOURCE, max_new_tokens=2, rng=jax.random.key(0))
    with pytest.raises(ValueError, match=r"temperature=1\.0, and a search with 3 beams draws no"):
        beam_step(CONFIG, max_new_tokens=2, beams=3)(Weights(params()), batch)
