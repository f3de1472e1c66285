"""Records as Arrow record batches, and back, by the columns of their type.

Only what needs pyarrow imports this module: a pipeline without it starts without it. Invariants: a value of a column
comes back as it went in, but that a datetime is in UTC. Data of another type is cast to a column's only if no value
changes; any other difference is a `BatchMismatch`.
"""

from __future__ import annotations

import inspect
from array import array as c_array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Optional, TypedDict

import msgspec
import pyarrow as pa

from exactlyonce.pipeline.columns import (
    CLASSES,
    DECIMAL_DIGITS,
    DECIMAL_SCALE,
    Column,
    columns_of,
    columns_or_value,
    plain,
    without_zeros,
)
from exactlyonce.pipeline.map_batches import ROW
from exactlyonce.pipeline.shape import Form, Shape, UnsupportedType, shape_of

_is = pa.types
_SCALARS = {
    Form.BOOL: pa.bool_(),
    Form.INT: pa.int64(),
    Form.FLOAT: pa.float64(),
    Form.STR: pa.string(),
    Form.BYTES: pa.binary(),
    Form.DECIMAL: pa.decimal128(DECIMAL_DIGITS, DECIMAL_SCALE),
    Form.DATE: pa.date32(),
    Form.TIME: pa.time64("us"),
    Form.UUID: pa.string(),
}


def arrow_type(shape: Shape) -> Any:
    """The Arrow type of values other than None."""
    shape = plain(shape)
    match shape.form:
        case Form.LIST:
            return pa.list_(arrow_type(shape.parts[0]))
        case Form.DICT:
            return pa.map_(*map(arrow_type, shape.parts))
        case Form.RECORD:
            return pa.struct([_field(column) for column in columns_of(shape.type)])
        case Form.DATETIME:
            return pa.timestamp("us", tz="UTC" if shape.tz else None)
    return _SCALARS[shape.form]


def _field(column: Column) -> Any:
    return pa.field(column.field.name, arrow_type(column.shape), nullable=column.field.nullable)


def arrow_schema(columns: Sequence[Column]) -> Any:
    """The fields of new batches, files or tables."""
    return pa.schema([_field(column) for column in columns])


class ArrowEncoder:
    """Makes record batches of records, by these columns. *schema*: their Arrow fields, where a table has them
    already."""

    def __init__(self, columns: Sequence[Column], schema: Any = None) -> None:
        self._columns = columns
        self.schema = arrow_schema(columns) if schema is None else schema

    def encode(self, records: Sequence[Any]) -> Any:
        """A `pyarrow.RecordBatch`; TypeError or ValueError for a record that is not of the type."""
        arrays = [self._array(column, records) for column in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _array(self, column: Column, records: Sequence[Any]) -> Any:
        name = column.field.name
        field = self.schema.field(name)
        values = column.values(records)
        try:
            array = pa.array(values, field.type)
        except OverflowError:
            raise ValueError(f"{name}: a number is larger than 64 bits") from None
        except (pa.ArrowException, UnicodeError) as error:
            raise ValueError(f"{name}: {error}") from None
        if array.null_count and not column.field.nullable:
            raise ValueError(f"{name}: None, which the type does not admit")
        if array.null_count and not field.nullable:
            raise ValueError(f"{name}: None, and the column is required")
        if _is.is_float32(field.type) and not array.cast(pa.float64()).equals(pa.array(values, pa.float64())):
            _require_single(name, values)
        return array


def _require_single(name: str, values: Sequence[Any]) -> None:
    """ValueError for a value that 32 bits round; NaN, which equals nothing, is none."""
    for value in values:
        if value is not None and value == value and c_array("f", [value])[0] != value:
            raise ValueError(f"{name}: {value!r} would be rounded, for the column has 32 bits")


# --- from Arrow -------------------------------------------------------------------------------------------------------


class BatchMismatch(Exception):
    """A batch is not as it should be: the text lists the differences."""


class Decoded(NamedTuple):
    """The records of a batch."""

    records: list[Any]
    rows: list[int] | None
    """The place of the record that each stems from; None: one stems from each, in order."""


class ArrowDecoder:
    """Makes records of a type of batches. *schema*: the Arrow fields of the type, where it was made of them."""

    def __init__(self, type_: Any, schema: Any = None) -> None:
        self._columns = columns_or_value(type_)
        self.schema = arrow_schema(self._columns) if schema is None else schema
        decimals = without_zeros if schema is None else None
        self._conversions = [_conversion(column.field.shape, decimals) for column in self._columns]
        self._make = _maker(type_, self._columns)

    def decode(self, data: Any, given: int) -> Decoded:
        """The records of *data*, which a function has made of *given* records: a `pyarrow.RecordBatch`, or what Arrow
        reads. Raises `BatchMismatch`, or ValueError for a value that the type does not admit."""
        batch = _as_batch(data)
        if differences := [*_columns_differ(batch.schema, self.schema)]:
            if ROW not in batch.schema.names and batch.num_rows != given:
                differences.insert(0, _rows_differ(batch.num_rows, given))
            raise BatchMismatch("; ".join(differences))
        rows = _rows_of(batch, given)
        lists = []
        for column, convert in zip(self._columns, self._conversions, strict=True):
            field = self.schema.field(column.field.name)
            values = _cast(batch.column(field.name), field).to_pylist()
            lists.append(values if convert is None else [None if value is None else convert(value) for value in values])
        return Decoded(self._make(lists), rows)


def _as_batch(data: Any) -> Any:
    if isinstance(data, pa.RecordBatch):
        return data
    if not hasattr(data, "__arrow_c_stream__"):
        raise BatchMismatch(f"a pyarrow.RecordBatch wanted, {type(data).__name__} given")
    table = pa.table(data)
    arrays = [pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type) for column in table]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def _rows_differ(returned: int, given: int) -> str:
    return f"rows: {given} given, {returned} returned, without a column `{ROW}` that names the record each is of"


def _rows_of(batch: Any, given: int) -> list[int] | None:
    """The column `ROW` of *batch*, if it has one. Raises `BatchMismatch`."""
    if ROW not in batch.schema.names:
        if batch.num_rows != given:
            raise BatchMismatch(_rows_differ(batch.num_rows, given))
        return None
    column = batch.column(ROW)
    if _is.is_null(column.type) and not batch.num_rows:
        return []
    if not _is.is_integer(column.type) or column.null_count:
        shown = "null" if column.null_count else column.type
        raise BatchMismatch(f"column `{ROW}`: int64 wanted, {shown} given")
    rows: list[int] = column.to_pylist()
    if wrong := [row for row in rows if not 0 <= row < given]:
        raise BatchMismatch(f"column `{ROW}`: 0 to {given - 1} wanted, {wrong[0]} given")
    if fall := next((pair for pair in pairwise(rows) if pair[0] > pair[1]), None):
        raise BatchMismatch(f"column `{ROW}`: the order of the records wanted, {fall[1]} after {fall[0]} given")
    return rows


def _columns_differ(given: Any, wanted: Any) -> Iterator[str]:
    """The differences between two schemas that no cast removes."""
    counts = Counter(given.names)
    for field in wanted:
        if counts[field.name] > 1:
            yield f"column `{field.name}`: given {counts[field.name]} times"
        elif not counts[field.name]:
            yield f"column `{field.name}`: {field.type} wanted, none given"
        elif not _fits(type_ := given.field(field.name).type, field.type):
            yield f"column `{field.name}`: {field.type} wanted, {type_} given"
    for name in counts:
        if name in wanted.names or name == ROW:
            continue
        yield f"column `{name}`: none wanted, {given.field(given.names.index(name)).type} given"


def _is_text(type_: Any) -> bool:
    return bool(_is.is_string(type_) or _is.is_large_string(type_) or _is.is_string_view(type_))


def _is_bytes(type_: Any) -> bool:
    checks = (_is.is_binary, _is.is_large_binary, _is.is_fixed_size_binary, _is.is_binary_view)
    return any(check(type_) for check in checks)


def _is_list(type_: Any) -> bool:
    return bool(_is.is_list(type_) or _is.is_large_list(type_) or _is.is_fixed_size_list(type_))


_KINDS: tuple[Callable[[Any], bool], ...] = (
    _is.is_boolean, _is.is_integer, _is_text, _is_bytes, _is.is_decimal, _is.is_date, _is.is_time,
)  # fmt: skip
"""The types of which each may be cast to each other, if its values allow that."""


def _fits(given: Any, wanted: Any) -> bool:
    """Whether data of type *given* may have the values of a column of type *wanted*."""
    if _is.is_dictionary(given):
        return _fits(given.value_type, wanted)
    if _is.is_null(given) or any(kind(given) and kind(wanted) for kind in _KINDS):
        return True
    if _is.is_floating(wanted):
        narrow = _is.is_floating(given) and given.bit_width <= wanted.bit_width
        return bool(narrow or _is.is_integer(given))
    if _is.is_decimal(wanted):
        return bool(_is.is_integer(given))
    if _is.is_timestamp(wanted):
        return bool(_is.is_timestamp(given)) and (given.tz is None) == (wanted.tz is None)
    if _is_list(wanted):
        return _is_list(given) and _fits(given.value_type, wanted.value_type)
    if _is.is_map(wanted):
        pairs = ((given.key_type, wanted.key_type), (given.item_type, wanted.item_type)) if _is.is_map(given) else ()
        return bool(pairs) and all(_fits(*pair) for pair in pairs)
    if not _is.is_struct(wanted) or not _is.is_struct(given):
        return False
    if [field.name for field in given] != [field.name for field in wanted]:
        return False
    return all(_fits(one.type, other.type) for one, other in zip(given, wanted, strict=True))


def _cast(array: Any, field: Any) -> Any:
    """*array* in the type of *field*. Raises `BatchMismatch` if that would change a value."""
    try:
        array = array if array.type == field.type else array.cast(field.type)
    except pa.ArrowException as error:
        raise BatchMismatch(f"column `{field.name}`: {field.type} wanted, {array.type} given: {error}") from None
    if array.null_count and not field.nullable:
        raise BatchMismatch(f"column `{field.name}`: no null wanted, {array.null_count} given")
    return array


Conversion = Callable[[Any], Any]


def _conversion(shape: Shape, decimals: Conversion | None) -> Conversion | None:
    """Makes of a value, as Arrow gives it, what msgspec converts to one of *shape*; None: it is that already.
    *decimals* is for decimals."""
    shape = shape.without_none
    if shape.form in (Form.LIST, Form.SET):
        item = _conversion(shape.parts[0], decimals)
        return None if item is None else lambda values: [None if value is None else item(value) for value in values]
    if shape.form is Form.DICT:
        key, value = (_conversion(part, decimals) or _same for part in shape.parts)
        return lambda pairs: {key(one): None if other is None else value(other) for one, other in pairs}
    if shape.form is Form.RECORD:
        return _record_conversion(shape, decimals)
    return decimals if shape.form is Form.DECIMAL else None


def _same(value: Any) -> Any:
    return value


def _record_conversion(shape: Shape, decimals: Conversion | None) -> Conversion:
    parts = [(field.name, _conversion(field.shape, decimals) or _same) for field in shape.fields]
    absent, tag = _may_be_absent(shape), shape.tag[1:] if shape.tag else ()

    def convert(record: dict[str, Any]) -> Any:
        values = [(name, None if record[name] is None else part(record[name])) for name, part in parts]
        if shape.is_array:
            return [*tag, *(value for _, value in values)]
        return {name: value for name, value in values if value is not None or name not in absent}

    return convert


def _may_be_absent(shape: Shape) -> set[str]:
    """The fields of a record that are absent where Arrow has null."""
    optional = (field for field in shape.fields if shape.is_mapping and not field.required)
    return {field.name for field in optional if not field.shape.nullable}


def _maker(type_: Any, columns: Sequence[Column]) -> Callable[[list[list[Any]]], list[Any]]:
    """Makes records of the values of their columns."""
    shape, is_exact = shape_of(type_), all(map(_is_exact, columns))
    if not shape.fields:
        return lambda lists: lists[0] if is_exact else msgspec.convert(lists[0], list[type_])
    names = [column.field.name for column in columns]
    if is_exact and shape.is_mapping:
        return lambda lists: [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
    if is_exact and _takes_positions(shape):
        return lambda lists: list(map(shape.cls, *lists))
    if shape.is_array:
        tag = shape.tag[1:] if shape.tag else ()
        return lambda lists: msgspec.convert([(*tag, *row) for row in zip(*lists, strict=True)], list[type_])
    absent = _may_be_absent(shape)

    def convert(lists: list[list[Any]]) -> list[Any]:
        rows = [dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True)]
        if absent:
            rows = [{name: of for name, of in row.items() if of is not None or name not in absent} for row in rows]
        return msgspec.convert(rows, list[type_])

    return convert


_GIVEN_EXACTLY = frozenset({
    Form.BOOL, Form.INT, Form.FLOAT, Form.STR, Form.BYTES, Form.DECIMAL, Form.DATETIME, Form.DATE, Form.TIME
})  # fmt: skip


def _is_exact(column: Column) -> bool:
    """Whether all values of its Arrow type are values of its field."""
    shape = column.field.shape.without_none
    if shape.form not in _GIVEN_EXACTLY or shape.type not in (None, CLASSES[shape.form]):
        return False
    if column.field.nullable and not column.field.shape.nullable:
        return False  # None is an absent field
    return shape.form is Form.DATETIME or not shape.is_constrained  # the Arrow type has the constraint of a datetime


def _takes_positions(shape: Shape) -> bool:
    """Whether the class of a record takes its fields in their order."""
    parameters = [*inspect.signature(shape.cls).parameters.values()]
    by_position = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return by_position and [each.name for each in parameters] == [field.attribute for field in shape.fields]


# --- the type of a schema ---------------------------------------------------------------------------------------------


def record_type(schema: Any) -> Any:
    """The records of a `pyarrow.Schema`: a TypedDict. Raises `UnsupportedType`.

    >>> from exactlyonce.pipeline.shape import describe
    >>> describe(record_type(pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])))
    {'record': 'Row', 'fields': [['id', 'int'], ['name', {'union': ['str', 'null']}]]}
    """
    if not schema.names:
        raise UnsupportedType("the schema has no columns")
    repeated = [name for name, count in Counter(schema.names).items() if count > 1]
    if repeated:
        raise UnsupportedType(f"two columns of the schema are named {repeated[0]!r}: rename one")
    return _typed_dict("Row", schema, "")


def _typed_dict(name: str, fields: Any, where: str) -> Any:
    typed_dict: Any = TypedDict
    return typed_dict(name, {field.name: _type_of(field, f"{where}{field.name}") for field in fields})


def _type_of(field: Any, where: str) -> Any:
    type_ = _not_null(field, field.type, where)
    return Optional[type_] if field.nullable else type_  # noqa: UP045 - made at run time


def _not_null(field: Any, type_: Any, where: str) -> Any:
    if type_ in _TYPES:
        return _TYPES[type_]
    for kind, class_ in _CLASSES.items():
        if kind(type_):
            return class_
    if _is.is_timestamp(type_) and type_.unit != "ns":
        return Annotated[datetime, msgspec.Meta(tz=type_.tz is not None)]
    if _is_list(type_):
        return list[_type_of(type_.value_field, f"{where} (item)")]  # type: ignore[misc]  # made at run time
    if _is.is_map(type_):
        key = _not_null(type_.key_field, type_.key_type, f"{where} (key)")
        return dict[key, _type_of(type_.item_field, f"{where} (value)")]  # type: ignore[misc,valid-type]  # likewise
    if _is.is_struct(type_):
        return _typed_dict(field.name, type_, f"{where}.")
    advice = "use microseconds, as Python's datetime has" if "[ns" in str(type_) else "use another type"
    raise UnsupportedType(f"column {where!r} is {type_}, which no field of a record can be: {advice}")


_TYPES = {pa.time32("s"): time, pa.time32("ms"): time, pa.time64("us"): time}
_CLASSES: Mapping[Callable[[Any], bool], type] = {
    _is.is_boolean: bool,
    _is.is_integer: int,
    _is.is_floating: float,
    _is_text: str,
    _is_bytes: bytes,
    _is.is_decimal: Decimal,
    _is.is_date: date,
}
