"""The seam between an engine and a sink: the writer of one subtask, and what it is made of.

Invariants: a writer belongs to the loop of one worker, and none of its calls waits unless it is told to; what was
written before `barrier(n)` belongs to checkpoint n; what it pre-commits it never commits: that is the protocol's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import BlockRef, StagedAck
from exactlyonce.pipeline.errors import ExactlyOnceError

BLOCKS_PENDING_MAX = 64
"""Blocks of a worker, of 1 MB at most, that are on their way to the broker before whoever writes more waits."""


ROOM = 1 << 20
"""Of a writer that can take whatever comes at once."""


class SinkFailed(ExactlyOnceError):
    """A sink could not write. The job restarts from the last completed checkpoint; nothing is lost."""


@dataclass(frozen=True)
class FlushedInterval:
    """All that was written before a barrier is where no crash of this process can take it away."""

    precommit: Precommit | None = None
    """A transaction, which is to be checked; None: nothing was written since the barrier before, or not to Kafka."""
    staged: StagedAck | None = None
    """What was set aside for a store."""
    written: tuple[BlockRef, ...] = ()
    """The blocks that this took."""


class SinkWriter(Protocol):
    """Of one sink subtask."""

    sink: str
    records: int
    """How many it was given in all."""
    unwritten: int
    """Records that wait to be written though their checkpoint is finalized: a clean end waits for them."""

    def write(self, outputs: Any, /) -> None:
        """Take what its `SinkEncoder` made of a batch."""

    def barrier(self, checkpoint: int) -> None:
        """What was written before belongs to *checkpoint*; `take_flushed` tells when it is flushed."""

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """The interval that *checkpoint* ends, once; None while some of it is still to be flushed."""

    def poll(self, wait_s: float = 0.0) -> bool:
        """Go on with what is under way; True if anything moved. May wait so long. Raises `SinkFailed`."""

    def finalized(self, checkpoint: int) -> None:
        """*checkpoint* and all before it are finalized."""

    def abandon(self) -> None:
        """The worker ends, however: what is under way need not."""

    @property
    def room(self) -> int:
        """How many records more it should be given now; 0: the caller should pause until more was polled, which must
        not take a barrier."""

    @property
    def held_up(self) -> str:
        """What its flush would wait for, in words; empty: for nothing, or who is asked elsewhere says it."""

    @property
    def open_transactions(self) -> int:
        """Transactions of this subtask that are open on the broker."""


@dataclass
class IntervalWriter:
    """The part of a `SinkWriter` that most have in common: each interval is told once, when it is flushed; nothing is
    open on the broker, and nothing waits for a finalization."""

    sink: str
    records: int = field(default=0, init=False)
    unwritten: int = field(default=0, init=False)
    _flushed: dict[int, FlushedInterval] = field(default_factory=dict, init=False)

    @property
    def room(self) -> int:
        """It takes whatever comes."""
        return ROOM

    @property
    def held_up(self) -> str:
        """Its flush waits for nothing."""
        return ""

    @property
    def open_transactions(self) -> int:
        """None."""
        return 0

    def poll(self, wait_s: float = 0.0) -> bool:
        """Nothing is under way."""
        return False

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """The interval that *checkpoint* ends, once; None while some of it is still to be flushed."""
        return self._flushed.pop(checkpoint, None)

    def finalized(self, checkpoint: int) -> None:
        """Nothing waits for it."""

    def abandon(self) -> None:
        """Nothing is under way."""


class GrantedWriter(SinkWriter, Protocol):
    """One that writes only under transactional ids that the coordinator grants; see `Sink.transactional`."""

    def granted(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        """The coordinator has read whose the id is: it may be written with."""


class SinkEncoder(Protocol):
    """Turns records into what the sink's writer takes."""

    def encode(self, records: Sequence[Any]) -> Any:
        """Of a batch. It has no effects. What it raises on a record says what of it does not fit, and into what; what
        the user's functions raise it calls by `pipeline.sink.mapped`."""


class BlockStaging(Protocol):
    """Where a writer sets aside, in the checkpoint topic, what its committables name."""

    @property
    def pending(self) -> int:
        """How many blocks of this worker are on their way."""

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """Send a block; those of one sink subtask keep their order."""


class WriterClients(Protocol):
    """What a writer reaches the world by."""

    @property
    def clock(self) -> Clock: ...

    def producers(self, topic: str) -> Any:
        """The `sinks.kafka.producers.Producers` of a sink's subtask that writes to *topic*."""


@dataclass(frozen=True, kw_only=True)
class WriterContext:
    """What a sink's writer is made of, beside the description."""

    pipeline: str
    sink: str
    subtask: int
    incarnation: int
    attempt: int
    type: Any
    """Of the records."""
    slots: int
    """How many transactions it may have at once."""
    clients: WriterClients
    staging: BlockStaging
    prepared: Callable[[str], None]
    """To be called with each transactional id whose producer is ready, and is to be granted."""
    note: Callable[[str], None]
    """To be called, on the worker's loop, with what a person should know."""


class Opened(NamedTuple):
    """A sink subtask, ready to be written to."""

    writer: SinkWriter
    encoder: SinkEncoder


class WritesToTopic(Protocol):
    """The description of a sink whose `topic` is one: bounded work stages what it encodes, and writes it later."""

    @property
    def topic(self) -> str: ...

    @property
    def create_partitions(self) -> int | None:
        """With so many partitions the topic is created if there is none; None: it must be there."""

    def encoder(self, type_: Any, /) -> SinkEncoder:
        """Of records of the type."""


class Writable(Protocol):
    """What every description of a sink can do, beside describing."""

    def open_writer(self, context: WriterContext) -> Opened:
        """The writer of one subtask; nothing is written yet."""
