"""Descriptions and progress of jobs on classic Spark; `test_connect` shows those of Connect."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import until

from exactlyonce.engines.spark import jobs
from exactlyonce.engines.spark.jobs import described, watched

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession


def after(folder: Path, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The batches; that of the last place comes once the file `go-on` is there."""
    for batch in batches:
        if batch.column(0).to_pylist() == [3]:
            until((folder / "go-on").exists)
        yield batch


@pytest.mark.exhaustive
def test_tasks_are_counted_while_the_job_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four tasks are done while the last one waits; another thread's job is not counted."""
    monkeypatch.setattr(jobs, "LOOK_INTERVAL_S", 0.05)
    frame = spark.range(0, 4, 1, 4).mapInArrow(partial(after, tmp_path), "id long")
    counts: list[int] = []

    def succeeded(count: int) -> None:
        counts.append(count)
        if count == 3:
            other = threading.Thread(target=spark.range(0, 8, 1, 8).count)
            other.start()
            other.join()
            (tmp_path / "go-on").touch()

    assert len(watched(spark, frame.collect, succeeded)) == 4
    assert counts == sorted(set(counts))
    assert max(counts) in (3, 4)


def test_an_error_of_the_listener_ends_the_work(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LOOK_INTERVAL_S", 0.01)

    def refusing(count: int) -> None:
        raise LookupError(f"{count} tasks")

    with pytest.raises(LookupError, match="tasks"):
        watched(spark, spark.range(0, 40, 1, 40).collect, refusing)


@pytest.mark.parametrize("theirs", [None, "the program's own"])
def test_the_callers_description_comes_back(spark: SparkSession, theirs: str | None) -> None:
    """Also after an error; and none, where there was none."""
    context = spark.sparkContext
    context.setLocalProperty("spark.job.description", theirs)  # type: ignore[arg-type]  # None removes it
    try:
        with suppress(KeyError), described(spark, "orders: checkpoint 12, stage totals, 40 units"):
            assert context.getLocalProperty("spark.job.description") == "orders: checkpoint 12, stage totals, 40 units"
            raise KeyError
        assert context.getLocalProperty("spark.job.description") == theirs
    finally:
        context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]  # None removes it
