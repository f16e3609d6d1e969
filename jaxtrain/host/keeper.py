"""A store of objects in the memory of one host, for whoever knows its address and token.

A launcher keeps one while it lives, so what its processes put there outlives them and ends with it.
It speaks HTTP: PUT, GET and DELETE of ``/TOKEN/NAME``, where DELETE takes what is below the name
too, and GET of ``/TOKEN/?NAME`` for the sizes of what is below it.
"""

import functools
import hmac
import http.client
import http.server
import json
import secrets
import threading
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import quote, unquote

from jaxtrain.host import readings

# How long a connection may say nothing, and how long a host that may be gone is waited for.
SILENT_SECONDS, ANSWER_SECONDS = 20.0, 5.0
# The used share of a host's memory beyond which nothing more is taken.
FULL = 0.95
_ERRORS = {HTTPStatus.NOT_FOUND: FileNotFoundError, HTTPStatus.INSUFFICIENT_STORAGE: MemoryError}


class Keeper:
    """Serves its objects while it is open.

    Args:
      host: the name or address under which other hosts reach this one; with ``127.0.0.1`` no other
        host does.

    Attributes:
      address: ``HOST:PORT/TOKEN``, for :func:`ask`.
      objects: the objects by their names.

    >>> with Keeper("127.0.0.1") as keeper:
    ...     ask(keeper.address, "PUT", "a/b", b"bytes"), ask(keeper.address, "GET", "a/b")
    (b'', b'bytes')
    """

    def __init__(self, host: str):
        self.objects: dict[str, bytes] = {}
        token, here = secrets.token_urlsafe(16), host if host.startswith("127.") else ""
        handler = type("Handler", (_Handler,), {"objects": self.objects, "token": token})
        self._server = _Server((here, 0), handler)
        self.address = f"{host}:{self._server.server_port}/{token}"

    def __enter__(self) -> Self:
        # Seconds between two looks at whether it is to end.
        serve = functools.partial(self._server.serve_forever, 0.05)
        threading.Thread(target=serve, name="jaxtrain-keeper", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.objects.clear()


def ask(address: str, method: str, name: str, body: bytes = b"", *, below: str = "") -> bytes:
    """Makes one request of a keeper and returns its answer. Raises FileNotFoundError where there is
    no such object, MemoryError where there is no room for it, and OSError without an answer."""
    host, _, token = address.partition("/")
    connection = http.client.HTTPConnection(host, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        connection.sock.settimeout(SILENT_SECONDS)
        path = f"/{token}/{quote(name)}" + (f"?{quote(below)}" if below else "")
        connection.request(method, path, body)
        answer = connection.getresponse()
        found = answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"the memory of {host} cannot be asked ({error!r})") from error
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        kind, why = _ERRORS.get(answer.status, ConnectionError), HTTPStatus(answer.status).phrase
        raise kind(f"{method} '{name}' of {len(body):,} bytes in the memory of {host}: {why}")
    return found


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = SILENT_SECONDS
    objects: dict[str, bytes]
    token: str

    def do_GET(self) -> None:
        token, _, name = self.path[1:].partition("/")
        name, listing, below = map(unquote, name.partition("?"))
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            self._answer(status=HTTPStatus.FORBIDDEN)
        elif listing:
            sizes = {each: len(self.objects[each]) for each in self._below(below)}
            self._answer(json.dumps(sizes).encode())
        elif self.command == "PUT":
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if readings.memory_fraction() > FULL:
                self._answer(status=HTTPStatus.INSUFFICIENT_STORAGE)
            else:
                self.objects[name] = body
                self._answer()
        elif self.command == "DELETE":
            for each in self._below(name):
                self.objects.pop(each, None)
            self._answer()
        elif name in self.objects:
            self._answer(self.objects[name])
        else:
            self._answer(status=HTTPStatus.NOT_FOUND)

    do_PUT = do_DELETE = do_GET

    def _below(self, name: str) -> list[str]:
        return [each for each in list(self.objects) if f"{each}/".startswith(f"{name}/")]

    def _answer(self, body: bytes = b"", *, status: int = HTTPStatus.OK) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A request is no news."""
