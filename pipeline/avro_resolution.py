"""Avro's rules of resolution: whether one schema reads the values of another, from the schemas alone.

Invariant: without a problem here, fastavro reads every value, except non-UTF-8 bytes as a string. A rule of Avro that
fastavro lacks, or a default that no Python type takes, is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fastavro

_PROMOTED = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
_FILLED: dict[str, set[type]] = {
    "null": {type(None)},
    "boolean": {bool},
    "int": {int},
    "long": {int},
    "float": {int, float},
    "double": {int, float},
    "string": {str},
}
"""The Python types of JSON defaults, for the types that have the same values in both."""
_NAMED = {"record", "enum", "fixed"}
_LOGICAL = ("logicalType", "precision", "scale")


class AvroResolution:
    """The schema *read* against the schema *written*.

    >>> written = {"type": "record", "name": "Total", "fields": [{"name": "sum", "type": "string"}]}
    >>> read = {"type": "record", "name": "Total", "fields": [{"name": "sum", "type": "long"}]}
    >>> AvroResolution(written, read).problems
    ["field 'sum' was written as string and is read as long: register a migration"]
    """

    def __init__(self, written: Any, read: Any) -> None:
        self._written: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        pair = fastavro.parse_schema(written, self._written), fastavro.parse_schema(read, self._read)
        self._seen: set[tuple[str, str]] = set()
        self.problems = list(self._resolve(*pair, ""))
        """Each has the dotted path of a field, and the remedy."""

    def _resolve(self, written: Any, read: Any, path: str) -> Iterator[str]:
        if isinstance(written, list):
            for member in written:
                yield from self._resolve(member, read, path)
            return
        if isinstance(read, list):
            member = next((member for member in read if self._match(written, member)), None)
            if isinstance(written, dict) and isinstance(member, str) and member in self._read:
                yield f"{_at(path)} is a union with {member} by its name, which is defined elsewhere: define it there"
            elif member is not None:
                yield from self._resolve(written, member, path)
            else:
                yield _differs(path, written, read)
            return
        written, read = self._written.get(_key(written), written), self._read.get(_key(read), read)
        if _kind(written) in _NAMED and _kind(written) == _kind(read):
            if (both := (written["name"], read["name"])) in self._seen:
                return
            self._seen.add(both)
        kind, fits = _kind(written), self._match(written, read) and _logical(written) == _logical(read)
        if not fits or (kind in _NAMED and kind != _kind(read)):
            yield _differs(path, written, read)
        elif kind == "record":
            yield from self._fields(written, read, path)
        elif kind == "enum":
            yield from _symbols(written, read, path)
        elif kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            yield from self._resolve(written[inner], read[inner], path)

    def _match(self, written: Any, read: Any) -> bool:
        """Whether fastavro chooses *read* for *written* in a union: it compares names only."""
        if isinstance(written, list) or isinstance(read, list):
            return True
        written, read = self._written.get(_key(written), written), self._read.get(_key(read), read)
        was, now = _kind(written), _kind(read)
        if was in _NAMED and now in _NAMED:
            name, aliases = _simple(written["name"]), read.get("aliases", [])
            same = name == _simple(read["name"]) or name in aliases or written["name"] in aliases
            return same and (was != "fixed" or now != "fixed" or written["size"] == read["size"])
        if was == now == "array":
            return self._match(written["items"], read["items"])
        if was == now == "map":
            return self._match(written["values"], read["values"])
        return was == now or now in _PROMOTED.get(was, ())

    def _fields(self, written: Any, read: Any, path: str) -> Iterator[str]:
        places = {alias: field for field in read["fields"] for alias in field.get("aliases", [])}
        places |= {field["name"]: field for field in read["fields"]}
        filled: dict[str, str] = {}
        for field in written["fields"]:
            if (place := places.get(field["name"])) is None:
                continue
            name, inner = place["name"], _join(path, place["name"])
            if name in filled:
                yield f"{_at(inner)} is filled by {filled[name]!r} and by {field['name']!r}: take an alias away"
            else:
                yield from self._resolve(field["type"], place["type"], inner)
            filled[name] = field["name"]
        for field in read["fields"]:
            if field["name"] not in filled:
                yield from self._default(field, _join(path, field["name"]))

    def _default(self, field: Any, path: str) -> Iterator[str]:
        if "default" not in field:
            yield f"{_at(path)} was not written: give it a default, or the old name as an alias"
        elif not self._fillable(field["type"], field["default"]):
            yield f"{_at(path)} was not written, and a default of its kind is not filled in: register a migration"

    def _fillable(self, schema: Any, default: Any) -> bool:
        """Whether *default*, which fastavro fills in as JSON, is a complete value of the schema, or of any member of a
        union."""
        if isinstance(schema, list):
            return any(self._fillable(member, default) for member in schema)
        schema = self._read.get(_key(schema), schema)
        if _logical(schema):
            return False
        match _kind(schema):
            case "record":
                return isinstance(default, dict) and all(
                    field["name"] in default and self._fillable(field["type"], default[field["name"]])
                    for field in schema["fields"]
                )
            case "array":
                return isinstance(default, list) and all(self._fillable(schema["items"], item) for item in default)
            case "map":
                return isinstance(default, dict) and all(
                    self._fillable(schema["values"], value) for value in default.values()
                )
            case "enum":
                return default in schema["symbols"]
            case kind:
                return type(default) in _FILLED.get(kind, set())


def _key(schema: Any) -> str:
    """The name in a reference by name, else empty."""
    return schema if isinstance(schema, str) else ""


def _kind(schema: Any) -> str:
    kind: str = schema["type"] if isinstance(schema, dict) else schema
    return "record" if kind == "error" else kind


def _logical(schema: Any) -> list[Any]:
    attributes = [schema.get(name) for name in _LOGICAL] if isinstance(schema, dict) else []
    return attributes if any(attributes) else []


def _simple(name: str) -> str:
    return name.rpartition(".")[2]


def _symbols(written: Any, read: Any, path: str) -> Iterator[str]:
    lost = [symbol for symbol in written["symbols"] if symbol not in read["symbols"]]
    if lost and not read.get("default"):
        yield f"{_at(path)} was written with the symbols {', '.join(lost)}, which are gone: give the enum a default"


def _differs(path: str, written: Any, read: Any) -> str:
    return f"{_at(path)} was written as {_text(written)} and is read as {_text(read)}: register a migration"


def _text(schema: Any) -> str:
    """A schema in a word or two."""
    if isinstance(schema, list):
        return " or ".join(map(_text, schema))
    kind = _kind(schema)
    if kind in _NAMED and isinstance(schema, dict):
        size = f" of {schema['size']} bytes" if kind == "fixed" else ""
        return f"{kind} {schema['name']}{size}"
    if kind in ("array", "map"):
        return f"{kind} of {_text(schema['items' if kind == 'array' else 'values'])}"
    return " ".join([kind, *(f"{attribute}" for attribute in _logical(schema) if attribute is not None)])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str) -> str:
    return f"field {path!r}" if path else "the value"
