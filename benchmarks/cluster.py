"""The cluster of a benchmark: topics, quick feeding, and a count of visible records.

Shares no code with the engine, so that its count is independent.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

PARTITIONS = 4
LIMIT_S = 600.0
QUIET = {"log_level": 2}
"""The broker ends before its clients do: they need not log it."""
READER = {"fetch.queue.backoff.ms": 10}
"""librdkafka's default starves a fast reader for a second at a time."""
WRITER = {"queue.buffering.max.messages": 1_000_000}
"""librdkafka's default stops a fast writer."""


class Digest(NamedTuple):
    """The visible records of a topic, whatever their order."""

    records: int
    checksum: int


def reader(servers: str, topic: str, partitions: Iterable[int], **settings: object) -> Consumer:
    """A read_committed consumer of *partitions* from their beginning, in a group of its own."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"benchmark-{time.time_ns()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **READER,
            **settings,
        }
    )
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
    return consumer


def require_records(messages: list[Message]) -> None:
    """Raise the first error among *messages*."""
    if any(map(Message.error, messages)):
        raise KafkaException(next(error for message in messages if (error := message.error())))


class Cluster:
    """The cluster at *servers*."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._admin = AdminClient({"bootstrap.servers": servers, **QUIET})
        self._created: set[str] = set()

    def create(self, *topics: str, partitions: int = PARTITIONS) -> None:
        """Create topics of so many *partitions*; returns when all brokers know them."""
        self._created.update(topics)
        for future in self._admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics]).values():
            future.result(LIMIT_S)
        self._await(lambda shown: shown.issuperset(topics), f"{', '.join(topics)} did not appear")

    def _await(self, condition: Callable[[set[str]], bool], otherwise: str) -> None:
        """Wait until *condition* holds of the listed topics: brokers lag behind their answers."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(set(self._admin.list_topics(timeout=LIMIT_S).topics)):
            if time.monotonic() > deadline:
                raise TimeoutError(otherwise)

    def delete(self, *topics: str) -> None:
        """Delete topics, so that their pages leave the cache; returns when no broker lists them."""
        for future in self._admin.delete_topics(list(topics)).values():
            future.result(LIMIT_S)
        self._await(lambda shown: shown.isdisjoint(topics), f"{', '.join(topics)} did not go")

    def pipeline(self) -> str:
        """The name of a new pipeline, whose checkpoints `clear` deletes."""
        name = f"pipeline-{uuid.uuid4().hex[:8]}"
        self._created.add(name)
        return name

    def clear(self) -> None:
        """Delete the topics created here, and the checkpoints of pipelines named here, or after a topic."""
        present = self._admin.list_topics(timeout=LIMIT_S).topics
        if left := [topic for topic in present if topic.removesuffix(".checkpoints") in self._created]:
            self.delete(*left)

    def producer(self) -> Producer:
        """A producer for input."""
        return Producer(
            {"bootstrap.servers": self.servers, "enable.idempotence": True, "max.in.flight": 1, **WRITER, **QUIET}
        )

    def feed(self, topic: str, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Write (key, value) pairs, in order; returns when all of them are durable."""
        self.feed_topics((topic, key, value) for key, value in records)

    def feed_topics(self, records: Iterable[tuple[str, bytes, bytes]]) -> None:
        """Write (topic, key, value), in order; returns when all of them are durable."""
        producer = self.producer()
        for topic, key, value in records:
            try:
                producer.produce(topic, value, key)
            except BufferError:
                producer.poll(1.0)
                producer.produce(topic, value, key)
        if producer.flush(LIMIT_S):
            raise TimeoutError("not everything could be written")

    def digest(self, topic: str) -> Digest:
        """Count and checksum of the values that a read_committed reader sees."""
        consumer = reader(self.servers, topic, range(PARTITIONS), **{"enable.partition.eof": True})
        unread, records, checksum = set(range(PARTITIONS)), 0, 0
        while unread:
            messages = consumer.consume(10_000, 0.1)
            ends = [message for message in messages if message.error() is not None]
            for message in ends:
                _require_end(message)
                unread.discard(message.partition() or 0)
            values = [message.value() or b"" for message in messages if message.error() is None]
            records += len(values)
            checksum += sum(map(zlib.crc32, values))
        consumer.close()
        return Digest(records, checksum)


def _require_end(message: Message) -> None:
    error = message.error()
    if error is not None and error.name() != "_PARTITION_EOF":
        raise KafkaException(error)
