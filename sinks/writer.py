"""The seam between an engine and a sink: the writer of one subtask, and the context it is made in.

Invariants: a writer belongs to the loop of one worker, and its calls wait only if told to; outputs before `barrier(n)`
belong to checkpoint n; a writer pre-commits and never commits: that is the protocol's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args, get_origin

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.manifest import BlockRef, Precommit, StagedAck
from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.changes import holds_changes
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ExactlyOnceError, InvariantViolation
from exactlyonce.pipeline.records import Record

if TYPE_CHECKING:  # else each description would load the schemas of the checkpoint topic
    from exactlyonce.checkpoint.block_storage import Ticket

BLOCKS_PENDING_MAX = 64
"""In-flight blocks of a worker, of 1 MB at most, at which its writers wait."""
ROOM = 1 << 20
"""`SinkWriter.room` without a limit."""


class SinkFailed(ExactlyOnceError):
    """A sink could not write. The job restarts from the last completed checkpoint; nothing is lost."""


@dataclass(frozen=True)
class FlushedInterval:
    """The outputs before a barrier, durable beyond a crash of this process."""

    precommit: Precommit | None = None
    """The Kafka transaction to check; None: there were no outputs, or the sink is another."""
    staged: StagedAck | None = None
    """The output staged for a store."""
    written: tuple[BlockRef, ...] = ()
    """The blocks written for it."""


class SinkWriter(Protocol):
    """The writer of one sink subtask."""

    sink: str
    records: int
    """The number it was given in all."""
    unwritten: int
    """Records of finalized checkpoints that are still to be written: a clean end waits for them."""

    def write(self, outputs: Any, /) -> None:
        """Take an encoded batch of its `SinkEncoder`."""

    def barrier(self, checkpoint: int) -> None:
        """End the interval of *checkpoint*; `take_flushed` tells when it is flushed."""

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        """The interval that *checkpoint* ends, once; None while some of it is still to be flushed."""

    def poll(self, wait_s: float = 0.0) -> bool:
        """Make progress, and wait up to *wait_s* for it; True if there was any. Raises `SinkFailed`."""

    def finalized(self, checkpoint: int) -> None:
        """Take notice that *checkpoint* and all before it are finalized."""

    def abandon(self) -> None:
        """Give up work in progress, for the worker ends."""

    @property
    def room(self) -> int:
        """The number of records to give it now; 0: the caller should pause until more was polled, which must not take
        a barrier."""

    @property
    def held_up(self) -> str:
        """A sentence on what its flush would wait for; empty: for nothing, or somebody else says so."""

    @property
    def open_transactions(self) -> int:
        """Transactions of this subtask that are open on the broker."""


@dataclass
class IntervalWriter:
    """The common part of most `SinkWriter`s: tells each interval once, when it is flushed; nothing is open on the
    broker, and nothing waits for a finalization."""

    sink: str
    records: int = field(default=0, init=False)
    unwritten: int = field(default=0, init=False)
    _flushed: dict[int, FlushedInterval] = field(default_factory=dict, init=False)

    @property
    def room(self) -> int:
        """Unlimited."""
        return ROOM

    @property
    def held_up(self) -> str:
        """Empty."""
        return ""

    @property
    def open_transactions(self) -> int:
        """None."""
        return 0

    def poll(self, wait_s: float = 0.0) -> bool:
        """Nothing is in progress."""
        return False

    def take_flushed(self, checkpoint: int) -> FlushedInterval | None:
        return self._flushed.pop(checkpoint, None)

    def finalized(self, checkpoint: int) -> None:
        """Nothing waits for it."""

    def abandon(self) -> None:
        """Nothing is in progress."""


@dataclass(frozen=True)
class WaitingWriter:
    """Gives outputs to a writer where nothing else is to be done, and so waits while that has no room."""

    writer: SinkWriter
    wait: Callable[[], object]
    """Waits a moment for what the writer has in flight elsewhere."""

    def write(self, outputs: Any) -> None:
        self.writer.write(outputs)
        self.writer.poll()
        while not self.writer.room:
            self.wait()
            self.writer.poll()


class SinkEncoder(Protocol):
    """Encodes records for the sink's writer."""

    def encode(self, records: Sequence[Any]) -> Any:
        """The encoded batch, without effects. Errors say which field does not fit, and into what; those of the user's
        functions are named by `pipeline.sink.mapped`."""


class BlockStaging(Protocol):
    """The checkpoint topic, as a writer stages blocks in it."""

    @property
    def pending(self) -> int:
        """The number of in-flight blocks of this worker."""

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """Send a block; blocks of one sink subtask keep their order."""


class WriterClients(Protocol):
    """The clients of a writer."""

    @property
    def clock(self) -> Clock: ...

    def producers(self, topic: str, partitioner: str | None) -> Any:
        """The `sinks.kafka.writer.Producers` of a sink's subtask that writes to *topic* by *partitioner*."""


def opens_none(text: str) -> None:
    """Called in place of `WriterContext.prepared` and `note` where they must not be."""
    raise InvariantViolation(f"a task opens no transaction here, and gives up no record: {text}")


@dataclass(frozen=True, kw_only=True)
class WriterContext:
    """The arguments of a sink's writer, beside the description."""

    pipeline: str
    sink: str
    subtask: int
    incarnation: int
    attempt: int
    type: Any
    """The records' type."""
    clients: WriterClients
    staging: BlockStaging
    slots: int = 0
    """The number of transactions it may have at once."""
    prepared: Callable[[str], None] = opens_none
    """Called with each transactional id whose producer is ready to be granted."""
    note: Callable[[str], None] = opens_none
    """Called, on the worker's loop, with a sentence for the operator."""
    partitions: int | None = None
    """The number of partitions of the sink's topic, if it has one."""
    partitioner: str | None = None
    """The partitioner of its outputs; None: the client's own."""


class Opened(NamedTuple):
    """A sink subtask, ready to be written to."""

    writer: SinkWriter
    encoder: SinkEncoder


class WritesToTopic(Protocol):
    """The description of a sink that writes to a topic: bounded work stages encoded outputs, and writes them later."""

    @property
    def topic(self) -> str: ...

    @property
    def create_partitions(self) -> int | None:
        """The partition count with which a missing topic is created; None: it must exist."""

    @property
    def partitioner(self) -> str | None:
        """The partitioner that the user gave the sink."""

    def encoder(self, type_: Any, partitions: int | None, /) -> SinkEncoder:
        """The encoder of records of the type, for a topic with so many partitions."""


class Writable(Protocol):
    """The description of any sink."""

    def open_writer(self, context: WriterContext) -> Opened:
        """The writer of one subtask, and the encoder; nothing is written yet."""


def holds_records(type_: Any) -> bool:
    """Whether a stream of the type is of `Record`."""
    return type_ is Record or get_origin(type_) is Record


def holds_keys(type_: Any) -> bool:
    """Whether each output of the type has a key and a value of its own."""
    return holds_records(type_) or holds_changes(type_)


def value_type(type_: Any) -> Any:
    """The type of the values of a stream of *type_*.

    >>> from exactlyonce.pipeline.changes import Change
    >>> value_type(Record[int]), value_type(int), value_type(Change[dict]) == dict | None
    (<class 'int'>, <class 'int'>, True)
    """
    if not holds_keys(type_):
        return type_
    of = (get_args(type_) or (Any,))[0]
    return of if holds_records(type_) else hints.union([*hints.members(of), type(None)])


def codec_problems(codec: Callable[[Any], Codec[Any]], type_: Any) -> Iterator[str]:
    """The reasons why a stream of *type_* cannot be encoded by *codec*, which makes the codec for a type."""
    try:
        encoded = hints.without_none(codec(type_).type)
    except shape.UnsupportedType as error:
        yield str(error)
        return
    held = hints.without_none(value_type(type_))
    if isinstance(encoded, type) and isinstance(held, type) and encoded not in held.__mro__:
        yield f"value= encodes {shape.type_name(encoded)}, and the stream is of {shape.type_name(held)}"
