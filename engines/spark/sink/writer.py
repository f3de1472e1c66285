"""The common part of the writers of a stream and of a batch: what tasks are told, do, and tell.

Invariant: an error of ours reaches Spark, which shows it with all that led to it, as its message alone.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.errors import PySparkPicklingError
from pyspark.sql.datasource import WriterCommitMessage

from exactlyonce.engines.spark.sink.driver import SinkDriver, with_driver
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.store_task import write_store_task
from exactlyonce.engines.spark.sink.task import write_task
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, InvariantViolation, require

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import TaskContext


QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
APPLICATION_PROPERTY, STARTED_PROPERTY = "spark.app.id", "spark.app.startTime"
"""Of the JVM: where a cluster starts a driver again, as YARN does, the next one has the same id."""
ROOT_PROPERTY = "spark.sql.execution.root.id"
"""Of what it executes on behalf of others, counted from 0: all jobs of one batch, in one run of it, have one root."""


R = TypeVar("R")


class JobNotBegun(PySparkPicklingError):
    """A job cannot begin, for the reason in the text. Spark pickles its writer by then, and of all errors within that
    it leaves this kind as it is; another one would be shown behind a trace of Spark's serializer."""


class TaskMessage(WriterCommitMessage):
    """What Spark carries from a task to the driver."""

    def __init__(self, flushed: Flushed) -> None:
        self.flushed = flushed


class FormatWriter(ABC):
    """A writer up to its commit. Spark pickles it for the tasks."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self.assignment: Assignment | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Before the tasks: what they are told is part of the writer that they get."""
        if self.assignment is None:
            try:
                self.assignment = self.asked(lambda driver: driver.assign())
            except InvariantViolation:
                raise
            except ExactlyOnceError as error:
                raise JobNotBegun(str(error)) from None
        return dict(self.__dict__)

    def asked(self, use: Callable[[SinkDriver], R]) -> R:
        """What *use* gives, with the sink's driver."""
        return without_causes(lambda: with_driver(self.options, use))

    def abort_job(self) -> None:
        """End what a failed job has left. If that fails as well, it is told on stderr, and left to the next job: what
        this raises, Spark would show in the place of the error that it aborts for."""
        try:
            self.asked(lambda driver: driver.abort())
        except InvariantViolation:
            raise
        except ExactlyOnceError as error:
            print(
                f"exactlyonce, sink {self.options.sink_id}: behind a failed job: {error}", file=sys.stderr, flush=True
            )

    @abstractmethod
    def job_of(self, context: TaskContext) -> Job:
        """What the task is part of."""

    def write(self, iterator: Iterator[RecordBatch]) -> TaskMessage:
        """One task, on an executor."""
        return without_causes(lambda: TaskMessage(self._written(_task_context(), iterator)))

    def _written(self, context: TaskContext, iterator: Iterator[RecordBatch]) -> Flushed:
        require(self.assignment is not None, "A writer reaches a task only with an assignment")
        assert self.assignment is not None
        job, partition, attempt = self.job_of(context), context.partitionId(), context.attemptNumber()
        is_speculative = _speculates(context)
        if self.options.target is not None:
            tried_before = attempt > 0 or is_speculative
            return write_store_task(self.options, self.assignment, job, partition, tried_before, iterator)
        _refuse_speculation(is_speculative)
        return write_task(self.options, self.assignment, job, partition, attempt, iterator)


def without_causes(use: Callable[[], R]) -> R:
    """What *use* gives. An error of ours says all by itself; of a defect the way to it is kept."""
    try:
        return use()
    except InvariantViolation:
        raise
    except ExactlyOnceError as error:
        raise error.with_traceback(None) from None


def flushed_of(messages: Sequence[WriterCommitMessage | None]) -> list[Flushed]:
    """What all tasks have told."""
    flushed = [each.flushed for each in messages if isinstance(each, TaskMessage)]
    require(len(flushed) == len(messages), "Spark commits only what all tasks have written")
    return flushed


def batch_of(context: TaskContext) -> Job | None:
    """The batch of a streaming query that a task works for, if it does, and in which run of it."""
    query = context.getLocalProperty(QUERY_PROPERTY)
    if not query:
        return None
    application, started, root = (
        _property(context, name) for name in (APPLICATION_PROPERTY, STARTED_PROPERTY, ROOT_PROPERTY)
    )
    return Job(query, int(_property(context, BATCH_PROPERTY)), run=f"{application}/{started}/{root}")


def _property(context: TaskContext, name: str) -> str:
    found = context.getLocalProperty(name)
    require(found, f"Spark tells its tasks {name}")
    return str(found)


def _task_context() -> TaskContext:
    """Of the task that runs."""
    from pyspark import TaskContext

    context = TaskContext.get()
    require(context is not None, "A task has a context")
    assert context is not None
    return context


def _speculates(context: TaskContext) -> bool:
    """Whether Spark may run several attempts of a task at a time."""
    return (context.getLocalProperty("spark.speculation") or "false").lower() == "true"


def _refuse_speculation(is_speculative: bool) -> None:
    if is_speculative:
        raise ConfigError(
            "spark.speculation is on: two attempts of a task would write at a time, and the open transaction of the "
            "failed attempt would hold readers back. Set spark.speculation to false."
        )
