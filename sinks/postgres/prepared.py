"""The PostgreSQL store with transactions that are prepared: PREPARE TRANSACTION, and the ledger that tells their fate.

Invariants: a transaction that is prepared has its row of `exactlyonce_prepared`; no statement of a writer touches a row
that another transaction may have written, so that none waits for what is prepared.
"""

from __future__ import annotations

from psycopg import sql

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.postgres import catalogue
from exactlyonce.sinks.postgres.ledger import LedgerTable, SinkName
from exactlyonce.sinks.postgres.refusals import NoSuchObject
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.sinks.prepared.names import TransactionName, owner_of
from exactlyonce.sinks.prepared.store import TABLE, PreparedRow, PreparingStore
from exactlyonce.sinks.write_ahead.store import LedgerEntry

OWNER_LENGTH_MAX = 110
"""Names have 199 bytes at most."""
IDLE_S = 600
"""A writer shows more often than that that it lives; what the worker runs between may take long."""


class PreparedTable(LedgerTable):
    """The rows of prepared transactions; a writer inserts them, a committer deletes those that it has entered."""

    table = TABLE
    columns = dict.fromkeys(("name", "pipeline", "sink"), "text") | dict.fromkeys(
        ("subtask", "checkpoint", "records"), "bigint"
    )
    key = ("name",)
    rights = ("SELECT", "INSERT", "DELETE")

    def insert(self, row: PreparedRow) -> None:
        """Part of the transaction of its name."""
        values = (row.name, row.pipeline, row.sink, row.subtask, row.checkpoint, row.records)
        self._run("INSERT INTO {} VALUES ($1, $2, $3, $4, $5, $6)", values)

    def shows(self, name: TransactionName) -> bool:
        """Whether the row is visible."""
        return bool(self._run("SELECT true FROM {} WHERE name = $1", (str(name),)))

    def delete(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """Part of a transaction that enters it in the ledger."""
        if name is not None:
            self._run("DELETE FROM {} WHERE name = $1", (str(name),))
        else:
            of_checkpoint = (entry.pipeline, entry.sink, entry.subtask, entry.checkpoint)
            self._run(
                "DELETE FROM {} WHERE pipeline = $1 AND sink = $2 AND subtask = $3 AND checkpoint = $4", of_checkpoint
            )

    def all(self, pipeline: str, sink: str) -> list[PreparedRow]:
        """Those that are visible."""
        rows = self._run("SELECT * FROM {} WHERE pipeline = $1 AND sink = $2 ORDER BY name", (pipeline, sink))
        return [PreparedRow(**dict(zip(PreparedRow.__struct_fields__, row, strict=True))) for row in rows]


class PreparingPostgresStore(PostgresStore, PreparingStore):
    """See `PreparingStore`."""

    def check(self) -> None:
        """See `Store`; and whether the server prepares transactions."""
        super().check()
        self._require_that_it_prepares()
        table = self._prepared()
        table.create()
        table.check()

    def inspect(self) -> None:
        """See `InspectableStore`."""
        super().inspect()
        self._require_that_it_prepares()
        table = PreparedTable(self._connection, self._schema())
        if table.exists:
            table.check()

    def _require_that_it_prepares(self) -> None:
        if self._connection.rows("SELECT current_setting('max_prepared_transactions')::int") == [(0,)]:
            raise StoreError(
                "commit='prepared' needs transactions that can be prepared, and the server allows none: "
                "max_prepared_transactions is 0. Let an administrator run ALTER SYSTEM SET max_prepared_transactions "
                "= 100 and restart the server; or use commit='write_ahead', which needs none."
            )

    def owner(self, pipeline: str, sink: str) -> str:
        """See `PreparingStore`; the server lists the transactions of a database, which may have several ledgers."""
        return owner_of(pipeline, sink, self._schema(), OWNER_LENGTH_MAX)

    def _schema(self) -> str:
        """Of the table, or that in which it would be made."""
        target = catalogue.find(self._connection, *self._sink.place) if self._target is None else self._target
        return target.schema if target is not None else catalogue.schema_of(self._connection, self._sink)

    def begin(self, name: TransactionName) -> None:
        """See `PreparingStore`. Where the connection has ended since the last interval nothing is lost: once more."""
        session = f"exactlyonce {name.owner[-50:]}"
        try:
            self._connection.begin(session, IDLE_S)
        except StoreUnavailable:
            self._connection.begin(session, IDLE_S)

    def add(self, chunk: bytes) -> None:
        """See `PreparingStore`."""
        self._write([chunk])

    def keep(self) -> None:
        """See `PreparingStore`."""
        self._connection.rows("SELECT")

    def prepare(self, row: PreparedRow) -> None:
        """See `PreparingStore`."""
        self._prepared().insert(row)
        self._connection.prepare(row.name)

    def prepared(self, owner: str) -> list[TransactionName]:
        """See `PreparingStore`."""
        return list(self.prepared_at(owner))

    def prepared_at(self, owner: str) -> dict[TransactionName, int | None]:
        """See `PreparingStore`."""
        rows = self._connection.rows(
            "SELECT gid, (extract(epoch FROM prepared) * 1000)::bigint FROM pg_prepared_xacts "
            "WHERE database = current_database()"
        )
        found = {TransactionName.parse(gid): at_ms for gid, at_ms in rows}
        return {name: at_ms for name, at_ms in found.items() if name is not None and name.owner == owner}

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """See `PreparingStore`. What another session is ending is busy, which is `StoreUnavailable`."""
        statement = sql.SQL("COMMIT PREPARED {}" if commit else "ROLLBACK PREPARED {}")
        try:
            self._connection.rows(statement.format(sql.Literal(str(name))))
        except NoSuchObject:
            return

    def committed(self, name: TransactionName) -> bool:
        """See `PreparingStore`."""
        return self._prepared().shows(name)

    def entered(self, entry: LedgerEntry) -> bool:
        """See `PreparingStore`."""
        ledger = self._ledger()
        with ledger.needed():
            return ledger.has(entry)

    def enter(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """See `PreparingStore`."""
        ledger = self._ledger()
        session = SinkName(entry.pipeline, entry.sink).session
        with ledger.needed(), self._connection.transaction(session):
            ledger.claim(entry)
            self._prepared().delete(entry, name)

    def left(self, pipeline: str, sink: str) -> list[PreparedRow]:
        """See `PreparingStore`."""
        return self._prepared().all(pipeline, sink)

    def _prepared(self) -> PreparedTable:
        return PreparedTable(self._connection, self._found().schema)
