"""The cut: the state of one subtask at a barrier, written as blocks and acknowledged.

A subtask makes a `Cut` between two records, in constant time. `acknowledge` writes it in steps, while the subtask takes
the records after the barrier. Invariant: a reference is acknowledged only if its block is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.events import Ack, LeftOut, OperatorAck, Phases
from exactlyonce.checkpoint.records.manifest import OrderLog, SourceOffset
from exactlyonce.engines.runtime.blocks import SubtaskBlocks
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.steps import Steps
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import FlushedInterval, SinkWriter
from exactlyonce.state.backend import TableSnapshot
from exactlyonce.state.errors import SnapshotDeclined

T = TypeVar("T")


class InFlightCapture(Protocol):
    """The in-flight records of one channel at a cut."""

    @property
    def whole(self) -> bool:
        """Whether the barrier has come."""

    def frames(self) -> Iterable[InFlightFrame]:
        """The frames in order."""


def flush(sink: SinkWriter, checkpoint: int) -> Steps[FlushedInterval]:
    """Wait until *sink*, which has got the barrier, has flushed everything before it."""
    while (interval := sink.take_flushed(checkpoint)) is None:
        yield False
    return interval


class Stopwatch:
    """Times the phases of a subtask's part of a checkpoint, one after the other, from *begin_s* on."""

    def __init__(self, now_s: Callable[[], float], begin_s: float) -> None:
        self._now_s, self._begin_s = now_s, begin_s
        self._phases_ms = list[float]()

    def next_phase(self) -> None:
        """The phase is over, and the next one begins."""
        begin_s, self._begin_s = self._begin_s, self._now_s()
        self._phases_ms.append((self._begin_s - begin_s) * 1000)

    @property
    def phases(self) -> Phases:
        """All of them, once the last is over."""
        return Phases(*self._phases_ms)


@dataclass
class Cut:
    """The state of a subtask at a barrier."""

    tables: Sequence[TableSnapshot]
    order: Iterable[bytes] | None
    """The order log since the last barrier; None: only one order was possible."""
    offsets: tuple[SourceOffset, ...]
    """Sn of its partitions."""
    sinks: Sequence[SinkWriter]
    """All have got the barrier."""
    left: Sequence[InFlightFrame] = ()
    """Restored in-flight records that are not taken yet. They go before those captured now."""
    captures: Sequence[InFlightCapture] = ()
    left_out: tuple[LeftOut, ...] = ()
    goes_on: bool = False
    """See `Ack.goes_on`."""

    def acknowledge(self, blocks: SubtaskBlocks, stopwatch: Stopwatch | None = None) -> Steps[Ack]:
        """Write the cut and acknowledge it. An index waits for its blocks; all else is written in parallel.

        The present phase of *stopwatch* is that in which state is written.
        """

        def next_phase() -> None:
            if stopwatch is not None:
                stopwatch.next_phase()

        order = blocks.order(self.order or ())
        snapshots, declined = list[tuple[TableSnapshot, list[Ticket]]](), ""
        try:
            for snapshot in self.tables:
                refs = yield from blocks.state(snapshot.operator, snapshot.encode())
                hit("worker-blocks")
                snapshots.append((snapshot, blocks.index(snapshot.operator, snapshot.seal(refs))))
        except SnapshotDeclined as error:  # a later checkpoint carries the sinks' output
            declined = str(error)
        next_phase()
        while not all(capture.whole for capture in self.captures):
            yield False
        frames = [*self.left, *chain.from_iterable(capture.frames() for capture in self.captures)]
        channel_log, listed = yield from blocks.in_flight(frames)
        next_phase()
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
        next_phase()
        return Ack(
            task=blocks.task,
            subtask=blocks.subtask,
            checkpoint=blocks.checkpoint,
            offsets=self.offsets,
            operators=tuple(operators),
            order_log=None if self.order is None else OrderLog(blocks.task, blocks.subtask, tuple(log)),
            channel_log=channel_log,
            on_their_way=tuple(listed),
            precommits=tuple(interval.precommit for interval in flushed if interval.precommit is not None),
            staged=tuple(interval.staged for interval in flushed if interval.staged is not None),
            written=tuple(blocks.written),
            declined=declined,
            phases=None if stopwatch is None else stopwatch.phases,
            left_out=self.left_out,
            goes_on=self.goes_on,
        )
