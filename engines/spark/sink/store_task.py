"""A task of a write to a store: rows are staged, in blocks or in the store, for the driver's decision.

Invariants: only an attempt's message names its staged rows, so those of failed or speculative attempts are only ever
cleaned; rows of a decided job are counted and hashed instead of written, as in `task`. Every attempt writes at once to
a sink that delivers at least once.
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
from exactlyonce.engines.spark.sink.position import Job, Tally, tally_of
from exactlyonce.engines.spark.sink.target import StoreTarget
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import RecordError, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import FlushedInterval, Opened, SinkWriter, WriterContext, opens_none

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
    """Stage *batches* of a partition, unless *job* is decided."""
    assert options.target is not None
    assignment.position.refuse(job, options)
    records, tally = options.target.records(), Tally()
    flushed, checkpoint = FlushedInterval(), assignment.checkpoint
    batches = (batch for batch in batches if batch.num_rows)
    first = next(batches, None)
    writes = first is not None and not assignment.position.holds(job)
    batches = chain([] if first is None else [first], batches)
    if writes:
        with _opened(options, options.target, assignment, partition) as writing:
            for batch in _polling(batches, writing.opened.writer.poll):
                before = records.taken
                values, batch_records = records.take(batch)
                try:
                    writing.write(batch_records)
                except _Refused as refused:
                    raise RecordError(
                        f"Sink {options.sink_id!r}: row {before + refused.place + 1} of task {partition} of {job} does "
                        f"not fit: {refused.error}. Filter such rows, cast the column, or change it in the store, and "
                        f"start it again."
                    ) from None
                tally += tally_of(values)
            flushed = writing.flush(checkpoint)
        hit("worker-flushed")
    for batch in batches:  # empty if they were written
        tally += tally_of(records.take(batch)[0])
    return Flushed(
        assignment.incarnation, job, None, tally=tally, checkpoint=checkpoint, staged=flushed.staged,
        blocks=flushed.written, attempt=assignment.attempt, wrote=writes, tried_before=tried_before,
    )  # fmt: skip


def _polling(batches: Iterator[RecordBatch], poll: Callable[[], object]) -> Iterator[RecordBatch]:
    """*batches*, which may take long to compute; *poll* is called meanwhile: a silent writer counts as dead."""
    with ThreadPoolExecutor(1, "batches") as executor:
        while True:
            coming = executor.submit(next, batches, None)
            while wait([coming], POLL_INTERVAL_S).not_done:
                poll()
            batch = coming.result()
            if batch is None:
                return
            yield batch


class _Refused(Exception):
    """A row cannot be encoded."""

    def __init__(self, place: int, error: Exception) -> None:
        self.place, self.error = place, error


@dataclass
class _Blocks:
    """The `BlockStaging` of a task, which connects with the first block, because not every store needs any."""

    config: ClientConfig
    assignment: Assignment
    sink: str
    subtask: int
    _worker: WorkerBlocks | None = None

    @property
    def pending(self) -> int:
        return 0 if self._worker is None else self._worker.pending

    def write(self, kind: str, checkpoint: int, body: bytes) -> Ticket:
        if self._worker is None:
            assignment = self.assignment
            storage = block_storage(self.config, assignment.topic, TOPIC)
            self._worker = WorkerBlocks(storage.begin(assignment.incarnation, assignment.attempt))
        return StagedBlocks(self._worker, self.sink, self.subtask).write(kind, checkpoint, body)

    def wait(self) -> None:
        """Wait a moment for some blocks to become durable."""
        if self._worker is None:
            Event().wait(WAIT_S)
        else:
            self._worker.attempt.poll(WAIT_S)

    def settle(self) -> None:
        """Wait until all blocks are durable."""
        if self._worker is not None:
            self._worker.attempt.wait(BLOCKS_TIMEOUT_S)


@dataclass(frozen=True)
class _Writing:
    """A sink's writer that waits while it has no room."""

    opened: Opened
    blocks: _Blocks

    def write(self, records: list[Any]) -> None:
        """Write records; `_Refused` names the first that does not fit."""
        try:
            outputs = self.opened.encoder.encode(records)
        except (TypeError, ValueError) as error:
            raise self._first_refused(records, error) from None
        writer = self.opened.writer
        writer.write(outputs)
        writer.poll()
        while not writer.room:
            self.blocks.wait()
            writer.poll()

    def _first_refused(self, records: list[Any], error: Exception) -> _Refused:
        """The first record that cannot be encoded: encoding has no effects, so it is repeated one by one."""
        for place, record in enumerate(records):
            try:
                self.opened.encoder.encode([record])
            except (TypeError, ValueError) as record_error:
                return _Refused(place, record_error)
        return _Refused(0, error)

    def flush(self, checkpoint: int) -> FlushedInterval:
        """Make all written records durable."""
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
        clients=_Clients(),
        staging=blocks,
    )
    opened: Opened = _persistently(options, lambda: target.sink.open_writer(context))
    try:
        yield _Writing(opened, blocks)
    finally:
        opened.writer.abandon()


def _persistently(options: SinkOptions, ask: Callable[[], R]) -> R:
    """The answer of *ask*, which is retried while the store is away."""
    clock = SystemClock()
    deadline_ms = clock.monotonic_ms() + options.store_timeout_ms
    while True:
        try:
            return ask()
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
    """The clients of a sink that needs no transaction of Kafka."""

    clock: SystemClock = field(default_factory=SystemClock)

    def producers(self, topic: str, partitioner: str | None) -> Any:
        opens_none(topic)
