"""The PostgreSQL store with prepared transactions: PREPARE TRANSACTION."""

from __future__ import annotations

from typing import Any

from psycopg import sql

from exactlyonce.connectors.postgres.connection import PostgresConnection
from exactlyonce.connectors.postgres.refusals import NoSuchObject
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.postgres.catalogue import PostgresOwnTable, Target
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.postgres.store import PostgresStore
from exactlyonce.sinks.prepared.store import TABLE, TransactionName
from exactlyonce.sinks.sql.prepared import COLUMNS, PreparingSqlStore

OWNER_LENGTH_MAX = 110
"""A name has 199 bytes at most."""
IDLE_S = 600
"""A live writer shows itself more often, even if the worker is busy for long."""
_TYPES = ("text", "text", "text", "bigint", "bigint", "bigint")


def prepared_table(connection: PostgresConnection, schema: str) -> PostgresOwnTable:
    return PostgresOwnTable(
        connection=connection, schema=schema, table=TABLE, columns=dict(zip(COLUMNS, _TYPES, strict=True)),
        key=COLUMNS[:1], rights=("SELECT", "INSERT", "DELETE"),
    )  # fmt: skip


class PreparingPostgresStore(PreparingSqlStore[PostgresSink[Any], Target], PostgresStore):
    """See `PreparingStore`."""

    owner_length_max = OWNER_LENGTH_MAX

    @property
    def _place(self) -> str:
        """The server lists the transactions of a database, which may have several ledgers."""
        return self._schema()

    def _prepared_table(self) -> PostgresOwnTable:
        return prepared_table(self._session, self._schema())

    def _require_that_it_prepares(self) -> None:
        if self._session.rows("SELECT current_setting('max_prepared_transactions')::int") == [(0,)]:
            raise StoreError(
                "commit='prepared' needs transactions that can be prepared, and the server allows none: "
                "max_prepared_transactions is 0. Let an administrator run ALTER SYSTEM SET max_prepared_transactions "
                "= 100 and restart the server; or use commit='write_ahead', which needs none."
            )

    def begin(self, name: TransactionName) -> None:
        """See `PreparingStore`. A connection that ended since the last interval is replaced once: nothing is lost."""
        session = f"exactlyonce {name.owner[-50:]}"
        try:
            self._session.begin(session, IDLE_S)
        except StoreUnavailable:
            self._session.begin(session, IDLE_S)

    def keep(self) -> None:
        self._session.rows("SELECT")

    def _prepare(self, name: str) -> None:
        self._session.prepare(name)

    def _listed(self) -> dict[TransactionName, int | None]:
        rows = self._session.rows(
            "SELECT gid, (extract(epoch FROM prepared) * 1000)::bigint FROM pg_prepared_xacts "
            "WHERE database = current_database()"
        )
        listed = {TransactionName.parse(gid): at_ms for gid, at_ms in rows}
        return {name: at_ms for name, at_ms in listed.items() if name is not None}

    def end(self, name: TransactionName, *, commit: bool) -> None:
        """See `PreparingStore`. `StoreUnavailable` while another session is ending it."""
        statement = sql.SQL("COMMIT PREPARED {}" if commit else "ROLLBACK PREPARED {}")
        try:
            self._session.rows(statement.format(sql.Literal(str(name))))
        except NoSuchObject:
            return
