"""A task of a write, to Kafka or to a store: its rows wait for the driver's decision.

Invariants: rows of a decided job are counted and hashed instead of written. Only an attempt's message names its output.

To Kafka, each attempt has one transaction, flushed and left open. Concurrent attempts of a task do not share a
transactional id, and an id is taken only while no transaction is open under it: should two that Spark both calls
attempt 0 look at the same moment, one's transaction is aborted, and it fails. A row is written whole or is an error,
with the columns of Spark's own sink. An id is `eo:<sinkId>:spark:<partition>:<incarnation>.0-<attempt>:<slot>`, with
Spark's count of the task's attempts. A later job uses it again, once its last one is finalized. A task that Spark runs
anew, as attempt 0, gets another slot.

To a store, rows are staged in blocks. Blocks of failed or speculative attempts are only ever cleaned. Every attempt
writes at once to a sink that delivers at least once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from exactlyonce.checkpoint.block_storage import Ticket
from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import TopicInfo, TransactionalId
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import TxnState
from exactlyonce.connectors.confluent import ANY_PARTITION
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import DEFAULT
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.runtime.cut import StagedBlocks, WorkerBlocks, finish, flush
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Position, SparkJob, Tally, tally_of
from exactlyonce.engines.spark.sink.target import StoreTarget
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import RecordError, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.retries import OF_STORE, retried
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import (
    FlushedInterval,
    Opened,
    SinkFailed,
    SinkWriter,
    WaitingWriter,
    WriterContext,
    opens_none,
)

if TYPE_CHECKING:
    from pyarrow import RecordBatch

SINK = "spark"
"""The sink's name in transactional ids."""
ATTEMPT = "0"
"""The attempt of all transactions of tasks, before Spark's count; repairs have the next."""
SLOTS_ASKED = 4
SLOTS_MAX = 64
BATCHES_AHEAD = 8
"""Batches taken from Spark while the producer is made."""
WAIT_S = 0.05
POLL_INTERVAL_S = 1.0
BLOCKS_TIMEOUT_S = 120.0

R = TypeVar("R")


class Assignment(msgspec.Struct, frozen=True):
    """The driver's message to the tasks of a job, before it begins."""

    incarnation: int
    checkpoint: int
    """The job's number, if it is decided."""
    position: Position
    transaction_timeout_ms: int
    attempt: int
    """The attempt to write to a store; it grows with every assignment of the incarnation."""
    topic: TopicInfo
    """The sink's checkpoint topic, which may hold rows for a store."""
    partitioner: str = DEFAULT
    """The partitioner of rows for Kafka."""


class Flushed(msgspec.Struct, frozen=True):
    """A task's message to the driver."""

    incarnation: int
    job: SparkJob
    ack: Ack
    """Its output, if it has any: a transaction, or rows that are staged for a store."""
    tally: Tally = Tally()
    """The tally of the task's rows, written or not."""
    opened_ms: int = 0
    """The transaction's beginning, by the task's clock."""
    attempt: int = 0
    wrote: bool = False
    """Whether rows wait for the decision, or are in a store."""
    tried_before: bool = False
    """Whether other attempts of the task may have staged rows, too."""


# --- to Kafka -------------------------------------------------------------------------------------------------------


def write_task(
    options: SinkOptions,
    assignment: Assignment,
    job: SparkJob,
    partition: int,
    attempt: int,
    batches: Iterable[RecordBatch],
) -> Flushed:
    """Write *batches* of a partition in one transaction, unless *job* is decided."""
    assignment.position.refuse(job, options)
    batches = (batch for batch in batches if batch.num_rows)
    ahead, tally = list(islice(batches, 1)), Tally()
    if not ahead or assignment.position.holds(job):
        for batch in chain(ahead, batches):
            tally += tally_of(rows(batch, options.columns, options.topic))
        return Flushed(assignment.incarnation, job, Ack(SINK, partition, assignment.checkpoint), tally)
    opened_ms = SystemClock().now_ms()
    with ThreadPoolExecutor(1, "producer") as executor:
        beginning = executor.submit(_begun, options, assignment, partition, attempt)
        while not beginning.done() and len(ahead) < BATCHES_AHEAD and (batch := next(batches, None)) is not None:
            ahead.append(batch)
        transaction = beginning.result()
    for batch in chain(ahead, batches):
        written = list(rows(batch, options.columns, options.topic))
        for topic, outputs in outputs_of(written):
            transaction.write(topic, outputs)
        tally += tally_of(written)
    transaction.flush()
    precommit = transaction.precommit(SINK, partition, assignment.checkpoint, SystemClock().monotonic_ms())
    transaction.drop()
    hit("worker-flushed")
    ack = Ack(SINK, partition, assignment.checkpoint, precommits=(precommit,))
    return Flushed(assignment.incarnation, job, ack, tally, opened_ms, wrote=True)


def _begun(options: SinkOptions, assignment: Assignment, partition: int, attempt: int) -> OpenTransaction:
    """A transaction under the first free id."""
    config, began_ms = options.client(), SystemClock().monotonic_ms()
    transactions = _transactions(options, config)
    return OpenTransaction.begun(
        config,
        _free_id(transactions, options.sink_id, partition, assignment.incarnation, f"{ATTEMPT}-{attempt}"),
        transactions,
        timeout_ms=assignment.transaction_timeout_ms,
        topic=options.topic,
        partitioner=assignment.partitioner,
        opened_ms=began_ms,
    )


def _free_id(transactions: Transactions, sink_id: str, partition: int, incarnation: int, attempt: str) -> str:
    """An id without open transaction: the driver ends those of failed tasks, and taking their id would abort them."""
    for first in range(0, SLOTS_MAX, SLOTS_ASKED):
        slots = range(first, first + SLOTS_ASKED)
        names = [str(TransactionalId(sink_id, SINK, partition, incarnation, attempt, str(slot))) for slot in slots]
        for name, state in transactions.describe(names).items():
            if state is None or state.state in TxnState.ENDED:
                return name
    raise SinkFailed(f"sink {sink_id!r}: {SLOTS_MAX} runs of task {partition} have left transactions open")


_connected: dict[tuple[tuple[str, str], ...], Transactions] = {}


def _transactions(options: SinkOptions, config: ClientConfig) -> Transactions:
    """The connection that successive tasks of this process share."""
    key = tuple(sorted(options.client_settings.items()))
    if key not in _connected:
        _connected[key] = Transactions(config)
    return _connected[key]


def outputs_of(rows: Sequence[tuple[Any, ...]]) -> Iterator[tuple[str, Outputs]]:
    """The topics of *rows*, as `rows` gives them, each with its rows in their order."""
    topics = {row[0] for row in rows}
    for topic in topics:
        own = rows if len(topics) == 1 else [row for row in rows if row[0] == topic]
        _, values, keys, *more = zip(*own, strict=True)
        partitions, headers = more or (None, None)
        yield topic, Outputs(values, keys, headers, partitions=partitions)


def rows(batch: RecordBatch, columns: Mapping[str, int], topic: str) -> Iterator[tuple[Any, ...]]:
    """(topic, value, key, partition, headers) of every row; *columns* are the existing ones."""
    lists = {name: _column(batch, name, place).to_pylist() for name, place in columns.items()}
    values = lists["value"]
    keys = lists.get("key") or repeat(None)
    topics = repeat(topic) if topic else _named(lists["topic"])
    partitions = [ANY_PARTITION if p is None else p for p in lists["partition"]] if "partition" in lists else None
    headers = [_pairs(row_headers) for row_headers in lists["headers"]] if "headers" in lists else None
    if partitions is None and headers is None:
        return zip(topics, values, keys)  # noqa: B905 - topics and keys may be endless
    return zip(topics, values, keys, partitions or repeat(ANY_PARTITION), headers or repeat([]))  # noqa: B905 - so may these


def _column(batch: RecordBatch, name: str, place: int) -> pa.Array:
    """The column, with strings as bytes: Arrow has these, and a producer would encode them again."""
    column = batch.column(place)
    if name in ("value", "key") and pa.types.is_string(column.type):
        return column.cast(pa.binary())
    if name in ("value", "key") and pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column


def _named(topics: list[str | None]) -> list[str | None]:
    if None in topics:
        raise RecordError(
            f"Row {topics.index(None) + 1} of a batch has no topic. Set the option topic, or fill the column."
        )
    return topics


def _pairs(headers: list[Mapping[str, Any] | None] | None) -> list[tuple[str, bytes | None]]:
    pairs = []
    for header in headers or ():
        if header is None or header["key"] is None:
            raise RecordError(
                "A header of a row is null, or its key is: a header has a name. Leave it out of the array."
            )
        pairs.append((header["key"], header["value"]))
    return pairs


# --- to a store -----------------------------------------------------------------------------------------------------


def write_store_task(
    options: SinkOptions,
    assignment: Assignment,
    job: SparkJob,
    partition: int,
    tried_before: bool,
    batches: Iterable[RecordBatch],
) -> Flushed:
    """Stage *batches* of a partition, unless *job* is decided."""
    assert options.target is not None
    assignment.position.refuse(job, options)
    records, tally = options.target.records(), Tally()
    flushed = FlushedInterval()
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
            flushed = writing.flush(assignment.checkpoint)
        hit("worker-flushed")
    for batch in batches:  # empty if they were written
        tally += tally_of(records.take(batch)[0])
    ack = Ack(
        SINK, partition, assignment.checkpoint, written=flushed.written,
        staged=() if flushed.staged is None else (flushed.staged,),
    )  # fmt: skip
    return Flushed(
        assignment.incarnation, job, ack, tally, attempt=assignment.attempt, wrote=writes, tried_before=tried_before
    )


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
        WaitingWriter(self.opened.writer, self.blocks.wait).write(outputs)

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
    deadline_s = time.monotonic() + options.store_timeout_ms / 1000
    try:
        return retried(ask, StoreUnavailable, OF_STORE, deadline_s, clock=time.monotonic, sleep=Event().wait)
    except StoreError as error:
        raise StoreError(f"Sink {options.sink_id!r}: {error}") from error
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"The store of sink {options.sink_id!r} has not answered for {options.store_timeout_ms / 1000:.0f} s "
            f"(storeTimeout): {error.what} Nothing is lost: start it again once it is there."
        ) from error


@dataclass(frozen=True)
class _Clients:
    """The clients of a sink that needs no transaction of Kafka."""

    clock: SystemClock = field(default_factory=SystemClock)

    def producers(self, topic: str, partitioner: str | None) -> Any:
        opens_none(topic)
