"""The fields of a record's type as columns: of a table, a typed file or an Arrow batch.

A record is a msgspec Struct, a dataclass, a NamedTuple or a TypedDict; a column has the field's name on the wire. A
`RowField` is a column of a database, which has JSON for what it has no type for; a `Column` is one of a typed file or
of Arrow, with lists, dicts and records in it.

Invariants: the values of a `RowField` are None or of the exact classes of its kind, so no encoder checks types again.
Those of a `Column` are None, or of the class that its form is written from; none is rounded, cut or moved to another
time zone. Pure: it knows no library that writes files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Context, Decimal
from enum import Enum
from types import NoneType
from typing import Any, get_origin
from uuid import UUID

import msgspec

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.changes import holds_changes
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import Field, Form, Shape, UnsupportedType, describe, shape_of, type_name

CLASSES: Mapping[Form, type] = {
    Form.BOOL: bool,
    Form.INT: int,
    Form.FLOAT: float,
    Form.STR: str,
    Form.BYTES: bytes,
    Form.DECIMAL: Decimal,
    Form.DATETIME: datetime,
    Form.DATE: date,
    Form.TIME: time,
    Form.TIMEDELTA: timedelta,
    Form.UUID: UUID,
}
"""By form: the class of a scalar's values."""


class RowField(msgspec.Struct, frozen=True, kw_only=True):
    """A field of a record's type, and its column."""

    name: str
    """The column's: the field's name on the wire."""
    kind: Form
    """A scalar; LIST of scalars, whose kind is *item*; or ANY: dicts, nested records, lists, values of more than one
    kind, as JSON of msgspec. Each database has its column types for it."""
    nullable: bool
    """Whether the type admits None, or an absent field; None is then NULL."""
    item: Form | None = None
    """The kind of a list's values."""
    get: Callable[[Any], Any]
    """Gets the field of a record."""
    shape: Shape

    def values(self, records: Sequence[Any]) -> list[Any]:
        """The field of each record: None, or of exactly the classes of its kind; `TypeError` for any other."""
        try:
            values = list(map(self.get, records))
        except (AttributeError, KeyError, TypeError) as error:
            raise TypeError(f"{self.name}: the record has no such field ({error})") from None
        if self.kind is Form.ANY or set(map(type, values)) <= {CLASSES.get(self.kind)}:
            return values
        if self.item is not None:
            return [None if value is None else self._list(value, self.item) for value in values]
        return [None if value is None else self._exact(value, self.kind) for value in values]

    def _list(self, value: Any, kind: Form) -> list[Any]:
        try:
            items = items_of(value)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        if set(map(type, items)) <= {CLASSES[kind]}:
            return list(items)
        return [None if item is None else self._exact(item, kind) for item in items]

    def _exact(self, value: Any, kind: Form) -> Any:
        try:
            return exactly(value, kind)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None


def items_of(value: Any) -> Collection[Any]:
    """The items of a list, a tuple, a set, an `array.array` or a NumPy array of one dimension; TypeError for any other.

    >>> items_of((1.5, 2.0)), items_of(array("f", [1.5, 2.0]))
    ((1.5, 2.0), [1.5, 2.0])
    """
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, array) or (getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")):
        items: list[Any] = value.tolist()
        return items
    raise TypeError(f"{shown(value)} is {_class(value)}, not a list")


def kind_name(kind: Form) -> str:
    """The kind of a field for people, and in the marks of rows that wait.

    >>> kind_name(Form.ANY), kind_name(Form.STR)
    ('JSON', 'str')
    """
    return {Form.ANY: "JSON", Form.DECIMAL: "Decimal", Form.UUID: "UUID"}.get(kind, kind.value)


def exactly(value: Any, kind: Form) -> Any:
    """*value* in the class of its kind, without loss. TypeError or ValueError if it would be another value.

    >>> exactly(3, Form.FLOAT), exactly(bytearray(b"x"), Form.BYTES)
    (3.0, b'x')
    """
    if isinstance(value, Enum):
        value = value.value
    exact = CLASSES[kind]
    if type(value) is exact:
        return value
    refused = isinstance(value, bool) or (kind is Form.DATE and isinstance(value, datetime))
    if not refused and isinstance(value, exact):
        return _BASE[kind](value)
    if not refused and type(value) is int and kind in (Form.FLOAT, Form.DECIMAL):
        return _from_int(value, exact)
    if kind is Form.BYTES and isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{shown(value)} is {_class(value)}, not {kind_name(kind)}")


def _from_int(value: int, exact: Any) -> Any:
    try:
        number = exact(value)
    except OverflowError:
        raise ValueError(f"{shown(value)} is too large for {exact.__name__}") from None
    if int(number) != value:
        raise ValueError(
            f"{shown(value)} is no {exact.__name__}: the nearest is {shown(int(number))}. Declare the field as int or "
            f"Decimal"
        )
    return number


def fields_of(type_: Any) -> tuple[RowField, ...]:
    """The fields of a record's type, in order. Raises `UnsupportedType` for any other type.

    >>> from typing import NamedTuple
    >>> class Total(NamedTuple):
    ...     customer: str
    ...     cents: int | None
    >>> [(field.name, field.kind.value, field.nullable) for field in fields_of(Total)]
    [('customer', 'str', False), ('cents', 'int', True)]
    """
    if type_ is hints.UNKNOWN:
        raise UnsupportedType(
            "the type of the stream is unknown, and its fields are the columns: annotate what the function returns"
        )
    name = type_name(type_)
    if get_origin(type_) is Record or type_ is Record:
        raise UnsupportedType(
            f"{name} is a value with its key: map it to its value, whose fields are columns; or give a table "
            f"mode='upsert', which also deletes"
        )
    if hints.admits_none(type_):
        raise UnsupportedType(f"{name} admits None, which is no row: filter it first")
    describe(type_)
    shape = shape_of(type_)
    if not shape.fields:
        raise UnsupportedType(
            f"{name} has no fields to be columns: use a msgspec Struct, a dataclass, a NamedTuple or a TypedDict"
        )
    if unchanged := [field.name for field in shape.fields if field.may_be_unchanged]:
        raise UnsupportedType(
            f"{unchanged[0]!r} of {name} may be UNCHANGED, which no column can be: give rows without, filled by a "
            f"stateful_map that keeps the newest value by key"
        )
    return tuple(_row_field(field, absent=shape.is_mapping and not field.required) for field in shape.fields)


def _row_field(field: Field, *, absent: bool) -> RowField:
    """*absent*: whether a record may lack the field."""
    shape = field.shape.without_none
    kind, item = shape.scalar, None
    if kind is None and shape.form in (Form.LIST, Form.SET):
        item = shape.parts[0].without_none.scalar
        kind = None if item is None else Form.LIST
    return RowField(
        name=field.name, kind=kind or Form.ANY, nullable=field.shape.nullable or absent, item=item, get=field.get,
        shape=field.shape,
    )  # fmt: skip


def shown(value: Any) -> str:
    """The start of a value, for an error."""
    if isinstance(value, int) and abs(value) >> 256:
        return f"a number of {value.bit_length()} bits"
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _class(value: Any) -> str:
    return "None" if isinstance(value, NoneType) else type(value).__name__


def _as_datetime(value: datetime) -> datetime:
    return datetime.combine(value.date(), value.timetz(), value.tzinfo)


_BASE: Mapping[Form, Callable[[Any], Any]] = {
    Form.BOOL: bool,
    Form.INT: int.__int__,
    Form.FLOAT: float.__float__,
    Form.STR: lambda value: "".join([value]),
    Form.BYTES: lambda value: b"".join([value]),
    Form.DECIMAL: lambda value: Decimal(value.as_tuple()),
    Form.DATETIME: _as_datetime,
    Form.DATE: lambda value: date(value.year, value.month, value.day),
    Form.TIME: lambda value: time(
        value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold
    ),
    Form.TIMEDELTA: lambda value: timedelta(value.days, value.seconds, value.microseconds),
    Form.UUID: lambda value: UUID(int=value.int),
}
"""By kind: converts a value of a subclass to the class itself."""


# --- typed columns ----------------------------------------------------------------------------------------------------

Conversion = Callable[[Any], Any]
"""Gives the value to write for one that is not None. Raises TypeError or ValueError for a value that does not fit."""
_REFUSALS = (AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class Column:
    """A field with its conversion."""

    field: RowField
    shape: Shape
    """See `plain`."""
    convert: Conversion

    @property
    def is_scalar(self) -> bool:
        """Whether its values have no parts."""
        return self.shape.form not in (Form.LIST, Form.DICT, Form.RECORD)

    def values(self, records: Sequence[Any]) -> list[Any]:
        """The column of these records; the writer of the format checks for None."""
        values = self.field.values(records) if self.is_scalar else list(map(self.field.get, records))
        if self.is_scalar and self.shape.form is self.field.kind and self.shape.form not in _AS_WRITTEN:
            return values  # of exactly the form's class
        try:
            return [None if value is None else self.convert(value) for value in values]
        except _REFUSALS as error:
            raise self._named(error) from None

    def within(self, record: Any) -> Any:
        """The column of a record within a record; ValueError for a None that the type does not admit."""
        try:
            value = self.field.get(record)
            if value is None and not self.field.nullable:
                raise ValueError("None, which the type does not admit")
            return None if value is None else self.convert(value)
        except _REFUSALS as error:
            raise self._named(error) from None

    def _named(self, error: Exception) -> Exception:
        kind = TypeError if isinstance(error, AttributeError | KeyError | TypeError) else ValueError
        return kind(f"{self.field.name}: {error}")


def columns_of(type_: Any) -> tuple[Column, ...]:
    """The columns of a record's type. Raises `UnsupportedType` for a type that no typed file can hold."""
    if holds_changes(type_):
        raise UnsupportedType(
            "a Change has a key of any type, which Parquet and Avro do not have: map it to a record of your own, as "
            "its row, change.after, with change.op; or give a table mode='upsert', which knows deletes"
        )
    return _columns(type_, (), "")


def columns_or_value(type_: Any) -> tuple[Column, ...]:
    """`columns_of` a record's type; of any other one column, `value`. Raises `UnsupportedType`.

    >>> [column.field.name for column in columns_or_value(int)]
    ['value']
    """
    if type_ is hints.UNKNOWN or get_origin(type_) is Record or type_ is Record or shape_of(type_).fields:
        return columns_of(type_)
    own = shape_of(type_)
    kind = own.without_none.scalar or Form.ANY
    field = RowField(name=VALUE, kind=kind, nullable=own.nullable, get=lambda value: value, shape=own)
    return (Column(field, plain(own, VALUE), _conversion(own, (), VALUE)),)


DECIMAL_DIGITS, DECIMAL_SCALE = 38, 18
"""The type of every decimal, as Spark's default."""
_DIGITS = Context(prec=DECIMAL_DIGITS)


def without_zeros(number: Decimal) -> Decimal:
    """*number* without the zeros at its end, which a column adds: with them it would be another key.

    >>> without_zeros(Decimal("120.500")), without_zeros(Decimal("100.000"))
    (Decimal('120.5'), Decimal('100'))
    >>> without_zeros(Decimal("12345678901234567890.123456789012345670"))
    Decimal('12345678901234567890.12345678901234567')
    """
    number = number.normalize(_DIGITS)
    return number.quantize(1, context=_DIGITS) if number == number.to_integral_value() else number


VALUE = "value"
"""The column of records without fields."""


def plain(shape: Shape, where: str = "") -> Shape:
    """The values other than None as typed files have them: scalars, a list, a dict or a record. Raises
    `UnsupportedType`.

    A datetime has a time zone, unless its type says that it has none. *where* names the field.
    """
    others = [member for member in shape.members if member.form is not Form.NULL]
    forms = {member.scalar for member in others}
    if len(others) > 1 and forms != {Form.INT, Form.FLOAT}:
        raise UnsupportedType(f"{where} has values of several types: give it one, as str with JSON in it")
    own = others[0] if others else shape
    form = Form.FLOAT if len(others) > 1 else own.scalar
    match form or own.form:
        case Form.DICT | Form.RECORD:
            return own
        case Form.LIST | Form.SET:
            return Shape(Form.LIST, list, own.parts)
        case Form.DATETIME:
            return replace(own, tz=own.tz is not False)
        case Form.TIMEDELTA:
            advice = "write a duration as an int, of microseconds for instance"
        case Form.TUPLE:
            advice = "a tuple of several types is a NamedTuple with names"
        case _ if form is not None:
            return Shape(form, None)
        case _:
            advice = (
                "declare its type, as in dict[str, int]; that of a stream's key is what the function of key_by is "
                "annotated to return"
            )
    raise UnsupportedType(f"{where} has a type that Parquet and Avro do not have: {advice}")


def _columns(type_: Any, around: tuple[Shape, ...], where: str) -> tuple[Column, ...]:
    """The columns of a record within the records *around*, at the path *where*."""
    paths = [(field, f"{where}.{field.name}".lstrip(".")) for field in fields_of(type_)]
    around = (*around, shape_of(type_))
    return tuple(
        Column(field, plain(field.shape, path), _conversion(field.shape, around, path)) for field, path in paths
    )


def _conversion(shape: Shape, around: tuple[Shape, ...], where: str) -> Conversion:
    own = plain(shape, where)
    if own in around:
        raise UnsupportedType(f"{where} is a {own.cls.__name__} within itself, which has no end in a typed file")
    match own.form:
        case Form.RECORD:
            columns = _columns(own.type, around, where)
            return lambda value: {column.field.name: column.within(value) for column in columns}
        case Form.LIST:
            return _list(_items(own.parts[0], around, f"{where} (item)"))
        case Form.DICT:
            keys = _items(own.parts[0], around, f"{where} (key)")
            values = _items(own.parts[1], around, f"{where} (value)")
            return lambda value: dict(zip(keys(list(value)), values(list(value.values())), strict=True))
    as_written = _AS_WRITTEN.get(own.form)
    if as_written is None:
        return lambda value: exactly(value, own.form)
    return lambda value: as_written(exactly(value, own.form), own)


def _items(shape: Shape, around: tuple[Shape, ...], where: str) -> Callable[[list[Any]], list[Any]]:
    """Converts the items of a list, the keys or the values of a dict."""
    convert, form = _conversion(shape, around, where), plain(shape, where).form
    exact, nullable = CLASSES.get(form) if form not in _AS_WRITTEN else None, shape.nullable

    def items(values: list[Any]) -> list[Any]:
        if set(map(type, values)) <= {exact}:
            return values
        if not nullable and None in values:
            raise ValueError("None is in it, which the type does not admit")
        return [None if value is None else convert(value) for value in values]

    return items


def _list(items: Callable[[list[Any]], list[Any]]) -> Conversion:
    def convert(value: Any) -> list[Any]:
        return items(list(items_of(value)))

    return convert


def _datetime(value: datetime, shape: Shape) -> datetime:
    if value.tzinfo is None and shape.tz:
        raise ValueError(f"{value} has no time zone: give it one, or declare Annotated[datetime, Meta(tz=False)]")
    if value.tzinfo is not None and not shape.tz:
        raise ValueError(f"{value} has a time zone, and the type says that there is none")
    return value


def _time_of_day(value: time, shape: Shape) -> time:
    if value.tzinfo is not None:
        raise ValueError(f"{value} has a time zone, which a time of day in Parquet lacks")
    return value


_AS_WRITTEN: dict[Form, Callable[[Any, Shape], Any]] = {
    Form.DATETIME: _datetime,
    Form.TIME: _time_of_day,
    Form.UUID: lambda value, _: str(value),
}
"""By form: a check of a value, or its text."""
