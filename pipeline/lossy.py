"""Checks for what msgpack drops from values: their class, the time zone of a point in time, the fold of a local time.

A value is read back as its type has it, or as one of msgpack's own types. Its bytes do not show a difference, so the
check of a type, compiled once, looks at those parts of the values that may differ.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from exactlyonce.pipeline.records import apart
from exactlyonce.pipeline.shape import Form, Shape, shape_of

Check = Callable[[Any], str]
"""Returns the part of a value that is read back differently, and how; empty if none is."""

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
"""The types of msgpack itself."""
_CLASSES: Mapping[Form, tuple[type, ...]] = {
    Form.DATETIME: (datetime.datetime,),
    Form.TIME: (datetime.time,),
    Form.BYTES: (bytes, bytearray, memoryview),
    Form.DICT: (dict,),
    Form.SET: (set, frozenset),
}
"""The classes of the values of members of a union; lists and tuples for others that have a check."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def lossy(type_: Any) -> Check:
    """The check of values of *type_*.

    >>> lossy(dict)({"pair": (1, 2)})
    'a value is (1, 2), and is read as [1, 2]'
    """
    return _Compiling(_loosely).check(shape_of(type_)) or _nothing


def in_utc(type_: Any) -> Callable[[Any], Any] | None:
    """A function that converts the points in time of a record to UTC, as a transfer between workers does. None:
    *type_* has no such part.

    >>> in_utc(list[datetime.datetime])([datetime.datetime.fromisoformat("2026-07-01T01:30:00+02:00")])
    [datetime.datetime(2026, 6, 30, 23, 30, tzinfo=datetime.timezone.utc)]
    """
    if classes := apart(type_):
        changed = {class_: change for class_, of in classes.items() if (change := in_utc(of)) is not None}
        if not changed:
            return None
        return lambda record: changed[type(record)](record) if type(record) in changed else record
    if not _has_moments(shape_of(type_), set()):
        return None
    check, decode = lossy(type_), msgspec.msgpack.Decoder(type_).decode
    return lambda record: decode(_encode(record)) if check(record) else record


def _has_moments(shape: Shape, seen: set[Shape]) -> bool:
    """Whether values are points in time, or contain one."""
    if shape in seen:
        return False
    seen.add(shape)
    inner = (*shape.parts, *(field.shape for field in shape.fields))
    return shape.form is Form.DATETIME or any(_has_moments(part, seen) for part in inner)


class _Compiling:
    """Compiles the check of one type; None: there is nothing to check. *of_any* checks parts without a type."""

    def __init__(self, of_any: Check) -> None:
        self._of_any = of_any
        self._records: dict[Shape, Check] = {}
        """The checks of records, also unfinished ones, since these may be recursive."""

    def check(self, shape: Shape) -> Check | None:
        match shape.form:
            case Form.ANY:
                return self._of_any
            case Form.DATETIME | Form.TIME:
                return _moment
            case Form.BYTES:
                return _items((bytes,), None) if shape.type is bytes else None
            case Form.UNION:
                return self._union(shape)
            case Form.RECORD:
                return self._record(shape)
            case Form.DICT:
                of_keys = _Compiling(_key) if self._of_any is _loosely else self
                return _mapping(of_keys.check(shape.parts[0]), self.check(shape.parts[1]))
            case Form.TUPLE:
                return _tuple([self.check(item) for item in shape.parts])
            case Form.LIST | Form.SET:
                classes = (list, tuple) if shape.type is list else (shape.type,)
                return _items(classes, self.check(shape.parts[0]))
        return None

    def _union(self, shape: Shape) -> Check | None:
        """The check of a union: by the member that is the value's class, or a base of it."""
        checks = {class_: of for member in shape.parts if (of := self.check(member)) for class_ in _classes(member)}

        def check(value: Any) -> str:
            if exact := checks.get(type(value)):
                return exact(value)
            return next((of_member(value) for class_, of_member in checks.items() if isinstance(value, class_)), "")

        return check if checks else None

    def _record(self, shape: Shape) -> Check:
        if shape in self._records:
            return lambda value: self._records[shape](value)
        self._records[shape] = _nothing
        fields = [(field.attribute, self.check(field.shape)) for field in shape.fields]
        self._records[shape] = check = _within(fields, dict.get if shape.is_mapping else getattr, shape.cls)
        return check


def _nothing(value: Any) -> str:
    return ""


def _another(value: Any, read: str) -> str:
    if type(value) is msgspec.Raw:  # its bytes were checked when they were made
        return ""
    return f"a value is {value!r:.100}, and is read as {read}"


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")


def _moment(value: Any) -> str:
    """Msgpack and Avro keep the point in time, but not the fold of a local time."""
    if type(value) not in (datetime.datetime, datetime.time) or value.tzinfo is datetime.timezone.utc:
        return ""
    if value.fold and (value.tzinfo is None or type(value) is datetime.time):
        return _another(value, f"{value.replace(fold=0)!r}: keep it in UTC")
    if type(value) is datetime.time or value.tzinfo is None or value.tzname() == "UTC":
        return ""
    return _another(value, f"{value.astimezone(datetime.timezone.utc)!r}: keep it in UTC, and its zone beside it")


def _loosely(value: Any) -> str:
    """The check of a value without a type."""
    kind = type(value)
    if kind in _PLAIN:
        return ""
    if kind is dict:
        return _first(
            _key(key) or _loosely(item)
            for key, item in value.items()
            if type(item) not in _PLAIN or type(key) is not str
        )
    if kind is list:
        return _first(_loosely(item) for item in value if type(item) not in _PLAIN)
    if kind is datetime.datetime and value.tzinfo is not None:
        return _moment(value)
    return _another(value, f"{_decode(_encode(value))!r:.100}")


def _key(value: Any) -> str:
    """The check of a dict's key, where an array is read as a tuple."""
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
    checks = [(number, item) for number, item in enumerate(items) if item]

    def check(found: Any) -> str:
        if type(found) is not tuple:
            return _another(found, "a tuple")
        return _first(item(found[number]) for number, item in checks)

    return check


def _within(fields: Iterable[tuple[str, Check | None]], get: Callable[[Any, str], Any], class_: type) -> Check:
    """The check of a record of *class_*, whose *fields* `get` reads."""
    checks = [(name, field) for name, field in fields if field]

    def check(record: Any) -> str:
        if type(record) is not class_:
            return _another(record, f"a {class_.__name__}")
        for name, of_field in checks:
            value = get(record, name)
            if value is not None and value is not msgspec.UNSET and (problem := of_field(value)):
                return problem
        return ""

    return check


def _classes(shape: Shape) -> tuple[type, ...]:
    return (shape.cls,) if shape.form is Form.RECORD else _CLASSES.get(shape.form, (list, tuple))
