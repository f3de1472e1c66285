"""A reader at the end of a topic that transactions write, on a real broker."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Producer

from exactlyonce.connectors.kafka.reader import KafkaReader
from exactlyonce.testing.cluster import LIMIT_S


@pytest.fixture
def producer(kafka: Any, topic_name: str) -> Producer:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic_name})
    producer.init_transactions()
    return producer


def write(producer: Producer, topic: str, *values: bytes, committed: bool = True) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    producer.flush()
    if committed:
        producer.commit_transaction()
    else:
        producer.abort_transaction()


def reader_at(kafka: Any, topic: str, offset: int, epoch: int = -1) -> KafkaReader:
    config = {"bootstrap.servers": kafka.bootstrap_servers}
    reader = KafkaReader("in", topic, {0: offset}, {}, config, topic_id="id", epochs={0: epoch})
    reader.open()
    return reader


def read_until(reader: KafkaReader, offset: int) -> list[bytes | None]:
    values, deadline = [], time.monotonic() + LIMIT_S
    while reader.offsets[0] < offset:
        assert time.monotonic() < deadline, f"the reader stays at {reader.offsets[0]} instead of {offset}"
        values += [message.value() for message in reader.poll(10, 0.1)]
    return values


@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_lags_at_the_end(kafka: Any, topic_name: str, producer: Producer, aborted: bool) -> None:
    """The position passes the markers at the end, and aborted records; reading goes on from it."""
    topic = kafka.create_topic(topic_name)
    write(producer, topic, b"1", b"2")
    if aborted:
        write(producer, topic, b"no", committed=False)
    end = 5 if aborted else 3
    reader = reader_at(kafka, topic, 0)
    try:
        assert read_until(reader, end) == [b"1", b"2"]
        assert set(reader.lags().values()) <= {0}
        (position,) = reader.positions()
    finally:
        reader.close()
    assert (position.offset, position.leader_epoch) == (end, 0)
    write(producer, topic, b"3")
    reader = reader_at(kafka, topic, position.offset, position.leader_epoch)
    try:
        assert read_until(reader, end + 2) == [b"3"]
        assert set(reader.lags().values()) <= {0}
    finally:
        reader.close()


def test_an_open_transaction_is_not_passed(kafka: Any, topic_name: str, producer: Producer) -> None:
    """The position waits before its first record, which is read once it is committed."""
    topic = kafka.create_topic(topic_name)
    write(producer, topic, b"1")
    producer.begin_transaction()
    producer.produce(topic, b"2")
    producer.flush()
    reader = reader_at(kafka, topic, 0)
    try:
        assert read_until(reader, 2) == [b"1"]
        assert not reader.poll(10, 0.5)
        assert reader.offsets == {0: 2}
        producer.commit_transaction()
        assert read_until(reader, 4) == [b"2"]
    finally:
        reader.close()
