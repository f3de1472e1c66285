"""The shape of a type, and the golden forms of one record in every target: what is stored or registered stays equal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar
from uuid import UUID

import msgspec
import pytest
from typing_extensions import NotRequired, TypedDict

from exactlyonce.engines.spark.source.spark_types import column
from exactlyonce.pipeline.arrow import arrow_schema
from exactlyonce.pipeline.avro import avro_schema
from exactlyonce.pipeline.columns import columns_of, fields_of, kind_name
from exactlyonce.pipeline.keys import holds_keys
from exactlyonce.pipeline.shape import Form, UnsupportedType, describe, described_shape, record_fields, shape_of
from exactlyonce.sinks.files.avro import avro_record
from exactlyonce.sinks.postgres.catalogue import created_type
from exactlyonce.state.state_type import StateType

T = TypeVar("T")


class Size(Enum):
    SMALL = "s"


class Level(IntEnum):
    LOW = 1


class Named(NamedTuple):
    a: int
    b: Optional[str] = None  # noqa: UP045 - a type of its own to msgspec


class Typed(TypedDict):
    a: int
    b: NotRequired[str]


class Inner(msgspec.Struct, rename="camel", omit_defaults=True):
    an_id: int
    tags: list[str] = msgspec.field(default_factory=list)


class Tree(msgspec.Struct, tag="tree"):
    value: int
    children: list[Tree] = []


@dataclass
class Box(Generic[T]):
    item: T


class Wide(msgspec.Struct):
    bool_: bool
    int_: Annotated[int, msgspec.Meta(ge=0, description="a count")]
    float_: float
    str_: Annotated[str, msgspec.Meta(extra={"unit": "m"})]
    bytes_: bytes
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    local: Annotated[datetime, msgspec.Meta(tz=False)]
    day: date
    hour: time
    id: UUID
    size: Size
    level: Level
    choice: Literal["x", "y"]
    number: int | float
    perhaps: str | None
    inner: Inner
    names: list[str]
    items: list[int | None]
    pair: tuple[int, ...]
    group: frozenset[int]
    mapping: dict[str, Inner | None]
    default: int = 3


DESCRIBED = {
    "bool_": "bool", "int_": "int", "float_": "float", "str_": "str", "bytes_": "bytes", "at": "datetime",
    "local": "datetime", "day": "date", "hour": "time", "id": "uuid", "size": {"enum": "Size", "values": ["s"]},
    "level": {"enum": "Level", "values": [1]}, "choice": {"literal": ["x", "y"]},
    "number": {"union": ["int", "float"]}, "perhaps": {"union": ["str", "null"]},
    "inner": {
        "record": "Inner",
        "fields": [["anId", "int"], ["tags", {"optional": {"list": "str"}, "omitted": []}]],
    },
    "names": {"list": "str"}, "items": {"list": {"union": ["int", "null"]}}, "pair": {"list": "int"},
    "group": {"set": "int"}, "mapping": {"dict": ["str", {"union": [{"record": "Inner"}, "null"]}]},
    "default": {"optional": "int", "default": 3},
}  # fmt: skip
AVRO_INNER = {
    "type": "record", "name": "Inner",
    "fields": [{"name": "anId", "type": "long"}, {"name": "tags", "type": {"type": "array", "items": "string"}}],
}  # fmt: skip
AVRO = {
    "bool_": "boolean", "int_": "long", "float_": "double", "str_": "string", "bytes_": "bytes",
    "at": {"type": "long", "logicalType": "timestamp-micros"},
    "local": {"type": "long", "logicalType": "local-timestamp-micros"},
    "day": {"type": "int", "logicalType": "date"}, "hour": {"type": "long", "logicalType": "time-micros"},
    "id": {"type": "string", "logicalType": "uuid"}, "size": "string", "level": "long", "choice": "string",
    "number": ["long", "double"], "perhaps": ["string", "null"], "inner": AVRO_INNER,
    "names": {"type": "array", "items": "string"}, "items": {"type": "array", "items": ["long", "null"]},
    "pair": {"type": "array", "items": "long"}, "group": {"type": "array", "items": "long"},
    "mapping": {"type": "map", "values": ["Inner", "null"]}, "default": "long",
}  # fmt: skip
POSTGRES = {
    "bool_": "boolean", "int_": "bigint", "float_": "double precision", "str_": "text", "bytes_": "bytea",
    "at": "timestamp with time zone", "local": "timestamp with time zone", "day": "date", "hour": "time", "id": "uuid",
    "size": "text", "level": "bigint", "choice": "text", "number": "double precision", "perhaps": "text",
    "inner": "jsonb", "names": "text[]", "items": "bigint[]", "pair": "bigint[]", "group": "bigint[]",
    "mapping": "jsonb", "default": "bigint",
}  # fmt: skip
ARROW = {
    "bool_": "bool", "int_": "int64", "float_": "double", "str_": "string", "bytes_": "binary",
    "at": "timestamp[us, tz=UTC]", "local": "timestamp[us]", "day": "date32[day]", "hour": "time64[us]",
    "id": "string", "size": "string", "level": "int64", "choice": "string", "number": "double", "perhaps": "string",
    "inner": "struct<anId: int64 not null, tags: list<item: string> not null>", "names": "list<item: string>",
    "items": "list<item: int64>", "pair": "list<item: int64>", "group": "list<item: int64>",
    "mapping": "map<string, struct<anId: int64 not null, tags: list<item: string> not null>>", "default": "int64",
}  # fmt: skip
SPARK = {
    "bool_": "boolean", "int_": "bigint", "float_": "double", "str_": "string", "bytes_": "binary",
    "at": "timestamp", "local": "timestamp", "day": "date", "hour": "string", "id": "string", "size": "string",
    "level": "bigint", "choice": "string", "number": "string", "perhaps": "string",
    "inner": "struct<anId:bigint,tags:array<string>>", "names": "array<string>", "items": "array<bigint>",
    "pair": "array<bigint>", "group": "array<bigint>", "mapping": "map<string,string>", "default": "bigint",
}  # fmt: skip


def test_a_record_of_every_form_is_the_same_as_ever_in_each_target() -> None:
    assert describe(Wide, defaults=True) == {"record": "Wide", "fields": [list(pair) for pair in DESCRIBED.items()]}
    assert {field["name"]: field["type"] for field in avro_schema(Wide)["fields"]} == AVRO
    assert {field.name: created_type(field) for field in fields_of(Wide)} == POSTGRES
    assert {field.name: str(field.type) for field in arrow_schema(columns_of(Wide))} == ARROW
    assert [field.name for field in arrow_schema(columns_of(Wide)) if field.nullable] == ["perhaps"]
    spark: Any = column(describe(Wide)).type
    assert {field.name: field.dataType.simpleString() for field in spark.fields} == SPARK
    in_file = {field["name"]: field["type"] for field in avro_record(columns_of(Wide), "row")["fields"]}
    assert {name for name, type_ in in_file.items() if type_ != AVRO[name]} == {"id", "number", "perhaps", "inner",
                                                                               "items", "mapping"}  # fmt: skip


def test_the_kinds_of_columns_have_the_names_that_are_in_the_marks_of_rows() -> None:
    names = {kind_name(form) for form in (Form.ANY, Form.DECIMAL, Form.UUID, Form.LIST, Form.INT, Form.TIMEDELTA)}
    assert names == {"JSON", "Decimal", "UUID", "list", "int", "timedelta"}


@pytest.mark.parametrize(
    ("type_", "record", "values"),
    [
        (Named, Named(1), [1, None]), (Typed, {"a": 1}, [1, None]), (Inner, Inner(1, ["x"]), [1, ["x"]]),
        (Box[int], Box(1), [1]),
    ],
)  # fmt: skip
def test_each_kind_of_record_gives_its_fields(type_: Any, record: Any, values: list[Any]) -> None:
    assert [field.get(record) for field in shape_of(type_).fields] == values


def test_a_record_within_itself_is_visited_as_far_as_it_is_asked_for() -> None:
    tree = shape_of(Tree)
    assert tree.fields[1].shape.parts[0] == tree
    assert hash(tree.fields[1].shape.parts[0].fields[1].shape) == hash(tree.fields[1].shape)
    assert tree.tag == ("type", "tree")
    assert shape_of(Box[int]) != shape_of(Box[str])


@pytest.mark.parametrize(
    ("type_", "nullable", "scalar"),
    [
        (int | None, True, Form.INT), (Any, True, None), (Literal["a", None], True, Form.STR),
        (Size | None, True, Form.STR), (int | float, False, Form.FLOAT), (int | str, False, None),
        (Decimal, False, Form.DECIMAL), (timedelta, False, Form.TIMEDELTA), (list[int], False, None),
    ],
)  # fmt: skip
def test_none_and_scalars_are_told(type_: Any, nullable: bool, scalar: Form | None) -> None:
    shape = shape_of(type_)
    assert (shape.nullable, shape.without_none.scalar) == (nullable, scalar)


@pytest.mark.parametrize("type_", [complex, "Order", list[int] | set[int], Box[complex]])
def test_a_type_that_nothing_writes_is_refused_by_its_name(type_: Any) -> None:
    with pytest.raises(UnsupportedType, match=r"cannot be encoded|complex"):
        describe(type_)
    assert not record_fields(type_) or type_ == Box[complex]


def test_a_stored_schema_is_the_shape_of_its_type_without_classes() -> None:
    stored, own = described_shape(describe(Wide, defaults=True)), shape_of(Wide)
    assert [(field.name, field.shape.form, field.required) for field in stored.fields] == [
        (field.name, field.shape.form, field.required) for field in own.fields
    ]
    assert stored.fields[-1].default == 3
    inner = next(field.shape for field in stored.fields if field.name == "inner")
    assert (inner.type.__name__, inner.fields[1].is_omitted, inner.fields[1].default) == ("Inner", True, [])
    mapping = next(field.shape for field in stored.fields if field.name == "mapping")
    assert mapping.parts[1].without_none is inner


def test_keys_within_themselves_are_compared_to_their_end() -> None:
    def chain(*own: Any) -> Any:
        return {"record": "Chain", "fields": [["next", {"union": [{"record": "Chain"}, "null"]}], *own]}

    assert holds_keys(chain(["a", "int"]), chain(["a", "int"]))
    assert not holds_keys(chain(["a", "int"]), chain(["a", "str"]))


def test_a_state_of_a_generic_class_is_known_to_be_mutable() -> None:
    state: StateType[Any] = StateType("total", Box[int])
    assert state.mutable
    assert [state.shares(output) for output in (Box(1), 1)] == [True, False]
