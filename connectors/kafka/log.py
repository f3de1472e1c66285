"""A partition's log as evidence of a transaction: whether it is visible, and its records, verbatim.

Invariants: a record belongs to a transaction only if its batch has the producer id and epoch (a fetch at a removed
offset gives the next record of any producer); records are returned only after the headers of all their batches have
proved them complete: sequences from 0 without a gap, and exactly the committable's count.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, cast

from confluent_kafka import Message
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.record.util import calc_crc32c

from exactlyonce.checkpoint.records.manifest import Committable, Written
from exactlyonce.checkpoint.requests import Fate, Producer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import Again, DamagedBatch, RangeGone, damage, refuse
from exactlyonce.connectors.kafka.kafka_protocol import READ_COMMITTED, READ_UNCOMMITTED, PartitionLeader, Request, Wire
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.pipeline.errors import Halt

OFFSET_OUT_OF_RANGE = 1
FETCH_BYTES = 4 << 20
MESSAGES_AT_ONCE = 1_000
HELD = "an open transaction holds readers of"
"""In the error of a look at records that gave up."""


class RecordsGone(Halt):
    """The log no longer holds all records of a transaction."""


class LogRecord(NamedTuple):
    """A record as produced; its timestamp is the broker's if the topic is set to LogAppendTime."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class LogBatch(NamedTuple):
    """The header of a record batch (format 2)."""

    base_offset: int
    last_offset: int
    producer_id: int
    epoch: int
    base_sequence: int
    records: int
    is_control: bool
    commits: bool | None
    """Whether a transaction marker is a commit. None: no marker, or an emptied or a cut one."""
    is_timed_by_broker: bool = False
    """Whether its records have the time of their append."""
    is_transactional: bool = False
    """Whether its records are part of a transaction."""

    @property
    def is_whole(self) -> bool:
        """Whether compaction has removed none of its records."""
        return self.records == self.last_offset - self.base_offset + 1

    @property
    def is_cut_marker(self) -> bool:
        """Whether the data ended within this marker."""
        return self.is_control and self.records > 0 and self.commits is None


class Log:
    """Reads the logs of the output topics. Used by one thread at a time.

    It joins no group; *group* is one that it may read, since librdkafka asks for its coordinator.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        group: str = "exactlyonce",
        timeout_ms: int = 30_000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config, self._group, self._timeout_ms, self._clock = config, group, timeout_ms, clock
        self._wire = Wire(config, timeout_ms=timeout_ms, clock=clock, sleep=sleep)

    def fate(self, committable: Committable) -> Fate:
        """The fate of *committable* for readers: the proof when EndTxn has no clear answer.

        Waits until the last stable offset of each partition has passed its first record: then the broker has ended it.
        Raises `BrokerUnavailable` if an open transaction prevents that, `TopicError` if a topic is gone, `Halt` if it
        is visible in one partition and aborted in another.
        """
        fates: dict[tuple[str, int], Fate] = {}

        def attempt() -> None:
            open_ = [written for written in committable.written if (written.topic, written.partition) not in fates]
            leaders = self._wire.leaders([(written.topic, written.partition) for written in open_])
            questions = [_fetch(leaders[e.topic, e.partition], e, e.first_offset, READ_COMMITTED) for e in open_]
            for written, answer in zip(open_, self._wire.ask_all(questions), strict=True):
                fates[written.topic, written.partition] = _fate(committable, written, _only_partition(answer))

        self._wire.retrying(attempt, f"Looking for the records of {committable.transactional_id}")
        for written in committable.written:
            if fates[written.topic, written.partition] is Fate.GONE:
                fates[written.topic, written.partition] = self._fate_by_marker(committable, written)
        return _agreed(committable, fates)

    def records(self, producer_id: int, epoch: int, written: Written) -> Iterator[LogRecord]:
        """The records that the transaction of (*producer_id*, *epoch*) wrote to one partition, visible or not.

        Raises `RecordsGone`, before the first record, unless all of them are there.
        """
        yield from self._read(written, self._extents(producer_id, epoch, written))

    def batches(self, topic: str, partition: int, start: int) -> Iterator[LogBatch]:
        """The headers of all batches of all producers, from offset *start* to the end of the log."""
        return self._batches(Written(topic, partition, start, 0))

    def close(self) -> None:
        self._wire.close()

    def _fate_by_marker(self, committable: Committable, written: Written) -> Fate:
        """The fate by its marker, which compaction may have left after removing the records.

        The marker has the epoch of the records, or the next one.
        """
        epochs = (committable.epoch, committable.epoch + 1)
        for batch in self._batches(written):
            if batch.commits is not None and batch.producer_id == committable.producer_id and batch.epoch in epochs:
                return Fate.COMMITTED if batch.commits else Fate.ABORTED
        return Fate.GONE

    def _extents(self, producer_id: int, epoch: int, written: Written) -> list[range]:
        """The offsets of the transaction's records, once they are proved complete."""
        extents: list[range] = []
        count = 0
        for batch in self._batches(written):
            if batch.producer_id != producer_id:
                continue
            if batch.is_control or (batch.epoch, batch.base_sequence) != (epoch, count) or not batch.is_whole:
                break
            if not extents and batch.base_offset != written.first_offset:
                break
            extents.append(range(batch.base_offset, batch.last_offset + 1))
            count += batch.records
            if count >= written.count:
                break
        if count != written.count:
            raise _gone(written, count)
        return extents

    def _batches(self, written: Written) -> Iterator[LogBatch]:
        """The headers of all batches from the first offset to the end of the log."""
        offset, end, place = written.first_offset, written.first_offset + 1, f"{written.topic}-{written.partition}"
        while offset < end:
            answer = self._wire.retrying(partial(self._fetched, written, offset), "Reading the log")
            if answer is None:
                return
            end = answer.high_watermark
            batches = [batch for batch in parse_batches(answer.records or b"", place) if batch.last_offset >= offset]
            if len(batches) > 1 and batches[-1].is_cut_marker:
                batches.pop()  # the next fetch begins with it, and has it whole
            if not batches:
                return
            yield from batches
            offset = batches[-1].last_offset + 1

    def _fetched(self, written: Written, offset: int) -> Any:
        """The answer to an uncommitted fetch; None if *offset* is out of the log's range."""
        where = (written.topic, written.partition)
        question = _fetch(self._wire.leaders([where])[where], written, offset, READ_UNCOMMITTED)
        answer = _only_partition(self._wire.ask(*question))
        if answer.error_code == OFFSET_OUT_OF_RANGE:
            return None
        refuse(answer.error_code, f"Reading {written.topic}-{written.partition}")
        return answer

    def _read(self, written: Written, extents: Sequence[range]) -> Iterator[LogRecord]:
        """The records at *extents*, read by librdkafka, which has every codec and checks every CRC."""
        start, stop = written.first_offset, extents[-1].stop if extents else written.first_offset
        config = ClientConfig({**self._config.settings, "group.id": self._group})
        reader = RangeReader(
            written.topic, written.partition, start, stop, config,
            isolation="read_uncommitted", timeout_s=self._timeout_ms / 1000, clock=self._clock,
        )  # fmt: skip
        returned = 0
        with closing(reader):
            try:
                while messages := reader.read(MESSAGES_AT_ONCE):
                    for record in map(_record, messages):
                        while record.offset >= extents[0].stop:
                            extents = extents[1:]
                        if record.offset in extents[0]:
                            returned += 1
                            yield record
            except RangeGone:
                raise _gone(written, returned) from None
        if returned != written.count:
            raise _gone(written, returned)


_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH_FROM = 12  # the length field counts the bytes after it
_CHECKED_FROM = 21  # the checksum covers the bytes after it
_MAGIC = 2
_CONTROL = 0x20
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_MARKER_KEY = struct.Struct(">hh")  # version, and 1 for commit


def parse_batches(data: bytes, place: str = "The log") -> Iterator[LogBatch]:
    """The headers of the record batches in *data*, which may end within one.

    Raises `DamagedBatch` for bytes that are no batch, and for a marker with a wrong checksum. The checksums of records
    are checked when they are read.
    """
    position = 0
    while position + _HEADER.size <= len(data):
        header = _HEADER.unpack_from(data, position)
        base_offset, length, _leader_epoch, magic, crc, attributes, last_offset_delta = header[:7]
        _first_timestamp, _max_timestamp, producer_id, epoch, base_sequence, records = header[7:]
        end, is_control = position + _LENGTH_FROM + length, bool(attributes & _CONTROL)
        if magic != _MAGIC or end < position + _HEADER.size:
            raise DamagedBatch(damage(place, base_offset, f"no batch of format {_MAGIC} begins there"))
        commits = None
        if is_control and records and end <= len(data):
            if calc_crc32c(data[position + _CHECKED_FROM : end]) != crc:
                raise DamagedBatch(damage(place, base_offset, "the checksum of a transaction marker is wrong"))
            commits = _commits(data[position + _HEADER.size : end])
        last_offset = base_offset + last_offset_delta
        yield LogBatch(
            base_offset, last_offset, producer_id, epoch, base_sequence, records, is_control, commits,
            is_timed_by_broker=bool(attributes & _LOG_APPEND_TIME),
            is_transactional=bool(attributes & _TRANSACTIONAL),
        )  # fmt: skip
        position = end


def _commits(record: bytes) -> bool:
    """Whether a control record is a commit; five varints precede its key, the second one a plain byte."""
    position = 0
    for _ in range(5):
        while record[position] & 0x80:
            position += 1
        position += 1
    _version, kind = _MARKER_KEY.unpack_from(record, position)
    return bool(kind == 1)


def _fetch(leader: PartitionLeader, written: Written, offset: int, isolation: int, wait_ms: int = 0) -> Request:
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=written.partition, fetch_offset=offset, partition_max_bytes=FETCH_BYTES
    )
    topic = FetchRequest.FetchTopic(topic=written.topic, topic_id=leader.topic_id, partitions=[partition])
    message = FetchRequest(
        max_wait_ms=wait_ms, min_bytes=int(wait_ms > 0), max_bytes=FETCH_BYTES, isolation_level=isolation,
        session_epoch=-1, topics=[topic],
    )  # fmt: skip
    return Request(message, leader.node_id)


def _only_partition(answer: Any) -> Any:
    refuse(answer.error_code, "Reading the log")
    if not answer.responses:
        raise Again("the broker throttles us, and answered without a partition")
    return answer.responses[0].partitions[0]


def fates_now(
    wire: Wire, producer: Producer, places: Mapping[Written, PartitionLeader], wait_ms: int = 0
) -> list[Fate | None]:
    """The fate of the records of *producer* at each place now; None: readers are held before it.

    The brokers wait up to *wait_ms* for readers to get there.
    """
    questions = [
        _fetch(leader, written, written.first_offset, READ_COMMITTED, wait_ms) for written, leader in places.items()
    ]
    answers = wire.ask_all(questions)
    return [
        _fate_now(producer, written, _only_partition(answer)) for written, answer in zip(places, answers, strict=True)
    ]


def _fate(committable: Committable, written: Written, answer: Any) -> Fate:
    """The fate by a read_committed fetch at the first offset; `GONE` without any of its records.

    Raises `Again` if the transaction may still be open.
    """
    fate = _fate_now(Producer(committable.producer_id, committable.epoch), written, answer)
    if fate is None:
        raise Again(
            f"{HELD} {written.topic}-{written.partition} at offset "
            f"{answer.last_stable_offset}, before our first record ({written.first_offset})"
        )
    return fate


def _fate_now(producer: Producer, written: Written, answer: Any) -> Fate | None:
    if answer.error_code == OFFSET_OUT_OF_RANGE:
        return Fate.GONE
    refuse(answer.error_code, f"Reading {written.topic}-{written.partition}")
    if answer.last_stable_offset <= written.first_offset:
        return None
    parsed = parse_batches(answer.records or b"", f"{written.topic}-{written.partition}")
    batches = [batch for batch in parsed if batch.producer_id == producer.producer_id]
    if any(batch.epoch == producer.epoch and not batch.is_control for batch in batches):
        aborted = any(
            transaction.producer_id == producer.producer_id and transaction.first_offset <= written.first_offset
            for transaction in answer.aborted_transactions or ()
        )
        return Fate.ABORTED if aborted else Fate.COMMITTED
    return Fate.GONE


def _agreed(committable: Committable, fates: dict[tuple[str, int], Fate]) -> Fate:
    """The fate that all partitions with evidence agree on; `GONE` without any."""
    evidence = set(fates.values()) - {Fate.GONE}
    if len(evidence) > 1:
        shown = ", ".join(f"{topic}-{partition} {fate.value}" for (topic, partition), fate in fates.items())
        raise Halt(
            f"Transaction {committable.transactional_id} of checkpoint {committable.checkpoint} is visible in part: "
            f"{shown}. Somebody ended it by hand in single partitions. Readers have lost its aborted records: restore "
            f"the output topics to before that checkpoint, or write these records again yourself."
        )
    return evidence.pop() if evidence else Fate.GONE


def _record(message: Message) -> LogRecord:
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return LogRecord(cast(int, message.offset()), message.timestamp()[1], message.key(), message.value(), headers)


def _gone(written: Written, count: int) -> RecordsGone:
    return RecordsGone(
        f"{written.topic}-{written.partition} should hold {written.count} records of a transaction from offset "
        f"{written.first_offset} on, but shows {count}: retention or compaction has removed them. They can only be "
        f"computed again, from the input and the checkpoint before."
    )
