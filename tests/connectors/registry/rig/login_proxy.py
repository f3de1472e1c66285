"""A server before the registry that asks for a login, as registries of others do."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from exactlyonce.testing.servers.registry import RegistryServer


@contextmanager
def asking_for_login(registry: RegistryServer, login: str) -> Iterator[str]:
    """The URL of a server that passes requests with *login*, `user:password`, on to *registry*, and refuses others."""
    expected = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Authorization"] != expected:
                return self._answer(401, b'{"error_code": 401, "message": "Unauthorized"}')
            length = int(self.headers["Content-Length"] or 0)
            request = Request(f"{registry.url}{self.path}", self.rfile.read(length) or None, method=self.command)
            request.add_header("Content-Type", "application/json")
            try:
                with urlopen(request) as answer:
                    return self._answer(200, answer.read())
            except HTTPError as error:
                return self._answer(error.code, error.read())

        do_POST = do_GET

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: a test's output is its own."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
