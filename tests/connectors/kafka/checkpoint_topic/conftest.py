"""The common part of tests of the checkpoint topic: a topic of one's own, and a decision log that a broker answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, TypeVar

import msgspec
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.encoding import Decision
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Incarnation, Manifest, StoredBlock, TopicInfo
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import Outcome, Procedure
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import KafkaCluster
from tests.checkpoint.conftest import MANIFEST

R = TypeVar("R")


class HalfSimulatedClock(SimulatedClock):
    """People's time stands still until it is moved; timeouts pass as ever."""

    def monotonic_ms(self) -> int:
        return SystemClock().monotonic_ms()


class RealLog(DecisionLog):
    """A decision log whose requests a real broker answers."""

    def __init__(self, config: ClientConfig, pipeline: str, topic: TopicInfo, clock: Clock, **settings: Any) -> None:
        super().__init__(pipeline, topic, clock, **settings)
        self._config, self._connections = config, Connections(config, pipeline)
        self._connections.open_log(topic)
        self.requests, self.perform = self._connections.log_requests, self._connections.performer

    def do(self, procedure: Procedure[R]) -> R:
        return self._connections.drive(procedure)

    def appended(self, *records: Decision, blocks_dropped: Iterable[BlockRef] = (), **more: Any) -> Outcome:
        blocks = [StoredBlock(TOPIC, ref) for ref in blocks_dropped]
        return self.do(self.append(*records, blocks_dropped=blocks, **more))

    def beaten(self, **more: Any) -> Outcome:
        return self.do(self.heartbeat(**more))

    @property
    def end_offsets(self) -> tuple[int, ...]:
        with closing(Topics(self._config)) as topics:
            return tuple(topics.end_offsets(self.topic.name, range(self.topic.partitions), committed=False).values())


class Store:
    def __init__(self, bootstrap_servers: str, pipeline: str) -> None:
        self.config: dict[str, Any] = {"bootstrap.servers": bootstrap_servers}
        self.client = ClientConfig(self.config)
        self.pipeline = pipeline
        self.topic: TopicInfo = prepare_topic(self.client, pipeline)
        self.clock = HalfSimulatedClock()
        self.kafka = KafkaCluster(bootstrap_servers)

    def log(self, **settings: Any) -> RealLog:
        """A decision log that has fenced nobody yet."""
        return RealLog(self.client, self.pipeline, self.topic, self.clock, **settings)

    def opened(self, **settings: Any) -> RealLog:
        """A decision log that has fenced all older ones."""
        log = self.log(**settings)
        log.do(log.open())
        return log

    def living(self, host: str = "here", process: int = 1, **settings: Any) -> RealLog:
        """A decision log whose incarnation has begun."""
        log = self.opened(**settings)
        log.do(log.begin(host, process))
        return log

    def seen(self) -> History | None:
        log = self.log()
        return log.do(log.peek())

    def manifest(self, checkpoint: int, incarnation: int = 1, **changes: Any) -> Manifest:
        changes = {"committables": (), "operators": (), "order_logs": ()} | changes
        return msgspec.structs.replace(
            MANIFEST, pipeline=self.pipeline, checkpoint=checkpoint, incarnation=incarnation, **changes
        )

    def mark(self, checkpoint: int, incarnation: int = 1) -> Finalized:
        return Finalized(checkpoint, incarnation, 1_200, ())

    def write(self, key: str, value: bytes | None, partition: int = 0) -> None:
        """Write a record as somebody who is neither the coordinator nor a worker."""
        failed: list[KafkaError] = []
        producer = Producer(self.config)
        producer.produce(
            self.topic.name, value, key, partition, on_delivery=lambda error, _: failed.append(error) if error else None
        )
        assert producer.flush(30.0) == 0
        if failed:
            raise KafkaException(failed[0])

    def remove_before(self, partition: int, offset: int) -> None:
        self.kafka.configure_topic(self.topic.name, cleanup_policy="delete")
        self.kafka.delete_records(self.topic.name, {partition: offset})

    def incarnation(self, number: int) -> Incarnation:
        return Incarnation(
            incarnation=number, host="here", process=1, started_at_ms=self.clock.now_ms(),
            heartbeat_ms=self.clock.now_ms(),
        )  # fmt: skip


@pytest.fixture
def store(kafka: Any, topic_name: str) -> Store:
    return Store(kafka.bootstrap_servers, topic_name)


@pytest.fixture
def new_store() -> Callable[[str, str], Store]:
    return Store
