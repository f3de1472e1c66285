"""Errors of codecs and functions: bad records may be skipped, outages never are, and all else stops the job."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import msgspec
import pytest
from confluent_kafka import Message

from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.engines.runtime.faults import RETRY_PAUSES_S
from exactlyonce.engines.runtime.operators import Map, SinkOutput, Stateful
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.errors import Unavailable
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ExactlyOnceError, RecordError, is_fatal
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.stored import StoredState

BAD, LAST = 3, 6
AVRO = fastavro.parse_schema({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]})


class Order(msgspec.Struct):
    id: int


def raise_from(cause: BaseException) -> None:
    try:
        raise cause
    except BaseException as error:
        raise ValueError("no schema of this id") from error


def raises(error: BaseException) -> Callable[[Any], Any]:
    def fn(_: Any) -> Any:
        raise error

    return fn


BAD_RECORDS: dict[str, Callable[[bytes], Any]] = {
    "text": lambda _: b"\xff".decode(),
    "number": lambda _: int("x"),
    "decimal": lambda _: Decimal("x"),
    "json": json.loads,
    "msgspec": lambda _: msgspec.json.decode(b'{"id": "x"}', type=Order),
    "struct": lambda data: struct.unpack(">q", data),
    "zlib": zlib.decompress,
    "gzip": gzip.decompress,
    "gzip that ends too early": lambda _: gzip.decompress(gzip.compress(b"12")[:-4]),
    "fastavro": lambda _: fastavro.schemaless_reader(BytesIO(b""), AVRO, None),
    "a field that is missing": lambda _: {"no": 1}["id"],
    "a column that is missing": lambda _: ["1", "2"][2],
    "a list for an object": lambda _: json.loads("[]").get("id"),
    "null for a number": lambda _: 1 + json.loads("null"),
    "nested too deep": lambda _: json.loads("[" * 100_000),
    "a search that finds nothing": lambda _: next(iter(())),
}
OUTAGES: dict[str, Callable[[Any], Any]] = {
    "OSError": raises(OSError("Invalid data, or no route")),
    "ConnectionError": raises(ConnectionRefusedError("no registry today")),
    "TimeoutError": raises(TimeoutError("no answer")),
    "declared": raises(Unavailable("no registry today")),
    "wrapped": lambda _: raise_from(ConnectionRefusedError("no registry today")),
}
NEITHER = {"RuntimeError": RuntimeError("what now"), "exit": SystemExit("enough")}


class Pauses(list[float]):
    """How long it would have slept."""

    def sleep(self, pause_s: float) -> None:
        self.append(pause_s)


def messages() -> list[Message]:
    return [
        Message(topic="orders", partition=3, offset=n, key=b"k", timestamp=(1, 1), value=b"%d" % n) for n in range(LAST)
    ]


def decoder_of(fails: Callable[[bytes], Any], pauses: Pauses, *, metadata: bool = False) -> SourceDecoder:
    """Skips bad records; its codec fails so on one of them."""

    def decode(data: bytes) -> int:
        number = int(data)
        if number == BAD:
            fails(b"{")
        return number

    make: Any = KafkaSource.records if metadata else KafkaSource
    codec = Codec[int]("ids", int, lambda number: b"%d" % number, decode)
    source = make("orders", value=codec, on_error="skip")
    return SourceDecoder("orders", source, sleep=pauses.sleep)


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_what_decoders_raise_on_bytes_is_a_bad_record(name: str) -> None:
    pauses = Pauses()
    decoder = decoder_of(BAD_RECORDS[name], pauses)
    assert decoder.decode(messages()).records == [n for n in range(LAST) if n != BAD]
    assert (decoder.skipped_count, pauses) == (1, [])


@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("name", OUTAGES)
def test_no_record_is_skipped_for_an_outage(name: str, metadata: bool) -> None:
    """It is tried again, and then raised as an error for which the job restarts."""
    pauses = Pauses()
    decoder = decoder_of(OUTAGES[name], pauses, metadata=metadata)
    with pytest.raises(Unavailable, match=r"'orders'.* at orders\[3\] offset 3: .*Nothing is skipped") as raised:
        decoder.decode(messages())
    assert (decoder.skipped_count, tuple(pauses)) == (0, RETRY_PAUSES_S)
    assert not is_fatal(raised.value)


def test_an_outage_that_ends_meanwhile_leaves_no_trace() -> None:
    """The batch is whole and in order, and each record is decoded once."""
    tries: list[int] = []

    def decode(data: bytes) -> int:
        tries.append(int(data))
        if data in (b"0", b"5") and tries.count(int(data)) <= len(RETRY_PAUSES_S):
            raise TimeoutError
        return int(data)

    codec = Codec[int]("ids", int, lambda number: b"", decode)
    decoder = SourceDecoder("orders", KafkaSource("orders", value=codec), sleep=Pauses().sleep)
    assert decoder.decode(messages()).records == list(range(LAST))
    assert tries == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5]


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_neither_stops_the_job(name: str) -> None:
    """It may be an undeclared outage; the error says how to declare it."""
    with pytest.raises(RecordError, match=r"ValueError for a bad record, and exactlyonce\.errors\.Unavailable"):
        decoder_of(raises(NEITHER[name]), Pauses()).decode(messages())


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_that_a_function_meets_restarts_the_job(name: str) -> None:
    fails = OUTAGES[name]
    batch = Batch([1], [Coordinates("orders", 3, 7)], [canonical_key("ann")])
    stateful = Stateful(
        "fold",
        lambda state, record: fails(record),
        KeyedTable(StoredState(operator="fold", type=int, groups=range(16), max_parallelism=16)),
    )
    for operator in (Map("call", fails), stateful):
        with pytest.raises(Unavailable, match=rf"'{operator.id}' raised .* on the record at orders\[3\] offset 7\."):
            operator(batch)


@pytest.mark.parametrize("argument", ["value", "key", "headers"])
@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_that_a_sink_meets_restarts_the_job(name: str, argument: str) -> None:
    """Encoding is tried again after the same pauses, and no record is searched for meanwhile."""
    tries: list[Any] = []

    def fails(record: Any) -> Any:
        tries.append(record)
        return OUTAGES[name](record)

    options: dict[str, Any] = {argument: Codec("ids", int, fails, int) if argument == "value" else fails}
    pauses = Pauses()
    sink = SinkOutput("out", Nothing().write, KafkaSink[int]("out", **options).encoder(int), sleep=pauses.sleep)
    with pytest.raises(ExactlyOnceError) as raised:
        sink(Batch([1, 2, 3], [Coordinates("orders", 3, n) for n in range(3)]))
    assert isinstance(raised.value, Unavailable)
    assert tuple(pauses) == RETRY_PAUSES_S
    assert tries == [1] * (1 + len(RETRY_PAUSES_S))


class Nothing:
    def write(self, outputs: Any) -> None:
        raise AssertionError(f"{outputs} were not encoded")
