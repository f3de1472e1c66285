"""A canary: the moments at which Spark pickles the writer of a Python source, on which the sink relies.

The sink's driver assigns transactions, or blocks, as the writer is pickled for tasks (`FormatWriter.__getstate__`). So
of each job, a write or one batch of a query, Spark must

1. make a writer of its own, and pickle it for the first time before any task of the job writes;
2. give every task a copy with that state, and no writer of another job;
3. do so after the commit of the batch before, which frees transactional ids: batches do not overlap.

It may pickle a writer several times, and commit with another one, in another process. If a version of Spark does
otherwise, these tests fail, and the sink has to assign at another moment.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

BATCHES, TASKS = 3, 2


def canary(log: Path) -> Any:
    """The class of a format `canary`, whose writers note in *log* what happens to them; Spark sends it by value."""
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceStreamArrowWriter,
        WriterCommitMessage,
    )

    path = str(log)

    def note(*words: object) -> None:
        file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(file, f"{' '.join(map(str, words))}\n".encode())
        os.close(file)

    class Noting:
        assignment = ""

        def __getstate__(self) -> dict[str, Any]:
            if not self.assignment:
                self.assignment = uuid.uuid4().hex
                note("assigned", self.assignment)
            return dict(self.__dict__)

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            for _ in iterator:
                pass
            note("written", self.assignment)
            return WriterCommitMessage()

        def abort(self, *_: Any) -> None:
            note("aborted")

    class Batch(Noting, DataSourceArrowWriter):
        def commit(self, messages: Any) -> None:
            note("committed", len(messages))

    class Stream(Noting, DataSourceStreamArrowWriter):
        def commit(self, messages: Any, batchId: int) -> None:
            note("committed", len(messages))

    class Canary(DataSource):
        @classmethod
        def name(cls) -> str:
            return "canary"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return Batch()

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return Stream()

    return Canary


@pytest.fixture
def log(spark: Any, tmp_path: Path) -> Path:
    log = tmp_path / "log"
    spark.dataSource.register(canary(log))
    return log


def jobs(log: Path) -> list[list[list[str]]]:
    """The notes of each job, as far as its commit."""
    found: list[list[list[str]]] = [[]]
    for line in log.read_text().splitlines():
        found[-1].append(line.split())
        if line.startswith("committed"):
            found.append([])
    assert found.pop() == [], "notes after the last commit"
    return found


def assert_relied_on(jobs: list[list[list[str]]], count: int) -> None:
    assert len(jobs) == count
    for job in jobs:
        assert [kind for kind, _ in groupby(kind for kind, _ in job)] == ["assigned", "written", "committed"]
        assert job[-1] == ["committed", str(TASKS)]
        assigned = [which for kind, which in job if kind == "assigned"]
        written = [which for kind, which in job if kind == "written"]
        assert written == TASKS * assigned[-1:], "tasks have the writer that was pickled for their job"
    every = [which for job in jobs for kind, which in job if kind == "assigned"]
    assert len(set(every)) == len(every), "no writer serves two jobs"


def test_of_a_batch(spark: Any, log: Path) -> None:
    for _ in range(BATCHES):
        spark.range(10).repartition(TASKS).write.format("canary").mode("append").save()
    assert_relied_on(jobs(log), BATCHES)


def test_of_each_batch_of_a_query(spark: Any, log: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    for number in range(BATCHES):
        (folder / f"{number}.txt").write_text("one\ntwo\nthree\nfour\n")
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder)).repartition(TASKS)
    writing = lines.writeStream.format("canary").option("checkpointLocation", str(tmp_path / "location"))
    query = writing.trigger(availableNow=True).start()
    query.awaitTermination()
    assert_relied_on(jobs(log), BATCHES)
