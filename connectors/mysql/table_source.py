"""A table of MySQL or MariaDB as a source: the description. It opens nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.mysql.address import MySQLTable
from exactlyonce.connectors.source import SplitFinder
from exactlyonce.connectors.tables import TableRows, TableSource
from exactlyonce.pipeline.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MySQLTableSource(MySQLTable, TableSource[T]):
    """Reads the rows of a table once, as of one moment: ``MySQLTableSource("customers", dsn="env:SHOP_DSN", key="id",
    value=Customer)``. It ends with the last of them.

    One subtask reads the table: sessions of MySQL share a snapshot only if writers are locked out while they begin.

    - *table*: in the database of the dsn; its engine must be InnoDB.
    - *dsn*: the place of a URL ``mysql://user:password@host:3306/database``: ``env:NAME``, ``file:/path``. One without
      a password may be written out.
    - *key*: the column of a unique key that takes no NULL, or a tuple of them, in the order of the key's index.
    - *value*: the type of a record, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *one_snapshot*: stop the pipeline where reading is interrupted after its first checkpoint. Otherwise the rest is
      read as of a later moment: each key is read once, but not all as of one moment.
    - *name*: its name in checkpoints and errors, where several sources of a pipeline read one table.
    - *on_error*, *time*: as of `KafkaSource`.
    """

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with self.needing_driver():
            from exactlyonce.connectors.mysql.table_rows import MySQLTableFinder
        return MySQLTableFinder(source, self)

    def left(self, position: SourceOffset) -> int:
        if self.one_snapshot:
            raise ConfigError(
                f"Source {position.source!r}: one_snapshot=True, and bounded work may read {self.table} in several "
                f"sessions, which share no snapshot on MySQL. Use `exactlyonce run` with --until latest; or set "
                f"one_snapshot=False."
            )
        return super().left(position)

    def open_rows(self, position: SourceOffset) -> TableRows:
        with self.needing_driver():
            from exactlyonce.connectors.mysql.table_rows import open_rows
        return open_rows(self, position)

    def _decode(self) -> Any:
        return partial(msgspec.convert, type=self.value, strict=False)

    def _as_json(self, part: Any) -> bytes:
        return msgspec.json.encode(part, enc_hook=str)
