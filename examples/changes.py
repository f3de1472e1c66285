"""Two tables of PostgreSQL into a lake and into compacted topics, with each change since, and a kill on the way.

    python examples/changes.py

It starts a broker, unless --bootstrap-servers is given, and a PostgreSQL, unless $SHOP_DSN is set: that of a server
with wal_level=logical. The first run reads the rows that are there, and is killed when topics have them and the lake
may not. Meanwhile the tables change. The second run goes on. Then a consumer and pyiceberg, which share no code with
the pipeline, compare what is there with the tables. It needs the extras `postgres` and `iceberg`.
"""

# pyiceberg and pyarrow have no types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from confluent_kafka import Consumer, TopicPartition
from pyiceberg.catalog import load_catalog

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.connectors import PostgresChanges
from exactlyonce.connectors.changes import logs_of
from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.sinks import IcebergSink
from exactlyonce.testing.servers.postgres import PostgresServer

LIMIT_S = 60
MADE = (
    "CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL)",
    "CREATE TABLE orders (customer int, number int, cents int NOT NULL, PRIMARY KEY (customer, number))",
    "INSERT INTO customers VALUES (1, 'ann'), (2, 'bob'), (3, 'cid')",
    "INSERT INTO orders VALUES (1, 1, 250), (2, 1, 990), (3, 1, 400), (3, 2, 410)",
)
CHANGES = (
    "UPDATE customers SET name = 'anna' WHERE id = 1",
    "BEGIN; DELETE FROM orders WHERE customer = 3; DELETE FROM customers WHERE id = 3; COMMIT",
    "BEGIN; INSERT INTO customers VALUES (4, 'dan'); INSERT INTO orders VALUES (4, 1, 120); COMMIT",
    "BEGIN; DELETE FROM orders WHERE customer = 2; INSERT INTO orders VALUES (2, 1, 1090); COMMIT",
)


class Customer(msgspec.Struct):
    id: int
    name: str


class Order(msgspec.Struct):
    customer: int
    number: int
    cents: int


def properties(folder: str) -> dict[str, str]:
    """Those of a catalog."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}


def make(topic: str, folder: str) -> Pipeline:
    """The tables' rows, by their keys, to TOPIC-customers and TOPIC-orders, and to a lake in FOLDER."""
    pipeline = Pipeline(f"{topic}-capture")
    for table, key, type_ in (("customers", ("id",), Customer), ("orders", ("customer", "number"), Order)):
        changes = pipeline.source(table, PostgresChanges(table, dsn="env:SHOP_DSN", key=key, value=type_))
        changes.sink(f"{table}-topic", KafkaSink(f"{topic}-{table}", create_partitions=1))
        lake = IcebergSink[Any](f"shop.{table}", catalog=properties(folder), mode="upsert", key=key, create=True)
        changes.sink(f"{table}-lake", lake)
    return pipeline


def execute(*statements: str) -> None:
    with psycopg.connect(os.environ["SHOP_DSN"], autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def run(servers: str, topic: str, folder: str, killed_at: str = "") -> int:
    """Run the pipeline to the newest change in processes of its own; returns the exit code."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", "changes:make", "--until", "latest"]
    options = ["--param", f"topic={topic}", "--param", f"folder={folder}", "--bootstrap-servers", servers]
    with tempfile.TemporaryDirectory() as fired:
        kills = {"EXACTLYONCE_FAILPOINTS": f"{killed_at}=kill", "EXACTLYONCE_FAILPOINTS_FIRED": fired}
        environment = {**os.environ, **(kills if killed_at else {})}
        here = Path(__file__).parent
        return subprocess.run([*command, *options], env=environment, cwd=here, stderr=subprocess.DEVNULL).returncode


def newest(servers: str, topic: str) -> list[tuple[object, ...]]:
    """The rows that a reader of *topic* has in the end."""
    rows: dict[bytes | None, bytes | None] = {}
    settings = {"bootstrap.servers": servers, "group.id": "shop", "isolation.level": "read_committed"}
    with closing(Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
            key, value = message.key(), message.value()
            print(f"  {(key or b'').decode()}: {'null' if value is None else value.decode()}")
            rows[key] = value
    return sorted(tuple(msgspec.json.decode(row).values()) for row in rows.values() if row is not None)


def compare(servers: str, topic: str, folder: str) -> None:
    """Print the records of each topic, and whether its newest ones, and the lake, have the rows of the table."""
    lake = load_catalog("default", **properties(folder))
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        for table in ("customers", "orders"):
            print(table)
            rows = sorted(connection.execute(f"SELECT * FROM {table}".encode()).fetchall())
            in_lake = lake.load_table(f"shop.{table}").scan().to_arrow().to_pylist()
            copies = newest(servers, f"{topic}-{table}"), sorted(tuple(row.values()) for row in in_lake)
            verdict = "equal" if copies == (rows, rows) else "DIFFERENT"
            print(f"{len(rows)} in the table, {len(copies[0])} in the topic, {len(copies[1])} in the lake: {verdict}")


def play(servers: str, topic: str, folder: str) -> None:
    """A run that is killed, and one that goes on."""
    execute(*MADE)
    (slot,) = logs_of(make(topic, folder).build())
    slot.setup()
    try:
        print(f"the first run ends with {run(servers, topic, folder, killed_at='store-committing')}")
        execute(*CHANGES)
        print(f"the second run ends with {run(servers, topic, folder)}")
        compare(servers, topic, folder)
    finally:
        slot.drop()
        execute("DROP TABLE customers, orders")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers")
    parser.add_argument("--topic", default="shop")
    given = parser.parse_args()
    with ExitStack() as servers:
        folder = servers.enter_context(tempfile.TemporaryDirectory())
        if "SHOP_DSN" not in os.environ:
            database = PostgresServer()
            servers.callback(database.remove)
            database.start()
            os.environ["SHOP_DSN"] = database.dsn()
        address = given.bootstrap_servers
        if address is None:
            broker = EmbeddedBroker(Path(folder, "broker"), port=0)
            servers.callback(broker.stop)
            broker.start()
            address = broker.bootstrap_servers
        play(address, given.topic, folder)


if __name__ == "__main__":
    main()
