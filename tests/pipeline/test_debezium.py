"""Debezium's envelope, against messages that Debezium wrote: `debezium.json` says how they were recorded."""

from __future__ import annotations

import copy
import json
from base64 import b64decode
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pytest

from exactlyonce import DebeziumCodec, Joined, KafkaSink, KafkaSource, Pipeline, Record
from exactlyonce.errors import GraphError
from exactlyonce.pipeline.changes import UNCHANGED, Change, Unchanged
from exactlyonce.pipeline.codec import Ignored
from exactlyonce.pipeline.registry import PublishedSchema
from exactlyonce.sinks.kafka.sink import gives_newest_rows
from exactlyonce.testing import assert_exactly_once

RECORDED = json.loads((Path(__file__).parent / "debezium.json").read_text())
REGISTRY = "http://127.0.0.1:1"
Naive = Annotated[datetime, msgspec.Meta(tz=False)]
Aware = Annotated[datetime, msgspec.Meta(tz=True)]


class Customer(msgspec.Struct, kw_only=True):
    """The columns of the recorded tables; those that some settings write in a way that this type refuses are apart."""

    id: int
    name: str
    small: int | None = None
    big: int | None = None
    flag: bool | None = None
    ratio: float | None = None
    score: float | None = None
    amount: Decimal | None = None
    anything: Decimal | None = None
    born: date | None = None
    at: time | None = None
    at_tz: time | None = None
    seen: Naive | None = None
    seen_ms: Naive | None = None
    made: Aware | None = None
    doc: dict[str, Any] | None = None
    uid: UUID | None = None
    tags: list[str] | None = None
    numbers: list[int | None] | None = None
    mood: Literal["happy", "sad"] | None = None


class Whole(Customer, kw_only=True):
    raw: bytes | None = None
    span: timedelta | None = None
    notes: str | None = None


class Name(msgspec.Struct):
    id: int
    name: str


class Stock(TypedDict):
    shop: str
    nr: int
    name: str


ANN: dict[str, Any] = {
    "id": 1, "name": "ann", "small": 1, "big": 9007199254740993, "flag": True, "ratio": 1.5, "score": 0.1,
    "amount": Decimal("1234.50"), "anything": Decimal("12.345"), "born": date(1990, 2, 28),
    "at": time(12, 34, 56, 789012), "at_tz": time(10, 34, 56, 500000, timezone.utc),
    "seen": datetime(2026, 1, 2, 3, 4, 5, 678901), "seen_ms": datetime(2026, 1, 2, 3, 4, 5, 678000),
    "made": datetime(2026, 1, 2, 2, 4, 5, 678901, timezone.utc), "doc": {"a": [1, None]},
    "uid": UUID("e7b4f4d2-4a6e-4d0c-8c35-6f8a1d2b3c4d"), "tags": ["a", "b"], "numbers": [1, None], "mood": "happy",
}  # fmt: skip
MORE = {"raw": b"\x00\xff\x10", "span": timedelta(days=1, hours=2, minutes=3, seconds=4.5), "notes": "short"}


def recorded(table: str, settings: str = "default") -> list[dict[str, Any]]:
    chosen = [part for part in RECORDED["messages"] if part["table"] == table and part["settings"] == settings]
    return copy.deepcopy(chosen)


def decode(type_: Any, message: dict[str, Any], form: str = "json", key: Any = "id", **options: Any) -> Change[Any]:
    """The change in a recorded message, in JSON without schemas, with them, or in Avro."""
    if form == "avro":
        schema = PublishedSchema("AVRO", json.dumps(RECORDED["schemas"][message["avro_schema"]]))
        codec = DebeziumCodec(type_, key, registry=REGISTRY, **options)
        return codec.decoder_of(schema)(b64decode(message["avro"])[5:])
    payload = message["payload"]
    if form == "schemas":
        payload = {"schema": RECORDED["schemas"][message["schema"]], "payload": payload}
    return DebeziumCodec(type_, key, **options).decode(json.dumps(payload).encode())


@pytest.mark.parametrize("form", ["schemas", "avro"])
@pytest.mark.parametrize("settings", ["default", "texts", "connect", "nanoseconds"])
def test_each_type_of_a_column_is_read_by_its_schema(settings: str, form: str) -> None:
    """Whatever Debezium's settings make of a column, its field has the value of the database."""
    (first, *_) = recorded("whole", settings)
    type_, wanted = (Whole, ANN | MORE) if settings in ("default", "nanoseconds") else (Customer, ANN)
    if settings == "connect":  # it cuts to milliseconds
        wanted = wanted | {"at": time(12, 34, 56, 789000), "seen": wanted["seen_ms"], "amount": Decimal("1234.5")}
    assert decode(type_, first, form).after == type_(**wanted)


def test_without_schemas_the_type_tells_the_encoding() -> None:
    """Texts, and numbers of one unit, are read without a schema."""
    (first,) = recorded("whole", "texts")
    naive = ("at", "seen", "seen_ms")  # their texts say Z, as if they had a zone
    part = msgspec.defstruct(
        "Part", [(name, type_) for name, type_ in Customer.__annotations__.items() if name not in naive],
        namespace={"__annotations__": {}}, module=__name__,
    )  # fmt: skip
    read = decode(part, first, decimals="string").after
    assert {name: getattr(read, name) for name in part.__struct_fields__} == {
        name: value for name, value in ANN.items() if name not in naive
    }


@pytest.mark.parametrize("form", ["json", "schemas", "avro"])
def test_every_operation(form: str) -> None:
    """Inserts, updates, deletes and truncates in order; a changed key is a delete and an insert."""
    messages = [part for part in recorded("customers") if part["payload"] is not None]
    changes = [decode(Name, message, form) for message in messages]
    assert [(change.op, change.key, change.after) for change in changes] == [
        ("read", 1, Name(1, "ann")), ("insert", 3, Name(3, "cid")), ("update", 2, Name(2, "bob")), ("delete", 1, None),
        ("insert", 4, Name(4, "ann")), ("delete", 3, None), ("truncate", None, None),
    ]  # fmt: skip
    assert {change.before for change in changes} == {None}, "the row of a delete has an empty name there"
    for change, message in zip(changes, messages, strict=True):
        source = message["payload"]["source"]
        assert (change.table, change.timestamp_ms, change.lsn) == ("customers", source["ts_ms"], source["lsn"])
        assert change.transaction == (None if change.op == "read" else source["txId"])


@pytest.mark.parametrize("form", ["json", "schemas", "avro"])
def test_rows_before(form: str) -> None:
    """before=True reads the rows of updates and deletes."""
    changes = [decode(Name, part, form, before=True) for part in recorded("whole") if part["payload"] is not None]
    assert [(change.op, change.before) for change in changes] == [
        ("read", None), ("insert", None), ("update", Name(2, "ann")), ("delete", Name(1, "ann")), ("insert", None),
        ("delete", Name(3, "cid")), ("truncate", None),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["json", "schemas", "avro"])
def test_keys_of_several_columns(form: str) -> None:
    """They are the JSON array of their values as text, as of `PostgresChanges`."""
    messages = [part for part in recorded("plain") if part["payload"] is not None]
    keys = [decode(Stock, message, form, key=("shop", "nr")).key for message in messages]
    assert keys == ['["a","1"]', '["b","2"]', '["a","1"]']


@pytest.mark.parametrize("form", ["json", "schemas", "avro"])
def test_a_large_value_that_was_not_sent(form: str) -> None:
    """It is an error of the record, unless its field may be UNCHANGED, or the type does not have it."""
    (update,) = [part for part in recorded("customers") if part["payload"] and part["payload"]["op"] == "u"]
    assert decode(Name, update, form).after == Name(2, "bob")

    class Notes(Name):
        notes: str

    with pytest.raises(ValueError, match=r"REPLICA IDENTITY FULL, .* - at `\$.notes`"):
        decode(Notes, update, form)

    class Large(Name):
        notes: str | Unchanged | None = UNCHANGED
        raw: bytes | Unchanged | None = UNCHANGED
        tags: list[str] | Unchanged | None = UNCHANGED

    change = decode(Large, update, form)
    assert change.after is not None
    assert (change.after.notes, change.after.raw, change.after.tags) == (UNCHANGED, b"\x00\xff\x10", ["a", "b"])
    more: dict[str, Any] = {"registry": REGISTRY} if form == "avro" else {"schemas": form == "schemas"}
    codec: DebeziumCodec[Any] = DebeziumCodec(Large, "id", **more)
    for row in (change.after, Large(2, "bob")):
        assert codec.decode(codec.encode(Change("update", 2, row, None, "customers", 1, 2))).after == row
    if form != "avro":
        assert b'"notes":"__debezium_unavailable_value"' in codec.encode(change)


class Large(msgspec.Struct):
    id: int
    ints: list[int] | Unchanged | None = UNCHANGED
    longs: list[int] | Unchanged | None = UNCHANGED
    uuids: list[UUID] | Unchanged | None = UNCHANGED
    texts: list[str] | Unchanged | None = UNCHANGED
    dates: list[date] | Unchanged | None = UNCHANGED
    raw: bytes | Unchanged | None = UNCHANGED
    doc: dict[str, Any] | Unchanged | None = UNCHANGED
    num: Decimal | Unchanged | None = UNCHANGED
    h: dict[str, str] | Unchanged | None = UNCHANGED


@pytest.mark.parametrize("form", ["json", "schemas", "avro"])
def test_each_type_of_a_column_that_may_be_unavailable(form: str) -> None:
    """Debezium writes its placeholder in a form of the column's type: numbers, a UUID, a map. So does the codec."""
    (update,) = recorded("large")
    change = decode(Large, update, form, decimals="string")
    assert change.after == Large(1)
    codec: DebeziumCodec[Any] = DebeziumCodec(Large, "id", decimals="string")
    written = json.loads(codec.encode(change))["after"]
    assert {name: value for name, value in written.items() if name != "h"} == {
        name: update["payload"]["after"][name] for name in Large.__struct_fields__ if name != "h"
    }
    assert codec.decode(codec.encode(change)) == change
    for name in Large.__struct_fields__[1:]:
        for wide in (Any, str | int | list[Any]):
            part = msgspec.defstruct("Part", [("id", int), (name, wide)])
            with pytest.raises(ValueError, match=rf"REPLICA IDENTITY FULL, .* - at `\$.{name}`"):
                decode(part, update, form, decimals="string")


class Times(msgspec.Struct):
    id: int
    seen: datetime | None = None
    at: time | None = None
    amount: Decimal | None = None


@pytest.mark.parametrize(
    ("row", "options", "read"),
    [
        ({"seen": 1_000_001}, {}, "whose unit only a schema tells.*timestamps=.*`[$].seen`"),
        ({"at": 1_000}, {}, "whose unit only a schema tells.*`[$].at`"),
        ({"amount": "AeI6"}, {}, "whose scale only a schema tells.*`[$].amount`"),
        ({"amount": "1234"}, {}, "whose scale only a schema tells"),
        ({"at": 86_400_000}, {"timestamps": "ms"}, "no time of a day"),
        ({"seen": 1_000_001}, {"timestamps": "us"}, Times(1, seen=datetime(1970, 1, 1, 0, 0, 1, 1))),
        ({"seen": 1_001, "at": 1_000}, {"timestamps": "ms"},
         Times(1, seen=datetime(1970, 1, 1, 0, 0, 1, 1000), at=time(0, 0, 1))),
        ({"amount": "1234"}, {"decimals": "string"}, Times(1, amount=Decimal(1234))),
        ({"amount": 0.25}, {}, Times(1, amount=Decimal("0.25"))),
        ({"seen": "2026-01-02T03:04:05"}, {}, Times(1, seen=datetime(2026, 1, 2, 3, 4, 5))),
    ],
)  # fmt: skip
def test_what_only_a_schema_tells_is_never_guessed(row: dict[str, Any], options: dict[str, Any], read: Any) -> None:
    """A bare number for a time, and bytes for a decimal number, are refused unless the user says what they are."""
    data = json.dumps({"op": "c", "after": {"id": 1, **row}}).encode()
    codec = DebeziumCodec(Times, "id", **options)
    if isinstance(read, Times):
        assert codec.decode(data).after == read
        return
    with pytest.raises(ValueError, match=read):
        codec.decode(data)


def test_messages_around_a_null_schema() -> None:
    """A converter with schemas has null for one that it does not know, and for the tombstone's."""
    decode_name = DebeziumCodec(Name, "id").decode
    payload = {"op": "c", "after": {"id": 1, "name": "ann"}, "source": {"db": "shop", "table": "names", "ts_ms": 5}}
    change = decode_name(json.dumps({"schema": None, "payload": payload}, separators=(",", ":")).encode())
    assert change == Change("insert", 1, Name(1, "ann"), None, "names", 5, 0)
    with pytest.raises(Ignored):
        decode_name(b'{"schema":null,"payload":null}')


@pytest.mark.parametrize(
    ("envelope", "problem"),
    [
        ({"op": "m", "message": {}}, "its op is 'm', which is no change of a row"),
        ({"op": "d", "before": None}, "a delete without before"),
        ({"op": "u", "after": None}, "it has no after"),
        ({"op": "c", "after": {"id": "1", "name": "a"}}, r"Expected `int`, got `str` - at `\$.after.id`"),
        ({"op": "d", "before": {"id": "1"}}, "id of its key is '1', and no int"),
        ({"op": "d", "before": {"name": ""}}, "id of its key.*null"),
        ({"id": 1, "name": "a"}, "required field `op`"),
        ({"schema": {"type": "struct", "fields": []}, "payload": {}}, "none of an envelope"),
    ],
)
def test_other_messages_are_refused(envelope: Any, problem: str) -> None:
    """The message says what is wrong, and where."""
    with pytest.raises((ValueError, msgspec.ValidationError), match=problem):
        DebeziumCodec(Name, "id").decode(json.dumps(envelope).encode())


def test_a_field_that_the_schema_refutes() -> None:
    """Hexadecimal digits would be other bytes in base64; a plain number is no time."""
    (texts,), (first, *_) = recorded("whole", "texts"), recorded("whole")

    class Raw(Name):
        raw: bytes

    class Seen(Name):
        big: Naive

    with pytest.raises(ValueError, match=r"it is a text by its schema.*`\$.raw`"):
        decode(Raw, texts, "schemas")
    with pytest.raises(ValueError, match=r"a number of type int64 - at `\$.big`"):
        decode(Seen, first, "schemas")


class Amount(msgspec.Struct):
    id: int
    amount: Decimal


def test_a_decimal_by_the_type_of_its_field() -> None:
    """A numeric column may be an int, a float or a text."""

    class Texts(Name):
        amount: str
        anything: float

    class Cents(Name):
        amount: int

    (first, *_) = recorded("whole")
    assert decode(Texts, first, "schemas").after == Texts(1, "ann", "1234.50", 12.345)
    with pytest.raises(ValueError, match=r"1234.50 is no int - at `\$.amount`"):
        decode(Cents, first, "schemas")


# --- out --------------------------------------------------------------------------------------------------------------


def codec_of(form: str, **options: Any) -> DebeziumCodec[Any]:
    more: dict[str, Any] = {"registry": REGISTRY} if form == "avro" else {"schemas": form == "schemas"}
    return DebeziumCodec(Whole, "id", timestamps="us", name="shop.public.whole", before=True, **more, **options)


ZONED_AT = "at_tz"
"""A time with a zone is in no column that this codec writes."""


@pytest.mark.parametrize("form", ["json", "schemas", "avro"])
def test_what_is_written_is_what_debezium_writes(form: str) -> None:
    """The rows and the keys of the recorded table are equal, but for numbers whose scale the type does not know."""
    codec = codec_of(form, **({"decimals": "string"} if form == "json" else {}))
    for message in recorded("whole"):
        if message["payload"] is None:
            continue
        change = decode(Whole, message, "schemas", before=True)
        for row in (change.before, change.after):
            if row is not None:
                row.at_tz = None
        encoded = codec.encode(change)
        assert codec.decode(encoded) == change
        if form == "avro":
            continue
        envelope = json.loads(encoded)
        if form == "schemas":
            envelope = envelope["payload"]
        for place in ("before", "after"):
            ours, theirs = envelope[place], message["payload"][place]
            for name in ("amount", "anything", "seen_ms", ZONED_AT):
                for row in filter(None, (ours, theirs)):
                    row.pop(name)
            for row in filter(None, (ours, theirs)):
                row["doc"] = row["doc"] and json.loads(row["doc"])
            assert ours == theirs
        assert envelope["op"] == message["payload"]["op"]
        key = codec.key_of(change)
        assert key == message["key"]
        if key is not None:
            encoded_key = json.loads(codec.key_codec.encode(key))
            assert (encoded_key["payload"] if form == "schemas" else encoded_key) == message["key"]


def test_its_schema_is_that_of_debezium() -> None:
    """Each column has the name of its type, and whether it may be null."""
    message = recorded("whole")[-1]
    ours = json.loads(codec_of("schemas").encode(decode(Whole, message, "schemas")))["schema"]
    theirs = RECORDED["schemas"][message["schema"]]
    not_equal = {"small", "id", "ratio", "amount", "seen_ms", ZONED_AT, "numbers", "mood"}
    assert ours["name"].rpartition(".")[0] == theirs["name"].rpartition(".")[0] == "shop.public.whole"
    for place in (0, 1):
        columns = [
            {column["field"]: (column["type"], column.get("name"), column["optional"]) for column in
             schema["fields"][place]["fields"] if column["field"] not in not_equal}
            for schema in (ours, theirs)
        ]  # fmt: skip
        assert columns[0] == columns[1]


def test_a_delete_has_its_key_and_a_tombstone() -> None:
    """A delete without a row before has empty values, as Debezium's; then comes a null value under its key."""
    changes: list[Change[Any]] = [
        Change("insert", 3, Name(3, "cid"), None, "crm.names", 7, 8, 9),
        Change("delete", 3, None, None, "names", 7, 8, 9),
        Change("truncate", None, None, None, "names", 7, 8, 9),
        Change("delete", 4, None, Name(4, "dan"), "names", 7, 8),
    ]
    sink: Any = KafkaSink("out", value=DebeziumCodec(Name, "id"), timestamp=lambda change: change.timestamp_ms)
    outputs = sink.encoder(Change[Name]).encode(changes)
    assert outputs.keys == [b'{"id":3}', b'{"id":3}', b'{"id":3}', None, b'{"id":4}', b'{"id":4}']
    values = [None if value is None else json.loads(value) for value in outputs.values]
    assert [value and (value["op"], value["before"], value["source"]["schema"]) for value in values] == [
        ("c", None, "crm"), ("d", {"id": 3, "name": ""}, "public"), None, ("t", None, "public"),
        ("d", {"id": 4, "name": "dan"}, "public"), None,
    ]  # fmt: skip
    assert (outputs.records, outputs.timestamps) == ([0, 1, 1, 2, 3, 3], [7] * 6)
    bare: Any = KafkaSink("out", value=DebeziumCodec(Name, "id", tombstones=False))
    assert len(bare.encoder(Change[Name]).encode(changes)) == 4


@pytest.mark.parametrize("schemas", [False, True])
def test_keys_of_several_columns_are_written(schemas: bool) -> None:
    """They have the values of their columns again."""

    class Day(msgspec.Struct):
        shop: UUID
        day: date
        nr: int

    row = Day(UUID(int=1), date(1970, 1, 3), 7)
    codec = DebeziumCodec(Day, ("shop", "day", "nr"), schemas=schemas)
    key = codec.decode(codec.encode(Change("insert", None, row, None, "days", 1, 2))).key
    assert key == f'["{UUID(int=1)}","1970-01-03","7"]'
    change: Change[Any] = Change("delete", key, None, None, "days", 1, 2)
    assert codec.key_of(change) == {"shop": f"{UUID(int=1)}", "day": 2, "nr": 7}
    assert codec.decode(codec.encode(change)).key == key


@pytest.mark.parametrize(
    ("type_", "options", "problem"),
    [
        (Name, {"key": "nr"}, "Name has no field 'nr'"),
        (Name, {"key": ()}, "name one column or more"),
        (int, {"key": "id"}, "takes a Struct, a dataclass or a TypedDict, not int"),
        (Times, {"key": "amount"}, "'amount' is a field of decimal"),
    ],
)
def test_a_type_without_such_rows(type_: Any, options: dict[str, Any], problem: str) -> None:
    """The message names the field."""
    with pytest.raises(GraphError, match=problem):
        DebeziumCodec(type_, **options)


def test_what_cannot_be_written_is_refused_with_the_graph() -> None:
    """A stream of no changes, and a field without a schema; the same type can be read."""
    pipeline = Pipeline("p")
    names = pipeline.source("in", KafkaSource("in", value=Name))
    names.sink("out", KafkaSink("out", value=DebeziumCodec(Name, "id")))
    codec = DebeziumCodec(Times, "id", registry=REGISTRY)
    pipeline.source("times", KafkaSource("times", value=codec)).sink("copy", KafkaSink("copy", value=codec))
    with pytest.raises(GraphError) as error:
        pipeline.build()
    assert "value= writes changes, and the stream is of Name" in str(error.value)
    assert "value=: field 'seen': it has values of no one type" in str(error.value)
    bare = DebeziumCodec(Times, "id").writing_problems()
    assert [problem.split(":")[1] for problem in bare] == [" field 'at'", " field 'amount'"]


@pytest.mark.parametrize(
    "number", ["-1234.50", "0", "-128", "128", "255.5", "1E+3", "-1E-30", "12345678901234567890.12"]
)
def test_decimals_are_exact(number: str) -> None:
    """Their bytes have a sign; no digit is lost."""
    codec = DebeziumCodec(Amount, "id", schemas=True)
    row = Amount(1, Decimal(number))
    assert codec.decode(codec.encode(Change("insert", 1, row, None, "amounts", 1, 2))).after == row


def test_a_topic_of_whole_changes_is_not_compacted() -> None:
    """It would lose what bounded work reads; a topic of rows is compacted."""
    assert gives_newest_rows(KafkaSink("out"), Change[Name])
    assert not gives_newest_rows(KafkaSink("out", value=DebeziumCodec(Name, "id")), Change[Name])


# --- in a pipeline ----------------------------------------------------------------------------------------------------


def test_a_pipeline_on_either_side_of_debezium() -> None:
    """Tombstones are left out without a count, before and after a kill, and come again after each delete."""
    texts = [
        (part["payload"] and json.dumps(part["payload"]), json.dumps(part["key"])) for part in recorded("customers")
    ]
    messages = [Record(value and value.encode(), key.encode()) for value, key in texts]

    def copy_of() -> Pipeline:
        pipeline = Pipeline("copy")
        changes = pipeline.source("in", KafkaSource("in", value=DebeziumCodec(Name, "id")))
        changes.sink("out", KafkaSink("out", value=DebeziumCodec(Name, "id")))
        return pipeline

    def is_whole(values: list[Any]) -> None:
        assert sorted((value and f"{value.op} {value.key}") or "tombstone" for value in values) == [
            "delete 1", "delete 3", "insert 3", "insert 4", "read 1", "tombstone", "tombstone", "truncate None",
            "update 2",
        ]  # fmt: skip

    assert_exactly_once(copy_of, {"in": messages}, {"out": is_whole}, parallelism=1, crashes_max=4)


class Visit(msgspec.Struct):
    id: int
    at_ms: int


def test_a_table_of_debeziums_changes() -> None:
    """`as_of` finds the row at a record's time in a topic of changes, and none once it is deleted."""
    messages = [part["payload"] for part in recorded("customers") if part["payload"] and part["payload"]["op"] != "t"]
    for place, message in enumerate(messages):
        message["source"]["ts_ms"] = 1000 * (place + 1)
    visits = [Visit(1, 1500), Visit(3, 1500), Visit(3, 2500), Visit(2, 3500), Visit(1, 4500), Visit(3, 9000)]

    def greeted() -> Pipeline:
        pipeline = Pipeline("greeted")
        source = KafkaSource("names", value=DebeziumCodec(Name, "id"), time="timestamp_ms")
        names = pipeline.table("names", source)
        keyed = pipeline.source("visits", KafkaSource("visits", value=Visit, time="at_ms")).key_by(lambda v: v.id)
        keyed.as_of("greeting", names).map(text, output=str).sink("out", KafkaSink("greetings"))
        return pipeline

    def text(joined: Joined[int, Visit, Name | None]) -> str:
        return f"{joined.key} at {joined.left.at_ms}: {joined.right and joined.right.name}"

    wanted = [
        "1 at 1500: ann", "1 at 4500: None", "2 at 3500: bob", "3 at 1500: None", "3 at 2500: cid", "3 at 9000: None",
    ]  # fmt: skip
    inputs: dict[str, list[Any]] = {
        "names": [Record(json.dumps(message).encode()) for message in messages],
        "visits": visits,
    }
    assert_exactly_once(greeted, inputs, {"out": wanted}, parallelism=1, crashes_max=2)
