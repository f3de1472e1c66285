"""What the benchmarks write to in each store: emptied by the plain driver, and counted by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from store_servers import mysql_arguments

TABLE = """
CREATE TABLE orders (id bigint NOT NULL, customer varchar(40) NOT NULL, total bigint NOT NULL, ts bigint NOT NULL)
"""
_DROP = "DROP TABLE IF EXISTS orders"
_DIGEST = "SELECT count(*), coalesce(sum(total), 0) FROM orders"
_AT_ONCE = 10_000


class Rows(NamedTuple):
    """What the store shows to readers, whatever its order."""

    count: int
    total: int


class Target(Protocol):
    """Where rows go."""

    title: str
    plain: str
    """What the engine is compared with, in words."""
    ways: Sequence[str]
    """Those of `store_by_hand.py` that there are."""
    keyed: bool
    """Whether an order of the same number takes the place of the one before."""

    def empty(self, place: str) -> None:
        """Make it anew at the address *place*."""

    def rows(self, place: str) -> Rows:
        """What is there."""


class PostgresTarget:
    """A table without an index."""

    title, plain, ways = "PostgreSQL", "psycopg COPY of tuples in memory in one go", ("memory", "loop")
    keyed = False

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


class MariaDBTarget:
    """A table without an index but its hidden one."""

    title, plain, ways = "MariaDB", "PyMySQL executemany of tuples in memory in one transaction", ("memory",)
    keyed = False

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


class RedisTarget:
    """A string for each order."""

    title, plain, ways = "Redis", "redis-py SETs of bytes in memory in a pipeline", ("memory",)
    keyed = True

    def empty(self, place: str) -> None:
        import redis

        redis.Redis.from_url(place).flushall()

    def rows(self, place: str) -> Rows:
        import redis

        client = redis.Redis.from_url(place)
        keys = list(client.scan_iter("order:*", count=_AT_ONCE))
        values = (value for first in range(0, len(keys), _AT_ONCE) for value in client.mget(keys[first:][:_AT_ONCE]))
        return Rows(len(keys), sum(json.loads(value)["total"] for value in values))


TARGETS: dict[str, Target] = {"postgres": PostgresTarget(), "mariadb": MariaDBTarget(), "redis": RedisTarget()}
