"""The records of a partition that read_committed readers see, each with its writer.

Invariants: a record is what a plain consumer gets; the header of the batch at its offset identifies its writer. Records
that are in the log and not visible are counted too, to tell "aborted" from "removed".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from confluent_kafka import Message

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.partitioning import fitting
from exactlyonce.connectors.kafka.range_reader import RangeReader
from exactlyonce.connectors.kafka.reader import offset_of
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.pipeline.errors import UserError

READ_AT_ONCE = 10_000
NEWEST_OFFSETS = 100
"""The offsets of a partition that `other_partitioner` reads."""
KEYS_ENOUGH = 32
NEWEST_TIMEOUT_S = 5.0
Writer = tuple[int, int]
"""The producer id and epoch of one transaction."""


Headers = tuple[tuple[str, bytes | None], ...]


class VisibleRecord(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    writer: Writer
    timestamp_ms: int


@dataclass
class Scan:
    """The writers of a partition's offsets up to `end`."""

    end: int
    counts: dict[Writer, int] = field(default_factory=lambda: defaultdict(int))
    """The number of records of each transaction in the log, visible or not."""
    extents: dict[Writer, range] = field(default_factory=dict)
    """The offsets from the first to the last record of each."""
    timed_by_broker: bool = False
    """Whether a batch has the time of its append."""
    _bases: list[int] = field(default_factory=list)
    """The first offset of each run of batches of one writer."""
    _writers: list[Writer] = field(default_factory=list)

    def add(self, base_offset: int, last_offset: int, records: int, writer: Writer) -> None:
        if self._writers[-1:] != [writer]:
            self._bases.append(base_offset)
            self._writers.append(writer)
        self.counts[writer] += records
        known = self.extents.get(writer, range(base_offset, base_offset))
        self.extents[writer] = range(known.start, last_offset + 1)
        self.end = last_offset + 1

    def runs(self, offsets: Sequence[int]) -> Iterator[tuple[Writer, int, int]]:
        """The writer of each run of *offsets*, which grow, with the places of its first and after its last one."""
        start = 0
        while start < len(offsets):
            run = bisect_right(self._bases, offsets[start]) - 1
            is_last = run + 1 == len(self._bases)
            end = len(offsets) if is_last else bisect_left(offsets, self._bases[run + 1], start)
            yield self._writers[run], start, end
            start = end


class CutScan(NamedTuple):
    """The transactions of a partition that were committed before those after a cut."""

    scanned: Scan
    writers: set[Writer]
    """The writers of their records, and of records without a transaction."""
    end: int
    """The offset after the last of these records."""


def scan_to_cut(log: Log, topic: str, partition: int, start: int, end: int, later: Collection[Writer]) -> CutScan:
    """Scan [*start*, *end*), up to the first commit of a writer of *later*.

    Each transaction before the cut must have been ended before the first of *later* was committed, and its end be
    before *end*. No transaction of *later* may have records before *start*.
    """
    scanned, writers, cut_end = Scan(start), set[Writer](), start
    waiting: dict[int, tuple[Writer, int]] = {}
    """By producer id, the writer of records whose end is still to come, and the offset after its last one."""
    for batch in log.batches(topic, partition, start):
        if batch.base_offset >= end:
            break
        writer, after = (batch.producer_id, batch.epoch), batch.last_offset + 1
        if not batch.is_control:
            scanned.add(batch.base_offset, batch.last_offset, batch.records, writer)
            if batch.is_transactional:
                waiting[batch.producer_id] = writer, after
                continue
        elif batch.commits is None or batch.producer_id not in waiting:
            continue
        else:
            writer, after = waiting.pop(batch.producer_id)
            if not batch.commits:
                continue
            if writer in later:
                break
        writers.add(writer)
        cut_end = max(cut_end, after)
    return CutScan(scanned, writers, cut_end)


def scan(log: Log, topic: str, partition: int, start: int, wanted: Mapping[Writer, int] | None) -> Scan:
    """Scan the batches from *start* on, to the end of the log or until the counts of *wanted* are reached."""
    scanned = Scan(start)
    missing = dict(wanted or {})
    for batch in log.batches(topic, partition, start):
        if batch.is_control:
            continue
        writer = (batch.producer_id, batch.epoch)
        removed = max(0, start - batch.base_offset)  # a batch stays whole though its first records are deleted
        scanned.timed_by_broker |= batch.is_timed_by_broker
        scanned.add(batch.base_offset + removed, batch.last_offset, batch.records - removed, writer)
        if writer in missing and scanned.counts[writer] >= missing[writer]:
            del missing[writer]
            if not missing:
                break
    return scanned


def visible_runs(
    config: ClientConfig, topic: str, partition: int, start: int, end: int, scanned: Scan
) -> Iterator[tuple[Writer, list[Message]]]:
    """The visible records of [*start*, *end*), in runs of one writer. *end* is at most the last stable offset, and the
    end of the scan."""
    with closing(RangeReader(topic, partition, start, end, config)) as reader:
        while messages := reader.read(READ_AT_ONCE):
            offsets = list(map(offset_of, messages))
            for writer, first, after in scanned.runs(offsets):
                yield writer, messages[first:after]


def is_visible(config: ClientConfig, topic: str, partition: int, start: int, end: int) -> bool:
    """Whether readers see a record of [*start*, *end*); *end* is at most the last stable offset."""
    with closing(RangeReader(topic, partition, start, end, config)) as reader:
        return bool(reader.read(1))


def other_partitioner(topics: Topics, topic: Topic, wanted: str) -> str:
    """The partitioner that has put the newest visible records of *topic* where they are, if it is not *wanted*.

    Empty if none shows, as if records have no keys, or the topic cannot be read.
    """
    if topic.partitions == 1:
        return ""
    found: list[tuple[bytes | None, int]] = []
    try:
        span = topics.spans([topic])[topic.name]
        for partition, first in span.first.items():
            end = span.end[partition]
            place = topic.name, partition, max(first, end - NEWEST_OFFSETS), end
            with closing(RangeReader(*place, topics.config, timeout_s=NEWEST_TIMEOUT_S)) as reader:
                found += ((message.key(), partition) for message in reader.read(NEWEST_OFFSETS))
            if len({key for key, _ in found if key}) >= KEYS_ENOUGH:
                break
    except (UserError, RangeGone):  # a note is not worth a failure
        return ""
    return fitting(found, topic.partitions, wanted)


def headers_of(message: Message) -> Headers:
    """The headers of a record."""
    return cast("Headers", tuple(message.headers() or ()))


def visible_record(message: Message, writer: Writer) -> VisibleRecord:
    """A record of a run."""
    _, timestamp_ms = message.timestamp()
    return VisibleRecord(offset_of(message), message.key(), message.value(), headers_of(message), writer, timestamp_ms)
