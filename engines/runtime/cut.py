"""The cut: the state of one subtask at a barrier, written as blocks and acknowledged.

A subtask makes a `Cut` between two records, in constant time. `acknowledge` writes it in steps, while the subtask takes
the records after the barrier. Steps are a generator that yields True after some work, and False while it waits: a loop
with other work takes one at a time, others call `finish`. Invariants: each block of an attempt has its own key, by the
worker's numbers; a reference is returned, and acknowledged, only once its block is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from exactlyonce.checkpoint.block_storage import AttemptBlocks, DamagedBlock, Ticket
from exactlyonce.checkpoint.events import Ack, LeftOut, OperatorAck, Phases
from exactlyonce.checkpoint.kept_blocks import beyond_repair
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest, OrderLog, SourceOffset
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame, record_schemas
from exactlyonce.engines.runtime.watermarks import Barrier, Signal
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX, FlushedInterval, SinkWriter
from exactlyonce.state.backend import TableSnapshot
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.errors import DamagedState, SnapshotDeclined

R = TypeVar("R")
Steps = Generator[bool, None, R]


def finish(steps: Steps[R], wait: Callable[[], None]) -> R:
    """The result of all *steps*. *wait* is called while they wait.

    >>> def counted():
    ...     yield True
    ...     yield False
    ...     return 2
    >>> finish(counted(), lambda: print("waits"))
    waits
    2
    """
    while True:
        try:
            worked = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what a generator returns has no type there
        if not worked:
            wait()


T = TypeVar("T")
STATE, INDEX, ORDER, IN_FLIGHT, IN_FLIGHT_LIST = "state", "index", "order", "in-flight", "in-flight-list"


class WorkerBlocks:
    """Numbers the blocks that one worker writes to *attempt*."""

    def __init__(self, attempt: AttemptBlocks, loop_schemas: Mapping[str, Any] | None = None) -> None:
        """*loop_schemas*, by loop, are written with in-flight records; see `pipeline.records.wire_schema`."""
        self.attempt, self.loop_schemas = attempt, record_schemas(loop_schemas or {})
        self._number = 0

    @property
    def pending(self) -> int:
        """The number of blocks that are not durable yet."""
        return self.attempt.pending

    def write(self, block: Block, place: int) -> Ticket:
        """Send *block*. Blocks of one *place*, a subtask or key group, keep their order."""
        self._number += 1
        return self.attempt.write(block, place, self._number)


@dataclass
class SubtaskBlocks:
    """Writes the blocks of one subtask for one checkpoint. Methods with steps return references."""

    worker: WorkerBlocks
    checkpoint: int
    task: str
    subtask: int
    written: list[BlockRef] = field(default_factory=list)
    """All blocks that are durable."""

    def state(self, operator: str, blocks: Iterable[EncodedBlock | None]) -> Steps[list[BlockRef]]:
        """Write the state of *operator*. None in *blocks* is a pause in their encoding."""

        def write(block: EncodedBlock) -> Ticket:
            return self.worker.write(Block(operator, self.checkpoint, STATE, "zlib", "EOS1", block.body), block.group)

        return self._all(write, blocks)

    def index(self, operator: str, parts: Iterable[bytes]) -> list[Ticket]:
        return [self._write(operator, INDEX, "none", "EOX2", part) for part in parts]

    def order(self, parts: Iterable[bytes]) -> list[Ticket]:
        return [self._write(self.task, ORDER, "none", "msgpack", part) for part in parts]

    def in_flight(self, frames: Sequence[InFlightFrame]) -> Steps[tuple[ChannelLog | None, list[BlockRef]]]:
        """Write in-flight records. If their blocks are many, the log names lists of them; they are returned, too."""

        def write(body: bytes) -> Ticket:
            return self._write(self.task, IN_FLIGHT, "zlib", self.worker.loop_schemas, body)

        refs = yield from self._all(write, in_flight.encode(frames))
        if not refs:
            return None, []
        hit("unaligned-captured")
        lists = [self._write(self.task, IN_FLIGHT_LIST, "none", "msgpack", body) for body in in_flight.lists_of(refs)]
        listed = yield from self.durable(lists)
        records = sum(records_in(frame.frame) for frame in frames)
        log = ChannelLog(self.task, self.subtask, records, tuple(listed or refs), indexed=bool(listed))
        return log, refs if listed else []

    def durable(self, tickets: Sequence[Ticket]) -> Steps[list[BlockRef]]:
        while not all(ticket.ref for ticket in tickets):
            yield False
        refs = [ticket.ref for ticket in tickets if ticket.ref is not None]
        self.written += refs
        return refs

    def _write(self, owner: str, kind: str, compression: str, encoding: str, body: bytes) -> Ticket:
        return self.worker.write(Block(owner, self.checkpoint, kind, compression, encoding, body), self.subtask)

    def _all(self, write: Callable[[T], Ticket], bodies: Iterable[T | None]) -> Steps[list[BlockRef]]:
        """Write *bodies* with at most `BLOCKS_PENDING_MAX` pending blocks of the worker."""
        tickets: list[Ticket] = []
        try:
            for body in bodies:
                if body is not None:
                    tickets.append(write(body))
                yield True
                while self.worker.pending > BLOCKS_PENDING_MAX:
                    yield False
        except SnapshotDeclined:  # the leader only knows, and drops, acknowledged blocks
            yield from self.durable(tickets)
            raise
        return (yield from self.durable(tickets))


@dataclass(frozen=True)
class StagedBlocks:
    """Stages the blocks that the committables of one sink subtask name."""

    worker: WorkerBlocks
    sink: str
    subtask: int

    @property
    def pending(self) -> int:
        return self.worker.pending

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """Send a block. Blocks of one subtask keep their order."""
        return self.worker.write(Block(self.sink, checkpoint, kind, "none", kind, body), self.subtask)


@contextmanager
def whole_or_halt(manifest: Manifest) -> Iterator[None]:
    """Halt, with the choices, if a block of *manifest* that is read is missing or damaged."""
    try:
        yield
    except (DamagedBlock, DamagedState) as error:
        raise beyond_repair(manifest, str(error)) from error


@dataclass
class InFlightCapture:
    """The in-flight records of channel *name* at barrier *checkpoint*: taken after the snapshot, sent before it."""

    name: str
    checkpoint: int
    begun: list[bytes]
    """The rest of the frame in hand."""
    sent: list[bytes] = field(default_factory=list)
    """The frames that were not received then."""
    whole: bool = False
    """Whether the barrier has come."""

    def arrived(self, frame: bytes | Signal) -> None:
        if isinstance(frame, bytes):
            self.sent.append(frame)
        elif isinstance(frame, Barrier) and frame.checkpoint == self.checkpoint:
            self.whole = True

    def frames(self) -> Iterator[InFlightFrame]:
        """The frames in order."""
        return (InFlightFrame(self.name, frame) for frame in chain(self.begun, self.sent))


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
