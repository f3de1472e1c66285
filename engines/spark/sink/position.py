"""The position of a sink's jobs, which its manifests carry instead of a pipeline's offsets.

Invariants: a job held here is decided, and its rows are never written again; a query's batch number only grows; only
one query writes to a sink, until another one adopts it by name. Of the last decided batch, which alone Spark may write
again, the tally of rows is known, so that other rows under its number are noticed.

A write in `foreachBatch` is known by the query, the batch and its place among the batch's writes: the number of settled
writes of this run of the function, which every decision holds, even that of a skipped write. A tally does not depend on
the order of rows or on tasks; a row counts as its bytes, whether a column is a string or binary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.pipeline.errors import ConfigError, Halt

QUERY, WRITE, ROWS, RUN = "query", "write", "rows", "run"
WRITES_REMEMBERED = 1_000
HASH_BYTES = 16
_MODULUS = 1 << 8 * HASH_BYTES
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Tally(msgspec.Struct, frozen=True):
    """The number of some rows, and a sum of their hashes."""

    rows: int = 0
    digest: int = 0
    """The sum of the rows' hashes, modulo 2^128."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.digest + other.digest) % _MODULUS)


def tally_of(rows: Iterable[tuple[Any, ...]]) -> Tally:
    """The tally of rows, as tuples of values.

    >>> tally_of([("t", b"a", None), ("t", b"b", None)]) == tally_of([("t", b"b", None), ("t", b"a", None)])
    True
    >>> tally_of([("t", b"a", None)]).digest == tally_of([("t", b"b", None)]).digest
    False
    """
    hashes = [blake2b(_encoded(row), digest_size=HASH_BYTES).digest() for row in rows]
    return Tally(len(hashes), sum(int.from_bytes(digest, "little") for digest in hashes) % _MODULUS)


def _encoded(value: Any) -> bytes:
    try:
        return _encode(value)
    except TypeError:  # msgspec cannot sort a map whose keys are no strings
        return _encode(_sorted(value))


def _sorted(value: Any) -> Any:
    """*value* with a list of pairs for every map in it."""
    if isinstance(value, dict):
        return sorted((_encoded(key), _encoded(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


class SparkJob(msgspec.Struct, frozen=True):
    """One batch of a streaming query, one write within it, or one batch write, which may have an id."""

    query: str = ""
    batch: int = 0
    write_id: str = ""
    run: str = ""
    """The run of a `foreachBatch` function to which a write belongs."""

    def __str__(self) -> str:
        if self.query:
            return f"batch {self.batch} of query {self.query}"
        return f"write {self.write_id!r}" if self.write_id else "this write"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that are decided."""

    query: str = ""
    """The streaming query's id in Spark's checkpoint location; empty before the first batch."""
    batch_next: int = 0
    """The first batch that may not be decided."""
    parts: tuple[Tally, ...] = ()
    """The writes of the batch before `batch_next`, in order: one of a query, any number of a `foreachBatch` function.
    Empty if an older version decided it."""
    run: str = ""
    """The last run of the function."""
    passed: int = 0
    """The number of that run's settled writes."""
    decided_in: int = 0
    """The checkpoint that decided the batch, or its first write."""
    writes: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest | None) -> Position:
        """The position in *manifest*, the newest of a sink."""
        if manifest is None:
            return cls()
        if not manifest.is_spark_sink:
            raise ConfigError(
                f"{manifest.pipeline!r} is the name of a pipeline, of which there are checkpoints. Give the sink "
                f"another sinkId."
            )
        by_source: dict[str, list[SourceOffset]] = {QUERY: [], WRITE: [], ROWS: [], RUN: []}
        for offset in manifest.offsets:
            by_source[offset.source].append(offset)
        writes = tuple(offset.topic_id for offset in by_source[WRITE])
        if not by_source[QUERY]:
            return cls(writes=writes)
        (query,), run = by_source[QUERY], next(iter(by_source[RUN]), None)
        return cls(
            query=query.topic_id,
            batch_next=query.offset,
            parts=tuple(Tally(offset.offset, int(offset.topic_id, 16)) for offset in by_source[ROWS]),
            run=run.topic_id if run else "",
            passed=run.partition if run else 0,
            decided_in=run.offset if run else manifest.checkpoint,
            writes=writes,
        )

    def offsets(self) -> tuple[SourceOffset, ...]:
        """The position as a manifest carries it: queries and writes are sources. Older versions skip ROWS and RUN."""
        offsets = [SourceOffset(QUERY, "spark-batches", self.query, 0, self.batch_next)] if self.query else []
        offsets += [SourceOffset(WRITE, "spark-writes", write_id, 0, 1) for write_id in self.writes]
        for place, part in enumerate(self.parts):
            offsets.append(SourceOffset(ROWS, "spark-rows", f"{part.digest:032x}", place, part.rows))
        if self.parts:
            offsets.append(SourceOffset(RUN, "spark-runs", self.run, self.passed, self.decided_in))
        return tuple(offsets)

    def place(self, job: SparkJob) -> int:
        """The number of *job* among the writes of its batch."""
        is_same_run = job.run and (job.query, job.batch + 1, job.run) == (self.query, self.batch_next, self.run)
        return self.passed if is_same_run else 0

    def holds(self, job: SparkJob) -> bool:
        """Whether *job* is decided.

        >>> position = Position(query="q", batch_next=3, parts=(Tally(9),))
        >>> position.holds(SparkJob("q", 2)), position.holds(SparkJob("q", 3))
        (True, False)
        """
        if not job.query:
            return job.write_id in self.writes
        if job.query != self.query or job.batch >= self.batch_next:
            return False
        return not self.parts or self.place(job) < len(self.parts)

    def after(self, job: SparkJob, tally: Tally, checkpoint: int) -> Position:
        """The position after *checkpoint* has decided *job* with the rows of *tally*, or has skipped a decided job."""
        if not job.query:
            writes = (*self.writes, job.write_id)[-WRITES_REMEMBERED:] if job.write_id else self.writes
            return msgspec.structs.replace(self, writes=writes)
        place, is_held = self.place(job), self.holds(job)
        is_same_batch = (job.query, job.batch + 1) == (self.query, self.batch_next)
        parts = self.parts if is_same_batch else ()
        return Position(
            query=job.query,
            batch_next=job.batch + 1,
            parts=parts if is_held else (*parts[:place], tally, *parts[place + 1 :]),
            run=job.run,
            passed=place + 1,
            decided_in=self.decided_in if is_same_batch else checkpoint,
            writes=self.writes,
        )

    def refuse(self, job: SparkJob, options: SinkOptions) -> None:
        """Raise if *job* cannot be the next: its query is unknown and adopts nothing, or it is too old, or ahead."""
        if not job.query or not self.query or job.query != self.query == options.adopt_query:
            return
        adopt = f'.option("adoptQuery", "{self.query}")'
        if job.query != self.query:
            raise ConfigError(
                f"Sink {options.sink_id!r} has been written to by another query, {self.query}, up to batch "
                f"{self.batch_next - 1}; this one is {job.query}. So its checkpointLocation is not the one that "
                f"belongs to the sink, and what it reads again would be written again.\n"
                f"  Choices: give the query its old checkpointLocation; or give this query a sinkId of its own; or, if "
                f"it is to go on where its sources are told to begin, whatever the other has written: {adopt}."
            )
        if job.batch < self.batch_next - 1:
            raise ConfigError(
                f"Sink {options.sink_id!r} has all of query {self.query} up to batch {self.batch_next - 1}, but Spark "
                f"begins with batch {job.batch} again: its checkpointLocation is an older copy. The batches after that "
                f"one may have other rows now than those that were written.\n"
                f"  Choices: give the query its newest checkpointLocation; or a new one, sources that begin where its "
                f"rows in the output end, and {adopt}."
            )
        has_gap = self.parts and not self.run and not job.run and job.batch > self.batch_next
        if has_gap and options.accept_loss != self.decided_in:
            raise Halt(
                f"Sink {options.sink_id!r} has query {self.query} up to batch {self.batch_next - 1}, but Spark goes on "
                f"with batch {job.batch}: of the batches between them nothing was decided here. Its checkpointLocation "
                f"is ahead of the sink: the topic of the sink's decisions is an older copy, or the query has written "
                f"those batches elsewhere.\n"
                f"  Choices: give the query the checkpointLocation that belongs to the sink, or restore the sink's "
                f"topics; or give the query a sinkId of its own; or, if what is missing here is missing for good: "
                f'.option("acceptLoss", "{self.decided_in}").'
            )

    def refuse_other_rows(self, job: SparkJob, tally: Tally, rows_decided: int | None, options: SinkOptions) -> None:
        """Raise Halt unless the rows of *job*, which is decided, are those that were written then.

        *rows_decided* is the number of rows of a batch that an older version decided; None if unknown.
        """
        if job.write_id or options.accept_loss == self.decided_in:
            return
        if self.parts:
            decided = self.parts[self.place(job)]
            before, is_same = decided.rows, tally == decided
        else:
            before = tally.rows if rows_decided is None else rows_decided
            is_same = before == tally.rows
        if is_same:
            return
        others = f"{tally.rows} others" if tally.rows != before else "as many, but others"
        which = f"write {self.place(job) + 1} to sink {options.sink_id!r} in {job}" if job.run else f"{job}"
        raise Halt(
            f"Sink {options.sink_id!r}: {which} was decided in checkpoint {self.decided_in}, with {before} rows. Now "
            f"Spark gives {others} under the same number: they were not written, and nothing was changed.\n"
            f"  Either the checkpointLocation is an older copy, from which Spark has planned the batch anew; or the "
            f"query does not give the same rows when a batch is run again: rand(), uuid(), the clock, sums of doubles, "
            f"sources that have changed.\n"
            f"  Choices: (1) give the query the checkpointLocation that belongs to the sink; (2) to write these rows "
            f"beside those that are there, give the query a sinkId of its own, or a new checkpointLocation, sources "
            f"that begin where its rows in the output end, and "
            f'.option("adoptQuery", "{self.query}"); (3) if the rows that were decided stand for this batch, and those '
            f'that Spark gives now are given up: .option("acceptLoss", "{self.decided_in}").'
        )


def rows_decided(retained: Sequence[Manifest], position: Position) -> int | None:
    """The number of rows of the batch before `batch_next`, decided by an older version, if its manifest is retained.

    Manifests of batch writes after it carry the same position.
    """
    place = (position.query, position.batch_next)
    for number, manifest in enumerate(retained):
        then = Position.of(manifest)
        if (then.query, then.batch_next) == place:
            is_first = number > 0 or manifest.checkpoint == 1
            return sum(committable.records for committable in manifest.committables) if is_first else None
    return None
