"""Generation: the cache against the uncached forward, sampling against its definition in NumPy."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import decoder_of, longest_row
from jaxtrain.models.generate import (
    Prompts,
    Weights,
    beam_search,
    generate,
    generate_step,
    prompts,
)
from jaxtrain.models.sampling import penalise, truncate
from jaxtrain.ops.rotary import DynamicScaling, LongScaling, YarnScaling
from jaxtrain.tree import map_named

SIZES = dict(vocab_size=13, seq_len=12, layers=2, width=16, heads=4)
FORMS = {
    "gpt2": DecoderConfig(**SIZES),
    "llama": DecoderConfig(
        **SIZES,
        kv_heads=2,
        head_dim=6,
        qk_norm=True,
        window=5,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        bias=False,
        tied=False,
    ),
}
LATENT = dict(kv_rank=6, q_rank=10, head_dim=8, rope_dim=4, v_dim=5, rope_pairs="adjacent")
# Latent vectors in the cache, a layer before the stack, and groups of experts.
FORMS["deepseek"] = DecoderConfig(
    **SIZES | LATENT,
    positions="rope",
    norm="rmsnorm",
    mlp="swiglu",
    bias=False,
    experts=8,
    mlp_width=6,
    shared_experts=1,
    routing="sigmoid",
    routed_scale=1.5,
    groups=4,
    groups_per_token=2,
    dense_layers=1,
    dense_width=20,
    rope_scaling=YarnScaling(4.0, 8, 1.0, all_dim=1.0),
)
FORMS["gpt oss"] = DecoderConfig(
    **SIZES,
    kv_heads=2,
    sinks=True,
    window=3,
    window_pattern=(True, False),
    positions="rope",
    norm="rmsnorm",
    mlp="swiglu_clamped",
    experts=4,
    mlp_width=6,
)
PROMPTS = np.array([[3, 1, 4, 1], [5, 9, 0, 0]], np.int32)
LENGTHS = np.array([4, 2], np.int32)

both_forms = pytest.mark.parametrize("form", list(FORMS))
FORMS["sinusoidal"] = DecoderConfig(
    **SIZES, positions="sinusoidal", embed_scale=True, window=3, global_tokens=2
)


@functools.cache
def params_of(form):
    shapes = jax.eval_shape(functools.partial(decoder.init, FORMS[form]), jax.random.key(0))
    rng = np.random.default_rng(0)

    def draw(name, leaf):
        values = 0.3 * rng.standard_normal(leaf.shape) + name.endswith("scale")
        return jnp.asarray(values, jnp.float32)

    return map_named(draw, shapes)


@functools.cache
def uncached(form):
    return jax.jit(functools.partial(decoder.logits, FORMS[form]))


def last_logits(form, rows):
    """Logits after each of several rows of any length; one compilation, by padding."""
    padded = np.zeros((len(rows), 12), np.int32)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    z = uncached(form)(params_of(form), padded)
    return np.stack([z[i, len(row) - 1] for i, row in enumerate(rows)])


def greedy(form, rows, count, penalty=1.0):
    rows = [list(row) for row in rows]
    for _ in range(count):
        for row, z in zip(rows, last_logits(form, rows), strict=True):
            seen = np.isin(np.arange(13), row)
            z = np.where(seen, np.where(z > 0, z / penalty, z * penalty), z)
            row.append(int(z.argmax()))
    return np.array([row[-count:] for row in rows])


@both_forms
def test_cached_logits_are_the_uncached_ones(form):
    config, params = FORMS[form], params_of(form)
    model = decoder_of(config)
    rows = [list(row[:n]) for row, n in zip(PROMPTS, LENGTHS, strict=True)]
    z, cache = jax.jit(functools.partial(model.prefill, room=5))(params, PROMPTS, LENGTHS)
    extend = jax.jit(model.extend)
    for array, (heads, features) in zip((cache.k, cache.v), config.block.cached, strict=True):
        assert array.shape == (2, 2, heads, 9, features)
    np.testing.assert_allclose(z, last_logits(form, rows), atol=1e-5)
    chunks = np.array([[[7, 2], [3, 0]], [[0, 12], [6, 6]], [[6, 6], [1, 4]]], np.int32)
    for chunk, count in zip(chunks, np.array([[2, 1], [1, 2], [2, 2]], np.int32), strict=True):
        start = np.array([len(row) for row in rows], np.int32)
        rows = [[*row, *new[:n]] for row, new, n in zip(rows, chunk, count, strict=True)]
        z, cache = extend(params, cache, chunk, start, count)
        np.testing.assert_allclose(z, last_logits(form, rows), atol=1e-5)


@pytest.mark.parametrize(("form", "penalty"), [("gpt2", 1.7), ("llama", 1.0), ("sinusoidal", 1.0)])
def test_greedy_tokens_are_those_of_the_uncached_forward(form, penalty):
    got = generate(
        FORMS[form],
        params_of(form),
        PROMPTS,
        max_new_tokens=6,
        prompt_lengths=LENGTHS,
        temperature=0.0,
        repetition_penalty=penalty,
    )
    rows = [row[:n] for row, n in zip(PROMPTS, LENGTHS, strict=True)]
    np.testing.assert_array_equal(got, greedy(form, rows, 6, penalty))


def test_many_beams_find_the_best_of_all_continuations():
    count, eod = 3, 6
    found, scores = beam_search(
        FORMS["gpt2"], params_of("gpt2"), PROMPTS, prompt_lengths=LENGTHS, max_new_tokens=count,
        beams=6, eod=eod,
    )  # fmt: skip
    targets = np.array(list(itertools.product(range(13), repeat=count)), np.int32)
    ended = np.cumsum(np.cumsum(targets == eod, axis=1), axis=1) > 1
    targets = np.unique(np.where(ended, eod, targets), axis=0)
    counted = np.cumsum(np.cumsum(targets == eod, axis=1), axis=1) <= 1
    for row, n in enumerate(LENGTHS):
        rows = np.zeros((len(targets), 12), np.int32)
        rows[:, :n], rows[:, n : n + count] = PROMPTS[row, :n], targets
        z = np.float64(uncached("gpt2")(params_of("gpt2"), rows))[:, n - 1 : n - 1 + count]
        logs = z - np.log(np.exp(z).sum(axis=2, keepdims=True))
        logs = np.take_along_axis(logs, targets[..., None], axis=2)[..., 0]
        means = (logs * counted).sum(axis=1) / counted.sum(axis=1)
        np.testing.assert_allclose(scores[row], means.max(), atol=1e-5)
        np.testing.assert_array_equal(found[row], targets[means.argmax()])


def test_top_k_of_one_is_greedy_and_sampling_follows_the_key():
    run = functools.partial(generate, FORMS["llama"], params_of("llama"), PROMPTS, max_new_tokens=6)
    key = jax.random.key(0)
    np.testing.assert_array_equal(run(rng=key, top_k=1), run(temperature=0.0))
    np.testing.assert_array_equal(run(rng=key, temperature=3.0), run(rng=key, temperature=3.0))
    assert (run(rng=key, temperature=3.0) != run(rng=jax.random.key(1), temperature=3.0)).any()


def drawn(**settings):
    """4,000 draws of two tokens each after one prompt, by one program."""
    rows = np.repeat(PROMPTS[:1], 4000, axis=0)
    settings = {"rng": jax.random.key(0), "top_k": 13, "top_p": 1.0} | settings
    return generate(FORMS["llama"], params_of("llama"), rows, max_new_tokens=2, **settings)


def test_sampled_tokens_have_the_model_s_probabilities():
    new = drawn(temperature=2.0, top_k=5)
    z = last_logits("llama", PROMPTS[:1])[0] / 2.0
    kept = np.argsort(z)[-5:]
    expected = np.zeros(13)
    expected[kept] = np.exp(z[kept]) / np.exp(z[kept]).sum()
    np.testing.assert_allclose(np.bincount(new[:, 0], minlength=13) / 4000, expected, atol=0.03)


def test_the_nucleus_is_that_of_the_tempered_distribution():
    z = last_logits("llama", PROMPTS[:1])[0] / 2.0
    p = np.exp(z) / np.exp(z).sum()
    order = np.argsort(-p)
    kept = order[: 1 + int((np.cumsum(p[order])[:-1] < 0.6).sum())]
    assert set(np.unique(drawn(temperature=2.0, top_p=0.6)[:, 0])) == set(kept.tolist())


def test_each_new_token_has_a_draw_of_its_own():
    # So hot that tokens do not depend on those before: 13 x 13 pairs are equally likely.
    new = drawn(temperature=1e4)
    pairs = np.bincount(new[:, 0] * 13 + new[:, 1], minlength=169)
    assert ((pairs - 4000 / 169) ** 2 / (4000 / 169)).sum() < 260  # chi-squared of 168, p = 1e-5


def test_after_eod_a_row_is_filled_with_it():
    run = functools.partial(
        generate,
        FORMS["llama"],
        params_of("llama"),
        PROMPTS,
        max_new_tokens=8,
        rng=jax.random.key(0),
        temperature=3.0,
    )
    free = np.asarray(run())
    eod = int(free[0, 2])
    assert (free[0, 3:] != eod).any()
    for row, whole in zip(np.asarray(run(eod=eod)), free, strict=True):
        end = list(whole).index(eod) if eod in whole else 8
        np.testing.assert_array_equal(row[:end], whole[:end])
        assert (row[end:] == eod).all()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    top_k=st.sampled_from([None, 1, 3, 8]),
    top_p=st.sampled_from([None, 1e-6, 0.3, 0.9, 1.0]),
)
def test_truncation_is_that_of_the_definition(seed, top_k, top_p):
    z = np.random.default_rng(seed).standard_normal(8).astype(np.float32) * 2
    order = list(np.argsort(-z)[:top_k])
    if top_p is not None:
        probabilities = np.exp(z[order]) / np.exp(z[order]).sum()
        mass = np.cumsum(probabilities)
        if np.abs(mass[:-1] - top_p).min(initial=1) < 1e-5:
            return  # rounding decides
        order = order[: 1 + int((mass[:-1] < top_p).sum())]
    got = truncate(jnp.asarray(z)[None], top_k=top_k, top_p=top_p)[0]
    expected = np.where(np.isin(np.arange(8), order), z, -np.inf)
    np.testing.assert_array_equal(got, expected)


def test_ties_with_the_last_token_kept_are_kept():
    z = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    np.testing.assert_array_equal(truncate(z, top_k=1, top_p=None) > -jnp.inf, [[0, 1, 1, 0]])


def test_penalty_leaves_unseen_tokens_alone():
    z, seen = jnp.array([[3.0, -3.0, 0.5]]), jnp.array([[True, True, False]])
    np.testing.assert_allclose(penalise(z, seen, 1.5), [[2.0, -4.5, 0.5]])


def test_rotary_positions_may_exceed_the_training_length():
    run = functools.partial(generate, prompt_tokens=PROMPTS, max_new_tokens=9, temperature=0.0)
    assert run(FORMS["llama"], params_of("llama")).shape == (2, 9)
    with pytest.raises(ValueError, match="4 tokens and 9 new ones exceed the 12 learned positions"):
        run(FORMS["gpt2"], params_of("gpt2"))
    batch = prompts(FORMS["gpt2"], PROMPTS, max_new_tokens=8, temperature=0.0)
    step = generate_step(FORMS["gpt2"], max_new_tokens=9)
    with pytest.raises(ValueError, match="writes 9 new tokens has prompts for 8: give both the sa"):
        step(Weights(params_of("gpt2")), batch)


LONG = LongScaling((1.0,) * 3, (2.0, 3.0, 9.0), 8, 1.0)


@pytest.mark.parametrize("scaling", [DynamicScaling(4.0, 8), LONG], ids=["dynamic", "longrope"])
def test_positions_scaled_by_the_row_are_generated_within_their_length_alone(scaling):
    config = dataclasses.replace(FORMS["llama"], rope_scaling=scaling)
    padded = np.pad(PROMPTS, ((0, 0), (0, 8)))  # to more than the rows' length
    given = {"prompt_lengths": LENGTHS, "temperature": 0.0}
    rows = [list(row[:n]) for row, n in zip(PROMPTS, LENGTHS, strict=True)]
    prefill = jax.jit(functools.partial(decoder_of(config).prefill, room=4))
    z, _ = prefill(params_of("llama"), padded, LENGTHS)
    np.testing.assert_allclose(z, last_logits("llama", rows), atol=1e-5)
    said = "length of a row is 9: .* beyond 8, .*; ask for at most 8 positions, or .* rope_type y"
    with pytest.raises(ValueError, match=said):
        generate(config, params_of("llama"), padded, max_new_tokens=5, **given)
    with pytest.raises(ValueError, match=said):
        beam_search(config, params_of("llama"), PROMPTS, max_new_tokens=5)
    unchecked = Prompts(PROMPTS, LENGTHS)  # of any number of new tokens
    with pytest.raises(ValueError, match=said):
        generate_step(config, max_new_tokens=5)(Weights(params_of("llama")), unchecked)
    longest = [longest_row(model) for model in (config, FORMS["llama"], FORMS["gpt2"])]
    assert longest == [8, None, 12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rng": None}, "sampling needs rng"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"temperature": math.nan}, "temperature=nan must be at least 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan must be above 0"),
        ({"repetition_window": 0}, "repetition_window=0 must be at least 1"),
        ({"min_tokens": -1}, "min_tokens=-1 must be at least 0"),
        ({"min_tokens": 3, "eod": 0}, "min_tokens=3 must be at most the max_new_tokens=2"),
        ({"top_k": 14}, "top_k=14 must be from 1 to the vocabulary's 13"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1e-50}, "top_p=0.0 must be above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf must be above 0 and finite"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0"),
        ({"prompt_lengths": [4, 5]}, "prompt_lengths must be 2 numbers from 1 to 4"),
        ({"prompt_tokens": PROMPTS / 2}, "prompt_tokens must be whole numbers, not float64"),
        ({"prompt_tokens": PROMPTS.astype(int) + 2**32}, "do not fit a vocabulary of 13"),
        ({"prompt_tokens": PROMPTS[0]}, r"prompt_tokens must be \[B, P\], not of shape \(4,\)"),
        (
            {"prompt_tokens": PROMPTS + 9},
            "prompt tokens from 9 to 18 do not fit a vocabulary of 13",
        ),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    options = {"prompt_tokens": PROMPTS, "max_new_tokens": 2, "rng": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        generate(FORMS["llama"], params_of("llama"), **(options | changes))
