"""The losses, and the gaps, where values of one schema are read by another one; schemas are `schema.describe`'s.

Invariant: whatever msgspec drops without a word is found by the schemas alone: fields that a record has no more, keys
of a dict that has become a record, items by position that have no place or another one, items that a set has once, keys
and items that a type does not tell apart, digits of a text that is read as a time, a default that the bytes leave out.
Integers that become floats are rounded, as by Avro's rules, unless they are keys. What msgspec refuses, decoding finds;
`unfit` knows some of it beforehand. A schema describes a record once and names it elsewhere; where two records of a
schema have one name, each of them is looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_PLAIN = {"bool", "int", "float", "str", "bytes"}
_RECORD, _DICT, _ITEMS, _TUPLE, _ANY = "record", "dict", "items", "tuple", "any"
_TIMES = {"datetime", "time", "timedelta"}
_TEXTS = {"str", "any"}
_MERGED = {"str": _TIMES | {"decimal", "uuid"}, "int": {"float"}, "any": _TIMES | {"decimal", "uuid", "float"}}
"""By scalar, those that read several of its values as one: "1.0" and "1.00", and integers beyond 2^53."""
_KINDS = {"record": _RECORD, "dict": _DICT, "list": _ITEMS, "set": _ITEMS, "tuple": _TUPLE}


def lost(old: Any, new: Any, path: str) -> list[str]:
    """Paths of what values of schema *old* have and *new* has no place for. All other differences decoding judges.

    >>> lost({"dict": ["str", "int"]}, {"record": "Total", "fields": [["sum", "int"]]}, "Total")
    ['Total (its keys beside sum)']
    """
    return list(dict.fromkeys(_Evolution(old, new).lost(old, new, path)))


def unfit(old: Any, new: Any, path: str) -> list[str]:
    """Fields of schema *new* that values of *old* surely do not fill. What else may not fit, decoding finds.

    >>> unfit({"record": "Total", "fields": []}, {"record": "Total", "fields": [["sum", "int"]]}, "Total")
    ['Total.sum is new and has no default']
    """
    return list(_Evolution(old, new).unfit(old, new, path))


class _Evolution:
    """From *old* to *new*."""

    def __init__(self, old: Any, new: Any) -> None:
        self._old, self._new = _records(old), _records(new)
        self._compared: set[tuple[int, int, bool]] = set()
        """Records, which may be within themselves; whether they are keys."""

    def lost(self, old: Any, new: Any, path: str, *, keyed: bool = False) -> Iterator[str]:
        """See the function. *keyed*: the values are keys of a dict or items of a set, or within such, of which those
        that are equal become one."""
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
                    yield f"{path} (its items that are there more than once)"
                yield from self._between(one, other, path, keyed)

    def _between(self, one: Any, other: Any, path: str, keyed: bool) -> Iterator[str]:
        """What is lost where *one* is read as *other*; neither is a union."""
        was, now = _kind(one), _kind(other)
        if now == _RECORD:
            if was == _RECORD and (id(one), id(other), keyed) in self._compared:
                return
            self._compared.add((id(one), id(other), keyed))
            yield from self._in_record(one, other, path, keyed)
        elif now == _DICT:
            keys, values = other["dict"]
            if was in (_DICT, _ANY):
                yield from self.lost(one["dict"][0] if was == _DICT else one, keys, path, keyed=True)
            elif was == _RECORD and any(_is_omitted(field) for _, field in one["fields"]):
                yield f"{path} (its fields that omit_defaults has left out)"
            for each in _values(one):
                yield from self.lost(each, values, path, keyed=keyed)
        elif was == now == _TUPLE:
            for each, to in zip(one["tuple"], other["tuple"], strict=False):
                yield from self.lost(each, to, path, keyed=keyed)
        else:
            for each in _values(one):
                for to in _values(other):
                    yield from self.lost(each, to, path, keyed=keyed or "set" in other)

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
                else:
                    yield f"{path}.{name}"
        elif was == _TUPLE and len(one["tuple"]) <= len(fields):
            for each, (name, schema) in zip(one["tuple"], fields.items(), strict=False):
                yield from self.lost(each, schema, f"{path}.{name}", keyed=keyed)
        else:
            what = {_DICT: "keys", _ANY: "content"}.get(was, "items")
            yield f"{path} (its {what} beside {', '.join(fields) or 'nothing'})"

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
            elif _has_default(fields[name]):  # values from before it was there may lie beside those that have it
                yield f"{path}.{name} has lost its default"
            else:
                yield from self.unfit(fields[name], schema, f"{path}.{name}")


def _records(schema: Any) -> dict[str, list[Any]]:
    """Every record that *schema* describes, by name."""
    found = defaultdict[str, list[Any]](list)
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            if "fields" in each:
                found[each["record"]].append(each)
                left += (of for _, of in each["fields"])
            else:
                left += (of for form, of in each.items() if form in ("optional", "union", *_KINDS))
    return found


def _members(schema: Any, records: dict[str, list[Any]]) -> list[Any]:
    """The schemas of which a value of *schema* has one: none is a union, or a record that is described elsewhere."""
    if not isinstance(schema, dict):
        return [schema]
    if "optional" in schema:
        return _members(schema["optional"], records)
    if "union" in schema:
        return [each for member in schema["union"] for each in _members(member, records)]
    if "record" in schema and "fields" not in schema:
        return records[schema["record"]]
    return [schema]


def _one(schema: Any, records: dict[str, list[Any]]) -> Any:
    """The only member of *schema*, or a schema that has no form."""
    members = _members(schema, records)
    return members[0] if len(members) == 1 else {}


def _has_default(field: Any) -> bool:
    return isinstance(field, dict) and "optional" in field


def _is_omitted(field: Any) -> bool:
    """Whether a value leaves the field out where it has its default."""
    return isinstance(field, dict) and "omitted" in field


def _is_same_default(was: Any, now: Any) -> bool:
    """Whether what *was* left out is read as it was, as far as the schemas tell: a type that always writes its fields
    does not say its defaults."""
    return _is_omitted(now) and [type(was["omitted"]), was["omitted"]] == [type(now["omitted"]), now["omitted"]]


def _kind(schema: Any) -> str:
    if isinstance(schema, str):
        return _ANY if schema == "any" else ""
    return next((kind for form, kind in _KINDS.items() if form in schema), "")


def _not_told(one: Any, other: Any, keyed: bool) -> str:
    """What scalar *other* does not say of scalar *one*; empty if nothing."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return ""
    if keyed and other in _MERGED.get(one, ()):
        return f"its keys or items that are the same {other}"
    return f"what its texts say that a {other} cannot" if one in _TEXTS and other in _TIMES else ""


def _may_be_read(one: Any, other: Any) -> bool:
    """Whether something of *one* may be lost in *other*. Records of either layout are compared: that a NamedTuple's
    fields are written by position, older schemas do not say."""
    was, now = _kind(one), _kind(other)
    if now in ("", _ANY) or not was:
        return False
    if was == now == _RECORD:
        tags = one.get("tag"), other.get("tag")  # a field, and its value
        return None in tags or tags[0] == tags[1] or tags[0][0] != tags[1][0]
    return was == _ANY or _is_map(one) == _is_map(other)


def _is_map(schema: Any) -> bool:
    """Whether msgpack has its values as a map, and not as an array."""
    return _kind(schema) == _DICT or (_kind(schema) == _RECORD and not schema.get("array"))


def _values(schema: Any) -> list[Any]:
    """The schemas of what a value of *schema* holds, without the keys of a dict."""
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


def _form(schema: Any) -> str:
    """The form of a schema's values, of which no other is read; empty where it has several."""
    if isinstance(schema, str):
        return schema if schema in _PLAIN else ""
    if "record" in schema:
        return "a list" if schema.get("array") else "a record"
    return "a list" if _kind(schema) in (_ITEMS, _TUPLE) else ""
