"""Records that do not decode: left out in one pass, counted, and told without a flood."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message

from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.source_decoder import NAMED_MAX, SourceDecoder
from exactlyonce.pipeline.errors import RecordError

COUNT = 2_000
BAD = b"{"


class Order(msgspec.Struct):
    id: int


def batch_of(good: Any) -> list[Message]:
    """Messages at offsets from 0 on, of which those are good for which *good* says so."""
    return [
        Message(
            topic="orders",
            partition=3,
            offset=number,
            key=b"k",
            timestamp=(1, 1),
            value=json.dumps({"id": number}).encode() if good(number) else BAD,
        )
        for number in range(COUNT)
    ]


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize(
    "good",
    [lambda number: True, lambda number: False, lambda number: number % 2, lambda number: number >= 1_500],
    ids=["all", "none", "every second", "the last 500"],
)
def test_what_does_not_decode_is_left_out(good: Any, metadata: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """However many records of a batch are bad, the good ones come in order with their origins, and the bad ones are
    counted; a few of those are named, and the rest is one line."""
    make: Any = KafkaSource  # its overloads know True and False, and no bool
    source = make("orders", value=Order, on_error="skip", metadata=metadata)
    decoder = SourceDecoder("orders", source)
    batch = decoder.decode(batch_of(good))
    expected = [number for number in range(COUNT) if good(number)]
    records = [record.value for record in batch.records] if metadata else batch.records
    assert [record.id for record in records] == expected
    assert [origin.offset() for origin in batch.origins] == expected
    bad = COUNT - len(expected)
    assert decoder.skipped == bad
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (NAMED_MAX + 1 if bad else 0)
    if bad:
        assert "orders[3] offset 0" in lines[0]
        assert f"{bad - NAMED_MAX:,} more records" in lines[-1]


def test_the_first_bad_record_fails_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the source does not skip, the first bad record is the error, and nothing else is said."""
    decoder = SourceDecoder("orders", KafkaSource("orders", value=Order))
    with pytest.raises(RecordError, match=r"orders\[3\] offset 7"):
        decoder.decode(batch_of(lambda number: number < 7))
    assert (decoder.skipped, capsys.readouterr().err) == (0, "")
