"""The engine of an encoder-decoder against generation, against itself in other company, and over
HTTP."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data import ByteTokenizer
from jaxtrain.models import encoder_decoder as t5
from jaxtrain.models.generate import generate
from jaxtrain.serve.api import Reader
from jaxtrain.serve.engine import Request
from jaxtrain.serve.server import make_app
from jaxtrain.serve.sources import SourceEngine
from jaxtrain.sharding.rules import as_rules, param_shardings
from tests.serve.conftest import listening
from tests.serve.test_engine import answers
from tests.serve.test_server import events

SIZES = {"slots": 3, "readers": 2}
END = 256


@functools.cache
def model_of(dtype=jnp.float32):
    config = t5.T5Config(
        vocab_size=400, source_len=20, target_len=12, layers=2, width=16, heads=4, buckets=8
    )
    params = t5.init(config, jax.random.key(0))
    return config, jax.tree.map(lambda x: (2 * x).astype(dtype), params)


@functools.cache
def engine(dtype=jnp.float32):
    made = SourceEngine(*model_of(dtype), **SIZES)
    made.warm_up()
    return made


def sources(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, 256, n - 1).tolist(), END] for n in lengths]


@pytest.mark.slow
def test_targets_are_those_of_generation():
    config, params = model_of()
    asked = sources(0, 1, 7, 20, 12, 5)
    given = {"temperature": 0, "repetition_penalty": 1.3}
    found = answers(engine(), [Request(source, 9, **given) for source in asked])
    rows = [source + [0] * (20 - len(source)) for source in asked]
    given |= {"prompt_lengths": [len(x) for x in asked], "max_new_tokens": 9, "eod": None}
    assert [tokens for tokens, _ in found] == generate(config, params, rows, **given).tolist()
    assert len({tuple(tokens) for tokens, _ in found}) > 1
    (source,) = sources(3, 9)
    (tokens, bits), *_ = answers(engine(), [Request(source, 12, seed=5)])
    segments = np.ones((1, 9), np.int32)
    batch = {"source": np.array([source]), "source_segments": segments}
    batch["tokens"] = np.array([[0, *tokens[:-1]]])
    log_p = jax.nn.log_softmax(jax.jit(functools.partial(t5.logits, config))(params, batch))[0]
    np.testing.assert_allclose(
        np.frombuffer(bits, np.float32), log_p[np.arange(12), tokens], atol=1e-5
    )


@pytest.mark.parametrize(
    ("trials", "dtype"),
    [(3, jnp.float32), *(pytest.param(50, x, marks=pytest.mark.slow) for x in ("f4", "bfloat16"))],
)
def test_company_changes_no_bit_of_a_target(trials, dtype):
    made, rng = engine(jnp.dtype(dtype).type), np.random.default_rng(0)
    own = [
        Request(source, 8, temperature=0.9 * (i % 2), seed=i, top_k=40)
        for i, source in enumerate(sources(1, 3, 20, 11, 6))
    ]
    alone = [answers(made, [request])[0] for request in own]
    assert len({tuple(tokens) for tokens, _ in alone}) > 1
    for trial in range(trials):
        others = [
            Request(source, int(rng.integers(1, 12)), seed=trial)
            for source in sources(trial, *rng.integers(1, 21, 5))
        ]
        everyone = own + others
        order = rng.permutation(len(everyone))
        gone = [i for i, who in enumerate(order) if who >= len(own) and rng.random() < 0.5]
        found = answers(made, [everyone[i] for i in order], cancel=gone)
        for place, who in enumerate(order):
            assert who >= len(own) or found[place] == alone[who]
    assert made.programs == 2
    assert made.pool.free == 3


@pytest.mark.slow
def test_a_mesh_writes_the_same_targets():
    config, params = model_of()
    mesh = jt.make_mesh(tensor=4, devices=jax.devices()[:4])
    placed = jax.device_put(params, param_shardings(params, mesh, as_rules(t5.RULES)))
    asked = [Request(source, 8, temperature=0) for source in sources(6, 3, 19, 8)]
    split = SourceEngine(config, placed, **SIZES, mesh=mesh)
    tokens = [[tokens for tokens, _ in answers(each, asked)] for each in (split, engine())]
    assert tokens[0] == tokens[1]
    assert split.programs == 2


def test_targets_are_told_over_http_and_what_cannot_be_is_refused():
    pytest.importorskip("starlette")
    tokenizer = ByteTokenizer()
    reader = Reader(("t",), tokenizer, 12, frozenset([END]), None, ((), ()), sources=20)
    asked = {"prompt": ["a source", "b"], "temperature": 0, "max_tokens": 7, "logprobs": 1}
    requests = [
        Request([*text.encode(), END], 7, temperature=0, ends=frozenset([END]))
        for text in asked["prompt"]
    ]
    expected = answers(engine(), requests)  # before a thread of the server owns the engine
    with listening(make_app(engine(), reader)) as server:
        status, found = server.complete(**asked)
        assert status == 200
        assert found["usage"]["prompt_tokens"] == len("a source") + 1 + 2  # and their ends
        written = set()
        for choice, (ids, bits) in zip(found["choices"], expected, strict=True):
            told = choice["logprobs"]["token_logprobs"]
            assert np.float32(told).tobytes() == bits
            # A token of a gap in a source, which the tokenizer lacks, has no text.
            assert choice["text"] == tokenizer.decode([x for x in ids if x < 256])
            written |= {x > 256 for x in ids}
        assert written == {False, True}
        _, text = server.ask("/v1/completions", asked | {"stream": True})
        told = ["", ""]
        for event in events(text):
            told[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert told == [choice["text"] for choice in found["choices"]]
        for body, said in (
            ({"prompt": "x" * 20}, "21 tokens, which exceeds the 20 that a source"),
            ({"prompt": "x", "max_tokens": 13}, "max_tokens=13 that exceeds the 12"),
            ({"prompt": "x", "echo": True}, "echo is true"),
        ):
            status, refused = server.complete(**body)
            assert status == 400
            assert said in refused["error"]["message"]
        assert server.ask("/v1/embeddings", {"input": "a"})[0] == 404
        assert server.ask("/v1/chat/completions", {"messages": []})[0] == 404
        assert "jaxtrain_slots 3" in server.ask("/metrics")[1]
    for request, said in (
        (Request([1] * 21, 1), "21 tokens, which exceeds the 20"),
        (Request([1], 13), "max_tokens is 13"),
    ):
        with pytest.raises(ValueError, match=said):
            engine().submit(request)
