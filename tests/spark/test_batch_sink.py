"""`df.write.format("exactlyonce")`: all of a write or nothing, and once where it has an id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.broker, pytest.mark.spark]


def write(rows: DataFrame, kafka: KafkaCluster, name: str, mode: str = "append", **options: str) -> None:
    given = {"sinkId": name, "kafka.bootstrap.servers": kafka.bootstrap_servers, **options}
    rows.write.format("exactlyonce").mode(mode).options(**given).save()


@pytest.mark.exhaustive
def test_a_batch_write(spark: SparkSession, kafka: KafkaCluster, topic_name: str) -> None:
    """Rows go to the topics that they name, in order of each task; a write that fails leaves nothing; one with an id
    that was written is not written again; overwriting and speculation are refused."""
    for name in ("a", "b"):
        kafka.create_topic(f"{topic_name}-{name}", 1)
    rows = spark.range(0, 1000, 1, 4).selectExpr(
        f"concat('{topic_name}-', if(id % 2 = 0, 'a', 'b')) as topic", "cast(id as string) as value", "null as key"
    )
    rows = rows.withColumn("key", rows.key.cast("binary"))

    def failing(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
        if "999" in batch.column(1).to_pylist():
            raise RuntimeError("the last task fails")

    with pytest.raises(PySparkException, match="the last task fails"):
        write(rows.mapInArrow(failing, rows.schema), kafka, topic_name)
    assert kafka.read_committed(f"{topic_name}-a") == []
    for _ in range(2):
        write(rows, kafka, topic_name, writeId="monday")
    for name, first in (("a", 0), ("b", 1)):
        values = [int(record.value or b"") for record in kafka.read_committed(f"{topic_name}-{name}")]
        assert sorted(values) == list(range(first, 1000, 2))
        for start in range(0, 1000, 250):
            task = [value for value in values if start <= value < start + 250]
            assert task == sorted(task)
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        write(rows, kafka, topic_name, mode="overwrite")
    spark.sparkContext.setLocalProperty("spark.speculation", "true")  # as Spark tells its tasks of the setting
    try:
        with pytest.raises(PySparkException, match=r"spark\.speculation is on"):
            write(rows, kafka, topic_name)
    finally:
        spark.sparkContext.setLocalProperty("spark.speculation", "false")
