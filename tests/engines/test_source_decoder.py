"""Records that do not decode: left out in one pass, counted, and told without a flood."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message

from exactlyonce import EventTime
from exactlyonce.checkpoint.records.manifest import RecordPlace
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.runtime.faults import Notes
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import RecordError

COUNT = 2_000
BAD = b"{"


class Order(msgspec.Struct):
    id: int


def batch_of(good: Any) -> list[Message]:
    return [
        Message(
            topic="orders", partition=3, offset=number, key=b"k", timestamp=(1, 1),
            value=json.dumps({"id": number}).encode() if good(number) else BAD,
        )
        for number in range(COUNT)
    ]  # fmt: skip


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize(
    "good",
    [lambda number: True, lambda number: False, lambda number: number % 2, lambda number: number >= 1_500],
    ids=["all", "none", "every second", "the last 500"],
)
def test_what_does_not_decode_is_left_out(good: Any, metadata: bool) -> None:
    make: Any = KafkaSource.records if metadata else KafkaSource
    source = make("orders", value=Order, on_error="skip")
    decoder = SourceDecoder("orders", source, notes := Notes())
    batch = decoder.decode(batch_of(good))
    expected = [number for number in range(COUNT) if good(number)]
    records = [record.value for record in batch.records] if metadata else batch.records
    assert [record.id for record in records] == expected
    assert [origin.offset() for origin in batch.origins] == expected
    bad = COUNT - len(expected)
    assert decoder.skipped_count == bad
    lines = notes.take_lines()
    assert len(lines) == (1 if bad else 0)
    assert all(f"{bad:,} records, the last: the record at orders[3] offset " in line for line in lines)
    assert notes.take_lines() == []


def test_a_batch_of_which_all_is_left_out_has_times() -> None:
    """An operator of event time takes it like any other."""
    source = KafkaSource("orders", value=Order, on_error="skip", time=EventTime(lambda order: order.id))
    decoder = SourceDecoder("orders", source, Notes())
    batch = decoder.decode(batch_of(lambda number: False))
    assert (batch.records, batch.times) == ([], [])


def found(data: bytes) -> Any:
    return next(number for number in json.loads(data).values() if number != 7)


def test_a_codec_that_finds_nothing_cuts_nothing_short() -> None:
    """StopIteration is an error of its record, and no end of the batch."""
    codec = Codec[int]("ids", int, lambda number: b"", found)
    skipping = SourceDecoder("orders", KafkaSource("orders", value=codec, on_error="skip"), notes := Notes())
    assert skipping.decode(batch_of(lambda number: True)).records == [each for each in range(COUNT) if each != 7]
    assert "orders[3] offset 7: the value is not int in ids: a next() has found nothing" in notes.take_lines()[0]
    last = SourceDecoder("orders", KafkaSource("orders", value=codec))
    with pytest.raises(RecordError, match=r"orders\[3\] offset 7"):
        last.decode(batch_of(lambda number: True)[:8])


def test_a_key_that_does_not_decode_is_told_as_the_key() -> None:
    messages = [Message(topic="orders", partition=3, offset=5, key=b"k", timestamp=(1, 1), value=b'{"id": 1}')]
    with pytest.raises(RecordError, match=r"offset 5: the key is not int: "):
        SourceDecoder("orders", KafkaSource.records("orders", value=Order, key=int)).decode(messages)
    with pytest.raises(RecordError, match=r"offset 7: the value is not Order in json: "):
        SourceDecoder("orders", KafkaSource.records("orders", value=Order, key=int)).decode(
            batch_of(lambda number: number < 7)[7:]
        )


def test_records_that_are_to_be_skipped_are_not_decoded() -> None:
    """Each is counted and named once; other topics, partitions and later records are untouched."""
    notes = Notes()
    skips = [RecordPlace("orders", 3, 7), RecordPlace("orders", 2, 1), RecordPlace("other", 3, 0)]
    decoder = SourceDecoder("orders", KafkaSource("orders", value=Order), notes, skips=skips)
    batch = decoder.decode(batch_of(lambda number: number != 7)[:10])
    assert [origin.offset() for origin in batch.origins] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert [record.id for record in batch.records] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert decoder.skipped_count == 1
    assert notes.take_lines() == ["skipped: source 'orders': the record at orders[3] offset 7, as asked for by --skip"]


def test_the_first_bad_record_fails_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = SourceDecoder("orders", KafkaSource("orders", value=Order))
    with pytest.raises(RecordError, match=r"orders\[3\] offset 7"):
        decoder.decode(batch_of(lambda number: number < 7))
    assert (decoder.skipped_count, capsys.readouterr().err) == (0, "")
