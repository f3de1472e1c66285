"""Schemas as types of Spark, and how what msgpack holds becomes a value of each.

Invariants: a type is made of a schema alone (`VersionedState.schema`), so that every process makes the same one; no
value is rounded or cut on the way: what a type cannot hold is `Unfit`. What has no type of its own in Spark, such as a
union, is text in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import types as spark

from exactlyonce.engines.savepoints.kept_state import by_position, named
from exactlyonce.pipeline.avro import as_plain_schema, avro_of, plain_values
from exactlyonce.state.json_text import json_text

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
DECIMAL = spark.DecimalType(38, 18)
"""Of every decimal, as in the files of a `FileSink`."""


class Unfit(ValueError):
    """A value that its column cannot hold."""


class SparkColumn(NamedTuple):
    """A type of Spark, and what makes a value of it of what msgpack holds; None stays None."""

    type: spark.DataType
    convert: Callable[[Any], Any]

    def value(self, value: Any) -> Any:
        """*value* for Arrow. Raises `Unfit`."""
        return None if value is None else self.convert(value)


def column(schema: Any) -> SparkColumn:
    """The column of values of *schema*.

    >>> column({"dict": ["str", {"union": ["int", "null"]}]}).type.simpleString()
    'map<string,bigint>'
    >>> column({"record": "Total", "fields": [["sum", "int"], ["when", {"optional": "datetime"}]]}).type.simpleString()
    'struct<sum:bigint,when:timestamp>'
    """
    if isinstance(schema, str):
        return _SCALARS.get(schema) or as_json(schema)
    for form, made in _FORMS.items():
        if form in schema:
            return made(schema)
    return as_json(schema)


def _exactly(type_: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) is not type_:
            raise Unfit(f"it is {type(value).__name__}, not {type_.__name__}")
        return value

    return convert


def _int(value: Any) -> int:
    number: int = _exactly(int)(value)
    if not INT_MIN <= number <= INT_MAX:
        raise Unfit(f"{number} is larger than 64 bits with a sign")
    return number


def _float(value: Any) -> float:
    return float(value) if type(value) is int else _exactly(float)(value)


def _decimal(value: Any) -> Decimal:
    number = Decimal(_exactly(str)(value))
    exponent, before_point = number.as_tuple().exponent, number.adjusted() + 1
    if not isinstance(exponent, int) or -exponent > DECIMAL.scale or before_point > DECIMAL.precision - DECIMAL.scale:
        raise Unfit(f"{number} has more digits than {DECIMAL.simpleString()}")
    return number


def _datetime(value: Any) -> datetime:
    if isinstance(value, str):
        raise Unfit(f"{value} has no time zone")
    found: datetime = _exactly(datetime)(value)
    return found


def _parsed(type_: type) -> Callable[[Any], Any]:
    return lambda value: msgspec.convert(_exactly(str)(value), type_)


_TEXT = SparkColumn(spark.StringType(), _exactly(str))
_SCALARS = {
    "bool": SparkColumn(spark.BooleanType(), _exactly(bool)),
    "int": SparkColumn(spark.LongType(), _int),
    "float": SparkColumn(spark.DoubleType(), _float),
    "str": _TEXT,
    "bytes": SparkColumn(spark.BinaryType(), _exactly(bytes)),
    "decimal": SparkColumn(DECIMAL, _decimal),
    "datetime": SparkColumn(spark.TimestampType(), _datetime),
    "date": SparkColumn(spark.DateType(), _parsed(date)),
    "timedelta": SparkColumn(spark.DayTimeIntervalType(), _parsed(timedelta)),
    "time": _TEXT,
    "uuid": _TEXT,
}


def as_json(schema: Any) -> SparkColumn:
    """The column of values of *schema* as text."""
    return SparkColumn(spark.StringType(), lambda value: json_text(named(value, schema)))


def _avro(schema: Any) -> SparkColumn:
    shown, decode = column(as_plain_schema(avro_of(schema))), plain_values(avro_of(schema))
    return SparkColumn(shown.type, lambda data: shown.value(decode(data)))


def _optional(schema: Any) -> SparkColumn:
    return column(schema["optional"])


def _union(schema: Any) -> SparkColumn:
    others = [each for each in schema["union"] if each != "null"]
    return column(others[0]) if len(others) == 1 else as_json(schema)


def _one_of(schema: Any) -> SparkColumn:
    """An enum, or literals: text or numbers, if all of them are."""
    types = {type(each) for each in schema.get("values", schema.get("literal"))}
    return {frozenset({str}): _TEXT, frozenset({int}): _SCALARS["int"]}.get(frozenset(types)) or as_json(schema)


def _items(schema: Any) -> SparkColumn:
    item = column(next(iter(schema.values())))
    return SparkColumn(spark.ArrayType(item.type), lambda values: [item.value(each) for each in _sequence(values)])


def _sequence(values: Any) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise Unfit(f"it is {type(values).__name__}, not a list")
    return values


def _tuple(schema: Any) -> SparkColumn:
    """A struct of `_1`, `_2`, as Spark names what has no names."""
    items = [column(each) for each in schema["tuple"]]
    if not items:
        return as_json(schema)
    names = [f"_{place}" for place in range(1, len(items) + 1)]

    def convert(values: Any) -> dict[str, Any]:
        if len(_sequence(values)) != len(items):
            raise Unfit(f"it has {len(values)} items, not {len(items)}")
        return {name: item.value(each) for name, item, each in zip(names, items, values, strict=True)}

    return SparkColumn(_struct(zip(names, items, strict=True)), convert)


def _dict(schema: Any) -> SparkColumn:
    key, value = map(column, schema["dict"])
    if isinstance(key.type, spark.MapType):
        return as_json(schema)  # Spark has no maps by maps

    def convert(values: Any) -> list[tuple[Any, Any]]:
        if not isinstance(values, dict) or None in values:
            raise Unfit("it is no dict" if not isinstance(values, dict) else "it is a dict with the key null")
        return [(key.value(each), value.value(of)) for each, of in values.items()]

    return SparkColumn(spark.MapType(key.type, value.type), convert)


def _record(schema: Any) -> SparkColumn:
    """A struct. A field that was not written, since it had its default, is null."""
    if not schema.get("fields"):
        return as_json(schema)  # it has none, or is one within itself
    fields = {name: column(of) for name, of in schema["fields"]}
    needed = [name for name, of in schema["fields"] if not (isinstance(of, dict) and "optional" in of)]
    tags = set(schema.get("tag", ())[:1])

    def convert(record: Any) -> dict[str, Any]:
        found = _by_name(record, fields, schema)
        if strange := sorted(map(str, found.keys() - fields.keys() - tags)):
            raise Unfit(f"it has a field {strange[0]!r}, which {schema['record']} has not")
        if missing := [name for name in needed if name not in found]:
            raise Unfit(f"it has no field {missing[0]!r}")
        return {name: each.value(found.get(name)) for name, each in fields.items()}

    return SparkColumn(_struct(fields.items()), convert)


def _by_name(record: Any, fields: Mapping[str, SparkColumn], schema: Any) -> Mapping[str, Any]:
    if isinstance(record, dict):
        return record
    values = by_position(_sequence(record), schema)
    if len(values) > len(fields):
        raise Unfit(f"it has {len(values)} fields, and {schema['record']} has {len(fields)}")
    return dict(zip(fields, values, strict=False))


def _struct(fields: Iterable[tuple[str, SparkColumn]]) -> spark.StructType:
    return spark.StructType([spark.StructField(name, each.type) for name, each in fields])


_FORMS: Mapping[str, Callable[[Any], SparkColumn]] = {
    "avro": _avro,
    "optional": _optional,
    "union": _union,
    "enum": _one_of,
    "literal": _one_of,
    "list": _items,
    "set": _items,
    "tuple": _tuple,
    "dict": _dict,
    "record": _record,
}
