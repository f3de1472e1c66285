"""A PostgreSQL table as a sink: which rows it gets, and how. It opens nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from exactlyonce.pipeline import schema
from exactlyonce.pipeline.durations import duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference, reference_problem
from exactlyonce.sinks.prepared.sink import PreparableSink
from exactlyonce.sinks.prepared.store import PreparingStore
from exactlyonce.sinks.sql.table import description_problems, row_problems, rows_beside, shown_table
from exactlyonce.sinks.write_ahead.store import Store

T = TypeVar("T")

_IDENTIFIER_BYTES_MAX = 63
_ANSWER_TIMEOUT_MS_MAX = 24 * 3600 * 1000
"""The system waits for no longer than 24 days at a time."""
_PASSWORD = re.compile(r"password\s*=|://[^/@]*:[^@]*@", re.IGNORECASE)
"""Also one with a / that is not escaped."""


@dataclass(frozen=True, eq=False)
class PostgresSink(PreparableSink[T], Generic[T]):
    """Writes rows to a table of PostgreSQL, exactly once: whoever reads the table sees each row once.

    - *table*: its name, or "schema.table"; with *schema*, the name as it is, dots and all.
    - *dsn*: where the database is, by reference: ``env:NAME`` or ``file:/path`` of a connection string of libpq. One
      without a password may be written out.
    - *mode*: "append" inserts each record, and has no *key*; "upsert" inserts or updates the row that has the record's
      *key*, for which the table needs a unique index; "delete" deletes the rows that have it.
    - *create*: create the table if it is missing, with the fields of the record's type as its columns.
    - *commit*: "write_ahead": rows wait in the checkpoint topic until their checkpoint is decided; "prepared": in
      prepared transactions of the server, for *mode* "append" alone.
    - *delivery*: "exactly_once", or a weaker one by choice: "at_least_once", "at_most_once".
    - *answer_timeout*: for how long the server may be at one statement, and a second more for each MiB of rows; then it
      counts as away. Longer where triggers or indexes make it slow.
    """

    prepares: ClassVar[str] = "prepared"

    table: str
    _: KW_ONLY
    dsn: str = field(repr=False)
    mode: str = "append"
    key: tuple[str, ...] = ()
    create: bool = False
    schema: str | None = None
    commit: str = "write_ahead"
    delivery: str = "exactly_once"
    answer_timeout: str = "30s"

    @property
    def place(self) -> tuple[str | None, str]:
        """Schema and table; None for the schema that the server finds the table in."""
        if self.schema is not None:
            return self.schema, self.table
        before, _, name = self.table.rpartition(".")
        return before or None, name

    def problems(self, type_: Any) -> Iterator[str]:
        """What is wrong with the arguments, or with the type as rows."""
        yield from self._name_problems()
        if not isinstance(self.dsn, str) or not self.dsn:
            yield "dsn= is not set: name where the connection string is, as env:NAME or file:/path"
        elif problem := reference_problem(self.dsn):
            yield f"dsn={self.dsn!r}: {problem}"
        elif not is_reference(self.dsn) and _PASSWORD.search(self.dsn):
            yield "dsn= has a password written out: put all of it into a variable, dsn='env:NAME', or into a file"
        yield from self.commit_problems(self.mode)
        try:
            if not 0 < duration_ms(self.answer_timeout, "answer_timeout") <= _ANSWER_TIMEOUT_MS_MAX:
                yield f"answer_timeout={self.answer_timeout!r} must be longer than 0, and 24h at most"
        except ConfigError as error:
            yield str(error).rstrip(".")
        wrong = list(description_problems(self.mode, self.key, self.create))
        yield from wrong
        if not wrong and type_ is not UNKNOWN:
            yield from row_problems(type_, self.key)

    def _name_problems(self) -> Iterator[str]:
        names = (self.table,) if self.schema is None else (self.schema, self.table)
        if not all(isinstance(name, str) for name in names):
            yield f"table={self.table!r} and schema={self.schema!r} must be text"
            return
        parts = names if self.schema is not None else tuple(self.table.split("."))
        if len(parts) > 2 or not all(parts) or any("\0" in part for part in parts):
            yield f'table={self.table!r} must be "table" or "schema.table"; a name with dots needs schema='
        elif long := [part for part in parts if len(part.encode()) > _IDENTIFIER_BYTES_MAX]:
            yield f"{long[0]!r} is longer than the {_IDENTIFIER_BYTES_MAX} bytes that PostgreSQL keeps of a name"

    @property
    def shown(self) -> str:
        """Table, mode and key."""
        table = self.table if self.schema is None else f"{self.schema}.{self.table}"
        return shown_table(table, self.mode, self.key)

    def describe(self, type_: Any) -> dict[str, Any]:
        """Table, mode, key and the type's schema; where the database is may change."""
        name = self.table if self.schema is None else f"{self.schema}.{self.table}"
        described = {"sink": "postgres", "table": name, "mode": self.mode, "key": list(self.key)}
        return described | {"row": schema.describe(type_)}

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """Its rows of the tables beside the target."""
        return rows_beside(f"the schema of {self.table}", pipeline, sink, prepares=self.commit == self.prepares)

    def store(self, type_: Any) -> Store:
        """A connection for rows of this type, not open yet."""
        with needing("postgres", "psycopg", f"PostgresSink({self.table!r})"):
            from exactlyonce.sinks.postgres.store import PostgresStore  # psycopg is an extra
        return PostgresStore(self, type_)

    def preparing_store(self, type_: Any) -> PreparingStore:
        """A connection for rows of this type that prepares transactions, not open yet."""
        with needing("postgres", "psycopg", f"PostgresSink({self.table!r})"):
            from exactlyonce.sinks.postgres.prepared import PreparingPostgresStore
        return PreparingPostgresStore(self, type_)
