"""A PostgreSQL table as a sink: the description. It opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from exactlyonce.connectors.postgres.dsn import PostgresTable
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.durations import Duration, duration_ms
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.sink import StoreDelivery
from exactlyonce.sinks.sql.table import TableSink, row_type
from exactlyonce.sinks.write_ahead.store import Store

T = TypeVar("T")

_IDENTIFIER_BYTES_MAX = 63
_ANSWER_TIMEOUT_MS_MAX = 24 * 3600 * 1000
"""The system waits for no longer than 24 days at a time."""


@dataclass(frozen=True, eq=False)
class PostgresSink(PostgresTable, TableSink[T], Generic[T]):
    """Writes rows to a table of PostgreSQL, exactly once: a reader of the table sees each row once.

    - *table*: its name, or "schema.table"; with *schema*, the name as it is, dots and all.
    - *dsn*: the place of a connection string of libpq: ``env:NAME`` or ``file:/path``. One without a password may be
      written out.
    - *mode*: "append" inserts each record, and has no *key*; "upsert" inserts or updates the row that has the record's
      *key*, for which the table needs a unique index; "delete" deletes the rows that have it.
    - *create*: create the table if it is missing, with the fields of the record's type as its columns.
    - *commit*: "write_ahead" alone: rows wait in the checkpoint topic until their checkpoint is decided.
    - *delivery*: "exactly_once", or by choice "at_least_once".
    - *answer_timeout*: the time limit of one statement, with a second more for each MiB of rows; after it the server
      counts as away. Make it longer if triggers or indexes are slow.
    """

    place_kind: ClassVar[str] = "schema"

    table: str
    _: KW_ONLY
    dsn: str = field(repr=False)
    mode: Literal["append", "upsert", "delete"] = "append"
    key: str | tuple[str, ...] = ()
    create: bool = False
    schema: str | None = None
    commit: Literal["write_ahead"] = "write_ahead"
    delivery: StoreDelivery = "exactly_once"
    answer_timeout: Duration = "30s"

    @property
    def place(self) -> tuple[str | None, str]:
        """Schema and table; None: the schema in which the server finds the table."""
        if self.schema is not None:
            return self.schema, self.table
        before, _, name = self.table.rpartition(".")
        return before or None, name

    def problems(self, type_: Any) -> Iterator[str]:
        yield from super().problems(type_)
        try:
            if not 0 < duration_ms(self.answer_timeout, "answer_timeout") <= _ANSWER_TIMEOUT_MS_MAX:
                yield f"answer_timeout={self.answer_timeout!r} must be longer than 0, and 24h at most"
        except ConfigError as error:
            yield str(error).rstrip(".")

    def name_problems(self) -> Iterator[str]:
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
    def full_name(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"

    def describe(self, type_: Any) -> dict[str, Any]:
        """Table, mode, key and the type's schema, without the database."""
        described = {"sink": "postgres", "table": self.full_name, "mode": self.mode, "key": list(self.key_columns)}
        return described | {"row": shape.describe(row_type(type_, self.mode))}

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants:
        """See `Sink`. The administrator makes the tables of exactlyonce. Without *schema* the table's is `public`."""
        with self.needing_driver():
            from exactlyonce.sinks.postgres.store import grant_statements

        return self.granted_by(grant_statements(self, type_, user, creates=creates and self.create))

    def store(self, type_: Any) -> Store:
        with self.needing_driver():
            from exactlyonce.sinks.postgres.store import PostgresStore  # psycopg is an extra
        return PostgresStore(self, type_)
