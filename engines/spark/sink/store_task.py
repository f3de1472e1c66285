"""A task of a write to a store: rows are set aside, in blocks or as the store has it, for the driver's decision.

Invariants: what an attempt sets aside is named by its message alone, so that nobody ever knows of what a failed or a
speculative attempt has set aside, but whoever cleans; a row of a decided job is not written again, but counted and
hashed, as in `task`. A sink that delivers at least once is written to at once, by every attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.runtime.blocks import StagedBlocks, WorkerBlocks
from exactlyonce.engines.runtime.cut import flush
from exactlyonce.engines.runtime.steps import finish
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.tally import Tally, tally_of
from exactlyonce.engines.spark.sink.target import StoreTarget
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import InvariantViolation, RecordError, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import FlushedInterval, Opened, SinkWriter, WriterContext

if TYPE_CHECKING:
    from pyarrow import RecordBatch

WAIT_S = 0.05
POLL_INTERVAL_S = 1.0
BLOCKS_TIMEOUT_S = 120.0
STORE_PAUSE_S = 0.5

R = TypeVar("R")


def write_store_task(
    options: SinkOptions,
    assignment: Assignment,
    job: Job,
    partition: int,
    tried_before: bool,
    batches: Iterable[RecordBatch],
) -> Flushed:
    """Set aside all of *batches*, a partition's, unless *job* is decided."""
    assert options.target is not None
    assignment.position.refuse(job, options)
    records, tally = options.target.records(), Tally()
    flushed, checkpoint, attempt = FlushedInterval(), assignment.checkpoint, assignment.attempt
    batches = (each for each in batches if each.num_rows)
    first = next(batches, None)
    writes = first is not None and not assignment.position.holds(job)
    batches = chain([] if first is None else [first], batches)
    if writes:
        with _opened(options, options.target, assignment, partition) as writing:
            for batch in _as_they_come(batches, writing.poll):
                before = records.taken
                values, made = records.take(batch)
                try:
                    writing.write(made)
                except _Refused as refused:
                    raise _row_error(options, job, partition, before + refused.place, refused.error) from None
                tally += tally_of(values)
            flushed = writing.flush(checkpoint)
        hit("worker-flushed")
    for batch in batches:  # those that were not written
        tally += tally_of(records.take(batch)[0])
    return Flushed(
        assignment.incarnation, job, None, tally=tally, checkpoint=checkpoint, staged=flushed.staged,
        blocks=flushed.written, attempt=attempt, wrote=writes, tried_before=tried_before,
    )  # fmt: skip


def _as_they_come(batches: Iterator[RecordBatch], poll: Callable[[], object]) -> Iterator[RecordBatch]:
    """*batches*, which may take long to compute; *poll* is called meanwhile, now and then: a writer that is silent for
    minutes counts as dead, and its store would end what it has begun."""
    with ThreadPoolExecutor(1, "batches") as executor:
        while True:
            coming = executor.submit(next, batches, None)
            while wait([coming], POLL_INTERVAL_S).not_done:
                poll()
            batch = coming.result()
            if batch is None:
                return
            yield batch


def _row_error(options: SinkOptions, job: Job, partition: int, place: int, error: Exception) -> RecordError:
    return RecordError(
        f"Sink {options.sink_id!r}: row {place + 1} of task {partition} of {job} does not fit: {error}. Filter such "
        f"rows, cast the column, or change it in the store, and start it again."
    )


class _Refused(Exception):
    """A row cannot be encoded."""

    def __init__(self, place: int, error: Exception) -> None:
        self.place, self.error = place, error


@dataclass
class _Blocks:
    """The blocks of a task, which connects with the first of them: not every store needs any."""

    config: ClientConfig
    assignment: Assignment
    sink: str
    subtask: int
    _worker: WorkerBlocks | None = None

    @property
    def pending(self) -> int:
        """See `BlockStaging`."""
        return 0 if self._worker is None else self._worker.pending

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        """See `BlockStaging`."""
        if self._worker is None:
            given = self.assignment
            storage = block_storage(self.config, given.topic, TOPIC)
            self._worker = WorkerBlocks(storage.begin(given.incarnation, given.attempt))
        return StagedBlocks(self._worker, self.sink, self.subtask).write(kind, checkpoint, body)

    def wait(self) -> None:
        """A moment, in which some get where they belong."""
        if self._worker is None:
            Event().wait(WAIT_S)
        else:
            self._worker.attempt.poll(WAIT_S)

    def settle(self) -> None:
        """Until all have got where they belong."""
        if self._worker is not None:
            self._worker.attempt.wait(BLOCKS_TIMEOUT_S)


@dataclass(frozen=True)
class _Writing:
    """A sink's writer, which waits where it must."""

    opened: Opened
    blocks: _Blocks

    def write(self, records: list[Any]) -> None:
        """Hand over records; `_Refused` names the first that does not fit."""
        try:
            outputs = self.opened.encoder.encode(records)
        except (TypeError, ValueError) as error:
            raise self._refused(records, error) from None
        writer = self.opened.writer
        writer.write(outputs)
        writer.poll()
        while not writer.room:
            self.blocks.wait()
            writer.poll()

    def poll(self) -> None:
        """Go on with what is under way, and show that it is not given up."""
        self.opened.writer.poll()

    def _refused(self, records: list[Any], error: Exception) -> _Refused:
        """Encoding has no effects, so that it is tried again one by one."""
        for place, record in enumerate(records):
            try:
                self.opened.encoder.encode([record])
            except (TypeError, ValueError) as found:
                return _Refused(place, found)
        return _Refused(0, error)

    def flush(self, checkpoint: int) -> FlushedInterval:
        """All that was written is where no crash of this process can take it away."""
        writer: SinkWriter = self.opened.writer
        writer.barrier(checkpoint)

        def wait() -> None:
            self.blocks.settle()
            writer.poll(WAIT_S)

        return finish(flush(writer, checkpoint), wait)


@contextmanager
def _opened(options: SinkOptions, target: StoreTarget, assignment: Assignment, partition: int) -> Iterator[_Writing]:
    blocks = _Blocks(options.client(), assignment, options.sink_id, partition)
    context = WriterContext(
        pipeline=options.sink_id,
        sink=options.sink_id,
        subtask=partition,
        incarnation=assignment.incarnation,
        attempt=assignment.attempt,
        type=target.type,
        slots=0,
        clients=_Clients(),
        staging=blocks,
        prepared=_refuse,
        note=_refuse,
    )
    opened: Opened = _persistently(options, lambda: target.sink.open_writer(context))
    try:
        yield _Writing(opened, blocks)
    finally:
        opened.writer.abandon()


def _persistently(options: SinkOptions, asked: Callable[[], R]) -> R:
    """The answer of *asked*, asked again while the store is away."""
    clock = SystemClock()
    deadline_ms = clock.monotonic_ms() + options.store_timeout_ms
    while True:
        try:
            return asked()
        except StoreError as error:
            raise StoreError(f"Sink {options.sink_id!r}: {error}") from error
        except StoreUnavailable as error:
            if clock.monotonic_ms() >= deadline_ms:
                raise StoreUnavailable(
                    f"The store of sink {options.sink_id!r} has not answered for {options.store_timeout_ms / 1000:.0f} "
                    f"s (storeTimeout): {error} Nothing is lost: start it again once it is there."
                ) from error
        Event().wait(STORE_PAUSE_S)


@dataclass(frozen=True)
class _Clients:
    """Of a sink that needs no transaction of Kafka."""

    clock: SystemClock = field(default_factory=SystemClock)

    def producers(self, topic: str) -> Any:
        """None are needed."""
        _refuse(topic)


def _refuse(said: str) -> None:
    raise InvariantViolation(f"a store's sink opens no transaction of Kafka, and gives up no record: {said}")
