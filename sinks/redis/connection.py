"""One connection to a Redis server, which sends each request once.

Invariant: an error is `StoreUnavailable` if the same request may succeed later, and `StoreError` if somebody has to
change something first; neither holds the URL or a password. Only NOSCRIPT and MOVED, which say that nothing was done,
are answered by sending again. The library repeats nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.retry import Retry

from exactlyonce.connectors import refusals
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.secrets import look_up, masked
from exactlyonce.sinks.redis.rows import argument
from exactlyonce.sinks.redis.scripts import LEDGER_PREFIX, Script
from exactlyonce.sinks.redis.sink import url_problem

_REDIRECTIONS_MAX = 5
_IGNORED = (
    "decode_responses", "encoding", "encoding_errors", "health_check_interval", "max_connections", "retry_on_error",
    "retry_on_timeout", "timeout",
)  # fmt: skip
"""Parameters of a URL that are for other programs."""
_CODES: dict[type[Exception], str] = {
    exceptions.AuthenticationError: "AUTH",
    exceptions.AuthenticationWrongNumberOfArgsError: "AUTH",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
}
"""The errors whose text the library strips of the code."""
AWAY = {
    "LOADING": "it still loads its data",
    "OOM": "its memory is full: make room, or raise maxmemory",
    "MISCONF": "it cannot write to its disk, and so takes no more: make room there, and see its log",
    "READONLY": "it is a replica now: a failover is under way, or the address is that of a replica",
    "NOREPLICAS": "too few of its replicas answer (min-replicas-to-write)",
    "MASTERDOWN": "it is a replica and has lost its primary",
    "CLUSTERDOWN": "its cluster does not serve all slots",
    "TRYAGAIN": "the slot of the keys is on its way to another server",
    "ASK": "the slot of the keys is on its way to another server",
    "MOVED": "the slot of the keys moves from server to server",
    "BUSY": "another client's script keeps it busy",
    "CLIENTS": "it has as many clients as it may (maxclients)",
}
"""By the code of an error that passes: the state of the server."""
_CODE = re.compile(rf"(?:^|[\s-])({'|'.join((*AWAY, 'NOPERM', 'WRONGTYPE'))})\b")


class RedisConnection:
    """A connection, opened with the first request, and again after it was lost. *timeout_s* is for each answer."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._secrets: set[str] = set()
        self.where = "Redis"

    def command(self, *words: str | bytes | int) -> Any:
        """The answer to one command."""
        return self._follow([b"*%d\r\n" % len(words), *map(_word, words)])

    def optional(self, *words: str | int) -> Any:
        """The answer to a command; None if this server, or this user, does not have it."""
        try:
            return self.command(*words)
        except StoreError as refused:
            if re.search(r"unknown command|NOPERM", str(refused)):
                return None
            raise

    def run(
        self,
        script: Script,
        keys: Sequence[bytes],
        head: Sequence[str | bytes | int] = (),
        rows: Sequence[bytes] = (),
        count: int = 0,
    ) -> Any:
        """The answer of a script to *keys*, the arguments *head*, and *rows*: *count* more arguments, which are encoded
        already, in any pieces."""
        rest = [_word(len(keys)), *map(argument, keys), *map(_word, head), *rows]
        number = b"*%d\r\n" % (3 + len(keys) + len(head) + count)
        digest = hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()
        try:
            return self._follow([number, _word("EVALSHA"), _word(digest), *rest])
        except exceptions.NoScriptError:
            return self._follow([number, _word("EVAL"), _word(script.text), *rest])

    def away(self, code: str, message: str = "") -> StoreUnavailable:
        """The error of a server that cannot be written to now."""
        return refusals.passing(self.where, AWAY[code], message or code)

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _follow(self, pieces: list[bytes]) -> Any:
        """The answer of the server that has the slot."""
        for _ in range(_REDIRECTIONS_MAX):
            try:
                return self._once(pieces)
            except exceptions.MovedError as moved:
                self.close()
                self._connection = self._opened({"host": moved.host, "port": moved.port} if moved.host else {})
        raise self.away("MOVED")

    def _once(self, pieces: list[bytes]) -> Any:
        """Send a request once, and read its answer."""
        try:
            if self._connection is not None and self._was_ended():
                self.close()
            if self._connection is None:
                self._connection = self._opened({})
            self._connection.send_packed_command([b"".join(pieces)])
            return self._connection.read_response()
        except (exceptions.NoScriptError, exceptions.MovedError):
            raise
        except (exceptions.RedisError, OSError) as error:
            if not isinstance(error, exceptions.ResponseError) or _code(error) == "READONLY":
                self.close()
            self._refuse(error)

    def _was_ended(self) -> bool:
        """Whether the server has closed the connection since the last answer, or has sent bytes that nobody asked
        for."""
        try:
            return bool(self._connection.can_read(0))
        except (exceptions.RedisError, OSError):
            return True

    def _opened(self, address: dict[str, Any]) -> Connection:
        """A connection by the URL as it is now, without its settings for retries and timeouts."""
        url = look_up("the URL of RedisSink", self._url)
        if problem := url_problem(url):
            raise ConfigError(f"The URL of RedisSink is wrong: {problem}. Write redis://user:password@host:6379/0.")
        settings: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]  # it ships without
        kind = settings.pop("connection_class", Connection)
        settings |= address
        self._secrets |= {str(settings[name]) for name in ("password", "ssl_password") if settings.get(name)} | {url}
        self.where = f"Redis at {settings.get('path') or '{host}:{port}'.format(**{'port': 6379, **settings})}"
        for name in _IGNORED:
            settings.pop(name, None)
        limits = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s, "protocol": 2}
        try:
            connection = kind(**{**settings, **limits}, retry=Retry(NoBackoff(), 0))
        except (TypeError, ValueError):  # its text has the parameter, which may be part of a password
            raise ConfigError("The URL of RedisSink has an unknown parameter after its question mark.") from None
        connection.connect()
        return connection  # type: ignore[no-any-return]  # its class is in the URL

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise *error* as one of ours."""
        text, code = masked(str(error).rstrip(".\r\n "), self._secrets) or type(error).__name__, _code(error)
        if code in AWAY:
            raise self.away(code, text) from None
        if code == "AUTH" or isinstance(error, exceptions.AuthorizationError):
            raise StoreError(
                f"{self.where} refuses the user or the password ({text}). Correct them in the URL of RedisSink."
            ) from None
        if code == "NOPERM":
            raise StoreError(
                f"{self.where} does not allow this to the sink's user: NOPERM {text}. An administrator can allow it by "
                f"ACL SETUSER: the commands that docs/sinks/redis.md lists, on the sink's keys and ~{LEDGER_PREFIX}*."
            ) from None
        if isinstance(error, exceptions.ResponseError):
            advice = "Correct the URL of RedisSink, or the server"
            if "invalid bulk length" in text:
                advice = "A key or a value is longer than the server takes: raise its proto-max-bulk-len"
            raise refusals.refused(self.where, text, f"{advice}, then run again; nothing is lost.") from None
        if isinstance(error, exceptions.TimeoutError | TimeoutError):
            raise refusals.silent(self.where, self._timeout_s) from None
        raise refusals.unreachable(self.where, text) from None


def _word(word: str | bytes | int) -> bytes:
    """A word of a command, encoded."""
    return argument(word if isinstance(word, bytes) else str(word).encode())


def _code(error: Exception) -> str | None:
    """The code of a server's error, also out of a script."""
    for kind, code in _CODES.items():
        if type(error) is kind:
            return code
    if isinstance(error, exceptions.ConnectionError) and "max number of clients" in str(error):
        return "CLIENTS"
    if "with replica instances" in str(error):  # WAITAOF of a server that has become a replica since the write
        return "READONLY"
    match = _CODE.search(str(error)) if isinstance(error, exceptions.ResponseError) else None
    return match[1] if match else None
