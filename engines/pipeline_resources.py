"""The resources of a pipeline in a cluster besides its output: found, and erased by a reset or after a cancelled run.

Invariants: input and output topics are never touched, and nothing decided is erased before it is finalized, unless a
person agreed. A reset fences the coordinator first. Every step is about one checkpoint topic, by its id: anybody may
repeat it, and one who slept meanwhile neither erases nor fences what has begun since (but see `last_look`). Before the
topic goes, a transactional id says that this was meant: the next run knows it from a lost topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    TopicInfo,
    TransactionalId,
    coordinator_id,
    erased_id,
    transaction_prefix,
)
from exactlyonce.checkpoint.requests import ListedTransaction
from exactlyonce.checkpoint.settings import PARTITIONS, PARTITIONS_MIN
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.checkpoint.transactions.commit import incarnation_latest
from exactlyonce.checkpoint.transactions.transactional_writer import TransactionalWriter
from exactlyonce.connectors.kafka import group_offsets
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import as_topic, find_topic, prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines import processes
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import Connections
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, StorageUnavailable, TopicError
from exactlyonce.pipeline.failpoints import hit

_TIMEOUT_MS = 10_000


@dataclass(frozen=True)
class PipelineResources:
    """All that one pipeline has in a cluster besides its output."""

    pipeline: str
    topic: str | None
    """The checkpoint topic, if it exists."""
    history: History | None
    unreadable: str
    """Why there is a topic, but no history."""
    transactions: tuple[ListedTransaction, ...]
    """All its transactional ids, in any state."""

    def sign_of_life(self, now_ms: int) -> str:
        """Why an instance may be running; empty if none can be."""
        if self.history is None:
            return "its checkpoint topic does not tell whether it runs" if self.topic else ""
        if self.history.checkpoint_latest < 0:
            return ""  # a reset, or an incarnation that has read nothing yet and would be fenced before it does
        living = processes.living(self.history, now_ms)
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
        return inputs_of(self.history) if self.history and not self.is_sink else {}

    def outputs(self) -> list[str]:
        manifests = self.history.retained if self.history else ()
        return sorted({output.topic for manifest in manifests for output in manifest.sinks})

    def stores(self) -> list[str]:
        """The sinks whose stores have a ledger of it."""
        return stores_of(self.history) if self.history else []

    def storages(self) -> dict[str, bool]:
        """The storages of its blocks outside of the topic; see `storages_of`."""
        return storages_of(self.history) if self.history else {}


def storages_of(history: History) -> dict[str, bool]:
    """The storages outside of the topic that have blocks, or had; True for the storage of the newest checkpoint."""
    return {storage: storage == history.storage for storage in history.storages if storage}


def stores_of(history: History) -> list[str]:
    """The sinks whose stores have a ledger of the pipeline."""
    return sorted({sink for manifest in history.retained for sink, _, _ in manifest.ledger})


def inputs_of(history: History) -> dict[str, list[int]]:
    """The partitions of topics that the pipeline reads, by topic."""
    inputs: dict[str, set[int]] = {}
    for manifest in history.retained:
        for offset in manifest.in_cluster:
            inputs.setdefault(offset.topic, set()).add(offset.partition)
    return {topic: sorted(partitions) for topic, partitions in sorted(inputs.items())}


def find(config: ClientConfig, pipeline: str) -> PipelineResources:
    """Look for all resources of *pipeline*; `TopicError` if there are none."""
    try:
        topic, missing = find_topic(config, pipeline).name, None
    except TopicError as error:
        topic, missing = None, error
    with closing(Transactions(config, timeout_ms=_TIMEOUT_MS)) as transactions:
        listed = _listed(transactions, pipeline)
    if missing and not listed:
        raise missing
    try:
        return PipelineResources(pipeline, topic, read_history(config, pipeline) if topic else None, "", listed)
    except Halt as error:
        return PipelineResources(pipeline, topic, None, str(error), listed)


def _listed(transactions: Transactions, pipeline: str) -> tuple[ListedTransaction, ...]:
    return tuple(
        listed
        for listed in transactions.list(transaction_prefix(pipeline))
        if listed.transactional_id == coordinator_id(pipeline) or TransactionalId.parse(listed.transactional_id)
    )


def erase(config: ClientConfig, resources: PipelineResources, note: Callable[[str], None]) -> list[str]:
    """Fence the pipeline and erase *resources*; see `_erase`."""
    with closing(Transactions(config)) as transactions:
        coordinator = coordinator_id(resources.pipeline)
        transactions.abort_listed(known for known in resources.transactions if known.transactional_id == coordinator)
        transactions.abort_listed(_listed(transactions, resources.pipeline))
    topic = find_topic(config, resources.pipeline) if resources.topic else None
    known = resources.history.incarnation_latest if resources.history else 0
    above = max(known, incarnation_latest(resources.transactions))
    storages, inputs = resources.storages(), resources.inputs()
    return _erase(config, resources.pipeline, topic, note, storages=storages, inputs=inputs, above=above)


def erase_condemned(config: ClientConfig, topic: TopicInfo, history: History, note: Callable[[str], None]) -> list[str]:
    """Erase what the cancelled run at the end of *history* has condemned; see `_erase`."""
    newest = history.newest_incarnation
    assert newest is not None
    assert newest.condemned
    return _erase(
        config, history.pipeline, topic, note, storages=storages_of(history), inputs=inputs_of(history),
        above=newest.incarnation, cancelled=newest.cancelled,
    )  # fmt: skip


def _erase(
    config: ClientConfig,
    pipeline: str,
    topic: TopicInfo | None,
    note: Callable[[str], None],
    *,
    storages: Mapping[str, bool],
    inputs: Mapping[str, Sequence[int]],
    above: int,
    cancelled: str = "",
) -> list[str]:
    """Delete *topic* and what belongs to it; returns the input topics in which a consumer keeps the group's offsets.

    A new checkpoint topic begins with an incarnation above *above*, the highest so far. It has ended, and answers the
    request *cancelled*. A storage that the pipeline has left is only noted if it cannot be reached: it may be gone.
    """
    kept = group_offsets.forget(config, pipeline, inputs)
    if topic is not None:
        for storage, is_newest in storages.items():
            with closing(block_storage(config, topic, storage)) as blocks:
                try:
                    blocks.erase()
                except (StorageUnavailable, ConfigError) as error:
                    if is_newest:
                        raise
                    note(f"Blocks left in {storage} stay, and no later run will know of them: {error}")
        hit("erasing-blocks")
        with closing(Connections(config, pipeline)) as connections, _unless_gone(config, pipeline, topic):
            connections.open_log(topic)
            connections.drive(TransactionalWriter(erased_id(pipeline, above), topic.name, connections.clock).open())
        with closing(Topics(config)) as topics:
            topics.delete(as_topic(topic))
        hit("erasing-topic")
    _begin_anew(config, pipeline, topic, above, cancelled)
    return kept


def _begin_anew(config: ClientConfig, pipeline: str, erased: TopicInfo | None, above: int, cancelled: str) -> None:
    """Begin and end an incarnation in a topic with as many partitions as *erased*, unless another one has begun."""
    partitions = max(erased.partitions, PARTITIONS_MIN) if erased is not None else PARTITIONS
    topic = prepare_topic(config, pipeline, partitions)
    host, process, machine = processes.this_process()
    connections = Connections(config, pipeline)
    with closing(connections), suppress(Fenced), _unless_gone(config, pipeline, topic):
        log = connections.open_log(topic)
        if connections.drive(last_look(pipeline, log.peek_at_stable, connections.clock)).incarnation_latest:
            return
        connections.drive(log.open())
        connections.drive(log.begin(host, process, above, machine=machine))
        connections.drive(log.heartbeat(ended=True, cancelled=cancelled))


@contextmanager
def _unless_gone(config: ClientConfig, pipeline: str, topic: TopicInfo) -> Iterator[None]:
    """Suppress the errors of a write to *topic* once another process has deleted it: that one does the same work."""
    try:
        yield
    except (Halt, TopicError):
        with suppress(TopicError):
            if find_topic(config, pipeline).topic_id == topic.topic_id:
                raise
