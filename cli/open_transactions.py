"""A pipeline's open transactions: which there are, which of them are decided, and the end of the others."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event
from typing import Any

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, coordinator_id, transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.requests import drive
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.checkpoint.transactions.broker_answers import ListedTransaction, TransactionState
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, sweep
from exactlyonce.checkpoint.transactions.settling import settle
from exactlyonce.cli import text
from exactlyonce.cli.traces import Traces, find
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt

SETTLED_TIMEOUT_MS = 30_000
SETTLED_POLL_S = 0.05
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

    What is decided is read once no decision can be on its way. `Halt` where it cannot be read. Only incarnations that
    *traces* know of are ended: the fence came behind all of them. One that has begun since may go on, so that nothing
    is aborted if the log shows it; if it begins later still, its transactions are not touched.
    """
    if traces.topic is None:
        raise Halt(
            f"The topic of {traces.pipeline}'s decisions is gone, so that nobody can say which of its transactions are "
            f"decided. Restore it, or forget the pipeline by `exactlyonce reset {traces.pipeline}`, which aborts all."
        )
    if traces.history is None:
        raise Halt(traces.unreadable)
    newest = max(traces.history.incarnation_latest, incarnation_latest(traces.transactions))
    transactions, output_log = Transactions(config), Log(config, group=traces.pipeline)
    topic = find_topic(config.confluent(), traces.pipeline)
    log, requests = DecisionLog(traces.pipeline, topic, SystemClock()), LogRequests(config, topic)
    performer = Performer(config, transactions, output_log, requests, 0, lambda step, checkpoint: None)
    try:
        partitions = [(topic.name, each) for each in range(topic.partitions)]
        drive(settle(coordinator_id(traces.pipeline), partitions), performer)
        history = _settled(log, requests)
        if history.incarnation_latest > newest:
            raise ConfigError(
                f"A new instance of {traces.pipeline} has begun meanwhile. Nothing was aborted: it does that itself. "
                f"If it does not run any more, run this again."
            )
        listed = [each for each in _listed(transactions, traces.pipeline) if incarnation_latest([each]) <= newest]
        found = _open(transactions, listed, history)
        decided = {each.state.transactional_id for each in found if each.checkpoint is not None}
        procedure = sweep(
            traces.pipeline, newest + 1, 0, protected=decided | _unfinalized(history).keys(),
            fenced_below=(newest + 1, 0),
            outputs={partition for each in found for partition in each.state.partitions},
        )  # fmt: skip
        drive(procedure, performer)
    finally:
        for each in (requests, transactions, output_log):
            each.close()
    return [each for each in found if each.checkpoint is None], [each for each in found if each.checkpoint is not None]


def _settled(log: DecisionLog, requests: LogRequests) -> History:
    """What is decided, once readers of the log get to its end."""
    clock = SystemClock()
    until_ms = clock.monotonic_ms() + SETTLED_TIMEOUT_MS
    while (history := drive(log.peek(), requests)) is None:
        if clock.monotonic_ms() > until_ms:
            raise BrokerUnavailable(
                f"{log.topic.name} cannot be read to its end: somebody has a transaction open in it. Nothing was "
                f"aborted. Run this again in a minute."
            )
        Event().wait(SETTLED_POLL_S)
    history.halt_if_damaged()
    return history


def _listed(transactions: Transactions, pipeline: str) -> list[ListedTransaction]:
    """Those of its sinks that hold readers back."""
    found = transactions.list(transaction_prefix(pipeline))
    return [each for each in found if each.state in OPEN and TransactionalId.parse(each.transactional_id)]


def _open(transactions: Transactions, listed: list[ListedTransaction], history: History | None) -> list[Open]:
    decided = _decided(history) if history is not None else {}
    unfinalized = _unfinalized(history) if history is not None else {}
    states = transactions.describe([each.transactional_id for each in listed])
    return [
        Open(state, decided.get((name, state.producer_id, state.epoch), unfinalized.get(name)))
        for name, state in sorted(states.items())
        if state is not None
    ]


def _decided(history: History) -> dict[tuple[str, int, int], int]:
    """The checkpoint of each transaction that a decision names, by id, producer id and epoch."""
    return {
        (each.transactional_id, each.producer_id, each.epoch): manifest.checkpoint
        for manifest in history.retained
        for each in _committables(history, manifest)
    }


def _unfinalized(history: History) -> dict[str, int]:
    """The checkpoint that is decided and not finalized, by each id that it names.

    Such an id is not used again before, and its epoch may have been raised by the commit whose markers are missing.
    """
    manifest = history.unfinalized
    if manifest is None:
        return {}
    return {each.transactional_id: manifest.checkpoint for each in _committables(history, manifest)}


def _committables(history: History, manifest: Manifest) -> list[Committable]:
    """Those of *manifest*, and what repairs have put in their place."""
    return [*manifest.committables, *(each.committable for each in history.repairs_of(manifest.checkpoint))]
