"""Records as Arrow batches and back: each value as it was, and each difference in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.pipeline.arrow import ArrowDecoder, ArrowEncoder, BatchMismatch, record_type
from exactlyonce.pipeline.columns import columns_or_value
from exactlyonce.pipeline.shape import UnsupportedType


class Colour(Enum):
    RED = "red"


class Part(NamedTuple):
    article: str
    pieces: int


class Note(TypedDict, total=False):
    text: str


class Inner(msgspec.Struct, array_like=True, tag="inner"):
    part: Part
    by_name: dict[str, list[Part]]


class Everything(msgspec.Struct, kw_only=True, rename="camel", tag="all"):
    flag: bool
    a_number: int
    real: float
    text: str
    raw: bytes
    changed: bytearray
    price: Decimal
    at: datetime
    local: Annotated[datetime, msgspec.Meta(tz=False)]
    day: date
    clock: time
    id: UUID
    colour: Colour
    kind: Literal["a", "b"]
    maybe: int | None
    either: int | float
    tags: list[str | None]
    parts: tuple[Part, ...]
    colours: set[Colour]
    inner: Inner
    note: Note


ALL = Everything(
    flag=True, a_number=2**62, real=1.5, text="ü", raw=b"\x00", changed=bytearray(b"x"), price=Decimal("-1.5"),
    at=datetime(2026, 11, 22, 1, tzinfo=timezone.utc), local=datetime(2026, 11, 22, 1, 2, 3, 4), day=date(2026, 11, 22),
    clock=time(1, 2, 3, 4), id=UUID(int=1), colour=Colour.RED, kind="b", maybe=None, either=3.5, tags=["x", None],
    parts=(Part("nut", 2),), colours={Colour.RED}, inner=Inner(Part("n", 1), {"k": [Part("m", 3)]}), note=Note(),
)  # fmt: skip


class Struct(msgspec.Struct):
    text: str
    number: int
    real: float
    maybe: str | None


@dataclass
class Data:
    text: str
    number: int
    real: float
    maybe: str | None


class Named(NamedTuple):
    text: str
    number: int
    real: float
    maybe: str | None


class Typed(TypedDict):
    text: str
    number: int
    real: float
    maybe: str | None


class Optional(TypedDict, total=False):
    text: str
    number: int
    real: float
    maybe: str | None


class Bounded(msgspec.Struct):
    number: Annotated[int, msgspec.Meta(ge=0)]


def encoded(type_: Any, *records: Any) -> Any:
    return ArrowEncoder(columns_or_value(type_)).encode(records)


def back(type_: Any, *records: Any) -> list[Any]:
    """*records* after a way through Arrow, in a batch and in one of slices of chunks."""
    batch, decoder = encoded(type_, *records), ArrowDecoder(type_)
    decoded = decoder.decode(batch, len(records))
    assert decoded.rows is None
    table = pa.Table.from_batches([batch, batch]).slice(1, len(records))
    again = decoder.decode(table, len(records)).records
    assert again == [*decoded.records, *decoded.records][1 : len(records) + 1]
    return decoded.records


def test_every_type_comes_back() -> None:
    """A datetime is in UTC then, and written as one."""
    (record,) = back(Everything, ALL)
    assert record == ALL
    assert msgspec.json.encode(record) == msgspec.json.encode(ALL)
    at = datetime(2026, 11, 22, 1, tzinfo=timezone(timedelta(hours=2)))
    (moved,) = back(datetime, at)
    assert (moved, moved.utcoffset(), msgspec.json.encode(moved)) == (at, timedelta(0), b'"2026-11-21T23:00:00Z"')


ROW = st.tuples(st.text(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.none() | st.text())


@given(st.lists(ROW))
@pytest.mark.parametrize("type_", [Struct, Data, Named, Typed, Optional])
def test_records_of_every_kind_come_back(type_: Any, rows: list[tuple[Any, ...]]) -> None:
    names = ("text", "number", "real", "maybe")
    records = [type_(**dict(zip(names, row, strict=True))) for row in rows]
    assert back(type_, *records) == records


def test_a_field_that_is_absent_remains_absent() -> None:
    """But for one that may be None, which is None then."""
    assert back(Optional, Optional(number=1), Optional()) == [Optional(number=1, maybe=None), Optional(maybe=None)]


@pytest.mark.parametrize(
    ("type_", "values"),
    [(int, [1, -2]), (str, ["", "ä", "b"]), (int | None, [None, 1]), (UUID, [UUID(int=7)]), (list[int], [[1], []]),
     (dict[str, int], [{"a": 1}]), (Colour, [Colour.RED])],
)  # fmt: skip
def test_values_without_fields_are_one_column(type_: Any, values: list[Any]) -> None:
    assert encoded(type_, *values).schema.names == ["value"]
    assert back(type_, *values) == values


def test_a_record_that_is_not_of_its_type_is_no_column() -> None:
    made: Any = Struct
    with pytest.raises(ValueError, match="number: a number is larger than 64 bits"):
        encoded(Struct, made("", 2**64, 1.0, None))
    with pytest.raises(ValueError, match="text: None, which the type does not admit"):
        encoded(Struct, made(None, 1, 1.0, None))
    with pytest.raises(TypeError, match="number: '1' is str, not int"):
        encoded(Struct, made("", "1", 1.0, None))


# --- batches of a function --------------------------------------------------------------------------------------------

GIVEN = {"text": ["a", "b"], "number": [1, 2], "real": [0.5, 1.5], "maybe": [None, "x"]}
RECORDS = [Struct("a", 1, 0.5, None), Struct("b", 2, 1.5, "x")]


def batch_of(**columns: Any) -> Any:
    return pa.record_batch({**GIVEN, **columns})


@pytest.mark.parametrize(
    "columns",
    [
        {"number": pa.array([1, 2], pa.uint8())},
        {"text": pa.array(["a", "b"], pa.large_string()), "maybe": pa.array([None, "x"]).dictionary_encode()},
        {"real": pa.array([0.5, 1.5], pa.float32())},
        {"text": pa.array(["a", "b"], pa.string_view())},
    ],
)
def test_another_arrow_type_with_the_same_values_will_do(columns: dict[str, Any]) -> None:
    """As Polars, pandas and NumPy give them; the order of columns does not matter, either."""
    batch = batch_of(**columns)
    assert ArrowDecoder(Struct).decode(batch.select([*reversed(batch.schema.names)]), 2).records == RECORDS


def test_an_int_is_a_float_and_a_column_of_nothing_may_be_of_any_type() -> None:
    decoded = ArrowDecoder(Struct).decode(batch_of(real=[1, 2], maybe=pa.nulls(2)), 2)
    assert decoded.records == [Struct("a", 1, 1.0, None), Struct("b", 2, 2.0, None)]


def test_tables_and_data_frames_are_read() -> None:
    pd: Any = pytest.importorskip("pandas")
    decoder = ArrowDecoder(Struct)
    assert decoder.decode(pa.table(GIVEN), 2).records == RECORDS
    assert decoder.decode(pd.DataFrame(GIVEN), 2).records == RECORDS
    assert decoder.decode(pa.table(GIVEN).slice(0, 0), 0).records == []


MISFITS: dict[str, Callable[[], Any]] = {
    "rows: 2 given, 1 returned, without a column `row` that names the record each is of": lambda: batch_of().slice(1),
    "column `real`: double wanted, string given": lambda: batch_of(real=["0.5", "1.5"]),
    "column `number`: int64 wanted, double given": lambda: batch_of(number=[1.0, 2.0]),
    "column `maybe`: string wanted, none given": lambda: batch_of().select(["text", "number", "real"]),
    "column `more`: none wanted, int64 given": lambda: batch_of(more=[1, 2]),
    "column `text`: no null wanted, 1 given": lambda: batch_of(text=["a", None]),
    "column `number`: given 2 times": lambda: batch_of().append_column("number", pa.array([1, 2])),
    "column `row`: int64 wanted, double given": lambda: batch_of(row=[0.0, 1.0]),
    "column `row`: int64 wanted, null given": lambda: batch_of(row=[0, None]),
    "column `row`: 0 to 1 wanted, 2 given": lambda: batch_of(row=[0, 2]),
    "column `row`: the order of the records wanted, 0 after 1 given": lambda: batch_of(row=[1, 0]),
    "a pyarrow.RecordBatch wanted, dict given": lambda: GIVEN,
    "a pyarrow.RecordBatch wanted, NoneType given": lambda: None,
}


@pytest.mark.parametrize("difference", MISFITS)
def test_a_difference_is_told_in_words(difference: str) -> None:
    with pytest.raises(BatchMismatch) as raised:
        ArrowDecoder(Struct).decode(MISFITS[difference](), 2)
    assert str(raised.value) == difference


def test_all_differences_are_told_at_once_and_in_order() -> None:
    batch = pa.record_batch({"z": [1], "number": ["1"], "y": [1.5], "real": [0.5], "maybe": ["m"]})
    with pytest.raises(BatchMismatch) as raised:
        ArrowDecoder(Struct).decode(batch, 2)
    assert str(raised.value).split("; ") == [
        "rows: 2 given, 1 returned, without a column `row` that names the record each is of",
        "column `text`: string wanted, none given", "column `number`: int64 wanted, string given",
        "column `z`: none wanted, int64 given", "column `y`: none wanted, double given",
    ]  # fmt: skip


def test_no_value_is_rounded_or_cut() -> None:
    with pytest.raises(BatchMismatch, match=r"column `number`: int64 wanted, uint64 given: .*not in range"):
        ArrowDecoder(Struct).decode(batch_of(number=pa.array([1, 2**63], pa.uint64())), 2)
    moment = pa.array([1_000_001], pa.timestamp("ns", "UTC"))
    with pytest.raises(
        BatchMismatch, match=r"timestamp\[us, tz=UTC\] wanted, timestamp\[ns, tz=UTC\] given: .*lose data"
    ):
        ArrowDecoder(datetime).decode(pa.record_batch({"value": moment}), 1)
    with pytest.raises(BatchMismatch, match=r"timestamp\[us, tz=UTC\] wanted, timestamp\[us\] given"):
        ArrowDecoder(datetime).decode(pa.record_batch({"value": pa.array([1], pa.timestamp("us"))}), 1)
    narrow = ArrowDecoder(record_type(schema := pa.schema([("value", pa.float32())])), schema)
    with pytest.raises(BatchMismatch, match="column `value`: float wanted, double given"):
        narrow.decode(pa.record_batch({"value": [0.1]}), 1)


def test_a_value_outside_of_its_bounds_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int` >= 0"):
        ArrowDecoder(Bounded).decode(pa.record_batch({"number": [1, -1]}), 2)


def test_rows_stem_from_records_that_a_column_names() -> None:
    batch = pa.record_batch({"value": ["a", "b", "c"], "row": pa.array([0, 2, 2], pa.uint32())})
    assert ArrowDecoder(str).decode(batch, 3) == (["a", "b", "c"], [0, 2, 2])
    assert ArrowDecoder(str).decode(batch.slice(0, 0), 3) == ([], [])
    assert ArrowDecoder(str).decode(pa.record_batch({"value": [], "row": []}), 3) == ([], [])


# --- schemas ----------------------------------------------------------------------------------------------------------


def test_a_schema_is_a_type_of_dicts() -> None:
    """With the types of Arrow as they are: a number that is too large for its column is refused."""
    inner = pa.struct([("x y", pa.large_string()), ("n", pa.int8())])
    fields = [
        pa.field("id", pa.int32(), nullable=False), ("at", pa.timestamp("ms", "Europe/Berlin")),
        ("list", pa.list_(inner)), ("map", pa.map_(pa.string(), pa.float32())), ("raw", pa.binary(2)),
        ("price", pa.decimal128(5, 2)), ("day", pa.date64()),
        ("clock", pa.time32("s")), ("local", pa.timestamp("us")), ("flag", pa.bool_()),
    ]  # fmt: skip
    schema = pa.schema(fields)
    type_ = record_type(schema)
    rows = [
        {"id": 1, "at": datetime(2026, 1, 1, tzinfo=timezone.utc), "list": [{"x y": "t", "n": None}, None],
         "map": {"a": 0.5}, "raw": b"ab", "price": Decimal("1.25"), "day": date(2026, 1, 1), "clock": time(1),
         "local": datetime(2026, 1, 1), "flag": True},
        dict.fromkeys(schema.names) | {"id": 2},
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(rows, schema)
    assert ArrowDecoder(type_, schema).decode(batch, 2).records == rows
    kept = msgspec.msgpack.Decoder(type_)
    assert [kept.decode(msgspec.msgpack.encode(row)) for row in rows] == rows
    large = batch.set_column(0, "id", pa.array([1, 2**40]))
    with pytest.raises(BatchMismatch, match=r"column `id`: int32 wanted, int64 given: .*not in range"):
        ArrowDecoder(type_, schema).decode(large, 2)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (pa.schema([]), "the schema has no columns"),
        (pa.schema([("a", pa.int64()), ("a", pa.int64())]), "two columns of the schema are named 'a': rename one"),
        (pa.schema([("a", pa.list_(pa.duration("s")))]), r"column 'a \(item\)' is duration\[s\], .*: use another type"),
        (pa.schema([("a", pa.struct([("b", pa.timestamp("ns"))]))]), r"column 'a.b' is timestamp\[ns\], .*: use micro"),
    ],
)
def test_a_schema_that_no_record_has_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(UnsupportedType, match=problem):
        record_type(schema)
