"""A table of MySQL or MariaDB as a sink: the description. It opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from exactlyonce.connectors.mysql.address import MySQLTable
from exactlyonce.pipeline.columns import kind_name
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.secrets import is_reference
from exactlyonce.pipeline.sink import StoreDelivery
from exactlyonce.sinks.sql.table import TableSink, row_fields
from exactlyonce.sinks.write_ahead.store import Store

T = TypeVar("T")
NAME_LENGTH_MAX = 64
"""For tables and columns, in characters."""


@dataclass(frozen=True, eq=False, repr=False)
class MySQLSink(MySQLTable, TableSink[T], Generic[T]):
    """Writes records as rows of a table, exactly once: they become visible with their checkpoint, once.

    - *table*: in the database of the dsn; its columns are the fields of the record's type.
    - *dsn*: the place of a URL ``mysql://user:password@host:3306/database``: ``env:ORDERS_DSN``, ``file:/run/dsn``. One
      without a password may be written out.
    - *mode*: "append" inserts a row for each record; "upsert" inserts it or changes the row with its key, the last
      record of a key wins; "delete" removes the row with its key.
    - *key*: the columns by which an upsert or a delete finds a row; "append" has none.
    - *create*: whether the table is created if it is missing.
    - *delivery*: "exactly_once", or by choice "at_least_once".
    - *commit*: "write_ahead" alone: rows wait in the checkpoint topic until their checkpoint is decided.
    """

    place_kind: ClassVar[str] = "database"

    table: str
    _: KW_ONLY
    dsn: str
    mode: Literal["append", "upsert", "delete"] = "append"
    key: str | tuple[str, ...] = ()
    create: bool = False
    delivery: StoreDelivery = "exactly_once"
    commit: Literal["write_ahead"] = "write_ahead"

    def __repr__(self) -> str:
        shown = f"MySQLSink({self.table!r}, mode={self.mode!r}, key={self.key!r}, delivery={self.delivery!r})"
        if isinstance(self.dsn, str) and is_reference(self.dsn):
            return shown.replace(", ", f", dsn={self.dsn!r}, ", 1)
        return shown.replace(", ", ", dsn='***', ", 1)

    def problems(self, type_: Any) -> Iterator[str]:
        problems = list(super().problems(type_))
        yield from problems
        if not problems and type_ is not UNKNOWN:
            for field in row_fields(type_, self.mode, self.key_columns):
                if problem := _identifier_problem(field.name):
                    yield f"the field {field.name!r} {problem}"

    def name_problems(self) -> Iterator[str]:
        if problem := _identifier_problem(self.table):
            yield f"table={self.table!r} {problem}"

    def describe(self, type_: Any) -> dict[str, Any]:
        """Table, mode, key and the columns, without the server."""
        columns = [[field.name, kind_name(field.kind)] for field in row_fields(type_, self.mode, self.key_columns)]
        return {
            "sink": "mysql",
            "table": self.table,
            "mode": self.mode,
            "key": list(self.key_columns),
            "columns": columns,
        }

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants:
        """See `Sink`. The administrator makes the tables of exactlyonce."""
        with self.needing_driver():
            from exactlyonce.sinks.mysql.store import grant_statements

        return self.granted_by(grant_statements(self, type_, user, creates=creates and self.create))

    def store(self, type_: Any) -> Store:
        with self.needing_driver():
            from exactlyonce.sinks.mysql.store import MySQLStore
        return MySQLStore(self, type_)


def _identifier_problem(name: object) -> str | None:
    """The problem of a table's or a column's name."""
    if not isinstance(name, str) or not name:
        return "must be a name"
    if len(name) > NAME_LENGTH_MAX:
        return f"is longer than MySQL's names, of {NAME_LENGTH_MAX} characters"
    if not name.isprintable() or max(name) > "\uffff" or name != name.strip():
        return "has characters that MySQL's names cannot have"
    return "must not have a dot: its database is that of the dsn" if "." in name else None
