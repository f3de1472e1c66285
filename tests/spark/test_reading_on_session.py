"""The reads of the format `exactlyonce` on a session, against the records that a plain read_committed consumer sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from pyspark.errors import PySparkException, StreamingQueryException
from reads import given, make_anew, transaction
from settled import await_readable
from waiting import until

from exactlyonce.testing.cluster import LIMIT_S

pytestmark = pytest.mark.broker
CANARY = "canary-5e1c"


def load(spark: Any, kafka: Any, topic: str, **options: Any) -> Any:
    return spark.read.format("exactlyonce").options(**given(kafka, topic, **options)).load()


def test_what_a_consumer_sees(spark: Any, kafka: Any, mixed: str) -> None:
    frame = load(spark, kafka, mixed, includeHeaders=True, minPartitions=4)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    found = frame.selectExpr("*", "unix_millis(timestamp) as ms").collect()
    rows = sorted(found, key=lambda row: (row.partition, row.offset))
    seen = kafka.read_committed(mixed)
    assert len(seen) == 43
    assert [(row.key, row.value, row.partition, row.offset, row.ms) for row in rows] == [
        (each.key, each.value, each.partition, each.offset, each.timestamp_ms) for each in seen
    ]
    assert {(row.topic, row.timestampType) for row in rows} == {(mixed, 0)}
    assert rows[3].headers is None
    assert [tuple(header) for header in rows[4].headers] == [("origin", b"0-1"), ("origin", None)]


def test_a_frame_keeps_its_range(spark: Any, kafka: Any, topic_name: str) -> None:
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["before"])
    producer = transaction(kafka, "open", topic, ["open"])
    frame = load(spark, kafka, topic)
    assert frame.count() == 1
    producer.commit_transaction(LIMIT_S)
    await_readable(kafka, topic)
    assert [row.offset for row in frame.select("offset").collect()] == [0]


def test_faults(spark: Any, kafka: Any) -> None:
    for options, message in (
        (
            {"startingOffset": "latest"},
            "There is no option 'startingoffset'. Options are: subscribe, subscribePattern, ",
        ),
        ({"kafka.ssl.key.password": CANARY}, "the cluster has no such topic"),
    ):
        with pytest.raises(PySparkException, match=message) as caught:
            load(spark, kafka, "no-such-topic", **options).count()
        assert CANARY not in str(caught.value)
        first, *rest = str(caught.value).splitlines()
        assert message in first, "the sentence comes first, after Spark's own words"
        assert "Traceback" not in str(caught.value)
        assert len(rest) < 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_query_by_pattern(spark: Any, kafka: Any, topic_name: str) -> None:
    """Few records wait for more, a topic that matches later comes from its beginning, and a deleted one ends it."""
    first, later = f"{topic_name}-1", f"{topic_name}-2"
    kafka.produce(kafka.create_topic(first), ["0", "1", "2"])
    settings = given(kafka, "", subscribePattern=f"{topic_name}-[0-9]", startingOffsets="earliest")
    limits = {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "24h"}
    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", 100)
    try:
        rows = spark.readStream.format("exactlyonce").options(**settings, **limits).load().select("topic", "offset")
        query = rows.writeStream.format("memory").queryName("by_pattern").start()
        until(lambda: spark.table("by_pattern").count() == 3)
        kafka.produce(kafka.create_topic(later), ["0", "1", "2", "3"])
        until(lambda: later in (query.lastProgress or {}).get("sources", [{}])[0].get("latestOffset", ""))
        kafka.produce(first, ["3"])
        until(lambda: spark.table("by_pattern").count() == 8)
        assert [each.numInputRows for each in query.recentProgress if each.numInputRows] == [3, 5]
        assert [row.offset for row in spark.table("by_pattern").where(f"topic = '{later}'").collect()] == [0, 1, 2, 3]
        admin = kafka.admin()
        admin.delete_topics([later])[later].result(LIMIT_S)
        with pytest.raises(StreamingQueryException, match=f"'{later}' was deleted, and records of it may not"):
            query.awaitTermination(LIMIT_S)
    finally:
        spark.conf.unset("spark.sql.streaming.noDataProgressEventInterval")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_query(spark: Any, kafka: Any, topic_name: str, tmp_path: Path) -> None:
    topic = kafka.create_topic(topic_name, partitions=2)
    for partition, count in ((0, 20), (1, 10)):
        kafka.produce(topic, [str(n) for n in range(count)], partition)

    progress: list[Any] = []

    def run(**options: str) -> list[int]:
        settings = given(kafka, topic, startingOffsets="earliest", **options)
        frame = spark.readStream.format("exactlyonce").options(**settings).load()
        rows = frame.selectExpr("partition", "offset", "cast(value as string) as value")
        writer = rows.writeStream.format("json").option("path", str(tmp_path / "rows"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        query = writer.start()
        assert query.awaitTermination(LIMIT_S)
        progress[:] = [each for each in query.recentProgress if each.numInputRows]
        return [each.numInputRows for each in progress]

    group = f"{topic}-shown"
    assert run(maxOffsetsPerTrigger="12", commitGroupId=group) == [12, 12, 6]
    admin = kafka.admin()
    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(LIMIT_S)
    assert {place.partition: place.offset for place in answer.topic_partitions} == {0: 20, 1: 10}, "of all batches"
    behind = [json.loads(getattr(progress[0].sources[0], name)) for name in ("latestOffset", "endOffset")]
    assert [offset[topic]["offsets"] for offset in behind] == [{"0": 20, "1": 10}, {"0": 7, "1": 5}]
    kafka.produce(topic, ["more"] * 5, partition=1)
    assert run() == [5]
    rows = spark.read.json(str(tmp_path / "rows")).orderBy("partition", "offset").collect()
    assert [(row.partition, row.offset, row.value) for row in rows] == [
        (each.partition, each.offset, (each.value or b"").decode()) for each in kafka.read_committed(topic)
    ]
    kafka.produce(topic, ["lost"] * 5, partition=0)
    kafka.delete_records(topic, {0: 23})
    with pytest.raises(StreamingQueryException, match="from offset 20 to 24, but readers can see offsets 23 to 24"):
        run()
    assert run(failOnDataLoss="false") == [2]
    make_anew(kafka, topic, 2, 20)
    with pytest.raises(StreamingQueryException, match="made anew"):
        run()
