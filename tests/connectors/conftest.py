"""The common part of tests of connectors: a topic, writers that leave transactions open, and a reader."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from settled import is_readable
from waiting import until

from exactlyonce.checkpoint.records.manifest import Committable, Written
from exactlyonce.checkpoint.requests import TransactionState
from exactlyonce.connectors.kafka import kafka_protocol
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


class Cluster:
    def __init__(self, bootstrap_servers: str) -> None:
        self.kafka = KafkaCluster(bootstrap_servers)
        self.config = ClientConfig({"bootstrap.servers": bootstrap_servers})
        self.transactions = Transactions(self.config)
        self.topics = Topics(self.config)
        self._writers: list[Producer] = []  # what a test does not hold is open all the same, until the test ends

    def close(self) -> None:
        self._writers.clear()
        self.transactions.close()
        self.topics.close()

    def producer(self, transactional_id: str, **settings: Any) -> Producer:
        """A producer that has taken the id, so that its state is Empty."""
        dotted = {name.replace("_", "."): value for name, value in settings.items()}
        ours = {"transactional.id": transactional_id, "transaction.timeout.ms": LIMIT_S * 1000, "log_level": 0}
        producer = Producer(self.config.confluent({**ours, **dotted}))
        producer.list_topics(timeout=LIMIT_S)  # before init_transactions, which else waits half a second
        producer.init_transactions(LIMIT_S)
        self._writers.append(producer)
        return producer

    def open(self, transactional_id: str, topic: str, values: list[bytes], **settings: Any) -> Producer:
        """A producer with an open transaction; the values are spread over the topic's partitions in turn."""
        producer = self.producer(transactional_id, **settings)
        producer.begin_transaction()
        self.produce(producer, topic, values)
        return producer

    def produce(self, producer: Producer, topic: str, values: list[bytes]) -> None:
        partitions = self.topics.describe([topic])[topic].partitions
        for index, value in enumerate(values):
            producer.produce(topic, value, partition=index % partitions)
        assert producer.flush(LIMIT_S) == 0

    def state(self, transactional_id: str) -> TransactionState:
        state = self.transactions.describe([transactional_id])[transactional_id]
        assert state is not None
        return state

    def committable(self, transactional_id: str) -> Committable:
        """The open transaction of an id, as the coordinator of a checkpoint would note it."""
        state = self.state(transactional_id)
        written = tuple(
            Written(each.topic, each.partition, each.transaction_start_offset, each.last_sequence + 1)
            for each in self.transactions.producers(state.partitions)
            if (each.producer_id, each.epoch) == (state.producer_id, state.epoch)
            if each.transaction_start_offset is not None
        )
        return Committable(
            transactional_id=transactional_id, producer_id=state.producer_id, epoch=state.epoch, sink="sink", subtask=0,
            transaction_version=self.transactions.transaction_version(), cluster_id=self.transactions.cluster_id(),
            checkpoint=1, written=tuple(sorted(written, key=lambda each: each.partition)),
        )  # fmt: skip

    def settle(self, topic: str) -> None:
        """Wait until no transaction is open on the topic: an end is answered before its markers are written."""
        until(lambda: is_readable(self.topics, topic))

    def visible(self, topic: str) -> list[bytes]:
        """Values that a read_committed reader sees, sorted, once no transaction is open on the topic."""
        self.settle(topic)
        return self.visible_now(topic)

    def visible_now(self, topic: str) -> list[bytes]:
        """Values that a read_committed reader sees, sorted, up to the first open transaction."""
        ends = self.topics.end_offsets(topic, committed=True)
        overrides = {
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
        consumer = Consumer(self.config.confluent(overrides))
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        values, unfinished, deadline = [], len(ends), time.monotonic() + LIMIT_S
        while unfinished:
            assert time.monotonic() < deadline
            for message in [*consumer.consume(1, 0.1), *consumer.consume(1000, 0)]:
                if message.error() is None:
                    values.append(message.value() or b"")
                else:
                    unfinished -= 1
        consumer.close()
        return sorted(values)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, nor will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last attempt of a question gets the time that it takes: else on a slow machine its error is that of time."""
    monkeypatch.setattr(kafka_protocol, "ATTEMPT_LEAST_MS", LIMIT_S * 1000)


@pytest.fixture(scope="session")
def cluster_at() -> Callable[[str], Cluster]:
    """Makes a `Cluster` of the broker at an address; for tests with a broker of their own."""
    return Cluster


@pytest.fixture
def cluster(kafka: Any) -> Iterator[Cluster]:
    cluster = Cluster(kafka.bootstrap_servers)
    yield cluster
    cluster.close()


@pytest.fixture
def topic(cluster: Cluster, topic_name: str) -> str:
    """A new topic of two partitions."""
    cluster.topics.create(topic_name, partitions=2)
    return topic_name
