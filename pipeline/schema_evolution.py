"""The losses and gaps when values of one schema are read by another one. Schemas are those of `shape.describe`.

`lost` compares schemas; `changed` checks whether the dropped fields of a value have their defaults.

Invariant: the schemas alone show everything that msgspec silently drops: fields that a record no longer has, keys of a
dict that has become a record, items without their place, equal items of a set, keys and items that become equal, digits
of a text that is read as a time, omitted defaults. Integers that become floats are rounded, as by Avro's rules, unless
they are keys. Decoding finds values that msgspec refuses; `unfit` knows some of them beforehand. A schema describes a
record once and names it elsewhere; if two records share a name, both are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from exactlyonce.pipeline.shape import builtins_of, default_of

_PLAIN = {"bool", "int", "float", "str", "bytes"}
_RECORD, _DICT, _ITEMS, _TUPLE, _ANY = "record", "dict", "items", "tuple", "any"
_TIMES = {"datetime", "time", "timedelta"}
_TEXTS = {"str", "any"}
_MERGED = {"str": _TIMES | {"decimal", "uuid"}, "int": {"float"}, "any": _TIMES | {"decimal", "uuid", "float"}}
"""By scalar, the types that read several values as one: "1.0" and "1.00", and integers beyond 2^53."""
_KINDS = {"record": _RECORD, "dict": _DICT, "list": _ITEMS, "set": _ITEMS, "tuple": _TUPLE}


def _nothing(field: Any) -> bool:
    return False


def has_default(field: Any) -> bool:
    """Whether the schema of a field has its default."""
    return default_of(field) is not msgspec.NODEFAULT


def lost(old: Any, new: Any, path: str, may_go: Callable[[Any], bool] = _nothing) -> list[str]:
    """The paths in values of schema *old* that *new* has no place for. Decoding finds all other differences.

    *may_go*: whether a record may lose a field of this schema, which is then left out. In keys of dicts and items of
    sets none may: different ones would become equal.

    >>> lost({"dict": ["str", "int"]}, {"record": "Total", "fields": [["sum", "int"]]}, "Total")
    ['Total (its keys beside sum)']
    """
    return list(dict.fromkeys(_Evolution(old, new, may_go).lost(old, new, path)))


def changed(value: Any, old: Any, new: Any, path: str) -> list[str]:
    """The paths of fields in *value* that *new* drops and that do not have their defaults. Other findings of `lost` are
    left out. *value* is the plain msgpack value of schema *old*.

    >>> old = {"record": "R", "fields": [["a", "int"], ["b", {"optional": "int", "default": 0}]]}
    >>> new = {"record": "R", "fields": [["a", "int"]]}
    >>> [changed({"a": 1, "b": b}, old, new, "R") for b in (0, 7)]
    [[], ['R.b']]
    """
    return list(dict.fromkeys(_Evolution(old, new).changed(value, old, new, path)))


def unfit(old: Any, new: Any, path: str) -> list[str]:
    """The fields of schema *new* that values of *old* surely do not fill. Decoding finds others.

    >>> unfit({"record": "Total", "fields": []}, {"record": "Total", "fields": [["sum", "int"]]}, "Total")
    ['Total.sum is new and has no default']
    """
    return list(_Evolution(old, new).unfit(old, new, path))


class _Evolution:
    def __init__(self, old: Any, new: Any, may_go: Callable[[Any], bool] = _nothing) -> None:
        self._old, self._new = _records(old), _records(new)
        self._may_go = may_go
        self._compared: set[tuple[int, int, bool]] = set()
        """The compared pairs of records, which may be recursive; whether they are keys."""

    def lost(self, old: Any, new: Any, path: str, *, keyed: bool = False) -> Iterator[str]:
        """See the function. *keyed*: the values are keys of a dict or items of a set, or within them: equal ones become
        one."""
        olds, news = _members(old, self._old), _members(new, self._new)
        tagged = sum("tag" in one for one in olds)
        for one in olds:
            for other in news:
                if one not in news and (what := _not_told(one, other, keyed)):
                    yield f"{path} ({what})"
                if not _may_be_read(one, other):
                    continue
                if tagged > 1 and "tag" not in other and _kind(other) == _RECORD:
                    yield f"{path} (which of {tagged} records it is)"
                if "set" in other and "set" not in one:
                    yield f"{path} (its items that occur more than once)"
                yield from self._between(one, other, path, keyed)

    def _between(self, one: Any, other: Any, path: str, keyed: bool) -> Iterator[str]:
        """The losses when *one* is read as *other*; neither is a union."""
        was, now = _kind(one), _kind(other)
        if was == _RECORD and now in (_RECORD, _ANY):
            if (id(one), id(other), keyed) in self._compared:
                return
            self._compared.add((id(one), id(other), keyed))
        if now == _RECORD:
            yield from self._in_record(one, other, path, keyed)
        elif now == _ANY:
            if was == _RECORD and any(_is_omitted(field) for _, field in one["fields"]):
                yield f"{path} (its fields that omit_defaults has left out)"
            for part in (*_keys(one), *_values(one)):
                yield from self.lost(part, other, path, keyed=keyed)
        elif now == _DICT:
            keys, values = other["dict"]
            if was in (_DICT, _ANY):
                yield from self.lost(one["dict"][0] if was == _DICT else one, keys, path, keyed=True)
            elif was == _RECORD and any(_is_omitted(field) for _, field in one["fields"]):
                yield f"{path} (its fields that omit_defaults has left out)"
            for value in _values(one):
                yield from self.lost(value, values, path, keyed=keyed)
        elif was == now == _TUPLE:
            for item, to in zip(one["tuple"], other["tuple"], strict=False):
                yield from self.lost(item, to, path, keyed=keyed)
        else:
            for value in _values(one):
                for to in _values(other):
                    yield from self.lost(value, to, path, keyed=keyed or "set" in other)

    def _in_record(self, one: Any, record: Any, path: str, keyed: bool) -> Iterator[str]:
        was, fields = _kind(one), dict(record["fields"])
        if was == _RECORD:
            names = [name for name, _ in one["fields"]]
            by_position = record.get("array") and (
                names != list(fields)[: len(names)] or (one.get("array") and ("tag" in one) != ("tag" in record))
            )
            if by_position:
                yield f"{path} (its fields are stored by position)"
                return
            for name, schema in one["fields"]:
                if name in fields:
                    if _is_omitted(schema) and not _is_same_default(schema, fields[name]):
                        yield f"{path}.{name} (its {schema['omitted']!r:.40} that omit_defaults has left out)"
                    yield from self.lost(schema, fields[name], f"{path}.{name}", keyed=keyed)
                elif keyed or not self._may_go(schema):
                    yield f"{path}.{name}"
        elif was == _TUPLE and len(one["tuple"]) <= len(fields):
            for item, (name, schema) in zip(one["tuple"], fields.items(), strict=False):
                yield from self.lost(item, schema, f"{path}.{name}", keyed=keyed)
        else:
            what = {_DICT: "keys", _ANY: "content"}.get(was, "items")
            yield f"{path} (its {what} beside {', '.join(fields) or 'nothing'})"

    def changed(self, value: Any, old: Any, new: Any, path: str) -> Iterator[str]:
        """See the function."""
        for one in _members(old, self._old):
            if not _may_be(value, one):
                continue
            for other in _members(new, self._new):
                if _may_be_read(one, other) and _kind(other) != _ANY:
                    yield from self._changed_between(value, one, other, path)

    def _changed_between(self, value: Any, one: Any, other: Any, path: str) -> Iterator[str]:
        """See `changed`; neither schema is a union, and *value* may be of *one*."""
        if _kind(one) == _kind(other) == _RECORD:
            yield from self._changed_in_record(value, one, dict(other["fields"]), path)
            return
        items = value.values() if isinstance(value, dict) else value
        for place, item in enumerate(items):
            for was in _values_at(one, place, value):
                for now in _values_at(other, place, value):
                    yield from self.changed(item, was, now, path)

    def _changed_in_record(self, value: Any, one: Any, now: dict[str, Any], path: str) -> Iterator[str]:
        was, tag = dict(one["fields"]), one.get("tag", (None,))[0]
        if isinstance(value, list):  # by position, where no field goes: a tag stands in front
            value = dict(zip(was, value[tag is not None :], strict=False))
        for name, content in value.items():
            if name in now:
                yield from self.changed(content, was[name], now[name], f"{path}.{name}") if name in was else ()
            elif name != tag and not (name in was and _is_equal(builtins_of(content), default_of(was[name]))):
                yield f"{path}.{name}"

    def unfit(self, old: Any, new: Any, path: str) -> Iterator[str]:
        """See the function."""
        old, new = _one(old, self._old), _one(new, self._new)
        was, now = _form(old), _form(new)
        array_alone = {was, now} == {"a list", "a record"} and _kind(old) == _kind(new) == _RECORD
        if was and now and was != now and (was, now) != ("int", "float") and not array_alone:
            yield f"{path} is {now} now, and was {was}"
            return
        if _kind(old) != _RECORD or _kind(new) != _RECORD or (id(old), id(new), False) in self._compared:
            return
        self._compared.add((id(old), id(new), False))
        fields = dict(old["fields"])
        for name, schema in new["fields"]:
            if _has_default(schema):
                yield from self.unfit(fields[name], schema, f"{path}.{name}") if name in fields else ()
            elif name not in fields:
                yield f"{path}.{name} is new and has no default"
            elif _has_default(fields[name]):  # values from before the field may lie beside newer ones
                yield f"{path}.{name} has lost its default"
            else:
                yield from self.unfit(fields[name], schema, f"{path}.{name}")


def _records(schema: Any) -> dict[str, list[Any]]:
    records = defaultdict[str, list[Any]](list)
    left = [schema]
    while left:
        schema = left.pop()
        if isinstance(schema, list):
            left += schema
        elif isinstance(schema, dict):
            if "fields" in schema:
                records[schema["record"]].append(schema)
                left += (of for _, of in schema["fields"])
            else:
                left += (of for form, of in schema.items() if form in ("optional", "union", *_KINDS))
    return records


def _members(schema: Any, records: dict[str, list[Any]]) -> list[Any]:
    """The alternatives of *schema*, without unions and references to records."""
    if not isinstance(schema, dict):
        return [schema]
    if "optional" in schema:
        return _members(schema["optional"], records)
    if "union" in schema:
        return [leaf for member in schema["union"] for leaf in _members(member, records)]
    if "record" in schema and "fields" not in schema:
        return records[schema["record"]]
    return [schema]


def _one(schema: Any, records: dict[str, list[Any]]) -> Any:
    """The only member of *schema*, else a schema without a form."""
    members = _members(schema, records)
    return members[0] if len(members) == 1 else {}


def _has_default(field: Any) -> bool:
    return isinstance(field, dict) and "optional" in field


def _is_omitted(field: Any) -> bool:
    """Whether the bytes omit the field if it has its default."""
    return isinstance(field, dict) and "omitted" in field


def _is_same_default(was: Any, now: Any) -> bool:
    """Whether the omitted default of *was* is that of *now*: a type that always writes its fields does not tell it."""
    return _is_omitted(now) and [type(was["omitted"]), was["omitted"]] == [type(now["omitted"]), now["omitted"]]


def _kind(schema: Any) -> str:
    if isinstance(schema, str):
        return _ANY if schema == "any" else ""
    return next((kind for form, kind in _KINDS.items() if form in schema), "")


def _not_told(one: Any, other: Any, keyed: bool) -> str:
    """The loss when scalar *one* is read as scalar *other*; else empty."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return ""
    if keyed and other in _MERGED.get(one, ()):
        return f"its keys or items that are the same {other}"
    return f"details of its texts that a {other} lacks" if one in _TEXTS and other in _TIMES else ""


def _may_be_read(one: Any, other: Any) -> bool:
    """Whether *other* may read *one*, and lose something. Records of either layout are compared: older schemas do not
    tell that a NamedTuple's fields are written by position."""
    was, now = _kind(one), _kind(other)
    if not now or not was:
        return False
    if now == _ANY:
        return was != _ANY
    if was == now == _RECORD:
        tags = one.get("tag"), other.get("tag")  # a field, and its value
        return None in tags or tags[0] == tags[1] or tags[0][0] != tags[1][0]
    return was == _ANY or _is_map(one) == _is_map(other)


def _is_map(schema: Any) -> bool:
    """Whether its values are maps in msgpack, and not arrays."""
    return _kind(schema) == _DICT or (_kind(schema) == _RECORD and not schema.get("array"))


def _values(schema: Any) -> list[Any]:
    """The schemas of the parts of a value, without the keys of a dict."""
    match _kind(schema):
        case "record":
            return [of for _, of in schema["fields"]]
        case "dict":
            return [schema["dict"][1]]
        case "tuple":
            return list(schema["tuple"])
        case "items":
            return [schema.get("list", schema.get("set"))]
    return ["any"]


def _keys(schema: Any) -> list[Any]:
    """The schema of the keys of a dict; else none."""
    return [schema["dict"][0]] if _kind(schema) == _DICT else []


def _values_at(schema: Any, place: int, value: Any) -> list[Any]:
    """The schemas of the item at *place* of *value*, which is of *schema*."""
    match _kind(schema):
        case "tuple":
            return list(schema["tuple"][place : place + 1])
        case "record":
            fields = dict(schema["fields"])
            if isinstance(value, dict):
                return [fields[name]] if (name := list(value)[place]) in fields else []
            return list(fields.values())[place : place + 1]
    return _values(schema)


def _may_be(value: Any, schema: Any) -> bool:
    """Whether *value*, from msgpack, may be one of *schema*, which is no union, and may hold records."""
    kind = _kind(schema)
    if kind in ("", _ANY):
        return False
    if not isinstance(value, dict if _is_map(schema) else list):
        return False
    if "tag" not in schema:
        return True
    field, tag = schema["tag"]
    return bool((value.get(field) if isinstance(value, dict) else next(iter(value), None)) == tag)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values in builtin types are equal; True is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _form(schema: Any) -> str:
    """The form of a schema's values, which reads no other; empty if it has several."""
    if isinstance(schema, str):
        return schema if schema in _PLAIN else ""
    if "record" in schema:
        return "a list" if schema.get("array") else "a record"
    return "a list" if _kind(schema) in (_ITEMS, _TUPLE) else ""
