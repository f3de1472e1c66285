"""One connection to a Redis server, which sends each request once.

Invariant: whatever it raises is `StoreUnavailable` where the same request may go well later, and `StoreError` where
somebody has to change something first; neither holds the URL or a password. Of all errors only NOSCRIPT and MOVED,
which say that nothing was done, are answered by sending again. The library repeats nothing.
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

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.secrets import look_up, masked
from exactlyonce.sinks import refusals
from exactlyonce.sinks.redis.rows import argument
from exactlyonce.sinks.redis.scripts import LEDGER_PREFIX, Script
from exactlyonce.sinks.redis.sink import url_problem

_REDIRECTIONS_MAX = 5
_OURS = (
    "decode_responses", "encoding", "encoding_errors", "health_check_interval", "max_connections", "retry_on_error",
    "retry_on_timeout", "timeout",
)  # fmt: skip
"""What a URL may hold for other programs' sake, and does not count here."""
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
"""The library takes the code off the text of these."""
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
    "BUSY": "a script of somebody else keeps it busy",
    "CLIENTS": "it has as many clients as it may (maxclients)",
}
"""By the code of an error that passes: what it says of the server."""
_CODE = re.compile(rf"(?:^|[\s-])({'|'.join((*AWAY, 'NOPERM', 'WRONGTYPE'))})\b")


class RedisConnection:
    """A connection, opened when something is sent, and again after it was lost. *timeout_s* is for each answer."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._secrets: set[str] = set()
        self.where = "Redis"

    def command(self, *words: str | bytes | int) -> Any:
        """The answer to one command."""
        sent = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        return self._once([b"*%d\r\n" % len(sent), *map(argument, sent)])

    def optional(self, *words: str | int) -> Any:
        """The answer to a command that this server, or this user, may not have; None then."""
        try:
            return self.command(*words)
        except StoreError as refused:
            if re.search(r"unknown command|NOPERM", str(refused)):
                return None
            raise

    def run(self, script: Script, keys: Sequence[bytes], head: Sequence[object] = ()) -> Any:
        """The answer of a script to *keys* and the arguments *head*."""
        sent = [argument(str(each).encode()) for each in head]
        return self.run_with(script, keys, sent, len(sent))

    def run_with(self, script: Script, keys: Sequence[bytes], arguments: list[bytes], count: int) -> Any:
        """The answer of a script to *keys* and *count* arguments that are encoded already, in any pieces."""
        behind = [argument(b"%d" % len(keys)), *map(argument, keys), *arguments]
        number = b"*%d\r\n" % (3 + len(keys) + count)
        digest = hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest().encode()
        try:
            return self._follow([number, argument(b"EVALSHA"), argument(digest), *behind])
        except exceptions.NoScriptError:
            return self._follow([number, argument(b"EVAL"), argument(script.text.encode()), *behind])

    def away(self, code: str, said: str = "") -> StoreUnavailable:
        """The error of a server that cannot be written to now."""
        return refusals.passing(self.where, AWAY[code], said or code)

    def close(self) -> None:
        """Let go of the connection; the next request makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _follow(self, pieces: list[bytes]) -> Any:
        """As `_once`, and to the server of the cluster that has the slot."""
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
        """Whether the server has closed the connection since the last answer, or has sent what is no answer to come."""
        try:
            return bool(self._connection.can_read(0))
        except (exceptions.RedisError, OSError):
            return True

    def _opened(self, address: dict[str, Any]) -> Connection:
        """A connection by the URL as it is now; what the URL says of retries and time does not count."""
        url = look_up("the URL of RedisSink", self._url)
        if problem := url_problem(url):
            raise ConfigError(f"The URL of RedisSink is wrong: {problem}. Write redis://user:password@host:6379/0.")
        given: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]  # it ships without
        kind = given.pop("connection_class", Connection)
        given |= address
        self._secrets |= {str(given[name]) for name in ("password", "ssl_password") if given.get(name)} | {url}
        self.where = f"Redis at {given.get('path') or '{host}:{port}'.format(**{'port': 6379, **given})}"
        for name in _OURS:
            given.pop(name, None)
        ours = {"socket_timeout": self._timeout_s, "socket_connect_timeout": self._timeout_s, "protocol": 2}
        try:
            connection = kind(**{**given, **ours}, retry=Retry(NoBackoff(), 0))
        except (TypeError, ValueError):  # its text has the parameter, which may be part of a password
            raise ConfigError("The URL of RedisSink has an unknown parameter behind its question mark.") from None
        connection.connect()
        return connection  # type: ignore[no-any-return]  # its class is in the URL

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise what *error* means to whoever runs the pipeline."""
        text, code = self._redacted(error), _code(error)
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

    def _redacted(self, error: Exception) -> str:
        return masked(str(error).rstrip(".\r\n "), self._secrets) or type(error).__name__


def _code(error: Exception) -> str | None:
    """The code of an error of the server, also where it comes out of a script."""
    for kind, code in _CODES.items():
        if type(error) is kind:
            return code
    if isinstance(error, exceptions.ConnectionError) and "max number of clients" in str(error):
        return "CLIENTS"
    if "with replica instances" in str(error):  # WAITAOF, of a server that has become one since it was written to
        return "READONLY"
    found = _CODE.search(str(error)) if isinstance(error, exceptions.ResponseError) else None
    return found[1] if found else None
