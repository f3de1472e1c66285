"""The messages between the driver of a write and its tasks. Spark carries them, by pickling."""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import BlockRef, StagedAck
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.engines.spark.sink.position import Job, Position
from exactlyonce.engines.spark.sink.tally import Tally


class Assignment(msgspec.Struct, frozen=True):
    """What the driver tells the tasks of a job before it begins."""

    incarnation: int
    checkpoint: int
    """The number that the job gets when it is decided."""
    position: Position
    transaction_timeout_ms: int
    attempt: int
    """Of the incarnation to write to a store: no two assignments have the same, and a later one's is greater."""
    topic: TopicInfo
    """The sink's checkpoint topic, where rows for a store may wait."""


class Flushed(msgspec.Struct, frozen=True):
    """What a task tells the driver."""

    incarnation: int
    job: Job
    precommit: Precommit | None
    """None: there was no row, or the job is decided, or the rows are for a store."""
    opened_ms: int = 0
    """When, by the task's clock."""
    tally: Tally = Tally()
    """Of the task's rows, whether they were written or not."""
    checkpoint: int = 0
    """The number that the assignment gave the job."""
    staged: StagedAck | None = None
    """What was set aside for a store."""
    blocks: tuple[BlockRef, ...] = ()
    """Those that this took."""
    attempt: int = 0
    """That of the assignment."""
    wrote: bool = False
    """Whether rows are in a store, or set aside for it."""
    tried_before: bool = False
    """Whether other attempts of the task may have set rows aside, too."""

    @property
    def has_output(self) -> bool:
        """Whether rows wait for the decision."""
        return self.precommit is not None or self.wrote
