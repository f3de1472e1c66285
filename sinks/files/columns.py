"""The fields of a record's type as columns of a typed file: their shapes, and the conversion of values.

Invariant: a column's values are None, or of the class that its form is written from; none is rounded, cut or moved to
another time zone. Pure: it knows no library that writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from typing import Any

from exactlyonce.pipeline.changes import holds_changes
from exactlyonce.pipeline.shape import Form, Shape, UnsupportedType, shape_of
from exactlyonce.sinks.sql.fields import CLASSES, RowField, exactly, fields_of, shown

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
        if not isinstance(value, list | tuple | set | frozenset):
            raise TypeError(f"{shown(value)} is {type(value).__name__}, not a list")
        return items(list(value))

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
