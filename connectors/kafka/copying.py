"""The records of an aborted transaction in a new one: verbatim from the log (copy repair), or computed again.

Invariant: a committable is returned only if the broker's counts of the new transaction equal those of the lost one,
partition by partition. Nothing is committed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from exactlyonce.checkpoint.records.manifest import Committable, Written
from exactlyonce.checkpoint.requests import ListedTransaction
from exactlyonce.connectors.confluent import NOW, make_producer
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log, RecordsGone
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import BrokerUnavailable

TIMEOUT_S = 120.0


class Outgoing(NamedTuple):
    """A record and its partition."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    timestamp_ms: int = NOW


def copy_transaction(
    config: ClientConfig,
    transactions: Transactions,
    log: Log,
    lost: Committable,
    transactional_id: str,
    transaction_timeout_ms: int,
) -> Committable | str:
    """Copy the records of *lost* under *transactional_id*; the new committable, or why it may be incomplete."""
    records = _logged(log, lost)
    return write_again(config, transactions, lost, transactional_id, transaction_timeout_ms, records)


def _logged(log: Log, lost: Committable) -> Iterator[Outgoing]:
    for written in lost.written:
        for record in log.records(lost.producer_id, lost.epoch, written):
            yield Outgoing(
                written.topic, written.partition, record.key, record.value, [*record.headers], record.timestamp_ms
            )


def write_again(
    config: ClientConfig,
    transactions: Transactions,
    lost: Committable,
    transactional_id: str,
    transaction_timeout_ms: int,
    records: Iterable[Outgoing],
) -> Committable | str:
    """Produce *records* under *transactional_id*; the new committable, or why their counts differ from the lost ones.

    In the latter case the new transaction is aborted: it would hold readers back.
    """
    errors: list[str] = []

    def undelivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            errors.append(error.str())

    producer = make_producer(
        config.confluent(
            {
                "transactional.id": transactional_id,
                "transaction.timeout.ms": transaction_timeout_ms,
                "delivery.report.only.error": True,
                "on_delivery": undelivered,
            }
        )
    )
    try:
        producer.init_transactions(TIMEOUT_S)
        state = transactions.describe([transactional_id])[transactional_id]
        if state is None:
            raise BrokerUnavailable(f"The broker forgot {transactional_id} right after its initialisation. Run again.")
        producer.begin_transaction()
        for record in records:
            produce(producer, record)
        left = producer.flush(TIMEOUT_S)
    except RecordsGone as gone:
        return _abandoned(transactions, transactional_id, str(gone))
    except KafkaException as error:
        raise BrokerUnavailable(f"Repairing {lost.transactional_id}: {error.args[0].str()}. Run again.") from None
    if left or errors:
        raise BrokerUnavailable(
            f"Repairing {lost.transactional_id}: {left} records were not delivered {errors[:1]}. Run again."
        )
    repaired = _counted(transactions, lost, transactional_id, state.producer_id, state.epoch)
    return repaired if isinstance(repaired, Committable) else _abandoned(transactions, transactional_id, repaired)


def _abandoned(transactions: Transactions, transactional_id: str, why: str) -> str:
    """*why*, after an abort of the new transaction."""
    transactions.abort_listed([ListedTransaction(transactional_id, -1, "Ongoing")])
    return why


def produce(producer: Producer, record: Outgoing) -> None:
    """Hand *record* to *producer*, once its queue has room; `BrokerUnavailable` if it has none for long."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            producer.produce(
                record.topic,
                record.value,
                record.key,
                record.partition,
                timestamp=record.timestamp_ms,
                headers=None if record.headers is None else [*record.headers],
            )
            return
        except BufferError:
            if time.monotonic() > deadline:
                raise BrokerUnavailable("The broker takes no records now. Run again later.") from None
            producer.poll(0.1)


def _counted(
    transactions: Transactions, lost: Committable, transactional_id: str, producer_id: int, epoch: int
) -> Committable | str:
    """The new transaction as the broker describes it, if its counts are those of *lost*."""
    wanted = {(w.topic, w.partition): w.count for w in lost.written}
    written = tuple(
        Written(p.topic, p.partition, p.transaction_start_offset, p.last_sequence + 1)
        for p in transactions.producers(wanted)
        if (p.producer_id, p.epoch) == (producer_id, epoch) and p.transaction_start_offset is not None
    )
    if {(w.topic, w.partition): w.count for w in written} != wanted:
        return f"the new transaction holds {written}, the lost transaction held {wanted}"
    return Committable(
        transactional_id=transactional_id,
        producer_id=producer_id,
        epoch=epoch,
        transaction_version=lost.transaction_version,
        cluster_id=lost.cluster_id,
        sink=lost.sink,
        subtask=lost.subtask,
        checkpoint=lost.checkpoint,
        written=written,
    )
