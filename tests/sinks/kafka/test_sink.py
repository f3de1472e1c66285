"""The description of a Kafka topic as a sink: what becomes of outputs, keys and headers."""

from __future__ import annotations

import contextlib
import io
import os
from datetime import datetime, timedelta, timezone
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from exactlyonce import AvroCodec, Record
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import UserError, is_fatal
from exactlyonce.sinks import KafkaSink, PrintSink
from exactlyonce.sinks.kafka.sink import encode_key


class Total(msgspec.Struct):
    customer: str
    sum: int


class Level(IntEnum):
    LOW = 1


class Size(str, Enum):
    SMALL = "small"


ann, bob = Total("ann", 1), Total("bob", 2)


def test_values_are_encoded_by_the_type_of_the_stream() -> None:
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
    encoded = KafkaSink("t", value=value).encoder(Total | None).values([ann, None, bob])
    assert [each is None for each in encoded] == [False, True, False]


def test_none_is_a_tombstone_for_bytes_and_text() -> None:
    assert KafkaSink("t").encoder(bytes | None).values([b"", None]) == [b"", None]
    assert KafkaSink("t").encoder(str | None).values(["", None]) == [b"", None]


def test_keys_and_headers_come_from_functions() -> None:
    sink: KafkaSink[Total] = KafkaSink("t", key=lambda total: total.customer, headers=lambda total: [("v", b"1")])
    assert sink.encoder(Total).keys([ann, bob]) == [b"ann", b"bob"]
    assert sink.encoder(Total).headers([ann]) == [[("v", b"1")]]
    assert KafkaSink("t").encoder(Total).keys([ann]) is None
    assert KafkaSink("t").encoder(Total).headers([ann]) is None


def test_a_record_brings_its_own_key_and_headers() -> None:
    encoder = KafkaSink("t").encoder(Record[Total | None])
    records = [Record(ann, key="ann", headers=(("v", b"1"),)), Record(None, key="bob")]
    assert list(encoder.values(records)) == [b'{"customer":"ann","sum":1}', None]
    assert encoder.keys(records) == [b"ann", b"bob"]
    assert encoder.headers(records) == [[("v", b"1")], []]


def test_a_key_that_is_given_wins_over_the_records() -> None:
    sink: KafkaSink[Record[Total]] = KafkaSink("t", key=lambda record: record.value.sum)
    assert sink.encoder(Record[Total]).keys([Record(ann, key="ann")]) == [b"1"]


@pytest.mark.parametrize(
    ("key", "encoded"),
    [
        ("ä", "ä".encode()),
        (b"\xff", b"\xff"),
        (bytearray(b"\xff"), b"\xff"),
        (Size.SMALL, b"small"),
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
    assert encode_key(key) == encoded


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([("id", 7)], "has given int as the value of 'id', which must be bytes"),
        ({"id": b"7"}, r"has given dict; it must give \(name, bytes\) pairs"),
        (None, "has given NoneType; it must give"),
        ("id", "has given str; it must give"),
        (["id"], "has given 'id' among its pairs"),
        ([("id", b"7", 1)], "among its pairs"),
        ([(b"id", b"7")], "has given b'id' as a name"),
        ([("caf\udce9", b"7")], "as a name, which must be text"),
    ],
    ids=repr,
)
def test_headers_that_are_none_are_refused(headers: Any, why: str) -> None:
    """The client would end the writer or the process, and name nothing."""
    sink: KafkaSink[Total] = KafkaSink("t", headers=lambda total: headers if total is bob else [("v", b"1")])
    with pytest.raises(TypeError, match=f"^headers= .*{why}"):
        sink.encoder(Total).headers([ann, bob])


@pytest.mark.parametrize(
    "given",
    [[1, 1_700_000_000_000], [1, datetime(2023, 11, 14, 23, 13, 20, 999, tzinfo=timezone(timedelta(hours=1)))]],
    ids=["ms", "a datetime"],
)
def test_times_come_from_a_function(given: list[Any]) -> None:
    sink: KafkaSink[int] = KafkaSink("t", timestamp=given.__getitem__)
    assert sink.encoder(int).encode([0, 1]).timestamps == [1, 1_700_000_000_000]
    assert KafkaSink("t").encoder(int).encode([0, 1]).timestamps is None


@pytest.mark.parametrize(
    "time",
    [None, 0, -1, 1.5, True, "2026", 1 << 63, datetime(2026, 1, 1), datetime(1969, 1, 1, tzinfo=timezone.utc)],
    ids=repr,
)
def test_times_that_are_none_are_refused(time: Any) -> None:
    """0 too, which the client takes for its own time."""
    sink: KafkaSink[int] = KafkaSink("t", timestamp=[1, time].__getitem__)
    with pytest.raises((TypeError, ValueError), match=r"^timestamp= has given .* it must give milliseconds"):
        sink.encoder(int).encode([0, 1])


def test_headers_may_be_text_and_any_sequence() -> None:
    given: list[Any] = [[["a", "ä"]], (("b", None),), iter([(Size.SMALL, Size.SMALL)]), []]
    sink: KafkaSink[int] = KafkaSink("t", headers=given.__getitem__)
    headers = sink.encoder(int).headers(range(4))
    assert headers == [[("a", "ä".encode())], [("b", None)], [("small", b"small")], []]
    assert headers is not None
    assert type(headers[2][0][0]) is str


@pytest.mark.parametrize(
    ("value", "why"),
    [(7, "has made int of it"), ("7", "has made str of it"), (None, "has made None of it, which would be .* deletion")],
)
def test_what_a_codec_makes_is_bytes(value: Any, why: str) -> None:
    """None is refused as well: readers would take it for a deletion, which is the output None."""
    codec: Codec[Any] = Codec("mine", Total, encode=lambda total: value if total is bob else b"1", decode=bytes)
    encoder = KafkaSink("t", value=codec).encoder(Total | None)
    assert encoder.values([ann, None, ann]) == [b"1", None, b"1"]
    with pytest.raises(TypeError, match=f"the codec 'mine' {why}"):
        encoder.values([ann, None, bob])


def printing(sink: PrintSink, *records: object) -> None:
    context: Any = SimpleNamespace(sink="show")
    writer, encoder = sink.open_writer(context)
    writer.write(encoder.encode(records))


def test_what_an_output_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was printed in part would come again with each restart."""
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    printing(PrintSink(), "a", "ä")
    assert ascii_only.buffer.getvalue() == b"'a'\n'\\xe4'\n"


def test_a_reader_that_is_gone_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attempt would meet nobody either, as after `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    output = open(writing, "w")  # noqa: SIM115 - closing it raises
    monkeypatch.setattr("sys.stdout", output)
    with pytest.raises(UserError, match="'show' has printed to a command that reads no more") as gone:
        printing(PrintSink(), "a")
    assert is_fatal(gone.value)
    with contextlib.suppress(BrokenPipeError):
        output.close()


def test_a_print_sink_prints_and_is_not_transactional(capsys: pytest.CaptureFixture[str]) -> None:
    sink = PrintSink("total: ")
    context: Any = SimpleNamespace(sink="show")
    writer, encoder = sink.open_writer(context)
    writer.write(encoder.encode([ann]))
    assert capsys.readouterr().out == "total: Total(customer='ann', sum=1)\n"
    assert (sink.transactional, sink.needs_type) == (False, False)
    assert (KafkaSink("t").transactional, KafkaSink("t").needs_type) == (True, True)


def test_partitions_come_from_a_function() -> None:
    given: list[Any] = [0, 2, Level.LOW]
    sink: KafkaSink[int] = KafkaSink("t", partition=given.__getitem__)
    assert sink.encoder(int, 3).encode([0, 1]).partitions == [0, 2]
    partitions = sink.encoder(int, 3).encode([0, 1, 2]).partitions
    assert (partitions, [type(each) for each in partitions or ()]) == ([0, 2, 1], [int, int, int])
    assert KafkaSink("t").encoder(int).encode([0, 1]).partitions is None


@pytest.mark.parametrize("partition", [-1, 3, 1 << 40, None, 1.0, "1", True])
def test_only_a_partition_of_the_topic_is_taken(partition: Any) -> None:
    sink: KafkaSink[int] = KafkaSink("t", partition=[0, partition].__getitem__)
    with pytest.raises((TypeError, ValueError), match=r"partition= has given .*'t' has partitions 0 to 2"):
        sink.encoder(int, 3).encode([0, 1])
