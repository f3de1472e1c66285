"""MySQL's or MariaDB's store with transactions that are prepared: XA, and the ledger that tells their fate.

Invariants: a transaction that is prepared has its row of `exactlyonce_prepared`, and its connection is given up; no
statement of a writer touches a row that another transaction may have written, and none of a committer searches among
them, so that none waits for what is prepared. "XAER_NOTA: unknown XID" says nothing: it is the answer for what was
committed, for what is lost, and for what a connection holds that is still there.
"""

from __future__ import annotations

import re
from hashlib import sha256

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.mysql import ledger
from exactlyonce.sinks.mysql.refusals import UnknownTransaction
from exactlyonce.sinks.mysql.session import quoted
from exactlyonce.sinks.mysql.store import MySQLStore
from exactlyonce.sinks.mysql.table import ENGINE, read_table
from exactlyonce.sinks.prepared.names import TransactionName, owner_of
from exactlyonce.sinks.prepared.store import TABLE, PreparedRow, PreparingStore
from exactlyonce.sinks.write_ahead.store import LedgerEntry

OWNER_LENGTH_MAX = 30
"""The first part of a name has 64 bytes at most."""
FORMAT_ID = 25967
"""Of our XIDs: "eo"."""
SILENCE_S = 600
"""A writer shows more often than that that it lives; what the worker runs between may take long."""
TRIES, TRIES_IN_PEACE = 60, 10
PAUSE = "DO SLEEP(0.05)"
_VERSION_MIN = {True: (10, 5), False: (8, 0)}
"""By whether it is MariaDB; before, what was prepared was rolled back when its connection ended."""
_COLUMNS = PreparedRow.__struct_fields__
_TEXT = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
_CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
  name VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
  pipeline VARCHAR(255) {_TEXT},
  sink VARCHAR(255) {_TEXT},
  subtask INT NOT NULL,
  checkpoint BIGINT NOT NULL,
  records BIGINT NOT NULL
) ENGINE={ENGINE} ROW_FORMAT=DYNAMIC"""


class PreparingMySQLStore(MySQLStore, PreparingStore):
    """See `PreparingStore`."""

    _open: TransactionName | None = None

    def check(self) -> None:
        """See `Store`; and whether the server keeps what is prepared, and shows it."""
        super().check()
        self._require_that_it_prepares()
        if read_table(self._session, TABLE) is None:
            self._make(_CREATE)
        self._check_prepared_rows()

    def inspect(self) -> None:
        """See `InspectableStore`."""
        super().inspect()
        self._require_that_it_prepares()
        if read_table(self._session, TABLE) is not None:
            self._check_prepared_rows()

    def _require_that_it_prepares(self) -> None:
        session = self._session
        found, minimum = session.variables["version"], _VERSION_MIN[session.is_mariadb]
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < minimum:
            raise StoreError(
                f"commit='xa' needs MariaDB 10.5 or MySQL 8.0, and the server at {session.address.place} is {found}: "
                f"older ones roll back what is prepared when its connection ends. Use commit='write_ahead'."
            )
        try:
            self._all_prepared()
        except StoreError as error:
            raise StoreError(
                f"{error} commit='xa' has to list what is prepared: GRANT XA_RECOVER_ADMIN ON *.* TO "
                f"{quoted(session.address.user)}@'%'"
            ) from None

    def _check_prepared_rows(self) -> None:
        session = self._session
        table = read_table(session, TABLE)
        if table is None or tuple(table.columns) != _COLUMNS or table.unique.get("PRIMARY") != ("name",):
            raise StoreError(
                f"The table {TABLE} at {session.address.place} is not that of exactlyonce: its columns must be "
                f"{', '.join(_COLUMNS)}, its primary key the first. Rename it; it is then made anew."
            )
        if table.engine != ENGINE:
            raise StoreError(f"The table {TABLE} has no transactions: ALTER TABLE {TABLE} ENGINE={ENGINE}")
        try:
            session.ask(f"EXPLAIN INSERT INTO {TABLE} VALUES ('', '', '', 0, 0, 0)")
            session.ask(f"EXPLAIN DELETE FROM {TABLE} WHERE name = ''")
        except StoreError as error:
            address = session.address
            raise StoreError(
                f"{error} For prepared transactions: GRANT SELECT, INSERT, DELETE ON "
                f"{quoted(address.database)}.{TABLE} TO {quoted(address.user)}@'%'"
            ) from None

    def owner(self, pipeline: str, sink: str) -> str:
        """See `PreparingStore`; XIDs are the server's, and the ledger is the database's."""
        return owner_of(pipeline, sink, self._session.address.database, OWNER_LENGTH_MAX)

    # --- for a writer -------------------------------------------------------------------------------------------

    def begin(self, name: TransactionName) -> None:
        """See `PreparingStore`. The connection is a new one, for the server ends those that are idle; it holds a lock
        of the transaction's name, by which others find it."""
        session = self._session
        session.close()
        self._require_transactional()
        session.ask(f"SET SESSION wait_timeout = {SILENCE_S}")
        if session.ask("SELECT GET_LOCK(%s, 0)", lock_of(name)) != [(1,)]:
            raise StoreError(f"The lock of the transaction {name} is taken: another client uses names of exactlyonce.")
        session.ask(f"XA START {_xid(name)}")
        session.require_transaction()
        self._open = name

    def add(self, chunk: bytes) -> None:
        """See `PreparingStore`."""
        self._write([chunk])

    def keep(self) -> None:
        """See `PreparingStore`."""
        self._session.require_transaction()
        self._session.ask("SELECT 1")

    def prepare(self, row: PreparedRow) -> None:
        """See `PreparingStore`. A connection that has prepared can do nothing else, and nobody else can end what it
        holds: so it is closed."""
        session = self._session
        assert self._open is not None
        session.require_transaction()
        session.ask(f"INSERT INTO {TABLE} VALUES (%s, %s, %s, %s, %s, %s)", *(getattr(row, name) for name in _COLUMNS))
        for verb in ("END", "PREPARE"):
            session.send(f"XA {verb} {_xid(self._open)}".encode())
        self._open = None
        session.close()

    # --- for a committer ----------------------------------------------------------------------------------------

    def prepared(self, owner: str) -> list[TransactionName]:
        """See `PreparingStore`."""
        return [name for name in self._all_prepared() if name.owner == owner]

    def prepared_at(self, owner: str) -> dict[TransactionName, int | None]:
        """See `PreparingStore`. No server of this kind tells when."""
        return dict.fromkeys(self.prepared(owner))

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """See `PreparingStore`. The connection that has prepared it is given a moment to end, and is then ended."""
        for tried in range(TRIES):
            try:
                self._session.ask(f"XA {'COMMIT' if commit else 'ROLLBACK'} {_xid(name)}")
                return
            except UnknownTransaction:
                if name not in self._all_prepared():
                    return
            if tried >= TRIES_IN_PEACE:
                self._end_owner(name)
            self._session.ask(PAUSE)
        raise StoreUnavailable(
            f"The prepared transaction {name} at {self._session.address.place} cannot be ended: the connection that "
            f"has prepared it, or is ending it, is still there. See SHOW PROCESSLIST, and KILL it. Nothing is lost: it "
            f"is tried again."
        )

    def _end_owner(self, name: TransactionName) -> None:
        ((connection,),) = self._session.ask("SELECT IS_USED_LOCK(%s)", lock_of(name))
        if connection is not None:
            try:
                self._session.ask(f"KILL {int(connection)}")
            except UnknownTransaction:  # it has ended by itself
                return

    def committed(self, name: TransactionName) -> bool:
        """See `PreparingStore`."""
        return bool(self._session.ask(f"SELECT 1 FROM {TABLE} WHERE name = %s", str(name)))

    def entered(self, entry: LedgerEntry) -> bool:
        """See `PreparingStore`."""
        return ledger.has(self._session, entry)

    def enter(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """See `PreparingStore`. Rows are deleted by their whole key: a search would wait at those not committed yet."""
        names = [str(name)] if name is not None else self._names_of(entry)
        with self._session.transaction():
            self._require_transactional()
            ledger.advance(self._session, entry)
            for each in names:
                self._session.ask(f"DELETE FROM {TABLE} WHERE name = %s", each)

    def _names_of(self, entry: LedgerEntry) -> list[str]:
        left = self.left(entry.pipeline, entry.sink)
        return [row.name for row in left if (row.subtask, row.checkpoint) == (entry.subtask, entry.checkpoint)]

    def left(self, pipeline: str, sink: str) -> list[PreparedRow]:
        """See `PreparingStore`."""
        rows = self._session.ask(
            f"SELECT {', '.join(_COLUMNS)} FROM {TABLE} WHERE pipeline = %s AND sink = %s ORDER BY name", pipeline, sink
        )
        return [PreparedRow(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]

    def _all_prepared(self) -> list[TransactionName]:
        """All of ours in the server, whosoever."""
        convert = "" if self._session.is_mariadb else " CONVERT XID"
        found = []
        for format_id, length, _, data in self._session.ask(f"XA RECOVER{convert}"):
            if format_id == FORMAT_ID:
                text = (bytes.fromhex(data[2:]) if convert else data).decode("ascii", "replace")
                found.append(TransactionName.parse(f"{text[:length]}:{text[length:]}"))
        return [name for name in found if name is not None]


def _xid(name: TransactionName) -> str:
    """As SQL."""
    return f"'{name.transaction}','{name.branch}',{FORMAT_ID}"


def lock_of(name: TransactionName) -> str:
    """The user lock that the connection holds which writes and prepares the transaction."""
    return f"exactlyonce {sha256(str(name).encode()).hexdigest()[:32]}"
