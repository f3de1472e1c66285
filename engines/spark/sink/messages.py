"""The messages between the driver of a write and its tasks, which Spark pickles."""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.records.manifest import BlockRef, Precommit, StagedAck, TopicInfo
from exactlyonce.connectors.kafka.partitioning import DEFAULT
from exactlyonce.engines.spark.sink.position import Job, Position, Tally


class Assignment(msgspec.Struct, frozen=True):
    """The driver's message to the tasks of a job, before it begins."""

    incarnation: int
    checkpoint: int
    """The job's number, if it is decided."""
    position: Position
    transaction_timeout_ms: int
    attempt: int
    """The attempt to write to a store; it grows with every assignment of the incarnation."""
    topic: TopicInfo
    """The sink's checkpoint topic, which may hold rows for a store."""
    partitioner: str = DEFAULT
    """The partitioner of rows for Kafka."""


class Flushed(msgspec.Struct, frozen=True):
    """A task's message to the driver."""

    incarnation: int
    job: Job
    precommit: Precommit | None
    """None: there was no row, or the job is decided, or the rows are for a store."""
    opened_ms: int = 0
    """The transaction's beginning, by the task's clock."""
    tally: Tally = Tally()
    """The tally of the task's rows, written or not."""
    checkpoint: int = 0
    staged: StagedAck | None = None
    blocks: tuple[BlockRef, ...] = ()
    """The blocks of the staged rows."""
    attempt: int = 0
    wrote: bool = False
    """Whether rows are in a store, or staged for it."""
    tried_before: bool = False
    """Whether other attempts of the task may have staged rows, too."""

    @property
    def has_output(self) -> bool:
        """Whether rows wait for the decision."""
        return self.precommit is not None or self.wrote
