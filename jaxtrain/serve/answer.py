"""One request of a server while it is answered: events of the engine in, text or a stream out."""

import asyncio
import collections
import contextlib
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from jaxtrain.serve.api import Asked, Reader, Text, Told, Writer
from jaxtrain.serve.engine import Event
from jaxtrain.serve.worker import FAILED, Worker

log = logging.getLogger(__name__)
# Seconds to the first token, for /metrics.
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Limits(NamedTuple):
    """What a server takes: bytes of a body, requests at once, and seconds of a request."""

    body: int = 1 << 20
    requests: int = 256
    seconds: float = 600.0


DEFAULT_LIMITS = Limits()


class Numbers:
    """What /metrics tells."""

    def __init__(self) -> None:
        self.answers: collections.Counter[int] = collections.Counter()
        self.read = self.live = 0
        self.first: collections.Counter[float] = collections.Counter()
        self.first_sum, self.first_count = 0.0, 0

    def first_token(self, seconds: float) -> None:
        self.first_sum, self.first_count = self.first_sum + seconds, self.first_count + 1
        self.first.update(limit for limit in BUCKETS if seconds <= limit)


class Calls:
    """A request that is answered as a whole, by calls of the thread between steps of the engine."""

    streams = False

    def __init__(self, worker: Worker, numbers: Numbers, limits: Limits):
        self._worker, self._numbers = worker, numbers
        self._ends = time.monotonic() + limits.seconds

    async def each(self, call: Callable[[Any], Any], parts: Sequence[Any]) -> AsyncIterator[Any]:
        """Yields what a call finds of each part; others are answered between two of them."""
        self._numbers.live += 1
        try:
            for part in parts:
                found = asyncio.wrap_future(self._worker.call(functools.partial(call, part)))
                yield await asyncio.wait_for(found, self._ends - time.monotonic())
        finally:
            self._numbers.live -= 1


class Answer:
    """One request while it is answered."""

    def __init__(self, worker, reader: Reader, asked: Asked, numbers: Numbers, limits):
        self._worker, self._asked, self._numbers, self._limits = worker, asked, numbers, limits
        self._writer = Writer(asked, reader.tokenizer, worker.engine.fingerprint)
        self._reader, self._begun, self._first = reader, time.monotonic(), None
        self._written, self._cancels = 0, {}
        self._echo: tuple[Sequence[int], list[Told]] | None = None
        self._queue: asyncio.Queue[tuple[int, list[Event] | None]] = asyncio.Queue()

    @contextlib.contextmanager
    def _submitted(self):
        """The requests of all choices, which end with this, whatever happens."""
        loop, asked = asyncio.get_running_loop(), self._asked

        def sink_of(index: int) -> Callable[[list[Event] | None], None]:
            def sink(events: list[Event] | None) -> None:
                with contextlib.suppress(RuntimeError):  # The loop has ended.
                    loop.call_soon_threadsafe(self._queue.put_nowait, (index, events))

            return sink

        self._numbers.live += 1
        self._cancels = {
            index: self._worker.submit(request, sink_of(index))
            for index, request in enumerate(asked.requests)
            if request.max_tokens
        }
        try:
            yield
        finally:
            for cancel in self._cancels.values():
                cancel()
            self._numbers.live -= 1
            read = asked.read
            self._numbers.read += read
            first = f"{self._first:.3f} s" if self._first is not None else "none"
            log.info(
                "%s: %d choices, %d tokens read, %d written, first after %s, all %.3f s",
                "chat" if asked.chat else "completion",
                len(asked.requests),
                read,
                self._written,
                first,
                time.monotonic() - self._begun,
            )

    @property
    def streams(self) -> bool:
        """Whether the answer is told while it is written."""
        return self._asked.stream

    @property
    def _left(self) -> float:
        """Seconds until the limit."""
        return self._begun + self._limits.seconds - time.monotonic()

    async def _events(self) -> AsyncIterator[tuple[int, str, list[Told], str | None]]:
        """Yields, of one choice after another as they are written, the new text and tokens, and why
        the choice has ended."""
        asked = self._asked
        texts = {i: Text(asked.stops) for i, each in enumerate(asked.requests) if each.max_tokens}
        begun: set[int] = set()
        while texts:
            index, events = await asyncio.wait_for(self._queue.get(), self._left)
            if events is None:
                raise RuntimeError(FAILED)
            if (text := texts.get(index)) is None:
                continue  # It has ended at a text, and more was on its way.
            if self._first is None:
                self._first = time.monotonic() - self._begun
                self._numbers.first_token(self._first)
            new, told, reason = "", [], None
            for event in events:
                self._written += 1
                piece = self._writer.piece(event, is_first=index not in begun)
                if piece is not None:
                    begun.add(index)
                piece = text.add(piece or b"", last=event.reason is not None)
                told.append(Told(piece, event.token, event.logprob, event.top))
                new, reason = new + piece, "stop" if text.stopped else event.reason
                if reason:
                    break
            if reason:
                self._cancels[index]()
                del texts[index]
            yield index, new, told, reason

    async def whole(self) -> dict[str, Any]:
        asked = self._asked
        choices: list[list[Any]] = [["", [], "length"] for _ in asked.requests]
        with self._submitted():
            async for index, new, told, reason in self._events():
                choice = choices[index]
                choice[0] += new
                choice[1] += told
                choice[2] = reason or choice[2]
            for index, choice in enumerate(choices):
                if asked.echo:
                    prompt = await self._echoed(index)
                    choice[0] = "".join(x.text for x in prompt) + choice[0]
                    choice[1] = prompt + choice[1]
        return self._writer.whole([tuple(choice) for choice in choices], self._written)

    async def _echoed(self, index: int) -> list[Told]:
        """The tokens of a choice's prompt that its client sent, with log-probabilities if they are
        asked for; computed once for all choices of the prompt."""
        request = self._asked.requests[index]
        prompt, top = request.prompt, request.top_logprobs
        if self._echo is not None and self._echo[0] is prompt:
            return self._echo[1]
        tokenizer, text = self._reader.tokenizer, Text(())
        pieces = tokenizer.token_pieces(prompt)
        unsent = self._asked.unsent[index * self._asked.prompts // len(self._asked.requests)]
        # Without a space that the tokenizer puts before every text.
        if sent := prompt[unsent : unsent + 1]:
            pieces[unsent] = tokenizer.decode_bytes(sent)
        texts = [text.add(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        scores: list[tuple[float | None, tuple]] = [(None, ())] * len(prompt)
        if self._asked.logprobs:
            call = self._worker.call(
                lambda: self._worker.engine.score(prompt, top, request.adapter)
            )
            try:
                found = await asyncio.wait_for(asyncio.wrap_future(call), self._left)
            except ValueError as error:
                raise RuntimeError(str(error)) from None
            scores = [(None, ()), *found]
        tokens = [Told(t, x, *s) for t, x, s in zip(texts, prompt, scores, strict=True)]
        self._echo = prompt, tokens[unsent:]
        return tokens[unsent:]

    async def stream(self) -> AsyncIterator[str]:
        asked, writer = self._asked, self._writer
        try:
            with self._submitted():
                for index, request in enumerate(asked.requests):
                    if asked.chat:
                        yield line(writer.begin(index))
                    if asked.echo:
                        prompt = await self._echoed(index)
                        text = "".join(x.text for x in prompt)
                        reason = None if request.max_tokens else "length"
                        yield line(writer.part(index, text, prompt, reason))
                async for index, new, told, reason in self._events():
                    if new or reason or asked.logprobs:
                        yield line(writer.part(index, new, told, reason))
                if asked.usage:
                    yield line(writer.end(self._written))
                yield "data: [DONE]\n\n"
        except (TimeoutError, RuntimeError) as error:
            said = str(error) or f"the answer took more than {self._limits.seconds:g} seconds"
            yield line({"error": {"message": said, "type": "server_error"}})


def line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"
