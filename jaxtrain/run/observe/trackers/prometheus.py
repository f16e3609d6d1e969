"""The newest value of every metric for Prometheus: ``metrics.prom``, and ``/metrics`` at a port."""

import re
import time
from collections.abc import Callable, Mapping

from etils import epath

from jaxtrain.host import answering
from jaxtrain.host.paths import is_remote, write_whole
from jaxtrain.run.hook import Value
from jaxtrain.run.observe.writers import flat

# Between two writings of the file, on a disk and in a bucket.
FILE_SECONDS, REMOTE_FILE_SECONDS = 1.0, 30.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusWriter:
    """Gauges in the text exposition format, version 0.0.4, all with the label ``run``.

    ``train/loss`` is ``jaxtrain_train_loss``; entries of an array have the label ``index``. Besides
    what is logged there are ``jaxtrain_step`` and ``jaxtrain_written_timestamp_seconds``, of the
    newest line. A server of its own, which answers at ``port``, registers nothing with a library's.
    Raises OSError where its port is not free.

    Args:
      path: the file, for the textfile collector of node_exporter; replaced whole each time.
      address: (host, port) to answer at; port 0 for a free one, None for no server.
    """

    def __init__(self, path: epath.PathLike, *, run: str, address: tuple[str, int] | None = None):
        self._path, self._run = epath.Path(path), run
        self._gauges: dict[tuple[str, str], float] = {}
        self._text, self._written_at, self._server = "", float("-inf"), None
        self.port = None
        if address is not None:
            text = staticmethod(lambda: self._text)
            self._server = answering.Server(address, type("Handler", (_Handler,), {"text": text}))
            self.port = self._server.server_port
            self._server.start("jaxtrain-metrics")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Takes the values of a line in place of those before."""
        now = {"step": float(step), "written_timestamp_seconds": time.time()}
        for name, value in [*flat(values), *now.items()]:
            self._gauges[metric_name(name)] = value
        self._text = exposition(self._gauges, self._run)
        seconds = REMOTE_FILE_SECONDS if is_remote(self._path) else FILE_SECONDS
        if time.monotonic() - self._written_at >= seconds:
            self._write_file()

    def close(self) -> None:
        """Writes the file once more and answers no longer."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._write_file()

    def _write_file(self) -> None:
        self._written_at = time.monotonic()
        write_whole(self._path, self._text)


def metric_name(name: str) -> tuple[str, str]:
    """Returns the name that Prometheus takes, and which entry of an array it is of.

    >>> metric_name("train/loss"), metric_name("train/load/3")
    (('jaxtrain_train_loss', ''), ('jaxtrain_train_load', '3'))
    """
    stem, _, index = name.rpartition("/")
    while stem and index.isdecimal() and (deeper := stem.rpartition("/"))[2].isdecimal():
        stem, index = deeper[0], f"{deeper[2]}/{index}"
    if not index.split("/")[0].isdecimal():
        stem, index = name, ""
    return "jaxtrain_" + re.sub(r"[^a-zA-Z0-9_]", "_", stem), index


def exposition(gauges: Mapping[tuple[str, str], float], run: str) -> str:
    """Writes gauges as Prometheus reads them.

    >>> print(exposition({("jaxtrain_train_loss", ""): 2.5}, "gpt-1"), end="")
    # TYPE jaxtrain_train_loss gauge
    jaxtrain_train_loss{run="gpt-1"} 2.5
    """
    escaped = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines, last = [], None
    for (name, index), value in sorted(gauges.items()):
        if name != last:
            lines.append(f"# TYPE {name} gauge")
        more = f',index="{index}"' if index else ""
        # NaN, +Inf and -Inf as Go reads them.
        number = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))
        lines.append(f'{name}{{run="{escaped}"{more}}} {number}')
        last = name
    return "".join(f"{line}\n" for line in lines)


class _Handler(answering.Handler):
    text: Callable[[], str]

    def do_GET(self) -> None:
        found = self.path.split("?")[0] in ("/metrics", "/")
        body = self.text() if found else ""
        self.answer(body.encode(), status=200 if found else 404, Content_Type=CONTENT_TYPE)
