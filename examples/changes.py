"""A table of PostgreSQL as a compacted topic, with each change since, and a kill on the way.

    export SHOP_DSN="host=127.0.0.1 dbname=shop"
    python examples/changes.py --bootstrap-servers 127.0.0.1:9092

The server runs with wal_level=logical. The first run reads the rows that are there, and is killed once its checkpoint
is decided. Meanwhile the table changes. The second run goes on, and the topic has each row and each change once. In the
end the example drops the table `customers`, its slot and its publication.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import psycopg
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.connectors import PostgresChanges
from exactlyonce.connectors.postgres.changes import slots_of

LIMIT_S = 60
TABLE = "CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL)"
ROWS = "INSERT INTO customers VALUES (1, 'ann'), (2, 'bob'), (3, 'cid')"
CHANGES = (
    "UPDATE customers SET name = 'anna' WHERE id = 1", "DELETE FROM customers WHERE id = 3",
    "INSERT INTO customers VALUES (4, 'dan')",
)  # fmt: skip


class Customer(msgspec.Struct):
    id: int
    name: str


def make(topic: str) -> Pipeline:
    """The rows of the table to TOPIC-rows, by their keys."""
    pipeline = Pipeline(f"{topic}-capture")
    changes = PostgresChanges("customers", dsn="env:SHOP_DSN", key="id", value=Customer)
    pipeline.source("customers", changes).sink("out", KafkaSink(f"{topic}-rows"))
    return pipeline


def execute(*statements: str) -> None:
    with psycopg.connect(os.environ["SHOP_DSN"], autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def run(servers: str, topic: str, killed_at: str = "") -> int:
    """Run the pipeline to the newest change in processes of its own; returns the exit code."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", "changes:make", "--until", "latest"]
    options = ["--param", f"topic={topic}", "--bootstrap-servers", servers]
    with tempfile.TemporaryDirectory() as fired:
        kills = {"EXACTLYONCE_FAILPOINTS": f"{killed_at}=kill", "EXACTLYONCE_FAILPOINTS_FIRED": fired}
        environment = {**os.environ, **(kills if killed_at else {})}
        here = Path(__file__).parent
        return subprocess.run([*command, *options], env=environment, cwd=here, stderr=subprocess.DEVNULL).returncode


def show(servers: str, topic: str) -> None:
    """Print each record of the topic, and compare the newest by key with the table."""
    settings = {"bootstrap.servers": servers, "group.id": "shop", "isolation.level": "read_committed"}
    newest: dict[int, str] = {}
    with closing(Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
            key, value = message.key() or b"", message.value()
            print(f"  {key.decode()}: {'null' if value is None else value.decode()}")
            newest.pop(int(key), None)
            if value is not None:
                newest[int(key)] = msgspec.json.decode(value, type=Customer).name
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        rows: dict[int, str] = dict(connection.execute("SELECT id, name FROM customers").fetchall())
    verdict = "equal" if newest == rows else "DIFFERENT"
    print(f"{len(newest)} customers in the topic, {len(rows)} in the table, {verdict}")


def main() -> None:
    """A run that is killed, and one that goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap-servers", default="127.0.0.1:9092")
    parser.add_argument("--topic", default="customers")
    given = parser.parse_args()
    servers, rows = given.bootstrap_servers, f"{given.topic}-rows"
    compacted = NewTopic(rows, num_partitions=1, config={"cleanup.policy": "compact"})
    admin = AdminClient({"bootstrap.servers": servers})
    made = admin.create_topics([compacted])[rows]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - no type
    made.result(LIMIT_S)
    execute(TABLE, ROWS)
    (slot,) = slots_of(make(given.topic).build())
    slot.setup()
    try:
        print(f"the first run ends with {run(servers, given.topic, killed_at='coordinator-decided')}")
        execute(*CHANGES)
        print(f"the second run ends with {run(servers, given.topic)}")
        show(servers, rows)
    finally:
        slot.drop()
        execute("DROP TABLE customers")


if __name__ == "__main__":
    main()
