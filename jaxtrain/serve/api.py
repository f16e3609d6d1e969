"""OpenAI's completions and chat completions: requests read, answers written. No network here."""

import codecs
import collections
import dataclasses
import itertools
import math
import time
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jaxtrain.data.chat import ChatTemplate, encode_marked, encode_prompt
from jaxtrain.data.tokenizers import Tokenizer, special_ids_of
from jaxtrain.serve.engine import Event, Request
from jaxtrain.serve.programs import BIASES, ENDS, TOP

# Name: (kind, default, least, most).
_NUMBERS: dict[str, tuple[type, Any, float, float]] = {
    "max_tokens": (int, None, 0, math.inf),
    "max_completion_tokens": (int, None, 0, math.inf),
    "temperature": (float, 1.0, 0, 100),
    "top_p": (float, 1.0, 0, 1),
    "top_k": (int, -1, -1, math.inf),  # vLLM's: below 1 all
    "min_p": (float, 0.0, 0, 1),
    "min_tokens": (int, 0, 0, math.inf),
    "repetition_penalty": (float, 1.0, 0, 100),
    "frequency_penalty": (float, 0.0, -2, 2),
    "presence_penalty": (float, 0.0, -2, 2),
    "n": (int, 1, 1, 128),
    "seed": (int, None, -(2**63), 2**64 - 1),
}
_ABOVE_LEAST = {"top_p", "repetition_penalty"}
_SHAPING = ("temperature", "top_k", "top_p", "min_p", "min_tokens")
_SHAPING += ("repetition_penalty", "frequency_penalty", "presence_penalty")
# What clients send with a value that asks for nothing; another is refused.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
# Read by nobody: what they say of the client changes no answer.
_OF_CLIENTS = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
_COMMON = {"model", "stream", "stream_options", "stop", "stop_token_ids", "ignore_eos"}
_COMMON |= {"logit_bias", "parallel_tool_calls", "skip_special_tokens"} | _OF_CLIENTS
_OF_STREAMS = {"include_usage", "include_obfuscation"}
DEFAULT_TOKENS = 16
# Answers to one request.
MOST = 1024


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request that has been read.

    Args:
      requests: one of each choice, ``n`` of each prompt.
      prompts: number of prompts.
      model: the name that is answered by.
      stops: texts that end a choice; they are not part of it.
      logprobs: whether they are told.
      echo: whether a choice begins with its prompt.
      usage: whether the last event of a stream counts the tokens.
      begins: whether a choice is a text of its own, without the space that some tokenizers have
        before every text.
      shows_special: whether special tokens, except those that end a choice, have a text.
      unsent: the number of tokens before each prompt that its client did not send.
    """

    requests: tuple[Request, ...]
    prompts: int
    chat: bool
    model: str
    stops: tuple[str, ...]
    logprobs: bool
    echo: bool
    stream: bool
    usage: bool
    begins: bool = False
    shows_special: bool = False
    unsent: tuple[int, ...] = ()

    @property
    def read(self) -> int:
        """Tokens of all prompts, each of which has several choices."""
        each = len(self.requests) // self.prompts
        return sum(len(request.prompt) for request in self.requests[::each])


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads requests for one model and its adapters.

    Args:
      models: the name of the model, and those of its adapters.
      longest: most tokens of a prompt and its answer.
      ends: tokens that end an answer.
      template: of chats; None refuses them.
      begin: the tokens that a text follows, and those that a conversation does; an empty text
        follows an end of document in any case.
      sources: most tokens of a prompt that is a source, of which the answer is the target, of at
        most ``longest``; an end of document follows its text. None where answers continue prompts.
    """

    models: tuple[str, ...]
    tokenizer: Tokenizer
    longest: int
    ends: frozenset[int]
    template: ChatTemplate | None
    begin: tuple[tuple[int, ...], tuple[int, ...]]
    sources: int | None = None

    def read(self, body: Any, *, chat: bool, seed: int) -> Asked:
        """Reads a body of JSON.

        Args:
          seed: of a request that names none.

        Raises:
          LookupError: there is no such model.
          ValueError: what is asked cannot be done, in one sentence.
        """
        own = {"messages", "top_logprobs"} if chat else {"prompt", "echo"}
        own |= _COMMON | {"logprobs"}
        body = checked(body, own | _NUMBERS.keys() | _NEUTRAL.keys())
        for name, neutral in _NEUTRAL.items():
            neutral = (1, body.get("n", 1)) if name == "best_of" else neutral
            if name in body and body[name] not in neutral:
                raise ValueError(f"{name} is {body[name]!r}, which is not offered: leave it out")
        model, adapter = self.model_of(body)
        given = {name: _number(body, name) for name in _NUMBERS}
        logprobs, top = _logprobs(body, chat)
        echo, stream = _flag(body, "echo"), _flag(body, "stream")
        if echo and self.sources is not None:
            raise ValueError("echo is true: the answer does not continue a source; leave it out")
        options = body.get("stream_options", {})
        fits = isinstance(options, dict) and options.keys() <= _OF_STREAMS
        if not fits or options.get("include_obfuscation"):
            raise ValueError(
                "stream_options must be an object with include_usage, and include_obfuscation false"
            )
        rows = [self._messages(body)] if chat else self.rows({"prompt": ""} | body, "prompt")
        if len(rows) * given["n"] > MOST:
            raise ValueError(
                f"{len(rows)} prompts with n={given['n']} ask for more than {MOST} answers"
            )
        ends = self._ends(body)
        if given["top_k"] < 1:
            given["top_k"] = None
        biases = self._biases(body)
        count = given["max_completion_tokens"]
        count = given["max_tokens"] if count is None else count
        if given["min_tokens"] and len(ends) > ENDS:
            raise ValueError(
                f"min_tokens is {given['min_tokens']}: {len(ends)} tokens end this answer, and at "
                f"most {ENDS} can be held back; leave it out"
            )
        requests = []
        for row in rows:
            room = self._room(row)
            most = count
            if most is None:
                most = max(1, room if chat else min(room, DEFAULT_TOKENS))
            if most > room:
                own = f"the prompt has {len(row)} tokens: " * (self.sources is None)
                raise ValueError(
                    f"{own}with max_tokens={most} that exceeds the {self.longest} of this server"
                )
            if given["min_tokens"] > most:
                raise ValueError(
                    f"min_tokens is {given['min_tokens']}: give a whole number from 0 to "
                    f"max_tokens, which is {most}"
                )
            for _ in range(given["n"]):
                number = (seed if given["seed"] is None else given["seed"]) + len(requests)
                requests.append(
                    Request(
                        row,
                        most,
                        seed=number % 2**32,
                        ends=ends,
                        top_logprobs=top,
                        adapter=adapter,
                        logit_bias=biases,
                        **{name: given[name] for name in _SHAPING},
                    )
                )
        fields = tuple(requests), len(rows), chat, model, _stops(body), logprobs, echo, stream
        return Asked(
            *fields,
            usage=_flag(options, "include_usage"),
            begins=chat or self.sources is not None,
            shows_special=not _flag(body, "skip_special_tokens", default=True),
            unsent=self._unsent(body.get("prompt", "")) if echo else (),
        )

    def _room(self, row: Sequence[int]) -> int:
        """How many tokens the answer to a prompt may have."""
        if self.sources is None:
            return self.longest - len(row)
        if len(row) > self.sources:
            raise ValueError(
                f"the prompt has {len(row)} tokens, which exceeds the {self.sources} that a source "
                "has here: shorten it"
            )
        return self.longest

    def _ends(self, body: Mapping[str, Any]) -> frozenset[int]:
        """The tokens that end an answer: the model's, unless they are to be ignored, and more.

        A stop that spells a special token is one of them, because that token may have no text.
        """
        ids = body.get("stop_token_ids", [])
        size = self.tokenizer.vocab_size
        if not isinstance(ids, list) or not all(type(x) is int and 0 <= x < size for x in ids):
            raise ValueError(f"stop_token_ids must be a list of numbers from 0 to {size - 1}")
        special = special_ids_of(self.tokenizer)
        spelled = (special[stop] for stop in _stops(body) if stop in special)
        ends = frozenset() if _flag(body, "ignore_eos") else self.ends
        return ends.union(ids, spelled)

    def _biases(self, body: Mapping[str, Any]) -> dict[int, float]:
        """What is added to the logits of tokens, as OpenAI has it: {"50256": -100}."""
        given, size = body.get("logit_bias", {}), self.tokenizer.vocab_size
        if not isinstance(given, dict) or len(given) > BIASES:
            raise ValueError(f"logit_bias must be an object of at most {BIASES} tokens")
        for name, value in given.items():
            # A number of thousands of digits is beyond Python's limit.
            if not (name.isdecimal() and name.isascii() and len(name) < 20 and int(name) < size):
                raise ValueError(f"logit_bias has the token {name!r}: give 0 to {size - 1}")
            if type(value) not in (int, float) or not -100 <= value <= 100:
                raise ValueError(f"logit_bias of {name} is {value!r}: give a number, -100 to 100")
        return {int(name): float(value) for name, value in given.items()}

    def model_of(self, body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Returns the name of the model that is asked for, and that of the adapter, if it is one;
        raises LookupError where there is none."""
        check_model(body, self.models)
        model = body.get("model", self.models[0])
        return model, None if model == self.models[0] else model

    def rows(self, body: Mapping[str, Any], name: str) -> list[list[int]]:
        """Returns the tokens of a text, or of each of several, in a field of a body."""
        prompt = body.get(name)
        is_list = isinstance(prompt, list) and bool(prompt)
        is_row = isinstance(prompt, str) or (is_list and all(type(x) is int for x in prompt))
        rows = [prompt] if is_row else prompt
        if not isinstance(rows, list) or not 1 <= len(rows) <= MOST:
            raise ValueError(f"{name} must be a text, a list of tokens, or a list of such")
        return [self._tokens(row, name) for row in rows]

    def _tokens(self, prompt: Any, name: str) -> list[int]:
        if isinstance(prompt, str):
            ids = [*self.begin[0], *encode_prompt(prompt, self.tokenizer).tolist()]
            if self.sources is not None:
                ids.append(self.tokenizer.eod)
            return ids or [self.tokenizer.eod]
        size = self.tokenizer.vocab_size
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(f"{name} must be a text, a list of tokens, or a list of such")
        if not all(type(x) is int and 0 <= x < size for x in prompt):
            raise ValueError(f"{name} must have whole numbers from 0 to {size - 1} for tokens")
        return prompt

    def _messages(self, body: Mapping[str, Any]) -> list[int]:
        if self.template is None:
            raise ValueError(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template"
            )
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        try:
            conversation = self.template.prompt([_message(message) for message in messages])
        except RecursionError:
            raise ValueError("messages are nested too deeply: send fewer levels") from None
        ids, _ = next(encode_marked([conversation], self.tokenizer))
        return [*self.begin[1], *ids.tolist()]

    def _unsent(self, prompt: Any) -> tuple[int, ...]:
        """The number of tokens before each prompt of a body that its client did not send: none
        before one of tokens, of which this returns a 0 for each token, or each list of them."""
        begin = len(self.begin[0])
        prompts = [prompt] if isinstance(prompt, str) else prompt
        return tuple(max(begin, x == "") if isinstance(x, str) else 0 for x in prompts)


def _message(message: Any) -> dict[str, Any]:
    """Returns a message as the chat template reads it, with all its fields, as in training."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("messages must be objects with a role and a content")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and all(
        isinstance(x, dict) and x.get("type") == "text" and isinstance(x.get("text"), str)
        for x in content
    ):
        content = "".join(x["text"] for x in content)
    if calls is not None and not (isinstance(calls, list) and all(type(x) is dict for x in calls)):
        raise ValueError("a message's tool_calls must be a list of objects")
    if not isinstance(content, str) and (content is not None or not calls):
        raise ValueError("a message's content must be text, or null beside tool_calls")
    # Clients send null for a field that they leave out. Content alone may be null itself.
    fields = {name: value for name, value in message.items() if value is not None}
    return fields | ({"content": content} if "content" in message else {})


def check_model(body: Mapping[str, Any], models: Sequence[str]) -> None:
    """Raises LookupError where a body names none of some models; it may name none at all."""
    if (model := body.get("model", models[0])) not in models:
        raise LookupError(f"model is {model!r}: ask for {' or '.join(models)}")


def checked(body: Any, known: Set[str]) -> dict[str, Any]:
    """Returns the fields of a body of JSON that are given; raises ValueError for unknown ones."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(body.keys() - known):
        raise ValueError(f"{unknown[0]} is not known here: leave it out")
    return body


def _number(body: Mapping[str, Any], name: str) -> Any:
    kind, default, least, most = _NUMBERS[name]
    value = body.get(name, default)
    if value is None:
        return None
    if name.startswith("max_") and body.get("echo") is not True:  # of a prompt that is echoed, none
        least = 1
    kinds = (int, float) if kind is float else (int,)
    above = name in _ABOVE_LEAST
    fits = type(value) in kinds and least <= value <= most and not (above and value == least)
    if not fits:
        end = f" to {most:g}" if most < math.inf else ""
        what = "a number" if kind is float else "a whole number"
        raise ValueError(
            f"{name} is {value!r}: give {what} {'above' if above else 'from'} {least:g}{end}"
        )
    return value


def _flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name, default)
    if type(value) is not bool:
        raise ValueError(f"{name} is {value!r}: give true or false")
    return value


def _logprobs(body: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """Returns whether log-probabilities are asked for, and how many alternatives."""
    top = body.get("top_logprobs" if chat else "logprobs", 0)
    if type(top) is not int or not 0 <= top <= TOP:
        name = "top_logprobs" if chat else "logprobs"
        raise ValueError(f"{name} is {top!r}: give a whole number from 0 to {TOP}")
    if not chat:
        return "logprobs" in body, top
    wanted = _flag(body, "logprobs")
    if top and not wanted:
        raise ValueError("top_logprobs is given without logprobs: set that to true")
    return wanted, top


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    fits = isinstance(stops, list) and len(stops) <= 16
    if not fits or not all(isinstance(each, str) and each for each in stops):
        raise ValueError("stop must be a text, or a list of at most 16, none of them empty")
    return tuple(stops)


class Text:
    """The text of a choice while it is written: whole characters, and nothing of a stop's
    beginning until it is clear that it is none.

    >>> text = Text(("END",))
    >>> text.add(b"caf\\xc3"), text.add(b"\\xa9 E"), text.add(b"NDLESS"), text.stopped
    ('caf', 'é ', '', True)
    """

    def __init__(self, stops: Sequence[str]):
        self.stopped = False
        self._stops, self._held = stops, ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, piece: bytes, *, last: bool = False) -> str:
        """Takes the bytes of a token and returns the text that may be told; with ``last``, all."""
        self._held += self._decode(piece, last)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            told, self._held = self._held[: min(found)], ""
            return told
        keep = 0 if last else max(map(self._begun, self._stops), default=0)
        told, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return told

    def _begun(self, stop: str) -> int:
        """How many characters of a stop the text ends with."""
        sizes = range(min(len(stop) - 1, len(self._held)), 0, -1)
        return next((n for n in sizes if self._held.endswith(stop[:n])), 0)


def token_bytes(
    tokenizer: Tokenizer, token: int, special: Mapping[int, bytes], *, begins: bool
) -> bytes | None:
    """Returns the bytes of a token of an answer; None for a token without any.

    Args:
      special: the bytes of special tokens, empty if they have no text.
      begins: leaves out the space that some tokenizers have before every text.
    """
    if token in special or token >= tokenizer.vocab_size:
        return special.get(token) or None
    if not (piece := tokenizer.token_pieces([token])[0]):
        return None
    return tokenizer.decode_bytes([token]) if begins else piece


@dataclasses.dataclass(frozen=True)
class Told:
    """A token, and the text that it adds."""

    text: str
    token: int
    logprob: float | None  # None of a prompt's first token
    top: tuple[tuple[int, float], ...]


class Writer:
    """Writes the answers of one request."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, fingerprint: str | None = None):
        kind = "chat.completion" if asked.chat else "text_completion"
        begin = "chatcmpl-" if asked.chat else "cmpl-"
        self._asked, self._tokenizer = asked, tokenizer
        chunk = ".chunk" if asked.chat and asked.stream else ""
        self._head = {
            "id": begin + uuid.uuid4().hex,
            "object": kind + chunk,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": fingerprint,
        }
        # Letters that each choice has told so far.
        self._lengths: collections.Counter[int] = collections.Counter()
        self._special = {
            id: text.encode() if asked.shows_special else b""
            for text, id in special_ids_of(tokenizer).items()
        } | dict.fromkeys(asked.requests[0].ends, b"")

    def piece(self, event: Event, *, is_first: bool) -> bytes | None:
        """The bytes of an event's token; None for an end, or for a token without any."""
        begins = is_first and self._asked.begins
        return token_bytes(self._tokenizer, event.token, self._special, begins=begins)

    def _piece(self, token: int) -> bytes:
        """The bytes by which a token is named; T5's marks of gaps have none."""
        return token_bytes(self._tokenizer, token, {}, begins=False) or b""

    def whole(self, choices: Sequence[tuple[str, list[Told], str]], written: int) -> dict[str, Any]:
        """The answer with all choices, each its text, tokens and why it ended."""
        made = []
        for index, (text, told, reason) in enumerate(choices):
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            made.append(
                self._choice(index, said if self._asked.chat else {"text": text}, told, reason)
            )
        return self._head | {"choices": made, "usage": self._usage(written)}

    def begin(self, index: int) -> dict[str, Any]:
        """The first event of a choice of a chat."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, [], None)

    def part(self, index: int, text: str, told: list[Told], reason: str | None) -> dict[str, Any]:
        """An event of a stream."""
        said = {"delta": {"content": text} if text else {}} if self._asked.chat else {"text": text}
        return self._event(index, said, told, reason)

    def end(self, written: int) -> dict[str, Any]:
        """The event of a stream that counts its tokens."""
        return self._head | {"choices": [], "usage": self._usage(written)}

    def _event(self, index, said, told, reason) -> dict[str, Any]:
        usage = {"usage": None} if self._asked.usage else {}
        return self._head | {"choices": [self._choice(index, said, told, reason)]} | usage

    def _choice(self, index, said, told, reason) -> dict[str, Any]:
        logprobs = self._logprobs(index, told) if self._asked.logprobs else None
        return {"index": index, "finish_reason": reason, "logprobs": logprobs} | said

    def _usage(self, written: int) -> dict[str, int]:
        read = self._asked.read
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }

    def _logprobs(self, index: int, tokens: Sequence[Told]) -> dict[str, Any]:
        if self._asked.chat:
            return {"content": [self._chat_logprob(x) for x in tokens], "refusal": None}
        *starts, self._lengths[index] = itertools.accumulate(
            (len(x.text) for x in tokens), initial=self._lengths[index]
        )
        return {
            "tokens": [self._name(x.token) for x in tokens],
            "token_logprobs": [x.logprob for x in tokens],
            "top_logprobs": [
                {self._name(token): value for token, value in x.top} if x.top else None
                for x in tokens
            ],
            "text_offset": starts,
        }

    def _chat_logprob(self, x: Told) -> dict[str, Any]:
        def one(token: int, value: float | None) -> dict[str, Any]:
            return {
                "token": self._name(token),
                "logprob": value,
                "bytes": list(self._piece(token)),
            }

        top = [one(token, value) for token, value in x.top]
        return one(x.token, x.logprob) | {"top_logprobs": top}

    def _name(self, token: int) -> str:
        """A name of its own for every token: its text, or its bytes, or its number."""
        piece = self._piece(token)
        try:
            return piece.decode() or f"<{token}>"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
