"""The common part of tests of the checkpoint store: manifests to write, and a topic of one's own to write them to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.committable import Committable, Written
from exactlyonce.checkpoint.records.encoding import Decision
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    Finalized,
    Incarnation,
    Manifest,
    OperatorSnapshot,
    OrderLog,
    SourceOffset,
    StoredBlock,
)
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.requests import Procedure, drive
from exactlyonce.checkpoint.store import client as store_client
from exactlyonce.checkpoint.store.topic import prepare_topic
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import KafkaCluster

sys.path[:0] = [str(Path(__file__).parent / "scripted"), str(Path(__file__).parents[1] / "engines")]

R = TypeVar("R")

REF = BlockRef(1, 5, "block/1/1/totals/0/0/0-ab", 10, b"x" * 32)
COMMITTABLE = Committable(
    transactional_id="eo:p:out:0:1.0:0", producer_id=4001, epoch=7, transaction_version=2, cluster_id="cluster",
    sink="out", subtask=0, checkpoint=4, written=(Written("totals", 0, 5, 6),),
)  # fmt: skip
MANIFEST = Manifest(
    pipeline="p", checkpoint=0, incarnation=1, attempt=0, kind="checkpoint", base=0, previous=0, triggered_at_ms=1_000,
    completed_at_ms=1_100, fingerprint="f1", max_parallelism=128, parallelism=2, block_partitions=5,
    block_end_offsets=(1, 2, 3, 4, 5), written_bytes=10, offsets=(SourceOffset("orders", "orders", "id", 0, 7),),
    operators=(OperatorSnapshot("totals", 2, 10, ((REF,), ())),), order_logs=(OrderLog("totals", 0, (REF,)),),
    committables=(COMMITTABLE,), sinks=(("out", "totals", 3),),
)  # fmt: skip


@pytest.fixture
def manifest() -> Callable[..., Manifest]:
    """`manifest(7, parallelism=4)` is a manifest of checkpoint 7."""
    return lambda checkpoint, **changes: msgspec.structs.replace(MANIFEST, checkpoint=checkpoint, **changes)


class HalfSimulatedClock(SimulatedClock):
    """People's time stands still until it is moved; timeouts pass as ever."""

    def monotonic_ms(self) -> int:
        return SystemClock().monotonic_ms()


class RealLog(DecisionLog):
    """A decision log whose requests a real broker answers."""

    def __init__(self, config: ClientConfig, pipeline: str, topic: TopicInfo, clock: Clock, **settings: Any) -> None:
        super().__init__(pipeline, topic, clock, **settings)
        self.requests = LogRequests(config, topic)
        self._config = config
        self._performer = Performer(config, Transactions(config), Log(config), self.requests, 0)

    def do(self, procedure: Procedure[R]) -> R:
        return drive(procedure, self._performer)

    def appended(self, *records: Decision, blocks_dropped: Iterable[BlockRef] = (), **more: Any) -> Outcome:
        blocks = [StoredBlock(TOPIC, ref) for ref in blocks_dropped]
        return self.do(self.append(*records, blocks_dropped=blocks, **more))

    def beaten(self, **more: Any) -> Outcome:
        return self.do(self.heartbeat(**more))

    @property
    def end_offsets(self) -> tuple[int, ...]:
        partitions = range(self.topic.partitions)
        ends = store_client.end_offsets(store_client.admin(self._config.confluent()), self.topic.name, partitions)
        return tuple(ends[each] for each in partitions)


class Store:
    def __init__(self, bootstrap_servers: str, pipeline: str) -> None:
        self.config: dict[str, Any] = {"bootstrap.servers": bootstrap_servers}
        self.pipeline = pipeline
        self.topic: TopicInfo = prepare_topic(self.config, pipeline)
        self.clock = HalfSimulatedClock()
        self.kafka = KafkaCluster(bootstrap_servers)

    def log(self, **settings: Any) -> RealLog:
        """A decision log that has fenced nobody yet."""
        return RealLog(ClientConfig(self.config), self.pipeline, self.topic, self.clock, **settings)

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
