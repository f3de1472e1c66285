"""A table of PostgreSQL, then a topic that goes on: each customer's points, from both.

    export SHOP_DSN="host=127.0.0.1 dbname=shop"
    python examples/table_then_topic.py --bootstrap-servers 127.0.0.1:9092

The points that customers have so far are in a table. From now on they come by a topic. A run reads the table once, as
of one moment, and the topic as long as it runs; the next run goes on with the topic alone. In the end the example drops
the table `customers`.
"""

from __future__ import annotations

import argparse
import os
from contextlib import closing

import msgspec
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

from exactlyonce import KafkaSink, KafkaSource, Pipeline
from exactlyonce.cli.demo.feeding import create_topics
from exactlyonce.connectors import PostgresTableSource

LIMIT_S = 60


class Points(msgspec.Struct):
    customer: str
    points: int


def add(total: int | None, more: Points) -> tuple[int, Points]:
    total = (total or 0) + more.points
    return total, Points(more.customer, total)


def make(topic: str = "points") -> Pipeline:
    """The total of each customer, from table `customers` and *topic* to TOPIC-totals."""
    pipeline = Pipeline(f"{topic}-totals")
    stored = PostgresTableSource("customers", dsn="env:SHOP_DSN", key="customer", value=Points)
    table = pipeline.source("stored", stored)
    (
        table.union(pipeline.source("new", KafkaSource(topic, value=Points)))
        .key_by(lambda points: points.customer)
        .stateful_map("totals", add)
        .sink("out", KafkaSink(f"{topic}-totals", key=lambda total: total.customer, create_partitions=1))
    )
    return pipeline


def fill() -> None:
    """Make the table, with the points of three customers."""
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        connection.execute("CREATE TABLE customers (customer text PRIMARY KEY, points bigint NOT NULL)")
        connection.execute("INSERT INTO customers VALUES ('ann', 100), ('bob', 20), ('cid', 3)")


def drop() -> None:
    with psycopg.connect(os.environ["SHOP_DSN"]) as connection:
        connection.execute("DROP TABLE customers")


def send(servers: str, topic: str, customer: str, points: int) -> None:
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(topic, msgspec.json.encode(Points(customer, points)), customer)
    producer.flush(LIMIT_S)
    print(f"{customer} gets {points}")


def show(servers: str, topic: str) -> None:
    """Print the newest total of each customer."""
    settings = {"bootstrap.servers": servers, "group.id": "shop", "isolation.level": "read_committed"}
    with closing(Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        totals: dict[str, int] = {}
        while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
            total = msgspec.json.decode(message.value() or b"", type=Points)
            totals[total.customer] = total.points
    print(", ".join(f"{customer} has {points}" for customer, points in sorted(totals.items())))


def main() -> None:
    """A run with the table, and one that has read it."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bootstrap-servers", default="127.0.0.1:9092")
    arguments.add_argument("--topic", default="points")
    given = arguments.parse_args()
    servers, topic = given.bootstrap_servers, given.topic
    fill()
    try:
        create_topics(servers, [topic], 1)
        pipeline = make(topic)
        for customer in ("ann", "dan"):
            send(servers, topic, customer, 5)
            pipeline.run(until="latest", inline=True, bootstrap_servers=servers, log_level="error")
            show(servers, f"{topic}-totals")
    finally:
        drop()


if __name__ == "__main__":
    main()
