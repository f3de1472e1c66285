"""The rows of a Spark DataFrame, as plain values that msgspec converts to the types of an operator.

Invariants: rows come partition by partition, so that no process holds all of them. A DataFrame that a read of state has
given becomes the states that were read. PySpark is not imported: the DataFrame brings its types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Any

import msgspec

from exactlyonce.pipeline.columns import without_zeros
from exactlyonce.pipeline.shape import Form, Shape, shape_of

KEY, STATE, VALUE = "key", "state", "value"
OF_A_READ = {VALUE, "key_group"}
"""By these columns a read of state is known, whatever others are left of it."""
_SHOWN_AS_TEXT = (Form.STR, Form.TIME, Form.UUID)
_ANY = Shape(Form.ANY, Any)
_Plain = Callable[[Any], Any]


def rows_of(frame: Any, key_type: Any, state_type: Any) -> Iterator[dict[str, Any]]:
    """The rows of *frame* by column: the key, and the state or its fields."""
    is_read = set(frame.columns) >= OF_A_READ and STATE not in frame.columns
    names = {name: STATE if is_read and name == VALUE else name for name in frame.columns}
    state = shape_of(state_type)
    shapes = {field.name: field.shape for field in state.fields} | {KEY: shape_of(key_type), STATE: state}
    columns = {}
    for field in frame.schema.fields:
        name = names[field.name]
        in_json = is_read and not (name == KEY and key_type is Any)  # keys of no known type are as they were read
        columns[field.name] = name, _plain_of(field.dataType, shapes.get(name, _ANY), in_json=in_json)
    for row in frame.toLocalIterator(prefetchPartitions=False):
        yield {name: plain(row[column]) for column, (name, plain) in columns.items()}


def _plain_of(type_: Any, shape: Shape, *, in_json: bool) -> _Plain:
    """The conversion of values of Spark's *type_* to values of *shape*; None stays None.

    *in_json*: what has no type in Spark is text in JSON, as in a read of state.
    """
    convert = _conversion(type_, shape.without_none, in_json)
    return lambda value: None if value is None else convert(value)


def _conversion(type_: Any, shape: Shape, in_json: bool) -> _Plain:
    part = partial(_plain_of, in_json=in_json)
    match type_.typeName():
        case "timestamp":
            return _in_utc
        case "decimal":
            return without_zeros
        case "string" if in_json and shape.scalar not in _SHOWN_AS_TEXT:
            return msgspec.json.decode
        case "array":
            item = part(type_.elementType, shape.parts[0] if shape.form in (Form.LIST, Form.SET) else _ANY)
            return lambda items: [*map(item, items)]
        case "map":
            of_key, of_value = shape.parts if shape.form is Form.DICT else (_ANY, _ANY)
            key, value = part(type_.keyType, of_key), part(type_.valueType, of_value)
            return lambda items: {key(name): value(item) for name, item in items.items()}
        case "struct" if type_.fieldNames() == [f"_{place}" for place in range(1, len(type_.fields) + 1)]:
            of_items = shape.parts if shape.form is Form.TUPLE else [_ANY] * len(type_.fields)
            items = [part(field.dataType, of_item) for field, of_item in zip(type_.fields, of_items, strict=False)]
            return lambda row: tuple(item(value) for item, value in zip(items, row, strict=True))
        case "struct":
            return _record(type_, shape, part)
    return lambda value: value


def _record(type_: Any, shape: Shape, part: Callable[[Any, Shape], _Plain]) -> _Plain:
    """Without the fields that are null for their default: a read of state shows one that was not written so."""
    known = {field.name: field for field in shape.fields}
    fields = {
        field.name: part(field.dataType, known[field.name].shape if field.name in known else _ANY)
        for field in type_.fields
    }
    omitted = {name for name, field in known.items() if not (field.required or field.shape.nullable)}

    def convert(row: Any) -> Any:
        values = {name: plain(row[name]) for name, plain in fields.items()}
        if shape.is_array:
            return tuple(values[field.name] for field in shape.fields)
        return {name: value for name, value in values.items() if value is not None or name not in omitted}

    return convert


def _in_utc(moment: datetime) -> datetime:
    """The same moment; PySpark gives the local time of this process, without a zone."""
    return moment.astimezone(timezone.utc)
