"""Answers GET requests over HTTP, on threads of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from exactlyonce.pipeline.errors import ConfigError

POLL_S = 0.1
"""How often a server looks whether to end."""


class Asked(NamedTuple):
    """A request."""

    query: Mapping[str, str]
    accept: str
    """Its header of that name."""


class Answer(NamedTuple):
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Paths = Mapping[str, Callable[[Asked], Answer]]
"""What answers, by path. Called on any thread."""


@contextmanager
def serving(host: str, port: int, paths: Paths) -> Iterator[int]:
    """Serve *paths* at *host* and *port*, 0 for any free one, while the context is open. Gives the port.

    Raises `ConfigError` if the address cannot be used.
    """
    here = Answer(f"Here are {', '.join(sorted(paths))}.\n".encode(), status=404)
    elsewhere = Answer(b"Ask for it by its address, or as localhost.\n", status=403)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0
        """Seconds for a request to come whole."""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked = Asked(dict(parse_qsl(url.query)), self.headers.get("Accept", ""))
            known = not _is_loopback(host) or _is_loopback(_host_of(self.headers.get("Host", "localhost")))
            answer = elsewhere if not known else paths[url.path](asked) if url.path in paths else here
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no events of the run."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen on {host}:{port}: {error.strerror or error}. Choose an address of this machine, and a "
            f"port that nothing else uses."
        ) from None
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="http", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _host_of(header: str) -> str:
    """The host of a header `Host`, without its port."""
    return urlsplit(f"//{header}").hostname or ""


def _is_loopback(host: str) -> bool:
    """Whether *host* is this machine. A page from elsewhere can make its own name lead here, but not these."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
