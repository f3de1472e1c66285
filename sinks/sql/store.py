"""The store of an SQL sink: rows and their ledger row in one transaction of the database.

Invariants: a statement that writes rows follows the ledger's compare-and-set, in its transaction; rows are written only
into columns of the meaning that they were encoded for, by the mark of each row; a table that is gone, though the ledger
says that rows were written to it, is not made again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.sql.ledger import Ledger
from exactlyonce.sinks.sql.sink import TableSink
from exactlyonce.sinks.sql.table import row_fields
from exactlyonce.sinks.write_ahead.store import LedgerEntry, RowEncoder, SinkLedger, Store

SinkT = TypeVar("SinkT", bound=TableSink[Any])
TableT = TypeVar("TableT")
"""What a dialect knows of a table."""


class SqlStore(Store, Generic[SinkT, TableT]):
    """A connection to the table of one sink. A dialect says how a server is asked about tables, and gets rows."""

    def __init__(self, sink: SinkT, type_: Any) -> None:
        self._sink, self._type = sink, type_
        self._fields = row_fields(type_, sink.mode, sink.key)
        self._table: TableT | None = None
        """That which rows go into, as it was looked at last."""

    # --- what a dialect gives ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _shown(self) -> str:
        """The table and its place, for people."""

    @property
    @abstractmethod
    def _how_to_see(self) -> str:
        """How a table that is there may come to be seen."""

    def _check_server(self) -> None:
        """Raise `StoreError` unless the server and its database are such as are written to."""

    @abstractmethod
    def _find(self) -> TableT | None:
        """The table of the sink's name; None if there is none."""

    @abstractmethod
    def _create(self) -> TableT:
        """Create the table, with the fields of the type as its columns, unless another process does so at once."""

    @abstractmethod
    def _check_table(self, table: TableT) -> None:
        """Raise `StoreError` unless the table takes the rows."""

    @abstractmethod
    def _ledger(self) -> Ledger:
        """The ledger beside the table, or where it would be created."""

    @abstractmethod
    def _has_ledger(self) -> bool:
        """Whether there is such a table."""

    @abstractmethod
    def _create_ledger(self) -> None:
        """Create it."""

    @abstractmethod
    def _check_ledger(self) -> None:
        """Raise `StoreError` unless it is a ledger, keeps what it is given, and may be written to."""

    @abstractmethod
    def _transaction(self, session: str = "") -> AbstractContextManager[None]:
        """A transaction that is committed unless its body raises; *session*: as in `Session.transaction`."""

    @abstractmethod
    def _write(self, chunks: Iterable[bytes]) -> None:
        """Part of a transaction: the rows, as the sink's mode has it."""

    @abstractmethod
    def _encoder(self, table: TableT) -> RowEncoder:
        """The encoder for the columns of the table."""

    # --- `Store` ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See `Store`. Where a ledger is there already, a table that is missing is left to `fence`: it knows whether
        the table had rows."""
        self._check_server()
        had_ledger = self._is_exact and self._has_ledger()
        if not (had_ledger and self._to_be_made()):
            self._ready_table()
        if self._is_exact:
            if not had_ledger:
                self._create_ledger()
            self._check_ledger()

    def inspect(self) -> None:
        """See `InspectableStore`."""
        self._check_server()
        if not self._to_be_made():
            self._ready_table()
        if self._is_exact and self._has_ledger():
            self._check_ledger()

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        """See `InspectableStore`."""
        return self._ledger().of_sink(pipeline, sink) if self._has_ledger() else SinkLedger()

    def encoder(self) -> RowEncoder:
        """See `Store`; it looks at the columns anew."""
        if (table := self._find()) is None:
            raise self._missing()
        return self._encoder(table)

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store`. A table that is missing is made, unless the ledger says that it had rows."""
        with self._ledger_needed():
            known = self._ledger().of_sink(pipeline, sink)
        known.fenced(pipeline, sink, incarnation, origin)
        if not self._is_there():
            if lost := max(known.checkpoints.values(), default=0):
                raise StoreError(
                    f"There is no table {self._shown}, but the ledger {self._ledger().shown} has checkpoint {lost} of "
                    f"sink {sink!r}, pipeline {pipeline!r}: the table was dropped or renamed, with all rows so far. It "
                    f"is not made anew. Restore it, with the ledger, from one backup; or create it, empty, if the rows "
                    f"that come from now on are all that is wanted."
                )
            self._ready_table()
        return self._fence(pipeline, sink, incarnation, origin)

    def _fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        with self._transaction_with_ledger(pipeline, sink):
            return self._ledger().fence(pipeline, sink, incarnation, origin)

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """See `Store`."""
        with self._transaction_with_ledger(entry.pipeline, entry.sink):
            is_due = self._ledger().claim(entry)
            if is_due:
                self._write(chunks)
        return is_due

    def write(self, chunks: Iterable[bytes]) -> None:
        """See `Store`."""
        with self._transaction():
            self._write(chunks)

    # --- what dialects share ----------------------------------------------------------------------------------------

    @property
    def _is_exact(self) -> bool:
        return self._sink.delivery == EXACTLY_ONCE

    def _is_there(self) -> bool:
        """Whether the table that rows have been written to is there."""
        return self._find() is not None

    def _to_be_made(self) -> bool:
        """Whether the table is missing, and is made then."""
        return self._sink.create and self._find() is None

    def _ready_table(self) -> None:
        """Make the table if need be; raise `StoreError` unless it takes the rows."""
        if (table := self._find()) is None:
            if not self._sink.create:
                raise self._missing()
            table = self._create()
        self._check_table(table)
        self._table = table

    @contextmanager
    def _transaction_with_ledger(self, pipeline: str, sink: str) -> Iterator[None]:
        with self._ledger_needed(), self._transaction(self._session_name(pipeline, sink)):
            yield

    def _session_name(self, pipeline: str, sink: str) -> str:
        """The name of a session that writes rows of the sink, where the server names sessions."""
        return ""

    @contextmanager
    def _ledger_needed(self) -> Iterator[None]:
        """What is refused within is refused as what it is where the ledger is gone: an empty one would let rows come
        twice, so that none is made here."""
        try:
            yield
        except StoreError:
            if self._has_ledger():
                raise
            raise StoreError(
                f"The ledger {self._ledger().shown} is gone. Restore it with the table from one backup: without it "
                f"nobody knows which rows are in the table."
            ) from None

    def _missing(self) -> StoreError:
        return StoreError(
            f"There is no table {self._shown}, or the user may not see it and its columns. Create it, or give the sink "
            f"create=True; {self._how_to_see}."
        )

    def _require_none(self, problems: Iterable[str], shown: str = "") -> None:
        if wrong := list(problems):
            raise StoreError(f"Rows cannot be written to table {shown or self._shown}: {'; '.join(wrong)}.")

    def _encoded_otherwise(self) -> StoreError:
        return StoreError(
            f"Rows for table {self._shown} wait that were encoded for other columns, or other types of them, another "
            f"key or mode than there are now. Run the pipeline as it was before, with the table as it was, until it "
            f"has ended cleanly; then change it."
        )
