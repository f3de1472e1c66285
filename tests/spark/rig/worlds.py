"""The driver and the tasks of a sink without Spark: what Spark does to them, one step at a time, on real servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.types import LongType, StringType, StructType
from targets import Row, rows_of

from exactlyonce.engines.spark.sink.driver import SinkDriver
from exactlyonce.engines.spark.sink.options import parse_sink_options
from exactlyonce.engines.spark.sink.position import SparkJob
from exactlyonce.engines.spark.sink.task import Assignment, Flushed, write_store_task, write_task
from exactlyonce.testing.cluster import KafkaCluster

QUERY = "a-query"
ROWS = StructType().add("id", LongType()).add("customer", StringType()).add("total", LongType())
VALUES = StructType().add("value", StringType())


class World:
    """A sink, its target, and the drivers that were made for it: a planner and a committer each, as Spark does."""

    def __init__(self, kafka: KafkaCluster, name: str, target: Any) -> None:
        self.kafka, self.name, self.target = kafka, name, target
        self.schema = VALUES if target.store == "kafka" else ROWS
        self.made: list[SinkDriver] = []

    def driver(self, name: str, **changes: str) -> SinkDriver:
        given = {"sinkId": self.name, "kafka.bootstrap.servers": self.kafka.bootstrap_servers, **self.target.options}
        self.made.append(SinkDriver(parse_sink_options({**given, **changes}, self.schema, streaming=False), name))
        return self.made[-1]

    def pair(self, name: str, **changes: str) -> tuple[SinkDriver, SinkDriver]:
        return self.driver(name, **changes), self.driver(name, **changes)

    def tasks(self, planner: SinkDriver, batch: int, partitions: int = 2, query: str = QUERY) -> list[Flushed]:
        return self.job(planner, SparkJob(query, batch), [rows_of(batch, each) for each in range(partitions)])

    def job(self, planner: SinkDriver, job: SparkJob, tasks: Sequence[Sequence[Row]]) -> list[Flushed]:
        """Plan *job*, and run one task for each of *tasks*; Spark runs one where there are no rows."""
        assignment = planner.assign()
        return [self.task(planner, assignment, job, rows, place=place) for place, rows in enumerate(tasks or [[]])]

    def task(
        self, planner: SinkDriver, assignment: Assignment, job: SparkJob, rows: Sequence[Row],
        place: int = 0, attempt: int = 0,
    ) -> Flushed:  # fmt: skip
        return self.task_of(planner, assignment, job, self.target.batch(rows), place, attempt)

    def attempts(self, planner: SinkDriver, job: SparkJob, rows: Sequence[Row], count: int) -> list[Flushed]:
        assignment = planner.assign()
        return [self.task(planner, assignment, job, rows, attempt=each) for each in range(1, count + 1)]

    def task_of(
        self, planner: SinkDriver, assignment: Assignment, job: SparkJob, batch: Any, place: int = 0, attempt: int = 0
    ) -> Flushed:
        """One task over a batch of whatever columns. A store is told only whether the task was tried before."""
        options = planner.options
        if self.target.store == "kafka":
            return write_task(options, assignment, job, place, attempt, [batch])
        return write_store_task(options, assignment, job, place, attempt > 0, [batch])

    def found(self) -> Any:
        return self.target.found()

    def assert_exact(self, *batches: int, partitions: int = 2) -> None:
        assert self.found() == expected(*batches, partitions=partitions)
        self.target.assert_settled()


def expected(*batches: int, partitions: int = 2) -> list[Row]:
    return sorted(row for batch in batches for each in range(partitions) for row in rows_of(batch, each))
