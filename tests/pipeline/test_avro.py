"""Avro, with and without a schema id."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from datetime import date, datetime, time, timezone
from io import BytesIO
from typing import Annotated, Any, TypedDict
from uuid import UUID

import fastavro
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.pipeline.avro import AvroCodec, avro_schema
from exactlyonce.pipeline.registry import PublishedSchema
from exactlyonce.pipeline.shape import UnsupportedType


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    sku: str
    count: int = 1


class Note(TypedDict):
    text: str


class Order(msgspec.Struct, rename="camel"):
    id: int
    total_sum: float
    lines: list[Line]
    colour: Colour
    key: UUID
    day: date
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    clock: time
    raw: bytes
    paid: bool
    counts: dict[str, int]
    note: Note | None = None
    parent: Order | None = None


orders: st.SearchStrategy[Order] = st.builds(
    Order, id=st.integers(-(2**63), 2**63 - 1), total_sum=st.floats(allow_nan=False),
    lines=st.lists(st.builds(Line, st.text(), st.integers(0, 9)), max_size=3),
    at=st.datetimes(timezones=st.just(timezone.utc)), clock=st.times(),
    counts=st.dictionaries(st.text(), st.integers(0, 9), max_size=3),
    note=st.none() | st.fixed_dictionaries({"text": st.text()}), parent=st.none(),
)  # fmt: skip


@given(orders, st.none() | orders, st.none() | st.integers(0, 2**32 - 1))
def test_avro_gives_back_every_type(order: Order, parent: Order | None, schema_id: int | None) -> None:
    codec = AvroCodec(Order, schema_id=schema_id)
    order.parent = parent
    assert codec.decode(codec.encode(order)) == order


def test_other_readers_of_avro_read_it() -> None:
    codec = AvroCodec(Line)
    data = codec.encode(Line("a", 2))
    assert fastavro.schemaless_reader(BytesIO(data), codec.describe()["schema"], None) == {"sku": "a", "count": 2}


def test_defaults_and_names_are_in_the_schema() -> None:
    fields = {field["name"]: field for field in avro_schema(Order)["fields"]}
    assert fields["totalSum"]["type"] == "double"
    assert fields["parent"] == {"name": "parent", "type": ["null", "Order"], "default": None}


def test_a_schema_can_be_given() -> None:
    """The type only says what to make of a value that is read with a schema."""
    schema = {"type": "record", "name": "Other", "fields": [{"name": "sku", "type": "string"}]}
    assert AvroCodec(Line, schema).decode(AvroCodec(Line, schema).encode(Line("a", 5))) == Line("a", 1)


@pytest.mark.parametrize("cut", [b"", b"\x02", b"\x02a\x04\x00"], ids=["empty", "short", "long"])
def test_bytes_that_do_not_fit_are_refused(cut: bytes) -> None:
    with pytest.raises(ValueError, match=r"do not fit the schema|left over"):
        AvroCodec(Line).decode(cut)


def test_another_schema_id_is_refused() -> None:
    data = AvroCodec(Line, schema_id=8).encode(Line("a"))
    with pytest.raises(ValueError, match="schema id 7"):
        AvroCodec(Line, schema_id=7).decode(data)


@pytest.mark.parametrize(
    ("type_", "why"),
    [
        (datetime, "time zone"), (tuple[int, str], "tuple"), (dict[int, int], "dict"), (Any, "any"),
        (complex, "complex could"),
    ],
)  # fmt: skip
def test_types_without_one_avro_form_are_refused(type_: Any, why: str) -> None:
    with pytest.raises(UnsupportedType, match=why):
        AvroCodec(type_)


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"type": {"type": "long"}}, {"type": "array"}, {"type": object()}, {"type": 1 << 70}],
)
def test_a_wrong_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedType, match="schema is wrong"):
        AvroCodec(Line, schema)


def test_a_codec_has_a_schema_of_its_own() -> None:
    symbols = ["A", "B"]
    schema = {"type": "array", "items": {"type": "enum", "name": "E", "symbols": symbols, "aliases": ("F",)}}
    codec = AvroCodec(list[str], schema)
    symbols.remove("B")
    assert codec.schema["items"] == {"type": "enum", "name": "E", "symbols": ["A", "B"], "aliases": ["F"]}


class Cart(msgspec.Struct):
    items: Any
    sizes: Any = None


def test_defaults_are_filled_in_anew() -> None:
    old = {"type": "record", "name": "Cart", "fields": []}
    items = {"name": "items", "type": {"type": "map", "values": "double"}, "default": {"a": 1}}
    sizes = {"name": "sizes", "type": {"type": "array", "items": "long"}, "default": []}
    codec = AvroCodec(Cart, {"type": "record", "name": "Cart", "fields": [items, sizes]})
    read = codec.decoder_of(PublishedSchema("AVRO", json.dumps(old)))
    first = read(b"")
    assert type(first.items["a"]) is float
    first.items["b"] = 2.0
    first.sizes.append(3)
    assert read(b"") == Cart({"a": 1.0}, [])
    assert codec.schema["fields"] == [items, sizes]


class Paths(msgspec.Struct):
    either: tuple[str, ...] | str | None
    inner: list[tuple[int, ...] | None]


@pytest.mark.parametrize("either", [("a",), ("string", "b"), ("array", "b"), ("a", "b", "c"), "a", None])
def test_tuples_in_unions(either: tuple[str, ...] | str | None) -> None:
    codec, value = AvroCodec(Paths), Paths(either, [(1, 2), None, ()])
    assert codec.decode(codec.encode(value)) == value


class Counted(msgspec.Struct):
    number: int
    more: dict[str, int] | None = None


@pytest.mark.parametrize("narrow", ["number", "more"])
@pytest.mark.parametrize("number", [-(2**31), 2**31 - 1, -(2**31) - 1, 2**31, 2**40])
def test_an_int_of_a_schema_has_32_bits(narrow: str, number: int) -> None:
    """fastavro writes more, which other readers of Avro refuse, or cut."""
    first: Any = {"name": "number", "type": "int"}
    both: Any = [first, {"name": "more", "type": ["null", {"type": "map", "values": "int"}]}]
    codec = AvroCodec(Counted, {"type": "record", "name": "Counted", "fields": both})
    plain = AvroCodec(Plain, {"type": "record", "name": "Plain", "fields": [first]})
    value = Counted(number) if narrow == "number" else Counted(1, {"a": number})
    values: list[tuple[AvroCodec[Any], Any]] = [(codec, value), (plain, Plain(number))]
    for each, record in values:
        if -(2**31) <= number < 2**31:
            assert each.decode(each.encode(record)) == record
            continue
        with pytest.raises(ValueError, match=str(number)):
            each.encode(record)


class Plain(msgspec.Struct):
    number: int


@pytest.mark.parametrize("wrong", [[], "", 5, None])
def test_a_value_of_another_kind_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        AvroCodec(Line).encode(wrong)


class Reading(msgspec.Struct):
    """A plain record, with each kind of field."""

    number: int
    place: str
    raw: bytes
    on: bool
    level: float
    note: str | None = None
    count: int | None = None


class Labelled(msgspec.Struct, kw_only=True, rename="camel"):
    small_number: int
    label: str = ""


class Checked(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number == 13:
            raise ValueError("13 is no number")


LONGS = (
    st.integers(-(2**63), 2**63 - 1)
    | st.integers(-300, 300)
    | st.sampled_from([2**k + d for k in range(6, 63) for d in (-1, 0, 1)])
)
READINGS = st.builds(
    Reading, LONGS, st.text() | st.text(min_size=70, max_size=90), st.binary(), st.booleans(),
    st.floats(allow_nan=False), st.none() | st.text(), st.none() | LONGS,
)  # fmt: skip


def by_fastavro(codec: AvroCodec[Any], data: bytes) -> Any:
    """The value, or the kind of the error."""
    source = BytesIO(data)
    try:
        value = msgspec.convert(fastavro.schemaless_reader(source, fastavro.parse_schema(codec.schema)), codec.type)
    except Exception:
        return ValueError
    return ValueError if source.read(1) else value


def decoded(codec: AvroCodec[Any], data: bytes) -> Any:
    try:
        return codec.decode(data)
    except ValueError:
        return ValueError


@given(READINGS, st.data())
def test_plain_records_are_as_fastavro_has_them(reading: Reading, data: st.DataObject) -> None:
    """Whole bytes, cut ones, and ones with a byte of another value."""
    codec = AvroCodec(Reading)
    written = BytesIO()
    fastavro.schemaless_writer(
        written, fastavro.parse_schema(codec.schema), msgspec.to_builtins(reading, builtin_types=(bytes,))
    )
    assert codec.encode(reading) == written.getvalue()
    assert codec.decode(written.getvalue()) == reading
    changed = bytearray(written.getvalue())
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    assert repr(decoded(codec, bytes(changed))) == repr(by_fastavro(codec, bytes(changed)))  # there may be a NaN
    cut = written.getvalue()[: data.draw(st.integers(0, len(changed) - 1))]
    assert decoded(codec, cut) == by_fastavro(codec, cut)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_fastavro_reads_them(data: bytes) -> None:
    codec = AvroCodec(Reading)
    assert repr(decoded(codec, data)) == repr(by_fastavro(codec, data))


def test_a_plain_record_needs_no_fastavro(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would compare fastavro with itself."""
    codecs: list[AvroCodec[Any]] = [
        AvroCodec(Reading),
        AvroCodec(Reading, schema_id=7),
        AvroCodec(Labelled),
        AvroCodec(Checked),
    ]
    values = [
        Reading(1, "é", b"x", True, 0.5),
        Reading(2, "", b"", False, -1.0, "n", 3),
        Labelled(small_number=5),
        Checked(6),
    ]
    for name in ("schemaless_reader", "schemaless_writer"):
        monkeypatch.setattr(fastavro, name, lambda *arguments, **options: pytest.fail("fastavro was asked"))
    for codec, value in zip(codecs, values, strict=True):
        assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize(
    "wrong",
    [
        Reading(2**63, "", b"", True, 0.0), Reading("1", "", b"", True, 0.0),  # type: ignore[arg-type]  # on purpose
        Reading(1, "\ud800", b"", True, 0.0), Reading(1, None, b"", True, 0.0),  # type: ignore[arg-type]  # on purpose
    ],
)  # fmt: skip
def test_a_plain_record_that_does_not_fit_is_refused(wrong: Reading) -> None:
    with pytest.raises((TypeError, ValueError)):
        AvroCodec(Reading).encode(wrong)


def test_checks_of_a_record_hold() -> None:
    with pytest.raises(msgspec.ValidationError, match="13 is no number"):
        AvroCodec(Checked).decode(b"\x1a")
