"""The log shows the fate of a transaction, and its records verbatim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kafka.protocol.consumer.fetch import FetchResponse
from kafka.protocol.producer.transaction import WriteTxnMarkersRequest
from kafka.record.memory_records import MemoryRecordsBuilder
from waiting import until

from exactlyonce.checkpoint.records.manifest import Committable, Written
from exactlyonce.checkpoint.requests import EndAnswer, Fate
from exactlyonce.connectors.kafka import log as log_module
from exactlyonce.connectors.kafka.errors import Again
from exactlyonce.connectors.kafka.kafka_protocol import Wire
from exactlyonce.connectors.kafka.log import Log, RecordsGone, parse_batches
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, TopicError
from exactlyonce.sinks.kafka.copying import copy_transaction
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import LIMIT_S

VALUES = [b"%03d" % number for number in range(100)]


@pytest.fixture
def log(cluster: Any) -> Iterator[Log]:
    log = Log(cluster.config, timeout_ms=LIMIT_S * 1000)
    yield log
    log.close()


def end(cluster: Any, committable: Committable, *, commit: bool) -> None:
    answer = cluster.transactions.end_until_answered(
        committable.transactional_id, committable.producer_id, committable.epoch, commit=commit
    )
    assert answer is EndAnswer.COMPLETED


def ended(cluster: Any, transactional_id: str, topic: str, *, commit: bool) -> Committable:
    cluster.open(transactional_id, topic, VALUES)
    committable: Committable = cluster.committable(transactional_id)
    end(cluster, committable, commit=commit)
    return committable


class TestFate:
    @pytest.mark.parametrize(("commit", "fate"), [(True, Fate.COMMITTED), (False, Fate.ABORTED)])
    def test_ended(self, cluster: Any, topic: str, log: Log, commit: bool, fate: Fate) -> None:
        committable = ended(cluster, topic, topic, commit=commit)
        assert log.fate(committable) is fate
        cluster.producer(topic)
        assert log.fate(committable) is fate
        assert cluster.visible(topic) == (VALUES if commit else [])

    @pytest.mark.usefixtures("unhurried")
    def test_an_older_open_transaction_pins_it(self, cluster: Any, topic: str, log: Log) -> None:
        cluster.open(f"{topic}-other", topic, VALUES)
        committable = ended(cluster, topic, topic, commit=True)
        clock = SimulatedClock()
        hasty = Log(
            cluster.config,
            timeout_ms=10_000,
            clock=lambda: clock.monotonic_ms() / 1000,
            sleep=lambda pause_s: clock.advance(round(pause_s * 1000) + 1),
        )
        with pytest.raises(BrokerUnavailable, match=rf"readers of {topic}-0 at offset 0, before .* \(50\)"):
            hasty.fate(committable)
        hasty.close()
        end(cluster, cluster.committable(f"{topic}-other"), commit=False)
        assert log.fate(committable) is Fate.COMMITTED

    def test_removed(self, cluster: Any, topic: str, log: Log) -> None:
        cluster.topics.create(f"{topic}-one", partitions=1)
        committable = ended(cluster, topic, f"{topic}-one", commit=False)
        cluster.visible(f"{topic}-one")
        cluster.kafka.produce(f"{topic}-one", VALUES, partition=0)
        cluster.kafka.delete_records(f"{topic}-one", {0: len(VALUES) + 1})
        assert log.fate(committable) is Fate.GONE
        other = msgspec.structs.replace(committable, written=(Written(f"{topic}-one", 0, len(VALUES) + 1, 1),))
        assert log.fate(other) is Fate.GONE

    def test_the_marker_alone(self, cluster: Any, topic: str, log: Log) -> None:
        """It tells the fate where compaction has taken the records."""
        for commit, fate in ((True, Fate.COMMITTED), (False, Fate.ABORTED)):
            name = f"{topic}-{commit}"
            cluster.topics.create(name, partitions=1)
            committable = ended(cluster, name, name, commit=commit)
            cluster.visible(name)
            at_marker = msgspec.structs.replace(committable, written=(Written(name, 0, len(VALUES), 1),))
            assert log.fate(at_marker) is fate

    def test_a_missing_topic(self, cluster: Any, topic: str, log: Log) -> None:
        cluster.open(topic, topic, VALUES)
        committable = cluster.committable(topic)
        missing = msgspec.structs.replace(committable, written=(Written(f"{topic}-missing", 0, 0, 50),))
        with pytest.raises(TopicError, match=f"{topic}-missing"):
            log.fate(missing)

    def test_ended_by_hand_in_one_partition(self, cluster: Any, topic: str, log: Log) -> None:
        cluster.open(topic, topic, VALUES)
        committable = cluster.committable(topic)
        abort_in_partition(cluster, committable, topic, 0)
        end(cluster, committable, commit=True)
        with pytest.raises(Halt, match=rf"{topic}-0 aborted, {topic}-1 committed"):
            log.fate(committable)


def abort_in_partition(cluster: Any, committable: Committable, topic: str, partition: int) -> None:
    """Do as `kafka-transactions.sh abort` does."""
    entry = WriteTxnMarkersRequest.WritableTxnMarker
    marker = entry(
        producer_id=committable.producer_id,
        producer_epoch=committable.epoch,
        transaction_result=False,
        topics=[entry.WritableTxnMarkerTopic(name=topic, partition_indexes=[partition])],
        coordinator_epoch=-1,
    )
    wire = Wire(cluster.config, timeout_ms=LIMIT_S * 1000)
    leader = wire.leaders([(topic, partition)])[topic, partition]
    answer = wire.ask(WriteTxnMarkersRequest(markers=[marker]), leader.node_id)
    assert answer.markers[0].topics[0].partitions[0].error_code == 0
    wire.close()


@pytest.mark.broker
class TestRecords:
    """The records of a transaction, read back from the log whether or not readers see them."""

    @pytest.mark.parametrize("commit", [None, True, False])
    def test_they_are_given_in_any_state(self, cluster: Any, topic: str, log: Log, commit: bool | None) -> None:
        cluster.open(topic, topic, VALUES)
        committable = cluster.committable(topic)
        if commit is not None:
            end(cluster, committable, commit=commit)
        values = [
            [r.value for r in log.records(committable.producer_id, committable.epoch, each)]
            for each in committable.written
        ]
        assert values == [VALUES[0::2], VALUES[1::2]]

    @pytest.mark.parametrize("codec", ["none", "snappy", "lz4", "zstd"])
    def test_they_are_verbatim(self, cluster: Any, topic: str, log: Log, codec: str) -> None:
        given: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]] = [
            (None, None, [], 1),
            (b"", b"", [("a", b""), ("a", None), ("b", b"\xff"), ("a", b"1")], 1_356_998_400_000),
            (b"key", None, [("ü", "ü".encode())], 2),
            (None, bytes(1000), [], 2),
        ]
        producer = cluster.producer(topic, compression_type=codec)
        producer.begin_transaction()
        for key, value, headers, timestamp_ms in given:
            producer.produce(topic, value, key, partition=1, headers=headers, timestamp=timestamp_ms)
        assert producer.flush(LIMIT_S) == 0
        committable = cluster.committable(topic)
        end(cluster, committable, commit=False)
        records = list(log.records(committable.producer_id, committable.epoch, committable.written[0]))
        assert [(each.key, each.value, each.headers, each.timestamp_ms) for each in records] == given
        assert [each.offset for each in records] == [0, 1, 2, 3]

    def test_only_those_of_the_transaction(self, cluster: Any, topic: str, log: Log) -> None:
        ours = cluster.open(topic, topic, VALUES[:10])
        theirs = cluster.open(f"{topic}-other", topic, [b"theirs"])
        for value in VALUES[10:20]:
            cluster.produce(ours, topic, [value])
            cluster.produce(theirs, topic, [b"theirs"])
            cluster.kafka.produce(topic, [b"plain"], partition=0)
        committable = cluster.committable(topic)
        end(cluster, committable, commit=False)
        records = log.records(committable.producer_id, committable.epoch, committable.written[0])
        assert [each.value for each in records] == VALUES[0:10:2] + VALUES[10:20]

    def test_more_than_one_fetch(self, cluster: Any, topic: str, log: Log) -> None:
        values = [b"%06d" % number + bytes(500) for number in range(20_000)]
        cluster.open(topic, topic, values)
        committable = cluster.committable(topic)
        records = log.records(committable.producer_id, committable.epoch, committable.written[1])
        assert [each.value for each in records] == values[1::2]

    def test_incomplete(self, cluster: Any, topic: str, log: Log) -> None:
        committable = ended(cluster, topic, topic, commit=False)
        producer_id, epoch, written = committable.producer_id, committable.epoch, committable.written[0]
        cluster.visible(topic)
        cluster.kafka.produce(topic, VALUES, partition=0)
        for wrong in (
            log.records(producer_id, epoch, msgspec.structs.replace(written, count=written.count + 1)),
            log.records(producer_id, epoch, msgspec.structs.replace(written, count=written.count - 1)),
            log.records(producer_id, epoch, msgspec.structs.replace(written, first_offset=1)),
            log.records(producer_id, epoch, msgspec.structs.replace(written, first_offset=10_000)),
            log.records(producer_id, epoch + 1, written),
            log.records(producer_id + 1, epoch, written),
        ):
            with pytest.raises(RecordsGone, match=f"{topic}-0 should hold"):
                next(wrong)
        cluster.kafka.delete_records(topic, {0: 1})
        with pytest.raises(RecordsGone, match="shows 0"):
            next(log.records(producer_id, epoch, written))


def test_a_copy_whose_records_are_gone_is_aborted(cluster: Any, topic: str, log: Log) -> None:
    """Records of the second partition were deleted after those of the first were copied: they hold nobody back."""
    cluster.open(topic, topic, [b"%d" % number for number in range(6)])
    lost = cluster.committable(topic)
    cluster.transactions.end_until_answered(topic, lost.producer_id, lost.epoch, commit=False)
    until(lambda: cluster.state(topic).state == "CompleteAbort")
    cluster.kafka.delete_records(topic, {1: 1})
    name = f"{topic}-repair"
    why = copy_transaction(cluster.config, cluster.transactions, log, lost, name, 600_000)
    assert isinstance(why, str)
    until(lambda: cluster.state(name).state == "CompleteAbort")


def test_parsing_stops_at_a_cut_batch() -> None:
    data = b"".join(batch_of(number) for number in (1, 2, 3))
    whole = list(parse_batches(data))
    assert [(each.producer_id, each.epoch, each.base_sequence, each.records) for each in whole] == [
        (number, 7, 5, number) for number in (1, 2, 3)
    ]
    assert all(each.is_whole and not each.is_control for each in whole)
    for length in range(len(data)):
        given = list(parse_batches(data[:length]))
        assert given == whole[: len(given)]
    assert list(parse_batches(b"")) == []


def test_an_answer_of_a_broker_that_throttles_is_asked_for_again() -> None:
    """It has no partition in it."""
    with pytest.raises(Again, match="throttles us"):
        log_module._only_partition(FetchResponse(error_code=0, responses=[]))


def batch_of(number: int) -> bytes:
    builder = MemoryRecordsBuilder(
        2, 0, 1 << 20, transactional=True, producer_id=number, producer_epoch=7, base_sequence=5
    )
    for index in range(number):
        builder.append(1_000 + index, b"key", b"value", [])
    builder.close()
    return bytes(builder.buffer())
