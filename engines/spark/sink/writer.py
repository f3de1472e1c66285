"""The writers of `df.writeStream` and `df.write` with the format `exactlyonce`; docs/spark-jobs.md has their options.

Spark pickles a writer for its tasks before every batch: then the driver assigns. The writer that commits may live in
another process. Spark tells only tasks the query and batch of their job, so every task gets the sink's position, checks
whether its job is decided, and names the job in its message. Invariants: the rows of a job become visible as a whole,
in a store task by task, once decided; an error of ours reaches Spark as its message alone, without causes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import PySparkPicklingError
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from exactlyonce.engines.spark.shown_errors import hide_traceback, without_causes
from exactlyonce.engines.spark.sink.driver import SinkDriver, with_driver
from exactlyonce.engines.spark.sink.options import REPEATABLE, SinkOptions, parse_sink_options
from exactlyonce.engines.spark.sink.position import SparkJob
from exactlyonce.engines.spark.sink.task import Assignment, Flushed, write_store_task, write_task
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, InvariantViolation, require

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import TaskContext
    from pyspark.sql.types import StructType

QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
APPLICATION_PROPERTY, STARTED_PROPERTY = "spark.app.id", "spark.app.startTime"
"""The start of the JVM: a driver that a cluster starts again, as YARN does, has the same application id."""
ROOT_PROPERTY = "spark.sql.execution.root.id"
"""The root execution, counted from 0: all jobs of one run of a batch share it."""
R = TypeVar("R")


class JobNotBegun(PySparkPicklingError):
    """A job cannot begin. Of all errors while it pickles a writer, Spark shows only this kind as it is."""


class TaskMessage(WriterCommitMessage):
    """The message from a task to the driver, carried by Spark."""

    def __init__(self, flushed: Flushed) -> None:
        self.flushed = flushed


class FormatWriter(ABC):
    """The common part of the writers of a stream and of a batch."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self.assignment: Assignment | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The pickled writer, with the assignment of its tasks."""
        if self.assignment is None:
            try:
                self.assignment = self.ask_driver(lambda driver: driver.assign())
            except InvariantViolation:
                raise
            except ExactlyOnceError as error:
                hide_traceback()
                raise JobNotBegun(str(error)) from None
        return dict(self.__dict__)

    def ask_driver(self, use: Callable[[SinkDriver], R]) -> R:
        """The result of *use*, with the sink's driver."""
        return without_causes(lambda: with_driver(self.options, use))

    def abort_job(self) -> None:
        """End the leftovers of a failed job. A failure goes to stderr: Spark would show it in place of the job's."""
        try:
            with_driver(self.options, lambda driver: driver.abort())
        except InvariantViolation:
            raise
        except ExactlyOnceError as error:
            print(f"exactlyonce, sink {self.options.sink_id}: after a failed job: {error}", file=sys.stderr, flush=True)

    @abstractmethod
    def job_of(self, context: TaskContext) -> SparkJob:
        """The job of a task."""

    def write(self, iterator: Iterator[RecordBatch]) -> TaskMessage:
        """Run one task, on an executor."""
        return without_causes(lambda: TaskMessage(self._write(_task_context(), iterator)))

    def _write(self, context: TaskContext, iterator: Iterator[RecordBatch]) -> Flushed:
        require(self.assignment is not None, "A writer reaches a task only with an assignment")
        assert self.assignment is not None
        job, partition, attempt = self.job_of(context), context.partitionId(), context.attemptNumber()
        is_speculative = (context.getLocalProperty("spark.speculation") or "false").lower() == "true"
        if self.options.target is not None:
            tried_before = attempt > 0 or is_speculative
            return write_store_task(self.options, self.assignment, job, partition, tried_before, iterator)
        if is_speculative:
            raise ConfigError(
                "spark.speculation is on: two attempts of a task would write at a time, and the open transaction of "
                "the failed attempt would hold readers back. Set spark.speculation to false."
            )
        return write_task(self.options, self.assignment, job, partition, attempt, iterator)


def flushed_of(messages: Sequence[WriterCommitMessage | None]) -> list[Flushed]:
    flushed = [message.flushed for message in messages if isinstance(message, TaskMessage)]
    require(len(flushed) == len(messages), "Spark commits only what all tasks have written")
    return flushed


def batch_of(context: TaskContext) -> SparkJob | None:
    """The batch of a streaming query for which a task works, and its run; None outside of queries."""
    query = context.getLocalProperty(QUERY_PROPERTY)
    if not query:
        return None
    names = (APPLICATION_PROPERTY, STARTED_PROPERTY, ROOT_PROPERTY)
    run = "/".join(_property(context, name) for name in names)
    return SparkJob(query, int(_property(context, BATCH_PROPERTY)), run=run)


def _property(context: TaskContext, name: str) -> str:
    value = context.getLocalProperty(name)
    require(value, f"Spark tells its tasks {name}")
    return str(value)


def _task_context() -> TaskContext:
    from pyspark import TaskContext

    context = TaskContext.get()
    require(context is not None, "A task has a context")
    assert context is not None
    return context


class StreamWriter(FormatWriter, DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`: a job is one batch of one query."""

    def job_of(self, context: TaskContext) -> SparkJob:
        batch = batch_of(context)
        require(batch is not None, "A batch of a query has its number")
        assert batch is not None
        return SparkJob(batch.query, batch.batch)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        flushed = flushed_of(messages)
        if flushed:
            job = flushed[0].job
            require(job.batch == batchId, "Tasks write the batch that Spark commits")
            self.ask_driver(lambda driver: driver.commit(job, flushed))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Abort after a task has failed too often, or after a `commit` that raised."""
        self.abort_job()


class BatchWriter(FormatWriter, DataSourceArrowWriter):
    """The writer of `df.write`: a job is a whole write with an id. Within `foreachBatch` it is part of a batch."""

    def job_of(self, context: TaskContext) -> SparkJob:
        if self.options.write_id == REPEATABLE:
            return SparkJob()
        if self.options.write_id:
            return SparkJob(write_id=self.options.write_id)
        batch = batch_of(context)
        if batch is None:
            raise ConfigError(
                f"Sink {self.options.sink_id!r}: this write has no writeId, and Spark says of no batch of a query that "
                f"it belongs to it. Whoever runs it again, Airflow say, would write its rows twice. Nothing was "
                f'written.\n  Choices: .option("writeId", ID), with an ID that is the same whenever this write is '
                f'repeated, and no other write\'s; or .option("writeId", "{REPEATABLE}"), if every run of it is to '
                f"write its rows anew.\n  In a function of foreachBatch the batch is known to writes from the "
                f"function's own thread, but not on Spark Connect: write from that thread, or let the writeId name the "
                f'batch, as f"orders-{{batch}}".'
            )
        return batch

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        flushed = flushed_of(messages)
        if flushed:
            self.ask_driver(lambda driver: driver.commit(flushed[0].job, flushed))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self.abort_job()


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """The writer of a batch; ConfigError for mode overwrite."""
    if overwrite:
        raise ConfigError('What a sink has written cannot be overwritten: write with .mode("append").')
    return BatchWriter(parse_sink_options(options, schema, streaming=False))
