"""A partition's log as evidence of a transaction: whether it is visible, and its records, verbatim.

Invariants: a record is taken for a transaction's only if its batch carries that producer id and epoch (a fetch at a
removed offset gives the next record, whoever wrote it); records are handed out only after the headers of all their
batches have proved that they are complete: sequences from 0 without a gap, and exactly the committable's count.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, Message, TopicPartition
from kafka.protocol.consumer.fetch import FetchRequest
from kafka.record.util import calc_crc32c

from exactlyonce.checkpoint.records.committable import Committable, Written
from exactlyonce.checkpoint.transactions.broker_answers import Fate, Producer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import (
    Again,
    DamagedBatch,
    Meaning,
    damage,
    meaning_of,
    raise_unless_passing,
    refuse,
)
from exactlyonce.connectors.kafka.kafka_protocol import READ_COMMITTED, READ_UNCOMMITTED, PartitionLeader, Request, Wire
from exactlyonce.connectors.kafka.reader import exact_consumer
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, TopicError

OFFSET_OUT_OF_RANGE = 1
FETCH_BYTES = 4 << 20
MESSAGES_AT_ONCE, CONSUME_WAIT_S = 1_000, 0.05


class RecordsGone(Halt):
    """The log no longer holds all records of a transaction."""


class LogRecord(NamedTuple):
    """A record as its producer gave it; the timestamp is the broker's where the topic is set so."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class LogBatch(NamedTuple):
    """What the header of a record batch (format 2) says."""

    base_offset: int
    last_offset: int
    producer_id: int
    epoch: int
    base_sequence: int
    records: int
    is_control: bool
    commits: bool | None
    """Of the marker that ends a transaction: whether by commit. None: no marker, or an emptied or a cut one."""
    is_timed_by_broker: bool = False
    """Whether its records have the time of their append, whatever their producer gave."""

    @property
    def is_whole(self) -> bool:
        """Whether compaction has taken none of its records."""
        return self.records == self.last_offset - self.base_offset + 1

    @property
    def is_cut_marker(self) -> bool:
        """Whether only the beginning of a marker was there to be parsed."""
        return self.is_control and self.records > 0 and self.commits is None


class Log:
    """Looks into the logs of the output topics. Used by one thread at a time.

    It joins no group; *group* is one that it may read, since librdkafka asks for the coordinator of one.
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
        """What readers see of *committable*: the proof when EndTxn's answer is none.

        Waits until the last stable offset of each partition has passed its first record: then the broker has ended it.
        Raises `BrokerUnavailable` if an open transaction keeps that from happening, `TopicError` if a topic is gone,
        `Halt` if it is visible in one partition and aborted in another.
        """
        fates: dict[tuple[str, int], Fate] = {}

        def attempt() -> None:
            open_ = [each for each in committable.written if (each.topic, each.partition) not in fates]
            leaders = self._wire.leaders([(each.topic, each.partition) for each in open_])
            questions = [_fetch(leaders[e.topic, e.partition], e, e.first_offset, READ_COMMITTED) for e in open_]
            for each, answer in zip(open_, self._wire.ask_all(questions), strict=True):
                fates[each.topic, each.partition] = _fate(committable, each, _only_partition(answer))

        self._wire.retrying(attempt, f"Looking for the records of {committable.transactional_id}")
        for each in committable.written:
            if fates[each.topic, each.partition] is Fate.GONE:
                fates[each.topic, each.partition] = self._fate_by_marker(committable, each)
        return _agreed(committable, fates)

    def records(self, producer_id: int, epoch: int, written: Written) -> Iterator[LogRecord]:
        """The records that the transaction of (*producer_id*, *epoch*) wrote to one partition, visible or not.

        Raises `RecordsGone`, before the first is given, unless all of them are there.
        """
        yield from self._read(written, self._extents(producer_id, epoch, written))

    def batches(self, topic: str, partition: int, start: int) -> Iterator[LogBatch]:
        """The headers of all batches from offset *start* to the end of the log, whoever wrote them."""
        return self._batches(Written(topic, partition, start, 0))

    def close(self) -> None:
        """Let go of the connections; the next question makes new ones."""
        self._wire.close()

    def _fate_by_marker(self, committable: Committable, written: Written) -> Fate:
        """What its marker says: compaction may have taken the records and left it, anywhere behind them.

        It carries the epoch of the records, or the one that the end raised it to.
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
                batches.pop()  # the next fetch begins with it, and brings a whole one
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
        """The records at *extents*; read by librdkafka, which brings every codec and checks every CRC."""
        given = 0
        for record in self._all_records(written, extents[-1].stop if extents else 0):
            while record.offset >= extents[0].stop:
                extents = extents[1:]
            if record.offset in extents[0]:
                given += 1
                yield record
        if given != written.count:
            raise _gone(written, given)

    def _all_records(self, written: Written, stop: int) -> Iterator[LogRecord]:
        """The records of all producers from the first offset up to *stop*."""
        overrides = {"group.id": self._group, "isolation.level": "read_uncommitted"}
        consumer = exact_consumer(self._config.confluent(overrides))
        try:
            consumer.assign([TopicPartition(written.topic, written.partition, written.first_offset)])
            offset, progress_s = written.first_offset, self._clock()
            while offset < stop:
                messages = consumer.consume(MESSAGES_AT_ONCE, CONSUME_WAIT_S)
                if any(message.error() is None for message in messages):
                    progress_s = self._clock()
                elif self._clock() > progress_s + self._timeout_ms / 1000:
                    raise _unreadable(written, offset, f"nothing came for {self._timeout_ms / 1000:g} s")
                for message in messages:
                    error = message.error()
                    if error is not None:
                        self._raise(error, written, offset)
                        continue
                    record = _record(message)
                    offset = record.offset + 1
                    if offset > stop:
                        return
                    yield record
        finally:
            consumer.close()

    def _raise(self, error: KafkaError, written: Written, offset: int) -> None:
        """Raise what needs a person, met before *offset*; what passes librdkafka itself retries."""
        place, reason = f"{written.topic}-{written.partition}", self._config.redact(error.str())
        if meaning_of(error) is Meaning.REMOVED:
            raise _gone(written, offset - written.first_offset)
        if meaning_of(error) is Meaning.MISSING:
            raise TopicError(f"{place}, of which a transaction's records were to be read, does not exist (any more).")
        if error.code() != KafkaError._PARTITION_EOF:
            raise_unless_passing(error, place, offset, reason, self._group)


_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH_FROM = 12  # a batch's length counts from behind itself
_CHECKED_FROM = 21  # and its checksum is of all that stands behind the checksum
_MAGIC = 2
_CONTROL = 0x20
_LOG_APPEND_TIME = 0x08
_MARKER_KEY = struct.Struct(">hh")  # version, and 1 for commit


def parse_batches(data: bytes, place: str = "The log") -> Iterator[LogBatch]:
    """The headers of the record batches in *data*, which may end in the midst of one.

    Raises `DamagedBatch` for what is no batch, and for a marker whose checksum is wrong: nothing else would tell. A
    batch of records is checked where they are read, and its header by what it must say.
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
        timed = bool(attributes & _LOG_APPEND_TIME)
        yield LogBatch(base_offset, last_offset, producer_id, epoch, base_sequence, records, is_control, commits, timed)
        position = end


def _commits(record: bytes) -> bool:
    """Whether a control record is a commit; before its key come five varints, of which the second is a plain byte."""
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
    """The one partition of a fetch's answer."""
    refuse(answer.error_code, "Reading the log")
    return answer.responses[0].partitions[0]


def fates_now(
    wire: Wire, producer: Producer, places: Mapping[Written, PartitionLeader], wait_ms: int = 0
) -> list[Fate | None]:
    """What readers see now at each place, which *producer* wrote to; None: they do not get as far.

    The brokers wait for that, as for any reader, for *wait_ms* at most.
    """
    questions = [_fetch(leader, each, each.first_offset, READ_COMMITTED, wait_ms) for each, leader in places.items()]
    answers = wire.ask_all(questions)
    return [_fate_now(producer, each, _only_partition(answer)) for each, answer in zip(places, answers, strict=True)]


def _fate(committable: Committable, written: Written, answer: Any) -> Fate:
    """What a read_committed fetch at the first offset shows; `GONE` if none of its records.

    Raises `Again` if the transaction may still be open.
    """
    fate = _fate_now(Producer(committable.producer_id, committable.epoch), written, answer)
    if fate is None:
        raise Again(
            f"in {written.topic}-{written.partition} readers are held at offset {answer.last_stable_offset}, before "
            f"our first record ({written.first_offset}), by a transaction that is open there "
            f"(kafka-transactions.sh find-hanging shows whose)"
        )
    return fate


def _fate_now(producer: Producer, written: Written, answer: Any) -> Fate | None:
    if answer.error_code == OFFSET_OUT_OF_RANGE:
        return Fate.GONE
    refuse(answer.error_code, f"Reading {written.topic}-{written.partition}")
    if answer.last_stable_offset <= written.first_offset:
        return None
    found = parse_batches(answer.records or b"", f"{written.topic}-{written.partition}")
    batches = [each for each in found if each.producer_id == producer.producer_id]
    if any(each.epoch == producer.epoch and not each.is_control for each in batches):
        aborted = any(
            each.producer_id == producer.producer_id and each.first_offset <= written.first_offset
            for each in answer.aborted_transactions or ()
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
            f"{shown}. Somebody ended it by hand in single partitions. Its records there are lost to readers: restore "
            f"the output topics to before that checkpoint, or accept the loss by writing them again yourself."
        )
    return evidence.pop() if evidence else Fate.GONE


def _record(message: Message) -> LogRecord:
    headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return LogRecord(cast(int, message.offset()), message.timestamp()[1], message.key(), message.value(), headers)


def _gone(written: Written, count: int) -> RecordsGone:
    return RecordsGone(
        f"{written.topic}-{written.partition} should hold {written.count} records of a transaction from offset "
        f"{written.first_offset} on, but shows {count}: retention or compaction has removed them. They can be made "
        f"again only from the input and the checkpoint before."
    )


def _unreadable(written: Written, offset: int, why: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{written.topic}-{written.partition} cannot be read at offset {offset}: {why}. Check that its brokers run and "
        f"that we may read the topic; then try again."
    )
