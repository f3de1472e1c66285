"""The records of an aborted transaction in a new one: verbatim from the log (copy repair), or computed again.

Apart from `open_transaction`, for a worker does without the client that reads logs. Invariant: a committable is
returned only if the broker's counts of the new and the lost transaction are equal,
partition by partition. Nothing is committed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from exactlyonce.checkpoint.records.manifest import Committable, Written
from exactlyonce.checkpoint.requests import ListedTransaction, TxnState
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log, RecordsGone
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction
from exactlyonce.sinks.kafka.sink import Outputs
from exactlyonce.sinks.writer import SinkFailed

Records = Iterable[tuple[str, Outputs]]
"""The topic of some records, and these with their partitions."""


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


def _logged(log: Log, lost: Committable) -> Iterator[tuple[str, Outputs]]:
    for written in lost.written:
        for record in log.records(lost.producer_id, lost.epoch, written):
            headers, times_ms, places = [[*record.headers]], [record.timestamp_ms], [written.partition]
            yield written.topic, Outputs([record.value], [record.key], headers, times_ms, partitions=places)


def write_again(
    config: ClientConfig,
    transactions: Transactions,
    lost: Committable,
    transactional_id: str,
    transaction_timeout_ms: int,
    records: Records,
) -> Committable | str:
    """Write *records* under *transactional_id*; the new committable, or why their counts differ from the lost ones.

    In the latter case the new transaction is aborted: it would hold readers back.
    """
    try:
        transaction = OpenTransaction.begun(config, transactional_id, transactions, timeout_ms=transaction_timeout_ms)
        for topic, outputs in records:
            transaction.write(topic, outputs)
        transaction.flush()
    except RecordsGone as gone:
        return _abandoned(transactions, transactional_id, str(gone))
    except SinkFailed as error:
        raise BrokerUnavailable(f"Repairing {lost.transactional_id}: {error} Run again.") from None
    repaired = _counted(transactions, lost, transaction)
    return repaired if isinstance(repaired, Committable) else _abandoned(transactions, transactional_id, repaired)


def _abandoned(transactions: Transactions, transactional_id: str, why: str) -> str:
    """*why*, after an abort of the new transaction."""
    transactions.abort_listed([ListedTransaction(transactional_id, -1, TxnState.ONGOING)])
    return why


def _counted(transactions: Transactions, lost: Committable, new: OpenTransaction) -> Committable | str:
    """The *new* transaction as the broker describes it, if its counts equal *lost*'s."""
    written = tuple(
        Written(p.topic, p.partition, p.transaction_start_offset, p.last_sequence + 1)
        for p in transactions.producers(lost.counts)
        if (p.producer_id, p.epoch) == (new.producer_id, new.epoch) and p.transaction_start_offset is not None
    )
    repaired = msgspec.structs.replace(
        lost, transactional_id=new.transactional_id, producer_id=new.producer_id, epoch=new.epoch, written=written
    )
    if repaired.counts != lost.counts:
        return f"the new transaction holds {written}, the lost transaction held {lost.counts}"
    return repaired
