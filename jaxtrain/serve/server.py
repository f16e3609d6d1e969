"""The HTTP server around an engine, as an ASGI application.

One thread owns the engine; requests reach it through a queue, and what it writes comes back to the
event loop, once per step. A client that goes away, or hangs, costs its own slots only: they are
free again with the next step.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import hmac
import json
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from jaxtrain.host import extras
from jaxtrain.serve.api import Asked, Reader, Text, Told, Writer
from jaxtrain.serve.engine import Engine, Event, Request

log = logging.getLogger(__name__)
# Seconds to the first token, for /metrics.
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Limits(NamedTuple):
    """What a server takes: bytes of a body, requests at once, and seconds of a request."""

    body: int = 1 << 20
    requests: int = 256
    seconds: float = 600.0


DEFAULT_LIMITS = Limits()


Sink = Callable[[list[Event] | None], None]
FAILED = "the engine has failed: start the server again"


class Worker(threading.Thread):
    """The thread that owns an engine. A request's events go to its sink; where the engine has
    failed, None does."""

    def __init__(self, engine: Engine):
        super().__init__(name="jaxtrain-engine", daemon=True)
        self.engine = engine
        self.failed: str | None = None
        self.steps = self.written = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._starting: set[Sink] = set()
        self._calls: set[concurrent.futures.Future] = set()
        self._lock, self._ended = threading.Lock(), False

    @property
    def is_well(self) -> bool:
        """Whether it works, and has not failed."""
        return self.failed is None and self.is_alive()

    def run(self) -> None:
        try:
            while self._work():
                pass
        except Exception as error:  # Whatever it is, those who wait are told.
            log.exception("the engine has failed")
            self.failed = f"{type(error).__name__}: {error}"
        with self._lock:
            self._ended = True
            waiting, calls = [*self._starting, *self._sinks.values()], [*self._calls]
        for sink in waiting:
            sink(None)
        for call in calls:
            if call.set_running_or_notify_cancel():
                call.set_exception(RuntimeError(FAILED))

    def _work(self) -> bool:
        """Does what is asked, then a step; waits where there is nothing to do."""
        wait = not self.engine.is_busy
        with contextlib.suppress(queue.Empty):
            while True:
                if (asked := self._inbox.get(block=wait)) is None:
                    return False
                asked()
                wait = False
        events: dict[int, list[Event]] = collections.defaultdict(list)
        if self.engine.is_busy:
            self.steps += 1
            for event in self.engine.step():
                events[event.number].append(event)
        for number, those in events.items():
            self.written += len(those)
            if (sink := self._sinks.get(number)) is not None:
                sink(those)
            if those[-1].reason:
                self._sinks.pop(number, None)
        return True

    def close(self) -> None:
        """Ends the thread after what it is doing."""
        self._inbox.put(None)

    def call(self, asked: Callable[[], Any]) -> concurrent.futures.Future:
        """Has the thread call a function between two steps, unless what this returns has been
        cancelled before."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            self._calls.discard(future)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(asked())
                except Exception as error:
                    future.set_exception(error)

        with self._lock:
            if self._ended:
                future.set_exception(RuntimeError(FAILED))
            else:
                self._calls.add(future)
                self._inbox.put(run)
        return future

    def submit(self, request: Request, sink: Sink) -> Callable[[], None]:
        """Submits a request; returns what cancels it."""
        numbers: list[int] = []

        def start() -> None:
            numbers.append(self.engine.submit(request))
            self._sinks[numbers[0]] = sink
            self._starting.discard(sink)

        def end() -> None:
            if numbers and self._sinks.pop(numbers[0], None) is not None:
                self.engine.cancel(numbers[0])

        with self._lock:
            if self._ended:
                sink(None)
            else:
                self._starting.add(sink)
                self._inbox.put(start)
        return lambda: self._inbox.put(end)


class _Numbers:
    """What /metrics tells."""

    def __init__(self) -> None:
        self.answers: collections.Counter[int] = collections.Counter()
        self.read = self.live = 0
        self.first: collections.Counter[float] = collections.Counter()
        self.first_sum, self.first_count = 0.0, 0

    def first_token(self, seconds: float) -> None:
        self.first_sum, self.first_count = self.first_sum + seconds, self.first_count + 1
        self.first.update(limit for limit in BUCKETS if seconds <= limit)


def make_app(
    engine: Engine,
    reader: Reader,
    *,
    model: str,
    limits: Limits = DEFAULT_LIMITS,
    key: str | None = None,
) -> Any:
    """Makes the application: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.

    Args:
      model: its name.
      key: what clients must give as an API key; None asks for none.

    Raises:
      ImportError: starlette is not installed.
    """
    extras.load("a server needs starlette", "serve", "starlette.applications")
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    worker, numbers, started = Worker(engine), _Numbers(), int(time.time())
    worker.start()

    def refused(status: int, sentence: str) -> Response:
        numbers.answers[status] += 1
        if len(sentence) > 400:  # It quotes what it was given.
            sentence = f"{sentence[:200]} ... {sentence[-200:]}"
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        error = {"message": sentence, "type": kind, "param": None, "code": None}
        return JSONResponse({"error": error}, status)

    def is_known(request: Any) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        # Headers are bytes, which are told as Latin-1.
        return key is None or hmac.compare_digest(given.encode("latin-1"), key.encode())

    async def body_of(request: Any) -> bytes | None:
        """The body; None where it is over the limit, of which no more is read."""
        found = bytearray()
        async for chunk in request.stream():
            found += chunk
            if len(found) > limits.body:
                return None
        return bytes(found)

    async def completions(request: Any) -> Response:
        return await answer(request, chat=False)

    async def chats(request: Any) -> Response:
        return await answer(request, chat=True)

    async def answer(request: Any, *, chat: bool) -> Response:
        if not is_known(request):
            return refused(401, "the API key is missing or wrong: give it as a bearer token")
        if not worker.is_well:
            return refused(503, FAILED)
        if numbers.live >= limits.requests:
            return refused(429, f"{limits.requests} requests are being answered: try again later")
        # Counted before anything is waited for, so that no more come in meanwhile.
        numbers.live += 1
        try:
            async with asyncio.timeout(limits.seconds):
                raw = await body_of(request)
            if raw is None:
                return refused(413, f"the body is larger than {limits.body} bytes: send less")
            body = await asyncio.to_thread(_parsed, raw)
            seed = int.from_bytes(os.urandom(4), "little")
            # Another thread: a long text takes its time, and others are answered meanwhile.
            asked = await asyncio.to_thread(reader.read, body, chat=chat, seed=seed)
        except TimeoutError:
            return refused(408, f"the body took more than {limits.seconds:g} seconds")
        except ClientDisconnect:
            return Response(status_code=499)
        except ValueError as error:
            return refused(400, str(error))
        finally:
            numbers.live -= 1
        own = _Answer(worker, reader, asked, numbers, model, limits)
        if asked.stream:
            numbers.answers[200] += 1
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return Stream(own.stream(), media_type="text/event-stream", headers=headers)
        work = asyncio.ensure_future(own.whole())
        watch = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            return refused(503, "the server ends: ask again when it has been started")
        finally:
            watch.cancel()
        if not work.done():
            work.cancel()
            numbers.answers[499] += 1
            return Response(status_code=499)
        try:
            found = work.result()
        except TimeoutError:
            return refused(
                408, f"the answer took more than {limits.seconds:g} seconds: ask for less"
            )
        except RuntimeError as error:
            return refused(503, str(error))
        numbers.answers[200] += 1
        return JSONResponse(found)

    class Stream(StreamingResponse):
        """A stream that ends with the server, and a second after its own limit, whatever its client
        reads."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                    async with asyncio.timeout(limits.seconds + 1):
                        await super().__call__(scope, receive, send)
            finally:
                await self.body_iterator.aclose()

    async def models(request: Any) -> Response:
        if not is_known(request):
            return refused(401, "the API key is missing or wrong: give it as a bearer token")
        one = {"id": model, "object": "model", "created": started, "owned_by": "jaxtrain"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(request: Any) -> Response:
        del request
        status, code = ("ok", 200) if worker.is_well else ("failed", 503)
        return JSONResponse({"status": status}, code)

    async def metrics(request: Any) -> Response:
        del request
        return PlainTextResponse(_metrics(worker, numbers))

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield  # Open requests have ended when this goes on.
        worker.close()

    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )
    app.state.worker = worker
    return app


class _Answer:
    """One request while it is answered."""

    def __init__(self, worker, reader: Reader, asked: Asked, numbers: _Numbers, model, limits):
        self._worker, self._asked, self._numbers, self._limits = worker, asked, numbers, limits
        self._writer = Writer(asked, reader.tokenizer, model)
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
    def _left(self) -> float:
        """Seconds until the limit."""
        return self._begun + self._limits.seconds - time.monotonic()

    async def _events(self) -> AsyncIterator[tuple[int, str, list[Told], str | None]]:
        """Yields, of one choice after another as they are written, the new text and tokens, and why
        the choice has ended."""
        asked = self._asked
        texts = {i: Text(asked.stops) for i, each in enumerate(asked.requests) if each.max_tokens}
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
                piece = text.add(self._writer.piece(event), last=event.reason is not None)
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
            for choice, request in zip(choices, asked.requests, strict=True):
                if asked.echo:
                    before = await self._echoed(request)
                    choice[0] = "".join(x.text for x in before) + choice[0]
                    choice[1] = before + choice[1]
        return self._writer.whole([tuple(choice) for choice in choices], self._written)

    async def _echoed(self, request: Request) -> list[Told]:
        """A prompt's own tokens, with log-probabilities where they are asked for; once for all
        choices of the prompt."""
        prompt, top = request.prompt, request.top_logprobs
        if self._echo is not None and self._echo[0] is prompt:
            return self._echo[1]
        pieces = self._reader.tokenizer.token_pieces(prompt)
        text = Text(())
        texts = [text.add(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        scores: list[tuple[float | None, tuple]] = [(None, ())] * len(prompt)
        if self._asked.logprobs:
            call = self._worker.call(lambda: self._worker.engine.score(prompt, top))
            try:
                found = await asyncio.wait_for(asyncio.wrap_future(call), self._left)
            except ValueError as error:
                raise RuntimeError(str(error)) from None
            scores = [(None, ()), *found]
        told = [Told(t, x, *s) for t, x, s in zip(texts, prompt, scores, strict=True)]
        self._echo = prompt, told
        return told

    async def stream(self) -> AsyncIterator[str]:
        asked, writer = self._asked, self._writer
        try:
            with self._submitted():
                for index, request in enumerate(asked.requests):
                    if asked.chat:
                        yield _line(writer.begin(index))
                    if asked.echo:
                        before = await self._echoed(request)
                        text = "".join(x.text for x in before)
                        reason = None if request.max_tokens else "length"
                        yield _line(writer.part(index, text, before, reason))
                async for index, new, told, reason in self._events():
                    if new or reason or asked.logprobs:
                        yield _line(writer.part(index, new, told, reason))
                if asked.usage:
                    yield _line(writer.end(self._written))
                yield "data: [DONE]\n\n"
        except (TimeoutError, RuntimeError) as error:
            said = str(error) or f"the answer took more than {self._limits.seconds:g} seconds"
            yield _line({"error": {"message": said, "type": "server_error"}})


def _parsed(raw: bytes) -> Any:
    try:
        body = json.loads(raw)
        # Half of a surrogate pair may be written in JSON, and nowhere else.
        json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON ({error})") from None


def _line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


async def _gone(request: Any) -> None:
    """Returns when the client has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


def _metrics(worker: Worker, numbers: _Numbers) -> str:
    engine = worker.engine
    lines = []

    def tell(name: str, kind: str, meaning: str, *values: tuple[str, Any]) -> None:
        lines.extend((f"# HELP jaxtrain_{name} {meaning}", f"# TYPE jaxtrain_{name} {kind}"))
        lines.extend(f"jaxtrain_{name}{label} {value}" for label, value in values)

    answers = sorted(numbers.answers.items())
    of_status = ((f'{{status="{status}"}}', count) for status, count in answers)
    tell("requests_total", "counter", "Answers by HTTP status.", *of_status)
    tell("requests_live", "gauge", "Requests that are being answered.", ("", numbers.live))
    tell("requests_waiting", "gauge", "Choices without a slot.", ("", len(engine.waiting)))
    busy = sum(row is not None for row in engine.rows)
    tell("slots_busy", "gauge", "Slots that write or read.", ("", busy))
    tell("slots", "gauge", "Slots in all.", ("", len(engine.rows)))
    tell("pages_free", "gauge", "Pages that a request may take.", ("", engine.pool.free))
    tell("pages", "gauge", "Pages in all.", ("", engine.pool.count - 1))
    tell("steps_total", "counter", "Steps of the engine.", ("", worker.steps))
    tell("prompt_tokens_total", "counter", "Tokens of prompts.", ("", numbers.read))
    tell("written_tokens_total", "counter", "Tokens written.", ("", worker.written))
    first = [(f'_bucket{{le="{limit:g}"}}', numbers.first[limit]) for limit in BUCKETS]
    first.append(('_bucket{le="+Inf"}', numbers.first_count))
    first += [("_sum", f"{numbers.first_sum:.6f}"), ("_count", numbers.first_count)]
    tell("first_token_seconds", "histogram", "Seconds to the first token of a request.", *first)
    return "\n".join(lines) + "\n"
