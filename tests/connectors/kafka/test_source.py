"""The description of a Kafka topic as a source: its types, its decoders, and what it says of a bad record."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest

from exactlyonce import AvroCodec, Record
from exactlyonce.connectors import KafkaSource


class Order(msgspec.Struct):
    id: int


@pytest.mark.parametrize(
    ("source", "type_"),
    [
        (KafkaSource("t", value=Order), Order),
        (KafkaSource("t", value=Order | None), Order | None),
        (KafkaSource("t", value=bytes), bytes),
        (KafkaSource("t", value=list[Order]), list[Order]),
        (KafkaSource("t", value=AvroCodec(Order)), Order),
        (KafkaSource.records("t", value=Order), Record[Order]),
        (KafkaSource.records("t", value=Order | None), Record[Order | None]),
    ],
)
def test_the_type_of_its_records(source: KafkaSource[Any], type_: Any) -> None:
    assert source.type == type_


def test_a_null_value_needs_a_type_that_admits_none() -> None:
    assert KafkaSource("t", value=Order | None).decode_value(None) is None
    assert KafkaSource("t", value=Order | None).decode_value(b'{"id":1}') == Order(1)
    source = KafkaSource("t", value=Order)
    with pytest.raises(TypeError) as raised:
        source.decode_value(None)
    assert source.value_problem(None, raised.value) == (
        "the value is null (a tombstone): declare value=Order | None if the topic has them"
    )


@pytest.mark.parametrize("value", [bytes, str, Order, AvroCodec(Order)], ids=["bytes", "str", "json", "avro"])
def test_no_codec_takes_null_for_a_value(value: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        KafkaSource("t", value=value).decode_value(None)


def test_a_bad_value_is_told_with_its_field() -> None:
    source = KafkaSource("t", value=Order)
    with pytest.raises(ValueError, match="id") as raised:
        source.decode_value(b'{"id":"x"}')
    problem = source.value_problem(b'{"id":"x"}', raised.value)
    assert problem == "the value is not Order in json: Expected `int`, got `str` - at `$.id`"


def test_keys_decode_by_their_own_type() -> None:
    assert KafkaSource.records("t", value=Order).decode_key(b"7") == b"7"
    assert KafkaSource.records("t", value=Order, key=str).decode_key(b"7") == "7"
    assert KafkaSource.records("t", value=Order, key=int).decode_key(b"7") == 7
    assert KafkaSource.records("t", value=Order, key=int).decode_key(None) is None


def test_where_it_starts_is_not_what_it_is() -> None:
    late = KafkaSource("t", value=Order, start=datetime(2026, 1, 1, tzinfo=timezone.utc), on_error="skip")
    assert late.describe() == KafkaSource("t", value=Order).describe()
    assert late.describe()["value"]["codec"] == "json"
    assert late.describe() != KafkaSource.records("t", value=Order).describe()
