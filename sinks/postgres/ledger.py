"""The ledger: a table beside the target, with a row for each subtask of a sink, and one for the sink itself.

The sink's own row, of subtask -1, has the incarnation that may write. Whoever applies rows holds it shared, whoever
fences holds it alone, so that no apply of an older incarnation is under way once a fence is committed. A subtask's row
has the checkpoint whose rows are in the table; it only grows. Invariant: the ledger is made by `create` alone, once; a
ledger that is gone later is an error, for an empty one would let rows come twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import msgspec
from psycopg import sql

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.postgres.connection import PostgresConnection
from exactlyonce.sinks.write_ahead.ledger import SinkLedger
from exactlyonce.sinks.write_ahead.store import LedgerEntry, require_writer

TABLE = "exactlyonce_ledger"
SINK_ITSELF = -1
"""In the place of a subtask."""
_TEXT = ("pipeline", "sink", "origin")
_COLUMNS = {
    name: "text" if name in _TEXT else "integer" if name == "subtask" else "bigint"
    for name in ("pipeline", "sink", "subtask", "checkpoint", "incarnation", "origin")
}


class SinkName(msgspec.Struct, frozen=True):
    """Whose rows of the ledger are meant."""

    pipeline: str
    sink: str

    @property
    def session(self) -> str:
        """The name of sessions that write them: short, and the same for no two sinks."""
        digest = sha256(f"{self.pipeline}\0{self.sink}".encode()).hexdigest()[:16]
        readable = f"{self.pipeline}/{self.sink}".encode("ascii", "replace").decode()[:30]
        return f"exactlyonce {readable} {digest}"

    @property
    def values(self) -> tuple[str, str]:
        """For statements."""
        return self.pipeline, self.sink


class LedgerTable:
    """The ledger in one schema."""

    table = TABLE
    columns: Mapping[str, str] = _COLUMNS
    key: tuple[str, ...] = ("pipeline", "sink", "subtask")
    rights: tuple[str, ...] = ("SELECT", "INSERT", "UPDATE")

    def __init__(self, connection: PostgresConnection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._name = sql.Identifier(schema, self.table)

    @property
    def shown(self) -> str:
        """For people, and for SQL that they run."""
        return self._name.as_string(None)

    @property
    def exists(self) -> bool:
        """Whether there is such a table."""
        return self._found() is not None

    def newest(self, name: SinkName) -> int:
        """The newest checkpoint of any subtask of the sink; 0: nothing was written."""
        found = self._run(f"SELECT coalesce(max(checkpoint), 0) FROM {{}} WHERE {_SUBTASKS_ROWS}", name.values)
        return int(found[0][0])

    def of_sink(self, name: SinkName) -> SinkLedger:
        """All rows of the sink, as far as they are committed; waits for nobody."""
        rows = self._run(
            "SELECT subtask, checkpoint, incarnation, origin FROM {} WHERE pipeline = $1 AND sink = $2", name.values
        )
        found = {subtask: rest for subtask, *rest in rows}
        _, incarnation, origin = found.pop(SINK_ITSELF, (0, 0, ""))
        checkpoints = {subtask: checkpoint for subtask, (checkpoint, *_) in found.items()}
        return SinkLedger(incarnation=incarnation, origin=origin, checkpoints=checkpoints)

    def create(self) -> None:
        """Make the table, unless it is there, or another session makes it at the same time."""
        if self._found() is not None:
            return
        columns = ", ".join(f"{name} {type_} NOT NULL" for name, type_ in self.columns.items())
        columns += f", PRIMARY KEY ({', '.join(self.key)})"
        statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(self._name, sql.SQL(columns))
        role, may = self._connection.rows(
            "SELECT quote_ident(current_user), has_schema_privilege($1::text, 'CREATE')", (self._schema,)
        )[0]
        if not may:
            raise StoreError(
                f"The ledger {self.shown} is missing, and the role {role} may not create it. Let an administrator run: "
                f"{statement.as_string(None)}; GRANT {', '.join(self.rights)} ON {self.shown} TO {role};"
            )
        try:
            self._connection.rows(statement)
        except StoreError:  # of two that create it at the same time, one may fail
            if self._found() is None:
                raise

    def check(self) -> None:
        """Raise `StoreError` unless the table is as it was made, outlives a crash, and may be written to."""
        found = self._found()
        if found is None:
            raise self._gone()
        persistence, role, missing, columns = found
        if columns != self.columns:
            raise StoreError(
                f"The table {self.shown} is no ledger of exactlyonce: its columns are {', '.join(columns)}, and not "
                f"{', '.join(self.columns)}. Rename it, or write to a table in another schema."
            )
        if persistence != "p":
            raise StoreError(
                f"The ledger {self.shown} is UNLOGGED: a crash would empty it, and rows would come twice. Run: "
                f"ALTER TABLE {self.shown} SET LOGGED"
            )
        if missing:
            raise StoreError(
                f"The role lacks rights on the ledger. Run: GRANT {', '.join(missing)} ON {self.shown} TO {role}"
            )

    def _found(self) -> tuple[str, str, list[str], dict[str, str]] | None:
        """Persistence, the role, the rights that it lacks, and the columns; None if there is no such table."""
        rows = self._connection.rows(_FOUND, (self._schema, self.table, list(self.rights)))
        if not rows:
            return None
        persistence, role, missing, columns = rows[0]
        return persistence, role, missing or [], columns

    @contextmanager
    def needed(self) -> Iterator[None]:
        """What is refused within is refused as what it is where the ledger is gone."""
        try:
            yield
        except StoreError:
            if self._found() is None:
                raise self._gone() from None
            raise

    def refuse(self, name: SinkName, incarnation: int, origin: str) -> None:
        """Raise what forbids a fence by *incarnation*, as far as it is committed; waits for nobody."""
        found = self._run("SELECT incarnation, origin FROM {} WHERE " + _SINKS_ROW, name.values)
        for newest, known in found:
            require_writer(*name.values, incarnation, origin, newest=newest, begun_for=known)

    def fence(self, name: SinkName, incarnation: int, origin: str) -> Mapping[int, int]:
        """Part of a transaction: note *incarnation*, once every apply has ended; -> the checkpoint of each subtask."""
        values = (*name.values, SINK_ITSELF, 0, incarnation, origin)
        self._run("INSERT INTO {} VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING", values)
        self._run(f"SELECT FROM {{}} WHERE {_SINKS_ROW} FOR UPDATE", name.values)
        self.refuse(name, incarnation, origin)
        self._run(f"UPDATE {{}} SET incarnation = $3 WHERE {_SINKS_ROW}", (*name.values, incarnation))
        return dict(self._run(f"SELECT subtask, checkpoint FROM {{}} WHERE {_SUBTASKS_ROWS}", name.values))

    def end_sessions(self, name: SinkName) -> list[int]:
        """End all other sessions that are writing rows of the sink; -> their process ids on the server.

        A client that was stopped in the middle of a COPY holds its locks as long as its connection lives: no timeout
        of the server counts there. What it had not committed is undone.
        """
        found = self._connection.rows(_END, (name.session, self.shown))
        return [pid for pid, _ in found]

    def claim(self, entry: LedgerEntry) -> bool:
        """Part of a transaction: compare-and-set; whether the subtask's row was of an older checkpoint, and is of this.

        The sink's row is held shared, so that nobody fences. Another one who claims the same subtask's row is waited
        for, also where it is the row's first. Raises what `LedgerEntry.is_due` raises.
        """
        name = SinkName(entry.pipeline, entry.sink)
        found = self._run(f"SELECT incarnation, origin FROM {{}} WHERE {_SINKS_ROW} FOR SHARE", name.values)
        if not found:
            raise self._emptied(name)
        newest, origin = found[0]
        row = (entry.pipeline, entry.sink, entry.subtask)
        lock = f"SELECT checkpoint FROM {{}} WHERE {_SUBTASKS_ROW} FOR UPDATE"
        found = self._run(lock, row)
        if not found:
            values = (*row, 0, entry.incarnation, entry.origin)
            self._run("INSERT INTO {} VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING", values)
            found = self._run(lock, row)
        if not entry.is_due(checkpoint=found[0][0], incarnation=newest, origin=origin):
            return False
        update = f"UPDATE {{}} SET checkpoint = $4, incarnation = $5 WHERE {_SUBTASKS_ROW}"
        self._run(update, (*row, entry.checkpoint, entry.incarnation))
        return True

    def has(self, entry: LedgerEntry) -> bool:
        """Whether the subtask's row is of this checkpoint or of a newer one, as far as is committed; waits for nobody.

        Raises what `claim` raises.
        """
        name = SinkName(entry.pipeline, entry.sink)
        statement = f"SELECT subtask, checkpoint, incarnation, origin FROM {{}} WHERE {_SINKS_ROW} OR {_SUBTASKS_ROW}"
        found = {subtask: rest for subtask, *rest in self._run(statement, (*name.values, entry.subtask))}
        if SINK_ITSELF not in found:
            raise self._emptied(name)
        (checkpoint, *_), (_, incarnation, origin) = found.get(entry.subtask, [0]), found[SINK_ITSELF]
        return not entry.is_due(checkpoint=checkpoint, incarnation=incarnation, origin=origin)

    def _run(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._connection.rows(sql.SQL(statement).format(self._name), values)

    def _emptied(self, name: SinkName) -> StoreError:
        return StoreError(
            f"The ledger {self.shown} has no row of sink {name.sink!r}, pipeline {name.pipeline!r}, which every "
            f"run writes when it begins: it was deleted, or the database was restored. Run again: the ledger is "
            f"compared with the checkpoints before anything is written."
        )

    def _gone(self) -> StoreError:
        return StoreError(
            f"The ledger {self.shown} is gone. Restore it with the table from one backup: without it nobody knows "
            f"which rows are in the table."
        )


def still_held(name: SinkName, ended: list[int]) -> StoreUnavailable:
    """For a fence that does not get the sink's row, though the sessions *ended* were told to end."""
    return StoreUnavailable(
        f"Another session holds the ledger's row of sink {name.sink!r}, pipeline {name.pipeline!r} (sessions of an "
        f"older run that were ended: {', '.join(map(str, ended)) or 'none'}). See pg_locks and pg_stat_activity, and "
        f"end it by pg_terminate_backend(pid). Nothing is lost: it is asked again."
    )


_SINKS_ROW = f"pipeline = $1 AND sink = $2 AND subtask = {SINK_ITSELF}"
_SUBTASKS_ROWS = f"pipeline = $1 AND sink = $2 AND subtask <> {SINK_ITSELF}"
_SUBTASKS_ROW = "pipeline = $1 AND sink = $2 AND subtask = $3"
_FOUND = """
SELECT c.relpersistence::text, quote_ident(current_user),
    (SELECT array_agg(action) FROM unnest($3::text[]) action
     WHERE NOT has_table_privilege(c.oid, action)),
    (SELECT json_object_agg(a.attname, format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum) FROM pg_attribute a
     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2
"""
_END = """
SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = $1 AND datname = current_database() AND usename = session_user AND pid <> pg_backend_pid()
    AND EXISTS (SELECT FROM pg_locks l WHERE l.pid = pg_stat_activity.pid AND l.relation = $2::regclass)
"""
