"""The PostgreSQL store: rows and their ledger row, in one transaction, and the rights that this takes.

Invariant: the lines for a COPY were written for the columns that it names, as they are then, by the mark of each line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import msgspec
from psycopg import sql

from exactlyonce.connectors.postgres.connection import Limits, LockHeld, PostgresConnection
from exactlyonce.pipeline.columns import RowField
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ASKED_AGAIN, StoreUnavailable
from exactlyonce.pipeline.sink import EXACTLY_ONCE
from exactlyonce.sinks.postgres import catalogue
from exactlyonce.sinks.postgres.catalogue import (
    RIGHTS,
    PostgresColumn,
    PostgresOwnTable,
    Target,
    column_text,
    meaning,
    type_problem,
)
from exactlyonce.sinks.postgres.copy_text import CopyEncoder, mark_of, unmarked
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.sql import ledger
from exactlyonce.sinks.sql.fields import ChangedRows, ChangeEncoder, ColumnTexts
from exactlyonce.sinks.sql.store import SqlStore
from exactlyonce.sinks.sql.table import CHANGES, mode_of
from exactlyonce.sinks.write_ahead.store import RowEncoder

_STAGE = sql.Identifier("pg_temp", "exactlyonce_rows")
_LINE = sql.Identifier("exactlyonce_line")
"""The order of the rows in the stage: the last one of a key counts."""
_DELETED = sql.Identifier("exactlyonce_deleted")
"""Whether the row of the key is gone."""
SCHEMA = "public"
"""In place of one that only the server would find, in statements of rights."""
_LEDGER_TYPES = ("text", "text", "integer", "bigint", "bigint", "text")


def ledger_table(connection: PostgresConnection, schema: str) -> PostgresOwnTable:
    return PostgresOwnTable(
        connection=connection, schema=schema, table=ledger.TABLE,
        columns=dict(zip(ledger.COLUMNS, _LEDGER_TYPES, strict=True)), key=ledger.KEY,
        rights=("SELECT", "INSERT", "UPDATE"),
    )  # fmt: skip


def grant_statements(sink: PostgresSink[Any], type_: Any, user: str, *, creates: bool) -> Iterator[str]:
    """The rights that a role needs, as statements for psql. They make the tables of exactlyonce, if these are missing;
    with *creates* the role makes its own table."""
    schema, table = sink.place[0] or SCHEMA, sink.place[1]
    role, in_schema, target = (
        sql.Identifier(*names).as_string(None) for names in ((user,), (schema,), (schema, table))
    )
    on_database = "CONNECT" if sink.mode == "append" else "CONNECT, TEMPORARY"
    yield f'GRANT {on_database} ON DATABASE :"DBNAME" TO {role};'
    yield f"GRANT {'USAGE, CREATE' if creates else 'USAGE'} ON SCHEMA {in_schema} TO {role};"
    if not creates:
        yield f"GRANT {', '.join(RIGHTS[mode_of(sink.mode, type_)])} ON {target} TO {role};"
    if sink.delivery == EXACTLY_ONCE:
        ledger = ledger_table(PostgresConnection(sink.dsn, Limits()), schema)  # the connection is never opened
        yield f"{ledger.statement};"
        yield f"{ledger.grant(role)};"


class PostgresStore(SqlStore[PostgresSink[Any], Target]):
    """See `SqlStore`."""

    unless_there = "ON CONFLICT DO NOTHING"
    shared = "FOR SHARE"
    _session: PostgresConnection

    def __init__(self, sink: PostgresSink[Any], type_: Any, limits: Limits | None = None) -> None:
        self._limits = limits or Limits(answer=duration_ms(sink.answer_timeout) / 1000)
        super().__init__(sink, type_, PostgresConnection(sink.dsn, self._limits))

    @property
    def _shown(self) -> str:
        if self._table is not None:
            return self._table.shown
        schema, table = self._sink.place
        return f"{table!r} in " + (f"schema {schema!r}" if schema else "any schema of the role's search_path")

    _how_to_see = "a name in capitals is meant as it is written"

    def _find(self) -> Target | None:
        return catalogue.find(self._session, *self._sink.place)

    def _is_there(self) -> bool:
        """The name may lead to another table by now: rows go to the one with the ledger."""
        return self._table is not None or super()._is_there()

    def _create(self) -> Target:
        return catalogue.create(self._session, self._sink, self._type)

    def _check_server(self) -> None:
        catalogue.check_server(self._session)

    def _check_table(self, table: Target) -> None:
        of_columns = self._column_problems(table)
        problems = catalogue.target_problems(
            self._session, self._sink.key_columns, self._mode, self._fields, table, of_columns
        )
        self._require_none(problems, table.shown)

    def _type_problem(self, field: RowField, column: PostgresColumn) -> str | None:
        return type_problem(field, column)

    def _encoder(self, table: Target) -> RowEncoder:
        def texts(fields: Iterable[RowField]) -> list[ColumnTexts]:
            return [column_text(field, table.shown, table.columns[field.name]) for field in fields]

        mark, key = self._mark(table), self._sink.key_columns
        if self._mode != CHANGES:
            return CopyEncoder(texts(self._fields), mark, indexed=key if self._mode == "upsert" else ())
        changed = ChangedRows(self._fields, key)
        gone = [
            text if text.field.name in key else msgspec.structs.replace(text, nullable=True)
            for text in texts(map(changed.gone, self._fields))
        ]
        rows = CopyEncoder(texts(self._fields), mark, indexed=key, ending="\tf")
        return ChangeEncoder(changed, rows, CopyEncoder(gone, mark, ending="\tt"))

    # --- the ledger -------------------------------------------------------------------------------------------------

    def _ledger_table(self) -> PostgresOwnTable:
        """See `SqlStore`: in the schema of the table."""
        return ledger_table(self._session, self._schema())

    def _schema(self) -> str:
        """The schema of the table, or that in which it would be created."""
        table = self._table or self._find()
        return table.schema if table is not None else catalogue.schema_of(self._session, self._sink)

    def _fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """End the sessions of older incarnations that still apply after a grace period. A client stopped in a COPY
        would hold its locks as long as its connection lives, whatever the server's timeouts."""
        name, ledger_ = self._session_name(pipeline, sink), self._ledger()
        try:
            with self._ledger_needed(), self._session.transaction(name, self._limits.grace):
                return ledger_.fence(pipeline, sink, incarnation, origin)
        except LockHeld:
            ended = [str(pid) for pid, _ in self._session.rows(_END_SESSIONS, (name, ledger_.table.name))]
        try:
            with self._ledger_needed(), self._session.transaction(name):
                return ledger_.fence(pipeline, sink, incarnation, origin)
        except LockHeld:
            raise StoreUnavailable(
                f"Another session holds the ledger's row of sink {sink!r}, pipeline {pipeline!r} (sessions of an older "
                f"run that were ended: {', '.join(ended) or 'none'}). See pg_locks and pg_stat_activity, and end it by "
                f"pg_terminate_backend(pid). {ASKED_AGAIN}"
            ) from None

    def _session_name(self, pipeline: str, sink: str) -> str:
        """See `SqlStore`: short and unique."""
        digest = sha256(f"{pipeline}\0{sink}".encode()).hexdigest()[:16]
        readable = f"{pipeline}/{sink}".encode("ascii", "replace").decode()[:30]
        return f"exactlyonce {readable} {digest}"

    # --- rows -------------------------------------------------------------------------------------------------------

    def _known_table(self) -> Target:
        """The table as of the last look."""
        if self._table is None:
            self._table = self._find()
        if self._table is None:
            raise self._missing()
        return self._table

    def _mark(self, target: Target) -> str:
        """The mark of rows that are encoded for the table."""
        meanings = [meaning(target.columns[field.name]) for field in self._fields]
        return mark_of(self._mode, self._sink.key_columns, self._fields, meanings)

    def _current_table(self) -> Target:
        """The table with the ledger as it is now, wherever the search_path leads."""
        target = self._known_table()
        if not catalogue.is_unchanged(self._session, target):
            self._table = catalogue.find(self._session, target.schema, target.table)
            target = self._known_table()
        self._require_columns(target)
        return target

    def _write(self, chunks: Iterable[bytes]) -> None:
        """Read the columns only once the table is locked. EXPLAIN locks it, takes the same rights, and runs no
        trigger."""
        lock = sql.SQL("EXPLAIN DELETE FROM {}" if self._mode == "delete" else "EXPLAIN INSERT INTO {} SELECT")
        self._session.rows(lock.format(self._known_table().name))
        target = self._current_table()
        self._insert(target, self._unmarked(chunks, self._mark(target)))

    def _insert(self, target: Target, lines: Iterable[bytes]) -> None:
        columns = sql.SQL(", ").join(sql.Identifier(field.name) for field in self._fields)
        copy = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT text, ENCODING 'UTF8')")
        if self._mode == "append":
            self._session.copy(copy.format(target.name, columns), lines)
            return
        key = sql.SQL(", ").join(map(sql.Identifier, self._sink.key_columns))
        parts = {
            "target": target.name, "columns": columns, "key": key, "stage": _STAGE, "line": _LINE, "deleted": _DELETED,
            "deletes": sql.Literal(self._mode == "delete"),
        }  # fmt: skip
        self._session.rows(sql.SQL(_MAKE_STAGE).format(**parts))
        copied = sql.SQL(", ").join([columns, _DELETED]) if self._mode == CHANGES else columns
        self._session.copy(copy.format(_STAGE, copied), lines)
        if self._mode != "upsert":
            self._session.rows(sql.SQL(_DELETE).format(**parts))
        if self._mode != "delete":
            self._session.rows(sql.SQL(_UPSERT).format(**parts, update=self._update()))

    def _update(self) -> sql.Composable:
        """The action for an existing row."""
        names = [sql.Identifier(field.name) for field in self._fields if field.name not in self._sink.key_columns]
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


_MAKE_STAGE = """
CREATE TEMPORARY TABLE {stage} ON COMMIT DROP AS SELECT {columns} FROM {target} WITH NO DATA;
ALTER TABLE {stage} ADD COLUMN {line} bigint GENERATED ALWAYS AS IDENTITY,
    ADD COLUMN {deleted} boolean DEFAULT {deletes}
"""
_NEWEST = "(SELECT DISTINCT ON ({key}) {columns}, {deleted} FROM {stage} ORDER BY {key}, {line} DESC) newest"
"""The last row of each key."""
_DELETE = f"DELETE FROM {{target}} WHERE ({{key}}) IN (SELECT {{key}} FROM {_NEWEST} WHERE {{deleted}})"
"""Before the upsert: a row may have taken what another index found in a deleted one."""
_UPSERT = f"""
INSERT INTO {{target}} ({{columns}})
SELECT {{columns}} FROM {_NEWEST} WHERE NOT {{deleted}} ORDER BY {{key}}
ON CONFLICT ({{key}}) DO {{update}}
"""
"""In the order of the key, so that two transactions with the same rows wait for each other without a deadlock."""
_END_SESSIONS = """
SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = $1 AND datname = current_database() AND usename = session_user AND pid <> pg_backend_pid()
    AND EXISTS (SELECT FROM pg_locks l WHERE l.pid = pg_stat_activity.pid AND l.relation = $2::regclass)
"""
