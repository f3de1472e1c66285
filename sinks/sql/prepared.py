"""The store of an SQL sink whose transactions are prepared, and the table of those that were committed.

Invariants: a prepared transaction has inserted its row of `exactlyonce_prepared`. No statement of a writer touches a
row of another transaction, and none of a committer searches among them: so none waits for a prepared transaction.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.prepared.store import PreparedRow, PreparingStore, TransactionName, owner_of
from exactlyonce.sinks.sql.ledger import OwnTable, Row
from exactlyonce.sinks.sql.store import SinkT, SqlStore, TableT

COLUMNS = PreparedRow.__struct_fields__
_NAMES, _MARKS = ", ".join(COLUMNS), ", ".join(["%s"] * len(COLUMNS))


class PreparingSqlStore(SqlStore[SinkT, TableT], PreparingStore):
    """See `PreparingStore`."""

    owner_length_max: ClassVar[int]
    """The limit of a `TransactionName.owner`, so that the server takes the whole name."""

    # --- the dialect ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _require_that_it_prepares(self) -> None:
        """Raise `StoreError` unless the server keeps prepared transactions, and lists them."""

    @property
    @abstractmethod
    def _place(self) -> str:
        """The schema or database of the ledger; names of transactions are the server's."""

    @abstractmethod
    def _prepared_table(self) -> OwnTable:
        """The table of prepared transactions."""

    @abstractmethod
    def _listed(self) -> dict[TransactionName, int | None]:
        """All prepared transactions of exactlyonce in the server; see `PreparingStore.prepared`."""

    @abstractmethod
    def _prepare(self, name: str) -> None:
        """Prepare the open transaction."""

    # --- `PreparingStore` -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See `LedgerStore`; the server must prepare transactions, too."""
        super().check()
        self._require_that_it_prepares()
        table = self._prepared_table()
        table.create()
        table.check()

    def inspect(self) -> None:
        super().inspect()
        self._require_that_it_prepares()
        table = self._prepared_table()
        if table.exists:
            table.check()

    def owner(self, pipeline: str, sink: str) -> str:
        return owner_of(pipeline, sink, self._place, self.owner_length_max)

    def add(self, chunk: bytes) -> None:
        self._write([chunk])

    def prepare(self, row: PreparedRow) -> None:
        self._on_prepared(f"INSERT INTO {{}} ({_NAMES}) VALUES ({_MARKS})", *(getattr(row, name) for name in COLUMNS))
        self._prepare(row.name)

    def prepared(self, owner: str) -> dict[TransactionName, int | None]:
        return {name: at_ms for name, at_ms in self._listed().items() if name.owner == owner}

    def committed(self, name: TransactionName) -> bool:
        return bool(self._on_prepared("SELECT 1 FROM {} WHERE name = %s", str(name)))

    def entered(self, entry: LedgerEntry) -> bool:
        with self._ledger_needed():
            return self._ledger().has(entry)

    def enter(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """See `PreparingStore`. Rows are deleted by their whole key: a search would wait at uncommitted ones."""
        names = [str(name)] if name is not None else self._names_of(entry)
        with self._transaction_with_ledger(entry.pipeline, entry.sink):
            self._ledger().claim(entry)
            for prepared in names:
                self._on_prepared("DELETE FROM {} WHERE name = %s", prepared)

    def _names_of(self, entry: LedgerEntry) -> list[str]:
        left = self.left(entry.pipeline, entry.sink)
        return [row.name for row in left if (row.subtask, row.checkpoint) == (entry.subtask, entry.checkpoint)]

    def left(self, pipeline: str, sink: str) -> list[PreparedRow]:
        rows = self._on_prepared(
            f"SELECT {_NAMES} FROM {{}} WHERE pipeline = %s AND sink = %s ORDER BY name", pipeline, sink
        )
        return [PreparedRow(**dict(zip(COLUMNS, row, strict=True))) for row in rows]

    def _on_prepared(self, statement: str, *values: Any) -> list[Row]:
        return self._session.ask(statement.format(self._prepared_table().name.replace("%", "%%")), *values)
