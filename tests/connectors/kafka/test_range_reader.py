"""Exactly a range: against the records that a plain read_committed consumer sees."""

from __future__ import annotations

import time
from typing import Any

import pytest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.connectors.kafka.visible import Scan
from exactlyonce.pipeline.errors import BrokerUnavailable, TopicError
from exactlyonce.testing.cluster import LIMIT_S

CANARY = "canary-7f3a"


def read(reader: RangeReader, records_max: int = 7) -> list[tuple[int | None, bytes | None]]:
    """(offset, value) of all of the range, in batches of at most *records_max*."""
    records = []
    while messages := reader.read(records_max):
        assert len(messages) <= records_max
        records += [(message.offset(), message.value()) for message in messages]
    assert reader.read(records_max) == []
    reader.close()
    return records


def write(cluster: Any, topic: str, kinds: str) -> None:
    """Write a transaction of three records per kind, (c)ommitted or (a)borted, interleaved with an aborted one."""
    for number, kind in enumerate(kinds):
        outer, inner = (cluster.open(f"{topic}-{number}-{name}", topic, []) for name in ("outer", "inner"))
        for step in range(3):
            for name, producer in (("outer", outer), ("inner", inner)):
                producer.produce(topic, f"{number}-{name}-{step}", partition=0)
                assert producer.flush(LIMIT_S) == 0
        inner.abort_transaction(LIMIT_S)
        outer.commit_transaction(LIMIT_S) if kind == "c" else outer.abort_transaction(LIMIT_S)


def test_every_range(cluster: Any, kafka: Any, topic: str) -> None:
    write(cluster, topic, "caca")
    cluster.visible(topic)
    seen = [(each.offset, each.value) for each in kafka.read_committed(topic) if each.partition == 0]
    assert [offset for offset, _ in seen] == [0, 2, 4, 16, 18, 20]
    log_end = cluster.topics.end_offsets(topic, committed=True)[0]
    for start in (0, 3, 17):
        for end in range(start, log_end + 1):
            reader = RangeReader(topic, 0, start, end, cluster.config)
            assert read(reader) == [each for each in seen if start <= each[0] < end], (start, end)


def test_more_than_one_fetch(cluster: Any, topic: str) -> None:
    producer = cluster.open(f"{topic}-many", topic, [b"%06d" % number + bytes(300) for number in range(20_000)])
    producer.commit_transaction(LIMIT_S)
    records = read(RangeReader(topic, 1, 5, 9_000, cluster.config), 3_000)
    assert [offset for offset, _ in records] == list(range(5, 9_000))
    assert [value[:6] for _, value in records if value] == [b"%06d" % number for number in range(11, 18_000, 2)]


def test_a_transaction_that_ends_meanwhile(cluster: Any, kafka: Any, topic: str) -> None:
    """A range waits for an open transaction in it; the caller's time in between does not count."""
    kafka.produce(topic, [b"0"], partition=0)
    producer = cluster.open(topic, topic, [b"1", b""])
    hour, asked = 0.0, 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        if hour and asked == 6:
            producer.commit_transaction(LIMIT_S)
        return hour + time.monotonic()

    reader = RangeReader(topic, 0, 0, 2, cluster.config, clock=clock)
    assert [message.offset() for message in reader.read(1)] == [0]
    hour, asked = 3600.0, 0
    assert read(reader) == [(1, b"1")]
    assert asked >= 6


def test_an_empty_range_asks_nobody(nobody: str) -> None:
    config = ClientConfig({"bootstrap.servers": nobody})
    assert read(RangeReader("missing", 0, 7, 7, config)) == []


class Clock:
    """It stands still, or goes on by a step whenever it is looked at."""

    now_s = step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.mark.broker
class TestWhatIsMissing:
    def test_removed(self, cluster: Any, topic: str) -> None:
        cluster.open(topic, topic, [b"%d" % number for number in range(20)]).commit_transaction(LIMIT_S)
        cluster.settle(topic)
        cluster.kafka.delete_records(topic, {0: 4})
        with pytest.raises(RangeGone, match=r"from offset 3 up to 8, but the topic holds offsets 4 to 10 now"):
            RangeReader(topic, 0, 3, 9, cluster.config).read(100)
        assert [offset for offset, _ in read(RangeReader(topic, 0, 4, 9, cluster.config))] == [4, 5, 6, 7, 8]

    def test_beyond_the_end(self, cluster: Any, topic: str) -> None:
        cluster.open(topic, topic, [b"0", b"", b"1", b""]).commit_transaction(LIMIT_S)
        cluster.settle(topic)
        with pytest.raises(RangeGone, match="from offset 10 up to 19, but the topic holds offsets 0 to 2 now"):
            RangeReader(topic, 0, 10, 20, cluster.config).read(100)
        clock = Clock()
        hasty = RangeReader(topic, 0, 0, 20, cluster.config, timeout_s=5.0, clock=clock)
        assert len(hasty.read(100)) == 2
        clock.step_s = 1.0
        with pytest.raises(
            BrokerUnavailable, match=r"at offset 3 nothing has come for 5 s: readers .* held at offset 3"
        ):
            hasty.read(100)
        hasty.close()

    def test_no_topic(self, cluster: Any, topic_name: str) -> None:
        with pytest.raises(TopicError, match=rf"{topic_name}\[0\], of which .* does not exist"):
            RangeReader(topic_name, 0, 0, 20, cluster.config).read(100)
        cluster.topics.create(topic_name, partitions=1)
        with pytest.raises(TopicError, match=rf"{topic_name}\[1\], of which .* does not exist"):
            RangeReader(topic_name, 1, 0, 20, cluster.config).read(100)

    def test_no_broker(self, nobody: str) -> None:
        security = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "ann"}
        config = ClientConfig({"bootstrap.servers": nobody, "log_level": 0, "sasl.password": CANARY, **security})
        with pytest.raises(BrokerUnavailable, match=rf"{nobody} runs") as caught:
            RangeReader("topic", 0, 0, 20, config, timeout_s=0.3).read(100)
        assert CANARY not in str(caught.value)


ANN, BOB = (1, 0), (2, 5)


def test_offsets_fall_into_runs_of_one_writer() -> None:
    """Offsets of markers and of aborted records are missing; two batches of one writer are one run."""
    scanned = Scan(10)
    for base, last, writer in ((10, 14, ANN), (15, 16, ANN), (18, 20, BOB), (21, 21, ANN)):
        scanned.add(base, last, last - base + 1, writer)
    runs = list(scanned.runs([10, 12, 16, 18, 19, 21]))
    assert runs == [(ANN, 0, 3), (BOB, 3, 5), (ANN, 5, 6)]
    assert list(scanned.runs([19])) == [(BOB, 0, 1)]
    assert list(scanned.runs([])) == []
    assert scanned.counts == {ANN: 8, BOB: 3}
    assert scanned.extents == {ANN: range(10, 22), BOB: range(18, 21)}
    assert scanned.end == 22
