"""A task of a write to Kafka: one transaction per attempt, flushed and left open for the driver's decision.

Invariants: concurrent attempts of a task never share a transactional id, and an id is taken only while no transaction
is open under it; the producer's id and epoch are read between its initialisation and its first record; a delivery error
fails the task; the producer is dropped, never closed, because that would abort its transaction. Rows of a decided job
are counted and hashed instead of written. A row is written whole or is an error, with the columns of Spark's own sink.

An id is `eo:<sinkId>:spark:<partition>:<incarnation>.0-<attempt>:<slot>`, with Spark's count of the task's attempts. A
later job uses it again, once its last one is finalized. A task that Spark runs anew, as attempt 0, gets another slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from threading import Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactlyonce.checkpoint.records.manifest import Precommit, TransactionalId
from exactlyonce.checkpoint.requests import TransactionState
from exactlyonce.connectors.confluent import make_producer
from exactlyonce.connectors.kafka.client import connect
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import DEFAULT, SETTING
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job, Tally, tally_of
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import SinkFailed

if TYPE_CHECKING:
    from pyarrow import RecordBatch

SINK = "spark"
"""The sink's name in transactional ids."""
ATTEMPT = "0"
"""The attempt of all transactions of tasks, before Spark's count; repairs have the next."""
SLOTS_ASKED = 4
SLOTS_MAX = 64
FREE = ("CompleteCommit", "CompleteAbort", "Dead")
INIT_TIMEOUT_S = 60.0
WAIT_S = 0.1
TUNING = {"queue.buffering.max.messages": 200_000}
"""Defaults of the client, which the user may change."""
BY_KEY = -1
"""The client chooses the partition: by the key, else any."""
BATCHES_AHEAD = 8
"""Batches taken from Spark while the producer is made."""


def write_task(
    options: SinkOptions,
    assignment: Assignment,
    job: Job,
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
        return Flushed(assignment.incarnation, job, None, tally=tally, checkpoint=assignment.checkpoint)
    opened_ms, began_ms = SystemClock().now_ms(), SystemClock().monotonic_ms()
    with ThreadPoolExecutor(1, "producer") as executor:
        beginning = executor.submit(_begin, options, assignment, partition, attempt)
        while not beginning.done() and len(ahead) < BATCHES_AHEAD and (batch := next(batches, None)) is not None:
            ahead.append(batch)
        transaction = beginning.result()
    for batch in chain(ahead, batches):
        written = list(rows(batch, options.columns, options.topic))
        transaction.write(written)
        tally += tally_of(written)
    transaction.flush()
    precommit = Precommit(
        transactional_id=transaction.name,
        producer_id=transaction.producer_id,
        epoch=transaction.epoch,
        sink=SINK,
        subtask=partition,
        checkpoint=assignment.checkpoint,
        records=transaction.records,
        open_ms=SystemClock().monotonic_ms() - began_ms,
    )
    transaction.drop()
    hit("worker-flushed")
    return Flushed(assignment.incarnation, job, precommit, opened_ms, tally, assignment.checkpoint)


def _begin(options: SinkOptions, assignment: Assignment, partition: int, attempt: int) -> TaskTransaction:
    """A transaction under the first free id."""
    config = options.client()
    transactions = _transactions(options, config)
    name = _free_id(transactions, options.sink_id, partition, assignment.incarnation, f"{ATTEMPT}-{attempt}")
    try:
        transaction = TaskTransaction(name, config, assignment.transaction_timeout_ms, assignment.partitioner)
        transaction.initialise(options.topic)
    except KafkaException as error:
        raise SinkFailed(f"sink {options.sink_id!r}: no producer could be made: {error.args[0].str()}") from None
    state = transactions.describe([name])[name]
    if state is None or state.state != "Empty":
        raise SinkFailed(f"transaction {name} is {state.state if state else 'unknown'} right after its initialisation")
    transaction.begin(state)
    return transaction


def _free_id(transactions: Transactions, sink_id: str, partition: int, incarnation: int, attempt: str) -> str:
    """An id without open transaction: the driver ends those of failed tasks, and taking their id would abort them."""
    for first in range(0, SLOTS_MAX, SLOTS_ASKED):
        slots = range(first, first + SLOTS_ASKED)
        names = [str(TransactionalId(sink_id, SINK, partition, incarnation, attempt, str(slot))) for slot in slots]
        for name, state in transactions.describe(names).items():
            if state is None or state.state in FREE:
                return name
    raise SinkFailed(f"sink {sink_id!r}: {SLOTS_MAX} runs of task {partition} have left transactions open")


_connected: dict[tuple[tuple[str, str], ...], Transactions] = {}


def _transactions(options: SinkOptions, config: ClientConfig) -> Transactions:
    """The connection that successive tasks of this process share."""
    key = tuple(sorted(options.client_settings.items()))
    if key not in _connected:
        _connected[key] = Transactions(config)
    return _connected[key]


@dataclass
class TaskTransaction:
    """A producer that writes one transaction."""

    name: str
    config: ClientConfig = field(repr=False)
    timeout_ms: int
    partitioner: str = DEFAULT
    producer_id: int = -1
    epoch: int = -1
    records: int = 0
    _error: str = ""
    _producer: Producer | None = None

    @property
    def producer(self) -> Producer:
        """The client, until it is dropped."""
        assert self._producer is not None
        return self._producer

    def initialise(self, topic: str) -> None:
        """Fence older producers of the id."""
        settings = self.config.confluent(
            {
                "transactional.id": self.name,
                "transaction.timeout.ms": self.timeout_ms,
                "delivery.report.only.error": True,
                "on_delivery": self._undelivered,
                "error_cb": self._failed,
                SETTING: self.partitioner,
            }
        )
        self._producer = make_producer({**TUNING, **settings})
        connect(self.producer, topic or None, INIT_TIMEOUT_S)
        self.producer.init_transactions(INIT_TIMEOUT_S)

    def begin(self, state: TransactionState) -> None:
        """Begin; *state* has our producer id and epoch."""
        self.producer_id, self.epoch = state.producer_id, state.epoch
        self.producer.begin_transaction()

    def write(self, arguments: Iterable[tuple[Any, ...]]) -> None:
        """Produce rows; wait while the client's queue is full."""
        produce, records = self.producer.produce, 0
        row: tuple[Any, ...] = ("",)
        try:
            for row in arguments:
                while True:
                    try:
                        topic, value, key, *more = row
                        if more:  # the client's fifth positional argument is a callback
                            produce(topic, value, key, more[0], headers=more[1])
                        else:
                            produce(topic, value, key)
                        break
                    except BufferError:
                        self.producer.poll(WAIT_S)
                        self._raise_error()
                records += 1
        except KafkaException as error:
            where = " ".join(map(str, (row[0], *row[3:4])))
            raise SinkFailed(f"transaction {self.name} cannot write to {where}: {error.args[0].str()}") from None
        self.records += records
        self.producer.poll(0)
        self._raise_error()

    def flush(self) -> None:
        """Return once the broker has every row; the client fails at the transaction's timeout."""
        while len(self.producer):
            self.producer.flush(WAIT_S)
            self._raise_error()

    def drop(self) -> None:
        """Release the client, on a thread of its own, because it takes milliseconds to end its threads."""
        dropped, self._producer = [self._producer], None
        Thread(target=dropped.clear, daemon=True).start()

    def _raise_error(self) -> None:
        if self._error:
            raise SinkFailed(f"transaction {self.name}: {self._error}")

    def _undelivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            where = f"{message.topic()}[{message.partition()}]"
            self._error = self._error or f"a row for {where} was not delivered: {error.str()}"

    def _failed(self, error: KafkaError) -> None:
        if error.fatal():
            self._error = self._error or f"the producer failed: {error.str()}"


def rows(batch: RecordBatch, columns: Mapping[str, int], topic: str) -> Iterator[tuple[Any, ...]]:
    """(topic, value, key, partition, headers) of every row; *columns* are the existing ones."""
    lists = {name: _column(batch, name, place).to_pylist() for name, place in columns.items()}
    values = lists["value"]
    keys = lists.get("key") or repeat(None)
    topics = repeat(topic) if topic else _named(lists["topic"])
    partitions = [BY_KEY if p is None else p for p in lists["partition"]] if "partition" in lists else None
    headers = [_pairs(row_headers) for row_headers in lists["headers"]] if "headers" in lists else None
    if partitions is None and headers is None:
        return zip(topics, values, keys)  # noqa: B905 - topics and keys may be endless
    return zip(topics, values, keys, partitions or repeat(BY_KEY), headers or repeat([]))  # noqa: B905 - so may these


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
