"""The losses and gaps when values of one schema are read by another one. Schemas come from `shape.describe`.

`lost` compares schemas; `changed` checks whether the dropped fields of a value have their defaults.

Invariant: the schemas alone show everything that msgspec silently drops: fields that a record no longer has, keys of a
dict that has become a record, items without their place, equal items of a set, keys and items that become equal, digits
of a text that is read as a time, omitted defaults. Integers that become floats are rounded, as by Avro's rules, unless
they are keys. Decoding finds values that msgspec refuses; `unfit` knows some of them beforehand. A schema describes a
record once and names it elsewhere; if two records share a name, both are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from exactlyonce.pipeline.shape import Field, Form, Shape, builtins_of, described_shape

_WITH_PARTS = {Form.RECORD, Form.DICT, Form.LIST, Form.SET, Form.TUPLE, Form.ANY}
_ALONE = {Form.BOOL, Form.INT, Form.FLOAT, Form.STR, Form.BYTES}
"""The forms that read no other."""
_TIMES = {Form.DATETIME, Form.TIME, Form.TIMEDELTA}
_TEXTS = {Form.STR, Form.ANY}
_PARSED = _TIMES | {Form.DECIMAL, Form.UUID}
_MERGED = {Form.STR: _PARSED, Form.INT: {Form.FLOAT}, Form.ANY: _PARSED | {Form.FLOAT}}
"""By scalar, the forms that read several values as one: "1.0" and "1.00", and integers beyond 2^53."""


def has_default(field: Field) -> bool:
    """Whether a schema has the default of a field."""
    return field.default is not msgspec.NODEFAULT


def lost(old: Any, new: Any, path: str, may_go: Callable[[Field], bool] = lambda field: False) -> list[str]:
    """The paths in values of schema *old* that *new* has no place for. Decoding finds all other differences.

    *may_go*: whether a record may lose this field, which is then left out. In keys of dicts and items of sets none may:
    different ones would become equal.

    >>> lost({"dict": ["str", "int"]}, {"record": "Total", "fields": [["sum", "int"]]}, "Total")
    ['Total (its keys beside sum)']
    """
    return list(dict.fromkeys(_Evolution(may_go).lost(described_shape(old), described_shape(new), path)))


def changed(value: Any, old: Shape, new: Shape, path: str) -> list[str]:
    """The paths of fields in *value* that *new* drops and that do not have their defaults. Other findings of `lost` are
    left out. *value* is the plain msgpack value of *old*, a `described_shape` as *new* is: many values have one.

    >>> old = {"record": "R", "fields": [["a", "int"], ["b", {"optional": "int", "default": 0}]]}
    >>> old, new = described_shape(old), described_shape({"record": "R", "fields": [["a", "int"]]})
    >>> [changed({"a": 1, "b": b}, old, new, "R") for b in (0, 7)]
    [[], ['R.b']]
    """
    return list(dict.fromkeys(_changed(value, old, new, path)))


def unfit(old: Any, new: Any, path: str) -> list[str]:
    """The fields of schema *new* that values of *old* surely do not fill. Decoding finds others.

    >>> unfit({"record": "Total", "fields": []}, {"record": "Total", "fields": [["sum", "int"]]}, "Total")
    ['Total.sum is new and has no default']
    """
    return list(_unfit(described_shape(old), described_shape(new), path, set()))


class _Evolution:
    """What is lost."""

    def __init__(self, may_go: Callable[[Field], bool]) -> None:
        self._may_go = may_go
        self._compared: set[tuple[Shape, Shape, bool]] = set()
        """The compared pairs of records, which may be recursive; whether they are keys."""

    def lost(self, old: Shape, new: Shape, path: str, *, keyed: bool = False) -> Iterator[str]:
        """See the function. *keyed*: the values are keys of a dict or items of a set, or within them: equal ones become
        one."""
        olds, news = old.members, new.members
        tagged = sum(one.tag is not None for one in olds)
        for one in olds:
            for other in news:
                if one not in news and (what := _not_told(one.form, other.form, keyed)):
                    yield f"{path} ({what})"
                if not _may_be_read(one, other):
                    continue
                if tagged > 1 and other.tag is None and other.form is Form.RECORD:
                    yield f"{path} (which of {tagged} records it is)"
                if other.form is Form.SET and one.form is not Form.SET:
                    yield f"{path} (its items that occur more than once)"
                yield from self._between(one, other, path, keyed)

    def _between(self, one: Shape, other: Shape, path: str, keyed: bool) -> Iterator[str]:
        """The losses when *one* is read as *other*; neither is a union."""
        if one.form is Form.RECORD and other.form in (Form.RECORD, Form.ANY):
            if (one, other, keyed) in self._compared:
                return
            self._compared.add((one, other, keyed))
        if one.form is Form.RECORD and other.form in (Form.ANY, Form.DICT) and any(map(_is_omitted, one.fields)):
            yield f"{path} (its fields that omit_defaults has left out)"
        match other.form:
            case Form.RECORD:
                yield from self._in_record(one, other, path, keyed)
            case Form.ANY:
                for part in (*one.parts, *_field_shapes(one)):
                    yield from self.lost(part, other, path, keyed=keyed)
            case Form.DICT:
                keys, values = other.parts
                if one.form in (Form.DICT, Form.ANY):
                    yield from self.lost(one.parts[0] if one.form is Form.DICT else one, keys, path, keyed=True)
                for value in _values(one):
                    yield from self.lost(value, values, path, keyed=keyed)
            case Form.TUPLE if one.form is Form.TUPLE:
                for item, to in zip(one.parts, other.parts, strict=False):
                    yield from self.lost(item, to, path, keyed=keyed)
            case _:
                for value in _values(one):
                    for to in _values(other):
                        yield from self.lost(value, to, path, keyed=keyed or other.form is Form.SET)

    def _in_record(self, one: Shape, record: Shape, path: str, keyed: bool) -> Iterator[str]:
        fields = {field.name: field for field in record.fields}
        if one.form is Form.RECORD:
            names = [field.name for field in one.fields]
            has_other_tag = one.is_array and (one.tag is None) != (record.tag is None)
            if record.is_array and (names != list(fields)[: len(names)] or has_other_tag):
                yield f"{path} (its fields are stored by position)"
                return
            for field in one.fields:
                if field.name in fields:
                    if field.is_omitted and not _is_same_default(field, fields[field.name]):
                        yield f"{path}.{field.name} (its {field.default!r:.40} that omit_defaults has left out)"
                    yield from self.lost(field.shape, fields[field.name].shape, f"{path}.{field.name}", keyed=keyed)
                elif keyed or not self._may_go(field):
                    yield f"{path}.{field.name}"
        elif one.form is Form.TUPLE and len(one.parts) <= len(fields):
            for item, field in zip(one.parts, record.fields, strict=False):
                yield from self.lost(item, field.shape, f"{path}.{field.name}", keyed=keyed)
        else:
            what = {Form.DICT: "keys", Form.ANY: "content"}.get(one.form, "items")
            yield f"{path} (its {what} beside {', '.join(fields) or 'nothing'})"


def _changed(value: Any, old: Shape, new: Shape, path: str) -> Iterator[str]:
    """See the function."""
    for one in old.members:
        for other in new.members if _may_be(value, one) else ():
            if _may_be_read(one, other) and other.form is not Form.ANY:
                yield from _changed_between(value, one, other, path)


def _changed_between(value: Any, one: Shape, other: Shape, path: str) -> Iterator[str]:
    """See `changed`; neither is a union, and *value* may be of *one*."""
    if one.form is other.form is Form.RECORD:
        yield from _changed_in_record(value, one, other, path)
        return
    items = value.values() if isinstance(value, dict) else value
    for place, item in enumerate(items):
        for was in _values_at(one, place, value):
            for now in _values_at(other, place, value):
                yield from _changed(item, was, now, path)


def _changed_in_record(value: Any, one: Shape, other: Shape, path: str) -> Iterator[str]:
    was = {field.name: field for field in one.fields}
    now = {field.name: field.shape for field in other.fields}
    tag = None if one.tag is None else one.tag[0]
    if isinstance(value, list):  # by position, where no field goes: a tag stands in front
        value = dict(zip(was, value[tag is not None :], strict=False))
    for name, content in value.items():
        if name in now:
            yield from _changed(content, was[name].shape, now[name], f"{path}.{name}") if name in was else ()
        elif name != tag and not (name in was and _is_equal(builtins_of(content), was[name].default)):
            yield f"{path}.{name}"


def _unfit(old: Shape, new: Shape, path: str, compared: set[tuple[Shape, Shape]]) -> Iterator[str]:
    """See the function."""
    if len(old.members) != 1 or len(new.members) != 1:
        return
    (old,), (new,) = old.members, new.members
    was, now = _form(old), _form(new)
    array_alone = {was, now} == {"a list", "a record"} and old.form is new.form is Form.RECORD
    if was and now and was != now and (was, now) != ("int", "float") and not array_alone:
        yield f"{path} is {now} now, and was {was}"
        return
    if (old, new) in compared:
        return
    compared.add((old, new))
    fields = {field.name: field for field in old.fields}
    for field in new.fields if old.form is Form.RECORD else ():
        name, inner = field.name, f"{path}.{field.name}"
        if not field.required:
            yield from _unfit(fields[name].shape, field.shape, inner, compared) if name in fields else ()
        elif name not in fields:
            yield f"{inner} is new and has no default"
        elif not fields[name].required:  # values from before the field may lie beside newer ones
            yield f"{inner} has lost its default"
        else:
            yield from _unfit(fields[name].shape, field.shape, inner, compared)


def _is_omitted(field: Field) -> bool:
    return field.is_omitted


def _is_same_default(was: Field, now: Field) -> bool:
    """Whether *was* and *now* have the same omitted default: a type that always writes its fields does not tell it."""
    return now.is_omitted and [type(was.default), was.default] == [type(now.default), now.default]


def _not_told(one: Form, other: Form, keyed: bool) -> str:
    """The loss when scalar *one* is read as scalar *other*; else empty."""
    if keyed and other in _MERGED.get(one, ()):
        return f"its keys or items that are the same {other.value}"
    return f"details of its texts that a {other.value} lacks" if one in _TEXTS and other in _TIMES else ""


def _may_be_read(one: Shape, other: Shape) -> bool:
    """Whether *other* may read *one*, and lose something. Records of either layout are compared: older schemas do not
    tell that a NamedTuple's fields are written by position."""
    if one.form not in _WITH_PARTS or other.form not in _WITH_PARTS:
        return False
    if other.form is Form.ANY:
        return one.form is not Form.ANY
    if one.form is other.form is Form.RECORD:
        was, now = one.tag, other.tag  # a field, and its value
        return was is None or now is None or was == now or was[0] != now[0]
    return one.form is Form.ANY or _is_map(one) == _is_map(other)


def _is_map(shape: Shape) -> bool:
    """Whether its values are maps in msgpack, and not arrays."""
    return shape.form is Form.DICT or (shape.form is Form.RECORD and not shape.is_array)


def _field_shapes(shape: Shape) -> Iterable[Shape]:
    return (field.shape for field in shape.fields)


def _values(shape: Shape) -> list[Shape]:
    """The parts of a value, without the keys of a dict; anything may be in a value of any type."""
    if shape.form is Form.ANY:
        return [shape]
    return [*(shape.parts[1:] if shape.form is Form.DICT else shape.parts), *_field_shapes(shape)]


def _values_at(shape: Shape, place: int, value: Any) -> list[Shape]:
    """The shape of the item at *place* of *value*."""
    if shape.form is Form.RECORD and isinstance(value, dict):
        return [field.shape for field in shape.fields if field.name == list(value)[place]]
    values = _values(shape)
    return values[place : place + 1] if shape.form in (Form.RECORD, Form.TUPLE) else values


def _may_be(value: Any, shape: Shape) -> bool:
    """Whether *value*, from msgpack, may be of *shape*, which is no union, and may hold records."""
    if shape.form not in _WITH_PARTS or shape.form is Form.ANY:
        return False
    if not isinstance(value, dict if _is_map(shape) else list):
        return False
    if shape.tag is None:
        return True
    field, tag = shape.tag
    return bool((value.get(field) if isinstance(value, dict) else next(iter(value), None)) == tag)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values in builtin types are equal; True is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _form(shape: Shape) -> str:
    """The form of values, which reads no other; empty if it has several."""
    if shape.form is Form.RECORD:
        return "a list" if shape.is_array else "a record"
    if shape.form in (Form.LIST, Form.SET, Form.TUPLE):
        return "a list"
    return shape.form.value if shape.form in _ALONE else ""
