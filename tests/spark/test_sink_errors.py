"""Errors of a sink as Spark shows them: the message alone, whichever of Spark's processes meets it. Without a JVM."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import LongType, StringType, StructType

from exactlyonce.engines.spark.shown_errors import without_causes
from exactlyonce.engines.spark.sink import writer
from exactlyonce.engines.spark.sink.position import SparkJob
from exactlyonce.engines.spark.sink.writer import BatchWriter, batch_writer
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, InvariantViolation, StoreError, StoreUnavailable

SAID = "Sink 'totals': there is no table 'totals': create it."
LINES_MAX = 30
"""Spark's own frames among them."""


@pytest.fixture
def made() -> BatchWriter:
    options = {"sinkId": "totals", "sink": "postgres", "table": "totals", "dsn": "env:DSN"}
    schema = StructType().add("id", LongType())
    return batch_writer({**options, "kafka.bootstrap.servers": "x:1"}, schema, False)


def failing_with(kind: type[ExactlyOnceError]) -> Callable[..., None]:
    def fail(*arguments: Any) -> None:
        try:
            raise ValueError("password=hunter2")
        except ValueError as error:
            raise kind(SAID) from error

    return fail


def shown(use: Callable[[], Any]) -> list[str]:
    """The lines that Spark's Python processes send of what *use* raises."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        use()
    return "".join(traceback.format_exception(raised.value)).splitlines()


@pytest.mark.parametrize("kind", [StoreError, StoreUnavailable])
def test_a_job_that_cannot_begin(
    made: BatchWriter, monkeypatch: Any, capfd: pytest.CaptureFixture[str], kind: type[ExactlyOnceError]
) -> None:
    """Spark's serializer, in which a job begins, neither wraps the error nor prints a trace of its own."""
    monkeypatch.setattr(writer, "with_driver", failing_with(kind))
    serializer: Any = CloudPickleSerializer  # it ships without types
    lines = shown(lambda: serializer().dumps(made))
    assert lines[-1].endswith(f"JobNotBegun: {SAID}")
    assert len(lines) < LINES_MAX
    assert "hunter2" not in "".join(lines) + "".join(capfd.readouterr())


def test_a_commit_that_fails() -> None:
    """The message is the last line, and what led to the error is in none."""
    lines = shown(lambda: without_causes(failing_with(StoreError)))
    assert lines[-1] == f"exactlyonce.pipeline.errors.StoreError: {SAID}"
    assert "hunter2" not in "".join(lines)


@pytest.mark.parametrize("simplifies", [True, False])
def test_the_traceback_of_a_process_of_sparks_is_hidden(monkeypatch: Any, simplifies: bool) -> None:
    """In a process whose tracebacks Spark shortens, for an error of ours alone."""
    monkeypatch.setattr("os.environ", {"SPARK_SIMPLIFIED_TRACEBACK": "1"} if simplifies else {})
    with pytest.raises(InvariantViolation):
        without_causes(failing_with(InvariantViolation))
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
    with pytest.raises(StoreError, match=SAID):
        without_causes(failing_with(StoreError))
    assert ("SPARK_HIDE_TRACEBACK" in os.environ) == simplifies


def test_an_abort_that_fails(made: BatchWriter, monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """It is told on stderr: raised, it would hide the error with which the job has failed. A defect keeps its trace."""
    monkeypatch.setattr(writer, "with_driver", failing_with(StoreError))
    monkeypatch.setenv("SPARK_SIMPLIFIED_TRACEBACK", "1")
    made.abort([])
    assert "SPARK_HIDE_TRACEBACK" not in os.environ, "the process goes on, and a later defect has its traceback"
    assert capfd.readouterr().err == f"exactlyonce, sink totals: after a failed job: {SAID}\n"
    monkeypatch.setattr(writer, "with_driver", failing_with(InvariantViolation))
    assert "in fail" in "".join(shown(lambda: made.abort([])))


class Context:
    """The local properties that Spark sends to a task."""

    def __init__(self, **properties: str) -> None:
        self.properties = {name.replace("_", "."): value for name, value in properties.items()}

    def getLocalProperty(self, name: str) -> str | None:
        return self.properties.get(name)


OF_A_BATCH = Context(
    sql_streaming_queryId="q", streaming_sql_batchId="7", spark_app_id="a", spark_app_startTime="1",
    spark_sql_execution_root_id="3",
)  # fmt: skip


def job(context: Context, **given: str) -> SparkJob:
    """The job of a `df.write` in a task with this context."""
    options = {"sinkId": "totals", "topic": "t", "kafka.bootstrap.servers": "x:1", **given}
    task: Any = context
    return batch_writer(options, StructType().add("value", StringType()), False).job_of(task)


def test_a_write_that_nobody_could_tell_from_its_repetition_is_refused() -> None:
    """Its batch is not known in another thread, on Connect and outside of queries: it names what to do there."""
    with pytest.raises(ConfigError, match=r"(?s)has no writeId.*\"writeId\", ID.*\"none\".*foreachBatch.*Connect"):
        job(Context())
    with pytest.raises(ConfigError, match="has no writeId"):
        job(Context(), writeId="")


def test_a_write_is_known_by_its_id_or_else_by_its_batch() -> None:
    """With the id none it counts anew, also within a batch."""
    assert job(OF_A_BATCH) == SparkJob("q", 7, run="a/1/3")
    assert job(Context(), writeId="monday") == job(OF_A_BATCH, writeId="monday") == SparkJob(write_id="monday")
    assert job(Context(), writeId="none") == job(OF_A_BATCH, writeId="none") == SparkJob()
