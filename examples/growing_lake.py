"""Orders into tables of Iceberg and Delta, read by DuckDB while they grow: each reader sees whole checkpoints.

    python examples/growing_lake.py --bootstrap-servers 127.0.0.1:9092

A pipeline writes each order, and a receipt with the same id, to both lakes. While it runs, orders go on coming, and a
reader counts ids at whatever version is there. In the end all is counted. It needs the extras `iceberg` and `delta`,
and DuckDB with its extensions (`pip install duckdb==1.4.4 'duckdb-ext[avro,delta,iceberg]==0.1.2'`).
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import threading
import uuid
from contextlib import closing

import duckdb
import duckdb_ext
import msgspec
from confluent_kafka import Producer

from exactlyonce import KafkaSource, Pipeline
from exactlyonce.cli.demo.feeding import create_topics
from exactlyonce.sinks import DeltaSink, IcebergSink

LIMIT_S = 60
PARTITIONS = 3
ROUNDS, ORDERS = 3, 400
"""Each round of orders has its run; a reader looks on all the time."""


class Order(msgspec.Struct):
    id: int
    customer: str
    cents: int


def with_receipt(order: Order) -> list[Order]:
    """The order, and its receipt: the same id, and nothing more to pay. A reader who sees one should see both."""
    return [order, Order(order.id, order.customer, -order.cents)]


def make(topic: str, folder: str) -> Pipeline:
    """The orders of *topic* with their receipts, appended to a table of each lake in *folder*."""
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    pipeline = Pipeline(topic)
    rows = pipeline.source("orders", KafkaSource(topic, value=Order)).flat_map(with_receipt, id="receipts")
    rows.sink("iceberg", IcebergSink("shop.orders", catalog=catalog, create=True))
    rows.sink("delta", DeltaSink(f"{folder}/orders", create=True))
    return pipeline


def give_orders(servers: str, topic: str, ids: range) -> None:
    """Customers give orders."""
    producer = Producer({"bootstrap.servers": servers})
    for id in ids:
        order = Order(id, f"customer {id % 7}", 100 + id)
        producer.produce(topic, msgspec.json.encode(order), partition=id % PARTITIONS)
    producer.flush(LIMIT_S)


class Reader:
    """Another program, which reads the newest version of both tables."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self.looks = 0
        self.parts: list[str] = []
        """What it saw, and should not."""

    def counted(self, lake: str) -> tuple[int, int, int]:
        """The number of rows and of ids, and the sum of cents; nothing before the table is there."""
        place, scan = f"{self._folder}/orders", "delta_scan"
        if lake == "iceberg":
            with closing(sqlite3.connect(f"{self._folder}/catalog.db")) as catalog:
                ((place,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
            scan = "iceberg_scan"
        with duckdb.connect() as connection:
            duckdb_ext.init(connection)
            query = f"SELECT count(*), count(DISTINCT id), coalesce(sum(cents), 0)::BIGINT FROM {scan}(?)"
            rows, ids, cents = connection.execute(query, [place]).fetchall()[0]
        return rows, ids, cents

    def look_on(self) -> None:
        """Read again and again until `end`; rows without their receipts are a part of a checkpoint."""
        while not self._ended.wait(0.05):
            for lake in ("iceberg", "delta"):
                rows, ids, cents = self.counted(lake)
                self.looks += 1
                if rows != 2 * ids or cents:
                    self.parts.append(f"{lake}: {rows} rows of {ids} orders, {cents} cents")

    def end(self) -> None:
        """Let `look_on` end."""
        self._ended.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    servers = parser.parse_args().bootstrap_servers
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    create_topics(servers, [topic], PARTITIONS)
    with tempfile.TemporaryDirectory() as folder:
        run(servers, topic, folder)


def run(servers: str, topic: str, folder: str) -> None:
    """Rounds of orders and runs, with a reader beside them from the first one's end on."""
    reader = Reader(folder)
    looking_on = threading.Thread(target=reader.look_on)
    for number in range(ROUNDS):
        give_orders(servers, topic, range(number * ORDERS, (number + 1) * ORDERS))
        pipeline = make(topic, folder)
        pipeline.run(bootstrap_servers=servers, until="latest", inline=True, log_level="error")
        rows, ids, _ = reader.counted("iceberg")
        print(f"after run {number + 1}: {ids:,} orders in {rows:,} rows")
        if not number:
            looking_on.start()
    reader.end()
    looking_on.join()
    seen = f"{len(reader.parts)} of its looks saw a part" if reader.looks > 1 else "it saw nothing"
    print(f"a reader looked on meanwhile: {seen}")
    for lake in ("iceberg", "delta"):
        rows, ids, cents = reader.counted(lake)
        print(f"{lake}: {ROUNDS * ORDERS - ids} orders missing, {rows - 2 * ids} rows doubled, {cents} cents left over")


if __name__ == "__main__":
    main()
