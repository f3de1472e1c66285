"""The values of changed rows: texts of PostgreSQL as what the fields of the record's type take."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import msgspec
from psycopg.adapt import Transformer
from psycopg.postgres import types
from psycopg.pq import Format

from exactlyonce.connectors.changes import Part
from exactlyonce.connectors.postgres.change_stream import UNCHANGED, Column, Relation, Values
from exactlyonce.connectors.postgres.changes import PostgresChanges
from exactlyonce.connectors.postgres.table_rows import TAKEN, TableInServer
from exactlyonce.connectors.tables import Key, columns_of, field_problems, forms_of
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.shape import Field, Form, shape_of

_TEXT_FORMS = {Form.STR, Form.ENUM, Form.LITERAL, Form.ANY}
"""The forms that the text of a type without a rule of its own may have."""


def columns_in(table: TableInServer) -> Relation:
    """The columns of a page's rows."""
    return Relation(table.oid, tuple(Column(name, _oid(base)) for name, base in table.bases.items()))


def _oid(base: str) -> int:
    known = types.get(base.removeprefix("_"))
    return 0 if known is None else known.array_oid if base.startswith("_") else known.oid


def key_texts(values: Values, places: tuple[int, ...], old: Values | None = None) -> Key:
    """The key of a row, as text. The *old* row has a large value that an update has left as it was."""
    if old is not None and UNCHANGED in values:
        values = [was if value is UNCHANGED else value for value, was in zip(values, old, strict=True)]
    return tuple([(values[place] or b"").decode() for place in places])


def relation_problems(source: PostgresChanges[Any], relation: Relation) -> Iterator[str]:
    """The reasons why changes of *relation* are no records of *source*."""
    columns, bases = columns_of(source.value), {column.name: _base(column.oid) for column in relation.columns}
    yield from field_problems(columns, bases, TAKEN)
    for name, field in columns.items():
        if name not in bases:
            if not field.required:
                yield f"it has no column {name!r}, which the record's type has"
        elif bases[name] not in _READS and (forms := forms_of(field)) and not forms & _TEXT_FORMS:
            if bases[name] not in _ARRAYS:
                yield f"its column {name!r} is of a type that only a field of str takes"
            elif Form.LIST not in forms:
                yield f"its column {name!r} is an array, which only a field of list or str takes"


def _base(oid: int) -> str:
    """The name of a type in the catalogue, "_int4" of an array; empty of one that psycopg does not know."""
    known = types.get(oid)  # of an array's oid: the type of its elements
    return "" if known is None else known.name if known.oid == oid else f"_{known.name}"


class ChangeDecoder:
    """Makes records of the parts of one source."""

    def __init__(self, source: PostgresChanges[Any]) -> None:
        self._source, self._columns, self._key = source, columns_of(source.value), source.key_reader
        self._table = source.table
        self._relation: Relation | None = None
        self._plan: list[tuple[str, int, Callable[[bytes], Any]]] = []
        """Field, place and reader of each value of a row of the relation."""
        self._make: Callable[..., Any] | None = None
        """Makes a row of all values as they are read, in their order, if none is None; None: they need conversion."""

    def decode(self, part: Part) -> Change[Any]:
        """The record. Raises ValueError if a value does not fit its field, or was not sent."""
        change = part.change
        begin, relation, old = change.begin, change.relation, change.old
        key = self._key(part.key) if part.key else None
        after = None if change.new is None else self._row(change.new, relation, old)
        is_told = old is not None and relation.is_full and change.op != "insert"
        before = self._row(old, relation, None) if is_told else None
        return Change(change.op, key, after, before, self._table, begin.timestamp_ms, begin.lsn, begin.transaction)

    def _row(self, values: Values, relation: Relation, old: Values | None) -> Any:
        if relation is not self._relation:
            self._relation, self._plan = relation, self._planned(relation)
            self._make = self._maker()
        if self._make is not None and None not in values and UNCHANGED not in values:
            return self._make(*[read(values[place]) for _, place, read in self._plan])  # type: ignore[arg-type]  # as said
        row: dict[str, Any] = {}
        for name, place, read in self._plan:
            value = values[place]
            if value is UNCHANGED:
                value = UNCHANGED if old is None else old[place]
                if value is UNCHANGED or not relation.columns[place].is_key:
                    if self._columns[name].may_be_unchanged:
                        continue
                    raise ValueError(
                        f"column {name!r} has a large value that the update left as it was, and the server does not "
                        f"send it: ALTER TABLE {self._table} REPLICA IDENTITY FULL, and read the table anew; or "
                        f"give the field UNCHANGED as its default"
                    )
            row[name] = None if value is None else read(value)
        return msgspec.convert(row, self._source.value, str_keys=True)

    def _planned(self, relation: Relation) -> list[tuple[str, int, Callable[[bytes], Any]]]:
        places = {column.name: (place, _base(column.oid)) for place, column in enumerate(relation.columns)}
        return [
            (name, places[name][0], _reader(places[name][1], field))
            for name, field in self._columns.items()
            if name in places
        ]

    def _maker(self) -> Callable[..., Any] | None:
        fields = self._columns
        read = {name: _FORMS.get(read) for name, _, read in self._plan}
        if any(forms_of(field) != {read.get(name)} for name, field in fields.items()) or any(
            member.is_constrained for field in fields.values() for member in field.shape.members
        ):
            return None
        shape = shape_of(self._source.value)
        by_place = shape.is_struct and all(
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in signature(shape.cls).parameters.values()
        )
        return shape.cls if by_place else None

    def as_json(self, part: Part) -> bytes:
        """The texts of the row's values, by column, for a dead letter."""
        values = part.change.new or part.change.old or ()
        row = {
            column.name: None if value is None else value.decode()
            for column, value in zip(part.change.relation.columns, values, strict=False)
            if value is not UNCHANGED
        }
        return msgspec.json.encode({"op": part.change.op, "row": row})


def _reader(base: str, field: Field) -> Callable[[bytes], Any]:
    if base == "numeric":
        forms = forms_of(field)
        return bytes.decode if Form.DECIMAL in forms else float if Form.FLOAT in forms else int
    if base in _ARRAYS and Form.LIST in forms_of(field):
        return Transformer().get_loader(_oid(base), Format.TEXT).load
    return _READS.get(base, bytes.decode)


def _timestamp(text: bytes) -> str:
    return text.decode().replace(" ", "T", 1)


def _zoned(text: bytes) -> str:
    """Of a time with its zone, whose minutes PostgreSQL leaves out where they are 0."""
    shown = _timestamp(text)
    return f"{shown}:00" if shown[-3:-2] in ("+", "-") else shown


def _interval(text: bytes) -> str:
    """
    >>> _interval(b"P1DT2H"), _interval(b"P-1DT-2H"), _interval(b"P1DT-2H")
    ('P1DT2H', '-P1DT2H', 'P1DT-2H')
    """
    shown = text.decode()
    is_negative = shown.count("-") == len(_AMOUNTS.findall(shown))
    return f"-{shown.replace('-', '')}" if is_negative else shown


_AMOUNTS = re.compile("[0-9.]+")


def _is_true(text: bytes) -> bool:
    return text == b"t"


_FORMS = {int: Form.INT, float: Form.FLOAT, _is_true: Form.BOOL, bytes.decode: Form.STR}
"""By reader: the form of the values that it gives, where that is one."""
_READS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("int2", "int4", "int8"), int),
    **dict.fromkeys(("float4", "float8"), float),
    "numeric": bytes.decode,
    "bool": _is_true,
    **dict.fromkeys(("text", "varchar", "bpchar", "char", "name", "uuid", "date", "time"), bytes.decode),
    "timestamp": _timestamp,
    **dict.fromkeys(("timestamptz", "timetz"), _zoned),
    "interval": _interval,
    "bytea": lambda text: b64encode(bytes.fromhex(text[2:].decode())).decode(),
    **dict.fromkeys(("json", "jsonb"), msgspec.json.decode),
}
"""By type of a column: what reads a text. Bytes are in base64, times as in JSON."""
_ARRAYS = frozenset(
    f"_{base}" for base in ("int2", "int4", "int8", "float4", "float8", "bool", "text", "varchar", "bpchar", "uuid")
)
"""Arrays that psycopg reads, for fields of lists."""
