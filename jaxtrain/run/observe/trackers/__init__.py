"""Trackers: where metrics go besides the run's own logs, each behind a queue of its own."""

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxtrain.run.folder import CSV, PROMETHEUS
from jaxtrain.run.observe.journal import TRACKER, Journal
from jaxtrain.run.observe.trackers import queued
from jaxtrain.run.observe.trackers.csv_file import CSVWriter
from jaxtrain.run.observe.trackers.prometheus import PrometheusWriter
from jaxtrain.run.observe.trackers.queued import Queued, failure
from jaxtrain.run.observe.trackers.services import About, MLflowWriter, TrackioWriter, WandbWriter
from jaxtrain.run.observe.writers import Writer

# Those that need a package, which has an extra of its name.
SERVICES = {"wandb": WandbWriter, "mlflow": MLflowWriter, "trackio": TrackioWriter}
FILES = {
    "csv": lambda about: CSVWriter(about.run_dir / CSV, resume_step=about.resume_step),
    "prometheus": lambda about: PrometheusWriter(about.run_dir / PROMETHEUS, run=about.name),
}
Opening = Callable[[About], Writer]
OPENINGS: dict[str, Opening] = SERVICES | FILES


def parse(texts: Iterable[str]) -> dict[str, Opening]:
    """Reads which trackers are asked for: NAME, ``prometheus=PORT`` or ``prometheus=HOST:PORT``;
    returns what opens each, by name. Raises ValueError where there is no such tracker, or it is
    named twice.

    >>> list(parse(["csv", "prometheus=9400"]))
    ['csv', 'prometheus']
    """
    found: dict[str, Opening] = {}
    for text in texts:
        name, _, place = text.partition("=")
        if name not in OPENINGS:
            raise ValueError(f"there is no tracker {name!r}: give of {', '.join(OPENINGS)}")
        if name in found:
            raise ValueError(f"tracker {name!r} is named twice")
        if place and name != "prometheus":
            raise ValueError(f"tracker {text!r}: {name} takes no {place!r}")
        found[name] = _answering(_address(text, place)) if place else OPENINGS[name]
    return found


def check_installed(names: Iterable[str]) -> None:
    """Raises ImportError for a tracker whose package is missing."""
    for name in names:
        if name in SERVICES and importlib.util.find_spec(name) is None:
            raise ImportError(
                f"tracker {name!r} needs a package that is not installed: "
                f"pip install -e '.[{name}]'"
            )


def connect(names: Iterable[str]) -> None:
    """Raises ValueError if a service with a ``connect`` of its own does not answer."""
    for name in names:
        reach = getattr(OPENINGS[name], "connect", None)
        if reach is None:
            continue
        if (why := _refusal(reach)) is not None:
            raise ValueError(
                f"tracker {name!r} cannot be reached ({why}): mend that, or leave it out and send "
                f"the log when the run has ended, by jaxtrain report RUN --push {name}"
            )


def _refusal(reach: Callable[[], None]) -> str | None:
    """Returns why a service cannot be reached, or None."""
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(failure(reach)), daemon=True)
    thread.start()
    thread.join(queued.CONNECT_SECONDS)
    return answers[0] if answers else f"no answer for {queued.CONNECT_SECONDS:.0f} s"


@contextlib.contextmanager
def opened(
    openings: Mapping[str, Opening], about: About, journal: Journal
) -> Iterator[list[Queued]]:
    """Opens trackers; at the end waits for all of them together, and notes what was dropped."""
    trackers = [Queued(name, lambda make=make: make(about)) for name, make in openings.items()]
    error: BaseException | None = None
    try:
        yield trackers
    except BaseException as ended:
        error = ended
        raise
    finally:
        for tracker in trackers:
            tracker.finish(error)
        until = time.monotonic() + queued.CLOSE_SECONDS
        for tracker in trackers:
            journal.event(TRACKER, **tracker.close(until=until))


def _answering(address: tuple[str, int]) -> Opening:
    return lambda about: PrometheusWriter(
        about.run_dir / PROMETHEUS, run=about.name, address=address
    )


def _address(text: str, place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"tracker {text!r}: give a port from 0 to 65535, or HOST:PORT")
    return host or "127.0.0.1", int(port)
