"""The batch read and the offsets of the streaming read, asked directly, without a session."""

from __future__ import annotations

import json
import re
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from pyspark.sql.types import IntegerType
from reads import direct, given, make_anew, places, transaction
from settled import await_readable
from waiting import until

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source.read_options import parse_read_options
from exactlyonce.engines.spark.source.reading import StreamReader
from exactlyonce.engines.spark.source.record_columns import RecordColumns
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, TopicError
from exactlyonce.testing.clock import SimulatedClock
from exactlyonce.testing.cluster import LIMIT_S

ALL = ReadAllAvailable()
CANARY = "canary-5e1c"


def test_exact_ranges(kafka: Any, mixed: str) -> None:
    """A range that ends in aborted records, at a marker or just after it has its records, in however many tasks."""
    visible = [each.offset for each in kafka.read_committed(mixed)]
    for start, end, tasks in ((0, 23, 1), (5, 24, 5), (10, 35, 3), (24, 45, 2), (66, 108, 4), (3, 3, 1)):
        bounds = [json.dumps({mixed: {"0": n, "1": 0, "2": 0}}) for n in (start, end)]
        reader = direct(kafka, mixed, minPartitions=tasks, startingOffsets=bounds[0], endingOffsets=bounds[1])
        assert places(reader) == [(0, n) for n in visible if start <= n < end]
        assert len(reader.partitions()) == tasks


def test_by_time(kafka: Any, topic_name: str) -> None:
    topic = kafka.create_topic(topic_name, partitions=2)
    for partition in (0, 1):
        values = [str(n) for n in range(10)]
        transaction(kafka, str(partition), topic, values, partition=partition).commit_transaction(LIMIT_S)
    await_readable(kafka, topic)
    between = direct(kafka, topic, startingTimestamp=1_003, endingTimestamp=1_005)
    assert places(between) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    start = json.dumps({topic: {"0": 1_008, "1": 99_000}})
    assert places(direct(kafka, topic, startingOffsetsByTimestamp=start)) == [(0, 8), (0, 9)]
    end = json.dumps({topic: {"0": 1_001, "1": 99_000}})
    assert len(places(direct(kafka, topic, endingOffsetsByTimestamp=end))) == 11


def test_times_out_of_order(kafka: Any, topic_name: str) -> None:
    """A start by time leaves out no record of that time or later; an end by time may leave out an earlier one."""
    topic = kafka.create_topic(topic_name)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for time_ms in (1_000, 5_000, 2_000, 6_000, 3_000):
        producer.produce(topic, b"", partition=0, timestamp=time_ms)
    assert producer.flush(LIMIT_S) == 0
    assert places(direct(kafka, topic, startingTimestamp=4_000)) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert places(direct(kafka, topic, endingTimestamp=4_000)) == [(0, 0)]


def test_an_open_transaction(kafka: Any, topic_name: str) -> None:
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["before"])
    producer = transaction(kafka, "open", topic, ["open"])
    kafka.produce(topic, ["after"])
    assert places(direct(kafka, topic)) == [(0, 0)]
    with pytest.raises(RangeGone, match=r"offset 0 to 2, but readers can see offsets 0 to 0"):
        direct(kafka, topic, endingOffsets=json.dumps({topic: {"0": 3}})).partitions()
    producer.commit_transaction(LIMIT_S)
    await_readable(kafka, topic)
    assert places(direct(kafka, topic)) == [(0, 0), (0, 1), (0, 2)]


def test_lost_data(kafka: Any, topic_name: str) -> None:
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, [str(n) for n in range(10)])
    strict, lax = direct(kafka, topic), direct(kafka, topic, failOnDataLoss="false")
    (planned,), (laxly_planned,) = strict.partitions(), lax.partitions()
    kafka.delete_records(topic, {0: 4})
    with pytest.raises(RangeGone, match="from offset 0 up to 9, but the topic holds offsets 4 to 9 now"):
        list(strict.read(planned))
    assert [n for batch in lax.read(laxly_planned) for n in batch["offset"].to_pylist()] == [4, 5, 6, 7, 8, 9]
    bounds = {"startingOffsets": json.dumps({topic: {"0": 2}}), "endingOffsets": json.dumps({topic: {"0": 99}})}
    with pytest.raises(RangeGone, match="from offset 2 to 98, but readers can see offsets 4 to 9 of it"):
        direct(kafka, topic, **bounds).partitions()
    assert len(places(direct(kafka, topic, failOnDataLoss=False, **bounds))) == 6


def test_a_topic_made_anew(kafka: Any, topic_name: str) -> None:
    """A task whose topic was deleted and created again since the planning fails, though the offsets are there."""
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["old"] * 3)
    reader, during = direct(kafka, topic), direct(kafka, topic)
    (planned,), (read_from,) = reader.partitions(), during.partitions()
    batches = during.read(read_from)
    assert next(batches).num_rows == 3
    make_anew(kafka, topic)
    for late in (reader.read(planned), batches):
        with pytest.raises(RangeGone, match="deleted and made anew"):
            list(late)


SECRETS = {"kafka.ssl.ca.pem": CANARY, "kafka.ssl.key.password": CANARY, "kafka.security.protocol": "SSL"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "no-such-topic"}, "no-such-topic failed: the cluster has no such topic"),
        ({"kafka.no.such.setting": "1"}, 'The Kafka client refuses the settings: .*"no.such.setting"'),
        ({"kafka.sasl.jaas.config": CANARY}, "there would be no login"),
        ({"kafka.ssl.key.password": CANARY, "subscribe": "no-such-topic"}, "the cluster has no such topic"),
        (SECRETS, "ssl.ca.pem"),
    ],
)
def test_faults(kafka: Any, mixed: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ExactlyOnceError, match=message) as caught:
        direct(kafka, mixed, **options).partitions()
    assert CANARY not in str(caught.value)


def test_another_schema(kafka: Any, mixed: str) -> None:
    source = ExactlyOnceDataSource(given(kafka, mixed))
    with pytest.raises(ConfigError, match=r"The schema is always struct<key:binary,.*Leave \.schema"):
        source.reader(source.schema().add("more", IntegerType()))


@pytest.fixture
def topic(kafka: Any, topic_name: str) -> str:
    name: str = kafka.create_topic(topic_name, partitions=2)
    kafka.produce(name, [str(n) for n in range(20)], partition=0)
    kafka.produce(name, [str(n) for n in range(10)], partition=1)
    return name


def stream(kafka: Any, *topics: str, **options: str) -> StreamReader:
    return timed(SystemClock(), kafka, *topics, **options)


def timed(clock: Clock, kafka: Any, *topics: str, **options: str) -> StreamReader:
    options = {"startingOffsets": "earliest", **options}
    parsed = parse_read_options(given(kafka, ",".join(topics), **options), streaming=True)
    return StreamReader(parsed, None, RecordColumns(parsed, None).schema, clock)


def delete(kafka: Any, name: str) -> None:
    topics = Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))
    topics.delete(topics.describe([name])[name])
    topics.close()


def committed(kafka: Any, group: str) -> dict[int, int]:
    """The offsets of a group by partition, as Kafka's tools see them."""
    admin = kafka.admin()  # without a name it would end before the answer
    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(LIMIT_S)
    return {place.partition: place.offset for place in answer.topic_partitions}


def add_partition(kafka: Any, topic: str) -> None:
    kafka.add_partitions(topic, 3)
    kafka.produce(topic, ["in the new partition"], partition=2)


def numbers(offset: dict[str, Any], topic: str) -> dict[str, int]:
    found: dict[str, int] = offset[topic]["offsets"]
    return found


def sizes(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(each.value.partition, each.value.start, each.value.end) for each in reader.partitions(start, end)]


class TestOffsets:
    def test_a_topic_that_is_made_anew_after_a_batch_was_planned(self, kafka: Any, topic: str) -> None:
        """A batch planned of the old topic is empty if loss is allowed, and the next has the new one."""
        reader = stream(kafka, topic, failOnDataLoss="false")
        start = reader.initialOffset()
        planned = reader.latestOffset(start, ALL)
        make_anew(kafka, topic, 2, 20)
        again = stream(kafka, topic, failOnDataLoss="false")
        assert sizes(again, start, planned) == []
        assert sizes(again, planned, again.latestOffset(planned, ALL)) == [(0, 0, 20)]

    def test_batches(self, kafka: Any, topic: str) -> None:
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

    def test_a_group_shows_the_lag(self, kafka: Any, topic: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A group with members, whose offsets are theirs, is noted once, and stops nothing."""
        group = f"{topic}-shown"
        reader = stream(kafka, topic, maxOffsetsPerTrigger="12", commitGroupId=group)
        first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(12))
        last = reader.latestOffset(first, ALL)
        for end in (first, last):
            reader.latestOffset(end, ALL)
            assert committed(kafka, group) == {int(place): offset for place, offset in numbers(end, topic).items()}
        reader.stop()
        assert capsys.readouterr().err == ""
        with closing(Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group})) as member:
            member.subscribe([topic])
            until(lambda: member.poll(0.1) or member.assignment(), told=lambda: "it is no member yet")
            other = stream(kafka, topic, commitGroupId=group)
            other.latestOffset(first, ALL)
            other.latestOffset(last, ALL)
            other.stop()
            assert committed(kafka, group) == {0: 20, 1: 10}
        assert len(re.findall(rf"no offsets are published: .* {group} \(", capsys.readouterr().err)) == 1
        unnamed = stream(kafka, topic)
        unnamed.latestOffset(first, ALL)
        unnamed.stop()

    def test_available_now(self, kafka: Any, topic: str) -> None:
        reader = stream(kafka, topic)
        reader.prepareForTriggerAvailableNow()
        kafka.produce(topic, ["late"], partition=0)
        add_partition(kafka, topic)
        last = reader.latestOffset(reader.initialOffset(), ALL)
        assert numbers(last, topic) == {"0": 20, "1": 10, "2": 0}
        assert reader.latestOffset(last, ALL) == last

    def test_partitions_and_topics_are_added(self, kafka: Any, topic: str) -> None:
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

    def test_a_repeated_batch_has_the_beginning_of_a_topic_that_was_found_later(self, kafka: Any, topic: str) -> None:
        by_pattern = {"subscribePattern": f"{topic}(-other)?"}
        first = stream(kafka, **by_pattern)
        start = first.latestOffset(first.initialOffset(), ALL)
        other = kafka.create_topic(f"{topic}-other")
        kafka.produce(other, ["1", "2", "3"])
        end = first.latestOffset(start, ALL)
        assert sizes(first, start, end) == [(0, 0, 3)]
        assert first.latestOffset(end, ALL) == end, "nothing has come"
        kafka.delete_records(other, {0: 2})
        with pytest.raises(RangeGone, match="from offset 0 to 2, but readers can see offsets 2 to 2"):
            stream(kafka, **by_pattern).partitions(start, end)
        assert sizes(stream(kafka, failOnDataLoss="false", **by_pattern), start, end) == [(0, 2, 3)]
        kafka.produce(other, ["4"])
        assert sizes(first, end, first.latestOffset(end, ALL)) == [(0, 3, 4)]

    def test_what_is_lost(self, kafka: Any, topic: str) -> None:
        strict, lax = stream(kafka, topic), stream(kafka, topic, failOnDataLoss="false")
        start = strict.initialOffset()
        end = strict.latestOffset(start, ALL)
        kafka.delete_records(topic, {0: 5})
        for ask in (lambda: strict.latestOffset(start, ALL), lambda: strict.partitions(start, end)):
            with pytest.raises(RangeGone, match="from offset 0 to 19, but readers can see offsets 5 to 19"):
                ask()
        assert sizes(lax, start, lax.latestOffset(start, ALL)) == [(0, 5, 20), (1, 0, 10)]
        make_anew(kafka, topic, 2, 20)
        with pytest.raises(RangeGone, match="made anew"):
            strict.latestOffset(end, ALL)
        assert sizes(lax, end, lax.latestOffset(end, ALL)) == [(0, 0, 20)]

    def test_topics_of_a_pattern(self, kafka: Any, topic: str) -> None:
        """One that matches later is read from its beginning, also after a start at the latest offsets; one that is
        deleted ends the query, unless loss is allowed."""
        by_pattern = {"subscribePattern": f"{topic}(-[0-9])?"}
        strict = stream(kafka, startingOffsets="latest", **by_pattern)
        start = strict.initialOffset()
        assert numbers(start, topic) == {"0": 20, "1": 10}
        later, other = kafka.create_topic(f"{topic}-1"), kafka.create_topic(f"{topic}-1-other")
        kafka.produce(later, ["a", "b", "c"])
        kafka.produce(other, ["other"])
        end = strict.latestOffset(start, ALL)
        assert sorted(end) == [topic, later]
        assert sizes(strict, start, end) == [(0, 0, 3)]
        planned = strict.partitions(start, end)
        delete(kafka, later)
        with pytest.raises(RangeGone, match=f"'{later}' was deleted, .* Set failOnDataLoss to false"):
            strict.latestOffset(end, ALL)
        with pytest.raises(RangeGone, match=f"'{later}' is not subscribed to any more, or was deleted"):
            strict.partitions(start, end)
        with pytest.raises(TopicError):
            list(strict.read(planned[0]))
        lax = stream(kafka, failOnDataLoss="false", **by_pattern)
        assert list(lax.read(planned[0])) == []
        assert sizes(lax, start, end) == []
        again = lax.latestOffset(end, ALL)
        kafka.create_topic(later)
        kafka.produce(later, ["new"])
        assert sizes(lax, again, lax.latestOffset(again, ALL)) == [(0, 0, 1)]

    def test_no_topic_of_a_pattern(self, kafka: Any, topic_name: str) -> None:
        """A stream waits for one; a batch is refused."""
        waiting = stream(kafka, subscribePattern=f"{topic_name}-.*")
        assert waiting.latestOffset(waiting.initialOffset(), ALL) == waiting.initialOffset() == {}
        with pytest.raises(ConfigError, match="The cluster has no topic that subscribePattern"):
            direct(kafka, "", subscribePattern=f"{topic_name}-.*").partitions()

    def test_assigned_partitions(self, kafka: Any, topic: str) -> None:
        """Only these are read; one that is assigned again goes on where it was."""
        second, first = (stream(kafka, assign=json.dumps({topic: [partition]})) for partition in (1, 0))
        start = second.initialOffset()
        assert numbers(start, topic) == {"1": 0}
        done = second.latestOffset(start, ALL)
        assert sizes(second, start, done) == [(1, 0, 10)]
        other = first.latestOffset(done, ALL)
        assert sizes(first, done, other) == [(0, 0, 20)]
        assert numbers(other, topic) == {"0": 20, "1": 10}
        kafka.produce(topic, ["more"], partition=1)
        assert sizes(second, other, second.latestOffset(other, ALL)) == [(1, 10, 11)]
        with pytest.raises(RangeGone, match=r"A partition of \[1\] of topic .* is not subscribed to any more"):
            first.partitions(start, done)
        with pytest.raises(ConfigError, match=r"assign names partitions \[7\] of .*, which has \[0, 1\]"):
            stream(kafka, assign=json.dumps({topic: [0, 7]})).initialOffset()
        part = {"assign": json.dumps({topic: [1]}), "startingOffsets": json.dumps({topic: {"1": 4}})}
        assert places(direct(kafka, "", **part)) == [(1, offset) for offset in range(4, 11)]

    def test_few_offsets_wait(self, kafka: Any, topic: str) -> None:
        """The first batch waits for none, a later one for the least number or the longest delay."""
        clock = SimulatedClock()
        limits = {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "10s"}
        reader = timed(clock, kafka, topic, startingOffsets="latest", **limits)
        limit = reader.getDefaultReadLimit()
        assert limit == ReadMinRows(5)
        start = reader.initialOffset()
        for count, passed_ms, waits in (
            (1, 0, False),
            (4, 9_000, True),
            (1, 0, False),
            (1, 9_999, True),
            (0, 1, False),
        ):
            kafka.produce(topic, ["more"] * count, partition=0)
            clock.advance(passed_ms)
            end = reader.latestOffset(start, limit)
            assert (end == start) == waits
            start = end
        kafka.produce(topic, ["more"], partition=0)
        assert reader.latestOffset(start, ALL) != start
        now = timed(clock, kafka, topic, **limits, maxOffsetsPerTrigger="30")
        assert now.getDefaultReadLimit() == ReadMaxRows(30)
        now.prepareForTriggerAvailableNow()
        first = now.latestOffset(now.initialOffset(), ReadMaxRows(30))
        assert sum(end - start for _, start, end in sizes(now, first, now.latestOffset(first, ReadMaxRows(30)))) == 8

    def test_offsets_of_another_source(self, kafka: Any, topic: str) -> None:
        with pytest.raises(ConfigError, match="offsets that this source did not write"):
            stream(kafka, topic).latestOffset({topic: {"0": 5, "1": 5}}, ALL)
