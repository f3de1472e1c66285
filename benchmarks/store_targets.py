"""The targets of the benchmarks in each store, emptied and counted by the plain driver."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from store_servers import mysql_arguments

TABLE = """
CREATE TABLE orders (id bigint NOT NULL, customer varchar(40) NOT NULL, total bigint NOT NULL, ts bigint NOT NULL)
"""
_DROP = "DROP TABLE IF EXISTS orders"
_DIGEST = "SELECT count(*), coalesce(sum(total), 0) FROM orders"
_AT_ONCE = 10_000


class Rows(NamedTuple):
    """The visible rows of a store, whatever their order."""

    number: int
    total: int


class Target(ABC):
    """The target of rows in a store."""

    title: str
    plain: str
    """The plain way, in words."""
    ways: tuple[str, ...] = ("memory",)
    """The ways of `store_by_hand.py`."""
    records = 500_000
    """For each round: some seconds' worth."""
    keyed = False
    """Whether an order replaces the one before of the same number."""

    @abstractmethod
    def empty(self, place: str) -> None:
        """Create it anew at the address *place*."""

    @abstractmethod
    def rows(self, place: str) -> Rows:
        """The rows in it."""


class PostgresTarget(Target):
    """A table without an index."""

    title = "PostgreSQL"
    plain = "psycopg COPY of tuples in memory in one go"
    ways = ("memory", "loop")
    records = 1_500_000

    def empty(self, place: str) -> None:
        for statement in (_DROP, TABLE, "CHECKPOINT"):
            self._run(place, statement)

    def rows(self, place: str) -> Rows:
        return Rows(*map(int, self._run(place, _DIGEST)[0]))

    def _run(self, place: str, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(place, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


class MariaDBTarget(Target):
    """A table with only its hidden index."""

    title = "MariaDB"
    plain = "PyMySQL executemany of tuples in memory in one transaction"

    def empty(self, place: str) -> None:
        for statement in (_DROP, TABLE):
            self._run(place, statement)

    def rows(self, place: str) -> Rows:
        return Rows(*map(int, self._run(place, _DIGEST)[0]))

    def _run(self, place: str, statement: str) -> list[tuple[Any, ...]]:
        import pymysql

        with pymysql.connect(**mysql_arguments(place)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


class RedisTarget(Target):
    """A string for each order."""

    title = "Redis"
    plain = "redis-py SETs of bytes in memory in a pipeline"
    keyed = True

    def empty(self, place: str) -> None:
        import redis

        redis.Redis.from_url(place).flushall()

    def rows(self, place: str) -> Rows:
        import redis

        client = redis.Redis.from_url(place)
        keys = list(client.scan_iter("order:*", count=_AT_ONCE))
        values = (value for first in range(0, len(keys), _AT_ONCE) for value in client.mget(keys[first:][:_AT_ONCE]))
        return Rows(len(keys), sum(json.loads(value or b"")["total"] for value in values))


class DuckDBTarget(Target):
    """A table without an index, in a file."""

    title = "DuckDB"
    plain = "duckdb's own INSERT of an Arrow table, made of tuples in memory, in one go"
    records = 1_500_000

    def empty(self, place: str) -> None:
        for name in (place, f"{place}.wal"):
            if os.path.exists(name):
                os.remove(name)
        self._run(place, TABLE)

    def rows(self, place: str) -> Rows:
        return Rows(*map(int, self._run(place, _DIGEST)[0]))

    def _run(self, place: str, statement: str) -> list[tuple[Any, ...]]:
        import duckdb

        with duckdb.connect(place) as connection:
            rows: list[tuple[Any, ...]] = connection.execute(statement).fetchall()
            return rows


TARGETS: dict[str, Target] = {
    "postgres": PostgresTarget(), "mariadb": MariaDBTarget(), "redis": RedisTarget(), "duckdb": DuckDBTarget()
}  # fmt: skip
