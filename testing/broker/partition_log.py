"""One partition of the in-memory broker: records, control markers and open transactions.

Invariants: offsets only grow, and a marker takes one as a record does; the last stable offset never passes the first
record of an open transaction; a record never changes, and the offset of a removed one is never used again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from exactlyonce.testing.broker.interface import Error, Fetched, Isolation, Produced, Record

BATCHES_REMEMBERED = 5
"""The number of batches per producer by which a repeated one is recognised."""


class _Batch(NamedTuple):
    first_sequence: int
    last_sequence: int
    first_offset: int


class ProducerEntry(NamedTuple):
    """The partition's state of one producer id."""

    epoch: int
    batches: tuple[_Batch, ...]
    """The newest batches of this epoch; none after a marker."""
    last_timestamp_ms: int

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else -1


class _Awaited(NamedTuple):
    """The lowest sequence number that a producer has sent, and that was refused, since its last transaction here."""

    epoch: int
    sequence: int
    since_ms: int


class PartitionLog:
    """An append-only log that can lose its beginning and be compacted."""

    __slots__ = ("_aborted", "_awaited", "_offsets", "_open", "_records", "end_offset", "producers", "start_offset")

    def __init__(self) -> None:
        self.start_offset = 0
        self.end_offset = 0
        self.producers: dict[int, ProducerEntry] = {}
        self._records: list[Record] = []
        self._offsets: list[int] = []
        self._open: dict[int, list[int]] = {}
        """Offsets of the records of open transactions by producer id, the oldest transaction first."""
        self._aborted: set[int] = set()
        self._awaited: dict[int, _Awaited] = {}

    @property
    def last_stable_offset(self) -> int:
        """Every transaction below it has ended."""
        for offsets in self._open.values():
            return max(offsets[0], self.start_offset)
        return self.end_offset

    def transaction_start_offset(self, producer_id: int) -> int | None:
        """The first offset of the producer's open transaction; None: none is open here."""
        offsets = self._open.get(producer_id)
        return offsets[0] if offsets else None

    def has_open(self, producer_id: int) -> bool:
        """Whether a transaction of this producer id, of any epoch, is open here."""
        return producer_id in self._open

    def next_sequence(self, producer_id: int, epoch: int) -> int:
        """The sequence number that this producer sends next."""
        producer = self.producers.get(producer_id)
        return producer.last_sequence + 1 if producer is not None and producer.epoch == epoch else 0

    def await_first(self, producer_id: int, epoch: int, sequence: int, now_ms: int) -> None:
        """Note that a batch came to begin a transaction: no later one is taken before it."""
        awaited = self._awaited.get(producer_id)
        if awaited is None or epoch > awaited.epoch or (epoch == awaited.epoch and sequence < awaited.sequence):
            since_ms = now_ms if awaited is None else awaited.since_ms
            self._awaited[producer_id] = _Awaited(epoch, sequence, since_ms)

    def append(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        records: Sequence[tuple[Any, Any]],
        *,
        transactional: bool,
        now_ms: int,
    ) -> Produced:
        """Append one batch, or refuse it; a repeated one is answered with its offset."""
        producer = self.producers.get(producer_id)
        batches = producer.batches if producer is not None and producer.epoch == epoch else ()
        last_sequence = sequence + len(records) - 1
        for batch in batches:
            if batch.first_sequence == sequence and batch.last_sequence == last_sequence:
                return Produced(Error.NONE, batch.first_offset)
        if producer is not None and epoch < producer.epoch:
            return Produced(Error.INVALID_PRODUCER_EPOCH)
        awaited = self._awaited.get(producer_id)
        out_of_order = producer is not None and sequence != self.next_sequence(producer_id, epoch)
        if out_of_order or (awaited is not None and sequence > awaited.sequence):
            return Produced(Error.OUT_OF_ORDER_SEQUENCE_NUMBER)
        if not transactional and producer_id in self._open:
            return Produced(Error.INVALID_TXN_STATE)
        first_offset = self.end_offset
        self._write(producer_id, epoch, records, transactional)
        newest = _Batch(sequence, last_sequence, first_offset)
        self.producers[producer_id] = ProducerEntry(epoch, (*batches[1 - BATCHES_REMEMBERED :], newest), now_ms)
        return Produced(Error.NONE, first_offset)

    def _write(self, producer_id: int, epoch: int, records: Sequence[tuple[Any, Any]], transactional: bool) -> None:
        first_offset = self.end_offset
        self.end_offset += len(records)
        offsets = range(first_offset, self.end_offset)
        self._records.extend(
            Record(offset, key, value, producer_id, epoch)
            for offset, (key, value) in zip(offsets, records, strict=True)
        )
        self._offsets.extend(offsets)
        if transactional:
            self._open.setdefault(producer_id, []).extend(offsets)
            self._awaited.pop(producer_id, None)

    def end_transaction(self, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> None:
        """Write the marker that ends the producer's transaction; without an open one it only takes an offset."""
        offsets = self._open.pop(producer_id, ())
        self._awaited.pop(producer_id, None)
        if not commit:
            self._aborted.update(offsets)
        self.producers[producer_id] = ProducerEntry(epoch, (), now_ms)
        self.end_offset += 1

    def fetch(self, offset: int, isolation: Isolation) -> Fetched:
        """The records from *offset* on that are visible at *isolation*."""
        if not self.start_offset <= offset <= self.end_offset:
            return Fetched(Error.OFFSET_OUT_OF_RANGE)
        stable_offset = self.last_stable_offset
        first = bisect_left(self._offsets, offset)
        if isolation is Isolation.READ_COMMITTED:
            last = bisect_left(self._offsets, stable_offset)
            aborted = self._aborted
            records = tuple(record for record in self._records[first:last] if record.offset not in aborted)
        else:
            records = tuple(self._records[first:])
        return Fetched(Error.NONE, records, self.start_offset, stable_offset, self.end_offset)

    def forget_producers(self, silent_since_ms: int) -> None:
        """Forget producers that have been silent since then and have no open transaction."""
        for producer_id, producer in list(self.producers.items()):
            if producer.last_timestamp_ms <= silent_since_ms and producer_id not in self._open:
                del self.producers[producer_id]
        for producer_id, awaited in list(self._awaited.items()):
            if awaited.since_ms <= silent_since_ms:
                del self._awaited[producer_id]

    def delete_before(self, offset: int) -> Error:
        """Remove the records below *offset*; -1: all."""
        before_offset = self.end_offset if offset == -1 else offset
        if not 0 <= before_offset <= self.end_offset:
            return Error.OFFSET_OUT_OF_RANGE
        if before_offset > self.start_offset:
            self.start_offset = before_offset
            self._keep([record for record in self._records if record.offset >= before_offset])
        return Error.NONE

    def compact(self, *, drop_tombstones: bool, known: float, cleaned: float) -> None:
        """Keep only the newest committed record of each key among the *known* share of the stable records.

        The cleaner goes from the oldest record on, and has come as far as *cleaned* of them.
        """
        noted = self._records[: int(known * bisect_left(self._offsets, self.last_stable_offset))]
        newest = {record.key: record.offset for record in noted if record.offset not in self._aborted}
        behind = int(cleaned * len(noted))
        kept = [
            record
            for record in noted[:behind]
            if newest.get(record.key) == record.offset and not (drop_tombstones and record.value is None)
        ]
        self._keep([*kept, *self._records[behind:]])

    def _keep(self, records: list[Record]) -> None:
        self._records = records
        self._offsets = [record.offset for record in records]
        self._aborted.intersection_update(self._offsets)
