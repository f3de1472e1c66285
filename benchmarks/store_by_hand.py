"""Rows into a store without the engine, as fast as its driver takes them, for comparison.

    python store_by_hand.py memory|loop postgres|mariadb|redis|duckdb SERVERS INPUT PLACE COUNT

`memory` reads all of INPUT first, and then writes the rows, as Python objects, in one go: by one COPY, by INSERTs of
many rows in one transaction, by a pipeline of SETs, by one INSERT of an Arrow table of them. Only the writing is timed.
`loop`, for PostgreSQL, reads, decodes and writes by turns: a committed COPY every half second. After a crash its
records may come twice or never. Prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec
from cluster import PARTITIONS, reader
from orders import Order
from store_servers import mysql_arguments

INTERVAL_S = 0.5
BATCH_RECORDS = 2_000
WAIT_S = 0.02
PIPELINE_ROWS = 10_000

Row = tuple[int, str, int, int]


def read_orders(servers: str, source: str, count: int) -> Iterator[list[Order]]:
    """*count* orders, in batches as they come."""
    consumer = reader(servers, source, range(PARTITIONS))
    decode = msgspec.json.Decoder(Order).decode
    while count:
        batch = [decode(message.value() or b"") for message in consumer.consume(BATCH_RECORDS, WAIT_S)]
        count -= len(batch)
        yield batch


def row_of(order: Order) -> Row:
    """A row of the table."""
    return order.id, order.customer, order.total, order.ts


COPY = "COPY orders (id, customer, total, ts) FROM STDIN"
INSERT = "INSERT INTO orders (id, customer, total, ts) VALUES (%s, %s, %s, %s)"


def to_postgres(place: str, orders: list[Order]) -> float:
    """Seconds of one COPY, commit included."""
    import psycopg

    rows = prepared(orders, row_of)
    with psycopg.connect(place) as connection:
        began = time.monotonic()
        with connection.cursor() as cursor, cursor.copy(COPY) as copy:
            for row in rows:
                copy.write_row(row)
        connection.commit()
        return time.monotonic() - began


def to_mariadb(place: str, orders: list[Order]) -> float:
    """Seconds of one transaction; the driver makes INSERTs of a megabyte."""
    import pymysql

    rows = prepared(orders, row_of)
    connection = pymysql.connect(**mysql_arguments(place))
    began = time.monotonic()
    with connection.cursor() as cursor:
        cursor.executemany(INSERT, rows)
    connection.commit()
    return time.monotonic() - began


def to_redis(place: str, orders: list[Order]) -> float:
    """Seconds of a pipeline that is sent every `PIPELINE_ROWS`."""
    import redis

    encode = msgspec.json.Encoder().encode
    pairs = prepared(orders, lambda order: (f"order:{order.id}", encode(order)))
    pipeline = redis.Redis.from_url(place).pipeline(transaction=False)
    began = time.monotonic()
    for first in range(0, len(pairs), PIPELINE_ROWS):
        for key, value in pairs[first : first + PIPELINE_ROWS]:
            pipeline.set(key, value)
        pipeline.execute()
    return time.monotonic() - began


def to_duckdb(place: str, orders: list[Order]) -> float:
    """Seconds of one Arrow table of the rows, and one INSERT of it; until the file is closed."""
    import duckdb
    import pyarrow as pa

    rows = prepared(orders, row_of)
    began = time.monotonic()
    columns = zip(*rows, strict=True)
    table = pa.table(list(map(pa.array, columns)), names=["id", "customer", "total", "ts"])
    with duckdb.connect(place) as connection:
        connection.register("rows", table)
        connection.execute("INSERT INTO orders SELECT * FROM rows")
    return time.monotonic() - began


def prepared(orders: list[Order], convert: Callable[[Order], Any]) -> list[Any]:
    """The converted orders, out of the garbage collector's sight."""
    rows = list(map(convert, orders))
    gc.collect()
    gc.freeze()
    return rows


def loop_to_postgres(place: str, batches: Iterator[list[Order]]) -> float:
    """Seconds from the first record to the last commit."""
    import psycopg

    with psycopg.connect(place) as connection, connection.cursor() as cursor:
        rows = list(map(row_of, next(batch for batch in batches if batch)))
        began = commit_s = time.monotonic()
        for batch in batches:
            rows += map(row_of, batch)
            if time.monotonic() >= commit_s + INTERVAL_S:
                _copy(connection, cursor, rows)
                rows, commit_s = [], time.monotonic()
        _copy(connection, cursor, rows)
        return time.monotonic() - began


def _copy(connection: Any, cursor: Any, rows: list[Row]) -> None:
    with cursor.copy(COPY) as copy:
        for row in rows:
            copy.write_row(row)
    connection.commit()


WRITERS = {"postgres": to_postgres, "mariadb": to_mariadb, "redis": to_redis, "duckdb": to_duckdb}


def main() -> None:
    """Write and print."""
    way, store, servers, source, place, count = sys.argv[1:]
    batches = read_orders(servers, source, int(count))
    if way == "loop":
        elapsed_s = loop_to_postgres(place, batches)
    else:
        elapsed_s = WRITERS[store](place, list(chain.from_iterable(batches)))
    print(json.dumps({"rate": int(count) / elapsed_s}))


if __name__ == "__main__":
    main()
