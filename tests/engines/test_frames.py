"""DataFrames that become state: what a read of state shows of a type is the state that was read."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from exactlyonce.engines.savepoints.frames import rows_of
from exactlyonce.pipeline.shape import describe

sql = pytest.importorskip("pyspark.sql.types")


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Place(NamedTuple):
    country: str
    number: int


class Line(msgspec.Struct, omit_defaults=True):
    price: Decimal
    count: int = 1
    note: str | None = None
    at: dt.datetime | None = None


class Tree(msgspec.Struct):
    name: str
    branches: list[Tree] = []


class Frame:
    """A DataFrame with the *rows* of a schema, whose times are local ones, as PySpark gives them."""

    def __init__(self, schema: Any, rows: list[dict[str, Any]]) -> None:
        self.schema, self.columns, self._rows = schema, schema.names, rows

    def toLocalIterator(self, prefetchPartitions: bool) -> Iterator[Any]:
        assert not prefetchPartitions, "rows of one partition are enough in memory"
        return (_of_spark(self.schema, row) for row in self._rows)


def _of_spark(type_: Any, value: Any) -> Any:
    if value is None:
        return None
    match type_.typeName():
        case "struct":
            items = [_of_spark(field.dataType, value.get(field.name)) for field in type_.fields]
            return sql.Row(*type_.names)(*items)
        case "array":
            return [_of_spark(type_.elementType, item) for item in value]
        case "map":
            return {_of_spark(type_.keyType, key): _of_spark(type_.valueType, item) for key, item in value}
        case "timestamp":
            return value.astimezone().replace(tzinfo=None)
        case "decimal":
            return value.quantize(Decimal(1).scaleb(-type_.scale), context=Context(prec=38))
    return value


MOMENT = dt.datetime(2026, 10, 25, 0, 30, tzinfo=dt.timezone.utc)
STATES: list[tuple[Any, Any]] = [
    (int, 7), (float, 0.5), (bool, True), (str, "\"7\""), (bytes, b"\x00"), (int | None, 7),
    (dt.datetime, MOMENT), (dt.date, MOMENT.date()), (dt.timedelta, dt.timedelta(days=2, microseconds=1)),
    (dt.time, dt.time(1, 2)), (uuid.UUID, uuid.UUID(int=7)), (Decimal, Decimal("2.5")), (Decimal, Decimal("1200")),
    (Size, Size.LARGE), (Literal["a", "b"], "b"), (Literal["a", 1], 1),
    (tuple[str, dt.datetime], ("ann", MOMENT)), (tuple[int, ...], (1, 2)), (set[str], {"a"}),
    (dict[str, int], {"a": 1}), (dict[Place, int], {Place("no", 1): 2}), (dict[tuple[str, int], int], {("a", 1): 2}),
    (list[Place], [Place("no", 1)]), (dict[int, list[Line]], {1: [Line(Decimal("0.1"))]}),
    (Line, Line(Decimal("0.1"))), (Line, Line(Decimal(3), 2, "x", MOMENT)), (Place, Place("no", 1)),
    (Tree, Tree("a", [Tree("b")])), (str | int, "7"), (str | int, 7), (list[str | int], ["7", 7]), (int | float, 1.5),
    (Any, {"a": [1, "7", None]}), (Any, "7"), (dict[str, Any], {"a": "7", "b": [7]}),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "state"), STATES, ids=str)
def test_a_state_that_was_read_is_the_same(type_: Any, state: Any) -> None:
    """And so is a key, whose type is known; then there are no nulls."""
    from exactlyonce.engines.spark.source.spark_types import column

    made = column(describe(type_))
    shown = made.value(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
    schema = sql.StructType([sql.StructField(name, made.type) for name in ("key", "value")])
    schema = schema.add("key_group", sql.IntegerType()).add("checkpoint", sql.LongType())
    frame = Frame(schema, [{"key": shown, "value": shown, "key_group": 0, "checkpoint": 7}])
    (row,) = rows_of(frame, type_, type_)
    assert msgspec.convert(row["state"], type_) == state
    assert type_ is Any or msgspec.convert(row["key"], type_) == state


def test_other_columns_are_as_they_are() -> None:
    """Text is no JSON; a field that is a column of its own has its type; keys of no known type stay."""
    schema = (
        sql.StructType().add("key", sql.StringType()).add("price", sql.DecimalType(9, 3)).add("at", sql.TimestampType())
    )
    (row,) = rows_of(Frame(schema, [{"key": "7", "price": Decimal("1.5"), "at": MOMENT}]), Any, Line)
    assert row == {"key": "7", "price": Decimal("1.5"), "at": MOMENT}
    assert row["at"].tzinfo is dt.timezone.utc
    text = sql.StructType().add("key", sql.StringType()).add("state", sql.StringType())
    assert [*rows_of(Frame(text, [{"key": "a", "state": "7"}]), str, str | int)] == [{"key": "a", "state": "7"}]
    for names in (["key", "value", "key_group", "checkpoint"], ["key_group", "key", "value"]):
        read = sql.StructType([sql.StructField(name, sql.StringType()) for name in names])
        (row,) = rows_of(Frame(read, [dict.fromkeys(names, "7")]), Any, Any)
        assert (row["key"], row["state"]) == ("7", 7)


def test_a_decimal_of_all_digits_is_not_rounded() -> None:
    """Not to the digits of Python's usual context, either."""
    number = Decimal("12345678901234567890.123456789012345678")
    schema = sql.StructType().add("key", sql.DecimalType(38, 18)).add("state", sql.StringType())
    (row,) = rows_of(Frame(schema, [{"key": number, "state": "a"}]), Any, Any)
    assert row["key"] == number
