"""A pipeline's open transactions: which there are, which of them are decided, and the end of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exactlyonce.checkpoint.committable import TransactionalId, coordinator_id, transaction_prefix
from exactlyonce.checkpoint.history import History
from exactlyonce.checkpoint.store import read_history
from exactlyonce.checkpoint.transaction import ListedTransaction, TransactionState
from exactlyonce.cli import text
from exactlyonce.cli.traces import Traces, find
from exactlyonce.connectors.client_config import ClientConfig
from exactlyonce.connectors.transactions import Transactions
from exactlyonce.pipeline.errors import Halt

OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")


@dataclass(frozen=True)
class Open:
    """One transaction that holds readers back."""

    state: TransactionState
    checkpoint: int | None
    """That has decided it; None: nobody has."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        state = self.state
        return {
            "transactional_id": state.transactional_id, "state": state.state, "producer_id": state.producer_id,
            "epoch": state.epoch, "started_at_ms": state.start_time_ms, "timeout_ms": state.timeout_ms,
            "partitions": [list(each) for each in state.partitions], "decided_in": self.checkpoint,
        }  # fmt: skip

    def row(self, now_ms: int) -> text.Row:
        """For people."""
        state, topics = self.state, dict[str, list[str]]()
        for topic, partition in state.partitions:
            topics.setdefault(topic, []).append(str(partition))
        places = " ".join(f"{topic}[{','.join(some)}]" for topic, some in sorted(topics.items()))
        age = text.duration(max(0, now_ms - state.start_time_ms)) if state.start_time_ms > 0 else ""
        decided = "no" if self.checkpoint is None else f"in checkpoint {self.checkpoint}"
        return (state.transactional_id, state.state, age, places, decided)


def find_open(config: ClientConfig, pipeline: str) -> list[Open]:
    """All of *pipeline*; `TopicError` if the cluster knows nothing of it."""
    traces = find(config, pipeline)
    transactions = Transactions(config)
    try:
        return _open(transactions, _listed(transactions, pipeline), traces.history)
    finally:
        transactions.close()


def abort_undecided(config: ClientConfig, traces: Traces) -> tuple[list[Open], list[Open]]:
    """Fence the coordinator, then abort what it has not decided: what that was, and what is left.

    `Halt` where it cannot be read what is decided.
    """
    transactions = Transactions(config)
    try:
        coordinator = coordinator_id(traces.pipeline)
        transactions.abort_listed(each for each in traces.transactions if each.transactional_id == coordinator)
        history = read_history(config.confluent(), traces.pipeline) if traces.topic else None
        if history is not None:
            history.halt_if_damaged()
        elif traces.transactions:
            raise Halt(
                f"The topic of {traces.pipeline}'s decisions is gone, so that nobody can say which of its transactions "
                f"are decided. Restore it, or forget the pipeline by `exactlyonce reset {traces.pipeline}`, which "
                f"aborts them all."
            )
        listed = _listed(transactions, traces.pipeline)
        found = _open(transactions, listed, history)
        undecided = {each.state.transactional_id for each in found if each.checkpoint is None}
        transactions.abort_listed(each for each in listed if each.transactional_id in undecided)
    finally:
        transactions.close()
    return [each for each in found if each.checkpoint is None], [each for each in found if each.checkpoint is not None]


def _listed(transactions: Transactions, pipeline: str) -> list[ListedTransaction]:
    """Those of its sinks that hold readers back."""
    found = transactions.list(transaction_prefix(pipeline))
    return [each for each in found if each.state in OPEN and TransactionalId.parse(each.transactional_id)]


def _open(transactions: Transactions, listed: list[ListedTransaction], history: History | None) -> list[Open]:
    decided = _decided(history) if history is not None else {}
    states = transactions.describe([each.transactional_id for each in listed])
    return [
        Open(state, decided.get((state.transactional_id, state.producer_id, state.epoch)))
        for _, state in sorted(states.items())
        if state is not None
    ]


def _decided(history: History) -> dict[tuple[str, int, int], int]:
    """The checkpoint of each transaction that a decision names, by id, producer id and epoch."""
    found = {}
    for manifest in history.retained:
        repairs = [each.committable for each in history.repairs_of(manifest.checkpoint)]
        for each in (*manifest.committables, *repairs):
            found[each.transactional_id, each.producer_id, each.epoch] = manifest.checkpoint
    return found
