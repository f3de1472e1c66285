"""The fields of a record's type, matched with the columns of a table.

Invariant: a column that matches takes every value of its field unchanged, or the encoder names the record's field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files.columns import Column, ColumnType, Fields, ListOf, MapOf, Scalar
from exactlyonce.sinks.files.parquet import Parquet

_Predicate = Callable[[Any], bool]
_is = pa.types
_FITTING: Mapping[str, _Predicate] = {
    "bool": _is.is_boolean,
    "int": _is.is_signed_integer,
    "float": lambda type_: _is.is_float32(type_) or _is.is_float64(type_),
    "str": lambda type_: _is.is_string(type_) or _is.is_large_string(type_),
    "bytes": lambda type_: _is.is_binary(type_) or _is.is_large_binary(type_) or _is.is_fixed_size_binary(type_),
    "decimal": _is.is_decimal,
    "instant": lambda type_: _is.is_timestamp(type_) and type_.tz is not None,
    "local": lambda type_: _is.is_timestamp(type_) and type_.tz is None,
    "date": _is.is_date32,
    "time": _is.is_time64,
}
_SHOWN = {"instant": "datetime", "local": "datetime without a time zone"}


class TableRows:
    """The `SinkEncoder` of records as batches of a table's columns."""

    def __init__(self, columns: Sequence[Column], schema: Any, table: str) -> None:
        self._parquet = Parquet(columns, matched(columns, schema, table))

    def encode(self, records: Sequence[Any]) -> Any:
        """A `pyarrow.RecordBatch`."""
        return self._parquet.encode([records])[0][0]


def matched(columns: Sequence[Column], schema: Any, table: str) -> Any:
    """The columns of *schema*, a table's, that *columns* are written to. `StoreError` lists all mismatches."""
    names = {column.field.name for column in columns}
    problems = [
        f"it has no column {name!r}, but {', '.join(schema.names)}: add the column, or leave the field out"
        for name in sorted(names - set(schema.names))
    ]
    for field in schema:
        if field.name not in names and not field.nullable:
            problems.append(f"its column {field.name!r} is required, and no field has that name: add one")
    for column in columns:
        if column.field.name in schema.names:
            problems += _mismatches(column.type, schema.field(column.field.name).type, column.field.name)
    if problems:
        raise StoreError(f"Table {table} does not fit the records: {'; '.join(problems)}.")
    return pa.schema([schema.field(column.field.name) for column in columns])


def _mismatches(type_: ColumnType, arrow: Any, where: str) -> Iterator[str]:
    match type_:
        case Scalar(name):
            if not _FITTING[name](arrow):
                shown = _SHOWN.get(name, name)
                yield f"its column {where!r} is {arrow}, and the field is {shown}: change the type of one of them"
        case ListOf(item, nullable) if _is.is_list(arrow) or _is.is_large_list(arrow):
            yield from _inner(item, nullable, arrow.value_field, f"{where} (item)")
        case MapOf(key, value, nullable) if _is.is_map(arrow):
            yield from _mismatches(key, arrow.key_type, f"{where} (key)")
            yield from _inner(value, nullable, arrow.item_field, f"{where} (value)")
        case Fields(columns) if _is.is_struct(arrow):
            yield from _struct_mismatches(columns, {field.name: field for field in arrow}, where)
        case _:
            kind = {ListOf: "a list", MapOf: "a dict", Fields: "a record"}[type(type_)]
            yield f"its column {where!r} is {arrow}, and the field is {kind}: change the type of one of them"


def _inner(type_: ColumnType, nullable: bool, field: Any, where: str) -> Iterator[str]:
    """Those of a value within a value, which no check of whole columns sees."""
    if nullable and not field.nullable:
        yield f"its column {where!r} is required, and the field admits None: give it a type without None"
    if _is.is_float32(field.type):
        yield f"its column {where!r} is {field.type}, which would round the field: make it double"
    else:
        yield from _mismatches(type_, field.type, where)


def _struct_mismatches(columns: Sequence[Column], fields: Mapping[str, Any], where: str) -> Iterator[str]:
    names = {column.field.name for column in columns}
    for column in columns:
        inner = f"{where}.{column.field.name}"
        if column.field.name not in fields:
            yield f"it has no column {inner!r}: add it, or leave the field out"
        else:
            yield from _inner(column.type, column.field.nullable, fields[column.field.name], inner)
    for name, field in fields.items():
        if name not in names and not field.nullable:
            yield f"its column {where}.{name!r} is required, and no field has that name: add one"
