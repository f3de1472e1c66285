"""A reader at the end of a topic that transactions write, on a real broker."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, Message, Producer

from exactlyonce.connectors.kafka import reader as reader_module
from exactlyonce.connectors.kafka.reader import FetchBuffer, KafkaReader
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


def test_partitions_that_are_far_ahead_are_paused(kafka: Any, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much is fetched of some partitions, while one that has nothing yet is expected; then they go on, each record
    once and in order."""
    monkeypatch.setattr(reader_module, "FETCHED_BYTES_MAX", 200_000)
    monkeypatch.setattr(reader_module, "LITTLE_BYTES", 20_000)
    topic, count, splits = kafka.create_topic(topic_name, 4), 5_000, range(4)
    for split in splits:
        kafka.produce(topic, [b"%d" % number for number in range(count)], partition=split)
    config = {"bootstrap.servers": kafka.bootstrap_servers, "fetch.message.max.bytes": "4096"}
    rng, paused, got = random.Random(7), set[int](), {split: list[int]() for split in splits}

    def slowest_first(fetched: Mapping[int, int], expected: Collection[int], most: int) -> list[tuple[int, int]]:
        paused.update(reader._buffer.paused)
        behind = min(splits, key=lambda split: 3 * len(got[split]) if split == 0 else len(got[split]))
        taken = behind if behind in fetched else rng.choice([*fetched]) if fetched and rng.random() < 0.1 else None
        return [] if taken is None else [(taken, rng.randint(1, min(fetched[taken], most)))]

    reader = KafkaReader("in", topic, dict.fromkeys(splits, 0), {}, config, topic_id="id", divide=slowest_first)
    reader.open()
    deadline = time.monotonic() + LIMIT_S
    try:
        while sum(map(len, got.values())) < len(splits) * count:
            assert time.monotonic() < deadline, f"it stays at {reader.offsets}, {reader._buffer.paused} are paused"
            messages = reader.poll(500, 0.01)
            for message in messages:
                got[message.partition()].append(int(message.value()))
            assert {split: len(each) for split, each in got.items()} == reader.offsets
    finally:
        reader.close()
    assert all(each == [*range(count)] for each in got.values())
    assert paused


def test_partitions_of_which_much_is_fetched_are_paused_until_little_is_left() -> None:
    """Of small records thousands are little, of large ones few are; what is full stays so until records are taken."""

    def messages(split: int, count: int, size: int) -> list[Message]:
        return [Message(topic="t", partition=split, offset=number, value=b"a" * size) for number in range(count)]

    for size, count, little in ((1, 80_000, 3_000), (100_000, 240, 9)):
        buffer = FetchBuffer()
        for split in range(2):
            buffer.add(messages(split, count, size), [(split, count)])
        buffer.add(messages(2, little, size), [(2, little)])
        assert (buffer.pause(), buffer.resume(), buffer.has_enough) == (set(), set(), count > 2_000)
        for split in range(3, 5):
            buffer.add(messages(split, count, size), [(split, count)])
        assert buffer.has_enough
        assert (buffer.pause(), buffer.pause(), buffer.resume()) == ({0, 1, 3, 4}, set(), set())
        taken = buffer.take([(1, 1), (0, count - little)])
        assert [message.offset() for message in taken] == [0, *range(count - little)]
        assert (buffer.resume(), buffer.resume(), buffer.pause()) == ({0}, set(), set())
        buffer.take([(split, buffer.counts[split]) for split in range(1, 5)])
        assert (buffer.counts, buffer.resume()) == ({0: little}, {1, 3, 4})
        buffer.take([(0, little)])
        assert (buffer.counts, buffer.has_enough, buffer.pause()) == ({}, False, set())


def test_what_is_behind_thousands_of_others_is_found() -> None:
    """However small a batch is: the first ones of a run have four records."""
    queue = [Message(topic="t", partition=0, offset=number, value=b"a") for number in range(8_000)]
    queue += [Message(topic="t", partition=1, offset=0, value=b"b")]
    seen: list[Mapping[int, int]] = []

    class Queue:
        def consume(self, most: int, timeout_s: float) -> list[Message]:
            taken = queue[:most]
            del queue[:most]
            return taken

        def incremental_assign(self, places: object) -> None: ...

        def get_watermark_offsets(self, place: object, cached: bool) -> tuple[int, int]:
            return 0, 8_000

    def divide(fetched: Mapping[int, int], expected: Collection[int], most: int) -> list[tuple[int, int]]:
        seen.append(fetched)
        return [(1, 1)]

    reader = KafkaReader(
        "in", "t", {0: 0, 1: 0}, {}, {}, topic_id="id", make=lambda _: cast(Consumer, Queue()), divide=divide
    )
    reader.open()
    assert [message.value() for message in reader.poll(4, 0.0)] == [b"b"]
    assert seen == [{0: 8_000, 1: 1}]
    assert reader.offsets == {0: 0, 1: 1}
