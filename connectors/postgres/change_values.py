"""The values of changed rows: texts of PostgreSQL as what the fields of the record's type take.

A row is an array of texts: one of the stream in the format of pgoutput, which differs from MessagePack in a few bytes,
one of a page in JSON. So msgspec reads all its values in one call, as the fields' types. A row that it does not take
that way is read text by text: that gives the record, or the error that names the column.
"""

from __future__ import annotations

import re
import struct
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from inspect import signature
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from psycopg.adapt import Transformer
from psycopg.postgres import types
from psycopg.pq import Format

from exactlyonce.connectors.changes import places_of
from exactlyonce.connectors.postgres.change_stream import Column, Relation, RowChange
from exactlyonce.connectors.postgres.changes import PostgresChanges
from exactlyonce.connectors.postgres.table_rows import TAKEN, TableInServer
from exactlyonce.connectors.tables import Key, columns_of, field_problems, forms_of
from exactlyonce.pipeline.changes import UNCHANGED, Change, Unchanged
from exactlyonce.pipeline.shape import Field, Form, shape_of

Texts = Sequence[str | Unchanged | None]
"""The values of a row. UNCHANGED: a large one that an update has left as it was, and that the server does not send."""

# --- rows -------------------------------------------------------------------------------------------------------------


def row_texts(row: bytes) -> Texts:
    """The texts of a row, of the stream or of a page.

    >>> row_texts(b"\\0\\2nt\\0\\0\\0\\3ann"), row_texts(b'[null,"ann"]')
    ([None, 'ann'], [None, 'ann'])
    """
    if row[0] == _PAGE:
        return _json_texts(row)
    return [UNCHANGED if text is True else text for text in _packed_texts(_packed(row))]


_json_texts: Callable[[bytes], list[str | None]] = msgspec.json.Decoder(list[str | None]).decode
_packed_texts: Callable[[bytes | bytearray], list[Any]] = msgspec.msgpack.Decoder(list[str | bool | None]).decode
_PAGE = 0x5B
"""The first byte of a row of a page, "["; one of the stream begins with the number of its values, which is smaller."""
_COUNT, _LENGTH = struct.Struct("!H").unpack_from, struct.Struct("!I").unpack_from
_SHORT, _SHORT_PACKED = b"t\0\0\0", b"\xd9"
"""Before the length of a text of less than 256 bytes, and the text: in the stream, and in MessagePack."""
_ARRAY_PACKED, _TEXT_PACKED, _NULL_PACKED, _TRUE_PACKED = b"\xdc", 0xDB, 0xC0, 0xC3


def _packed(row: bytes) -> bytearray:
    """A row of the stream as an array of MessagePack, which has the same count and lengths. True: a value was not sent.

    >>> msgspec.msgpack.decode(_packed(b"\\0\\3nut\\0\\0\\1\\0" + 256 * b"t")) == [None, True, 256 * "t"]
    True
    """
    patched, at = bytearray(_ARRAY_PACKED + row), 3
    for _ in range(_COUNT(row)[0]):
        kind = patched[at]
        if kind == 0x74:  # t: a text
            patched[at] = _TEXT_PACKED
            at += 5 + _LENGTH(patched, at + 1)[0]
        else:
            patched[at] = _NULL_PACKED if kind == 0x6E else _TRUE_PACKED  # n: NULL
            at += 1
    return patched


def rows_of_page(lines: bytes) -> list[bytes]:
    """The lines of a COPY in its text format, as arrays of JSON.

    >>> rows_of_page(b'1\\t"\\\\t"\\t\\\\N\\n2\\t\\x01\\\\v\\t\\\\\\\\N\\n')
    [b'["1","\\\\"\\\\t\\\\"",null]', b'["2","\\\\u0001\\\\u000b","\\\\\\\\N"]']
    """
    if not lines:
        return []
    if b"\\v" in lines or len(lines.translate(None, _CONTROLS)) < len(lines):
        lines = _NOT_IN_JSON.sub(_in_json, lines)
    texts = lines[:-1].replace(b'"', b'\\"').replace(b"\t", b'","').replace(b"\n", b'"]\n["')
    return (b'["' + texts + b'"]').replace(b'"\\N"', b"null").split(b"\n")


_CONTROLS = bytes(set(range(32)) - set(b"\t\n"))
_NOT_IN_JSON = re.compile(rb"\\.|[\x01-\x08\x0b-\x1f]")
"""An escape, which may be one that JSON does not have, or a control character, which COPY leaves as it is."""


def _in_json(match: re.Match[bytes]) -> bytes:
    found = match[0]
    if found == rb"\v":
        return rb"\u000b"
    return found if len(found) == 2 else b"\\u%04x" % found[0]


def key_texts(row: bytes, places: tuple[int, ...], old: bytes | None = None) -> Key:
    """The key of a row, as text. The *old* row has a large value that an update has left as it was."""
    texts = row_texts(row)
    if old is not None and UNCHANGED in texts:
        texts = [was if text is UNCHANGED else text for text, was in zip(texts, row_texts(old), strict=True)]
    return tuple([str(texts[place] or "") for place in places])


# --- relations --------------------------------------------------------------------------------------------------------

_TEXT_FORMS = {Form.STR, Form.ENUM, Form.LITERAL, Form.ANY}
"""The forms that the text of a type without a rule of its own may have."""


def columns_in(table: TableInServer) -> Relation:
    """The columns of a page's rows."""
    return Relation(table.oid, tuple(Column(name, _oid(base)) for name, base in table.bases.items()))


def _oid(base: str) -> int:
    known = types.get(base.removeprefix("_"))
    return 0 if known is None else known.array_oid if base.startswith("_") else known.oid


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


# --- columns ----------------------------------------------------------------------------------------------------------


class ReadColumn(NamedTuple):
    """A column that a field is read from."""

    place: int
    """In a row of the relation."""
    type: Any
    """What msgspec reads a text as."""
    finish: Callable[[Any], Any] | None
    """Makes the field's value of that, if it is not that."""
    is_final: bool
    """Whether it is the field's value then, unless that is refused; else it needs conversion."""
    read: Callable[[str], Any]
    """Makes a value for conversion of the text alone."""

    @classmethod
    def of(cls, place: int, base: str, field: Field) -> ReadColumn:
        """Of the type *base* in the catalogue."""
        read, members = _reader(base, field), field.shape.without_none
        form = members.form
        if form in _DIRECT.get(base, (Form.STR,)) and not members.is_constrained:
            type_ = _TYPES[form]
            return cls(place, type_ | None if field.shape.nullable else type_, None, True, read)
        if (finish := _FINISHED.get((base, form))) is not None and not members.is_constrained:
            return cls(place, str | None if field.shape.nullable else str, finish, True, read)
        return cls(place, str | None, None if read is str else read, False, read)


def _reader(base: str, field: Field) -> Callable[[str], Any]:
    """Makes of a text a value that can be converted to that of the field."""
    if base == "numeric":
        forms = forms_of(field)
        return str if Form.DECIMAL in forms else float if Form.FLOAT in forms else int
    if base in _ARRAYS and Form.LIST in forms_of(field):
        load = Transformer().get_loader(_oid(base), Format.TEXT).load
        return lambda text: load(text.encode())
    return _READS.get(base, str)


def _timestamp(text: str) -> str:
    return text.replace(" ", "T", 1)


def _zoned(text: str) -> str:
    """Of a time with its zone, whose minutes PostgreSQL leaves out where they are 0."""
    shown = _timestamp(text)
    return f"{shown}:00" if shown[-3:-2] in ("+", "-") else shown


def _interval(text: str) -> str:
    """
    >>> _interval("P1DT2H"), _interval("P-1DT-2H"), _interval("P1DT-2H")
    ('P1DT2H', '-P1DT2H', 'P1DT-2H')
    """
    is_negative = text.count("-") == len(_AMOUNTS.findall(text))
    return f"-{text.replace('-', '')}" if is_negative else text


_AMOUNTS = re.compile("[0-9.]+")


_is_true = "t".__eq__
_READS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("int2", "int4", "int8"), int),
    **dict.fromkeys(("float4", "float8"), float),
    "numeric": str,
    "bool": _is_true,
    **dict.fromkeys(("text", "varchar", "bpchar", "char", "name", "uuid", "date", "time"), str),
    "timestamp": _timestamp,
    **dict.fromkeys(("timestamptz", "timetz"), _zoned),
    "interval": _interval,
    "bytea": lambda text: b64encode(bytes.fromhex(text[2:])).decode(),
    **dict.fromkeys(("json", "jsonb"), msgspec.json.decode),
}
"""By type of a column: what reads a text. Bytes are in base64, times as in JSON."""
_ARRAYS = frozenset(
    f"_{base}" for base in ("int2", "int4", "int8", "float4", "float8", "bool", "text", "varchar", "bpchar", "uuid")
)
"""Arrays that psycopg reads, for fields of lists."""
_TYPES = {
    Form.INT: int, Form.FLOAT: float, Form.STR: str, Form.DECIMAL: Decimal, Form.UUID: UUID, Form.DATE: date,
    Form.TIME: time, Form.DATETIME: datetime, Form.TIMEDELTA: timedelta,
}  # fmt: skip
_DIRECT: Mapping[str, Collection[Form]] = {
    **dict.fromkeys(("int2", "int4", "int8"), (Form.INT, Form.FLOAT, Form.DECIMAL)),
    "numeric": (Form.DECIMAL,),
    "uuid": (Form.UUID, Form.STR),
    "date": (Form.DATE, Form.STR),
    "time": (Form.TIME, Form.STR),
    "timestamp": (Form.DATETIME,),
    **dict.fromkeys(("float4", "float8", "bool", "timestamptz", "timetz", "interval", "bytea", "json", "jsonb"), ()),
}
"""By type of a column: the forms of which msgspec reads a text as the value that it is by `_READS`."""
_FINISHED: Mapping[tuple[str, Form], Callable[[str], Any]] = {
    **dict.fromkeys([(base, Form.FLOAT) for base in ("float4", "float8", "numeric")], float),  # -0 is no int
    ("bool", Form.BOOL): _is_true,
    ("timestamptz", Form.DATETIME): lambda text: msgspec.convert(_zoned(text), datetime),
}
"""Likewise what makes it of a text."""

# --- records ----------------------------------------------------------------------------------------------------------


class ChangeDecoder:
    """Makes records of the changes of one source."""

    def __init__(self, source: PostgresChanges[Any]) -> None:
        self._source, self._table, self._key = source, source.table, source.key_reader
        self._reader: RowReader | None = None

    def decode(self, change: RowChange) -> Change[Any]:
        """The record. Raises ValueError if a value does not fit its field, or was not sent."""
        reader, begin, new, old = self._reader, change.begin, change.new, change.old
        key = after = before = None
        if new is None and old is None:  # a truncate, for which any columns will do
            return Change(change.op, key, after, before, self._table, begin.timestamp_ms, begin.lsn, begin.transaction)
        if reader is None or reader.relation is not change.relation:
            reader = self._reader = RowReader(self._source, change.relation)
        if new is not None:
            try:
                values = reader.values(new)
            except ValueError:
                after = reader.row_of_texts(new, old)
                key = self._key(key_texts(new, reader.key_places, old))
            else:
                make, place = reader.make, reader.key_place
                after = reader.converted(values) if make is None else make(*values)
                key = reader.key(values, new) if place is None else values[place]
        elif old is not None:
            key = self._key(key_texts(old, reader.key_places))
        if old is not None and change.relation.is_full and change.op != "insert":
            before = reader.row_of_texts(old, None)
        return Change(change.op, key, after, before, self._table, begin.timestamp_ms, begin.lsn, begin.transaction)

    def key_of(self, change: RowChange) -> Key:
        row, old = (change.old, None) if change.new is None else (change.new, change.old)
        if row is None:
            return ()
        names = [column.name for column in change.relation.columns]
        return key_texts(row, places_of(self._source.key_columns, names), old)

    def as_json(self, change: RowChange) -> bytes:
        """The texts of the row's values, by column, for a dead letter."""
        row = change.new or change.old
        texts = () if row is None else row_texts(row)
        shown = {
            column.name: text
            for column, text in zip(change.relation.columns, texts, strict=False)
            if text is not UNCHANGED
        }
        return msgspec.json.encode({"op": change.op, "row": shown})


class RowReader:
    """Makes the values and keys of *source* of rows with the columns of *relation*."""

    def __init__(self, source: PostgresChanges[Any], relation: Relation) -> None:
        self.relation = relation
        self._table, self._type, self._fields = source.table, source.value, columns_of(source.value)
        self._read_key = source.key_reader
        names = [column.name for column in relation.columns]
        self.key_places = places_of(source.key_columns, names)
        self._columns = {
            name: ReadColumn.of(names.index(name), _base(relation.columns[names.index(name)].oid), field)
            for name, field in self._fields.items()
            if name in names
        }
        """By field, in their order."""
        columns = list(self._columns.values())
        types = [self._columns[name].type if name in self._columns else msgspec.Raw for name in names]
        row_type: Any = tuple[tuple(types)]  # type: ignore[misc]  # at run time
        self._saved = 3 * len(names) - 1
        """The bytes that a row of short texts alone saves in MessagePack. No text has a byte 0: where as many short
        ones begin as there are values, there is nothing else."""
        self._from_stream = msgspec.msgpack.Decoder(row_type, strict=False).decode
        self._from_page = msgspec.json.Decoder(row_type, strict=False).decode
        places = [column.place for column in columns]
        self._choose = None if places == list(range(len(names))) else _chooser(places)
        self._finish = [(number, column.finish) for number, column in enumerate(columns) if column.finish is not None]
        self.make: Callable[..., Any] | None = None
        """Makes a row of `values`; None: they need conversion."""
        if len(columns) == len(self._fields) and all(column.is_final for column in columns):
            self.make = _maker(source.value)
        key = [self._columns[name] for name in source.key_columns]
        self._key_numbers: list[int] | None = None
        """The numbers of the key among `values`, if these have its texts."""
        if all(column.finish is None and column.type in (int, str) for column in key):
            self._key_numbers = [columns.index(column) for column in key]
        self.key_place = self._key_numbers[0] if self._key_numbers is not None and len(key) == 1 else None
        """The number of `Change.key` among them, if it is one."""

    def values(self, row: bytes) -> Sequence[Any]:
        """The values of the fields. Raises ValueError if a text is none, or there is none; `row_of_texts` says why, or
        can do with it."""
        values: Any
        if row[0] == _PAGE:
            values = self._from_page(row)
        else:
            packed = _ARRAY_PACKED + row.replace(_SHORT, _SHORT_PACKED)
            is_short = len(row) - len(packed) == self._saved
            values = self._from_stream(packed if is_short else _packed(row))
        if self._choose is not None:
            values = self._choose(values)
        if self._finish:
            values = list(values)
            for number, finish in self._finish:
                if values[number] is not None:
                    values[number] = finish(values[number])
        return values  # type: ignore[no-any-return]  # a tuple or a list

    def converted(self, values: Sequence[Any]) -> Any:
        """The row that *values* make. Raises ValueError if one does not fit its field."""
        return msgspec.convert(dict(zip(self._columns, values, strict=True)), self._type, str_keys=True)

    def row_of_texts(self, row: bytes, old: bytes | None) -> Any:
        """The same, text by text. The *old* row has a large value that an update has left as it was."""
        texts, old_texts = row_texts(row), None if old is None else row_texts(old)
        values: dict[str, Any] = {}
        for name, column in self._columns.items():
            text, place = texts[column.place], column.place
            if text is UNCHANGED:
                text = UNCHANGED if old_texts is None else old_texts[place]
                if text is UNCHANGED or not self.relation.columns[place].is_key:
                    if self._fields[name].may_be_unchanged:
                        continue
                    raise ValueError(
                        f"column {name!r} has a large value that the update left as it was, and the server does not "
                        f"send it: ALTER TABLE {self._table} REPLICA IDENTITY FULL, and read the table anew; or "
                        f"give the field UNCHANGED as its default"
                    )
            values[name] = None if text is None else column.read(text)
        return msgspec.convert(values, self._type, str_keys=True)

    def key(self, values: Sequence[Any], row: bytes) -> Any:
        """`Change.key` of a *row* with these `values`."""
        if self._key_numbers is None:
            return self._read_key(key_texts(row, self.key_places))
        return self._read_key([str(values[number]) for number in self._key_numbers])


def _chooser(places: Sequence[int]) -> Callable[[Any], Any]:
    """Gives of a row the values at *places*."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(*(slice(place, place + 1) for place in places))


def _maker(type_: Any) -> Callable[..., Any] | None:
    """Makes a row of its values in their order; None: *type_* is not made that way."""
    shape = shape_of(type_)
    by_place = shape.is_struct and all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in signature(shape.cls).parameters.values()
    )
    return shape.cls if by_place else None
