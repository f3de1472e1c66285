"""The last stable offset, waited for at the broker."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from confluent_kafka import Producer

from exactlyonce.connectors.kafka.stable import StableOffset
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker

LONG_MS = 8_000


def opened(cluster: Any, topic: str) -> Producer:
    """A producer whose transaction of three records is open."""
    producer = Producer(cluster.config.confluent({"transactional.id": f"{topic}-writer", "linger.ms": "0"}))
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(topic, b"value", partition=0)
    assert producer.flush(LIMIT_S) == 0
    return producer


def watch(cluster: Any, topic: str, observe: Any = None) -> StableOffset:
    """Waits for partition 0."""
    return StableOffset(cluster.config, topic, cluster.topics.describe([topic])[topic].topic_id, 0, observe)


def test_what_is_stable_is_answered_at_once(cluster: Any, topic: str) -> None:
    """Where nothing is open the answer does not wait: for an empty log 0, else the end of the log."""
    stable = watch(cluster, topic)
    assert stable.reaches(0, 0) == 0
    producer = opened(cluster, topic)
    producer.commit_transaction(LIMIT_S)
    cluster.wait_until(lambda: stable.reaches(3, LONG_MS) == 4)
    stable.close()


def test_an_open_transaction_is_waited_for_in_one_request(cluster: Any, topic: str) -> None:
    """The answer to one request comes once the transaction has its marker, long before the time is over."""
    asked: list[str] = []
    stable = watch(cluster, topic, lambda name, began, ended: asked.append(name))
    producer = opened(cluster, topic)
    assert stable.reaches(3, 0) == 0
    asked.clear()
    threading.Timer(0.3, lambda: producer.commit_transaction(LIMIT_S)).start()
    began = time.monotonic()
    assert stable.reaches(3, LONG_MS) == 4
    assert time.monotonic() - began < LONG_MS / 1000
    assert asked == ["Fetch"]
    stable.close()


def test_the_time_is_over_before_the_transaction_is(cluster: Any, topic: str) -> None:
    """With the transaction open all the time, the answer is where readers are held."""
    stable = watch(cluster, topic)
    producer = opened(cluster, topic)
    assert stable.reaches(3, 200) == 0
    producer.abort_transaction(LIMIT_S)
    stable.close()


def test_a_topic_made_anew_is_not_taken_for_the_old_one(cluster: Any, topic: str) -> None:
    """An offset of another topic of the same name says nothing."""
    with pytest.raises(TopicError, match="deleted and created again"):
        StableOffset(cluster.config, topic, "00000000-0000-0000-0000-000000000000", 0).reaches(0, 0)
