"""The description of a Kafka topic as a sink: what becomes of outputs, keys and headers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from exactlyonce import AvroCodec, Record
from exactlyonce.sinks import KafkaSink, PrintSink
from exactlyonce.sinks.kafka.sink import encode_key


class Total(msgspec.Struct):
    customer: str
    sum: int


ann, bob = Total("ann", 1), Total("bob", 2)


def test_values_are_encoded_by_the_type_of_the_stream() -> None:
    """bytes pass, str is UTF-8, all else is JSON, unless value= says otherwise."""
    assert KafkaSink("t").encoder(bytes).values([b"a"]) == [b"a"]
    assert KafkaSink("t").encoder(str).values(["ä"]) == ["ä".encode()]
    assert KafkaSink("t").encoder(Total).values([ann, bob]) == [
        b'{"customer":"ann","sum":1}',
        b'{"customer":"bob","sum":2}',
    ]
    assert KafkaSink("t", value=AvroCodec(Total)).encoder(Total).values([ann]) == [b"\x06ann\x02"]
    assert KafkaSink("t", value=bytes).encoder(Total).values([b"a"]) == [b"a"]


@pytest.mark.parametrize("value", [None, AvroCodec(Total)], ids=["json", "avro"])
def test_none_is_a_tombstone(value: Any) -> None:
    """An output of None is a null value among the others, whatever the codec."""
    encoded = KafkaSink("t", value=value).encoder(Total | None).values([ann, None, bob])
    assert [each is None for each in encoded] == [False, True, False]


def test_none_is_a_tombstone_for_bytes_and_text() -> None:
    """The codecs for bytes and text give null for None, too."""
    assert KafkaSink("t").encoder(bytes | None).values([b"", None]) == [b"", None]
    assert KafkaSink("t").encoder(str | None).values(["", None]) == [b"", None]


def test_keys_and_headers_come_from_functions() -> None:
    """Each output has its key and its headers; without functions there are none."""
    sink: KafkaSink[Total] = KafkaSink("t", key=lambda total: total.customer, headers=lambda total: [("v", b"1")])
    assert sink.encoder(Total).keys([ann, bob]) == [b"ann", b"bob"]
    assert sink.encoder(Total).headers([ann]) == [[("v", b"1")]]
    assert KafkaSink("t").encoder(Total).keys([ann]) is None
    assert KafkaSink("t").encoder(Total).headers([ann]) is None


def test_a_record_brings_its_own_key_and_headers() -> None:
    """A Record is written as its value under its key; so a tombstone can have one."""
    encoder = KafkaSink("t").encoder(Record[Total | None])
    records = [Record(ann, key="ann", headers=(("v", b"1"),)), Record(None, key="bob")]
    assert list(encoder.values(records)) == [b'{"customer":"ann","sum":1}', None]
    assert encoder.keys(records) == [b"ann", b"bob"]
    assert encoder.headers(records) == [[("v", b"1")], []]


def test_a_key_that_is_given_wins_over_the_records() -> None:
    """key= is used for Records as well."""
    sink: KafkaSink[Record[Total]] = KafkaSink("t", key=lambda record: record.value.sum)
    assert sink.encoder(Record[Total]).keys([Record(ann, key="ann")]) == [b"1"]


@pytest.mark.parametrize(
    ("key", "encoded"),
    [
        ("ä", "ä".encode()),
        (b"\xff", b"\xff"),
        (None, None),
        (7, b"7"),
        (True, b"true"),
        (("a", 1), b'["a",1]'),
        ({"b": 1, "a": 2}, b'{"a":2,"b":1}'),
        (ann, b'{"customer":"ann","sum":1}'),
    ],
    ids=repr,
)
def test_how_a_key_is_written(key: object, encoded: bytes | None) -> None:
    """str is UTF-8, bytes pass, None is null, and all else is JSON in one order."""
    assert encode_key(key) == encoded


def test_a_print_sink_prints_and_is_not_transactional(capsys: pytest.CaptureFixture[str]) -> None:
    """It writes the repr of any record after its prefix, and no checkpoint commits it."""
    sink = PrintSink("total: ")
    context: Any = SimpleNamespace(sink="show")
    writer, encoder = sink.open_writer(context)
    writer.write(encoder.encode([ann]))
    assert capsys.readouterr().out == "total: Total(customer='ann', sum=1)\n"
    assert (sink.transactional, sink.needs_type) == (False, False)
    assert (KafkaSink("t").transactional, KafkaSink("t").needs_type) == (True, True)
