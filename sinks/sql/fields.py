"""The fields of a record's type, as the columns of a table get them.

A record is a msgspec Struct, a dataclass, a NamedTuple or a TypedDict; a column has the field's name on the wire. A
change of a table is such a record, or the key of one that is gone.
Invariant: `RowField.values` are None or of the exact classes of the field's kind, so no encoder checks types again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, get_origin
from uuid import UUID

import msgspec

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.changes import Change, KeyForm
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import Field, Form, Shape, UnsupportedType, describe, shape_of, type_name
from exactlyonce.sinks.write_ahead.store import RowEncoder

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
        if not isinstance(value, list | tuple | set | frozenset):
            raise TypeError(f"{self.name}: {shown(value)} is {_class(value)}, not a list")
        return [None if item is None else self._exact(item, kind) for item in value]

    def _exact(self, value: Any, kind: Form) -> Any:
        try:
            return exactly(value, kind)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None


def kind_name(kind: Form) -> str:
    """The kind of a field for people, and in the marks of rows that wait.

    >>> kind_name(Form.ANY), kind_name(Form.STR)
    ('JSON', 'str')
    """
    return {Form.ANY: "JSON", Form.DECIMAL: "Decimal", Form.UUID: "UUID"}.get(kind, kind.value)


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
        raise UnsupportedType(f"{name} is a value with its key: map it to its value, whose fields are columns")
    if hints.admits_none(type_):
        raise UnsupportedType(f"{name} admits None, which is no row: filter it before the sink")
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


class KeyColumns:
    """The columns of a table by which a sink finds its rows.

    Invariant: a key has the classes of its fields, whether it is of a row or of a change whose row is gone.
    """

    def __init__(self, fields: Sequence[RowField], key: Sequence[str]) -> None:
        by_name = {field.name: field for field in fields}
        self.fields = [by_name[name] for name in key]
        self._form = KeyForm([field.shape for field in self.fields])

    def of_rows(self, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The key of each row; `TypeError` for a value of another class."""
        return list(zip(*(field.values(rows) for field in self.fields), strict=True))

    def of_change(self, key: Any) -> tuple[Any, ...]:
        """The key of a change, of `Change.key`; ValueError if it is none of these columns."""
        return tuple([
            value if type(value) is CLASSES[field.kind] else _from_text(value, field.kind, field.name)
            for value, field in zip(self._form.values(key), self.fields, strict=True)
        ])  # fmt: skip


class ChangedRows:
    """Tells changes apart: the rows that are there after them, and the keys whose rows are gone.

    Invariant: the key of a change is that of its row, so a delete finds the row that an insert has written.
    """

    def __init__(self, fields: Sequence[RowField], key: Sequence[str]) -> None:
        self._key = KeyColumns(fields, key)
        self._places = {name: place for place, name in enumerate(key)}

    def gone(self, field: RowField) -> RowField:
        """The *field* of a key that is gone: None unless it is of the key."""
        place = self._places.get(field.name)
        if place is None:
            return msgspec.structs.replace(field, get=lambda key: None, nullable=True)
        return msgspec.structs.replace(field, get=itemgetter(place))

    def parted(self, changes: Sequence[Change[Any]]) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """The rows, and the keys that are gone, each in their order. ValueError as of `keys`."""
        rows = [row for row in map(attrgetter("value"), changes) if row is not None]
        return rows, [key for key, change in zip(self.keys(changes), changes, strict=True) if change.after is None]

    def keys(self, changes: Sequence[Change[Any]]) -> list[tuple[Any, ...]]:
        """The key of each change. ValueError for a truncate, and for a key that is not its row's."""
        keys = [self._key.of_change(change.key) for change in changes]
        rows = list(map(attrgetter("value"), changes))
        there = iter(self._key.of_rows([row for row in rows if row is not None]))
        for key, row in zip(keys, rows, strict=True):
            if row is not None and (own := next(there)) != key:
                names = ", ".join(field.name for field in self._key.fields)
                raise ValueError(
                    f"{names}: the row has {shown(own)}, and the change is of the key {shown(key)}: key= must name the "
                    f"columns of the source's key, in its order, and their fields must be of the columns' types"
                )
        return keys


_SHORT_OFFSET = re.compile(r"[+-]\d\d$")


def _from_text(text: Any, kind: Form, name: str) -> Any:
    """The value of a key's column of *text*, as a database writes it."""
    try:
        if kind is Form.BYTES:
            return bytes.fromhex(text.removeprefix("\\x"))
        if kind is Form.DATETIME and _SHORT_OFFSET.search(text, 11):
            text += ":00"
        return msgspec.convert(text, CLASSES[kind], strict=False)
    except (msgspec.ValidationError, ValueError, AttributeError, TypeError):
        raise ValueError(f"{name}: the change is of the key {shown(text)}, which is no {kind_name(kind)}") from None


class ChangeEncoder:
    """Encodes changes, each as a row by *rows*, or as a key that is gone by *keys*; see `RowEncoder`."""

    def __init__(self, changed: ChangedRows, rows: RowEncoder, keys: RowEncoder) -> None:
        self._changed, self._rows, self._keys = changed, rows, keys

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        rows, keys = self._changed.parted(records)
        written, deleted = iter(self._rows.encode(rows)), iter(self._keys.encode(keys))
        return [next(deleted if change.after is None else written) for change in records]


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
