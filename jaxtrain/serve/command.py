"""``jaxtrain serve``: OpenAI's API for what writes text, and vLLM's for a classifier."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import tyro
from jax.sharding import Mesh

from jaxtrain.data.chat import ChatTemplate, load_template
from jaxtrain.data.tokenizers import Tokenizer
from jaxtrain.hf.opening import ModelOptions, Opened, ends_of, find_model, open_adapter, open_model
from jaxtrain.host import distributed, extras, quiet
from jaxtrain.host.least import check_least
from jaxtrain.host.simulated import simulate_devices
from jaxtrain.layout import MeshShape
from jaxtrain.models.encoder import OF_ROWS, EncoderConfig
from jaxtrain.models.encoder_decoder import T5Config
from jaxtrain.ops.packed import Kind
from jaxtrain.ops.row_adapters import Additions
from jaxtrain.predict.heads import Model
from jaxtrain.run.trained import form_of
from jaxtrain.serve.answer import Limits
from jaxtrain.serve.api import Reader
from jaxtrain.serve.classify import Classifier
from jaxtrain.serve.engine import Engine
from jaxtrain.serve.front import REPLICA, Replica, make_front
from jaxtrain.serve.server import make_app
from jaxtrain.serve.sources import SourceEngine
from jaxtrain.sharding.mesh import make_mesh

KEY = "JAXTRAIN_API_KEY"
# Flags that only some forms of models read.
OF_DECODERS = ("adapter", "chat_template", "chunk", "page", "pages", "draft", "quantize", "exact")
OF_DECODERS += ("cache",)
OF_WRITERS = ("readers", "longest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions):
    """Serves a trained decoder over OpenAI's API (completions, chat completions, embeddings), an
    encoder-decoder (completions), or a classifier of texts, as vLLM does.

    Many requests share two compiled programs, and the tokens of a request do not depend on who else
    is served. With JAXTRAIN_API_KEY in the environment clients must give that key. SIGTERM lets
    open requests end.
    """

    name: str | None = None
    """The model's name in the API; left out, that of its folder."""
    adapter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An adapter as NAME=FOLDER, of a run trained by LoRA or of PEFT's files; requests name it as
    their model. May be repeated."""
    chat_template: str | None = None
    """A chat template: chatml, plain, a file or a folder; left out, the model's own."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of this machine."""
    port: int = 8000
    """Port to listen on; 0 is a free one."""
    slots: int = 16
    """Answers that are written at once, at least 2; of a classifier, texts of a batch."""
    readers: int = 4
    """Prompts that are read at once, at least 2."""
    chunk: int = 64
    """Tokens of a prompt that are read at once, a multiple of --page."""
    page: int = 64
    """Positions of a page of the cache; pages are shared by prompts that begin alike."""
    longest: int | None = None
    """Most tokens of a prompt and its answer, or of a source, and of a target; left out, as many as
    the model was trained with, and of rope_type dynamic and longrope the original length."""
    pages: int | None = None
    """Pages of the cache; left out, as many as all slots can fill."""
    quantize: Kind | None = None
    """Codes for the kernels of attention and MLP, which take 1 byte a weight or half of one."""
    exact: bool = False
    """Tell log-probabilities with the bits that jaxtrain.models.exact gives a trainer; tokens take
    more time."""
    cache: Literal["int8"] | None = None
    """Keys and values of 8 bits, with a scale for each position and head."""
    max_requests: int = 256
    """Requests that are taken at once; others receive status 429."""
    max_seconds: float = 600.0
    """Time limit of a request in seconds."""
    drain_seconds: int = 30
    """Seconds that open requests have to end in after SIGTERM."""
    draft: str | None = None
    """A smaller model of the same tokens, whose guesses the model reads at once: a run, a folder or
    a name. The answers stay the model's own."""
    draft_tokens: int = 4
    """Tokens that the draft guesses in a step."""
    replicas: int = 1
    """Processes that each serve the model, on GPUs of their own, behind one address; a request goes
    to one that has read its beginning, or has the least to do."""

    def start(self) -> Mesh:
        """Makes the mesh, which is split over ``tensor`` alone."""
        tensor = self.mesh.tensor
        if self.mesh != MeshShape(tensor=tensor):
            raise ValueError(
                "--mesh has more axes than tensor, over which alone a server splits its model: "
                "leave them out, or give --replicas"
            )
        if self.simulate_devices:
            simulate_devices(self.simulate_devices)
        quiet.start()
        if not 1 <= tensor <= len(jax.devices()):
            raise ValueError(f"--mesh.tensor is {tensor}: {len(jax.devices())} devices are here")
        return make_mesh(tensor=tensor, devices=jax.devices()[:tensor])


def run_serve(options: ServeOptions, rest: list[str]) -> int:
    """Serves until a signal ends it."""
    del rest
    check_least(options, port=0, max_requests=1, drain_seconds=0, draft_tokens=1, replicas=1)
    if options.port >= 2**16:
        raise ValueError(f"--port is {options.port}: give a number from 0 to 65535")
    if options.draft is None and options.draft_tokens != ServeOptions.draft_tokens:
        raise ValueError(f"--draft-tokens is {options.draft_tokens} without --draft: give both")
    if not options.max_seconds > 0:
        raise ValueError(f"--max-seconds is {options.max_seconds}: give more than 0 seconds")
    extras.load("a server needs uvicorn", "serve", "uvicorn")
    extras.load("a server needs starlette", "serve", "starlette")
    name = options.name or os.path.basename(os.path.abspath(options.model))
    given = {"host": options.host, "port": options.port, "drain_seconds": options.drain_seconds}
    limits = Limits(requests=options.max_requests, seconds=options.max_seconds)
    _log_requests()
    if options.replicas > 1:
        return _serve_replicas(options, limits, name=name, **given)
    if REPLICA in os.environ:
        threading.Thread(target=_end_with_the_front, daemon=True).start()
    mesh = options.start()
    _check_form(options)  # Reading what a run says of itself starts JAX.
    told = {"mesh": mesh, "step": options.step, "quantize": options.quantize}
    opened = open_model(options.model, "decoder", "encoder", "encoder-decoder", **told)
    guard = {"limits": limits, "key": os.environ.get(KEY) or None}
    if isinstance(opened.model, EncoderConfig):
        classifier = Classifier(Model(opened, mesh, rows=options.slots))
        classifier.warm_up()
        listen(make_app(classifier, name, **guard), name=name, **given)
        return 0
    if isinstance(opened.model, T5Config):
        sizes = {"slots": options.slots, "readers": options.readers, "longest": options.longest}
        engine = SourceEngine(opened.model, opened.params, mesh=mesh, **sizes)
        reader = reader_of(opened, (name,), None, engine.longest, sources=engine.sources)
        engine.warm_up()
        listen(make_app(engine, reader, **guard), name=name, **given)
        return 0
    adapters = _adapters(options.adapter, name, opened)
    draft = None
    if options.draft is not None:
        guesses = open_model(options.draft, "decoder", mesh=mesh)
        check_tokens(guesses, opened)
        draft = guesses.model, guesses.params
    engine = Engine(
        opened.model,
        opened.params,
        slots=options.slots,
        readers=options.readers,
        chunk=options.chunk,
        page=options.page,
        longest=options.longest,
        pages=options.pages,
        mesh=mesh,
        adapters=adapters,
        draft=draft,
        drafts=options.draft_tokens,
        exact=options.exact,
        cache=options.cache,
    )
    reader = reader_of(opened, (name, *adapters), options.chat_template, engine.longest)
    engine.warm_up()
    listen(make_app(engine, reader, **guard), name=name, **given)
    return 0


def _check_form(options: ServeOptions) -> None:
    """Raises ValueError for a model that is not served, and for flags of another's."""
    folder, model, _ = find_model(options.model)
    form = form_of(model)
    head = model.head if form == "encoder" else None
    unread = {
        "decoder": (),
        "encoder-decoder": OF_DECODERS,
        "encoder": (*OF_DECODERS, *OF_WRITERS),
    }
    if form not in unread or head not in (None, *OF_ROWS):
        what = f"the form {form}" if head is None else f"the head {head!r}"
        raise ValueError(
            f"the model in '{folder}' has {what}, which is not served: use `jaxtrain predict`"
        )
    kind = "classifier" if head else form
    for name in unread[form]:
        if (value := getattr(options, name)) != getattr(ServeOptions, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}, and the model in '{folder}' is of the "
                f"kind {kind}, which does not read it: leave it out"
            )


def _serve_replicas(options: ServeOptions, limits: Limits, *, name: str, **given: Any) -> int:
    command, environments = replica_command(options), replica_environments(options, os.environ)
    replicas = [Replica(command, environ) for environ in environments]
    for replica in replicas:
        replica.start()
    try:
        for replica in replicas:
            replica.wait()
        models = name, *(each.partition("=")[0] for each in options.adapter)
        key = os.environ.get(KEY) or None
        listen(make_front(replicas, models, limits=limits, key=key), name=name, **given)
    finally:
        for replica in replicas:
            replica.close()
        for replica in replicas:
            replica.join(options.drain_seconds)
    return 0


def replica_command(options: ServeOptions) -> list[str]:
    """Returns the line that serves as one replica of several."""
    alone = dataclasses.replace(options, replicas=1, host="127.0.0.1", port=0)
    command = [sys.executable, "-m", "jaxtrain", "serve", f"--mesh.tensor={options.mesh.tensor}"]
    for field in dataclasses.fields(alone):
        value, flag = getattr(alone, field.name), f"--{field.name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif field.name != "mesh" and value != field.default:
            values = value if isinstance(value, tuple) else (value,)
            command += [f"{flag}={each}" for each in values]
    return command


def replica_environments(options: ServeOptions, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables of each replica, which sees GPUs of its own."""
    gpus, tensor = distributed.visible_gpus(environ), options.mesh.tensor
    is_cpu = options.simulate_devices or environ.get("JAX_PLATFORMS", "").startswith("cpu")
    if is_cpu or not gpus:
        return [dict(environ)] * options.replicas
    if options.replicas * tensor > len(gpus):
        raise ValueError(
            f"--replicas is {options.replicas}: with --mesh.tensor {tensor} they need "
            f"{options.replicas * tensor} GPUs, and {len(gpus)} are here"
        )
    parts = (gpus[i * tensor :][:tensor] for i in range(options.replicas))
    return [{**environ, "CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def _end_with_the_front() -> None:
    """Ends this replica when the front, however it ends, closes its standard input."""
    while os.read(0, 1):  # Not sys.stdin, whose lock would stand in the way of the program's end.
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def listen(app: Any, *, name: str, host: str, port: int, drain_seconds: int) -> None:
    """Prints the address of an application, and serves it until a signal ends it."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,  # The log of this program has its lines, too.
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=30,
    )
    server = uvicorn.Server(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        port = listening.getsockname()[1]
        at = f"[{host}]" if ":" in host else host
        # While it runs the server handles SIGTERM, and raises it again behind that. One that comes
        # before ends it too.
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        print(f"{name} is served on http://{at}:{port}/v1  (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def _log_requests() -> None:
    """Shows a line per request on standard error, whatever a library does to the root logger."""
    log, handler = logging.getLogger("jaxtrain.serve"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    log.propagate = False


def check_tokens(draft: Opened, opened: Opened) -> None:
    """Raises ValueError where a draft has other tokens than the model."""
    theirs, ours = (
        x.tokenizer.token_pieces(range(x.tokenizer.vocab_size)) for x in (draft, opened)
    )
    if theirs != ours:
        raise ValueError(
            f"--draft is '{draft.folder}', whose tokens are not those of '{opened.folder}': give a "
            "draft with the same tokenizer"
        )


def _adapters(named: Sequence[str], name: str, opened: Opened) -> dict[str, Additions]:
    """Reads the adapters NAME=FOLDER beside a model of a name."""
    found: dict[str, Additions] = {}
    for each in named:
        own, _, folder = each.partition("=")
        if not own or not folder or own in (name, *found):
            raise ValueError(
                f"--adapter is {each!r}: give NAME=FOLDER, with a name that nothing else has here"
            )
        found[own] = open_adapter(folder, opened)
    return found


def reader_of(
    opened: Opened,
    models: tuple[str, ...],
    chat_template: str | None,
    longest: int,
    *,
    sources: int | None = None,
) -> Reader:
    """Makes what reads a model's requests."""
    ends = frozenset(ends_of(opened.folder, opened.tokenizer))
    template = template_of(chat_template, opened.folder, opened.tokenizer)
    return Reader(models, opened.tokenizer, longest, ends, template, opened.begin, sources)


def template_of(name: str | None, folder: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template that is asked for, or the model's own; None where it has none."""
    try:
        template = load_template(name or folder)
    except FileNotFoundError:
        if name is not None:
            raise
        return None
    return dataclasses.replace(template, special=tokenizer.special_pattern)
