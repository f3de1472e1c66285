"""A table of PostgreSQL as a source: the description. It opens nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.postgres.dsn import PostgresTable
from exactlyonce.connectors.source import SplitFinder
from exactlyonce.connectors.tables import TableRows, TableSource
from exactlyonce.pipeline.codec import codec_for
from exactlyonce.pipeline.sizes import is_count

T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class PostgresTableSource(PostgresTable, TableSource[T]):
    """Reads the rows of a table once, as of one moment: ``PostgresTableSource("customers", dsn="env:SHOP_DSN",
    key="id", value=Customer)``. It ends with the last of them.

    - *table*: its name, or "schema.table".
    - *dsn*: the place of a connection string of libpq: ``env:NAME`` or ``file:/path``. One without a password may be
      written out.
    - *key*: the column of a unique key that takes no NULL, or a tuple of them, in the order of the key's index.
    - *value*: the type of a record, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *splits*: the ranges of keys, at most, that a large table is read in, each by one subtask.
    - *one_snapshot*: stop the pipeline where the run that began to read the table has ended before its last row.
      Otherwise the next run reads the rest as of a later moment: each key is read once, but not all as of one moment.
    - *name*: its name in checkpoints and errors, where several sources of a pipeline read one table.
    - *on_error*, *time*: as of `KafkaSource`.
    """

    splits: int = 8

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.table_rows import PostgresTableFinder
        return PostgresTableFinder(source, self)

    def open_rows(self, position: SourceOffset) -> TableRows:
        with self.needing_driver():
            from exactlyonce.connectors.postgres.table_rows import open_rows
        return open_rows(self, position)

    def _decode(self) -> Any:
        return codec_for(self.value).decode

    def _as_json(self, part: Any) -> bytes:
        row: str = part
        return row.encode()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not is_count(self.splits):
            yield f"splits={self.splits!r} must be an integer from 1 on"
