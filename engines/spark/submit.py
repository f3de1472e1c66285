"""Units on Spark: one job for each stage, a few units in each of its tasks, and receipts as the job's result.

Invariants: a job has effects only in its one result stage, and is collected once, so that no plan runs its tasks again;
a task gets bytes and the name of a function; a task that fails repeats all of its units, in attempts of their own; the
label of an attempt is unique; a job has a description of its own, and the thread's jobs afterwards have the caller's
again. All of it is for classic Spark and for Spark Connect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from exactlyonce.engines.bounded.stages import (
    Executors,
    Submit,
    UnitsDone,
    error_of,
    failure_of,
    perform,
    settled,
)
from exactlyonce.engines.bounded.unit.messages import UnitFailure
from exactlyonce.engines.bounded.workplace import THIS_MACHINE, usable_staging
from exactlyonce.engines.spark.session import (
    cores,
    in_short,
    is_sparks,
    is_stopped,
    known_cause,
    refuse_speculation_in,
    runs_here,
)
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, require
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, Row, SparkSession
import threading
import uuid
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

    An error of *succeeded* is raised once the work has ended.
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


_SCHEMA = "place int, answer binary"
_FAILURE = "The failure of a unit, for its driver: "
_FAILED = re.compile(rf"{_FAILURE}(\{{.*\}})")
_encode = msgspec.json.Encoder().encode
_failure_decoder = msgspec.json.Decoder(UnitFailure)
TASKS_PER_CORE = 4
"""A task costs more than a small unit; with several for each core, a core that is done early takes another one."""


class StageFailed(ExactlyOnceError):
    """A stage of a Spark job failed, and no error of a unit is the cause. Its checkpoint never happened; nothing is
    lost."""


def submit_to(spark: SparkSession, progress: UnitsDone | None = None) -> Submit:
    """A `Submit` whose units are tasks of *spark*. Another thread, too, calls *progress*; its errors are raised.

    Raises `ConfigError` if *spark* would run a task twice at the same time.
    """
    refuse_speculation_in(spark)

    @lru_cache(1)
    def tasks_max(checkpoint: str) -> int:
        """It is asked for anew with each *checkpoint*: a cluster grows and shrinks."""
        return TASKS_PER_CORE * _cores(spark)

    def submit(stage: str, work: Sequence[bytes]) -> list[bytes]:
        checkpoint = stage.partition(", ")[0]
        tasks = len(work) if len(work) <= TASKS_PER_CORE else min(len(work), tasks_max(checkpoint))
        frame = spark.range(0, tasks, 1, tasks).mapInArrow(partial(_run, list(work), tasks), _SCHEMA)
        try:
            with described(spark, f"{stage}, {counted(len(work), 'unit')}"):
                told = None if progress is None else partial(progress, stage)
                rows = frame.collect() if told is None else _collect(spark, frame, tasks, len(work), told)
        except Exception as error:
            if (is_sparks(error) or isinstance(error, AttributeError)) and is_stopped(spark):
                raise StageFailed(
                    f"The Spark session was stopped before {stage} was done. Nothing of its checkpoint is visible, and "
                    f"nothing is lost: call again with a session that runs."
                ) from None
            if not is_sparks(error):
                raise
            failed = _stage_failed(stage, str(error))
            raise failed from failed.__cause__
        answers: dict[int, bytes] = {row.place: bytes(row.answer) for row in rows}
        require(sorted(answers) == list(range(len(work))), "every task answers once")
        return settled(answers[place] for place in range(len(work)))

    return submit


def _stage_failed(stage: str, reason: str) -> ExactlyOnceError:
    """The error for Spark's *reason*: of a unit's own class, if that is one of `pipeline.errors`."""
    failed = _FAILED.search(reason)
    failure = _failure_decoder.decode(failed[1]) if failed else None
    text = (
        f"Spark could not finish {stage}. Nothing of its checkpoint is visible, and nothing is lost: run the command "
        f"again once the cause is fixed; --spark-log FILE keeps all that Spark writes. It says:\n"
        f"  {in_short(reason) if failure is None else failure.text}"
    )
    if failure is None:
        return known_cause(reason) or StageFailed(text)
    error = error_of(msgspec.structs.replace(failure, text=text))
    if type(error) is not ExactlyOnceError:
        return error
    failed_stage = StageFailed(text, **error.facts)
    failed_stage.__cause__ = error.__cause__
    return failed_stage


def _collect(
    spark: SparkSession, frame: DataFrame, tasks: int, units: int, told: Callable[[int, int], None]
) -> list[Row]:
    """The rows of *frame*; *told* gets the units done, about as many as the share of tasks done, and all units."""
    told(0, units)
    rows = watched(spark, frame.collect, lambda done: told(units * done // tasks, units) if done < tasks else None)
    told(units, units)
    return rows


def executors_of(spark: SparkSession, staging: str | Path | None, progress: UnitsDone | None = None) -> Executors:
    """The executors of *spark*; ConfigError where they need a *staging* shared with this machine."""
    if staging is None and not runs_here(spark):
        require_staging(spark.conf.get("spark.master", "") or "a Connect server")
    submit = submit_to(spark, progress)
    return Executors(submit, usable_staging(staging or THIS_MACHINE), lambda: _cores(spark))


def _cores(spark: SparkSession) -> int:
    with described(spark, "exactlyonce: how many cores are there?"):
        return cores(spark)


def require_staging(master: str) -> NoReturn:
    """Raise ConfigError: a Spark on other machines needs a shared folder."""
    raise ConfigError(
        f"--staging is needed with --master {master}: a folder that all executors and this machine see under the same "
        f"path, or a URL hdfs://host:port/folder or s3://bucket/prefix, with room for the input of a chunk."
    )


def _run(work: list[bytes], tasks: int, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Do the share of *work* of the task whose number is in *batches*, one of so many *tasks*.

    The first units have the most input, so tasks take units in turn.
    """
    import pyarrow
    from pyspark import TaskContext

    task = TaskContext.get()
    require(task is not None, "a unit runs in a task")
    assert task is not None
    for number in chain.from_iterable(batch.column(0).to_pylist() for batch in batches):
        for place in range(number, len(work), tasks):
            label = f"{task.stageId()}-{task.taskAttemptId()}-{place}-{task.attemptNumber()}"
            yield pyarrow.RecordBatch.from_arrays(
                [pyarrow.array([place], pyarrow.int32()), pyarrow.array([_done(work[place], label)], pyarrow.binary())],
                ["place", "answer"],
            )


def _done(work: bytes, label: str) -> bytes:
    try:
        return perform(work, label)
    except ExactlyOnceError as error:  # Spark tries again, and passes on no more than the text of the last one
        raise type(error)(f"{error}\n{_FAILURE}{_encode(failure_of(error)).decode()}", **error.facts) from None
