"""A connection to PostgreSQL whose calls have time limits, and which is dropped after any fault; and its errors as
ours.

Invariants: the driver's errors become `StoreError` or `StoreUnavailable`, which say what has to be done, and by whom;
no text has a password or an unreadable connection string in it. After an error the connection is closed, so that the
server ends the transaction once it learns of it; no request is repeated here. Settings hold for a transaction, not a
session, since a pooler may share sessions between clients.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import psycopg
from psycopg import conninfo, generators, pq, sql
from psycopg.abc import PQGen
from psycopg.errors import Diagnostic
from psycopg.pq.abc import PGconn
from psycopg.waiting import Wait

from exactlyonce.connectors import refusals
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable, require
from exactlyonce.pipeline.secrets import is_reference, look_up, masked

if TYPE_CHECKING:
    from typing_extensions import LiteralString

_AGAIN = {
    "08": "the connection was lost",
    "40": "another transaction was in the way",
    "53": "the server is short of something",
    "53100": "the server's disk is full: make room",
    "53300": "the server has no connection left: raise max_connections, or close others",
    "55": "the object is in use",
    "55P03": "another session holds a lock that was waited for: see pg_stat_activity",
    "57": "the server, or its administrator, has ended the request",
    "57P03": "the server is starting up or shutting down",
    "58": "the server cannot read or write its files: see its log",
    "25P": "the transaction lasted too long",
    "25006": "the server takes no writes now: it is a standby, or is becoming one. Where a standby may take over, name "
    "all hosts in the dsn, with target_session_attrs=read-write",
    "XX000": "the server has met an error of its own: see its log",
}
"""Errors that pass, by SQLSTATE or its beginning, the longest one that fits."""
_FATAL = {
    "0A": "PostgreSQL cannot do this with this table",
    "22": "a value does not fit its column. It passed the sink's own checks, so a domain, a trigger or a changed "
    "column refuses it: correct the table, or the rows' source, and run again",
    "23": "a row breaks a constraint of the table: correct the table, its data or the rows' source, and run again",
    "28": "correct the login in the connection string, or pg_hba.conf",
    "3D000": "create the database, or correct the connection string",
    "3F000": "create the schema, or correct the table's name",
    "42501": "the role lacks a right: GRANT it; `exactlyonce acls` prints all that the pipeline needs",
    "42703": "the column is missing: add it, or leave the field out",
    "42P01": "the table is missing: create it, or set create=True",
    "42P10": "there is no unique index on the key any more: create it again",
    "54": "a limit of PostgreSQL is exceeded; an index holds keys of up to about 2,700 bytes",
    "57P04": "the database was dropped: restore it, or correct the connection string",
    "XX001": "the database is damaged: restore it",
    "XX002": "an index is damaged: REINDEX it",
}
"""Errors that come again, by SQLSTATE or its beginning, with the remedy."""
_FATAL_BY_FUNCTION = {
    "check_enable_rls": "row-level security would hide rows from the role: ALTER ROLE ... BYPASSRLS, ALTER TABLE ... "
    "DISABLE ROW LEVEL SECURITY, or use another role; a function of a trigger may SET row_security = on",
    "CheckCmdReplicaIdentity": "the publication has to tell rows apart: ALTER TABLE ... ADD PRIMARY KEY, or "
    "ALTER TABLE ... REPLICA IDENTITY USING INDEX the unique index on the key",
}
"""Likewise by the server's function that raised it, if the SQLSTATE says too little."""
_LOGIN_PASSES = re.compile(
    r"starting up|shutting down|not (yet )?accepting connections|recovery mode|too many (clients|connections)|"
    r"remaining connection slots|connection limit|refused|timeout|timed out|reset by peer|closed the connection|"
    r"could not translate|resolve|unreachable|no route",
    re.IGNORECASE,
)
_LOGIN_STAYS = {
    r"password|authentication|SCRAM": "Correct the password or the user in the connection string",
    r"role .* does not exist|is not permitted to log in": "Create the role, or correct the user in the string",
    r"database .* does not exist": "Create the database, or correct its name in the connection string",
    r"permission denied for database": "GRANT CONNECT ON DATABASE to the role",
    r"replication role|start WAL sender": "Let a superuser run ALTER ROLE ... REPLICATION",
    r"no pg_hba\.conf entry|pg_hba\.conf rejects": "Let the role in by a line of the server's pg_hba.conf",
    r"SSL|certificate": "Correct sslmode and the certificates in the connection string",
    r"invalid|unsupported|unrecognized": "Correct the connection string",
}
"""The English texts of the server and libpq for failed logins, with the remedy."""


class LockHeld(StoreUnavailable):
    """Another session has held a lock for too long."""


class Refusals:
    """Converts errors of the driver to ours, for one connection string."""

    def __init__(self, dsn: str) -> None:
        self.dsn_shown = f"dsn={dsn}" if is_reference(dsn) else "the dsn as it is written"
        self.server = f"PostgreSQL ({self.dsn_shown})"
        self._secrets: set[str] = set()

    def learn(self, text: str, settings: Mapping[str, Any]) -> None:
        """Mask the secrets of a connection string from now on."""
        secrets = {str(value) for name, value in settings.items() if "password" in name and value}
        self._secrets |= {text} | secrets | {quote(secret, safe="") for secret in secrets}

    def redact(self, text: str) -> str:
        """*text* without any secret."""
        return masked(text, self._secrets)

    def of_dsn(self) -> StoreError:
        """The error for a connection string that libpq cannot read, without libpq's text, which quotes the string."""
        return StoreError(
            f"The connection string of PostgreSQL ({self.dsn_shown}) cannot be read. Write it as "
            f"postgresql://user:password@host:5432/database, special characters as %XX, or as name=value pairs."
        )

    def of_login(self, error: psycopg.Error, code: Callable[[], str]) -> StoreError | StoreUnavailable:
        """The error for a failed login. *code* asks for the SQLSTATE if the text is unknown, as of a server that does
        not speak English."""
        message = self.redact(_one_line(str(error)))
        if not _LOGIN_PASSES.search(message):
            for pattern, advice in _LOGIN_STAYS.items():
                if re.search(pattern, message, re.IGNORECASE):
                    return StoreError(f"{self.server} refuses the login: {message}. {advice}.")
            state = code()
            if stays := _longest(_FATAL, state):
                return StoreError(f"{self.server} refuses the login: {message} [{state}]. {_sentence(_FATAL[stays])}")
        return refusals.unreachable(self.server, message)

    def of(self, error: psycopg.Error) -> StoreError | StoreUnavailable:
        """The error for a failed request."""
        state, message = error.sqlstate, self.redact(_message_of(error))
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and state is None:
            return refusals.cut_off(self.server, message)
        state = "25006" if state == "0A000" and "recovery" in message else state or ""
        message = f"{message} [{state}]"
        if by_function := _FATAL_BY_FUNCTION.get(error.diag.source_function or ""):
            return refusals.refused(self.server, message, _sentence(by_function))
        fatal, passing = _longest(_FATAL, state), _longest(_AGAIN, state)
        if passing is not None and len(passing) > len(fatal or ""):
            kind = LockHeld if state == "55P03" else StoreUnavailable
            return refusals.passing(self.server, _AGAIN[passing], message, kind)
        advice = _FATAL[fatal] if fatal is not None else "correct what it names, then run again; nothing is lost"
        return refusals.refused(self.server, message, _sentence(advice))


def is_misread(text: str, settings: Mapping[str, Any]) -> bool:
    """Whether libpq reads a part of the password as host, port or database: it has an @ or a / that is not escaped.

    >>> dsn = "postgresql://ann:pa@ss@db:5432/shop"
    >>> is_misread(dsn, psycopg.conninfo.conninfo_to_dict(dsn))
    True
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in ("postgresql", "postgres"):
        return False
    authority, _, path = rest.partition("/")
    ports = str(settings.get("port", "")).replace(",", "")
    return authority.count("@") > 1 or "@" in path.partition("?")[0] or not (ports == "" or ports.isdecimal())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _longest(table: Mapping[str, str], state: str) -> str | None:
    return max((known for known in table if state.startswith(known)), key=len, default=None)


def _message_of(error: psycopg.Error) -> str:
    """Message, detail, hint and context of an error, in one line."""
    diag = error.diag
    parts = (diag.message_primary or str(error), diag.message_detail, diag.message_hint, diag.context)
    return _one_line("; ".join(part.rstrip(".") for part in parts if part))


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", "; ", text.strip()).rstrip(".?")


_KEEPALIVE = {
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
"""The client's limits for a dead peer; the connection string may override them."""
IDLE_S = 60
"""The limit for a silent client within a transaction, after which the server ends it."""
PAGE_ROWS = 2_000
"""The rows of `objects` that are in memory at once."""
_SLOW = (
    "See whether the server is overloaded, stopped or unreachable; if it is at work for so long, as where triggers or "
    "indexes make rows slow, set answer_timeout= of the sink."
)
_BYTES_PER_SECOND_MIN = 1 << 20
"""The server gets a second more for each so many bytes of rows."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits, in seconds."""

    connect: int = 10
    """For one address of the server."""
    answer: float = 30
    """For any progress of an answer."""
    lock: float = 20
    """For a lock of another session."""
    grace: float = 5
    """For an apply of an older incarnation, before its session is ended."""


class _Waiting(psycopg.Connection[tuple[Any, ...]]):
    """A connection that gives up on a silent server."""

    answer_s: float = 30
    silent = False

    def wait(self, gen: PQGen[Any], *_args: Any, **_options: Any) -> Any:
        """Run the driver's work; the time limit starts again whenever the socket is ready."""
        socket, poll = self.pgconn.socket, select.poll()
        try:
            wanted = next(gen)
            while True:
                events = select.POLLIN * bool(wanted & 1) | select.POLLOUT * bool(wanted & 2)
                poll.register(socket, events)
                polled = poll.poll(self.answer_s * 1000)
                if not polled:
                    self.silent = True
                    self.pgconn.finish()
                    raise psycopg.OperationalError("no answer")
                state = polled[0][1]
                broken = state & ~(select.POLLIN | select.POLLOUT)
                ready = (1 if state & select.POLLIN or broken else 0) | (2 if state & select.POLLOUT else 0)
                wanted = gen.send(ready & wanted or wanted)
        except StopIteration as stop:
            return stop.value


class PostgresConnection:
    """One connection, made when it is first needed, and again after it was lost."""

    def __init__(self, dsn: str, limits: Limits, settings: Mapping[str, str] | None = None) -> None:
        """*settings* of libpq, beside those of *dsn*."""
        self._dsn = dsn
        self._limits = limits
        self._settings = settings or {}
        self._refusals = Refusals(dsn)
        self._connection: _Waiting | None = None
        self._within = False
        """Whether a transaction is open: a new connection would know nothing of it."""

    def rows(self, query: LiteralString | sql.Composed, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement; outside of a transaction it is one by itself."""
        with self._translated() as connection:
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description else []

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """As `rows`, with %s for a value."""
        with self._translated() as connection:
            cursor = psycopg.Cursor(connection).execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def objects(self, query: str) -> Iterator[bytes]:
        """The rows of *query*, which reads only, each as a JSON object of its columns; a page of them at a time."""
        self.begin("exactlyonce rows", IDLE_S, snapshot="")
        try:
            self.ask(f"DECLARE rows NO SCROLL CURSOR FOR SELECT row_to_json(r)::text FROM ({query.rstrip(' ;')}) r")
            while page := self.ask(f"FETCH {PAGE_ROWS} FROM rows"):
                for (row,) in page:
                    yield row.encode()
        finally:
            self.end()

    def end(self) -> None:
        """End the transaction that `begin` began, which has only read."""
        self._roll_back()
        self._within = False

    @property
    def version(self) -> int:
        """The server's version, as 150000."""
        with self._translated() as connection:
            return connection.info.server_version

    def changed_by(self, query: str, *values: object) -> int:
        with self._translated() as connection:
            return psycopg.Cursor(connection).execute(query.encode(), values).rowcount

    def copy(self, statement: sql.Composed, chunks: Iterable[bytes]) -> None:
        """Send *chunks* to a COPY in the open transaction. Errors of reading them pass through."""
        with self._translated() as connection, connection.cursor() as cursor, cursor.copy(statement) as copy:
            size = 0
            for chunk in chunks:
                copy.write(chunk)
                size += len(chunk)
            connection.answer_s = self._limits.answer + size / _BYTES_PER_SECOND_MIN

    def copied(self, statement: sql.Composed) -> bytes:
        """The lines of a COPY ... TO STDOUT, in its text format."""
        with self._translated() as connection, connection.cursor() as cursor, cursor.copy(statement):
            lines: list[bytes] = connection.wait(_lines(connection.pgconn))
            return b"".join(lines)

    def replicate(self, command: sql.Composed, noticed: Callable[[Diagnostic], None]) -> PGconn:
        """Begin to stream with START_REPLICATION; the connection is for that alone from now on. *noticed* takes what
        the server says meanwhile."""
        with self._translated() as connection:
            connection.add_notice_handler(noticed)
            connection.pgconn.send_query(command.as_bytes(None))
            result = connection.wait(generators.execute(connection.pgconn))[-1]
            if result.status != pq.ExecStatus.COPY_BOTH:
                raise psycopg.errors.error_from_result(result)
            connection.pgconn.nonblocking = 1
            return connection.pgconn

    def lost(self, error: psycopg.Error) -> StoreError | StoreUnavailable:
        """Close it, as after any fault. Returns what *error* of a stream is."""
        self.close()
        return self._refusals.of(error)

    @contextmanager
    def transaction(self, name: str, lock_s: float | None = None) -> Iterator[None]:
        """A transaction, committed unless its body raises; after `StoreUnavailable` it may have been. The session is
        called *name* meanwhile. *lock_s*: the timeout for locks, unless the usual one."""
        self.begin(name, IDLE_S, lock_s)
        try:
            yield
        except Exception:
            self._roll_back()
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._within = False
        with self._translated(new=False) as connection:
            answer = connection.execute("COMMIT").statusmessage
            connection.answer_s = self._limits.answer
            require(answer == "COMMIT", f"A transaction that raised nothing is committed, not {answer}")

    def begin(
        self, name: str, idle_s: int, lock_s: float | None = None, *, snapshot: str | None = None,
        reads: sql.Identifier | None = None,
    ) -> None:  # fmt: skip
        """Begin a transaction, which `end` or `close` ends; the server ends one that is idle for *idle_s*, if that is
        not 0. With a *snapshot* it only reads: in the exported one of that name, or, if empty, in its own.

        The table *reads* is locked for reading before there is a snapshot: one that was taken while another session
        rewrites the table would show it empty.
        """
        with self._translated() as connection:
            connection.answer_s = self._limits.answer
            lock_ms = round(1000 * (self._limits.lock if lock_s is None else lock_s))
            settings = sql.SQL(_BEGIN).format(
                mode=_mode(snapshot, reads, lock_ms), name=sql.Literal(name), lock=sql.Literal(f"{lock_ms}ms"),
                idle=sql.Literal(f"{idle_s}s"),
            )  # fmt: skip
            connection.execute(settings)
        self._within = True

    def close(self) -> None:
        """Close the connection; the server rolls back the open transaction. Without effect if it is closed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def _roll_back(self) -> None:
        """Roll back and wait for the answer, so that the locks are free; or else drop the connection."""
        if self._connection is not None:
            with suppress(StoreError, StoreUnavailable), self._translated() as connection:
                connection.answer_s = self._limits.answer
                connection.execute("ROLLBACK")

    @contextmanager
    def _translated(self, new: bool = True) -> Iterator[_Waiting]:
        """The open connection, or a *new* one; an error of the driver becomes one of ours, and closes it."""
        require(self._connection is not None or (new and not self._within), "A transaction has one connection")
        connection = self._connection or self._connect()
        try:
            yield connection
        except psycopg.Error as error:
            self.close()
            if connection.silent:
                raise refusals.silent(self._refusals.server, connection.answer_s, _SLOW) from None
            raise self._refusals.of(error) from None
        except BaseException:
            if connection.closed or connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
                self.close()
            raise

    def _connect(self) -> _Waiting:
        text = look_up("dsn", self._dsn)
        try:
            written = conninfo.conninfo_to_dict(text)
        except psycopg.Error:
            raise self._refusals.of_dsn() from None
        if not text.strip() or is_misread(text, written):
            raise self._refusals.of_dsn()
        self._refusals.learn(text, written)
        defaults: dict[str, Any] = {
            **_KEEPALIVE,
            "connect_timeout": self._limits.connect,
            "application_name": "exactlyonce",
        }
        options = " ".join(str(each) for each in (written.get("options"), self._settings.get("options")) if each)
        own = {**self._settings, "options": options} if options else self._settings
        settings = conninfo.make_conninfo("", **{**defaults, **written, **own})
        try:
            connection = _Waiting.connect(
                settings, autocommit=True, prepare_threshold=None, cursor_factory=psycopg.RawCursor
            )
        except psycopg.Error as error:
            raise self._refusals.of_login(error, lambda: _login_code(settings, self._limits.connect)) from None
        connection.answer_s = self._limits.answer
        self._connection = connection
        return connection


def _lines(stream: PGconn) -> PQGen[list[bytes]]:
    """The lines of a COPY ... TO STDOUT, up to its end."""
    lines, receive = list[bytes](), stream.get_copy_data
    while True:
        length, line = receive(1)
        if length > 0:
            lines.append(bytes(line))
        elif length == 0:
            yield Wait.R
            stream.consume_input()
        else:
            break
    (result,) = yield from generators.fetch_many(stream)
    if result.status != pq.ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(result)
    return lines


def _mode(snapshot: str | None, reads: sql.Identifier | None, lock_ms: int) -> sql.Composable:
    if snapshot is None:
        return sql.SQL("READ COMMITTED READ WRITE")
    parts: list[sql.Composable] = [sql.SQL("REPEATABLE READ READ ONLY")]
    if reads is not None:
        parts.append(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(lock_ms)))
        parts.append(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(reads))
    if snapshot:
        parts.append(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
    return sql.SQL("; ").join(parts)


def _login_code(settings: str, limit_s: float) -> str:
    """The SQLSTATE of a refused login, or empty. Before a connection is made libpq shows it only in its trace, which is
    kept in memory because of the secrets in it."""
    with open(os.memfd_create("trace"), "rb", buffering=0) as trace:
        connection = pq.PGconn.connect_start(settings.encode())
        connection.trace(trace.fileno())
        limit_s += time.monotonic()
        while (state := connection.connect_poll()) in (pq.PollingStatus.READING, pq.PollingStatus.WRITING):
            poll = select.poll()
            poll.register(connection.socket, select.POLLIN if state == pq.PollingStatus.READING else select.POLLOUT)
            if not poll.poll(max(0.0, limit_s - time.monotonic()) * 1000):
                break
        connection.untrace()
        connection.finish()
        trace.seek(0)
        codes = _TRACED_CODE.findall(trace.read())
    return codes[-1].decode() if codes else ""


_TRACED_CODE = re.compile(rb'\tErrorResponse\t.*? C "(\w{5})"')
_BEGIN = """
BEGIN ISOLATION LEVEL {mode};
SELECT set_config('application_name', {name}, true), set_config('lock_timeout', {lock}, true),
    set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', {idle}, true),
    set_config('tcp_keepalives_idle', '10', true), set_config('tcp_keepalives_interval', '5', true),
    set_config('tcp_keepalives_count', '4', true),
    set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true),
    set_config('intervalstyle', 'postgres', true), set_config('array_nulls', 'on', true),
    set_config('row_security', 'off', true);
SELECT set_config(name, value, true)
FROM (VALUES ('client_connection_check_interval', '10s'), ('transaction_timeout', '0')) AS newer (name, value)
WHERE current_setting(name, true) IS NOT NULL
"""
"""Locks have a time limit, statements the client's; a dead client's transaction ends soon; a commit is durable.
Texts are read as they were written, and row-level security raises where it would hide rows. The last two settings came
with later versions."""
