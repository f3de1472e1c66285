"""The producers of a sink: their settings, and what is left of a dropped one."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from kafka_proxy import RefusingProxy, proxy_before
from waiting import until

from exactlyonce.pipeline.errors import Outdated
from exactlyonce.sinks.kafka import open_transaction
from exactlyonce.sinks.kafka.open_transaction import LINGER_MAX_MS, TRANSACTION_LINGER_MS, OpenTransaction, failure
from exactlyonce.sinks.kafka.writer import KafkaProducers
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster


def ignored(*_: object) -> None: ...


class NoProducer:
    def init_transactions(self, timeout_s: float) -> None: ...
    def begin_transaction(self) -> None: ...


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("transactional_id", ["t", None])
def test_a_dropped_producer_is_freed_at_once(
    kafka: KafkaCluster, topic_name: str, no_collector: None, transactional_id: str | None
) -> None:
    """Its threads and descriptors do not wait for Python's collector."""
    kafka.create_topic(topic_name)
    settings = {"bootstrap.servers": kafka.bootstrap_servers}
    with ThreadPoolExecutor(1) as executor:
        executor.submit(os.getpid).result()
        producers_of_sink = KafkaProducers(topic_name, settings, 60_000, executor)
        name = transactional_id and f"{topic_name}-{transactional_id}"
        transaction = OpenTransaction("", producers_of_sink.make(name, ignored, ignored).result())
        transaction.producer.produce(topic_name, b"1", None)
        producers_of_sink.flush(transaction.producer).result()
        dropped = weakref.ref(transaction.producer)
        producers_of_sink.drop(transaction)
        executor.submit(os.getpid).result()
        assert dropped() is None


def test_a_timeout_beyond_what_the_broker_allows_now_is_asked_for_anew(kafka: KafkaCluster, topic_name: str) -> None:
    """The broker has a lower cap than at the start of the incarnation, which ends: the next one asks again."""
    kafka.create_topic(topic_name)
    settings = {"bootstrap.servers": kafka.bootstrap_servers}
    with ThreadPoolExecutor(1) as executor:
        producers_of_sink = KafkaProducers(topic_name, settings, 24 * 3_600_000, executor)
        with pytest.raises(KafkaException) as refused:
            producers_of_sink.make(topic_name, ignored, ignored).result()
    found = failure(topic_name, "no producer could be made", refused.value.args[0])
    assert found.kind is Outdated
    assert "transaction.max.timeout.ms is lower than when this run began" in found.reason


def test_a_refused_request_is_not_overtaken(kafka: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    """A broker that becomes the leader between two requests refuses the first, and would accept the second."""
    kafka.create_topic(topic_name)
    values = [b"%d" % number for number in range(10)]
    with proxy_before(kafka, tmp_path, partial(RefusingProxy, topic_name, 1.0)) as proxy:
        with ThreadPoolExecutor(1) as executor:
            settings = {"bootstrap.servers": proxy.bootstrap_servers, "linger.ms": "0"}
            producers_of_sink = KafkaProducers(topic_name, settings, 60_000, executor)
            producer: Any = producers_of_sink.make(topic_name, ignored, ignored).result()
            for value in values:
                producer.produce(topic_name, value)
                time.sleep(0.02)  # most of them go into a request of their own
            assert producers_of_sink.flush(producer).result() == 0
            producer.commit_transaction(LIMIT_S)
        until(lambda: [record.value for record in kafka.read_committed(topic_name)] == values)


def test_records_of_a_transaction_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees them before their checkpoint completes. The user's setting wins, by either name, up to a bound."""
    made: list[dict[str, Any]] = []

    def make(settings: dict[str, Any]) -> Any:
        made.append(settings)
        return NoProducer()

    def failed(failure: open_transaction.ProducerFailure) -> None:
        raise AssertionError(failure.reason)

    monkeypatch.setattr(open_transaction, "make_producer", make)
    monkeypatch.setattr(open_transaction, "connect", lambda *arguments: None)
    with ThreadPoolExecutor(1) as executor:
        given: list[tuple[str | None, dict[str, str]]]
        given = [("t", {}), ("t", {"linger.ms": "3"}), (None, {}), ("t", {"linger.ms": "5000"})]
        for transactional_id, settings in given:
            KafkaProducers("topic", settings, 60_000, executor).make(transactional_id, failed, ignored).result()
        KafkaProducers("topic", {"queue.buffering.max.ms": "3"}, 60_000, executor).make("t", failed, ignored).result()
    assert [each.get("linger.ms") for each in made[:4]] == [TRANSACTION_LINGER_MS, "3", None, LINGER_MAX_MS]
    assert list(made[4]).index("linger.ms") < list(made[4]).index("queue.buffering.max.ms"), (
        "of two names the last counts"
    )
