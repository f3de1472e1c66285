"""The writer of a Kafka sink against a real broker: what it holds, what its flush waits for, what it tells of."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flushing import flushed
from quotas import quota
from waiting import until

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.kafka.writer import (
    QUOTA_S,
    WAITING_MIN,
    WAITING_THROTTLED_S,
    KafkaProducers,
    KafkaWriter,
    TransactionPool,
)
from exactlyonce.testing.cluster import KafkaCluster, OwnCluster

pytestmark = pytest.mark.broker

LINGER_MS = 200_000
MEGABYTE = 1_000_000
HELD_MAX = 200 * MEGABYTE
"""The limit of the client's queue, of the backlog, and of copies on the way."""

FAR_MS = 4_102_444_800_000
"""The year 2100: topics take no time that is more than an hour ahead, unless they are told."""

Make = Callable[..., KafkaWriter]


@pytest.fixture
def writer_at() -> Iterator[Make]:
    """`writer_at(cluster, topic, {"linger.ms": 5})`: a writer whose first producer may be written with."""
    made: list[KafkaWriter] = []

    def make(cluster: KafkaCluster, topic: str, settings: dict[str, Any]) -> KafkaWriter:
        config = ClientConfig({"bootstrap.servers": cluster.bootstrap_servers, **settings})
        prepared: list[str] = []
        pool = TransactionPool([f"{topic}-0"])
        executor = ThreadPoolExecutor(1)
        producers = KafkaProducers(topic, config.confluent(), 600_000, executor)
        writer = KafkaWriter(
            sink="out", subtask=0, topic=topic, pool=pool, producers=producers, prepared=prepared.append,
            clock=SystemClock(),
        )  # fmt: skip
        made.append(writer)
        until(lambda: [writer.poll(0.01), *prepared][1:] != [])
        transactions = Transactions(config)
        state = transactions.describe(prepared)[prepared[0]]
        transactions.close()
        assert state is not None
        writer.granted(prepared[0], state.producer_id, state.epoch)
        return writer

    yield make
    for each in made:
        each.abandon()


def records_flushed(writer: KafkaWriter, checkpoint: int) -> int:
    precommit = flushed(writer, checkpoint).precommit
    assert precommit is not None
    return precommit.records


def poll_on(writer: KafkaWriter) -> None:
    """Until it raises."""
    until(lambda: writer.poll(0.01) and False)


def test_a_flush_does_not_linger(kafka: KafkaCluster, topic_name: str, writer_at: Make) -> None:
    kafka.create_topic(topic_name)
    writer = writer_at(kafka, topic_name, {"linger.ms": LINGER_MS})
    writer.write(Outputs([b"1", b"2"], None, None))
    began = time.monotonic()
    writer.barrier(1)
    assert records_flushed(writer, 1) == 2
    assert (time.monotonic() - began) * 1000 < LINGER_MS / 2


def test_a_quota_of_the_broker(kafka: KafkaCluster, topic_name: str, writer_at: Make) -> None:
    """Once the broker has throttled it, no more may wait than half a second's worth of the last ten."""
    kafka.create_topic(topic_name)
    writer, records = writer_at(kafka, topic_name, {"client.id": topic_name}), 150
    with quota(kafka.bootstrap_servers, topic_name, producer_byte_rate=10_000):
        assert writer.room == WAITING_MIN
        writer.write(Outputs([bytes(1_000)] * records, None, None))
        until(lambda: [writer.poll(0.01), writer.room][1])
        assert writer.room <= records * WAITING_THROTTLED_S / QUOTA_S
    writer.barrier(1)
    assert records_flushed(writer, 1) == records


def test_a_record_that_the_broker_refuses(kafka: KafkaCluster, topic_name: str, writer_at: Make) -> None:
    kafka.create_topic(topic_name, max_message_bytes=1_000)
    writer = writer_at(kafka, topic_name, {"linger.ms": LINGER_MS})
    writer.write(Outputs([b"small"], None, None))
    writer.write(Outputs([bytes(5_000)], None, None))
    writer.barrier(1)
    with pytest.raises(RecordError, match=r"a record, or the batch .* max\.message\.bytes"):
        poll_on(writer)
    assert writer.take_flushed(1) is None


def test_times_of_records(kafka: KafkaCluster, topic_name: str, writer_at: Make) -> None:
    kafka.create_topic(topic_name)
    writer = writer_at(kafka, topic_name, {})
    writer.write(Outputs([b"1", b"2"], None, [[("by", b"x")]] * 2, [7, FAR_MS]))
    writer.barrier(1)
    with pytest.raises(
        RecordError, match=rf"sink 'out': a record for {topic_name}.* message\.timestamp\.after.*"
    ) as error:
        poll_on(writer)
    assert "from 1970-01-01T00:00:00.007+00:00 to 2100-01-01T00:00:00.000+00:00." in str(error.value)


def test_times_of_a_batch(kafka: KafkaCluster, topic_name: str, writer_at: Make) -> None:
    """The client has no reason for any record of a batch of which several are refused."""
    times_ms = [7, FAR_MS, FAR_MS]
    kafka.create_topic(topic_name)
    writer = writer_at(kafka, topic_name, {"linger.ms": LINGER_MS})
    writer.write(Outputs([b"1"] * len(times_ms), [b"a"] * len(times_ms), None, times_ms))
    writer.barrier(1)
    with pytest.raises(RecordError, match=r"message\.timestamp\.after.* to 2100-01-01T00:00:00.000\+00:00\."):
        poll_on(writer)


def test_a_record_that_the_client_refuses(kafka: KafkaCluster, topic_name: str, writer_at: Make) -> None:
    kafka.create_topic(topic_name)
    writer = writer_at(kafka, topic_name, {"message.max.bytes": 2_000})
    with pytest.raises(RecordError, match=r"a record of 5,001 bytes.* message\.max\.bytes"):
        writer.write(Outputs([b"small", bytes(5_000)], [b"a", b"b"], None))


@pytest.mark.parametrize("keys", [None, [b"a", None, None]], ids=["none", "behind one with a key"])
def test_a_record_without_a_key(kafka: KafkaCluster, topic_name: str, writer_at: Make, keys: Any) -> None:
    kafka.create_topic(topic_name, cleanup_policy="compact")
    writer = writer_at(kafka, topic_name, {"linger.ms": LINGER_MS})
    writer.write(Outputs([b"1", b"2", b"3"], keys, None))
    writer.barrier(1)
    with pytest.raises(RecordError, match=r"failed to validate record.* compacted.* give the sink key="):
        poll_on(writer)


@pytest.mark.exhaustive
def test_a_broker_that_takes_nothing(stoppable: OwnCluster, topic_name: str, writer_at: Make) -> None:
    cluster = stoppable
    cluster.create_topic(topic_name, max_message_bytes=2 * MEGABYTE)
    writer = writer_at(cluster, topic_name, {"message.max.bytes": 2 * MEGABYTE})
    pid = cluster.broker.status().pid
    assert pid is not None
    before, written = resident(), 0
    os.kill(pid, signal.SIGSTOP)
    try:
        while writer.room:
            if written == 8:
                writer.barrier(1)
            writer.write(Outputs([os.urandom(MEGABYTE) for _ in range(4)], None, None))
            writer.poll()
            written += 4
            assert resident() - before < HELD_MAX
    finally:
        os.kill(pid, signal.SIGCONT)
    assert records_flushed(writer, 1) == 8


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
