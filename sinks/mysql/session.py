"""A connection to the server, with every setting pinned that rows or transactions depend on.

Invariants: it is made when first asked, and made again after it was lost; but never within a transaction, and nothing
is asked twice. A transaction that has not been committed is rolled back by whatever ends it: an error, this process,
the connection; and the server ends a connection that has been silent for twice the time limit, so that nobody's locks
outlive that. Nothing but COMMIT ends a transaction with effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
from pymysql.constants import SERVER_STATUS

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.mysql.address import MySQLAddress
from exactlyonce.sinks.mysql.refusals import LOST, as_ours, number_of, timed_out

TIMEOUT_S = 30.0
"""How long a server may give no sign of life before it counts as away."""
SQL_MODE = frozenset((
    "STRICT_TRANS_TABLES", "STRICT_ALL_TABLES", "NO_ZERO_IN_DATE", "NO_ZERO_DATE", "ERROR_FOR_DIVISION_BY_ZERO",
    "NO_ENGINE_SUBSTITUTION", "NO_AUTO_VALUE_ON_ZERO",
))  # fmt: skip
"""Values that do not fit are errors, 0 is 0 also where numbers are given out, and a backslash is as it always was."""
CHARSET = "utf8mb4"
_PINNED = {
    "autocommit": "ON", "character_set_client": CHARSET, "character_set_connection": CHARSET, "time_zone": "+00:00",
    "completion_type": "NO_CHAIN",
}  # fmt: skip
_ISOLATION = ("transaction_isolation", "tx_isolation")
"""What MySQL and MariaDB call it."""
_READ = (*_PINNED, *_ISOLATION, "sql_mode", "max_allowed_packet", "version")
Row = tuple[Any, ...]


def quoted(identifier: str) -> str:
    """An identifier, as SQL. The driver has no means of its own; in backticks nothing but a backtick has a meaning.

    >>> quoted("order totals"), quoted("a`b")
    ('`order totals`', '`a``b`')
    """
    return "`" + identifier.replace("`", "``") + "`"


class MySQLSession:
    """One connection at a time, used by one thread at a time."""

    def __init__(self, address: Callable[[], MySQLAddress], timeout_s: float = TIMEOUT_S) -> None:
        """*address* is asked for each connection: a secret that has changed is taken up."""
        self._address_now = address
        self._timeout_s = timeout_s
        self._connection: pymysql.Connection[Any] | None = None
        self._address: MySQLAddress | None = None
        self.variables: dict[str, str] = {}
        """The server's, as they were when the connection was made."""
        self.connections = 0
        """How many have been made."""

    @property
    def address(self) -> MySQLAddress:
        """Of the present connection, or of the next one."""
        return self._address or self._address_now()

    @property
    def max_allowed_packet(self) -> int:
        """The longest statement that the server takes, in bytes."""
        return int(self.variables["max_allowed_packet"])

    @property
    def is_mariadb(self) -> bool:
        """Whether it is MariaDB."""
        return "MariaDB" in self.variables["version"]

    def ask(self, sql: str | bytes, *values: object) -> list[Row]:
        """Run one statement; -> its rows. Outside of a transaction it is one by itself."""
        if self._connection is None:
            self._connect()
        return self._ask(sql, values)

    def send(self, sql: bytes) -> None:
        """Run a statement that has no rows for an answer, within a transaction; it goes as it is."""
        self._ask(sql, ())

    def changed_by(self, sql: str, *values: object) -> int:
        """Run one statement; -> how many rows it has inserted or changed; a row set to what it was does not count."""
        self.ask(sql, *values)
        return int(self._open.affected_rows())

    @contextmanager
    def transaction(self, name: str = "", lock_s: float | None = None) -> Iterator[None]:
        """What is asked within is committed at its end, unless an error ends it: then it is rolled back. The server
        does not name sessions."""
        self._begin()
        try:
            yield
            self.require_transaction()
            self._ask(b"COMMIT", ())
        except Exception:
            self._roll_back()
            raise
        except BaseException:  # an interrupt may have come within a packet: no further word would be understood
            self.close()
            raise

    def require_transaction(self) -> None:
        """Raise unless the server still says that a transaction is open, and that a backslash means what it should."""
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
        """Let go of the connection; the server rolls back what is open."""
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
        """Begin a transaction, over a new connection where the last one turns out to be gone: nothing was asked yet."""
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
        """So that locks are free before anybody is told of the error; of a lost connection the server does it."""
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
        except RuntimeError as error:  # the driver's, for a way to authenticate that needs a library more
            raise StoreError(
                f"PyMySQL cannot log in: {address.redact(str(error))}. Run pip install 'PyMySQL[rsa]'."
            ) from None
        self._address = address
        self.connections += 1
        self._pin()

    def _pin(self) -> None:
        """Set what the session depends on, and look whether it is set."""
        lock_s = max(1, int(self._timeout_s * 2 / 3))  # so that the server's answer comes before the client's limit
        self._ask(
            "SET SESSION time_zone = '+00:00', completion_type = 'NO_CHAIN', unique_checks = 1, sql_safe_updates = 0, "
            "innodb_lock_wait_timeout = %s, lock_wait_timeout = %s, wait_timeout = %s, net_read_timeout = %s",
            (lock_s, lock_s, max(2, int(self._timeout_s * 2)), max(2, int(self._timeout_s))),
        )
        self._ask("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", ())
        rows = self._ask(f"SHOW SESSION VARIABLES WHERE Variable_name IN ({', '.join(['%s'] * len(_READ))})", _READ)
        self.variables = found = {str(name).lower(): str(value) for name, value in rows}
        wrong = [name for name, value in _PINNED.items() if found.get(name) != value]
        wrong += ["sql_mode"] if set(found.get("sql_mode", "").split(",")) != SQL_MODE else []
        isolation = {found[name] for name in _ISOLATION if name in found}
        wrong += ["transaction isolation"] if isolation != {"READ-COMMITTED"} else []
        if wrong:
            place = self.address.place
            self.close()
            raise StoreError(
                f"The server at {place} has not taken the session's {', '.join(wrong)}. Does a proxy between drop "
                f"SET statements? Let the dsn name the server itself."
            )
