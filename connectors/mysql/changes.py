"""The changes of tables of MariaDB as sources, which share a reader of the binlog: the description. Opens nothing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import ChangeDecoding, ChangeLog, TableChanges
from exactlyonce.connectors.mysql.address import MySQLDatabase, MySQLTable
from exactlyonce.connectors.source import SplitFinder
from exactlyonce.connectors.splits import OpenSplit, SourceFinding

if TYPE_CHECKING:
    pass

T = TypeVar("T")
_READER = re.compile(r"[A-Za-z0-9_.-]{1,63}")


@dataclass(frozen=True, eq=False, kw_only=True)
class MySQLChanges(MySQLTable, TableChanges[T]):
    """Captures the changes of a table: ``MySQLChanges("customers", dsn="env:SHOP_MYSQL", key="id", value=Customer)``
    gives `Change[Customer]`, first the rows that are there, then each change after its commit.

    It reads the binlog of MariaDB 10.5 or newer, in the format ROW, as a replica does. All tables of a pipeline in one
    database are read together, in the order of the commits. The server removes binlogs by age alone: a pipeline that
    stood still for longer halts.

    - *table*: in the database of the dsn; its engine must be InnoDB.
    - *dsn*: the place of a URL ``mysql://user:password@host:3306/database``: ``env:NAME``, ``file:/path``. One without
      a password may be written out. The user has REPLICATION SLAVE, and may read the table.
    - *key*: the column of the primary key, or a tuple of them: fields of *value*.
    - *value*: the type of a row, whose fields are columns: a Struct, a dataclass, a TypedDict.
    - *snapshot*: "pages" reads the rows that are there, page by page, beside the changes; "never" only changes.
    - *reader*: the name of another reader; by default "exactlyonce_" and the pipeline's name. Its server id comes from
      the name. A server has one reader of an id at a time: two with one name end each other.
    - *on_error*, *time*: as those of `KafkaSource`; *time* "timestamp_ms" is that of the commit.

    In `Pipeline.table` its records are `Record`: the row by its key, None once it is deleted, at the commit's time. A
    function for *time* takes that then.
    """

    reader: str = ""
    kind: ClassVar[str] = "mysql-changes"

    def whole(self, pipeline: str) -> MySQLBinlog:
        return MySQLBinlog(dsn=self.dsn, name=self.reader or f"exactlyonce_{pipeline}", on_error=self.on_error)

    def change_decoder(self) -> ChangeDecoding[T]:
        from exactlyonce.connectors.mysql.change_values import ChangeDecoder

        return ChangeDecoder(self)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.reader and not _READER.fullmatch(self.reader):
            yield f"reader={self.reader!r} must have 1 to 63 letters, digits, and . _ -"


@dataclass(frozen=True, eq=False, kw_only=True)
class MySQLBinlog(MySQLDatabase, ChangeLog):
    """The binlog of a server: one split, for all sources of a pipeline that read it."""

    kind: ClassVar[str] = "mysql-changes"
    nothing: ClassVar[str] = "there is nothing to make or to remove"

    @property
    def id(self) -> str:
        return f"binlog-{self.name}"

    @property
    def shown(self) -> str:
        return f"the binlog, by reader {self.name}"

    @property
    def server_id(self) -> int:
        """That of its reader: its own, and above those that people give their servers."""
        return 0x80000000 | int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        with self.needing_driver():
            from exactlyonce.connectors.mysql.change_split import BinlogFinder
        return BinlogFinder(self)

    def open_split(self, position: SourceOffset) -> OpenSplit:
        with self.needing_driver():
            from exactlyonce.connectors.mysql.change_split import OpenBinlog
        return OpenBinlog(self, position)

    def setup(self, *, dry_run: bool = False) -> list[str]:
        """There is nothing to make. Raises `ConfigError` where the server or a table cannot be captured as it is, with
        the statements that change that."""
        with self.needing_driver():
            from exactlyonce.connectors.mysql.change_split import require_capturable
        require_capturable(self)
        return []

    def drop(self, *, dry_run: bool = False) -> list[str]:
        """There is nothing to remove: the server removes its binlogs by age."""
        return []

    def examine(self, positions: Sequence[SourceOffset]) -> tuple[str, Sequence[SourceFinding]]:
        with self.needing_driver():
            from exactlyonce.connectors.mysql.change_split import examine
        return examine(self, positions)

    def replicating(self, user: str) -> str:
        return f"GRANT REPLICATION SLAVE, BINLOG MONITOR ON *.* TO `{user}`@'%';"
