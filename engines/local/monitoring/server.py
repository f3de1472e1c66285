"""The server of a run's figures over HTTP, on threads of its own. Only a run that was given an address imports it.

Invariant: a client has a thread for `REQUEST_S` at most, however slowly it sends or reads, and there are `CLIENTS_MAX`
of them at most: the run that is watched has them in its own process.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from exactlyonce.engines.local.monitoring.serving import Answer, Asked, Paths
from exactlyonce.pipeline.errors import ConfigError

POLL_S = 0.1
"""How often a server looks whether to end, and which clients have had their time."""
REQUEST_S = 10.0
"""The time for a request to come whole and its answer to be taken."""
LINE_BYTES = 65_536
HEADERS_MAX = 100
BODY = {"content-length", "transfer-encoding"}
"""A request with one of these may have a body, which nobody reads: its connection ends."""
CLIENTS_MAX = 64
"""One more takes the place of the client that has been connected for longest: a probe gets its answer."""


@contextmanager
def serving(host: str, port: int, paths: Paths, *, often: bool = False) -> Iterator[int]:
    """Serve *paths* at *host* and *port*, 0 for any free one, while the context is open. Gives the port.

    *often*: a client may keep its connection for the next request, for `REQUEST_S` after each.

    Raises `ConfigError` if the address cannot be used.
    """
    here = Answer(f"Here are {', '.join(sorted(paths))}.\n".encode(), status=404)
    below = {path.removesuffix("*"): answer for path, answer in paths.items() if path.endswith("/*")}
    elsewhere = Answer(b"Ask for it by its address, or as localhost.\n", status=403)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if often else "HTTP/1.0"
        disable_nagle_algorithm = True
        server: _Server
        raw_requestline: bytes

        def parse_request(self) -> bool:
            """`http.server` reads headers as those of an e-mail, which takes longer than most answers."""
            words, headers = self.raw_requestline.decode("latin-1").split(), dict[str, str]()
            self.requestline, self.command, self.request_version = " ".join(words), "", ""
            self.close_connection = True
            if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
                self.send_error(400)
                return False
            self.command, self.path, self.request_version = words
            for _ in range(HEADERS_MAX):
                line = self.rfile.readline(LINE_BYTES + 1)
                if len(line) > LINE_BYTES:
                    break
                if line in (b"\r\n", b"\n"):
                    self.told = headers
                    ends = "close" in headers.get("connection", "").lower() or words[2] == "HTTP/1.0"
                    self.close_connection = not often or ends or not BODY.isdisjoint(headers)
                    return True
                name, colon, value = line.decode("latin-1").rstrip("\r\n").partition(":")
                if not colon or not name.isascii() or name != name.strip() or not value.isprintable():
                    self.send_error(400)  # also where the client went away in the middle
                    return False
                headers[name.lower()] = value.strip()
            self.send_error(431)
            return False

        def do_GET(self) -> None:
            self.server.asked(self.request)
            told = self.told
            try:
                url = urlsplit(self.path)
            except ValueError:
                return self.send_error(400)
            known = not is_loopback(host) or is_loopback(_host_of(told.get("host", "localhost")))
            found = paths.get(url.path) or next((below[path] for path in below if url.path.startswith(path)), None)
            asked = Asked(
                dict(parse_qsl(url.query)), told.get("accept", ""), self.path, told.get("authorization", "")
            )  # fmt: skip
            answer = elsewhere if not known else here if found is None else found(asked)
            head = (
                f"{self.protocol_version} {answer.status} {HTTPStatus(answer.status).phrase}",
                f"Date: {self.date_time_string()}",
                f"Content-Type: {answer.content_type}",
                f"Content-Length: {len(answer.body)}",
                f"Connection: {'close' if self.close_connection else 'keep-alive'}",
                "Cache-Control: no-store",
                f"Content-Security-Policy: {answer.policy}",
                "X-Content-Type-Options: nosniff",
                "X-Frame-Options: DENY",
            )
            self.wfile.write("\r\n".join((*head, "", "")).encode() + answer.body)
            return None

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no events of the run."""

    try:
        server = _Server((host, port), Handler)
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = CLIENTS_MAX

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._clients: dict[socket.socket, float] = {}
        """When each connected, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._clients) >= CLIENTS_MAX:
                self._cut(next(iter(self._clients)))
            self._clients[request] = time.monotonic()
        super().process_request(request, client_address)

    def asked(self, request: Any) -> None:
        """The client of *request* has its time from now on."""
        with self._lock:
            if self._clients.pop(request, None) is not None:
                self._clients[request] = time.monotonic()

    def service_actions(self) -> None:
        """Called every `POLL_S`."""
        with self._lock:
            late_s = time.monotonic() - REQUEST_S
            for client in [client for client, since_s in self._clients.items() if since_s < late_s]:
                self._cut(client)

    def _cut(self, client: socket.socket) -> None:
        """End the connection: its thread, which waits for it, ends with that."""
        del self._clients[client]
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event of the run; any other error is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _host_of(header: str) -> str:
    """The host of a header `Host`, without its port; empty if it is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether *host* is this machine. A page from elsewhere can make its own name lead here, but not these."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
