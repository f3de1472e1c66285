"""Files that come into a folder, into a topic: each row once, by runs that read what is new.

    python examples/files_to_kafka.py --bootstrap-servers 127.0.0.1:9092

A shop writes its orders of a day into a file of CSV, the old ones compressed. A run reads the files that no run has
read, writes the running total of each customer, and ends. So it can be started by cron.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import tempfile
from pathlib import Path

import msgspec
from confluent_kafka import Consumer, TopicPartition

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.connectors import FileSource

LIMIT_S = 60


class Order(msgspec.Struct):
    id: int
    customer: str
    cents: int
    coupon: str | None = None


class Total(msgspec.Struct):
    customer: str
    orders: int
    cents: int


def add(total: Total | None, order: Order) -> tuple[Total, Total]:
    orders, cents = (total.orders, total.cents) if total else (0, 0)
    now = Total(order.customer, orders + 1, cents + order.cents)
    return now, now


def make(folder: str, topic: str = "order-totals") -> Pipeline:
    """A running total of each customer, from the files of *folder* to *topic*."""
    pipeline = Pipeline(topic)
    (
        pipeline.source("orders", FileSource(folder, value=Order, format="csv", files="orders-*"))
        .key_by(lambda order: order.customer)
        .stateful_map("totals", add)
        .sink("out", KafkaSink(topic, key=lambda total: total.customer, create_partitions=1))
    )
    return pipeline


def write(folder: Path, day: str, *orders: tuple[int, str, int, str], compress: bool = False) -> None:
    """Write the *orders* of a day under a hidden name, and rename the file once it is whole."""
    text = io.StringIO()
    csv.writer(text).writerows([("id", "customer", "cents", "coupon"), *orders])
    content, name = text.getvalue().encode(), f"orders-{day}.csv"
    if compress:
        content, name = gzip.compress(content), f"{name}.gz"
    hidden = folder / f".{name}"
    hidden.write_bytes(content)
    hidden.rename(folder / name)
    print(f"{name}: {len(orders)} orders")


def show(servers: str, topic: str, offset: int) -> int:
    """Print the totals from *offset* on; returns the offset of the next."""
    settings = {"bootstrap.servers": servers, "group.id": "shop", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, offset)])
    while (message := consumer.poll(LIMIT_S)) is not None and not message.error():
        total = msgspec.json.decode(message.value() or b"", type=Total)
        print(f"  {total.customer}  {total.orders} orders  {total.cents / 100:6.2f}")
        offset = (message.offset() or 0) + 1
    consumer.close()
    return offset


def main() -> None:
    """Three files, and a run after each two."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bootstrap-servers", default="127.0.0.1:9092")
    arguments.add_argument("--topic", default="order-totals")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make(folder, given.topic)
        write(Path(folder), "2026-11-24", (1, "ann", 250, ""), (2, "bob", 1000, "WELCOME"), compress=True)
        write(Path(folder), "2026-11-25", (3, "ann", 400, ""))
        run(pipeline, given.bootstrap_servers)
        shown = show(given.bootstrap_servers, given.topic, 0)
        write(Path(folder), "2026-11-26", (4, "bob", 300, ""))
        run(pipeline, given.bootstrap_servers)
        show(given.bootstrap_servers, given.topic, shown)


def run(pipeline: Pipeline, servers: str) -> None:
    """Read the files that are new, to their ends."""
    pipeline.run(inline=True, bootstrap_servers=servers, log_level="error")


if __name__ == "__main__":
    main()
