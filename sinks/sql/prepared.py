"""The store of an SQL sink whose transactions are prepared, and the table of those that were committed.

Invariants: a transaction that is prepared has inserted its row of `exactlyonce_prepared`; no statement of a writer
touches a row that another transaction may have written, and none of a committer searches among them, so that none waits
for what is prepared. "There is no such transaction" says nothing: it is the answer for what was committed and for what
is lost.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from exactlyonce.sinks.prepared.store import PreparedRow, PreparingStore, TransactionName, owner_of
from exactlyonce.sinks.sql.ledger import Row
from exactlyonce.sinks.sql.store import SinkT, SqlStore, TableT
from exactlyonce.sinks.write_ahead.store import LedgerEntry

COLUMNS = PreparedRow.__struct_fields__
_NAMES, _MARKS = ", ".join(COLUMNS), ", ".join(["%s"] * len(COLUMNS))


class PreparingSqlStore(SqlStore[SinkT, TableT], PreparingStore):
    """See `PreparingStore`."""

    owner_length_max: ClassVar[int]
    """Of a `TransactionName.owner`, so that the server takes the whole name."""

    # --- what a dialect gives ---------------------------------------------------------------------------------------

    @abstractmethod
    def _require_that_it_prepares(self) -> None:
        """Raise `StoreError` unless the server keeps what is prepared, and shows it."""

    @property
    @abstractmethod
    def _place(self) -> str:
        """The schema or database of the ledger; names of transactions are the server's."""

    @property
    @abstractmethod
    def _prepared_name(self) -> str:
        """The table of prepared transactions, as SQL."""

    @abstractmethod
    def _has_prepared_table(self) -> bool: ...

    @abstractmethod
    def _create_prepared_table(self) -> None: ...

    @abstractmethod
    def _check_prepared_table(self) -> None:
        """Raise `StoreError` unless it is what it should be, and may be written to."""

    @abstractmethod
    def _listed(self) -> dict[TransactionName, int | None]:
        """All prepared transactions of exactlyonce in the server; see `PreparingStore.prepared_at`."""

    @abstractmethod
    def _prepare(self, name: str) -> None:
        """Prepare the transaction that is open."""

    @abstractmethod
    def _ask(self, statement: str, *values: object) -> list[Row]:
        """See `Session.ask`."""

    # --- `PreparingStore` -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See `Store`; and whether the server prepares transactions."""
        super().check()
        self._require_that_it_prepares()
        if not self._has_prepared_table():
            self._create_prepared_table()
        self._check_prepared_table()

    def inspect(self) -> None:
        """See `InspectableStore`."""
        super().inspect()
        self._require_that_it_prepares()
        if self._has_prepared_table():
            self._check_prepared_table()

    def owner(self, pipeline: str, sink: str) -> str:
        """See `PreparingStore`."""
        return owner_of(pipeline, sink, self._place, self.owner_length_max)

    def add(self, chunk: bytes) -> None:
        """See `PreparingStore`."""
        self._write([chunk])

    def prepare(self, row: PreparedRow) -> None:
        """See `PreparingStore`."""
        self._on_prepared(f"INSERT INTO {{}} ({_NAMES}) VALUES ({_MARKS})", *(getattr(row, name) for name in COLUMNS))
        self._prepare(row.name)

    def prepared(self, owner: str) -> list[TransactionName]:
        """See `PreparingStore`."""
        return list(self.prepared_at(owner))

    def prepared_at(self, owner: str) -> dict[TransactionName, int | None]:
        """See `PreparingStore`."""
        return {name: at_ms for name, at_ms in self._listed().items() if name.owner == owner}

    def committed(self, name: TransactionName) -> bool:
        """See `PreparingStore`."""
        return bool(self._on_prepared("SELECT 1 FROM {} WHERE name = %s", str(name)))

    def entered(self, entry: LedgerEntry) -> bool:
        """See `PreparingStore`."""
        with self._ledger_needed():
            return self._ledger().has(entry)

    def enter(self, entry: LedgerEntry, name: TransactionName | None) -> None:
        """See `PreparingStore`. Rows are deleted by their whole key: a search would wait at those not committed yet."""
        names = [str(name)] if name is not None else self._names_of(entry)
        with self._transaction_with_ledger(entry.pipeline, entry.sink):
            self._ledger().claim(entry)
            for prepared in names:
                self._on_prepared("DELETE FROM {} WHERE name = %s", prepared)

    def _names_of(self, entry: LedgerEntry) -> list[str]:
        left = self.left(entry.pipeline, entry.sink)
        return [row.name for row in left if (row.subtask, row.checkpoint) == (entry.subtask, entry.checkpoint)]

    def left(self, pipeline: str, sink: str) -> list[PreparedRow]:
        """See `PreparingStore`."""
        rows = self._on_prepared(
            f"SELECT {_NAMES} FROM {{}} WHERE pipeline = %s AND sink = %s ORDER BY name", pipeline, sink
        )
        return [PreparedRow(**dict(zip(COLUMNS, row, strict=True))) for row in rows]

    def _on_prepared(self, statement: str, *values: Any) -> list[Row]:
        return self._ask(statement.format(self._prepared_name.replace("%", "%%")), *values)
