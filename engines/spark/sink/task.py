"""A task of a write to Kafka: one transaction per attempt, flushed and left open for the driver's decision.

Invariants: no two attempts that a task is in at a time share a transactional id, and one is taken only while nobody has
a transaction open under it; the producer's id and epoch are read after its initialisation and before its first record;
a delivery error fails the task; the producer is dropped, never closed, for that would abort what the driver may decide.
A row of a decided job is not written again, but counted and hashed, so that the driver sees whether it is one of those
that were decided.

An id is `eo:<sinkId>:spark:<partition>:<incarnation>.0-<attempt>:<slot>`, where Spark counts the attempts of a task. It
is used again by a later job, once the one that used it is finalized, so that a stream does not leave ids behind with
every batch, which the broker remembers for a week. A task that runs again because what it wrote from was lost begins
with attempt 0 again, and takes another slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from threading import Thread
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactlyonce.checkpoint.records.committable import Precommit, TransactionalId
from exactlyonce.checkpoint.transactions.broker_answers import TransactionState
from exactlyonce.connectors.confluent import make_producer
from exactlyonce.connectors.kafka.client import connect
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.rows import rows
from exactlyonce.engines.spark.sink.tally import Tally, tally_of
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import SinkFailed

if TYPE_CHECKING:
    from pyarrow import RecordBatch

SINK = "spark"
"""The sink's name in transactional ids."""
ATTEMPT = "0"
"""Of all transactions that tasks write, before Spark's count; repairs have the next."""
SLOTS_ASKED = 4
SLOTS_MAX = 64
FREE = ("CompleteCommit", "CompleteAbort", "Dead")
INIT_TIMEOUT_S = 60.0
WAIT_S = 0.1
TUNING = {
    "partitioner": "murmur2_random",  # of Java's clients, hence of Spark's own Kafka sink
    "queue.buffering.max.messages": 200_000,
    "reconnect.backoff.ms": 20,  # half of it passes before the first connection: 15 ms instead of 55
}
"""Each may be set otherwise."""
BATCHES_AHEAD = 8
"""Taken from Spark while the producer is made."""


def write_task(
    options: SinkOptions,
    assignment: Assignment,
    job: Job,
    partition: int,
    attempt: int,
    batches: Iterable[RecordBatch],
) -> Flushed:
    """Write all of *batches*, a partition's, in one transaction, unless *job* is decided."""
    assignment.position.refuse(job, options)
    batches = (each for each in batches if each.num_rows)
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
    """A transaction under the first id that nobody is writing with."""
    config = options.client()
    transactions = _transactions(options, config)
    name = _free_id(transactions, options.sink_id, partition, assignment.incarnation, f"{ATTEMPT}-{attempt}")
    try:
        transaction = TaskTransaction(name, config, assignment.transaction_timeout_ms)
        transaction.initialise(options.topic)
    except KafkaException as error:
        raise SinkFailed(f"sink {options.sink_id!r}: no producer could be made: {error.args[0].str()}") from None
    state = transactions.describe([name])[name]
    if state is None or state.state != "Empty":
        raise SinkFailed(f"transaction {name} is {state.state if state else 'unknown'} right after its initialisation")
    transaction.begin(state)
    return transaction


def _free_id(transactions: Transactions, sink_id: str, partition: int, incarnation: int, attempt: str) -> str:
    """An id in use, or left open by a task that has failed, is the driver's to end: taking it would abort it."""
    for first in range(0, SLOTS_MAX, SLOTS_ASKED):
        slots = range(first, first + SLOTS_ASKED)
        names = [str(TransactionalId(sink_id, SINK, partition, incarnation, attempt, str(slot))) for slot in slots]
        for name, state in transactions.describe(names).items():
            if state is None or state.state in FREE:
                return name
    raise SinkFailed(f"sink {sink_id!r}: {SLOTS_MAX} runs of task {partition} have left transactions open")


_connected: dict[tuple[tuple[str, str], ...], Transactions] = {}


def _transactions(options: SinkOptions, config: ClientConfig) -> Transactions:
    """One connection for all tasks that this process runs, one after the other."""
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
        """Fence whoever had the id."""
        settings = self.config.confluent(
            {
                "transactional.id": self.name,
                "transaction.timeout.ms": self.timeout_ms,
                "delivery.report.only.error": True,
                "on_delivery": self._undelivered,
                "error_cb": self._failed,
            }
        )
        self._producer = make_producer({**TUNING, **settings})
        connect(self.producer, topic or None, INIT_TIMEOUT_S)
        self.producer.init_transactions(INIT_TIMEOUT_S)

    def begin(self, state: TransactionState) -> None:
        """It is ours as *state* says."""
        self.producer_id, self.epoch = state.producer_id, state.epoch
        self.producer.begin_transaction()

    def write(self, arguments: Iterable[tuple[Any, ...]]) -> None:
        """Produce rows; waits where the client's queue is full."""
        produce, records = self.producer.produce, 0
        row: tuple[Any, ...] = ("",)
        try:
            for row in arguments:
                while True:
                    try:
                        topic, value, key, *more = row
                        if more:  # the fifth that the client takes in place is what it calls on delivery
                            produce(topic, value, key, more[0], headers=more[1])
                        else:
                            produce(topic, value, key)
                        break
                    except BufferError:
                        self._wait()
                records += 1
        except KafkaException as error:
            where = " ".join(str(each) for each in (row[0], *row[3:4]))
            raise SinkFailed(f"transaction {self.name} cannot write to {where}: {error.args[0].str()}") from None
        self.records += records
        self.producer.poll(0)
        self._raise_error()

    def flush(self) -> None:
        """Return once the broker has every row; the client gives up at the transaction's timeout."""
        while len(self.producer):
            self.producer.flush(WAIT_S)
            self._raise_error()

    def drop(self) -> None:
        """Let go of the client, on a thread of its own: ending its threads takes milliseconds."""
        left, self._producer = [self._producer], None
        Thread(target=left.clear, daemon=True).start()

    def _wait(self) -> None:
        self.producer.poll(WAIT_S)
        self._raise_error()

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
