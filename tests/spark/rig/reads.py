"""Topics that are read, and readers as Spark makes them, to do something between their planning and their reading."""

from __future__ import annotations

import uuid
from typing import Any

from confluent_kafka import Producer
from settled import await_readable

from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source.reading import RangesReader
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


def given(kafka: KafkaCluster, topic: str, **options: Any) -> dict[str, str]:
    """The options of a read, as a user writes them; two underscores in a name are a dot. *topic* may be empty."""
    dotted = {name.replace("__", "."): str(value) for name, value in options.items()}
    topics = {"subscribe": topic} if topic else {}
    return {"kafka.bootstrap.servers": kafka.bootstrap_servers, **topics, **dotted}


def direct(kafka: KafkaCluster, topic: str, **options: Any) -> RangesReader:
    source = ExactlyOnceDataSource(given(kafka, topic, **options))
    reader = source.reader(source.schema())
    assert isinstance(reader, RangesReader)
    return reader


def places(reader: RangesReader) -> list[tuple[int, int]]:
    """Partition and offset of every row, sorted: a row that comes twice is there twice."""
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return sorted((row["partition"], row["offset"]) for batch in batches for row in batch.to_pylist())


def make_anew(kafka: KafkaCluster, topic: str, partitions: int = 1, count: int = 3) -> None:
    admin = kafka.admin()
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    kafka.create_topic(topic, partitions)
    kafka.produce(topic, ["new"] * count, partition=0)


def transaction(kafka: KafkaCluster, name: str, topic: str, values: list[str], *, partition: int = 0) -> Producer:
    """One open transaction. Record n is of time 1000 + n; every other record has headers."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{topic}-{name}"})
    producer.list_topics(timeout=LIMIT_S)
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    for n, value in enumerate(values):
        headers: list[tuple[str, str | bytes | None]] = [("origin", value.encode()), ("origin", None)] if n % 2 else []
        producer.produce(topic, value, f"key-{n}", partition, timestamp=1_000 + n, headers=headers)
    assert producer.flush(LIMIT_S) == 0
    return producer


def mixed_topic(kafka: KafkaCluster) -> str:
    """Partition 0: transactions of 20 records, committed or aborted, aborted ones last. 1: an aborted one. 2: none."""
    topic = kafka.create_topic(f"spark-reading-mixed-{uuid.uuid4().hex[:8]}", partitions=3)
    kafka.produce(topic, [None, ("key", b""), "plain"], partition=0)
    for number, end in enumerate(("commit", "abort", "commit", "abort", "abort")):
        producer = transaction(kafka, str(number), topic, [f"{number}-{n}" for n in range(20)])
        getattr(producer, f"{end}_transaction")(LIMIT_S)
    transaction(kafka, "never", topic, ["never"] * 5, partition=1).abort_transaction(LIMIT_S)
    await_readable(kafka, topic)
    return topic
