"""Payments, some of which cannot be processed: they are set aside with the reason, and sent back once that is gone.

    python examples/dead_letters.py --bootstrap-servers 127.0.0.1:9092

The first version of the code knows no krona, and one payment is no JSON. These become dead letters, and the others are
summed. The second version knows the krona: the letters are sent back, and it sums those in krona, too.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Mapping

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from exactlyonce import DeadLetters, Pipeline
from exactlyonce.cli.demo.feeding import create_topics
from exactlyonce.cli.main import main as exactlyonce
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink

LIMIT_S = 60
RATES = {"EUR": 1.0, "USD": 0.9}


class Payment(msgspec.Struct):
    id: int
    shop: str
    amount: float
    currency: str


class Total(msgspec.Struct):
    shop: str
    euros: float


def make(topic: str, rates: Mapping[str, float]) -> Pipeline:
    """The running total of each shop in euros, from TOPIC to TOPIC-totals; what fails goes to TOPIC-dead."""

    def in_euros(payment: Payment) -> Total:
        return Total(payment.shop, payment.amount * rates[payment.currency])

    dead = DeadLetters(f"{topic}-dead", max_share=0.5)
    pipeline = Pipeline(f"{topic}-totals")
    (
        pipeline.source("payments", KafkaSource(topic, value=Payment, on_error=dead))
        .map(in_euros, id="euros", on_error=dead)
        .key_by(lambda total: total.shop)
        .reduce("totals", lambda total, more: Total(more.shop, total.euros + more.euros))
        .sink("out", KafkaSink(f"{topic}-totals", key=lambda total: total.shop))
    )
    return pipeline


def feed(servers: str, topic: str) -> None:
    """Create *topic* with six payments."""
    create_topics(servers, [topic], 1)
    payments = [("books", 10, "EUR"), ("tea", 20, "USD"), ("books", 500, "SEK"), ("tea", 5, "EUR"), ("tea", 90, "SEK")]
    producer = Producer({"bootstrap.servers": servers})
    for id, (shop, amount, currency) in enumerate(payments):
        producer.produce(topic, json.dumps({"id": id, "shop": shop, "amount": amount, "currency": currency}), shop)
    producer.produce(topic, "six euros, please")
    producer.flush(LIMIT_S)


def show_totals(servers: str, topic: str) -> None:
    """Print the last total of each shop, as a reader of committed records sees them."""
    settings = {"bootstrap.servers": servers, "group.id": "shown", "isolation.level": "read_committed"}
    consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
    partitions = consumer.list_topics(topic, LIMIT_S).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    unread, totals = len(partitions), dict[bytes | None, Total]()
    while unread:
        for message in consumer.consume(100, 0.1):
            if message.error():
                unread -= 1
            else:
                totals[message.key()] = msgspec.json.decode(message.value() or b"", type=Total)
    consumer.close()
    for total in sorted(totals.values(), key=lambda total: total.shop):
        print(f"  {total.shop:<6} {total.euros:6.2f} EUR")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap-servers", required=True)
    servers = parser.parse_args().bootstrap_servers
    topic = f"payments-{uuid.uuid4().hex[:8]}"
    cluster = ["--bootstrap-servers", servers]
    feed(servers, topic)
    for rates, version in ((RATES, "first"), ({**RATES, "SEK": 0.1}, "second")):
        make(topic, rates).run(bootstrap_servers=servers, until="latest", inline=True)
        print(f"totals of the {version} version:")
        show_totals(servers, f"{topic}-totals")
        exactlyonce(["dead-letters", "list", f"{topic}-dead", *cluster])
        if version == "first":
            exactlyonce(["dead-letters", "replay", f"{topic}-dead", *cluster])


if __name__ == "__main__":
    main()
