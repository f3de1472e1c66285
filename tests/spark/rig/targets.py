"""The targets of a write of Spark beside Kafka, one of each store: their options, and what plain readers find in them.

Shares no code with the sinks.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.dataset as ds
from servers import Servers
from together import MARIADB, POSTGRES, REDIS

COLUMNS = "id bigint NOT NULL, customer varchar(20) NOT NULL, total bigint CHECK (total >= 0)"
TARGETS = ("postgres", "mariadb", "redis", "files")


class Row(NamedTuple):
    """As it is written, and as it is found."""

    id: int
    customer: str
    total: int


def rows_of(batch: int, partition: int, count: int = 3) -> list[Row]:
    """Rows that no other batch or partition has."""
    first = 10_000 * batch + 100 * partition
    return [Row(first + each, f"customer {each}", 7 * each) for each in range(count)]


class Target:
    """The table, stream or folder of one test."""

    def __init__(self, store: str, servers: Servers, name: str, folder: Path) -> None:
        self.store, self.servers = store, servers
        self.table = f"rows_{zlib.crc32(name.encode()):08x}"
        self.folder = folder / "target"
        self.address = folder / f"address-of-{store}"
        """Where the target is, for Spark's processes have the environment of whoever began the session."""
        if store != "files":
            variable = {"postgres": POSTGRES, "mariadb": MARIADB, "redis": REDIS}[store]
            self.address.write_text(servers.addresses()[variable])
        if store in ("postgres", "mariadb"):
            self.make(COLUMNS)

    def make(self, columns: str) -> None:
        """The table, anew."""
        number = "bigserial" if self.store == "postgres" else "bigint AUTO_INCREMENT"
        self.sql(f"DROP TABLE IF EXISTS {self.table}")
        self.sql(f"CREATE TABLE {self.table} (place {number} PRIMARY KEY, {columns})")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        return self.servers.sql(self.store, statement)

    @property
    def options(self) -> dict[str, str]:
        """As a user writes them."""
        if self.store == "files":
            return {"sink": "files", "path": str(self.folder)}
        if self.store == "redis":
            return {"sink": "redis", "url": f"file:{self.address}", "kind": "stream", "key": self.table}
        return {"sink": self.store, "table": self.table, "dsn": f"file:{self.address}"}

    def found(self) -> list[Row]:
        """All rows that a reader sees, in order of their ids."""
        if self.store == "files":
            return self._in_files()
        if self.store == "redis":
            entries = [entry for _, entry in self.servers.redis.client.xrange(self.table)]
            return sorted(Row(int(each["id"]), each["customer"], int(each["total"])) for each in entries)
        return sorted(Row(*each) for each in self.sql(f"SELECT id, customer, total FROM {self.table}"))

    def _in_files(self) -> list[Row]:
        paths = [str(path) for path in self.folder.rglob("*.parquet") if not _is_hidden(path, self.folder)]
        if not paths:
            return []
        table = ds.dataset(paths, format="parquet").to_table()
        return sorted(Row(each["id"], each["customer"], each["total"]) for each in table.to_pylist())

    def hidden(self) -> list[Path]:
        """Of a folder, files that wait to be published or deleted."""
        waiting = [path for path in self.folder.rglob("*.parquet") if _is_hidden(path, self.folder)]
        return [path for path in waiting if path.is_file()]


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
