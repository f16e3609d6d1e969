"""Small HTTP servers in threads of a program that does something else."""

import contextlib
import http.server
import socket
import threading
import time
from typing import Any

# How many may be connected at a time, and how long one may say nothing.
CONNECTIONS, REQUEST_SECONDS = 8, 5.0


class Server(http.server.ThreadingHTTPServer):
    """Answers as many at a time as ``connections``: each takes a descriptor of the program's."""

    daemon_threads = True
    request_queue_size = 128  # With few, some of a crowd try again a second later.

    def __init__(self, *args: Any, connections: int = CONNECTIONS):
        self._places = threading.BoundedSemaphore(connections)
        # When time is over for connections that have not sent the head of their request.
        self.deadlines: dict[socket.socket, float] = {}
        super().__init__(*args)

    def start(self, name: str) -> None:
        """Serves in a thread of this name, until ``shutdown``."""
        # Seconds between two looks at whether it is to end.
        threading.Thread(target=self.serve_forever, args=(0.05,), name=name, daemon=True).start()

    def service_actions(self) -> None:
        """Closes connections that send their request too slowly; ``serve_forever`` calls this
        between requests, because a byte now and then would hold a place for ever."""
        for connection, deadline in list(self.deadlines.items()):
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

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


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request in a method ``do_GET`` or another; a request is no news."""

    timeout = REQUEST_SECONDS
    wbufsize = -1  # Headers and body leave in one packet, and none waits for an acknowledgement.

    def handle(self) -> None:
        deadlines = self.server.deadlines
        deadlines[self.connection] = time.monotonic() + self.timeout
        try:
            with contextlib.suppress(ConnectionError):  # Whoever asked has gone.
                super().handle()
        finally:
            deadlines.pop(self.connection, None)

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):  # The last bytes found nobody either.
            super().finish()

    def parse_request(self) -> bool:
        is_request = super().parse_request()
        self.server.deadlines.pop(self.connection, None)
        return is_request

    def answer(self, body: bytes, *, status: int = 200, **headers: str) -> None:
        """Sends an answer; ``Content_Type`` names a header."""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
