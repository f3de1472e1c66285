"""The records of a partition that read_committed readers see, each with its writer.

Invariants: a record is what a plain consumer gets; whose it is stands in the header of the batch that holds its offset.
What the log has and readers do not see is counted too, so that "aborted" and "removed" can be told apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.range_reader import RangeReader

READ_AT_ONCE = 2_000
Writer = tuple[int, int]
"""Producer id and epoch: of one transaction."""


class VisibleRecord(NamedTuple):
    """A record that readers see."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    writer: Writer
    timestamp_ms: int


@dataclass
class Scan:
    """The writers of a partition's offsets, as far as it was looked at: one transaction for each range."""

    end: int
    """It was looked at up to here."""
    counts: dict[Writer, int] = field(default_factory=lambda: defaultdict(int))
    """How many records of each transaction are in the log, visible or not."""
    extents: dict[Writer, range] = field(default_factory=dict)
    """From the first to behind the last record of each."""
    timed_by_broker: bool = False
    """Whether a batch has the time of its append, and not those that its producer gave."""
    _bases: list[int] = field(default_factory=list)
    _writers: list[Writer] = field(default_factory=list)

    def add(self, base_offset: int, last_offset: int, records: int, writer: Writer) -> None:
        """A batch more."""
        self._bases.append(base_offset)
        self._writers.append(writer)
        self.counts[writer] += records
        known = self.extents.get(writer, range(base_offset, base_offset))
        self.extents[writer] = range(known.start, last_offset + 1)
        self.end = last_offset + 1

    def writer(self, offset: int) -> Writer:
        """The writer of the record at *offset*."""
        return self._writers[bisect_right(self._bases, offset) - 1]


def scan(log: Log, topic: str, partition: int, start: int, wanted: Mapping[Writer, int] | None) -> Scan:
    """Look at the batches from *start* on, to the end of the log or until all records of *wanted* were met."""
    found = Scan(start)
    missing = dict(wanted or {})
    for batch in log.batches(topic, partition, start):
        if batch.is_control:
            continue
        writer = (batch.producer_id, batch.epoch)
        removed = max(0, start - batch.base_offset)  # a batch stays whole while its first records are deleted already
        found.timed_by_broker |= batch.is_timed_by_broker
        found.add(batch.base_offset + removed, batch.last_offset, batch.records - removed, writer)
        if found.counts[writer] >= missing.get(writer, 1 << 62):
            del missing[writer]
            if not missing:
                break
    return found


def visible(
    config: ClientConfig, topic: str, partition: int, start: int, end: int, scanned: Scan
) -> Iterator[VisibleRecord]:
    """The records of [*start*, *end*) that readers see; *end* is not beyond the last stable offset, nor the scan."""
    reader = RangeReader(topic, partition, start, end, config)
    try:
        while messages := reader.read(READ_AT_ONCE):
            for message in messages:
                offset = cast(int, message.offset())
                headers = cast("tuple[tuple[str, bytes | None], ...]", tuple(message.headers() or ()))
                yield VisibleRecord(
                    offset, message.key(), message.value(), headers, scanned.writer(offset), message.timestamp()[1]
                )
    finally:
        reader.close()
