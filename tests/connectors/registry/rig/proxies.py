"""Servers before the registry, for what registries of others do: ask for a login, and know schemas by GUID."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen
from uuid import UUID

from exactlyonce.testing.servers.registry import RegistryServer

Answer = tuple[int, bytes]
"""An HTTP status and a body."""
Answering = Callable[[BaseHTTPRequestHandler, Callable[[str], Answer]], Answer]
"""Gives the answer to a request; its second argument asks the registry for a path, with the request's body."""


@contextmanager
def _before(registry: RegistryServer, answering: Answering) -> Iterator[str]:
    """The URL of a server that gives the answers of *answering*."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0)) or None

            def asked(path: str) -> Answer:
                request = Request(f"{registry.url}{path}", body, method=self.command)
                request.add_header("Content-Type", "application/json")
                try:
                    with urlopen(request) as answer:
                        return 200, answer.read()
                except HTTPError as error:
                    return error.code, error.read()

            status, told = answering(self, asked)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: a test's output is its own."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def asking_for_login(registry: RegistryServer, login: str) -> AbstractContextManager[str]:
    """The URL of a server that passes requests with *login*, `user:password`, on to *registry*, and refuses others."""
    expected = f"Basic {base64.b64encode(login.encode()).decode()}"

    def answering(request: BaseHTTPRequestHandler, asked: Callable[[str], Answer]) -> Answer:
        if request.headers["Authorization"] != expected:
            return 401, b'{"error_code": 401, "message": "Unauthorized"}'
        return asked(request.path)

    return _before(registry, answering)


def with_guids(registry: RegistryServer) -> AbstractContextManager[str]:
    """The URL of *registry*, whose schemas have GUIDs, as Confluent's since 8.0; here each is the id as a UUID."""

    def answering(request: BaseHTTPRequestHandler, asked: Callable[[str], Answer]) -> Answer:
        above, _, guid = urlsplit(request.path).path.rpartition("/")
        id = UUID(guid).int if above == "/schemas/guids" else None
        status, told = asked(request.path if id is None else f"/schemas/ids/{id}")
        document = json.loads(told)
        if status == 200 and isinstance(document, dict):
            id = document.get("id", id)
            document |= {} if id is None else {"id": id, "guid": f"{UUID(int=id)}"}
        return status, json.dumps(document).encode()

    return _before(registry, answering)
