"""How far the jobs that write to a sink have come: what its manifests carry instead of a pipeline's offsets.

Invariants: a job that is held here is decided, and its rows are never written again; of a streaming query the number of
its batch only grows; only one query writes to a sink, until another one adopts it by its name.
"""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.manifest import Manifest, SourceOffset
from exactlyonce.pipeline.errors import ConfigError

KIND = "spark"
"""Of the manifests of a sink."""
QUERY, WRITE = "query", "write"
WRITES_REMEMBERED = 1_000


class Job(msgspec.Struct, frozen=True):
    """One batch of a streaming query, or one batch write, which may have an id."""

    query: str = ""
    batch: int = 0
    write_id: str = ""


class Position(msgspec.Struct, frozen=True):
    """Which jobs are decided."""

    query: str = ""
    """The id of the streaming query that Spark keeps in its checkpoint location; empty before the first batch."""
    batch_next: int = 0
    """The first batch of it that may not be decided."""
    writes: tuple[str, ...] = ()
    """The ids of the last batch writes that had one."""

    @classmethod
    def of(cls, manifest: Manifest | None) -> Position:
        """What *manifest*, the newest of a sink, says."""
        if manifest is None:
            return cls()
        if manifest.kind != KIND:
            raise ConfigError(
                f"{manifest.pipeline!r} is the name of a pipeline, of which there are checkpoints. Give the sink "
                f"another sinkId."
            )
        query = next((each for each in manifest.offsets if each.source == QUERY), None)
        writes = tuple(each.topic_id for each in manifest.offsets if each.source == WRITE)
        return cls(query.topic_id, query.offset, writes) if query else cls(writes=writes)

    def offsets(self) -> tuple[SourceOffset, ...]:
        """As a manifest carries it: a query and a write are sources, read up to a batch."""
        query = (SourceOffset(QUERY, "spark-batches", self.query, 0, self.batch_next),) if self.query else ()
        return (*query, *(SourceOffset(WRITE, "spark-writes", each, 0, 1) for each in self.writes))

    def holds(self, job: Job) -> bool:
        """Whether *job* is decided.

        >>> Position("q", 3).holds(Job("q", 2)), Position("q", 3).holds(Job("q", 3))
        (True, False)
        """
        if job.query:
            return job.query == self.query and job.batch < self.batch_next
        return job.write_id in self.writes

    def after(self, job: Job) -> Position:
        """Once *job* is decided too."""
        if job.query:
            return Position(job.query, job.batch + 1, self.writes)
        writes = (*self.writes, job.write_id)[-WRITES_REMEMBERED:] if job.write_id else self.writes
        return Position(self.query, self.batch_next, writes)

    def refuse_strangers(self, sink_id: str, job: Job, adopt_query: str) -> None:
        """Raise ConfigError if *job* is of a query that the sink does not know, unless it adopts the one before, and if
        it is older than what Spark may write again: the batch that was decided last."""
        if not job.query or not self.query or job.query != self.query == adopt_query:
            return
        adopt = f'.option("adoptQuery", "{self.query}")'
        if job.query != self.query:
            raise ConfigError(
                f"Sink {sink_id!r} has been written to by another query, {self.query}, up to batch "
                f"{self.batch_next - 1}; this one is {job.query}. So its checkpointLocation is not the one that "
                f"belongs to the sink, and what it reads again would be written again.\n"
                f"  Choices: give the query its old checkpointLocation; or give this query a sinkId of its own; or, if "
                f"it is to go on where its sources are told to begin, whatever the other has written: {adopt}."
            )
        if job.batch < self.batch_next - 1:
            raise ConfigError(
                f"Sink {sink_id!r} has all of query {self.query} up to batch {self.batch_next - 1}, but Spark begins "
                f"with batch {job.batch} again: its checkpointLocation is an older copy. The batches after that one "
                f"may have other rows now than those that were written.\n"
                f"  Choices: give the query its newest checkpointLocation; or a new one, sources that begin where its "
                f"rows in the output end, and {adopt}."
            )
