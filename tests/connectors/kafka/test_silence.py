"""A source whose broker does not answer says so; one that has nothing to read does not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import until

from exactlyonce.connectors.kafka.reader import INTERVAL_MS, SILENT_AFTER_S, KafkaReader, Silence
from exactlyonce.testing.cluster import OwnCluster


def statistics(
    leader: int = 1, state: str = "UP", idle_s: float = 0.1, queued: int = 0, partitions: tuple[str, ...] = ("0", "-1")
) -> str:
    """The relevant part of what librdkafka tells; -1 is its own name for what has no partition yet."""
    told = {"leader": leader, "fetchq_cnt": queued, "desired": True}
    broker = {"nodeid": 1, "state": state, "rxidle": int(idle_s * 1e6)}
    brokers = {"a:1/1": broker, "a:1/bootstrap": {"nodeid": -1, "state": "INIT"}}
    return json.dumps({"brokers": brokers, "topics": {"orders": {"partitions": dict.fromkeys(partitions, told)}}})


@pytest.mark.parametrize(
    ("told", "silent"),
    [
        (statistics(), False),
        (statistics(idle_s=SILENT_AFTER_S + 1), True),
        (statistics(idle_s=SILENT_AFTER_S + 1, queued=5), False),  # it has enough, and does not ask
        (statistics(idle_s=-1), True),
        (statistics(leader=-1), True),
        (statistics(leader=2), True),
        (statistics(state="TRY_CONNECT", queued=5), True),
        (statistics(partitions=("1",)), True),
        (json.dumps({"brokers": {}, "topics": {}}), True),
    ],
)
def test_what_statistics_show(told: str, silent: bool) -> None:
    now_s = 100.0
    silence = Silence(lambda: [("orders", 0)], lambda: now_s)
    silence.hear(told)
    now_s += SILENT_AFTER_S
    assert silence.partitions == {}, "nothing has been heard since"
    silence.hear(told)
    assert silence.partitions == ({("orders", 0): SILENT_AFTER_S} if silent else {})
    silence.hear(statistics())
    assert silence.partitions == {}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_broker_that_hangs(stoppable: OwnCluster, topic_name: str) -> None:
    cluster = stoppable
    topic = cluster.create_topic(topic_name, 2)
    config: Any = {"bootstrap.servers": cluster.bootstrap_servers}
    reader = KafkaReader("orders", topic, {0: 0, 1: 0}, {}, config, topic_id="")
    reader.open()
    quiet_until = time.monotonic() + 3 * INTERVAL_MS / 1000
    while time.monotonic() < quiet_until:
        reader.poll(100, 0.1)
        assert reader.waiting == ""
    pid = cluster.broker.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        said = polled_until(reader, lambda: reader.waiting != "")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "source 'orders' has waited" in said
    assert f"{topic}[0], {topic}[1]" in said
    assert polled_until(reader, lambda: reader.waiting == "") == ""
    reader.close()


def polled_until(reader: KafkaReader, condition: Callable[[], bool]) -> str:
    until(condition, meanwhile=lambda: reader.poll(100, 0.1))
    return reader.waiting
