"""Checks of what values do not say in msgpack: their class, the time zone of a point in time, which of two equal hours
a local time is.

A value is read as its type has it, or, where the type says nothing, as what msgpack knows. Its bytes are the same then
and later, so that they cannot tell; what looks at the values is compiled from the type, once, and looks only at what
may be another.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import inspect

from exactlyonce.pipeline.schema import record_class
from exactlyonce.pipeline.wire import apart

Check = Callable[[Any], str]
"""What of a value is read as something else, and as what; empty if nothing is."""

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
"""What msgpack itself knows."""
_RECORDS = (inspect.StructType, inspect.DataclassType, inspect.NamedTupleType)
_BYTES = (bytes, bytearray, memoryview)
_SEQUENCES = (list, tuple)
_SETS = (set, frozenset)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def inexact(type_: Any, *, by_schema: bool = False) -> Check:
    """The check of values of *type_*. *by_schema*: what this leaves open, a schema says.

    >>> inexact(dict)({"pair": (1, 2)})
    'a value is (1, 2), and is read as [1, 2]'
    """
    return _Compiling(None if by_schema else _loosely).check(inspect.type_info(type_)) or _nothing


def in_utc(type_: Any) -> Callable[[Any], Any] | None:
    """What makes the points in time of a record those of UTC, as its way to another worker does. None: *type_* says of
    no part of it that it is one.

    >>> in_utc(list[datetime.datetime])([datetime.datetime.fromisoformat("2026-07-01T01:30:00+02:00")])
    [datetime.datetime(2026, 6, 30, 23, 30, tzinfo=datetime.timezone.utc)]
    """
    if classes := apart(type_):
        changed = {class_: change for class_, of in classes.items() if (change := in_utc(of)) is not None}
        return (lambda record: changed.get(type(record), _same)(record)) if changed else None
    info = inspect.type_info(type_)
    if not _has_moments(info, set()):
        return None
    found, decode = inexact(type_), msgspec.msgpack.Decoder(type_).decode
    return lambda record: decode(_encode(record)) if found(record) else record


def _same(record: Any) -> Any:
    return record


def _has_moments(info: Any, seen: set[Any]) -> bool:
    """Whether a type is that of points in time, or of what holds some."""
    if isinstance(info, inspect.DateTimeType):
        return True
    if isinstance(info, (*_RECORDS, inspect.TypedDictType)):
        if info.cls in seen:
            return False
        seen.add(info.cls)
        return any(_has_moments(field.type, seen) for field in info.fields)
    inner = (getattr(info, name, None) for name in ("type", "item_type", "key_type", "value_type"))
    several = (*getattr(info, "types", ()), *getattr(info, "item_types", ()))
    return any(_has_moments(each, seen) for each in (*inner, *several) if each is not None)


class _Compiling:
    """Checks of one type; None is one that finds nothing. *of_any* is that of a part whose type says nothing."""

    def __init__(self, of_any: Check | None) -> None:
        self._of_any = of_any
        self._records: dict[Any, Check] = {}
        """By class: those that are being compiled, too, since records may be within themselves."""

    def check(self, info: inspect.Type) -> Check | None:
        """See the class."""
        if isinstance(info, inspect.AnyType):
            return self._of_any
        if isinstance(info, inspect.DateTimeType | inspect.TimeType):
            return _moment
        if isinstance(info, inspect.BytesType):
            return _items((bytes,), None)
        if isinstance(info, inspect.Metadata):
            return self.check(info.type)
        if isinstance(info, inspect.UnionType):
            return self._union(info)
        if isinstance(info, _RECORDS):
            return self._record(info, getattr, record_class(info))
        if isinstance(info, inspect.TypedDictType):
            return self._record(info, dict.get, dict)
        if isinstance(info, inspect.DictType):
            of_keys = _Compiling(_key) if self._of_any is _loosely else self
            return _mapping(of_keys.check(info.key_type), self.check(info.value_type))
        if isinstance(info, inspect.TupleType):
            return _tuple([self.check(each) for each in info.item_types])
        if isinstance(info, inspect.SetType | inspect.FrozenSetType):
            return _items((set if isinstance(info, inspect.SetType) else frozenset,), self.check(info.item_type))
        if isinstance(info, inspect.VarTupleType):
            return _items((tuple,), self.check(info.item_type))
        if isinstance(info, inspect.CollectionType):
            return _items(_SEQUENCES, self.check(info.item_type))
        return None

    def _union(self, info: inspect.UnionType) -> Check | None:
        """A value is looked at as the member that is its class, or that its class is made from."""
        checks = {class_: of for each in info.types if (of := self.check(each)) for class_ in _classes(each)}

        def check(value: Any) -> str:
            if exact := checks.get(type(value)):
                return exact(value)
            return next((of_member(value) for class_, of_member in checks.items() if isinstance(value, class_)), "")

        return check if checks else None

    def _record(self, info: Any, get: Callable[[Any, str], Any], class_: type) -> Check:
        if info.cls in self._records:
            return lambda value: self._records[info.cls](value)
        self._records[info.cls] = _nothing
        fields = [(field.name, self.check(field.type)) for field in info.fields]
        self._records[info.cls] = check = _within(fields, get, class_)
        return check


def _nothing(value: Any) -> str:
    return ""


def _another(value: Any, read: str) -> str:
    if type(value) is msgspec.Raw:  # its bytes were looked at when they were made
        return ""
    return f"a value is {value!r:.100}, and is read as {read}"


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


def _moment(value: Any) -> str:
    """Msgpack, and Avro, keep the point in time; of a local one, not which of two equal hours it is."""
    if type(value) not in (datetime.datetime, datetime.time) or value.tzinfo is datetime.timezone.utc:
        return ""
    if value.fold and (value.tzinfo is None or type(value) is datetime.time):
        return _another(value, f"{value.replace(fold=0)!r}: keep it in UTC")
    if type(value) is datetime.time or value.tzinfo is None or value.tzname() == "UTC":
        return ""
    return _another(value, f"{value.astimezone(datetime.timezone.utc)!r}: keep it in UTC, and its zone beside it")


def _loosely(value: Any) -> str:
    """A value of which its type says nothing."""
    kind = type(value)
    if kind in _PLAIN:
        return ""
    if kind is dict:
        return _first(
            _key(key) or _loosely(each)
            for key, each in value.items()
            if type(each) not in _PLAIN or type(key) is not str
        )
    if kind is list:
        return _first(_loosely(each) for each in value if type(each) not in _PLAIN)
    if kind is datetime.datetime and value.tzinfo is not None:
        return _moment(value)
    return _another(value, f"{_decode(_encode(value))!r:.100}")


def _key(value: Any) -> str:
    """A key of a dict: an array is read as a tuple there."""
    return _first(map(_key, value)) if type(value) is tuple else _loosely(value)


def _mapping(key: Check | None, value: Check | None) -> Check:
    def check(found: Any) -> str:
        if type(found) is not dict:
            return _another(found, "a dict")
        return (key and _first(map(key, found))) or (value and _first(map(value, found.values()))) or ""

    return check


def _items(classes: tuple[type, ...], item: Check | None) -> Check:
    def check(found: Any) -> str:
        if type(found) not in classes:
            return _another(found, f"a {classes[0].__name__}")
        return _first(map(item, found)) if item else ""

    return check


def _tuple(items: list[Check | None]) -> Check:
    checks = [(number, each) for number, each in enumerate(items) if each]

    def check(found: Any) -> str:
        if type(found) is not tuple:
            return _another(found, "a tuple")
        return _first(each(found[number]) for number, each in checks)

    return check


def _within(fields: Iterable[tuple[str, Check | None]], get: Callable[[Any, str], Any], class_: type) -> Check:
    """The check of a record of *class_*, whose *fields* `get` reads; those that are left out have none."""
    checks = [(name, each) for name, each in fields if each]

    def check(record: Any) -> str:
        if type(record) is not class_:
            return _another(record, f"a {class_.__name__}")
        for name, of_field in checks:
            value = get(record, name)
            if value is not None and value is not msgspec.UNSET and (found := of_field(value)):
                return found
        return ""

    return check


def _classes(info: inspect.Type) -> tuple[type, ...]:
    """Of values of a type that has a check."""
    if isinstance(info, inspect.Metadata):
        return _classes(info.type)
    if isinstance(info, _RECORDS):
        return (record_class(info),)
    if isinstance(info, inspect.DateTimeType):
        return (datetime.datetime,)
    if isinstance(info, inspect.TimeType):
        return (datetime.time,)
    if isinstance(info, inspect.BytesType):
        return _BYTES
    if isinstance(info, inspect.DictType | inspect.TypedDictType):
        return (dict,)
    if isinstance(info, inspect.SetType | inspect.FrozenSetType):
        return _SETS
    return _SEQUENCES
