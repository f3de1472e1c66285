"""The fields of a record's type, as the columns of a table get them.

A record is a msgspec Struct, a dataclass, a NamedTuple or a TypedDict; a column has the field's name on the wire.
Invariant: `RowField.values` are None or of the exact classes of the field's kind, so no encoder checks types again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, get_origin
from uuid import UUID

import msgspec
from msgspec import inspect

from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.records import Record


class FieldKind(Enum):
    """The family of a field's values; each database has its column types for it."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STR = "str"
    BYTES = "bytes"
    DECIMAL = "Decimal"
    DATETIME = "datetime"
    DATE = "date"
    TIME = "time"
    TIMEDELTA = "timedelta"
    UUID = "UUID"
    JSON = "JSON"
    """Dicts, nested records, lists, values of more than one kind, as msgspec writes them."""
    LIST = "list"
    """Lists of scalars, whose kind is `RowField.item`; JSON in a database without arrays."""


EXACT: Mapping[FieldKind, frozenset[type]] = {
    FieldKind.BOOL: frozenset({bool}),
    FieldKind.INT: frozenset({int}),
    FieldKind.FLOAT: frozenset({float}),
    FieldKind.STR: frozenset({str}),
    FieldKind.BYTES: frozenset({bytes}),
    FieldKind.DECIMAL: frozenset({Decimal}),
    FieldKind.DATETIME: frozenset({datetime}),
    FieldKind.DATE: frozenset({date}),
    FieldKind.TIME: frozenset({time}),
    FieldKind.TIMEDELTA: frozenset({timedelta}),
    FieldKind.UUID: frozenset({UUID}),
}
"""By kind: the classes of its values. JSON takes any class; lists are checked one by one."""

_KINDS: Mapping[type[inspect.Type], FieldKind] = {
    inspect.BoolType: FieldKind.BOOL,
    inspect.IntType: FieldKind.INT,
    inspect.FloatType: FieldKind.FLOAT,
    inspect.StrType: FieldKind.STR,
    inspect.BytesType: FieldKind.BYTES,
    inspect.ByteArrayType: FieldKind.BYTES,
    inspect.MemoryViewType: FieldKind.BYTES,
    inspect.DecimalType: FieldKind.DECIMAL,
    inspect.DateTimeType: FieldKind.DATETIME,
    inspect.DateType: FieldKind.DATE,
    inspect.TimeType: FieldKind.TIME,
    inspect.TimeDeltaType: FieldKind.TIMEDELTA,
    inspect.UUIDType: FieldKind.UUID,
}
_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)
_RECORDS = (inspect.StructType, inspect.DataclassType, inspect.NamedTupleType, inspect.TypedDictType)


class RowField(msgspec.Struct, frozen=True, kw_only=True):
    """A field of a record's type, and its column."""

    name: str
    """The column's: the field's name on the wire."""
    kind: FieldKind
    nullable: bool
    """Whether the type admits None, or an absent field; None is then NULL."""
    item: FieldKind | None = None
    """The kind of a list's values; None: they are of no one scalar kind."""
    get: Callable[[Any], Any]
    """Gets the field of a record."""

    def values(self, records: Sequence[Any]) -> list[Any]:
        """The field of each record: None, or of exactly the classes of its kind; `TypeError` for any other."""
        try:
            values = list(map(self.get, records))
        except (AttributeError, KeyError, TypeError) as error:
            raise TypeError(f"{self.name}: the record has no such field ({error})") from None
        if self.kind is FieldKind.JSON or set(map(type, values)) <= EXACT.get(self.kind, frozenset()):
            return values
        if self.kind is FieldKind.LIST:
            return [None if value is None else self._list(value) for value in values]
        return [None if value is None else self._exact(value, self.kind) for value in values]

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple | set | frozenset):
            raise TypeError(f"{self.name}: {shown(value)} is {_class(value)}, not a list")
        kind = self.item
        return list(value) if kind is None else [None if item is None else self._exact(item, kind) for item in value]

    def _exact(self, value: Any, kind: FieldKind) -> Any:
        try:
            return exactly(value, kind)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None


class ColumnTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Converts the values of a field to text for their column, in the language of a database."""

    field: RowField
    table: str
    """Shown in errors, as *type* is."""
    type: str
    nullable: bool
    null: str
    """The text of None."""
    texts: Callable[[list[Any]], Sequence[str]]
    """The texts of values, none of them None; ValueError or TypeError if the column would refuse or change one."""

    def encode(self, records: Sequence[Any]) -> Sequence[str]:
        """The text of each record's value."""
        where = f"(the column of table {self.table} is {self.type}{'' if self.nullable else ' NOT NULL'})"
        try:
            values = self.field.values(records)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{error} {where}") from None
        try:
            if None not in values:
                return self.texts(values) if values else []
            if not self.nullable:
                raise ValueError("None does not fit, for the column is NOT NULL")
            present = [value for value in values if value is not None]
            texts = iter(self.texts(present) if present else ())
            return [self.null if value is None else next(texts) for value in values]
        except (ValueError, TypeError, OverflowError) as error:  # OverflowError: a moment beyond the calendar
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.field.name}: {error} {where}") from None


def exactly(value: Any, kind: FieldKind) -> Any:
    """*value* in the class of its kind, without loss. TypeError or ValueError if it would be another value.

    >>> exactly(3, FieldKind.FLOAT), exactly(bytearray(b"x"), FieldKind.BYTES)
    (3.0, b'x')
    """
    if isinstance(value, Enum):
        value = value.value
    (exact,) = EXACT[kind]
    if type(value) is exact:
        return value
    refused = isinstance(value, bool) or (kind is FieldKind.DATE and isinstance(value, datetime))
    if not refused and isinstance(value, exact):
        return _BASE[kind](value)
    if not refused and type(value) is int and kind in (FieldKind.FLOAT, FieldKind.DECIMAL):
        return _from_int(value, exact)
    if kind is FieldKind.BYTES and isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{shown(value)} is {_class(value)}, not {kind.value}")


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
        raise shape.UnsupportedType(
            "the type of the stream is unknown, and its fields are the columns: annotate what the function returns"
        )
    name = shape.type_name(type_)
    if get_origin(type_) is Record or type_ is Record:
        raise shape.UnsupportedType(f"{name} is a value with its key: map it to its value, whose fields are columns")
    if hints.admits_none(type_):
        raise shape.UnsupportedType(f"{name} admits None, which is no row: filter it before the sink")
    shape.describe(type_)
    info = _plain(inspect.type_info(type_))
    if not isinstance(info, _RECORDS) or not info.fields:
        raise shape.UnsupportedType(
            f"{name} has no fields to be columns: use a msgspec Struct, a dataclass, a NamedTuple or a TypedDict"
        )
    mapping = isinstance(info, inspect.TypedDictType)
    return tuple(_field(field, mapping) for field in info.fields)


def _field(field: inspect.Field, mapping: bool) -> RowField:
    info, nullable = apart_from_none(field.type)
    kind = _scalar(info)
    item = None
    if kind is None and isinstance(info, _LISTS):
        inner, _ = apart_from_none(info.item_type)
        item = _scalar(inner)
        kind = None if item is None else FieldKind.LIST
    get: Callable[[Any], Any] = attrgetter(field.name)
    if mapping:
        get = itemgetter(field.name) if field.required else _get_or_none(field.name)
    return RowField(
        name=field.encode_name,
        kind=kind or FieldKind.JSON,
        nullable=nullable or (mapping and not field.required),
        item=item,
        get=get,
    )


def _get_or_none(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda record: record.get(name)


def _plain(info: inspect.Type) -> inspect.Type:
    """*info* without metadata."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    return info


def apart_from_none(info: inspect.Type) -> tuple[inspect.Type, bool]:
    """The type of the values other than None, and whether None, or any value, is among them."""
    info = _plain(info)
    if isinstance(info, inspect.AnyType | inspect.NoneType):
        return info, True
    if isinstance(info, inspect.LiteralType):
        return info, None in info.values
    if not isinstance(info, inspect.UnionType):
        return info, False
    others = [member for member in map(_plain, info.types) if not isinstance(member, inspect.NoneType)]
    return (others[0] if len(others) == 1 else info), len(others) < len(info.types)


def _scalar(info: inspect.Type) -> FieldKind | None:
    """The kind of a scalar type, of an enum or a literal that of its values; None for any other."""
    if isinstance(info, inspect.EnumType):
        return _kind_of_all([member.value for member in info.cls])
    if isinstance(info, inspect.LiteralType):
        return _kind_of_all([value for value in info.values if value is not None])
    if isinstance(info, inspect.UnionType) and {_scalar(_plain(member)) for member in info.types} == _NUMBERS:
        return FieldKind.FLOAT
    return _KINDS.get(type(info))


def _kind_of_all(values: Sequence[Any]) -> FieldKind | None:
    classes = set(map(type, values))
    if all(issubclass(class_, str) for class_ in classes):
        return FieldKind.STR
    return FieldKind.INT if all(issubclass(class_, int) for class_ in classes) else None


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


_NUMBERS = {FieldKind.INT, FieldKind.FLOAT}
_BASE: Mapping[FieldKind, Callable[[Any], Any]] = {
    FieldKind.BOOL: bool,
    FieldKind.INT: int.__int__,
    FieldKind.FLOAT: float.__float__,
    FieldKind.STR: lambda value: "".join([value]),
    FieldKind.BYTES: lambda value: b"".join([value]),
    FieldKind.DECIMAL: lambda value: Decimal(value.as_tuple()),
    FieldKind.DATETIME: _as_datetime,
    FieldKind.DATE: lambda value: date(value.year, value.month, value.day),
    FieldKind.TIME: lambda value: time(
        value.hour, value.minute, value.second, value.microsecond, value.tzinfo, fold=value.fold
    ),
    FieldKind.TIMEDELTA: lambda value: timedelta(value.days, value.seconds, value.microseconds),
    FieldKind.UUID: lambda value: UUID(int=value.int),
}
"""By kind: converts a value of a subclass to the class itself."""
