"""A connection to the server, with all settings pinned that rows or transactions depend on.

Invariants: it is made again after it was lost, but never within a transaction, and no request is repeated. Only COMMIT
ends a transaction with effect; an error, the end of this process or of the connection rolls it back. The server ends a
connection that has been silent for twice the time limit, so that no locks outlive that.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
from pymysql.constants import SERVER_STATUS
from pymysql.cursors import SSDictCursor

from exactlyonce.connectors import refusals
from exactlyonce.connectors.mysql.address import MySQLAddress
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable

LOST = frozenset((0, 2006, 2013, 2055, 4031))
"""The connection is gone; 0 is the driver's own, for one that it has closed."""
CANNOT_CONNECT = frozenset((2002, 2003, 2005))
_AWAY = {
    **dict.fromkeys((1040, 1203, 1226), "has no connection left for this user; it takes more once others close theirs"),
    **dict.fromkeys((1053, 1079), "is shutting down"),
    **dict.fromkeys((1152, 1158, 1159, 1160, 1161, 1184, 1927), "has ended the connection"),
    1205: "waited too long for a lock; another transaction holds it, or an ALTER TABLE is under way",
    1412: "has changed the table since the snapshot that was to read it",
    **dict.fromkeys((1206, 1213, 1020, 1637), "has chosen this transaction to break a deadlock, and rolled it back"),
    **dict.fromkeys((1317, 1969, 3024), "was told to end the statement, by KILL or by its max_statement_time"),
    **dict.fromkeys((1021, 1114), "has no room left: make some on its disk, or lift the limit of its tablespace"),
    **dict.fromkeys((1037, 1038, 1041, 1135, 5), "is out of memory"),
    **dict.fromkeys(
        (1290, 1836, 1792, 3707),
        "is read-only: a failover is under way, or the dsn names a replica, or somebody set it so",
    ),
    **dict.fromkeys((1043, 1047, 1156, 1180, 2012, 2027, 3100, 3101, 4024), "cannot answer at present"),
}
_NO_ROOM = ("errno: 28", "error 28", "No space left", "errno: 122", "error 122")
_HOW = {
    1044: "Grant the user its rights: GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON {database}.* TO ...",
    1045: "User or password of the dsn are wrong, or the user may not connect from this host. Correct one of them.",
    1049: "Create the database, or correct the dsn: CREATE DATABASE {database}",
    1054: "The table has been changed during the run. Add the column again, or run the pipeline again.",
    1062: "A unique key of the table forbids the row. Use mode='upsert' with that key, or remove the other row.",
    1129: "Too many failed connections from this host: FLUSH HOSTS on the server.",
    1130: "Let the user connect from this host: CREATE USER ... @'<this host>'",
    1142: "Grant the missing right: GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO ...",
    1143: "Grant the missing right: GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO ...",
    1146: "Create the table, or give the sink create=True.",
    1153: "Raise max_allowed_packet of the server: it is lower than when the rows were encoded.",
    1227: "Grant the user the right that is named.",
    1665: "READ COMMITTED needs binlog_format ROW or MIXED: set it in the server's configuration.",
    2026: "Use a server with TLS, or ssl_mode=disabled in the dsn.",
}
_VALUE = frozenset((1048, 1216, 1264, 1265, 1292, 1364, 1366, 1406, 1452, 1690, 3140, 3819, 4025))
_ALTER = "The table has changed since the rows were encoded, or a constraint forbids them: ALTER TABLE, then run again."


def number_of(error: pymysql.MySQLError) -> int:
    """The server's number of an error, the driver's without a server, else -1."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else -1


def timed_out(error: pymysql.MySQLError) -> bool:
    """Whether our time limit ended the wait for an answer."""
    return isinstance(error.__context__, TimeoutError) or isinstance(
        getattr(error, "original_exception", None), TimeoutError
    )


def as_ours(error: pymysql.MySQLError, address: MySQLAddress, timeout_s: float) -> StoreError | StoreUnavailable:
    """The error to raise, with the server's words, without the password."""
    number, message = number_of(error), address.redact(str(error.args[-1] if error.args else error)).rstrip(".")
    server, message = f"MySQL at {address.place}", f"{message} ({number})"
    if number in LOST | CANNOT_CONNECT:
        return _without_answer(error, server, message, timeout_s)
    if any(sign in message for sign in _NO_ROOM):
        number = 1021
    if number in _AWAY:
        return refusals.passing(server, f"it {_AWAY[number]}", message)
    how = _HOW.get(number) or (_ALTER if number in _VALUE else "Correct it, then run again; nothing is lost.")
    return refusals.refused(server, message, how.format(database=address.database))


def _without_answer(
    error: pymysql.MySQLError, server: str, message: str, timeout_s: float
) -> StoreError | StoreUnavailable:
    cause = getattr(error, "original_exception", None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return StoreError(
            f"The certificate of {server} is not trusted: {cause.verify_message}. "
            f"Name its authority by ssl_ca in the dsn."
        )
    if timed_out(error):
        return refusals.silent(server, timeout_s)
    return (refusals.unreachable if number_of(error) in CANNOT_CONNECT else refusals.cut_off)(server, message)


TIMEOUT_S = 30.0
"""The limit for an answer, after which the server counts as away."""
SQL_MODE = frozenset((
    "STRICT_TRANS_TABLES", "STRICT_ALL_TABLES", "NO_ZERO_IN_DATE", "NO_ZERO_DATE", "ERROR_FOR_DIVISION_BY_ZERO",
    "NO_ENGINE_SUBSTITUTION", "NO_AUTO_VALUE_ON_ZERO",
))  # fmt: skip
"""Values that do not fit are errors, 0 is 0 also in AUTO_INCREMENT columns, and a backslash escapes."""
CHARSET = "utf8mb4"
_PINNED = {
    "autocommit": "ON", "character_set_client": CHARSET, "character_set_connection": CHARSET, "time_zone": "+00:00",
    "completion_type": "NO_CHAIN",
}  # fmt: skip
_ISOLATION = ("transaction_isolation", "tx_isolation")
"""The names of MySQL and MariaDB."""
_READ = (*_PINNED, *_ISOLATION, "sql_mode", "max_allowed_packet", "version")
Row = tuple[Any, ...]
OF_TABLE = "WHERE table_schema = DATABASE() AND table_name = %s"
"""The condition for rows of information_schema that are about one table of the session's database."""


def quoted(identifier: str) -> str:
    """An identifier, as SQL. In backticks only a backtick is special.

    >>> quoted("order totals"), quoted("a`b")
    ('`order totals`', '`a``b`')
    """
    return "`" + identifier.replace("`", "``") + "`"


class MySQLSession:
    """A session of a server, begun with the first request, and again after it was lost; never in a transaction. For one
    thread at a time."""

    def __init__(self, address: Callable[[], MySQLAddress], timeout_s: float = TIMEOUT_S) -> None:
        """*address* is called for each connection, so that a changed secret is used."""
        self._address_now = address
        self._timeout_s = timeout_s
        self._connection: pymysql.Connection[Any] | None = None
        self._address: MySQLAddress | None = None
        self.variables: dict[str, str] = {}
        """The server's, as of the connection."""
        self.connections = 0
        """The number made so far."""

    @property
    def address(self) -> MySQLAddress:
        """The address of the present connection, or of the next one."""
        return self._address or self._address_now()

    @property
    def max_allowed_packet(self) -> int:
        """The longest statement that the server takes, in bytes."""
        return int(self.variables["max_allowed_packet"])

    @property
    def is_mariadb(self) -> bool:
        """Whether the server is MariaDB."""
        return "MariaDB" in self.variables["version"]

    def ask(self, sql: str | bytes, *values: object) -> list[Row]:
        """The rows of one statement; each %s in it stands for a value. Outside of a transaction it is one by itself."""
        if self._connection is None:
            self._connect()
        return self._ask(sql, values)

    def objects(self, query: str) -> Iterator[dict[str, Any]]:
        """The rows of *query*, which reads only, by column; they come while the server has the query open."""
        if self._connection is None:
            self._connect()
        address = self.address
        self._ask("SET SESSION TRANSACTION READ ONLY", ())
        try:
            with self._open.cursor(SSDictCursor) as cursor:
                cursor.execute(query)
                yield from cursor.fetchall_unbuffered()
        except pymysql.MySQLError as error:
            raise as_ours(error, address, self._timeout_s) from None
        finally:
            self.close()

    def send(self, sql: bytes) -> None:
        """Run a statement without rows in its answer, within a transaction, without substitution of values."""
        self._ask(sql, ())

    def changed_by(self, sql: str, *values: object) -> int:
        """The number of rows that one statement has inserted or changed; a row set to its old values does not count."""
        self.ask(sql, *values)
        return int(self._open.affected_rows())

    @contextmanager
    def transaction(self, name: str = "", lock_s: float | None = None) -> Iterator[None]:
        """A transaction, committed unless its body raises. *name* and *lock_s* have no effect: the server names no
        sessions, and the timeout for locks is that of the connection."""
        self._begin()
        try:
            yield
            self.require_transaction()
            self._ask(b"COMMIT", ())
        except Exception:
            self._roll_back()
            raise
        except BaseException:  # an interrupt may have cut a packet: the connection is unusable
            self.close()
            raise

    def require_transaction(self) -> None:
        """Raise `StoreError` unless a transaction is still open on the server, in which a backslash escapes."""
        status = self._open.server_status
        if (
            not status & SERVER_STATUS.SERVER_STATUS_IN_TRANS
            or status & SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES
        ):
            raise StoreError(
                f"The transaction at {self.address.place} is no longer the one that was begun: a proxy has "
                f"distributed its statements over several connections. Let the dsn name the server itself."
            )

    def close(self) -> None:
        connection, self._connection, self._address = self._connection, None, None
        if connection is not None and connection.open:
            with suppress(pymysql.MySQLError, OSError):
                connection.close()

    def handed_over(self, command: int, body: bytes) -> Any:
        """Send a *command* to which the server answers with packets without end. Returns the socket, which does not
        block; the session is good for nothing else from then on."""
        connection = self._open
        try:
            connection._execute_command(command, body)
        except pymysql.MySQLError as error:
            raise self.as_ours(error) from None
        connection._sock.setblocking(False)
        return connection._sock

    def as_ours(self, error: pymysql.MySQLError) -> StoreError | StoreUnavailable:
        """See `as_ours`."""
        return as_ours(error, self.address, self._timeout_s)

    @property
    def _open(self) -> pymysql.Connection[Any]:
        if self._connection is None:
            raise StoreError("The connection was closed within a transaction. Nothing is lost; run again.")
        return self._connection

    def _begin(self) -> None:
        """Begin a transaction; a lost connection is replaced, since nothing was asked in it yet."""
        if self._connection is not None:
            try:
                self._open.query("START TRANSACTION READ WRITE")
                return
            except pymysql.MySQLError as error:
                ours = as_ours(error, self.address, self._timeout_s)
                self.close()
                if number_of(error) not in LOST or timed_out(error):
                    raise ours from None
        self._connect()
        self._ask("START TRANSACTION READ WRITE", ())

    def _roll_back(self) -> None:
        """Roll back, so that locks are free before the error is seen; after a lost connection the server does so."""
        if self._connection is None or not self._connection.open:
            self.close()
            return
        try:
            self._connection.query("ROLLBACK")
        except pymysql.MySQLError:
            self.close()

    def _ask(self, sql: str | bytes, values: tuple[object, ...]) -> list[Row]:
        address = self.address
        try:
            with self._open.cursor() as cursor:
                if isinstance(sql, bytes):
                    self._open.query(sql)
                    return []
                cursor.execute(sql, values or None)
                return list(cursor.fetchall())
        except pymysql.MySQLError as error:
            if number_of(error) in LOST or not self._open.open:
                self.close()
            raise as_ours(error, address, self._timeout_s) from None

    def _connect(self) -> None:
        self.close()
        address = self._address_now()
        try:
            self._connection = pymysql.connect(
                **address.arguments(),
                charset=CHARSET,
                sql_mode=",".join(sorted(SQL_MODE)),
                autocommit=True,
                local_infile=False,
                connect_timeout=self._timeout_s,
                read_timeout=self._timeout_s,
                write_timeout=self._timeout_s,
                program_name="exactlyonce",
            )
        except pymysql.MySQLError as error:
            raise as_ours(error, address, self._timeout_s) from None
        except RuntimeError as error:  # the driver's, for an authentication that needs another library
            raise StoreError(
                f"PyMySQL cannot log in: {address.redact(str(error))}. Run pip install 'PyMySQL[rsa]'."
            ) from None
        self._address = address
        self.connections += 1
        self._pin()

    def _pin(self) -> None:
        """Set the session's settings, and check them."""
        lock_s = max(1, int(self._timeout_s * 2 / 3))  # below the client's limit for an answer
        self._ask(
            "SET SESSION time_zone = '+00:00', completion_type = 'NO_CHAIN', unique_checks = 1, sql_safe_updates = 0, "
            "innodb_lock_wait_timeout = %s, lock_wait_timeout = %s, wait_timeout = %s, net_read_timeout = %s",
            (lock_s, lock_s, max(2, int(self._timeout_s * 2)), max(2, int(self._timeout_s))),
        )
        self._ask("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", ())
        rows = self._ask(f"SHOW SESSION VARIABLES WHERE Variable_name IN ({', '.join(['%s'] * len(_READ))})", _READ)
        self.variables = variables = {str(name).lower(): str(value) for name, value in rows}
        wrong = [name for name, value in _PINNED.items() if variables.get(name) != value]
        wrong += ["sql_mode"] if set(variables.get("sql_mode", "").split(",")) != SQL_MODE else []
        isolation = {variables[name] for name in _ISOLATION if name in variables}
        wrong += ["transaction isolation"] if isolation != {"READ-COMMITTED"} else []
        if wrong:
            place = self.address.place
            self.close()
            raise StoreError(
                f"The server at {place} has not taken the session's {', '.join(wrong)}. Does a proxy between drop "
                f"SET statements? Let the dsn name the server itself."
            )


def unique_indexes(session: MySQLSession, table: str) -> dict[str, tuple[str | None, ...]]:
    """The columns of each unique index, by its name; None for a part of a column, or an expression."""
    unique: dict[str, tuple[str | None, ...]] = {}
    for index, column, part in session.ask(
        "SELECT index_name, column_name, sub_part FROM information_schema.statistics "
        f"{OF_TABLE} AND non_unique = 0 ORDER BY index_name, seq_in_index", table,
    ):  # fmt: skip
        unique[index] = (*unique.get(index, ()), column if part is None else None)
    return unique
