"""Records as rows of a table: their fields, matched with its columns, and rows that replace others by key. Pure.

Staged changes of a table have the column `DELETED`; a key that is gone has null in the columns that are not of it.
Invariant: a column that matches takes every value of its field unchanged, or the encoder names the record's field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from exactlyonce.pipeline.arrow import ArrowEncoder
from exactlyonce.pipeline.columns import Column, columns_of, plain
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.pipeline.shape import Form, Shape
from exactlyonce.sinks.sql.fields import ChangedRows

_is = pa.types


def _is_text(type_: Any) -> bool:
    return bool(_is.is_string(type_) or _is.is_large_string(type_))


_FITTING: Mapping[Form, Callable[[Any], bool]] = {
    Form.BOOL: _is.is_boolean,
    Form.INT: _is.is_signed_integer,
    Form.FLOAT: lambda type_: _is.is_float32(type_) or _is.is_float64(type_),
    Form.STR: _is_text,
    Form.UUID: _is_text,
    Form.BYTES: lambda type_: _is.is_binary(type_) or _is.is_large_binary(type_) or _is.is_fixed_size_binary(type_),
    Form.DECIMAL: _is.is_decimal,
    Form.DATETIME: _is.is_timestamp,
    Form.DATE: _is.is_date32,
    Form.TIME: _is.is_time64,
    Form.LIST: lambda type_: _is.is_list(type_) or _is.is_large_list(type_),
    Form.DICT: _is.is_map,
    Form.RECORD: _is.is_struct,
}


DELETED = "exactlyonce_deleted"
"""The column of staged changes that says whether the row of the key is gone."""


class TableRows:
    """The `SinkEncoder` of records as batches of *columns*, whose Arrow fields are *written*. *changed*: where the
    records are changes."""

    def __init__(self, columns: Sequence[Column], written: Any, changed: ChangedRows | None = None) -> None:
        self._rows, self._changed = ArrowEncoder(columns, written), changed
        if changed is not None:
            gone = [replace(column, field=changed.gone(column.field)) for column in columns]
            self._gone = ArrowEncoder(gone, nullable(written))

    def encode(self, records: Sequence[Any]) -> Any:
        """A `pyarrow.RecordBatch`."""
        if self._changed is None:
            return self._rows.encode(records)
        rows, keys = self._changed.parted(records)
        parts = self._rows.encode(rows), self._gone.encode(keys)
        numbers = iter(range(len(rows))), iter(range(len(rows), len(records)))
        order = pa.array([next(numbers[change.value is None]) for change in records], pa.int64())
        columns = [
            pa.concat_arrays(arrays).take(order) for arrays in zip(*(part.columns for part in parts), strict=True)
        ]
        schema = self._gone.schema.append(pa.field(DELETED, pa.bool_()))
        return pa.RecordBatch.from_arrays([*columns, pc.greater_equal(order, len(rows))], schema=schema)


def nullable(schema: Any) -> Any:
    """*schema* with columns that may be null."""
    return pa.schema([field.with_nullable(True) for field in schema])


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
            problems += _mismatches(column.shape, schema.field(column.field.name).type, column.field.name)
    if problems:
        raise StoreError(f"Table {table} does not fit the records: {'; '.join(problems)}.")
    return pa.schema([schema.field(column.field.name) for column in columns])


def _mismatches(shape: Shape, arrow: Any, where: str) -> Iterator[str]:
    shape = plain(shape)
    if not _FITTING[shape.form](arrow) or (shape.form is Form.DATETIME and shape.tz != (arrow.tz is not None)):
        yield f"its column {where!r} is {arrow}, and the field is {_shown(shape)}: change the type of one of them"
        return
    match shape.form:
        case Form.LIST:
            yield from _inner(shape.parts[0], shape.parts[0].nullable, arrow.value_field, f"{where} (item)")
        case Form.DICT:
            key, value = shape.parts
            yield from _mismatches(key, arrow.key_type, f"{where} (key)")
            yield from _inner(value, value.nullable, arrow.item_field, f"{where} (value)")
        case Form.RECORD:
            yield from _struct_mismatches(columns_of(shape.type), {field.name: field for field in arrow}, where)


def _shown(shape: Shape) -> str:
    if shape.form in (Form.LIST, Form.DICT, Form.RECORD):
        return f"a {shape.form.value}"
    return "datetime without a time zone" if shape.tz is False else shape.form.value


def _inner(shape: Shape, nullable: bool, field: Any, where: str) -> Iterator[str]:
    """The faults of a value within a value, which no check of whole columns sees."""
    if nullable and not field.nullable:
        yield f"its column {where!r} is required, and the field admits None: give it a type without None"
    if _is.is_float32(field.type):
        yield f"its column {where!r} is {field.type}, which would round the field: make it double"
    else:
        yield from _mismatches(shape, field.type, where)


def _struct_mismatches(columns: Sequence[Column], fields: Mapping[str, Any], where: str) -> Iterator[str]:
    names = {column.field.name for column in columns}
    for column in columns:
        inner = f"{where}.{column.field.name}"
        if column.field.name not in fields:
            yield f"it has no column {inner!r}: add it, or leave the field out"
        else:
            yield from _inner(column.shape, column.field.nullable, fields[column.field.name], inner)
    for name, field in fields.items():
        if name not in names and not field.nullable:
            yield f"its column {where}.{name!r} is required, and no field has that name: add one"


_ROW = "row"


def last_of_each(rows: Any, key: Sequence[str]) -> Any:
    """The last of *rows* with each key, in their order.

    >>> last_of_each(pa.table({"k": [1, 2, 1], "v": [5, 6, 7]}), ["k"]).to_pylist()
    [{'k': 2, 'v': 6}, {'k': 1, 'v': 7}]
    """
    numbered, names = _numbered(rows, key)
    newest = numbered.group_by(names).aggregate([(_ROW, "max")])
    return rows.take(newest[f"{_ROW}_max"].combine_chunks().sort())


def present(staged: Any) -> Any:
    """The *staged* rows that are not gone.

    >>> present(pa.table({"k": [1, 2], "v": [5, None], DELETED: [False, True]})).to_pylist()
    [{'k': 1, 'v': 5}]
    """
    if DELETED not in staged.schema.names:
        return staged
    return staged.filter(pc.invert(staged.column(DELETED))).drop_columns([DELETED])


def without(rows: Any, changed: Any, key: Sequence[str]) -> Any:
    """The *rows* whose key none of *changed* has, in their order.

    >>> without(pa.table({"k": [1, 2], "v": [5, 6]}), pa.table({"k": [2]}), ["k"]).to_pylist()
    [{'k': 1, 'v': 5}]
    """
    numbered, names = _numbered(rows, key)
    keys = changed.select(list(key)).rename_columns(names).cast(numbered.drop_columns([_ROW]).schema)
    kept = numbered.join(keys, names, join_type="left anti")
    return rows.take(kept[_ROW].combine_chunks().sort())


def _numbered(rows: Any, key: Sequence[str]) -> tuple[Any, list[str]]:
    """The key columns of *rows* under other names, and the number of each row."""
    names = [f"key {number}" for number in range(len(key))]
    keys = rows.select(list(key)).rename_columns(names)
    return keys.append_column(_ROW, pa.array(range(rows.num_rows), pa.int64())), names
