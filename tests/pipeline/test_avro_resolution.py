"""The rules of Avro's schema resolution, one by one, and that fastavro reads what they let through."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.pipeline.avro_resolution import AvroResolution


def record(*fields: dict[str, Any], name: str = "Total", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, type_: Any = "long", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, **more}


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "Colour", "symbols": list(symbols), **more}


def fixed(size: int, name: str = "Digest") -> dict[str, Any]:
    return {"type": "fixed", "name": name, "size": size}


def logical(type_: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": type_, "logicalType": name, **more}


def resolved(written: Any, read: Any, value: Any) -> Any:
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(written), value)
    out.seek(0)
    return fastavro.schemaless_reader(out, fastavro.parse_schema(written), fastavro.parse_schema(read))


INNER = record(field("x", "int"), name="Inner")
TREE = record(field("value"), field("next", ["null", "Tree"]), name="Tree")
GROWN = record(field("value", "double"), field("next", ["null", "Tree"]), field("n", "int", default=1), name="Tree")
ACCEPTED: dict[str, tuple[Any, Any, Any, Any]] = {
    "a removed field": (record(field("a"), field("b", INNER)), record(field("a")), {"a": 1, "b": {"x": 2}}, {"a": 1}),
    "another order": (
        record(field("a"), field("b")), record(field("b"), field("a")), {"a": 1, "b": 2}, {"a": 1, "b": 2},
    ),
    "a renamed field": (record(field("a")), record(field("b", aliases=["a"])), {"a": 1}, {"b": 1}),
    "a renamed record": (record(), record(name="Sum", aliases=["Total"]), {}, {}),
    "another namespace": (record(name="a.Total"), record(name="b.Total"), {}, {}),
    "an enum that grows": (enum("A"), enum("B", "A"), "A", "A"),
    "an enum with a default": (enum("A", "B"), enum("A", default="A"), "B", "A"),
    "a union that grows": (["null", "int"], ["null", "string", "long"], 1, 1),
    "into a union": ("int", ["null", "double"], 1, 1.0),
    "out of a union": (["int", "long"], "double", 1, 1.0),
    "records within": (
        record(field("in", INNER)),
        record(field("in", record(field("x", "double"), field("y", default=1), name="Inner"))),
        {"in": {"x": 1}}, {"in": {"x": 1.0, "y": 1}},
    ),
    "an error": (
        record(field("a", INNER)), record(field("a", {**INNER, "type": "error"}), field("b", default=1)),
        {"a": {"x": 1}}, {"a": {"x": 1}, "b": 1},
    ),
    "a type by its name": (
        record(field("a", INNER), field("b", "Inner")), record(field("b", INNER), field("a", "Inner")),
        {"a": {"x": 1}, "b": {"x": 2}}, {"a": {"x": 1}, "b": {"x": 2}},
    ),
    "a record within itself": (
        TREE, GROWN, {"value": 1, "next": {"value": 2, "next": None}},
        {"value": 1.0, "n": 1, "next": {"value": 2.0, "n": 1, "next": None}},
    ),
}  # fmt: skip
FILLED: list[tuple[Any, Any]] = [
    ("long", 7), ("double", 1), (["null", "bytes"], None), (["null", "string"], "x"), (enum("A", "B"), "B"),
    ({"type": "array", "items": "int"}, []), ({"type": "map", "values": "int"}, {"k": 1}), (INNER, {"x": 3}),
    (["null", {"type": "array", "items": "int"}], [1]),
]  # fmt: skip
"""Types of an added field, and defaults."""
NOT_FILLED: list[tuple[Any, Any]] = [
    ("bytes", ""), (["null", "bytes"], "abcd"), (["null", fixed(2)], "ab"), (logical("int", "date"), 0),
    (["null", logical("long", "timestamp-millis")], 0), ("double", "1.5"), ("float", "NaN"),
    (["null", logical("bytes", "decimal", precision=4, scale=2)], "1"),
    (record(field("x", default=1), name="Inner"), {}),
    ({**record(field("b", "bytes"), name="Bad"), "type": "error"}, {"b": ""}),
]  # fmt: skip
"""Likewise: fastavro would fill in the JSON, which is no value of the type."""
REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "no default": (record(field("a")), record(field("a"), field("b")), {"a": 1}, "field 'b' was not written: give it"),
    "a long that narrows": (
        record(field("a")), record(field("a", "int")), {"a": 1}, "field 'a' was written as long and is read as int",
    ),
    "deep down": (
        record(field("in", {"type": "array", "items": ["null", INNER]})),
        record(field("in", {"type": "array", "items": ["null", record(field("x", "boolean"), name="Inner")]})),
        {"in": [{"x": 1}]}, "field 'in.x' was written as int and is read as boolean",
    ),
    "a value that may be null": (["null", "int"], "int", None, "the value was written as null and is read as int"),
    "not in the union": ("boolean", ["null", "int"], True, "was written as boolean and is read as null or int"),
    "a symbol that is gone": (enum("A", "B"), enum("A"), "B", "with the symbols B, which are gone: give the enum"),
    "another size": (
        fixed(2), fixed(3), b"ab", "was written as fixed Digest of 2 bytes and is read as fixed Digest of 3 bytes",
    ),
    "another name": (record(), record(name="Sum"), {}, "was written as record Total and is read as record Sum"),
    "an enum as a record": (enum("A"), record(name="Colour"), "A", "as enum Colour and is read as record Colour"),
    "two aliases": (
        record(field("a"), field("b")), record(field("c", aliases=["a", "b"])), {"a": 1, "b": 2},
        "field 'c' is filled by 'a' and by 'b': take an alias away",
    ),
    "a union with a name": (
        record(field("a", INNER)), record(field("b", ["null", INNER], default=None), field("a", ["null", "Inner"])),
        {"a": {"x": 1}}, "field 'a' is a union with Inner by its name, which is defined elsewhere: define it there",
    ),
}  # fmt: skip
LOST: list[tuple[Any, Any, str]] = [
    (record(field("a"), field("c")), record(field("c", aliases=["a"])), "field 'c' is filled by 'a' and by 'c'"),
    (logical("long", "timestamp-millis"), "long", "was written as long timestamp-millis and is read as long"),
    (
        logical("bytes", "decimal", precision=9, scale=2), logical("bytes", "decimal", precision=9, scale=3),
        "as bytes decimal 9 2 and is read as bytes decimal 9 3",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("written", "read", "value", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_resolves(written: Any, read: Any, value: Any, expected: Any) -> None:
    assert AvroResolution(written, read).problems == []
    assert resolved(written, read, value) == expected


@pytest.mark.parametrize(("written", "read", "value", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_resolve(written: Any, read: Any, value: Any, problem: str) -> None:
    (found,) = AvroResolution(written, read).problems
    assert problem in found
    out, writer, reader = BytesIO(), fastavro.parse_schema(written), fastavro.parse_schema(read)
    fastavro.schemaless_writer(out, writer, value)
    out.seek(0)
    with pytest.raises(Exception, match=r".*"):  # of any type: some are defects of fastavro
        fastavro.schemaless_reader(out, writer, reader)


@pytest.mark.parametrize(("type_", "default"), FILLED)
def test_a_field_that_was_not_written_has_its_default(type_: Any, default: Any) -> None:
    read = record(field("b", type_, default=default))
    assert AvroResolution(record(), read).problems == []
    assert resolved(record(), read, {}) == {"b": default}


@pytest.mark.parametrize(("type_", "default"), NOT_FILLED)
def test_a_default_that_would_be_read_as_something_else(type_: Any, default: Any) -> None:
    (found,) = AvroResolution(record(), record(field("b", type_, default=default))).problems
    assert "field 'b' was not written, and a default of its kind is not filled in" in found


@pytest.mark.parametrize(("written", "read", "problem"), LOST)
def test_what_would_be_read_wrongly(written: Any, read: Any, problem: str) -> None:
    (found,) = AvroResolution(written, read).problems
    assert problem in found


def test_all_problems_are_told() -> None:
    problems = AvroResolution(record(field("a")), record(field("a", "string"), field("b"))).problems
    assert [problem.split("'")[1] for problem in problems] == ["a", "b"]


SCALARS = ["null", "boolean", "int", "long", "float", "double", "string", "bytes"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=3),
    "bytes": st.text(max_size=3).map(str.encode),
}
DEFAULTS = dict(zip(SCALARS, (None, True, 1, 2, 1.5, 2.5, "s", "b"), strict=True))


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> Any:
    """Schemas whose names are often those of another one."""
    kinds = ["scalar", "union", "enum", *(["array", "map", "record"] if depth else [])]
    match draw(st.sampled_from(kinds)):
        case "scalar":
            return draw(st.sampled_from(SCALARS))
        case "union":
            return draw(st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3, unique=True))
        case "enum":
            symbols = draw(st.lists(st.sampled_from("ABC"), min_size=1, unique=True))
            more = {"default": symbols[0]} if draw(st.booleans()) else {}
            return {"type": "enum", "name": f"E{depth}", "symbols": symbols, **more}
        case "array":
            return {"type": "array", "items": draw(schemas(depth - 1))}
        case "map":
            return {"type": "map", "values": draw(schemas(depth - 1))}
    fields = list[dict[str, Any]]()
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        type_ = draw(st.sampled_from(SCALARS)) if fields else draw(schemas(depth - 1))  # names are defined once
        drawn_field = field(name, type_)
        if isinstance(type_, str) and draw(st.booleans()):
            drawn_field["default"] = DEFAULTS[type_]
        if draw(st.booleans()):
            drawn_field["aliases"] = draw(st.lists(st.sampled_from("abc"), max_size=2, unique=True))
        fields.append(drawn_field)
    return record(*fields, name=f"R{depth}")


def values(schema: Any) -> st.SearchStrategy[Any]:
    if isinstance(schema, list):
        return st.one_of(*map(values, schema))
    if isinstance(schema, str):
        return VALUES[schema]
    match schema["type"]:
        case "enum":
            return st.sampled_from(schema["symbols"])
        case "array":
            return st.lists(values(schema["items"]), max_size=3)
        case "map":
            return st.dictionaries(st.text(max_size=3), values(schema["values"]), max_size=3)
    return st.fixed_dictionaries({each["name"]: values(each["type"]) for each in schema["fields"]})


@given(st.data())
def test_fastavro_reads_what_has_no_problem(data: st.DataObject) -> None:
    written, read = data.draw(schemas()), data.draw(schemas())
    if not AvroResolution(written, read).problems:
        resolved(written, read, data.draw(values(written)))


WITHIN: dict[str, Callable[[str], Any]] = {
    "a field": lambda type_: record(field("a", type_)),
    "a list": lambda type_: {"type": "array", "items": type_},
    "a map": lambda type_: {"type": "map", "values": type_},
}


@given(st.sampled_from(SCALARS), st.sampled_from(SCALARS), st.sampled_from([*WITHIN]), st.data())
def test_fastavro_reads_nothing_that_has_one(was: str, now: str, place: str, data: st.DataObject) -> None:
    """Promotions are all that a scalar has, within anything."""
    written, read = WITHIN[place](was), WITHIN[place](now)
    value = data.draw(values(written).filter(bool))
    if AvroResolution(written, read).problems:
        with pytest.raises(fastavro.read.SchemaResolutionError):
            resolved(written, read, value)
    else:
        resolved(written, read, value)
