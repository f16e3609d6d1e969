"""A store of objects in the memory of one host, for whoever knows its address and token.

A launcher keeps one while it lives, so what its processes put there outlives them and ends with it.
It speaks HTTP: PUT, GET and DELETE of ``/TOKEN/NAME``, where DELETE takes what is below the name
too, and GET of ``/TOKEN/?NAME`` for the sizes of what is below it.
"""

import hmac
import http.client
import io
import json
import secrets
from http import HTTPStatus
from typing import Self
from urllib.parse import quote, unquote

from jaxtrain.host import answering

# How long a host that may be gone is waited for, and how long a connection may say nothing.
SILENT_SECONDS = 20.0
# Each process of a host and of the one before it writes some objects at a time.
CONNECTIONS = 512
_BLOCK = 1 << 20


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
        token = secrets.token_urlsafe(16)
        handler = type("Handler", (_Handler,), {"objects": self.objects, "token": token})
        try:
            self._server = answering.Server((host, 0), handler, connections=CONNECTIONS)
        except OSError:  # The address is of another machine, which passes connections on.
            self._server = answering.Server(("", 0), handler, connections=CONNECTIONS)
        self.address = f"{host}:{self._server.server_port}/{token}"

    def __enter__(self) -> Self:
        self._server.start("jaxtrain-keeper")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.objects.clear()


def ask(address: str, method: str, name: str, body: bytes = b"", *, below: str = "") -> bytes:
    """Makes one request of a keeper and returns its answer. Raises FileNotFoundError where there is
    no such object, and OSError where no keeper answers."""
    host, _, token = address.partition("/")
    connection = http.client.HTTPConnection(host, timeout=SILENT_SECONDS, blocksize=_BLOCK)
    try:
        path = f"/{token}/{quote(name)}" + (f"?{quote(below)}" if below else "")
        # As a file it is sent in blocks, and the time limit is that of each.
        size = {"Content-Length": str(len(body))}
        connection.request(method, path, io.BytesIO(body), size)
        answer = connection.getresponse()
        found = answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"the memory of {host} cannot be asked ({error!r})") from error
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        missing = answer.status == HTTPStatus.NOT_FOUND
        kind = FileNotFoundError if missing else ConnectionError
        raise kind(f"the memory of {host} answers {answer.status} for '{name}'")
    return found


class _Handler(answering.Handler):
    timeout = SILENT_SECONDS
    objects: dict[str, bytes]
    token: str

    def do_GET(self) -> None:
        token, _, name = self.path[1:].partition("/")
        name, listing, below = map(unquote, name.partition("?"))
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            self.answer(b"", status=HTTPStatus.FORBIDDEN)
        elif listing:
            sizes = {each: len(data) for each, data in self._below(below)}
            self.answer(json.dumps(sizes).encode())
        elif self.command == "PUT":
            length = self.headers.get("Content-Length", "")
            body = self.rfile.read(int(length)) if length.isdecimal() else b""
            if length != str(len(body)):  # The request was cut off: the object stays as it was.
                self.answer(b"", status=HTTPStatus.BAD_REQUEST)
            else:
                self.objects[name] = body
                self.answer(b"")
        elif self.command == "DELETE":
            for each, _ in self._below(name):
                self.objects.pop(each, None)
            self.answer(b"")
        elif (data := self.objects.get(name)) is None:
            self.answer(b"", status=HTTPStatus.NOT_FOUND)
        else:
            self.answer(data)

    do_PUT = do_DELETE = do_GET

    def _below(self, name: str) -> list[tuple[str, bytes]]:
        return [x for x in list(self.objects.items()) if f"{x[0]}/".startswith(f"{name}/")]
