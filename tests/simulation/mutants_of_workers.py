"""Planted defects of workers: barriers, sources, state, sinks, order logs, replays, and state in local files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import msgspec
from planting import COUNT, DISORDER, OPEN, REPEATED, RETAKEN, STUCK, WRONG, in_place_of, mutant, replaced, unfitting
from repair import ReplayEnds

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.kafka.reader import KafkaReader
from exactlyonce.engines.bounded.unit import ordering
from exactlyonce.engines.local import building
from exactlyonce.engines.local.channels import LocalChannel, SocketChannel
from exactlyonce.engines.local.inputs import ChannelInput, SourceInput
from exactlyonce.engines.local.task import Subtask
from exactlyonce.engines.runtime.assembler import Assembler
from exactlyonce.engines.runtime.order_log import OrderRuns
from exactlyonce.engines.runtime.watermarks import Barrier
from exactlyonce.sinks.kafka.writer import KafkaWriter, SlotState, TransactionPool
from exactlyonce.sinks.writer import FlushedInterval
from exactlyonce.state.chain import Chain
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.rocksdb import files
from exactlyonce.state.rocksdb.files import Marker
from exactlyonce.state.rocksdb.table import TieredTable

# --- barriers -------------------------------------------------------------------------------------------------------


mutant(
    "no alignment", WRONG, patch.object(Alignment, "is_held", lambda self, source: False),
    patch.object(Alignment, "take", lambda self, source: None), first=5,
)  # fmt: skip


@mutant("the snapshot is taken after the next batch", WRONG)
@in_place_of(Subtask, "_snapshot")
def _late_snapshot(real: Any, self: Subtask, frame: Barrier, captures: Any) -> None:
    for source in self.sources:
        if not source.triggers:
            batch = source.reader.poll(5, 0.0)
            if batch:
                source.push(source.decoder.decode(batch))
    real(self, frame, captures)


@mutant("a barrier overtakes the frame before it", WRONG, first=5)
def _overtaking() -> Iterable[Any]:
    def in_memory(real: Any, self: LocalChannel, barrier: Barrier) -> None:
        frames = self._arrivals.frames
        frames.insert(max(0, len(frames) - 1), barrier)

    def over_socket(real: Any, self: SocketChannel, barrier: Barrier) -> None:
        last = self._outbox.pop() if len(self._outbox) > 1 else None
        real(self, barrier)
        if last is not None:
            self._outbox.append(last)

    yield replaced(LocalChannel, "send_signal", in_memory)
    yield replaced(SocketChannel, "send_signal", over_socket)


@mutant("the rest of a frame is forgotten", WRONG, first=13)
@in_place_of(ChannelInput, "next")
def _forgotten_rest(real: Any, self: ChannelInput, room: int, **options: Any) -> Any:
    self.slices.rest = None
    return real(self, room, **options)


@mutant("a source reads on after its final barrier", OPEN, luck="stops")
@in_place_of(SourceInput, "next")
def _reads_on(real: Any, self: SourceInput, room: int, **options: Any) -> Any:
    item = real(self, room, **options)
    self.stopped = False
    return item


# --- sources --------------------------------------------------------------------------------------------------------


@mutant("Sn is noted before the last batch", WRONG, first=2)
@in_place_of(SourceInput, "next")
def _early_offsets(real: Any, self: SourceInput, room: int, **options: Any) -> Any:
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


@mutant("an added partition is read from behind its first record", WRONG, first=41)
@in_place_of(KafkaReader, "add")
def _late_partition(real: Any, self: KafkaReader, start: SourceOffset) -> None:
    real(self, msgspec.structs.replace(start, offset=start.offset + 1))


mutant(
    "every worker reads every partition", WRONG,
    patch.object(building, "share_of", lambda offsets, parallelism, subtask: dict(offsets)), first=1,
)  # fmt: skip


# --- state ----------------------------------------------------------------------------------------------------------


# --- sinks ----------------------------------------------------------------------------------------------------------


class _Flushed:
    def done(self) -> bool:
        return True

    def result(self) -> int:
        return 0


@mutant("an id is used again before its checkpoint is finalized", RETAKEN, first=5)
@in_place_of(TransactionPool, "precommitted")
def _early_ids(real: Any, self: TransactionPool, transactional_id: str, checkpoint: int) -> None:
    real(self, transactional_id, checkpoint)
    self.finalized(checkpoint)


@mutant("the next transaction is produced before the flush", DISORDER, first=21)
@in_place_of(KafkaWriter, "_activate")
def _unordered_transactions(real: Any, self: KafkaWriter) -> Any:
    if self._current is None and self._ready:
        self._current = self._ready.popleft()
        self.pool.move(self._current.transactional_id, SlotState.WRITING)
        self._current.opened_ms = self.clock.monotonic_ms()
    return self._current is not None


@mutant("an acknowledgement does not wait for the flush", COUNT, first=5)
@in_place_of(KafkaWriter, "take_flushed")
def _unflushed(real: Any, self: KafkaWriter, checkpoint: int) -> Any:
    return real(self, checkpoint) or FlushedInterval()


@mutant("a delivery that failed is ignored", COUNT, luck="deliveries", first=2)
@in_place_of(KafkaWriter, "_drain", patch.object(KafkaWriter, "_failed", lambda self, reason: None))
def _ignored_failure(real: Any, self: KafkaWriter, wait_s: float) -> Any:
    if self._draining is not None and self._flushing is not None and self._flushing.done():
        self._draining.records -= self._flushing.result()
        self._flushing = _Flushed()
    return real(self, wait_s)


@mutant("a producer writes before its id is granted", STUCK, first=112)
def _ungranted() -> Iterable[Any]:
    def prepare(real: Any, self: KafkaWriter) -> None:
        real(self)
        for name, transaction in list(self._waiting.items()):
            del self._waiting[name]
            self.pool.move(name, SlotState.READY)
            self._ready.append(transaction)

    def granted(real: Any, self: KafkaWriter, transactional_id: str, producer_id: int, epoch: int) -> None:
        for each in (*self._ready, *filter(None, (self._current, self._draining))):
            if each.transactional_id == transactional_id:
                each.producer_id, each.epoch = producer_id, epoch

    yield replaced(KafkaWriter, "_prepare", prepare)
    yield replaced(KafkaWriter, "granted", granted)


# --- order logs -----------------------------------------------------------------------------------------------------


@mutant("the order log lacks a batch", REPEATED, shape="sinks", luck="replays", first=14)
def _lost_batch() -> Iterable[Any]:
    calls = count(1)

    def note(real: Any, self: OrderRuns, name: str, partition: int, records: int) -> None:
        if next(calls) % 2:
            real(self, name, partition, records)

    yield replaced(OrderRuns, "note", note)
    yield unfitting()


# --- replay repair --------------------------------------------------------------------------------------------------


@mutant("a replay does not restore the checkpoint before", REPEATED, shape="chain", luck="replays", first=5)
@in_place_of(Assembler, "assemble")
def _replay_from_nothing(real: Any, self: Assembler, task: Any, ends: Any, made: Any) -> None:
    if isinstance(ends, ReplayEnds):
        forgotten = msgspec.structs.replace(self.manifest, operators=())
        self = replace(self, spec=msgspec.structs.replace(self.spec, manifest=forgotten))
    real(self, task, ends, made)


@mutant("a replay takes its inputs by time, not along the order logs", REPEATED, shape="stores", luck="replays")
@in_place_of(ordering, "take_along")
def _replay_by_time(real: Any, lanes: Any, sources: Any, logs: Any, operators: Any, left: Any = None) -> None:
    ordering.take_by_time(lanes, sources, operators, ordering.BatchTime())


# --- local files ------------------------------------------------------------------------------------------------------


@mutant("a snapshot leaves out what was not read", WRONG + "|" + DISORDER, luck="local files", first=5)
@in_place_of(TieredTable, "freeze")
def _left_out(real: Any, self: Any, checkpoint: int, base: int, *, whole: bool) -> Any:
    snapshot = real(self, checkpoint, base, whole=whole)
    read = mask_of(set(self._groups.all) - self._groups.unread)
    snapshot.chain = Chain.of(snapshot.chain.blocks, read)
    return snapshot


mutant(
    "files of any checkpoint are taken", WRONG + "|" + DISORDER,
    patch.object(files, "_name", lambda digest: "saved-state"), patch.object(Marker, "same", lambda self, other: True),
    shape="union", luck="local files", first=3,
)  # fmt: skip
