"""The committer of a table in a DuckDB file: the rows of all subtasks at a checkpoint, in one transaction.

Invariants: rows and ledger change in one transaction. The file's lock lets one process in at a time. Within a process,
each transaction changes the sink's row of the ledger, so one of two at once fails. So a commit of an older incarnation
has ended when a fence returns, or fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa
from msgspec import structs

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors import refusals
from exactlyonce.pipeline.columns import Column
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.committer import CommitterContext, StoreView
from exactlyonce.sinks.duckdb.sink import LEDGER, DuckDBSink
from exactlyonce.sinks.duckdb.writer import KIND, staged_schema
from exactlyonce.sinks.lake.columns import DELETED
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger
from exactlyonce.sinks.sql.table import CHANGES, TableColumn, column_problems, mode_of
from exactlyonce.sinks.write_ahead.writer import staged_chunks

INSERTED_BYTES = 32 << 20
"""The size of staged rows that one statement inserts; all of a checkpoint are one transaction."""
_ROWS, _STAGED, _KEYS = "exactlyonce_rows", "exactlyonce_staged", "exactlyonce_keys"
"""The Arrow table of an insert; the temporary table of an upsert or a delete, with rows in their order; one with the
types of the key alone."""
_CREATE_LEDGER = f"""CREATE TABLE IF NOT EXISTS {LEDGER}
    (pipeline VARCHAR, sink VARCHAR, ledger VARCHAR NOT NULL, PRIMARY KEY (pipeline, sink))"""
_TABLE = """SELECT 1 FROM duckdb_tables()
    WHERE database_name = current_database() AND lower(schema_name) = lower(?) AND lower(table_name) = lower(?)"""
"""Slow in a new connection, by the time that a commit takes otherwise: the start asks it, a commit does not."""
_COLLATED = re.compile(r"\bk(\d+) VARCHAR COLLATE ([\w.]+)")
"""A column in `duckdb_tables().sql`, which alone has its collation."""
_BYTES = ("binary", "c", "posix")
"""The collations by which no two texts are equal."""
_ADVICE = re.compile(r"\.? *(See also https?://|However, ).*")
_REFUSALS = (
    (r"version number", "Upgrade duckdb where the pipeline runs, or write the file anew by an older DuckDB."),
    (r"not a valid DuckDB|Is a directory", "Correct the path; a file that a crash has left empty may be removed."),
    (r"[Cc]orrupt|checksum", "Restore it, with its ledger, from a backup."),
    (r"Permission denied|Operation not permitted", "Give this user the right to write it, and its folder."),
)
"""What another attempt would meet again, with the remedy."""
_PASSING = (
    (r"[Cc]onflicting lock|Could not set lock", "another process has it open, and no two may while one writes"),
    (r"No space left|Disk quota", "its disk is full"),
    (r"Read-only file system", "its disk is read-only"),
    (r"different configuration", "this process has it open in another way"),
    (r"TransactionContext|write-write conflict|file handle conflict", "this process has another transaction there"),
    (r"Out of Memory", "memory is short"),
)
_TRANSIENT = (
    duckdb.IOException, duckdb.TransactionException, duckdb.ConnectionException, duckdb.OutOfMemoryException,
    duckdb.InterruptException, duckdb.FatalException,
)  # fmt: skip


_CLOSING = "Unique file handle conflict"
"""The error of opening a file that another thread is closing."""


class DuckDBFile:
    """A file of DuckDB, open within `transaction` alone: its lock keeps other processes out meanwhile."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def shown(self) -> str:
        """The file as a sentence begins."""
        return f"DuckDB file {os.path.abspath(self.path)}"

    @contextmanager
    def transaction(self, *, creates: bool = False, reads: bool = False) -> Iterator[Any]:
        """A connection in a transaction, committed unless its body raises. *creates*: a missing file; *reads*: nothing
        is written, and other processes may read meanwhile."""
        if not creates and not os.path.exists(self.path):
            raise refusals.passing(self.shown, "is its disk mounted?", "there is no such file")
        try:
            connection = duckdb.connect(self.path, read_only=reads)
            try:
                connection.begin()
                yield connection
                connection.commit()
            finally:
                connection.close()
        except duckdb.Error as error:
            raise self._explained(error) from None

    def _explained(self, error: duckdb.Error) -> StoreError | StoreUnavailable:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = _ADVICE.sub("", first).rstrip(".!")
        for pattern, advice in _REFUSALS:
            if isinstance(error, duckdb.IOException) and re.search(pattern, text):
                return refusals.refused(self.shown, text, advice)
        if isinstance(error, _TRANSIENT) or _CLOSING in text:
            why = (why for pattern, why in _PASSING if re.search(pattern, text))
            return refusals.passing(self.shown, next(why, "it cannot be read or written"), text)
        return refusals.refused(self.shown, text, "Correct the table, or the sink, and run again.")


class DuckDBCommitter:
    """See `Committer`. *sink* describes the table."""

    kind = KIND

    def __init__(self, context: CommitterContext, sink: DuckDBSink[Any]) -> None:
        self._context, self._sink = context, sink
        self._file = DuckDBFile(os.fspath(sink.path))
        self._mode = mode_of(sink.mode, context.type)
        self._columns = sink.columns(context.type)
        self._schema = staged_schema(self._columns, changes=self._mode == CHANGES)

    @property
    def ledger(self) -> str:
        """See `Committer.ledger`."""
        return self._sink.ledger_of(self._context.pipeline, self._context.sink)

    # --- the start --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See `Committer`. A table that had rows, by the ledger, is not created again."""
        self._require_file()
        with self._file.transaction(creates=self._sink.create) as connection:
            connection.execute(_CREATE_LEDGER)
            checkpoint = max(self._ledger(connection).checkpoints.values(), default=0)
            if not _exists(connection, *self._sink.place):
                if not self._sink.create:
                    raise self._missing()
                if checkpoint:
                    raise StoreError(
                        f"{self._file.shown} has no table {self._sink.table}, but its ledger has checkpoint "
                        f"{checkpoint} of the sink: the table was dropped or renamed, with all rows so far. It is not "
                        f"made anew. Restore the file; or create the table, empty, if only the rows from now on are "
                        f"wanted."
                    )
                columns = ", ".join(self._definitions(connection))
                connection.execute(f"CREATE TABLE {self._target(connection)} ({columns})")
            self._require_start(connection)
            self._write(connection, ())

    def _require_file(self) -> None:
        """Raise `StoreError` unless the file is there, or may be made in its folder."""
        folder = os.path.dirname(os.path.abspath(self._file.path))
        if not os.path.isdir(folder):
            raise StoreError(f"{self._file.shown}: its folder is missing. Make it, mount it, or correct the path.")
        if not self._sink.create and not os.path.exists(self._file.path):
            raise StoreError(f"{self._file.shown} does not exist. Create it, set create=True, or correct the path.")

    def _definitions(self, connection: Any) -> Iterator[str]:
        """The columns of a new table. It has no primary key: a merge needs none, and the index doubles its size."""
        types = self._types(connection)
        for column in self._columns:
            ending = "" if column.field.nullable else " NOT NULL"
            yield f"{_quoted(column.field.name)} {types[column.field.name]}{ending}"

    def _types(self, connection: Any) -> dict[str, str]:
        """DuckDB's type of each written column, by its name: what the Arrow types are to DuckDB, but for UUIDs."""
        connection.register(_ROWS, self._schema.empty_table())
        types = {name: type_ for name, type_, *_ in connection.execute(f"DESCRIBE SELECT * FROM {_ROWS}").fetchall()}
        uuids = {column.field.name: "UUID" for column in self._columns if column.shape.form is Form.UUID}
        return {**types, **uuids}

    def _require_start(self, connection: Any) -> None:
        """`_require_table`, and what only the start asks: `StoreError` if the key goes by a collation. Then keys of one
        checkpoint would be told apart, and those of several not."""
        self._require_table(connection)
        keys, target = self._sink.key_columns, self._target(connection)
        if not keys:
            return
        own = ", ".join(f"{_quoted(key)} AS k{place}" for place, key in enumerate(keys))
        connection.execute(f"CREATE TEMPORARY TABLE {_KEYS} AS SELECT {own} FROM {target} LIMIT 0")
        asked = connection.execute("SELECT sql FROM duckdb_tables() WHERE temporary AND table_name = ?", [_KEYS])
        problems = [
            f"its key column {keys[int(place)]!r} has the collation {name}, by which different keys are equal: "
            f"ALTER TABLE {target} ALTER {_quoted(keys[int(place)])} TYPE VARCHAR"
            for place, name in _COLLATED.findall(asked.fetchone()[0])
            if name.lower() not in _BYTES
        ]
        (default,) = connection.execute("SELECT current_setting('default_collation')").fetchone()
        if default.lower() not in ("", *_BYTES):
            problems.append(
                f"this process has set default_collation to {default}, by which different keys are equal: leave it out"
            )
        if problems:
            raise self._unfit(problems)

    def _require_table(self, connection: Any) -> None:
        """Raise `StoreError` unless the table takes every value of the columns unchanged."""
        try:
            columns = _columns_in(connection, self._target(connection))
        except duckdb.CatalogException:
            raise self._missing() from None
        spelled = {column.field.name.lower(): column.field.name for column in self._columns}
        names = {name: spelled.get(name.lower(), name) for name in columns}
        present = {names[name]: structs.replace(column, name=names[name]) for name, column in columns.items()}
        inserts = self._mode != "delete"
        problems = list(column_problems([column.field for column in self._columns], present, inserts))
        types = self._types(connection)
        for column in self._columns:
            if (found := present.get(column.field.name)) is not None:
                problems += _misfits(column, found, types[column.field.name], self._target(connection))
        if problems:
            raise self._unfit(problems)

    def _unfit(self, problems: Sequence[str]) -> StoreError:
        where = f"{self._file.shown}, table {self._sink.table}"
        return StoreError(f"{where}: rows cannot be written: {'; '.join(problems)}.")

    def _missing(self) -> StoreError:
        return StoreError(
            f"{self._file.shown} has no table {self._sink.table}. Create it, or give the sink create=True."
        )

    # --- the ledger -------------------------------------------------------------------------------------------------

    def _ledger(self, connection: Any) -> SinkLedger:
        name = [self._context.pipeline, self._context.sink]
        try:
            row = connection.execute(f"SELECT ledger FROM {LEDGER} WHERE pipeline = ? AND sink = ?", name).fetchone()
        except duckdb.CatalogException:
            raise StoreError(
                f"{self._file.shown}: the ledger {LEDGER} is gone. Restore it with the table from one backup: without "
                f"it nobody knows which rows are in the table."
            ) from None
        except duckdb.BinderException:
            raise StoreError(f"{self._file.shown}: the table {LEDGER} is not that of exactlyonce. Rename it.") from None
        return SinkLedger.decode(row and row[0])

    def _note(self, connection: Any, ledger: SinkLedger) -> None:
        """Write the ledger: before any rows, so that of two transactions one fails at once."""
        values = [self._context.pipeline, self._context.sink, ledger.encode().decode()]
        connection.execute(f"INSERT OR REPLACE INTO {LEDGER} VALUES (?, ?, ?)", values)

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        with self._file.transaction() as connection:
            ledger = self._ledger(connection).fenced(self._context.pipeline, self._context.sink, incarnation, origin)
            self._note(connection, ledger)
        return ledger.checkpoints

    def clean(self, incarnation: int, attempt: int) -> None:
        """Nothing: blocks that no manifest names are dropped with all other orphans."""

    def look(self) -> StoreView:
        """See `Inspectable`: the ledger, and why the table does not take rows."""
        if self._sink.create and not os.path.exists(self._file.path):
            return StoreView()
        try:
            self._require_file()
            with self._file.transaction(reads=True) as connection:
                ledger = self._ledger(connection) if _exists(connection, "main", LEDGER) else SinkLedger()
                problem = ""
                if not self._sink.create or _exists(connection, *self._sink.place):
                    problem = _said(self._require_start, connection)
        except StoreError as error:
            return StoreView(problem=str(error))
        return StoreView.of(ledger, problem=problem)

    def close(self) -> None:
        """Every transaction has a connection of its own."""

    # --- commits ----------------------------------------------------------------------------------------------------

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """See `Committer`."""
        due: list[StoreCommittable] = []
        with self._file.transaction() as connection:
            ledger = self._ledger(connection)
            for committable in committables:
                entry = LedgerEntry.of(self._context.pipeline, self._context.sink, committable, incarnation, origin)
                if (after := ledger.applied(entry)) is not None:
                    ledger = after
                    due.append(committable)
            if due:
                self._note(connection, ledger)
                self._require_table(connection)
                self._write(connection, (chunk for one in due for chunk in staged_chunks(one, self._context.blocks)))
        return bool(due)

    def _write(self, connection: Any, chunks: Iterable[bytes]) -> None:
        """Part of a transaction: write rows by the sink's mode. Without *chunks*, DuckDB looks at the statements."""
        names = ", ".join(_quoted(column.field.name) for column in self._columns)
        insert = f"INSERT INTO {self._target(connection)} ({names}) SELECT {names} FROM {_ROWS}"
        if self._mode != "append":
            connection.register(_ROWS, self._schema.empty_table())
            connection.execute(f"CREATE TEMPORARY TABLE {_STAGED} AS SELECT * FROM {_ROWS}")
            insert = f"INSERT INTO {_STAGED} SELECT * FROM {_ROWS}"
        for rows in self._inserted(chunks):
            connection.register(_ROWS, rows)
            connection.execute(insert)
        if self._mode != "append":
            connection.execute(self._merge(connection, names))

    def _inserted(self, chunks: Iterable[bytes]) -> Iterator[Any]:
        """The rows of *chunks* as tables, at least an empty one."""
        tables, size = [self._schema.empty_table()], 0
        for chunk in chunks:
            tables.append(pa.ipc.open_stream(chunk).read_all())
            size += len(chunk)
            if size >= INSERTED_BYTES:
                yield pa.concat_tables(tables)
                tables, size = [self._schema.empty_table()], 0
        yield pa.concat_tables(tables)

    def _merge(self, connection: Any, names: str) -> str:
        """The statement that writes the last staged row of each key."""
        key = ", ".join(map(_quoted, self._sink.key_columns))
        own = [_quoted(column.field.name) for column in self._columns]
        sets = [f"{name} = newest.{name}" for name in own if name not in set(map(_quoted, self._sink.key_columns))]
        gone = f"newest.{DELETED}" if self._mode == CHANGES else str(self._mode == "delete")
        updates = f"WHEN MATCHED THEN UPDATE SET {', '.join(sets)}" if sets else ""
        values = ", ".join(f"newest.{name}" for name in own)
        newest = f"SELECT * FROM {_STAGED} QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY rowid DESC) = 1"
        return f"""MERGE INTO {self._target(connection)} AS target USING ({newest}) AS newest USING ({key})
            WHEN MATCHED AND {gone} THEN DELETE
            {updates}
            WHEN NOT MATCHED AND NOT {gone} THEN INSERT ({names}) VALUES ({values})"""

    def _target(self, connection: Any) -> str:
        """The table's name as SQL. The database has a name, too, that of the file, which may be a schema's."""
        (database,) = connection.execute("SELECT current_database()").fetchone()
        return ".".join(map(_quoted, (database, *self._sink.place)))


def _exists(connection: Any, schema: str, table: str) -> bool:
    """Whether there is a table, and not a view, of that name."""
    return connection.execute(_TABLE, [schema, table]).fetchone() is not None


def _columns_in(connection: Any, table: str) -> dict[str, TableColumn]:
    """The columns of a table by name, in their order; `CatalogException` if there is no such table."""
    return {
        name: TableColumn(name=name, type=type_, nullable=null == "YES", has_default=default is not None)
        for name, type_, null, _, default, _ in connection.execute(f"DESCRIBE {table}").fetchall()
    }


def _misfits(column: Column, found: TableColumn, wanted: str, table: str) -> Iterator[str]:
    """The reasons why a column of *table* does not take a field as it is, each with its remedy."""
    alter = f"ALTER TABLE {table} ALTER {_quoted(found.name)}"
    if found.type != wanted and not (column.shape.form is Form.UUID and found.type == "VARCHAR"):
        yield f"its column {found.name!r} is {found.type}, and the field needs {wanted}: {alter} TYPE {wanted}"
    if column.field.nullable and not found.nullable:
        yield f"its column {found.name!r} is NOT NULL, and the field admits None: {alter} DROP NOT NULL"


def _said(check: Any, connection: Any) -> str:
    try:
        check(connection)
    except StoreError as error:
        return str(error)
    return ""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
