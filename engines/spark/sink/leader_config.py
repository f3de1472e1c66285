"""The leader's configuration of a sink: a pipeline without inputs and state, whose jobs are its checkpoints.

Invariant: staged rows named by a decision stay as long as the decision; others may go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from exactlyonce.checkpoint.decision import Dropped
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.kept_blocks import BlockRetention, Retention
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.records.encoding import encode_in_parts
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SPARK_SINK, BlockRef, Incarnation, Manifest, Output
from exactlyonce.checkpoint.requests import Procedure, Request
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.topics import Topic
from exactlyonce.engines.spark.sink.task import SINK
from exactlyonce.pipeline.errors import ConfigError, InvariantViolation, StoreUnavailable

ATTEMPT = 1
"""The driver's attempt; tasks' transactions have a lower one, so the driver sweeps them all."""
MANIFESTS_RETAINED = 3


def output_of(topic: Topic, partitioner: str = "") -> Output:
    return Output(SINK, topic.name, topic.partitions, topic.topic_id, partitioner)


@dataclass(frozen=True, kw_only=True)
class SinkConfig(LeaderConfig):
    """A sink: without inputs and state, its transactions below the driver's own attempt."""

    attempt: int = ATTEMPT
    outputs: Callable[[Iterable[str]], tuple[Output, ...]]
    """Gives the outputs of a manifest whose rows are in these topics."""

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """Skip ids whose transaction is complete: its end from outside, or by the broker, raised the epoch, so its
        producer is fenced."""
        return incarnation.incarnation + 1, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """The manifest with its tasks, as many as have written, and the topics that their rows name."""
        tasks = len(manifest.committables) + len(manifest.staged)
        topics = sorted({part.topic for committable in manifest.committables for part in committable.written})
        filled = msgspec.structs.replace(
            manifest,
            kind=SPARK_SINK,
            max_parallelism=tasks,
            parallelism=tasks,
            sinks=self.outputs(topics),
        )
        try:
            encode_in_parts(filled)
        except InvariantViolation as error:
            places = sum(len(committable.written) for committable in manifest.committables)
            whereto = "a store" if manifest.staged else f"{places} partitions in all"
            raise ConfigError(
                f"{tasks} tasks have written to {whereto}, too many for one decision ({error}) Write with fewer tasks: "
                f"df.coalesce(n)."
            ) from None
        return filled

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """The error for a lost topic, in Spark's words."""
        return (
            f"The topic {topic} is empty, but transactions of incarnation {incarnation} of sink {self.pipeline!r} are "
            f"known to the broker: the topic was deleted, and with it what the sink has written.\n"
            f"  Choices: restore the topic from a replica or backup; or `exactlyonce reset {self.pipeline}`, after "
            f"which a batch that Spark writes again is in the output twice."
        )


class ManifestRetention(Retention):
    """Keeps the newest manifests; a sink that writes to Kafka has no blocks."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def expire(self, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """Drop old manifests."""
        old = self._log.history.retained[:-MANIFESTS_RETAINED]
        yield from ()
        return tuple(manifest.checkpoint for manifest in old), ()


class JobRetention(BlockRetention):
    """Keeps the newest manifests and the rows for a store that they name; all other blocks are dropped."""

    def __init__(self) -> None:
        super().__init__(CheckpointSettings(num_retained=MANIFESTS_RETAINED), staging=True)

        self._dropped: Dropped = (), ()
        """Manifests and blocks that may go with the next decision."""
        self._known_to: list[int] = []
        """The expected offset of the next block by partition, unless an unknown attempt writes."""
        self._cleaning: Sequence[Request] = ()
        """Requests to stores after the next decision."""

    def clean_after_decision(self, requests: Sequence[Request]) -> None:
        """Ask *requests* after the next decision, to clean rows staged by failed attempts of its tasks.

        They come before it is finalized: until then a later job fences this process, so that its rows stay."""
        self._cleaning = requests

    def take_up(self, history: History, incarnation: int, job: int, named: Iterable[BlockRef]) -> Procedure[None]:
        """Look for blocks of *incarnation*, begun by another process; tasks have staged *named* for decision *job*."""
        self.completed(job, named)
        self._dropped = yield from self.recover(history, incarnation)
        self._known_to = list(self._begun_at)
        self.expect_own_orphans()

    def follow(self, named: Iterable[BlockRef]) -> bool:
        """Whether *named*, the blocks of the next job, lie right after all known ones.

        Then blocks before them need not be looked at again. A gap has blocks of an attempt that Spark gave up, which
        may have gone on; blocks after *named* show in a later job, or lie beyond the noted ends."""
        begun_at, known_to = list(self._begun_at), self._known_to
        for partition, offset in sorted((ref.partition, ref.offset) for ref in named):
            if not known_to or offset != known_to[partition]:
                return False
            known_to[partition] = begun_at[partition] = offset + 1
        self._begun_at = tuple(begun_at)
        return True

    def expire(self, manifest: Manifest, pinned: Iterable[int] = ()) -> Procedure[Dropped]:
        """Drop old manifests and their rows, and leftovers of failed attempts."""
        cleaning, self._cleaning = self._cleaning, ()
        with suppress(StoreUnavailable):  # a later job cleans then
            for request in cleaning:
                _ = yield request
        looks = self._search_again
        manifests, blocks = yield from super().expire(manifest, pinned)
        before, self._dropped = self._dropped, ((), ())
        dropped = (*before[1], *blocks)
        if looks:
            self._known_to = list(self._begun_at)
        for partition, tombstones in Counter(block.ref.partition for block in dropped).items():
            self._known_to[partition] += tombstones + 1  # and the marker of their transaction
        return (*before[0], *manifests), dropped
