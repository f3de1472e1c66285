"""The values of changed rows as what the fields of the record's type take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from exactlyonce.connectors.changes import Part
from exactlyonce.connectors.mysql.binlog_rows import CODECS, Relation, Values
from exactlyonce.connectors.mysql.changes import MySQLChanges
from exactlyonce.connectors.mysql.table_rows import TAKEN, conversion_of
from exactlyonce.connectors.tables import Key, columns_of, field_problems
from exactlyonce.pipeline.changes import Change


def key_texts(values: Values, places: tuple[int, ...]) -> Key:
    """The key of a row, as text that the server takes for the same value."""
    return tuple([_key_text(values[place]) for place in places])


def _key_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex().upper()
    if isinstance(value, Decimal):
        return f"{value:f}"
    return value.isoformat(" ") if isinstance(value, datetime) else str(value)


def relation_problems(source: MySQLChanges[Any], relation: Relation) -> Iterator[str]:
    """The reasons why changes of *relation* are no records of *source*."""
    columns, bases = columns_of(source.value), {column.name: column.base for column in relation.columns}
    yield from field_problems(columns, bases, TAKEN)
    for name, field in columns.items():
        if name not in bases and not field.required:
            yield f"it has no column {name!r}, which the record's type has"
    for column in relation.columns:
        if column.name in columns and column.charset and column.charset not in CODECS:
            yield f"its column {column.name!r} has the character set {column.charset}: use utf8mb4, or leave it out"


class ChangeDecoder:
    """Makes records of the parts of one source."""

    def __init__(self, source: MySQLChanges[Any]) -> None:
        self._source, self._columns, self._key = source, columns_of(source.value), source.key_reader
        self._relation: Relation | None = None
        self._plan: list[tuple[str, int, Callable[[Any], Any] | None]] = []
        """Field, place and conversion of each value of a row of the relation."""

    def decode(self, part: Part) -> Change[Any]:
        """The record. Raises ValueError if a value does not fit its field."""
        change = part.change
        begin, relation = change.begin, change.relation
        if relation is not self._relation:
            self._relation, self._plan = relation, self._planned(relation)
        key = self._key(part.key) if part.key else None
        after = None if change.new is None else self._row(change.new)
        before = None if change.old is None else self._row(change.old)
        number = None if change.op == "read" else begin.number
        return Change(
            change.op, key, after, before, self._source.table, begin.timestamp_ms, begin.number, number
        )  # fmt: skip

    def _row(self, values: Values) -> Any:
        row = {
            name: values[place] if conversion is None or values[place] is None else conversion(values[place])
            for name, place, conversion in self._plan
        }
        return msgspec.convert(row, self._source.value, strict=False)

    def _planned(self, relation: Relation) -> list[tuple[str, int, Callable[[Any], Any] | None]]:
        places = {column.name: (place, column.base) for place, column in enumerate(relation.columns)}
        return [
            (name, places[name][0], conversion_of(field, places[name][1]))
            for name, field in self._columns.items()
            if name in places
        ]

    def key_of(self, part: Part) -> Key:
        return part.key

    def as_json(self, part: Part) -> bytes:
        """The row's values, by column, for a dead letter."""
        values = part.change.new or part.change.old or ()
        row = {column.name: value for column, value in zip(part.change.relation.columns, values, strict=False)}
        return msgspec.json.encode({"op": part.change.op, "row": row}, enc_hook=str)
