"""A source whose broker does not answer says so; one that has nothing to read does not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer
from waiting import until

from exactlyonce.connectors.kafka import reader as reader_module
from exactlyonce.connectors.kafka.reader import (
    INTERVAL_MS,
    REPLACED_AFTER_S,
    SILENT_AFTER_S,
    KafkaReader,
    Silence,
    exact_consumer,
)
from exactlyonce.connectors.source import Divide
from exactlyonce.testing.cluster import OwnCluster


def statistics(
    leader: int = 1, state: str = "UP", idle_s: float = 0.1, queued: int = 0, partitions: tuple[str, ...] = ("0", "-1"),
    broker_id: int = 1, fetch_state: str = "active", follower_idle_s: float | None = None,
) -> str:  # fmt: skip
    """The relevant part of what librdkafka tells; -1 is its own name for what has no partition yet. Broker 2 is a
    follower, from which something came *follower_idle_s* ago; None: it is not known."""
    told = {
        "leader": leader, "broker": broker_id, "fetch_state": fetch_state, "fetchq_cnt": queued, "desired": True,
    }  # fmt: skip
    broker = {"nodeid": 1, "state": state, "rxidle": int(idle_s * 1e6)}
    brokers = {"a:1/1": broker, "a:1/bootstrap": {"nodeid": -1, "state": "INIT"}}
    if follower_idle_s is not None:
        brokers["a:2/2"] = {"nodeid": 2, "state": "UP", "rxidle": int(follower_idle_s * 1e6)}
    return json.dumps({"brokers": brokers, "topics": {"orders": {"partitions": dict.fromkeys(partitions, told)}}})


@pytest.mark.parametrize(
    ("told", "silent"),
    [
        (statistics(), False),
        (statistics(idle_s=SILENT_AFTER_S + 1), True),
        (statistics(idle_s=SILENT_AFTER_S + 1, queued=5), False),  # it has enough, and does not ask
        (statistics(idle_s=-1), True),
        (statistics(leader=-1), True),
        (statistics(state="TRY_CONNECT", queued=5), True),
        (statistics(partitions=("1",)), True),
        (statistics(broker_id=-1), True),
        (statistics(broker_id=2), True),
        (statistics(broker_id=2, follower_idle_s=0.1), False),  # a follower, in the same rack
        (statistics(idle_s=SILENT_AFTER_S + 1, broker_id=2, follower_idle_s=0.1), False),
        (statistics(state="TRY_CONNECT", broker_id=2, follower_idle_s=0.1), False),
        (statistics(broker_id=2, follower_idle_s=SILENT_AFTER_S + 1), True),
        (statistics(fetch_state="validate-epoch-wait"), True),
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


def test_a_partition_that_is_paused_is_not_missed() -> None:
    """Its broker is not asked, and says nothing, for as long as another partition's records are waited for."""
    reader = KafkaReader("in", "orders", {0: 0, 1: 0}, {}, {}, topic_id="", divide=some_of_each)
    silent = statistics(idle_s=SILENT_AFTER_S + 1, partitions=("0", "1"))
    reader._silence.hear(silent)
    assert reader._silence.missed == {("orders", 0), ("orders", 1)}
    reader._buffer.paused.add(0)
    reader._silence.hear(silent)
    assert reader._silence.missed == {("orders", 1)}


def test_silence_that_lasts() -> None:
    now_s = 100.0
    silence = Silence(lambda: [("orders", 0)], lambda: now_s)
    told: list[bool] = []
    for state in ["none"] * 4 + ["active"] + ["none"] * 4:
        silence.hear(statistics(fetch_state=state))
        told.append(silence.is_lasting)
        if silence.is_lasting:
            silence.replaced()
        now_s += REPLACED_AFTER_S / 2
    assert told == [False, False, True, False, False, False, False, True, False], "another, and another as late"


def some_of_each(counts: Mapping[int, int], missing: Collection[int], records_max: int) -> list[tuple[int, int]]:
    return [(split, min(count, records_max)) for split, count in counts.items()]


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("divide", [None, some_of_each])
def test_another_consumer(
    stoppable: OwnCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch, divide: Divide | None
) -> None:
    """It goes on after what was returned, whatever the one before had fetched, and passes the end."""
    monkeypatch.setattr(reader_module, "REPLACED_AFTER_S", 0)
    cluster, made = stoppable, list[Consumer]()
    topic = cluster.create_topic(topic_name, 2)
    values = [[f"{partition}-{n}" for n in range(2_100)] for partition in range(2)]
    cluster.produce(topic, values[0][:2_000], partition=0)
    cluster.produce(topic, values[1][:2_000], partition=1)

    def make(settings: Mapping[str, Any]) -> Consumer:
        made.append(exact_consumer(settings))
        return made[-1]

    config: Any = {"bootstrap.servers": cluster.bootstrap_servers}
    reader = KafkaReader("orders", topic, {0: 0, 1: 0}, {}, config, topic_id="", make=make, divide=divide)
    reader.open()
    read: list[list[str]] = [[], []]

    def poll(records_max: int) -> None:
        for message in reader.poll(records_max, 0.1):
            read[message.partition()].append(message.value().decode())

    until(lambda: len(read[0]) + len(read[1]) >= 20, meanwhile=lambda: poll(10))
    cluster.broker.kill()
    until(lambda: len(made) >= 2, meanwhile=lambda: poll(1))
    assert len(read[0]) + len(read[1]) < 4_000, "something was fetched and not returned"
    cluster.broker.start()
    for partition in range(2):
        cluster.produce(topic, values[partition][2_000:], partition=partition)
    until(lambda: len(read[0]) + len(read[1]) >= 4_200, meanwhile=lambda: poll(100))
    assert read == values
    until(lambda: reader.lags() == {(topic, 0): 0, (topic, 1): 0}, meanwhile=lambda: poll(100))
    reader.close()


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
