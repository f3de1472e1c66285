"""The store of an SQL sink: rows and their ledger row in one transaction of the database.

Invariants: a statement that writes rows follows the ledger's compare-and-set, in its transaction; rows are written only
into columns of the meaning that they were encoded for, by the mark of each row; a missing table to which rows were
written, by the ledger, is not created again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Generic, TypeVar

from exactlyonce.pipeline.columns import RowField
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger
from exactlyonce.sinks.sql.ledger import Ledger, OwnTable, Session
from exactlyonce.sinks.sql.table import Table, TableSink, column_problems, mode_of, row_fields
from exactlyonce.sinks.write_ahead.store import RowEncoder, Store

SinkT = TypeVar("SinkT", bound=TableSink[Any])
TableT = TypeVar("TableT", bound=Table[Any])


class SqlStore(Store, Generic[SinkT, TableT]):
    """A connection to the table of one sink. The dialect asks the server about tables, and writes rows."""

    unless_there: ClassVar[str]
    """See `Ledger`."""
    shared: ClassVar[str]
    """See `Ledger`."""

    def __init__(self, sink: SinkT, type_: Any, session: Session) -> None:
        self._sink, self._type, self._session = sink, type_, session
        self._mode = mode_of(sink.mode, type_)
        self._fields = row_fields(type_, sink.mode, sink.key_columns)
        self._table: TableT | None = None
        """The table that rows go into, as of the last look."""

    # --- the dialect ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _shown(self) -> str:
        """The table and its place, for people."""

    @property
    @abstractmethod
    def _how_to_see(self) -> str:
        """The advice for an existing table that is not found."""

    def _check_server(self) -> None:
        """Raise `StoreError` unless the server and its database can be written to."""

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
    def _type_problem(self, field: RowField, column: Any) -> str | None:
        """The reason why a column of the table cannot take a field."""

    @abstractmethod
    def _ledger_table(self) -> OwnTable:
        """The ledger beside the table, or where it would be created."""

    @abstractmethod
    def _write(self, chunks: Iterable[bytes]) -> None:
        """Part of a transaction: write the rows by the sink's mode."""

    @abstractmethod
    def _encoder(self, table: TableT) -> RowEncoder:
        """The encoder for the columns of the table, which take the fields."""

    # --- `Store` ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See `Store`. If there is a ledger already, a missing table is left to `fence`, which knows whether it
        had rows."""
        self._check_server()
        had_ledger = self._is_exact and self._ledger_table().exists
        if not (had_ledger and self._to_be_made()):
            self._ready_table()
        if self._is_exact:
            ledger = self._ledger_table()
            ledger.create()
            ledger.check()

    def inspect(self) -> None:
        self._check_server()
        if not self._to_be_made():
            self._ready_table()
        if self._is_exact and (ledger := self._ledger_table()).exists:
            ledger.check()

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        return self._ledger().of_sink(pipeline, sink) if self._ledger_table().exists else SinkLedger()

    def encoder(self) -> RowEncoder:
        if (table := self._find()) is None:
            raise self._missing()
        self._require_none(self._column_problems(table))
        return self._encoder(table)

    def close(self) -> None:
        self._session.close()

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store`. A missing table is created, unless it had rows by the ledger."""
        with self._ledger_needed():
            known = self._ledger().of_sink(pipeline, sink)
        known.fenced(pipeline, sink, incarnation, origin)
        if not self._is_there():
            if lost := max(known.checkpoints.values(), default=0):
                raise StoreError(
                    f"There is no table {self._shown}, but the ledger {self._ledger_table().shown} has checkpoint "
                    f"{lost} of sink {sink!r}, pipeline {pipeline!r}: the table was dropped or renamed, with all rows "
                    f"so far. It is not made anew. Restore it, with the ledger, from one backup; or create it, empty, "
                    f"if only the rows from now on are wanted."
                )
            self._ready_table()
        return self._fence(pipeline, sink, incarnation, origin)

    def _fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        with self._transaction_with_ledger(pipeline, sink):
            return self._ledger().fence(pipeline, sink, incarnation, origin)

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        with self._transaction_with_ledger(entry.pipeline, entry.sink):
            is_due = self._ledger().claim(entry)
            if is_due:
                self._write(chunks)
        return is_due

    def write(self, chunks: Iterable[bytes]) -> None:
        with self._transaction():
            self._write(chunks)

    # --- shared by the dialects -------------------------------------------------------------------------------------

    def _ledger(self) -> Ledger:
        return Ledger(
            session=self._session, table=self._ledger_table(), unless_there=self.unless_there, shared=self.shared
        )

    def _transaction(self, name: str = "exactlyonce") -> AbstractContextManager[None]:
        return self._session.transaction(name)

    @property
    def _is_exact(self) -> bool:
        return self._sink.delivery == EXACTLY_ONCE

    def _is_there(self) -> bool:
        """Whether the table that rows go into exists."""
        return self._find() is not None

    def _to_be_made(self) -> bool:
        """Whether the table is missing, and is to be created."""
        return self._sink.create and self._find() is None

    def _ready_table(self) -> None:
        """Create the table if need be; raise `StoreError` unless it takes the rows."""
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
        """The name of a session that writes rows of the sink, if the server names sessions."""
        return ""

    @contextmanager
    def _ledger_needed(self) -> Iterator[None]:
        """Say so if an error within comes from a missing ledger. It is not created here: with an empty one, rows would
        come twice."""
        try:
            yield
        except StoreError:
            ledger = self._ledger_table()
            if ledger.exists:
                raise
            raise StoreError(
                f"The ledger {ledger.shown} is gone. Restore it with the table from one backup: without it nobody "
                f"knows which rows are in the table."
            ) from None

    def _column_problems(self, table: TableT) -> Iterator[str]:
        """The reasons why the columns of the table cannot take the fields."""
        yield from column_problems(self._fields, table.columns, inserts=self._sink.mode != "delete")
        for field in self._fields:
            if field.name in table.columns and (problem := self._type_problem(field, table.columns[field.name])):
                yield problem

    def _require_columns(self, table: TableT) -> None:
        """Raise `StoreError` if a column is missing. Types are compared by the marks of rows."""
        self._require_none(column_problems(self._fields, table.columns, inserts=self._sink.mode != "delete"))

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
            f"Rows for table {self._shown} wait that were encoded for other columns or types, another key or another "
            f"mode. Run the pipeline as it was before, with the table as it was, until it has ended cleanly; then "
            f"change it."
        )
