"""The cut: what one subtask is at a barrier, written as blocks and acknowledged.

A subtask makes a `Cut` between two records, in constant time. Its `acknowledge` writes it in steps, while the subtask
goes on with the records behind the barrier. `SubtaskBlocks` writes the blocks, of a cut and of whatever else becomes
part of a checkpoint.

Invariant: a reference is acknowledged only if its block is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

from exactlyonce.checkpoint.block_storage import AttemptBlocks, Ticket
from exactlyonce.checkpoint.events import Ack, OperatorAck
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, OrderLog, SourceOffset
from exactlyonce.engines import in_flight
from exactlyonce.engines.batch_codec import records_in
from exactlyonce.engines.blocks import BlockNames
from exactlyonce.engines.in_flight import InFlightFrame
from exactlyonce.engines.runtime.steps import Steps
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX, FlushedInterval, SinkWriter
from exactlyonce.state.backend import TableSnapshot
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.errors import SnapshotDeclined

T = TypeVar("T")


class InFlightCapture(Protocol):
    """What was on its way in one channel when the cut was made."""

    @property
    def whole(self) -> bool:
        """Whether the barrier has come, so that nothing more belongs to it."""

    def frames(self) -> Iterable[InFlightFrame]:
        """In their order."""


@dataclass
class SubtaskBlocks:
    """Writes the blocks of *subtask* of *task* for one checkpoint. Its methods give steps, which return references."""

    blocks: AttemptBlocks
    names: BlockNames
    checkpoint: int
    task: str
    subtask: int
    written: list[BlockRef] = field(default_factory=list)
    """All blocks that are durable."""

    def state(self, operator: str, blocks: Iterable[EncodedBlock | None]) -> Steps[list[BlockRef]]:
        """Write the state of *operator*. None among *blocks* is a pause in their encoding."""
        return self._all(partial(self.names.write, self.blocks, self.checkpoint, operator), blocks)

    def index(self, operator: str, parts: Iterable[bytes]) -> list[Ticket]:
        """Begin to write the parts of an index."""
        return [self.names.write_index(self.blocks, self.checkpoint, operator, part) for part in parts]

    def order(self, parts: Iterable[bytes]) -> list[Ticket]:
        """Begin to write the parts of an order log."""
        return [self.names.write_order(*self._place, part) for part in parts]

    def in_flight(self, frames: Sequence[InFlightFrame]) -> Steps[tuple[ChannelLog | None, list[BlockRef]]]:
        """Write what was on its way. Where its blocks are many, the log names lists of them; they are returned too."""
        refs = yield from self._all(partial(self.names.write_in_flight, *self._place), in_flight.encode(frames))
        if not refs:
            return None, []
        hit("unaligned-captured")
        lists = [self.names.write_in_flight_list(*self._place, body) for body in in_flight.lists_of(refs)]
        named = yield from self.durable(lists)
        records = sum(records_in(each.frame) for each in frames)
        log = ChannelLog(self.task, self.subtask, records, tuple(named or refs), indexed=bool(named))
        return log, refs if named else []

    def durable(self, tickets: Sequence[Ticket]) -> Steps[list[BlockRef]]:
        """Wait until every block is durable."""
        while not all(ticket.ref for ticket in tickets):
            yield False
        refs = [ticket.ref for ticket in tickets if ticket.ref is not None]
        self.written += refs
        return refs

    @property
    def _place(self) -> tuple[AttemptBlocks, int, str, int]:
        return self.blocks, self.checkpoint, self.task, self.subtask

    def _all(self, write: Callable[[T], Ticket], bodies: Iterable[T | None]) -> Steps[list[BlockRef]]:
        """Write *bodies*, with no more than `BLOCKS_PENDING_MAX` blocks of the worker on their way."""
        tickets: list[Ticket] = []
        try:
            for body in bodies:
                if body is not None:
                    tickets.append(write(body))
                yield True
                while self.blocks.pending > BLOCKS_PENDING_MAX:
                    yield False
        except SnapshotDeclined:  # the leader drops what is acknowledged and not needed; it knows of no other block
            yield from self.durable(tickets)
            raise
        return (yield from self.durable(tickets))


def flush(sink: SinkWriter, checkpoint: int) -> Steps[FlushedInterval]:
    """Wait until all is flushed that *sink*, which has got the barrier, was given before it."""
    while (interval := sink.take_flushed(checkpoint)) is None:
        yield False
    return interval


@dataclass
class Cut:
    """What a subtask was at a barrier."""

    tables: Sequence[TableSnapshot]
    order: Iterable[bytes] | None
    """The order log since the last barrier; None: there was only one order."""
    offsets: tuple[SourceOffset, ...]
    """Sn of the partitions that it reads."""
    sinks: Sequence[SinkWriter]
    """They have got the barrier."""
    left: Sequence[InFlightFrame] = ()
    """What was on its way at the restored checkpoint and is not taken. It goes before what is captured."""
    captures: Sequence[InFlightCapture] = ()

    def acknowledge(self, blocks: SubtaskBlocks) -> Steps[Ack]:
        """Write the cut and return what the leader needs to know of it.

        An index waits for the blocks that it names; all else is on its way at the same time.
        """
        order = blocks.order(self.order or ())
        snapshots, declined = list[tuple[TableSnapshot, list[Ticket]]](), ""
        try:
            for snapshot in self.tables:
                refs = yield from blocks.state(snapshot.operator, snapshot.encode())
                hit("worker-blocks")
                snapshots.append((snapshot, blocks.index(snapshot.operator, snapshot.seal(refs))))
        except SnapshotDeclined as error:  # what the sinks flush is carried by a later checkpoint
            declined = str(error)
        while not all(each.whole for each in self.captures):
            yield False
        frames = [*self.left, *chain.from_iterable(each.frames() for each in self.captures)]
        channel_log, on_their_way = yield from blocks.in_flight(frames)
        operators = []
        for snapshot, tickets in snapshots:
            index = yield from blocks.durable(tickets)
            operators.append(OperatorAck(snapshot.operator, tuple(index), snapshot.chain.refs, snapshot.chain.size))
        log = yield from blocks.durable(order)
        flushed = []
        for sink in self.sinks:
            flushed.append((yield from flush(sink, blocks.checkpoint)))
        for interval in flushed:
            blocks.written += interval.written
        hit("worker-flushed")
        return Ack(
            task=blocks.task,
            subtask=blocks.subtask,
            checkpoint=blocks.checkpoint,
            offsets=self.offsets,
            operators=tuple(operators),
            order_log=None if self.order is None else OrderLog(blocks.task, blocks.subtask, tuple(log)),
            channel_log=channel_log,
            on_their_way=tuple(on_their_way),
            precommits=tuple(each.precommit for each in flushed if each.precommit is not None),
            staged=tuple(each.staged for each in flushed if each.staged is not None),
            written=tuple(blocks.written),
            declined=declined,
        )
