"""Records of a table as text for its columns, and changes of a table: such a record, or the key of one that is gone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import msgspec

from exactlyonce.pipeline.changes import Change, KeyForm
from exactlyonce.pipeline.columns import CLASSES, RowField, kind_name, shown
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.write_ahead.store import RowEncoder

Changes: TypeAlias = Sequence[Change[Any] | Record[Any]]
"""Rows by key, as a database captures them, or as the records of a topic or of a table are: the value None deletes."""


class ColumnTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Converts the values of a field to text for their column, in the language of a database."""

    field: RowField
    table: str
    """Shown in errors, as *type* is."""
    type: str
    nullable: bool
    null: str
    """The text of None."""
    texts: Callable[[list[Any]], Sequence[str]]
    """The texts of values, none of them None; ValueError or TypeError if the column would refuse or change one."""

    def encode(self, records: Sequence[Any]) -> Sequence[str]:
        """The text of each record's value."""
        where = f"(the column of table {self.table} is {self.type}{'' if self.nullable else ' NOT NULL'})"
        try:
            values = self.field.values(records)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{error} {where}") from None
        try:
            if None not in values:
                return self.texts(values) if values else []
            if not self.nullable:
                raise ValueError("None does not fit, for the column is NOT NULL")
            present = [value for value in values if value is not None]
            texts = iter(self.texts(present) if present else ())
            return [self.null if value is None else next(texts) for value in values]
        except (ValueError, TypeError, OverflowError) as error:  # OverflowError: a moment beyond the calendar
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{self.field.name}: {error} {where}") from None


class KeyColumns:
    """The columns of a table by which a sink finds its rows.

    Invariant: a key has the classes of its fields, whether it is of a row or of a change whose row is gone.
    """

    def __init__(self, fields: Sequence[RowField], key: Sequence[str]) -> None:
        by_name = {field.name: field for field in fields}
        self.fields = [by_name[name] for name in key]
        self._form = KeyForm([field.shape for field in self.fields])

    def of_rows(self, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The key of each row; `TypeError` for a value of another class."""
        return list(zip(*(field.values(rows) for field in self.fields), strict=True))

    def of_change(self, key: Any) -> tuple[Any, ...]:
        """The key of a change, of `Change.key` or `Record.key`; ValueError if it is none of these columns."""
        return tuple([
            value if type(value) is CLASSES[field.kind] else _from_text(value, field.kind, field.name)
            for value, field in zip(self._form.values(key), self.fields, strict=True)
        ])  # fmt: skip


class ChangedRows:
    """Tells changes apart: the rows that are there after them, and the keys whose rows are gone.

    Invariant: the key of a change is that of its row, so a delete finds the row that an insert has written.
    """

    def __init__(self, fields: Sequence[RowField], key: Sequence[str]) -> None:
        self._key = KeyColumns(fields, key)
        self._places = {name: place for place, name in enumerate(key)}

    def gone(self, field: RowField) -> RowField:
        """The *field* of a key that is gone: None unless it is of the key."""
        place = self._places.get(field.name)
        if place is None:
            return msgspec.structs.replace(field, get=lambda key: None, nullable=True)
        return msgspec.structs.replace(field, get=itemgetter(place))

    def parted(self, changes: Changes) -> tuple[list[Any], list[tuple[Any, ...]]]:
        """The rows, and the keys that are gone, each in their order. ValueError as of `keys`."""
        rows = [row for change in changes if (row := change.value) is not None]
        return rows, [key for key, change in zip(self.keys(changes), changes, strict=True) if change.value is None]

    def keys(self, changes: Changes) -> list[tuple[Any, ...]]:
        """The key of each change. ValueError for a truncate, and for a key that is not its row's."""
        keys = [self._key.of_change(change.key) for change in changes]
        rows = [change.value for change in changes]
        there = iter(self._key.of_rows([row for row in rows if row is not None]))
        for key, row in zip(keys, rows, strict=True):
            if row is not None and (own := next(there)) != key:
                names = ", ".join(field.name for field in self._key.fields)
                raise ValueError(
                    f"{names}: the row has {shown(own)}, and the change is of the key {shown(key)}: key= must name the "
                    f"columns of the source's key, in its order, and their fields must be of the columns' types"
                )
        return keys


_SHORT_OFFSET = re.compile(r"[+-]\d\d$")


def _from_text(text: Any, kind: Form, name: str) -> Any:
    """The value of a key's column of *text*, as a database writes it."""
    try:
        if kind is Form.BYTES:
            return bytes.fromhex(text.removeprefix("\\x"))
        if kind is Form.DATETIME and _SHORT_OFFSET.search(text, 11):
            text += ":00"
        return msgspec.convert(text, CLASSES[kind], strict=False)
    except (msgspec.ValidationError, ValueError, AttributeError, TypeError):
        raise ValueError(f"{name}: the change is of the key {shown(text)}, which is no {kind_name(kind)}") from None


class ChangeEncoder:
    """Encodes changes, each as a row by *rows*, or as a key that is gone by *keys*; see `RowEncoder`."""

    def __init__(self, changed: ChangedRows, rows: RowEncoder, keys: RowEncoder) -> None:
        self._changed, self._rows, self._keys = changed, rows, keys

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        rows, keys = self._changed.parted(records)
        written, deleted = iter(self._rows.encode(rows)), iter(self._keys.encode(keys))
        return [next(deleted if change.value is None else written) for change in records]
