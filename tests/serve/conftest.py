"""A server on localhost, in a thread."""

import contextlib
import functools
import http.client
import json
import socket
import threading

import jax
import pytest

from jaxtrain.data import ByteTokenizer
from jaxtrain.data.chat import TEMPLATES, ChatTemplate
from jaxtrain.models import decoder
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.serve.answer import Limits
from jaxtrain.serve.api import Reader
from jaxtrain.serve.engine import Engine
from jaxtrain.serve.server import make_app
from tests.waiting import eventually

# What a run's texts and conversations follow: an end of document.
AS_A_RUN = ((256,), (256,))


@functools.cache
def engine():
    model = DecoderConfig(vocab_size=257, seq_len=128, layers=2, width=16, heads=2)
    params = decoder.init(model, jax.random.key(0))
    params = jax.tree.map(lambda x: 3 * x, params)
    made = Engine(model, params, slots=4, readers=2, chunk=16, page=8)
    made.warm_up()
    return made


def reader(template="plain"):
    tokenizer = ByteTokenizer()
    chat = ChatTemplate(TEMPLATES[template]) if template else None
    return Reader(
        ("small",), tokenizer, engine().longest, frozenset([tokenizer.eod]), chat, AS_A_RUN
    )


class Server:
    """What listens, and how a test asks it."""

    def __init__(self, app, port):
        self.app, self.port, self.worker = app, port, app.state.worker

    def ask(self, path, body=None, headers=(), *, raw=None):
        """Returns the status and the text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            raw = raw if body is None else json.dumps(body)
            connection.request("GET" if raw is None else "POST", path, raw, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def complete(self, **body):
        status, text = self.ask("/v1/completions", body)
        return status, json.loads(text)


def serving(template="plain", **options):
    pytest.importorskip("starlette")
    return listening(make_app(engine(), reader(template), **options))


@contextlib.contextmanager
def listening(app):
    uvicorn = pytest.importorskip("uvicorn")
    config = uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=5)
    with socket.create_server(("127.0.0.1", 0)) as open_socket:
        server = uvicorn.Server(config)
        # Signals are the main thread's.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [open_socket]}, daemon=True)
        thread.start()
        eventually(lambda: server.started)
        try:
            yield Server(app, open_socket.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
            app.state.worker.join(30)


@pytest.fixture(scope="module")
def server():
    with serving(limits=Limits(body=20_000, requests=8)) as made:
        yield made
