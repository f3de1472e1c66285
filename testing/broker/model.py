"""An in-memory model of a broker with transactions, deterministic and single-threaded.

It answers as a real one does (the contract tests run the same histories on both), but later: each marker of an ended
transaction takes `marker_delay_ms` on the clock, one partition after the other, and so does its completion. Until then
the broker is busy with the transaction and takes late records into it. Time passes only on the clock: each operation
first does, in the order of their times, the actions that have come due.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.requests import ListedTransaction, ProducerState, TransactionState
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.broker.interface import Error, Fetched, Initialized, Isolation, NoAnswer, Produced, Record
from exactlyonce.testing.broker.transaction_coordinator import State, TransactionCoordinator, TransactionEntry

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


DAY_MS = 24 * 3_600_000


@dataclass(frozen=True)
class BrokerSettings:
    """Settings of a broker with Kafka's defaults, and the delay of its markers."""

    transaction_timeout_max_ms: int = 15 * 60_000
    timeout_check_interval_ms: int = 10_000
    """The interval at which the broker aborts transactions that have timed out."""
    transactional_id_expiration_ms: int = 7 * DAY_MS
    expiration_check_interval_ms: int = 3_600_000
    producer_id_expiration_ms: int = DAY_MS
    """A partition forgets a producer after this silence."""
    marker_delay_ms: int = 5


class _Marker(NamedTuple):
    """A marker due in one partition; without a partition: the transaction's completion."""

    due_ms: int
    order: int
    transactional_id: str
    partition: tuple[str, int] | None
    producer_id: int
    epoch: int
    commit: bool


class _Topic:
    """A topic: its id and the logs of its partitions."""

    __slots__ = ("compact", "logs", "topic_id")

    def __init__(self, topic_id: str, partitions: int, compact: bool) -> None:
        self.topic_id, self.compact = topic_id, compact
        self.logs = [PartitionLog() for _ in range(partitions)]


class BrokerModel:
    """A `TransactionalBroker` in memory.

    >>> from exactlyonce.testing.clock import SimulatedClock
    >>> clock = SimulatedClock()
    >>> broker = BrokerModel(clock)
    >>> broker.create_topic("t").name
    'NONE'
    >>> _, producer_id, epoch = broker.init_transactions("a")
    >>> broker.produce("a", producer_id, epoch, "t", 0, [(None, "x")]).first_offset
    0
    >>> broker.end_txn("a", producer_id, epoch, commit=True).name
    'NONE'
    >>> broker.end_txn("a", producer_id, epoch, commit=True).name
    'CONCURRENT_TRANSACTIONS'
    >>> clock.advance(10)
    >>> [record.value for record in broker.fetch("t", 0).records]
    ['x']
    """

    def __init__(self, clock: Clock, settings: BrokerSettings | None = None) -> None:
        self.settings = settings or BrokerSettings()
        self._clock = clock
        self._topics: dict[str, _Topic] = {}
        self._topics_created = 0
        self._coordinator = TransactionCoordinator(clock, self.settings.transaction_timeout_max_ms, self._await_markers)
        self._markers: list[_Marker] = []
        self._markers_ordered = 0
        self._running = True
        self._start_scheduler(clock.monotonic_ms())

    # Topics

    def create_topic(self, topic: str, partitions: int = 1, *, compact: bool = False) -> Error:
        self._catch_up()
        if topic in self._topics:
            return Error.TOPIC_ALREADY_EXISTS
        self._topics_created += 1
        self._topics[topic] = _Topic(f"topic-{self._topics_created}", partitions, compact)
        return Error.NONE

    def delete_topic(self, topic: str) -> Error:
        self._catch_up()
        return Error.NONE if self._topics.pop(topic, None) else Error.UNKNOWN_TOPIC_OR_PARTITION

    def add_partitions(self, topic: str, total: int) -> Error:
        self._catch_up()
        if topic not in self._topics:
            return Error.UNKNOWN_TOPIC_OR_PARTITION
        logs = self._topics[topic].logs
        if total <= len(logs):
            return Error.INVALID_PARTITIONS
        logs.extend(PartitionLog() for _ in range(total - len(logs)))
        return Error.NONE

    def topic_id(self, topic: str) -> str | None:
        self._catch_up()
        return self._topics[topic].topic_id if topic in self._topics else None

    # Transactions

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        now_ms = self._catch_up()
        if transactional_id is None:
            return Initialized(Error.NONE, self._coordinator.new_producer_id(), 0)
        return self._coordinator.initialize(transactional_id, timeout_ms, now_ms)

    def add_to_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, topic: str, partition: int
    ) -> Error:
        now_ms = self._catch_up()
        if self._log(topic, partition) is None:
            return Error.UNKNOWN_TOPIC_OR_PARTITION
        return self._coordinator.add_partition(transactional_id, producer_id, epoch, (topic, partition), now_ms)

    def produce(
        self,
        transactional_id: str | None,
        producer_id: int,
        epoch: int,
        topic: str,
        partition: int,
        records: Sequence[tuple[Any, Any]],
        *,
        sequence: int | None = None,
        added: bool = False,
    ) -> Produced:
        now_ms = self._catch_up()
        log = self._log(topic, partition)
        if log is None:
            return Produced(Error.UNKNOWN_TOPIC_OR_PARTITION)
        wall_ms = self._clock.now_ms()
        first_sequence = log.next_sequence(producer_id, epoch) if sequence is None else sequence
        if transactional_id is not None:
            producer = (transactional_id, producer_id, epoch, (topic, partition))
            if not added and (error := self._coordinator.add_partition(*producer, now_ms)):
                return Produced(error)
            if not log.has_open(producer_id):
                log.await_first(producer_id, epoch, first_sequence, wall_ms)
                if error := self._coordinator.verify(*producer):
                    return Produced(error)
        if self._topics[topic].compact and any(key is None for key, _ in records):
            return Produced(Error.INVALID_RECORD)
        transactional = transactional_id is not None
        return log.append(producer_id, epoch, first_sequence, records, transactional=transactional, now_ms=wall_ms)

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        return self._coordinator.end(transactional_id, producer_id, epoch, commit, self._catch_up())

    def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionState | None]:
        self._catch_up()
        known = self._coordinator.transactions
        return {name: known[name].described() if name in known else None for name in transactional_ids}

    def list_transactions(self, prefix: str = "") -> list[ListedTransaction]:
        self._catch_up()
        return self._coordinator.listed(prefix)

    # Partitions

    def describe_producers(self, partitions: Iterable[tuple[str, int]]) -> list[ProducerState]:
        self._catch_up()
        states = []
        for topic, partition in sorted(partitions):
            log = self._log(topic, partition)
            if log is None:
                raise TopicError(f"The in-memory broker has no partition {partition} of topic {topic}. Create it.")
            states += [
                ProducerState(
                    topic,
                    partition,
                    producer_id,
                    producer.epoch,
                    producer.last_sequence,
                    producer.last_timestamp_ms,
                    log.transaction_start_offset(producer_id),
                )
                for producer_id, producer in sorted(log.producers.items())
            ]
        return states

    def fetch(
        self, topic: str, partition: int, offset: int = 0, isolation: Isolation = Isolation.READ_COMMITTED
    ) -> Fetched:
        self._catch_up()
        log = self._log(topic, partition)
        return log.fetch(offset, isolation) if log else Fetched(Error.UNKNOWN_TOPIC_OR_PARTITION)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> Error:
        self._catch_up()
        log = self._log(topic, partition)
        return log.delete_before(before_offset) if log else Error.UNKNOWN_TOPIC_OR_PARTITION

    def compact(self, topic: str, *, drop_tombstones: bool = False, known: float = 1.0, cleaned: float = 1.0) -> None:
        """Compact a topic now; a real broker does so at any time. Tombstones go in a later round.

        *known*: the share of each partition's stable records whose keys the cleaner has noted; *cleaned*: the share of
        these that it has cleaned so far.
        """
        self._catch_up()
        for log in self._topics[topic].logs:
            log.compact(drop_tombstones=drop_tombstones, known=known, cleaned=cleaned)

    # The broker's own life

    def stop(self) -> None:
        """Stop the broker: it answers nothing and loses nothing."""
        self._catch_up()
        self._running = False

    def start(self, *, lose_markers: bool = False) -> None:
        """Start it again: it writes all markers of incomplete transactions, some a second time.

        *lose_markers* completes these transactions without markers, so they hang: EndTxn answered NONE, the state is
        CompleteCommit, yet no read_committed reader passes their records. Kafka 4.3 does that to a partition without a
        leader at the wrong moment (KAFKA-20734).
        """
        self._running = True
        now_ms = self._clock.monotonic_ms()
        self._markers.clear()
        self._start_scheduler(now_ms)
        self._coordinator.reload(now_ms)
        if lose_markers:
            self._markers = [marker for marker in self._markers if marker.partition is None]
            heapq.heapify(self._markers)

    def _log(self, topic: str, partition: int) -> PartitionLog | None:
        logs = self._topics[topic].logs if topic in self._topics else ()
        return logs[partition] if 0 <= partition < len(logs) else None

    def _start_scheduler(self, now_ms: int) -> None:
        self._started_ms = self._expired_at_ms = now_ms
        self._check_due_ms = now_ms + self.settings.timeout_check_interval_ms
        self._schedule()

    def _schedule(self) -> None:
        """Note the time of the next action."""
        self._due_ms = min(self._check_due_ms, self._markers[0].due_ms) if self._markers else self._check_due_ms

    def _catch_up(self) -> int:
        """Do the actions that are due and return the time. Every operation begins here."""
        now_ms = self._clock.monotonic_ms()
        if not self._running:
            raise NoAnswer("the broker is down")
        while self._due_ms <= now_ms:
            if self._markers and self._markers[0].due_ms <= min(now_ms, self._check_due_ms):
                self._write(heapq.heappop(self._markers))
            else:
                self._check(now_ms)
            self._schedule()
        return now_ms

    def _check(self, now_ms: int) -> None:
        """Abort transactions that timed out; if none can time out before *now_ms*, expire ids and producers by then."""
        tick_ms = self._check_due_ms
        for transaction in self._coordinator.timed_out(tick_ms):
            self._coordinator.prepare(transaction, State.PREPARE_ABORT, tick_ms)
        if not self._markers and not self._coordinator.open:
            tick_ms = self._last_tick(now_ms, self.settings.timeout_check_interval_ms)
        expiry_ms = self._last_tick(tick_ms, self.settings.expiration_check_interval_ms)
        if expiry_ms > self._expired_at_ms:
            self._expired_at_ms = expiry_ms
            self._coordinator.expire(expiry_ms - self.settings.transactional_id_expiration_ms)
            self._forget_producers()
        self._check_due_ms = tick_ms + self.settings.timeout_check_interval_ms

    def _forget_producers(self) -> None:
        silent_since_ms = self._clock.now_ms() - self.settings.producer_id_expiration_ms
        for topic in self._topics.values():
            for log in topic.logs:
                log.forget_producers(silent_since_ms)

    def _last_tick(self, now_ms: int, interval_ms: int) -> int:
        return now_ms - (now_ms - self._started_ms) % interval_ms

    def _await_markers(self, transaction: TransactionEntry, now_ms: int) -> None:
        """Queue the markers of an ended transaction, one partition after the other."""
        commit = transaction.state is State.PREPARE_COMMIT
        due_ms = now_ms
        for partition in (*transaction.partitions, None):
            due_ms += self.settings.marker_delay_ms
            self._markers_ordered += 1
            marker = _Marker(
                due_ms,
                self._markers_ordered,
                transaction.transactional_id,
                partition,
                transaction.producer_id,
                transaction.epoch,
                commit,
            )
            heapq.heappush(self._markers, marker)
        self._schedule()

    def _write(self, marker: _Marker) -> None:
        """Write one marker, or complete the transaction; a marker of a deleted partition is skipped."""
        transaction = self._coordinator.transactions[marker.transactional_id]
        if marker.partition is None:
            self._coordinator.complete(transaction, marker.due_ms)
            return
        log = self._log(*marker.partition)
        transaction.partitions.pop(marker.partition, None)
        if log is not None:
            log.end_transaction(marker.producer_id, marker.epoch, commit=marker.commit, now_ms=self._clock.now_ms())
