"""Serves what a run says of itself over HTTP, on a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from exactlyonce.pipeline.errors import ConfigError

POLL_S = 0.1
"""How often it looks whether to end."""
Answer = Callable[[str, str], tuple[int, str, bytes]]
"""The status, the content type and the body by the path and the header `Accept` of a request."""


@contextmanager
def serving(host: str, port: int, answer: Answer) -> Iterator[int]:
    """Serve GET requests at *host* and *port*, 0 for any free one, while the context is open. Gives the port.

    Raises `ConfigError` if the address cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0
        """Seconds for a request to come whole."""

        def do_GET(self) -> None:
            status, content_type, body = answer(urlsplit(self.path).path, self.headers.get("Accept", ""))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no events of the run."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen on {host}:{port}: {error.strerror or error}. Choose another address, or end "
            f"what uses this one."
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="http", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
