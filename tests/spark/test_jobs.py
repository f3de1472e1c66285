"""Descriptions and progress of jobs on classic Spark; `test_connect` shows those of Connect."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from exactlyonce.engines.spark import jobs
from exactlyonce.engines.spark.jobs import described, watched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
