"""The blocks that one worker writes for its snapshots: state, indexes, order logs, in-flight records, staged rows.

Invariants: each block of an attempt has its own key, by the worker's numbers. A reference is returned once its block is
durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from exactlyonce.checkpoint.block_storage import AttemptBlocks, DamagedBlock, Ticket
from exactlyonce.checkpoint.kept_blocks import beyond_repair
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch_codec import records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame, record_schemas
from exactlyonce.engines.runtime.steps import Steps
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import BLOCKS_PENDING_MAX
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.errors import DamagedState, SnapshotDeclined

T = TypeVar("T")
STATE, INDEX, ORDER, IN_FLIGHT, IN_FLIGHT_LIST = "state", "index", "order", "in-flight", "in-flight-list"


class WorkerBlocks:
    """Numbers the blocks that one worker writes to *attempt*."""

    def __init__(self, attempt: AttemptBlocks, loop_schemas: Mapping[str, Any] | None = None) -> None:
        """*loop_schemas*, by loop, are written with in-flight records; see `pipeline.wire.describe`."""
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
