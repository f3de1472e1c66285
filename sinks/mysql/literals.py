r"""Values of columns as SQL literals, and rows of them.

Invariants: no literal has a backslash or a form feed, and a quote in it is doubled, so its meaning does not depend on
any sql_mode, and a form feed only ends a row. Texts with either, and all bytes, are written in hexadecimal. A literal
is UTF-8, the session's character set. A value that the column would change or refuse, as far as its type tells, is
refused here, with the field, the column, and the reason.

A row is ``(1,'a',NULL),`` and a form feed, which is white space in SQL: rows follow VALUES, without the last comma. For
a delete it is ``1,`` if the key is one column, and else ``(`a`=1 AND `b`='x'),``. A change is that of a delete without
the comma, a form feed, and the row, unless that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from exactlyonce.connectors.mysql.session import quoted
from exactlyonce.pipeline.codec import require_finite
from exactlyonce.pipeline.columns import RowField, kind_name
from exactlyonce.pipeline.shape import Form
from exactlyonce.sinks.mysql.table import MySQLColumn
from exactlyonce.sinks.sql.fields import ColumnTexts

ROW_END = ",\f"
YEAR_MIN = 1000
"""The first that the server promises to keep."""
TIMESTAMP_MIN = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
TIMESTAMP_MAX = datetime(2038, 1, 19, 3, 14, 7, 999_999, tzinfo=timezone.utc)
INTERVAL_MAX = timedelta(hours=838, minutes=59, seconds=59)
_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_CODECS = {"utf8mb3": "utf-8", "utf8": "utf-8", "latin1": "cp1252", "ascii": "ascii"}
_BMP_LAST = "\uffff"

Literal = Callable[[Any], str]


def column_literals(field: RowField, table: str, column: MySQLColumn, *, in_key: bool, depth_max: int) -> ColumnTexts:
    """The literals of one field for one column. *depth_max*: the server's limit for nested JSON."""
    literal = _literal_of(field.kind, column, depth_max)
    return ColumnTexts(
        field=field, table=table, type=column.type, nullable=column.nullable and not in_key, null="NULL",
        texts=lambda values: list(map(literal, values)),
    )  # fmt: skip


class MySQLRowEncoder:
    """Encodes records as rows of SQL; see `RowEncoder`."""

    def __init__(self, columns: Sequence[ColumnTexts], mark: str, template: str, bytes_max: int) -> None:
        """*mark*: see `mark_of`. *template*: see `values_template` and `key_template`. *bytes_max*: the limit of a
        row."""
        self._columns = columns
        self._template = mark + template + ROW_END
        self._bytes_max = bytes_max

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        literals = [column.encode(records) for column in self._columns]
        rows = [(self._template % values).encode() for values in zip(*literals, strict=True)]
        if rows and (longest := max(map(len, rows))) > self._bytes_max:
            raise ValueError(
                f"a row of {longest} bytes of SQL is longer than the {self._bytes_max} that max_allowed_packet leaves: "
                f"SET GLOBAL max_allowed_packet on the server, and in its configuration"
            )
        return rows


def mark_of(mode: str, key: Sequence[str], fields: Sequence[RowField], columns: Mapping[str, MySQLColumn]) -> str:
    """The comment before each row, equal only for rows of the same fields, mode and columns."""
    meanings = [(field.name, kind_name(field.kind), columns[field.name].meaning) for field in fields]
    return f"/*{sha256(msgspec.json.encode((mode, key, meanings))).hexdigest()[:8]}*/"


def newest_of(changes: bytes) -> tuple[bytes, bytes]:
    r"""The keys to delete, and the rows to insert, by the last of the *changes* of each key.

    >>> newest_of(b"1\f(1,'a'),\f2\f,\f1\f,\f3\f(3,'c'),\f")
    (b'1,\x0c2,\x0c', b"(3,'c'),\x0c")
    """
    end = ROW_END.encode()
    newest = dict([change.partition(b"\f")[::2] for change in changes.split(end)[:-1]])
    keys, rows = [key for key, row in newest.items() if not row], filter(None, newest.values())
    return b"".join([key + end for key in keys]), b"".join([row + end for row in rows])


def values_template(names: Sequence[str]) -> str:
    """A row to insert, with %s for the literals of these columns."""
    return f"({','.join(['%s'] * len(names))})"


def key_template(names: Sequence[str]) -> str:
    """The condition of a row to delete, with %s for the literals of these columns.

    It is no list of pairs: with `(a,b) IN ((..),(..))` MariaDB compares bytes of UTF-8 with those of a latin1 column,
    and finds no row, or another one.

    >>> key_template(["shop"]), key_template(["shop", "10%"])
    ('%s', '(`shop`=%s AND `10%%`=%s)')
    """
    if len(names) == 1:
        return "%s"
    escaped = [quoted(name).replace("%", "%%") for name in names]
    return f"({' AND '.join(f'{name}=%s' for name in escaped)})"


def _literal_of(kind: Form, column: MySQLColumn, depth_max: int) -> Literal:
    if kind is Form.UUID:
        return _UUIDS.get(column.data_type, _uuid_as_text)
    if kind is Form.DATETIME:
        return _timestamps(column) if column.data_type == "timestamp" else _datetimes(column)
    if kind in (Form.ANY, Form.LIST):
        return _documents(column, depth_max)
    if kind is Form.INT and column.data_type == "decimal":
        decimals = _decimals(column)
        return lambda value: decimals(Decimal(value))
    literals: dict[Form, Callable[[MySQLColumn], Literal]] = {
        Form.BOOL: lambda _: lambda value: "1" if value else "0",
        Form.INT: _integers,
        Form.FLOAT: _doubles,
        Form.STR: _texts,
        Form.BYTES: _binaries,
        Form.DECIMAL: _decimals,
        Form.DATE: lambda _: _date,
        Form.TIME: _times,
        Form.TIMEDELTA: _intervals,
    }
    return literals[kind](column)


def _integers(column: MySQLColumn) -> Literal:
    bits = _BITS[column.data_type]
    low, high = (0, (1 << bits) - 1) if column.unsigned else (-1 << (bits - 1), (1 << (bits - 1)) - 1)

    def literal(value: int) -> str:
        if low <= value <= high:
            return str(value)
        raise ValueError(f"it is outside of {low} to {high}")

    return literal


def _doubles(column: MySQLColumn) -> Literal:
    unsigned = column.unsigned

    def literal(value: float) -> str:
        if not math.isfinite(value):
            raise ValueError(f"it is {value}, which MySQL does not have")
        if unsigned and value < 0:
            raise ValueError("it is negative")
        text = repr(value)
        return text if "e" in text else f"{text}e0"  # without an exponent it would be a decimal

    return literal


def _decimals(column: MySQLColumn) -> Literal:
    scale = column.scale or 0
    whole = (column.digits or 0) - scale

    def literal(value: Decimal) -> str:
        if not value.is_finite():
            raise ValueError(f"it is {value}, which MySQL does not have")
        if not value:
            return "0"
        if value.adjusted() >= whole:
            raise ValueError(f"it has more than {whole} digits before the point")
        if column.unsigned and value < 0:
            raise ValueError("it is negative")
        text = format(value, "f") if value.adjusted() >= -scale else ""
        text = text.rstrip("0").rstrip(".") if "." in text else text
        if not text or len(text.partition(".")[2]) > scale:
            raise ValueError(f"it has more than {scale} digits after the point")
        return text

    return literal


def _quoted(text: str) -> str:
    if "\\" in text or "\f" in text:
        return f"_utf8mb4 X'{text.encode().hex()}'"
    return "'" + text.replace("'", "''") + "'"


def _texts(column: MySQLColumn) -> Literal:
    characters = column.characters_max
    octets = column.bytes_max if column.data_type.endswith("text") else None
    padded = column.data_type == "char"

    def literal(value: str) -> str:
        if characters is not None and len(value) > characters:
            raise ValueError(f"it has {len(value)} characters, and {characters} fit")
        if not value.isascii():
            _require_encodable(value, column.charset)
        if octets is not None and len(value) * 4 > octets and (size := len(value.encode())) > octets:
            raise ValueError(f"it has {size} bytes, and {octets} fit")
        if padded and value.endswith(" "):
            raise ValueError("it ends with a blank, which CHAR would drop: use VARCHAR")
        return _quoted(value)

    return literal


def _require_encodable(value: str, charset: str | None) -> None:
    try:
        value.encode()
        if charset in _CODECS:
            value.encode(_CODECS[charset])
    except UnicodeEncodeError as error:
        raise ValueError(f"{value[error.start]!r} is in it, which has no place in {charset or 'UTF-8'}") from None
    if charset in ("utf8mb3", "utf8") and (last := max(value)) > _BMP_LAST:
        raise ValueError(f"{last!r} is in it, which has no place in {charset}: use utf8mb4")


def _binaries(column: MySQLColumn) -> Literal:
    size, exact = column.bytes_max, column.data_type == "binary"

    def literal(value: bytes) -> str:
        if size is not None and (len(value) > size or (exact and len(value) != size)):
            raise ValueError(f"it has {len(value)} bytes, and {'exactly ' if exact else ''}{size} fit")
        return f"X'{value.hex()}'"

    return literal


def _uuid_as_text(value: UUID) -> str:
    return f"'{value}'"


def _uuid_as_bytes(value: UUID) -> str:
    return f"X'{value.hex}'"


def _uuid_of_mariadb(value: UUID) -> str:
    if value.bytes[6] & -value.bytes[8] & 0x80:  # MariaDB's rule, because of its byte order
        raise ValueError("it is of no variant that the type UUID takes: use CHAR(36)")
    return f"'{value}'"


_UUIDS: dict[str, Literal] = {"binary": _uuid_as_bytes, "uuid": _uuid_of_mariadb}


def _date(value: date) -> str:
    if value.year < YEAR_MIN:
        raise ValueError(f"it is before the year {YEAR_MIN}")
    return f"'{value.isoformat()}'"


def _require_fraction(microsecond: int, digits: int) -> None:
    if microsecond % 10 ** (6 - digits):
        raise ValueError(f"its fraction of a second has more than {digits} digits")


def _datetimes(column: MySQLColumn) -> Literal:
    digits = column.fraction or 0

    def literal(value: datetime) -> str:
        if value.tzinfo is not None:
            raise ValueError("it has a time zone, which DATETIME does not keep: use TIMESTAMP")
        if value.year < YEAR_MIN:
            raise ValueError(f"it is before the year {YEAR_MIN}")
        _require_fraction(value.microsecond, digits)
        return f"'{value.isoformat(' ')}'"

    return literal


def _timestamps(column: MySQLColumn) -> Literal:
    digits = column.fraction or 0

    def literal(value: datetime) -> str:
        if value.utcoffset() is None:
            raise ValueError("it has no time zone, and a TIMESTAMP is a moment: use DATETIME, or give it one")
        if not TIMESTAMP_MIN <= value <= TIMESTAMP_MAX:
            raise ValueError(f"it is outside of {TIMESTAMP_MIN} to {TIMESTAMP_MAX}")
        _require_fraction(value.microsecond, digits)
        return f"'{value.astimezone(timezone.utc).replace(tzinfo=None).isoformat(' ')}'"

    return literal


def _times(column: MySQLColumn) -> Literal:
    digits = column.fraction or 0

    def literal(value: time) -> str:
        if value.tzinfo is not None:
            raise ValueError("it has a time zone, which TIME does not keep")
        _require_fraction(value.microsecond, digits)
        return f"'{value.isoformat()}'"

    return literal


def _intervals(column: MySQLColumn) -> Literal:
    digits = column.fraction or 0

    def literal(value: timedelta) -> str:
        if abs(value) > INTERVAL_MAX:
            raise ValueError("it is longer than 838:59:59")
        _require_fraction(value.microseconds, digits)
        seconds, micros = divmod(abs(value) // timedelta(microseconds=1), 1_000_000)
        hours, minutes = divmod(seconds // 60, 60)
        return f"'{'-' if value < timedelta() else ''}{hours:02}:{minutes:02}:{seconds % 60:02}.{micros:06}'"

    return literal


_encode_json = msgspec.json.Encoder().encode


def _documents(column: MySQLColumn, depth_max: int) -> Literal:
    text = _texts(column)

    def literal(value: Any) -> str:
        encoded = _encode_json(value)
        require_finite(value, encoded)
        if encoded.count(b"[") + encoded.count(b"{") > depth_max and _depth(msgspec.json.decode(encoded)) > depth_max:
            raise ValueError(f"it is nested deeper than {depth_max} levels")
        return text(encoded.decode())

    return literal


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)
