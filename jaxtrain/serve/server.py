"""The HTTP server around an engine, as an ASGI application.

One thread owns the engine; requests reach it through a queue, and what it writes comes back to the
event loop, once per step. A client that goes away, or hangs, costs its own slots only: they are
free again with the next step.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from jaxtrain.host import extras
from jaxtrain.serve.answer import BUCKETS, DEFAULT_LIMITS, Answer, Calls, Limits, Numbers
from jaxtrain.serve.api import Reader
from jaxtrain.serve.classify import Classification, Classifier
from jaxtrain.serve.embeddings import Embeddings
from jaxtrain.serve.engine import Engine
from jaxtrain.serve.sources import SourceEngine
from jaxtrain.serve.worker import FAILED, Worker

NO_KEY = "the API key is missing or wrong: give it as a bearer token"


def make_app(
    engine: Engine | Classifier, reader: Reader | str, *, limits: Limits = DEFAULT_LIMITS, **given
) -> Any:
    """Makes the application of a decoder, /v1/completions, /v1/chat/completions and /v1/embeddings,
    of an encoder-decoder, /v1/completions, or of a classifier, /v1/classify; with /v1/models,
    /health and /metrics.

    Args:
      reader: what reads the requests; of a classifier, its name.
      **given: ``key``, as for :func:`application`.

    Raises:
      ImportError: starlette is not installed.
    """
    worker, numbers = Worker(engine), Numbers()
    if isinstance(engine, Classifier):
        classes = lambda body: Classification(worker, reader, body, numbers, limits)  # noqa: E731
        paths, models = {"classify": classes}, (reader,)
    else:

        def completion(body: Any, *, chat: bool) -> Answer:
            seed = int.from_bytes(os.urandom(4), "little")
            asked = reader.read(body, chat=chat, seed=seed)
            return Answer(worker, reader, asked, numbers, limits)

        paths = {"completions": functools.partial(completion, chat=False)}
        if not isinstance(engine, SourceEngine):
            paths["chat/completions"] = functools.partial(completion, chat=True)
            paths["embeddings"] = lambda body: Embeddings(worker, reader, body, numbers, limits)
        models = reader.models
    return application(worker, numbers, paths, models, limits=limits, **given)


def application(
    worker: Worker,
    numbers: Numbers,
    paths: Mapping[str, Callable[[Any], Answer | Calls]],
    models: Sequence[str],
    *,
    limits: Limits,
    key: str | None = None,
) -> Any:
    """Makes the application around a worker, which it starts.

    Args:
      paths: what reads a request, by the path behind /v1/.
      models: the name of the model, and those of its adapters.
      key: what clients must give as an API key; None asks for none.
    """
    extras.load("a server needs starlette", "serve", "starlette.applications")
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    started = int(time.time())
    worker.start()

    def refused(status: int, sentence: str) -> Response:
        numbers.answers[status] += 1
        return refusal(status, sentence)

    async def answer(request: Any) -> Response:
        read = paths[request.url.path.removeprefix("/v1/")]
        if not has_key(request, key):
            return refused(401, NO_KEY)
        if not worker.is_well:
            return refused(503, FAILED)
        if numbers.live >= limits.requests:
            return refused(429, f"{limits.requests} requests are being answered: try again later")
        # Counted before anything is waited for, so that no more come in meanwhile.
        numbers.live += 1
        try:
            async with asyncio.timeout(limits.seconds):
                raw = await body_of(request, limits.body)
            if raw is None:
                return refused(413, f"the body is larger than {limits.body} bytes: send less")
            body = await asyncio.to_thread(_parsed, raw)
            # Another thread: a long text takes its time, and others are answered meanwhile.
            own = await asyncio.to_thread(read, body)
        except TimeoutError:
            return refused(408, f"the body took more than {limits.seconds:g} seconds")
        except ClientDisconnect:
            return Response(status_code=499)
        except LookupError as error:
            return refused(404, error.args[0])
        except ValueError as error:
            return refused(400, str(error))
        finally:
            numbers.live -= 1
        if own.streams:
            numbers.answers[200] += 1
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return Stream(own.stream(), media_type="text/event-stream", headers=headers)
        work = asyncio.ensure_future(own.whole())
        watch = asyncio.ensure_future(gone(request))
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

    async def names(request: Any) -> Response:
        if not has_key(request, key):
            return refused(401, NO_KEY)
        one = {"object": "model", "created": started, "owned_by": "jaxtrain"}
        base, *adapters = models
        data = [one | {"id": base}, *(one | {"id": each, "parent": base} for each in adapters)]
        return JSONResponse({"object": "list", "data": data})

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

    told = {"/v1/models": names, "/health": health, "/metrics": metrics}
    routes = [Route(f"/v1/{path}", answer, methods=["POST"]) for path in paths]
    routes += [Route(path, tell) for path, tell in told.items()]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.worker = worker
    return app


def has_key(request: Any, key: str | None) -> bool:
    """Whether a request has the API key, where one is asked for."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    # Headers are bytes, which are told as Latin-1.
    return key is None or hmac.compare_digest(given.encode("latin-1"), key.encode())


def refusal(status: int, sentence: str) -> Any:
    """Makes the answer that says why there is no other."""
    from starlette.responses import JSONResponse

    if len(sentence) > 400:  # It quotes what it was given.
        sentence = f"{sentence[:200]} ... {sentence[-200:]}"
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": sentence, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status)


async def body_of(request: Any, most: int) -> bytes | None:
    """Returns the body; None where it has more bytes than ``most``, and no more is read."""
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            return None
    return bytes(found)


def _parsed(raw: bytes) -> Any:
    try:
        body = json.loads(raw)
        # Half of a surrogate pair may be written in JSON, and nowhere else.
        json.dumps(body, ensure_ascii=False).encode()
        return body
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON ({error})") from None


async def gone(request: Any) -> None:
    """Returns when the client has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


def _metrics(worker: Worker, numbers: Numbers) -> str:
    engine = worker.engine
    lines = []

    def tell(name: str, kind: str, meaning: str, *values: tuple[str, Any]) -> None:
        lines.extend((f"# HELP jaxtrain_{name} {meaning}", f"# TYPE jaxtrain_{name} {kind}"))
        lines.extend(f"jaxtrain_{name}{label} {value}" for label, value in values)

    answers = sorted(numbers.answers.items())
    of_status = ((f'{{status="{status}"}}', count) for status, count in answers)
    tell("requests_total", "counter", "Answers by HTTP status.", *of_status)
    tell("requests_live", "gauge", "Requests that are being answered.", ("", numbers.live))
    tell("prompt_tokens_total", "counter", "Tokens of prompts.", ("", numbers.read))
    if isinstance(engine, Classifier):
        return "\n".join(lines) + "\n"
    tell("requests_waiting", "gauge", "Choices without a slot.", ("", len(engine.waiting)))
    busy = sum(row is not None for row in engine.rows)
    tell("slots_busy", "gauge", "Slots that write or read.", ("", busy))
    tell("slots", "gauge", "Slots in all.", ("", len(engine.rows)))
    tell("pages_free", "gauge", "Pages that a request may take.", ("", engine.pool.free))
    tell("pages", "gauge", "Pages in all.", ("", engine.pool.count - 1))
    tell("steps_total", "counter", "Steps of the engine.", ("", worker.steps))
    tell("written_tokens_total", "counter", "Tokens written.", ("", worker.written))
    tell("draft_tokens_total", "counter", "Tokens that a draft has guessed.", ("", engine.guessed))
    tell("draft_right_total", "counter", "Guesses that were right.", ("", engine.right))
    first = [(f'_bucket{{le="{limit:g}"}}', numbers.first[limit]) for limit in BUCKETS]
    first.append(('_bucket{le="+Inf"}', numbers.first_count))
    first += [("_sum", f"{numbers.first_sum:.6f}"), ("_count", numbers.first_count)]
    tell("first_token_seconds", "histogram", "Seconds to the first token of a request.", *first)
    return "\n".join(lines) + "\n"
