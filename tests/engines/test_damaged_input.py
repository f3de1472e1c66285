"""A byte of a stored record that has changed on the broker's disk: whoever reads it stops and names the place."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from running import QUICK, orders

from exactlyonce.checkpoint.records.committable import Written
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.consumed import DamagedBatch
from exactlyonce.connectors.kafka.log import Log, parse_batches
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.testing.cluster import LIMIT_S, OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COUNT = 400
HALT = 6
HEADER_BYTES = 61


def write(cluster: OwnCluster, topic: str, codec: str) -> tuple[int, int]:
    """Two batches of COUNT orders each, in one committed transaction: its producer id and epoch."""
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "compression.type": codec,
            "linger.ms": 1_000,
            "transactional.id": topic,
        }
    )
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    for part in range(2):
        for key, value in orders(COUNT, first=part * COUNT):
            producer.produce(topic, value, key)
        assert producer.flush(LIMIT_S) == 0
    producer.commit_transaction(LIMIT_S)
    log = Log(ClientConfig({"bootstrap.servers": cluster.bootstrap_servers}))
    deadline = time.monotonic() + LIMIT_S
    while len(batches := list(log.batches(topic, 0, 0))) < 3:  # a commit is answered before its marker is written
        assert time.monotonic() < deadline
    log.close()
    assert [(each.base_offset, each.records) for each in batches] == [(0, COUNT), (COUNT, COUNT), (2 * COUNT, 1)]
    return batches[0].producer_id, batches[0].epoch


def change_a_byte(cluster: OwnCluster, topic: str, batch: int) -> None:
    """In the midst of the records of the *batch*-th batch of partition 0."""
    segment = Path(cluster.broker.data_dir, "topics", f"{topic}-0", f"{0:020}.log")
    data = bytearray(segment.read_bytes())
    begin = 0
    for _ in range(batch):
        begin += 12 + struct.unpack_from(">qi", data, begin)[1]
    end = begin + 12 + struct.unpack_from(">qi", data, begin)[1]
    data[(begin + HEADER_BYTES + end) // 2] ^= 1
    segment.write_bytes(data)


@pytest.mark.exhaustive
def test_a_changed_byte_is_found(stoppable: OwnCluster, topic_name: str, run: Any) -> None:
    """With every codec a run halts before the damaged batch and names topic, partition and offset; nothing of the batch
    is counted; ranges and logs are refused at the same place."""
    cluster = stoppable
    config = ClientConfig({"bootstrap.servers": cluster.bootstrap_servers})
    names = {codec: f"{topic_name}-{codec}" for codec in CODECS}
    writers = {}
    for codec, name in names.items():
        cluster.create_topic(f"{name}-in")
        writers[codec] = write(cluster, f"{name}-in", codec)
    cluster.broker.stop()
    for name in names.values():
        change_a_byte(cluster, f"{name}-in", 1)
    cluster.broker.start()
    for codec, name in names.items():
        topic = f"{name}-in"
        arguments = ("--param", f"name={name}", "--until", "latest", "--inline", *QUICK)
        job = run("pipelines:linear", *arguments, servers=cluster.bootstrap_servers)
        assert job.wait() == HALT, job.said
        assert f"{topic}[0] is damaged at offset {COUNT}" in job.said
        assert "Choices: restore the partition" in job.said
        assert len(cluster.read_committed(f"{name}-out")) <= COUNT
        with pytest.raises(DamagedBatch, match=rf"{topic}\[0\] is damaged at offset {COUNT}"):
            _read(RangeReader(topic, 0, 0, 2 * COUNT, config))
        assert _read(RangeReader(topic, 0, 0, COUNT, config)) == COUNT
        with pytest.raises(DamagedBatch, match=f"{topic}-0 is damaged at offset {COUNT}"):
            list(Log(config).records(*writers[codec], Written(topic, 0, 0, 2 * COUNT)))


def test_a_changed_byte_of_a_marker_is_found(stoppable: OwnCluster, topic_name: str) -> None:
    """A marker that says something else than was written tells nobody's fate."""
    cluster = stoppable
    cluster.create_topic(topic_name)
    write(cluster, topic_name, "none")
    cluster.broker.stop()
    change_a_byte(cluster, topic_name, 2)
    cluster.broker.start()
    log = Log(ClientConfig({"bootstrap.servers": cluster.bootstrap_servers}))
    with pytest.raises(DamagedBatch, match=f"{topic_name}-0 is damaged at offset {2 * COUNT}"):
        list(log.batches(topic_name, 0, 0))


def test_bytes_that_are_no_batches() -> None:
    """A length that leads nowhere, and another format, are damage, not an endless search."""
    for length, magic in ((-12, 2), (0, 2), (100, 1)):
        data = struct.pack(">qiib", 7, length, 0, magic) + bytes(200)
        with pytest.raises(DamagedBatch, match="orders-3 is damaged at offset 7"):
            list(parse_batches(data, "orders-3"))


def _read(reader: RangeReader) -> int:
    count = 0
    try:
        while messages := reader.read(1_000):
            count += len(messages)
    finally:
        reader.close()
    return count
