"""A replay: an interval's outputs recomputed, and counted, or produced into a topic for inspection.

Invariants: produced records are one transaction, under an id that no sweep of the pipeline knows; they never go into a
topic of the pipeline itself.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from threading import Event

from confluent_kafka import KafkaException

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.confluent import ANY_PARTITION
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.partitioning import Partitioner, partitioner, partitioner_in
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.recompute import (
    Recomputed,
    interval_of,
    partition_counts,
    recomputed,
    topic_of,
)
from exactlyonce.engines.bounded.result_tables import html_result, html_table
from exactlyonce.engines.bounded.stages import Executors, WorkListener
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline import sizes
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, TopicError
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction
from exactlyonce.sinks.writer import SinkFailed

TIMEOUT_MS = 4 * 60 * 60_000
"""What a large checkpoint may take to be written, where the broker allows it (`transaction.max.timeout.ms`)."""
VISIBLE_TIMEOUT_MS = 5_000
VISIBLE_POLL_S = 0.01


@dataclass
class ReplayedCount:
    """The number of a sink's records in a partition: recomputed, and by the broker's count at the decision."""

    sink: str
    topic: str
    partition: int | None
    """None: records without a key, in any partition."""
    replayed: int
    decided: int | None
    """None for records without a key."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay. A notebook shows it as a table."""

    checkpoint: int
    base: int
    """The checkpoint of the state from which the interval was computed."""
    records: int
    skipped: int
    """Records left out, as by the run."""
    counts: list[ReplayedCount]
    produced: int
    """Records written into the named topic."""

    @property
    def agrees(self) -> bool:
        """Whether the counts are those that were decided, as far as partitions are foretold."""
        return agree(self.counts)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        verdict = "the counts are the decided ones" if self.agrees else "the counts differ from the decided ones"
        return f"checkpoint {self.checkpoint}, {sizes.counted(self.records, 'record')} in: {verdict}."

    def _repr_html_(self) -> str:
        columns = "sink", "topic", "partition", "replayed", "decided"
        rows = [
            (count.sink, count.topic, "any" if count.partition is None else count.partition, count.replayed,
             count.decided)
            for count in self.counts
        ]  # fmt: skip
        return html_result(self.verdict, html_table(columns, rows))


class Replay:
    """The replay of one checkpoint's interval. Its constructor refuses a hopeless one before executors start."""

    def __init__(
        self, loaded: Loaded, client: ClientConfig, checkpoint: int, *, into: str | None = None, sink: str | None = None
    ) -> None:
        """*into* is a topic that gets the records of *sink*, which is optional in a pipeline with one sink."""
        self._loaded, self._client, self._into = loaded, client, into
        self._history = read_history(client, loaded.pipeline.name)
        self._interval = interval_of(self._history, checkpoint)
        self._sink = _chosen(self._interval.manifest, sink) if into else ""

    @property
    def offsets(self) -> int:
        """The offsets of the interval; there may be fewer records."""
        return self._interval.offsets

    def run(self, executors: Executors, progress: WorkListener) -> Replayed:
        """Recompute, count, and produce if asked to."""
        interval, client, produced = self._interval, self._client, 0
        manifest = interval.manifest
        progress.began(manifest, interval.offsets)
        with recomputed(self._loaded, client, interval, executors.submit, executors.staging) as again:
            counted = counts(client, self._history, manifest, again)
            if self._into:
                produced = produce_into(client, manifest, again, self._sink, self._into)
        return Replayed(manifest.checkpoint, interval.base.checkpoint, again.records, again.skipped, counted, produced)


def _chosen(manifest: Manifest, sink: str | None) -> str:
    ids = [output.sink for output in manifest.sinks]
    if sink is None and len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigError("None of the pipeline's sinks writes to Kafka: there is nothing that --into could get.")
    if sink not in ids:
        raise ConfigError(f"Say whose records --into is to get: --sink with one of {', '.join(ids)}.")
    return str(sink)


def counts(client: ClientConfig, history: History, manifest: Manifest, again: Recomputed) -> list[ReplayedCount]:
    """The counts of each sink and partition; *history* are the decisions by now."""
    counted: list[ReplayedCount] = []
    for sink in (output.sink for output in manifest.sinks):
        if manifest.partitions_of(sink) is not None:
            known = Counter[int | None]({lane: again.count(sink, lane) for lane in again.lanes(sink)})
            counted += _counts_of(sink, manifest, +known)
            continue
        guesses, partition_of = [], partitioner(partitioner_in(manifest, sink, client.settings))
        for partitions in partition_counts(client, history, manifest, sink):
            guesses.append(_counts_of(sink, manifest, _replayed(sink, again, partition_of, partitions)))
            if agree(guesses[-1]):
                break
        counted += guesses[-1] if agree(guesses[-1]) else guesses[0]
    return counted


def _replayed(sink: str, again: Recomputed, partition_of: Partitioner, partitions: int) -> Counter[int | None]:
    """The outputs of one sink by partition, if its topic had so many *partitions*; None: any."""
    return Counter(
        output.place(partition_of, partitions) for lane in again.lanes(sink) for output in again.outputs(sink, lane)
    )


def _counts_of(sink: str, manifest: Manifest, replayed: Counter[int | None]) -> list[ReplayedCount]:
    """The counts of one sink."""
    topic, _ = topic_of(manifest, sink)
    decided = Counter[int]()
    for committable in manifest.committables:
        if committable.sink == sink:
            decided.update({written.partition: written.count for written in committable.written})
    at_random = replayed.pop(None, 0)
    places = sorted({*decided, *(partition for partition in replayed if partition is not None)})
    counted = [ReplayedCount(sink, topic, partition, replayed[partition], decided[partition]) for partition in places]
    return [*counted, ReplayedCount(sink, topic, None, at_random, None)] if at_random else counted


def agree(counted: list[ReplayedCount]) -> bool:
    """Whether a replay gave as many records as were decided, as far as partitions are foretold."""
    at_random = Counter({count.sink: count.replayed for count in counted if count.partition is None})
    for sink in {count.sink for count in counted}:
        own = [count for count in counted if count.sink == sink and count.decided is not None]
        missing = [(count.decided or 0) - count.replayed for count in own]
        if min(missing, default=0) < 0 or sum(missing) != at_random[sink]:
            return False
    return True


def produce_into(client: ClientConfig, manifest: Manifest, again: Recomputed, sink: str, topic: str) -> int:
    """Produce the outputs of *sink* into *topic*, in one transaction; return their number.

    A missing topic is created with as many partitions as the sink's had; if it has as many, each record goes to the
    same partition.
    """
    own = {read.topic for read in manifest.in_cluster} | {output.topic for output in manifest.sinks}
    if topic in own | {checkpoint_topic(manifest.pipeline)}:
        raise ConfigError(f"{topic!r} is a topic of the pipeline itself: name another one with --into.")
    _, partitions = topic_of(manifest, sink)
    by_key = partitioner(partitioner_in(manifest, sink, client.settings))
    partition_of = by_key if _has(client, topic, partitions) else None
    name = f"exactlyonce-replay:{manifest.pipeline}:{manifest.checkpoint}:{sink}"
    try:
        with closing(Transactions(client)) as transactions:
            timeout_ms = min(TIMEOUT_MS, transactions.max_timeout_ms())
            transaction = OpenTransaction.begun(client, name, transactions, timeout_ms=timeout_ms, topic=topic)
        for lane in again.lanes(sink):
            for output in again.outputs(sink, lane):
                partition = output.place(partition_of, partitions) if partition_of is not None else None
                transaction.write(topic, output.alone(ANY_PARTITION if partition is None else partition))
        transaction.flush()
    except SinkFailed as error:
        reason = client.redact(str(error))
        raise BrokerUnavailable(f"{topic} could not be written: {reason}. Nothing of it is visible.") from None
    _commit(client, transaction, topic)
    _await_readers(client, topic)
    return transaction.records


def _commit(client: ClientConfig, transaction: OpenTransaction, topic: str) -> None:
    """Commit the records in *topic*; the outcome of an unanswered commit is unknown."""
    try:
        transaction.commit()
    except KafkaException as error:
        reason, aborted = client.redact(error.args[0].str()), error.args[0].txn_requires_abort()
        outcome = (
            "Nothing of it is visible."
            if aborted
            else "Whether its records are visible, all or none, is unknown: look before you run this again."
        )
        raise BrokerUnavailable(f"{topic} could not be written: {reason}. {outcome}") from None


def _await_readers(client: ClientConfig, topic: str) -> None:
    """Return once readers reach the present end of *topic*: a commit is answered before its markers are written.

    Another open transaction there holds readers back; it is waited for at most VISIBLE_TIMEOUT_MS.
    """
    clock = SystemClock()
    until_ms = clock.monotonic_ms() + VISIBLE_TIMEOUT_MS
    with closing(Topics(client)) as topics:
        ends = topics.end_offsets(topic, committed=False)
        while clock.monotonic_ms() < until_ms:
            stable = topics.end_offsets(topic, committed=True)
            if all(stable[partition] >= end for partition, end in ends.items()):
                return
            Event().wait(VISIBLE_POLL_S)


def _has(client: ClientConfig, topic: str, partitions: int) -> bool:
    """Whether *topic* has as many partitions; a missing one is created so."""
    with closing(Topics(client)) as topics:
        try:
            return topics.describe([topic])[topic].partitions == partitions
        except TopicError:
            topics.create(topic, partitions=partitions)
            return True
