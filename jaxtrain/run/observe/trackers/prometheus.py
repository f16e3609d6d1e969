"""The newest value of every metric for Prometheus: ``metrics.prom``, and ``/metrics`` at a port."""

import contextlib
import http.server
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from jaxtrain.host.paths import is_remote, write_whole
from jaxtrain.run.hook import Value
from jaxtrain.run.observe.writers import flat

# Between two writings of the file, on a disk and in a bucket.
FILE_SECONDS, REMOTE_FILE_SECONDS = 1.0, 30.0
# How many may be connected at a time, and how long one may say nothing.
CONNECTIONS, REQUEST_SECONDS = 8, 5.0
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
            self._server = _Server(address, _Handler)
            self._server.text = lambda: self._text
            self.port = self._server.server_port
            threading.Thread(
                target=self._server.serve_forever, name="jaxtrain-metrics", daemon=True
            ).start()

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


class _Server(http.server.ThreadingHTTPServer):
    """Answers a few at a time: what is connected takes a descriptor of the run's."""

    daemon_threads = True
    text: Callable[[], str]

    def __init__(self, *args: Any):
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        found = self.path.split("?")[0] in ("/metrics", "/")
        body = self.server.text().encode() if found else b""
        with contextlib.suppress(OSError):  # whoever asked has gone
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A scrape is no news."""
