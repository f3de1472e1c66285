"""The target of a contract: the hooks of a subclass, and the steps that tests take.

A test has one target, empty at first, and any number of committers and stores for it, each as in its own process.
Records are named by (number, version); `seen` compares them with the result of `read`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.contract import Contract
from exactlyonce.testing.sink_contract.memory_blocks import MemoryBlocks, MemoryStaging

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
