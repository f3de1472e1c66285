"""The streaming read: its offsets, asked directly, and whole queries that end, are started again and lose data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.cimpl import NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from exactlyonce.connectors.kafka.range_reader import RangeGone
from exactlyonce.engines.spark.source.read_options import parse_read_options, read_schema
from exactlyonce.engines.spark.source.stream_reading import StreamReader
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.broker, pytest.mark.spark]

ALL = ReadAllAvailable()


@pytest.fixture
def topic(kafka: Any, topic_name: str) -> str:
    """A topic of two partitions: 20 records in one, 10 in the other."""
    name: str = kafka.create_topic(topic_name, partitions=2)
    kafka.produce(name, [str(n) for n in range(20)], partition=0)
    kafka.produce(name, [str(n) for n in range(10)], partition=1)
    return name


def stream(kafka: Any, *topics: str, **options: str) -> StreamReader:
    """A reader as Spark makes it on the driver."""
    settings = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": ",".join(topics)}
    parsed = parse_read_options({**settings, "startingOffsets": "earliest", **options}, streaming=True)
    return StreamReader(parsed, read_schema(parsed))


def make_anew(kafka: Any, topic: str) -> None:
    """Delete the topic, and create one of the same name with as many records."""
    admin = kafka.admin()
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    kafka.create_topic(topic, partitions=2)
    kafka.produce(topic, ["new"] * 20, partition=0)


def add_partition(kafka: Any, topic: str) -> None:
    """A third one."""
    admin = kafka.admin()
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(LIMIT_S)
    kafka.produce(topic, ["in the new partition"], partition=2)


def numbers(offset: dict[str, Any], topic: str) -> dict[str, int]:
    """The offsets by partition."""
    found: dict[str, int] = offset[topic]["offsets"]
    return found


def sizes(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Partition, start and end of every task of a batch."""
    return [(each.value.partition, each.value.start, each.value.end) for each in reader.partitions(start, end)]


class TestOffsets:
    """What Spark is told, and what it gives back."""

    def test_a_topic_that_is_made_anew_behind_a_planned_batch(self, kafka: Any, topic: str) -> None:
        """Where loss is allowed, the batch is empty that was planned of the old one, and the next has the new one."""
        reader = stream(kafka, topic, failOnDataLoss="false")
        start = reader.initialOffset()
        planned = reader.latestOffset(start, ALL)
        make_anew(kafka, topic)
        again = stream(kafka, topic, failOnDataLoss="false")
        assert sizes(again, start, planned) == []
        assert sizes(again, planned, again.latestOffset(planned, ALL)) == [(0, 0, 20)]

    def test_a_topic_that_is_subscribed_to_again(self, kafka: Any, topic: str, topic_name: str) -> None:
        """It goes on where it was; and nothing is left out of a batch that was planned while it still was there."""
        other = kafka.create_topic(f"{topic_name}-other", partitions=1)
        both = stream(kafka, topic, other)
        start = both.initialOffset()
        kafka.produce(other, ["b"], partition=0)
        done = both.latestOffset(start, ALL)
        kafka.produce(other, ["c"], partition=0)
        planned = both.latestOffset(done, ALL)
        with pytest.raises(RangeGone, match=f"'{other}' is not subscribed to any more"):
            stream(kafka, topic).partitions(done, planned)
        assert sizes(stream(kafka, topic, failOnDataLoss="false"), done, planned) == []
        without = stream(kafka, topic).latestOffset(done, ALL)
        assert sizes(stream(kafka, topic), done, without) == []
        assert sizes(both, without, both.latestOffset(without, ALL)) == [(0, 1, 2)]

    def test_batches(self, kafka: Any, topic: str) -> None:
        """Limits share a batch out, the end is reached, and offsets that have not changed are the same text."""
        reader = stream(kafka, topic, maxOffsetsPerTrigger="12")
        start = reader.initialOffset()
        assert numbers(start, topic) == {"0": 0, "1": 0}
        assert reader.getDefaultReadLimit() == ReadMaxRows(12)
        first = reader.latestOffset(start, ReadMaxRows(12))
        assert numbers(first, topic) == {"0": 7, "1": 5}
        assert sizes(reader, start, first) == [(0, 0, 7), (1, 0, 5)]
        last = reader.latestOffset(first, ALL)
        assert numbers(last, topic) == {"0": 20, "1": 10}
        assert json.dumps(reader.latestOffset(json.loads(json.dumps(last)), ReadMaxRows(12))) == json.dumps(last)
        assert sizes(reader, last, last) == []
        reader.stop()

    def test_available_now(self, kafka: Any, topic: str) -> None:
        """What comes after the start of such a query is left, in old partitions and in new ones."""
        reader = stream(kafka, topic)
        reader.prepareForTriggerAvailableNow()
        kafka.produce(topic, ["late"], partition=0)
        add_partition(kafka, topic)
        last = reader.latestOffset(reader.initialOffset(), ALL)
        assert numbers(last, topic) == {"0": 20, "1": 10}
        assert reader.latestOffset(last, ALL) == last

    def test_partitions_and_topics_are_added(self, kafka: Any, topic: str) -> None:
        """A new partition is read from its beginning, as is a topic that the query had not read before."""
        start = stream(kafka, topic).latestOffset(stream(kafka, topic).initialOffset(), ALL)
        add_partition(kafka, topic)
        other = kafka.create_topic(f"{topic}-other")
        kafka.produce(other, ["1", "2", "3"])
        kafka.delete_records(other, {0: 1})
        both = stream(kafka, topic, other)
        planned = stream(kafka, topic).latestOffset(start, ALL)
        assert sizes(both, start, planned) == [(2, 0, 1)]
        end = both.latestOffset(start, ALL)
        assert sizes(both, start, end) == [(2, 0, 1), (0, 1, 3)]

    def test_what_is_lost(self, kafka: Any, topic: str) -> None:
        """Removed offsets and a topic made anew are errors; with failOnDataLoss=false what is left is read."""
        strict, lax = stream(kafka, topic), stream(kafka, topic, failOnDataLoss="false")
        start = strict.initialOffset()
        end = strict.latestOffset(start, ALL)
        kafka.delete_records(topic, {0: 5})
        for ask in (lambda: strict.latestOffset(start, ALL), lambda: strict.partitions(start, end)):
            with pytest.raises(RangeGone, match="from offset 0 to 19, but readers can see offsets 5 to 19"):
                ask()
        assert sizes(lax, start, lax.latestOffset(start, ALL)) == [(0, 5, 20), (1, 0, 10)]
        make_anew(kafka, topic)
        with pytest.raises(RangeGone, match="made anew"):
            strict.latestOffset(end, ALL)
        assert sizes(lax, end, lax.latestOffset(end, ALL)) == [(0, 0, 20)]

    def test_offsets_of_another_source(self, kafka: Any, topic: str) -> None:
        """Offsets that Spark's own Kafka source has journaled are refused."""
        with pytest.raises(ConfigError, match="offsets that this source did not write"):
            stream(kafka, topic).latestOffset({topic: {"0": 5, "1": 5}}, ALL)


@pytest.fixture
def run(spark: Any, kafka: Any, topic: str, tmp_path: Path) -> Callable[..., list[int]]:
    """`run(option=value)` runs the query until it has what is available now; the rows of each of its batches."""

    def run_query(**options: str) -> list[int]:
        settings = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic, **options}
        frame = spark.readStream.format("exactlyonce").options(startingOffsets="earliest", **settings).load()
        rows = frame.selectExpr("partition", "offset", "cast(value as string) as value")
        query = (
            rows.writeStream.format("json")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(LIMIT_S)
        return [each.numInputRows for each in query.recentProgress if each.numInputRows]

    return run_query


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_query(spark: Any, kafka: Any, topic: str, tmp_path: Path, run: Callable[..., list[int]]) -> None:
    """Stopped and started again, a query reads every record once; what is lost in between stops it."""
    assert run(maxOffsetsPerTrigger="12") == [12, 12, 6]
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
    make_anew(kafka, topic)
    with pytest.raises(StreamingQueryException, match="made anew"):
        run()
