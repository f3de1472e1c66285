"""Schemas as types of Spark, and the conversion of msgpack values to these.

Invariants: a type follows from a schema alone (`VersionedState.schema`), so that every process makes the same one; no
value is rounded or cut: one that its type cannot hold is `Unfit`. A schema without type in Spark, such as a union, is
text in JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import types as spark

from exactlyonce.engines.savepoints.contents import by_position, named
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.versions import KEPT_BY_AVRO
from exactlyonce.state.state_type import json_text

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
DECIMAL = spark.DecimalType(38, 18)
"""The type of every decimal, as in the files of a `FileSink`."""


class Unfit(ValueError):
    """A value that its column cannot hold."""


class SparkColumn(NamedTuple):
    """A type of Spark, and the conversion of msgpack values to it; None stays None."""

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
    for form, column_of in _FORMS.items():
        if form in schema:
            return column_of(schema)
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
    moment: datetime = _exactly(datetime)(value)
    return moment


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
    raise ConfigError(f"The state {KEPT_BY_AVRO}")


def _optional(schema: Any) -> SparkColumn:
    return column(schema["optional"])


def _union(schema: Any) -> SparkColumn:
    members = [member for member in schema["union"] if member != "null"]
    return column(members[0]) if len(members) == 1 else as_json(schema)


def _one_of(schema: Any) -> SparkColumn:
    """An enum, or literals: text or numbers, if all of them are."""
    types = set(map(type, schema.get("values", schema.get("literal"))))
    return {frozenset({str}): _TEXT, frozenset({int}): _SCALARS["int"]}.get(frozenset(types)) or as_json(schema)


def _items(schema: Any) -> SparkColumn:
    item = column(next(iter(schema.values())))
    return SparkColumn(spark.ArrayType(item.type), lambda values: list(map(item.value, _sequence(values))))


def _sequence(values: Any) -> Sequence[Any]:
    if not isinstance(values, list | tuple):
        raise Unfit(f"it is {type(values).__name__}, not a list")
    return values


def _tuple(schema: Any) -> SparkColumn:
    """A struct of `_1`, `_2`, Spark's names for nameless fields."""
    items = [column(item) for item in schema["tuple"]]
    if not items:
        return as_json(schema)
    names = [f"_{place}" for place in range(1, len(items) + 1)]

    def convert(values: Any) -> dict[str, Any]:
        if len(_sequence(values)) != len(items):
            raise Unfit(f"it has {len(values)} items, not {len(items)}")
        return {name: item.value(value) for name, item, value in zip(names, items, values, strict=True)}

    return SparkColumn(_struct(zip(names, items, strict=True)), convert)


def _dict(schema: Any) -> SparkColumn:
    key, value = map(column, schema["dict"])
    if isinstance(key.type, spark.MapType):
        return as_json(schema)  # Spark has no maps by maps

    def convert(values: Any) -> list[tuple[Any, Any]]:
        if not isinstance(values, dict) or None in values:
            raise Unfit("it is no dict" if not isinstance(values, dict) else "it is a dict with the key null")
        return [(key.value(name), value.value(item)) for name, item in values.items()]

    return SparkColumn(spark.MapType(key.type, value.type), convert)


def _record(schema: Any) -> SparkColumn:
    """A struct. A field that was not written, because it had its default, is null."""
    if not schema.get("fields"):
        return as_json(schema)  # it has none, or contains itself
    fields = {name: column(type_) for name, type_ in schema["fields"]}
    needed = [name for name, type_ in schema["fields"] if not (isinstance(type_, dict) and "optional" in type_)]
    tags = set(schema.get("tag", ())[:1])

    def require_fields(record: Mapping[str, Any]) -> None:
        if unknown := sorted(map(str, record.keys() - fields.keys() - tags)):
            raise Unfit(f"it has a field {unknown[0]!r}, which {schema['record']} has not")
        if missing := [name for name in needed if name not in record]:
            raise Unfit(f"it has no field {missing[0]!r}")

    def convert(record: Any) -> dict[str, Any]:
        if not isinstance(record, dict):
            values = by_position(_sequence(record), schema)
            if len(values) > len(fields):
                raise Unfit(f"it has {len(values)} fields, and {schema['record']} has {len(fields)}")
            record = dict(zip(fields, values, strict=False))
        if record.keys() != fields.keys():
            require_fields(record)
        return {name: field.value(record.get(name)) for name, field in fields.items()}

    return SparkColumn(_struct(fields.items()), convert)


def _struct(fields: Iterable[tuple[str, SparkColumn]]) -> spark.StructType:
    return spark.StructType([spark.StructField(name, field.type) for name, field in fields])


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
