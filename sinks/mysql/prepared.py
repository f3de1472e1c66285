"""MySQL's or MariaDB's store with prepared transactions: XA.

Invariant: the connection of a prepared transaction is closed. "XAER_NOTA: unknown XID" proves nothing: it is the answer
for a committed transaction, for a lost one, and for one that another open connection holds.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

from exactlyonce.connectors.mysql.refusals import UnknownTransaction
from exactlyonce.connectors.mysql.session import quoted
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.mysql.store import TEXT, MySQLStore
from exactlyonce.sinks.mysql.table import ENGINE, MySQLOwnTable, MySQLTable
from exactlyonce.sinks.prepared.store import TABLE, PreparedRow, TransactionName
from exactlyonce.sinks.sql.prepared import COLUMNS, PreparingSqlStore

OWNER_LENGTH_MAX = 30
"""The first part of a name has 64 bytes at most."""
FORMAT_ID = 25967
"""The format of our XIDs: "eo"."""
SILENCE_S = 600
"""A live writer shows itself more often, even if the worker is busy for long."""
TRIES, TRIES_IN_PEACE = 60, 10
PAUSE = "DO SLEEP(0.05)"
_VERSION_MIN = {True: (10, 5), False: (8, 0)}
"""By whether it is MariaDB; older ones roll back a prepared transaction when its connection ends."""
PREPARED_RIGHTS = "SELECT, INSERT, DELETE"
CREATE_PREPARED = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
  name VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
  pipeline VARCHAR(255) {TEXT},
  sink VARCHAR(255) {TEXT},
  subtask INT NOT NULL,
  checkpoint BIGINT NOT NULL,
  records BIGINT NOT NULL
) ENGINE={ENGINE} ROW_FORMAT=DYNAMIC"""


class PreparingMySQLStore(PreparingSqlStore[MySQLSink[Any], MySQLTable], MySQLStore):
    """See `PreparingStore`."""

    owner_length_max = OWNER_LENGTH_MAX
    _open: TransactionName | None = None

    @property
    def _place(self) -> str:
        return self._session.address.database

    def _prepared_table(self) -> MySQLOwnTable:
        return MySQLOwnTable(
            session=self._session, name=TABLE, columns=COLUMNS, key=COLUMNS[:1], statement=CREATE_PREPARED,
            rights=PREPARED_RIGHTS,
            uses=(f"INSERT INTO {TABLE} VALUES ('', '', '', 0, 0, 0)", f"DELETE FROM {TABLE} WHERE name = ''"),
        )  # fmt: skip

    def _require_that_it_prepares(self) -> None:
        session = self._session
        version, minimum = session.variables["version"], _VERSION_MIN[session.is_mariadb]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < minimum:
            raise StoreError(
                f"commit='xa' needs MariaDB 10.5 or MySQL 8.0, and the server at {session.address.place} is {version}: "
                f"older ones roll back what is prepared when its connection ends. Use commit='write_ahead'."
            )
        try:
            self._listed()
        except StoreError as error:
            raise StoreError(
                f"{error} commit='xa' has to list what is prepared: GRANT XA_RECOVER_ADMIN ON *.* TO "
                f"{quoted(session.address.user)}@'%'"
            ) from None

    # --- for a writer -------------------------------------------------------------------------------------------

    def begin(self, name: TransactionName) -> None:
        """See `PreparingStore`. The connection is a new one, since the server ends idle ones. It holds a lock of the
        transaction's name, by which others find it."""
        session = self._session
        session.close()
        self._require_transactional()
        session.ask(f"SET SESSION wait_timeout = {SILENCE_S}")
        if session.ask("SELECT GET_LOCK(%s, 0)", lock_of(name)) != [(1,)]:
            raise StoreError(f"The lock of the transaction {name} is taken: another client uses names of exactlyonce.")
        session.ask(f"XA START {_xid(name)}")
        session.require_transaction()
        self._open = name

    def keep(self) -> None:
        self._session.require_transaction()
        self._session.ask("SELECT 1")

    def prepare(self, row: PreparedRow) -> None:
        """See `PreparingStore`. A lost connection has lost the transaction, too."""
        self._session.require_transaction()
        super().prepare(row)

    def _prepare(self, name: str) -> None:
        """After PREPARE the connection is closed: it can do nothing else, and keeps others from ending the
        transaction."""
        assert self._open is not None
        for verb in ("END", "PREPARE"):
            self._session.send(f"XA {verb} {_xid(self._open)}".encode())
        self._open = None
        self._session.close()

    # --- for a committer ----------------------------------------------------------------------------------------

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """See `PreparingStore`. The connection that prepared it has a moment to end, and is then killed."""
        for attempt in range(TRIES):
            try:
                self._session.ask(f"XA {'COMMIT' if commit else 'ROLLBACK'} {_xid(name)}")
                return
            except UnknownTransaction:
                if name not in self._listed():
                    return
            if attempt >= TRIES_IN_PEACE:
                self._kill_owner(name)
            self._session.ask(PAUSE)
        raise StoreUnavailable(
            f"The prepared transaction {name} at {self._session.address.place} cannot be ended: the connection that "
            f"has prepared it, or is ending it, is still there. See SHOW PROCESSLIST, and KILL it. Nothing is lost: it "
            f"is tried again."
        )

    def _kill_owner(self, name: TransactionName) -> None:
        ((connection,),) = self._session.ask("SELECT IS_USED_LOCK(%s)", lock_of(name))
        if connection is not None:
            try:
                self._session.ask(f"KILL {int(connection)}")
            except UnknownTransaction:  # it has ended by itself
                return

    def _listed(self) -> dict[TransactionName, int | None]:
        """See `PreparingSqlStore`; without times, which MySQL does not tell."""
        convert = "" if self._session.is_mariadb else " CONVERT XID"
        names = []
        for format_id, length, _, data in self._session.ask(f"XA RECOVER{convert}"):
            if format_id == FORMAT_ID:
                text = (bytes.fromhex(data[2:]) if convert else data).decode("ascii", "replace")
                names.append(TransactionName.parse(f"{text[:length]}:{text[length:]}"))
        return dict.fromkeys(name for name in names if name is not None)


def _xid(name: TransactionName) -> str:
    """As SQL."""
    return f"'{name.transaction}','{name.branch}',{FORMAT_ID}"


def lock_of(name: TransactionName) -> str:
    """The user lock of the connection that writes and prepares the transaction."""
    return f"exactlyonce {sha256(str(name).encode()).hexdigest()[:32]}"
