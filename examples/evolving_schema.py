"""Orders whose Avro schema grows, with a schema registry: one pipeline reads the old ones and the new ones.

    python examples/evolving_schema.py --bootstrap-servers 127.0.0.1:9092 --registry http://127.0.0.1:8081

A shop writes orders by Confluent's serializer. Then its orders get a field, `currency`. The pipeline, which knows the
field from the start, gives old orders its default. The pipeline's own schema is in the registry, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from exactlyonce import AvroCodec, KafkaSink, KafkaSource, Pipeline
from exactlyonce.cli.demo.feeding import create_topics

LIMIT_S = 60


class Order(msgspec.Struct):
    id: int
    customer: str
    cents: int
    currency: str = "EUR"


class Total(msgspec.Struct):
    customer: str
    currency: str
    cents: int


def add(cents: int | None, order: Order) -> tuple[int, Total]:
    cents = (cents or 0) + order.cents
    return cents, Total(order.customer, order.currency, cents)


def make(registry: str, topic: str = "orders") -> Pipeline:
    """A running total of each customer and currency, from TOPIC to TOPIC-totals."""
    pipeline = Pipeline(f"{topic}-totals")
    (
        pipeline.source("orders", KafkaSource(topic, value=AvroCodec(Order, registry=registry)))
        .key_by(lambda order: (order.customer, order.currency))
        .stateful_map("totals", add)
        .sink("out", KafkaSink(f"{topic}-totals", value=AvroCodec(Total, registry=registry, register=True)))
    )
    return pipeline


FIELDS = [
    {"name": "id", "type": "long"},
    {"name": "customer", "type": "string"},
    {"name": "cents", "type": "long"},
]
VERSION_1 = {"type": "record", "name": "Order", "fields": FIELDS}
VERSION_2 = {**VERSION_1, "fields": [*FIELDS, {"name": "currency", "type": "string", "default": "EUR"}]}


class Shop:
    """The other programs: a producer and a reader of the topics, by Confluent's serializers alone."""

    def __init__(self, servers: str, registry: str, topic: str) -> None:
        self._servers, self._topic, self._registry = servers, topic, SchemaRegistryClient({"url": registry})
        self._shown = 0
        create_topics(servers, [topic], 1)

    def write(self, schema: dict[str, Any], *orders: dict[str, Any]) -> None:
        """Write *orders* by *schema*, which the serializer registers."""
        encode = AvroSerializer(self._registry, json.dumps(schema))  # pyright: ignore[reportCallIssue] - *args in its types
        producer = Producer({"bootstrap.servers": self._servers})
        for order in orders:
            producer.produce(self._topic, encode(order, SerializationContext(self._topic, MessageField.VALUE)))
        producer.flush(LIMIT_S)

    def show(self) -> None:
        """Print the versions of the orders' schema, and the totals since the last call."""
        print("versions of the orders' schema:", *self._registry.get_versions(f"{self._topic}-value"))
        totals = list(self._totals())
        for total in totals[self._shown :]:
            print(f"  {total['customer']}  {total['cents'] / 100:6.2f} {total['currency']}")
        self._shown = len(totals)

    def _totals(self) -> Iterator[Any]:
        topic = f"{self._topic}-totals"
        decode = AvroDeserializer(self._registry)  # pyright: ignore[reportCallIssue] - as above
        settings = {"bootstrap.servers": self._servers, "group.id": "shop", "isolation.level": "read_committed"}
        consumer = Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})
        partitions = consumer.list_topics(topic, LIMIT_S).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        unread, values = len(partitions), list[tuple[int, int | None, int | None, bytes | None]]()
        while unread:
            for message in consumer.consume(100, 0.1):
                if message.error():
                    unread -= 1
                else:
                    values.append((message.timestamp()[1], message.partition(), message.offset(), message.value()))
        consumer.close()
        for *_, value in sorted(values):
            yield decode(value, SerializationContext(topic, MessageField.VALUE))


def main() -> None:
    """Run the pipeline on old orders, then on new ones."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bootstrap-servers", default="127.0.0.1:9092")
    arguments.add_argument("--registry", default="http://127.0.0.1:8081")
    arguments.add_argument("--topic", default="orders")
    given = arguments.parse_args()
    shop = Shop(given.bootstrap_servers, given.registry, given.topic)
    pipeline = make(given.registry, given.topic)
    shop.write(VERSION_1, {"id": 1, "customer": "ann", "cents": 250}, {"id": 2, "customer": "bob", "cents": 1000})
    run(pipeline, given.bootstrap_servers)
    shop.show()
    shop.write(VERSION_2, {"id": 3, "customer": "ann", "cents": 400, "currency": "USD"})
    shop.write(VERSION_1, {"id": 4, "customer": "ann", "cents": 50})
    run(pipeline, given.bootstrap_servers)
    shop.show()


def run(pipeline: Pipeline, servers: str) -> None:
    """Run to the end of the topic, and go on from there the next time."""
    pipeline.run(inline=True, until="latest", bootstrap_servers=servers, log_level="error")


if __name__ == "__main__":
    main()
