"""An HTTP gateway before a server, which meets one commit on its way: it repeats, delays or loses it, or its answer.

It is a process of its own, for deltalake stops all threads of its process during a request.

    python gateway.py PORT COMMITS      forwards to that port; COMMITS is a pattern of method and path
"""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from exactlyonce.testing.cluster import LIMIT_S

ICEBERG_COMMIT = r"POST /v1/namespaces/[^/]+/tables/[^/]+"
DELTA_COMMIT = r"PUT /.*/_delta_log/\d{20}\.json"


CONTROL = "/gateway-of-tests/"
"""The beginning of paths that are requests to the gateway itself."""


class Fate(Enum):
    TWICE = "the server gets it twice, and the client gets the second answer"
    TWIN = "the client gets the answer, and the server gets it again when it is released"
    LATE = "the client gets a 504, and the server gets it when it is released"
    NEVER = "the client gets a 502, and the server nothing"
    LOST = "the server gets it, and the client is cut off before the answer"
    SILENT = "the server gets it, and the client waits for an answer without end"
    FAILED_500 = "the server gets it, and the client gets a 500"
    FAILED_502 = "the server gets it, and the client gets a 502"
    FAILED_503 = "the server gets it, and the client gets a 503"
    FAILED_504 = "the server gets it, and the client gets a 504"


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @classmethod
    def of_gateway(cls, status: int) -> Answer:
        return cls(status, [("Content-Type", "text/html")], b"<html>the gateway's own page</html>")


class Gateway:
    """Forwards to the server at *port*; `meet` says what becomes of the next request that matches *commits*."""

    def __init__(self, port: int, commits: str) -> None:
        command = [sys.executable, __file__, str(port), commits]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def meet(self, fate: Fate) -> None:
        self._ask(f"meet/{fate.name}")

    @property
    def has_met(self) -> bool:
        return self._ask("has-met") == b"True"

    def release(self) -> None:
        """Deliver what is late, and wait until the server has answered it."""
        self._ask("release")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, what: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{CONTROL}{what}", timeout=LIMIT_S) as answer:
            content: bytes = answer.read()
        return content


class _Meeting:
    """The gateway within its process."""

    def __init__(self, port: int, commits: str) -> None:
        self._server_port, self._commits = port, re.compile(commits + r"\Z")
        self._fate: Fate | None = None
        self._lock, self._released = threading.Lock(), threading.Event()
        self._late: list[threading.Thread] = []

    def serve(self) -> None:
        meeting = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                meeting._handle(self)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_port, flush=True)
        server.serve_forever()

    def _control(self, words: str) -> Answer:
        if words == "release":
            self._released.set()
            while self._late:
                self._late.pop().join(LIMIT_S)
        elif words != "has-met":
            self._released.clear()
            self._fate = Fate[words.removeprefix("meet/")]
        return Answer(200, [], str(self._fate is None).encode())

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = b"".join(_chunks(handler))
        if handler.path.startswith(CONTROL):
            self._answer(handler, self._control(handler.path.removeprefix(CONTROL)))
            return
        with self._lock:
            is_met = self._commits.match(f"{handler.command} {handler.path.partition('?')[0]}") is not None
            fate = self._fate if is_met else None
            self._fate = None if is_met else self._fate
        answer = self._forwarded(handler, body) if fate is None else self._met(fate, handler, body)
        if answer is None:
            handler.close_connection = True
        else:
            self._answer(handler, answer)

    def _answer(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        with suppress(OSError):  # the client is gone
            handler.send_response_only(answer.status)
            for name, value in answer.headers:
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    handler.send_header(name, value)
            length = dict(answer.headers).get("Content-Length") if handler.command == "HEAD" else None
            if answer.status != 204:
                handler.send_header("Content-Length", length or str(len(answer.body)))
            handler.end_headers()
            handler.wfile.write(answer.body)

    def _met(self, fate: Fate, handler: BaseHTTPRequestHandler, body: bytes) -> Answer | None:
        if fate in (Fate.TWIN, Fate.LATE):

            def deliver_late() -> None:
                self._released.wait(LIMIT_S)
                self._forwarded(handler, body)

            late = threading.Thread(target=deliver_late, daemon=True)
            self._late.append(late)
            late.start()
        if fate is Fate.LATE:
            return Answer.of_gateway(504)
        if fate is Fate.NEVER:
            return Answer.of_gateway(502)
        answer = self._forwarded(handler, body)
        if fate is Fate.TWIN:
            return answer
        if fate is Fate.TWICE:
            return self._forwarded(handler, body)
        if fate is Fate.SILENT:
            self._released.wait(LIMIT_S)
            return None
        return None if fate is Fate.LOST else Answer.of_gateway(int(fate.name.rpartition("_")[2]))

    def _forwarded(self, handler: BaseHTTPRequestHandler, body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=LIMIT_S)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "content-length", "expect", "transfer-encoding"):
                    connection.putheader(name, value)
            if body or handler.command in ("POST", "PUT"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()


def _chunks(handler: BaseHTTPRequestHandler) -> Iterator[bytes]:
    """The body of a request."""
    if handler.headers.get("Transfer-Encoding") != "chunked":
        yield handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        return
    while size := int(handler.rfile.readline().partition(b";")[0], 16):
        yield handler.rfile.read(size)
        handler.rfile.readline()
    while handler.rfile.readline().strip():
        """A trailer of the chunks."""


if __name__ == "__main__":
    _Meeting(int(sys.argv[1]), sys.argv[2]).serve()
