"""Rows of a DataFrame as records: the type that its schema makes, and batches of Arrow as records of that type.

Invariants: a type is made of the schema's text alone, so that every process makes the same one; a column has its name
in the store; no value is rounded, cut or made into text on the way, and what has no equal in Python is refused by its
column's name before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from keyword import iskeyword
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark

from exactlyonce.pipeline.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_SCALARS: dict[type[spark.DataType], Any] = {
    spark.BooleanType: bool,
    **dict.fromkeys((spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType), int),
    **dict.fromkeys((spark.FloatType, spark.DoubleType), float),
    **dict.fromkeys((spark.StringType, spark.CharType, spark.VarcharType), str),
    spark.BinaryType: bytes,
    spark.DecimalType: Decimal,
    spark.DateType: date,
    spark.TimestampType: datetime,
    spark.TimestampNTZType: Annotated[datetime, msgspec.Meta(tz=False)],
    spark.DayTimeIntervalType: timedelta,
}
if (_time_type := getattr(spark, "TimeType", None)) is not None:  # Spark 4.1 has it
    _SCALARS[_time_type] = time
_PLACE = "column_{}"
"""The attribute of a column whose name is none in Python."""


@lru_cache(maxsize=64)
def record_type(schema: str, required: tuple[str, ...] = ()) -> Any:
    """The type of the rows of a DataFrame whose schema is *schema*, as JSON; columns that are *required* have no null.

    >>> from exactlyonce.pipeline import schema
    >>> columns = spark.StructType().add("customer", spark.StringType()).add("sum", spark.LongType())
    >>> schema.describe(record_type(columns.json(), ("customer",)))["fields"]
    [['customer', 'str'], ['sum', {'union': ['int', 'null']}]]
    """
    columns = spark.StructType.fromJson(msgspec.json.decode(schema))
    _refuse_same_names(columns, "the DataFrame")
    fields, renamed = [], {}
    for place, column in enumerate(columns):
        attribute = column.name
        if not attribute.isidentifier() or iskeyword(attribute) or attribute.startswith("_"):
            attribute = _PLACE.format(place)
            renamed[attribute] = column.name
        type_ = _type_of(column.dataType, column.name)
        fields.append((attribute, type_ if column.name in required or not column.nullable else type_ | None))
    return msgspec.defstruct("Row", fields, rename=renamed, gc=False)


def _refuse_same_names(columns: spark.StructType, where: str) -> None:
    names = columns.names
    if not names:
        raise ConfigError(f"There is no column in {where}: select what is to be written.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"Two columns of {where} are named {twice!r}: rename one, or leave it out.")


def _type_of(type_: spark.DataType, where: str) -> Any:
    """The type of values other than null; *where* is the column's name."""
    if isinstance(type_, spark.ArrayType):
        item = _type_of(type_.elementType, where)
        return GenericAlias(list, (item | None if type_.containsNull else item,))
    if isinstance(type_, spark.MapType):
        key, value = _type_of(type_.keyType, where), _type_of(type_.valueType, where)
        return GenericAlias(dict, (key, value | None if type_.valueContainsNull else value))
    if isinstance(type_, spark.StructType):
        _refuse_same_names(type_, f"column {where!r}")
        inner = {each.name: (_type_of(each.dataType, f"{where}.{each.name}"), each.nullable) for each in type_}
        fields = {name: found | None if nullable else found for name, (found, nullable) in inner.items()}
        return TypedDict(where, fields)  # type: ignore[operator]  # it is known when it runs
    found = _SCALARS.get(type(type_))
    if found is None:
        raise ConfigError(
            f"Column {where!r} is of type {type_.simpleString()}, which cannot be written to a store: cast it, to a "
            f"string for instance, or leave it out."
        )
    return found


class Records:
    """What makes records of the batches of one task. *required*: columns in which null is refused, and why."""

    def __init__(self, type_: Any, required: Collection[str], why: str) -> None:
        self._type, self._required, self._why = type_, required, why
        self.taken = 0
        """How many rows were taken so far."""

    def take(self, batch: RecordBatch) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """The rows of *batch* as plain values, and as records."""
        for name in self._required:
            if batch.column(name).null_count:
                place = self.taken + batch.column(name).to_pylist().index(None) + 1
                raise RecordError(f"Row {place} of a task has null in column {name!r}, {self._why}: filter such rows.")
        columns = [_values(batch.column(place)) for place in range(batch.num_columns)]
        self.taken += batch.num_rows
        return list(zip(*columns, strict=True)), list(map(self._type, *columns))


def _values(column: pa.Array) -> list[Any]:
    plain = _plain(column.type)
    values = column.to_pylist()
    return values if plain is None else [None if each is None else plain(each) for each in values]


def _plain(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes dicts of the maps in a value, which Arrow gives as pairs; None where there is no map."""
    if pa.types.is_map(type_):
        inner = _or_as_it_is(_plain(type_.item_type))
        return lambda pairs: {key: inner(value) for key, value in pairs}
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        item = _plain(type_.value_type)
        return None if item is None else _items(_or_as_it_is(item))
    if pa.types.is_struct(type_):
        parts = {each.name: _or_as_it_is(made) for each in type_ if (made := _plain(each.type)) is not None}
        return _fields(parts) if parts else None
    return None


def _items(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda items: list(map(item, items))


def _fields(parts: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda fields: {**fields, **{name: made(fields[name]) for name, made in parts.items()}}


def _or_as_it_is(plain: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return lambda value: value if plain is None or value is None else plain(value)
