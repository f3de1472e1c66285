"""The options of a read of records and of a read of state, and how ranges are cut. No session is needed."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from exactlyonce.engines.spark.data_source import ExactlyOnceDataSource
from exactlyonce.engines.spark.source.read_options import (
    KEY_TYPES,
    NOT_HERE,
    OPTIONS,
    STATE_OPTIONS,
    Bound,
    is_of_state,
    parse_read_options,
    parse_state_options,
)
from exactlyonce.engines.spark.source.reading import Range, shares, split
from exactlyonce.pipeline.errors import ConfigError

GIVEN = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"}
STATE = {"state": "order-totals", "operator": "totals", "kafka.bootstrap.servers": "127.0.0.1:9092"}
URL = {"state": "file:///backups/order-totals-1-00", "operator": "totals"}
CANARY = "canary-90ab"
SECURITY = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN", "kafka.sasl.username": "ann"}
OF_KAFKA = ("kafka.bootstrap.servers", "kafka.NAME", "kafka.group.id", "kafka.isolation.level")
SIZES = st.lists(st.integers(0, 10_000) | st.integers(0, 3), max_size=8)


def test_defaults() -> None:
    batch, stream = (parse_read_options(GIVEN, streaming=streaming) for streaming in (False, True))
    assert (batch.start, stream.start) == (Bound("startingOffsets", -2), Bound("startingOffsets", -1))
    assert batch.end == Bound("endingOffsets", -1)
    assert (batch.topics, batch.fail_on_data_loss) == (("orders",), True)
    assert (batch.include_headers, batch.partitions_min) == (False, 1)


def test_everything() -> None:
    found = parse_read_options(
        {
            "KAFKA.bootstrap.servers": "a:1,b:2",
            "SUBSCRIBE": "orders, refunds,orders",
            "startingoffsets": '{"orders": {"0": 23, "1": -2}, "refunds": {"0": -2}}',
            "endingTimestamp": "1700000000000",
            "FAILONDATALOSS": "False",
            "includeHeaders": "true",
            "minPartitions": "8",
            "kafka.fetch.wait.max.ms": "5",
        },
        streaming=False,
    )
    assert (found.topics, found.fail_on_data_loss, found.include_headers) == (("orders", "refunds"), False, True)
    assert found.start == Bound("startingOffsets", by_partition={"orders": {0: 23, 1: -2}, "refunds": {0: -2}})
    assert found.end == Bound("endingTimestamp", 1_700_000_000_000, timestamps=True)
    assert found.partitions_min == 8
    assert found.client().settings == {"bootstrap.servers": "a:1,b:2", "fetch.wait.max.ms": "5"}
    limits = {"maxOffsetsPerTrigger": "9", "minOffsetsPerTrigger": "3", "maxTriggerDelay": "10s"}
    limited = parse_read_options({**GIVEN, **limits}, streaming=True)
    assert (limited.offsets_per_trigger_max, limited.offsets_per_trigger_min) == (9, 3)
    assert limited.trigger_delay_max_ms == 10_000


def test_ways_to_name_topics() -> None:
    servers = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
    assigned = parse_read_options({**servers, "assign": '{"orders": [2, 0], "refunds": [1]}'})
    assert (assigned.topics, assigned.pattern) == (("orders", "refunds"), None)
    assert assigned.assigned == {"orders": frozenset((0, 2)), "refunds": frozenset((1,))}
    matched = parse_read_options({**servers, "subscribePattern": "orders-[0-9]+"})
    assert (matched.topics, matched.pattern, matched.assigned) == ((), "orders-[0-9]+", None)
    assert [matched.matches(name) for name in ("orders-17", "orders-1-of-2", "all-orders-1")] == [True, False, False]


WRONG = [
    ({"kafka.bootstrap.servers": None}, "kafka.bootstrap.servers is not set"),
    ({"subscribe": " , "}, "subscribe is not set"),
    ({"subscribed": "o.*"}, "no option 'subscribed'.* Options are: subscribe, .*kafka.NAME"),
    ({"subscribePattern": "o.*"}, "subscribe and subscribePattern contradict each other"),
    (
        {"subscribe": "", "subscribePattern": "o[", "startingOffsets": "earliest"},
        r"subscribePattern is 'o\['.*of Python",
    ),
    (
        {"subscribe": "", "subscribePattern": "o.*", "startingOffsets": '{"refunds": {"0": 3}}'},
        "names the topic refunds, which subscribePattern 'o.*' does not match",
    ),
    (
        {"subscribe": "", "assign": "orders"},
        "assign is 'orders', which cannot be read .* Write the partitions by topic",
    ),
    ({"subscribe": "", "assign": '{"orders": []}'}, "name at least one partition of each topic"),
    (
        {"subscribe": "", "assign": '{"orders": [0]}', "startingOffsets": '{"refunds": {"0": 3}}'},
        "names the topics refunds, but assign orders",
    ),
    ({"startingOffsets": "first"}, "startingOffsets is 'first'.* Write earliest, latest or JSON"),
    ({"startingOffsets": '{"orders": {"zero": 1}}'}, "startingOffsets is .*cannot be read"),
    ({"startingOffsets": '{"orders": {"0": -3}}'}, "offsets are -2 "),
    ({"startingOffsets": '{"refunds": {"0": 3}}'}, "names the topics refunds, but subscribe orders"),
    ({"startingOffsets": "latest"}, "a batch cannot begin at the latest offset"),
    ({"endingOffsets": "earliest"}, "a range cannot end at the earliest"),
    ({"startingTimestamp": "yesterday"}, "startingTimestamp is 'yesterday': write a whole number"),
    ({"startingOffsetsByTimestamp": '{"orders": {"0": -1}}'}, "times from 0 on"),
    ({"endingTimestamp": "1", "endingOffsets": "latest"}, "endingOffsets and endingTimestamp contradict each other"),
    ({"failOnDataLoss": "no"}, "failOnDataLoss is 'no': write true or false"),
    ({"minPartitions": "0"}, "minPartitions is 0: it must be at least 1"),
    ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is not for spark.read: it is for streams"),
    ({"commitGroupId": "shown"}, "commitGroupId is not for spark.read: it is for streams"),
    ({"asOf": "2026-11-01T00:00:00Z"}, "asOf choose a checkpoint of a pipeline .* name by the option pipeline"),
    ({"pipeline": "orders:pipeline"}, "pipeline: the name of a pipeline"),
    ({"pipeline": "p", "asOf": "2026-11-01T00:00:00"}, "has no time zone"),
    ({"pipeline": "p", "endingOffsets": "latest"}, "at a checkpoint, and endingOffsets elsewhere"),
    ({"pipeline": "p", "failOnDataLoss": "false"}, "leave failOnDataLoss out"),
    ({"after": "7"}, "after choose a checkpoint of a pipeline .* name by the option pipeline"),
    ({"pipeline": "p", "after": "newest"}, "after is 'newest': write a whole number"),
    ({"pipeline": "p", "after": "7", "checkpoint": "7"}, "after is 7, and checkpoint 7: nothing lies between"),
    ({"pipeline": "p", "after": "7", "startingTimestamp": "1"}, "at a checkpoint, and startingTimestamp elsewhere"),
    ({"kafka.auto.offset.reset": "earliest"}, "auto.offset.reset: exactlyonce sets this itself"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong(change: dict[str, Any], message: str) -> None:
    options = {name: value for name, value in {**GIVEN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        parse_read_options(options, streaming=False)


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_only_sparks_own_source_has(name: str) -> None:
    with pytest.raises(ConfigError, match=f"There is no option {name}, unlike in Spark's own source: [a-z]"):
        parse_read_options({**GIVEN, name: "1"}, streaming=True)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"maxTriggerDelay": "10s"}, "maxTriggerDelay is the longest wait for minOffsetsPerTrigger. Give both"),
        ({"minOffsetsPerTrigger": "3", "maxTriggerDelay": "10"}, "maxTriggerDelay is '10': write a number with a unit"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "3"}, "minOffsetsPerTrigger is 9, more than "),
        ({"commitGroupId": " "}, "commitGroupId is empty: name the consumer group"),
    ],
)
def test_wrong_limits(limits: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_read_options({**GIVEN, **limits}, streaming=True)


def test_a_stream_has_no_end() -> None:
    with pytest.raises(ConfigError, match=r"endingOffsets is not for streams, which have no end"):
        parse_read_options({**GIVEN, "endingOffsets": "latest"}, streaming=True)


def test_references_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", CANARY)
    options = {**GIVEN, **SECURITY, "kafka.sasl.password": "env:KAFKA_PASSWORD"}
    found = parse_read_options(options, streaming=False)
    assert found.client().confluent()["sasl.password"] == CANARY
    travelling = pickle.dumps(found)
    assert CANARY.encode() not in travelling
    assert b"env:KAFKA_PASSWORD" in travelling
    assert "KAFKA_PASSWORD" not in repr(found)


def test_all_options_of_state() -> None:
    options = {
        **STATE, "CHECKPOINT": "41", "keytype": "str, int", "Types": "orders:make", "params": '{"name": "v2"}',
        "json": "TRUE", "minpartitions": "4", "key": "ann",
    }  # fmt: skip
    found = parse_state_options(options)
    assert is_of_state(options)
    assert not is_of_state({"subscribe": "orders"})
    assert (found.pipeline, found.url, found.operator, found.checkpoint) == ("order-totals", "", "totals", 41)
    assert (found.key, found.key_schema, found.partitions_min) == ("ann", {"tuple": ["str", "int"]}, 4)
    assert (found.types, found.params, found.in_json) == ("orders:make", {"name": "v2"}, True)
    plain = parse_state_options(URL)
    assert (plain.pipeline, plain.url, plain.checkpoint, plain.key_schema) == ("", URL["state"], None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**STATE, "checkpoint": "2", "asOf": "2026-11-01T00:00:00Z"}, "checkpoint and asOf contradict each other"),
        ({**STATE, "asOf": "yesterday"}, r"asOf is 'yesterday'\. Write one of: a time as"),
        ({**STATE, "operators": "totals"}, "There is no option 'operators' for a read of state. Options are: state, "),
        ({**STATE, "after": "7"}, "after is for topics: a state is that of one checkpoint, which checkpoint or asOf"),
        ({"state": "order-totals"}, "kafka.bootstrap.servers is not set"),
        ({**STATE, "state": "orders:pipeline"}, "state: the name of a pipeline, .*the option types names the module"),
        ({**STATE, "state": ""}, "state: the name of a pipeline"),
        ({**STATE, "checkpoint": "newest"}, "checkpoint is 'newest': write a whole number"),
        ({**STATE, "keyType": "string"}, "'string' is no type of a key. Write one of bool, bytes, "),
        ({**STATE, "params": "{}"}, "params is for a function that types names"),
        ({**STATE, "types": "a:b", "params": "name=v2"}, "params is 'name=v2', which is not read"),
        ({**STATE, "json": "yes"}, "json is 'yes': write true or false"),
        ({**STATE, "minPartitions": "0"}, "minPartitions is 0: it must be at least 1"),
        ({**URL, "state": "gs://backups/x"}, r"^state: there is no storage gs://\. Write /folder, hdfs://"),
        ({**URL, "checkpoint": "3"}, "checkpoint is not for an exported savepoint"),
        ({**URL, "kafka.bootstrap.servers": "a:1"}, "kafka.bootstrap.servers is not for an exported savepoint"),
    ],
)
def test_wrong_options_of_state(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_state_options(options)


def test_no_secret_is_shown() -> None:
    found = parse_state_options({**STATE, **SECURITY, "kafka.sasl.password": CANARY})
    assert CANARY not in repr(found)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_stream_of_state_is_refused() -> None:
    source = ExactlyOnceDataSource(STATE)
    with pytest.raises(ConfigError, match=r"state is for spark\.read"):
        source.streamReader(StructType())


HISTORY = {"history": "totals", "kafka.bootstrap.servers": "kafka:9092"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({**HISTORY, "checkpoint": "7"}, "There is no option 'checkpoint' for a read of history. Options are: history"),
        ({**HISTORY, "history": "a b"}, "history: the name of a pipeline, "),
        ({"history": "totals"}, r"kafka\.bootstrap\.servers is not set"),
    ],
)
def test_a_read_of_history_is_checked(options: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ExactlyOnceDataSource(options).reader(ExactlyOnceDataSource(options).schema())
    with pytest.raises(ConfigError, match=r"history is for spark\.read"):
        ExactlyOnceDataSource(options).streamReader(StructType())
    with pytest.raises(ConfigError, match=r"The schema is struct<checkpoint:bigint,"):
        ExactlyOnceDataSource(HISTORY).reader(StructType())


def test_every_option_is_documented(table: Callable[..., list[dict[str, str]]]) -> None:
    """The page has a row for each, and for no other; and every word for a type of keys."""
    described = table("docs/spark-jobs.md", "option of a read of state", "values", "default")
    assert [row["option of a read of state"].strip("`") for row in described] == [*STATE_OPTIONS, "kafka.NAME"]
    (words,) = [row["values"] for row in described if row["option of a read of state"] == "`keyType`"]
    assert set(KEY_TYPES) <= set(re.findall(r"`(\w+)`", words))


def test_every_option_of_sparks_own_source_is_compared(table: Callable[..., list[dict[str, str]]]) -> None:
    """And the table of this source's options has all of them."""
    heading = "option of Spark's own Kafka source"
    compared = [name for row in table("docs/spark-jobs.md", heading, "here") for name in names_of(row[heading])]
    of_topics = set(OPTIONS) - {"types", "params", "mode", "pipeline", "checkpoint", "asOf", "after", "commitGroupId"}
    assert sorted(compared) == sorted({*of_topics, *NOT_HERE, *OF_KAFKA})
    refused = {
        name
        for row in table("docs/spark-jobs.md", heading, "here")
        if "refused:" in row["here"]
        for name in names_of(row[heading])
    }
    assert refused == {*NOT_HERE, "kafka.isolation.level"}
    own = [
        name for row in table("docs/spark-jobs.md", "option", "values", "default") for name in names_of(row["option"])
    ]
    assert sorted(own) == sorted({*OPTIONS, "kafka.NAME"})


def names_of(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def ranges(sizes: list[int]) -> list[Range]:
    return [Range("orders", "id", partition, 7, 7 + size) for partition, size in enumerate(sizes)]


@given(SIZES, st.integers(1, 100))
def test_split(sizes: list[int], partitions_min: int) -> None:
    """The parts are the ranges in order, without gap or overlap, none of them empty, and as many as were asked for."""
    whole = [each for each in ranges(sizes) if each.size]
    parts = split(whole, partitions_min)
    assert len(parts) >= min(partitions_min, sum(sizes))
    assert all(each.size for each in parts)
    assert [(each.partition, n) for each in parts for n in range(each.start, each.end)] == [
        (each.partition, n) for each in whole for n in range(each.start, each.end)
    ]


@given(SIZES, st.integers(1, 10_000))
def test_shares(sizes: list[int], offsets_max: int) -> None:
    """A batch has as many offsets as the limit allows, and some of every partition if there are enough for that."""
    cut = shares(ranges(sizes), offsets_max)
    assert sum(each.size for each in cut) == min(offsets_max, sum(sizes))
    assert all(
        part.start == whole.start and part.end <= whole.end for part, whole in zip(cut, ranges(sizes), strict=True)
    )
    waiting = [place for place, size in enumerate(sizes) if size]
    assert len(waiting) > offsets_max or all(cut[place].size for place in waiting)


def test_shares_without_a_limit() -> None:
    assert shares(ranges([5, 0, 9]), None) == ranges([5, 0, 9])
