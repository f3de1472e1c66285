"""The server of a run's figures and state over HTTP, on a thread of its own. Only a run that was given an address
imports it.

Invariants: a client has its connection for `REQUEST_S` at most, however slowly it sends or reads, and there are
`CLIENTS_MAX` of them at most: the run that is watched has them in its own process. What may wait for anything else is
answered on another thread, so that no client waits for another's answer.
"""

from __future__ import annotations

import asyncio
import queue
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

from exactlyonce.engines.local.monitoring.serving import Answer, Asked, AtOnce, Paths
from exactlyonce.pipeline.errors import ConfigError

T = TypeVar("T")

POLL_S = 0.1
"""How often a server looks which clients have had their time."""
REQUEST_S = 10.0
"""The time for a request to come whole and its answer to be taken."""
HEAD_BYTES = 65_536
HEADERS_MAX = 100
BODY = {"content-length", "transfer-encoding"}
"""A request with one of these may have a body, which nobody reads: its connection ends."""
CLIENTS_MAX = 64
"""One more takes the place of the client that has been connected for longest: a probe gets its answer."""
FAILED = Answer(b"It failed: see what the program printed.\n", status=500)
ELSEWHERE = Answer(b"Ask for it by its address, or as localhost.\n", status=403)


@contextmanager
def serving(host: str, port: int, paths: Paths, *, keep_alive: bool = False) -> Iterator[int]:
    """Serve *paths* at *host* and *port*, 0 for any free one, while the context is open. Gives the port.

    *keep_alive*: a client may keep its connection for the next request, for `REQUEST_S` after each.

    Raises `ConfigError` if the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=CLIENTS_MAX)
    except OSError as error:
        why = f"{error.strerror or error}".partition(" (while ")[0]
        raise ConfigError(
            f"Nothing can listen on {host}:{port}: {why}. Choose an address of this machine, and a "
            f"port that nothing else uses."
        ) from None
    loop = asyncio.new_event_loop()
    server = _Server(loop, paths, local=is_loopback(host), keep_alive=keep_alive)
    accepting = loop.run_until_complete(loop.create_server(partial(_Client, server), sock=listening))
    loop.call_soon(server.look_after)
    thread = threading.Thread(target=loop.run_forever, name="http", daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        accepting.close()
        server.end_threads()
        server.cut_all()
        loop.run_until_complete(asyncio.sleep(0))  # what was cut is closed
        loop.close()


_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header has; there may be any other byte, and tabs."""


class _Refused(Exception):
    """A request that is none."""

    def __init__(self, status: HTTPStatus) -> None:
        self.status = status


class _Request:
    """The head of a request."""

    def __init__(self, head: bytearray) -> None:
        first, *lines = head.decode("latin-1").replace("\r\n", "\n").split("\n")
        words = first.split()
        if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
            raise _Refused(HTTPStatus.BAD_REQUEST)
        if len(lines) > HEADERS_MAX:
            raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        headers = dict[str, str]()
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name.isascii() or name != name.strip() or _CONTROL.search(value):
                raise _Refused(HTTPStatus.BAD_REQUEST)
            headers[name.lower()] = value.strip()
        method, target, version = words
        if method != "GET":
            raise _Refused(HTTPStatus.NOT_IMPLEMENTED)
        self.host = headers.get("host", "localhost")
        self.is_last = (
            version == "HTTP/1.0" or "close" in headers.get("connection", "").lower() or not BODY.isdisjoint(headers)
        )
        if not target.startswith("/"):  # with its host, as for a proxy
            try:
                target = urlsplit(target)._replace(scheme="", netloc="").geturl()
            except ValueError:
                raise _Refused(HTTPStatus.BAD_REQUEST) from None
        path, _, query = target.partition("?")
        pairs = parse_qsl(query, keep_blank_values=True) if query else []
        self.asked = Asked(path, pairs, headers.get("accept", ""), headers.get("authorization", ""))


class _Server:
    """What all clients share. But for its making, it is used on the loop's thread alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, paths: Paths, *, local: bool, keep_alive: bool) -> None:
        self.loop, self.keep_alive = loop, keep_alive
        self._paths, self._local = paths, local
        self._below = {path.removesuffix("*"): answer for path, answer in paths.items() if path.endswith("/*")}
        self._here = Answer(f"Here are {', '.join(sorted(paths))}.\n".encode(), status=404)
        self.date = formatdate(usegmt=True)
        """Now, as answers show it."""
        self._waiting = queue.SimpleQueue[tuple[Callable[[], Answer], _Client] | None]()
        """For one of the threads, of which there are as many as ever answers were waited for at once, up to
        `CLIENTS_MAX`: starting one would hold up the loop each time."""
        self._threads = self._waited_for = 0
        self._clients: dict[_Client, float] = {}
        """Since when each has its time, oldest first."""

    def look_after(self) -> None:
        """Cut off clients that have had their time, now and every `POLL_S`."""
        self.date = formatdate(usegmt=True)
        late_s = time.monotonic() - REQUEST_S
        for client in [client for client, since_s in self._clients.items() if since_s < late_s]:
            self._cut(client)
        self.loop.call_later(POLL_S, self.look_after)

    def came(self, client: _Client) -> None:
        if len(self._clients) >= CLIENTS_MAX:
            self._cut(next(iter(self._clients)))
        self._clients[client] = time.monotonic()

    def asks(self, client: _Client) -> None:
        """*client* has its time from now on."""
        if self._clients.pop(client, None) is not None:
            self._clients[client] = time.monotonic()

    def gone(self, client: _Client) -> None:
        self._clients.pop(client, None)

    def _cut(self, client: _Client) -> None:
        del self._clients[client]
        client.connection.abort()

    def cut_all(self) -> None:
        for client in [*self._clients]:
            self._cut(client)

    def answer(self, request: _Request, client: _Client) -> Answer | None:
        """The answer; None if *client* gets it later."""
        if self._local and not is_loopback(_host_of(request.host)):
            return ELSEWHERE
        path, asked = request.asked.path, request.asked
        found = self._paths.get(path) or next(
            (self._below[each] for each in self._below if path.startswith(each)), None
        )
        if found is None:
            return self._here
        if isinstance(found, AtOnce) and (answer := _given(partial(found.quick, asked))) is not None:
            return answer
        self._waited_for += 1
        if CLIENTS_MAX > self._threads < self._waited_for:
            self._threads += 1
            threading.Thread(target=self._work, name="answer", daemon=True).start()
        self._waiting.put((partial(found, asked), client))
        return None

    def waited(self) -> None:
        """An answer that was waited for has come."""
        self._waited_for -= 1

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            answer_of, client = waiting
            answer = FAILED if client.connection.is_closing() else _given(answer_of)
            with suppress(RuntimeError):  # the server has ended meanwhile
                self.loop.call_soon_threadsafe(client.answered, answer)

    def end_threads(self) -> None:
        for _ in range(self._threads):
            self._waiting.put(None)


def _given(answer_of: Callable[[], T]) -> T | Answer:
    """The answer; of a defect, a word that there is one."""
    try:
        return answer_of()
    except Exception:
        traceback.print_exc()
        return FAILED


class _Client(asyncio.Protocol):
    """A connection: one request after another."""

    connection: asyncio.Transport

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._unread = bytearray()
        self._is_last = not server.keep_alive
        """Whether the connection ends with the answer at hand."""
        self._has_ended = False
        """Whether all is said: what still comes is not read."""
        self._waits = False
        """For an answer."""
        self._is_full = False
        """Whether the client does not take its answers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.connection = transport
        self._server.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.gone(self)

    def data_received(self, data: bytes) -> None:
        if not self._has_ended:
            self._unread += data
            self._go_on()

    def eof_received(self) -> None:
        """The connection is closed, once what was given is sent."""
        if self._unread:
            self._give(Answer(status=HTTPStatus.BAD_REQUEST), is_last=True)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._go_on()

    def answered(self, answer: Answer) -> None:
        """It was waited for."""
        self._server.waited()
        self._waits = False
        if not self.connection.is_closing():
            self._give(answer, is_last=self._is_last)
            self._go_on()

    def _go_on(self) -> None:
        """Take the requests that are whole."""
        while not (self._has_ended or self._waits or self._is_full):
            end = _END_OF_HEAD.search(self._unread)
            if (end.start() if end is not None else len(self._unread)) > HEAD_BYTES:
                return self._give(Answer(status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), is_last=True)
            if end is None:
                return self.connection.resume_reading()
            head = self._unread[: end.start()]
            del self._unread[: end.end()]
            try:
                request = _Request(head)
            except _Refused as refused:
                return self._give(Answer(status=refused.status), is_last=True)
            self._server.asks(self)
            self._is_last |= request.is_last
            if (answer := self._server.answer(request, self)) is None:
                self._waits = True
            else:
                self._give(answer, is_last=self._is_last)
        if not self._has_ended:
            self.connection.pause_reading()
        return None

    def _give(self, answer: Answer, *, is_last: bool) -> None:
        status = HTTPStatus(answer.status)
        head = (
            f"HTTP/1.{int(self._server.keep_alive)} {status.value} {status.phrase}",
            f"Date: {self._server.date}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            f"Connection: {'close' if is_last else 'keep-alive'}",
            "Cache-Control: no-store",
            f"Content-Security-Policy: {answer.policy}",
            "X-Content-Type-Options: nosniff",
            "X-Frame-Options: DENY",
        )
        self.connection.write("\r\n".join((*head, "", "")).encode() + answer.body)
        if is_last:
            self._has_ended = True
            self._unread.clear()
            self.connection.write_eof()
            self.connection.resume_reading()  # to see it end: to close earlier could undo what was sent


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
