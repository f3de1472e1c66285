"""The traces of a pipeline in a cluster besides its output: found, and erased.

Invariants: input and output topics are never touched; the coordinator is fenced before anything else, so that no older
incarnation decides meanwhile; the checkpoint topic goes last, so that an erasure that was interrupted can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from exactlyonce.checkpoint.records.committable import TransactionalId, coordinator_id, transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.transactions.broker_answers import ListedTransaction
from exactlyonce.checkpoint.transactions.commit import incarnation_latest
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.erasing import erase as erasing
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import Halt, TopicError

_TIMEOUT_MS = 10_000


@dataclass(frozen=True)
class Traces:
    """All that one pipeline has in a cluster besides its output."""

    pipeline: str
    topic: str | None
    """The checkpoint topic, if it exists."""
    history: History | None
    unreadable: str
    """Why there is a topic, but no history."""
    transactions: tuple[ListedTransaction, ...]
    """All ids of it, in whatever state."""

    def sign_of_life(self, now_ms: int) -> str:
        """Why an instance may be running; empty if none can be."""
        if self.history is None:
            return "its checkpoint topic does not tell whether it runs" if self.topic else ""
        if self.history.checkpoint_latest < 0:
            return ""  # a reset, or an incarnation that has read nothing yet and would be fenced before it does
        living = self.history.living(now_ms)
        if living is None:
            return ""
        since_ms = max(0, now_ms - living.heartbeat_ms)
        return f"process {living.process} on {living.host} ran it {shown_duration(since_ms)} ago"

    @property
    def is_sink(self) -> bool:
        """Whether it is a sink of Spark, and no pipeline."""
        latest = self.history.latest if self.history else None
        return latest is not None and latest.is_spark_sink

    def inputs(self) -> dict[str, list[int]]:
        """The partitions it reads, by topic."""
        return erasing.inputs_of(self.history) if self.history and not self.is_sink else {}

    def outputs(self) -> list[str]:
        """The topics it writes to."""
        return sorted({topic for each in (self.history.retained if self.history else ()) for _, topic, _ in each.sinks})

    def stores(self) -> list[str]:
        """The sinks whose stores have a ledger of it."""
        return erasing.stores_of(self.history) if self.history else []

    def storages(self) -> dict[str, bool]:
        """Where blocks are kept, or were, outside of the topic."""
        return erasing.storages_of(self.history) if self.history else {}


def find(config: ClientConfig, pipeline: str) -> Traces:
    """Look for all traces of *pipeline*; `TopicError` if there are none."""
    settings = config.confluent()
    try:
        topic, missing = find_topic(settings, pipeline).name, None
    except TopicError as error:
        topic, missing = None, error
    transactions = Transactions(config, timeout_ms=_TIMEOUT_MS)
    listed = _listed(transactions, pipeline)
    transactions.close()
    if missing and not listed:
        raise missing
    try:
        return Traces(pipeline, topic, read_history(settings, pipeline) if topic else None, "", listed)
    except Halt as error:
        return Traces(pipeline, topic, None, str(error), listed)


def erase(config: ClientConfig, traces: Traces, note: Callable[[str], None]) -> list[str]:
    """Erase all of it; returns the topics in which a consumer keeps the group's offsets. *note* is told of a storage
    that the pipeline has left and that cannot be reached: it may be gone for good, and does not stand in the way.

    The new checkpoint topic begins with an incarnation above all that were: by it the next run knows that it begins
    anew because it was told to, and not because the topic was lost.
    """
    with closing(Transactions(config)) as transactions:
        coordinator = coordinator_id(traces.pipeline)
        transactions.abort_listed(each for each in traces.transactions if each.transactional_id == coordinator)
        transactions.abort_listed(_listed(transactions, traces.pipeline))
    topic = find_topic(config.confluent(), traces.pipeline) if traces.topic else None
    known = traces.history.incarnation_latest if traces.history else 0
    above = max(known, incarnation_latest(traces.transactions))
    return erasing.erase(
        config, traces.pipeline, topic, note, storages=traces.storages(), inputs=traces.inputs(), above=above
    )


def _listed(transactions: Transactions, pipeline: str) -> tuple[ListedTransaction, ...]:
    return tuple(
        each
        for each in transactions.list(transaction_prefix(pipeline))
        if each.transactional_id == coordinator_id(pipeline) or TransactionalId.parse(each.transactional_id)
    )
