"""Serving: requests that share an engine, against the same ones answered one after another, in this
process and over HTTP; and a trainer's log-probabilities with the bits of a server."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from experiments.bench import Rounds, Variant, row
from jaxtrain.data import ByteTokenizer
from jaxtrain.models import decoder, exact
from jaxtrain.serve.api import Reader
from jaxtrain.serve.engine import Engine, Request
from jaxtrain.serve.server import make_app


@dataclasses.dataclass(frozen=True)
class Config(Rounds):
    """An engine with requests one by one and all at once."""

    model: str = "tiny"
    """A preset of the GPT."""
    slots: tuple[int, ...] = (16, 32)
    """Slots of the engines that have all requests at once."""
    requests: int = 32
    """Requests of each round."""
    tokens: int = 48
    """Tokens that each request receives."""
    rounds: int = 5


def main(config: Config) -> None:
    """Runs the row and prints it."""
    model, params, prompts, shape = _work(config)
    asked = [Request(prompt, config.tokens, temperature=0) for prompt in prompts]

    def variant(slots: int, *, one_by_one: bool = False, exact: bool = False) -> Variant:
        readers = 8 if slots > 2 else 2
        engine = Engine(model, params, slots=slots, readers=readers, exact=exact)
        engine.warm_up()

        def run() -> None:
            # Nothing that a round before has read.
            engine.pool.forget()
            for request in asked:
                engine.submit(request)
                while one_by_one and engine.is_busy:
                    engine.step()
            while engine.is_busy:
                engine.step()

        return Variant(run, {"slots": slots, "programs": engine.programs})

    variants = {"one by one": variant(2, one_by_one=True)}
    variants |= {f"{n} slots": variant(n) for n in config.slots}
    variants |= {f"{n} slots, exact": variant(n, exact=True) for n in config.slots}
    row("serve", config, variants, shape)


@dataclasses.dataclass(frozen=True)
class ExactConfig(Rounds):
    """Log-probabilities of a batch with the bits of a server, against those of the usual pass, and
    their gradients."""

    model: str = "tiny"
    """A preset of the GPT."""
    rows: int = 8
    """Rows of the batch, each as long as the model was trained with."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the model."""
    rounds: int = 5


def exact_bits(config: ExactConfig) -> None:
    """Runs the row and prints it."""
    model = decoder.PRESETS[config.model]()
    params = decoder.init(model, jax.random.key(0))
    params = jax.tree.map(lambda x: x.astype(config.dtype), params)
    shape = config.rows, model.seq_len + 1
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, shape)
    mask = np.ones((config.rows, model.seq_len), np.float32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}

    def usual(params: Any, batch: Any) -> jax.Array:
        return decoder.log_probs(model, params, decoder.run(model, params, batch), batch)

    own = functools.partial(exact.log_probs, model)
    calls = {"usual": usual, "exact": own}
    for name, call in tuple(calls.items()):
        total = lambda *given, call=call: call(*given).sum()  # noqa: E731
        calls[f"{name}, with its gradient"] = jax.value_and_grad(total)

    def variant(call: Callable[..., Any]) -> Variant:
        call = jax.jit(call)
        return Variant(lambda: jax.block_until_ready(call(params, batch)))

    variants = {name: variant(call) for name, call in calls.items()}
    row("exact", config, variants, {"model": dataclasses.asdict(model)})


@dataclasses.dataclass(frozen=True)
class HTTPConfig(Config):
    """A server whose clients, in another process, ask one by one and all at once."""

    requests: int = 64
    slots: tuple[int, ...] = (16,)


def over_http(config: HTTPConfig) -> None:
    """Runs the row and prints it."""
    model, params, prompts, shape = _work(config)
    given = {"max_tokens": config.tokens, "temperature": 0}
    bodies = [json.dumps({"prompt": prompt} | given) for prompt in prompts]
    clients = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with contextlib.ExitStack() as stack, clients:

        def variant(slots: int, *, at_once: int) -> Variant:
            engine = Engine(model, params, slots=slots, readers=8 if slots > 2 else 2)
            engine.warm_up()
            port = stack.enter_context(_served(engine))

            def run() -> None:
                engine.pool.forget()
                written = clients.submit(ask, port, bodies, at_once).result()
                assert written == config.tokens * len(bodies)

            return Variant(run, {"slots": slots, "clients": at_once})

        variants = {"one by one": variant(2, at_once=1)}
        all_at_once = {"at_once": len(bodies)}
        variants |= {f"all, {n} slots": variant(n, **all_at_once) for n in config.slots}
        row("serve_http", config, variants, shape)


def ask(port: int, bodies: Sequence[str], at_once: int) -> int:
    """Returns how many tokens a server has written for some requests, so many of them at once."""

    def one(body: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", body)
            return json.loads(connection.getresponse().read())["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        return sum(threads.map(one, bodies))


@contextlib.contextmanager
def _served(engine: Engine) -> Iterator[int]:
    """Serves an engine in a thread of this process; gives the port."""
    import uvicorn

    reader = Reader(("model",), ByteTokenizer(), engine.longest, frozenset(), None, ((), ()))
    config = uvicorn.Config(make_app(engine, reader), log_level="error")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given = {"target": server.run, "kwargs": {"sockets": [listening]}}
        thread = threading.Thread(**given, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def _work(config: Config) -> tuple[Any, Any, list[list[int]], dict[str, Any]]:
    """A model, its parameters, prompts, and what a row says of them."""
    model = decoder.PRESETS[config.model]()
    params = decoder.init(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 120, config.requests)
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    shape = {"model": dataclasses.asdict(model), "prompt_tokens": lengths.tolist()}
    return model, params, prompts, shape
