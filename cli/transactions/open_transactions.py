"""A pipeline's transactions in Kafka that wait for their end, each with the decision that names it, if one does.

Beside those that are open these are all that the newest checkpoint names while it is not finalized: of one that the
broker has aborted meanwhile the output is missing until it is repaired.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.transactions.broker_answers import ListedTransaction, TransactionState
from exactlyonce.cli.transactions.waiting import TRANSACTION, InPartition, WaitingOutput
from exactlyonce.connectors.kafka.transactions import Transactions

OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")


def open_ids(transactions: Transactions, pipeline: str) -> list[ListedTransaction]:
    """The ids of its sinks that hold readers back."""
    found = transactions.list(transaction_prefix(pipeline))
    return [each for each in found if each.state in OPEN and TransactionalId.parse(each.transactional_id)]


def find_transactions(
    transactions: Transactions, listed: Sequence[ListedTransaction], history: History | None
) -> list[WaitingOutput]:
    """Those of *listed*, and what is decided in *history* and not finalized."""
    decided = _decided(history) if history is not None else {}
    unfinalized = unfinalized_committables(history) if history is not None else {}
    names = sorted({*(each.transactional_id for each in listed), *unfinalized})
    found = []
    for name, state in transactions.describe(names).items():
        known = decided.get((name, state.producer_id, state.epoch)) if state is not None else None
        if known is None and name in unfinalized and history is not None and history.unfinalized is not None:
            # Such an id is not used again before the checkpoint is finalized, and its epoch may have been raised by the
            # commit whose markers are missing.
            known = history.unfinalized.checkpoint, unfinalized[name]
        if state is not None or known is not None:
            found.append(_waiting(name, state, known))
    return found


def unfinalized_committables(history: History) -> dict[str, Committable]:
    """By transactional id, what the checkpoint that is decided and not finalized names, and its repairs."""
    manifest = history.unfinalized
    named = _committables(history, manifest) if manifest is not None else ()
    return {each.transactional_id: each for each in named if each.records}


def with_offsets(transactions: Transactions, waiting: WaitingOutput) -> WaitingOutput:
    """With what the brokers have of it in each partition, where no decision says it."""
    if waiting.is_decided or not waiting.places:
        return waiting
    producers = transactions.producers((each.topic, each.partition) for each in waiting.places)
    places = tuple(
        InPartition(each.topic, each.partition, each.transaction_start_offset, each.last_sequence + 1)
        for each in producers
        if each.producer_id == waiting.producer_id and each.transaction_start_offset is not None
    )
    records = sum(each.count or 0 for each in places)
    return dataclasses.replace(waiting, places=places, records=records) if places else waiting


def _waiting(name: str, state: TransactionState | None, known: tuple[int, Committable] | None) -> WaitingOutput:
    parsed = TransactionalId.parse(name)
    assert parsed is not None  # it was listed so, or is a committable's
    checkpoint, committable = known or (None, None)
    return WaitingOutput(
        name=name, kind=TRANSACTION, state=state.state if state else "gone", sink=parsed.sink, subtask=parsed.subtask,
        incarnation=parsed.incarnation, attempt=parsed.attempt,
        checkpoint=committable.checkpoint if committable else None, decided_in=checkpoint,
        records=committable.records if committable else None,
        started_at_ms=state.start_time_ms if state and state.start_time_ms > 0 else None,
        timeout_ms=state.timeout_ms if state else None,
        producer_id=state.producer_id if state else None, epoch=state.epoch if state else None,
        places=_places(state, committable), next=_next(state, checkpoint),
    )  # fmt: skip


def _places(state: TransactionState | None, committable: Committable | None) -> tuple[InPartition, ...]:
    if committable is not None:
        return tuple(
            InPartition(each.topic, each.partition, each.first_offset, each.count) for each in committable.written
        )
    return tuple(InPartition(topic, partition) for topic, partition in state.partitions) if state else ()


def _next(state: TransactionState | None, checkpoint: int | None) -> str:
    shown = state.state if state else "gone"
    if checkpoint is None:
        return "the next run aborts it, and computes again what it holds; `transactions abort` does so at once"
    if shown in ("PrepareCommit", "CompleteCommit"):
        return "it is committed; the next run, or `transactions commit`, makes sure of it and finalizes the checkpoint"
    if shown in ("Ongoing", "Empty"):
        return "the next run commits it; `transactions commit` does so at once"
    return (
        "the broker has ended it before it was committed, or its id has expired: the next run, or `transactions "
        "commit`, looks at its records, and repairs what is lost"
    )


def _decided(history: History) -> Mapping[tuple[str, int, int], tuple[int, Committable]]:
    """The checkpoint of each transaction that a decision names, by id, producer id and epoch."""
    return {
        (each.transactional_id, each.producer_id, each.epoch): (manifest.checkpoint, each)
        for manifest in history.retained
        for each in _committables(history, manifest)
    }


def _committables(history: History, manifest: Manifest) -> Iterable[Committable]:
    """Those of *manifest*, and what repairs have put in their place."""
    return [*manifest.committables, *(each.committable for each in history.repairs_of(manifest.checkpoint))]
