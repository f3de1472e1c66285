"""A byte of a stored record that has changed on the broker's disk: whoever reads it stops and names the place."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Producer
from running import QUICK, orders, run_here
from waiting import until

from exactlyonce.checkpoint.records.manifest import Written
from exactlyonce.connectors.kafka import log as log_module
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import DamagedBatch
from exactlyonce.connectors.kafka.log import Log, parse_batches
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

pytestmark = pytest.mark.broker

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COUNT = 400
HALT = 6
HEADER_BYTES = 61


def write(cluster: KafkaCluster, topic: str, codec: str) -> tuple[int, int]:
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
    until(lambda: len(list(log.batches(topic, 0, 0))) == 3)  # a commit is answered before its marker is written
    batches = list(log.batches(topic, 0, 0))
    log.close()
    assert [(each.base_offset, each.records) for each in batches] == [(0, COUNT), (COUNT, COUNT), (2 * COUNT, 1)]
    return batches[0].producer_id, batches[0].epoch


def with_a_byte_changed(log: bytes, batch: int) -> bytes:
    data, begin = bytearray(log), 0
    for _ in range(batch):
        begin += 12 + struct.unpack_from(">qi", data, begin)[1]
    end = begin + 12 + struct.unpack_from(">qi", data, begin)[1]
    data[(begin + HEADER_BYTES + end) // 2] ^= 1
    return bytes(data)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_changed_byte_is_found(stoppable: OwnCluster, topic_name: str) -> None:
    config = ClientConfig({"bootstrap.servers": stoppable.bootstrap_servers})
    names = {codec: f"{topic_name}-{codec}" for codec in CODECS}
    writers = {}
    for codec, name in names.items():
        stoppable.create_topic(f"{name}-in")
        writers[codec] = write(stoppable, f"{name}-in", codec)
    stoppable.broker.stop()
    for name in names.values():
        segment = Path(stoppable.broker.data_dir, "topics", f"{name}-in-0", f"{0:020}.log")
        segment.write_bytes(with_a_byte_changed(segment.read_bytes(), 1))
    stoppable.broker.start()
    for codec, name in names.items():
        topic = f"{name}-in"
        arguments = ("--param", f"name={name}", "--until", "latest", "--inline", *QUICK)
        code, said = run_here(stoppable.bootstrap_servers, "pipelines:linear", *arguments)
        assert code == HALT, said
        assert f"{topic}[0] is damaged at offset {COUNT}" in said
        assert "Choices: restore the partition" in said
        assert len(stoppable.read_committed(f"{name}-out")) <= COUNT
        with pytest.raises(DamagedBatch, match=rf"{topic}\[0\] is damaged at offset {COUNT}"):
            _read(RangeReader(topic, 0, 0, 2 * COUNT, config))
        assert _read(RangeReader(topic, 0, 0, COUNT, config)) == COUNT
        with pytest.raises(DamagedBatch, match=rf"{topic}\[0\] is damaged at offset {COUNT}"):
            list(Log(config).records(*writers[codec], Written(topic, 0, 0, 2 * COUNT)))


def test_a_changed_byte_of_a_marker_is_found(
    kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker that says something else than was written tells nobody's fate."""
    kafka.create_topic(topic_name)
    write(kafka, topic_name, "none")
    parse = log_module.parse_batches
    changed = partial(with_a_byte_changed, batch=2)
    monkeypatch.setattr(log_module, "parse_batches", lambda data, place: parse(changed(bytes(data)), place))
    log = Log(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))
    with pytest.raises(DamagedBatch, match=f"{topic_name}-0 is damaged at offset {2 * COUNT}"):
        list(log.batches(topic_name, 0, 0))
    log.close()


def test_bytes_that_are_no_batches() -> None:
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
