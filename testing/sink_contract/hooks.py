"""The target of a contract: the hooks of a subclass, and the steps that tests take.

A test has one target, empty at first, and any number of committers and stores for it, each as in its own process.
Records are named by (number, version); `seen` compares them with the result of `read`. Blocks are in memory: the
shipped code writes and reads them, only the broker is replaced.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.records.encoding import Block, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, StoreCommittable, TopicInfo
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockWriter, OnDelivery
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.contract import Contract

_TOPIC = TopicInfo("contract", "topic-1", partitions=5, replicas=1)


class _Place(NamedTuple):
    """Partition and offset of a delivered record."""

    at: tuple[int, int]

    def partition(self) -> int:
        return self.at[0]

    def offset(self) -> int:
        return self.at[1]


class MemoryBlocks:
    """The blocks of all subtasks of a test; a `checkpoint.block_storage.Blocks`."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: OnDelivery) -> None:
        """Keep a value; it is durable at once."""
        self._values[key] = value
        on_delivery(None, _Place((partition, len(self._values))))

    def poll(self, timeout_s: float) -> None:
        """Do nothing: all deliveries have been reported."""

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        """Each of *refs* with its block."""
        for ref in refs:
            yield ref, decode(self._values[ref.key], Block)


class MemoryStaging:
    """The `BlockStaging` of one sink subtask; *life* is unique."""

    def __init__(self, blocks: MemoryBlocks, sink: str, subtask: int, life: int) -> None:
        self._writer = BlockWriter(blocks, _TOPIC, incarnation=life, attempt=0, nonce="memory")
        self._sink = sink
        self._subtask = subtask
        self._parts = 0

    @property
    def pending(self) -> int:
        """Blocks in flight: none."""
        return self._writer.poll()

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """Keep a block."""
        self._parts += 1
        block = Block(self._sink, checkpoint, kind, "", "", body)
        return self._writer.write(block, self._subtask, self._parts)


PIPELINE, SINK, ORIGIN = "shop", "orders", "topic-1"
AWAY_S = 60.0
"""The time for which an unavailable store is asked again."""
T = TypeVar("T")
Row = tuple[int, int]
"""Number and version, the arguments of `record`."""


class _Clients:
    """The clients of a writer that needs none."""

    clock = SimulatedClock()

    def producers(self, topic: str, partitioner: str | None) -> Any:
        """A sink with a committer writes to no topic."""
        raise NotImplementedError(f"a producer for {topic}")


def _unasked(transactional_id: str) -> None:
    raise NotImplementedError(f"a grant for {transactional_id}")


class ContractHooks(Contract):
    """The hooks of a subclass; `type`, `sink`, `record` and `read` are required."""

    type: Any
    """The type of the records."""
    keyed = False
    """Whether the last written of two records with one number replaces the first."""
    ordered = False
    """Whether `read` gives records in the order in which they were written."""
    processes = True
    """Whether other processes reach the target."""
    secret: str | None = None
    """The password in the sink's dsn, which must show nowhere."""
    awkward: Sequence[Any] = ()
    """Records that are hard to encode: line feeds, quotes, separators, NUL, empty and missing values. With `keyed`, no
    two have one key."""
    misfits: Sequence[Any] = ()
    """Records of the type that the store would refuse."""

    def sink(self) -> Any:
        """The description of the sink; all descriptions of one test have one target."""
        raise NotImplementedError

    def record(self, number: int, version: int = 0) -> Any:
        """A record, different for each number and version; a keyed one has the number as its key."""
        raise NotImplementedError

    def read(self) -> list[Any]:
        """All records in the target, as another program sees them now; `check` has run before."""
        raise NotImplementedError

    def unavailable(self) -> AbstractContextManager[None]:
        """A context in which the store does not answer: it is stopped, or its port is closed. May be left out."""
        self.left_out("unavailable", "a store that is away")

    def cut(self) -> None:
        """Cut all open connections to the store, as a network may. May be left out."""
        self.left_out("cut", "a connection that is lost within a transaction")

    def backup(self) -> Callable[[], None]:
        """Copy the store with its ledger; returns a function that restores the copy. May be left out."""
        self.left_out("backup", "a store that is restored from a backup")

    def clean_up(self) -> None:
        """Let the store do its own cleaning: expiry, compaction, a restart. May be left out."""
        self.left_out("clean_up", "what the store's own cleaning leaves of the ledger")

    _lives = 0
    _checked = False

    @cached_property
    def _blocks(self) -> MemoryBlocks:
        return MemoryBlocks()

    def committer(self, pipeline: str = PIPELINE, sink: str = SINK) -> Committer:
        """A new committer, as in its own process; the target has been checked."""
        self.make_ready()
        return self._opened(pipeline, sink)

    def make_ready(self) -> None:
        """Check the target, once in a test, as a run does first."""
        if not self._checked:
            self._checked = True
            first = self._opened(PIPELINE, SINK)
            again(first.check)
            first.close()

    def _opened(self, pipeline: str, sink: str) -> Committer:
        context = CommitterContext(pipeline=pipeline, sink=sink, type=self.type, blocks=self._blocks)
        committer: Committer = self.sink().open_committer(context)
        self._to_close.append(committer)
        return committer

    def staged(
        self, rows: Sequence[Row], checkpoint: int, *, previous: int = 0, subtask: int = 0,
        pipeline: str = PIPELINE, sink: str = SINK,
    ) -> StoreCommittable:  # fmt: skip
        """The committable of *rows* from a new writer."""
        self.make_ready()
        self._lives += 1
        context = WriterContext(
            pipeline=pipeline, sink=sink, subtask=subtask, incarnation=self._lives, attempt=0, type=self.type, slots=1,
            clients=_Clients(), staging=MemoryStaging(self._blocks, sink, subtask, self._lives),
            prepared=_unasked, note=_unasked,
        )  # fmt: skip
        writer, encoder = self.sink().open_writer(context)
        writer.write(encoder.encode([self.record(*row) for row in rows]))
        writer.barrier(checkpoint)
        deadline = time.monotonic() + LIMIT_S
        while (flushed := writer.take_flushed(checkpoint)) is None:
            writer.poll(0.01)
            assert time.monotonic() < deadline, f"The writer has not flushed checkpoint {checkpoint}."
        assert flushed.staged is not None, "The writer gives no committable for an interval in which rows were written."
        committable: StoreCommittable = msgspec.structs.replace(flushed.staged.committable, previous=previous)
        return committable

    def seen(self, written: Sequence[Row], why: str, *, in_order: bool = True) -> None:
        """Fail with *why* unless readers see exactly *written*, if *in_order* in that order too."""
        __tracebackhide__ = True
        wanted = [self.record(*row) for row in (dict(written).items() if self.keyed else written)]
        visible = list(self.read())
        missing, added = _without(wanted, visible), _without(visible, wanted)
        if missing or added:
            raise AssertionError(f"{why}\nReaders miss {_few(missing)}; they see, and should not, {_few(added)}.")
        if self.ordered and in_order and visible != wanted:
            raise AssertionError(f"{why}\nReaders see all records, but in another order: {_few(visible)}.")


def again(action: Callable[[], T]) -> T:
    """The result of *action*, repeated while the store is unavailable, as the leader does."""
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            return action()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)  # noqa: TID251 - a store is asked again in real time


def works(action: Callable[[], T], why: str) -> T:
    """The result of *action*; *why* says what is wrong if it raises."""
    __tracebackhide__ = True
    try:
        return again(action)
    except Exception as error:
        raise AssertionError(f"{why}\nIt raised {_named(error)}.") from error


def known(ledger: Mapping[int, int]) -> dict[int, int]:
    """The checkpoints that a fence returned; a subtask without a row has 0."""
    return {subtask: checkpoint for subtask, checkpoint in ledger.items() if checkpoint}


def all_of(error: BaseException) -> str:
    """An error with its causes, as a log shows it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _without(records: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    left, rest = list(others), []
    for record in records:
        if record in left:
            left.remove(record)
        else:
            rest.append(record)
    return rest


def _few(records: Sequence[Any]) -> str:
    if not records:
        return "nothing"
    shown = ", ".join(map(repr, records[:3]))
    return f"{len(records)} ({shown}{', ...' if len(records) > 3 else ''})"


class Forked:
    """A process that runs *action* with a function that tells the parent that it is in the middle.

    A fork must not use its parent's connections, so it opens its own. It ends by `_exit` and never collects its
    parent's garbage: it closes nothing of its parent's, and waits for no thread that a fork does not have.
    """

    def __init__(self, action: Callable[[Callable[[], None]], object]) -> None:
        self._readable, writable = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads of the parent, which the child lacks
            self.pid = os.fork()
        if self.pid == 0:
            self._be_child(action, writable)
        os.close(writable)

    def _be_child(self, action: Callable[[Callable[[], None]], object], writable: int) -> None:
        gc.freeze()
        try:
            try:
                outcome = str(action(lambda: _tell(writable, "in the middle")))
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            _tell(writable, outcome)
        finally:
            os._exit(0)

    def next_line(self) -> str:
        """The next line: that it is in the middle, or what the action returned or raised."""
        line = b""
        while not line.endswith(b"\n"):
            waiting = select.poll()  # select() knows only the first 1,024 descriptors of a process
            waiting.register(self._readable, select.POLLIN)
            if not waiting.poll(1000 * LIMIT_S):
                raise TimeoutError(f"A process of the test has not ended within {LIMIT_S} s.")
            got = os.read(self._readable, 1)
            if not got:
                raise RuntimeError("A process of the test has died.")
            line += got
        return line.decode().rstrip("\n")

    def end(self) -> None:
        """Kill it by SIGKILL and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._readable)


def stand_still() -> None:
    """Wait until this process is killed."""
    while True:
        signal.pause()


def _tell(writable: int, text: str) -> None:
    os.write(writable, " ".join(text.split()).encode() + b"\n")
