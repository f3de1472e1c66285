"""A program that keeps totals becomes a pipeline: its totals and offsets are taken over, and each order counts once.

    python examples/moved_over.py --bootstrap-servers 127.0.0.1:9092

An old program counts the orders of each customer, and keeps counts and offsets in a file of SQLite. It is killed,
orders pile up, and a savepoint is made of what its file has. A pipeline begins with that, is killed, and goes on. In
the end an independent reader looks for each count of each customer: none is missing, and none came twice.
"""

from __future__ import annotations

import argparse
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from exactlyonce import KafkaSink, KafkaSource, Pipeline
from exactlyonce.cli.demo.feeding import create_topics
from exactlyonce.savepoints import write_state

LIMIT_S = 60
PARTITIONS, CUSTOMERS = 3, 7


class Order(msgspec.Struct):
    id: int
    customer: str


class Counted(msgspec.Struct):
    customer: str
    orders: int


def customer(order: Order) -> str:
    return order.customer


def count(orders: int | None, order: Order) -> tuple[int, Counted]:
    orders = (orders or 0) + 1
    return orders, Counted(order.customer, orders)


def make(topic: str) -> Pipeline:
    """The number of orders of the customer after each order of TOPIC, into TOPIC-counts."""
    pipeline = Pipeline(f"{topic}-counting")
    orders = pipeline.source("orders", KafkaSource(topic, value=Order)).key_by(customer)
    orders.stateful_map("counts", count).sink("out", KafkaSink(f"{topic}-counts", create_partitions=PARTITIONS))
    return pipeline


def order(servers: str, topic: str, ids: range) -> None:
    """Customers give orders."""
    producer = Producer({"bootstrap.servers": servers})
    for id in ids:
        given = Order(id, f"customer {id % CUSTOMERS}")
        producer.produce(topic, msgspec.json.encode(given), partition=id % PARTITIONS)
    producer.flush(LIMIT_S)


def old_program(servers: str, topic: str, file: Path) -> None:
    """Count orders until it is killed. Counts and offsets change together."""
    database = sqlite3.connect(file)
    consumer = Consumer({"bootstrap.servers": servers, "group.id": f"{topic}-old"})
    positions = dict(database.execute("SELECT partition, next FROM offsets"))
    consumer.assign([TopicPartition(topic, partition, next) for partition, next in positions.items()])
    while True:
        for message in consumer.consume(10, 0.1):
            given = msgspec.json.decode(message.value() or b"", type=Order)
            with database:
                database.execute("UPDATE counts SET orders = orders + 1 WHERE customer = ?", [given.customer])
                offset = [(message.offset() or 0) + 1, message.partition()]
                database.execute("UPDATE offsets SET next = ? WHERE partition = ?", offset)


def killed_at_work(servers: str, topic: str, file: Path) -> None:
    """Run the old program, and kill it once it has counted some orders."""
    with closing(sqlite3.connect(file)) as database:
        with database:
            database.execute("CREATE TABLE counts (customer TEXT PRIMARY KEY, orders INTEGER)")
            database.execute("CREATE TABLE offsets (partition INTEGER PRIMARY KEY, next INTEGER)")
            names = [(f"customer {number}",) for number in range(CUSTOMERS)]
            database.executemany("INSERT INTO counts VALUES (?, 0)", names)
            database.executemany("INSERT INTO offsets VALUES (?, 0)", [(number,) for number in range(PARTITIONS)])
        arguments = ["--bootstrap-servers", servers, "--old-program", topic, str(file)]
        with subprocess.Popen([sys.executable, __file__, *arguments]) as program:
            while database.execute("SELECT sum(orders) FROM counts").fetchone()[0] < 20 and program.poll() is None:
                time.sleep(0.01)
            program.kill()


def run_and_kill(servers: str, topic: str, url: str) -> None:
    """Run the pipeline from the savepoint, and kill it once some of its output is visible."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", "moved_over:make", "--param", f"topic={topic}"]
    options = ["--from-savepoint", url, "--checkpoint-interval", "100ms", "--bootstrap-servers", servers]
    consumer = Consumer({"bootstrap.servers": servers, "group.id": f"{topic}-watching"})
    with subprocess.Popen([*command, *options, "--log-level", "error"], cwd=Path(__file__).parent) as run:
        consumer.assign([TopicPartition(f"{topic}-counts", number, 0) for number in range(PARTITIONS)])
        while run.poll() is None:
            message = consumer.poll(0.1)
            if message is not None and not message.error():
                break
        run.kill()
    consumer.close()


def read_counts(servers: str, topic: str) -> list[Counted]:
    """All counts of the pipeline, as a reader of committed records sees them."""
    settings = {"bootstrap.servers": servers, "group.id": f"{topic}-reading", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(f"{topic}-counts", partition, 0) for partition in range(PARTITIONS)])
    unread, counts = PARTITIONS, list[Counted]()
    while unread:
        for message in consumer.consume(100, 0.1):
            if message.error():
                unread -= 1
            else:
                counts.append(msgspec.json.decode(message.value() or b"", type=Counted))
    consumer.close()
    return counts


def moved(servers: str, folder: Path) -> None:
    topic, file = f"orders-{uuid.uuid4().hex[:8]}", folder / "old.sqlite"
    create_topics(servers, [topic], PARTITIONS)

    order(servers, topic, range(60))
    killed_at_work(servers, topic, file)
    print("the old program is killed at work")
    order(servers, topic, range(60, 100))
    print("40 orders come while nothing runs")
    with closing(sqlite3.connect(file)) as database:
        counts = dict(database.execute("SELECT customer, orders FROM counts WHERE orders > 0"))
        offsets = {topic: dict(database.execute("SELECT partition, next FROM offsets"))}
    url = write_state(make(topic), {"counts": counts}, to=str(folder), offsets=offsets, bootstrap_servers=servers)
    run_and_kill(servers, topic, url)
    print("a pipeline begins with its counts and offsets, and is killed, too")
    order(servers, topic, range(100, 120))
    make(topic).run(
        from_savepoint=url, bootstrap_servers=servers, until="latest", inline=True, broker_timeout="1m",
        log_level="error",
    )  # fmt: skip

    came = Counter((counted.customer, counted.orders) for counted in read_counts(servers, topic))
    came.update((name, number + 1) for name, orders in counts.items() for number in range(orders))
    given = Counter(f"customer {id % CUSTOMERS}" for id in range(120))
    wanted = {(name, number + 1) for name, orders in given.items() for number in range(orders)}
    doubled = sum(times - 1 for times in came.values())
    print(f"120 orders, {len(wanted - came.keys())} not counted, {doubled + len(came.keys() - wanted)} counted twice")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--old-program", nargs=2, metavar=("TOPIC", "FILE"), help="be the old program")
    args = parser.parse_args()
    if args.old_program is not None:
        old_program(args.bootstrap_servers, args.old_program[0], Path(args.old_program[1]))
    with tempfile.TemporaryDirectory() as folder:
        moved(args.bootstrap_servers, Path(folder))


if __name__ == "__main__":
    main()
