"""Descriptions and progress of Spark jobs that a thread starts, on classic Spark and on Spark Connect.

Invariant: a job has a description of its own, and the thread's jobs afterwards have the caller's again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from exactlyonce.engines.connections import with_heartbeat
from exactlyonce.engines.spark.session import is_connect

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

T = TypeVar("T")
LOOK_INTERVAL_S = 1.0
_DESCRIPTION = "spark.job.description"


@contextmanager
def described(spark: SparkSession, description: str) -> Iterator[None]:
    """Jobs of this thread have *description* within the block: in Spark's UI or, on Connect, as a tag."""
    if is_connect(spark):
        tag = description.replace(",", ";")  # a tag has no commas
        spark.addTag(tag)
        with _restoring(lambda: spark.removeTag(tag)):
            yield
    else:
        context = spark.sparkContext
        theirs: Any = context.getLocalProperty(_DESCRIPTION)  # None removes it again, whatever PySpark's types say
        context.setJobDescription(description)
        with _restoring(lambda: context.setJobDescription(theirs)):
            yield


def watched(spark: SparkSession, run: Callable[[], T], succeeded: Callable[[int], None]) -> T:
    """The result of *run*, whose job this thread starts; *succeeded* gets the number of tasks done, as it grows.

    An error of *succeeded* ends the work.
    """
    growing = _Growing(succeeded)
    if is_connect(spark):
        return _watched_on_connect(spark, run, growing)
    context, tag = spark.sparkContext, f"exactlyonce-{uuid.uuid4().hex}"
    context.addJobTag(tag)
    with _restoring(lambda: context.removeJobTag(tag)):
        return with_heartbeat(lambda: growing(_tasks_done(context, tag)), lambda _: run(), LOOK_INTERVAL_S)


def _watched_on_connect(spark: SparkSession, run: Callable[[], T], growing: _Growing) -> T:
    thread = threading.get_ident()

    def told(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        if threading.get_ident() == thread:  # PySpark calls the handlers of a session for the jobs of every thread
            growing(sum(stage.num_completed_tasks for stage in stages or ()))

    handler: Any = told  # PySpark's type for it needs the packages of Connect
    spark.registerProgressHandler(handler)
    try:
        return run()
    finally:
        spark.removeProgressHandler(handler)


class _Growing:
    """Passes on a count only when it has grown."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told, self._count = told, 0

    def __call__(self, count: int) -> None:
        if count > self._count:
            self._count = count
            self._told(count)


def _tasks_done(context: SparkContext, tag: str) -> int:
    """The successful tasks of the job with *tag*; 0 before it has begun."""
    tracker = context.statusTracker()
    jobs = context._jsc.sc().statusTracker().getJobIdsForTag(tag)  # PySpark's tracker looks by group alone
    infos = [info for job in jobs if (info := tracker.getJobInfo(job)) is not None]
    stages = [tracker.getStageInfo(stage) for info in infos for stage in [*info.stageIds]]
    return sum(stage.numCompletedTasks for stage in stages if stage is not None)


@contextmanager
def _restoring(restore: Callable[[], object]) -> Iterator[None]:
    """Call *restore* at the end of the block."""
    try:
        yield
    finally:
        with suppress(Exception):  # py4j may raise anything once the JVM is gone: then there is nothing to restore
            restore()
