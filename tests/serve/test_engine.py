"""The engine against generation, and against itself in other company."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.finetune.quantize import Quantize
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.decoding import CausalDecoder, Pages
from jaxtrain.models.generate import generate
from jaxtrain.ops.cached import Rounded
from jaxtrain.ops.rotary import DynamicScaling
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.serve.pages import PagePool, digests_of
from jaxtrain.sharding.rules import as_rules, param_shardings
from tests.test_readme import blocks

FORMS = {
    "gpt2": {},
    "llama": {
        "positions": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "kv_heads": 2,
    },
    "windows": {"positions": "rope", "window": 5, "window_pattern": (True, False)},
}
LATENT = {**FORMS["llama"], "kv_heads": None, "head_dim": 8, "kv_rank": 6, "q_rank": 10}
MORE = {
    "latent attention": LATENT | {"experts": 4, "dense_layers": 1},
    "sinks": FORMS["windows"] | {"sinks": True},
}
SIZES = {"slots": 4, "readers": 2, "chunk": 8, "page": 4, "longest": 40}


@functools.cache
def model_of(form="gpt2", dtype=jnp.float32):
    given = {"tied": False} if form == "untied" else (FORMS | MORE)[form]
    config = DecoderConfig(vocab_size=31, seq_len=64, layers=2, width=16, heads=4, **given)
    params = decoder.init(config, jax.random.key(0))
    # Larger than at the start: logits differ, and the most probable token is no tie.
    return config, jax.tree.map(lambda x: (3 * x).astype(dtype), params)


@functools.cache
def logits_of(form):
    config, params = model_of(form)
    return jax.jit(lambda tokens: decoder.logits(config, params, tokens))


@functools.cache
def _shared(form, dtype, sizes):
    return Engine(*model_of(form, dtype), **dict(sizes))


def engine_of(form="gpt2", dtype=jnp.float32, **sizes):
    """An engine that tests share, since each compiles two programs; it has read nothing."""
    engine = _shared(form, dtype, tuple(sorted((SIZES | sizes).items())))
    assert not engine.is_busy
    engine.pool.forget()
    return engine


def prompts(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 31, length).tolist() for length in lengths]


def answers(engine, requests, *, cancel=()):
    """Returns tokens and the bits of log-probabilities by request; some are cancelled early."""
    numbers = [engine.submit(request) for request in requests]
    found = {number: [] for number in numbers}
    steps = 0
    while engine.is_busy:
        for event in engine.step():
            found[event.number].append(event)
        steps += 1
        if steps == 2:
            for index in cancel:
                engine.cancel(numbers[index])
    return [
        ([e.token for e in found[n]], np.float32([e.logprob for e in found[n]]).tobytes())
        for n in numbers
    ]


@pytest.mark.parametrize(
    "form",
    ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt2", "windows", *MORE))],
)
def test_tokens_are_those_of_generation(form):
    config, params = model_of(form)
    asked = prompts(0, 1, 7, 8, 9, 20, 16)
    engine = engine_of(form)
    found = answers(engine, [Request(prompt, 12, temperature=0) for prompt in asked])
    rows = [prompt + [0] * (20 - len(prompt)) for prompt in asked]
    lengths = [len(prompt) for prompt in asked]
    given = {"prompt_lengths": lengths, "max_new_tokens": 12, "temperature": 0}
    expected = generate(config, params, rows, **given)
    assert [tokens for tokens, _ in found] == expected.tolist()
    assert engine.programs == 2
    assert engine.pool.free == 4 * 10  # nothing leaks


def own_requests():
    beginning = prompts(7, 16)[0]
    asked = [*prompts(1, 1, 5, 8, 17), beginning, [*beginning, 3, 4]]
    return [
        Request(prompt, 9, temperature=0.9 * (i % 2), top_k=9, top_p=0.9, seed=i, top_logprobs=i)
        for i, prompt in enumerate(asked)
    ]


def packed_engine(form, dtype, quantize, **sizes):
    config, params = model_of(form, dtype)
    params = Quantize(quantize, group=4).params(params, jax.random.key(0))
    return Engine(config, params, **SIZES | sizes)


def check_company(trials, engine):
    alone = [answers(engine, [request])[0] for request in own_requests()]
    assert len({tokens[0] for tokens, _ in alone}) > 1
    rng = np.random.default_rng(0)
    for trial in range(trials):
        others = [
            Request(prompt, int(rng.integers(1, 12)), temperature=1.0, seed=trial)
            for prompt in prompts(trial, *rng.integers(1, 28, 5))
        ]
        everyone = own_requests() + others
        order = rng.permutation(len(everyone))
        gone = [i for i, who in enumerate(order) if who >= len(alone) and rng.random() < 0.5]
        found = answers(engine, [everyone[i] for i in order], cancel=gone)
        for place, who in enumerate(order):
            if who < len(alone):
                assert found[place] == alone[who]
        assert engine.pool.free == engine.pool.count - 1
        rng.shuffle(engine.pool._free)
    assert engine.programs == 2


def test_company_changes_no_bit():
    check_company(6, engine_of("llama"))


@pytest.mark.parametrize("form", ["windows", pytest.param("llama", marks=pytest.mark.slow)])
def test_company_changes_no_bit_of_8_bits(form):
    check_company(6, packed_engine(form, jnp.float32, "int8", cache="int8"))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"slots": 7, "readers": 3, "pages": 14},
        {"page": 8},
        {"cache": "int8"},
        {"quantize": "nf4", "cache": "int8"},
    ],
)
def test_no_company_of_hundreds_changes_a_bit(form, dtype, sizes):
    check_company(56, packed_engine(form, dtype, **{"quantize": None} | sizes))


@pytest.mark.slow
def test_the_readme_s_loop_runs(capsys):
    *_, loop = blocks("jaxtrain/serve/README.md")
    model, params = model_of()
    exec(loop, {"model": model, "params": params})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20
    assert lines[-1].endswith("length")


def test_a_beginning_that_was_read_is_not_read_again(monkeypatch):
    engine = engine_of()
    (prompt,) = prompts(3, 30)
    calls = []
    run = engine._reads
    monkeypatch.setattr(
        engine, "_reads", lambda *given: (calls.append(given[2].tokens.shape), run(*given))[1]
    )
    first = answers(engine, [Request(prompt, 2, temperature=0)])
    reads = calls.count((2, 8))
    second = answers(engine, [Request(prompt, 2, temperature=0)])
    assert (reads, calls.count((2, 8))) == (4, 5)
    assert first == second


def test_requests_wait_for_pages_and_end_at_a_token():
    config, params = model_of()
    engine = Engine(config, params, **SIZES | {"pages": 11})  # one row of 40 tokens
    (prompt,) = prompts(4, 30)
    (whole, _), *_ = answers(engine, [Request(prompt, 10, temperature=0)] * 3)
    ended, _ = answers(engine, [Request(prompt, 10, temperature=0, ends=frozenset(whole[3:4]))])[0]
    assert ended == whole[: whole.index(whole[3]) + 1]
    engine.submit(Request(prompt, 10))
    engine.submit(Request(prompt, 10))
    engine.step()
    assert [row is not None for row in engine.rows] == [True, False, False, False]
    assert len(engine.waiting) == 1


def test_log_probabilities_are_the_model_s():
    (prompt,) = prompts(5, 11)
    engine = engine_of("llama")
    engine.submit(Request(prompt, 6, temperature=0.7, seed=3, top_logprobs=4))
    events = []
    while engine.is_busy:
        events += engine.step()
    row = np.array(prompt + [event.token for event in events])[None]
    logp = jax.nn.log_softmax(logits_of("llama")(row))[0, len(prompt) - 1 :]
    logp = np.asarray(logp)
    for n, event in enumerate(events):
        assert event.logprob == pytest.approx(logp[n, event.token], abs=1e-5)
        best = np.argsort(-logp[n])[:4]
        assert [token for token, _ in event.top] == best.tolist()
        np.testing.assert_allclose([x for _, x in event.top], logp[n, best], atol=1e-5)
    assert len({event.token for event in events}) > 1  # drawn by their positions
    scored = engine.score(row[0].tolist(), top=1)
    assert len(scored) == row.size - 1
    for (logprob, _), event in zip(scored[len(prompt) - 1 :], events, strict=True):
        assert logprob == pytest.approx(event.logprob, abs=1e-5)


def test_a_cache_of_8_bits_rounds_keys_and_values_and_forgets_how_they_were_read():
    config, params = model_of("llama")
    (prompt,) = prompts(4, 8)
    engines = [engine_of("llama"), Engine(config, params, **SIZES, cache="int8")]
    engines[0]._caches = jax.tree.map(jnp.zeros_like, engines[0]._caches)
    engines[0].pool = PagePool(engines[0].pool.count, 2)
    plain, rounded = (answers(engine, [Request(prompt, 2, temperature=0)]) for engine in engines)
    logprobs = [np.frombuffer(bits, np.float32) for ((_, bits),) in (plain, rounded)]
    np.testing.assert_allclose(*logprobs, atol=0.03)
    assert (logprobs[0] != logprobs[1]).all()
    (k, _), (kept, _) = (engine._caches[0] for engine in engines)
    # The definition; keys of the first layer, of the first page, come from no cache.
    first = np.float64(k[0, 1])
    assert np.abs(first).min() > 0
    scale = np.abs(first).max(-1) / 127
    np.testing.assert_allclose(kept.scale[0, 1], scale, rtol=1e-6)
    assert (np.abs(np.float64(kept[0, 1]) - first) <= 0.5001 * scale[..., None]).all()
    assert kept.codes.nbytes + kept.scale.nbytes == k.size * 1 + k.size // 4 * 4  # heads 4 wide
    # Read one by one, tokens see what they see as a chunk: their own rounded, too.
    model, rows = CausalDecoder(config), np.array([prompt, prompt[::-1]])
    empty = Rounded(jnp.zeros((2, 5, 2, 4, 4), jnp.int8), jnp.zeros((2, 5, 2, 4)), jnp.float32)
    pages = Pages(empty, empty, jnp.array([[1, 2], [3, 4]]))
    extend = jax.jit(model.extend_every)
    at, count = np.zeros(2, np.int32), np.ones(2, np.int32)
    whole, _ = extend(params, pages, rows, at, 8 * count)
    for step in range(8):
        one, pages = extend(params, pages, rows[:, step : step + 1], at + step, count)
        np.testing.assert_allclose(one[:, 0], whole[:, step], atol=1e-4)


def test_what_is_not_finite_stays_with_its_own_request():
    config, params = model_of("untied")
    tokens = params["embed"]["tokens"].at[30].set(jnp.nan)
    params = params | {"embed": params["embed"] | {"tokens": tokens}}
    engine = Engine(config, params, **SIZES)
    short, long = Request([1, 2], 4, temperature=0), Request([3, 4, 5] * 10, 6, temperature=0)
    alone = [answers(engine, [each])[0] for each in (short, long)]
    bad, *found = answers(engine, [Request([30, 2, 3], 4, temperature=0), short, long])
    assert np.isnan(np.frombuffer(bad[1], np.float32)).all()
    assert found == alone
    assert answers(engine, [short, long]) == alone


def test_a_nucleus_of_almost_nothing_is_the_most_probable_token():
    engine = engine_of()
    given = {"prompt": [1, 2, 3], "max_tokens": 6}
    asked = [Request(**given, top_p=1e-60), Request(**given, temperature=0)]
    drawn, best = answers(engine, asked)
    assert drawn == best


def test_a_prompt_as_long_as_the_learned_positions_is_scored():
    config, params = model_of()
    (prompt,) = prompts(8, 40)
    engine = Engine(dataclasses.replace(config, seq_len=40), cut_positions(params, 40), **SIZES)
    logp = jax.nn.log_softmax(logits_of("gpt2")(np.array([prompt])))[0]
    expected = [logp[t, prompt[t + 1]] for t in range(39)]
    np.testing.assert_allclose([x for x, _ in engine.score(prompt)], expected, atol=1e-5)


def cut_positions(params, count):
    embed = params["embed"]
    return params | {"embed": embed | {"positions": embed["positions"][:count]}}


@pytest.mark.parametrize(
    ("form", "cache"),
    [
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        ("llama", None),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_writes_the_same_tokens(form, cache):
    config, params = model_of(form)
    mesh = jt.make_mesh(tensor=4, devices=jax.devices()[:4])
    placed = jax.device_put(params, param_shardings(params, mesh, as_rules(decoder.RULES)))
    asked = [Request(prompt, 8, temperature=0) for prompt in prompts(6, 3, 19, 8)]
    given = SIZES | {"cache": cache}
    found = answers(Engine(config, placed, **given, mesh=mesh), asked)
    expected = answers(engine_of(form, cache=cache), asked)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slots": 1}, "`slots` is 1"),
        ({"chunk": 6}, "`chunk` is 6"),
        ({"page": 0}, "`page` is 0"),
        ({"page": -4}, "`page` is -4"),
        ({"longest": 0}, "`longest` is 0"),
        ({"pages": 0}, "`pages` is 0"),
        ({"longest": 65}, "64 learned positions"),
        ({"pages": 10}, "`pages` is 10"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Engine(*model_of(), **SIZES | given)


def test_rows_beyond_the_length_of_dynamic_positions_are_refused():
    config, params = model_of("llama")
    scaled = dataclasses.replace(config, rope_scaling=DynamicScaling(4.0, 39))
    for given in ((scaled, params), (config, params, (scaled, params))):
        with pytest.raises(ValueError, match="length of a row is 40: rope_type dynamic"):
            Engine(*given[:2], **SIZES, draft=given[2] if given[2:] else None)
    assert Engine(scaled, params, **SIZES | {"longest": None}).longest == 39


def test_requests_that_cannot_be_answered_are_refused():
    engine = engine_of()
    good = Request([1, 2], 3)
    for change, said in (
        ({"prompt": []}, "empty"),
        ({"prompt": [31]}, "vocabulary has 31"),
        ({"max_tokens": 0}, "at least one"),
        ({"max_tokens": 39}, "exceeds the 40"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.submit(dataclasses.replace(good, **change))
    assert not engine.is_busy


def test_no_page_is_lost_or_given_twice():
    """Random requests and ends; what is shared has one content."""
    rng = np.random.default_rng(0)
    pool, held = PagePool(40, 2), []
    contents = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.give_back(held.pop(rng.integers(len(held))))
        prompt = [int(rng.integers(2))] * int(rng.integers(1, 14))
        digests = digests_of(prompt, 4)
        shared = pool.beginning(digests[: (len(prompt) - 1) // 4])
        for i in range(len(shared) // 2):
            assert contents[shared[2 * i]] == digests[i]
        need = int(rng.integers(len(shared) + 1, 12))
        before = pool.free
        pages = pool.take(shared, need - len(shared))
        if pages is None:
            assert pool.free == before
            continue
        used = [page for pages in held for page in pages]
        assert 0 not in pages
        assert not set(pages[len(shared) :]) & set(used)
        for i in range(min(len(digests), len(pages) // 2)):
            pool.know(digests[i], pages[2 * i : 2 * i + 2])
            if i >= len(shared) // 2:
                contents[pages[2 * i]] = digests[i]
        held.append(pages)
    while held:
        pool.give_back(held.pop())
    assert pool.free == 39
