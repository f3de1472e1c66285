"""The common part of the writers of a stream and of a batch: what tasks are told, do, and tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import WriterCommitMessage

from exactlyonce.engines.spark.sink.driver import with_driver
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job
from exactlyonce.engines.spark.sink.store_task import write_store_task
from exactlyonce.engines.spark.sink.task import write_task
from exactlyonce.pipeline.errors import ConfigError, require

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark import TaskContext


QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
APPLICATION_PROPERTY, ROOT_PROPERTY = "spark.app.id", "spark.sql.execution.root.id"
"""Of the JVM, and of what it executes on behalf of others: all jobs of one batch, in one run of it, have one root."""


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
            self.assignment = with_driver(self.options, lambda driver: driver.assign())
        return dict(self.__dict__)

    @abstractmethod
    def job_of(self, context: TaskContext) -> Job:
        """What the task is part of."""

    def write(self, iterator: Iterator[RecordBatch]) -> TaskMessage:
        """One task, on an executor."""
        context = _task_context()
        require(self.assignment is not None, "A writer reaches a task only with an assignment")
        assert self.assignment is not None
        job, partition, attempt = self.job_of(context), context.partitionId(), context.attemptNumber()
        is_speculative = _speculates(context)
        if self.options.target is not None:
            tried_before = attempt > 0 or is_speculative
            flushed = write_store_task(self.options, self.assignment, job, partition, tried_before, iterator)
        else:
            _refuse_speculation(is_speculative)
            flushed = write_task(self.options, self.assignment, job, partition, attempt, iterator)
        return TaskMessage(flushed)


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
    batch, application, root = (
        _property(context, name) for name in (BATCH_PROPERTY, APPLICATION_PROPERTY, ROOT_PROPERTY)
    )
    return Job(query, int(batch), run=f"{application}/{root}")


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
