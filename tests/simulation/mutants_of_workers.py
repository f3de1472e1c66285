"""Planted defects of the worker's side: each patches shipped code, and says how the oracle names what comes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from typing import Any
from unittest.mock import patch

import msgspec
from planting import COUNT, DISORDER, LEFT, OPEN, RETAKEN, STATE, STUCK, TOMBSTONED, TWICE, Table, unchecked, unfitting

from exactlyonce.checkpoint import decision_log
from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.store import storage
from exactlyonce.connectors.kafka.reader import KafkaReader
from exactlyonce.engines import wiring
from exactlyonce.engines.blocks import BlockNames
from exactlyonce.engines.bounded.unit import ordering
from exactlyonce.engines.local import building
from exactlyonce.engines.local.channels import BarrierFrame, LocalChannel, SocketChannel
from exactlyonce.engines.local.inputs import ChannelInput, SourceInput
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.order_log import OrderRuns
from exactlyonce.sinks.kafka.transaction_pool import SlotState, TransactionPool
from exactlyonce.sinks.kafka.writer import KafkaWriter
from exactlyonce.sinks.writer import FlushedInterval
from exactlyonce.state.interval import Interval
from exactlyonce.state.snapshot import Snapshot
from exactlyonce.state.table import KeyedTable

WORKERS = Table()
"""By name."""
mutant = WORKERS.mutant


# --- barriers -------------------------------------------------------------------------------------------------------


@mutant("no alignment", STATE + "|" + COUNT, first=4)
def _no_alignment() -> Iterable[Any]:
    yield patch.object(Alignment, "is_held", lambda self, source: False)
    yield patch.object(Alignment, "take", lambda self, source: None)


@mutant("of several inputs the first alone is aligned", STATE + "|" + COUNT, "shuffles")
def _first_input() -> Iterable[Any]:
    def barrier(self: Alignment, source: Any, checkpoint: int, *, aligned: bool = False) -> bool:
        self._delivered[source] = checkpoint
        if checkpoint <= self.checkpoint_latest:
            return False
        self.checkpoint_latest = checkpoint
        return True

    yield patch.object(Alignment, "barrier", barrier)
    yield patch.object(Alignment, "owing", lambda self, checkpoint: frozenset())


@mutant("the snapshot is taken after the next batch", STATE + "|" + COUNT)
def _late_snapshot() -> Iterable[Any]:
    real = Subtask._snapshot

    def snapshot(self: Subtask, frame: BarrierFrame, captures: Any) -> Iterator[bool]:
        for source in self.sources:
            if not source.triggers:
                batch = source.reader.poll(5, 0.0)
                if batch:
                    source.push(source._decoder.decode(batch))
        return real(self, frame, captures)

    yield patch.object(Subtask, "_snapshot", snapshot)


@mutant("a barrier overtakes the frame before it", STATE + "|" + COUNT, first=5)
def _overtaking() -> Iterable[Any]:
    def send_barrier(self: LocalChannel, barrier: BarrierFrame) -> None:
        frames = self._arrivals.frames
        frames.insert(max(0, len(frames) - 1), barrier)

    real = SocketChannel.send_barrier

    def over_socket(self: SocketChannel, barrier: BarrierFrame) -> None:
        last = self._outbox.pop() if len(self._outbox) > 1 else None
        real(self, barrier)
        if last is not None:
            self._outbox.append(last)

    yield patch.object(LocalChannel, "send_barrier", send_barrier)
    yield patch.object(SocketChannel, "send_barrier", over_socket)


@mutant("a channel drops the frame before a barrier", STATE + "|" + COUNT, first=4)
def _dropped_frame() -> Iterable[Any]:
    real = SocketChannel.send_barrier

    def over_socket(self: SocketChannel, barrier: BarrierFrame) -> None:
        if len(self._outbox) > 1:
            self._outbox_bytes -= len(self._outbox.pop())
        real(self, barrier)

    yield patch.object(SocketChannel, "send_barrier", over_socket)


@mutant("the rest of a frame is forgotten", STATE + "|" + COUNT, first=13)
def _forgotten_rest() -> Iterable[Any]:
    real = ChannelInput.next

    def following(self: ChannelInput, room: int, **options: Any) -> Any:
        self.slices.rest = None
        return real(self, room, **options)

    yield patch.object(ChannelInput, "next", following)


@mutant("a source reads on after its final barrier", OPEN, luck="stops")
def _reads_on() -> Iterable[Any]:
    real = SourceInput.next

    def following(self: SourceInput, room: int, **options: Any) -> Any:
        item = real(self, room, **options)
        self.stopped = False
        return item

    yield patch.object(SourceInput, "next", following)


# --- sources --------------------------------------------------------------------------------------------------------


@mutant("Sn is noted before the last batch", STATE + "|" + COUNT)
def _early_offsets() -> Iterable[Any]:
    real = SourceInput.next

    def following(self: SourceInput, room: int, **options: Any) -> Any:
        reader: Any = self.reader
        before = dict(reader.offsets)
        if not self.triggers:
            self._before = before  # type: ignore[attr-defined]  # that is the defect
            return real(self, room, **options)
        now, reader.offsets = reader.offsets, dict(getattr(self, "_before", before))
        try:
            return real(self, room, **options)
        finally:
            reader.offsets = now

    yield patch.object(SourceInput, "next", following)


@mutant("an added partition is read from behind its first record", STATE + "|" + COUNT, first=41)
def _late_partition() -> Iterable[Any]:
    real = KafkaReader.add

    def add(self: KafkaReader, partition: int, offset: int) -> None:
        real(self, partition, offset + 1)

    yield patch.object(KafkaReader, "add", add)


@mutant("a restored partition is read from its beginning", STATE + "|" + COUNT + "|goes back")
def _from_the_beginning() -> Iterable[Any]:
    real = KafkaReader.open

    def opened(self: KafkaReader) -> None:
        self.offsets.update(dict.fromkeys(self.offsets, 0))
        real(self)

    yield patch.object(KafkaReader, "open", opened)


@mutant("offsets count what was fetched", STATE + "|" + COUNT)
def _fetched_offsets() -> Iterable[Any]:
    real = KafkaReader.poll

    def poll(self: KafkaReader, records_max: int, timeout_s: float) -> Any:
        return real(self, records_max + 1, timeout_s)[:records_max]

    yield patch.object(KafkaReader, "poll", poll)


@mutant("every worker reads every partition", STATE + "|" + COUNT)
def _shared_partitions() -> Iterable[Any]:
    yield patch.object(building, "share_of", lambda offsets, parallelism, subtask: dict(offsets))


# --- state ----------------------------------------------------------------------------------------------------------


@mutant("increments are relative to the checkpoint before, completed or not", STATE, luck="carried")
def _wrong_base() -> Iterable[Any]:
    real = KeyedTable.freeze

    def freeze(self: Any, checkpoint: int, base: int, *, whole: bool) -> Snapshot:
        self._intervals = []
        return real(self, checkpoint, base, whole=whole)

    yield patch.object(KeyedTable, "freeze", freeze)


@mutant("a deleted key is not written", STATE, first=4)
def _undeleted() -> Iterable[Any]:
    real = Interval._delete

    def delete(self: Any, keys: Any, deleted: Any) -> None:
        real(self, keys, defaultdict(list))

    yield patch.object(Interval, "_delete", delete)


@mutant("a state that is changed in place is not cloned for the snapshot", STATE)
def _uncloned() -> Iterable[Any]:
    def keep(self: Any, keys: Any) -> None:
        self._interval.before.update(zip(keys, map(self._states.get, keys), strict=True))

    yield patch.object(KeyedTable, "_keep", keep)


@mutant("two parts of a state have one key", r"is not where it is referred to|" + LEFT + "|" + TOMBSTONED, first=2)
def _one_key() -> Iterable[Any]:
    yield patch.object(BlockNames, "_next", lambda self: 1)
    yield unchecked(storage, "A block is written once")
    yield unchecked(decision_log, "A block that a manifest names")


# --- sinks ----------------------------------------------------------------------------------------------------------


class _Flushed:
    """A flush after which nothing is outstanding."""

    def done(self) -> bool:
        return True

    def result(self) -> int:
        return 0


@mutant("an id is used again before its checkpoint is finalized", RETAKEN, first=2)
def _early_ids() -> Iterable[Any]:
    real = TransactionPool.precommitted

    def precommitted(self: TransactionPool, transactional_id: str, checkpoint: int) -> None:
        real(self, transactional_id, checkpoint)
        self.finalized(checkpoint)

    yield patch.object(TransactionPool, "precommitted", precommitted)


@mutant("the next transaction is produced before the flush", DISORDER)
def _unordered_transactions() -> Iterable[Any]:
    def activate(self: KafkaWriter) -> bool:
        if self._current is None and self._ready:
            self._current = self._ready.popleft()
            self.pool.move(self._current.transactional_id, SlotState.WRITING)
            self._current.opened_ms = self.clock.monotonic_ms()
        return self._current is not None

    yield patch.object(KafkaWriter, "_activate", activate)


@mutant("a flush that does not wait, and counts what was sent", COUNT, first=6)
def _early_flush() -> Iterable[Any]:
    real = KafkaWriter._drain

    def drain(self: KafkaWriter, wait_s: float) -> bool:
        transaction, flushing = self._draining, self._flushing
        if transaction is not None and flushing is not None and flushing.result():
            transaction.records -= flushing.result()
            self._flushing = _Flushed()
        return real(self, wait_s)

    yield patch.object(KafkaWriter, "_drain", drain)


@mutant("a barrier does not wait for the backlog", COUNT, first=6)
def _early_barrier() -> Iterable[Any]:
    def barrier(self: KafkaWriter, checkpoint: int) -> None:
        self._cut(checkpoint)

    yield patch.object(KafkaWriter, "barrier", barrier)


@mutant("a full queue lets a batch begin anew", COUNT, first=7)
def _begin_anew() -> Iterable[Any]:
    def produce(self: KafkaWriter, outputs: Any) -> bool:
        assert self._current is not None
        keys = repeat(None) if outputs.keys is None else outputs.keys
        for value, key in zip(outputs.values, keys):  # noqa: B905 - keys may be endless
            try:
                self._current.producer.produce(self.topic, value, key)
            except BufferError:
                return False
            self._current.records += 1
        outputs.done = len(outputs.values)
        return True

    yield patch.object(KafkaWriter, "_produce", produce)


@mutant("an acknowledgement does not wait for the flush", COUNT)
def _unflushed() -> Iterable[Any]:
    real = KafkaWriter.take_flushed

    def take(self: KafkaWriter, checkpoint: int) -> FlushedInterval:
        return real(self, checkpoint) or FlushedInterval()

    yield patch.object(KafkaWriter, "take_flushed", take)


@mutant("a delivery that failed is ignored", COUNT, luck="deliveries", first=1)
def _ignored_failure() -> Iterable[Any]:
    real = KafkaWriter._drain

    def drain(self: KafkaWriter, wait_s: float) -> bool:
        if self._draining is not None and self._flushing is not None and self._flushing.done():
            self._draining.records -= self._flushing.result()
            self._flushing = _Flushed()
        return real(self, wait_s)

    yield patch.object(KafkaWriter, "_failed", lambda self, reason: None)
    yield patch.object(KafkaWriter, "_drain", drain)


@mutant("a producer writes before its id is granted", STUCK, first=1)
def _ungranted() -> Iterable[Any]:
    real = KafkaWriter._prepare

    def prepare(self: KafkaWriter) -> None:
        real(self)
        for name, transaction in list(self._waiting.items()):
            del self._waiting[name]
            self.pool.move(name, SlotState.READY)
            self._ready.append(transaction)

    def granted(self: KafkaWriter, transactional_id: str, producer_id: int, epoch: int) -> None:
        for each in (*self._ready, *filter(None, (self._current, self._draining))):
            if each.transactional_id == transactional_id:
                each.producer_id, each.epoch = producer_id, epoch

    yield patch.object(KafkaWriter, "_prepare", prepare)
    yield patch.object(KafkaWriter, "granted", granted)


# --- order logs -----------------------------------------------------------------------------------------------------


@mutant("the order log lacks a batch", DISORDER + "|" + TWICE, "sinks", luck="replays", first=14)
def _lost_batch() -> Iterable[Any]:
    real = OrderRuns.note
    calls = count(1)

    def note(self: OrderRuns, name: str, partition: int, records: int) -> None:
        if next(calls) % 2:
            real(self, name, partition, records)

    yield patch.object(OrderRuns, "note", note)
    yield unfitting()


@mutant(
    "the order log tells how much was taken, not in which order",
    DISORDER + "|" + TWICE,
    "sinks",
    luck="replays",
    first=14,
)
def _sorted_log() -> Iterable[Any]:
    real = OrderRuns.cut

    def cut(self: OrderRuns, *, exact: bool = True) -> tuple[bytes, ...]:
        pairs = sorted(zip(self.runs[::2], self.runs[1::2], strict=True))
        self.runs = [each for pair in pairs for each in pair]
        return real(self, exact=exact)

    yield patch.object(OrderRuns, "cut", cut)
    yield unfitting()


# --- replay repair --------------------------------------------------------------------------------------------------


@mutant("a replay does not restore the checkpoint before", DISORDER + "|" + TWICE, "chain", luck="replays", first=2)
def _replay_from_nothing() -> Iterable[Any]:
    real = wiring.table_of

    def table_of(*arguments: Any, backend: Any) -> Any:
        node, graph, parallelism, subtask, manifest, reader = arguments
        without = msgspec.structs.replace(manifest, operators=())
        return real(node, graph, parallelism, subtask, without, reader, backend=backend)

    yield patch.object(wiring, "table_of", table_of)


@mutant(
    "a replay takes its inputs by time, not along the order logs",
    DISORDER + "|" + TWICE,
    "sinks",
    luck="replays",
    first=14,
)
def _replay_by_time() -> Iterable[Any]:
    def take_along(lanes: Any, logs: Any, order: Any, left: Any = None) -> None:
        ordering.take_by_time(lanes, order, ordering.BatchTime())

    yield patch.object(ordering, "take_along", take_along)
