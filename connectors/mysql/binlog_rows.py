"""The rows of binlog events: the columns of a table as the log describes them, and their values.

Invariant: a value is the one that a SELECT by PyMySQL gives, so that a page and a change of one row are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from exactlyonce.pipeline.errors import ConfigError

Values = tuple[Any, ...]
Reads = Callable[[bytes, int], tuple[Any, int]]
"""Reads a value in an event from a place on, and gives where the next one begins."""
CODECS = {
    **dict.fromkeys(("utf8mb4", "utf8mb3", "utf8"), "utf-8"), "ascii": "ascii", "latin1": "cp1252",
    **dict.fromkeys(("ucs2", "utf16"), "utf-16-be"), "utf16le": "utf-16-le", "utf32": "utf-32-be", "binary": "",
}  # fmt: skip
"""By character set: Python's codec."""


class Column(NamedTuple):
    """A column as the log describes it."""

    name: str
    base: str
    """Its type, without length: texts of any length are "text", bytes "blob"."""
    charset: str
    code: int
    meta: int
    is_unsigned: bool
    members: tuple[str, ...] = ()
    """Of an ENUM or a SET."""


class Relation(NamedTuple):
    """The columns of a table from the next change on."""

    table: tuple[str, str]
    columns: tuple[Column, ...]


class Code(IntEnum):
    """A type of a column, by MySQL's name: its `enum_field_types`."""

    TINY = 1
    SHORT = 2
    LONG = 3
    FLOAT = 4
    DOUBLE = 5
    LONGLONG = 8
    INT24 = 9
    DATE = 10
    YEAR = 13
    VARCHAR = 15
    BIT = 16
    TIMESTAMP2 = 17
    DATETIME2 = 18
    TIME2 = 19
    BLOB_COMPRESSED = 140
    """MariaDB's own, as the next."""
    VARCHAR_COMPRESSED = 141
    NEWDECIMAL = 246
    ENUM = 247
    SET = 248
    BLOB = 252
    STRING = 254
    GEOMETRY = 255


class Metadata(IntEnum):
    """A field of the description that binlog_row_metadata=FULL adds, by MySQL's name."""

    SIGNEDNESS = 1
    DEFAULT_CHARSET = 2
    COLUMN_CHARSET = 3
    COLUMN_NAME = 4
    SET_STR_VALUE = 5
    ENUM_STR_VALUE = 6
    ENUM_AND_SET_DEFAULT_CHARSET = 10
    ENUM_AND_SET_COLUMN_CHARSET = 11


_INTEGERS: Mapping[int, tuple[str, str]] = {
    Code.TINY: ("tinyint", "b"), Code.SHORT: ("smallint", "h"), Code.LONG: ("int", "i"), Code.LONGLONG: ("bigint", "q"),
}  # fmt: skip
_BASES: Mapping[int, str] = {
    **{code: name for code, (name, _) in _INTEGERS.items()},
    Code.INT24: "mediumint", Code.FLOAT: "float", Code.DOUBLE: "double", Code.YEAR: "year", Code.BIT: "bit",
    Code.NEWDECIMAL: "decimal", Code.ENUM: "enum", Code.SET: "set", Code.DATE: "date", Code.TIMESTAMP2: "timestamp",
    Code.DATETIME2: "datetime", Code.TIME2: "time",
}  # fmt: skip
_TEXTS: Mapping[int, tuple[str, str]] = {
    Code.STRING: ("char", "binary"), Code.VARCHAR: ("varchar", "varbinary"), Code.BLOB: ("text", "blob"),
}  # fmt: skip
"""By code: the names with and without a character set."""
_WITH_CHARSET = frozenset((*_TEXTS, Code.GEOMETRY, Code.BLOB_COMPRESSED, Code.VARCHAR_COMPRESSED))
_META_BYTES: Mapping[int, int] = {
    **dict.fromkeys((Code.FLOAT, Code.DOUBLE, Code.BLOB, Code.BLOB_COMPRESSED, Code.GEOMETRY), 1),
    **dict.fromkeys((Code.TIMESTAMP2, Code.DATETIME2, Code.TIME2), 1),
    **dict.fromkeys((Code.VARCHAR, Code.VARCHAR_COMPRESSED, Code.BIT, Code.NEWDECIMAL), 2),
    **dict.fromkeys((Code.STRING, Code.ENUM, Code.SET), 2),
}


def counted(data: bytes, at: int) -> tuple[int, int]:
    """A number of MySQL's protocol in *data*, and where it ends."""
    if (first := data[at]) < 251:
        return first, at + 1
    width = {252: 2, 253: 3, 254: 8}[first]
    return int.from_bytes(data[at + 1 : at + 1 + width], "little"), at + 1 + width


def _numbers(data: bytes) -> list[int]:
    numbers, at = list[int](), 0
    while at < len(data):
        number, at = counted(data, at)
        numbers.append(number)
    return numbers


def _strings(data: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    strings = list[bytes]()
    for _ in range(count):
        length, at = counted(data, at)
        strings.append(data[at : at + length])
        at += length
    return strings, at


def relation_of(table: tuple[str, str], body: bytes, charsets: Mapping[int, str]) -> Relation:
    """The relation that a table map describes from its count of columns on; *charsets*: by collation."""
    count, at = counted(body, 0)
    codes = list(body[at : (at := at + count)])
    length, at = counted(body, at)
    metas, codes = _metas(codes, body[at : at + length])
    at += length + (count + 7) // 8
    fields: dict[int, bytes] = {}
    while at < len(body):
        field = body[at]
        length, at = counted(body, at + 1)
        fields[field] = body[at : (at := at + length)]
    if Metadata.COLUMN_NAME not in fields:
        raise ConfigError(
            f"The changes of {'.'.join(table)} are in the binlog without the names of columns: "
            f"SET GLOBAL binlog_row_metadata = FULL"
        )
    names, _ = _strings(fields[Metadata.COLUMN_NAME], 0, count)
    numeric = [place for place, code in enumerate(codes) if code in _NUMERIC]
    signs = fields.get(Metadata.SIGNEDNESS, b"")
    unsigned = {place for bit, place in enumerate(numeric) if signs[bit // 8] & (0x80 >> bit % 8)}
    texts = [place for place, code in enumerate(codes) if code in _WITH_CHARSET]
    listed = [place for place, code in enumerate(codes) if code in (Code.ENUM, Code.SET)]
    collations = _collations(fields, Metadata.DEFAULT_CHARSET, Metadata.COLUMN_CHARSET, texts)
    collations |= _collations(
        fields, Metadata.ENUM_AND_SET_DEFAULT_CHARSET, Metadata.ENUM_AND_SET_COLUMN_CHARSET, listed
    )
    members = _members(fields, codes)
    columns = []
    for place, code in enumerate(codes):
        charset = charsets.get(collations.get(place, 0), "")
        base = _BASES.get(code) or _TEXTS.get(code, (f"type {code}",) * 2)[charset == "binary"]
        codec = CODECS.get(charset) or "latin-1"
        columns.append(
            Column(
                names[place].decode(), base, charset, code, metas[place], place in unsigned,
                tuple(member.decode(codec, "replace") for member in members.get(place, ())),
            )
        )  # fmt: skip
    return Relation(table, tuple(columns))


_NUMERIC = frozenset((*_INTEGERS, Code.INT24, Code.FLOAT, Code.DOUBLE, Code.YEAR, Code.NEWDECIMAL))


def _metas(codes: list[int], data: bytes) -> tuple[list[int], list[int]]:
    """What the log notes of each type, and the real types: ENUM and SET are noted as strings."""
    metas, at = list[int](), 0
    for place, code in enumerate(codes):
        width = _META_BYTES.get(code, 0)
        first, second = data[at] if width else 0, data[at + 1] if width > 1 else 0
        at += width
        if code == Code.STRING and first in (Code.ENUM, Code.SET):
            codes[place] = first
            metas.append(second)
        elif code == Code.STRING:  # the upper bits of a length above 255 are in the type
            metas.append(second | ((first & 0x30) ^ 0x30) << 4)
        elif code in (Code.NEWDECIMAL, Code.BIT):
            metas.append(first << 8 | second)
        else:
            metas.append(first | second << 8)
    return metas, codes


def _collations(fields: Mapping[int, bytes], default: int, all_: int, places: Sequence[int]) -> dict[int, int]:
    if all_ in fields:
        return dict(zip(places, _numbers(fields[all_]), strict=True))
    if default not in fields:
        return {}
    first, *pairs = _numbers(fields[default])
    others = {places[number]: collation for number, collation in zip(pairs[::2], pairs[1::2], strict=True)}
    return {place: others.get(place, first) for place in places}


def _members(fields: Mapping[int, bytes], codes: Sequence[int]) -> dict[int, list[bytes]]:
    members: dict[int, list[bytes]] = {}
    for code, field in ((Code.SET, Metadata.SET_STR_VALUE), (Code.ENUM, Metadata.ENUM_STR_VALUE)):
        at = 0
        for place in (place for place, other in enumerate(codes) if other == code):
            count, at = counted(fields[field], at)
            members[place], at = _strings(fields[field], at, count)
    return members


@lru_cache(maxsize=64)
def row_reader(relation: Relation) -> Callable[[bytes, int], tuple[Values, int]]:
    """Reads a row. Raises ConfigError for a column whose values cannot be told."""
    readers = [_reader(column, relation.table) for column in relation.columns]
    width = (len(readers) + 7) // 8

    def read(data: bytes, at: int) -> tuple[Values, int]:
        nulls = int.from_bytes(data[at : at + width], "little")
        at += width
        values: list[Any] = []
        for reads in readers:
            if nulls & 1:
                values.append(None)
            else:
                value, at = reads(data, at)
                values.append(value)
            nulls >>= 1
        return tuple(values), at

    return read


def _reader(column: Column, table: tuple[str, str]) -> Reads:
    code, meta = column.code, column.meta
    if code in _INTEGERS:
        form = _INTEGERS[code][1]
        return _fixed(form.upper() if column.is_unsigned else form)
    match code:
        case Code.INT24:
            return _whole(3, lambda data: int.from_bytes(data, "little", signed=not column.is_unsigned))
        case Code.FLOAT:
            return _fixed("f")
        case Code.DOUBLE:
            return _fixed("d")
        case Code.YEAR:
            return _whole(1, lambda data: data[0] + 1900 if data[0] else 0)
        case Code.BIT:
            return _whole((meta & 0xFF) + (1 if meta >> 8 else 0), bytes)
        case Code.NEWDECIMAL:
            return _decimal(meta >> 8, meta & 0xFF)
        case Code.ENUM:
            return _whole(meta, lambda data: ("", *column.members)[int.from_bytes(data, "little")])
        case Code.SET:
            return _whole(meta, lambda data: _set(int.from_bytes(data, "little"), column.members))
        case Code.DATE:
            return _whole(3, _date)
        case Code.TIMESTAMP2:
            return _whole(4 + (meta + 1) // 2, _timestamp)
        case Code.DATETIME2:
            return _whole(5 + (meta + 1) // 2, _datetime)
        case Code.TIME2:
            return _whole(3 + (meta + 1) // 2, _time)
        case Code.STRING | Code.VARCHAR:
            return _text(2 if meta > 255 else 1, column, meta if code == Code.STRING else 0)
        case Code.BLOB | Code.GEOMETRY:
            return _text(meta, column, 0)
    raise ConfigError(
        f"Column {column.name!r} of {'.'.join(table)} is of a type that the binlog does not tell, {code}: times of "
        f"MariaDB before 10.1 are such until ALTER TABLE ... FORCE, and columns with COMPRESSED"
    )


def _fixed(form: str) -> Reads:
    packed = struct.Struct("<" + form)
    size, unpack = packed.size, packed.unpack_from
    return lambda data, at: (unpack(data, at)[0], at + size)


def _whole(size: int, convert: Callable[[bytes], Any]) -> Reads:
    return lambda data, at: (convert(data[at : at + size]), at + size)


def _text(width: int, column: Column, padded: int) -> Reads:
    """Bytes with their length before them. The log leaves out what fixed-length bytes end with, zeros."""
    codec, is_bytes = CODECS.get(column.charset, ""), column.charset in ("binary", "")
    padded = padded if is_bytes else 0

    def read(data: bytes, at: int) -> tuple[Any, int]:
        begin = at + width
        end = begin + int.from_bytes(data[at:begin], "little")
        value = data[begin:end]
        if padded:
            return value.ljust(padded, b"\0"), end
        return (as_text(value, codec) if codec else value), end

    return read


def as_text(value: bytes, codec: str) -> str | bytes:
    """The text; bytes that are none stay bytes, which no field takes."""
    try:
        return value.decode(codec)
    except UnicodeDecodeError:
        return value


def _set(bits: int, members: Sequence[str]) -> str:
    return ",".join(member for place, member in enumerate(members) if bits >> place & 1)


_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
"""The bytes of a number of up to nine digits."""


def _decimal(precision: int, scale: int) -> Reads:
    whole = precision - scale
    groups = [whole % 9, *[9] * (whole // 9)], [*[9] * (scale // 9), scale % 9]
    size = sum(_DIGIT_BYTES[digits] for group in groups for digits in group)

    def digits_of(data: bytes, at: int) -> Iterator[str]:
        for part, group in zip(("", "."), groups, strict=True):
            yield part
            for digits in group:
                if digits:
                    end = at + _DIGIT_BYTES[digits]
                    yield f"{int.from_bytes(data[at:end], 'big'):0{digits}d}"
                    at = end

    def convert(data: bytes) -> Decimal:
        is_negative = not data[0] & 0x80
        data = bytes((data[0] ^ 0x80, *data[1:]))
        if is_negative:
            data = bytes(byte ^ 0xFF for byte in data)
        return Decimal(("-" if is_negative else "") + "".join(digits_of(data, 0)).rstrip("."))

    return _whole(size, convert)


def _micros(data: bytes) -> int:
    """Microseconds: hundredths, ten-thousandths or millionths, by the count of bytes."""
    return int(int.from_bytes(data, "big") * 100 ** (3 - len(data)))


def _date(data: bytes) -> date | str:
    number = int.from_bytes(data, "little")
    year, month, day = number >> 9, number >> 5 & 15, number & 31
    return date(year, month, day) if year and month and day else f"{year:04}-{month:02}-{day:02}"


def _timestamp(data: bytes) -> datetime | str:
    seconds, micros = int.from_bytes(data[:4], "big"), _micros(data[4:])
    if not seconds and not micros:
        return "0000-00-00 00:00:00"
    return datetime(1970, 1, 1) + timedelta(seconds=seconds, microseconds=micros)


def _datetime(data: bytes) -> datetime | str:
    number, micros = int.from_bytes(data[:5], "big") - (1 << 39), _micros(data[5:])
    year, month = divmod(number >> 22, 13)
    parts = year, month, number >> 17 & 31, number >> 12 & 31, number >> 6 & 63, number & 63
    try:
        return datetime(*parts, micros)
    except ValueError:
        return "{:04}-{:02}-{:02} {:02}:{:02}:{:02}".format(*parts)


def _time(data: bytes) -> timedelta:
    number = int.from_bytes(data, "big") - (1 << 8 * len(data) - 1)
    sign, number = (-1, -number) if number < 0 else (1, number)
    fraction = 8 * (len(data) - 3)
    micros = (number & (1 << fraction) - 1) * 100 ** (6 - len(data)) if fraction else 0
    seconds = number >> fraction
    hours, minutes = seconds >> 12, seconds >> 6 & 63
    return sign * timedelta(hours=hours, minutes=minutes, seconds=seconds & 63, microseconds=micros)
