"""Columns of Parquet files, read by pyarrow as any reader does."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest

from exactlyonce.pipeline.columns import columns_of
from exactlyonce.pipeline.shape import UnsupportedType
from exactlyonce.sinks.files.parquet import Parquet
from exactlyonce.testing.sink_contract.hooks import ORIGIN


def read(folder: Any, **options: Any) -> Any:
    import pyarrow.dataset  # imports pandas, which takes a second of every process that only collects

    return pyarrow.dataset.dataset(folder, **options).to_table()


class Colour(Enum):
    RED = "red"


class Line(NamedTuple):
    article: str
    pieces: int


AnyLine: Any = Line
"""A line with values that its type does not admit."""


class EncodedPart(TypedDict, total=False):
    name: str


@dataclass
class Everything:
    flag: bool
    number: int
    real: float
    text: str
    raw: bytes
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
    tags: list[str]
    lines: tuple[Line, ...]
    by_name: dict[str, list[int]]
    part: EncodedPart | None = None
    colours: set[Colour] = field(default_factory=set)


ROW = Everything(
    True, 2**62, 1.5, "ü", b"\x00", Decimal("-1.5"), datetime(2026, 11, 22, 1, tzinfo=timezone(timedelta(hours=2))),
    datetime(2026, 11, 22, 1, 2, 3, 4), date(2026, 11, 22), time(1, 2, 3, 4), UUID(int=1), Colour.RED, "b", None, 3,
    ["x"], (Line("nut", 2),), {"k": [1, 2]}, EncodedPart(), {Colour.RED},
)  # fmt: skip


def test_every_type_comes_back(make_target, stage) -> None:
    target = make_target(Everything, format="parquet")
    committable = stage(target.open() if target.led() else None, 1, [ROW]).staged.committable
    target.committer().commit([committable], 1, ORIGIN)
    table = read(target.folder)
    (row,) = table.to_pylist()
    assert row == {
        "flag": True, "number": 2**62, "real": 1.5, "text": "ü", "raw": b"\x00", "price": Decimal("-1.5"),
        "at": datetime(2026, 11, 21, 23, tzinfo=timezone.utc), "local": datetime(2026, 11, 22, 1, 2, 3, 4),
        "day": date(2026, 11, 22), "clock": time(1, 2, 3, 4), "id": str(UUID(int=1)), "colour": "red", "kind": "b",
        "maybe": None, "either": 3.0, "tags": ["x"], "lines": [{"article": "nut", "pieces": 2}],
        "by_name": [("k", [1, 2])], "part": {"name": None}, "colours": ["red"],
    }  # fmt: skip
    assert {name: str(table.schema.field(name).type) for name in ("price", "at", "local")} == {
        "price": "decimal128(38, 18)", "at": "timestamp[us, tz=UTC]", "local": "timestamp[us]",
    }  # fmt: skip
    assert [field.nullable for field in table.schema][:14] == [False] * 13 + [True]


def test_readers_see_partitions_as_columns(make_target, stage) -> None:
    target = make_target(Line, format="parquet", partition_by=("article",))
    target.led()
    records = [Line(name, count) for count, name in enumerate(["a/b", "ü %", "x=1", "a/b"])]
    target.committer().commit([stage(target.open(), 1, records).staged.committable], 1, ORIGIN)
    target.staged(2, records)
    found = read(target.folder, partitioning="hive").to_pylist()
    assert sorted((row["pieces"], row["article"]) for row in found) == [(0, "a/b"), (1, "ü %"), (2, "x=1"), (3, "a/b")]


@pytest.mark.parametrize(
    ("type_", "value", "reason"),
    [
        (int, 2**63, "larger than 64 bits"),
        (int, "1", "'1' is str, not int"),
        (int, None, "None"),
        (str, "\ud800", "surrogates not allowed"),
        (Decimal, Decimal("1e-19"), "data loss"),
        (Decimal, Decimal("NaN"), "NaN"),
        (datetime, datetime(2026, 1, 1), "has no time zone: give it one"),
        (Annotated[datetime, msgspec.Meta(tz=False)], datetime(2026, 1, 1, tzinfo=timezone.utc), "has a time zone"),
        (time, time(1, tzinfo=timezone.utc), "has a time zone"),
        (date, datetime(2026, 1, 1), "not date"),
        (list[int], ["x"], "'x' is str, not int"),
        (list[str], "text", "'text' is str, not a list"),
        (list[int], [1, None], "None is in it, which the type does not admit"),
        (list[list[int] | None], [None, [None]], "None is in it"),
        (dict[str, int], {"a": 1, "b": None}, "None is in it"),
        (list[Line], [None], "None is in it"),
        (list[date], [datetime(2026, 1, 1, 12)], "is datetime, not date"),
        (list[float], [True], "True is bool, not float"),
        (list[float], [2**53 + 1], "9007199254740993 is no float"),
        (list[bool], [1], "1 is int, not bool"),
        (dict[str, float], {"a": True}, "True is bool, not float"),
        (Line, AnyLine("nut", None), "pieces: None, which the type does not admit"),
        (list[Line], [AnyLine("nut", "2")], "pieces: '2' is str, not int"),
        (dict[str, Line], {"a": AnyLine(None, 2)}, "article: None, which the type does not admit"),
        (Line, object(), "has no attribute 'article'"),
        (dict[str, int], {"a": 2**64}, "larger than 64 bits"),
    ],
)
def test_a_value_that_does_not_fit_is_the_records_fault(type_: Any, value: Any, reason: str) -> None:
    record = msgspec.defstruct("Made", [("it", type_)])
    with pytest.raises((ValueError, TypeError), match=rf"^it: .*{reason}"):
        Parquet(columns_of(record)).encode([[record(value)]])


class Loop(msgspec.Struct):
    next: Loop | None


@pytest.mark.parametrize(
    ("type_", "reason"),
    [
        (int | str, "it has values of several types"),
        (Any, "it has a type that Parquet and Avro do not have: declare its type"),
        (timedelta, "write a duration as an int"),
        (tuple[int, str], "a tuple of several types is a NamedTuple"),
        (list[int | str], r"it \(item\) has values of several types"),
        (None, "it has a type that Parquet and Avro do not have"),
        (Loop, "is a Loop within itself"),
        (Literal["a", 1], "it has a type that Parquet and Avro do not have"),
    ],
)
def test_types_that_parquet_cannot_hold_are_refused(type_: Any, reason: str) -> None:
    with pytest.raises(UnsupportedType, match=reason):
        columns_of(msgspec.defstruct("Made", [("it", type_)]))


def test_a_record_without_fields_is_refused() -> None:
    with pytest.raises(UnsupportedType, match=r"Made has no fields"):
        columns_of(msgspec.defstruct("Made", []))
