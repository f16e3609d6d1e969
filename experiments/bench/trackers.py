"""What trackers cost the loop: steps whose lines they are given against steps without any.

Every step writes a line, ten times as often as a run does by default. A time has what belongs to
its tracker: handing lines over, and its thread, which shares Python's lock with the loop. A tracker
is opened and let go between turns, so that what it does falls on no other; those of ``--services``
stay open, for a client of theirs may wait for its server for minutes.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Literal

from etils import epath

from experiments.bench import Variant, gpt_work, interleave, print_row
from experiments.bench.step import SHAPES, initialised_variant, make_batch, model_and_rows
from jaxtrain.models import decoder
from jaxtrain.run.observe import trackers
from jaxtrain.run.observe.trackers.about import About
from jaxtrain.run.observe.trackers.queued import Queued
from jaxtrain.run.observe.writers import Writer

# As many as a line of the default run has.
LINE = {f"train/metric_{i}": 1.0 / (1 + i) for i in range(30)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Steps with trackers that are slow, killed, silent or sound against steps with none."""

    shape: Literal[tuple(SHAPES)] = "small"  # type: ignore[valid-type]
    """Which model."""
    steps: int = 10
    """Train steps, each with a line, of each variant in a round."""
    rounds: int = 30
    """Timed rounds."""
    services: tuple[str, ...] = ()
    """Of wandb, mlflow and trackio those that take part too, set up by their environment variables:
    MLFLOW_TRACKING_URI=http://127.0.0.1:9 is a server that is not there."""


def main(config: Config) -> None:
    """Runs the row and prints it."""
    logging.getLogger("jaxtrain").setLevel(logging.CRITICAL)  # what is dropped, in every turn
    model, rows = model_and_rows(config.shape)
    init = functools.partial(decoder.init, model)
    one = initialised_variant(model, init, make_batch(model, rows), 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        about = About("bench", "bench", f"{time.time_ns():x}", {}, epath.Path(folder))
        known = trackers.parse(["csv", "prometheus", *config.services])
        openings = {"slow": slow, "killed": killed, "silent": silent}
        for name, open in known.items():
            openings[name] = functools.partial(opened, functools.partial(open, about))
        for name in config.services:
            service = stack.enter_context(openings[name]())
            openings[name] = functools.partial(contextlib.nullcontext, service)
        # The second of nothing says how far the machine lets ratios be trusted.
        openings = {"no tracker": nothing} | openings | {"no tracker again": nothing}
        told = {name: Told(one.run, config.steps, open) for name, open in openings.items()}
        variants = {name: Variant(each.run, around=each.turn) for name, each in told.items()}
        work = gpt_work(model, rows, steps=config.steps)
        results = interleave(variants, rounds=config.rounds, work=work)
    lines = config.steps * (config.rounds + 1)
    for name, each in told.items():
        results[name]["written"] = f"{each.written} of {lines} lines by the end of their turn"
    about = {
        "shape": config.shape,
        "model": dataclasses.asdict(model),
        "batch": (rows, model.seq_len),
        "dtypes": "float32",
        "optimizer": "adamw",
        "steps_per_round": config.steps,
    }
    print_row("trackers", about, results, work=work)


class Told:
    """Steps that a tracker is told of; ``written`` counts what it had written by their end."""

    def __init__(self, step: Callable[[], None], steps: int, open: Callable):
        self.step, self.steps, self.open, self.written = step, steps, open, 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Has the tracker for one turn."""
        with self.open() as self.tracker:
            before = self.tracker.written
            self.step()  # the variant before may have left memory otherwise
            yield
            self.written += self.tracker.written - before

    def run(self) -> None:
        """Does the steps."""
        for number in range(self.steps):
            self.step()
            self.tracker.write(number, LINE)


class Calling:
    """A writer that does the same with every line."""

    def __init__(self, act: Callable[[bytes], None]):
        self.act = act

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes a line."""
        self.act(json.dumps({"step": step, **values}).encode())

    def close(self) -> None:
        """Has nothing to do."""


class Nothing:
    """No tracker."""

    written = 0

    def write(self, step: int, values: dict[str, float]) -> None:
        """Does nothing."""


nothing = functools.partial(contextlib.nullcontext, Nothing())


@contextlib.contextmanager
def opened(open: Callable[[], Writer], release: Callable[[], None] = lambda: None) -> Iterator:
    """A tracker, which is left with what it has not written, and then waited for."""
    tracker = Queued("bench", open)
    yield tracker
    tracker.close(until=time.monotonic())
    release()
    tracker.close()


def slow() -> contextlib.AbstractContextManager[Queued]:
    """A tracker that takes a second for each line."""
    released = threading.Event()
    return opened(lambda: Calling(lambda line: released.wait(1.0)), released.set)


def killed(answers: bool = False) -> contextlib.AbstractContextManager[Queued]:
    """A tracker that posts its lines to a server that is no longer there, or that takes them and
    does not answer."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    if answers:
        server.listen(1000)
    address = f"http://127.0.0.1:{server.getsockname()[1]}/"
    post = functools.partial(urllib.request.urlopen, address, timeout=60)
    return opened(lambda: Calling(post), server.close)  # which ends what it has taken


silent = functools.partial(killed, answers=True)
