"""The batch read, against the records that a plain read_committed consumer sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.errors import PySparkException
from pyspark.sql.types import IntegerType

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.range_reader import RangeGone
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.source.ranges import held, resolve
from exactlyonce.engines.spark.source.read_options import Bound, parse_read_options, read_schema
from exactlyonce.engines.spark.source.reading import RangesReader
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.broker, pytest.mark.spark]

CANARY = "canary-5e1c"


def load(spark: Any, kafka: Any, topic: str, **options: Any) -> Any:
    """A DataFrame of the topic; two underscores in an option's name are a dot."""
    dotted = {name.replace("__", "."): str(value) for name, value in options.items()}
    settings = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic, **dotted}
    return spark.read.format("exactlyonce").options(**settings).load()


def offsets(frame: Any) -> list[tuple[int, int]]:
    """Partition and offset of every row, sorted: a row that comes twice is there twice."""
    return sorted((row.partition, row.offset) for row in frame.select("partition", "offset").collect())


def direct(kafka: Any, topic: str, **options: str) -> RangesReader:
    """A reader as Spark makes it, to do something between its planning and its reading."""
    settings = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": topic, **options}
    parsed = parse_read_options(settings, streaming=False)
    return RangesReader(parsed, read_schema(parsed))


def make_anew(kafka: Any, topic: str) -> None:
    """Delete the topic, and create one of the same name."""
    admin = kafka.admin()
    admin.delete_topics([topic])[topic].result(LIMIT_S)
    kafka.create_topic(topic)


def transaction(kafka: Any, name: str, topic: str, values: list[str], *, partition: int = 0) -> Producer:
    """One open transaction. Record n is of time 1000 + n; every other record has headers."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{topic}-{name}"})
    producer.list_topics(timeout=LIMIT_S)
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    for n, value in enumerate(values):
        headers: list[tuple[str, str | bytes | None]] = [("origin", value.encode()), ("origin", None)] if n % 2 else []
        producer.produce(topic, value, f"key-{n}", partition, timestamp=1_000 + n, headers=headers)
    assert producer.flush(LIMIT_S) == 0
    return producer


@pytest.fixture(scope="module")
def mixed(kafka: Any) -> str:
    """Partition 0: transactions of 20 records, committed or aborted, aborted ones last. 1: an aborted one. 2: none."""
    topic: str = kafka.create_topic("spark-reading-mixed", partitions=3)
    kafka.produce(topic, [None, ("key", b""), "plain"], partition=0)
    for number, end in enumerate(("commit", "abort", "commit", "abort", "abort")):
        producer = transaction(kafka, str(number), topic, [f"{number}-{n}" for n in range(20)])
        getattr(producer, f"{end}_transaction")(LIMIT_S)
    transaction(kafka, "never", topic, ["never"] * 5, partition=1).abort_transaction(LIMIT_S)
    return topic


def test_what_a_consumer_sees(spark: Any, kafka: Any, mixed: str) -> None:
    """The rows are what a consumer gets, each once and whole, in the schema of Spark's own source."""
    frame = load(spark, kafka, mixed, includeHeaders=True)
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    rows = frame.selectExpr("*", "unix_millis(timestamp) as ms").orderBy("partition", "offset").collect()
    seen = kafka.read_committed(mixed)
    assert len(seen) == 43
    assert [(row.key, row.value, row.partition, row.offset, row.ms) for row in rows] == [
        (each.key, each.value, each.partition, each.offset, each.timestamp_ms) for each in seen
    ]
    assert {(row.topic, row.timestampType) for row in rows} == {(mixed, 0)}
    assert rows[3].headers is None
    assert [tuple(header) for header in rows[4].headers] == [("origin", b"0-1"), ("origin", None)]


def test_exact_ranges(spark: Any, kafka: Any, mixed: str) -> None:
    """A range that ends in aborted records, at a marker or just after it has its records, in however many tasks."""
    visible = [each.offset for each in kafka.read_committed(mixed)]
    for start, end, tasks in ((0, 23, 1), (5, 24, 5), (10, 35, 3), (24, 45, 2), (66, 108, 4), (3, 3, 1)):
        bounds = [json.dumps({mixed: {"0": n, "1": 0, "2": 0}}) for n in (start, end)]
        frame = load(spark, kafka, mixed, minPartitions=tasks, startingOffsets=bounds[0], endingOffsets=bounds[1])
        rows = frame.selectExpr("offset", "spark_partition_id() as task").collect()
        assert sorted(row.offset for row in rows) == [n for n in visible if start <= n < end]
        assert len(direct(kafka, mixed, minPartitions=str(tasks), startingOffsets=bounds[0], endingOffsets=bounds[1])
                   .partitions()) == tasks  # fmt: skip


def test_by_time(spark: Any, kafka: Any, topic_name: str) -> None:
    """A range by time begins and ends at the first record of that time or later; with none, at the end."""
    topic = kafka.create_topic(topic_name, partitions=2)
    for partition in (0, 1):
        values = [str(n) for n in range(10)]
        transaction(kafka, str(partition), topic, values, partition=partition).commit_transaction(LIMIT_S)
    between = load(spark, kafka, topic, startingTimestamp=1_003, endingTimestamp=1_005)
    assert offsets(between) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    each = json.dumps({topic: {"0": 1_008, "1": 99_000}})
    assert offsets(load(spark, kafka, topic, startingOffsetsByTimestamp=each)) == [(0, 8), (0, 9)]
    both = json.dumps({topic: {"0": 1_001, "1": 99_000}})
    assert len(offsets(load(spark, kafka, topic, endingOffsetsByTimestamp=both))) == 11


def test_by_time_in_a_live_topic(kafka: Any, topic_name: str) -> None:
    """Records that come while a range is planned are neither part of it nor an error."""
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["before"])
    topics = Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))
    then = held(topics, [topic])[topic]
    kafka.produce(topic, ["meanwhile"])
    for time_ms in (0, 4_000_000_000_000):
        offset = resolve(Bound("startingTimestamp", time_ms, timestamps=True), topics, then)[0]
        assert offset == (1 if time_ms else 0)
    topics.close()


def test_an_open_transaction(spark: Any, kafka: Any, topic_name: str) -> None:
    """The latest offset is where readers stand, before what is open; a frame keeps the range that it has had once."""
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["before"])
    producer = transaction(kafka, "open", topic, ["open"])
    kafka.produce(topic, ["after"])
    frame = load(spark, kafka, topic)
    assert offsets(frame) == [(0, 0)]
    with pytest.raises(PySparkException, match=r"offset 0 to 2, but readers can see offsets 0 to 0"):
        load(spark, kafka, topic, endingOffsets=json.dumps({topic: {"0": 3}})).count()
    producer.commit_transaction(LIMIT_S)
    kafka.read_committed(topic)
    assert offsets(frame) == [(0, 0)]
    assert offsets(load(spark, kafka, topic)) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.exhaustive
def test_lost_data(spark: Any, kafka: Any, topic_name: str) -> None:
    """What retention took, or what was never there, is an error; with failOnDataLoss=false the rest is read."""
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, [str(n) for n in range(10)])
    strict, lax = direct(kafka, topic), direct(kafka, topic, failOnDataLoss="false")
    (planned,), (laxly_planned,) = strict.partitions(), lax.partitions()
    kafka.delete_records(topic, {0: 4})
    with pytest.raises(RangeGone, match="from offset 0 up to 9, but the topic holds offsets 4 to 9 now"):
        list(strict.read(planned))
    assert [n for batch in lax.read(laxly_planned) for n in batch["offset"].to_pylist()] == [4, 5, 6, 7, 8, 9]
    bounds = {"startingOffsets": json.dumps({topic: {"0": 2}}), "endingOffsets": json.dumps({topic: {"0": 99}})}
    with pytest.raises(PySparkException, match="from offset 2 to 98, but readers can see offsets 4 to 9 of it"):
        load(spark, kafka, topic, **bounds).count()
    assert load(spark, kafka, topic, failOnDataLoss=False, **bounds).count() == 6


def test_a_topic_made_anew(kafka: Any, topic_name: str) -> None:
    """A task whose topic was deleted and created again since the planning fails, though the offsets are there."""
    topic = kafka.create_topic(topic_name)
    kafka.produce(topic, ["old"] * 3)
    reader, during = direct(kafka, topic), direct(kafka, topic)
    (planned,), (read_from,) = reader.partitions(), during.partitions()
    batches = during.read(read_from)
    assert next(batches).num_rows == 3
    make_anew(kafka, topic)
    kafka.produce(topic, ["new"] * 3)
    for late in (reader.read(planned), batches):
        with pytest.raises(RangeGone, match="deleted and made anew"):
            list(late)


FAULTS = [
    ({"startingOffset": "latest"}, "There is no option 'startingoffset'. Options are: subscribe, startingOffsets, "),
    ({"subscribe": "no-such-topic"}, "no-such-topic failed: there is no such topic"),
    ({"kafka.no.such.setting": "1"}, 'The Kafka client refuses the settings: .*"no.such.setting"'),
    ({"kafka.sasl.jaas.config": CANARY}, "nobody would be authenticated"),
    ({"kafka.ssl.key.password": CANARY, "subscribe": "no-such-topic"}, "there is no such topic"),
    ({"kafka.ssl.ca.pem": CANARY, "kafka.ssl.key.password": CANARY, "kafka.security.protocol": "SSL"}, "ssl.ca.pem"),
]


@pytest.mark.parametrize(("options", "message"), FAULTS)
def test_faults(spark: Any, kafka: Any, mixed: str, options: dict[str, str], message: str) -> None:
    """What is wrong is told with what to do, and without a secret."""
    settings = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": mixed, **options}
    reader = spark.read.format("exactlyonce").options(**settings)
    with pytest.raises(PySparkException, match=message) as caught:
        reader.load().count()
    assert CANARY not in str(caught.value)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_no_broker(spark: Any) -> None:
    """Without a broker the error names the address and what to check; the plan, without one, holds no secret."""
    servers = f"127.0.0.1:{free_port()}"
    security = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "ann"}
    settings = {"bootstrap.servers": servers, **security, "sasl.password": CANARY}
    kafka = {f"kafka.{name}": value for name, value in settings.items()}
    frame = spark.read.format("exactlyonce").options(subscribe="orders", **kafka).load()
    frame.createOrReplaceTempView("unreachable")
    plans = "".join(row.plan for row in spark.sql("EXPLAIN EXTENDED SELECT * FROM unreachable").collect())
    assert "exactlyonce" in plans
    with pytest.raises(PySparkException, match=f"failed at {servers}: .* Check that the brokers run") as caught:
        frame.count()
    assert CANARY not in plans + str(caught.value)


def test_another_schema(spark: Any, kafka: Any, mixed: str) -> None:
    """A schema that a user gives is refused, unless it is the one that there is."""
    parsed = parse_read_options({"kafka.bootstrap.servers": kafka.bootstrap_servers, "subscribe": mixed})
    with pytest.raises(ConfigError, match=r"The schema is always struct<key:binary,.*Leave \.schema"):
        RangesReader(parsed, read_schema(parsed).add("more", IntegerType()))
