"""A front before several replicas of one server, each a process of its own.

A request goes to the replica that has read the beginning of its prompt, unless that has much more
to do than another; else to the one with the fewest open requests. Where a replica dies its requests
go to another. All have one configuration, so the same prompt with the same seed has the same bits
there, and a stream continues behind what was told.
"""

import asyncio
import collections
import contextlib
import json
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from jaxtrain.host import extras
from jaxtrain.serve.answer import DEFAULT_LIMITS, Limits, line
from jaxtrain.serve.api import check_model
from jaxtrain.serve.pages import digests_of
from jaxtrain.serve.server import NO_KEY, body_of, gone, has_key, refusal
from jaxtrain.serve.worker import FAILED

log = logging.getLogger(__name__)
# Bytes of a prompt by whose beginnings replicas are remembered, and how many beginnings are.
BLOCK, MOST = 256, 100_000
# Requests that a replica may have more than the least busy one, and still be chosen for what it has
# read.
SLACK = 4
# Seconds of silence beyond the limit of a request, after which a replica is asked for its health.
GRACE = 10.0
# Seconds that a replica has to tell its health or its metrics.
PROBE = 5.0
# Replicas that a request is given to, one after the other: it may be what they die of.
ATTEMPTS = 3
# Set for replicas, whose standard input closes with the front.
REPLICA = "JAXTRAIN_REPLICA"


class Replica(threading.Thread):
    """A server in a process of its own, which is started again when it ends.

    Attributes:
      port: where it listens; None while it does not.
      live: requests that it has from the front; ``given`` counts all.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        super().__init__(daemon=True)
        self.port: int | None = None
        self.live = self.given = 0
        self._command, self._environ = command, {**environ, REPLICA: "1"}
        self._tried, self._closing = threading.Event(), threading.Event()
        self._process: subprocess.Popen | None = None

    def run(self) -> None:
        pause = 1.0
        while not self._closing.is_set():
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is the front's.
            )
            found = re.search(r":(\d+)/v1", self._process.stdout.readline())
            begun = time.monotonic()
            self.port = int(found[1]) if found else None
            self._tried.set()
            self.status = self._process.wait()
            self.port = None
            if self._closing.is_set():
                return
            pause = 1.0 if time.monotonic() - begun > 60 else min(2 * pause, 60.0)
            log.warning("a replica ended with status %d: starting again", self.status)
            self._closing.wait(pause)

    def wait(self) -> None:
        """Waits until it listens; raises ValueError where it has ended before."""
        self._tried.wait()
        if self.port is None:
            raise ValueError("a replica ended before it listened: its reason stands above")

    def fail(self) -> None:
        """Ends the process, whose engine has failed, so that it is started again."""
        self.port = None
        self._process.kill()

    def close(self) -> None:
        """Ends the process for good."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()


class Choice:
    """Which replica receives a request.

    Args:
      replicas: of which those without a port are not chosen.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = replicas
        self._known: collections.OrderedDict[bytes, Replica] = collections.OrderedDict()

    def of(self, beginnings: Sequence[bytes], tried: Sequence[Replica]) -> Replica | None:
        """Returns the replica for a prompt with these beginnings, the longest last, of those that
        have not been tried; None where there is none."""
        well = [each for each in self.replicas if each.port is not None and each not in tried]
        if not well or len(tried) >= ATTEMPTS:
            return None
        least = min(each.live for each in well)
        known = (self._known.get(each) for each in reversed(beginnings))
        found = (x for x in known if x in well and x.live <= least + SLACK)
        chosen = next(found, None) or min(well, key=lambda each: (each.live, each.given))
        for each in beginnings:
            self._known[each] = chosen
            self._known.move_to_end(each)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return chosen


class Request(NamedTuple):
    """What is passed on."""

    method: str
    target: bytes | str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


@contextlib.asynccontextmanager
async def passed_on(
    port: int, request: Request, seconds: float
) -> AsyncIterator[tuple[Any, AsyncIterator[bytes]]]:
    """Sends a request to a port of this machine, and yields the head and the body of the answer.

    Raises OSError or h11's RemoteProtocolError if the answer breaks off, and TimeoutError if
    nothing moves for ``seconds``.
    """
    import h11

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h11.Connection(h11.CLIENT)
    kept = [(k, v) for k, v in request.headers if k in (b"authorization", b"content-type")]
    kept += [(b"host", b"127.0.0.1"), (b"connection", b"close")]
    kept.append((b"content-length", str(len(request.body)).encode()))
    head = h11.Request(method=request.method, target=request.target, headers=kept)

    async def event() -> Any:
        while (found := connection.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(seconds):
                connection.receive_data(await reader.read(1 << 16))
        return found

    async def body() -> AsyncIterator[bytes]:
        while isinstance(found := await event(), h11.Data):
            yield bytes(found.data)

    try:
        for part in (head, h11.Data(data=request.body), h11.EndOfMessage()):
            writer.write(connection.send(part))
        async with asyncio.timeout(seconds):
            await writer.drain()
        answer = await event()
        if not isinstance(answer, h11.Response):
            raise ConnectionResetError("the replica has not answered")
        yield answer, body()
    finally:
        writer.close()


async def told_soon(port: int, path: str) -> bytes:
    """Returns the body of a replica's answer to a path. Raises as :func:`passed_on`, after PROBE
    seconds, and ConnectionResetError for another status than 200."""
    async with passed_on(port, Request("GET", path, (), b""), PROBE) as (head, body):
        if head.status_code != 200:
            raise ConnectionResetError(f"the replica answers with status {head.status_code}")
        return b"".join([part async for part in body])


class Continued:
    """The events of a stream, of which those that an earlier replica has told are left out."""

    def __init__(self) -> None:
        self._told: collections.Counter[int | None] = collections.Counter()
        self._first: dict[str, Any] = {}

    async def events(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
        """Yields events; raises ConnectionResetError where the replica has failed in between."""
        seen: collections.Counter[int | None] = collections.Counter()
        held = b""
        async for chunk in chunks:
            *whole, held = (held + chunk).split(b"\n\n")
            for each in whole:
                data = each.removeprefix(b"data: ")
                if data == b"[DONE]":
                    yield "data: [DONE]\n\n"
                    return
                event = json.loads(data)
                if event.get("error", {}).get("message") == FAILED:
                    raise ConnectionResetError(FAILED)
                index = event["choices"][0]["index"] if event.get("choices") else None
                seen[index] += 1
                if seen[index] > self._told[index]:
                    self._told[index] += 1
                    self._first = self._first or {
                        name: event[name] for name in ("id", "created") if name in event
                    }
                    yield line(event | self._first)
                if "error" in event:
                    return
        raise ConnectionResetError("the stream has no end")


def make_front(
    replicas: Sequence[Replica],
    models: Sequence[str],
    *,
    limits: Limits = DEFAULT_LIMITS,
    key: str | None = None,
) -> Any:
    """Makes the application that passes on to replicas what names one of their models.

    Args:
      models: the name of the model, and those of its adapters.
      limits: those of each replica.
      key: what clients must give as an API key; None asks for none.

    Raises:
      ImportError: starlette is not installed.
    """
    extras.load("a server needs starlette", "serve", "starlette.applications")
    import h11
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    choice, lost = Choice(replicas), (OSError, h11.RemoteProtocolError)
    reading = 0  # bodies

    class Told(StreamingResponse):
        """An answer whose request ends with its client."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.body_iterator.aclose()

    async def hangs(replica: Replica, port: int) -> bool:
        """Returns False if a replica tells its health, or has been started again."""
        with contextlib.suppress(*lost):
            await told_soon(port, "/health")
            return False
        return replica.port == port

    async def told(request: Request, beginnings: Sequence[bytes]) -> AsyncIterator[Any]:
        """Yields the status and the kind of an answer, then its parts."""
        tried: list[Replica] = []
        stream: Continued | None = None
        busy: bytes | None = None
        while (replica := choice.of(beginnings, tried)) is not None:
            tried.append(replica)
            port = replica.port
            replica.live, replica.given = replica.live + 1, replica.given + 1
            try:
                async with passed_on(port, request, limits.seconds + GRACE) as (head, body):
                    kind = dict(head.headers).get(b"content-type", b"").decode()
                    if not kind.startswith("text/event-stream"):
                        whole = b"".join([part async for part in body])
                        if head.status_code == 503:
                            replica.fail()
                            continue
                        if head.status_code == 429:
                            busy = whole
                            continue
                        yield head.status_code, kind
                        yield whole
                        return
                    if stream is None:
                        stream = Continued()
                        yield head.status_code, kind
                    async for event in stream.events(body):
                        yield event
                    return
            except lost as error:
                # Its own limit has passed. It may have many prompts to read, and be well.
                if isinstance(error, TimeoutError) and await hangs(replica, port):
                    replica.fail()
                log.warning("a replica was lost in a request: %s", str(error) or "it is silent")
            finally:
                replica.live -= 1
        if stream is None:
            yield 503 if busy is None else 429, "application/json"
            yield busy or refusal(503, "no replica is well: try again later").body
        else:
            yield line({"error": {"message": FAILED, "type": "server_error"}})

    async def pass_on(request: Any) -> Response:
        nonlocal reading
        if not has_key(request, key):
            return refusal(401, NO_KEY)
        if reading + sum(replica.live for replica in replicas) >= limits.requests * len(replicas):
            return refusal(429, "too many requests are being answered: try again later")
        # Counted before anything is waited for, so that no more come in meanwhile.
        reading += 1
        try:
            async with asyncio.timeout(limits.seconds):
                raw = await body_of(request, limits.body)
            if raw is None:
                return refusal(413, f"the body is larger than {limits.body} bytes: send less")
            raw, beginnings = await asyncio.to_thread(_prepared, raw, models)
        except TimeoutError:
            return refusal(408, f"the body took more than {limits.seconds:g} seconds")
        except ClientDisconnect:
            return Response(status_code=499)
        except LookupError as error:
            return refusal(404, error.args[0])
        finally:
            reading -= 1
        # The bytes of the client, because a request line has no decoded spaces and letters.
        path = request.scope.get("raw_path") or quote(request.url.path).encode()
        target = b"?".join(filter(None, (path, request.scope["query_string"])))
        parts = told(Request(request.method, target, request.headers.raw, raw), beginnings)
        work, watch = asyncio.ensure_future(anext(parts)), asyncio.ensure_future(gone(request))
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            if not work.done():
                work.cancel()
        if not work.done() or work.cancelled():
            return Response(status_code=499)
        try:
            status, kind = work.result()
        except h11.LocalProtocolError as error:
            return refusal(400, f"the request cannot be passed on ({error})")
        return Told(parts, status, {"cache-control": "no-cache"}, kind)

    async def health(request: Any) -> Response:
        del request
        well = sum(each.port is not None for each in replicas)
        said = {"status": "ok" if well else "failed", "replicas": len(replicas), "well": well}
        return JSONResponse(said, 200 if well else 503)

    async def metrics(request: Any) -> Response:
        texts = []
        for each in replicas:
            with contextlib.suppress(*lost):
                if each.port is not None:
                    texts.append((await told_soon(each.port, "/metrics")).decode())
        return PlainTextResponse(summed(texts) + _own(replicas))

    routes = [Route("/health", health), Route("/metrics", metrics)]
    routes.append(Route("/{path:path}", pass_on, methods=["GET", "POST"]))

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield  # Open requests have ended when this goes on.
        for each in replicas:
            each.close()

    return Starlette(routes=routes, lifespan=lifespan)


def summed(texts: Sequence[str]) -> str:
    """Returns the metrics of several servers as those of one: each value is their sum.

    >>> print(summed(["# HELP a b\\na 1\\n", "# HELP a b\\na 2\\na{c=1} 3\\n"]), end="")
    # HELP a b
    a 3
    a{c=1} 3
    """
    # By what is said of a metric, its values by name and label.
    found: dict[str, dict[str, float]] = collections.defaultdict(
        lambda: collections.defaultdict(float)
    )
    for metric in (x for text in texts for x in re.split("^(?=# HELP)", text, flags=re.MULTILINE)):
        lines = metric.splitlines()
        said = "".join(f"{each}\n" for each in lines if each.startswith("#"))
        for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#")):
            found[said][name] += float(value)
    return "".join(
        said + "".join(f"{name} {value:.10g}\n" for name, value in values.items())
        for said, values in found.items()
    )


def _own(replicas: Sequence[Replica]) -> str:
    well = sum(each.port is not None for each in replicas)
    return (
        "# HELP jaxtrain_replicas_well Replicas that listen.\n"
        f"# TYPE jaxtrain_replicas_well gauge\njaxtrain_replicas_well {well}\n"
    )


def _prepared(raw: bytes, models: Sequence[str]) -> tuple[bytes, list[bytes]]:
    """A body with a seed, so that another replica draws alike, and the beginnings of its prompt; a
    body that cannot be read stays, and is the replica's to refuse. Raises LookupError where it
    names another model."""
    try:
        body = json.loads(raw)
        named = {name: value for name, value in body.items() if value is not None}
        text = json.dumps([body.get(name) for name in ("model", "messages", "prompt")]).encode()
        if "prompt" in body or "messages" in body:
            drawn = int.from_bytes(os.urandom(4), "little")
            body["seed"] = drawn if body.get("seed") is None else body["seed"]
    except (ValueError, RecursionError, AttributeError):
        return raw, []
    check_model(named, models)
    whole = len(text) // BLOCK * BLOCK
    return json.dumps(body).encode(), digests_of(list(text[:whole]), BLOCK)
