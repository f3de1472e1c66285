"""A task of a write to Kafka: one transaction per attempt, flushed and left open for the driver's decision.

Invariants: concurrent attempts of a task never share a transactional id, and an id is taken only while no transaction
is open under it; the producer's id and epoch are read between its initialisation and its first record; a delivery error
fails the task; the producer is dropped, never closed, because that would abort its transaction. Rows of a decided job
are counted and hashed instead of written. A row is written whole or is an error, with the columns of Spark's own sink.

An id is `eo:<sinkId>:spark:<partition>:<incarnation>.0-<attempt>:<slot>`, with Spark's count of the task's attempts. A
later job uses it again, once its last one is finalized. A task that Spark runs anew, as attempt 0, gets another slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from exactlyonce.checkpoint.records.manifest import TransactionalId
from exactlyonce.connectors.confluent import ANY_PARTITION
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job, Tally, tally_of
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction
from exactlyonce.sinks.kafka.sink import Outputs
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
    return Flushed(assignment.incarnation, job, precommit, opened_ms, tally, assignment.checkpoint)


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
