"""The PostgreSQL store: rows and their ledger row, in one transaction.

Invariants: a statement that writes stands behind the ledger's compare-and-set, in its transaction; what a COPY is given
was written for the columns that it names, as they are then, by the mark of every line; after any doubt the next call
asks the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from psycopg import sql

from exactlyonce.pipeline.delivery import EXACTLY_ONCE
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.postgres import catalogue
from exactlyonce.sinks.postgres.catalogue import Target
from exactlyonce.sinks.postgres.column_types import column_text, meaning
from exactlyonce.sinks.postgres.connection import Limits, PostgresConnection
from exactlyonce.sinks.postgres.copy_text import CopyEncoder, mark_of, unmarked
from exactlyonce.sinks.postgres.ledger import LedgerTable, SinkName, still_held
from exactlyonce.sinks.postgres.refusals import LockHeld
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.sql.table import column_problems, row_fields
from exactlyonce.sinks.write_ahead.ledger import SinkLedger
from exactlyonce.sinks.write_ahead.store import LedgerEntry, RowEncoder, Store

_STAGE = sql.Identifier("pg_temp", "exactlyonce_rows")
_LINE = sql.Identifier("exactlyonce_line")
"""The order of the rows in the stage: of one key, the last one counts."""


class PostgresStore(Store):
    """A connection to the table of one sink."""

    def __init__(self, sink: PostgresSink[Any], type_: Any, limits: Limits | None = None) -> None:
        self._sink = sink
        self._type = type_
        self._limits = limits or Limits(answer=duration_ms(sink.answer_timeout) / 1000)
        self._fields = row_fields(type_, sink.mode, sink.key)
        self._connection = PostgresConnection(sink.dsn, self._limits)
        self._target: Target | None = None

    def check(self) -> None:
        """See `Store`; the table, and the ledger of what is to be exactly once, are made if need be.

        Where a ledger is there already, a table that is missing is left to `fence`: it knows whether it had rows.
        """
        target = self._inspected()
        if self._sink.delivery != EXACTLY_ONCE:
            self._target = target or self._checked(None)
            return
        ledger = self._ledger_beside(target)
        if target is None and not ledger.exists:
            target = self._checked(None)
        ledger.create()
        ledger.check()
        self._target = target

    def inspect(self) -> None:
        """See `InspectableStore`."""
        target = self._inspected()
        if self._sink.delivery == EXACTLY_ONCE and (ledger := self._ledger_beside(target)).exists:
            ledger.check()

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        """See `InspectableStore`."""
        ledger = self._ledger_beside(catalogue.find(self._connection, *self._sink.place))
        return ledger.of_sink(SinkName(pipeline, sink)) if ledger.exists else SinkLedger()

    def _inspected(self) -> Target | None:
        """The table, which takes the rows; None if it is still to be made."""
        catalogue.check_server(self._connection)
        target = catalogue.find(self._connection, *self._sink.place)
        if target is None and not self._sink.create:
            raise self._missing()
        return None if target is None else self._checked(target)

    def _checked(self, target: Target | None) -> Target:
        """The table, which takes the rows; it is made if it is None."""
        if target is None:
            target = catalogue.create(self._connection, self._sink, self._type)
        catalogue.check_target(self._connection, self._sink, self._fields, target)
        return target

    def encoder(self) -> RowEncoder:
        """See `Store`; it looks at the columns anew."""
        target = catalogue.find(self._connection, *self._sink.place)
        if target is None:
            raise self._missing()
        catalogue.check_target(self._connection, self._sink, self._fields, target)
        table = f"table {target.shown}"
        texts = [column_text(field, table, target.columns[field.name]) for field in self._fields]
        indexed = self._sink.key if self._sink.mode == "upsert" else ()
        return CopyEncoder(texts, self._mark(target), indexed=indexed)

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store`. Whoever of an older incarnation applies something has a moment to end; then its session ends."""
        name = SinkName(pipeline, sink)
        if self._target is None:
            self._target = catalogue.find(self._connection, *self._sink.place)
        missing = self._target is None and self._sink.create
        ledger = self._ledger() if not missing else self._ledger_beside(None)
        with ledger.needed():
            ledger.refuse(name, incarnation, origin)
            if missing and (lost := ledger.newest(name)):
                raise self._dropped(ledger, name, lost)
        if missing:
            self._target = self._checked(None)
        try:
            return self._fenced(name, incarnation, origin, self._limits.grace)
        except LockHeld:
            ended = ledger.end_sessions(name)
            try:
                return self._fenced(name, incarnation, origin, self._limits.lock)
            except LockHeld:
                raise still_held(name, ended) from None

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """See `Store`."""
        ledger = self._ledger()
        session = SinkName(entry.pipeline, entry.sink).session
        with ledger.needed(), self._connection.transaction(session):
            applied = ledger.claim(entry)
            if applied:
                self._write(chunks)
        return applied

    def write(self, chunks: Iterable[bytes]) -> None:
        """See `Store`."""
        with self._connection.transaction("exactlyonce"):
            self._write(chunks)

    def close(self) -> None:
        """See `Store`."""
        self._connection.close()

    def _fenced(self, name: SinkName, incarnation: int, origin: str, lock_s: float) -> Mapping[int, int]:
        with self._connection.transaction(name.session, lock_s):
            return self._ledger().fence(name, incarnation, origin)

    def _found(self) -> Target:
        """The table as it was found."""
        if self._target is None:
            self._target = catalogue.find(self._connection, *self._sink.place)
        if self._target is None:
            raise self._missing()
        return self._target

    def _ledger(self) -> LedgerTable:
        return LedgerTable(self._connection, self._found().schema)

    def _ledger_beside(self, target: Target | None) -> LedgerTable:
        """The ledger in the schema of the table, or in that in which it would be made."""
        schema = target.schema if target is not None else catalogue.schema_of(self._connection, self._sink)
        return LedgerTable(self._connection, schema)

    def _dropped(self, ledger: LedgerTable, name: SinkName, checkpoint: int) -> StoreError:
        """For a table that is missing, although rows were written to it."""
        return StoreError(
            f"There is no table {self._sink.table!r}, but the ledger {ledger.shown} has checkpoint {checkpoint} of "
            f"sink {name.sink!r}, pipeline {name.pipeline!r}: the table was dropped or renamed, with all rows so far. "
            f"It is not made anew. Restore it, with the ledger, from one backup; or create it, empty, if the rows that "
            f"come from now on are all that is wanted."
        )

    def _missing(self) -> StoreError:
        schema, table = self._sink.place
        where = f"schema {schema!r}" if schema is not None else "any schema of the role's search_path"
        return StoreError(
            f"There is no table {table!r} in {where}. Create it, or set create=True; a name in capitals is meant as it "
            f"is written."
        )

    def _mark(self, target: Target) -> str:
        """Of rows that are encoded for the table."""
        meanings = [meaning(target.columns[field.name]) for field in self._fields]
        return mark_of(self._sink.mode, self._sink.key, self._fields, meanings)

    def _written_to(self) -> Target:
        """The table as it is now, by the name beside which its ledger is, wherever the search_path leads by now."""
        target = self._found()
        if not catalogue.has_its_shape(self._connection, target):
            self._target = catalogue.find(self._connection, target.schema, target.table)
            target = self._found()
        if wrong := list(column_problems(self._fields, target.columns, inserts=self._sink.mode != "delete")):
            raise StoreError(f"Rows cannot be written to table {target.shown} any more: {'; '.join(wrong)}.")
        return target

    def _write(self, chunks: Iterable[bytes]) -> None:
        """Part of a transaction: the rows, as the sink's mode has it. What they go into is looked at when it is locked,
        which explaining does, with the same rights, and no trigger is run."""
        lock = sql.SQL("EXPLAIN DELETE FROM {}" if self._sink.mode == "delete" else "EXPLAIN INSERT INTO {} SELECT")
        self._connection.rows(lock.format(self._found().name))
        target = self._written_to()
        self._insert(target, self._unmarked(chunks, self._mark(target)))

    def _insert(self, target: Target, lines: Iterable[bytes]) -> None:
        columns = sql.SQL(", ").join(sql.Identifier(field.name) for field in self._fields)
        copy = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT text, ENCODING 'UTF8')")
        if self._sink.mode == "append":
            self._connection.copy(copy.format(target.name, columns), lines)
            return
        self._connection.rows(
            sql.SQL(_MAKE_STAGE).format(stage=_STAGE, columns=columns, target=target.name, line=_LINE)
        )
        self._connection.copy(copy.format(_STAGE, columns), lines)
        key = sql.SQL(", ").join(map(sql.Identifier, self._sink.key))
        parts = {"target": target.name, "columns": columns, "key": key, "stage": _STAGE, "line": _LINE}
        if self._sink.mode == "delete":
            self._connection.rows(sql.SQL(_DELETE).format(**parts))
        else:
            self._connection.rows(sql.SQL(_UPSERT).format(**parts, update=self._update()))

    def _update(self) -> sql.Composable:
        """What becomes of a row that is there."""
        names = [sql.Identifier(field.name) for field in self._fields if field.name not in self._sink.key]
        if not names:
            return sql.SQL("NOTHING")
        sets = sql.SQL(", ").join(sql.SQL("{} = excluded.{}").format(name, name) for name in names)
        return sql.SQL("UPDATE SET {}").format(sets)

    def _unmarked(self, chunks: Iterable[bytes], mark: str) -> Iterator[bytes]:
        for chunk in chunks:
            lines = unmarked(chunk, mark.encode())
            if lines is None:
                raise self._encoded_otherwise()
            yield lines

    def _encoded_otherwise(self) -> StoreError:
        return StoreError(
            f"Rows for {self._sink.table!r} wait that were encoded for other columns, or other types of them, another "
            f"key or mode than there are now. Run the pipeline as it was before, with the table as it was, until it "
            f"has ended cleanly; then change it."
        )


_MAKE_STAGE = """
CREATE TEMPORARY TABLE {stage} ON COMMIT DROP AS SELECT {columns} FROM {target} WITH NO DATA;
ALTER TABLE {stage} ADD COLUMN {line} bigint GENERATED ALWAYS AS IDENTITY
"""
_UPSERT = """
INSERT INTO {target} ({columns})
SELECT DISTINCT ON ({key}) {columns} FROM {stage} ORDER BY {key}, {line} DESC
ON CONFLICT ({key}) DO {update}
"""
"""In the order of the key, so that two that meet the same rows wait for each other instead of dying of it."""
_DELETE = "DELETE FROM {target} WHERE ({key}) IN (SELECT {key} FROM {stage})"
