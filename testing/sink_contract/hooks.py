"""The target of a contract: what a subclass says of its sink, and what the tests do with it.

A test has one target, which is empty when it begins, and any number of committers and stores for it, each as if in a
process of its own. What is written is told by (number, version); `seen` compares it with what `read` gives.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.committer import Committer, CommitterContext
from exactlyonce.sinks.writer import WriterContext
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.sink_contract.memory_blocks import MemoryBlocks, MemoryStaging

PIPELINE, SINK, ORIGIN = "shop", "orders", "topic-1"
AWAY_S = 60.0
"""For how long a store is asked again that says that it is away."""
T = TypeVar("T")
Row = tuple[int, int]
"""Number and version, of which `record` makes a record."""


class _Clients:
    """Of a writer that needs none."""

    clock = SimulatedClock()

    def producers(self, topic: str) -> Any:
        """A sink with a committer writes to no topic."""
        raise NotImplementedError(f"a producer for {topic}")


def _unasked(transactional_id: str) -> None:
    raise NotImplementedError(f"a grant for {transactional_id}")


class ContractHooks:
    """What a subclass says; the first four it must."""

    type: Any
    """Of the records."""
    keyed = False
    """Whether of two records with one number only the last written is left."""
    ordered = False
    """Whether `read` gives records in the order in which they were written."""
    processes = True
    """Whether other processes reach the target."""
    secret: str | None = None
    """What must show nowhere: the password in the sink's dsn."""
    awkward: Sequence[Any] = ()
    """Records with all that is hard to write down: line feeds, quotes, separators, NUL, empty and missing values. With
    `keyed`, no two with one key."""
    misfits: Sequence[Any] = ()
    """Records of the type, none of which the store would take."""

    def sink(self) -> Any:
        """The description of the sink; all that a test makes have one target."""
        raise NotImplementedError

    def record(self, number: int, version: int = 0) -> Any:
        """A record, another for each number and version; a keyed one has the number as its key."""
        raise NotImplementedError

    def read(self) -> list[Any]:
        """All records in the target, as another program sees them now; it has been checked before."""
        raise NotImplementedError

    def unavailable(self) -> AbstractContextManager[None]:
        """Within, the store does not answer: it is stopped, or its port is closed. May be left out."""
        self.left_out("unavailable", "a store that is away")

    def cut(self) -> None:
        """Cut all connections to the store that are open now, as a network may. May be left out."""
        self.left_out("cut", "a connection that is lost within a transaction")

    def backup(self) -> Callable[[], None]:
        """Note all that the store holds, its ledger too; -> brings the store back to it. May be left out."""
        self.left_out("backup", "a store that is restored from a backup")

    def clean_up(self) -> None:
        """Let the store do all that it ever does by itself: expiry, compaction, a restart. May be left out."""
        self.left_out("clean_up", "what the store's own cleaning leaves of the ledger")

    @staticmethod
    def left_out(hook: str, what: str) -> NoReturn:
        """Skip the test that needs *hook*."""
        pytest.skip(f"{what}: write `{hook}` in the test class, and it is tested")

    @pytest.fixture(autouse=True)
    def _life(self) -> Iterator[None]:
        self._blocks = MemoryBlocks()
        self._lives = 0
        self._checked = False
        self._made: list[Any] = []
        yield
        for each in self._made:
            each.close()

    def committer(self, pipeline: str = PIPELINE, sink: str = SINK) -> Committer:
        """A new one, as in a process of its own; the first of a test has looked at the target before."""
        self.make_ready()
        return self._opened(pipeline, sink)

    def make_ready(self) -> None:
        """Let the target be checked, once in a test, as a run does before anything else."""
        if not self._checked:
            self._checked = True
            first = self._opened(PIPELINE, SINK)
            again(first.check)
            first.close()

    def _opened(self, pipeline: str, sink: str) -> Committer:
        context = CommitterContext(pipeline=pipeline, sink=sink, type=self.type, blocks=self._blocks)
        committer: Committer = self.sink().open_committer(context)
        self._made.append(committer)
        return committer

    def staged(
        self, rows: Sequence[Row], checkpoint: int, *, previous: int = 0, subtask: int = 0,
        pipeline: str = PIPELINE, sink: str = SINK,
    ) -> StoreCommittable:  # fmt: skip
        """The committable of *rows*, from a writer that wrote nothing else."""
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
        """Fail, saying *why*, unless readers see exactly *written*; where it is *in_order*, in that order too."""
        __tracebackhide__ = True
        wanted = [self.record(*row) for row in (dict(written).items() if self.keyed else written)]
        found = list(self.read())
        missing, added = _without(wanted, found), _without(found, wanted)
        if missing or added:
            raise AssertionError(f"{why}\nReaders miss {_few(missing)}; they see, and should not, {_few(added)}.")
        if self.ordered and in_order and found != wanted:
            raise AssertionError(f"{why}\nReaders see all records, but in another order: {_few(found)}.")


def again(action: Callable[[], T]) -> T:
    """What *action* returns, asked again while the store is away, as the leader does."""
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            return action()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)  # noqa: TID251 - a store is asked again in real time


def works(action: Callable[[], T], why: str) -> T:
    """What *action* returns; *why* says what is wrong where it raises."""
    __tracebackhide__ = True
    try:
        return again(action)
    except Exception as error:
        raise AssertionError(f"{why}\nIt raised {_named(error)}.") from error


def known(ledger: Mapping[int, int]) -> dict[int, int]:
    """What a fence has returned; a subtask without a row has 0."""
    return {subtask: checkpoint for subtask, checkpoint in ledger.items() if checkpoint}


def all_of(error: BaseException) -> str:
    """An error with all that led to it, as a log shows it."""
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
