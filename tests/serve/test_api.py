"""Requests read and answers written, without a network."""

import asyncio
import dataclasses
import functools
import json
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import ByteTokenizer, SubwordTokenizer
from jaxtrain.data.chat import TEMPLATES, ChatTemplate
from jaxtrain.data.tokenizers import decode_shown
from jaxtrain.serve import answer
from jaxtrain.serve.api import Reader, Text, Told, Writer
from jaxtrain.serve.engine import Event
from tests.serve.conftest import AS_A_RUN

TOKENIZER = ByteTokenizer()
READER = Reader(
    ("m",), TOKENIZER, 64, frozenset([TOKENIZER.eod]), ChatTemplate(TEMPLATES["plain"]), AS_A_RUN
)


def read(body, *, chat=False, reader=READER):
    return reader.read(body, chat=chat, seed=7)


def test_prompts_are_texts_and_tokens_one_or_many():
    eod = TOKENIZER.eod
    for prompt, rows in (
        ("ab", [[eod, 97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "b"], [[eod, 97], [eod, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("", [[eod]]),
    ):
        asked = read({"prompt": prompt, "n": 2, "seed": 5})
        assert [list(x.prompt) for x in asked.requests] == [row for row in rows for _ in (0, 1)]
        assert [x.seed for x in asked.requests] == [5 + i for i in range(2 * len(rows))]
    assert read({"prompt": "a"}).requests[0].max_tokens == 16
    assert read({"prompt": "a" * 60}).requests[0].max_tokens == 3


def test_a_model_s_name_is_its_own_or_an_adapter_s():
    reader = dataclasses.replace(READER, models=("m", "poet"))
    for named, adapter in (({}, None), ({"model": "m"}, None), ({"model": "poet"}, "poet")):
        asked = read({"prompt": "a"} | named, reader=reader)
        assert asked.requests[0].adapter == adapter
        assert asked.model == named.get("model", "m")
        assert Writer(asked, TOKENIZER).end(0)["model"] == asked.model
    with pytest.raises(LookupError, match="model is 'n': ask for m or poet"):
        read({"prompt": "a", "model": "n"}, reader=reader)


def test_a_chat_ends_where_the_assistant_is_to_speak():
    messages = [{"role": "user", "content": [{"type": "text", "text": "1 + 1 = "}]}]
    (request,) = read({"messages": messages, "max_completion_tokens": 4}, chat=True).requests
    assert TOKENIZER.decode(request.prompt) == "1 + 1 = "
    assert request.max_tokens == 4
    shape = {"min_tokens": 2, "repetition_penalty": 1.5, "frequency_penalty": -2}
    shape["presence_penalty"] = 0.5
    (request,) = read({"messages": messages, **shape}, chat=True).requests
    assert {name: getattr(request, name) for name in shape} == shape
    with pytest.raises(ValueError, match="no chat template"):
        read({"messages": messages}, chat=True, reader=dataclasses.replace(READER, template=None))


def test_the_chat_template_receives_all_fields_of_messages():
    """With the text that transformers renders; content may be null beside tool calls alone."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function | tojson }}>{% endfor %}"
        "{{ m.tool_call_id }}{{ m.colour }}\n{% endfor %}"
    )
    reader = dataclasses.replace(READER, longest=999, template=ChatTemplate(template))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"q": "é"}'}}
    user, answer = {"role": "user", "content": "a", "name": "ann"}, {"role": "assistant"}
    tool = {"role": "tool", "tool_call_id": "1", "content": "b", "colour": "red"}
    for content in ({}, {"content": None}, {"content": ""}, {"content": "c"}):
        messages = [user, answer | content | {"tool_calls": [call]}, tool]
        (rendered,), _ = utils.render_jinja_template([messages], chat_template=template)
        (request,) = read({"messages": messages}, chat=True, reader=reader).requests
        assert TOKENIZER.decode(request.prompt) == rendered
    null = [user | {"tool_calls": None, "refusal": None}]  # what a client's library sends
    assert read({"messages": null}, chat=True).requests
    nested = functools.reduce(lambda value, _: [value], range(2000), "x")
    for bad, message in (
        (answer, "text, or null beside tool_calls"),
        (answer | {"content": None, "tool_calls": []}, "text, or null beside tool_calls"),
        (user | {"tool_calls": "f"}, "tool_calls must be a list of objects"),
        (user | {"x": nested}, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=message):
            read({"messages": [bad]}, chat=True)


def test_special_tokens_have_a_text_only_if_they_are_asked_for():
    pytest.importorskip("tokenizers")
    tokenizer = SubwordTokenizer.train([b"a"], 257).adding("<turn>")
    turn = tokenizer.special_ids["<turn>"]
    reader = dataclasses.replace(READER, tokenizer=tokenizer)
    for skips, text in ((None, None), (True, None), (False, b"<turn>")):
        writer = Writer(
            read({"prompt": "a", "skip_special_tokens": skips}, reader=reader), tokenizer
        )
        assert writer.piece(Event(0, turn, 0.0, (), None), is_first=True) == text
    stopped = read({"prompt": "a", "stop": ["<turn>", "b"]}, reader=reader)
    assert turn in stopped.requests[0].ends
    assert Writer(stopped, tokenizer).piece(Event(0, turn, 0.0, (), "stop"), is_first=False) is None


class Words:
    """A tokenizer of a user's own, with the interface of an earlier release: a space begins every
    text."""

    vocab_size, eod, fingerprint, special_pattern = 3, 0, "words", ""

    def encode_batch(self, texts):
        return [np.full(len(text), 2, np.int32) for text in texts]

    def token_pieces(self, ids):
        return [(b"", b" ", b" a")[id] for id in ids]

    def decode_bytes(self, ids):
        return b"".join(self.token_pieces(ids)).removeprefix(b" ")

    def decode(self, ids):
        return self.decode_bytes(ids).decode()


def test_only_the_first_space_of_an_answer_is_left_out():
    words, numbers = Words(), answer.Numbers()
    reader = dataclasses.replace(READER, tokenizer=words, ends=frozenset([0]), begin=((), ()))
    for ids in ([1, 2, 0], [2, 1, 0], [1, 1, 2, 0]):

        def submit(request, sink, ids=ids):
            sink([Event(0, id, 0.0, (), None if id else "stop") for id in ids])
            return lambda: None

        worker = types.SimpleNamespace(
            submit=submit, engine=types.SimpleNamespace(fingerprint=None)
        )
        chat = {"messages": [{"role": "user", "content": "a"}]}
        request = read(chat, chat=True, reader=reader)

        async def whole(worker=worker, request=request):
            return await answer.Answer(worker, reader, request, numbers, answer.Limits()).whole()

        (choice,) = asyncio.run(whole())["choices"]
        assert choice["message"]["content"] == words.decode(ids) == decode_shown(words, ids)


def test_tokens_end_are_biased_and_are_cut_as_clients_of_vllm_ask():
    eod = TOKENIZER.eod
    body = {"prompt": "a", "top_k": -1, "min_p": 0.2, "logit_bias": {"97": -100, "98": 1.5}}
    body |= {"stop_token_ids": [10], "n": 2, "best_of": 2, "service_tier": "auto"}
    (request, _) = read(body).requests
    assert (request.top_k, request.min_p) == (None, 0.2)
    assert request.logit_bias == {97: -100.0, 98: 1.5}
    assert request.ends == {eod, 10}
    assert read(body | {"ignore_eos": True}).requests[0].ends == {10}
    assert read({"prompt": "a"}).requests[0].ends == {eod}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "JSON object"),
        ({"prompt": "a", "typical_p": 0.1}, "typical_p is not known here"),
        ({"prompt": "a", "min_p": 1.1}, "min_p is 1.1: .* from 0 to 1"),
        ({"prompt": "a", "top_k": -2}, "top_k is -2"),
        ({"prompt": "a", "logit_bias": {"257": 1}}, "logit_bias has the token '257'"),
        ({"prompt": "a", "logit_bias": {"7": 101}}, "logit_bias of 7 is 101"),
        ({"prompt": "a", "logit_bias": [7]}, "logit_bias must be an object"),
        ({"prompt": "a", "stop_token_ids": [257]}, "stop_token_ids must be"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos is 1"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of is 3, which is not offered"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search is True"),
        ({"prompt": "a", "bad_words": ["x"]}, "bad_words"),
        ({"prompt": "a", "frequency_penalty": 2.1}, "frequency_penalty is 2.1: .* from -2 to 2"),
        ({"prompt": "a", "presence_penalty": -3}, "presence_penalty is -3"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty is 0: .* above 0"),
        ({"prompt": "a", "min_tokens": -1}, "min_tokens is -1"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "to max_tokens, which is 4"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "temperature": True}, "temperature is True"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0"),
        ({"prompt": "a", "n": 1.5}, "whole number"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0: give a whole number from 1"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens is -1: give a whole number from 1"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "whole number from 0"),
        ({"prompt": "a", "max_tokens": 63}, "exceeds the 64"),
        ({"prompt": "a" * 99}, "exceeds the 64"),
        ({"prompt": ["a"] * 9, "n": 128}, "9 prompts with n=128"),
        ({"prompt": [257]}, "0 to 256"),
        ({"prompt": [[]]}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": {"a": 1}}, "prompt must be"),
        ({"prompt": "a", "stop": [""]}, "stop must be"),
        ({"prompt": "a", "stream": 1}, "stream is 1"),
        ({"prompt": "a", "logprobs": 21}, "0 to 20"),
        ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options"),
        ({"prompt": "a", "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias has the token '111.*: give 0"),
        ({"prompt": "a", "skip_special_tokens": 0}, "skip_special_tokens is 0: give true or false"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(body, said):
    with pytest.raises(ValueError, match=said) as error:
        read(body)
    assert "\n" not in str(error.value)


NAMES = ["prompt", "messages", "max_tokens", "temperature", "stop", "n", "logprobs", "echo", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(NAMES), x, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON)), st.booleans())
def test_any_json_is_read_or_refused(body, chat):
    try:
        asked = read(body, chat=chat)
    except ValueError:
        return
    for request in asked.requests:
        assert 1 - asked.echo <= request.max_tokens <= 64 - len(request.prompt)


@settings(max_examples=200, deadline=None)
@given(
    st.text("abcé€😀", max_size=12), st.lists(st.text("abcé", min_size=1, max_size=3)), st.data()
)
def test_a_text_that_is_cut_anywhere_is_told_once_and_ends_before_a_stop(text, stops, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    held, told = Text(stops), ""
    for i, part in enumerate(parts):
        told += held.add(part, last=i == len(parts) - 1)
        if held.stopped:
            break
    # The stop that is whole first ends it; of several that end together, the longest.
    ends = [text[:n] for n in range(len(text) + 1)]
    whole = next((x for x in ends if any(x.endswith(stop) for stop in stops)), None)
    assert held.stopped == (whole is not None)
    if whole is None:
        assert told == text
    else:
        assert any(text.startswith(told + stop) for stop in stops)
        assert len(told) <= len(whole)


def test_the_answers_are_openai_s():
    asked = read({"prompt": "a", "logprobs": 1, "n": 2})
    writer = Writer(asked, TOKENIZER)
    told = [Told("b", 98, -0.5, ((98, -0.5),)), Told("", 195, -1.0, ((98, -0.2),))]
    answer = json.loads(json.dumps(writer.whole([("b", told, "length"), ("", [], "stop")], 2)))
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert [x["finish_reason"] for x in answer["choices"]] == ["length", "stop"]
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["b", "bytes:\\xc3"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"b": -0.5}, {"b": -0.2}],
        "text_offset": [0, 1],
    }
    assert writer.piece(Event(0, TOKENIZER.eod, 0.0, (), "stop"), is_first=True) is None
    assert writer.piece(Event(0, 195, 0.0, (), None), is_first=False) == b"\xc3"
    assert np.isfinite(answer["created"])
