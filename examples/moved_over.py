"""A consumer group moved over to a pipeline: orders go on coming meanwhile, and each is handled once.

    python examples/moved_over.py --bootstrap-servers 127.0.0.1:9092

An old program reads orders as a consumer group, prints invoices and commits its offsets. It is stopped, orders pile up,
and a pipeline with `start_group=` goes on at the offsets of the group. In the end all invoices are counted.
"""

from __future__ import annotations

import argparse
import uuid
from collections import Counter

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from exactlyonce import KafkaSink, KafkaSource, Pipeline
from exactlyonce.cli.demo.feeding import create_topics

LIMIT_S = 60
PARTITIONS = 3


class Order(msgspec.Struct):
    id: int
    customer: str


class Invoice(msgspec.Struct):
    order: int
    text: str


def invoice(order: Order) -> Invoice:
    return Invoice(order.id, f"{order.customer} pays for order {order.id}")


def make(topic: str, group: str) -> Pipeline:
    """Invoices for the orders of TOPIC that *group* has not handled, into TOPIC-invoices."""
    pipeline = Pipeline(f"{topic}-invoicing")
    orders = pipeline.source("orders", KafkaSource(topic, value=Order, start_group=group))
    orders.map(invoice, id="invoice").sink("invoices", KafkaSink(f"{topic}-invoices", create_partitions=PARTITIONS))
    return pipeline


def order(servers: str, topic: str, ids: range) -> None:
    """Customers give orders."""
    producer = Producer({"bootstrap.servers": servers})
    for id in ids:
        producer.produce(topic, msgspec.json.encode(Order(id, f"customer {id % 7}")), partition=id % PARTITIONS)
    producer.flush(LIMIT_S)


def old_program(servers: str, topic: str, group: str, count: int) -> list[Invoice]:
    """Handle *count* orders or a few more, commit, and stop."""
    settings = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    consumer.subscribe([topic])
    invoices: list[Invoice] = []
    while len(invoices) < count:
        for message in consumer.consume(10, LIMIT_S):
            invoices.append(invoice(msgspec.json.decode(message.value() or b"", type=Order)))
            consumer.commit(message=message, asynchronous=False)
    consumer.close()
    return invoices


def read_invoices(servers: str, topic: str) -> list[Invoice]:
    """All invoices of the pipeline, as a reader of committed records sees them."""
    settings = {"bootstrap.servers": servers, "group.id": "bookkeeping", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    unread, invoices = PARTITIONS, list[Invoice]()
    while unread:
        for message in consumer.consume(100, 0.1):
            if message.error():
                unread -= 1
            else:
                invoices.append(msgspec.json.decode(message.value() or b"", type=Invoice))
    consumer.close()
    return invoices


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    servers = parser.parse_args().bootstrap_servers
    topic, group = f"orders-{uuid.uuid4().hex[:8]}", f"old-invoicing-{uuid.uuid4().hex[:8]}"
    create_topics(servers, [topic], PARTITIONS)

    order(servers, topic, range(60))
    before = old_program(servers, topic, group, 40)
    print(f"the old program has handled {len(before)} orders")
    order(servers, topic, range(60, 100))
    print("40 orders come while nothing runs")
    make(topic, group).run(bootstrap_servers=servers, until="latest", inline=True, log_level="error")
    order(servers, topic, range(100, 120))
    make(topic, group).run(bootstrap_servers=servers, until="latest", inline=True, log_level="error")
    after = read_invoices(servers, f"{topic}-invoices")
    print(f"the pipeline has handled {len(after)} orders, in two runs")

    counts = Counter(each.order for each in [*before, *after])
    missing = [id for id in range(120) if id not in counts]
    doubled = [id for id, count in counts.items() if count > 1]
    print(f"120 orders, {len(missing)} without an invoice, {len(doubled)} with two")


if __name__ == "__main__":
    main()
