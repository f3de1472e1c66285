"""One subtask of a task: takes batches from its inputs, aligns barriers, takes snapshots.

Invariants: a batch goes through all operators before the next is taken; exactly once, nothing of an input is taken
between its barrier and the snapshot; the snapshot's synchronous part and the barrier's passing-on happen in one step,
so that no record comes between them; acknowledgements are sent in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.checkpoint.events import Ack, OperatorAck
from exactlyonce.checkpoint.records.manifest import BlockRef, OrderLog
from exactlyonce.checkpoint.store.storage import AttemptBlocks, Ticket
from exactlyonce.engines.blocks import BlockNames
from exactlyonce.engines.local.channels import BarrierFrame, Channel
from exactlyonce.engines.local.inputs import Input, SourceInput
from exactlyonce.engines.local.messages import Acknowledge
from exactlyonce.engines.local.pace import BATCH_RECORDS_MAX
from exactlyonce.engines.operators import Batch
from exactlyonce.engines.order_log import OrderRuns
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX, SinkWriter
from exactlyonce.state.backend import Table, TableSnapshot
from exactlyonce.state.errors import SnapshotDeclined


@dataclass
class Subtask:
    """Subtask *index* of task *name*."""

    name: str
    index: int
    inputs: list[Input]
    tables: list[Table[Any]]
    sinks: list[SinkWriter]
    outputs: list[list[Channel]]
    """By shuffle that begins here, its channels to every subtask behind it."""
    blocks: AttemptBlocks
    names: BlockNames
    acknowledge: Callable[[Acknowledge], None]
    order: OrderRuns | None
    """None where there is only one order; see `order_runs`. A source may get a partition more at any barrier."""
    monotonic_s: Callable[[], float]
    exactly_once: bool = True
    """Whether inputs are held back; see `Alignment`."""

    def __post_init__(self) -> None:
        self.alignment = Alignment((each.name for each in self.inputs), exactly_once=self.exactly_once)
        self._turn: deque[Input] = deque(self.inputs)
        self._snapshots: deque[Iterator[bool]] = deque()
        self.fetching = False
        """Whether stored state was read by the last `advance`, and not because a record wanted it."""

    @property
    def sources(self) -> list[SourceInput]:
        """Those of the inputs that read a topic."""
        return [each for each in self.inputs if isinstance(each, SourceInput)]

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way."""
        return bool(self._snapshots)

    @property
    def room(self) -> int:
        """How many records may be taken; 0: what is behind this subtask must drain first."""
        if any(sink.full for sink in self.sinks):
            return 0
        rooms = [BATCH_RECORDS_MAX]
        for channels in self.outputs:
            widest = max(channel.window for channel in channels)
            rooms += [channel.room(widest) for channel in channels]
        return min(rooms)

    @property
    def waits(self) -> bool:
        """Whether `step` waits for records of a source, if there are none."""
        return bool(self.room) and any(each.waits and not self.alignment.is_held(each.name) for each in self.sources)

    def step(self, wait_s: float) -> bool:
        """Take one batch or barrier from the next input that has one; True if there was any."""
        room = self.room
        if not room:
            return False
        for _ in range(len(self._turn)):
            source = self._turn[0]
            self._turn.rotate(-1)
            if self.alignment.is_held(source.name):
                continue
            item = source.next(wait_s, room)
            if item is None:
                continue
            if isinstance(item, BarrierFrame):
                self._barrier(source, item)
            else:
                self._take(source, item)
            return True
        return False

    def _take(self, source: Input, batch: Batch) -> None:
        self.alignment.take(source.name)
        if self.order is not None:
            for partition, count in source.runs():
                self.order.note(source.name, partition, count)
            self.order.end_batch()
        source.push(batch)
        source.processed()

    def _barrier(self, source: Input, frame: BarrierFrame) -> None:
        if isinstance(source, SourceInput):
            hit("worker-barrier")
        if self.alignment.barrier(source.name, frame.checkpoint):
            hit("worker-aligned")
            self._snapshots.append(self._snapshot(frame))

    def _snapshot(self, frame: BarrierFrame) -> Iterator[bool]:
        """The synchronous part now; the rest as an iterator."""
        began = self.monotonic_s()
        frozen = [(table, table.freeze(frame.checkpoint, frame.base)) for table in self.tables]
        exact, log = self.alignment.exact, None
        if self.order is not None and (self.order.runs or not exact):
            log = self.order.cut(exact=exact)
        for channel in chain.from_iterable(self.outputs):
            channel.send_barrier(frame)
        for each in self.inputs:
            each.trust()
        for sink in self.sinks:
            sink.barrier(frame.checkpoint)
        hit("worker-frozen")
        return self._rest(frame, frozen, log, began, self.monotonic_s() - began)

    def advance(self, budget_s: float) -> bool:
        """Work on snapshots for about *budget_s*, and on restored state; True if anything was done."""
        end = self.monotonic_s() + budget_s
        self.fetching = moved = any(table.fetch() for table in self.tables)
        while self._snapshots:
            progressed = next(self._snapshots[0], None)
            if progressed is None:
                self._snapshots.popleft()
            moved = moved or progressed is not False
            if not progressed or self.monotonic_s() >= end:
                break
        return moved

    def _rest(
        self,
        frame: BarrierFrame,
        frozen: list[tuple[Table[Any], TableSnapshot]],
        log: tuple[bytes, ...] | None,
        began: float,
        sync_s: float,
    ) -> Iterator[bool]:
        """Write blocks, then indexes, wait for the sinks' flush, acknowledge. Yields True after work, False to wait."""
        checkpoint = frame.checkpoint
        written: list[BlockRef] = []
        operators: list[OperatorAck] = []
        declined = ""
        try:
            for table, snapshot in frozen:
                operators.append((yield from self._write(table, snapshot, written)))
        except SnapshotDeclined as error:  # what the sinks flush is carried by a later checkpoint
            declined = str(error)
        order_log = None
        if log is not None:
            place = (self.blocks, checkpoint, self.name, self.index)
            refs = yield from _durable([self.names.write_order(*place, part) for part in log])
            written += refs
            order_log = OrderLog(self.name, self.index, tuple(refs))
        precommits, staged = [], []
        for sink in self.sinks:
            while (flushed := sink.take_flushed(checkpoint)) is None:
                yield False
            precommits += [flushed.precommit] if flushed.precommit is not None else []
            staged += [flushed.staged] if flushed.staged is not None else []
            written += flushed.written
        hit("worker-flushed")
        offsets = tuple(offset for source in self.sources for offset in source.noted.pop(checkpoint))
        ack = Ack(
            task=self.name,
            subtask=self.index,
            checkpoint=checkpoint,
            offsets=offsets,
            operators=tuple(operators),
            order_log=order_log,
            precommits=tuple(precommits),
            staged=tuple(staged),
            written=tuple(written),
            declined=declined,
        )
        self.acknowledge(Acknowledge(ack, sync_s * 1000, (self.monotonic_s() - began) * 1000))
        hit("worker-acknowledged")

    def _write(
        self, table: Table[Any], snapshot: TableSnapshot, written: list[BlockRef]
    ) -> Generator[bool, None, OperatorAck]:
        """Write the state of one operator; what was written is noted in *written*."""
        tickets = []
        for block in snapshot.encode():
            if block is not None:
                tickets.append(self.names.write(self.blocks, snapshot.checkpoint, table.operator, block))
            yield True
            while self.blocks.pending > BLOCKS_PENDING_MAX:
                yield False
        refs = yield from _durable(tickets)
        hit("worker-blocks")
        parts = snapshot.seal(refs)
        tickets = [self.names.write_index(self.blocks, snapshot.checkpoint, table, part) for part in parts]
        index = yield from _durable(tickets)
        written += refs + index
        return OperatorAck(table.operator, tuple(index), snapshot.chain.refs, snapshot.chain.size)


def _durable(tickets: list[Ticket]) -> Generator[bool, None, list[BlockRef]]:
    """Wait until every block is durable; returns their references."""
    while not all(ticket.ref for ticket in tickets):
        yield False
    return [ticket.ref for ticket in tickets if ticket.ref is not None]
