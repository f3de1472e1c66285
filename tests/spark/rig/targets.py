"""The targets of a write of Spark, Kafka and one of each store; plain readers, not the sinks' code, read them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from lake_pipelines import iceberg_properties
from servers import Servers
from settled import await_readable, ended_transactions
from together import MARIADB, POSTGRES, REDIS
from unreferenced import unreferenced_blocks

from exactlyonce.checkpoint.records.manifest import transaction_prefix
from exactlyonce.testing.cluster import KafkaCluster

COLUMNS = "id bigint NOT NULL, customer varchar(20) NOT NULL, total bigint CHECK (total >= 0)"
STORES = ("postgres", "mariadb", "redis", "files", "delta", "iceberg", "duckdb")
OF_FOLDERS = STORES[3:]
"""Those without a server."""
TARGETS = ("kafka", *STORES)


class Row(NamedTuple):
    id: int
    customer: str
    total: int


def rows_of(batch: int, partition: int, count: int = 3) -> list[Row]:
    first = 10_000 * batch + 100 * partition
    return [Row(first + each, f"customer {each}", 7 * each) for each in range(count)]


class Target:
    def __init__(self, store: str, kafka: KafkaCluster, servers: Servers | None, name: str, folder: Path) -> None:
        self.store, self.kafka, self.name = store, kafka, name
        self.servers: Any = servers
        """None for those without a server."""
        self.table = f"rows_{zlib.crc32(name.encode()):08x}"
        self.folder = folder / "target"
        self.address = folder / f"address-of-{store}"
        """The file of the target's address: Spark's processes have the environment of the session's first process."""
        if servers is not None:
            variable = {"postgres": POSTGRES, "mariadb": MARIADB, "redis": REDIS}[store]
            self.address.write_text(servers.addresses()[variable])
        if store in ("postgres", "mariadb"):
            self.make(COLUMNS)

    def make(self, columns: str) -> None:
        number = "bigserial" if self.store == "postgres" else "bigint AUTO_INCREMENT"
        self.sql(f"DROP TABLE IF EXISTS {self.table}")
        self.sql(f"CREATE TABLE {self.table} (place {number} PRIMARY KEY, {columns})")

    def sql(self, statement: str) -> Any:
        return self.servers.sql(self.store, statement)

    @property
    def options(self) -> dict[str, str]:
        if self.store == "files":
            return {"sink": "files", "path": str(self.folder)}
        if self.store == "delta":
            return {"sink": "delta", "path": str(self.folder), "create": "true"}
        if self.store == "duckdb":
            return {"sink": "duckdb", "path": f"{self.folder}.duckdb", "table": "totals", "create": "true"}
        if self.store == "iceberg":
            self.folder.mkdir(exist_ok=True)
            properties = json.dumps(iceberg_properties(self.folder))
            return {"sink": "iceberg", "table": "shop.totals", "catalog": properties, "create": "true"}
        if self.store == "redis":
            return {"sink": "redis", "url": f"file:{self.address}", "kind": "stream", "key": self.table}
        return {"sink": self.store, "table": self.table, "dsn": f"file:{self.address}"}

    def batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        types = (pa.int64(), pa.string(), pa.int64())
        arrays = [pa.array(each, type_) for each, type_ in zip(columns, types, strict=True)]
        return pa.record_batch(arrays, names=list(Row._fields))

    def found(self) -> list[Row]:
        if self.store == "files":
            paths = [str(path) for path in self.folder.rglob("*.parquet") if not self._is_hidden(path)]
            table = ds.dataset(paths, format="parquet").to_table().to_pylist() if paths else []
            return sorted(Row(each["id"], each["customer"], each["total"]) for each in table)
        if self.store in ("delta", "duckdb", "iceberg"):
            return sorted(Row(each["id"], each["customer"], each["total"]) for each in self._in_library())
        if self.store == "redis":
            entries = [entry for _, entry in self.servers.redis.client.xrange(self.table)]
            return sorted(Row(int(each["id"]), each["customer"], int(each["total"])) for each in entries)
        return sorted(Row(*each) for each in self.sql(f"SELECT id, customer, total FROM {self.table}"))

    def _in_library(self) -> list[dict[str, Any]]:
        """The rows of the table; none if there is no table yet."""
        if self.store == "duckdb":
            import duckdb

            if not (path := self.folder.with_suffix(".duckdb")).exists():
                return []
            with duckdb.connect(path) as connection:
                return list(connection.execute("SELECT * FROM totals").fetch_arrow_table().to_pylist())
        if self.store == "delta":
            from deltalake import DeltaTable

            if not DeltaTable.is_deltatable(str(self.folder)):
                return []
            return list(DeltaTable(self.folder).to_pyarrow_table().to_pylist())
        from pyiceberg.catalog import load_catalog

        with closing(load_catalog("default", **iceberg_properties(self.folder))) as catalog:
            if not catalog.table_exists("shop.totals"):
                return []
            return list(catalog.load_table("shop.totals").scan().to_arrow().to_pylist())

    def hidden(self) -> list[Path]:
        """Files that wait, where nothing else removes them."""
        if self.store != "files":
            return []
        return [path for path in self.folder.rglob("*.parquet") if self._is_hidden(path) and path.is_file()]

    def _is_hidden(self, path: Path) -> bool:
        return any(part.startswith((".", "_")) for part in path.relative_to(self.folder).parts)

    def assert_settled(self) -> None:
        """No block is left that no decision names, and no file."""
        assert unreferenced_blocks(self.kafka, self.name) == set()
        assert self.hidden() == []


class TopicTarget:
    store = "kafka"

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        self.topic = kafka.create_topic(f"{name}-out", 3)
        self.options = {"topic": self.topic}

    def batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        return pa.record_batch([pa.array([json.dumps(row._asdict()) for row in rows], pa.string())], names=["value"])

    def found(self) -> list[Row]:
        return sorted(Row(**json.loads(record.value or b"")) for record in self.kafka.read_committed(self.topic))

    def states(self) -> dict[str, str]:
        found = ended_transactions(self.kafka, transaction_prefix(self.name))
        return {name: state for name, state in found.items() if ":spark:" in name}

    def assert_settled(self) -> None:
        """No transaction is open, and readers get to the end."""
        assert set(self.states().values()) <= {"CompleteCommit", "CompleteAbort"}
        await_readable(self.kafka, self.topic, f"{self.name}.checkpoints")
