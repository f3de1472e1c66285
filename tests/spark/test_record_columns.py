"""Typed keys and values of topics, by the sources of a pipeline."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from reads import direct, given
from registry_pipelines import Order
from typed_topics import Refund

from exactlyonce.connectors.registry import opened
from exactlyonce.pipeline.avro import AvroCodec
from exactlyonce.pipeline.errors import ConfigError, RecordError, Unavailable
from exactlyonce.testing.cluster import LIMIT_S

TYPES = "typed_topics:make"
ORDER = "struct<customer:string,total:bigint,items:array<struct<name:string,price:decimal(38,18)>>,at:timestamp>"


def typed(name: str, **options: str) -> dict[str, str]:
    return {"types": TYPES, "params": json.dumps({"name": name}), **options}


def rows(kafka: Any, topic: str, name: str, **options: str) -> list[dict[str, Any]]:
    reader = direct(kafka, topic, **typed(name, **options))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [row for batch in batches for row in batch.to_pylist()]


def test_typed_keys_and_values(kafka: Any, topic_name: str) -> None:
    """Nulls stay null; other columns are as without types."""
    topic = kafka.create_topic(f"{topic_name}-orders")
    order = {"customer": "ann", "total": 7, "items": [{"name": "tea", "price": "2.50"}], "at": "2026-01-02T03:04:05Z"}
    kafka.produce(topic, [("ann", json.dumps(order)), json.dumps({"customer": "bob", "total": 0}), ("cy", None)])
    found = rows(kafka, topic, topic_name, includeHeaders="true")
    assert [(row["key"], row["offset"], row["headers"]) for row in found] == [
        ("ann", 0, None), (None, 1, None), ("cy", 2, None)
    ]  # fmt: skip
    tea, moment = {"name": "tea", "price": Decimal("2.5")}, datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert [row["value"] for row in found] == [
        {"customer": "ann", "total": 7, "items": [tea], "at": moment},
        {"customer": "bob", "total": 0, "items": [], "at": None},
        None,
    ]


def test_avro_and_topics_of_a_pattern(kafka: Any, topic_name: str) -> None:
    refunds, orders = (kafka.create_topic(f"{topic_name}-{name}") for name in ("refunds", "orders"))
    kafka.produce(
        refunds, [AvroCodec(Refund).encode(Refund("ann", 5, "late")), AvroCodec(Refund).encode(Refund("b", 1))]
    )
    assert [row["value"] for row in rows(kafka, refunds, topic_name)] == [
        {"customer": "ann", "total": 5, "reason": "late"}, {"customer": "b", "total": 1, "reason": None}
    ]  # fmt: skip
    kafka.produce(orders, [json.dumps({"customer": "ann", "total": 1})])
    kafka.produce(kafka.create_topic(f"{orders}-2"), [json.dumps({"customer": "bob", "total": 2})])
    found = rows(kafka, "", topic_name, subscribePattern=f"{orders}(-[0-9])?")
    assert [row["value"]["customer"] for row in found] == ["ann", "bob"]
    kafka.produce(kafka.create_topic(f"{orders}-3"), ["{}"])
    with pytest.raises(ConfigError, match=f"no source or sink of topic '{orders}-3', which subscribePattern matches"):
        rows(kafka, "", topic_name, subscribePattern=f"{orders}(-[0-9])?")


def test_an_output_has_the_types_of_its_sink(kafka: Any, topic_name: str) -> None:
    """Its key has those of `key_codec`, and is bytes without one; a tombstone is null."""
    topic = kafka.create_topic(f"{topic_name}-totals")
    kafka.produce(topic, [("7", json.dumps({"customer": "ann", "total": 7})), ("8", None)])
    found = rows(kafka, topic, topic_name)
    refund = {"customer": "ann", "total": 7, "reason": None}
    assert [(row["key"], row["value"]) for row in found] == [(7, refund), (8, None)]
    out = kafka.create_topic(f"{topic_name}-out")
    kafka.produce(out, [("a", "text")])
    assert [(row["key"], row["value"]) for row in rows(kafka, out, topic_name)] == [(b"a", "text")]


def test_refused_records(kafka: Any, topic_name: str) -> None:
    topic = kafka.create_topic(f"{topic_name}-orders")
    good, large = ({"customer": "ann", "total": total} for total in (1, 1 << 63))
    values = [json.dumps(good), '{"customer": "bob"}', json.dumps(large), json.dumps(good)]
    kafka.produce(topic, [("key", value) for value in values])
    with pytest.raises(
        RecordError, match=r"the value is not Order in json: .*`total`.* set the option mode: "
    ) as caught:
        rows(kafka, topic, topic_name)
    assert f"record at {topic}[0] offset 1: " in str(caught.value)
    assert caught.value.facts == {"topic": topic, "partition": 0, "offset": 1}
    left = rows(kafka, topic, topic_name, mode="dropmalformed")
    assert [(row["offset"], row["value"]["total"]) for row in left] == [(0, 1), (3, 1)]
    start = {"startingOffsets": json.dumps({topic: {"0": 2}})}
    with pytest.raises(RecordError, match=r"offset 2: the value is no struct<.*>: "):
        rows(kafka, topic, topic_name, **start)
    only = {**start, "endingOffsets": json.dumps({topic: {"0": 3}})}
    assert rows(kafka, topic, topic_name, mode="DROPMALFORMED", **only) == []
    shown = rows(kafka, topic, topic_name, mode="PERMISSIVE")
    assert [row["key"] for row in shown] == ["key"] * 4
    assert [row["value"] is None for row in shown] == [False, True, True, False]
    assert [row["_corrupt_record"] for row in shown] == [
        None, *({"key": b"key", "value": value.encode()} for value in values[1:3]), None
    ]  # fmt: skip


def test_a_codec_that_fails_otherwise(kafka: Any, topic_name: str) -> None:
    """An outage that stays and a defect are errors in every mode; one that passes is waited for."""
    topic = kafka.create_topic(f"{topic_name}-numbers", partitions=3)
    for partition, value in enumerate(("away", "broken", "unknown")):
        kafka.produce(topic, ["7", value], partition=partition)
    (kept,) = rows(kafka, "", topic_name, mode="DROPMALFORMED", assign=json.dumps({topic: [2]}))
    assert kept["value"] == 7
    for partition, error, message in (
        (0, Unavailable, r"met an outage at .*\[0\] offset 1: Unavailable: the registry is away"),
        (1, RecordError, r"failed at .*\[1\] offset 1: RuntimeError: a defect\. .* raise ValueError for a bad record"),
    ):
        with pytest.raises(error, match=message):
            rows(kafka, "", topic_name, mode="DROPMALFORMED", assign=json.dumps({topic: [partition]}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "{}-elsewhere"}, "has no source or sink of topic '.*-elsewhere': its topics are .*-orders, "),
        ({"subscribePattern": "elsewhere"}, "has no source or sink that subscribePattern 'elsewhere' matches"),
        (
            {"subscribe": "{}-orders,{}-refunds"},
            "Key and value of topic .* are string, struct<.*they are binary, struct",
        ),
        ({"subscribe": "{}-strange"}, "Topic '.*-strange' cannot have typed columns: Strange cannot be encoded"),
        ({"subscribe": "{}-orders", "types": "no_such_module:make"}, "there is no module 'no_such_module'"),
    ],
)
def test_topics_without_one_type(kafka: Any, topic_name: str, options: dict[str, str], message: str) -> None:
    named = {name: value.replace("{}", topic_name) for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        direct(kafka, "", **{**typed(topic_name), **named})


@pytest.mark.exhaustive
def test_a_schema_registry(kafka: Any, registry: Any, topic_name: str) -> None:
    """The codec of the pipeline's source looks up the schema of each value."""
    topic, orders = kafka.create_topic(f"{topic_name}-in"), [Order(1, "ann", 7), Order(2, "bob", 9)]
    writer = AvroCodec(Order, registry=registry.url, register=True)
    kafka.produce(topic, [*map(opened(writer, topic, "value").encode, orders), b"no magic byte"])
    params = json.dumps({"name": topic_name, "registry": registry.url})
    reader = direct(kafka, topic, types="registry_pipelines:totals", params=params, mode="DROPMALFORMED")
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert [row["value"] for batch in batches for row in batch.to_pylist()] == list(map(msgspec.structs.asdict, orders))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_on_a_session(spark: Any, kafka: Any, topic_name: str) -> None:
    """A batch and a stream have columns of the type, and rows of the records."""
    topic = kafka.create_topic(f"{topic_name}-orders", partitions=2)
    orders = [{"customer": f"c{n % 3}", "total": n, "items": [{"name": "tea", "price": str(n)}]} for n in range(30)]
    for n, order in enumerate(orders):
        kafka.produce(topic, [(order["customer"], json.dumps(order))], partition=n % 2)
    kafka.produce(topic, ["no order"], partition=0)
    options = given(kafka, topic, **typed(topic_name, mode="DROPMALFORMED"), startingOffsets="earliest")
    frame = spark.read.format("exactlyonce").options(**options).load()
    assert frame.schema["key"].dataType.simpleString() == "string"
    assert frame.schema["value"].dataType.simpleString() == ORDER
    summed = frame.where("value.total >= 10").groupBy("value.customer").agg({"value.total": "sum"}).collect()
    assert {row[0]: row[1] for row in summed} == {
        f"c{n}": sum(x for x in range(10, 30) if x % 3 == n) for n in range(3)
    }
    stream = spark.readStream.format("exactlyonce").options(**options).load()
    prices = stream.selectExpr("value.customer as customer", "value.items[0].price as price")
    query = prices.writeStream.format("memory").queryName("typed_orders").trigger(availableNow=True).start()
    assert query.awaitTermination(LIMIT_S)
    assert sorted(int(row.price) for row in spark.sql("select price from typed_orders").collect()) == list(range(30))
    with pytest.raises(Exception, match=rf"The record at {topic}\[0\] offset 15: the value is not Order in json"):
        spark.read.format("exactlyonce").options(**given(kafka, topic, **typed(topic_name))).load().count()
