"""The expected output of sinks as DataFrames: against a topic and a store, which have lost some of it or not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.spark import backfill, expected
from exactlyonce.testing.cluster import KafkaCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODULE = """\
import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import FileSink, KafkaSink


class Order(msgspec.Struct):
    id: int
    customer: str


class Count(msgspec.Struct):
    customer: str
    orders: int
    last: int


def count(orders: int | None, order: Order) -> tuple[int, Count]:
    orders = (orders or 0) + 1
    return orders, Count(order.customer, orders, order.id)


pipeline = Pipeline("{name}")
orders = pipeline.source("in", KafkaSource("{name}-in", value=Order))
counts = orders.key_by(lambda order: order.customer).stateful_map("counts", count)
counts.sink("out", KafkaSink("{name}-out", key=lambda count: count.customer))
counts.sink("files", FileSink("{folder}", format="parquet"))
"""


def test_topics_and_stores_are_compared_with_it(
    spark: SparkSession, kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "counts"
    files.mkdir()
    (tmp_path / "counting_of_customers.py").write_text(MODULE.format(name=topic_name, folder=files))
    monkeypatch.syspath_prepend(tmp_path)
    pipeline = importlib.import_module("counting_of_customers").pipeline
    given: dict[str, Any] = {"bootstrap_servers": kafka.bootstrap_servers, "staging": tmp_path / "staging"}
    kafka.create_topic(f"{topic_name}-in", 2)
    kafka.create_topic(f"{topic_name}-out", 2)
    kafka.produce(f"{topic_name}-in", [f'{{"id": {n}, "customer": "c{n % 3}"}}' for n in range(40)])
    done = backfill(spark, pipeline, chunk_records=25, parallelism=2, **given)
    assert done.checkpoints == 2

    servers = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": f"{topic_name}-out"}
    seen = spark.read.format("exactlyonce").options(**servers).load()
    with expected(spark, pipeline, "out", **given) as outputs:
        columns = ["key", "value", "topic", "partition"]
        assert outputs.select(columns).exceptAll(seen.select(columns)).count() == 0
        rows = outputs.collect()
        places = {(row.input_topic, row.input_partition, row.input_offset) for row in rows}
        assert len(places) == len(rows) == seen.count() == 40
        assert {topic for topic, _, _ in places} == {f"{topic_name}-in"}

    with expected(spark, "counting_of_customers:pipeline", "files", chunk_records=1, **given) as outputs:
        counts = outputs.select("value.*")
        assert counts.schema.simpleString() == "struct<customer:string,orders:bigint,last:bigint>"
        rows = outputs.collect()
        assert ({row.checkpoint for row in rows}, len(rows)) == ({1, 2}, 40)
        assert spark.read.parquet(str(files)).exceptAll(counts).count() == 0
        lost = next(path for path in sorted(files.rglob("*.parquet")))
        missing = spark.read.parquet(str(lost)).collect()
        lost.unlink()
        assert sorted(counts.exceptAll(spark.read.parquet(str(files))).collect()) == sorted(missing)
    with expected(spark, pipeline, "files", first=2, **given) as outputs:
        assert {row.checkpoint for row in outputs.collect()} == {2}
    staged = [path for path in (tmp_path / "staging").iterdir() if path.name.startswith("exactlyonce-")]
    assert staged == [], "the files are gone after the block"
    with (
        pytest.raises(ConfigError, match="has no checkpoint there whose interval can be computed again"),
        expected(spark, pipeline, "out", last=0, **given),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"Checkpoint 3 of .* was not taken yet: the newest is 2"),
        expected(spark, pipeline, "out", last=3, **given),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="Say whose output is meant, by sink: one of out, files"),
        expected(spark, pipeline, **given),
    ):
        pass
