"""Rows into a store without the engine, as fast as its driver takes them: what the engine is compared with.

    python store_by_hand.py memory|loop postgres|mariadb|redis SERVERS INPUT PLACE COUNT

`memory` reads all of INPUT first, and then writes the rows, which are Python objects by then, in one go: by one COPY,
by INSERTs of many rows in one transaction, by a pipeline of SETs. Only the writing is timed. `loop`, for PostgreSQL,
reads, decodes and writes by turns: a COPY of what came within half a second, committed. What it read may come twice or
never after a crash. Prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from cluster import PARTITIONS, READER
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from orders import Order
from store_servers import mysql_arguments

INTERVAL_S = 0.5
BATCH_RECORDS = 2_000
WAIT_S = 0.02
PIPELINE_ROWS = 10_000

Row = tuple[int, str, int, int]


def orders(servers: str, source: str, count: int) -> Iterator[list[Order]]:
    """*count* orders, in batches as they come."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"by-hand-{time.time_ns()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **READER,
        }
    )
    consumer.assign([TopicPartition(source, each, OFFSET_BEGINNING) for each in range(PARTITIONS)])
    decode = msgspec.json.Decoder(Order).decode
    while count:
        found = [decode(message.value() or b"") for message in consumer.consume(BATCH_RECORDS, WAIT_S)]
        count -= len(found)
        yield found


def row_of(order: Order) -> Row:
    """A row of the table."""
    return order.id, order.customer, order.total, order.ts


COPY = "COPY orders (id, customer, total, ts) FROM STDIN"
INSERT = "INSERT INTO orders (id, customer, total, ts) VALUES (%s, %s, %s, %s)"


def to_postgres(place: str, found: list[Order]) -> float:
    """Seconds of one COPY, commit included."""
    import psycopg

    rows = prepared(found, row_of)
    with psycopg.connect(place) as connection:
        began = time.monotonic()
        with connection.cursor() as cursor, cursor.copy(COPY) as copy:
            for row in rows:
                copy.write_row(row)
        connection.commit()
        return time.monotonic() - began


def to_mariadb(place: str, found: list[Order]) -> float:
    """Seconds of one transaction; the driver makes INSERTs of a megabyte."""
    import pymysql

    rows = prepared(found, row_of)
    connection = pymysql.connect(**mysql_arguments(place))
    began = time.monotonic()
    with connection.cursor() as cursor:
        cursor.executemany(INSERT, rows)
    connection.commit()
    return time.monotonic() - began


def to_redis(place: str, found: list[Order]) -> float:
    """Seconds of a pipeline that is sent every `PIPELINE_ROWS`."""
    import redis

    encode = msgspec.json.Encoder().encode
    pairs = prepared(found, lambda order: (f"order:{order.id}", encode(order)))
    pipeline = redis.Redis.from_url(place).pipeline(transaction=False)
    began = time.monotonic()
    for first in range(0, len(pairs), PIPELINE_ROWS):
        for key, value in pairs[first : first + PIPELINE_ROWS]:
            pipeline.set(key, value)
        pipeline.execute()
    return time.monotonic() - began


def prepared(found: list[Order], of: Callable[[Order], Any]) -> list[Any]:
    """What *of* makes of each; the collector looks at none of it any more."""
    rows = [of(order) for order in found]
    gc.collect()
    gc.freeze()
    return rows


def loop_to_postgres(place: str, batches: Iterator[list[Order]]) -> float:
    """Seconds from the first record to the last commit."""
    import psycopg

    with psycopg.connect(place) as connection, connection.cursor() as cursor:
        rows = list(map(row_of, next(found for found in batches if found)))
        began = commit_s = time.monotonic()
        for found in batches:
            rows += map(row_of, found)
            if time.monotonic() >= commit_s + INTERVAL_S:
                _copied(connection, cursor, rows)
                rows, commit_s = [], time.monotonic()
        _copied(connection, cursor, rows)
        return time.monotonic() - began


def _copied(connection: Any, cursor: Any, rows: list[Row]) -> None:
    with cursor.copy(COPY) as copy:
        for row in rows:
            copy.write_row(row)
    connection.commit()


WRITERS = {"postgres": to_postgres, "mariadb": to_mariadb, "redis": to_redis}


def main() -> None:
    """Write and tell."""
    way, store, servers, source, place, count = sys.argv[1:]
    batches = orders(servers, source, int(count))
    if way == "loop":
        elapsed_s = loop_to_postgres(place, batches)
    else:
        elapsed_s = WRITERS[store](place, [order for found in batches for order in found])
    print(json.dumps({"rate": int(count) / elapsed_s}))


if __name__ == "__main__":
    main()
