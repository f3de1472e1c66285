"""The fields of a record's type, as a table gets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import msgspec
import pytest
from typing_extensions import NotRequired, TypedDict

from exactlyonce.pipeline.columns import RowField, fields_of
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import Form, UnsupportedType
from exactlyonce.sinks.sql.table import description_problems, row_fields, row_problems


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Level(IntEnum):
    LOW = 1


class Inner(msgspec.Struct):
    a: int


class Wide(msgspec.Struct, rename="camel"):
    bool_: bool
    an_int: Annotated[int, msgspec.Meta(ge=0)]
    a_float: float
    text: str
    raw: bytes
    money: Decimal
    at: datetime
    day: date
    span: timedelta
    id: UUID
    inner: Inner
    mapping: dict[str, int]
    anything: Any
    names: list[str]
    pairs: list[list[int]]
    size: Size
    level: Level
    choice: Literal["x", "y"]
    number: int | float
    mixed: int | str
    perhaps: str | None


class Empty(msgspec.Struct):
    """A record without fields."""


class Named(NamedTuple):
    a: int
    b: str | None = None


@dataclasses.dataclass
class Data:
    a: int
    b: str | None = None


class Typed(TypedDict):
    a: int
    b: NotRequired[str]


def field(type_: Any, name: str) -> RowField:
    return next(each for each in fields_of(type_) if each.name == name)


def test_each_type_has_its_kind() -> None:
    kinds = {each.name: each.kind.name for each in fields_of(Wide)}
    assert kinds == {
        "bool": "BOOL", "anInt": "INT", "aFloat": "FLOAT", "text": "STR", "raw": "BYTES", "money": "DECIMAL",
        "at": "DATETIME", "day": "DATE", "span": "TIMEDELTA", "id": "UUID", "inner": "ANY", "mapping": "ANY",
        "anything": "ANY", "names": "LIST", "pairs": "ANY", "size": "STR", "level": "INT", "choice": "STR",
        "number": "FLOAT", "mixed": "ANY", "perhaps": "STR",
    }  # fmt: skip
    assert [each.name for each in fields_of(Wide) if each.nullable] == ["anything", "perhaps"]
    assert field(Wide, "names").item is Form.STR


@pytest.mark.parametrize(
    ("type_", "records"),
    [(Named, [Named(1), Named(2, "x")]), (Data, [Data(1), Data(2, "x")]), (Typed, [{"a": 1}, {"a": 2, "b": "x"}])],
)
def test_records_of_every_form_give_their_fields(type_: Any, records: Sequence[Any]) -> None:
    assert [each.values(records) for each in fields_of(type_)] == [[1, 2], [None, "x"]]
    assert [each.nullable for each in fields_of(type_)] == [False, True]


class Text(str):
    def __str__(self) -> str:
        return "another"


class Moment(datetime):
    """A subclass, as libraries have them."""


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("text", Text("x"), "x"), ("size", Size.LARGE, "l"), ("anInt", Level.LOW, 1), ("aFloat", 3, 3.0),
        ("money", 3, Decimal(3)), ("raw", bytearray(b"x"), b"x"), ("at", Moment(2026, 1, 2), datetime(2026, 1, 2)),
        ("names", ("a", Text("b")), ["a", "b"]), ("names", [], []), ("names", [None], [None]),
    ],
)  # fmt: skip
def test_values_are_of_exactly_their_class(name: str, given: object, expected: Any) -> None:
    each = field(Wide, name)
    both = msgspec.structs.replace(each, get=lambda value: value).values([given, None])
    assert both == [expected, None]
    assert type(both[0]) is type(expected)
    if isinstance(expected, list):
        assert [type(item) for item in both[0]] == [type(item) for item in expected]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("anInt", True), ("anInt", 1.0), ("anInt", "1"), ("text", b"x"), ("raw", "x"), ("bool", 1), ("aFloat", True),
        ("day", datetime(2026, 1, 2)), ("at", date(2026, 1, 2)), ("money", 1.5), ("id", "no"), ("names", "text"),
        ("names", [1]), ("span", 5),
    ],
)  # fmt: skip
def test_a_value_of_another_class_is_refused_by_name(name: str, given: object) -> None:
    each = field(Wide, name)
    with pytest.raises(TypeError, match=rf"^{name}: .* is {type(given).__name__ if name != 'names' else ''}"):
        msgspec.structs.replace(each, get=lambda value: value).values([given])


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^aFloat: a number of 33220 bits is too large for float"):
        msgspec.structs.replace(field(Wide, "aFloat"), get=lambda value: value).values([10**10000])


@pytest.mark.parametrize("name", ["aFloat", "number"])
def test_an_int_that_no_float_is_is_refused(name: str) -> None:
    each = msgspec.structs.replace(field(Wide, name), get=lambda value: value)
    assert each.values([2**53, -(2**60), 0.5, 10**22]) == [float(2**53), -float(2**60), 0.5, 1e22]
    for given in (2**53 + 1, -(2**53) - 1, 10**23):
        with pytest.raises(ValueError, match=rf"^{name}: {given} is no float: the nearest is -?\d+\. Declare"):
            each.values([given])


def test_a_record_without_the_field_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^a: the record has no such field"):
        field(Data, "a").values([object()])
    with pytest.raises(TypeError, match=r"^a: the record has no such field"):
        field(Typed, "a").values([{}])


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (int, "int has no fields"), (UNKNOWN, "unknown"), (dict[str, int], "no fields"), (Named | None, "admits None"),
        (Empty, "no fields"),
        (Record[Named], "map it to its value"), (Inner | Data, "no fields|cannot be encoded"),
    ],
)  # fmt: skip
def test_a_type_without_fields_is_refused(type_: Any, text: str) -> None:
    with pytest.raises(UnsupportedType, match=text):
        fields_of(type_)


def test_the_arguments_of_a_description() -> None:
    assert list(description_problems("upsert", ("a",), True)) == []
    wrong = list(description_problems("merge", ["a"], 1))
    assert [text.split("=")[0] for text in wrong] == ["mode", "create", "key"]
    assert "needs the columns" in next(description_problems("delete", (), False))
    assert "twice" in next(description_problems("upsert", ("a", "a"), False))


def test_a_key_is_made_of_scalars_that_are_there() -> None:
    assert list(row_problems(Wide, "upsert", ("text", "anInt"))) == []
    wrong = list(row_problems(Wide, "upsert", ("nothing", "perhaps", "inner", "names", "anything")))
    texts = ("has bool", "admits None", "JSON", "list", "annotation of key_by's function")
    assert [text in problem for text, problem in zip(texts, wrong, strict=True)] == [True] * 5
    assert [each.name for each in row_fields(Wide, "delete", ("id",))] == ["id"]
