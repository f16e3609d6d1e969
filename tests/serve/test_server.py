"""The HTTP server, over a socket."""

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import json
import random
import threading
import time

import pytest

from jaxtrain.serve.answer import Limits
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.serve.server import make_app
from jaxtrain.serve.worker import Worker
from tests.serve.conftest import engine, reader, serving
from tests.serve.test_engine import SIZES, model_of
from tests.waiting import eventually

ASKED = {"prompt": "hello", "temperature": 0, "max_tokens": 9}


def events(text):
    """The events of a stream, without the last."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def is_idle(server):
    return not server.worker.engine.is_busy


def test_an_answer_in_a_stream_is_the_whole_answer(server):
    status, whole = server.complete(**ASKED, logprobs=2)
    assert status == 200
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 9
    asked = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    _, text = server.ask("/v1/completions", asked)
    *parts, usage = events(text)
    assert "".join(x["choices"][0]["text"] for x in parts) == choice["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts)  # as OpenAI has it, if usage is asked for


def test_offsets_of_a_stream_count_on(server):
    body = ASKED | {"logprobs": 0, "echo": True, "n": 2, "stream_options": {}}
    _, answer = server.complete(**body)
    assert "".join(answer["choices"][0]["logprobs"]["tokens"][:5]) == "hello"
    _, text = server.ask("/v1/completions", body | {"stream": True})
    for choice in answer["choices"]:
        offsets = [
            offset
            for event in events(text)
            for part in event["choices"]
            if part["index"] == choice["index"]
            for offset in part["logprobs"]["text_offset"]
        ]
        assert offsets == choice["logprobs"]["text_offset"]
        assert offsets[:6] == [0, 1, 2, 3, 4, 5]
    assert "usage" not in events(text)[0]


def test_a_chat_is_answered_by_its_seed(server):
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1, "n": 2}
    _, text = server.ask("/v1/chat/completions", asked | {"logprobs": True, "top_logprobs": 1})
    whole = json.loads(text)["choices"]
    assert len(whole[0]["logprobs"]["content"]) == 6
    _, text = server.ask("/v1/chat/completions", asked | {"stream": True})
    told = ["", ""]
    for event in events(text):
        (choice,) = event["choices"]
        told[choice["index"]] += choice["delta"].get("content", "")
    assert told == [choice["message"]["content"] for choice in whole]
    assert told[0] != told[1]


def test_a_stop_ends_an_answer_before_it(server):
    _, whole = server.complete(**ASKED)
    text = whole["choices"][0]["text"]
    _, cut = server.complete(**ASKED, stop=text[3:5])
    assert cut["choices"][0]["text"] == text[: text.index(text[3:5])]
    assert cut["choices"][0]["finish_reason"] == "stop"
    eventually(lambda: is_idle(server))


def test_a_prompt_is_scored(server):
    tokens = [104, 101, 108, 108, 111]
    asked = {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 1}
    _, found = server.complete(**asked)
    (choice,) = found["choices"]
    scores = choice["logprobs"]["token_logprobs"]
    assert choice["text"] == "hello"
    assert scores[0] is None
    assert scores[1:] == [x for x, _ in server.worker.engine.score(tokens)]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    # A text follows an end of document, which is not returned: the first token has a score, too.
    _, text = server.complete(**asked | {"prompt": "hello"})
    logprobs = text["choices"][0]["logprobs"]
    assert (text["choices"][0]["text"], logprobs["tokens"]) == ("hello", list("hello"))
    scores_behind_end = [x for x, _ in server.worker.engine.score([256, *tokens])]
    assert logprobs["token_logprobs"] == scores_behind_end
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert server.complete(prompt="", max_tokens=0, echo=True)[1]["choices"][0]["text"] == ""
    _, more = server.complete(**asked | {"max_tokens": 2, "temperature": 0})
    assert more["choices"][0]["logprobs"]["token_logprobs"][:5] == scores


def test_many_at_once_receive_what_one_alone_does(server):
    asked = [
        ASKED | {"prompt": "x" * (7 * i), "temperature": i % 2, "seed": i, "logprobs": 0}
        for i in range(8)
    ]

    def answer(body):
        status, found = server.complete(**body)
        assert status == 200
        return found["choices"]

    alone = [answer(body) for body in asked]
    programs = server.worker.engine.programs
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, asked)) == alone
    assert server.worker.engine.programs == programs == 2


def test_a_client_that_goes_away_leaves_its_slots(server):
    engine = server.worker.engine
    free = engine.pool.free
    body = json.dumps(ASKED | {"max_tokens": 110, "n": 3, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body)
        connection.getresponse().read(20)
    eventually(lambda: is_idle(server))
    body = json.dumps(ASKED | {"max_tokens": 110, "n": 3})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body)
        eventually(lambda: not is_idle(server))
    eventually(lambda: is_idle(server))
    assert engine.pool.free == free


def test_what_cannot_be_answered_has_a_status_and_a_sentence(server):
    for path, raw, status, said in (
        ("/v1/completions", "{", 400, "no JSON"),
        ("/v1/completions", "[" * 9000, 400, "no JSON"),
        ("/v1/completions", '{"prompt": 3}', 400, "prompt must be"),
        ("/v1/completions", r'{"prompt": "a", "\ud800": 1}', 400, "surrogates not allowed"),
        ("/v1/completions", r'{"prompt": "\ud800"}', 400, "no JSON"),
        ("/v1/completions", '{"prompt": "a", "max_tokens": 1%s}' % ("0" * 4000), 400, "of this"),
        ("/v1/completions", " " * 20_001, 413, "larger than 20000"),
        ("/v1/completions", '{"prompt": "a", "model": "large"}', 404, "ask for small"),
        ("/v1/completions", None, 405, ""),
        ("/v1/else", "{}", 404, ""),
    ):
        found, text = server.ask(path, raw=raw)
        assert found == status, text
        if said:
            sentence = json.loads(text)["error"]["message"]
            assert said in sentence
            assert len(sentence) < 500
    status, text = server.ask("/v1/models")
    assert [x["id"] for x in json.loads(text)["data"]] == ["small"]


def metrics(server):
    status, text = server.ask("/metrics")
    assert status == 200
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_metrics_count_what_was_answered(server):
    before = int(metrics(server)["jaxtrain_prompt_tokens_total"])
    _, found = server.complete(**ASKED | {"prompt": ["hello", "you"], "n": 2})
    values = metrics(server)
    read = int(values["jaxtrain_prompt_tokens_total"]) - before
    assert read == found["usage"]["prompt_tokens"] == 10
    assert int(values['jaxtrain_requests_total{status="200"}']) >= 1
    assert int(values["jaxtrain_requests_live"]) == 0
    assert int(values["jaxtrain_slots"]) == 4
    assert int(values["jaxtrain_written_tokens_total"]) >= 9
    count = int(values["jaxtrain_first_token_seconds_count"])
    assert int(values['jaxtrain_first_token_seconds_bucket{le="+Inf"}']) == count >= 1
    assert server.ask("/health")[0] == 200


def test_a_prompt_is_scored_once_for_all_its_choices(server, monkeypatch):
    scored, score = [], Engine.score
    monkeypatch.setattr(Engine, "score", lambda *given: scored.append(1) or score(*given))
    asked = {"prompt": ["abcd", "abce"], "n": 3, "max_tokens": 0, "echo": True, "logprobs": 0}
    _, found = server.complete(**asked)
    assert len(found["choices"]) == 6
    assert len(scored) == 2


@contextlib.contextmanager
def asking(limits, **asked):
    """An application, and what asks it, without a socket."""
    pytest.importorskip("starlette")
    app = make_app(engine(), reader(), limits=limits)
    bodies = [json.dumps(ASKED | asked).encode()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

    async def receive():
        while not bodies:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": bodies.pop()}

    worker = app.state.worker
    yield worker, functools.partial(app, scope, receive)
    eventually(lambda: not worker.engine.is_busy)
    worker.close()
    worker.join(30)
    assert not worker.is_alive()


def test_a_client_that_reads_nothing_of_a_stream_meets_its_limit():
    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def ask():
        await asyncio.wait_for(call(send), 30)

    with asking(Limits(seconds=0.2), stream=True, n=2) as (_, call):
        asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_says_so_to_who_still_waits(stream):
    sent = []

    async def send(message):
        sent.append(message)

    async def ask():
        task = asyncio.create_task(call(send))
        while not worker.engine.is_busy:
            await asyncio.sleep(0.001)
        task.cancel()
        await task

    with asking(Limits(), stream=stream, max_tokens=110, n=9) as (worker, call):
        asyncio.run(ask())
    assert sent[0]["status"] == (200 if stream else 503)
    if not stream:
        assert b"the server ends" in sent[1]["body"]


def test_a_key_may_have_any_letters():
    with serving(key="schlüssel") as server:
        own = {"authorization": "Bearer schlüssel".encode()}
        assert server.ask("/v1/models", headers=own)[0] == 200


def test_a_key_is_asked_for_and_too_many_are_refused():
    with serving(key="secret", limits=Limits(requests=0)) as server:
        assert server.ask("/v1/completions", ASKED)[0] == 401
        assert server.ask("/v1/models", headers={"authorization": "Bearer secre"})[0] == 401
        own = {"authorization": "Bearer secret"}
        assert server.ask("/v1/models", headers=own)[0] == 200
        assert server.ask("/v1/completions", ASKED, own)[0] == 429


def test_a_failure_of_the_engine_reaches_those_who_wait(monkeypatch):
    gate = threading.Event()

    def fail(self):
        gate.wait(60)
        raise OSError("the device is gone")

    scored = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0}
    with serving() as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(Engine, "step", fail)
        writes = pool.submit(server.complete, **ASKED)
        eventually(lambda: server.worker.steps)
        scores = pool.submit(server.complete, **scored)
        eventually(lambda: not server.worker._inbox.empty())
        gate.set()
        for status, answer in (writes.result(), scores.result()):
            assert status == 503
            assert "engine has failed" in answer["error"]["message"]
        eventually(lambda: not server.worker.is_alive())
        assert server.complete(**ASKED)[0] == server.complete(**scored)[0] == 503
        assert server.ask("/health")[0] == 503
        server.worker.engine.waiting.clear()
        for slot, row in enumerate(server.worker.engine.rows):
            if row is not None:
                server.worker.engine._leave(slot)


def test_openai_s_client_reads_the_answers(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    )
    whole = client.completions.create(model="small", **ASKED, logprobs=1)
    assert len(whole.choices[0].logprobs.token_logprobs) == 9
    parts = client.completions.create(model="small", **ASKED, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    messages = [{"role": "user", "content": "hi"}]
    given = {"model": "small", "messages": messages, "max_tokens": 5, "seed": 2}
    chat = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    options = {"include_usage": True, "include_obfuscation": False}
    stream = client.completions.create(model="small", **ASKED, stream=True, stream_options=options)
    assert [part.usage is None for part in stream] == [True] * 9 + [False]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*messages, chat.choices[0].message.model_dump() | {"tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "1", "content": "b"}]
    assert client.chat.completions.create(**given | {"messages": history}).choices
    stream = client.chat.completions.create(**given, stream=True)
    told = "".join(part.choices[0].delta.content or "" for part in stream)
    assert told == chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="small", **ASKED | {"temperature": -1})
    assert [each.id for each in client.models.list()] == ["small"]


def test_calls_take_turns_with_steps():
    """Many clients that embed texts do not keep those waiting for whom texts are written."""
    order = []

    class Busy:
        is_busy = True

        def step(self):
            order.append("step")
            return []

    worker = Worker(Busy())
    calls = [worker.call(functools.partial(order.append, number)) for number in range(3)]
    worker.start()
    concurrent.futures.wait(calls, 60)
    worker.close()
    worker.join(60)
    assert order[:5] == [0, "step", 1, "step", 2]


@pytest.mark.slow
def test_ten_thousand_requests_of_which_many_are_cancelled_leak_nothing():
    config, params = model_of()
    tiny = Engine(config, params, **SIZES | {"pages": 25})  # so that some wait for pages
    worker, rng, lives = Worker(tiny), random.Random(0), {}
    ended, cancelled = set(), set()
    worker.start()

    def sink(number, events):
        for event in events:
            if event.reason:
                assert number not in ended
                ended.add(number)

    for number in range(10_000):
        # Beginnings are shared, so that pages are too.
        prompt = [rng.randrange(2)] * 8 * rng.randrange(3) + [rng.randrange(31)]
        asked = Request(prompt, rng.randint(1, 9), seed=number, top_k=5)
        lives[number] = worker.submit(asked, functools.partial(sink, number))
        if rng.random() < 0.5:  # one that waits, reads, writes, or has ended
            chosen = rng.choice([*lives])
            cancelled.add(chosen)
            lives.pop(chosen)()
        while len(lives.keys() - ended) > 12:
            time.sleep(1e-3)
        for each in lives.keys() & set(rng.sample(sorted(lives), len(lives) // 2)) & ended:
            del lives[each]
    eventually(lambda: worker._inbox.empty() and not tiny.is_busy)
    worker.close()
    worker.join(30)
    assert worker.failed is None
    assert len(cancelled) > 4_000
    assert len(cancelled - ended) > 1_000
    assert cancelled | ended == set(range(10_000))
    assert not worker._sinks
    assert not worker._starting
    assert tiny.rows == [None] * 4
    assert not tiny.waiting
    assert tiny.pool.free == 24
    assert not any(tiny.pool._uses)
    assert tiny.programs == 2
