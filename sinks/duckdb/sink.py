"""A table of a DuckDB file as a sink: the description. It opens nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Literal, TypeVar

from exactlyonce.checkpoint.records.storage_url import is_url
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.columns import Column, columns_of
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.sink import Sink
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.sql.table import KeyedTable, description_problems, row_problems, row_type
from exactlyonce.sinks.writer import Opened, WriterContext

T = TypeVar("T")
LEDGER = "exactlyonce_ledger"
"""The table of the ledgers of all sinks that write to the file."""


@dataclass(frozen=True, eq=False)
class DuckDBSink(KeyedTable, Sink[T], Generic[T]):
    """Writes records as rows of a table in a file of DuckDB, exactly once: a checkpoint is one transaction.

    - *path*: the file. The run's leader alone opens it, while it writes a checkpoint; a path that does not begin with
      "/" is below its working folder.
    - *table*: its name, or "schema.table"; its columns are the fields of the record's type.
    - *mode*: "append" inserts each record, and has no *key*; "upsert" inserts or updates the row that has the record's
      *key*, of one checkpoint the last record of a key counts; "delete" deletes the rows that have it.
    - *key*: the columns by which an upsert or a delete finds a row.
    - *create*: create the table if it is missing, and the file, in a folder that is there.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    table: str
    mode: Literal["append", "upsert", "delete"] = "append"
    key: str | tuple[str, ...] = ()
    create: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))

    @property
    def transactional(self) -> bool:
        """False: rows wait in no Kafka transaction."""
        return False

    @property
    def stages(self) -> bool:
        """True: a file has one writing process at a time, so workers cannot write to it."""
        return True

    @property
    def place(self) -> tuple[str, str]:
        """Schema and table."""
        schema, _, table = self.table.rpartition(".")
        return schema or "main", table

    @property
    def full_name(self) -> str:
        """File and table."""
        return f"{self.path} {self.table}"

    def columns(self, type_: Any) -> tuple[Column, ...]:
        """The written columns for records of the type: all, or with mode "delete" the key's."""
        columns = columns_of(row_type(type_, self.mode))
        return tuple(column for column in columns if self.mode != "delete" or column.field.name in self.key_columns)

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of file, table and mode, and of the type as rows of a table."""
        if not isinstance(self.path, str) or not self.path or "\0" in self.path or is_url(self.path):
            yield f"path={self.path!r} must be the path of a file of this machine"
        parts = self.table.split(".") if isinstance(self.table, str) else ()
        if not 1 <= len(parts) <= 2 or not all(parts) or any("\0" in part for part in parts):
            yield f'table={self.table!r} must be "table" or "schema.table"'
        wrong = list(description_problems(self.mode, self.key, self.create))
        yield from wrong
        if type_ is UNKNOWN:
            return
        try:
            columns = columns_of(row_type(type_, self.mode))
        except shape.UnsupportedType as error:
            yield str(error)
            return
        times = Counter(column.field.name.lower() for column in columns)
        for column in columns:
            if times[column.field.name.lower()] > 1:
                yield f"the field {column.field.name!r} differs from another in capitals alone, and columns do not"
        yield from row_problems(type_, self.mode, self.key_columns) if not wrong else ()

    def describe(self, type_: Any) -> dict[str, Any]:
        """File, table, mode, key, and the records' schema."""
        described = {"sink": "duckdb", "path": self.path, "table": self.table, "mode": self.mode}
        return {**described, "key": list(self.key_columns), "value": shape.describe(row_type(type_, self.mode))}

    def ledger_of(self, pipeline: str, sink: str) -> str:
        """See `Committer.ledger`."""
        return f"table {LEDGER} in {self.path}, WHERE pipeline = '{pipeline}' AND sink = '{sink}'"

    def open_committer(self, context: CommitterContext) -> Committer:
        with self._needing_library():
            from exactlyonce.sinks.duckdb.committer import DuckDBCommitter

        return DuckDBCommitter(context, self)

    def open_writer(self, context: WriterContext) -> Opened:
        """See `Writable`. The file is not opened: the columns are those that `Committer.check` has found there."""
        with self._needing_library():
            from exactlyonce.sinks.duckdb.writer import BatchesWriter, BoundedBatches

        rows = BoundedBatches(self.columns(context.type), self.changed(context.type))
        return Opened(BatchesWriter(context.sink, context.subtask, context.staging), rows)

    def _needing_library(self) -> AbstractContextManager[None]:
        """Around imports of what needs the libraries: descriptions do without."""
        return needing("duckdb", "duckdb", f"DuckDBSink({self.path!r})")
