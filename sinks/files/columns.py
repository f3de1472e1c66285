"""The fields of a record's type as columns of a typed file: their types, and the conversion of values.

Invariant: a column's values are None, or of the class that its type is written from; none is rounded, cut or moved to
another time zone. Pure: it knows no library that writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time
from typing import Any

from msgspec import inspect

from exactlyonce.pipeline import shape
from exactlyonce.sinks.sql.fields import EXACT, FieldKind, RowField, apart_from_none, exactly, fields_of, shown


@dataclass(frozen=True)
class Scalar:
    """A type without parts. *plain* converts a value of the kind to the class that it is written from."""

    name: str
    kind: FieldKind
    plain: Callable[[Any], Any] | None = None

    def convert(self, value: Any) -> Any:
        """The value to write."""
        if value is None:
            return None
        value = exactly(value, self.kind)
        return value if self.plain is None else self.plain(value)


@dataclass(frozen=True)
class ListOf:
    """A list, or another collection, in its order."""

    item: ColumnType
    nullable: bool
    """Whether its items may be None."""

    def convert(self, value: Any) -> Any:
        """*value* as a list."""
        if value is None:
            return None
        if not isinstance(value, list | tuple | set | frozenset):
            raise TypeError(f"{shown(value)} is {type(value).__name__}, not a list")
        item = self.item
        if isinstance(item, Scalar) and item.plain is None and set(map(type, value)) <= EXACT[item.kind]:
            return list(value)
        return _require_items(list(map(item.convert, value)), self.nullable)


@dataclass(frozen=True)
class MapOf:
    """A dict."""

    key: ColumnType
    value: ColumnType
    nullable: bool
    """Whether its values may be None."""

    def convert(self, value: Any) -> Any:
        """*value* as pairs."""
        if value is None:
            return None
        values = _require_items(list(map(self.value.convert, value.values())), self.nullable)
        return list(zip(map(self.key.convert, value), values, strict=True))


def _require_items(values: list[Any], nullable: bool) -> list[Any]:
    """*values*; ValueError for a None among them that is not *nullable*."""
    if not nullable and None in values:
        raise ValueError("None is in it, which the type does not admit")
    return values


@dataclass(frozen=True)
class Fields:
    """A record within a record."""

    columns: tuple[Column, ...]

    def convert(self, value: Any) -> Any:
        """*value* as a dict."""
        if value is None:
            return None
        return {column.field.name: column.within(value) for column in self.columns}


ColumnType = Scalar | ListOf | MapOf | Fields
_REFUSALS = (AttributeError, KeyError, TypeError, ValueError)


@dataclass(frozen=True)
class Column:
    """A field with its type."""

    field: RowField
    type: ColumnType

    def values(self, records: Sequence[Any]) -> list[Any]:
        """The column of these records; the writer of the format checks for None."""
        values = self.field.values(records) if isinstance(self.type, Scalar) else list(map(self.field.get, records))
        if isinstance(self.type, Scalar) and self.type.plain is None and self.type.kind is self.field.kind:
            return values
        try:
            return list(map(self.type.convert, values))
        except _REFUSALS as error:
            raise self._named(error) from None

    def within(self, record: Any) -> Any:
        """The column of a record within a record; ValueError for a None that the type does not admit."""
        try:
            value = self.field.get(record)
            if value is None and not self.field.nullable:
                raise ValueError("None, which the type does not admit")
            return self.type.convert(value)
        except _REFUSALS as error:
            raise self._named(error) from None

    def _named(self, error: Exception) -> Exception:
        kind = TypeError if isinstance(error, AttributeError | KeyError | TypeError) else ValueError
        return kind(f"{self.field.name}: {error}")


def columns_of(type_: Any) -> tuple[Column, ...]:
    """The columns of a record's type. Raises `UnsupportedType` for a type that no typed file can hold."""
    return _columns(type_, (), "")


def _columns(type_: Any, around: tuple[Any, ...], where: str) -> tuple[Column, ...]:
    """Likewise of a record within the records *around*, at the path *where*."""
    fields = fields_of(type_)
    if not fields:
        raise shape.UnsupportedType(f"{where or shape.type_name(type_)} has no fields, and a typed file needs a column")
    infos: Any = inspect.type_info(type_)
    types = {field.encode_name: field.type for field in infos.fields}
    return tuple(
        Column(field, _type(types[field.name], (*around, type_), f"{where}.{field.name}".lstrip(".")))
        for field in fields
    )


def _type(info: inspect.Type, around: tuple[Any, ...], where: str) -> ColumnType:
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        return _union(info, around, where)
    if isinstance(info, inspect.DictType):
        key, value = _type(info.key_type, around, f"{where} (key)"), _type(info.value_type, around, f"{where} (value)")
        return MapOf(key, value, apart_from_none(info.value_type)[1])
    if isinstance(info, inspect.ListType | inspect.VarTupleType | inspect.SetType | inspect.FrozenSetType):
        return ListOf(_type(info.item_type, around, f"{where} (item)"), apart_from_none(info.item_type)[1])
    if isinstance(info, inspect.StructType | inspect.DataclassType | inspect.NamedTupleType | inspect.TypedDictType):
        if info.cls in around:
            raise shape.UnsupportedType(
                f"{where} is a {info.cls.__name__} within itself, which has no end in a typed file"
            )
        return Fields(_columns(info.cls, around, where))
    if (scalar := _scalar(info)) is not None:
        return scalar
    raise shape.UnsupportedType(f"{where} has a type that Parquet and Avro do not have: {_advice(info)}")


def _union(info: inspect.UnionType, around: tuple[Any, ...], where: str) -> ColumnType:
    types = {_type(member, around, where) for member in info.types if not isinstance(member, inspect.NoneType)}
    if types == {_INT, _FLOAT}:
        return _FLOAT
    if len(types) != 1:
        raise shape.UnsupportedType(f"{where} has values of several types: give it one, as str with JSON in it")
    return types.pop()


def _scalar(info: inspect.Type) -> Scalar | None:
    if isinstance(info, inspect.EnumType | inspect.LiteralType):
        values = [member.value for member in info.cls] if isinstance(info, inspect.EnumType) else info.values
        classes = {type(value) for value in values if value is not None}
        return {frozenset({str}): _STR, frozenset({int}): _INT}.get(frozenset(classes))
    if isinstance(info, inspect.DateTimeType):
        return _LOCAL if info.tz is False else _INSTANT
    if isinstance(info, inspect.TimeType):
        return _TIME
    return _SCALARS.get(type(info))


def _advice(info: inspect.Type) -> str:
    if isinstance(info, inspect.TimeDeltaType):
        return "write a duration as an int, of microseconds for instance"
    if isinstance(info, inspect.TupleType):
        return "a tuple of several types is a NamedTuple with names"
    return "declare its type; that of a key is what the function of key_by is annotated to return"


def _instant(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError(f"{value} has no time zone: give it one, or declare Annotated[datetime, Meta(tz=False)]")
    return value


def _local(value: datetime) -> datetime:
    if value.tzinfo is not None:
        raise ValueError(f"{value} has a time zone, and the type says that there is none")
    return value


def _time_of_day(value: time) -> time:
    if value.tzinfo is not None:
        raise ValueError(f"{value} has a time zone, which a time of day in Parquet lacks")
    return value


_INT, _FLOAT = Scalar("int", FieldKind.INT), Scalar("float", FieldKind.FLOAT)
_STR, _BYTES = Scalar("str", FieldKind.STR), Scalar("bytes", FieldKind.BYTES)
_INSTANT = Scalar("instant", FieldKind.DATETIME, _instant)
_LOCAL = Scalar("local", FieldKind.DATETIME, _local)
_TIME = Scalar("time", FieldKind.TIME, _time_of_day)
_SCALARS = {
    inspect.BoolType: Scalar("bool", FieldKind.BOOL),
    inspect.IntType: _INT,
    inspect.FloatType: _FLOAT,
    inspect.StrType: _STR,
    inspect.BytesType: _BYTES,
    inspect.ByteArrayType: _BYTES,
    inspect.MemoryViewType: _BYTES,
    inspect.DecimalType: Scalar("decimal", FieldKind.DECIMAL),
    inspect.DateType: Scalar("date", FieldKind.DATE),
    inspect.UUIDType: Scalar("str", FieldKind.UUID, str),
}
