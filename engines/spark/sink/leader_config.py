"""The leader's configuration of a sink: a pipeline without inputs and state, whose jobs are its checkpoints.

Invariant: what a decision of it names stays as long as the decision; all else that tasks have set aside may go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from exactlyonce.checkpoint.decision import Dropped
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.leader_config import LeaderConfig, Retention
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.encoding import encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SPARK_SINK, BlockRef, Incarnation, Manifest
from exactlyonce.checkpoint.requests import Procedure, Request
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.engines.spark.sink.task import SINK
from exactlyonce.pipeline.errors import ConfigError, InvariantViolation, StoreUnavailable

ATTEMPT = 1
"""Of the driver; that of the tasks' transactions is below, so that all of them are its to sweep."""
MANIFESTS_RETAINED = 3


@dataclass(frozen=True, kw_only=True)
class SinkConfig(LeaderConfig):
    """A sink: without inputs and state, its transactions below the driver's own attempt."""

    attempt: int = ATTEMPT
    count_partitions: Callable[[str], int]

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """An id whose transaction is complete is skipped: it was ended from outside or by the broker, both of which
        raise its epoch, so that its producer is fenced."""
        return incarnation.incarnation + 1, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """Its tasks are as many as have written, to whatever topics the rows name, or to a store."""
        tasks = len(manifest.committables) + len(manifest.staged)
        topics = sorted({written.topic for each in manifest.committables for written in each.written})
        filled = msgspec.structs.replace(
            manifest,
            kind=SPARK_SINK,
            max_parallelism=tasks,
            parallelism=tasks,
            sinks=tuple((SINK, each, self.count_partitions(each)) for each in topics),
        )
        _refuse_too_large(filled)
        return filled

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """As of a pipeline, in Spark's words."""
        return (
            f"The topic {topic} is empty, but transactions of incarnation {incarnation} of sink {self.pipeline!r} are "
            f"known to the broker: the topic was deleted, and with it what the sink has written.\n"
            f"  Choices: restore the topic from a replica or backup; or `exactlyonce reset {self.pipeline}`, after "
            f"which a batch that Spark writes again is in the output twice."
        )


class NewestKept(Retention):
    """Keeps the newest manifests; a sink that writes to Kafka has no blocks."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def expire(self, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """Old manifests."""
        dropped: Dropped = tuple(each.checkpoint for each in self._log.history.retained[:-MANIFESTS_RETAINED]), ()
        yield from ()
        return dropped


class JobsKept(KnownBlocks):
    """Keeps the newest manifests and the rows for a store that they name; all else that lies there is dropped."""

    def __init__(self) -> None:
        super().__init__(CheckpointSettings(num_retained=MANIFESTS_RETAINED), staging=True)

        self._dropped: Dropped = (), ()
        """What may go with the next decision."""
        self._known_to: list[int] = []
        """By partition of blocks, where the next one comes to lie unless somebody writes whom nobody has told of."""
        self._cleaning: Sequence[Request] = ()
        """What is asked of stores behind the next decision."""

    def clean_behind(self, requests: Sequence[Request]) -> None:
        """Ask *requests* behind the next decision: what failed attempts of its tasks have set aside elsewhere goes.

        That is before it is finalized: until then whoever begins another job fences the one that asks, so that nothing
        goes that a later job has set aside."""
        self._cleaning = requests

    def take_up(self, history: History, incarnation: int, job: int, named: Iterable[BlockRef]) -> Procedure[None]:
        """Look at what there is, where another process has begun *incarnation*, and tasks have set *named* aside for
        the decision that is to be number *job*."""
        self.completed(job, named)
        self._dropped = yield from self.recover(history, incarnation)
        self._known_to = list(self._begun_at)
        self.expect_own_orphans()

    def follow(self, named: Iterable[BlockRef]) -> bool:
        """Whether *named*, all that tasks have set aside for the next job, lie right behind all that is known; else
        what is not named lies between them: of an attempt that Spark gave up, which may have gone on since.

        Nothing in front of them need be looked at again then. What comes behind them shows in a later job, or lies
        behind the ends that are noted."""
        begun_at, known_to = list(self._begun_at), self._known_to
        for partition, offset in sorted((each.partition, each.offset) for each in named):
            if not known_to or offset != known_to[partition]:
                return False
            known_to[partition] = begun_at[partition] = offset + 1
        self._begun_at = tuple(begun_at)
        return True

    def expire(self, manifest: Manifest, pinned: Iterable[int] = ()) -> Procedure[Dropped]:
        """Old manifests and their rows, and what failed attempts have left."""
        cleaning, self._cleaning = self._cleaning, ()
        with suppress(StoreUnavailable):  # it goes behind a later job then
            for each in cleaning:
                _ = yield each
        looks = self._search_again
        manifests, blocks = yield from super().expire(manifest, pinned)
        before, self._dropped = self._dropped, ((), ())
        dropped = (*before[1], *blocks)
        if looks:
            self._known_to = list(self._begun_at)
        for partition in {each.ref.partition for each in dropped}:
            tombstones = sum(each.ref.partition == partition for each in dropped)
            self._known_to[partition] += tombstones + 1  # and the marker of their transaction
        return (*before[0], *manifests), dropped


def _refuse_too_large(manifest: Manifest) -> None:
    try:
        encode(manifest)
    except InvariantViolation as error:
        places = sum(len(each.written) for each in manifest.committables)
        whereto = "a store" if manifest.staged else f"{places} partitions in all"
        raise ConfigError(
            f"{manifest.parallelism} tasks have written to {whereto}, too many for one decision ({error}) Write with "
            f"fewer tasks: df.coalesce(n)."
        ) from None
