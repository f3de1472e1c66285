"""The service that gets an HTTP sink's requests: its connections, and the meaning of its answers.

Invariants: a request is sent once by each call, follows no redirect, and ends within the sink's timeout. A record
counts as refused only by a status that speaks of the record. No error, and no text of an answer, holds a secret.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from exactlyonce.connectors import refusals
from exactlyonce.pipeline.errors import ASKED_AGAIN, ConfigError, StoreUnavailable, StoreUnready
from exactlyonce.pipeline.secrets import SECRET_CHARACTERS, is_reference, look_up, masked
from exactlyonce.sinks.http.sink import HttpSink, header_problem, url_problem

REFUSED = frozenset({400, 409, 413, 422})
"""The statuses that speak of the record: another attempt would get the same."""
_BUSY = frozenset({408, 425, 429})
_REMEDIES = {
    401: "It does not take the login: correct the secret in headers=",
    403: "The login has not the right to do this: grant it, or correct headers=",
    404: "It has no such address: correct url=",
    405: "It takes no such method there: correct method=, or url=",
    407: "A proxy wants a login: connect without it",
    410: "The address was given up: correct url=",
    415: "It takes no JSON: correct url=",
}
RETRY_AFTER_MAX_S = 3_600.0
"""The longest pause that a service can ask for."""
ANSWER_BYTES_MAX, ANSWER_CHARACTERS_MAX = 8_192, 1_000
"""Of an answer's body are read, and kept."""
OVERDUE_INTERVAL_S = 0.25
"""The interval of the look for requests that have taken too long."""


class Refusal(NamedTuple):
    """The answer to a request whose records are refused."""

    status: int
    text: str

    def __str__(self) -> str:
        return f"{self.status} {self.text}".strip()


Answers = dict[int, Refusal | None]
"""By a request's number; None: it was taken."""


@dataclass(frozen=True)
class Outgoing:
    """A request as it is sent."""

    number: int
    idempotency_key: str
    body: bytes


@dataclass(frozen=True)
class _Endpoint:
    """The address and the headers, with the secrets looked up."""

    scheme: str
    host: str
    port: int | None
    target: str
    headers: Mapping[str, str]
    secrets: tuple[str, ...]


class _Connection:
    """A connection to an endpoint, for one thread at a time."""

    def __init__(self, endpoint: _Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.deadline_s = float("inf")
        self._http: http.client.HTTPConnection
        if endpoint.scheme == "https":
            context = ssl.create_default_context()
            self._http = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=timeout_s, context=context)
        else:
            self._http = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)

    def connect(self) -> None:
        """Connect, unless a connection is there that the server has not closed."""
        if self._http.sock is not None and _is_readable(self._http.sock):
            self._http.close()
        if self._http.sock is None:
            self._http.connect()

    def ask(self, method: str, outgoing: Outgoing) -> tuple[http.client.HTTPResponse, bytes]:
        """The answer, with the beginning of its body."""
        headers = {"Content-Type": "application/json", "User-Agent": "exactlyonce", **self.endpoint.headers}
        headers["Idempotency-Key"] = outgoing.idempotency_key
        self.connect()
        self._http.request(method, self.endpoint.target, outgoing.body, headers)
        answer = self._http.getresponse()
        text = answer.read(ANSWER_BYTES_MAX)
        if not answer.isclosed():
            self._http.close()
        return answer, text

    def cut(self) -> None:
        """End a request from another thread, which gets an error."""
        opened = self._http.sock
        if opened is not None:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()


def _is_readable(opened: socket.socket) -> bool:
    """Whether something came without a question: an end, most of the time."""
    waiting = select.poll()  # select() knows only the first 1,024 descriptors of a process
    waiting.register(opened, select.POLLIN)
    return bool(waiting.poll(0))


class Receiver:
    """The service of *sink*. For one thread; it connects when it is first asked."""

    def __init__(self, sink: HttpSink[Any]) -> None:
        self._sink = sink
        self._endpoint: _Endpoint | None = None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._threads: ThreadPoolExecutor | None = None
        self.not_before_s = 0.0
        """The monotonic time before which the service does not want to be asked."""
        self._pausing = ""
        """The answer that has asked for it."""

    @property
    def shown(self) -> str:
        """The service as a sentence begins."""
        return f"The service at {self._sink.shown}"

    def check(self) -> None:
        """Connect, and send nothing. Raises `StoreUnavailable`; `ConfigError` for a secret that is not there."""
        connection = _Connection(self._looked_up(), self._sink.timeout_s)
        with self._explained(connection):
            connection.connect()
        self._idle.append(connection)

    def deliver(self, lanes: Sequence[Sequence[Outgoing]], answers: Answers) -> None:
        """Send the requests of each lane one after the other, but for those that have an answer; fill in *answers*.

        Raises `StoreUnavailable` once a request was not answered, or not so that its records are taken or refused.
        Nothing is under way then, and what was answered until then is in *answers*. A busy service that takes requests
        of other lanes, and asks for no pause, gets all of these before.
        """
        left = self.not_before_s - time.monotonic()
        if left > 0:
            raise StoreUnready(
                f"{self.shown} has answered {self._pausing}, and wants to be left alone for {left:.0f} s more. "
                f"{ASKED_AGAIN}"
            )
        endpoint, ended = self._looked_up(), threading.Event()
        before, failed = len(answers), list[int]()

        def send(lane: Sequence[Outgoing]) -> None:
            try:
                for outgoing in lane:
                    if ended.is_set():
                        return
                    if outgoing.number not in answers:
                        answers[outgoing.number] = self._asked(endpoint, outgoing)
            except StoreUnready as error:
                failed.append(outgoing.number)
                is_away = len(answers) == before and len(failed) >= self._sink.in_flight
                if not _is_busy(error.status) or time.monotonic() < self.not_before_s or is_away:
                    ended.set()
                raise
            except BaseException:
                ended.set()
                raise

        self._threads = self._threads or ThreadPoolExecutor(self._sink.in_flight, "requests")
        futures = {self._threads.submit(send, lane) for lane in lanes}
        self._await(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, StoreUnavailable)):
            raise error

    def _await(self, futures: set[Future[None]]) -> None:
        """Wait until all have ended; end requests that are overdue."""
        while wait(futures, OVERDUE_INTERVAL_S, ALL_COMPLETED).not_done:
            for connection in [*self._busy]:
                if time.monotonic() > connection.deadline_s:
                    connection.cut()

    def _asked(self, endpoint: _Endpoint, outgoing: Outgoing) -> Refusal | None:
        """The meaning of the answer. Runs on a thread of the lanes."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(endpoint, self._sink.timeout_s)
        if connection.endpoint != endpoint:
            connection.close()
            connection = _Connection(endpoint, self._sink.timeout_s)
        self._busy.add(connection)
        try:
            with self._explained(connection):
                answer, body = connection.ask(self._sink.method, outgoing)
        finally:
            self._busy.discard(connection)
        self._idle.append(connection)
        return self._meaning(endpoint, answer, body)

    def _meaning(self, endpoint: _Endpoint, answer: http.client.HTTPResponse, body: bytes) -> Refusal | None:
        status = answer.status
        if 200 <= status < 300:
            return None
        text = masked(body.decode("utf-8", "replace").strip(), endpoint.secrets)
        text = text if len(text) <= ANSWER_CHARACTERS_MAX else f"{text[:ANSWER_CHARACTERS_MAX]}..."
        if status in REFUSED:
            return Refusal(status, text)
        pause_s = _retry_after_s(answer.getheader("Retry-After"), answer.getheader("Date"))
        says = f"{status} {' '.join(text.split())}".strip().rstrip(".")
        if pause_s is not None:
            self.not_before_s = max(self.not_before_s, time.monotonic() + pause_s)
            self._pausing = says
        if _is_busy(status):
            again = "" if pause_s is None else f", and wants to be left alone for {pause_s:.0f} s"
            raise StoreUnready(f"{self.shown} answers {says}{again}. {ASKED_AGAIN}", status)
        if 300 <= status < 400:
            to = masked((answer.getheader("Location") or "elsewhere").partition("?")[0], endpoint.secrets)
            remedy = f"It redirects to {to:.200}, which is not followed: correct url="
        else:
            remedy = _REMEDIES.get(status, "That speaks of no record: correct the service, or the sink")
        raise StoreUnready(f"{self.shown} answers {says}. {remedy}. {ASKED_AGAIN}", status)

    @contextmanager
    def _explained(self, connection: _Connection) -> Iterator[None]:
        """Around a request, or a connection to be made."""
        connection.deadline_s = time.monotonic() + self._sink.timeout_s
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            text = masked(f"{error}".strip() or type(error).__name__, connection.endpoint.secrets).rstrip(".")
            if isinstance(error, TimeoutError) or time.monotonic() > connection.deadline_s:
                raise refusals.silent(self.shown, self._sink.timeout_s) from None
            if isinstance(error, ssl.SSLCertVerificationError):
                why = "its certificate is not trusted: correct it, or let SSL_CERT_FILE name the authority"
                raise refusals.passing(self.shown, why, text) from None
            if isinstance(error, ConnectionRefusedError | socket.gaierror):
                raise refusals.unreachable(self.shown, text) from None
            raise refusals.cut_off(self.shown, text) from None
        except BaseException:
            connection.close()
            raise
        finally:
            connection.deadline_s = float("inf")

    def _looked_up(self) -> _Endpoint:
        """The endpoint as the references have it now; connections of another one are not used any more."""
        sink, secrets = self._sink, set[str]()
        headers = {}
        for name, value in sink.headers.items():
            headers[name] = look_up(f"headers= {name}", value)
            if is_reference(value):
                secrets.update({headers[name], *headers[name].split()})
                if problem := header_problem(name, headers[name]):
                    raise ConfigError(f"headers= has {name}={value}, which cannot be sent: {problem}.")
        url = look_up("url=", sink.url)
        if problem := url_problem(url):
            raise ConfigError(f"url={sink.shown} is wrong: {problem}.")
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if is_reference(sink.url):
            secrets.update({url, target})
        elif parts.query:
            secrets.add(parts.query)
        kept = tuple(
            sorted(secret for secret in secrets if len(secret) >= SECRET_CHARACTERS or secret in headers.values())
        )
        return _Endpoint(parts.scheme, parts.hostname or "", parts.port, target, headers, kept)

    def close(self) -> None:
        """Close the connections; no request is under way."""
        while self._idle:
            self._idle.pop().close()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _is_busy(status: int) -> bool:
    """Whether the same request may be answered otherwise later, by itself."""
    return status in _BUSY or status >= 500


def _retry_after_s(value: str | None, date: str | None) -> float | None:
    """The pause that an answer asks for, up to `RETRY_AFTER_MAX_S`; None: it asks for none that can be read.

    *value* is seconds, or a time, compared with the *date* of the answer.

    >>> _retry_after_s("120", None), _retry_after_s("soon", None)
    (120.0, None)
    >>> _retry_after_s("Wed, 21 Oct 2026 07:28:30 GMT", "Wed, 21 Oct 2026 07:28:00 GMT")
    30.0
    >>> _retry_after_s("9" * 400, None)
    3600.0
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return min(float(value), RETRY_AFTER_MAX_S)
    with suppress(ValueError, TypeError, OverflowError):
        pause_s = (parsedate_to_datetime(value) - parsedate_to_datetime(date or "")).total_seconds()
        return min(max(0.0, pause_s), RETRY_AFTER_MAX_S)
    return None
