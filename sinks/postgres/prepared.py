"""The PostgreSQL store with transactions that are prepared: PREPARE TRANSACTION."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.postgres.catalogue import OwnTable, Target
from exactlyonce.sinks.postgres.refusals import NoSuchObject
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.sinks.prepared.store import TABLE, TransactionName
from exactlyonce.sinks.sql.ledger import Row
from exactlyonce.sinks.sql.prepared import COLUMNS, PreparingSqlStore

OWNER_LENGTH_MAX = 110
"""Names have 199 bytes at most."""
IDLE_S = 600
"""A writer shows more often than that that it lives; what the worker runs between may take long."""
_TYPES = ("text", "text", "text", "bigint", "bigint", "bigint")


class PreparingPostgresStore(PreparingSqlStore[PostgresSink[Any], Target], PostgresStore):
    """See `PreparingStore`."""

    owner_length_max = OWNER_LENGTH_MAX

    def _ask(self, statement: str, *values: object) -> list[Row]:
        return self._connection.ask(statement, *values)

    @property
    def _place(self) -> str:
        """The server lists the transactions of a database, which may have several ledgers."""
        return self._schema()

    @property
    def _prepared_name(self) -> str:
        return self._prepared_table().shown

    def _prepared_table(self) -> OwnTable:
        return OwnTable(
            connection=self._connection, schema=self._schema(), table=TABLE,
            columns=dict(zip(COLUMNS, _TYPES, strict=True)), key=COLUMNS[:1], rights=("SELECT", "INSERT", "DELETE"),
        )  # fmt: skip

    def _has_prepared_table(self) -> bool:
        return self._prepared_table().exists

    def _create_prepared_table(self) -> None:
        self._prepared_table().create()

    def _check_prepared_table(self) -> None:
        self._prepared_table().check()

    def _require_that_it_prepares(self) -> None:
        if self._connection.rows("SELECT current_setting('max_prepared_transactions')::int") == [(0,)]:
            raise StoreError(
                "commit='prepared' needs transactions that can be prepared, and the server allows none: "
                "max_prepared_transactions is 0. Let an administrator run ALTER SYSTEM SET max_prepared_transactions "
                "= 100 and restart the server; or use commit='write_ahead', which needs none."
            )

    def begin(self, name: TransactionName) -> None:
        """See `PreparingStore`. Where the connection has ended since the last interval nothing is lost: once more."""
        session = f"exactlyonce {name.owner[-50:]}"
        try:
            self._connection.begin(session, IDLE_S)
        except StoreUnavailable:
            self._connection.begin(session, IDLE_S)

    def keep(self) -> None:
        """See `PreparingStore`."""
        self._connection.rows("SELECT")

    def _prepare(self, name: str) -> None:
        self._connection.prepare(name)

    def _listed(self) -> dict[TransactionName, int | None]:
        rows = self._connection.rows(
            "SELECT gid, (extract(epoch FROM prepared) * 1000)::bigint FROM pg_prepared_xacts "
            "WHERE database = current_database()"
        )
        listed = {TransactionName.parse(gid): at_ms for gid, at_ms in rows}
        return {name: at_ms for name, at_ms in listed.items() if name is not None}

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """See `PreparingStore`. What another session is ending is busy, which is `StoreUnavailable`."""
        statement = sql.SQL("COMMIT PREPARED {}" if commit else "ROLLBACK PREPARED {}")
        try:
            self._connection.rows(statement.format(sql.Literal(str(name))))
        except NoSuchObject:
            return
