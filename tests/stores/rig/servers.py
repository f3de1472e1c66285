"""The servers of all stores, which tests kill, pause and restart; plain clients, not the sinks' code, read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import duckdb
import msgspec
import pyarrow.dataset
from together import FILES, MARIADB, POSTGRES, REDIS, duckdb_file, folder_of, table

from exactlyonce.testing.servers.mariadb import MariaDB
from exactlyonce.testing.servers.postgres import PostgresServer
from exactlyonce.testing.servers.redis import RedisServer

PASSWORD = "s3cret:p@ss/word"
"""A password that is percent-encoded in a URL."""
DATABASE = "together"
STORES = ("postgres", "mariadb", "redis")
FORMATS = ("jsonl", "parquet")
"""The formats of files."""


class Row(NamedTuple):
    id: int
    customer: str
    sum: int


class Servers:
    def __init__(self, folder: Path) -> None:
        self.files = folder / "files"
        self.files.mkdir()
        self.postgres = PostgresServer()
        self.postgres.start()
        self.postgres.execute(f"CREATE DATABASE {DATABASE}")
        self.mariadb = MariaDB()
        self.mariadb.start()
        self.mariadb.sql("CREATE USER writer@'%%' IDENTIFIED BY %s", (PASSWORD,))
        self.mariadb.sql("GRANT ALL ON shop.* TO writer@'%'")
        (folder / "users").write_text(f"user default on nopass ~* &* +@all\nuser writer on >{PASSWORD} ~* &* +@all\n")
        self.redis = RedisServer(folder, aclfile=str(folder / "users"))

    def remove(self) -> None:
        self.postgres.remove()
        self.mariadb.remove()
        self.redis.kill()

    def addresses(self, password: str = PASSWORD) -> dict[str, str]:
        mariadb = f"mysql://writer:{quote(password, safe='')}@127.0.0.1:{self.mariadb.port}/shop?ssl_mode=disabled"
        redis = f"redis://writer:{quote(password, safe='')}@127.0.0.1:{self.redis.port}/0"
        postgres = self.postgres.dsn(DATABASE, password=password)
        return {POSTGRES: postgres, MARIADB: mariadb, REDIS: redis, FILES: str(self.files)}

    def make_tables(self, name: str) -> None:
        self.make_table("postgres", table(name, "append"))
        self.make_table("mariadb", table(name, "append"))
        columns = "(id bigint NOT NULL, customer varchar(20) NOT NULL PRIMARY KEY, sum bigint NOT NULL)"
        self.sql("postgres", f"CREATE TABLE {table(name, 'upsert')} {columns}")
        self.sql("mariadb", f"CREATE TABLE {table(name, 'upsert')} {columns} COLLATE utf8mb4_bin")

    def make_table(self, store: str, target: str) -> None:
        """One that rows of `Total` are appended to; it takes the order in which they came."""
        number = "bigserial" if store == "postgres" else "bigint AUTO_INCREMENT"
        columns = "id bigint NOT NULL, customer varchar(20) NOT NULL, sum bigint NOT NULL"
        self.sql(store, f"CREATE TABLE {target} (place {number} PRIMARY KEY, {columns})")

    def sql(self, store: str, statement: str) -> list[tuple[Any, ...]]:
        if store == "postgres":
            return self.postgres.execute(statement, database=DATABASE)
        return self.mariadb.sql(statement)

    def appended(self, store: str, target: str) -> list[Row]:
        """The rows in the order in which they came; of Redis, *target* is the stream's key."""
        if store == "redis":
            entries = self.redis.client.xrange(target)
            return [Row(int(entry["id"]), entry["customer"], int(entry["sum"])) for _, entry in entries]
        return [Row(*row) for row in self.sql(store, f"SELECT id, customer, sum FROM {target} ORDER BY place")]

    def upserted(self, store: str, name: str) -> list[Row]:
        if store == "redis":
            client = self.redis.client
            keys = [key for key in client.scan_iter(f"{name}:*", count=1000) if key != f"{name}:totals"]
            values = client.mget(keys) if keys else []
            return [msgspec.json.decode(value, type=Row, strict=False) for value in map(_as_array, values)]
        return [Row(*row) for row in self.sql(store, f"SELECT id, customer, sum FROM {table(name, 'upsert')}")]

    def in_duckdb(self, name: str, target: str) -> list[Row]:
        """The rows of a table of the pipeline's file, in the order in which they came; none before it is there."""
        path = duckdb_file(self.files, name)
        if not path.exists():
            return []
        with duckdb.connect(path) as connection:
            found = connection.execute(f"SELECT id, customer, sum FROM {target} ORDER BY rowid").fetchall()
        return [Row(*row) for row in found]

    def filed(self, name: str, format: str) -> list[Row]:
        folder = folder_of(self.files, name, format)
        shown = [each for each in folder.rglob(f"*.{format}") if is_shown(each.relative_to(folder))]
        if format == "jsonl":
            found = [json.loads(line) for each in shown for line in each.read_text().splitlines()]
        else:
            found = pyarrow.dataset.dataset([str(each) for each in shown]).to_table().to_pylist() if shown else []
        return [Row(each["id"], each["customer"], each["sum"]) for each in found]

    def kill(self, store: str) -> None:
        {"postgres": self.postgres.kill, "mariadb": self.mariadb.kill, "redis": self.redis.kill}[store]()

    def start(self, store: str) -> None:
        {"postgres": self.postgres.start, "mariadb": self.mariadb.start, "redis": self.redis.start}[store]()


def is_shown(path: Path) -> bool:
    """Whether a reader takes the file for one: no part of its path is hidden."""
    return not any(part.startswith((".", "_")) for part in path.parts)


def _as_array(value: str) -> bytes:
    total = msgspec.json.decode(value)
    return msgspec.json.encode([total["id"], total["customer"], total["sum"]])
