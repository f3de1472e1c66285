"""A connection to the server, with all settings pinned that rows or transactions depend on.

Invariants: it is made again after it was lost, but never within a transaction, and no request is repeated. Only COMMIT
ends a transaction with effect; an error, the end of this process or of the connection rolls it back. The server ends a
connection that has been silent for twice the time limit, so that no locks outlive that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
from pymysql.constants import SERVER_STATUS
from pymysql.cursors import SSDictCursor

from exactlyonce.connectors.mysql.address import MySQLAddress
from exactlyonce.connectors.mysql.refusals import LOST, as_ours, number_of, timed_out
from exactlyonce.pipeline.errors import StoreError

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


def quoted(identifier: str) -> str:
    """An identifier, as SQL. In backticks only a backtick is special.

    >>> quoted("order totals"), quoted("a`b")
    ('`order totals`', '`a``b`')
    """
    return "`" + identifier.replace("`", "``") + "`"


class MySQLSession:
    """See `Session`. For one thread at a time."""

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
        """See `Session`; a row set to its old values does not count."""
        self.ask(sql, *values)
        return int(self._open.affected_rows())

    @contextmanager
    def transaction(self, name: str = "", lock_s: float | None = None) -> Iterator[None]:
        """See `Session`; the server does not name sessions."""
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
